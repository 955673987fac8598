//! The kept rows as operands of INT8 products.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    bit_splitting::BitSplit,
    byte_tile::{
        self, ByteCopies, LINE_WORDS, PATCH_ROWS, PatchPosition, patch_position, write_patch,
        zero_patch,
    },
    device::{MatrixView, array, check_dtype, cube_grid, empty, is_contiguous, or_unused, storage},
    error::KernelError,
    granularity::Granularity,
    layout::Layout,
    number::{
        Number, Storage,
        int4::{NIBBLES, signed_nibbles, spread},
    },
    quantize::{
        QuantizeSpec, Quantized,
        buffers::allocate,
        staged::{CHUNK, byte_dtype, byte_read_width, read_bytes},
    },
    scale::ScaleNumber,
};

use super::{RowSample, SCALED_BLOCK};

/// The kept rows of the stacked parts as INT8 `[capacity, C]`, row-major, [`Granularity::Token`]: the scale of a row is
/// its factor, which it shares with the sample. The left operand of `dX = dY W^T`, whose rows are then added up by
/// [`RowSample::positions`]. The integers are exact; padding is 0 under a scale of 0.
///
/// # Errors
///
/// When `sample` is of another number of rows than `split`, or one of them holds tensors of other shapes or element
/// types than [`RowSample`] and [`BitSplit`] say.
pub fn gather_parts<R: Runtime>(
    client: &ComputeClient<R>,
    split: &BitSplit<R>,
    sample: &RowSample<R>,
) -> Result<Quantized<R>, KernelError> {
    const OPERATION: &str = "gather_parts";
    split.check(OPERATION)?;
    let [rows, cols] = split.shape;
    let view = gathered_view(OPERATION, sample, rows, cols)?;
    let capacity = view.shape.rows;
    let factors = sample.factors.handle.clone();
    let output = Quantized {
        values: Some(empty(client, vec![capacity, cols], storage::<i8>())),
        transposed: None,
        scales: TensorHandle::new_contiguous(vec![capacity, 1], factors, storage::<f32>()),
        tensor_scale: None,
        number: Number::Int8,
        scale: ScaleNumber::F32,
        granularity: Granularity::Token,
        shape: view.shape,
        batched: false,
    };
    gather(
        client,
        Source::Parts,
        &split.parts,
        rows,
        sample,
        None,
        &output,
    );
    Ok(output)
}

/// For each kept row of stacked parts its row of X as INT8 `[capacity, D]`, [`Granularity::Block`] of 128, of which all
/// have the scale of X: the other operand of `dW`, beside [`gather_scaled`](super::gather_scaled). The integers are
/// exact; padding is 0.
///
/// - `x`: INT4 with a scale for the matrix, `[N, D]`, of which the row-major copy was written. The rows of both parts
///   are those of X.
/// - `layout`: the product over the rows reads the transposed copy.
///
/// # Errors
///
/// When `x` is another matrix, `sample` is of another number of rows, or one of them holds tensors of other shapes or
/// element types than [`RowSample`] and [`Quantized`] say.
pub fn gather_int4_rows<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Quantized<R>,
    sample: &RowSample<R>,
    layout: Layout,
) -> Result<Quantized<R>, KernelError> {
    const OPERATION: &str = "gather_int4_rows";
    let values = check_int4(OPERATION, x)?;
    let (rows, cols) = (x.shape.rows, x.shape.cols);
    let view = gathered_view(OPERATION, sample, rows, cols)?;
    let spec = QuantizeSpec::int8(Granularity::Block(SCALED_BLOCK)).with_layout(layout);
    let output = allocate(client, &view, &spec);
    gather(
        client,
        Source::Nibbles,
        values,
        rows,
        sample,
        Some(&x.scales),
        &output,
    );
    Ok(output)
}

