//! The value of a tensor: how it is held, and when that changes.

use std::{
    fmt::Debug,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use burn_backend::{
    DType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::quantize::QuantizeSpec;

use super::{
    again::{Again, Origin},
    bits::Bits,
    compress::{Compress, Decompress},
    later::{GradientCopy, Later},
    rematerialized::{NormInputs, Rematerialized, WeakNormInputs},
    report, scope,
};
use crate::{
    data::{
        DataBackend,
        composition::{OperatorInput, gradient_of_terms},
        quantize::Quantized,
        tensors,
    },
    lock::lock,
    recipe::Context,
};

/// Values of fewer elements stay exact: gains, small models.
pub const MIN_COMPRESSED: usize = 4096;
/// Terms, at least, of a sum that is a number a row, which waits exactly beside the row: sums of pairs are half of all.
const ROW: usize = 4;
/// Computations that may stand on each other.
const MAX_DEPTH: usize = 6;
/// Elementwise operations between a value and the loss that keep it exact.
const LOSS_DEPTH: usize = 8;

/// A value that forward code and nodes of autodiff share.
pub struct Cell<B: DataBackend> {
    shape: Shape,
    dtype: DType,
    device: Device<B>,
    state: Mutex<State<B>>,
    /// What it will be compressed to, where a kernel that read it has made that already.
    compressed: Mutex<Option<Box<Quantized<B>>>>,
    /// How many values that wait for their readers are computed from it: as long as there is one, it is not compressed.
    awaited: AtomicUsize,
    /// The copy of its gradient that is taken by the operation which made it, or what it rounds.
    gradient_copy: Mutex<Option<Box<GradientCopy<B>>>>,
    /// The operation that made it, if what it makes may be compressed.
    origin: Option<Origin<B>>,
    /// What it is made of, where it is a norm's output of an input that will wait compressed.
    norm_inputs: OnceLock<Box<WeakNormInputs<B>>>,
    /// The format in which it may wait; `None` for what is not made by the forward pass.
    context: Option<Context>,
    exact: AtomicBool,
    /// True if its values are 0 and 1.
    is_mask: bool,
    /// Computations that stand on each other on top of it.
    above: AtomicUsize,
    /// How many tensors of the outer decorator hold it.
    handles: AtomicUsize,
    /// Names the operation that made it.
    operation: &'static str,
    /// True for a number a row.
    is_of_row: AtomicBool,
    /// True for the output of a linear layer that flows.
    is_of_layer: AtomicBool,
    /// Two dimensions that are swapped in memory: heads are slices of a layer's rows, and so compressed without a copy.
    swapped: Option<[usize; 2]>,
    /// True for what a block made for itself alone.
    in_block: AtomicBool,
    /// How the block's second run makes it, until nobody needs it before that.
    of_block: Mutex<Option<Again<B>>>,
}

#[derive(Debug)]
enum State<B: DataBackend> {
    Exact(FloatTensor<B>),
    Compressed(Quantized<B>),
    Bits(Bits<B>),
    Again(Again<B>),
    /// To be computed by the second run of its block, for all readers.
    OfBlock(Again<B>),
    /// To be added up: a gradient that comes in terms.
    Sum(Vec<OperatorInput<B>>),
    /// To be computed by its first reader.
    Later(Later<B>),
    /// Handed to a compression. Seen by others only after that panicked.
    Taken,
}

impl<B: DataBackend> Clone for State<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Exact(value) => Self::Exact(value.clone()),
            Self::Compressed(matrix) => Self::Compressed(matrix.clone()),
            Self::Bits(bits) => Self::Bits(bits.clone()),
            Self::Again(again) => Self::Again(again.clone()),
            Self::OfBlock(again) => Self::OfBlock(again.clone()),
            Self::Sum(terms) => Self::Sum(terms.clone()),
            Self::Later(later) => Self::Later(later.clone()),
            Self::Taken => Self::Taken,
        }
    }
}

/// The format in which a value of this shape and dtype that the running operation makes waits, if a node keeps it and
/// forward code does not.
pub(super) fn waits_when_made(shape: &Shape, dtype: DType) -> Option<Context> {
    let is_small = is_small(shape, is_number_a_row(shape));
    scope::context().filter(|_| !is_small && is_compressed(dtype) && !scope::in_block())
}

