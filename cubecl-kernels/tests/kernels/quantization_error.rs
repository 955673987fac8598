//! Sums and counts of quantization errors.

use cubecl_kernels::{host, quantization_error::unit, reference};

use crate::random::Random;

const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 17], [127, 129], [1, 40_003], [300, 516]];

/// Values of this magnitude, and what they become under a step that some of them are too small for.
fn example(random: &mut Random, count: usize, magnitude: f32) -> (Vec<f32>, Vec<f32>) {
    let x: Vec<f32> = (0..count).map(|_| random.normal() * magnitude).collect();
    let step = 0.1 * magnitude;
    let y = x
        .iter()
        .map(|x| (x / step).round().clamp(-20.0, 20.0) * step);
    let y = y.collect();
    (x, y)
}

fn absmax(x: &[f32]) -> f32 {
    reference::absmax(x.iter().copied())
}

#[track_caller]
fn assert_near(found: &[f32], expected: &[f64], what: &str) {
    for (&found, &expected) in found.iter().zip(expected) {
        let difference = (f64::from(found) - expected).abs();
        assert!(
            difference <= 1e-5 * expected.abs() + 1e-30,
            "{what}: {found:e} instead of {expected:e}"
        );
    }
}

#[test]
fn an_example_by_hand() {
    let (x, y) = ([4.0, -2.0, 0.25, 0.0, -8.0], [4.0, -1.0, 0.0, 0.0, -5.0]);
    // The unit of 8 is 1/8.
    let (sums, counts) = reference::quantization_error(&x, &y, 8.0, Some(7.5));
    let by_hand = [84.0625, 10.0625, 58.0, 42.0].map(|sum| sum / 64.0);
    assert_eq!(sums, by_hand);
    assert_eq!(counts, [1, 1]);
    let (_, counts) = reference::quantization_error(&x, &y, 8.0, None);
    assert_eq!(counts, [1, 0], "without a limit none saturates");
    let (_, counts) = reference::quantization_error(&x, &y, 8.0, Some(8.0f32.next_down()));
    assert_eq!(counts, [1, 0], "a rounded limit is no limit passed");
}

#[test]
fn units_bring_the_largest_magnitude_near_one() {
    for exponent in -125..=126 {
        let absmax = 1.5 * 2f32.powi(exponent);
        assert_eq!(absmax * unit(absmax), 1.5, "2^{exponent}");
    }
    for absmax in [0.0, 1e-40, f32::MAX, f32::INFINITY, f32::NAN] {
        assert!(
            unit(absmax).is_normal() && unit(absmax).recip().is_normal(),
            "{absmax}"
        );
    }
}

