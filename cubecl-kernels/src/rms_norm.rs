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
//! arithmetic is FP32, rounded once at the end. Every sum has one order, so that a repetition gives the same bits. A
//! linear layer behind the norm may have its copy of the output [made of the input](quantize_rms_norm) once more.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

pub use crate::row_units::{MAX_COLS, quantized::quantizes_norms};
use crate::{
    device::{array, cube_grid, empty, storage, vector_width, zeros},
    error::KernelError,
    exact,
    operator_input::{OperatorInput, Pieces},
    output_gradient::{GradientForm, OutputGradient, add_other, read_terms},
    quantize::{
        QuantizeSpec, Quantized,
        beside::{CopyArgs, GroupCopy},
        quantize,
        whole_runs::RunGrid,
    },
    row_units::{
        RowUnits, add_rows, check_backward, check_rows, has_rows, held_copy, held_input,
        held_zeros, inverse_cols,
        norm::{OfColumns, Output, RowStatistics, gradients, normalize},
        read_held, row_sum,
        statistics::{inverse_root, row_statistics},
        write_held, write_held_copy,
    },
};

mod quantized;

pub use quantized::quantize_rms_norm;

const OPERATION: &str = "rms_norm";
const OPERATION_BACKWARD: &str = "rms_norm_backward";

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
    has_rows(dtype, cols)
}

/// Each row of `x` divided by its root mean square, times the gain.
///
/// - `x`: f32, f16 or bf16 `[.., cols]`, contiguous, or a [quantized matrix](mod@crate::operator_input). The output has
///   its shape and type.
/// - `gain`: f32, f16 or bf16 of `cols` elements, contiguous. Its type may be another one.
/// - `epsilon`: added to the mean of squares. Where it is positive, rows of zeros give zeros.
///
/// A row with NaN is NaN. Where the sum of a row's squares overflows, `r` is 0, and so is the row but for its
/// infinities, which give NaN.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what
/// [`quantize`] makes, or rows are none of [`has_rms_norm`].
pub fn rms_norm<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    epsilon: f32,
) -> Result<RmsNormOutput<R>, KernelError> {
    let (norm, _) = launch(client, x.into(), gain, epsilon, None)?;
    Ok(norm)
}

/// [`rms_norm`] of a matrix of floats, and its copy, that of [`quantize`] to the bit.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, contiguous.
/// - `spec`: groups of which rows are whole ones, to nearest, row-major, with scales that do not depend on the matrix.
///   Where the units of a plane do not hold a group in whole words, the copy is written in a launch of its own.
///
/// # Errors
///
/// As there, and when `quantize` does not have the spec.
pub fn rms_norm_compressing<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    gain: &TensorHandle<R>,
    epsilon: f32,
    spec: &QuantizeSpec,
) -> Result<(RmsNormOutput<R>, Quantized<R>), KernelError> {
    let (norm, copy) = launch(client, x.into(), gain, epsilon, Some(spec))?;
    match copy {
        Some(copy) => Ok((norm, copy)),
        None => Ok((norm, quantize(client, x, spec)?)),
    }
}

fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    gain: &TensorHandle<R>,
    epsilon: f32,
    spec: Option<&QuantizeSpec>,
) -> Result<(RmsNormOutput<R>, Option<Quantized<R>>), KernelError> {
    let [rows, cols] = check_rows(client, OPERATION, &x, gain)?;
    let output = empty(client, x.shape(), x.dtype());
    let inverse_rms = empty(client, vec![rows], storage::<f32>());
    let statistics = RowStatistics {
        mean: None,
        inverse: &inverse_rms,
    };
    let mut copy = None;
    let is_done = rows > 0
        && spec.is_none()
        && normalize(
            client,
            x,
            [rows, cols],
            epsilon,
            statistics,
            Output {
                gain,
                bias: None,
                output: &output,
            },
        );
    if rows > 0 && !is_done {
        let dtype = x.dtype();
        let x = x.prepare(client, OPERATION)?;
        let pieces = Pieces::of(&[&x], cols, &[&output]);
        let units = RowUnits::new(client, cols, pieces.len);
        let gain_width = vector_width(units.width, &[gain]);
        let beside = held_copy(client, OPERATION, x.values(), spec, units)?;
        let to = CopyArgs::of(beside.as_ref(), &output);
        // SAFETY: rows are guarded by their number, columns by their own, for which the outputs were allocated;
        // scales lie inside of their buffers, whose shapes were compared with the matrix, and stand-ins are neither
        // read nor written.
        #[allow(unsafe_code)]
        unsafe {
            rms_norm_kernel::launch_unchecked::<R>(
                client,
                cube_grid(rows.div_ceil(units.rows)),
                CubeDim::new_1d(units.of_cube() as u32),
                pieces.read,
                pieces.width,
                gain_width,
                to.words,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(gain.clone()),
                array(output.clone()),
                array(inverse_rms.clone()),
                to.values,
                array(to.scales.clone()),
                x.grid(),
                rows as u32,
                epsilon,
                to.largest,
                units,
                pieces,
                gain_width,
                to.copy,
                x.values().dtype,
                x.scales().dtype,
                dtype,
                gain.dtype,
                to.scales.dtype,
            );
        }
        copy = beside.map(|it| it.output);
    }
    let norm = RmsNormOutput {
        output,
        inverse_rms,
    };
    Ok((norm, copy))
}