/// True for the shape of a number a row.
fn is_number_a_row(shape: &Shape) -> bool {
    shape.last() == Some(&1)
}

/// True for what stays exact without being marked.
fn is_small(shape: &Shape, is_of_row: bool) -> bool {
    shape.num_elements() < MIN_COMPRESSED || is_of_row
}

/// True for a dtype that is compressed.
fn is_compressed(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// A tensor's shape, dtype and device.
pub(crate) type Form<B> = (Shape, DType, Device<B>);

fn form_of<B: DataBackend>(value: &FloatTensor<B>) -> Form<B> {
    (value.shape(), value.dtype(), B::float_device(value))
}

/// The float primitive of [`Held`](super::Held): a share in a cell.
pub struct HeldTensor<B: DataBackend>(Arc<Cell<B>>);

impl<B: DataBackend> Clone for HeldTensor<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: DataBackend> Debug for HeldTensor<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldTensor")
            .field("operation", &self.0.operation)
            .field("shape", &self.0.shape)
            .finish_non_exhaustive()
    }
}

impl<B: DataBackend> TensorMetadata for HeldTensor<B> {
    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn shape(&self) -> Shape {
        self.0.shape.clone()
    }

    fn rank(&self) -> usize {
        self.0.shape.num_dims()
    }
}

impl<B: DataBackend> HeldTensor<B> {
    /// A cell of its own for a value.
    pub fn new(value: FloatTensor<B>) -> Self {
        Self::made(value, "constant", None)
    }

    /// A cell for the result of an operation of this name.
    pub fn of(operation: &'static str, value: FloatTensor<B>) -> Self {
        Self::made(value, operation, None)
    }

    /// A cell for values that are 0 and 1.
    pub(crate) fn mask(operation: &'static str, value: FloatTensor<B>) -> Self {
        Self::held(value, operation, None, true)
    }

    /// A cell for the result of an operation.
    pub(super) fn made(
        value: FloatTensor<B>,
        operation: &'static str,
        origin: Option<Origin<B>>,
    ) -> Self {
        Self::held(value, operation, origin, false)
    }

    /// A cell for the result of an operation that swapped two dimensions.
    pub(super) fn swapped(
        value: FloatTensor<B>,
        operation: &'static str,
        origin: Option<Origin<B>>,
        dims: [usize; 2],
    ) -> Self {
        let form = form_of::<B>(&value);
        let state = State::Exact(value);
        Self::in_state(state, form, operation, origin, false, Some(dims))
    }

    fn held(
        value: FloatTensor<B>,
        operation: &'static str,
        origin: Option<Origin<B>>,
        is_mask: bool,
    ) -> Self {
        let form = form_of::<B>(&value);
        Self::in_state(State::Exact(value), form, operation, origin, is_mask, None)
    }

    fn in_state(
        state: State<B>,
        (shape, dtype, device): Form<B>,
        operation: &'static str,
        origin: Option<Origin<B>>,
        is_mask: bool,
        swapped: Option<[usize; 2]>,
    ) -> Self {
        let (context, in_block) = (scope::context(), scope::in_block());
        let cell = Arc::new(Cell {
            is_of_row: AtomicBool::new(is_number_a_row(&shape)),
            is_of_layer: AtomicBool::new(false),
            shape,
            dtype,
            device,
            state: Mutex::new(state),
            compressed: Mutex::default(),
            awaited: AtomicUsize::new(0),
            gradient_copy: Mutex::default(),
            origin,
            norm_inputs: OnceLock::new(),
            context,
            exact: AtomicBool::new(false),
            is_mask,
            above: AtomicUsize::new(0),
            handles: AtomicUsize::new(0),
            operation,
            swapped,
            in_block: AtomicBool::new(in_block),
            of_block: Mutex::default(),
        });
        if context.is_some() || in_block {
            scope::created(&cell);
        }
        report::created(&cell);
        Self(cell)
    }

    /// A cell of the shape and dtype of another, for an operation that gives a quantized matrix.
    pub(crate) fn quantized(operation: &'static str, matrix: Quantized<B>, like: &Cell<B>) -> Self {
        let state = State::Compressed(matrix);
        Self::in_state(state, like.form(), operation, None, false, None)
    }

