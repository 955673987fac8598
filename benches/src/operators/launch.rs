//! The launches between the linear layers around an operator.

use std::slice;

use cubecl::{cuda::CudaRuntime, prelude::*};
use cubecl_kernels::{
    KernelError,
    column_sum::column_sum,
    gelu::{gelu, gelu_backward, quantize_gelu, quantize_gelu_gradient},
    layer_norm::{layer_norm, layer_norm_backward, quantize_layer_norm, row_deviations},
    operator_input::OperatorInput,
    output_gradient::{OutputGradient, Terms},
    quantize::{QuantizeSpec, Quantized, dequantize, quantize},
    rms_norm::{inverse_rms, quantize_rms_norm, quantizes_norms, rms_norm, rms_norm_backward},
    swiglu::{quantize_swiglu, quantize_swiglu_gradients, swiglu, swiglu_backward},
};
use half::bf16;

use super::{EPSILON, float_dtype, flow::Numbers, reference::Parameters};
use crate::{
    gpu::{Gpu, Tensor, normal_matrix},
    random::Random,
    results::Operator,
};

/// A matrix.
pub enum Values {
    /// In BF16.
    Floats(Tensor),
    /// Numbers with scales.
    Numbers(Box<Quantized<CudaRuntime>>),
}

impl Values {
    fn of(matrix: Quantized<CudaRuntime>) -> Self {
        Self::Numbers(Box::new(matrix))
    }

    /// Bytes of all copies and of their scales.
    pub fn bytes(&self) -> usize {
        let of = |tensor: &Tensor| tensor.shape().iter().product::<usize>() * tensor.dtype.size();
        match self {
            Self::Floats(tensor) => of(tensor),
            Self::Numbers(matrix) => {
                let copies = [&matrix.values, &matrix.transposed, &matrix.tensor_scale];
                of(&matrix.scales) + copies.into_iter().flatten().map(of).sum::<usize>()
            }
        }
    }

    fn input(&self) -> OperatorInput<'_, CudaRuntime> {
        match self {
            Self::Floats(tensor) => tensor.into(),
            Self::Numbers(matrix) => OperatorInput::Quantized(matrix, float_dtype()),
        }
    }

    fn output_gradient(&self) -> OutputGradient<'_, CudaRuntime> {
        let terms = match self {
            Self::Floats(tensor) => Terms::Floats(slice::from_ref(tensor)),
            Self::Numbers(matrix) => Terms::Numbers(slice::from_ref(matrix), float_dtype()),
        };
        OutputGradient { terms, other: None }
    }

    /// In BF16.
    pub fn floats(&self, client: &ComputeClient<CudaRuntime>) -> Result<Tensor, KernelError> {
        match self {
            Self::Floats(tensor) => Ok(tensor.clone()),
            Self::Numbers(matrix) => dequantize(client, matrix, float_dtype()),
        }
    }
}

/// What comes to an operator.
pub struct Operands {
    /// Its inputs, as they wait.
    pub inputs: Vec<Values>,
    /// The gradient of its output.
    pub gradient: Values,
}

/// What a forward pass gives.
pub struct Forward {
    /// The output.
    pub output: Values,
    /// What the backward pass reads beside the inputs.
    pub statistics: Statistics,
}

/// Numbers of rows.
pub enum Statistics {
    /// Of operators that need none.
    None,
    /// Inverse root mean squares.
    RmsNorm(Tensor),
    /// Means and inverse deviations.
    LayerNorm([Tensor; 2]),
}

/// What a backward pass gives.
pub struct Backward {
    /// The gradients of the inputs.
    pub of_inputs: Vec<Values>,
    /// Those of gain and bias.
    pub of_parameters: Vec<Tensor>,
}

/// The launches of an operator.
pub struct Launches<'a> {
    client: &'a ComputeClient<CudaRuntime>,
    /// The operator.
    pub operator: Operator,
    numbers: &'a Numbers,
    /// Gain and bias on the host.
    pub parameters: &'a Parameters,
    gain: Tensor,
    bias: Tensor,
    /// True for the operator without what is quantized around it.
    alone: bool,
}

impl<'a> Launches<'a> {
    /// Those of an operator in these numbers. `alone`: its outputs, and the gradients that it reads and gives, are in
    /// BF16.
    pub fn new(
        gpu: &'a Gpu,
        operator: Operator,
        numbers: &'a Numbers,
        parameters: &'a Parameters,
        alone: bool,
    ) -> Self {
        Self {
            client: &gpu.client,
            operator,
            numbers,
            parameters,
            gain: gpu.upload(&parameters.gain),
            bias: gpu.upload(&parameters.bias),
            alone,
        }
    }

    /// Random ones, of normal numbers.
    pub fn operands(
        &self,
        gpu: &Gpu,
        random: &mut Random,
        shape: [usize; 2],
    ) -> Result<Operands, KernelError> {
        let mut normal = |spec: Option<&QuantizeSpec>| {
            let elements = shape.iter().product();
            let seed = random.below(1 << 24) as u32;
            let floats = normal_matrix::<bf16>(gpu, &shape, elements, &[0], seed);
            match spec {
                None => Ok(Values::Floats(floats)),
                Some(spec) => self.quantized(&floats, spec),
            }
        };
        let inputs = (0..self.operator.inputs()).map(|_| normal(Some(&self.numbers.input)));
        let inputs = inputs.collect::<Result<_, _>>()?;
        let of_gradient = self.numbers.output_gradient.as_ref();
        Ok(Operands {
            inputs,
            gradient: normal(of_gradient.filter(|_| !self.alone))?,
        })
    }

