//! The two passes of a quantized linear layer as one operation each (fallback-int8, section 5.1): in a fused stream,
//! what a pass makes for itself, the operands of its products, never becomes a tensor, and leading dimensions cost
//! nothing.

use burn_backend::{FloatDType, Shape, TensorMetadata, tensor::FloatTensor};

use super::{
    InputCasts, Layout, LinearInput, Operand, QuantOps, Quantized, Residual, StochasticKey,
};
use crate::{layer::Layer, recipe::Cast};

/// The forward pass: Y `[.., N]` = X `[.., K]` W + bias.
#[derive(Debug)]
pub struct LinearForward<'a, B: QuantOps> {
    /// X.
    pub x: LinearX<'a, B>,
    /// The product.
    pub product: LinearProduct<'a, B>,
}

/// The input of a forward pass.
#[derive(Debug)]
pub enum LinearX<'a, B: QuantOps> {
    /// Quantized before, without fallback.
    Quantized {
        /// X as a matrix, `[rows, K]`.
        matrix: &'a Quantized<B>,
        /// `[.., K]`.
        shape: Shape,
    },
    /// To be quantized, for the product to nearest.
    Float {
        /// X, `[.., K]`, of any float dtype.
        x: FloatTensor<B>,
        /// What to make of X.
        casts: InputCasts,
        /// The layer with whose state X is quantized, where it is with fallback: its counters go up, and blocks that
        /// fell back enter the product with their residuals.
        fallback: Option<&'a Layer<B>>,
        /// Whether X as the product takes it is wanted afterwards.
        keeps_operand: bool,
    },
}

/// The product of the forward pass.
#[derive(Debug)]
pub struct LinearProduct<'a, B: QuantOps> {
    /// W, `[K, N]`.
    pub weight: LinearWeight<'a, B>,
    /// `[N]`.
    pub bias: Option<FloatTensor<B>>,
    /// The dtype of Y.
    pub dtype: FloatDType,
}

/// The weight of a forward pass.
#[derive(Debug)]
pub enum LinearWeight<'a, B: QuantOps> {
    /// Quantized before.
    Quantized(Operand<'a, B>),
    /// To be quantized.
    Float {
        /// The weight, with leading dimensions of 1.
        weight: FloatTensor<B>,
        /// How it is quantized.
        cast: Cast,
        /// Whether the quantized matrix is the transpose of the weight.
        transposed: bool,
    },
}

/// What the forward pass returns.
#[derive(Debug)]
pub struct LinearOutput<B: QuantOps> {
    /// Y.
    pub y: FloatTensor<B>,
    /// X as the product took it, without residuals, if it was wanted.
    pub operand: Option<Quantized<B>>,
    /// The copy of X for the backward pass, if it was wanted.
    pub saved: Option<Quantized<B>>,
    /// The weight, if it was to be quantized: row-major, one byte a parameter in INT8.
    pub weight: Option<Quantized<B>>,
}

/// The backward pass, from dY `[.., N]`.
#[derive(Debug)]
pub struct LinearBackward<'a, B: QuantOps> {
    /// dY, of any float dtype.
    pub grad: FloatTensor<B>,
    /// How dY is quantized.
    pub cast: Cast,
    /// The random numbers of its rounding.
    pub key: Option<StochasticKey>,
    /// W, `[K, N]`, where dX = dY Wᵀ is wanted, and what dX is.
    pub weight: Option<(Operand<'a, B>, GradientForm)>,
    /// X, `[rows, K]`, where dW = Xᵀ dY is wanted, and what dW is.
    pub x: Option<(Operand<'a, B>, GradientForm)>,
}

/// Shape and dtype of a gradient: those of what it is the gradient of.
#[derive(Debug, Clone)]
pub struct GradientForm {
    /// `[.., K]`, or `[K, N]` with leading dimensions of 1.
    pub shape: Shape,
    /// A float dtype.
    pub dtype: FloatDType,
}

/// What the backward pass returns: those gradients that were wanted.
#[derive(Debug)]
pub struct LinearGradients<B: QuantOps> {
    /// dX.
    pub x: Option<FloatTensor<B>>,
    /// dW.
    pub weight: Option<FloatTensor<B>>,
}

impl<B: QuantOps> LinearForward<'_, B> {
    /// The shape of Y.
    pub(super) fn output_shape(&self) -> Shape {
        let mut shape = match &self.x {
            LinearX::Quantized { shape, .. } => shape.clone(),
            LinearX::Float { x, .. } => x.shape(),
        };
        let last = shape.num_dims() - 1;
        shape[last] = match &self.product.weight {
            LinearWeight::Quantized(operand) => operand.shape()[1],
            LinearWeight::Float { weight, .. } => flattened(&weight.shape())[1],
        };
        shape
    }
}

