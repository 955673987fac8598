//! The quantizations that a linear layer asks for.

use cubecl::{cuda::CudaRuntime, prelude::*};
use cubecl_kernels::{
    KernelError,
    fallback::{FallbackResidual, FallbackState},
    granularity::Granularity,
    layout::Layout,
    linear_input::quantize_linear_input,
    number::Number,
    quantize::{QuantizeSpec, Quantized, quantize, quantize_both_ways},
    rounding::{Rounding, StochasticKey},
    scale::ScaleNumber,
};

use super::BLOCK;
use crate::{gpu::Tensor, results::Operand};

/// The state of a layer's fallback.
pub struct Fallback {
    /// f32 `[1]`.
    pub thresholds: Tensor,
    /// i32 `[1, 2]`, goes up with each launch.
    pub counts: Tensor,
}

/// The outputs of quantizing one operand.
pub struct Launched {
    /// Row-major values; for dY the transposed ones too.
    pub values: Quantized<CudaRuntime>,
    /// The residuals of X.
    pub residual: Option<FallbackResidual<CudaRuntime>>,
    /// X for the backward pass: stochastic, transposed. Of groups those of the transpose.
    pub saved: Option<Quantized<CudaRuntime>>,
}

/// Quantizes one operand.
pub fn launch(
    client: &ComputeClient<CudaRuntime>,
    operand: Operand,
    x: &Tensor,
    fallback: &Fallback,
    key: StochasticKey,
) -> Result<Launched, KernelError> {
    let stochastic = Rounding::Stochastic(key);
    let (rounding, layout) = match operand {
        Operand::X => return quantize_input(client, x, fallback, key),
        Operand::Dy => (stochastic, Layout::Both),
        Operand::W => (Rounding::Nearest, Layout::RowMajor),
        Operand::Groups => {
            let [values, of_transpose] = quantize_both_ways(client, x, &GROUPS)?;
            return Ok(Launched {
                values,
                residual: None,
                saved: Some(of_transpose),
            });
        }
    };
    Ok(Launched {
        values: quantize(client, x, &spec(rounding, layout))?,
        residual: None,
        saved: None,
    })
}

/// How groups are quantized.
pub const GROUPS: QuantizeSpec =
    QuantizeSpec::new(Number::E4M3, Granularity::Group(BLOCK)).with_scale(ScaleNumber::E8M0);

/// X for the forward product and for the backward ones.
fn quantize_input(
    client: &ComputeClient<CudaRuntime>,
    x: &Tensor,
    fallback: &Fallback,
    key: StochasticKey,
) -> Result<Launched, KernelError> {
    let state = FallbackState {
        thresholds: &fallback.thresholds,
        layer: 0,
        counts: &fallback.counts,
    };
    let input = quantize_linear_input(client, x, BLOCK, Some(key), Some(state))?;
    Ok(Launched {
        values: input.forward,
        residual: input.residual,
        saved: input.saved,
    })
}

fn spec(rounding: Rounding, layout: Layout) -> QuantizeSpec {
    QuantizeSpec::int8(Granularity::Block(BLOCK))
        .with_rounding(rounding)
        .with_layout(layout)
}
