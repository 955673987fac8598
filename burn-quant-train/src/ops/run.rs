//! Which run of a layer an operation is.

/// A run of a layer. `S` is what the first run in a [block](crate::saved::checkpoint()) settles for both.
#[derive(Debug, Clone)]
pub(crate) enum Run<S> {
    /// The next one.
    Next,
    /// This one, before the second run of its block.
    First(S),
    /// This one once more: the layer's state has followed it.
    Second(S),
}

impl<S> Run<S> {
    /// True if the operation runs once more, after this run.
    pub fn is_first(&self) -> bool {
        matches!(self, Self::First(_))
    }

    /// True if the operation has run before.
    pub fn is_second(&self) -> bool {
        matches!(self, Self::Second(_))
    }
}