    fn quantized(&self, floats: &Tensor, spec: &QuantizeSpec) -> Result<Values, KernelError> {
        Ok(Values::of(quantize(self.client, floats, spec)?))
    }

    /// True where a norm is quantized as it is computed, as the decorator does it then.
    fn quantizes_norms(&self) -> bool {
        !self.alone && quantizes_norms(self.client, self.numbers.output.granularity)
    }

    /// The output, as the linear layer behind the operator reads it.
    pub fn forward(&self, operands: &Operands) -> Result<Forward, KernelError> {
        let (client, gain, spec) = (self.client, &self.gain, &self.numbers.output);
        let x = operands.inputs[0].input();
        let as_it_is_read = |output: Tensor| match self.alone {
            true => Ok(Values::Floats(output)),
            false => self.quantized(&output, spec),
        };
        let (output, statistics) = match self.operator {
            Operator::RmsNorm if self.quantizes_norms() => {
                let roots = inverse_rms(client, x, EPSILON)?;
                let output = quantize_rms_norm(client, x, gain, &roots, spec)?;
                (Values::of(output), Statistics::RmsNorm(roots))
            }
            Operator::LayerNorm if self.quantizes_norms() => {
                let rows = row_deviations(client, x, EPSILON)?;
                let (bias, of_rows) = (Some(&self.bias), rows.each_ref());
                let output = quantize_layer_norm(client, x, gain, bias, of_rows, spec)?;
                (Values::of(output), Statistics::LayerNorm(rows))
            }
            Operator::RmsNorm => {
                let norm = rms_norm(client, x, gain, EPSILON)?;
                let statistics = Statistics::RmsNorm(norm.inverse_rms);
                (as_it_is_read(norm.output)?, statistics)
            }
            Operator::LayerNorm => {
                let norm = layer_norm(client, x, gain, Some(&self.bias), EPSILON)?;
                let statistics = Statistics::LayerNorm([norm.mean, norm.inverse_deviation]);
                (as_it_is_read(norm.output)?, statistics)
            }
            Operator::Gelu => {
                let output = match self.alone {
                    true => Values::Floats(gelu(client, x)?),
                    false => Values::of(quantize_gelu(client, x, spec)?),
                };
                (output, Statistics::None)
            }
            Operator::Swiglu => {
                let up = operands.inputs[1].input();
                let output = match self.alone {
                    true => Values::Floats(swiglu(client, x, up)?),
                    false => Values::of(quantize_swiglu(client, [x, up], spec)?),
                };
                (output, Statistics::None)
            }
        };
        Ok(Forward { output, statistics })
    }

    /// The gradients, those of the inputs as the linear layers in front of the operator read them. `statistics`: as
    /// [`forward`](Self::forward) gave them.
    pub fn backward(
        &self,
        operands: &Operands,
        statistics: &Statistics,
    ) -> Result<Backward, KernelError> {
        let (client, specs) = (self.client, &self.numbers.input_gradients);
        let x = operands.inputs[0].input();
        let gradient = operands.gradient.input();
        let sum = |parts: &Tensor| column_sum(client, parts);
        let (of_inputs, of_parameters) = match statistics {
            // A norm reads the residual stream, whose gradient is a sum of floats.
            Statistics::RmsNorm(inverse_rms) => {
                let gradient = operands.gradient.output_gradient();
                let of = rms_norm_backward(client, x, &self.gain, inverse_rms, gradient)?;
                (vec![Values::Floats(of.input)], vec![sum(&of.gain)?])
            }
            Statistics::LayerNorm([mean, inverse_deviation]) => {
                let (gain, gradient) = (&self.gain, operands.gradient.output_gradient());
                let of = layer_norm_backward(client, x, gain, mean, inverse_deviation, gradient)?;
                let of_parameters = vec![sum(&of.gain)?, sum(&of.bias)?];
                (vec![Values::Floats(of.input)], of_parameters)
            }
            Statistics::None if self.operator == Operator::Gelu => {
                let of_x = match self.alone {
                    true => Values::Floats(gelu_backward(client, x, gradient)?),
                    false => Values::of(quantize_gelu_gradient(client, x, gradient, &specs[0])?),
                };
                (vec![of_x], Vec::new())
            }
            Statistics::None => {
                let up = operands.inputs[1].input();
                let of_factors = match self.alone {
                    true => swiglu_backward(client, x, up, gradient)?.map(Values::Floats),
                    false => {
                        let specs = specs.each_ref();
                        quantize_swiglu_gradients(client, [x, up], gradient, specs)?.map(Values::of)
                    }
                };
                (of_factors.into(), Vec::new())
            }
        };
        Ok(Backward {
            of_inputs,
            of_parameters,
        })
    }
}
