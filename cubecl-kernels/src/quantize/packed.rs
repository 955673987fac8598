//! INT10 quantization by group: four units gather their values and pack them into five words.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, MatrixView, array, cube_grid, read_quad, read_width},
    format::{Format, Rounding},
    rounding::{RandomStream, random_stream, round_quad},
};

use super::{
    Quantized,
    group::group_inverses,
    tile::{Tile, UNITS, quad_position, tile_position},
};

const Q_MAX: i32 = Format::Int10.q_max();

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
    let tile = Tile::of_groups(group);
    let width = read_width(x, view);
    // SAFETY: every access is guarded by the shapes in `geometry`, for which the outputs were allocated.
    #[allow(unsafe_code)]
    unsafe {
        quantize_packed_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tile.count(view)),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(x.clone()),
            array(words.clone()),
            array(output.scales.clone()),
            view.geometry(),
            view.shape.batch as u32,
            random_stream(rounding),
            0,
            tile,
            width,
            rounding != Rounding::Nearest,
            x.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_packed_kernel<F: Numeric, NX: Size>(
    x: &Array<Vector<F, NX>>,
    words: &mut Array<u32>,
    scales: &mut Array<f32>,
    geometry: MatrixGeometry,
    batch_size: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
    #[comptime] stochastic: bool,
    #[define(F)] _dtype: StorageType,
) {
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let (tile_row, tile_col) = quad_position(0u32, tile);
    let (row, col) = (position.row + tile_row, position.col + tile_col);
    let batch_row = position.batch * geometry.rows + row;
    let quad = read_quad::<F, NX>(x, &geometry, position.batch, row, col, width);
    let inverses = group_inverses(scales, &quad, &geometry, &position, tile, Q_MAX);
    let q = round_quad(
        &quad, &inverses, batch_row, col, &random, zero, stochastic, Q_MAX,
    );
    let mut gathered = SharedMemory::<i32>::new(comptime!(4 * UNITS));
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
