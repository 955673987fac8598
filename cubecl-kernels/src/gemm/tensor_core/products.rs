//! The products of a stage on matrix instructions, scaled and added to the sums.

use cubecl::{
    cmma::{MatrixIdent, MmaDefinition},
    intrinsic,
    ir::ManagedVariable,
    prelude::*,
};
use half::f16;

use crate::gemm::blueprint::TensorCoreBlueprint;

use super::{
    MMA_K, MMA_M, MMA_N, PLANE,
    ring::{Ring, Stage, swizzle},
    work::plane_origin,
};

/// Columns of fragments that are multiplied and then scaled together.
const SLICE: usize = 2;

/// Registers that `ldmatrix` filled, as an INT8 operand of the matrix instruction: the same registers under another
/// type. To reinterpret their values one by one costs instructions, since the compiler then takes the bytes apart.
#[cube]
#[allow(unused_variables)]
fn as_int8<NF: Size, NI: Size>(registers: Array<Vector<f16, NF>>) -> Array<Vector<i8, NI>> {
    intrinsic!(|scope| {
        let mut variable = *registers.expand;
        variable.ty = Vector::<i8, NI>::as_type(scope);
        ManagedVariable::Plain(variable).into()
    })
}

/// Adds the product of a stage to the sums of this plane's tile, times the scales.
///
/// It goes through the tile in slices of [`SLICE`] fragments' columns, each over the whole depth, so that the products
/// of one slice are scaled while those of the next are computed, and INT32 products of the whole tile need not be held.
#[cube]
pub(super) fn multiply<N: Size>(
    sums: &mut Array<f32>,
    ring: &Ring<N>,
    stage: &Stage,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let size!(N4) = 4usize;
    let size!(N2) = 2usize;
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let (slices, steps) = comptime!((fragments_n / SLICE, blueprint.block / MMA_K));
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let (plane_row, plane_col) = plane_origin(blueprint);
    // `ldmatrix` takes the addresses of the eight rows of matrix i from the lanes from 8 i. For A the matrices are the
    // upper and the lower rows of the left half along K, then of the right half; for B both halves of one group of
    // columns.
    let a_row = plane_row + lane % 16;
    let b_row = plane_col + lane % 8;
    let chunks = comptime!(blueprint.chunks() as u32);
    let a_swizzle = swizzle(a_row, blueprint);
    let b_swizzle = swizzle(b_row, blueprint);
    let a_start = stage.start + a_row * chunks;
    let b_start = stage.start + (b_row * chunks + operand);
    let scales = load_scales::<N>(ring, plane_row, plane_col, stage.index, blueprint);

    let definition = MmaDefinition::<i8, i8, i32>::new(MMA_M, MMA_N, MMA_K);
    let mut zero = Array::<Vector<i32, N2>>::new(2usize);
    zero[0] = Vector::new(0i32);
    zero[1] = Vector::new(0i32);
    #[unroll]
    for slice in 0..slices {
        let mut products = Sequence::<Array<Vector<i32, N2>>>::new();
        #[unroll]
        for step in 0..comptime!(steps as u32) {
            let a_column = a_start + ((lane / 16 + comptime!(step * 2)) ^ a_swizzle);
            let b_column = b_start + ((lane / 8 % 2 + comptime!(step * 2)) ^ b_swizzle);
            let mut rows = Sequence::<Array<Vector<i8, N4>>>::new();
            #[unroll]
            for i in 0..comptime!(fragments_m as u32) {
                let index = a_column + comptime!(i * MMA_M as u32 * chunks);
                rows.push(as_int8::<N2, N4>(
                    definition.load_matrix::<Vector<f16, N>, N2>(
                        &ring.values.slice(index as usize, index as usize + 1),
                        MatrixIdent::A,
                        4usize,
                        false,
                    ),
                ));
            }
            #[unroll]
            for j in 0..SLICE {
                let index = b_column + comptime!(((slice * SLICE + j) * MMA_N) as u32 * chunks);
                let cols = as_int8::<N2, N4>(definition.load_matrix::<Vector<f16, N>, N2>(
                    &ring.values.slice(index as usize, index as usize + 1),
                    MatrixIdent::B,
                    2usize,
                    false,
                ));
                #[unroll]
                for i in 0..fragments_m {
                    if comptime!(step == 0) {
                        products.push(definition.execute(rows.index(i), &cols, &zero));
                    } else {
                        definition.execute_inplace(
                            rows.index(i),
                            &cols,
                            products.index_mut(comptime!(j * fragments_m + i)),
                        );
                    }
                }
            }
        }
        #[unroll]
        for j in 0..SLICE {
            #[unroll]
            for i in 0..fragments_m {
                let column = comptime!(slice * SLICE + j);
                let product = products.index(comptime!(j * fragments_m + i));
                let scale = scales[comptime!(blueprint.plane_block(i, column))];
                #[unroll]
                for slot in 0..4usize {
                    let pair = product[comptime!(slot / 2)];
                    sums[comptime!((i * fragments_n + column) * 4 + slot)] +=
                        f32::cast_from(pair[comptime!(slot % 2)]) * scale;
                }
            }
        }
    }
}

/// The products of both operands' scales in this plane's tile, by row and column of its blocks.
#[cube]
fn load_scales<N: Size>(
    ring: &Ring<N>,
    plane_row: u32,
    plane_col: u32,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) -> Array<f32> {
    let (blocks_m, blocks_n) = comptime!(blueprint.plane_blocks());
    let block = comptime!(blueprint.block as u32);
    let row_blocks = comptime!(blueprint.row_blocks() as u32);
    let a_start = stage * comptime!(2 * row_blocks) + plane_row / block;
    let b_start = stage * comptime!(2 * row_blocks) + row_blocks + plane_col / block;
    let mut scales = Array::<f32>::new(comptime!(blocks_m * blocks_n));
    #[unroll]
    for i in 0..comptime!(blocks_m as u32) {
        #[unroll]
        for j in 0..comptime!(blocks_n as u32) {
            scales[comptime!(i as usize * blocks_n + j as usize)] =
                ring.scales[(a_start + i) as usize] * ring.scales[(b_start + j) as usize];
        }
    }
    scales
}
