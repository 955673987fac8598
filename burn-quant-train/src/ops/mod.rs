//! The quantized operations as an extension of Burn's `Backend`.
//!
//! [`QuantOps`] belongs to the backends that hold data; its default methods compute with ordinary float tensor
//! operations, so any Burn backend gets it by an empty `impl`. The CubeCL backends and Flex replace them by the
//! functions of `cubecl-kernels`. [`QuantBackend`] adds `Autodiff` on top.

pub mod adamw;
pub mod attention;
mod autodiff;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod float;
#[cfg(feature = "fusion")]
mod fusion;
pub mod linear;
pub mod matmul;
#[cfg(feature = "cubecl")]
mod softmax;

use std::sync::Arc;

use burn_backend::{
    Backend, FloatDType, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};
use cubecl_kernels::{granularity::Granularity, number::Number, rounding};
pub use cubecl_kernels::{layout::Layout, rounding::StochasticKey};

use adamw::{AdamWItem, AdamWUpdate, Hyperparameters, Moment, MomentState, StateFormat};
use attention::{AttentionInputs, AttentionKernels, AttentionScores};
use linear::{LinearBackward, LinearForward, LinearGradients, LinearOutput};
use matmul::MatmulKernel;

use crate::{
    QuantTrain,
    layer::{DelayThreshold, FallbackState, Layer},
    recipe::{Cast, LinearRow, Recipe, Rounding},
    tag::Tag,
    tensor::{QuantTensor, View},
};

/// A quantized matrix `[rows, cols]`. At least one of the two copies of the values is there.
#[derive(Debug)]
pub struct Quantized<B: Backend> {
    /// Rows and columns.
    pub shape: [usize; 2],
    /// How it was quantized.
    pub cast: Cast,
    /// The values, `[rows, cols]`.
    pub values: Option<IntTensor<B>>,
    /// The values transposed, `[cols, rows]`.
    pub transposed: Option<IntTensor<B>>,
    /// FP32 `[scale rows, scale cols]`: dequantization multiplies by them. NaN where a block held NaN or Inf.
    pub scales: FloatTensor<B>,
}

/// A matrix quantized with fallback: dequantizes to `base + residual` where a block fell back, to `base` elsewhere.
#[derive(Debug)]
pub struct FallbackQuantized<B: Backend> {
    /// The quantized blocks, row-major.
    pub base: Quantized<B>,
    /// The residuals.
    pub residual: Residual<B>,
}

/// The residuals of the blocks that fell back.
#[derive(Debug)]
pub struct Residual<B: Backend> {
    /// The residual's values, `[rows, cols]`; meaningful in blocks that fell back. Room for every block, since the
    /// count is known on the device only; lives from the quantization to the product and no longer.
    pub values: IntTensor<B>,
    /// FP32 `[scale rows, scale cols]`; 0 in blocks that did not fall back.
    pub scales: FloatTensor<B>,
    /// `[scale rows, scale cols]`: nonzero where the block fell back, u(i, k) of fallback-int8, equation (2). A backend
    /// that needs no indicator because the residual's scale is 0 elsewhere leaves it out.
    pub indicator: Option<IntTensor<B>>,
}

/// What to make of the input of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct InputCasts {
    /// The operand of the forward product, row-major.
    pub forward: Cast,
    /// The copy saved for the backward product, transposed, and the random numbers of its rounding; `None`: it is not
    /// wanted.
    pub saved: Option<(Cast, Option<StochasticKey>)>,
}

/// A layer's fallback state, as the quantization of its input reads and counts.
#[derive(Debug)]
pub struct Fallback<B: Backend> {
    /// The layer's row.
    pub layer: usize,
    /// FP32 `[layers]`.
    pub thresholds: FloatTensor<B>,
    /// INT32 `[layers, 2]`: blocks that fell back, and all blocks.
    pub counts: IntTensor<B>,
}

/// The input of a linear layer, quantized.
#[derive(Debug)]
pub struct LinearInput<B: Backend> {
    /// The operand of the forward product.
    pub forward: Quantized<B>,
    /// Its residuals, if there was a fallback state.
    pub residual: Option<Residual<B>>,
    /// The copy for the backward product, if it was wanted.
    pub saved: Option<Quantized<B>>,
    /// The fallback state's counters, gone up; the buffer may be reused.
    pub counts: Option<IntTensor<B>>,
}

/// A quantized matrix as an operand of a product, possibly transposed.
#[derive(Debug)]
pub struct Operand<'a, B: Backend> {
    /// The matrix.
    pub matrix: &'a Quantized<B>,
    /// Whether the product takes its transpose.
    pub transpose: bool,
}

