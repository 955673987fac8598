//! The Hadamard quantizer with a learned step size and its backward pass, on the host and on the device, against the
//! reference.

use cubecl_kernels::{
    KernelError,
    granularity::Granularity,
    hadamard::{Axis, HadamardSize, HadamardTransform},
    host::{
        HostScales, HostValues,
        learned_step::{
            self as host, HostElementSource, HostGradient, HostLearnedStepGradients,
            HostSavedRounding,
        },
    },
    number::{Number, Storage},
    quantize::{
        QuantizeSpec,
        learned_step::{ResidualRows, gradient_scale, is_step},
    },
    reference::{
        self,
        hadamard::hadamard,
        learned_step::{self as specified, LearnedStepQuantized, StraightThrough},
    },
    shape::MatrixShape,
};

use crate::random::Random;

/// No value can be divided by these.
const BAD_STEPS: [f32; 7] = [
    0.0,
    -0.5,
    f32::NAN,
    f32::INFINITY,
    1e-40,
    3.4e38,
    f32::NEG_INFINITY,
];

/// A matrix, its transform, and a step size.
struct Case {
    x: Vec<f32>,
    shape: [usize; 2],
    transform: HadamardTransform,
    step: f32,
}

impl Case {
    fn reference(&self) -> LearnedStepQuantized {
        specified::quantize(&self.x, self.shape, self.transform, self.step)
    }

    fn name(&self) -> String {
        format!(
            "{:?}, {:?}, s = {:e}",
            self.shape, self.transform, self.step
        )
    }
}

fn size(order: u32) -> HadamardSize {
    HadamardSize::new(order).expect("a k from 0 to 7")
}

/// Shapes around those of groups, runs and tiles, with the largest transform that fits each axis, and a smaller one.
fn transforms() -> Vec<([usize; 2], HadamardTransform)> {
    let mut transforms = Vec::new();
    for shape in [
        [1, 1],
        [3, 17],
        [33, 45],
        [67, 130],
        [130, 34],
        [5, 384],
        [256, 40],
        [131, 256],
        [128, 200],
    ] {
        for axis in [Axis::Rows, Axis::Columns] {
            let dim = match axis {
                Axis::Rows => shape[0],
                Axis::Columns => shape[1],
            };
            let largest = HadamardSize::largest(dim, HadamardSize::LARGEST);
            for size in [largest, size(largest.order() / 2)] {
                transforms.push((shape, HadamardTransform { size, axis }));
            }
        }
    }
    transforms.dedup();
    transforms
}

/// All sizes on one shape.
fn all_sizes() -> impl Iterator<Item = ([usize; 2], HadamardTransform)> {
    HadamardSize::all().flat_map(|size| {
        [Axis::Rows, Axis::Columns].map(|axis| ([128, 128], HadamardTransform { size, axis }))
    })
}

/// Matrices of all kinds, with step sizes that fit them, cut them off, or lose them.
fn cases(random: &mut Random, (shape, transform): ([usize; 2], HadamardTransform)) -> Vec<Case> {
    let [rows, cols] = shape;
    let count = rows * cols;
    let plain: Vec<f32> = (0..count).map(|_| random.normal()).collect();
    let outliers = random.with_outliers(count);
    let special = random.with_special_values(MatrixShape::new(rows, cols));
    let denormal = (0..count).map(|_| random.normal() * 1e-39).collect();
    // Halves of the step size: ties, also at the edge of the range.
    let ties = (0..count)
        .map(|_| random.index(37) as f32 / 4.0 - 4.5)
        .collect();
    let mut inputs = vec![
        (plain.clone(), 0.3),
        (plain.clone(), 0.05),
        (plain.clone(), 1e4),
        (plain, 1e-30),
        (outliers, 0.4),
        (special, 0.4),
        (denormal, 0.5),
        (ties, 0.5),
        (vec![0.0; count], 0.1),
        (vec![-0.0; count], 0.1),
    ];
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let mut x: Vec<f32> = (0..count).map(|_| random.normal()).collect();
        x[random.index(count)] = value;
        x[random.index(count)] = value;
        inputs.push((x, 0.3));
    }
    inputs
        .into_iter()
        .map(|(x, step)| Case {
            x,
            shape,
            transform,
            step,
        })
        .collect()
}

fn bad_steps(random: &mut Random) -> Vec<Case> {
    BAD_STEPS
        .into_iter()
        .map(|step| Case {
            x: (0..33 * 64).map(|_| random.normal()).collect(),
            shape: [33, 64],
            transform: HadamardTransform::of_columns(size(5)),
            step,
        })
        .collect()
}

fn sample(interval: usize, offset: usize) -> ResidualRows {
    ResidualRows::new(interval, offset).expect("an offset below the interval")
}

/// Some sample of rows, of every kind.
fn samples(random: &mut Random) -> [ResidualRows; 3] {
    let interval = 2 + random.index(30);
    [
        ResidualRows::ALL,
        sample(interval, random.index(interval)),
        sample(1000, 999),
    ]
}

