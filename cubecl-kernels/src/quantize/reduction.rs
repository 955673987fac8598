//! Reductions of one value of each unit of a cube, in two steps of 16 values each: one order whatever the device,
//! and two waits. The result is that of the cube's first unit; in the others it has no meaning. And the sums of what
//! several cubes made.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::device::{array, empty};

use super::tile::UNITS;

/// Units of the second step.
const PARTS: usize = 16;

/// The sum. All units of the cube must call it together.
#[cube]
pub(crate) fn cube_sum<T: Numeric>(value: T) -> T {
    let mut shared = SharedMemory::<T>::new(UNITS);
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
pub(crate) fn cube_max(value: u32) -> u32 {
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

/// Adds up what cubes left: `of_cubes` `[values, cubes]` of f32 or u32 to `[values]`.
pub(crate) fn totals<R: Runtime>(
    client: &ComputeClient<R>,
    of_cubes: &TensorHandle<R>,
) -> TensorHandle<R> {
    let [values, cubes] = [of_cubes.shape()[0], of_cubes.shape()[1]];
    let out = empty(client, vec![values], of_cubes.dtype);
    // SAFETY: reads are guarded by the number of cubes, and there is a cube for each value.
    #[allow(unsafe_code)]
    unsafe {
        totals_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(values as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(of_cubes.clone()),
            array(out.clone()),
            cubes as u32,
            of_cubes.dtype,
        );
    }
    out
}

#[cube(launch_unchecked)]
fn totals_kernel<T: Numeric>(
    of_cubes: &Array<T>,
    out: &mut Array<T>,
    cubes: u32,
    #[define(T)] _dtype: StorageType,
) {
    let sum = row_total::<T>(of_cubes, CUBE_POS as u32, cubes);
    if UNIT_POS == 0 {
        out[CUBE_POS] = sum;
    }
}

/// The sum of row `row` of `[rows, cubes]`. All units of the cube must call it together.
#[cube]
pub(crate) fn row_total<T: Numeric>(of_cubes: &Array<T>, row: u32, cubes: u32) -> T {
    let mut sum = T::from_int(0);
    let mut cube = UNIT_POS;
    while cube < cubes {
        sum += of_cubes[(row * cubes + cube) as usize];
        cube += comptime!(UNITS as u32);
    }
    cube_sum::<T>(sum)
}
