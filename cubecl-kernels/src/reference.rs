//! Every operation of this crate in scalar Rust, written from the equations: the specification of the kernels.
//!
//! Quantization is specified to the bit. All of its arithmetic is `f32`, each operation rounded to nearest even,
//! after an exact conversion of the input; a product that feeds a sum is rounded on its own. The matrix product is
//! evaluated in `f64` over the same integers and scales; a kernel may differ from it by its `f32` accumulation.
//!
//! Matrices are contiguous slices, row-major, batch first.

pub mod adamw;
pub mod optimizer_state;

use crate::{
    delay_threshold::{DelayThreshold, MAX_THRESHOLD, MIN_THRESHOLD},
    format::{Format, Granularity, MIN_ABSMAX, Rounding, STOCHASTIC_OFFSET},
    philox,
    shape::MatrixShape,
};

/// A quantized batch of matrices: each value is `values[i] * scale of its block`.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// Shape of the values.
    pub shape: MatrixShape,
    /// The integers, row-major.
    pub values: Vec<i32>,
    /// One scale for each block, row-major.
    pub scales: Vec<f32>,
    /// Rows and columns of a block, in elements.
    pub scale_block: (usize, usize),
}

impl Quantized {
    /// Number of block rows and block columns of one matrix.
    pub fn scale_grid(&self) -> (usize, usize) {
        (
            self.shape.rows.div_ceil(self.scale_block.0),
            self.shape.cols.div_ceil(self.scale_block.1),
        )
    }

    /// The integer at these coordinates.
    pub fn value(&self, batch: usize, row: usize, col: usize) -> i32 {
        self.values[(batch * self.shape.rows + row) * self.shape.cols + col]
    }

    /// Index of the block of an element, into `scales`.
    pub fn block_of(&self, batch: usize, row: usize, col: usize) -> usize {
        let (rows, cols) = self.scale_grid();
        (batch * rows + row / self.scale_block.0) * cols + col / self.scale_block.1
    }

    /// The scale of the element at these coordinates.
    pub fn scale(&self, batch: usize, row: usize, col: usize) -> f32 {
        self.scales[self.block_of(batch, row, col)]
    }

    /// The same matrices transposed, values, blocks and scales.
    pub fn transposed(&self) -> Self {
        let (rows, cols) = self.scale_grid();
        Self {
            shape: self.shape.transposed(),
            values: transpose(&self.values, self.shape),
            scales: transpose(
                &self.scales,
                MatrixShape::batched(self.shape.batch, rows, cols),
            ),
            scale_block: (self.scale_block.1, self.scale_block.0),
        }
    }
}

/// A batch of matrices transposed.
pub fn transpose<T: Copy>(x: &[T], shape: MatrixShape) -> Vec<T> {
    coordinates(shape.transposed())
        .map(|(batch, row, col)| x[(batch * shape.rows + col) * shape.cols + row])
        .collect()
}

/// Scale and inverse scale of a block from its largest magnitude.
///
/// A block that holds NaN or an infinity has scale NaN, one whose maximum is below [`MIN_ABSMAX`] has scale 0; both
/// have inverse 0, which stands for "all values are 0".
pub fn scale_and_inverse(absmax: f32, q_max: i32) -> (f32, f32) {
    if !absmax.is_finite() {
        (f32::NAN, 0.0)
    } else if absmax < MIN_ABSMAX {
        (0.0, 0.0)
    } else {
        (absmax / q_max as f32, q_max as f32 / absmax)
    }
}

