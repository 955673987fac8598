//! Products whose scales cover all of K, rowwise and per-tensor scaling, by the kernels for square blocks, where no
//! kernel has them itself.
//!
//! Such a scale leaves the sum. That of a whole matrix is given to every block; those of rows are 1 in the product, in
//! FP32, and multiply its elements afterwards. That costs one more read and write of the result, and has tensor cores
//! instead of plain integer arithmetic.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, Strides, array, check_float, cube_grid, empty, or_unused,
        read_quad, read_width, storage, write_quad, write_width,
    },
    error::KernelError,
};

use super::{
    GemmOperand, GemmProblem, Strategy, blueprint::HopperBlueprint, check_bias, check_operand,
    gemm, selector,
};

const OPERATION: &str = "gemm_rowwise";
/// Side of the blocks that the product is computed in.
const BLOCK: usize = HopperBlueprint::DEPTH;
const UNITS: u32 = 256;

/// True where the scales of a product cover all of K, each those of rows or of a whole matrix.
pub(super) fn covers_k(problem: &GemmProblem) -> bool {
    let is = |block, rows| Scaling::of(block, rows, problem.k).is_some();
    is(problem.a_scale_block, problem.m) && is(problem.b_scale_block, problem.n)
}

/// True where a product is of this kind, and the device computes those of blocks by better means than this kind's.
pub(super) fn pays<R: Runtime>(client: &ComputeClient<R>, problem: &GemmProblem) -> bool {
    let of_blocks = GemmProblem {
        a_scale_block: (BLOCK, BLOCK),
        b_scale_block: (BLOCK, BLOCK),
        ..*problem
    };
    let has_kernel = |problem, strategy| selector::rank(client, problem, strategy).is_ok();
    let by_instructions = |problem| {
        has_kernel(problem, Strategy::Hopper) || has_kernel(problem, Strategy::TensorCore)
    };
    covers_k(problem) && !by_instructions(problem) && by_instructions(&of_blocks)
}

/// `C = A B^T + bias` as [`gemm`](fn@gemm) computes it, for operands whose scales cover all of K: of whole rows, or of
/// the whole matrix. `strategy` is for the product in blocks of 128.
///
/// Up to K = 2^17, [`gemm`](fn@gemm) takes a faster kernel on Hopper, whose sums are integers over all of K; here they
/// are added in FP32 from block to block.
///
/// # Errors
///
/// When shapes or element types differ from those that [`gemm`](fn@gemm) takes, a scale does not cover all of K, or
/// `strategy` names a kernel that the device rules out.
pub fn gemm_rowwise<R: Runtime>(
    client: &ComputeClient<R>,
    a: &GemmOperand<R>,
    b: &GemmOperand<R>,
    bias: Option<&TensorHandle<R>>,
    out_dtype: StorageType,
    strategy: Strategy,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "the output", out_dtype)?;
    let (a_view, a_scales) = check_operand("a", a)?;
    let (b_view, b_scales) = check_operand("b", b)?;
    let (m, n, k) = (a_view.shape.rows, b_view.shape.rows, a_view.shape.cols);
    check_bias(OPERATION, bias, n)?;
    let ways = [("a", a, &a_view, m), ("b", b, &b_view, n)].map(|(name, operand, view, rows)| {
        let block = (operand.rows_per_scale, operand.depth_per_scale);
        Scaling::of(block, rows, k).ok_or_else(|| KernelError::Unsupported {
            operation: OPERATION,
            reason: format!(
                "operand {name} {:?} with scales of {} x {} elements",
                view.shape, operand.rows_per_scale, operand.depth_per_scale
            ),
            remedy: "quantize it with a scale for each row, or for the whole matrix",
        })
    });
    let [of_a, of_b] = ways;
    let (of_a, of_b) = (of_a?, of_b?);
    let in_blocks =
        |operand: &GemmOperand<R>, view: &MatrixView, scales: &MatrixView, way| GemmOperand {
            values: operand.values.clone(),
            scales: block_scales(client, operand, view, scales, way),
            rows_per_scale: BLOCK,
            depth_per_scale: BLOCK,
        };
    let blocks_of_a = in_blocks(a, &a_view, &a_scales, of_a);
    let blocks_of_b = in_blocks(b, &b_view, &b_scales, of_b);
    if of_a == Scaling::Matrix && of_b == Scaling::Matrix {
        return gemm(
            client,
            &blocks_of_a,
            &blocks_of_b,
            None,
            bias,
            out_dtype,
            strategy,
        );
    }
    let sums = gemm(
        client,
        &blocks_of_a,
        &blocks_of_b,
        None,
        None,
        storage::<f32>(),
        strategy,
    )?;
    let out = empty(client, sums.shape().to_vec(), out_dtype);
    let view = MatrixView::new(OPERATION, &sums)?;
    if view.shape.num_elements() == 0 {
        return Ok(out);
    }
    let (width, out_width) = (read_width(&sums, &view), write_width(n));
    let quads = view.shape.batch * m * n.div_ceil(4);
    let bias_or_any = or_unused(bias, &sums, storage::<f32>());
    // SAFETY: every access is guarded by the shape in `geometry`; the scales have one element for each row of theirs.
    #[allow(unsafe_code)]
    unsafe {
        scale_rows_kernel::launch_unchecked::<R>(
            client,
            cube_grid(quads.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            width,
            out_width,
            array(sums),
            array(a.scales.clone()),
            array(b.scales.clone()),
            array(bias_or_any),
            array(out.clone()),
            view.geometry(),
            Strides::of(&a_scales),
            Strides::of(&b_scales),
            view.shape.batch as u32,
            of_a == Scaling::Rows,
            of_b == Scaling::Rows,
            bias.is_some(),
            width,
            out_width,
            out_dtype,
        );
    }
    Ok(out)
}

