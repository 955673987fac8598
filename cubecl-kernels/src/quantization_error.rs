//! How far quantized values are from those that they stand for: what becomes signal-to-noise ratio, cosine, and the
//! shares of values that underflow or saturate.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, check_float, empty, or_unused, read_quad,
        read_width, storage, zeros,
    },
    error::KernelError,
    magnitude::{EXPONENT_BITS, octave},
    quantize::{
        reduction::{cube_sum, row_total},
        tile::UNITS,
    },
    rounding::magnitude_bits,
    scale::is_finite,
};

const OPERATION: &str = "quantization_error";

/// Sums of one comparison, in this order: of `x²`, `(x - y)²`, `x y` and `y²`, all of values times the [`unit()`] of
/// `absmax`.
pub const SUMS: usize = 4;
/// Counts of one comparison, in this order: values that underflow, those that are not 0 and became 0; and values that
/// saturate, those that are finite and lie beyond the largest number under their scale.
pub const COUNTS: usize = 2;

/// A magnitude saturates from so many times the limit on: the limit itself is rounded.
pub const BEYOND: f32 = 1.0 + 1.0 / (1 << 20) as f32;

/// Four elements that a unit reads, one after the other, before there are more cubes.
const QUADS_OF_UNIT: usize = 8;
/// More cubes than a device holds at once gain nothing.
const MAX_CUBES: usize = 2048;
/// Exponent fields between which the unit and its inverse are normal numbers.
const EXPONENTS: (u32, u32) = (1, 253);

/// The power of two by which values are multiplied before their squares are summed up, so that neither under- nor
/// overflows: it brings `absmax` near 1. That of NaN is the one of the largest number.
pub fn unit(absmax: f32) -> f32 {
    let exponent = octave(absmax) as u32;
    f32::from_bits((254 - exponent.clamp(EXPONENTS.0, EXPONENTS.1)) << EXPONENT_BITS)
}

/// The comparison of a matrix with what it became.
#[derive(Debug)]
pub struct QuantizationError<R: Runtime> {
    /// f32 [`[SUMS]`](SUMS). NaN or infinite where an element of `x` or `y` is.
    pub sums: TensorHandle<R>,
    /// u32 [`[COUNTS]`](COUNTS).
    pub counts: TensorHandle<R>,
}

/// Compares `x` with `y`, what it became.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, any strides.
/// - `y`: f32, of the same shape, any strides.
/// - `absmax`: f32 `[1]`, the largest magnitude of `x`.
/// - `limit`: f32 `[1]`, the magnitude of the largest number under the one scale of the matrix; `None` where each scale
///   is of the values' own maximum, so that none saturates.
///
/// # Errors
///
/// When shapes or element types differ from these.
pub fn quantization_error<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    y: &TensorHandle<R>,
    absmax: &TensorHandle<R>,
    limit: Option<&TensorHandle<R>>,
) -> Result<QuantizationError<R>, KernelError> {
    let view = MatrixView::one(OPERATION, "x", x)?;
    let of_y = MatrixView::one(OPERATION, "y", y)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    check_dtype(OPERATION, "y", y, storage::<f32>(), "dequantize to f32")?;
    if x.shape() != y.shape() {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("x {:?} and y {:?}", x.shape(), y.shape()),
            remedy: "pass two matrices [rows, cols] of one shape",
        });
    }
    for (name, scalar) in [("absmax", Some(absmax)), ("limit", limit)] {
        if let Some(scalar) = scalar {
            check_dtype(OPERATION, name, scalar, storage::<f32>(), "use f32")?;
            if scalar.shape().iter().product::<usize>() != 1 {
                return Err(KernelError::Shape {
                    operation: OPERATION,
                    got: format!("{name} {:?}", scalar.shape()),
                    remedy: "pass a tensor [1]",
                });
            }
        }
    }
    if view.shape.num_elements() == 0 {
        return Ok(QuantizationError {
            sums: zeros(client, vec![SUMS], storage::<f32>()),
            counts: zeros(client, vec![COUNTS], storage::<u32>()),
        });
    }
    let quads = view.shape.rows * view.shape.cols.div_ceil(4);
    let cubes = quads.div_ceil(UNITS * QUADS_OF_UNIT).min(MAX_CUBES);
    let sums = empty(client, vec![SUMS, cubes], storage::<f32>());
    let counts = empty(client, vec![COUNTS, cubes], storage::<u32>());
    let (read, read_y) = (read_width(x, &view), read_width(y, &of_y));
    // SAFETY: reads are guarded by the shape in the geometries, and each cube writes its own column of sums.
    #[allow(unsafe_code)]
    unsafe {
        error_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            read,
            read_y,
            array(x.clone()),
            array(y.clone()),
            array(absmax.clone()),
            array(or_unused(limit, absmax, storage::<f32>())),
            array(sums.clone()),
            array(counts.clone()),
            view.geometry(),
            of_y.geometry(),
            quads as u32,
            limit.is_some(),
            read,
            read_y,
            x.dtype,
        );
    }
    Ok(totals(client, &sums, &counts, cubes))
}

