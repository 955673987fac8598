//! Attention on Hopper's warpgroup matrix instructions (`wgmma`), fed by its tensor memory accelerator (TMA).
//!
//! CUDA source: `hopper/forward.cu`, or `hopper/forward_int8.cu` where [codes] are multiplied, which `hopper/codes.cu`
//! makes; `hopper/rows.cu`, `hopper/gradients.cu`, `hopper/queries.cu` and `hopper/keys.cu` for the backward pass. Blocks
//! of that share keys, and sums of dK and dV stay in registers; those of dQ are added in memory, in FP32, by blocks that
//! take turns: each sum has one order, and results repeat to the bit.
//!
//! Where [`shares`] has several blocks take the heads of a group, each leaves its sums of dK and dV in memory, and
//! `hopper/keys.cu` adds them in the order of the heads. They take eight bytes for each feature, key and share: at most
//! twice what the sums of dQ take, where there are as many keys as queries.

mod codes;
mod shares;

use std::{fmt::Debug, hash::Hash, marker::PhantomData};

use cubecl::{ir::StorageType, prelude::*, server::TensorMapBinding, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, SourceText, float_knob, launch_source},
        tensor_map::{STRIDE_BYTES, TmaView},
    },
    device::{empty, is_hopper, is_operand_type, storage},
    error::KernelError,
};

use super::{
    AttentionGradients, AttentionOptions, AttentionOutput, AttentionProblem, AttentionProducts,
    AttentionShape, AttentionTensors, BACKWARD, FORWARD,
    bit_mask::{Along, BitMask},
    in_rows,
    launch::check_mask,
    products::KEYS_OF_SCALE,
};

use codes::{Codes, Order};
use shares::shares;

/// A producer and two consumer warpgroups.
const UNITS: u32 = 3 * 128;
/// Rows of a consumer.
const CONSUMER_ROWS: usize = 64;
/// Rows that the consumers of a block have together.
const ROWS: usize = 2 * CONSUMER_ROWS;
/// Features of a panel: 128 bytes.
const PANEL: usize = 64;
/// The widest heads.
const MAX_WIDTH: usize = 128;
const ELEMENT_BYTES: usize = 2;
/// Elements in what is read and written at once.
const VECTOR: usize = STRIDE_BYTES / ELEMENT_BYTES;
/// Bytes of shared memory that a kernel leaves to what it declares itself.
const DECLARED: usize = 1024;
/// Stages that hide all of memory's latency.
const MAX_STAGES: usize = 6;
/// Bytes of the L2 cache that operands of a section of heads may take.
const SECTION_BYTES: usize = 32 << 20;
/// Keys of a stage of the forward passes.
const KEYS: usize = KEYS_OF_SCALE;
/// Rows of the tiles of the backward pass, for heads of 64 and of 128 features: one for its three texts, since
/// `rows.cu` clears the turns that blocks of `gradients.cu` wait for.
const OF_BACKWARD: [usize; 2] = [128, 64];
/// Tiles that kernels number in 32 bits, with the turns that they skip.
const MAX_TILES: usize = 1 << 30;
/// Cubes along the second and the third axis of a launch, at most (CUDA programming guide).
const MAX_CUBES: usize = 65_535;
/// Units of a block of `rows.cu`.
const ROW_UNITS: usize = 256;

/// True where the kernels can read a tensor `[batch, heads, sequence, features]` as it lies in memory: neighbours are
/// neighbours along the features, and all other steps multiples of 16 bytes.
pub(super) fn reads<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
    Heads::new(FORWARD, "the operand", tensor).is_ok()
}

