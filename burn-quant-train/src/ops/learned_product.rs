//! The product of two activations with learned step sizes, as attention's Q Kᵀ and P V: batched, of INT4 codes, and the
//! gradients of both operands and of their step sizes (int4-hq-lss, Appendix A.1).
//!
//! All matrices of a batch share one step size and one transform, along the dimension that the product sums over. So a
//! batch is quantized as one matrix, whose rows are those of all. The forward product is of integers. Backward, dT is
//! split, and its rows are sampled, as in a linear layer; but kept rows stay at their places and the others are zero,
//! since each matrix of the batch has a product of its own: those products are of dT in the compute dtype and of codes.

use std::sync::Arc;

use burn_backend::{
    FloatDType, Scalar, Shape, TensorMetadata, get_device_settings, tensor::FloatTensor,
};
use cubecl_kernels::{granularity::Granularity, quantize::QuantizeSpec};

use super::{
    learned_linear::{
        Settled,
        pass::{GradientKeys, GradientOperand, scale_of, step_of},
        residual_rows,
    },
    matrix::{Form, flatten, flattened},
    run::Run,
};
use crate::{
    data::{
        DataBackend, Kernels, Layout, Operation,
        learned_step::{
            ElementSource, Gradient, HadamardSize, HadamardTransform, LearnedMatrix, LearnedStep,
            ResidualRows,
        },
        product::float_product,
        quantize::{Quantized, Scales},
        sampling::{BitSplit, RowSample},
        tensors::{self, FloatMeta, On, Outline, Tensors},
    },
    layer::{Call, Layer, Role},
    recipe::{LearnedSlots, LinearRow},
    saved::{HeldTensor, recorded::Recorded, report::Operands},
};

/// T `[.., M, N]` = L `[.., M, K]` R `[.., K, N]`, with the same leading dimensions.
#[derive(Clone)]
pub(crate) struct LearnedProduct<B: DataBackend> {
    /// The product, as a layer.
    pub layer: Arc<Layer<B>>,
    /// Which run of it it is.
    pub run: Run<Settled>,
    /// The recipe's row of linear layers: L is quantized as X, and R as W.
    pub row: LinearRow,
    /// The row's slots.
    pub slots: LearnedSlots,
    /// The dtype of T.
    pub compute: FloatDType,
}

/// The matrices that wait for the backward pass, and what it is to do with them.
pub(crate) struct Saved<B: DataBackend> {
    layer: Arc<Layer<B>>,
    call: Call,
    slots: [&'static str; 2],
    /// True if the step sizes are learned in this step.
    learns: bool,
    /// L, and R transposed. Present if a gradient is wanted.
    operands: Option<[LearnedMatrix<B>; 2]>,
    backward: Backward,
    noted: Operands,
}

impl<B: DataBackend> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            operands: self.operands.clone(),
            backward: self.backward.clone(),
            noted: self.noted.clone(),
            ..*self
        }
    }
}

impl<B: DataBackend> std::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved")
            .field("product", &self.layer.path())
            .field("backward", &self.backward)
            .finish_non_exhaustive()
    }
}

impl<B: DataBackend> LearnedProduct<B> {
    /// The forward pass, and T if it is wanted.
    fn pass(
        self,
        [left, right]: [HeldTensor<B>; 2],
        wanted: [bool; 2],
        wants_product: bool,
    ) -> (Option<HeldTensor<B>>, Saved<B>) {
        let device = left.cell().device().clone();
        let settled = match self.run {
            Run::Next => Settled::next(&self.layer, self.slots, [&left, &right]),
            Run::First(settled) | Run::Second(settled) => settled,
        };
        let Settled {
            call,
            size,
            are_cold,
        } = settled;
        let slots = self.slots.of_operands();
        let learns = are_cold == [false; 2];
        let forms = [Form::of(&left), Form::of(&right)];
        let shapes = Shapes::of(&forms);
        let needs_backward = wanted != [false; 2] && !self.run.is_first();
        let roles = [Role::ResidualRows, Role::ResidualRowsOfRight];
        let of_role = |index: usize| {
            let key = self.layer.key(call, roles[index]);
            residual_rows(shapes.stacked(index)[0], learns, key)
        };
        let operation = Forward {
            shapes: shapes.clone(),
            compute: self.compute,
            size,
            layer: self.layer.index(),
            sets: are_cold,
            keeps: needs_backward.then(|| [of_role(0), of_role(1)]),
            wants_product,
        };
        let steps = |index: usize| {
            let step = self.layer.step_size(slots[index], &device, call.step);
            step.steps
        };
        let inputs = (
            (left.into_value(), steps(0)),
            (right.into_value(), steps(1)),
        );
        let (product, (of_left, of_right)) = B::run(operation, inputs);
        let mut noted = Operands::default();
        let mut kept = Vec::new();
        for (index, (matrix, steps)) in [of_left, of_right].into_iter().enumerate() {
            if let Some(steps) = steps.filter(|_| !self.run.is_second()) {
                self.layer.set_step_size(slots[index], &device, call, steps);
            }
            if let Some(matrix) = matrix {
                let Form { shape, dtype } = &forms[index];
                let bytes = || tensors::bytes_of::<LearnedMatrix<Outline>, B>(matrix.clone());
                noted.note_own(matrix.matrix.format.number, shape, (*dtype).into(), bytes);
                kept.push(matrix);
            }
        }
        let saved = Saved {
            call,
            slots,
            learns,
            operands: kept.try_into().ok(),
            backward: Backward {
                shapes,
                forms,
                visits: [true; 2],
                size,
                gradient: GradientOperand::of(&self.row),
                keys: GradientKeys::of(&self.layer, call),
                compute: self.compute,
            },
            layer: self.layer,
            noted,
        };
        let product = product.map(|product| HeldTensor::of("matmul", product));
        (product, saved)
    }
}

