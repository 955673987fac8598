//! Products of FP8 matrices on `wgmma` (Micikevicius et al., arXiv 2209.05433; scales along K as in DeepSeek-V3, arXiv
//! 2412.19437, section 3.3).
//!
//! The tensor cores' own sums keep about 14 bits: of each product is cut off what lies more than 13 bits below the
//! largest of those that are added at once. So what 128 elements along K give is scaled and added in FP32, unless
//! [`Accumulation::Fast`] is asked for.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::source::{CudaSource, SourceText, launch_source},
    device::{MatrixView, check_dtype, check_float, empty, is_hopper, or_unused, storage},
    error::KernelError,
    gemm::{
        align::is_aligned,
        blueprint::{HopperBlueprint, HopperTile},
        check_bias,
        expected::LayerOperands,
        split_k,
    },
    number::{Number, fp8::Fp8},
    quantize::{QuantizeSpec, Quantized, quantize},
    scale::ScaleNumber,
};

use super::{
    GemmNumbers, LayerSource, TiledProduct, UNITS, batch_stride, companions_of, other_products,
    rounded::{Rounded, RoundedOutput, Written, product_text},
    rowwise::{self, RowwiseSource},
    tensor_map,
};

const OPERATION: &str = "gemm_fp8";
/// Elements along K of a scale, and rows where they share it, unless it is for all.
const BLOCK: usize = 128;
/// Widths of tiles and their speeds beside one another, as those of INT8.
const SPEEDS: [(usize, f32); 4] = HopperBlueprint::SPEEDS;

/// How long products of FP8 numbers are added up in the tensor cores' own accumulators, where these keep fewer bits
/// than FP32: on Hopper about 14. Elsewhere it makes no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Along 128 elements of K; their sum is added in FP32 (promotion: DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    Promoted,
    /// Along all of K, where the scales allow it, those of rows or of whole matrices, and there are at most
    /// [`MOST_FAST`](Self::MOST_FAST) elements: fast accumulation, the forward product of NVIDIA's TransformerEngine and of
    /// torchao (`use_fast_accum`), and all three of COAT's code. Faster; the error grows with K.
    Fast,
}

impl Accumulation {
    /// Elements along K that are added up fast at most. Features are fewer. Tokens, over which the weight's gradient sums,
    /// may be many more: each number is cut off below the sum so far, so a sum that drifts one way ends too small, by a
    /// part that grows with its length.
    pub const MOST_FAST: usize = 1 << 15;

    /// How so many elements are added up.
    pub(super) const fn along(self, depth: usize) -> Self {
        match depth <= Self::MOST_FAST {
            true => self,
            false => Self::Promoted,
        }
    }
}

/// One operand of a product: FP8 codes with K along the rows, and their scales.
#[derive(Debug)]
pub struct Fp8Operand<R: Runtime> {
    /// u8 `[.., rows, K]`, the last stride 1: codes of `number`.
    pub values: TensorHandle<R>,
    /// [`Number::E4M3`] or [`Number::E5M2`].
    pub number: Number,
    /// Of the type of `scale`, `[.., ceil(rows / rows_per_scale), ceil(K / depth_per_scale)]`, any strides.
    pub scales: TensorHandle<R>,
    /// [`ScaleNumber::F32`] or [`ScaleNumber::E8M0`].
    pub scale: ScaleNumber,
    /// Rows that share a scale: 1, 128, or at least all.
    pub rows_per_scale: usize,
    /// Elements along K that share a scale: 128, or at least K.
    pub depth_per_scale: usize,
}

impl<R: Runtime> Clone for Fp8Operand<R> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            scales: self.scales.clone(),
            ..*self
        }
    }
}

impl<R: Runtime> Quantized<R> {
    /// The matrix as an operand of [`gemm_fp8`], K along its columns; `None` without a row-major copy.
    pub fn fp8_operand(&self) -> Option<Fp8Operand<R>> {
        let (rows_per_scale, depth_per_scale) = self.granularity.scale_block(self.shape);
        Some(Fp8Operand {
            values: self.values.clone()?,
            number: self.number,
            scales: self.scales.clone(),
            scale: self.scale,
            rows_per_scale,
            depth_per_scale,
        })
    }

