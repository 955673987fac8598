//! The kernel of CUDA source for what a training step quantizes most: whole tiles, row-major, and transposed with
//! stochastic rounding. What an operator makes of codes is quantized around the same tile.
//!
//! CubeCL names no byte permutation, no maximum of pairs and none of a warp, without which the rounding takes more
//! instructions than memory leaves time for. So this kernel is CUDA source, `whole_tiles.cu`, behind `tile.cu`, which
//! tells what it does, and why; the portable kernel beside it is its specification, and does everything else.
//!
//! On one NVIDIA H200, 2026-11-22, CUDA events around 200 launches, median of 9, BF16: X with a residual in each fifth
//! block takes 12.6 microseconds at 2048 x 4096 and 42.9 at 8192 x 4096, where the portable kernel takes 15.7 and 48.1;
//! dY 9.1 and 38.1 instead of 11.1 and 39.2.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::{halves, numbers},
        source::{CudaSource, SourceText, float_knob, launch_source},
    },
    device::{MAX_CUBES, MatrixView, is_contiguous, is_operand_type, read_width_up_to},
    granularity::Granularity,
    layout::Layout,
    number::Number,
    quantize::{QuantizeSpec, Quantized, staged::TILE},
    rounding::{Rounding, STOCHASTIC_OFFSET, StochasticKey},
    scale::ScaleNumber,
    shape::MatrixShape,
};

use super::{BlockOutput, Round, fallback_buffers};

/// Codes of a row that a unit reads at once.
const CODES_AT_ONCE: usize = 8;
/// Bytes read at once.
const VECTOR_BYTES: usize = 16;
/// Bytes of shared memory that a cube takes beside those of its tile: what the kernel declares, and what CUDA keeps.
const DECLARED: usize = 64;
const RESERVED: usize = 1024;

/// Where nothing is stochastic, none is drawn.
const NO_KEY: StochasticKey = StochasticKey { seed: 0, stream: 0 };

/// Does what [`launch`](super::launch) does, if this kernel can and the device has it: CUDA's sm_80 and later, which
/// alone copy asynchronously, where two tiles fit on a multiprocessor. Says whether it did.
///
/// # Safety
///
/// As for [`launch`](super::launch).
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    view: &MatrixView,
    block: usize,
    key: Option<StochasticKey>,
    output: &BlockOutput<R>,
) -> bool {
    let row_major = output.row_major.map(|(_, round)| round);
    let transposed = output.transposed.map(|(_, round)| round);
    let is_stochastic = [row_major, transposed].contains(&Some(Round::Stochastic));
    // A row-major copy of FP32 alone leaves the portable kernel time enough.
    let is_portable = transposed.is_none() && x.dtype.size() == 4;
    if is_portable || transposed == Some(Round::Nearest) || is_stochastic != key.is_some() {
        return false;
    }
    let key = key.unwrap_or(NO_KEY);
    let shape = view.shape;
    let cubes = cubes(
        client,
        tile_bytes(x.dtype),
        if x.dtype.size() == 2 { 4 } else { 2 },
    );
    let multiprocessors = client.properties().hardware.num_streaming_multiprocessors;
    let at_once = cubes * multiprocessors.unwrap_or(1) as usize;
    let vector = VECTOR_BYTES / x.dtype.size();
    let fits = has_whole_tiles(client, shape, block)
        && cubes >= 2
        && read_width_up_to(vector, x, view) == vector;
    if !fits {
        return false;
    }
    let source = WholeTilesSource(TileKnobs {
        dtype: x.dtype,
        row_major,
        transposed,
        fallback: output.fallback.is_some(),
        draw_early: is_stochastic && shape.num_elements() <= at_once * TILE * TILE,
        cubes,
    });
    // SAFETY: the caller's promise, of one input.
    unsafe {
        launch_tiles(client, source, &[x], view, key, output, Vec::new());
    }
    true
}

