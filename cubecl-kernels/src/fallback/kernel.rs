//! Fallback quantization in one read of the input: the unit that rounds a value still holds it when its residual is due.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, cube_grid, read_width, storage, unused, write_width},
    exact,
    format::{Format, Granularity, Layout},
    quantize::tile::{
        Tile, block_absmax, quad_position, read_tile, shared_tile_size, stage_quad, tile_position,
        write_block_scale, write_tile_quad, write_transposed,
    },
    rounding::{is_finite, round_nearest, scale_and_inverse},
};

use super::FallbackQuantized;

#[allow(clippy::too_many_arguments)]
pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    block: usize,
    layout: Layout,
    thresholds: &TensorHandle<R>,
    layer: u32,
    counts: &TensorHandle<R>,
    output: &FallbackQuantized<R>,
) {
    let tile = Tile::new(Granularity::Block(block));
    let grid = tile.grid(view);
    let widths = (
        read_width(x, view),
        write_width(view.shape.cols),
        tile.transposed_width(view.shape.rows),
    );
    let or_unused = |tensor: &Option<TensorHandle<R>>| {
        tensor
            .clone()
            .unwrap_or_else(|| unused(client, storage::<i8>()))
            .into_arg()
    };
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated, or indexes the
    // state of `layer`, which was checked against its length.
    #[allow(unsafe_code)]
    unsafe {
        quantize_fallback_kernel::launch_unchecked::<R>(
            client,
            cube_grid(view.shape.batch * grid.0 * grid.1),
            CubeDim::new_1d(tile.units as u32),
            widths.0,
            widths.1,
            widths.2,
            x.clone().into_arg(),
            or_unused(&output.base.values),
            or_unused(&output.base.transposed),
            output.base.scales.clone().into_arg(),
            output.residual.values.clone().into_arg(),
            output.residual.scales.clone().into_arg(),
            output.residual.flags.clone().into_arg(),
            thresholds.clone().into_arg(),
            counts.clone().into_arg(),
            layer,
            view.geometry(),
            view.shape.batch as u32,
            0,
            tile,
            widths,
            layout,
            Format::Int8.q_max(),
            x.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_fallback_kernel<F: Numeric, NX: Size, NV: Size, NT: Size>(
    x: &Tensor<Vector<F, NX>>,
    values: &mut Tensor<Vector<i8, NV>>,
    transposed: &mut Tensor<Vector<i8, NT>>,
    scales: &mut Tensor<f32>,
    residual_values: &mut Tensor<Vector<i8, NV>>,
    residual_scales: &mut Tensor<f32>,
    flags: &mut Tensor<u32>,
    thresholds: &Tensor<f32>,
    counts: &mut Tensor<Atomic<i32>>,
    layer: u32,
    geometry: MatrixGeometry,
    batch_size: u32,
    zero: u32,
    #[comptime] tile: Tile,
    #[comptime] widths: (usize, usize, usize),
    #[comptime] layout: Layout,
    #[comptime] q_max: i32,
    #[define(F)] _dtype: StorageType,
) {
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let mut held = read_tile::<F, NX>(x, &geometry, &position, tile, widths.0);
    let absmax_bits = block_absmax(&held, tile);
    let (scale, inverse) = scale_and_inverse(absmax_bits, q_max);
    let falls_back =
        is_finite(absmax_bits) && f32::reinterpret(absmax_bits) > thresholds[layer as usize];
    let flag = select(falls_back, 1u32, 0u32);
    write_block_scale::<f32>(scales, scale, &geometry, &position, tile);
    write_block_scale::<u32>(flags, flag, &geometry, &position, tile);
    if UNIT_POS == 0 {
        counts[(layer * 2) as usize].fetch_add(i32::cast_from(flag));
        counts[(layer * 2 + 1) as usize].fetch_add(1i32);
    }

    let mut shared =
        SharedMemory::<i8>::new(comptime!(shared_tile_size(tile, layout.transposed())));
    #[unroll]
    for index in 0..comptime!(tile.quads() as u32) {
        let (tile_row, tile_col) = quad_position(index, tile);
        let mut q = Array::<i32>::new(4usize);
        #[unroll]
        for lane in 0..4u32 {
            let slot = (index * 4 + lane) as usize;
            q[lane as usize] = round_nearest(held[slot], inverse, zero, q_max);
            held[slot] -= exact::product(f32::cast_from(q[lane as usize]), scale, zero);
        }
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

    // The flag is the same in all units of the cube, but a device need not know it: no synchronization in a branch.
    let residual_bits = select(falls_back, block_absmax(&held, tile), 0u32);
    let (residual_scale, residual_inverse) = scale_and_inverse(residual_bits, q_max);
    write_block_scale::<f32>(residual_scales, residual_scale, &geometry, &position, tile);
    if falls_back {
        #[unroll]
        for index in 0..comptime!(tile.quads() as u32) {
            let (tile_row, tile_col) = quad_position(index, tile);
            let mut q = Array::<i32>::new(4usize);
            #[unroll]
            for lane in 0..4u32 {
                let slot = (index * 4 + lane) as usize;
                q[lane as usize] = round_nearest(held[slot], residual_inverse, zero, q_max);
            }
            write_tile_quad::<NV>(
                residual_values,
                &q,
                &geometry,
                &position,
                tile_row,
                tile_col,
                widths.1,
            );
        }
    }
}
