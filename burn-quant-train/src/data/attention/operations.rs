//! The operations of attention: forward and backward, with scores in memory for the time of the operation, and without.

use burn_backend::{
    FloatDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::attention::{AttentionGradients, AttentionOptions};

use super::kernels::{
    Attention, AttentionBackward, AttentionInputs, AttentionKernels, AttentionProblem,
    AttentionWay, Composed, FlashOutput, OfInputs,
};
use crate::data::{
    kernels::Kernels,
    operation::Operation,
    tensors::{FloatMeta, On, Outline, Tensors},
};

/// How the device's kernels compute this, if they do. `trains`: whether a backward pass may follow, for which Burn's
/// composition saves scores.
pub(crate) fn way<K: Kernels>(
    device: &Device<K>,
    problem: &AttentionProblem,
    trains: bool,
) -> Option<AttentionWay> {
    (K::attention_kernels(device)?.way)(device, problem, trains)
}

fn output<T: Tensors>(inputs: &AttentionInputs<T>) -> FloatMeta {
    let mut shape: Shape = inputs.query.shape();
    shape[3] = inputs.value.shape()[3];
    FloatMeta::new(shape, inputs.query.dtype())
}

/// The output, `[batch, heads, queries, features of V]`, by products and a softmax: [`AttentionWay::Composed`].
#[derive(Debug, Clone)]
pub(crate) struct ComposedForward {
    pub options: AttentionOptions,
}

impl Operation for ComposedForward {
    const NAME: &'static str = "attention";
    type Inputs = AttentionInputs<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, inputs: &AttentionInputs<T>) -> FloatMeta {
        output(inputs)
    }

    fn run<K: Kernels>(self, inputs: AttentionInputs<K>) -> FloatTensor<K> {
        (composed::<K>(&inputs.query).forward)(inputs, &self.options)
    }
}

/// The same with the log-sum-exp: [`AttentionWay::Flash`].
#[derive(Debug, Clone)]
pub(crate) struct FlashForward {
    pub options: AttentionOptions,
}

impl Operation for FlashForward {
    const NAME: &'static str = "flash_attention";
    type Inputs = AttentionInputs<Outline>;
    type Outputs = FlashOutput<FloatMeta>;

    fn outline<T: Tensors>(&self, inputs: &AttentionInputs<T>) -> FlashOutput<FloatMeta> {
        let output = output(inputs);
        let rows = Shape::from(&output.shape()[..3]);
        FlashOutput {
            output,
            log_sum_exp: FloatMeta::new(rows, FloatDType::F32),
        }
    }

    fn run<K: Kernels>(self, inputs: AttentionInputs<K>) -> FlashOutput<FloatTensor<K>> {
        (kernels::<K>(&inputs.query).flash.forward)(inputs, &self.options)
    }
}

/// The arguments of both operations of the backward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gradients {
    pub options: AttentionOptions,
    pub wanted: AttentionGradients<bool>,
}

impl Gradients {
    fn outline<T: Tensors>(
        &self,
        inputs: &AttentionInputs<T>,
    ) -> AttentionGradients<Option<FloatMeta>> {
        let meta = |wanted: bool, input: &T::Float| wanted.then(|| FloatMeta::of(input));
        let of_bias = inputs.bias.as_ref();
        AttentionGradients {
            query: meta(self.wanted.query, &inputs.query),
            key: meta(self.wanted.key, &inputs.key),
            value: meta(self.wanted.value, &inputs.value),
            bias: of_bias.and_then(|bias| meta(self.wanted.bias, bias)),
        }
    }

    fn backward<T: Tensors>(
        self,
        inputs: AttentionInputs<T>,
        gradient: T::Float,
    ) -> AttentionBackward<T> {
        AttentionBackward {
            inputs,
            gradient,
            wanted: self.wanted,
            options: self.options,
        }
    }
}

/// The gradients that are wanted.
#[derive(Debug, Clone)]
pub(crate) struct ComposedGradients(pub Gradients);

impl Operation for ComposedGradients {
    const NAME: &'static str = "attention_backward";
    /// Those of the forward pass, and the gradient of the output.
    type Inputs = (AttentionInputs<Outline>, FloatMeta);
    type Outputs = AttentionGradients<Option<FloatMeta>>;

    fn outline<T: Tensors>(&self, (inputs, _): &On<Self::Inputs, T>) -> Self::Outputs {
        self.0.outline(inputs)
    }

    fn run<K: Kernels>(self, (inputs, gradient): On<Self::Inputs, K>) -> OfInputs<K> {
        (composed::<K>(&gradient).backward)(self.0.backward(inputs, gradient))
    }
}

/// The same after [`FlashForward`].
#[derive(Debug, Clone)]
pub(crate) struct FlashGradients(pub Gradients);

impl Operation for FlashGradients {
    const NAME: &'static str = "flash_attention_backward";
    /// Those of [`ComposedGradients`], and what the forward pass left.
    type Inputs = (
        (AttentionInputs<Outline>, FloatMeta),
        FlashOutput<FloatMeta>,
    );
    type Outputs = AttentionGradients<Option<FloatMeta>>;

    fn outline<T: Tensors>(&self, ((inputs, _), _): &On<Self::Inputs, T>) -> Self::Outputs {
        self.0.outline(inputs)
    }

    fn run<K: Kernels>(self, ((inputs, gradient), forward): On<Self::Inputs, K>) -> OfInputs<K> {
        (kernels::<K>(&gradient).flash.backward)(self.0.backward(inputs, gradient), forward)
    }
}

fn kernels<K: AttentionKernels>(tensor: &FloatTensor<K>) -> Attention<K> {
    K::attention_kernels(&K::float_device(tensor))
        .expect("attention by kernels is for devices that have them")
}

fn composed<K: AttentionKernels>(tensor: &FloatTensor<K>) -> Composed<K> {
    let composed = kernels::<K>(tensor).composed;
    composed.expect("attention by products and a softmax is for devices that have it")
}
