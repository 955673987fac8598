//! The product on Hopper's warpgroup matrix instructions (`wgmma`), fed by its tensor memory accelerator (TMA).
//!
//! CubeCL has no `wgmma`, so the kernel is CUDA source, `hopper/gemm.cu`, behind a few `#define`s. CubeCL compiles it
//! through NVRTC for `sm_90a`, keeps it in its caches, encodes the tensor maps, and runs it on its memory and streams
//! as it does with its own kernels. What the kernel does, and why, is told in the source.
//!
//! The result is specified to the bit: an exact INT32 product for each block along K, times the FP32 product of its
//! two scales, is added to the FP32 sum with one fused multiply-add, in ascending order of K, a residual right after
//! its base; where there are several parts of K, each is a sum of its own, and they are added in ascending order.
//!
//! On one NVIDIA H200, 2026-11-21, BF16 out, M = N = K, CUDA events around 10 or 20 launches of the source alone,
//! median of 5: 885 TOP/s at 2048, 1113 to 1133 at 4096, 1161 to 1199 at 8192.

use cubecl::{ir::StorageType, prelude::*, server::TensorMapBinding, std::tensor::TensorHandle};

use crate::{
    compile_ahead::knows_layers,
    cuda::{
        numbers::{halves, numbers},
        source::{CudaSource, SourceText, launch_source},
        tensor_map::TmaView,
    },
    device::{MatrixView, or_unused, storage},
    rounding::STOCHASTIC_OFFSET,
};

use super::{
    GemmArgs, GemmProblem,
    align::AlignedValues,
    blueprint::{Blueprint, HopperBlueprint, HopperTile},
    expected::{ExpectedLayer, LayerOperands},
    selector::Ranked,
    split_k,
};

pub(super) mod float;
pub(super) mod fp8;
pub(super) mod rounded;
pub(super) mod rowwise;

use self::{
    fp8::{Accumulation, Fp8Source},
    rounded::{RoundedOutput, Written, product_text},
};

/// A producer and two consumer warpgroups.
const UNITS: u32 = 3 * 128;
/// Bytes that every kernel leaves to what it declares itself: barriers, notes, scales, staging memory for unaligned
/// rows.
const DECLARED: usize = 27 * 1024;

impl HopperBlueprint {
    /// Rows of an output tile: those of the largest scale block, so that one that falls back costs its own products
    /// only.
    pub const TILE_M: usize = 128;
    /// Depth of a stage of INT8: that of the largest scale block, and the 128 bytes that a row of swizzled shared
    /// memory holds.
    pub const DEPTH: usize = 128;

    /// Columns of the widest tiles.
    const WIDEST: usize = 256;
    /// Columns of a tile of INT8 products that are computed at once, where any of them lies in the output.
    const CHUNK: usize = 64;
    /// Widths of the tiles of INT8 products, and their speeds beside one another where tiles are many: narrow ones
    /// read more for each product.
    ///
    /// With these, the cheapest width was the fastest one, within 0.3%, for 80 of 82 products with output in BF16 of
    /// 256 to 16384 rows on one NVIDIA H200, 2026-11-22, the other two being shorter than their launches; with output
    /// in FP32, slower to write then, it took 1.4% longer than the fastest one on average. All of that was in blocks of
    /// 128. In blocks of 64 it was the fastest for 42 of 42 products of 512 to 16,384 rows, in blocks of 32 it took
    /// 0.4% longer on average, 4% at most (one NVIDIA H100, 2026-11-26).
    const SPEEDS: [(usize, f32); 4] = [(256, 1.0), (192, 0.94), (128, 0.85), (64, 0.53)];

