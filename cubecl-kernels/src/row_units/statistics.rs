//! What norms find of rows: the inverse root mean square, of layer normalization that of what is left without the mean.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty, or_unused, storage},
    error::KernelError,
    exact,
    operator_input::{OperatorInput, Pieces},
    quantize::whole_runs::RunGrid,
};

use super::{
    RowUnits, check_rows_of_input, held_input, inverse_cols,
    norm::{RowStatistics, find_statistics},
    row_sum, vector_index,
};

/// The mean, of layer normalization, and the inverse, f32 `[rows]` each.
pub(crate) type OfRows<R> = (Option<TensorHandle<R>>, TensorHandle<R>);

/// Those of the rows of `x`, without an output, to the bit those that norms give beside theirs.
pub(crate) fn row_statistics<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: OperatorInput<R>,
    epsilon: f32,
    centred: bool,
) -> Result<OfRows<R>, KernelError> {
    let [rows, cols] = check_rows_of_input(client, operation, &x)?;
    let of_rows = || empty(client, vec![rows], storage::<f32>());
    let (mean, inverse) = (centred.then(of_rows), of_rows());
    let statistics = RowStatistics {
        mean: mean.as_ref(),
        inverse: &inverse,
    };
    if rows > 0 && !find_statistics(client, x, [rows, cols], epsilon, statistics) {
        let dtype = x.dtype();
        let x = x.prepare(client, operation)?;
        // As with an output, so that the order of sums is one.
        let output = or_unused(None, &inverse, dtype);
        let pieces = Pieces::of(&[&x], cols, &[&output]);
        let units = RowUnits::new(client, cols, pieces.len);
        let means = or_unused(mean.as_ref(), &inverse, storage::<f32>());
        // SAFETY: rows are guarded by their number, for which the outputs were allocated, columns by their own; scales lie
        // inside of their buffers, whose shapes were compared with the matrix, and stand-ins are neither read nor written.
        #[allow(unsafe_code)]
        unsafe {
            row_statistics_kernel::launch_unchecked::<R>(
                client,
                cube_grid(rows.div_ceil(units.rows)),
                CubeDim::new_1d(units.of_cube() as u32),
                pieces.read,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(means),
                array(inverse.clone()),
                x.grid(),
                rows as u32,
                epsilon,
                units,
                pieces,
                centred,
                x.values().dtype,
                x.scales().dtype,
                dtype,
            );
        }
    }
    Ok((mean, inverse))
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn row_statistics_kernel<X: Numeric, S: Numeric, F: Numeric, NX: Size>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    mean: &mut Array<f32>,
    inverse: &mut Array<f32>,
    grid: RunGrid,
    rows: u32,
    epsilon: f32,
    #[comptime] units: RowUnits,
    #[comptime] pieces: Pieces,
    #[comptime] centred: bool,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(units.rows as u32);
    if first >= rows {
        terminate!();
    }
    let row = first + UNIT_POS / comptime!(units.lanes as u32);
    // Units past the last row take part in what the others wait for, and write nothing.
    let read_row = min(row, rows - 1);
    let writes = row < rows && UNIT_POS % comptime!(units.lanes as u32) == 0;
    let mut values =
        held_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, read_row, units, pieces);
    if comptime!(centred) {
        let center = take_mean(&mut values, grid.zero, units);
        if writes {
            mean[row as usize] = center;
        }
    }
    let root = inverse_root(&values, epsilon, grid.zero, units);
    if writes {
        inverse[row as usize] = root;
    }
}

/// The mean of the row of which this unit holds these elements, from which it takes it.
#[cube]
pub(crate) fn take_mean(values: &mut Array<f32>, zero: u32, #[comptime] units: RowUnits) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..comptime!(units.elements()) {
        sum += values[index];
    }
    // As of squares.
    let mean = exact::product(row_sum(sum, units), inverse_cols(units), zero);
    subtract(values, mean, units);
    mean
}

/// The inverse root mean square of the row of which this unit holds these elements.
#[cube]
pub(crate) fn inverse_root(
    values: &Array<f32>,
    epsilon: f32,
    zero: u32,
    #[comptime] units: RowUnits,
) -> f32 {
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..comptime!(units.elements()) {
        squares += values[index] * values[index];
    }
    // Not in one instruction with the sum: the bits of kernels that do more beside it are the same.
    let mean = exact::product(row_sum(squares, units), inverse_cols(units), zero);
    (mean + epsilon).inverse_sqrt()
}

/// Subtracts the mean from the elements of a row that this unit holds. Past the end of the row they remain 0, so that
/// no sum counts them.
#[cube]
pub(crate) fn subtract(held: &mut Array<f32>, mean: f32, #[comptime] units: RowUnits) {
    #[unroll]
    for piece in 0..units.held {
        let (_, is_inside) = vector_index(piece, units);
        #[unroll]
        for lane in 0..units.width {
            let slot = comptime!(piece * units.width + lane);
            held[slot] -= mean;
            if comptime!(units.is_last(piece)) {
                held[slot] = select(is_inside, held[slot], 0.0f32);
            }
        }
    }
}
