//! The product in plain integer arithmetic: any device, any scale geometry.
//!
//! A cube of 16 x 16 units computes a tile of 64 x 64 outputs, 4 x 4 in each unit. Both operands pass through shared
//! memory, 16 deep at a time, widened to 32 bits and with K outermost, so that units read neighbouring words.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::device::{Strides, cube_grid, or_unused, storage};

use super::{GemmArgs, blueprint::PortableBlueprint};

const TILE: usize = 64;
const STEP: usize = 16;
const UNITS: usize = 256;

/// Sizes of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    batch: u32,
    m: u32,
    n: u32,
    k: u32,
    /// Elements along K between two scalings.
    depth: u32,
}

/// The rows and the depth of a scale, and the strides of the scales.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ScaleGeometry {
    rows: u32,
    depth: u32,
    strides: Strides,
}

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    args: &GemmArgs<R>,
    blueprint: PortableBlueprint,
) {
    let problem = args.problem;
    let tiles = problem.m.div_ceil(TILE) * problem.n.div_ceil(TILE);
    let residual = args.fallback;
    let optional = |tensor: Option<&TensorHandle<R>>, dtype| {
        or_unused(tensor, &args.a.scales, dtype).into_arg()
    };
    let scale_geometry = |block: (usize, usize), view| {
        ScaleGeometryLaunch::new(
            clamp_to_u32(block.0),
            clamp_to_u32(block.1),
            Strides::of(view),
        )
    };
    // SAFETY: every access is guarded by the sizes, to which all shapes were checked. Unused arguments are not read.
    #[allow(unsafe_code)]
    unsafe {
        gemm_portable_kernel::launch_unchecked::<R>(
            client,
            cube_grid(problem.batch * tiles),
            CubeDim::new_1d(UNITS as u32),
            args.a.values.clone().into_arg(),
            args.b.values.clone().into_arg(),
            args.a.scales.clone().into_arg(),
            args.b.scales.clone().into_arg(),
            optional(residual.map(|r| &r.values), storage::<i8>()),
            optional(residual.map(|r| &r.scales), storage::<f32>()),
            optional(residual.map(|r| &r.flags), storage::<u32>()),
            optional(args.bias, storage::<f32>()),
            args.out.clone().into_arg(),
            SizesLaunch::new(
                problem.batch as u32,
                problem.m as u32,
                problem.n as u32,
                problem.k as u32,
                blueprint.depth as u32,
            ),
            Strides::of(&args.a_view),
            Strides::of(&args.b_view),
            scale_geometry(problem.a_scale_block, &args.a_scales),
            scale_geometry(problem.b_scale_block, &args.b_scales),
            residual.is_some(),
            args.bias.is_some(),
            args.out.dtype,
        );
    }
}

