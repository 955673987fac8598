//! The values that wait for the backward pass now.

use std::{
    any::Any,
    cell::RefCell,
    collections::{HashMap, HashSet},
    fmt,
    hash::Hash,
    marker::PhantomData,
    sync::{Arc, Weak},
};

use burn_backend::{DType, Shape};

use super::cell::{AnyCell, Cell, MIN_COMPRESSED};
use crate::{
    data::{DataBackend, quantize::Quantized, tensors},
    recipe::{Flow, Number},
};

thread_local! {
    /// The recording of this thread.
    static NOTES: RefCell<Option<Notes>> = const { RefCell::new(None) };
}

/// The state of a recording.
#[derive(Default)]
struct Notes {
    values: Vec<Note>,
    /// The paths of the layers that ran, in their order.
    ran: Vec<Arc<str>>,
    /// True while the last of them runs.
    runs: bool,
    /// The names of the scopes around the operation that runs: each with those around it.
    names: Vec<Arc<str>>,
}

/// A value that may wait.
struct Note {
    value: Value,
    place: Place,
    /// The quantized copy that it shares with others.
    copy: Option<Weak<dyn Any>>,
}

enum Value {
    /// Held by a cell.
    Cell(Weak<dyn AnyCell>),
    /// An operand that a quantized layer keeps, as long as this lives.
    Operand(Weak<Operand>),
}

/// Where a value was made.
enum Place {
    /// In a layer that ran, or in a named scope.
    In(Arc<str>),
    /// Between layers, when so many had run.
    Between(usize),
}

impl Notes {
    fn note(&mut self, value: Value, copy: Option<Weak<dyn Any>>) {
        if self.values.len() == self.values.capacity() {
            self.values.retain(|note| match &note.value {
                Value::Cell(cell) => cell.strong_count() > 0,
                Value::Operand(operand) => operand.strong_count() > 0,
            });
        }
        let place = match (self.runs, self.ran.last(), self.names.last()) {
            (true, Some(layer), _) => Place::In(layer.clone()),
            (_, _, Some(name)) => Place::In(name.clone()),
            _ => Place::Between(self.ran.len()),
        };
        self.values.push(Note { value, place, copy });
    }

    /// Where people look for a value: what is made between two layers is what the second reads, in most models.
    fn layer_of(&self, place: &Place) -> String {
        match place {
            Place::In(path) => path.to_string(),
            Place::Between(ran) => match (self.ran.get(*ran), self.ran.last()) {
                (Some(next), _) => next.to_string(),
                (None, Some(last)) => format!("after {last}"),
                (None, None) => String::new(),
            },
        }
    }
}

/// Works on the recording of this thread, if there is one and the thread is not about to end.
fn with<T>(work: impl FnOnce(&mut Notes) -> T) -> Option<T> {
    let worked = NOTES.try_with(|notes| notes.borrow_mut().as_mut().map(work));
    worked.ok().flatten()
}

/// Notes a cell, if this thread records.
pub(super) fn created<B: DataBackend>(cell: &Arc<Cell<B>>) {
    with(|notes| {
        let cell = Arc::downgrade(cell) as Weak<dyn AnyCell>;
        notes.note(Value::Cell(cell), None);
    });
}

/// Notes that the cell made last holds a copy that others share.
pub(crate) fn shares<B: DataBackend>(copy: &Arc<Quantized<B>>) {
    with(|notes| {
        if let Some(note) = notes.values.last_mut() {
            note.copy = Some(Arc::downgrade(copy) as Weak<dyn Any>);
        }
    });
}

/// An operand that a quantized layer keeps.
#[derive(Debug)]
pub(crate) struct Operand {
    is_weight: bool,
    number: Number,
    shape: Vec<usize>,
    dtype: DType,
    bytes: usize,
}

/// The notes of the operands that a quantized layer keeps: they end with it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Operands(Vec<Arc<Operand>>);