    /// A cell for what an operator may read, on this device.
    pub(crate) fn of_input(
        operation: &'static str,
        input: OperatorInput<B>,
        device: &Device<B>,
    ) -> Self {
        match input {
            OperatorInput::Floats(value) => Self::new(value),
            OperatorInput::Quantized {
                matrix,
                shape,
                dtype,
            } => {
                let form = (shape, dtype.into(), device.clone());
                Self::in_state(
                    State::Compressed(matrix),
                    form,
                    operation,
                    None,
                    false,
                    None,
                )
            }
        }
    }

    /// A cell for the sum of a gradient's terms, all of this form.
    pub(super) fn sum(terms: Vec<OperatorInput<B>>, form: Form<B>) -> Self {
        let state = State::Sum(terms);
        Self::in_state(state, form, "gradient", None, false, None)
    }

    /// A cell of this form for a value that its reader computes.
    pub(crate) fn later(operation: &'static str, later: Later<B>, form: Form<B>) -> Self {
        Self::in_state(State::Later(later), form, operation, None, false, None)
    }

    /// How many tensors it is the sum of.
    pub(super) fn terms(&self) -> usize {
        match &*self.0.lock() {
            State::Sum(terms) => terms.len(),
            State::Exact(_)
            | State::Compressed(_)
            | State::Bits(_)
            | State::Again(_)
            | State::OfBlock(_)
            | State::Later(_)
            | State::Taken => 1,
        }
    }

    /// What it is the sum of, where nobody else reads it; else the value.
    pub(super) fn into_terms(self) -> Vec<OperatorInput<B>> {
        if self.is_in_numbers() {
            return vec![self.into_input()];
        }
        let value = match Arc::try_unwrap(self.0) {
            Ok(cell) => {
                let state = cell.state.into_inner();
                match state.unwrap_or_else(PoisonError::into_inner) {
                    State::Sum(terms) => return terms,
                    state => state.into_value(cell.shape, cell.dtype, cell.swapped),
                }
            }
            Err(cell) => cell.read(),
        };
        vec![OperatorInput::Floats(value)]
    }

    /// True for one of the same shape and dtype.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.0.shape == other.0.shape && self.0.dtype == other.0.dtype
    }

    /// The same, made again so in the second run of its block, if it is of one.
    pub(super) fn of_block(self, again: Option<Again<B>>) -> Self {
        if again.is_some() {
            *lock(&self.0.of_block) = again;
        }
        self
    }

    /// A share in a cell.
    pub(super) fn share(cell: Arc<Cell<B>>) -> Self {
        Self(cell)
    }

    /// The same, the output of a norm of these, whose input will wait compressed.
    pub(crate) fn of_norm(self, inputs: &NormInputs<B>) -> Self {
        let inputs = Box::new(WeakNormInputs::of(inputs));
        let _ = self.0.norm_inputs.set(inputs);
        self
    }

    /// The same, a sum of so many terms.
    pub(super) fn sum_of(self, terms: usize) -> Self {
        if terms < ROW {
            self.0.is_of_row.store(false, Ordering::Relaxed);
        }
        self
    }

    /// The cell.
    pub fn cell(&self) -> &Arc<Cell<B>> {
        &self.0
    }

    /// The value as an operator's kernel reads it: in the numbers in which it waits, if these lie in its order.
    pub(crate) fn into_input(self) -> OperatorInput<B> {
        match self.numbers() {
            Some(matrix) => OperatorInput::Quantized {
                matrix,
                shape: self.shape(),
                dtype: self.dtype().into(),
            },
            None => OperatorInput::Floats(self.into_value()),
        }
    }

    /// True where [`into_input`](Self::into_input) gives numbers.
    pub(crate) fn is_in_numbers(&self) -> bool {
        self.numbers().is_some()
    }

    /// The numbers in which the value waits, if these lie in its order.
    fn numbers(&self) -> Option<Quantized<B>> {
        match &*self.0.lock() {
            State::Compressed(matrix) if self.0.swapped.is_none() => Some(matrix.clone()),
            State::Compressed(_)
            | State::Exact(_)
            | State::Bits(_)
            | State::Again(_)
            | State::OfBlock(_)
            | State::Sum(_)
            | State::Later(_)
            | State::Taken => None,
        }
    }

    /// The value, owned where this is the last share, so that operations in place stay in place.
    pub fn into_value(self) -> FloatTensor<B> {
        match Arc::try_unwrap(self.0) {
            Ok(cell) => {
                let state = cell.state.into_inner();
                let state = state.unwrap_or_else(PoisonError::into_inner);
                state.into_value(cell.shape, cell.dtype, cell.swapped)
            }
            Err(cell) => cell.read(),
        }
    }
}

