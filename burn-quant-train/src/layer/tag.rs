//! Tags, which travel with a tensor's value.
//!
//! On a weight the tag holds the quantization state of its layer; on any tensor it holds the compressed copies made of
//! it so far, so that an activation that several layers save is compressed and stored once, and a weight is quantized
//! once per optimizer step. State that rides on tensors needs no registry, leaks nothing, and follows the tensor to
//! other threads.

use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, Weak,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};

use super::{Bank, Call, Layer};
use crate::{
    data::{
        DataBackend, Layout, StochasticKey,
        learned_step::HadamardTransform,
        quantize::{Format, Quantized, Residual},
    },
    lock::lock,
    ops::linear::again::CopyAgain,
    recipe::Rounding,
};

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The number of tags alive in this process: one for each distinct tensor value that is held somewhere.
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// How a tensor shows the matrix that its tag speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Leading dimensions flattened into rows, the last one the columns.
    Rows,
    /// The last two dimensions swapped, all leading ones 1.
    Transposed,
}

/// Tells the compressed copies of a tensor apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyKey {
    /// How its numbers are to be read.
    pub format: Format,
    /// How values were rounded.
    pub rounding: Rounding,
    /// True for a copy of the tensor's transpose, which is made where scales do not turn with the matrix.
    pub of_transpose: bool,
    /// The transform before a quantization by the layer's step size; `None` where the scales come from the data.
    pub learned: Option<HadamardTransform>,
    /// True for a copy made after a random Hadamard transform of its rows.
    pub rotated: bool,
    /// The slot whose history of maxima scales it; `None` where the scales are its own.
    pub history: Option<&'static str>,
    /// The order of its values.
    pub layout: Layout,
}

/// The time for which a copy is good that is stochastic, has a learned step size or a scale of earlier steps: a step of
/// a bank, in a lane. In longer use the error of one draw would become a bias; step sizes and scales move at every
/// step.
pub(crate) struct Epoch<B: DataBackend> {
    bank: Weak<Bank<B>>,
    time: u64,
    lane: u64,
}

impl<B: DataBackend> Epoch<B> {
    /// The epoch of a call of one of the bank's layers.
    pub fn of(bank: &Arc<Bank<B>>, call: Call) -> Self {
        Self {
            bank: Arc::downgrade(bank),
            time: call.time,
            lane: call.lane,
        }
    }

    fn is_over(&self) -> bool {
        self.bank
            .upgrade()
            .is_none_or(|bank| bank.now().time != self.time)
    }
}

impl<B: DataBackend> PartialEq for Epoch<B> {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.bank, &other.bank) && self.time == other.time && self.lane == other.lane
    }
}

/// A compressed copy of a tensor.
struct SavedCopy<B: DataBackend> {
    key: CopyKey,
    /// `None` for a copy to nearest with scales of its own, which is good as long as the value.
    epoch: Option<Epoch<B>>,
    matrix: Arc<Quantized<B>>,
}

/// A compressed copy of a tensor with the residuals of blocks that fell back.
pub(crate) struct FallbackCopy<B: DataBackend> {
    /// The blocks.
    pub base: Arc<Quantized<B>>,
    /// The residuals of those above the threshold.
    pub residual: Residual<B>,
    /// The layer whose threshold that was, by its index in the bank.
    pub layer: usize,
}

impl<B: DataBackend> Clone for FallbackCopy<B> {
    fn clone(&self) -> Self {
        Self {
            base: self.base.clone(),
            residual: self.residual.clone(),
            layer: self.layer,
        }
    }
}

/// Such a copy, and the time for which its threshold is good.
struct SavedFallback<B: DataBackend> {
    key: CopyKey,
    epoch: Epoch<B>,
    copy: FallbackCopy<B>,
}

/// A copy that the backward pass makes, and the time for which its rounding is good.
struct SavedAgain<B: DataBackend> {
    key: CopyKey,
    epoch: Option<Epoch<B>>,
    copy: Weak<CopyAgain<B>>,
}

/// The random numbers that a copy was rounded with.
struct Draw<B: DataBackend> {
    key: CopyKey,
    epoch: Option<Epoch<B>>,
    random: StochasticKey,
}

