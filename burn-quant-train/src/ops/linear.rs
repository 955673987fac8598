//! The quantized linear layer: Y = X W + bias, dX = dY Wᵀ, dW = Xᵀ dY, each product as its recipe's row says
//! (fallback-int8, section 5.1, where a row has fallback).
//!
//! Each pass is one operation of the backend that holds the data, so the operands that a pass makes for its products
//! never become tensors of a fused stream.

pub(crate) mod again;
mod history;
pub(crate) mod kept;
mod pass;
mod plan;

use std::sync::Arc;

use burn_backend::{DType, FloatDType, IntDType, Scalar, Shape, TensorMetadata, tensor::Device};

use self::{
    again::CopyAgain,
    history::History,
    pass::{Backward, BackwardInputs, Forward, ForwardInputs, Gradients},
    plan::{BackwardPlan, Plan, Stored},
};
use super::{
    matrix::{Form, InputSource, Source, bias_gradient, with_last},
    operand::Make,
    run::Run,
};
use crate::{
    data::{
        DataBackend, Layout,
        product::ProductInputs,
        quantize::{DelayedMaximum, Fallback, MatrixSource, Quantized, quantize_source},
    },
    layer::{
        Call, Layer,
        tag::{CopyKey, Epoch, FallbackCopy, Tag, View},
    },
    recipe::{Flow, LinearRow, Residual, SavedX},
    saved::{
        HeldTensor,
        later::{GradientCopy, Later, may_wait},
        recorded::Recorded,
        report::Operands,
    },
};

/// Y `[.., N]` = X `[.., K]` W `[K, N]` + bias `[N]`, of inputs X, W and, if there are three, the bias. W may have
/// leading dimensions of 1.
///
/// W is quantized once for each value that it takes, which is once in each optimizer step, for each of the row's casts
/// of it. An INT8 copy is one byte a parameter. A product that needs the other layout makes it for its own time.
#[derive(Clone)]
pub(crate) struct Linear<B: DataBackend> {
    /// The layer.
    pub layer: Arc<Layer<B>>,
    /// Which run of the layer it is.
    pub run: Run<Settled<B>>,
    /// The recipe's row.
    pub row: LinearRow,
    /// The dtype of Y, and of the operands of products that are not quantized.
    pub compute: FloatDType,
    /// The tag of X, if X is the matrix that the tag speaks of.
    pub x_tag: Option<Arc<Tag<B>>>,
    /// The tag of W.
    pub weight_tag: Arc<Tag<B>>,
    /// How W shows the tagged matrix: as it is, or transposed.
    pub weight_view: View,
    /// The flow that X came by, if it did: dX goes the same way.
    pub flow: Option<Flow>,
    /// True if Y may flow to an operator, which then computes it.
    pub may_flow: bool,
}

/// The state of the layer that both runs in a block share.
#[derive(Debug, Clone)]
pub(crate) struct Settled<B: DataBackend> {
    call: Call,
    /// The tag of X in the second run, which has the random numbers of copies for both.
    tag: Option<Arc<Tag<B>>>,
}

/// The operands that a linear layer keeps for the backward pass, and the plan of that pass.
#[derive(Debug)]
pub(crate) struct Saved<B: DataBackend> {
    /// Present if W needs a gradient.
    x: Option<Kept<B>>,
    /// Present if X needs a gradient.
    weight: Option<Kept<B>>,
    x_form: Form,
    weight_form: Form,
    bias: Option<DType>,
    plan: BackwardPlan,
    /// The copy of dX in which it flows back, if it does.
    input_gradient: Option<Make>,
    compute: FloatDType,
    /// Present if dY has a history of maxima.
    history: Option<History<B>>,
    noted: Operands,
}

impl<B: DataBackend> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self {
            x: self.x.clone(),
            weight: self.weight.clone(),
            x_form: self.x_form.clone(),
            weight_form: self.weight_form.clone(),
            history: self.history.clone(),
            noted: self.noted.clone(),
            ..*self
        }
    }
}

/// An operand that waits for the backward pass.
#[derive(Debug)]
enum Kept<B: DataBackend> {
    Copy(Arc<Quantized<B>>),
    Float(HeldTensor<B>),
    Again(Arc<CopyAgain<B>>),
}

