//! Inputs and output gradients, on the host and on a backend.

use burn::tensor::{DType, Tensor, TensorData, backend::AutodiffBackend, bf16};

use super::contender::Contender;
use crate::random::Random;

/// Rows and columns of a block of an input that has an outlier or not.
const BLOCK: usize = 128;
/// The share of blocks with an outlier.
const OUTLIERS: f64 = 0.2;
/// An outlier, in deviations of all other elements.
const OUTLIER: f32 = 30.0;

/// An input of a layer and the gradient of its output, all values numbers of BF16.
#[derive(Debug, Clone)]
pub struct Input {
    /// Batch and sequence.
    pub rows: [usize; 2],
    /// Features of the input and of the output.
    pub features: [usize; 2],
    /// The input, `[batch, sequence, inputs]`: normal numbers, with an outlier in one of five blocks.
    pub x: Vec<f32>,
    /// The gradient of the output, `[batch, sequence, outputs]`.
    pub gradient: Vec<f32>,
}

/// An [`Input`] on a backend, outside autodiff.
pub struct Inputs<B: AutodiffBackend> {
    x: Tensor<B::InnerBackend, 3>,
    gradient: Tensor<B::InnerBackend, 3>,
}

impl Input {
    /// Random numbers.
    pub fn random(random: &mut Random, rows: [usize; 2], features: [usize; 2]) -> Self {
        let tokens = rows[0] * rows[1];
        let [inputs, outputs] = features;
        let mut x = random.normals(tokens * inputs, 1.0);
        let across = inputs.div_ceil(BLOCK);
        let blocks = tokens.div_ceil(BLOCK) * across;
        let outliers = (OUTLIERS * blocks as f64).round() as usize;
        for index in random.subset(outliers, blocks) {
            x[index / across * BLOCK * inputs + index % across * BLOCK] = OUTLIER;
        }
        let rounded = |mut values: Vec<f32>| {
            for value in &mut values {
                *value = bf16::from_f32(*value).to_f32();
            }
            values
        };
        Self {
            rows,
            features,
            x: rounded(x),
            gradient: rounded(random.normals(tokens * outputs, 1.0)),
        }
    }

    /// On a backend, in this dtype.
    pub fn on<B: AutodiffBackend>(&self, dtype: DType, device: &B::Device) -> Inputs<B> {
        let [batch, sequence] = self.rows;
        let upload = |values: &Vec<f32>, features| {
            let data = TensorData::new(values.clone(), [batch, sequence, features]);
            Tensor::<B::InnerBackend, 3>::from_data(data, device).cast(dtype)
        };
        Inputs {
            x: upload(&self.x, self.features[0]),
            gradient: upload(&self.gradient, self.features[1]),
        }
    }
}

impl<B: Contender> Inputs<B> {
    /// The input as a tensor that nothing has seen yet and whose gradient is asked for.
    pub fn x(&self) -> Tensor<B, 3> {
        Tensor::from_inner(self.x.clone()).require_grad()
    }

    /// The gradients of all that `y` was computed from, from the gradient of the output.
    pub fn backward(&self, y: Tensor<B, 3>) -> B::Gradients {
        let (y, gradient) = (y.into_primitive(), self.gradient.clone().into_primitive());
        B::backward_from(y.tensor(), gradient.tensor())
    }
}
