//! `AutodiffBackend` over `Autodiff<B, C>`: gradients are the inner backend's, wrapped and unwrapped.

use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy, grads::Gradients};
use burn_backend::{
    AutodiffBackend,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};

use super::QuantTrain;
use super::tensor::QuantTensor;
use crate::{data::DataBackend, recipe::Recipe};

impl<B: DataBackend, C: CheckpointStrategy, R: Recipe> AutodiffBackend
    for QuantTrain<Autodiff<B, C>, R>
{
    type InnerBackend = QuantTrain<B, R>;
    type Gradients = Gradients;

    fn backward(tensor: FloatTensor<Self>) -> Gradients {
        <Autodiff<B, C> as AutodiffBackend>::backward(tensor.into_primitive())
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        <Autodiff<B, C> as AutodiffBackend>::grad(tensor.primitive(), grads).map(QuantTensor::new)
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        <Autodiff<B, C> as AutodiffBackend>::grad_remove(tensor.primitive(), grads)
            .map(QuantTensor::new)
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        <Autodiff<B, C> as AutodiffBackend>::grad_replace(
            tensor.primitive(),
            grads,
            grad.into_primitive(),
        )
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        let origin = tensor.origin();
        let inner = <Autodiff<B, C> as AutodiffBackend>::inner(tensor.into_primitive());
        QuantTensor::computed(inner, origin)
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
        let tracked = <Autodiff<B, C> as AutodiffBackend>::from_inner(tensor.into_primitive());
        QuantTensor::computed(tracked, origin)
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
