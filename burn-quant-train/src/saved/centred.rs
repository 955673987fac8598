//! Values less what they have in common, which wait in place of those.

use burn_backend::{Slice, TensorMetadata, tensor::FloatTensor};

use crate::data::DataBackend;

use super::HeldTensor;

/// Positions, at most, whose mean stands for that of all: a reduction along the rows of a matrix by few units takes as
/// long as an attention kernel, and whoever does not see a mean does not see how exact it is either.
const SAMPLES: usize = 32;

/// The tensor less its mean over evenly spaced positions of a dimension, in the same order in memory, in a cell of its
/// own: for the result of an operation of this name.
pub(crate) fn centred<B: DataBackend>(
    operation: &'static str,
    tensor: HeldTensor<B>,
    dim: usize,
) -> HeldTensor<B> {
    let swapped = tensor.cell().swapped_dims();
    let value = tensor.into_value();
    match swapped {
        None => HeldTensor::of(operation, less_mean::<B>(value, dim)),
        Some([a, b]) => {
            let in_memory = match dim {
                _ if dim == a => b,
                _ if dim == b => a,
                _ => dim,
            };
            let value = less_mean::<B>(B::float_swap_dims(value, a, b), in_memory);
            HeldTensor::swapped(B::float_swap_dims(value, a, b), operation, None, [a, b])
        }
    }
}

fn less_mean<B: DataBackend>(value: FloatTensor<B>, dim: usize) -> FloatTensor<B> {
    let shape = value.shape();
    let step = shape[dim].div_ceil(SAMPLES);
    let mut sampled = vec![Slice::full(); shape.num_dims()];
    sampled[dim] = Slice::new(0, None, step as isize);
    let sample = B::float_slice(value.clone(), &sampled);
    let mean = B::float_mean_dim(sample, dim);
    B::float_sub(value, mean)
}
