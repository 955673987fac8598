//! The operations of attention: forward and backward.

use burn_backend::{Shape, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::softmax::AttentionScores;

use super::kernels::{Attention, AttentionInputs, AttentionKernels};
use crate::data::{
    kernels::Kernels,
    operation::Operation,
    tensors::{FloatMeta, On, Tensors},
};

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
        let mut shape: Shape = inputs.query.shape();
        shape[3] = inputs.value.shape()[3];
        FloatMeta::new(shape, inputs.query.dtype())
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> FloatTensor<K> {
        (kernels::<K>(&inputs.query).forward)(inputs, self.scores)
    }
}

/// The gradients of Q, K and V, those that are wanted.
#[derive(Debug, Clone)]
pub(crate) struct AttentionGradients {
    pub scores: AttentionScores,
    pub wanted: AttentionInputs<bool>,
}

impl Operation for AttentionGradients {
    const NAME: &'static str = "attention_backward";
    /// Q, K, V, and the gradient of the output.
    type Inputs = (AttentionInputs<FloatMeta>, FloatMeta);
    type Outputs = AttentionInputs<Option<FloatMeta>>;

    fn outline<T: Tensors>(&self, (inputs, _): &On<Self::Inputs, T>) -> Self::Outputs {
        let inputs = [&inputs.query, &inputs.key, &inputs.value];
        let mut wanted = self.wanted.into_array().into_iter();
        inputs
            .map(|input| wanted.next()?.then(|| FloatMeta::of(input)))
            .into()
    }

    fn run<K: Kernels>(
        self,
        (inputs, gradient): On<Self::Inputs, K>,
    ) -> AttentionInputs<Option<FloatTensor<K>>> {
        (kernels::<K>(&gradient).backward)(inputs, gradient, self.wanted, self.scores)
    }
}

fn kernels<K: AttentionKernels>(tensor: &FloatTensor<K>) -> Attention<K> {
    K::attention_kernels(&K::float_device(tensor))
        .expect("attention by kernels is for devices that have them")
}