    /// For each width of tiles, given with its speed beside the others', a blueprint for outputs of this size and its
    /// cost, that of [`Ranked`]: what the busiest multiprocessor computes, over that speed. All have the same parts of K.
    ///
    /// `chunk`: columns that are computed at once, where any of them lies in the output.
    pub(super) fn all<R: Runtime, const WIDTHS: usize>(
        client: &ComputeClient<R>,
        product: &TiledProduct,
        chunk: usize,
        speeds: [(usize, f32); WIDTHS],
    ) -> [(Self, f32); WIDTHS] {
        let hardware = &client.properties().hardware;
        let cubes = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
        let &TiledProduct { batch, m, n, .. } = product;
        let rows_of = |parts: usize| parts * batch * m.div_ceil(Self::TILE_M);
        // The columns of the busiest multiprocessor, over the speed.
        let busiest = |parts: usize, (tile_n, speed): (usize, f32)| {
            let whole = rows_of(parts) * (n / tile_n);
            // The tiles of a narrow last column come last, where they fill gaps.
            let narrow = rows_of(parts) * (n % tile_n).next_multiple_of(chunk).min(tile_n);
            let even = (whole * tile_n + narrow).div_ceil(cubes);
            even.max(whole.div_ceil(cubes) * tile_n) as f32 / speed
        };
        let parts = match product.may_split {
            true => split_k::parts(product.stages, batch * m * n, |parts| {
                let columns = speeds.map(|it| busiest(parts, it));
                columns.into_iter().fold(f32::INFINITY, f32::min) / Self::WIDEST as f32
            }),
            false => 1,
        };
        let rows = rows_of(parts);
        let least = (rows * n).max(1) as f32 / cubes as f32;
        speeds.map(|(tile_n, speed)| {
            let blueprint = Self {
                tile: HopperTile::new(hardware.max_shared_memory_size, tile_n),
                cubes: cubes.min(rows * n.div_ceil(tile_n)),
                parts,
            };
            (blueprint, busiest(parts, (tile_n, speed)) / least)
        })
    }

    /// Those, in the order of their costs; of two of one cost, the one that comes first.
    fn by_cost<R: Runtime, const WIDTHS: usize>(
        client: &ComputeClient<R>,
        product: &TiledProduct,
        chunk: usize,
        speeds: [(usize, f32); WIDTHS],
    ) -> [Self; WIDTHS] {
        let mut all = Self::all(client, product, chunk, speeds);
        all.sort_by(|a, b| a.1.total_cmp(&b.1));
        all.map(|(blueprint, _)| blueprint)
    }

    /// That of the lowest cost.
    fn cheapest<R: Runtime, const WIDTHS: usize>(
        client: &ComputeClient<R>,
        product: &TiledProduct,
        chunk: usize,
        speeds: [(usize, f32); WIDTHS],
    ) -> Self {
        Self::by_cost(client, product, chunk, speeds)[0]
    }

    /// What the kernel writes for such an output: sums of parts are in FP32.
    fn written(&self, out_dtype: StorageType) -> StorageType {
        match self.parts {
            1 => out_dtype,
            _ => storage::<f32>(),
        }
    }

    fn cube_count(&self) -> CubeCount {
        CubeCount::Static(self.cubes as u32, 1, 1)
    }
}

impl HopperTile {
    /// One with as many stages as fit into so many bytes of shared memory.
    const fn new(shared_memory: usize, tile_n: usize) -> Self {
        Self {
            tile_n,
            stages: (shared_memory - DECLARED) / Self::stage_bytes(tile_n),
        }
    }

    /// Bytes of a stage: 128 of each row of a tile of A and of B.
    const fn stage_bytes(tile_n: usize) -> usize {
        (HopperBlueprint::TILE_M + tile_n) * 128
    }

    const fn shared_memory(&self) -> usize {
        self.stages * Self::stage_bytes(self.tile_n)
    }

    /// The knobs of common.cu that tell it.
    fn knobs(&self) -> String {
        format!(
            "#define TILE_N {}\n#define STAGES {}\n",
            self.tile_n, self.stages
        )
    }
}

/// What the tiles of a product follow from.
pub(super) struct TiledProduct {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    /// Stages along K.
    pub stages: usize,
    /// True if K may be summed up in parts.
    pub may_split: bool,
}

