//! Which layers a recipe quantizes, by module path.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Weights with fewer elements than this stay in the compute dtype by default: on a small layer quantization costs more
/// than the product saves.
pub const MIN_ELEMENTS: usize = 16 * 1024;

/// The products of activations behind a layer that can be quantized: as many as attention has.
pub const PRODUCTS: usize = 2;

/// True if a weight is large enough to be worth quantizing.
fn large_enough([rows, cols]: [usize; 2], min_elements: usize) -> bool {
    rows * cols >= min_elements
}

/// Says which linear layers a recipe quantizes.
///
/// A pattern is a module path in which `*` stands for any characters, dots among them: `lm_head`, `layers.0.*`,
/// `layers.*.mlp`. It matches a layer if it describes the layer's path or that of a module around it: `layers.*.mlp`
/// covers `layers.3.mlp.down`. It may begin at any module: `lm_head` covers `model.lm_head`.
///
/// Products of two activations, such as attention's Q Kᵀ and P V, belong to the layer that ran last before them. They are
/// quantized only [behind layers that are named](Self::products).
///
/// The default skips the vocabulary head by its usual name, `lm_head`, products with an embedding's table (a tied
/// vocabulary head), and layers with fewer than [`MIN_ELEMENTS`] weights.
///
/// ```
/// use burn_quant_train::layer::LayerPolicy;
///
/// let policy = LayerPolicy::default().only("layers.*.mlp").skip("layers.0");
/// assert!(policy.decide("layers.3.mlp.down", [512, 512]).is_quantized());
/// assert!(!policy.decide("layers.0.mlp.down", [512, 512]).is_quantized());
/// assert!(!policy.decide("layers.3.attention.q", [512, 512]).is_quantized());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPolicy {
    skip: Vec<String>,
    only: Vec<String>,
    min_elements: usize,
    tied_embeddings: bool,
    #[serde(default)]
    products: Vec<String>,
}

impl Default for LayerPolicy {
    fn default() -> Self {
        Self {
            skip: vec![String::from("lm_head")],
            ..Self::all()
        }
    }
}

impl LayerPolicy {
    /// Quantizes every linear layer of at least [`MIN_ELEMENTS`] weights, the vocabulary head too.
    pub fn all() -> Self {
        Self {
            skip: Vec::new(),
            only: Vec::new(),
            min_elements: MIN_ELEMENTS,
            tied_embeddings: false,
            products: Vec::new(),
        }
    }

    /// Leaves the layers that match `pattern` in the compute dtype.
    pub fn skip(mut self, pattern: impl Into<String>) -> Self {
        self.skip.push(pattern.into());
        self
    }

    /// Quantizes only layers that match `pattern`, or another pattern given to `only`.
    pub fn only(mut self, pattern: impl Into<String>) -> Self {
        self.only.push(pattern.into());
        self
    }

    /// Quantizes products with an embedding's table too: the vocabulary head of a model with tied embeddings. Looking
    /// rows up in the table then stays exact, by any recipe.
    pub fn tied_embeddings(mut self) -> Self {
        self.tied_embeddings = true;
        self
    }

    /// Quantizes products of two activations too, behind layers which match `pattern` and are quantized themselves:
    ///
    /// - by recipes with learned step sizes the first [`PRODUCTS`] that come (int4-hq-lss, Appendix A.1). Attention is
    ///   then composed of them, and keeps scores in memory;
    /// - by [INT8 recipes](crate::recipe::LinearRow::has_int8_attention) attention, in the forward pass, where a kernel
    ///   multiplies [INT8 codes](crate::data::attention::AttentionProducts::Int8): on NVIDIA's sm_90 and on CPUs.
    ///
    /// Other recipes quantize none. Behind a layer is what the thread that ran it multiplies before it runs another one.
    /// So attention is that of the projection that comes last, in Burn's `MultiHeadAttention` that of the values.
    ///
    /// ```
    /// use burn_quant_train::layer::LayerPolicy;
    ///
    /// let policy = LayerPolicy::default().products("attention.value");
    /// assert!(policy.has_products("layers.3.attention.value"));
    /// assert!(!policy.has_products("layers.3.mlp.down"));
    /// ```
    pub fn products(mut self, pattern: impl Into<String>) -> Self {
        self.products.push(pattern.into());
        self
    }

    /// Leaves layers with fewer weights than this in the compute dtype.
    pub fn min_elements(mut self, min_elements: usize) -> Self {
        self.min_elements = min_elements;
        self
    }

    /// The decision for the layer at module path `path`, with a weight `[rows, cols]` of this shape.
    pub fn decide(&self, path: &str, shape: [usize; 2]) -> Decision {
        if let Some(pattern) = self.skip.iter().find(|pattern| covers(pattern, path)) {
            return Decision::Skipped(pattern.clone());
        }
        if !self.only.is_empty() && !self.only.iter().any(|pattern| covers(pattern, path)) {
            return Decision::NotSelected;
        }
        if !large_enough(shape, self.min_elements) {
            return Decision::Small(self.min_elements);
        }
        Decision::Quantized
    }

