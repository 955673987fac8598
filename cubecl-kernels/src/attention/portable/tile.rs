//! Tiles of 64 rows, and products of them, in a cube of 16 x 16 units.
//!
//! A unit has 4 x 4 neighbours of a product of 64 x 64. Operands pass through shared memory, 16 deep at a time and with
//! the depth outermost, so that units read neighbouring words.

use cubecl::prelude::*;

use crate::attention::heads::Head;

/// Rows and columns of a tile.
pub(super) const TILE: usize = 64;
/// Elements along the depth of a product that are in shared memory at once.
const STEP: usize = 16;
/// Units of a cube.
pub(super) const UNITS: usize = 256;
/// Units side by side.
pub(super) const SIDE: usize = 16;
/// Rows, and columns, of a unit.
pub(super) const OWN: usize = TILE / SIDE;
/// Elements of a tile that a unit has.
pub(super) const ELEMENTS: usize = OWN * OWN;
/// Words from a row of a tile in shared memory to the next: one more than needed, so that units that write a column of
/// it write to different banks.
pub(super) const PITCH: usize = TILE + 1;

/// The first row of a unit in its tile.
#[cube]
pub(super) fn unit_row() -> u32 {
    UNIT_POS / comptime!(SIDE as u32) * comptime!(OWN as u32)
}

/// The first column of a unit in its tile.
#[cube]
pub(super) fn unit_col() -> u32 {
    UNIT_POS % comptime!(SIDE as u32) * comptime!(OWN as u32)
}

/// Zeros.
#[cube]
pub(super) fn zeros(#[comptime] count: usize) -> Array<f32> {
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for slot in 0..count {
        sums[slot] = 0.0f32;
    }
    sums
}

/// Memory of the operands of a product.
#[derive(CubeType)]
pub(super) struct Operands {
    left: SharedMemory<f32>,
    right: SharedMemory<f32>,
}

#[cube]
pub(super) fn operands() -> Operands {
    Operands {
        left: SharedMemory::<f32>::new(comptime!(TILE * STEP)),
        right: SharedMemory::<f32>::new(comptime!(TILE * STEP)),
    }
}

/// Products of 64 rows of one head, from `left_row` on, and 64 of another: what the unit has of them.
#[cube]
pub(super) fn products<F: Numeric>(
    left: &Array<F>,
    of_left: &Head,
    left_row: u32,
    right: &Array<F>,
    of_right: &Head,
    right_row: u32,
    memory: &mut Operands,
) -> Array<f32> {
    let mut sums = zeros(ELEMENTS);
    let mut col = 0u32.runtime();
    while col < of_left.width {
        sync_cube();
        stage_features::<F>(&mut memory.left, left, of_left, left_row, col);
        stage_features::<F>(&mut memory.right, right, of_right, right_row, col);
        sync_cube();
        for depth in 0..comptime!(STEP as u32) {
            add_outer(
                &mut sums,
                &memory.left,
                depth * comptime!(TILE as u32),
                &memory.right,
                depth * comptime!(TILE as u32),
                0usize,
            );
        }
        col += comptime!(STEP as u32);
    }
    sums
}

/// Adds the products of a tile in shared memory, with its depth outermost, and the 64 rows of a head from `row` on: to
/// `sums`, 16 elements for each panel of 64 features.
#[cube]
pub(super) fn add_products<F: Numeric>(
    sums: &mut Array<f32>,
    tile: &SharedMemory<f32>,
    right: &Array<F>,
    of_right: &Head,
    row: u32,
    memory: &mut Operands,
    #[comptime] panels: usize,
) {
    let mut first = 0u32.runtime();
    let end = min(of_right.rows - row, comptime!(TILE as u32));
    while first < end {
        #[unroll]
        for panel in 0..panels {
            sync_cube();
            stage_rows::<F>(
                &mut memory.right,
                right,
                of_right,
                row + first,
                comptime!((panel * TILE) as u32),
            );
            sync_cube();
            for depth in 0..comptime!(STEP as u32) {
                add_outer(
                    sums,
                    tile,
                    (first + depth) * comptime!(PITCH as u32),
                    &memory.right,
                    depth * comptime!(TILE as u32),
                    panel,
                );
            }
        }
        first += comptime!(STEP as u32);
    }
}

