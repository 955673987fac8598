//! The same operators of Burn, in BF16 under autodiff.

use std::{cell::RefCell, time::Duration};

use anyhow::{Context, Result};
use burn::{
    backend::{Autodiff, Cuda, cuda::CudaDevice},
    module::Param,
    nn::{LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig},
    tensor::{
        DType, Distribution, Int, Tensor, TensorData,
        activation::{gelu, silu},
        backend::Backend,
    },
};

use super::{
    EPSILON,
    reference::{Expected, Parameters, compare},
    turns::{TURNS, Turns},
};
use crate::{
    gpu::Gpu,
    results::{Operator, Spread},
    step::contender::Contender,
    timing::Sampling,
};

type Train = Autodiff<Cuda>;

/// Rows that are compared.
const COMPARED: usize = 64;
/// The difference of operations that round to BF16 one after the other, root mean square over root mean square.
const LIMIT: f64 = 5e-2;

/// As for layers, but of fewer passes: those that wait for a sample to end hold gigabytes.
const SAMPLING: Sampling = Sampling {
    sample: Duration::from_millis(20),
    ..Sampling::LAYERS
};

/// An operator as a model has it.
enum Module {
    RmsNorm(Box<RmsNorm<Train>>),
    LayerNorm(Box<LayerNorm<Train>>),
    Gelu,
    Swiglu,
}

/// Inputs and the gradient of the output.
struct Operands {
    inputs: Vec<Tensor<Cuda, 2>>,
    gradient: Tensor<Cuda, 2>,
}

/// A forward pass, as its backward pass finds it.
struct Pass<'a> {
    operands: &'a Operands,
    inputs: Vec<Tensor<Train, 2>>,
    output: Tensor<Train, 2>,
    /// An element of the output. Slices are not fused: without one Burn would make a kernel of this pass and the next,
    /// which no model lets it.
    _end: Tensor<Cuda, 2>,
}

impl Module {
    fn new(operator: Operator, parameters: &Parameters, device: &CudaDevice) -> Self {
        let parameter = |values: &Vec<f32>| {
            let data = TensorData::new(values.clone(), [values.len()]);
            Param::from_tensor(Tensor::<Train, 1>::from_data(data, device).cast(DType::BF16))
        };
        let columns = parameters.gain.len();
        let epsilon = f64::from(EPSILON);
        match operator {
            Operator::RmsNorm => {
                let norm = RmsNormConfig::new(columns).with_epsilon(epsilon);
                Self::RmsNorm(Box::new(RmsNorm {
                    gamma: parameter(&parameters.gain),
                    ..norm.init(device)
                }))
            }
            Operator::LayerNorm => {
                let norm = LayerNormConfig::new(columns).with_epsilon(epsilon);
                let mut norm = norm.init(device);
                norm.gamma = parameter(&parameters.gain);
                norm.beta = Some(parameter(&parameters.bias));
                Self::LayerNorm(Box::new(norm))
            }
            Operator::Gelu => Self::Gelu,
            Operator::Swiglu => Self::Swiglu,
        }
    }

    fn forward<'a>(&self, operands: &'a Operands) -> Pass<'a> {
        let new = |x: &Tensor<Cuda, 2>| Tensor::<Train, 2>::from_inner(x.clone()).require_grad();
        let inputs: Vec<_> = operands.inputs.iter().map(new).collect();
        let x = inputs[0].clone();
        let output = match self {
            Self::RmsNorm(norm) => norm.forward(x),
            Self::LayerNorm(norm) => norm.forward(x),
            Self::Gelu => gelu(x),
            Self::Swiglu => silu(x) * inputs[1].clone(),
        };
        let end = output.clone().inner().slice([0..1, 0..1]);
        Pass {
            operands,
            inputs,
            output,
            _end: end,
        }
    }

    /// The gradients of the inputs. Those of parameters are taken too, one after the other, as an optimizer does.
    fn backward(&self, pass: Pass) -> Result<Vec<Tensor<Cuda, 2>>> {
        let gradient = pass.operands.gradient.clone().into_primitive().tensor();
        let mut gradients = Train::backward_from(pass.output.into_primitive().tensor(), gradient);
        let of_inputs = pass.inputs.iter().map(|x| {
            let gradient = x.grad_remove(&mut gradients);
            gradient.context("no gradient of an input")
        });
        let of_inputs = of_inputs.collect::<Result<_>>()?;
        let parameters = match self {
            Self::RmsNorm(norm) => vec![&norm.gamma],
            Self::LayerNorm(norm) => [&norm.gamma].into_iter().chain(&norm.beta).collect(),
            Self::Gelu | Self::Swiglu => Vec::new(),
        };
        for parameter in parameters {
            let gradient = parameter.val().grad_remove(&mut gradients);
            gradient.context("no gradient of a parameter")?;
        }
        Ok(of_inputs)
    }
}

