//! Encoding by scales that are known: the second read of the input, or the only one where the scale was given.
//!
//! A cube takes a tile. Of numbers of a byte it is that of [`byte_tile`], whose bytes turn four at a time; of others a
//! smaller one, whose codes turn one by one.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    byte_tile::{
        self, ByteCopies, LINE_WORDS, PATCH_ROWS, batched_patch_position, write_patch, zero_patch,
    },
    device::{MatrixGeometry, MatrixView, array, cube_grid, has_u64, or_unused, storage},
    granularity::Granularity,
    number::storage::{RUN, Storage, pack_run},
    rounding::{RandomStream, Rounding, random_stream},
    scale::fp32::given_inverse_cube,
};

use super::{
    Input, Quantized,
    run::{RunEncoding, encode_run, run_max},
    stored::{Copies, copy_args, write_copies},
    tile::{Tile, UNITS, read_run, run_position, run_read_width, segment_max, tile_position},
};

/// Where the inverse scales come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Inverses {
    /// One for each region; a run lies in one region.
    OfRuns,
    /// One for each column of a matrix.
    OfColumns,
    /// The inverse of a scale that was given. The maxima of tiles are wanted too.
    Given,
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct EncodePlan {
    encoding: RunEncoding,
    inverses: Inverses,
    /// Elements read at once.
    read: usize,
}

/// How the runs of a matrix are encoded on this device.
pub(super) fn run_encoding<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    takes_nan: bool,
) -> RunEncoding {
    RunEncoding {
        number: input.number,
        stochastic: input.spec.rounding != Rounding::Nearest,
        wide: has_u64(client),
        takes_nan,
    }
}

/// Encodes by the inverse scales of regions, f32 `[batch, scale_rows, scale_cols]`.
///
/// # Safety
///
/// `output` was allocated for `input`, which is not empty, and the other tensors are as said.
#[allow(unsafe_code)]
pub(super) unsafe fn by_regions<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    inverses: &TensorHandle<R>,
    output: &Quantized<R>,
) {
    let source = match input.spec.granularity {
        Granularity::Channel => Inverses::OfColumns,
        Granularity::Block(_)
        | Granularity::Group(_)
        | Granularity::Token
        | Granularity::Tensor => Inverses::OfRuns,
    };
    // SAFETY: the caller's promise is that of this function.
    unsafe { launch(client, input, source, inverses, None, output) }
}

/// Encodes by the inverse of a scale that was given, f32 `[1]`, and writes the largest magnitude of each tile, f32
/// `[tiles]`.
///
/// # Safety
///
/// `output` was allocated for `input`, which is not empty, and the other tensors are as said.
#[allow(unsafe_code)]
pub(super) unsafe fn by_given<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    scale: &TensorHandle<R>,
    maxima: &TensorHandle<R>,
    output: &Quantized<R>,
) {
    // SAFETY: the caller's promise is that of this function.
    unsafe { launch(client, input, Inverses::Given, scale, Some(maxima), output) }
}

/// Tiles of the matrices of a view, of numbers that are stored like this.
pub(super) fn tiles(view: &MatrixView, storage: Storage) -> usize {
    match storage {
        Storage::SignedBytes | Storage::Bytes => {
            view.shape.batch * byte_tile::tiles(view.shape.rows, view.shape.cols)
        }
        Storage::Nibbles | Storage::TenBits => Tile::SQUARE.count(view),
    }
}

