//! What is used by turns.

use std::cell::Cell;

/// Operands of a benchmark: so many that the launches between two uses of the same ones fill the caches with others.
pub const TURNS: usize = 4;

/// Things that are taken one after the other, and then again from the first on.
pub struct Turns<T> {
    all: Vec<T>,
    next: Cell<usize>,
}

impl<T> Turns<T> {
    /// Of at least one thing.
    pub fn new(all: Vec<T>) -> Self {
        Self {
            all,
            next: Cell::new(0),
        }
    }

    /// The next one.
    pub fn take(&self) -> &T {
        let index = self.next.get();
        self.next.set((index + 1) % self.all.len());
        &self.all[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_follows_the_last() {
        let turns = Turns::new(vec![1, 2]);
        assert_eq!([(); 3].map(|()| *turns.take()), [1, 2, 1]);
    }
}