impl TiledProduct {
    /// That of these sizes, `[batch, M, N, K]`, in stages of so many elements.
    fn new([batch, m, n, k]: [usize; 4], depth: usize, may_split: bool) -> Self {
        Self {
            batch,
            m,
            n,
            stages: k.div_ceil(depth),
            may_split,
        }
    }

    /// That of INT8 matrices.
    fn of(problem: &GemmProblem) -> Self {
        let sizes = [problem.batch, problem.m, problem.n, problem.k];
        // Residuals make parts of one depth differ in cost.
        Self::new(sizes, HopperBlueprint::DEPTH, !problem.fallback)
    }
}

/// The blueprints of a product in square blocks.
pub(super) fn ranked<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
) -> [Ranked; HopperBlueprint::SPEEDS.len()] {
    let (chunk, speeds) = (HopperBlueprint::CHUNK, HopperBlueprint::SPEEDS);
    let product = TiledProduct::of(problem);
    HopperBlueprint::all(client, &product, chunk, speeds).map(|(blueprint, cost)| Ranked {
        blueprint: Blueprint::Hopper(blueprint),
        cost,
    })
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    args: &GemmArgs<R>,
    blueprint: HopperBlueprint,
) {
    let problem = args.problem;
    let AlignedValues {
        a,
        a_view,
        residual,
        b,
        b_view,
    } = AlignedValues::new(client, args);
    let residual = residual.unwrap_or_else(|| a.clone());
    let numbers = GemmNumbers::of(args, &b_view, blueprint.parts);
    let maps = vec![
        tensor_map(&a, &a_view, HopperBlueprint::TILE_M),
        tensor_map(&residual, &a_view, HopperBlueprint::TILE_M),
        tensor_map(&b, &b_view, blueprint.tile.tile_n),
    ];
    split_k::in_parts(client, blueprint.parts, args.out, args.bias, |out, bias| {
        let optional = |tensor: Option<&TensorHandle<R>>, dtype| or_unused(tensor, out, dtype);
        // SAFETY: `gemm` checked all shapes, from which the numbers come; the kernel guards its writes and its reads of
        // scales, flags and bias with them. It reads an optional buffer only where a knob says that there is one.
        #[allow(unsafe_code)]
        unsafe {
            launch_source(
                client,
                GemmSource {
                    tile: blueprint.tile,
                    block: problem.a_scale_block.0,
                    fallback: args.fallback.is_some(),
                    bias: bias.is_some(),
                    out: Written::to(out, args.rounded.as_ref()),
                },
                blueprint.cube_count(),
                maps,
                vec![
                    args.a.scales.clone(),
                    args.b.scales.clone(),
                    optional(args.fallback.map(|r| &r.scales), storage::<f32>()),
                    optional(args.fallback.map(|r| &r.flags), storage::<u32>()),
                    optional(bias, storage::<f32>()),
                    out.clone(),
                    optional(args.rounded.as_ref().map(|it| &it.scales), storage::<f32>()),
                    a,
                    residual,
                    b,
                ],
                &numbers,
            );
        }
    });
}

/// The stride of a batch, 0 for a batch of one.
fn batch_stride(view: &MatrixView) -> u64 {
    stride(view.shape.batch, view.batch_stride)
}

/// The stride of a dimension, 0 where there is one only.
fn stride(extent: usize, stride: usize) -> u64 {
    if extent == 1 { 0 } else { stride as u64 }
}

/// Tiles of `rows` x 128 bytes of INT8 matrices.
fn tensor_map<R: Runtime>(
    values: &TensorHandle<R>,
    view: &MatrixView,
    rows: usize,
) -> TensorMapBinding {
    let shape = view.shape;
    let view = TmaView {
        shape: [shape.batch, shape.rows, shape.cols],
        strides: [view.batch_stride, view.row_stride, 1],
        tile: [rows, HopperBlueprint::DEPTH],
    };
    view.bind(values)
}

impl GemmNumbers {
    /// Batch, M, N and K.
    fn sizes(&self) -> [usize; 4] {
        [self.batch, self.m, self.n, self.k].map(|size| size as usize)
    }

