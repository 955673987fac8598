//! The product on INT8 matrix instructions.
//!
//! A cube computes a square tile of the output, each of its planes a rectangle of it. One item of work is one block along
//! K, `block` deep: its base product or, right after it where a block of the tile's rows fell back, its residual product.
//! So the items of a tile form one sequence, and its length depends on the flags. The copies of the items to come run
//! ahead of the products in a ring of stages in shared memory:
//!
//! - All units copy 16 bytes at a time (`cp.async`) and arrive at the stage's barrier when their copies have landed.
//! - A turn waits for its stage, then for all units to have left the stage of the turn before, refills that one, and
//!   multiplies.
//! - Rows of a stage are stored with their 16-byte chunks permuted, so that the eight rows that `ldmatrix` reads at once
//!   lie in different banks.
//!
//! Every product starts at zero in INT32 and is added to the FP32 sums, times the scales of its blocks. The residual of
//! a block that did not fall back is undefined, but its scale is 0: it adds nothing.

use cubecl::{
    cmma::{MatrixIdent, MmaDefinition},
    intrinsic,
    ir::{ManagedVariable, StorageType},
    prelude::{barrier::*, *},
    std::tensor::TensorHandle,
};
use half::f16;

use crate::device::{MatrixView, Strides, cube_grid, storage, unused};

use super::{
    GemmArgs,
    align::{ALIGNMENT, align},
    blueprint::TensorCoreBlueprint,
};

const PLANE: usize = 32;
/// Shape of a matrix instruction.
const MMA_M: usize = 16;
const MMA_N: usize = 8;
const MMA_K: usize = 32;
/// Rows of tiles that are computed together, so that they share the columns of B in the cache.
const RASTER: u32 = 8;
/// Columns of fragments that are multiplied and then scaled together.
const SLICE: usize = 2;

/// Sizes of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    batch: u32,
    m: u32,
    n: u32,
    /// Length of a row in memory, a multiple of 16.
    k: u32,
}

/// Where a cube works: the matrix and the first row and column.
#[derive(CubeType, Clone, Copy)]
struct Origin {
    batch: u32,
    row: u32,
    col: u32,
}

/// One item of work: a block along K, and whether its residual is meant.
#[derive(CubeType)]
struct Item {
    block: u32,
    residual: u32,
    /// Whether the blocks of the tile's rows fell back.
    flags: Array<u32>,
}

/// The stages in shared memory: of each, the rows of A and of B, and the scales of A's and of B's blocks.
#[derive(CubeType)]
struct Ring<N: Size> {
    values: SharedMemory<Vector<f16, N>>,
    scales: SharedMemory<f32>,
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
    let aligned = |values: &TensorHandle<R>, view: &MatrixView, is_aligned: bool| {
        if is_aligned {
            (values.clone(), *view)
        } else {
            align(client, values, view)
        }
    };
    let (a, a_view) = aligned(&args.a.values, &args.a_view, problem.aligned.0);
    let (b, b_view) = aligned(&args.b.values, &args.b_view, problem.aligned.1);
    let residual = args
        .fallback
        .map(|residual| aligned(&residual.values, &args.a_view, problem.aligned.0).0)
        .unwrap_or_else(|| unused(client, storage::<i8>()));
    let or_unused = |tensor: Option<&TensorHandle<R>>, dtype| {
        tensor
            .cloned()
            .unwrap_or_else(|| unused(client, dtype))
            .into_arg()
    };
    let tiles = problem.m.div_ceil(blueprint.tile) * problem.n.div_ceil(blueprint.tile);
    // Neighbours in a row that are written at once.
    let pair = if problem.n % 2 == 0 { 2 } else { 1 };
    // SAFETY: every access is guarded by the sizes, to which all shapes were checked. Unused arguments are not read.
    #[allow(unsafe_code)]
    unsafe {
        gemm_tensor_core_kernel::launch_unchecked::<R>(
            client,
            cube_grid(problem.batch * tiles),
            CubeDim::new_1d(blueprint.units() as u32),
            ALIGNMENT / 2,
            pair,
            a.into_arg(),
            b.into_arg(),
            residual.into_arg(),
            args.a.scales.clone().into_arg(),
            args.b.scales.clone().into_arg(),
            or_unused(args.fallback.map(|r| &r.scales), storage::<f32>()),
            or_unused(args.fallback.map(|r| &r.flags), storage::<u32>()),
            or_unused(args.bias, storage::<f32>()),
            args.out.clone().into_arg(),
            SizesLaunch::new(
                problem.batch as u32,
                problem.m as u32,
                problem.n as u32,
                problem.k.next_multiple_of(ALIGNMENT) as u32,
            ),
            Strides::of(&a_view),
            Strides::of(&b_view),
            Strides::of(&args.a_scales),
            Strides::of(&args.b_scales),
            blueprint,
            args.fallback.is_some(),
            args.bias.is_some(),
            pair,
            args.out.dtype,
        );
    }
}

