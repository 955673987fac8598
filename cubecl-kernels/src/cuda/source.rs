//! CUDA source as a kernel of CubeCL.

use std::{fmt::Debug, hash::Hash};

use cubecl::{
    CompilationError, Compiler, CubeTask,
    ir::StorageType,
    prelude::*,
    server::{KernelArguments, MetadataBindingInfo, TensorMapBinding},
    std::tensor::TensorHandle,
};

use crate::device::storage;

use super::{fingerprint::fnv_1a, numbers::Numbers};

/// CUDA source with its knobs set: a value of this type is one kernel.
///
/// CubeCL's cache of compiled kernels knows it by the fields in their order and by the fingerprints of two texts: the
/// declaration of the numbers, and the kernel's own. So the knobs, the units and the shared memory must follow from
/// the fields alone, and a change of how they do must come with one of the text.
pub(crate) trait CudaSource: Debug + Copy + Eq + Hash + Send + Sync + 'static {
    /// The numbers of a launch. Their declaration comes behind the knobs.
    type Numbers: Numbers;

    /// The text, which reads the knobs as macros, and takes the structure `Numbers` as its last parameter.
    const TEXT: &'static str;
    /// The name of the kernel in the text, a function `extern "C"`.
    const ENTRY_POINT: &'static str;
    /// Units of a cube: 256 but where the fields say otherwise.
    fn units(&self) -> u32 {
        256
    }

    /// The lines that define the macros.
    fn knobs(&self) -> String;

    /// Bytes of shared memory that the kernel takes at its launch, beside what it declares.
    fn shared_memory(&self) -> usize {
        0
    }

    /// What CubeCL compiles.
    fn text(&self) -> SourceText {
        SourceText {
            entry_point: Self::ENTRY_POINT,
            source: format!(
                "{}\n{}{}",
                self.knobs(),
                Self::Numbers::DECLARATION,
                Self::TEXT
            ),
        }
    }

    /// The sizes that companions follow from; all 0 where it takes none. They are a product's batch, M, N and K,
    /// or the heads of queries that share one of keys, and those of them that a block takes.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    fn sizes(&self, _numbers: &Self::Numbers) -> [usize; 4] {
        [0; 4]
    }

    /// Kernels that programs which launch this one, on matrices of these sizes, are likely to launch later:
    /// [`compile_ahead`](crate::compile_ahead).
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        vec![]
    }
}

/// A source as NVRTC reads it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SourceText {
    pub entry_point: &'static str,
    pub source: String,
}

/// The name of an element type in knobs, behind `IN_` or `OUT_`.
pub(crate) fn float_knob(dtype: StorageType) -> &'static str {
    if dtype == storage::<f32>() {
        "F32"
    } else if dtype == storage::<half::f16>() {
        "F16"
    } else {
        "BF16"
    }
}

/// Launches a kernel with the parameters: tensor maps, a pointer for each of them, buffers, and the numbers.
///
/// Tensors that are read through tensor maps must be among the buffers too: CubeCL waits for the streams of these only.
///
/// # Safety
///
/// For these cubes and numbers, the kernel stays inside its buffers, which have the types of its parameters. Reads
/// through tensor maps need no care: the maps bound them.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch_source<R: Runtime, S: CudaSource>(
    client: &ComputeClient<R>,
    source: S,
    cubes: CubeCount,
    tensor_maps: Vec<TensorMapBinding>,
    buffers: Vec<TensorHandle<R>>,
    numbers: &S::Numbers,
) {
    #[cfg(feature = "cuda")]
    crate::compile_ahead::anticipate(client, &source, numbers);
    let numbers = numbers.words();
    let static_length = numbers.len();
    let buffers = buffers.into_iter().map(|b| b.handle.binding()).collect();
    let bindings = KernelArguments::new()
        .with_tensor_maps(tensor_maps)
        .with_buffers(buffers)
        // With nothing dynamic in them, the numbers travel by value.
        .with_info(MetadataBindingInfo::new(numbers, static_length));
    // SAFETY: the caller's, who answers for every access.
    unsafe {
        client.launch_unchecked(Box::new(SourceKernel(source)), cubes, bindings);
    }
}

