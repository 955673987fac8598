//! SwiGLU and its gradients, quantized in blocks as they are computed: kernels of CUDA source, `block.cu` and
//! `block_gradients.cu`, around the tile of [`quantize_linear_input`](crate::linear_input::quantize_linear_input).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::{halves, numbers},
        source::{CudaSource, SourceText, float_knob, launch_source},
    },
    device::{MatrixView, is_operand_type, read_width_up_to},
    quantize::{
        block::{
            BlockOutput, Round,
            whole_tiles::{WholeTilesNumbers, cubes, has_whole_tiles, launch_tiles, tiles},
        },
        staged::TILE,
    },
    rounding::{STOCHASTIC_OFFSET, StochasticKey},
};

/// Bytes of a tile of 16-bit elements.
const TILE_BYTES: usize = 2 * TILE * TILE;
/// Elements that are read at once.
const VECTOR: usize = 8;
/// Cubes that are to share a multiprocessor, at most.
const MOST_CUBES: usize = 3;

/// Quantizes `silu(gate) up` as [`block::launch`](crate::quantize::block::launch) quantizes a matrix, if the device has
/// the kernel for that. Says whether it did.
///
/// # Safety
///
/// `gate` and `up` are contiguous, of one shape and type, and `view` is that of both, which are not empty. The outputs
/// are those of `block::launch`.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    [gate, up]: [&TensorHandle<R>; 2],
    view: &MatrixView,
    block: usize,
    key: StochasticKey,
    output: &BlockOutput<R>,
) -> bool {
    let (Some((values, row_major)), Some((transposed, Round::Stochastic))) =
        (output.row_major, output.transposed)
    else {
        return false;
    };
    let source = Forward {
        dtype: gate.dtype,
        row_stochastic: row_major == Round::Stochastic,
        fallback: output.fallback.is_some(),
        cubes: cubes(client, 2 * TILE_BYTES, MOST_CUBES),
    };
    if !fits(client, &[gate, up], view, block, source.cubes) {
        return false;
    }
    // SAFETY: the kernel reads both, which have whole tiles; the rest is the caller's promise.
    #[allow(unsafe_code)]
    unsafe {
        let copies = [values, transposed];
        launch_tiles(client, source, &[gate, up], view, key, copies, output);
    }
    true
}

/// A gradient's two copies and their scales, and the random stream of both.
pub(crate) struct GradientOutput<'a, R: Runtime> {
    pub values: &'a TensorHandle<R>,
    pub transposed: &'a TensorHandle<R>,
    pub scales: &'a TensorHandle<R>,
    pub key: StochasticKey,
}

/// Quantizes the gradients of gate and of up in blocks, both copies stochastically, if the device has the kernel for
/// that. Says whether it did.
///
/// # Safety
///
/// The inputs, gate, up and the gradient of the output, are contiguous, of one shape and type, and `view` is that of
/// all, which are not empty. The outputs have the types and shapes of [`Quantized`](crate::quantize::Quantized) for it,
/// and are contiguous.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: [&TensorHandle<R>; 3],
    view: &MatrixView,
    block: usize,
    [of_gate, of_up]: [GradientOutput<R>; 2],
) -> bool {
    let source = Gradients::of(client, inputs[0].dtype);
    if !fits(client, &inputs, view, block, source.cubes) {
        return false;
    }
    let mut buffers = inputs.map(TensorHandle::clone).to_vec();
    for output in [&of_gate, &of_up] {
        let tensors = [output.values, output.transposed, output.scales];
        buffers.extend(tensors.map(TensorHandle::clone));
    }
    let numbers = GradientNumbers {
        rows: view.shape.rows as u64,
        cols: view.shape.cols as u64,
        seed: halves(of_gate.key.seed),
        stream: halves(of_gate.key.stream),
        up_seed: halves(of_up.key.seed),
        up_stream: halves(of_up.key.stream),
        bits_of_384: STOCHASTIC_OFFSET.to_bits().into(),
    };
    // SAFETY: the cubes are the tiles of the inputs, none of which reaches over an edge; by the caller's promise the
    // outputs hold as many.
    #[allow(unsafe_code)]
    unsafe {
        launch_source(client, source, tiles(view), Vec::new(), buffers, &numbers);
    }
    true
}

fn fits<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: &[&TensorHandle<R>],
    view: &MatrixView,
    block: usize,
    cubes: usize,
) -> bool {
    has_whole_tiles(client, view.shape, block)
        && cubes >= 2
        && is_operand_type(inputs[0].dtype)
        && inputs
            .iter()
            .all(|input| read_width_up_to(VECTOR, input, view) == VECTOR)
}

numbers! {
    /// The numbers of `block_gradients.cu`.
    struct GradientNumbers {
        /// Of a matrix, multiples of 128.
        rows: u64,
        cols: u64,
        /// The key of the random numbers of the gradient of the gate.
        seed: [u32; 2],
        stream: [u32; 2],
        /// That of the gradient of up.
        up_seed: [u32; 2],
        up_stream: [u32; 2],
        /// The bits of 384, as in `whole_tiles.cu`.
        bits_of_384: u64,
    }
}

/// `block.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Forward {
    dtype: StorageType,
    row_stochastic: bool,
    fallback: bool,
    cubes: usize,
}

impl CudaSource for Forward {
    type Numbers = WholeTilesNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/block/tile.cu"),
        "\n",
        include_str!("arithmetic.cu"),
        "\n",
        include_str!("block.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_swiglu";
    const UNITS: u32 = 256;

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n#define ROW_STOCHASTIC {}\n#define FALLBACK {}\n#define CUBES {}\n#define DRAW_EARLY 0",
            float_knob(self.dtype),
            u8::from(self.row_stochastic),
            u8::from(self.fallback),
            self.cubes,
        )
    }

    fn shared_memory(&self) -> usize {
        2 * TILE_BYTES
    }

    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        vec![Gradients::of(client, self.dtype).text()]
    }
}

/// `block_gradients.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gradients {
    dtype: StorageType,
    cubes: usize,
}

impl Gradients {
    fn of<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> Self {
        Self {
            dtype,
            cubes: cubes(client, 3 * TILE_BYTES, MOST_CUBES),
        }
    }
}

impl CudaSource for Gradients {
    type Numbers = GradientNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/block/tile.cu"),
        "\n",
        include_str!("arithmetic.cu"),
        "\n",
        include_str!("block_gradients.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_swiglu_gradients";
    const UNITS: u32 = 256;

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n#define ROW_STOCHASTIC 1\n#define FALLBACK 0\n#define CUBES {}\n#define DRAW_EARLY 0",
            float_knob(self.dtype),
            self.cubes,
        )
    }

    fn shared_memory(&self) -> usize {
        3 * TILE_BYTES
    }
}
