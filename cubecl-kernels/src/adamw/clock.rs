//! The step counter on the device.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{or_unused, storage},
    error::KernelError,
};

use super::check_counters;

/// A clock before the first step: i32 `[2]`, no step taken and none skipped.
pub fn initial_clock<R: Runtime>(client: &ComputeClient<R>) -> TensorHandle<R> {
    zeros(client, 2)
}

/// A flag that is not raised: i32 `[1]`, 0.
pub fn initial_flag<R: Runtime>(client: &ComputeClient<R>) -> TensorHandle<R> {
    zeros(client, 1)
}

fn zeros<R: Runtime>(client: &ComputeClient<R>, len: usize) -> TensorHandle<R> {
    let handle = client.create_from_slice(bytemuck::cast_slice(&vec![0i32; len]));
    TensorHandle::new_contiguous(vec![len], handle, storage::<i32>())
}

/// Counts a step: as taken, `clock[0]`, or where the flag is not 0 as skipped, `clock[1]`.
///
/// - `clock`: i32 `[2]`, updated in place.
/// - `nonfinite`: i32 `[1]`; without it every step is taken.
///
/// # Errors
///
/// When shapes or element types differ from these.
pub fn tick<R: Runtime>(
    client: &ComputeClient<R>,
    clock: &TensorHandle<R>,
    nonfinite: Option<&TensorHandle<R>>,
) -> Result<(), KernelError> {
    check_counters("tick", clock, nonfinite)?;
    let flag = or_unused(nonfinite, clock, storage::<i32>());
    // SAFETY: the indices are below the lengths that `check_counters` found.
    #[allow(unsafe_code)]
    unsafe {
        tick_kernel::launch_unchecked::<R>(
            client,
            CubeCount::new_single(),
            CubeDim::new_single(),
            clock.clone().into_arg(),
            flag.into_arg(),
            nonfinite.is_some(),
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn tick_kernel(clock: &mut Tensor<i32>, nonfinite: &Tensor<i32>, #[comptime] flagged: bool) {
    if comptime!(flagged) {
        let counter = select(nonfinite[0] != 0, 1usize, 0usize);
        clock[counter] += 1;
    } else {
        clock[0] += 1;
    }
}
