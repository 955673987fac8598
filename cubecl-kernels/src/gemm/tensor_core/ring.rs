//! The ring of stages in shared memory, and the copies that fill them.

use cubecl::prelude::{barrier::*, *};
use half::f16;

use crate::{
    device::Strides,
    gemm::{align::ALIGNMENT, blueprint::TensorCoreBlueprint},
};

use super::{
    Geometry, PLANE,
    work::{Item, Origin},
};

/// A stage of the ring in its order: its number, where it starts in 16-byte chunks, and the parity that its barrier
/// reaches when it is full. The start is carried along since the compiler then folds what is constant into addresses.
#[derive(CubeType)]
pub(super) struct Stage {
    pub index: u32,
    pub start: u32,
    pub parity: u32,
}

#[cube]
pub(super) fn first_stage() -> Stage {
    Stage {
        index: 0u32.runtime(),
        start: 0u32.runtime(),
        parity: 0u32.runtime(),
    }
}

/// Goes on in the ring.
#[cube]
pub(super) fn next_stage(stage: &mut Stage, #[comptime] blueprint: TensorCoreBlueprint) {
    stage.index += 1;
    stage.start += comptime!(2 * blueprint.operand_chunks() as u32);
    if stage.index == comptime!(blueprint.stages as u32) {
        stage.index = 0;
        stage.start = 0;
        stage.parity = 1 - stage.parity;
    }
}

/// The stages in shared memory: of each, the rows of A and of B, and the scales of A's and of B's blocks.
#[derive(CubeType)]
pub(super) struct Ring<N: Size> {
    pub values: SharedMemory<Vector<f16, N>>,
    pub scales: SharedMemory<f32>,
}

/// Tells a stage's barrier that this unit's copies are on their way.
#[cube]
pub(super) fn arrive(
    barriers: &Sequence<Shared<Barrier>>,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for index in 0..blueprint.stages {
        if stage == comptime!(index as u32) {
            let barrier = barriers.index(index);
            barrier.commit_copy_async();
            barrier.arrive();
        }
    }
}

/// Waits until the copies of all units to a stage have landed.
#[cube]
pub(super) fn wait(
    barriers: &Sequence<Shared<Barrier>>,
    stage: &Stage,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for index in 0..blueprint.stages {
        if stage.index == comptime!(index as u32) {
            barriers.index(index).wait_parity(stage.parity);
        }
    }
}

/// With what the chunks of a row are permuted, by exclusive or: eight rows on end put equal chunks in different banks.
/// Rows a multiple of 8 apart are permuted alike.
#[cube]
pub(super) fn swizzle(row: u32, #[comptime] blueprint: TensorCoreBlueprint) -> u32 {
    let chunks = comptime!(blueprint.chunks() as u32);
    // All banks together are eight chunks wide.
    row / comptime!(8 / blueprint.chunks() as u32) % chunks
}

/// Starts the copies of an item to a stage: both operands' rows and their scales.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn fill<N: Size>(
    ring: &mut Ring<N>,
    a: &Tensor<Vector<f16, N>>,
    b: &Tensor<Vector<f16, N>>,
    residual: &Tensor<Vector<f16, N>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    item: &Item,
    origin: &Origin,
    geometry: &Geometry,
    stage: &Stage,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let (m, n, k) = (geometry.m, geometry.n, geometry.k);
    let of_a = plan(
        item,
        &geometry.a,
        origin.batch,
        origin.row,
        m,
        k,
        stage.start,
        blueprint,
    );
    if comptime!(has_fallback) && item.residual == 1 {
        copy_rows::<N>(ring, residual, &of_a, blueprint);
    } else {
        copy_rows::<N>(ring, a, &of_a, blueprint);
    }
    let of_b = plan(
        item,
        &geometry.b,
        origin.batch,
        origin.col,
        n,
        k,
        stage.start + operand,
        blueprint,
    );
    copy_rows::<N>(ring, b, &of_b, blueprint);
    copy_scales::<N>(
        ring,
        a_scales,
        b_scales,
        residual_scales,
        item,
        origin,
        geometry,
        stage.index,
        blueprint,
        has_fallback,
    );
}

