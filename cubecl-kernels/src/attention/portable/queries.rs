//! The gradient of the queries: a cube for each tile of queries of each head.

use cubecl::{ir::StorageType, prelude::*};

use crate::attention::{
    heads::Strides4,
    scores::{
        Problem, gradient_head, key_head, last_key, place_of_queries, query_head, value_head,
    },
};

use super::{
    Plan,
    scores::{of_scores, rows_of, scores},
    tile::{
        ELEMENTS, OWN, PITCH, TILE, add_products, factors_of, operands, products, unit_col,
        unit_row, write_rows, zeros,
    },
};

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_queries_kernel<F: Numeric, M: Numeric>(
    query: &Array<F>,
    key: &Array<F>,
    value: &Array<F>,
    mask: &Array<M>,
    bias: &Array<F>,
    gradient: &Array<F>,
    log_sum_exp: &Array<f32>,
    delta: &Array<f32>,
    of_query: &mut Array<F>,
    problem: Problem,
    gradient_strides: Strides4,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(M)] _mask_dtype: StorageType,
) {
    let tiles = problem.queries.div_ceil(comptime!(TILE as u32));
    let head = CUBE_POS as u32 / tiles;
    if head >= problem.batches * problem.heads {
        terminate!();
    }
    let row = CUBE_POS as u32 % tiles * comptime!(TILE as u32);
    let mut place = place_of_queries(&problem, head, row, TILE);
    let kv_head = place.head / problem.group;
    let queries = query_head(&problem, place.batch, place.head);
    let keys = key_head(&problem, place.batch, kv_head);
    let values = value_head(&problem, place.batch, kv_head);
    let gradients = gradient_head(&problem, &gradient_strides, place.batch, place.head);

    let mut memory = operands();
    // Gradients of the scores, with the keys outermost.
    let mut tile = SharedMemory::<f32>::new(comptime!(TILE * PITCH));
    let mut sums = zeros(comptime!(ELEMENTS * plan.panels));
    let rows = rows_of(log_sum_exp, delta, &problem, &place);
    let end = last_key(&problem, place.row + comptime!(TILE as u32));
    while place.col < end {
        let of_keys = products::<F>(
            query,
            &queries,
            place.row,
            key,
            &keys,
            place.col,
            &mut memory,
        );
        let scores = scores::<F, M>(&of_keys, mask, bias, &problem, &place, plan.asked);
        let of_values = products::<F>(
            gradient,
            &gradients,
            place.row,
            value,
            &values,
            place.col,
            &mut memory,
        );
        let of_tile = of_scores(&scores, &of_values, &rows, &problem, &place, plan.asked);
        #[unroll]
        for i in 0..OWN {
            #[unroll]
            for j in 0..OWN {
                let at = (unit_col() + comptime!(j as u32)) * comptime!(PITCH as u32)
                    + unit_row()
                    + comptime!(i as u32);
                tile[at as usize] = of_tile.of_products[comptime!(i * OWN + j)];
            }
        }
        add_products::<F>(
            &mut sums,
            &tile,
            key,
            &keys,
            place.col,
            &mut memory,
            plan.panels,
        );
        place.col += comptime!(TILE as u32);
    }
    write_rows::<F>(
        of_query,
        &sums,
        &factors_of(problem.scale),
        place.batch,
        place.head,
        problem.heads,
        place.row,
        problem.queries,
        problem.width,
        plan.panels,
    );
}
