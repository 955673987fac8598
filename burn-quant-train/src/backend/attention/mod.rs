//! Attention: by the kernels of the device, or composed.

mod asked;
mod composed;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::{
    Backend, DType, FloatDType, Shape, TensorMetadata,
    ops::{AttentionModuleOptions, ModuleOps, attention::attention_fallback},
    tensor::{BoolTensor, Device, FloatTensor},
};

pub(crate) use asked::{Asked, asking};
pub(crate) use composed::{Inputs, composed};

use super::{
    QuantTrain,
    precision::{Class, in_class},
    products,
    tensor::QuantTensor,
};
use crate::{
    data::{
        DataBackend,
        attention::{
            AttentionOptions, AttentionProblem, AttentionProducts, AttentionShape, AttentionWay,
            Band, way,
        },
    },
    ops::attention::Attention,
    recipe::Recipe,
    saved::recorded::QuantBackend,
    warning::warn_once,
};

type Float<B, R> = FloatTensor<QuantTrain<B, R>>;
type Bool<B, R> = BoolTensor<QuantTrain<B, R>>;

/// [`ModuleOps::attention`](burn_backend::ops::ModuleOps::attention), and what is [asked] beside its options.
pub(super) fn attention<B: QuantBackend, R: Recipe>(
    query: Float<B, R>,
    key: Float<B, R>,
    value: Float<B, R>,
    mask: Option<Bool<B, R>>,
    bias: Option<Float<B, R>>,
    options: AttentionModuleOptions,
) -> Float<B, R> {
    let asked = asked::take();
    let compute = |tensor: Float<B, R>| in_class::<B, R>(Class::Compute, tensor.into_primitive());
    let is_grouped = query.shape()[1] != key.shape()[1];
    let inputs = [&query, &key, &value];
    // A kernel of attention would leave no products to quantize.
    let mut problem = match products::quantizes_attention::<B, R>(inputs) {
        true => None,
        false => problem::<B, R>(inputs, mask.as_ref(), bias.as_ref(), options, asked),
    };
    let device = query.device();
    let trains = B::ad_enabled(&device);
    let way_of = |problem: &mut AttentionProblem| choose_way::<B>(&device, problem, trains);
    let own_way = problem.as_mut().and_then(way_of);
    // A kernel without scores serves evaluation too: in a program that trains it has been compiled, and Burn's would be
    // tuned first.
    let is_inner = !is_grouped && asked.is_none() && own_way != Some(AttentionWay::Flash);
    if is_inner && !trains {
        return QuantTensor::new(<B::Inside>::attention(
            compute(query),
            compute(key),
            compute(value),
            mask,
            bias.map(compute),
            options,
        ));
    }
    if let (Some(problem), Some(way)) = (&problem, own_way) {
        return record::<B, R>(problem.options, way, [query, key, value], mask, bias);
    }
    let heads = query.shape()[1];
    let [key, value] = [key, value].map(|it| with_heads::<QuantTrain<B, R>>(it, heads));
    let repeated = problem.map(|mut problem| {
        problem.shape.kv_heads = heads;
        problem
    });
    let repeated = repeated.filter(|_| is_grouped);
    let by_repeated = repeated.and_then(|mut it| way_of(&mut it).map(|way| (it.options, way)));
    match (by_repeated, asked) {
        (Some((options, way)), _) => record::<B, R>(options, way, [query, key, value], mask, bias),
        (None, None) => {
            attention_fallback::<QuantTrain<B, R>>(query, key, value, mask, bias, options)
        }
        (None, Some(asked)) => {
            let float = |it| Tensor::new(TensorPrimitive::Float(it));
            let inputs = Inputs::<QuantTrain<B, R>> {
                query: float(query),
                key: float(key),
                value: float(value),
                mask: mask.map(Tensor::new),
                bias: bias.map(float),
            };
            let output = composed(inputs, options, asked);
            output.into_primitive().tensor()
        }
    }
}