impl<B: Backend> Quantized<B> {
    /// This matrix as an operand.
    pub fn operand(&self) -> Operand<'_, B> {
        Operand {
            matrix: self,
            transpose: false,
        }
    }
}

impl<B: Backend> Clone for Operand<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Operand<'_, B> {}

impl<B: Backend> Operand<'_, B> {
    /// The transpose of this operand.
    pub fn t(self) -> Self {
        Self {
            transpose: !self.transpose,
            ..self
        }
    }

    /// Rows and columns as the product sees them.
    pub fn shape(&self) -> [usize; 2] {
        let [rows, cols] = self.matrix.shape;
        if self.transpose {
            [cols, rows]
        } else {
            [rows, cols]
        }
    }
}

/// The quantized operations of a backend that holds data.
///
/// Matrices have two dimensions; layers flatten the leading ones. The default methods give the same integers and the
/// same scales as the kernels of `cubecl-kernels`, bit for bit; products agree to FP32 rounding.
pub trait QuantOps: Backend {
    /// Quantizes the matrix `x` (any float dtype, any strides). `layout` says which copies of the values the
    /// products to come will read; `key` names the random numbers of stochastic rounding.
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, or if `cast` rounds stochastically and there is no key.
    fn quantize_matrix(
        x: FloatTensor<Self>,
        cast: Cast,
        layout: Layout,
        key: Option<StochasticKey>,
    ) -> Quantized<Self> {
        let _ = layout;
        float::quantize::<Self>(x, cast, key)
    }

    /// Quantizes the matrix `x` to nearest with fallback: blocks whose largest magnitude exceeds `thresholds[layer]`
    /// also get their residual quantized (fallback-int8, sections 4.3 and 4.4). Returns `counts` with row `layer` gone
    /// up by the blocks that fell back and by all blocks; the buffer may be reused.
    ///
    /// - `thresholds`: FP32 `[layers]`
    /// - `counts`: INT32 `[layers, 2]`
    ///
    /// # Panics
    ///
    /// If `x` does not have two dimensions, if `cast` is not INT8 in square blocks, if `thresholds` and `counts` do not
    /// have these shapes, or if there is no such layer.
    fn quantize_fallback(
        x: FloatTensor<Self>,
        cast: Cast,
        layer: usize,
        thresholds: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> (FallbackQuantized<Self>, IntTensor<Self>) {
        float::quantize_fallback::<Self>(x, cast, layer, thresholds, counts)
    }

    /// Quantizes the input of a linear layer, the matrix `x`, for its forward and its backward product: what
    /// [`quantize_fallback`](Self::quantize_fallback), or [`quantize_matrix`](Self::quantize_matrix) where there is no
    /// fallback state, and a second `quantize_matrix` give, from one read where there is a kernel for it.
    ///
    /// # Panics
    ///
    /// As those two.
    fn quantize_input(
        x: FloatTensor<Self>,
        casts: InputCasts,
        fallback: Option<Fallback<Self>>,
    ) -> LinearInput<Self> {
        quantize_input_twice(x, casts, fallback)
    }

    /// The float matrix that a quantized one stands for.
    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let matrix = float::dequantize::<Self>(&matrix.operand());
        Self::float_cast(matrix, dtype)
    }

    /// The product of two quantized matrices, `a` with the residuals of its fallback blocks if given, plus `bias` along
    /// the columns (fallback-int8, algorithm 1). Accumulates in INT32 inside a block and in FP32 across blocks, or in
    /// FP32 of dequantized values; rounds once, to `dtype`.
    ///
    /// # Panics
    ///
    /// If the inner dimensions differ, or `bias` does not have one element for each column.
    fn quantized_matmul(
        a: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        b: Operand<'_, Self>,
        bias: Option<FloatTensor<Self>>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        float::quantized_matmul::<Self>(a, residual, b, bias, dtype)
    }

    /// The forward pass of a quantized linear layer: [`quantize_input`](Self::quantize_input),
    /// [`quantize_matrix`](Self::quantize_matrix) of a weight that is not quantized yet, and
    /// [`quantized_matmul`](Self::quantized_matmul).
    ///
    /// # Panics
    ///
    /// As those three.
    fn linear_forward(call: LinearForward<'_, Self>) -> LinearOutput<Self> {
        linear::forward(call)
    }

    /// The backward pass of a quantized linear layer: [`quantize_matrix`](Self::quantize_matrix) of dY, and a
    /// [`quantized_matmul`](Self::quantized_matmul) for each gradient that is wanted.
    ///
    /// # Panics
    ///
    /// As those two.
    fn linear_backward(call: LinearBackward<'_, Self>) -> LinearGradients<Self> {
        linear::backward(call)
    }

