//! The magnitudes of a matrix: the largest, and a histogram by powers of two.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_float, empty, read_quad, read_width, storage,
        zeros,
    },
    error::KernelError,
    granularity::Granularity,
    quantize::{absmax, reduction::totals, tile::UNITS},
    rounding::magnitude_bits,
};

const OPERATION: &str = "magnitudes";

/// Bins of a histogram. Bin `i` below [`TINY`] counts the elements of the `i`-th octave below that of the largest
/// magnitude: those `x` with `floor(log2 |x|) = floor(log2 max) - i`.
pub const BINS: usize = 64;
/// The bin of all elements below the octaves that have bins of their own, but zeros.
pub const TINY: usize = BINS - 2;
/// The bin of zeros.
pub const ZEROS: usize = BINS - 1;

/// The octave of a magnitude: its exponent as FP32 stores it. NaN and infinities share the highest.
pub fn octave(value: f32) -> usize {
    (value.abs().to_bits() >> EXPONENT_BITS) as usize
}

/// Adds a histogram whose largest magnitude lies `below` octaves below that of `sum`.
pub fn add_histogram<T: Copy + std::ops::AddAssign>(
    sum: &mut [T; BINS],
    histogram: &[T; BINS],
    below: usize,
) {
    for (bin, count) in histogram.iter().enumerate() {
        let bin = match bin {
            ZEROS => ZEROS,
            _ => TINY.min(bin + below),
        };
        sum[bin] += *count;
    }
}

/// Elements that a cube counts at a time.
const STAGE: usize = 4 * UNITS;
/// Units that share a bin, each with a part of the stage.
const PARTS: usize = UNITS / BINS;
/// More cubes than a device holds at once gain nothing.
const MAX_CUBES: usize = 2048;
/// Stands for an element outside the matrix.
const NO_BIN: u32 = BINS as u32;
pub(crate) const EXPONENT_BITS: u32 = f32::MANTISSA_DIGITS - 1;

/// The magnitudes of a matrix.
#[derive(Debug)]
pub struct Magnitudes<R: Runtime> {
    /// The largest one, f32 `[1]`; NaN if an element is NaN, else infinity if one is infinite. 0 for an empty matrix.
    pub absmax: TensorHandle<R>,
    /// Elements in each bin, u32 `[BINS]`.
    pub histogram: TensorHandle<R>,
}

/// The magnitudes of a matrix. Numbers below 2^-126 count as of the octave below that.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, any strides.
///
/// # Errors
///
/// When `x` has another rank, or another element type.
pub fn magnitudes<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
) -> Result<Magnitudes<R>, KernelError> {
    let view = MatrixView::one(OPERATION, "x", x)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    if view.shape.num_elements() == 0 {
        return Ok(Magnitudes {
            absmax: zeros(client, vec![1], storage::<f32>()),
            histogram: zeros(client, vec![BINS], storage::<u32>()),
        });
    }
    let largest = absmax::launch(client, x, &view, Granularity::Tensor);
    let largest = TensorHandle::new_contiguous(vec![1], largest.handle, largest.dtype);
    let quads = view.shape.rows * view.shape.cols.div_ceil(4);
    let cubes = (4 * quads).div_ceil(STAGE).min(MAX_CUBES);
    let of_cubes = empty(client, vec![BINS, cubes], storage::<u32>());
    let width = read_width(x, &view);
    // SAFETY: reads are guarded by the shape in `geometry`, and each cube writes its own column of bins.
    #[allow(unsafe_code)]
    unsafe {
        histogram_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(x.clone()),
            array(largest.clone()),
            array(of_cubes.clone()),
            view.geometry(),
            quads as u32,
            width,
            x.dtype,
        );
    }
    Ok(Magnitudes {
        absmax: largest,
        histogram: totals(client, &of_cubes),
    })
}

#[cube(launch_unchecked)]
fn histogram_kernel<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    absmax: &Array<f32>,
    of_cubes: &mut Array<u32>,
    geometry: MatrixGeometry,
    quads: u32,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let octave = magnitude_bits(absmax[0]) >> EXPONENT_BITS;
    let quads_of_row = geometry.cols.div_ceil(4);
    let mut bins = SharedMemory::<u32>::new(STAGE);
    let bin = UNIT_POS % comptime!(BINS as u32);
    let part = UNIT_POS / comptime!(BINS as u32);
    let mut count = 0u32;
    let mut first = CUBE_POS as u32 * comptime!(UNITS as u32);
    while first < quads {
        let index = first + UNIT_POS;
        let row = index / quads_of_row;
        let col = index % quads_of_row * 4;
        let quad = read_quad::<F, N>(x, &geometry, 0, row, col, width);
        #[unroll]
        for lane in 0..4u32 {
            let is_inside = row < geometry.rows && col + lane < geometry.cols;
            let bin = bin_of(magnitude_bits(quad[lane as usize]), octave);
            bins[(UNIT_POS * 4 + lane) as usize] = select(is_inside, bin, NO_BIN);
        }
        sync_cube();
        let start = part * comptime!((STAGE / PARTS) as u32);
        for index in 0..comptime!((STAGE / PARTS) as u32) {
            count += u32::cast_from(bins[(start + index) as usize] == bin);
        }
        sync_cube();
        first += CUBE_COUNT as u32 * comptime!(UNITS as u32);
    }
    bins[UNIT_POS as usize] = count;
    sync_cube();
    if UNIT_POS < comptime!(BINS as u32) {
        let mut sum = 0u32;
        #[unroll]
        for part in 0..comptime!(PARTS as u32) {
            sum += bins[(part * comptime!(BINS as u32) + UNIT_POS) as usize];
        }
        of_cubes[(UNIT_POS * CUBE_COUNT as u32 + CUBE_POS as u32) as usize] = sum;
    }
}

/// The bin of a magnitude, from its bits; `octave` is the exponent field of the largest.
#[cube]
fn bin_of(bits: u32, octave: u32) -> u32 {
    let below = octave - min(bits >> EXPONENT_BITS, octave);
    let bin = min(below, comptime!(TINY as u32));
    select(bits == 0, comptime!(ZEROS as u32), bin)
}
