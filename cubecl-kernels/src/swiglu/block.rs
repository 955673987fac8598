//! SwiGLU and its gradients, quantized in blocks as they are computed: kernels of CUDA source, `block.cu`,
//! `block_of_codes.cu` and `block_gradients.cu`, around the tile of
//! [`quantize_linear_input`](crate::linear_input::quantize_linear_input). Gate and up may wait in between as INT8 in groups,
//! which the first one writes (`contexts.cu`) and the last one reads, or flow as INT8 in blocks, which the others read.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::{halves, numbers},
        source::{CudaSource, SourceText, launch_source},
    },
    device::{MatrixView, is_operand_type, read_width_up_to},
    granularity::Granularity,
    operator_input::OperatorInput,
    quantize::{
        QuantizeSpec, Quantized,
        block::{
            BlockOutput, Round,
            whole_tiles::{
                self, CodesNumbers, OfScale, TileKnobs, WholeTilesNumbers, around_block_tile,
                cubes, has_whole_tiles, launch_tiles, tile_bytes, tiles, written,
            },
        },
        buffers::{allocate, allocate_gradient},
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
const MOST_CUBES_OF_CODES: usize = 4;
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
    let contexts_are_written = contexts.is_some();
    let bytes = Forward::bytes(contexts_are_written);
    let source = Forward {
        tile: TileKnobs {
            dtype: gate.dtype,
            row_major: Some(row_major),
            transposed: Some(Round::Stochastic),
            fallback: output.fallback.is_some(),
            draw_early: false,
            cubes: cubes(client, bytes, MOST_CUBES),
        },
        contexts: contexts_are_written,
    };
    let fits = contexts.is_none_or(has_contexts)
        && has_whole_tiles(client, view.shape, block)
        && source.tile.cubes >= 2
        && is_operand_type(gate.dtype)
        && are_read(&[gate, up], view);
    if !fits {
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

/// `silu(gate) up`, quantized by a spec, if the device has the kernel for it: that of INT8 blocks, of gate and up in such
/// blocks. `None` where it has not, and where there is nothing to quantize.
///
/// Gate and up, of this type and view, are numbers as [`OperatorInput::prepare`] accepts them.
pub(super) fn launch_of_codes<R: Runtime>(
    client: &ComputeClient<R>,
    [gate, up]: [&Quantized<R>; 2],
    dtype: StorageType,
    view: &MatrixView,
    spec: &QuantizeSpec,
) -> Option<Quantized<R>> {
    let [gates, ups] = [OfScale::tile(gate, view)?, OfScale::tile(up, view)?];
    if view.shape.num_elements() == 0 {
        return None;
    }
    let (tile, key) = TileKnobs::of(
        client,
        dtype,
        view,
        spec,
        tile_bytes(dtype),
        MOST_CUBES_OF_CODES,
    )?;
    let output = allocate(client, view, spec);
    let inputs = [gates, &gate.scales, ups, &up.scales];
    // SAFETY: the kernel reads these, of whole tiles, and the output was allocated for them.
    #[allow(unsafe_code)]
    unsafe {
        whole_tiles::launch_of_codes(client, OfCodes(tile), &inputs, view, key, &output);
    }
    Some(output)
}

/// Quantizes the gradients of gate and of up by a spec each, if the device has the kernel for both: INT8 in blocks, rounded
/// stochastically, of floats, or of numbers whose scales lie alike. `None` where it has not, and where there is nothing to quantize.
///
/// Gate, up and the gradient of the output are of one shape and type, floats contiguous, numbers as
/// [`OperatorInput::prepare`] accepts them, and `view` is that of all. The gradient may be numbers where the others are.
pub(crate) fn launch_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<R>; 2],
    gradient: OperatorInput<R>,
    view: &MatrixView,
    specs: [&QuantizeSpec; 2],
) -> Option<[Quantized<R>; 2]> {
    if view.shape.num_elements() == 0 {
        return None;
    }
    let (factors, codes) = match factors {
        [OperatorInput::Floats(gate), OperatorInput::Floats(up)] => ([gate, up], None),
        [
            OperatorInput::Quantized(gate, _),
            OperatorInput::Quantized(up, _),
        ] => {
            let (of_scale, gates) = OfScale::of(gate, view)?;
            let (of_scale_of_up, ups) = OfScale::of(up, view)?;
            if of_scale != of_scale_of_up {
                return None;
            }
            ([gates, ups], Some((of_scale, [&gate.scales, &up.scales])))
        }
        _ => return None,
    };
    let of_scale = codes.map(|(of_scale, _)| of_scale);
    let bytes = Gradients::bytes(of_scale);
    let tile = |spec| {
        let (tile, key) = TileKnobs::of(client, gradient.dtype(), view, spec, bytes, MOST_CUBES)?;
        Some((tile, key?))
    };
    let [(tile, key), (tile_of_up, up_key)] = [tile(specs[0])?, tile(specs[1])?];
    let mut floats = match codes {
        Some(_) => vec![],
        None => factors.to_vec(),
    };
    let gradients = match gradient {
        OperatorInput::Floats(tensor) => {
            floats.push(tensor);
            tensor
        }
        OperatorInput::Quantized(matrix, _) => {
            OfScale::tile(matrix, view).filter(|_| codes.is_some())?
        }
    };
    if tile != tile_of_up || !are_read(&floats, view) {
        return None;
    }
    let outputs = specs.map(|spec| allocate_gradient(client, view, spec));
    let inputs = [factors[0], factors[1], gradients];
    let mut buffers = inputs.map(TensorHandle::clone).to_vec();
    buffers.extend(outputs.iter().flat_map(written).cloned());
    // Of floats they are not read.
    let unused = &outputs[0].scales;
    let [of_gate, of_up] = codes.map_or([unused; 2], |(_, scales)| scales);
    let (of_gradient, gradient_codes) = match gradient {
        OperatorInput::Floats(_) => (unused, false),
        OperatorInput::Quantized(matrix, _) => (&matrix.scales, true),
    };
    buffers.extend([of_gate, of_up, of_gradient].map(TensorHandle::clone));
    let source = Gradients {
        tile,
        codes: of_scale,
        gradient_codes,
    };
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
    // for them.
    #[allow(unsafe_code)]
    unsafe {
        launch_source(client, source, tiles(view), Vec::new(), buffers, &numbers);
    }
    Some(outputs)
}

