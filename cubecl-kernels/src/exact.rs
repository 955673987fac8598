//! Float arithmetic that rounds where the source says, on every compiler.

use cubecl::prelude::*;

/// A product rounded to `f32` on its own, even where a sum follows.
///
/// NVRTC contracts `a * b + c` into one fused multiply-add, which rounds once where the specification rounds twice
/// and so moves values across rounding boundaries. Between the product and the sum stands an exclusive or of the
/// product's bits with `zero`, a scalar argument of the launch that is always 0: the compiler cannot know it, so it
/// cannot contract. It costs one integer instruction.
#[cube]
pub(crate) fn product(a: f32, b: f32, zero: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(a * b) ^ zero)
}
