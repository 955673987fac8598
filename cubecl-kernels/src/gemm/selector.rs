//! Chooses the kernel of a product from the device and the problem.

use cubecl::{features::MmaConfig, prelude::*};

use crate::{
    device::{is_hopper, storage},
    error::KernelError,
};

use super::{
    GemmProblem, OPERATION, Strategy,
    blueprint::{Blueprint, HopperBlueprint, PortableBlueprint, TensorCoreBlueprint},
    hopper, rowwise,
};

/// Depth at which INT32 sums of products of INT8 are scaled at the latest: 2^17 * 127^2 < 2^31.
const MAX_DEPTH: usize = 1 << 17;
/// Stages of the ring in shared memory: with more, two cubes no longer fit on a multiprocessor together.
const MAX_STAGES: usize = 3;
/// Tiles of the tensor-core kernel, those of its planes, and their speeds beside one another where tiles are many.
///
/// These and the next are rounded from times on one NVIDIA H200, 2026-11-22: 192 to 1,024 tiles of 128 x 128.
const TENSOR_CORE_TILES: [(usize, (usize, usize), f32); 2] =
    [(128, (64, 64), 1.0), (64, (32, 32), 0.85)];
/// The speed of a cube that has no other on its multiprocessor, which would compute while it waits.
const ALONE: f32 = 0.76;
/// The most that two stages for each of two cubes may cost or save beside three for one, where shared memory allows no
/// more: only a measurement can tell.
const UNSURE: f32 = 1.06;
/// Assumed of a device that does not say how many it has.
const MULTIPROCESSORS: usize = 64;

/// A blueprint of a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranked {
    pub blueprint: Blueprint,
    /// Expected time over the least that is possible: with all multiprocessors busy to the end, and with the tiles that
    /// are the fastest where they are many.
    pub cost: f32,
}

/// The blueprint of a product that is expected to be the fastest: the first of its [`candidates`]. With the feature
/// `autotune` a measurement may take another one.
///
/// # Errors
///
/// When `strategy` names a kernel that the device or the scale geometry rules out, or the depth of a scale is neither a
/// multiple of 16 nor all of K.
pub fn select<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
    strategy: Strategy,
) -> Result<Blueprint, KernelError> {
    Ok(rank(client, problem, strategy)?[0].blueprint)
}

/// The blueprints among which a product may choose, at least one, the one that is expected to be the fastest first.
///
/// They are blueprints of one kernel, and give the same bits.
///
/// # Errors
///
/// Those of [`select()`].
pub fn candidates<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
    strategy: Strategy,
) -> Result<Vec<Blueprint>, KernelError> {
    let ranked = rank(client, problem, strategy)?;
    Ok(ranked.into_iter().map(|it| it.blueprint).collect())
}

/// The [`candidates`] with their costs.
pub(super) fn rank<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
    strategy: Strategy,
) -> Result<Vec<Ranked>, KernelError> {
    let unsupported = |remedy| {
        move |reason| KernelError::Unsupported {
            operation: OPERATION,
            reason,
            remedy,
        }
    };
    let mut ranked = match strategy {
        Strategy::Portable => portable(problem)?,
        Strategy::TensorCore => tensor_core(client, problem)
            .map_err(unsupported("use Strategy::Auto or Strategy::Portable"))?,
        Strategy::Hopper => wgmma(client, problem).map_err(unsupported(
            "use Strategy::Auto, Strategy::TensorCore or Strategy::Portable",
        ))?,
        Strategy::Auto => wgmma(client, problem)
            .or_else(|_| tensor_core(client, problem))
            .or_else(|_| portable(problem))?,
        Strategy::Exactly(blueprint) => {
            let of_kernel = match blueprint {
                Blueprint::Portable(_) => Strategy::Portable,
                Blueprint::TensorCore(_) => Strategy::TensorCore,
                Blueprint::Hopper(_) | Blueprint::HopperRowwise(_) => Strategy::Hopper,
            };
            let mut ranked = rank(client, problem, of_kernel)?;
            ranked.retain(|candidate| candidate.blueprint == blueprint);
            if ranked.is_empty() {
                let reason = format!("{blueprint:?} for {problem:?}");
                return Err(unsupported("use one of the product's candidates")(reason));
            }
            ranked
        }
    };
    ranked.sort_by(|a, b| a.cost.total_cmp(&b.cost));
    Ok(ranked)
}

