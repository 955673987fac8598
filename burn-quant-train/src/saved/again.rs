//! Computations to be done again.

use std::{
    fmt::{self, Debug},
    sync::{Arc, Weak},
};

use burn_backend::tensor::FloatTensor;

use super::cell::Cell;
use crate::data::DataBackend;

/// An operation on tensors in memory.
type Computation<B> = dyn Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync;

/// The cheap operation that made a cell.
///
/// It refers to its operands weakly: what nobody uses keeps nothing alive, and hinders no operation in place.
pub struct Origin<B: DataBackend> {
    operands: Vec<Weak<Cell<B>>>,
    compute: Arc<Computation<B>>,
}

impl<B: DataBackend> Origin<B> {
    pub(super) fn new(
        operands: Vec<Weak<Cell<B>>>,
        compute: impl Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync + 'static,
    ) -> Self {
        Self {
            operands,
            compute: Arc::new(compute),
        }
    }

    /// The operands that are still there.
    pub(super) fn operands(&self) -> impl Iterator<Item = Arc<Cell<B>>> {
        self.operands.iter().filter_map(Weak::upgrade)
    }

    /// The same with its operands, if all of them are there and `stays`.
    pub(super) fn again(&self, stays: impl Fn(&Arc<Cell<B>>) -> bool) -> Option<Again<B>> {
        let operands = self.operands.iter().map(|operand| {
            let operand = operand.upgrade()?;
            stays(&operand).then_some(operand)
        });
        Some(Again {
            operands: operands.collect::<Option<Vec<_>>>()?,
            compute: self.compute.clone(),
        })
    }
}

impl<B: DataBackend> Debug for Origin<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Origin of {} operands", self.operands.len())
    }
}

/// A computation to be done again, with the cells that it reads.
pub struct Again<B: DataBackend> {
    operands: Vec<Arc<Cell<B>>>,
    compute: Arc<Computation<B>>,
}

impl<B: DataBackend> Again<B> {
    /// The result.
    pub(super) fn compute(&self) -> FloatTensor<B> {
        (self.compute)(self.operands.iter().map(|operand| operand.read()).collect())
    }

    /// How many computations stand on each other, this one included.
    pub(super) fn depth(&self) -> usize {
        let below = self.operands.iter().map(|operand| operand.depth()).max();
        1 + below.unwrap_or(0)
    }
}

impl<B: DataBackend> Clone for Again<B> {
    fn clone(&self) -> Self {
        Self {
            operands: self.operands.clone(),
            compute: self.compute.clone(),
        }
    }
}

impl<B: DataBackend> Debug for Again<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Again of {} operands", self.operands.len())
    }
}
