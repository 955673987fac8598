//! Softmax that saves its output alone: dX = P ∘ (dP - rowsum(dP ∘ P)).

use burn_backend::tensor::FloatTensor;

use crate::{
    data::DataBackend,
    saved::{HeldTensor, recorded::Recorded},
};

/// The softmax of a dimension.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Softmax {
    pub dim: usize,
}

impl<B: DataBackend> Recorded<B, 1> for Softmax {
    /// The output, and the dimension.
    type Saved = (HeldTensor<B>, usize);

    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        let output = HeldTensor::of("softmax", B::softmax(x.into_value(), self.dim));
        (output.clone(), (output, self.dim))
    }

    fn backward(
        (output, dim): Self::Saved,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let output = output.into_value();
        let weighted = B::float_mul(gradient, output.clone());
        let sum = B::float_sum_dim(weighted.clone(), dim);
        [Some(B::float_sub(weighted, B::float_mul(output, sum)))]
    }
}
