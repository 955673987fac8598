//! RMSNorm and its gradients in `f64`, from the equations of [`rms_norm`](mod@crate::rms_norm).

/// Normalized rows.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceRmsNorm {
    /// `y`, `[rows, cols]`.
    pub output: Vec<f64>,
    /// `r`, `[rows]`.
    pub inverse_rms: Vec<f64>,
}

/// Normalizes the rows of `x`, `[rows, cols]`, for a gain of `cols` elements.
///
/// # Panics
///
/// When the gain is empty.
pub fn rms_norm(x: &[f64], gain: &[f64], epsilon: f64) -> ReferenceRmsNorm {
    let cols = gain.len();
    let mut result = ReferenceRmsNorm {
        output: Vec::with_capacity(x.len()),
        inverse_rms: Vec::with_capacity(x.len() / cols),
    };
    for row in x.chunks(cols) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / cols as f64;
        let root = 1.0 / (mean + epsilon).sqrt();
        let output = row.iter().zip(gain).map(|(x, g)| x * root * g);
        result.output.extend(output);
        result.inverse_rms.push(root);
    }
    result
}

/// Gradients of [`rms_norm`].
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceRmsNormGradients {
    /// `dx`, `[rows, cols]`.
    pub input: Vec<f64>,
    /// `dg`, `[cols]`.
    pub gain: Vec<f64>,
}

/// The gradients of `x` and of the gain from that of the output, `[rows, cols]`.
///
/// # Panics
///
/// As [`rms_norm`].
pub fn rms_norm_backward(
    x: &[f64],
    gain: &[f64],
    epsilon: f64,
    gradient: &[f64],
) -> ReferenceRmsNormGradients {
    let cols = gain.len();
    let roots = rms_norm(x, gain, epsilon).inverse_rms;
    let mut result = ReferenceRmsNormGradients {
        input: Vec::with_capacity(x.len()),
        gain: vec![0.0; cols],
    };
    let rows = x.chunks(cols).zip(gradient.chunks(cols)).zip(roots);
    for ((x, dy), r) in rows {
        let product: f64 = (0..cols).map(|j| gain[j] * dy[j] * x[j] * r).sum();
        let mean = product / cols as f64;
        for j in 0..cols {
            result.input.push(r * (gain[j] * dy[j] - x[j] * r * mean));
            result.gain[j] += dy[j] * x[j] * r;
        }
    }
    result
}
