//! Rotary positions and their gradient, against the composition in f64, by any matrix and any table.

use cubecl_kernels::{
    KernelError,
    rotary::{RotaryPass, rotary},
};
use half::f16;
use rstest::rstest;

use crate::{
    device::{
        Tensor, assert_same_floats, client, drawn, dtype, float_types, read_float, rounded, upload,
    },
    random::Random,
};

/// What becomes of a pair in Burn's module.
const TURN: [f32; 8] = [1.0, 0.0, 0.0, 1.0, 0.0, -1.0, 1.0, 0.0];

/// Batch, heads, positions, features: vectors of 8, 4 and 2 elements, one position, more heads than a unit takes.
const SHAPES: [[usize; 4]; 6] = [
    [2, 3, 5, 8],
    [1, 2, 70, 6],
    [3, 7, 1, 64],
    [1, 1, 33, 2],
    [2, 20, 9, 12],
    [1, 9, 260, 16],
];

/// The pass on pairs of a row at a position.
fn of_row(x: &[f32], turn: &[f32], table: &[f32], pass: RotaryPass) -> Vec<f64> {
    let wide = |x: f32| f64::from(x);
    let pairs = x.chunks(2).zip(table.chunks(4));
    let turned = pairs.map(|(x, factors)| {
        let [x, next] = [wide(x[0]), wide(x[1])];
        let t = |k: usize| wide(turn[k]);
        let f = |k: usize| wide(factors[k]);
        match pass {
            RotaryPass::Forward => {
                let spread = [0, 1, 2, 3].map(|k| x * t(k) + next * t(4 + k));
                [
                    spread[0] * f(0) + spread[1] * f(1),
                    spread[2] * f(2) + spread[3] * f(3),
                ]
            }
            RotaryPass::Backward => {
                let spread = [x * f(0), x * f(1), next * f(2), next * f(3)];
                let back = |row: usize| (0..4).map(|k| spread[k] * t(4 * row + k)).sum::<f64>();
                [back(0), back(1)]
            }
        }
    });
    turned.flatten().collect()
}

/// The heads as they lie in the rows of a linear layer, `[batch, positions, heads, features]`.
fn in_rows(x: &[f32], [batch, heads, positions, features]: [usize; 4]) -> Vec<f32> {
    let mut rows = Vec::with_capacity(x.len());
    for matrix in 0..batch {
        for position in 0..positions {
            for head in 0..heads {
                let start = ((matrix * heads + head) * positions + position) * features;
                rows.extend_from_slice(&x[start..start + features]);
            }
        }
    }
    rows
}

#[rstest]
fn equal_the_composition(
    #[values(RotaryPass::Forward, RotaryPass::Backward)] pass: RotaryPass,
    #[values(false, true)] slices: bool,
    #[values(false, true)] burns: bool,
) {
    let (client, mut random) = (client(), Random::fresh());
    for float in drawn(&mut random, float_types(&client), 1) {
        for shape in SHAPES {
            let [batch, heads, positions, features] = shape;
            let mut draw =
                |count: usize| -> Vec<f32> { (0..count).map(|_| random.normal()).collect() };
            let x = rounded(&draw(shape.iter().product()), float);
            // Tables of FP32, or of the type of x, where that is the default of a device.
            let of_tables = if burns { dtype::<f32>() } else { float };
            let turn = if burns { TURN.to_vec() } else { draw(8) };
            let turn = rounded(&turn, of_tables);
            let table = rounded(&draw(2 * positions * features), of_tables);
            let rows = x.chunks(features).enumerate();
            let expected: Vec<f64> = rows
                .flat_map(|(row, x)| {
                    let of_row_table = &table[row % positions * 2 * features..][..2 * features];
                    of_row(x, &turn, of_row_table, pass)
                })
                .collect();
            let of_x = if slices {
                let shape = [batch, positions, heads, features];
                let mut x = upload(
                    &client,
                    &in_rows(&x, [batch, heads, positions, features]),
                    &shape,
                    float,
                );
                x.metadata.swap(1, 2);
                x
            } else {
                upload(&client, &x, &shape, float)
            };
            // As it is, and with rows and columns turned in memory.
            let of_turn = if slices {
                let columns: Vec<f32> = (0..TURN.len())
                    .map(|at| turn[at % 2 * 4 + at / 2])
                    .collect();
                let mut of_turn = upload(&client, &columns, &[1, 1, 4, 2], of_tables);
                of_turn.metadata.swap(2, 3);
                of_turn
            } else {
                upload(&client, &turn, &[1, 1, 2, 4], of_tables)
            };
            let of_table = upload(&client, &table, &[1, positions, features, 2], of_tables);
            let mut out = rotary(&client, &of_x, &of_turn, &of_table, pass).expect("pairs");
            assert_eq!(out.shape()[..], shape);
            let expected: Vec<f32> = expected.into_iter().map(|it| it as f32).collect();
            // The gradient of heads lies as the rows of a linear layer do.
            let expected = match pass {
                RotaryPass::Forward => expected,
                RotaryPass::Backward => {
                    out.metadata.swap(1, 2);
                    in_rows(&expected, shape)
                }
            };
            let found = read_float(&client, &out);
            let bound = if float == dtype::<f32>() { 1e-5 } else { 1e-2 };
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = (found - expected).abs();
                assert!(
                    error <= bound * (1.0 + expected.abs()),
                    "{shape:?}, {float}, {pass:?}: {found} instead of {expected} at {index}"
                );
            }
        }
    }
}