/// Accepts an INT4 matrix with one scale, and gives its row-major copy.
pub(super) fn check_int4<'a, R: Runtime>(
    operation: &'static str,
    x: &'a Quantized<R>,
) -> Result<&'a TensorHandle<R>, KernelError> {
    let format = (x.number, x.scale, x.granularity);
    let (Some(values), true) = (
        &x.values,
        format == (Number::Int4, ScaleNumber::F32, Granularity::Tensor),
    ) else {
        return Err(KernelError::Unsupported {
            operation,
            reason: format!(
                "{:?} by {:?} with scales of {:?}, {}",
                x.number,
                x.granularity,
                x.scale,
                match x.values {
                    Some(_) => "row-major",
                    None => "transposed alone",
                }
            ),
            remedy: "pass INT4 with a scale for the matrix, Layout::RowMajor or Layout::Both",
        });
    };
    let remedy = "pass what `quantize` made of one matrix";
    let scales = x.granularity.scales_shape(x.shape);
    check_dtype(operation, "the values", values, storage::<u8>(), remedy)?;
    check_dtype(operation, "scales", &x.scales, storage::<f32>(), remedy)?;
    let stored = [x.shape.rows, Storage::Nibbles.stored_cols(x.shape.cols)];
    let fits = !x.batched
        && x.shape.batch == 1
        && values.shape()[..] == stored
        && is_contiguous(values)
        && x.scales.shape()[..] == [scales.rows, scales.cols];
    if fits {
        return Ok(values);
    }
    Err(KernelError::Shape {
        operation,
        got: format!(
            "{:?} with values {:?} of strides {:?} and scales {:?}",
            x.shape,
            values.shape(),
            values.strides(),
            x.scales.shape()
        ),
        remedy,
    })
}

/// The view of the gathered rows of a matrix of `rows` and `cols`.
pub(super) fn gathered_view<R: Runtime>(
    operation: &'static str,
    sample: &RowSample<R>,
    rows: usize,
    cols: usize,
) -> Result<MatrixView, KernelError> {
    sample.check(operation, rows)?;
    let view = MatrixView::contiguous(sample.capacity(), cols);
    if view.shape.num_elements() <= u32::MAX as usize {
        return Ok(view);
    }
    Err(KernelError::Shape {
        operation,
        got: format!("{:?} gathered", view.shape),
        remedy: "split it: kernels index with 32 bits, at most 2^32 - 1 elements",
    })
}

/// The form of the rows that are gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// Both parts of an element in a byte: the row is one of the stacked parts.
    Parts,
    /// Two elements of X in a byte: the row is one of X for either part.
    Nibbles,
}

impl Source {
    /// Bytes of a chunk of 16 elements.
    const fn chunk_bytes(self) -> usize {
        match self {
            Source::Parts => CHUNK,
            Source::Nibbles => CHUNK / 2,
        }
    }

    /// Bytes of a stored row.
    const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Source::Parts => cols,
            Source::Nibbles => Storage::Nibbles.stored_cols(cols),
        }
    }
}

/// Stored rows that a kernel gathers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stored {
    source: Source,
    /// Bytes read at once.
    pub read: usize,
}

impl Stored {
    pub fn new<R: Runtime>(source: Source, values: &TensorHandle<R>, cols: usize) -> Self {
        Self {
            source,
            read: byte_read_width(values, source.row_bytes(cols), source.chunk_bytes()),
        }
    }
}