/// The INT8 operands are declared as vectors of eight `f16`, of the same 16 bytes: `ldmatrix` moves 16-bit elements, and
/// which bytes a lane gets of them is what the INT8 instruction expects. Nothing computes with them before they are
/// reinterpreted.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gemm_tensor_core_kernel<F: Numeric, N16: Size, NO: Size>(
    a: &Tensor<Vector<f16, N16>>,
    b: &Tensor<Vector<f16, N16>>,
    residual: &Tensor<Vector<f16, N16>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    flags: &Tensor<u32>,
    bias: &Tensor<f32>,
    out: &mut Tensor<Vector<F, NO>>,
    sizes: Sizes,
    a_strides: Strides,
    b_strides: Strides,
    a_scale_strides: Strides,
    b_scale_strides: Strides,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
    #[comptime] has_bias: bool,
    #[comptime] pair: usize,
    #[define(F)] _dtype: StorageType,
) {
    let origin = tile_origin(&sizes, blueprint);
    if origin.batch >= sizes.batch {
        terminate!();
    }
    let blocks = sizes.k.div_ceil(comptime!(blueprint.block as u32));
    let stages = comptime!(blueprint.stages as u32);

    let mut ring = Ring::<N16> {
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
        load_flags(
            &mut ahead,
            flags,
            &origin,
            &sizes,
            &a_scale_strides,
            blueprint,
        );
    }
    let mut filled = 0u32.runtime();
    #[unroll]
    for stage in 0..comptime!(stages - 1) {
        if ahead.block < blocks {
            fill_stage::<N16>(
                &mut ring,
                a,
                b,
                residual,
                a_scales,
                b_scales,
                residual_scales,
                &origin,
                &sizes,
                &a_strides,
                &b_strides,
                &a_scale_strides,
                &b_scale_strides,
                &ahead,
                stage,
                blueprint,
                has_fallback,
            );
            arrive(&barriers, stage, blueprint);
            filled += 1;
            advance(
                &mut ahead,
                flags,
                &origin,
                &sizes,
                &a_scale_strides,
                blueprint,
                has_fallback,
            );
        }
    }

    let mut turn = 0u32.runtime();
    let mut stage = 0u32.runtime();
    // Where the stage starts, carried along: the compiler then folds what is constant into the addresses.
    let mut start = 0u32.runtime();
    let mut free = comptime!(stages - 1).runtime();
    let mut parity = 0u32.runtime();
    while turn < filled {
        wait(&barriers, stage, parity, blueprint);
        sync_cube();
        if ahead.block < blocks {
            fill_stage::<N16>(
                &mut ring,
                a,
                b,
                residual,
                a_scales,
                b_scales,
                residual_scales,
                &origin,
                &sizes,
                &a_strides,
                &b_strides,
                &a_scale_strides,
                &b_scale_strides,
                &ahead,
                free,
                blueprint,
                has_fallback,
            );
            arrive(&barriers, free, blueprint);
            filled += 1;
            advance(
                &mut ahead,
                flags,
                &origin,
                &sizes,
                &a_scale_strides,
                blueprint,
                has_fallback,
            );
        }
        multiply::<N16>(&mut sums, &ring, stage, start, blueprint);
        turn += 1;
        free = stage;
        stage += 1;
        start += comptime!(2 * blueprint.operand_chunks() as u32);
        if stage == stages {
            stage = 0;
            start = 0;
            parity = 1 - parity;
        }
    }

    write_sums::<F, NO>(out, &sums, bias, &origin, &sizes, blueprint, has_bias, pair);
}

