//! The decorator's float primitive: the inner primitive plus a shared [tag](crate::layer::tag::Tag).

use std::sync::Arc;

use burn_backend::{DType, Shape, TensorMetadata, ops::FloatTensorOps, tensor::Device};

use super::composition::Waiting;
use crate::{
    data::DataBackend,
    layer::tag::{Tag, View},
    saved::{
        cell::Handle,
        recorded::{InsideTensor, QuantBackend},
    },
};

/// A float primitive of [`QuantTrain`](super::QuantTrain): clones share the tag, operations that change the value start
/// a new one.
pub struct QuantTensor<B: QuantBackend> {
    value: Value<B>,
    tag: Arc<Tag<B::Base>>,
    view: View,
}

/// The value of a tensor.
enum Value<B: QuantBackend> {
    // The primitive before the handle: a cell settles when all that holds it waits for the backward pass.
    Ready(InsideTensor<B>, Handle),
    /// One of a composition that may be one operation as a whole.
    Waiting(Arc<Waiting<B>>),
}

impl<B: QuantBackend> Clone for Value<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Ready(primitive, handle) => Self::Ready(primitive.clone(), handle.clone()),
            Self::Waiting(waiting) => Self::Waiting(waiting.clone()),
        }
    }
}

impl<B: QuantBackend> Clone for QuantTensor<B> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            tag: self.tag.clone(),
            view: self.view,
        }
    }
}

impl<B: QuantBackend> std::fmt::Debug for QuantTensor<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("QuantTensor");
        match &self.value {
            Value::Ready(primitive, _) => out.field("primitive", primitive),
            Value::Waiting(waiting) => out.field("waiting", waiting),
        };
        out.field("tag", &self.tag).finish()
    }
}

impl<B: QuantBackend> TensorMetadata for QuantTensor<B> {
    fn dtype(&self) -> DType {
        match &self.value {
            Value::Ready(primitive, _) => primitive.dtype(),
            Value::Waiting(waiting) => waiting.dtype(),
        }
    }

    fn shape(&self) -> Shape {
        match &self.value {
            Value::Ready(primitive, _) => primitive.shape(),
            Value::Waiting(waiting) => waiting.shape(),
        }
    }
}

impl<B: QuantBackend> QuantTensor<B> {
    /// Wraps a primitive of the inner backend with a new, empty tag.
    pub fn new(primitive: InsideTensor<B>) -> Self {
        Self::with_tag(primitive, Arc::new(Tag::new()))
    }

    /// Wraps a primitive with a tag that describes this very value.
    pub fn with_tag(primitive: InsideTensor<B>, tag: Arc<Tag<B::Base>>) -> Self {
        Self::with_view(primitive, tag, View::Rows)
    }

    fn with_view(primitive: InsideTensor<B>, tag: Arc<Tag<B::Base>>, view: View) -> Self {
        let handle = Handle::on(B::cell(&primitive));
        Self {
            value: Value::Ready(primitive, handle),
            tag,
            view,
        }
    }

    /// A tensor whose value is computed when it is read.
    pub(super) fn waiting(waiting: Waiting<B>) -> Self {
        Self {
            value: Value::Waiting(Arc::new(waiting)),
            tag: Arc::new(Tag::new()),
            view: View::Rows,
        }
    }

    /// A value that has not been computed yet.
    pub(super) fn as_waiting(&self) -> Option<&Waiting<B>> {
        match &self.value {
            Value::Ready(..) => None,
            Value::Waiting(waiting) => waiting.pending(),
        }
    }

    /// The inner backend's primitive.
    pub fn primitive(&self) -> &InsideTensor<B> {
        match &self.value {
            Value::Ready(primitive, _) => primitive,
            Value::Waiting(waiting) => waiting.value().primitive(),
        }
    }

    /// Where it lies, or will lie.
    pub fn device(&self) -> Device<B> {
        match &self.value {
            Value::Ready(primitive, _) => <B::Inside>::float_device(primitive),
            Value::Waiting(waiting) => waiting.device(),
        }
    }

    /// Unwraps the inner backend's primitive, for an operation that takes it.
    pub fn into_primitive(self) -> InsideTensor<B> {
        self.into_parts().0
    }

    /// The primitive, the tag and the view.
    fn into_parts(self) -> (InsideTensor<B>, Arc<Tag<B::Base>>, View) {
        let Self { value, tag, view } = self;
        let primitive = match value {
            Value::Ready(primitive, handle) => {
                handle.consume();
                primitive
            }
            Value::Waiting(waiting) => Waiting::into_value(waiting).into_primitive(),
        };
        (primitive, tag, view)
    }

    /// Keeps the value as it is until the backward pass.
    pub(crate) fn keep_exact(&self) {
        if let Some(cell) = B::cell(self.primitive()) {
            cell.keep_exact();
        }
    }

    /// Keeps the value as it is, and those from which it was computed elementwise: a loss ends in it.
    pub(crate) fn keep_loss(&self) {
        if let Some(cell) = B::cell(self.primitive()) {
            cell.keep_loss();
        }
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
    pub fn map_same_value(
        self,
        operation: impl FnOnce(InsideTensor<B>) -> InsideTensor<B>,
    ) -> Self {
        let (primitive, tag, view) = self.into_parts();
        Self::with_view(operation(primitive), tag, view)
    }

    /// Moves to a device. The layer goes with the tensor; compressed copies do not go to another device.
    pub fn to_device(self, device: &Device<B>) -> Self {
        let moves = self.device() != *device;
        let (primitive, tag, view) = self.into_parts();
        let primitive = <B::Inside>::float_to_device(primitive, device);
        let tag = match moves {
            true => Arc::new(tag.without_copies()),
            false => tag,
        };
        Self::with_view(primitive, tag, view)
    }

    /// Wraps a primitive that was computed from a tensor of this [origin](Self::origin), if there is one.
    pub(crate) fn computed(primitive: InsideTensor<B>, origin: Option<Origin<B::Base>>) -> Self {
        match origin {
            Some((tag, shape)) if shape == primitive.shape() => {
                Self::with_tag(primitive, Arc::new(tag.descendant()))
            }
            _ => Self::new(primitive),
        }
    }

    /// Wraps a primitive that has the value of a tensor of this [origin](Self::origin), if there is one.
    pub(crate) fn same_value(primitive: InsideTensor<B>, origin: Option<Origin<B::Base>>) -> Self {
        match origin {
            Some((tag, _)) => Self::with_tag(primitive, Arc::new(tag.of_same_value())),
            None => Self::new(primitive),
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
        if require_grad && B::RECORDS {
            self.tag.set_parameter();
            self.keep_exact();
        }
        self.map_same_value(|primitive| {
            <B::Inside>::float_set_require_grad(primitive, require_grad)
        })
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
        let (primitive, tag, view) = self.into_parts();
        let primitive = <B::Inside>::float_swap_dims(primitive, dim1, dim2);
        match (matrix, view) {
            (true, View::Rows) => Self::with_view(primitive, tag, View::Transposed),
            (true, View::Transposed) => Self::with_view(primitive, tag, View::Rows),
            (false, _) => Self::new(primitive),
        }
    }

    /// Reshapes; a shape that shows the same matrix keeps the tag.
    pub fn reshape(self, shape: Shape) -> Self {
        let keeps = match self.view {
            View::Rows => shape.last() == self.shape().last(),
            View::Transposed => same_matrix(&self.shape(), &shape),
        };
        let (primitive, tag, view) = self.into_parts();
        let primitive = <B::Inside>::float_reshape(primitive, shape);
        match keeps {
            true => Self::with_view(primitive, tag, view),
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
