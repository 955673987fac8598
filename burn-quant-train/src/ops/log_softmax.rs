//! The logarithm of a softmax, in FP32, that saves its output alone: dX = dY - exp(Y) rowsum(dY).

use burn_backend::{DType, TensorMetadata, tensor::FloatTensor};

use crate::{
    data::{
        DataBackend,
        composition::{LogSoftmaxForward, LogSoftmaxGradient},
    },
    saved::{HeldTensor, recorded::Recorded},
};

/// The logarithm of the softmax of the last dimension, on a device that has kernels. X has any float dtype.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogSoftmax;

impl<B: DataBackend> Recorded<B, 1> for LogSoftmax {
    /// The output, and the dtype of X.
    type Saved = (HeldTensor<B>, DType);

    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(*self)
    }

    /// The output stays exact: an error in it is one in the loss.
    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        let dtype = x.dtype();
        let output = HeldTensor::of("log_softmax", B::run(LogSoftmaxForward, x.into_value()));
        output.cell().keep_exact();
        (output.clone(), (output, dtype))
    }

    fn backward(
        (output, dtype): Self::Saved,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let gradient = B::run(
            LogSoftmaxGradient { dtype },
            (output.into_value(), gradient),
        );
        [Some(gradient)]
    }
}