/// The largest magnitude of a block, by the order of the bits without the sign: NaN above infinity above the rest.
pub fn absmax(block: impl Iterator<Item = f32>) -> f32 {
    f32::from_bits(
        block
            .map(|x| x.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or_default(),
    )
}

/// One value as an integer in `[-q_max, q_max]`, `inverse` being the reciprocal of its block's scale.
///
/// `dither` is the random number in `[0, 1)` of stochastic rounding, which takes the floor of the value plus this
/// number, by way of [`STOCHASTIC_OFFSET`]. Without it the value is rounded to nearest, ties to even.
pub fn round_to_integer(x: f32, inverse: f32, q_max: i32, dither: Option<f32>) -> i32 {
    if inverse == 0.0 {
        return 0;
    }
    let v = x * inverse;
    let rounded = match dither {
        None => v.round_ties_even(),
        Some(u) => (v + (STOCHASTIC_OFFSET + u)).floor() - STOCHASTIC_OFFSET,
    };
    (rounded as i32).clamp(-q_max, q_max)
}

/// Quantizes `x` (fallback-int8, section 4.2).
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize(
    x: &[f32],
    shape: MatrixShape,
    format: Format,
    granularity: Granularity,
    rounding: Rounding,
) -> Quantized {
    quantize_to(x, shape, format.q_max(), granularity, rounding)
}

/// [`quantize`] to integers of any range, so that a test can compare with a format that has no kernel.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize_to(
    x: &[f32],
    shape: MatrixShape,
    q_max: i32,
    granularity: Granularity,
    rounding: Rounding,
) -> Quantized {
    assert_eq!(x.len(), shape.num_elements(), "elements of x");
    let scale_block = granularity.scale_block(shape);
    assert!(
        scale_block.0 > 0 && scale_block.1 > 0,
        "quantize: {granularity:?}; use a block or a group of at least one element"
    );
    let mut quantized = Quantized {
        shape,
        values: vec![0; x.len()],
        scales: vec![0.0; granularity.scales_shape(shape).num_elements()],
        scale_block,
    };
    let absmaxes = block_absmaxes(x, &quantized);
    let inverses: Vec<f32> = absmaxes
        .iter()
        .zip(&mut quantized.scales)
        .map(|(&absmax, scale)| {
            let (block_scale, inverse) = scale_and_inverse(absmax, q_max);
            *scale = block_scale;
            inverse
        })
        .collect();
    for (index, (batch, row, col)) in coordinates(shape).enumerate() {
        let dither = match rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic(key) => Some(philox::dither(key, batch * shape.rows + row, col)),
        };
        let inverse = inverses[quantized.block_of(batch, row, col)];
        quantized.values[index] = round_to_integer(x[index], inverse, q_max, dither);
    }
    quantized
}

/// The values of a quantized matrix: `q * scale`, rounded to `f32`.
pub fn dequantize(quantized: &Quantized) -> Vec<f32> {
    coordinates(quantized.shape)
        .map(|(batch, row, col)| {
            quantized.value(batch, row, col) as f32 * quantized.scale(batch, row, col)
        })
        .collect()
}

/// A fallback-quantized matrix: `x = base + residual` where the block fell back, `base` elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub struct FallbackQuantized {
    /// The INT8 blocks.
    pub base: Quantized,
    /// The INT8 residual blocks; all 0, with scale 0, where a block did not fall back.
    pub residual: Quantized,
    /// For each block, whether it fell back: the indicator u(i, k).
    pub flags: Vec<bool>,
}

impl FallbackQuantized {
    /// Number of blocks that fell back, and number of blocks.
    pub fn counts(&self) -> [i32; 2] {
        [
            self.flags.iter().filter(|&&flag| flag).count() as i32,
            self.flags.len() as i32,
        ]
    }
}

/// Quantizes `x` in square blocks, and quantizes the residual of each block whose largest magnitude is above
/// `threshold` once more (fallback-int8, section 4.3, with the AbsMax criterion of section 4.4).
///
/// A block that holds NaN or an infinity does not fall back.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize_fallback(
    x: &[f32],
    shape: MatrixShape,
    block: usize,
    threshold: f32,
) -> FallbackQuantized {
    let granularity = Granularity::Block(block);
    let base = quantize(x, shape, Format::Int8, granularity, Rounding::Nearest);
    let flags: Vec<bool> = block_absmaxes(x, &base)
        .into_iter()
        .map(|absmax| absmax.is_finite() && absmax > threshold)
        .collect();
    let residual: Vec<f32> = coordinates(shape)
        .zip(x.iter().zip(dequantize(&base)))
        .map(|((batch, row, col), (x, base_value))| {
            if flags[base.block_of(batch, row, col)] {
                x - base_value
            } else {
                0.0
            }
        })
        .collect();
    FallbackQuantized {
        residual: quantize(
            &residual,
            shape,
            Format::Int8,
            granularity,
            Rounding::Nearest,
        ),
        base,
        flags,
    }
}

/// The values of a fallback-quantized matrix, `base + residual`, in `f64`.
pub fn dequantize_fallback(quantized: &FallbackQuantized) -> Vec<f64> {
    coordinates(quantized.base.shape)
        .map(|(batch, row, col)| fallback_value(&quantized.base, Some(quantized), batch, row, col))
        .collect()
}

