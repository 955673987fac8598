//! The operations of compositions.

use burn_backend::{
    Backend, DType, FloatDType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};

use cubecl_kernels::{
    dropout::Draw, granularity::Granularity, quantize::QuantizeSpec, rotary::RotaryPass,
    sum::Reduction,
};

use super::{
    OperatorInput, floats,
    kernels::{CompositionKernels, Compositions, NormInput, Pair},
};
use crate::data::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    quantize::Quantized,
    tensors::{FloatMeta, IntMeta, On, Outline, Tensors},
};

/// x, or the gate, or up.
type Input = OperatorInput<Outline>;

/// The terms of the gradient of an output, and what is added to that of the input.
type Gradient = (Vec<Input>, Option<FloatMeta>);

/// The sum of a gradient's terms, in their order.
pub(crate) fn gradient_of_terms<B: Backend>(
    terms: impl Iterator<Item = FloatTensor<B>>,
) -> FloatTensor<B> {
    let sum = terms.reduce(|sum, term| B::float_add(term, sum));
    sum.expect("a gradient has terms")
}

/// The gradient of an input, with what is added to it.
pub(crate) fn with_other<B: Backend>(
    of_x: FloatTensor<B>,
    other: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    match other {
        Some(other) => B::float_add(of_x, other),
        None => of_x,
    }
}

/// Columns, and the rows that all leading dimensions count.
pub(crate) fn rows_and_columns(shape: &Shape) -> [usize; 2] {
    let columns = shape.last().copied().unwrap_or(1);
    [
        shape.num_elements().checked_div(columns).unwrap_or(0),
        columns,
    ]
}

/// The outline of a copy of a tensor's rows, if it is asked for.
fn outline_of_copy(shape: &Shape, spec: Option<QuantizeSpec>) -> Option<Quantized<Outline>> {
    spec.map(|spec| Quantized::outline(rows_and_columns(shape), &spec))
}

/// The copy of a tensor's rows, if it is asked for.
fn copy_of_rows<K: Kernels>(
    x: &FloatTensor<K>,
    spec: Option<QuantizeSpec>,
) -> Option<Quantized<K>> {
    let matrix = || K::float_reshape(x.clone(), Shape::new(rows_and_columns(&x.shape())));
    spec.map(|spec| K::quantize_matrix(matrix(), &spec))
}

/// RMSNorm (Zhang & Sennrich, 2019, equation 4) of x `[.., columns]`, with a gain of so many elements.
#[derive(Debug, Clone)]
pub(crate) struct RmsNormForward {
    pub epsilon: f32,
    /// How x, which is floats then, waits for the backward pass, where the pass is to make that copy too: in groups of
    /// which rows are whole ones.
    pub copy: Option<QuantizeSpec>,
}

impl Operation for RmsNormForward {
    const NAME: &'static str = "rms_norm";
    /// x and the gain.
    type Inputs = (Input, FloatMeta);
    /// The output, and the inverse of each row's root mean square, f32 `[rows, 1]`; the copy of x.
    type Outputs = ((FloatMeta, FloatMeta), Option<Quantized<Outline>>);

    fn outline<T: Tensors>(&self, (x, _): &On<Self::Inputs, T>) -> Self::Outputs {
        let [rows, _] = rows_and_columns(&x.shape());
        let of_rows = FloatMeta::new(Shape::new([rows, 1]), FloatDType::F32);
        (
            (x.outline(), of_rows),
            outline_of_copy(&x.shape(), self.copy),
        )
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        match norm_kernels::<K>(&inputs.0) {
            Some(kernels) => (kernels.rms_norm)(inputs, self.epsilon, self.copy.as_ref()),
            None => {
                let inputs = floats_of::<K>(inputs);
                let copy = copy_of_rows::<K>(&inputs.0, self.copy);
                (floats::rms_norm::<K>(inputs, self.epsilon), copy)
            }
        }
    }
}

/// False where a device would have one launch more for it: with kernels for norms, but none that quantizes their output in
/// this granularity.
pub(crate) fn quantizes_norms<B: DataBackend>(
    device: &Device<B>,
    granularity: Granularity,
) -> bool {
    let kernels = B::Kernels::composition_kernels(device);
    kernels.is_none_or(|kernels| (kernels.quantizes_norms)(device, granularity))
}

