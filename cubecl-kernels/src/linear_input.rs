//! The input of a linear layer, quantized for the forward product and for the backward pass from one read
//! (fallback-int8, sections 4.2 to 4.4).

use cubecl::prelude::*;

use crate::{
    error::KernelError,
    fallback::{FallbackResidual, FallbackState},
    granularity::Granularity,
    layout::Layout,
    quantize::{
        MatrixSource, Quantized,
        block::{self, BlockOutput, Round},
        buffers::allocate_input,
        check_granularity,
    },
    rounding::StochasticKey,
    swiglu,
};

const OPERATION: &str = "quantize_linear_input";

/// The input of a linear layer in INT8, for its forward product and, where that is wanted, for its backward pass.
#[derive(Debug)]
pub struct LinearInput<R: Runtime> {
    /// The row-major copy, rounded to nearest: the operand of the forward product.
    pub forward: Quantized<R>,
    /// The residual of the blocks that fell back, for the forward product; `None` without a fallback.
    pub residual: Option<FallbackResidual<R>>,
    /// The transposed copy, rounded stochastically: what the backward pass multiplies to the weight's gradient. It
    /// shares its scales with `forward`, and an allocation with these; what only the forward product reads has another.
    /// `None` without a key.
    pub saved: Option<Quantized<R>>,
    /// The copies of gate and of up that the source asked for.
    pub contexts: Option<[Quantized<R>; 2]>,
}

impl<R: Runtime> Clone for LinearInput<R> {
    fn clone(&self) -> Self {
        Self {
            forward: self.forward.clone(),
            residual: self.residual.clone(),
            saved: self.saved.clone(),
            contexts: self.contexts.clone(),
        }
    }
}

/// Quantizes the input of a linear layer in square blocks, in one launch that reads it once.
///
/// - `x`: a matrix of f32, f16 or bf16 with any strides, or [what it is computed from](MatrixSource).
/// - `block`: 16, 32, 64 or 128.
/// - `key`: the random stream of the saved copy; `None` for no such copy.
/// - `fallback`: the layer's threshold and counters, as [`quantize_fallback`](crate::fallback::quantize_fallback) takes
///   them; `None` for no fallback.
///
/// To the bit, `forward` and `residual` are what `quantize_fallback`, or [`quantize`](crate::quantize::quantize) with
/// nearest rounding, gives with [`Layout::RowMajor`], and `saved` is what `quantize` gives with [`Layout::Transposed`]
/// and [`Rounding::Stochastic`](crate::rounding::Rounding::Stochastic). The copies of gate and of up are those of
/// `quantize` too.
///
/// # Errors
///
/// When shapes or element types differ from these, or the layer is out of range, or copies of gate and of up are asked
/// for that [`swiglu_compressing`](crate::swiglu::swiglu_compressing) does not write.
pub fn quantize_linear_input<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<MatrixSource<'a, R>>,
    block: usize,
    key: Option<StochasticKey>,
    fallback: Option<FallbackState<R>>,
) -> Result<LinearInput<R>, KernelError> {
    let x = x.into();
    let view = x.view(client, OPERATION)?;
    check_granularity(OPERATION, Granularity::Block(block))?;
    if let Some(state) = &fallback {
        state.check(OPERATION)?;
    }
    let layout = match key {
        Some(_) => Layout::Both,
        None => Layout::RowMajor,
    };
    let contexts;
    let (both, residual) = allocate_input(client, &view, block, layout, fallback.is_some());
    if view.shape.num_elements() > 0 {
        let written = BlockOutput {
            row_major: both.values.as_ref().map(|values| (values, Round::Nearest)),
            transposed: both
                .transposed
                .as_ref()
                .map(|values| (values, Round::Stochastic)),
            scales: &both.scales,
            fallback: fallback
                .as_ref()
                .zip(residual.as_ref())
                .map(|(state, residual)| state.written(residual)),
        };
        // SAFETY: the outputs were allocated for this view, which is that of all of them, and the state was checked.
        #[allow(unsafe_code)]
        unsafe {
            contexts = match x {
                MatrixSource::Floats(x) => {
                    block::launch(client, x, &view, block, key, &written);
                    None
                }
                MatrixSource::Swiglu {
                    gate,
                    up,
                    contexts: spec,
                } => {
                    let factors = [gate, up];
                    let spec = spec.as_ref();
                    match swiglu::block::launch(client, factors, &view, block, key, &written, spec)
                    {
                        Some(contexts) => contexts,
                        None => {
                            let (x, contexts) = x.floats_and_contexts(client)?;
                            block::launch(client, &x, &view, block, key, &written);
                            contexts
                        }
                    }
                }
            };
        }
    } else {
        (_, contexts) = x.floats_and_contexts(client)?;
    }
    let saved = key.map(|_| Quantized {
        values: None,
        ..both.clone()
    });
    let forward = Quantized {
        transposed: None,
        ..both
    };
    Ok(LinearInput {
        forward,
        residual,
        saved,
        contexts,
    })
}
