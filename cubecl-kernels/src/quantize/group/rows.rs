//! Groups of a matrix without gaps whose rows are whole ones, in a row-major copy to nearest: what neighbouring units read
//! and write follows one another, and a unit has several pieces in flight.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    device::{array, cube_grid, vector_width},
    operator_input::read_piece,
};

use super::super::{
    Input, Quantized,
    beside::{CopyArgs, CubePieces, GroupCopy, write_group_copy},
    tile::UNITS,
};

/// Pieces that a unit has.
const PIECES: usize = 4;

/// Quantizes the input, if it is such a matrix, and its copy such a one. Says whether it did.
///
/// # Safety
///
/// `output` was allocated for `input`, which is not empty.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    output: &Quantized<R>,
) -> bool {
    let (x, shape) = (input.x, input.view.shape);
    let len = vector_width(shape.cols, &[x]);
    let pieces = CubePieces {
        len,
        units: UNITS,
        side_by_side: UNITS,
    };
    let Some(copy) = GroupCopy::of(client, input, pieces) else {
        return false;
    };
    let count = shape.num_elements() / len;
    let to = CopyArgs::to(copy, output);
    // SAFETY: reads are of pieces that there are, and so are writes, by the caller's promise.
    unsafe {
        quantize_rows_kernel::launch_unchecked::<R>(
            client,
            cube_grid(count.div_ceil(UNITS * PIECES)),
            CubeDim::new_1d(UNITS as u32),
            len,
            to.words,
            array(x.clone()),
            to.values,
            array(to.scales.clone()),
            count as u32,
            to.largest,
            0,
            len,
            copy,
            x.dtype,
            to.scales.dtype,
        );
    }
    true
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_rows_kernel<F: Numeric, N: Size, NV: Size, S: Numeric>(
    x: &Array<Vector<F, N>>,
    values: &mut Array<Vector<u32, NV>>,
    scales: &mut Array<S>,
    count: u32,
    largest: f32,
    zero: u32,
    #[comptime] len: usize,
    #[comptime] copy: GroupCopy,
    #[define(F)] _dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!((UNITS * PIECES) as u32) + UNIT_POS;
    let mut held = Array::<f32>::new(comptime!(PIECES * len));
    #[unroll]
    for index in 0..PIECES {
        // Units past the last piece wait with the others.
        let number = min(first + comptime!((index * UNITS) as u32), count - 1);
        let piece = read_piece::<F, N>(x, number, len, len);
        #[unroll]
        for lane in 0..len {
            held[comptime!(index * len + lane)] = piece[lane];
        }
    }
    #[unroll]
    for index in 0..PIECES {
        let mut piece = Array::<f32>::new(len);
        #[unroll]
        for lane in 0..len {
            piece[lane] = held[comptime!(index * len + lane)];
        }
        write_group_copy::<NV, S>(
            values,
            scales,
            &piece,
            first + comptime!((index * UNITS) as u32),
            count,
            largest,
            zero,
            copy,
        );
    }
}
