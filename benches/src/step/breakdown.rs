//! The time of each part of a decoder layer by itself.

use anyhow::Result;
use burn::tensor::{DType, Tensor};

use super::{
    architecture::{
        Architecture, DecoderWeights, Layer, Weight, causal_attention, gated, inner, norm,
    },
    contender::{Contender, settle},
    input::Input,
    passes::{Passes, Renewed},
};
use crate::{random::Random, results::PartSpeed, timing::Sampling};

/// How a layer is taken apart.
pub struct Breakdown<'a, B: Contender> {
    /// How long is measured.
    pub sampling: Sampling,
    /// Where.
    pub device: &'a B::Device,
    /// The dtype of parameters.
    pub parameters: DType,
    /// The dtype of activations.
    pub activations: DType,
    /// Batch and sequence.
    pub rows: [usize; 2],
}

impl<B: Contender> Breakdown<'_, B> {
    /// Every part of the layer with these weights.
    ///
    /// # Errors
    ///
    /// The device failed.
    pub fn parts(&self, weights: &DecoderWeights, random: &mut Random) -> Result<Vec<PartSpeed>> {
        let hidden = weights.hidden;
        let inner = inner(hidden);
        let [q, ..] = &weights.attention;
        let [gate, _, down] = &weights.mlp;
        let mut linear = |weight, name, count, features| {
            let input = Input::random(random, self.rows, features);
            self.linear(weight, name, count, &input)
        };
        let mut parts = vec![
            linear(q, "linear, hidden to hidden", 4, [hidden, hidden])?,
            linear(gate, "linear, hidden to inner", 2, [hidden, inner])?,
            linear(down, "linear, inner to hidden", 1, [inner, hidden])?,
        ];
        let mut part = |name, count, width, of: &dyn Fn(&Fresh<'_, B>) -> Tensor<B, 3>| {
            let input = Input::random(random, self.rows, [width, width]);
            self.stateless(name, count, &input, of)
        };
        let norm = norm::<B>(hidden, self.parameters, self.device);
        parts.extend([
            part("attention", 1, hidden, &|x| causal_attention(x(), x(), x()))?,
            part("RMSNorm", 2, hidden, &|x| norm.forward(x()))?,
            part("SiLU of gate, times up", 1, inner, &|x| gated(x(), x()))?,
            part("residual sum", 2, hidden, &|x| x() + x())?,
        ]);
        Ok(parts)
    }

    fn linear(
        &self,
        weight: &Weight,
        name: &str,
        count: usize,
        input: &Input,
    ) -> Result<PartSpeed> {
        let inputs = input.on::<B>(self.activations, self.device);
        let model = Architecture::init::<B>(weight, self.parameters, self.device);
        let (model, _) = settle::<B, _>(model, |model| inputs.backward(model.forward(inputs.x())));
        let model = Renewed::new(model);
        let passes = Passes::time::<B, _>(
            self.sampling,
            self.device,
            || model.forward(&inputs),
            |tensors| model.backward(&inputs, tensors),
        )?;
        Ok(speed(name, count, passes))
    }

    fn stateless(
        &self,
        name: &str,
        count: usize,
        input: &Input,
        of: &dyn Fn(&Fresh<'_, B>) -> Tensor<B, 3>,
    ) -> Result<PartSpeed> {
        let inputs = input.on::<B>(self.activations, self.device);
        let passes = Passes::time::<B, _>(
            self.sampling,
            self.device,
            || of(&|| inputs.x()),
            |y| drop(inputs.backward(y)),
        )?;
        Ok(speed(name, count, passes))
    }
}

/// Makes a tensor that nothing has seen yet.
type Fresh<'a, B> = dyn Fn() -> Tensor<B, 3> + 'a;

fn speed(name: &str, count: usize, passes: Passes) -> PartSpeed {
    PartSpeed {
        name: String::from(name),
        count,
        forward: passes.forward,
        both: passes.both,
        enqueue: passes.enqueue,
    }
}