/// True where kernels of the device quantize a norm's output, and what activation functions give, as they compute it in
/// this granularity.
pub(crate) fn has_quantizing_kernels<B: DataBackend>(
    device: &Device<B>,
    granularity: Granularity,
) -> bool {
    let kernels = B::Kernels::composition_kernels(device);
    kernels.is_some_and(|kernels| (kernels.quantizes_norms)(device, granularity))
}

/// What RMSNorm gives of the rows, for who makes the output as it is quantized.
#[derive(Debug, Clone)]
pub(crate) struct InverseRms {
    pub epsilon: f32,
}

impl Operation for InverseRms {
    const NAME: &'static str = "inverse_rms";
    /// x.
    type Inputs = Input;
    /// The inverse of each row's root mean square, f32 `[rows, 1]`.
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, x: &OperatorInput<T>) -> FloatMeta {
        let [rows, _] = rows_and_columns(&x.shape());
        FloatMeta::new(Shape::new([rows, 1]), FloatDType::F32)
    }

    fn run<K: Kernels>(self, x: OperatorInput<K>) -> FloatTensor<K> {
        match norm_kernels::<K>(&x) {
            Some(kernels) => (kernels.inverse_rms)(x, self.epsilon),
            None => {
                let shape = Shape::new(rows_and_columns(&x.shape()));
                floats::inverse_rms::<K>(K::float_reshape(x.into_floats(), shape), self.epsilon)
            }
        }
    }
}

/// The gradients of RMSNorm.
#[derive(Debug, Clone)]
pub(crate) struct RmsNormGradients;

impl Operation for RmsNormGradients {
    const NAME: &'static str = "rms_norm_backward";
    /// x and the gain; the inverse root mean squares, and the gradient of the output.
    type Inputs = ((Input, FloatMeta), (FloatMeta, Gradient));
    /// Those of x, and of the gain, f32 `[columns]`.
    type Outputs = (FloatMeta, FloatMeta);

    fn outline<T: Tensors>(&self, ((x, _), _): &On<Self::Inputs, T>) -> Self::Outputs {
        let [_, columns] = rows_and_columns(&x.shape());
        let of_gain = FloatMeta::new(Shape::new([1, columns]), FloatDType::F32);
        (x.outline(), of_gain)
    }

    fn run<K: Kernels>(
        self,
        (input, (inverse_rms, gradient)): On<Self::Inputs, K>,
    ) -> On<Self::Outputs, K> {
        if let Some(kernels) = norm_kernels::<K>(&input.0) {
            return (kernels.rms_norm_backward)(input, inverse_rms, gradient);
        }
        let (terms, other) = gradient;
        let gradient = gradient_of_terms::<K>(terms.into_iter().map(OperatorInput::into_floats));
        let input = floats_of::<K>(input);
        let (of_x, of_gain) = floats::rms_norm_backward::<K>(input, (inverse_rms, gradient));
        (with_other::<K>(of_x, other), of_gain)
    }
}

/// Layer normalization (Ba et al., 2016, equation 3) of x `[.., columns]`, with a gain and perhaps a bias of so many
/// elements.
#[derive(Debug, Clone)]
pub(crate) struct LayerNormForward {
    pub epsilon: f32,
    /// As of [`RmsNormForward`].
    pub copy: Option<QuantizeSpec>,
}

impl Operation for LayerNormForward {
    const NAME: &'static str = "layer_norm";
    /// x and the gain; the bias.
    type Inputs = ((Input, FloatMeta), Option<FloatMeta>);
    /// The output; each row's mean, and the inverse of its standard deviation, f32 `[rows, 1]`; the copy of x.
    type Outputs = (
        (FloatMeta, (FloatMeta, FloatMeta)),
        Option<Quantized<Outline>>,
    );

    fn outline<T: Tensors>(&self, ((x, _), _): &On<Self::Inputs, T>) -> Self::Outputs {
        let [rows, _] = rows_and_columns(&x.shape());
        let of_rows = || FloatMeta::new(Shape::new([rows, 1]), FloatDType::F32);
        let norm = (x.outline(), (of_rows(), of_rows()));
        (norm, outline_of_copy(&x.shape(), self.copy))
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        match norm_kernels::<K>(&inputs.0.0) {
            Some(kernels) => (kernels.layer_norm)(inputs, self.epsilon, self.copy.as_ref()),
            None => {
                let (input, bias) = inputs;
                let input = floats_of::<K>(input);
                let copy = copy_of_rows::<K>(&input.0, self.copy);
                (floats::layer_norm::<K>((input, bias), self.epsilon), copy)
            }
        }
    }
}