impl Operands {
    /// Notes a copy of X, or of W, which had this shape and dtype, if this thread records.
    pub fn note<B: DataBackend>(
        &mut self,
        is_weight: bool,
        copy: &Arc<Quantized<B>>,
        shape: &Shape,
        dtype: DType,
    ) {
        let shared = Arc::downgrade(copy) as Weak<dyn Any>;
        let bytes = || tensors::bytes_of::<Quantized<tensors::Outline>, B>(Quantized::clone(copy));
        let number = copy.format.number;
        self.add(is_weight, number, shape, dtype, bytes, Some(shared));
    }

    /// Notes a copy that nothing shares.
    pub fn note_own(
        &mut self,
        number: Number,
        shape: &Shape,
        dtype: DType,
        bytes: impl FnOnce() -> usize,
    ) {
        self.add(false, number, shape, dtype, bytes, None);
    }

    fn add(
        &mut self,
        is_weight: bool,
        number: Number,
        shape: &Shape,
        dtype: DType,
        bytes: impl FnOnce() -> usize,
        shared: Option<Weak<dyn Any>>,
    ) {
        with(|notes| {
            let operand = Arc::new(Operand {
                is_weight,
                number,
                shape: shape.to_vec(),
                dtype,
                bytes: bytes(),
            });
            notes.note(Value::Operand(Arc::downgrade(&operand)), shared);
            self.0.push(operand);
        });
    }
}

/// A layer that runs, as long as it lives.
pub(crate) struct Running(());

impl Running {
    /// The layer of this path begins.
    pub fn layer(path: &str) -> Self {
        with(|notes| {
            notes.ran.push(path.into());
            notes.runs = true;
        });
        Self(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        with(|notes| notes.runs = false);
    }
}

/// Runs a part of a model's forward pass under a name, by which an [`ActivationReport`] tells what the part leaves.
///
/// Linear layers go by the paths that the optimizer gave them, and what is made between them by the layer that runs
/// next; neither needs a name. A part without linear layers does, such as a convolution. Names in names are joined by
/// dots. It is `forward()` alone where the thread has no [`Recording`].
///
/// ```
/// use burn::{backend::{Autodiff, Flex}, tensor::{Tensor, activation::tanh}};
/// use burn_quant_train::{QuantTrain, recipe::MixedPrecision, saved::{Recording, named}};
///
/// type Backend = QuantTrain<Autodiff<Flex>, MixedPrecision<f32>>;
///
/// let x = Tensor::<Backend, 2>::ones([64, 128], &Default::default()).require_grad();
/// let recording = Recording::start();
/// let loss = tanh(named("squash", || tanh(x))).mean();
/// let report = recording.report();
/// assert!(report.values.iter().any(|value| value.layer == "squash"));
/// # drop(loss);
/// ```
pub fn named<T>(name: &str, forward: impl FnOnce() -> T) -> T {
    struct Name(bool);

    impl Drop for Name {
        fn drop(&mut self) {
            if self.0 {
                with(|notes| notes.names.pop());
            }
        }
    }

    let pushed = with(|notes| {
        let name = match notes.names.last() {
            Some(around) => format!("{around}.{name}").into(),
            None => name.into(),
        };
        notes.names.push(name);
    });
    let _name = Name(pushed.is_some());
    forward()
}

/// How a value is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// As it came.
    Exact,
    /// In numbers of this format, with scales.
    Compressed(Number),
    /// In numbers of this format, as an operand of a quantized layer, which reads it so.
    Operand(Number),
    /// A mask, a bit an element.
    Bits,
    /// Not at all: it is computed again.
    Again,
}

