//! The output of RMSNorm as a quantized matrix: from its input as that waits or flows, and the number of each row.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::{halves, numbers},
        source::{CudaSource, float_knob, launch_source},
    },
    device::{
        MatrixView, array, cube_grid, empty, is_hopper, is_operand_type, storage, vector_width,
    },
    error::KernelError,
    layout::Layout,
    operator_input::{OperatorInput, Pieces, read_input, read_piece, write_piece},
    quantize::{
        QuantizeSpec, Quantized,
        block::whole_tiles::{cubes, has_whole_tiles, tiles},
        buffers::allocate,
        matrix_scale::{
            Knobs, MatrixNumbers, around_tile, cubes as cubes_of, fits, group_of, launch_one,
            numbers,
        },
        quantize,
        staged::TILE,
        whole_runs::RunGrid,
    },
    rounding::STOCHASTIC_OFFSET,
    row_units::{check_rows, check_statistics},
    swiglu::block::{codes, in_blocks},
};

const OPERATION: &str = "quantize_rms_norm";
const UNITS: usize = 256;
/// Cubes that are to share a multiprocessor, at most.
const MOST_CUBES: usize = 3;
/// Cubes of a multiprocessor that take tiles of a matrix with one scale by turns.
const TAKING: usize = 4;
/// Bytes of gains that a unit reads at once.
const GAIN_BYTES: usize = 16;
/// Rows of a unit's patch of a matrix that has one scale.
const PATCH_ROWS: usize = 4;

/// True where a kernel quantizes RMSNorm's output, of numbers that flow in FP8, by one scale as it computes it.
pub fn quantizes_rms_norm<R: Runtime>(client: &ComputeClient<R>) -> bool {
    is_hopper(client)
}

/// The output of [`rms_norm`](super::rms_norm()), quantized, from what it gave of the rows: in one launch, without the
/// output in memory, where a kernel has the spec.
///
/// - `x`: a matrix as `rms_norm` takes it, or that in numbers, in which it waited.
/// - `gain`: as there.
/// - `inverse_rms`: f32 `[rows]`, as it gave it.
/// - `spec`: kernels have, of an `x` of f16 or bf16, with gains of f32 or the type of `x`, INT8 in blocks of 128, transposed
///   and stochastic, of whole blocks of INT8 in groups of 128 columns, on CUDA's sm_80 and later; and FP8 by one scale, to
///   nearest, of whole tiles of 64 x 128 elements of E4M3 in groups along the rows, on Hopper.
///
/// To the bit, the result is that of [`quantize`](crate::quantize::quantize()) of `x inverse_rms gain`, rounded to the
/// type of `x`.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what `quantize`
/// makes, or as `quantize`.
pub fn quantize_rms_norm<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    inverse_rms: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let x = x.into();
    let [rows, cols] = check_rows(client, OPERATION, &x, gain)?;
    check_statistics(OPERATION, &x, rows, &[("inverse_rms", inverse_rms)])?;
    if let OperatorInput::Quantized(matrix, dtype) = x
        && let Some(values) = &matrix.values
        && rows > 0
    {
        let rows = QuantizedRows {
            matrix,
            values,
            view: MatrixView::new(OPERATION, values)?,
            dtype,
            inverse_rms,
            gain,
        };
        let in_blocks = rows.in_blocks(client, spec);
        if let Some(quantized) = in_blocks.or_else(|| rows.by_matrix(client, spec)) {
            return Ok(quantized);
        }
    }
    let output = normalized(client, x, gain, inverse_rms, cols)?;
    quantize(client, &output, spec)
}

/// `x inverse_rms gain`, of rows of so many elements, in the shape and type of `x`.
fn normalized<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    gain: &TensorHandle<R>,
    inverse_rms: &TensorHandle<R>,
    cols: usize,
) -> Result<TensorHandle<R>, KernelError> {
    let (shape, dtype) = (x.shape(), x.dtype());
    let len: usize = shape.iter().product();
    let output = empty(client, shape, dtype);
    if len > 0 {
        let x = x.prepare(client, OPERATION)?;
        let pieces = Pieces::of(&[&x], cols, &[&output]);
        let gain_width = vector_width(pieces.len, &[gain]);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of all tensors, and rows and columns follow
        // from it; scales lie inside of their buffers, whose shapes were compared with the matrix, and stand-ins are not
        // read.
        #[allow(unsafe_code)]
        unsafe {
            rms_norm_again_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                gain_width,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(gain.clone()),
                array(inverse_rms.clone()),
                array(output.clone()),
                x.grid(),
                count as u32,
                (cols / pieces.len) as u32,
                pieces,
                gain_width,
                x.values().dtype,
                x.scales().dtype,
                dtype,
                gain.dtype,
            );
        }
    }
    Ok(output)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rms_norm_again_kernel<
    X: Numeric,
    S: Numeric,
    F: Numeric,
    G: Numeric,
    NX: Size,
    N: Size,
    NG: Size,
>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    gain: &Array<Vector<G, NG>>,
    inverse_rms: &Array<f32>,
    output: &mut Array<Vector<F, N>>,
    grid: RunGrid,
    count: u32,
    of_row: u32,
    #[comptime] pieces: Pieces,
    #[comptime] gain_width: usize,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gain_dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at >= count {
        terminate!();
    }
    let mut values = read_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, at, pieces);
    let gains = read_piece::<G, NG>(gain, at % of_row, pieces.len, gain_width);
    let root = inverse_rms[(at / of_row) as usize];
    #[unroll]
    for index in 0..comptime!(pieces.len) {
        values[index] = values[index] * root * gains[index];
    }
    write_piece::<F, N>(output, &values, at, pieces.len, pieces.width);
}

