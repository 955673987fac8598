//! Values that their reader computes: SwiGLU's output and its gradients, and in a flow those of GELU, the outputs of norms
//! and of linear layers. Who quantizes one, a linear layer, or of a linear layer's output an operator, does it in the launch
//! that computes it, so that it never goes through memory; whoever else reads it has it computed by itself.

use std::{
    fmt::{self, Debug},
    sync::{Arc, Mutex},
};

use burn_backend::{TensorMetadata, tensor::FloatTensor};
use cubecl_kernels::quantize::QuantizeSpec;

use super::{
    HeldTensor,
    cell::{AnyCell, Form},
    rematerialized::NormInputs,
    scope,
};
use crate::{
    data::{
        DataBackend,
        composition::{
            GeluForward, GeluGradient, LayerNormForward, OperatorInput, RmsNormForward,
            SwigluCompressing, SwigluForward, SwigluGradients,
        },
        product::{Product, ProductInputs},
        quantize::{DelayedMaximum, MatrixSource, Quantized, quantize_swiglu_gradients},
    },
    lock::lock,
};

/// True where the output of an operator may wait for who reads it: in a block it is made twice, and what waits without a
/// backward pass holds the operator's inputs.
pub(crate) fn may_wait(wanted: &[bool]) -> bool {
    wanted.contains(&true) && !scope::in_block()
}

/// A value that is not computed yet.
#[derive(Debug)]
pub(crate) enum Later<B: DataBackend> {
    /// `silu(gate) up`.
    Swiglu(Arc<GateAndUp<B>>),
    /// The gradient of one of its factors.
    Gradient(Arc<GradientPair<B>>, Factor),
    /// What depends on one tensor that flows. In a box: every cell has room for what a value waits as.
    OfOne(Box<OfOne<B>>),
    /// The output of a linear layer whose operands are quantized. In a box, likewise.
    Product(Box<ProductInputs<B>>),
}

/// What an operator makes of one tensor that flows.
#[derive(Debug)]
pub(crate) enum OfOne<B: DataBackend> {
    /// RMSNorm's output, with what is added to the mean of squares.
    RmsNorm { inputs: NormInputs<B>, epsilon: f32 },
    /// That of layer normalization, likewise.
    LayerNorm {
        x: HeldTensor<B>,
        gain: HeldTensor<B>,
        bias: Option<HeldTensor<B>>,
        /// Means and inverse deviations of rows, f32 `[rows, 1]`.
        rows: [HeldTensor<B>; 2],
        epsilon: f32,
    },
    /// GELU's.
    Gelu(HeldTensor<B>),
    /// The gradient of GELU's input, from that of its output.
    GeluGradient(HeldTensor<B>, OperatorInput<B>),
}

impl<B: DataBackend> Clone for OfOne<B> {
    fn clone(&self) -> Self {
        match self {
            Self::RmsNorm { inputs, epsilon } => Self::RmsNorm {
                inputs: inputs.clone(),
                epsilon: *epsilon,
            },
            Self::LayerNorm {
                x,
                gain,
                bias,
                rows,
                epsilon,
            } => Self::LayerNorm {
                x: x.clone(),
                gain: gain.clone(),
                bias: bias.clone(),
                rows: rows.clone(),
                epsilon: *epsilon,
            },
            Self::Gelu(x) => Self::Gelu(x.clone()),
            Self::GeluGradient(x, gradient) => Self::GeluGradient(x.clone(), gradient.clone()),
        }
    }
}

impl<B: DataBackend> OfOne<B> {
    /// What a linear layer quantizes.
    pub fn source(&self) -> MatrixSource<B> {
        match self.clone() {
            Self::RmsNorm { inputs, .. } => inputs.source(),
            Self::LayerNorm {
                x,
                gain,
                bias,
                rows,
                ..
            } => MatrixSource::LayerNorm {
                x: x.into_input(),
                gain: gain.into_value(),
                bias: bias.map(HeldTensor::into_value),
                rows: rows.map(HeldTensor::into_value).into(),
            },
            Self::Gelu(x) => MatrixSource::Gelu(x.into_input()),
            Self::GeluGradient(x, gradient) => MatrixSource::GeluGradient {
                x: x.into_input(),
                gradient,
            },
        }
    }

