//! Block quantization with dynamic fallback: a second INT8 copy of the residual of outlier blocks
//! (fallback-int8, sections 4.3 and 4.4).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_dtype, check_float, is_contiguous, storage},
    error::KernelError,
    granularity::Granularity,
    layout::Layout,
    quantize::{
        Quantized,
        block::{self, BlockFallback, BlockOutput, Round},
        buffers::allocate_input,
        check_granularity,
    },
};

const OPERATION: &str = "quantize_fallback";

/// The residual blocks of a fallback-quantized matrix, row-major.
///
/// How many blocks fall back is known only on the device, and a training step never waits for a number to reach the
/// host. So `values` has room for all of them, the full size of the matrix; it is meant to live from the quantization
/// to the product and no longer. Only the blocks that fell back are written, so nothing else in it may be read.
#[derive(Debug)]
pub struct FallbackResidual<R: Runtime> {
    /// i8 `[.., rows, cols]`, undefined outside the blocks that fell back.
    pub values: TensorHandle<R>,
    /// f32 `[.., scale_rows, scale_cols]`, 0 for the blocks that did not fall back.
    pub scales: TensorHandle<R>,
    /// u32 `[.., scale_rows, scale_cols]`: 1 for the blocks that fell back, the indicator u(i, k), else 0.
    pub flags: TensorHandle<R>,
    /// The block size.
    pub block: usize,
}

impl<R: Runtime> Clone for FallbackResidual<R> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            scales: self.scales.clone(),
            flags: self.flags.clone(),
            block: self.block,
        }
    }
}

/// A fallback-quantized matrix, `x = base + residual` where the block fell back and `base` elsewhere.
#[derive(Debug)]
pub struct FallbackQuantized<R: Runtime> {
    /// The INT8 blocks, as [`quantize`](crate::quantize::quantize) with nearest rounding gives them.
    pub base: Quantized<R>,
    /// The INT8 blocks of what the base missed.
    pub residual: FallbackResidual<R>,
}

impl<R: Runtime> Clone for FallbackQuantized<R> {
    fn clone(&self) -> Self {
        Self {
            base: self.base.clone(),
            residual: self.residual.clone(),
        }
    }
}

/// Quantizes `x` in square blocks of `block`, rounding to nearest, and in the same pass quantizes the residual of each
/// block whose largest magnitude is above the layer's threshold.
///
/// - `x`: a matrix of f32, f16 or bf16 with any strides.
/// - `block`: 16, 32, 64 or 128.
/// - `layout`: which copies of the base are written; the residual is row-major.
/// - `thresholds`: f32 `[layers]`; `thresholds[layer]` is read on the device.
/// - `counts`: i32 `[layers, 2]`; the number of blocks that fell back and of all blocks are added to `counts[layer]`.
///
/// The last two must be contiguous. Where the result has a row-major copy only, all its tensors share one allocation,
/// which is free again when the last of them is dropped. A block that holds NaN or an infinity does not fall back. The
/// numbers are those of [`reference::quantize_fallback`](crate::reference::quantize_fallback), to the bit.
///
/// # Errors
///
/// When shapes or element types differ from these, or `layer` is out of range.
#[allow(clippy::too_many_arguments)]
pub fn quantize_fallback<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    block: usize,
    layout: Layout,
    thresholds: &TensorHandle<R>,
    layer: u32,
    counts: &TensorHandle<R>,
) -> Result<FallbackQuantized<R>, KernelError> {
    let view = MatrixView::new(OPERATION, x)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    check_granularity(OPERATION, Granularity::Block(block))?;
    let state = FallbackState {
        thresholds,
        layer,
        counts,
    };
    state.check(OPERATION)?;
    let (base, residual) = allocate_input(client, &view, block, layout, true);
    let residual = residual.expect("blocks may fall back");
    if view.shape.num_elements() > 0 {
        let nearest = |values| (values, Round::Nearest);
        let written = BlockOutput {
            row_major: base.values.as_ref().map(nearest),
            transposed: base.transposed.as_ref().map(nearest),
            scales: &base.scales,
            fallback: Some(state.written(&residual)),
        };
        // SAFETY: the outputs were allocated for this view, and the state was checked.
        #[allow(unsafe_code)]
        unsafe {
            block::launch(client, x, &view, block, None, &written);
        }
    }
    Ok(FallbackQuantized { base, residual })
}

/// Where the state of a layer's fallback lies on the device; see [`quantize_fallback`] for the shapes.
#[derive(Debug)]
pub struct FallbackState<'a, R: Runtime> {
    /// f32 `[layers]`, contiguous.
    pub thresholds: &'a TensorHandle<R>,
    /// The index of the layer.
    pub layer: u32,
    /// i32 `[layers, 2]`, contiguous.
    pub counts: &'a TensorHandle<R>,
}

impl<'a, R: Runtime> FallbackState<'a, R> {
    /// Accepts contiguous tensors of matching shapes, and a layer among theirs.
    pub(crate) fn check(&self, operation: &'static str) -> Result<(), KernelError> {
        let Self {
            thresholds,
            layer,
            counts,
        } = *self;
        check_dtype(
            operation,
            "thresholds",
            thresholds,
            storage::<f32>(),
            "use f32",
        )?;
        check_dtype(operation, "counts", counts, storage::<i32>(), "use i32")?;
        let layers = thresholds.shape().iter().product::<usize>();
        let fits = thresholds.shape().len() == 1
            && counts.shape().len() == 2
            && counts.shape()[0] == layers
            && counts.shape()[1] == 2
            && (layer as usize) < layers
            && is_contiguous(thresholds)
            && is_contiguous(counts);
        if fits {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!(
                "thresholds {:?}, counts {:?}, layer {layer}",
                thresholds.shape(),
                counts.shape()
            ),
            remedy: "pass contiguous thresholds [layers] and counts [layers, 2], and a layer below their length",
        })
    }

    /// The tensors that a launch reads and writes: this state and the residual.
    pub(crate) fn written<'b>(&'b self, residual: &'b FallbackResidual<R>) -> BlockFallback<'b, R> {
        BlockFallback {
            thresholds: self.thresholds,
            layer: self.layer,
            counts: self.counts,
            values: &residual.values,
            scales: &residual.scales,
            flags: &residual.flags,
        }
    }
}
