//! Products of BF16 and FP16 matrices on `wgmma`: the baseline that quantized products are compared with.
//!
//! On one NVIDIA H200, 2026-11-21, BF16, M = N = K, CUDA events around 10 launches of the source alone, median of 5:
//! 699 TFLOP/s at 2048, 793 at 4096, 764 at 8192; within 1% of these where neighbours are neighbours along M or N.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_dtype, check_float, empty, or_unused, storage},
    error::KernelError,
    gemm::{blueprint::HopperBlueprint, check_bias},
};

use super::{
    CudaSource, is_supported, launch_source,
    source::out_knob,
    tensor_map::{STRIDE_BYTES, TmaView},
};

const OPERATION: &str = "gemm_float";
const ELEMENT_BYTES: usize = 2;
/// Elements of a stage along K, and of a box along M or N: 128 bytes.
const DEPTH: usize = 64;
/// Columns that are computed at once: those of the widest tile.
const WHOLE_TILE: usize = 256;

/// Whether [`gemm_float`] has a kernel for the device: CUDA's architecture sm_90, no other.
pub fn has_gemm_float<R: Runtime>(client: &ComputeClient<R>) -> bool {
    is_supported(client)
}

/// `C = A B^T + bias`, of shape `[M, N]` (`[batch, M, N]` where A has a batch dimension), contiguous, with FP32 sums.
///
/// - `a`: bf16 or f16 `[.., M, K]`; `b`: the same type, `[.., N, K]`. Neighbours in memory are neighbours along K or
///   along M or N; the other strides are multiples of 8 elements, as is the offset. A batch of one in `b`, or a `b` of
///   rank 2, is shared by all matrices of `a`.
/// - `bias`: f32 `[N]`, contiguous, added in FP32.
/// - `out_dtype`: f32, f16 or bf16; the FP32 sum is rounded to it once.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where the device is not of CUDA's architecture sm_90, K is 0, or the strides are
/// others; another product must do it then. The other errors tell of shapes or element types that differ from these.
pub fn gemm_float<R: Runtime>(
    client: &ComputeClient<R>,
    a: &TensorHandle<R>,
    b: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    out_dtype: StorageType,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "the output", out_dtype)?;
    if ![storage::<half::bf16>(), storage::<half::f16>()].contains(&a.dtype) {
        return Err(KernelError::Dtype {
            operation: OPERATION,
            tensor: "a",
            dtype: a.dtype.to_string(),
            remedy: "use bf16 or f16",
        });
    }
    check_dtype(OPERATION, "b", b, a.dtype, "use the type of a")?;
    let (a_view, b_view) = (
        MatrixView::new(OPERATION, a)?,
        MatrixView::new(OPERATION, b)?,
    );
    let (a_shape, b_shape) = (a_view.shape, b_view.shape);
    if a_shape.cols != b_shape.cols || !(b_shape.batch == 1 || b_shape.batch == a_shape.batch) {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("a {:?}, b {:?}", a.shape(), b.shape()),
            remedy: "pass a [.., M, K] and b [.., N, K] of one K, and a batch of b that is 1 or that of a",
        });
    }
    check_bias(OPERATION, bias, b_shape.rows)?;
    if !is_supported(client) {
        return Err(unsupported(
            "a device that is not of CUDA's architecture sm_90".into(),
        ));
    }
    let (batch, m, n, k) = (a_shape.batch, a_shape.rows, b_shape.rows, a_shape.cols);
    if k == 0 {
        return Err(unsupported("an empty sum".into()));
    }
    let blueprint = HopperBlueprint::new(client, batch, m, n, WHOLE_TILE);
    let a_operand = Operand::new("a", a, &a_view)?;
    let b_operand = Operand::new("b", b, &b_view)?;
    let out = empty(client, a_view.tensor_shape(m, n), out_dtype);
    if batch * m * n > 0 {
        launch_source(
            client,
            FloatSource {
                blueprint,
                dtype: a.dtype,
                along_rows: (a_operand.along_rows, b_operand.along_rows),
                bias: bias.is_some(),
                out_dtype,
            },
            blueprint.cubes,
            vec![
                a_operand.view(HopperBlueprint::TILE_M).bind(a),
                b_operand.view(blueprint.tile_n).bind(b),
            ],
            vec![
                or_unused(bias, &out, storage::<f32>()),
                out.clone(),
                a.clone(),
                b.clone(),
            ],
            &[batch, m, n, k, usize::from(b_shape.batch > 1)],
        );
    }
    Ok(out)
}

