//! Quantization of matrices to numbers with shared scales, and back (fallback-int8, section 4.2; OCP Microscaling
//! Formats; NVFP4, arXiv 2509.25149).
//!
//! | what | how often `x` is read | where |
//! | --- | --- | --- |
//! | INT8 in blocks, FP32 scales | once | `block` |
//! | groups, scales that do not depend on the matrix | once | `group`, of rows without gaps `group::rows` |
//! | FP8 in groups of 128, of the matrix and of its transpose | once, where there is a kernel for it | `group::whole_tiles` |
//! | tokens of up to 16,384 elements, row-major, such scales too | once | `token` |
//! | a scale that was given | once | `given` |
//! | the scale of a maximum that earlier data had | once, where there is none twice | `delayed` |
//! | FP8 of a matrix with one scale, where there is a kernel for it | twice, in one launch | `matrix_scale` |
//! | everything else | twice: for the maxima of the regions, and to encode | `absmax`, `scales`, `encode` |

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_float},
    error::KernelError,
    granularity::Granularity,
    layout::Layout,
    number::{Number, Symmetric},
    rounding::Rounding,
    scale::ScaleNumber,
    shape::MatrixShape,
};

pub(crate) mod absmax;
pub(crate) mod beside;
pub(crate) mod block;
pub(crate) mod buffers;
pub(crate) mod delayed;
mod dequantize;
mod encode;
mod given;
mod group;
pub mod learned_step;
mod load;
pub(crate) mod matrix_scale;
pub(crate) mod reduction;
mod run;
mod scales;
mod source;
pub(crate) mod staged;
mod stored;
pub(crate) mod tile;
mod token;
mod unpack;
pub(crate) mod whole_runs;

use block::{BlockOutput, Round};
use buffers::allocate;
pub use delayed::{DelayedMaximum, quantize_delayed};
pub use dequantize::dequantize;
pub(crate) use dequantize::runs_of;
pub(crate) use given::check_given;
pub use given::quantize_by;
pub use source::MatrixSource;
pub use unpack::unpack_int4;

const OPERATION: &str = "quantize";

/// How to quantize a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantizeSpec {
    /// The number format of the values.
    pub number: Number,
    /// The number format of the scales.
    pub scale: ScaleNumber,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// How values are rounded.
    pub rounding: Rounding,
    /// Which copies are written.
    pub layout: Layout,
}

impl QuantizeSpec {
    /// MXFP8 (OCP Microscaling Formats): E4M3 in groups of 32 with E8M0 scales.
    pub const MXFP8: Self =
        Self::new(Number::E4M3, Granularity::Group(32)).with_scale(ScaleNumber::E8M0);
    /// MXFP4 (OCP Microscaling Formats): E2M1 in groups of 32 with E8M0 scales.
    pub const MXFP4: Self =
        Self::new(Number::E2M1, Granularity::Group(32)).with_scale(ScaleNumber::E8M0);
    /// NVFP4 (arXiv 2509.25149): E2M1 in groups of 16 with E4M3 scales under a tensor scale.
    pub const NVFP4: Self =
        Self::new(Number::E2M1, Granularity::Group(16)).with_scale(ScaleNumber::E4M3);

    /// Row-major values rounded to nearest, with FP32 scales.
    pub const fn new(number: Number, granularity: Granularity) -> Self {
        Self {
            number,
            scale: ScaleNumber::F32,
            granularity,
            rounding: Rounding::Nearest,
            layout: Layout::RowMajor,
        }
    }

    /// [`Self::new`] of INT8.
    pub const fn int8(granularity: Granularity) -> Self {
        Self::new(Number::Int8, granularity)
    }

    /// The same with other scales.
    pub const fn with_scale(self, scale: ScaleNumber) -> Self {
        Self { scale, ..self }
    }

    /// The same with other regions.
    pub const fn with_granularity(self, granularity: Granularity) -> Self {
        Self {
            granularity,
            ..self
        }
    }

    /// The same with another rounding.
    pub const fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// The same with other copies.
    pub const fn with_layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }
}

