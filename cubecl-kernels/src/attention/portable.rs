//! Attention in plain FP32 arithmetic on any device, with every option.
//!
//! Tiles of 64 queries and 64 keys, whose scores never leave a cube: a unit has 4 x 4 of them in registers, and they go
//! through shared memory, less than 32 KiB of it, as an operand of the next product. No plane operations. The backward
//! pass has one launch for dQ, which goes through the keys, one or two for dK and dV, which go through the queries of
//! all heads that read them, and one or two for the bias: scores are computed again in each, nothing is added up by
//! atomics, and results repeat to the bit. Beside its results it holds one number a row, and of a bias with one row or
//! one column a sum a head.

mod bias;
mod forward;
mod keys;
mod queries;
mod scores;
mod tile;

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty, storage, zeros},
    error::KernelError,
};

use super::{
    AttentionGradients, AttentionOutput, AttentionProblem, AttentionShape, AttentionTensors,
    BACKWARD, FORWARD,
    heads::Strides4,
    in_rows,
    launch::{self, Backward, Launch},
    scores::{Asked, Wanted},
};
use bias::{Own, attention_bias_kernel, attention_bias_total_kernel};
use forward::attention_forward_kernel;
use keys::attention_keys_kernel;
use queries::attention_queries_kernel;
use tile::{TILE, UNITS};

/// The constants that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    asked: Asked,
    /// Panels of 64 features of a key, and of a value.
    panels: usize,
    value_panels: usize,
}

impl Plan {
    fn of<R: Runtime>(launch: &Launch<R>) -> Self {
        let shape = &launch.problem.shape;
        Self {
            asked: launch.asked,
            panels: shape.width.div_ceil(TILE),
            value_panels: shape.value_width.div_ceil(TILE),
        }
    }
}

/// Bytes of shared memory that every device has, of which the kernels take less.
const SHARED_MEMORY: usize = 32 << 10;

/// The reason why there is no kernel, where there is none.
pub(super) fn unsupported<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &AttentionProblem,
) -> Option<String> {
    let hardware = &client.properties().hardware;
    if hardware.max_shared_memory_size < SHARED_MEMORY
        || (hardware.max_units_per_cube as usize) < UNITS
    {
        return Some("a device with so little shared memory, or so small cubes".into());
    }
    launch::unsupported(client, problem)
}

/// The forward pass.
pub(super) fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AttentionTensors<R>,
    problem: &AttentionProblem,
) -> Result<AttentionOutput<R>, KernelError> {
    let launch = Launch::new(FORWARD, client, tensors, problem, launch::is_indexed)?;
    let shape = &problem.shape;
    let result = launch.new_output();
    let cubes = shape.batch * shape.heads * shape.queries.div_ceil(TILE);
    if cubes > 0 {
        // SAFETY: accesses are guarded by the shape, which the tensors were checked against and the results allocated
        // for.
        #[allow(unsafe_code)]
        unsafe {
            attention_forward_kernel::launch_unchecked::<R>(
                client,
                cube_grid(cubes),
                CubeDim::new_1d(UNITS as u32),
                array(tensors.query.clone()),
                array(tensors.key.clone()),
                array(tensors.value.clone()),
                array(launch.mask()),
                array(launch.bias()),
                array(result.output.clone()),
                array(result.log_sum_exp.clone()),
                launch.problem(),
                f32::NEG_INFINITY,
                Plan::of(&launch),
                problem.dtype,
                launch.mask_dtype,
            );
        }
    }
    Ok(result)
}

/// The gradients that are wanted.
pub(super) fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AttentionTensors<R>,
    forward: &AttentionOutput<R>,
    gradient: &TensorHandle<R>,
    wanted: AttentionGradients<bool>,
    problem: &AttentionProblem,
) -> Result<AttentionGradients<Option<TensorHandle<R>>>, KernelError> {
    let launch = Launch::new(BACKWARD, client, tensors, problem, launch::is_indexed)?;
    let backward = Backward::new(launch, forward, gradient, 1, launch::is_indexed)?;
    let [key, value] = backward.of_keys(wanted, launch_keys);
    Ok(AttentionGradients {
        query: wanted.query.then(|| of_queries(&backward)),
        key,
        value,
        bias: wanted.bias.then(|| of_bias(&backward)),
    })
}

