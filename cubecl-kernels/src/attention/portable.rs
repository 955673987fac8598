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
mod rows;
mod scores;
mod tile;

use cubecl::{
    ir::{StorageType, features::TypeUsage},
    prelude::*,
    std::tensor::TensorHandle,
};

use crate::{
    device::{array, check_float, cube_grid, empty, has_u64, or_unused, storage, zeros},
    error::KernelError,
    rounding::{Rounding, random_stream},
};

use super::{
    AttentionGradients, AttentionOptions, AttentionOutput, AttentionProblem, AttentionShape,
    AttentionTensors, BACKWARD, FORWARD, in_rows,
};
use bias::{Own, attention_bias_kernel, attention_bias_total_kernel};
use forward::attention_forward_kernel;
use keys::{Wanted, attention_keys_kernel};
use queries::attention_queries_kernel;
use rows::attention_rows_kernel;
use scores::{DropoutNumbersLaunch, MAX_SEQUENCE, Plan, ProblemLaunch};
use tile::{Strides4, Strides4Launch, TILE, UNITS};

/// The widest heads: their sums are in registers.
const MAX_WIDTH: usize = 256;
/// Features of keys and of values together whose gradients a unit has in registers at once.
const SUMS: usize = 256;
/// Bytes of shared memory that every device has, of which the kernels take less.
const SHARED_MEMORY: usize = 32 << 10;

/// True where 32 bits index a tensor as it lies in memory.
pub(super) fn reads<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
    let dimensions = tensor.shape().iter().zip(tensor.strides().iter());
    let last: usize = dimensions
        .map(|(&extent, &stride)| extent.saturating_sub(1) * stride)
        .sum();
    u32::try_from(last).is_ok()
}

/// What there is no kernel for.
pub(super) fn unsupported<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &AttentionProblem,
) -> Option<String> {
    let AttentionProblem { dtype, shape, .. } = *problem;
    let hardware = &client.properties().hardware;
    let widest = usize::max(shape.width, shape.value_width);
    let of_rows = |shape: [usize; 4]| shape.into_iter().product::<usize>();
    let elements = [shape.query(), shape.key(), shape.value(), shape.output()].map(of_rows);
    let longest = usize::max(shape.queries, shape.keys);
    if check_float(client, FORWARD, "query", dtype).is_err() {
        Some(format!("tensors of {dtype} on this device"))
    } else if hardware.max_shared_memory_size < SHARED_MEMORY
        || (hardware.max_units_per_cube as usize) < UNITS
    {
        Some("a device with so little shared memory, or so small cubes".into())
    } else if widest > MAX_WIDTH {
        let (width, value_width) = (shape.width, shape.value_width);
        Some(format!("heads of {width} and {value_width} features"))
    } else if longest > MAX_SEQUENCE || elements.iter().any(|&it| it > u32::MAX as usize) {
        Some(format!("scores {:?}", shape.scores()))
    } else {
        None
    }
}

/// The forward pass.
pub(super) fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AttentionTensors<R>,
    problem: &AttentionProblem,
) -> Result<AttentionOutput<R>, KernelError> {
    let launch = Launch::new(FORWARD, client, tensors, problem)?;
    let shape = &problem.shape;
    let result = AttentionOutput {
        output: in_rows(client, shape.output(), problem.dtype),
        log_sum_exp: empty(client, shape.rows().to_vec(), storage::<f32>()),
    };
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
                launch.plan,
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
    let launch = Launch::new(BACKWARD, client, tensors, problem)?;
    check_reads(BACKWARD, "output", &forward.output)?;
    check_reads(BACKWARD, "gradient", gradient)?;
    let shape = &problem.shape;
    let delta = empty(client, shape.rows().to_vec(), storage::<f32>());
    let count: usize = shape.rows().iter().product();
    if count > 0 {
        // SAFETY: as in the forward pass.
        #[allow(unsafe_code)]
        unsafe {
            attention_rows_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                array(forward.output.clone()),
                array(gradient.clone()),
                array(delta.clone()),
                launch.problem(),
                Strides4::of(&forward.output),
                Strides4::of(gradient),
                problem.dtype,
            );
        }
    }
    let backward = Backward {
        launch,
        log_sum_exp: &forward.log_sum_exp,
        gradient,
        delta,
    };
    let [key, value] = backward.of_keys(wanted);
    Ok(AttentionGradients {
        query: wanted.query.then(|| backward.of_queries()),
        key,
        value,
        bias: match &tensors.bias {
            Some(bias) if wanted.bias => Some(backward.of_bias(bias)),
            Some(_) | None => None,
        },
    })
}

