//! The decorator's float primitive: the inner primitive plus a shared [tag](crate::layer::tag::Tag).

use std::sync::Arc;

use burn_backend::{
    DType, Shape, TensorMetadata, TensorPrimitive,
    tensor::{Device, FloatTensor},
};

use super::QuantTrain;
use crate::{
    data::{DataBackend, recorded::QuantBackend},
    layer::tag::{Tag, View},
    recipe::Recipe,
};

/// A float primitive of [`QuantTrain`]: clones share the tag, operations that change the value start a new one.
pub struct QuantTensor<B: QuantBackend> {
    primitive: FloatTensor<B>,
    tag: Arc<Tag<B::Base>>,
    view: View,
}

impl<B: QuantBackend> Clone for QuantTensor<B> {
    fn clone(&self) -> Self {
        Self {
            primitive: self.primitive.clone(),
            tag: self.tag.clone(),
            view: self.view,
        }
    }
}

impl<B: QuantBackend> std::fmt::Debug for QuantTensor<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuantTensor")
            .field("primitive", &self.primitive)
            .field("tag", &self.tag)
            .finish()
    }
}

impl<B: QuantBackend> TensorMetadata for QuantTensor<B> {
    fn dtype(&self) -> DType {
        self.primitive.dtype()
    }

    fn shape(&self) -> Shape {
        self.primitive.shape()
    }

    fn rank(&self) -> usize {
        self.primitive.rank()
    }
}

impl<B: QuantBackend> QuantTensor<B> {
    /// Wraps a primitive of the inner backend with a new, empty tag.
    pub fn new(primitive: FloatTensor<B>) -> Self {
        Self::with_tag(primitive, Arc::new(Tag::new()))
    }

    /// Wraps a primitive with a tag that describes this very value.
    pub fn with_tag(primitive: FloatTensor<B>, tag: Arc<Tag<B::Base>>) -> Self {
        Self {
            primitive,
            tag,
            view: View::Rows,
        }
    }

    /// The inner backend's primitive.
    pub fn primitive(&self) -> &FloatTensor<B> {
        &self.primitive
    }

    /// Unwraps the inner backend's primitive.
    pub fn into_primitive(self) -> FloatTensor<B> {
        self.primitive
    }

    /// The tag, shared with the clones of this tensor.
    pub fn tag(&self) -> &Arc<Tag<B::Base>> {
        &self.tag
    }

    /// How this tensor shows the matrix that the tag speaks of.
    pub fn view(&self) -> View {
        self.view
    }

    /// Applies an operation that re-wraps the value without changing it: the tag stays.
    pub fn map_same_value(self, operation: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self {
            primitive: operation(self.primitive),
            ..self
        }
    }

    /// Moves to a device. The layer goes with the tensor; compressed copies do not go to another device.
    pub fn to_device(self, device: &Device<B>) -> Self {
        let moves = B::float_device(&self.primitive) != *device;
        let primitive = B::float_to_device(self.primitive, device);
        let tag = match moves {
            true => Arc::new(self.tag.without_copies()),
            false => self.tag,
        };
        Self {
            primitive,
            tag,
            view: self.view,
        }
    }

    /// Wraps a primitive that was computed from a tensor of this [origin](Self::origin), if there is one.
    pub(crate) fn computed(primitive: FloatTensor<B>, origin: Option<Origin<B::Base>>) -> Self {
        match origin {
            Some((tag, shape)) if shape == primitive.shape() => {
                Self::with_tag(primitive, Arc::new(tag.descendant()))
            }
            _ => Self::new(primitive),
        }
    }

    /// Tag and shape of this tensor, if it is a layer's weight, or was computed from one.
    pub(crate) fn origin(&self) -> Option<Origin<B::Base>> {
        let of_layer = self.tag.lineage().is_some() && self.view == View::Rows;
        of_layer.then(|| (self.tag.clone(), self.shape()))
    }

    /// Starts or ends gradient tracking. The value stays, and so does the tag.
    ///
    /// Under autodiff a tensor whose gradient is asked for is a parameter. Burn's modules also ask without autodiff, in
    /// vain: such a model is for inference, and nothing of it is quantized.
    pub fn set_require_grad(self, require_grad: bool) -> Self {
        if require_grad && B::ad_enabled(&B::float_device(&self.primitive)) {
            self.tag.set_parameter();
        }
        self.map_same_value(|primitive| B::float_set_require_grad(primitive, require_grad))
    }

    /// Swaps two dimensions; swapping the last two of a matrix keeps the tag, in the other view.
    pub fn swap_dims(self, dim1: usize, dim2: usize) -> Self {
        let shape = self.shape();
        let rank = shape.num_dims();
        let matrix = rank >= 2
            && dim1 != dim2
            && dim1.max(dim2) == rank - 1
            && dim1.min(dim2) == rank - 2
            && shape[..rank - 2].iter().all(|&dim| dim == 1);
        let primitive = B::float_swap_dims(self.primitive, dim1, dim2);
        match (matrix, self.view) {
            (true, View::Rows) => Self {
                primitive,
                tag: self.tag,
                view: View::Transposed,
            },
            (true, View::Transposed) => Self {
                primitive,
                tag: self.tag,
                view: View::Rows,
            },
            (false, _) => Self::new(primitive),
        }
    }

    /// Reshapes; a shape that shows the same matrix keeps the tag.
    pub fn reshape(self, shape: Shape) -> Self {
        let keeps = match self.view {
            View::Rows => shape.last() == self.shape().last(),
            View::Transposed => same_matrix(&self.shape(), &shape),
        };
        let primitive = B::float_reshape(self.primitive, shape);
        match keeps {
            true => Self {
                primitive,
                tag: self.tag,
                view: self.view,
            },
            false => Self::new(primitive),
        }
    }
}

/// True if two shapes differ in leading dimensions of size 1 only.
fn same_matrix(a: &Shape, b: &Shape) -> bool {
    let trimmed = |shape: &Shape| -> Vec<usize> {
        shape.iter().copied().skip_while(|&dim| dim == 1).collect()
    };
    trimmed(a) == trimmed(b)
}

/// [`TensorPrimitive`] of the decorator as one of the inner backend.
pub(crate) fn lower_primitive<B: QuantBackend, R: Recipe>(
    tensor: TensorPrimitive<QuantTrain<B, R>>,
) -> TensorPrimitive<B> {
    match tensor {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor.into_primitive()),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
    }
}

/// [`TensorPrimitive`] of the inner backend as one of the decorator.
pub(crate) fn lift_primitive<B: QuantBackend, R: Recipe>(
    tensor: TensorPrimitive<B>,
) -> TensorPrimitive<QuantTrain<B, R>> {
    match tensor {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(QuantTensor::new(tensor)),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
    }
}

/// Tag and shape of a tensor that is a layer's weight, or was computed from one.
type Origin<B> = (Arc<Tag<B>>, Shape);

/// The origin of what is computed from operands with these; none where they belong to different layers.
pub(crate) fn one_origin<B: DataBackend, const N: usize>(
    origins: [Option<Origin<B>>; N],
) -> Option<Origin<B>> {
    let mut origins = origins.into_iter().flatten();
    let (tag, shape) = origins.next()?;
    let layer = tag.lineage()?;
    let of_layer = |other: &Tag<B>| other.lineage().is_some_and(|it| Arc::ptr_eq(it, layer));
    origins
        .all(|(other, _)| of_layer(&other))
        .then_some((tag.clone(), shape))
}
