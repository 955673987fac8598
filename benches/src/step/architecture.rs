//! The layers that are measured: one linear layer, and a Llama-style decoder layer.

use burn::{
    module::{AutodiffModule, Module, Param},
    nn::{Linear, RmsNorm, RmsNormConfig},
    tensor::{
        DType, Tensor, TensorData,
        activation::silu,
        backend::{AutodiffBackend, Backend},
        module::attention,
        ops::AttentionModuleOptions,
    },
};

use crate::random::Random;

/// A layer with weights on the host, so that each backend gets the same ones.
pub trait Architecture {
    /// The layer on a backend.
    type Layer<B: AutodiffBackend>: Layer<B>;

    /// The layer with parameters of this dtype.
    fn init<B: AutodiffBackend>(&self, dtype: DType, device: &B::Device) -> Self::Layer<B>;
}

/// A layer: `[batch, sequence, hidden]` in and out.
pub trait Layer<B: AutodiffBackend>: AutodiffModule<B> {
    /// True if the layer adds its input to its output.
    const RESIDUAL: bool;

    /// The output.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3>;

    /// Weights whose gradients are checked: the first and the last.
    fn weights(&self) -> Vec<Tensor<B, 2>>;
}

/// The weight of a linear layer without bias, `[inputs, outputs]`, row-major.
#[derive(Debug, Clone)]
pub struct Weight {
    values: Vec<f32>,
    shape: [usize; 2],
}

impl Weight {
    /// Random numbers with the variance of PyTorch's initialization, `1 / (3 inputs)`.
    pub fn random(random: &mut Random, shape: [usize; 2]) -> Self {
        let deviation = (3.0 * shape[0] as f32).sqrt().recip();
        Self {
            values: random.normals(shape[0] * shape[1], deviation),
            shape,
        }
    }

    /// The values, row-major.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    fn init<B: Backend>(&self, dtype: DType, device: &B::Device) -> Linear<B> {
        let data = TensorData::new(self.values.clone(), self.shape);
        let weight = Tensor::<B, 2>::from_data(data, device).cast(dtype);
        Linear {
            weight: Param::from_tensor(weight),
            bias: None,
        }
    }
}

/// One linear layer.
#[derive(Module, Debug)]
pub struct Single<B: Backend> {
    linear: Linear<B>,
}

impl<B: AutodiffBackend> Layer<B> for Single<B> {
    const RESIDUAL: bool = false;

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.linear.forward(x)
    }

    fn weights(&self) -> Vec<Tensor<B, 2>> {
        vec![self.linear.weight.val()]
    }
}

impl Architecture for Weight {
    type Layer<B: AutodiffBackend> = Single<B>;

    fn init<B: AutodiffBackend>(&self, dtype: DType, device: &B::Device) -> Single<B> {
        Single {
            linear: Weight::init(self, dtype, device),
        }
    }
}

/// Features of a head.
const HEAD: usize = 128;

/// The weights of a decoder layer.
#[derive(Debug, Clone)]
pub struct DecoderWeights {
    /// Features of the residual stream.
    pub hidden: usize,
    /// Of q, k, v and o, `[hidden, hidden]` each.
    pub attention: [Weight; 4],
    /// Of gate and up, `[hidden, inner]` each, and down, `[inner, hidden]`.
    pub mlp: [Weight; 3],
}

impl DecoderWeights {
    /// Random weights; `hidden` must be a multiple of 128.
    pub fn random(random: &mut Random, hidden: usize) -> Self {
        let inner = inner(hidden);
        let mut weight = |shape| Weight::random(random, shape);
        Self {
            hidden,
            attention: [(); 4].map(|()| weight([hidden, hidden])),
            mlp: [[hidden, inner], [hidden, inner], [inner, hidden]].map(weight),
        }
    }
}

/// The width inside the feed-forward network: 8/3 of `hidden`, rounded down to a multiple of 128.
pub fn inner(hidden: usize) -> usize {
    hidden * 8 / 3 / HEAD * HEAD
}

/// A decoder layer: causal attention and SwiGLU, each after an RMSNorm and with a residual; heads of 128.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    attention_norm: RmsNorm<B>,
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    o: Linear<B>,
    mlp_norm: RmsNorm<B>,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: AutodiffBackend> Layer<B> for Decoder<B> {
    const RESIDUAL: bool = true;

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let h = self.attention_norm.forward(x.clone());
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|linear| linear.forward(h.clone()));
        let x = x + self.o.forward(causal_attention(q, k, v));
        let h = self.mlp_norm.forward(x.clone());
        let product = gated(self.gate.forward(h.clone()), self.up.forward(h));
        x + self.down.forward(product)
    }

    fn weights(&self) -> Vec<Tensor<B, 2>> {
        vec![self.q.weight.val(), self.down.weight.val()]
    }
}

impl Architecture for DecoderWeights {
    type Layer<B: AutodiffBackend> = Decoder<B>;

    fn init<B: AutodiffBackend>(&self, dtype: DType, device: &B::Device) -> Decoder<B> {
        let linear = |weight: &Weight| Weight::init(weight, dtype, device);
        let [q, k, v, o] = self.attention.each_ref().map(linear);
        let [gate, up, down] = self.mlp.each_ref().map(linear);
        let [attention_norm, mlp_norm] = [(); 2].map(|()| norm(self.hidden, dtype, device));
        Decoder {
            attention_norm,
            q,
            k,
            v,
            o,
            mlp_norm,
            gate,
            up,
            down,
        }
    }
}

/// An RMSNorm with a parameter of this dtype.
pub fn norm<B: Backend>(hidden: usize, dtype: DType, device: &B::Device) -> RmsNorm<B> {
    let mut norm = RmsNormConfig::new(hidden).init(device);
    norm.gamma = Param::from_tensor(Tensor::<B, 1>::ones([hidden], device).cast(dtype));
    norm
}

/// Causal attention, `[batch, sequence, hidden]` in and out.
pub fn causal_attention<B: Backend>(
    q: Tensor<B, 3>,
    k: Tensor<B, 3>,
    v: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let [batch, sequence, hidden] = q.dims();
    let [q, k, v] = [q, k, v].map(|x| {
        x.reshape([batch, sequence, hidden / HEAD, HEAD])
            .swap_dims(1, 2)
    });
    let causal = AttentionModuleOptions {
        is_causal: true,
        ..Default::default()
    };
    attention(q, k, v, None, None, causal)
        .swap_dims(1, 2)
        .reshape([batch, sequence, hidden])
}

/// The product inside SwiGLU.
pub fn gated<B: Backend>(gate: Tensor<B, 3>, up: Tensor<B, 3>) -> Tensor<B, 3> {
    silu(gate) * up
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_those_of_the_peers() {
        assert_eq!([1024, 2048, 4096].map(inner), [2688, 5376, 10_880]);
    }
}
