//! The matrix that a product reads in the place of another: the values that its quantized copy stands for.

use burn_backend::{
    FloatDType, IntDType, Scalar, Shape, TensorData, TensorMetadata, tensor::FloatTensor,
};
use cubecl_kernels::rounding;

use super::operand::{Factor, Make};
use crate::{
    data::{
        Kernels, Layout, StochasticKey,
        learned_step::{HadamardSize, HadamardTransform, LearnedStep},
        quantize::{DelayedMaximum, Fallback, FallbackQuantized, Quantized, Scales},
        random_hadamard::{hadamard, inverse_random_hadamard},
        tensors::{Bundle, Change, Outline, Tensors, matrix_shape},
    },
    recipe::{Cast, LinearMatrix, LinearOperand, Residual, Rounding, ScaleSource, Transform},
};

/// More than the share of blocks that fall back where a layer has no threshold: the middle of the paper's range
/// (fallback-int8, appendix D).
const FALLBACK_RATE: f32 = 0.2;
/// Thresholds that are tried, each lower than the one before by this factor.
const THRESHOLDS: i32 = 160;
const THRESHOLD_FACTOR: f32 = 0.96;

/// An operand that is to be made again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remake {
    pub operand: LinearOperand,
    pub cast: Cast,
    /// True for a cast of the running recipe, which takes the state of the layer where there is some.
    pub runs: bool,
    /// Draws the random numbers of the rounding, if that is stochastic.
    pub key: StochasticKey,
}

/// The state of a layer that its casts read.
#[derive(Debug, Clone)]
pub(super) struct CastState<T: Tensors> {
    pub fallback: Option<Fallback<T>>,
    pub delayed: Option<DelayedMaximum<T>>,
    pub step: Option<LearnedStep<T>>,
    /// The size of the layer's transform.
    pub size: Option<HadamardSize>,
}

impl<T: Tensors> Default for CastState<T> {
    fn default() -> Self {
        Self {
            fallback: None,
            delayed: None,
            step: None,
            size: None,
        }
    }
}

impl Bundle for CastState<Outline> {
    type On<T: Tensors> = CastState<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        state: CastState<S>,
        change: &mut impl Change<S, T>,
    ) -> CastState<T> {
        CastState {
            fallback: Option::<Fallback<Outline>>::rebuild(state.fallback, change),
            delayed: Option::<DelayedMaximum<Outline>>::rebuild(state.delayed, change),
            step: state.step.map(|step| LearnedStep {
                steps: change.float(step.steps),
                layer: step.layer,
            }),
            size: state.size,
        }
    }
}

/// The matrix that a product reads in the place of another.
pub(super) struct StandIn<K: Kernels> {
    /// FP32, in the shape of the matrix.
    pub values: FloatTensor<K>,
    /// The largest number under the scale of the matrix, FP32 `[1]`, where it is not the matrix' own maximum.
    pub limit: Option<FloatTensor<K>>,
    /// The smallest and the largest scale as they are stored, and the scale of scales, FP32 `[3]`.
    pub scales: FloatTensor<K>,
}

impl<K: Kernels> StandIn<K> {
    /// The values of a copy whose scales are of the matrix' own maxima.
    fn unlimited(matrix: &Quantized<K>, values: FloatTensor<K>) -> Self {
        Self {
            values,
            limit: None,
            scales: K::extremes(&matrix.scales),
        }
    }
}

impl Remake {
    fn factor(&self) -> Factor {
        use LinearOperand::{Gradient, GradientOfWeight, SavedX, W, WeightOfInput, X};
        match self.operand {
            X | Gradient => Factor::left(&self.cast, false),
            SavedX => Factor::left(&self.cast, true),
            W | GradientOfWeight => Factor::right(&self.cast, false),
            WeightOfInput => Factor::right(&self.cast, true),
        }
    }

