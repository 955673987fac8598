//! Every tensor-core kernel, compiled on a machine without a GPU for the architectures that it is meant for.
//!
//! The kernels come out of the launches themselves, by way of a runtime that compiles and does not run.
#![cfg(feature = "cuda")]

mod nvrtc;
mod offline;

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use cubecl_kernels::{
    fallback::FallbackResidual,
    gemm::{GemmOperand, Strategy, gemm},
};
use half::{bf16, f16};
use rstest::rstest;

use nvrtc::Nvrtc;
use offline::{OfflineCuda, Source, max_shared_memory, sources_of};

type Client = ComputeClient<OfflineCuda>;
type Tensor = TensorHandle<OfflineCuda>;

fn dtype<E: CubePrimitive>() -> StorageType {
    E::as_type_native_unchecked().storage_type()
}

fn tensor(client: &Client, shape: &[usize], dtype: StorageType) -> Tensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    TensorHandle::new_contiguous(shape.to_vec(), client.empty(bytes), dtype)
}

/// What a kernel depends on.
#[derive(Clone, Copy)]
struct Case {
    block: usize,
    /// Rows, columns and depth.
    size: usize,
    has_fallback: bool,
    has_bias: bool,
    out: StorageType,
}

/// The loop over K depends on the block, the tile, the fallback and how rows are aligned (16, 8 bytes or less, which is
/// copied first); the stores depend on the rest.
fn cases() -> Vec<Case> {
    let case = |block, size, has_fallback| Case {
        block,
        size,
        has_fallback,
        has_bias: false,
        out: dtype::<bf16>(),
    };
    let mut cases = Vec::new();
    for block in [32, 64, 128] {
        for size in [256, 4096] {
            for has_fallback in [false, true] {
                cases.push(case(block, size, has_fallback));
            }
        }
    }
    cases.extend([
        case(32, 248, true),
        case(128, 248, false),
        case(128, 4088, true),
    ]);
    for (size, has_bias, out) in [
        (255, false, dtype::<bf16>()),
        (255, true, dtype::<f32>()),
        (256, true, dtype::<f16>()),
        (256, false, dtype::<f32>()),
    ] {
        cases.push(Case {
            has_bias,
            out,
            ..case(128, size, false)
        });
    }
    cases
}

fn launch(client: &Client, case: Case) {
    let Case { block, size, .. } = case;
    let blocks = size.div_ceil(block);
    let values = || tensor(client, &[size, size], dtype::<i8>());
    let scales = || tensor(client, &[blocks, blocks], dtype::<f32>());
    let operand = GemmOperand {
        values: values(),
        scales: scales(),
        rows_per_scale: block,
        depth_per_scale: block,
    };
    let residual = FallbackResidual {
        values: values(),
        scales: scales(),
        flags: tensor(client, &[blocks, blocks], dtype::<u32>()),
        block,
    };
    let bias = tensor(client, &[size], dtype::<f32>());
    gemm(
        client,
        &operand,
        &operand,
        case.has_fallback.then_some(&residual),
        case.has_bias.then_some(&bias),
        case.out,
        Strategy::TensorCore,
    )
    .expect("a device with tensor cores");
}

fn tensor_core_sources(architecture: u16) -> Vec<Source> {
    let cases = cases();
    let mut sources = sources_of(architecture, |client| {
        cases.iter().for_each(|&case| launch(client, case));
    });
    sources.retain(|source| source.name.starts_with("gemm_tensor_core"));
    assert_eq!(sources.len(), cases.len());
    sources
}

#[rstest]
fn sources_use_the_instructions_and_fit_the_memory(#[values(80, 89, 90, 120)] architecture: u16) {
    for source in tensor_core_sources(architecture) {
        for instruction in [
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
            "ldmatrix.sync.aligned.m8n8",
            "cp.async.cg.shared",
        ] {
            assert!(source.code.contains(instruction), "{}", source.code);
        }
        let available = max_shared_memory(architecture);
        assert!(
            source.shared_memory <= available,
            "sm_{architecture}: {} of {available} bytes of shared memory",
            source.shared_memory
        );
    }
}

/// Compiles as CubeCL does at run time, for the architecture itself where it is older than Hopper, else with the
/// instructions of this architecture alone.
#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_every_kernel(
    #[values((80, "sm_80"), (89, "sm_89"), (90, "sm_90a"), (120, "sm_120a"))] target: (u16, &str),
) {
    let (architecture, name) = target;
    let nvrtc = Nvrtc::load();
    for source in tensor_core_sources(architecture) {
        let code = nvrtc.compile(&source.code, name);
        let code = code.unwrap_or_else(|log| panic!("{name}: {log}\n{}", source.code));
        assert!(code.starts_with(b"\x7fELF"), "{name}: no machine code");
    }
}
