//! The kernels of `cubecl-kernels`, on every CubeCL runtime.

mod amax_history;
mod attention;
mod composition;
mod concat;
mod exact_product;
mod fp8_product;
mod health;
mod learned_step;
mod optimizer;
mod product;
mod quantize;
mod sampling;
mod tensors;
mod threshold;

use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};

use super::{
    operation::{DataBackend, Operation},
    tensors::On,
};
use tensors::Cube;

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> DataBackend
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    type Kernels = Self;

    fn run<O: Operation>(operation: O, inputs: On<O::Inputs, Self>) -> On<O::Outputs, Self> {
        operation.run::<Self>(inputs)
    }
}
