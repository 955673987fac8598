//! Bit splitting: a gradient as the sum of two INT4 matrices (int4-hq-lss, section 4.2, equation 5).
//!
//! `dY ~ s_high high + s_low low`. The high part is `dY / s_high` rounded to nearest, with `s_high = absmax / 7`. What
//! it misses lies within `s_high / 2`, so that `s_low = s_high / 14` takes no second reduction over the matrix, and the
//! low part reaches 7 at most. It is rounded stochastically, which makes the sum unbiased: the high part, which is not,
//! is a shift that the low part takes back.
//!
//! Both parts of an element lie in one byte, the high part in the low nibble. So the kernel that splits writes one byte
//! for each element, and one that reads a part of a row reads whole bytes, 16 elements at once.
//!
//! The *stacked parts* are the matrix of `2 N` rows that has the high part above the low part: row `i` of the high part
//! is row `i`, that of the low part row `N + i`. [`leverage_score`](mod@crate::leverage_score) samples them.
//!
//! INT8 tensor cores can do without sampling: [`merge_parts`] gives `14 high + low`, one INT8 integer in `[-105, 105]`,
//! whose product costs as much as that of one part. It is the variant of section A.6, which keeps all rows with a score
//! above 0.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    byte_tile::{
        self, ByteCopies, LINE_WORDS, PATCH_ROWS, PATCH_WORDS, patch_position, write_patch,
        zero_patch,
    },
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, check_float, cube_grid, empty, has_u64,
        is_contiguous, or_unused, storage, zeros,
    },
    error::KernelError,
    exact,
    granularity::Granularity,
    layout::Layout,
    number::{
        Integer, Storage,
        int4::{NIBBLE_SIGNS, NIBBLES},
        integer::{self, integer_of, nearest_sum},
        storage::{RUN, pack_run},
    },
    quantize::{
        QuantizeSpec, Quantized, absmax,
        buffers::allocate,
        staged::{CHUNK, byte_dtype, byte_read_width, byte_width, read_bytes, write_words},
        tile::{read_run, run_read_width},
    },
    rounding::{RandomStream, Rounding, random_run, random_stream, stochastic_offset},
    row_lanes::{RowLanes, UNITS, row_and_first, row_sums},
    scale::fp32::scale_and_inverse_cube,
};

/// Steps of the low part in one of the high part.
pub const LOW_STEPS: f32 = 14.0;

/// Most columns of a matrix whose rows have squared norms below 2^32.
const MAX_COLS: usize = (u32::MAX / 49) as usize;

const LARGEST: f32 = Integer::INT4.largest() as f32;

/// A matrix `[N, C]` as the sum of two INT4 matrices, on the device.
#[derive(Debug)]
pub struct BitSplit<R: Runtime> {
    /// u8 `[N, C]`: the high part in the low nibble, the low part in the high nibble, in two's complement.
    pub parts: TensorHandle<R>,
    /// f32 `[2]`: the scale of the high part, and that of the low part, which is a 14th of it.
    pub scales: TensorHandle<R>,
    /// u32 `[2 N]`: the squared norms of the rows of the stacked parts, in integers.
    pub squared_norms: TensorHandle<R>,
    /// `[N, C]`.
    pub shape: [usize; 2],
}

impl<R: Runtime> Clone for BitSplit<R> {
    fn clone(&self) -> Self {
        Self {
            parts: self.parts.clone(),
            scales: self.scales.clone(),
            squared_norms: self.squared_norms.clone(),
            shape: self.shape,
        }
    }
}

impl<R: Runtime> BitSplit<R> {
    /// Accepts tensors as [`bit_split`] makes them.
    pub(crate) fn check(&self, operation: &'static str) -> Result<(), KernelError> {
        let remedy = "pass what `bit_split` made";
        let [rows, _] = self.shape;
        check_dtype(operation, "parts", &self.parts, storage::<u8>(), remedy)?;
        check_dtype(operation, "scales", &self.scales, storage::<f32>(), remedy)?;
        let norms = &self.squared_norms;
        check_dtype(operation, "squared_norms", norms, storage::<u32>(), remedy)?;
        let tensors = [&self.parts, &self.scales, norms];
        let fits = self.parts.shape()[..] == self.shape
            && self.scales.shape()[..] == [2]
            && norms.shape()[..] == [2 * rows]
            && tensors.into_iter().all(is_contiguous);
        if fits {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!(
                "a split of {:?} with parts {:?}, scales {:?} and squared norms {:?}",
                self.shape,
                self.parts.shape(),
                self.scales.shape(),
                norms.shape()
            ),
            remedy,
        })
    }
}

