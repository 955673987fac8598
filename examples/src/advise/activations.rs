//! The values that a forward pass leaves for the backward pass, operation by operation: those of `pretrain --memory`,
//! computed from sizes. The operations are those of [`crate::model`]; a test compares the two.

use burn_quant_train::backend::Kept;
use burn_quant_train::layer::LayerPolicy;
use burn_quant_train::recipe::{AttentionContext, Context, Flow, Row};
use burn_quant_train::saved::MIN_COMPRESSED;
use serde::Serialize;

use super::device::Device;
use super::shapes::{Family, Linear, Reads, Shapes};
use crate::args::{Checkpointing, Compute};

/// Bytes of an FP32 number.
const FULL: usize = 4;

/// How attention is computed, and so what it saves.
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionForm {
    /// From Burn's operations: scores and probabilities wait.
    Composed,
    /// From two products and a softmax between them, in one node: Q, K and V wait.
    Products,
    /// By a kernel without scores in memory: Q, K, V, the output and a number a query wait.
    Flash,
    /// The same on a CPU, which has no kernels for other compositions.
    Tiles,
}

impl AttentionForm {
    /// That of a device, of a causal mask and nothing else: kernels are for BF16 and FP16, and those that save no
    /// scores for NVIDIA devices from sm_80 on, heads of at most 256 features, a multiple of 8.
    pub fn on(device: Device, compute: Compute, head_width: usize) -> Self {
        match (device, compute) {
            (_, Compute::F32) => Self::Composed,
            (Device::Cpu, _) => Self::Tiles,
            _ if device.has_flash_attention()
                && head_width.is_multiple_of(8)
                && head_width <= 256 =>
            {
                Self::Flash
            }
            _ => Self::Products,
        }
    }
}

/// A training step of a model, as far as activations depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The model.
    pub model: &'a Shapes,
    /// Sequences in a batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub sequence: usize,
    /// The dtype of what is not quantized.
    pub compute: Compute,
    /// How attention is computed.
    pub attention: AttentionForm,
    /// True where the narrow copies of weights that are not quantized wait too.
    pub keeps_casts: bool,
    /// The recipe.
    pub row: &'a Row,
    /// How values wait; none: as they are.
    pub context: Option<Context>,
    /// Which parts of the model run again in the backward pass.
    pub checkpointing: Checkpointing,
}

/// The form of a value under a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// It is compressed.
    Compressed,
    /// It is computed again from others that wait.
    Again,
    /// It stays as it is.
    Exact,
    /// As it flows.
    Flows(Flow),
    /// It is a mask: a bit an element.
    Bits,
    /// It is a mask in a block: the same without contexts.
    BitsInBlock,
}

/// Values that wait for the backward pass.
#[derive(Clone, Copy, Debug)]
struct Value {
    count: usize,
    shape: [usize; 2],
    /// Bytes of an element.
    size: usize,
    waits: Waits,
}

impl Value {
    fn elements(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// True for what is kept as it is in any case.
    fn is_small(&self) -> bool {
        self.elements() < MIN_COMPRESSED || self.shape[1] == 1
    }

    fn bytes(&self, context: Option<Context>) -> usize {
        let (elements, is_small) = (self.elements(), self.is_small());
        let bytes = match (context, self.waits) {
            (_, Waits::Flows(flow)) => flow.bytes(self.shape),
            (Some(_), Waits::Again) if !is_small => 0,
            (Some(context), Waits::Compressed) if !is_small => context.bytes(self.shape),
            (Some(_), Waits::Bits) | (_, Waits::BitsInBlock) if !is_small => {
                elements.div_ceil(32) * 4
            }
            _ => elements * self.size,
        };
        self.count * bytes
    }
}

impl Step<'_> {
    /// Bytes that wait for the backward pass, quantized copies of the inputs of layers among them.
    pub fn saved(&self) -> usize {
        let of_loss = self.bytes(&self.loss()) + self.head();
        match self.checkpointing {
            Checkpointing::None => self.of_layers() + of_loss,
            Checkpointing::Layers => self.of_blocks() + of_loss,
        }
    }

    /// The values that a layer makes again and holds while its backward pass runs: none of them waits compressed then.
    pub fn of_one_layer(&self) -> usize {
        let step = Step {
            model: &self.model.with_layers(1),
            context: None,
            ..*self
        };
        step.inside_layers(step.norms(2))
    }

