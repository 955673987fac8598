//! The forward pass: a cube for each tile of queries of each head (Dao, 2023, Algorithm 1).

use cubecl::{ir::StorageType, prelude::*};

use crate::attention::scores::{
    Problem, factor_slot, key_head, last_key, place_of_queries, query_head, value_head,
};

use super::{
    Plan,
    scores::{factors, scores, weight},
    staged::{
        add_products, fill, plane_row, products, slot, staged, unit_col, unit_row, wait,
        write_rows, zeros,
    },
};

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_forward_tensor_core_kernel<F: Numeric, M: Numeric, C: Size, P: Size>(
    query: &Array<Vector<F, C>>,
    key: &Array<Vector<F, C>>,
    value: &Array<Vector<F, C>>,
    mask: &Array<M>,
    bias: &Array<F>,
    output: &mut Array<Vector<F, P>>,
    log_sum_exp: &mut Array<f32>,
    problem: Problem,
    negative_infinity: f32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
    #[define(M)] _mask_dtype: StorageType,
) {
    let asked = comptime!(plan.asked);
    let layout = comptime!(plan.layout);
    let (rows, cols) = comptime!((layout.rows, layout.cols));
    let tiles = problem.queries.div_ceil(comptime!(rows as u32));
    let head = CUBE_POS as u32 / tiles;
    if head >= problem.batches * problem.heads {
        terminate!();
    }
    // Where a query sees only what is before it, the last queries have the most to do: they begin.
    let row = (tiles - 1 - CUBE_POS as u32 % tiles) * comptime!(rows as u32);
    let mut place = place_of_queries(&problem, head, row, cols);
    let kv_head = place.head / problem.group;
    let of_query = query_head(&problem, place.batch, place.head);
    let of_key = key_head(&problem, place.batch, kv_head);
    let of_value = value_head(&problem, place.batch, kv_head);
    let end = last_key(&problem, row + comptime!(rows as u32));

    let mut queries = staged::<F, C>(plan.keys(rows));
    let mut keys = staged::<F, C>(plan.keys(cols));
    let mut values = staged::<F, C>(plan.values(cols));
    let mut sums = zeros::<P>(comptime!(2 * plan.value_steps));
    let mut totals = Array::<f32>::new(2usize);
    let mut maxima = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        totals[half] = 0.0f32;
        maxima[half] = f32::new(f32::MIN);
    }
    if place.col < end {
        fill::<F, C>(&mut queries, query, &of_query, row);
        fill::<F, C>(&mut keys, key, &of_key, place.col);
        fill::<F, C>(&mut values, value, &of_value, place.col);
        wait::<F, C>(&mut queries);
    }
    while place.col < end {
        let next = place.col + comptime!(cols as u32);
        wait::<F, C>(&mut keys);
        let of_tile = products::<F, C, P>(&queries, &keys);
        sync_cube();
        if next < end {
            fill::<F, C>(&mut keys, key, &of_key, next);
        }
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
        // Scores, until their maximum is known.
        let mut weights = scores.values;
        let drops = comptime!(asked.drops_probabilities());
        let factors = factors(&problem, &place, drops, layout, asked);
        #[unroll]
        for half in 0..2usize {
            // NaN is passed over: the weights that it makes are NaN.
            let mut max = maxima[half];
            #[unroll]
            for result in 0..comptime!(layout.results()) {
                #[unroll]
                for side in 0..2usize {
                    let score = weights[comptime!(slot(result, half, side))];
                    max = select(score > max, score, max);
                }
            }
            // Four units have a row.
            let max = of_row_max(max);
            let decay = weight(maxima[half], max);
            maxima[half] = max;
            totals[half] *= decay;
            #[unroll]
            for result in 0..comptime!(2 * plan.value_steps) {
                let sum = sums.index_mut(result);
                sum[half] = sum[half] * Vector::new(decay);
            }
            #[unroll]
            for result in 0..comptime!(layout.results()) {
                #[unroll]
                for side in 0..2usize {
                    let slot = comptime!(slot(result, half, side));
                    let weight = weight(weights[slot], max);
                    totals[half] += weight;
                    weights[slot] = weight * factors[comptime!(factor_slot(drops, slot))];
                }
            }
        }
        wait::<F, C>(&mut values);
        add_products::<F, C, P>(&mut sums, &weights, &values);
        sync_cube();
        if next < end {
            fill::<F, C>(&mut values, value, &of_value, next);
        }
        place.col = next;
    }

    let mut inverses = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let total = totals[half] + plane_shuffle_xor(totals[half], 1u32);
        let total = total + plane_shuffle_xor(total, 2u32);
        let sees_nothing = total == 0.0f32;
        inverses[half] = select(sees_nothing, 0.0f32, 1.0f32 / total);
        let row = row + plane_row() + unit_row() + comptime!((half * 8) as u32);
        if row < problem.queries && unit_col() == 0 {
            let log = select(sees_nothing, negative_infinity, maxima[half] + total.ln());
            log_sum_exp[(head * problem.queries + row) as usize] = log;
        }
    }
    write_rows::<F, P>(
        output,
        &sums,
        &inverses,
        place.batch,
        place.head,
        problem.heads,
        row,
        problem.queries,
        problem.value_width,
        plan.value_steps,
    );
}

/// The largest of what the four units of a row have.
#[cube]
fn of_row_max(max: f32) -> f32 {
    let other = plane_shuffle_xor(max, 1u32);
    let max = select(other > max, other, max);
    let other = plane_shuffle_xor(max, 2u32);
    select(other > max, other, max)
}
