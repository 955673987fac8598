//! Kernels whose cheapest float functions, those of [`fast`](crate::fast), flush subnormal numbers to zero on CUDA.
//!
//! CubeCL passes no `-ftz` to CUDA's compiler, so its source of a kernel gets `flush_to_zero.cu` in front and calls
//! these functions. They take for 0 what `fast` does not define:
//!
//! - the argument of a logarithm or of an inverse root, which is a normal number there,
//! - a divisor, which is one too,
//! - a power, which may be 0 there.
//!
//! Sums, products, dividends and quotients are flushed nowhere. For normal numbers the functions give the bits of those
//! that they replace, but that CUDA's compiler may contract the product with an inverse, a quotient, with a sum.

use cubecl::{CompilationError, Compiler, CubeTask, prelude::*, server::KernelArguments};

/// The functions, as CUDA source.
const DEFINITIONS: &str = include_str!("flush_to_zero.cu");
/// What CubeCL writes, and what is called instead. A power of 2, which CUDA's compiler would tell from others by its
/// constant, comes before other powers.
const CALLS: [(&str, &str); 5] = [
    ("__powf(float(2.0), ", "exp2_ftz("),
    ("__powf(", "pow_ftz("),
    ("__logf(", "log_ftz("),
    ("__fdividef(", "divide_ftz("),
    // The space tells it from the inverse roots of half precision.
    (" rsqrt(", " rsqrt_ftz("),
];

/// Launches a kernel of the `cube` macro, on CUDA as one that flushes to zero.
///
/// # Safety
///
/// As CubeCL's `launch_unchecked` of the kernel with these arguments, which must be those of its parameters in order.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch_unchecked<R: Runtime, K: CubeKernel>(
    client: &ComputeClient<R>,
    count: CubeCount,
    kernel: K,
    arguments: KernelArguments,
) {
    let plain = KernelTask::new(kernel);
    let task: Box<dyn CubeTask<R::Compiler>> = if R::name(client) == "cuda" {
        Box::new(FlushToZero(plain))
    } else {
        Box::new(plain)
    };
    // SAFETY: the caller's.
    unsafe { client.launch_unchecked(task, count, arguments) }
}

/// A kernel whose source calls the functions that flush.
struct FlushToZero<C: Compiler, K: CubeKernel>(KernelTask<C, K>);

impl<C: Compiler, K: CubeKernel> KernelMetadata for FlushToZero<C, K> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn id(&self) -> KernelId {
        let id = self.0.id();
        let cube_dim = id.cube_dim;
        // Compiled kernels outlive the process in CubeCL's cache: another text must have another id.
        KernelId::new::<Self>()
            .info((id, DEFINITIONS, CALLS))
            .cube_dim(cube_dim)
    }

    fn address_type(&self) -> StorageType {
        self.0.address_type()
    }
}

impl<C: Compiler, K: CubeKernel> CubeTask<C> for FlushToZero<C, K> {
    fn compile(
        &self,
        compiler: &mut C,
        options: &C::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<C>, CompilationError> {
        let mut compiled = self.0.compile(compiler, options, mode, address_type)?;
        for (call, flushing) in CALLS {
            compiled.source = compiled.source.replace(call, flushing);
        }
        compiled.source.insert_str(0, DEFINITIONS);
        Ok(compiled)
    }
}
