//! Compositions of Burn's operations that are one operation as a whole, found as models compute them.
//!
//! | composition | as | operations |
//! | --- | --- | --- |
//! | RMSNorm | `burn::nn::RmsNorm` | `x / sqrt(mean(cast(x, FP32)²) + epsilon) gain` |
//! | SwiGLU | `burn::nn::SwiGlu`, `silu(gate) * up` | `gate sigmoid(gate) up` |
//! | layer normalization | `burn::nn::LayerNorm` | one |
//! | rotary positions | `burn::nn::RotaryEncoding` | pairs of x, times `[2, 4]`, times a table, summed up |
//! | dropout, in a flow or with kernels | `burn::nn::Dropout`, and its sum with a residual | one |
//! | GELU, in a flow | `burn::nn::Gelu` | one |
//! | [attention] | `burn::nn::attention::MultiHeadAttention` | two products, a softmax between, dropout of one side |
//! | the logarithm of a softmax | `log_softmax`, `burn::nn::loss::CrossEntropyLoss` | one, of the last dimension |
//! | the sum or mean of a loss | `mean`, `sum` | one, of few elements |
//!
//! An operation with which a composition begins, or goes on, computes nothing: its result [waits](Waiting). The last
//! operation records the whole, with a kernel for each pass. Whatever else reads a waiting result has it computed as
//! Burn does, so that a model which departs from a composition loses nothing, and nothing is computed twice, but for dropout
//! of which a residual sum and somebody else read.
//!
//! Compositions are looked for in training: of recipes with a [flow](crate::recipe::Flow), whose operators they are,
//! and else on devices that have kernels for them, where x is narrower than FP32: with FP32 as the compute dtype no bit
//! differs from Burn's. The whole is computed in FP32 and rounded once. Attention, logarithms of a softmax and sums are
//! looked for in evaluation too.

pub(super) mod attention;
mod dropout;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

pub(super) use attention::{float_mask_fill, softmax};
use dropout::Drawn;
pub(super) use dropout::float_random;

use burn_backend::{
    Backend, DType, FloatDType, Scalar, Shape, Slice, TensorMetadata,
    ops::{ActivationOps, FloatTensorOps},
    tensor::{BoolTensor, Device, FloatTensor},
};

use cubecl_kernels::sum::Reduction;

use super::{QuantTrain, flow, forward::forward, tensor::QuantTensor};
use crate::{
    data::{
        DataBackend,
        composition::{CompositionKernels, Compositions},
    },
    layer::tag::View,
    operations::{composed_activation_operations, composed_float_operations},
    ops::{
        gelu::Gelu, layer_norm::LayerNorm, log_softmax::LogSoftmax, rms_norm::RmsNorm,
        rotary::Rotary, sum::Sum, swiglu::Swiglu,
    },
    recipe::{Flow, Recipe},
    saved::recorded::QuantBackend,
};

/// Methods of [`OneByOne`], from the tables.
macro_rules! declare {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)? $([ $($mark:tt)* ])?; )*) => { $(
        fn $name(
            $($arg: crate::operations::kind_type!($kind)),*
        ) -> crate::operations::kind_type!($ret);
    )* };
}

/// Operations that may belong to a composition: looked for there first, else computed one by one.
macro_rules! compose {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)? $([ $($mark:tt)* ])?; )*) => { $(
        fn $name(
            $($arg: crate::operations::kind_type!($kind)),*
        ) -> crate::operations::kind_type!($ret) {
            match crate::backend::composition::$name::<B, R>($(&$arg),*) {
                Some(result) => result,
                None => <Self as crate::backend::composition::OneByOne>::$name($($arg),*),
            }
        }
    )* };
}

pub(super) use compose;

/// The operations of the tables, each by itself.
pub(super) trait OneByOne: Backend {
    composed_float_operations! { declare }
    composed_activation_operations! { declare }
}

impl<B: QuantBackend, R: Recipe> OneByOne for QuantTrain<B, R> {
    composed_float_operations! { forward }
    composed_activation_operations! { forward }
}

/// The result of an operation of a composition, not computed yet.
pub(super) struct Waiting<B: QuantBackend> {
    step: Step<B>,
    shape: Shape,
    dtype: DType,
    device: Device<B>,
    /// Computes it by itself.
    compute: fn(&Step<B>) -> QuantTensor<B>,
    value: OnceLock<QuantTensor<B>>,
}