/// The forward pass.
pub(super) fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AttentionTensors<R>,
    problem: &AttentionProblem,
) -> Result<AttentionOutput<R>, KernelError> {
    let problem = Problem::new(FORWARD, client, tensors, problem, Along::Keys)?;
    let [query, key, value] = problem.inputs();
    let AttentionShape {
        batch,
        heads,
        queries,
        value_width,
        ..
    } = problem.shape;
    let result = AttentionOutput {
        output: in_rows(client, [batch, heads, queries, value_width], query.dtype),
        log_sum_exp: empty(client, problem.shape.rows().to_vec(), storage::<f32>()),
    };
    let tiles = queries.div_ceil(ROWS);
    let multiprocessors = client.properties().hardware.num_streaming_multiprocessors;
    let blocks = (batch * heads * tiles).min(multiprocessors.unwrap_or(1) as usize);
    let group = problem.shape.group();
    let section = |row_bytes| {
        let of_keys = problem.shape.keys * row_bytes;
        whole_rounds(cached_heads(of_keys, group), group, tiles, blocks)
    };
    let mut buffers = vec![result.output.clone(), result.log_sum_exp.clone()];
    match problem.options.products {
        AttentionProducts::Float => {
            let keys = Pass::<Forward>::of(&problem).tile;
            let maps = vec![
                problem.query.map(ROWS),
                problem.key.map(keys),
                problem.value.map(keys),
            ];
            buffers.extend([query, key, value, problem.mask_words()].map(Clone::clone));
            let section = section(problem.head_bytes());
            problem.launch::<Forward>(client, blocks, maps, buffers, section);
        }
        AttentionProducts::Int8 => {
            let query = Codes::new(client, query, Order::Rows);
            let key = Codes::new(client, key, Order::Tiles);
            let value = Codes::new(client, value, Order::Transposed);
            let maps = vec![query.map(ROWS), key.map(KEYS), value.map(problem.dim)];
            let codes = [query, key, value];
            buffers.extend(codes.each_ref().map(|codes| codes.scales.clone()));
            buffers.extend(codes.map(|codes| codes.values));
            buffers.push(problem.mask_words().clone());
            let section = section(2 * codes::ROW_BYTES);
            problem.launch::<ForwardInt8>(client, blocks, maps, buffers, section);
        }
    }
    Ok(result)
}

/// The gradients that are wanted of Q, K and V. All are computed where one is wanted.
pub(super) fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AttentionTensors<R>,
    forward: &AttentionOutput<R>,
    gradient: &TensorHandle<R>,
    wanted: AttentionGradients<bool>,
    problem: &AttentionProblem,
) -> Result<AttentionGradients<Option<TensorHandle<R>>>, KernelError> {
    let mut problem = Problem::new(BACKWARD, client, tensors, problem, Along::Queries)?;
    let [query, key, value] = problem.inputs();
    let shape = problem.shape;
    let output = Heads::new(BACKWARD, "output", &forward.output)?;
    let of_output = Heads::new(BACKWARD, "gradient", gradient)?;
    let AttentionShape {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        width,
        value_width,
    } = shape;

    let padded = queries.next_multiple_of(ROWS);
    let rows = empty(client, vec![batch, heads, padded, 2], storage::<f32>());
    let tile = Pass::<Gradients>::of(&problem).tile;
    let turns = empty(
        client,
        vec![1 + batch * heads * padded / tile],
        storage::<u32>(),
    );
    problem.strides = [output.strides(), of_output.strides()];
    let lanes = problem.dim / VECTOR;
    problem.launch::<Rows>(
        client,
        batch * heads * padded * lanes / ROW_UNITS,
        vec![],
        vec![
            forward.output.clone(),
            gradient.clone(),
            forward.log_sum_exp.clone(),
            rows.clone(),
            turns.clone(),
        ],
        1,
    );

    let sums = empty(
        client,
        vec![batch, heads, padded, problem.dim],
        storage::<f32>(),
    );
    let key_tiles = keys.div_ceil(ROWS);
    let shares = shape.group() / problem.share;
    let of_key = in_rows(client, [batch, kv_heads, keys, width], query.dtype);
    let of_value = in_rows(client, [batch, kv_heads, keys, value_width], query.dtype);
    let maps = vec![
        problem.query.map(tile),
        problem.key.map(ROWS),
        problem.value.map(ROWS),
        of_output.map(tile),
    ];
    let [of_keys, of_values] = match shares {
        1 => [of_key.clone(), of_value.clone()],
        _ => [(); 2].map(|()| {
            let of_shares = [batch, kv_heads * shares, key_tiles * ROWS, problem.dim];
            empty(client, of_shares.to_vec(), storage::<f32>())
        }),
    };
    let mut buffers = vec![
        rows,
        turns,
        sums.clone(),
        of_keys.clone(),
        of_values.clone(),
    ];
    buffers.extend([query, key, value, gradient, problem.mask_words()].map(Clone::clone));
    let of_share =
        queries * problem.share * (problem.head_bytes() + problem.dim * size_of::<f32>());
    problem.launch::<Gradients>(
        client,
        batch * kv_heads * shares * key_tiles,
        maps,
        buffers,
        cached_heads(of_share, 1),
    );
    if shares > 1 && (wanted.key || wanted.value) {
        // Half of them for keys, half for values.
        let blocks = 2 * batch * kv_heads * key_tiles * (ROWS / CONSUMER_ROWS);
        let buffers = vec![of_keys, of_values, of_key.clone(), of_value.clone()];
        problem.launch::<Keys>(client, blocks, vec![], buffers, 1);
    }

    let of_query = wanted.query.then(|| {
        let of_query = in_rows(client, [batch, heads, queries, width], query.dtype);
        problem.launch::<Queries>(
            client,
            batch * heads * padded / CONSUMER_ROWS,
            vec![],
            vec![sums, of_query.clone()],
            1,
        );
        of_query
    });
    Ok(AttentionGradients {
        query: of_query,
        key: wanted.key.then_some(of_key),
        value: wanted.value.then_some(of_value),
        bias: None,
    })
}

