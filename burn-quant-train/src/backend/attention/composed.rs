//! Attention composed of Burn's operations, with every option: where no kernel computes it, and on backends without the
//! decorator.

use burn::tensor::{
    Bool, DType, Distribution, Int, Tensor, TensorPrimitive, backend::Backend,
    ops::AttentionModuleOptions,
};

use super::{Asked, band, with_heads};
use crate::data::attention::Band;

/// Inputs of attention, as Burn's function has them.
#[derive(Debug, Clone)]
pub(crate) struct Inputs<B: Backend> {
    /// `[batch, heads, queries, features]`.
    pub query: Tensor<B, 4>,
    /// `[batch, heads of keys, keys, features]`.
    pub key: Tensor<B, 4>,
    /// `[batch, heads of keys, keys, features of values]`.
    pub value: Tensor<B, 4>,
    /// True where a key is hidden from a query; broadcast to the scores.
    pub mask: Option<Tensor<B, 4, Bool>>,
    /// Added to the scores, broadcast to them.
    pub bias: Option<Tensor<B, 4>>,
}

/// The output `[batch, heads, queries, features of values]`. Dropout draws from the backend's random numbers.
pub(crate) fn composed<B: Backend>(
    inputs: Inputs<B>,
    options: AttentionModuleOptions,
    asked: Asked,
) -> Tensor<B, 4> {
    let [_, heads, queries, width] = inputs.query.dims();
    let device = inputs.query.device();
    let [key, value] = [inputs.key, inputs.value].map(|it| {
        let it = with_heads::<B>(it.into_primitive().tensor(), heads);
        Tensor::<B, 4>::new(TensorPrimitive::Float(it))
    });
    let keys = key.dims()[2];
    let scale = options.scale.unwrap_or(1.0 / (width as f64).sqrt());
    let mut scores = inputs.query.matmul(key.transpose()).mul_scalar(scale);
    if let Some(softcap) = options.softcap {
        scores = scores.div_scalar(softcap).tanh().mul_scalar(softcap);
    }
    if let Some(bias) = inputs.bias {
        scores = scores.add(bias);
    }
    let hidden_by_place = outside(band(options, Some(asked)), [queries, keys], &device);
    for hidden in inputs.mask.into_iter().chain(hidden_by_place) {
        scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
    }
    let dtype = scores.dtype();
    let mut probabilities = softmax(scores);
    if let Some(dropout) = asked.dropout {
        let keep = 1.0 - f64::from(dropout.draw.rate);
        let kept = probabilities.random_like(Distribution::Bernoulli(keep));
        probabilities = probabilities.mul(kept).div_scalar(keep);
    }
    probabilities.cast(dtype).matmul(value)
}

/// `[1, 1, queries, keys]`, true outside of the band; none where it shows everything.
fn outside<B: Backend>(
    band: Band,
    [queries, keys]: [usize; 2],
    device: &B::Device,
) -> Vec<Tensor<B, 4, Bool>> {
    let places = |end: usize| Tensor::<B, 1, Int>::arange(0..end as i64, device);
    let own = places(queries)
        .reshape([1, 1, queries, 1])
        .add_scalar(keys as i64 - queries as i64);
    let keys_of = |own| places(keys).reshape([1, 1, 1, keys]).sub(own);
    // A bound beyond all keys is none, and fits every type of integers.
    let reaches = |bound: u32| (bound as usize) < queries + keys;
    let before = band.left.filter(|&left| reaches(left));
    let behind = band.right.filter(|&right| reaches(right));
    let before = before.map(|left| keys_of(own.clone()).lower_elem(-i64::from(left)));
    let behind = behind.map(|right| keys_of(own).greater_elem(i64::from(right)));
    before.into_iter().chain(behind).collect()
}

/// The softmax of rows, in FP32 of what is narrower; a row of negative infinities is 0, and so is its gradient.
fn softmax<B: Backend>(scores: Tensor<B, 4>) -> Tensor<B, 4> {
    let scores = match scores.dtype() {
        DType::F64 => scores,
        _ => scores.cast(DType::F32),
    };
    let float = scores.dtype().finfo().expect("scores are floats");
    let largest = scores.clone().detach().max_dim(3).clamp_min(float.min);
    let powers = scores.sub(largest).exp();
    // That of a row that sees something is 1 or more.
    let sum = powers.clone().sum_dim(3).clamp_min(0.5);
    powers.div(sum)
}
