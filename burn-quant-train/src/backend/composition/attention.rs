//! Attention as models compose it, and `burn::nn::attention::MultiHeadAttention` among them: the softmax of scores,
//! between two products.
//!
//! Scores are Q Kᵀ of two activations; then, as a model has it, multiplied by numbers, in FP32, with a bias added, with
//! a value far below all others where a key is hidden. Dropout, as `burn::nn::Dropout` has it, may be of scores without
//! a bias and a mask, or of probabilities. What else comes between is another function, and computed as it is.
//!
//! A kernel draws for dropout itself. Whatever reads the zeros and ones afterwards, such as probabilities that a model
//! gives beside its output, reads what the kernel drew.
//!
//! Evaluation is served too, so that a query that sees nothing reads there what it read in training.

use burn_backend::{
    DType, FloatDType, Scalar, Shape, TensorMetadata, ops::BoolTensorOps, tensor::Device,
};

use super::{Step, Waiting, dropout::Drawn, step};
use crate::{
    backend::{
        QuantTrain,
        attention::{choose_way, fits, record},
        products::products_of_attention,
        tensor::QuantTensor,
    },
    data::{
        DataBackend, StochasticKey,
        attention::{
            AttentionKernels, AttentionOptions, AttentionProblem, AttentionShape, Dropout, Dropped,
        },
    },
    recipe::Recipe,
    saved::recorded::QuantBackend,
};

/// A score that hides its key: Burn's `MultiHeadAttention` has this one, others have infinity. Its exponential is 0
/// where the largest score of the row is 104 above it, as the scores of queries and keys of ordinary size are.
const HIDDEN: f64 = -1e4;

/// Scores that wait, taken apart.
struct Scores<'a, B: QuantBackend> {
    query: &'a QuantTensor<B>,
    /// Kᵀ.
    key: &'a QuantTensor<B>,
    scale: f64,
    masks: Vec<&'a B::BoolTensorPrimitive>,
    bias: Option<&'a QuantTensor<B>>,
    drawn: Option<&'a QuantTensor<B>>,
}

impl<'a, B: QuantBackend> Scores<'a, B> {
    fn of(scores: &'a QuantTensor<B>) -> Option<Self> {
        match step(scores)? {
            Step::Scores(query, key) => Some(Self {
                query,
                key,
                scale: 1.0,
                masks: vec![],
                bias: None,
                drawn: None,
            }),
            Step::Widened(x) => Self::of(x),
            Step::Multiplied(x, by) => Self::of(x).map(|it| Self {
                scale: it.scale * by.elem::<f64>(),
                ..it
            }),
            Step::Divided(x, by) => Self::of(x).map(|it| Self {
                scale: it.scale / by.elem::<f64>(),
                ..it
            }),
            Step::Dropped(x, drawn) => Self::of(x).map(|it| Self {
                drawn: Some(drawn),
                ..it
            }),
            Step::Biased(x, bias) => Self::of(x).map(|it| Self {
                bias: Some(bias),
                ..it
            }),
            Step::Hidden(x, mask, _) => Self::of(x).map(|mut it| {
                it.masks.push(mask);
                it
            }),
            _ => None,
        }
    }

    /// True while a factor multiplies nothing but Q Kᵀ.
    fn are_bare(&self) -> bool {
        self.masks.is_empty() && self.bias.is_none()
    }
}

/// Probabilities that wait, taken apart.
struct Probabilities<'a, B: QuantBackend> {
    scores: &'a QuantTensor<B>,
    scale: f64,
    drawn: Option<&'a QuantTensor<B>>,
}

impl<'a, B: QuantBackend> Probabilities<'a, B> {
    fn of(probabilities: &'a QuantTensor<B>) -> Option<Self> {
        match step(probabilities)? {
            Step::Probabilities(scores) => Some(Self {
                scores,
                scale: 1.0,
                drawn: None,
            }),
            Step::Narrowed(x, _) => Self::of(x),
            Step::Multiplied(x, by) => Self::of(x).map(|it| Self {
                scale: it.scale * by.elem::<f64>(),
                ..it
            }),
            Step::Divided(x, by) => Self::of(x).map(|it| Self {
                scale: it.scale / by.elem::<f64>(),
                ..it
            }),
            Step::Dropped(x, drawn) => Self::of(x).map(|it| Self {
                drawn: Some(drawn),
                ..it
            }),
            _ => None,
        }
    }
}

/// True for scores and probabilities that dropout may multiply.
pub(super) fn may_drop<B: QuantBackend>(x: &QuantTensor<B>) -> bool {
    match (Scores::of(x), Probabilities::of(x)) {
        (Some(scores), _) => scores.are_bare() && scores.drawn.is_none(),
        (None, Some(probabilities)) => probabilities.drawn.is_none(),
        (None, None) => false,
    }
}

