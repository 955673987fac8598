//! The gradient of an embedding's table.
//!
//! Row `v` of the gradient is the sum of the rows of the output's gradient whose index is `v`. Atomic additions would
//! come in another order on each run, and one unit a column would take the tokens one after the other. Here tokens
//! are first sorted by their index, stably. Cubes then read stretches of the order, all rows of a stretch at once, and
//! add up those of each index as they come: in ascending order of tokens. A sum that a stretch leaves unfinished, the
//! same cube goes on with, more rows at once.
//!
//! A token's place in the order is the number of tokens before it: those of smaller index, and earlier ones of the
//! same. To count them takes a comparison for each pair of tokens, whatever the size of the table. On an H200 that
//! should be about 20 µs for 16,384 tokens, and 1.5 ms for 131,072: by arithmetic, not measured. An index that many
//! tokens have takes as long as it has stretches, one after the other.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_float, cube_grid, empty, storage, vector_width},
    error::KernelError,
};

const OPERATION: &str = "embedding_gradient";
/// Tokens that a cube counts for: each has a unit in each of the parts.
const TOKENS: usize = 32;
/// Parts of a tile of indices.
const PARTS: usize = 8;
const UNITS: usize = TOKENS * PARTS;
/// Indices that a cube compares with at a time.
const TILE: usize = 2048;
/// Indices of a part of a tile.
const PART: usize = TILE / PARTS;
/// Places of the order that a cube reads at a time.
const PLACES: usize = 32;
/// Vectors of a row that a cube adds up, each a unit's.
const LANES: usize = 32;
/// Places that a cube reads at a time behind its own.
const AHEAD: usize = 64;
/// Vectors that a unit reads at a time.
const TURNS: usize = PLACES * LANES / UNITS;
/// The key of what is no token: larger than those of tokens, and no larger than a signed number may be.
const NONE: u32 = i32::MAX as u32;

type Quad = Vector<u32, Const<4>>;

/// The gradient of an embedding's table, `[rows, cols]`: row `v` is the sum of the rows of `gradient` whose index is
/// `v`, in FP32, from 0, in ascending order of tokens, rounded once at the end. It is 0 where no token has that index.
///
/// - `indices`: i32, i64 or u32 `[tokens]`, contiguous. Tokens whose index is negative, or not below `rows`, are left
///   out.
/// - `gradient`: f32, f16 or bf16 `[tokens, cols]`, contiguous. The result is of its type.
///
/// # Errors
///
/// When shapes or element types differ from these, the table has 2^31 elements or rows or more, or the gradient 2^32
/// elements or more.
pub fn embedding_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    indices: &TensorHandle<R>,
    gradient: &TensorHandle<R>,
    rows: usize,
) -> Result<TensorHandle<R>, KernelError> {
    let [tokens, cols] = check(client, indices, gradient, rows)?;
    let output = empty(client, vec![rows, cols], gradient.dtype);
    if rows * cols == 0 {
        return Ok(output);
    }
    let width = vector_width(cols, &[gradient]);
    let vectors = cols / width;
    // SAFETY: accesses are guarded by the number of vectors, for which the output was allocated.
    #[allow(unsafe_code)]
    unsafe {
        zero_kernel::launch_unchecked::<R>(
            client,
            cube_grid((rows * vectors).div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(output.clone()),
            (rows * vectors) as u32,
            gradient.dtype,
        );
    }
    if tokens == 0 {
        return Ok(output);
    }
    let sorted = || empty(client, vec![tokens], storage::<u32>());
    let (keys, order) = (sorted(), sorted());
    // SAFETY: accesses are guarded by the number of tokens, which have a place each.
    #[allow(unsafe_code)]
    unsafe {
        sort_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tokens.div_ceil(TOKENS)),
            CubeDim::new_1d(UNITS as u32),
            array(indices.clone()),
            array(keys.clone()),
            array(order.clone()),
            tokens as u32,
            rows as u32,
            indices.dtype,
        );
    }
    let chunks = vectors.div_ceil(LANES);
    // SAFETY: reads are guarded by the number of tokens, writes by that of rows, and both by that of columns.
    #[allow(unsafe_code)]
    unsafe {
        sum_kernel::launch_unchecked::<R>(
            client,
            cube_grid(tokens.div_ceil(PLACES) * chunks),
            CubeDim::new_1d(UNITS as u32),
            width,
            array(keys),
            array(order),
            array(gradient.clone()),
            array(gradient.clone()),
            array(output.clone()),
            tokens as u32,
            rows as u32,
            vectors as u32,
            chunks as u32,
            width,
            gradient.dtype,
        );
    }
    Ok(output)
}

