//! The Hadamard transform of the reference against its definition.

use cubecl_kernels::{
    KernelError,
    hadamard::{HadamardSize, HadamardTransform},
    reference::{
        self,
        hadamard::{hadamard, random_hadamard},
    },
    shape::MatrixShape,
};

use crate::random::Random;

/// `H_k` from its recursive definition, row-major.
fn matrix(order: u32) -> Vec<Vec<f64>> {
    if order == 0 {
        return vec![vec![1.0]];
    }
    let half = matrix(order - 1);
    let joined = |row: &[f64], sign: f64| -> Vec<f64> {
        let scaled = |sign: f64| row.iter().map(move |x| sign * x / 2f64.sqrt());
        scaled(1.0).chain(scaled(sign)).collect()
    };
    let upper = half.iter().map(|row| joined(row, 1.0));
    let lower = half.iter().map(|row| joined(row, -1.0));
    upper.chain(lower).collect()
}

/// A product of rows of two matrices is that of their random transforms, also where the last block is not whole.
#[test]
fn random_transforms_cancel_in_products() {
    let mut random = Random::fresh();
    for cols in [1, 15, 16, 17, 40, 64] {
        let [a, b] =
            [0; 2].map(|_| -> Vec<f32> { (0..2 * cols).map(|_| random.normal()).collect() });
        let products = |a: &[f32], b: &[f32]| -> Vec<f64> {
            let cols = a.len() / 2;
            let rows = a
                .chunks(cols)
                .flat_map(|a| b.chunks(cols).map(move |b| (a, b)));
            let terms = |(a, b): (&[f32], &[f32])| {
                let pairs = a.iter().zip(b);
                pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            rows.map(terms).collect()
        };
        let [of_a, of_b] = [&a, &b].map(|x| random_hadamard(x, [2, cols]));
        assert_eq!(of_a.len(), 2 * cols.next_multiple_of(16));
        for (plain, rotated) in products(&a, &b).iter().zip(products(&of_a, &of_b)) {
            assert!(
                (plain - rotated).abs() < 1e-4,
                "{cols}: {plain} and {rotated}"
            );
        }
        // An outlier comes to all elements of its block alike.
        let mut outlier = vec![0.0; 2 * cols];
        outlier[cols - 1] = 8.0;
        let spread = random_hadamard(&outlier, [2, cols]);
        let (last, other) = spread.split_at(spread.len() / 2);
        assert!(other.iter().all(|x| *x == 0.0));
        assert!(last[last.len() - 16..].iter().all(|x| x.abs() == 2.0));
    }
}

/// The largest difference of two slices.
fn distance(a: &[f32], b: impl Iterator<Item = f64>) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max)
}

#[test]
fn is_the_product_with_the_matrix_of_the_definition() {
    let mut random = Random::fresh();
    for size in HadamardSize::all() {
        let (rows, block) = (3, size.block());
        let cols = 2 * block;
        let x: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
        let h = matrix(size.order());
        let expected = (0..rows * cols).map(|index| {
            let (row, col) = (index / cols, index % cols);
            let start = row * cols + col / block * block;
            (0..block)
                .map(|i| f64::from(x[start + i]) * h[i][col % block])
                .sum()
        });
        let got = hadamard(&x, [rows, cols], HadamardTransform::of_columns(size));
        let distance = distance(&got, expected);
        assert!(distance < 1e-5, "{size:?}: {distance}");
    }
}

#[test]
fn along_rows_is_along_the_columns_of_the_transposed_matrix() {
    let mut random = Random::fresh();
    for size in HadamardSize::all() {
        let shape = MatrixShape::new(2 * size.block(), 5);
        let x = random.with_outliers(shape.num_elements());
        let by_rows = hadamard(
            &x,
            [shape.rows, shape.cols],
            HadamardTransform::of_rows(size),
        );
        let by_columns = hadamard(
            &reference::transpose(&x, shape),
            [shape.cols, shape.rows],
            HadamardTransform::of_columns(size),
        );
        assert_eq!(
            by_rows,
            reference::transpose(&by_columns, shape.transposed()),
            "{size:?}"
        );
    }
}

#[test]
fn is_its_own_inverse() {
    let mut random = Random::fresh();
    for size in HadamardSize::all() {
        let shape = [4, 256];
        let x: Vec<f32> = (0..4 * 256).map(|_| random.normal()).collect();
        let transform = HadamardTransform::of_columns(size);
        let back = hadamard(&hadamard(&x, shape, transform), shape, transform);
        let distance = distance(&back, x.iter().map(|&x| f64::from(x)));
        assert!(distance < 1e-5, "{size:?}: {distance}");
    }
}

#[test]
fn an_outlier_becomes_flat() {
    let mut random = Random::fresh();
    for size in HadamardSize::all() {
        let cols = size.block() * 3;
        let mut x = vec![0.0; cols];
        let at = random.index(cols);
        x[at] = 64.0;
        let got = hadamard(&x, [1, cols], HadamardTransform::of_columns(size));
        for (col, value) in got.iter().enumerate() {
            let in_block = col / size.block() == at / size.block();
            let expected = if in_block { 64.0 * size.factor() } else { 0.0 };
            assert_eq!(value.abs(), expected, "{size:?}: column {col}");
        }
    }
}

/// `(X H)(W H)^T = X W^T`.
#[test]
fn transforms_cancel_in_a_product() {
    let mut random = Random::fresh();
    let (rows, cols, depth) = (5, 7, 256);
    let x = random.with_outliers(rows * depth);
    let w: Vec<f32> = (0..cols * depth).map(|_| random.normal()).collect();
    let product = |x: &[f32], w: &[f32]| -> Vec<f64> {
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(x * w)).sum();
        x.chunks(depth)
            .flat_map(|x| w.chunks(depth).map(move |w| dot(x, w)))
            .collect()
    };
    let expected = product(&x, &w);
    for size in HadamardSize::all() {
        let transform = HadamardTransform::of_columns(size);
        let got = product(
            &hadamard(&x, [rows, depth], transform),
            &hadamard(&w, [cols, depth], transform),
        );
        // In proportion to what is added up.
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (row, col) = (index / cols, index % cols);
            let scale = norm(&x[row * depth..][..depth]) * norm(&w[col * depth..][..depth]);
            let error = (got - expected).abs() / scale;
            assert!(error < 1e-6, "{size:?}: {got} instead of {expected}");
        }
    }
}

#[test]
fn factors_are_the_nearest() {
    for size in HadamardSize::all() {
        let exact = 2f64.powf(-f64::from(size.order()) / 2.0);
        assert_eq!(size.factor(), exact as f32, "{size:?}");
    }
}

#[test]
fn sizes_that_divide_a_dimension() {
    let size = |order| HadamardSize::new(order).expect("a k from 0 to 7");
    for (dim, at_most, expected) in [
        (768, 7, 7),
        (768, 5, 5),
        (1000, 7, 3),
        (17, 7, 0),
        (64, 7, 6),
        (0, 4, 4),
    ] {
        let largest = HadamardSize::largest(dim, size(at_most));
        assert_eq!(largest, size(expected), "{dim}");
    }
    assert_eq!(HadamardSize::all().count(), 8);
    assert_eq!(HadamardSize::all().last(), Some(HadamardSize::LARGEST));
    let error = HadamardSize::new(8).expect_err("a k above 7");
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}