/// The operation, and its operands.
#[derive(Debug)]
enum Step<B: QuantBackend> {
    /// x in FP32.
    Widened(QuantTensor<B>),
    Squared(QuantTensor<B>),
    /// The mean of the last dimension.
    Mean(QuantTensor<B>),
    /// Epsilon added.
    Shifted(QuantTensor<B>, Scalar),
    Root(QuantTensor<B>),
    /// In the dtype of x.
    Narrowed(QuantTensor<B>, FloatDType),
    /// x, over its root mean square.
    Normalized(QuantTensor<B>, QuantTensor<B>),
    Sigmoid(QuantTensor<B>),
    /// x, times its sigmoid.
    Silu(QuantTensor<B>, QuantTensor<B>),
    /// x as rows of pairs, `[heads, positions, pairs, 2]`.
    Paired(QuantTensor<B>, Shape),
    /// Pairs, times a matrix `[1, 1, 2, 4]`.
    Turned(QuantTensor<B>, QuantTensor<B>),
    /// What became of pairs, `[heads, positions, features, 2]`.
    Spread(QuantTensor<B>, Shape),
    /// Times a table `[1, positions, features, 2]`.
    Scaled(QuantTensor<B>, QuantTensor<B>),
    /// The sum of the last dimension.
    Summed(QuantTensor<B>),
    /// Q times Kᵀ, `[batch, heads, queries, keys]`.
    Scores(QuantTensor<B>, QuantTensor<B>),
    /// Scores or dropped probabilities, times a number.
    Multiplied(QuantTensor<B>, Scalar),
    /// The same, divided by a number.
    Divided(QuantTensor<B>, Scalar),
    /// Zeros and ones.
    Drawn(Drawn<B>),
    /// Scores, probabilities or any tensor, times zeros and ones.
    Dropped(QuantTensor<B>, QuantTensor<B>),
    /// Scores, with a bias added.
    Biased(QuantTensor<B>, QuantTensor<B>),
    /// Scores, with one value where a mask is true.
    Hidden(QuantTensor<B>, B::BoolTensorPrimitive, Scalar),
    /// The softmax of scores along the keys.
    Probabilities(QuantTensor<B>),
    /// x, times zeros and ones, and times a number: dropout.
    DroppedOut(QuantTensor<B>, QuantTensor<B>, Scalar),
}

impl<B: QuantBackend> Step<B> {
    /// Computes it by itself.
    fn compute<R: Recipe>(&self) -> QuantTensor<B> {
        type By<B, R> = QuantTrain<B, R>;
        match self {
            Self::Widened(x) => <By<B, R> as OneByOne>::float_cast(x.clone(), FloatDType::F32),
            Self::Squared(x) => <By<B, R> as OneByOne>::float_powi_scalar(x.clone(), 2.into()),
            Self::Mean(x) => <By<B, R> as OneByOne>::float_mean_dim(x.clone(), x.rank() - 1),
            Self::Shifted(x, by) => <By<B, R> as OneByOne>::float_add_scalar(x.clone(), *by),
            Self::Root(x) => <By<B, R> as OneByOne>::float_sqrt(x.clone()),
            Self::Narrowed(x, dtype) => <By<B, R> as OneByOne>::float_cast(x.clone(), *dtype),
            Self::Normalized(x, rms) => <By<B, R> as OneByOne>::float_div(x.clone(), rms.clone()),
            Self::Sigmoid(x) => <By<B, R> as OneByOne>::sigmoid(x.clone()),
            Self::Silu(x, sigmoid) => <By<B, R> as OneByOne>::float_mul(x.clone(), sigmoid.clone()),
            Self::Paired(x, shape) | Self::Spread(x, shape) => {
                let _scope = By::<B, R>::scope();
                x.clone().reshape(shape.clone())
            }
            Self::Turned(pairs, turn) => By::<B, R>::product(pairs.clone(), turn.clone()),
            Self::Scaled(x, table) => <By<B, R> as OneByOne>::float_mul(x.clone(), table.clone()),
            Self::Summed(x) => <By<B, R> as OneByOne>::float_sum_dim(x.clone(), x.rank() - 1),
            Self::Scores(query, key) => By::<B, R>::product(query.clone(), key.clone()),
            Self::Multiplied(x, by) => <By<B, R> as OneByOne>::float_mul_scalar(x.clone(), *by),
            Self::Divided(x, by) => <By<B, R> as OneByOne>::float_div_scalar(x.clone(), *by),
            Self::Biased(x, bias) => <By<B, R> as OneByOne>::float_add(x.clone(), bias.clone()),
            Self::Hidden(x, mask, value) => {
                <By<B, R> as OneByOne>::float_mask_fill(x.clone(), mask.clone(), *value)
            }
            Self::Probabilities(x) => By::<B, R>::softmax_alone(x.clone(), 3),
            Self::Drawn(drawn) => drawn.compute::<R>(),
            Self::Dropped(x, by) => <By<B, R> as OneByOne>::float_mul(x.clone(), by.clone()),
            Self::DroppedOut(x, drawn, factor) => dropout::compute::<B, R>(x, drawn, *factor),
        }
    }
}

