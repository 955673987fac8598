//! The backends that optimizers step on.

use std::sync::Arc;

use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn_backend::{
    AutodiffBackend, Backend,
    tensor::{Device, FloatTensor},
};

use crate::{
    QuantTrain,
    backend::tensor::QuantTensor,
    data::DataBackend,
    layer::tag::Tag,
    recipe::{Recipe, Row},
};

/// A backend whose parameters an optimizer steps: one that holds data, or the decorator over one.
pub trait ParameterBackend: Backend {
    /// The backend that holds the data.
    type Base: DataBackend<Device = Device<Self>>;

    /// Says of which parameter a tensor is a value.
    type Lineage;

    /// The lineage of a parameter, for its next value.
    fn lineage(parameter: &FloatTensor<Self>) -> Self::Lineage;

    /// Wraps the next value of a parameter: it belongs to the layer that the last one belonged to.
    fn successor(tensor: FloatTensor<Self::Base>, lineage: Self::Lineage) -> FloatTensor<Self>;

    /// Unwraps a tensor.
    fn into_base(tensor: FloatTensor<Self>) -> FloatTensor<Self::Base>;

    /// Wraps a tensor, as a value of its own.
    fn from_base(tensor: FloatTensor<Self::Base>) -> FloatTensor<Self>;
}

impl<B: DataBackend> ParameterBackend for B {
    type Base = B;

    type Lineage = ();

    fn lineage(_parameter: &FloatTensor<Self>) {}

    fn successor(tensor: FloatTensor<Self>, (): ()) -> FloatTensor<Self> {
        tensor
    }

    fn into_base(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn from_base(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }
}

impl<B: DataBackend, R: Recipe> ParameterBackend for QuantTrain<B, R> {
    type Base = B;

    type Lineage = Arc<Tag<B>>;

    fn lineage(parameter: &FloatTensor<Self>) -> Arc<Tag<B>> {
        Arc::new(parameter.tag().descendant())
    }

    fn successor(tensor: FloatTensor<B>, lineage: Arc<Tag<B>>) -> FloatTensor<Self> {
        QuantTensor::with_tag(tensor, lineage)
    }

    fn into_base(tensor: FloatTensor<Self>) -> FloatTensor<B> {
        tensor.into_primitive()
    }

    fn from_base(tensor: FloatTensor<B>) -> FloatTensor<Self> {
        QuantTensor::new(tensor)
    }
}

/// A backend that [`QuantOptimizer`](super::QuantOptimizer) trains on: [`QuantTrain`] over `Autodiff`, or `Autodiff`
/// itself, without layers.
///
/// So one training function, generic over this trait, serves a recipe and its baseline:
///
/// ```
/// use burn::{backend::{Autodiff, Flex}, module::AutodiffModule, optim::{GradientsParams, Optimizer}, tensor::Tensor};
/// use burn::nn::{Linear, LinearConfig};
/// use burn_quant_train::{QuantTrain, optim::{LayerBackend, QuantAdamWConfig}, recipe::BlockInt8};
///
/// fn train<B: LayerBackend>(model: Linear<B>) -> Linear<B> {
///     let mut optim = QuantAdamWConfig::new().init::<B, Linear<B>>();
///     let model = optim.attach(model);
///     let loss = model.forward(Tensor::<B, 2>::ones([4, 128], &Default::default())).square().mean();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     optim.step(1e-3, model, gradients)
/// }
///
/// train::<Autodiff<Flex>>(LinearConfig::new(128, 128).init(&Default::default()));
/// train::<QuantTrain<Autodiff<Flex>, BlockInt8<f32>>>(LinearConfig::new(128, 128).init(&Default::default()));
/// ```
pub trait LayerBackend:
    AutodiffBackend<InnerBackend: ParameterBackend<Base = <Self as LayerBackend>::Base>>
{
    /// The backend that holds the data.
    type Base: DataBackend<Device = Device<Self>>;

    /// The recipe's row; `None` without a recipe.
    ///
    /// # Panics
    ///
    /// As [`Recipe::row`].
    fn row() -> Option<Row>;

    /// The tag of a float primitive; `None` where tensors have none.
    fn tag(tensor: &FloatTensor<Self>) -> Option<&Arc<Tag<Self::Base>>>;

    /// The same value with another tag, where tensors have one.
    fn with_tag(tensor: FloatTensor<Self>, tag: Arc<Tag<Self::Base>>) -> FloatTensor<Self>;
}

impl<B: DataBackend, C: CheckpointStrategy, R: Recipe> LayerBackend
    for QuantTrain<Autodiff<B, C>, R>
{
    type Base = B;

    fn row() -> Option<Row> {
        Some(R::row())
    }

    fn tag(tensor: &FloatTensor<Self>) -> Option<&Arc<Tag<B>>> {
        Some(tensor.tag())
    }

    fn with_tag(tensor: FloatTensor<Self>, tag: Arc<Tag<B>>) -> FloatTensor<Self> {
        QuantTensor::with_tag(tensor.into_primitive(), tag)
    }
}

impl<B: DataBackend, C: CheckpointStrategy> LayerBackend for Autodiff<B, C> {
    type Base = B;

    fn row() -> Option<Row> {
        None
    }

    fn tag(_tensor: &FloatTensor<Self>) -> Option<&Arc<Tag<B>>> {
        None
    }

    fn with_tag(tensor: FloatTensor<Self>, _tag: Arc<Tag<B>>) -> FloatTensor<Self> {
        tensor
    }
}