/// The sum of a gradient's terms, in their order.
pub(super) fn sum_of_terms<B: DataBackend>(terms: Vec<OperatorInput<B>>) -> FloatTensor<B> {
    let floats = |term| match term {
        OperatorInput::Floats(tensor) => tensor,
        OperatorInput::Quantized {
            matrix,
            shape,
            dtype,
        } => B::run(Decompress { shape, dtype }, matrix),
    };
    gradient_of_terms::<B>(terms.into_iter().map(floats))
}

impl<B: DataBackend> State<B> {
    fn into_value(
        self,
        mut shape: Shape,
        dtype: DType,
        swapped: Option<[usize; 2]>,
    ) -> FloatTensor<B> {
        match self {
            Self::Exact(value) => value,
            Self::Compressed(matrix) => {
                let dtype = dtype.into();
                match swapped {
                    None => B::run(Decompress { shape, dtype }, matrix),
                    Some([a, b]) => {
                        shape.swap(a, b);
                        B::float_swap_dims(B::run(Decompress { shape, dtype }, matrix), a, b)
                    }
                }
            }
            Self::Bits(bits) => bits.into_floats(),
            Self::Again(again) | Self::OfBlock(again) => again.compute(),
            Self::Sum(terms) => sum_of_terms::<B>(terms),
            Self::Later(later) => later.compute(),
            Self::Taken => panic!("a saved value is lost: its compression panicked"),
        }
    }
}

impl<B: DataBackend> Cell<B> {
    /// The value.
    pub fn read(&self) -> FloatTensor<B> {
        let state = {
            let mut state = self.lock();
            if let State::Later(later) = &*state {
                // While others wait: it is computed once.
                *state = State::Exact(later.compute());
            }
            state.clone()
        };
        match state {
            State::OfBlock(again) => self.run_again(&again),
            State::Sum(terms) => {
                let sum = sum_of_terms::<B>(terms);
                *self.lock() = State::Exact(sum.clone());
                sum
            }
            state => state.into_value(self.shape.clone(), self.dtype, self.swapped),
        }
    }

    /// The value by the second run of its block: those that it stands on first, each once. A loop, since a block may be
    /// deep.
    fn run_again(&self, again: &Again<B>) -> FloatTensor<B> {
        let mut waiting = again.operands().to_vec();
        while let Some(cell) = waiting.last().cloned() {
            let Some(again) = cell.of_second_run() else {
                waiting.pop();
                continue;
            };
            let before = again.operands().iter();
            let before = before.filter(|operand| operand.of_second_run().is_some());
            let count = waiting.len();
            waiting.extend(before.cloned());
            if waiting.len() == count {
                *cell.lock() = State::Exact(again.compute());
                waiting.pop();
            }
        }
        let value = again.compute();
        *self.lock() = State::Exact(value.clone());
        value
    }

    /// How the second run of its block makes it, if it has not yet.
    fn of_second_run(&self) -> Option<Again<B>> {
        match &*self.lock() {
            State::OfBlock(again) => Some(again.clone()),
            State::Exact(_)
            | State::Compressed(_)
            | State::Bits(_)
            | State::Again(_)
            | State::Sum(_)
            | State::Later(_)
            | State::Taken => None,
        }
    }

    /// Its shape, dtype and device.
    pub(crate) fn form(&self) -> Form<B> {
        (self.shape.clone(), self.dtype, self.device.clone())
    }

    /// Two dimensions that are swapped in memory.
    pub(super) fn swapped_dims(&self) -> Option<[usize; 2]> {
        self.swapped
    }

