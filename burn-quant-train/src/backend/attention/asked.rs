//! What attention has beyond Burn's operation, on its way through it.
//!
//! Burn's `ModuleOps::attention`, which is all that a model of any backend can call, has no place for a window and for
//! dropout. They wait on the thread that calls it, and the decorator takes them there.

use std::cell::Cell;

use crate::data::attention::{Band, Dropout};

thread_local! {
    static ASKED: Cell<Option<Asked>> = const { Cell::new(None) };
}

/// The options that Burn's operation does not have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Asked {
    /// The keys that a query sees by its place, beside Burn's causal mask.
    pub band: Band,
    /// Drops probabilities.
    pub dropout: Option<Dropout>,
}

/// Runs `call`, the first attention of which takes `asked`.
pub(crate) fn asking<A>(asked: Asked, call: impl FnOnce() -> A) -> A {
    struct Clear;
    impl Drop for Clear {
        fn drop(&mut self) {
            ASKED.set(None);
        }
    }
    let _clear = Clear;
    ASKED.set(Some(asked));
    let result = call();
    assert_eq!(ASKED.get(), None, "attention takes what is asked for");
    result
}

/// What is asked of the attention that begins.
pub(super) fn take() -> Option<Asked> {
    ASKED.take()
}
