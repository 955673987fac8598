//! Embeddings whose rows are rounded to INT4 by a learned step size as they are looked up: LSQ without a transform
//! (int4-hq-lss, sections 3.1 and 5, equation 4, Appendix A.3).
//!
//! Rows are rounded, not the table, and none are saved: the backward pass looks them up again. A row that several tokens
//! have counts once for each, as the gradient of the table adds them up.

use std::sync::Arc;

use burn_backend::{
    FloatDType, Scalar, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};

use super::{matrix::flatten, run::Run};
use crate::{
    data::{
        DataBackend, Kernels, Layout, Operation,
        composition::embedding_gradient,
        learned_step::{ElementSource, Gradient, HadamardSize, HadamardTransform, LearnedStep},
        tensors::{FloatMeta, On, Tensors},
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
    /// FP32 `[layers]`.
    steps: FloatTensor<B>,
}

impl<B: DataBackend> Clone for Saved<B> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            table: self.table.clone(),
            indices: self.indices.clone(),
            steps: self.steps.clone(),
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
        let Settled { call, is_cold } = settled;
        let layer = self.layer.index();
        let mut steps = self.layer.step_size(self.slot, &device, call.step).steps;
        if is_cold {
            steps = B::run(ColdStep { layer }, (table.cell().read(), steps));
            if !self.run.is_second() {
                let set = steps.clone();
                self.layer.set_step_size(self.slot, &device, call, set);
            }
        }
        let rows = B::embedding(table.cell().read(), self.indices.clone());
        let operation = RoundRows {
            layer,
            compute: self.compute,
        };
        let rows = B::run(operation, (rows, steps.clone()));
        let saved = Saved {
            layer: self.layer,
            slot: self.slot,
            settled,
            table,
            indices: self.indices,
            steps,
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
        let (table, indices) = (saved.table.into_value(), saved.indices);
        let operation = StraightThrough {
            layer: saved.layer.index(),
            elements: table.shape().num_elements(),
        };
        let rows = B::embedding(table.clone(), indices.clone());
        let (passed, step) = B::run(operation, (gradient, (rows, saved.steps)));
        let Settled { call, is_cold } = saved.settled;
        if !is_cold {
            saved
                .layer
                .add_step_gradient(saved.slot, &device, call, step);
        }
        [Some(embedding_gradient::<B>(table, passed, indices))]
    }
}

/// The same rows, rounded by a step size where nothing is trained. The run is not counted, and moves nothing.
#[derive(Debug, Clone)]
pub(crate) struct EvaluatedEmbedding<B: DataBackend> {
    /// The step size of the table.
    pub step: LearnedStep<B>,
    /// The dtype of the rows.
    pub compute: FloatDType,
    /// The indices.
    pub indices: IntTensor<B>,
}

impl<B: DataBackend> Recorded<B, 1> for EvaluatedEmbedding<B> {
    type Saved = ();

    fn again(&mut self, _: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(self.clone())
    }

    fn forward(self, [table]: [HeldTensor<B>; 1], _: [bool; 1]) -> (HeldTensor<B>, ()) {
        let rows = B::embedding(table.into_value(), self.indices);
        let LearnedStep { steps, layer } = self.step;
        let compute = self.compute;
        let rows = B::run(RoundRows { layer, compute }, (rows, steps));
        (HeldTensor::of("embedding", rows), ())
    }

    fn backward((): (), _: FloatTensor<B>, _: [bool; 1]) -> [Option<FloatTensor<B>>; 1] {
        unreachable!("nothing is trained")
    }
}

/// The steps with that of the layer set by a table.
#[derive(Debug, Clone)]
struct ColdStep {
    layer: usize,
}

impl Operation for ColdStep {
    const NAME: &'static str = "learned_embedding_cold_step";
    /// The table `[rows, columns]`, and FP32 `[layers]`.
    type Inputs = (FloatMeta, FloatMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (_, steps): &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::of(steps)
    }

    fn run<K: Kernels>(self, (table, steps): On<Self::Inputs, K>) -> FloatTensor<K> {
        let layer = self.layer;
        K::cold_step(table, LearnedStep { steps, layer }, AS_IT_IS)
    }
}

/// Rows, rounded by the step size of a layer.
#[derive(Debug, Clone)]
struct RoundRows {
    layer: usize,
    /// The dtype of the result.
    compute: FloatDType,
}

impl Operation for RoundRows {
    const NAME: &'static str = "learned_embedding_round";
    /// Rows `[.., columns]`, and FP32 `[layers]`.
    type Inputs = (FloatMeta, FloatMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (rows, _): &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new(rows.shape(), self.compute)
    }

    fn run<K: Kernels>(self, (rows, steps): On<Self::Inputs, K>) -> FloatTensor<K> {
        let (shape, layer) = (rows.shape(), self.layer);
        let step = LearnedStep { steps, layer };
        let rows = flatten::<K>(rows);
        let rounded = K::quantize_learned(rows, &step, AS_IT_IS, Layout::RowMajor, None);
        let rows = K::dequantize_matrix(&rounded.matrix, self.compute);
        K::float_reshape(rows, shape)
    }
}

/// The gradients of rows before they were rounded, and of the step size, FP32 `[1]` (equation 4 and Appendix A.3).
#[derive(Debug, Clone)]
struct StraightThrough {
    layer: usize,
    /// The n of A.3: the elements of the table, of which not all were looked up, and some several times.
    elements: usize,
}

impl Operation for StraightThrough {
    const NAME: &'static str = "learned_embedding_backward";
    /// The gradient of the rounded rows, of any float dtype; the rows `[.., columns]`, and FP32 `[layers]`.
    type Inputs = (FloatMeta, (FloatMeta, FloatMeta));
    type Outputs = (FloatMeta, FloatMeta);

    fn outline<T: Tensors>(&self, (_, (rows, _)): &On<Self::Inputs, T>) -> Self::Outputs {
        (FloatMeta::of(rows), FloatMeta::new([1], FloatDType::F32))
    }

    fn run<K: Kernels>(
        self,
        (gradient, (rows, steps)): On<Self::Inputs, K>,
    ) -> On<Self::Outputs, K> {
        let (shape, dtype, layer) = (rows.shape(), rows.dtype().into(), self.layer);
        let gradient = Gradient::Dense(flatten::<K>(gradient));
        let source = ElementSource::Exact {
            x: flatten::<K>(rows),
            step: LearnedStep { steps, layer },
        };
        let [passed, step] = K::learned_step_backward(gradient, source, AS_IT_IS, dtype);
        // The kernel's n is that of the rows.
        let ratio = (shape.num_elements() as f64 / self.elements as f64).sqrt();
        let step = K::float_mul_scalar(step, Scalar::from(ratio as f32));
        (K::float_reshape(passed, shape), step)
    }
}
