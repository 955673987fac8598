//! Gradients under compressed contexts (fallback-int8, section 5.2 and Fig. 7a; coat-fp8, Appendix H).

use burn::{
    backend::{Autodiff, Flex},
    module::{AutodiffModule, ModuleVisitor, Param},
    nn::RmsNorm,
    optim::GradientsParams,
    tensor::{Tensor, backend::AutodiffBackend},
};
use burn_quant_train::{
    QuantTrain,
    recipe::{AttentionContext, Context, MixedPrecision, Number},
    saved::choose_context,
};
use cubecl_kernels::granularity::Granularity;
use examples::{data::Batch, model};
use serde::{Deserialize, Serialize};

use super::{
    capture::Exactly,
    decoder::{Decoder, Exact, Step, gated},
    metric::Distance,
    numbers::Numbers,
    straight_through::{floats, rounded, with_gradient_of},
};

/// The library's decorator without quantized products: with exact contexts it changes no bit.
pub type Library = QuantTrain<Autodiff<Flex>, MixedPrecision<f32>>;

/// Bits of the sweep.
pub const BITS: std::ops::RangeInclusive<u32> = 4..=16;
/// Neighbours that share a scale (fallback-int8, section 5.2).
const GROUP: usize = 128;

/// The tensors that wait compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Saved {
    /// The inputs of norms and of SwiGLU's product, as in the papers.
    Operators,
    /// All that the library compresses: also what linear layers and attention read.
    All,
}

/// The gradients of a step under a context, beside those of exact ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextError {
    /// The tensors that are compressed.
    pub saved: Saved,
    /// The number format.
    pub numbers: String,
    /// Bits of a number, scales not counted.
    pub bits: u32,
    /// Neighbours that share a scale; none for BF16.
    pub group: Option<usize>,
    /// One less the cosine of the gradients of all parameters.
    pub model: f64,
    /// The same of the gradients of all norms' weights.
    pub norms: f64,
    /// The same of the norm whose gradient is the worst.
    pub worst_norm: f64,
}

/// The gradients of a model's parameters, in the order of its modules.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Gradients {
    /// Of matrices.
    pub matrices: Vec<Vec<f32>>,
    /// Of vectors: the weights of norms.
    pub norms: Vec<Vec<f32>>,
}

impl Gradients {
    /// From a backward pass.
    pub fn of<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M, loss: Tensor<B, 1>) -> Self {
        struct Collect(GradientsParams, Gradients);
        impl<B: AutodiffBackend> ModuleVisitor<B> for Collect {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                if let Some(gradient) = self.0.get::<B::InnerBackend, D>(param.id) {
                    let gradients = match D {
                        1 => &mut self.1.norms,
                        _ => &mut self.1.matrices,
                    };
                    gradients.push(floats(gradient));
                }
            }
        }
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        let mut collect = Collect(gradients, Self::default());
        model.visit(&mut collect);
        collect.1
    }

    /// How far these are from exact ones: all of them, those of norms, and that of the worst norm, each as one less the
    /// cosine.
    pub fn beside(&self, exact: &Self) -> [f64; 3] {
        let pairs = |of: fn(&Self) -> &Vec<Vec<f32>>| of(exact).iter().zip(of(self));
        let mut norms = Distance::default();
        let mut worst: f64 = 0.0;
        for (exact, norm) in pairs(|it| &it.norms) {
            norms.add(exact, norm);
            worst = worst.max(Distance::of(exact, norm).one_less_cosine());
        }
        let mut all = norms;
        pairs(|it| &it.matrices).for_each(|(exact, matrix)| all.add(exact, matrix));
        [all.one_less_cosine(), norms.one_less_cosine(), worst]
    }
}

/// Norms and SwiGLU's product whose backward passes read rounded values. Forward values are exact.
#[derive(Debug, Clone, Copy)]
pub struct Compressed {
    /// To what.
    pub numbers: Numbers,
    /// With which scales.
    pub granularity: Granularity,
}

impl Step<Exactly> for Compressed {
    fn norm(
        &mut self,
        _is_last: bool,
        x: Tensor<Exactly, 3>,
        norm: &RmsNorm<Exactly>,
    ) -> Tensor<Exactly, 3> {
        let saved = rounded(x.clone(), self.numbers, self.granularity);
        with_gradient_of(norm.forward(x), norm.forward(saved))
    }

    fn gate(&mut self, gate: Tensor<Exactly, 3>, up: Tensor<Exactly, 3>) -> Tensor<Exactly, 3> {
        let saved = |x: &Tensor<Exactly, 3>| rounded(x.clone(), self.numbers, self.granularity);
        let again = gated(saved(&gate), saved(&up));
        with_gradient_of(gated(gate, up), again)
    }
}

/// The gradients of exact contexts.
pub fn exact(model: &Decoder<Exactly>, batch: &Batch<Exactly>) -> Gradients {
    Gradients::of(model, model.loss(batch.clone(), &mut Exact))
}

/// The inputs of norms and of SwiGLU's product, in [`BITS`] bits and in BF16.
pub fn of_operators(model: &Decoder<Exactly>, batch: &Batch<Exactly>) -> Vec<ContextError> {
    let exact = exact(model, batch);
    let integers = BITS.map(|bits| (Numbers::Integer(bits), Some(GROUP)));
    let all = integers.chain([(Numbers::Bf16, None)]);
    all.map(|(numbers, group)| {
        let mut step = Compressed {
            numbers,
            granularity: Granularity::Group(GROUP),
        };
        let gradients = Gradients::of(model, model.loss(batch.clone(), &mut step));
        let [model, norms, worst_norm] = gradients.beside(&exact);
        ContextError {
            saved: Saved::Operators,
            numbers: numbers.name(),
            bits: numbers.bits(),
            group,
            model,
            norms,
            worst_norm,
        }
    })
    .collect()
}

/// All that the library compresses, in the formats that it has.
///
/// It chooses the context of the whole process: nothing else may train meanwhile.
pub fn of_library(model: &model::Decoder<Library>, batch: &Batch<Library>) -> Vec<ContextError> {
    let gradients = |context: Option<Context>| {
        choose_context(Some(context));
        let gradients = Gradients::of(model, model.loss(batch.clone()));
        choose_context(None);
        gradients
    };
    let exact = gradients(None);
    let contexts = [
        (Number::Int4, 128),
        (Number::Int8, 128),
        (Number::Int10, 128),
        (Number::E4M3, 128),
        (Number::E4M3, 16),
        (Number::E5M2, 128),
    ];
    let errors = contexts.into_iter().map(|(number, group)| {
        let [model, norms, worst_norm] = gradients(Some(Context {
            number,
            group,
            attention: AttentionContext::Compressed,
        }))
        .beside(&exact);
        ContextError {
            saved: Saved::All,
            numbers: Numbers::Format(number).name(),
            bits: number.bits(),
            group: Some(group),
            model,
            norms,
            worst_norm,
        }
    });
    errors.collect()
}