    fn compute(&self) -> FloatTensor<B> {
        match self.clone() {
            Self::RmsNorm { inputs, epsilon } => {
                let NormInputs { x, gain, .. } = inputs;
                let norm = RmsNormForward {
                    epsilon,
                    copy: None,
                };
                let ((output, _), _) = B::run(norm, (x.into_input(), gain.into_value()));
                output
            }
            Self::LayerNorm {
                x,
                gain,
                bias,
                epsilon,
                ..
            } => {
                let norm = LayerNormForward {
                    epsilon,
                    copy: None,
                };
                let bias = bias.map(HeldTensor::into_value);
                let inputs = ((x.into_input(), gain.into_value()), bias);
                let ((output, _), _) = B::run(norm, inputs);
                output
            }
            Self::Gelu(x) => B::run(GeluForward, x.into_input()),
            Self::GeluGradient(x, gradient) => B::run(GeluGradient, (x.into_input(), gradient)),
        }
    }
}

/// A factor of SwiGLU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factor {
    Gate,
    /// What the gate lets through.
    Up,
}

impl Factor {
    /// That of a pair.
    fn of<T>(self, [gate, up]: &mut [T; 2]) -> &mut T {
        match self {
            Self::Gate => gate,
            Self::Up => up,
        }
    }
}

impl<B: DataBackend> Clone for Later<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Swiglu(factors) => Self::Swiglu(factors.clone()),
            Self::Gradient(pair, factor) => Self::Gradient(pair.clone(), *factor),
            Self::OfOne(of_one) => Self::OfOne(of_one.clone()),
            Self::Product(factors) => Self::Product(factors.clone()),
        }
    }
}

impl<B: DataBackend> Later<B> {
    /// The value. Of a gradient of a pair it is asked for once.
    pub(super) fn compute(&self) -> FloatTensor<B> {
        match self {
            Self::Swiglu(factors) => factors.product(),
            Self::Gradient(pair, factor) => pair.floats(*factor),
            Self::OfOne(of_one) => of_one.compute(),
            Self::Product(factors) => B::run(Product, ProductInputs::clone(factors)),
        }
    }
}

/// Gate and up of an output that its reader computes, and how they wait for the backward pass: who reads them makes
/// these copies too. Until the last reader is gone they stay as they are.
#[derive(Debug)]
pub(crate) struct GateAndUp<B: DataBackend> {
    inputs: [HeldTensor<B>; 2],
    contexts: Option<QuantizeSpec>,
}

impl<B: DataBackend> GateAndUp<B> {
    /// Those of an output. `contexts`: how both will wait, in groups of which rows are whole ones, if they are not to
    /// stay exact.
    pub fn new(inputs: [HeldTensor<B>; 2], contexts: Option<QuantizeSpec>) -> Arc<Self> {
        if contexts.is_some() {
            inputs.iter().for_each(|it| it.cell().begin_wait());
        }
        Arc::new(Self { inputs, contexts })
    }

    /// What a linear layer quantizes.
    pub fn source(&self) -> MatrixSource<B> {
        let Some(contexts) = self.contexts else {
            let (gate, up) = self.operator_inputs();
            return MatrixSource::Swiglu { gate, up };
        };
        let [gate, up] = self.inputs.each_ref().map(|it| it.cell().read());
        MatrixSource::SwigluCompressing { gate, up, contexts }
    }

    fn operator_inputs(&self) -> (OperatorInput<B>, OperatorInput<B>) {
        let [gate, up] = self.inputs.clone().map(HeldTensor::into_input);
        (gate, up)
    }

    /// Takes the copies in which gate and up will wait.
    pub fn keep(&self, (gate, up): (Quantized<B>, Quantized<B>)) {
        for (input, copy) in self.inputs.iter().zip([gate, up]) {
            input.cell().keep_compressed(copy);
        }
    }

    fn product(&self) -> FloatTensor<B> {
        let Some(spec) = self.contexts else {
            return B::run(SwigluForward, self.operator_inputs());
        };
        let [gate, up] = self.inputs.each_ref().map(|it| it.cell().read());
        let compressing = SwigluCompressing::of_rows(spec, &gate.shape());
        let (product, copies) = B::run(compressing, (gate, up));
        self.keep(copies);
        product
    }
}

