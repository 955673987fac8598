//! Quantization by token: one read of the input. The units of a row hold it in registers, reduce its maximum in shared
//! memory, and encode what they hold.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    device::{MatrixGeometry, array, cube_grid},
    layout::Layout,
    number::storage::RUN,
    rounding::{RandomStream, random_stream},
    scale::{ScaleNumber, region_scale, store_scale},
};

use super::{
    Input, QuantizeSpec, Quantized,
    encode::{fill, run_encoding},
    run::{RunEncoding, encode_run, run_max},
    stored::{Copies, copy_args, write_run},
    tile::{UNITS, read_run, run_read_width, segment_max},
};

/// Runs that a unit holds at most: 64 registers.
const MOST_HELD: usize = 4;
/// The longest rows that the units of a cube hold.
const MAX_COLS: usize = UNITS * MOST_HELD * RUN;

/// How the units of a cube share rows: the runs of a row go to its units in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Sharing {
    /// Units of a row, a power of two.
    lanes: usize,
    /// Runs that a unit holds.
    held: usize,
}

impl Sharing {
    /// The one that leaves fewest places for a run empty, for rows of 1 to [`MAX_COLS`] elements.
    fn of_cols(cols: usize) -> Self {
        let runs = cols.div_ceil(RUN);
        (1..=MOST_HELD)
            .map(|held| Self {
                lanes: runs.div_ceil(held).next_power_of_two(),
                held,
            })
            .filter(|it| it.lanes <= UNITS)
            .min_by_key(|it| it.lanes * it.held)
            .expect("rows that the units of a cube hold")
    }

    /// Rows of a cube.
    const fn rows(self) -> usize {
        UNITS / self.lanes
    }
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TokenPlan {
    sharing: Sharing,
    encoding: RunEncoding,
    copies: Copies,
    scale: ScaleNumber,
    /// Elements read at once.
    read: usize,
}

/// True where a cube holds whole rows of so many columns and writes all that is asked for: scales do not depend on
/// other rows, and codes lie along the rows.
pub(super) fn reads_once(cols: usize, spec: &QuantizeSpec) -> bool {
    !spec.scale.has_tensor_scale() && spec.layout == Layout::RowMajor && cols <= MAX_COLS
}

/// Quantizes each row by a scale of its own.
///
/// # Safety
///
/// `output` was allocated for `input`, which is not empty and which [`reads_once`] accepts.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    output: &Quantized<R>,
) {
    let Input { x, view, spec, .. } = input;
    let copies = Copies::new(spec.number.storage(), spec.layout, view.shape);
    let [(vector, dtype), _] = copies.vectors();
    let [values, _] = copy_args(output, x);
    let plan = TokenPlan {
        sharing: Sharing::of_cols(view.shape.cols),
        encoding: run_encoding(client, input, false),
        copies,
        scale: spec.scale,
        read: run_read_width(x, view),
    };
    let rows = view.shape.batch * view.shape.rows;
    // SAFETY: every access is guarded by the number of rows and by the shape in `geometry`, for which by the caller's
    // promise the outputs were allocated.
    unsafe {
        quantize_token_kernel::launch_unchecked::<R>(
            client,
            cube_grid(rows.div_ceil(plan.sharing.rows())),
            CubeDim::new_1d(UNITS as u32),
            plan.read,
            vector,
            array((*x).clone()),
            values,
            array(output.scales.clone()),
            view.geometry(),
            rows as u32,
            random_stream(spec.rounding),
            spec.number.largest(),
            0,
            plan,
            x.dtype,
            dtype,
            output.scales.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_token_kernel<F: Numeric, NX: Size, V: Numeric, NV: Size, S: Numeric>(
    x: &Array<Vector<F, NX>>,
    values: &mut Array<Vector<V, NV>>,
    scales: &mut Array<S>,
    geometry: MatrixGeometry,
    all_rows: u32,
    random: RandomStream,
    largest: f32,
    zero: u32,
    #[comptime] plan: TokenPlan,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
) {
    let lanes = comptime!(plan.sharing.lanes as u32);
    let first_row = CUBE_POS as u32 * comptime!(plan.sharing.rows() as u32);
    if first_row >= all_rows {
        terminate!();
    }
    // It counts through the batch. Units behind the last row read nothing, but wait with the others.
    let row = first_row + UNIT_POS / lanes;
    let batch = row / geometry.rows;
    let row_of_matrix = select(row < all_rows, row % geometry.rows, geometry.rows);
    let lane = UNIT_POS % lanes;
    let mut held = Array::<f32>::new(comptime!(plan.sharing.held * RUN));
    let mut bits = 0u32;
    #[unroll]
    for turn in 0..comptime!(plan.sharing.held as u32) {
        let col = (lane + turn * lanes) * comptime!(RUN as u32);
        let run = read_run::<F, NX>(x, &geometry, batch, row_of_matrix, col, plan.read);
        bits = max(bits, run_max(&run));
        #[unroll]
        for index in 0..RUN {
            held[comptime!(turn as usize * RUN + index)] = run[index];
        }
    }
    if comptime!(plan.sharing.lanes > 1) {
        bits = segment_max(bits, UNITS, comptime!(plan.sharing.lanes));
    }
    let (stored, inverse) = region_scale(bits, largest, 1.0f32, comptime!(plan.scale));
    if row < all_rows {
        if lane == 0 {
            store_scale::<S>(scales, row, stored, comptime!(plan.scale));
        }
        let mut inverses = Array::<f32>::new(RUN);
        fill(&mut inverses, inverse);
        #[unroll]
        for turn in 0..comptime!(plan.sharing.held as u32) {
            let col = (lane + turn * lanes) * comptime!(RUN as u32);
            let mut run = Array::<f32>::new(RUN);
            #[unroll]
            for index in 0..RUN {
                run[index] = held[comptime!(turn as usize * RUN + index)];
            }
            if col < geometry.cols {
                let codes = encode_run(
                    &run,
                    &inverses,
                    row,
                    col,
                    &random,
                    zero,
                    comptime!(plan.encoding),
                );
                write_run::<V, NV>(
                    values,
                    &codes,
                    row,
                    col,
                    geometry.cols,
                    comptime!(plan.copies.storage),
                    comptime!(plan.copies.row_major_width),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_place_for_each_of_its_runs() {
        for cols in 1..=MAX_COLS {
            let Sharing { lanes, held } = Sharing::of_cols(cols);
            assert!(lanes.is_power_of_two() && lanes <= UNITS && held <= MOST_HELD);
            assert!(lanes * held * RUN >= cols, "{cols}: {lanes} x {held}");
        }
        // Widths of models, and of their feed-forward networks.
        for (cols, lanes, held) in [(768, 16, 3), (2048, 128, 1), (2304, 64, 3), (6144, 128, 3)] {
            assert_eq!(Sharing::of_cols(cols), Sharing { lanes, held }, "{cols}");
        }
    }
}