/// A quantized matrix, or a batch of them, on the device.
///
/// A value is its number times the scale of its region, and where there is one the tensor scale of its matrix, of which
/// the two scales are multiplied first.
#[derive(Debug)]
pub struct Quantized<R: Runtime> {
    /// The values, `[.., rows, storage.stored_cols(cols)]` of the type of [`Number::storage`]: see
    /// [`Storage`](crate::number::Storage). `None` for [`Layout::Transposed`].
    pub values: Option<TensorHandle<R>>,
    /// The values transposed and stored the same way, `[.., cols, storage.stored_cols(rows)]`. `None` for
    /// [`Layout::RowMajor`].
    pub transposed: Option<TensorHandle<R>>,
    /// `[.., scale_rows, scale_cols]` in the orientation of the input whatever the layout: f32 for
    /// [`ScaleNumber::F32`], else u8.
    pub scales: TensorHandle<R>,
    /// f32 `[batch]`, where [`ScaleNumber::has_tensor_scale`].
    pub tensor_scale: Option<TensorHandle<R>>,
    /// The number format of the values.
    pub number: Number,
    /// The number format of the scales.
    pub scale: ScaleNumber,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// The shape of the input, in elements.
    pub shape: MatrixShape,
    /// True where the input had a batch dimension; the tensors then have one too.
    pub batched: bool,
}

impl<R: Runtime> Quantized<R> {
    /// The matrix with this one of its copies; as it is where that was not written, or both are meant.
    pub fn only(self, layout: Layout) -> Self {
        match layout {
            Layout::RowMajor if self.values.is_some() => Self {
                transposed: None,
                ..self
            },
            Layout::Transposed if self.transposed.is_some() => Self {
                values: None,
                ..self
            },
            Layout::RowMajor | Layout::Transposed | Layout::Both => self,
        }
    }
}

impl<R: Runtime> Clone for Quantized<R> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            transposed: self.transposed.clone(),
            scales: self.scales.clone(),
            tensor_scale: self.tensor_scale.clone(),
            number: self.number,
            scale: self.scale,
            granularity: self.granularity,
            shape: self.shape,
            batched: self.batched,
        }
    }
}

/// A matrix that kernels can quantize, and how.
struct Input<'a, R: Runtime> {
    x: &'a TensorHandle<R>,
    view: MatrixView,
    spec: &'a QuantizeSpec,
    number: Symmetric,
}

impl<'a, R: Runtime> Input<'a, R> {
    /// Checks all but the granularity.
    fn new(
        client: &ComputeClient<R>,
        operation: &'static str,
        x: &'a TensorHandle<R>,
        spec: &'a QuantizeSpec,
    ) -> Result<Self, KernelError> {
        let view = MatrixView::new(operation, x)?;
        check_float(client, operation, "x", x.dtype)?;
        let number = check_number(operation, spec.number)?;
        stored::check_size(operation, spec, view.shape)?;
        Ok(Self {
            x,
            view,
            spec,
            number,
        })
    }
}

/// Quantizes `x`, a matrix of f32, f16 or bf16 with any strides.
///
/// INT8 blocks with FP32 scales, and with FP32 or E8M0 scales groups and row-major tokens of up to 16,384 elements, are
/// read once: their elements stay on chip between the search of the maximum and the rounding. Everything else is read
/// twice. The numbers are those of
/// [`reference::quantize`](crate::reference::quantize()), to the bit; a region that holds NaN or an infinity has scale
/// NaN, so that it dequantizes to NaN.
///
/// # Errors
///
/// When `x` is no matrix or no float tensor, when the granularity's size is not one of those it lists, or when the
/// number is not symmetric.
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    check_granularity(OPERATION, spec.granularity)?;
    let input = Input::new(client, OPERATION, x, spec)?;
    Ok(quantize_input(client, &input))
}

/// Quantizes an input of one of the granularities.
fn quantize_input<R: Runtime>(client: &ComputeClient<R>, input: &Input<R>) -> Quantized<R> {
    let &Input { x, spec, .. } = input;
    let output = allocate(client, &input.view, spec);
    if input.view.shape.num_elements() == 0 {
        return Quantized {
            tensor_scale: output.tensor_scale.map(|scale| zeros(client, &scale)),
            ..output
        };
    }
    // SAFETY: the output was allocated for this input, which is not empty.
    #[allow(unsafe_code)]
    unsafe {
        match spec.granularity {
            Granularity::Block(block)
                if spec.number == Number::Int8 && spec.scale == ScaleNumber::F32 =>
            {
                int8_blocks(client, input, block, &output);
            }
            Granularity::Group(size) if group::reads_once(size, spec) => {
                group::launch(client, input, size, &output);
            }
            Granularity::Token if token::reads_once(input.view.shape.cols, spec) => {
                token::launch(client, input, &output);
            }
            Granularity::Tensor if !spec.scale.has_tensor_scale() => {
                if !matrix_scale::current(client, input, &output) {
                    let maxima = absmax::parts(client, x, &input.view, absmax::Count::All, None);
                    let inverses = scales::of_parts(client, &maxima, &output);
                    encode::by_regions(client, input, &inverses, &output);
                }
            }
            Granularity::Block(_)
            | Granularity::Group(_)
            | Granularity::Token
            | Granularity::Channel
            | Granularity::Tensor => {
                let maxima = absmax::launch(client, x, &input.view, spec.granularity);
                let inverses = scales::launch(client, maxima, &output);
                encode::by_regions(client, input, &inverses, &output);
            }
        }
    }
    output
}