/// Heads whose blocks come together: groups of heads that read so many bytes, which the cache holds.
fn cached_heads(bytes: usize, group: usize) -> usize {
    (SECTION_BYTES / bytes.max(1)).max(1) * group
}

/// About so many heads, whole groups of them, whose tiles give each of these blocks one in each round but the last.
fn whole_rounds(heads: usize, group: usize, tiles: usize, blocks: usize) -> usize {
    let rounds = (heads * tiles / blocks).max(1);
    let whole = rounds * blocks / tiles / group * group;
    whole.max(group)
}

/// The reason why there is no kernel, where there is none.
pub(super) fn unsupported<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &AttentionProblem,
) -> Option<String> {
    let AttentionProblem {
        dtype,
        shape,
        options,
        ..
    } = *problem;
    let AttentionShape {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        width,
        value_width,
    } = shape;
    let fits = |width: usize| width % VECTOR == 0 && width <= MAX_WIDTH;
    // Positions, and sums of two of them, are signed numbers of 32 bits.
    let short = |sequence: usize| sequence <= 1 << 28;
    if !is_hopper(client) {
        Some("a device that is not of CUDA's architecture sm_90".into())
    } else if !is_operand_type(dtype) {
        Some(format!("tensors of {dtype}"))
    } else if !fits(width) || !fits(value_width) {
        Some(format!("heads of {width} and {value_width} features"))
    } else if batch * heads * kv_heads * queries * keys == 0
        || !short(queries)
        || !short(keys)
        || batch * heads * queries.div_ceil(ROWS) > MAX_TILES
    {
        Some(format!("scores {:?}", shape.scores()))
    } else if !(options.scale > 0.0 && options.scale.is_finite()) {
        Some(format!("a scale of {}", options.scale))
    } else if problem.is_biased {
        Some("a bias".into())
    } else if options.softcap.is_some() || options.dropout.is_some() {
        Some("a soft cap or dropout".into())
    } else if options.products == AttentionProducts::Int8 && batch.max(heads) > MAX_CUBES {
        Some(format!("INT8 products of {batch} batches of {heads} heads"))
    } else {
        None
    }
}