/// The state that travels with a tensor's value.
///
/// `B` is the backend that holds the data: the one inside `Autodiff`.
pub struct Tag<B: DataBackend> {
    layer: OnceLock<Arc<Layer<B>>>,
    /// The layer from whose weight this value was computed.
    origin: Option<Arc<Layer<B>>>,
    /// True if the value is that of the weight itself.
    is_weight: bool,
    parameter: AtomicBool,
    /// True for what an operator of the recipe's flow made.
    flows: bool,
    copies: Mutex<Vec<SavedCopy<B>>>,
    /// Copies with residuals.
    with_fallback: Mutex<Vec<SavedFallback<B>>>,
    /// Copies that the backward pass makes, as long as a layer waits for them.
    again: Mutex<Vec<SavedAgain<B>>>,
    /// The tag of the value as the second run of its block makes it, while something waits for that run.
    second_run: Mutex<Weak<Self>>,
    /// The draws of copies that are to be made once more.
    draws: Mutex<Vec<Draw<B>>>,
    /// The value without padding between its rows.
    dense: Mutex<Option<FloatTensor<B>>>,
}

impl<B: DataBackend> Tag<B> {
    /// A tag with nothing in it.
    pub(crate) fn new() -> Self {
        Self::from_origin(None)
    }

    /// A tag for the weight of `layer`.
    pub(crate) fn with_layer(layer: Arc<Layer<B>>) -> Self {
        let tag = Self::new();
        let _ = tag.layer.set(layer);
        tag
    }

    /// A tag for what an operator of the recipe's flow made.
    pub(crate) fn of_flow() -> Self {
        let mut tag = Self::new();
        tag.flows = true;
        tag
    }

    fn from_origin(origin: Option<Arc<Layer<B>>>) -> Self {
        LIVE.fetch_add(1, Ordering::Relaxed);
        Self {
            layer: OnceLock::new(),
            origin,
            is_weight: false,
            parameter: AtomicBool::new(false),
            flows: false,
            copies: Mutex::default(),
            with_fallback: Mutex::default(),
            again: Mutex::default(),
            second_run: Mutex::default(),
            draws: Mutex::default(),
            dense: Mutex::default(),
        }
    }

    /// A tag for a value of the same shape that was computed from this one's.
    ///
    /// If it becomes a parameter, it is the weight of the same layer: so a layer outlives what a training loop does to
    /// its weight.
    pub(crate) fn descendant(&self) -> Self {
        Self::from_origin(self.lineage().cloned())
    }

    /// A tag for the same value without autodiff, or in another place of its graph.
    pub(crate) fn of_same_value(&self) -> Self {
        let mut tag = self.descendant();
        tag.is_weight = self.weight_of().is_some();
        tag
    }

    /// The layer whose weight this is, on the backend of training or without autodiff.
    pub(crate) fn weight_of(&self) -> Option<&Arc<Layer<B>>> {
        self.layer()
            .or(self.origin.as_ref().filter(|_| self.is_weight))
    }

    /// The layer whose weight this is, or from whose weight it was computed.
    pub(crate) fn lineage(&self) -> Option<&Arc<Layer<B>>> {
        self.layer().or(self.origin.as_ref())
    }

    /// The same tag for a copy of the tensor on another device: the layer, without the compressed copies.
    pub fn without_copies(&self) -> Self {
        let mut tag = Self::from_origin(self.origin.clone());
        tag.is_weight = self.is_weight;
        if let Some(layer) = self.layer.get() {
            let _ = tag.layer.set(layer.clone());
        }
        let parameter = self.parameter.load(Ordering::Relaxed);
        tag.parameter.store(parameter, Ordering::Relaxed);
        tag
    }

    /// Notes that gradients of this tensor are asked for, so that it is a parameter.
    ///
    /// If it was computed from a layer's weight, it becomes the weight of that layer.
    pub(crate) fn set_parameter(&self) {
        self.parameter.store(true, Ordering::Relaxed);
        if let Some(origin) = &self.origin {
            self.layer.get_or_init(|| origin.clone());
        }
    }

    /// True if gradients of this tensor were asked for.
    pub fn is_parameter(&self) -> bool {
        self.parameter.load(Ordering::Relaxed)
    }

    /// True if an operator of the recipe's flow made this value.
    pub(crate) fn flows(&self) -> bool {
        self.flows
    }

    /// The layer whose weight this is.
    pub fn layer(&self) -> Option<&Arc<Layer<B>>> {
        self.layer.get()
    }

    /// The compressed copies made so far.
    pub fn copies(&self) -> Vec<(CopyKey, Arc<Quantized<B>>)> {
        let copies = self.lock();
        copies
            .iter()
            .map(|copy| (copy.key, copy.matrix.clone()))
            .collect()
    }

    /// The compressed copy of this key that is good in this epoch, if one was made.
    pub(crate) fn find(&self, key: CopyKey, epoch: Option<Epoch<B>>) -> Option<Arc<Quantized<B>>> {
        let copies = self.lock();
        let mut found = copies.iter();
        let found = found.find(|copy| copy.key == key && copy.epoch == epoch)?;
        Some(found.matrix.clone())
    }

