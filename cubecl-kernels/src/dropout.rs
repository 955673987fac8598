//! Dropout (Srivastava et al., 2014), alone or of the branch of a residual sum, in one launch that draws by itself: nothing
//! waits for the backward pass, which draws the same again. And that sum without dropout.
//!
//! ```text
//! y = x z       y = x z + residual       y = x + residual       z = 0 with probability rate, else 1 / (1 - rate)
//! ```
//!
//! The gradient of `x` is that of the output times `z`, so the same function gives it. The input is read once, as floats or
//! as [numbers with scales](mod@crate::operator_input) (jetfire-int8, section 3.2). All arithmetic is FP32, rounded once at
//! the end.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty, has_u64, or_unused},
    error::KernelError,
    exact::product,
    operator_input::{OperatorInput, Pieces, check_alike, read_input, read_piece, write_piece},
    philox,
    quantize::whole_runs::RunGrid,
    rounding::{RandomStream, Rounding, StochasticKey, random_stream, random_words},
};

const OPERATION: &str = "dropout";
const OPERATION_SUM: &str = "residual_sum";
const UNITS: usize = 256;
/// Neighbours of a row whose draws share a counter.
pub(crate) const DRAWS: usize = 4;

/// What each element is multiplied by.
///
/// The draw of an element follows from the key, its row and its column alone: it is the same on every device, and in the
/// backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// The probability of 0, in `[0, 1)`.
    pub rate: f32,
    /// Names the draw: never use one value for two calls.
    pub key: StochasticKey,
}

impl Draw {
    /// `z` of an element. `row` counts all dimensions but the last.
    pub fn factor(&self, row: usize, col: usize) -> f32 {
        match philox::uniform(self.key, row, col) < self.rate {
            true => 0.0,
            false => self.kept_factor(),
        }
    }

    /// Multiplies neighbours of a row, from column `first` on, by their factors.
    pub fn apply(&self, row: usize, first: usize, values: &mut [f32]) {
        let kept = self.kept_factor();
        let mut words = [0; DRAWS];
        for (index, (col, value)) in (first..).zip(values).enumerate() {
            if index == 0 || col % DRAWS == 0 {
                words = philox::neighbours(self.key, row, col / DRAWS);
            }
            let keeps = philox::uniform24(words[col % DRAWS]) >= self.rate;
            *value *= if keeps { kept } else { 0.0 };
        }
    }

    /// The factors of a matrix, row by row.
    pub fn factors(&self, rows: usize, cols: usize) -> Vec<f32> {
        let mut factors = vec![1.0; rows * cols];
        for (row, factors) in factors.chunks_mut(cols.max(1)).enumerate() {
            self.apply(row, 0, factors);
        }
        factors
    }

    /// The factor of an element that stays.
    pub fn kept_factor(&self) -> f32 {
        1.0 / (1.0 - self.rate)
    }
}

/// `x z`, or `x z + residual`.
///
/// - `x`: f32, f16 or bf16 `[.., cols]`, contiguous, or a [quantized matrix](mod@crate::operator_input). The result has its
///   shape and type.
/// - `residual`: of the same shape and type, contiguous.
///
/// NaN and infinities that are dropped are NaN, as in a product with 0.
///
/// # Errors
///
/// When a tensor is no float tensor or not contiguous, the two differ in shape or type, a quantized one is not what
/// [`quantize`](crate::quantize::quantize) makes, or the rate is not in `[0, 1)`.
pub fn dropout<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    residual: Option<&'a TensorHandle<R>>,
    draw: &Draw,
) -> Result<TensorHandle<R>, KernelError> {
    if !(0.0..1.0).contains(&draw.rate) {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("a rate of {}", draw.rate),
            remedy: "pass one from 0 on that is below 1",
        });
    }
    launch(client, OPERATION, x.into(), residual, Some(draw))
}

/// `x + residual`, of which x may be [a quantized matrix](mod@crate::operator_input): otherwise as [`dropout`].
///
/// # Errors
///
/// As [`dropout`].
pub fn residual_sum<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    residual: &'a TensorHandle<R>,
) -> Result<TensorHandle<R>, KernelError> {
    launch(client, OPERATION_SUM, x.into(), Some(residual), None)
}

