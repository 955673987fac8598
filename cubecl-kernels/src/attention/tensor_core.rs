//! Attention on matrix instructions, with every option (Dao, 2023: FlashAttention-2).
//!
//! A plane has 16 rows of a tile of scores, which stay in its registers: what is made of them is the left operand of
//! the next product as it is. A cube has the rows of its planes in shared memory, and goes through the others' rows,
//! whose copies (`cp.async`) run under the products. The backward pass has one launch for dQ, which goes through the
//! keys, and one or two for dK and dV, which go through the queries of all heads that read them: scores are computed
//! again in each, nothing is added up by atomics, and results repeat to the bit. The gradient of a bias is the portable
//! kernel's.

mod forward;
mod keys;
mod queries;
mod scores;
mod staged;

use cubecl::{features::MmaConfig, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, storage},
    error::KernelError,
};

use super::{
    AttentionGradients, AttentionOutput, AttentionProblem, AttentionShape, AttentionTensors,
    BACKWARD, FORWARD,
    heads::Strides4,
    in_rows,
    launch::{self, Backward, Launch},
    portable,
    scores::{Asked, Wanted},
};
use forward::attention_forward_tensor_core_kernel;
use keys::attention_keys_tensor_core_kernel;
use queries::attention_queries_tensor_core_kernel;
use scores::Layout;
use staged::{CHUNK, MMA_K, MMA_M, MMA_N, PLANE, RowsSize};

/// Elements of a result that are written at once.
const PAIR: usize = 2;
/// Bytes that barriers have, and what lies between tiles that start at multiples of 128.
const BARRIERS: usize = 1 << 10;

/// The constants that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    asked: Asked,
    layout: Layout,
    /// Matrix instructions that are as deep as a key is wide, and as a value is.
    steps: usize,
    value_steps: usize,
}

impl Plan {
    fn new(asked: Asked, shape: &AttentionShape, pass: Pass) -> Self {
        Self {
            asked,
            layout: pass.layout(shape),
            steps: shape.width.div_ceil(MMA_K),
            value_steps: shape.value_width.div_ceil(MMA_K),
        }
    }

    /// So many rows of queries or keys in shared memory.
    const fn keys(&self, rows: usize) -> RowsSize {
        self.rows_of(rows, self.steps)
    }

    /// So many rows of values or gradients in shared memory.
    const fn values(&self, rows: usize) -> RowsSize {
        self.rows_of(rows, self.value_steps)
    }

    const fn rows_of(&self, rows: usize, steps: usize) -> RowsSize {
        RowsSize {
            rows,
            steps,
            units: self.units(),
        }
    }

    /// Bytes of shared memory that a pass takes at most.
    const fn memory(&self, pass: Pass) -> usize {
        let Layout { rows, cols, .. } = self.layout;
        let own = match pass {
            Pass::Forward => 0,
            Pass::Queries | Pass::Keys => self.values(rows).bytes(),
        };
        let others = self.keys(cols).bytes() + self.values(cols).bytes();
        self.keys(rows).bytes() + own + others + BARRIERS
    }

    /// Units of a cube.
    const fn units(&self) -> usize {
        self.layout.rows / MMA_M * PLANE
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Queries,
    Keys,
}

impl Pass {
    /// Tiles whose sums and scores fit into registers, and whose operands fit into the shared memory of sm_86 and
    /// sm_89.
    fn layout(self, shape: &AttentionShape) -> Layout {
        let widest = usize::max(shape.width, shape.value_width);
        let cols = match (self, widest) {
            (Self::Forward, ..=128) | (_, ..=64) => 64,
            (Self::Forward, _) | (_, ..=128) => 32,
            (_, _) => 16,
        };
        let rows = match self {
            Self::Forward if widest <= 128 && shape.queries > 64 => 128,
            Self::Forward | Self::Queries | Self::Keys => 64,
        };
        Layout {
            swapped: self == Self::Keys,
            rows,
            cols,
        }
    }
}

/// True where the kernels can read a tensor `[batch, heads, sequence, features]` as it lies in memory: neighbours are
/// neighbours along the features, all other steps are multiples of 16 bytes, 0 among them, and 32 bits index it.
pub(super) fn reads<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
    let steps = |dim: usize| shape[dim] == 1 || strides[dim] % CHUNK == 0;
    let is_aligned = shape.len() == 4
        && offset % (CHUNK * size_of::<u16>()) == 0
        && (shape[3] == 1 || strides[3] == 1)
        && (0..3).all(steps);
    (shape.contains(&0) || is_aligned) && launch::is_indexed(tensor)
}

