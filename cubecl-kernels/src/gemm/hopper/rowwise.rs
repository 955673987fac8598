//! Products of INT8 or FP8 matrices whose scales cover all of K, those of rows or of whole matrices, on `wgmma`:
//! rowwise and per-tensor scaling, of FP8 with [fast accumulation](crate::gemm::Accumulation::Fast).
//!
//! The result of INT8 is specified to the bit: the exact INT32 sum along K, rounded to FP32, times the FP32 product of
//! its two scales; where there are several parts of K, each gives such a number, and they are added in ascending order.
//! That of FP8 is the same but for the sum along K, which is as the tensor cores add it up.
//!
//! 1,345 to 1,413 TOP/s for M = N = K = 4,096 and 8,192 on one NVIDIA H100, 2026-11-26: the tensor cores are busy 81%
//! of the time (ncu).

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    cuda::source::{CudaSource, SourceText, launch_source},
    device::{or_unused, storage},
    gemm::{
        GemmArgs, GemmProblem,
        align::AlignedValues,
        blueprint::{Blueprint, HopperBlueprint, HopperTile},
        expected::LayerOperands,
        selector::Ranked,
        split_k,
    },
};

use super::{
    GemmNumbers, LayerSource, TiledProduct, UNITS, companions_of,
    fp8::{self, OperandKnobs},
    other_products,
    rounded::{Written, product_text},
    tensor_map,
};

/// Columns that are computed at once: those of the widest tile.
pub(super) const WHOLE_TILE: usize = 256;
/// Widths of tiles and their speeds beside one another.
///
/// With these, the cheapest width took 0.1% longer than the fastest one on average with scales of rows, 0.3% with those
/// of matrices, and 5% at most: 42 products each of 512 to 16,384 rows, N and K from 768 to 4,096, output in BF16, on
/// one NVIDIA H100, 2026-11-26.
pub(super) const SPEEDS: [(usize, f32); 4] = [(256, 1.0), (192, 0.92), (128, 0.78), (64, 0.5)];

/// The blueprints of a product.
pub(in crate::gemm) fn ranked<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &GemmProblem,
) -> [Ranked; SPEEDS.len()] {
    let product = TiledProduct::of(problem);
    HopperBlueprint::all(client, &product, WHOLE_TILE, SPEEDS).map(|(blueprint, cost)| Ranked {
        blueprint: Blueprint::HopperRowwise(blueprint),
        cost,
    })
}

pub(in crate::gemm) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    args: &GemmArgs<R>,
    blueprint: HopperBlueprint,
) {
    let AlignedValues {
        a,
        a_view,
        residual: _,
        b,
        b_view,
    } = AlignedValues::new(client, args);
    let numbers = GemmNumbers::of(args, &b_view, blueprint.parts);
    let maps = vec![
        tensor_map(&a, &a_view, HopperBlueprint::TILE_M),
        tensor_map(&b, &b_view, blueprint.tile.tile_n),
    ];
    let scales = args.rounded.as_ref().map(|it| &it.scales);
    split_k::in_parts(client, blueprint.parts, args.out, args.bias, |out, bias| {
        // SAFETY: `gemm` checked all shapes, from which the numbers come; the kernel guards its writes and its reads of
        // scales and bias with them. It reads the bias only where a knob says that there is one.
        #[allow(unsafe_code)]
        unsafe {
            launch_source(
                client,
                RowwiseSource {
                    tile: blueprint.tile,
                    fp8: None,
                    bias: bias.is_some(),
                    out: Written::to(out, args.rounded.as_ref()),
                },
                blueprint.cube_count(),
                maps,
                vec![
                    args.a.scales.clone(),
                    args.b.scales.clone(),
                    or_unused(bias, out, storage::<f32>()),
                    out.clone(),
                    or_unused(scales, out, storage::<f32>()),
                    a,
                    b,
                ],
                &numbers,
            );
        }
    });
}

/// `hopper/gemm_rowwise.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RowwiseSource {
    pub tile: HopperTile,
    /// The operands of a product of FP8; `None` of one of INT8.
    pub fp8: Option<[OperandKnobs; 2]>,
    pub bias: bool,
    pub out: Written,
}

impl CudaSource for RowwiseSource {
    type Numbers = GemmNumbers;

    const TEXT: &'static str = product_text!(
        "gemm/hopper/accumulate.cu",
        "gemm/hopper/scales.cu",
        "gemm/hopper/gemm_rowwise.cu"
    );
    const ENTRY_POINT: &'static str = "gemm_rowwise_hopper";

    fn units(&self) -> u32 {
        UNITS
    }

    fn knobs(&self) -> String {
        let operands = match &self.fp8 {
            Some(operands) => format!("#define FP8 1\n{}", OperandKnobs::knobs(operands)),
            None => "#define FP8 0\n#define A_E8M0 0\n#define B_E8M0 0\n".into(),
        };
        format!(
            "{}{operands}#define BIAS {}\n{}",
            self.tile.knobs(),
            u8::from(self.bias),
            self.out.knobs(),
        )
    }

    fn shared_memory(&self) -> usize {
        self.tile.shared_memory()
    }

    fn sizes(&self, numbers: &GemmNumbers) -> [usize; 4] {
        numbers.sizes()
    }

    fn companions<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> Vec<SourceText> {
        companions_of(
            client,
            self.out.dtype(),
            self.gradients(client, sizes, None),
        )
    }
}

impl LayerSource for RowwiseSource {
    fn blueprint<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
    ) -> HopperBlueprint {
        let product = TiledProduct::new(sizes, HopperBlueprint::DEPTH, true);
        HopperBlueprint::cheapest(client, &product, WHOLE_TILE, SPEEDS)
    }

    fn in_tile(self, tile: HopperTile, out_dtype: StorageType) -> Self {
        Self {
            tile,
            bias: false,
            out: Written::Floats(out_dtype),
            ..self
        }
    }

    fn gradients<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        sizes: [usize; 4],
        layer: Option<&LayerOperands>,
    ) -> Vec<SourceText> {
        if let Some(operands) = self.fp8 {
            let dtype = self.out.dtype();
            return fp8::gradients(client, self.tile, operands, dtype, sizes, layer);
        }
        let [of_input, of_weight] = other_products(sizes);
        vec![
            self.of(client, of_input, self.out.dtype()).text(),
            self.of(client, of_weight, storage::<f32>()).text(),
        ]
    }
}

/// The source of X W of INT8 with scales over all of K, in such a tile.
pub(super) fn of_tile(tile: HopperTile, out_dtype: StorageType) -> RowwiseSource {
    RowwiseSource {
        tile,
        fp8: None,
        bias: false,
        out: Written::Floats(out_dtype),
    }
}
