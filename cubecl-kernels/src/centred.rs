//! A tensor less its mean over some of its positions: what all keys of a head have in common, which a softmax does not
//! see, and which would take most of their codes (SageAttention, arXiv 2410.02367, section 4.2).
//!
//! One launch: each cube finds the mean that its columns need by itself, from rows that the cache holds, of which there
//! should be few, and writes the copy in which the tensor waits, where that is wanted, beside the tensor.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_float, cube_grid, empty, vector_width},
    error::KernelError,
    quantize::{
        QuantizeSpec, Quantized,
        beside::{Beside, CopyArgs, CubePieces, GroupCopy, write_group_copy},
        quantize,
    },
};

const OPERATION: &str = "centred";
const UNITS: usize = 256;
/// Vectors of a row that a cube takes, at most.
const MOST_COLS: usize = 16;
/// Vectors that a unit takes, one below the other.
const HELD: usize = 8;

/// `x` less, in each column of each matrix, the mean of its rows 0, `step`, 2 `step` and so on.
///
/// - `x`: f32, f16 or bf16 `[matrices, rows, cols]`, contiguous. The result is like it.
/// - `step`: 1 or more.
///
/// The mean is FP32, the difference rounded once. NaN or infinity in a row that is read leaves nothing finite in its
/// column.
///
/// # Errors
///
/// When `x` has another shape or type or is not contiguous, or `step` is 0.
pub fn centred<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    step: usize,
) -> Result<TensorHandle<R>, KernelError> {
    let input = Matrices::new(client, x, step)?;
    let out = empty(client, x.shape().to_vec(), x.dtype);
    input.launch(client, &out, None);
    Ok(out)
}

/// [`centred`], and the copy of the result, that of [`quantize`] to the bit.
///
/// - `spec`: how the result is quantized, as rows of `cols` neighbours in memory. Where these are no whole groups, or
///   units that lie side by side do not hold a group in whole words, the copy is written in a launch of its own.
///
/// # Errors
///
/// As there, when the elements are no whole rows, and when `quantize` does not have the spec.
pub fn centred_compressing<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    step: usize,
    spec: &QuantizeSpec,
    cols: usize,
) -> Result<(TensorHandle<R>, Quantized<R>), KernelError> {
    let input = Matrices::new(client, x, step)?;
    let len = x.shape().iter().product::<usize>();
    if cols == 0 || len % cols != 0 {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("x {:?} and rows of {cols}", x.shape()),
            remedy: "pass a divisor of the number of elements",
        });
    }
    let out = empty(client, x.shape().to_vec(), x.dtype);
    let matrix =
        TensorHandle::new_contiguous(vec![len / cols, cols], out.handle.clone(), out.dtype);
    let beside = Beside::of(client, OPERATION, &matrix, spec, input.pieces())?;
    input.launch(client, &out, beside.as_ref());
    let copy = match beside {
        Some(beside) => beside.output,
        None => quantize(client, &matrix, spec)?,
    };
    Ok((out, copy))
}

/// The tensor, checked, and how cubes take it.
struct Matrices<'a, R: Runtime> {
    x: &'a TensorHandle<R>,
    matrices: usize,
    rows: usize,
    step: usize,
    plan: Plan,
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    /// Elements of a vector.
    vector: usize,
    /// Vectors of a row.
    vectors: usize,
    /// Vectors of a row that a cube takes, a power of two.
    cols: usize,
}

impl Plan {
    /// Rows that a cube takes at a time.
    const fn rows(&self) -> usize {
        UNITS / self.cols
    }
}

