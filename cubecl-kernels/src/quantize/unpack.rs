//! INT4 as INT8.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, array, check_dtype, cube_grid, empty, is_contiguous, storage},
    error::KernelError,
    number::{Number, Storage, int4::spread, storage::RUN},
    shape::MatrixShape,
};

use super::{
    Quantized,
    staged::{byte_dtype, byte_read_width, byte_width, read_bytes, write_words},
};

const OPERATION: &str = "unpack_int4";
const UNITS: u32 = 256;
/// Words of a run, packed and unpacked.
const PACKED_WORDS: usize = RUN / 8;
const WORDS: usize = RUN / 4;

/// The integers of an INT4 matrix as INT8, in all copies that there are, under the same scales: an operand of INT8
/// products, which have the same integers.
///
/// # Errors
///
/// When `quantized` is not INT4, or its copies have other shapes or element types than [`Quantized`] says, or are not
/// contiguous.
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
    let stored_cols = Storage::Nibbles.stored_cols(shape.cols);
    let view = MatrixView::new(OPERATION, copy)?;
    let stored = MatrixShape {
        cols: stored_cols,
        ..shape
    };
    if view.shape != stored || !is_contiguous(copy) {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "{shape:?} with a copy {:?} of strides {:?}",
                copy.shape(),
                copy.strides()
            ),
            remedy,
        });
    }
    let out = empty(
        client,
        view.tensor_shape(shape.rows, shape.cols),
        storage::<i8>(),
    );
    if shape.num_elements() == 0 {
        return Ok(out);
    }
    let rows = shape.batch * shape.rows;
    let read = byte_read_width(copy, stored_cols, RUN / 2);
    let write = byte_width(shape.cols, RUN);
    // SAFETY: every access is guarded by the number of rows and the lengths of theirs, which are those of both buffers.
    #[allow(unsafe_code)]
    unsafe {
        unpack_kernel::launch_unchecked::<R>(
            client,
            cube_grid((rows * shape.cols.div_ceil(RUN)).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            read.div_ceil(4),
            write.div_ceil(4),
            array(copy.clone()),
            array(out.clone()),
            rows as u32,
            shape.cols as u32,
            stored_cols as u32,
            read,
            write,
            byte_dtype(read),
            byte_dtype(write),
        );
    }
    Ok(out)
}

/// A unit unpacks a run.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn unpack_kernel<V: Numeric, NV: Size, T: Numeric, NT: Size>(
    values: &Array<Vector<V, NV>>,
    out: &mut Array<Vector<T, NT>>,
    rows: u32,
    cols: u32,
    stored_cols: u32,
    #[comptime] read: usize,
    #[comptime] write: usize,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _out_dtype: StorageType,
) {
    let runs_of_row = cols.div_ceil(comptime!(RUN as u32));
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    let row = index / runs_of_row;
    let col = (index - row * runs_of_row) * comptime!(RUN as u32);
    if row < rows {
        let mut packed = Array::<u32>::new(PACKED_WORDS);
        #[unroll]
        for word in 0..PACKED_WORDS {
            packed[word] = 0u32.runtime();
        }
        read_bytes::<V, NV>(
            values,
            &mut packed,
            row * stored_cols,
            col / 2,
            stored_cols,
            0usize,
            PACKED_WORDS,
            read,
        );
        let mut words = Array::<u32>::new(WORDS);
        #[unroll]
        for word in 0..PACKED_WORDS {
            words[comptime!(2 * word)] = spread(packed[word] & 0xffff);
            words[comptime!(2 * word + 1)] = spread(packed[word] >> 16);
        }
        write_words::<T, NT>(out, &words, row * cols, col, cols, WORDS, write, false);
    }
}