impl<B: QuantBackend> Waiting<B> {
    /// The result of an operation on `x` and on its device.
    fn of<R: Recipe>(
        x: &QuantTensor<B>,
        step: Step<B>,
        shape: Shape,
        dtype: DType,
    ) -> QuantTensor<B> {
        Self::on::<R>(x.device(), step, shape, dtype)
    }

    fn on<R: Recipe>(
        device: Device<B>,
        step: Step<B>,
        shape: Shape,
        dtype: DType,
    ) -> QuantTensor<B> {
        QuantTensor::waiting(Self {
            step,
            shape,
            dtype,
            device,
            compute: Step::compute::<R>,
            value: OnceLock::new(),
        })
    }

    /// Of the shape and dtype of `x`.
    fn like<R: Recipe>(x: &QuantTensor<B>, step: Step<B>) -> QuantTensor<B> {
        Self::of::<R>(x, step, x.shape(), x.dtype())
    }

    /// Itself, as long as nobody has asked for the value: then it is one like any other.
    pub fn pending(&self) -> Option<&Self> {
        self.value.get().is_none().then_some(self)
    }

    /// The value, which is computed once.
    pub fn value(&self) -> &QuantTensor<B> {
        self.value.get_or_init(|| (self.compute)(&self.step))
    }

    /// The value, owned where this is the last share.
    pub fn into_value(waiting: Arc<Self>) -> QuantTensor<B> {
        waiting.value();
        match Arc::try_unwrap(waiting) {
            Ok(waiting) => waiting.value.into_inner().expect("a computed value"),
            Err(waiting) => waiting.value().clone(),
        }
    }

    pub fn shape(&self) -> Shape {
        self.shape.clone()
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn device(&self) -> Device<B> {
        self.device.clone()
    }
}

impl<B: QuantBackend> fmt::Debug for Waiting<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Waiting({:?})", self.step)
    }
}

/// True if a composition on this tensor is one operation: in a flow, or where there are kernels, and `have` is true of
/// them.
fn is_one<B: QuantBackend, R: Recipe>(
    flow: Option<Flow>,
    x: &QuantTensor<B>,
    have: impl FnOnce(&Compositions<<B::Base as DataBackend>::Kernels>) -> bool,
) -> bool {
    flow.is_some() || kernels::<B, R>(x).is_some_and(|kernels| have(&kernels))
}

/// The flow of an operator with these inputs, x first: where a gradient of one of them is asked for. Evaluation reads
/// values as they are, on the backend of training too.
fn flow_of<B: QuantBackend, R: Recipe, const N: usize>(
    inputs: [&QuantTensor<B>; N],
) -> Option<Flow> {
    let is_trained = || inputs.iter().any(|it| B::is_tracked(it.primitive()));
    flow::of::<B, R>(inputs[0]).filter(|_| is_trained())
}

/// The same of a norm of the tensor's rows.
fn is_one_norm<B: QuantBackend, R: Recipe>(flow: Option<Flow>, x: &QuantTensor<B>) -> bool {
    is_one::<B, R>(flow, x, |kernels| {
        (kernels.has_norms)(x.dtype(), x.shape()[x.rank() - 1])
    })
}

