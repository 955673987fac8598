//! Puts layers on the weights of a module, for good: whatever Burn does to the module, a weight keeps its layer.
//!
//! | Burn changes a module by | the layer stays since |
//! | --- | --- |
//! | drawing a lazy parameter | attaching waits for the draw, and leaves the order of draws to the model |
//! | `fork`, `to_device`, `clone`, `no_grad`, `valid` and `train` | the tag goes with the value |
//! | `map` of values: clipping, EMA, a foreign optimizer | a tag remembers from which weight a value was computed |
//! | `load_record`, `load_file`, a `Learner` that resumes | the parameter's load mapper, which Burn keeps and calls |
//!
//! Values that come from elsewhere have no layer until the next step attaches the model again.

use std::sync::Arc;

use burn::{
    module::{ModuleMapper, Param, ParamMapper},
    tensor::{Tensor, TensorPrimitive},
};

use super::{backend::LayerBackend, layers::Layers};
use crate::{
    layer::{Layer, tag::Tag},
    warning::warn_once,
};

/// Puts layers on the tags of a module's weights.
pub(super) struct Attach<'a, B: LayerBackend> {
    pub layers: &'a Layers<B::Base>,
    /// True where the user asked for it, and not in passing, at a step. Then load mappers that Burn dropped come back,
    /// and weights of another optimizer become this one's.
    pub asked: bool,
}

/// The layer of a weight beside the one that is to be put on it.
enum Standing {
    /// Tensors have no tags.
    Untagged,
    /// It is the same.
    Attached,
    /// It is stepped by another optimizer.
    OfAnother,
    /// There is none, or its optimizer is gone.
    Free,
}

impl<B: LayerBackend> ModuleMapper<B> for Attach<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(layer) = self.layers.of(&param.id) else {
            return param;
        };
        // A weight that the step left alone keeps its tag, and with it its quantized copies.
        let stays = match param.is_initialized().then(|| standing(&param, layer)) {
            Some(Standing::Untagged) => true,
            Some(Standing::Attached) => !self.asked,
            Some(Standing::OfAnother) => {
                if !self.asked {
                    say_of_another();
                }
                !self.asked
            }
            Some(Standing::Free) | None => false,
        };
        if stays {
            return param;
        }
        let mapper = mapper_of(&param);
        let loaded = mapper.on_load(blank(&param));
        let loads = matches!(standing(&loaded, layer), Standing::Attached);
        let of_layer = layer.clone();
        let param = param.init_mapper(move |tensor| attached(tensor, &of_layer));
        if loads {
            return param;
        }
        let of_layer = layer.clone();
        param.load_mapper(move |tensor| attached(mapper.on_load(tensor), &of_layer))
    }
}

/// Warns once that a step left layers to the optimizer that they belong to.
fn say_of_another() {
    warn_once!(
        "quant-train: a `QuantOptimizer` stepped weights whose layers belong to another one, which keeps them. Call \
         `attach(model)` of the optimizer that the layers are to follow."
    );
}

/// The tensor as the layer's weight.
fn attached<B: LayerBackend, const D: usize>(
    tensor: Tensor<B, D>,
    layer: &Arc<Layer<B::Base>>,
) -> Tensor<B, D> {
    if matches!(standing(&tensor, layer), Standing::Attached) {
        return tensor;
    }
    let TensorPrimitive::Float(primitive) = tensor.into_primitive() else {
        unreachable!("a float parameter holds a float primitive while it is trained");
    };
    let tag = Tag::with_layer(layer.clone());
    let is_parameter = B::tag(&primitive).is_some_and(|tag| tag.is_parameter());
    if is_parameter {
        tag.set_parameter();
    }
    let primitive = B::with_tag(primitive, Arc::new(tag));
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn standing<B: LayerBackend, const D: usize>(
    tensor: &Tensor<B, D>,
    layer: &Arc<Layer<B::Base>>,
) -> Standing {
    let TensorPrimitive::Float(primitive) = tensor.clone().into_primitive() else {
        return Standing::Untagged;
    };
    let Some(tag) = B::tag(&primitive) else {
        return Standing::Untagged;
    };
    match tag.layer() {
        Some(known) if Arc::ptr_eq(known, layer) => Standing::Attached,
        Some(known) if !Arc::ptr_eq(known.bank(), layer.bank()) && known.bank().is_owned() => {
            Standing::OfAnother
        }
        Some(_) | None => Standing::Free,
    }
}

/// The mapper of a parameter.
///
/// Burn shows it only together with a value. A clone into which a blank value is loaded shows it without drawing the
/// parameter's own.
fn mapper_of<B: LayerBackend, const D: usize>(
    param: &Param<Tensor<B, D>>,
) -> ParamMapper<Tensor<B, D>> {
    let loaded = param.clone().transform_for_load(blank(param), param.id);
    let (_, _, mapper) = loaded.consume();
    mapper
}

/// A tensor of the parameter's shape, its values undefined.
fn blank<B: LayerBackend, const D: usize>(param: &Param<Tensor<B, D>>) -> Tensor<B, D> {
    Tensor::empty(param.lazy_shape(), &param.lazy_device())
}