/// A tensor `[batch, heads, sequence, features]` that TMA can read as it lies in memory.
struct Heads<'a, R: Runtime> {
    tensor: &'a TensorHandle<R>,
}

impl<'a, R: Runtime> Heads<'a, R> {
    fn new(
        operation: &'static str,
        name: &'static str,
        tensor: &'a TensorHandle<R>,
    ) -> Result<Self, KernelError> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
        let steps =
            |dim: usize| shape[dim] == 1 || (strides[dim] > 0 && strides[dim] % VECTOR == 0);
        let fits = shape.len() == 4
            && offset % STRIDE_BYTES == 0
            && (strides[3] == 1 || shape[3] == 1)
            && (0..3).all(steps);
        match fits {
            true => Ok(Self { tensor }),
            false => Err(KernelError::Unsupported {
                operation,
                reason: format!(
                    "{name} of shape {shape:?} with strides {strides:?} and an offset of {offset} bytes"
                ),
                remedy: "pass a contiguous copy",
            }),
        }
    }

    fn dimensions(&self) -> [usize; 4] {
        let shape = self.tensor.shape();
        [shape[0], shape[1], shape[2], shape[3]]
    }

    /// Elements from a batch, a head and a row to the next.
    fn strides(&self) -> [u64; 3] {
        let strides = self.tensor.strides();
        [strides[0], strides[1], strides[2]].map(|stride| stride as u64)
    }

    /// Boxes of `rows` rows and a panel.
    fn map(&self, rows: usize) -> TensorMapBinding {
        let (shape, strides) = (self.dimensions(), self.tensor.strides());
        // TMA never takes the stride of a single row, but checks it.
        let pitch = match shape[2] {
            1 => shape[3].next_multiple_of(VECTOR),
            _ => strides[2],
        };
        TmaView {
            shape,
            strides: [strides[0], strides[1], pitch, 1],
            tile: [rows, PANEL],
        }
        .bind(self.tensor)
    }
}

/// Attention that has kernels.
struct Problem<'a, R: Runtime> {
    shape: AttentionShape,
    options: AttentionOptions,
    dtype: StorageType,
    query: Heads<'a, R>,
    key: Heads<'a, R>,
    value: Heads<'a, R>,
    /// Features of a head in shared memory.
    dim: usize,
    /// Bytes of shared memory for stages and what else the kernel asks for.
    memory: usize,
    /// The strides of the output and of its gradient, where they are read without TMA.
    strides: [[u64; 3]; 2],
    mask: Option<BitMask<R>>,
    /// Heads of queries that a block of the backward pass has: a group, or a share of it.
    share: usize,
}

impl<'a, R: Runtime> Problem<'a, R> {
    fn new(
        operation: &'static str,
        client: &ComputeClient<R>,
        tensors: &'a AttentionTensors<R>,
        problem: &AttentionProblem,
        bits: Along,
    ) -> Result<Self, KernelError> {
        let AttentionProblem {
            dtype,
            shape,
            options,
            ..
        } = *problem;
        let dim = usize::max(shape.width, shape.value_width).next_multiple_of(PANEL);
        let hardware = &client.properties().hardware;
        let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
        let tile = [OF_BACKWARD[dim / PANEL - 1], ROWS];
        if let Some(mask) = &tensors.mask {
            check_mask(operation, client, mask)?;
        }
        let of_mask = |mask| BitMask::new(operation, client, mask, &shape, bits);
        Ok(Self {
            shape,
            options,
            dtype,
            query: Heads::new(operation, "query", &tensors.query)?,
            key: Heads::new(operation, "key", &tensors.key)?,
            value: Heads::new(operation, "value", &tensors.value)?,
            dim,
            memory: hardware.max_shared_memory_size - DECLARED,
            strides: Default::default(),
            mask: tensors.mask.as_ref().map(of_mask).transpose()?,
            share: shape.group() / shares(&shape, options.band, tile, dim, multiprocessors),
        })
    }