/// What all kernels of a call are launched with.
struct Launch<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    tensors: &'a AttentionTensors<R>,
    problem: &'a AttentionProblem,
    plan: Plan,
    mask_dtype: StorageType,
}

impl<'a, R: Runtime> Launch<'a, R> {
    fn new(
        operation: &'static str,
        client: &'a ComputeClient<R>,
        tensors: &'a AttentionTensors<R>,
        problem: &'a AttentionProblem,
    ) -> Result<Self, KernelError> {
        let AttentionTensors {
            query,
            key,
            value,
            mask,
            bias,
        } = tensors;
        for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
            check_reads(operation, name, tensor)?;
        }
        if let Some(bias) = bias {
            check_reads(operation, "bias", bias)?;
        }
        if let Some(mask) = mask {
            check_reads(operation, "mask", mask)?;
            check_mask(operation, client, mask.dtype)?;
        }
        let AttentionProblem { shape, options, .. } = problem;
        Ok(Self {
            client,
            tensors,
            problem,
            plan: Plan {
                has_mask: mask.is_some(),
                has_bias: bias.is_some(),
                has_softcap: options.softcap.is_some(),
                has_dropout: options.dropout.is_some(),
                wide: has_u64(client),
                panels: shape.width.div_ceil(TILE),
                value_panels: shape.value_width.div_ceil(TILE),
            },
            mask_dtype: mask.as_ref().map_or(storage::<u32>(), |mask| mask.dtype),
        })
    }

    fn mask(&self) -> TensorHandle<R> {
        or_unused(
            self.tensors.mask.as_ref(),
            &self.tensors.query,
            self.mask_dtype,
        )
    }

    fn bias(&self) -> TensorHandle<R> {
        or_unused(
            self.tensors.bias.as_ref(),
            &self.tensors.query,
            self.problem.dtype,
        )
    }

    fn problem(&self) -> ProblemLaunch<R> {
        let AttentionProblem { shape, options, .. } = self.problem;
        let AttentionOptions {
            scale,
            softcap,
            band,
            dropout,
        } = *options;
        // No bound is farther away than all positions together.
        let bound = |bound: Option<u32>| {
            let all = shape.queries + shape.keys;
            bound.map_or(all, |bound| all.min(bound as usize)) as u32
        };
        let (rate, kept, rounding) = match dropout {
            Some(dropout) => {
                let rounding = Rounding::Stochastic(dropout.key);
                (dropout.rate, dropout.kept_factor(), rounding)
            }
            None => (0.0, 1.0, Rounding::Nearest),
        };
        let optional = |tensor: &Option<TensorHandle<R>>| match tensor {
            Some(tensor) => Strides4::of(tensor),
            None => Strides4Launch::new(0, 0, 0, 0),
        };
        ProblemLaunch::new(
            shape.batch as u32,
            shape.heads as u32,
            shape.group() as u32,
            shape.queries as u32,
            shape.keys as u32,
            shape.width as u32,
            shape.value_width as u32,
            bound(band.left),
            bound(band.right),
            scale,
            softcap.unwrap_or(1.0),
            DropoutNumbersLaunch::new(rate, kept, random_stream(rounding)),
            Strides4::of(&self.tensors.query),
            Strides4::of(&self.tensors.key),
            Strides4::of(&self.tensors.value),
            optional(&self.tensors.mask),
            optional(&self.tensors.bias),
        )
    }
}

/// What the kernels of the backward pass are launched with.
struct Backward<'a, R: Runtime> {
    launch: Launch<'a, R>,
    log_sum_exp: &'a TensorHandle<R>,
    gradient: &'a TensorHandle<R>,
    delta: TensorHandle<R>,
}

