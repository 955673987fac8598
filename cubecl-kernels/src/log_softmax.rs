//! The logarithm of the softmax of rows, and its gradient, each in one launch: what cross entropy needs of logits.
//!
//! A cube takes a row: `y = x - max x - ln sum exp(x - max x)`, and `dx = dy - exp(y) sum dy`. All arithmetic is FP32
//! whatever the type of x, which is read as it is. Composed of tensor operations it is four reductions and as many
//! passes over the logits, several of which then wait for the backward pass; here y alone does.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, check_float, cube_grid, empty,
        has_planes_of_32, read_quad, read_width, storage, write_quad, write_width,
    },
    error::KernelError,
    fast,
    softmax::{Reduction, UNITS, reduce},
};

const OPERATION: &str = "log_softmax";
const OPERATION_BACKWARD: &str = "log_softmax_backward";

/// The logarithm of the softmax of each row: f32 `[rows, cols]`, contiguous. A row with NaN, positive infinity, or
/// nothing but negative infinities is NaN.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, any strides.
///
/// # Errors
///
/// When `x` is no matrix or no float tensor.
pub fn log_softmax<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let view = MatrixView::one(OPERATION, "x", x)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    let shape = view.shape;
    let out = empty(client, vec![shape.rows, shape.cols], storage::<f32>());
    if shape.num_elements() > 0 {
        let widths = (read_width(x, &view), write_width(shape.cols));
        // SAFETY: reads are guarded by the shape in the geometry, for which the output was allocated.
        #[allow(unsafe_code)]
        unsafe {
            log_softmax_kernel::launch_unchecked::<R>(
                client,
                cube_grid(shape.rows),
                CubeDim::new_1d(UNITS as u32),
                widths.0,
                widths.1,
                array(x.clone()),
                array(out.clone()),
                view.geometry(),
                widths,
                has_planes_of_32(client),
                x.dtype,
            );
        }
    }
    Ok(out)
}

/// The gradient of x, of element type `dtype`, `[rows, cols]`, contiguous.
///
/// - `y`: f32 `[rows, cols]`, any strides: what [`log_softmax`](log_softmax()) gave.
/// - `grad`: f32, of the shape of `y`, any strides: the gradient of `y`.
/// - `dtype`: f32, f16 or bf16.
///
/// # Errors
///
/// When shapes or element types differ from these.
pub fn log_softmax_backward<R: Runtime>(
    client: &ComputeClient<R>,
    y: &TensorHandle<R>,
    grad: &TensorHandle<R>,
    dtype: StorageType,
) -> Result<TensorHandle<R>, KernelError> {
    let view = MatrixView::one(OPERATION_BACKWARD, "y", y)?;
    let of_grad = MatrixView::one(OPERATION_BACKWARD, "the gradient", grad)?;
    for (name, tensor) in [("y", y), ("the gradient", grad)] {
        check_dtype(
            OPERATION_BACKWARD,
            name,
            tensor,
            storage::<f32>(),
            "use f32",
        )?;
    }
    check_float(client, OPERATION_BACKWARD, "the result", dtype)?;
    if grad.shape() != y.shape() {
        return Err(KernelError::Shape {
            operation: OPERATION_BACKWARD,
            got: format!("y {:?} and its gradient {:?}", y.shape(), grad.shape()),
            remedy: "pass the gradient of y, of its shape",
        });
    }
    let shape = view.shape;
    let out = empty(client, vec![shape.rows, shape.cols], dtype);
    if shape.num_elements() > 0 {
        let widths = (
            read_width(y, &view),
            read_width(grad, &of_grad),
            write_width(shape.cols),
        );
        // SAFETY: reads are guarded by the shape in the geometries, for which the output was allocated.
        #[allow(unsafe_code)]
        unsafe {
            log_softmax_backward_kernel::launch_unchecked::<R>(
                client,
                cube_grid(shape.rows),
                CubeDim::new_1d(UNITS as u32),
                widths.0,
                widths.1,
                widths.2,
                array(y.clone()),
                array(grad.clone()),
                array(out.clone()),
                view.geometry(),
                of_grad.geometry(),
                widths,
                has_planes_of_32(client),
                dtype,
            );
        }
    }
    Ok(out)
}

