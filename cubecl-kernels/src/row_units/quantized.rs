//! The output of a norm as a quantized matrix: from its input as that waits or flows, and what it found of each row.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::source::CudaSource,
    device::{
        MatrixView, array, cube_grid, empty, is_hopper, is_operand_type, or_unused, storage,
        vector_width,
    },
    error::KernelError,
    granularity::Granularity,
    operator_input::{OperatorInput, Pieces, read_input, read_piece, write_piece},
    quantize::{
        QuantizeSpec, Quantized,
        block::whole_tiles::{
            CodesNumbers, OfScale, TileKnobs, around_block_tile, has_tiles, launch_of_codes,
            tile_bytes,
        },
        buffers::allocate,
        matrix_scale::{
            Knobs, MatrixNumbers, around_tile, cubes as cubes_of, fits, group_of, launch_one,
            numbers,
        },
        quantize,
        staged::TILE,
        whole_runs::RunGrid,
    },
};

use super::norm::RowStatistics;

const UNITS: usize = 256;
/// Cubes that are to share a multiprocessor, at most, where each has a tile that is a block.
const MOST_CUBES: usize = 3;
/// Cubes of a multiprocessor that take tiles of a matrix with one scale by turns.
const TAKING: usize = 4;
/// Bytes of gains that a unit reads at once.
const GAIN_BYTES: usize = 16;
/// Rows of a unit's patch of a matrix that has one scale.
const PATCH_ROWS: usize = 4;

/// True where a kernel quantizes a norm's output as it computes it, of numbers that flow, in this granularity: by one scale
/// to FP8 on Hopper, and in INT8 blocks of 128 on CUDA's sm_80 and later.
pub fn quantizes_norms<R: Runtime>(client: &ComputeClient<R>, granularity: Granularity) -> bool {
    match granularity {
        Granularity::Tensor => is_hopper(client),
        Granularity::Block(block) => has_tiles(client, block),
        Granularity::Group(_) | Granularity::Token | Granularity::Channel => false,
    }
}

/// A norm whose rows are known.
pub(crate) struct Norm<'a, R: Runtime> {
    /// A number for each column, of any float type, and where there is a bias another one of the same type.
    pub gain: &'a TensorHandle<R>,
    pub bias: Option<&'a TensorHandle<R>>,
    pub rows: RowStatistics<'a, R>,
}

/// The output of a norm, quantized: to the bit that of [`quantize`]. Shapes and types were checked.
pub(crate) fn quantize_norm<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: OperatorInput<R>,
    [rows, cols]: [usize; 2],
    norm: &Norm<R>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    if let OperatorInput::Quantized(matrix, dtype) = x
        && let Some(values) = &matrix.values
        && rows > 0
    {
        let codes = Codes {
            matrix,
            values,
            view: MatrixView::new(operation, values)?,
            dtype,
            norm,
        };
        let in_blocks = codes.in_blocks(client, spec);
        if let Some(quantized) = in_blocks.or_else(|| codes.by_matrix(client, spec)) {
            return Ok(quantized);
        }
    }
    let output = normalized(client, operation, x, cols, norm)?;
    quantize(client, &output, spec)
}

/// The output, of rows of so many elements, in the shape and type of `x`.
fn normalized<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: OperatorInput<R>,
    cols: usize,
    norm: &Norm<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let (shape, dtype) = (x.shape(), x.dtype());
    let len: usize = shape.iter().product();
    let output = empty(client, shape, dtype);
    if len > 0 {
        let x = x.prepare(client, operation)?;
        let pieces = Pieces::of(&[&x], cols, &[&output]);
        let bias = or_unused(norm.bias, norm.gain, norm.gain.dtype);
        let mean = or_unused(norm.rows.mean, norm.rows.inverse, storage::<f32>());
        let gain_width = vector_width(pieces.len, &[norm.gain, &bias]);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of all tensors, and rows and columns follow
        // from it; scales lie inside of their buffers, whose shapes were compared with the matrix, and stand-ins are not
        // read.
        #[allow(unsafe_code)]
        unsafe {
            norm_again_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                gain_width,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(norm.gain.clone()),
                array(bias),
                array(mean),
                array(norm.rows.inverse.clone()),
                array(output.clone()),
                x.grid(),
                count as u32,
                (cols / pieces.len) as u32,
                pieces,
                gain_width,
                norm.rows.mean.is_some(),
                norm.bias.is_some(),
                x.values().dtype,
                x.scales().dtype,
                dtype,
                norm.gain.dtype,
            );
        }
    }
    Ok(output)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn norm_again_kernel<
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
    bias: &Array<Vector<G, NG>>,
    mean: &Array<f32>,
    inverse: &Array<f32>,
    output: &mut Array<Vector<F, N>>,
    grid: RunGrid,
    count: u32,
    of_row: u32,
    #[comptime] pieces: Pieces,
    #[comptime] gain_width: usize,
    #[comptime] centred: bool,
    #[comptime] has_bias: bool,
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
    let row = (at / of_row) as usize;
    let gains = read_piece::<G, NG>(gain, at % of_row, pieces.len, gain_width);
    let scale = inverse[row];
    if comptime!(centred) {
        let center = mean[row];
        #[unroll]
        for index in 0..comptime!(pieces.len) {
            values[index] -= center;
        }
    }
    #[unroll]
    for index in 0..comptime!(pieces.len) {
        values[index] = values[index] * scale * gains[index];
    }
    if comptime!(has_bias) {
        let biases = read_piece::<G, NG>(bias, at % of_row, pieces.len, gain_width);
        #[unroll]
        for index in 0..comptime!(pieces.len) {
            values[index] += biases[index];
        }
    }
    write_piece::<F, N>(output, &values, at, pieces.len, pieces.width);
}