    /// The words of the mask; any tensor where there is none.
    fn mask_words(&self) -> &TensorHandle<R> {
        let words = self.mask.as_ref().map(|mask| &mask.words);
        words.unwrap_or(self.query.tensor)
    }

    /// Q, K and V.
    fn inputs(&self) -> [&'a TensorHandle<R>; 3] {
        [self.query.tensor, self.key.tensor, self.value.tensor]
    }

    /// Bytes of a row of a head and of its value, or its gradient.
    fn head_bytes(&self) -> usize {
        2 * self.dim * ELEMENT_BYTES
    }

    /// Launches a pass. `section`: heads whose blocks come together.
    fn launch<P: Kernel>(
        &self,
        client: &ComputeClient<R>,
        blocks: usize,
        maps: Vec<TensorMapBinding>,
        buffers: Vec<TensorHandle<R>>,
        section: usize,
    ) {
        let shape = &self.shape;
        // No bound is farther away than all positions together.
        let bound = |bound: Option<u32>| {
            let all = shape.queries + shape.keys;
            bound.map_or(all, |bound| all.min(bound as usize)) as u64
        };
        let [out, gradient] = self.strides;
        let mask = self.mask.as_ref().map(BitMask::strides);
        let [mask_batch, mask_head, mask_row] = mask.unwrap_or_default();
        let numbers = AttentionNumbers {
            queries: shape.queries as u64,
            keys: shape.keys as u64,
            heads: shape.heads as u64,
            batches: shape.batch as u64,
            group: shape.group() as u64,
            share: self.share as u64,
            before: bound(self.options.band.left),
            behind: bound(self.options.band.right),
            section: section.min(shape.batch * shape.heads) as u64,
            scale: u64::from(self.options.scale.to_bits()),
            width: shape.width as u64,
            value_width: shape.value_width as u64,
            padded: shape.queries.next_multiple_of(ROWS) as u64,
            out_batch: out[0],
            out_head: out[1],
            out_row: out[2],
            gradient_batch: gradient[0],
            gradient_head: gradient[1],
            gradient_row: gradient[2],
            mask_batch,
            mask_head,
            mask_row,
        };
        // SAFETY: `Problem::new` and its callers checked the tensors; kernels guard reads without TMA and all writes
        // with the numbers, for which the outputs were allocated.
        #[allow(unsafe_code)]
        unsafe {
            let blocks = CubeCount::Static(blocks as u32, 1, 1);
            launch_source(client, Pass::<P>::of(self), blocks, maps, buffers, &numbers);
        }
    }
}

numbers! {
    /// The numbers of all passes.
    struct AttentionNumbers {
        queries: u64,
        keys: u64,
        heads: u64,
        batches: u64,
        /// Heads of queries that read one of keys.
        group: u64,
        /// Heads of queries that a block of the backward pass has: a group, or a share of it.
        share: u64,
        /// Keys before and behind a query's own that it sees.
        before: u64,
        behind: u64,
        /// Heads whose blocks come together.
        section: u64,
        /// The bits of an f32.
        scale: u64,
        width: u64,
        value_width: u64,
        /// Queries of a head with their padding.
        padded: u64,
        /// Elements from one to the next in the output and in its gradient.
        out_batch: u64,
        out_head: u64,
        out_row: u64,
        gradient_batch: u64,
        gradient_head: u64,
        gradient_row: u64,
        /// Words of the mask's bits from one to the next.
        mask_batch: u64,
        mask_head: u64,
        mask_row: u64,
    }
}