/// Quantizes `x`, a matrix of f32, f16 or bf16 with any strides, and its transpose, by one spec: what a product needs of
/// a matrix that another product reads across, where groups lie along what a product sums over (DeepSeek-V3, arXiv
/// 2412.19437, section 3.5.2).
///
/// On CUDA's sm_90 FP8 to nearest in groups of 128, row-major, of whole tiles of 128 x 128 elements of 16 bits is one
/// read of `x`. Elsewhere both are quantized one after the other, to the same bits.
///
/// # Errors
///
/// As [`quantize`].
pub fn quantize_both_ways<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<[Quantized<R>; 2], KernelError> {
    check_granularity(OPERATION, spec.granularity)?;
    let mut transpose = x.clone();
    let rank = transpose.shape().len();
    if rank >= 2 {
        transpose.metadata.swap(rank - 2, rank - 1);
    }
    let both = [
        Input::new(client, OPERATION, x, spec)?,
        Input::new(client, OPERATION, &transpose, spec)?,
    ];
    let from_one_read = group::whole_tiles::launch(client, &both);
    Ok(from_one_read.unwrap_or_else(|| both.map(|input| quantize_input(client, &input))))
}

/// FP32 zeros in the shape of a tensor.
fn zeros<R: Runtime>(client: &ComputeClient<R>, like: &TensorHandle<R>) -> TensorHandle<R> {
    let shape = like.shape().to_vec();
    let bytes = vec![0; like.dtype.size() * shape.iter().product::<usize>().max(1)];
    TensorHandle::new_contiguous(shape, client.create_from_slice(&bytes), like.dtype)
}

/// # Safety
///
/// `output` was allocated for `input`, which is not empty.
#[allow(unsafe_code)]
unsafe fn int8_blocks<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    block: usize,
    output: &Quantized<R>,
) {
    let (round, key) = match input.spec.rounding {
        Rounding::Nearest => (Round::Nearest, None),
        Rounding::Stochastic(key) => (Round::Stochastic, Some(key)),
    };
    let written = BlockOutput {
        row_major: output.values.as_ref().map(|values| (values, round)),
        transposed: output.transposed.as_ref().map(|values| (values, round)),
        scales: &output.scales,
        fallback: None,
    };
    // SAFETY: the caller's promise is that of this function, but for the fallback, which there is not.
    #[allow(unsafe_code)]
    unsafe {
        block::launch(client, input.x, &input.view, block, key, &written);
    }
}

/// Accepts the block and group sizes that kernels are written for.
pub(crate) fn check_granularity(
    operation: &'static str,
    granularity: Granularity,
) -> Result<(), KernelError> {
    let (known, remedy) = match granularity {
        Granularity::Block(size) => (
            matches!(size, 16 | 32 | 64 | 128),
            "use blocks of 16, 32, 64 or 128",
        ),
        Granularity::Group(size) => (
            size.is_power_of_two() && (16..=1024).contains(&size),
            "use a power of two from 16 to 1024",
        ),
        Granularity::Token | Granularity::Channel | Granularity::Tensor => (true, ""),
    };
    if known {
        return Ok(());
    }
    Err(KernelError::Unsupported {
        operation,
        reason: format!("{granularity:?}"),
        remedy,
    })
}

/// Accepts the numbers that matrices hold.
pub(crate) fn check_number(
    operation: &'static str,
    number: Number,
) -> Result<Symmetric, KernelError> {
    number.symmetric().ok_or_else(|| KernelError::Unsupported {
        operation,
        reason: format!("a matrix of {number:?}, which is for optimizer states"),
        remedy: "use an integer format, E2M1, E3M0, E4M3 or E5M2",
    })
}