fn of_queries<R: Runtime>(backward: &Backward<R>) -> TensorHandle<R> {
    let Launch {
        client,
        tensors,
        problem,
        ..
    } = backward.launch;
    let shape = &problem.shape;
    let of_query = in_rows(client, shape.query(), problem.dtype);
    let cubes = shape.batch * shape.heads * shape.queries.div_ceil(TILE);
    if cubes > 0 {
        // SAFETY: as in the forward pass.
        #[allow(unsafe_code)]
        unsafe {
            attention_queries_kernel::launch_unchecked::<R>(
                client,
                cube_grid(cubes),
                CubeDim::new_1d(UNITS as u32),
                array(tensors.query.clone()),
                array(tensors.key.clone()),
                array(tensors.value.clone()),
                array(backward.launch.mask()),
                array(backward.launch.bias()),
                array(backward.gradient.clone()),
                array(backward.log_sum_exp.clone()),
                array(backward.delta.clone()),
                array(of_query.clone()),
                backward.launch.problem(),
                Strides4::of(backward.gradient),
                Plan::of(&backward.launch),
                problem.dtype,
                backward.launch.mask_dtype,
            );
        }
    }
    of_query
}

fn launch_keys<R: Runtime>(
    backward: &Backward<R>,
    wanted: Wanted,
    [key, value]: [TensorHandle<R>; 2],
) {
    let Launch {
        client,
        tensors,
        problem,
        ..
    } = backward.launch;
    let shape = &problem.shape;
    let cubes = shape.batch * shape.kv_heads * shape.keys.div_ceil(TILE);
    // SAFETY: as in the forward pass. What is not wanted is not written.
    #[allow(unsafe_code)]
    unsafe {
        attention_keys_kernel::launch_unchecked::<R>(
            client,
            cube_grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            array(tensors.query.clone()),
            array(tensors.key.clone()),
            array(tensors.value.clone()),
            array(backward.launch.mask()),
            array(backward.launch.bias()),
            array(backward.gradient.clone()),
            array(backward.log_sum_exp.clone()),
            array(backward.delta.clone()),
            array(key),
            array(value),
            backward.launch.problem(),
            Strides4::of(backward.gradient),
            wanted,
            Plan::of(&backward.launch),
            problem.dtype,
            backward.launch.mask_dtype,
        );
    }
}

/// Of the bias, which is there.
pub(super) fn of_bias<R: Runtime>(backward: &Backward<R>) -> TensorHandle<R> {
    let Launch {
        client,
        tensors,
        problem,
        ..
    } = backward.launch;
    let bias = tensors.bias.as_ref().expect("its gradient is wanted");
    let AttentionShape {
        batch,
        heads,
        queries,
        keys,
        ..
    } = problem.shape;
    let of_bias: Vec<usize> = bias.shape().to_vec();
    let count = of_bias.iter().product::<usize>();
    if count == 0 || batch * heads * queries * keys == 0 {
        return zeros(client, of_bias, problem.dtype);
    }
    let has = |dim: usize| of_bias[dim] == problem.shape.scores()[dim];
    let own = Own {
        batch: has(0),
        head: has(1),
        row: has(2),
        col: has(3),
    };
    if own.row && own.col {
        let result = empty(client, of_bias, problem.dtype);
        launch_bias(backward, &result, own);
        return result;
    }
    let of_heads = Own {
        batch: true,
        head: true,
        row: own.row || !own.col,
        col: own.col,
    };
    let rows = if of_heads.row { queries } else { 1 };
    let cols = if of_heads.col { keys } else { 1 };
    let parts = empty(client, vec![batch, heads, rows, cols], storage::<f32>());
    launch_bias(backward, &parts, of_heads);
    let result = empty(client, of_bias, problem.dtype);
    // SAFETY: as in the forward pass.
    #[allow(unsafe_code)]
    unsafe {
        attention_bias_total_kernel::launch_unchecked::<R>(
            client,
            cube_grid(count),
            CubeDim::new_1d(UNITS as u32),
            array(parts),
            array(result.clone()),
            batch as u32,
            heads as u32,
            rows as u32,
            cols as u32,
            Own {
                row: own.row || of_heads.col,
                ..own
            },
            problem.dtype,
        );
    }
    result
}

fn launch_bias<R: Runtime>(backward: &Backward<R>, out: &TensorHandle<R>, own: Own) {
    let Launch {
        client,
        tensors,
        problem,
        ..
    } = backward.launch;
    let shape = out.shape();
    let cubes = shape[0] * shape[1] * shape[2].div_ceil(TILE) * shape[3].div_ceil(TILE);
    // SAFETY: as in the forward pass.
    #[allow(unsafe_code)]
    unsafe {
        attention_bias_kernel::launch_unchecked::<R>(
            client,
            cube_grid(cubes),
            CubeDim::new_1d(UNITS as u32),
            array(tensors.query.clone()),
            array(tensors.key.clone()),
            array(tensors.value.clone()),
            array(backward.launch.mask()),
            array(backward.launch.bias()),
            array(backward.gradient.clone()),
            array(backward.log_sum_exp.clone()),
            array(backward.delta.clone()),
            array(out.clone()),
            backward.launch.problem(),
            Strides4::of(backward.gradient),
            own,
            Plan::of(&backward.launch),
            problem.dtype,
            backward.launch.mask_dtype,
            out.dtype,
        );
    }
}
