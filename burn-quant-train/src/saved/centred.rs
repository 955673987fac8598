//! Values less what they have in common, which wait in place of those.

use burn_backend::TensorMetadata;

use crate::data::{DataBackend, composition::Centred};

use super::{HeldTensor, cell::waits_when_made, compress::Compress};

/// Positions, at most, whose mean stands for that of all: whoever does not see a mean does not see how exact it is
/// either, and to read a few takes no time.
const SAMPLES: usize = 32;

/// The tensor less its mean over evenly spaced positions of a dimension, in the same order in memory, in a cell of its
/// own: for the result of an operation of this name, which a node keeps. `waits`: not as it is.
pub(crate) fn centred<B: DataBackend>(
    operation: &'static str,
    tensor: HeldTensor<B>,
    dim: usize,
    waits: bool,
) -> HeldTensor<B> {
    let rank = tensor.rank();
    // A transpose of a transpose names its last dimension too, which is the last in memory.
    let swapped = tensor.cell().swapped_dims();
    let swapped = swapped.filter(|&[a, b]| a.max(b) + 1 < rank);
    let value = tensor.into_value();
    let (value, dim) = match swapped {
        None => (value, dim),
        Some([a, b]) => {
            let in_memory = match dim {
                _ if dim == a => b,
                _ if dim == b => a,
                _ => dim,
            };
            (B::float_swap_dims(value, a, b), in_memory)
        }
    };
    let shape = value.shape();
    let context = waits_when_made(&shape, value.dtype()).filter(|_| waits);
    let copy = context.map(|context| {
        let compress = Compress { context };
        (compress.spec(), compress.matrix(&shape))
    });
    let less_mean = Centred {
        dim,
        step: shape[dim].div_ceil(SAMPLES),
        copy,
    };
    let (value, copy) = B::run(less_mean, value);
    let less_mean = match swapped {
        None => HeldTensor::of(operation, value),
        Some([a, b]) => {
            HeldTensor::swapped(B::float_swap_dims(value, a, b), operation, None, [a, b])
        }
    };
    if let Some(copy) = copy {
        less_mean.cell().keep_compressed(copy);
    }
    less_mean
}