/// What layer normalization gives of the rows, for who makes the output as it is quantized.
#[derive(Debug, Clone)]
pub(crate) struct RowDeviations {
    pub epsilon: f32,
}

impl Operation for RowDeviations {
    const NAME: &'static str = "row_deviations";
    /// x.
    type Inputs = Input;
    /// Each row's mean, and the inverse of its standard deviation, f32 `[rows, 1]`.
    type Outputs = (FloatMeta, FloatMeta);

    fn outline<T: Tensors>(&self, x: &OperatorInput<T>) -> Self::Outputs {
        let [rows, _] = rows_and_columns(&x.shape());
        let of_rows = || FloatMeta::new(Shape::new([rows, 1]), FloatDType::F32);
        (of_rows(), of_rows())
    }

    fn run<K: Kernels>(self, x: OperatorInput<K>) -> Pair<K> {
        match norm_kernels::<K>(&x) {
            Some(kernels) => (kernels.row_deviations)(x, self.epsilon),
            None => {
                let (_, rows) = floats::centred_rows::<K>(x.into_floats(), self.epsilon);
                rows
            }
        }
    }
}

/// Its gradients.
#[derive(Debug, Clone)]
pub(crate) struct LayerNormGradients;

impl Operation for LayerNormGradients {
    const NAME: &'static str = "layer_norm_backward";
    /// x, the gain and the gradient of the output; the rows' means and the inverses of their standard deviations.
    type Inputs = (((Input, FloatMeta), Gradient), (FloatMeta, FloatMeta));
    /// That of x; those of the gain and of the bias, f32 `[1, columns]`.
    type Outputs = (FloatMeta, (FloatMeta, FloatMeta));

    fn outline<T: Tensors>(&self, (((x, _), _), _): &On<Self::Inputs, T>) -> Self::Outputs {
        let [_, columns] = rows_and_columns(&x.shape());
        let of_columns = || FloatMeta::new(Shape::new([1, columns]), FloatDType::F32);
        (x.outline(), (of_columns(), of_columns()))
    }

    fn run<K: Kernels>(
        self,
        ((input, gradient), statistics): On<Self::Inputs, K>,
    ) -> On<Self::Outputs, K> {
        if let Some(kernels) = norm_kernels::<K>(&input.0) {
            return (kernels.layer_norm_backward)(input, gradient, statistics);
        }
        let (terms, other) = gradient;
        let gradient = gradient_of_terms::<K>(terms.into_iter().map(OperatorInput::into_floats));
        let input = floats_of::<K>(input);
        let (of_x, rest) = floats::layer_norm_backward::<K>(input, gradient, statistics);
        (with_other::<K>(of_x, other), rest)
    }
}

/// `silu(gate) up` (Shazeer, 2020, equation 6, without the matrices).
#[derive(Debug, Clone)]
pub(crate) struct SwigluForward;

impl Operation for SwigluForward {
    const NAME: &'static str = "swiglu";
    /// gate and up.
    type Inputs = (Input, Input);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (gate, _): &On<Self::Inputs, T>) -> FloatMeta {
        gate.outline()
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> FloatTensor<K> {
        match kernels::<K>(&inputs.0) {
            Some(kernels) => (kernels.swiglu)(inputs),
            None => {
                let (gate, up) = inputs;
                floats::swiglu::<K>((gate.into_floats(), up.into_floats()))
            }
        }
    }
}

/// The same of floats, and the copies in which gate and up wait for the backward pass.
#[derive(Debug, Clone)]
pub(crate) struct SwigluCompressing {
    /// The specification of the copies.
    pub spec: QuantizeSpec,
    /// The rows and columns of the matrices that are copied.
    pub matrix: [usize; 2],
}

impl SwigluCompressing {
    /// That of tensors of this shape whose rows are those of the copies.
    pub fn of_rows(spec: QuantizeSpec, shape: &Shape) -> Self {
        let matrix = rows_and_columns(shape);
        Self { spec, matrix }
    }

    /// The outlines of the copies.
    pub fn copies(&self) -> (Quantized<Outline>, Quantized<Outline>) {
        let copy = || Quantized::outline(self.matrix, &self.spec);
        (copy(), copy())
    }

    /// True where a kernel writes the copies: rows are whole groups.
    fn has_whole_groups(&self) -> bool {
        let Granularity::Group(group) = self.spec.granularity else {
            return false;
        };
        self.matrix[1].is_multiple_of(group)
    }
}

