//! The backward pass of the quantizer.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{
        MatrixGeometry, MatrixView, array, check_dtype, check_float, empty, is_contiguous,
        or_unused, storage,
    },
    error::KernelError,
    granularity::Granularity,
    hadamard::HadamardTransform,
    number::{Integer, Number, Storage, integer, storage::RUN},
    quantize::{
        Quantized,
        reduction::cube_sum,
        staged::byte_width,
        tile::{read_run, run_read_width},
    },
    shape::MatrixShape,
};

use super::{
    LearnedStep, ResidualRows, SATURATION_GROUP, SavedRounding, check_matrix, gradient_scale,
    rounded::round_run,
    straight_through::{exact_run, saved_run},
    sums::{Total, total},
    transformed::{
        RunPlace, TilePlan, inverse_step, launch_size, run_place, shared_tile, tile_of,
        transform_tile,
    },
};

const OPERATION: &str = "learned_step::backward";
/// Bytes of a run of codes.
const RUN_BYTES: usize = Storage::Nibbles.run_words() * 4;

/// The gradient of `Z`, the values of the quantized matrix, `[rows, cols]`.
#[derive(Debug)]
pub enum Gradient<'a, R: Runtime> {
    /// All of it: f32, f16 or bf16 `[rows, cols]`, any strides.
    Dense(&'a TensorHandle<R>),
    /// The products of the rows that were sampled of a gradient in two parts (int4-hq-lss, section 4.2): row `i` is the
    /// sum of the products at `positions[i]` and at `positions[rows + i]`, where a position outside of them, as -1,
    /// adds nothing.
    Sampled {
        /// f32, f16 or bf16 `[capacity, cols]`, any strides.
        products: &'a TensorHandle<R>,
        /// i32 `[2 rows]`, contiguous.
        positions: &'a TensorHandle<R>,
    },
}

/// Where the backward pass finds out which elements were clamped, and how the others were rounded.
#[derive(Debug)]
pub enum ElementSource<'a, R: Runtime> {
    /// The matrix that was quantized, which is transformed and rounded once more.
    Exact {
        /// f32, f16 or bf16 `[rows, cols]`, any strides.
        x: &'a TensorHandle<R>,
        /// The step size that it was quantized by.
        step: LearnedStep<'a, R>,
    },
    /// The values that the quantizer kept. The gradient of the step size is then an estimate: clamped elements count as
    /// they are, and the residuals of the sampled rows for those of all rows. It is unbiased but for the rounding of
    /// the residuals and for groups of more than eight elements of code 7 or -7.
    Saved {
        /// The codes: the row-major copy.
        quantized: &'a Quantized<R>,
        /// The rest.
        rounding: &'a SavedRounding<R>,
    },
}

/// The gradients of the quantizer's inputs.
#[derive(Debug)]
pub struct LearnedStepGradients<R: Runtime> {
    /// That of the matrix, `[rows, cols]`.
    pub x: TensorHandle<R>,
    /// That of the step size, f32 `[1]`.
    pub step: TensorHandle<R>,
}

/// The gradients of the matrix and of its step size by the straight-through estimator (equation 4 and Appendix A.3):
/// `(I g) H`, and the sum of `g delta` by `1 / sqrt(7 N)` for a matrix of `N` elements.
///
/// - `gradient`: `g`, that of `Z`: neither the factor `s` of the codes nor the transform is left to be applied to it.
/// - `transform`: the one that the matrix was quantized with.
/// - `dtype`: the element type of the matrix' gradient: f32, f16 or bf16.
///
/// The sum is FP32, in one order whatever the device. NaN of the gradient reaches both results, also where `I` or
/// `delta` is 0. The numbers are those of
/// [`reference::learned_step::backward`](crate::reference::learned_step::backward): the matrix' gradient to the bit
/// before it is rounded to `dtype`.
///
/// # Errors
///
/// When a tensor is of another shape or element type than its place says, or when the blocks of the transform do not
/// divide its axis.
pub fn backward<R: Runtime>(
    client: &ComputeClient<R>,
    gradient: Gradient<'_, R>,
    source: ElementSource<'_, R>,
    transform: HadamardTransform,
    dtype: StorageType,
) -> Result<LearnedStepGradients<R>, KernelError> {
    check_float(client, OPERATION, "the gradient of x", dtype)?;
    let elements = Elements::new(client, &source, transform)?;
    let [rows, cols] = elements.shape;
    let (products, positions) = check_gradient(client, &gradient, elements.shape)?;
    let out = empty(client, vec![rows, cols], dtype);
    let step = empty(client, vec![1], storage::<f32>());
    let sums = if rows * cols == 0 {
        empty(client, vec![0], storage::<f32>())
    } else {
        let gradient = (products, positions);
        launch(client, gradient, &source, &elements, transform, &out)?
    };
    let unread = LearnedStep {
        steps: &sums,
        layer: 0,
    };
    let factor = gradient_scale(rows * cols);
    total(client, &sums, &step, unread, factor, Total::Plain);
    Ok(LearnedStepGradients { x: out, step })
}

