//! The numbers that measurements leave on their device, until they are read.

use crate::data::tensors::{Bundle, Change, Outline, Tensors};

/// The findings on a tensor, each one-dimensional; at least one of either kind.
#[derive(Debug, Clone)]
pub struct Findings<T: Tensors> {
    /// FP32: the largest magnitude, and for each comparison the sums, of a cast also the scales.
    pub numbers: Vec<T::Float>,
    /// INT32, bits of U32: the histogram, and for each comparison the counts.
    pub counts: Vec<T::Int>,
}

impl Bundle for Findings<Outline> {
    type On<T: Tensors> = Findings<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        findings: Findings<S>,
        change: &mut impl Change<S, T>,
    ) -> Findings<T> {
        let numbers = findings.numbers.into_iter();
        let counts = findings.counts.into_iter();
        Findings {
            numbers: numbers.map(|it| change.float(it)).collect(),
            counts: counts.map(|it| change.int(it)).collect(),
        }
    }
}
