//! The update of many small tensors in one launch, their moments in FP32: norms and biases.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    device::{storage, tensors_of_launch},
    loss_scaling::inverse,
};

use super::{
    AdamWTensors, Shared,
    update::{CoefficientsArg, first_moment, parameter, second_moment, step_of},
};

const UNITS: usize = 256;
/// The most elements of a parameter that shares a launch with others, if it is updated in place: of more, that of a kernel
/// which reads four elements at once pays.
pub const MAX_SHARED_LEN: usize = 1 << 16;
const MAX_TENSORS: usize = 8;
/// Bindings that do not depend on the number of tensors: the clock, the flag, the scale, the factors, and the scalars and
/// shapes. With those of one tensor they are 9, which a device must have.
const SHARED_BINDINGS: usize = 5;
const BINDINGS_OF_TENSOR: usize = 4;

pub(super) fn accepts<R: Runtime>(tensors: &AdamWTensors<R>) -> bool {
    tensors.first.format.is_none()
        && tensors.second.format.is_none()
        && tensors.parameter.dtype == storage::<f32>()
        && tensors.updated.is_none()
        && tensors.len() <= MAX_SHARED_LEN
}

/// Tensors of one launch, where each takes this many bindings.
pub(super) fn batch_size<R: Runtime>(client: &ComputeClient<R>, bindings: usize) -> usize {
    tensors_of_launch(client, SHARED_BINDINGS, bindings, MAX_TENSORS)
}

/// AdamW on many small tensors, each with its place among all of the step.
///
/// # Safety
///
/// All were checked by [`AdamWTensors::check`], and [`accepts`] takes them. Of what they share, the clock has two
/// numbers and the flag one, all i32; the scale has one, and the factors have one for each place, f32.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &[(usize, &AdamWTensors<R>)],
    shared: &Shared<'_, R>,
) {
    // A launch takes gradients of one type, and cubes for the longest of its tensors.
    let mut sorted = tensors.to_vec();
    sorted.sort_by_key(|(_, tensors)| (tensors.gradient.dtype.to_string(), tensors.len()));
    let batches = sorted
        .chunk_by(|(_, a), (_, b)| a.gradient.dtype == b.gradient.dtype)
        .flat_map(|tensors| tensors.chunks(batch_size(client, BINDINGS_OF_TENSOR)));
    for batch in batches {
        let longest = batch.iter().map(|(_, tensors)| tensors.len()).max();
        let cubes = longest.unwrap_or_default().div_ceil(UNITS);
        let [clock, flag, scale, factors] = shared.tensors();
        // SAFETY: accesses are guarded by each tensor's number of elements, which by the caller's promise is that of
        // its gradient and moments.
        unsafe {
            adamw_many_kernel::launch_unchecked::<R>(
                client,
                CubeCount::Static(cubes as u32, batch.len() as u32, 1),
                CubeDim::new_1d(UNITS as u32),
                batch
                    .iter()
                    .map(|(_, t)| t.parameter.clone().into_arg())
                    .collect(),
                batch
                    .iter()
                    .map(|(_, t)| t.gradient.clone().into_arg())
                    .collect(),
                batch
                    .iter()
                    .map(|(_, t)| t.first.values.clone().into_arg())
                    .collect(),
                batch
                    .iter()
                    .map(|(_, t)| t.second.values.clone().into_arg())
                    .collect(),
                batch.iter().map(|(_, t)| t.len() as u32).collect(),
                batch.iter().map(|(place, _)| *place as u32).collect(),
                clock.into_arg(),
                flag.into_arg(),
                scale.into_arg(),
                factors.into_arg(),
                shared.coefficients.launch(),
                0,
                shared.nonfinite.is_some(),
                shared.loss_scale.is_some(),
                shared.factors.is_some(),
                batch[0].1.gradient.dtype,
            );
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn adamw_many_kernel<G: Numeric>(
    parameters: &mut Sequence<Tensor<f32>>,
    gradients: &Sequence<Tensor<G>>,
    first: &mut Sequence<Tensor<f32>>,
    second: &mut Sequence<Tensor<f32>>,
    lens: &Sequence<u32>,
    places: &Sequence<u32>,
    clock: &Tensor<i32>,
    nonfinite: &Tensor<i32>,
    loss_scale: &Tensor<f32>,
    factors: &Tensor<f32>,
    coefficients: CoefficientsArg,
    zero: u32,
    #[comptime] flagged: bool,
    #[comptime] scaled: bool,
    #[comptime] clipped: bool,
    #[define(G)] _gradient_dtype: StorageType,
) {
    if comptime!(flagged) {
        if nonfinite[0] != 0 {
            terminate!();
        }
    }
    let step = step_of(&coefficients, clock[0]);
    let element = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    #[unroll]
    for index in 0..lens.len() {
        if CUBE_POS_Y == index as u32 && element < *lens.index(index) {
            let at = element as usize;
            let mut g = f32::cast_from(gradients.index(index)[at]);
            if comptime!(scaled) {
                g *= inverse(loss_scale[0]);
            }
            if comptime!(clipped) {
                g *= factors[*places.index(index) as usize];
            }
            let m = first_moment(first.index(index)[at], g, &step, zero, true);
            let v = second_moment(second.index(index)[at], g, &step, zero, true);
            let p = parameter(parameters.index(index)[at], m, v, &step);
            first.index_mut(index)[at] = m;
            second.index_mut(index)[at] = v;
            parameters.index_mut(index)[at] = p;
        }
    }
}
