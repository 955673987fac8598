//! Norms of rows of INT4 codes, and the scores that follow from norms.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    bit_splitting::LOW_STEPS,
    device::{array, check_contiguous, check_dtype, cube_grid, empty, or_unused, storage, zeros},
    error::KernelError,
    number::{Integer, Storage, integer, storage::RUN},
    quantize::{
        Quantized,
        staged::{byte_dtype, byte_read_width, read_bytes},
    },
    row_lanes::{RowLanes, UNITS, row_and_first, row_sums},
};

use super::{MAX_STACKED_ROWS, gather::check_int4};

/// Bytes of a run of nibbles.
const RUN_BYTES: usize = RUN / 2;

/// The squared Euclidean norms of the rows of an INT4 matrix, in integers: u32 `[N]`.
///
/// - `x`: INT4 with a scale for the matrix, `[N, D]`, of which the row-major copy was written.
///
/// # Errors
///
/// When `x` is another matrix, or holds tensors of other shapes or element types than [`Quantized`] says.
pub fn int4_row_norms<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Quantized<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let values = check_int4("int4_row_norms", x)?;
    let (rows, cols) = (x.shape.rows, x.shape.cols);
    if rows * cols == 0 {
        return Ok(zeros(client, vec![rows], storage::<u32>()));
    }
    let norms = empty(client, vec![rows], storage::<u32>());
    let row_bytes = Storage::Nibbles.stored_cols(cols);
    let read = byte_read_width(values, row_bytes, RUN_BYTES);
    let lanes = RowLanes::of_cols(cols);
    // SAFETY: every access is guarded by the shape, for which the values were checked and the norms allocated.
    #[allow(unsafe_code)]
    unsafe {
        int4_row_norms_kernel::launch_unchecked::<R>(
            client,
            cube_grid(lanes.cubes(rows)),
            CubeDim::new_1d(UNITS as u32),
            read.div_ceil(4),
            array(values.clone()),
            array(norms.clone()),
            rows as u32,
            row_bytes as u32,
            lanes,
            read,
            byte_dtype(read),
        );
    }
    Ok(norms)
}

#[cube(launch_unchecked)]
fn int4_row_norms_kernel<V: Numeric, NV: Size>(
    values: &Array<Vector<V, NV>>,
    norms: &mut Array<u32>,
    rows: u32,
    row_bytes: u32,
    #[comptime] lanes: RowLanes,
    #[comptime] read: usize,
    #[define(V)] _values_dtype: StorageType,
) {
    let (row, first) = row_and_first(lanes);
    let mut norm = Array::<u32>::new(1usize);
    norm[0] = 0u32;
    if row < rows {
        let mut byte = first / 2;
        while byte < row_bytes {
            let mut words = Array::<u32>::new(comptime!(RUN_BYTES / 4));
            #[unroll]
            for word in 0..comptime!(RUN_BYTES / 4) {
                words[word] = 0u32;
            }
            let start = row * row_bytes;
            let count = comptime!(RUN_BYTES / 4);
            read_bytes::<V, NV>(
                values, &mut words, start, byte, row_bytes, 0usize, count, read,
            );
            // Sums of squares up to 49 are exact.
            let mut of_run = 0.0f32;
            #[unroll]
            for index in 0..comptime!(RUN as u32) {
                let code = words[comptime!(index as usize / 8)] >> comptime!(index % 8 * 4);
                let integer = integer::decode(code, comptime!(Integer::INT4));
                of_run += integer * integer;
            }
            norm[0] += u32::cast_from(of_run);
            byte += comptime!(lanes.stride() as u32 / 2);
        }
    }
    row_sums(&mut norm, 1usize, lanes);
    if row < rows && first == 0 {
        norms[row as usize] = norm[0];
    }
}

