//! Attention: Q, K and V are saved, a mask and a bias as they came, and nothing else of the size of the scores.

use burn_backend::{
    TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};

use crate::data::{
    DataBackend,
    attention::{
        AttentionGradients, AttentionInputs, AttentionOptions, AttentionProducts, AttentionWay,
        ComposedForward, ComposedGradients, FlashForward, FlashGradients, FlashOutput, Gradients,
    },
};
use crate::recipe::AttentionContext;
use crate::saved::{HeldTensor, centred, recorded::Recorded, scope};

/// Keys, in the shape of K.
const SEQUENCE: usize = 2;

/// Attention of Q, K, V and, if there are four inputs, a bias, of one dtype, on a device that has kernels for it.
#[derive(Debug, Clone)]
pub(crate) struct Attention<B: DataBackend> {
    pub options: AttentionOptions,
    pub way: AttentionWay,
    /// True where a key is hidden from a query.
    pub mask: Option<BoolTensor<B>>,
}

/// The tensors that the backward pass needs.
#[derive(Debug, Clone)]
pub(crate) struct Saved<B: DataBackend> {
    inputs: Inputs<B>,
    attention: Attention<B>,
    /// The tensors that the kernel left, if they are for the inputs as they will be read, or are kept although those
    /// wait compressed. Else the output is computed again, from products of floats as the gradients are: those are then
    /// of one function, and its probabilities sum to 1.
    forward: Option<FlashOutput<HeldTensor<B>>>,
}

/// Q, K, V and the bias.
#[derive(Debug, Clone)]
struct Inputs<B: DataBackend> {
    of_heads: [HeldTensor<B>; 3],
    /// Stays exact: what it is off by is in the scores, whose exponential multiplies it.
    bias: Option<HeldTensor<B>>,
}

impl<B: DataBackend> Inputs<B> {
    fn of<const N: usize>(inputs: [HeldTensor<B>; N]) -> Self {
        let mut inputs = inputs.into_iter();
        let (Some(query), Some(key), Some(value), bias) =
            (inputs.next(), inputs.next(), inputs.next(), inputs.next())
        else {
            unreachable!("attention has queries, keys and values");
        };
        if let Some(bias) = &bias {
            bias.cell().keep_exact();
        }
        Self {
            of_heads: [query, key, value],
            bias,
        }
    }

    /// They wait as they are.
    fn keep_exact(&self) {
        let inputs = self.of_heads.iter();
        inputs.for_each(|input| input.cell().keep_exact());
    }

    /// The same for a softmax, which does not see what all keys of a head have in common: without that. `wait`: not as
    /// they are.
    fn with_keys_centred(self, wait: bool) -> Self {
        let [query, key, value] = self.of_heads;
        let key = match key.shape().num_elements() {
            0 => key,
            _ => centred("attention", key, SEQUENCE, wait),
        };
        Self {
            of_heads: [query, key, value],
            ..self
        }
    }

    fn stay_exact(&self) -> bool {
        let mut inputs = self.of_heads.iter();
        inputs.all(|input| input.cell().stays_exact())
    }

    fn into_values(self, mask: Option<BoolTensor<B>>) -> AttentionInputs<B> {
        let [query, key, value] = self.of_heads.map(HeldTensor::into_value);
        AttentionInputs {
            query,
            key,
            value,
            mask,
            bias: self.bias.map(HeldTensor::into_value),
        }
    }
}

impl<B: DataBackend, const N: usize> Recorded<B, N> for Attention<B> {
    type Saved = Saved<B>;

    fn again(&mut self, _inputs: &[HeldTensor<B>; N]) -> Option<Self> {
        Some(self.clone())
    }

    fn forward(
        self,
        inputs: [HeldTensor<B>; N],
        wanted: [bool; N],
    ) -> (HeldTensor<B>, Self::Saved) {
        let options = self.options;
        // In a block attention runs again in any case, and of a composition in its backward pass.
        let runs_once = self.way == AttentionWay::Flash && !scope::in_block();
        let chosen = match scope::context() {
            Some(context) if runs_once && wanted.contains(&true) => context.attention,
            Some(_) | None => AttentionContext::Compressed,
        };
        let inputs = Inputs::of(inputs);
        let stays_exact = chosen == AttentionContext::Exact || inputs.stay_exact();
        let keeps_output =
            chosen == AttentionContext::KeptOutput && !options.has_slopes() && !stays_exact;
        // What keys have in common would take most of their codes, as it does of those that wait.
        let inputs = match keeps_output || options.products == AttentionProducts::Int8 {
            true => inputs.with_keys_centred(!stays_exact),
            false => inputs,
        };
        if stays_exact {
            inputs.keep_exact();
        }
        let values = inputs.clone().into_values(self.mask.clone());
        let (output, forward) = match self.way {
            AttentionWay::Flash => {
                let forward = B::run(FlashForward { options }, values);
                let forward = forward.map(|tensor| HeldTensor::of("attention", tensor));
                let output = forward.output.clone();
                let forward = (keeps_output || stays_exact).then_some(forward);
                if let Some(forward) = &forward {
                    forward.output.cell().keep_exact();
                    forward.log_sum_exp.cell().keep_exact();
                }
                (output, forward)
            }
            AttentionWay::Composed => {
                let output = B::run(ComposedForward { options }, values);
                (HeldTensor::of("attention", output), None)
            }
        };
        let saved = Saved {
            inputs,
            attention: self,
            forward,
        };
        (output, saved)
    }

    fn backward(
        saved: Self::Saved,
        gradient: FloatTensor<B>,
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let Attention { options, way, mask } = saved.attention;
        let inputs = saved.inputs.into_values(mask);
        let wants = |index| wanted.get(index).copied().unwrap_or_default();
        let gradients = Gradients {
            options,
            wanted: AttentionGradients {
                query: wants(0),
                key: wants(1),
                value: wants(2),
                bias: wants(3),
            },
        };
        let AttentionGradients {
            query,
            key,
            value,
            bias,
        } = match way {
            AttentionWay::Flash => {
                let forward = match saved.forward {
                    Some(forward) => forward.map(HeldTensor::into_value),
                    None => {
                        let options = AttentionOptions {
                            products: AttentionProducts::Float,
                            ..options
                        };
                        B::run(FlashForward { options }, inputs.clone())
                    }
                };
                B::run(FlashGradients(gradients), ((inputs, gradient), forward))
            }
            AttentionWay::Composed => B::run(ComposedGradients(gradients), (inputs, gradient)),
        };
        let mut of_inputs = [query, key, value, bias].into_iter();
        std::array::from_fn(|_| of_inputs.next().flatten())
    }
}