/// The kernels, if compositions that begin with this tensor have some outside of a flow.
fn kernels<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
) -> Option<Compositions<<B::Base as DataBackend>::Kernels>> {
    let trains = B::RECORDS && B::ad_enabled(&x.device());
    (is_narrow(x) && trains)
        .then(|| kernels_of::<B, R>(x))
        .flatten()
}

/// The kernels that the device of x has for a recipe that computes in less than FP32, in training or evaluation.
fn kernels_of<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
) -> Option<Compositions<<B::Base as DataBackend>::Kernels>> {
    // A tensor that is computed from a weight remembers its layer, which a composition would forget.
    if R::row().compute == FloatDType::F32 || x.rank() == 0 || x.origin().is_some() {
        return None;
    }
    <B::Base as DataBackend>::Kernels::composition_kernels(&x.device())
}

/// True if both are one tensor.
fn is_same<B: QuantBackend>(one: &QuantTensor<B>, other: &QuantTensor<B>) -> bool {
    one.as_waiting().is_none()
        && other.as_waiting().is_none()
        && B::is_same(one.primitive(), other.primitive())
}

/// x and epsilon, if this is the root of the mean square of x, in FP32.
fn root_mean_square<B: QuantBackend>(root: &QuantTensor<B>) -> Option<(&QuantTensor<B>, Scalar)> {
    let Step::Root(shifted) = step(root)? else {
        return None;
    };
    let Step::Shifted(mean, epsilon) = step(shifted)? else {
        return None;
    };
    let Step::Mean(squared) = step(mean)? else {
        return None;
    };
    let Step::Squared(wide) = step(squared)? else {
        return None;
    };
    match step(wide) {
        Some(Step::Widened(x)) => Some((x, *epsilon)),
        Some(_) => None,
        // Burn leaves out the cast of what is FP32.
        None => Some((wide, *epsilon)),
    }
}

/// The tensor that was narrowed to the dtype of x, or the tensor itself.
fn narrowed<B: QuantBackend>(tensor: &QuantTensor<B>) -> &QuantTensor<B> {
    match step(tensor) {
        Some(Step::Narrowed(wide, _)) => wide,
        _ => tensor,
    }
}

fn step<B: QuantBackend>(tensor: &QuantTensor<B>) -> Option<&Step<B>> {
    tensor.as_waiting().map(|waiting| &waiting.step)
}

pub(super) fn float_cast<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    dtype: &FloatDType,
) -> Option<QuantTensor<B>> {
    if let Some((of, _)) = root_mean_square(x) {
        let narrowed = Step::Narrowed(x.clone(), *dtype);
        let dtype = DType::from(*dtype);
        return (of.dtype() == dtype).then(|| Waiting::of::<R>(x, narrowed, x.shape(), dtype));
    }
    if let Some(cast) = attention::float_cast::<B, R>(x, dtype) {
        return Some(cast);
    }
    let widens = *dtype == FloatDType::F32 && x.dtype() != DType::F32;
    (widens && is_one_norm::<B, R>(flow::of::<B, R>(x), x))
        .then(|| Waiting::of::<R>(x, Step::Widened(x.clone()), x.shape(), DType::F32))
}

pub(super) fn float_powi_scalar<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    power: &Scalar,
) -> Option<QuantTensor<B>> {
    let begins = match step(x) {
        Some(Step::Widened(_)) => true,
        Some(_) => false,
        None => x.dtype() == DType::F32 && flow::of::<B, R>(x).is_some(),
    };
    (begins && power.elem::<f64>() == 2.0).then(|| Waiting::like::<R>(x, Step::Squared(x.clone())))
}

pub(super) fn float_mean_dim<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    dim: &usize,
) -> Option<QuantTensor<B>> {
    match step(x)? {
        Step::Squared(_) if dim + 1 == x.rank() => {
            let mut shape = x.shape();
            shape[*dim] = 1;
            Some(Waiting::of::<R>(x, Step::Mean(x.clone()), shape, x.dtype()))
        }
        _ => None,
    }
}

pub(super) fn float_add_scalar<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    by: &Scalar,
) -> Option<QuantTensor<B>> {
    match step(x)? {
        Step::Mean(_) => Some(Waiting::like::<R>(x, Step::Shifted(x.clone(), *by))),
        _ => None,
    }
}

