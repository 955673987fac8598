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
    ir::StorageType,
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

/// Sizes of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    batch: u32,
    m: u32,
    n: u32,
    /// Length of a row in memory, a multiple of 16.
    k: u32,
}

/// Where a cube or a plane works: the matrix and the first row and column.
#[derive(CubeType, Clone, Copy)]
struct Origin {
    batch: u32,
    row: u32,
    col: u32,
}

/// One item of work: a block along K, and whether its residual is meant.
#[derive(CubeType, Clone, Copy)]
struct Item {
    block: u32,
    residual: u32,
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
    // SAFETY: every access is guarded by the sizes, to which all shapes were checked. Unused arguments are not read.
    #[allow(unsafe_code)]
    unsafe {
        gemm_tensor_core_kernel::launch_unchecked::<R>(
            client,
            cube_grid(problem.batch * tiles),
            CubeDim::new_1d(blueprint.units() as u32),
            ALIGNMENT / 2,
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
            args.out.dtype,
        );
    }
}

/// The INT8 operands are declared as vectors of eight `f16`, of the same 16 bytes: `ldmatrix` moves 16-bit elements, and
/// which bytes a lane gets of them is what the INT8 instruction expects. Nothing computes with them before they are
/// reinterpreted.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gemm_tensor_core_kernel<F: Numeric, N16: Size>(
    a: &Tensor<Vector<f16, N16>>,
    b: &Tensor<Vector<f16, N16>>,
    residual: &Tensor<Vector<f16, N16>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    flags: &Tensor<u32>,
    bias: &Tensor<f32>,
    out: &mut Tensor<F>,
    sizes: Sizes,
    a_strides: Strides,
    b_strides: Strides,
    a_scale_strides: Strides,
    b_scale_strides: Strides,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
    #[comptime] has_bias: bool,
    #[define(F)] _dtype: StorageType,
) {
    let origin = tile_origin(&sizes, blueprint);
    if origin.batch >= sizes.batch {
        terminate!();
    }
    let plane = plane_origin(&origin, blueprint);
    let blocks = sizes.k.div_ceil(comptime!(blueprint.block as u32));
    let stages = comptime!(blueprint.stages as u32);

    let mut memory = SharedMemory::<Vector<f16, N16>>::new_aligned(
        comptime!(2 * blueprint.operand_chunks() * blueprint.stages),
        128usize,
    );
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
    };
    #[unroll]
    for stage in 0..comptime!(stages - 1) {
        if ahead.block < blocks {
            fill_stage::<N16>(
                &mut memory,
                a,
                b,
                residual,
                &origin,
                &sizes,
                &a_strides,
                &b_strides,
                &ahead,
                stage,
                blueprint,
                has_fallback,
            );
            arrive(&barriers, stage, blueprint);
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

    let mut item = Item {
        block: 0u32.runtime(),
        residual: 0u32.runtime(),
    };
    let mut turn = 0u32.runtime();
    while item.block < blocks {
        let stage = turn % stages;
        wait(&barriers, stage, turn / stages % 2, blueprint);
        sync_cube();
        if ahead.block < blocks {
            let free = (turn + comptime!(stages - 1)) % stages;
            fill_stage::<N16>(
                &mut memory,
                a,
                b,
                residual,
                &origin,
                &sizes,
                &a_strides,
                &b_strides,
                &ahead,
                free,
                blueprint,
                has_fallback,
            );
            arrive(&barriers, free, blueprint);
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
        if comptime!(has_fallback) {
            if item.residual == 1 {
                multiply::<N16>(
                    &mut sums,
                    &memory,
                    residual_scales,
                    b_scales,
                    &plane,
                    &sizes,
                    &a_scale_strides,
                    &b_scale_strides,
                    &item,
                    stage,
                    blueprint,
                );
            } else {
                multiply::<N16>(
                    &mut sums,
                    &memory,
                    a_scales,
                    b_scales,
                    &plane,
                    &sizes,
                    &a_scale_strides,
                    &b_scale_strides,
                    &item,
                    stage,
                    blueprint,
                );
            }
        } else {
            multiply::<N16>(
                &mut sums,
                &memory,
                a_scales,
                b_scales,
                &plane,
                &sizes,
                &a_scale_strides,
                &b_scale_strides,
                &item,
                stage,
                blueprint,
            );
        }
        advance(
            &mut item,
            flags,
            &origin,
            &sizes,
            &a_scale_strides,
            blueprint,
            has_fallback,
        );
        turn += 1;
    }

    write_sums::<F>(out, &sums, bias, &plane, &sizes, blueprint, has_bias);
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

/// The part of the cube's tile that this unit's plane computes.
#[cube]
fn plane_origin(origin: &Origin, #[comptime] blueprint: TensorCoreBlueprint) -> Origin {
    let plane = UNIT_POS / comptime!(PLANE as u32);
    let planes_n = comptime!(blueprint.planes().1 as u32);
    Origin {
        batch: origin.batch,
        row: origin.row + plane / planes_n * comptime!(blueprint.plane_tile.0 as u32),
        col: origin.col + plane % planes_n * comptime!(blueprint.plane_tile.1 as u32),
    }
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
            let block = comptime!(blueprint.block as u32);
            #[unroll]
            for row_block in 0..comptime!(blueprint.row_blocks() as u32) {
                let row = origin.row + row_block * block;
                if row < sizes.m {
                    next_residual |= flags[(origin.batch * strides.batch
                        + row / block * strides.row
                        + item.block * strides.col)
                        as usize];
                }
            }
        }
    }
    item.residual = next_residual;
    item.block += 1 - next_residual;
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

/// Where a chunk of a row lies in its operand's part of a stage.
#[cube]
fn chunk_index(row: u32, chunk: u32, #[comptime] blueprint: TensorCoreBlueprint) -> u32 {
    let chunks = comptime!(blueprint.chunks() as u32);
    // All banks together are eight chunks wide.
    let rows_of_banks = comptime!(8 / blueprint.chunks() as u32);
    row * chunks + (chunk ^ (row / rows_of_banks % chunks))
}

/// Starts the copies of both operands of an item to a stage.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fill_stage<N: Size>(
    memory: &mut SharedMemory<Vector<f16, N>>,
    a: &Tensor<Vector<f16, N>>,
    b: &Tensor<Vector<f16, N>>,
    residual: &Tensor<Vector<f16, N>>,
    origin: &Origin,
    sizes: &Sizes,
    a_strides: &Strides,
    b_strides: &Strides,
    item: &Item,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let start = stage * comptime!(2 * operand);
    let k = item.block * comptime!(blueprint.block as u32);
    if comptime!(has_fallback) {
        if item.residual == 1 {
            copy_tile::<N>(
                memory,
                residual,
                a_strides,
                origin.batch,
                origin.row,
                sizes.m,
                k,
                sizes.k,
                start,
                blueprint,
            );
        } else {
            copy_tile::<N>(
                memory,
                a,
                a_strides,
                origin.batch,
                origin.row,
                sizes.m,
                k,
                sizes.k,
                start,
                blueprint,
            );
        }
    } else {
        copy_tile::<N>(
            memory,
            a,
            a_strides,
            origin.batch,
            origin.row,
            sizes.m,
            k,
            sizes.k,
            start,
            blueprint,
        );
    }
    copy_tile::<N>(
        memory,
        b,
        b_strides,
        origin.batch,
        origin.col,
        sizes.n,
        k,
        sizes.k,
        start + operand,
        blueprint,
    );
}

/// Starts the copies of one operand's rows; what lies outside the matrix becomes 0.
#[cube]
#[allow(clippy::too_many_arguments)]
fn copy_tile<N: Size>(
    memory: &mut SharedMemory<Vector<f16, N>>,
    values: &Tensor<Vector<f16, N>>,
    strides: &Strides,
    batch: u32,
    row_0: u32,
    rows: u32,
    k_0: u32,
    k_end: u32,
    start: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let chunks = comptime!(blueprint.chunks() as u32);
    let bytes = comptime!(ALIGNMENT as u32);
    #[unroll]
    for index in 0..comptime!((blueprint.operand_chunks() / blueprint.units()) as u32) {
        let piece = UNIT_POS + index * comptime!(blueprint.units() as u32);
        let tile_row = piece / chunks;
        let chunk = piece % chunks;
        let row = row_0 + tile_row;
        let k = k_0 + chunk * bytes;
        let is_inside = row < rows && k < k_end;
        let source = select(
            is_inside,
            (batch * strides.batch + row * strides.row + k) / bytes,
            0u32,
        ) as usize;
        let length = select(is_inside, 1u32, 0u32) as usize;
        let target = (start + chunk_index(tile_row, chunk, blueprint)) as usize;
        copy_async_checked(
            &values.slice(source, source + length),
            &mut memory.slice_mut(target, target + 1),
            comptime!(ALIGNMENT as u32 / 2),
        );
    }
}

/// Adds the product of an item to the sums of this plane's tile, times the scales.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply<N: Size>(
    sums: &mut Array<f32>,
    memory: &SharedMemory<Vector<f16, N>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    plane: &Origin,
    sizes: &Sizes,
    a_strides: &Strides,
    b_strides: &Strides,
    item: &Item,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let size!(N4) = 4usize;
    let size!(N2) = 2usize;
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let block = comptime!(blueprint.block as u32);
    let tile = comptime!(blueprint.tile as u32);
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let a_start = stage * comptime!(2 * operand);
    let b_start = a_start + operand;
    let lane = UNIT_POS % comptime!(PLANE as u32);
    // `ldmatrix` takes the addresses of the eight rows of matrix i from the lanes from 8 i. For A the matrices are the upper
    // and the lower rows of the left half along K, then of the right half; for B both halves of one group of columns, then
    // of the next.
    let a_row = plane.row % tile + lane % 16;
    let a_chunk = lane / 16;
    let b_row = plane.col % tile + lane / 16 * 8 + lane % 8;
    let b_chunk = lane / 8 % 2;

    let definition = MmaDefinition::<i8, i8, i32>::new(MMA_M, MMA_N, MMA_K);
    let mut products = Sequence::<Array<Vector<i32, N2>>>::new();
    #[unroll]
    for _ in 0..comptime!(fragments_m * fragments_n) {
        let mut product = Array::<Vector<i32, N2>>::new(2usize);
        product[0] = Vector::new(0i32);
        product[1] = Vector::new(0i32);
        products.push(product);
    }

    #[unroll]
    for step in 0..comptime!((blueprint.block / MMA_K) as u32) {
        let mut rows = Sequence::<Array<Vector<i8, N4>>>::new();
        #[unroll]
        for i in 0..comptime!(fragments_m as u32) {
            let index = a_start
                + chunk_index(
                    a_row + comptime!(i * MMA_M as u32),
                    a_chunk + comptime!(step * 2),
                    blueprint,
                );
            let halves = definition.load_matrix::<Vector<f16, N>, N2>(
                &memory.slice(index as usize, index as usize + 1),
                MatrixIdent::A,
                4usize,
                false,
            );
            let mut fragment = Array::<Vector<i8, N4>>::new(4usize);
            #[unroll]
            for register in 0..4usize {
                fragment[register] = Vector::<i8, N4>::reinterpret(halves[register]);
            }
            rows.push(fragment);
        }
        #[unroll]
        for pair in 0..comptime!(fragments_n / 2) {
            let index = b_start
                + chunk_index(
                    b_row + comptime!((pair * 2 * MMA_N) as u32),
                    b_chunk + comptime!(step * 2),
                    blueprint,
                );
            let halves = definition.load_matrix::<Vector<f16, N>, N2>(
                &memory.slice(index as usize, index as usize + 1),
                MatrixIdent::B,
                4usize,
                false,
            );
            #[unroll]
            for half in 0..2usize {
                let mut fragment = Array::<Vector<i8, N4>>::new(2usize);
                fragment[0] = Vector::<i8, N4>::reinterpret(halves[comptime!(half * 2)]);
                fragment[1] = Vector::<i8, N4>::reinterpret(halves[comptime!(half * 2 + 1)]);
                #[unroll]
                for i in 0..fragments_m {
                    definition.execute_inplace(
                        rows.index(i),
                        &fragment,
                        products.index_mut(comptime!(i * fragments_n + pair * 2 + half)),
                    );
                }
            }
        }
    }

    // Edge tiles reach past the last block, whose scale then stands for all that is not written.
    let last_a = (sizes.m - 1) / block;
    let last_b = (sizes.n - 1) / block;
    let a_base = plane.batch * a_strides.batch + item.block * a_strides.col;
    let b_base = plane.batch * b_strides.batch + item.block * b_strides.col;
    #[unroll]
    for i in 0..fragments_m {
        let a_block = min((plane.row + comptime!((i * MMA_M) as u32)) / block, last_a);
        let a_scale = a_scales[(a_base + a_block * a_strides.row) as usize];
        #[unroll]
        for j in 0..fragments_n {
            let b_block = min((plane.col + comptime!((j * MMA_N) as u32)) / block, last_b);
            let scale = a_scale * b_scales[(b_base + b_block * b_strides.row) as usize];
            let fragment = comptime!(i * fragments_n + j);
            let product = products.index(fragment);
            #[unroll]
            for half in 0..2usize {
                let pair = product[half];
                #[unroll]
                for side in 0..2usize {
                    sums[comptime!(fragment * 4 + half * 2 + side)] +=
                        f32::cast_from(pair[side]) * scale;
                }
            }
        }
    }
}

/// Writes this unit's sums: of each fragment, two neighbours in a row and two in the row eight below.
#[cube]
fn write_sums<F: Numeric>(
    out: &mut Tensor<F>,
    sums: &Array<f32>,
    bias: &Tensor<f32>,
    plane: &Origin,
    sizes: &Sizes,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_bias: bool,
) {
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let lane = UNIT_POS % comptime!(PLANE as u32);
    #[unroll]
    for i in 0..fragments_m {
        #[unroll]
        for j in 0..fragments_n {
            #[unroll]
            for slot in 0..4usize {
                let row = plane.row + lane / 4 + comptime!((i * MMA_M + slot / 2 * 8) as u32);
                let col = plane.col + lane % 4 * 2 + comptime!((j * MMA_N + slot % 2) as u32);
                if row < sizes.m && col < sizes.n {
                    let mut sum = sums[comptime!((i * fragments_n + j) * 4 + slot)];
                    if comptime!(has_bias) {
                        sum += bias[col as usize];
                    }
                    out[((plane.batch * sizes.m + row) * sizes.n + col) as usize] =
                        F::cast_from(sum);
                }
            }
        }
    }
}
