//! The kernel that every device runs, for every size of block and matrix.
//!
//! A cube takes a tile of 128 rows and columns, whatever the block size, and keeps it on chip between the search of the
//! maxima and the rounding. Its units hold *patches* of four rows and as many columns as 16 bytes of the input: a
//! plane of 32 reads four rows of 128 bytes at once, and four rows are what makes one word of the transposed copy. That
//! copy passes through shared memory as words, in chunks of 16 bytes that are permuted so that neither writing its rows
//! nor reading its columns meets in one bank.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use half::bf16;

use crate::{
    device::{
        MAX_CUBES, MatrixGeometry, MatrixView, array, cube_grid, has_planes_of_32, has_u64,
        or_unused, read_width_up_to, storage,
    },
    number::{Integer, int8::packed},
    philox::NEIGHBOURS,
    quantize::staged::{CHUNK, TILE, byte_dtype, byte_width, read_staged, stage_word},
    rounding::{RandomStream, Rounding, StochasticKey, random_stream},
    scale::{fp32::scale_and_inverse_cube, is_finite},
};

use super::{BlockOutput, Round, fallback_buffers};

mod held;
mod reduction;
mod rounding;
mod tile;

use held::{patch_max, read_patches, shared_slot};
use reduction::reduce_to_blocks;
use rounding::{Copies, Patch, residual_line, round_patch, write_line};
use tile::{
    BlockTile, LANES, PATCH_ROWS, PLANE, block_slot, column_slot, is_first_of_block,
    patch_position, tile_position,
};

