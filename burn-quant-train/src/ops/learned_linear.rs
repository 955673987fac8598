//! The linear layer with learned step sizes: Y = X W + bias of matrices that are transformed and quantized to INT4, and
//! gradients of X, of W and of both step sizes (int4-hq-lss: HQ-MM, section 3.3; LSS-MM, section 4.2; Appendix A.3).
//!
//! The forward product is of codes of `X H` and `H W`: H is symmetric and orthogonal, so the transforms cancel.
//! Backward, products give the gradients of the values that the codes stand for, and the straight-through estimator
//! those of X, W and the steps.

mod choice;
pub(crate) mod evaluation;
pub(super) mod pass;

use std::sync::Arc;

use burn_backend::{DType, FloatDType, TensorMetadata, tensor::FloatTensor};

use self::pass::{
    Backward, BackwardInputs, Forward, ForwardInputs, GradientKeys, GradientOperand, Gradients,
};
use super::{
    matrix::{Form, Source, bias_gradient, flattened, with_last},
    run::Run,
};
use crate::{
    data::{
        DataBackend, Layout, StochasticKey,
        learned_step::{HadamardSize, HadamardTransform, LearnedMatrix, ResidualRows, spec},
        quantize::{Format, Quantized},
        tensors::{self, Outline},
    },
    layer::{
        Call, Layer, Role,
        tag::{CopyKey, Epoch, Tag, View},
    },
    recipe::{LearnedSlots, LinearRow, Rounding},
    saved::{HeldTensor, recorded::Recorded, report::Operands},
};

/// Y `[.., N]` = X `[.., K]` W `[K, N]` + bias `[N]`, of inputs X, W and, if there are three, the bias. W may have
/// leading dimensions of 1.
///
/// W is quantized once in each optimizer step, in both layouts: a byte a parameter.
#[derive(Clone)]
pub(crate) struct LearnedLinear<B: DataBackend> {
    /// The layer.
    pub layer: Arc<Layer<B>>,
    /// Which run of the layer it is.
    pub run: Run<Settled>,
    /// The recipe's row.
    pub row: LinearRow,
    /// The row's slots.
    pub slots: LearnedSlots,
    /// The dtype of Y.
    pub compute: FloatDType,
    /// The tag of W.
    pub weight_tag: Arc<Tag<B>>,
    /// How W shows the tagged matrix: as it is, or transposed.
    pub weight_view: View,
}

/// The state of the layer that a run takes, and may move, beside the step sizes themselves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    pub call: Call,
    /// The size of the transform.
    pub size: HadamardSize,
    /// True if X has the step size of a cold start, which is of its own data; and the same of W.
    pub are_cold: [bool; 2],
}

impl Settled {
    /// Counts a run of the layer, and settles what it is. `x` `[.., K]`, `weight` `[.., K, N]`.
    pub fn next<B: DataBackend>(
        layer: &Layer<B>,
        slots: LearnedSlots,
        [x, weight]: [&HeldTensor<B>; 2],
    ) -> Self {
        let device = x.cell().device();
        let call = layer.next_call(device);
        let [_, features] = flattened(&x.shape());
        let size = match slots.hadamard {
            None => HadamardSize::IDENTITY,
            Some(slot) => layer.hadamard_size(slot, device, call, |choice| {
                let [x, weight] = [x, weight].map(|it| it.cell().read());
                choice::hadamard_size::<B>(choice, features, &x, &weight)
            }),
        };
        Self {
            call,
            // A weight that is also used transposed has other input features there, and a product of activations has
            // those of the data.
            size: HadamardSize::largest(features, size),
            are_cold: slots
                .of_operands()
                .map(|slot| layer.step_size(slot, device, call.step).is_cold),
        }
    }
}

/// The matrices that a layer keeps for the backward pass, and what it is to do with them.
pub(crate) struct Saved<B: DataBackend> {
    layer: Arc<Layer<B>>,
    call: Call,
    slots: LearnedSlots,
    /// True if the step sizes are learned in this step.
    learns: bool,
    /// Present if a gradient is wanted.
    operands: Option<Matrices<B>>,
    x_form: Form,
    weight_form: Form,
    bias: Option<DType>,
    backward: Backward,
    noted: Operands,
}