impl Operation for SwigluCompressing {
    const NAME: &'static str = "swiglu_compressing";
    /// gate and up.
    type Inputs = (FloatMeta, FloatMeta);
    type Outputs = (FloatMeta, (Quantized<Outline>, Quantized<Outline>));

    fn outline<T: Tensors>(&self, (gate, _): &On<Self::Inputs, T>) -> Self::Outputs {
        (FloatMeta::of(gate), self.copies())
    }

    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        let shape = inputs.0.shape();
        let kernels = K::composition_kernels(&K::float_device(&inputs.0));
        let matrix = |tensor| K::float_reshape(tensor, Shape::new(self.matrix));
        match kernels.filter(|_| self.has_whole_groups()) {
            Some(kernels) => {
                let inputs = (matrix(inputs.0), matrix(inputs.1));
                let (output, copies) = (kernels.swiglu_compressing)(inputs, &self.spec);
                (K::float_reshape(output, shape), copies)
            }
            None => {
                let (gate, up) = inputs.clone();
                let copy = |tensor| K::quantize_matrix(matrix(tensor), &self.spec);
                let copies = (copy(gate), copy(up));
                let (gate, up) = inputs;
                let inputs = (OperatorInput::Floats(gate), OperatorInput::Floats(up));
                (SwigluForward.run::<K>(inputs), copies)
            }
        }
    }
}

/// Its gradients.
#[derive(Debug, Clone)]
pub(crate) struct SwigluGradients;

impl Operation for SwigluGradients {
    const NAME: &'static str = "swiglu_backward";
    /// gate and up, and the gradient of the output.
    type Inputs = ((Input, Input), Input);
    /// Those of gate and up.
    type Outputs = (FloatMeta, FloatMeta);

    fn outline<T: Tensors>(&self, ((gate, up), _): &On<Self::Inputs, T>) -> Self::Outputs {
        (gate.outline(), up.outline())
    }

    fn run<K: Kernels>(self, (inputs, gradient): On<Self::Inputs, K>) -> On<Self::Outputs, K> {
        match kernels::<K>(&inputs.0) {
            Some(kernels) => (kernels.swiglu_backward)(inputs, gradient),
            None => {
                let (gate, up) = inputs;
                let inputs = [gate, up, gradient].map(OperatorInput::into_floats);
                floats::swiglu_backward::<K>(inputs)
            }
        }
    }
}

/// GELU (Hendrycks & Gimpel, 2016, section 2).
#[derive(Debug, Clone)]
pub(crate) struct GeluForward;

impl Operation for GeluForward {
    const NAME: &'static str = "gelu";
    type Inputs = Input;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, x: &OperatorInput<T>) -> FloatMeta {
        x.outline()
    }

    fn run<K: Kernels>(self, x: OperatorInput<K>) -> FloatTensor<K> {
        match kernels::<K>(&x) {
            Some(kernels) => (kernels.gelu)(x),
            None => floats::gelu::<K>(x.into_floats()),
        }
    }
}

/// Its gradient.
#[derive(Debug, Clone)]
pub(crate) struct GeluGradient;

impl Operation for GeluGradient {
    const NAME: &'static str = "gelu_backward";
    /// x, and the gradient of the output.
    type Inputs = (Input, Input);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (x, _): &On<Self::Inputs, T>) -> FloatMeta {
        x.outline()
    }

    fn run<K: Kernels>(self, (x, gradient): On<Self::Inputs, K>) -> FloatTensor<K> {
        match kernels::<K>(&x) {
            Some(kernels) => (kernels.gelu_backward)(x, gradient),
            None => floats::gelu_backward::<K>((x.into_floats(), gradient.into_floats())),
        }
    }
}

/// Dropout (Srivastava et al., 2014), and its sum with a residual, if there is one. It is its own gradient.
#[derive(Debug, Clone)]
pub(crate) struct DropoutForward(pub Draw);

impl Operation for DropoutForward {
    const NAME: &'static str = "dropout";
    /// x, and the residual.
    type Inputs = (Input, Option<FloatMeta>);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (x, _): &On<Self::Inputs, T>) -> FloatMeta {
        x.outline()
    }

    fn run<K: Kernels>(self, (x, residual): On<Self::Inputs, K>) -> FloatTensor<K> {
        let Self(draw) = self;
        match kernels::<K>(&x) {
            Some(kernels) => (kernels.dropout)((x, residual), &draw),
            None => floats::dropout::<K>(x.into_floats(), residual, &draw),
        }
    }
}