/// True if zeros and ones of this shape and dtype may drop scores or probabilities, and there are kernels of attention.
pub(super) fn may_have_dropout<B: QuantBackend, R: Recipe>(
    shape: &Shape,
    device: &Device<B>,
    dtype: FloatDType,
) -> bool {
    let fits = |compute| shape.len() == 4 && [compute, DType::F32].contains(&dtype.into());
    narrow::<R>().is_some_and(fits)
        && <B::Base as DataBackend>::Kernels::attention_kernels(device).is_some()
}

/// The compute dtype, which products have, where it is narrow.
fn narrow<R: Recipe>() -> Option<DType> {
    let compute = R::row().compute;
    (compute != FloatDType::F32).then(|| compute.into())
}

/// What a cast to FP32 made wider, which waits as the beginning of a norm; else the tensor. A product narrows it again.
pub(in crate::backend) fn bare<B: QuantBackend>(tensor: &QuantTensor<B>) -> &QuantTensor<B> {
    match step(tensor) {
        Some(Step::Widened(narrow)) => narrow,
        _ => tensor,
    }
}

/// True for probabilities of attention that wait.
pub(in crate::backend) fn are_probabilities<B: QuantBackend>(tensor: &QuantTensor<B>) -> bool {
    Probabilities::of(tensor).is_some()
}

/// True for what products read in the compute dtype, and is computed from no weight: a product with one may be a layer.
fn is_activation<B: QuantBackend>(tensor: &QuantTensor<B>, compute: DType) -> bool {
    tensor.rank() == 4
        && [compute, DType::F32].contains(&tensor.dtype())
        && tensor.as_waiting().is_none()
        && tensor.tag().lineage().is_none()
}

/// A product of two activations that may be scores, where there are kernels of attention.
pub(super) fn scores<B: QuantBackend, R: Recipe>(
    query: &QuantTensor<B>,
    key: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let compute = narrow::<R>()?;
    let [query, key] = [query, key].map(bare);
    if !(is_activation(query, compute) && is_activation(key, compute)) {
        return None;
    }
    let [of_query, of_key] = [query.shape(), key.shape()];
    if of_query[..2] != of_key[..2] || of_query[3] != of_key[2] {
        return None;
    }
    <B::Base as DataBackend>::Kernels::attention_kernels(&query.device())?;
    let shape = Shape::new([of_query[0], of_query[1], of_query[2], of_key[3]]);
    let step = Step::Scores(query.clone(), key.clone());
    Some(Waiting::of::<R>(query, step, shape, compute))
}

pub(super) fn float_mul_scalar<B: QuantBackend, R: Recipe>(
    scores: &QuantTensor<B>,
    by: &Scalar,
) -> Option<QuantTensor<B>> {
    scaled::<B, R>(scores, *by, Step::Multiplied)
}

pub(super) fn float_div_scalar<B: QuantBackend, R: Recipe>(
    scores: &QuantTensor<B>,
    by: &Scalar,
) -> Option<QuantTensor<B>> {
    scaled::<B, R>(scores, *by, Step::Divided)
}

fn scaled<B: QuantBackend, R: Recipe>(
    scores: &QuantTensor<B>,
    by: Scalar,
    step: fn(QuantTensor<B>, Scalar) -> Step<B>,
) -> Option<QuantTensor<B>> {
    let may_be = match Scores::of(scores) {
        Some(scores) => scores.are_bare(),
        // By the inverse of the share that dropout leaves.
        None => Probabilities::of(scores)?.drawn.is_some(),
    };
    may_be.then(|| Waiting::like::<R>(scores, step(scores.clone(), by)))
}

pub(super) fn float_add<B: QuantBackend, R: Recipe>(
    left: &QuantTensor<B>,
    right: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    biased::<B, R>(left, right).or_else(|| biased::<B, R>(right, left))
}

/// The bias is read in the compute dtype, in which it would meet scores that are in that dtype.
fn biased<B: QuantBackend, R: Recipe>(
    scores: &QuantTensor<B>,
    bias: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let compute = narrow::<R>()?;
    let fits = Scores::of(scores)?.bias.is_none()
        && bias.as_waiting().is_none()
        && scores.dtype() == compute
        && [compute, DType::F32].contains(&bias.dtype())
        && fits(&bias.shape(), &scores.shape());
    fits.then(|| Waiting::like::<R>(scores, Step::Biased(scores.clone(), bias.clone())))
}

pub(in crate::backend) fn float_mask_fill<B: QuantBackend, R: Recipe>(
    scores: &QuantTensor<B>,
    mask: &B::BoolTensorPrimitive,
    value: &Scalar,
) -> Option<QuantTensor<B>> {
    Scores::of(scores)?;
    let hides = value.elem::<f64>() <= HIDDEN && fits(&mask.shape(), &scores.shape());
    hides.then(|| {
        let step = Step::Hidden(scores.clone(), mask.clone(), *value);
        Waiting::like::<R>(scores, step)
    })
}

