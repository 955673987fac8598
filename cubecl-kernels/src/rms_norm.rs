//! RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4) and its gradients, each in
//! one launch.
//!
//! For a row `x` of `n` elements, with gain `g`, and from the gradient `dy` of the output:
//!
//! ```text
//! r = 1 / sqrt(mean(x²) + epsilon)       y = x r g
//! dx = r (g dy - x r mean(g dy x r))     dg = sum over rows of dy x r
//! ```
//!
//! Built from tensor operations, either pass moves the matrix through memory several times. Here the units of a row
//! keep it in registers between the sum and the result, so that each element is read once and written once. All
//! arithmetic is FP32, rounded once at the end. Every sum has one order, so that a repetition gives the same bits.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        array, check_contiguous, check_dtype, check_float, cube_grid, empty, has_planes_of_32,
        is_operand_type, storage, vector_width, zeros,
    },
    error::KernelError,
};

const OPERATION: &str = "rms_norm";
const OPERATION_BACKWARD: &str = "rms_norm_backward";
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
/// Units of the backward pass. Each cube leaves a row of sums, which another kernel must add up: as many cubes as run
/// at a time on a large device, and no more. The number must not depend on the device, as the order of sums does on it.
const BACKWARD_UNITS: usize = 1 << 16;

/// The output of [`rms_norm`].
#[derive(Debug)]
pub struct RmsNormOutput<R: Runtime> {
    /// The normalized rows, of the shape and type of `x`, contiguous.
    pub output: TensorHandle<R>,
    /// `r` of each row, f32 `[rows]`.
    pub inverse_rms: TensorHandle<R>,
}

/// The gradients of [`rms_norm_backward`].
#[derive(Debug)]
pub struct RmsNormGradients<R: Runtime> {
    /// Of `x`, of its shape and type, contiguous.
    pub input: TensorHandle<R>,
    /// Of the gain, f32 `[parts, cols]`: the sum over parts is the gradient. There is at least one part.
    pub gain: TensorHandle<R>,
}

/// True for the rows that the kernels take: of 1 to [`MAX_COLS`] elements of f32, f16 or bf16.
pub fn has_rms_norm(dtype: StorageType, cols: usize) -> bool {
    (dtype == storage::<f32>() || is_operand_type(dtype)) && (1..=MAX_COLS).contains(&cols)
}

/// Each row of `x` divided by its root mean square, times the gain.
///
/// - `x`: f32, f16 or bf16 `[.., cols]`, contiguous.
/// - `gain`: f32, f16 or bf16 of `cols` elements, contiguous. Its type may be another one.
/// - `epsilon`: added to the mean of squares. Where it is positive, rows of zeros give zeros.
///
/// A row with NaN is NaN. Where the sum of a row's squares overflows, `r` is 0, and so is the row but for its
/// infinities, which give NaN.
///
/// # Errors
///
/// When shapes or element types differ from these, or rows are none of [`has_rms_norm`].
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    gain: &TensorHandle<R>,
    epsilon: f32,
) -> Result<RmsNormOutput<R>, KernelError> {
    let [rows, cols] = check(client, OPERATION, x, gain)?;
    let output = empty(client, x.shape().to_vec(), x.dtype);
    let inverse_rms = empty(client, vec![rows], storage::<f32>());
    if rows > 0 {
        let units = RowUnits::new(client, cols, vector_width(cols, &[x]));
        let gain_width = vector_width(units.width, &[gain]);
        // SAFETY: rows are guarded by their number, columns by their own, for which the outputs were allocated.
        #[allow(unsafe_code)]
        unsafe {
            rms_norm_kernel::launch_unchecked::<R>(
                client,
                cube_grid(rows.div_ceil(units.rows)),
                CubeDim::new_1d(units.of_cube() as u32),
                units.width,
                gain_width,
                array(x.clone()),
                array(gain.clone()),
                array(output.clone()),
                array(inverse_rms.clone()),
                rows as u32,
                epsilon,
                units,
                gain_width,
                x.dtype,
                gain.dtype,
            );
        }
    }
    Ok(RmsNormOutput {
        output,
        inverse_rms,
    })
}

