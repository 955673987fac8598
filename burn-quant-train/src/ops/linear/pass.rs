//! Both passes on the device, each an operation of the backend that holds the data.

use burn_backend::{
    DType, FloatDType, Shape, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};

use super::plan::{BackwardPlan, Stored};
use crate::{
    data::{
        Kernels, Layout, Operation, cast_to,
        composition::{OperatorInput, SwigluCompressing},
        product::{Accumulation, ProductInputs, float_product},
        quantize::{
            DelayedMaximum, Fallback, MatrixSource, Quantized, QuantizedInput,
            Residual as ResidualBlocks, SwigluContexts, quantize_operand,
        },
        tensors::{Bundle, Change, FloatMeta, IntMeta, Outline, Tensors},
    },
    ops::{
        matrix::{Form, InputSource, Source, flatten, flattened},
        operand::{Make, copies},
    },
};

/// The forward pass.
#[derive(Debug, Clone)]
pub(super) struct Forward {
    /// The shape of X, `[.., K]`.
    pub x_shape: Shape,
    /// The shape of Y, `[.., N]`.
    pub shape: Shape,
    pub product: Option<[Make; 2]>,
    /// How products of FP8 numbers are added up.
    pub accumulation: Accumulation,
    /// True if X as the product takes it is wanted afterwards.
    pub keeps_operand: bool,
    /// The copy of X to make for the backward pass.
    pub saved: Option<Make>,
    /// The copies of W to make.
    pub weight: Option<Stored>,
    pub other_weight: Option<Stored>,
    /// True if the matrix of which copies are made is the transpose of W.
    pub transposed_weight: bool,
    pub compute: FloatDType,
    /// True if Y is wanted.
    pub wants_y: bool,
    /// True if W as the product takes it is wanted afterwards, where it is quantized for that.
    pub keeps_factor: bool,
}

#[derive(Debug, Clone)]
pub(super) struct ForwardInputs<T: Tensors> {
    /// X, `[.., K]`, of any float dtype, or a copy of the matrix.
    pub x: InputSource<T>,
    /// W, `[K, N]`, with leading dimensions of 1, or a copy of the tagged matrix.
    pub weight: Source<T>,
    /// `[N]`.
    pub bias: Option<T::Float>,
    pub fallback: Option<Fallback<T>>,
    /// The residuals of a copy of X, where another layer made them.
    pub residual: Option<ResidualBlocks<T>>,
    /// The maxima that X and W had in earlier steps, where they have a history.
    pub delayed: [Option<DelayedMaximum<T>>; 2],
}