/// True for floats that kernels read, of this view.
fn are_read<R: Runtime>(inputs: &[&TensorHandle<R>], view: &MatrixView) -> bool {
    let mut inputs = inputs.iter();
    inputs.all(|input| read_width_up_to(VECTOR, input, view) == VECTOR)
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
    tile: TileKnobs,
    contexts: bool,
}

impl Forward {
    fn bytes(contexts: bool) -> usize {
        2 * TILE_BYTES + usize::from(contexts) * 2 * BYTES_OF_ROWS
    }
}

impl CudaSource for Forward {
    type Numbers = WholeTilesNumbers;

    const TEXT: &'static str = around_block_tile!("arithmetic.cu", "contexts.cu", "block.cu");
    const ENTRY_POINT: &'static str = "quantize_swiglu";

    fn knobs(&self) -> String {
        format!(
            "{}\n{}\n#define CONTEXTS {}",
            self.tile.text(),
            OfScale::text(None),
            u8::from(self.contexts),
        )
    }

    fn shared_memory(&self) -> usize {
        Self::bytes(self.contexts)
    }

    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        let codes = self.contexts.then_some(OfScale::Row);
        vec![Gradients::of_training(client, self.tile.dtype, codes, false).text()]
    }
}

/// `block_of_codes.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OfCodes(TileKnobs);

impl CudaSource for OfCodes {
    type Numbers = CodesNumbers;

    const TEXT: &'static str = around_block_tile!("arithmetic.cu", "block_of_codes.cu");
    const ENTRY_POINT: &'static str = "quantize_swiglu_of_codes";

    fn knobs(&self) -> String {
        format!("{}\n{}", self.0.text(), OfScale::text(Some(OfScale::Tile)))
    }

    fn shared_memory(&self) -> usize {
        tile_bytes(self.0.dtype)
    }

    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        // What flows as codes has gradients that flow so too.
        let codes = Some(OfScale::Tile);
        vec![Gradients::of_training(client, self.0.dtype, codes, true).text()]
    }
}

/// `block_gradients.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gradients {
    tile: TileKnobs,
    codes: Option<OfScale>,
    /// The gradient of the output is codes too, with a scale of each tile.
    gradient_codes: bool,
}

impl Gradients {
    /// Those of both copies, rounded stochastically.
    fn of_training<R: Runtime>(
        client: &ComputeClient<R>,
        dtype: StorageType,
        codes: Option<OfScale>,
        gradient_codes: bool,
    ) -> Self {
        let tile = TileKnobs {
            dtype,
            row_major: Some(Round::Stochastic),
            transposed: Some(Round::Stochastic),
            fallback: false,
            draw_early: false,
            cubes: cubes(client, Self::bytes(codes), MOST_CUBES),
        };
        Self {
            tile,
            codes,
            gradient_codes,
        }
    }

    fn bytes(codes: Option<OfScale>) -> usize {
        match codes {
            Some(_) => 2 * TILE_BYTES + TILE * TILE,
            None => 3 * TILE_BYTES,
        }
    }
}

impl CudaSource for Gradients {
    type Numbers = GradientNumbers;

    const TEXT: &'static str = around_block_tile!("arithmetic.cu", "block_gradients.cu");
    const ENTRY_POINT: &'static str = "quantize_swiglu_gradients";

    fn knobs(&self) -> String {
        format!(
            "{}\n{}\n#define GRADIENT_CODES {}",
            self.tile.text(),
            OfScale::text(self.codes),
            u8::from(self.gradient_codes),
        )
    }

    fn shared_memory(&self) -> usize {
        Self::bytes(self.codes)
    }
}
