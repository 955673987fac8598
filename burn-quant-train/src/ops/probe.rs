//! The figures of one matrix: its magnitudes, and the errors of what it is quantized to.

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
        Kernels, Operation,
        health::{BINS, COUNTS},
        tensors::{Bundle, Change, FloatMeta, IntMeta, Outline, Tensors},
    },
    health::NUMBERS,
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

/// The findings of a probe, in two tensors, so that few are read.
#[derive(Debug, Clone)]
pub(crate) struct Probed<T: Tensors> {
    /// FP32: the largest magnitude, and for each cast the sums and the scales.
    pub numbers: T::Float,
    /// INT32, bits of U32: the histogram, and for each cast the counts.
    pub counts: T::Int,
}

impl Bundle for Probed<Outline> {
    type On<T: Tensors> = Probed<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        probed: Probed<S>,
        change: &mut impl Change<S, T>,
    ) -> Probed<T> {
        Probed {
            numbers: change.float(probed.numbers),
            counts: change.int(probed.counts),
        }
    }
}

impl Operation for Probe {
    const NAME: &'static str = "probe";
    type Inputs = ProbeInputs<Outline>;
    type Outputs = Probed<Outline>;

    fn outline<T: Tensors>(&self, _inputs: &ProbeInputs<T>) -> Probed<Outline> {
        let casts = self.casts.len();
        Probed {
            numbers: FloatMeta::new([1 + NUMBERS * casts], DType::F32),
            counts: IntMeta::new([BINS + COUNTS * casts], DType::I32),
        }
    }

    fn run<K: Kernels>(self, inputs: ProbeInputs<K>) -> Probed<K> {
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
        Probed {
            numbers: K::concat_floats(numbers),
            counts: K::concat_ints(counts),
        }
    }
}