/// `r` of each row, f32 `[rows]`, as [`rms_norm`] gives it beside its output: for who makes that
/// [as it quantizes it](quantize_rms_norm).
///
/// - `x`, `epsilon`: as there.
///
/// # Errors
///
/// As there, but for what is said of a gain.
pub fn inverse_rms<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    epsilon: f32,
) -> Result<TensorHandle<R>, KernelError> {
    let (_, inverse_rms) = row_statistics(client, OPERATION, x.into(), epsilon, false)?;
    Ok(inverse_rms)
}

/// The gradients of `x` and of the gain, from that of the output of [`rms_norm`].
///
/// - `x`, `gain`: as there.
/// - `inverse_rms`: f32 `[rows]`, as it gave it.
/// - `gradient`: that of the output, a tensor of the shape and type of `x`, contiguous, or [terms of it](OutputGradient),
///   which may be numbers, and what is added to that of `x`.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what
/// [`quantize`] makes, or rows are none of [`has_rms_norm`].
pub fn rms_norm_backward<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    inverse_rms: &TensorHandle<R>,
    gradient: impl Into<OutputGradient<'a, R>>,
) -> Result<RmsNormGradients<R>, KernelError> {
    let (x, gradient) = (x.into(), gradient.into());
    let [rows, cols] = check_rows(client, OPERATION_BACKWARD, &x, gain)?;
    check_backward(
        client,
        OPERATION_BACKWARD,
        &x,
        rows,
        &gradient,
        &[("inverse_rms", inverse_rms)],
    )?;
    let input = empty(client, x.shape(), x.dtype());
    if rows == 0 {
        let gain = zeros(client, vec![1, cols], storage::<f32>());
        return Ok(RmsNormGradients { input, gain });
    }
    let statistics = RowStatistics {
        mean: None,
        inverse: inverse_rms,
    };
    if let Some(OfColumns { gain, .. }) =
        gradients(client, x, [rows, cols], gain, statistics, &gradient, &input)
    {
        return Ok(RmsNormGradients { input, gain });
    }
    let dtype = x.dtype();
    let x = x.prepare(client, OPERATION_BACKWARD)?;
    let terms = gradient.terms.floats(client)?;
    let gradients: Vec<_> = terms.iter().chain(gradient.other).collect();
    let pieces = Pieces::of(&[&x], cols, &gradients);
    let [first, second, third, other] = gradient.arguments(&terms);
    let units = RowUnits::new(client, cols, pieces.len);
    let gain_width = vector_width(units.width, &[gain]);
    let parts = units.backward_cubes(rows);
    let of_gain = empty(client, vec![parts, cols], storage::<f32>());
    let part_width = vector_width(units.width, &[&of_gain]);
    // SAFETY: rows are guarded by their number, columns by their own, for which the outputs were allocated; scales
    // lie inside of their buffers, whose shapes were compared with the matrix, and stand-ins are not read; there are
    // as many cubes as parts.
    #[allow(unsafe_code)]
    unsafe {
        rms_norm_backward_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(parts as u32, 1, 1),
            CubeDim::new_1d(units.of_cube() as u32),
            pieces.read,
            pieces.width,
            gain_width,
            part_width,
            array(x.values().clone()),
            array(x.scales()),
            array(x.tensor_scales()),
            array(gain.clone()),
            array(inverse_rms.clone()),
            array(first),
            array(second),
            array(third),
            array(other),
            array(input.clone()),
            array(of_gain.clone()),
            x.grid(),
            rows as u32,
            units,
            pieces,
            gain_width,
            part_width,
            gradient.form(),
            x.values().dtype,
            x.scales().dtype,
            dtype,
            gain.dtype,
        );
    }
    Ok(RmsNormGradients {
        input,
        gain: of_gain,
    })
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rms_norm_kernel<
    X: Numeric,
    S: Numeric,
    F: Numeric,
    G: Numeric,
    T: Numeric,
    NX: Size,
    N: Size,
    NG: Size,
    NV: Size,