    /// Its device.
    pub fn device(&self) -> &Device<B> {
        &self.device
    }

    /// Keeps the value as it is, unless it is too late for that.
    pub fn keep_exact(&self) {
        if matches!(&*self.lock(), State::Exact(_) | State::Later(_)) {
            self.exact.store(true, Ordering::Relaxed);
        }
    }

    /// Keeps what a loss was computed from as it is: an error there is in every gradient.
    pub(crate) fn keep_loss(&self) {
        self.keep_made_from(LOSS_DEPTH);
    }

    fn keep_made_from(&self, depth: usize) {
        self.keep_exact();
        if let Some(origin) = self.origin.as_ref().filter(|_| depth > 0) {
            origin
                .made_from()
                .for_each(|cell| cell.keep_made_from(depth - 1));
        }
    }

    /// The operation that made it.
    pub(super) fn origin(&self) -> Option<&Origin<B>> {
        self.origin.as_ref()
    }

    /// How many computations stand on each other in it.
    fn depth(&self) -> usize {
        match &*self.lock() {
            State::Again(again) => {
                let below = again.operands().iter().map(|operand| operand.depth());
                1 + below.max().unwrap_or(0)
            }
            State::Exact(_)
            | State::Compressed(_)
            | State::Bits(_)
            | State::OfBlock(_)
            | State::Sum(_)
            | State::Later(_)
            | State::Taken => 0,
        }
    }

    /// Notes that so many computations stand on it.
    fn raise(&self, above: usize) {
        self.above.fetch_max(above, Ordering::Relaxed);
        if let State::Again(again) = &*self.lock() {
            for operand in again.operands() {
                operand.raise(above + 1);
            }
        }
    }

    /// The format in which it will wait, if it lies in the order of its elements and forward code lets go of it before
    /// the backward pass.
    pub(crate) fn will_wait_as(&self) -> Option<Context> {
        let is_exact = self.stays_exact() || self.is_mask || self.swapped.is_some();
        let is_made_again = self.is_in_block() || self.origin().is_some_and(Origin::is_cheap);
        let is_there = matches!(&*self.lock(), State::Exact(_)) && is_compressed(self.dtype);
        self.context
            .filter(|_| is_there && !is_exact && !is_made_again)
    }

    /// How its rows are quantized, if it [will wait](Self::will_wait_as) so and these are whole groups.
    pub(crate) fn rows_will_wait_as(&self) -> Option<QuantizeSpec> {
        let context = self.will_wait_as()?;
        Compress { context }.of_rows(&self.shape)
    }

    /// True where the copy that it will wait as is there.
    pub(crate) fn has_compressed(&self) -> bool {
        lock(&self.compressed).is_some()
    }

    /// Takes what it will be compressed to, in the format that it [waits in](Self::will_wait_as).
    pub(crate) fn keep_compressed(&self, matrix: Quantized<B>) {
        *lock(&self.compressed) = Some(Box::new(matrix));
    }

    /// Keeps the value as it is until [`Self::end_wait`].
    pub(super) fn begin_wait(&self) {
        self.awaited.fetch_add(1, Ordering::AcqRel);
    }

