//! Rotary positions (Su et al., "RoFormer", arXiv 2104.09864, equation 34), as `burn::nn::RotaryEncoding` computes them,
//! and their gradient, each in one launch.
//!
//! That module multiplies each pair of neighbours by a matrix `[2, 4]` of 0, 1 and -1, multiplies what becomes of it by
//! cosines and sines, and sums pairs up: `y = x a + x' b, y' = x c + x' d`, where a to d are sums of two products of the
//! matrix and the table. So the matrix need not be looked at. One kernel reads x and writes y; operation by operation it
//! is a tensor of twice the size, written and read three times.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_dtype, check_float, cube_grid, empty},
    error::KernelError,
};

const OPERATION: &str = "rotary";
const UNITS: usize = 256;
/// Heads for which a unit reads the table once. It reads all of them before it writes the first.
const HEADS_OF_UNIT: u32 = 8;
/// Factors of a pair in the table, read at once.
const PAIR: usize = 4;
/// Elements of the matrix, `[2, 4]`.
const TURN: usize = 8;

/// The direction of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RotaryPass {
    /// y of x, contiguous.
    Forward,
    /// The gradient of x of that of y, which lies in memory as `[batch, positions, heads, features]` where there are four
    /// dimensions: heads are slices of the rows that a linear layer gave.
    Backward,
}

/// Turns each pair of neighbours in the rows of x by the angle of its position, in the shape and element type of x.
///
/// - `x`: f32, f16 or bf16 `[.., positions, features]` of two to four dimensions, features even and side by side in
///   memory, rows at multiples of two elements.
/// - `turn`: f32, f16 or bf16 `[.., 2, 4]` of any strides: what becomes of a pair.
/// - `table`: of the type of `turn`, `[.., positions, features, 2]`, contiguous: the factors of what became of it.
///
/// All arithmetic is FP32, rounded once.
///
/// # Errors
///
/// When shapes, element types or strides differ from these.
pub fn rotary<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    turn: &TensorHandle<R>,
    table: &TensorHandle<R>,
    pass: RotaryPass,
) -> Result<TensorHandle<R>, KernelError> {
    check_float(client, OPERATION, "x", x.dtype)?;
    check_float(client, OPERATION, "the matrix", turn.dtype)?;
    check_dtype(
        OPERATION,
        "the table",
        table,
        turn.dtype,
        "use the type of the matrix",
    )?;
    check_contiguous(OPERATION, table)?;
    let of_turn = turn_strides(turn);
    let heads = Heads::of(x).filter(|it| {
        let of_table = table.shape().iter().product::<usize>();
        it.width.is_multiple_of(2) && of_table == 2 * it.positions * it.width
    });
    let Some((heads, [turn_row, turn_col])) = heads.zip(of_turn) else {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "x {:?}, a matrix {:?} and a table {:?}",
                x.shape(),
                turn.shape(),
                table.shape()
            ),
            remedy: "pass x [.., positions, features] with features even, a matrix [2, 4] and a table [positions, features, 2]",
        });
    };
    let Some(vector) = heads.vector(x) else {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("x {:?} with strides {:?}", x.shape(), x.strides()),
            remedy: "make it contiguous",
        });
    };
    let out = empty_for(client, x, pass);
    let to = Heads::of(&out).expect("the shape of x");
    let places = heads.positions * heads.width / vector;
    let groups = (heads.outer * heads.inner).div_ceil(HEADS_OF_UNIT as usize);
    if places * groups > 0 {
        // SAFETY: reads and writes are guarded by the numbers of positions and heads, for which the output was allocated
        // and whose rows the table has.
        #[allow(unsafe_code)]
        unsafe {
            rotary_kernel::launch_unchecked::<R>(
                client,
                cube_grid((places * groups).div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                vector,
                PAIR,
                array(x.clone()),
                array(turn.clone()),
                array(table.clone()),
                array(out.clone()),
                heads.steps(vector),
                to.steps(vector),
                TurnStridesLaunch::new(turn_row, turn_col),
                (heads.outer * heads.inner) as u32,
                heads.inner as u32,
                places as u32,
                (heads.width / vector) as u32,
                vector,
                (heads.outer * heads.inner).is_multiple_of(HEADS_OF_UNIT as usize),
                pass == RotaryPass::Backward,
                x.dtype,
                turn.dtype,
            );
        }
    }
    Ok(out)
}