/// The tile of a cube. Tiles are numbered down [`RASTER`] rows of tiles before they go on along the columns.
#[cube]
fn tile_origin(sizes: &Sizes, #[comptime] blueprint: TensorCoreBlueprint) -> Origin {
    let tile = comptime!(blueprint.tile as u32);
    let tiles_m = sizes.m.div_ceil(tile);
    let tiles_n = sizes.n.div_ceil(tile);
    let index = CUBE_POS as u32;
    let in_matrix = index % (tiles_m * tiles_n);
    let first_m = in_matrix / (RASTER * tiles_n) * RASTER;
    let height = min(tiles_m - first_m, RASTER);
    let in_group = in_matrix % (RASTER * tiles_n);
    Origin {
        batch: index / (tiles_m * tiles_n),
        row: (first_m + in_group % height) * tile,
        col: in_group / height * tile,
    }
}

/// Where this unit's plane works in the cube's tile: its first row and column.
#[cube]
fn plane_origin(#[comptime] blueprint: TensorCoreBlueprint) -> (u32, u32) {
    let plane = UNIT_POS / comptime!(PLANE as u32);
    let planes_n = comptime!(blueprint.planes().1 as u32);
    (
        plane / planes_n * comptime!(blueprint.plane_tile.0 as u32),
        plane % planes_n * comptime!(blueprint.plane_tile.1 as u32),
    )
}

/// Goes on to the next item of work. All units read the same flags, so all of a cube agree.
#[cube]
fn advance(
    item: &mut Item,
    flags: &Tensor<u32>,
    origin: &Origin,
    sizes: &Sizes,
    strides: &Strides,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    let mut next_residual = 0u32;
    if comptime!(has_fallback) {
        if item.residual == 0 {
            #[unroll]
            for row_block in 0..blueprint.row_blocks() {
                next_residual |= item.flags[row_block];
            }
        }
    }
    item.residual = next_residual;
    item.block += 1 - next_residual;
    if comptime!(has_fallback) {
        load_flags(item, flags, origin, sizes, strides, blueprint);
    }
}

/// Loads the flags of an item's block. They are looked at one turn later, when they have arrived.
#[cube]
fn load_flags(
    item: &mut Item,
    flags: &Tensor<u32>,
    origin: &Origin,
    sizes: &Sizes,
    strides: &Strides,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let block = comptime!(blueprint.block as u32);
    let last_row = (sizes.m - 1) / block;
    let last_block = sizes.k.div_ceil(block) - 1;
    let start = origin.batch * strides.batch + min(item.block, last_block) * strides.col;
    #[unroll]
    for row_block in 0..comptime!(blueprint.row_blocks() as u32) {
        let row = min(origin.row / block + row_block, last_row);
        item.flags[comptime!(row_block as usize)] = flags[(start + row * strides.row) as usize];
    }
}

/// Tells a stage's barrier that this unit's copies are on their way.
#[cube]
fn arrive(
    barriers: &Sequence<Shared<Barrier>>,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for index in 0..blueprint.stages {
        if stage == comptime!(index as u32) {
            let barrier = barriers.index(index);
            barrier.commit_copy_async();
            barrier.arrive();
        }
    }
}

/// Waits until the copies of all units to a stage have landed.
#[cube]
fn wait(
    barriers: &Sequence<Shared<Barrier>>,
    stage: u32,
    parity: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for index in 0..blueprint.stages {
        if stage == comptime!(index as u32) {
            barriers.index(index).wait_parity(parity);
        }
    }
}