    /// Lets the value be compressed, if nothing else waits. Says whether it may be.
    pub(super) fn end_wait(&self) -> bool {
        self.awaited.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// What it is computed from, as long as nobody has computed it.
    pub(crate) fn waits_for_reader(&self) -> Option<Later<B>> {
        match &*self.lock() {
            State::Later(later) => Some(later.clone()),
            State::Exact(_)
            | State::Compressed(_)
            | State::Bits(_)
            | State::Again(_)
            | State::OfBlock(_)
            | State::Sum(_)
            | State::Taken => None,
        }
    }

    /// Says that a linear layer of a flow made it.
    pub(crate) fn note_layer(&self) {
        self.is_of_layer.store(true, Ordering::Relaxed);
    }

    /// True if a linear layer of a flow made it: operators may have it quantized in the layer's product.
    pub(crate) fn is_of_layer(&self) -> bool {
        self.is_of_layer.load(Ordering::Relaxed)
    }

    /// How it can be made again in the backward pass of what waits anyway, if that is not itself.
    pub(crate) fn rematerialized(self: &Arc<Self>) -> Option<Rematerialized<B>> {
        if self.context.is_none() || self.is_in_block() {
            return None;
        }
        if let Some(inputs) = self.norm_inputs.get() {
            return inputs.upgrade().map(Rematerialized::RmsNorm);
        }
        let view = self
            .origin()?
            .to_view(|of| of.is_exact() && of.holders() > 0);
        view.map(Rematerialized::View)
    }

    /// Says how the operation that made it, or what it rounds, quantizes its gradient.
    pub(crate) fn will_quantize_gradient(&self, copy: GradientCopy<B>) {
        *lock(&self.gradient_copy) = Some(Box::new(copy));
    }

    /// How the operation that made it, or what it rounds, quantizes its gradient, if it does.
    pub(crate) fn gradient_copy(&self) -> Option<GradientCopy<B>> {
        lock(&self.gradient_copy).as_deref().cloned()
    }

    fn is_exact(&self) -> bool {
        self.exact.load(Ordering::Relaxed)
    }

    fn elements(&self) -> usize {
        self.shape.num_elements()
    }

    /// True for few elements, and for a number a row: what stays exact without being marked.
    pub(super) fn is_small(&self) -> bool {
        is_small(&self.shape, self.is_of_row.load(Ordering::Relaxed))
    }

    /// True if it is never compressed.
    pub(crate) fn stays_exact(&self) -> bool {
        self.is_exact() || self.is_small() || self.context.is_none()
    }

    /// How many nodes and computations hold it, if the caller has one share.
    fn holders(self: &Arc<Self>) -> usize {
        Arc::strong_count(self).saturating_sub(1 + self.handles.load(Ordering::Acquire))
    }

    /// How it can be computed again from what is kept anyway.
    fn again(self: &Arc<Self>) -> Option<Again<B>> {
        let above = self.above.load(Ordering::Relaxed);
        self.origin()?.to_do(self.is_exact(), |operand| {
            // A parameter, a constant of a module, or what forward code holds for now, which must not be much larger.
            let is_held = operand.has_handles() && operand.elements() <= 2 * self.elements();
            let is_kept = operand.holders() > 0 || operand.is_small() || is_held;
            let is_kept = is_kept && !operand.is_in_block();
            is_kept && operand.depth() + 1 + above <= MAX_DEPTH
        })
    }

    /// True for what a block made for itself alone.
    fn is_in_block(&self) -> bool {
        self.in_block.load(Ordering::Acquire)
    }

    /// How it would have been made again.
    pub(super) fn into_computations(self) -> impl Iterator<Item = Again<B>> {
        let state = self.state.into_inner();
        let of_state = match state.unwrap_or_else(PoisonError::into_inner) {
            State::Again(again) | State::OfBlock(again) => Some(again),
            State::Exact(_)
            | State::Compressed(_)
            | State::Bits(_)
            | State::Sum(_)
            | State::Later(_)
            | State::Taken => None,
        };
        let of_block = self.of_block.into_inner();
        let of_block = of_block.unwrap_or_else(PoisonError::into_inner);
        of_state.into_iter().chain(of_block)
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        lock(&self.state)
    }
}

/// A cell of any backend.
pub(super) trait AnyCell: Send + Sync {
    /// One handle more.
    fn acquire(&self);

    /// One handle less. True if it was the last.
    fn release(&self) -> bool;

    /// True while forward code may read it.
    fn has_handles(&self) -> bool;

    /// Forward code will not read it again: if something waits for it, it becomes a computation to be done again, or is
    /// to be compressed, which the result says.
    fn settle(self: Arc<Self>) -> bool;

    /// Compresses the value.
    fn compress(self: Arc<Self>);

    /// It is what its block gave: it waits like other values.
    fn leave_block(&self);

    /// Its row of a report, if it waits for the backward pass and for nothing else. The caller has one share.
    fn row(self: Arc<Self>, layer: String) -> Option<report::Saved>;
}

impl<B: DataBackend> AnyCell for Cell<B> {
    fn acquire(&self) {
        self.handles.fetch_add(1, Ordering::AcqRel);
    }