fn portable(problem: &GemmProblem) -> Result<Vec<Ranked>, KernelError> {
    let mut depth = MAX_DEPTH;
    for (_, depth_per_scale) in [problem.a_scale_block, problem.b_scale_block] {
        if depth_per_scale >= problem.k {
            continue;
        }
        if depth_per_scale % 16 != 0 {
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                reason: format!("scales that cover {depth_per_scale} elements along K"),
                remedy: "quantize so that scales cover a multiple of 16 along K, or all of it",
            });
        }
        depth = greatest_common_divisor(depth, depth_per_scale);
    }
    Ok(vec![Ranked {
        blueprint: Blueprint::Portable(PortableBlueprint { depth }),
        cost: 1.0,
    }])
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Side of the scale blocks that kernels on matrix instructions take.
fn square_block(problem: &GemmProblem) -> Result<usize, String> {
    let GemmProblem {
        a_scale_block: of_a,
        b_scale_block: of_b,
        ..
    } = *problem;
    match of_a {
        (block @ (32 | 64 | 128), depth) if depth == block && of_b == of_a => Ok(block),
        _ => Err(format!(
            "scales of {of_a:?} and {of_b:?} elements, not square blocks of 32, 64 or 128"
        )),
    }
}

/// True where the device has what products of integers on `mma.sync` take: INT8 m16n8k32, `ldmatrix` and `cp.async`.
pub(super) fn has_int8_mma<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let config = MmaConfig {
        a_type: storage::<i8>(),
        b_type: storage::<i8>(),
        cd_type: storage::<i32>(),
        m: 16,
        n: 8,
        k: 32,
    };
    let features = client.features();
    features.matmul.mma.contains(&config)
        && features.matmul.ldmatrix.contains(&storage::<half::f16>())
        && features.copy_async
}

fn tensor_core<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
) -> Result<Vec<Ranked>, String> {
    if !has_int8_mma(client) {
        return Err("a device without INT8 m16n8k32 instructions, ldmatrix and cp.async".into());
    }
    let block = square_block(problem)?;
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware
        .num_streaming_multiprocessors
        .map_or(MULTIPROCESSORS, |count| count as usize);
    // One KiB is left to the barriers.
    let shared_memory = hardware.max_shared_memory_size - 1024;
    let GemmProblem { batch, m, n, .. } = *problem;
    let least = (batch * m * n).max(1) as f32 / multiprocessors as f32;
    let mut ranked = Vec::new();
    for (tile, plane_tile, speed) in TENSOR_CORE_TILES {
        let stage_bytes = TensorCoreBlueprint::stage_bytes(tile, block);
        let tiles = batch * m.div_ceil(tile) * n.div_ceil(tile);
        let turns = tiles.div_ceil(multiprocessors);
        let speed = if turns == 1 { speed * ALONE } else { speed };
        let cost = (turns * tile * tile) as f32 / speed / least;
        let mut push = |stages, cost| {
            let blueprint = Blueprint::TensorCore(TensorCoreBlueprint {
                tile,
                plane_tile,
                block,
                stages,
            });
            ranked.push(Ranked { blueprint, cost });
        };
        let cubes = |stages: usize| shared_memory / (stages * stage_bytes);
        let most = (shared_memory / stage_bytes).min(MAX_STAGES);
        if most > 2 && cubes(most) < 2 && cubes(2) >= 2 {
            push(most, cost * UNSURE);
            push(2, cost * UNSURE * UNSURE);
        } else if most >= 2 {
            push(most, cost);
        }
    }
    if ranked.is_empty() {
        return Err(format!("{shared_memory} bytes of shared memory"));
    }
    Ok(ranked)
}

fn wgmma<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
) -> Result<Vec<Ranked>, String> {
    if !is_hopper(client) {
        return Err("a device that is not of CUDA's architecture sm_90".into());
    }
    if problem.k == 0 {
        return Err("an empty sum".into());
    }
    match square_block(problem) {
        Ok(block) if problem.fallback && block != HopperBlueprint::DEPTH => {
            Err(format!("a residual in blocks of {block}, not 128"))
        }
        Ok(_) => Ok(hopper::ranked(client, problem).into()),
        Err(_) if rowwise::covers_k(problem) && !problem.fallback && problem.k <= MAX_DEPTH => {
            Ok(hopper::rowwise::ranked(client, problem).into())
        }
        Err(reason) if problem.fallback => Err(format!("a residual, and {reason}")),
        Err(reason) => Err(format!(
            "{reason}, nor of rows or matrices with K up to {MAX_DEPTH}"
        )),
    }
}
