//! Outputs and gradients of a layer, compared with those of a float reference.

use anyhow::{Context, Result, ensure};
use burn::tensor::{Tensor, TensorData};

use super::{
    architecture::{Layer, Weight},
    contender::Contender,
    input::{Input, Inputs},
};
use crate::{difference::Difference, random::Random};

/// Elements of each tensor that are compared.
const SAMPLE: usize = 1024;

/// Output, gradient of the input, and gradients of weights of a layer. With a residual, without the input in the output
/// and without the gradient of the output in that of the input.
#[derive(Debug, Clone)]
pub struct Outputs {
    tensors: Vec<Vec<f32>>,
}

/// A sample of the elements of [`Outputs`]: index and value.
#[derive(Debug, Clone)]
pub struct Reference {
    tensors: Vec<Vec<(usize, f64)>>,
}

impl Outputs {
    /// One forward and backward pass.
    ///
    /// # Errors
    ///
    /// A gradient is missing.
    pub fn of<B: Contender, M: Layer<B>>(
        model: &M,
        inputs: &Inputs<B>,
        input: &Input,
    ) -> Result<Self> {
        let x = inputs.x();
        let y = model.forward(x.clone());
        let gradients = inputs.backward(y.clone());
        let dx = x.grad(&gradients).context("no gradient of the input")?;
        let without = |values: Result<Vec<f32>>, residual: &[f32]| {
            let mut values = values?;
            if M::RESIDUAL {
                for (value, residual) in values.iter_mut().zip(residual) {
                    *value -= residual;
                }
            }
            anyhow::Ok(values)
        };
        let mut tensors = vec![
            without(floats(y.into_data()), &input.x)?,
            without(floats(dx.into_data()), &input.gradient)?,
        ];
        for weight in model.weights() {
            let gradient: Tensor<B::InnerBackend, 2> =
                weight.grad(&gradients).context("no gradient of a weight")?;
            tensors.push(floats(gradient.into_data())?);
        }
        Ok(Self { tensors })
    }

    /// A sample of them as a reference for others.
    pub fn reference(&self, random: &mut Random) -> Reference {
        let tensors = self.tensors.iter().map(|tensor| {
            (0..SAMPLE)
                .map(|_| {
                    let index = random.below(tensor.len());
                    (index, f64::from(tensor[index]))
                })
                .collect()
        });
        Reference {
            tensors: tensors.collect(),
        }
    }

    /// The largest relative error of a tensor, root mean square over root mean square.
    ///
    /// # Errors
    ///
    /// It is above `limit`, or not a number.
    pub fn error(&self, reference: &Reference, limit: f64) -> Result<f64> {
        ensure!(
            self.tensors.len() == reference.tensors.len(),
            "the reference is of another layer"
        );
        let errors = self.tensors.iter().zip(&reference.tensors);
        let errors = errors.map(|(actual, expected)| {
            let mut difference = Difference::default();
            for &(index, expected) in expected {
                difference.add(&[actual[index]], &[expected]);
            }
            difference.relative()
        });
        let errors: Vec<f64> = errors.collect();
        ensure!(
            errors.iter().all(|error| *error <= limit),
            "relative errors of Y, dX and dW are {errors:.4?}, above {limit}"
        );
        Ok(errors.into_iter().fold(0.0, f64::max))
    }
}

impl Reference {
    /// Of a linear layer: sums of products in f64.
    pub fn of_linear(random: &mut Random, weight: &Weight, input: &Input) -> Self {
        let ([batch, sequence], [inputs, outputs]) = (input.rows, input.features);
        let tokens = batch * sequence;
        let (x, w, g) = (&input.x, weight.values(), &input.gradient);
        let mut sample = |rows: usize, cols: usize, element: &dyn Fn(usize, usize) -> f64| {
            (0..SAMPLE)
                .map(|_| {
                    let (row, col) = (random.below(rows), random.below(cols));
                    (row * cols + col, element(row, col))
                })
                .collect()
        };
        let dot = |depth: usize, pair: &dyn Fn(usize) -> (f32, f32)| -> f64 {
            let terms = (0..depth).map(pair);
            terms.map(|(a, b)| f64::from(a) * f64::from(b)).sum()
        };
        let y = sample(tokens, outputs, &|token, output| {
            dot(inputs, &|i| {
                (x[token * inputs + i], w[i * outputs + output])
            })
        });
        let dx = sample(tokens, inputs, &|token, input| {
            dot(outputs, &|o| {
                (g[token * outputs + o], w[input * outputs + o])
            })
        });
        let dw = sample(inputs, outputs, &|input, output| {
            dot(tokens, &|t| {
                (x[t * inputs + input], g[t * outputs + output])
            })
        });
        Self {
            tensors: vec![y, dx, dw],
        }
    }
}

fn floats(data: TensorData) -> Result<Vec<f32>> {
    let floats = data.convert::<f32>().into_vec::<f32>();
    floats.ok().context("a tensor without floats")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(values: &[f32]) -> Outputs {
        Outputs {
            tensors: vec![values.to_vec()],
        }
    }

    #[test]
    fn errors_are_relative() {
        let mut random = Random::new(1);
        let values: Vec<f32> = (0..100).map(|_| random.normal()).collect();
        let reference = outputs(&values).reference(&mut random);
        assert_eq!(outputs(&values).error(&reference, 0.1).unwrap(), 0.0);
        let larger: Vec<f32> = values.iter().map(|value| 1.5 * value).collect();
        let error = outputs(&larger).error(&reference, 0.6).unwrap();
        assert!((error - 0.5).abs() < 1e-6);
        assert!(outputs(&larger).error(&reference, 0.4).is_err());
        assert!(outputs(&[f32::NAN; 100]).error(&reference, 0.4).is_err());
    }
}
