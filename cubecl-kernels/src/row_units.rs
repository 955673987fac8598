//! Rows of which a few units of a cube hold one in registers, so that a kernel can sum over a row and go back to its
//! elements: what both normalizations are made of.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixView, check_contiguous, check_dtype, check_float, has_planes_of_32, is_operand_type,
        storage,
    },
    error::KernelError,
    operator_input::{OperatorInput, Pieces, read_input, read_piece, write_piece},
    output_gradient::OutputGradient,
    quantize::{
        QuantizeSpec,
        beside::{Beside, CubePieces, GroupCopy, write_group_copy},
        whole_runs::RunGrid,
    },
};

pub(crate) mod norm;
pub(crate) mod quantized;
pub(crate) mod statistics;

/// The longest rows that units keep in registers.
pub const MAX_COLS: usize = 8192;
const PLANE: usize = 32;
/// Units of a cube, where its rows are shorter than a plane takes.
const UNITS: usize = 128;
/// Units of a cube at most.
const MAX_UNITS: usize = 256;
/// Elements that a unit holds at most where a plane takes a row, which spares waiting for other planes.
const MOST_HELD: usize = 32;
/// Elements that a unit holds at most where several planes share a row, as long as there are more units.
const HELD: usize = 16;
/// Units of a backward pass. Each cube leaves a row of sums, which another kernel must add up: as many cubes as run at
/// a time on a large device, and no more. The number must not depend on the device, as the order of sums does on it.
const BACKWARD_UNITS: usize = 1 << 16;

/// True for rows of 1 to [`MAX_COLS`] elements of f32, f16 or bf16.
pub(crate) fn has_rows(dtype: StorageType, cols: usize) -> bool {
    (dtype == storage::<f32>() || is_operand_type(dtype)) && (1..=MAX_COLS).contains(&cols)
}

/// Rows and columns of `x`.
pub(crate) fn check_rows_of_input<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: &OperatorInput<R>,
) -> Result<[usize; 2], KernelError> {
    let len = x.check(client, operation, "x")?;
    let cols = x.shape().last().copied().unwrap_or_default();
    if !has_rows(x.dtype(), cols) {
        return Err(KernelError::Shape {
            operation,
            got: format!("x {:?}", x.shape()),
            remedy: "pass rows of 1 to 8192 elements",
        });
    }
    Ok([len / cols, cols])
}

/// Rows and columns of `x`, for which there is a gain.
pub(crate) fn check_rows<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: &OperatorInput<R>,
    gain: &TensorHandle<R>,
) -> Result<[usize; 2], KernelError> {
    let [rows, cols] = check_rows_of_input(client, operation, x)?;
    check_float(client, operation, "gain", gain.dtype)?;
    if check_contiguous(operation, gain)? != cols {
        return Err(KernelError::Shape {
            operation,
            got: format!("x {:?} and gain {:?}", x.shape(), gain.shape()),
            remedy: "pass a gain for each column",
        });
    }
    Ok([rows, cols])
}

