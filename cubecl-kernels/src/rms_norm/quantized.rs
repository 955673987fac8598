//! The output of RMSNorm as a quantized matrix: from its input as that waits or flows, and the number of each row.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    error::KernelError,
    operator_input::OperatorInput,
    quantize::{QuantizeSpec, Quantized},
    row_units::{
        check_rows, check_statistics,
        norm::RowStatistics,
        quantized::{Norm, quantize_norm},
    },
};

const OPERATION: &str = "quantize_rms_norm";

/// The output of [`rms_norm`](super::rms_norm()), quantized, from what it gave of the rows: in one launch, without the
/// output in memory, where a kernel has the spec.
///
/// - `x`: a matrix as `rms_norm` takes it, or that in numbers, in which it waited.
/// - `gain`: as there.
/// - `inverse_rms`: f32 `[rows]`, as it gave it.
/// - `spec`: kernels have, of an `x` of f16 or bf16, with gains of f32 or the type of `x`, INT8 in blocks of 128, of whole
///   blocks of INT8 in groups of 128 columns or in such blocks, on CUDA's sm_80 and later; and FP8 by one scale, to nearest,
///   of whole tiles of 64 x 128 elements of E4M3 in groups along the rows, on Hopper.
///
/// To the bit, the result is that of [`quantize`](crate::quantize::quantize()) of `x inverse_rms gain`, rounded to the
/// type of `x`.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what `quantize`
/// makes, or as `quantize`.
pub fn quantize_rms_norm<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    inverse_rms: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let x = x.into();
    let [rows, cols] = check_rows(client, OPERATION, &x, gain)?;
    check_statistics(OPERATION, &x, rows, &[("inverse_rms", inverse_rms)])?;
    let norm = Norm {
        gain,
        bias: None,
        rows: RowStatistics {
            mean: None,
            inverse: inverse_rms,
        },
    };
    quantize_norm(client, OPERATION, x, [rows, cols], &norm, spec)
}
