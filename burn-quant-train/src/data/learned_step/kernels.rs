//! The kernels that quantize by learned step sizes.

use burn_backend::{Backend, FloatDType, tensor::FloatTensor};
use cubecl_kernels::layout::Layout;

use super::{HadamardTransform, LearnedMatrix, ResidualRows};
use crate::data::tensors::Tensors;

/// The step size of a layer.
#[derive(Debug, Clone)]
pub struct LearnedStep<T: Tensors> {
    /// FP32 `[layers]`.
    pub steps: T::Float,
    /// The index of the layer.
    pub layer: usize,
}

/// The gradient of the values that a quantized matrix stands for, of the transformed matrix, `[rows, cols]`.
#[derive(Debug, Clone)]
pub enum Gradient<T: Tensors> {
    /// All of it, of any float dtype.
    Dense(T::Float),
    /// Products of sampled rows: row `i` is the sum of those at `positions[i]` and `positions[rows + i]`; -1 adds
    /// nothing.
    Sampled {
        /// `[capacity, cols]`, of any float dtype.
        products: T::Float,
        /// INT32 `[2 rows]`.
        positions: T::Int,
    },
}

/// Where the backward pass of the quantizer finds out which elements were clamped, and how the others were rounded.
#[derive(Debug, Clone)]
pub enum ElementSource<T: Tensors> {
    /// The matrix that was quantized, and its step size.
    Exact {
        /// `[rows, cols]`.
        x: T::Float,
        /// The step.
        step: LearnedStep<T>,
    },
    /// The residuals that the quantizer kept: the gradient of the step is then an estimate from some rows.
    Saved(LearnedMatrix<T>),
}

/// Quantization by learned step sizes on a backend that holds data. Matrices have two dimensions, any strides and any
/// float dtype.
///
/// Codes, and what is saved, are those of [`cubecl_kernels::reference::learned_step`], bit for bit.
pub trait LearnedStepKernels: Backend {
    /// Quantizes the transform of the matrix `x`. `save` names the rows whose residuals are kept; without it nothing is
    /// kept for the backward pass.
    ///
    /// # Panics
    ///
    /// If `x` is no matrix that the transform fits, or the step is not one of the steps.
    fn quantize_learned(
        x: FloatTensor<Self>,
        step: &LearnedStep<Self>,
        transform: HadamardTransform,
        layout: Layout,
        save: Option<ResidualRows>,
    ) -> LearnedMatrix<Self>;

    /// The gradients of the matrix, in `dtype`, and of its step size, FP32 `[1]` (int4-hq-lss, equation 4 and Appendix
    /// A.3).
    ///
    /// # Panics
    ///
    /// If the shapes do not fit each other.
    fn learned_step_backward(
        gradient: Gradient<Self>,
        source: ElementSource<Self>,
        transform: HadamardTransform,
        dtype: FloatDType,
    ) -> [FloatTensor<Self>; 2];

    /// The steps with that of the layer set to 2 mean|x H| / sqrt(7) (int4-hq-lss, Appendix A.4).
    ///
    /// # Panics
    ///
    /// As [`quantize_learned`](Self::quantize_learned).
    fn cold_step(
        x: FloatTensor<Self>,
        step: LearnedStep<Self>,
        transform: HadamardTransform,
    ) -> FloatTensor<Self>;

    /// The mean squared error of the quantized matrix, FP32 `[1]` (int4-hq-lss, Appendix A.5).
    ///
    /// # Panics
    ///
    /// As [`quantize_learned`](Self::quantize_learned).
    fn squared_error(
        x: FloatTensor<Self>,
        step: &LearnedStep<Self>,
        transform: HadamardTransform,
    ) -> FloatTensor<Self>;
}
