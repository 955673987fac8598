//! The product of two quantized matrices, with fallback (fallback-int8, Algorithm 1).
//!
//! `C[M, N] = A[M, K] B[N, K]^T + bias[N]`: both operands have K along their rows. A linear layer's three products are
//! of this form, each operand being a quantized matrix or its transposed copy:
//!
//! | product | A | B |
//! | --- | --- | --- |
//! | `Y = X W`, W `[in, out]` | X | W transposed |
//! | `dX = dY W^T` | dY | W |
//! | `dW = X^T dY` | X transposed | dY transposed |
//!
//! Products of blocks accumulate in INT32, exactly; their sums over K, scaled, in FP32 and in ascending order of K, or of
//! each of several parts of it ([`HopperBlueprint::parts`](blueprint::HopperBlueprint::parts)).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_dtype, check_float, empty, is_operand_type, storage},
    error::KernelError,
    fallback::FallbackResidual,
    granularity::Granularity,
    number::Number,
    quantize::{QuantizeSpec, Quantized, check_granularity, quantize},
    scale::ScaleNumber,
};

mod align;
#[cfg(feature = "autotune")]
mod autotune;
pub mod blueprint;
mod expected;
mod hopper;
mod int4;
mod portable;
mod rowwise;
mod selector;
mod split_k;
mod tensor_core;

use self::hopper::rounded::{Rounded, RoundedOutput};

pub use blueprint::Blueprint;
pub use expected::{ExpectedLayer, LayerOperands, expect_layers};
pub use hopper::float::{gemm_float, gemm_float_into, gemm_float_reads, has_gemm_float};
pub use hopper::fp8::{Accumulation, Fp8Operand, gemm_fp8, gemm_fp8_quantized, has_gemm_fp8};
pub use int4::{Int4Operand, gemm_int4, has_gemm_int4};
pub use rowwise::gemm_rowwise;
pub use selector::{candidates, select};
pub use split_k::add_parts;

const OPERATION: &str = "gemm";

/// True where the device has matrix instructions for products of 16-bit floats.
pub fn has_tensor_cores<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let matmul = &client.features().matmul;
    let mut configs = matmul.cmma.iter().chain(&matmul.mma);
    configs.any(|config| is_operand_type(config.a_type))
}

/// Which kernel computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// The fastest kernel that the device and the problem allow.
    Auto,
    /// Plain integer arithmetic: any device, any scale geometry.
    Portable,
    /// `mma` instructions on INT8 tiles: NVIDIA devices from sm_80 on, square blocks of 32, 64 or 128.
    TensorCore,
    /// `wgmma` instructions: NVIDIA devices of sm_90; square blocks of 32, 64 or 128, residuals in those of 128, or scales
    /// of rows or whole matrices, with K up to 2^17.
    Hopper,
    /// One of the problem's [`candidates`].
    Exactly(Blueprint),
}

/// One operand of a product: INT8 values with K along the rows, and their scales.
#[derive(Debug)]
pub struct GemmOperand<R: Runtime> {
    /// i8 `[.., rows, K]`, the last stride 1.
    pub values: TensorHandle<R>,
    /// f32 `[.., ceil(rows / rows_per_scale), ceil(K / depth_per_scale)]`, any strides.
    pub scales: TensorHandle<R>,
    /// Rows that share a scale.
    pub rows_per_scale: usize,
    /// Elements along K that share a scale: a multiple of 16, or at least K.
    pub depth_per_scale: usize,
}

impl<R: Runtime> Clone for GemmOperand<R> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            scales: self.scales.clone(),
            rows_per_scale: self.rows_per_scale,
            depth_per_scale: self.depth_per_scale,
        }
    }
}

impl<R: Runtime> Quantized<R> {
    /// The matrix as an operand, K along its columns.
    ///
    /// # Errors
    ///
    /// When the row-major copy was not written, or the matrix is not INT8 with FP32 scales.
    pub fn operand(&self) -> Result<GemmOperand<R>, KernelError> {
        let (rows_per_scale, depth_per_scale) = self.granularity.scale_block(self.shape);
        Ok(GemmOperand {
            values: self.operand_values(&self.values, "Layout::RowMajor or Layout::Both")?,
            scales: self.scales.clone(),
            rows_per_scale,
            depth_per_scale,
        })
    }

