//! Codes read from their storage, and INT4 as INT8.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, cube_grid, empty, storage, write_quad,
        write_width,
    },
    error::KernelError,
    number::{Integer, Number, Storage, integer, storage::RUN},
    shape::MatrixShape,
};

use super::Quantized;

const OPERATION: &str = "unpack_int4";
const UNITS: u32 = 256;

/// Along which of a matrix' two dimensions codes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Along {
    /// Neighbours of a row lie in one stored element: the row-major copy.
    Rows,
    /// Neighbours of a column do: the transposed copy.
    Columns,
}

/// The integers of an INT4 matrix as INT8, in all copies that there are, under the same scales: an operand of INT8
/// products, which have the same integers.
///
/// # Errors
///
/// When `quantized` is not INT4, or holds tensors of other shapes or element types than [`Quantized`] says.
pub fn unpack_int4<R: Runtime>(
    client: &ComputeClient<R>,
    quantized: &Quantized<R>,
) -> Result<Quantized<R>, KernelError> {
    if quantized.number != Number::Int4 {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("a matrix of {:?}", quantized.number),
            remedy: "pass an INT4 matrix",
        });
    }
    let shape = quantized.shape;
    let unpacked = |copy: &Option<TensorHandle<R>>, shape| {
        copy.as_ref()
            .map(|copy| unpack_copy(client, copy, shape))
            .transpose()
    };
    Ok(Quantized {
        values: unpacked(&quantized.values, shape)?,
        transposed: unpacked(&quantized.transposed, shape.transposed())?,
        number: Number::Int8,
        ..quantized.clone()
    })
}

/// The bytes of a copy of this shape.
fn unpack_copy<R: Runtime>(
    client: &ComputeClient<R>,
    copy: &TensorHandle<R>,
    shape: MatrixShape,
) -> Result<TensorHandle<R>, KernelError> {
    let remedy = "pass what `quantize` made";
    check_dtype(OPERATION, "a copy", copy, storage::<u8>(), remedy)?;
    let stored = MatrixView::new(OPERATION, copy)?;
    let expected = MatrixShape {
        cols: Storage::Nibbles.stored_cols(shape.cols),
        ..shape
    };
    if stored.shape != expected {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("{shape:?} with a copy {:?}", copy.shape()),
            remedy,
        });
    }
    let view = MatrixView { shape, ..stored };
    let out = empty(
        client,
        view.tensor_shape(shape.rows, shape.cols),
        storage::<i8>(),
    );
    if shape.num_elements() == 0 {
        return Ok(out);
    }
    let quads = shape.batch * shape.rows * shape.cols.div_ceil(4);
    let width = write_width(shape.cols);
    // SAFETY: every access is guarded by the shape in `geometry`, which is that of both buffers.
    #[allow(unsafe_code)]
    unsafe {
        unpack_kernel::launch_unchecked::<R>(
            client,
            cube_grid(quads.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            1,
            width,
            array(copy.clone()),
            array(out.clone()),
            view.geometry(),
            shape.batch as u32,
            width,
            copy.dtype,
        );
    }
    Ok(out)
}

/// Which four elements of a row a unit works on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct QuadPosition {
    pub batch: u32,
    pub row: u32,
    pub col: u32,
}

#[cube]
pub(super) fn quad_position(geometry: &MatrixGeometry) -> QuadPosition {
    let quads_of_row = geometry.cols.div_ceil(4);
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    let row = index / quads_of_row;
    QuadPosition {
        batch: row / geometry.rows,
        row: row % geometry.rows,
        col: index % quads_of_row * 4,
    }
}

#[cube(launch_unchecked)]
fn unpack_kernel<V: Numeric, NV: Size, NO: Size>(
    values: &Array<Vector<V, NV>>,
    out: &mut Array<Vector<i8, NO>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    #[comptime] width: usize,
    #[define(V)] _values_dtype: StorageType,
) {
    let at = quad_position(&geometry);
    if at.batch < batch_size {
        let codes = read_codes::<V, NV>(
            values,
            &geometry,
            at.batch,
            at.row,
            at.col,
            comptime!(Storage::Nibbles),
            comptime!(Along::Rows),
            1usize,
        );
        let mut integers = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4usize {
            integers[lane] = integer::decode(codes[lane], comptime!(Integer::INT4));
        }
        let row_start = (at.batch * geometry.rows + at.row) * geometry.cols;
        write_quad::<f32, i8, NO>(out, &integers, row_start, at.col, geometry.cols, width);
    }
}

/// The codes of four neighbours of a row, from column `col`, a multiple of 4. The strides of `geometry` are those of the
/// stored elements; `width` of them are read at once where one holds one code. Bits above a code may be anything.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn read_codes<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] stored: Storage,
    #[comptime] along: Along,
    #[comptime] width: usize,
) -> Array<u32> {
    let mut codes = Array::<u32>::new(4usize);
    let start = batch * geometry.batch_stride;
    if comptime!(width == 4) {
        let vector = values[((start + row * geometry.row_stride + col) / 4) as usize];
        #[unroll]
        for lane in 0..4usize {
            codes[lane] = u32::cast_from(vector[lane]);
        }
    } else {
        #[unroll]
        for lane in 0..4u32 {
            let col = min(col + lane, geometry.cols - 1);
            let (of_row, of_col) = match comptime!(along) {
                Along::Rows => (row * geometry.row_stride, col),
                Along::Columns => (col * geometry.col_stride, row),
            };
            let stride = match comptime!(along) {
                Along::Rows => geometry.col_stride,
                Along::Columns => geometry.row_stride,
            };
            codes[lane as usize] =
                read_code::<V, N>(values, start + of_row, of_col, stride, stored);
        }
    }
    codes
}

/// The `index`-th code of a stored row that starts at `start`, with elements `stride` apart.
#[cube]
fn read_code<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    start: u32,
    index: u32,
    stride: u32,
    #[comptime] stored: Storage,
) -> u32 {
    match comptime!(stored) {
        Storage::SignedBytes | Storage::Bytes => {
            u32::cast_from(values[(start + index * stride) as usize][0usize])
        }
        Storage::Nibbles => {
            let byte = u32::cast_from(values[(start + index / 2 * stride) as usize][0usize]);
            byte >> (index % 2 * 4)
        }
        Storage::TenBits => {
            let bit = index % comptime!(RUN as u32) * 10;
            let word = index / comptime!(RUN as u32) * 5 + bit / 32;
            let shift = bit % 32;
            let mut bits =
                u32::cast_from(values[(start + word * stride) as usize][0usize]) >> shift;
            if shift > 22 {
                let next = u32::cast_from(values[(start + (word + 1) * stride) as usize][0usize]);
                bits |= next << (32 - shift);
            }
            bits
        }
    }
}