/// Accepts a gradient of the shape and type of `x`, and for each row an f32 of each of `statistics`, named.
pub(crate) fn check_backward<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: &OperatorInput<R>,
    rows: usize,
    gradient: &OutputGradient<R>,
    statistics: &[(&'static str, &TensorHandle<R>)],
) -> Result<(), KernelError> {
    gradient.check(client, operation, x)?;
    check_statistics(operation, x, rows, statistics)
}

/// Accepts for each of the rows of `x` an f32 of each of `statistics`, named.
pub(crate) fn check_statistics<R: Runtime>(
    operation: &'static str,
    x: &OperatorInput<R>,
    rows: usize,
    statistics: &[(&'static str, &TensorHandle<R>)],
) -> Result<(), KernelError> {
    for (name, statistic) in statistics {
        let remedy = "pass what the forward pass gave";
        check_dtype(operation, name, statistic, storage::<f32>(), remedy)?;
    }
    let mut fits = true;
    let mut got = format!("x {:?}", x.shape());
    for (name, statistic) in statistics {
        fits &= check_contiguous(operation, statistic)? == rows;
        got += &format!(", {name} {:?}", statistic.shape());
    }
    if fits {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation,
        got,
        remedy: "pass a number for each row",
    })
}

/// How the units of a cube share rows: the vectors of a row go to its units in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RowUnits {
    /// Elements of a row.
    pub cols: usize,
    /// Elements of a vector.
    pub width: usize,
    /// Units of a row: a power of two up to a plane, or whole planes.
    pub lanes: usize,
    /// Vectors that a unit holds.
    pub held: usize,
    /// Rows of a cube at a time.
    pub rows: usize,
    /// True where units exchange values without shared memory.
    pub planes: bool,
}

impl RowUnits {
    /// For rows of `cols` elements, read `width` at once.
    pub fn new<R: Runtime>(client: &ComputeClient<R>, cols: usize, width: usize) -> Self {
        let vectors = cols / width;
        let lanes = if cols <= PLANE * MOST_HELD {
            vectors.next_power_of_two().min(PLANE)
        } else {
            cols.div_ceil(PLANE * HELD).min(MAX_UNITS / PLANE) * PLANE
        };
        Self {
            cols,
            width,
            lanes,
            held: vectors.div_ceil(lanes),
            rows: (UNITS / lanes).max(1),
            planes: has_planes_of_32(client),
        }
    }

    /// Units of a cube.
    pub const fn of_cube(&self) -> usize {
        self.lanes * self.rows
    }

    /// Vectors of a row.
    pub const fn vectors(&self) -> usize {
        self.cols / self.width
    }

    /// Elements that a unit holds.
    pub const fn elements(&self) -> usize {
        self.held * self.width
    }

    /// True where a unit's vector of this number may lie past the end of the row.
    pub const fn is_last(&self, piece: usize) -> bool {
        (piece + 1) * self.lanes > self.vectors()
    }

    /// Units that exchange values within a plane.
    pub const fn tree(&self) -> usize {
        if self.lanes < PLANE {
            self.lanes
        } else {
            PLANE
        }
    }

    /// The vectors of all rows of a cube as pieces.
    const fn pieces(&self) -> CubePieces {
        CubePieces {
            len: self.width,
            units: self.of_cube(),
            side_by_side: self.tree(),
        }
    }

    /// Cubes of a backward pass, more of them where each holds little.
    pub fn backward_cubes(&self, rows: usize) -> usize {
        let factor = (HELD / self.elements()).clamp(1, 4);
        let cubes = BACKWARD_UNITS * factor / self.of_cube();
        rows.div_ceil(self.rows).min(cubes)
    }
}

/// The copy of a matrix of floats that units write as they hold its rows, if it is asked for and they can.
///
/// # Errors
///
/// When the matrix has another rank, and as [`quantize`](crate::quantize::quantize()).
pub(crate) fn held_copy<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: &TensorHandle<R>,
    spec: Option<&QuantizeSpec>,
    units: RowUnits,
) -> Result<Option<Beside<R>>, KernelError> {
    let Some(spec) = spec else {
        return Ok(None);
    };
    MatrixView::one(operation, "x", x)?;
    Beside::of(client, operation, x, spec, units.pieces())
}

