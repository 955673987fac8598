//! The answer of a launcher to inputs that it cannot work on.

/// Why an operation was not launched. Every message names the operation, what it got, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The shapes of the inputs are not of the right rank, or do not fit each other.
    #[error("{operation}: got {got}; {remedy}")]
    Shape {
        /// The function that was called.
        operation: &'static str,
        /// The offending shapes, with the names of their tensors.
        got: String,
        /// The inputs to pass instead.
        remedy: &'static str,
    },
    /// An input has, or the output was asked to have, an element type that the operation does not take.
    #[error("{operation}: {tensor} has element type {dtype}; {remedy}")]
    Dtype {
        /// The function that was called.
        operation: &'static str,
        /// The tensor of that element type.
        tensor: &'static str,
        /// The element type.
        dtype: String,
        /// The inputs to pass instead.
        remedy: &'static str,
    },
    /// The parameters, or the device, rule the operation out.
    #[error("{operation}: {reason}; {remedy}")]
    Unsupported {
        /// The function that was called.
        operation: &'static str,
        /// The reason that rules it out.
        reason: String,
        /// The way to go instead.
        remedy: &'static str,
    },
}
