//! The kept rows of the stacked parts times their factors, rounded to INT8 once more.
//!
//! A tile is a block. A unit holds the integers of its patch in 16 words, finds their largest product with the factors
//! of their rows, and multiplies and rounds them when it knows the maximum of the block.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    bit_splitting::BitSplit,
    byte_tile::{
        self, ByteCopies, LINE_WORDS, PATCH_ROWS, PATCH_WORDS, patch_position, write_patch,
    },
    device::{array, cube_grid, has_u64, or_unused, storage},
    error::KernelError,
    exact,
    granularity::Granularity,
    layout::Layout,
    number::{Integer, integer},
    quantize::{
        QuantizeSpec, Quantized,
        buffers::allocate,
        staged::{TILE, byte_dtype},
        tile::segment_max,
    },
    rounding::{
        RandomStream, Rounding, magnitude_bits, random_run, random_stream, stochastic_offset,
    },
    scale::fp32::scale_and_inverse_cube,
};

use super::{
    RowSample, SCALED_BLOCK,
    gather::{Source, Stored, gathered_patch, gathered_view},
};

const LARGEST: f32 = Integer::INT8.largest() as f32;

/// The kept rows of the stacked parts times their factors, rounded to INT8 `[capacity, C]`, [`Granularity::Block`] of
/// 128: the left operand of `dW = dY^T X` over the kept rows, beside
/// [`gather_int4_rows`](super::gather_int4_rows).
///
/// - `rounding`: stochastic, by a key of its own, keeps the estimate unbiased.
/// - `layout`: the product over the rows reads the transposed copy.
///
/// The numbers are those that [`quantize`](crate::quantize::quantize) gives for the f32 matrix of the products of
/// integers and factors, to the bit. A block whose rows have a factor of NaN has scale NaN.
///
/// # Errors
///
/// As [`gather_parts`](super::gather_parts).
pub fn gather_scaled<R: Runtime>(
    client: &ComputeClient<R>,
    split: &BitSplit<R>,
    sample: &RowSample<R>,
    rounding: Rounding,
    layout: Layout,
) -> Result<Quantized<R>, KernelError> {
    const OPERATION: &str = "gather_scaled";
    split.check(OPERATION)?;
    let [stored_rows, cols] = split.shape;
    let view = gathered_view(OPERATION, sample, stored_rows, cols)?;
    let spec = QuantizeSpec::int8(Granularity::Block(SCALED_BLOCK)).with_layout(layout);
    let output = allocate(client, &view, &spec);
    let rows = view.shape.rows;
    if rows * cols == 0 {
        return Ok(output);
    }
    let plan = ScaledPlan {
        stored: Stored::new(Source::Parts, &split.parts, cols),
        stochastic: rounding != Rounding::Nearest,
        wide: has_u64(client),
        copies: ByteCopies::new(layout, rows, cols),
    };
    let [
        (row_major_vector, row_major_dtype),
        (transposed_vector, transposed_dtype),
    ] = plan.copies.vectors();
    let copy = |copy: &Option<TensorHandle<R>>| {
        array(or_unused(copy.as_ref(), &split.parts, storage::<i8>()))
    };
    // SAFETY: every access is guarded by the shapes, for which the outputs were allocated and the rest checked; a kept
    // row that is none of the stacked ones counts as padding.
    #[allow(unsafe_code)]
    unsafe {
        gather_scaled_kernel::launch_unchecked::<R>(
            client,
            cube_grid(byte_tile::tiles(rows, cols)),
            CubeDim::new_1d(byte_tile::UNITS as u32),
            plan.stored.read.div_ceil(4),
            row_major_vector,
            transposed_vector,
            array(split.parts.clone()),
            array(sample.rows.clone()),
            array(sample.factors.clone()),
            copy(&output.values),
            copy(&output.transposed),
            array(output.scales.clone()),
            stored_rows as u32,
            rows as u32,
            cols as u32,
            random_stream(rounding),
            0,
            plan,
            byte_dtype(plan.stored.read),
            row_major_dtype,
            transposed_dtype,
        );
    }
    Ok(output)
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ScaledPlan {
    stored: Stored,
    stochastic: bool,
    /// True where the device multiplies to 64 bits.
    wide: bool,
    copies: ByteCopies,
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gather_scaled_kernel<S: Numeric, NS: Size, V: Numeric, NV: Size, T: Numeric, NT: Size>(
    parts: &Array<Vector<S, NS>>,
    kept: &Array<i32>,
    factors: &Array<f32>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    scales: &mut Array<f32>,
    stored_rows: u32,
    rows: u32,
    cols: u32,
    random: RandomStream,
    zero: u32,
    #[comptime] plan: ScaledPlan,
    #[define(S)] _parts_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    comptime!(assert!(SCALED_BLOCK == TILE, "a tile is a block"));
    let at = patch_position(cols);
    if at.first_row >= rows {
        terminate!();
    }
    let mut lines = gathered_patch::<S, NS>(parts, kept, stored_rows, rows, cols, &at, plan.stored);
    let mut of_rows = Array::<f32>::new(PATCH_ROWS);
    #[unroll]
    for line in 0..comptime!(PATCH_ROWS as u32) {
        let slot = at.first_row + at.tile_row + line;
        let mut factor = 0.0f32;
        if slot < rows && at.first_col + at.tile_col < cols {
            factor = factors[slot as usize];
        }
        of_rows[line as usize] = factor;
    }
    let mut bits = 0u32;
    #[unroll]
    for word in 0..PATCH_WORDS {
        #[unroll]
        for lane in 0..4u32 {
            let value = integer_of(lines[word], lane) * of_rows[comptime!(word / LINE_WORDS)];
            bits = max(bits, magnitude_bits(value));
        }
    }
    let (scale, inverse) = scale_and_inverse_cube(
        segment_max(bits, byte_tile::UNITS, byte_tile::UNITS),
        LARGEST,
    );
    if UNIT_POS == 0 {
        scales[CUBE_POS] = scale;
    }
    #[unroll]
    for line in 0..PATCH_ROWS {
        let row = at.first_row + at.tile_row + comptime!(line as u32);
        let first = comptime!(line * LINE_WORDS);
        scale_line(
            &mut lines,
            of_rows[line],
            inverse,
            row,
            at.first_col + at.tile_col,
            &random,
            zero,
            first,
            plan,
        );
    }
    write_patch::<V, NV, T, NT>(
        values,
        transposed,
        &lines,
        &at,
        0u32,
        rows,
        cols,
        plan.copies,
    );
}

/// Rounds the 16 integers of a row in `lines[first..]` times their factor.
#[cube]
#[allow(clippy::too_many_arguments)]
fn scale_line(
    lines: &mut Array<u32>,
    factor: f32,
    inverse: f32,
    row: u32,
    col: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] first: usize,
    #[comptime] plan: ScaledPlan,
) {
    let words = random_run(row, col, random, plan.stochastic, plan.wide);
    #[unroll]
    for word in 0..LINE_WORDS {
        let integers = lines[comptime!(first + word)];
        let mut bytes = 0u32;
        #[unroll]
        for lane in 0..4u32 {
            // A product of inverse 0 with NaN or infinity is NaN: take it out before it becomes an integer.
            let value = integer_of(integers, lane) * factor;
            let product = exact::product(value, inverse, zero);
            let v = select(inverse == 0.0f32, 0.0f32, product);
            let v = clamp(v, -LARGEST, LARGEST);
            let index = comptime!(word * 4 + lane as usize);
            let code = if comptime!(plan.stochastic) {
                let offset = stochastic_offset(words[comptime!(index / 2)], zero, index);
                integer::encode_stochastic(v, offset, comptime!(Integer::INT8))
            } else {
                integer::encode_nearest(v, comptime!(Integer::INT8))
            };
            bytes |= code << comptime!(lane * 8);
        }
        lines[comptime!(first + word)] = bytes;
    }
}

/// The integer of a byte of a word.
#[cube]
fn integer_of(bytes: u32, #[comptime] lane: u32) -> f32 {
    integer::decode(bytes >> comptime!(lane * 8), comptime!(Integer::INT8))
}