#[cube(launch_unchecked)]
fn log_softmax_kernel<F: Numeric, NX: Size, NO: Size>(
    x: &Array<Vector<F, NX>>,
    out: &mut Array<Vector<f32, NO>>,
    geometry: MatrixGeometry,
    #[comptime] widths: (usize, usize),
    #[comptime] planes: bool,
    #[define(F)] _dtype: StorageType,
) {
    let row = CUBE_POS as u32;
    if row >= geometry.rows {
        terminate!();
    }
    let mut largest = Array::<f32>::new(1usize);
    largest[0usize] = f32::new(f32::MIN);
    let mut col = UNIT_POS * 4;
    while col < geometry.cols {
        let quad = read_quad::<F, NX>(x, &geometry, 0, row, col, widths.0);
        #[unroll]
        for lane in 0..4u32 {
            let value = quad[lane as usize];
            if col + lane < geometry.cols && value > largest[0usize] {
                largest[0usize] = value;
            }
        }
        col += comptime!(4 * UNITS as u32);
    }
    reduce(&mut largest, Reduction::Max, 1usize, planes);
    let mut sum = Array::<f32>::new(1usize);
    sum[0usize] = 0.0f32;
    col = UNIT_POS * 4;
    while col < geometry.cols {
        let quad = read_quad::<F, NX>(x, &geometry, 0, row, col, widths.0);
        #[unroll]
        for lane in 0..4u32 {
            let weight = fast::exp(quad[lane as usize] - largest[0usize]);
            sum[0usize] += select(col + lane < geometry.cols, weight, 0.0f32);
        }
        col += comptime!(4 * UNITS as u32);
    }
    reduce(&mut sum, Reduction::Sum, 1usize, planes);
    let log_sum = f32::ln(sum[0usize]);
    let start = row * geometry.cols;
    col = UNIT_POS * 4;
    while col < geometry.cols {
        let mut quad = read_quad::<F, NX>(x, &geometry, 0, row, col, widths.0);
        #[unroll]
        for lane in 0..4usize {
            // In this order: the largest of a row takes part in both, and may be far larger than what is left.
            quad[lane] = quad[lane] - largest[0usize] - log_sum;
        }
        write_quad::<f32, f32, NO>(out, &quad, start, col, geometry.cols, widths.1);
        col += comptime!(4 * UNITS as u32);
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn log_softmax_backward_kernel<F: Numeric, NY: Size, NG: Size, NO: Size>(
    y: &Array<Vector<f32, NY>>,
    grad: &Array<Vector<f32, NG>>,
    out: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    of_grad: MatrixGeometry,
    #[comptime] widths: (usize, usize, usize),
    #[comptime] planes: bool,
    #[define(F)] _dtype: StorageType,
) {
    let row = CUBE_POS as u32;
    if row >= geometry.rows {
        terminate!();
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0usize] = 0.0f32;
    let mut col = UNIT_POS * 4;
    while col < geometry.cols {
        let quad = read_quad::<f32, NG>(grad, &of_grad, 0, row, col, widths.1);
        #[unroll]
        for lane in 0..4u32 {
            sum[0usize] += select(col + lane < geometry.cols, quad[lane as usize], 0.0f32);
        }
        col += comptime!(4 * UNITS as u32);
    }
    reduce(&mut sum, Reduction::Sum, 1usize, planes);
    let start = row * geometry.cols;
    col = UNIT_POS * 4;
    while col < geometry.cols {
        let logs = read_quad::<f32, NY>(y, &geometry, 0, row, col, widths.0);
        let mut quad = read_quad::<f32, NG>(grad, &of_grad, 0, row, col, widths.1);
        #[unroll]
        for lane in 0..4usize {
            quad[lane] -= fast::exp(logs[lane]) * sum[0usize];
        }
        write_quad::<f32, F, NO>(out, &quad, start, col, geometry.cols, widths.2);
        col += comptime!(4 * UNITS as u32);
    }
}
