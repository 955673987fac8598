//! Float arithmetic that rounds where the source says, on every compiler.

use cubecl::prelude::*;

/// A product rounded to `f32` on its own, even where a sum follows.
///
/// NVRTC contracts `a * b + c` into one fused multiply-add, which rounds once where the specification rounds twice and
/// so moves values across rounding boundaries. Here the product is a fused multiply-add already, of a negative zero,
/// which changes no product: it comes from `zero`, a scalar argument of the launch that is always 0, so that the
/// compiler cannot know it, and no other sum can take its place. It costs no more than a product.
#[cube]
pub(crate) fn product(a: f32, b: f32, zero: u32) -> f32 {
    fma(a, b, f32::reinterpret(zero | NEGATIVE_ZERO))
}

const NEGATIVE_ZERO: u32 = 1 << 31;
