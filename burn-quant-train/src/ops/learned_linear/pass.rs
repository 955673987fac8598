//! Both passes on the device, each an operation of the backend that holds the data.

use burn_backend::{FloatDType, Shape, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::{
    granularity, number::Number, quantize::QuantizeSpec, rounding::Rounding as KernelRounding,
};

use crate::{
    data::{
        DataBackend, Kernels, Layout, Operation, StochasticKey,
        learned_step::{
            ElementSource, Gradient, HadamardSize, HadamardTransform, LearnedMatrix, LearnedStep,
            ResidualRows, spec,
        },
        product::Accumulation,
        quantize::{Operand, Quantized, Scales},
        tensors::{Bundle, Change, FloatMeta, Outline, Tensors},
    },
    layer::{Call, Layer, Role},
    ops::matrix::{Form, Source, flatten, flattened},
    recipe::{LinearRow, Product, Residual, Rounding, Sampling},
};

/// Of no matter: integers are added up exactly.
const SUMS: Accumulation = Accumulation::Promoted;

/// The forward pass.
#[derive(Debug, Clone)]
pub(super) struct Forward {
    /// The shape of X, `[.., K]`.
    pub x_shape: Shape,
    /// The shape of Y, `[.., N]`.
    pub shape: Shape,
    pub compute: FloatDType,
    pub size: HadamardSize,
    /// The transform of the matrix of which a copy is made, along the inputs of the layer.
    pub of_tagged: HadamardTransform,
    /// The index of the layer among the step sizes.
    pub layer: usize,
    /// True if the step size of X is set before it is used.
    pub sets_step: bool,
    pub sets_weight_step: bool,
    /// True if the matrix of which a copy is made is the transpose of W.
    pub transposed_weight: bool,
    /// True if Y is wanted.
    pub wants_y: bool,
    /// The rows of X that keep residuals, if the backward pass needs X.
    pub keeps_x: Option<ResidualRows>,
}

#[derive(Debug, Clone)]
pub(super) struct ForwardInputs<T: Tensors> {
    /// X, `[.., K]`, of any float dtype.
    pub x: T::Float,
    /// W, `[K, N]`, with leading dimensions of 1, or the copy of the tagged matrix.
    pub weight: Source<T>,
    /// `[N]`.
    pub bias: Option<T::Float>,
    /// FP32 `[layers]`.
    pub steps: T::Float,
    /// FP32 `[layers]`, if W is not a copy.
    pub weight_steps: Option<T::Float>,
}

impl Bundle for ForwardInputs<Outline> {
    type On<T: Tensors> = ForwardInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: ForwardInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> ForwardInputs<T> {
        ForwardInputs {
            x: change.float(inputs.x),
            weight: Source::rebuild(inputs.weight, change),
            bias: inputs.bias.map(|bias| change.float(bias)),
            steps: change.float(inputs.steps),
            weight_steps: inputs.weight_steps.map(|steps| change.float(steps)),
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct ForwardOutputs<T: Tensors> {
    /// Y, `[.., N]`, if it was wanted.
    pub y: Option<T::Float>,
    /// X for the backward pass.
    pub x: Option<LearnedMatrix<T>>,
    /// The copy of W, if one was to be made.
    pub weight: Option<Quantized<T>>,
    /// The step sizes that were set.
    pub steps: Option<T::Float>,
    pub weight_steps: Option<T::Float>,
}

impl Bundle for ForwardOutputs<Outline> {
    type On<T: Tensors> = ForwardOutputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        outputs: ForwardOutputs<S>,
        change: &mut impl Change<S, T>,
    ) -> ForwardOutputs<T> {
        ForwardOutputs {
            y: outputs.y.map(|y| change.float(y)),
            x: Option::<LearnedMatrix<Outline>>::rebuild(outputs.x, change),
            weight: Option::<Quantized<Outline>>::rebuild(outputs.weight, change),
            steps: outputs.steps.map(|steps| change.float(steps)),
            weight_steps: outputs.weight_steps.map(|steps| change.float(steps)),
        }
    }
}

impl Operation for Forward {
    const NAME: &'static str = "learned_linear_forward";
    type Inputs = ForwardInputs<Outline>;
    type Outputs = ForwardOutputs<Outline>;

    fn outline<T: Tensors>(&self, inputs: &ForwardInputs<T>) -> ForwardOutputs<Outline> {
        let set = |steps: &T::Float, sets: bool| sets.then(|| FloatMeta::of(steps));
        let weight = match &inputs.weight {
            Source::Copy(_) => None,
            Source::Float(weight) => {
                let mut tagged = flattened(&weight.shape());
                if self.transposed_weight {
                    tagged.reverse();
                }
                Some(Quantized::outline(tagged, &spec(Layout::Both)))
            }
        };
        let of_weight = inputs.weight_steps.as_ref();
        ForwardOutputs {
            y: self
                .wants_y
                .then(|| FloatMeta::new(self.shape.clone(), self.compute)),
            x: self.keeps_x.map(|rows| {
                let shape = flattened(&self.x_shape);
                LearnedMatrix::outline(shape, Layout::RowMajor, Some(rows))
            }),
            weight,
            steps: set(&inputs.steps, self.sets_step),
            weight_steps: of_weight.and_then(|steps| set(steps, self.sets_weight_step)),
        }
    }

    fn run<K: Kernels>(self, inputs: ForwardInputs<K>) -> ForwardOutputs<K> {
        let along_x = HadamardTransform::of_columns(self.size);
        let x = flatten::<K>(inputs.x);
        let layer = self.layer;
        let steps = inputs.steps;
        let step = LearnedStep { steps, layer };
        let (step, steps) = step_of::<K>(&x, step, self.sets_step, along_x);
        let quantized = K::quantize_learned(x, &step, along_x, Layout::RowMajor, self.keeps_x);

        let (weight, made, weight_steps) = match inputs.weight {
            Source::Copy(copy) => (copy, None, None),
            Source::Float(weight) => {
                let weight = flatten::<K>(weight);
                let tagged = match self.transposed_weight {
                    true => K::float_swap_dims(weight, 0, 1),
                    false => weight,
                };
                let transform = self.of_tagged;
                let steps = inputs
                    .weight_steps
                    .expect("a float weight comes with its steps");
                let step = LearnedStep { steps, layer };
                let (step, steps) = step_of::<K>(&tagged, step, self.sets_weight_step, transform);
                let copy = K::quantize_learned(tagged, &step, transform, Layout::Both, None);
                (copy.matrix.clone(), Some(copy.matrix), steps)
            }
        };
        let right = Operand {
            matrix: &weight,
            transpose: self.transposed_weight,
        };
        let left = quantized.matrix.operand();
        let product = || K::product(left, None, right, inputs.bias, SUMS, self.compute);
        ForwardOutputs {
            y: self
                .wants_y
                .then(|| K::float_reshape(product(), self.shape.clone())),
            x: self.keeps_x.map(|_| quantized),
            weight: made,
            steps,
            weight_steps,
        }
    }
}

/// The step size of a matrix, and those of all layers if it is set, which it is if it is cold.
pub(in crate::ops) fn step_of<K: Kernels>(
    matrix: &FloatTensor<K>,
    step: LearnedStep<K>,
    is_cold: bool,
    transform: HadamardTransform,
) -> (LearnedStep<K>, Option<FloatTensor<K>>) {
    if !is_cold {
        return (step, None);
    }
    let layer = step.layer;
    let steps = K::cold_step(matrix.clone(), step, transform);
    let set = LearnedStep {
        steps: steps.clone(),
        layer,
    };
    (set, Some(steps))
}

/// How dY is quantized for both gradients' products.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) enum GradientOperand {
    /// In one part.
    Whole {
        /// Its number, one scale for all.
        number: Number,
        /// How it is rounded.
        rounding: Rounding,
    },
    /// In a high and a low INT4 part, all rows of both: they are one INT8 matrix (int4-hq-lss, equation 5 and Appendix
    /// A.6).
    Split {
        /// How the low part is rounded.
        rounding: Rounding,
    },
    /// Rows of both parts, sampled by their leverage scores (int4-hq-lss, section 4.2).
    Sampled {
        /// How the low part is rounded.
        rounding: Rounding,
    },
}

impl GradientOperand {
    /// # Panics
    ///
    /// If the row has no learned step sizes, which its check excludes.
    pub fn of(row: &LinearRow) -> Self {
        let Product::Quantized { left, sampling, .. } = row.input_gradient else {
            unreachable!("a row with learned step sizes quantizes its gradients' products");
        };
        let rounding = left.rounding;
        match (left.residual, sampling) {
            (Residual::Never, Sampling::All) => Self::Whole {
                number: left.number,
                rounding,
            },
            (Residual::Always, Sampling::All) => Self::Split { rounding },
            (Residual::Always, Sampling::LeverageScore) => Self::Sampled { rounding },
            (Residual::Above(_), _) | (Residual::Never, Sampling::LeverageScore) => {
                unreachable!("dY has a residual always or never, and always where it is sampled")
            }
        }
    }
}

/// The random numbers of a backward pass.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct GradientKeys {
    /// Those that round dY.
    pub rounding: StochasticKey,
    /// Those that draw rows for dX.
    pub rows: StochasticKey,
    /// Those that draw rows for dW.
    pub weight_rows: StochasticKey,
    /// Those that round the rows for dW again.
    pub sampled: StochasticKey,
}

impl GradientKeys {
    /// Those of a run of a layer.
    pub fn of<B: DataBackend>(layer: &Layer<B>, call: Call) -> Self {
        let key = |role| layer.key(call, role);
        Self {
            rounding: key(Role::OutputGradient),
            rows: key(Role::SampledRows),
            weight_rows: key(Role::SampledRowsOfWeight),
            sampled: key(Role::SampledGradient),
        }
    }

    /// The rounding of dY.
    pub fn rounding(&self, rounding: Rounding) -> KernelRounding {
        match rounding {
            Rounding::Nearest => KernelRounding::Nearest,
            Rounding::Stochastic => KernelRounding::Stochastic(self.rounding),
        }
    }
}

/// The backward pass, which computes the gradients that have a form.
#[derive(Debug, Clone)]
pub(super) struct Backward {
    pub input: Option<Form>,
    pub weight: Option<Form>,
    pub size: HadamardSize,
    pub gradient: GradientOperand,
    pub keys: GradientKeys,
    /// True if the copy is of the transpose of W.
    pub transposed_weight: bool,
    pub compute: FloatDType,
}

#[derive(Debug, Clone)]
pub(super) struct BackwardInputs<T: Tensors> {
    /// dY, `[.., N]`, of any float dtype.
    pub gradient: T::Float,
    pub x: LearnedMatrix<T>,
    /// The copy of W.
    pub weight: Quantized<T>,
    /// W, `[K, N]`, with leading dimensions of 1.
    pub exact_weight: T::Float,
}

impl Bundle for BackwardInputs<Outline> {
    type On<T: Tensors> = BackwardInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: BackwardInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> BackwardInputs<T> {
        BackwardInputs {
            gradient: change.float(inputs.gradient),
            x: LearnedMatrix::rebuild(inputs.x, change),
            weight: Quantized::rebuild(inputs.weight, change),
            exact_weight: change.float(inputs.exact_weight),
        }
    }
}

/// The gradients of matrices, each with that of its step size, FP32 `[1]`.
#[derive(Debug, Clone)]
pub(super) struct Gradients<T: Tensors> {
    pub input: Option<(T::Float, T::Float)>,
    pub weight: Option<(T::Float, T::Float)>,
}

impl Bundle for Gradients<Outline> {
    type On<T: Tensors> = Gradients<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        gradients: Gradients<S>,
        change: &mut impl Change<S, T>,
    ) -> Gradients<T> {
        type Pair = Option<(FloatMeta, FloatMeta)>;
        Gradients {
            input: Pair::rebuild(gradients.input, change),
            weight: Pair::rebuild(gradients.weight, change),
        }
    }
}