    /// The transposed matrix as an operand, K along the rows of the input; `None` without a transposed copy.
    pub fn fp8_operand_transposed(&self) -> Option<Fp8Operand<R>> {
        let (depth_per_scale, rows_per_scale) = self.granularity.scale_block(self.shape);
        let mut scales = self.scales.clone();
        let rank = scales.shape().len();
        scales.metadata.swap(rank - 2, rank - 1);
        Some(Fp8Operand {
            values: self.transposed.clone()?,
            number: self.number,
            scales,
            scale: self.scale,
            rows_per_scale,
            depth_per_scale,
        })
    }
}

/// True where [`gemm_fp8`] has a kernel for the device: CUDA's architecture sm_90, no other.
pub fn has_gemm_fp8<R: Runtime>(client: &ComputeClient<R>) -> bool {
    is_hopper(client)
}

/// `C = A B^T + bias`, of shape `[M, N]` (`[batch, M, N]` where A has a batch dimension), contiguous.
///
/// - `a`, `b`: the operands. A batch of one in `b`, or a `b` of rank 2, is shared by all matrices of `a`.
/// - `bias`: f32 `[N]`, contiguous, added in FP32.
/// - `accumulation`: [`Accumulation::Fast`] with scales of 128 elements, or of more than
///   [`MOST_FAST`](Accumulation::MOST_FAST) elements, is as [`Accumulation::Promoted`].
/// - `out_dtype`: f32, f16 or bf16; the FP32 sum is rounded to it once.
///
/// A code or a scale of NaN makes NaN of all that it touches.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where the device is not of CUDA's architecture sm_90, K is 0, rows of the operands do
/// not start at multiples of 16 bytes, or numbers or scales are others; another product must do it then. The other
/// errors tell of shapes or element types that differ from these.
pub fn gemm_fp8<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Fp8Operand<R>,
    b: &Fp8Operand<R>,
    bias: Option<&TensorHandle<R>>,
    accumulation: Accumulation,
    out_dtype: StorageType,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "the output", out_dtype)?;
    let product = Product::new(client, [a, b], bias, accumulation)?;
    let [_, m, n, _] = product.sizes;
    let out = empty(client, product.of_a.view.tensor_shape(m, n), out_dtype);
    if !product.is_empty() {
        product.launch(client, product.blueprints[0], &out, None);
    }
    Ok(out)
}

/// What [`gemm_fp8`] gives in `dtype`, quantized by the spec: to the bit what [`quantize`] makes of it.
///
/// E4M3 to nearest in groups of 16, and INT8 in blocks of 32, 64 or 128, row-major with FP32 scales, are what the product's
/// kernel writes, where `dtype` has 16 bits, there is one matrix of whole groups of 64 columns, or of 16 with blocks, and K is
/// summed up in one part: an output that is never in memory as floats (coat-fp8, section 5.2).
///
/// # Errors
///
/// Those of [`gemm_fp8`] and of [`quantize`].
pub fn gemm_fp8_quantized<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Fp8Operand<R>,
    b: &Fp8Operand<R>,
    bias: Option<&TensorHandle<R>>,
    accumulation: Accumulation,
    dtype: StorageType,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    check_float(client, OPERATION, "the output", dtype)?;
    let product = Product::new(client, [a, b], bias, accumulation)?;
    let [_, m, n, _] = product.sizes;
    let is_one = !product.of_a.view.batched && !product.is_empty();
    let rounded = Rounded::of(dtype, spec, n).filter(|_| is_one);
    let blueprint = rounded.and_then(|rounded| {
        let mut blueprints = product.blueprints.into_iter();
        blueprints.find(|blueprint| rounded.fits(blueprint))
    });
    match rounded.zip(blueprint) {
        None => {
            let out = gemm_fp8(client, a, b, bias, accumulation, dtype)?;
            quantize(client, &out, spec)
        }
        Some((rounded, blueprint)) => {
            let view = MatrixView::contiguous(m, n);
            let (output, values, rounded) = rounded.allocate(client, &view, spec);
            product.launch(client, blueprint, &values, Some(rounded));
            Ok(output)
        }
    }
}

/// A product that fits, and how it is launched.
struct Product<'a, R: Runtime> {
    operands: [&'a Fp8Operand<R>; 2],
    bias: Option<&'a TensorHandle<R>>,
    of_a: Checked,
    of_b: Checked,
    /// Batch, M, N and K.
    sizes: [usize; 4],
    is_fast: bool,
    /// Ways to launch it, the cheapest first.
    blueprints: [HopperBlueprint; SPEEDS.len()],
}

