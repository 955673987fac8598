//! Rows of heads in shared memory, and their products on matrix instructions.
//!
//! An instruction multiplies 16 rows by 8 columns, 16 deep. Of its result each unit of a plane has two neighbours in
//! two rows, eight apart; two results side by side have the layout of the left operand of a product 16 deep, so that
//! what is made of scores is multiplied without leaving the registers.

use cubecl::{
    cmma::{MatrixIdent, MmaDefinition},
    prelude::{barrier::*, *},
};

use crate::attention::heads::Head;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Shape of a matrix instruction.
pub(super) const MMA_M: usize = 16;
pub(super) const MMA_N: usize = 8;
pub(super) const MMA_K: usize = 16;
/// Elements that are copied at once.
pub(super) const CHUNK: usize = 8;
/// Elements of a result of the matrix instruction that a unit has.
pub(super) const OWN: usize = MMA_M * MMA_N / PLANE;

/// Rows of a head in shared memory, and the barrier that says that they have come.
#[derive(CubeType)]
pub(super) struct Staged<F: Numeric, C: Size> {
    values: SharedMemory<Vector<F, C>>,
    arrived: Shared<Barrier>,
    parity: u32,
    #[cube(comptime)]
    size: RowsSize,
}

/// How many rows there are, how many matrix instructions are as deep as one, and by how many units they are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RowsSize {
    pub rows: usize,
    pub steps: usize,
    pub units: usize,
}

impl RowsSize {
    /// Chunks of a row.
    const fn chunks(&self) -> usize {
        self.steps * MMA_K / CHUNK
    }

    /// Chunks from a row to the next: an odd number, so that the eight rows that `ldmatrix` reads at once lie in
    /// different banks.
    const fn pitch(&self) -> usize {
        self.chunks() + 1
    }

    /// Bytes of shared memory.
    pub(super) const fn bytes(&self) -> usize {
        self.rows * self.pitch() * CHUNK * size_of::<u16>()
    }
}

#[cube]
pub(super) fn staged<F: Numeric, C: Size>(#[comptime] size: RowsSize) -> Staged<F, C> {
    Staged::<F, C> {
        values: SharedMemory::new_aligned(comptime!(size.rows * size.pitch()), 128usize),
        arrived: Barrier::shared(CUBE_DIM, UNIT_POS == 0),
        parity: 0u32.runtime(),
        size,
    }
}

/// Starts the copies of rows from `row_0` on, with zeros outside of the head. Nobody may read the rows before.
#[cube]
pub(super) fn fill<F: Numeric, C: Size>(
    staged: &mut Staged<F, C>,
    x: &Array<Vector<F, C>>,
    of_x: &Head,
    row_0: u32,
) {
    let size = comptime!(staged.size);
    let chunk = comptime!(CHUNK as u32);
    let chunks = comptime!(size.chunks() as u32);
    let copies = comptime!((size.rows * size.chunks()).div_ceil(size.units));
    #[unroll]
    for copy in 0..copies {
        let index = UNIT_POS + comptime!((copy * size.units) as u32);
        let row = index / chunks;
        let col = index % chunks;
        if row < comptime!(size.rows as u32) {
            let is_inside = row_0 + row < of_x.rows && col * chunk < of_x.width;
            // No address past the end of the tensor may be formed.
            let from = select(
                is_inside,
                (row_0 + row) * of_x.row_stride / chunk + col,
                0u32,
            );
            let from = of_x.start / chunk + from;
            let length = select(is_inside, 1u32, 0u32);
            let to = row * comptime!(size.pitch() as u32) + col;
            copy_async_checked(
                &x.slice(from as usize, (from + length) as usize),
                &mut staged.values.slice_mut(to as usize, to as usize + 1),
                chunk,
            );
        }
    }
    staged.arrived.commit_copy_async();
    staged.arrived.arrive();
}

/// Waits until the rows have come.
#[cube]
pub(super) fn wait<F: Numeric, C: Size>(staged: &mut Staged<F, C>) {
    staged.arrived.wait_parity(staged.parity);
    staged.parity = 1 - staged.parity;
}