    /// True if both are the same numbers.
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.operand.matrix() == other.operand.matrix()
            && self.factor().is_same_as(&other.factor())
            && self.cast.source == other.cast.source
            && self.cast.transform == other.cast.transform
            && self.cast.residual == other.cast.residual
    }

    /// Makes it of the matrix as the layer has it: X `[.., K]`, W `[K, N]`, dY `[.., N]`.
    pub fn stand_in<K: Kernels>(&self, matrix: FloatTensor<K>, state: &CastState<K>) -> StandIn<K> {
        let unknown = CastState::default();
        let state = match self.runs {
            true => state,
            false => &unknown,
        };
        match (self.cast.source, self.cast.residual) {
            (ScaleSource::Step(_), _) => self.learned::<K>(matrix, state),
            (_, Residual::Always) => self.bit_split::<K>(matrix),
            (_, Residual::Above(_)) => self.fallback::<K>(matrix, state.fallback.clone()),
            (ScaleSource::History(_), Residual::Never) => self.delayed::<K>(matrix, state),
            (ScaleSource::Data, Residual::Never) => {
                let cols = matrix_shape(&matrix, "stand_in")[usize::from(!self.of_transpose())];
                let copy = self.make().copy::<K>(matrix, Layout::RowMajor, None);
                let values = K::dequantize_matrix(&copy, FloatDType::F32);
                let values = match self.cast.transform {
                    Transform::RandomHadamard => inverse_random_hadamard::<K>(values, cols),
                    Transform::Identity | Transform::Hadamard(_) => values,
                };
                StandIn::unlimited(&copy, self.turned::<K>(values))
            }
        }
    }

    fn make(&self) -> Make {
        Make::new(self.factor(), || self.key)
    }

    /// True if the copy is one of the transposed matrix.
    fn of_transpose(&self) -> bool {
        self.factor().key.of_transpose
    }

    /// The values of a copy in the orientation of the matrix.
    fn turned<K: Kernels>(&self, values: FloatTensor<K>) -> FloatTensor<K> {
        match self.of_transpose() {
            true => K::float_swap_dims(values, 0, 1),
            false => values,
        }
    }

    fn learned<K: Kernels>(&self, matrix: FloatTensor<K>, state: &CastState<K>) -> StandIn<K> {
        let [rows, cols] = matrix_shape(&matrix, "stand_in");
        let is_weight = self.operand.matrix() == LinearMatrix::W;
        let features = if is_weight { rows } else { cols };
        let size = match self.cast.transform {
            Transform::Identity | Transform::RandomHadamard => HadamardSize::IDENTITY,
            Transform::Hadamard(_) => {
                HadamardSize::largest(features, state.size.unwrap_or(HadamardSize::LARGEST))
            }
        };
        let transform = match is_weight {
            true => HadamardTransform::of_rows(size),
            false => HadamardTransform::of_columns(size),
        };
        let step = state.step.clone().unwrap_or_else(|| {
            let cold = |steps| LearnedStep { steps, layer: 0 };
            let ones = cold(scalar::<K>(&matrix, 1.0));
            cold(K::cold_step(matrix.clone(), ones, transform))
        });
        let copy = K::quantize_learned(matrix, &step, transform, Layout::RowMajor, None).matrix;
        let codes = K::dequantize_matrix(&copy, FloatDType::F32);
        let values = match is_weight {
            true => {
                let columns = K::float_swap_dims(codes, 0, 1);
                K::float_swap_dims(hadamard::<K>(columns, size), 0, 1)
            }
            false => hadamard::<K>(codes, size),
        };
        StandIn {
            // After a transform the limit is not one of the matrix' own elements.
            limit: (size == HadamardSize::IDENTITY).then(|| self.limit::<K>(&copy.scales)),
            ..StandIn::unlimited(&copy, values)
        }
    }

    fn bit_split<K: Kernels>(&self, matrix: FloatTensor<K>) -> StandIn<K> {
        let rounding = match self.cast.rounding {
            Rounding::Nearest => rounding::Rounding::Nearest,
            Rounding::Stochastic => rounding::Rounding::Stochastic(self.key),
        };
        let split = K::bit_split(matrix, rounding);
        let merged = K::merge_parts(&split, Layout::RowMajor);
        StandIn {
            values: K::dequantize_matrix(&merged, FloatDType::F32),
            limit: None,
            scales: K::extremes(&Scales::F32(split.scales)),
        }
    }

    fn fallback<K: Kernels>(
        &self,
        matrix: FloatTensor<K>,
        fallback: Option<Fallback<K>>,
    ) -> StandIn<K> {
        let make = self.make();
        let spec = make.spec(Layout::RowMajor);
        let fallback = fallback.unwrap_or_else(|| {
            let copy = K::quantize_matrix(matrix.clone(), &spec);
            at_rate::<K>(&copy, self.cast.number.largest())
        });
        let FallbackQuantized { base, residual, .. } =
            K::quantize_fallback(matrix, &spec, fallback);
        let rest = K::dequantize_matrix(&residual.as_matrix(&base), FloatDType::F32);
        let values = K::float_add(K::dequantize_matrix(&base, FloatDType::F32), rest);
        StandIn::unlimited(&base, values)
    }

    fn delayed<K: Kernels>(&self, matrix: FloatTensor<K>, state: &CastState<K>) -> StandIn<K> {
        let delayed = state.delayed.clone().unwrap_or_else(|| DelayedMaximum {
            layer: 0,
            maxima: scalar::<K>(&matrix, 0.0),
        });
        let make = self.make();
        let copy = make.copy::<K>(matrix, Layout::RowMajor, Some(&delayed));
        let values = K::dequantize_matrix(&copy, FloatDType::F32);
        StandIn {
            limit: Some(self.limit::<K>(&copy.scales)),
            ..StandIn::unlimited(&copy, self.turned::<K>(values))
        }
    }

    /// The largest number under the one scale of a matrix, FP32 `[1]`.
    fn limit<K: Kernels>(&self, scales: &Scales<K>) -> FloatTensor<K> {
        let Scales::F32(scale) = scales else {
            unreachable!("steps and histories give FP32 scales");
        };
        let scale = K::float_reshape(scale.clone(), Shape::new([1]));
        K::float_mul_scalar(scale, Scalar::from(self.cast.number.largest()))
    }
}

