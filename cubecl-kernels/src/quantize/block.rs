//! Quantization in square blocks: one read of the input, every output written once.
//!
//! A cube takes a tile of 128 rows and columns, whatever the block size, and keeps it on chip between the search of the
//! maxima and the rounding. Its units hold *patches* of four rows and as many columns as 16 bytes of the input: a
//! plane of 32 reads four rows of 128 bytes at once, and four rows are what makes one word of the transposed copy. That
//! copy passes through shared memory as words, in chunks of 16 bytes that are permuted so that neither writing its rows
//! nor reading its columns meets in one bank.
//!
//! The nearest copy, the stochastic copy and the residual come from the same elements, so a linear layer's input is
//! read once for its forward product, its fallback and its backward pass.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use half::bf16;

use crate::{
    device::{
        MAX_CUBES, MatrixGeometry, MatrixView, array, cube_grid, has_planes_of_32, has_u64,
        or_unused, read_width_up_to, storage,
    },
    exact,
    number::{
        Integer,
        int8::{packed, push_byte, stochastic_integer},
        integer::{integer_of, nearest_sum},
    },
    philox::NEIGHBOURS,
    rounding::{
        RandomStream, Rounding, StochasticKey, magnitude_bits, random_quad, random_stream,
        random_words, stochastic_offset,
    },
    scale::{fp32::scale_and_inverse_cube, is_finite},
};

use super::{
    staged::{
        CHUNK, StagedTile, TILE, byte_dtype, byte_width, read_staged, stage_word, write_words,
    },
    tile::TilePosition,
};

mod stochastic;

/// Units along the columns and the rows of a plane, and the rows of a unit's patch.
const LANES: usize = 8;
const PLANE: usize = 32;
const PATCH_ROWS: usize = 4;
/// Rows of the patches of a plane.
const PLANE_ROWS: usize = PLANE / LANES * PATCH_ROWS;
const LARGEST: f32 = Integer::INT8.largest() as f32;
const HIGH_HALF: u32 = 0xffff_0000;

/// How a copy is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Round {
    Nearest,
    Stochastic,
}

/// The copies that a launch writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Copies {
    row_major: Option<Round>,
    transposed: Option<Round>,
    fallback: bool,
}

impl Copies {
    fn any(&self, round: Round) -> bool {
        self.row_major == Some(round) || self.transposed == Some(round)
    }
}

/// The tensors of a fallback: the state of the layer, and what is written beside the base.
pub(crate) struct BlockFallback<'a, R: Runtime> {
    pub thresholds: &'a TensorHandle<R>,
    pub layer: u32,
    pub counts: &'a TensorHandle<R>,
    pub values: &'a TensorHandle<R>,
    pub scales: &'a TensorHandle<R>,
    pub flags: &'a TensorHandle<R>,
}

/// The residual's values and scales, flags, thresholds and counts; something that is not touched where there is no
/// fallback.
fn fallback_buffers<R: Runtime>(
    fallback: Option<&BlockFallback<R>>,
    unused: &TensorHandle<R>,
) -> [TensorHandle<R>; 5] {
    let buffer = |tensor, dtype| or_unused(tensor, unused, dtype);
    [
        buffer(fallback.map(|f| f.values), storage::<i8>()),
        buffer(fallback.map(|f| f.scales), storage::<f32>()),
        buffer(fallback.map(|f| f.flags), storage::<u32>()),
        buffer(fallback.map(|f| f.thresholds), storage::<f32>()),
        buffer(fallback.map(|f| f.counts), storage::<i32>()),
    ]
}