/// A scale may be said to cover more than there is.
fn clamp_to_u32(extent: usize) -> u32 {
    u32::try_from(extent).unwrap_or(u32::MAX)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn gemm_portable_kernel<F: Numeric>(
    a: &Tensor<i8>,
    b: &Tensor<i8>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    residual: &Tensor<i8>,
    residual_scales: &Tensor<f32>,
    flags: &Tensor<u32>,
    bias: &Tensor<f32>,
    out: &mut Tensor<F>,
    sizes: Sizes,
    a_strides: Strides,
    b_strides: Strides,
    a_scale: ScaleGeometry,
    b_scale: ScaleGeometry,
    #[comptime] has_fallback: bool,
    #[comptime] has_bias: bool,
    #[define(F)] _dtype: StorageType,
) {
    let tile = comptime!(TILE as u32);
    let tiles_m = sizes.m.div_ceil(tile);
    let tiles_n = sizes.n.div_ceil(tile);
    let index = CUBE_POS as u32;
    let batch = index / (tiles_m * tiles_n);
    if batch >= sizes.batch {
        terminate!();
    }
    let row_0 = index % (tiles_m * tiles_n) / tiles_n * tile;
    let col_0 = index % tiles_n * tile;
    let unit_row = row_0 + UNIT_POS / 16 * 4;
    let unit_col = col_0 + UNIT_POS % 16 * 4;

    let mut a_tile = SharedMemory::<i32>::new(comptime!(TILE * STEP));
    let mut b_tile = SharedMemory::<i32>::new(comptime!(TILE * STEP));
    let mut sums = Array::<f32>::new(16usize);
    let mut products = Array::<i32>::new(16usize);
    #[unroll]
    for slot in 0..16usize {
        sums[slot] = 0.0f32;
    }

    let mut k = 0u32.runtime();
    while k < sizes.k {
        let k_end = min(k + sizes.depth, sizes.k);
        clear(&mut products);
        let mut step = k;
        while step < k_end {
            sync_cube();
            stage(
                &mut a_tile,
                a,
                &a_strides,
                batch,
                row_0,
                sizes.m,
                step,
                k_end,
            );
            stage(
                &mut b_tile,
                b,
                &b_strides,
                batch,
                col_0,
                sizes.n,
                step,
                k_end,
            );
            sync_cube();
            accumulate(&mut products, &a_tile, &b_tile);
            step += comptime!(STEP as u32);
        }
        add_scaled(
            &mut sums, &products, a_scales, b_scales, &a_scale, &b_scale, &sizes, batch, unit_row,
            unit_col, k,
        );
        if comptime!(has_fallback) {
            if any_falls_back(flags, &a_scale, &sizes, batch, row_0, k) {
                clear(&mut products);
                let mut step = k;
                while step < k_end {
                    sync_cube();
                    stage_residual(
                        &mut a_tile,
                        residual,
                        flags,
                        &a_scale,
                        &a_strides,
                        batch,
                        row_0,
                        sizes.m,
                        step,
                        k_end,
                    );
                    stage(
                        &mut b_tile,
                        b,
                        &b_strides,
                        batch,
                        col_0,
                        sizes.n,
                        step,
                        k_end,
                    );
                    sync_cube();
                    accumulate(&mut products, &a_tile, &b_tile);
                    step += comptime!(STEP as u32);
                }
                add_scaled(
                    &mut sums,
                    &products,
                    residual_scales,
                    b_scales,
                    &a_scale,
                    &b_scale,
                    &sizes,
                    batch,
                    unit_row,
                    unit_col,
                    k,
                );
            }
        }
        k += sizes.depth;
    }

    #[unroll]
    for i in 0..4u32 {
        #[unroll]
        for j in 0..4u32 {
            let row = unit_row + i;
            let col = unit_col + j;
            if row < sizes.m && col < sizes.n {
                let mut sum = sums[comptime!((i * 4 + j) as usize)];
                if comptime!(has_bias) {
                    sum += bias[col as usize];
                }
                out[((batch * sizes.m + row) * sizes.n + col) as usize] = F::cast_from(sum);
            }
        }
    }
}

#[cube]
fn clear(products: &mut Array<i32>) {
    #[unroll]
    for slot in 0..16usize {
        products[slot] = 0i32;
    }
}

/// Index of the scale of a row and a position along K.
#[cube]
fn scale_index(geometry: &ScaleGeometry, batch: u32, row: u32, k: u32) -> usize {
    (batch * geometry.strides.batch
        + row / geometry.rows * geometry.strides.row
        + k / geometry.depth * geometry.strides.col) as usize
}

/// Brings 16 elements along K of 64 rows to shared memory, 0 outside the matrix.
#[cube]
#[allow(clippy::too_many_arguments)]
fn stage(
    tile: &mut SharedMemory<i32>,
    values: &Tensor<i8>,
    strides: &Strides,
    batch: u32,
    row_0: u32,
    rows: u32,
    k: u32,
    k_end: u32,
) {
    let tile_row = UNIT_POS / 4;
    let row = row_0 + tile_row;
    let start = batch * strides.batch + row * strides.row;
    #[unroll]
    for lane in 0..4u32 {
        let depth = UNIT_POS % 4 * 4 + lane;
        let mut value = 0i32;
        if row < rows && k + depth < k_end {
            value = i32::cast_from(values[(start + k + depth) as usize]);
        }
        tile[(depth * comptime!(TILE as u32) + tile_row) as usize] = value;
    }
}

/// [`stage`] of the residual: 0 also for the rows whose block did not fall back, where it is undefined.
#[cube]
#[allow(clippy::too_many_arguments)]
fn stage_residual(
    tile: &mut SharedMemory<i32>,
    residual: &Tensor<i8>,
    flags: &Tensor<u32>,
    scale: &ScaleGeometry,
    strides: &Strides,
    batch: u32,
    row_0: u32,
    rows: u32,
    k: u32,
    k_end: u32,
) {
    let row = row_0 + UNIT_POS / 4;
    let mut last_row = 0u32;
    if row < rows && flags[scale_index(scale, batch, row, k)] == 1 {
        last_row = rows;
    }
    stage(tile, residual, strides, batch, row_0, last_row, k, k_end);
}

/// True where a block of this tile's rows fell back. Every unit reads the same flags, so all of a cube agree.
#[cube]
fn any_falls_back(
    flags: &Tensor<u32>,
    scale: &ScaleGeometry,
    sizes: &Sizes,
    batch: u32,
    row_0: u32,
    k: u32,
) -> bool {
    let row_end = min(row_0 + comptime!(TILE as u32), sizes.m);
    let mut row = row_0;
    let mut any = 0u32;
    while row < row_end {
        any |= flags[scale_index(scale, batch, row, k)];
        row += scale.rows;
    }
    any != 0
}

/// Adds the products of what is in shared memory.
#[cube]
fn accumulate(products: &mut Array<i32>, a_tile: &SharedMemory<i32>, b_tile: &SharedMemory<i32>) {
    let row = UNIT_POS / 16 * 4;
    let col = UNIT_POS % 16 * 4;
    for depth in 0..comptime!(STEP as u32) {
        let start = depth * comptime!(TILE as u32);
        #[unroll]
        for i in 0..4u32 {
            let left = a_tile[(start + row + i) as usize];
            #[unroll]
            for j in 0..4u32 {
                products[comptime!((i * 4 + j) as usize)] +=
                    left * b_tile[(start + col + j) as usize];
            }
        }
    }
}

/// Adds the products of one depth to the sums, times both scales.
#[cube]
#[allow(clippy::too_many_arguments)]
fn add_scaled(
    sums: &mut Array<f32>,
    products: &Array<i32>,
    a_scales: &Tensor<f32>,
    b_scales: &Tensor<f32>,
    a_scale: &ScaleGeometry,
    b_scale: &ScaleGeometry,
    sizes: &Sizes,
    batch: u32,
    row: u32,
    col: u32,
    k: u32,
) {
    #[unroll]
    for i in 0..4u32 {
        let scale_row = min(row + i, sizes.m - 1);
        let left = a_scales[scale_index(a_scale, batch, scale_row, k)];
        #[unroll]
        for j in 0..4u32 {
            let scale_col = min(col + j, sizes.n - 1);
            let right = b_scales[scale_index(b_scale, batch, scale_col, k)];
            let slot = comptime!((i * 4 + j) as usize);
            sums[slot] += f32::cast_from(products[slot]) * (left * right);
        }
    }
}
