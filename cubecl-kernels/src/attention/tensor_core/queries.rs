//! The gradient of the queries: a cube for each tile of queries of each head, which goes through the keys.

use cubecl::{ir::StorageType, prelude::*};

use crate::attention::{
    heads::Strides4,
    scores::{
        Problem, gradient_head, key_head, last_key, place_of_queries, query_head, value_head,
    },
};

use super::{
    Plan,
    scores::{of_scores, scores},
    staged::{add_products, both, fill, products, staged, wait, write_rows, zeros},
};

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_queries_tensor_core_kernel<F: Numeric, M: Numeric, C: Size, P: Size>(
    query: &Array<Vector<F, C>>,
    key: &Array<Vector<F, C>>,
    value: &Array<Vector<F, C>>,
    mask: &Array<M>,
    bias: &Array<F>,
    gradient: &Array<Vector<F, C>>,
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    of_query: &mut Array<Vector<F, P>>,
    problem: Problem,
    gradient_strides: Strides4,
    negative_infinity: f32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(M)] _mask_dtype: StorageType,
) {
    let (asked, layout) = comptime!((plan.asked, plan.layout));
    let (rows, cols) = comptime!((layout.rows, layout.cols));
    let tiles = problem.queries.div_ceil(comptime!(rows as u32));
    let head = CUBE_POS as u32 / tiles;
    if head >= problem.batches * problem.heads {
        terminate!();
    }
    // As in the forward pass, those with the most to do begin.
    let row = (tiles - 1 - CUBE_POS as u32 % tiles) * comptime!(rows as u32);
    let mut place = place_of_queries(&problem, head, row, cols);
    let kv_head = place.head / problem.group;
    let query_rows = query_head(&problem, place.batch, place.head);
    let key_rows = key_head(&problem, place.batch, kv_head);
    let value_rows = value_head(&problem, place.batch, kv_head);
    let gradient_rows = gradient_head(&problem, &gradient_strides, place.batch, place.head);
    let end = last_key(&problem, row + comptime!(rows as u32));

    let mut queries = staged::<F, C>(plan.keys(rows));
    let mut gradients = staged::<F, C>(plan.values(rows));
    let mut keys = staged::<F, C>(plan.keys(cols));
    let mut values = staged::<F, C>(plan.values(cols));
    let mut sums = zeros::<P>(comptime!(2 * plan.steps));
    if place.col < end {
        fill::<F, C>(&mut queries, query, &query_rows, row);
        fill::<F, C>(&mut keys, key, &key_rows, place.col);
        fill::<F, C>(&mut gradients, gradient, &gradient_rows, row);
        fill::<F, C>(&mut values, value, &value_rows, place.col);
        wait::<F, C>(&mut queries);
        wait::<F, C>(&mut gradients);
    }
    while place.col < end {
        let next = place.col + comptime!(cols as u32);
        wait::<F, C>(&mut keys);
        let of_keys = products::<F, C, P>(&queries, &keys);
        let scores = scores::<F, M, P>(
            &of_keys,
            mask,
            bias,
            &problem,
            &place,
            negative_infinity,
            layout,
            asked,
        );
        wait::<F, C>(&mut values);
        let of_values = products::<F, C, P>(&gradients, &values);
        sync_cube();
        if next < end {
            fill::<F, C>(&mut values, value, &value_rows, next);
        }
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
        add_products::<F, C, P>(&mut sums, &of_tile.gradients, &keys);
        sync_cube();
        if next < end {
            fill::<F, C>(&mut keys, key, &key_rows, next);
        }
        place.col = next;
    }
    write_rows::<F, P>(
        of_query,
        &sums,
        &both(problem.scale),
        place.batch,
        place.head,
        problem.heads,
        row,
        problem.queries,
        problem.width,
        plan.steps,
    );
}
