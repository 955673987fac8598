//! Layer normalization that saves its input, and two numbers a row (Ba et al., 2016, equation 3).

use burn_backend::{FloatDType, TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::granularity::Granularity;

use crate::{
    data::{
        DataBackend, cast_to,
        composition::{
            LayerNormForward, LayerNormGradients, OutputGradient, RowDeviations, quantizes_norms,
        },
    },
    saved::{
        HeldTensor,
        later::{self, Later, OfOne},
        recorded::Recorded,
    },
};

/// `(x - mean(x)) / sqrt(variance(x) + epsilon) gain + bias` of inputs x `[.., columns]`, the gain and, if there are
/// three, the bias, of so many elements each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerNorm {
    pub epsilon: f64,
    /// As of [`RmsNorm`](super::rms_norm::RmsNorm).
    pub is_quantized_in: Option<Granularity>,
}

/// The tensors that the backward pass needs.
#[derive(Debug, Clone)]
pub(crate) struct Saved<B: DataBackend> {
    x: HeldTensor<B>,
    gain: HeldTensor<B>,
    bias: Option<FloatDType>,
    /// f32 `[rows, 1]`.
    mean: HeldTensor<B>,
    /// f32 `[rows, 1]`.
    inverse_deviation: HeldTensor<B>,
}

impl<B: DataBackend, const N: usize> Recorded<B, N> for LayerNorm {
    type Saved = Saved<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; N]) -> Option<Self> {
        Some(*self)
    }

    fn forward(
        self,
        inputs: [HeldTensor<B>; N],
        wanted: [bool; N],
    ) -> (HeldTensor<B>, Self::Saved) {
        let mut inputs = inputs.into_iter();
        let (Some(x), Some(gain), bias) = (inputs.next(), inputs.next(), inputs.next()) else {
            unreachable!("a normalization has x and a gain");
        };
        let is_quantized = |granularity| quantizes_norms::<B>(x.cell().device(), granularity);
        let waits = x.is_in_numbers() && later::may_wait(&wanted);
        if waits && self.is_quantized_in.is_some_and(is_quantized) {
            let epsilon = self.epsilon as f32;
            let (mean, inverse_deviation) =
                B::run(RowDeviations { epsilon }, x.clone().into_input());
            let [mean, inverse_deviation] =
                [mean, inverse_deviation].map(|it| HeldTensor::of("layer_norm", it));
            let saved = Saved {
                x: x.clone(),
                gain: gain.clone(),
                bias: bias.as_ref().map(|bias| bias.dtype().into()),
                mean: mean.clone(),
                inverse_deviation: inverse_deviation.clone(),
            };
            let form = x.cell().form();
            let output = OfOne::LayerNorm {
                x,
                gain,
                bias,
                rows: [mean, inverse_deviation],
                epsilon,
            };
            let output = Later::OfOne(Box::new(output));
            return (HeldTensor::later("layer_norm", output, form), saved);
        }
        let is_trained = wanted.contains(&true);
        let waits_as = x.cell().rows_will_wait_as();
        let norm = LayerNormForward {
            epsilon: self.epsilon as f32,
            copy: waits_as.filter(|_| is_trained && !x.cell().has_compressed()),
        };
        let bias_dtype = bias.as_ref().map(|bias| bias.dtype().into());
        let values = (
            (x.clone().into_input(), gain.clone().into_value()),
            bias.map(HeldTensor::into_value),
        );
        let ((output, (mean, inverse_deviation)), copy) = B::run(norm, values);
        if let Some(copy) = copy {
            x.cell().keep_compressed(copy);
        }
        let [mean, inverse_deviation] =
            [mean, inverse_deviation].map(|it| HeldTensor::of("layer_norm", it));
        let saved = Saved {
            x,
            gain,
            bias: bias_dtype,
            mean,
            inverse_deviation,
        };
        (HeldTensor::of("layer_norm", output), saved)
    }

    const JOINS: bool = true;

    fn backward_joined(
        Saved {
            x,
            gain,
            bias,
            mean,
            inverse_deviation,
        }: Self::Saved,
        gradient: OutputGradient<B>,
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let (shape, dtype) = (gain.shape(), FloatDType::from(gain.dtype()));
        let inputs = (
            ((x.into_input(), gain.into_value()), gradient),
            (mean.into_value(), inverse_deviation.into_value()),
        );
        let (of_x, (of_gain, of_bias)) = B::run(LayerNormGradients, inputs);
        let in_form =
            |tensor, dtype| cast_to::<B>(B::float_reshape(tensor, shape.clone()), Some(dtype));
        let (mut of_x, mut of_gain, mut of_bias) = (Some(of_x), Some(of_gain), Some(of_bias));
        std::array::from_fn(|index| match (index, wanted[index]) {
            (_, false) => None,
            (0, true) => of_x.take(),
            (1, true) => of_gain.take().map(|it| in_form(it, dtype)),
            (_, true) => of_bias
                .take()
                .zip(bias)
                .map(|(it, dtype)| in_form(it, dtype)),
        })
    }
}