/// # Safety
///
/// `output` was allocated for `input`, which is not empty; `inverses` are what the source says, `maxima` f32 `[tiles]`.
#[allow(unsafe_code)]
unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    source: Inverses,
    inverses: &TensorHandle<R>,
    maxima: Option<&TensorHandle<R>>,
    output: &Quantized<R>,
) {
    let Input { x, view, spec, .. } = input;
    let storage_of_codes = spec.number.storage();
    let [values, transposed] = copy_args(output, x);
    let plan = EncodePlan {
        encoding: run_encoding(client, input, source == Inverses::Given),
        inverses: source,
        read: run_read_width(x, view),
    };
    let (scale_rows, scale_cols) = spec.granularity.scale_block(view.shape);
    let (cubes, units) = (
        cube_grid(tiles(view, storage_of_codes)),
        CubeDim::new_1d(UNITS as u32),
    );
    let maxima = array(or_unused(maxima, x, storage::<f32>()));
    // SAFETY: every access is guarded by the shapes in `geometry`, for which by the caller's promise the outputs were
    // allocated.
    unsafe {
        match storage_of_codes {
            Storage::SignedBytes | Storage::Bytes => {
                let copies = ByteCopies::new(spec.layout, view.shape.rows, view.shape.cols);
                let [
                    (row_major_vector, row_major_dtype),
                    (transposed_vector, transposed_dtype),
                ] = copies.vectors();
                encode_bytes_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    units,
                    plan.read,
                    row_major_vector,
                    transposed_vector,
                    array((*x).clone()),
                    array(inverses.clone()),
                    maxima,
                    values,
                    transposed,
                    view.geometry(),
                    view.shape.batch as u32,
                    scale_rows as u32,
                    scale_cols as u32,
                    random_stream(spec.rounding),
                    0,
                    plan,
                    storage_of_codes,
                    copies,
                    x.dtype,
                    row_major_dtype,
                    transposed_dtype,
                );
            }
            Storage::Nibbles | Storage::TenBits => {
                let copies = Copies::new(storage_of_codes, spec.layout, view.shape);
                let [
                    (row_major_vector, row_major_dtype),
                    (transposed_vector, transposed_dtype),
                ] = copies.vectors();
                encode_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    units,
                    plan.read,
                    row_major_vector,
                    transposed_vector,
                    array((*x).clone()),
                    array(inverses.clone()),
                    maxima,
                    values,
                    transposed,
                    view.geometry(),
                    view.shape.batch as u32,
                    scale_rows as u32,
                    scale_cols as u32,
                    random_stream(spec.rounding),
                    0,
                    plan,
                    copies,
                    x.dtype,
                    row_major_dtype,
                    transposed_dtype,
                );
            }
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn encode_kernel<F: Numeric, NX: Size, V: Numeric, NV: Size, T: Numeric, NT: Size>(
    x: &Array<Vector<F, NX>>,
    inverses: &Array<f32>,
    maxima: &mut Array<f32>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    scale_rows: u32,
    scale_cols: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] plan: EncodePlan,
    #[comptime] copies: Copies,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    let tile = comptime!(Tile::SQUARE);
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let (tile_row, tile_col) = run_position(tile);
    let (row, col) = (position.row + tile_row, position.col + tile_col);
    let of_columns = column_inverses(inverses, &geometry, position.batch, col, plan);
    let (codes, bits) = read_codes::<F, NX>(
        x,
        inverses,
        &of_columns,
        &geometry,
        position.batch,
        row,
        col,
        scale_rows,
        scale_cols,
        &random,
        zero,
        plan,
    );
    write_maximum(maxima, bits, plan);
    write_copies::<V, NV, T, NT>(
        values, transposed, &codes, &geometry, &position, tile_row, tile_col, tile, copies,
    );
}

const _: () = assert!(
    byte_tile::UNITS == UNITS,
    "both kernels' cubes have as many units"
);

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn encode_bytes_kernel<F: Numeric, NX: Size, V: Numeric, NV: Size, T: Numeric, NT: Size>(
    x: &Array<Vector<F, NX>>,
    inverses: &Array<f32>,
    maxima: &mut Array<f32>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    scale_rows: u32,
    scale_cols: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] plan: EncodePlan,
    #[comptime] storage: Storage,
    #[comptime] copies: ByteCopies,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    let (batch, at) = batched_patch_position(geometry.rows, geometry.cols);
    if batch >= batch_size {
        terminate!();
    }
    let mut lines = zero_patch();
    let mut bits = 0u32;
    let first_col = at.first_col + at.tile_col;
    let of_columns = column_inverses(inverses, &geometry, batch, first_col, plan);
    #[unroll]
    for line in 0..comptime!(PATCH_ROWS as u32) {
        let (codes, of_run) = read_codes::<F, NX>(
            x,
            inverses,
            &of_columns,
            &geometry,
            batch,
            at.first_row + at.tile_row + line,
            first_col,
            scale_rows,
            scale_cols,
            &random,
            zero,
            plan,
        );
        bits = max(bits, of_run);
        let words = pack_run(&codes, storage);
        #[unroll]
        for word in 0..LINE_WORDS {
            lines[comptime!(line as usize * LINE_WORDS + word)] = words[word];
        }
    }
    write_maximum(maxima, bits, plan);
    write_patch::<V, NV, T, NT>(
        values,
        transposed,
        &lines,
        &at,
        batch,
        geometry.rows,
        geometry.cols,
        copies,
    );
}