/// Scores in FP32, and probabilities in the dtype of a model.
pub(super) fn float_cast<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    dtype: &FloatDType,
) -> Option<QuantTensor<B>> {
    let is_compute = *dtype == R::row().compute;
    let step = match Probabilities::of(x) {
        Some(_) if is_compute && x.dtype() == DType::F32 => Step::Narrowed(x.clone(), *dtype),
        _ => {
            Scores::of(x).filter(|_| *dtype == FloatDType::F32)?;
            Step::Widened(x.clone())
        }
    };
    Some(Waiting::of::<R>(x, step, x.shape(), (*dtype).into()))
}

/// Probabilities, in FP32 as every softmax is.
pub(in crate::backend) fn softmax<B: QuantBackend, R: Recipe>(
    scores: &QuantTensor<B>,
    dim: &usize,
) -> Option<QuantTensor<B>> {
    Scores::of(scores).filter(|_| *dim == 3)?;
    let step = Step::Probabilities(scores.clone());
    Some(Waiting::of::<R>(scores, step, scores.shape(), DType::F32))
}

/// The product of probabilities and values, if a kernel computes the whole.
pub(super) fn context<B: QuantBackend, R: Recipe>(
    probabilities: &QuantTensor<B>,
    value: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let probabilities = Probabilities::of(probabilities)?;
    let [batch, heads, _, keys] = probabilities.scores.shape().dims();
    let scores = Scores::of(probabilities.scores)?;
    let value = bare(value);
    let (of_query, of_value) = (scores.query.shape(), value.shape());
    let compute = narrow::<R>()?;
    if !is_activation(value, compute) || of_value[..2] != [batch, heads] {
        return None;
    }
    let of_key = [batch, heads, keys, of_query[3]];
    let (scale, drops) = drops(&probabilities, &scores)?;
    // The key is taken when it is known that a kernel draws.
    let any_key = StochasticKey { seed: 0, stream: 0 };
    let dropout = drops.map(|(dropped, drawn)| Dropout {
        dropped,
        draw: drawn.draw_by(any_key),
    });
    let mut problem = AttentionProblem {
        dtype: compute,
        shape: AttentionShape::new("attention", &of_query, &of_key, &of_value).ok()?,
        options: AttentionOptions {
            dropout,
            products: products_of_attention::<B, R>([scores.query, scores.key, value]),
            ..AttentionOptions::new(scale as f32)
        },
        is_masked: !scores.masks.is_empty(),
        is_biased: scores.bias.is_some(),
    };
    // In evaluation by the kernels of training: others may give a query that sees nothing something else.
    let way = choose_way::<B>(&value.device(), &mut problem, true)?;
    if let Some((dropped, drawn)) = drops {
        let draw = drawn.draw()?;
        problem.options.dropout = Some(Dropout { dropped, draw });
    }
    let _scope = QuantTrain::<B, R>::scope();
    QuantTrain::<B, R>::compress_pending();
    let inputs = [
        scores.query.clone(),
        scores.key.clone().swap_dims(2, 3),
        value.clone(),
    ];
    let mask = either::<B, R>(&scores.masks);
    let bias = scores.bias.cloned();
    Some(record::<B, R>(problem.options, way, inputs, mask, bias))
}

/// What is dropped, and by which zeros and ones.
type Drops<'a, B> = (Dropped, &'a Drawn<B>);

/// The scale of Q Kᵀ beside dropout, which divides by the share that it leaves, and the dropout of one of both.
fn drops<'a, B: QuantBackend>(
    probabilities: &Probabilities<'a, B>,
    scores: &Scores<'a, B>,
) -> Option<(f64, Option<Drops<'a, B>>)> {
    // Those that have been read are no longer to be drawn.
    let drawn = |tensor| match step(tensor)? {
        Step::Drawn(drawn) => Some(drawn),
        _ => None,
    };
    match (scores.drawn, probabilities.drawn) {
        (None, None) => Some((scores.scale, None)),
        (Some(of_scores), None) => {
            let drawn = drawn(of_scores)?;
            Some((scores.scale * drawn.keep, Some((Dropped::Scores, drawn))))
        }
        (None, Some(of_probabilities)) => {
            let drawn = drawn(of_probabilities)?;
            let is_whole = (probabilities.scale * drawn.keep - 1.0).abs() < 1e-6;
            is_whole.then_some((scores.scale, Some((Dropped::Probabilities, drawn))))
        }
        (Some(_), Some(_)) => None,
    }
}

/// True where one of the masks is.
fn either<B: QuantBackend, R: Recipe>(
    masks: &[&B::BoolTensorPrimitive],
) -> Option<B::BoolTensorPrimitive> {
    type By<B, R> = QuantTrain<B, R>;
    let masks = masks.iter().map(|&mask| mask.clone());
    masks.reduce(|one, other| {
        let extents = one
            .shape()
            .iter()
            .zip(other.shape().iter())
            .map(|(&a, &b)| a.max(b))
            .collect::<Vec<usize>>();
        let [one, other] =
            [one, other].map(|it| By::<B, R>::bool_expand(it, Shape::from(extents.clone())));
        By::<B, R>::bool_or(one, other)
    })
}
