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
/// Bindings that do not depend on the number of tensors: the output, and the lengths.
const SHARED_BINDINGS: usize = 2;

/// The elements of all tensors in a new one, `[elements]`, in the order of the tensors.
///
/// - `tensors`: all f32 or all i32, contiguous, of any rank, at least one. A cube copies each, so they should be short.
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
    // SAFETY: accesses are guarded by each tensor's number of elements, for whose sum the output was allocated.
    #[allow(unsafe_code)]
    unsafe {
        concatenate_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(jobs.len() as u32, 1, 1),
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

#[cube(launch_unchecked)]
fn concatenate_kernel<E: Numeric>(
    tensors: &Sequence<Array<E>>,
    lens: &Sequence<u32>,
    starts: &Sequence<u32>,
    out: &mut Array<E>,
    #[define(E)] _dtype: StorageType,
) {
    #[unroll]
    for index in 0..lens.len() {
        if CUBE_POS_X == index as u32 {
            let tensor = tensors.index(index);
            let mut at = UNIT_POS;
            while at < *lens.index(index) {
                out[(*starts.index(index) + at) as usize] = tensor[at as usize];
                at += UNITS as u32;
            }
        }
    }
}
