//! The values that wait for the backward pass now.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    sync::{Arc, Weak},
};

use super::cell::{AnyCell, Cell};
use crate::{data::DataBackend, recipe::Number};

type Cells = Option<Vec<Weak<dyn AnyCell>>>;

thread_local! {
    /// The cells of the recording of this thread.
    static CELLS: RefCell<Cells> = const { RefCell::new(None) };
}

/// Works on the recording of this thread; on none, if the thread is about to end.
fn with<T: Default>(work: impl FnOnce(&mut Cells) -> T) -> T {
    CELLS
        .try_with(|cells| work(&mut cells.borrow_mut()))
        .unwrap_or_default()
}

/// How a value is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// As it came.
    Exact,
    /// In numbers of this format, with scales.
    Compressed(Number),
    /// A mask, a bit an element.
    Bits,
    /// Not at all: it is computed again.
    Again,
}

/// A value that waits for the backward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The operation that made it, as Burn's backend traits name it.
    pub operation: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How it is held.
    pub form: Form,
    /// Its elements.
    pub elements: usize,
    /// The bytes that it takes, scales included. Views count as values of their own.
    pub bytes: usize,
}

/// Notes a cell, if this thread records.
pub(super) fn created<B: DataBackend>(cell: &Arc<Cell<B>>) {
    with(|cells| {
        if let Some(cells) = cells {
            if cells.len() == cells.capacity() {
                cells.retain(|cell| cell.strong_count() > 0);
            }
            cells.push(Arc::downgrade(cell) as Weak<dyn AnyCell>);
        }
    });
}

/// Notes the values that are made on this thread, as long as it lives, for an [`ActivationReport`].
///
/// ```
/// use burn::{backend::{Autodiff, Flex}, nn::LinearConfig, tensor::{Tensor, activation::silu}};
/// use burn_quant_train::{QuantTrain, recipe::{MixedPrecision, context::{Contexts, Int10}}, saved::Recording};
///
/// type Backend = QuantTrain<Autodiff<Flex>, Contexts<MixedPrecision<f32>, Int10>>;
///
/// let linear = LinearConfig::new(128, 256).init::<Backend>(&Default::default());
/// let recording = Recording::start();
/// let loss = silu(linear.forward(Tensor::<Backend, 2>::ones([64, 128], &Default::default()))).mean();
/// let report = recording.report();
/// println!("{report}");
/// # assert!(report.bytes() > 0);
/// let gradients = loss.backward();
/// ```
#[derive(Debug)]
pub struct Recording {
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Recording {
    /// Starts to note.
    ///
    /// # Panics
    ///
    /// If this thread has a recording already.
    pub fn start() -> Self {
        with(|cells| {
            assert!(
                cells.is_none(),
                "this thread records already: drop the other `Recording` first"
            );
            *cells = Some(Vec::new());
        });
        Self {
            _thread: PhantomData,
        }
    }

    /// What waits for the backward pass now. Take it between the two passes.
    pub fn report(&self) -> ActivationReport {
        super::scope::compress_pending();
        let cells: Vec<_> = with(|cells| {
            let noted = cells.iter().flatten();
            noted.filter_map(Weak::upgrade).collect()
        });
        ActivationReport {
            values: cells.into_iter().filter_map(AnyCell::row).collect(),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // The cells go when the list is no longer borrowed.
        let _cells = with(Option::take);
    }
}

/// The values that wait for the backward pass: see [`Recording`].
///
/// It does not count what nothing but a quantized layer holds, the copies of X and W, nor values that forward code also
/// holds, such as parameters.
#[derive(Debug, Clone, Default)]
pub struct ActivationReport {
    /// The values.
    pub values: Vec<Saved>,
}

impl ActivationReport {
    /// The bytes of all values.
    pub fn bytes(&self) -> usize {
        self.values.iter().map(|value| value.bytes).sum()
    }
}

impl fmt::Display for ActivationReport {
    /// A table: a line for each operation, shape and form, the largest first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = BTreeMap::new();
        for value in &self.values {
            let form = match value.form {
                Form::Exact => "exact".to_owned(),
                Form::Compressed(number) => format!("{number:?}").to_lowercase(),
                Form::Bits => "bits".to_owned(),
                Form::Again => "again".to_owned(),
            };
            let line = lines
                .entry((value.operation, value.shape.clone(), form))
                .or_insert((0, 0));
            line.0 += 1;
            line.1 += value.bytes;
        }
        let mut lines: Vec<_> = lines.into_iter().collect();
        lines.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
        writeln!(f, "| KiB | values | form | operation | shape |")?;
        writeln!(f, "| ---: | ---: | --- | --- | --- |")?;
        for ((operation, shape, form), (count, bytes)) in lines {
            let kib = bytes as f64 / 1024.0;
            writeln!(
                f,
                "| {kib:.1} | {count} | {form} | {operation} | {shape:?} |"
            )?;
        }
        write!(
            f,
            "| {:.1} | {} | | all | |",
            self.bytes() as f64 / 1024.0,
            self.values.len()
        )
    }
}
