//! Float arithmetic in the device's cheapest instructions, good to about 1e-6, for finite operands.

use cubecl::{ir::NonSemantic, prelude::*};

/// Whether a kernel of this runtime may call [`flush_to_zero`].
pub(crate) fn flushes<R: Runtime>(client: &ComputeClient<R>) -> bool {
    R::name(client).starts_with("cuda")
}

/// From here on to the end of the kernel the functions of this module take a number below the normal `f32` for zero,
/// and give zero for one, where `flushes`.
///
/// CUDA has an instruction for each of them, which flushes; beside it the compiler puts three that scale such numbers
/// out of the way and back, a fifth of an AdamW step's instructions. CubeCL neither names the bare instructions nor
/// passes a compiler option. So the kernel's source defines them, and the functions' names anew: in a comment, the one
/// text that CubeCL takes as it is, which ends before the definitions and begins again behind them.
#[cube]
#[allow(unused_variables, reason = "the macro reads the scope")]
pub(crate) fn flush_to_zero(#[comptime] flushes: bool) {
    intrinsic!(|scope| {
        if flushes {
            let content = CUDA_FLUSH_TO_ZERO.to_string();
            scope.register(NonSemantic::Comment { content });
        }
    });
}

const CUDA_FLUSH_TO_ZERO: &str = r#"
*/
const auto exp2_ftz = [](float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; };
const auto log2_ftz = [](float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; };
const auto inverse_ftz = [](float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; };
const auto rsqrt_ftz = [](float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; };
#define __expf(x) exp2_ftz((x) * 1.4426950408889634f)
#define __logf(x) (log2_ftz(x) * 0.6931471805599453f)
#define __powf(x, y) exp2_ftz(log2_ftz(x) * (y))
#define __fdividef(x, y) ((x) * inverse_ftz(y))
#define rsqrt(x) rsqrt_ftz(x)
/*
"#;

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

/// `base^exponent` for a positive normal base.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn power(base: f32, exponent: f32) -> f32 {
    base.powf(exponent)
}

/// The square root of a number that is not negative, or of NaN; one below 1e-31 counts as up to 1e-38 more, so that 0 has no
/// infinite inverse. Without the branch that a correctly rounded root has on CUDA, and without a maximum, which would take
/// NaN for the smaller one.
#[cube]
pub(crate) fn root(x: f32) -> f32 {
    let x = x + f32::MIN_POSITIVE;
    x * x.inverse_sqrt()
}

/// A quotient to two units in the last place, in a quarter of the instructions that a correctly rounded one takes on
/// CUDA; there a divisor above 2^126 gives 0.
#[cube(fast_math = FastMath::AllowReciprocal
    | FastMath::ReducedPrecision
    | FastMath::UnsignedZero
    | FastMath::NotInf)]
pub(crate) fn quotient(a: f32, b: f32) -> f32 {
    a / b
}
