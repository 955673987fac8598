//! Products of BF16 and FP16 matrices on `wgmma`: the baseline that quantized products are compared with.
//!
//! On one NVIDIA H200, 2026-11-21, BF16, M = N = K, CUDA events around 10 launches of the source alone, median of 5:
//! 699 TFLOP/s at 2048, 793 at 4096, 764 at 8192; within 1% of these where neighbours are neighbours along M or N.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, SourceText, float_knob, launch_source},
        tensor_map::{STRIDE_BYTES, TmaView},
    },
    device::{
        check_dtype, check_float, empty, is_contiguous, is_hopper, is_operand_type, or_unused,
        storage,
    },
    error::KernelError,
    gemm::{
        blueprint::{HopperBlueprint, HopperTile},
        check_bias,
        expected::LayerOperands,
        split_k,
    },
};

use super::{LayerSource, TiledProduct, UNITS, other_products};

const OPERATION: &str = "gemm_float";
const ELEMENT_BYTES: usize = 2;
/// Elements of a stage along K, and of a box along M or N: 128 bytes.
const DEPTH: usize = 64;
/// Columns that are computed at once: those of the widest tile.
const WHOLE_TILE: usize = 256;
/// Widths of tiles and their speeds beside one another.
const SPEEDS: [(usize, f32); 2] = [(128, 0.8), (256, 1.0)];

/// True where [`gemm_float`] has a kernel for the device: CUDA's architecture sm_90, no other.
pub fn has_gemm_float<R: Runtime>(client: &ComputeClient<R>) -> bool {
    is_hopper(client)
}

/// True where [`gemm_float`] can read an operand `[.., rows, cols]` on this device as it lies in memory: one of bf16 or
/// f16 with strides that its description allows.
pub fn gemm_float_reads<R: Runtime>(client: &ComputeClient<R>, operand: &TensorHandle<R>) -> bool {
    let fits = |matrices| Operand::new("the operand", operand, &matrices).is_ok();
    is_hopper(client) && is_operand_type(operand.dtype) && Matrices::new(operand).is_ok_and(fits)
}

/// `C = A B^T + bias`, of shape `[.., M, N]` with the batch dimensions of A, contiguous, with FP32 sums.
///
/// - `a`: bf16 or f16 `[.., M, K]`, with at most two batch dimensions; `b`: the same type, `[.., N, K]`. Neighbours in
///   memory are neighbours along K or along M or N; the other strides are multiples of 8 elements, as is the offset; 0
///   is one in batch dimensions. Where a batch dimension of `b` is 1, or missing, its matrices serve all those of `a`.
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
    let product = Product::new(client, a, b, bias)?;
    let out = empty(client, product.out_shape(), out_dtype);
    let matrices = Matrices::new(&out)?;
    product.launch(client, &out, &matrices);
    Ok(out)
}

/// [`gemm_float`] into a tensor that exists, whose memory may be ordered otherwise: heads of attention are born side by
/// side in the rows that the next layer reads, as `[batch, rows, heads, features]`.
///
/// - `out`: f32, f16 or bf16 `[.., M, N]`, with the batch dimensions of `a`. Neighbours in memory are neighbours along
///   N; the other strides are such that no two elements share a place. What lies between its elements stays as it is.
///   Rows that start and end at multiples of 16 bytes are written faster.
///
/// # Errors
///
/// Those of [`gemm_float`]; [`KernelError::Shape`] where `out` is of another shape, or its strides are others.
pub fn gemm_float_into<R: Runtime>(
    client: &ComputeClient<R>,
    a: &TensorHandle<R>,
    b: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    out: &TensorHandle<R>,
) -> Result<(), KernelError> {
    check_float(client, OPERATION, "the output", out.dtype)?;
    let product = Product::new(client, a, b, bias)?;
    let matrices = Matrices::new(out)?;
    if out.shape().to_vec() != product.out_shape() || !matrices.can_be_written() {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "an output of shape {:?} and strides {:?} for a {:?}, b {:?}",
                out.shape(),
                out.strides(),
                a.shape(),
                b.shape()
            ),
            remedy: "pass an output [.., M, N], neighbours along N, in which no two elements share a place",
        });
    }
    product.launch(client, out, &matrices);
    Ok(())
}

fn unsupported(reason: String) -> KernelError {
    KernelError::Unsupported {
        operation: OPERATION,
        reason,
        remedy: "use another product",
    }
}

/// A dimension of a tensor, its stride in elements; 0 where there is one only, since that is never taken.
#[derive(Debug, Clone, Copy)]
struct Dimension {
    extent: usize,
    stride: usize,
}

