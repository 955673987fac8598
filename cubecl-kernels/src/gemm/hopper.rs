//! The product on Hopper's warpgroup matrix instructions (`wgmma`), fed by its tensor memory accelerator (TMA).
//!
//! CubeCL has no `wgmma`, so the kernel is CUDA source, `hopper/gemm.cu`, behind a few `#define`s. CubeCL compiles it
//! through NVRTC for `sm_90a`, keeps it in its caches, encodes the tensor maps, and runs it on its memory and streams as
//! it does with its own kernels. What the kernel does, and why, is told in the source.
//!
//! It computes what [`tensor_core`](super::tensor_core) computes, in the same order and with the same roundings: an exact
//! INT32 product for each 128-deep block, times the FP32 product of its two scales, added with one fused multiply-add.

use std::hash::{DefaultHasher, Hash, Hasher};

use cubecl::{
    CompilationError, Compiler, CubeTask,
    ir::StorageType,
    prelude::*,
    server::{KernelArguments, MetadataBindingInfo, TensorMapBinding, TensorMapMeta},
    std::tensor::TensorHandle,
    zspace::{metadata::Metadata, shape, strides},
};

use crate::device::{MatrixView, storage, unused};

use super::{
    GemmArgs,
    align::{ALIGNMENT, align},
    blueprint::HopperBlueprint,
};

const SOURCE: &str = concat!(
    include_str!("hopper/common.cu"),
    include_str!("hopper/gemm.cu")
);
const ENTRY_POINT: &str = "gemm_hopper";
/// A producer and two consumer warpgroups.
const UNITS: u32 = 3 * 128;

impl HopperBlueprint {
    /// Rows of an output tile: those of a scale block, so that a block that falls back costs its own products only.
    pub const TILE_M: usize = 128;
    /// Depth of a stage: that of a scale block, and the 128 bytes that a row of swizzled shared memory holds.
    pub const DEPTH: usize = 128;

    /// Bytes of shared memory of one stage: an INT8 tile of A and of B.
    pub const fn stage_bytes(tile_n: usize) -> usize {
        (Self::TILE_M + tile_n) * Self::DEPTH
    }

    /// Output tiles of one matrix, along the rows and the columns.
    pub const fn tiles(tile_n: usize, m: usize, n: usize) -> (usize, usize) {
        (m.div_ceil(Self::TILE_M), n.div_ceil(tile_n))
    }
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    args: &GemmArgs<R>,
    blueprint: HopperBlueprint,
) {
    let problem = args.problem;
    let a = TmaOperand::new(client, &args.a.values, &args.a_view, problem.aligned.0);
    let b = TmaOperand::new(client, &args.b.values, &args.b_view, problem.aligned.1);
    let residual = args
        .fallback
        .map(|residual| TmaOperand::new(client, &residual.values, &args.a_view, problem.aligned.0));
    let residual = residual.as_ref().unwrap_or(&a);
    let operands = [
        (&a, HopperBlueprint::TILE_M),
        (residual, HopperBlueprint::TILE_M),
        (&b, blueprint.tile_n),
    ];
    let or_unused = |tensor: Option<&TensorHandle<R>>, dtype| {
        tensor.cloned().unwrap_or_else(|| unused(client, dtype))
    };
    let buffers = [
        args.a.scales.clone(),
        args.b.scales.clone(),
        or_unused(args.fallback.map(|r| &r.scales), storage::<f32>()),
        or_unused(args.fallback.map(|r| &r.flags), storage::<u32>()),
        or_unused(args.bias, storage::<f32>()),
        args.out.clone(),
    ]
    .into_iter()
    // The kernel reads these three through their tensor maps. CubeCL waits for the streams of plain buffers only.
    .chain(operands.iter().map(|(operand, _)| operand.values.clone()));
    let numbers = [
        [problem.batch, problem.m, problem.n, problem.k],
        scale_strides(&args.a_scales),
        scale_strides(&args.b_scales),
        [usize::from(b.view.shape.batch > 1), 0, 0, 0],
    ];
    let numbers: Vec<u64> = numbers.as_flattened().iter().map(|&x| x as u64).collect();
    let bindings = KernelArguments::new()
        .with_tensor_maps(
            operands
                .map(|(operand, rows)| operand.tensor_map(rows))
                .into(),
        )
        .with_buffers(buffers.map(|tensor| tensor.handle.binding()).collect())
        // With nothing dynamic in them, they travel by value, as one parameter.
        .with_info(MetadataBindingInfo::new(numbers.clone(), numbers.len()));
    let kernel = HopperKernel {
        blueprint,
        fallback: args.fallback.is_some(),
        bias: args.bias.is_some(),
        out_dtype: args.out.dtype,
    };
    let (tiles_m, tiles_n) = HopperBlueprint::tiles(blueprint.tile_n, problem.m, problem.n);
    let cubes = (problem.batch * tiles_m * tiles_n).min(blueprint.cubes);
    // SAFETY: reads through tensor maps are bounded by them, all others and the writes by the sizes in `numbers`, to
    // which all shapes were checked. Unused buffers are not read.
    #[allow(unsafe_code)]
    unsafe {
        client.launch_unchecked(
            Box::new(kernel),
            CubeCount::Static(cubes as u32, 1, 1),
            bindings,
        );
    }
}

/// Strides of scales in elements, those of a batch of one being 0, and a fourth number that fills the row.
fn scale_strides(view: &MatrixView) -> [usize; 4] {
    let batch = if view.shape.batch == 1 {
        0
    } else {
        view.batch_stride
    };
    [batch, view.row_stride, view.col_stride, 0]
}