    fn bytes(&self, values: &[Value]) -> usize {
        values.iter().map(|value| value.bytes(self.context)).sum()
    }

    /// The values that layers leave, and the norm behind them.
    fn of_layers(&self) -> usize {
        let count = 1 + 2 * self.model.layers;
        let masks = self.masks(count, Waits::Bits);
        self.inside_layers([self.norms(count), masks].concat())
    }

    /// These values, and those of attention, the feed-forward network and the inputs of linear layers.
    fn inside_layers(&self, beside: Vec<Value>) -> usize {
        let values = [beside, self.attention(), self.feed_forward()];
        let of_inputs: usize = Reads::ALL.map(|reads| self.input(reads)).iter().sum();
        self.bytes(&values.concat()) + self.model.layers * of_inputs + self.of_embedding()
    }

    /// What the first layer's norm reads is the embedding, which may be made again itself: the copy of what the norm makes
    /// of it waits.
    fn of_embedding(&self) -> usize {
        match self.is_made_again(Reads::Attention) {
            true => self.copies(&self.readers(Reads::Attention), false),
            false => 0,
        }
    }

    /// The values that layers leave of which each is a block: their inputs, those that the norm behind them leaves, and
    /// what is kept in a block too: masks, a bit an element, and what is small, but for a kernel's own, which makes it
    /// again.
    pub fn of_blocks(&self) -> usize {
        let Shapes { layers, hidden, .. } = *self.model;
        let mut small = Vec::new();
        if !self.composes() {
            small.extend(self.norms(2 * layers));
        }
        if self.attention == AttentionForm::Composed {
            small.extend(self.attention());
        }
        small.retain(Value::is_small);
        let values = [
            vec![self.values(layers, hidden, Waits::Compressed)],
            self.norms(1),
            small,
            self.masks(1, Waits::Bits),
            self.masks(2 * layers, Waits::BitsInBlock),
        ];
        self.bytes(&values.concat())
    }

    fn tokens(&self) -> usize {
        self.batch * self.sequence
    }

    /// True where compositions are one operation: in a flow, and where the device has kernels for them, as for
    /// attention.
    fn composes(&self) -> bool {
        !self.is_burns() || self.row.flow.is_some()
    }

    /// True where Burn's operations run one by one: there are kernels of compositions on GPUs, in narrow dtypes.
    fn is_burns(&self) -> bool {
        match self.attention {
            AttentionForm::Composed | AttentionForm::Tiles => true,
            AttentionForm::Products | AttentionForm::Flash => false,
        }
    }

    /// How waits what an operator of a flow reads.
    fn read_by_operator(&self) -> Waits {
        self.row.flow.map_or(Waits::Compressed, Waits::Flows)
    }

    /// Bytes of a number in the compute dtype.
    fn size(&self) -> usize {
        self.compute.bytes()
    }

    fn is_narrow(&self) -> bool {
        self.size() < FULL
    }

    /// Values of `features` for each token, in the compute dtype.
    fn values(&self, count: usize, features: usize, waits: Waits) -> Value {
        Value {
            count,
            shape: [self.tokens(), features],
            size: self.size(),
            waits,
        }
    }

    /// The residual stream, the embedding and the sum behind each half of a layer, and what so many norms make of it.
    fn norms(&self, count: usize) -> Vec<Value> {
        let value = |features, size, waits| Value {
            size,
            ..self.values(count, features, waits)
        };
        let (hidden, size) = (self.model.hidden, self.size());
        match self.model.family {
            // The stream, and a number a row.
            Family::Llama if self.composes() => vec![
                value(hidden, size, self.read_by_operator()),
                value(1, FULL, Waits::Exact),
            ],
            // The stream, also in FP32; what it is divided by, in FP32 and in the compute dtype, and the quotient.
            Family::Llama => {
                let mut values = vec![
                    value(hidden, size, Waits::Compressed),
                    value(1, FULL, Waits::Exact),
                    value(1, size, Waits::Exact),
                    value(hidden, size, Waits::Again),
                ];
                let in_full = value(hidden, FULL, Waits::Again);
                values.extend(self.is_narrow().then_some(in_full));
                values
            }
            // The stream, and two numbers a row.
            Family::Gpt2 if self.composes() => vec![
                value(hidden, size, self.read_by_operator()),
                value(1, FULL, Waits::Exact),
                value(1, FULL, Waits::Exact),
            ],
            // The difference to the mean, in place of the stream, the variance and its root, and the quotient.
            Family::Gpt2 => vec![
                value(hidden, FULL, Waits::Compressed),
                value(1, FULL, Waits::Exact),
                value(1, FULL, Waits::Exact),
                value(hidden, FULL, Waits::Again),
            ],
        }
    }

