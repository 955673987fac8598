//! GELU in FP32 (Hendrycks & Gimpel, 2016, section 2).

use burn_backend::tensor::FloatTensor;

use crate::{
    data::{
        DataBackend,
        composition::{GeluForward, GeluGradient},
    },
    saved::{HeldTensor, recorded::Recorded},
};

/// `x Φ(x)`, Φ being the distribution function of the standard normal distribution. Saves x.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gelu;

impl<B: DataBackend> Recorded<B, 1> for Gelu {
    type Saved = HeldTensor<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        let output = B::run(GeluForward, x.clone().into_input());
        (HeldTensor::of("gelu", output), x)
    }

    fn backward(
        x: Self::Saved,
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        [Some(B::run(GeluGradient, (x.into_input(), gradient)))]
    }
}