/// Which elements of an operand share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scaling {
    Rows,
    Matrix,
}

impl Scaling {
    /// That of scales of blocks of so many rows and such a depth, in an operand of `rows` and `depth`; `None` where a
    /// scale covers neither a row nor the whole matrix.
    fn of(
        (rows_per_scale, depth_per_scale): (usize, usize),
        rows: usize,
        depth: usize,
    ) -> Option<Self> {
        let covers = depth_per_scale >= depth;
        match rows_per_scale {
            _ if !covers => None,
            per_scale if per_scale >= rows => Some(Self::Matrix),
            1 => Some(Self::Rows),
            _ => None,
        }
    }
}

/// Scales `[.., rows / 128, K / 128]` of an operand's blocks: that of its matrix, or 1 where rows have their own.
fn block_scales<R: Runtime>(
    client: &ComputeClient<R>,
    operand: &GemmOperand<R>,
    view: &MatrixView,
    scales: &MatrixView,
    way: Scaling,
) -> TensorHandle<R> {
    let (rows, cols) = (
        view.shape.rows.div_ceil(BLOCK),
        view.shape.cols.div_ceil(BLOCK),
    );
    let out = empty(client, view.tensor_shape(rows, cols), storage::<f32>());
    let count = view.shape.batch * rows * cols;
    if count > 0 {
        // SAFETY: the kernel guards its index with the number of blocks; each matrix has a scale.
        #[allow(unsafe_code)]
        unsafe {
            block_scales_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS as usize)),
                CubeDim::new_1d(UNITS),
                array(operand.scales.clone()),
                array(out.clone()),
                (rows * cols) as u32,
                count as u32,
                scales.batch_stride as u32,
                way == Scaling::Matrix,
            );
        }
    }
    out
}

#[cube(launch_unchecked)]
fn block_scales_kernel(
    scales: &Array<f32>,
    out: &mut Array<f32>,
    blocks: u32,
    count: u32,
    batch_stride: u32,
    #[comptime] of_matrix: bool,
) {
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    if index < count {
        if comptime!(of_matrix) {
            out[index as usize] = scales[(index / blocks * batch_stride) as usize];
        } else {
            out[index as usize] = 1.0f32;
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn scale_rows_kernel<F: Numeric, NS: Size, NO: Size>(
    sums: &Array<Vector<f32, NS>>,
    a_scales: &Array<f32>,
    b_scales: &Array<f32>,
    bias: &Array<f32>,
    out: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    a_strides: Strides,
    b_strides: Strides,
    batch_size: u32,
    #[comptime] rows_of_a: bool,
    #[comptime] rows_of_b: bool,
    #[comptime] has_bias: bool,
    #[comptime] width: usize,
    #[comptime] out_width: usize,
    #[define(F)] _dtype: StorageType,
) {
    let quads_of_row = geometry.cols.div_ceil(4);
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    let row_of_all = index / quads_of_row;
    let (batch, row) = (row_of_all / geometry.rows, row_of_all % geometry.rows);
    let first_col = index % quads_of_row * 4;
    if batch < batch_size {
        let quad = read_quad::<f32, NS>(sums, &geometry, batch, row, first_col, width);
        let mut of_row = 1.0f32;
        if comptime!(rows_of_a) {
            of_row = a_scales[(batch * a_strides.batch + row * a_strides.row) as usize];
        }
        let mut scaled = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4u32 {
            let col = min(first_col + lane, geometry.cols - 1);
            let mut value = quad[lane as usize] * of_row;
            if comptime!(rows_of_b) {
                value *= b_scales[(batch * b_strides.batch + col * b_strides.row) as usize];
            }
            if comptime!(has_bias) {
                value += bias[col as usize];
            }
            scaled[lane as usize] = value;
        }
        let row_start = row_of_all * geometry.cols;
        write_quad::<f32, F, NO>(out, &scaled, row_start, first_col, geometry.cols, out_width);
    }
}
