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
    cmma::{MatrixIdent, MmaDefinition},
    intrinsic,
    ir::{ManagedVariable, StorageType},
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

const PLANE: usize = 32;
/// Shape of a matrix instruction.
const MMA_M: usize = 16;
const MMA_N: usize = 8;
const MMA_K: usize = 32;
/// Rows of tiles that are computed together, so that they share the columns of B in the cache.
const RASTER: u32 = 8;
/// Columns of fragments that are multiplied and then scaled together.
const SLICE: usize = 2;

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

/// A stage of the ring in its order: its number, where it starts in 16-byte chunks, and the parity that its barrier
/// reaches when it is full. The start is carried along since the compiler then folds what is constant into addresses.
#[derive(CubeType)]
struct Stage {
    index: u32,
    start: u32,
    parity: u32,
}

/// One unit's copies of an operand's rows to a stage, in units of one copy.
#[derive(CubeType)]
struct Copies {
    /// Source of the first.
    first: u32,
    /// Source in the last row of the matrix.
    last: u32,
    /// Distance of two sources.
    apart: u32,
    /// 1, or 0 past the end of K.
    length: u32,
    /// Target of the first.
    target: u32,
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

#[cube]
fn first_stage() -> Stage {
    Stage {
        index: 0u32.runtime(),
        start: 0u32.runtime(),
        parity: 0u32.runtime(),
    }
}

/// Goes on in the ring.
#[cube]
fn next_stage(stage: &mut Stage, #[comptime] blueprint: TensorCoreBlueprint) {
    stage.index += 1;
    stage.start += comptime!(2 * blueprint.operand_chunks() as u32);
    if stage.index == comptime!(blueprint.stages as u32) {
        stage.index = 0;
        stage.start = 0;
        stage.parity = 1 - stage.parity;
    }
}

/// The tile of a cube. Tiles are numbered down [`RASTER`] rows of tiles before they go on along the columns.
#[cube]
fn tile_origin(geometry: &Geometry, #[comptime] blueprint: TensorCoreBlueprint) -> Origin {
    let tile = comptime!(blueprint.tile as u32);
    let tiles_m = geometry.m.div_ceil(tile);
    let tiles_n = geometry.n.div_ceil(tile);
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
    geometry: &Geometry,
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
        load_flags(item, flags, origin, geometry, blueprint);
    }
}

/// Loads the flags of an item's block. They are looked at one turn later, when they have arrived.
#[cube]
fn load_flags(
    item: &mut Item,
    flags: &Tensor<u32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let strides = geometry.a_scales;
    let block = comptime!(blueprint.block as u32);
    let last_row = (geometry.m - 1) / block;
    let last_block = geometry.k.div_ceil(block) - 1;
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
    stage: &Stage,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for index in 0..blueprint.stages {
        if stage.index == comptime!(index as u32) {
            barriers.index(index).wait_parity(stage.parity);
        }
    }
}

/// With what the chunks of a row are permuted, by exclusive or: eight rows on end put equal chunks in different banks.
/// Rows a multiple of 8 apart are permuted alike.
#[cube]
fn swizzle(row: u32, #[comptime] blueprint: TensorCoreBlueprint) -> u32 {
    let chunks = comptime!(blueprint.chunks() as u32);
    // All banks together are eight chunks wide.
    row / comptime!(8 / blueprint.chunks() as u32) % chunks
}

/// Starts the copies of an item to a stage: both operands' rows and their scales.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fill<N: Size>(
    ring: &mut Ring<N>,
    a: &Tensor<Vector<f16, N>>,
    b: &Tensor<Vector<f16, N>>,
    residual: &Tensor<Vector<f16, N>>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    item: &Item,
    origin: &Origin,
    geometry: &Geometry,
    stage: &Stage,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let (m, n, k) = (geometry.m, geometry.n, geometry.k);
    let of_a = plan(
        item,
        &geometry.a,
        origin.batch,
        origin.row,
        m,
        k,
        stage.start,
        blueprint,
    );
    if comptime!(has_fallback) && item.residual == 1 {
        copy_rows::<N>(ring, residual, &of_a, blueprint);
    } else {
        copy_rows::<N>(ring, a, &of_a, blueprint);
    }
    let of_b = plan(
        item,
        &geometry.b,
        origin.batch,
        origin.col,
        n,
        k,
        stage.start + operand,
        blueprint,
    );
    copy_rows::<N>(ring, b, &of_b, blueprint);
    copy_scales::<N>(
        ring,
        a_scales,
        b_scales,
        residual_scales,
        item,
        origin,
        geometry,
        stage.index,
        blueprint,
        has_fallback,
    );
}