/// Where a launch writes, in the shapes of [`Quantized`](super::Quantized).
pub(crate) struct BlockOutput<'a, R: Runtime> {
    pub row_major: Option<(&'a TensorHandle<R>, Round)>,
    pub transposed: Option<(&'a TensorHandle<R>, Round)>,
    pub scales: &'a TensorHandle<R>,
    pub fallback: Option<BlockFallback<'a, R>>,
}

/// How the units of a cube share a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct BlockTile {
    block: usize,
    /// Columns of a unit's patch.
    patch_cols: usize,
    units: usize,
    /// Elements read at once, a divisor of `patch_cols`.
    read: usize,
    /// Whether what is read at once is four words to the device.
    whole: bool,
    /// Whether the elements are bf16, the upper halves of `f32`.
    bf16: bool,
    /// Bytes written at once to the row-major and to the transposed copy.
    write: (usize, usize),
    /// Whether units reduce with plane operations, on planes of 32.
    planes: bool,
    /// Whether the device multiplies to 64 bits.
    wide: bool,
    /// Whether the device divides with correct rounding and counts planes along the units, as CUDA does. Vulkan allows
    /// two units in the last place more, with which the products of the largest elements can leave the range of the
    /// integers.
    cuda: bool,
    /// Whether the cubes lie in a grid of the tiles of one matrix.
    flat: bool,
    /// Whether no tile reaches over the edge of a matrix.
    inside: bool,
    /// Whether the elements wait in shared memory, and the rows of a patch are rounded in a loop; see [`Held`].
    looped: bool,
}

impl BlockTile {
    /// Patches of a plane along the columns of the tile.
    const fn plane_cols(&self) -> usize {
        TILE / (LANES * self.patch_cols)
    }

    const fn planes_of_cube(&self) -> usize {
        self.units / PLANE
    }

    /// Patches that each unit holds.
    const fn patches(&self) -> usize {
        TILE * TILE / (PATCH_ROWS * self.patch_cols) / self.units
    }

    /// Vectors that each unit holds.
    const fn held(&self) -> usize {
        self.patches() * PATCH_ROWS * self.patch_cols / self.read
    }

    /// Units of a plane, along the columns, whose patches lie in one block.
    const fn lanes_of_block(&self) -> usize {
        let lanes = self.block / self.patch_cols;
        if lanes < LANES { lanes } else { LANES }
    }

    const fn staged(&self) -> StagedTile {
        StagedTile {
            patch_cols: self.patch_cols,
            units: self.units,
            write: self.write.1,
            inside: self.inside,
        }
    }
}

/// Quantizes `x` in blocks of `block`, a divisor of 128 of at least 16. Stochastic copies need a key. Whole tiles go
/// through a kernel of CUDA source where the device has it.
pub(crate) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    block: usize,
    key: Option<StochasticKey>,
    output: &BlockOutput<R>,
) {
    if stochastic::launch(client, x, view, block, key, output) {
        return;
    }
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
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated, or indexes the
    // state of `layer`, which was checked against its length.
    #[allow(unsafe_code)]
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

/// The place of a patch's column among the words of a unit's transposed copy.
#[cube]
fn column_slot(
    #[comptime] patch: usize,
    #[comptime] col: usize,
    #[comptime] tile: BlockTile,
) -> comptime_type!(usize) {
    comptime!(patch * tile.patch_cols + col)
}

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

/// Where a patch lies in its matrix, and how its block is rounded.
#[derive(CubeType, Clone, Copy)]
struct Patch {
    row: u32,
    col: u32,
    scale: f32,
    inverse: f32,
    /// Clears the integers of a block of zeros.
    mask: u32,
}

/// The words of the residual of a row of a patch.
#[cube]
#[allow(clippy::too_many_arguments)]
fn residual_line<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    line: u32,
    scale: f32,
    inverse: f32,
    residual_inverse: f32,
    mask: u32,
    zero: u32,
    #[comptime] tile: BlockTile,
) -> Array<u32> {
    let values = line_values::<F, N>(held, patch, line, tile);
    let mut words = Array::<u32>::new(comptime!(tile.patch_cols / 4));
    #[unroll]
    for quarter in 0..comptime!(tile.patch_cols / 4) {
        let mut word = 0u32;
        #[unroll]
        for lane in 0..4usize {
            let col = comptime!(quarter * 4 + 3 - lane);
            let value = values[col];
            let sum = nearest_sum(exact::product(value, inverse, zero));
            let rest = residual(value, sum, scale, zero);
            let product = exact::product(rest, residual_inverse, zero);
            word = push_byte(word, u32::reinterpret(nearest_sum(product)));
        }
        words[quarter] = packed(word, mask, false);
    }
    words
}