/// Adds the products of the unit's rows and columns at one depth, which start at these words.
#[cube]
fn add_outer(
    sums: &mut Array<f32>,
    left: &SharedMemory<f32>,
    left_start: u32,
    right: &SharedMemory<f32>,
    right_start: u32,
    #[comptime] panel: usize,
) {
    let row = left_start + unit_row();
    let col = right_start + unit_col();
    #[unroll]
    for i in 0..OWN {
        let of_row = left[(row + comptime!(i as u32)) as usize];
        #[unroll]
        for j in 0..OWN {
            sums[comptime!(panel * ELEMENTS + i * OWN + j)] +=
                of_row * right[(col + comptime!(j as u32)) as usize];
        }
    }
}

/// Brings 16 features of 64 rows to shared memory, features outermost; 0 outside of the head.
#[cube]
fn stage_features<F: Numeric>(
    tile: &mut SharedMemory<f32>,
    x: &Array<F>,
    of_x: &Head,
    row_0: u32,
    col_0: u32,
) {
    let tile_row = UNIT_POS / 4;
    let row = row_0 + tile_row;
    #[unroll]
    for lane in 0..4u32 {
        let depth = UNIT_POS % 4 * 4 + lane;
        tile[(depth * comptime!(TILE as u32) + tile_row) as usize] =
            element::<F>(x, of_x, row, col_0 + depth);
    }
}

/// Brings 64 features of 16 rows to shared memory; 0 outside of the head.
#[cube]
fn stage_rows<F: Numeric>(
    tile: &mut SharedMemory<f32>,
    x: &Array<F>,
    of_x: &Head,
    row_0: u32,
    col_0: u32,
) {
    let depth = UNIT_POS / 16;
    #[unroll]
    for lane in 0..4u32 {
        // Neighbours of a row are read by neighbours.
        let col = UNIT_POS % 16 + lane * 16;
        tile[(depth * comptime!(TILE as u32) + col) as usize] =
            element::<F>(x, of_x, row_0 + depth, col_0 + col);
    }
}

#[cube]
fn element<F: Numeric>(x: &Array<F>, of_x: &Head, row: u32, col: u32) -> f32 {
    let mut value = 0.0f32;
    if row < of_x.rows && col < of_x.width {
        let index = of_x.start + row * of_x.row_stride + col * of_x.col_stride;
        value = f32::cast_from(x[index as usize]);
    }
    value
}

/// Writes sums of 64 rows, each times its factor, as rows from `row` on of a new tensor `[batch, heads, rows, width]`
/// in the memory of `[batch, rows, heads, width]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write_rows<F: Numeric>(
    out: &mut Array<F>,
    sums: &Array<f32>,
    factors: &Array<f32>,
    batch: u32,
    head: u32,
    heads: u32,
    row: u32,
    rows: u32,
    width: u32,
    #[comptime] panels: usize,
) {
    #[unroll]
    for i in 0..OWN {
        let row = row + unit_row() + comptime!(i as u32);
        if row < rows {
            let start = ((batch * rows + row) * heads + head) * width;
            #[unroll]
            for panel in 0..panels {
                #[unroll]
                for j in 0..OWN {
                    let col = unit_col() + comptime!((panel * TILE + j) as u32);
                    if col < width {
                        let sum = sums[comptime!(panel * ELEMENTS + i * OWN + j)];
                        out[(start + col) as usize] = F::cast_from(sum * factors[i]);
                    }
                }
            }
        }
    }
}

/// The same for all rows.
#[cube]
pub(super) fn factors_of(factor: f32) -> Array<f32> {
    let mut factors = Array::<f32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        factors[i] = factor;
    }
    factors
}

/// Writes what the unit has of a tile, rows outermost.
#[cube]
pub(super) fn write_tile(tile: &mut SharedMemory<f32>, values: &Array<f32>) {
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OWN {
            let at = (unit_row() + comptime!(i as u32)) * comptime!(PITCH as u32)
                + unit_col()
                + comptime!(j as u32);
            tile[at as usize] = values[comptime!(i * OWN + j)];
        }
    }
}
