//! The gradient of the bias: the gradients of the scores, summed over what the bias is broadcast along.
//!
//! A cube has a tile of the bias and goes through all tiles of scores that it is added to, one after the other, with
//! the sum in registers. A bias with one row or one column has few tiles; there each head of each batch has a sum of
//! its own, and a second launch adds those up. So each sum has one order.

use cubecl::{ir::StorageType, prelude::*};

use crate::attention::{
    heads::Strides4,
    scores::{
        Place, Problem, first_key, first_query, gradient_head, key_head, last_key, last_query,
        query_head, tile_of, value_head,
    },
};

use super::{
    Plan,
    scores::{of_scores, rows_of, scores},
    tile::{
        ELEMENTS, OWN, PITCH, TILE, UNITS, operands, products, unit_col, unit_row, write_tile,
        zeros,
    },
};

/// The dimensions of the scores that a tensor has of its own: it is broadcast along the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Own {
    pub batch: bool,
    pub head: bool,
    pub row: bool,
    pub col: bool,
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_bias_kernel<F: Numeric, M: Numeric, O: Numeric>(
    query: &Array<F>,
    key: &Array<F>,
    value: &Array<F>,
    mask: &Array<M>,
    bias: &Array<F>,
    gradient: &Array<F>,
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    of_bias: &mut Array<O>,
    problem: Problem,
    gradient_strides: Strides4,
    #[comptime] own: Own,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(M)] _mask_dtype: StorageType,
    #[define(O)] _out_dtype: StorageType,
) {
    let tile = comptime!(TILE as u32);
    let row_tiles = extent(problem.queries, own.row).div_ceil(tile);
    let col_tiles = extent(problem.keys, own.col).div_ceil(tile);
    let index = CUBE_POS as u32;
    let head = index / (row_tiles * col_tiles);
    let heads = extent(problem.heads, own.head);
    if head >= extent(problem.batches, own.batch) * heads {
        terminate!();
    }
    let row_0 = index / col_tiles % row_tiles * tile;
    let col_0 = index % col_tiles * tile;
    let first_batch = head / heads;
    let first_head = head % heads;

    let mut memory = operands();
    let mut sums = zeros(ELEMENTS);
    // Along a dimension of its own there is one place, along another there are all that are seen.
    let mut rows_start = row_0;
    let mut rows_end = min(row_0 + tile, problem.queries);
    if comptime!(!own.row) {
        rows_start = tile_of(first_query(&problem, col_0), TILE);
        rows_end = last_query(&problem, col_0 + tile);
    }
    for batch in first_batch..end(first_batch, problem.batches, own.batch) {
        for head in first_head..end(first_head, problem.heads, own.head) {
            let kv_head = head / problem.group;
            let queries = query_head(&problem, batch, head);
            let keys = key_head(&problem, batch, kv_head);
            let values = value_head(&problem, batch, kv_head);
            let gradients = gradient_head(&problem, &gradient_strides, batch, head);
            let mut row = rows_start;
            while row < rows_end {
                let mut place = Place {
                    batch,
                    head,
                    row,
                    col: col_0,
                };
                let seen_start = first_key(&problem, row);
                let seen_end = last_key(&problem, row + tile);
                let mut cols_end = min(col_0 + tile, seen_end);
                if comptime!(!own.col) {
                    place.col = tile_of(seen_start, TILE);
                    cols_end = seen_end;
                }
                while place.col < cols_end {
                    // Of a tile that nobody sees there is nothing to add.
                    if place.col + tile > seen_start {
                        let of_keys =
                            products::<F>(query, &queries, row, key, &keys, place.col, &mut memory);
                        let scores =
                            scores::<F, M>(&of_keys, mask, bias, &problem, &place, plan.asked);
                        let of_values = products::<F>(
                            gradient,
                            &gradients,
                            row,
                            value,
                            &values,
                            place.col,
                            &mut memory,
                        );
                        let rows = rows_of(log_sum_exp, delta, &problem, &place);
                        let of_tile =
                            of_scores(&scores, &of_values, &rows, &problem, &place, plan.asked);
                        #[unroll]
                        for slot in 0..ELEMENTS {
                            sums[slot] += of_tile.gradients[slot];
                        }
                    }
                    place.col += tile;
                }
                row += tile;
            }
        }
    }

    let rows = extent(problem.queries, own.row);
    let cols = extent(problem.keys, own.col);
    let start = head * rows * cols;
    if comptime!(own.row && own.col) {
        #[unroll]
        for i in 0..OWN {
            #[unroll]
            for j in 0..OWN {
                let row = row_0 + unit_row() + comptime!(i as u32);
                let col = col_0 + unit_col() + comptime!(j as u32);
                if row < rows && col < cols {
                    of_bias[(start + row * cols + col) as usize] =
                        O::cast_from(sums[comptime!(i * OWN + j)]);
                }
            }
        }
    } else {
        // A unit adds up a row or a column of the tile.
        let mut of_units = SharedMemory::<f32>::new(comptime!(TILE * PITCH));
        write_tile(&mut of_units, &sums);
        sync_cube();
        let mut first = UNIT_POS;
        if comptime!(own.row) {
            first = UNIT_POS * comptime!(PITCH as u32);
        }
        let step = comptime!(if own.row { 1u32 } else { PITCH as u32 });
        let place = comptime!(if own.row { 0u32 } else { 1u32 });
        let at = select(place == 0u32, row_0, col_0) + UNIT_POS;
        if UNIT_POS < tile && at < rows * cols {
            let mut sum = 0.0f32;
            for index in 0..tile {
                sum += of_units[(first + index * step) as usize];
            }
            of_bias[(start + at) as usize] = O::cast_from(sum);
        }
    }
}

