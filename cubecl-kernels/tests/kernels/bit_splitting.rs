//! Bit splitting on the host and on the device, against the reference, and what the reference promises.

use cubecl_kernels::{
    host,
    reference::{self, ReferenceBitSplit},
    rounding::Rounding,
    scale::MIN_ABSMAX,
    shape::MatrixShape,
};

use crate::{host::assert_same, random::Random};

pub fn stochastic(random: &mut Random) -> Rounding {
    Rounding::Stochastic(random.key())
}

/// Gradients: ordinary, with rows of other magnitudes, of outliers, with all that is special, of zeros, with one row
/// that is not zero, denormal, of the largest float, of ties, of one that is not finite.
pub fn gradients(random: &mut Random, shape: MatrixShape) -> Vec<Vec<f32>> {
    let count = shape.num_elements();
    let plain: Vec<f32> = (0..count).map(|_| random.normal()).collect();
    let magnitudes: Vec<f32> = (0..shape.rows)
        .map(|_| (4.0 * random.normal()).exp())
        .collect();
    let of_rows = |factor: &dyn Fn(usize) -> f32| -> Vec<f32> {
        let rows = plain.chunks(shape.cols).enumerate();
        rows.flat_map(|(row, x)| x.iter().map(move |x| x * factor(row)))
            .collect()
    };
    let chosen = random.index(shape.rows);
    let one_row = of_rows(&|row| f32::from(u8::from(row == chosen)));
    let sparse = of_rows(&|row| magnitudes[row]);
    let ties = (0..count)
        .map(|_| random.index(29) as f32 / 2.0 - 7.0)
        .collect();
    let with = |value: f32, random: &mut Random| {
        let mut x = plain.clone();
        x[random.index(count)] = value;
        x
    };
    let mut gradients = vec![
        sparse,
        random.with_outliers(count),
        random.with_special_values(shape),
        vec![0.0; count],
        one_row,
        plain.iter().map(|x| x * 1e-39).collect(),
        ties,
    ];
    for special in [f32::MAX, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        gradients.push(with(special, random));
    }
    gradients.push(plain);
    gradients
}

pub fn shapes() -> [MatrixShape; 6] {
    [[1, 1], [1, 40], [3, 17], [67, 33], [130, 64], [257, 300]]
        .map(|[rows, cols]| MatrixShape::new(rows, cols))
}

#[test]
fn on_the_host() {
    let mut random = Random::fresh();
    for shape in shapes() {
        for x in gradients(&mut random, shape) {
            for rounding in [Rounding::Nearest, stochastic(&mut random)] {
                let expected = reference::bit_split(&x, shape, rounding);
                let size = [shape.rows, shape.cols];
                let got = host::bit_split(&x, size, rounding).expect("a matrix");
                assert_eq!(got.parts, expected.bytes(), "{shape:?}");
                assert_eq!(got.squared_norms, expected.squared_norms());
                assert_same_scales(&got.scales, &expected);
                let merged = host::merge_parts(&got).expect("a split");
                assert_same(&merged, &reference::merge_parts(&expected));
            }
        }
    }
    let error = host::bit_split(&[0.0; 3], [2, 2], Rounding::Nearest).unwrap_err();
    assert!(error.to_string().contains("host::bit_split"), "{error}");
    let mut empty = host::bit_split(&[], [0, 3], Rounding::Nearest).expect("a matrix");
    assert_eq!((empty.scales, empty.parts.len()), ([0.0; 2], 0));
    empty.shape = [2, 2];
    assert!(host::merge_parts(&empty).is_err());
}

#[track_caller]
pub fn assert_same_scales(got: &[f32], expected: &ReferenceBitSplit) {
    let bits = |scale: &f32| (!scale.is_nan()).then(|| scale.to_bits());
    let bits = |scales: &[f32]| scales.iter().map(bits).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(&expected.scales));
}

/// The sum of both parts misses a value by less than a step of the low part, to nearest by half a step at most.
#[test]
fn parts_add_up_to_the_matrix() {
    let mut random = Random::fresh();
    let shape = MatrixShape::new(40, 33);
    for x in gradients(&mut random, shape) {
        for rounding in [Rounding::Nearest, stochastic(&mut random)] {
            let split = reference::bit_split(&x, shape, rounding);
            let merged = reference::merge_parts(&split).values;
            let finite = x.iter().all(|x| x.is_finite());
            let step = split.scales[1];
            assert_eq!(step.is_nan(), !finite);
            for (x, merged) in x.iter().zip(merged) {
                // In f64, since the largest float may be rounded to more than an f32 holds.
                let (x, merged) = (f64::from(*x), f64::from(merged) * f64::from(step));
                if !finite {
                    assert!(merged.is_nan());
                    continue;
                }
                // Scale and product are rounded to 24 bits, and random numbers have 15.
                let steps = match rounding {
                    Rounding::Nearest => 0.501,
                    Rounding::Stochastic(_) => 1.001,
                };
                let most = (steps * f64::from(step)).max(f64::from(MIN_ABSMAX));
                assert!((x - merged).abs() <= most, "{x} as {merged} by {step}");
            }
            let all = split.high.iter().chain(&split.low);
            assert!(all.into_iter().all(|part| part.abs() <= 7));
        }
    }
}

