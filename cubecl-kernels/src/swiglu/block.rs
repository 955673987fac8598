//! SwiGLU and its gradients, quantized in blocks as they are computed: kernels of CUDA source, `block.cu` and
//! `block_gradients.cu`, around the tile of [`quantize_linear_input`](crate::linear_input::quantize_linear_input).
//! Gate and up may wait between both as INT8 in groups, which the first one writes and the second one reads
//! (`contexts.cu`).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::{halves, numbers},
        source::{CudaSource, SourceText, float_knob, launch_source},
    },
    device::{MatrixView, is_contiguous, is_operand_type, read_width_up_to},
    granularity::Granularity,
    layout::Layout,
    operator_input::OperatorInput,
    quantize::{
        QuantizeSpec, Quantized,
        block::{
            BlockOutput, Round,
            whole_tiles::{WholeTilesNumbers, cubes, has_whole_tiles, launch_tiles, tiles},
        },
        buffers::{allocate, allocate_gradient},
        staged::TILE,
    },
    rounding::{Rounding, STOCHASTIC_OFFSET, StochasticKey},
};

/// Bytes of a tile of 16-bit elements.
const TILE_BYTES: usize = 2 * TILE * TILE;
/// Elements that are read at once.
const VECTOR: usize = 8;
/// Cubes that are to share a multiprocessor, at most.
const MOST_CUBES: usize = 3;
/// Bytes of a number for each row of gate and of up in a tile.
const BYTES_OF_ROWS: usize = 2 * TILE * size_of::<f32>();

/// The copies in which gate and up wait for the backward pass, where they are wanted.
pub(crate) type Contexts<R> = Option<[Quantized<R>; 2]>;

/// True for copies of gate and of up that the kernels write and read: INT8 to nearest in groups of a tile's columns.
fn has_contexts(spec: &QuantizeSpec) -> bool {
    *spec == QuantizeSpec::int8(Granularity::Group(TILE))
}

/// Quantizes `silu(gate) up` as [`block::launch`](crate::quantize::block::launch) quantizes a matrix, and gate and up
/// by `contexts`, if the device has the kernel for that. `None` where it has not.
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
    key: Option<StochasticKey>,
    output: &BlockOutput<R>,
    contexts: Option<&QuantizeSpec>,
) -> Option<Contexts<R>> {
    let (Some(key), Some((_, row_major)), Some((_, Round::Stochastic))) =
        (key, output.row_major, output.transposed)
    else {
        return None;
    };
    let source = Forward::of(
        client,
        gate.dtype,
        row_major == Round::Stochastic,
        output.fallback.is_some(),
        contexts.is_some(),
    );
    if !contexts.is_none_or(has_contexts) || !fits(client, &[gate, up], view, block, source.cubes) {
        return None;
    }
    let contexts = contexts.map(|spec| [(); 2].map(|()| allocate(client, view, spec)));
    let parts = |copy: &Quantized<R>| {
        let values = copy.values.clone();
        [values.expect("a row-major copy"), copy.scales.clone()]
    };
    let beside = match &contexts {
        Some(copies) => copies.iter().flat_map(parts).collect(),
        // Not touched.
        None => vec![output.scales.clone(); 4],
    };
    // SAFETY: the kernel reads both, which have whole tiles; the contexts were allocated for them, and the rest is the
    // caller's promise.
    #[allow(unsafe_code)]
    unsafe {
        launch_tiles(client, source, &[gate, up], view, key, output, beside);
    }
    Some(contexts)
}

/// Quantizes the gradients of gate and of up by a spec each, if the device has the kernel for both, that of INT8 blocks of
/// one size, both copies stochastically. `None` where it has not, and where there is nothing to quantize.
///
/// Gate, up and the gradient of the output are of one shape and type, floats contiguous, numbers as
/// [`OperatorInput::prepare`] accepts them, and `view` is that of all.
pub(crate) fn launch_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<R>; 2],
    gradient: &TensorHandle<R>,
    view: &MatrixView,
    specs: [&QuantizeSpec; 2],
) -> Option<[Quantized<R>; 2]> {
    let both = |spec| in_blocks(spec, Layout::Both);
    let [(block, key), (block_of_up, up_key)] = [both(specs[0])?, both(specs[1])?];
    if block != block_of_up || view.shape.num_elements() == 0 {
        return None;
    }
    let (factors, scales) = match factors {
        [OperatorInput::Floats(gate), OperatorInput::Floats(up)] => ([gate, up], None),
        [
            OperatorInput::Quantized(gate, _),
            OperatorInput::Quantized(up, _),
        ] => {
            let factors = [codes(gate, view)?, codes(up, view)?];
            (factors, Some([&gate.scales, &up.scales]))
        }
        _ => return None,
    };
    let source = Gradients::of(client, gradient.dtype, scales.is_some());
    let inputs = [factors[0], factors[1], gradient];
    let floats = if scales.is_some() {
        &inputs[2..]
    } else {
        &inputs
    };
    if !fits(client, floats, view, block, source.cubes) {
        return None;
    }
    let outputs = specs.map(|spec| allocate_gradient(client, view, spec));
    let mut buffers = inputs.map(TensorHandle::clone).to_vec();
    for output in &outputs {
        let copies = [&output.values, &output.transposed];
        buffers.extend(copies.into_iter().flatten().cloned());
        buffers.push(output.scales.clone());
    }
    // Of floats they are not read.
    let scales = scales.unwrap_or([&outputs[0].scales; 2]);
    buffers.extend(scales.map(TensorHandle::clone));
    let numbers = GradientNumbers {
        rows: view.shape.rows as u64,
        cols: view.shape.cols as u64,
        seed: halves(key.seed),
        stream: halves(key.stream),
        up_seed: halves(up_key.seed),
        up_stream: halves(up_key.stream),
        bits_of_384: STOCHASTIC_OFFSET.to_bits().into(),
    };
    // SAFETY: the cubes are the tiles of the inputs, none of which reaches over an edge, and the outputs were allocated
    // for them, with both copies.
    #[allow(unsafe_code)]
    unsafe {
        launch_source(client, source, tiles(view), Vec::new(), buffers, &numbers);
    }
    Some(outputs)
}