/// Rounds the rows of a patch: writes those of the row-major copy, while the integers of the transposed copy join those
/// of their columns. The largest magnitude of the residual, if that is asked for, else 0.
#[cube]
#[allow(clippy::too_many_arguments)]
fn round_patch<F: Numeric, N: Size, V: Numeric, NV: Size>(
    out: &mut Array<Vector<V, NV>>,
    held: &Held<F, N>,
    columns: &mut Array<u32>,
    of: &Patch,
    lines: u32,
    geometry: &MatrixGeometry,
    batch: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] patch: usize,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
    #[comptime] with_residual: bool,
) -> f32 {
    let mut largest = 0.0f32;
    #[unroll(!tile.looped)]
    for step in 0..lines {
        let line = lines - 1 - step;
        let row = batch * geometry.rows + of.row + line;
        let values = line_values::<F, N>(held, patch, line, tile);
        let random_words = line_words(row, of.col, random, tile, copies);
        let mut words = Array::<u32>::new(comptime!(tile.patch_cols / 4));
        #[unroll]
        for quarter in 0..comptime!(tile.patch_cols / 4) {
            let mut word = 0u32;
            #[unroll]
            for lane in 0..4usize {
                let col = comptime!(quarter * 4 + 3 - lane);
                let scaled = exact::product(values[col], of.inverse, zero);
                let sum = nearest_sum(scaled);
                let nearest = u32::reinterpret(sum);
                let mut stochastic = 0u32;
                if comptime!(copies.any(Round::Stochastic)) {
                    let offset = stochastic_offset(random_words[comptime!(col / 2)], zero, col);
                    let in_range = if comptime!(tile.cuda) {
                        scaled
                    } else {
                        clamp(scaled, -127.0f32, 127.0f32)
                    };
                    stochastic = stochastic_integer(in_range, offset);
                }
                if comptime!(copies.row_major == Some(Round::Stochastic)) {
                    word = push_byte(word, stochastic);
                } else {
                    word = push_byte(word, nearest);
                }
                let slot = column_slot(patch, col, tile);
                if comptime!(copies.transposed == Some(Round::Stochastic)) {
                    columns[slot] = push_byte(columns[slot], stochastic);
                } else {
                    columns[slot] = push_byte(columns[slot], nearest);
                }
                if comptime!(with_residual) {
                    let rest = residual(values[col], sum, of.scale, zero);
                    largest = max(largest, f32::abs(rest));
                }
            }
            words[quarter] = packed(
                word,
                of.mask,
                comptime!(copies.row_major == Some(Round::Stochastic)),
            );
        }
        if comptime!(copies.row_major.is_some()) {
            write_line::<V, NV>(out, &words, geometry, batch, of.row + line, of.col, tile);
        }
    }
    largest
}

/// The random words of a row of a patch, one for two neighbours; without a stochastic copy nothing that is read.
#[cube]
fn line_words(
    row: u32,
    first_col: u32,
    random: &RandomStream,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(tile.patch_cols / 2));
    if comptime!(copies.any(Round::Stochastic)) {
        if comptime!(tile.patch_cols == NEIGHBOURS) {
            let index = first_col / comptime!(NEIGHBOURS as u32);
            let (b0, b1, b2, b3) = random_words(row, index, random, tile.wide);
            words[0] = b0;
            words[1] = b1;
            words[2] = b2;
            words[3] = b3;
        } else {
            let (low, high) = random_quad(row, first_col, random, tile.wide);
            words[0] = low;
            words[1] = high;
        }
    }
    words
}

/// What the nearest integer of a finite block, of which this is the [`nearest_sum`], misses of a value.
#[cube]
fn residual(value: f32, sum: f32, scale: f32, zero: u32) -> f32 {
    value - exact::product(integer_of(sum, zero), scale, zero)
}

/// Whether a block of this maximum falls back.
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

