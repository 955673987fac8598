//! Compositions from float operations in FP32, for backends without kernels for them.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use burn_backend::{
    Backend, FloatDType, Scalar, Shape, Slice, TensorData, TensorMetadata, tensor::FloatTensor,
};
use cubecl_kernels::dropout::Draw;

use super::{Pair, WithPair, operations::rows_and_columns};
use crate::data::cast_to;

/// FP32 `[rows, columns]`.
fn wide<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = rows_and_columns(&tensor.shape());
    cast_to::<B>(
        B::float_reshape(tensor, Shape::new(shape)),
        Some(FloatDType::F32),
    )
}

/// FP32 `[1, columns]`.
fn wide_row<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let columns = tensor.shape().num_elements();
    wide::<B>(B::float_reshape(tensor, Shape::new([1, columns])))
}

/// In the shape and dtype of a tensor.
fn like<B: Backend>(value: FloatTensor<B>, shape: Shape, dtype: FloatDType) -> FloatTensor<B> {
    B::float_reshape(cast_to::<B>(value, Some(dtype)), shape)
}

/// `1 / sqrt(square + epsilon)`. By division: what some backends have as a reciprocal is an approximation.
fn inverse_root<B: Backend>(square: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    let one = B::float_ones(square.shape(), &B::float_device(&square), FloatDType::F32);
    let root = B::float_sqrt(B::float_add_scalar(square, Scalar::from(epsilon)));
    B::float_div(one, root)
}

/// The mean of each row of a product.
fn mean_of_product<B: Backend>(left: FloatTensor<B>, right: FloatTensor<B>) -> FloatTensor<B> {
    B::float_mean_dim(B::float_mul(left, right), 1)
}

/// A tensor less its mean over each `step`th position of a dimension.
pub(super) fn centred<B: Backend>(x: FloatTensor<B>, dim: usize, step: usize) -> FloatTensor<B> {
    let mut sampled = vec![Slice::full(); x.shape().num_dims()];
    sampled[dim] = Slice::new(0, None, step as isize);
    let sample = B::float_slice(x.clone(), &sampled);
    let mean = B::float_mean_dim(sample, dim);
    B::float_sub(x, mean)
}

/// See [`Compositions::rms_norm`](super::Compositions::rms_norm), without a copy.
pub(super) fn rms_norm<B: Backend>((x, gain): Pair<B>, epsilon: f32) -> Pair<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let inverse_rms = inverse_rms::<B>(x.clone(), epsilon);
    let normal = B::float_mul(wide::<B>(x), inverse_rms.clone());
    let output = B::float_mul(normal, wide_row::<B>(gain));
    (like::<B>(output, shape, dtype), inverse_rms)
}

/// What [`rms_norm`] gives beside its output.
pub(super) fn inverse_rms<B: Backend>(x: FloatTensor<B>, epsilon: f32) -> FloatTensor<B> {
    let x = wide::<B>(x);
    let square = mean_of_product::<B>(x.clone(), x);
    inverse_root::<B>(square, epsilon.into())
}

/// The output of [`rms_norm`] of the matrix x, from what that gave of the rows.
pub(crate) fn normalized<B: Backend>(
    x: FloatTensor<B>,
    gain: FloatTensor<B>,
    inverse_rms: FloatTensor<B>,
) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let normal = B::float_mul(wide::<B>(x), inverse_rms);
    like::<B>(B::float_mul(normal, wide_row::<B>(gain)), shape, dtype)
}

/// The gradients of x, and of the gain, f32 `[1, columns]`: of x and the gain; of the inverse root mean squares and the
/// gradient of the output.
pub(super) fn rms_norm_backward<B: Backend>(
    (x, gain): Pair<B>,
    (inverse_rms, gradient): Pair<B>,
) -> Pair<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let normal = B::float_mul(wide::<B>(x), inverse_rms.clone());
    let gradient = wide::<B>(gradient);
    let of_gain = B::float_sum_dim(B::float_mul(gradient.clone(), normal.clone()), 0);
    let of_normal = B::float_mul(gradient, wide_row::<B>(gain));
    let share = mean_of_product::<B>(of_normal.clone(), normal.clone());
    let of_x = B::float_sub(of_normal, B::float_mul(normal, share));
    let of_x = B::float_mul(of_x, inverse_rms);
    (like::<B>(of_x, shape, dtype), of_gain)
}

/// The output, in the dtype of x, and the rows' means and inverse standard deviations, f32 `[rows, 1]`.
pub(super) fn layer_norm<B: Backend>(
    ((x, gain), bias): (Pair<B>, Option<FloatTensor<B>>),
    epsilon: f32,
) -> WithPair<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let (centered, rows) = centred_rows::<B>(x, epsilon);
    let output = scaled_rows::<B>(centered, rows.1.clone(), gain, bias);
    (like::<B>(output, shape, dtype), rows)
}

/// The rows less their means, and what [`layer_norm`] gives beside its output.
pub(super) fn centred_rows<B: Backend>(
    x: FloatTensor<B>,
    epsilon: f32,
) -> (FloatTensor<B>, Pair<B>) {
    let x = wide::<B>(x);
    let mean = B::float_mean_dim(x.clone(), 1);
    let centered = B::float_sub(x, mean.clone());
    let variance = mean_of_product::<B>(centered.clone(), centered.clone());
    let inverse_deviation = inverse_root::<B>(variance, epsilon.into());
    (centered, (mean, inverse_deviation))
}

