//! The product on INT8 matrix instructions.
//!
//! A cube computes a square tile of the output, each of its planes a rectangle of it. One item of work is one block
//! along K, `block` deep: its base product or, right after it where a block of the tile's rows fell back, its residual
//! product. So the items of a tile form one sequence, and its length depends on the flags. The copies of the items to
//! come run ahead of the products in a ring of stages in shared memory:
//!
//! - All units copy 16 bytes at a time (`cp.async`) and arrive at the stage's barrier when their copies have landed.
//! - A turn waits for its stage, then for all units to have left the stage of the turn before, refills that one, and
//!   multiplies. Copies strewn among the matrix instructions are slower: on Hopper each group of them waits until
//!   shared memory was read.
//! - Rows of a stage are stored with their 16-byte chunks permuted, so that the eight rows that `ldmatrix` reads at
//!   once lie in different banks.
//!
//! Every product starts at zero in INT32 and is added to the FP32 sums, times the scales of its blocks. The residual of
//! a block that did not fall back is undefined, but its scale is 0: it adds nothing.

use cubecl::{
    ir::StorageType,
    prelude::{barrier::*, *},
    std::tensor::TensorHandle,
};
use half::f16;

use crate::device::{Strides, cube_grid, or_unused, storage};

use super::{
    GemmArgs,
    align::{ALIGNMENT, AlignedValues},
    blueprint::TensorCoreBlueprint,
};

mod output;
mod products;
mod ring;
mod work;

use output::{add_bias, write_sums};
use products::multiply;
use ring::{Ring, arrive, fill, first_stage, next_stage, wait};
use work::{Item, advance, load_flags, tile_origin};

const PLANE: usize = 32;
/// Shape of a matrix instruction.
const MMA_M: usize = 16;
const MMA_N: usize = 8;
const MMA_K: usize = 32;

/// Sizes of a product and strides of its tensors, those of the values in bytes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Geometry {
    batch: u32,
    m: u32,
    n: u32,
    /// Length of a row, a multiple of [`ALIGNMENT`].
    k: u32,
    a: Strides,
    b: Strides,
    a_scales: Strides,
    b_scales: Strides,
}

impl TensorCoreBlueprint {
    /// Planes along the rows and the columns of a tile.
    const fn planes(&self) -> (usize, usize) {
        (self.tile / self.plane_tile.0, self.tile / self.plane_tile.1)
    }

    /// Units of a cube.
    const fn units(&self) -> usize {
        self.planes().0 * self.planes().1 * PLANE
    }

    /// 16-byte chunks of a row of a stage.
    const fn chunks(&self) -> usize {
        self.block / ALIGNMENT
    }

    /// 16-byte chunks of one operand in one stage.
    const fn operand_chunks(&self) -> usize {
        self.tile * self.chunks()
    }

    /// Bytes of shared memory of one stage, both operands.
    pub(super) const fn stage_bytes(tile: usize, block: usize) -> usize {
        2 * tile * block
    }

    /// Copies of a unit for one operand of a stage.
    const fn copies(&self) -> usize {
        self.operand_chunks() / self.units()
    }

    /// Instructions along the rows and the columns of a plane's tile.
    const fn fragments(&self) -> (usize, usize) {
        (self.plane_tile.0 / MMA_M, self.plane_tile.1 / MMA_N)
    }

    /// Row blocks of a cube's tile.
    const fn row_blocks(&self) -> usize {
        self.tile.div_ceil(self.block)
    }

    /// Blocks along the rows and the columns of a plane's tile.
    const fn plane_blocks(&self) -> (usize, usize) {
        (
            self.plane_tile.0.div_ceil(self.block),
            self.plane_tile.1.div_ceil(self.block),
        )
    }

    /// Which of a plane's blocks a fragment lies in.
    const fn plane_block(&self, row: usize, column: usize) -> usize {
        row * MMA_M / self.block * self.plane_blocks().1 + column * MMA_N / self.block
    }
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    args: &GemmArgs<R>,
    blueprint: TensorCoreBlueprint,
) {
    let problem = args.problem;
    let AlignedValues {
        a,
        a_view,
        residual,
        b,
        b_view,
    } = AlignedValues::new(client, args);
    let residual = or_unused(residual.as_ref(), &a, storage::<i8>());
    let optional = |tensor: Option<&TensorHandle<R>>, dtype| {
        or_unused(tensor, &args.a.scales, dtype).into_arg()
    };
    let tiles = problem.m.div_ceil(blueprint.tile) * problem.n.div_ceil(blueprint.tile);
    // SAFETY: every access is guarded by the sizes, to which all shapes were checked. Unused arguments are not read.
    #[allow(unsafe_code)]
    unsafe {
        gemm_tensor_core_kernel::launch_unchecked::<R>(
            client,
            cube_grid(problem.batch * tiles),
            CubeDim::new_1d(blueprint.units() as u32),
            ALIGNMENT / 2,
            2,
            a.into_arg(),
            b.into_arg(),
            residual.into_arg(),
            args.a.scales.clone().into_arg(),
            args.b.scales.clone().into_arg(),
            optional(args.fallback.map(|r| &r.scales), storage::<f32>()),
            optional(args.fallback.map(|r| &r.flags), storage::<u32>()),
            optional(args.bias, storage::<f32>()),
            args.out.clone().into_arg(),
            args.out.clone().into_arg(),
            GeometryLaunch::new(
                problem.batch as u32,
                problem.m as u32,
                problem.n as u32,
                problem.k.next_multiple_of(ALIGNMENT) as u32,
                Strides::of(&a_view),
                Strides::of(&b_view),
                Strides::of(&args.a_scales),
                Strides::of(&args.b_scales),
            ),
            blueprint,
            args.fallback.is_some(),
            args.bias.is_some(),
            problem.n % 2 == 0,
            args.out.dtype,
        );
    }
}

