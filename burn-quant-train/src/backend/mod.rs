//! The decorator: [`QuantTrain`] implements Burn's `Backend`, and `AutodiffBackend` over `Autodiff`.

mod activation;
pub(crate) mod attention;
mod autodiff;
mod bool;
mod composition;
mod embedding;
mod float;
mod flow;
mod forward;
mod int;
mod module;
pub mod precision;
mod products;
mod quantized;
pub mod tensor;
mod transaction;

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};

pub use crate::ops::linear::kept::Kept;

use tensor::QuantTensor;

use crate::{
    layer,
    operations::backend_operations,
    recipe::Recipe,
    saved::{
        recorded::QuantBackend,
        scope::{self, Scope},
    },
};

/// How the decorator's name begins.
const NAME: &str = "quant-train";

/// True for a backend with the decorator. What is generic over Burn's backends cannot see it by its type.
pub(crate) fn is_decorated<B: Backend>(device: &B::Device) -> bool {
    B::name(device).starts_with(NAME)
}

/// Trains on backend `B` by recipe `R`.
///
/// `B` is `Autodiff<Inner, Strategy>` for training, with either checkpointing strategy; the backend for validation and
/// inference, `AutodiffBackend::InnerBackend`, is `QuantTrain<Inner, R>`, which applies the precision policy and
/// quantizes nothing (fallback-int8, appendix E: quantized evaluation lets blocks leak information between tokens).
///
/// Int, bool and Burn's own quantized primitives are those of `B`; a float primitive is that of
/// [`B::Inside`](QuantBackend::Inside) plus a shared [tag](layer::tag::Tag).
///
/// # Panics
///
/// Operations panic, naming the operation and the remedy, when the device does not support the recipe's compute dtype.
pub struct QuantTrain<B, R>(PhantomData<(B, R)>);

impl<B: QuantBackend, R: Recipe> QuantTrain<B, R> {
    /// An operation of the decorator, as long as it lives.
    fn scope() -> Option<Scope> {
        B::RECORDS.then(|| Scope::enter(R::row().context))
    }

    /// Compresses what waits for it.
    fn compress_pending() {
        if B::RECORDS {
            scope::compress_pending();
        }
    }
}

impl<B, R> Clone for QuantTrain<B, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B, R> Copy for QuantTrain<B, R> {}

impl<B, R> Default for QuantTrain<B, R> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<B, R: Recipe> std::fmt::Debug for QuantTrain<B, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QuantTrain<{}>", R::row().name)
    }
}

impl<B: QuantBackend, R: Recipe> BackendTypes for QuantTrain<B, R> {
    type Device = B::Device;
    type FloatTensorPrimitive = QuantTensor<B>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: QuantBackend, R: Recipe> Backend for QuantTrain<B, R> {
    backend_operations! {}

    fn name(device: &Self::Device) -> String {
        format!("{NAME}<{}, {}>", B::name(device), R::row().name)
    }

    /// Seeds the inner backend, dropout that is one operation, and the stochastic rounding of the layers attached after
    /// this call.
    fn seed(device: &Self::Device, seed: u64) {
        layer::set_seed(seed);
        B::seed(device, seed)
    }
}