#[test]
fn the_host_sums_like_the_reference() {
    let mut random = Random::fresh();
    for [rows, cols] in SHAPES {
        let (x, y) = example(&mut random, rows * cols, 1e-30);
        let limit = Some(2e-30);
        let (expected, of_reference) = reference::quantization_error(&x, &y, absmax(&x), limit);
        let (sums, counts) = host::quantization_error(&x, &y, absmax(&x), limit);
        assert_near(&sums, &expected, &format!("{rows} x {cols}"));
        assert_eq!(counts, of_reference);
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        quantization_error::{COUNTS, SUMS, quantization_error},
        shape::MatrixShape,
    };
    use rstest::rstest;

    use super::*;
    use crate::device::{
        Memory, client, drawn, dtype, float_types, read, rounded, upload, upload_matrix,
    };

    /// Squares of the smallest and of the largest of these are no numbers of FP32.
    #[rstest]
    fn equals_the_reference(#[values(1e-30, 1e-3, 1.0, 1e25)] magnitude: f32) {
        let (client, mut random) = (client(), Random::fresh());
        let memories = [
            Memory::Contiguous,
            Memory::Transposed,
            Memory::Sliced,
            Memory::SlicedAligned,
        ];
        let mut memories = memories.into_iter().cycle();
        for float in drawn(&mut random, float_types(&client), 1) {
            for [rows, cols] in SHAPES {
                let shape = MatrixShape::new(rows, cols);
                let (x, y) = example(&mut random, rows * cols, magnitude);
                let x = rounded(&x, float);
                let (of_x, of_y) = (memories.next(), memories.next());
                let (of_x, of_y) = of_x.zip(of_y).expect("it goes round");
                let absmax = absmax(&x);
                if !absmax.is_finite() {
                    continue;
                }
                let on_x = upload_matrix(&client, &x, shape, float, of_x);
                let on_y = upload_matrix(&client, &y, shape, dtype::<f32>(), of_y);
                let scalar = |value| upload(&client, &[value], &[1], dtype::<f32>());
                for limit in [None, Some(1.7 * magnitude)] {
                    let on_limit = limit.map(scalar);
                    let found = quantization_error(
                        &client,
                        &on_x,
                        &on_y,
                        &scalar(absmax),
                        on_limit.as_ref(),
                    );
                    let found = found.expect("matrices of one shape");
                    let (sums, counts) = reference::quantization_error(&x, &y, absmax, limit);
                    let what = format!("{float} {shape:?} {of_x:?} {of_y:?} {limit:?}");
                    assert_near(&read::<f32>(&client, &found.sums), &sums, &what);
                    assert_eq!(read::<u32>(&client, &found.counts), counts, "{what}");
                    // The order of the sums is fixed.
                    let again = quantization_error(
                        &client,
                        &on_x,
                        &on_y,
                        &scalar(absmax),
                        on_limit.as_ref(),
                    );
                    let again = again.expect("matrices of one shape");
                    assert_eq!(
                        read::<u32>(&client, &again.sums),
                        read::<u32>(&client, &found.sums),
                        "{what}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        let client = client();
        let shape = MatrixShape::new(2, 3);
        for bad in [f32::NAN, f32::INFINITY] {
            let x = [1.0, bad, 0.0, 3.0, 4.0, 5.0];
            let x = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let y = upload_matrix(
                &client,
                &[1.0; 6],
                shape,
                dtype::<f32>(),
                Memory::Contiguous,
            );
            let absmax = upload(&client, &[bad], &[1], dtype::<f32>());
            let limit = upload(&client, &[4.5], &[1], dtype::<f32>());
            let found = quantization_error(&client, &x, &y, &absmax, Some(&limit));
            let found = found.expect("matrices of one shape");
            let sums = read::<f32>(&client, &found.sums);
            assert!(!sums[0].is_finite() && !sums[1].is_finite(), "{sums:?}");
            assert_eq!(read::<u32>(&client, &found.counts), [0, 1]);
        }
    }

    #[test]
    fn empty_matrices_and_bad_input() {
        let client = client();
        let empty = MatrixShape::new(0, 7);
        let empty = upload_matrix(&client, &[], empty, dtype::<f32>(), Memory::Contiguous);
        let one = upload(&client, &[1.0], &[1], dtype::<f32>());
        let two = upload(&client, &[1.0; 2], &[2], dtype::<f32>());
        let found = quantization_error(&client, &empty, &empty, &one, None);
        let found = found.expect("matrices of one shape");
        assert_eq!(read::<f32>(&client, &found.sums), [0.0; SUMS]);
        assert_eq!(read::<u32>(&client, &found.counts), [0; COUNTS]);

        let matrix = |rows, cols| {
            let shape = MatrixShape::new(rows, cols);
            let x = vec![1.0; rows * cols];
            upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous)
        };
        let wide = matrix(2, 8);
        for (y, absmax, expected) in [
            (matrix(8, 2), &one, "one shape"),
            (wide.clone(), &two, "got absmax"),
        ] {
            let error = quantization_error(&client, &wide, &y, absmax, None);
            let error = error.expect_err("bad input").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
