//! The softmax of attention scores and its gradient, against the formulas in f64.

use cubecl_kernels::{
    KernelError,
    shape::MatrixShape,
    softmax::{AttentionScores, softmax, softmax_backward},
};

use crate::{
    device::{
        Memory, client, drawn, dtype, float_types, read_float, rounded, upload, upload_i32,
        upload_matrix,
    },
    random::Random,
};

/// Shapes with more queries than keys, fewer, one key, odd and even widths, rows longer than a cube takes at once.
const SHAPES: [(usize, usize, usize); 7] = [
    (1, 5, 5),
    (3, 17, 64),
    (2, 40, 9),
    (1, 3, 1),
    (2, 4, 513),
    (1, 2, 2048),
    (4, 128, 128),
];

/// Probabilities, and the gradient of the scores, of one row that sees `visible` keys.
fn row(scores: &[f32], grad: &[f32], scale: f32, visible: usize) -> (Vec<f64>, Vec<f64>) {
    let z: Vec<f64> = scores[..visible]
        .iter()
        .map(|&x| f64::from(x) * f64::from(scale))
        .collect();
    let largest = z.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = z.iter().map(|z| (z - largest).exp()).collect();
    let sum: f64 = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let mut p: Vec<f64> = weights.iter().map(|weight| weight / sum).collect();
    let mean: f64 = p.iter().zip(grad).map(|(p, &g)| p * f64::from(g)).sum();
    let mut d: Vec<f64> = p
        .iter()
        .zip(grad)
        .map(|(p, &g)| p * (f64::from(g) - mean) * f64::from(scale))
        .collect();
    p.resize(scores.len(), 0.0);
    d.resize(scores.len(), 0.0);
    (p, d)
}

fn visible(shape: MatrixShape, row: usize, causal: bool) -> usize {
    match causal {
        true => (row + 1 + shape.cols)
            .saturating_sub(shape.rows)
            .min(shape.cols),
        false => shape.cols,
    }
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f64], relative: f64, absolute: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(a) - e).abs();
        assert!(
            error <= relative * e.abs() + absolute || (a.is_nan() && e.is_nan()),
            "{what}[{index}]: {a:e} instead of {e:e}"
        );
    }
}

#[test]
fn equal_the_formulas() {
    let client = client();
    let mut random = Random::fresh();
    for float in drawn(&mut random, float_types(&client), 1) {
        // Half a unit in the last place of the type, beside the error of the exponential.
        let relative = match float {
            _ if float == dtype::<f32>() => 3e-5,
            _ if float == dtype::<half::f16>() => 6e-4,
            _ => 5e-3,
        };
        for (batch, rows, cols) in SHAPES {
            let shape = MatrixShape::batched(batch, rows, cols);
            for (causal, memory) in [
                (false, Memory::Contiguous),
                (true, Memory::Contiguous),
                (true, Memory::Transposed),
                (false, Memory::Sliced),
            ] {
                let mut draw = |spread: f32| {
                    let x: Vec<f32> = (0..shape.num_elements())
                        .map(|_| spread * random.normal())
                        .collect();
                    rounded(&x, float)
                };
                let (scores, grad) = (draw(20.0), draw(1.0));
                let attention = AttentionScores {
                    scale: 0.125,
                    causal,
                };
                let on_device = |x: &[f32]| upload_matrix(&client, x, shape, float, memory);
                let scores_tensor = on_device(&scores);
                let p = softmax(&client, &scores_tensor, attention).expect("scores");
                let (again, d) =
                    softmax_backward(&client, &scores_tensor, &on_device(&grad), attention)
                        .expect("scores and their gradient");
                let (mut p_expected, mut d_expected) = (Vec::new(), Vec::new());
                for (index, (scores, grad)) in
                    scores.chunks(cols).zip(grad.chunks(cols)).enumerate()
                {
                    let visible = visible(shape, index % rows, causal);
                    let (p, d) = row(scores, grad, attention.scale, visible);
                    p_expected.extend(p);
                    d_expected.extend(d);
                }
                let what = format!("{float} {shape:?} causal {causal} {memory:?}");
                let p = read_float(&client, &p);
                // f16 has no smaller normal number.
                assert_close(&p, &p_expected, relative, 1e-7, &what);
                assert_eq!(p, read_float(&client, &again), "{what}: computed again");
                // The difference of gradient and mean may cancel: its error is one of the gradient's size.
                let d = read_float(&client, &d);
                assert_close(&d, &d_expected, relative, 2e-6, &what);
            }
        }
    }
}