    fn attention(&self) -> Vec<Value> {
        let Shapes {
            layers,
            heads,
            head_width,
            ..
        } = *self.model;
        // The table of the module for queries and for keys, where Burn composes it. The kernel reads the module's own.
        let rotary = Value {
            count: 2 * layers,
            shape: [self.sequence, 2 * head_width],
            size: FULL,
            waits: Waits::Again,
        };
        let composes_rotary = self.model.family == Family::Llama && self.is_burns();
        let operands = match self.attention {
            AttentionForm::Flash | AttentionForm::Tiles
                if self.of_attention() == AttentionContext::Exact =>
            {
                Waits::Exact
            }
            AttentionForm::Composed
            | AttentionForm::Products
            | AttentionForm::Flash
            | AttentionForm::Tiles => Waits::Compressed,
        };
        let mut values = vec![self.values(3 * layers, self.model.heads_width(), operands)];
        values.extend(composes_rotary.then_some(rotary));
        match self.attention {
            AttentionForm::Composed => values.extend(self.scores()),
            AttentionForm::Products => {}
            // The kernel's output is computed again.
            AttentionForm::Flash | AttentionForm::Tiles
                if self.of_attention() == AttentionContext::Compressed => {}
            AttentionForm::Flash | AttentionForm::Tiles => {
                values.push(Value {
                    size: FULL,
                    ..self.values(layers, heads, Waits::Exact)
                });
                // The next layer reads the same memory; it keeps that where it keeps its input as it came.
                let keeps_input = self.context.is_none() && self.keeps_input(Reads::Heads);
                let output = self.values(layers, self.model.heads_width(), Waits::Exact);
                values.extend((!keeps_input).then_some(output));
            }
        }
        values
    }

    /// How the values of attention without scores wait.
    fn of_attention(&self) -> AttentionContext {
        (self.context).map_or(AttentionContext::Exact, |context| context.attention)
    }

    /// Scores before their exponential, and behind it before and after the division, and the largest of each row.
    fn scores(&self) -> Vec<Value> {
        let Shapes { layers, heads, .. } = *self.model;
        let of_scores = |size, waits| Value {
            size,
            ..self.values(layers, heads * self.sequence, waits)
        };
        let probabilities = match self.is_narrow() {
            true => Waits::Compressed,
            false => Waits::Again,
        };
        let largest = Value {
            count: layers,
            shape: [self.tokens() * heads, 1],
            size: FULL,
            waits: Waits::Exact,
        };
        vec![
            of_scores(FULL, Waits::Exact),
            of_scores(FULL, Waits::Again),
            of_scores(self.size(), probabilities),
            largest,
        ]
    }

    /// The values that the feed-forward network saves inside, the input of its last layer aside.
    fn feed_forward(&self) -> Vec<Value> {
        let Shapes { layers, ffn, .. } = *self.model;
        match self.model.family {
            Family::Llama if self.composes() => {
                vec![self.values(2 * layers, ffn, self.read_by_operator())]
            }
            // Gate and up; the gate's sigmoid and its product with it.
            Family::Llama => vec![
                self.values(2 * layers, ffn, Waits::Compressed),
                self.values(2 * layers, ffn, Waits::Again),
            ],
            // The input of GELU.
            Family::Gpt2 => vec![self.values(layers, ffn, self.read_by_operator())],
        }
    }

    /// The factors of so many dropouts, where these are not one operation, which draws them again.
    fn masks(&self, count: usize, waits: Waits) -> Vec<Value> {
        let masks = self.values(count, self.model.hidden, waits);
        let keeps_masks = self.model.has_dropout && !self.composes();
        let masks = keeps_masks.then_some(masks);
        masks.into_iter().collect()
    }

    /// The log-probabilities' terms in FP32: log-softmax and losses are of that class.
    fn loss(&self) -> Vec<Value> {
        [self.model.vocabulary, 1]
            .map(|features| Value {
                size: FULL,
                ..self.values(1, features, Waits::Exact)
            })
            .to_vec()
    }

    /// True if the recipe quantizes the layer.
    fn is_quantized(&self, path: &str, shape: [usize; 2]) -> bool {
        let decision = LayerPolicy::default().decide(path, shape);
        self.row.linear.is_some() && decision.is_quantized()
    }

