//! Autocast: which dtype each operation computes in.
//!
//! Parameters stay FP32; the recipe's *compute dtype* (BF16, FP16 or FP32) is the dtype of matrix products and of the
//! elementwise operations between them; reductions, softmax, normalization statistics, exponentials, logarithms and
//! losses run in FP32. With FP32 as the compute dtype nothing is cast, and results on a CPU equal the inner backend's
//! bit for bit. FP64 tensors are never narrowed. Source: design.md, "Precision policy", after the
//! training-precision guide.

use burn_backend::{DType, FloatDType, TensorMetadata};

use crate::{
    data::cast_to,
    recipe::Recipe,
    saved::recorded::{InsideTensor, QuantBackend},
};

/// How an operation treats the dtypes of its float operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A matrix product or convolution: every operand is cast to the compute dtype.
    Compute,
    /// Needs range or precision (reduction, exponential, softmax, loss): operands narrower than FP32 are cast to FP32.
    Full,
    /// Elementwise with several operands: mixed dtypes meet by [`promote`].
    Promote,
    /// Writes values into a tensor: every operand takes the dtype of the first.
    Follow,
}

/// The dtypes of an operation's float operands, in order.
#[derive(Debug, Default)]
pub struct Dtypes {
    first: Option<DType>,
    promoted: Option<DType>,
    mixed: bool,
    has_double: bool,
}

impl Dtypes {
    /// Takes note of one more operand.
    pub fn see<T: TensorMetadata>(&mut self, tensor: &T) {
        let dtype = tensor.dtype();
        self.has_double |= dtype == DType::F64;
        match self.promoted {
            None => {
                self.first = Some(dtype);
                self.promoted = Some(dtype);
            }
            Some(seen) => self.mixed |= seen != dtype,
        }
    }
}

/// The dtype in which operands of different dtypes meet: FP64 if one is FP64, else the compute dtype.
///
/// A mixed pair is almost always an activation in the compute dtype and an FP32 parameter (a bias, a normalization
/// gain) or FP32 statistic. Widening to FP32 would double the activation and everything after it.
pub fn promote(compute: FloatDType, has_double: bool) -> FloatDType {
    if has_double { FloatDType::F64 } else { compute }
}

impl Class {
    /// The dtype to cast operands to, or `None` to leave them.
    pub fn target(self, compute: FloatDType, dtypes: &Dtypes) -> Option<FloatDType> {
        match self {
            Class::Compute => Some(promote(compute, dtypes.has_double)),
            Class::Full if dtypes.has_double => Some(FloatDType::F64),
            Class::Full => Some(FloatDType::F32),
            Class::Promote => dtypes.mixed.then(|| promote(compute, dtypes.has_double)),
            Class::Follow => dtypes.mixed.then(|| dtypes.first.map(Into::into)).flatten(),
        }
    }
}

/// A tensor in the dtype of a class.
pub(super) fn in_class<B: QuantBackend, R: Recipe>(
    class: Class,
    tensor: InsideTensor<B>,
) -> InsideTensor<B> {
    let mut dtypes = Dtypes::default();
    dtypes.see(&tensor);
    cast_to::<B::Inside>(tensor, class.target(R::row().compute, &dtypes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug)]
    struct Meta(DType);
    impl TensorMetadata for Meta {
        fn dtype(&self) -> DType {
            self.0
        }
        fn shape(&self) -> burn_backend::Shape {
            burn_backend::Shape::new([1])
        }
    }

    fn target(class: Class, compute: FloatDType, dtypes: &[DType]) -> Option<FloatDType> {
        let mut seen = Dtypes::default();
        dtypes.iter().for_each(|d| seen.see(&Meta(*d)));
        class.target(compute, &seen)
    }

    #[test]
    fn the_promotion_table_of_the_book() {
        use DType::{BF16, F32, F64};
        let bf16 = FloatDType::BF16;
        assert_eq!(target(Class::Promote, bf16, &[BF16, BF16]), None);
        assert_eq!(target(Class::Promote, bf16, &[F32, F32]), None);
        assert_eq!(target(Class::Promote, bf16, &[F32, BF16]), Some(bf16));
        assert_eq!(
            target(Class::Promote, bf16, &[BF16, F64]),
            Some(FloatDType::F64)
        );
        assert_eq!(target(Class::Compute, bf16, &[F32, BF16]), Some(bf16));
        assert_eq!(target(Class::Full, bf16, &[BF16]), Some(FloatDType::F32));
        assert_eq!(target(Class::Full, bf16, &[F64]), Some(FloatDType::F64));
        assert_eq!(
            target(Class::Follow, bf16, &[F32, BF16]),
            Some(FloatDType::F32)
        );
    }
}