#[test]
fn rows_without_a_visible_score_are_zero_and_nan_is_kept() {
    let client = client();
    let infinity = f32::INFINITY;
    #[rustfmt::skip]
    let scores = [
        -infinity, -infinity, -infinity, -infinity,
        1.0, f32::NAN, 2.0, 3.0,
        1.0, infinity, 2.0, 3.0,
        -infinity, 0.0, -infinity, -infinity,
        3e38, -3e38, 3e38, 0.0,
    ];
    let tensor = upload(&client, &scores, &[5, 4], dtype::<f32>());
    let attention = AttentionScores {
        scale: 1.0,
        causal: false,
    };
    let p = read_float(
        &client,
        &softmax(&client, &tensor, attention).expect("scores"),
    );
    assert_eq!(p[..4], [0.0; 4]);
    assert!(p[4..12].iter().all(|p| p.is_nan()), "{p:?}");
    assert_eq!(p[12..16], [0.0, 1.0, 0.0, 0.0]);
    assert_eq!(p[16..], [0.5, 0.0, 0.5, 0.0]);

    // Numbers behind the causal mask do not count, in the scores or in the gradient.
    let hidden = [1.0, f32::NAN, infinity, 1.0];
    let attention = AttentionScores {
        scale: 1.0,
        causal: true,
    };
    let scores = upload(&client, &hidden, &[2, 2], dtype::<f32>());
    let grad = upload(&client, &[1.0, f32::NAN, 2.0, 2.0], &[2, 2], dtype::<f32>());
    let (p, d) = softmax_backward(&client, &scores, &grad, attention).expect("scores");
    assert_eq!(read_float(&client, &p)[..2], [1.0, 0.0]);
    assert_eq!(read_float(&client, &d)[..2], [0.0, 0.0]);
    assert!(read_float(&client, &d)[2..].iter().all(|d| d.is_nan()));

    // A row of NaN is NaN behind the mask too, however far.
    let mut scores = vec![1.0; 40 * 40];
    scores[0] = f32::NAN;
    let scores = upload(&client, &scores, &[40, 40], dtype::<f32>());
    let p = softmax(&client, &scores, attention).expect("scores");
    let p = read_float(&client, &p);
    assert!(p[..40].iter().all(|p| p.is_nan()), "{p:?}");
    assert_eq!(p[40..80], [vec![0.5; 2], vec![0.0; 38]].concat());
}

#[test]
fn empty_scores_and_bad_inputs() {
    let client = client();
    let attention = AttentionScores {
        scale: 1.0,
        causal: true,
    };
    let none = upload(&client, &[], &[3, 0, 4], dtype::<f32>());
    assert_eq!(
        softmax(&client, &none, attention).expect("nothing").shape()[..],
        [3, 0, 4]
    );
    let integers = upload_i32(&client, &[1; 4], &[2, 2]);
    let error = softmax(&client, &integers, attention).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let vector = upload(&client, &[1.0; 4], &[4], dtype::<f32>());
    let error = softmax(&client, &vector, attention).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let scores = upload(&client, &[1.0; 4], &[2, 2], dtype::<f32>());
    let grad = upload(&client, &[1.0; 4], &[1, 4], dtype::<f32>());
    let error = softmax_backward(&client, &scores, &grad, attention).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
}