>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    gain: &Array<Vector<G, NG>>,
    output: &mut Array<Vector<F, N>>,
    inverse_rms: &mut Array<f32>,
    copy_values: &mut Array<Vector<u32, NV>>,
    copy_scales: &mut Array<T>,
    grid: RunGrid,
    rows: u32,
    epsilon: f32,
    largest: f32,
    #[comptime] units: RowUnits,
    #[comptime] pieces: Pieces,
    #[comptime] gain_width: usize,
    #[comptime] copy: Option<GroupCopy>,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gain_dtype: StorageType,
    #[define(T)] _copy_scales_dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!(units.rows as u32);
    if first >= rows {
        terminate!();
    }
    let row = first + UNIT_POS / comptime!(units.lanes as u32);
    // Units past the last row take part in what the others wait for, and write nothing.
    let read_row = min(row, rows - 1);
    let mut values =
        held_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, read_row, units, pieces);
    write_held_copy::<NV, T>(
        copy_values,
        copy_scales,
        &values,
        row,
        rows,
        largest,
        grid.zero,
        units,
        copy,
    );
    let gains = read_held::<G, NG>(gain, 0u32, units, gain_width);
    let root = inverse_root(&values, epsilon, grid.zero, units);
    if row < rows {
        #[unroll]
        for index in 0..comptime!(units.elements()) {
            values[index] = values[index] * root * gains[index];
        }
        write_held::<F, N>(output, &values, row, units, pieces.width);
        if UNIT_POS % comptime!(units.lanes as u32) == 0 {
            inverse_rms[row as usize] = root;
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rms_norm_backward_kernel<
    X: Numeric,
    S: Numeric,
    F: Numeric,
    G: Numeric,
    NX: Size,
    N: Size,
    NG: Size,
    NP: Size,
>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    gain: &Array<Vector<G, NG>>,
    inverse_rms: &Array<f32>,
    first_term: &Array<Vector<F, N>>,
    second_term: &Array<Vector<F, N>>,
    third_term: &Array<Vector<F, N>>,
    other: &Array<Vector<F, N>>,
    of_x: &mut Array<Vector<F, N>>,
    of_gain: &mut Array<Vector<f32, NP>>,
    grid: RunGrid,
    rows: u32,
    #[comptime] units: RowUnits,
    #[comptime] pieces: Pieces,
    #[comptime] gain_width: usize,
    #[comptime] part_width: usize,
    #[comptime] form: GradientForm,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gain_dtype: StorageType,
) {
    let elements = comptime!(units.elements());
    let row_of_cube = UNIT_POS / comptime!(units.lanes as u32);
    let mut sums = held_zeros(units);
    let mut first = CUBE_POS as u32 * comptime!(units.rows as u32);
    while first < rows {
        let row = first + row_of_cube;
        // Units past the last row take part in what the others wait for, and add and write nothing.
        let read_row = min(row, rows - 1);
        let mut normalized =
            held_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, read_row, units, pieces);
        let mut gradients = read_terms::<F, N>(
            first_term,
            second_term,
            third_term,
            read_row,
            units,
            pieces.width,
            form,
        );
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
                let rest = gradients[index] - normalized[index] * mean;
                gradients[index] = exact::product(root, rest, grid.zero);
            }
            add_other::<F, N>(&mut gradients, other, row, units, pieces.width, form);
            write_held::<F, N>(of_x, &gradients, row, units, pieces.width);
        }
        first += CUBE_COUNT as u32 * comptime!(units.rows as u32);
    }
    add_rows(&mut sums, row_of_cube, units);
    if row_of_cube == comptime!(units.rows as u32 - 1) {
        write_held::<f32, NP>(of_gain, &sums, CUBE_POS as u32, units, part_width);
    }
}