    /// Keeps a compressed copy, unless there is one already, and returns the one that is kept. Copies whose epoch is
    /// over make room for it.
    pub(crate) fn keep(
        &self,
        key: CopyKey,
        epoch: Option<Epoch<B>>,
        matrix: Quantized<B>,
    ) -> Arc<Quantized<B>> {
        let mut copies = self.lock();
        if let Some(kept) = copies
            .iter()
            .find(|copy| copy.key == key && copy.epoch == epoch)
        {
            return kept.matrix.clone();
        }
        copies.retain(|copy| !copy.epoch.as_ref().is_some_and(Epoch::is_over));
        let matrix = Arc::new(matrix);
        copies.push(SavedCopy {
            key,
            epoch,
            matrix: matrix.clone(),
        });
        matrix
    }

    /// The copy of this key with residuals that is good in this epoch, if one was made.
    pub(crate) fn find_fallback(&self, key: CopyKey, epoch: &Epoch<B>) -> Option<FallbackCopy<B>> {
        let copies = lock(&self.with_fallback);
        let mut found = copies.iter();
        let found = found.find(|saved| saved.key == key && saved.epoch == *epoch)?;
        Some(found.copy.clone())
    }

    /// Keeps a copy with residuals. Those whose epoch is over make room for it.
    pub(crate) fn keep_fallback(&self, key: CopyKey, epoch: Epoch<B>, copy: FallbackCopy<B>) {
        let mut copies = lock(&self.with_fallback);
        copies.retain(|saved| !saved.epoch.is_over());
        copies.push(SavedFallback { key, epoch, copy });
    }

    /// The copy that the backward pass makes, of this key and good in this epoch: that of an earlier layer, or else what
    /// `copy` gives, if it does. Those that nobody waits for make room for it.
    pub(crate) fn keep_again(
        &self,
        key: CopyKey,
        epoch: Option<Epoch<B>>,
        copy: impl FnOnce() -> Option<CopyAgain<B>>,
    ) -> Option<Arc<CopyAgain<B>>> {
        let mut copies = lock(&self.again);
        copies.retain(|saved| saved.copy.strong_count() > 0);
        let mut known = copies.iter();
        let known = known.find(|saved| saved.key == key && saved.epoch == epoch);
        if let Some(kept) = known.and_then(|saved| saved.copy.upgrade()) {
            return Some(kept);
        }
        let copy = Arc::new(copy()?);
        copies.push(SavedAgain {
            key,
            epoch,
            copy: Arc::downgrade(&copy),
        });
        Some(copy)
    }

    /// The tag for the copies that the second run of a [block](crate::saved::checkpoint()) makes of the value: one for
    /// all operations of blocks that read it, as long as one of them waits. It has no copies, so that none waits for
    /// that run.
    pub(crate) fn second_run(&self) -> Arc<Self> {
        let mut second = lock(&self.second_run);
        second.upgrade().unwrap_or_else(|| {
            let tag = Arc::new(Self::new());
            *second = Arc::downgrade(&tag);
            tag
        })
    }

    /// The random numbers for a copy of this key in this epoch: those of the first call. So both runs of a block make
    /// one copy, whichever of its operations makes it.
    pub(crate) fn draw(
        &self,
        key: CopyKey,
        epoch: Option<Epoch<B>>,
        random: StochasticKey,
    ) -> StochasticKey {
        // The values of a copy in another layout are the same.
        let key = CopyKey {
            layout: Layout::Both,
            ..key
        };
        let mut draws = lock(&self.draws);
        let known = draws.iter();
        let mut known = known.filter(|draw| draw.key == key && draw.epoch == epoch);
        if let Some(draw) = known.next() {
            return draw.random;
        }
        draws.push(Draw { key, epoch, random });
        random
    }

    /// The value, in this shape, without padding between its rows: what `make` gave the first time.
    pub(crate) fn dense(
        &self,
        shape: &Shape,
        make: impl FnOnce() -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let mut dense = lock(&self.dense);
        match &*dense {
            Some(kept) if kept.shape() == *shape => kept.clone(),
            _ => dense.insert(make()).clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SavedCopy<B>>> {
        lock(&self.copies)
    }
}

impl<B: DataBackend> Drop for Tag<B> {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<B: DataBackend> std::fmt::Debug for Tag<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tag")
            .field("layer", &self.layer().map(|layer| layer.path()))
            .finish_non_exhaustive()
    }
}
