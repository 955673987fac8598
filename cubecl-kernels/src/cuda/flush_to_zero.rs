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

use cubecl::{CompilationError, Compiler, CubeTask, prelude::*};

use super::fingerprint::fnv_1a;

/// The functions, as CUDA source.
const DEFINITIONS: &str = include_str!("flush_to_zero.cu");
const FINGERPRINT: u64 = fnv_1a(DEFINITIONS);
/// The calls that CubeCL writes for `f32`, the only float that these kernels compute in, and those in their place. A
/// power of 2, which CUDA's compiler would tell from others by its constant, comes before other powers.
const CALLS: [(&str, &str); 5] = [
    ("__powf(float(2.0), ", "exp2_ftz("),
    ("__powf(", "pow_ftz("),
    ("__logf(", "log_ftz("),
    ("__fdividef(", "divide_ftz("),
    // The space tells it from the inverse roots of half precision.
    (" rsqrt(", " rsqrt_ftz("),
];

/// The task of a kernel, on CUDA as one that flushes to zero.
pub(crate) fn task<R: Runtime, K: CubeKernel>(
    client: &ComputeClient<R>,
    kernel: K,
) -> Box<dyn CubeTask<R::Compiler>> {
    let plain = KernelTask::new(kernel);
    if R::name(client) == "cuda" {
        Box::new(FlushToZero(plain))
    } else {
        Box::new(plain)
    }
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
        KernelId::new::<Self>()
            .info((id, FINGERPRINT, CALLS))
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

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use cubecl::cuda::CudaCompiler;

    use super::*;
    use crate::{device::storage, fast};

    #[cube]
    fn divide_by_power(x: &mut Array<f32>) {
        x[0] = fast::quotient(x[0], fast::exp2(x[1]));
    }

    struct Example;

    impl KernelMetadata for Example {
        fn id(&self) -> KernelId {
            KernelId::new::<Self>().cube_dim(CubeDim::new_1d(64))
        }

        fn address_type(&self) -> StorageType {
            storage::<u32>()
        }
    }

    impl CubeKernel for Example {
        fn define(&self) -> KernelDefinition {
            let mut builder = KernelBuilder::default();
            AddressType::U32.register(&mut builder.scope);
            let x = builder.output_array(f32::as_type(&builder.scope));
            divide_by_power::expand(&mut builder.scope, x.into());
            builder.build(KernelSettings::default().cube_dim(CubeDim::new_1d(64)))
        }
    }

    fn source(task: &impl CubeTask<CudaCompiler>) -> String {
        let mut options = <CudaCompiler as Compiler>::CompilationOptions::default();
        options.supports_features.fast_math = true;
        task.compile(
            &mut Default::default(),
            &options,
            ExecutionMode::Unchecked,
            task.address_type(),
        )
        .expect("a kernel of CubeCL")
        .source
    }

    #[test]
    fn calls_are_replaced_and_nothing_else() {
        let plain = source(&KernelTask::new(Example));
        assert_eq!(plain.matches("= __powf(float(2.0), ").count(), 1, "{plain}");
        assert_eq!(plain.matches("= __fdividef(").count(), 1, "{plain}");
        let expected = plain
            .replace("__powf(float(2.0), ", "exp2_ftz(")
            .replace("__fdividef(", "divide_ftz(");
        let flushing = source(&FlushToZero(KernelTask::new(Example)));
        assert_eq!(flushing, format!("{DEFINITIONS}{expected}"));
    }

    /// CubeCL keeps one compiled kernel for each id.
    #[test]
    fn the_id_tells_it_from_the_plain_kernel() {
        let plain = KernelMetadata::id(&KernelTask::<CudaCompiler, _>::new(Example));
        let flushing = FlushToZero::<CudaCompiler, _>(KernelTask::new(Example)).id();
        assert!(plain != flushing);
        assert_ne!(plain.stable_hash(), flushing.stable_hash());
        assert_eq!(plain.cube_dim, flushing.cube_dim);
    }
}