/// Gathers rows as they are. `scale` is that of all blocks; without one the scales are left alone.
fn gather<R: Runtime>(
    client: &ComputeClient<R>,
    source: Source,
    stored: &TensorHandle<R>,
    stored_rows: usize,
    sample: &RowSample<R>,
    scale: Option<&TensorHandle<R>>,
    output: &Quantized<R>,
) {
    let (rows, cols) = (output.shape.rows, output.shape.cols);
    if rows * cols == 0 {
        return;
    }
    let plan = Stored::new(source, stored, cols);
    let layout = match (&output.values, &output.transposed) {
        (Some(_), Some(_)) => Layout::Both,
        (None, Some(_)) => Layout::Transposed,
        (Some(_), None) | (None, None) => Layout::RowMajor,
    };
    let copies = ByteCopies::new(layout, rows, cols);
    let [
        (row_major_vector, row_major_dtype),
        (transposed_vector, transposed_dtype),
    ] = copies.vectors();
    let copy =
        |copy: &Option<TensorHandle<R>>| array(or_unused(copy.as_ref(), stored, storage::<i8>()));
    // SAFETY: every access is guarded by the shapes, for which the outputs were allocated and the rest checked; a kept
    // row that is none of the stacked ones counts as padding.
    #[allow(unsafe_code)]
    unsafe {
        gather_kernel::launch_unchecked::<R>(
            client,
            cube_grid(byte_tile::tiles(rows, cols)),
            CubeDim::new_1d(byte_tile::UNITS as u32),
            plan.read.div_ceil(4),
            row_major_vector,
            transposed_vector,
            array(stored.clone()),
            array(sample.rows.clone()),
            array(or_unused(scale, &sample.factors, storage::<f32>())),
            copy(&output.values),
            copy(&output.transposed),
            array(output.scales.clone()),
            stored_rows as u32,
            rows as u32,
            cols as u32,
            plan,
            scale.is_some(),
            copies,
            byte_dtype(plan.read),
            row_major_dtype,
            transposed_dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gather_kernel<S: Numeric, NS: Size, V: Numeric, NV: Size, T: Numeric, NT: Size>(
    stored: &Array<Vector<S, NS>>,
    kept: &Array<i32>,
    scale: &Array<f32>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    scales: &mut Array<f32>,
    stored_rows: u32,
    rows: u32,
    cols: u32,
    #[comptime] plan: Stored,
    #[comptime] writes_scales: bool,
    #[comptime] copies: ByteCopies,
    #[define(S)] _stored_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    let at = patch_position(cols);
    if at.first_row >= rows {
        terminate!();
    }
    if comptime!(writes_scales) {
        // A tile is a block.
        if UNIT_POS == 0 {
            scales[CUBE_POS] = scale[0];
        }
    }
    let lines = gathered_patch::<S, NS>(stored, kept, stored_rows, rows, cols, &at, plan);
    write_patch::<V, NV, T, NT>(values, transposed, &lines, &at, 0u32, rows, cols, copies);
}

/// The integers of a patch of kept rows, as bytes; 0 for padding and outside the matrix.
#[cube]
pub(super) fn gathered_patch<S: Numeric, N: Size>(
    stored: &Array<Vector<S, N>>,
    kept: &Array<i32>,
    stored_rows: u32,
    rows: u32,
    cols: u32,
    at: &PatchPosition,
    #[comptime] plan: Stored,
) -> Array<u32> {
    let mut lines = zero_patch();
    let col = at.first_col + at.tile_col;
    #[unroll]
    for line in 0..comptime!(PATCH_ROWS as u32) {
        let slot = at.first_row + at.tile_row + line;
        let row = kept_row(kept, slot, rows);
        if row < stored_rows * 2 {
            let first = comptime!(line as usize * LINE_WORDS);
            match comptime!(plan.source) {
                Source::Parts => {
                    let start = row % stored_rows * cols;
                    read_bytes::<S, N>(
                        stored, &mut lines, start, col, cols, first, LINE_WORDS, plan.read,
                    );
                    let shift = row / stored_rows * 4;
                    #[unroll]
                    for word in 0..LINE_WORDS {
                        let index = comptime!(first + word);
                        lines[index] = signed_nibbles((lines[index] >> shift) & NIBBLES);
                    }
                }
                Source::Nibbles => {
                    let row_bytes = cols.div_ceil(2u32);
                    let start = row % stored_rows * row_bytes;
                    let count = comptime!(LINE_WORDS / 2);
                    let mut packed = Array::<u32>::new(count);
                    #[unroll]
                    for word in 0..count {
                        packed[word] = 0u32;
                    }
                    read_bytes::<S, N>(
                        stored,
                        &mut packed,
                        start,
                        col / 2,
                        row_bytes,
                        0usize,
                        count,
                        plan.read,
                    );
                    #[unroll]
                    for word in 0..count {
                        lines[comptime!(first + 2 * word)] = spread(packed[word] & 0xffff);
                        lines[comptime!(first + 2 * word + 1)] = spread(packed[word] >> 16);
                    }
                }
            }
        }
    }
    lines
}

/// A row of the stacked parts; for padding, and beyond the list, one that there is not.
#[cube]
fn kept_row(kept: &Array<i32>, slot: u32, rows: u32) -> u32 {
    let mut row = 0xffff_ffffu32.runtime();
    if slot < rows {
        row = u32::reinterpret(kept[slot as usize]);
    }
    row
}
