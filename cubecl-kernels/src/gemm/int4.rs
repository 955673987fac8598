//! Products of INT4 matrices by the instructions that Ampere and Ada have for them, `mma.sync` m16n8k64 (int4-hq-lss,
//! section 3.3): operands are read packed, two elements in a byte, and never unpacked.
//!
//! The result is specified to the bit: the exact INT32 sum along K, rounded to FP32, times the FP32 product of both
//! scales, plus the bias; that is what Hopper's products of the same integers as INT8 give, whose scales cover all of K.
//!
//! Other devices than those of sm_80 to sm_89 have no such instruction, or compile it to many others: Hopper computes 46
//! TOP/s so.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, float_knob, launch_source},
    },
    device::{MatrixView, check_dtype, check_float, empty, is_hopper_or_later, or_unused, storage},
    error::KernelError,
    granularity::Granularity,
    number::Number,
    quantize::Quantized,
    scale::ScaleNumber,
};

use super::{check_bias, selector};

const OPERATION: &str = "gemm_int4";
/// Rows and columns of an output tile.
const TILE: usize = 128;
/// Three leave room for two cubes on a multiprocessor of sm_86 and sm_89.
const STAGES: usize = 3;
const STAGE_BYTES: usize = 2 * TILE * 64;
/// Copies to shared memory start at multiples of so many bytes.
const ALIGNMENT: usize = 16;
/// Elements of a row, in multiples of which rows end where a copy does.
const WHOLE_COPIES: usize = 2 * ALIGNMENT;

/// True where [`gemm_int4`] is faster than products of INT8: CUDA's architectures sm_80 to sm_89.
pub fn has_gemm_int4<R: Runtime>(client: &ComputeClient<R>) -> bool {
    can_run(client) && !is_hopper_or_later(client)
}

fn can_run<R: Runtime>(client: &ComputeClient<R>) -> bool {
    // Architectures that have these instructions have those of INT4 too.
    R::name(client) == "cuda" && selector::has_int8_mma(client)
}

/// One operand of a product of INT4 matrices, K along its rows.
#[derive(Debug, Clone)]
pub struct Int4Operand<R: Runtime> {
    /// u8 `[.., rows, K / 2]`: the last stride 1, the others multiples of 16, as the offset is.
    pub values: TensorHandle<R>,
    /// The scale of all elements, f32, of one element.
    pub scale: TensorHandle<R>,
}

impl<R: Runtime> Quantized<R> {
    /// The packed matrix as an operand, K along its columns.
    ///
    /// # Errors
    ///
    /// When the matrix is not INT4 with one FP32 scale, the row-major copy was not written, or K is no multiple of 32.
    pub fn int4_operand(&self) -> Result<Int4Operand<R>, KernelError> {
        self.packed(&self.values, self.shape.cols)
    }

    /// The transposed packed matrix as an operand, K along the rows of the input.
    ///
    /// # Errors
    ///
    /// As [`int4_operand`](Self::int4_operand), of the transposed copy.
    pub fn int4_operand_transposed(&self) -> Result<Int4Operand<R>, KernelError> {
        self.packed(&self.transposed, self.shape.rows)
    }

    fn packed(
        &self,
        copy: &Option<TensorHandle<R>>,
        k: usize,
    ) -> Result<Int4Operand<R>, KernelError> {
        let format = (self.number, self.scale, self.granularity);
        let fits = format == (Number::Int4, ScaleNumber::F32, Granularity::Tensor);
        match copy {
            Some(values) if fits && k % WHOLE_COPIES == 0 => Ok(Int4Operand {
                values: values.clone(),
                scale: self.scales.clone(),
            }),
            _ => Err(unsupported(format!(
                "an operand of {format:?} with K = {k}, whose copy is {}",
                if copy.is_some() { "there" } else { "missing" }
            ))),
        }
    }
}

fn unsupported(reason: String) -> KernelError {
    KernelError::Unsupported {
        operation: OPERATION,
        reason,
        remedy: "unpack the operands and multiply them as INT8",
    }
}

