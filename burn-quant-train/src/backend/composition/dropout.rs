//! Dropout as `burn::nn::Dropout` has it: a tensor times zeros and ones, and times the inverse of the share that stays; and
//! its sum with a residual. One kernel draws, multiplies and adds, and draws the same again for the gradient, so no zeros
//! and ones wait.

use std::sync::OnceLock;

use burn_backend::{
    Distribution, FloatDType, Scalar, Shape, TensorData, TensorMetadata, get_device_settings,
    ops::BoolTensorOps, tensor::Device,
};
use cubecl_kernels::dropout::Draw;

use super::{OneByOne, Step, Waiting, attention, flow_of, is_float, is_one, step};
use crate::{
    backend::{QuantTrain, flow, tensor::QuantTensor},
    data::{
        DataBackend, StochasticKey,
        composition::{CompositionKernels, operations::rows_and_columns},
    },
    layer::dropout_key,
    ops::dropout::{Dropout, ResidualSum},
    recipe::{Flow, Recipe},
    saved::recorded::QuantBackend,
};

/// How far a factor may be from the inverse of the share that stays.
const CLOSE: f64 = 1e-6;

/// Zeros and ones, drawn by the backend when they are read, or by a kernel.
#[derive(Debug)]
pub(super) struct Drawn<B: QuantBackend> {
    /// The share of ones.
    pub(super) keep: f64,
    shape: Shape,
    dtype: FloatDType,
    device: Device<B>,
    /// Whoever drew them, once somebody has: one for all readers.
    source: OnceLock<Source>,
}

/// Who draws zeros and ones.
#[derive(Debug)]
enum Source {
    Backend,
    /// A kernel, by this key.
    Kernel(StochasticKey),
}

impl<B: QuantBackend> Drawn<B> {
    pub(super) fn compute<R: Recipe>(&self) -> QuantTensor<B> {
        type By<B, R> = QuantTrain<B, R>;
        let key = match self.source.get_or_init(|| Source::Backend) {
            Source::Backend => {
                let (shape, keep) = (self.shape.clone(), Distribution::Bernoulli(self.keep));
                return By::<B, R>::drawn(shape, keep, &self.device, self.dtype);
            }
            Source::Kernel(key) => *key,
        };
        let [rows, columns] = rows_and_columns(&self.shape);
        let factors = self.draw_by(key).factors(rows, columns);
        let kept = factors.into_iter().map(|factor| factor != 0.0).collect();
        let kept = TensorData::new::<bool, _>(kept, self.shape.clone());
        let bools = get_device_settings::<By<B, R>>(&self.device).bool_dtype;
        let kept = By::<B, R>::bool_from_data(kept.convert_dtype(bools.into()), &self.device);
        By::<B, R>::bool_into_float(kept, self.dtype)
    }

    /// The key of the kernel that draws them, unless the backend has.
    fn key(&self) -> Option<StochasticKey> {
        match self.source.get_or_init(|| Source::Kernel(dropout_key())) {
            Source::Kernel(key) => Some(*key),
            Source::Backend => None,
        }
    }

    /// How a kernel draws them by this key.
    pub(super) fn draw_by(&self, key: StochasticKey) -> Draw {
        Draw {
            rate: (1.0 - self.keep) as f32,
            key,
        }
    }

    /// How a kernel draws them, unless the backend has.
    pub(super) fn draw(&self) -> Option<Draw> {
        Some(self.draw_by(self.key()?))
    }
}

/// Zeros and ones that dropout may multiply by, in training, in a flow and where there are kernels, of attention at least. They
/// are drawn when they are used first, which dropout does at once.
pub(in crate::backend) fn float_random<B: QuantBackend, R: Recipe>(
    shape: &Shape,
    distribution: Distribution,
    device: &Device<B>,
    dtype: FloatDType,
) -> Option<QuantTensor<B>> {
    let Distribution::Bernoulli(keep) = distribution else {
        return None;
    };
    // Kernels have what is left as one less an f32: of a hundredth that is good to five digits.
    let drops = (0.01..=1.0).contains(&keep);
    type Kernels<B> = <<B as QuantBackend>::Base as DataBackend>::Kernels;
    let is_one = R::row().flow.is_some() || Kernels::<B>::composition_kernels(device).is_some();
    let may_be = is_one || attention::may_have_dropout::<B, R>(shape, device, dtype);
    if !B::RECORDS || shape.is_empty() || !drops || !may_be {
        return None;
    }
    let drawn = Drawn {
        keep,
        shape: shape.clone(),
        dtype,
        device: device.clone(),
        source: OnceLock::new(),
    };
    Some(Waiting::on::<R>(
        device.clone(),
        Step::Drawn(drawn),
        shape.clone(),
        dtype.into(),
    ))
}