    /// Those of a product in so many parts, whose B is read as `b_view` says.
    fn of<R: Runtime>(args: &GemmArgs<R>, b_view: &MatrixView, parts: usize) -> Self {
        let problem = args.problem;
        let (of_a, of_b) = (&args.a_scales, &args.b_scales);
        Self {
            batch: problem.batch as u64,
            m: problem.m as u64,
            n: problem.n as u64,
            k: problem.k as u64,
            a_scale_batch: batch_stride(of_a),
            a_scale_row: stride(of_a.shape.rows, of_a.row_stride),
            a_scale_depth: of_a.col_stride as u64,
            b_scale_batch: batch_stride(of_b),
            b_scale_row: stride(of_b.shape.rows, of_b.row_stride),
            b_scale_depth: of_b.col_stride as u64,
            b_batched: u64::from(b_view.shape.batch > 1),
            parts: parts as u64,
            ..Self::rounded(args.rounded.as_ref())
        }
    }

    /// What the rounding of an output reads, and zeros.
    fn rounded<R: Runtime>(rounded: Option<&RoundedOutput<R>>) -> Self {
        let key = rounded.map(|it| it.key);
        Self {
            seed: halves(key.map_or(0, |key| key.seed)),
            stream: halves(key.map_or(0, |key| key.stream)),
            bits_of_384: STOCHASTIC_OFFSET.to_bits().into(),
            ..Self::default()
        }
    }
}

numbers! {
    /// The numbers of `hopper/gemm.cu`, `hopper/gemm_fp8.cu` and `hopper/gemm_rowwise.cu`. Strides are in elements;
    /// those of one batch or one row of scales are 0.
    #[derive(Default)]
    struct GemmNumbers {
        batch: u64,
        m: u64,
        n: u64,
        k: u64,
        a_scale_batch: u64,
        a_scale_row: u64,
        a_scale_depth: u64,
        b_scale_batch: u64,
        b_scale_row: u64,
        b_scale_depth: u64,
        /// 1 where each matrix of A has its own of B, 0 where one serves them all.
        b_batched: u64,
        /// Parts of K, whose sums follow one another in the output: those of one matrix, then those of the next.
        parts: u64,
        /// The key of the random numbers of a rounded output.
        seed: [u32; 2],
        stream: [u32; 2],
        /// The bits of 384, as in `whole_tiles.cu`.
        bits_of_384: u64,
    }
}

/// `hopper/gemm.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GemmSource {
    tile: HopperTile,
    block: usize,
    fallback: bool,
    bias: bool,
    out: Written,
}

impl CudaSource for GemmSource {
    type Numbers = GemmNumbers;

    const TEXT: &'static str = product_text!("gemm/hopper/chunks.cu", "gemm/hopper/gemm.cu");
    const ENTRY_POINT: &'static str = "gemm_hopper";

    fn units(&self) -> u32 {
        UNITS
    }

