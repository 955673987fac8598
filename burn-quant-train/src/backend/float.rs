//! Float tensor operations: the table of precision classes, and the operations that carry tags or run quantized.

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData,
    ops::{FloatTensorOps, GridSampleOptions},
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::{QuantTrain, forward::forward, products, tensor::QuantTensor};
use crate::{data::recorded::QuantBackend, recipe::Recipe};

impl<B: QuantBackend, R: Recipe> FloatTensorOps<Self> for QuantTrain<B, R> {
    forward! {
    float_from_data(data: (TensorData), device: (&Device<Self>)) -> Float;
    float_random(shape: (Shape), distribution: (Distribution), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
    float_zeros(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
    float_ones(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
    float_full(shape: (Shape), fill_value: (Scalar), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
    float_device(tensor: FloatRef) -> (Device<Self>);
    float_into_int(tensor: Float, out_dtype: (IntDType)) -> Int;
    float_empty(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
    float_repeat_dim(tensor: Float, dim: (usize), times: (usize)) -> Float;
    float_add(lhs: Float, rhs: Float) -> Float => Promote;
    float_add_scalar(lhs: Float, rhs: (Scalar)) -> Float;
    float_clamp_min(tensor: Float, min: (Scalar)) -> Float;
    float_clamp_max(tensor: Float, max: (Scalar)) -> Float;
    float_clamp(tensor: Float, min: (Scalar), max: (Scalar)) -> Float;
    float_sub(lhs: Float, rhs: Float) -> Float => Promote;
    float_sub_scalar(lhs: Float, rhs: (Scalar)) -> Float;
    float_mul(lhs: Float, rhs: Float) -> Float => Promote;
    float_mul_scalar(lhs: Float, rhs: (Scalar)) -> Float;
    float_div(lhs: Float, rhs: Float) -> Float => Promote;
    float_div_scalar(lhs: Float, rhs: (Scalar)) -> Float;
    float_remainder(lhs: Float, rhs: Float) -> Float => Promote;
    float_remainder_scalar(lhs: Float, rhs: (Scalar)) -> Float;
    float_cross(lhs: Float, rhs: Float, dim: (usize)) -> Float => Promote;
    float_neg(tensor: Float) -> Float;
    float_recip(tensor: Float) -> Float;
    float_permute(tensor: Float, axes: (&[usize])) -> Float;
    float_flip(tensor: Float, axes: (&[usize])) -> Float;
    float_gather(dim: (usize), tensor: Float, indices: Int) -> Float;
    float_scatter_add(dim: (usize), tensor: Float, indices: Int, value: Float) -> Float => Follow;
    float_scatter_nd(data: Float, indices: Int, values: Float, reduction: (IndexingUpdateOp)) -> Float => Follow;
    float_gather_nd(data: Float, indices: Int) -> Float;
    float_select(tensor: Float, dim: (usize), indices: Int) -> Float;
    float_select_add(tensor: Float, dim: (usize), indices: Int, value: Float) -> Float => Follow;
    float_slice(tensor: Float, slices: (&[Slice])) -> Float;
    float_slice_assign(tensor: Float, slices: (&[Slice]), value: Float) -> Float => Follow;
    float_mask_where(tensor: Float, mask: Bool, value: Float) -> Float => Promote;
    float_mask_fill(tensor: Float, mask: Bool, value: (Scalar)) -> Float;
    float_equal(lhs: Float, rhs: Float, out_dtype: (BoolDType)) -> Bool => Promote;
    float_not_equal(lhs: Float, rhs: Float, out_dtype: (BoolDType)) -> Bool => Promote;
    float_equal_elem(lhs: Float, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    float_not_equal_elem(lhs: Float, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    float_greater(lhs: Float, rhs: Float, out_dtype: (BoolDType)) -> Bool => Promote;
    float_greater_elem(lhs: Float, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    float_greater_equal(lhs: Float, rhs: Float, out_dtype: (BoolDType)) -> Bool => Promote;
    float_greater_equal_elem(lhs: Float, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    float_lower(lhs: Float, rhs: Float, out_dtype: (BoolDType)) -> Bool => Promote;
    float_lower_elem(lhs: Float, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    float_lower_equal(lhs: Float, rhs: Float, out_dtype: (BoolDType)) -> Bool => Promote;
    float_lower_equal_elem(lhs: Float, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    float_is_require_grad(tensor: FloatRef) -> (bool);
    float_sum(tensor: Float) -> Float => Full;
    float_sum_dim(tensor: Float, dim: (usize)) -> Float => Full;
    float_prod(tensor: Float) -> Float => Full;
    float_prod_dim(tensor: Float, dim: (usize)) -> Float => Full;
    float_mean(tensor: Float) -> Float => Full;
    float_mean_dim(tensor: Float, dim: (usize)) -> Float => Full;
    float_cumsum(tensor: Float, dim: (usize)) -> Float => Full;
    float_cumprod(tensor: Float, dim: (usize)) -> Float => Full;
    float_cummin(tensor: Float, dim: (usize)) -> Float;
    float_cummax(tensor: Float, dim: (usize)) -> Float;
    float_cast(tensor: Float, dtype: (FloatDType)) -> Float;
    float_exp(tensor: Float) -> Float => Full;
    float_log(tensor: Float) -> Float => Full;
    float_log1p(tensor: Float) -> Float => Full;
    float_powf(lhs: Float, rhs: Float) -> Float => Full;
    float_powi(lhs: Float, rhs: Int) -> Float => Full;
    float_powi_scalar(lhs: Float, rhs: (Scalar)) -> Float => Full;
    float_powi_scalar_impl(lhs: Float, rhs: (Scalar)) -> Float => Full;
    float_powf_scalar(tensor: Float, value: (Scalar)) -> Float => Full;
    float_powf_scalar_impl(tensor: Float, value: (Scalar)) -> Float => Full;
    float_sqrt(tensor: Float) -> Float;
    float_abs(tensor: Float) -> Float;
    float_cos(tensor: Float) -> Float;
    float_sin(tensor: Float) -> Float;
    float_tan(tensor: Float) -> Float => Full;
    float_cosh(tensor: Float) -> Float => Full;
    float_sinh(tensor: Float) -> Float => Full;
    float_tanh(tensor: Float) -> Float;
    float_acos(tensor: Float) -> Float => Full;
    float_acosh(tensor: Float) -> Float => Full;
    float_asin(tensor: Float) -> Float => Full;
    float_asinh(tensor: Float) -> Float => Full;
    float_atan(tensor: Float) -> Float;
    float_atanh(tensor: Float) -> Float => Full;
    float_atan2(lhs: Float, rhs: Float) -> Float => Promote;
    float_round(tensor: Float) -> Float;
    float_floor(tensor: Float) -> Float;
    float_ceil(tensor: Float) -> Float;
    float_trunc(tensor: Float) -> Float;
    float_erf(tensor: Float) -> Float;
    float_cat(tensors: Floats, dim: (usize)) -> Float => Promote;
    float_argmax(tensor: Float, dim: (usize), out_dtype: (IntDType)) -> Int;
    float_argtopk(tensor: Float, dim: (usize), k: (usize), out_dtype: (IntDType)) -> Int;
    float_topk(tensor: Float, dim: (usize), k: (usize)) -> Float;
    float_argmin(tensor: Float, dim: (usize), out_dtype: (IntDType)) -> Int;
    float_max(tensor: Float) -> Float;
    float_max_dim(tensor: Float, dim: (usize)) -> Float;
    float_max_dim_with_indices(tensor: Float, dim: (usize), indices_dtype: (IntDType)) -> FloatAndInt;
    float_min(tensor: Float) -> Float;
    float_min_dim(tensor: Float, dim: (usize)) -> Float;
    float_min_dim_with_indices(tensor: Float, dim: (usize), indices_dtype: (IntDType)) -> FloatAndInt;
    float_max_abs(tensor: Float) -> Float;
    float_max_abs_dim(tensor: Float, dim: (usize)) -> Float;
    float_any(tensor: Float, out_dtype: (BoolDType)) -> Bool;
    float_any_dim(tensor: Float, dim: (usize), out_dtype: (BoolDType)) -> Bool;
    float_all(tensor: Float, out_dtype: (BoolDType)) -> Bool;
    float_all_dim(tensor: Float, dim: (usize), out_dtype: (BoolDType)) -> Bool;
    float_sign(tensor: Float) -> Float;
    float_expand(tensor: Float, shape: (Shape)) -> Float;
    float_sort(tensor: Float, dim: (usize), descending: (bool)) -> Float;
    float_sort_with_indices(tensor: Float, dim: (usize), descending: (bool), indices_dtype: (IntDType)) -> FloatAndInt;
    float_argsort(tensor: Float, dim: (usize), descending: (bool), out_dtype: (IntDType)) -> Int;
    float_grid_sample_2d(tensor: Float, grid: Float, options: (GridSampleOptions)) -> Float => Promote;
    float_unfold(tensor: Float, dim: (usize), size: (usize), step: (usize)) -> Float;
    float_is_nan(tensor: Float, out_dtype: (BoolDType)) -> Bool;
    float_is_inf(tensor: Float, out_dtype: (BoolDType)) -> Bool;
    }

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::float_into_data(tensor.into_primitive()).await
    }

    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        products::matmul::<B, R>(lhs, rhs)
    }

    fn float_transpose(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let rank = burn_backend::TensorMetadata::rank(tensor.primitive());
        if rank < 2 {
            return QuantTensor::new(B::float_transpose(tensor.into_primitive()));
        }
        Self::float_swap_dims(tensor, rank - 2, rank - 1)
    }

    fn float_swap_dims(tensor: FloatTensor<Self>, dim1: usize, dim2: usize) -> FloatTensor<Self> {
        tensor.swap_dims(dim1, dim2)
    }

    fn float_reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        tensor.reshape(shape)
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        tensor.to_device(device)
    }

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor.map_same_value(B::float_detach)
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> {
        tensor.set_require_grad(require_grad)
    }
}