/// This unit's copies of one operand: of one column of the stage, rows a multiple of 8 apart. What lies past the end of
/// K becomes 0. Rows past the last repeat it: what they give is not written.
#[cube]
#[allow(clippy::too_many_arguments)]
fn plan(
    item: &Item,
    strides: &Strides,
    batch: u32,
    row_0: u32,
    rows: u32,
    k_end: u32,
    start: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
) -> Copies {
    let bytes = comptime!(ALIGNMENT as u32);
    let chunks = comptime!(blueprint.chunks() as u32);
    let column = UNIT_POS % chunks;
    let row = UNIT_POS / chunks;
    let chunk = column ^ swizzle(row, blueprint);
    let block = comptime!(blueprint.block as u32);
    let is_inside = item.block * block + column * bytes < k_end;
    // Nothing is read past the end of K, but no address past the end of the tensor must be formed either.
    let k = select(is_inside, item.block * chunks + column, 0u32);
    let pitch = strides.row / bytes;
    let source = batch * (strides.batch / bytes) + k;
    Copies {
        first: source + (row_0 + row) * pitch,
        last: source + (rows - 1) * pitch,
        apart: comptime!((blueprint.units() / blueprint.chunks()) as u32) * pitch,
        length: select(is_inside, 1u32, 0u32),
        target: start + row * chunks + chunk,
    }
}

#[cube]
fn copy_rows<N: Size>(
    ring: &mut Ring<N>,
    values: &Tensor<Vector<f16, N>>,
    copies: &Copies,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    #[unroll]
    for copy in 0..comptime!(blueprint.copies() as u32) {
        let source = min(copies.first + copy * copies.apart, copies.last);
        // The copies of all units lie side by side.
        let target = copies.target + copy * comptime!(blueprint.units() as u32);
        copy_async_checked(
            &values.slice(source as usize, (source + copies.length) as usize),
            &mut ring.values.slice_mut(target as usize, target as usize + 1),
            comptime!(ALIGNMENT as u32 / 2),
        );
    }
}

/// Starts the copies of the scales of an item's blocks. Rows past the last block repeat its scale.
#[cube]
#[allow(clippy::too_many_arguments)]
fn copy_scales<N: Size>(
    ring: &mut Ring<N>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual_scales: &Tensor<f32>,
    item: &Item,
    origin: &Origin,
    geometry: &Geometry,
    stage: u32,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    // One plane for each operand.
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let side = UNIT_POS / comptime!(PLANE as u32);
    let row_blocks = comptime!(blueprint.row_blocks() as u32);
    if side < 2 && lane < row_blocks {
        let block = comptime!(blueprint.block as u32);
        let target = (stage * 2 + side) * row_blocks + lane;
        if side == 1 {
            let row = min(origin.col / block + lane, (geometry.n - 1) / block);
            copy_scale::<N>(
                ring,
                b_scales,
                &geometry.b_scales,
                origin.batch,
                row,
                item.block,
                target,
            );
        } else {
            let row = min(origin.row / block + lane, (geometry.m - 1) / block);
            if comptime!(has_fallback) && item.residual == 1 {
                copy_scale::<N>(
                    ring,
                    residual_scales,
                    &geometry.a_scales,
                    origin.batch,
                    row,
                    item.block,
                    target,
                );
            } else {
                copy_scale::<N>(
                    ring,
                    a_scales,
                    &geometry.a_scales,
                    origin.batch,
                    row,
                    item.block,
                    target,
                );
            }
        }
    }
}

#[cube]
fn copy_scale<N: Size>(
    ring: &mut Ring<N>,
    scales: &Tensor<f32>,
    strides: &Strides,
    batch: u32,
    row: u32,
    col: u32,
    target: u32,
) {
    let source = batch * strides.batch + row * strides.row + col * strides.col;
    copy_async(
        &scales.slice(source as usize, source as usize + 1),
        &mut ring.scales.slice_mut(target as usize, target as usize + 1),
        1u32,
    );
}