fn scaled_rows<B: Backend>(
    centered: FloatTensor<B>,
    inverse_deviation: FloatTensor<B>,
    gain: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let normal = B::float_mul(centered, inverse_deviation);
    let output = B::float_mul(normal, wide_row::<B>(gain));
    match bias {
        Some(bias) => B::float_add(output, wide_row::<B>(bias)),
        None => output,
    }
}

/// The output of [`layer_norm`] of the matrix x, from what that gave of the rows.
pub(crate) fn layer_normalized<B: Backend>(
    x: FloatTensor<B>,
    gain: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    (mean, inverse_deviation): Pair<B>,
) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let centered = B::float_sub(wide::<B>(x), mean);
    let output = scaled_rows::<B>(centered, inverse_deviation, gain, bias);
    like::<B>(output, shape, dtype)
}

/// The gradients of x, and of the gain and the bias, f32 `[1, columns]`: of x, the gain and the gradient of the output,
/// and of what [`layer_norm`] gave of the rows.
pub(super) fn layer_norm_backward<B: Backend>(
    (x, gain): Pair<B>,
    gradient: FloatTensor<B>,
    (mean, inverse_deviation): Pair<B>,
) -> WithPair<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let centered = B::float_sub(wide::<B>(x), mean);
    let normal = B::float_mul(centered, inverse_deviation.clone());
    let gradient = wide::<B>(gradient);
    let of_bias = B::float_sum_dim(gradient.clone(), 0);
    let of_gain = B::float_sum_dim(B::float_mul(gradient.clone(), normal.clone()), 0);
    let of_normal = B::float_mul(gradient, wide_row::<B>(gain));
    let share = mean_of_product::<B>(of_normal.clone(), normal.clone());
    let mean = B::float_mean_dim(of_normal.clone(), 1);
    let of_x = B::float_sub(of_normal, mean);
    let of_x = B::float_sub(of_x, B::float_mul(normal, share));
    let of_x = B::float_mul(of_x, inverse_deviation);
    (like::<B>(of_x, shape, dtype), (of_gain, of_bias))
}

/// `silu(gate) up`.
pub(super) fn swiglu<B: Backend>((gate, up): Pair<B>) -> FloatTensor<B> {
    let (shape, dtype) = (gate.shape(), gate.dtype().into());
    let (gate, up) = (wide::<B>(gate), wide::<B>(up));
    let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
    like::<B>(B::float_mul(silu, up), shape, dtype)
}

/// The gradients of gate and up: of both, and of the gradient of the output.
pub(super) fn swiglu_backward<B: Backend>([gate, up, gradient]: [FloatTensor<B>; 3]) -> Pair<B> {
    let (shape, dtype) = (gate.shape(), gate.dtype().into());
    let [gate, up, gradient] = [gate, up, gradient].map(wide::<B>);
    let sigmoid = B::sigmoid(gate.clone());
    let silu = B::float_mul(gate, sigmoid.clone());
    let of_up = B::float_mul(gradient.clone(), silu.clone());
    // The slope of silu is sigmoid + silu (1 - sigmoid).
    let rest = B::float_sub(silu.clone(), B::float_mul(silu, sigmoid.clone()));
    let slope = B::float_add(sigmoid, rest);
    let of_gate = B::float_mul(B::float_mul(gradient, up), slope);
    let [of_gate, of_up] = [of_gate, of_up].map(|it| like::<B>(it, shape.clone(), dtype));
    (of_gate, of_up)
}

/// See [`Compositions::dropout`](super::Compositions::dropout).
pub(super) fn dropout<B: Backend>(
    x: FloatTensor<B>,
    residual: Option<FloatTensor<B>>,
    draw: &Draw,
) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let [rows, columns] = rows_and_columns(&shape);
    let factors = TensorData::new(draw.factors(rows, columns), [rows, columns]);
    let factors = B::float_from_data(factors, &B::float_device(&x));
    let dropped = B::float_mul(wide::<B>(x), wide::<B>(factors));
    let output = match residual {
        Some(residual) => B::float_add(dropped, wide::<B>(residual)),
        None => dropped,
    };
    like::<B>(output, shape, dtype)
}

/// Φ(x), the distribution function of the standard normal distribution.
fn normal_distribution<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let scaled = B::float_mul_scalar(x, Scalar::from(FRAC_1_SQRT_2));
    let shifted = B::float_add_scalar(B::float_erf(scaled), Scalar::from(1.0));
    B::float_mul_scalar(shifted, Scalar::from(0.5))
}

/// `x Φ(x)`.
pub(super) fn gelu<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let x = wide::<B>(x);
    let output = B::float_mul(x.clone(), normal_distribution::<B>(x));
    like::<B>(output, shape, dtype)
}

/// The gradient of x: of x, and of the gradient of the output.
pub(super) fn gelu_backward<B: Backend>((x, gradient): Pair<B>) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype().into());
    let (x, gradient) = (wide::<B>(x), wide::<B>(gradient));
    // The slope is Φ(x) + x φ(x), φ being the density.
    let square = B::float_mul(x.clone(), x.clone());
    let power = B::float_exp(B::float_mul_scalar(square, Scalar::from(-0.5)));
    let density = B::float_mul_scalar(power, Scalar::from(0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2));
    let slope = B::float_mul(x.clone(), density);
    let slope = B::float_add(slope, normal_distribution::<B>(x));
    like::<B>(B::float_mul(gradient, slope), shape, dtype)
}
