//! The search for gradients that are not finite.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_contiguous, check_dtype, check_float, storage},
    error::KernelError,
    optimizer_state::kernel::is_aligned,
    rounding::magnitude_bits,
};

use super::many::batch_size;

const OPERATION: &str = "find_nonfinite";
const UNITS: usize = 256;
/// Vectors that a unit reads, one after the other; more cubes than the device holds at once gain nothing.
const VECTORS_OF_UNIT: usize = 8;
/// Cubes of one tensor at most; the others of a launch idle while they find that they are past the end.
const MAX_CUBES: usize = 4096;
const INFINITY: u32 = f32::INFINITY.to_bits();

/// Writes the index plus one of a gradient that holds NaN or an infinity to the flag, on the device. Where there are
/// several, any of them; where there is none the flag stays as it is, so begin with 0.
///
/// - `gradients`: f32, f16 or bf16, contiguous.
/// - `flag`: i32 `[1]`.
///
/// # Errors
///
/// When shapes or element types differ from these.
pub fn find_nonfinite<R: Runtime>(
    client: &ComputeClient<R>,
    gradients: &[TensorHandle<R>],
    flag: &TensorHandle<R>,
) -> Result<(), KernelError> {
    check_dtype(OPERATION, "flag", flag, storage::<i32>(), "use i32")?;
    if check_contiguous(OPERATION, flag)? != 1 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("flag {:?}", flag.shape()),
            remedy: "pass a flag [1]",
        });
    }
    let mut jobs = Vec::with_capacity(gradients.len());
    for (index, tensor) in gradients.iter().enumerate() {
        check_float(client, OPERATION, "a gradient", tensor.dtype)?;
        let len = check_contiguous(OPERATION, tensor)?;
        let width = if len % 4 == 0 && is_aligned(tensor) {
            4
        } else {
            1
        };
        if len > 0 {
            jobs.push(Job {
                tensor,
                index,
                vectors: len / width,
                width,
            });
        }
    }
    // A launch takes tensors of one type and width, and of similar size.
    jobs.sort_by_key(|job| (job.tensor.dtype.to_string(), job.width, job.vectors));
    let batches = jobs
        .chunk_by(|a, b| a.tensor.dtype == b.tensor.dtype && a.width == b.width)
        .flat_map(|jobs| jobs.chunks(batch_size(client, 1)));
    for batch in batches {
        launch(client, batch, flag);
    }
    Ok(())
}

/// A gradient to search.
struct Job<'a, R: Runtime> {
    tensor: &'a TensorHandle<R>,
    /// Its place among the gradients.
    index: usize,
    vectors: usize,
    width: usize,
}

fn launch<R: Runtime>(client: &ComputeClient<R>, batch: &[Job<'_, R>], flag: &TensorHandle<R>) {
    let longest = batch.iter().map(|job| job.vectors).max();
    let cubes = longest
        .unwrap_or_default()
        .div_ceil(UNITS * VECTORS_OF_UNIT)
        .min(MAX_CUBES);
    // SAFETY: reads are guarded by each tensor's number of vectors; the flag has one element.
    #[allow(unsafe_code)]
    unsafe {
        find_nonfinite_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, batch.len() as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            batch[0].width,
            batch
                .iter()
                .map(|job| job.tensor.clone().into_arg())
                .collect(),
            batch.iter().map(|job| job.vectors as u32).collect(),
            batch.iter().map(|job| job.index as i32 + 1).collect(),
            flag.clone().into_arg(),
            batch[0].width,
            batch[0].tensor.dtype,
        );
    }
}

#[cube(launch_unchecked)]
fn find_nonfinite_kernel<G: Numeric, N: Size>(
    gradients: &Sequence<Tensor<Vector<G, N>>>,
    vectors: &Sequence<u32>,
    marks: &Sequence<i32>,
    flag: &mut Tensor<i32>,
    #[comptime] width: usize,
    #[define(G)] _dtype: StorageType,
) {
    #[unroll]
    for index in 0..vectors.len() {
        if CUBE_POS_Y == index as u32 {
            let gradient = gradients.index(index);
            let count = *vectors.index(index);
            let mut largest = 0u32;
            let mut at = CUBE_POS_X * CUBE_DIM + UNIT_POS;
            while at < count {
                let vector = gradient[at as usize];
                #[unroll]
                for lane in 0..width {
                    largest = max(largest, magnitude_bits(f32::cast_from(vector[lane])));
                }
                at += CUBE_COUNT_X * CUBE_DIM;
            }
            // Units that find something all write, and one of them stays.
            if largest >= INFINITY {
                flag[0] = *marks.index(index);
            }
        }
    }
}