    /// The transposed matrix as an operand, K along the rows of the input.
    ///
    /// # Errors
    ///
    /// When the transposed copy was not written, or the matrix is not INT8 with FP32 scales.
    pub fn operand_transposed(&self) -> Result<GemmOperand<R>, KernelError> {
        let (depth_per_scale, rows_per_scale) = self.granularity.scale_block(self.shape);
        let mut scales = self.scales.clone();
        let rank = scales.shape().len();
        scales.metadata.swap(rank - 2, rank - 1);
        Ok(GemmOperand {
            values: self.operand_values(&self.transposed, "Layout::Transposed or Layout::Both")?,
            scales,
            rows_per_scale,
            depth_per_scale,
        })
    }

    fn operand_values(
        &self,
        values: &Option<TensorHandle<R>>,
        layout: &'static str,
    ) -> Result<TensorHandle<R>, KernelError> {
        if (self.number, self.scale) != (Number::Int8, ScaleNumber::F32) {
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                reason: format!(
                    "an operand of {:?} with scales of {:?}",
                    self.number, self.scale
                ),
                remedy: "quantize it to INT8 with FP32 scales, or unpack it from INT4",
            });
        }
        values.clone().ok_or_else(|| KernelError::Unsupported {
            operation: OPERATION,
            reason: "the operand's copy was not written".into(),
            remedy: layout,
        })
    }
}

/// A checked product: the operands' geometry.
#[derive(Debug, Clone, Copy)]
pub struct GemmProblem {
    /// Number of products.
    pub batch: usize,
    /// Rows of A and C.
    pub m: usize,
    /// Rows of B, columns of C.
    pub n: usize,
    /// Columns of A and B.
    pub k: usize,
    /// Rows and depth of a scale of A.
    pub a_scale_block: (usize, usize),
    /// Rows and depth of a scale of B.
    pub b_scale_block: (usize, usize),
    /// True if blocks of A may have a residual.
    pub fallback: bool,
}

/// Everything that the kernels are launched with. [`Checked`] alone makes it, which has checked that all shapes and types
/// fit: every launch relies on that.
pub(crate) struct GemmArgs<'a, R: Runtime> {
    a: &'a GemmOperand<R>,
    b: &'a GemmOperand<R>,
    fallback: Option<&'a FallbackResidual<R>>,
    bias: Option<&'a TensorHandle<R>>,
    out: &'a TensorHandle<R>,
    /// How the output is rounded, and its scales, where it is in numbers, whose codes `out` holds: on Hopper alone.
    rounded: Option<RoundedOutput<R>>,
    problem: GemmProblem,
    a_view: MatrixView,
    b_view: MatrixView,
    a_scales: MatrixView,
    b_scales: MatrixView,
}

/// `C = A B^T + bias`, of shape `[M, N]` (`[batch, M, N]` where A has a batch dimension), contiguous.
///
/// - `a`, `b`: the operands. A batch of one in `b`, or a `b` of rank 2, is shared by all matrices of `a`.
/// - `fallback`: the residual of `a`, whose blocks are added where they fell back. Its block size must be that of `a`.
/// - `bias`: f32 `[N]`, contiguous, added in FP32.
/// - `out_dtype`: f32, f16 or bf16; the FP32 sum is rounded to it once.
///
/// A scale of NaN makes NaN of all that it touches. The portable kernel splits K so that INT32 does not overflow.
///
/// With the feature `autotune`, the first product of a kind whose fastest blueprint is not clear is measured: the call
/// waits for the device, and for kernels to be compiled.
///
/// # Errors
///
/// When shapes or element types differ from these, or `strategy` names a kernel that the device or the scale geometry
/// rules out.
pub fn gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: &GemmOperand<R>,
    b: &GemmOperand<R>,
    fallback: Option<&FallbackResidual<R>>,
    bias: Option<&TensorHandle<R>>,
    out_dtype: StorageType,
    strategy: Strategy,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "the output", out_dtype)?;
    let checked = Checked::new(a, b, fallback, bias)?;
    let problem = checked.problem;
    if strategy == Strategy::Auto && !problem.fallback && rowwise::pays(client, &problem) {
        return gemm_rowwise(client, a, b, bias, out_dtype, strategy);
    }
    let ranked = selector::rank(client, &problem, strategy)?;
    let shape = checked.a.0.tensor_shape(problem.m, problem.n);
    let out = empty(client, shape, out_dtype);
    if problem.batch * problem.m * problem.n > 0 {
        let args = checked.args([a, b], fallback, bias, (&out, None));
        #[cfg(feature = "autotune")]
        autotune::launch(client, &args, &ranked);
        #[cfg(not(feature = "autotune"))]
        launch(client, &args, ranked[0].blueprint);
    }
    Ok(out)
}