impl<B: DataBackend> Drop for GateAndUp<B> {
    fn drop(&mut self) {
        if self.contexts.is_some() {
            for input in &self.inputs {
                if input.cell().end_wait() && !input.cell().has_handles() {
                    scope::settle(input.cell().clone());
                }
            }
        }
    }
}

/// How a linear layer quantizes the gradient of its output: row-major and transposed, of one rounding.
pub(crate) struct GradientCopy<B: DataBackend> {
    /// How.
    pub spec: QuantizeSpec,
    /// The maximum that it had in earlier steps, as of now, where its scale is that of one.
    pub delayed: Option<Arc<dyn Fn() -> DelayedMaximum<B> + Send + Sync>>,
}

impl<B: DataBackend> Clone for GradientCopy<B> {
    fn clone(&self) -> Self {
        Self {
            spec: self.spec,
            delayed: self.delayed.clone(),
        }
    }
}

impl<B: DataBackend> Debug for GradientCopy<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientCopy")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

/// Both gradients of SwiGLU: quantized together for the first layer that asks, or computed for the first other reader.
#[derive(Debug)]
pub(crate) struct GradientPair<B: DataBackend> {
    copies: [GradientCopy<B>; 2],
    made: Mutex<Made<B>>,
}

/// Gate and up, and the gradient of the output, in the numbers in which they wait or flow.
pub(crate) type Inputs<B> = ([OperatorInput<B>; 2], OperatorInput<B>);

/// What there is of both gradients that nobody has taken yet.
#[derive(Debug)]
enum Made<B: DataBackend> {
    Nothing(Inputs<B>),
    Floats([Option<FloatTensor<B>>; 2]),
    /// With the inputs, until both copies are taken: the other gradient may be read as floats yet.
    Copies([Option<Quantized<B>>; 2], Inputs<B>),
}

impl<B: DataBackend> GradientPair<B> {
    /// The gradients of the factors, of which linear layers take these copies, from gate, up and the gradient of the
    /// output; these again where one launch does not make both copies. `form`: that of all of them.
    pub fn of(
        inputs: Inputs<B>,
        copies: [GradientCopy<B>; 2],
        form: Form<B>,
    ) -> Result<[HeldTensor<B>; 2], Box<Inputs<B>>> {
        let [of_gate, of_up] = &copies;
        let together = match (&of_gate.delayed, &of_up.delayed) {
            (None, None) => true,
            (Some(_), Some(_)) => of_gate.spec == of_up.spec,
            (None, Some(_)) | (Some(_), None) => false,
        };
        if !together {
            return Err(Box::new(inputs));
        }
        let pair = Arc::new(Self {
            copies,
            made: Mutex::new(Made::Nothing(inputs)),
        });
        Ok([Factor::Gate, Factor::Up].map(|factor| {
            let later = Later::Gradient(pair.clone(), factor);
            HeldTensor::later("swiglu", later, form.clone())
        }))
    }

    fn floats(&self, factor: Factor) -> FloatTensor<B> {
        let mut made = lock(&self.made);
        let inputs = match &mut *made {
            Made::Floats(floats) => {
                let waiting = factor.of(floats).take();
                return waiting.expect("a cell computes its value once");
            }
            Made::Nothing(inputs) | Made::Copies(_, inputs) => inputs.clone(),
        };
        let ([gate, up], gradient) = inputs;
        let (gate, up) = B::run(SwigluGradients, ((gate, up), gradient));
        let mut floats = [Some(gate), Some(up)];
        let own = factor.of(&mut floats).take().expect("both are there");
        if let Made::Nothing(_) = &*made {
            *made = Made::Floats(floats);
        }
        own
    }