impl<R: Runtime> Backward<'_, R> {
    fn of_queries(&self) -> TensorHandle<R> {
        let Launch {
            client,
            tensors,
            problem,
            ..
        } = self.launch;
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
                    array(self.launch.mask()),
                    array(self.launch.bias()),
                    array(self.gradient.clone()),
                    array(self.log_sum_exp.clone()),
                    array(self.delta.clone()),
                    array(of_query.clone()),
                    self.launch.problem(),
                    Strides4::of(self.gradient),
                    self.launch.plan,
                    problem.dtype,
                    self.launch.mask_dtype,
                );
            }
        }
        of_query
    }

    /// Of keys and of values.
    fn of_keys(&self, wanted: AttentionGradients<bool>) -> [Option<TensorHandle<R>>; 2] {
        let Launch {
            client, problem, ..
        } = self.launch;
        let shape = &problem.shape;
        let new = |shape| in_rows(client, shape, problem.dtype);
        let key = wanted.key.then(|| new(shape.key()));
        let value = wanted.value.then(|| new(shape.value()));
        match (&key, &value) {
            (Some(_), Some(_)) if shape.width + shape.value_width > SUMS => {
                self.launch_keys(key.as_ref(), None);
                self.launch_keys(None, value.as_ref());
            }
            (None, None) => {}
            (_, _) => self.launch_keys(key.as_ref(), value.as_ref()),
        }
        [key, value]
    }

    fn launch_keys(&self, key: Option<&TensorHandle<R>>, value: Option<&TensorHandle<R>>) {
        let Launch {
            client,
            tensors,
            problem,
            ..
        } = self.launch;
        let shape = &problem.shape;
        let cubes = shape.batch * shape.kv_heads * shape.keys.div_ceil(TILE);
        if cubes == 0 {
            return;
        }
        let wanted = Wanted {
            key: key.is_some(),
            value: value.is_some(),
        };
        let any = key.or(value).unwrap_or(&self.delta);
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
                array(self.launch.mask()),
                array(self.launch.bias()),
                array(self.gradient.clone()),
                array(self.log_sum_exp.clone()),
                array(self.delta.clone()),
                array(or_unused(key, any, problem.dtype)),
                array(or_unused(value, any, problem.dtype)),
                self.launch.problem(),
                Strides4::of(self.gradient),
                wanted,
                self.launch.plan,
                problem.dtype,
                self.launch.mask_dtype,
            );
        }
    }

    fn of_bias(&self, bias: &TensorHandle<R>) -> TensorHandle<R> {
        let Launch {
            client, problem, ..
        } = self.launch;
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
            self.launch_bias(&result, own);
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
        self.launch_bias(&parts, of_heads);
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

    fn launch_bias(&self, out: &TensorHandle<R>, own: Own) {
        let Launch {
            client,
            tensors,
            problem,
            ..
        } = self.launch;
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
                array(self.launch.mask()),
                array(self.launch.bias()),
                array(self.gradient.clone()),
                array(self.log_sum_exp.clone()),
                array(self.delta.clone()),
                array(out.clone()),
                self.launch.problem(),
                Strides4::of(self.gradient),
                own,
                self.launch.plan,
                problem.dtype,
                self.launch.mask_dtype,
                out.dtype,
            );
        }
    }
}

/// Accepts a tensor that 32 bits index.
fn check_reads<R: Runtime>(
    operation: &'static str,
    name: &'static str,
    tensor: &TensorHandle<R>,
) -> Result<(), KernelError> {
    match reads(tensor) {
        true => Ok(()),
        false => Err(KernelError::Unsupported {
            operation,
            reason: format!(
                "{name} of shape {:?} with strides {:?}",
                tensor.shape(),
                tensor.strides()
            ),
            remedy: "pass a contiguous copy, or split the batch: kernels index with 32 bits",
        }),
    }
}

/// Accepts a mask of bytes or words that the device reads.
fn check_mask<R: Runtime>(
    operation: &'static str,
    client: &ComputeClient<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    let is_flag = dtype == storage::<u8>() || dtype == storage::<u32>();
    let usage = client.features().type_usage(dtype);
    match is_flag && usage.contains(TypeUsage::Buffer) {
        true => Ok(()),
        false => Err(KernelError::Dtype {
            operation,
            tensor: "mask",
            dtype: dtype.to_string(),
            remedy: "pass u8 or u32, of which a device may have one only",
        }),
    }
}
