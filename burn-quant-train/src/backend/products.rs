//! Which products run quantized: linear layers, products with a two-dimensional weight, and products of activations that
//! the policy names.

use std::sync::Arc;

use burn_backend::{
    DType, Shape, TensorMetadata,
    ops::{FloatTensorOps, ModuleOps},
    tensor::FloatTensor,
};

use super::{
    QuantTrain, composition,
    precision::{Class, Dtypes},
    tensor::QuantTensor,
};
use crate::{
    data::{DataBackend, attention::AttentionProducts, cast_to, product::ProductKernels},
    layer::{
        Layer, MIN_ELEMENTS, PRODUCTS, count_product, has_int8_attention, next_products, ran,
        tag::{Tag, View},
    },
    ops::{
        learned_linear::{LearnedLinear, evaluation::LearnedEvaluation},
        learned_product::LearnedProduct,
        linear::Linear,
        matmul::Matmul,
        run::Run,
        watch::Watched,
    },
    recipe::{LearnedSlots, LinearRow, Recipe, Row},
    saved::{
        recorded::{InsideTensor, QuantBackend, Recorded},
        report::Running,
    },
    warning::warn_once,
};

/// `ModuleOps::linear`: x `[.., K]`, weight `[K, N]`, bias `[N]`.
pub(crate) fn linear<B: QuantBackend, R: Recipe>(
    x: FloatTensor<QuantTrain<B, R>>,
    weight: FloatTensor<QuantTrain<B, R>>,
    bias: Option<FloatTensor<QuantTrain<B, R>>>,
) -> FloatTensor<QuantTrain<B, R>> {
    measured::<B, R>(x, weight, |x, weight| linear_of::<B, R>(x, weight, bias))
}

fn linear_of<B: QuantBackend, R: Recipe>(
    x: QuantTensor<B>,
    weight: QuantTensor<B>,
    bias: Option<QuantTensor<B>>,
) -> QuantTensor<B> {
    if let Some(layer) = quantized_layer::<B, R>(&x, &weight) {
        return quantized::<B, R>(x, weight, bias, layer);
    }
    if let Some(evaluation) = evaluation::<B, R>(&x, &weight, bias.as_ref()) {
        return recorded::<B, _>(evaluation, x, weight, bias);
    }
    let (x, weight) = (x.into_primitive(), weight.into_primitive());
    let bias = bias.map(QuantTensor::into_primitive);
    let mut dtypes = Dtypes::default();
    dtypes.see(&x);
    dtypes.see(&weight);
    let target = Class::Compute.target(R::row().compute, &dtypes);
    let x = cast_to::<B::Inside>(x, target);
    let bias = bias.map(|bias| cast_to::<B::Inside>(bias, target));
    let (shape, weight_shape) = (x.shape(), weight.shape());
    let rank = shape.num_dims();
    let is_matrix = weight_shape.num_dims() == 2;
    // Burn's dW sums over the rows of each batch by itself.
    let rows = shape[..rank - 1].last().copied().unwrap_or(1);
    let by_kernel = is_matrix && has_kernel::<B>([&x, &weight], rows);
    // Flex 0.21 reads outside of its memory in products of batches without elements, also in `Tensor::matmul`, but not
    // in products of matrices without elements.
    let is_empty = is_matrix && shape.num_elements() == 0;
    // The kernel's operation casts by itself.
    let weight = match by_kernel {
        true => weight,
        false => cast_to::<B::Inside>(weight, target),
    };
    if !by_kernel && !is_empty {
        return QuantTensor::new(<B::Inside>::linear(x, weight, bias));
    }
    let y = by_rows::<B>(x, weight, |rows, weight| match by_kernel {
        true => B::record(Matmul, [rows, weight]),
        false => <B::Inside>::float_matmul(rows, weight),
    });
    QuantTensor::new(match bias {
        Some(bias) => {
            let mut bias_shape = vec![1; rank];
            bias_shape[rank - 1] = weight_shape[1];
            <B::Inside>::float_add(y, <B::Inside>::float_reshape(bias, Shape::from(bias_shape)))
        }
        None => y,
    })
}

