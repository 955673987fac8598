//! The time of a forward pass and of both passes of a layer.

use std::cell::RefCell;

use anyhow::{Context, Result};
use burn::tensor::Tensor;

use super::{architecture::Layer, contender::Contender, input::Inputs};
use crate::{
    results::Spread,
    timing::{Sampling, from_idle},
};

/// The times of both passes.
#[derive(Debug, Clone, Copy)]
pub struct Passes {
    /// The forward pass.
    pub forward: Spread,
    /// Both.
    pub both: Spread,
    /// Both from an idle device, until the last operation is handed over.
    pub enqueue: Spread,
    /// Both from an idle device, until it is idle again.
    pub alone: Spread,
}

impl Passes {
    /// Measures a forward pass and the backward pass of its output.
    ///
    /// # Errors
    ///
    /// The device failed.
    pub fn time<B: Contender, G>(
        sampling: Sampling,
        device: &B::Device,
        forward: impl Fn() -> Tensor<B, 3>,
        backward: impl Fn(Tensor<B, 3>) -> G,
    ) -> Result<Self> {
        let sync = || B::sync(device).context("the device failed");
        let both = || {
            backward(forward());
            Ok(())
        };
        let only_forward = || {
            forward();
            Ok(())
        };
        let time = sampling.time(both, sync)?;
        let [enqueue, alone] = from_idle(both, sync)?;
        Ok(Self {
            // The graphs of forward passes are freed by the next backward pass.
            forward: sampling.time_and_clear(only_forward, sync, both)?,
            both: time,
            enqueue,
            alone,
        })
    }
}

/// A model, renewed before each forward pass.
pub struct Renewed<M>(RefCell<Option<M>>);

impl<M> Renewed<M> {
    /// Of this model.
    pub fn new(model: M) -> Self {
        Self(RefCell::new(Some(model)))
    }

    /// The output of the model as after an optimizer step.
    ///
    /// # Panics
    ///
    /// If the forward pass before this one panicked.
    pub fn forward<B: Contender>(&self, x: Tensor<B, 3>) -> Tensor<B, 3>
    where
        M: Layer<B>,
    {
        let model = self.0.borrow_mut().take();
        let model = B::renew(model.expect("every forward pass gives the model back"));
        let y = model.forward(x);
        self.0.replace(Some(model));
        y
    }
}

/// Bytes in use after a forward pass and not before it. A first pass, whose result is kept, makes the quantized copies
/// of the weights.
///
/// # Errors
///
/// The device failed.
pub fn activation_bytes<B: Contender, M: Layer<B>>(
    model: &M,
    inputs: &Inputs<B>,
    device: &B::Device,
    live_bytes: &dyn Fn() -> Option<u64>,
) -> Result<Option<u64>> {
    let live = || -> Result<Option<u64>> {
        B::sync(device).context("the device failed")?;
        Ok(live_bytes())
    };
    let first = model.forward(inputs.x());
    let before = live()?;
    let second = model.forward(inputs.x());
    let after = live()?;
    inputs.backward(first + second);
    Ok(before
        .zip(after)
        .map(|(before, after)| after.saturating_sub(before)))
}
