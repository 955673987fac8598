//! Values built of tensors, on any kind of tensors.
//!
//! An operation's inputs and outputs are structs with tensors in them. A fused stream needs three forms of such a
//! value: with its own tensors, with those of the backend under it, and with their shapes and dtypes alone. So the
//! structs are generic over [`Tensors`], and each says once, in [`Bundle::rebuild`], where its tensors are.

use std::fmt::Debug;

use burn_backend::{
    Backend, DType, Shape, TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

/// A kind of tensors: those of a backend, or stand-ins for them.
pub trait Tensors: 'static {
    /// A tensor of floats.
    type Float: TensorMetadata + 'static;
    /// A tensor of integers.
    type Int: TensorMetadata + 'static;
    /// A tensor of truth values.
    type Bool: TensorMetadata + 'static;
}

impl<B: Backend> Tensors for B {
    type Float = FloatTensor<B>;
    type Int = IntTensor<B>;
    type Bool = BoolTensor<B>;
}

/// Shapes and dtypes in the place of tensors.
#[derive(Debug, Clone, Copy)]
pub struct Outline;

impl Tensors for Outline {
    type Float = FloatMeta;
    type Int = IntMeta;
    type Bool = BoolMeta;
}

/// Shape and dtype of a tensor, of the kind that a letter names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta<const KIND: char> {
    shape: Shape,
    dtype: DType,
}

/// Shape and dtype of a tensor of floats.
pub type FloatMeta = Meta<'f'>;
/// Shape and dtype of a tensor of integers.
pub type IntMeta = Meta<'i'>;
/// Shape and dtype of a tensor of truth values.
pub type BoolMeta = Meta<'b'>;

impl<const KIND: char> Meta<KIND> {
    /// The shape and dtype of a tensor to come.
    pub fn new(shape: impl Into<Shape>, dtype: impl Into<DType>) -> Self {
        Self {
            shape: shape.into(),
            dtype: dtype.into(),
        }
    }

    /// The shape and dtype of `tensor`.
    pub fn of(tensor: &impl TensorMetadata) -> Self {
        Self::new(tensor.shape(), tensor.dtype())
    }
}

impl<const KIND: char> TensorMetadata for Meta<KIND> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }
}

/// Turns each tensor of one kind into one of another.
pub trait Change<S: Tensors, T: Tensors> {
    /// A tensor of floats.
    fn float(&mut self, tensor: S::Float) -> T::Float;

    /// A tensor of integers.
    fn int(&mut self, tensor: S::Int) -> T::Int;

    /// A tensor of truth values.
    fn bool(&mut self, tensor: S::Bool) -> T::Bool;
}

/// A value with tensors in it.
///
/// A bundle is named by its outline: `Quantized<Outline>` stands for the `Quantized<T>` of every kind `T`.
pub trait Bundle: 'static {
    /// The value on tensors of this kind.
    type On<T: Tensors>;

    /// The same value on other tensors. Visits the tensors in an order that depends on the value's form only.
    fn rebuild<S: Tensors, T: Tensors>(
        bundle: Self::On<S>,
        change: &mut impl Change<S, T>,
    ) -> Self::On<T>;
}

/// A bundle on tensors of a kind.
pub type On<B, T> = <B as Bundle>::On<T>;

impl Bundle for FloatMeta {
    type On<T: Tensors> = T::Float;

    fn rebuild<S: Tensors, T: Tensors>(
        tensor: S::Float,
        change: &mut impl Change<S, T>,
    ) -> T::Float {
        change.float(tensor)
    }
}

impl Bundle for IntMeta {
    type On<T: Tensors> = T::Int;

    fn rebuild<S: Tensors, T: Tensors>(tensor: S::Int, change: &mut impl Change<S, T>) -> T::Int {
        change.int(tensor)
    }
}

impl<A: Bundle> Bundle for Option<A> {
    type On<T: Tensors> = Option<A::On<T>>;

    fn rebuild<S: Tensors, T: Tensors>(
        bundle: Option<A::On<S>>,
        change: &mut impl Change<S, T>,
    ) -> Option<A::On<T>> {
        bundle.map(|bundle| A::rebuild(bundle, change))
    }
}

impl<A: Bundle> Bundle for Vec<A> {
    type On<T: Tensors> = Vec<A::On<T>>;

    fn rebuild<S: Tensors, T: Tensors>(
        bundle: Vec<A::On<S>>,
        change: &mut impl Change<S, T>,
    ) -> Vec<A::On<T>> {
        bundle
            .into_iter()
            .map(|bundle| A::rebuild(bundle, change))
            .collect()
    }
}

impl<A: Bundle, B: Bundle> Bundle for (A, B) {
    type On<T: Tensors> = (A::On<T>, B::On<T>);

    fn rebuild<S: Tensors, T: Tensors>(
        (a, b): (A::On<S>, B::On<S>),
        change: &mut impl Change<S, T>,
    ) -> (A::On<T>, B::On<T>) {
        // In this order: both maps visit tensors.
        let a = A::rebuild(a, change);
        (a, B::rebuild(b, change))
    }
}

/// The bytes of all tensors of a value of which there is an outline.
pub(crate) fn bytes<A: Bundle>(outline: On<A, Outline>) -> usize {
    bytes_of::<A, Outline>(outline)
}

/// The bytes of all tensors of a value.
pub(crate) fn bytes_of<A: Bundle, T: Tensors>(value: On<A, T>) -> usize {
    struct Sum(usize);

    impl Sum {
        fn add<const KIND: char>(&mut self, tensor: &impl TensorMetadata) -> Meta<KIND> {
            self.0 += tensor.shape().num_elements() * tensor.dtype().size();
            Meta::of(tensor)
        }
    }

    impl<T: Tensors> Change<T, Outline> for Sum {
        fn float(&mut self, tensor: T::Float) -> FloatMeta {
            self.add(&tensor)
        }

        fn int(&mut self, tensor: T::Int) -> IntMeta {
            self.add(&tensor)
        }

        fn bool(&mut self, tensor: T::Bool) -> BoolMeta {
            self.add(&tensor)
        }
    }

    let mut sum = Sum(0);
    A::rebuild::<T, Outline>(value, &mut sum);
    sum.0
}

/// Rows and columns of a matrix.
///
/// # Panics
///
/// If it does not have two dimensions.
pub(crate) fn matrix_shape<T: TensorMetadata>(matrix: &T, operation: &str) -> [usize; 2] {
    let shape = matrix.shape();
    match shape.as_slice() {
        &[rows, cols] => [rows, cols],
        dims => panic!(
            "{operation}: expected a matrix, got shape {dims:?}; flatten the leading dimensions"
        ),
    }
}

/// Rows and columns of a tensor whose dimensions but the last are rows.
pub(crate) fn flattened(shape: &Shape) -> [usize; 2] {
    let (cols, rows) = shape
        .split_last()
        .expect("a matrix has at least one dimension");
    [rows.iter().product(), *cols]
}

/// All dimensions but the last as rows.
pub(crate) fn flatten<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    match shape.num_dims() {
        2 => tensor,
        _ => B::float_reshape(tensor, Shape::new(flattened(&shape))),
    }
}
