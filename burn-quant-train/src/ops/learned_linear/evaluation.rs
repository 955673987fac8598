//! Y = X W + bias by the step sizes that a layer has learned, where nothing is trained.

use std::sync::Arc;

use burn_backend::{FloatDType, TensorMetadata, tensor::FloatTensor};

use super::pass::{Forward, ForwardInputs};
use crate::{
    data::{
        DataBackend,
        learned_step::{HadamardSize, HadamardTransform, LearnedStep},
    },
    layer::Layer,
    ops::matrix::{Source, flattened, with_last},
    recipe::LearnedSlots,
    saved::{HeldTensor, recorded::Recorded},
};

/// Y `[.., N]` = X `[.., K]` W `[K, N]` + bias `[N]`, of inputs X, W and, if there are three, the bias. The run is not
/// counted, and moves nothing.
#[derive(Debug, Clone)]
pub(crate) struct LearnedEvaluation<B: DataBackend> {
    /// The step sizes of X and W.
    steps: [LearnedStep<B>; 2],
    /// The size of the transform.
    size: HadamardSize,
    /// The dtype of Y.
    compute: FloatDType,
}

impl<B: DataBackend> LearnedEvaluation<B> {
    /// A run of the layer on `device`; `None` if it has no step sizes yet.
    pub fn of(
        layer: &Arc<Layer<B>>,
        slots: LearnedSlots,
        device: &B::Device,
        compute: FloatDType,
    ) -> Option<Self> {
        let [x, weight] = slots
            .of_operands()
            .map(|slot| layer.known_step(slot, device));
        Some(Self {
            steps: [x?, weight?],
            size: match slots.hadamard {
                Some(slot) => layer.present_size(slot, device)?,
                None => HadamardSize::IDENTITY,
            },
            compute,
        })
    }
}

impl<B: DataBackend, const N: usize> Recorded<B, N> for LearnedEvaluation<B> {
    type Saved = ();

    fn again(&mut self, _: &[HeldTensor<B>; N]) -> Option<Self> {
        Some(self.clone())
    }

    fn forward(self, inputs: [HeldTensor<B>; N], _: [bool; N]) -> (HeldTensor<B>, ()) {
        let mut inputs = inputs.into_iter();
        let (Some(x), Some(weight), bias) = (inputs.next(), inputs.next(), inputs.next()) else {
            unreachable!("a linear layer has X and W");
        };
        let (x_shape, weight_shape) = (x.shape(), weight.shape());
        let [_, features] = flattened(&x_shape);
        let size = HadamardSize::largest(features, self.size);
        let [of_x, of_weight] = self.steps;
        let operation = Forward {
            shape: with_last(&x_shape, &weight_shape),
            x_shape,
            compute: self.compute,
            size,
            of_tagged: HadamardTransform::of_rows(size),
            layer: of_x.layer,
            sets_step: false,
            sets_weight_step: false,
            transposed_weight: false,
            wants_y: true,
            keeps_x: None,
        };
        let inputs = ForwardInputs {
            x: x.into_value(),
            weight: Source::Float(weight.into_value()),
            bias: bias.map(HeldTensor::into_value),
            steps: of_x.steps,
            weight_steps: Some(of_weight.steps),
        };
        let y = B::run(operation, inputs).y.expect("Y was wanted");
        (HeldTensor::of("linear", y), ())
    }

    fn backward((): Self::Saved, _: FloatTensor<B>, _: [bool; N]) -> [Option<FloatTensor<B>>; N] {
        unreachable!("nothing is trained")
    }
}
