//! Takes the parameters of a step out of a module, and puts them back.

use std::collections::HashMap;

use burn::{
    grad_clipping::GradientClipping,
    module::{ModuleMapper, Param, ParamId},
    optim::adaptor::GradAdaptor,
    tensor::{Tensor, TensorPrimitive},
};
use burn_backend::{
    AutodiffBackend, Backend, FloatDType, Shape, TensorMetadata, ops::FloatTensorOps,
    tensor::FloatTensor,
};

use super::backend::ParameterBackend;
use crate::data::cast_to;

/// The backend that holds the data of an optimizer's parameters.
pub(super) type Base<B> = <<B as AutodiffBackend>::InnerBackend as ParameterBackend>::Base;

/// Where a parameter is in its module.
pub(super) struct Place {
    pub path: String,
    /// Among all float parameters, in module order.
    pub index: u64,
}

impl Place {
    /// The path as messages show it.
    pub fn name(&self) -> String {
        format!("`{}`", self.path)
    }
}

/// A parameter taken out of the module for the step.
pub(super) struct Taken<B: Backend> {
    pub id: ParamId,
    pub place: Place,
    pub parameter: FloatTensor<B>,
    pub gradient: FloatTensor<B>,
}

/// Takes the parameters that have gradients out of a module, so that nothing else holds their buffers.
pub(super) struct Take<B: AutodiffBackend<InnerBackend: ParameterBackend>> {
    grads: GradAdaptor,
    /// The path of the module that is being mapped.
    path: Vec<String>,
    /// Float parameters seen so far.
    parameters: u64,
    taken: Vec<Taken<Base<B>>>,
}

impl<B: AutodiffBackend<InnerBackend: ParameterBackend>> Take<B> {
    pub fn new(grads: GradAdaptor) -> Self {
        Self {
            grads,
            path: Vec::new(),
            parameters: 0,
            taken: Vec::new(),
        }
    }

    /// The parameters, in module order.
    pub fn into_taken(self) -> Vec<Taken<Base<B>>> {
        self.taken
    }
}

impl<B: AutodiffBackend<InnerBackend: ParameterBackend>> ModuleMapper<B> for Take<B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let index = self.parameters;
        self.parameters += 1;
        let Some((gradient, device)) = self.grads.remove::<B::InnerBackend, D>(id) else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        // A moved tensor is no leaf any more: ask before.
        let trained = tensor.is_require_grad();
        let tensor = match tensor.device() == device {
            true => tensor,
            false => tensor.to_device(&device),
        };
        let parameter = primitive::<B, D>(tensor.inner());
        let lineage = B::InnerBackend::lineage(&parameter);
        self.taken.push(Taken {
            id,
            place: Place {
                path: self.path.join("."),
                index,
            },
            parameter: B::InnerBackend::into_base(parameter),
            gradient: B::InnerBackend::into_base(primitive::<B, D>(gradient)),
        });
        // Keeps the place, its lineage, and whether the parameter is trained.
        let empty = Base::<B>::float_empty(Shape::new([1; D]), &device, FloatDType::F32);
        Param::from_mapped_value(id, successor(empty, lineage, trained), mapper)
    }
}

/// The gradient clipped by value, divided by the scale of the loss if it has one: in FP32, where nothing is lost by that.
/// Clipping does not depend on the rank.
pub(super) fn clip_by_value<B: AutodiffBackend<InnerBackend: ParameterBackend>>(
    bound: f32,
    gradient: FloatTensor<Base<B>>,
    loss_scale: Option<FloatTensor<Base<B>>>,
) -> FloatTensor<Base<B>> {
    let shape = gradient.shape();
    let flat = Shape::new([shape.num_elements()]);
    let gradient = Base::<B>::float_reshape(gradient, flat);
    let gradient = match loss_scale {
        Some(scale) => {
            let scale = Base::<B>::float_to_device(scale, &Base::<B>::float_device(&gradient));
            let gradient = cast_to::<Base<B>>(gradient, Some(FloatDType::F32));
            Base::<B>::float_div(gradient, scale)
        }
        None => gradient,
    };
    let gradient = B::InnerBackend::from_base(gradient);
    let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(gradient));
    let clipped = primitive::<B, 1>(GradientClipping::Value(bound).clip_gradient(gradient));
    Base::<B>::float_reshape(B::InnerBackend::into_base(clipped), shape)
}

fn primitive<B: AutodiffBackend<InnerBackend: ParameterBackend>, const D: usize>(
    tensor: Tensor<B::InnerBackend, D>,
) -> FloatTensor<B::InnerBackend> {
    let TensorPrimitive::Float(primitive) = tensor.into_primitive() else {
        unreachable!(
            "a float parameter and its gradient hold float primitives while it is trained"
        );
    };
    primitive
}

/// The next value of a parameter.
fn successor<B: AutodiffBackend<InnerBackend: ParameterBackend>, const D: usize>(
    value: FloatTensor<Base<B>>,
    lineage: <B::InnerBackend as ParameterBackend>::Lineage,
    trained: bool,
) -> Tensor<B, D> {
    let primitive = TensorPrimitive::Float(B::InnerBackend::successor(value, lineage));
    let tensor = Tensor::from_inner(Tensor::from_primitive(primitive));
    match trained {
        true => tensor.require_grad(),
        false => tensor,
    }
}

/// Puts the updated parameters back.
pub(super) struct PutBack<B: AutodiffBackend<InnerBackend: ParameterBackend>> {
    pub updated: HashMap<ParamId, FloatTensor<Base<B>>>,
}

impl<B: AutodiffBackend<InnerBackend: ParameterBackend>> ModuleMapper<B> for PutBack<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(updated) = self.updated.remove(&param.id) else {
            return param;
        };
        let (id, place, mapper) = param.consume();
        let trained = place.is_require_grad();
        let lineage = B::InnerBackend::lineage(&primitive::<B, D>(place.inner()));
        Param::from_mapped_value(id, successor(updated, lineage, trained), mapper)
    }
}