pub(super) fn float_sqrt<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> Option<QuantTensor<B>> {
    match step(x)? {
        Step::Shifted(..) => Some(Waiting::like::<R>(x, Step::Root(x.clone()))),
        _ => None,
    }
}

pub(super) fn float_div<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    by: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    (x.dtype() == by.dtype() && is_same(x, root_mean_square(narrowed(by))?.0))
        .then(|| Waiting::like::<R>(x, Step::Normalized(x.clone(), by.clone())))
}

pub(super) fn sigmoid<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> Option<QuantTensor<B>> {
    is_one::<B, R>(flow::of::<B, R>(x), x, |_| true)
        .then(|| Waiting::like::<R>(x, Step::Sigmoid(x.clone())))
}

pub(super) fn float_mul_scalar<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    by: &Scalar,
) -> Option<QuantTensor<B>> {
    attention::float_mul_scalar::<B, R>(x, by)
        .or_else(|| dropout::scaled::<B, R>(x, by.elem::<f64>()))
}

pub(super) fn float_div_scalar<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    by: &Scalar,
) -> Option<QuantTensor<B>> {
    attention::float_div_scalar::<B, R>(x, by)
        .or_else(|| dropout::scaled::<B, R>(x, by.elem::<f64>().recip()))
}

pub(super) fn float_add<B: QuantBackend, R: Recipe>(
    left: &QuantTensor<B>,
    right: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    attention::float_add::<B, R>(left, right)
        .or_else(|| dropout::sum::<B, R>(left, right))
        .or_else(|| dropout::sum::<B, R>(right, left))
}

pub(super) fn float_mul<B: QuantBackend, R: Recipe>(
    left: &QuantTensor<B>,
    right: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    product::<B, R>(left, right)
        .or_else(|| product::<B, R>(right, left))
        .or_else(|| dropout::dropped::<B, R>(left, right))
        .or_else(|| dropout::dropped::<B, R>(right, left))
}

/// The product of what may wait, and of another tensor.
fn product<B: QuantBackend, R: Recipe>(
    waiting: &QuantTensor<B>,
    other: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    match step(waiting)? {
        Step::Sigmoid(x) if is_same(x, other) => Some(Waiting::like::<R>(
            x,
            Step::Silu(x.clone(), waiting.clone()),
        )),
        Step::Silu(gate, _) => swiglu::<B, R>(gate, other),
        Step::Spread(_, shape) => {
            (is_table(other) && other.shape()[..] == [1, shape[1], shape[2], 2]).then(|| {
                let scaled = Step::Scaled(waiting.clone(), other.clone());
                let dtype = match other.dtype() == waiting.dtype() {
                    true => waiting.dtype(),
                    false => DType::F32,
                };
                Waiting::of::<R>(waiting, scaled, shape.clone(), dtype)
            })
        }
        Step::Normalized(x, rms) => {
            let (_, epsilon) = root_mean_square(narrowed(rms))?;
            rms_norm::<B, R>(x, epsilon.elem(), other)
        }
        _ => None,
    }
}

/// The pairs that rotary positions begin with, what they spread to, or the end of the composition.
pub(super) fn float_reshape<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    shape: &Shape,
) -> Option<QuantTensor<B>> {
    let waiting = |step: fn(QuantTensor<B>, Shape) -> Step<B>| {
        Waiting::of::<R>(x, step(x.clone(), shape.clone()), shape.clone(), x.dtype())
    };
    match step(x) {
        Some(Step::Turned(..)) => {
            let of_turned = x.shape();
            let spread = [of_turned[0], of_turned[1], 2 * of_turned[2], 2];
            (shape[..] == spread).then(|| waiting(Step::Spread))
        }
        Some(Step::Summed(scaled)) => rotary::<B, R>(scaled, shape),
        Some(_) => None,
        None => begins_with_pairs::<B, R>(x, shape).then(|| waiting(Step::Paired)),
    }
}

/// True if `shape` has pairs of neighbours of rows at positions, and there is a kernel for what may follow.
fn begins_with_pairs<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>, shape: &Shape) -> bool {
    let of_x = x.shape();
    let rank = of_x.num_dims();
    (2..=4).contains(&rank)
        && matches!(shape[..], [_, positions, pairs, 2]
            if [positions, 2 * pairs] == of_x[rank - 2..])
        && kernels::<B, R>(x).is_some()
}