#[cube]
fn tile_position(geometry: &MatrixGeometry, #[comptime] tile: BlockTile) -> TilePosition {
    let side = comptime!(TILE as u32);
    if comptime!(tile.flat) {
        TilePosition {
            batch: 0u32.runtime(),
            row: CUBE_POS_Y * side,
            col: CUBE_POS_X * side,
        }
    } else {
        let grid_cols = geometry.cols.div_ceil(side);
        let grid = geometry.rows.div_ceil(side) * grid_cols;
        let index = CUBE_POS as u32;
        let in_matrix = index % grid;
        TilePosition {
            batch: index / grid,
            row: in_matrix / grid_cols * side,
            col: in_matrix % grid_cols * side,
        }
    }
}

/// A unit's plane in the cube and its lane in the plane. Without plane operations any numbering will do. CUDA's planes
/// are known to be these; the built-in numbers cost it divisions by a size that its compiler does not know.
#[cube]
fn plane_and_lane(#[comptime] tile: BlockTile) -> (u32, u32) {
    if comptime!(tile.planes && !tile.cuda) {
        (PLANE_POS, UNIT_POS_PLANE)
    } else {
        let plane = comptime!(PLANE as u32);
        (UNIT_POS_X / plane, UNIT_POS_X % plane)
    }
}

/// First row and column, in the tile, of a unit's patch.
#[cube]
fn patch_position(#[comptime] patch: u32, #[comptime] tile: BlockTile) -> (u32, u32) {
    let (plane, lane) = plane_and_lane(tile);
    let lanes = comptime!(LANES as u32);
    let plane_cols = comptime!(tile.plane_cols() as u32);
    let plane_patch = plane + comptime!(patch * tile.planes_of_cube() as u32);
    let row = plane_patch / plane_cols * comptime!(PLANE_ROWS as u32)
        + lane / lanes * comptime!(PATCH_ROWS as u32);
    let col = (plane_patch % plane_cols * lanes + lane % lanes) * comptime!(tile.patch_cols as u32);
    (row, col)
}

/// 16 bytes.
type Words = Vector<u32, Const<4>>;

/// The elements of a cube: each unit's own, one vector after the other. Of the three only what a tile uses has a size.
///
/// Stochastic rounding takes so many registers that too few cubes would fit on a multiprocessor for some to round while
/// others read, if all elements were rounded side by side. There the elements wait in shared memory, where a loop
/// can index them, and the loop takes one row of a patch at a time; its length is an argument of the launch, so that no
/// compiler unrolls it. Elsewhere they stay in registers.
#[derive(CubeType)]
struct Held<F: Numeric, N: Size> {
    /// Vectors of less than a row of a patch.
    registers: Array<Vector<F, N>>,
    /// Rows of patches.
    words: Array<Words>,
    /// The same, and in the end the staged tile.
    shared: SharedMemory<u32>,
}

/// The first word of a unit's vector in [`Held`]'s shared memory, where it lies beside those of its neighbours.
#[cube]
fn shared_slot(slot: usize, #[comptime] tile: BlockTile) -> usize {
    (slot * tile.units + UNIT_POS_X as usize) * 4
}

/// All elements that this unit holds, in registers; 0 outside the matrix.
#[cube]
fn read_patches<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    at: &TilePosition,
    #[comptime] tile: BlockTile,
    #[comptime] copies: Copies,
) -> Held<F, N> {
    let pieces = comptime!(tile.patch_cols / tile.read);
    let width = comptime!(tile.read as u32);
    let (of_words, of_registers) = comptime!(if tile.whole {
        (tile.held(), 1)
    } else {
        (1, tile.held())
    });
    let mut registers = Array::<Vector<F, N>>::new(of_registers);
    let mut words = Array::<Words>::new(of_words);
    #[unroll]
    for patch in 0..comptime!(tile.patches()) {
        let (tile_row, tile_col) = patch_position(comptime!(patch as u32), tile);
        let (row, col) = (at.row + tile_row, at.col + tile_col);
        let start = at.batch * geometry.batch_stride + row * geometry.row_stride;
        #[unroll]
        for line in 0..PATCH_ROWS {
            #[unroll]
            for piece in 0..pieces {
                let slot = comptime!((patch * PATCH_ROWS + line) * pieces + piece);
                let col = col + comptime!((piece * tile.read) as u32);
                if comptime!(tile.whole) {
                    words[slot] = Words::new(0u32);
                } else {
                    registers[slot] = Vector::cast_from(0.0f32);
                }
                if is_inside(row + comptime!(line as u32), col, geometry, tile) {
                    let line_start = start + comptime!(line as u32) * geometry.row_stride;
                    // More than one element at once is read only where columns are neighbours.
                    let index = if comptime!(tile.read > 1) {
                        (line_start + col) / width
                    } else {
                        line_start + col * geometry.col_stride
                    };
                    if comptime!(tile.whole) {
                        words[slot] = Words::reinterpret(x[index as usize]);
                    } else {
                        registers[slot] = x[index as usize];
                    }
                }
            }
        }
    }
    let staged = comptime!(if copies.transposed.is_some() {
        TILE * TILE / 4
    } else {
        1
    });
    let held = comptime!(if tile.looped {
        tile.held() * tile.units * 4
    } else {
        1
    });
    let shared = SharedMemory::<u32>::new_aligned(comptime!(held.max(staged)), 16usize);
    Held::<F, N> {
        registers,
        words,
        shared,
    }
}