impl<B: DataBackend> Recorded<B, 2> for LearnedProduct<B> {
    type Saved = Saved<B>;

    fn again(&mut self, [left, right]: &[HeldTensor<B>; 2]) -> Option<Self> {
        let settled = Settled::next(&self.layer, self.slots, [left, right]);
        self.run = Run::First(settled);
        Some(Self {
            run: Run::Second(settled),
            ..self.clone()
        })
    }

    fn forward(self, inputs: [HeldTensor<B>; 2], wanted: [bool; 2]) -> (HeldTensor<B>, Saved<B>) {
        let (product, saved) = self.pass(inputs, wanted, true);
        (product.expect("the product was wanted"), saved)
    }

    fn save(self, inputs: [HeldTensor<B>; 2], wanted: [bool; 2]) -> Saved<B> {
        self.pass(inputs, wanted, false).1
    }

    fn backward(
        saved: Saved<B>,
        gradient: FloatTensor<B>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<B>>; 2] {
        let Some([left, right]) = saved.operands.filter(|_| wanted != [false; 2]) else {
            return [None, None];
        };
        let device = B::float_device(&gradient);
        // The step of an operand that has no gradient itself is learned with the other one's.
        let visits = wanted.map(|wanted| wanted || saved.learns);
        let operation = Backward {
            visits,
            ..saved.backward
        };
        let (of_left, of_right) = B::run(operation, (gradient, (left, right)));
        let mut gradients = [of_left, of_right].into_iter();
        std::array::from_fn(|index| {
            let (matrix, step) = gradients.next().flatten()?;
            if saved.learns {
                let slot = saved.slots[index];
                saved
                    .layer
                    .add_step_gradient(slot, &device, saved.call, step);
            }
            wanted[index].then_some(matrix)
        })
    }
}

/// The sizes of a product.
#[derive(Debug, Clone)]
struct Shapes {
    /// The leading dimensions, and their product.
    leading: Vec<usize>,
    batch: usize,
    /// M and N.
    outer: [usize; 2],
    /// K.
    sum: usize,
}

impl Shapes {
    /// Those of L `[.., M, K]` and R `[.., K, N]`.
    fn of([left, right]: &[Form; 2]) -> Self {
        let (leading, left) = left.shape.split_at(left.shape.num_dims() - 2);
        Self {
            leading: leading.to_vec(),
            batch: leading.iter().product(),
            outer: [left[0], right.shape[right.shape.num_dims() - 1]],
            sum: left[1],
        }
    }

    /// `[.., rows, cols]`.
    fn with_leading(&self, matrix: [usize; 2]) -> Shape {
        Shape::from([&self.leading[..], &matrix].concat())
    }

    /// The shape of L, or of R transposed, as one matrix.
    fn stacked(&self, index: usize) -> [usize; 2] {
        [self.batch * self.outer[index], self.sum]
    }
}

/// The forward pass.
#[derive(Debug, Clone)]
struct Forward {
    shapes: Shapes,
    compute: FloatDType,
    size: HadamardSize,
    /// The index of the product among the step sizes.
    layer: usize,
    /// True if the step sizes of L and R are set before they are used.
    sets: [bool; 2],
    /// The rows of L, and of R transposed, that keep residuals, if the backward pass needs them.
    keeps: Option<[ResidualRows; 2]>,
    wants_product: bool,
}