/// Registers that `ldmatrix` filled, as an INT8 operand of the matrix instruction: the same registers under another
/// type. To reinterpret their values one by one costs instructions, since the compiler then takes the bytes apart.
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
    stage: &Stage,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let size!(N4) = 4usize;
    let size!(N2) = 2usize;
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let (slices, steps) = comptime!((fragments_n / SLICE, blueprint.block / MMA_K));
    let operand = comptime!(blueprint.operand_chunks() as u32);
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let (plane_row, plane_col) = plane_origin(blueprint);
    // `ldmatrix` takes the addresses of the eight rows of matrix i from the lanes from 8 i. For A the matrices are the
    // upper and the lower rows of the left half along K, then of the right half; for B both halves of one group of
    // columns.
    let a_row = plane_row + lane % 16;
    let b_row = plane_col + lane % 8;
    let chunks = comptime!(blueprint.chunks() as u32);
    let a_swizzle = swizzle(a_row, blueprint);
    let b_swizzle = swizzle(b_row, blueprint);
    let a_start = stage.start + a_row * chunks;
    let b_start = stage.start + (b_row * chunks + operand);
    let scales = load_scales::<N>(ring, plane_row, plane_col, stage.index, blueprint);

    let definition = MmaDefinition::<i8, i8, i32>::new(MMA_M, MMA_N, MMA_K);
    let mut zero = Array::<Vector<i32, N2>>::new(2usize);
    zero[0] = Vector::new(0i32);
    zero[1] = Vector::new(0i32);
    #[unroll]
    for slice in 0..slices {
        let mut products = Sequence::<Array<Vector<i32, N2>>>::new();
        #[unroll]
        for step in 0..comptime!(steps as u32) {
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

/// Adds the bias to this unit's sums.
#[cube]
fn add_bias(
    sums: &mut Array<f32>,
    bias: &Tensor<f32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let (_, plane_col) = plane_origin(blueprint);
    #[unroll]
    for j in 0..fragments_n {
        #[unroll]
        for side in 0..2usize {
            let col = origin.col + plane_col + lane % 4 * 2 + comptime!((j * MMA_N + side) as u32);
            let mut term = 0.0f32;
            if col < geometry.n {
                term = bias[col as usize];
            }
            #[unroll]
            for i in 0..fragments_m {
                let first = comptime!((i * fragments_n + j) * 4 + side);
                sums[first] += term;
                sums[comptime!(first + 2)] += term;
            }
        }
    }
}

/// Writes this unit's sums: of each fragment, two neighbours in a row and two in the row eight below.
///
/// A pair starts at an even element of memory. In a row that starts at an odd one, a unit's second element and the
/// first one of the next unit make a pair, the last unit's next being the first one in the next fragment.
#[cube]
fn write_sums<F: Numeric, N: Size>(
    pairs: &mut Tensor<Vector<F, N>>,
    singles: &mut Tensor<F>,
    sums: &Array<f32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] is_even: bool,
) {
    let (fragments_m, fragments_n) = comptime!(blueprint.fragments());
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let quad = lane % 4;
    let (plane_row, plane_col) = plane_origin(blueprint);
    let first_col = origin.col + plane_col + quad * 2;
    #[unroll]
    for i in 0..fragments_m {
        #[unroll]
        for half in 0..2usize {
            let row = origin.row + plane_row + lane / 4 + comptime!((i * MMA_M + half * 8) as u32);
            let row_start = (origin.batch * geometry.m + row) * geometry.n;
            let slot = comptime!(i * fragments_n * 4 + half * 2);
            if comptime!(is_even) {
                #[unroll]
                for j in 0..fragments_n {
                    let col = first_col + comptime!((j * MMA_N) as u32);
                    if row < geometry.m && col < geometry.n {
                        let pair = as_pair::<F, N>(
                            sums[comptime!(slot + j * 4)],
                            sums[comptime!(slot + j * 4 + 1)],
                        );
                        pairs[(row_start + col) as usize / 2] = pair;
                    }
                }
            } else {
                let odd = row_start % 2;
                #[unroll]
                for j in 0..fragments_n {
                    let (first, second) = (
                        sums[comptime!(slot + j * 4)],
                        sums[comptime!(slot + j * 4 + 1)],
                    );
                    let next = comptime!(if j + 1 < fragments_n { j + 1 } else { j });
                    let offered = select(quad == 0, sums[comptime!(slot + next * 4)], first);
                    let third = plane_shuffle(offered, lane / 4 * 4 + (quad + 1) % 4);
                    let col = first_col + comptime!((j * MMA_N) as u32);
                    let end = select(row < geometry.m, geometry.n, 0u32);
                    if comptime!(j == 0) {
                        if odd == 1 && quad == 0 && col < end {
                            singles[(row_start + col) as usize] = F::cast_from(first);
                        }
                    }
                    // Rows of both kinds lie in a plane: a branch for each kind would double the stores.
                    let low = select(odd == 1, second, first);
                    let high = select(odd == 1, third, second);
                    // The next fragment's first element is another plane's after the last fragment.
                    let is_last = comptime!(j + 1 == fragments_n).runtime() && quad == 3;
                    if col + odd + 1 < end && !(is_last && odd == 1) {
                        pairs[(row_start + col + odd) as usize / 2] = as_pair::<F, N>(low, high);
                    } else if col + odd < end {
                        singles[(row_start + col + odd) as usize] = F::cast_from(low);
                    }
                }
            }
        }
    }
}

#[cube]
fn as_pair<F: Numeric, N: Size>(first: f32, second: f32) -> Vector<F, N> {
    let mut pair = Vector::<F, N>::empty();
    pair[0usize] = F::cast_from(first);
    pair[1usize] = F::cast_from(second);
    pair
}