/// One unit's copies of an operand's rows to a stage, in units of one copy.
#[derive(CubeType)]
struct Copies {
    /// Source of the first.
    first: u32,
    /// Source in the last row of the matrix.
    last: u32,
    /// Distance of two sources.
    apart: u32,
    /// 1, or 0 past the end of K.
    length: u32,
    /// Target of the first.
    target: u32,
}

/// This unit's copies of one operand: of one column of the stage, rows a multiple of 8 apart. What lies past the end of
/// K becomes 0. Rows past the last repeat it: what they give is not written.
#[cube]
#[allow(clippy::too_many_arguments)]
fn plan(
    item: &Item,
    strides: &Strides,
    batch: u32,
    row_0: u32,
    rows: u32,
    k_end: u32,
    start: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) -> Copies {
    let bytes = comptime!(ALIGNMENT as u32);
    let chunks = comptime!(blueprint.chunks() as u32);
    let column = UNIT_POS % chunks;
    let row = UNIT_POS / chunks;
    let chunk = column ^ swizzle(row, blueprint);
    let block = comptime!(blueprint.block as u32);
    let is_inside = item.block * block + column * bytes < k_end;
    // Nothing is read past the end of K, but no address past the end of the tensor must be formed either.
    let k = select(is_inside, item.block * chunks + column, 0u32);
    let pitch = strides.row / bytes;
    let source = batch * (strides.batch / bytes) + k;
    Copies {
        first: source + (row_0 + row) * pitch,
        last: source + (rows - 1) * pitch,
        apart: comptime!((blueprint.units() / blueprint.chunks()) as u32) * pitch,
        length: select(is_inside, 1u32, 0u32),
        target: start + row * chunks + chunk,
    }
}

#[cube]
fn copy_rows<N: Size>(
    ring: &mut Ring<N>,
    values: &Tensor<Vector<f16, N>>,
    copies: &Copies,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for copy in 0..comptime!(blueprint.copies() as u32) {
        let source = min(copies.first + copy * copies.apart, copies.last);
        // The copies of all units lie side by side.
        let target = copies.target + copy * comptime!(blueprint.units() as u32);
        copy_async_checked(
            &values.slice(source as usize, (source + copies.length) as usize),
            &mut ring.values.slice_mut(target as usize, target as usize + 1),
            comptime!(ALIGNMENT as u32 / 2),
        );
    }
}

/// Starts the copies of the scales of an item's blocks. Rows past the last block repeat its scale.
#[cube]
#[allow(clippy::too_many_arguments)]
fn copy_scales<N: Size>(
    ring: &mut Ring<N>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    item: &Item,
    origin: &Origin,
    geometry: &Geometry,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    // One plane for each operand.
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let side = UNIT_POS / comptime!(PLANE as u32);
    let row_blocks = comptime!(blueprint.row_blocks() as u32);
    if side < 2 && lane < row_blocks {
        let block = comptime!(blueprint.block as u32);
        let target = (stage * 2 + side) * row_blocks + lane;
        if side == 1 {
            let row = min(origin.col / block + lane, (geometry.n - 1) / block);
            copy_scale::<N>(
                ring,
                b_scales,
                &geometry.b_scales,
                origin.batch,
                row,
                item.block,
                target,
            );
        } else {
            let row = min(origin.row / block + lane, (geometry.m - 1) / block);
            if comptime!(has_fallback) && item.residual == 1 {
                copy_scale::<N>(
                    ring,
                    residual_scales,
                    &geometry.a_scales,
                    origin.batch,
                    row,
                    item.block,
                    target,
                );
            } else {
                copy_scale::<N>(
                    ring,
                    a_scales,
                    &geometry.a_scales,
                    origin.batch,
                    row,
                    item.block,
                    target,
                );
            }
        }
    }
}

#[cube]
fn copy_scale<N: Size>(
    ring: &mut Ring<N>,
    scales: &Tensor<f32>,
    strides: &Strides,
    batch: u32,
    row: u32,
    col: u32,
    target: u32,
) {
    let source = batch * strides.batch + row * strides.row + col * strides.col;
    copy_async(
        &scales.slice(source as usize, source as usize + 1),
        &mut ring.scales.slice_mut(target as usize, target as usize + 1),
        1u32,
    );
}