/// The left operand: 16 rows from `row` on, 16 features of this step.
#[cube]
fn left<F: Numeric, C: Size, P: Size>(
    staged: &Staged<F, C>,
    row: u32,
    #[comptime] step: usize,
) -> Array<Vector<F, P>> {
    let lane = UNIT_POS % comptime!(PLANE as u32);
    // `ldmatrix` takes the addresses of the rows of matrix i from the lanes from 8 i: here the upper and the lower rows
    // of the left half, then of the right half.
    let row = row + lane % 16;
    let chunk = lane / 16 + comptime!((step * MMA_K / CHUNK) as u32);
    let at = (row * comptime!(staged.size.pitch() as u32) + chunk) as usize;
    let definition = MmaDefinition::<F, F, f32>::new(MMA_M, MMA_N, MMA_K);
    definition.load_matrix::<Vector<F, C>, P>(
        &staged.values.slice(at, at + 1),
        MatrixIdent::A,
        4usize,
        false,
    )
}

/// The right operands of two products side by side.
#[derive(CubeType)]
struct Right<F: Numeric, P: Size> {
    first: Array<Vector<F, P>>,
    second: Array<Vector<F, P>>,
}

/// Of columns that are rows in memory: 16 rows from `row` on, 16 features of this step.
#[cube]
fn right<F: Numeric, C: Size, P: Size>(
    staged: &Staged<F, C>,
    #[comptime] row: usize,
    #[comptime] step: usize,
) -> Right<F, P> {
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let row = lane / 16 * 8 + lane % 8 + comptime!(row as u32);
    let chunk = lane / 8 % 2 + comptime!((step * MMA_K / CHUNK) as u32);
    let at = row * comptime!(staged.size.pitch() as u32) + chunk;
    load_right::<F, C, P>(staged, at, false)
}

/// Of a depth that are rows in memory: 16 rows from `row` on, 16 features of this step.
#[cube]
fn right_transposed<F: Numeric, C: Size, P: Size>(
    staged: &Staged<F, C>,
    #[comptime] row: usize,
    #[comptime] step: usize,
) -> Right<F, P> {
    let lane = UNIT_POS % comptime!(PLANE as u32);
    let row = lane % 16 + comptime!(row as u32);
    let chunk = lane / 16 + comptime!((step * MMA_K / CHUNK) as u32);
    let at = row * comptime!(staged.size.pitch() as u32) + chunk;
    load_right::<F, C, P>(staged, at, true)
}

#[cube]
fn load_right<F: Numeric, C: Size, P: Size>(
    staged: &Staged<F, C>,
    at: u32,
    #[comptime] transposed: bool,
) -> Right<F, P> {
    let definition = MmaDefinition::<F, F, f32>::new(MMA_M, MMA_N, MMA_K);
    let both = definition.load_matrix::<Vector<F, C>, P>(
        &staged.values.slice(at as usize, at as usize + 1),
        MatrixIdent::B,
        4usize,
        transposed,
    );
    let mut first = Array::<Vector<F, P>>::new(2usize);
    first[0] = both[0];
    first[1] = both[1];
    let mut second = Array::<Vector<F, P>>::new(2usize);
    second[0] = both[2];
    second[1] = both[3];
    Right::<F, P> { first, second }
}

/// Results of so many instructions side by side.
#[cube]
pub(super) fn zeros<P: Size>(#[comptime] count: usize) -> Sequence<Array<Vector<f32, P>>> {
    let mut sums = Sequence::<Array<Vector<f32, P>>>::new();
    #[unroll]
    for _ in 0..count {
        let mut sum = Array::<Vector<f32, P>>::new(2usize);
        sum[0] = Vector::new(0.0f32);
        sum[1] = Vector::new(0.0f32);
        sums.push(sum);
    }
    sums
}

/// Products of the 16 rows of this unit's plane and all others.
#[cube]
pub(super) fn products<F: Numeric, C: Size, P: Size>(
    rows: &Staged<F, C>,
    others: &Staged<F, C>,
) -> Sequence<Array<Vector<f32, P>>> {
    let definition = MmaDefinition::<F, F, f32>::new(MMA_M, MMA_N, MMA_K);
    let cols = comptime!(others.size.rows);
    let mut sums = zeros::<P>(comptime!(cols / MMA_N));
    #[unroll]
    for step in 0..comptime!(rows.size.steps) {
        let of_rows = left::<F, C, P>(rows, plane_row(), step);
        #[unroll]
        for pair in 0..comptime!(cols / (2 * MMA_N)) {
            let of_others = right::<F, C, P>(others, comptime!(pair * 2 * MMA_N), step);
            add_pair::<F, P>(&definition, &of_rows, &of_others, &mut sums, pair);
        }
    }
    sums
}