impl<'a, R: Runtime> Product<'a, R> {
    fn new(
        client: &ComputeClient<R>,
        [a, b]: [&'a Fp8Operand<R>; 2],
        bias: Option<&'a TensorHandle<R>>,
        accumulation: Accumulation,
    ) -> Result<Self, KernelError> {
        if !is_hopper(client) {
            return Err(unsupported(
                "a device that is not of CUDA's architecture sm_90".into(),
            ));
        }
        let (of_a, of_b) = (Checked::new("a", a)?, Checked::new("b", b)?);
        let (a_shape, b_shape) = (of_a.view.shape, of_b.view.shape);
        if a_shape.cols != b_shape.cols || !(b_shape.batch == 1 || b_shape.batch == a_shape.batch) {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("a {:?}, b {:?}", a.values.shape(), b.values.shape()),
                remedy: "pass a [.., M, K] and b [.., N, K] of one K, and a batch of b that is 1 or that of a",
            });
        }
        check_bias(OPERATION, bias, b_shape.rows)?;
        if a_shape.cols == 0 {
            return Err(unsupported("an empty sum".into()));
        }
        let is_fast = accumulation.along(a_shape.cols) == Accumulation::Fast
            && of_a.covers_all_of_k()
            && of_b.covers_all_of_k();
        let sizes = [a_shape.batch, a_shape.rows, b_shape.rows, a_shape.cols];
        let product = TiledProduct::new(sizes, BLOCK, true);
        let (chunk, speeds) = match is_fast {
            true => (rowwise::WHOLE_TILE, rowwise::SPEEDS),
            false => (HopperBlueprint::CHUNK, SPEEDS),
        };
        Ok(Self {
            operands: [a, b],
            bias,
            of_a,
            of_b,
            sizes,
            is_fast,
            blueprints: HopperBlueprint::by_cost(client, &product, chunk, speeds),
        })
    }

    /// True where there is nothing to compute.
    fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Computes the output, `out`, contiguous, or its numbers.
    fn launch(
        &self,
        client: &ComputeClient<R>,
        blueprint: HopperBlueprint,
        out: &TensorHandle<R>,
        rounded: Option<RoundedOutput<R>>,
    ) {
        let &Self {
            operands: [a, b],
            bias,
            ref of_a,
            ref of_b,
            sizes: [batch, m, n, k],
            is_fast,
            blueprints: _,
        } = self;
        let numbers = GemmNumbers {
            batch: batch as u64,
            m: m as u64,
            n: n as u64,
            k: k as u64,
            a_scale_batch: batch_stride(&of_a.scales),
            a_scale_row: of_a.scale_strides[0],
            a_scale_depth: of_a.scale_strides[1],
            b_scale_batch: batch_stride(&of_b.scales),
            b_scale_row: of_b.scale_strides[0],
            b_scale_depth: of_b.scale_strides[1],
            b_batched: u64::from(of_b.view.shape.batch > 1),
            parts: blueprint.parts as u64,
            ..GemmNumbers::rounded(rounded.as_ref())
        };
        let maps = vec![
            tensor_map(&a.values, &of_a.view, HopperBlueprint::TILE_M),
            tensor_map(&b.values, &of_b.view, blueprint.tile.tile_n),
        ];
        let rounded = rounded.as_ref();
        split_k::in_parts(client, blueprint.parts, out, bias, |out, bias| {
            let (count, operands) = (blueprint.cube_count(), [of_a.knobs, of_b.knobs]);
            let buffers = vec![
                a.scales.clone(),
                b.scales.clone(),
                or_unused(bias, out, storage::<f32>()),
                out.clone(),
                or_unused(rounded.map(|it| &it.scales), out, storage::<f32>()),
                a.values.clone(),
                b.values.clone(),
            ];
            let promoted = Fp8Source {
                tile: blueprint.tile,
                operands,
                bias: bias.is_some(),
                out: Written::to(out, rounded),
            };
            // SAFETY: all shapes were checked, from which the numbers come; the kernels guard their writes and their reads
            // of scales and bias with them. They read the bias, and write scales, only where a knob says that there are any.
            #[allow(unsafe_code)]
            unsafe {
                match is_fast {
                    true => launch_source(client, promoted.fast(), count, maps, buffers, &numbers),
                    false => launch_source(client, promoted, count, maps, buffers, &numbers),
                }
            }
        });
    }
}