/// The block and the key of INT8 blocks in this layout, whose copies are rounded stochastically.
pub(crate) fn in_blocks(spec: &QuantizeSpec, layout: Layout) -> Option<(usize, StochasticKey)> {
    let (Granularity::Block(block), Rounding::Stochastic(key)) = (spec.granularity, spec.rounding)
    else {
        return None;
    };
    let int8 = QuantizeSpec::int8(spec.granularity);
    let fits = *spec == int8.with_rounding(spec.rounding).with_layout(layout);
    fits.then_some((block, key))
}

/// The codes of a matrix as kernels around `contexts.cu` read them, if they do.
pub(crate) fn codes<'a, R: Runtime>(
    matrix: &'a Quantized<R>,
    view: &MatrixView,
) -> Option<&'a TensorHandle<R>> {
    let spec = QuantizeSpec {
        number: matrix.number,
        scale: matrix.scale,
        granularity: matrix.granularity,
        rounding: Rounding::Nearest,
        layout: Layout::RowMajor,
    };
    let values = matrix.values.as_ref()?;
    let is_read = has_contexts(&spec)
        && is_contiguous(values)
        && is_contiguous(&matrix.scales)
        && read_width_up_to(VECTOR, values, view) == VECTOR;
    is_read.then_some(values)
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
    contexts: bool,
    cubes: usize,
}

impl Forward {
    fn of<R: Runtime>(
        client: &ComputeClient<R>,
        dtype: StorageType,
        row_stochastic: bool,
        fallback: bool,
        contexts: bool,
    ) -> Self {
        let source = Self {
            dtype,
            row_stochastic,
            fallback,
            contexts,
            cubes: 0,
        };
        Self {
            cubes: cubes(client, source.shared_memory(), MOST_CUBES),
            ..source
        }
    }
}

impl CudaSource for Forward {
    type Numbers = WholeTilesNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/block/scale.cu"),
        "\n",
        include_str!("../quantize/block/tile.cu"),
        "\n",
        include_str!("../cuda/pairs.cu"),
        "\n",
        include_str!("arithmetic.cu"),
        "\n",
        include_str!("contexts.cu"),
        "\n",
        include_str!("block.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_swiglu";

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n#define ROW_MAJOR 1\n#define TRANSPOSED 1\n#define ROW_STOCHASTIC {}\n#define FALLBACK {}\n\
             #define CONTEXTS {}\n#define CUBES {}\n#define DRAW_EARLY 0",
            float_knob(self.dtype),
            u8::from(self.row_stochastic),
            u8::from(self.fallback),
            u8::from(self.contexts),
            self.cubes,
        )
    }

    fn shared_memory(&self) -> usize {
        2 * TILE_BYTES + usize::from(self.contexts) * 2 * BYTES_OF_ROWS
    }

    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        vec![Gradients::of(client, self.dtype, self.contexts).text()]
    }
}

/// `block_gradients.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gradients {
    dtype: StorageType,
    contexts: bool,
    cubes: usize,
}

impl Gradients {
    fn of<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, contexts: bool) -> Self {
        let source = Self {
            dtype,
            contexts,
            cubes: 0,
        };
        Self {
            cubes: cubes(client, source.shared_memory(), MOST_CUBES),
            ..source
        }
    }
}

impl CudaSource for Gradients {
    type Numbers = GradientNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/block/scale.cu"),
        "\n",
        include_str!("../quantize/block/tile.cu"),
        "\n",
        include_str!("../cuda/pairs.cu"),
        "\n",
        include_str!("arithmetic.cu"),
        "\n",
        include_str!("contexts.cu"),
        "\n",
        include_str!("block_gradients.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_swiglu_gradients";

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n#define ROW_MAJOR 1\n#define TRANSPOSED 1\n#define ROW_STOCHASTIC 1\n#define FALLBACK 0\n\
             #define CONTEXTS {}\n#define CUBES {}\n#define DRAW_EARLY 0",
            float_knob(self.dtype),
            u8::from(self.contexts),
            self.cubes,
        )
    }

    fn shared_memory(&self) -> usize {
        match self.contexts {
            true => 2 * TILE_BYTES + TILE * TILE,
            false => 3 * TILE_BYTES,
        }
    }
}