/// The gradients of `x` and of the gain, from that of the output of [`rms_norm`].
///
/// - `x`, `gain`: as there.
/// - `inverse_rms`: f32 `[rows]`, as it gave it.
/// - `gradient`: of the shape and type of `x`, contiguous.
///
/// # Errors
///
/// When shapes or element types differ from these, or rows are none of [`has_rms_norm`].
pub fn rms_norm_backward<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    gain: &TensorHandle<R>,
    inverse_rms: &TensorHandle<R>,
    gradient: &TensorHandle<R>,
) -> Result<RmsNormGradients<R>, KernelError> {
    let [rows, cols] = check(client, OPERATION_BACKWARD, x, gain)?;
    check_dtype(
        OPERATION_BACKWARD,
        "inverse_rms",
        inverse_rms,
        storage::<f32>(),
        "pass what `rms_norm` gave",
    )?;
    check_contiguous(OPERATION_BACKWARD, gradient)?;
    let roots = check_contiguous(OPERATION_BACKWARD, inverse_rms)?;
    if gradient.shape() != x.shape() || gradient.dtype != x.dtype || roots != rows {
        return Err(KernelError::Shape {
            operation: OPERATION_BACKWARD,
            got: format!(
                "x {:?} of {}, gradient {:?} of {}, inverse_rms {:?}",
                x.shape(),
                x.dtype,
                gradient.shape(),
                gradient.dtype,
                inverse_rms.shape()
            ),
            remedy: "pass a gradient of the shape and type of x, and a root for each row",
        });
    }
    let input = empty(client, x.shape().to_vec(), x.dtype);
    if rows == 0 {
        let gain = zeros(client, vec![1, cols], storage::<f32>());
        return Ok(RmsNormGradients { input, gain });
    }
    let units = RowUnits::new(client, cols, vector_width(cols, &[x, gradient]));
    let gain_width = vector_width(units.width, &[gain]);
    let parts = units.backward_cubes(rows);
    let of_gain = empty(client, vec![parts, cols], storage::<f32>());
    let part_width = vector_width(units.width, &[&of_gain]);
    // SAFETY: rows are guarded by their number, columns by their own, for which the outputs were allocated; there are
    // as many cubes as parts.
    #[allow(unsafe_code)]
    unsafe {
        rms_norm_backward_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(parts as u32, 1, 1),
            CubeDim::new_1d(units.of_cube() as u32),
            units.width,
            gain_width,
            part_width,
            array(x.clone()),
            array(gain.clone()),
            array(inverse_rms.clone()),
            array(gradient.clone()),
            array(input.clone()),
            array(of_gain.clone()),
            rows as u32,
            units,
            gain_width,
            part_width,
            x.dtype,
            gain.dtype,
        );
    }
    Ok(RmsNormGradients {
        input,
        gain: of_gain,
    })
}

/// Rows and columns of `x`, for which there is a gain.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: &TensorHandle<R>,
    gain: &TensorHandle<R>,
) -> Result<[usize; 2], KernelError> {
    check_float(client, operation, "x", x.dtype)?;
    check_float(client, operation, "gain", gain.dtype)?;
    let len = check_contiguous(operation, x)?;
    let gains = check_contiguous(operation, gain)?;
    let cols = x.shape().last().copied().unwrap_or_default();
    if gains != cols || !has_rms_norm(x.dtype, cols) {
        return Err(KernelError::Shape {
            operation,
            got: format!("x {:?} and gain {:?}", x.shape(), gain.shape()),
            remedy: "pass rows of 1 to 8192 elements, and a gain for each column",
        });
    }
    Ok([len / cols, cols])
}

/// How the units of a cube share rows: the vectors of a row go to its units in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RowUnits {
    /// Elements of a row.
    cols: usize,
    /// Elements of a vector.
    width: usize,
    /// Units of a row: a power of two up to a plane, or whole planes.
    lanes: usize,
    /// Vectors that a unit holds.
    held: usize,
    /// Rows of a cube at a time.
    rows: usize,
    /// True where units exchange values without shared memory.
    planes: bool,
}