/// The reason why there is no kernel, where there is none.
pub(super) fn unsupported<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &AttentionProblem,
) -> Option<String> {
    let AttentionProblem { dtype, shape, .. } = *problem;
    let (features, hardware) = (client.features(), &client.properties().hardware);
    let multiplies = features.matmul.mma.contains(&MmaConfig {
        a_type: dtype,
        b_type: dtype,
        cd_type: storage::<f32>(),
        m: MMA_M as u32,
        n: MMA_N as u32,
        k: MMA_K as u32,
    });
    let takes = |pass| Plan::new(Asked::default(), &shape, pass).memory(pass);
    let memory = [Pass::Forward, Pass::Queries, Pass::Keys].map(takes);
    if !multiplies || !features.matmul.ldmatrix.contains(&dtype) || !features.copy_async {
        Some(format!("matrix instructions of {dtype} on this device"))
    } else if hardware.plane_size_min != PLANE as u32
        || memory
            .iter()
            .any(|&bytes| bytes > hardware.max_shared_memory_size)
    {
        Some(format!("{shape:?} in this device's shared memory"))
    } else if [shape.width, shape.value_width]
        .iter()
        .any(|width| width % CHUNK != 0)
    {
        let (width, value_width) = (shape.width, shape.value_width);
        Some(format!("heads of {width} and {value_width} features"))
    } else {
        launch::unsupported(client, problem)
    }
}

/// The forward pass.
pub(super) fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AttentionTensors<R>,
    problem: &AttentionProblem,
) -> Result<AttentionOutput<R>, KernelError> {
    let launch = Launch::new(FORWARD, client, tensors, problem, reads)?;
    let plan = Plan::new(launch.asked, &problem.shape, Pass::Forward);
    let shape = &problem.shape;
    let result = launch.new_output();
    let cubes = shape.batch * shape.heads * shape.queries.div_ceil(plan.layout.rows);
    if cubes > 0 {
        // SAFETY: accesses are guarded by the shape, which the tensors were checked against and the results allocated
        // for; vectors are aligned.
        #[allow(unsafe_code)]
        unsafe {
            attention_forward_tensor_core_kernel::launch_unchecked::<R>(
                client,
                cube_grid(cubes),
                CubeDim::new_1d(plan.units() as u32),
                CHUNK,
                PAIR,
                array(tensors.query.clone()),
                array(tensors.key.clone()),
                array(tensors.value.clone()),
                array(launch.mask()),
                array(launch.bias()),
                array(result.output.clone()),
                array(result.log_sum_exp.clone()),
                launch.problem(),
                f32::NEG_INFINITY,
                plan,
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
    let launch = Launch::new(BACKWARD, client, tensors, problem, reads)?;
    let backward = Backward::new(launch, forward, gradient, CHUNK, reads)?;
    let [key, value] = backward.of_keys(wanted, launch_keys);
    Ok(AttentionGradients {
        query: wanted.query.then(|| of_queries(&backward)),
        key,
        value,
        bias: wanted.bias.then(|| portable::of_bias(&backward)),
    })
}

fn of_queries<R: Runtime>(backward: &Backward<R>) -> TensorHandle<R> {
    let Launch {
        client,
        tensors,
        problem,
        ..
    } = backward.launch;
    let plan = Plan::new(backward.launch.asked, &problem.shape, Pass::Queries);
    let shape = &problem.shape;
    let of_query = in_rows(client, shape.query(), problem.dtype);
    let cubes = shape.batch * shape.heads * shape.queries.div_ceil(plan.layout.rows);
    if cubes > 0 {
        // SAFETY: as in the forward pass.
        #[allow(unsafe_code)]
        unsafe {
            attention_queries_tensor_core_kernel::launch_unchecked::<R>(
                client,
                cube_grid(cubes),
                CubeDim::new_1d(plan.units() as u32),
                CHUNK,
                PAIR,
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
                f32::NEG_INFINITY,
                plan,
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
    let plan = Plan::new(backward.launch.asked, &problem.shape, Pass::Keys);
    let shape = &problem.shape;
    let cubes = shape.batch * shape.kv_heads * shape.keys.div_ceil(plan.layout.rows);
    // SAFETY: as in the forward pass. What is not wanted is not written.
    #[allow(unsafe_code)]
    unsafe {
        attention_keys_tensor_core_kernel::launch_unchecked::<R>(
            client,
            cube_grid(cubes),
            CubeDim::new_1d(plan.units() as u32),
            CHUNK,
            PAIR,
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
            f32::NEG_INFINITY,
            wanted,
            plan,
            problem.dtype,
            backward.launch.mask_dtype,
        );
    }
}