/// A value that waits for the backward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The linear layer that made it, by its module path, or the [name](named) of the part that did. Of what was made
    /// between linear layers the next one to run, or `after` the last one. Empty where no layer has a path: an
    /// optimizer gives them.
    pub layer: String,
    /// The operation that made it, as Burn's backend traits name it; of an operand the one that reads it.
    pub operation: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
    /// How it is held.
    pub form: Form,
    /// Its elements.
    pub elements: usize,
    /// The bytes that it takes, scales included. Views of a value that is held exactly count as values of their own.
    pub bytes: usize,
}

/// Operations whose results share the memory of what they read.
const VIEWS: [&str; 5] = [
    "float_expand",
    "float_permute",
    "float_reshape",
    "float_swap_dims",
    "float_transpose",
];

impl Saved {
    /// How it is held, in a word or two: `f32`, `int10`, `int8 operand`, `bits`, `again`.
    pub fn format(&self) -> String {
        match self.form {
            Form::Exact => format!("{:?}", self.dtype).to_lowercase(),
            Form::Compressed(number) => format!("{number:?}").to_lowercase(),
            Form::Operand(number) => format!("{number:?} operand").to_lowercase(),
            Form::Bits => "bits".to_owned(),
            Form::Again => "again".to_owned(),
        }
    }

    /// The bytes that it would take if it waited in BF16: two an element, of a view that is made again none.
    pub fn bf16_bytes(&self) -> usize {
        match self.form == Form::Again && VIEWS.contains(&self.operation) {
            true => 0,
            false => 2 * self.elements,
        }
    }

    /// The bytes that it would take if it flowed, where it takes more: the flow broke where it was made.
    fn in_flow(&self, flow: &Flow) -> Option<usize> {
        let is_kept = match self.form {
            Form::Exact | Form::Compressed(_) => self.operation != "flow",
            Form::Operand(_) | Form::Bits | Form::Again => false,
        };
        let is_large = self.elements >= MIN_COMPRESSED && self.shape.last() != Some(&1);
        let bytes = (is_kept && is_large).then(|| flow.bytes(Shape::from(self.shape.clone())))?;
        (bytes < self.bytes).then_some(bytes)
    }
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
        NOTES.with_borrow_mut(|notes| {
            assert!(
                notes.is_none(),
                "this thread records already: drop the other `Recording` first"
            );
            *notes = Some(Notes::default());
        });
        Self {
            _thread: PhantomData,
        }
    }

    /// The values that wait for the backward pass now. Take them between the two passes.
    pub fn report(&self) -> ActivationReport {
        enum Found {
            Cell(Arc<dyn AnyCell>),
            Operand(Arc<Operand>),
        }

        super::scope::compress_pending();
        let found = with(|notes| {
            let found = notes.values.iter().filter_map(|note| {
                let found = match &note.value {
                    Value::Cell(cell) => Found::Cell(cell.upgrade()?),
                    Value::Operand(operand) => Found::Operand(operand.upgrade()?),
                };
                let copy = note.copy.as_ref().map(Weak::as_ptr);
                Some((found, notes.layer_of(&note.place), copy))
            });
            found.collect::<Vec<_>>()
        });
        let mut report = ActivationReport::default();
        let mut copies = HashSet::new();
        for (found, layer, copy) in found.into_iter().flatten() {
            let (saved, is_weight) = match found {
                Found::Cell(cell) => (cell.row(layer), false),
                Found::Operand(operand) => (Some(operand.row(layer)), operand.is_weight),
            };
            let Some(saved) = saved else { continue };
            // The notes keep the places of copies from being used again.
            if copy.is_some_and(|copy| !copies.insert(copy.cast::<()>())) {
                continue;
            }
            match is_weight {
                true => report.weights.push(saved),
                false => report.values.push(saved),
            }
        }
        report
    }
}