impl RowUnits {
    fn new<R: Runtime>(client: &ComputeClient<R>, cols: usize, width: usize) -> Self {
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

    const fn of_cube(&self) -> usize {
        self.lanes * self.rows
    }

    /// Vectors of a row.
    const fn vectors(&self) -> usize {
        self.cols / self.width
    }

    /// Elements that a unit holds.
    const fn elements(&self) -> usize {
        self.held * self.width
    }

    /// True where a unit's vector of this number may lie past the end of the row.
    const fn is_last(&self, piece: usize) -> bool {
        (piece + 1) * self.lanes > self.vectors()
    }

    /// Units that exchange values within a plane.
    const fn tree(&self) -> usize {
        if self.lanes < PLANE {
            self.lanes
        } else {
            PLANE
        }
    }

    /// Cubes of the backward pass, more of them where each holds little.
    fn backward_cubes(&self, rows: usize) -> usize {
        let factor = (HELD / self.elements()).clamp(1, 4);
        let cubes = BACKWARD_UNITS * factor / self.of_cube();
        rows.div_ceil(self.rows).min(cubes)
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rms_norm_kernel<F: Numeric, G: Numeric, N: Size, NG: Size>(
    x: &Array<Vector<F, N>>,
    gain: &Array<Vector<G, NG>>,
    output: &mut Array<Vector<F, N>>,
    inverse_rms: &mut Array<f32>,
    rows: u32,
    epsilon: f32,
    #[comptime] units: RowUnits,
    #[comptime] gain_width: usize,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gain_dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(units.rows as u32);
    if first >= rows {
        terminate!();
    }
    let row = first + UNIT_POS / comptime!(units.lanes as u32);
    // Units past the last row take part in what the others wait for, and write nothing.
    let read_row = min(row, rows - 1);
    let mut values = read_held::<F, N>(x, read_row, units, units.width);
    let gains = read_held::<G, NG>(gain, 0u32, units, gain_width);
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..comptime!(units.elements()) {
        squares += values[index] * values[index];
    }
    let mean = row_sum(squares, units) * inverse_cols(units);
    let root = (mean + epsilon).inverse_sqrt();
    if row < rows {
        #[unroll]
        for index in 0..comptime!(units.elements()) {
            values[index] = values[index] * root * gains[index];
        }
        write_held::<F, N>(output, &values, row, units, units.width);
        if UNIT_POS % comptime!(units.lanes as u32) == 0 {
            inverse_rms[row as usize] = root;
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rms_norm_backward_kernel<F: Numeric, G: Numeric, N: Size, NG: Size, NP: Size>(
    x: &Array<Vector<F, N>>,
    gain: &Array<Vector<G, NG>>,
    inverse_rms: &Array<f32>,
    gradient: &Array<Vector<F, N>>,
    of_x: &mut Array<Vector<F, N>>,
    of_gain: &mut Array<Vector<f32, NP>>,
    rows: u32,
    #[comptime] units: RowUnits,
    #[comptime] gain_width: usize,
    #[comptime] part_width: usize,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gain_dtype: StorageType,
) {
    let elements = comptime!(units.elements());
    let row_of_cube = UNIT_POS / comptime!(units.lanes as u32);
    let mut sums = Array::<f32>::new(elements);
    #[unroll]
    for index in 0..elements {
        sums[index] = 0.0f32;
    }
    let mut first = CUBE_POS as u32 * comptime!(units.rows as u32);
    while first < rows {
        let row = first + row_of_cube;
        // Units past the last row take part in what the others wait for, and add and write nothing.
        let read_row = min(row, rows - 1);
        let mut normalized = read_held::<F, N>(x, read_row, units, units.width);
        let mut gradients = read_held::<F, N>(gradient, read_row, units, units.width);
        let root = inverse_rms[read_row as usize];
        // The cache has them. In registers they would leave room for fewer cubes.
        let gains = read_held::<G, NG>(gain, 0u32, units, gain_width);
        let mut product = 0.0f32;
        #[unroll]
        for index in 0..elements {
            normalized[index] *= root;
            let of_gain = gradients[index] * normalized[index];
            sums[index] += select(row < rows, of_gain, 0.0f32);
            gradients[index] *= gains[index];
            product += gradients[index] * normalized[index];
        }
        let mean = row_sum(product, units) * inverse_cols(units);
        if row < rows {
            #[unroll]
            for index in 0..elements {
                gradients[index] = root * (gradients[index] - normalized[index] * mean);
            }
            write_held::<F, N>(of_x, &gradients, row, units, units.width);
        }
        first += CUBE_COUNT as u32 * comptime!(units.rows as u32);
    }
    add_rows(&mut sums, row_of_cube, units);
    if row_of_cube == comptime!(units.rows as u32 - 1) {
        write_held::<f32, NP>(of_gain, &sums, CUBE_POS as u32, units, part_width);
    }
}

#[cube]
fn inverse_cols(#[comptime] units: RowUnits) -> f32 {
    f32::new(comptime!((1.0 / units.cols as f64) as f32))
}

/// A unit's vector of this number, in its row; where that lies past the end, the row's last.
#[cube]
fn vector_index(#[comptime] piece: usize, #[comptime] units: RowUnits) -> (u32, bool) {
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
fn read_held<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut held = Array::<f32>::new(comptime!(units.elements()));
    let reads = comptime!(units.width / width);
    #[unroll]
    for piece in 0..units.held {
        let (index, is_inside) = vector_index(piece, units);
        let start = (row * comptime!(units.vectors() as u32) + index) * comptime!(reads as u32);
        #[unroll]
        for read in 0..reads {
            let vector = x[(start + comptime!(read as u32)) as usize];
            #[unroll]
            for lane in 0..width {
                let slot = comptime!(piece * units.width + read * width + lane);
                held[slot] = f32::cast_from(vector[lane]);
                if comptime!(units.is_last(piece)) {
                    held[slot] = select(is_inside, held[slot], 0.0f32);
                }
            }
        }
    }
    held
}

/// Writes all elements of a row that this unit holds, `width` at once.
#[cube]
fn write_held<F: Numeric, N: Size>(
    out: &mut Array<Vector<F, N>>,
    held: &Array<f32>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
) {
    let writes = comptime!(units.width / width);
    #[unroll]
    for piece in 0..units.held {
        let (index, is_inside) = vector_index(piece, units);
        let start = (row * comptime!(units.vectors() as u32) + index) * comptime!(writes as u32);
        if is_inside {
            #[unroll]
            for write in 0..writes {
                let mut vector = Vector::<F, N>::empty();
                #[unroll]
                for lane in 0..width {
                    let slot = comptime!(piece * units.width + write * width + lane);
                    vector[lane] = F::cast_from(held[slot]);
                }
                out[(start + comptime!(write as u32)) as usize] = vector;
            }
        }
    }
}

/// The sum of a row's units' values, in all of them. Its order is the same on every device: that of a tree in each
/// plane, whose last level are neighbours, then plane after plane.
#[cube]
fn row_sum(value: f32, #[comptime] units: RowUnits) -> f32 {
    let tree = comptime!(units.tree());
    let mut sum = value;
    if comptime!(units.planes) {
        #[unroll]
        for step in 0..comptime!(tree.ilog2()) {
            sum += plane_shuffle_xor(sum, comptime!((tree >> (step + 1)) as u32));
        }
        if comptime!(units.lanes > PLANE) {
            let mut shared = SharedMemory::<f32>::new(comptime!(units.lanes / PLANE));
            // Units may still read the sums of an earlier row.
            sync_cube();
            if UNIT_POS % comptime!(PLANE as u32) == 0 {
                shared[(UNIT_POS / comptime!(PLANE as u32)) as usize] = sum;
            }
            sync_cube();
            sum = shared[0];
            #[unroll]
            for plane in 1..comptime!(units.lanes / PLANE) {
                sum += shared[plane];
            }
        }
    } else {
        let mut shared = SharedMemory::<f32>::new(comptime!(units.of_cube()));
        let unit = UNIT_POS as usize;
        let in_tree = unit % tree;
        sync_cube();
        shared[unit] = sum;
        sync_cube();
        #[unroll]
        for step in 0..comptime!(tree.ilog2()) {
            let distance = comptime!(tree >> (step + 1));
            if in_tree < distance {
                shared[unit] += shared[unit + distance];
            }
            sync_cube();
        }
        if comptime!(units.lanes > PLANE) {
            sum = shared[0];
            #[unroll]
            for plane in 1..comptime!(units.lanes / PLANE) {
                sum += shared[comptime!(plane * PLANE)];
            }
        } else {
            sum = shared[unit - in_tree];
        }
    }
    sum
}

/// Adds the sums of a cube's rows up, one row after the other, into those of the last.
#[cube]
fn add_rows(sums: &mut Array<f32>, row_of_cube: u32, #[comptime] units: RowUnits) {
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
