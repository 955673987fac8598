//! The product of quantized matrices as an operation.

use burn_backend::{FloatDType, tensor::FloatTensor};

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
    let operation = Product {
        transpose: [left.transpose, right.transpose],
        accumulation,
        dtype,
    };
    let factors = Factors {
        left: left.matrix.clone(),
        residual: residual.cloned(),
        right: right.matrix.clone(),
        bias,
    };
    B::run(operation, factors)
}

#[derive(Debug, Clone)]
struct Product {
    transpose: [bool; 2],
    accumulation: Accumulation,
    dtype: FloatDType,
}

#[derive(Debug, Clone)]
struct Factors<T: Tensors> {
    left: Quantized<T>,
    residual: Option<Residual<T>>,
    right: Quantized<T>,
    bias: Option<T::Float>,
}

impl Bundle for Factors<Outline> {
    type On<T: Tensors> = Factors<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        factors: Factors<S>,
        change: &mut impl Change<S, T>,
    ) -> Factors<T> {
        Factors {
            left: Quantized::rebuild(factors.left, change),
            residual: Option::<Residual<Outline>>::rebuild(factors.residual, change),
            right: Quantized::rebuild(factors.right, change),
            bias: factors.bias.map(|bias| change.float(bias)),
        }
    }
}

impl Product {
    fn operands<'a, T: Tensors>(&self, factors: &'a Factors<T>) -> [Operand<'a, T>; 2] {
        let [left, right] = self.transpose;
        [(&factors.left, left), (&factors.right, right)]
            .map(|(matrix, transpose)| Operand { matrix, transpose })
    }
}

impl Operation for Product {
    const NAME: &'static str = "product";
    type Inputs = Factors<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, factors: &Factors<T>) -> FloatMeta {
        let [left, right] = self.operands(factors);
        FloatMeta::new([left.shape()[0], right.shape()[1]], self.dtype)
    }

    fn run<K: Kernels>(self, mut factors: Factors<K>) -> FloatTensor<K> {
        let bias = factors.bias.take();
        let [left, right] = self.operands(&factors);
        let residual = factors.residual.as_ref();
        K::product(left, residual, right, bias, self.accumulation, self.dtype)
    }
}
