//! The softmax of attention scores, and its gradient, each in one launch.
//!
//! Built from tensor operations, a softmax in FP32 over scores in BF16 takes a dozen passes over a matrix that is
//! larger than everything else in a layer. Here a cube takes a row: scores are read from memory once, as each later
//! loop over the row finds them in the cache, and all arithmetic is FP32 whatever the tensors' type.
//!
//! With `z = scale * scores`, masked: `P = exp(z - max z) / sum exp(z - max z)`. For the gradient the probabilities are
//! computed again from the scores, as FlashAttention does (Dao et al., 2022, Algorithm 4), so that nothing of the size
//! of the scores is kept between the passes: `dZ = P (dP - sum P dP)`, `dscores = scale * dZ`.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_float, cube_grid, empty, has_planes_of_32,
        read_quad, read_width, write_quad, write_width,
    },
    error::KernelError,
    fast,
};

const OPERATION: &str = "softmax";
const OPERATION_BACKWARD: &str = "softmax_backward";
pub(crate) const UNITS: usize = 128;
const PLANE: usize = 32;

/// The scaling and the mask of scores before the exponential.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionScores {
    /// Multiplies the scores.
    pub scale: f32,
    /// True where query `i` sees only the keys up to `i + keys - queries`: the last query sees them all.
    pub causal: bool,
}

/// The probabilities `[.., queries, keys]` of attention scores: each row's softmax over the keys that it sees, 0 for
/// the others. A row that sees nothing, or scores of negative infinity only, is 0; NaN and positive infinity make NaN
/// of it.
///
/// - `scores`: f32, f16 or bf16 `[.., queries, keys]`, any strides. The probabilities are of the same type, contiguous.
///
/// # Errors
///
/// When `scores` is no matrix or no float tensor.
pub fn softmax<R: Runtime>(
    client: &ComputeClient<R>,
    scores: &TensorHandle<R>,
    attention: AttentionScores,
) -> Result<TensorHandle<R>, KernelError> {
    let view = MatrixView::new(OPERATION, scores)?;
    check_float(client, OPERATION, "scores", scores.dtype)?;
    Ok(launch(client, scores, &view, None, attention).0)
}

/// The probabilities, as [`softmax`] gives them, and the gradient of the scores, from the gradient of the
/// probabilities.
///
/// - `scores`, `grad`: f32, f16 or bf16 `[.., queries, keys]`, of one shape and type, any strides. Both results are of
///   that type, contiguous.
///
/// # Errors
///
/// When the inputs are no matrices or no float tensors, or differ in shape or type.
pub fn softmax_backward<R: Runtime>(
    client: &ComputeClient<R>,
    scores: &TensorHandle<R>,
    grad: &TensorHandle<R>,
    attention: AttentionScores,
) -> Result<(TensorHandle<R>, TensorHandle<R>), KernelError> {
    let view = MatrixView::new(OPERATION_BACKWARD, scores)?;
    let grad_view = MatrixView::new(OPERATION_BACKWARD, grad)?;
    check_float(client, OPERATION_BACKWARD, "scores", scores.dtype)?;
    if grad.shape() != scores.shape() || grad.dtype != scores.dtype {
        return Err(KernelError::Shape {
            operation: OPERATION_BACKWARD,
            got: format!(
                "scores {:?} of {}, gradient {:?} of {}",
                scores.shape(),
                scores.dtype,
                grad.shape(),
                grad.dtype
            ),
            remedy: "pass the gradient of the probabilities, of the scores' shape and type",
        });
    }
    let grad = Some((grad, &grad_view));
    Ok(launch(client, scores, &view, grad, attention))
}

