//! Embeddings whose rows are rounded to INT4 by a learned step size as they are looked up: LSQ without a transform
//! (int4-hq-lss, sections 3.1 and 5, equation 4, Appendix A.3).
//!
//! What is rounded is a row at a time, and what is saved is nothing but the indices: the backward pass looks the rows up
//! again. A row that several tokens have counts once for each, as the gradient of the table adds them up.

use std::sync::Arc;

use burn_backend::{
    FloatDType, Scalar, Shape, Slice, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};

use super::{matrix::flatten, run::Run};
use crate::{
    data::{
        DataBackend, Kernels, Layout, Operation,
        learned_step::{ElementSource, Gradient, HadamardSize, HadamardTransform, LearnedStep},
        tensors::{Bundle, Change, FloatMeta, Outline, Tensors},
    },
    layer::{Call, Layer},
    saved::{HeldTensor, recorded::Recorded},
};

/// Step sizes are of the table as it is.
const AS_IT_IS: HadamardTransform = HadamardTransform::of_columns(HadamardSize::IDENTITY);

/// `[.., columns]`, the rows of a table `[rows, columns]` at indices `[..]`, rounded.
#[derive(Clone)]
pub(crate) struct LearnedEmbedding<B: DataBackend> {
    /// The layer.
    pub layer: Arc<Layer<B>>,
    /// Which run of the layer it is.
    pub run: Run<Settled>,
    /// The slot of the step size.
    pub slot: &'static str,
    /// The dtype of the rows.
    pub compute: FloatDType,
    /// The indices.
    pub indices: IntTensor<B>,
}

/// The state of the layer that a run takes, and may move, beside the step size itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    call: Call,
    /// True if the step size is set by the table.
    is_cold: bool,
}

/// What the table's gradient needs.
pub(crate) struct Saved<B: DataBackend> {
    layer: Arc<Layer<B>>,
    slot: &'static str,
    settled: Settled,
    table: HeldTensor<B>,
    indices: IntTensor<B>,
    step: FloatTensor<B>,
}

impl<B: DataBackend> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            table: self.table.clone(),
            indices: self.indices.clone(),
            step: self.step.clone(),
            ..*self
        }
    }
}

impl<B: DataBackend> std::fmt::Debug for Saved<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved")
            .field("layer", &self.layer.path())
            .field("settled", &self.settled)
            .finish_non_exhaustive()
    }
}

impl<B: DataBackend> LearnedEmbedding<B> {
    /// Counts a run of the layer, and settles what it is.
    fn settle(&self, table: &HeldTensor<B>) -> Settled {
        let device = table.cell().device();
        let call = self.layer.next_call(device);
        let is_cold = self.layer.step_size(self.slot, device, call.step).is_cold;
        Settled { call, is_cold }
    }
}

impl<B: DataBackend> Recorded<B, 1> for LearnedEmbedding<B> {
    type Saved = Saved<B>;

    fn again(&mut self, [table]: &[HeldTensor<B>; 1]) -> Option<Self> {
        let settled = self.settle(table);
        self.run = Run::First(settled);
        Some(Self {
            run: Run::Second(settled),
            ..self.clone()
        })
    }

    fn forward(self, [table]: [HeldTensor<B>; 1], _: [bool; 1]) -> (HeldTensor<B>, Saved<B>) {
        // The backward pass compares the table with its clamp.
        table.cell().keep_exact();
        let device = table.cell().device().clone();
        let settled = match self.run {
            Run::Next => self.settle(&table),
            Run::First(settled) | Run::Second(settled) => settled,
        };
        let layer = &self.layer;
        let operation = LookUp {
            compute: self.compute,
            layer: layer.index(),
            sets_step: settled.is_cold,
        };
        let inputs = TableRows {
            table: table.cell().read(),
            indices: self.indices.clone(),
            steps: layer.step_size(self.slot, &device, settled.call.step).steps,
        };
        let LookedUp { rows, step, steps } = B::run(operation, inputs);
        if let Some(steps) = steps.filter(|_| !self.run.is_second()) {
            layer.set_step_size(self.slot, &device, settled.call, steps);
        }
        let saved = Saved {
            layer: self.layer,
            slot: self.slot,
            settled,
            table,
            indices: self.indices,
            step,
        };
        (HeldTensor::of("embedding", rows), saved)
    }

    fn backward(
        saved: Saved<B>,
        gradient: FloatTensor<B>,
        [wants_table]: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        if !wants_table {
            return [None];
        }
        let device = B::float_device(&gradient);
        let inputs = GradientInputs {
            gradient,
            rows: TableRows {
                table: saved.table.into_value(),
                indices: saved.indices,
                steps: saved.step,
            },
        };
        let TableGradient { table, step } = B::run(LookUpBackward, inputs);
        let Settled { call, is_cold } = saved.settled;
        if !is_cold {
            saved
                .layer
                .add_step_gradient(saved.slot, &device, call, step);
        }
        [Some(table)]
    }
}

/// The shape of the rows of a table at indices of this shape.
fn rows_shape(table: &Shape, indices: &Shape) -> Shape {
    let columns = table[table.num_dims() - 1];
    Shape::from([indices.as_slice(), &[columns]].concat())
}

/// Rows of a table, and step sizes.
#[derive(Debug, Clone)]
struct TableRows<T: Tensors> {
    /// `[rows, columns]`, of any float dtype.
    table: T::Float,
    /// `[..]`.
    indices: T::Int,
    /// FP32, `[layers]` or that of this one.
    steps: T::Float,
}

impl Bundle for TableRows<Outline> {
    type On<T: Tensors> = TableRows<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: TableRows<S>,
        change: &mut impl Change<S, T>,
    ) -> TableRows<T> {
        TableRows {
            table: change.float(inputs.table),
            indices: change.int(inputs.indices),
            steps: change.float(inputs.steps),
        }
    }
}