/// The product of all rows of x `[.., K]` with a matrix `[K, N]`, as one product of matrices.
fn by_rows<B: QuantBackend>(
    x: InsideTensor<B>,
    matrix: InsideTensor<B>,
    product: impl FnOnce(InsideTensor<B>, InsideTensor<B>) -> InsideTensor<B>,
) -> InsideTensor<B> {
    let mut shape = x.shape();
    let last = shape.num_dims() - 1;
    // A reshape would be an operation of its own, with a value of its own to save.
    if last == 1 {
        return product(x, matrix);
    }
    let rows = Shape::new([shape[..last].iter().product(), shape[last]]);
    shape[last] = matrix.shape()[1];
    let y = product(<B::Inside>::float_reshape(x, rows), matrix);
    <B::Inside>::float_reshape(y, shape)
}

/// True if the device has a kernel of ours for a product of `rows` rows, or for those of its gradients.
fn has_kernel<B: QuantBackend>([left, right]: [&InsideTensor<B>; 2], rows: usize) -> bool {
    type Kernels<B> = <<B as QuantBackend>::Base as DataBackend>::Kernels;
    let [k, n] = [left, right].map(|it| it.shape()[it.rank() - 1]);
    let of_gradient = |is_wanted, sum| if is_wanted { sum } else { k };
    let sums = [
        k,
        of_gradient(B::is_tracked(left), n),
        of_gradient(B::is_tracked(right), rows),
    ];
    let device = <B::Inside>::float_device(left);
    left.shape().num_elements() > 0
        && Kernels::<B>::float_product_kernel(&device, left.dtype(), &sums).is_some()
}

/// `FloatTensorOps::float_matmul`: quantized if `rhs` is a weight, `[K, N]` with leading dimensions of 1.
pub(crate) fn matmul<B: QuantBackend, R: Recipe>(
    lhs: FloatTensor<QuantTrain<B, R>>,
    rhs: FloatTensor<QuantTrain<B, R>>,
) -> FloatTensor<QuantTrain<B, R>> {
    measured::<B, R>(lhs, rhs, matmul_of::<B, R>)
}

fn matmul_of<B: QuantBackend, R: Recipe>(
    lhs: QuantTensor<B>,
    rhs: QuantTensor<B>,
) -> QuantTensor<B> {
    if let Some(layer) = quantized_layer::<B, R>(&lhs, &rhs) {
        return quantized::<B, R>(lhs, rhs, None, layer);
    }
    if let Some(evaluation) = evaluation::<B, R>(&lhs, &rhs, None) {
        return recorded::<B, _>(evaluation, lhs, rhs, None);
    }
    let (lhs, rhs) = (lhs.into_primitive(), rhs.into_primitive());
    let mut dtypes = Dtypes::default();
    dtypes.see(&lhs);
    dtypes.see(&rhs);
    let target = Class::Compute.target(R::row().compute, &dtypes);
    let lhs = cast_to::<B::Inside>(lhs, target);
    let cast = |rhs| cast_to::<B::Inside>(rhs, target);
    let (of_lhs, of_rhs) = (lhs.shape(), rhs.shape());
    let rank = of_lhs.num_dims();
    if rank < 2 || of_rhs.num_dims() != rank || !has_kernel::<B>([&lhs, &rhs], of_lhs[rank - 2]) {
        return QuantTensor::new(<B::Inside>::float_matmul(lhs, cast(rhs)));
    }
    let product = |lhs, rhs| B::record(Matmul, [lhs, rhs]);
    let (leading, matrix) = of_rhs.split_at(rank - 2);
    let is_matrix = leading.iter().all(|&dim| dim == 1);
    // The operation casts by itself what may be a weight, which waits anyway; a cast of others is half of what waits.
    let rhs = if is_matrix { rhs } else { cast(rhs) };
    QuantTensor::new(if *leading == of_lhs[..rank - 2] {
        product(lhs, rhs)
    } else if is_matrix {
        // One matrix for a whole batch.
        let matrix = Shape::new([matrix[0], matrix[1]]);
        by_rows::<B>(lhs, <B::Inside>::float_reshape(rhs, matrix), product)
    } else {
        <B::Inside>::float_matmul(lhs, rhs)
    })
}

/// The recipe's row of linear layers, and its slots, if it has learned step sizes.
fn learned<R: Recipe>() -> Option<(LinearRow, LearnedSlots)> {
    let row = R::row().linear?;
    Some((row, row.learned()?))
}