/// The matrix of a checked source.
struct Elements {
    shape: [usize; 2],
    /// How the matrix itself is read, or what stands in for it.
    view: MatrixView,
    sample: ResidualRows,
}

impl Elements {
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        source: &ElementSource<'_, R>,
        transform: HadamardTransform,
    ) -> Result<Self, KernelError> {
        let (view, sample) = match source {
            ElementSource::Exact { x, step } => {
                step.check(OPERATION)?;
                let view = check_matrix(client, OPERATION, x, transform)?;
                (view, ResidualRows::ALL)
            }
            ElementSource::Saved {
                quantized,
                rounding,
            } => (
                check_saved(quantized, rounding, transform)?,
                rounding.sample,
            ),
        };
        Ok(Self {
            shape: [view.shape.rows, view.shape.cols],
            view,
            sample,
        })
    }
}

/// The row-major copy of a saved matrix.
fn saved_codes<R: Runtime>(quantized: &Quantized<R>) -> Result<&TensorHandle<R>, KernelError> {
    quantized
        .values
        .as_ref()
        .ok_or_else(|| KernelError::Unsupported {
            operation: OPERATION,
            reason: "the row-major copy of the codes was not kept".into(),
            remedy: "quantize with Layout::RowMajor or Layout::Both",
        })
}

/// Accepts what the quantizer made; the view is that of contiguous elements.
fn check_saved<R: Runtime>(
    quantized: &Quantized<R>,
    rounding: &SavedRounding<R>,
    transform: HadamardTransform,
) -> Result<MatrixView, KernelError> {
    const REMEDY: &str = "pass what `learned_step::quantize` made";
    let codes = saved_codes(quantized)?;
    let Quantized {
        number,
        granularity,
        shape,
        ..
    } = quantized;
    if (*number, *granularity) != (Number::Int4, Granularity::Tensor) {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("a matrix of {number:?} by {granularity:?}"),
            remedy: REMEDY,
        });
    }
    let SavedRounding {
        saturation,
        residuals,
        sample,
    } = rounding;
    check_dtype(OPERATION, "the codes", codes, storage::<u8>(), REMEDY)?;
    check_dtype(OPERATION, "saturation", saturation, storage::<u8>(), REMEDY)?;
    check_dtype(OPERATION, "residuals", residuals, storage::<i8>(), REMEDY)?;
    let MatrixShape { batch, rows, cols } = *shape;
    let fits = |tensor: &TensorHandle<R>, rows: usize, cols: usize| {
        tensor.shape().as_ref() == [rows, cols] && is_contiguous(tensor)
    };
    if batch != 1
        || !fits(codes, rows, Storage::Nibbles.stored_cols(cols))
        || !fits(saturation, rows, cols.div_ceil(SATURATION_GROUP))
        || !fits(residuals, sample.count(rows), cols)
    {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: format!(
                "{shape:?} with codes {:?}, saturation {:?} and residuals {:?} of {sample:?}",
                codes.shape(),
                saturation.shape(),
                residuals.shape()
            ),
            remedy: REMEDY,
        });
    }
    transform.check(OPERATION, [rows, cols])?;
    Ok(MatrixView {
        shape: *shape,
        batch_stride: 0,
        row_stride: cols,
        col_stride: 1,
        batched: false,
    })
}

