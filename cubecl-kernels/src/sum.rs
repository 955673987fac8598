//! The sum or the mean of all elements of a tensor, such as the losses of tokens.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_float, cube_grid, empty, storage},
    error::KernelError,
    quantize::{reduction::cube_sum, tile},
};

const OPERATION: &str = "sum";
const UNITS: usize = tile::UNITS;
/// Elements that a unit reads in one turn, of which none waits for another.
const READS: usize = 8;
const TURNS: usize = 8;
/// Elements of a cube.
const PART: usize = UNITS * READS * TURNS;
/// The most elements that a sum is taken of.
pub const MAX_ELEMENTS: usize = 1 << 31;

/// What is made of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their sum, divided by their number.
    Mean,
}

/// The sum or the mean of all elements, f32 `[1]`; of none the sum is 0, and the mean NaN.
///
/// - `x`: f32, f16 or bf16, contiguous, of any shape. It is added up in f32.
///
/// The order depends on the number of elements alone, so that a repetition gives the same bits: 256 sums of elements
/// that are 256 apart for each part of 16,384, then those of parts in the same way.
///
/// # Errors
///
/// When `x` is no float that the device has, not contiguous, or of more than [`MAX_ELEMENTS`].
pub fn sum<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    reduction: Reduction,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "x", x.dtype)?;
    let elements = check_contiguous(OPERATION, x)?;
    if elements > MAX_ELEMENTS {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("{elements} elements"),
            remedy: "pass at most 2^31",
        });
    }
    let divisor = match reduction {
        Reduction::Sum => 1.0,
        Reduction::Mean => elements as f32,
    };
    let mut sums = x.clone();
    let mut len = elements;
    loop {
        let parts = len.div_ceil(PART).max(1);
        let next = empty(client, vec![parts], storage::<f32>());
        // SAFETY: reads are guarded by the number of elements, writes by that of parts, for which the output was
        // allocated.
        #[allow(unsafe_code)]
        unsafe {
            sum_kernel::launch_unchecked::<R>(
                client,
                cube_grid(parts),
                CubeDim::new_1d(UNITS as u32),
                array(sums.clone()),
                array(next.clone()),
                len as u32,
                parts as u32,
                if parts == 1 { divisor } else { 1.0 },
                sums.dtype,
            );
        }
        if parts == 1 {
            return Ok(next);
        }
        (sums, len) = (next, parts);
    }
}

#[cube(launch_unchecked)]
fn sum_kernel<F: Numeric>(
    x: &Array<F>,
    sums: &mut Array<f32>,
    len: u32,
    parts: u32,
    divisor: f32,
    #[define(F)] _dtype: StorageType,
) {
    let part = CUBE_POS as u32;
    if part >= parts {
        terminate!();
    }
    let mut sum = 0.0f32;
    for turn in 0..comptime!(TURNS as u32) {
        let first = (part * comptime!(TURNS as u32) + turn) * comptime!((READS * UNITS) as u32);
        #[unroll]
        for read in 0..comptime!(READS as u32) {
            let at = first + comptime!(read * UNITS as u32) + UNIT_POS;
            if at < len {
                sum += f32::cast_from(x[at as usize]);
            }
        }
    }
    let sum = cube_sum::<f32>(sum);
    if UNIT_POS == 0 {
        sums[part as usize] = sum / divisor;
    }
}
