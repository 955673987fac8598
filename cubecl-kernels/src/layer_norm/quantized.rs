//! The output of layer normalization as a quantized matrix: from its input as that flows, and the numbers of each row.

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

use super::check_bias;

const OPERATION: &str = "quantize_layer_norm";

/// The output of [`layer_norm`](super::layer_norm()), quantized, from what it gave of the rows: in one launch, without the
/// output in memory, where a kernel has the spec.
///
/// - `x`: a matrix as `layer_norm` takes it.
/// - `gain`, `bias`: as there.
/// - `mean`, `inverse_deviation`: f32 `[rows]`, as it gave them.
/// - `spec`: as for [`quantize_rms_norm`](crate::rms_norm::quantize_rms_norm).
///
/// To the bit, the result is that of [`quantize`](crate::quantize::quantize()) of the output that these numbers of rows
/// give.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what `quantize`
/// makes, or as `quantize`.
pub fn quantize_layer_norm<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    [mean, inverse_deviation]: [&TensorHandle<R>; 2],
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let x = x.into();
    let [rows, cols] = check_rows(client, OPERATION, &x, gain)?;
    if let Some(bias) = bias {
        check_bias(OPERATION, bias, gain)?;
    }
    let statistics = [("mean", mean), ("inverse_deviation", inverse_deviation)];
    check_statistics(OPERATION, &x, rows, &statistics)?;
    let norm = Norm {
        gain,
        bias,
        rows: RowStatistics {
            mean: Some(mean),
            inverse: inverse_deviation,
        },
    };
    quantize_norm(client, OPERATION, x, [rows, cols], &norm, spec)
}