/// Of three dimensions the heads are missing, of two the batch too.
#[test]
fn fewer_dimensions_are_one_head() {
    let (client, mut random) = (client(), Random::fresh());
    let x: Vec<f32> = (0..3 * 5 * 8).map(|_| random.normal()).collect();
    let table: Vec<f32> = (0..2 * 5 * 8).map(|_| random.normal()).collect();
    let turn = upload(&client, &TURN, &[2, 4], dtype::<f32>());
    let table = upload(&client, &table, &[5, 8, 2], dtype::<f32>());
    let of = |x: &[f32], shape: &[usize]| -> Tensor {
        let x = upload(&client, x, shape, dtype::<f32>());
        rotary(&client, &x, &turn, &table, RotaryPass::Forward).expect("pairs")
    };
    let all = read_float(&client, &of(&x, &[3, 1, 5, 8]));
    assert_same_floats(
        &read_float(&client, &of(&x, &[3, 5, 8])),
        &all,
        "three dimensions",
    );
    assert_same_floats(
        &read_float(&client, &of(&x[..40], &[5, 8])),
        &all[..40],
        "two",
    );
    assert_eq!(of(&[], &[0, 2, 5, 8]).shape()[..], [0, 2, 5, 8]);
}

/// NaN and infinities are seen in their pairs alone.
#[test]
fn what_is_not_finite_stays_in_its_pair() {
    let client = client();
    let mut x = vec![1.0; 4 * 8];
    (x[3], x[20]) = (f32::NAN, f32::INFINITY);
    let turn = upload(&client, &TURN, &[2, 4], dtype::<f32>());
    let table = upload(&client, &[0.6; 2 * 4 * 8], &[4, 8, 2], dtype::<f32>());
    let x = upload(&client, &x, &[4, 8], dtype::<f32>());
    for pass in [RotaryPass::Forward, RotaryPass::Backward] {
        let out = rotary(&client, &x, &turn, &table, pass).expect("pairs");
        for (index, value) in read_float(&client, &out).iter().enumerate() {
            let is_lost = [2, 3, 20, 21].contains(&index);
            assert_eq!(!value.is_finite(), is_lost, "{value} at {index}");
        }
    }
}

#[test]
fn other_shapes_and_types_are_refused() {
    let client = client();
    let of = |shape: &[usize]| {
        let zeros = vec![0.0; shape.iter().product()];
        upload(&client, &zeros, shape, dtype::<f32>())
    };
    let (x, turn, table) = (of(&[2, 5, 8]), of(&[2, 4]), of(&[5, 8, 2]));
    let run = |x: &Tensor, turn: &Tensor, table: &Tensor| {
        rotary(&client, x, turn, table, RotaryPass::Forward).expect_err("refused")
    };
    for (x, turn, table) in [
        (&of(&[2, 5, 7]), &turn, &of(&[5, 7, 2])),
        (&x, &of(&[2, 2]), &table),
        (&x, &of(&[4, 2]), &table),
        (&x, &of(&[8]), &table),
        (&x, &of(&[2, 1, 4]), &table),
        (&x, &turn, &of(&[4, 8, 2])),
        (&of(&[8]), &turn, &table),
        (&of(&[1, 1, 2, 5, 8]), &turn, &table),
    ] {
        let error = run(x, turn, table);
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }
    let half = upload(&client, &[0.0; 8], &[2, 4], dtype::<f16>());
    let error = run(&x, &half, &table);
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    // Rows at odd places.
    let mut odd = of(&[2, 5, 9]);
    odd.metadata.shape_mut()[2] = 8;
    let error = run(&odd, &turn, &table);
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}