impl<B: DataBackend> Clone for Kept<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Copy(copy) => Self::Copy(copy.clone()),
            Self::Float(tensor) => Self::Float(tensor.clone()),
            Self::Again(copy) => Self::Again(copy.clone()),
        }
    }
}

impl<B: DataBackend> From<Kept<B>> for Source<B> {
    fn from(kept: Kept<B>) -> Self {
        match kept {
            Kept::Copy(copy) => Self::Copy(Quantized::clone(&copy)),
            Kept::Float(tensor) => Self::Float(tensor.into_value()),
            Kept::Again(copy) => Self::Copy(Quantized::clone(&copy.copy())),
        }
    }
}

impl<B: DataBackend> Linear<B> {
    /// The forward pass, and Y if it is wanted.
    fn pass<const N: usize>(
        self,
        inputs: [HeldTensor<B>; N],
        wanted: [bool; N],
        wants_y: bool,
    ) -> (Option<HeldTensor<B>>, Saved<B>) {
        let mut inputs = inputs.into_iter();
        let (Some(x), Some(weight), bias) = (inputs.next(), inputs.next(), inputs.next()) else {
            unreachable!("a linear layer has X and W");
        };
        let [wants_x, wants_weight] = [wanted[0], wanted[1]];
        let device = x.cell().device().clone();
        let bank = self.layer.bank();
        let (call, draws) = match &self.run {
            Run::Next => (self.layer.next_call(&device), None),
            Run::First(settled) | Run::Second(settled) => (settled.call, settled.tag.as_ref()),
        };
        let is_counted = !self.run.is_second();
        let plan = Plan::new(&self.layer, &self.row, self.weight_view, call);
        let input_gradient = self
            .flow
            .and_then(|flow| plan.input_gradient(&self.layer, &flow));
        let forms = [Form::of(&x), Form::of(&weight)];
        let bias_dtype = bias.as_ref().map(TensorMetadata::dtype);

        let [x_history, weight_history, gradient_history] =
            History::of_row(&self.row, &self.layer, plan.call);
        let delayed = |history: &Option<History<B>>| history.as_ref().map(|it| it.delayed(&device));

        // X: copies that other layers made of it are good for this one too.
        let of_x = |key: CopyKey| self.x_tag.as_ref()?.find(key, plan.epoch(bank, key));
        let drawn = |make: Make| match draws {
            None => make,
            Some(tag) => {
                let key = make.factor.key;
                make.drawn(|random| tag.draw(key, plan.epoch(bank, key), random))
            }
        };
        let saved_make = plan.saved.filter(|_| wants_weight).map(drawn);
        let saved = saved_make.and_then(|make| of_x(make.factor.key));
        let of_again = saved_make.filter(|_| saved.is_none() && plan.is_made_again);
        let again = of_again.and_then(|make| {
            let key = make.factor.key;
            let copy = || Some(CopyAgain::new(make, x.cell().rematerialized()?));
            match &self.x_tag {
                Some(tag) => tag.keep_again(key, plan.epoch(bank, key), copy),
                None => copy().map(Arc::new),
            }
        });
        let to_save = saved_make.filter(|_| saved.is_none() && again.is_none());
        let shares_operand = plan.residual == Residual::Never && self.x_tag.is_some();
        // With fallback, what the first of the layers quantized with its threshold: they move alike.
        let fallback_tag = match plan.residual {
            Residual::Above(_) => self.x_tag.as_ref(),
            Residual::Never | Residual::Always => None,
        };
        let fallback_key = plan.forward.map(|[x, _]| x.factor.key);
        let led = match (fallback_tag, fallback_key, to_save) {
            (Some(tag), Some(key), None) => tag.find_fallback(key, &Epoch::of(bank, call)),
            _ => None,
        };
        let product = plan.forward.map(|[x, weight]| match shares_operand {
            true => [drawn(x), weight],
            false => [x, weight],
        });
        let operand = match product {
            Some([make, _]) if shares_operand => of_x(make.factor.key),
            _ => led.as_ref().map(|copy| copy.base.clone()),
        };
        let kept_x = match (self.row.saved_x, wants_weight) {
            (SavedX::Input, true) => Some(Kept::Float(x.clone())),
            (SavedX::Input, false) | (SavedX::Operand, _) => None,
        };
        // A copy with a history brings its maximum along.
        let is_noted = matches!(product, Some([make, _]) if make.has_history());
        let waits_for_reader = wants_y
            && self.may_flow
            && product.is_some()
            && plan.residual == Residual::Never
            && may_wait(&wanted);
        let is_kept = shares_operand || is_noted || fallback_tag.is_some() || waits_for_reader;
        let keeps_operand = is_kept && operand.is_none();
        let later = x.cell().waits_for_reader().filter(|later| {
            let is_quantized_here = !matches!(later, Later::Product(_) | Later::Gradient(..));
            kept_x.is_none() && is_quantized_here
        });
        let x = match (&operand, to_save, &later) {
            (Some(copy), None, _) => InputSource::Copy(Quantized::clone(copy)),
            (_, _, Some(Later::Swiglu(factors))) => InputSource::Floats(factors.source()),
            (_, _, Some(Later::OfOne(of_one))) if product.is_some() => {
                InputSource::Floats(of_one.source())
            }
            (_, _, _) => InputSource::Floats(MatrixSource::Floats(x.into_value())),
        };

        // W: likewise, from run to run.
        let of_weight = |key: CopyKey| self.weight_tag.find(key, plan.weight_epoch(bank, key));
        let copy = plan.weight.and_then(|it| of_weight(it.key));
        let other = plan.other_weight.and_then(|it| of_weight(it.key));
        let missing = (plan.weight.is_some() && copy.is_none())
            || (plan.other_weight.is_some() && other.is_none());
        let weight_source = match &copy {
            Some(copy) if !missing => Source::Copy(Quantized::clone(copy)),
            _ => Source::Float(weight.cell().read()),
        };
        let operation = Forward {
            x_shape: forms[0].shape.clone(),
            shape: with_last(&forms[0].shape, &forms[1].shape),
            product,
            accumulation: plan.accumulation,
            keeps_operand,
            saved: to_save,
            weight: plan.weight.filter(|_| missing),
            other_weight: plan.other_weight.filter(|_| missing),
            transposed_weight: self.weight_view == View::Transposed,
            compute: self.compute,
            wants_y: wants_y && !waits_for_reader,
            keeps_factor: waits_for_reader,
        };
        let shape = operation.shape.clone();
        let factor_bias = bias.as_ref().filter(|_| waits_for_reader);
        let factor_bias = factor_bias.map(|bias| bias.clone().into_value());
        let inputs = |fallback| ForwardInputs {
            x,
            weight: weight_source,
            bias: bias.map(HeldTensor::into_value),
            fallback,
            residual: led.as_ref().map(|copy| copy.residual.clone()),
            delayed: [delayed(&x_history), delayed(&weight_history)],
        };
        let mut output = match plan.residual {
            Residual::Never => B::run(operation, inputs(None)),
            Residual::Always => B::run(operation, inputs(Some(every_block::<B>(&device)))),
            Residual::Above(slot) if led.is_some() => {
                let output = B::run(operation, inputs(None));
                if let Some(copy) = led.as_ref().filter(|_| is_counted) {
                    self.layer.follow(slot, &device, call, copy.layer);
                }
                output
            }
            Residual::Above(slot) => self.layer.with_fallback(slot, &device, |fallback| {
                let before = (!is_counted).then(|| fallback.counts.clone());
                let mut output = B::run(operation, inputs(Some(fallback)));
                let counts = output.counts.take();
                let counts = counts.expect("a fallback state goes in and comes out");
                (output, before.unwrap_or(counts))
            }),
        };

        // Each copy that was made stays with its tensor.
        if let Some((Later::Swiglu(factors), contexts)) = later.zip(output.contexts.take()) {
            factors.keep(contexts);
        }
        let keep_x = |make: Make, copy| match &self.x_tag {
            Some(tag) => tag.keep(make.factor.key, plan.epoch(bank, make.factor.key), copy),
            None => Arc::new(copy),
        };
        let made_operand = output.operand.zip(product);
        let made_operand = made_operand.map(|(copy, [make, _])| {
            let (Some(tag), Some(residual)) = (fallback_tag, output.residual) else {
                return keep_x(make, copy);
            };
            let base = Arc::new(copy);
            let copy = FallbackCopy {
                base: base.clone(),
                residual,
                layer: self.layer.index(),
            };
            tag.keep_fallback(make.factor.key, Epoch::of(bank, call), copy);
            base
        });
        let operand = operand.or(made_operand);
        let made = output
            .saved
            .zip(to_save)
            .map(|(copy, make)| keep_x(make, copy));
        let keep_weight = |stored: Option<Stored>, made: Option<Quantized<B>>| {
            let stored = stored?;
            let epoch = plan.weight_epoch(bank, stored.key);
            made.map(|copy| self.weight_tag.keep(stored.key, epoch, copy))
        };
        let of_product = copy.as_deref().filter(|_| waits_for_reader);
        let factor = output.factor.or_else(|| of_product.cloned());
        let copy = keep_weight(plan.weight, output.weight).or(copy);
        let other = keep_weight(plan.other_weight, output.other_weight).or(other);
        let saved = saved.or(made);
        if let Some(history) = x_history.filter(|_| is_counted) {
            history.note_copies(&device, [operand.as_ref(), saved.as_ref()]);
        }
        if let Some(history) = weight_history.filter(|_| is_counted) {
            history.note_copies(&device, [copy.as_ref(), other.as_ref()]);
        }
        let [x_form, weight_form] = forms;
        let x = kept_x.or(saved.map(Kept::Copy)).or(again.map(Kept::Again));
        let mut noted = Operands::default();
        if let Some(Kept::Copy(copy)) = &x {
            noted.note(false, copy, &x_form.shape, x_form.dtype.into());
        }
        for copy in [&copy, &other].into_iter().flatten() {
            noted.note(true, copy, &weight_form.shape, weight_form.dtype.into());
        }
        let kept_weight = || match plan.backward.input {
            None => Kept::Float(weight),
            Some(_) => Kept::Copy(
                other
                    .or(copy)
                    .expect("a weight is quantized before or by the operation"),
            ),
        };
        let y = output.y.map(|y| HeldTensor::of("linear", y)).or_else(|| {
            let ([of_x, of_weight], operand, weight) = (product?, operand?, factor?);
            let operands = [
                of_x.factor.operand(&*operand),
                of_weight.factor.operand(&weight),
            ];
            let how = (plan.accumulation, self.compute);
            let product = ProductInputs::new(operands, factor_bias, how, shape.clone());
            let form = (shape, DType::from(self.compute), device.clone());
            Some(HeldTensor::later(
                "linear",
                Later::Product(Box::new(product)),
                form,
            ))
        });
        if let Some(y) = &y
            && wants_x
            && x.is_some()
            && bias_dtype.is_none()
            && let Some(copy) = gradient_copy(&plan.backward, gradient_history.as_ref(), &device)
        {
            y.cell().will_quantize_gradient(copy);
        }
        if let Some(y) = y.as_ref().filter(|_| self.may_flow) {
            y.cell().note_layer();
        }
        let saved = Saved {
            x,
            weight: wants_x.then(kept_weight),
            x_form,
            weight_form,
            bias: bias_dtype,
            plan: plan.backward,
            input_gradient,
            compute: self.compute,
            history: gradient_history,
            noted,
        };
        (y, saved)
    }
}