/// With what the chunks of a row are permuted, by exclusive or: eight rows on end put equal chunks into different banks.
/// Rows a multiple of 8 apart are permuted alike.
#[cube]
fn swizzle(row: u32, #[comptime] blueprint: TensorCoreBlueprint) -> u32 {
    let chunks = comptime!(blueprint.chunks() as u32);
    // All banks together are eight chunks wide.
    row / comptime!(8 / blueprint.chunks() as u32) % chunks
}

/// Starts the copies of both operands of an item, and of their scales, to a stage.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fill_stage<N: Size>(
    ring: &mut Ring<N>,
    a: &Tensor<Vector<f16, N>>,
    b: &Tensor<Vector<f16, N>>,
    residual: &Tensor<Vector<f16, N>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    origin: &Origin,
    sizes: &Sizes,
    a_strides: &Strides,
    b_strides: &Strides,
    a_scale_strides: &Strides,
    b_scale_strides: &Strides,
    item: &Item,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    if comptime!(has_fallback) {
        if item.residual == 1 {
            copy_operand::<N>(
                ring,
                residual,
                residual_scales,
                a_strides,
                a_scale_strides,
                origin.batch,
                origin.row,
                sizes.m,
                sizes.k,
                item.block,
                stage,
                0u32,
                blueprint,
            );
        } else {
            copy_operand::<N>(
                ring,
                a,
                a_scales,
                a_strides,
                a_scale_strides,
                origin.batch,
                origin.row,
                sizes.m,
                sizes.k,
                item.block,
                stage,
                0u32,
                blueprint,
            );
        }
    } else {
        copy_operand::<N>(
            ring,
            a,
            a_scales,
            a_strides,
            a_scale_strides,
            origin.batch,
            origin.row,
            sizes.m,
            sizes.k,
            item.block,
            stage,
            0u32,
            blueprint,
        );
    }
    copy_operand::<N>(
        ring,
        b,
        b_scales,
        b_strides,
        b_scale_strides,
        origin.batch,
        origin.col,
        sizes.n,
        sizes.k,
        item.block,
        stage,
        1u32,
        blueprint,
    );
}

/// Starts the copies of the rows and the scales of operand `side`, 0 for A and 1 for B. What lies past the end of K
/// becomes 0. Rows past the last repeat it, and so do scales: what they give is not written.
#[cube]
#[allow(clippy::too_many_arguments)]
fn copy_operand<N: Size>(
    ring: &mut Ring<N>,
    values: &Tensor<Vector<f16, N>>,
    scales: &Tensor<f32>,
    strides: &Strides,
    scale_strides: &Strides,
    batch: u32,
    row_0: u32,
    rows: u32,
    k_end: u32,
    block: u32,
    stage: u32,
    #[comptime] side: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let start = stage * comptime!(2 * operand) + comptime!(side * operand);
    let chunks = comptime!(blueprint.chunks() as u32);
    let bytes = comptime!(ALIGNMENT as u32);
    // This unit copies one column of chunks. Its rows are a multiple of 8 apart.
    let chunk = UNIT_POS % chunks;
    let tile_row = UNIT_POS / chunks;
    let rows_apart = comptime!((blueprint.units() / blueprint.chunks()) as u32);
    let pitch = strides.row / bytes;
    let column = batch * (strides.batch / bytes) + block * chunks + chunk;
    let first = column + (row_0 + tile_row) * pitch;
    let last = column + (rows - 1) * pitch;
    let length = select((block * chunks + chunk) * bytes < k_end, 1u32, 0u32) as usize;
    let target = start + tile_row * chunks + (chunk ^ swizzle(tile_row, blueprint));
    #[unroll]
    for index in 0..comptime!((blueprint.operand_chunks() / blueprint.units()) as u32) {
        let source = min(first + index * (rows_apart * pitch), last) as usize;
        let target = (target + index * comptime!(rows_apart * chunks)) as usize;
        copy_async_checked(
            &values.slice(source, source + length),
            &mut ring.values.slice_mut(target, target + 1),
            comptime!(ALIGNMENT as u32 / 2),
        );
    }
    // One plane for each operand.
    let row_blocks = comptime!(blueprint.row_blocks() as u32);
    let first_unit = comptime!(side * PLANE as u32);
    if UNIT_POS >= first_unit && UNIT_POS < comptime!(first_unit + row_blocks) {
        let unit = UNIT_POS - first_unit;
        let rows_per_scale = comptime!(blueprint.block as u32);
        let row = min(row_0 / rows_per_scale + unit, (rows - 1) / rows_per_scale);
        let source = (batch * scale_strides.batch
            + row * scale_strides.row
            + block * scale_strides.col) as usize;
        let target =
            (stage * comptime!(2 * row_blocks) + comptime!(side * row_blocks) + unit) as usize;
        copy_async(
            &scales.slice(source, source + 1),
            &mut ring.scales.slice_mut(target, target + 1),
            1u32,
        );
    }
}