    fn release(&self) -> bool {
        self.handles.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn has_handles(&self) -> bool {
        self.handles.load(Ordering::Acquire) > 0
    }

    fn settle(self: Arc<Self>) -> bool {
        let of_block = lock(&self.of_block).take();
        let waits = self.holders() > 0 && !self.is_small();
        if let Some(again) = of_block.filter(|_| waits) {
            lock(&self.compressed).take();
            *self.lock() = State::OfBlock(again);
            return false;
        }
        let may_wait = self.context.is_some() || self.is_in_block();
        if !(waits && may_wait && matches!(&*self.lock(), State::Exact(_))) {
            return false;
        }
        match self.again().filter(|_| !self.is_in_block()) {
            Some(again) => {
                let above = self.above.load(Ordering::Relaxed) + 1;
                again.operands().iter().for_each(|it| it.raise(above));
                lock(&self.compressed).take();
                *self.lock() = State::Again(again);
                false
            }
            None => true,
        }
    }

    fn compress(self: Arc<Self>) {
        if self.awaited.load(Ordering::Acquire) > 0 {
            return;
        }
        let packs = self.is_mask || self.context.is_some();
        let waits = !self.has_handles() && self.holders() > 0;
        let compressed = lock(&self.compressed).take();
        if !(is_compressed(self.dtype) && packs && waits) || self.is_exact() {
            return;
        }
        // By ownership: in a fused stream the last read of a tensor is what frees it.
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Exact(value) => {
                *state = match (self.is_mask, self.context) {
                    (true, _) => State::Bits(Bits::of(value)),
                    (false, None) => State::Exact(value),
                    (false, Some(context)) => {
                        if let Some(matrix) = compressed {
                            *state = State::Compressed(*matrix);
                            return;
                        }
                        let value = match self.swapped {
                            None => value,
                            Some([a, b]) => B::float_swap_dims(value, a, b),
                        };
                        State::Compressed(B::run(Compress { context }, value))
                    }
                };
            }
            other => *state = other,
        }
    }

    fn leave_block(&self) {
        self.in_block.store(false, Ordering::Release);
        lock(&self.of_block).take();
    }

    fn row(self: Arc<Self>, layer: String) -> Option<report::Saved> {
        if self.has_handles() || self.holders() == 0 {
            return None;
        }
        let exact = self.elements() * self.dtype.size();
        let (form, bytes) = match &*self.lock() {
            State::Exact(_) => (report::Form::Exact, exact),
            State::Compressed(matrix) => (
                report::Form::Compressed(matrix.format.number),
                tensors::bytes_of::<Quantized<tensors::Outline>, B>(matrix.clone()),
            ),
            State::Bits(bits) => (report::Form::Bits, bits.bytes()),
            State::Again(_) | State::OfBlock(_) => (report::Form::Again, 0),
            State::Sum(_) | State::Later(_) | State::Taken => return None,
        };
        Some(report::Saved {
            layer,
            operation: self.operation,
            shape: self.shape.to_vec(),
            dtype: self.dtype,
            form,
            elements: self.elements(),
            bytes,
        })
    }
}

/// A handle of forward code on a cell: counted as long as it lives.
#[derive(Default)]
pub(crate) struct Handle(Option<Weak<dyn AnyCell>>);

impl Handle {
    /// A handle on the cell, if there is one.
    pub fn on<B: DataBackend>(cell: Option<&Arc<Cell<B>>>) -> Self {
        Self(cell.map(|cell| {
            cell.acquire();
            Arc::downgrade(cell) as Weak<dyn AnyCell>
        }))
    }

    /// Ends with the operation that now takes the value. Where none runs, the value is about to be read, and it stays
    /// as it is.
    pub fn consume(mut self) {
        let Some(cell) = self.0.take() else { return };
        if let Some(cell) = scope::consume(cell).and_then(|cell| cell.upgrade()) {
            cell.release();
        }
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        if let Some(cell) = self.0.as_ref().and_then(Weak::upgrade) {
            cell.acquire();
        }
        Self(self.0.clone())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(cell) = self.0.take() else { return };
        if let Some(cell) = scope::consume(cell).and_then(|cell| cell.upgrade())
            && cell.release()
        {
            scope::settle(cell);
        }
    }
}
