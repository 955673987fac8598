//! The block-diagonal Hadamard transform (int4-hq-lss, section 3.3).

use crate::hadamard::{Axis, HadamardTransform, RANDOM_SIGNS, RANDOM_SIZE};

/// The transform of `x`, `[rows, cols]`, in FP32.
///
/// A block of `2^k` elements takes `k` passes, with distances 1, 2, 4, .. `2^(k-1)` in this order: two elements `(a,
/// b)` of that distance become `(a + b, a - b)`. Then each element is multiplied by [`HadamardSize::factor`] once.
///
/// A device may take a subnormal number for 0.
///
/// [`HadamardSize::factor`]: crate::hadamard::HadamardSize::factor
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`, or the blocks do not divide the axis.
pub fn hadamard(x: &[f32], shape: [usize; 2], transform: HadamardTransform) -> Vec<f32> {
    let [rows, cols] = shape;
    assert_eq!(x.len(), rows * cols, "hadamard: elements of x");
    transform
        .check("reference::hadamard", shape)
        .unwrap_or_else(|error| panic!("{error}"));
    let (lines, dim) = match transform.axis {
        Axis::Rows => (cols, rows),
        Axis::Columns => (rows, cols),
    };
    let index = |line: usize, element: usize| match transform.axis {
        Axis::Rows => element * cols + line,
        Axis::Columns => line * cols + element,
    };
    let mut out = x.to_vec();
    for line in 0..lines {
        for pass in 0..transform.size.order() {
            let distance = 1 << pass;
            for element in (0..dim).filter(|element| element & distance == 0) {
                let (low, high) = (index(line, element), index(line, element + distance));
                let (a, b) = (out[low], out[high]);
                (out[low], out[high]) = (a + b, a - b);
            }
        }
    }
    let factor = transform.size.factor();
    out.iter_mut().for_each(|x| *x *= factor);
    out
}

/// The random Hadamard transform of each row of `x`, `[rows, cols]` (arXiv 2509.25149): [`hadamard`] in blocks of
/// [`RANDOM_SIZE`], of elements that are first multiplied by [`RANDOM_SIGNS`]. The columns are filled up with zeros to
/// whole blocks: `[rows, cols of whole blocks]`.
///
/// # Panics
///
/// When `x` does not have as many elements as `shape`.
pub fn random_hadamard(x: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "random_hadamard: elements of x");
    let block = RANDOM_SIZE.block();
    let whole = cols.next_multiple_of(block);
    let signed = (0..rows * whole).map(|index| match (index / whole, index % whole) {
        (row, col) if col < cols => x[row * cols + col] * RANDOM_SIGNS[col % block],
        (_, _) => 0.0,
    });
    let signed: Vec<f32> = signed.collect();
    let transform = HadamardTransform::of_columns(RANDOM_SIZE);
    hadamard(&signed, [rows, whole], transform)
}