/// The sum of x and of a residual.
#[derive(Debug, Clone)]
pub(crate) struct ResidualSum;

impl Operation for ResidualSum {
    const NAME: &'static str = "residual_sum";
    /// x, and the residual.
    type Inputs = (Input, FloatMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (x, _): &On<Self::Inputs, T>) -> FloatMeta {
        x.outline()
    }

    fn run<K: Kernels>(self, (x, residual): On<Self::Inputs, K>) -> FloatTensor<K> {
        match kernels::<K>(&x) {
            Some(kernels) => (kernels.residual_sum)(x, residual),
            None => K::float_add(x.into_floats(), residual),
        }
    }
}

/// The logarithm of the softmax of the last dimension, FP32.
#[derive(Debug, Clone)]
pub(crate) struct LogSoftmaxForward;

impl Operation for LogSoftmaxForward {
    const NAME: &'static str = "log_softmax";
    type Inputs = FloatMeta;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, x: &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new(x.shape(), DType::F32)
    }

    fn run<K: Kernels>(self, x: FloatTensor<K>) -> FloatTensor<K> {
        let kernels = K::composition_kernels(&K::float_device(&x));
        let kernels = kernels.expect("a logarithm of a softmax is asked for where it has a kernel");
        (kernels.log_softmax)(x)
    }
}

/// Its gradient, of this dtype.
#[derive(Debug, Clone)]
pub(crate) struct LogSoftmaxGradient {
    pub dtype: DType,
}

impl Operation for LogSoftmaxGradient {
    const NAME: &'static str = "log_softmax_backward";
    /// The output, and its gradient, both FP32.
    type Inputs = (FloatMeta, FloatMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (output, _): &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new(output.shape(), self.dtype)
    }

    fn run<K: Kernels>(self, inputs: (FloatTensor<K>, FloatTensor<K>)) -> FloatTensor<K> {
        let kernels = K::composition_kernels(&K::float_device(&inputs.0));
        let kernels = kernels.expect("a logarithm of a softmax is asked for where it has a kernel");
        (kernels.log_softmax_backward)(inputs, self.dtype)
    }
}

/// The sum or the mean of all elements, in FP32.
#[derive(Debug, Clone)]
pub(crate) struct SumOfElements(pub Reduction);

impl Operation for SumOfElements {
    const NAME: &'static str = "sum";
    type Inputs = FloatMeta;
    /// FP32 `[1]`.
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, _x: &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new([1], DType::F32)
    }

    fn run<K: Kernels>(self, x: FloatTensor<K>) -> FloatTensor<K> {
        let kernels = K::composition_kernels(&K::float_device(&x));
        let kernels = kernels.expect("a sum is asked for where it has a kernel");
        (kernels.sum)(x, self.0)
    }
}

/// Rotary positions (Su et al., 2021, equation 34) of x, or of the gradient of what they gave.
#[derive(Debug, Clone)]
pub(crate) struct RotaryPositions {
    pub pass: RotaryPass,
}

impl Operation for RotaryPositions {
    const NAME: &'static str = "rotary";
    /// x, or a gradient, `[.., positions, features]`; the matrix and the table of Burn's module.
    type Inputs = (FloatMeta, (FloatMeta, FloatMeta));
    /// In the shape and dtype of x.
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (x, _): &On<Self::Inputs, T>) -> FloatMeta {
        FloatMeta::new(x.shape(), x.dtype())
    }

    fn run<K: Kernels>(self, (x, tables): On<Self::Inputs, K>) -> FloatTensor<K> {
        let kernels = K::composition_kernels(&K::float_device(&x));
        let kernels = kernels.expect("rotary positions are asked for where they have a kernel");
        (kernels.rotary)(x, tables, self.pass)
    }
}

/// A tensor less its mean over evenly spaced positions of a dimension.
#[derive(Debug, Clone)]
pub(crate) struct Centred {
    pub dim: usize,
    /// From one of the positions to the next.
    pub step: usize,
    /// How the difference waits for the backward pass, where that copy is to be made too, and the rows and columns of
    /// the matrix that it is quantized as.
    pub copy: Option<(QuantizeSpec, [usize; 2])>,
}

