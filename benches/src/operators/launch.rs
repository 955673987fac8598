//! The launches between the linear layers around an operator.

use cubecl::{cuda::CudaRuntime, prelude::*};
use cubecl_kernels::{
    KernelError,
    column_sum::column_sum,
    gelu::{gelu, gelu_backward, quantize_gelu, quantize_gelu_gradient},
    layer_norm::{layer_norm, layer_norm_backward},
    operator_input::OperatorInput,
    quantize::{QuantizeSpec, Quantized, dequantize, quantize},
    rms_norm::{inverse_rms, quantize_rms_norm, rms_norm, rms_norm_backward},
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

    /// In BF16: a kernel reads them like this.
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
        let quantized = quantize(self.client, floats, spec)?;
        Ok(Values::Numbers(Box::new(quantized)))
    }

    /// The output, as the linear layer behind the operator reads it.
    pub fn forward(&self, operands: &Operands) -> Result<Forward, KernelError> {
        let client = self.client;
        let x = operands.inputs[0].input();
        let (output, statistics) = match self.operator {
            Operator::RmsNorm if !self.alone && self.numbers.is_read_by_matrix() => {
                let roots = inverse_rms(client, x, EPSILON)?;
                let spec = &self.numbers.output;
                let output = quantize_rms_norm(client, x, &self.gain, &roots, spec)?;
                return Ok(Forward {
                    output: Values::Numbers(Box::new(output)),
                    statistics: Statistics::RmsNorm(roots),
                });
            }
            Operator::RmsNorm => {
                let norm = rms_norm(client, x, &self.gain, EPSILON)?;
                (norm.output, Statistics::RmsNorm(norm.inverse_rms))
            }
            Operator::LayerNorm => {
                let norm = layer_norm(client, x, &self.gain, Some(&self.bias), EPSILON)?;
                let statistics = [norm.mean, norm.inverse_deviation];
                (norm.output, Statistics::LayerNorm(statistics))
            }
            Operator::Gelu if !self.alone => {
                let output = quantize_gelu(client, x, &self.numbers.output)?;
                return Ok(Forward {
                    output: Values::Numbers(Box::new(output)),
                    statistics: Statistics::None,
                });
            }
            Operator::Gelu => (gelu(client, x)?, Statistics::None),
            Operator::Swiglu => {
                let up = operands.inputs[1].input();
                if !self.alone {
                    let output = quantize_swiglu(client, [x, up], &self.numbers.output)?;
                    return Ok(Forward {
                        output: Values::Numbers(Box::new(output)),
                        statistics: Statistics::None,
                    });
                }
                (swiglu(client, x, up)?, Statistics::None)
            }
        };
        let output = match self.alone {
            true => Values::Floats(output),
            false => self.quantized(&output, &self.numbers.output)?,
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
        let client = self.client;
        let x = operands.inputs[0].input();
        // Kernels read gradients as floats alone.
        let gradient = &operands.gradient.floats(client)?;
        let sum = |parts: &Tensor| column_sum(client, parts);
        let (of_inputs, of_parameters) = match statistics {
            Statistics::RmsNorm(inverse_rms) => {
                let of = rms_norm_backward(client, x, &self.gain, inverse_rms, gradient)?;
                (vec![of.input], vec![sum(&of.gain)?])
            }
            Statistics::LayerNorm([mean, inverse_deviation]) => {
                let gain = &self.gain;
                let of = layer_norm_backward(client, x, gain, mean, inverse_deviation, gradient)?;
                (vec![of.input], vec![sum(&of.gain)?, sum(&of.bias)?])
            }
            Statistics::None if self.operator == Operator::Gelu => {
                if !self.alone {
                    let spec = &self.numbers.input_gradients[0];
                    let of_x = quantize_gelu_gradient(client, x, gradient, spec)?;
                    return Ok(Backward {
                        of_inputs: vec![Values::Numbers(Box::new(of_x))],
                        of_parameters: Vec::new(),
                    });
                }
                (vec![gelu_backward(client, x, gradient)?], Vec::new())
            }
            Statistics::None => {
                let up = operands.inputs[1].input();
                if !self.alone {
                    let specs = self.numbers.input_gradients.each_ref();
                    let gradients = quantize_swiglu_gradients(client, [x, up], gradient, specs)?;
                    return Ok(Backward {
                        of_inputs: gradients.map(|it| Values::Numbers(Box::new(it))).into(),
                        of_parameters: Vec::new(),
                    });
                }
                (swiglu_backward(client, x, up, gradient)?.into(), Vec::new())
            }
        };
        let quantizes = !self.alone && self.operator.follows_linear_layer();
        let specs = self.numbers.input_gradients.iter();
        let values = of_inputs
            .into_iter()
            .zip(specs)
            .map(|(floats, spec)| match quantizes {
                true => self.quantized(&floats, spec),
                false => Ok(Values::Floats(floats)),
            });
        Ok(Backward {
            of_inputs: values.collect::<Result<_, _>>()?,
            of_parameters,
        })
    }
}