/// Writes all elements of a row that this unit holds to the copy of the matrix of so many rows, if there is one. All
/// units of the cube must call it together.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_held_copy<N: Size, S: Numeric>(
    values: &mut Array<Vector<u32, N>>,
    scales: &mut Array<S>,
    held: &Array<f32>,
    row: u32,
    rows: u32,
    largest: f32,
    zero: u32,
    #[comptime] units: RowUnits,
    #[comptime] copy: Option<GroupCopy>,
) {
    match comptime!(copy) {
        None => {}
        Some(copy) => {
            let vectors = comptime!(units.vectors() as u32);
            #[unroll]
            for piece in 0..units.held {
                let (index, is_inside) = vector_index(piece, units);
                let mut vector = Array::<f32>::new(units.width);
                #[unroll]
                for lane in 0..units.width {
                    vector[lane] = held[comptime!(piece * units.width + lane)];
                }
                let number = select(is_inside, row * vectors + index, rows * vectors);
                write_group_copy::<N, S>(
                    values,
                    scales,
                    &vector,
                    number,
                    rows * vectors,
                    largest,
                    zero,
                    copy,
                );
            }
        }
    }
}

/// The factor that makes a mean of a row's sum.
#[cube]
pub(crate) fn inverse_cols(#[comptime] units: RowUnits) -> f32 {
    f32::new(comptime!((1.0 / units.cols as f64) as f32))
}

/// A zero for each element that a unit holds.
#[cube]
pub(crate) fn held_zeros(#[comptime] units: RowUnits) -> Array<f32> {
    let elements = comptime!(units.elements());
    let mut held = Array::<f32>::new(elements);
    #[unroll]
    for index in 0..elements {
        held[index] = 0.0f32;
    }
    held
}

/// A unit's vector of this number, in its row; where that lies past the end, the row's last.
#[cube]
pub(crate) fn vector_index(#[comptime] piece: usize, #[comptime] units: RowUnits) -> (u32, bool) {
    let lane = UNIT_POS % comptime!(units.lanes as u32);
    let index = lane + comptime!((piece * units.lanes) as u32);
    let last = comptime!(units.vectors() as u32 - 1);
    if comptime!(units.is_last(piece)) {
        (min(index, last), index <= last)
    } else {
        (index, true.runtime())
    }
}

/// All elements of a row that this unit holds, as `f32`, read `width` at once; 0 past the end of the row.
#[cube]
pub(crate) fn read_held<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut held = Array::<f32>::new(comptime!(units.elements()));
    #[unroll]
    for piece in 0..units.held {
        let (index, is_inside) = vector_index(piece, units);
        let at = row * comptime!(units.vectors() as u32) + index;
        let values = read_piece::<F, N>(x, at, units.width, width);
        hold(&mut held, &values, piece, is_inside, units);
    }
    held
}

/// All elements of a row of an input that this unit holds, as `f32`; 0 past the end of the row.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn held_input<X: Numeric, NX: Size, S: Numeric, F: Numeric>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    grid: &RunGrid,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] pieces: Pieces,
) -> Array<f32> {
    let mut held = Array::<f32>::new(comptime!(units.elements()));
    #[unroll]
    for piece in 0..units.held {
        let (index, is_inside) = vector_index(piece, units);
        let at = row * comptime!(units.vectors() as u32) + index;
        let values = read_input::<X, NX, S, F>(x, scales, tensor_scales, grid, at, pieces);
        hold(&mut held, &values, piece, is_inside, units);
    }
    held
}

/// Holds a vector of this number; zeros where it lies past the end of the row.
#[cube]
fn hold(
    held: &mut Array<f32>,
    vector: &Array<f32>,
    #[comptime] piece: usize,
    is_inside: bool,
    #[comptime] units: RowUnits,
) {
    #[unroll]
    for lane in 0..units.width {
        let slot = comptime!(piece * units.width + lane);
        held[slot] = vector[lane];
        if comptime!(units.is_last(piece)) {
            held[slot] = select(is_inside, held[slot], 0.0f32);
        }
    }
}

/// Writes all elements of a row that this unit holds, `width` at once.
#[cube]
pub(crate) fn write_held<F: Numeric, N: Size>(
    out: &mut Array<Vector<F, N>>,
    held: &Array<f32>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
) {
    #[unroll]
    for piece in 0..units.held {
        let (index, is_inside) = vector_index(piece, units);
        let at = row * comptime!(units.vectors() as u32) + index;
        if is_inside {
            let mut vector = Array::<f32>::new(units.width);
            #[unroll]
            for lane in 0..units.width {
                vector[lane] = held[comptime!(piece * units.width + lane)];
            }
            write_piece::<F, N>(out, &vector, at, units.width, width);
        }
    }
}