fn unsupported(reason: String) -> KernelError {
    KernelError::Unsupported {
        operation: OPERATION,
        reason,
        remedy: "use another product",
    }
}

/// The properties of an operand that the kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct OperandKnobs {
    number: Fp8,
    /// True where each row has scales of its own.
    by_rows: bool,
    /// True for scales in bytes.
    e8m0: bool,
}

impl OperandKnobs {
    /// The knobs that tell the numbers of both operands and of their scales.
    pub(super) fn knobs([a, b]: &[Self; 2]) -> String {
        format!(
            "#define IN \"{}.{}\"\n#define A_E8M0 {}\n#define B_E8M0 {}\n",
            a.number.name(),
            b.number.name(),
            u8::from(a.e8m0),
            u8::from(b.e8m0),
        )
    }
}

/// An operand that fits.
struct Checked {
    view: MatrixView,
    scales: MatrixView,
    /// Elements from a row's scale to the next row's, or the next 128 rows', and along K; 0 where one is for all.
    scale_strides: [u64; 2],
    knobs: OperandKnobs,
}

impl Checked {
    /// True where scales are of rows or of whole matrices.
    fn covers_all_of_k(&self) -> bool {
        let [of_rows, of_depth] = self.scale_strides;
        of_depth == 0 && (self.knobs.by_rows || of_rows == 0)
    }

    fn new<R: Runtime>(name: &'static str, operand: &Fp8Operand<R>) -> Result<Self, KernelError> {
        let Fp8Operand {
            ref values,
            number,
            ref scales,
            scale,
            rows_per_scale,
            depth_per_scale,
        } = *operand;
        let Some(number) = Fp8::of(number) else {
            return Err(unsupported(format!("operand {name} of {number:?}")));
        };
        let e8m0 = match scale {
            ScaleNumber::F32 => false,
            ScaleNumber::E8M0 => true,
            ScaleNumber::E4M3 => {
                return Err(unsupported(format!(
                    "operand {name} with scales of {scale:?}"
                )));
            }
        };
        check_dtype(
            OPERATION,
            name,
            values,
            storage::<u8>(),
            "pass codes of FP8",
        )?;
        check_dtype(
            OPERATION,
            "scales",
            scales,
            scale.dtype(),
            "pass those of the operand",
        )?;
        let (view, of_scales) = (
            MatrixView::new(OPERATION, values)?,
            MatrixView::new(OPERATION, scales)?,
        );
        let shape = view.shape;
        let count = |extent: usize, by: usize| extent.div_ceil(by.max(1));
        let fits = rows_per_scale > 0
            && depth_per_scale > 0
            && of_scales.shape.batch == shape.batch
            && of_scales.shape.rows == count(shape.rows, rows_per_scale)
            && of_scales.shape.cols == count(shape.cols, depth_per_scale);
        if !fits {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!(
                    "operand {name}: values {:?}, scales {:?} of {rows_per_scale} x {depth_per_scale} each",
                    values.shape(),
                    scales.shape()
                ),
                remedy: "pass scales [.., ceil(rows / rows_per_scale), ceil(K / depth_per_scale)]",
            });
        }
        let stride = |per_scale: usize, extent: usize, stride: usize| match per_scale {
            _ if per_scale >= extent => Some(0),
            BLOCK => Some(stride as u64),
            _ => None,
        };
        let by_rows = rows_per_scale == 1;
        let of_rows = match by_rows {
            true => Some(of_scales.row_stride as u64),
            false => stride(rows_per_scale, shape.rows, of_scales.row_stride),
        };
        let of_depth = stride(depth_per_scale, shape.cols, of_scales.col_stride);
        let (Some(of_rows), Some(of_depth)) = (of_rows, of_depth) else {
            return Err(unsupported(format!(
                "operand {name} with scales of {rows_per_scale} x {depth_per_scale} elements"
            )));
        };
        if !is_aligned(values, &view) || (shape.cols > 1 && view.col_stride != 1) {
            return Err(unsupported(format!(
                "operand {name} of shape {:?} with strides {:?}, whose rows do not start and end at multiples of 16 bytes",
                values.shape(),
                values.strides()
            )));
        }
        Ok(Self {
            view,
            scales: of_scales,
            scale_strides: [of_rows, of_depth],
            knobs: OperandKnobs {
                number,
                by_rows,
                e8m0,
            },
        })
    }
}

/// `hopper/gemm_fp8.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Fp8Source {
    tile: HopperTile,
    operands: [OperandKnobs; 2],
    bias: bool,
    out: Written,
}

