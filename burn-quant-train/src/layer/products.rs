//! Which layer a product of two activations belongs to: the one that ran last before it on its thread.
//!
//! Such a product has no weight that could say so. Forward passes run their layers in one order, so it is the same
//! layer in every step.

use std::{
    any::Any,
    cell::RefCell,
    sync::{Arc, Weak},
};

use super::Layer;
use crate::data::DataBackend;

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// The layer that ran last on this thread.
struct Last {
    /// A [`Layer`] of some backend.
    layer: Weak<dyn Any + Send + Sync>,
    /// The products behind it so far, quantized or not.
    products: usize,
}

/// Notes that a layer runs.
pub(crate) fn ran<B: DataBackend>(layer: &Arc<Layer<B>>) {
    let layer = Arc::downgrade(layer) as Weak<dyn Any + Send + Sync>;
    LAST.set(Some(Last { layer, products: 0 }));
}

/// True if attention that comes now has INT8 products.
pub(crate) fn has_int8_attention<B: DataBackend>() -> bool {
    LAST.with_borrow(|last| {
        let layer = last.as_ref().and_then(|last| last.layer.upgrade());
        let layer = layer.and_then(|layer| layer.downcast::<Layer<B>>().ok());
        layer.is_some_and(|layer| layer.int8_attention)
    })
}

/// The layers of the next products of two activations, if so many are to be quantized.
pub(crate) fn next_products<B: DataBackend, const N: usize>() -> Option<[Arc<Layer<B>>; N]> {
    LAST.with_borrow(|last| {
        let last = last.as_ref()?;
        let layer = last.layer.upgrade()?.downcast::<Layer<B>>().ok()?;
        let next = layer.products().get(last.products..)?;
        next.first_chunk().cloned()
    })
}

/// Notes that a product of two activations is computed.
pub(crate) fn count_product() {
    LAST.with_borrow_mut(|last| {
        if let Some(last) = last {
            last.products += 1;
        }
    });
}