    /// The copy of one of both, if it is to be made so, and the other one has not been computed by itself.
    pub fn copy(&self, factor: Factor, spec: &QuantizeSpec) -> Option<Quantized<B>> {
        let specs = self.copies.each_ref().map(|copy| copy.spec);
        if *factor.of(&mut { specs }) != *spec {
            return None;
        }
        let mut made = lock(&self.made);
        let inputs = match &mut *made {
            Made::Floats(_) => return None,
            Made::Copies(copies, _) => return factor.of(copies).take(),
            Made::Nothing(inputs) => inputs.clone(),
        };
        let delayed = match self.copies.each_ref().map(|copy| copy.delayed.as_ref()) {
            [Some(gate), Some(up)] => Some([gate(), up()]),
            _ => None,
        };
        let mut copies = quantize_swiglu_gradients::<B>(inputs.clone(), specs, delayed).map(Some);
        let own = factor.of(&mut copies).take();
        *made = Made::Copies(copies, inputs);
        own
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_backend::{FloatDType, TensorData, ops::FloatTensorOps};
    use burn_flex::Flex;
    use cubecl_kernels::{
        granularity::Granularity,
        layout::Layout,
        rounding::{Rounding, StochasticKey},
    };

    use super::*;
    use crate::data::quantize::{dequantize, quantize};

    const SHAPE: [usize; 2] = [32, 48];

    fn tensor(seed: usize) -> FloatTensor<Flex> {
        let values =
            (0..SHAPE[0] * SHAPE[1]).map(|at| ((at * 37 + seed) % 101) as f32 / 25.0 - 2.0);
        let data = TensorData::new(values.collect::<Vec<_>>(), SHAPE);
        Flex::float_from_data(data, &Default::default())
    }

    fn floats(tensor: FloatTensor<Flex>) -> Vec<f32> {
        let data = burn_backend::read_sync(Flex::float_into_data(tensor)).expect("a read");
        data.into_vec().expect("FP32")
    }

    fn spec(stream: u64) -> QuantizeSpec {
        let key = StochasticKey { seed: 5, stream };
        QuantizeSpec::int8(Granularity::Block(16))
            .with_rounding(Rounding::Stochastic(key))
            .with_layout(Layout::Both)
    }

    fn pair(specs: [QuantizeSpec; 2]) -> [HeldTensor<Flex>; 2] {
        let form = HeldTensor::<Flex>::new(tensor(1)).cell().form();
        let factors = [1, 2].map(|seed| OperatorInput::Floats(tensor(seed)));
        let inputs = (factors, OperatorInput::Floats(tensor(3)));
        let copies = specs.map(|spec| GradientCopy {
            spec,
            delayed: None,
        });
        GradientPair::of(inputs, copies, form).expect("both without a maximum")
    }

    fn copy(gradient: &HeldTensor<Flex>, spec: &QuantizeSpec) -> Option<Vec<f32>> {
        match gradient.cell().waits_for_reader()? {
            Later::Gradient(pair, factor) => {
                let copy = pair.copy(factor, spec)?;
                Some(floats(dequantize::<Flex>(&copy, FloatDType::F32)))
            }
            Later::Swiglu(_) | Later::OfOne(_) | Later::Product(_) => None,
        }
    }

    /// In whatever order both are read, each as a copy or as floats, they are those of the gradients.
    #[test]
    fn readers_in_any_order() {
        let specs = [spec(1), spec(2)];
        let inputs = (
            OperatorInput::Floats(tensor(1)),
            OperatorInput::Floats(tensor(2)),
        );
        let gradient = OperatorInput::Floats(tensor(3));
        let (of_gate, of_up) = Flex::run(SwigluGradients, (inputs, gradient));
        let gradients = [of_gate, of_up];
        let expected = [0, 1].map(|index: usize| {
            let copy = quantize::<Flex>(gradients[index].clone(), &specs[index]);
            let copy = floats(dequantize::<Flex>(&copy, FloatDType::F32));
            (floats(gradients[index].clone()), copy)
        });
        for first in [0, 1] {
            for as_copy in [[true, true], [true, false], [false, true], [false, false]] {
                let pair = pair(specs);
                for (turn, index) in [first, 1 - first].into_iter().enumerate() {
                    let copy = as_copy[turn]
                        .then(|| copy(&pair[index], &specs[index]))
                        .flatten();
                    // The copies are made together.
                    assert_eq!(
                        copy.is_some(),
                        as_copy == [true, true] || (as_copy[turn] && turn == 0)
                    );
                    match copy {
                        Some(copy) => assert_eq!(copy, expected[index].1),
                        None => {
                            let read = pair[index].cell().read();
                            assert_eq!(floats(read), expected[index].0);
                            assert!(pair[index].cell().waits_for_reader().is_none());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn another_copy_is_made_of_floats() {
        let pair = pair([spec(1), spec(2)]);
        assert!(copy(&pair[0], &spec(3)).is_none());
        assert!(copy(&pair[1], &spec(2)).is_some());
        // That of a copy which somebody else has taken.
        assert!(copy(&pair[1], &spec(2)).is_none());
    }
}