/// The matrix that is read of a gradient of this shape, and its positions where there are some.
#[allow(clippy::type_complexity)]
fn check_gradient<'a, R: Runtime>(
    client: &ComputeClient<R>,
    gradient: &Gradient<'a, R>,
    [rows, cols]: [usize; 2],
) -> Result<(&'a TensorHandle<R>, Option<&'a TensorHandle<R>>), KernelError> {
    let (matrix, positions) = match *gradient {
        Gradient::Dense(matrix) => (matrix, None),
        Gradient::Sampled {
            products,
            positions,
        } => (products, Some(positions)),
    };
    check_float(client, OPERATION, "the gradient", matrix.dtype)?;
    let view = MatrixView::one(OPERATION, "a gradient", matrix)?;
    let fits = match positions {
        None => view.shape.rows == rows,
        Some(positions) => {
            check_dtype(
                OPERATION,
                "positions",
                positions,
                storage::<i32>(),
                "pass i32",
            )?;
            positions.shape().as_ref() == [2 * rows] && is_contiguous(positions)
        }
    };
    if fits && view.shape.cols == cols {
        return Ok((matrix, positions));
    }
    Err(KernelError::Shape {
        operation: OPERATION,
        got: format!(
            "a gradient {:?} with positions {:?} of a matrix [{rows}, {cols}]",
            matrix.shape(),
            positions.map(|positions| positions.shape().to_vec())
        ),
        remedy: "pass a gradient [rows, cols], or products [capacity, cols] with contiguous positions [2 rows]",
    })
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct BackwardPlan {
    tile: TilePlan,
    /// True where rows of the gradient are sums of sampled ones.
    sampled: bool,
    /// True where elements come from the matrix itself.
    exact: bool,
    /// Elements of the gradient and of the matrix, and bytes of codes and of residuals, that are read at once.
    read: [usize; 4],
    /// Elements written at once.
    write: usize,
}

/// How many bytes of the rows of a tensor of bytes can be read at once.
fn byte_read_width<R: Runtime>(bytes: &TensorHandle<R>, most: usize) -> usize {
    let cols = bytes.shape().last().copied().unwrap_or_default();
    match bytes.handle.offset_start.unwrap_or_default() as usize % most {
        0 => byte_width(cols, most),
        _ => 1,
    }
}

/// The element type in which a kernel reads this many bytes at once.
fn read_dtype(width: usize) -> StorageType {
    match width {
        1 => storage::<u8>(),
        _ => storage::<u32>(),
    }
}

/// Writes the gradient of a matrix that is not empty, and returns the sums of its tiles, f32 `[tiles]`.
fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    (gradient, positions): (&TensorHandle<R>, Option<&TensorHandle<R>>),
    source: &ElementSource<'_, R>,
    elements: &Elements,
    transform: HadamardTransform,
    out: &TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    let gradient_view = MatrixView::one(OPERATION, "a gradient", gradient)?;
    let Elements {
        shape: [_, cols],
        view,
        sample,
    } = elements;
    let (x, step, saved) = match source {
        ElementSource::Exact { x, step } => (Some(*x), Some(step), None),
        ElementSource::Saved {
            quantized,
            rounding,
        } => (None, None, Some((saved_codes(quantized)?, rounding))),
    };
    let x_read = x.map_or(1, |x| run_read_width(x, view));
    let (codes_read, residuals_read) = saved.map_or((RUN_BYTES, RUN), |(codes, rounding)| {
        (
            byte_read_width(codes, RUN_BYTES),
            byte_read_width(&rounding.residuals, RUN),
        )
    });
    let plan = BackwardPlan {
        tile: TilePlan::new(client, transform),
        sampled: positions.is_some(),
        exact: x.is_some(),
        read: [
            run_read_width(gradient, &gradient_view),
            x_read,
            codes_read,
            residuals_read,
        ],
        write: byte_width(*cols, 16 / out.dtype.size()),
    };
    let tiles = tile_of(transform.axis).count(view);
    let sums = empty(client, vec![tiles], storage::<f32>());
    let (cubes, units) = launch_size(tiles);
    let optional =
        |tensor: Option<&TensorHandle<R>>, dtype| array(or_unused(tensor, gradient, dtype));
    // SAFETY: reads are guarded by the shapes in the geometries and by the sample, writes by the shape that `out` was
    // allocated for; a position outside of the gradient's rows is not read.
    #[allow(unsafe_code)]
    unsafe {
        backward_kernel::launch_unchecked::<R>(
            client,
            cubes,
            units,
            plan.read[0],
            plan.read[1],
            codes_read.div_ceil(4),
            residuals_read.div_ceil(4),
            plan.write,
            array(gradient.clone()),
            optional(positions, storage::<i32>()),
            optional(x, gradient.dtype),
            optional(step.map(|step| step.steps), storage::<f32>()),
            optional(saved.map(|(codes, _)| codes), storage::<u8>()),
            optional(saved.map(|(_, rest)| &rest.saturation), storage::<u8>()),
            optional(saved.map(|(_, rest)| &rest.residuals), storage::<i8>()),
            array(out.clone()),
            array(sums.clone()),
            gradient_view.geometry(),
            view.geometry(),
            step.map_or(0, |step| step.layer as u32),
            sample.interval() as u32,
            sample.offset() as u32,
            sample.residual_weight(),
            0,
            plan,
            gradient.dtype,
            x.map_or(gradient.dtype, |x| x.dtype),
            read_dtype(codes_read),
            read_dtype(residuals_read),
            out.dtype,
        );
    }
    Ok(sums)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn backward_kernel<
    G: Numeric,
    NG: Size,
    F: Numeric,
    NX: Size,
    V: Numeric,
    NV: Size,
    E: Numeric,
    NE: Size,
    Q: Numeric,
    NQ: Size,
>(
    gradient: &Array<Vector<G, NG>>,
    positions: &Array<i32>,
    x: &Array<Vector<F, NX>>,
    steps: &Array<f32>,
    values: &Array<Vector<V, NV>>,
    saturation: &Array<u8>,
    residuals: &Array<Vector<E, NE>>,
    out: &mut Array<Vector<Q, NQ>>,
    sums: &mut Array<f32>,
    gradient_geometry: MatrixGeometry,
    geometry: MatrixGeometry,
    layer: u32,
    interval: u32,
    offset: u32,
    residual_weight: f32,
    zero: u32,
    #[comptime] plan: BackwardPlan,
    #[define(G)] _gradient_dtype: StorageType,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(E)] _residuals_dtype: StorageType,
    #[define(Q)] _dtype: StorageType,
) {
    let place = run_place(&geometry, comptime!(plan.tile.transform.axis));
    if !place.inside {
        terminate!();
    }
    let mut shared = shared_tile();
    let elements = if comptime!(plan.exact) {
        let mut run = read_run::<F, NX>(x, &geometry, 0, place.row, place.col, plan.read[1]);
        transform_tile(&mut run, &mut shared, plan.tile);
        exact_run(&round_run(&run, inverse_step(steps, layer), zero))
    } else {
        let codes = read_codes::<V, NV>(values, &geometry, &place, plan.read[2]);
        let flags = read_flags(saturation, &geometry, &place);
        let deltas = read_residuals::<E, NE>(
            residuals,
            &geometry,
            &place,
            interval,
            offset,
            residual_weight,
            plan.read[3],
        );
        saved_run(&codes, flags, &deltas, comptime!(plan.tile.planes))
    };
    let mut run = read_gradient::<G, NG>(
        gradient,
        positions,
        &gradient_geometry,
        geometry.rows,
        &place,
        plan.sampled,
        plan.read[0],
    );
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..RUN {
        sum += run[index] * elements.deltas[index];
        run[index] = run[index] * elements.passes[index];
    }
    let sum = cube_sum::<f32>(sum);
    if UNIT_POS == 0 {
        sums[CUBE_POS] = sum;
    }
    transform_tile(&mut run, &mut shared, plan.tile);
    write_floats::<Q, NQ>(out, &run, &geometry, &place, plan.write);
}

/// A run of the gradient; 0 outside the matrix.
#[cube]
fn read_gradient<G: Numeric, N: Size>(
    gradient: &Array<Vector<G, N>>,
    positions: &Array<i32>,
    geometry: &MatrixGeometry,
    rows: u32,
    place: &RunPlace,
    #[comptime] sampled: bool,
    #[comptime] width: usize,
) -> Array<f32> {
    if comptime!(sampled) {
        // Behind the last row the row is one that is not there, and so is a position below 0.
        let row = min(place.row, rows - 1);
        let inside = place.row < rows;
        let first = select(
            inside,
            u32::cast_from(positions[row as usize]),
            geometry.rows,
        );
        let second = select(
            inside,
            u32::cast_from(positions[(rows + row) as usize]),
            geometry.rows,
        );
        let mut run = read_run::<G, N>(gradient, geometry, 0, first, place.col, width);
        let other = read_run::<G, N>(gradient, geometry, 0, second, place.col, width);
        #[unroll]
        for index in 0..RUN {
            run[index] += other[index];
        }
        run
    } else {
        read_run::<G, N>(gradient, geometry, 0, place.row, place.col, width)
    }
}

/// A run of packed codes; 0 outside the matrix.
#[cube]
fn read_codes<V: Numeric, N: Size>(
    values: &Array<Vector<V, N>>,
    geometry: &MatrixGeometry,
    place: &RunPlace,
    #[comptime] width: usize,
) -> Array<u32> {
    let bytes = geometry.cols.div_ceil(2u32);
    read_words::<V, N>(
        values,
        place.row * bytes,
        place.col / 2,
        select(place.row < geometry.rows, bytes, 0u32),
        comptime!(RUN_BYTES / 4),
        width,
    )
}

/// The byte of the group that a run lies in; 0 outside the matrix.
#[cube]
fn read_flags(saturation: &Array<u8>, geometry: &MatrixGeometry, place: &RunPlace) -> u32 {
    let group = comptime!(SATURATION_GROUP as u32);
    let mut flags = 0u32;
    if place.row < geometry.rows && place.col < geometry.cols {
        let at = place.row * geometry.cols.div_ceil(group) + place.col / group;
        flags = u32::cast_from(saturation[at as usize]);
    }
    flags
}

/// The term of a run's residuals in `delta`: 0 in a row that was not sampled.
#[cube]
fn read_residuals<E: Numeric, N: Size>(
    residuals: &Array<Vector<E, N>>,
    geometry: &MatrixGeometry,
    place: &RunPlace,
    interval: u32,
    offset: u32,
    weight: f32,
    #[comptime] width: usize,
) -> Array<f32> {
    let sampled = place.row < geometry.rows && place.row % interval == offset;
    let words = read_words::<E, N>(
        residuals,
        place.row / interval * geometry.cols,
        place.col,
        select(sampled, geometry.cols, 0u32),
        comptime!(RUN / 4),
        width,
    );
    let mut deltas = Array::<f32>::new(RUN);
    #[unroll]
    for index in 0..RUN {
        let byte = words[comptime!(index / 4)] >> comptime!(index as u32 % 4 * 8);
        deltas[index] = integer::decode(byte, comptime!(Integer::INT8)) * weight;
    }
    deltas
}

/// `count` words of a contiguous row of `cols` bytes from `col`, `width` bytes at once; 0 behind its end.
#[cube]
fn read_words<T: Numeric, N: Size>(
    bytes: &Array<Vector<T, N>>,
    row_start: u32,
    col: u32,
    cols: u32,
    #[comptime] count: usize,
    #[comptime] width: usize,
) -> Array<u32> {
    let mut words = Array::<u32>::new(count);
    #[unroll]
    for word in 0..count {
        words[word] = 0u32;
    }
    #[unroll]
    for piece in 0..comptime!(count * 4 / width) {
        let at = col + comptime!((piece * width) as u32);
        if at < cols {
            let vector = bytes[((row_start + at) / comptime!(width as u32)) as usize];
            if comptime!(width == 1) {
                let byte = u32::cast_from(vector[0usize]);
                words[comptime!(piece / 4)] |= byte << comptime!(piece as u32 % 4 * 8);
            } else {
                #[unroll]
                for lane in 0..comptime!(width / 4) {
                    words[comptime!(piece * width / 4 + lane)] = u32::cast_from(vector[lane]);
                }
            }
        }
    }
    words
}

/// Writes a run, what of it lies inside the matrix.
#[cube]
fn write_floats<Q: Numeric, N: Size>(
    out: &mut Array<Vector<Q, N>>,
    run: &Array<f32>,
    geometry: &MatrixGeometry,
    place: &RunPlace,
    #[comptime] width: usize,
) {
    #[unroll]
    for piece in 0..comptime!(RUN / width) {
        let at = place.col + comptime!((piece * width) as u32);
        if place.row < geometry.rows && at < geometry.cols {
            let mut vector = Vector::<Q, N>::empty();
            #[unroll]
            for lane in 0..width {
                vector[lane] = Q::cast_from(run[comptime!(piece * width + lane)]);
            }
            let index = (place.row * geometry.cols + at) / comptime!(width as u32);
            out[index as usize] = vector;
        }
    }
}