/// The times of both passes on matrices of this shape, compared in some of `rows` first.
///
/// # Errors
///
/// The device failed, or a result differs from the reference.
pub fn measure(
    gpu: &Gpu,
    operator: Operator,
    shape: [usize; 2],
    parameters: &Parameters,
    rows: &[usize],
) -> Result<[Spread; 2]> {
    let device = CudaDevice::default();
    <Cuda>::seed(&device, gpu.seed);
    let module = Module::new(operator, parameters, &device);
    let normal = || {
        let distribution = Distribution::Normal(0.0, 1.0);
        Tensor::<Cuda, 2>::random(shape, distribution, &device).cast(DType::BF16)
    };
    let operands = || Operands {
        inputs: (0..operator.inputs()).map(|_| normal()).collect(),
        gradient: normal(),
    };
    let turns = Turns::new((0..TURNS).map(|_| operands()).collect());
    let sync = || <Cuda>::sync(&device).context("the GPU failed");
    sync()?;
    gpu.client.memory_cleanup();
    check(&module, operator, turns.take(), parameters, rows)?;

    let forward = || module.forward(turns.take());
    // An element of each gradient is asked for: what nobody reads Burn would not write.
    let backward = |pass| {
        let gradients = module.backward(pass)?;
        for gradient in gradients {
            drop(gradient.slice([0..1, 0..1]));
        }
        Ok(())
    };
    let waiting = RefCell::new(Vec::new());
    let keep = || {
        waiting.borrow_mut().push(forward());
        Ok(())
    };
    let clear = || waiting.take().into_iter().try_for_each(backward);
    let times = [
        SAMPLING.time_and_clear(keep, sync, clear)?,
        SAMPLING.time_prepared(forward, backward, sync)?,
    ];
    drop(turns);
    gpu.client.memory_cleanup();
    Ok(times)
}

/// Compares output and gradients of inputs.
fn check(
    module: &Module,
    operator: Operator,
    operands: &Operands,
    parameters: &Parameters,
    rows: &[usize],
) -> Result<()> {
    let compared = rows.iter().step_by(rows.len().div_ceil(COMPARED));
    let rows: Vec<i32> = compared.map(|&row| row as i32).collect();
    let of_rows = |x: Tensor<Cuda, 2>| -> Result<Vec<f32>> {
        let rows = TensorData::new(rows.clone(), [rows.len()]);
        let rows = Tensor::<Cuda, 1, Int>::from_data(rows, &x.device());
        let data = x.select(0, rows).cast(DType::F32).into_data();
        let values = data.to_vec();
        values.map_err(|error| anyhow::anyhow!("cannot read a tensor back: {error:?}"))
    };
    let pass = module.forward(operands);
    let output = of_rows(pass.output.clone().inner())?;
    let of_inputs = module.backward(pass)?;
    let inputs = operands.inputs.iter().cloned().map(of_rows);
    let inputs: Vec<Vec<f32>> = inputs.collect::<Result<_>>()?;
    let gradient = of_rows(operands.gradient.clone())?;
    let expected = Expected::of(operator, &inputs, &gradient, parameters);
    compare("the output", &output, &expected.output, LIMIT)?;
    for (actual, expected) in of_inputs.into_iter().zip(&expected.of_inputs) {
        let actual = of_rows(actual)?;
        compare("the gradient of an input", &actual, expected, LIMIT)?;
    }
    Ok(())
}
