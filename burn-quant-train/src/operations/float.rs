//! Operations of float tensors.

/// Gives the operations to a macro: see [`operations`](crate::operations).
macro_rules! float_operations {
    ($forward:ident) => {
        $forward! {
            float_from_data(data: (TensorData), device: (&Device<Self>)) -> Float [upload];
            float_zeros(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
            float_ones(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
            float_full(shape: (Shape), fill_value: (Scalar), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
            float_into_int(tensor: Float, out_dtype: (IntDType)) -> Int;
            float_empty(shape: (Shape), device: (&Device<Self>), dtype: (FloatDType)) -> Float;
            float_repeat_dim(tensor: Float, dim: (usize), times: (usize)) -> Float;
            float_clamp_min(tensor: Float, min: (Scalar)) -> Float;
            float_clamp_max(tensor: Float, max: (Scalar)) -> Float;
            float_clamp(tensor: Float, min: (Scalar), max: (Scalar)) -> Float;
            float_sub(lhs: Float, rhs: Float) -> Float => Promote [again if exact];
            float_sub_scalar(lhs: Float, rhs: (Scalar)) -> Float [again if exact];
            float_remainder(lhs: Float, rhs: Float) -> Float => Promote [exact: lhs rhs];
            float_remainder_scalar(lhs: Float, rhs: (Scalar)) -> Float;
            float_cross(lhs: Float, rhs: Float, dim: (usize)) -> Float => Promote;
            float_neg(tensor: Float) -> Float [again];
            float_recip(tensor: Float) -> Float [again, exact: tensor];
            float_permute(tensor: Float, axes: (&[usize])) -> Float [again];
            float_flip(tensor: Float, axes: (&[usize])) -> Float;
            float_gather(dim: (usize), tensor: Float, indices: Int) -> Float;
            float_scatter_add(dim: (usize), tensor: Float, indices: Int, value: Float) -> Float => Follow;
            float_scatter_nd(data: Float, indices: Int, values: Float, reduction: (IndexingUpdateOp)) -> Float => Follow [exact: data values];
            float_gather_nd(data: Float, indices: Int) -> Float;
            float_select(tensor: Float, dim: (usize), indices: Int) -> Float;
            float_select_add(tensor: Float, dim: (usize), indices: Int, value: Float) -> Float => Follow;
            float_slice_assign(tensor: Float, slices: (&[Slice]), value: Float) -> Float => Follow;
            float_mask_where(tensor: Float, mask: Bool, value: Float) -> Float => Promote;
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
            float_prod(tensor: Float) -> Float => Full;
            float_prod_dim(tensor: Float, dim: (usize)) -> Float => Full;
            float_cumsum(tensor: Float, dim: (usize)) -> Float => Full;
            float_cumprod(tensor: Float, dim: (usize)) -> Float => Full [exact: tensor];
            float_cummin(tensor: Float, dim: (usize)) -> Float [exact: tensor];
            float_cummax(tensor: Float, dim: (usize)) -> Float [exact: tensor];
            float_exp(tensor: Float) -> Float => Full [again, exact: tensor];
            float_log(tensor: Float) -> Float => Full [exact: tensor];
            float_log1p(tensor: Float) -> Float => Full [exact: tensor];
            float_powf(lhs: Float, rhs: Float) -> Float => Full [exact: lhs rhs];
            float_powi(lhs: Float, rhs: Int) -> Float => Full;
            float_powi_scalar_impl(lhs: Float, rhs: (Scalar)) -> Float => Full;
            float_powf_scalar(tensor: Float, value: (Scalar)) -> Float => Full;
            float_powf_scalar_impl(tensor: Float, value: (Scalar)) -> Float => Full [exact: tensor];
            float_abs(tensor: Float) -> Float [again, exact: tensor];
            float_cos(tensor: Float) -> Float [exact: tensor];
            float_sin(tensor: Float) -> Float [exact: tensor];
            float_tan(tensor: Float) -> Float => Full [exact: tensor];
            float_cosh(tensor: Float) -> Float => Full [exact: tensor];
            float_sinh(tensor: Float) -> Float => Full [exact: tensor];
            float_tanh(tensor: Float) -> Float [again];
            float_acos(tensor: Float) -> Float => Full [exact: tensor];
            float_acosh(tensor: Float) -> Float => Full [exact: tensor];
            float_asin(tensor: Float) -> Float => Full [exact: tensor];
            float_asinh(tensor: Float) -> Float => Full;
            float_atan(tensor: Float) -> Float;
            float_atanh(tensor: Float) -> Float => Full [exact: tensor];
            float_atan2(lhs: Float, rhs: Float) -> Float => Promote [exact: lhs rhs];
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
            float_expand(tensor: Float, shape: (Shape)) -> Float [again];
            float_sort(tensor: Float, dim: (usize), descending: (bool)) -> Float;
            float_sort_with_indices(tensor: Float, dim: (usize), descending: (bool), indices_dtype: (IntDType)) -> FloatAndInt;
            float_argsort(tensor: Float, dim: (usize), descending: (bool), out_dtype: (IntDType)) -> Int;
            float_grid_sample_2d(tensor: Float, grid: Float, options: (GridSampleOptions)) -> Float => Promote;
            float_unfold(tensor: Float, dim: (usize), size: (usize), step: (usize)) -> Float;
            float_is_nan(tensor: Float, out_dtype: (BoolDType)) -> Bool;
            float_is_inf(tensor: Float, out_dtype: (BoolDType)) -> Bool;
        }
    };
}

/// The same of those with which compositions begin or go on: see
/// [`composition`](crate::backend::composition).
macro_rules! composed_float_operations {
    ($forward:ident) => {
        $forward! {
            float_slice(tensor: Float, slices: (&[Slice])) -> Float [again];
            float_add(lhs: Float, rhs: Float) -> Float => Promote [again if exact];
            float_mul_scalar(lhs: Float, rhs: (Scalar)) -> Float [again];
            float_div_scalar(lhs: Float, rhs: (Scalar)) -> Float [again];
            float_mask_fill(tensor: Float, mask: Bool, value: (Scalar)) -> Float;
            float_add_scalar(lhs: Float, rhs: (Scalar)) -> Float [again if exact];
            float_mul(lhs: Float, rhs: Float) -> Float => Promote [again];
            float_div(lhs: Float, rhs: Float) -> Float => Promote [again over small, exact: rhs];
            float_sum(tensor: Float) -> Float => Full [loss: tensor];
            float_mean(tensor: Float) -> Float => Full [loss: tensor];
            float_mean_dim(tensor: Float, dim: (usize)) -> Float => Full;
            float_sum_dim(tensor: Float, dim: (usize)) -> Float => Full [sum];
            float_cast(tensor: Float, dtype: (FloatDType)) -> Float [again];
            float_powi_scalar(lhs: Float, rhs: (Scalar)) -> Float => Full;
            float_sqrt(tensor: Float) -> Float [again, exact: tensor];
        }
    };
}

pub(crate) use composed_float_operations;
pub(crate) use float_operations;