impl<B: DataBackend, const N: usize> Recorded<B, N> for Linear<B> {
    type Saved = Saved<B>;

    /// With a tag of X of its own: copies in the first one would wait for the second run.
    fn again(&mut self, inputs: &[HeldTensor<B>; N]) -> Option<Self> {
        let call = self.layer.next_call(inputs[0].cell().device());
        let tag = self.x_tag.as_ref().map(|tag| tag.second_run());
        let settled = Settled { call, tag };
        self.run = Run::First(settled.clone());
        Some(Self {
            x_tag: settled.tag.clone(),
            run: Run::Second(settled),
            ..self.clone()
        })
    }

    fn forward(self, inputs: [HeldTensor<B>; N], wanted: [bool; N]) -> (HeldTensor<B>, Saved<B>) {
        let (y, saved) = self.pass(inputs, wanted, true);
        (y.expect("Y was wanted"), saved)
    }

    fn save(self, inputs: [HeldTensor<B>; N], wanted: [bool; N]) -> Saved<B> {
        self.pass(inputs, wanted, false).1
    }

    fn backward_held(
        saved: Saved<B>,
        (gradient, _): (HeldTensor<B>, Option<HeldTensor<B>>),
        wanted: [bool; N],
    ) -> [Option<HeldTensor<B>>; N] {
        let [wants_x, wants_weight] = [wanted[0], wanted[1]];
        let wants_bias = wanted.get(2).copied().unwrap_or_default();
        let device = gradient.cell().device().clone();
        let of_bias = saved.bias.filter(|_| wants_bias);
        let mut of_bias = of_bias.map(|dtype| bias_gradient::<B>(&gradient.cell().read(), dtype));
        let copy = match wants_x && wants_weight {
            true => copy_of_gradient(&saved.plan, &gradient),
            false => None,
        };
        let (gradient, absmax, delayed) = match copy {
            Some(copy) => {
                // What both gradients are computed from waits no longer than for the second.
                drop(gradient);
                let absmax = copy.absmax.clone();
                (Source::Copy(copy), absmax, None)
            }
            None => {
                let delayed = saved.history.as_ref().map(|it| it.delayed(&device));
                (Source::Float(gradient.into_value()), None, delayed)
            }
        };
        let weight = saved.weight.filter(|_| wants_x);
        let x = saved.x.filter(|_| wants_weight);
        let operation = Backward {
            input: weight.is_some().then_some(saved.x_form),
            weight: x.is_some().then_some(saved.weight_form),
            plan: saved.plan,
            input_gradient: saved.input_gradient,
            compute: saved.compute,
        };
        let mut gradients = match (&weight, &x) {
            (None, None) => Gradients {
                input: None,
                weight: None,
                absmax: None,
            },
            _ => B::run(
                operation,
                BackwardInputs {
                    gradient,
                    weight: weight.map(Source::from),
                    x: x.map(Source::from),
                    delayed,
                },
            ),
        };
        let absmax = gradients.absmax.take().or(absmax);
        if let Some((history, absmax)) = saved.history.zip(absmax) {
            history.note(&device, absmax);
        }
        std::array::from_fn(|index| match index {
            0 => gradients
                .input
                .take()
                .map(|of_x| HeldTensor::of_input("linear", of_x, &device)),
            1 => gradients.weight.take().map(HeldTensor::new),
            _ => of_bias.take().map(HeldTensor::new),
        })
    }
}

