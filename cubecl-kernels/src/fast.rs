//! Float arithmetic in the device's cheapest instructions, good to about 1e-6, for finite operands.

use cubecl::prelude::*;

/// The natural logarithm of a positive normal number.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn ln(x: f32) -> f32 {
    x.ln()
}

/// The exponential function.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn exp(x: f32) -> f32 {
    x.exp()
}

/// A quotient to two units in the last place, in a quarter of the instructions that a correctly rounded one takes on CUDA;
/// there a divisor above 2^126 gives 0.
#[cube(fast_math = FastMath::AllowReciprocal
    | FastMath::ReducedPrecision
    | FastMath::UnsignedZero
    | FastMath::NotInf)]
pub(crate) fn quotient(a: f32, b: f32) -> f32 {
    a / b
}
