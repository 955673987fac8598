//! The sizes of a model.

use anyhow::{Result, ensure};
use serde::Serialize;

pub use crate::model::Family;
use crate::model::{DecoderConfig, VOCABULARY};

/// The sizes of a decoder.
#[derive(Serialize, Clone, Debug, PartialEq)]
pub struct Shapes {
    /// Its layers.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_width: usize,
    /// Width inside the feed-forward network.
    pub ffn: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Learned positions; 0 where positions are rotary.
    pub positions: usize,
    /// True if the embedding's table is the vocabulary head too.
    pub is_tied: bool,
    /// True if values are dropped behind the embedding and each half of a layer.
    pub has_dropout: bool,
}

/// The inputs of a decoder layer's linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// The normalized input of attention.
    Attention,
    /// The heads' outputs.
    Heads,
    /// The normalized input of the feed-forward network.
    FeedForward,
    /// The activations inside of it.
    Inside,
}

impl Reads {
    /// All of them, in the order of a forward pass.
    pub const ALL: [Self; 4] = [
        Self::Attention,
        Self::Heads,
        Self::FeedForward,
        Self::Inside,
    ];
}

/// A linear layer of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Its module path in the model of `pretrain`, or the like.
    pub path: &'static str,
    /// Its input.
    pub reads: Reads,
    /// Inputs and outputs.
    pub shape: [usize; 2],
}

impl From<&DecoderConfig> for Shapes {
    fn from(config: &DecoderConfig) -> Self {
        Self {
            family: config.family,
            hidden: config.hidden,
            layers: config.layers,
            heads: config.heads,
            kv_heads: config.heads,
            head_width: config.hidden / config.heads,
            ffn: config.mlp_hidden,
            vocabulary: VOCABULARY,
            positions: match config.family {
                Family::Llama => 0,
                Family::Gpt2 => config.max_sequence,
            },
            is_tied: false,
            has_dropout: config.dropout > 0.0,
        }
    }
}

impl Shapes {
    /// The path of the vocabulary head.
    pub const HEAD: &str = "lm_head";

    /// The same sizes, if a model can have them.
    ///
    /// # Errors
    ///
    /// A size of 0, or groups of heads that differ.
    pub fn checked(self) -> Result<Self> {
        let sizes = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("head-width", self.head_width),
            ("ffn", self.ffn),
            ("vocabulary", self.vocabulary),
        ];
        for (name, size) in sizes {
            ensure!(size > 0, "--{name} must be at least 1");
        }
        ensure!(
            self.heads.is_multiple_of(self.kv_heads),
            "{} heads of queries cannot share {} of keys: --kv-heads must divide --heads",
            self.heads,
            self.kv_heads
        );
        Ok(self)
    }

    /// Features of all heads of queries.
    pub fn heads_width(&self) -> usize {
        self.heads * self.head_width
    }

    /// The linear layers of a decoder layer.
    pub fn linears(&self) -> Vec<Linear> {
        let linear = |path, reads, inputs, outputs| Linear {
            path,
            reads,
            shape: [inputs, outputs],
        };
        let Self { hidden, ffn, .. } = *self;
        let (all, of_keys) = (self.heads_width(), self.kv_heads * self.head_width);
        match self.family {
            Family::Llama => vec![
                linear("layers.0.attention.q", Reads::Attention, hidden, all),
                linear("layers.0.attention.k", Reads::Attention, hidden, of_keys),
                linear("layers.0.attention.v", Reads::Attention, hidden, of_keys),
                linear("layers.0.attention.o", Reads::Heads, all, hidden),
                linear("layers.0.mlp.gate", Reads::FeedForward, hidden, ffn),
                linear("layers.0.mlp.up", Reads::FeedForward, hidden, ffn),
                linear("layers.0.mlp.down", Reads::Inside, ffn, hidden),
            ],
            Family::Gpt2 => vec![
                linear(
                    "h.0.attn.c_attn",
                    Reads::Attention,
                    hidden,
                    all + 2 * of_keys,
                ),
                linear("h.0.attn.c_proj", Reads::Heads, all, hidden),
                linear("h.0.mlp.c_fc", Reads::FeedForward, hidden, ffn),
                linear("h.0.mlp.c_proj", Reads::Inside, ffn, hidden),
            ],
        }
    }

    /// The features of what a linear layer reads.
    pub fn features(&self, reads: Reads) -> usize {
        match reads {
            Reads::Attention | Reads::FeedForward => self.hidden,
            Reads::Heads => self.heads_width(),
            Reads::Inside => self.ffn,
        }
    }

    /// The elements of every parameter.
    pub fn elements(&self) -> Vec<usize> {
        let mut layer: Vec<usize> = Vec::new();
        for Linear { shape, .. } in self.linears() {
            layer.push(shape[0] * shape[1]);
            layer.extend(self.has_biases().then_some(shape[1]));
        }
        let norm = vec![self.hidden; if self.has_biases() { 2 } else { 1 }];
        layer.extend([&norm[..], &norm].concat());
        let mut all = layer.repeat(self.layers);
        all.push(self.vocabulary * self.hidden);
        all.extend(norm);
        all.extend((self.positions > 0).then_some(self.positions * self.hidden));
        all.extend((!self.is_tied).then_some(self.vocabulary * self.hidden));
        all
    }

    /// Parameters.
    pub fn parameters(&self) -> usize {
        self.elements().iter().sum()
    }

    /// Parameters that are read before the first layer alone: the embedding's, unless it is the vocabulary head too,
    /// and those of positions.
    pub fn before_layers(&self) -> usize {
        let embedding = match self.is_tied {
            true => 0,
            false => self.vocabulary,
        };
        (embedding + self.positions) * self.hidden
    }

    /// The same model of so many layers.
    pub fn with_layers(&self, layers: usize) -> Self {
        Self {
            layers,
            ..self.clone()
        }
    }

    fn has_biases(&self) -> bool {
        self.family == Family::Gpt2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameter counts that others give: Llama 2 7B has 6,738,415,616, GPT-2 124,439,808.
    #[test]
    fn known_models_have_their_parameters() {
        let llama = Shapes {
            family: Family::Llama,
            hidden: 4096,
            layers: 32,
            heads: 32,
            kv_heads: 32,
            head_width: 128,
            ffn: 11008,
            vocabulary: 32000,
            positions: 0,
            is_tied: false,
            has_dropout: false,
        };
        assert_eq!(llama.parameters(), 6_738_415_616);
        let gpt2 = Shapes {
            family: Family::Gpt2,
            hidden: 768,
            layers: 12,
            heads: 12,
            kv_heads: 12,
            head_width: 64,
            ffn: 3072,
            vocabulary: 50257,
            positions: 1024,
            is_tied: true,
            has_dropout: false,
        };
        assert_eq!(gpt2.parameters(), 124_439_808);
        assert!(
            Shapes {
                kv_heads: 5,
                ..gpt2
            }
            .checked()
            .is_err()
        );
    }
}