impl Dimension {
    fn new(extent: usize, stride: usize) -> Self {
        let stride = if extent == 1 { 0 } else { stride };
        Self { extent, stride }
    }

    /// How many there are in memory: one where it is expanded.
    fn in_memory(&self) -> usize {
        if self.stride == 0 { 1 } else { self.extent }
    }

    /// True where its elements follow one another in memory.
    fn is_dense(&self) -> bool {
        self.extent <= 1 || self.stride == 1
    }
}

/// Matrices in two batch dimensions; those that the tensor lacks are of one.
#[derive(Debug, Clone, Copy)]
struct Matrices {
    outer: Dimension,
    inner: Dimension,
    rows: Dimension,
    cols: Dimension,
}

impl Matrices {
    /// Reads a tensor of rank 2 to 4.
    fn new<R: Runtime>(tensor: &TensorHandle<R>) -> Result<Self, KernelError> {
        let shape = tensor.shape();
        let Some(missing @ ..=2) = 4usize.checked_sub(shape.len()) else {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("a tensor of shape {shape:?}"),
                remedy: "pass matrices [.., rows, cols] with at most two batch dimensions",
            });
        };
        let mut dimensions = [Dimension::new(1, 0); 4];
        let given = std::iter::zip(shape.iter(), tensor.strides().iter());
        for (dimension, (&extent, &stride)) in dimensions[missing..].iter_mut().zip(given) {
            *dimension = Dimension::new(extent, stride);
        }
        let [outer, inner, rows, cols] = dimensions;
        Ok(Self {
            outer,
            inner,
            rows,
            cols,
        })
    }

    /// Elements, and the place of the last one.
    fn size(&self) -> (usize, usize) {
        let dimensions = [self.outer, self.inner, self.rows, self.cols];
        let reach = |it: &Dimension| it.extent.saturating_sub(1) * it.stride;
        (
            dimensions.iter().map(|it| it.extent).product(),
            dimensions.iter().map(reach).sum(),
        )
    }

    /// True where neighbours in memory are neighbours in a row, and no two elements share a place.
    fn can_be_written(&self) -> bool {
        let mut dimensions = [self.outer, self.inner, self.rows];
        dimensions.sort_by_key(|dimension| dimension.stride);
        let mut taken = self.cols.extent;
        let apart = dimensions.iter().all(|it| {
            let fits = it.extent <= 1 || it.stride >= taken;
            taken += it.extent.saturating_sub(1) * it.stride;
            fits
        });
        self.cols.is_dense() && apart && self.rows.stride <= u32::MAX as usize
    }
}

/// A product whose operands fit.
struct Product<'a, R: Runtime> {
    a: Operand<'a, R>,
    b: Operand<'a, R>,
    bias: Option<&'a TensorHandle<R>>,
}

