//! Copies of operands whose rows can be read 16 bytes at a time.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::device::{
    MatrixGeometry, MatrixView, cube_grid, empty, read_quad, read_width, storage, write_quad,
};

/// Bytes that the tensor-core kernel reads at once.
pub(super) const ALIGNMENT: usize = 16;
const UNITS: u32 = 256;

/// The INT8 matrices with zeros appended to their rows, up to a multiple of 16 bytes, and their strides.
pub(super) fn align<R: Runtime>(
    client: &ComputeClient<R>,
    values: &TensorHandle<R>,
    view: &MatrixView,
) -> (TensorHandle<R>, MatrixView) {
    let shape = view.shape;
    let pitch = shape.cols.next_multiple_of(ALIGNMENT);
    let out = empty(
        client,
        vec![shape.batch, shape.rows, pitch],
        storage::<i8>(),
    );
    let quads = shape.batch * shape.rows * pitch / 4;
    if quads > 0 {
        let width = read_width(values, view);
        // SAFETY: reads are guarded by the shape in `geometry`, writes by the number of quads.
        #[allow(unsafe_code)]
        unsafe {
            align_kernel::launch_unchecked::<R>(
                client,
                cube_grid(quads.div_ceil(UNITS as usize)),
                CubeDim::new_1d(UNITS),
                width,
                4,
                values.clone().into_arg(),
                out.clone().into_arg(),
                view.geometry(),
                shape.batch as u32,
                pitch as u32,
                width,
            );
        }
    }
    let view = MatrixView {
        batch_stride: shape.rows * pitch,
        row_stride: pitch,
        col_stride: 1,
        ..*view
    };
    (out, view)
}

#[cube(launch_unchecked)]
fn align_kernel<NX: Size, NO: Size>(
    values: &Tensor<Vector<i8, NX>>,
    out: &mut Tensor<Vector<i8, NO>>,
    geometry: MatrixGeometry,
    batch_size: u32,
    pitch: u32,
    #[comptime] width: usize,
) {
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    let out_row = index / (pitch / 4);
    let col = index % (pitch / 4) * 4;
    let batch = out_row / geometry.rows;
    if batch < batch_size {
        let row = out_row % geometry.rows;
        let quad = read_quad::<i8, NX>(values, &geometry, batch, row, col, width);
        write_quad::<f32, i8, NO>(out, &quad, out_row * pitch, col, pitch, 4usize);
    }
}
