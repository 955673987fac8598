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
    /// The products behind it so far.
    products: usize,
}

/// Notes that a layer runs.
pub(crate) fn ran<B: DataBackend>(layer: &Arc<Layer<B>>) {
    let layer = Arc::downgrade(layer) as Weak<dyn Any + Send + Sync>;
    LAST.set(Some(Last { layer, products: 0 }));
}

/// The layer of the next product of two activations, if that is quantized, and counts the product.
pub(crate) fn next_product<B: DataBackend>() -> Option<Arc<Layer<B>>> {
    let [next] = next_products::<B, 1>()?;
    LAST.with_borrow_mut(|last| {
        if let Some(last) = last {
            last.products += 1;
        }
    });
    Some(next)
}

/// The layers of the next products, if so many are to be quantized.
pub(crate) fn next_products<B: DataBackend, const N: usize>() -> Option<[Arc<Layer<B>>; N]> {
    LAST.with_borrow(|last| {
        let last = last.as_ref()?;
        let layer = last.layer.upgrade()?.downcast::<Layer<B>>().ok()?;
        let next = layer.products().get(last.products..)?;
        next.first_chunk().cloned()
    })
}