/// A float matrix, and FP32 `[layers]`.
type WithSteps = (FloatMeta, FloatMeta);
/// A matrix for the backward pass, and the steps if they were set.
type Kept = (Option<LearnedMatrix<Outline>>, Option<FloatMeta>);

impl Operation for Forward {
    const NAME: &'static str = "learned_product_forward";
    /// L and R, of any float dtype.
    type Inputs = (WithSteps, WithSteps);
    /// T, if it was wanted; and L, and R transposed.
    type Outputs = (Option<FloatMeta>, (Kept, Kept));

    fn outline<T: Tensors>(&self, (left, right): &On<Self::Inputs, T>) -> Self::Outputs {
        let kept = |index: usize, (_, steps): &On<WithSteps, T>| {
            let shape = self.shapes.stacked(index);
            let rows = self.keeps.map(|rows| rows[index]);
            (
                rows.map(|rows| LearnedMatrix::outline(shape, Layout::RowMajor, Some(rows))),
                self.sets[index].then(|| FloatMeta::of(steps)),
            )
        };
        let shape = self.shapes.with_leading(self.shapes.outer);
        (
            self.wants_product
                .then(|| FloatMeta::new(shape, self.compute)),
            (kept(0, left), kept(1, right)),
        )
    }

    fn run<K: Kernels>(self, (left, right): On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        let quantize = |index: usize, matrix, steps| {
            let along_sum = HadamardTransform::of_columns(self.size);
            let matrix = flatten::<K>(matrix);
            let layer = self.layer;
            let step = LearnedStep { steps, layer };
            let (step, set) = step_of::<K>(&matrix, step, self.sets[index], along_sum);
            let rows = self.keeps.map(|rows| rows[index]);
            let quantized = K::quantize_learned(matrix, &step, along_sum, Layout::RowMajor, rows);
            (quantized, set)
        };
        let (left, left_steps) = quantize(0, left.0, left.1);
        let (right, right_steps) = quantize(1, K::float_transpose(right.0), right.1);
        let product = self.wants_product.then(|| {
            let (left, right) = (&left.matrix, &right.matrix);
            let product = K::stacked_product(left, right, self.shapes.batch, self.compute);
            K::float_reshape(product, self.shapes.with_leading(self.shapes.outer))
        });
        let kept = |matrix| self.keeps.map(|_| matrix);
        (
            product,
            ((kept(left), left_steps), (kept(right), right_steps)),
        )
    }
}

/// The backward pass.
#[derive(Debug, Clone)]
struct Backward {
    shapes: Shapes,
    /// Those of the gradients.
    forms: [Form; 2],
    /// The operands whose gradients are computed.
    visits: [bool; 2],
    size: HadamardSize,
    gradient: GradientOperand,
    keys: GradientKeys,
    compute: FloatDType,
}

/// The gradients of a matrix and of its step size, FP32 `[1]`.
type Gradients = Option<(FloatMeta, FloatMeta)>;

impl Operation for Backward {
    const NAME: &'static str = "learned_product_backward";
    /// dT `[.., M, N]`, of any float dtype; L, and R transposed.
    type Inputs = (FloatMeta, (LearnedMatrix<Outline>, LearnedMatrix<Outline>));
    type Outputs = (Gradients, Gradients);

    fn outline<T: Tensors>(&self, _: &On<Self::Inputs, T>) -> Self::Outputs {
        let of = |index: usize| {
            let Form { shape, dtype } = &self.forms[index];
            let matrix = FloatMeta::new(shape.clone(), *dtype);
            self.visits[index].then(|| (matrix, FloatMeta::new([1], FloatDType::F32)))
        };
        (of(0), of(1))
    }

    fn run<K: Kernels>(
        self,
        (gradient, (left, right)): On<Self::Inputs, K>,
    ) -> On<Self::Outputs, K> {
        let [for_left, for_right] = self.operands::<K>(flatten::<K>(gradient), &left.matrix);
        let along_sum = HadamardTransform::of_columns(self.size);
        let of_quantizer = |gradient, source, dtype| {
            let gradient = Gradient::Dense(flatten::<K>(gradient));
            let source = ElementSource::Saved(source);
            K::learned_step_backward(gradient, source, along_sum, dtype)
        };
        let [left_form, right_form] = self.forms.clone();
        let of_left = for_left.map(|gradient| {
            let gradient = self.times_codes::<K>(gradient, &right.matrix);
            let [matrix, step] = of_quantizer(gradient, left.clone(), left_form.dtype);
            (K::float_reshape(matrix, left_form.shape), step)
        });
        let of_right = for_right.map(|gradient| {
            let gradient = self.times_codes::<K>(K::float_transpose(gradient), &left.matrix);
            let [matrix, step] = of_quantizer(gradient, right, right_form.dtype);
            let [_, n] = self.shapes.outer;
            let matrix = K::float_reshape(matrix, self.shapes.with_leading([n, self.shapes.sum]));
            (K::float_transpose(matrix), step)
        });
        (of_left, of_right)
    }
}