/// The largest magnitude of a patch, as bits, from registers.
#[cube]
fn patch_max<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    #[comptime] tile: BlockTile,
) -> u32 {
    let mut bits = 0u32;
    if comptime!(tile.bf16 && tile.whole) {
        // Both halves of a word, without their signs, at its top; what lies below the upper one goes in the end.
        #[unroll]
        for line in 0..PATCH_ROWS {
            let words = held.words[comptime!(patch * PATCH_ROWS + line)];
            #[unroll]
            for index in 0..4usize {
                bits = max(bits, max(words[index] << 17, words[index] << 1));
            }
        }
        bits = (bits >> 1) & HIGH_HALF;
    } else {
        #[unroll]
        for line in 0..comptime!(PATCH_ROWS as u32) {
            let values = values_of_registers::<F, N>(held, patch, line, tile);
            #[unroll]
            for col in 0..tile.patch_cols {
                bits = max(bits, magnitude_bits(values[col]));
            }
        }
    }
    bits
}

/// A row of a patch.
#[cube]
fn line_values<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    line: u32,
    #[comptime] tile: BlockTile,
) -> Array<f32> {
    if comptime!(tile.looped) {
        let pieces = comptime!(tile.patch_cols / tile.read);
        let slot = line as usize * pieces + comptime!(patch * PATCH_ROWS * pieces);
        let mut values = Array::<f32>::new(tile.patch_cols);
        #[unroll]
        for piece in 0..pieces {
            let first = shared_slot(slot + piece, tile);
            let mut words = Words::empty();
            #[unroll]
            for word in 0..4usize {
                words[word] = held.shared[first + word];
            }
            values_of_words::<F, N>(words, &mut values, comptime!(piece * tile.read), tile);
        }
        values
    } else {
        values_of_registers::<F, N>(held, patch, line, tile)
    }
}

/// A row of a patch that lies in registers; `line` is known to the compiler.
#[cube]
fn values_of_registers<F: Numeric, N: Size>(
    held: &Held<F, N>,
    #[comptime] patch: usize,
    line: u32,
    #[comptime] tile: BlockTile,
) -> Array<f32> {
    let pieces = comptime!(tile.patch_cols / tile.read);
    let slot = line as usize * pieces + comptime!(patch * PATCH_ROWS * pieces);
    let mut values = Array::<f32>::new(tile.patch_cols);
    #[unroll]
    for piece in 0..pieces {
        let first = comptime!(piece * tile.read);
        if comptime!(tile.whole) {
            values_of_words::<F, N>(held.words[slot + piece], &mut values, first, tile);
        } else {
            let vector = held.registers[slot + piece];
            #[unroll]
            for col in 0..tile.read {
                values[first + col] = f32::cast_from(vector[col]);
            }
        }
    }
    values
}

/// The elements of four words, which go to `values` from `first` on.
#[cube]
fn values_of_words<F: Numeric, N: Size>(
    words: Words,
    values: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] tile: BlockTile,
) {
    if comptime!(tile.bf16) {
        #[unroll]
        for index in 0..4usize {
            values[comptime!(first + 2 * index)] = f32::reinterpret(words[index] << 16);
            values[comptime!(first + 2 * index + 1)] = f32::reinterpret(words[index] & HIGH_HALF);
        }
    } else {
        let vector = Vector::<F, N>::reinterpret(words);
        #[unroll]
        for col in 0..tile.read {
            values[comptime!(first + col)] = f32::cast_from(vector[col]);
        }
    }
}

