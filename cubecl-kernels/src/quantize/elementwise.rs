//! Quantization with maxima that are known already: the second read of rows, columns and whole matrices.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, Strides, StridesLaunch, array, cube_grid, or_unused, read_quad,
        storage,
    },
    format::{Format, Granularity, Layout, Rounding},
    rounding::{RandomStream, random_stream, round_quad, scale_and_inverse},
};

use super::{
    QuantizeSpec, Quantized,
    tile::{
        Tile, UNITS, quad_position, shared_tile_size, stage_quad, tile_position, write_tile_quad,
        write_transposed,
    },
};

const Q_MAX: i32 = Format::Int8.q_max();

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    spec: &QuantizeSpec,
    absmax: &TensorHandle<R>,
    output: &Quantized<R>,
) {
    let tile = Tile::SQUARE;
    let widths = tile.widths(x, view);
    // Stride 0 where neighbours share their maximum.
    let (rows, cols) = (view.shape.rows as u32, view.shape.cols as u32);
    let strides = match spec.granularity {
        Granularity::Token => StridesLaunch::new(rows, 1, 0),
        Granularity::Channel => StridesLaunch::new(cols, 0, 1),
        _ => StridesLaunch::new(1, 0, 0),
    };
    let copy =
        |tensor: &Option<TensorHandle<R>>| array(or_unused(tensor.as_ref(), x, storage::<i8>()));
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated.
    #[allow(unsafe_code)]
    unsafe {
        quantize_elementwise_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tile.count(view)),
            CubeDim::new_1d(UNITS as u32),
            widths.0,
            widths.1,
            widths.2,
            array(x.clone()),
            array(absmax.clone()),
            copy(&output.values),
            copy(&output.transposed),
            array(output.scales.clone()),
            view.geometry(),
            strides,
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
fn quantize_elementwise_kernel<F: Numeric, NX: Size, NV: Size, NT: Size>(
    x: &Array<Vector<F, NX>>,
    absmax: &Array<f32>,
    values: &mut Array<Vector<i8, NV>>,
    transposed: &mut Array<Vector<i8, NT>>,
    scales: &mut Array<f32>,
    geometry: MatrixGeometry,
    scale_strides: Strides,
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
    let mut shared =
        SharedMemory::<i8>::new(comptime!(shared_tile_size(tile, layout.transposed())));
    #[unroll]
    for index in 0..comptime!(tile.quads() as u32) {
        let (tile_row, tile_col) = quad_position(index, tile);
        let row = position.row + tile_row;
        let col = position.col + tile_col;
        let quad = read_quad::<F, NX>(x, &geometry, position.batch, row, col, widths.0);
        let mut inverses = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4u32 {
            let mut inverse = 0.0f32;
            if row < geometry.rows && col + lane < geometry.cols {
                let slot = (position.batch * scale_strides.batch
                    + row * scale_strides.row
                    + (col + lane) * scale_strides.col) as usize;
                let (scale, block_inverse) =
                    scale_and_inverse(u32::reinterpret(absmax[slot]), Q_MAX);
                inverse = block_inverse;
                let is_first = (scale_strides.row != 0 || row == 0)
                    && (scale_strides.col != 0 || col + lane == 0);
                if is_first {
                    scales[slot] = scale;
                }
            }
            inverses[lane as usize] = inverse;
        }
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
            stage_quad(&mut shared, &q, tile_row, tile_col, tile);
        }
    }
    if comptime!(layout.transposed()) {
        sync_cube();
        write_transposed::<NT>(transposed, &shared, &geometry, &position, tile, widths.2);
    }
}
