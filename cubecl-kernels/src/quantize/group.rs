//! Quantization by group: one read of the input. The units of a group reduce their maxima in shared memory, and round
//! what they hold.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, array, cube_grid, or_unused, read_quad, storage},
    format::{Format, Layout, Rounding},
    rounding::{RandomStream, magnitude_bits, random_stream, round_quad, scale_and_inverse},
};

use super::{
    QuantizeSpec, Quantized,
    tile::{
        Tile, TilePosition, UNITS, quad_position, segment_max, shared_tile_size, stage_quad,
        tile_position, write_tile_quad, write_transposed,
    },
};

const Q_MAX: i32 = Format::Int8.q_max();

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    spec: &QuantizeSpec,
    group: usize,
    output: &Quantized<R>,
) {
    let tile = Tile::of_groups(group);
    let widths = tile.widths(x, view);
    let copy =
        |tensor: &Option<TensorHandle<R>>| array(or_unused(tensor.as_ref(), x, storage::<i8>()));
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated.
    #[allow(unsafe_code)]
    unsafe {
        quantize_group_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tile.count(view)),
            CubeDim::new_1d(UNITS as u32),
            widths.0,
            widths.1,
            widths.2,
            array(x.clone()),
            copy(&output.values),
            copy(&output.transposed),
            array(output.scales.clone()),
            view.geometry(),
            view.shape.batch as u32,
            random_stream(spec.rounding),
            0,
            tile,
            widths,
            spec.layout,
            spec.rounding != Rounding::Nearest,
            x.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_group_kernel<F: Numeric, NX: Size, NV: Size, NT: Size>(
    x: &Array<Vector<F, NX>>,
    values: &mut Array<Vector<i8, NV>>,
    transposed: &mut Array<Vector<i8, NT>>,
    scales: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] tile: Tile,
    #[comptime] widths: (usize, usize, usize),
    #[comptime] layout: Layout,
    #[comptime] stochastic: bool,
    #[define(F)] _dtype: StorageType,
) {
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let (tile_row, tile_col) = quad_position(0u32, tile);
    let (row, col) = (position.row + tile_row, position.col + tile_col);
    let quad = read_quad::<F, NX>(x, &geometry, position.batch, row, col, widths.0);
    let inverses = group_inverses(scales, &quad, &geometry, &position, tile, Q_MAX);
    let q = round_quad(
        &quad,
        &inverses,
        position.batch * geometry.rows + row,
        col,
        &random,
        zero,
        stochastic,
        Q_MAX,
    );
    if comptime!(layout.row_major()) {
        write_tile_quad::<NV>(
            values, &q, &geometry, &position, tile_row, tile_col, widths.1,
        );
    }
    if comptime!(layout.transposed()) {
        let mut shared = SharedMemory::<i8>::new(comptime!(shared_tile_size(tile, true)));
        stage_quad(&mut shared, &q, tile_row, tile_col, tile);
        sync_cube();
        write_transposed::<NT>(transposed, &shared, &geometry, &position, tile, widths.2);
    }
}

/// The inverse scale of the group that this unit's four elements belong to, once for each of them. One unit of the
/// group writes the scale to `[.., rows, groups of a row]`.
#[cube]
pub(super) fn group_inverses(
    scales: &mut Array<f32>,
    quad: &Array<f32>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    #[comptime] tile: Tile,
    #[comptime] q_max: i32,
) -> Array<f32> {
    let mut bits = 0u32;
    #[unroll]
    for lane in 0..4usize {
        bits = max(bits, magnitude_bits(quad[lane]));
    }
    let segment = comptime!(tile.cols / 4);
    let (scale, inverse) = scale_and_inverse(segment_max(bits, UNITS, segment), q_max);
    let row = position.row + UNIT_POS / comptime!(segment as u32);
    if UNIT_POS % comptime!(segment as u32) == 0 && row < geometry.rows {
        let size = comptime!(tile.cols as u32);
        let groups = geometry.cols.div_ceil(size);
        let slot = (position.batch * geometry.rows + row) * groups + position.col / size;
        scales[slot as usize] = scale;
    }
    let mut inverses = Array::<f32>::new(4usize);
    #[unroll]
    for lane in 0..4usize {
        inverses[lane] = inverse;
    }
    inverses
}