/// A product that goes on with a composition, or begins attention.
pub(super) fn float_matmul<B: QuantBackend, R: Recipe>(
    left: &QuantTensor<B>,
    right: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    match step(left) {
        Some(Step::Paired(_, shape)) => turned::<B, R>(left, shape, right),
        None | Some(Step::Widened(_)) => attention::scores::<B, R>(left, right),
        Some(_) => attention::context::<B, R>(left, right),
    }
}

/// A product of pairs of this shape and of what becomes of each.
fn turned<B: QuantBackend, R: Recipe>(
    pairs: &QuantTensor<B>,
    shape: &Shape,
    turn: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    (is_table(turn) && turn.shape()[..] == [1, 1, 2, 4]).then(|| {
        let turned = Shape::new([shape[0], shape[1], shape[2], 4]);
        let step = Step::Turned(pairs.clone(), turn.clone());
        Waiting::of::<R>(pairs, step, turned, R::row().compute.into())
    })
}

pub(super) fn float_sum_dim<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    dim: &usize,
) -> Option<QuantTensor<B>> {
    match step(x)? {
        Step::Scaled(..) if dim + 1 == x.rank() => {
            let mut shape = x.shape();
            shape[*dim] = 1;
            Some(Waiting::of::<R>(
                x,
                Step::Summed(x.clone()),
                shape,
                DType::F32,
            ))
        }
        _ => None,
    }
}

/// A tensor that is not trained, of FP32 or of a narrower dtype that is the device's default.
fn is_table<B: QuantBackend>(tensor: &QuantTensor<B>) -> bool {
    tensor.as_waiting().is_none() && is_float(tensor) && !B::is_tracked(tensor.primitive())
}

/// All of a table is the table itself: of the one that `burn::nn::RotaryEncoding` slices in every pass, beside which
/// [`Rotary`] keeps what it makes of it.
pub(super) fn float_slice<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    slices: &&[Slice],
) -> Option<QuantTensor<B>> {
    let shape = x.shape();
    let takes_all = slices.iter().zip(shape.iter()).all(|(slice, &length)| {
        let reaches_end = |end: isize| usize::try_from(end).is_ok_and(|end| end >= length);
        slice.start == 0 && slice.step == 1 && slice.end.is_none_or(reaches_end)
    });
    (takes_all && is_table(x) && kernels_of::<B, R>(x).is_some()).then(|| x.clone())
}

/// Rotary positions, if what was scaled began with pairs of a tensor of this shape.
fn rotary<B: QuantBackend, R: Recipe>(
    scaled: &QuantTensor<B>,
    shape: &Shape,
) -> Option<QuantTensor<B>> {
    let Step::Scaled(spread, table) = step(scaled)? else {
        return None;
    };
    let Step::Spread(turned, _) = step(spread)? else {
        return None;
    };
    let Step::Turned(pairs, turn) = step(turned)? else {
        return None;
    };
    let Step::Paired(x, _) = step(pairs)? else {
        return None;
    };
    (x.shape() == *shape && turn.dtype() == table.dtype()).then(|| {
        let _scope = QuantTrain::<B, R>::scope();
        let rotary = Rotary {
            table: (table.view() == View::Rows).then(|| table.tag().clone()),
        };
        let inputs = [x, turn, table].map(|it| it.clone().into_primitive());
        QuantTensor::new(B::record(rotary, inputs))
    })
}

/// Layer normalization, if it is one operation: of parameters with as many elements as a row.
pub(super) fn layer_norm<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    gain: &QuantTensor<B>,
    bias: Option<&QuantTensor<B>>,
    epsilon: f64,
) -> Option<QuantTensor<B>> {
    let columns = x.shape().last().copied()?;
    let fits = |it: &QuantTensor<B>| {
        it.shape().num_elements() == columns && it.dtype() == gain.dtype() && is_float(it)
    };
    if !(fits(gain) && bias.is_none_or(fits)) {
        return None;
    }
    let flow = flow_of::<B, R, 3>([x, gain, bias.unwrap_or(gain)]);
    if !is_one_norm::<B, R>(flow, x) {
        return None;
    }
    let norm = LayerNorm {
        epsilon,
        is_quantized_in: flow.and_then(|_| R::row().reads_x_in()),
    };
    let (x, gain) = (
        flow::enter_stream(flow, x.clone()),
        gain.clone().into_primitive(),
    );
    let output = match bias {
        Some(bias) => B::record(norm, [x, gain, bias.clone().into_primitive()]),
        None => B::record(norm, [x, gain]),
    };
    Some(flow::leave(flow, output))
}