/// Adds up what cubes left: sums `[SUMS, cubes]` and counts `[COUNTS, cubes]`.
fn totals<R: Runtime>(
    client: &ComputeClient<R>,
    of_sums: &TensorHandle<R>,
    of_counts: &TensorHandle<R>,
    cubes: usize,
) -> QuantizationError<R> {
    let sums = empty(client, vec![SUMS], storage::<f32>());
    let counts = empty(client, vec![COUNTS], storage::<u32>());
    // SAFETY: reads are guarded by the number of cubes, and there is a cube for each sum and each count.
    #[allow(unsafe_code)]
    unsafe {
        error_totals_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static((SUMS + COUNTS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(of_sums.clone()),
            array(of_counts.clone()),
            array(sums.clone()),
            array(counts.clone()),
            cubes as u32,
        );
    }
    QuantizationError { sums, counts }
}

#[cube(launch_unchecked)]
fn error_totals_kernel(
    of_sums: &Array<f32>,
    of_counts: &Array<u32>,
    sums: &mut Array<f32>,
    counts: &mut Array<u32>,
    cubes: u32,
) {
    let index = CUBE_POS as u32;
    if index < comptime!(SUMS as u32) {
        let total = row_total::<f32>(of_sums, index, cubes);
        if UNIT_POS == 0 {
            sums[index as usize] = total;
        }
    } else {
        let index = index - comptime!(SUMS as u32);
        let total = row_total::<u32>(of_counts, index, cubes);
        if UNIT_POS == 0 {
            counts[index as usize] = total;
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn error_kernel<F: Numeric, NX: Size, NY: Size>(
    x: &Array<Vector<F, NX>>,
    y: &Array<Vector<f32, NY>>,
    absmax: &Array<f32>,
    limit: &Array<f32>,
    sums: &mut Array<f32>,
    counts: &mut Array<u32>,
    geometry: MatrixGeometry,
    of_y: MatrixGeometry,
    quads: u32,
    #[comptime] saturates: bool,
    #[comptime] read: usize,
    #[comptime] read_y: usize,
    #[define(F)] _dtype: StorageType,
) {
    let unit = unit_cube(absmax[0]);
    let limit = if comptime!(saturates) {
        magnitude_bits(limit[0] * BEYOND)
    } else {
        comptime!(f32::INFINITY.to_bits()).runtime()
    };
    let quads_of_row = geometry.cols.div_ceil(4);
    let mut xx = 0.0f32;
    let mut ee = 0.0f32;
    let mut xy = 0.0f32;
    let mut yy = 0.0f32;
    let mut underflown = 0u32;
    let mut saturated = 0u32;
    let mut index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    while index < quads {
        let row = index / quads_of_row;
        let col = index % quads_of_row * 4;
        let exact = read_quad::<F, NX>(x, &geometry, 0, row, col, read);
        let became = read_quad::<f32, NY>(y, &of_y, 0, row, col, read_y);
        #[unroll]
        for lane in 0..4usize {
            let (x, y) = (exact[lane], became[lane]);
            let (x_bits, y_bits) = (magnitude_bits(x), magnitude_bits(y));
            underflown += u32::cast_from(x_bits != 0 && y_bits == 0);
            saturated += u32::cast_from(x_bits > limit && is_finite(x_bits));
            let (x, y) = (x * unit, y * unit);
            let rest = x - y;
            xx += x * x;
            ee += rest * rest;
            xy += x * y;
            yy += y * y;
        }
        index += CUBE_COUNT as u32 * comptime!(UNITS as u32);
    }
    let (cube, cubes) = (CUBE_POS, CUBE_COUNT);
    let (xx, ee) = (cube_sum::<f32>(xx), cube_sum::<f32>(ee));
    let (xy, yy) = (cube_sum::<f32>(xy), cube_sum::<f32>(yy));
    let (underflown, saturated) = (cube_sum::<u32>(underflown), cube_sum::<u32>(saturated));
    if UNIT_POS == 0 {
        sums[cube] = xx;
        sums[cubes + cube] = ee;
        sums[2 * cubes + cube] = xy;
        sums[3 * cubes + cube] = yy;
        counts[cube] = underflown;
        counts[cubes + cube] = saturated;
    }
}

/// [`unit()`] in a kernel.
#[cube]
fn unit_cube(absmax: f32) -> f32 {
    let exponent = magnitude_bits(absmax) >> EXPONENT_BITS;
    let exponent = clamp(exponent, comptime!(EXPONENTS.0), comptime!(EXPONENTS.1));
    f32::reinterpret((254 - exponent) << EXPONENT_BITS)
}