/// The forward pass.
#[derive(Debug, Clone)]
struct LookUp {
    /// The dtype of the rows.
    compute: FloatDType,
    /// The index of the layer among the step sizes.
    layer: usize,
    /// True if the step size is set before it is used.
    sets_step: bool,
}

#[derive(Debug, Clone)]
struct LookedUp<T: Tensors> {
    /// `[.., columns]`.
    rows: T::Float,
    /// The step size that rounded them, FP32 `[1]`.
    step: T::Float,
    /// FP32 `[layers]`, if the step size was set.
    steps: Option<T::Float>,
}

impl Bundle for LookedUp<Outline> {
    type On<T: Tensors> = LookedUp<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        outputs: LookedUp<S>,
        change: &mut impl Change<S, T>,
    ) -> LookedUp<T> {
        LookedUp {
            rows: change.float(outputs.rows),
            step: change.float(outputs.step),
            steps: outputs.steps.map(|steps| change.float(steps)),
        }
    }
}

impl Operation for LookUp {
    const NAME: &'static str = "learned_embedding_forward";
    type Inputs = TableRows<Outline>;
    type Outputs = LookedUp<Outline>;

    fn outline<T: Tensors>(&self, inputs: &TableRows<T>) -> LookedUp<Outline> {
        let rows = rows_shape(&inputs.table.shape(), &inputs.indices.shape());
        LookedUp {
            rows: FloatMeta::new(rows, self.compute),
            step: FloatMeta::new([1], FloatDType::F32),
            steps: self.sets_step.then(|| FloatMeta::of(&inputs.steps)),
        }
    }

    fn run<K: Kernels>(self, inputs: TableRows<K>) -> LookedUp<K> {
        let TableRows {
            table,
            indices,
            steps,
        } = inputs;
        let of_layer = |steps| LearnedStep {
            steps,
            layer: self.layer,
        };
        let shape = rows_shape(&table.shape(), &indices.shape());
        let set = self
            .sets_step
            .then(|| K::cold_step(table.clone(), of_layer(steps.clone()), AS_IT_IS));
        let step = of_layer(set.clone().unwrap_or(steps));
        let rows = flatten::<K>(K::embedding(table, indices));
        let rows = K::quantize_learned(rows, &step, AS_IT_IS, Layout::RowMajor, None).matrix;
        let rows = K::dequantize_matrix(&rows, self.compute);
        LookedUp {
            rows: K::float_reshape(rows, shape),
            step: K::float_slice(step.steps, &[Slice::from(self.layer..self.layer + 1)]),
            steps: set,
        }
    }
}

/// The backward pass: the gradients of the table and of its step size.
#[derive(Debug, Clone)]
struct LookUpBackward;

#[derive(Debug, Clone)]
struct GradientInputs<T: Tensors> {
    /// That of the rows, `[.., columns]`, of any float dtype.
    gradient: T::Float,
    /// What was looked up, with the step size that rounded it.
    rows: TableRows<T>,
}

impl Bundle for GradientInputs<Outline> {
    type On<T: Tensors> = GradientInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: GradientInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> GradientInputs<T> {
        GradientInputs {
            gradient: change.float(inputs.gradient),
            rows: TableRows::rebuild(inputs.rows, change),
        }
    }
}

#[derive(Debug, Clone)]
struct TableGradient<T: Tensors> {
    /// `[rows, columns]`, in the dtype of the table.
    table: T::Float,
    /// FP32 `[1]`.
    step: T::Float,
}

impl Bundle for TableGradient<Outline> {
    type On<T: Tensors> = TableGradient<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        gradients: TableGradient<S>,
        change: &mut impl Change<S, T>,
    ) -> TableGradient<T> {
        TableGradient {
            table: change.float(gradients.table),
            step: change.float(gradients.step),
        }
    }
}

impl Operation for LookUpBackward {
    const NAME: &'static str = "learned_embedding_backward";
    type Inputs = GradientInputs<Outline>;
    type Outputs = TableGradient<Outline>;

    fn outline<T: Tensors>(&self, inputs: &GradientInputs<T>) -> TableGradient<Outline> {
        TableGradient {
            table: FloatMeta::of(&inputs.rows.table),
            step: FloatMeta::new([1], FloatDType::F32),
        }
    }

    fn run<K: Kernels>(self, inputs: GradientInputs<K>) -> TableGradient<K> {
        let GradientInputs {
            gradient,
            rows:
                TableRows {
                    table,
                    indices,
                    steps,
                },
        } = inputs;
        let (shape, table_shape) = (gradient.shape(), table.shape());
        let step = LearnedStep { steps, layer: 0 };
        let source = ElementSource::Exact {
            x: flatten::<K>(K::embedding(table.clone(), indices.clone())),
            step,
        };
        let gradient = Gradient::Dense(flatten::<K>(gradient));
        let dtype = table.dtype().into();
        let [passed, step] = K::learned_step_backward(gradient, source, AS_IT_IS, dtype);
        let passed = K::float_reshape(passed, shape.clone());
        let gradient = match K::composition_kernels(&K::float_device(&table)) {
            Some(kernels) => (kernels.embedding_gradient)(passed, indices, table_shape[0]),
            None => K::embedding_backward(table, passed, indices),
        };
        // The n of A.3 is that of the table, and not of the rows that were looked up.
        let elements = |shape: &Shape| shape.num_elements() as f64;
        let ratio = (elements(&shape) / elements(&table_shape)).sqrt();
        TableGradient {
            table: gradient,
            step: K::float_mul_scalar(step, Scalar::from(ratio as f32)),
        }
    }
}