/// What [`gemm`](fn@gemm) gives in `dtype`, without a residual and by [`Strategy::Auto`], quantized by the spec: to the bit
/// what [`quantize`] makes of it.
///
/// Where the product's kernel is one of Hopper's, the output of INT8 in blocks of 32, 64 or 128, or in groups of 16 in E4M3 to
/// nearest, row-major with FP32 scales, is what it writes: see [`gemm_fp8_quantized`], of which the conditions are the same.
///
/// # Errors
///
/// Those of [`gemm`](fn@gemm) and of [`quantize`].
pub fn gemm_quantized<R: Runtime>(
    client: &ComputeClient<R>,
    a: &GemmOperand<R>,
    b: &GemmOperand<R>,
    bias: Option<&TensorHandle<R>>,
    dtype: StorageType,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    check_float(client, OPERATION, "the output", dtype)?;
    let checked = Checked::new(a, b, None, bias)?;
    let GemmProblem { batch, m, n, .. } = checked.problem;
    let is_one = !checked.a.0.batched && batch * m * n > 0;
    let rounded = Rounded::of(dtype, spec, n).filter(|_| is_one);
    let blueprint = rounded.and_then(|rounded| {
        let ranked = selector::rank(client, &checked.problem, Strategy::Auto).ok()?;
        let mut blueprints = ranked.into_iter().map(|it| it.blueprint);
        blueprints.find(|blueprint| match blueprint {
            Blueprint::Hopper(it) | Blueprint::HopperRowwise(it) => rounded.fits(it),
            Blueprint::Portable(_) | Blueprint::TensorCore(_) => false,
        })
    });
    let Some((rounded, blueprint)) = rounded.zip(blueprint) else {
        let out = gemm(client, a, b, None, bias, dtype, Strategy::Auto)?;
        return quantize(client, &out, spec);
    };
    let view = MatrixView::contiguous(m, n);
    let (output, values, rounded) = rounded.allocate(client, &view, spec);
    let to = (&values, Some(rounded));
    launch(client, &checked.args([a, b], None, bias, to), blueprint);
    Ok(output)
}

/// A product whose shapes and types fit, and how its tensors are read: values and scales.
struct Checked {
    problem: GemmProblem,
    a: (MatrixView, MatrixView),
    b: (MatrixView, MatrixView),
}

impl Checked {
    fn new<R: Runtime>(
        a: &GemmOperand<R>,
        b: &GemmOperand<R>,
        fallback: Option<&FallbackResidual<R>>,
        bias: Option<&TensorHandle<R>>,
    ) -> Result<Self, KernelError> {
        let of_a = check_operand("a", a)?;
        let of_b = check_operand("b", b)?;
        let (a_shape, b_shape) = (of_a.0.shape, of_b.0.shape);
        if a_shape.cols != b_shape.cols || !(b_shape.batch == 1 || b_shape.batch == a_shape.batch) {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("a {:?}, b {:?}", a.values.shape(), b.values.shape()),
                remedy: "pass a [.., M, K] and b [.., N, K] of one K, and a batch of b that is 1 or that of a",
            });
        }
        check_bias(OPERATION, bias, b_shape.rows)?;
        if let Some(residual) = fallback {
            check_residual(a, residual)?;
        }
        let problem = GemmProblem {
            batch: a_shape.batch,
            m: a_shape.rows,
            n: b_shape.rows,
            k: a_shape.cols,
            a_scale_block: (a.rows_per_scale, a.depth_per_scale),
            b_scale_block: (b.rows_per_scale, b.depth_per_scale),
            fallback: fallback.is_some(),
        };
        Ok(Self {
            problem,
            a: of_a,
            b: of_b,
        })
    }

    /// Those of the tensors that were checked, and of an output that was made for them.
    fn args<'a, R: Runtime>(
        &self,
        [a, b]: [&'a GemmOperand<R>; 2],
        fallback: Option<&'a FallbackResidual<R>>,
        bias: Option<&'a TensorHandle<R>>,
        (out, rounded): (&'a TensorHandle<R>, Option<RoundedOutput<R>>),
    ) -> GemmArgs<'a, R> {
        GemmArgs {
            a,
            b,
            fallback,
            bias,
            out,
            rounded,
            problem: self.problem,
            a_view: self.a.0,
            b_view: self.b.0,
            a_scales: self.a.1,
            b_scales: self.b.1,
        }
    }
}