/// What the kernels of CUDA source read. The shapes were compared, and there is something to quantize.
struct QuantizedRows<'a, R: Runtime> {
    matrix: &'a Quantized<R>,
    /// Its row-major copy, and the view of that.
    values: &'a TensorHandle<R>,
    view: MatrixView,
    /// The type of the elements that the numbers stand for.
    dtype: StorageType,
    inverse_rms: &'a TensorHandle<R>,
    gain: &'a TensorHandle<R>,
}

impl<R: Runtime> QuantizedRows<'_, R> {
    /// True for gains that a unit reads 8 of in whole vectors.
    fn has_gains(&self) -> bool {
        let size = self.gain.dtype.size();
        (self.gain_f32() || self.gain.dtype == self.dtype)
            && vector_width(TILE, &[self.gain]) * size == GAIN_BYTES
    }

    fn gain_f32(&self) -> bool {
        self.gain.dtype == storage::<f32>()
    }

    /// By `block.cu`, if the device has it and it makes this of these.
    fn in_blocks(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let view = &self.view;
        let (block, key) = in_blocks(spec, Layout::Transposed)?;
        let values = codes(self.matrix, view)?;
        let source = OfBlocks {
            dtype: self.dtype,
            gain_f32: self.gain_f32(),
            cubes: cubes(client, OfBlocks::SHARED_MEMORY, MOST_CUBES),
        };
        let fits = view.shape.batch == 1
            && source.cubes >= 2
            && has_whole_tiles(client, view.shape, block)
            && is_operand_type(self.dtype)
            && self.has_gains();
        if !fits {
            return None;
        }
        let output = allocate(client, view, spec);
        let transposed = output.transposed.as_ref().expect("a transposed copy");
        let buffers = [
            values,
            &self.matrix.scales,
            self.inverse_rms,
            self.gain,
            transposed,
            &output.scales,
        ];
        let numbers = BlockNumbers {
            rows: view.shape.rows as u64,
            cols: view.shape.cols as u64,
            seed: halves(key.seed),
            stream: halves(key.stream),
            bits_of_384: STOCHASTIC_OFFSET.to_bits().into(),
        };
        // SAFETY: the cubes are the tiles of x, none of which reaches over an edge, with a row's number and a column's
        // gain each, and the output was allocated for them.
        #[allow(unsafe_code)]
        unsafe {
            let buffers = buffers.map(TensorHandle::clone).to_vec();
            launch_source(client, source, tiles(view), Vec::new(), buffers, &numbers);
        }
        Some(output)
    }

    /// By `matrix_scale.cu`, likewise.
    fn by_matrix(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let view = &self.view;
        let group = group_of(self.matrix, view)?;
        let (tiles, of_tile) = fits(client, self.dtype, &[], view, spec)?;
        // A unit reads the numbers of its rows at once.
        let aligned = vector_width(PATCH_ROWS, &[self.inverse_rms]) == PATCH_ROWS;
        if !is_operand_type(self.dtype) || !aligned || !self.has_gains() {
            return None;
        }
        let source = ByMatrix {
            of_tile,
            gain_f32: self.gain_f32(),
            group,
        };
        let output = allocate(client, view, spec);
        let inputs = [
            self.values,
            &self.matrix.scales,
            self.inverse_rms,
            self.gain,
        ];
        // SAFETY: the kernel reads these, of whole tiles, with a row's number and a column's gain each, and the output
        // was allocated for them; there is no delayed maximum.
        #[allow(unsafe_code)]
        unsafe {
            let numbers = numbers::<R>(view, None);
            let cubes = cubes_of(client, tiles, false, TAKING);
            launch_one(client, source, cubes, &inputs, &output, &numbers, None);
        }
        Some(output)
    }
}

numbers! {
    /// The numbers of `block.cu`.
    struct BlockNumbers {
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

/// `block.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OfBlocks {
    dtype: StorageType,
    gain_f32: bool,
    cubes: usize,
}

impl OfBlocks {
    /// A tile of 16-bit elements, and its transposed copy; two numbers for each row.
    const SHARED_MEMORY: usize = 3 * TILE * TILE + 2 * TILE * size_of::<f32>();
}

impl CudaSource for OfBlocks {
    type Numbers = BlockNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/block/scale.cu"),
        "\n",
        include_str!("../quantize/block/tile.cu"),
        "\n",
        include_str!("../cuda/pairs.cu"),
        "\n",
        include_str!("../swiglu/contexts.cu"),
        "\n",
        include_str!("gains.cu"),
        "\n",
        include_str!("block.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_rms_norm";

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n#define ROW_MAJOR 0\n#define TRANSPOSED 1\n#define ROW_STOCHASTIC 0\n#define FALLBACK 0\n\
             #define CUBES {}\n#define DRAW_EARLY 1\n#define GAIN_F32 {}",
            float_knob(self.dtype),
            self.cubes,
            u8::from(self.gain_f32),
        )
    }

    fn shared_memory(&self) -> usize {
        Self::SHARED_MEMORY
    }
}

/// `matrix_scale.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ByMatrix {
    of_tile: Knobs,
    gain_f32: bool,
    /// Elements of a scale of x.
    group: usize,
}

impl CudaSource for ByMatrix {
    type Numbers = MatrixNumbers;

    const TEXT: &'static str = around_tile!("gains.cu", "matrix_scale.cu");
    const ENTRY_POINT: &'static str = "quantize_rms_norm_by_matrix";

    fn knobs(&self) -> String {
        format!(
            "{}\n#define GAIN_F32 {}\n#define CODES {}",
            self.of_tile.text(),
            u8::from(self.gain_f32),
            self.group,
        )
    }
}