/// The probabilities and, where there is a gradient of them, that of the scores; else a tensor that nothing was written
/// to.
fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    scores: &TensorHandle<R>,
    view: &MatrixView,
    grad: Option<(&TensorHandle<R>, &MatrixView)>,
    attention: AttentionScores,
) -> (TensorHandle<R>, TensorHandle<R>) {
    let shape = view.shape;
    let matrix = || {
        let shape = view.tensor_shape(shape.rows, shape.cols);
        empty(client, shape, scores.dtype)
    };
    let probabilities = matrix();
    let grad_scores = match grad {
        Some(_) => matrix(),
        None => scores.clone(),
    };
    if shape.num_elements() > 0 {
        let (read_grad, grad_view) = grad.unwrap_or((scores, view));
        let widths = (
            read_width(scores, view),
            read_width(read_grad, grad_view),
            write_width(shape.cols),
        );
        // SAFETY: reads are guarded by the shape in the geometries, for which the outputs were allocated.
        #[allow(unsafe_code)]
        unsafe {
            softmax_kernel::launch_unchecked::<R>(
                client,
                cube_grid(shape.batch * shape.rows),
                CubeDim::new_1d(UNITS as u32),
                widths.0,
                widths.1,
                widths.2,
                array(scores.clone()),
                array(read_grad.clone()),
                array(probabilities.clone()),
                array(grad_scores.clone()),
                view.geometry(),
                grad_view.geometry(),
                shape.batch as u32,
                attention.scale,
                widths,
                attention.causal,
                grad.is_some(),
                has_planes_of_32(client),
                scores.dtype,
            );
        }
    }
    (probabilities, grad_scores)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn softmax_kernel<F: Numeric, NX: Size, NG: Size, NO: Size>(
    scores: &Array<Vector<F, NX>>,
    grad: &Array<Vector<F, NG>>,
    probabilities: &mut Array<Vector<F, NO>>,
    grad_scores: &mut Array<Vector<F, NO>>,
    geometry: MatrixGeometry,
    grad_geometry: MatrixGeometry,
    batch_size: u32,
    scale: f32,
    #[comptime] widths: (usize, usize, usize),
    #[comptime] causal: bool,
    #[comptime] has_grad: bool,
    #[comptime] planes: bool,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32;
    if index >= batch_size * geometry.rows {
        terminate!();
    }
    let row = score_row(&geometry, index, scale, causal);
    let max = row_max::<F, NX>(scores, &geometry, &row, widths.0, planes);
    // Of the weights, and of their products with the gradients.
    let count = comptime!(if has_grad { 2usize } else { 1usize });
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for index in 0..count {
        sums[index] = 0.0f32;
    }
    let mut col = UNIT_POS * 4;
    while col < row.visible {
        let weights = weights::<F, NX>(scores, &geometry, &row, col, max, widths.0);
        #[unroll]
        for lane in 0..4usize {
            sums[0usize] += weights[lane];
        }
        if comptime!(has_grad) {
            let grads = quad_of::<F, NG>(grad, &grad_geometry, &row, col, widths.1);
            #[unroll]
            for lane in 0..4u32 {
                // A gradient behind the mask may be anything, NaN too.
                if col + lane < row.visible {
                    sums[1usize] += weights[lane as usize] * grads[lane as usize];
                }
            }
        }
        col += comptime!(4 * UNITS as u32);
    }
    reduce(&mut sums, Reduction::Sum, count, planes);
    let inverse = 1.0f32 / at_least_smallest(sums[0usize]);
    let mut mean = 0.0f32;
    if comptime!(has_grad) {
        mean = sums[1usize] * inverse;
    }
    let start = index * geometry.cols;
    col = UNIT_POS * 4;
    while col < geometry.cols {
        // Behind the mask nothing is read. A row of NaN is NaN there too.
        let mut quad = Array::<f32>::new(4usize);
        #[unroll]
        for lane in 0..4usize {
            quad[lane] = select(inverse.is_nan(), inverse, 0.0f32);
        }
        let sees = col < row.visible;
        if sees {
            let weights = weights::<F, NX>(scores, &geometry, &row, col, max, widths.0);
            #[unroll]
            for lane in 0..4usize {
                quad[lane] = weights[lane] * inverse;
            }
        }
        write_quad::<f32, F, NO>(probabilities, &quad, start, col, geometry.cols, widths.2);
        if comptime!(has_grad) {
            let mut of_scores = Array::<f32>::new(4usize);
            #[unroll]
            for lane in 0..4usize {
                of_scores[lane] = 0.0f32;
            }
            if sees {
                let grads = quad_of::<F, NG>(grad, &grad_geometry, &row, col, widths.1);
                #[unroll]
                for lane in 0..4u32 {
                    let value = quad[lane as usize] * (grads[lane as usize] - mean) * scale;
                    of_scores[lane as usize] = select(col + lane < row.visible, value, 0.0f32);
                }
            }
            write_quad::<f32, F, NO>(grad_scores, &of_scores, start, col, geometry.cols, widths.2);
        }
        col += comptime!(4 * UNITS as u32);
    }
}

/// The row that a cube works on.
#[derive(CubeType, Clone, Copy)]
struct ScoreRow {
    batch: u32,
    row: u32,
    scale: f32,
    /// The keys that the query sees: the first so many.
    visible: u32,
}

/// Row number `index` of all matrices.
#[cube]
fn score_row(
    geometry: &MatrixGeometry,
    index: u32,
    scale: f32,
    #[comptime] causal: bool,
) -> ScoreRow {
    let row = index % geometry.rows;
    let mut visible = geometry.cols;
    if comptime!(causal) {
        // Queries beyond the keys' number, if there are more of them, see nothing.
        let end = row + 1 + geometry.cols;
        visible = min(
            select(end > geometry.rows, end - geometry.rows, 0u32),
            geometry.cols,
        );
    }
    ScoreRow {
        batch: index / geometry.rows,
        row,
        scale,
        visible,
    }
}

/// Four neighbours of the row.
#[cube]
fn quad_of<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    row: &ScoreRow,
    col: u32,
    #[comptime] width: usize,
) -> Array<f32> {
    read_quad::<F, N>(x, geometry, row.batch, row.row, col, width)
}

