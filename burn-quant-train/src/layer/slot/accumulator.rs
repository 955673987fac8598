//! A sum on a device that runs of layers add to.

/// A sum that runs of layers add to. Runs of several threads do not wait for each other: the first counts on from the
/// sum, the others from zero, and all are added up.
#[derive(Debug, Clone)]
pub(super) struct Accumulator<A> {
    sum: A,
    /// True while a run counts on from the sum.
    lent: bool,
    /// The sum of what other runs counted meanwhile.
    aside: Option<A>,
}

/// A sum to count on from.
pub(in crate::layer) struct LentSum<A> {
    pub sum: A,
    /// True if it goes on from the slot's, false if from zero.
    all: bool,
}

impl<A> LentSum<A> {
    /// The same loan with another sum.
    pub fn with(self, sum: A) -> Self {
        Self { sum, ..self }
    }
}

impl<A: Clone> Accumulator<A> {
    pub fn new(sum: A) -> Self {
        Self {
            sum,
            lent: false,
            aside: None,
        }
    }

    /// The sum, or `zero` of its shape where another run has it.
    pub fn lend(&mut self, zero: impl FnOnce(&A) -> A) -> LentSum<A> {
        let all = !std::mem::replace(&mut self.lent, true);
        let sum = match all {
            true => self.sum.clone(),
            false => zero(&self.sum),
        };
        LentSum { sum, all }
    }

    /// Takes back what a run counted.
    pub fn take_back(&mut self, lent: LentSum<A>, add: impl FnOnce(A, A) -> A) {
        if lent.all {
            self.sum = lent.sum;
            self.lent = false;
        } else {
            self.aside = Some(match self.aside.take() {
                None => lent.sum,
                Some(others) => add(others, lent.sum),
            });
        }
    }

    /// All that was counted, in parts.
    pub fn parts(self) -> impl Iterator<Item = A> {
        std::iter::once(self.sum).chain(self.aside)
    }
}
