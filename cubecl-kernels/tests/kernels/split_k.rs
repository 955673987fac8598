//! Sums of parts of K added up, against sums on the host: in ascending order, to the bit.

use cubecl_kernels::{KernelError, gemm::add_parts};
use rstest::rstest;

use crate::{
    device::{assert_same_floats, client, drawn, dtype, float_types, read_float, rounded, upload},
    random::Random,
};

/// Two batches, so that parts of one matrix do not run into the next; rows that are read four at once, and others.
#[rstest]
#[case([1, 2, 8, 12])]
#[case([2, 3, 5, 7])]
#[case([3, 16, 1, 64])]
#[case([2, 1, 33, 130])]
#[case([1, 5, 257, 1])]
fn parts_are_added_in_order(#[case] shape: [usize; 4]) {
    let (client, mut random) = (client(), Random::fresh());
    let [batch, parts, m, n] = shape;
    let mut x = random.with_outliers(batch * parts * m * n);
    x[0] = f32::NAN;
    x[m * n * parts - 1] = f32::INFINITY;
    let bias: Vec<f32> = (0..n).map(|_| random.normal()).collect();
    let at = |index: usize| {
        let (matrix, place) = (index / (m * n), index % (m * n));
        let terms = (0..parts).map(|part| x[(matrix * parts + part) * m * n + place]);
        terms.reduce(|sum, term| sum + term).expect("a part")
    };
    let sums: Vec<f32> = (0..batch * m * n).map(at).collect();
    let with_bias: Vec<f32> = sums
        .iter()
        .enumerate()
        .map(|(i, it)| it + bias[i % n])
        .collect();
    let of_x = upload(&client, &x, &shape, dtype::<f32>());
    let of_bias = upload(&client, &bias, &[n], dtype::<f32>());
    for float in drawn(&mut random, float_types(&client), 1) {
        for (bias, expected) in [(None, &sums), (Some(&of_bias), &with_bias)] {
            let out = add_parts(&client, &of_x, bias, float).expect("parts");
            assert_eq!(out.shape()[..], [batch, m, n]);
            let what = format!("{shape:?} to {float}, bias {}", bias.is_some());
            assert_same_floats(&read_float(&client, &out), &rounded(expected, float), &what);
        }
    }
}

#[test]
fn nothing_gives_nothing_and_what_has_no_parts_is_refused() {
    let client = client();
    let of = |shape: &[usize]| {
        let x = vec![0.0; shape.iter().product()];
        add_parts(
            &client,
            &upload(&client, &x, shape, dtype::<f32>()),
            None,
            dtype::<f32>(),
        )
    };
    assert_eq!(of(&[2, 0, 3]).expect("no rows").shape()[..], [0, 3]);
    for shape in [&[4, 4][..], &[0, 4, 4]] {
        let error = of(shape).expect_err("no parts");
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }
}
