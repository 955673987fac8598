//! The operations of attention: forward and backward, with scores in memory for the time of the operation, and without.

use burn_backend::{
    DType, FloatDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::softmax::AttentionScores;

use super::kernels::{
    Attention, AttentionBackward, AttentionInputs, AttentionKernels, FlashOutput,
};
use crate::data::{
    kernels::Kernels,
    operation::Operation,
    tensors::{FloatMeta, On, Tensors},
};

/// True where [`FlashForward`] and [`FlashGradients`] can be run on inputs of this dtype.
pub(crate) fn is_flash<K: Kernels, T: TensorMetadata>(
    device: &Device<K>,
    dtype: DType,
    inputs: &AttentionInputs<T>,
    scores: AttentionScores,
) -> bool {
    let shapes = AttentionInputs {
        query: inputs.query.shape(),
        key: inputs.key.shape(),
        value: inputs.value.shape(),
    };
    K::attention_kernels(device)
        .is_some_and(|kernels| (kernels.is_flash)(device, dtype, &shapes, scores))
}

fn output<T: Tensors>(inputs: &AttentionInputs<T::Float>) -> FloatMeta {
    let mut shape: Shape = inputs.query.shape();
    shape[3] = inputs.value.shape()[3];
    FloatMeta::new(shape, inputs.query.dtype())
}

/// `softmax(scale Q Kᵀ + mask) V`, `[batch, heads, queries, features of V]`, by the device's kernels.
#[derive(Debug, Clone)]
pub(crate) struct AttentionForward {
    pub scores: AttentionScores,
}

impl Operation for AttentionForward {
    const NAME: &'static str = "attention";
    type Inputs = AttentionInputs<FloatMeta>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, inputs: &On<Self::Inputs, T>) -> FloatMeta {
        output::<T>(inputs)
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> FloatTensor<K> {
        (kernels::<K>(&inputs.query).forward)(inputs, self.scores)
    }
}

/// The same with the log-sum-exp.
#[derive(Debug, Clone)]
pub(crate) struct FlashForward {
    pub scores: AttentionScores,
}

impl Operation for FlashForward {
    const NAME: &'static str = "flash_attention";
    type Inputs = AttentionInputs<FloatMeta>;
    type Outputs = FlashOutput<FloatMeta>;

    fn outline<T: Tensors>(&self, inputs: &On<Self::Inputs, T>) -> FlashOutput<FloatMeta> {
        let output = output::<T>(inputs);
        let rows = Shape::from(&output.shape()[..3]);
        FlashOutput {
            output,
            log_sum_exp: FloatMeta::new(rows, FloatDType::F32),
        }
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> FlashOutput<FloatTensor<K>> {
        (kernels::<K>(&inputs.query).flash)(inputs, self.scores)
    }
}

/// What both operations of the backward pass are told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gradients {
    pub scores: AttentionScores,
    pub wanted: AttentionInputs<bool>,
}

impl Gradients {
    fn outline<T: Tensors>(
        &self,
        inputs: &AttentionInputs<T::Float>,
    ) -> AttentionInputs<Option<FloatMeta>> {
        let inputs = [&inputs.query, &inputs.key, &inputs.value];
        let mut wanted = self.wanted.into_array().into_iter();
        inputs
            .map(|input| wanted.next()?.then(|| FloatMeta::of(input)))
            .into()
    }

    fn backward<A>(self, inputs: AttentionInputs<A>, gradient: A) -> AttentionBackward<A> {
        AttentionBackward {
            inputs,
            gradient,
            wanted: self.wanted,
            scores: self.scores,
        }
    }
}

/// The gradients of Q, K and V, those that are wanted.
#[derive(Debug, Clone)]
pub(crate) struct ComposedGradients(pub Gradients);

impl Operation for ComposedGradients {
    const NAME: &'static str = "attention_backward";
    /// Q, K, V, and the gradient of the output.
    type Inputs = (AttentionInputs<FloatMeta>, FloatMeta);
    type Outputs = AttentionInputs<Option<FloatMeta>>;

    fn outline<T: Tensors>(&self, (inputs, _): &On<Self::Inputs, T>) -> Self::Outputs {
        self.0.outline::<T>(inputs)
    }

    fn run<K: Kernels>(
        self,
        (inputs, gradient): On<Self::Inputs, K>,
    ) -> AttentionInputs<Option<FloatTensor<K>>> {
        (kernels::<K>(&gradient).backward)(self.0.backward(inputs, gradient))
    }
}

/// The same after [`FlashForward`].
#[derive(Debug, Clone)]
pub(crate) struct FlashGradients(pub Gradients);

impl Operation for FlashGradients {
    const NAME: &'static str = "flash_attention_backward";
    /// Those of [`ComposedGradients`], and what the forward pass left.
    type Inputs = (
        (AttentionInputs<FloatMeta>, FloatMeta),
        FlashOutput<FloatMeta>,
    );
    type Outputs = AttentionInputs<Option<FloatMeta>>;

    fn outline<T: Tensors>(&self, ((inputs, _), _): &On<Self::Inputs, T>) -> Self::Outputs {
        self.0.outline::<T>(inputs)
    }

    fn run<K: Kernels>(
        self,
        ((inputs, gradient), forward): On<Self::Inputs, K>,
    ) -> AttentionInputs<Option<FloatTensor<K>>> {
        (kernels::<K>(&gradient).flash_backward)(self.0.backward(inputs, gradient), forward)
    }
}

fn kernels<K: AttentionKernels>(tensor: &FloatTensor<K>) -> Attention<K> {
    K::attention_kernels(&K::float_device(tensor))
        .expect("attention by kernels is for devices that have them")
}