impl<B: QuantOps> LinearBackward<'_, B> {
    /// The copies of dY that the products read; `None` if there are none.
    fn layout(&self) -> Option<Layout> {
        match (&self.weight, &self.x) {
            (Some(_), Some(_)) => Some(Layout::Both),
            (Some(_), None) => Some(Layout::RowMajor),
            (None, Some(_)) => Some(Layout::Transposed),
            (None, None) => None,
        }
    }
}

/// Rows and columns of a tensor whose dimensions but the last are rows.
pub(super) fn flattened(shape: &Shape) -> [usize; 2] {
    let (cols, rows) = shape
        .split_last()
        .expect("a matrix has at least one dimension");
    [rows.iter().product(), *cols]
}

/// All dimensions but the last as rows.
pub(super) fn flatten<B: QuantOps>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    match shape.num_dims() {
        2 => tensor,
        _ => B::float_reshape(tensor, Shape::new(flattened(&shape))),
    }
}

/// A weight with leading dimensions of 1, quantized: the matrix, or with `transposed` its transpose.
fn quantized_weight<B: QuantOps>(
    weight: FloatTensor<B>,
    cast: Cast,
    transposed: bool,
    layout: Layout,
) -> Quantized<B> {
    let matrix = flatten::<B>(weight);
    let matrix = match transposed {
        false => matrix,
        true => B::float_swap_dims(matrix, 0, 1),
    };
    B::quantize_matrix(matrix, cast, layout, None)
}

/// [`QuantOps::linear_forward`] by an operation for each step. The layers of a model wait for each other only while X
/// is quantized.
pub(super) fn forward<B: QuantOps>(call: LinearForward<'_, B>) -> LinearOutput<B> {
    let shape = call.output_shape();
    match call.x {
        LinearX::Quantized { matrix, .. } => product(matrix.operand(), None, call.product, shape),
        LinearX::Float {
            x,
            casts,
            fallback,
            keeps_operand,
        } => {
            let device = B::float_device(&x);
            let x = flatten::<B>(x);
            let input = match fallback {
                None => B::quantize_input(x, casts, None),
                Some(layer) => layer.with_fallback(&device, |fallback| {
                    let mut input = B::quantize_input(x, casts, Some(fallback));
                    let counts = input.counts.take();
                    (
                        input,
                        counts.expect("a fallback state goes in and comes out"),
                    )
                }),
            };
            product_of_input(input, keeps_operand, call.product, shape)
        }
    }
}

/// The product of X, just quantized, and W, as Y of this shape, and the copies of X that are wanted.
pub(super) fn product_of_input<B: QuantOps>(
    input: LinearInput<B>,
    keeps_operand: bool,
    call: LinearProduct<'_, B>,
    shape: Shape,
) -> LinearOutput<B> {
    let x = input.forward.operand();
    let output = product(x, input.residual.as_ref(), call, shape);
    LinearOutput {
        operand: keeps_operand.then_some(input.forward),
        saved: input.saved,
        ..output
    }
}

/// The product of X and W as Y of this shape.
pub(super) fn product<B: QuantOps>(
    x: Operand<'_, B>,
    residual: Option<&Residual<B>>,
    call: LinearProduct<'_, B>,
    shape: Shape,
) -> LinearOutput<B> {
    let LinearProduct {
        weight,
        bias,
        dtype,
    } = call;
    let by = |weight: Operand<'_, B>| {
        let y = B::quantized_matmul(x, residual, weight, bias, dtype);
        B::float_reshape(y, shape)
    };
    let (y, weight) = match weight {
        LinearWeight::Quantized(weight) => (by(weight), None),
        LinearWeight::Float {
            weight,
            cast,
            transposed,
        } => {
            // The product sums along the rows of W, so it reads the layout in which these are neighbours: the second
            // one, unless the matrix is the transpose. It lives for the product only.
            let layout = match transposed {
                false => Layout::Both,
                true => Layout::RowMajor,
            };
            let matrix = quantized_weight::<B>(weight, cast, transposed, layout);
            let y = by(Operand {
                matrix: &matrix,
                transpose: transposed,
            });
            let row_major = Quantized {
                transposed: None,
                ..matrix
            };
            (y, Some(row_major))
        }
    };
    LinearOutput {
        y,
        operand: None,
        saved: None,
        weight,
    }
}

/// [`QuantOps::linear_backward`] by an operation for each step.
pub(super) fn backward<B: QuantOps>(call: LinearBackward<'_, B>) -> LinearGradients<B> {
    let Some(layout) = call.layout() else {
        return LinearGradients {
            x: None,
            weight: None,
        };
    };
    let grad = B::quantize_matrix(flatten::<B>(call.grad), call.cast, layout, call.key);
    let product = |a, b, form: GradientForm| {
        let product = B::quantized_matmul(a, None, b, None, form.dtype);
        B::float_reshape(product, form.shape)
    };
    LinearGradients {
        x: call
            .weight
            .map(|(weight, form)| product(grad.operand(), weight.t(), form)),
        // Straight from the accumulators.
        weight: call.x.map(|(x, form)| product(x.t(), grad.operand(), form)),
    }
}
