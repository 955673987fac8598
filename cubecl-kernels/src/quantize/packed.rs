//! INT10 quantization by group: four units gather their values and pack them into five words.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, cube_grid, read_width},
    format::{Format, Granularity, Rounding},
    rounding::{RandomStream, random_stream, round_quad, scale_and_inverse},
};

use super::{
    Quantized,
    tile::{Tile, block_absmax, quad_position, read_tile, tile_position, write_block_scale},
};

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    rounding: Rounding,
    group: usize,
    output: &Quantized<R>,
) {
    let Some(words) = &output.values else {
        unreachable!("INT10 is row-major");
    };
    let tile = Tile::new(Granularity::Group(group));
    let grid = tile.grid(view);
    let width = read_width(x, view);
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated.
    #[allow(unsafe_code)]
    unsafe {
        quantize_packed_kernel::launch_unchecked::<R>(
            client,
            cube_grid(view.shape.batch * grid.0 * grid.1),
            CubeDim::new_1d(tile.units as u32),
            width,
            x.clone().into_arg(),
            words.clone().into_arg(),
            output.scales.clone().into_arg(),
            view.geometry(),
            view.shape.batch as u32,
            random_stream(rounding),
            0,
            tile,
            width,
            rounding != Rounding::Nearest,
            Format::Int10.q_max(),
            x.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_packed_kernel<F: Numeric, NX: Size>(
    x: &Tensor<Vector<F, NX>>,
    words: &mut Tensor<u32>,
    scales: &mut Tensor<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
    #[comptime] stochastic: bool,
    #[comptime] q_max: i32,
    #[define(F)] _dtype: StorageType,
) {
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    // The tile of a group granularity has exactly one group of four for each unit.
    let quad = read_tile::<F, NX>(x, &geometry, &position, tile, width);
    let absmax_bits = block_absmax(&quad, tile);
    let (scale, inverse) = scale_and_inverse(absmax_bits, q_max);
    write_block_scale::<f32>(scales, scale, &geometry, &position, tile);

    let (tile_row, tile_col) = quad_position(0u32, tile);
    let row = position.row + tile_row;
    let col = position.col + tile_col;
    let batch_row = position.batch * geometry.rows + row;
    let mut inverses = Array::<f32>::new(4usize);
    #[unroll]
    for lane in 0..4usize {
        inverses[lane] = inverse;
    }
    let q = round_quad(
        &quad, &inverses, batch_row, col, &random, zero, stochastic, q_max,
    );
    let mut gathered = SharedMemory::<i32>::new(comptime!(4 * tile.units));
    #[unroll]
    for lane in 0..4u32 {
        gathered[(UNIT_POS * 4 + lane) as usize] = q[lane as usize];
    }
    sync_cube();
    if UNIT_POS % 4 == 0 && row < geometry.rows && col < geometry.cols {
        let mut packed = Array::<u32>::new(5usize);
        #[unroll]
        for word in 0..5usize {
            packed[word] = 0u32;
        }
        #[unroll]
        for index in 0..16u32 {
            let bits = u32::cast_from(gathered[(UNIT_POS * 4 + index) as usize]) & 0x3ff;
            let word = comptime!((index * 10 / 32) as usize);
            let shift = comptime!(index * 10 % 32);
            packed[word] |= bits << shift;
            if comptime!(shift > 22) {
                packed[comptime!(word + 1)] |= bits >> comptime!(32 - shift);
            }
        }
        let row_words = geometry.cols.div_ceil(16) * 5;
        let start = batch_row * row_words + col / 16 * 5;
        #[unroll]
        for word in 0..5u32 {
            words[(start + word) as usize] = packed[word as usize];
        }
    }
}