/// The codes of a run, and the bits of its largest magnitude where that is wanted. `of_columns`: the inverse scales of
/// its columns, where they have their own.
#[cube]
#[allow(clippy::too_many_arguments)]
fn read_codes<F: Numeric, NX: Size>(
    x: &Array<Vector<F, NX>>,
    inverses: &Array<f32>,
    of_columns: &Array<f32>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    scale_rows: u32,
    scale_cols: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] plan: EncodePlan,
) -> (Array<u32>, u32) {
    let run = read_run::<F, NX>(x, geometry, batch, row, col, plan.read);
    let mut bits = 0u32;
    if comptime!(plan.inverses == Inverses::Given) {
        bits = run_max(&run);
    }
    let mut of_run = Array::<f32>::new(RUN);
    match comptime!(plan.inverses) {
        Inverses::OfRuns => {
            let inverse =
                region_inverse(inverses, geometry, batch, row, col, scale_rows, scale_cols);
            fill(&mut of_run, inverse);
        }
        Inverses::OfColumns =>
        {
            #[unroll]
            for index in 0..RUN {
                of_run[index] = of_columns[index];
            }
        }
        Inverses::Given => fill(&mut of_run, given_inverse_cube(inverses[0])),
    }
    let codes = encode_run(
        &run,
        &of_run,
        batch * geometry.rows + row,
        col,
        random,
        zero,
        comptime!(plan.encoding),
    );
    (codes, bits)
}

/// Writes the largest magnitude of the cube's tile where it is wanted. All units of the cube must call it together.
#[cube]
fn write_maximum(maxima: &mut Array<f32>, bits: u32, #[comptime] plan: EncodePlan) {
    if comptime!(plan.inverses == Inverses::Given) {
        let bits = segment_max(bits, UNITS, UNITS);
        if UNIT_POS == 0 {
            maxima[CUBE_POS] = f32::reinterpret(bits);
        }
    }
}

/// The inverse scale of the region that holds a run; 0 outside the matrix.
#[cube]
fn region_inverse(
    inverses: &Array<f32>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    scale_rows: u32,
    scale_cols: u32,
) -> f32 {
    let grid_rows = geometry.rows.div_ceil(scale_rows);
    let grid_cols = geometry.cols.div_ceil(scale_cols);
    let first = (batch * grid_rows + row / scale_rows) * grid_cols;
    let mut inverse = 0.0f32;
    if row < geometry.rows && col < geometry.cols {
        inverse = inverses[(first + col / scale_cols) as usize];
    }
    inverse
}

/// The inverse scales of the 16 columns from `col` on, where each has one; 0 outside the matrix. They serve all rows of
/// a patch.
#[cube]
fn column_inverses(
    inverses: &Array<f32>,
    geometry: &MatrixGeometry,
    batch: u32,
    col: u32,
    #[comptime] plan: EncodePlan,
) -> Array<f32> {
    let mut of_columns = Array::<f32>::new(RUN);
    if comptime!(plan.inverses == Inverses::OfColumns) {
        #[unroll]
        for index in 0..comptime!(RUN as u32) {
            let mut inverse = 0.0f32;
            if col + index < geometry.cols {
                inverse = inverses[(batch * geometry.cols + col + index) as usize];
            }
            of_columns[index as usize] = inverse;
        }
    }
    of_columns
}

/// Gives all elements of a run one inverse scale.
#[cube]
pub(super) fn fill(of_run: &mut Array<f32>, inverse: f32) {
    #[unroll]
    for index in 0..RUN {
        of_run[index] = inverse;
    }
}
