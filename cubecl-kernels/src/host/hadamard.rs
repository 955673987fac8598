//! The block-diagonal Hadamard transform of a band of rows, by vectors.

use crate::hadamard::{Axis, HadamardSize, HadamardTransform};

/// Neighbours that are one vector, or two.
const LANES: usize = 8;

/// Transforms consecutive rows of `cols` elements in place: [`reference::hadamard`], to the bit. Along the rows' axis
/// the band is made of whole blocks of rows.
///
/// [`reference::hadamard`]: crate::reference::hadamard::hadamard
pub(super) fn transform(band: &mut [f32], cols: usize, transform: HadamardTransform) {
    let HadamardTransform { size, axis } = transform;
    if size == HadamardSize::IDENTITY || band.is_empty() {
        return;
    }
    match axis {
        Axis::Rows => band
            .chunks_exact_mut(size.block() * cols)
            .for_each(|block| along_rows(block, cols)),
        Axis::Columns => band.chunks_exact_mut(size.block()).for_each(along_columns),
    }
    let factor = size.factor();
    band.iter_mut().for_each(|x| *x *= factor);
}

/// The passes among the rows of a block.
fn along_rows(block: &mut [f32], cols: usize) {
    let mut half = cols;
    while half < block.len() {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

/// The passes among the elements of a block.
fn along_columns(block: &mut [f32]) {
    match block.len() {
        2 => near::<2>(block),
        4 => near::<4>(block),
        _ => near::<LANES>(block),
    }
    let mut half = LANES;
    while half < block.len() {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            let vectors = low.as_chunks_mut::<LANES>().0.iter_mut();
            for (low, high) in vectors.zip(high.as_chunks_mut::<LANES>().0) {
                let (a, b) = (*low, *high);
                *low = std::array::from_fn(|lane| a[lane] + b[lane]);
                *high = std::array::from_fn(|lane| a[lane] - b[lane]);
            }
        }
        half *= 2;
    }
}

/// The passes among each `N` neighbours, at most [`LANES`].
fn near<const N: usize>(block: &mut [f32]) {
    for group in block.as_chunks_mut::<N>().0 {
        *group = pass::<N, 1>(*group);
        if N > 2 {
            *group = pass::<N, 2>(*group);
        }
        if N > 4 {
            *group = pass::<N, 4>(*group);
        }
    }
}

/// One pass: a sum in the lower element of each two, in the upper one a difference. A product with 1 or -1 rounds
/// nothing, and leaves one expression for all lanes.
#[inline(always)]
fn pass<const N: usize, const DISTANCE: usize>(group: [f32; N]) -> [f32; N] {
    std::array::from_fn(|lane| {
        let sign = if lane & DISTANCE == 0 { 1.0 } else { -1.0 };
        group[(lane ^ DISTANCE) % N] + group[lane] * sign
    })
}
