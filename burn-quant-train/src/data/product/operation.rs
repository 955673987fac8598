//! The product of quantized matrices as an operation, and as what a matrix is computed from.

use burn_backend::{FloatDType, Shape, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use super::Accumulation;

use crate::data::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    quantize::{Operand, Quantized, Residual},
    tensors::{Bundle, Change, FloatMeta, Outline, Tensors},
};

/// The product of two quantized matrices: see [`ProductKernels::product`](super::ProductKernels::product).
///
/// # Panics
///
/// If the inner dimensions differ, or `bias` does not have one element for each column, or the device does not support
/// `dtype`.
pub fn product<B: DataBackend>(
    left: Operand<'_, B>,
    residual: Option<&Residual<B>>,
    right: Operand<'_, B>,
    bias: Option<FloatTensor<B>>,
    accumulation: Accumulation,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let shape = Shape::new([left.shape()[0], right.shape()[1]]);
    let factors = ProductInputs::new([left, right], bias, (accumulation, dtype), shape);
    B::run(
        Product,
        ProductInputs {
            residual: residual.cloned(),
            ..factors
        },
    )
}

/// A product of quantized matrices that is to be computed, and the tensor that it makes.
#[derive(Debug, Clone)]
pub struct ProductInputs<T: Tensors> {
    left: Quantized<T>,
    residual: Option<Residual<T>>,
    right: Quantized<T>,
    bias: Option<T::Float>,
    transpose: [bool; 2],
    accumulation: Accumulation,
    /// The tensor's shape, whose dimensions but the last are rows of the product.
    shape: Shape,
    dtype: FloatDType,
}

impl<T: Tensors + Clone> ProductInputs<T> {
    /// The product of two operands, plus a bias `[columns]`, as a tensor of this shape.
    pub(crate) fn new(
        [left, right]: [Operand<'_, T>; 2],
        bias: Option<T::Float>,
        (accumulation, dtype): (Accumulation, FloatDType),
        shape: Shape,
    ) -> Self {
        Self {
            left: left.matrix.clone(),
            residual: None,
            right: right.matrix.clone(),
            bias,
            transpose: [left.transpose, right.transpose],
            accumulation,
            shape,
            dtype,
        }
    }
}

impl<T: Tensors> ProductInputs<T> {
    /// The shape of the tensor.
    pub(crate) fn shape(&self) -> Shape {
        self.shape.clone()
    }

    /// The same as a tensor of another shape.
    pub(crate) fn reshaped(self, shape: Shape) -> Self {
        Self { shape, ..self }
    }

    fn operands(&self) -> [Operand<'_, T>; 2] {
        let [left, right] = self.transpose;
        [(&self.left, left), (&self.right, right)]
            .map(|(matrix, transpose)| Operand { matrix, transpose })
    }
}

impl<K: Kernels> ProductInputs<K> {
    /// The tensor.
    pub(crate) fn into_floats(mut self) -> FloatTensor<K> {
        let (bias, residual) = (self.bias.take(), self.residual.as_ref());
        let [left, right] = self.operands();
        let product = K::product(left, residual, right, bias, self.accumulation, self.dtype);
        K::float_reshape(product, self.shape)
    }

    /// The matrix, quantized.
    ///
    /// # Panics
    ///
    /// If the left operand has residuals.
    pub(crate) fn quantized(mut self, spec: &QuantizeSpec) -> Quantized<K> {
        assert!(
            self.residual.is_none(),
            "quantized_product: a left operand with residuals; compute the product first"
        );
        let bias = self.bias.take();
        K::quantized_product(self.operands(), bias, self.accumulation, self.dtype, spec)
    }
}

impl Bundle for ProductInputs<Outline> {
    type On<T: Tensors> = ProductInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        factors: ProductInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> ProductInputs<T> {
        ProductInputs {
            left: Quantized::rebuild(factors.left, change),
            residual: Option::<Residual<Outline>>::rebuild(factors.residual, change),
            right: Quantized::rebuild(factors.right, change),
            bias: factors.bias.map(|bias| change.float(bias)),
            transpose: factors.transpose,
            accumulation: factors.accumulation,
            shape: factors.shape,
            dtype: factors.dtype,
        }
    }
}

/// The product, in floats.
#[derive(Debug, Clone)]
pub(crate) struct Product;

impl Operation for Product {
    const NAME: &'static str = "product";
    type Inputs = ProductInputs<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, factors: &ProductInputs<T>) -> FloatMeta {
        FloatMeta::new(factors.shape(), factors.dtype)
    }

    fn run<K: Kernels>(self, factors: ProductInputs<K>) -> FloatTensor<K> {
        factors.into_floats()
    }
}
