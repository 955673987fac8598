//! Whole runs of a quantized matrix: 16 neighbours of a row with one scale, of which a unit reads all, or a part of
//! whole words, and decodes them.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, is_contiguous, or_unused, storage},
    exact,
    granularity::Granularity,
    number::{
        Storage, Symmetric, integer, minifloat,
        storage::{RUN, unpack_codes},
    },
    scale::{ScaleNumber, load_scale},
};

use super::Quantized;

/// The constants that a kernel of runs is compiled for, beside the length of the parts that its units read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RunCodes {
    pub number: Symmetric,
    pub storage: Storage,
    pub scale: ScaleNumber,
    /// The size of groups where rows are whole groups and scales have one level: the scales then follow one another as
    /// the elements do, and no row and column must be found.
    pub group: Option<usize>,
}

impl RunCodes {
    /// True if parts of so many elements, a power of two, are whole words.
    pub const fn has_parts(&self, len: usize) -> bool {
        len == RUN || (len < RUN && len * self.storage.bits() as usize % 32 == 0)
    }

    /// Words of a part.
    pub const fn words(&self, len: usize) -> usize {
        len * self.storage.bits() as usize / 32
    }

    /// Words read at once. Runs of five words start at multiples of 4 bytes.
    pub const fn read(&self, len: usize) -> usize {
        match self.words(len) {
            5 => 1,
            words => words,
        }
    }
}

/// A matrix of whole runs, and which of them share a scale.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RunGrid {
    /// Rows of a matrix of the batch.
    pub rows: u32,
    pub cols: u32,
    /// Rows that share a scale.
    pub scale_rows: u32,
    /// Elements of a row that share a scale.
    pub scale_cols: u32,
    /// Zero, of which the compiler does not know that it is.
    pub zero: u32,
}

/// The tensors of a matrix of whole runs.
pub(crate) struct Runs<R: Runtime> {
    /// The codes, u32.
    pub words: TensorHandle<R>,
    pub scales: TensorHandle<R>,
    /// A stand-in where the matrix has none.
    pub tensor_scales: TensorHandle<R>,
    pub codes: RunCodes,
    /// Runs of all matrices.
    pub count: usize,
    grid: [u32; 4],
}

impl<R: Runtime> Runs<R> {
    /// The runs of a matrix whose row-major values are `stored`: if these follow one another without gaps, rows are
    /// whole runs, and elements of a run share a scale.
    pub fn of(
        quantized: &Quantized<R>,
        number: Symmetric,
        stored: &TensorHandle<R>,
        view: &MatrixView,
    ) -> Option<Self> {
        let (shape, storage_of_codes) = (view.shape, quantized.number.storage());
        let (scale_rows, scale_cols) = quantized.granularity.scale_block(shape);
        let offset = stored.handle.offset_start.unwrap_or_default() as usize;
        let is_whole = shape.cols % RUN == 0 && scale_cols % RUN == 0;
        if !is_whole || !is_contiguous(stored) || offset % 16 != 0 {
            return None;
        }
        let count = shape.num_elements() / RUN;
        Some(Self {
            words: TensorHandle::new_contiguous(
                vec![count * storage_of_codes.run_words()],
                stored.handle.clone(),
                storage::<u32>(),
            ),
            scales: quantized.scales.clone(),
            tensor_scales: or_unused(
                quantized.tensor_scale.as_ref(),
                &quantized.scales,
                storage::<f32>(),
            ),
            codes: RunCodes {
                number,
                storage: storage_of_codes,
                scale: quantized.scale,
                group: match quantized.granularity {
                    Granularity::Group(size)
                        if shape.cols % size == 0 && !quantized.scale.has_tensor_scale() =>
                    {
                        Some(size)
                    }
                    _ => None,
                },
            },
            count,
            grid: [shape.rows, shape.cols, scale_rows, scale_cols].map(|it| it as u32),
        })
    }

    /// True if one kernel reads both.
    pub fn is_stored_like(&self, other: &Self) -> bool {
        self.codes == other.codes && self.grid == other.grid
    }

    /// The launch argument of the grid.
    pub fn grid(&self) -> RunGridLaunch<R> {
        grid_launch(self.grid)
    }
}

/// The launch argument of a grid that nothing is read by.
pub(crate) fn no_grid<R: Runtime>() -> RunGridLaunch<R> {
    grid_launch([1; 4])
}

fn grid_launch<R: Runtime>([rows, cols, scale_rows, scale_cols]: [u32; 4]) -> RunGridLaunch<R> {
    RunGridLaunch::new(rows, cols, scale_rows, scale_cols, 0)
}

/// The values of the `part`-th `len` elements, from words `W`, u32: each rounded to `f32`, whatever is computed of it.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn decode_part<W: Numeric, N: Size, S: Numeric>(
    words: &Array<Vector<W, N>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    grid: &RunGrid,
    part: u32,
    #[comptime] len: usize,
    #[comptime] codes: RunCodes,
) -> Array<f32> {
    let mut of_part = Array::<u32>::new(comptime!(codes.words(len)));
    let width = comptime!(codes.read(len));
    let reads = comptime!(codes.words(len) / width);
    #[unroll]
    for read in 0..reads {
        let vector = words[part as usize * reads + read];
        #[unroll]
        for lane in 0..width {
            of_part[comptime!(read * width + lane)] = u32::cast_from(vector[lane]);
        }
    }
    let of_part = unpack_codes(&of_part, len, comptime!(codes.storage));
    let scale = scale_of_part::<S>(scales, tensor_scales, grid, part, len, codes);
    let mut values = Array::<f32>::new(len);
    #[unroll]
    for index in 0..len {
        let number = number_of(of_part[index], comptime!(codes.number));
        values[index] = exact::product(number, scale, grid.zero);
    }
    values
}

/// The scale of the `part`-th `len` elements.
#[cube]
fn scale_of_part<S: Numeric>(
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    grid: &RunGrid,
    part: u32,
    #[comptime] len: usize,
    #[comptime] codes: RunCodes,
) -> f32 {
    match comptime!(codes.group) {
        Some(group) => {
            let slot = part / comptime!((group / len) as u32);
            load_scale::<S>(scales, slot, 1.0f32, comptime!(codes.scale))
        }
        None => {
            let parts_of_row = grid.cols / comptime!(len as u32);
            let (row, col) = (
                part / parts_of_row,
                part % parts_of_row * comptime!(len as u32),
            );
            let batch = row / grid.rows;
            let scale_row =
                batch * grid.rows.div_ceil(grid.scale_rows) + row % grid.rows / grid.scale_rows;
            let slot = scale_row * grid.cols.div_ceil(grid.scale_cols) + col / grid.scale_cols;
            let mut tensor_scale = 1.0f32;
            if comptime!(codes.scale.has_tensor_scale()) {
                tensor_scale = tensor_scales[batch as usize];
            }
            load_scale::<S>(scales, slot, tensor_scale, comptime!(codes.scale))
        }
    }
}

/// The number of a code. Bits above it may be anything.
#[cube]
pub(super) fn number_of(code: u32, #[comptime] number: Symmetric) -> f32 {
    match comptime!(number) {
        Symmetric::Integer(integer) => integer::decode(code, integer),
        Symmetric::Float(float) => minifloat::decode(code, float),
    }
}
