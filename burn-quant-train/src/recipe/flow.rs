//! The flow between linear layers (jetfire-int8, section 3.2; coat-fp8, section 5.2).

use super::Cast;

/// The numbers in which values pass from one operator to the next.
///
/// Operators of a flow are layer normalization, RMSNorm, GELU, SwiGLU's gate, dropout and residual sums. Each reads its input rounded like
/// this, and keeps for the backward pass what it read: a value that several read is rounded once. Linear layers round
/// what they read by their own [row](super::LinearRow). Where gradients flow too, dropout and sums of a residual read a
/// linear layer's output so. All others read values as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The input of an operator, to nearest.
    pub activations: Cast,
    /// The cast of dX, which a linear layer gives back to the operator that made its input. `None`: as it is.
    pub gradients: Option<Cast>,
}