/// Splits `x` into two INT4 matrices, and finds the squared norms of their rows, in one read after that for the largest
/// magnitude.
///
/// - `x`: f32, f16 or bf16 `[N, C]`, any strides.
/// - `rounding`: of the low part; the high part is always rounded to nearest.
///
/// The numbers are those of [`reference::bit_split`](crate::reference::bit_split), to the bit. If `x`
/// holds NaN or an infinity, both scales are NaN and all integers 0.
///
/// # Errors
///
/// When `x` is no float tensor `[N, C]`, or has more than 87,652,393 columns.
pub fn bit_split<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    rounding: Rounding,
) -> Result<BitSplit<R>, KernelError> {
    const OPERATION: &str = "bit_split";
    let view = MatrixView::new(OPERATION, x)?;
    check_float(client, OPERATION, "x", x.dtype)?;
    let [rows, cols] = [view.shape.rows, view.shape.cols];
    if view.batched || cols > MAX_COLS {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("a tensor of shape {:?}", x.shape()),
            remedy: "pass one matrix [N, C] of at most 87,652,393 columns",
        });
    }
    if view.shape.num_elements() == 0 {
        return Ok(BitSplit {
            parts: empty(client, vec![rows, cols], storage::<u8>()),
            scales: zeros(client, vec![2], storage::<f32>()),
            squared_norms: zeros(client, vec![2 * rows], storage::<u32>()),
            shape: [rows, cols],
        });
    }
    let split = BitSplit {
        parts: empty(client, vec![rows, cols], storage::<u8>()),
        scales: empty(client, vec![2], storage::<f32>()),
        squared_norms: empty(client, vec![2 * rows], storage::<u32>()),
        shape: [rows, cols],
    };
    let maximum = absmax::launch(client, x, &view, Granularity::Tensor);
    let plan = SplitPlan {
        lanes: RowLanes::of_cols(cols),
        stochastic: rounding != Rounding::Nearest,
        wide: has_u64(client),
        read: run_read_width(x, &view),
        write: byte_width(cols, RUN),
    };
    // SAFETY: every access is guarded by the shape in `geometry`, for which the outputs were allocated.
    #[allow(unsafe_code)]
    unsafe {
        bit_split_kernel::launch_unchecked::<R>(
            client,
            cube_grid(plan.lanes.cubes(rows)),
            CubeDim::new_1d(UNITS as u32),
            plan.read,
            plan.write.div_ceil(4),
            array(x.clone()),
            array(maximum),
            array(split.parts.clone()),
            array(split.scales.clone()),
            array(split.squared_norms.clone()),
            view.geometry(),
            random_stream(rounding),
            0,
            plan,
            x.dtype,
            byte_dtype(plan.write),
        );
    }
    Ok(split)
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SplitPlan {
    lanes: RowLanes,
    stochastic: bool,
    /// True where the device multiplies to 64 bits.
    wide: bool,
    /// Elements read, and bytes written, at once.
    read: usize,
    write: usize,
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn bit_split_kernel<F: Numeric, NX: Size, V: Numeric, NV: Size>(
    x: &Array<Vector<F, NX>>,
    maximum: &Array<f32>,
    parts: &mut Array<Vector<V, NV>>,
    scales: &mut Array<f32>,
    squared_norms: &mut Array<u32>,
    geometry: MatrixGeometry,
    random: RandomStream,
    zero: u32,
    #[comptime] plan: SplitPlan,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _parts_dtype: StorageType,
) {
    let (scale, inverse) = scale_and_inverse_cube(u32::reinterpret(maximum[0]), LARGEST);
    if CUBE_POS == 0 && UNIT_POS == 0 {
        scales[0] = scale;
        scales[1] = scale / LOW_STEPS;
    }
    let (row, first) = row_and_first(plan.lanes);
    // Of the high and of the low part.
    let mut norms = Array::<u32>::new(2usize);
    norms[0] = 0u32;
    norms[1] = 0u32;
    if row < geometry.rows {
        let mut col = first;
        while col < geometry.cols {
            let run = read_run::<F, NX>(x, &geometry, 0u32, row, col, plan.read);
            let split = split_run(&run, inverse, row, col, &random, zero, plan);
            norms[0] += split.high_norm;
            norms[1] += split.low_norm;
            write_words::<V, NV>(
                parts,
                &pack_run(&split.bytes, comptime!(Storage::Bytes)),
                row * geometry.cols,
                col,
                geometry.cols,
                comptime!(RUN / 4),
                plan.write,
                false,
            );
            col += comptime!(plan.lanes.stride() as u32);
        }
    }
    row_sums(&mut norms, 2usize, plan.lanes);
    if row < geometry.rows && first == 0 {
        squared_norms[row as usize] = norms[0];
        squared_norms[(geometry.rows + row) as usize] = norms[1];
    }
}

/// The parts of a run: a byte for each element, and the sums of the squares.
#[derive(CubeType)]
struct SplitRun {
    bytes: Array<u32>,
    high_norm: u32,
    low_norm: u32,
}

#[cube]
fn split_run(
    run: &Array<f32>,
    inverse: f32,
    row: u32,
    col: u32,
    random: &RandomStream,
    zero: u32,
    #[comptime] plan: SplitPlan,
) -> SplitRun {
    let words = random_run(row, col, random, plan.stochastic, plan.wide);
    let mut bytes = Array::<u32>::new(RUN);
    // Sums of squares up to 49 are exact.
    let mut high_norm = 0.0f32;
    let mut low_norm = 0.0f32;
    #[unroll]
    for index in 0..RUN {
        // A product of inverse 0 with NaN or infinity is NaN: take it out before it becomes an integer.
        let product = exact::product(run[index], inverse, zero);
        let v = clamp(
            select(inverse == 0.0f32, 0.0f32, product),
            -LARGEST,
            LARGEST,
        );
        let sum = nearest_sum(v);
        let high = integer_of(sum, zero);
        let rest = exact::product(v - high, LOW_STEPS, zero);
        let low_code = if comptime!(plan.stochastic) {
            let offset = stochastic_offset(words[comptime!(index / 2)], zero, index);
            integer::encode_stochastic(rest, offset, comptime!(Integer::INT4))
        } else {
            integer::encode_nearest(rest, comptime!(Integer::INT4))
        };
        let low = integer::decode(low_code, comptime!(Integer::INT4));
        bytes[index] = (u32::reinterpret(sum) & 0xf) | (low_code << 4);
        high_norm += high * high;
        low_norm += low * low;
    }
    SplitRun {
        bytes,
        high_norm: u32::cast_from(high_norm),
        low_norm: u32::cast_from(low_norm),
    }
}

/// Both parts as one INT8 matrix `[N, C]`: the integers `14 high + low`, exactly, under the scale of the low part,
/// [`Granularity::Tensor`].
///
/// # Errors
///
/// When `split` holds tensors of other shapes or element types than [`BitSplit`] says.
pub fn merge_parts<R: Runtime>(
    client: &ComputeClient<R>,
    split: &BitSplit<R>,
    layout: Layout,
) -> Result<Quantized<R>, KernelError> {
    split.check("merge_parts")?;
    let [rows, cols] = split.shape;
    let view = MatrixView::contiguous(rows, cols);
    let spec = QuantizeSpec::int8(Granularity::Tensor).with_layout(layout);
    let output = allocate(client, &view, &spec);
    if rows * cols == 0 {
        let scales = zeros(client, vec![1, 1], storage::<f32>());
        return Ok(Quantized { scales, ..output });
    }
    let copies = ByteCopies::new(layout, rows, cols);
    let [
        (row_major_vector, row_major_dtype),
        (transposed_vector, transposed_dtype),
    ] = copies.vectors();
    let copy = |copy: &Option<TensorHandle<R>>| {
        array(or_unused(copy.as_ref(), &split.parts, storage::<i8>()))
    };
    let read = byte_read_width(&split.parts, cols, CHUNK);
    // SAFETY: every access is guarded by the shape, for which the outputs were allocated and the parts checked.
    #[allow(unsafe_code)]
    unsafe {
        merge_kernel::launch_unchecked::<R>(
            client,
            cube_grid(byte_tile::tiles(rows, cols)),
            CubeDim::new_1d(byte_tile::UNITS as u32),
            read.div_ceil(4),
            row_major_vector,
            transposed_vector,
            array(split.parts.clone()),
            array(split.scales.clone()),
            copy(&output.values),
            copy(&output.transposed),
            array(output.scales.clone()),
            rows as u32,
            cols as u32,
            read,
            copies,
            byte_dtype(read),
            row_major_dtype,
            transposed_dtype,
        );
    }
    Ok(output)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn merge_kernel<S: Numeric, NS: Size, V: Numeric, NV: Size, T: Numeric, NT: Size>(
    parts: &Array<Vector<S, NS>>,
    part_scales: &Array<f32>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    scales: &mut Array<f32>,
    rows: u32,
    cols: u32,
    #[comptime] read: usize,
    #[comptime] copies: ByteCopies,
    #[define(S)] _parts_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
) {
    let at = patch_position(cols);
    if at.first_row >= rows {
        terminate!();
    }
    if CUBE_POS == 0 && UNIT_POS == 0 {
        scales[0] = part_scales[1];
    }
    let mut lines = zero_patch();
    #[unroll]
    for line in 0..comptime!(PATCH_ROWS as u32) {
        let row = at.first_row + at.tile_row + line;
        if row < rows {
            read_bytes::<S, NS>(
                parts,
                &mut lines,
                row * cols,
                at.first_col + at.tile_col,
                cols,
                comptime!(line as usize * LINE_WORDS),
                LINE_WORDS,
                read,
            );
        }
    }
    #[unroll]
    for word in 0..PATCH_WORDS {
        lines[word] = merged(lines[word]);
    }
    write_patch::<V, NV, T, NT>(values, transposed, &lines, &at, 0u32, rows, cols, copies);
}

/// `14 high + low` of four elements, in two's complement.
///
/// A nibble with its sign bit turned is its integer plus 8. With these no byte of the sum exceeds 225, and so none
/// carries into the next one: each is the integer plus 120, to which 8 more make it the integer with the sign turned.
#[cube]
fn merged(bytes: u32) -> u32 {
    let high = (bytes & NIBBLES) ^ NIBBLE_SIGNS;
    let low = ((bytes >> 4) & NIBBLES) ^ NIBBLE_SIGNS;
    (high * comptime!(LOW_STEPS as u32) + low + NIBBLE_SIGNS) ^ 0x8080_8080u32
}
