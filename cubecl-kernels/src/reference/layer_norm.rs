//! Layer normalization and its gradients in `f64`, from the equations of [`layer_norm`](mod@crate::layer_norm).

/// Normalized rows.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceLayerNorm {
    /// `y`, `[rows, cols]`.
    pub output: Vec<f64>,
    /// `m`, `[rows]`.
    pub mean: Vec<f64>,
    /// `s`, `[rows]`.
    pub inverse_deviation: Vec<f64>,
}

/// Normalizes the rows of `x`, `[rows, cols]`, for a gain of `cols` elements and a bias of as many, if there is one.
///
/// # Panics
///
/// When the gain is empty, or the bias shorter.
pub fn layer_norm(
    x: &[f64],
    gain: &[f64],
    bias: Option<&[f64]>,
    epsilon: f64,
) -> ReferenceLayerNorm {
    let cols = gain.len();
    let mut result = ReferenceLayerNorm {
        output: Vec::with_capacity(x.len()),
        mean: Vec::with_capacity(x.len() / cols),
        inverse_deviation: Vec::with_capacity(x.len() / cols),
    };
    for row in x.chunks(cols) {
        let mean = row.iter().sum::<f64>() / cols as f64;
        let squares = row.iter().map(|x| (x - mean) * (x - mean));
        let variance = squares.sum::<f64>() / cols as f64;
        let scale = 1.0 / (variance + epsilon).sqrt();
        for (j, x) in row.iter().enumerate() {
            let bias = bias.map_or(0.0, |bias| bias[j]);
            result.output.push((x - mean) * scale * gain[j] + bias);
        }
        result.mean.push(mean);
        result.inverse_deviation.push(scale);
    }
    result
}

/// Gradients of [`layer_norm`].
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceLayerNormGradients {
    /// `dx`, `[rows, cols]`.
    pub input: Vec<f64>,
    /// `dg`, `[cols]`.
    pub gain: Vec<f64>,
    /// `db`, `[cols]`.
    pub bias: Vec<f64>,
}

/// The gradients of `x`, of the gain and of the bias from that of the output, `[rows, cols]`.
///
/// # Panics
///
/// When the gain is empty.
pub fn layer_norm_backward(
    x: &[f64],
    gain: &[f64],
    epsilon: f64,
    gradient: &[f64],
) -> ReferenceLayerNormGradients {
    let cols = gain.len();
    let ReferenceLayerNorm {
        mean,
        inverse_deviation,
        ..
    } = layer_norm(x, gain, None, epsilon);
    let mut result = ReferenceLayerNormGradients {
        input: Vec::with_capacity(x.len()),
        gain: vec![0.0; cols],
        bias: vec![0.0; cols],
    };
    let statistics = mean.into_iter().zip(inverse_deviation);
    let rows = x.chunks(cols).zip(gradient.chunks(cols)).zip(statistics);
    for ((x, dy), (m, s)) in rows {
        let normal = |j: usize| (x[j] - m) * s;
        let mean_of = |term: &dyn Fn(usize) -> f64| (0..cols).map(term).sum::<f64>() / cols as f64;
        let mean_p = mean_of(&|j| gain[j] * dy[j]);
        let mean_pn = mean_of(&|j| gain[j] * dy[j] * normal(j));
        for j in 0..cols {
            let rest = gain[j] * dy[j] - mean_p - normal(j) * mean_pn;
            result.input.push(s * rest);
            result.gain[j] += dy[j] * normal(j);
            result.bias[j] += dy[j];
        }
    }
    result
}
