//! The arguments of CubeCL's kernels, and their requirements on tensors.

use cubecl::{
    ir::{StorageType, features::TypeUsage},
    prelude::*,
    std::tensor::TensorHandle,
};

use crate::{
    device::{check_float, empty, has_u64, or_unused, storage},
    error::KernelError,
    rounding::{Rounding, random_stream},
};

use super::{
    AttentionGradients, AttentionOptions, AttentionOutput, AttentionProblem, AttentionProducts,
    AttentionTensors, BACKWARD, FORWARD,
    delta::delta,
    heads::{Strides4, Strides4Launch},
    in_rows,
    scores::{Asked, DropoutNumbersLaunch, MAX_SEQUENCE, ProblemLaunch, Wanted},
};

/// The widest heads: their sums are in registers.
const MAX_WIDTH: usize = 256;
/// Features of keys and of values together whose gradients units have in registers at once.
const SUMS: usize = 256;

/// The reason why no kernel of CubeCL computes it, on any device, where there is one.
pub(super) fn unsupported<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &AttentionProblem,
) -> Option<String> {
    let AttentionProblem {
        dtype,
        shape,
        options,
        ..
    } = *problem;
    let widest = usize::max(shape.width, shape.value_width);
    let of_rows = |shape: [usize; 4]| shape.into_iter().product::<usize>();
    let elements = [shape.query(), shape.key(), shape.value(), shape.output()].map(of_rows);
    let longest = usize::max(shape.queries, shape.keys);
    if check_float(client, FORWARD, "query", dtype).is_err() {
        Some(format!("tensors of {dtype} on this device"))
    } else if widest > MAX_WIDTH {
        let (width, value_width) = (shape.width, shape.value_width);
        Some(format!("heads of {width} and {value_width} features"))
    } else if longest > MAX_SEQUENCE || elements.iter().any(|&it| it > u32::MAX as usize) {
        Some(format!("scores {:?}", shape.scores()))
    } else if options.products == AttentionProducts::Int8 {
        Some("INT8 products".into())
    } else {
        None
    }
}

/// The arguments of all kernels of a call.
pub(super) struct Launch<'a, R: Runtime> {
    pub client: &'a ComputeClient<R>,
    pub tensors: &'a AttentionTensors<R>,
    pub problem: &'a AttentionProblem,
    pub asked: Asked,
    pub mask_dtype: StorageType,
}

