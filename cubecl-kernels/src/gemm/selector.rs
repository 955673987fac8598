//! Chooses the kernel of a product from the device and the problem.

use cubecl::{features::MmaConfig, prelude::*};

use crate::{device::storage, error::KernelError};

use super::{
    GemmProblem, OPERATION, Strategy,
    blueprint::{Blueprint, HopperBlueprint, PortableBlueprint, TensorCoreBlueprint},
    hopper::is_supported,
};

/// Depth at which INT32 sums of products of INT8 are scaled at the latest: 2^17 * 127^2 < 2^31.
const MAX_DEPTH: usize = 1 << 17;
/// Stages of the ring in shared memory: with more, two cubes no longer fit on a multiprocessor together.
const MAX_STAGES: usize = 3;
/// Output tiles from which a device is busy with large ones, where it does not say how many multiprocessors it has.
const BUSY: usize = 64;

/// The kernel of a product.
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
    match strategy {
        Strategy::Portable => portable(problem),
        Strategy::TensorCore => {
            tensor_core(client, problem).map_err(|reason| KernelError::Unsupported {
                operation: OPERATION,
                reason,
                remedy: "use Strategy::Auto or Strategy::Portable",
            })
        }
        Strategy::Hopper => hopper(client, problem).map_err(|reason| KernelError::Unsupported {
            operation: OPERATION,
            reason,
            remedy: "use Strategy::Auto, Strategy::TensorCore or Strategy::Portable",
        }),
        Strategy::Auto => hopper(client, problem)
            .or_else(|_| tensor_core(client, problem))
            .or_else(|_| portable(problem)),
    }
}

fn portable(problem: &GemmProblem) -> Result<Blueprint, KernelError> {
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
    Ok(Blueprint::Portable(PortableBlueprint { depth }))
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

fn tensor_core<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
) -> Result<Blueprint, String> {
    let config = MmaConfig {
        a_type: storage::<i8>(),
        b_type: storage::<i8>(),
        cd_type: storage::<i32>(),
        m: 16,
        n: 8,
        k: 32,
    };
    let features = client.features();
    if !features.matmul.mma.contains(&config)
        || !features.matmul.ldmatrix.contains(&storage::<half::f16>())
        || !features.copy_async
    {
        return Err("a device without INT8 m16n8k32 instructions, ldmatrix and cp.async".into());
    }
    let block = problem.a_scale_block.0;
    let square = (block, block);
    if problem.a_scale_block != square
        || problem.b_scale_block != square
        || !matches!(block, 32 | 64 | 128)
    {
        return Err(format!(
            "scales of {:?} and {:?} elements, not square blocks of 32, 64 or 128",
            problem.a_scale_block, problem.b_scale_block
        ));
    }
    let tiles = |size| problem.batch * problem.m.div_ceil(size) * problem.n.div_ceil(size);
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware
        .num_streaming_multiprocessors
        .map_or(BUSY, |count| count as usize);
    let (tile, plane_tile) = if tiles(128) >= multiprocessors {
        (128, (64, 64))
    } else {
        (64, (32, 32))
    };
    let stage_bytes = TensorCoreBlueprint::stage_bytes(tile, block);
    // One KiB is left to the barriers.
    let shared_memory = hardware.max_shared_memory_size - 1024;
    let stages = (shared_memory / stage_bytes).min(MAX_STAGES);
    if stages < 2 {
        return Err(format!("{shared_memory} bytes of shared memory"));
    }
    Ok(Blueprint::TensorCore(TensorCoreBlueprint {
        tile,
        plane_tile,
        block,
        stages,
    }))
}

fn hopper<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
) -> Result<Blueprint, String> {
    if !is_supported(client) {
        return Err("a device that is not of CUDA's architecture sm_90".into());
    }
    let square = (HopperBlueprint::TILE_M, HopperBlueprint::DEPTH);
    if problem.a_scale_block != square || problem.b_scale_block != square {
        return Err(format!(
            "scales of {:?} and {:?} elements, not square blocks of 128",
            problem.a_scale_block, problem.b_scale_block
        ));
    }
    if problem.k == 0 {
        return Err("an empty sum".into());
    }
    Ok(Blueprint::Hopper(HopperBlueprint::new(
        client,
        problem.batch,
        problem.m,
        problem.n,
        HopperBlueprint::CHUNK,
    )))
}
