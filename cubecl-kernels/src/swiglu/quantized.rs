//! The output of SwiGLU's gate as a quantized matrix.

use cubecl::prelude::*;

use crate::{
    device::MatrixView,
    error::KernelError,
    operator_input::{OperatorInput, check_alike},
    quantize::{QuantizeSpec, Quantized, quantize},
};

use super::{block, matrix_scale, swiglu};

const OPERATION: &str = "quantize_swiglu";

/// `silu(gate) up`, quantized: in one launch, without the product in memory, where a kernel has the spec, that of FP8 with
/// one scale for the matrix, or of INT8 in blocks of 128.
///
/// - `gate`, `up`: matrices as [`swiglu`] takes them. Of numbers with scales a kernel has E4M3 in groups for FP8, and INT8
///   in blocks of 128 for such blocks.
///
/// To the bit, the result is that of [`quantize`](crate::quantize::quantize()) of what `swiglu` gives.
///
/// # Errors
///
/// As these two.
pub fn quantize_swiglu<R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<R>; 2],
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let [gate, up] = factors;
    check_alike(client, OPERATION, &[("gate", gate), ("up", up)])?;
    if let Some(dense) = gate.dense() {
        let view = MatrixView::new(OPERATION, dense)?;
        let quantized = matrix_scale::launch(client, factors, &view, spec, None);
        if let Some((quantized, _)) = quantized {
            return Ok(quantized);
        }
        if let [
            OperatorInput::Quantized(gate, dtype),
            OperatorInput::Quantized(up, _),
        ] = factors
            && let Some(quantized) = block::launch_of_codes(client, [gate, up], dtype, &view, spec)
        {
            return Ok(quantized);
        }
    }
    quantize(client, &swiglu(client, gate, up)?, spec)
}