/// Elements from one row and column of a matrix `[.., 2, 4]` to the next; `None` for another shape.
fn turn_strides<R: Runtime>(turn: &TensorHandle<R>) -> Option<[u32; 2]> {
    let [leading @ .., 2, 4] = &turn.shape()[..] else {
        return None;
    };
    let &[.., row, col] = &turn.strides()[..] else {
        return None;
    };
    let stride = |stride: usize| u32::try_from(stride).ok();
    let is_one = leading.iter().all(|&extent| extent == 1);
    is_one.then_some([stride(row)?, stride(col)?])
}

/// A tensor as rows of heads.
struct Heads {
    outer: usize,
    inner: usize,
    positions: usize,
    width: usize,
    /// Elements from one of each of the first three to the next.
    strides: [usize; 3],
}

impl Heads {
    /// `None` for another rank.
    fn of<R: Runtime>(tensor: &TensorHandle<R>) -> Option<Self> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let missing = 4usize.checked_sub(shape.len()).filter(|it| *it <= 2)?;
        let at = |values: &[usize], dim: usize, none: usize| {
            dim.checked_sub(missing).map_or(none, |dim| values[dim])
        };
        // The stride of what there is one of is never taken.
        let stride = |dim: usize| match at(shape, dim, 1) {
            1 => 0,
            _ => at(strides, dim, 0),
        };
        Some(Self {
            outer: at(shape, 0, 1),
            inner: at(shape, 1, 1),
            positions: at(shape, 2, 1),
            width: at(shape, 3, 1),
            strides: [0, 1, 2].map(stride),
        })
    }

    /// Elements that are read at once: those of 16 bytes, or fewer, at least the two of a pair; `None` where features do
    /// not lie side by side, or rows start at odd places.
    fn vector<R: Runtime>(&self, tensor: &TensorHandle<R>) -> Option<usize> {
        let size = tensor.dtype.size();
        let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
        let fits = |vector: usize| {
            let mut steps = self.strides.iter().chain([&self.width]);
            vector * size <= 16
                && offset % (vector * size) == 0
                && steps.all(|step| step % vector == 0)
        };
        let is_dense = tensor.strides().last() == Some(&1);
        [8, 4, 2]
            .into_iter()
            .find(|&vector| is_dense && fits(vector))
    }

    fn steps<R: Runtime>(&self, vector: usize) -> StepsLaunch<R> {
        let [outer, inner, position] = self.strides.map(|stride| (stride / vector) as u32);
        StepsLaunch::new(outer, inner, position)
    }
}

/// A tensor for the result of the pass on `x`.
fn empty_for<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    pass: RotaryPass,
) -> TensorHandle<R> {
    let mut shape = x.shape().to_vec();
    let in_rows = pass == RotaryPass::Backward && shape.len() == 4;
    if in_rows {
        shape.swap(1, 2);
    }
    let mut out = empty(client, shape, x.dtype);
    if in_rows {
        out.metadata.swap(1, 2);
    }
    out
}

/// Vectors from one of a tensor's dimensions to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Steps {
    outer: u32,
    inner: u32,
    position: u32,
}