impl<B: DataBackend> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            operands: self.operands.clone(),
            x_form: self.x_form.clone(),
            weight_form: self.weight_form.clone(),
            backward: self.backward.clone(),
            noted: self.noted.clone(),
            ..*self
        }
    }
}

impl<B: DataBackend> std::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved")
            .field("layer", &self.layer.path())
            .field("backward", &self.backward)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
struct Matrices<B: DataBackend> {
    x: LearnedMatrix<B>,
    weight: Arc<Quantized<B>>,
    /// W itself, which its quantizer's backward pass reads again.
    exact_weight: HeldTensor<B>,
}

/// Rows of X that keep residuals, at least: so many that the gradient of a step size is not left to chance.
const MIN_RESIDUAL_ROWS: usize = 128;
/// One row of so many keeps residuals, at most: 1/64 byte for an element of X.
const MAX_RESIDUAL_INTERVAL: usize = 64;

/// The rows of X that keep residuals, drawn by the key; the fewest that there can be where no step size is learned.
pub(super) fn residual_rows(rows: usize, learns: bool, key: StochasticKey) -> ResidualRows {
    let interval = match learns {
        true => (rows / MIN_RESIDUAL_ROWS).clamp(1, MAX_RESIDUAL_INTERVAL),
        false => rows.clamp(1, usize::from(u16::MAX)),
    };
    // The stream is a hash without the seed.
    let random = key.stream ^ key.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let offset = ((random >> 32) % interval as u64) as usize;
    ResidualRows::new(interval, offset).expect("an offset is below its interval")
}

/// As many rows of X as may keep residuals.
pub(crate) fn most_residual_rows(rows: usize) -> ResidualRows {
    residual_rows(rows, true, StochasticKey { seed: 0, stream: 0 })
}

/// Identifies the copy of the tagged matrix after this transform.
fn weight_key(transform: HadamardTransform) -> CopyKey {
    CopyKey {
        format: Format::of(&spec(Layout::Both)),
        rounding: Rounding::Nearest,
        of_transpose: false,
        learned: Some(transform),
        rotated: false,
        history: None,
        layout: Layout::Both,
    }
}

impl<B: DataBackend> LearnedLinear<B> {
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
        // The quantizer's backward pass compares W with its clamp.
        weight.cell().keep_exact();
        let device = x.cell().device().clone();
        let slots = self.slots;
        let forms = [Form::of(&x), Form::of(&weight)];
        let bias_dtype = bias.as_ref().map(TensorMetadata::dtype);
        let [rows, _] = flattened(&forms[0].shape);
        let is_transposed = self.weight_view == View::Transposed;

        let settled = match self.run {
            Run::Next => Settled::next(&self.layer, slots, [&x, &weight]),
            Run::First(settled) | Run::Second(settled) => settled,
        };
        let x = x.into_value();
        let Settled {
            call,
            size,
            are_cold: [is_cold, is_cold_weight],
        } = settled;
        let key = |role| self.layer.key(call, role);
        let steps = |slot| self.layer.step_size(slot, &device, call.step).steps;
        // The inputs of the layer are the rows of W.
        let of_tagged = match is_transposed {
            true => HadamardTransform::of_columns(size),
            false => HadamardTransform::of_rows(size),
        };
        let learns = !is_cold && !is_cold_weight;

