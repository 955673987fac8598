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
    scores::{of_scores, scores},
    staged::{add_products, both, fill, products, staged, wait, write_rows, zeros},
};

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_keys_tensor_core_kernel<F: Numeric, M: Numeric, C: Size, P: Size>(
    query: &Array<Vector<F, C>>,
    key: &Array<Vector<F, C>>,
    value: &Array<Vector<F, C>>,
    mask: &Array<M>,
    bias: &Array<F>,
    gradient: &Array<Vector<F, C>>,
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    of_key: &mut Array<Vector<F, P>>,
    of_value: &mut Array<Vector<F, P>>,
    problem: Problem,
    gradient_strides: Strides4,
    negative_infinity: f32,
    #[comptime] wanted: Wanted,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(M)] _mask_dtype: StorageType,
) {
    let (asked, layout) = comptime!((plan.asked, plan.layout));
    let (rows, cols) = comptime!((layout.rows, layout.cols));
    let tiles = problem.keys.div_ceil(comptime!(rows as u32));
    let kv_heads = problem.heads / problem.group;
    let head = CUBE_POS as u32 / tiles;
    if head >= problem.batches * kv_heads {
        terminate!();
    }
    let batch = head / kv_heads;
    let kv_head = head % kv_heads;
    let first_key = CUBE_POS as u32 % tiles * comptime!(rows as u32);
    let key_rows = key_head(&problem, batch, kv_head);
    let value_rows = value_head(&problem, batch, kv_head);
    let first = tile_of(first_query(&problem, first_key), cols);
    let end = last_query(&problem, first_key + comptime!(rows as u32));

    let mut keys = staged::<F, C>(plan.keys(rows));
    let mut values = staged::<F, C>(plan.values(rows));
    let mut queries = staged::<F, C>(plan.keys(cols));
    let mut gradients = staged::<F, C>(plan.values(cols));
    let key_results = comptime!(if wanted.key { 2 * plan.steps } else { 0 });
    let value_results = comptime!(if wanted.value {
        2 * plan.value_steps
    } else {
        0
    });
    let mut key_sums = zeros::<P>(key_results);
    let mut value_sums = zeros::<P>(value_results);
    if first < end {
        let head = kv_head * problem.group;
        let query_rows = query_head(&problem, batch, head);
        let gradient_rows = gradient_head(&problem, &gradient_strides, batch, head);
        fill::<F, C>(&mut keys, key, &key_rows, first_key);
        fill::<F, C>(&mut queries, query, &query_rows, first);
        // For dV alone no probability has a gradient.
        if comptime!(wanted.key) {
            fill::<F, C>(&mut values, value, &value_rows, first_key);
        }
        fill::<F, C>(&mut gradients, gradient, &gradient_rows, first);
        wait::<F, C>(&mut keys);
        if comptime!(wanted.key) {
            wait::<F, C>(&mut values);
        }
    }
    // Tiles of the queries of all heads of the group, one after the other.
    let of_head = select(
        first < end,
        (end - first).div_ceil(comptime!(cols as u32)),
        0u32,
    );
    let count = of_head * problem.group;
    let mut turn = 0u32.runtime();
    while turn < count {
        let place = Place {
            batch,
            head: kv_head * problem.group + turn / of_head,
            row: first + turn % of_head * comptime!(cols as u32),
            col: first_key,
        };
        turn += 1;
        let next_head = kv_head * problem.group + turn / of_head;
        let next_row = first + turn % of_head * comptime!(cols as u32);
        let query_rows = query_head(&problem, batch, next_head);
        let gradient_rows = gradient_head(&problem, &gradient_strides, batch, next_head);

        wait::<F, C>(&mut queries);
        let of_tile = products::<F, C, P>(&keys, &queries);
        let scores = scores::<F, M, P>(
            &of_tile,
            mask,
            bias,
            &problem,
            &place,
            negative_infinity,
            layout,
            asked,
        );
        wait::<F, C>(&mut gradients);
        let of_values = if comptime!(wanted.key) {
            products::<F, C, P>(&values, &gradients)
        } else {
            zeros::<P>(layout.results())
        };
        let of_tile = of_scores::<P>(
            &scores,
            &of_values,
            log_sum_exp,
            delta,
            &problem,
            &place,
            layout,
            asked,
        );
        if comptime!(wanted.value) {
            add_products::<F, C, P>(&mut value_sums, &of_tile.probabilities, &gradients);
        }
        sync_cube();
        if turn < count {
            fill::<F, C>(&mut gradients, gradient, &gradient_rows, next_row);
        }
        if comptime!(wanted.key) {
            add_products::<F, C, P>(&mut key_sums, &of_tile.gradients, &queries);
        }
        sync_cube();
        if turn < count {
            fill::<F, C>(&mut queries, query, &query_rows, next_row);
        }
    }
    if comptime!(wanted.value) {
        write_rows::<F, P>(
            of_value,
            &value_sums,
            &both(1.0f32),
            batch,
            kv_head,
            kv_heads,
            first_key,
            problem.keys,
            problem.value_width,
            plan.value_steps,
        );
    }
    if comptime!(wanted.key) {
        write_rows::<F, P>(
            of_key,
            &key_sums,
            &both(problem.scale),
            batch,
            kv_head,
            kv_heads,
            first_key,
            problem.keys,
            problem.width,
            plan.steps,
        );
    }
}