/// Adds the products of weights of all rows, as [`slot`] counts them, and those rows.
#[cube]
pub(super) fn add_products<F: Numeric, C: Size, P: Size>(
    sums: &mut Sequence<Array<Vector<f32, P>>>,
    weights: &Array<f32>,
    rows: &Staged<F, C>,
) {
    let definition = MmaDefinition::<F, F, f32>::new(MMA_M, MMA_N, MMA_K);
    #[unroll]
    for row in 0..comptime!(rows.size.rows / MMA_K) {
        let mut of_weights = Array::<Vector<F, P>>::new(4usize);
        #[unroll]
        for register in 0..4usize {
            let first = comptime!(slot(2 * row + register / 2, register % 2, 0));
            let mut pair = Vector::<F, P>::empty();
            pair[0usize] = F::cast_from(weights[first]);
            pair[1usize] = F::cast_from(weights[comptime!(first + 1)]);
            of_weights[register] = pair;
        }
        #[unroll]
        for step in 0..comptime!(rows.size.steps) {
            let of_rows = right_transposed::<F, C, P>(rows, comptime!(row * MMA_K), step);
            add_pair::<F, P>(&definition, &of_weights, &of_rows, sums, step);
        }
    }
}

/// Adds two products side by side to the sums of this pair.
#[cube]
fn add_pair<F: Numeric, P: Size>(
    definition: &MmaDefinition<F, F, f32>,
    left: &Array<Vector<F, P>>,
    right: &Right<F, P>,
    sums: &mut Sequence<Array<Vector<f32, P>>>,
    #[comptime] pair: usize,
) {
    definition.execute_inplace(left, &right.first, sums.index_mut(comptime!(2 * pair)));
    definition.execute_inplace(left, &right.second, sums.index_mut(comptime!(2 * pair + 1)));
}

/// Where a unit has the element of a result: the upper row or the lower one, the left neighbour or the right one.
pub(super) const fn slot(result: usize, half: usize, side: usize) -> usize {
    result * OWN + half * 2 + side
}

/// The first of a unit's two rows in those of its plane; the other is 8 behind it.
#[cube]
pub(super) fn unit_row() -> u32 {
    UNIT_POS % comptime!(PLANE as u32) / 4
}

/// The first of a unit's two columns in a result.
#[cube]
pub(super) fn unit_col() -> u32 {
    UNIT_POS % 4 * 2
}

/// The first row of this unit's plane in those of the cube.
#[cube]
pub(super) fn plane_row() -> u32 {
    UNIT_POS / comptime!(PLANE as u32) * comptime!(MMA_M as u32)
}

/// The same for both rows of a unit.
#[cube]
pub(super) fn both(factor: f32) -> Array<f32> {
    let mut factors = Array::<f32>::new(2usize);
    factors[0] = factor;
    factors[1] = factor;
    factors
}

/// Writes a unit's sums, each row times its factor, as rows from `row` on of a new tensor
/// `[batch, heads, rows, width]` in the memory of `[batch, rows, heads, width]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write_rows<F: Numeric, P: Size>(
    out: &mut Array<Vector<F, P>>,
    sums: &Sequence<Array<Vector<f32, P>>>,
    factors: &Array<f32>,
    batch: u32,
    head: u32,
    heads: u32,
    row: u32,
    rows: u32,
    width: u32,
    #[comptime] steps: usize,
) {
    #[unroll]
    for half in 0..2usize {
        let row = row + plane_row() + unit_row() + comptime!((half * 8) as u32);
        if row < rows {
            let start = ((batch * rows + row) * heads + head) * width;
            #[unroll]
            for result in 0..comptime!(steps * MMA_K / MMA_N) {
                let col = unit_col() + comptime!((result * MMA_N) as u32);
                if col < width {
                    let sum = sums.index(result)[half] * Vector::new(factors[half]);
                    out[((start + col) / 2) as usize] = Vector::cast_from(sum);
                }
            }
        }
    }
}