/// `scale * scores` of four neighbours; the least number behind the mask.
#[cube]
fn scaled<F: Numeric, N: Size>(
    scores: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    row: &ScoreRow,
    col: u32,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut quad = quad_of::<F, N>(scores, geometry, row, col, width);
    #[unroll]
    for lane in 0..4u32 {
        quad[lane as usize] = select(
            col + lane < row.visible,
            quad[lane as usize] * row.scale,
            f32::new(f32::MIN),
        );
    }
    quad
}

/// The largest of `scale * scores` that the row sees, the same in all units; NaN is passed over.
#[cube]
fn row_max<F: Numeric, N: Size>(
    scores: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    row: &ScoreRow,
    #[comptime] width: usize,
    #[comptime] planes: bool,
) -> f32 {
    let mut largest = Array::<f32>::new(1usize);
    largest[0usize] = f32::new(f32::MIN);
    let mut col = UNIT_POS * 4;
    while col < row.visible {
        let quad = scaled::<F, N>(scores, geometry, row, col, width);
        #[unroll]
        for lane in 0..4usize {
            if quad[lane] > largest[0usize] {
                largest[0usize] = quad[lane];
            }
        }
        col += comptime!(4 * UNITS as u32);
    }
    reduce(&mut largest, Reduction::Max, 1usize, planes);
    largest[0usize]
}

/// `exp(scale * scores - max)` of four neighbours, 0 behind the mask.
#[cube]
fn weights<F: Numeric, N: Size>(
    scores: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    row: &ScoreRow,
    col: u32,
    max: f32,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut quad = scaled::<F, N>(scores, geometry, row, col, width);
    #[unroll]
    for lane in 0..4u32 {
        let weight = fast::exp(quad[lane as usize] - max);
        quad[lane as usize] = select(col + lane < row.visible, weight, 0.0f32);
    }
    quad
}

/// A divisor: a row that sees nothing has no weight, and is divided by the least normal number to stay 0.
#[cube]
fn at_least_smallest(sum: f32) -> f32 {
    select(sum < f32::MIN_POSITIVE, f32::new(f32::MIN_POSITIVE), sum)
}

/// The number that units make of their values together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reduction {
    Max,
    Sum,
}

/// Replaces each of these many values by what it makes with those of all units: in one order whatever the device, that
/// of a tree whose last level are neighbours.
#[cube]
pub(crate) fn reduce(
    values: &mut Array<f32>,
    #[comptime] reduction: Reduction,
    #[comptime] count: usize,
    #[comptime] planes: bool,
) {
    // Each reduction has memory of its own: units may still read that of an earlier one.
    let mut shared = SharedMemory::<f32>::new(comptime!(count * UNITS));
    let unit = UNIT_POS as usize;
    #[unroll]
    for index in 0..count {
        shared[unit + comptime!(index * UNITS)] = values[index];
    }
    sync_cube();
    if comptime!(planes) {
        // Every plane does all of it, each unit the part of the tree above its lane.
        let lane = UNIT_POS_PLANE as usize;
        #[unroll]
        for index in 0..count {
            let mut parts = Array::<f32>::new(comptime!(UNITS / PLANE));
            #[unroll]
            for part in 0..comptime!(UNITS / PLANE) {
                parts[part] = shared[lane + comptime!(index * UNITS + part * PLANE)];
            }
            #[unroll]
            for step in 0..comptime!((UNITS / PLANE).ilog2()) {
                let distance = comptime!((UNITS / PLANE) >> (step + 1));
                #[unroll]
                for part in 0..distance {
                    parts[part] = combined(parts[part], parts[part + distance], reduction);
                }
            }
            let mut value = parts[0usize];
            #[unroll]
            for step in 0..comptime!(PLANE.ilog2()) {
                let other = plane_shuffle_xor(value, comptime!((PLANE >> (step + 1)) as u32));
                value = combined(value, other, reduction);
            }
            values[index] = value;
        }
    } else {
        #[unroll]
        for step in 0..comptime!(UNITS.ilog2()) {
            let distance = comptime!(UNITS >> (step + 1));
            if unit < distance {
                #[unroll]
                for index in 0..count {
                    let slot = unit + comptime!(index * UNITS);
                    shared[slot] = combined(shared[slot], shared[slot + distance], reduction);
                }
            }
            sync_cube();
        }
        #[unroll]
        for index in 0..count {
            values[index] = shared[comptime!(index * UNITS)];
        }
    }
}

#[cube]
fn combined(a: f32, b: f32, #[comptime] reduction: Reduction) -> f32 {
    if comptime!(reduction == Reduction::Max) {
        max(a, b)
    } else {
        a + b
    }
}