    /// True if the policy names products of activations behind the layer at module path `path`.
    pub fn has_products(&self, path: &str) -> bool {
        self.products.iter().any(|pattern| covers(pattern, path))
    }
}

impl LayerPolicy {
    /// The decision for the table of the embedding at module path `path`. `rounds_rows`: the recipe rounds what is
    /// looked up.
    pub(crate) fn decide_embedding(
        &self,
        path: &str,
        shape: [usize; 2],
        rounds_rows: bool,
    ) -> Decision {
        match (self.tied_embeddings, rounds_rows) {
            (true, _) => self.decide(path, shape),
            (false, true) => match self.decide(path, shape) {
                Decision::Quantized => Decision::EmbeddingRows,
                other => other,
            },
            (false, false) => Decision::Embedding,
        }
    }
}

/// The decision for a layer, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The recipe's row.
    Quantized,
    /// The compute dtype: a `skip` pattern, this one, matches.
    Skipped(String),
    /// The compute dtype: there are `only` patterns, and none matches.
    NotSelected,
    /// The compute dtype: fewer weights than this bound.
    Small(usize),
    /// The compute dtype: the table of an embedding.
    Embedding,
    /// Rows of an embedding's table are rounded when they are looked up; products with the table are in the compute
    /// dtype.
    EmbeddingRows,
    /// The compute dtype: the recipe quantizes no linear layer.
    Recipe,
}

impl Decision {
    /// True if the layer's products are quantized.
    pub fn is_quantized(&self) -> bool {
        *self == Decision::Quantized
    }

    /// True if the layer keeps the state of its recipe between steps.
    pub(crate) fn has_state(&self) -> bool {
        match self {
            Self::Quantized | Self::EmbeddingRows => true,
            Self::Skipped(_)
            | Self::NotSelected
            | Self::Small(_)
            | Self::Embedding
            | Self::Recipe => false,
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Quantized => write!(f, "quantized"),
            Decision::Skipped(pattern) => write!(f, "compute dtype: skip(\"{pattern}\")"),
            Decision::NotSelected => write!(f, "compute dtype: not among the layers of only(..)"),
            Decision::Small(bound) => write!(f, "compute dtype: fewer than {bound} weights"),
            Decision::Embedding => write!(f, "compute dtype: an embedding"),
            Decision::EmbeddingRows => write!(f, "rows quantized: an embedding"),
            Decision::Recipe => write!(f, "compute dtype: the recipe quantizes nothing"),
        }
    }
}

/// True if `pattern` describes `path`, or a module around it, from any module of the path on.
pub(crate) fn covers(pattern: &str, path: &str) -> bool {
    let starts = std::iter::once(0).chain(path.match_indices('.').map(|(dot, _)| dot + 1));
    starts.into_iter().any(|start| {
        let rest = &path[start..];
        let ends = rest
            .match_indices('.')
            .map(|(dot, _)| dot)
            .chain([rest.len()]);
        ends.into_iter()
            .any(|end| matches(pattern.as_bytes(), &rest.as_bytes()[..end]))
    })
}

/// Glob match with `*` only.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|taken| matches(rest, &text[taken..])),
        Some((first, rest)) => text.first() == Some(first) && matches(rest, &text[1..]),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("lm_head", "lm_head", true)]
    #[case("lm_head", "model.lm_head", true)]
    #[case("lm_head", "model.lm_head_norm", false)]
    #[case("layers.*.mlp", "layers.3.mlp.down", true)]
    #[case("layers.*.mlp", "model.layers.3.mlp.down", true)]
    #[case("layers.*.mlp", "layers.3.attention.q", false)]
    #[case("layers.1", "layers.1.mlp.up", true)]
    #[case("layers.1", "layers.11.mlp.up", false)]
    #[case("*.down", "layers.0.mlp.down", true)]
    #[case("*", "anything", true)]
    fn patterns_cover_paths(#[case] pattern: &str, #[case] path: &str, #[case] expected: bool) {
        assert_eq!(covers(pattern, path), expected);
    }

    #[test]
    fn skip_wins_over_only_and_small_layers_stay() {
        let policy = LayerPolicy::all()
            .only("mlp")
            .skip("mlp.up")
            .min_elements(100);
        assert_eq!(policy.decide("mlp.down", [10, 10]), Decision::Quantized);
        assert_eq!(
            policy.decide("mlp.up", [10, 10]),
            Decision::Skipped("mlp.up".into())
        );
        assert_eq!(policy.decide("attention", [10, 10]), Decision::NotSelected);
        assert_eq!(policy.decide("mlp.down", [9, 11]), Decision::Small(100));
    }
}
