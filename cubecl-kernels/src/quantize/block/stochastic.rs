//! The kernel of CUDA source for what a training step quantizes most: whole tiles with a transposed stochastic copy.
//!
//! CubeCL names no byte permutation, no maximum of pairs and none of a warp, without which the rounding takes more
//! instructions than memory leaves time for. So this kernel is CUDA source, `stochastic.cu`, and tells there what it does,
//! and why; the portable kernel beside it is its specification, and does everything else.
//!
//! On one NVIDIA H200, 2026-11-22, CUDA events around 200 launches, median of 9, BF16: X with a residual in each fifth block
//! takes 12.6 microseconds at 2048 x 4096 and 42.9 at 8192 x 4096, where the portable kernel takes 15.7 and 48.1; dY 9.1 and
//! 38.1 instead of 11.1 and 39.2. Drawn early, X of 8192 x 4096 took 46 instead of 44 in `qt-bench quantize`.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use half::{bf16, f16};

use crate::{
    cuda_source::{CudaSource, launch_source},
    device::{MatrixView, or_unused, read_width_up_to, storage},
    format::{STOCHASTIC_OFFSET, StochasticKey},
    quantize::staged::TILE,
};

use super::{BlockOutput, Round};

/// Cubes along the second and the third dimension of a launch.
const MAX_CUBES: usize = 65_535;
/// Bytes read at once.
const VECTOR_BYTES: usize = 16;

/// Cubes that share a multiprocessor: those whose tiles fit into the shared memory of Hopper's.
fn cubes(dtype: StorageType) -> usize {
    if dtype.size() == 2 { 4 } else { 2 }
}

/// `stochastic.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StochasticSource {
    dtype: StorageType,
    row_stochastic: bool,
    fallback: bool,
    /// Whether all tiles are on the device at once, where random words are drawn before they have landed.
    draw_early: bool,
}

impl StochasticSource {
    /// The kernel that quantizes `x` so, if it can, and the device has it: CUDA's sm_80 and later, which alone copy
    /// asynchronously.
    pub fn select<R: Runtime>(
        client: &ComputeClient<R>,
        x: &TensorHandle<R>,
        view: &MatrixView,
        block: usize,
        output: &BlockOutput<R>,
    ) -> Option<Self> {
        let (_, row_major) = output.row_major?;
        let (_, transposed) = output.transposed?;
        let properties = client.properties();
        let shape = view.shape;
        let multiprocessors = properties.hardware.num_streaming_multiprocessors;
        let at_once = cubes(x.dtype) * multiprocessors.unwrap_or(1) as usize;
        let source = Self {
            dtype: x.dtype,
            row_stochastic: row_major == Round::Stochastic,
            fallback: output.fallback.is_some(),
            draw_early: shape.num_elements() <= at_once * TILE * TILE,
        };
        let vector = VECTOR_BYTES / x.dtype.size();
        let fits = R::name(client) == "cuda"
            && properties.features.copy_async
            && source.shared_memory() <= properties.hardware.max_shared_memory_size
            && block == TILE
            && transposed == Round::Stochastic
            && !(source.row_stochastic && source.fallback)
            && shape.rows % TILE == 0
            && shape.cols % TILE == 0
            && shape.rows / TILE <= MAX_CUBES
            && shape.batch <= MAX_CUBES
            && read_width_up_to(vector, x, view) == vector;
        fits.then_some(source)
    }

    pub fn launch<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        x: &TensorHandle<R>,
        view: &MatrixView,
        key: StochasticKey,
        output: &BlockOutput<R>,
    ) {
        let shape = view.shape;
        let fallback = output.fallback.as_ref();
        let optional = |tensor: Option<&TensorHandle<R>>, dtype| or_unused(tensor, x, dtype);
        let cubes = CubeCount::Static(
            (shape.cols / TILE) as u32,
            (shape.rows / TILE) as u32,
            shape.batch as u32,
        );
        launch_source(
            client,
            self,
            cubes,
            Vec::new(),
            vec![
                x.clone(),
                optional(output.row_major.map(|(tensor, _)| tensor), storage::<i8>()),
                optional(output.transposed.map(|(tensor, _)| tensor), storage::<i8>()),
                output.scales.clone(),
                optional(fallback.map(|fallback| fallback.values), storage::<i8>()),
                optional(fallback.map(|fallback| fallback.scales), storage::<f32>()),
                optional(fallback.map(|fallback| fallback.flags), storage::<u32>()),
                optional(
                    fallback.map(|fallback| fallback.thresholds),
                    storage::<f32>(),
                ),
                optional(fallback.map(|fallback| fallback.counts), storage::<i32>()),
            ],
            vec![
                shape.rows as u64,
                shape.cols as u64,
                view.batch_stride as u64,
                view.row_stride as u64,
                fallback.map_or(0, |fallback| fallback.layer.into()),
                key.seed,
                key.stream,
                STOCHASTIC_OFFSET.to_bits().into(),
            ],
        );
    }
}

impl CudaSource for StochasticSource {
    const TEXT: &'static str = include_str!("stochastic.cu");
    const ENTRY_POINT: &'static str = "quantize_stochastic";
    const UNITS: u32 = 256;

    fn knobs(&self) -> String {
        let input = if self.dtype == storage::<bf16>() {
            "IN_BF16"
        } else if self.dtype == storage::<f16>() {
            "IN_F16"
        } else {
            "IN_F32"
        };
        format!(
            "#define {input}\n#define ROW_STOCHASTIC {}\n#define FALLBACK {}\n#define CUBES {}\n#define DRAW_EARLY {}",
            u8::from(self.row_stochastic),
            u8::from(self.fallback),
            cubes(self.dtype),
            u8::from(self.draw_early),
        )
    }

    /// The elements of a tile, and the bytes of its transposed copy.
    fn shared_memory(&self) -> usize {
        TILE * TILE * (self.dtype.size() + 1)
    }
}
