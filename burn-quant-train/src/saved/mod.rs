//! The values that wait for the backward pass: all that nodes of autodiff save, compressed, each once.
//!
//! [`QuantTrain<Autodiff<B>, R>`](crate::QuantTrain) computes on `Autodiff<Held<B>>`. [`Held`] is a second decorator,
//! inside autodiff, whose float primitive is a shared [`Cell`]. So what autodiff's nodes save are cells, of every
//! operation and of every model, and a cell may change how it holds its value:
//!
//! - *exact*, as it came;
//! - *compressed*, in the [context](crate::recipe::Context) of the recipe's row; whoever reads it gets it dequantized;
//! - *bits*, a mask of zeros and ones;
//! - *again*, as a cheap operation of other cells that are kept anyway, or as one of a [block](checkpoint()) that runs
//!   again;
//! - *later*, as an operation that its first reader has computed.
//!
//! The decorator outside counts the handles that forward code has on a cell. When the last one goes, and a node still
//! holds the cell, nobody will read it before the backward pass. Then it becomes a computation to be done again if its
//! operands stay, else it is compressed at the next matrix product or at the start of the backward pass, where a fused
//! stream ends anyway.
//!
//! Some cells stay exact: parameters; values of fewer than [`MIN_COMPRESSED`] elements, or a number for a row of four
//! or more; operands whose error a gradient magnifies without a bound, which the tables in `operations` mark;
//! log-probabilities; the elementwise operations that end in the mean or the sum of a loss.
//!
//! | file | what it has |
//! | --- | --- |
//! | [`cell`] | how a value is held, and when that changes |
//! | [`scope`] | an operation of the outer decorator: the handles that end with it, the cells made in it |
//! | [`again`] | computations to be done again |
//! | [`checkpoint()`] | blocks that are computed again as a whole |
//! | [`bits`] | masks, a bit an element |
//! | `later` | values that a linear layer quantizes in the launch that computes them |
//! | `centred` | values less what they have in common, which wait in place of those |
//! | [`compress`] | from float tensors to contexts and back |
//! | `rematerialized` | values that a linear layer's backward pass makes again of what waits, and keeps no copy of |
//! | [`recorded`] | operations with a backward pass of our own: one type, one node for autodiff |
//! | [`report`] | the values that wait now, by layer and operation |
//! | `float`, `int`, `bool`, `module`, `activation`, `quantized`, `transaction` | [`Held`]'s operations |

mod activation;
pub mod again;
pub mod bits;
mod bool;
pub mod cell;
mod centred;
mod checkpoint;
pub mod compress;
mod constant;
mod float;
mod forward;
mod gradient_sum;
mod int;
pub(crate) mod later;
mod module;
mod quantized;
pub mod recorded;
pub(crate) mod rematerialized;
pub mod report;
pub mod scope;
mod transaction;

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};

pub use cell::{Cell, HeldTensor, MIN_COMPRESSED};
pub(crate) use centred::centred;
pub use checkpoint::checkpoint;
pub use report::{ActivationReport, Recording, named};
pub use scope::{choose_context, compress_pending};

use crate::{data::DataBackend, operations::backend_operations};

/// Backend `B` with [cells](Cell) as float tensors. Stands inside autodiff.
pub struct Held<B>(PhantomData<B>);

impl<B> Clone for Held<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Held<B> {}

impl<B> Default for Held<B> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<B> std::fmt::Debug for Held<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Held")
    }
}

impl<B: DataBackend> BackendTypes for Held<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = HeldTensor<B>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: DataBackend> Backend for Held<B> {
    backend_operations! {}

    fn name(device: &Self::Device) -> String {
        format!("held<{}>", B::name(device))
    }

    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed)
    }
}
