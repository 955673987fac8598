//! Sums of columns, against sums in FP64.

use cubecl_kernels::{KernelError, column_sum::column_sum};
use half::f16;

use crate::{
    device::{client, dtype, read_float, upload},
    random::Random,
};

const SHAPES: [[usize; 2]; 7] = [
    [1, 1],
    [2, 33],
    [7, 129],
    [64, 32],
    [65, 31],
    [256, 770],
    [2049, 3],
];

#[test]
fn the_sums_are_those_of_fp64() {
    let (client, mut random) = (client(), Random::fresh());
    for [rows, cols] in SHAPES {
        let x: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
        let tensor = upload(&client, &x, &[rows, cols], dtype::<f32>());
        let sums = column_sum(&client, &tensor).expect("a matrix");
        assert_eq!(sums.shape()[..], [1, cols]);
        let found = read_float(&client, &sums);
        for (col, found) in found.iter().enumerate() {
            let of_col = || x[col..].iter().step_by(cols).map(|&it| f64::from(it));
            let (expected, size): (f64, f64) = (of_col().sum(), of_col().map(f64::abs).sum());
            // At most as many roundings as rows, each of less than the sum of magnitudes.
            let bound = size * rows as f64 * f64::from(f32::EPSILON) / 2.0;
            let error = (f64::from(*found) - expected).abs();
            assert!(
                error <= bound,
                "{rows} x {cols}, column {col}: {found} for {expected}"
            );
        }
        let again = column_sum(&client, &tensor).expect("a matrix");
        let bits =
            |values: Vec<f32>| -> Vec<u32> { values.into_iter().map(f32::to_bits).collect() };
        assert_eq!(bits(read_float(&client, &again)), bits(found));
    }
}

#[test]
fn nan_and_infinity_stay_in_their_columns() {
    let client = client();
    let mut x = vec![1.0; 40 * 40];
    (x[3 * 40 + 5], x[39 * 40 + 6]) = (f32::NAN, f32::NEG_INFINITY);
    let tensor = upload(&client, &x, &[40, 40], dtype::<f32>());
    let sums = column_sum(&client, &tensor).expect("a matrix");
    let sums = read_float(&client, &sums);
    assert!(sums[5].is_nan());
    assert_eq!(sums[6], f32::NEG_INFINITY);
    let others = [&sums[..5], &sums[7..]].concat();
    assert!(others.iter().all(|&sum| sum == 40.0), "{others:?}");
}

#[test]
fn no_rows_have_sums_of_zero_and_others_are_refused() {
    let client = client();
    let of = |shape: &[usize]| {
        let values = vec![1.0; shape.iter().product()];
        column_sum(&client, &upload(&client, &values, shape, dtype::<f32>()))
    };
    let sums = of(&[0, 3]).expect("a matrix");
    assert_eq!(read_float(&client, &sums), [0.0; 3]);
    assert_eq!(of(&[3, 0]).expect("a matrix").shape()[..], [1, 0]);
    assert!(matches!(of(&[4]), Err(KernelError::Shape { .. })));
    assert!(matches!(of(&[2, 2, 2]), Err(KernelError::Shape { .. })));
    let narrow = upload(&client, &[1.0; 4], &[2, 2], dtype::<f16>());
    let mut turned = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
    turned.metadata.swap(0, 1);
    let refused = |tensor| column_sum(&client, &tensor).expect_err("bad input");
    assert!(matches!(refused(narrow), KernelError::Dtype { .. }));
    assert!(matches!(refused(turned), KernelError::Shape { .. }));
}