/// Launches a kernel around `tile.cu` that has one output, and writes tensors `beside` it. `key`: the random stream of
/// what is rounded stochastically.
///
/// # Safety
///
/// The inputs, of this view, which [has whole tiles](has_whole_tiles), are those that the kernel reads. Of the output's
/// copies it writes those that there are, and the output is as for [`launch`](super::launch). What is beside it is as
/// large as the kernel takes it to be.
#[allow(unsafe_code)]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn launch_tiles<R: Runtime, S: CudaSource<Numbers = WholeTilesNumbers>>(
    client: &ComputeClient<R>,
    source: S,
    inputs: &[&TensorHandle<R>],
    view: &MatrixView,
    key: StochasticKey,
    output: &BlockOutput<R>,
    beside: Vec<TensorHandle<R>>,
) {
    let fallback = output.fallback.as_ref();
    let copies = [output.row_major, output.transposed];
    // What there is none of is not touched.
    let copies = copies.map(|copy| copy.map_or(output.scales, |(copy, _)| copy));
    let written = copies.into_iter().chain([output.scales]);
    let mut buffers: Vec<_> = inputs.iter().copied().chain(written).cloned().collect();
    buffers.extend(fallback_buffers(fallback, inputs[0]));
    buffers.extend(beside);
    let numbers = WholeTilesNumbers {
        rows: view.shape.rows as u64,
        cols: view.shape.cols as u64,
        batch_stride: view.batch_stride as u64,
        row_stride: view.row_stride as u64,
        layer: fallback.map_or(0, |fallback| fallback.layer.into()),
        seed: halves(key.seed),
        stream: halves(key.stream),
        bits_of_384: STOCHASTIC_OFFSET.to_bits().into(),
    };
    // SAFETY: the cubes are the tiles of the inputs, none of which reaches over an edge; by the caller's promise the
    // outputs hold as many, and the layer has a state. Without a fallback its buffers are not touched.
    unsafe {
        launch_source(client, source, tiles(view), Vec::new(), buffers, &numbers);
    }
}

/// The scales of the codes that kernels around `codes.cu` read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum OfScale {
    /// One of each row of a tile.
    Row = 1,
    /// One of each tile.
    Tile = 2,
}

impl OfScale {
    /// Those of a matrix, with the tensor of its codes, if kernels read them: INT8 in groups of a tile's columns, or in
    /// blocks of a tile. `view`: that of the tensor.
    pub fn of<'a, R: Runtime>(
        matrix: &'a Quantized<R>,
        view: &MatrixView,
    ) -> Option<(Self, &'a TensorHandle<R>)> {
        let of_scale = match matrix.granularity {
            Granularity::Group(TILE) => Self::Row,
            Granularity::Block(TILE) => Self::Tile,
            Granularity::Group(_)
            | Granularity::Block(_)
            | Granularity::Token
            | Granularity::Channel
            | Granularity::Tensor => return None,
        };
        let values = matrix.values.as_ref()?;
        let is_read = (matrix.number, matrix.scale) == (Number::Int8, ScaleNumber::F32)
            && is_contiguous(values)
            && is_contiguous(&matrix.scales)
            && read_width_up_to(CODES_AT_ONCE, values, view) == CODES_AT_ONCE;
        is_read.then_some((of_scale, values))
    }

    /// The tensor of the codes of a matrix in blocks of a tile, if kernels read them.
    pub fn tile<'a, R: Runtime>(
        matrix: &'a Quantized<R>,
        view: &MatrixView,
    ) -> Option<&'a TensorHandle<R>> {
        match Self::of(matrix, view)? {
            (Self::Tile, values) => Some(values),
            (Self::Row, _) => None,
        }
    }

    /// The line that defines `CODES`.
    pub fn text(codes: Option<Self>) -> String {
        format!(
            "#define CODES {}",
            codes.map_or(0, |of_scale| of_scale as u8)
        )
    }
}

/// A cube a tile.
pub(crate) fn tiles(view: &MatrixView) -> CubeCount {
    let shape = view.shape;
    CubeCount::Static(
        (shape.cols / TILE) as u32,
        (shape.rows / TILE) as u32,
        shape.batch as u32,
    )
}

/// True on CUDA's sm_80 and later, which alone copy asynchronously, for blocks that are tiles.
pub(crate) fn has_tiles<R: Runtime>(client: &ComputeClient<R>, block: usize) -> bool {
    R::name(client) == "cuda" && client.features().copy_async && block == TILE
}

