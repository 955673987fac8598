//! Quantization with fallback (fallback-int8, section 4.3): matrices with the residuals of some blocks, and the state
//! that says of which.

use burn_backend::{DType, TensorMetadata};
use cubecl_kernels::{
    granularity::Granularity, number::Number, quantize::QuantizeSpec, rounding::Rounding,
    scale::ScaleNumber,
};

use super::matrix::{Format, Quantized, Scales};
use crate::data::tensors::{Bundle, Change, FloatMeta, IntMeta, Outline, Tensors};

/// A matrix quantized with fallback: dequantizes to `base + residual` where a block fell back, to `base` elsewhere.
#[derive(Debug, Clone)]
pub struct FallbackQuantized<T: Tensors> {
    /// The quantized blocks, row-major.
    pub base: Quantized<T>,
    /// The residuals.
    pub residual: Residual<T>,
    /// INT32 `[layers, 2]`: the fallback state's increased counters; the buffer may be reused.
    pub counts: T::Int,
}

impl Bundle for FallbackQuantized<Outline> {
    type On<T: Tensors> = FallbackQuantized<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        matrix: FallbackQuantized<S>,
        change: &mut impl Change<S, T>,
    ) -> FallbackQuantized<T> {
        FallbackQuantized {
            base: Quantized::rebuild(matrix.base, change),
            residual: Residual::rebuild(matrix.residual, change),
            counts: change.int(matrix.counts),
        }
    }
}

/// The residuals of the blocks that fell back.
#[derive(Debug, Clone)]
pub struct Residual<T: Tensors> {
    /// The residual's values, `[rows, cols]`; meaningful in blocks that fell back. Room for every block, since the
    /// count is known on the device only; lives from the quantization to the product and no longer.
    pub values: T::Int,
    /// FP32 `[scale rows, scale cols]`; 0 in blocks that did not fall back.
    pub scales: T::Float,
    /// `[scale rows, scale cols]`: nonzero where the block fell back, u(i, k) of fallback-int8, equation (2). A backend
    /// that needs no indicator because the residual's scale is 0 elsewhere leaves it out.
    pub indicator: Option<T::Int>,
}

impl Bundle for Residual<Outline> {
    type On<T: Tensors> = Residual<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        residual: Residual<S>,
        change: &mut impl Change<S, T>,
    ) -> Residual<T> {
        Residual {
            values: change.int(residual.values),
            scales: change.float(residual.scales),
            indicator: residual.indicator.map(|it| change.int(it)),
        }
    }
}

impl<T: Tensors> Residual<T>
where
    Quantized<T>: Clone,
{
    /// The residual of this matrix as a matrix of its own, row-major: zeros in blocks that did not fall back.
    pub(crate) fn as_matrix(&self, base: &Quantized<T>) -> Quantized<T> {
        Quantized {
            values: Some(self.values.clone()),
            transposed: None,
            scales: Scales::F32(self.scales.clone()),
            absmax: None,
            ..*base
        }
    }
}

impl Residual<Outline> {
    /// The outline of the residual of a matrix of this shape.
    pub(crate) fn outline(shape: [usize; 2], format: Format) -> Self {
        Self {
            values: IntMeta::new(shape, DType::I8),
            scales: FloatMeta::new(format.scales_shape(shape), DType::F32),
            indicator: Some(IntMeta::new(format.scales_shape(shape), DType::U32)),
        }
    }
}

/// The state that says which blocks of a layer's input fall back, and that counts them.
#[derive(Debug, Clone)]
pub struct Fallback<T: Tensors> {
    /// The layer's row in both tensors.
    pub layer: usize,
    /// FP32 `[layers]`: blocks whose largest magnitude exceeds the layer's entry fall back.
    pub thresholds: T::Float,
    /// INT32 `[layers, 2]`: blocks that fell back, and all blocks.
    pub counts: T::Int,
}

impl Bundle for Fallback<Outline> {
    type On<T: Tensors> = Fallback<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        fallback: Fallback<S>,
        change: &mut impl Change<S, T>,
    ) -> Fallback<T> {
        Fallback {
            layer: fallback.layer,
            thresholds: change.float(fallback.thresholds),
            counts: change.int(fallback.counts),
        }
    }
}

impl<T: Tensors> Fallback<T> {
    /// Panics unless these are the state of layers, this one among them.
    pub(crate) fn check(&self, operation: &str) {
        let (thresholds, counts) = (self.thresholds.shape(), self.counts.shape());
        let layer = self.layer;
        let fits = matches!(thresholds.as_slice(), &[layers] if layer < layers)
            && counts.as_slice() == [thresholds[0], 2];
        assert!(
            fits,
            "{operation}: thresholds {thresholds:?}, counts {counts:?}, layer {layer}; pass thresholds [layers] and \
             counts [layers, 2], and a layer below their length"
        );
    }
}

/// The block size of a spec with fallback.
///
/// # Panics
///
/// If it is not INT8 to nearest in square blocks with FP32 scales.
pub(crate) fn fallback_block(operation: &str, spec: &QuantizeSpec) -> usize {
    let Granularity::Block(block) = spec.granularity else {
        panic!("{operation}: fallback of {spec:?}; it works on square blocks");
    };
    let is_int8 = (spec.number, spec.scale) == (Number::Int8, ScaleNumber::F32);
    assert!(
        is_int8 && spec.rounding == Rounding::Nearest,
        "{operation}: fallback of {spec:?}; it works on INT8 to nearest with FP32 scales"
    );
    block
}
