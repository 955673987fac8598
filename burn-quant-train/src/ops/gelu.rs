//! GELU in FP32 (Hendrycks & Gimpel, 2016, section 2).

use crate::{
    data::{
        DataBackend,
        composition::{GeluForward, GeluGradient},
    },
    saved::{
        HeldTensor,
        later::{self, Later, OfOne},
        recorded::Recorded,
    },
};

/// `x Φ(x)`, Φ being the distribution function of the standard normal distribution. Saves x.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gelu {
    /// True where layers that read the output quantize it [in squares or by one number](crate::recipe::Row): then, of what
    /// flows, the output is not computed before that, and where a kernel has it never in memory.
    pub is_quantized: bool,
}

impl<B: DataBackend> Recorded<B, 1> for Gelu {
    type Saved = HeldTensor<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, [x]: [HeldTensor<B>; 1], wanted: [bool; 1]) -> (HeldTensor<B>, Self::Saved) {
        if self.is_quantized && x.is_in_numbers() && later::may_wait(&wanted) {
            let output = Later::OfOne(Box::new(OfOne::Gelu(x.clone())));
            let form = x.cell().form();
            return (HeldTensor::later("gelu", output, form), x);
        }
        let output = B::run(GeluForward, x.clone().into_input());
        (HeldTensor::of("gelu", output), x)
    }

    /// The gradient waits for the layer that made x, if that quantizes it by its own maximum.
    fn backward_held(
        x: Self::Saved,
        (gradient, other): (HeldTensor<B>, Option<HeldTensor<B>>),
        _wanted: [bool; 1],
    ) -> [Option<HeldTensor<B>>; 1] {
        debug_assert!(other.is_none(), "only who joins gets another gradient");
        let gradient = gradient.into_input();
        let copy = x.cell().gradient_copy();
        if copy.is_some_and(|copy| copy.delayed.is_none()) && x.is_in_numbers() {
            let form = x.cell().form();
            let later = Later::OfOne(Box::new(OfOne::GeluGradient(x, gradient)));
            return [Some(HeldTensor::later("gelu", later, form))];
        }
        let of_x = B::run(GeluGradient, (x.into_input(), gradient));
        [Some(HeldTensor::new(of_x))]
    }
}