/// The product of two activations, if the policy quantizes it: see
/// [`LayerPolicy::products`](crate::layer::LayerPolicy::products). Waiting probabilities are of attention whose first
/// product was not to be quantized; a kernel may compute the whole.
pub(super) fn of_activations<B: QuantBackend, R: Recipe>(
    left: &QuantTensor<B>,
    right: &QuantTensor<B>,
) -> Option<QuantTensor<B>> {
    let (row, slots) = learned::<R>()?;
    let [layer] = next_products()?;
    let operands = [left, right].map(composition::attention::bare);
    if !are_activations(operands) {
        return None;
    }
    count_product();
    let quantizes = !composition::attention::are_probabilities(left)
        && operands.iter().any(|it| B::is_tracked(it.primitive()));
    if !quantizes {
        return None;
    }
    let operation = LearnedProduct {
        layer,
        run: Run::Next,
        row,
        slots,
        compute: R::row().compute,
    };
    let _scope = QuantTrain::<B, R>::scope();
    QuantTrain::<B, R>::compress_pending();
    let _running = Running::layer(operation.layer.path());
    let operands = operands.map(|it| it.clone().into_primitive());
    Some(QuantTensor::new(B::record(operation, operands)))
}

/// True if the products of attention that is about to be computed are to be quantized.
pub(super) fn quantizes_attention<B: QuantBackend, R: Recipe>(
    inputs: [&QuantTensor<B>; 3],
) -> bool {
    learned::<R>().is_some()
        && next_products::<B::Base, PRODUCTS>().is_some()
        && are_tracked(inputs)
}

fn are_tracked<B: QuantBackend>(inputs: [&QuantTensor<B>; 3]) -> bool {
    inputs.iter().any(|it| B::is_tracked(it.primitive()))
}

/// True if attention that a policy names has INT8 products.
fn names_attention<R: Recipe>() -> bool {
    R::row().linear.is_some_and(|row| row.has_int8_attention())
}

/// What attention that is about to be computed is to multiply in its forward pass.
pub(super) fn products_of_attention<B: QuantBackend, R: Recipe>(
    inputs: [&QuantTensor<B>; 3],
) -> AttentionProducts {
    match names_attention::<R>() && has_int8_attention::<B::Base>() && are_tracked(inputs) {
        true => AttentionProducts::Int8,
        false => AttentionProducts::Float,
    }
}

/// True if the operands are batches of as many matrices, none of them a weight, and there is something to compute.
fn are_activations<B: QuantBackend>(operands: [&QuantTensor<B>; 2]) -> bool {
    let [of_left, of_right] = operands.map(TensorMetadata::shape);
    let rank = of_left.num_dims();
    let is_activation = |it: &QuantTensor<B>| {
        it.dtype() != DType::F64
            && (it.as_waiting().is_some()
                || it.tag().lineage().is_none() && !it.tag().is_parameter())
    };
    rank >= 3
        && of_right.num_dims() == rank
        && of_left[..rank - 2] == of_right[..rank - 2]
        && of_left[rank - 1] == of_right[rank - 2]
        && of_left.num_elements() > 0
        && of_right.num_elements() > 0
        && operands.into_iter().all(is_activation)
}

/// The layer of `weight`, if the product runs quantized.
///
/// The recipe and the policy must quantize the layer, the shapes must be those of a linear layer, and a backward pass
/// must follow. A product that nobody differentiates is evaluation, which is not quantized (fallback-int8, appendix E:
/// quantized evaluation lets blocks leak information between tokens).
fn quantized_layer<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    weight: &QuantTensor<B>,
) -> Option<Arc<Layer<B::Base>>> {
    R::row().linear?;
    if !is_trained_linear::<B>(x, weight) {
        return None;
    }
    match weight.tag().layer() {
        Some(layer) => layer.is_quantized().then(|| layer.clone()),
        None => {
            say_unattached::<B, R>(weight.tag(), &weight.shape());
            None
        }
    }
}

/// The product by the step sizes of a layer, if no backward pass follows, and evaluation is quantized too.
fn evaluation<B: QuantBackend, R: Recipe>(
    x: &QuantTensor<B>,
    weight: &QuantTensor<B>,
    bias: Option<&QuantTensor<B>>,
) -> Option<LearnedEvaluation<B::Base>> {
    let (_, slots) = learned::<R>()?;
    let layer = weight.tag().weight_of()?;
    let quantizes = layer.quantizes_evaluation()
        && layer.is_quantized()
        && is_linear::<B>(x, weight)
        && !is_recorded::<B>(x, weight)
        && bias.is_none_or(|bias| !B::is_tracked(bias.primitive()));
    if !quantizes {
        return None;
    }
    LearnedEvaluation::of(layer, slots, &x.device(), R::row().compute)
}

