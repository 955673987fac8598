//! A tensor less a mean of its rows, against the difference in f64.

use cubecl_kernels::{
    KernelError,
    centred::{centred, centred_compressing},
};

use crate::{
    copies::{assert_is_copy, bits, cases, special},
    device::{Tensor, client, drawn, dtype, float_types, read_float, rounded, upload},
    random::Random,
};

/// Vectors of every width, rows that a cube takes whole and not, fewer and more rows than it takes at a time, and none.
const SHAPES: [[usize; 3]; 8] = [
    [3, 40, 64],
    [2, 300, 128],
    [1, 33, 768],
    [2, 5, 7],
    [4, 1, 20],
    [1, 530, 96],
    [0, 5, 8],
    [2, 0, 8],
];

#[test]
fn is_the_difference() {
    let (client, mut random) = (client(), Random::fresh());
    for float in drawn(&mut random, float_types(&client), 1) {
        for shape in SHAPES {
            let [matrices, rows, cols] = shape;
            let step = 1 + random.index(rows.max(1) + 2);
            // What all rows have in common is far larger than what they differ by.
            let x: Vec<f32> = (0..matrices * rows * cols)
                .map(|at| 20.0 * (at % cols % 5) as f32 + random.normal())
                .collect();
            let x = rounded(&x, float);
            let at = |matrix: usize, row: usize, col: usize| {
                f64::from(x[(matrix * rows + row) * cols + col])
            };
            let out =
                centred(&client, &upload(&client, &x, &shape, float), step).expect("matrices");
            assert_eq!(out.shape()[..], shape);
            let found = read_float(&client, &out);
            let sampled = || (0..rows).step_by(step);
            // Beside what all rows have in common, which the mean's rounding is of.
            let bound = if float == dtype::<f32>() { 1e-6 } else { 1e-3 };
            for (index, found) in found.iter().enumerate() {
                let (matrix, row, col) = (index / cols / rows, index / cols % rows, index % cols);
                let mean = sampled().map(|row| at(matrix, row, col)).sum::<f64>();
                let expected = at(matrix, row, col) - mean / sampled().count() as f64;
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error <= bound * (80.0 + 10.0 * expected.abs()),
                    "{shape:?}, {float}, step {step}: {found} instead of {expected} at {index}"
                );
            }
        }
    }
}

/// Rows that are groups, groups of several rows, and of several matrices, and codes that are no whole words.
#[test]
fn copies_are_those_of_the_quantizer() {
    let (client, mut random) = (client(), Random::fresh());
    let shapes = [
        (128, ([6, 44, 64], 44 * 64)),
        (128, ([2, 300, 128], 128)),
        (32, ([1, 33, 768], 768)),
        (16, ([3, 70, 16], 16)),
        (64, ([2, 16, 12], 192)),
        (256, ([1, 8, 96], 768)),
        (16, ([0, 5, 16], 16)),
        (128, ([2, 3, 64], 384)),
        (128, ([16, 4, 16], 128)),
        (1024, ([64, 8, 64], 4096)),
    ];
    for (float, spec, (shape, cols)) in cases(&client, &mut random, &shapes) {
        let [matrices, rows, width] = shape;
        let x = special(&client, &mut random, [matrices * rows, width], float);
        let x = Tensor::new_contiguous(shape.to_vec(), x.handle, float);
        let step = 1 + random.index(rows);
        let (out, copy) =
            centred_compressing(&client, &x, step, &spec, cols).expect("whole groups");
        let what = format!("{spec:?}, {float} {shape:?}, step {step}");
        let expected = centred(&client, &x, step).expect("matrices");
        assert_eq!(bits(&client, &out), bits(&client, &expected), "{what}");
        assert_is_copy(&client, &copy, &out, &spec, cols, &what);
    }
}

/// What is not finite in a row that is read leaves nothing finite in its column, in another row itself.
#[test]
fn what_is_not_finite_is_seen() {
    let client = client();
    let mut x = vec![1.0; 4 * 8];
    (x[3], x[8 + 5], x[16 + 6]) = (f32::NAN, f32::NAN, f32::INFINITY);
    let out = centred(&client, &upload(&client, &x, &[1, 4, 8], dtype::<f32>()), 2).expect("rows");
    for (index, value) in read_float(&client, &out).iter().enumerate() {
        let (row, col) = (index / 8, index % 8);
        let is_lost = [3, 6].contains(&col) || (row, col) == (1, 5);
        assert_eq!(!value.is_finite(), is_lost, "{value} at {index}");
    }
}

#[test]
fn other_shapes_are_refused() {
    let client = client();
    let of = |shape: &[usize]| {
        let zeros = vec![0.0; shape.iter().product()];
        upload(&client, &zeros, shape, dtype::<f32>())
    };
    for (x, step) in [
        (of(&[5, 8]), 1),
        (of(&[1, 2, 5, 8]), 1),
        (of(&[2, 5, 8]), 0),
    ] {
        let error = centred(&client, &x, step).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }
}