    fn readers(&self, reads: Reads) -> Vec<Linear> {
        let mut linears = self.model.linears();
        linears.retain(|linear| linear.reads == reads);
        linears
    }

    /// True if a layer of the row keeps this input as it came.
    fn keeps_input(&self, reads: Reads) -> bool {
        let keeps = |linear: &Linear| match self.row.linear {
            Some(row) if self.is_quantized(linear.path, linear.shape) => {
                row.kept(self.tokens(), linear.shape).input.is_none()
            }
            _ => true,
        };
        self.readers(reads).iter().any(keeps)
    }

    /// The input of the layers that read it: as it came, once, or their quantized copies; and casts of their weights.
    fn input(&self, reads: Reads) -> usize {
        let readers = self.readers(reads);
        let waits = match reads {
            Reads::Attention | Reads::FeedForward | Reads::Inside => self.products(),
            Reads::Heads => Waits::Compressed,
        };
        let float = self
            .values(1, self.model.features(reads), waits)
            .bytes(self.context);
        let exact = readers
            .iter()
            .filter(|it| !self.is_quantized(it.path, it.shape));
        let casts: usize = exact.map(|it| self.cast(it.shape)).sum();
        let float = match self.keeps_input(reads) {
            true => float,
            false => 0,
        };
        float + casts + self.copies(&readers, self.is_made_again(reads))
    }

    /// True if the input can be made again of what waits anyway: a norm's output of what waits compressed, attention's of
    /// what waits as it is.
    fn is_made_again(&self, reads: Reads) -> bool {
        let Some(context) = self.context.filter(|_| self.row.flow.is_none()) else {
            return false;
        };
        match reads {
            Reads::Attention | Reads::FeedForward => {
                let input = self.values(1, self.model.hidden, Waits::Compressed);
                self.model.family == Family::Llama
                    && self.composes()
                    && self.model.hidden.is_multiple_of(context.group)
                    && !input.is_small()
            }
            Reads::Heads => {
                let has_kernel = match self.attention {
                    AttentionForm::Flash | AttentionForm::Tiles => true,
                    AttentionForm::Composed | AttentionForm::Products => false,
                };
                has_kernel && context.attention != AttentionContext::Compressed
            }
            Reads::Inside => false,
        }
    }

    /// The form of the outputs of norms and of the values inside a feed-forward network: in Llama they are products,
    /// where Burn composes them, in GPT-2 sums and what GELU makes, which are not computed again.
    fn products(&self) -> Waits {
        match self.model.family {
            Family::Llama if self.composes() => Waits::Compressed,
            Family::Llama => Waits::Again,
            Family::Gpt2 => Waits::Compressed,
        }
    }

    /// Bytes of the quantized copies of an input that wait. `is_made_again`: whether that can be.
    fn copies(&self, readers: &[Linear], is_made_again: bool) -> usize {
        let Some(row) = self.row.linear else {
            return 0;
        };
        let quantized = readers
            .iter()
            .filter(|it| self.is_quantized(it.path, it.shape));
        let kept: Vec<_> = quantized
            .map(|it| row.kept(self.tokens(), it.shape))
            .collect();
        let waits = |it: &&Kept| !(is_made_again && it.is_made_again);
        let bytes = kept.iter().filter(waits).filter_map(|it| it.input);
        match kept.iter().all(|it| it.shares_input) {
            true => bytes.max().unwrap_or(0),
            false => bytes.sum(),
        }
    }

    /// The copy in a narrow compute dtype of a weight that is not quantized.
    fn cast(&self, [inputs, outputs]: [usize; 2]) -> usize {
        let cast = Value {
            count: 1,
            shape: [inputs, outputs],
            size: self.size(),
            waits: Waits::Again,
        };
        match self.is_narrow() && self.keeps_casts {
            true => cast.bytes(self.context),
            false => 0,
        }
    }

    /// The vocabulary head's input and its weight's copy. The default policy does not quantize it.
    fn head(&self) -> usize {
        let Shapes {
            hidden, vocabulary, ..
        } = *self.model;
        let waits = match self.model.family {
            Family::Llama => self.products(),
            // A sum, and so near the loss that it is kept as it is.
            Family::Gpt2 => Waits::Exact,
        };
        let input = self.values(1, hidden, waits);
        input.bytes(self.context) + self.cast([hidden, vocabulary])
    }
}
