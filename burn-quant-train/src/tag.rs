//! Tags: what travels with a tensor's value.
//!
//! On a weight the tag holds the quantization state of its layer; on any tensor it holds the compressed copies made of
//! it so far, so that an activation that several layers save is compressed and stored once, and a weight is quantized
//! once per optimizer step. State that rides on tensors needs no registry, leaks nothing, and follows the tensor to
//! other threads.

use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use crate::{
    layer::Layer,
    ops::{QuantOps, Quantized},
    recipe::Cast,
};

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The number of tags alive in this process: one for each distinct tensor value that is held somewhere.
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// What travels with a tensor's value. `B` is the backend that holds the data: the one inside `Autodiff`.
pub struct Tag<B: QuantOps> {
    layer: OnceLock<Arc<Layer<B>>>,
    parameter: AtomicBool,
    copies: Mutex<Copies<B>>,
}

impl<B: QuantOps> Tag<B> {
    /// A tag with nothing in it.
    pub fn new() -> Self {
        LIVE.fetch_add(1, Ordering::Relaxed);
        Self {
            layer: OnceLock::new(),
            parameter: AtomicBool::new(false),
            copies: Mutex::default(),
        }
    }

    /// A tag for the weight of `layer`.
    pub fn with_layer(layer: Arc<Layer<B>>) -> Self {
        let tag = Self::new();
        let _ = tag.layer.set(layer);
        tag
    }

    /// The same tag for a copy of the tensor on another device: the layer, without the compressed copies.
    pub fn without_copies(&self) -> Self {
        let tag = Self::new();
        if let Some(layer) = self.layer.get() {
            let _ = tag.layer.set(layer.clone());
        }
        let parameter = self.parameter.load(Ordering::Relaxed);
        tag.parameter.store(parameter, Ordering::Relaxed);
        tag
    }

    /// Notes that gradients of this tensor are asked for: it is a parameter.
    pub fn set_parameter(&self) {
        self.parameter.store(true, Ordering::Relaxed);
    }

    /// The layer whose weight this is.
    pub fn layer(&self) -> Option<&Arc<Layer<B>>> {
        self.layer.get()
    }

    /// The layer whose weight this is. A parameter that no optimizer has adopted gets the one that `make` makes.
    pub fn layer_or(&self, make: impl FnOnce() -> Layer<B>) -> Option<Arc<Layer<B>>> {
        if self.parameter.load(Ordering::Relaxed) {
            return Some(self.layer.get_or_init(|| Arc::new(make())).clone());
        }
        self.layer.get().cloned()
    }

    /// The compressed copy of the tensor by `cast`, if one was made.
    pub fn existing_copy(&self, cast: Cast) -> Option<Arc<Quantized<B>>> {
        find(&self.copies(), cast)
    }

    /// The compressed copy of the tensor by `cast`, made by `make` the first time.
    pub fn copy(&self, cast: Cast, make: impl FnOnce() -> Quantized<B>) -> Arc<Quantized<B>> {
        let mut copies = self.copies();
        find(&copies, cast).unwrap_or_else(|| {
            let copy = Arc::new(make());
            copies.push((cast, copy.clone()));
            copy
        })
    }

    fn copies(&self) -> MutexGuard<'_, Copies<B>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Compressed copies, each by its cast.
type Copies<B> = Vec<(Cast, Arc<Quantized<B>>)>;

fn find<B: QuantOps>(copies: &Copies<B>, cast: Cast) -> Option<Arc<Quantized<B>>> {
    let (_, copy) = copies.iter().find(|(key, _)| *key == cast)?;
    Some(copy.clone())
}

impl<B: QuantOps> Default for Tag<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: QuantOps> Drop for Tag<B> {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<B: QuantOps> std::fmt::Debug for Tag<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tag")
            .field("layer", &self.layer().map(|layer| layer.path()))
            .finish_non_exhaustive()
    }
}
