//! The logarithm of the softmax of rows and its gradient, against the formulas in f64.

use cubecl_kernels::{
    KernelError,
    log_softmax::{log_softmax, log_softmax_backward},
    shape::MatrixShape,
};
use half::f16;

use crate::{
    device::{
        Memory, client, drawn, dtype, float_types, read, read_float, rounded, upload, upload_i32,
        upload_matrix,
    },
    random::Random,
};

/// One column, odd and even widths, rows longer than a cube takes at once.
const SHAPES: [(usize, usize); 7] = [
    (5, 5),
    (17, 64),
    (40, 9),
    (3, 1),
    (4, 513),
    (2, 2050),
    (300, 256),
];

fn of_row(x: &[f32]) -> Vec<f64> {
    let wide = x.iter().copied().map(f64::from);
    let largest = wide.clone().fold(f64::MIN, f64::max);
    let sum: f64 = wide.clone().map(|x| (x - largest).exp()).sum();
    wide.map(|x| x - largest - sum.ln()).collect()
}

fn gradient_of_row(y: &[f32], grad: &[f32]) -> Vec<f64> {
    let sum: f64 = grad.iter().copied().map(f64::from).sum();
    let pairs = y.iter().zip(grad);
    pairs
        .map(|(&y, &g)| f64::from(g) - f64::from(y).exp() * sum)
        .collect()
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(a) - e).abs();
        assert!(
            error <= tolerance * largest,
            "{what}[{index}]: {a:e} instead of {e:e}"
        );
    }
}

#[test]
fn equal_the_formulas() {
    let (client, mut random) = (client(), Random::fresh());
    for float in drawn(&mut random, float_types(&client), 1) {
        for (rows, cols) in SHAPES {
            let shape = MatrixShape::new(rows, cols);
            for memory in [
                Memory::Contiguous,
                Memory::Transposed,
                Memory::Sliced,
                Memory::SlicedAligned,
            ] {
                let what = format!("{float:?}, {rows} x {cols}, {memory:?}");
                let mut draw = |spread: f32| -> Vec<f32> {
                    (0..rows * cols).map(|_| spread * random.normal()).collect()
                };
                let (x, grad) = (rounded(&draw(20.0), float), draw(1.0));
                let found = log_softmax(&client, &upload_matrix(&client, &x, shape, float, memory));
                let y = read::<f32>(&client, &found.expect("a matrix of floats"));
                let expected: Vec<f64> = x.chunks(cols).flat_map(of_row).collect();
                assert_close(&y, &expected, 1e-6, &what);

                let [y_tensor, grad_tensor] = [&y, &grad]
                    .map(|values| upload_matrix(&client, values, shape, dtype::<f32>(), memory));
                let found = log_softmax_backward(&client, &y_tensor, &grad_tensor, float);
                let of_x = read_float(&client, &found.expect("tensors of one shape"));
                let rows = y.chunks(cols).zip(grad.chunks(cols));
                let expected: Vec<f64> = rows
                    .flat_map(|(y, grad)| gradient_of_row(y, grad))
                    .collect();
                let tolerance = match float {
                    _ if float == dtype::<f32>() => 3e-6,
                    _ if float == dtype::<f16>() => 6e-4,
                    _ => 5e-3,
                };
                assert_close(&of_x, &expected, tolerance, &format!("gradient, {what}"));
            }
        }
    }
}

#[test]
fn far_from_zero_nothing_is_lost() {
    let client = client();
    let x = [3e38f32, 3e38, -3e38, 0.0];
    let found = log_softmax(&client, &upload(&client, &x, &[1, 4], dtype::<f32>()));
    let y = read::<f32>(&client, &found.expect("a matrix"));
    let half = -std::f32::consts::LN_2;
    assert!(
        (y[0] - half).abs() < 1e-6 && (y[1] - half).abs() < 1e-6,
        "{y:?}"
    );
    assert!(y[2] < -3e38 && y[3] < -2e38, "{y:?}");
}

#[test]
fn what_is_not_finite_is_seen() {
    let client = client();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let x = [
        [nan, 0.0, 1.0],
        [inf, 0.0, 1.0],
        [-inf, -inf, -inf],
        [-inf, 2.0, 2.0],
    ];
    let found = log_softmax(
        &client,
        &upload(&client, x.as_flattened(), &[4, 3], dtype::<f32>()),
    );
    let y = read::<f32>(&client, &found.expect("a matrix"));
    assert!(y[..9].iter().all(|it| it.is_nan()), "{y:?}");
    assert_eq!(y[9], -inf);
    let grad = upload(&client, &[1.0; 12], &[4, 3], dtype::<f32>());
    let y = upload(&client, &y, &[4, 3], dtype::<f32>());
    let of_x = log_softmax_backward(&client, &y, &grad, dtype::<f32>()).expect("matrices");
    let of_x = read::<f32>(&client, &of_x);
    assert!(of_x[..9].iter().all(|it| it.is_nan()), "{of_x:?}");
    assert_eq!(of_x[9], 1.0);
}

#[test]
fn empty_matrices_stay_empty_and_others_are_refused() {
    let client = client();
    for shape in [[0, 4], [4, 0]] {
        let none = upload(&client, &[], &shape, dtype::<f32>());
        assert_eq!(
            log_softmax(&client, &none).expect("a matrix").shape()[..],
            shape
        );
        let of_x = log_softmax_backward(&client, &none, &none, dtype::<f32>());
        assert_eq!(of_x.expect("matrices").shape()[..], shape);
    }
    let two = upload(&client, &[1.0; 4], &[2, 2], dtype::<f32>());
    let wide = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
    let cube = upload(&client, &[1.0; 8], &[2, 2, 2], dtype::<f32>());
    let integers = upload_i32(&client, &[1; 4], &[2, 2]);
    let refused = |x| log_softmax(&client, x).expect_err("bad input");
    assert!(matches!(refused(&cube), KernelError::Shape { .. }));
    assert!(matches!(refused(&integers), KernelError::Dtype { .. }));
    let refused =
        |y, grad, float| log_softmax_backward(&client, y, grad, float).expect_err("bad input");
    let float = dtype::<f32>();
    assert!(matches!(
        refused(&two, &wide, float),
        KernelError::Shape { .. }
    ));
    assert!(matches!(
        refused(&two, &integers, float),
        KernelError::Dtype { .. }
    ));
    assert!(matches!(
        refused(&two, &two, dtype::<i32>()),
        KernelError::Dtype { .. }
    ));
}