    fn knobs(&self) -> String {
        format!(
            "{}#define BLOCK {}\n#define FALLBACK {}\n#define BIAS {}\n{}",
            self.tile.knobs(),
            self.block,
            u8::from(self.fallback),
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

impl LayerSource for GemmSource {
    fn blueprint<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> HopperBlueprint {
        let (chunk, speeds) = (HopperBlueprint::CHUNK, HopperBlueprint::SPEEDS);
        let product = TiledProduct::new(sizes, HopperBlueprint::DEPTH, !self.fallback);
        HopperBlueprint::cheapest(client, &product, chunk, speeds)
    }

    fn in_tile(self, tile: HopperTile, out_dtype: StorageType) -> Self {
        Self {
            tile,
            bias: false,
            out: Written::Floats(out_dtype),
            ..self
        }
    }

    /// dY Wᵀ without a fallback; of an unknown layer, Xᵀ dY with one and without.
    fn gradients<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
        layer: Option<&LayerOperands>,
    ) -> Vec<SourceText> {
        let [of_input, of_weight] = other_products(sizes);
        let with = |fallback| Self { fallback, ..*self };
        let fallbacks = match layer {
            Some(LayerOperands::Int8Blocks { fallback, .. }) => vec![fallback[1]],
            _ => vec![false, self.fallback],
        };
        let of_weight = fallbacks
            .into_iter()
            .map(|fallback| with(fallback).of(client, of_weight, storage::<f32>()));
        let of_input = with(false).of(client, of_input, self.out.dtype());
        let gradients = std::iter::once(of_input).chain(of_weight);
        gradients.map(|gradient| gradient.text()).collect()
    }
}

/// The source of X W of this layer, and those of dX and dW.
pub(super) fn expected<R: Runtime>(
    client: &ComputeClient<R>,
    layer: &ExpectedLayer,
) -> (SourceText, Vec<SourceText>) {
    fn texts<R: Runtime>(
        client: &ComputeClient<R>,
        source: impl LayerSource,
        layer: &ExpectedLayer,
    ) -> (SourceText, Vec<SourceText>) {
        let sizes = [1, layer.rows, layer.outputs, layer.inputs];
        let gradients = source.gradients(client, sizes, Some(&layer.operands));
        (source.of(client, sizes, layer.dtype).text(), gradients)
    }
    // Of any width: that of the product follows.
    let memory = client.properties().hardware.max_shared_memory_size;
    let tile = HopperTile::new(memory, HopperBlueprint::WIDEST);
    let dtype = layer.dtype;
    match layer.operands {
        LayerOperands::Int8Blocks { side, fallback } => {
            let source = GemmSource {
                tile,
                block: side,
                fallback: fallback[0],
                bias: false,
                out: Written::Floats(dtype),
            };
            texts(client, source, layer)
        }
        LayerOperands::Int8Rows => texts(client, rowwise::of_tile(tile, dtype), layer),
        LayerOperands::E4M3 { accumulation, .. } => {
            let promoted = Fp8Source::new(tile, fp8::E4M3, dtype);
            match accumulation.along(layer.inputs) {
                Accumulation::Promoted => texts(client, promoted, layer),
                Accumulation::Fast => texts(client, promoted.fast(), layer),
            }
        }
        LayerOperands::Floats => texts(client, float::of_tile(tile, dtype), layer),
    }
}

/// The source of a product X W of a linear layer.
trait LayerSource: CudaSource {
    /// The blueprint that a product of these sizes, `[batch, M, N, K]`, gets.
    fn blueprint<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> HopperBlueprint;

    /// The same in another tile and with what it writes, without a bias.
    fn in_tile(self, tile: HopperTile, out_dtype: StorageType) -> Self;

    /// The same of another product, of these sizes and with this output.
    fn of<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
        out_dtype: StorageType,
    ) -> Self {
        let blueprint = self.blueprint(client, sizes);
        self.in_tile(blueprint.tile, blueprint.written(out_dtype))
    }

    /// The sources of dX = dY Wᵀ, in the dtype of this output, and of dW = Xᵀ dY, in FP32, where X W is of these sizes:
    /// those of the layer, or all that are likely.
    fn gradients<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
        layer: Option<&LayerOperands>,
    ) -> Vec<SourceText>;
}

/// The sources of such products, and, where nothing is known of the model's layers, those of products that recipes leave
/// in the dtype of this output.
///
/// None where it is FP32: that is a gradient of weights, or sums of parts, of which nothing follows.
fn companions_of<R: Runtime>(
    client: &ComputeClient<R>,
    out_dtype: StorageType,
    mut products: Vec<SourceText>,
) -> Vec<SourceText> {
    if out_dtype == storage::<f32>() {
        return vec![];
    }
    if !knows_layers() {
        products.extend(float::unquantized(client, out_dtype));
    }
    products
}

/// The sizes of dX = dY Wᵀ and of dW = Xᵀ dY, where X W is of these, `[batch, M, N, K]`.
fn other_products([batch, m, n, k]: [usize; 4]) -> [[usize; 4]; 2] {
    [[batch, m, k, n], [1, k, n, batch * m]]
}