/// The number of tokens and of columns.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    indices: &TensorHandle<R>,
    gradient: &TensorHandle<R>,
    rows: usize,
) -> Result<[usize; 2], KernelError> {
    check_float(client, OPERATION, "gradient", gradient.dtype)?;
    let integers = [storage::<i32>(), storage::<i64>(), storage::<u32>()];
    if !integers.contains(&indices.dtype) || !client.features().supports_type(indices.dtype) {
        return Err(KernelError::Dtype {
            operation: OPERATION,
            tensor: "indices",
            dtype: indices.dtype.to_string(),
            remedy: "use i32, i64 or u32, as the device has them",
        });
    }
    check_contiguous(OPERATION, indices)?;
    check_contiguous(OPERATION, gradient)?;
    let error = |remedy| KernelError::Shape {
        operation: OPERATION,
        got: format!(
            "indices {:?}, gradient {:?}, {rows} rows",
            indices.shape(),
            gradient.shape()
        ),
        remedy,
    };
    let (&[tokens], &[of_gradient, cols]) = (&indices.shape()[..], &gradient.shape()[..]) else {
        return Err(error("pass indices [tokens] and a gradient [tokens, cols]"));
    };
    if tokens != of_gradient {
        return Err(error("pass a row of the gradient for each index"));
    }
    let limit = 1 << 31;
    if rows >= limit || rows.saturating_mul(cols) >= limit {
        return Err(error("split the table: kernels index it with 31 bits"));
    }
    match tokens.saturating_mul(cols) <= u32::MAX as usize {
        true => Ok([tokens, cols]),
        false => Err(error("split the tokens: kernels index them with 32 bits")),
    }
}

#[cube(launch_unchecked)]
fn zero_kernel<F: Numeric, N: Size>(
    output: &mut Array<Vector<F, N>>,
    vectors: u32,
    #[define(F)] _dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at < vectors {
        output[at as usize] = Vector::cast_from(0.0f32);
    }
}

/// Writes the indices in ascending order, and the tokens that they are of.
#[cube(launch_unchecked)]
fn sort_kernel<I: Numeric>(
    indices: &Array<I>,
    keys: &mut Array<u32>,
    order: &mut Array<u32>,
    tokens: u32,
    rows: u32,
    #[define(I)] _dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(TOKENS as u32);
    if first >= tokens {
        terminate!();
    }
    let lane = UNIT_POS % comptime!(TOKENS as u32);
    let part = UNIT_POS / comptime!(TOKENS as u32);
    let token = first + lane;
    let key = key_of::<I>(indices, token, tokens, rows);
    let mut tile = SharedMemory::<Quad>::new(comptime!(TILE / 4));
    let mut count = 0u32;
    let mut start = 0u32;
    while start < tokens {
        // Units may still read the tile before.
        sync_cube();
        #[unroll]
        for turn in 0..comptime!(TILE / 4 / UNITS) {
            let slot = UNIT_POS + comptime!((turn * UNITS) as u32);
            let mut quad = Quad::empty();
            #[unroll]
            for index in 0..4u32 {
                let other = start + slot * 4 + index;
                quad[index as usize] = key_of::<I>(indices, other, tokens, rows);
            }
            tile[slot as usize] = quad;
        }
        sync_cube();
        for block in 0..comptime!((PART / TOKENS) as u32) {
            let at = part * comptime!(PART as u32) + block * comptime!(TOKENS as u32);
            let first_other = start + at;
            // Of equal keys those of earlier tokens come first: all of an earlier block, none of a later one.
            let limit = key + u32::cast_from(first_other < first);
            #[unroll]
            for quad in 0..comptime!(TOKENS as u32 / 4) {
                let others = tile[(at / 4 + quad) as usize];
                #[unroll]
                for index in 0..4usize {
                    // 1 if it is smaller: its sign, as neither is above 2^31. CUDA takes an instruction less.
                    count += (others[index] - limit) >> 31;
                }
            }
            if first_other == first {
                #[unroll]
                for quad in 0..comptime!(TOKENS as u32 / 4) {
                    let others = tile[(at / 4 + quad) as usize];
                    #[unroll]
                    for index in 0..4u32 {
                        let is_earlier = quad * 4 + index < lane;
                        count += u32::cast_from(is_earlier && others[index as usize] == key);
                    }
                }
            }
        }
        start += comptime!(TILE as u32);
    }
    let mut counts = SharedMemory::<u32>::new(UNITS);
    counts[UNIT_POS as usize] = count;
    sync_cube();
    if part == 0 && token < tokens {
        let mut place = 0u32;
        #[unroll]
        for part in 0..comptime!(PARTS as u32) {
            place += counts[(part * comptime!(TOKENS as u32) + lane) as usize];
        }
        keys[place as usize] = key;
        order[place as usize] = token;
    }
}

