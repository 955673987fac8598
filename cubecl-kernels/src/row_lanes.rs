//! Rows that the units of a cube share, for kernels that reduce whole rows: each row has as many neighbouring units as
//! it has runs, up to all units of the cube, and longer rows take them more than once.

use cubecl::prelude::*;

use crate::number::storage::RUN;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;

/// How many units share a row: a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RowLanes {
    pub lanes: usize,
}

impl RowLanes {
    /// For rows of so many elements.
    pub fn of_cols(cols: usize) -> Self {
        Self {
            lanes: cols.div_ceil(RUN).next_power_of_two().min(UNITS),
        }
    }

    /// Cubes for so many rows.
    pub fn cubes(&self, rows: usize) -> usize {
        rows.div_ceil(UNITS / self.lanes)
    }

    /// Elements that the units of a row take at once.
    pub const fn stride(&self) -> usize {
        self.lanes * RUN
    }
}

/// The row of a unit, and the first element of its first run.
#[cube]
pub(crate) fn row_and_first(#[comptime] lanes: RowLanes) -> (u32, u32) {
    let of_row = comptime!(lanes.lanes as u32);
    let rows = comptime!((UNITS / lanes.lanes) as u32);
    (
        CUBE_POS as u32 * rows + UNIT_POS / of_row,
        UNIT_POS % of_row * comptime!(RUN as u32),
    )
}

/// Replaces each of these `count` values by its sum over the units of the row. All units of the cube must call it
/// together.
#[cube]
pub(crate) fn row_sums(
    values: &mut Array<u32>,
    #[comptime] count: usize,
    #[comptime] lanes: RowLanes,
) {
    let mut shared = SharedMemory::<u32>::new(comptime!(count * UNITS));
    let unit = UNIT_POS as usize;
    let in_row = unit % comptime!(lanes.lanes);
    #[unroll]
    for index in 0..count {
        shared[unit + comptime!(index * UNITS)] = values[index];
    }
    sync_cube();
    #[unroll]
    for step in 0..comptime!(lanes.lanes.ilog2()) {
        let distance = comptime!(lanes.lanes >> (step + 1));
        if in_row < distance {
            #[unroll]
            for index in 0..count {
                let slot = unit + comptime!(index * UNITS);
                shared[slot] += shared[slot + distance];
            }
        }
        sync_cube();
    }
    #[unroll]
    for index in 0..count {
        values[index] = shared[unit - in_row + comptime!(index * UNITS)];
    }
}
