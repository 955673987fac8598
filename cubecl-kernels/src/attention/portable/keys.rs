//! The gradients of keys and values: a cube for each tile of keys of each of their heads, which goes through the
//! queries of all heads that read them, so that each sum has one order.

use cubecl::{ir::StorageType, prelude::*};

use crate::attention::{
    heads::Strides4,
    scores::{
        Place, Problem, Wanted, first_query, gradient_head, key_head, last_query, query_head,
        tile_of, value_head,
    },
};

use super::{
    Plan,
    scores::{of_scores, rows_of, scores},
    tile::{
        ELEMENTS, PITCH, TILE, add_products, factors_of, operands, products, write_rows,
        write_tile, zeros,
    },
};

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_keys_kernel<F: Numeric, M: Numeric>(
    query: &Array<F>,
    key: &Array<F>,
    value: &Array<F>,
    mask: &Array<M>,
    bias: &Array<F>,
    gradient: &Array<F>,
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    of_key: &mut Array<F>,
    of_value: &mut Array<F>,
    problem: Problem,
    gradient_strides: Strides4,
    #[comptime] wanted: Wanted,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(M)] _mask_dtype: StorageType,
) {
    let tiles = problem.keys.div_ceil(comptime!(TILE as u32));
    let kv_heads = problem.heads / problem.group;
    let head = CUBE_POS as u32 / tiles;
    if head >= problem.batches * kv_heads {
        terminate!();
    }
    let batch = head / kv_heads;
    let kv_head = head % kv_heads;
    let col = CUBE_POS as u32 % tiles * comptime!(TILE as u32);
    let keys = key_head(&problem, batch, kv_head);
    let values = value_head(&problem, batch, kv_head);

    let mut memory = operands();
    // Probabilities, then gradients of the scores, with the queries outermost.
    let mut tile = SharedMemory::<f32>::new(comptime!(TILE * PITCH));
    let mut key_sums = zeros(comptime!(if wanted.key {
        ELEMENTS * plan.panels
    } else {
        1
    }));
    let mut value_sums = zeros(comptime!(if wanted.value {
        ELEMENTS * plan.value_panels
    } else {
        1
    }));
    let end = last_query(&problem, col + comptime!(TILE as u32));
    for of_group in 0..problem.group {
        let mut place = Place {
            batch,
            head: kv_head * problem.group + of_group,
            row: tile_of(first_query(&problem, col), TILE),
            col,
        };
        let queries = query_head(&problem, batch, place.head);
        let gradients = gradient_head(&problem, &gradient_strides, batch, place.head);
        while place.row < end {
            let of_keys = products::<F>(query, &queries, place.row, key, &keys, col, &mut memory);
            let scores = scores::<F, M>(&of_keys, mask, bias, &problem, &place, plan.asked);
            let of_values = if comptime!(wanted.key) {
                products::<F>(
                    gradient,
                    &gradients,
                    place.row,
                    value,
                    &values,
                    col,
                    &mut memory,
                )
            } else {
                zeros(ELEMENTS)
            };
            let rows = rows_of(log_sum_exp, delta, &problem, &place);
            let of_tile = of_scores(&scores, &of_values, &rows, &problem, &place, plan.asked);
            if comptime!(wanted.value) {
                write_tile(&mut tile, &of_tile.probabilities);
                add_products::<F>(
                    &mut value_sums,
                    &tile,
                    gradient,
                    &gradients,
                    place.row,
                    &mut memory,
                    plan.value_panels,
                );
                // Others may still read the probabilities.
                sync_cube();
            }
            if comptime!(wanted.key) {
                write_tile(&mut tile, &of_tile.of_products);
                add_products::<F>(
                    &mut key_sums,
                    &tile,
                    query,
                    &queries,
                    place.row,
                    &mut memory,
                    plan.panels,
                );
                sync_cube();
            }
            place.row += comptime!(TILE as u32);
        }
    }
    if comptime!(wanted.value) {
        write_rows::<F>(
            of_value,
            &value_sums,
            &factors_of(1.0f32),
            batch,
            kv_head,
            kv_heads,
            col,
            problem.keys,
            problem.value_width,
            plan.value_panels,
        );
    }
    if comptime!(wanted.key) {
        write_rows::<F>(
            of_key,
            &key_sums,
            &factors_of(problem.scale),
            batch,
            kv_head,
            kv_heads,
            col,
            problem.keys,
            problem.width,
            plan.panels,
        );
    }
}
