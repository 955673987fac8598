//! Float arithmetic in the device's cheapest instructions, good to about 1e-6, for finite operands.

use cubecl::prelude::*;

/// The base-2 logarithm of a positive normal number.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn log2(x: f32) -> f32 {
    x.ln() * std::f32::consts::LOG2_E
}

/// `2^x`, or 0 for one below the normal `f32`. CUDA takes the logarithm of the constant while it compiles, and is left
/// with the exponential.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn exp2(x: f32) -> f32 {
    let two = 2.0f32.runtime();
    two.powf(x)
}

/// `base^exponent` for a positive normal base, or 0 for a power below the normal `f32`.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn power(base: f32, exponent: f32) -> f32 {
    base.powf(exponent)
}

/// The square root of a number that is not negative, of infinity, or of NaN.
///
/// One below 1e-31 counts as up to 1e-38 more, so that 0 has no infinite inverse, and so does the inverse root, so that
/// infinity does not meet 0. Without the branch that a correctly rounded root has on CUDA, and without a maximum, which
/// would take NaN for the smaller one.
#[cube]
pub(crate) fn root(x: f32) -> f32 {
    let x = x + f32::MIN_POSITIVE;
    x * (x.inverse_sqrt() + f32::MIN_POSITIVE)
}

/// A quotient by a normal number, to two units in the last place, in a quarter of the instructions that a correctly
/// rounded one takes on CUDA; there a divisor above 2^126 gives 0.
#[cube(fast_math = FastMath::AllowReciprocal
    | FastMath::ReducedPrecision
    | FastMath::UnsignedZero
    | FastMath::NotInf)]
pub(crate) fn quotient(a: f32, b: f32) -> f32 {
    a / b
}

/// The device's own exponential, good to about `1.2e-7 (3 + 2 |x|)` of its value; NaN stays NaN.
#[cube(fast_math = FastMath::ReducedPrecision.into())]
pub(crate) fn exp(x: f32) -> f32 {
    x.exp()
}