impl Operand {
    fn row(&self, layer: String) -> Saved {
        Saved {
            layer,
            operation: "linear",
            shape: self.shape.clone(),
            dtype: self.dtype,
            form: Form::Operand(self.number),
            elements: self.shape.iter().product(),
            bytes: self.bytes,
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // The notes go when they are no longer borrowed.
        let _notes = NOTES.try_with(|notes| notes.borrow_mut().take());
    }
}

/// The values that wait for the backward pass: see [`Recording`].
///
/// A value that several operations or layers read is one. Not counted are integers, bools, and values that forward code
/// also holds, such as parameters. What an operation keeps and a quantized layer keeps a copy of counts as both.
#[derive(Debug, Clone, Default)]
pub struct ActivationReport {
    /// The values.
    pub values: Vec<Saved>,
    /// The quantized copies of weights, which stay until a step changes the weights.
    pub weights: Vec<Saved>,
}

/// The bytes that several values take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Total {
    /// How many there are.
    pub values: usize,
    /// Their elements.
    pub elements: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The bytes that BF16 would take.
    pub bf16_bytes: usize,
}

impl Total {
    /// That of these values.
    pub fn of<'a>(values: impl IntoIterator<Item = &'a Saved>) -> Self {
        values.into_iter().fold(Self::default(), Self::and)
    }

    fn and(self, value: &Saved) -> Self {
        Self {
            values: self.values + 1,
            elements: self.elements + value.elements,
            bytes: self.bytes + value.bytes,
            bf16_bytes: self.bf16_bytes + value.bf16_bytes(),
        }
    }
}

impl ActivationReport {
    /// The bytes of all values, those of weights' copies aside.
    pub fn bytes(&self) -> usize {
        self.total().bytes
    }

    /// That of all values, those of weights' copies aside.
    pub fn total(&self) -> Total {
        Total::of(&self.values)
    }

    /// The totals of the values of each key, such as `|value| value.layer.clone()`: that of the most bytes first, and
    /// of equal ones the one that was made first.
    pub fn totals<K: Clone + Eq + Hash>(&self, key: impl Fn(&Saved) -> K) -> Vec<(K, Total)> {
        let mut places = HashMap::new();
        let mut totals: Vec<(K, Total)> = Vec::new();
        for value in &self.values {
            let key = key(value);
            let place = *places.entry(key.clone()).or_insert(totals.len());
            if place == totals.len() {
                totals.push((key, Total::default()));
            }
            totals[place].1 = totals[place].1.and(value);
        }
        totals.sort_by_key(|(_, total)| std::cmp::Reverse((total.bytes, total.bf16_bytes)));
        totals
    }

    /// Where a flow broke: the values of operations that do not belong to it and keep more than it would, the small
    /// ones aside, each with the bytes that it would take in the flow. The loss is among them: no flow reaches it.
    pub fn breaks(&self, flow: &Flow) -> Vec<(&Saved, usize)> {
        let values = self.values.iter();
        values
            .filter_map(|value| Some((value, value.in_flow(flow)?)))
            .collect()
    }
}

impl fmt::Display for ActivationReport {
    /// A table: a line for each layer, operation and format, the largest first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, of: [&str; 3], total: &Total| {
            let [layer, operation, format] = of;
            let kib = |bytes: usize| bytes as f64 / 1024.0;
            write!(
                f,
                "| {layer} | {operation} | {format} | {} | {} | {:.1} | {:.1} |",
                total.values,
                total.elements,
                kib(total.bytes),
                kib(total.bf16_bytes),
            )
        };
        writeln!(
            f,
            "| layer | operation | format | values | elements | KiB | in BF16 |"
        )?;
        writeln!(f, "| --- | --- | --- | ---: | ---: | ---: | ---: |")?;
        let key = |value: &Saved| (value.layer.clone(), value.operation, value.format());
        for ((layer, operation, format), total) in self.totals(key) {
            line(f, [&layer, operation, &format], &total)?;
            writeln!(f)?;
        }
        line(f, ["all", "", ""], &self.total())?;
        if !self.weights.is_empty() {
            writeln!(f)?;
            line(f, ["copies of weights", "", ""], &Total::of(&self.weights))?;
        }
        Ok(())
    }
}