/// `C[M, N] = A[M, K] B[N, K]^T + bias[N]` over the quantized values, in `f64` (fallback-int8, Algorithm 1).
///
/// Both operands have K along their rows. With a fallback, `a` is its base and the residual blocks are added. A batch
/// of one in `b` is shared by all matrices of `a`.
///
/// # Panics
///
/// When the depths or the batches do not fit.
pub fn gemm(
    a: &Quantized,
    b: &Quantized,
    fallback: Option<&FallbackQuantized>,
    bias: Option<&[f32]>,
) -> Vec<f64> {
    assert_eq!(a.shape.cols, b.shape.cols, "depth of a and b");
    assert!(
        b.shape.batch == 1 || b.shape.batch == a.shape.batch,
        "batch of b: {}, of a: {}",
        b.shape.batch,
        a.shape.batch
    );
    let (m, n, depth) = (a.shape.rows, b.shape.rows, a.shape.cols);
    let a_values: Vec<f64> = coordinates(a.shape)
        .map(|(batch, row, col)| fallback_value(a, fallback, batch, row, col))
        .collect();
    let b_values: Vec<f64> = coordinates(b.shape)
        .map(|(batch, row, col)| fallback_value(b, None, batch, row, col))
        .collect();
    coordinates(MatrixShape::batched(a.shape.batch, m, n))
        .map(|(batch, row, col)| {
            let a_row = &a_values[(batch * m + row) * depth..][..depth];
            let b_row = &b_values[((batch % b.shape.batch) * n + col) * depth..][..depth];
            let sum: f64 = a_row.iter().zip(b_row).map(|(a, b)| a * b).sum();
            sum + bias.map_or(0.0, |bias| f64::from(bias[col]))
        })
        .collect()
}

/// One step of the threshold of every layer (fallback-int8, Algorithm 2).
///
/// `counts` holds, for each layer, the blocks that fell back and all blocks since the last step; it is zeroed. A layer
/// without blocks keeps its threshold and its rate.
pub fn delay_threshold(
    thresholds: &mut [f32],
    counts: &mut [[i32; 2]],
    rates: &mut [f32],
    config: &DelayThreshold,
) {
    for ((threshold, counts), rate) in thresholds.iter_mut().zip(counts).zip(rates) {
        let [fallback, total] = std::mem::take(counts);
        if total == 0 {
            continue;
        }
        *rate = fallback as f32 / total as f32;
        if *rate < config.r_min {
            *threshold = (*threshold / config.alpha).max(MIN_THRESHOLD);
        } else if *rate > config.r_max {
            *threshold = (*threshold * config.alpha).min(MAX_THRESHOLD);
        }
    }
}

/// Packs 10-bit integers as the INT10 kernels do: rows padded with zeros to a multiple of 16 values, and of each 16,
/// value `i` in two's complement in the bits from `10 i` of a 160-bit string, stored as five words, lowest first.
pub fn pack_int10(values: &[i32], cols: usize) -> Vec<u32> {
    if cols == 0 {
        return Vec::new();
    }
    let mut words = Vec::new();
    for row in values.chunks(cols) {
        for group in row.chunks(16) {
            let mut packed = [0u32; 5];
            for (index, &value) in group.iter().enumerate() {
                let bits = (value as u32) & 0x3ff;
                let (word, shift) = (index * 10 / 32, index * 10 % 32);
                packed[word] |= bits << shift;
                if shift > 22 {
                    packed[word + 1] |= bits >> (32 - shift);
                }
            }
            words.extend(packed);
        }
    }
    words
}

/// All coordinates `(batch, row, col)` in row-major order.
fn coordinates(shape: MatrixShape) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..shape.batch).flat_map(move |batch| {
        (0..shape.rows).flat_map(move |row| (0..shape.cols).map(move |col| (batch, row, col)))
    })
}

fn block_absmaxes(x: &[f32], blocks: &Quantized) -> Vec<f32> {
    let mut bits = vec![0u32; blocks.scales.len()];
    for (x, (batch, row, col)) in x.iter().zip(coordinates(blocks.shape)) {
        let max = &mut bits[blocks.block_of(batch, row, col)];
        *max = (*max).max(absmax(std::iter::once(*x)).to_bits());
    }
    bits.into_iter().map(f32::from_bits).collect()
}

fn fallback_value(
    base: &Quantized,
    fallback: Option<&FallbackQuantized>,
    batch: usize,
    row: usize,
    col: usize,
) -> f64 {
    let value =
        |q: &Quantized| f64::from(q.value(batch, row, col)) * f64::from(q.scale(batch, row, col));
    match fallback {
        Some(fallback) if fallback.flags[base.block_of(batch, row, col)] => {
            value(base) + value(&fallback.residual)
        }
        _ => value(base),
    }
}
