//! Many short tensors, one behind the other in a new one: the numbers that layers leave, for one read or one reduction.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_dtype, empty, storage, tensors_of_launch},
    error::KernelError,
};

const OPERATION: &str = "concatenate";
const UNITS: usize = 256;
/// Tensors of one launch, where the device binds as many. A launch of fewer fills up with empty ones, so that one
/// kernel serves all.
const MAX_TENSORS: usize = 64;
/// Cubes in the second dimension of a launch; more go into the third.
const MAX_CUBES: usize = 1 << 15;
/// Bindings that do not depend on the number of tensors: the output, and the lengths.
const SHARED_BINDINGS: usize = 2;

/// The elements of all tensors in a new one, `[elements]`, in the order of the tensors.
///
/// - `tensors`: all f32 or all i32, contiguous, of any rank, at least one. They should be short, and of similar length: a
///   launch has as many cubes for each as its longest needs.
///
/// # Errors
///
/// When there is no tensor, or one is not contiguous or of another element type, or there are more than 2^31 elements in
/// all.
pub fn concatenate<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &[TensorHandle<R>],
) -> Result<TensorHandle<R>, KernelError> {
    let Some(first) = tensors.first() else {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: "no tensors".to_owned(),
            remedy: "pass at least one",
        });
    };
    let dtype = match first.dtype == storage::<i32>() {
        true => storage::<i32>(),
        false => storage::<f32>(),
    };
    let mut len = 0;
    let mut jobs = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let remedy = "pass tensors that are all f32, or all i32";
        check_dtype(OPERATION, "a tensor", tensor, dtype, remedy)?;
        let of_tensor = check_contiguous(OPERATION, tensor)?;
        if of_tensor > 0 {
            jobs.push(Job {
                tensor,
                start: len,
                len: of_tensor,
            });
            len += of_tensor;
        }
    }
    if len > 1 << 31 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("{len} elements in all"),
            remedy: "pass short tensors, of at most 2^31 elements in all",
        });
    }
    let out = empty(client, vec![len], dtype);
    let slots = tensors_of_launch(client, SHARED_BINDINGS, 1, MAX_TENSORS);
    for jobs in jobs.chunks(slots) {
        launch(client, jobs, slots, &out);
    }
    Ok(out)
}

/// A tensor, and where its elements go.
struct Job<'a, R: Runtime> {
    tensor: &'a TensorHandle<R>,
    start: usize,
    len: usize,
}

/// Copies at most `slots` tensors.
fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    jobs: &[Job<'_, R>],
    slots: usize,
    out: &TensorHandle<R>,
) {
    let filled = jobs.iter().map(Some).chain(std::iter::repeat(None));
    let filled = filled.take(slots);
    let of_jobs = |number: fn(&Job<'_, R>) -> usize| {
        let numbers = filled.clone().map(|job| job.map_or(0, number) as u32);
        numbers.collect()
    };
    let longest = jobs.iter().map(|job| job.len).max().unwrap_or_default();
    let cubes = longest.div_ceil(UNITS);
    let rows = cubes.min(MAX_CUBES);
    // SAFETY: accesses are guarded by each tensor's number of elements, for whose sum the output was allocated.
    #[allow(unsafe_code)]
    unsafe {
        concatenate_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(jobs.len() as u32, rows as u32, cubes.div_ceil(rows) as u32),
            CubeDim::new_1d(UNITS as u32),
            filled
                .clone()
                .map(|job| array(job.unwrap_or(&jobs[0]).tensor.clone()))
                .collect(),
            of_jobs(|job| job.len),
            of_jobs(|job| job.start),
            array(out.clone()),
            out.dtype,
        );
    }
}

/// A unit copies an element: a loop for each of 64 tensors takes 1.4 s to compile (one NVIDIA H200, 2026-11-28).
#[cube(launch_unchecked)]
fn concatenate_kernel<E: Numeric>(
    tensors: &Sequence<Array<E>>,
    lens: &Sequence<u32>,
    starts: &Sequence<u32>,
    out: &mut Array<E>,
    #[define(E)] _dtype: StorageType,
) {
    let at = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * UNITS as u32 + UNIT_POS;
    #[unroll]
    for index in 0..lens.len() {
        if CUBE_POS_X == index as u32 && at < *lens.index(index) {
            out[(*starts.index(index) + at) as usize] = tensors.index(index)[at as usize];
        }
    }
}