/// `C = A B^T + bias`, of shape `[M, N]` (`[batch, M, N]` where A has a batch dimension), contiguous.
///
/// - `a`, `b`: the operands, `[.., M, K]` and `[.., N, K]`, of one batch.
/// - `bias`: f32 `[N]`, contiguous, added in FP32.
/// - `out_dtype`: f32, f16 or bf16; the FP32 sum is rounded to it once.
///
/// A scale of NaN makes NaN of everything.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where the device is no CUDA device with matrix instructions, or the strides are others
/// than [`Int4Operand`] says; another product must do it then. The other errors tell of shapes or element types that
/// differ from these.
pub fn gemm_int4<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Int4Operand<R>,
    b: &Int4Operand<R>,
    bias: Option<&TensorHandle<R>>,
    out_dtype: StorageType,
) -> Result<TensorHandle<R>, KernelError> {
    if !can_run(client) {
        return Err(unsupported("a device without CUDA's instructions".into()));
    }
    check_float(client, OPERATION, "the output", out_dtype)?;
    let (a_view, b_view) = (check_operand("a", a)?, check_operand("b", b)?);
    let (a_shape, b_shape) = (a_view.shape, b_view.shape);
    if (a_shape.batch, a_shape.cols) != (b_shape.batch, b_shape.cols) {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("a {:?}, b {:?}", a.values.shape(), b.values.shape()),
            remedy: "pass a [.., M, K] and b [.., N, K] of one K and one batch",
        });
    }
    check_bias(OPERATION, bias, b_shape.rows)?;
    let (batch, m, n) = (a_shape.batch, a_shape.rows, b_shape.rows);
    let out = empty(client, a_view.tensor_shape(m, n), out_dtype);
    if batch * m * n == 0 {
        return Ok(out);
    }
    let tiles = batch * m.div_ceil(TILE) * n.div_ceil(TILE);
    let numbers = Int4Numbers {
        m: m as u64,
        n: n as u64,
        row_bytes: a_shape.cols as u64,
        a_row: a_view.row_stride as u64,
        a_batch: a_view.batch_stride as u64,
        b_row: b_view.row_stride as u64,
        b_batch: b_view.batch_stride as u64,
    };
    let source = Int4Source {
        bias: bias.is_some(),
        out_dtype,
    };
    let buffers = vec![
        a.scale.clone(),
        b.scale.clone(),
        or_unused(bias, &out, storage::<f32>()),
        out.clone(),
        a.values.clone(),
        b.values.clone(),
    ];
    // SAFETY: the operands and the bias were checked above, and the output has their product's shape; the kernel guards
    // its writes and its reads with the numbers, and reads the bias only where a knob says that there is one.
    #[allow(unsafe_code)]
    unsafe {
        let cubes = CubeCount::Static(tiles as u32, 1, 1);
        launch_source(client, source, cubes, vec![], buffers, &numbers);
    }
    Ok(out)
}

fn check_operand<R: Runtime>(
    name: &'static str,
    operand: &Int4Operand<R>,
) -> Result<MatrixView, KernelError> {
    let remedy = "pass what `quantize` made";
    let Int4Operand { values, scale } = operand;
    check_dtype(OPERATION, name, values, storage::<u8>(), remedy)?;
    check_dtype(OPERATION, "scale", scale, storage::<f32>(), remedy)?;
    let view = MatrixView::new(OPERATION, values)?;
    if scale.shape().iter().product::<usize>() != 1 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("operand {name} with scales {:?}", scale.shape()),
            remedy: "pass one scale for all elements",
        });
    }
    let offset = values.handle.offset_start.unwrap_or_default() as usize;
    let strides = [offset, view.row_stride, view.batch_stride, view.shape.cols];
    let is_aligned = strides.iter().all(|it| it.is_multiple_of(ALIGNMENT));
    if !is_aligned || view.col_stride != 1 || view.shape.cols == 0 {
        return Err(unsupported(format!(
            "operand {name} of shape {:?} with strides {:?} and an offset of {offset} bytes",
            values.shape(),
            values.strides()
        )));
    }
    Ok(view)
}

numbers! {
    /// The numbers of `int4/gemm_int4.cu`.
    struct Int4Numbers {
        m: u64,
        n: u64,
        /// Bytes of K.
        row_bytes: u64,
        /// Bytes from a row to the next, and from a matrix to the next.
        a_row: u64,
        a_batch: u64,
        b_row: u64,
        b_batch: u64,
    }
}

/// `int4/gemm_int4.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Int4Source {
    bias: bool,
    out_dtype: StorageType,
}

impl CudaSource for Int4Source {
    type Numbers = Int4Numbers;

    const TEXT: &'static str = include_str!("int4/gemm_int4.cu");
    const ENTRY_POINT: &'static str = "gemm_int4";

    fn knobs(&self) -> String {
        format!(
            "#define STAGES {STAGES}\n#define BIAS {}\n#define OUT_{}",
            u8::from(self.bias),
            float_knob(self.out_dtype),
        )
    }

    fn shared_memory(&self) -> usize {
        STAGES * STAGE_BYTES
    }
}
