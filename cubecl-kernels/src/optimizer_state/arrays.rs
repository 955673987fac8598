//! The tensors of a state as a kernel's argument.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    arguments::Arguments,
    device::{array, or_unused, storage},
};

use super::StateTensor;

/// [`StateTensor`] in a kernel. What its format does not have is neither read nor written.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StateArrays<S: Numeric, N: Size> {
    pub values: Array<Vector<S, N>>,
    pub scales: Array<f32>,
    pub exponents: Array<u8>,
}

impl<R: Runtime> StateTensor<R> {
    /// The launch argument.
    pub(super) fn launch<S: Numeric, N: Size>(&self) -> StateArraysLaunch<S, N, R> {
        let (scales, exponents) = self.scales_and_exponents();
        StateArraysLaunch::new(array(self.values.clone()), array(scales), array(exponents))
    }

    /// Adds the launch argument, with values in vectors of `width`.
    pub(crate) fn add_to<S: Numeric, N: Size>(
        &self,
        arguments: &mut Arguments,
        width: usize,
    ) -> StateArraysCompilationArg<S, N> {
        let (scales, exponents) = self.scales_and_exponents();
        StateArraysCompilationArg {
            values: arguments.array(&self.values, width),
            scales: arguments.array(&scales, 1),
            exponents: arguments.array(&exponents, 1),
        }
    }

    fn scales_and_exponents(&self) -> (TensorHandle<R>, TensorHandle<R>) {
        let any = &self.values;
        (
            or_unused(self.scales.as_ref(), any, storage::<f32>()),
            or_unused(self.exponents.as_ref(), any, storage::<u8>()),
        )
    }
}