fn is_float<B: QuantBackend>(tensor: &QuantTensor<B>) -> bool {
    tensor.dtype() == DType::F32 || is_narrow(tensor)
}

fn is_narrow<B: QuantBackend>(tensor: &QuantTensor<B>) -> bool {
    matches!(tensor.dtype(), DType::BF16 | DType::F16)
}

pub(super) fn gelu<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> Option<QuantTensor<B>> {
    let flow = flow_of::<B, R, 1>([x])?;
    let _scope = QuantTrain::<B, R>::scope();
    let x = flow::enter(Some(flow), x.clone());
    let gelu = Gelu {
        is_quantized: R::row().reads_x_in().is_some(),
    };
    Some(flow::leave(Some(flow), B::record(gelu, [x])))
}

/// Of logits as they are, before a cast to FP32 if they had one.
pub(super) fn log_softmax<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    dim: &usize,
) -> Option<QuantTensor<B>> {
    let x = match step(x) {
        Some(Step::Widened(narrow)) => narrow,
        _ => x,
    };
    let is_one = is_narrow(x) && dim + 1 == x.rank();
    (is_one && kernels_of::<B, R>(x).is_some()).then(|| {
        let _scope = QuantTrain::<B, R>::scope();
        QuantTensor::new(B::record(LogSoftmax, [x.clone().into_primitive()]))
    })
}

/// The most elements that a kernel of ours adds up. Of more, what a fused stream gains by computing them where it adds
/// them up is worth the kernels that Burn compiles and compares first: 0.7 s for each size (one NVIDIA H200,
/// 2026-11-28).
const FEW: usize = 1 << 18;

pub(super) fn float_sum<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> Option<QuantTensor<B>> {
    sum::<B, R>(x, Reduction::Sum)
}

pub(super) fn float_mean<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> Option<QuantTensor<B>> {
    sum::<B, R>(x, Reduction::Mean)
}

fn sum<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    reduction: Reduction,
) -> Option<QuantTensor<B>> {
    let is_one = is_float(x) && (1..=FEW).contains(&x.shape().num_elements());
    (is_one && kernels_of::<B, R>(x).is_some()).then(|| {
        let _scope = QuantTrain::<B, R>::scope();
        x.keep_loss();
        QuantTensor::new(B::record(Sum(reduction), [x.clone().into_primitive()]))
    })
}

fn swiglu<B: QuantBackend, R: Recipe>(
    gate: &QuantTensor<B>,
    up: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let fits = gate.shape() == up.shape() && gate.dtype() == up.dtype() && up.origin().is_none();
    let flow = flow_of::<B, R, 2>([gate, up]);
    (fits && is_one::<B, R>(flow, gate, |_| true)).then(|| {
        let _scope = QuantTrain::<B, R>::scope();
        let inputs = [gate, up].map(|it| flow::enter(flow, it.clone()));
        flow::leave(flow, B::record(Swiglu, inputs))
    })
}

/// RMSNorm, if the gain is a row with leading dimensions of size 1.
fn rms_norm<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    epsilon: f64,
    gain: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let (shape, of_gain) = (x.shape(), gain.shape());
    let fits = of_gain.last() == shape.last()
        && of_gain.num_elements() == shape[shape.num_dims() - 1]
        && of_gain.num_dims() == shape.num_dims()
        && is_float(gain);
    let flow = flow_of::<B, R, 2>([x, gain]);
    (fits && is_one::<B, R>(flow, x, |_| true)).then(|| {
        let _scope = QuantTrain::<B, R>::scope();
        let (x, gain) = (
            flow::enter_stream(flow, x.clone()),
            gain.clone().into_primitive(),
        );
        let norm = RmsNorm {
            epsilon,
            is_quantized_in: flow.and_then(|_| R::row().reads_x_in()),
        };
        flow::leave(flow, B::record(norm, [x, gain]))
    })
}