fn launch<'a, R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    x: OperatorInput<'a, R>,
    residual: Option<&'a TensorHandle<R>>,
    draw: Option<&Draw>,
) -> Result<TensorHandle<R>, KernelError> {
    let others = residual.map(|residual| ("residual", residual.into()));
    let inputs: Vec<_> = [("x", x)].into_iter().chain(others).collect();
    let len = check_alike(client, operation, &inputs)?;
    let (shape, dtype) = (x.shape(), x.dtype());
    let cols = shape.last().copied().unwrap_or(1);
    let output = empty(client, shape, dtype);
    if len > 0 {
        let x = x.prepare(client, operation)?;
        let floats: Vec<_> = [&output].into_iter().chain(residual).collect();
        let pieces = Pieces::of(&[&x], cols, &floats);
        let count = len / pieces.len;
        // SAFETY: accesses are guarded by the number of pieces, which is that of all tensors; scales lie inside of their
        // buffers, whose shapes were compared with the matrix, and stand-ins are not read.
        #[allow(unsafe_code)]
        unsafe {
            dropout_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                pieces.read,
                pieces.width,
                array(x.values().clone()),
                array(x.scales()),
                array(x.tensor_scales()),
                array(or_unused(residual, &output, dtype)),
                array(output.clone()),
                x.grid(),
                random_stream(draw.map_or(Rounding::Nearest, |it| Rounding::Stochastic(it.key))),
                draw.map_or(0.0, |draw| draw.rate),
                draw.map_or(1.0, Draw::kept_factor),
                count as u32,
                (cols / pieces.len) as u32,
                0,
                pieces,
                draw.is_some(),
                residual.is_some(),
                has_u64(client),
                x.values().dtype,
                x.scales().dtype,
                dtype,
            );
        }
    }
    Ok(output)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dropout_kernel<X: Numeric, S: Numeric, F: Numeric, NX: Size, N: Size>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    residual: &Array<Vector<F, N>>,
    output: &mut Array<Vector<F, N>>,
    grid: RunGrid,
    random: RandomStream,
    rate: f32,
    kept: f32,
    count: u32,
    pieces_of_row: u32,
    zero: u32,
    #[comptime] pieces: Pieces,
    #[comptime] drops: bool,
    #[comptime] has_residual: bool,
    #[comptime] wide: bool,
    #[define(X)] _values_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
    #[define(F)] _dtype: StorageType,
) {
    let at = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if at >= count {
        terminate!();
    }
    let len = comptime!(pieces.len);
    let (row, col) = (
        at / pieces_of_row,
        at % pieces_of_row * comptime!(len as u32),
    );
    let mut values = read_input::<X, NX, S, F>(x, scales, tensor_scales, &grid, at, pieces);
    if comptime!(drops) {
        #[unroll]
        for quad in 0..comptime!(len.div_ceil(DRAWS)) {
            let index = col / comptime!(DRAWS as u32) + comptime!(quad as u32);
            let (w0, w1, w2, w3) = random_words(row, index, &random, wide);
            #[unroll]
            for lane in 0..comptime!(len.min(DRAWS)) {
                // A piece may be less than what shares a counter, and lie inside of it.
                let of_lane = col % comptime!(DRAWS as u32) + comptime!(lane as u32);
                let low = select(of_lane == 0, w0, w1);
                let high = select(of_lane == 2, w2, w3);
                let word = select(of_lane < 2, low, high);
                let factor = select(uniform24(word) < rate, 0.0f32, kept);
                let value = values[comptime!(quad * DRAWS + lane)];
                values[comptime!(quad * DRAWS + lane)] = product(value, factor, zero);
            }
        }
    }
    if comptime!(has_residual) {
        let others = read_piece::<F, N>(residual, at, pieces.len, pieces.width);
        #[unroll]
        for index in 0..len {
            values[index] += others[index];
        }
    }
    write_piece::<F, N>(output, &values, at, pieces.len, pieces.width);
}

/// [`philox::uniform24`](crate::philox::uniform24) in a kernel.
#[cube]
pub(crate) fn uniform24(word: u32) -> f32 {
    f32::cast_from(word >> 8) * (1.0 / 16_777_216.0)
}
