//! What a cube makes of one value of each of its units, in two steps of 16 values each: one order whatever the device,
//! and two waits. The result is that of the cube's first unit; in the others it has no meaning.

use cubecl::prelude::*;

use crate::quantize::tile::UNITS;

/// Units of the second step.
const PARTS: usize = 16;

/// The sum. All units of the cube must call it together.
#[cube]
pub(super) fn cube_sum(value: f32) -> f32 {
    let mut shared = SharedMemory::<f32>::new(UNITS);
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut sum = value;
    if unit < PARTS {
        #[unroll]
        for part in 1..comptime!(UNITS / PARTS) {
            sum += shared[unit + comptime!(part * PARTS)];
        }
        shared[unit] = sum;
    }
    sync_cube();
    if unit == 0 {
        #[unroll]
        for part in 1..PARTS {
            sum += shared[part];
        }
    }
    sum
}

/// The largest. All units of the cube must call it together.
#[cube]
pub(super) fn cube_max(value: u32) -> u32 {
    let mut shared = SharedMemory::<u32>::new(UNITS);
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut largest = value;
    if unit < PARTS {
        #[unroll]
        for part in 1..comptime!(UNITS / PARTS) {
            largest = max(largest, shared[unit + comptime!(part * PARTS)]);
        }
        shared[unit] = largest;
    }
    sync_cube();
    if unit == 0 {
        #[unroll]
        for part in 1..PARTS {
            largest = max(largest, shared[part]);
        }
    }
    largest
}
