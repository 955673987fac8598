//! Operations of bool tensors.

/// Gives the operations to a macro: see [`operations`](crate::operations).
macro_rules! bool_operations {
    ($forward:ident) => {
        $forward! {
            bool_empty(shape: (Shape), device: (&Device<Self>), dtype: (BoolDType)) -> Bool;
            bool_zeros(shape: (Shape), device: (&Device<Self>), dtype: (BoolDType)) -> Bool;
            bool_ones(shape: (Shape), device: (&Device<Self>), dtype: (BoolDType)) -> Bool;
            bool_from_data(data: (TensorData), device: (&Device<Self>)) -> Bool;
            bool_into_int(tensor: Bool, out_dtype: (IntDType)) -> Int;
            bool_into_float(tensor: Bool, out_dtype: (FloatDType)) -> Float [mask];
            bool_device(tensor: (&BoolTensor<Self>)) -> (Device<Self>);
            bool_to_device(tensor: Bool, device: (&Device<Self>)) -> Bool;
            bool_reshape(tensor: Bool, shape: (Shape)) -> Bool;
            bool_slice(tensor: Bool, slices: (&[Slice])) -> Bool;
            bool_slice_assign(tensor: Bool, slices: (&[Slice]), value: Bool) -> Bool;
            bool_mask_where(tensor: Bool, mask: Bool, value: Bool) -> Bool;
            bool_mask_fill(tensor: Bool, mask: Bool, value: (Scalar)) -> Bool;
            bool_gather(dim: (usize), tensor: Bool, indices: Int) -> Bool;
            bool_scatter_or(dim: (usize), tensor: Bool, indices: Int, value: Bool) -> Bool;
            bool_select(tensor: Bool, dim: (usize), indices: Int) -> Bool;
            bool_select_or(tensor: Bool, dim: (usize), indices: Int, value: Bool) -> Bool;
            bool_repeat_dim(tensor: Bool, dim: (usize), times: (usize)) -> Bool;
            bool_cat(tensors: (Vec<BoolTensor<Self>>), dim: (usize)) -> Bool;
            bool_equal(lhs: Bool, rhs: Bool) -> Bool;
            bool_not_equal(lhs: Bool, rhs: Bool) -> Bool;
            bool_equal_elem(lhs: Bool, rhs: (Scalar)) -> Bool;
            bool_not_equal_elem(lhs: Bool, rhs: (Scalar)) -> Bool;
            bool_not(tensor: Bool) -> Bool;
            bool_and(lhs: Bool, rhs: Bool) -> Bool;
            bool_or(lhs: Bool, rhs: Bool) -> Bool;
            bool_xor(lhs: Bool, rhs: Bool) -> Bool;
            bool_transpose(tensor: Bool) -> Bool;
            bool_swap_dims(tensor: Bool, dim1: (usize), dim2: (usize)) -> Bool;
            bool_permute(tensor: Bool, axes: (&[usize])) -> Bool;
            bool_flip(tensor: Bool, axes: (&[usize])) -> Bool;
            bool_any(tensor: Bool) -> Bool;
            bool_any_dim(tensor: Bool, dim: (usize)) -> Bool;
            bool_all(tensor: Bool) -> Bool;
            bool_all_dim(tensor: Bool, dim: (usize)) -> Bool;
            bool_expand(tensor: Bool, shape: (Shape)) -> Bool;
            bool_unfold(tensor: Bool, dim: (usize), size: (usize), step: (usize)) -> Bool;
        }
    };
}

pub(crate) use bool_operations;