/// What may be dropped, times zeros and ones: scores or probabilities of attention, and where dropout is one operation any
/// tensor.
pub(super) fn dropped<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    drawn: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let Step::Drawn(of) = step(drawn)? else {
        return None;
    };
    let is_alike = of.shape == x.shape() && drawn.dtype() == x.dtype();
    (is_alike && (attention::may_drop(x) || may_drop::<B, R>(x)))
        .then(|| Waiting::like::<R>(x, Step::Dropped(x.clone(), drawn.clone())))
}

/// True if dropout of this tensor is one operation: in a flow, or where there are kernels.
fn may_drop<B: QuantBackend, R: Recipe>(x: &QuantTensor<B>) -> bool {
    is_float(x)
        && x.as_waiting().is_none()
        && x.origin().is_none()
        && is_one::<B, R>(flow_of::<B, R, 1>([x]), x, |_| true)
}

/// What is dropped, times this factor, if that makes it dropout.
pub(super) fn scaled<B: QuantBackend, R: Recipe>(
    dropped: &QuantTensor<B>,
    factor: f64,
) -> Option<QuantTensor<B>> {
    let Step::Dropped(x, drawn) = step(dropped)? else {
        return None;
    };
    let Step::Drawn(of) = step(drawn)? else {
        return None;
    };
    let completes = (factor * of.keep - 1.0).abs() < CLOSE && may_drop::<B, R>(x);
    let step = || Step::DroppedOut(x.clone(), drawn.clone(), Scalar::from(factor));
    completes.then(|| Waiting::like::<R>(x, step()))
}

/// The sum of a residual, and of a branch: dropout that waits, or a layer's output of which a flow's sums read what flows.
pub(super) fn sum<B: QuantBackend, R: Recipe>(
    residual: &QuantTensor<B>,
    branch: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let fits = residual.shape() == branch.shape()
        && residual.dtype() == branch.dtype()
        && residual.origin().is_none();
    if !fits {
        return None;
    }
    match step(branch) {
        Some(Step::DroppedOut(x, drawn, _)) => dropout::<B, R>(x, drawn, Some(residual)),
        Some(_) => None,
        // Of two layers neither is the branch, and neither is that of which a model begins: it adds a parameter.
        None if is_of_layer(residual) || residual.tag().is_parameter() => None,
        None => {
            let flow = Some(of_branch::<B, R>(branch)?);
            let _scope = QuantTrain::<B, R>::scope();
            let branch = flow::enter(flow, branch.clone());
            let residual = residual.clone().into_primitive();
            Some(QuantTensor::new(B::record(ResidualSum, [branch, residual])))
        }
    }
}

/// The flow by which a branch comes to the residual stream, if gradients flow too, and a layer made the branch. What a model
/// begins with, the stream itself, and COAT's branches (coat-fp8, appendix G.5) are read as they are.
fn of_branch<B: QuantBackend, R: Recipe>(branch: &QuantTensor<B>) -> Option<Flow> {
    let flow = flow_of::<B, R, 1>([branch]).filter(|flow| flow.gradients.is_some())?;
    is_of_layer(branch).then_some(flow)
}

/// Dropout by itself.
pub(super) fn compute<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    drawn: &QuantTensor<B>,
    factor: Scalar,
) -> QuantTensor<B> {
    dropout::<B, R>(x, drawn, None).unwrap_or_else(|| {
        type By<B, R> = QuantTrain<B, R>;
        let dropped = <By<B, R> as OneByOne>::float_mul(x.clone(), drawn.clone());
        <By<B, R> as OneByOne>::float_mul_scalar(dropped, factor)
    })
}

/// Dropout of x, and the sum with a residual if there is one; `None` where the backend has drawn the zeros and ones.
fn dropout<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    drawn: &QuantTensor<B>,
    residual: Option<&QuantTensor<B>>,
) -> Option<QuantTensor<B>> {
    let Step::Drawn(of) = step(drawn)? else {
        return None;
    };
    let dropout = Dropout(of.draw()?);
    let flow = of_branch::<B, R>(x);
    let _scope = QuantTrain::<B, R>::scope();
    let x = flow::enter(flow, x.clone());
    Some(match residual {
        None => flow::leave(flow, B::record(dropout, [x])),
        Some(residual) => {
            let residual = residual.clone().into_primitive();
            QuantTensor::new(B::record(dropout, [x, residual]))
        }
    })
}

fn is_of_layer<B: QuantBackend>(tensor: &QuantTensor<B>) -> bool {
    let is_there = tensor.as_waiting().is_none();
    is_there && B::cell(tensor.primitive()).is_some_and(|cell| cell.is_of_layer())
}
