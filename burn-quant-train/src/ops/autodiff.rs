//! The quantized linear layer: forward product, saved context, and the two backward products (fallback-int8, section
//! 5.1).

use std::sync::Arc;

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::{DType, FloatDType, Shape, TensorMetadata, tensor::FloatTensor};

use super::{
    Fallback, InputCasts, Layout, LinearCall, QuantBackend, QuantOps, Quantized, StochasticKey,
    attention::{self, AttentionInputs, AttentionKernels, AttentionScores},
    matmul::{self, MatmulKernel},
};
use crate::{
    layer::{Layer, Role},
    recipe::{Cast, LinearRow, Rounding},
    tag::Tag,
    tensor::View,
};

/// A quantized weight, and whether the layer multiplies by its transpose.
#[derive(Debug)]
pub(super) struct Weight<B: QuantOps> {
    matrix: Arc<Quantized<B>>,
    transposed: bool,
}

impl<B: QuantOps> Clone for Weight<B> {
    fn clone(&self) -> Self {
        Self {
            matrix: self.matrix.clone(),
            transposed: self.transposed,
        }
    }
}

impl<B: QuantOps> Weight<B> {
    fn operand(&self, transpose: bool) -> super::Operand<'_, B> {
        super::Operand {
            matrix: &self.matrix,
            transpose: self.transposed != transpose,
        }
    }

    fn columns(&self) -> usize {
        self.operand(false).shape()[1]
    }
}

/// W quantized: once for each value of the weight, so once for each optimizer step, for forward and backward, and in
/// whichever orientation it is used, since square blocks transpose for free. Its INT8 copy is one byte a parameter; a
/// product that needs the other layout makes that for its own time.
pub(super) fn quantized_weight<B: QuantOps>(
    weight: FloatTensor<B>,
    tag: &Tag<B>,
    view: View,
    cast: Cast,
) -> Weight<B> {
    let transposed = view == View::Transposed;
    let matrix = tag.copy(cast, || {
        let matrix = flatten::<B>(weight);
        let matrix = if transposed {
            B::float_swap_dims(matrix, 0, 1)
        } else {
            matrix
        };
        B::quantize_matrix(matrix, cast, Layout::RowMajor, None)
    });
    Weight { matrix, transposed }
}

/// The input of a layer, `[.., K]`, and the tag of the matrix that it is.
pub(super) struct Input<'a, B: QuantOps> {
    pub x: FloatTensor<B>,
    pub tag: Option<&'a Tag<B>>,
}

/// Y = X W + bias in the compute dtype, X quantized to nearest, with fallback if the recipe says so; and with `saves`
/// the copy of X for the backward pass, from the same read.
pub(super) fn forward<B: QuantOps>(
    input: Input<'_, B>,
    weight: &Weight<B>,
    bias: Option<FloatTensor<B>>,
    layer: &Layer<B>,
    row: &LinearRow,
    compute: FloatDType,
    saves: bool,
) -> (FloatTensor<B>, Option<Arc<Quantized<B>>>) {
    let Input { x, tag } = input;
    let mut shape = x.shape();
    let last = shape.num_dims() - 1;
    shape[last] = weight.columns();
    let existing = |cast| tag.and_then(|tag| tag.existing_copy(cast));
    let keep = |cast, copy| match tag {
        Some(tag) => tag.copy(cast, || copy),
        None => Arc::new(copy),
    };
    let saved = saves.then(|| existing(row.saved_x)).flatten();
    let casts = InputCasts {
        forward: row.x,
        saved: (saves && saved.is_none())
            .then(|| (row.saved_x, key(layer, row.saved_x, Role::SavedInput))),
    };
    let (matrix, residual, new) = if row.fallback {
        let device = B::float_device(&x);
        let input = layer.bank().with_state(&device, |state| {
            let fallback = Fallback {
                layer: layer.index(),
                thresholds: state.thresholds.clone(),
                counts: state.counts.clone(),
            };
            let mut input = B::quantize_input(flatten::<B>(x), casts, Some(fallback));
            state.counts = input
                .counts
                .take()
                .expect("a fallback state goes in and comes out");
            input
        });
        (Arc::new(input.forward), input.residual, input.saved)
    } else {
        match (existing(row.x), casts.saved) {
            (Some(matrix), None) => (matrix, None, None),
            (Some(matrix), Some((cast, key))) => {
                let copy = B::quantize_matrix(flatten::<B>(x), cast, Layout::Transposed, key);
                (matrix, None, Some(copy))
            }
            (None, _) => {
                let input = B::quantize_input(flatten::<B>(x), casts, None);
                (keep(row.x, input.forward), None, input.saved)
            }
        }
    };
    let saved = saved.or_else(|| new.map(|copy| keep(row.saved_x, copy)));
    let w = weight.operand(false);
    let y = B::quantized_matmul(matrix.operand(), residual.as_ref(), w, bias, compute);
    (B::float_reshape(y, shape), saved)
}

/// What a quantized layer keeps for the backward pass: X and W in INT8, and nothing larger.
#[derive(Debug)]
struct Context<B: QuantOps> {
    /// Present if W needs a gradient.
    x: Option<Arc<Quantized<B>>>,
    /// Present if X needs a gradient.
    weight: Option<Weight<B>>,
    x_shape: Shape,
    x_dtype: DType,
    weight_shape: Shape,
    weight_dtype: DType,
    bias_dtype: Option<DType>,
    grad_y: Cast,
    layer: Arc<Layer<B>>,
}