/// Quantizes as [`launch`](super::launch) does.
///
/// # Safety
///
/// As there.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    block: usize,
    key: Option<StochasticKey>,
    output: &BlockOutput<R>,
) {
    let shape = view.shape;
    let vector = 16 / x.dtype.size();
    let (rows, cols) = (shape.rows.div_ceil(TILE), shape.cols.div_ceil(TILE));
    // Limits of a cube count along one dimension.
    let flat = shape.batch == 1 && rows.max(cols) <= MAX_CUBES;
    let copies = Copies {
        row_major: output.row_major.map(|(_, round)| round),
        transposed: output.transposed.map(|(_, round)| round),
        fallback: output.fallback.is_some(),
    };
    let read = read_width_up_to(vector, x, view);
    let hardware = &client.properties().hardware;
    let shared_bytes = TILE * TILE * x.dtype.size() + 4 * PLANE * LANES;
    let whole = read == vector && read <= hardware.max_vector_size;
    let looped =
        copies.any(Round::Stochastic) && whole && shared_bytes <= hardware.max_shared_memory_size;
    // Random numbers come for so many neighbours at once.
    let patch_cols = if looped { NEIGHBOURS } else { vector };
    // More units hide more of the latency of memory. To round elements of two bytes twice takes so many instructions
    // that small cubes, of which more fit on a multiprocessor together, are up to 8% faster.
    let small = looped && copies.any(Round::Nearest) && x.dtype.size() == 2;
    let tile = BlockTile {
        block,
        patch_cols,
        units: if small || hardware.max_units_per_cube < 512 {
            256
        } else {
            512
        },
        read,
        whole,
        bf16: x.dtype == storage::<bf16>(),
        write: (
            byte_width(shape.cols, patch_cols),
            byte_width(shape.rows, CHUNK),
        ),
        planes: has_planes_of_32(client),
        wide: has_u64(client),
        cuda: R::name(client) == "cuda",
        flat,
        inside: shape.rows % TILE == 0 && shape.cols % TILE == 0,
        looped,
    };
    let fallback = output.fallback.as_ref();
    let optional =
        |tensor: Option<&TensorHandle<R>>, dtype: StorageType| array(or_unused(tensor, x, dtype));
    let count = if flat {
        CubeCount::Static(cols as u32, rows as u32, 1)
    } else {
        cube_grid(shape.batch * rows * cols)
    };
    let [residual_values, residual_scales, flags, thresholds, counts] =
        fallback_buffers(fallback, x).map(array);
    // SAFETY: every access is guarded by the shapes in `geometry`, which by the caller's promise are those of the
    // outputs, or indexes the state of `layer`, which there is.
    unsafe {
        quantize_block_kernel::launch_unchecked::<R>(
            client,
            count,
            CubeDim::new_1d(tile.units as u32),
            tile.read,
            tile.write.0.div_ceil(4),
            tile.write.1.div_ceil(4),
            array(x.clone()),
            optional(output.row_major.map(|(tensor, _)| tensor), storage::<i8>()),
            optional(output.transposed.map(|(tensor, _)| tensor), storage::<i8>()),
            array(output.scales.clone()),
            residual_values,
            residual_scales,
            flags,
            thresholds,
            counts,
            fallback.map_or(0, |fallback| fallback.layer),
            view.geometry(),
            shape.batch as u32,
            random_stream(key.map_or(Rounding::Nearest, Rounding::Stochastic)),
            0,
            PATCH_ROWS as u32,
            tile,
            copies,
            x.dtype,
            byte_dtype(tile.write.0),
            byte_dtype(tile.write.1),
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_block_kernel<F: Numeric, NX: Size, V: Numeric, NV: Size, T: Numeric, NT: Size>(
    x: &Array<Vector<F, NX>>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    scales: &mut Array<f32>,
    residual_values: &mut Array<Vector<V, NV>>,
    residual_scales: &mut Array<f32>,
    flags: &mut Array<u32>,
    thresholds: &Array<f32>,
    counts: &mut Array<Atomic<i32>>,
    layer: u32,
    geometry: MatrixGeometry,
    batch_size: u32,
    random: RandomStream,
    zero: u32,
    runtime_lines: u32,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    let at = tile_position(&geometry, tile);
    if at.batch >= batch_size {
        terminate!();
    }
    // The rows of a patch: known to a compiler where it shall unroll their loops. Elsewhere it knows that there is one.
    let lines = if comptime!(tile.looped) {
        max(runtime_lines, 1u32)
    } else {
        comptime!(PATCH_ROWS as u32).runtime()
    };
    let mut held = read_patches::<F, NX>(x, &geometry, &at, tile, copies);
    let patches = comptime!(tile.patches());
    let mut maxima = Array::<u32>::new(patches);
    #[unroll]
    for patch in 0..patches {
        maxima[patch] = patch_max::<F, NX>(&held, patch, tile);
    }
    if comptime!(tile.looped) {
        #[unroll]
        for slot in 0..comptime!(tile.held()) {
            #[unroll]
            for word in 0..4usize {
                held.shared[shared_slot(slot, tile) + word] = held.words[slot][word];
            }
        }
    }
    reduce_to_blocks(&mut maxima, tile);

    // The words of the transposed copy.
    let mut columns = Array::<u32>::new(comptime!(tile.patches() * tile.patch_cols));
    let mut residual_maxima = Array::<u32>::new(patches);
    let of_base = patch_scales(&maxima, tile);
    #[unroll]
    for patch in 0..patches {
        let (tile_row, tile_col) = patch_position(comptime!(patch as u32), tile);
        let (row, col) = (at.row + tile_row, at.col + tile_col);
        let (scale, inverse) = (of_base.scales[patch], of_base.inverses[patch]);
        let falls_back = falls_back(maxima[patch], thresholds, layer, copies);
        let slot = block_slot(&geometry, &at, tile_row, tile_col, tile);
        let writes_scale = is_first_of_block(&geometry, row, col, tile);
        if writes_scale {
            scales[slot] = scale;
            if comptime!(copies.fallback) {
                flags[slot] = select(falls_back, 1u32, 0u32);
                if falls_back {
                    counts[(layer * 2) as usize].fetch_add(1i32);
                }
                if slot == 0 {
                    let blocks = batch_size
                        * geometry.rows.div_ceil(comptime!(tile.block as u32))
                        * geometry.cols.div_ceil(comptime!(tile.block as u32));
                    counts[(layer * 2 + 1) as usize].fetch_add(i32::cast_from(blocks));
                }
            }
        }

        // An inverse of 0 stands for "all values are 0", whatever the products with it are.
        let mask = select(inverse == 0.0, 0u32, 0xffff_ffffu32);
        let rounded = Patch {
            row,
            col,
            scale,
            inverse,
            mask,
        };
        #[unroll]
        for col in 0..tile.patch_cols {
            columns[column_slot(patch, col, tile)] = 0u32;
        }
        let mut largest = 0.0f32;
        // Rows that are rounded in a loop have one for blocks that fall back and one for the others.
        let loops = comptime!(if copies.fallback && tile.looped { 2 } else { 1 });
        #[unroll]
        for index in 0..loops {
            let with_residual = comptime!(copies.fallback && index == 0);
            let is_this = if comptime!(loops == 1) {
                true.runtime()
            } else if comptime!(with_residual) {
                falls_back
            } else {
                !falls_back
            };
            if is_this {
                largest = round_patch::<F, NX, V, NV>(
                    values,
                    &held,
                    &mut columns,
                    &rounded,
                    lines,
                    &geometry,
                    at.batch,
                    &random,
                    zero,
                    patch,
                    tile,
                    copies,
                    with_residual,
                );
            }
        }
        #[unroll]
        for col in 0..tile.patch_cols {
            let slot = column_slot(patch, col, tile);
            let stochastic = comptime!(copies.transposed == Some(Round::Stochastic));
            columns[slot] = packed(columns[slot], mask, stochastic);
        }

        residual_maxima[patch] = select(falls_back, u32::reinterpret(largest), 0u32);
    }
    if comptime!(copies.fallback) {
        // Units of a plane may branch together where the tile is one block.
        let skips = comptime!(tile.planes && tile.block == TILE);
        if !skips || falls_back(maxima[0], thresholds, layer, copies) {
            reduce_to_blocks(&mut residual_maxima, tile);
        }
        let of_residual = patch_scales(&residual_maxima, tile);
        #[unroll]
        for patch in 0..patches {
            let (tile_row, tile_col) = patch_position(comptime!(patch as u32), tile);
            let (row, col) = (at.row + tile_row, at.col + tile_col);
            let residual_inverse = of_residual.inverses[patch];
            if is_first_of_block(&geometry, row, col, tile) {
                let slot = block_slot(&geometry, &at, tile_row, tile_col, tile);
                residual_scales[slot] = of_residual.scales[patch];
            }
            if falls_back(maxima[patch], thresholds, layer, copies) {
                let (scale, inverse) = (of_base.scales[patch], of_base.inverses[patch]);
                let mask = select(residual_inverse == 0.0, 0u32, 0xffff_ffffu32);
                #[unroll(!tile.looped)]
                for line in 0..lines {
                    let words = residual_line::<F, NX>(
                        &held,
                        patch,
                        line,
                        scale,
                        inverse,
                        residual_inverse,
                        mask,
                        zero,
                        tile,
                    );
                    write_line::<V, NV>(
                        residual_values,
                        &words,
                        &geometry,
                        at.batch,
                        row + line,
                        col,
                        tile,
                    );
                }
            }
        }
    }

    if comptime!(copies.transposed.is_some()) {
        // Where the elements waited in shared memory, they make room: what is left of it caches what other cubes read.
        let mut staged = held.shared;
        if comptime!(tile.looped) {
            sync_cube();
        }
        #[unroll]
        for patch in 0..patches {
            let (tile_row, tile_col) = patch_position(comptime!(patch as u32), tile);
            #[unroll]
            for col in 0..tile.patch_cols {
                stage_word(
                    &mut staged,
                    columns[column_slot(patch, col, tile)],
                    tile_row / 4,
                    tile_col,
                    comptime!(col as u32),
                    tile.staged(),
                );
            }
        }
        sync_cube();
        read_staged::<T, NT>(
            transposed,
            &staged,
            geometry.rows,
            geometry.cols,
            at.batch,
            at.row,
            at.col,
            tile.staged(),
        );
    }
}

const LARGEST: f32 = Integer::INT8.largest() as f32;

/// Scales and inverse scales of the blocks of a unit's patches.
#[derive(CubeType)]
struct PatchScales {
    scales: Array<f32>,
    inverses: Array<f32>,
}

/// From the maxima of the blocks: one pair of divisions where the tile is one block.
#[cube]
fn patch_scales(maxima: &Array<u32>, #[comptime] tile: BlockTile) -> PatchScales {
    let patches = comptime!(tile.patches());
    let mut scales = Array::<f32>::new(patches);
    let mut inverses = Array::<f32>::new(patches);
    let different = comptime!(if tile.block == TILE { 1 } else { patches });
    #[unroll]
    for patch in 0..different {
        let (scale, inverse) = scale_and_inverse_cube(maxima[patch], LARGEST);
        scales[patch] = scale;
        inverses[patch] = inverse;
    }
    #[unroll]
    for patch in different..patches {
        scales[patch] = scales[0];
        inverses[patch] = inverses[0];
    }
    PatchScales { scales, inverses }
}

/// True where a block of this maximum falls back.
#[cube]
fn falls_back(
    absmax_bits: u32,
    thresholds: &Array<f32>,
    layer: u32,
    #[comptime] copies: Copies,
) -> bool {
    if comptime!(copies.fallback) {
        is_finite(absmax_bits) && f32::reinterpret(absmax_bits) > thresholds[layer as usize]
    } else {
        false.runtime()
    }
}