impl Operation for Centred {
    const NAME: &'static str = "centred";
    type Inputs = FloatMeta;
    /// The difference, of the tensor's shape and dtype, and its copy.
    type Outputs = (FloatMeta, Option<Quantized<Outline>>);

    fn outline<T: Tensors>(&self, x: &T::Float) -> Self::Outputs {
        let copy = |(spec, matrix)| Quantized::outline(matrix, &spec);
        (FloatMeta::of(x), self.copy.map(copy))
    }

    fn run<K: Kernels>(self, x: FloatTensor<K>) -> On<Self::Outputs, K> {
        let Self { dim, step, copy } = self;
        let shape = x.shape();
        let dims = shape.as_slice();
        let kernels = K::composition_kernels(&K::float_device(&x));
        match kernels.filter(|_| matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)) {
            Some(kernels) => {
                let matrices = dims[..dim].iter().product();
                let columns = dims[dim + 1..].iter().product();
                let x = K::float_reshape(x, Shape::new([matrices, dims[dim], columns]));
                let copy = copy.as_ref().map(|(spec, [_, columns])| (spec, *columns));
                let (less, copy) = (kernels.centred)(x, step, copy);
                (K::float_reshape(less, shape), copy)
            }
            None => {
                let less = floats::centred::<K>(x, dim, step);
                let matrix = |matrix| K::float_reshape(less.clone(), Shape::new(matrix));
                let copy = copy.map(|(spec, shape)| K::quantize_matrix(matrix(shape), &spec));
                (less, copy)
            }
        }
    }
}

/// A tensor without padding between its rows, where rotary positions have a kernel.
#[derive(Debug, Clone)]
pub(crate) struct Dense;

impl Operation for Dense {
    const NAME: &'static str = "dense";
    type Inputs = FloatMeta;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, x: &T::Float) -> FloatMeta {
        FloatMeta::of(x)
    }

    fn run<K: Kernels>(self, x: FloatTensor<K>) -> FloatTensor<K> {
        let kernels = K::composition_kernels(&K::float_device(&x));
        let kernels = kernels.expect("a table is made dense where rotary positions have a kernel");
        (kernels.dense)(x)
    }
}

/// The gradient of an embedding's table `[rows, columns]` from that of the rows at these indices, `[.., columns]`, by a
/// kernel where there is one: Burn's adds one token after the other.
pub(crate) fn embedding_gradient<B: DataBackend>(
    table: FloatTensor<B>,
    gradient: FloatTensor<B>,
    indices: IntTensor<B>,
) -> FloatTensor<B> {
    match B::Kernels::composition_kernels(&B::float_device(&table)) {
        Some(_) => {
            let rows = table.shape()[0];
            B::run(EmbeddingGradient { rows }, (gradient, indices))
        }
        None => B::embedding_backward(table, gradient, indices),
    }
}

/// The gradient of an embedding's table.
#[derive(Debug, Clone)]
struct EmbeddingGradient {
    rows: usize,
}

impl Operation for EmbeddingGradient {
    const NAME: &'static str = "embedding_backward";
    /// The gradient of the rows that were gathered, `[.., columns]`, and their indices.
    type Inputs = (FloatMeta, IntMeta);
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, (gradient, _): &On<Self::Inputs, T>) -> FloatMeta {
        let [_, columns] = rows_and_columns(&gradient.shape());
        FloatMeta::new(Shape::new([self.rows, columns]), gradient.dtype())
    }

    fn run<K: Kernels>(
        self,
        (gradient, indices): (FloatTensor<K>, IntTensor<K>),
    ) -> FloatTensor<K> {
        let kernels = K::composition_kernels(&K::float_device(&gradient));
        let kernels = kernels.expect("an embedding's gradient is asked for where it has a kernel");
        (kernels.embedding_gradient)(gradient, indices, self.rows)
    }
}

fn kernels<K: Kernels>(x: &OperatorInput<K>) -> Option<Compositions<K>> {
    K::composition_kernels(&x.device())
}

/// The kernels, if they take rows like those of x.
fn norm_kernels<K: Kernels>(x: &OperatorInput<K>) -> Option<Compositions<K>> {
    let [_, columns] = rows_and_columns(&x.shape());
    kernels::<K>(x).filter(|kernels| (kernels.has_norms)(x.dtype(), columns))
}

/// x and the gain as floats.
fn floats_of<K: Kernels>((x, gain): NormInput<K>) -> Pair<K> {
    (x.into_floats(), gain)
}
