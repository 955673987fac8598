//! Quantization of matrices to integers with shared scales, and back (fallback-int8, section 4.2).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_float},
    error::KernelError,
    format::{Format, Granularity, Layout, Rounding},
    shape::MatrixShape,
};

mod absmax;
pub(crate) mod block;
pub(crate) mod buffers;
mod dequantize;
mod elementwise;
mod group;
mod packed;
pub(crate) mod staged;
pub(crate) mod tile;

use block::{BlockOutput, Round};
use buffers::allocate;
pub use dequantize::dequantize;

const OPERATION: &str = "quantize";

/// How to quantize a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantizeSpec {
    /// The number format of the values.
    pub format: Format,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// How values are rounded.
    pub rounding: Rounding,
    /// Which copies are written.
    pub layout: Layout,
}

/// A quantized matrix, or a batch of them, on the device.
#[derive(Debug)]
pub struct Quantized<R: Runtime> {
    /// The values. INT8: i8 `[.., rows, cols]`. INT10: u32 `[.., rows, 5 * ceil(cols / 16)]`, packed as
    /// [`pack_int10`](crate::reference::pack_int10) defines. `None` for [`Layout::Transposed`].
    pub values: Option<TensorHandle<R>>,
    /// The values transposed, i8 `[.., cols, rows]`. `None` for [`Layout::RowMajor`].
    pub transposed: Option<TensorHandle<R>>,
    /// f32 `[.., scale_rows, scale_cols]`, in the orientation of the input whatever the layout.
    pub scales: TensorHandle<R>,
    /// The number format of the values.
    pub format: Format,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// The shape of the input, in elements.
    pub shape: MatrixShape,
    /// Whether the input had a batch dimension; the tensors then have one too.
    pub batched: bool,
}

impl<R: Runtime> Clone for Quantized<R> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            transposed: self.transposed.clone(),
            scales: self.scales.clone(),
            format: self.format,
            granularity: self.granularity,
            shape: self.shape,
            batched: self.batched,
        }
    }
}

/// Quantizes `x`, a matrix of f32, f16 or bf16 with any strides.
///
/// Blocks and groups are read once: their elements stay on chip between the search of the maximum and the rounding.
/// Rows, columns and whole matrices do not fit there and are read twice. The numbers are those of
/// [`reference::quantize`](crate::reference::quantize), to the bit; a block that holds NaN or an infinity has scale
/// NaN, so that it dequantizes to NaN.
///
/// # Errors
///
/// When `x` is no matrix or no float tensor, when the granularity's size is not one of those it lists, or for INT10
/// with a granularity other than [`Granularity::Group`] or a layout other than [`Layout::RowMajor`].
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let view = MatrixView::new(OPERATION, x)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    check_granularity(OPERATION, spec.granularity)?;
    if spec.format == Format::Int10
        && !(matches!(spec.granularity, Granularity::Group(_)) && spec.layout == Layout::RowMajor)
    {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("INT10 with {:?} and {:?}", spec.granularity, spec.layout),
            remedy: "use Granularity::Group and Layout::RowMajor, or INT8",
        });
    }
    let output = allocate(client, &view, spec);
    if view.shape.num_elements() > 0 {
        match (spec.format, spec.granularity) {
            (Format::Int10, Granularity::Group(size)) => {
                packed::launch(client, x, &view, spec.rounding, size, &output);
            }
            (_, Granularity::Block(block)) => {
                let (round, key) = match spec.rounding {
                    Rounding::Nearest => (Round::Nearest, None),
                    Rounding::Stochastic(key) => (Round::Stochastic, Some(key)),
                };
                let written = BlockOutput {
                    row_major: output.values.as_ref().map(|values| (values, round)),
                    transposed: output.transposed.as_ref().map(|values| (values, round)),
                    scales: &output.scales,
                    fallback: None,
                };
                block::launch(client, x, &view, block, key, &written);
            }
            (_, Granularity::Group(size)) => group::launch(client, x, &view, spec, size, &output),
            (_, Granularity::Token | Granularity::Channel | Granularity::Tensor) => {
                let absmax = absmax::launch(client, x, &view, spec.granularity);
                elementwise::launch(client, x, &view, spec, &absmax, &output);
            }
        }
    }
    Ok(output)
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

/// Words of a packed row of this many INT10 values.
pub(crate) fn int10_words(cols: usize) -> usize {
    5 * cols.div_ceil(16)
}