    /// Moves every layer's threshold by its fallback rate and sets the counters to zero, without a host read
    /// (fallback-int8, algorithm 2). Buffers may be reused.
    fn delay_threshold(state: FallbackState<Self>, config: &DelayThreshold) -> FallbackState<Self> {
        float::delay_threshold::<Self>(state, config)
    }

    /// The kernel of products in BF16 and FP16, where the device has one that is faster than `float_matmul`.
    fn matmul_kernel(device: &Device<Self>) -> Option<MatmulKernel<Self>> {
        let _ = device;
        None
    }

    /// Attention with a softmax of one kernel, where there is one; without it attention is built from float operations.
    fn attention_kernels() -> Option<AttentionKernels<Self>> {
        None
    }

    /// One AdamW step of all these parameters, without a host read where there are kernels. Buffers that nothing else
    /// holds are updated in place.
    ///
    /// - `clock`: INT32 `[2]`, the steps taken and skipped, this one counted: see [`tick`](Self::tick)
    /// - `nonfinite`: INT32 `[1]`; if it is not 0, nothing changes
    ///
    /// # Panics
    ///
    /// If shapes do not fit, or a hyperparameter is out of its range.
    fn adamw(
        items: Vec<AdamWItem<Self>>,
        clock: &IntTensor<Self>,
        nonfinite: Option<&IntTensor<Self>>,
        hyperparameters: &Hyperparameters,
    ) -> Vec<AdamWUpdate<Self>> {
        adamw::step::<Self>(items, clock, nonfinite, hyperparameters)
    }

    /// Counts a step on the device: as taken, or as skipped if `nonfinite` is not 0.
    fn tick(clock: IntTensor<Self>, nonfinite: Option<&IntTensor<Self>>) -> IntTensor<Self> {
        adamw::tick::<Self>(clock, nonfinite)
    }

    /// INT32 `[1]`: one more than the index of a gradient that holds NaN or Inf, 0 if none does.
    fn find_nonfinite(gradients: &[FloatTensor<Self>], device: &Device<Self>) -> IntTensor<Self> {
        adamw::find_nonfinite::<Self>(gradients, device)
    }

    /// Compresses one moment of an optimizer (coat-fp8, section 4).
    fn compress_moment(
        x: FloatTensor<Self>,
        format: StateFormat,
        moment: Moment,
    ) -> MomentState<Self> {
        adamw::compress::<Self>(x, format, moment)
    }

    /// The FP32 values of a moment.
    fn decompress_moment(state: MomentState<Self>, moment: Moment) -> FloatTensor<Self> {
        adamw::decompress::<Self>(state, moment)
    }
}

/// [`QuantOps::quantize_input`] by an operation for each copy.
fn quantize_input_twice<B: QuantOps>(
    x: FloatTensor<B>,
    casts: InputCasts,
    fallback: Option<Fallback<B>>,
) -> LinearInput<B> {
    let saved = casts
        .saved
        .map(|(cast, key)| B::quantize_matrix(x.clone(), cast, Layout::Transposed, key));
    let (forward, residual, counts) = match fallback {
        None => {
            let forward = B::quantize_matrix(x, casts.forward, Layout::RowMajor, None);
            (forward, None, None)
        }
        Some(Fallback {
            layer,
            thresholds,
            counts,
        }) => {
            let (quantized, counts) =
                B::quantize_fallback(x, casts.forward, layer, thresholds, counts);
            (quantized.base, Some(quantized.residual), Some(counts))
        }
    };
    LinearInput {
        forward,
        residual,
        saved,
        counts,
    }
}

/// The rounding of a cast, by the random numbers that `key` names.
///
/// # Panics
///
/// If the cast rounds stochastically and there is no key.
fn keyed(cast: Cast, key: Option<StochasticKey>) -> rounding::Rounding {
    match cast.rounding {
        Rounding::Nearest => rounding::Rounding::Nearest,
        Rounding::Stochastic => {
            rounding::Rounding::Stochastic(key.expect("quantize: stochastic rounding needs a key"))
        }
    }
}

/// The block size of a cast with fallback.
///
/// # Panics
///
/// If the cast is not INT8 in square blocks.
fn fallback_block(operation: &str, cast: Cast) -> usize {
    match (cast.format, cast.granularity) {
        (Number::Int8, Granularity::Block(block)) => block,
        _ => panic!("{operation}: fallback of {cast:?}; it works on INT8 in square blocks"),
    }
}