fn stored_codes(quantized: &LearnedStepQuantized) -> Vec<u8> {
    let cols = quantized.quantized.shape.cols;
    let stored = reference::stored(&quantized.quantized.values, cols, Storage::Nibbles);
    stored.into_iter().map(|byte| byte as u8).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Rows of normal numbers, the magnitudes of which differ.
fn gradient(random: &mut Random, [rows, cols]: [usize; 2]) -> Vec<f32> {
    (0..rows)
        .flat_map(|_| {
            let magnitude = random.normal().exp();
            (0..cols)
                .map(|_| magnitude * random.normal())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Products of sampled rows, of which some rows have none, one, or two, and the positions of them.
fn sampled(random: &mut Random, [rows, cols]: [usize; 2]) -> (Vec<f32>, Vec<i32>) {
    let mut kept = 0;
    let positions = (0..2 * rows)
        .map(|_| {
            if random.uniform() < 0.5 {
                return -1;
            }
            kept += 1;
            kept - 1
        })
        .collect();
    // Padded, as products are.
    let capacity = (kept as usize).next_multiple_of(16).max(16);
    (gradient(random, [capacity, cols]), positions)
}

/// Accepts what accumulation in FP32 makes of the sum.
#[track_caller]
fn assert_step_gradient(
    got: f32,
    expected: f64,
    g: &[f32],
    elements: &[StraightThrough],
    what: &str,
) {
    let terms = g.iter().zip(elements);
    let magnitudes: f64 = terms
        .map(|(g, element)| f64::from(g.abs()) * element.delta.abs())
        .sum();
    let scale = magnitudes * f64::from(gradient_scale(g.len()));
    let error = (f64::from(got) - expected).abs();
    // A sum of subnormal numbers may be 0.
    assert!(
        error <= 2e-6 * scale + f64::from(f32::MIN_POSITIVE),
        "{what}: {got} instead of {expected}, of terms of {scale}"
    );
}

#[test]
fn quantize_on_the_host() {
    let mut random = Random::fresh();
    let every = transforms().into_iter().chain(all_sizes());
    let mut all: Vec<Case> = every
        .flat_map(|transform| cases(&mut random, transform))
        .collect();
    all.extend(bad_steps(&mut random));
    for case in all {
        let what = case.name();
        let expected = case.reference();
        for sample in samples(&mut random) {
            let (got, saved) =
                host::quantize(&case.x, case.shape, case.step, case.transform, Some(sample))
                    .expect("a matrix");
            let HostValues::U8(codes) = &got.values else {
                panic!("{what}: nibbles");
            };
            assert_eq!(codes[..], stored_codes(&expected), "{what}: codes");
            let HostScales::F32(scales) = &got.scales else {
                panic!("{what}: an FP32 scale");
            };
            assert!(same(scales[0], expected.quantized.scales[0]), "{what}");
            let of_reference = HostSavedRounding {
                saturation: expected.saturation(),
                residuals: expected.residuals(sample),
                sample,
            };
            assert_eq!(saved, Some(of_reference), "{what}");
        }
        let (_, saved) =
            host::quantize(&case.x, case.shape, case.step, case.transform, None).expect("a matrix");
        assert_eq!(saved, None);
    }
}

/// Bands of rows that threads take end within a matrix of this size.
#[test]
fn large_matrices_on_the_host() {
    let mut random = Random::fresh();
    for (shape, transform) in [
        ([1200, 160], HadamardTransform::of_columns(size(5))),
        ([1280, 150], HadamardTransform::of_rows(size(7))),
    ] {
        let case = Case {
            x: random.with_outliers(shape[0] * shape[1]),
            shape,
            transform,
            step: 0.5,
        };
        let expected = case.reference();
        let sample = sample(7, 3);
        let (got, saved) =
            host::quantize(&case.x, shape, case.step, transform, Some(sample)).expect("a matrix");
        let saved = saved.expect("it was asked for");
        assert_eq!(got.values, HostValues::U8(stored_codes(&expected).into()));
        assert_eq!(saved.saturation, expected.saturation());
        assert_eq!(saved.residuals, expected.residuals(sample));
        let g = gradient(&mut random, shape);
        let exact = HostElementSource::Exact {
            x: &case.x,
            shape,
            step: case.step,
        };
        let kept = HostElementSource::Saved {
            quantized: &got,
            rounding: &saved,
        };
        let from_saved = specified::saved(
            &expected.quantized.values,
            shape[1],
            &saved.saturation,
            &saved.residuals,
            sample,
        );
        for (source, elements) in [(exact, expected.exact()), (kept, from_saved)] {
            let (dx, ds) = specified::backward(&g, &elements, shape, transform);
            let got = host::backward(HostGradient::Dense(&g), source, transform).expect("valid");
            assert_eq!(got.x, dx);
            assert_step_gradient(got.step, ds, &g, &elements, &case.name());
        }
    }
}

/// Without a transform it is the quantizer by a given scale.
#[test]
fn without_a_transform_it_is_quantize_by() {
    let mut random = Random::fresh();
    let transform = HadamardTransform::of_columns(HadamardSize::IDENTITY);
    let spec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);
    let mut all = cases(&mut random, ([40, 33], transform));
    all.extend(BAD_STEPS.map(|step| Case {
        x: vec![1.0; 40 * 33],
        shape: [40, 33],
        transform,
        step,
    }));
    for case in all {
        let shape = MatrixShape::new(40, 33);
        let (expected, _) = reference::quantize_by(&case.x, shape, &spec, case.step);
        let got = case.reference().quantized;
        assert_eq!(got.values, expected.values, "{}", case.name());
        assert!(same(got.scales[0], expected.scales[0]), "{}", case.name());
    }
}

/// The reference of one row, in numbers.
#[test]
fn what_is_saved_of_a_row() {
    let transform = HadamardTransform::of_columns(HadamardSize::IDENTITY);
    // Of step size 1: a tie, the edge of the range, just inside and just outside of it, and far outside.
    let x = [0.5, 1.5, -6.5, 6.75, -7.0, 7.25, -100.0, f32::NAN];
    let quantized = specified::quantize(&x, [1, 8], transform, 1.0);
    assert_eq!(quantized.quantized.values, [0, 2, -6, 7, -7, 7, -7, 0]);
    assert_eq!(quantized.saturation(), [0b1100]);
    assert_eq!(
        quantized.residuals(ResidualRows::ALL),
        [-127, 127, 127, 64, 0, 0, 0, 0]
    );
    let deltas = quantized.exact().into_iter().map(|element| element.delta);
    assert_eq!(
        deltas.collect::<Vec<_>>(),
        [-0.5, 0.5, 0.5, 0.25, 0.0, 7.0, -7.0, 0.0]
    );
    let passes = quantized.exact().into_iter().map(|element| element.passes);
    assert_eq!(
        passes.collect::<Vec<_>>(),
        [true, true, true, true, true, false, false, true]
    );
}

/// Of nine elements at the edge of the range the last one counts as clamped.
#[test]
fn a_group_has_eight_flags() {
    let transform = HadamardTransform::of_columns(HadamardSize::IDENTITY);
    let mut x = vec![0.0; 64];
    for (index, x) in x[..27].iter_mut().step_by(3).enumerate() {
        *x = if index % 2 == 0 { 7.0 } else { -8.0 };
    }
    x[40] = 7.0;
    let quantized = specified::quantize(&x, [1, 64], transform, 1.0);
    let saturation = quantized.saturation();
    assert_eq!(saturation, [0b1010_1010, 0]);
    let saved = specified::saved(
        &quantized.quantized.values,
        64,
        &saturation,
        &quantized.residuals(ResidualRows::ALL),
        ResidualRows::ALL,
    );
    for (index, (saved, exact)) in saved.iter().zip(quantized.exact()).enumerate() {
        let is_ninth = index == 24;
        assert_eq!(saved.passes != exact.passes, is_ninth, "{index}");
        assert_eq!(saved.delta != exact.delta, is_ninth, "{index}");
    }
    assert_eq!(saved[24].delta, 7.0);
}

#[test]
fn backward_on_the_host() {
    let mut random = Random::fresh();
    for (shape, transform) in transforms().into_iter().chain(all_sizes()) {
        for case in cases(&mut random, (shape, transform)) {
            for sample in samples(&mut random) {
                check_host(&mut random, &case, sample);
            }
        }
    }
    for case in bad_steps(&mut random) {
        check_host(&mut random, &case, ResidualRows::ALL);
    }
}

/// Both sources of elements, and both forms of the gradient.
#[track_caller]
fn check_host(random: &mut Random, case: &Case, sample: ResidualRows) {
    let (shape, transform) = (case.shape, case.transform);
    let expected = case.reference();
    let (quantized, rounding) =
        host::quantize(&case.x, shape, case.step, transform, Some(sample)).expect("a matrix");
    let rounding = rounding.expect("it was asked for");
    let saved = specified::saved(
        &expected.quantized.values,
        shape[1],
        &rounding.saturation,
        &rounding.residuals,
        sample,
    );
    let exact = HostElementSource::Exact {
        x: &case.x,
        shape,
        step: case.step,
    };
    let kept = HostElementSource::Saved {
        quantized: &quantized,
        rounding: &rounding,
    };
    let dense = gradient(random, shape);
    let (products, positions) = sampled(random, shape);
    let sum = specified::sampled_gradient(&products, shape[1], &positions);
    let parts = HostGradient::Sampled {
        products: &products,
        positions: &positions,
    };
    for (source, elements) in [(exact, expected.exact()), (kept, saved)] {
        for (gradient, g) in [(HostGradient::Dense(&dense), &dense), (parts, &sum)] {
            let (dx, ds) = specified::backward(g, &elements, shape, transform);
            let got = host::backward(gradient, source, transform).expect("valid slices");
            let differs = got.x.iter().zip(&dx).position(|(a, b)| !same(*a, *b));
            assert_eq!(differs, None, "{}", case.name());
            assert_step_gradient(got.step, ds, g, &elements, &case.name());
        }
    }
}

/// With the rounding residuals frozen `Z(s) = s (v + delta)` where an element passes and `7 s` where it is clamped: a
/// smooth function, linear in `s` and in `h`, the derivatives of which are those of the straight-through estimator.
#[test]
fn gradients_are_those_of_the_smooth_surrogate() {
    let mut random = Random::fresh();
    for transform in [
        HadamardTransform::of_columns(size(4)),
        HadamardTransform::of_rows(size(3)),
    ] {
        let shape = [24, 48];
        let case = Case {
            x: random.with_outliers(shape[0] * shape[1]),
            shape,
            transform,
            step: 0.35,
        };
        let g = gradient(&mut random, shape);
        let quantized = case.reference();
        let elements = quantized.exact();
        assert!(elements.iter().any(|element| !element.passes));
        let frozen: Vec<f64> = quantized
            .quantized
            .values
            .iter()
            .zip(&quantized.quotients)
            .map(|(code, v)| f64::from(*code) - f64::from(*v))
            .collect();
        // The loss is the product with the gradient; clamped elements are s times their code.
        let loss = |x: &[f32], s: f64| -> f64 {
            let h = hadamard(x, shape, transform);
            (0..g.len())
                .map(|index| {
                    let z = match elements[index].passes {
                        true => s * (f64::from(h[index]) / s + frozen[index]),
                        false => s * f64::from(quantized.quantized.values[index]),
                    };
                    f64::from(g[index]) * z
                })
                .sum()
        };
        let (dx, ds) = specified::backward(&g, &elements, shape, transform);
        let s = f64::from(case.step);
        let difference = (loss(&case.x, s + 0.01) - loss(&case.x, s - 0.01)) / 0.02;
        let expected = difference * f64::from(gradient_scale(g.len()));
        assert!(
            (ds - expected).abs() < 1e-4 * (1.0 + expected.abs()),
            "{ds} instead of {expected}"
        );
        for _ in 0..20 {
            let index = random.index(g.len());
            let (mut above, mut below) = (case.x.clone(), case.x.clone());
            above[index] += 1.0;
            below[index] -= 1.0;
            let expected = (loss(&above, s) - loss(&below, s))
                / (f64::from(above[index]) - f64::from(below[index]));
            let got = f64::from(dx[index]);
            assert!(
                (got - expected).abs() < 1e-2 * (1.0 + expected.abs()),
                "element {index}: {got} instead of {expected}"
            );
        }
    }
}

/// The mean over all offsets is the sum over all rows, to the rounding of residuals.
#[test]
fn sampled_residuals_are_unbiased() {
    let mut random = Random::fresh();
    let shape = [61, 96];
    let case = Case {
        // Few enough elements at the edge of the range that each has its flag.
        x: (0..shape[0] * shape[1]).map(|_| random.normal()).collect(),
        shape,
        transform: HadamardTransform::of_columns(size(5)),
        step: 0.4,
    };
    let g = gradient(&mut random, shape);
    let quantized = case.reference();
    let of = |sample: ResidualRows| {
        let (codes, rounding) =
            host::quantize(&case.x, shape, case.step, case.transform, Some(sample))
                .expect("a matrix");
        let source = HostElementSource::Saved {
            quantized: &codes,
            rounding: &rounding.expect("it was asked for"),
        };
        host::backward(HostGradient::Dense(&g), source, case.transform).expect("valid slices")
    };
    let (_, exact) = specified::backward(&g, &quantized.exact(), shape, case.transform);
    let whole = f64::from(of(ResidualRows::ALL).step);
    // A residual is off by at most half a unit, and these errors are independent.
    let norm = g.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let tolerance = 4.0 * norm * (0.5 / 254.0) * f64::from(gradient_scale(g.len()));
    assert!((whole - exact).abs() < tolerance, "{whole} and {exact}");
    for interval in [2, 7, 64] {
        let estimates: Vec<HostLearnedStepGradients> = (0..interval)
            .map(|offset| of(sample(interval, offset)))
            .collect();
        let mean = estimates.iter().map(|e| f64::from(e.step)).sum::<f64>() / interval as f64;
        let spread = estimates
            .iter()
            .map(|e| f64::from(e.step).abs())
            .fold(0.0, f64::max);
        assert!(
            (mean - whole).abs() <= 1e-5 * spread,
            "{interval}: {mean} instead of {whole}"
        );
        assert!(
            estimates
                .windows(2)
                .any(|pair| pair[0].step != pair[1].step)
        );
        // The gradient of the matrix does not depend on the sample.
        assert!(
            estimates
                .iter()
                .all(|estimate| estimate.x == estimates[0].x)
        );
    }
}

#[test]
fn nan_of_the_gradient_reaches_both_results() {
    let mut random = Random::fresh();
    let (shape, transform) = ([32, 64], HadamardTransform::of_columns(size(4)));
    let case = Case {
        x: random.with_outliers(32 * 64),
        shape,
        transform,
        step: 0.3,
    };
    let sample = sample(16, 0);
    let (quantized, rounding) =
        host::quantize(&case.x, shape, case.step, transform, Some(sample)).expect("a matrix");
    let rounding = rounding.expect("it was asked for");
    let clamped = case.reference().exact().iter().position(|e| !e.passes);
    for index in [clamped.expect("outliers"), 5 * 64 + 7, 0] {
        let mut g = gradient(&mut random, shape);
        g[index] = f32::NAN;
        for source in [
            HostElementSource::Exact {
                x: &case.x,
                shape,
                step: case.step,
            },
            HostElementSource::Saved {
                quantized: &quantized,
                rounding: &rounding,
            },
        ] {
            let got = host::backward(HostGradient::Dense(&g), source, transform).expect("valid");
            assert!(got.step.is_nan());
            assert!(got.x[index / 16 * 16..][..16].iter().all(|dx| dx.is_nan()));
            assert_eq!(got.x.iter().filter(|dx| dx.is_nan()).count(), 16);
        }
    }
}

/// Matrices that have a cold step size, and matrices that keep the one there is.
fn cold_cases(random: &mut Random) -> Vec<(Vec<f32>, [usize; 2], HadamardTransform)> {
    let mut inputs = Vec::new();
    for (shape, transform) in transforms() {
        inputs.push((random.with_outliers(shape[0] * shape[1]), shape, transform));
    }
    let (shape, transform) = ([40, 64], HadamardTransform::of_columns(size(5)));
    for value in [0.0, 1e-35, f32::NAN, f32::INFINITY, 1e38] {
        inputs.push((vec![value; 40 * 64], shape, transform));
    }
    inputs
}

#[track_caller]
fn assert_near(got: f32, expected: f64, tolerance: f64, what: &str) {
    let error = (f64::from(got) - expected).abs();
    assert!(
        error <= tolerance * expected.abs() || (got.is_nan() && expected.is_nan()),
        "{what}: {got} instead of {expected}"
    );
}

#[test]
fn cold_steps_on_the_host() {
    let mut random = Random::fresh();
    for (x, shape, transform) in cold_cases(&mut random) {
        let what = format!("{shape:?}, {transform:?}, {}", x[0]);
        let expected = specified::cold_step(&x, shape, transform, 0.25);
        let got = host::cold_step(&x, shape, 0.25, transform).expect("a matrix");
        assert_near(got, f64::from(expected), 1e-6, &what);
        assert!(is_step(got), "{what}: {got}");
    }
    let plain: Vec<f32> = (0..100 * 64).map(|_| random.normal()).collect();
    let transform = HadamardTransform::of_columns(size(6));
    let got = host::cold_step(&plain, [100, 64], 1.0, transform).expect("a matrix");
    // 2 E|x| / sqrt(7) of standard normal numbers, which the transform leaves as they are.
    assert!((got - 0.603).abs() < 0.03, "{got}");
}

#[test]
fn squared_errors_on_the_host() {
    let mut random = Random::fresh();
    for (shape, transform) in transforms() {
        let x = random.with_outliers(shape[0] * shape[1]);
        let case = Case {
            x,
            shape,
            transform,
            step: 0.4,
        };
        let expected = specified::squared_error(&case.x, shape, transform, case.step);
        let got = host::squared_error(&case.x, shape, case.step, transform).expect("a matrix");
        assert_near(got, expected, 1e-5, &case.name());
        // By the definition: transformed back, against the matrix.
        let quantized = case.reference().quantized;
        let back = hadamard(&reference::dequantize(&quantized), shape, transform);
        let pairs = back.iter().zip(&case.x);
        let sum: f64 = pairs.map(|(z, x)| f64::from(z - x).powi(2)).sum();
        assert_near(got, sum / back.len() as f64, 1e-3, &case.name());
    }
    for case in bad_steps(&mut random) {
        let got = host::squared_error(&case.x, case.shape, case.step, case.transform);
        assert!(got.expect("a matrix").is_nan(), "{}", case.name());
    }
    for value in [f32::NAN, f32::INFINITY] {
        let transform = HadamardTransform::of_columns(size(2));
        let x = [1.0, 2.0, value, 3.0];
        let got = host::squared_error(&x, [1, 4], 0.5, transform).expect("a matrix");
        assert!(got.is_nan());
        assert!(specified::squared_error(&x, [1, 4], transform, 0.5).is_nan());
    }
}

/// Of a matrix whose columns hold outliers, larger blocks have the smaller error.
#[test]
fn outliers_ask_for_larger_blocks() {
    let mut random = Random::fresh();
    let shape = [64, 256];
    let mut best = |outlier: f32| {
        let x: Vec<f32> = (0..shape[0] * shape[1])
            .map(|index| random.normal() * if index % 128 == 5 { outlier } else { 1.0 })
            .collect();
        let errors = HadamardSize::all().map(|size| {
            let transform = HadamardTransform::of_columns(size);
            let step = host::cold_step(&x, shape, 1.0, transform).expect("a matrix");
            let error = host::squared_error(&x, shape, step, transform).expect("a matrix");
            (size, error)
        });
        let errors: Vec<(HadamardSize, f32)> = errors.collect();
        let least = errors.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        (errors[0].1, *least.expect("eight sizes"))
    };
    let (without, (size, least)) = best(60.0);
    assert!(size.order() >= 4, "{size:?}");
    assert!(least < without / 2.0, "{least} and {without}");
}

#[test]
fn rejects_on_the_host() {
    let transform = HadamardTransform::of_columns(size(2));
    let is_shape = |error: KernelError| {
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        error.to_string()
    };
    let quantize = |x: &[f32], shape| host::quantize(x, shape, 1.0, transform, None);
    let message = is_shape(quantize(&[0.0; 12], [2, 6]).expect_err("six columns"));
    assert!(message.contains("[2, 6]") && message.contains("HadamardSize::largest"));
    is_shape(quantize(&[0.0; 7], [2, 4]).expect_err("too few elements"));
    is_shape(host::cold_step(&[0.0; 12], [2, 6], 1.0, transform).expect_err("six columns"));
    is_shape(host::squared_error(&[0.0; 12], [2, 6], 1.0, transform).expect_err("six columns"));
    let (quantized, rounding) =
        host::quantize(&[1.0; 8], [2, 4], 1.0, transform, Some(ResidualRows::ALL)).expect("valid");
    let rounding = rounding.expect("it was asked for");
    let source = HostElementSource::Saved {
        quantized: &quantized,
        rounding: &rounding,
    };
    let backward = |gradient| host::backward(gradient, source, transform);
    is_shape(backward(HostGradient::Dense(&[0.0; 9])).expect_err("nine elements"));
    let three = HostGradient::Sampled {
        products: &[0.0; 8],
        positions: &[0; 3],
    };
    is_shape(backward(three).expect_err("three positions"));
    let short = HostElementSource::Saved {
        quantized: &quantized,
        rounding: &HostSavedRounding {
            residuals: Vec::new(),
            ..rounding.clone()
        },
    };
    let dense = HostGradient::Dense(&[0.0; 8]);
    is_shape(host::backward(dense, short, transform).expect_err("no residuals"));
    for (interval, offset) in [(0, 0), (3, 3), (1 << 16, 0)] {
        let error = ResidualRows::new(interval, offset).expect_err("no such rows");
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    }
}

#[test]
fn samples_count_their_rows() {
    for interval in 1..9 {
        for offset in 0..interval {
            let sample = sample(interval, offset);
            for rows in 0..30 {
                let expected = (0..rows).filter(|row| sample.contains(*row)).count();
                assert_eq!(sample.count(rows), expected, "{sample:?} of {rows}");
            }
        }
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl::ir::StorageType;
    use cubecl_kernels::{
        layout::Layout,
        quantize::{
            Quantized, dequantize,
            learned_step::{
                ElementSource, Gradient, LearnedStep, LearnedStepGradients, SavedRounding,
                backward, cold_step, quantize, squared_error,
            },
            quantize_by,
        },
    };
    use rstest::rstest;

    use super::*;
    use crate::device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, client, drawn, dtype, float_types,
        read, read_float, rounded, upload, upload_i32, upload_matrix,
    };

    const LAYOUTS: [Layout; 3] = [Layout::Both, Layout::RowMajor, Layout::Transposed];

    /// The step size among those of other layers.
    fn steps(client: &Client, step: f32) -> Tensor {
        upload(client, &[0.125, f32::NAN, step], &[3], dtype::<f32>())
    }

    fn layer(steps: &Tensor) -> LearnedStep<'_, TestRuntime> {
        LearnedStep { steps, layer: 2 }
    }

    fn upload_case(client: &Client, case: &Case, float: StorageType, memory: Memory) -> Tensor {
        let shape = MatrixShape::new(case.shape[0], case.shape[1]);
        upload_matrix(client, &case.x, shape, float, memory)
    }

    #[track_caller]
    fn check_quantized(
        client: &Client,
        case: &Case,
        x: &Tensor,
        layout: Layout,
        save: Option<ResidualRows>,
    ) {
        let what = format!("{}, {layout:?}, {save:?}", case.name());
        let expected = case.reference();
        let steps = steps(client, case.step);
        let (got, saved) =
            quantize(client, x, layer(&steps), case.transform, layout, save).expect("a matrix");
        assert_eq!(got.values.is_some(), layout.row_major());
        assert_eq!(got.transposed.is_some(), layout.transposed());
        let of = &expected.quantized;
        for (copy, expected, name) in [
            (&got.values, of, "values"),
            (&got.transposed, &of.transposed(), "transposed"),
        ] {
            let Some(copy) = copy else { continue };
            let stored = reference::stored(&expected.values, expected.shape.cols, Storage::Nibbles);
            let stored: Vec<u8> = stored.into_iter().map(|byte| byte as u8).collect();
            let bytes = read::<u8>(client, copy);
            assert_eq!(bytes.len(), stored.len(), "{what}: {name}");
            let differs = bytes.iter().zip(&stored).position(|(a, e)| a != e);
            assert_eq!(differs, None, "{what}: {name}");
        }
        assert_same_floats(&read(client, &got.scales), &of.scales, &what);
        assert_eq!(saved.is_some(), save.is_some());
        if let Some(saved) = saved {
            assert_eq!(
                read::<u8>(client, &saved.saturation),
                expected.saturation(),
                "{what}: saturation"
            );
            assert_eq!(
                read::<i8>(client, &saved.residuals),
                expected.residuals(saved.sample),
                "{what}: residuals"
            );
        }
        let back = dequantize(client, &got, dtype::<f32>()).expect("what was quantized");
        assert_same_floats(
            &read_float(client, &back),
            &reference::dequantize(of),
            &what,
        );
    }

    /// Of several shapes, and of every size.
    fn drawn_transforms(random: &mut Random) -> Vec<([usize; 2], HadamardTransform)> {
        [
            drawn(random, transforms(), 1),
            drawn(random, all_sizes(), 1),
        ]
        .concat()
    }

    #[test]
    fn quantize_equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let transforms = drawn_transforms(&mut random);
        // Which layout and sample a transform meets is another one each time.
        let start = random.index(12);
        for (index, transform) in (start..).zip(transforms) {
            let layout = LAYOUTS[index % 3];
            let save = match index % 4 {
                0 => None,
                kind => Some(samples(&mut random)[kind - 1]),
            };
            for case in cases(&mut random, transform) {
                let x = upload_case(&client, &case, dtype::<f32>(), Memory::Contiguous);
                check_quantized(&client, &case, &x, layout, save);
            }
        }
        for case in bad_steps(&mut random) {
            let x = upload_case(&client, &case, dtype::<f32>(), Memory::Contiguous);
            check_quantized(&client, &case, &x, Layout::Both, Some(ResidualRows::ALL));
        }
    }

    #[rstest]
    fn float_types_and_strides(#[values(Axis::Rows, Axis::Columns)] axis: Axis) {
        let (client, mut random) = (client(), Random::fresh());
        let transform = HadamardTransform {
            size: size(5),
            axis,
        };
        for float in drawn(&mut random, float_types(&client), 1) {
            let memories = [
                Memory::Contiguous,
                Memory::Transposed,
                Memory::Sliced,
                Memory::SlicedAligned,
            ];
            for (index, memory) in drawn(&mut random, memories.into_iter().enumerate(), 1) {
                let x = random.with_outliers(96 * 160);
                let case = Case {
                    x: rounded(&x, float),
                    shape: [96, 160],
                    transform,
                    step: 0.4,
                };
                let x = upload_case(&client, &case, float, memory);
                let save = Some(samples(&mut random)[index % 2]);
                check_quantized(&client, &case, &x, LAYOUTS[index % 3], save);
                check_backward(&client, &mut random, &case, &x, memory, float);
            }
        }
    }

    /// Codes and scale are those of the quantizer by a given scale.
    #[test]
    fn without_a_transform_it_is_quantize_by() {
        let (client, mut random) = (client(), Random::fresh());
        let transform = HadamardTransform::of_columns(HadamardSize::IDENTITY);
        let spec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);
        for case in cases(&mut random, ([67, 33], transform)) {
            let x = upload_case(&client, &case, dtype::<f32>(), Memory::Contiguous);
            let given = upload(&client, &[case.step], &[1], dtype::<f32>());
            let steps = steps(&client, case.step);
            let (expected, _) = quantize_by(&client, &x, &spec, &given).expect("a matrix");
            let (got, _) = quantize(
                &client,
                &x,
                layer(&steps),
                transform,
                Layout::RowMajor,
                None,
            )
            .expect("a matrix");
            let bytes = |quantized: &Quantized<TestRuntime>| {
                read::<u8>(&client, quantized.values.as_ref().expect("row-major"))
            };
            assert_eq!(bytes(&got), bytes(&expected), "{}", case.name());
            assert_same_floats(
                &read(&client, &got.scales),
                &read(&client, &expected.scales),
                &case.name(),
            );
        }
    }

    /// Equality to the bit, or to a unit in the last place of a half type, which devices round to as they like.
    #[track_caller]
    fn assert_written(got: &[f32], expected: &[f32], float: StorageType, what: &str) {
        if float == dtype::<f32>() {
            return assert_same_floats(got, expected, what);
        }
        let (unit, smallest) = match float == dtype::<half::bf16>() {
            true => (2f32.powi(-7), f32::MIN_POSITIVE),
            false => (2f32.powi(-10), 2f32.powi(-14)),
        };
        for (index, (a, e)) in got.iter().zip(expected).enumerate() {
            let near = (a - e).abs() <= unit * e.abs().max(smallest);
            assert!(
                near || a == e || (a.is_nan() && e.is_nan()),
                "{what}[{index}]: {a:e} instead of {e:e}"
            );
        }
    }

    #[track_caller]
    fn assert_gradients(
        client: &Client,
        got: &LearnedStepGradients<TestRuntime>,
        g: &[f32],
        elements: &[StraightThrough],
        case: &Case,
    ) {
        let what = case.name();
        let (dx, ds) = specified::backward(g, elements, case.shape, case.transform);
        assert_eq!(got.x.shape().as_ref(), case.shape);
        assert_written(&read_float(client, &got.x), &dx, got.x.dtype, &what);
        let step = read::<f32>(client, &got.step)[0];
        assert_step_gradient(step, ds, g, elements, &what);
    }

    /// Both sources of elements, and both forms of the gradient. The gradient is of the matrix' type and layout.
    #[track_caller]
    fn check_backward(
        client: &Client,
        random: &mut Random,
        case: &Case,
        x: &Tensor,
        memory: Memory,
        float: StorageType,
    ) {
        let (shape, transform) = (case.shape, case.transform);
        let expected = case.reference();
        let sample = samples(random)[random.index(3)];
        let steps = steps(client, case.step);
        let (quantized, rounding) = quantize(
            client,
            x,
            layer(&steps),
            transform,
            Layout::RowMajor,
            Some(sample),
        )
        .expect("a matrix");
        let rounding = rounding.expect("it was asked for");
        let saved = specified::saved(
            &expected.quantized.values,
            shape[1],
            &expected.saturation(),
            &expected.residuals(sample),
            sample,
        );
        let dense = rounded(&gradient(random, shape), float);
        let (products, positions) = sampled(random, shape);
        let products = rounded(&products, float);
        let sum = specified::sampled_gradient(&products, shape[1], &positions);
        let upload_gradient = |x: &[f32]| {
            let shape = MatrixShape::new(x.len() / shape[1], shape[1]);
            upload_matrix(client, x, shape, float, memory)
        };
        let dense_tensor = upload_gradient(&dense);
        let products = upload_gradient(&products);
        let positions = upload_i32(client, &positions, &[positions.len()]);
        for (is_exact, elements) in [(true, expected.exact()), (false, saved)] {
            for g in [&dense, &sum] {
                let gradient = match std::ptr::eq(g, &dense) {
                    true => Gradient::Dense(&dense_tensor),
                    false => Gradient::Sampled {
                        products: &products,
                        positions: &positions,
                    },
                };
                let source = match is_exact {
                    true => ElementSource::Exact {
                        x,
                        step: layer(&steps),
                    },
                    false => ElementSource::Saved {
                        quantized: &quantized,
                        rounding: &rounding,
                    },
                };
                let got = backward(client, gradient, source, transform, float).expect("valid");
                assert_gradients(client, &got, g, &elements, case);
            }
        }
    }

    #[test]
    fn backward_equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        for transform in drawn_transforms(&mut random) {
            let all = cases(&mut random, transform);
            for _ in 0..3 {
                let case = &all[random.index(all.len())];
                let float = dtype::<f32>();
                let x = upload_case(&client, case, float, Memory::Contiguous);
                check_backward(&client, &mut random, case, &x, Memory::Contiguous, float);
            }
        }
        for case in bad_steps(&mut random) {
            let float = dtype::<f32>();
            let x = upload_case(&client, &case, float, Memory::Contiguous);
            check_backward(&client, &mut random, &case, &x, Memory::Contiguous, float);
        }
    }

    #[test]
    fn nan_of_the_gradient_reaches_both_results() {
        let (client, mut random) = (client(), Random::fresh());
        let (shape, transform) = ([32, 64], HadamardTransform::of_columns(size(5)));
        let case = Case {
            x: random.with_outliers(32 * 64),
            shape,
            transform,
            step: 0.3,
        };
        let x = upload_case(&client, &case, dtype::<f32>(), Memory::Contiguous);
        let steps = steps(&client, case.step);
        let (quantized, rounding) = quantize(
            &client,
            &x,
            layer(&steps),
            transform,
            Layout::RowMajor,
            Some(sample(16, 0)),
        )
        .expect("a matrix");
        let rounding = rounding.expect("it was asked for");
        let clamped = case.reference().exact().iter().position(|e| !e.passes);
        for index in [clamped.expect("outliers"), 5 * 64 + 7, 0] {
            let mut g = gradient(&mut random, shape);
            g[index] = f32::NAN;
            let g = upload(&client, &g, &shape, dtype::<f32>());
            for source in [
                ElementSource::Exact {
                    x: &x,
                    step: layer(&steps),
                },
                ElementSource::Saved {
                    quantized: &quantized,
                    rounding: &rounding,
                },
            ] {
                let dense = Gradient::Dense(&g);
                let got = backward(&client, dense, source, transform, dtype::<f32>());
                let got = got.expect("valid");
                assert!(read::<f32>(&client, &got.step)[0].is_nan());
                let dx = read::<f32>(&client, &got.x);
                assert!(dx[index / 32 * 32..][..32].iter().all(|dx| dx.is_nan()));
                assert_eq!(dx.iter().filter(|dx| dx.is_nan()).count(), 32);
            }
        }
    }

    /// A gradient none of whose rows was sampled.
    #[test]
    fn nothing_sampled() {
        let (client, mut random) = (client(), Random::fresh());
        let (shape, transform) = ([20, 40], HadamardTransform::of_columns(size(3)));
        let case = Case {
            x: random.with_outliers(20 * 40),
            shape,
            transform,
            step: 0.3,
        };
        let x = upload_case(&client, &case, dtype::<f32>(), Memory::Contiguous);
        let steps = steps(&client, case.step);
        for capacity in [0, 16] {
            let products = vec![f32::NAN; capacity * 40];
            let gradient = Gradient::Sampled {
                products: &upload(&client, &products, &[capacity, 40], dtype::<f32>()),
                positions: &upload_i32(&client, &[-1; 40], &[40]),
            };
            let source = ElementSource::Exact {
                x: &x,
                step: layer(&steps),
            };
            let got = backward(&client, gradient, source, transform, dtype::<f32>());
            let got = got.expect("valid");
            assert!(read::<f32>(&client, &got.x).iter().all(|dx| *dx == 0.0));
            assert_eq!(read::<f32>(&client, &got.step), [0.0]);
        }
    }

    #[test]
    fn cold_steps() {
        let (client, mut random) = (client(), Random::fresh());
        for (x, shape, transform) in cold_cases(&mut random) {
            let what = format!("{shape:?}, {transform:?}, {}", x[0]);
            let expected = specified::cold_step(&x, shape, transform, 0.25);
            let tensor = upload(&client, &x, &shape, dtype::<f32>());
            let steps = steps(&client, 0.25);
            let got = cold_step(&client, &tensor, layer(&steps), transform).expect("a matrix");
            for steps in [&got, &steps] {
                let [first, second, got] = read::<f32>(&client, steps)[..] else {
                    panic!("three layers");
                };
                assert_eq!(first, 0.125);
                assert!(second.is_nan());
                assert_near(got, f64::from(expected), 1e-6, &what);
                assert!(is_step(got), "{what}: {got}");
            }
        }
    }

    #[test]
    fn squared_errors() {
        let (client, mut random) = (client(), Random::fresh());
        let mut all = bad_steps(&mut random);
        for (shape, transform) in drawn_transforms(&mut random) {
            all.push(Case {
                x: random.with_outliers(shape[0] * shape[1]),
                shape,
                transform,
                step: 0.4,
            });
        }
        for value in [f32::NAN, f32::INFINITY] {
            let mut x = vec![1.0; 16 * 40];
            x[100] = value;
            all.push(Case {
                x,
                shape: [16, 40],
                transform: HadamardTransform::of_rows(size(2)),
                step: 0.4,
            });
        }
        for case in all {
            let expected = specified::squared_error(&case.x, case.shape, case.transform, case.step);
            let x = upload_case(&client, &case, dtype::<f32>(), Memory::Contiguous);
            let steps = steps(&client, case.step);
            let got = squared_error(&client, &x, layer(&steps), case.transform);
            let got = read::<f32>(&client, &got.expect("a matrix"));
            assert_near(got[0], expected, 1e-5, &case.name());
        }
    }

    /// Sums and gradients are the same in every run: nothing is added up in an order that changes.
    #[test]
    fn sums_are_repeatable() {
        let (client, mut random) = (client(), Random::fresh());
        let (shape, transform) = ([300, 640], HadamardTransform::of_columns(size(7)));
        let x = random.with_outliers(300 * 640);
        let x = upload(&client, &x, &shape, dtype::<f32>());
        let g = gradient(&mut random, shape);
        let g = upload(&client, &g, &shape, dtype::<f32>());
        let run = || {
            let steps = steps(&client, 0.4);
            let source = ElementSource::Exact {
                x: &x,
                step: layer(&steps),
            };
            let gradients = backward(
                &client,
                Gradient::Dense(&g),
                source,
                transform,
                dtype::<f32>(),
            )
            .expect("valid");
            let error = squared_error(&client, &x, layer(&steps), transform).expect("valid");
            let step = read::<f32>(&client, &gradients.step)[0];
            let error = read::<f32>(&client, &error)[0];
            cold_step(&client, &x, layer(&steps), transform).expect("valid");
            [step, error, read::<f32>(&client, &steps)[2]].map(f32::to_bits)
        };
        let first = run();
        for _ in 0..4 {
            assert_eq!(run(), first);
        }
    }

    #[test]
    fn empty_matrices() {
        let client = client();
        let transform = HadamardTransform::of_columns(size(2));
        for shape in [[0, 40], [3, 0]] {
            let case = Case {
                x: Vec::new(),
                shape,
                transform,
                step: 0.5,
            };
            let x = upload(&client, &[], &shape, dtype::<f32>());
            check_quantized(&client, &case, &x, Layout::Both, Some(ResidualRows::ALL));
            let steps = steps(&client, 0.5);
            let source = ElementSource::Exact {
                x: &x,
                step: layer(&steps),
            };
            let got = backward(
                &client,
                Gradient::Dense(&x),
                source,
                transform,
                dtype::<f32>(),
            )
            .expect("an empty matrix");
            assert_eq!(got.x.shape().as_ref(), shape);
            assert_eq!(read::<f32>(&client, &got.step), [0.0]);
            let error = squared_error(&client, &x, layer(&steps), transform).expect("empty");
            assert_eq!(read::<f32>(&client, &error), [0.0]);
            cold_step(&client, &x, layer(&steps), transform).expect("empty");
            assert_eq!(read::<f32>(&client, &steps)[2], 0.5);
        }
    }

    /// Codes and what is saved beside them, of a matrix large enough that padding does not count.
    #[test]
    fn saved_bytes_of_an_element() {
        let client = client();
        let shape = [512, 1024];
        let x = upload(&client, &vec![0.5; 512 * 1024], &shape, dtype::<f32>());
        let steps = steps(&client, 0.5);
        let (quantized, rounding) = quantize(
            &client,
            &x,
            layer(&steps),
            HadamardTransform::of_columns(size(5)),
            Layout::RowMajor,
            Some(sample(64, 13)),
        )
        .expect("a matrix");
        let rounding = rounding.expect("it was asked for");
        let bytes: usize = [
            quantized.values.as_ref().expect("row-major"),
            &quantized.scales,
            &rounding.saturation,
            &rounding.residuals,
        ]
        .iter()
        .map(|tensor| tensor.shape().iter().product::<usize>() * tensor.dtype.size())
        .sum();
        assert!(bytes as f64 <= 0.55 * (512.0 * 1024.0), "{bytes}");
    }

    #[test]
    fn rejects() {
        let client = client();
        let float = dtype::<f32>();
        let x = upload(&client, &[1.0; 24], &[4, 6], float);
        let one = upload(&client, &[1.0], &[1], float);
        let transform = HadamardTransform::of_columns(size(1));
        let step = LearnedStep {
            steps: &one,
            layer: 0,
        };
        let run = |x: &Tensor, step, transform| {
            quantize(&client, x, step, transform, Layout::Both, None).map(|_| ())
        };
        run(&x, step, transform).expect("valid");
        let is_shape = |result: Result<(), KernelError>| {
            let error = result.expect_err("bad input");
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
            error.to_string()
        };
        let is_dtype = |result: Result<(), KernelError>| {
            let error = result.expect_err("bad input");
            assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        };
        let message = is_shape(run(&x, step, HadamardTransform::of_columns(size(2))));
        assert!(message.contains("[4, 6]") && message.contains("HadamardSize::largest"));
        is_shape(run(&x, step, HadamardTransform::of_rows(size(3))));
        let batch = upload(&client, &[1.0; 24], &[1, 4, 6], float);
        is_shape(run(&batch, step, transform));
        is_shape(run(&x, LearnedStep { layer: 1, ..step }, transform));
        let integers = upload_i32(&client, &[1; 24], &[4, 6]);
        is_dtype(run(&integers, step, transform));
        let of_integers = LearnedStep {
            steps: &upload_i32(&client, &[1], &[1]),
            layer: 0,
        };
        is_dtype(run(&x, of_integers, transform));
        is_shape(cold_step(&client, &batch, step, transform).map(|_| ()));
        is_shape(squared_error(&client, &batch, step, transform).map(|_| ()));

        let saved = |layout| {
            let (quantized, rounding) = quantize(
                &client,
                &x,
                step,
                transform,
                layout,
                Some(ResidualRows::ALL),
            )
            .expect("valid");
            (quantized, rounding.expect("it was asked for"))
        };
        let back = |gradient, source| backward(&client, gradient, source, transform, float);
        let dense = |g| Gradient::Dense(g);
        let exact = || ElementSource::Exact { x: &x, step };
        back(dense(&x), exact()).expect("valid");
        is_shape(back(dense(&batch), exact()).map(|_| ()));
        let tall = upload(&client, &[1.0; 24], &[6, 4], float);
        is_shape(back(dense(&tall), exact()).map(|_| ()));
        is_dtype(back(dense(&integers), exact()).map(|_| ()));
        let short = Gradient::Sampled {
            products: &x,
            positions: &upload_i32(&client, &[0; 4], &[4]),
        };
        is_shape(back(short, exact()).map(|_| ()));
        let floats = Gradient::Sampled {
            products: &x,
            positions: &upload(&client, &[0.0; 8], &[8], float),
        };
        is_dtype(back(floats, exact()).map(|_| ()));
        let (quantized, rounding) = saved(Layout::Transposed);
        let source = ElementSource::Saved {
            quantized: &quantized,
            rounding: &rounding,
        };
        let error = back(dense(&x), source).expect_err("no row-major copy");
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        let (quantized, rounding) = saved(Layout::RowMajor);
        let source = ElementSource::Saved {
            quantized: &quantized,
            rounding: &SavedRounding {
                saturation: rounding.residuals.clone(),
                ..rounding.clone()
            },
        };
        is_dtype(back(dense(&x), source).map(|_| ()));
        let source = ElementSource::Saved {
            quantized: &quantized,
            rounding: &SavedRounding {
                sample: sample(2, 0),
                ..rounding
            },
        };
        is_shape(back(dense(&x), source).map(|_| ()));
    }
}
