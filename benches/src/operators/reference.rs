//! Operators in FP64.

use anyhow::{Result, ensure};
use cubecl_kernels::reference::{gelu, layer_norm, rms_norm, swiglu};
use half::bf16;

use super::EPSILON;
use crate::{difference::Difference, random::Random, results::Operator};

/// Rows that are compared of an operator whose rows are alike.
const SAMPLED_ROWS: usize = 64;

/// Gain and bias of a norm: numbers of BF16.
pub struct Parameters {
    /// The gain.
    pub gain: Vec<f32>,
    /// The bias, which layer normalization alone has.
    pub bias: Vec<f32>,
}

impl Parameters {
    /// Random numbers, of which none hides that another one was taken.
    pub fn random(random: &mut Random, columns: usize) -> Self {
        let mut numbers = |mean| {
            let normals = random.normals(columns, 0.5).into_iter();
            let rounded = normals.map(|it| bf16::from_f32(mean + it).to_f32());
            rounded.collect()
        };
        Self {
            gain: numbers(1.0),
            bias: numbers(0.0),
        }
    }
}

/// The rows that are compared: all of a norm, whose parameters have gradients of all rows.
pub fn sampled_rows(random: &mut Random, operator: Operator, tokens: usize) -> Vec<usize> {
    match operator {
        Operator::RmsNorm | Operator::LayerNorm => (0..tokens).collect(),
        Operator::Gelu | Operator::Swiglu => {
            random.stratified(tokens.div_ceil(SAMPLED_ROWS), tokens)
        }
    }
}

/// What both passes should give.
pub struct Expected {
    /// The output.
    pub output: Vec<f64>,
    /// The gradients of the inputs.
    pub of_inputs: Vec<Vec<f64>>,
    /// Those of gain and bias, of these rows.
    pub of_parameters: Vec<Vec<f64>>,
}

impl Expected {
    /// From rows of the inputs and of the gradient of the output.
    pub fn of(
        operator: Operator,
        inputs: &[Vec<f32>],
        gradient: &[f32],
        parameters: &Parameters,
    ) -> Self {
        let [x, dy] = [&inputs[0], gradient].map(doubles);
        let epsilon = f64::from(EPSILON);
        let [gain, bias] = [&parameters.gain[..], &parameters.bias].map(doubles);
        match operator {
            Operator::RmsNorm => {
                let of = rms_norm::rms_norm_backward(&x, &gain, epsilon, &dy);
                Self {
                    output: rms_norm::rms_norm(&x, &gain, epsilon).output,
                    of_inputs: vec![of.input],
                    of_parameters: vec![of.gain],
                }
            }
            Operator::LayerNorm => {
                let of = layer_norm::layer_norm_backward(&x, &gain, epsilon, &dy);
                Self {
                    output: layer_norm::layer_norm(&x, &gain, Some(&bias), epsilon).output,
                    of_inputs: vec![of.input],
                    of_parameters: vec![of.gain, of.bias],
                }
            }
            Operator::Gelu => {
                let pairs = x.iter().zip(&dy);
                let of_x = pairs.map(|(&x, &dy)| gelu::gelu_backward(x, dy));
                Self {
                    output: x.iter().map(|&x| gelu::gelu(x)).collect(),
                    of_inputs: vec![of_x.collect()],
                    of_parameters: Vec::new(),
                }
            }
            Operator::Swiglu => {
                let up = doubles(&inputs[1]);
                let factors = || x.iter().copied().zip(up.iter().copied());
                let gradients = factors().zip(&dy);
                let gradients =
                    gradients.map(|((gate, up), &dy)| swiglu::swiglu_backward(gate, up, dy));
                let (of_gate, of_up) = gradients.map(|[gate, up]| (gate, up)).unzip();
                Self {
                    output: factors()
                        .map(|(gate, up)| swiglu::swiglu(gate, up))
                        .collect(),
                    of_inputs: vec![of_gate, of_up],
                    of_parameters: Vec::new(),
                }
            }
        }
    }
}

/// Accepts values that differ by at most `limit` from what is expected, root mean square over root mean square.
///
/// # Errors
///
/// They differ by more, or are not as many.
pub fn compare(what: &str, actual: &[f32], expected: &[f64], limit: f64) -> Result<()> {
    ensure!(
        actual.len() == expected.len(),
        "{what} has {} elements instead of {}",
        actual.len(),
        expected.len()
    );
    let mut difference = Difference::default();
    difference.add(actual, expected);
    difference.check(what, limit)
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative() {
        let expected = [3.0, -4.0];
        assert!(compare("it", &[3.0, -4.04], &expected, 1e-2).is_ok());
        assert!(compare("it", &[3.0, -4.06], &expected, 1e-2).is_err());
        assert!(compare("it", &[3.0, f32::NAN], &expected, 1e-2).is_err());
        assert!(compare("it", &[3.0], &expected, 1.0).is_err());
    }

    #[test]
    fn every_operator_has_its_gradients() {
        let mut random = Random::new(1);
        let parameters = Parameters::random(&mut random, 4);
        let mut values = || random.normals(8, 1.0);
        let (inputs, gradient) = ([values(), values()], values());
        for (operator, of_parameters) in [
            (Operator::RmsNorm, 1),
            (Operator::LayerNorm, 2),
            (Operator::Gelu, 0),
            (Operator::Swiglu, 0),
        ] {
            let expected = Expected::of(operator, &inputs, &gradient, &parameters);
            assert_eq!(expected.output.len(), 8);
            assert_eq!(expected.of_inputs.len(), operator.inputs());
            assert_eq!(expected.of_parameters.len(), of_parameters);
        }
    }
}
