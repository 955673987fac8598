//! INT4 as INT8.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, cube_grid, empty, storage, write_quad,
        write_width,
    },
    error::KernelError,
    number::{Integer, Number, Storage, integer},
    shape::MatrixShape,
};

use super::{
    Quantized,
    load::{Along, UNITS, load_codes, quad_position, quads},
};

const OPERATION: &str = "unpack_int4";

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
    let width = write_width(shape.cols);
    // SAFETY: every access is guarded by the shape in `geometry`, which is that of both buffers.
    #[allow(unsafe_code)]
    unsafe {
        unpack_kernel::launch_unchecked::<R>(
            client,
            cube_grid(quads(shape).div_ceil(UNITS as usize)),
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
        let codes = load_codes::<V, NV>(
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