/// FP32 `[1]`, on the device of `like`.
fn scalar<K: Kernels>(like: &FloatTensor<K>, value: f32) -> FloatTensor<K> {
    let device = K::float_device(like);
    K::float_full(
        Shape::new([1]),
        Scalar::from(value),
        &device,
        FloatDType::F32,
    )
}

/// A fallback state for one layer: of some thresholds the smallest at which less than [`FALLBACK_RATE`] of the blocks
/// of this copy fall back. `largest` is the largest number.
fn at_rate<K: Kernels>(copy: &Quantized<K>, largest: f32) -> Fallback<K> {
    let Scales::F32(scales) = &copy.scales else {
        unreachable!("fallback has FP32 scales");
    };
    let device = K::float_device(scales);
    let blocks = scales.shape().num_elements();
    let maxima = K::float_mul_scalar(scales.clone(), Scalar::from(largest));
    let maxima = K::float_reshape(maxima, Shape::new([1, blocks]));
    let largest = K::float_reshape(K::float_max(maxima.clone()), Shape::new([1, 1]));
    let steps: Vec<f32> = (0..THRESHOLDS)
        .map(|step| THRESHOLD_FACTOR.powi(step))
        .collect();
    let steps = TensorData::new(steps, [THRESHOLDS as usize, 1]);
    let thresholds = K::float_mul(K::float_from_data(steps, &device), largest);
    // The sign of a difference says on which side it lies.
    let positive = |tensor| K::float_clamp_min(K::float_sign(tensor), Scalar::from(0.0f32));
    let rates = K::float_mean_dim(positive(K::float_sub(maxima, thresholds.clone())), 1);
    let too_much = K::float_add_scalar(rates, Scalar::from(-FALLBACK_RATE));
    let fits = positive(K::float_neg(too_much));
    // Infinite where they do not fit. The first is the largest maximum itself, so no block exceeds it.
    let fitting = K::float_div(thresholds, fits);
    Fallback {
        layer: 0,
        thresholds: K::float_reshape(K::float_min(fitting), Shape::new([1])),
        counts: K::int_zeros(Shape::new([1, 2]), &device, IntDType::I32),
    }
}