/// What the kernels of CUDA source read. The shapes were compared, and there is something to quantize.
struct Codes<'a, R: Runtime> {
    matrix: &'a Quantized<R>,
    /// Its row-major copy, and the view of that.
    values: &'a TensorHandle<R>,
    view: MatrixView,
    /// The type of the elements that the numbers stand for.
    dtype: StorageType,
    norm: &'a Norm<'a, R>,
}

impl<R: Runtime> Codes<'_, R> {
    /// The knobs of `columns.cu`, for numbers of columns that a unit reads 8 of in whole vectors.
    fn columns(&self) -> Option<Columns> {
        let Norm { gain, bias, rows } = self.norm;
        let gain_f32 = gain.dtype == storage::<f32>();
        let of_columns: Vec<_> = [*gain].into_iter().chain(*bias).collect();
        let are_read = (gain_f32 || gain.dtype == self.dtype)
            && vector_width(TILE, &of_columns) * gain.dtype.size() == GAIN_BYTES;
        are_read.then_some(Columns {
            gain_f32,
            centred: rows.mean.is_some(),
            bias: bias.is_some(),
        })
    }

    /// The tensors, as kernels take them.
    fn inputs(&self) -> Vec<&TensorHandle<R>> {
        let Norm { gain, bias, rows } = self.norm;
        let mut inputs = vec![self.values, &self.matrix.scales];
        inputs.extend(rows.mean);
        inputs.extend([rows.inverse, gain]);
        inputs.extend(*bias);
        inputs
    }

    /// By `block.cu`, if the device has it and it makes this of these.
    fn in_blocks(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let view = &self.view;
        let (codes, _) = OfScale::of(self.matrix, view)?;
        let columns = self.columns()?;
        let bytes = ByBlocks::bytes(self.dtype, columns.centred);
        let (of_tile, key) = TileKnobs::of(client, self.dtype, view, spec, bytes, MOST_CUBES)?;
        if view.shape.batch != 1 {
            return None;
        }
        let source = ByBlocks {
            of_tile: TileKnobs {
                draw_early: key.is_some(),
                ..of_tile
            },
            codes,
            columns,
        };
        let output = allocate(client, view, spec);
        // SAFETY: the kernel reads these, of whole tiles, with a row's numbers and a column's each, and the output was
        // allocated for them.
        #[allow(unsafe_code)]
        unsafe {
            launch_of_codes(client, source, &self.inputs(), view, key, &output);
        }
        Some(output)
    }

    /// By `matrix_scale.cu`, likewise.
    fn by_matrix(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let view = &self.view;
        let group = group_of(self.matrix, view)?;
        let columns = self.columns()?;
        let (tiles, of_tile) = fits(client, self.dtype, &[], view, spec)?;
        // A unit reads the numbers of its rows at once.
        let rows = &self.norm.rows;
        let of_rows: Vec<_> = [rows.inverse].into_iter().chain(rows.mean).collect();
        let aligned = vector_width(PATCH_ROWS, &of_rows) == PATCH_ROWS;
        if !is_operand_type(self.dtype) || !aligned {
            return None;
        }
        let source = ByMatrix {
            of_tile,
            columns,
            group,
        };
        let output = allocate(client, view, spec);
        // SAFETY: the kernel reads these, of whole tiles, with a row's numbers and a column's each, and the output was
        // allocated for them; there is no delayed maximum.
        #[allow(unsafe_code)]
        unsafe {
            let numbers = numbers::<R>(view, None);
            let cubes = cubes_of(client, tiles, false, TAKING);
            launch_one(
                client,
                source,
                cubes,
                &self.inputs(),
                &output,
                &numbers,
                None,
            );
        }
        Some(output)
    }
}

/// The knobs of `columns.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Columns {
    gain_f32: bool,
    centred: bool,
    bias: bool,
}

impl Columns {
    /// The lines that define them.
    fn text(&self) -> String {
        format!(
            "#define GAIN_F32 {}\n#define CENTRED {}\n#define BIAS {}",
            u8::from(self.gain_f32),
            u8::from(self.centred),
            u8::from(self.bias),
        )
    }
}

/// `block.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ByBlocks {
    of_tile: TileKnobs,
    codes: OfScale,
    columns: Columns,
}

impl ByBlocks {
    /// Of shared memory: those of a tile of this type, and two numbers for each row, or three.
    fn bytes(dtype: StorageType, centred: bool) -> usize {
        tile_bytes(dtype) + (2 + usize::from(centred)) * TILE * size_of::<f32>()
    }
}

impl CudaSource for ByBlocks {
    type Numbers = CodesNumbers;

    const TEXT: &'static str = around_block_tile!("columns.cu", "block.cu");
    const ENTRY_POINT: &'static str = "quantize_norm_by_blocks";

    fn knobs(&self) -> String {
        format!(
            "{}\n{}\n{}",
            self.of_tile.text(),
            OfScale::text(Some(self.codes)),
            self.columns.text(),
        )
    }

    fn shared_memory(&self) -> usize {
        Self::bytes(self.of_tile.dtype, self.columns.centred)
    }
}

/// `matrix_scale.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ByMatrix {
    of_tile: Knobs,
    columns: Columns,
    /// Elements of a scale of x.
    group: usize,
}

impl CudaSource for ByMatrix {
    type Numbers = MatrixNumbers;

    const TEXT: &'static str = around_tile!("columns.cu", "matrix_scale.cu");
    const ENTRY_POINT: &'static str = "quantize_norm_by_matrix";

    fn knobs(&self) -> String {
        format!(
            "{}\n#define CODES {}\n{}",
            self.of_tile.text(),
            self.group,
            self.columns.text(),
        )
    }
}