/// A text and what it holds in shared memory.
trait Kernel: Debug + Copy + Eq + Hash + Send + Sync + 'static {
    const TEXT: &'static str;
    const ENTRY_POINT: &'static str;
    const UNITS: u32;
    /// True where backward passes follow it.
    const IS_FORWARD: bool = false;
    /// True where what it reads are codes.
    const READS_CODES: bool = false;
    /// Tiles of the block's own rows.
    const OWN: usize = 0;
    /// Tiles of a stage.
    const STAGED: usize = 0;
    /// Bytes of a stage beside them, for each row.
    const ROW_BYTES: usize = 0;
    /// Tiles of scores, the block's own rows times those of a stage.
    const SCORES: usize = 0;
    /// Tiles of sums in FP32 for the rows of a stage.
    const SUMS: usize = 0;
    /// True where it reads the mask.
    const READS_MASK: bool = false;
    /// True where it depends on whether blocks share the heads of a group.
    const HAS_SHARES: bool = false;
    /// True where it computes probabilities from the log-sum-exp of the forward pass.
    const HAS_PROBABILITIES: bool = false;
    /// Rows of a tile of a stage, for heads of 64 and of 128 features in shared memory.
    const TILES: [usize; 2] = OF_BACKWARD;
}

macro_rules! kernels {
    ($(
        $kernel:ident: [$($file:literal),+] $entry_point:literal {
            $($constant:ident: $type:ty = $value:expr,)+
        }
    )*) => {
        $(
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
            struct $kernel;

            impl Kernel for $kernel {
                const TEXT: &'static str = concat!(
                    include_str!("../cuda/hopper.cu"),
                    include_str!("hopper/common.cu"),
                    $(include_str!($file)),+
                );
                const ENTRY_POINT: &'static str = $entry_point;
                $(const $constant: $type = $value;)+
            }
        )*
    };
}

kernels! {
    Forward: ["hopper/forward_common.cu", "hopper/forward.cu"] "attention_forward_hopper" {
        UNITS: u32 = UNITS,
        IS_FORWARD: bool = true,
        OWN: usize = 1,
        STAGED: usize = 1,
        READS_MASK: bool = true,
        TILES: [usize; 2] = [KEYS, KEYS],
    }
    ForwardInt8: ["hopper/forward_common.cu", "hopper/forward_int8.cu"] "attention_forward_int8_hopper" {
        UNITS: u32 = UNITS,
        IS_FORWARD: bool = true,
        READS_CODES: bool = true,
        OWN: usize = 1,
        STAGED: usize = 1,
        READS_MASK: bool = true,
        TILES: [usize; 2] = [KEYS, KEYS],
    }
    Rows: ["hopper/rows.cu"] "attention_rows_hopper" {
        UNITS: u32 = ROW_UNITS as u32,
    }
    Gradients: ["hopper/gradients.cu"] "attention_gradients_hopper" {
        UNITS: u32 = UNITS,
        OWN: usize = 2,
        STAGED: usize = 2,
        ROW_BYTES: usize = 8,
        SCORES: usize = 2,
        SUMS: usize = 1,
        READS_MASK: bool = true,
        HAS_SHARES: bool = true,
        HAS_PROBABILITIES: bool = true,
    }
    Queries: ["hopper/queries.cu"] "attention_queries_hopper" {
        UNITS: u32 = 128,
    }
    Keys: ["hopper/keys.cu"] "attention_keys_hopper" {
        UNITS: u32 = 128,
    }
}

/// A kernel with its knobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Pass<P> {
    dim: usize,
    tile: usize,
    stages: usize,
    dtype: StorageType,
    is_masked: bool,
    is_split: bool,
    is_bounded: bool,
    kernel: PhantomData<P>,
}

impl<P: Kernel> Pass<P> {
    fn of<R: Runtime>(problem: &Problem<'_, R>) -> Self {
        let Problem { dim, dtype, .. } = *problem;
        let is_split = problem.share < problem.shape.group();
        let products = problem.options.products;
        Self::new(
            dim,
            dtype,
            problem.mask.is_some(),
            is_split,
            products,
            problem.memory,
        )
    }

