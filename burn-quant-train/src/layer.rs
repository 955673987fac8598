//! The quantization state of linear layers.
//!
//! A [`Layer`] is one linear layer as its weight's tag knows it; the [`Bank`] holds what all layers of a model share:
//! the thresholds and fallback counters, which live on the device, and the position in the stream of random numbers.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use burn_backend::{
    IntDType, Shape, TensorData,
    tensor::{Device, FloatTensor, IntTensor},
};
use serde::{Deserialize, Serialize};

use crate::{
    ops::{Fallback, QuantOps, StochasticKey},
    read::floats,
};

static SEED: AtomicU64 = AtomicU64::new(0);

/// Sets the seed of the banks created from now on; `Backend::seed` calls it.
pub(crate) fn set_seed(seed: u64) {
    SEED.store(seed, Ordering::Relaxed);
}

pub(crate) fn seed() -> u64 {
    SEED.load(Ordering::Relaxed)
}

/// The role of a stochastically rounded tensor in its layer: part of its key in the stream of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Role {
    /// The input as saved for the backward pass.
    SavedInput = 0,
    /// The gradient of the output.
    OutputGradient = 1,
}

/// How the threshold of a layer follows its fallback rate (fallback-int8, appendix D, algorithm 2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DelayThreshold {
    /// The threshold that layers start with.
    pub initial: f32,
    /// Below this fallback rate the threshold is divided by `alpha`.
    pub rate_min: f32,
    /// Above this fallback rate the threshold is multiplied by `alpha`.
    pub rate_max: f32,
    /// The adjustment factor, greater than 1.
    pub alpha: f32,
}

impl Default for DelayThreshold {
    /// The paper's settings: 1.0, [0.1, 0.3], 1.3.
    fn default() -> Self {
        Self {
            initial: 1.0,
            rate_min: 0.1,
            rate_max: 0.3,
            alpha: 1.3,
        }
    }
}

impl DelayThreshold {
    /// # Panics
    ///
    /// If the range is empty or outside [0, 1], if `alpha` is not above 1, or if `initial` is not positive and finite.
    pub fn validate(&self) {
        assert!(
            0.0 <= self.rate_min && self.rate_min <= self.rate_max && self.rate_max <= 1.0,
            "delay threshold: the range of fallback rates [{}, {}] must lie within [0, 1], lower bound first",
            self.rate_min,
            self.rate_max
        );
        assert!(
            self.alpha > 1.0 && self.alpha.is_finite(),
            "delay threshold: the adjustment factor alpha must be finite and above 1, got {}",
            self.alpha
        );
        assert!(
            self.initial > 0.0 && self.initial.is_finite(),
            "delay threshold: the initial threshold must be positive and finite, got {}",
            self.initial
        );
    }
}

/// The fallback state of all layers of a model, on the device: one entry for each layer.
#[derive(Debug)]
pub struct FallbackState<B: QuantOps> {
    /// FP32 `[layers]`: blocks whose largest magnitude exceeds this fall back.
    pub thresholds: FloatTensor<B>,
    /// INT32 `[layers, 2]`: blocks that fell back and blocks seen since the last update.
    pub counts: IntTensor<B>,
    /// FP32 `[layers]`: fallback rates of the last update; NaN before the first.
    pub rates: FloatTensor<B>,
}

impl<B: QuantOps> FallbackState<B> {
    /// Uploads thresholds and rates, with counters at zero.
    ///
    /// # Panics
    ///
    /// If there are not as many rates as thresholds.
    pub fn new(thresholds: &[f32], rates: &[f32], device: &Device<B>) -> Self {
        let layers = thresholds.len();
        assert_eq!(
            layers,
            rates.len(),
            "fallback state: thresholds and rates, one of each for a layer"
        );
        let upload =
            |values: &[f32]| B::float_from_data(TensorData::new(values.to_vec(), [layers]), device);
        Self {
            thresholds: upload(thresholds),
            counts: B::int_zeros(Shape::new([layers, 2]), device, IntDType::I32),
            rates: upload(rates),
        }
    }

    fn move_to(&mut self, device: &Device<B>) {
        if B::float_device(&self.thresholds) != *device {
            self.thresholds = B::float_to_device(self.thresholds.clone(), device);
            self.counts = B::int_to_device(self.counts.clone(), device);
            self.rates = B::float_to_device(self.rates.clone(), device);
        }
    }
}

/// The host's copy of a bank's values, in layer order.
#[derive(Debug, Clone, PartialEq)]
pub struct BankValues {
    /// Thresholds.
    pub thresholds: Vec<f32>,
    /// Fallback rates of the last update; NaN before the first.
    pub rates: Vec<f32>,
}