/// Registers that `ldmatrix` filled, as an INT8 operand of the matrix instruction: the same registers under another type.
/// To reinterpret their values one by one would cost instructions, since the compiler then takes the bytes apart.
#[cube]
#[allow(unused_variables)]
fn as_int8<NF: Size, NI: Size>(registers: Array<Vector<f16, NF>>) -> Array<Vector<i8, NI>> {
    intrinsic!(|scope| {
        let mut variable = *registers.expand;
        variable.ty = Vector::<i8, NI>::as_type(scope);
        ManagedVariable::Plain(variable).into()
    })
}

/// Adds the product of a stage to the sums of this plane's tile, times the scales.
///
/// It goes through the tile in slices of [`SLICE`] fragments' columns, each over the whole depth, so that the products
/// of one slice are scaled while those of the next are computed, and INT32 products of the whole tile need not be held.
#[cube]
fn multiply<N: Size>(
    sums: &mut Array<f32>,
    ring: &Ring<N>,
    stage: u32,
    start: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let size!(N4) = 4usize;
    let size!(N2) = 2usize;
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let (plane_row, plane_col) = plane_origin(blueprint);
    // `ldmatrix` takes the addresses of the eight rows of matrix i from the lanes from 8 i. For A the matrices are the upper
    // and the lower rows of the left half along K, then of the right half; for B both halves of one group of columns.
    let a_row = plane_row + lane % 16;
    let b_row = plane_col + lane % 8;
    let chunks = comptime!(blueprint.chunks() as u32);
    let a_swizzle = swizzle(a_row, blueprint);
    let b_swizzle = swizzle(b_row, blueprint);
    let a_start = start + a_row * chunks;
    let b_start = start + (b_row * chunks + operand);
    let scales = load_scales::<N>(ring, plane_row, plane_col, stage, blueprint);

    let definition = MmaDefinition::<i8, i8, i32>::new(MMA_M, MMA_N, MMA_K);
    let mut zero = Array::<Vector<i32, N2>>::new(2usize);
    zero[0] = Vector::new(0i32);
    zero[1] = Vector::new(0i32);
    #[unroll]
    for slice in 0..comptime!(fragments_n / SLICE) {
        let mut products = Sequence::<Array<Vector<i32, N2>>>::new();
        #[unroll]
        for step in 0..comptime!((blueprint.block / MMA_K) as u32) {
            let a_column = a_start + ((lane / 16 + comptime!(step * 2)) ^ a_swizzle);
            let b_column = b_start + ((lane / 8 % 2 + comptime!(step * 2)) ^ b_swizzle);
            let mut rows = Sequence::<Array<Vector<i8, N4>>>::new();
            #[unroll]
            for i in 0..comptime!(fragments_m as u32) {
                let index = a_column + comptime!(i * MMA_M as u32 * chunks);
                rows.push(as_int8::<N2, N4>(
                    definition.load_matrix::<Vector<f16, N>, N2>(
                        &ring.values.slice(index as usize, index as usize + 1),
                        MatrixIdent::A,
                        4usize,
                        false,
                    ),
                ));
            }
            #[unroll]
            for j in 0..SLICE {
                let index = b_column + comptime!(((slice * SLICE + j) * MMA_N) as u32 * chunks);
                let cols = as_int8::<N2, N4>(definition.load_matrix::<Vector<f16, N>, N2>(
                    &ring.values.slice(index as usize, index as usize + 1),
                    MatrixIdent::B,
                    2usize,
                    false,
                ));
                #[unroll]
                for i in 0..fragments_m {
                    if comptime!(step == 0) {
                        products.push(definition.execute(rows.index(i), &cols, &zero));
                    } else {
                        definition.execute_inplace(
                            rows.index(i),
                            &cols,
                            products.index_mut(comptime!(j * fragments_m + i)),
                        );
                    }
                }
            }
        }
        #[unroll]
        for j in 0..SLICE {
            #[unroll]
            for i in 0..fragments_m {
                let column = comptime!(slice * SLICE + j);
                let product = products.index(comptime!(j * fragments_m + i));
                let scale = scales[comptime!(blueprint.plane_block(i, column))];
                #[unroll]
                for slot in 0..4usize {
                    let pair = product[comptime!(slot / 2)];
                    sums[comptime!((i * fragments_n + column) * 4 + slot)] +=
                        f32::cast_from(pair[comptime!(slot % 2)]) * scale;
                }
            }
        }
    }
}

