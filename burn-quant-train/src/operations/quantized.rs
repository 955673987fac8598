//! Operations of Burn's own post-training quantized tensors.

/// Gives the operations to a macro: see [`operations`](crate::operations).
macro_rules! quantized_operations {
    ($forward:ident) => {
        $forward! {
            q_from_data(data: (TensorData), device: (&Device<Self>)) -> Quant;
            quantize_dynamic(tensor: Float, scheme: (&QuantScheme)) -> Quant;
            dequantize(tensor: Quant, dtype: (FloatDType)) -> Float;
            q_device(tensor: (&QuantizedTensor<Self>)) -> (Device<Self>);
            q_to_device(tensor: Quant, device: (&Device<Self>)) -> Quant;
            q_reshape(tensor: Quant, shape: (Shape)) -> Quant;
            q_detach(tensor: Quant) -> Quant;
            q_set_require_grad(tensor: Quant, require_grad: (bool)) -> Quant;
            q_is_require_grad(tensor: (&QuantizedTensor<Self>)) -> (bool);
            q_expand(tensor: Quant, shape: (Shape)) -> Quant;
            q_transpose(tensor: Quant) -> Quant;
            q_swap_dims(tensor: Quant, dim1: (usize), dim2: (usize)) -> Quant;
            q_permute(tensor: Quant, axes: (&[usize])) -> Quant;
            q_flip(tensor: Quant, axes: (&[usize])) -> Quant;
            q_select(tensor: Quant, dim: (usize), indices: Int) -> Quant;
            q_slice(tensor: Quant, slices: (&[Slice])) -> Quant;
            q_gather(dim: (usize), tensor: Quant, indices: Int) -> Quant;
            q_repeat_dim(tensor: Quant, dim: (usize), times: (usize)) -> Quant;
            q_add(lhs: Quant, rhs: Quant) -> Primitive;
            q_add_scalar(lhs: Quant, rhs: (Scalar)) -> Primitive;
            q_clamp_min(tensor: Quant, min: (Scalar)) -> Primitive;
            q_clamp_max(tensor: Quant, max: (Scalar)) -> Primitive;
            q_clamp(tensor: Quant, min: (Scalar), max: (Scalar)) -> Primitive;
            q_sub(lhs: Quant, rhs: Quant) -> Primitive;
            q_sub_scalar(lhs: Quant, rhs: (Scalar)) -> Primitive;
            q_mul(lhs: Quant, rhs: Quant) -> Primitive;
            q_mul_scalar(lhs: Quant, rhs: (Scalar)) -> Primitive;
            q_div(lhs: Quant, rhs: Quant) -> Primitive;
            q_div_scalar(lhs: Quant, rhs: (Scalar)) -> Primitive;
            q_matmul(lhs: Primitive, rhs: Primitive) -> Primitive;
            q_neg(tensor: Quant) -> Primitive;
            q_recip(tensor: Quant) -> Primitive;
            q_sum(tensor: Quant) -> Primitive;
            q_sum_dim(tensor: Quant, dim: (usize)) -> Primitive;
            q_prod(tensor: Quant) -> Primitive;
            q_prod_dim(tensor: Quant, dim: (usize)) -> Primitive;
            q_mean(tensor: Quant) -> Primitive;
            q_mean_dim(tensor: Quant, dim: (usize)) -> Primitive;
            q_cumsum(tensor: Quant, dim: (usize)) -> Primitive;
            q_cumprod(tensor: Quant, dim: (usize)) -> Primitive;
            q_cummin(tensor: Quant, dim: (usize)) -> Primitive;
            q_cummax(tensor: Quant, dim: (usize)) -> Primitive;
            q_exp(tensor: Quant) -> Primitive;
            q_log(tensor: Quant) -> Primitive;
            q_log1p(tensor: Quant) -> Primitive;
            q_powf(lhs: Quant, rhs: Quant) -> Primitive;
            q_powi(lhs: Quant, rhs: Int) -> Primitive;
            q_powi_scalar(lhs: Quant, rhs: (Scalar)) -> Primitive;
            q_powf_scalar(tensor: Quant, value: (Scalar)) -> Primitive;
            q_sqrt(tensor: Quant) -> Primitive;
            q_abs(tensor: Quant) -> Quant;
            q_cos(tensor: Quant) -> Primitive;
            q_sin(tensor: Quant) -> Primitive;
            q_tan(tensor: Quant) -> Primitive;
            q_cosh(tensor: Quant) -> Primitive;
            q_sinh(tensor: Quant) -> Primitive;
            q_tanh(tensor: Quant) -> Primitive;
            q_erf(tensor: Quant) -> Primitive;
            q_cat(tensors: (Vec<QuantizedTensor<Self>>), dim: (usize)) -> Quant;
            q_argmax(tensor: Quant, dim: (usize), out_dtype: (IntDType)) -> Int;
            q_argtopk(tensor: Quant, dim: (usize), k: (usize), out_dtype: (IntDType)) -> Int;
            q_topk(tensor: Quant, dim: (usize), k: (usize)) -> Quant;
            q_argmin(tensor: Quant, dim: (usize), out_dtype: (IntDType)) -> Int;
            q_max(tensor: Quant) -> Quant;
            q_max_dim(tensor: Quant, dim: (usize)) -> Quant;
            q_max_dim_with_indices(tensor: Quant, dim: (usize), out_dtype: (IntDType)) -> ((QuantizedTensor<Self>,
                IntTensor<Self>));
            q_min(tensor: Quant) -> Quant;
            q_min_dim(tensor: Quant, dim: (usize)) -> Quant;
            q_min_dim_with_indices(tensor: Quant, dim: (usize), out_dtype: (IntDType)) -> ((QuantizedTensor<Self>,
                IntTensor<Self>));
            q_max_abs(tensor: Quant) -> Quant;
            q_max_abs_dim(tensor: Quant, dim: (usize)) -> Quant;
            q_any(tensor: Quant, out_dtype: (BoolDType)) -> Bool;
            q_any_dim(tensor: Quant, dim: (usize), out_dtype: (BoolDType)) -> Bool;
            q_all(tensor: Quant, out_dtype: (BoolDType)) -> Bool;
            q_all_dim(tensor: Quant, dim: (usize), out_dtype: (BoolDType)) -> Bool;
            q_sort(tensor: Quant, dim: (usize), descending: (bool)) -> Quant;
            q_sort_with_indices(tensor: Quant, dim: (usize), descending: (bool),
                out_dtype: (IntDType)) -> ((QuantizedTensor<Self>, IntTensor<Self>));
            q_argsort(tensor: Quant, dim: (usize), descending: (bool), out_dtype: (IntDType)) -> Int;
        }
    };
}

pub(crate) use quantized_operations;