/// The leverage scores of the rows of stacked parts, in units of the scale of the low part: f32 `[2 N]`.
///
/// - `part_norms`: u32 `[2 N]`, [`BitSplit::squared_norms`](crate::bit_splitting::BitSplit).
/// - `x_norms`: u32 `[N]`, [`int4_row_norms`], for the weight gradient; none for the gradient of the activation.
///
/// Both contiguous. The numbers are those of
/// [`reference::leverage_scores`](crate::reference::leverage_score::leverage_scores), to the bit. Both products may
/// share the scores of one of them, as the authors do (section A.6).
///
/// # Errors
///
/// When shapes or element types differ from these, or there are more than 2^24 stacked rows.
pub fn leverage_scores<R: Runtime>(
    client: &ComputeClient<R>,
    part_norms: &TensorHandle<R>,
    x_norms: Option<&TensorHandle<R>>,
) -> Result<TensorHandle<R>, KernelError> {
    const OPERATION: &str = "leverage_scores";
    let remedy = "pass squared norms in u32";
    check_dtype(
        OPERATION,
        "part_norms",
        part_norms,
        storage::<u32>(),
        remedy,
    )?;
    let stacked = check_contiguous(OPERATION, part_norms)?;
    let mut of_x = stacked / 2;
    if let Some(x_norms) = x_norms {
        check_dtype(OPERATION, "x_norms", x_norms, storage::<u32>(), remedy)?;
        of_x = check_contiguous(OPERATION, x_norms)?;
    }
    if stacked != 2 * of_x || stacked > MAX_STACKED_ROWS {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "squared norms of parts {:?}, of X {:?}",
                part_norms.shape(),
                x_norms.map(|norms| norms.shape().to_vec())
            ),
            remedy: "pass [2 N] and [N], with N of at most 2^23",
        });
    }
    let scores = empty(client, vec![stacked], storage::<f32>());
    if stacked > 0 {
        // SAFETY: the kernel guards its index with the number of stacked rows.
        #[allow(unsafe_code)]
        unsafe {
            leverage_scores_kernel::launch_unchecked::<R>(
                client,
                cube_grid(stacked.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                array(part_norms.clone()),
                array(or_unused(x_norms, part_norms, storage::<u32>())),
                array(scores.clone()),
                of_x as u32,
                x_norms.is_some(),
            );
        }
    }
    Ok(scores)
}

#[cube(launch_unchecked)]
fn leverage_scores_kernel(
    part_norms: &Array<u32>,
    x_norms: &Array<u32>,
    scores: &mut Array<f32>,
    rows: u32,
    #[comptime] with_x: bool,
) {
    let row = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if row < rows * 2 {
        let mut score = root_cube(part_norms[row as usize]);
        if comptime!(with_x) {
            score *= root_cube(x_norms[(row % rows) as usize]);
        }
        scores[row as usize] = select(row < rows, score * LOW_STEPS, score);
    }
}

/// The square root of an integer, to 16 bits: see
/// [`reference::leverage_score::root`](crate::reference::leverage_score::root).
pub(crate) fn root(n: u32) -> f32 {
    let doublings = n.leading_zeros() / 2;
    // The integer and a half that two roots meet at is no root of an integer: f64 tells them apart.
    let root = f64::from(n.checked_shl(2 * doublings).unwrap_or_default()).sqrt();
    root.round() as f32 / (1u32 << doublings) as f32
}

/// [`root`] in a kernel.
///
/// The device's root may be off by a little; the squares that decide are exact.
#[cube]
fn root_cube(n: u32) -> f32 {
    let mut m = n;
    let mut unit = 1.0f32;
    // By powers of 4 until the upper two bits are not 0.
    #[unroll]
    for step in 0..4u32 {
        let doublings = comptime!(8u32 >> step);
        if m < comptime!(1u32 << (32 - 2 * doublings)) {
            m <<= comptime!(2 * doublings);
            unit *= comptime!(1.0 / (1u32 << doublings) as f32);
        }
    }
    let estimate = min(u32::cast_from(f32::cast_from(m).sqrt()), 0xffffu32);
    let at_most = select(estimate * estimate > m, estimate - 1, estimate);
    let rest = m - at_most * at_most;
    let floor = select(rest > 2 * at_most, at_most + 1, at_most);
    let rest = m - floor * floor;
    f32::cast_from(select(rest > floor, floor + 1, floor)) * unit
}