/// How the device's kernels compute this, if they do. INT8 products become those of floats where no kernel has them, and
/// for scores that are not as steep as their products, which see what all keys have in common.
pub(super) fn choose_way<B: QuantBackend>(
    device: &Device<B>,
    problem: &mut AttentionProblem,
    trains: bool,
) -> Option<AttentionWay> {
    if problem.options.has_slopes() {
        problem.options.products = AttentionProducts::Float;
    }
    let of = |problem: &_| way::<<B::Base as DataBackend>::Kernels>(device, problem, trains);
    let way = of(problem);
    if way.is_some() || problem.options.products == AttentionProducts::Float {
        return way;
    }
    warn_once!(
        "attention: no kernel of {device:?} has INT8 products for this, and they are those of floats: {problem:?}"
    );
    problem.options.products = AttentionProducts::Float;
    of(problem)
}

/// The operation on operands in the compute dtype.
pub(super) fn record<B: QuantBackend, R: Recipe>(
    options: AttentionOptions,
    way: AttentionWay,
    inputs: [Float<B, R>; 3],
    mask: Option<Bool<B, R>>,
    bias: Option<Float<B, R>>,
) -> Float<B, R> {
    let compute = |tensor: Float<B, R>| in_class::<B, R>(Class::Compute, tensor.into_primitive());
    let attention = Attention { options, way, mask };
    let [query, key, value] = inputs.map(compute);
    QuantTensor::new(match bias {
        None => B::record(attention, [query, key, value]),
        Some(bias) => B::record(attention, [query, key, value, compute(bias)]),
    })
}

/// The problem for kernels, if it is one that they may compute.
fn problem<B: QuantBackend, R: Recipe>(
    inputs: [&Float<B, R>; 3],
    mask: Option<&Bool<B, R>>,
    bias: Option<&Float<B, R>>,
    options: AttentionModuleOptions,
    asked: Option<Asked>,
) -> Option<AttentionProblem> {
    let mut floats = inputs.into_iter().chain(bias);
    let [query, key, value] = inputs.map(TensorMetadata::shape);
    let shape = AttentionShape::new("attention", &query, &key, &value).ok()?;
    let softcap = options.softcap.map(|softcap| softcap as f32);
    let compute = R::row().compute;
    let products = products::products_of_attention::<B, R>(inputs);
    if compute == FloatDType::F32 && products == AttentionProducts::Int8 {
        warn_once!(
            "attention: INT8 products go with a compute dtype of 16 bits; in FP32 they are those of floats"
        );
    }
    let computes = compute != FloatDType::F32
        && floats.all(|it| it.dtype() != DType::F64)
        && softcap.is_none_or(|softcap| softcap > 0.0 && softcap.is_finite())
        && mask.is_none_or(|mask| fits(&mask.shape(), &shape.scores()))
        && bias.is_none_or(|bias| fits(&bias.shape(), &shape.scores()));
    computes.then(|| AttentionProblem {
        dtype: compute.into(),
        shape,
        options: AttentionOptions {
            softcap,
            band: band(options, asked),
            dropout: asked.and_then(|asked| asked.dropout),
            products,
            ..AttentionOptions::new(match options.scale {
                Some(scale) => scale as f32,
                None => (1.0 / (shape.width as f64).sqrt()) as f32,
            })
        },
        is_masked: mask.is_some(),
        is_biased: bias.is_some(),
    })
}

/// True for a shape that is broadcast to that of the scores.
pub(crate) fn fits(shape: &[usize], scores: &[usize]) -> bool {
    let mut dimensions = shape.iter().zip(scores);
    shape.len() == scores.len() && dimensions.all(|(&extent, &of)| extent == 1 || extent == of)
}

/// The keys that a query sees by its place.
fn band(options: AttentionModuleOptions, asked: Option<Asked>) -> Band {
    let causal = match options.is_causal {
        true => Band::CAUSAL,
        false => Band::ALL,
    };
    asked.map_or(causal, |asked| causal.and(asked.band))
}

/// Keys or values `[batch, heads of keys, keys, features]`, each repeated for the query heads that read it.
fn with_heads<B: Backend>(tensor: FloatTensor<B>, heads: usize) -> FloatTensor<B> {
    let [batch, of_keys, keys, features] = tensor.shape().dims();
    if of_keys == heads || of_keys == 0 || !heads.is_multiple_of(of_keys) {
        return tensor;
    }
    let group = heads / of_keys;
    let tensor = B::float_reshape(tensor, Shape::new([batch, of_keys, 1, keys, features]));
    let tensor = B::float_expand(tensor, Shape::new([batch, of_keys, group, keys, features]));
    B::float_reshape(tensor, Shape::new([batch, heads, keys, features]))
}
