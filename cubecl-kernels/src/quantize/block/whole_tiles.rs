//! The kernel of CUDA source for what a training step quantizes most: whole tiles, row-major, and transposed with
//! stochastic rounding.
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
    device::{MAX_CUBES, MatrixView, read_width_up_to},
    quantize::staged::TILE,
    rounding::{STOCHASTIC_OFFSET, StochasticKey},
    shape::MatrixShape,
};

use super::{BlockOutput, Round, fallback_buffers};

/// Bytes read at once.
const VECTOR_BYTES: usize = 16;
/// Bytes of shared memory that a cube takes beside those of its tile: what the kernel declares, and what CUDA keeps.
const DECLARED: usize = 64;
const RESERVED: usize = 1024;

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
    // Where nothing is stochastic, none is drawn.
    let key = key.unwrap_or(StochasticKey { seed: 0, stream: 0 });
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
    let source = WholeTilesSource {
        dtype: x.dtype,
        row_major: row_major.is_some(),
        transposed: transposed.is_some(),
        row_stochastic: row_major == Some(Round::Stochastic),
        fallback: output.fallback.is_some(),
        cubes,
        draw_early: is_stochastic && shape.num_elements() <= at_once * TILE * TILE,
    };
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

/// A cube a tile.
pub(crate) fn tiles(view: &MatrixView) -> CubeCount {
    let shape = view.shape;
    CubeCount::Static(
        (shape.cols / TILE) as u32,
        (shape.rows / TILE) as u32,
        shape.batch as u32,
    )
}

/// True on CUDA's sm_80 and later, which alone copy asynchronously, for matrices of whole tiles.
pub(crate) fn has_whole_tiles<R: Runtime>(
    client: &ComputeClient<R>,
    shape: MatrixShape,
    block: usize,
) -> bool {
    R::name(client) == "cuda"
        && client.features().copy_async
        && block == TILE
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

/// The elements of a tile, and the bytes of its transposed copy.
fn tile_bytes(dtype: StorageType) -> usize {
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

/// `whole_tiles.cu` behind `tile.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct WholeTilesSource {
    dtype: StorageType,
    row_major: bool,
    transposed: bool,
    row_stochastic: bool,
    fallback: bool,
    cubes: usize,
    /// All tiles are on the device at once, where random words are drawn before they are used.
    draw_early: bool,
}

impl CudaSource for WholeTilesSource {
    type Numbers = WholeTilesNumbers;

    const TEXT: &'static str = concat!(
        include_str!("scale.cu"),
        "\n",
        include_str!("tile.cu"),
        "\n",
        include_str!("whole_tiles.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_whole_tiles";

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n#define ROW_MAJOR {}\n#define TRANSPOSED {}\n#define ROW_STOCHASTIC {}\n#define FALLBACK {}\n\
             #define CUBES {}\n#define DRAW_EARLY {}",
            float_knob(self.dtype),
            u8::from(self.row_major),
            u8::from(self.transposed),
            u8::from(self.row_stochastic),
            u8::from(self.fallback),
            self.cubes,
            u8::from(self.draw_early),
        )
    }

    fn shared_memory(&self) -> usize {
        tile_bytes(self.dtype)
    }

    /// Of X, that of more or fewer tiles, and both of dY; where X is made again in the backward pass, its copy alone too.
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        if self.row_stochastic || !self.row_major {
            return vec![];
        }
        let stochastic = |row_major, draw_early| Self {
            row_major,
            transposed: true,
            row_stochastic: row_major,
            fallback: false,
            draw_early,
            ..*self
        };
        let mut sources = [false, true]
            .map(|draw_early| stochastic(true, draw_early))
            .to_vec();
        match self.transposed {
            true => sources.push(Self {
                draw_early: !self.draw_early,
                ..*self
            }),
            false => sources.extend([false, true].map(|draw_early| stochastic(false, draw_early))),
        }
        sources.iter().map(CudaSource::text).collect()
    }
}