/// Writes a row of a patch, four bytes in each word, where it lies inside the matrix.
#[cube]
fn write_line<V: Numeric, N: Size>(
    out: &mut Array<Vector<V, N>>,
    words: &Array<u32>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] tile: BlockTile,
) {
    if comptime!(tile.inside) || row < geometry.rows {
        write_words::<V, N>(
            out,
            words,
            (batch * geometry.rows + row) * geometry.cols,
            col,
            geometry.cols,
            comptime!(tile.patch_cols / 4),
            tile.write.0,
            tile.inside,
        );
    }
}

/// Index of a block in `[.., scale_rows, scale_cols]`.
#[cube]
fn block_slot(
    geometry: &MatrixGeometry,
    at: &TilePosition,
    tile_row: u32,
    tile_col: u32,
    #[comptime] tile: BlockTile,
) -> usize {
    let block = comptime!(tile.block as u32);
    let rows = geometry.rows.div_ceil(block);
    let cols = geometry.cols.div_ceil(block);
    let row = (at.row + tile_row) / block;
    ((at.batch * rows + row) * cols + (at.col + tile_col) / block) as usize
}

/// Whether a patch is the first of its block, and inside the matrix.
#[cube]
fn is_first_of_block(
    geometry: &MatrixGeometry,
    row: u32,
    col: u32,
    #[comptime] tile: BlockTile,
) -> bool {
    let block = comptime!(tile.block as u32);
    row % block == 0 && col % block == 0 && is_inside(row, col, geometry, tile)
}

/// Whether an element lies in the matrix.
#[cube]
fn is_inside(row: u32, col: u32, geometry: &MatrixGeometry, #[comptime] tile: BlockTile) -> bool {
    if comptime!(tile.inside) {
        true.runtime()
    } else {
        row < geometry.rows && col < geometry.cols
    }
}

/// Replaces the maximum of each patch by that of its block.
#[cube]
fn reduce_to_blocks(maxima: &mut Array<u32>, #[comptime] tile: BlockTile) {
    if comptime!(tile.planes) {
        reduce_in_planes(maxima, tile);
    } else {
        reduce_in_shared_memory(maxima, tile);
    }
}