/// True where [tiles are there](has_tiles), for matrices of whole ones.
pub(crate) fn has_whole_tiles<R: Runtime>(
    client: &ComputeClient<R>,
    shape: MatrixShape,
    block: usize,
) -> bool {
    has_tiles(client, block)
        && shape.rows % TILE == 0
        && shape.cols % TILE == 0
        && shape.rows / TILE <= MAX_CUBES
        && shape.batch <= MAX_CUBES
}

/// Cubes that share a multiprocessor, as far as its shared memory goes, of which one takes so many bytes, and `most`:
/// with more, too few registers are left for each.
pub(crate) fn cubes<R: Runtime>(client: &ComputeClient<R>, bytes: usize, most: usize) -> usize {
    // A multiprocessor has what one cube can take, and what CUDA keeps of that.
    let available = client.properties().hardware.max_shared_memory_size + RESERVED;
    (available / (bytes + DECLARED + RESERVED)).min(most)
}

/// Bytes of the elements of a tile, and of its transposed copy.
pub(crate) fn tile_bytes(dtype: StorageType) -> usize {
    TILE * TILE * (dtype.size() + 1)
}

numbers! {
    /// The numbers of kernels with one output.
    pub(crate) struct WholeTilesNumbers {
        /// Of a matrix, multiples of 128.
        rows: u64,
        cols: u64,
        /// Elements of an input from a matrix to the next, and from a row to the next.
        batch_stride: u64,
        row_stride: u64,
        /// The layer in the state of a fallback; else of no account.
        layer: u64,
        /// The key of the random numbers.
        seed: [u32; 2],
        stream: [u32; 2],
        /// The bits of 384, which the compiler must not know: logic takes one constant and a register in one
        /// instruction.
        bits_of_384: u64,
    }
}

numbers! {
    /// The numbers of kernels with one output that read codes.
    pub(crate) struct CodesNumbers {
        /// Multiples of 128.
        rows: u64,
        cols: u64,
        /// The key of the random numbers.
        seed: [u32; 2],
        stream: [u32; 2],
        /// The bits of 384, as in `whole_tiles.cu`.
        bits_of_384: u64,
    }
}

impl CodesNumbers {
    /// Those of a matrix of this view. `key`: the random stream of what is rounded stochastically.
    pub fn of(view: &MatrixView, key: Option<StochasticKey>) -> Self {
        let key = key.unwrap_or(NO_KEY);
        Self {
            rows: view.shape.rows as u64,
            cols: view.shape.cols as u64,
            seed: halves(key.seed),
            stream: halves(key.stream),
            bits_of_384: STOCHASTIC_OFFSET.to_bits().into(),
        }
    }
}

/// What the kernels around `tile.cu` are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileKnobs {
    pub dtype: StorageType,
    /// How the copies that there are, are rounded.
    pub row_major: Option<Round>,
    pub transposed: Option<Round>,
    pub fallback: bool,
    /// All tiles are on the device at once, where random words are drawn before they are used.
    pub draw_early: bool,
    /// Cubes that are to share a multiprocessor.
    pub cubes: usize,
}

impl TileKnobs {
    /// Those of INT8 blocks without a fallback, with the key of what is stochastic; none of another spec. A cube takes so
    /// many `bytes` of shared memory, and `most` are to share a multiprocessor.
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        dtype: StorageType,
        view: &MatrixView,
        spec: &QuantizeSpec,
        bytes: usize,
        most: usize,
    ) -> Option<(Self, Option<StochasticKey>)> {
        let Granularity::Block(block) = spec.granularity else {
            return None;
        };
        let int8 = QuantizeSpec::int8(spec.granularity)
            .with_rounding(spec.rounding)
            .with_layout(spec.layout);
        let (round, key) = match spec.rounding {
            Rounding::Nearest => (Round::Nearest, None),
            Rounding::Stochastic(key) => (Round::Stochastic, Some(key)),
        };
        let (row_major, transposed) = match spec.layout {
            Layout::RowMajor => (Some(round), None),
            Layout::Transposed => (None, Some(round)),
            Layout::Both => (Some(round), Some(round)),
        };
        let knobs = Self {
            dtype,
            row_major,
            transposed,
            fallback: false,
            draw_early: false,
            cubes: cubes(client, bytes, most),
        };
        let fits = *spec == int8
            && is_operand_type(dtype)
            && knobs.cubes >= 2
            && has_whole_tiles(client, view.shape, block);
        fits.then_some((knobs, key))
    }

    /// The lines that define them.
    pub fn text(&self) -> String {
        let is_stochastic = |copy| u8::from(copy == Some(Round::Stochastic));
        format!(
            "#define IN_{}\n#define ROW_MAJOR {}\n#define TRANSPOSED {}\n#define ROW_STOCHASTIC {}\n\
             #define TRANSPOSED_STOCHASTIC {}\n#define FALLBACK {}\n#define CUBES {}\n#define DRAW_EARLY {}",
            float_knob(self.dtype),
            u8::from(self.row_major.is_some()),
            u8::from(self.transposed.is_some()),
            is_stochastic(self.row_major),
            is_stochastic(self.transposed),
            u8::from(self.fallback),
            self.cubes,
            u8::from(self.draw_early),
        )
    }
}