/// Elements from one of the matrix's rows and columns to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct TurnStrides {
    row: u32,
    col: u32,
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rotary_kernel<F: Numeric, T: Numeric, N: Size, NT: Size>(
    x: &Array<Vector<F, N>>,
    turn: &Array<T>,
    table: &Array<Vector<T, NT>>,
    out: &mut Array<Vector<F, N>>,
    from: Steps,
    to: Steps,
    of_turn: TurnStrides,
    heads: u32,
    inner: u32,
    places: u32,
    vectors_of_row: u32,
    #[comptime] vector: usize,
    #[comptime] is_whole: bool,
    #[comptime] is_backward: bool,
    #[define(F)] _dtype: StorageType,
    #[define(T)] _of_tables: StorageType,
) {
    let index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    let (place, first) = (index % places, index / places * HEADS_OF_UNIT);
    if first < heads {
        let (position, col) = (place / vectors_of_row, place % vectors_of_row);
        let mut spread = Array::<f32>::new(TURN);
        #[unroll]
        for k in 0..comptime!(TURN as u32) {
            let at = comptime!(k / 4) * of_turn.row + comptime!(k % 4) * of_turn.col;
            spread[k as usize] = f32::cast_from(turn[at as usize]);
        }
        // Of each pair: what x and its neighbour count in y, and in y's neighbour.
        let mut factors = Array::<f32>::new(comptime!(2 * vector));
        #[unroll]
        for pair in 0..comptime!(vector / 2) {
            let of_pair =
                table[(place * comptime!(vector as u32 / 2) + comptime!(pair as u32)) as usize];
            let of_y = f32::cast_from(of_pair[0usize]);
            let of_y_too = f32::cast_from(of_pair[1usize]);
            let of_next = f32::cast_from(of_pair[2usize]);
            let of_next_too = f32::cast_from(of_pair[3usize]);
            factors[comptime!(4 * pair)] = spread[0usize] * of_y + spread[1usize] * of_y_too;
            factors[comptime!(4 * pair + 1)] = spread[4usize] * of_y + spread[5usize] * of_y_too;
            factors[comptime!(4 * pair + 2)] =
                spread[2usize] * of_next + spread[3usize] * of_next_too;
            factors[comptime!(4 * pair + 3)] =
                spread[6usize] * of_next + spread[7usize] * of_next_too;
        }
        let mut read = Array::<Vector<F, N>>::new(comptime!(HEADS_OF_UNIT as usize));
        let mut starts = Array::<u32>::new(comptime!(HEADS_OF_UNIT as usize));
        // One division serves all heads: each takes as many instructions as a vector's pairs.
        let mut outer = first / inner;
        let mut within = first % inner;
        #[unroll]
        for index in 0..HEADS_OF_UNIT {
            starts[index as usize] = row_start(&to, outer, within, position) + col;
            if comptime!(is_whole) || first + index < heads {
                let at = row_start(&from, outer, within, position) + col;
                read[index as usize] = x[at as usize];
            }
            let is_last = within + 1 == inner;
            outer = select(is_last, outer + 1, outer);
            within = select(is_last, 0u32, within + 1);
        }
        #[unroll]
        for index in 0..HEADS_OF_UNIT {
            if comptime!(is_whole) || first + index < heads {
                let pairs = read[index as usize];
                out[starts[index as usize] as usize] =
                    turned::<F, N>(pairs, &factors, vector, is_backward);
            }
        }
    }
}

/// The first vector of a head's row at a position.
#[cube]
fn row_start(steps: &Steps, outer: u32, within: u32, position: u32) -> u32 {
    outer * steps.outer + within * steps.inner + position * steps.position
}

/// Pairs, turned by their factors.
#[cube]
fn turned<F: Numeric, N: Size>(
    pairs: Vector<F, N>,
    factors: &Array<f32>,
    #[comptime] vector: usize,
    #[comptime] is_backward: bool,
) -> Vector<F, N> {
    let mut turned = Vector::<F, N>::empty();
    #[unroll]
    for pair in 0..comptime!(vector / 2) {
        let this = f32::cast_from(pairs[comptime!(2 * pair)]);
        let next = f32::cast_from(pairs[comptime!(2 * pair + 1)]);
        let a = factors[comptime!(4 * pair)];
        let b = factors[comptime!(4 * pair + 1)];
        let c = factors[comptime!(4 * pair + 2)];
        let d = factors[comptime!(4 * pair + 3)];
        if comptime!(is_backward) {
            turned[comptime!(2 * pair)] = F::cast_from(this * a + next * c);
            turned[comptime!(2 * pair + 1)] = F::cast_from(this * b + next * d);
        } else {
            turned[comptime!(2 * pair)] = F::cast_from(this * a + next * b);
            turned[comptime!(2 * pair + 1)] = F::cast_from(this * c + next * d);
        }
    }
    turned
}