impl<'a, R: Runtime> Product<'a, R> {
    fn new(
        client: &ComputeClient<R>,
        a: &'a TensorHandle<R>,
        b: &'a TensorHandle<R>,
        bias: Option<&'a TensorHandle<R>>,
    ) -> Result<Self, KernelError> {
        if !is_operand_type(a.dtype) {
            return Err(KernelError::Dtype {
                operation: OPERATION,
                tensor: "a",
                dtype: a.dtype.to_string(),
                remedy: "use bf16 or f16",
            });
        }
        check_dtype(OPERATION, "b", b, a.dtype, "use the type of a")?;
        let (of_a, of_b) = (Matrices::new(a)?, Matrices::new(b)?);
        let serves = |b: Dimension, a: Dimension| b.extent == 1 || b.extent == a.extent;
        if of_a.cols.extent != of_b.cols.extent
            || !serves(of_b.outer, of_a.outer)
            || !serves(of_b.inner, of_a.inner)
        {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("a {:?}, b {:?}", a.shape(), b.shape()),
                remedy: "pass a [.., M, K] and b [.., N, K] of one K; batch dimensions of b are 1 or those of a",
            });
        }
        check_bias(OPERATION, bias, of_b.rows.extent)?;
        if !is_hopper(client) {
            return Err(unsupported(
                "a device that is not of CUDA's architecture sm_90".into(),
            ));
        }
        if of_a.cols.extent == 0 {
            return Err(unsupported("an empty sum".into()));
        }
        Ok(Self {
            a: Operand::new("a", a, &of_a)?,
            b: Operand::new("b", b, &of_b)?,
            bias,
        })
    }

    /// The shape of A with N in place of K.
    fn out_shape(&self) -> Vec<usize> {
        let mut shape = self.a.tensor.shape().to_vec();
        shape.pop();
        shape.push(self.b.matrices.rows.extent);
        shape
    }

    /// Computes into `out`, of this shape.
    fn launch(&self, client: &ComputeClient<R>, out: &TensorHandle<R>, to: &Matrices) {
        let (a, b) = (&self.a, &self.b);
        let (outer, inner) = (to.outer.extent, to.inner.extent);
        let (m, n, k) = (to.rows.extent, to.cols.extent, a.matrices.cols.extent);
        if outer * inner * m * n == 0 {
            return;
        }
        let product = TiledProduct::new([outer * inner, m, n, k], DEPTH, is_contiguous(out));
        let blueprint = HopperBlueprint::cheapest(client, &product, WHOLE_TILE, SPEEDS);
        let is_many = |dimension: Dimension| u64::from(dimension.in_memory() > 1);
        // The parts of a matrix follow one another.
        let stride = |dimension: Dimension| (dimension.stride * blueprint.parts) as u64;
        let numbers = FloatNumbers {
            outer: outer as u64,
            inner: inner as u64,
            m: m as u64,
            n: n as u64,
            k: k as u64,
            a_outer: is_many(a.matrices.outer),
            a_inner: is_many(a.matrices.inner),
            b_outer: is_many(b.matrices.outer),
            b_inner: is_many(b.matrices.inner),
            outer_stride: stride(to.outer),
            inner_stride: stride(to.inner),
            row_stride: to.rows.stride as u64,
            parts: blueprint.parts as u64,
        };
        let maps = vec![
            a.view(HopperBlueprint::TILE_M).bind(a.tensor),
            b.view(blueprint.tile.tile_n).bind(b.tensor),
        ];
        split_k::in_parts(client, blueprint.parts, out, self.bias, |out, bias| {
            // SAFETY: `Product::new` checked the operands and the bias, and the output has their product's shape; the
            // kernel guards its writes and its reads of the bias with the numbers.
            #[allow(unsafe_code)]
            unsafe {
                launch_source(
                    client,
                    FloatSource {
                        tile: blueprint.tile,
                        dtype: a.tensor.dtype,
                        along_rows: (a.along_rows, b.along_rows),
                        bias: bias.is_some(),
                        out_dtype: out.dtype,
                    },
                    blueprint.cube_count(),
                    maps,
                    vec![
                        or_unused(bias, out, storage::<f32>()),
                        out.clone(),
                        a.tensor.clone(),
                        b.tensor.clone(),
                    ],
                    &numbers,
                );
            }
        });
    }
}

/// An operand that TMA can read as it lies in memory.
struct Operand<'a, R: Runtime> {
    tensor: &'a TensorHandle<R>,
    matrices: Matrices,
    /// True where neighbours in memory are neighbours along M or N, not along K.
    along_rows: bool,
}

impl<'a, R: Runtime> Operand<'a, R> {
    fn new(
        name: &'static str,
        tensor: &'a TensorHandle<R>,
        matrices: &Matrices,
    ) -> Result<Self, KernelError> {
        let (count, last) = matrices.size();
        if count.max(last) > u32::MAX as usize {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("{name} of shape {:?}", tensor.shape()),
                remedy: "split it: kernels index with 32 bits, at most 2^32 - 1 elements",
            });
        }
        let Matrices {
            outer,
            inner,
            rows,
            cols,
        } = *matrices;
        let is_aligned = |elements: usize| elements * ELEMENT_BYTES % STRIDE_BYTES == 0;
        let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
        let batches_fit = is_aligned(outer.stride) && is_aligned(inner.stride);
        // Rows of TMA do not overlap, and one of them may have any stride.
        let fits = |neighbours: Dimension, others: Dimension| {
            let stride = others.stride;
            neighbours.is_dense()
                && (others.extent == 1 || (stride >= neighbours.extent && is_aligned(stride)))
        };
        let along_rows = if fits(cols, rows) {
            Some(false)
        } else {
            fits(rows, cols).then_some(true)
        };
        match along_rows {
            Some(along_rows) if batches_fit && offset % STRIDE_BYTES == 0 => Ok(Self {
                tensor,
                matrices: *matrices,
                along_rows,
            }),
            _ => Err(unsupported(format!(
                "operand {name} of shape {:?} with strides {:?} and an offset of {offset} bytes",
                tensor.shape(),
                tensor.strides()
            ))),
        }
    }

    /// The matrices as TMA sees them, in boxes for tiles of `tile` rows.
    fn view(&self, tile: usize) -> TmaView<4> {
        let Matrices {
            outer,
            inner,
            rows,
            cols,
        } = self.matrices;
        let (lines, neighbours, tile) = if self.along_rows {
            (cols, rows, DEPTH)
        } else {
            (rows, cols, tile)
        };
        // TMA never takes the stride of a single line, but checks it.
        let pitch = if lines.extent == 1 {
            neighbours.extent.next_multiple_of(STRIDE_BYTES)
        } else {
            lines.stride
        };
        TmaView {
            shape: [
                outer.in_memory(),
                inner.in_memory(),
                lines.extent,
                neighbours.extent,
            ],
            strides: [outer.stride, inner.stride, pitch, 1],
            tile: [tile, DEPTH],
        }
    }
}