impl<'a, R: Runtime> Launch<'a, R> {
    /// `reads` says which tensors the kernels read as they lie in memory.
    pub(super) fn new(
        operation: &'static str,
        client: &'a ComputeClient<R>,
        tensors: &'a AttentionTensors<R>,
        problem: &'a AttentionProblem,
        reads: fn(&TensorHandle<R>) -> bool,
    ) -> Result<Self, KernelError> {
        let AttentionTensors {
            query,
            key,
            value,
            mask,
            bias,
        } = tensors;
        for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
            check_reads(operation, name, tensor, reads)?;
        }
        if let Some(bias) = bias {
            check_reads(operation, "bias", bias, is_indexed)?;
        }
        if let Some(mask) = mask {
            check_mask(operation, client, mask)?;
        }
        let options = &problem.options;
        Ok(Self {
            client,
            tensors,
            problem,
            asked: Asked {
                has_mask: mask.is_some(),
                has_bias: bias.is_some(),
                has_softcap: options.softcap.is_some(),
                dropped: options.dropout.map(|dropout| dropout.dropped),
                wide: has_u64(client),
            },
            mask_dtype: mask.as_ref().map_or(storage::<u32>(), |mask| mask.dtype),
        })
    }

    /// The tensors that the forward pass writes.
    pub(super) fn new_output(&self) -> AttentionOutput<R> {
        let shape = &self.problem.shape;
        AttentionOutput {
            output: in_rows(self.client, shape.output(), self.problem.dtype),
            log_sum_exp: empty(self.client, shape.rows().to_vec(), storage::<f32>()),
        }
    }

    pub(super) fn mask(&self) -> TensorHandle<R> {
        or_unused(
            self.tensors.mask.as_ref(),
            &self.tensors.query,
            self.mask_dtype,
        )
    }

    pub(super) fn bias(&self) -> TensorHandle<R> {
        or_unused(
            self.tensors.bias.as_ref(),
            &self.tensors.query,
            self.problem.dtype,
        )
    }

    pub(super) fn problem(&self) -> ProblemLaunch<R> {
        let AttentionProblem { shape, options, .. } = self.problem;
        let AttentionOptions {
            scale,
            softcap,
            band,
            dropout,
            products: _,
        } = *options;
        // No bound is farther away than all positions together.
        let bound = |bound: Option<u32>| {
            let all = shape.queries + shape.keys;
            bound.map_or(all, |bound| all.min(bound as usize)) as u32
        };
        let (rate, kept, rounding) = match dropout {
            Some(dropout) => {
                let draw = dropout.draw;
                let rounding = Rounding::Stochastic(draw.key);
                (draw.rate, draw.kept_factor(), rounding)
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

/// Computes the gradients of keys and of values that are wanted, into these tensors; the other one it does not write.
type LaunchKeys<R> = fn(&Backward<R>, Wanted, [TensorHandle<R>; 2]);

/// The arguments of the kernels of the backward pass.
pub(super) struct Backward<'a, R: Runtime> {
    pub launch: Launch<'a, R>,
    pub log_sum_exp: &'a TensorHandle<R>,
    pub gradient: &'a TensorHandle<R>,
    /// [`delta()`] of all rows.
    pub delta: TensorHandle<R>,
}

impl<'a, R: Runtime> Backward<'a, R> {
    /// Computes `Delta` of rows whose features are read `vector` at once.
    pub(super) fn new(
        launch: Launch<'a, R>,
        forward: &'a AttentionOutput<R>,
        gradient: &'a TensorHandle<R>,
        vector: usize,
        reads: fn(&TensorHandle<R>) -> bool,
    ) -> Result<Self, KernelError> {
        let output = &forward.output;
        for (name, tensor) in [("output", output), ("gradient", gradient)] {
            check_reads(BACKWARD, name, tensor, reads)?;
        }
        let delta = delta(&launch, output, gradient, vector);
        Ok(Self {
            launch,
            log_sum_exp: &forward.log_sum_exp,
            gradient,
            delta,
        })
    }

    /// The gradients of keys and of values, by one launch or by one for each.
    pub(super) fn of_keys(
        &self,
        wanted: AttentionGradients<bool>,
        launch: LaunchKeys<R>,
    ) -> [Option<TensorHandle<R>>; 2] {
        let Launch {
            client, problem, ..
        } = self.launch;
        let shape = &problem.shape;
        let new = |shape| in_rows(client, shape, problem.dtype);
        let key = wanted.key.then(|| new(shape.key()));
        let value = wanted.value.then(|| new(shape.value()));
        let launch = |key: Option<&TensorHandle<R>>, value: Option<&TensorHandle<R>>| {
            let wanted = Wanted {
                key: key.is_some(),
                value: value.is_some(),
            };
            let Some(any) = key.or(value) else {
                return;
            };
            launch(
                self,
                wanted,
                [key, value].map(|it| or_unused(it, any, problem.dtype)),
            );
        };
        if shape.batch * shape.kv_heads * shape.keys == 0 {
            return [key, value];
        }
        if shape.width + shape.value_width > SUMS {
            launch(key.as_ref(), None);
            launch(None, value.as_ref());
        } else {
            launch(key.as_ref(), value.as_ref());
        }
        [key, value]
    }
}

/// True where 32 bits index a tensor as it lies in memory.
pub(super) fn is_indexed<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
    let dimensions = tensor.shape().iter().zip(tensor.strides().iter());
    let last: usize = dimensions
        .map(|(&extent, &stride)| extent.saturating_sub(1) * stride)
        .sum();
    u32::try_from(last).is_ok()
}

/// Accepts a tensor that the kernels read.
fn check_reads<R: Runtime>(
    operation: &'static str,
    name: &'static str,
    tensor: &TensorHandle<R>,
    reads: fn(&TensorHandle<R>) -> bool,
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

/// Accepts a mask of bytes or words that the device reads, and that 32 bits index.
pub(super) fn check_mask<R: Runtime>(
    operation: &'static str,
    client: &ComputeClient<R>,
    mask: &TensorHandle<R>,
) -> Result<(), KernelError> {
    check_reads(operation, "mask", mask, is_indexed)?;
    let dtype = mask.dtype;
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
