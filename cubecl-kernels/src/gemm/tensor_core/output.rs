//! The sums of a tile on their way to memory.

use cubecl::prelude::*;

use crate::gemm::blueprint::TensorCoreBlueprint;

use super::{
    Geometry, MMA_M, MMA_N, PLANE,
    work::{Origin, plane_origin},
};

/// Adds the bias to this unit's sums.
#[cube]
pub(super) fn add_bias(
    sums: &mut Array<f32>,
    bias: &Tensor<f32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let (_, plane_col) = plane_origin(blueprint);
    #[unroll]
    for j in 0..fragments_n {
        #[unroll]
        for side in 0..2usize {
            let col = origin.col + plane_col + lane % 4 * 2 + comptime!((j * MMA_N + side) as u32);
            let mut term = 0.0f32;
            if col < geometry.n {
                term = bias[col as usize];
            }
            #[unroll]
            for i in 0..fragments_m {
                let first = comptime!((i * fragments_n + j) * 4 + side);
                sums[first] += term;
                sums[comptime!(first + 2)] += term;
            }
        }
    }
}

/// Writes this unit's sums: of each fragment, two neighbours in a row and two in the row eight below.
///
/// A pair starts at an even element of memory. In a row that starts at an odd one, a unit's second element and the
/// first one of the next unit make a pair, the last unit's next being the first one in the next fragment.
#[cube]
pub(super) fn write_sums<F: Numeric, N: Size>(
    pairs: &mut Tensor<Vector<F, N>>,
    singles: &mut Tensor<F>,
    sums: &Array<f32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] is_even: bool,
) {
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let quad = lane % 4;
    let (plane_row, plane_col) = plane_origin(blueprint);
    let first_col = origin.col + plane_col + quad * 2;
    #[unroll]
    for i in 0..fragments_m {
        #[unroll]
        for half in 0..2usize {
            let row = origin.row + plane_row + lane / 4 + comptime!((i * MMA_M + half * 8) as u32);
            let row_start = (origin.batch * geometry.m + row) * geometry.n;
            let slot = comptime!(i * fragments_n * 4 + half * 2);
            if comptime!(is_even) {
                #[unroll]
                for j in 0..fragments_n {
                    let col = first_col + comptime!((j * MMA_N) as u32);
                    if row < geometry.m && col < geometry.n {
                        let pair = as_pair::<F, N>(
                            sums[comptime!(slot + j * 4)],
                            sums[comptime!(slot + j * 4 + 1)],
                        );
                        pairs[(row_start + col) as usize / 2] = pair;
                    }
                }
            } else {
                let odd = row_start % 2;
                #[unroll]
                for j in 0..fragments_n {
                    let (first, second) = (
                        sums[comptime!(slot + j * 4)],
                        sums[comptime!(slot + j * 4 + 1)],
                    );
                    let next = comptime!(if j + 1 < fragments_n { j + 1 } else { j });
                    let offered = select(quad == 0, sums[comptime!(slot + next * 4)], first);
                    let third = plane_shuffle(offered, lane / 4 * 4 + (quad + 1) % 4);
                    let col = first_col + comptime!((j * MMA_N) as u32);
                    let end = select(row < geometry.m, geometry.n, 0u32);
                    if comptime!(j == 0) {
                        if odd == 1 && quad == 0 && col < end {
                            singles[(row_start + col) as usize] = F::cast_from(first);
                        }
                    }
                    // Rows of both kinds lie in a plane: a branch for each kind would double the stores.
                    let low = select(odd == 1, second, first);
                    let high = select(odd == 1, third, second);
                    // The next fragment's first element is another plane's after the last fragment.
                    let is_last = comptime!(j + 1 == fragments_n).runtime() && quad == 3;
                    if col + odd + 1 < end && !(is_last && odd == 1) {
                        pairs[(row_start + col + odd) as usize / 2] = as_pair::<F, N>(low, high);
                    } else if col + odd < end {
                        singles[(row_start + col + odd) as usize] = F::cast_from(low);
                    }
                }
            }
        }
    }
}

#[cube]
fn as_pair<F: Numeric, N: Size>(first: f32, second: f32) -> Vector<F, N> {
    let mut pair = Vector::<F, N>::empty();
    pair[0usize] = F::cast_from(first);
    pair[1usize] = F::cast_from(second);
    pair
}