/// The kernel of a source.
#[derive(Debug, Clone, Copy)]
struct SourceKernel<S>(S);

impl<S: CudaSource> SourceKernel<S> {
    /// Compiled kernels outlive the process in CubeCL's cache: another text must have another id.
    const FINGERPRINTS: [u64; 2] = [fnv_1a(S::Numbers::DECLARATION), fnv_1a(S::TEXT)];
}

impl<S: CudaSource> KernelMetadata for SourceKernel<S> {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>()
            .info((self.0, Self::FINGERPRINTS))
            .cube_dim(CubeDim::new_1d(self.0.units()))
    }

    fn address_type(&self) -> StorageType {
        storage::<u32>()
    }
}

impl<S: CudaSource, C: Compiler> CubeTask<C> for SourceKernel<S> {
    /// CubeCL takes the shared memory of a launch from the representation of a kernel that it compiled itself: that of
    /// [`Reservation`], whose source is then replaced.
    fn compile(
        &self,
        compiler: &mut C,
        options: &C::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<C>, CompilationError> {
        let reservation = Reservation {
            units: self.0.units(),
            bytes: self.0.shared_memory(),
        };
        let mut compiled = KernelTask::<C, Reservation>::new(reservation).compile(
            compiler,
            options,
            mode,
            address_type,
        )?;
        let SourceText {
            entry_point,
            source,
        } = self.0.text();
        compiled.entrypoint_name = entry_point.into();
        compiled.debug_name = Some(entry_point);
        compiled.source = source;
        Ok(compiled)
    }
}

/// A kernel that has as many units and as much shared memory as the CUDA source, and does nothing of use.
struct Reservation {
    units: u32,
    bytes: usize,
}

impl KernelMetadata for Reservation {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().info((self.units, self.bytes))
    }

    fn address_type(&self) -> StorageType {
        storage::<u32>()
    }
}

impl CubeKernel for Reservation {
    fn define(&self) -> KernelDefinition {
        let mut builder = KernelBuilder::default();
        AddressType::U32.register(&mut builder.scope);
        touch_shared_memory::expand(&mut builder.scope, self.bytes);
        builder.build(
            KernelSettings::default()
                .cube_dim(CubeDim::new_1d(self.units))
                .kernel_name("reservation"),
        )
    }
}

#[cube]
fn touch_shared_memory(#[comptime] bytes: usize) {
    if comptime!(bytes > 0) {
        let mut memory = SharedMemory::<u32>::new(comptime!(bytes / 4));
        memory[UNIT_POS as usize] = UNIT_POS;
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use cubecl::cuda::CudaCompiler;

    use super::*;
    use crate::cuda::numbers::numbers;

    numbers! {
        struct ExampleNumbers {
            rows: u64,
        }
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    struct Example {
        stages: usize,
    }

    impl CudaSource for Example {
        type Numbers = ExampleNumbers;

        const TEXT: &'static str = "extern \"C\" __global__ void example() {}";
        const ENTRY_POINT: &'static str = "example";

        fn units(&self) -> u32 {
            96
        }

        fn knobs(&self) -> String {
            format!("#define STAGES {}", self.stages)
        }

        fn shared_memory(&self) -> usize {
            self.stages * 49_152
        }
    }

    /// CubeCL would launch a kernel without shared memory if it found none in the reservation.
    #[test]
    fn the_reservation_holds_the_shared_memory_of_the_source() {
        for stages in [1, 4] {
            let kernel = SourceKernel(Example { stages });
            let compiled = CubeTask::<CudaCompiler>::compile(
                &kernel,
                &mut Default::default(),
                &Default::default(),
                ExecutionMode::Unchecked,
                KernelMetadata::address_type(&kernel),
            )
            .expect("a kernel of CubeCL");
            let reservation = compiled.repr.expect("CubeCL's own kernel");
            assert_eq!(reservation.shared_memory_size(), stages * 49_152);
            assert_eq!(compiled.cube_dim, CubeDim::new_1d(96));
            assert_eq!(compiled.entrypoint_name, "example");
            let declaration = ExampleNumbers::DECLARATION;
            let expected = format!("#define STAGES {stages}\n{declaration}{}", Example::TEXT);
            assert_eq!(compiled.source, expected);
        }
    }
}