/// The index of a token; `rows` for one that the table does not have, and a larger number past the last token.
#[cube]
fn key_of<I: Numeric>(indices: &Array<I>, token: u32, tokens: u32, rows: u32) -> u32 {
    let mut key = NONE.runtime();
    if token < tokens {
        let index = indices[token as usize];
        let is_row = index >= I::from_int(0) && index < I::cast_from(rows);
        key = select(is_row, u32::cast_from(index), rows);
    }
    key
}

/// Adds up the rows whose first token lies in the cube's places, and goes on behind them until the last is whole.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn sum_kernel<F: Numeric, N: Size>(
    keys: &Array<u32>,
    order: &Array<u32>,
    gradient: &Array<Vector<F, N>>,
    elements: &Array<F>,
    output: &mut Array<Vector<F, N>>,
    tokens: u32,
    rows: u32,
    vectors: u32,
    chunks: u32,
    #[comptime] width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let place = CUBE_POS as u32 / chunks * comptime!(PLACES as u32);
    if place >= tokens {
        terminate!();
    }
    let lane = UNIT_POS % comptime!(LANES as u32);
    let line = UNIT_POS / comptime!(LANES as u32);
    let first_col = CUBE_POS as u32 % chunks * comptime!(LANES as u32);
    let col = first_col + lane;
    // A row that began before belongs to another cube.
    let mut row = u32::MAX.runtime();
    if place > 0 {
        row = keys[(place - 1) as usize];
    }
    let behind = place + comptime!(PLACES as u32);
    let last = key_at(keys, behind - 1, tokens);
    if last == row {
        terminate!();
    }
    let mut is_own = false;
    let mut sums = Array::<f32>::new(width);
    let mut tile = SharedMemory::<Vector<F, N>>::new(comptime!(PLACES * LANES));
    let mut tile_keys = SharedMemory::<u32>::new(PLACES);
    let mut tile_tokens = SharedMemory::<u32>::new(PLACES);
    if UNIT_POS < comptime!(PLACES as u32) {
        let key = key_at(keys, place + UNIT_POS, tokens);
        tile_keys[UNIT_POS as usize] = key;
        // For what is not wanted the cache has the first token.
        let at = place + select(key < rows, UNIT_POS, 0u32);
        tile_tokens[UNIT_POS as usize] = order[at as usize];
    }
    sync_cube();
    // All loads come before the first store, so that their latencies overlap.
    let mut loaded = Array::<Vector<F, N>>::new(TURNS);
    #[unroll]
    for turn in 0..TURNS {
        let token = tile_tokens[(line + comptime!((turn * UNITS / LANES) as u32)) as usize];
        loaded[turn] = gradient[(token * vectors + min(col, vectors - 1)) as usize];
    }
    #[unroll]
    for turn in 0..TURNS {
        tile[(UNIT_POS + comptime!((turn * UNITS) as u32)) as usize] = loaded[turn];
    }
    sync_cube();
    if line == 0 && col < vectors {
        for slot in 0..comptime!(PLACES as u32) {
            let key = tile_keys[slot as usize];
            if key != row {
                if is_own {
                    write_sums::<F, N>(output, &sums, row * vectors + col, width);
                }
                row = key;
                is_own = key < rows;
                #[unroll]
                for index in 0..width {
                    sums[index] = 0.0f32;
                }
            }
            let vector = tile[(slot * comptime!(LANES as u32) + lane) as usize];
            #[unroll]
            for index in 0..width {
                sums[index] += f32::cast_from(vector[index]);
            }
        }
    }
    if last < rows && key_at(keys, behind, tokens) == last {
        let mut of_columns = SharedMemory::<f32>::new(comptime!(LANES * width));
        if line == 0 {
            #[unroll]
            for index in 0..width {
                of_columns[(lane * comptime!(width as u32)) as usize + index] = sums[index];
            }
        }
        sync_cube();
        comptime!(assert!(
            LANES * width <= UNITS,
            "a unit for each column of a cube"
        ));
        let width_of_rows = vectors * comptime!(width as u32);
        let unit = min(UNIT_POS, comptime!((LANES * width - 1) as u32));
        let element = min(
            first_col * comptime!(width as u32) + unit,
            width_of_rows - 1,
        );
        let mut sum = of_columns[unit as usize];
        add_long_row::<F>(
            keys,
            order,
            elements,
            &mut sum,
            last,
            behind,
            tokens,
            width_of_rows,
            element,
        );
        sync_cube();
        if UNIT_POS < comptime!((LANES * width) as u32) {
            of_columns[UNIT_POS as usize] = sum;
        }
        sync_cube();
        #[unroll]
        for index in 0..width {
            sums[index] = of_columns[(lane * comptime!(width as u32)) as usize + index];
        }
    }
    if is_own {
        write_sums::<F, N>(output, &sums, row * vectors + col, width);
    }
}