impl Fp8Source {
    /// Without a bias.
    pub(super) const fn new(
        tile: HopperTile,
        operands: [OperandKnobs; 2],
        out_dtype: StorageType,
    ) -> Self {
        Self {
            tile,
            operands,
            bias: false,
            out: Written::Floats(out_dtype),
        }
    }

    /// The same with fast accumulation.
    pub(super) const fn fast(self) -> RowwiseSource {
        RowwiseSource {
            tile: self.tile,
            fp8: Some(self.operands),
            bias: self.bias,
            out: self.out,
        }
    }
}

impl CudaSource for Fp8Source {
    type Numbers = GemmNumbers;

    const TEXT: &'static str = product_text!(
        "gemm/hopper/chunks.cu",
        "gemm/hopper/scales.cu",
        "gemm/hopper/gemm_fp8.cu"
    );
    const ENTRY_POINT: &'static str = "gemm_fp8_hopper";

    fn units(&self) -> u32 {
        UNITS
    }

    fn knobs(&self) -> String {
        let [a, b] = self.operands;
        format!(
            "{}{}#define BLOCK 128\n#define A_ROWS {}\n#define B_ROWS {}\n\
             #define BIAS {}\n{}",
            self.tile.knobs(),
            OperandKnobs::knobs(&self.operands),
            u8::from(a.by_rows),
            u8::from(b.by_rows),
            u8::from(self.bias),
            self.out.knobs(),
        )
    }

    fn shared_memory(&self) -> usize {
        self.tile.shared_memory()
    }

    fn sizes(&self, numbers: &GemmNumbers) -> [usize; 4] {
        numbers.sizes()
    }

    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> Vec<SourceText> {
        companions_of(
            client,
            self.out.dtype(),
            self.gradients(client, sizes, None),
        )
    }
}

impl LayerSource for Fp8Source {
    fn blueprint<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> HopperBlueprint {
        let product = TiledProduct::new(sizes, BLOCK, true);
        HopperBlueprint::cheapest(client, &product, HopperBlueprint::CHUNK, SPEEDS)
    }

    fn in_tile(self, tile: HopperTile, out_dtype: StorageType) -> Self {
        Self {
            tile,
            bias: false,
            out: Written::Floats(out_dtype),
            ..self
        }
    }

    fn gradients<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
        layer: Option<&LayerOperands>,
    ) -> Vec<SourceText> {
        let Self {
            tile,
            operands,
            out,
            ..
        } = *self;
        gradients(client, tile, operands, out.dtype(), sizes, layer)
    }
}

/// The sources of dX = dY Wᵀ and of dW = Xᵀ dY, where X W has these operands and sizes, from any tile: those of the layer,
/// or of an unknown one with dY in E5M2 and in what X has, promoted.
pub(super) fn gradients<R: Runtime>(
    client: &ComputeClient<R>,
    tile: HopperTile,
    [x, w]: [OperandKnobs; 2],
    out_dtype: StorageType,
    sizes: [usize; 4],
    layer: Option<&LayerOperands>,
) -> Vec<SourceText> {
    let [of_input, of_weight] = other_products(sizes);
    let (accumulation, numbers) = match layer {
        Some(LayerOperands::E4M3 {
            of_gradients,
            gradient,
            ..
        }) => (*of_gradients, Fp8::of(*gradient).into_iter().collect()),
        _ => (Accumulation::Promoted, vec![Fp8::E5M2, x.number]),
    };
    let products = numbers.into_iter().flat_map(|number| {
        let of_output = |operand| OperandKnobs { number, ..operand };
        [
            (of_input, [of_output(x), w], out_dtype),
            (of_weight, [x, of_output(w)], storage::<f32>()),
        ]
    });
    products
        .map(|(sizes, operands, out_dtype)| {
            let promoted = Fp8Source::new(tile, operands, out_dtype);
            match accumulation.along(sizes[3]) {
                Accumulation::Promoted => promoted.of(client, sizes, out_dtype).text(),
                Accumulation::Fast => promoted.fast().of(client, sizes, out_dtype).text(),
            }
        })
        .collect()
}

/// The operands of X W in E4M3 with a scale for each matrix.
pub(super) const E4M3: [OperandKnobs; 2] = [OperandKnobs {
    number: Fp8::E4M3,
    by_rows: false,
    e8m0: false,
}; 2];