/// INT8 matrices in the form that TMA takes: rows that start at multiples of 16 bytes.
struct TmaOperand<R: Runtime> {
    values: TensorHandle<R>,
    view: MatrixView,
}

impl<R: Runtime> TmaOperand<R> {
    fn new(
        client: &ComputeClient<R>,
        values: &TensorHandle<R>,
        view: &MatrixView,
        is_aligned: bool,
    ) -> Self {
        // Broadcast dimensions, of stride 0, have no tensor map.
        let (values, view) = if is_aligned && view.row_stride >= view.shape.cols {
            (values.clone(), *view)
        } else {
            align(client, values, view)
        };
        Self { values, view }
    }

    /// Tiles of `rows` x 128 bytes. What lies outside the matrix is read as 0.
    fn tensor_map(&self, rows: usize) -> TensorMapBinding {
        let shape = self.view.shape;
        let row_stride = self.view.row_stride.max(ALIGNMENT);
        let batch_stride = if shape.batch == 1 {
            shape.rows * row_stride
        } else {
            self.view.batch_stride
        };
        TensorMapBinding {
            binding: self.values.clone().handle.binding(),
            map: TensorMapMeta {
                format: TensorMapFormat::Tiled(TiledArgs {
                    tile_size: shape![1, rows, HopperBlueprint::DEPTH],
                }),
                metadata: Metadata::new(
                    shape![
                        shape.batch,
                        shape.rows,
                        shape.cols.next_multiple_of(ALIGNMENT)
                    ],
                    strides![batch_stride, row_stride, 1],
                ),
                elem_stride: strides![1; 3],
                interleave: TensorMapInterleave::None,
                swizzle: TensorMapSwizzle::B128,
                prefetch: TensorMapPrefetch::B256,
                oob_fill: OobFill::Zero,
                storage_ty: storage::<i8>(),
            },
        }
    }
}

/// The source with its knobs set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct HopperKernel {
    blueprint: HopperBlueprint,
    fallback: bool,
    bias: bool,
    out_dtype: StorageType,
}

impl HopperKernel {
    fn source(&self) -> String {
        let out = if self.out_dtype == storage::<f32>() {
            "OUT_F32"
        } else if self.out_dtype == storage::<half::f16>() {
            "OUT_F16"
        } else {
            "OUT_BF16"
        };
        format!(
            "#define TILE_N {}\n#define STAGES {}\n#define FALLBACK {}\n#define BIAS {}\n#define {out}\n{SOURCE}",
            self.blueprint.tile_n,
            self.blueprint.stages,
            u8::from(self.fallback),
            u8::from(self.bias),
        )
    }

    /// Bytes of shared memory that the source takes at its launch.
    fn shared_memory(&self) -> usize {
        self.blueprint.stages * HopperBlueprint::stage_bytes(self.blueprint.tile_n)
    }
}

impl KernelMetadata for HopperKernel {
    fn id(&self) -> KernelId {
        // Compiled kernels outlive the process in CubeCL's cache: another source must have another id.
        let mut hasher = DefaultHasher::new();
        SOURCE.hash(&mut hasher);
        KernelId::new::<Self>()
            .info((*self, hasher.finish()))
            .cube_dim(CubeDim::new_1d(UNITS))
    }

    fn address_type(&self) -> StorageType {
        storage::<u32>()
    }
}

impl<C: Compiler> CubeTask<C> for HopperKernel {
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
            bytes: self.shared_memory(),
        };
        let mut compiled = KernelTask::<C, Reservation>::new(reservation).compile(
            compiler,
            options,
            mode,
            address_type,
        )?;
        compiled.entrypoint_name = ENTRY_POINT.into();
        compiled.debug_name = Some(ENTRY_POINT);
        compiled.source = self.source();
        Ok(compiled)
    }
}

/// A kernel that has as many units and as much shared memory as the CUDA source, and does nothing of use.
struct Reservation {
    bytes: usize,
}

impl KernelMetadata for Reservation {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().info(self.bytes)
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
                .cube_dim(CubeDim::new_1d(UNITS))
                .kernel_name(ENTRY_POINT),
        )
    }
}

#[cube]
fn touch_shared_memory(#[comptime] bytes: usize) {
    let mut memory = SharedMemory::<u32>::new(comptime!(bytes / 4));
    memory[UNIT_POS as usize] = UNIT_POS;
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use cubecl::cuda::CudaCompiler;

    use super::*;

    /// CubeCL would launch a kernel without shared memory if it found none in the reservation.
    #[test]
    fn the_reservation_holds_the_shared_memory_of_the_source() {
        for (tile_n, stages) in [(128, 7), (256, 4)] {
            let kernel = HopperKernel {
                blueprint: HopperBlueprint {
                    tile_n,
                    stages,
                    cubes: 132,
                },
                fallback: true,
                bias: false,
                out_dtype: storage::<half::bf16>(),
            };
            let compiled = CubeTask::<CudaCompiler>::compile(
                &kernel,
                &mut Default::default(),
                &Default::default(),
                ExecutionMode::Unchecked,
                KernelMetadata::address_type(&kernel),
            )
            .expect("a kernel of CubeCL");
            let reserved = compiled
                .repr
                .expect("CubeCL's own kernel")
                .shared_memory_size();
            assert_eq!(reserved, stages * (128 + tile_n) * 128);
            assert_eq!(CubeDim::new_1d(384), compiled.cube_dim);
            assert!(
                compiled
                    .source
                    .contains(&format!("#define TILE_N {tile_n}\n"))
            );
        }
    }
}
