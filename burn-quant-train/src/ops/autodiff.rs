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
    InputCasts, LinearCall, Operand, QuantBackend, QuantOps, Quantized, StochasticKey,
    attention::{self, AttentionInputs, AttentionKernels, AttentionScores},
    linear::{GradientForm, LinearBackward, LinearForward, LinearProduct, LinearWeight, LinearX},
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
    fn operand(&self) -> Operand<'_, B> {
        Operand {
            matrix: &self.matrix,
            transpose: self.transposed,
        }
    }
}

/// The weight of a layer, with leading dimensions of 1, and the tag of the matrix that it shows.
///
/// It is quantized once for each value of the weight, so once for each optimizer step, for forward and backward, and in
/// whichever orientation it is used, since square blocks transpose for free. Its INT8 copy is one byte a parameter; a
/// product that needs the other layout has that for its own time.
pub(super) struct WeightInput<'a, B: QuantOps> {
    pub weight: FloatTensor<B>,
    pub tag: &'a Tag<B>,
    pub view: View,
}

/// The input of a layer, `[.., K]`, and the tag of the matrix that it is.
pub(super) struct Input<'a, B: QuantOps> {
    pub x: FloatTensor<B>,
    pub tag: Option<&'a Tag<B>>,
}

/// What the forward pass leaves for the backward pass.
pub(super) struct Copies<B: QuantOps> {
    /// X, if it was to be saved.
    x: Option<Arc<Quantized<B>>>,
    weight: Weight<B>,
}

/// Y = X W + bias in the compute dtype, X quantized to nearest, with fallback if the recipe says so; and with `saves`
/// the copy of X for the backward pass, from the same read.
pub(super) fn forward<B: QuantOps>(
    input: Input<'_, B>,
    weight: WeightInput<'_, B>,
    bias: Option<FloatTensor<B>>,
    layer: &Layer<B>,
    row: &LinearRow,
    compute: FloatDType,
    saves: bool,
) -> (FloatTensor<B>, Copies<B>) {
    let Input { x, tag } = input;
    let existing = |cast| tag.and_then(|tag| tag.existing_copy(cast));
    let keep = |cast, copy| match tag {
        Some(tag) => tag.copy(cast, || copy),
        None => Arc::new(copy),
    };
    let saved = saves.then(|| existing(row.saved_x)).flatten();
    let to_save = (saves && saved.is_none())
        .then(|| (row.saved_x, key(layer, row.saved_x, Role::SavedInput)));
    // A copy with fallback is the layer's own: others have other thresholds.
    let operand = (!row.fallback).then(|| existing(row.x)).flatten();
    let x = match &operand {
        Some(matrix) if to_save.is_none() => LinearX::Quantized {
            matrix,
            shape: x.shape(),
        },
        _ => LinearX::Float {
            x,
            casts: InputCasts {
                forward: row.x,
                saved: to_save,
            },
            fallback: row.fallback.then_some(layer),
            keeps_operand: !row.fallback && tag.is_some() && operand.is_none(),
        },
    };
    let WeightInput {
        weight,
        tag: weight_tag,
        view,
    } = weight;
    let transposed = view == View::Transposed;
    let matrix = weight_tag.existing_copy(row.w);
    let output = B::linear_forward(LinearForward {
        x,
        product: LinearProduct {
            weight: match &matrix {
                Some(matrix) => LinearWeight::Quantized(Operand {
                    matrix,
                    transpose: transposed,
                }),
                None => LinearWeight::Float {
                    weight,
                    cast: row.w,
                    transposed,
                },
            },
            bias,
            dtype: compute,
        },
    });
    if let Some(operand) = output.operand {
        keep(row.x, operand);
    }
    let x = saved.or_else(|| output.saved.map(|copy| keep(row.saved_x, copy)));
    let matrix = match output.weight {
        Some(new) => Some(weight_tag.copy(row.w, || new)),
        None => matrix,
    };
    let weight = Weight {
        matrix: matrix.expect("a weight is quantized before or by the operation"),
        transposed,
    };
    (output.y, Copies { x, weight })
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
        let form = |shape: &Shape, dtype: DType| GradientForm {
            shape: shape.clone(),
            dtype: dtype.into(),
        };
        let weight = x_node.as_ref().and(context.weight.as_ref()).map(|weight| {
            let of_x = form(&context.x_shape, context.x_dtype);
            (weight.operand(), of_x)
        });
        let x = weight_node.as_ref().and(context.x.as_ref()).map(|x| {
            let of_weight = form(&context.weight_shape, context.weight_dtype);
            (x.operand(), of_weight)
        });
        if weight.is_none() && x.is_none() {
            return;
        }
        let gradients = B::linear_backward(LinearBackward {
            grad,
            cast: context.grad_y,
            key: key(&context.layer, context.grad_y, Role::OutputGradient),
            weight,
            x,
        });
        for (node, grad) in [(x_node, gradients.x), (weight_node, gradients.weight)] {
            if let Some((node, grad)) = node.zip(grad) {
                grads.register::<B>(node.id, grad);
            }
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
        let input = Input {
            x: x.primitive.clone(),
            tag: x_tag,
        };
        let weight_input = WeightInput {
            weight: weight.primitive.clone(),
            tag: weight_tag,
            view: weight_view,
        };
        let (output, copies) = forward::<B>(
            input,
            weight_input,
            bias.as_ref().map(|bias| bias.primitive.clone()),
            &layer,
            &row,
            compute,
            weight.is_tracked(),
        );
        let context = || Context {
            x: copies.x,
            weight: x.is_tracked().then_some(copies.weight),
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