/// Panics unless these are the state of layers, this one among them.
fn check_fallback_state(
    operation: &str,
    layer: usize,
    thresholds: &impl TensorMetadata,
    counts: &impl TensorMetadata,
) {
    let (thresholds, counts) = (thresholds.shape(), counts.shape());
    let fits = matches!(thresholds.as_slice(), &[layers] if layer < layers)
        && counts.as_slice() == [thresholds[0], 2];
    assert!(
        fits,
        "{operation}: thresholds {thresholds:?}, counts {counts:?}, layer {layer}; pass thresholds [layers] and counts \
         [layers, 2], and a layer below their length"
    );
}

/// A backend whose float tensors are, or wrap, those of a backend that holds data: one with [`QuantOps`], or the
/// decorator over one. Optimizers step the parameters of such backends.
pub trait DataBackend: Backend {
    /// The backend that holds the data.
    type Base: QuantOps<Device = Device<Self>>;

    /// Unwraps a tensor.
    fn into_base(tensor: FloatTensor<Self>) -> FloatTensor<Self::Base>;

    /// Wraps a tensor, as a value of its own.
    fn from_base(tensor: FloatTensor<Self::Base>) -> FloatTensor<Self>;
}

impl<B: QuantOps> DataBackend for B {
    type Base = B;

    fn into_base(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn from_base(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }
}

impl<B: QuantOps, R: Recipe> DataBackend for QuantTrain<B, R> {
    type Base = B;

    fn into_base(tensor: FloatTensor<Self>) -> FloatTensor<B> {
        tensor.into_primitive()
    }

    fn from_base(tensor: FloatTensor<B>) -> FloatTensor<Self> {
        QuantTensor::new(tensor)
    }
}

/// A backend that quantized layers run on: one with [`QuantOps`], or `Autodiff` over one.
pub trait QuantBackend: Backend {
    /// The backend that holds the data.
    type Base: QuantOps<Device = Device<Self>>;

    /// A quantized linear layer, recorded for the backward pass where there is one.
    fn quantized_linear(call: LinearCall<'_, Self>) -> FloatTensor<Self>;

    /// `lhs [.., M, K]` times `rhs [.., K, N]` with the same leading dimensions, in BF16 or FP16, by a
    /// [kernel](QuantOps::matmul_kernel) of the backend that holds the data, recorded for the backward pass where there
    /// is one.
    fn matmul_by(
        kernel: MatmulKernel<Self::Base>,
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `softmax(scale Q Kᵀ + mask) V` by kernels of the backend that holds the data, recorded for the backward pass
    /// where there is one.
    fn attention_by(
        kernels: AttentionKernels<Self::Base>,
        inputs: AttentionInputs<FloatTensor<Self>>,
        scores: AttentionScores,
    ) -> FloatTensor<Self>;
}

/// A call of a quantized linear layer: Y `[.., N]` = X `[.., K]` W `[K, N]` + bias `[N]`.
pub struct LinearCall<'a, B: QuantBackend> {
    /// X.
    pub x: FloatTensor<B>,
    /// The tag of X, if X is the matrix that the tag speaks of.
    pub x_tag: Option<&'a Tag<B::Base>>,
    /// W, with leading dimensions of 1.
    pub weight: FloatTensor<B>,
    /// The tag of W.
    pub weight_tag: &'a Tag<B::Base>,
    /// Whether W shows the tagged matrix or its transpose.
    pub weight_view: View,
    /// The bias.
    pub bias: Option<FloatTensor<B>>,
    /// The layer.
    pub layer: Arc<Layer<B::Base>>,
    /// The recipe's row.
    pub row: LinearRow,
    /// The dtype of Y.
    pub compute: FloatDType,
}

impl<B: QuantOps> QuantBackend for B {
    type Base = B;

    fn quantized_linear(call: LinearCall<'_, Self>) -> FloatTensor<Self> {
        let weight = autodiff::WeightInput {
            weight: call.weight,
            tag: call.weight_tag,
            view: call.weight_view,
        };
        let input = autodiff::Input {
            x: call.x,
            tag: call.x_tag,
        };
        let (output, _) = autodiff::forward::<B>(
            input,
            weight,
            call.bias,
            &call.layer,
            &call.row,
            call.compute,
            false,
        );
        output
    }

    fn matmul_by(
        kernel: MatmulKernel<Self>,
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        kernel(lhs, rhs)
    }

    fn attention_by(
        kernels: AttentionKernels<Self>,
        inputs: AttentionInputs<FloatTensor<Self>>,
        scores: AttentionScores,
    ) -> FloatTensor<Self> {
        (kernels.forward)(inputs, scores)
    }
}

#[cfg(feature = "ndarray")]
impl QuantOps for burn_ndarray::NdArray {}