numbers! {
    /// The numbers of `hopper/gemm_float.cu`.
    struct FloatNumbers {
        /// Matrices of C: `outer` times `inner` of them.
        outer: u64,
        inner: u64,
        m: u64,
        n: u64,
        k: u64,
        /// 1 where an operand has as many matrices in the dimension, 0 where one serves all of C.
        a_outer: u64,
        a_inner: u64,
        b_outer: u64,
        b_inner: u64,
        /// Elements of C from a matrix to the next in each dimension, and from a row to the next.
        outer_stride: u64,
        inner_stride: u64,
        row_stride: u64,
        /// Parts of K, whose sums follow one another in the output.
        parts: u64,
    }
}

/// `hopper/gemm_float.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct FloatSource {
    tile: HopperTile,
    dtype: StorageType,
    along_rows: (bool, bool),
    bias: bool,
    out_dtype: StorageType,
}

/// X W of a layer that recipes leave in this dtype, such as the head of a model, in all widths.
pub(super) fn unquantized<R: Runtime>(
    client: &ComputeClient<R>,
    dtype: StorageType,
) -> Vec<SourceText> {
    let memory = client.properties().hardware.max_shared_memory_size;
    let source = |(width, _)| {
        let source = FloatSource {
            tile: HopperTile::new(memory, width),
            dtype,
            along_rows: (false, true),
            bias: false,
            out_dtype: dtype,
        };
        source.text()
    };
    match is_operand_type(dtype) {
        true => SPEEDS.map(source).to_vec(),
        false => vec![],
    }
}

impl CudaSource for FloatSource {
    type Numbers = FloatNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../../cuda/hopper.cu"),
        include_str!("common.cu"),
        include_str!("accumulate.cu"),
        include_str!("gemm_float.cu")
    );
    const ENTRY_POINT: &'static str = "gemm_float_hopper";

    fn units(&self) -> u32 {
        UNITS
    }

    fn knobs(&self) -> String {
        let dtype = if self.dtype == storage::<half::f16>() {
            "f16"
        } else {
            "bf16"
        };
        format!(
            "{}#define IN \"{dtype}\"\n#define A_ALONG_MN {}\n\
             #define B_ALONG_MN {}\n#define BIAS {}\n#define OUT_{}",
            self.tile.knobs(),
            u8::from(self.along_rows.0),
            u8::from(self.along_rows.1),
            u8::from(self.bias),
            float_knob(self.out_dtype),
        )
    }

    fn shared_memory(&self) -> usize {
        self.tile.shared_memory()
    }

    fn sizes(&self, numbers: &FloatNumbers) -> [usize; 4] {
        let FloatNumbers {
            outer,
            inner,
            m,
            n,
            k,
            ..
        } = *numbers;
        [outer * inner, m, n, k].map(|size| size as usize)
    }

    /// Behind X W alone.
    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> Vec<SourceText> {
        if self.along_rows != (false, true) {
            return vec![];
        }
        self.gradients(client, sizes, None)
    }
}

impl LayerSource for FloatSource {
    fn blueprint<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> HopperBlueprint {
        let product = TiledProduct::new(sizes, DEPTH, true);
        HopperBlueprint::cheapest(client, &product, WHOLE_TILE, SPEEDS)
    }

    fn in_tile(self, tile: HopperTile, out_dtype: StorageType) -> Self {
        Self {
            tile,
            bias: false,
            out_dtype,
            ..self
        }
    }

    fn gradients<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
        _layer: Option<&LayerOperands>,
    ) -> Vec<SourceText> {
        let [of_input, of_weight] = other_products(sizes);
        let along = |along_rows| Self {
            along_rows,
            ..*self
        };
        vec![
            along((false, false))
                .of(client, of_input, self.dtype)
                .text(),
            along((true, true))
                .of(client, of_weight, storage::<f32>())
                .text(),
        ]
    }
}

/// The source of X W in this dtype, in such a tile.
pub(super) fn of_tile(tile: HopperTile, dtype: StorageType) -> impl LayerSource {
    FloatSource {
        tile,
        dtype,
        along_rows: (false, true),
        bias: false,
        out_dtype: dtype,
    }
}
