//! Computations to be done again.

use std::{
    fmt::{self, Debug},
    mem,
    sync::{Arc, Weak},
};

use burn_backend::tensor::FloatTensor;

use super::cell::Cell;
use crate::data::DataBackend;

/// An operation on tensors in memory.
type Computation<B> = dyn Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync;

/// The operands from which a computation may be done again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// Compressed ones too.
    Any,
    /// Those that stay exact.
    Exact,
    /// Those that stay exact; also others over a small divisor, the second operand.
    OverSmall,
}

/// Cells that an origin remembers at most.
const MAX_EARLIER: usize = 16;

/// The operation that made a cell.
///
/// It refers to its operands weakly: what nobody uses keeps nothing alive, and hinders no operation in place.
pub struct Origin<B: DataBackend> {
    operands: Vec<Weak<Cell<B>>>,
    /// Where operands of the operation end with it: what those were made from.
    earlier: Vec<Weak<Cell<B>>>,
    /// The operation, if it is cheap.
    computation: Option<(From, Arc<Computation<B>>)>,
    /// The same, where it is a view.
    view: Option<Arc<View<B>>>,
}

/// Views of views that are remembered at most.
const MAX_VIEWS: usize = 4;

/// A view, of a tensor or of a view of it.
struct View<B: DataBackend> {
    /// The tensor.
    of: Weak<Cell<B>>,
    computation: Arc<Computation<B>>,
    before: Option<Arc<Self>>,
    /// How many it is, with those before it.
    count: usize,
}

impl<B: DataBackend> Origin<B> {
    /// An operation on these operands, before it takes them.
    pub(super) fn of<'a>(operands: impl Iterator<Item = &'a Arc<Cell<B>>>) -> Self {
        let mut origin = Self {
            operands: Vec::new(),
            earlier: Vec::new(),
            computation: None,
            view: None,
        };
        for operand in operands {
            origin.operands.push(Arc::downgrade(operand));
            let ends = Arc::strong_count(operand) == 1;
            if let Some(before) = operand.origin().filter(|_| ends) {
                let earlier = before.operands.iter().chain(&before.earlier);
                origin.earlier.extend(earlier.cloned());
            }
        }
        origin.earlier.truncate(MAX_EARLIER);
        origin
    }

    /// The same of an operation that is cheap to do again.
    pub(super) fn again(
        self,
        from: From,
        compute: impl Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync + 'static,
    ) -> Self {
        Self {
            computation: Some((from, Arc::new(compute))),
            ..self
        }
    }

    /// The same of an operation that shows its operand's elements in another shape or order.
    pub(super) fn view(
        self,
        compute: impl Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync + 'static,
    ) -> Self {
        let computation: Arc<Computation<B>> = Arc::new(compute);
        let operand = self.operands.first().cloned().unwrap_or_default();
        let cell = operand.upgrade();
        let before = cell.as_ref().and_then(|cell| cell.origin()?.view.clone());
        let count = 1 + before.as_ref().map_or(0, |before| before.count);
        let view = View {
            of: before.as_ref().map_or(operand, |before| before.of.clone()),
            computation: computation.clone(),
            before,
            count,
        };
        Self {
            computation: Some((From::Any, computation)),
            view: (count <= MAX_VIEWS).then(|| Arc::new(view)),
            ..self
        }
    }

    /// The views that lead here from a tensor that is still there, and `stays`.
    pub(super) fn to_view(&self, stays: impl Fn(&Arc<Cell<B>>) -> bool) -> Option<Again<B>> {
        let last = self.view.as_ref()?;
        let of = last.of.upgrade().filter(stays)?;
        let views = std::iter::successors(Some(last), |view| view.before.as_ref());
        let mut by: Vec<_> = views.map(|view| view.computation.clone()).collect();
        by.reverse();
        Some(Again {
            operands: vec![of],
            compute: Arc::new(move |operands| {
                let view = by
                    .iter()
                    .fold(operands, |value, compute| vec![compute(value)]);
                view.into_iter().next().expect("a view is of one tensor")
            }),
        })
    }

    /// True if it is cheap to do again, and may be, as far as can be known before forward code has let go of its result.
    pub(super) fn is_cheap(&self) -> bool {
        match &self.computation {
            None => false,
            Some((From::Exact, _)) => {
                let mut operands = self.operands.iter();
                operands.all(|it| it.upgrade().is_some_and(|it| it.stays_exact()))
            }
            Some((From::Any | From::OverSmall, _)) => true,
        }
    }

    /// The cells that are still there of those that led to this one.
    pub(super) fn made_from(&self) -> impl Iterator<Item = Arc<Cell<B>>> {
        let cells = self.operands.iter().chain(&self.earlier);
        cells.filter_map(Weak::upgrade)
    }

    /// The computation with its operands, if all of them are there, `stays`, and it may be done from them. `exact`:
    /// only if its result is what it was.
    pub(super) fn to_do(
        &self,
        exact: bool,
        stays: impl Fn(&Arc<Cell<B>>) -> bool,
    ) -> Option<Again<B>> {
        let (from, compute) = self.computation.as_ref()?;
        let operands = self.operands.iter().map(|operand| {
            let operand = operand.upgrade()?;
            stays(&operand).then_some(operand)
        });
        let operands = operands.collect::<Option<Vec<_>>>()?;
        let all_exact = operands.iter().all(|operand| operand.stays_exact());
        let may = match from {
            From::Any => !exact,
            From::Exact => false,
            From::OverSmall => !exact && operands.last().is_some_and(|it| it.is_small()),
        };
        (may || all_exact).then(|| Again {
            operands,
            compute: compute.clone(),
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
    /// An operation of a [block](super::checkpoint) on these operands, before it takes them; none without an operand,
    /// since there is nothing that such a value could be computed from.
    pub(super) fn of_block<F>(
        operands: Vec<Arc<Cell<B>>>,
        compute: impl FnOnce() -> F,
    ) -> Option<Self>
    where
        F: Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + Sync + 'static,
    {
        (!operands.is_empty()).then(|| Self {
            operands,
            compute: Arc::new(compute()),
        })
    }

    /// The result.
    pub(super) fn compute(&self) -> FloatTensor<B> {
        (self.compute)(self.operands.iter().map(|operand| operand.read()).collect())
    }

    /// The cells that it reads.
    pub(super) fn operands(&self) -> &[Arc<Cell<B>>] {
        &self.operands
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

/// A loop: computations of a block may stand on each other in thousands.
impl<B: DataBackend> Drop for Again<B> {
    fn drop(&mut self) {
        let mut operands = mem::take(&mut self.operands);
        while let Some(operand) = operands.pop() {
            let last = Arc::into_inner(operand).into_iter();
            for mut again in last.flat_map(Cell::into_computations) {
                operands.append(&mut again.operands);
            }
        }
    }
}

impl<B: DataBackend> Debug for Again<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Again of {} operands", self.operands.len())
    }
}
