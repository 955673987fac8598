//! A GPT-2 of Burn's modules: LayerNorm, learned positions, GELU, biases, and the embedding as the vocabulary head.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::backend::Backend;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Int, Tensor};
use examples::advise::shapes::{Family, Shapes};
use examples::data::Batch;
use examples::model::VOCABULARY;

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    ln_1: LayerNorm<B>,
    c_attn: Linear<B>,
    c_proj: Linear<B>,
    ln_2: LayerNorm<B>,
    c_fc: Linear<B>,
    down: Linear<B>,
}

#[derive(Module, Debug)]
pub struct Gpt2<B: Backend> {
    wte: Embedding<B>,
    wpe: Embedding<B>,
    h: Vec<Layer<B>>,
    ln_f: LayerNorm<B>,
    heads: usize,
}

impl<B: Backend> Gpt2<B> {
    pub fn new(shapes: &Shapes, device: &B::Device) -> Self {
        let hidden = shapes.hidden;
        let norm = || LayerNormConfig::new(hidden).init(device);
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let layer = || Layer {
            ln_1: norm(),
            c_attn: linear(hidden, 3 * hidden),
            c_proj: linear(hidden, hidden),
            ln_2: norm(),
            c_fc: linear(hidden, shapes.ffn),
            down: linear(shapes.ffn, hidden),
        };
        Self {
            wte: EmbeddingConfig::new(VOCABULARY, hidden).init(device),
            wpe: EmbeddingConfig::new(shapes.positions, hidden).init(device),
            h: (0..shapes.layers).map(|_| layer()).collect(),
            ln_f: norm(),
            heads: shapes.heads,
        }
    }

    pub fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let [_, sequence] = batch.inputs.dims();
        let device = batch.inputs.device();
        let positions = Tensor::<B, 1, Int>::arange(0..sequence as i64, &device).unsqueeze();
        let mut x = self.wte.forward(batch.inputs) + self.wpe.forward(positions);
        for layer in &self.h {
            x = x.clone() + layer.attention(layer.ln_1.forward(x), self.heads);
            let inside = Gelu::new().forward(layer.c_fc.forward(layer.ln_2.forward(x.clone())));
            x = x + layer.down.forward(inside);
        }
        let x = self.ln_f.forward(x).flatten::<2>(0, 1);
        let logits = x.matmul(self.wte.weight.val().transpose());
        CrossEntropyLossConfig::new()
            .init(&device)
            .forward(logits, batch.targets.flatten::<1>(0, 1))
    }
}

impl<B: Backend> Layer<B> {
    fn attention(&self, x: Tensor<B, 3>, heads: usize) -> Tensor<B, 3> {
        let [batch, sequence, hidden] = x.dims();
        let parts = self.c_attn.forward(x).chunk(3, 2);
        let [q, k, v] = [0, 1, 2].map(|part| {
            let part: Tensor<B, 3> = parts[part].clone();
            part.reshape([batch, sequence, heads, hidden / heads])
                .swap_dims(1, 2)
        });
        let causal = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let mixed = attention(q, k, v, None, None, causal);
        self.c_proj
            .forward(mixed.swap_dims(1, 2).reshape([batch, sequence, hidden]))
    }
}

/// Sizes of a small one.
pub fn shapes(sequence: usize) -> Shapes {
    Shapes {
        family: Family::Gpt2,
        hidden: 128,
        layers: 3,
        heads: 4,
        kv_heads: 4,
        head_width: 32,
        ffn: 512,
        vocabulary: VOCABULARY,
        positions: sequence,
        is_tied: true,
        has_dropout: false,
    }
}
