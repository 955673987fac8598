//! The forward pass: a cube for each tile of queries of each head (Dao et al., 2022, Algorithm 1).

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    attention::scores::{
        Problem, factor_slot, key_head, last_key, place_of_queries, query_head, value_head,
    },
    fast,
};

use super::{
    Plan,
    scores::{Scores, factors, is_hidden, scores},
    tile::{
        ELEMENTS, OWN, PITCH, SIDE, TILE, add_products, operands, products, unit_col, unit_row,
        write_rows, zeros,
    },
};

/// Words from the maxima of a row to those of the next.
const LANES: usize = SIDE + 1;

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn attention_forward_kernel<F: Numeric, M: Numeric>(
    query: &Array<F>,
    key: &Array<F>,
    value: &Array<F>,
    mask: &Array<M>,
    bias: &Array<F>,
    output: &mut Array<F>,
    log_sum_exp: &mut Array<f32>,
    problem: Problem,
    negative_infinity: f32,
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
    let of_query = query_head(&problem, place.batch, place.head);
    let of_key = key_head(&problem, place.batch, kv_head);
    let of_value = value_head(&problem, place.batch, kv_head);

    let mut memory = operands();
    // Weights of the scores, with the keys outermost.
    let mut weights = SharedMemory::<f32>::new(comptime!(TILE * PITCH));
    let mut of_units = SharedMemory::<f32>::new(comptime!(TILE * LANES));
    let mut sums = zeros(comptime!(ELEMENTS * plan.value_panels));
    let mut totals = zeros(OWN);
    let mut maxima = Array::<f32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        maxima[i] = f32::new(f32::MIN);
    }
    let end = last_key(&problem, place.row + comptime!(TILE as u32));
    while place.col < end {
        let of_tile = products::<F>(
            query,
            &of_query,
            place.row,
            key,
            &of_key,
            place.col,
            &mut memory,
        );
        let scores = scores::<F, M>(&of_tile, mask, bias, &problem, &place, plan.asked);
        raise(
            &mut maxima,
            &mut totals,
            &mut sums,
            &scores,
            &mut of_units,
            plan.value_panels,
        );
        let drops = comptime!(plan.asked.drops_probabilities());
        let factors = factors(&problem, &place, drops, plan.asked);
        #[unroll]
        for i in 0..OWN {
            #[unroll]
            for j in 0..OWN {
                let slot = comptime!(i * OWN + j);
                let weight = fast::exp(scores.values[slot] - maxima[i]);
                let weight = select(is_hidden(scores.hidden, slot), 0.0f32, weight);
                totals[i] += weight;
                let at = (unit_col() + comptime!(j as u32)) * comptime!(PITCH as u32)
                    + unit_row()
                    + comptime!(i as u32);
                weights[at as usize] = weight * factors[comptime!(factor_slot(drops, slot))];
            }
        }
        add_products::<F>(
            &mut sums,
            &weights,
            value,
            &of_value,
            place.col,
            &mut memory,
            plan.value_panels,
        );
        place.col += comptime!(TILE as u32);
    }

    sync_cube();
    let of_row = write_of_units(&totals, &mut of_units);
    let mut inverses = Array::<f32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        let mut total = 0.0f32;
        for lane in 0..comptime!(SIDE as u32) {
            total += of_units[(of_row + comptime!((i * LANES) as u32) + lane) as usize];
        }
        // Not the opposite: there devices differ on NaN.
        let sees_nothing = total == 0.0f32;
        inverses[i] = 1.0f32 / total;
        if sees_nothing {
            inverses[i] = 0.0f32;
        }
        let row = place.row + unit_row() + comptime!(i as u32);
        if row < problem.queries && unit_col() == 0 {
            // Vulkan promises nothing of the logarithm of NaN.
            let log = select(total.is_nan(), total, maxima[i] + total.ln());
            let log = select(sees_nothing, negative_infinity, log);
            log_sum_exp[(head * problem.queries + row) as usize] = log;
        }
    }
    write_rows::<F>(
        output,
        &sums,
        &inverses,
        place.batch,
        place.head,
        problem.heads,
        place.row,
        problem.queries,
        problem.value_width,
        plan.value_panels,
    );
}

/// Writes a number of each of the unit's rows for the other units, and says where those of its first row start.
#[cube]
fn write_of_units(values: &Array<f32>, of_units: &mut SharedMemory<f32>) -> u32 {
    let start = unit_row() * comptime!(LANES as u32);
    let lane = unit_col() / comptime!(OWN as u32);
    #[unroll]
    for i in 0..OWN {
        of_units[(start + comptime!((i * LANES) as u32) + lane) as usize] = values[i];
    }
    sync_cube();
    start
}

/// Raises the maxima of the rows to those of a tile, and lowers what was summed up below the old ones. NaN is passed
/// over: the weights that it makes are NaN.
#[cube]
fn raise(
    maxima: &mut Array<f32>,
    totals: &mut Array<f32>,
    sums: &mut Array<f32>,
    scores: &Scores,
    of_units: &mut SharedMemory<f32>,
    #[comptime] panels: usize,
) {
    let mut of_unit = Array::<f32>::new(OWN);
    #[unroll]
    for i in 0..OWN {
        of_unit[i] = maxima[i];
        #[unroll]
        for j in 0..OWN {
            let score = scores.values[comptime!(i * OWN + j)];
            of_unit[i] = select(score > of_unit[i], score, of_unit[i]);
        }
    }
    let of_row = write_of_units(&of_unit, of_units);
    #[unroll]
    for i in 0..OWN {
        let mut max = maxima[i];
        for lane in 0..comptime!(SIDE as u32) {
            let other = of_units[(of_row + comptime!((i * LANES) as u32) + lane) as usize];
            max = select(other > max, other, max);
        }
        let decay = fast::exp(maxima[i] - max);
        maxima[i] = max;
        totals[i] *= decay;
        #[unroll]
        for panel in 0..panels {
            #[unroll]
            for j in 0..OWN {
                sums[comptime!(panel * ELEMENTS + i * OWN + j)] *= decay;
            }
        }
    }
}