/// Launches a kernel around `tile.cu` that reads codes, with one output and without a fallback.
///
/// # Safety
///
/// The inputs, of this view, which [has whole tiles](has_whole_tiles), are those that the kernel reads, and the output was
/// allocated for it.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch_of_codes<R: Runtime, S: CudaSource<Numbers = CodesNumbers>>(
    client: &ComputeClient<R>,
    source: S,
    inputs: &[&TensorHandle<R>],
    view: &MatrixView,
    key: Option<StochasticKey>,
    output: &Quantized<R>,
) {
    let buffers = inputs
        .iter()
        .copied()
        .chain(written(output))
        .cloned()
        .collect();
    let numbers = CodesNumbers::of(view, key);
    // SAFETY: the cubes are the tiles of the inputs, none of which reaches over an edge, and the rest is the caller's
    // promise.
    unsafe {
        launch_source(client, source, tiles(view), Vec::new(), buffers, &numbers);
    }
}

/// The copies of an output and its scales, as kernels take them. What there is none of is not touched.
pub(crate) fn written<R: Runtime>(output: &Quantized<R>) -> [&TensorHandle<R>; 3] {
    let copies = [&output.values, &output.transposed];
    let [row_major, transposed] = copies.map(|copy| copy.as_ref().unwrap_or(&output.scales));
    [row_major, transposed, &output.scales]
}

/// The text of a kernel around `tile.cu` that reads codes, in the folder beside this file's from which it is asked for:
/// behind those that it stands on.
macro_rules! around_block_tile {
    ($($text:literal),+) => {
        concat!(
            include_str!("../quantize/block/scale.cu"),
            "\n",
            include_str!("../quantize/int8.cu"),
            "\n",
            include_str!("../quantize/block/tile.cu"),
            "\n",
            include_str!("../cuda/pairs.cu"),
            "\n",
            include_str!("../quantize/block/codes.cu"),
            $("\n", include_str!($text)),+
        )
    };
}

pub(crate) use around_block_tile;

/// `whole_tiles.cu` behind `tile.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct WholeTilesSource(TileKnobs);

impl CudaSource for WholeTilesSource {
    type Numbers = WholeTilesNumbers;

    const TEXT: &'static str = concat!(
        include_str!("scale.cu"),
        "\n",
        include_str!("../int8.cu"),
        "\n",
        include_str!("tile.cu"),
        "\n",
        include_str!("whole_tiles.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_whole_tiles";

    fn knobs(&self) -> String {
        self.0.text()
    }

    fn shared_memory(&self) -> usize {
        tile_bytes(self.0.dtype)
    }

    /// Of X, that of more or fewer tiles, and both of dY; where X is made again in the backward pass, its copy alone too.
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        let Self(of_x) = *self;
        if of_x.row_major != Some(Round::Nearest) {
            return vec![];
        }
        let stochastic = |row_major: Option<Round>, draw_early| TileKnobs {
            row_major,
            transposed: Some(Round::Stochastic),
            fallback: false,
            draw_early,
            ..of_x
        };
        let mut knobs = [false, true]
            .map(|draw_early| stochastic(Some(Round::Stochastic), draw_early))
            .to_vec();
        match of_x.transposed {
            Some(_) => knobs.push(TileKnobs {
                draw_early: !of_x.draw_early,
                ..of_x
            }),
            None => knobs.extend([false, true].map(|draw_early| stochastic(None, draw_early))),
        }
        let sources = knobs.into_iter().map(|knobs| Self(knobs).text());
        sources.collect()
    }
}