/// The products of both operands' scales in this plane's tile, by row and column of its blocks.
#[cube]
fn load_scales<N: Size>(
    ring: &Ring<N>,
    plane_row: u32,
    plane_col: u32,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) -> Array<f32> {
    let (blocks_m, blocks_n) = comptime!(blueprint.plane_blocks());
    let block = comptime!(blueprint.block as u32);
    let row_blocks = comptime!(blueprint.row_blocks() as u32);
    let a_start = stage * comptime!(2 * row_blocks) + plane_row / block;
    let b_start = stage * comptime!(2 * row_blocks) + row_blocks + plane_col / block;
    let mut scales = Array::<f32>::new(comptime!(blocks_m * blocks_n));
    #[unroll]
    for i in 0..comptime!(blocks_m as u32) {
        #[unroll]
        for j in 0..comptime!(blocks_n as u32) {
            scales[comptime!(i as usize * blocks_n + j as usize)] =
                ring.scales[(a_start + i) as usize] * ring.scales[(b_start + j) as usize];
        }
    }
    scales
}

/// Writes this unit's sums: of each fragment, two neighbours in a row and two in the row eight below.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_sums<F: Numeric, N: Size>(
    out: &mut Tensor<Vector<F, N>>,
    sums: &Array<f32>,
    bias: &Tensor<f32>,
    origin: &Origin,
    sizes: &Sizes,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_bias: bool,
    #[comptime] width: usize,
) {
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let (plane_row, plane_col) = plane_origin(blueprint);
    #[unroll]
    for i in 0..fragments_m {
        #[unroll]
        for half in 0..2usize {
            let row = origin.row + plane_row + lane / 4 + comptime!((i * MMA_M + half * 8) as u32);
            let row_start = (origin.batch * sizes.m + row) * sizes.n;
            #[unroll]
            for j in 0..fragments_n {
                let col = origin.col + plane_col + lane % 4 * 2 + comptime!((j * MMA_N) as u32);
                #[unroll]
                for part in 0..comptime!(2 / width) {
                    let first = col + comptime!(part as u32);
                    if row < sizes.m && first < sizes.n {
                        let mut vector = Vector::<F, N>::empty();
                        #[unroll]
                        for side in 0..width {
                            let slot =
                                comptime!((i * fragments_n + j) * 4 + half * 2 + part + side);
                            let mut sum = sums[slot];
                            if comptime!(has_bias) {
                                sum += bias[(first + comptime!(side as u32)) as usize];
                            }
                            vector[side] = F::cast_from(sum);
                        }
                        out[(row_start + first) as usize / width] = vector;
                    }
                }
            }
        }
    }
}
