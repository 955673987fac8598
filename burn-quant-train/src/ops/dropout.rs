//! Dropout, alone or of the branch of a residual sum (Srivastava et al., 2014), and that sum without dropout.

use cubecl_kernels::dropout::Draw;

use crate::{
    data::{
        DataBackend,
        composition::{self, DropoutForward},
    },
    saved::{HeldTensor, recorded::Recorded},
};

/// `x z`, or with a second input, the residual, `x z + residual`. Saves nothing: the backward pass draws z again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropout(pub Draw);

impl<B: DataBackend, const N: usize> Recorded<B, N> for Dropout {
    type Saved = Draw;

    fn again(&mut self, _inputs: &[HeldTensor<B>; N]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, inputs: [HeldTensor<B>; N], _wanted: [bool; N]) -> (HeldTensor<B>, Draw) {
        let Self(draw) = self;
        let mut inputs = inputs.into_iter();
        let x = inputs.next().expect("dropout has an input").into_input();
        let residual = inputs.next().map(HeldTensor::into_value);
        let output = B::run(DropoutForward(draw), (x, residual));
        (HeldTensor::of("dropout", output), draw)
    }

    /// The residual's gradient is that of the output.
    fn backward_held(
        draw: Draw,
        (gradient, _): (HeldTensor<B>, Option<HeldTensor<B>>),
        wanted: [bool; N],
    ) -> [Option<HeldTensor<B>>; N] {
        let of_residual = wanted.get(1).is_some_and(|&wanted| wanted);
        let mut of_residual = of_residual.then(|| gradient.clone());
        let mut of_x = wanted[0].then(|| {
            let gradient = (gradient.into_input(), None);
            HeldTensor::new(B::run(DropoutForward(draw), gradient))
        });
        std::array::from_fn(|index| match index {
            0 => of_x.take(),
            _ => of_residual.take(),
        })
    }
}

/// `x + residual`. Saves nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResidualSum;

impl<B: DataBackend> Recorded<B, 2> for ResidualSum {
    type Saved = ();

    fn again(&mut self, _inputs: &[HeldTensor<B>; 2]) -> Option<Self> {
        Some(*self)
    }

    fn forward(self, [x, residual]: [HeldTensor<B>; 2], _wanted: [bool; 2]) -> (HeldTensor<B>, ()) {
        let inputs = (x.into_input(), residual.into_value());
        let sum = B::run(composition::ResidualSum, inputs);
        (HeldTensor::of("residual_sum", sum), ())
    }

    fn backward_held(
        (): (),
        (gradient, _): (HeldTensor<B>, Option<HeldTensor<B>>),
        wanted: [bool; 2],
    ) -> [Option<HeldTensor<B>>; 2] {
        wanted.map(|is_wanted| is_wanted.then(|| gradient.clone()))
    }
}