impl Bundle for ForwardInputs<Outline> {
    type On<T: Tensors> = ForwardInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: ForwardInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> ForwardInputs<T> {
        ForwardInputs {
            x: InputSource::rebuild(inputs.x, change),
            weight: Source::rebuild(inputs.weight, change),
            bias: inputs.bias.map(|bias| change.float(bias)),
            fallback: Option::<Fallback<Outline>>::rebuild(inputs.fallback, change),
            residual: Option::<ResidualBlocks<Outline>>::rebuild(inputs.residual, change),
            delayed: inputs
                .delayed
                .map(|it| Option::<DelayedMaximum<Outline>>::rebuild(it, change)),
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct ForwardOutputs<T: Tensors> {
    /// Y, `[.., N]`, if it was wanted.
    pub y: Option<T::Float>,
    /// X as the product took it.
    pub operand: Option<Quantized<T>>,
    /// Its residuals, if it was quantized with fallback.
    pub residual: Option<ResidualBlocks<T>>,
    /// The copy of X for the backward pass.
    pub saved: Option<Quantized<T>>,
    /// The copies of W that were to be made.
    pub weight: Option<Quantized<T>>,
    pub other_weight: Option<Quantized<T>>,
    /// W as the product takes it, if it was quantized, and that was wanted.
    pub factor: Option<Quantized<T>>,
    /// The counters of the fallback state.
    pub counts: Option<T::Int>,
    /// The copies of what X is computed from that were asked for.
    pub contexts: SwigluContexts<T>,
}

impl Bundle for ForwardOutputs<Outline> {
    type On<T: Tensors> = ForwardOutputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        outputs: ForwardOutputs<S>,
        change: &mut impl Change<S, T>,
    ) -> ForwardOutputs<T> {
        type Copy = Option<Quantized<Outline>>;
        ForwardOutputs {
            y: outputs.y.map(|y| change.float(y)),
            operand: Copy::rebuild(outputs.operand, change),
            residual: Option::<ResidualBlocks<Outline>>::rebuild(outputs.residual, change),
            saved: Copy::rebuild(outputs.saved, change),
            weight: Copy::rebuild(outputs.weight, change),
            other_weight: Copy::rebuild(outputs.other_weight, change),
            factor: Copy::rebuild(outputs.factor, change),
            counts: outputs.counts.map(|counts| change.int(counts)),
            contexts: Option::<(Quantized<Outline>, Quantized<Outline>)>::rebuild(
                outputs.contexts,
                change,
            ),
        }
    }
}

impl Forward {
    /// The matrix that W's tag speaks of, of which copies are made.
    fn tagged_matrix<K: Kernels>(&self, weight: &FloatTensor<K>) -> FloatTensor<K> {
        let weight = flatten::<K>(weight.clone());
        match self.transposed_weight {
            true => K::float_swap_dims(weight, 0, 1),
            false => weight,
        }
    }
}

impl Operation for Forward {
    const NAME: &'static str = "linear_forward";
    type Inputs = ForwardInputs<Outline>;
    type Outputs = ForwardOutputs<Outline>;

    fn outline<T: Tensors>(&self, inputs: &ForwardInputs<T>) -> ForwardOutputs<Outline> {
        let x = flattened(&self.x_shape);
        let mut tagged = inputs.weight.shape();
        if self.transposed_weight && matches!(inputs.weight, Source::Float(_)) {
            tagged.reverse();
        }
        let own = |shape, make: &Make| make.outline(shape, make.factor.key.layout);
        let of_weight = |stored: Stored| stored.make.outline(tagged, stored.key.layout);
        let operand = self.product.filter(|_| self.keeps_operand);
        let residual = operand.filter(|_| inputs.fallback.is_some());
        let factor = self
            .product
            .zip(self.weight)
            .filter(|_| self.keeps_factor && matches!(inputs.weight, Source::Float(_)));
        ForwardOutputs {
            y: self
                .wants_y
                .then(|| FloatMeta::new(self.shape.clone(), self.compute)),
            operand: operand.map(|[make, _]| own(x, &make)),
            residual: residual.map(|[make, _]| ResidualBlocks::outline(x, make.factor.key.format)),
            saved: self.saved.map(|make| own(x, &make)),
            weight: self.weight.map(of_weight),
            other_weight: self.other_weight.map(of_weight),
            factor: factor.map(|([_, make], kept)| make.outline(tagged, layout_of(&make, &kept))),
            counts: inputs.fallback.as_ref().map(|it| IntMeta::of(&it.counts)),
            contexts: match &inputs.x {
                InputSource::Floats(MatrixSource::SwigluCompressing { contexts, .. }) => {
                    Some(SwigluCompressing::of_rows(*contexts, &self.x_shape).copies())
                }
                InputSource::Floats(
                    MatrixSource::Floats(_)
                    | MatrixSource::Swiglu { .. }
                    | MatrixSource::Gelu(_)
                    | MatrixSource::GeluGradient { .. }
                    | MatrixSource::Product(_)
                    | MatrixSource::RmsNorm { .. }
                    | MatrixSource::LayerNorm { .. },
                )
                | InputSource::Copy(_) => None,
            },
        }
    }

    fn run<K: Kernels>(self, inputs: ForwardInputs<K>) -> ForwardOutputs<K> {
        let ForwardInputs {
            x,
            weight,
            bias,
            fallback,
            residual,
            delayed: [delayed_x, delayed_weight],
        } = inputs;
        let delayed_weight = delayed_weight.as_ref();
        let shape = self.shape.clone();
        let other_weight = match (&weight, self.other_weight) {
            (Source::Float(weight), Some(Stored { key, make })) => {
                Some(make.copy::<K>(self.tagged_matrix::<K>(weight), key.layout, delayed_weight))
            }
            (Source::Float(_), None) | (Source::Copy(_), _) => None,
        };
        let Some([of_x, of_weight]) = self.product else {
            let (InputSource::Floats(x), Source::Float(weight)) = (x, weight) else {
                unreachable!("a product in the compute dtype takes floats");
            };
            let (x, contexts) = x.with_contexts();
            let x = flatten::<K>(x.into_floats());
            let source = MatrixSource::Floats(x.clone());
            let saved = copies::<K>(source, [self.saved.as_ref(), None], delayed_x.as_ref());
            let [saved, _] = saved;
            let product = || compute_product::<K>(x, flatten::<K>(weight), bias, self.compute);
            return ForwardOutputs {
                y: self.wants_y.then(|| K::float_reshape(product(), shape)),
                operand: None,
                residual: None,
                saved,
                weight: None,
                other_weight,
                factor: None,
                counts: None,
                contexts,
            };
        };
        let x = match x {
            InputSource::Copy(operand) => QuantizedX {
                operand,
                fallback: None,
                saved: None,
                contexts: None,
            },
            InputSource::Floats(x) => quantized_x::<K>(
                x.flattened(),
                &of_x,
                self.saved.as_ref(),
                fallback,
                delayed_x.as_ref(),
            ),
        };
        let QuantizedX {
            operand,
            fallback,
            saved,
            contexts,
        } = x;
        let (residual, counts) = match fallback {
            Some((residual, counts)) => (Some(residual), Some(counts)),
            None => (residual, None),
        };
        let (copy, made) = match weight {
            Source::Copy(copy) => (copy, None),
            Source::Float(weight) => {
                let kept = self.weight.expect("a float weight is to be quantized");
                let layout = layout_of(&of_weight, &kept);
                let matrix = self.tagged_matrix::<K>(&weight);
                let copy = of_weight.copy::<K>(matrix, layout, delayed_weight);
                let made = copy.in_layout(kept.key.layout);
                (copy, Some(made))
            }
        };
        let product = || {
            K::product(
                of_x.factor.operand(&operand),
                residual.as_ref(),
                of_weight.factor.operand(&copy),
                bias,
                self.accumulation,
                self.compute,
            )
        };
        ForwardOutputs {
            y: self.wants_y.then(|| K::float_reshape(product(), shape)),
            operand: self.keeps_operand.then_some(operand),
            residual: residual.filter(|_| self.keeps_operand && counts.is_some()),
            saved,
            factor: made.as_ref().filter(|_| self.keeps_factor).map(|_| copy),
            weight: made,
            other_weight,
            counts,
            contexts,
        }
    }
}

/// The layouts in which W is made. The product reads along its inner dimension; where that is another layout than the kept
/// one, it lives for the product only.
fn layout_of(of_product: &Make, kept: &Stored) -> Layout {
    match kept.key.layout == of_product.factor.key.layout {
        true => kept.key.layout,
        false => Layout::Both,
    }
}

/// X, quantized.
struct QuantizedX<K: Kernels> {
    /// The operand of the forward product.
    operand: Quantized<K>,
    /// Its residual and the counters.
    fallback: Option<(ResidualBlocks<K>, IntTensor<K>)>,
    /// The copy for the backward pass.
    saved: Option<Quantized<K>>,
    contexts: SwigluContexts<K>,
}

fn quantized_x<K: Kernels>(
    x: MatrixSource<K>,
    operand: &Make,
    saved: Option<&Make>,
    fallback: Option<Fallback<K>>,
    delayed: Option<&DelayedMaximum<K>>,
) -> QuantizedX<K> {
    let spec = operand.spec(operand.factor.key.layout);
    let is_another = |saved: &Make| {
        (fallback.is_some() || !operand.is_same_as(saved)) && !saved.factor.key.of_transpose
    };
    // Alone a copy of another kind comes by a kernel of its own.
    if delayed.is_none() && saved.map_or(fallback.is_some(), is_another) {
        let saved = saved.map(|saved| saved.spec(saved.factor.key.layout));
        let QuantizedInput {
            forward,
            fallback,
            saved,
            contexts,
        } = K::quantize_input(x, &spec, saved.as_ref(), fallback);
        return QuantizedX {
            operand: forward,
            fallback,
            saved,
            contexts,
        };
    }
    let (x, contexts) = x.with_contexts();
    let (operand, fallback, saved) = match fallback {
        None => {
            let [operand, saved] = copies::<K>(x, [Some(operand), saved], delayed);
            (operand.expect("it was asked for"), None, saved)
        }
        Some(_) => {
            let x = x.into_floats();
            let copy = |saved: &Make| saved.copy::<K>(x.clone(), saved.factor.key.layout, None);
            let saved = saved.map(copy);
            let (operand, fallback) = quantize_operand::<K>(x, &spec, fallback);
            (operand, fallback, saved)
        }
    };
    QuantizedX {
        operand,
        fallback,
        saved,
        contexts,
    }
}

/// The product of two matrices in the compute dtype, plus a bias.
fn compute_product<K: Kernels>(
    left: FloatTensor<K>,
    right: FloatTensor<K>,
    bias: Option<FloatTensor<K>>,
    compute: FloatDType,
) -> FloatTensor<K> {
    let [left, right] = [left, right].map(|it| cast_to::<K>(it, Some(compute)));
    let product = float_product::<K>(left, right, compute);
    match bias {
        None => product,
        Some(bias) => {
            let row = Shape::new([1, bias.shape()[0]]);
            let bias = cast_to::<K>(bias, Some(compute));
            K::float_add(product, K::float_reshape(bias, row))
        }
    }
}

/// The backward pass, which computes the gradients that have a form.
#[derive(Debug, Clone)]
pub(super) struct Backward {
    pub input: Option<Form>,
    pub weight: Option<Form>,
    pub plan: BackwardPlan,
    /// The copy of dX that is given back in its place.
    pub input_gradient: Option<Make>,
    pub compute: FloatDType,
}

#[derive(Debug, Clone)]
pub(super) struct BackwardInputs<T: Tensors> {
    /// dY, `[.., N]`, of any float dtype, or the copy that the quantized products of the wanted gradients read.
    pub gradient: Source<T>,
    /// W, where dX is wanted.
    pub weight: Option<Source<T>>,
    /// X, where dW is wanted.
    pub x: Option<Source<T>>,
    /// The maximum that dY had in earlier steps, where it has a history.
    pub delayed: Option<DelayedMaximum<T>>,
}

impl Bundle for BackwardInputs<Outline> {
    type On<T: Tensors> = BackwardInputs<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        inputs: BackwardInputs<S>,
        change: &mut impl Change<S, T>,
    ) -> BackwardInputs<T> {
        type Operand = Option<Source<Outline>>;
        BackwardInputs {
            gradient: Source::rebuild(inputs.gradient, change),
            weight: Operand::rebuild(inputs.weight, change),
            x: Operand::rebuild(inputs.x, change),
            delayed: Option::<DelayedMaximum<Outline>>::rebuild(inputs.delayed, change),
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Gradients<T: Tensors> {
    /// dX: in numbers where it flows back so.
    pub input: Option<OperatorInput<T>>,
    /// dW.
    pub weight: Option<T::Float>,
    /// The largest magnitude of dY, FP32 `[1]`, where it has a history.
    pub absmax: Option<T::Float>,
}

impl Bundle for Gradients<Outline> {
    type On<T: Tensors> = Gradients<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        gradients: Gradients<S>,
        change: &mut impl Change<S, T>,
    ) -> Gradients<T> {
        Gradients {
            input: Option::<OperatorInput<Outline>>::rebuild(gradients.input, change),
            weight: gradients.weight.map(|it| change.float(it)),
            absmax: gradients.absmax.map(|it| change.float(it)),
        }
    }
}

impl Backward {
    /// The copies of dY that the products of the wanted gradients read.
    fn gradients(&self) -> [Option<Make>; 2] {
        let BackwardPlan { input, weight, .. } = self.plan;
        [
            input
                .filter(|_| self.input.is_some())
                .map(|[gradient, _]| gradient),
            weight
                .filter(|_| self.weight.is_some())
                .map(|[_, gradient]| gradient),
        ]
    }
}

impl Operation for Backward {
    const NAME: &'static str = "linear_backward";
    type Inputs = BackwardInputs<Outline>;
    type Outputs = Gradients<Outline>;

    fn outline<T: Tensors>(&self, inputs: &BackwardInputs<T>) -> Gradients<Outline> {
        let of = |form: &Form| FloatMeta::new(form.shape.clone(), form.dtype);
        let has_history = self
            .gradients()
            .into_iter()
            .flatten()
            .any(|make| make.has_history());
        let delayed = inputs.delayed.as_ref().filter(|_| has_history);
        Gradients {
            input: self.input.as_ref().map(|form| match &self.input_gradient {
                Some(make) => OperatorInput::Quantized {
                    matrix: make.outline(flattened(&form.shape), make.factor.key.layout),
                    shape: form.shape.clone(),
                    dtype: form.dtype,
                },
                None => OperatorInput::Floats(of(form)),
            }),
            weight: self.weight.as_ref().map(of),
            absmax: delayed.map(|_| FloatMeta::new([1], DType::F32)),
        }
    }

    fn run<K: Kernels>(self, inputs: BackwardInputs<K>) -> Gradients<K> {
        let makes = self.gradients();
        let BackwardPlan {
            input,
            weight,
            accumulation: [sums_of_input, sums_of_weight],
        } = self.plan;
        let of_input = input.filter(|_| self.input.is_some());
        let of_weight = weight.filter(|_| self.weight.is_some());
        let makes = makes.each_ref().map(Option::as_ref);
        let (gradient, quantized, absmax) = match inputs.gradient {
            Source::Float(gradient) => {
                let gradient = flatten::<K>(gradient);
                let source = MatrixSource::Floats(gradient.clone());
                let quantized = copies::<K>(source, makes, inputs.delayed.as_ref());
                let mut copies = quantized.iter().flatten();
                let absmax = copies.find_map(|copy| copy.absmax.clone());
                (Some(gradient), quantized, absmax)
            }
            Source::Copy(both) => {
                let copy = |make: &Make| both.in_layout(make.factor.key.layout);
                // Whoever made the copy has its maximum.
                (None, makes.map(|make| make.map(copy)), None)
            }
        };
        let gradient = || {
            gradient
                .clone()
                .expect("a product in the compute dtype takes floats")
        };
        let float = |tensor| cast_to::<K>(tensor, Some(self.compute));
        let transposed = |tensor| K::float_swap_dims(flatten::<K>(tensor), 0, 1);

        let in_form = |product, form: Form| K::float_reshape(product, form.shape);
        let input = inputs.weight.zip(self.input).map(|(weight, form)| {
            let product = match (weight, &of_input, &quantized[0]) {
                (Source::Copy(weight), Some([left, right]), Some(gradient)) => {
                    let operands = [left.factor.operand(gradient), right.factor.operand(&weight)];
                    let matrix = Shape::new(flattened(&form.shape));
                    let how = (sums_of_input, form.dtype);
                    MatrixSource::Product(ProductInputs::new(operands, None, how, matrix))
                }
                (Source::Float(weight), _, _) => MatrixSource::Floats(float_product::<K>(
                    float(gradient()),
                    float(transposed(weight)),
                    form.dtype,
                )),
                (Source::Copy(_), ..) => {
                    unreachable!("a quantized weight is for a quantized product")
                }
            };
            match self.input_gradient {
                Some(make) => OperatorInput::Quantized {
                    matrix: make.copy_of::<K>(product, make.factor.key.layout, None),
                    shape: form.shape,
                    dtype: form.dtype,
                },
                None => OperatorInput::Floats(in_form(product.into_floats(), form)),
            }
        });
        let weight = inputs.x.zip(self.weight).map(|(x, form)| {
            let product = match (x, &of_weight, &quantized[1]) {
                (x, Some([left, right]), Some(gradient)) => {
                    let x = match x {
                        Source::Copy(copy) => copy,
                        Source::Float(x) => {
                            left.copy::<K>(flatten::<K>(x), left.factor.key.layout, None)
                        }
                    };
                    // Straight from the accumulators.
                    K::product(
                        left.factor.operand(&x),
                        None,
                        right.factor.operand(gradient),
                        None,
                        sums_of_weight,
                        form.dtype,
                    )
                }
                (Source::Float(x), _, _) => {
                    float_product::<K>(float(transposed(x)), float(gradient()), form.dtype)
                }
                (Source::Copy(_), ..) => {
                    unreachable!("a quantized input is for a quantized product")
                }
            };
            in_form(product, form)
        });
        Gradients {
            input,
            weight,
            absmax,
        }
    }
}
