//! Recipes: what each operand, saved activation and gradient becomes. A recipe is a row of data.
//!
//! | recipe | forward X / W | saved X | gradient of Y |
//! | --- | --- | --- | --- |
//! | [`MixedPrecision`] | compute dtype | compute dtype | compute dtype |
//! | [`BlockInt8`] | INT8 128x128 nearest / the same | INT8 128x128 stochastic | INT8 128x128 stochastic |
//! | [`FallbackInt8`] | the same, X with fallback | INT8 128x128 stochastic | INT8 128x128 stochastic |
//!
//! Between layers all of them keep the compute dtype.

use std::{fmt::Debug, marker::PhantomData};

use burn_backend::{FloatDType, bf16, f16};
pub use cubecl_kernels::{granularity::Granularity, number::Number as Format};

/// How a scaled value becomes an integer (fallback-int8, section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest integer, ties to even.
    Nearest,
    /// Up with the probability of the fraction, so that the expectation is the value; the random bits come from Philox.
    Stochastic,
}

/// How a tensor is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cast {
    /// The number format.
    pub format: Format,
    /// Which elements share one scale.
    pub granularity: Granularity,
    /// How values are rounded.
    pub rounding: Rounding,
}

impl Cast {
    /// INT8 in square blocks of side `block`.
    pub const fn int8(block: usize, rounding: Rounding) -> Self {
        Self {
            format: Format::Int8,
            granularity: Granularity::Block(block),
            rounding,
        }
    }
}

/// What the operands of a linear layer's three products become: Y = X W, dX = dY Wᵀ, dW = Xᵀ dY.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearRow {
    /// X in the forward product.
    pub x: Cast,
    /// Whether blocks of X with outliers get a second, residual block (fallback-int8, section 4.3).
    pub fallback: bool,
    /// W in the forward product and in dX.
    pub w: Cast,
    /// X as saved for the backward pass.
    pub saved_x: Cast,
    /// dY in both backward products.
    pub grad_y: Cast,
}

/// A recipe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The recipe's name, as in the book's table.
    pub name: &'static str,
    /// The dtype of what is not quantized: see [`precision`](crate::precision).
    pub compute: FloatDType,
    /// What quantized linear layers do; `None`: nothing is quantized.
    pub linear: Option<LinearRow>,
}

/// A recipe as a type: the second parameter of [`QuantTrain`](crate::QuantTrain).
pub trait Recipe: Clone + Copy + Default + Debug + Send + Sync + 'static {
    /// The recipe.
    const ROW: Row;
}

/// An element type that a recipe can compute in.
pub trait ComputeDtype: Clone + Copy + Default + Debug + Send + Sync + 'static {
    /// The dtype.
    const DTYPE: FloatDType;
}

impl ComputeDtype for f32 {
    const DTYPE: FloatDType = FloatDType::F32;
}

impl ComputeDtype for bf16 {
    const DTYPE: FloatDType = FloatDType::BF16;
}

impl ComputeDtype for f16 {
    const DTYPE: FloatDType = FloatDType::F16;
}

/// FP32 master weights, everything else in the compute dtype `E` (training-precision guide). With `E = f32` it changes
/// no bit of what the inner backend computes.
#[derive(Debug, Clone, Copy, Default)]
pub struct MixedPrecision<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for MixedPrecision<E> {
    const ROW: Row = Row {
        name: "mixed-precision",
        compute: E::DTYPE,
        linear: None,
    };
}

/// INT8 linear layers with one scale for each `BLOCK` x `BLOCK` block: [`FallbackInt8`] without fallback, its baseline.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockInt8<E = bf16, const BLOCK: usize = 128>(PhantomData<E>);

impl<E: ComputeDtype, const BLOCK: usize> Recipe for BlockInt8<E, BLOCK> {
    const ROW: Row = Row {
        name: "block-int8",
        compute: E::DTYPE,
        linear: Some(block_int8(BLOCK, false)),
    };
}

/// INT8 linear layers with dynamic block-level fallback: blocks of X whose largest magnitude exceeds the layer's
/// threshold carry a second INT8 block with the residual (fallback-int8, sections 4 and 5.1).
#[derive(Debug, Clone, Copy, Default)]
pub struct FallbackInt8<E = bf16, const BLOCK: usize = 128>(PhantomData<E>);

impl<E: ComputeDtype, const BLOCK: usize> Recipe for FallbackInt8<E, BLOCK> {
    const ROW: Row = Row {
        name: "fallback-int8",
        compute: E::DTYPE,
        linear: Some(block_int8(BLOCK, true)),
    };
}

const fn block_int8(block: usize, fallback: bool) -> LinearRow {
    assert!(
        matches!(block, 16 | 32 | 64 | 128),
        "INT8 blocks have side 16, 32, 64 or 128"
    );
    LinearRow {
        x: Cast::int8(block, Rounding::Nearest),
        fallback,
        w: Cast::int8(block, Rounding::Nearest),
        saved_x: Cast::int8(block, Rounding::Stochastic),
        grad_y: Cast::int8(block, Rounding::Stochastic),
    }
}
