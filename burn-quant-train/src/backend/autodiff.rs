//! `AutodiffBackend` over `Autodiff<B, C>`: gradients are the inner backend's, wrapped and unwrapped.

use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy, grads::Gradients};
use burn_backend::{
    AutodiffBackend,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};

use super::QuantTrain;
use super::tensor::QuantTensor;
use crate::{
    data::DataBackend,
    recipe::Recipe,
    saved::{Held, HeldTensor},
};

/// A gradient as a tensor of the backend without autodiff.
fn of_base<B: DataBackend>(gradient: HeldTensor<B>) -> QuantTensor<B> {
    QuantTensor::new(gradient.into_value())
}

impl<B: DataBackend, C: CheckpointStrategy, R: Recipe> AutodiffBackend
    for QuantTrain<Autodiff<B, C>, R>
{
    type InnerBackend = QuantTrain<B, R>;
    type Gradients = Gradients;

    fn backward(tensor: FloatTensor<Self>) -> Gradients {
        Self::compress_pending();
        <Autodiff<Held<B>, C> as AutodiffBackend>::backward(tensor.into_primitive())
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        <Autodiff<Held<B>, C> as AutodiffBackend>::grad(tensor.primitive(), grads).map(of_base)
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        <Autodiff<Held<B>, C> as AutodiffBackend>::grad_remove(tensor.primitive(), grads)
            .map(of_base)
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        <Autodiff<Held<B>, C> as AutodiffBackend>::grad_replace(
            tensor.primitive(),
            grads,
            HeldTensor::new(grad.into_primitive()),
        )
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        let origin = tensor.origin();
        let inner = <Autodiff<Held<B>, C> as AutodiffBackend>::inner(tensor.into_primitive());
        QuantTensor::same_value(inner.into_value(), origin)
    }

    fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Self::InnerBackend> {
        tensor
    }

    fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Self::InnerBackend> {
        tensor
    }

    fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self::InnerBackend> {
        tensor
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        let origin = tensor.origin();
        let tracked = <Autodiff<Held<B>, C> as AutodiffBackend>::from_inner(HeldTensor::new(
            tensor.into_primitive(),
        ));
        QuantTensor::same_value(tracked, origin)
    }

    fn int_from_inner(tensor: IntTensor<Self::InnerBackend>) -> IntTensor<Self> {
        tensor
    }

    fn bool_from_inner(tensor: BoolTensor<Self::InnerBackend>) -> BoolTensor<Self> {
        tensor
    }

    fn q_from_inner(tensor: QuantizedTensor<Self::InnerBackend>) -> QuantizedTensor<Self> {
        tensor
    }
}
