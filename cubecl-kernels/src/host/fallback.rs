//! Block quantization with a second copy of the residual of outlier blocks.

use rayon::prelude::*;

use crate::{
    error::KernelError, granularity::Granularity, number::Number, scale::fp32::scale_and_inverse,
};

use super::{
    HostQuantized, HostScales, HostValues, check, check_len,
    encode::round_nearest,
    grid::{Grid, absmax},
};

const LARGEST: f32 = Number::Int8.largest();

/// A matrix quantized with fallback.
#[derive(Debug, Clone, PartialEq)]
pub struct HostFallbackQuantized {
    /// The INT8 blocks.
    pub base: HostQuantized<'static>,
    /// The INT8 residual blocks; all 0, with scale 0, where a block did not fall back.
    pub residual: HostQuantized<'static>,
    /// Number of blocks that fell back.
    pub fallback_blocks: usize,
}

/// Quantizes `x`, `[rows, cols]`, to INT8 in blocks of `block`, to nearest, and the residual of each block whose
/// largest magnitude is above `threshold` once more (fallback-int8, section 4.3, with the AbsMax criterion of section
/// 4.4). A block that holds NaN or an infinity does not fall back.
///
/// # Errors
///
/// When `x` does not have as many elements as `shape`, or a block has none.
pub fn quantize_fallback(
    x: &[f32],
    shape: [usize; 2],
    block: usize,
    threshold: f32,
) -> Result<HostFallbackQuantized, KernelError> {
    const OPERATION: &str = "host::quantize_fallback";
    let granularity = Granularity::Block(block);
    check(OPERATION, Number::Int8, granularity)?;
    check_len(OPERATION, x, shape)?;
    let grid = Grid::new(shape, granularity);
    let empty = || (vec![0i8; x.len()], vec![0f32; grid.regions()]);
    let (mut base, mut residual) = (empty(), empty());
    let across = grid.across().max(1);
    let fallback_blocks = (
        x.par_chunks(grid.stripe()),
        base.0.par_chunks_mut(grid.stripe()),
        base.1.par_chunks_mut(across),
        residual.0.par_chunks_mut(grid.stripe()),
        residual.1.par_chunks_mut(across),
    )
        .into_par_iter()
        .map(|(x, base, base_scales, residual, residual_scales)| {
            let mut rest = Vec::new();
            let mut fallback_blocks = 0;
            for (index, base_scale) in base_scales.iter_mut().enumerate() {
                let absmax_x = absmax(grid.region_rows(x, index));
                let (scale, inverse) = scale_and_inverse(absmax_x, LARGEST);
                *base_scale = scale;
                let (start, end) = grid.columns(index);
                if inverse != 0.0 {
                    for (x, base) in x.chunks(grid.cols).zip(base.chunks_mut(grid.cols)) {
                        round_nearest(&x[start..end], inverse, &mut base[start..end]);
                    }
                }
                if !(absmax_x.is_finite() && absmax_x > threshold) {
                    continue;
                }
                fallback_blocks += 1;
                rest.clear();
                for (x, base) in grid
                    .region_rows(x, index)
                    .zip(grid.region_rows(base, index))
                {
                    rest.extend(x.iter().zip(base).map(|(x, &q)| x - f32::from(q) * scale));
                }
                let (scale, inverse) = scale_and_inverse(absmax([&rest[..]].into_iter()), LARGEST);
                residual_scales[index] = scale;
                if inverse != 0.0 {
                    let rows = residual.chunks_mut(grid.cols);
                    for (rest, residual) in rest.chunks(end - start).zip(rows) {
                        round_nearest(rest, inverse, &mut residual[start..end]);
                    }
                }
            }
            fallback_blocks
        })
        .sum();
    let quantized = |(values, scales): (Vec<i8>, Vec<f32>)| HostQuantized {
        values: HostValues::I8(values.into()),
        scales: HostScales::F32(scales.into()),
        number: Number::Int8,
        granularity,
        shape,
    };
    Ok(HostFallbackQuantized {
        base: quantized(base),
        residual: quantized(residual),
        fallback_blocks,
    })
}
