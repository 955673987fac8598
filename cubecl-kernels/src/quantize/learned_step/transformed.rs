//! A tile of a matrix on its way through the Hadamard transform.
//!
//! Each unit holds a run of 16 neighbours of a row. The passes of small distances along a row take place in its
//! registers, and those of larger ones between the units of a plane, where the device has planes. For all others the
//! tile goes through shared memory: each unit takes lines of up to 16 elements that lie further apart, makes up to four
//! passes in its registers, and puts them back.

use cubecl::prelude::*;

use crate::{
    device::{MatrixGeometry, cube_grid, has_planes_of_32},
    hadamard::{Axis, HadamardSize, HadamardTransform, butterflies},
    number::storage::RUN,
    quantize::tile::{Tile, UNITS, run_position},
    scale::fp32::given_inverse_cube,
};

/// Words of the shared tile.
const SHARED_WORDS: usize = UNITS * (RUN + 1) + 16;
/// Passes that a unit makes on one line.
const PASSES: u32 = RUN.ilog2();

/// The tile that a cube transforms: whole blocks of the largest size along the axis, so that no block lies in two
/// tiles.
pub(super) const fn tile_of(axis: Axis) -> Tile {
    const ALONG: usize = HadamardSize::LARGEST.block();
    const ACROSS: usize = UNITS * RUN / ALONG;
    match axis {
        Axis::Rows => Tile {
            rows: ALONG,
            cols: ACROSS,
        },
        Axis::Columns => Tile {
            rows: ACROSS,
            cols: ALONG,
        },
    }
}

/// How a tile is transformed on this device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TilePlan {
    pub transform: HadamardTransform,
    /// True where the units of a plane read each other's registers.
    pub planes: bool,
}

impl TilePlan {
    pub fn new<R: Runtime>(client: &ComputeClient<R>, transform: HadamardTransform) -> Self {
        Self {
            transform,
            planes: has_planes_of_32(client),
        }
    }
}

/// The cubes of a launch, one for each of so many tiles, and their units.
pub(super) fn launch_size(tiles: usize) -> (CubeCount, CubeDim) {
    (cube_grid(tiles), CubeDim::new_1d(UNITS as u32))
}

/// Where a unit's run lies: in the matrix, and in the tile.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RunPlace {
    pub row: u32,
    pub col: u32,
    pub tile_row: u32,
    pub tile_col: u32,
    /// False for a cube behind the last tile.
    pub inside: bool,
}

#[cube]
pub(super) fn run_place(geometry: &MatrixGeometry, #[comptime] axis: Axis) -> RunPlace {
    let tile = comptime!(tile_of(axis));
    let tiles_of_row = geometry.cols.div_ceil(comptime!(tile.cols as u32));
    let tile_index = CUBE_POS as u32;
    let row = tile_index / tiles_of_row;
    let first_row = row * comptime!(tile.rows as u32);
    let first_col = (tile_index - row * tiles_of_row) * comptime!(tile.cols as u32);
    let (tile_row, tile_col) = run_position(tile);
    RunPlace {
        row: first_row + tile_row,
        col: first_col + tile_col,
        tile_row,
        tile_col,
        inside: first_row < geometry.rows,
    }
}

/// The memory that a tile passes through.
#[cube]
pub(super) fn shared_tile() -> SharedMemory<u32> {
    SharedMemory::<u32>::new(SHARED_WORDS)
}

/// The place in the shared tile of the element that is `index`-th in the tile's row-major order.
///
/// Shared memory has 32 banks. Along rows, a row of the tile has as many words: each row is rotated by one word more
/// than the one before it, and by four more behind 16 of them. Along columns, a word is left out behind each run, and
/// 16 behind 16 rows. In both, the units of a plane that write runs of rows, or read runs of columns, meet in no bank.
/// Along rows, neither do those that read neighbours.
#[cube]
fn slot(index: u32, #[comptime] axis: Axis) -> usize {
    match comptime!(axis) {
        Axis::Rows => {
            let cols = comptime!(tile_of(Axis::Rows).cols as u32);
            let row = index / cols;
            (row * cols + (index + row + row / 16 * 4) % cols) as usize
        }
        Axis::Columns => {
            let rows = index / comptime!(16 * tile_of(Axis::Columns).cols as u32);
            (index + index / comptime!(RUN as u32) + rows * 16) as usize
        }
    }
}