fn launch<R: Runtime>(client: &ComputeClient<R>, args: &GemmArgs<R>, blueprint: Blueprint) {
    match blueprint {
        Blueprint::Portable(blueprint) => portable::launch(client, args, blueprint),
        Blueprint::TensorCore(blueprint) => tensor_core::launch(client, args, blueprint),
        Blueprint::Hopper(blueprint) => hopper::launch(client, args, blueprint),
        Blueprint::HopperRowwise(blueprint) => hopper::rowwise::launch(client, args, blueprint),
    }
}

fn check_operand<R: Runtime>(
    name: &'static str,
    operand: &GemmOperand<R>,
) -> Result<(MatrixView, MatrixView), KernelError> {
    check_dtype(
        OPERATION,
        name,
        &operand.values,
        storage::<i8>(),
        "quantize it to INT8",
    )?;
    check_dtype(
        OPERATION,
        "scales",
        &operand.scales,
        storage::<f32>(),
        "use f32",
    )?;
    let values = MatrixView::new(OPERATION, &operand.values)?;
    let scales = MatrixView::new(OPERATION, &operand.scales)?;
    let fits = operand.rows_per_scale > 0
        && operand.depth_per_scale > 0
        && scales.shape.batch == values.shape.batch
        && scales.shape.rows == values.shape.rows.div_ceil(operand.rows_per_scale)
        && scales.shape.cols == values.shape.cols.div_ceil(operand.depth_per_scale);
    if !fits {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "operand {name}: values {:?}, scales {:?} of {} x {} each",
                operand.values.shape(),
                operand.scales.shape(),
                operand.rows_per_scale,
                operand.depth_per_scale
            ),
            remedy: "pass scales [.., ceil(rows / rows_per_scale), ceil(K / depth_per_scale)]",
        });
    }
    if values.shape.cols > 1 && values.col_stride != 1 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("operand {name} with strides {:?}", operand.values.strides()),
            remedy: "pass values contiguous along K: the other layout of the quantized matrix",
        });
    }
    Ok((values, scales))
}

fn check_bias<R: Runtime>(
    operation: &'static str,
    bias: Option<&TensorHandle<R>>,
    n: usize,
) -> Result<(), KernelError> {
    let Some(bias) = bias else {
        return Ok(());
    };
    check_dtype(operation, "bias", bias, storage::<f32>(), "cast it to f32")?;
    if bias.shape().len() == 1 && bias.shape()[0] == n && (n < 2 || bias.strides()[0] == 1) {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation,
        got: format!("bias {:?} for N = {n}", bias.shape()),
        remedy: "pass a contiguous bias [N]",
    })
}

fn check_residual<R: Runtime>(
    a: &GemmOperand<R>,
    residual: &FallbackResidual<R>,
) -> Result<(), KernelError> {
    let FallbackResidual {
        values,
        scales,
        flags,
        block,
    } = residual;
    let remedy = "pass the residual of `quantize_fallback`";
    check_dtype(
        OPERATION,
        "residual values",
        values,
        storage::<i8>(),
        remedy,
    )?;
    check_dtype(
        OPERATION,
        "residual scales",
        scales,
        storage::<f32>(),
        remedy,
    )?;
    check_dtype(OPERATION, "residual flags", flags, storage::<u32>(), remedy)?;
    check_granularity(OPERATION, Granularity::Block(*block))?;
    let like = |tensor: &TensorHandle<R>, of_a: &TensorHandle<R>| {
        tensor.shape() == of_a.shape() && tensor.strides() == of_a.strides()
    };
    let fits = like(values, &a.values)
        && like(scales, &a.scales)
        && like(flags, &a.scales)
        && (a.rows_per_scale, a.depth_per_scale) == (*block, *block);
    if fits {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation: OPERATION,
        got: format!(
            "a {:?} with scales of {} x {}, fallback {:?} in blocks of {block}",
            a.values.shape(),
            a.rows_per_scale,
            a.depth_per_scale,
            values.shape(),
        ),
        remedy: "pass the residual and the row-major base of one quantize_fallback",
    })
}
