//! The block-diagonal Hadamard transform of a band of rows, by vectors.

use crate::hadamard::{Axis, HadamardSize, HadamardTransform};

/// Transforms consecutive rows of `cols` elements in place: [`reference::hadamard`], to the bit. Along the rows' axis
/// the band is made of whole blocks of rows.
///
/// [`reference::hadamard`]: crate::reference::hadamard::hadamard
pub(super) fn transform(band: &mut [f32], cols: usize, transform: HadamardTransform) {
    let HadamardTransform { size, axis } = transform;
    if size == HadamardSize::IDENTITY || band.is_empty() {
        return;
    }
    let spacing = match axis {
        Axis::Rows => cols,
        Axis::Columns => 1,
    };
    for block in band.chunks_exact_mut(size.block() * spacing) {
        let near = match (spacing, block.len()) {
            (1, 2) => near::<2>(block),
            (1, 4) => near::<4>(block),
            (1, _) => near::<8>(block),
            _ => 1,
        };
        let mut distance = near;
        while distance < size.block() {
            let half = distance * spacing;
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        let factor = size.factor();
        block.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The passes among each `N` neighbours. Returns the distance of the next pass, `N`.
fn near<const N: usize>(block: &mut [f32]) -> usize {
    for group in block.as_chunks_mut::<N>().0 {
        let mut distance = 1;
        while distance < N {
            let before = *group;
            for (index, out) in group.iter_mut().enumerate() {
                let (a, b) = (before[index & !distance], before[index | distance]);
                *out = if index & distance == 0 { a + b } else { a - b };
            }
            distance *= 2;
        }
    }
    N
}