/// Adds up what heads, batches and rows have of a bias: `[batches, heads, rows, cols]` over the dimensions that are not
/// its own. A cube has an element of it.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_bias_total_kernel<F: Numeric>(
    parts: &Array<f32>,
    of_bias: &mut Array<F>,
    batches: u32,
    heads: u32,
    rows: u32,
    cols: u32,
    #[comptime] own: Own,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32;
    let own_batches = extent(batches, own.batch);
    let own_heads = extent(heads, own.head);
    let own_rows = extent(rows, own.row);
    if index >= own_batches * own_heads * own_rows * cols {
        terminate!();
    }
    let col = index % cols;
    let first_row = index / cols % own_rows;
    let first_head = index / cols / own_rows % own_heads;
    let first_batch = index / cols / own_rows / own_heads;
    let of_batches = end(first_batch, batches, own.batch) - first_batch;
    let of_heads = end(first_head, heads, own.head) - first_head;
    let of_rows = end(first_row, rows, own.row) - first_row;
    let mut sum = 0.0f32;
    let mut part = UNIT_POS;
    while part < of_batches * of_heads * of_rows {
        let row = first_row + part % of_rows;
        let head = first_head + part / of_rows % of_heads;
        let batch = first_batch + part / of_rows / of_heads;
        sum += parts[(((batch * heads + head) * rows + row) * cols + col) as usize];
        part += comptime!(UNITS as u32);
    }
    let mut of_units = SharedMemory::<f32>::new(UNITS);
    of_units[UNIT_POS as usize] = sum;
    #[unroll]
    for step in 0..comptime!(UNITS.ilog2()) {
        let distance = comptime!((UNITS >> (step + 1)) as u32);
        sync_cube();
        if UNIT_POS < distance {
            let other = of_units[(UNIT_POS + distance) as usize];
            of_units[UNIT_POS as usize] += other;
        }
    }
    if UNIT_POS == 0 {
        of_bias[index as usize] = F::cast_from(of_units[0usize]);
    }
}

/// The extent of a dimension of the bias.
#[cube]
fn extent(of_scores: u32, #[comptime] own: bool) -> u32 {
    if comptime!(own) {
        of_scores
    } else {
        1u32.runtime()
    }
}

/// The end of the places along a dimension that an element from `first` on is added to.
#[cube]
fn end(first: u32, of_scores: u32, #[comptime] own: bool) -> u32 {
    if comptime!(own) {
        first + 1u32
    } else {
        of_scores
    }
}