    /// With as many stages as fit into so many bytes. `products`: those of the forward pass.
    fn new(
        dim: usize,
        dtype: StorageType,
        is_masked: bool,
        is_split: bool,
        products: AttentionProducts,
        memory: usize,
    ) -> Self {
        let mut pass = Self {
            dim,
            tile: P::TILES[dim / PANEL - 1],
            stages: 0,
            dtype,
            is_masked: P::READS_MASK && is_masked,
            is_split: P::HAS_SHARES && is_split,
            is_bounded: P::HAS_PROBABILITIES && products == AttentionProducts::Int8,
            kernel: PhantomData,
        };
        let left = memory - pass.shared_memory();
        pass.stages = match pass.stage_bytes() {
            0 => 1,
            bytes => (left / bytes).min(MAX_STAGES),
        };
        pass
    }

    /// Bytes of a row of a head.
    fn row_bytes(&self) -> usize {
        match P::READS_CODES {
            true => codes::ROW_BYTES,
            false => self.dim * ELEMENT_BYTES,
        }
    }

    fn stage_bytes(&self) -> usize {
        self.tile * (P::STAGED * self.row_bytes() + P::ROW_BYTES)
    }
}

impl<P: Kernel> CudaSource for Pass<P> {
    type Numbers = AttentionNumbers;

    const TEXT: &'static str = P::TEXT;
    const ENTRY_POINT: &'static str = P::ENTRY_POINT;

    fn units(&self) -> u32 {
        P::UNITS
    }

    fn knobs(&self) -> String {
        let out = float_knob(self.dtype);
        format!(
            "#define TILE_N {}\n#define STAGED_ROWS {}\n#define STAGES {}\n#define IN \"{}\"\n#define OUT_{out}\n\
             #define MASKED {}\n#define SPLIT {}\n#define BOUNDED {}",
            self.dim,
            self.tile,
            self.stages,
            out.to_lowercase(),
            u8::from(self.is_masked),
            u8::from(self.is_split),
            u8::from(self.is_bounded),
        )
    }

    fn shared_memory(&self) -> usize {
        let own = P::OWN * ROWS * self.row_bytes();
        let scores = P::SCORES * ROWS * self.tile * ELEMENT_BYTES;
        let sums = P::SUMS * self.tile * self.dim * size_of::<f32>();
        own + scores + sums + self.stages * self.stage_bytes()
    }

    /// The heads of a group and of a share of it.
    fn sizes(&self, numbers: &AttentionNumbers) -> [usize; 4] {
        [numbers.group as usize, numbers.share as usize, 0, 0]
    }

    /// The backward pass, of the forward one.
    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        [group, share, ..]: [usize; 4],
    ) -> Vec<SourceText> {
        if !P::IS_FORWARD {
            return vec![];
        }
        let (dim, dtype, is_masked) = (self.dim, self.dtype, self.is_masked);
        let memory = client.properties().hardware.max_shared_memory_size - DECLARED;
        let is_split = share < group;
        let products = match P::READS_CODES {
            true => AttentionProducts::Int8,
            false => AttentionProducts::Float,
        };
        let mut texts = vec![
            Pass::<Gradients>::new(dim, dtype, is_masked, is_split, products, memory).text(),
            Pass::<Rows>::new(dim, dtype, is_masked, is_split, products, memory).text(),
            Pass::<Queries>::new(dim, dtype, is_masked, is_split, products, memory).text(),
        ];
        if is_split {
            texts.push(Pass::<Keys>::new(dim, dtype, is_masked, is_split, products, memory).text());
        }
        texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many heads as fill rounds; where a head has more tiles than there are blocks, one group.
    #[test]
    fn sections_are_whole_rounds() {
        for (heads, group, tiles, section) in [
            (128, 1, 8, 115),
            (103, 1, 4, 99),
            (4, 1, 128, 3),
            (8, 1, 1, 132),
            (8, 4, 1, 132),
            (8, 8, 3, 40),
            (1, 1, 256, 1),
            (4, 4, 256, 4),
        ] {
            assert_eq!(
                whole_rounds(heads, group, tiles, 132),
                section,
                "{heads} {group} {tiles}"
            );
        }
        assert_eq!(whole_rounds(4, 1, 8, 1), 4);
    }
}