impl Operation for Backward {
    const NAME: &'static str = "learned_linear_backward";
    type Inputs = BackwardInputs<Outline>;
    type Outputs = Gradients<Outline>;

    fn outline<T: Tensors>(&self, _inputs: &BackwardInputs<T>) -> Gradients<Outline> {
        let of = |form: &Form| {
            let matrix = FloatMeta::new(form.shape.clone(), form.dtype);
            (matrix, FloatMeta::new([1], FloatDType::F32))
        };
        Gradients {
            input: self.input.as_ref().map(of),
            weight: self.weight.as_ref().map(of),
        }
    }

    fn run<K: Kernels>(self, inputs: BackwardInputs<K>) -> Gradients<K> {
        let operands = Operands {
            gradient: flatten::<K>(inputs.gradient),
            x: &inputs.x.matrix,
            weight: Operand {
                matrix: &inputs.weight,
                transpose: self.transposed_weight,
            },
        };
        let (of_x, of_weight) = self.products(operands);
        let of_quantizer = |gradient, source, transform, form: Form| {
            let [matrix, step] = K::learned_step_backward(gradient, source, transform, form.dtype);
            (K::float_reshape(matrix, form.shape), step)
        };
        let input = of_x.zip(self.input).map(|(gradient, form)| {
            let along_x = HadamardTransform::of_columns(self.size);
            of_quantizer(gradient, ElementSource::Saved(inputs.x), along_x, form)
        });
        let weight = of_weight.zip(self.weight).map(|(gradient, form)| {
            let source = ElementSource::Exact {
                x: flatten::<K>(inputs.exact_weight),
                step: scale_of::<K>(&inputs.weight),
            };
            let along_weight = HadamardTransform::of_rows(self.size);
            of_quantizer(Gradient::Dense(gradient), source, along_weight, form)
        });
        Gradients { input, weight }
    }
}

