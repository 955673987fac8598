//! An operation of the outer decorator, on its thread.

use std::{
    cell::RefCell,
    sync::{
        Arc, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use super::cell::{AnyCell, Cell};
use crate::{data::DataBackend, recipe::Context};

/// The operation that runs, and what waits to be compressed.
#[derive(Default)]
struct Frame {
    /// Operations of the outer decorator that are made of others are nested.
    depth: usize,
    context: Option<Context>,
    /// The cells made in the block that is computed again in the backward pass, while one runs.
    block: Option<Vec<Weak<dyn AnyCell>>>,
    /// Cells whose handles end with the operation.
    consumed: Vec<Weak<dyn AnyCell>>,
    /// Cells made in the operation: those that autodiff makes of a composition never have a handle.
    created: Vec<Weak<dyn AnyCell>>,
    /// Cells that the next product compresses.
    pending: Vec<Weak<dyn AnyCell>>,
}

thread_local! {
    static FRAME: RefCell<Frame> = RefCell::default();
}

/// Works on the frame, unless the thread is about to end.
fn with<T>(work: impl FnOnce(&mut Frame) -> T) -> Option<T> {
    FRAME.try_with(|frame| work(&mut frame.borrow_mut())).ok()
}

/// The format in which cells made now may wait for the backward pass.
pub(crate) fn context() -> Option<Context> {
    with(|frame| frame.context).flatten()
}

/// True while a [block](super::checkpoint) runs.
pub(crate) fn in_block() -> bool {
    with(|frame| frame.depth > 0 && frame.block.is_some()).unwrap_or(false)
}

/// Starts a block, unless one runs, to which then all belongs. True if it started.
pub(super) fn enter_block() -> bool {
    with(|frame| {
        let starts = frame.block.is_none();
        frame.block.get_or_insert_default();
        starts
    })
    .unwrap_or(false)
}

/// Ends the block. What forward code still holds was its result, and waits like other values.
pub(super) fn leave_block() {
    let made = with(|frame| frame.block.take())
        .flatten()
        .unwrap_or_default();
    for cell in made.iter().filter_map(Weak::upgrade) {
        match cell.has_handles() {
            true => cell.leave_block(),
            // Read outside of an operation last, which ends a handle without settling the cell.
            false => settle(cell),
        }
    }
}

/// Notes a cell made by the operation that runs.
pub(super) fn created<B: DataBackend>(cell: &Arc<Cell<B>>) {
    let cell = Arc::downgrade(cell) as Weak<dyn AnyCell>;
    with(|frame| {
        frame.created.push(cell.clone());
        if let Some(block) = &mut frame.block {
            block.push(cell);
        }
    });
}

/// Gives a handle to the operation that runs, which ends it. Gives it back where none runs.
pub(super) fn consume(cell: Weak<dyn AnyCell>) -> Option<Weak<dyn AnyCell>> {
    let mut cell = Some(cell);
    with(|frame| {
        if frame.depth > 0 {
            frame.consumed.extend(cell.take());
        }
    });
    cell
}

/// Settles a cell whose last handle went.
pub(super) fn settle(cell: Arc<dyn AnyCell>) {
    let reference = Arc::downgrade(&cell);
    if cell.settle() {
        with(|frame| frame.pending.push(reference));
    }
}

/// Compresses what waits for it on this thread.
///
/// The decorator does so before each matrix product and before the backward pass, where a fused stream ends anyway.
pub fn compress_pending() {
    let pending = with(|frame| std::mem::take(&mut frame.pending)).unwrap_or_default();
    for cell in pending.iter().filter_map(Weak::upgrade) {
        cell.compress();
    }
}

/// A program's own choice, in place of the recipes'.
static CHOSEN: RwLock<Option<Option<Context>>> = RwLock::new(None);
/// True if there is one: most programs never take the lock.
static IS_CHOSEN: AtomicBool = AtomicBool::new(false);

/// Chooses the context of all values in this process, in place of the recipes' rows, for programs whose users choose
/// one: see [`Contexts`](crate::recipe::context::Contexts) for the same as a type. `None` gives the choice back to the
/// rows.
///
/// # Panics
///
/// If the context is none that there is: see [`Context`].
pub fn choose_context(chosen: Option<Option<Context>>) {
    if let Some(context) = chosen.flatten() {
        context.check();
    }
    *CHOSEN.write().unwrap_or_else(PoisonError::into_inner) = chosen;
    IS_CHOSEN.store(chosen.is_some(), Ordering::Release);
}

/// An operation of the outer decorator, as long as it lives.
pub(crate) struct Scope(());

impl Scope {
    /// Starts one. What it makes may wait in this format.
    pub fn enter(context: Option<Context>) -> Self {
        with(|frame| {
            if frame.depth == 0 {
                let chosen = IS_CHOSEN
                    .load(Ordering::Acquire)
                    .then(|| *CHOSEN.read().unwrap_or_else(PoisonError::into_inner));
                frame.context = chosen.flatten().unwrap_or(context);
            }
            frame.depth += 1;
        });
        Self(())
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let ended = with(|frame| {
            frame.depth -= 1;
            (frame.depth == 0).then(|| {
                frame.context = None;
                (
                    std::mem::take(&mut frame.consumed),
                    std::mem::take(&mut frame.created),
                )
            })
        });
        let Some((consumed, created)) = ended.flatten() else {
            return;
        };
        // All handles end before a cell is settled: a cell with a handle is not kept for its nodes.
        let is_free = |cell: &Weak<dyn AnyCell>| cell.upgrade().is_some_and(|cell| cell.release());
        let released: Vec<_> = consumed.into_iter().filter(is_free).collect();
        released.iter().filter_map(Weak::upgrade).for_each(settle);
        for cell in created.iter().filter_map(Weak::upgrade) {
            if !cell.has_handles() {
                settle(cell);
            }
        }
    }
}
