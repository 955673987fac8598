//! Operations on tensors, and the backends that run them.

use std::fmt::Debug;

use burn_backend::{Backend, tensor::Device};

use super::{
    kernels::Kernels,
    tensors::{Bundle, On, Outline, Tensors},
};

/// An operation on tensors of a backend that holds data.
///
/// A value of the type is plain data, the settings of the operation; [`run`](Self::run) says what it does to tensors.
pub trait Operation: Clone + Debug + Send + Sync + 'static {
    /// Names the operation in a fused stream.
    const NAME: &'static str;
    /// The tensors that go in.
    type Inputs: Bundle<On<Outline> = Self::Inputs> + Clone + Send + Sync;
    /// The tensors that come out.
    type Outputs: Bundle<On<Outline> = Self::Outputs> + Clone + Send + Sync;

    /// Shapes and dtypes of what comes out.
    ///
    /// # Panics
    ///
    /// If the inputs are not those of the operation.
    fn outline<T: Tensors>(&self, inputs: &On<Self::Inputs, T>) -> Self::Outputs;

    /// Runs it.
    ///
    /// # Panics
    ///
    /// As the kernels that it calls.
    fn run<K: Kernels>(self, inputs: On<Self::Inputs, K>) -> On<Self::Outputs, K>;
}

/// A backend that holds data.
pub trait DataBackend: Backend {
    /// The backend whose kernels run: this one, or the one under its fused stream.
    type Kernels: Kernels<Device = Device<Self>>;

    /// Runs an operation.
    ///
    /// # Panics
    ///
    /// As the operation.
    fn run<O: Operation>(operation: O, inputs: On<O::Inputs, Self>) -> On<O::Outputs, Self>;
}
