//! RMSNorm that saves its input, and one number a row (Zhang & Sennrich, 2019, equation 4).

use burn_backend::{FloatDType, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::granularity::Granularity;

use crate::{
    data::{
        DataBackend, cast_to,
        composition::{
            InverseRms, OutputGradient, RmsNormForward, RmsNormGradients, quantizes_norms,
        },
    },
    saved::{
        HeldTensor,
        later::{self, Later, OfOne},
        recorded::Recorded,
        rematerialized::NormInputs,
    },
};

/// `x / sqrt(mean(x²) + epsilon) gain` of x `[.., columns]`. The gain has as many
/// elements as a row, and leading dimensions of size 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RmsNorm {
    pub epsilon: f64,
    /// What shares a scale where layers that read the output quantize it, in squares or by one number: then, of what flows,
    /// the output is not computed before that where a kernel does both at once, and never in memory.
    pub is_quantized_in: Option<Granularity>,
}

impl<B: DataBackend> Recorded<B, 2> for RmsNorm {
    /// The tensors that the backward pass needs.
    type Saved = NormInputs<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; 2]) -> Option<Self> {
        Some(*self)
    }

    fn forward(
        self,
        [x, gain]: [HeldTensor<B>; 2],
        wanted: [bool; 2],
    ) -> (HeldTensor<B>, Self::Saved) {
        let is_quantized = |granularity| quantizes_norms::<B>(x.cell().device(), granularity);
        let waits = x.is_in_numbers() && later::may_wait(&wanted);
        if waits && self.is_quantized_in.is_some_and(is_quantized) {
            let epsilon = self.epsilon as f32;
            let inverse_rms = B::run(InverseRms { epsilon }, x.clone().into_input());
            let inputs = NormInputs {
                inverse_rms: HeldTensor::of("rms_norm", inverse_rms),
                x,
                gain,
            };
            let form = inputs.x.cell().form();
            let output = OfOne::RmsNorm {
                inputs: inputs.clone(),
                epsilon,
            };
            let output = Later::OfOne(Box::new(output));
            return (HeldTensor::later("rms_norm", output, form), inputs);
        }
        let is_trained = wanted.contains(&true);
        let waits_as = x.cell().rows_will_wait_as().filter(|_| is_trained);
        let norm = RmsNormForward {
            epsilon: self.epsilon as f32,
            copy: waits_as.filter(|_| !x.cell().has_compressed()),
        };
        let values = (x.clone().into_input(), gain.clone().into_value());
        let ((output, inverse_rms), copy) = B::run(norm, values);
        let saved = NormInputs {
            x,
            gain,
            inverse_rms: HeldTensor::of("rms_norm", inverse_rms),
        };
        if let Some(copy) = copy {
            saved.x.cell().keep_compressed(copy);
        }
        let output = HeldTensor::of("rms_norm", output);
        match waits_as {
            Some(_) => (output.of_norm(&saved), saved),
            None => (output, saved),
        }
    }

    const JOINS: bool = true;

    fn backward_joined(
        NormInputs {
            x,
            gain,
            inverse_rms,
        }: NormInputs<B>,
        gradient: OutputGradient<B>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<B>>; 2] {
        let [wants_x, wants_gain] = wanted;
        let (shape, dtype) = (gain.shape(), FloatDType::from(gain.dtype()));
        let inputs = (
            (x.into_input(), gain.into_value()),
            (inverse_rms.into_value(), gradient),
        );
        let (of_x, of_gain) = B::run(RmsNormGradients, inputs);
        let of_gain = || cast_to::<B>(B::float_reshape(of_gain, shape), Some(dtype));
        [wants_x.then_some(of_x), wants_gain.then(of_gain)]
    }
}