        let copy_key = weight_key(of_tagged);
        let epoch = || Some(Epoch::of(self.layer.bank(), call.of_weight()));
        let copy = self.weight_tag.find(copy_key, epoch());
        let needs_backward = (wanted[0] || wanted[1]) && !self.run.is_first();
        let operation = Forward {
            x_shape: forms[0].shape.clone(),
            shape: with_last(&forms[0].shape, &forms[1].shape),
            compute: self.compute,
            size,
            of_tagged,
            layer: self.layer.index(),
            sets_step: is_cold,
            sets_weight_step: copy.is_none() && is_cold_weight,
            transposed_weight: is_transposed,
            wants_y,
            keeps_x: needs_backward.then(|| residual_rows(rows, learns, key(Role::ResidualRows))),
        };
        let inputs = ForwardInputs {
            x,
            weight: match &copy {
                Some(copy) => Source::Copy(Quantized::clone(copy)),
                None => Source::Float(weight.cell().read()),
            },
            bias: bias.map(HeldTensor::into_value),
            steps: steps(slots.x),
            weight_steps: copy.is_none().then(|| steps(slots.weight)),
        };
        let output = B::run(operation, inputs);
        let sets = !self.run.is_second();
        if let Some(steps) = output.steps.filter(|_| sets) {
            self.layer.set_step_size(slots.x, &device, call, steps);
        }
        if let Some(steps) = output.weight_steps.filter(|_| sets) {
            self.layer.set_step_size(slots.weight, &device, call, steps);
        }
        let made = output
            .weight
            .map(|made| self.weight_tag.keep(copy_key, epoch(), made));
        let copy = copy
            .or(made)
            .expect("a weight is quantized before or by the operation");

        let [x_form, weight_form] = forms;
        let mut noted = Operands::default();
        if let Some(x) = &output.x {
            let number = x.matrix.format.number;
            let bytes = || tensors::bytes_of::<LearnedMatrix<Outline>, B>(x.clone());
            noted.note_own(number, &x_form.shape, x_form.dtype.into(), bytes);
            noted.note(true, &copy, &weight_form.shape, weight_form.dtype.into());
        }
        let saved = Saved {
            call,
            slots,
            learns,
            operands: output.x.map(|x| Matrices {
                x,
                weight: copy,
                exact_weight: weight,
            }),
            x_form,
            weight_form,
            bias: bias_dtype,
            backward: Backward {
                input: None,
                weight: None,
                size,
                gradient: GradientOperand::of(&self.row),
                keys: GradientKeys::of(&self.layer, call),
                transposed_weight: is_transposed,
                compute: self.compute,
            },
            layer: self.layer,
            noted,
        };
        (output.y.map(|y| HeldTensor::of("linear", y)), saved)
    }
}

impl<B: DataBackend, const N: usize> Recorded<B, N> for LearnedLinear<B> {
    type Saved = Saved<B>;

    fn again(&mut self, inputs: &[HeldTensor<B>; N]) -> Option<Self> {
        let settled = Settled::next(&self.layer, self.slots, [&inputs[0], &inputs[1]]);
        self.run = Run::First(settled);
        Some(Self {
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

    fn backward(
        saved: Saved<B>,
        gradient: FloatTensor<B>,
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let [wants_x, wants_weight] = [wanted[0], wanted[1]];
        let wants_bias = wanted.get(2).copied().unwrap_or_default();
        let of_bias = saved.bias.filter(|_| wants_bias);
        let mut of_bias = of_bias.map(|dtype| bias_gradient::<B>(&gradient, dtype));
        let device = B::float_device(&gradient);
        // The step of an X that has no gradient itself, as a model's input, is learned with W.
        let visits_x = wants_x || (wants_weight && saved.learns);
        let operands = saved.operands.filter(|_| visits_x || wants_weight);
        let [mut of_x, mut of_weight] = operands.map_or([None, None], |operands| {
            let operation = Backward {
                input: visits_x.then_some(saved.x_form),
                weight: wants_weight.then_some(saved.weight_form),
                ..saved.backward
            };
            let inputs = BackwardInputs {
                gradient,
                x: operands.x,
                weight: Quantized::clone(&operands.weight),
                exact_weight: operands.exact_weight.into_value(),
            };
            let Gradients { input, weight } = B::run(operation, inputs);
            let slots = [saved.slots.x, saved.slots.weight];
            let mut slots = slots.into_iter();
            [input, weight].map(|gradients| {
                let slot = slots.next().expect("a slot for each operand");
                let (matrix, step) = gradients?;
                if saved.learns {
                    let layer = &saved.layer;
                    layer.add_step_gradient(slot, &device, saved.call, step);
                }
                Some(matrix)
            })
        });
        std::array::from_fn(|index| match index {
            0 => of_x.take().filter(|_| wants_x),
            1 => of_weight.take(),
            _ => of_bias.take(),
        })
    }
}
