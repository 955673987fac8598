//! The time of a forward pass and of both passes of a layer.

use std::{cell::RefCell, time::Duration};

use anyhow::{Context, Result};
use burn::{
    module::{ModuleVisitor, Param},
    tensor::{Tensor, backend::AutodiffBackend},
};

use super::{
    architecture::Layer,
    contender::{Contender, renew},
    input::Inputs,
};
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

/// Work of a sample of forward passes at most: what each of them keeps waits until the sample ends.
const MOST_FORWARD: Duration = Duration::from_millis(20);

impl Passes {
    /// Measures a forward pass and the backward pass of what it returns.
    ///
    /// # Errors
    ///
    /// The device failed.
    pub fn time<B: Contender, F>(
        sampling: Sampling,
        device: &B::Device,
        forward: impl Fn() -> F,
        backward: impl Fn(F),
    ) -> Result<Self> {
        let sync = || B::sync(device).context("the device failed");
        let both = || {
            backward(forward());
            Ok(())
        };
        let waiting = RefCell::new(Vec::new());
        let only_forward = || {
            waiting.borrow_mut().push(forward());
            Ok(())
        };
        let only_backward = || {
            waiting.take().into_iter().for_each(&backward);
            Ok(())
        };
        let time = sampling.time(both, sync)?;
        let [enqueue, alone] = from_idle(both, sync)?;
        let of_forward = Sampling {
            sample: sampling.sample.min(MOST_FORWARD),
            ..sampling
        };
        Ok(Self {
            forward: of_forward.time_and_clear(only_forward, sync, only_backward)?,
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

    /// A new input, and the output of the model as after an optimizer step.
    ///
    /// # Panics
    ///
    /// If the forward pass before this one panicked.
    pub fn forward<B: Contender>(&self, inputs: &Inputs<B>) -> [Tensor<B, 3>; 2]
    where
        M: Layer<B>,
    {
        let model = self.0.borrow_mut().take();
        let model = renew::<B, _>(model.expect(PRESENT));
        let x = inputs.x();
        let y = model.forward(x.clone());
        self.0.replace(Some(model));
        [x, y]
    }

    /// The backward pass of [`forward`](Self::forward)'s tensors. Takes the gradients in the model's order, as an
    /// optimizer does: dropped together they leave in a random one, for which Burn's fusion plans anew each time.
    ///
    /// # Panics
    ///
    /// If the forward pass before this one panicked.
    pub fn backward<B: Contender>(&self, inputs: &Inputs<B>, [x, y]: [Tensor<B, 3>; 2])
    where
        M: Layer<B>,
    {
        let mut gradients = inputs.backward(y);
        x.grad_remove(&mut gradients);
        let model = self.0.borrow();
        model
            .as_ref()
            .expect(PRESENT)
            .visit(&mut TakeGradients::<B>(gradients));
    }
}

const PRESENT: &str = "every forward pass gives the model back";

/// Drops the gradients of parameters, one after the other.
struct TakeGradients<B: AutodiffBackend>(B::Gradients);

impl<B: AutodiffBackend> ModuleVisitor<B> for TakeGradients<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        param.val().grad_remove(&mut self.0);
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