impl<B: QuantOps> Clone for Context<B> {
    fn clone(&self) -> Self {
        Self {
            x: self.x.clone(),
            weight: self.weight.clone(),
            x_shape: self.x_shape.clone(),
            x_dtype: self.x_dtype,
            weight_shape: self.weight_shape.clone(),
            weight_dtype: self.weight_dtype,
            bias_dtype: self.bias_dtype,
            grad_y: self.grad_y,
            layer: self.layer.clone(),
        }
    }
}

/// The backward pass, for parents X, W and, with `N` = 3, the bias.
#[derive(Debug)]
struct QuantizedLinear;

impl<B: QuantOps, const N: usize> Backward<B, N> for QuantizedLinear {
    type State = Context<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let context = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let [x_node, weight_node, bias_node] = {
            let mut parents = ops.parents.into_iter();
            std::array::from_fn(|_| parents.next().flatten())
        };

        if let (Some(node), Some(dtype)) = (bias_node, context.bias_dtype) {
            let grad = crate::precision::cast_to::<B>(grad.clone(), Some(FloatDType::F32));
            let grad = B::linear_bias_backward(grad);
            grads.register::<B>(
                node.id,
                crate::precision::cast_to::<B>(grad, Some(dtype.into())),
            );
        }
        let layout = match (&x_node, &weight_node) {
            (Some(_), Some(_)) => Layout::Both,
            (Some(_), None) => Layout::RowMajor,
            (None, Some(_)) => Layout::Transposed,
            (None, None) => return,
        };
        let key = key(&context.layer, context.grad_y, Role::OutputGradient);
        let grad = B::quantize_matrix(flatten::<B>(grad), context.grad_y, layout, key);

        // dX = dY Wᵀ
        if let (Some(node), Some(weight)) = (x_node, &context.weight) {
            let dtype = context.x_dtype.into();
            let grad_x =
                B::quantized_matmul(grad.operand(), None, weight.operand(true), None, dtype);
            grads.register::<B>(node.id, B::float_reshape(grad_x, context.x_shape));
        }
        // dW = Xᵀ dY, straight from the accumulators
        if let (Some(node), Some(x)) = (weight_node, &context.x) {
            let dtype = context.weight_dtype.into();
            let grad_w = B::quantized_matmul(x.t(), None, grad.operand(), None, dtype);
            grads.register::<B>(node.id, B::float_reshape(grad_w, context.weight_shape));
        }
    }
}

impl<B: QuantOps, C: CheckpointStrategy> QuantBackend for Autodiff<B, C> {
    type Base = B;

    fn quantized_linear(call: LinearCall<'_, Self>) -> FloatTensor<Self> {
        let LinearCall {
            x,
            x_tag,
            weight,
            weight_tag,
            weight_view,
            bias,
            layer,
            row,
            compute,
        } = call;
        let quantized =
            quantized_weight::<B>(weight.primitive.clone(), weight_tag, weight_view, row.w);
        let input = Input {
            x: x.primitive.clone(),
            tag: x_tag,
        };
        let (output, saved) = forward::<B>(
            input,
            &quantized,
            bias.as_ref().map(|bias| bias.primitive.clone()),
            &layer,
            &row,
            compute,
            weight.is_tracked(),
        );
        let context = || Context {
            x: saved,
            weight: x.is_tracked().then(|| quantized.clone()),
            x_shape: x.shape(),
            x_dtype: x.dtype(),
            weight_shape: weight.shape(),
            weight_dtype: weight.dtype(),
            bias_dtype: bias.as_ref().map(TensorMetadata::dtype),
            grad_y: row.grad_y,
            layer: layer.clone(),
        };
        macro_rules! node {
            ($nodes:expr) => {
                match Backward::<B, _>::prepare::<C>(QuantizedLinear, $nodes)
                    .compute_bound()
                    .stateful()
                {
                    OpsKind::Tracked(prep) => prep.finish(context(), output),
                    OpsKind::UnTracked(prep) => prep.finish(output),
                }
            };
        }
        match &bias {
            Some(bias) => node!([x.node.clone(), weight.node.clone(), bias.node.clone()]),
            None => node!([x.node.clone(), weight.node.clone()]),
        }
    }

    fn matmul_by(
        kernel: MatmulKernel<B>,
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        matmul::recorded::<B, C>(kernel, lhs, rhs)
    }

    fn attention_by(
        kernels: AttentionKernels<B>,
        inputs: AttentionInputs<FloatTensor<Self>>,
        scores: AttentionScores,
    ) -> FloatTensor<Self> {
        attention::recorded::<B, C>(kernels, inputs, scores)
    }
}

/// The key for rounding by `cast`, if it needs one.
fn key<B: QuantOps>(layer: &Layer<B>, cast: Cast, role: Role) -> Option<StochasticKey> {
    match cast.rounding {
        Rounding::Nearest => None,
        Rounding::Stochastic => Some(layer.next_key(role)),
    }
}

/// All dimensions but the last as rows.
fn flatten<B: QuantOps>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    if shape.num_dims() == 2 {
        return tensor;
    }
    let cols = shape[shape.num_dims() - 1];
    let rows = shape[..shape.num_dims() - 1].iter().product();
    B::float_reshape(tensor, Shape::new([rows, cols]))
}