fn unsupported(reason: String) -> KernelError {
    KernelError::Unsupported {
        operation: OPERATION,
        reason,
        remedy: "use another product",
    }
}

/// An operand that TMA can read as it lies in memory.
struct Operand<'a> {
    view: &'a MatrixView,
    /// Whether neighbours in memory are neighbours along M or N, not along K.
    along_rows: bool,
}

impl<'a> Operand<'a> {
    fn new<R: Runtime>(
        name: &'static str,
        tensor: &TensorHandle<R>,
        view: &'a MatrixView,
    ) -> Result<Self, KernelError> {
        let shape = view.shape;
        let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
        let aligned = offset % STRIDE_BYTES == 0
            && (shape.batch == 1 || view.batch_stride * ELEMENT_BYTES % STRIDE_BYTES == 0)
            && (shape.batch == 1 || view.batch_stride > 0);
        // A dimension of one element may have any stride; TMA never uses it, but checks it.
        let fits = |neighbours: (usize, usize), others: (usize, usize)| {
            (neighbours.1 == 1 || neighbours.0 == 1)
                && others.1 >= neighbours.0
                && others.1 * ELEMENT_BYTES % STRIDE_BYTES == 0
        };
        let rows = (shape.rows, view.row_stride);
        let cols = (shape.cols, view.col_stride);
        let along_rows = if fits(cols, rows) {
            false
        } else if fits(rows, cols) {
            true
        } else {
            return Err(Self::strides(name, tensor));
        };
        if !aligned {
            return Err(Self::strides(name, tensor));
        }
        Ok(Self { view, along_rows })
    }

    fn strides<R: Runtime>(name: &'static str, tensor: &TensorHandle<R>) -> KernelError {
        unsupported(format!(
            "operand {name} of shape {:?} with strides {:?}",
            tensor.shape(),
            tensor.strides()
        ))
    }

    /// What TMA sees, in boxes for tiles of `tile` rows.
    fn view(&self, tile: usize) -> TmaView {
        let shape = self.view.shape;
        let batch_stride = self.view.batch_stride;
        if self.along_rows {
            TmaView {
                shape: [shape.batch, shape.cols, shape.rows],
                strides: [batch_stride, self.view.col_stride],
                tile: [DEPTH, DEPTH],
            }
        } else {
            TmaView {
                shape: [shape.batch, shape.rows, shape.cols],
                strides: [batch_stride, self.view.row_stride],
                tile: [tile, DEPTH],
            }
        }
    }
}

/// `hopper/gemm_float.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct FloatSource {
    blueprint: HopperBlueprint,
    dtype: StorageType,
    along_rows: (bool, bool),
    bias: bool,
    out_dtype: StorageType,
}

impl CudaSource for FloatSource {
    const TEXT: &'static str = concat!(include_str!("common.cu"), include_str!("gemm_float.cu"));
    const ENTRY_POINT: &'static str = "gemm_float_hopper";

    fn knobs(&self) -> String {
        let dtype = if self.dtype == storage::<half::f16>() {
            "f16"
        } else {
            "bf16"
        };
        format!(
            "#define TILE_N {}\n#define STAGES {}\n#define IN \"{dtype}\"\n#define A_ALONG_MN {}\n\
             #define B_ALONG_MN {}\n#define BIAS {}\n#define {}",
            self.blueprint.tile_n,
            self.blueprint.stages,
            u8::from(self.along_rows.0),
            u8::from(self.along_rows.1),
            u8::from(self.bias),
            out_knob(self.out_dtype),
        )
    }

    fn shared_memory(&self) -> usize {
        self.blueprint.shared_memory()
    }
}