/// The INT8 operands are declared as vectors of `f16`, of the bytes of one copy: `ldmatrix` moves 16-bit elements, and
/// which bytes a lane gets of them is what the INT8 instruction expects. Nothing computes with them as `f16`.
///
/// The output is given twice, in pairs of neighbours that are written at once, and in single elements for those at the
/// ends of rows that belong to no pair. `is_even` says that all rows start with a pair.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gemm_tensor_core_kernel<F: Numeric, N: Size, NO: Size>(
    a: &Tensor<Vector<f16, N>>,
    b: &Tensor<Vector<f16, N>>,
    residual: &Tensor<Vector<f16, N>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    flags: &Tensor<u32>,
    bias: &Tensor<f32>,
    pairs: &mut Tensor<Vector<F, NO>>,
    singles: &mut Tensor<F>,
    geometry: Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
    #[comptime] has_bias: bool,
    #[comptime] is_even: bool,
    #[define(F)] _dtype: StorageType,
) {
    let origin = tile_origin(&geometry, blueprint);
    if origin.batch >= geometry.batch {
        terminate!();
    }
    let blocks = geometry.k.div_ceil(comptime!(blueprint.block as u32));
    let stages = comptime!(blueprint.stages as u32);

    let mut ring = Ring::<N> {
        values: SharedMemory::new_aligned(
            comptime!(2 * blueprint.operand_chunks() * blueprint.stages),
            128usize,
        ),
        scales: SharedMemory::new(comptime!(2 * blueprint.row_blocks() * blueprint.stages)),
    };
    let mut barriers = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..stages {
        barriers.push(Barrier::shared(CUBE_DIM, UNIT_POS == 0));
    }

    let fragments = comptime!(blueprint.fragments().0 * blueprint.fragments().1);
    let mut sums = Array::<f32>::new(comptime!(4 * fragments));
    #[unroll]
    for slot in 0..comptime!(4 * fragments) {
        sums[slot] = 0.0f32;
    }

    let mut ahead = Item {
        block: 0u32.runtime(),
        residual: 0u32.runtime(),
        flags: Array::new(comptime!(blueprint.row_blocks())),
    };
    if comptime!(has_fallback) {
        if blocks > 0 {
            load_flags(&mut ahead, flags, &origin, &geometry, blueprint);
        }
    }
    let mut items = 0u32.runtime();
    let mut free = first_stage();
    #[unroll]
    for _ in 0..comptime!(stages - 1) {
        if ahead.block < blocks {
            fill::<N>(
                &mut ring,
                a,
                b,
                residual,
                a_scales,
                b_scales,
                residual_scales,
                &ahead,
                &origin,
                &geometry,
                &free,
                blueprint,
                has_fallback,
            );
            arrive(&barriers, free.index, blueprint);
            items += 1;
            next_stage(&mut free, blueprint);
            advance(
                &mut ahead,
                flags,
                &origin,
                &geometry,
                blueprint,
                has_fallback,
            );
        }
    }

    let mut turn = 0u32.runtime();
    let mut full = first_stage();
    while turn < items {
        wait(&barriers, &full, blueprint);
        sync_cube();
        if ahead.block < blocks {
            fill::<N>(
                &mut ring,
                a,
                b,
                residual,
                a_scales,
                b_scales,
                residual_scales,
                &ahead,
                &origin,
                &geometry,
                &free,
                blueprint,
                has_fallback,
            );
            arrive(&barriers, free.index, blueprint);
            items += 1;
            advance(
                &mut ahead,
                flags,
                &origin,
                &geometry,
                blueprint,
                has_fallback,
            );
        }
        multiply::<N>(&mut sums, &ring, &full, blueprint);
        free.index = full.index;
        free.start = full.start;
        next_stage(&mut full, blueprint);
        turn += 1;
    }

    if comptime!(has_bias) {
        add_bias(&mut sums, bias, &origin, &geometry, blueprint);
    }
    write_sums::<F, NO>(
        pairs, singles, &sums, &origin, &geometry, blueprint, is_even,
    );
}
