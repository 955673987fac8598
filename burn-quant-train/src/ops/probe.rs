//! The figures of one matrix: its magnitudes, and the errors of what it is quantized to, or was rounded to.

use burn_backend::{
    DType,
    tensor::{FloatTensor, IntTensor},
};

use super::{
    matrix::flatten,
    stand_in::{CastState, Remake, StandIn},
};
use crate::{
    data::{
        DataBackend, Kernels, Operation,
        health::{BINS, COUNTS, Findings, SUMS},
        tensors::{Bundle, Change, FloatMeta, IntMeta, Outline, Tensors},
    },
    health::SCALES,
};

/// Measures a matrix.
#[derive(Debug, Clone)]
pub(super) struct Probe {
    pub casts: Vec<Remake>,
}

#[derive(Debug, Clone)]
pub(super) struct ProbeInputs<T: Tensors> {
    /// `[.., cols]`, of any float dtype.
    pub matrix: T::Float,
    pub state: CastState<T>,
}

impl Bundle for ProbeInputs<Outline> {
    type On<T: Tensors> = ProbeInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: ProbeInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> ProbeInputs<T> {
        ProbeInputs {
            matrix: change.float(inputs.matrix),
            state: CastState::rebuild(inputs.state, change),
        }
    }
}

impl Operation for Probe {
    const NAME: &'static str = "probe";
    type Inputs = ProbeInputs<Outline>;
    type Outputs = Findings<Outline>;

    fn outline<T: Tensors>(&self, _inputs: &ProbeInputs<T>) -> Findings<Outline> {
        let mut outline = of_magnitudes();
        for _ in &self.casts {
            let lengths = [SUMS, SCALES];
            let numbers = lengths.map(|length| FloatMeta::new([length], DType::F32));
            outline.numbers.extend(numbers);
            outline.counts.push(IntMeta::new([COUNTS], DType::I32));
        }
        outline
    }

    fn run<K: Kernels>(self, inputs: ProbeInputs<K>) -> Findings<K> {
        let matrix = flatten::<K>(inputs.matrix);
        let magnitudes = K::magnitudes(matrix.clone());
        let mut numbers: Vec<FloatTensor<K>> = vec![magnitudes.absmax.clone()];
        let mut counts: Vec<IntTensor<K>> = vec![magnitudes.histogram];
        for cast in &self.casts {
            let StandIn {
                values,
                limit,
                scales,
            } = cast.stand_in::<K>(matrix.clone(), &inputs.state);
            let absmax = magnitudes.absmax.clone();
            let error = K::quantization_error(matrix.clone(), values, absmax, limit);
            numbers.extend([error.sums, scales]);
            counts.push(error.counts);
        }
        Findings { numbers, counts }
    }
}

/// The outline of the largest magnitude and the histogram.
fn of_magnitudes() -> Findings<Outline> {
    Findings {
        numbers: vec![FloatMeta::new([1], DType::F32)],
        counts: vec![IntMeta::new([BINS], DType::I32)],
    }
}

/// Measures a tensor, and compares it with what it was rounded to.
#[derive(Debug, Clone)]
struct Compare;

#[derive(Debug, Clone)]
struct CompareInputs<T: Tensors> {
    /// `[..]`, of any float dtype.
    exact: T::Float,
    /// FP32, of the same shape.
    rounded: Option<T::Float>,
}

impl Bundle for CompareInputs<Outline> {
    type On<T: Tensors> = CompareInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: CompareInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> CompareInputs<T> {
        CompareInputs {
            exact: change.float(inputs.exact),
            rounded: inputs.rounded.map(|rounded| change.float(rounded)),
        }
    }
}

impl Operation for Compare {
    const NAME: &'static str = "compare";
    type Inputs = CompareInputs<Outline>;
    type Outputs = Findings<Outline>;

    fn outline<T: Tensors>(&self, inputs: &CompareInputs<T>) -> Findings<Outline> {
        let mut outline = of_magnitudes();
        if inputs.rounded.is_some() {
            outline.numbers.push(FloatMeta::new([SUMS], DType::F32));
            outline.counts.push(IntMeta::new([COUNTS], DType::I32));
        }
        outline
    }

    fn run<K: Kernels>(self, inputs: CompareInputs<K>) -> Findings<K> {
        let exact = flatten::<K>(inputs.exact);
        let magnitudes = K::magnitudes(exact.clone());
        let mut numbers = vec![magnitudes.absmax.clone()];
        let mut counts = vec![magnitudes.histogram];
        if let Some(rounded) = inputs.rounded {
            let rounded = flatten::<K>(rounded);
            let error = K::quantization_error(exact, rounded, magnitudes.absmax, None);
            numbers.push(error.sums);
            counts.push(error.counts);
        }
        Findings { numbers, counts }
    }
}

/// The largest magnitude of `exact` and its histogram, and the sums and the counts of what it was `rounded` to, FP32:
/// both tensors of one shape with at least one dimension.
pub(crate) fn compare<B: DataBackend>(
    exact: FloatTensor<B>,
    rounded: Option<FloatTensor<B>>,
) -> Findings<B> {
    B::run(Compare, CompareInputs { exact, rounded })
}