/// Transforms the tile whose runs the units hold. All units of the cube must call it together.
#[cube]
pub(super) fn transform_tile(
    run: &mut Array<f32>,
    shared: &mut SharedMemory<u32>,
    #[comptime] plan: TilePlan,
) {
    let transform = comptime!(plan.transform);
    let axis = comptime!(transform.axis);
    let order = comptime!(transform.size.order());
    let (near, far) = comptime!((order.min(PASSES), order.saturating_sub(PASSES)));
    match comptime!(axis) {
        Axis::Columns => {
            let length = comptime!(1usize << near);
            #[unroll]
            for line in 0..comptime!(RUN / length) {
                butterflies(run, comptime!(line * length), length);
            }
            if comptime!(plan.planes) {
                pass_units(run, far);
            } else if comptime!(far > 0) {
                put_run(run, shared, axis);
                sync_cube();
                pass_lines(shared, comptime!(RUN), comptime!(1usize << far), axis);
                take_run(run, shared, axis);
            }
        }
        Axis::Rows => {
            if comptime!(near > 0) {
                let spacing = comptime!(tile_of(Axis::Rows).cols);
                put_run(run, shared, axis);
                sync_cube();
                pass_lines(shared, spacing, comptime!(1usize << near), axis);
                if comptime!(far > 0) {
                    pass_lines(
                        shared,
                        comptime!(RUN * spacing),
                        comptime!(1usize << far),
                        axis,
                    );
                }
                take_run(run, shared, axis);
            }
        }
    }
    if comptime!(order > 0) {
        let factor = comptime!(transform.size.factor());
        #[unroll]
        for index in 0..RUN {
            run[index] = run[index] * factor;
        }
    }
}

/// The passes among runs: of the run's own distance, and so on. The units of a block lie in one plane.
#[cube]
fn pass_units(run: &mut Array<f32>, #[comptime] passes: u32) {
    #[unroll]
    for pass in 0..passes {
        let distance = comptime!(1u32 << pass);
        // The upper unit of two takes the difference. A product with 1 or -1 rounds nothing.
        let sign = select(UNIT_POS & distance != 0, -1.0f32, 1.0f32);
        #[unroll]
        for index in 0..RUN {
            let own = run[index];
            run[index] = fma(own, sign, plane_shuffle_xor(own, distance));
        }
    }
}

/// Puts a unit's run into the shared tile.
#[cube]
fn put_run(run: &Array<f32>, shared: &mut SharedMemory<u32>, #[comptime] axis: Axis) {
    #[unroll]
    for index in 0..comptime!(RUN as u32) {
        shared[slot(UNIT_POS * comptime!(RUN as u32) + index, axis)] =
            u32::reinterpret(run[index as usize]);
    }
}

/// Takes a unit's run back.
#[cube]
fn take_run(run: &mut Array<f32>, shared: &SharedMemory<u32>, #[comptime] axis: Axis) {
    #[unroll]
    for index in 0..comptime!(RUN as u32) {
        run[index as usize] =
            f32::reinterpret(shared[slot(UNIT_POS * comptime!(RUN as u32) + index, axis)]);
    }
}

/// The passes along lines of `length` elements that are `spacing` apart in the tile's row-major order, and a wait for
/// all units.
#[cube]
fn pass_lines(
    shared: &mut SharedMemory<u32>,
    #[comptime] spacing: usize,
    #[comptime] length: usize,
    #[comptime] axis: Axis,
) {
    let apart = comptime!(spacing as u32);
    let mut lines = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..comptime!((RUN / length) as u32) {
        let line = UNIT_POS + comptime!(index * UNITS as u32);
        let first = line / apart * comptime!(apart * length as u32) + line % apart;
        #[unroll]
        for element in 0..comptime!(length as u32) {
            let held = comptime!((index * length as u32 + element) as usize);
            lines[held] = f32::reinterpret(shared[slot(first + element * apart, axis)]);
        }
        butterflies(&mut lines, comptime!(index as usize * length), length);
        #[unroll]
        for element in 0..comptime!(length as u32) {
            let held = comptime!((index * length as u32 + element) as usize);
            shared[slot(first + element * apart, axis)] = u32::reinterpret(lines[held]);
        }
    }
    sync_cube();
}

/// The words that units hold, one for each element of their runs, as runs of 16 rows of a column. Returns the run's
/// words, its first row and its column in the tile. All units of the cube must call it together.
#[cube]
pub(super) fn transpose_tile(
    words: &Array<u32>,
    shared: &mut SharedMemory<u32>,
    #[comptime] axis: Axis,
) -> (Array<u32>, u32, u32) {
    let tile = comptime!(tile_of(axis));
    // Units may still read what the transform left.
    sync_cube();
    #[unroll]
    for index in 0..comptime!(RUN as u32) {
        shared[slot(UNIT_POS * comptime!(RUN as u32) + index, axis)] = words[index as usize];
    }
    sync_cube();
    let runs_of_col = comptime!((tile.rows / RUN) as u32);
    let tile_col = UNIT_POS / runs_of_col;
    let tile_row = UNIT_POS % runs_of_col * comptime!(RUN as u32);
    let mut of_col = Array::<u32>::new(RUN);
    #[unroll]
    for index in 0..comptime!(RUN as u32) {
        let at = (tile_row + index) * comptime!(tile.cols as u32) + tile_col;
        of_col[index as usize] = shared[slot(at, axis)];
    }
    (of_col, tile_row, tile_col)
}

/// The inverse of the layer's step size, 0 where there is none.
#[cube]
pub(super) fn inverse_step(steps: &Array<f32>, layer: u32) -> f32 {
    given_inverse_cube(steps[layer as usize])
}