/// The sum of a row's units' values, in all of them: [`row_sums`] of one value.
#[cube]
pub(crate) fn row_sum(value: f32, #[comptime] units: RowUnits) -> f32 {
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = value;
    row_sums(&mut sums, 1usize, units);
    sums[0]
}

/// Replaces each of these `count` values by its sum over the row's units. The order of a sum is the same on every
/// device: that of a tree in each plane, whose last level are neighbours, then plane after plane.
#[cube]
pub(crate) fn row_sums(
    sums: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] units: RowUnits,
) {
    let tree = comptime!(units.tree());
    if comptime!(units.planes) {
        #[unroll]
        for step in 0..comptime!(tree.ilog2()) {
            #[unroll]
            for index in 0..count {
                sums[index] +=
                    plane_shuffle_xor(sums[index], comptime!((tree >> (step + 1)) as u32));
            }
        }
        if comptime!(units.lanes > PLANE) {
            let planes = comptime!(units.lanes / PLANE);
            let mut shared = SharedMemory::<f32>::new(comptime!(count * planes));
            // Units may still read the sums of an earlier row.
            sync_cube();
            if UNIT_POS % comptime!(PLANE as u32) == 0 {
                let plane = (UNIT_POS / comptime!(PLANE as u32)) as usize;
                #[unroll]
                for index in 0..count {
                    shared[plane + comptime!(index * planes)] = sums[index];
                }
            }
            sync_cube();
            #[unroll]
            for index in 0..count {
                sums[index] = shared[comptime!(index * planes)];
                #[unroll]
                for plane in 1..planes {
                    sums[index] += shared[comptime!(index * planes + plane)];
                }
            }
        }
    } else {
        let all = comptime!(units.of_cube());
        let mut shared = SharedMemory::<f32>::new(comptime!(count * all));
        let unit = UNIT_POS as usize;
        let in_tree = unit % tree;
        sync_cube();
        #[unroll]
        for index in 0..count {
            shared[unit + comptime!(index * all)] = sums[index];
        }
        sync_cube();
        #[unroll]
        for step in 0..comptime!(tree.ilog2()) {
            let distance = comptime!(tree >> (step + 1));
            if in_tree < distance {
                #[unroll]
                for index in 0..count {
                    let slot = unit + comptime!(index * all);
                    shared[slot] += shared[slot + distance];
                }
            }
            sync_cube();
        }
        #[unroll]
        for index in 0..count {
            if comptime!(units.lanes > PLANE) {
                sums[index] = shared[comptime!(index * all)];
                #[unroll]
                for plane in 1..comptime!(units.lanes / PLANE) {
                    sums[index] += shared[comptime!(index * all + plane * PLANE)];
                }
            } else {
                sums[index] = shared[unit - in_tree + comptime!(index * all)];
            }
        }
    }
}

/// Adds the sums of a cube's rows up, one row after the other, into those of the last.
#[cube]
pub(crate) fn add_rows(sums: &mut Array<f32>, row_of_cube: u32, #[comptime] units: RowUnits) {
    if comptime!(units.rows > 1) {
        let elements = comptime!(units.elements());
        let mut shared = SharedMemory::<f32>::new(comptime!(units.lanes * elements));
        let lane = UNIT_POS as usize % units.lanes;
        for row in 0..comptime!(units.rows as u32) {
            if row == row_of_cube {
                #[unroll]
                for index in 0..elements {
                    let slot = lane + comptime!(index * units.lanes);
                    if row > 0 {
                        sums[index] += shared[slot];
                    }
                    shared[slot] = sums[index];
                }
            }
            sync_cube();
        }
    }
}
