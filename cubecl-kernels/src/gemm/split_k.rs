//! Split-K: a product whose output has fewer tiles than the device has multiprocessors sums K in several parts side by
//! side, each as if it were a product of its own, and adds these up. The gradient of a small weight is such a product:
//! few tiles, and a K of all tokens.
//!
//! The parts are of whole stages and as long as one another, but for the last; their FP32 sums are added in ascending
//! order of K, then the bias. How many there are depends on the shapes and on the number of multiprocessors alone, so
//! that a repetition gives the same bits, and another device may give others.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_contiguous, check_dtype, check_float, cube_grid,
        empty, or_unused, read_quad, read_width, storage, write_quad, write_width,
    },
    error::KernelError,
};

const OPERATION: &str = "add_parts";
const UNITS: usize = 256;
/// Stages of a part, at least: fewer would not fill the ring.
const LEAST_STAGES: usize = 8;
const MOST_PARTS: usize = 16;
/// The part of the time that parts must leave at most to be worth their memory.
const WORTH: f32 = 0.9;
// What decides between these, in microseconds, of a Hopper GPU; the Hopper kernels' stages cost nearly the same in all
// number formats.
/// A stage of the widest tile.
const STAGE_US: f32 = 0.85;
/// A launch more.
const LAUNCH_US: f32 = 4.0;
/// Bytes that are written and read once more, in a microsecond.
const BYTES_PER_US: f32 = 2.5e6;

/// In how many parts a product of `stages` along K and of so many outputs in all is summed up.
///
/// `busiest`: for a number of parts, the tiles of the busiest multiprocessor, one of a part counting as much as one of
/// all of K, in those of the widest kind.
pub(super) fn parts(stages: usize, outputs: usize, busiest: impl Fn(usize) -> f32) -> usize {
    let time = |parts: usize| {
        let products = busiest(parts) * stages.div_ceil(parts) as f32 * STAGE_US;
        let bytes = (2 * parts + 1) * size_of::<f32>() * outputs;
        match parts {
            1 => products,
            _ => products + LAUNCH_US + bytes as f32 / BYTES_PER_US,
        }
    };
    let most = (stages / LEAST_STAGES).min(MOST_PARTS);
    let fastest = (2..=most).min_by(|a, b| time(*a).total_cmp(&time(*b)));
    fastest
        .filter(|&it| time(it) < WORTH * time(1))
        // None may be empty.
        .map_or(1, |it| stages.div_ceil(stages.div_ceil(it)))
}

/// Computes `out`, contiguous, in so many parts: `multiply(to, bias)` writes the output, or the sums of the parts
/// `[.., parts, M, N]`.
pub(super) fn in_parts<R: Runtime>(
    client: &ComputeClient<R>,
    parts: usize,
    out: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    multiply: impl FnOnce(&TensorHandle<R>, Option<&TensorHandle<R>>),
) {
    if parts == 1 {
        return multiply(out, bias);
    }
    let mut shape = out.shape().to_vec();
    shape.insert(shape.len() - 2, parts);
    let sums = empty(client, shape, storage::<f32>());
    multiply(&sums, None);
    launch(client, &sums, bias, out);
}

/// The sums of parts of K added up, `[.., M, N]`, contiguous: in ascending order, then the bias, in FP32, rounded once.
///
/// - `sums`: f32 `[.., parts, M, N]`, contiguous, with at least one part.
/// - `bias`: f32 `[N]`, contiguous.
/// - `out_dtype`: f32, f16 or bf16.
///
/// # Errors
///
/// When shapes or element types differ from these.
pub fn add_parts<R: Runtime>(
    client: &ComputeClient<R>,
    sums: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    out_dtype: StorageType,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "the output", out_dtype)?;
    check_dtype(
        OPERATION,
        "sums",
        sums,
        storage::<f32>(),
        "cast them to f32",
    )?;
    check_contiguous(OPERATION, sums)?;
    let shape = sums.shape();
    let n = match shape[..] {
        [.., parts, _, n] if parts > 0 => n,
        _ => {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("{shape:?}"),
                remedy: "pass sums [.., parts, M, N], of one part or more",
            });
        }
    };
    super::check_bias(OPERATION, bias, n)?;
    let mut of_out = shape.to_vec();
    of_out.remove(of_out.len() - 3);
    let out = empty(client, of_out, out_dtype);
    launch(client, sums, bias, &out);
    Ok(out)
}

fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    sums: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    out: &TensorHandle<R>,
) {
    let &[.., parts, rows_of_matrix, cols] = &sums.shape()[..] else {
        unreachable!("sums have a dimension of parts");
    };
    let rows = out.shape()[..out.shape().len() - 1]
        .iter()
        .product::<usize>();
    if rows * cols == 0 {
        return;
    }
    // The rows of a matrix follow one another; those of its next part lie behind them.
    let view = MatrixView::contiguous(rows * parts, cols);
    let widths = (read_width(sums, &view), write_width(cols));
    let quads = rows * cols.div_ceil(4);
    // SAFETY: reads are guarded by the geometry of the sums, writes by the number of quads, for whose rows the output was
    // allocated; a bias has an element for each column.
    #[allow(unsafe_code)]
    unsafe {
        add_parts_kernel::launch_unchecked::<R>(
            client,
            cube_grid(quads.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            widths.0,
            widths.1,
            array(sums.clone()),
            array(or_unused(bias, sums, storage::<f32>())),
            array(out.clone()),
            view.geometry(),
            quads as u32,
            parts as u32,
            rows_of_matrix as u32,
            bias.is_some(),
            widths,
            out.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn add_parts_kernel<F: Numeric, NS: Size, NO: Size>(
    sums: &Array<Vector<f32, NS>>,
    bias: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    quads: u32,
    parts: u32,
    rows_of_matrix: u32,
    #[comptime] has_bias: bool,
    #[comptime] widths: (usize, usize),
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if index < quads {
        let quads_of_row = geometry.cols.div_ceil(4);
        let (row, col) = (index / quads_of_row, index % quads_of_row * 4);
        let first = row / rows_of_matrix * parts * rows_of_matrix + row % rows_of_matrix;
        let mut total = read_quad::<f32, NS>(sums, &geometry, 0, first, col, comptime!(widths.0));
        for part in 1..parts {
            let row_of_part = first + part * rows_of_matrix;
            let quad =
                read_quad::<f32, NS>(sums, &geometry, 0, row_of_part, col, comptime!(widths.0));
            #[unroll]
            for lane in 0..4usize {
                total[lane] += quad[lane];
            }
        }
        if comptime!(has_bias) {
            #[unroll]
            for lane in 0..4u32 {
                total[lane as usize] += bias[min(col + lane, geometry.cols - 1) as usize];
            }
        }
        let row_start = row * geometry.cols;
        write_quad::<f32, F, NO>(
            out,
            &total,
            row_start,
            col,
            geometry.cols,
            comptime!(widths.1),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles of 128 rows and of one of four widths, on a GPU of 132 multiprocessors.
    fn busiest(m: usize, n: usize) -> impl Fn(usize) -> f32 {
        move |parts| {
            let of_width = |(width, speed): (usize, f32)| {
                let tiles = parts * m.div_ceil(128) * n.div_ceil(width);
                (tiles.div_ceil(132) * width) as f32 / 256.0 / speed
            };
            let widths = [(256, 1.0), (192, 0.94), (128, 0.85), (64, 0.53)];
            widths
                .map(of_width)
                .into_iter()
                .fold(f32::INFINITY, f32::min)
        }
    }

    fn of(m: usize, n: usize, k: usize) -> usize {
        parts(k.div_ceil(128), m * n, busiest(m, n))
    }

    #[test]
    fn few_tiles_and_a_long_sum_are_split() {
        // Gradients of weights of 16,384 tokens.
        assert!(
            (3..=7).contains(&of(768, 768, 16384)),
            "{}",
            of(768, 768, 16384)
        );
        assert!(of(512, 512, 16384) > 4);
        assert!(of(256, 768, 16384) > 4);
    }

    #[test]
    fn what_fills_the_device_or_is_short_is_not() {
        assert_eq!(of(4096, 4096, 16384), 1);
        assert_eq!(of(16384, 768, 768), 1);
        assert_eq!(of(128, 128, 1024), 1);
        assert_eq!(of(1, 1, 1), 1);
    }

    #[test]
    fn no_part_is_empty() {
        for k in (1024..65_536).step_by(640) {
            let (stages, parts) = (k.div_ceil(128), of(256, 256, k));
            let of_part = stages.div_ceil(parts);
            assert!(
                (parts - 1) * of_part < stages,
                "{parts} parts of {stages} stages"
            );
        }
    }
}
