//! The gradients of SwiGLU's two factors as quantized matrices.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::MatrixView,
    error::KernelError,
    operator_input::{OperatorInput, check_alike},
    quantize::{DelayedMaximum, QuantizeSpec, Quantized, check_given, quantize, quantize_delayed},
};

use super::{
    block,
    matrix_scale::{Gradients, launch_gradients},
    swiglu_backward,
};

const OPERATION: &str = "quantize_swiglu_gradients";

/// A quantized matrix, and its largest magnitude, f32 `[1]`.
pub type WithMaximum<R> = (Quantized<R>, TensorHandle<R>);

/// The gradients of `gate` and of `up`, in this order, quantized by a spec each: in one launch, without the gradients
/// in memory, where a kernel has the specs.
///
/// - `gate`, `up`, `gradient`: matrices as [`swiglu_backward`] takes them. Of numbers with scales a kernel has INT8 in
///   groups of 128 columns and in blocks of 128 for gradients in INT8 blocks, and E4M3 in groups for those in FP8 with one
///   scale; of the gradient INT8 in blocks of 128, where gate and up are numbers.
///
/// To the bit, the results are those of [`quantize`](crate::quantize::quantize()) of what `swiglu_backward` gives.
///
/// # Errors
///
/// As these two.
pub fn quantize_swiglu_gradients<'a, R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<'a, R>; 2],
    gradient: impl Into<OperatorInput<'a, R>>,
    specs: [&QuantizeSpec; 2],
) -> Result<[Quantized<R>; 2], KernelError> {
    let gradient = gradient.into();
    check(client, factors, gradient)?;
    if let Some(codes) = gradient.dense() {
        let view = MatrixView::new(OPERATION, codes)?;
        let matrices = block::launch_gradients(client, factors, gradient, &view, specs);
        if let Some(matrices) = matrices {
            return Ok(matrices);
        }
    }
    let gradient = &gradient.floats(client)?;
    let view = MatrixView::new(OPERATION, gradient)?;
    if specs[0] == specs[1]
        && let Some(Gradients { matrices, .. }) =
            launch_gradients(client, factors, gradient, &view, specs[0], None)
    {
        return Ok(matrices);
    }
    let [gate, up] = factors;
    let [of_gate, of_up] = swiglu_backward(client, gate, up, gradient)?;
    Ok([
        quantize(client, &of_gate, specs[0])?,
        quantize(client, &of_up, specs[1])?,
    ])
}

/// The gradients of `gate` and of `up`, in this order, quantized by the scale of a delayed maximum each, and their
/// largest magnitudes: without the gradients in memory where a kernel has the spec.
///
/// - `gate`, `up`: matrices as [`swiglu_backward`] takes them. Of numbers with scales a kernel has E4M3 in groups.
/// - `gradient`: floats like them, contiguous.
///
/// To the bit, the results are those of [`quantize_delayed`] of what `swiglu_backward` gives.
///
/// # Errors
///
/// As these two.
pub fn quantize_swiglu_gradients_delayed<R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<R>; 2],
    gradient: &TensorHandle<R>,
    spec: &QuantizeSpec,
    delayed: [DelayedMaximum<R>; 2],
) -> Result<[WithMaximum<R>; 2], KernelError> {
    check_given(spec)?;
    check(client, factors, gradient.into())?;
    let view = MatrixView::new(OPERATION, gradient)?;
    for maximum in &delayed {
        maximum.check()?;
    }
    let quantized = launch_gradients(client, factors, gradient, &view, spec, Some(delayed));
    if let Some(Gradients {
        matrices: [of_gate, of_up],
        maxima: Some([gate_maximum, up_maximum]),
    }) = quantized
    {
        return Ok([(of_gate, gate_maximum), (of_up, up_maximum)]);
    }
    let [gate, up] = factors;
    let [of_gate, of_up] = swiglu_backward(client, gate, up, gradient)?;
    Ok([
        quantize_delayed(client, &of_gate, spec, delayed[0])?,
        quantize_delayed(client, &of_up, spec, delayed[1])?,
    ])
}

fn check<R: Runtime>(
    client: &ComputeClient<R>,
    [gate, up]: [OperatorInput<R>; 2],
    gradient: OperatorInput<R>,
) -> Result<(), KernelError> {
    let named = [("gate", gate), ("up", up), ("gradient", gradient)];
    check_alike(client, OPERATION, &named)?;
    Ok(())
}
