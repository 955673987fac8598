//! Which products run quantized: linear layers, and products with a two-dimensional weight.

use std::sync::Arc;

use burn_backend::{DType, Shape, TensorMetadata, tensor::FloatTensor};

use crate::{
    backend::QuantTrain,
    layer::Layer,
    ops::{LinearCall, QuantBackend, QuantOps, matmul::MatmulKernel},
    policy,
    precision::{Class, Dtypes, cast_to},
    recipe::Recipe,
    tensor::{QuantTensor, View},
};

/// `ModuleOps::linear`: x `[.., K]`, weight `[K, N]`, bias `[N]`.
pub(crate) fn linear<B: QuantBackend, R: Recipe>(
    x: FloatTensor<QuantTrain<B, R>>,
    weight: FloatTensor<QuantTrain<B, R>>,
    bias: Option<FloatTensor<QuantTrain<B, R>>>,
) -> FloatTensor<QuantTrain<B, R>> {
    if let Some(layer) = quantized_layer::<B, R>(&x, &weight) {
        return quantized::<B, R>(x, weight, bias, layer);
    }
    let (x, weight) = (x.into_primitive(), weight.into_primitive());
    let bias = bias.map(QuantTensor::into_primitive);
    let mut dtypes = Dtypes::default();
    dtypes.see(&x);
    dtypes.see(&weight);
    let target = Class::Compute.target(R::ROW.compute, &dtypes);
    let (x, weight) = (cast_to::<B>(x, target), cast_to::<B>(weight, target));
    let bias = bias.map(|bias| cast_to::<B>(bias, target));
    let (mut shape, weight_shape) = (x.shape(), weight.shape());
    let rank = shape.num_dims();
    let is_matrix = weight_shape.num_dims() == 2;
    let kernel = kernel::<B>(&x).filter(|_| is_matrix);
    // Flex 0.21 reads outside of memory in products of batches without elements, in `Tensor::matmul` too, but not of
    // matrices without.
    let is_empty = is_matrix && shape.num_elements() == 0;
    if kernel.is_none() && !is_empty {
        return QuantTensor::new(B::linear(x, weight, bias));
    }
    let rows = shape[..rank - 1].iter().product();
    let matrix = B::float_reshape(x, Shape::new([rows, shape[rank - 1]]));
    let y = match kernel {
        Some(kernel) => B::matmul_by(kernel, matrix, weight),
        None => B::float_matmul(matrix, weight),
    };
    shape[rank - 1] = weight_shape[1];
    let y = B::float_reshape(y, shape);
    QuantTensor::new(match bias {
        Some(bias) => {
            let mut bias_shape = vec![1; rank];
            bias_shape[rank - 1] = weight_shape[1];
            B::float_add(y, B::float_reshape(bias, Shape::from(bias_shape)))
        }
        None => y,
    })
}

/// Our kernel for products with `operand`: in BF16 or FP16, where the device has one.
fn kernel<B: QuantBackend>(operand: &FloatTensor<B>) -> Option<MatmulKernel<B::Base>> {
    let narrow = matches!(operand.dtype(), DType::BF16 | DType::F16);
    if !narrow || operand.shape().num_elements() == 0 {
        return None;
    }
    B::Base::matmul_kernel(&B::float_device(operand))
}

/// `FloatTensorOps::float_matmul`: quantized if `rhs` is a weight, `[K, N]` with leading dimensions of 1.
pub(crate) fn matmul<B: QuantBackend, R: Recipe>(
    lhs: FloatTensor<QuantTrain<B, R>>,
    rhs: FloatTensor<QuantTrain<B, R>>,
) -> FloatTensor<QuantTrain<B, R>> {
    if let Some(layer) = quantized_layer::<B, R>(&lhs, &rhs) {
        return quantized::<B, R>(lhs, rhs, None, layer);
    }
    let (lhs, rhs) = (lhs.into_primitive(), rhs.into_primitive());
    let mut dtypes = Dtypes::default();
    dtypes.see(&lhs);
    dtypes.see(&rhs);
    let target = Class::Compute.target(R::ROW.compute, &dtypes);
    let (lhs, rhs) = (cast_to::<B>(lhs, target), cast_to::<B>(rhs, target));
    let leading = |tensor: &FloatTensor<B>| {
        let shape = tensor.shape();
        let rank = shape.num_dims().checked_sub(2)?;
        Some(shape[..rank].to_vec())
    };
    let same = leading(&lhs).is_some_and(|of_lhs| leading(&rhs) == Some(of_lhs));
    let product = match kernel::<B>(&lhs).filter(|_| same) {
        Some(kernel) => B::matmul_by(kernel, lhs, rhs),
        None => B::float_matmul(lhs, rhs),
    };
    QuantTensor::new(product)
}

/// The layer of `weight`, if the recipe and the policy quantize it and the shapes are those of a linear layer.
fn quantized_layer<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    weight: &QuantTensor<B>,
) -> Option<Arc<Layer<B::Base>>> {
    R::ROW.linear?;
    let shape = weight.shape();
    let rank = shape.num_dims();
    let is_matrix = rank >= 2 && shape[..rank - 2].iter().all(|&dim| dim == 1);
    let x_shape = x.shape();
    let empty = x_shape.num_elements() == 0 || shape.num_elements() == 0;
    let double = x.dtype() == DType::F64 || weight.dtype() == DType::F64;
    if !is_matrix || x_shape.num_dims() < rank || empty || double {
        return None;
    }
    let matrix = match weight.view() {
        View::Rows => [shape[rank - 2], shape[rank - 1]],
        View::Transposed => [shape[rank - 1], shape[rank - 2]],
    };
    let layer = weight
        .tag()
        .layer_or(|| Layer::unattached(policy::large_enough(matrix, policy::MIN_ELEMENTS)))?;
    layer.is_quantized().then_some(layer)
}

fn quantized<B: QuantBackend, R: Recipe>(
    x: QuantTensor<B>,
    weight: QuantTensor<B>,
    bias: Option<QuantTensor<B>>,
    layer: Arc<Layer<B::Base>>,
) -> QuantTensor<B> {
    let (x_shape, w_shape) = (x.shape(), weight.shape());
    let (k, w_k) = (
        x_shape[x_shape.num_dims() - 1],
        w_shape[w_shape.num_dims() - 2],
    );
    assert_eq!(
        k,
        w_k,
        "linear `{}`: input {x_shape:?} has {k} features, but the weight {w_shape:?} takes {w_k}; pass an input \
         [.., {w_k}]",
        layer.path()
    );
    if let Some(bias) = &bias {
        let (shape, n) = (bias.shape(), w_shape[w_shape.num_dims() - 1]);
        assert!(
            shape.as_slice() == [n],
            "linear `{}`: bias {shape:?}, but the weight {w_shape:?} gives {n} features; pass a bias [{n}]",
            layer.path()
        );
    }
    let x_tag = (x.view() == View::Rows).then(|| x.tag().clone());
    let weight_tag = weight.tag().clone();
    let weight_view = weight.view();
    QuantTensor::new(B::quantized_linear(LinearCall {
        x: x.into_primitive(),
        x_tag: x_tag.as_deref(),
        weight: weight.into_primitive(),
        weight_tag: &weight_tag,
        weight_view,
        bias: bias.map(QuantTensor::into_primitive),
        layer,
        row: R::ROW
            .linear
            .expect("a recipe without a row for linear layers quantizes none"),
        compute: R::ROW.compute,
    }))
}