impl<'a, R: Runtime> Matrices<'a, R> {
    fn new(
        client: &ComputeClient<R>,
        x: &'a TensorHandle<R>,
        step: usize,
    ) -> Result<Self, KernelError> {
        check_float(client, OPERATION, "x", x.dtype)?;
        let len = check_contiguous(OPERATION, x)?;
        let (&[matrices, rows, cols], 1..) = (&x.shape()[..], step) else {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("x {:?} and a step of {step}", x.shape()),
                remedy: "pass matrices [matrices, rows, cols] and a step of 1 or more",
            });
        };
        if len > u32::MAX as usize {
            return Err(KernelError::Shape {
                operation: OPERATION,
                got: format!("x {:?}", x.shape()),
                remedy: "split it: the kernel indexes with 32 bits",
            });
        }
        let vector = vector_width(cols, &[x]);
        let vectors = cols / vector;
        let cols = 1 << vectors.trailing_zeros().min(MOST_COLS.trailing_zeros());
        Ok(Self {
            x,
            matrices,
            rows,
            step,
            plan: Plan {
                vector,
                vectors,
                cols,
            },
        })
    }

    /// The vectors of a cube as pieces.
    fn pieces(&self) -> CubePieces {
        let Plan {
            vector,
            vectors,
            cols,
        } = self.plan;
        // Where a cube takes whole rows these follow each other, but for those of another matrix.
        let of_matrix = (self.rows * vectors).trailing_zeros();
        CubePieces {
            len: vector,
            units: UNITS,
            side_by_side: match vectors == cols {
                true => 1 << of_matrix.min(UNITS.trailing_zeros()),
                false => cols,
            },
        }
    }

    fn launch(&self, client: &ComputeClient<R>, out: &TensorHandle<R>, beside: Option<&Beside<R>>) {
        let copy = CopyArgs::of(beside, out);
        let plan = self.plan;
        let across = plan.vectors / plan.cols;
        let down = self.rows.div_ceil(HELD * plan.rows());
        let cubes = self.matrices * down * across;
        if cubes == 0 {
            return;
        }
        let samples = self.rows.div_ceil(self.step);
        // SAFETY: rows are guarded by their number, for which the output was allocated, and a stand-in is not written.
        #[allow(unsafe_code)]
        unsafe {
            centred_kernel::launch_unchecked::<R>(
                client,
                cube_grid(cubes),
                CubeDim::new_1d(UNITS as u32),
                plan.vector,
                copy.words,
                array(self.x.clone()),
                array(out.clone()),
                copy.values,
                array(copy.scales.clone()),
                self.matrices as u32,
                self.rows as u32,
                down as u32,
                self.step as u32,
                samples as u32,
                copy.largest,
                0,
                plan,
                copy.copy,
                self.x.dtype,
                copy.scales.dtype,
            );
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn centred_kernel<F: Numeric, S: Numeric, N: Size, NV: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    values: &mut Array<Vector<u32, NV>>,
    scales: &mut Array<S>,
    matrices: u32,
    rows: u32,
    down: u32,
    step: u32,
    samples: u32,
    largest: f32,
    zero: u32,
    #[comptime] plan: Plan,
    #[comptime] copy: Option<GroupCopy>,
    #[define(F)] _dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
) {
    let across = comptime!((plan.vectors / plan.cols) as u32);
    let vectors = comptime!(plan.vectors as u32);
    let cube = CUBE_POS as u32;
    let matrix = cube / across / down;
    if matrix >= matrices {
        terminate!();
    }
    let row_of_cube = UNIT_POS / comptime!(plan.cols as u32);
    let col = cube % across * comptime!(plan.cols as u32) + UNIT_POS % comptime!(plan.cols as u32);
    let first = matrix * rows * vectors + col;
    let start = cube / across % down * comptime!((HELD * plan.rows()) as u32) + row_of_cube;
    // In flight while the mean is found.
    let mut read = Array::<Vector<F, N>>::new(HELD);
    #[unroll]
    for held in 0..HELD {
        let row = start + comptime!((held * plan.rows()) as u32);
        read[held] = x[(first + min(row, rows - 1) * vectors) as usize];
    }
    let mean = mean_of_rows::<F, N>(x, first, row_of_cube, step, samples, plan);
    #[unroll]
    for held in 0..HELD {
        let row = start + comptime!((held * plan.rows()) as u32);
        let is_there = row < rows;
        let at = first + row * vectors;
        let mut less = Vector::<F, N>::empty();
        let mut piece = Array::<f32>::new(plan.vector);
        let own = read[held];
        #[unroll]
        for lane in 0..plan.vector {
            less[lane] = F::cast_from(f32::cast_from(own[lane]) - mean[lane]);
            piece[lane] = f32::cast_from(less[lane]);
        }
        if is_there {
            out[at as usize] = less;
        }
        match comptime!(copy) {
            None => {}
            Some(copy) => {
                let pieces = matrices * rows * vectors;
                write_group_copy::<NV, S>(
                    values,
                    scales,
                    &piece,
                    select(is_there, at, pieces),
                    pieces,
                    largest,
                    zero,
                    copy,
                )
            }
        }
    }
}

/// The means of the columns of this unit's vector, whose rows the units below and above share. Sums have one order.
#[cube]
fn mean_of_rows<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    first: u32,
    row_of_cube: u32,
    step: u32,
    samples: u32,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(plan.vector);
    #[unroll]
    for lane in 0..plan.vector {
        sums[lane] = 0.0f32;
    }
    let mut sample = row_of_cube;
    while sample < samples {
        let read = x[(first + sample * step * comptime!(plan.vectors as u32)) as usize];
        #[unroll]
        for lane in 0..plan.vector {
            sums[lane] += f32::cast_from(read[lane]);
        }
        sample += comptime!(plan.rows() as u32);
    }
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS * plan.vector));
    #[unroll]
    for lane in 0..plan.vector {
        shared[UNIT_POS as usize + comptime!(lane * UNITS)] = sums[lane];
    }
    sync_cube();
    let mut means = SharedMemory::<f32>::new(comptime!(plan.cols * plan.vector));
    let unit = UNIT_POS as usize;
    if unit < comptime!(plan.cols * plan.vector) {
        let lane = unit / plan.cols;
        let mut sum = 0.0f32;
        for row in 0..min(samples, comptime!(plan.rows() as u32)) {
            sum += shared[lane * UNITS + row as usize * plan.cols + unit % plan.cols];
        }
        means[unit] = sum / f32::cast_from(samples);
    }
    sync_cube();
    #[unroll]
    for lane in 0..plan.vector {
        sums[lane] = means[unit % plan.cols + comptime!(lane * plan.cols)];
    }
    sums
}