/// What all layers of a model share.
pub struct Bank<B: QuantOps> {
    seed: u64,
    step: AtomicU64,
    initial: BankValues,
    state: Mutex<Option<FallbackState<B>>>,
}

impl<B: QuantOps> Bank<B> {
    /// A bank at optimizer step `step`, whose stochastic rounding is keyed by `seed`. Device buffers are made at first
    /// use, on the device of that use.
    pub fn new(seed: u64, step: u64, initial: BankValues) -> Self {
        Self {
            seed,
            step: AtomicU64::new(step),
            initial,
            state: Mutex::new(None),
        }
    }

    /// The seed of stochastic rounding.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Optimizer steps taken so far.
    pub fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<FallbackState<B>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on the state, on `device`.
    pub fn with_state<T>(
        &self,
        device: &Device<B>,
        f: impl FnOnce(&mut FallbackState<B>) -> T,
    ) -> T {
        let mut guard = self.lock();
        let state = guard.get_or_insert_with(|| {
            FallbackState::new(&self.initial.thresholds, &self.initial.rates, device)
        });
        state.move_to(device);
        f(state)
    }

    /// Ends an optimizer step: updates every threshold from the counters, on the device, and moves the random stream
    /// on.
    pub fn advance(&self, config: &DelayThreshold) {
        let mut guard = self.lock();
        *guard = guard.take().map(|state| B::delay_threshold(state, config));
        self.step.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads thresholds and rates back to the host. Waits for the device: for records and metrics only.
    pub fn read(&self) -> BankValues {
        match self.lock().as_ref() {
            Some(state) => BankValues {
                thresholds: floats::<B>(state.thresholds.clone()),
                rates: floats::<B>(state.rates.clone()),
            },
            None => self.initial.clone(),
        }
    }
}

impl<B: QuantOps> std::fmt::Debug for Bank<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bank")
            .field("seed", &self.seed)
            .field("step", &self.step())
            .field("layers", &self.initial.thresholds.len())
            .finish()
    }
}

/// One linear layer.
#[derive(Debug)]
pub struct Layer<B: QuantOps> {
    path: String,
    index: usize,
    quantized: bool,
    bank: Arc<Bank<B>>,
    /// The step that the calls below belong to, and how many there were for each role.
    calls: Mutex<(u64, [u64; 2])>,
}

impl<B: QuantOps> Layer<B> {
    /// Layer number `index` of `bank`, found at module path `path`.
    pub fn new(path: String, index: usize, quantized: bool, bank: Arc<Bank<B>>) -> Self {
        Self {
            path,
            index,
            quantized,
            bank,
            calls: Mutex::new((0, [0; 2])),
        }
    }

    /// A layer that no optimizer has adopted: alone in a bank of its own, with the default threshold.
    pub(crate) fn unattached(quantized: bool) -> Self {
        let initial = BankValues {
            thresholds: vec![DelayThreshold::default().initial],
            rates: vec![f32::NAN],
        };
        let bank = Arc::new(Bank::new(seed(), 0, initial));
        Self::new(String::from("(unattached)"), 0, quantized, bank)
    }

    /// The module path, such as `layers.3.mlp.down`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The position in the bank.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether the policy lets the recipe quantize this layer.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// What this layer shares with the others of its model.
    pub fn bank(&self) -> &Arc<Bank<B>> {
        &self.bank
    }

    /// Runs `f` on this layer's part of the bank's state, on `device`. `f` returns the counters, gone up, beside its
    /// result; the bank's other layers wait meanwhile.
    pub fn with_fallback<T>(
        &self,
        device: &Device<B>,
        f: impl FnOnce(Fallback<B>) -> (T, IntTensor<B>),
    ) -> T {
        self.bank.with_state(device, |state| {
            let (result, counts) = f(Fallback {
                layer: self.index,
                thresholds: state.thresholds.clone(),
                counts: state.counts.clone(),
            });
            state.counts = counts;
            result
        })
    }

    /// The key for the next stochastic rounding in this role: the bank's seed, and a stream that no other layer, role,
    /// call or step has.
    pub fn next_key(&self, role: Role) -> StochasticKey {
        let step = self.bank.step();
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if calls.0 != step {
            *calls = (step, [0; 2]);
        }
        let call = &mut calls.1[role as usize];
        let stream = [step, self.index as u64, role as u64, *call]
            .into_iter()
            .fold(0, |hash, part| split_mix(hash ^ part));
        *call += 1;
        StochasticKey {
            seed: self.bank.seed,
            stream,
        }
    }
}

/// The finalizer of SplitMix64: spreads nearby inputs over all 64 bits.
fn split_mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