impl Backward {
    /// dT in the compute dtype, `[batch, M, N]`, as the products for dL and for dR take it, of those that are visited.
    fn operands<K: Kernels>(
        &self,
        gradient: FloatTensor<K>,
        left: &Quantized<K>,
    ) -> [Option<FloatTensor<K>>; 2] {
        let [rows, _] = flattened(&gradient.shape());
        let stack = |gradient: FloatTensor<K>| {
            let [m, n] = self.shapes.outer;
            K::float_reshape(gradient, Shape::new([self.shapes.batch, m, n]))
        };
        let same = |gradient: &Quantized<K>| {
            let gradient = stack(K::dequantize_matrix(gradient, self.compute));
            self.visits.map(|visits| visits.then(|| gradient.clone()))
        };
        match self.gradient {
            GradientOperand::Whole { number, rounding } => {
                let spec = QuantizeSpec::new(number, Granularity::Tensor)
                    .with_rounding(self.keys.rounding(rounding));
                same(&K::quantize_matrix(gradient, &spec))
            }
            GradientOperand::Split { rounding } => {
                let split = K::bit_split(gradient, self.keys.rounding(rounding));
                same(&K::merge_parts(&split, Layout::RowMajor))
            }
            GradientOperand::Sampled { rounding } => {
                let split = K::bit_split(gradient, self.keys.rounding(rounding));
                let [visits_left, visits_right] = self.visits;
                let sampled = |beside, key| {
                    let scores = K::leverage_scores(&split, beside);
                    let sample = K::sample_rows(scores, &split, rows, key);
                    stack(in_place::<K>(&split, &sample, self.compute))
                };
                [
                    visits_left.then(|| sampled(None, self.keys.rows)),
                    visits_right.then(|| sampled(Some(left), self.keys.weight_rows)),
                ]
            }
        }
    }

    /// The products of floats `[batch, rows, cols]` with what the codes of stacked matrices stand for, FP32; rounded to
    /// the compute dtype before, where the device has no kernel of ours. The codes are exact in that dtype, and their
    /// scale is multiplied in after the product.
    fn times_codes<K: Kernels>(
        &self,
        gradient: FloatTensor<K>,
        matrix: &Quantized<K>,
    ) -> FloatTensor<K> {
        let scale = scale_of::<K>(matrix).steps;
        // One element has no padding, which kernels would not read.
        let ones = K::float_ones(scale.shape(), &K::float_device(&scale), FloatDType::F32);
        let unscaled = Quantized {
            scales: Scales::F32(K::float_reshape(ones, Shape::new([1, 1]))),
            ..matrix.clone()
        };
        let [rows, cols] = matrix.shape;
        let stack = Shape::new([self.shapes.batch, rows / self.shapes.batch, cols]);
        let codes = K::float_reshape(K::dequantize_matrix(&unscaled, self.compute), stack);
        let product = float_product::<K>(gradient, codes, FloatDType::F32);
        K::float_mul(product, K::float_reshape(scale, Shape::new([1, 1, 1])))
    }
}

/// The kept rows of both parts, divided by their probabilities and summed up, each at its place; zero where both rows
/// were left out.
fn in_place<K: Kernels>(
    split: &BitSplit<K>,
    sample: &RowSample<K>,
    dtype: FloatDType,
) -> FloatTensor<K> {
    let [rows, cols] = split.shape;
    let kept = K::dequantize_matrix(&K::gather_parts(split, sample), dtype);
    let bools = get_device_settings::<K>(&K::float_device(&kept)).bool_dtype;
    let positions = sample.positions.clone();
    let is_left_out = K::int_lower_elem(positions.clone(), Scalar::from(0), bools);
    let is_left_out = K::bool_reshape(is_left_out, Shape::new([2 * rows, 1]));
    let is_left_out = K::bool_expand(is_left_out, Shape::new([2 * rows, cols]));
    let parts = K::float_select(kept, 0, K::int_clamp_min(positions, Scalar::from(0)));
    let parts = K::float_mask_fill(parts, is_left_out, Scalar::from(0.0));
    let parts = K::float_reshape(parts, Shape::new([2, rows, cols]));
    K::float_reshape(K::float_sum_dim(parts, 0), Shape::new([rows, cols]))
}