fn is_recorded<B: QuantBackend>(x: &QuantTensor<B>, weight: &QuantTensor<B>) -> bool {
    B::is_tracked(x.primitive()) || B::is_tracked(weight.primitive())
}

/// True if the shapes are those of a linear layer, there is something to compute, and a backward pass follows.
fn is_trained_linear<B: QuantBackend>(x: &QuantTensor<B>, weight: &QuantTensor<B>) -> bool {
    is_linear::<B>(x, weight) && is_recorded::<B>(x, weight)
}

/// True if the shapes are those of a linear layer, and there is something to compute.
fn is_linear<B: QuantBackend>(x: &QuantTensor<B>, weight: &QuantTensor<B>) -> bool {
    let shape = weight.shape();
    let rank = shape.num_dims();
    let is_matrix = rank >= 2 && shape[..rank - 2].iter().all(|&dim| dim == 1);
    let x_shape = x.shape();
    let empty = x_shape.num_elements() == 0 || shape.num_elements() == 0;
    let double = x.dtype() == DType::F64 || weight.dtype() == DType::F64;
    is_matrix && x_shape.num_dims() >= rank && !empty && !double
}

/// A product, measured if it is a layer's and this step of it is: [`health`](crate::health).
fn measured<B: QuantBackend, R: Recipe>(
    x: QuantTensor<B>,
    weight: QuantTensor<B>,
    product: impl FnOnce(QuantTensor<B>, QuantTensor<B>) -> QuantTensor<B>,
) -> QuantTensor<B> {
    let layer = weight.tag().layer();
    if let Some(layer) = layer.filter(|_| learned::<R>().is_some() || names_attention::<R>()) {
        ran(layer);
    }
    let _running = layer.map(|layer| Running::layer(layer.path()));
    let watched = layer.and_then(|layer| Watched::of(layer, &R::row()));
    let watched = watched.filter(|_| is_trained_linear::<B>(&x, &weight));
    let cells = B::cell(x.primitive()).zip(B::cell(weight.primitive()));
    let Some((watched, (of_x, of_weight))) = watched.zip(cells) else {
        return product(x, weight);
    };
    let (of_x, of_weight) = (of_x.read(), of_weight.read());
    let y = product(x, weight);
    watched.inputs(of_x, of_weight);
    QuantTensor::new(B::record(watched, [y.into_primitive()]))
}

/// Warns once that a weight is not quantized because no optimizer has named it.
fn say_unattached<B: QuantBackend, R: Recipe>(tag: &Tag<B::Base>, shape: &Shape) {
    if !tag.is_parameter() || shape.num_elements() < MIN_ELEMENTS {
        return;
    }
    let row = R::row();
    warn_once!(
        "quant-train: a product with the trained weight {shape:?} is computed in {:?}, not by {}: no optimizer has \
         named its layer. Call `attach(model)` of the `QuantOptimizer` before training.",
        row.compute,
        row.name,
    );
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
    let Row {
        compute,
        flow,
        linear,
        ..
    } = R::row();
    let row = linear.expect("a recipe without a row for linear layers quantizes none");
    if let Some(slots) = row.learned() {
        let operation = LearnedLinear {
            layer,
            run: Run::Next,
            row,
            slots,
            compute,
            weight_tag: weight.tag().clone(),
            weight_view: weight.view(),
        };
        return recorded::<B, _>(operation, x, weight, bias);
    }
    let x_tag = (x.view() == View::Rows).then(|| x.tag().clone());
    let flows = x_tag.as_ref().is_some_and(|tag| tag.flows());
    let operation = Linear {
        layer,
        run: Run::Next,
        row,
        compute,
        x_tag,
        weight_tag: weight.tag().clone(),
        weight_view: weight.view(),
        flow: flow.filter(|_| flows),
        may_flow: flow.is_some(),
    };
    recorded::<B, _>(operation, x, weight, bias)
}

/// Runs an operation of X, W and the bias, if there is one.
fn recorded<B: QuantBackend, O: Recorded<B::Base, 2> + Recorded<B::Base, 3>>(
    operation: O,
    x: QuantTensor<B>,
    weight: QuantTensor<B>,
    bias: Option<QuantTensor<B>>,
) -> QuantTensor<B> {
    let (x, weight) = (x.into_primitive(), weight.into_primitive());
    QuantTensor::new(match bias.map(QuantTensor::into_primitive) {
        Some(bias) => B::record(operation, [x, weight, bias]),
        None => B::record(operation, [x, weight]),
    })
}
