//! Int tensor operations: all forwarded; int primitives are the inner backend's own.

use std::ops::Range;

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData,
    ops::IntTensorOps,
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::{QuantTrain, forward::forward};
use crate::{data::recorded::QuantBackend, recipe::Recipe};

impl<B: QuantBackend, R: Recipe> IntTensorOps<Self> for QuantTrain<B, R> {
    forward! {
    int_empty(shape: (Shape), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_from_data(data: (TensorData), device: (&Device<Self>)) -> Int;
    int_device(tensor: (&IntTensor<Self>)) -> (Device<Self>);
    int_to_device(tensor: Int, device: (&Device<Self>)) -> Int;
    int_reshape(tensor: Int, shape: (Shape)) -> Int;
    int_slice(tensor: Int, slices: (&[Slice])) -> Int;
    int_slice_assign(tensor: Int, slices: (&[Slice]), value: Int) -> Int;
    int_into_float(tensor: Int, out_dtype: (FloatDType)) -> Float;
    int_mask_where(tensor: Int, mask: Bool, value: Int) -> Int;
    int_mask_fill(tensor: Int, mask: Bool, value: (Scalar)) -> Int;
    int_gather(dim: (usize), tensor: Int, indices: Int) -> Int;
    int_scatter_add(dim: (usize), tensor: Int, indices: Int, value: Int) -> Int;
    int_scatter_nd(data: Int, indices: Int, values: Int, reduction: (IndexingUpdateOp)) -> Int;
    int_gather_nd(data: Int, indices: Int) -> Int;
    int_select(tensor: Int, dim: (usize), indices: Int) -> Int;
    int_select_add(tensor: Int, dim: (usize), indices: Int, value: Int) -> Int;
    int_repeat_dim(tensor: Int, dim: (usize), times: (usize)) -> Int;
    int_cat(tensors: (Vec<IntTensor<Self>>), dim: (usize)) -> Int;
    int_equal(lhs: Int, rhs: Int, out_dtype: (BoolDType)) -> Bool;
    int_not_equal(lhs: Int, rhs: Int, out_dtype: (BoolDType)) -> Bool;
    int_equal_elem(lhs: Int, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    int_not_equal_elem(lhs: Int, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    int_greater(lhs: Int, rhs: Int, out_dtype: (BoolDType)) -> Bool;
    int_greater_elem(lhs: Int, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    int_greater_equal(lhs: Int, rhs: Int, out_dtype: (BoolDType)) -> Bool;
    int_greater_equal_elem(lhs: Int, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    int_lower(lhs: Int, rhs: Int, out_dtype: (BoolDType)) -> Bool;
    int_lower_elem(lhs: Int, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    int_lower_equal(lhs: Int, rhs: Int, out_dtype: (BoolDType)) -> Bool;
    int_lower_equal_elem(lhs: Int, rhs: (Scalar), out_dtype: (BoolDType)) -> Bool;
    int_add(lhs: Int, rhs: Int) -> Int;
    int_add_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_powi(lhs: Int, rhs: Int) -> Int;
    int_powi_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_powi_scalar_impl(lhs: Int, rhs: (Scalar)) -> Int;
    int_clamp_min(tensor: Int, min: (Scalar)) -> Int;
    int_clamp_max(tensor: Int, max: (Scalar)) -> Int;
    int_clamp(tensor: Int, min: (Scalar), max: (Scalar)) -> Int;
    int_sub(lhs: Int, rhs: Int) -> Int;
    int_sub_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_mul(lhs: Int, rhs: Int) -> Int;
    int_mul_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_div(lhs: Int, rhs: Int) -> Int;
    int_div_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_remainder(lhs: Int, rhs: Int) -> Int;
    int_remainder_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_matmul(lhs: Int, rhs: Int) -> Int;
    int_neg(tensor: Int) -> Int;
    int_zeros(shape: (Shape), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_ones(shape: (Shape), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_full(shape: (Shape), fill_value: (Scalar), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_sum(tensor: Int) -> Int;
    int_sum_dim(tensor: Int, dim: (usize)) -> Int;
    int_prod(tensor: Int) -> Int;
    int_prod_dim(tensor: Int, dim: (usize)) -> Int;
    int_mean(tensor: Int) -> Int;
    int_mean_dim(tensor: Int, dim: (usize)) -> Int;
    int_cumsum(tensor: Int, dim: (usize)) -> Int;
    int_cumprod(tensor: Int, dim: (usize)) -> Int;
    int_cummin(tensor: Int, dim: (usize)) -> Int;
    int_cummax(tensor: Int, dim: (usize)) -> Int;
    int_argmax(tensor: Int, dim: (usize)) -> Int;
    int_argtopk(tensor: Int, dim: (usize), k: (usize)) -> Int;
    int_topk(tensor: Int, dim: (usize), k: (usize)) -> Int;
    int_argmin(tensor: Int, dim: (usize)) -> Int;
    int_max(tensor: Int) -> Int;
    int_max_dim(tensor: Int, dim: (usize)) -> Int;
    int_max_dim_with_indices(tensor: Int, dim: (usize)) -> ((IntTensor<Self>, IntTensor<Self>));
    int_max_abs(tensor: Int) -> Int;
    int_max_abs_dim(tensor: Int, dim: (usize)) -> Int;
    int_min(tensor: Int) -> Int;
    int_min_dim(tensor: Int, dim: (usize)) -> Int;
    int_min_dim_with_indices(tensor: Int, dim: (usize)) -> ((IntTensor<Self>, IntTensor<Self>));
    int_abs(tensor: Int) -> Int;
    int_transpose(tensor: Int) -> Int;
    int_swap_dims(tensor: Int, dim1: (usize), dim2: (usize)) -> Int;
    int_permute(tensor: Int, axes: (&[usize])) -> Int;
    int_flip(tensor: Int, axes: (&[usize])) -> Int;
    int_random(shape: (Shape), distribution: (Distribution), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_arange_step(range: (Range<i64>), step: (usize), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_arange(range: (Range<i64>), device: (&Device<Self>), dtype: (IntDType)) -> Int;
    int_any(tensor: Int, out_dtype: (BoolDType)) -> Bool;
    int_any_dim(tensor: Int, dim: (usize), out_dtype: (BoolDType)) -> Bool;
    int_all(tensor: Int, out_dtype: (BoolDType)) -> Bool;
    int_all_dim(tensor: Int, dim: (usize), out_dtype: (BoolDType)) -> Bool;
    int_sign(tensor: Int) -> Int;
    int_expand(tensor: Int, shape: (Shape)) -> Int;
    int_sort(tensor: Int, dim: (usize), descending: (bool)) -> Int;
    int_sort_with_indices(tensor: Int, dim: (usize), descending: (bool)) -> ((IntTensor<Self>, IntTensor<Self>));
    int_argsort(tensor: Int, dim: (usize), descending: (bool)) -> Int;
    bitwise_and(lhs: Int, rhs: Int) -> Int;
    bitwise_and_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    bitwise_or(lhs: Int, rhs: Int) -> Int;
    bitwise_or_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    bitwise_xor(lhs: Int, rhs: Int) -> Int;
    bitwise_xor_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    bitwise_not(tensor: Int) -> Int;
    bitwise_left_shift(lhs: Int, rhs: Int) -> Int;
    bitwise_left_shift_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    bitwise_right_shift(lhs: Int, rhs: Int) -> Int;
    bitwise_right_shift_scalar(lhs: Int, rhs: (Scalar)) -> Int;
    int_cast(tensor: Int, dtype: (IntDType)) -> Int;
    int_unfold(tensor: Int, dim: (usize), size: (usize), step: (usize)) -> Int;
    }

    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::int_into_data(tensor).await
    }
}