/// The copy of dY that both backward products read, where it is one.
fn gradient_make(plan: &BackwardPlan) -> Option<Make> {
    let ([first, _], [_, second]) = (plan.input?, plan.weight?);
    (first.is_same_as(&second) && first.takes_matrix()).then_some(first)
}

/// How dY is quantized, where that makes one copy.
fn gradient_copy<B: DataBackend>(
    plan: &BackwardPlan,
    history: Option<&History<B>>,
    device: &Device<B>,
) -> Option<GradientCopy<B>> {
    let make = gradient_make(plan)?;
    let delayed = history.map(|history| {
        let (history, device) = (history.clone(), device.clone());
        let delayed = move || history.delayed(&device);
        Arc::new(delayed) as Arc<dyn Fn() -> DelayedMaximum<B> + Send + Sync>
    });
    Some(GradientCopy {
        spec: make.spec(Layout::Both),
        delayed,
    })
}

/// The copy of dY that the operation behind this one makes as it computes it.
fn copy_of_gradient<B: DataBackend>(
    plan: &BackwardPlan,
    gradient: &HeldTensor<B>,
) -> Option<Quantized<B>> {
    let make = gradient_make(plan)?;
    let spec = make.spec(Layout::Both);
    match gradient.cell().waits_for_reader()? {
        Later::Gradient(pair, factor) => pair.copy(factor, &spec),
        Later::OfOne(of_one) if !make.has_history() => {
            Some(quantize_source::<B>(of_one.source(), &spec))
        }
        Later::Swiglu(_) | Later::OfOne(_) | Later::Product(_) => None,
    }
}

/// A state in which every finite block falls back.
fn every_block<B: DataBackend>(device: &Device<B>) -> Fallback<B> {
    Fallback {
        layer: 0,
        thresholds: B::float_full(
            Shape::new([1]),
            Scalar::from(-1.0f32),
            device,
            FloatDType::F32,
        ),
        counts: B::int_zeros(Shape::new([1, 2]), device, IntDType::I32),
    }
}