/// The step size that a matrix was quantized by: its scale.
pub(in crate::ops) fn scale_of<K: Kernels>(matrix: &Quantized<K>) -> LearnedStep<K> {
    let Scales::F32(scales) = &matrix.scales else {
        unreachable!("a learned step size is FP32");
    };
    LearnedStep {
        steps: K::float_reshape(scales.clone(), Shape::new([1])),
        layer: 0,
    }
}

/// The operands of the gradients' products.
struct Operands<'a, K: Kernels> {
    /// dY, `[rows, N]`.
    gradient: FloatTensor<K>,
    /// X, `[rows, K]`.
    x: &'a Quantized<K>,
    /// W, `[K, N]`.
    weight: Operand<'a, K>,
}

impl Backward {
    /// The gradients of the values that the codes stand for: of X, and of W in FP32, straight from the accumulators.
    fn products<K: Kernels>(
        &self,
        operands: Operands<'_, K>,
    ) -> (Option<Gradient<K>>, Option<FloatTensor<K>>) {
        let Operands {
            gradient,
            x,
            weight,
        } = operands;
        let [rows, _] = flattened(&gradient.shape());
        let (wants_x, wants_weight) = (self.input.is_some(), self.weight.is_some());
        let of_x = |gradient: Operand<'_, K>| {
            K::product(gradient, None, weight.t(), None, SUMS, self.compute)
        };
        let of_weight = |x: Operand<'_, K>, gradient: Operand<'_, K>| {
            K::product(x.t(), None, gradient, None, SUMS, FloatDType::F32)
        };
        let dense = |gradient: &Quantized<K>| {
            let gradient = gradient.operand();
            (
                wants_x.then(|| Gradient::Dense(of_x(gradient))),
                wants_weight.then(|| of_weight(x.operand(), gradient)),
            )
        };
        match self.gradient {
            GradientOperand::Whole { number, rounding } => {
                let spec = QuantizeSpec::new(number, granularity::Granularity::Tensor)
                    .with_rounding(self.keys.rounding(rounding))
                    .with_layout(Layout::Both);
                dense(&K::quantize_matrix(gradient, &spec))
            }
            GradientOperand::Split { rounding } => {
                let split = K::bit_split(gradient, self.keys.rounding(rounding));
                dense(&K::merge_parts(&split, Layout::Both))
            }
            GradientOperand::Sampled { rounding } => {
                let split = K::bit_split(gradient, self.keys.rounding(rounding));
                let input = wants_x.then(|| {
                    let scores = K::leverage_scores(&split, None);
                    let sample = K::sample_rows(scores, &split, rows, self.keys.rows);
                    let parts = K::gather_parts(&split, &sample);
                    Gradient::Sampled {
                        products: of_x(parts.operand()),
                        positions: sample.positions,
                    }
                });
                let weight = wants_weight.then(|| {
                    let scores = K::leverage_scores(&split, Some(x));
                    let sample = K::sample_rows(scores, &split, rows, self.keys.weight_rows);
                    let again = KernelRounding::Stochastic(self.keys.sampled);
                    let gradient = K::gather_scaled(&split, &sample, again, Layout::Transposed);
                    let x = K::gather_int4_rows(x, &sample, Layout::Transposed);
                    of_weight(x.operand(), gradient.operand())
                });
                (input, weight)
            }
        }
    }
}