/// Stochastic rounding of the low part makes the sum of the parts unbiased, whatever the high part is.
#[test]
fn is_unbiased() {
    let mut random = Random::fresh();
    let shape = MatrixShape::new(8, 16);
    let x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
    let (draws, mut sums) = (4000, vec![0f64; x.len()]);
    let mut step = 0.0;
    for _ in 0..draws {
        let split = reference::bit_split(&x, shape, stochastic(&mut random));
        step = f64::from(split.scales[1]);
        for ((sum, high), low) in sums.iter_mut().zip(&split.high).zip(&split.low) {
            *sum += f64::from(14 * high + low) * step;
        }
    }
    for (x, sum) in x.iter().zip(sums) {
        // A rounding's standard deviation is half a step at most. Of 128 tests with a normal tail above 6.5 deviations
        // one fails wrongly with a probability of 1e-8.
        let error = sum / f64::from(draws) - f64::from(*x);
        let deviation = step / 2.0 / f64::from(draws).sqrt();
        assert!(
            error.abs() < 6.5 * deviation + step * 1e-4,
            "{x}: off by {error:e}"
        );
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub mod on_device {
    use cubecl_kernels::{
        KernelError,
        bit_splitting::{BitSplit, bit_split, merge_parts},
        layout::Layout,
        reference::ReferenceQuantized,
    };

    use super::*;
    use crate::device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, assert_same_integers, client,
        drawn, dtype, float_types, read, read_i8, rounded, upload, upload_i32, upload_matrix,
    };

    /// Compares the copies and the scales of an INT8 matrix with the reference.
    #[track_caller]
    pub fn check_int8(
        client: &Client,
        got: &cubecl_kernels::quantize::Quantized<TestRuntime>,
        expected: &ReferenceQuantized,
        what: &str,
    ) {
        assert_eq!(got.shape, expected.shape, "{what}");
        if let Some(values) = &got.values {
            assert_same_integers(&read_i8(client, values), &expected.values, what);
        }
        if let Some(transposed) = &got.transposed {
            let expected = expected.transposed();
            assert_same_integers(&read_i8(client, transposed), &expected.values, what);
        }
        assert_same_floats(&read(client, &got.scales), &expected.scales, what);
    }

    #[track_caller]
    fn check(client: &Client, tensor: &Tensor, x: &[f32], shape: MatrixShape, rounding: Rounding) {
        let what = format!("{shape:?}, {rounding:?}");
        let expected = reference::bit_split(x, shape, rounding);
        let got = bit_split(client, tensor, rounding).expect("a matrix");
        assert_eq!(got.shape, [shape.rows, shape.cols]);
        assert_eq!(read::<u8>(client, &got.parts), expected.bytes(), "{what}");
        assert_same_scales(&read::<f32>(client, &got.scales), &expected);
        let norms = read::<u32>(client, &got.squared_norms);
        assert_eq!(norms, expected.squared_norms(), "{what}");
    }

    #[test]
    fn equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        for (index, shape) in drawn(&mut random, shapes().into_iter().enumerate(), 3) {
            for x in gradients(&mut random, shape) {
                let rounding = match index % 2 {
                    0 => Rounding::Nearest,
                    _ => stochastic(&mut random),
                };
                let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
                check(&client, &tensor, &x, shape, rounding);
            }
        }
    }

    #[test]
    fn float_types_strides_and_sizes() {
        let (client, mut random) = (client(), Random::fresh());
        let shape = MatrixShape::new(40, 67);
        let x = random.with_outliers(shape.num_elements());
        let rounding = stochastic(&mut random);
        for float in drawn(&mut random, float_types(&client), 1) {
            let x = rounded(&x, float);
            for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
                let tensor = upload_matrix(&client, &x, shape, float, memory);
                check(&client, &tensor, &x, shape, rounding);
            }
        }
        // Rows that take their units more than once, whole runs, and nothing.
        for shape in [[3, 4500], [5, 4096], [0, 40], [3, 0]] {
            let shape = MatrixShape::new(shape[0], shape[1]);
            let x = random.with_outliers(shape.num_elements());
            let tensor = upload(&client, &x, &[shape.rows, shape.cols], dtype::<f32>());
            check(&client, &tensor, &x, shape, rounding);
        }
    }

    #[test]
    fn merged_equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        for shape in [[67, 33], [130, 64], [256, 144], [1, 1], [0, 3]] {
            let shape = MatrixShape::new(shape[0], shape[1]);
            let x = random.with_outliers(shape.num_elements());
            let rounding = stochastic(&mut random);
            let tensor = upload(&client, &x, &[shape.rows, shape.cols], dtype::<f32>());
            let split = bit_split(&client, &tensor, rounding).expect("a matrix");
            let expected = reference::merge_parts(&reference::bit_split(&x, shape, rounding));
            for layout in [Layout::RowMajor, Layout::Transposed, Layout::Both] {
                let merged = merge_parts(&client, &split, layout).expect("a split");
                assert_eq!(merged.values.is_some(), layout.row_major());
                assert_eq!(merged.transposed.is_some(), layout.transposed());
                let what = format!("{shape:?} {layout:?}");
                check_int8(&client, &merged, &expected, &what);
            }
        }
    }

    #[test]
    fn rejects() {
        let client = client();
        let x = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
        let refused = |x: &Tensor| bit_split(&client, x, Rounding::Nearest).expect_err("bad input");
        let error = refused(&upload(&client, &[1.0; 8], &[8], dtype::<f32>()));
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        let error = refused(&upload(&client, &[1.0; 8], &[2, 2, 2], dtype::<f32>()));
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        let error = refused(&upload_i32(&client, &[1; 8], &[2, 4]));
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        let split = bit_split(&client, &x, Rounding::Nearest).expect("a matrix");
        let merge = |split: &BitSplit<TestRuntime>| {
            merge_parts(&client, split, Layout::RowMajor).expect_err("a bad split")
        };
        let shape = [3, 4];
        let error = merge(&BitSplit {
            shape,
            ..split.clone()
        });
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        let error = merge(&BitSplit { parts: x, ..split });
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    }
}