#[cube]
fn reduce_in_planes(maxima: &mut Array<u32>, #[comptime] tile: BlockTile) {
    let (plane, lane) = plane_and_lane(tile);
    if comptime!(tile.block == TILE) {
        let mut bits = maxima[0];
        #[unroll]
        for patch in 1..comptime!(tile.patches()) {
            bits = max(bits, maxima[patch]);
        }
        let mut partial = SharedMemory::<u32>::new(comptime!(tile.planes_of_cube()));
        bits = max_of_lanes(bits, PLANE);
        // The buffer may be read still by units that have not left an earlier reduction.
        sync_cube();
        if lane == 0 {
            partial[plane as usize] = bits;
        }
        sync_cube();
        let planes = comptime!(tile.planes_of_cube());
        bits = max_of_lanes(partial[lane as usize % planes], planes);
        #[unroll]
        for patch in 0..comptime!(tile.patches()) {
            maxima[patch] = bits;
        }
    } else {
        let lanes = comptime!(tile.lanes_of_block());
        #[unroll]
        for patch in 0..comptime!(tile.patches()) {
            // The rows of a plane lie in one block; of its columns, these many lanes.
            let mut bits = max_of_lanes(maxima[patch], lanes);
            #[unroll]
            for step in comptime!(LANES.ilog2())..comptime!(PLANE.ilog2()) {
                bits = max(bits, plane_shuffle_xor(bits, comptime!(1u32 << step)));
            }
            maxima[patch] = bits;
        }
        if comptime!(tile.block > PLANE_ROWS) {
            // One maximum for each plane's patch and each block along its columns.
            let parts = comptime!(LANES / lanes);
            let mut partial =
                SharedMemory::<u32>::new(comptime!(tile.patches() * tile.planes_of_cube() * parts));
            let part = lane % comptime!(LANES as u32) / comptime!(lanes as u32);
            let writes = lane / comptime!(LANES as u32) == 0 && lane % comptime!(lanes as u32) == 0;
            sync_cube();
            #[unroll]
            for patch in 0..comptime!(tile.patches() as u32) {
                let plane_patch = plane + comptime!(patch * tile.planes_of_cube() as u32);
                if writes {
                    partial[(plane_patch * comptime!(parts as u32) + part) as usize] =
                        maxima[patch as usize];
                }
            }
            sync_cube();
            let plane_cols = comptime!(tile.plane_cols() as u32);
            let block_rows = comptime!((tile.block / PLANE_ROWS) as u32);
            let block_cols = comptime!((tile.block / (LANES * tile.patch_cols)).max(1) as u32);
            #[unroll]
            for patch in 0..comptime!(tile.patches() as u32) {
                let plane_patch = plane + comptime!(patch * tile.planes_of_cube() as u32);
                let first_row = plane_patch / plane_cols / block_rows * block_rows;
                let first_col = plane_patch % plane_cols / block_cols * block_cols;
                let mut bits = 0u32;
                #[unroll]
                for row in 0..block_rows {
                    #[unroll]
                    for col in 0..block_cols {
                        let from = (first_row + row) * plane_cols + first_col + col;
                        bits = max(
                            bits,
                            partial[(from * comptime!(parts as u32) + part) as usize],
                        );
                    }
                }
                maxima[patch as usize] = bits;
            }
        }
    }
}

/// The largest number among each of these many neighbouring lanes, a power of two, in all of them.
#[cube]
fn max_of_lanes(bits: u32, #[comptime] lanes: usize) -> u32 {
    let mut reduced = bits;
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        reduced = max(reduced, plane_shuffle_xor(reduced, comptime!(1u32 << step)));
    }
    reduced
}

/// Without plane operations: along the rows of patches of a block, then along its columns.
#[cube]
fn reduce_in_shared_memory(maxima: &mut Array<u32>, #[comptime] tile: BlockTile) {
    let grid_cols = comptime!((TILE / tile.patch_cols) as u32);
    let block_rows = comptime!((tile.block / PATCH_ROWS) as u32);
    let block_cols = comptime!((tile.block / tile.patch_cols) as u32);
    let size = comptime!(TILE / PATCH_ROWS * TILE / tile.patch_cols);
    let mut of_patches = SharedMemory::<u32>::new(size);
    let mut of_rows = SharedMemory::<u32>::new(size);
    sync_cube();
    #[unroll]
    for patch in 0..comptime!(tile.patches() as u32) {
        let (row, col) = grid_position(patch, tile);
        of_patches[(row * grid_cols + col) as usize] = maxima[patch as usize];
    }
    sync_cube();
    #[unroll]
    for patch in 0..comptime!(tile.patches() as u32) {
        let (row, col) = grid_position(patch, tile);
        let first = row * grid_cols + col / block_cols * block_cols;
        let mut bits = 0u32;
        for other in 0..block_cols {
            bits = max(bits, of_patches[(first + other) as usize]);
        }
        of_rows[(row * grid_cols + col) as usize] = bits;
    }
    sync_cube();
    #[unroll]
    for patch in 0..comptime!(tile.patches() as u32) {
        let (row, col) = grid_position(patch, tile);
        let first = row / block_rows * block_rows * grid_cols + col;
        let mut bits = 0u32;
        for other in 0..block_rows {
            bits = max(bits, of_rows[(first + other * grid_cols) as usize]);
        }
        maxima[patch as usize] = bits;
    }
}

/// Row and column of a unit's patch in the tile's grid of patches.
#[cube]
fn grid_position(#[comptime] patch: u32, #[comptime] tile: BlockTile) -> (u32, u32) {
    let (row, col) = patch_position(patch, tile);
    (
        row / comptime!(PATCH_ROWS as u32),
        col / comptime!(tile.patch_cols as u32),
    )
}
