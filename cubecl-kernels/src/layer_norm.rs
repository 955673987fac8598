//! Layer normalization (Ba, Kiros and Hinton, "Layer Normalization", 2016, equation 3) and its gradients, each in one
//! launch.
//!
//! For a row `x`, with gain `g` and bias `b`, and from the gradient `dy` of the output:
//!
//! ```text
//! m = mean(x)    v = mean((x - m)²)    s = 1 / sqrt(v + epsilon)    n = (x - m) s    y = n g + b
//! p = g dy       dx = s (p - mean(p) - n mean(p n))
//! dg = sum over rows of dy n           db = sum over rows of dy
//! ```
//!
//! As in [`rms_norm`](mod@crate::rms_norm), the units of a row keep it in registers, so that each element is read once
//! and written once. The variance is the mean of squares of what is left without the mean, never a difference of two
//! means, which would cancel where a row's mean is large and its deviation small. All arithmetic is FP32, rounded once
//! at the end. Every sum has one order, so that a repetition gives the same bits.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

pub use crate::row_units::MAX_COLS;
use crate::{
    device::{
        array, check_contiguous, check_dtype, cube_grid, empty, or_unused, storage, vector_width,
        zeros,
    },
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
        read_held, row_sums,
        statistics::{inverse_root, row_statistics, subtract, take_mean},
        write_held, write_held_copy,
    },
};

mod quantized;

pub use quantized::quantize_layer_norm;

const OPERATION: &str = "layer_norm";
const OPERATION_BACKWARD: &str = "layer_norm_backward";

/// The output of [`layer_norm`].
#[derive(Debug)]
pub struct LayerNormOutput<R: Runtime> {
    /// The normalized rows, of the shape and type of `x`, contiguous.
    pub output: TensorHandle<R>,
    /// `m` of each row, f32 `[rows]`.
    pub mean: TensorHandle<R>,
    /// `s` of each row, f32 `[rows]`.
    pub inverse_deviation: TensorHandle<R>,
}

/// The gradients of [`layer_norm_backward`].
#[derive(Debug)]
pub struct LayerNormGradients<R: Runtime> {
    /// Of `x`, of its shape and type, contiguous.
    pub input: TensorHandle<R>,
    /// Of the gain, f32 `[parts, cols]`: the sum over parts is the gradient. There is at least one part.
    pub gain: TensorHandle<R>,
    /// Of the bias, as that of the gain.
    pub bias: TensorHandle<R>,
}

/// True for the rows that the kernels take: of 1 to [`MAX_COLS`] elements of f32, f16 or bf16.
pub fn has_layer_norm(dtype: StorageType, cols: usize) -> bool {
    has_rows(dtype, cols)
}

/// Each row of `x` less its mean, divided by its standard deviation, times the gain, plus the bias where there is one.
///
/// - `x`: f32, f16 or bf16 `[.., cols]`, contiguous, or a [quantized matrix](mod@crate::operator_input). The output has
///   its shape and type.
/// - `gain`: f32, f16 or bf16 of `cols` elements, contiguous. Its type may be another one.
/// - `bias`: of the length and type of the gain, contiguous.
/// - `epsilon`: added to the variance. Where it is positive, rows of zeros give the bias.
///
/// A row with NaN or an infinity is NaN, and so is one whose sum overflows. Where only the sum of a row's squares
/// overflows, `s` is 0, and the row is the bias.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what
/// [`quantize`] makes, or rows are none of [`has_layer_norm`].
pub fn layer_norm<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    epsilon: f32,
) -> Result<LayerNormOutput<R>, KernelError> {
    let (norm, _) = launch(client, x.into(), gain, bias, epsilon, None)?;
    Ok(norm)
}

/// [`layer_norm`] of a matrix of floats, and its copy, that of [`quantize`] to the bit.
///
/// - `x`: f32, f16 or bf16 `[rows, cols]`, contiguous.
/// - `spec`: as for [`rms_norm_compressing`](crate::rms_norm::rms_norm_compressing).
///
/// # Errors
///
/// As there, and when `quantize` does not have the spec.
pub fn layer_norm_compressing<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    gain: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    epsilon: f32,
    spec: &QuantizeSpec,
) -> Result<(LayerNormOutput<R>, Quantized<R>), KernelError> {
    let (norm, copy) = launch(client, x.into(), gain, bias, epsilon, Some(spec))?;
    match copy {
        Some(copy) => Ok((norm, copy)),
        None => Ok((norm, quantize(client, x, spec)?)),
    }
}

fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    gain: &TensorHandle<R>,
    bias: Option<&TensorHandle<R>>,
    epsilon: f32,
    spec: Option<&QuantizeSpec>,
) -> Result<(LayerNormOutput<R>, Option<Quantized<R>>), KernelError> {
    let [rows, cols] = check_rows(client, OPERATION, &x, gain)?;
    if let Some(bias) = bias {
        check_bias(OPERATION, bias, gain)?;
    }
    let output = empty(client, x.shape(), x.dtype());
    let mean = empty(client, vec![rows], storage::<f32>());
    let inverse_deviation = empty(client, vec![rows], storage::<f32>());
    let statistics = RowStatistics {
        mean: Some(&mean),
        inverse: &inverse_deviation,
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
                bias,
                output: &output,
            },
        );
    if rows > 0 && !is_done {
        let has_bias = bias.is_some();
        let bias = or_unused(bias, gain, gain.dtype);
        let dtype = x.dtype();
        let x = x.prepare(client, OPERATION)?;
        let pieces = Pieces::of(&[&x], cols, &[&output]);
        let units = RowUnits::new(client, cols, pieces.len);
        let gain_width = vector_width(units.width, &[gain, &bias]);
        let beside = held_copy(client, OPERATION, x.values(), spec, units)?;
        let to = CopyArgs::of(beside.as_ref(), &output);
        // SAFETY: rows are guarded by their number, columns by their own, for which the outputs were allocated;
        // scales lie inside of their buffers, whose shapes were compared with the matrix, and stand-ins are neither
        // read nor written; a stand-in for the bias is not read.
        #[allow(unsafe_code)]
        unsafe {
            layer_norm_kernel::launch_unchecked::<R>(
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
                array(bias),
                array(output.clone()),
                array(mean.clone()),
                array(inverse_deviation.clone()),
                to.values,
                array(to.scales.clone()),
                x.grid(),
                rows as u32,
                epsilon,
                to.largest,
                units,
                pieces,
                gain_width,
                has_bias,
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
    let norm = LayerNormOutput {
        output,
        mean,
        inverse_deviation,
    };
    Ok((norm, copy))
}

/// `m` and `s` of each row, f32 `[rows]` each, as [`layer_norm`] gives them beside its output: for who makes that
/// [as it quantizes it](quantize_layer_norm).
///
/// - `x`, `epsilon`: as there.
///
/// # Errors
///
/// As there, but for what is said of gain and bias.
pub fn row_deviations<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    epsilon: f32,
) -> Result<[TensorHandle<R>; 2], KernelError> {
    let (mean, inverse) = row_statistics(client, OPERATION, x.into(), epsilon, true)?;
    Ok([mean.expect("it was asked for"), inverse])
}

/// The gradients of `x`, of the gain and of the bias, from that of the output of [`layer_norm`].
///
/// - `x`, `gain`: as there.
/// - `mean`, `inverse_deviation`: f32 `[rows]`, as it gave them.
/// - `gradient`: that of the output, a tensor of the shape and type of `x`, contiguous, or [terms of it](OutputGradient),
///   which may be numbers, and what is added to that of `x`.
///
/// # Errors
///
/// When shapes or element types differ from these, tensors are not contiguous, a quantized matrix is not what
/// [`quantize`] makes, or rows are none of [`has_layer_norm`].
pub fn layer_norm_backward<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gain: &TensorHandle<R>,
    mean: &TensorHandle<R>,
    inverse_deviation: &TensorHandle<R>,
    gradient: impl Into<OutputGradient<'a, R>>,
) -> Result<LayerNormGradients<R>, KernelError> {
    let (x, gradient) = (x.into(), gradient.into());
    let [rows, cols] = check_rows(client, OPERATION_BACKWARD, &x, gain)?;
    check_backward(
        client,
        OPERATION_BACKWARD,
        &x,
        rows,
        &gradient,
        &[("mean", mean), ("inverse_deviation", inverse_deviation)],
    )?;
    let input = empty(client, x.shape(), x.dtype());
    if rows == 0 {
        let none = || zeros(client, vec![1, cols], storage::<f32>());
        return Ok(LayerNormGradients {
            input,
            gain: none(),
            bias: none(),
        });
    }
    let statistics = RowStatistics {
        mean: Some(mean),
        inverse: inverse_deviation,
    };
    if let Some(OfColumns { gain, bias }) =
        gradients(client, x, [rows, cols], gain, statistics, &gradient, &input)
    {
        let bias = bias.expect("there is a mean");
        return Ok(LayerNormGradients { input, gain, bias });
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
    let of_bias = empty(client, vec![parts, cols], storage::<f32>());
    let part_width = vector_width(units.width, &[&of_gain, &of_bias]);
    // SAFETY: rows are guarded by their number, columns by their own, for which the outputs were allocated; scales
    // lie inside of their buffers, whose shapes were compared with the matrix, and stand-ins are not read; there are
    // as many cubes as parts.
    #[allow(unsafe_code)]
    unsafe {
        layer_norm_backward_kernel::launch_unchecked::<R>(
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
            array(mean.clone()),
            array(inverse_deviation.clone()),
            array(first),
            array(second),
            array(third),
            array(other),
            array(input.clone()),
            array(of_gain.clone()),
            array(of_bias.clone()),
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
    Ok(LayerNormGradients {
        input,
        gain: of_gain,
        bias: of_bias,
    })
}

/// Accepts a bias of the length and type of the gain.
fn check_bias<R: Runtime>(
    operation: &'static str,
    bias: &TensorHandle<R>,
    gain: &TensorHandle<R>,
) -> Result<(), KernelError> {
    let remedy = "pass a bias of the element type of the gain";
    check_dtype(operation, "bias", bias, gain.dtype, remedy)?;
    if check_contiguous(operation, bias)? == check_contiguous(operation, gain)? {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation,
        got: format!("gain {:?} and bias {:?}", gain.shape(), bias.shape()),
        remedy: "pass a bias for each column",
    })
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn layer_norm_kernel<
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
    bias: &Array<Vector<G, NG>>,
    output: &mut Array<Vector<F, N>>,
    mean: &mut Array<f32>,
    inverse_deviation: &mut Array<f32>,
    copy_values: &mut Array<Vector<u32, NV>>,
    copy_scales: &mut Array<T>,
    grid: RunGrid,
    rows: u32,
    epsilon: f32,
    largest: f32,
    #[comptime] units: RowUnits,
    #[comptime] pieces: Pieces,
    #[comptime] gain_width: usize,
    #[comptime] has_bias: bool,
    #[comptime] copy: Option<GroupCopy>,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
    #[define(G)] _gain_dtype: StorageType,
    #[define(T)] _copy_scales_dtype: StorageType,
) {
    let elements = comptime!(units.elements());
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
    let center = take_mean(&mut values, grid.zero, units);
    let scale = inverse_root(&values, epsilon, grid.zero, units);
    if row < rows {
        #[unroll]
        for index in 0..elements {
            values[index] = values[index] * scale * gains[index];
        }
        if comptime!(has_bias) {
            let biases = read_held::<G, NG>(bias, 0u32, units, gain_width);
            #[unroll]
            for index in 0..elements {
                values[index] += biases[index];
            }
        }
        write_held::<F, N>(output, &values, row, units, pieces.width);
        if UNIT_POS % comptime!(units.lanes as u32) == 0 {
            mean[row as usize] = center;
            inverse_deviation[row as usize] = scale;
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn layer_norm_backward_kernel<
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
    mean: &Array<f32>,
    inverse_deviation: &Array<f32>,
    first_term: &Array<Vector<F, N>>,
    second_term: &Array<Vector<F, N>>,
    third_term: &Array<Vector<F, N>>,
    other: &Array<Vector<F, N>>,
    of_x: &mut Array<Vector<F, N>>,
    of_gain: &mut Array<Vector<f32, NP>>,
    of_bias: &mut Array<Vector<f32, NP>>,
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
    let mut gain_sums = held_zeros(units);
    let mut bias_sums = held_zeros(units);
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
        subtract(&mut normalized, mean[read_row as usize], units);
        let scale = inverse_deviation[read_row as usize];
        // The cache has them. In registers they would leave room for fewer cubes.
        let gains = read_held::<G, NG>(gain, 0u32, units, gain_width);
        // Of `p`, and of `p n`: together, they wait once for the row's units.
        let mut sums = Array::<f32>::new(2usize);
        sums[0] = 0.0f32;
        sums[1] = 0.0f32;
        #[unroll]
        for index in 0..elements {
            normalized[index] *= scale;
            let of_gain = gradients[index] * normalized[index];
            gain_sums[index] += select(row < rows, of_gain, 0.0f32);
            bias_sums[index] += select(row < rows, gradients[index], 0.0f32);
            gradients[index] *= gains[index];
            sums[0] += gradients[index];
            sums[1] += gradients[index] * normalized[index];
        }
        row_sums(&mut sums, 2usize, units);
        let mean_sum = sums[0] * inverse_cols(units);
        let mean_product = sums[1] * inverse_cols(units);
        if row < rows {
            #[unroll]
            for index in 0..elements {
                let rest = gradients[index] - mean_sum - normalized[index] * mean_product;
                gradients[index] = exact::product(scale, rest, grid.zero);
            }
            add_other::<F, N>(&mut gradients, other, row, units, pieces.width, form);
            write_held::<F, N>(of_x, &gradients, row, units, pieces.width);
        }
        first += CUBE_COUNT as u32 * comptime!(units.rows as u32);
    }
    add_rows(&mut gain_sums, row_of_cube, units);
    add_rows(&mut bias_sums, row_of_cube, units);
    if row_of_cube == comptime!(units.rows as u32 - 1) {
        write_held::<f32, NP>(of_gain, &gain_sums, CUBE_POS as u32, units, part_width);
        write_held::<f32, NP>(of_bias, &bias_sums, CUBE_POS as u32, units, part_width);
    }
}