/// Adds to `sum` what the places from `first` on have of a row, of one element of it: a column is a unit's alone, so
/// that many rows of the gradient are read at once, and added in their order. The first is of the row.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_long_row<F: Numeric>(
    keys: &Array<u32>,
    order: &Array<u32>,
    gradient: &Array<F>,
    sum: &mut f32,
    row: u32,
    first: u32,
    tokens: u32,
    cols: u32,
    col: u32,
) {
    let mut tile_keys = SharedMemory::<u32>::new(AHEAD);
    let mut tile_tokens = SharedMemory::<u32>::new(AHEAD);
    let unit = min(UNIT_POS, comptime!(AHEAD as u32 - 1));
    let mut place = first;
    // The places after these are read while the gradient is.
    let mut key = key_at(keys, place + unit, tokens);
    let mut token = order[select(key == row, place + unit, first) as usize];
    let mut goes_on = true;
    while goes_on {
        // Units may still read the places before.
        sync_cube();
        if UNIT_POS < comptime!(AHEAD as u32) {
            tile_keys[UNIT_POS as usize] = key;
            tile_tokens[UNIT_POS as usize] = token;
        }
        sync_cube();
        place += comptime!(AHEAD as u32);
        key = key_at(keys, place + unit, tokens);
        // For what is not wanted the cache has the first token.
        token = order[select(key == row, place + unit, first) as usize];
        let mut loaded = Array::<F>::new(AHEAD);
        #[unroll]
        for slot in 0..AHEAD {
            loaded[slot] = gradient[(tile_tokens[slot] * cols + col) as usize];
        }
        // No load waits behind an addition: compilers would have a few under way at a time.
        sync_cube();
        #[unroll]
        for slot in 0..AHEAD {
            *sum += select(tile_keys[slot] == row, f32::cast_from(loaded[slot]), 0.0f32);
        }
        goes_on = tile_keys[comptime!(AHEAD - 1)] == row;
    }
}

/// The key at a place of the order; [`NONE`] behind the last token.
#[cube]
fn key_at(keys: &Array<u32>, place: u32, tokens: u32) -> u32 {
    let key = keys[min(place, tokens - 1) as usize];
    select(place < tokens, key, NONE)
}

#[cube]
fn write_sums<F: Numeric, N: Size>(
    output: &mut Array<Vector<F, N>>,
    sums: &Array<f32>,
    index: u32,
    #[comptime] width: usize,
) {
    let mut vector = Vector::<F, N>::empty();
    #[unroll]
    for lane in 0..width {
        let sum = sums[lane];
        // Not a negative zero, which compilers make of one that is added to 0 where they take 0 + x for x.
        vector[lane] = F::cast_from(select(sum == 0.0f32, 0.0f32, sum));
    }
    output[index as usize] = vector;
}
