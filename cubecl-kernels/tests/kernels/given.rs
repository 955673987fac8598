//! Quantization by a scale that was given, on the host and on the device, against the reference.

use cubecl_kernels::{
    granularity::Granularity,
    host::{self, HostScales, HostValues},
    number::Number,
    quantize::QuantizeSpec,
    reference,
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
};

use crate::random::Random;

/// No value can be divided by these.
const BAD_SCALES: [f32; 7] = [
    0.0,
    -0.5,
    f32::NAN,
    f32::INFINITY,
    1e-40,
    3.4e38,
    f32::NEG_INFINITY,
];

fn stochastic(random: &mut Random) -> Rounding {
    Rounding::Stochastic(StochasticKey {
        seed: random.index(1 << 30) as u64,
        stream: random.index(1 << 30) as u64,
    })
}

/// Matrices, and scales that fit them, cut them off, lose them, or are none.
fn cases(random: &mut Random, shape: MatrixShape, number: Number) -> Vec<(Vec<f32>, f32)> {
    let count = shape.num_elements();
    let plain: Vec<f32> = (0..count).map(|_| random.normal()).collect();
    let outliers = random.with_outliers(count);
    let special = random.with_special_values(shape);
    let mut huge = plain.clone();
    huge[0] = f32::MAX;
    let mut cases: Vec<(Vec<f32>, f32)> = [3.0, 0.2, 1e4, f32::MIN_POSITIVE, 8.5e37]
        .into_iter()
        .map(|reach| (plain.clone(), reach / number.largest()))
        .collect();
    cases.extend([
        (outliers, 3.0 / number.largest()),
        (special, 3.0 / number.largest()),
        (huge, 1e-30),
        (vec![0.0; count], 0.1),
        (vec![-0.0; count], 0.1),
    ]);
    cases.extend(BAD_SCALES.map(|scale| (plain.clone(), scale)));
    cases
}

/// Bit for bit, any NaN being like any other.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn bits(values: &HostValues<'_>) -> Vec<u32> {
    match values {
        HostValues::I8(values) => values.iter().map(|&value| u32::from(value as u8)).collect(),
        HostValues::U8(values) => values.iter().copied().map(u32::from).collect(),
        HostValues::U32(values) => values.to_vec(),
    }
}

#[test]
fn on_the_host() {
    let mut random = Random::fresh();
    for number in Number::SYMMETRIC {
        for shape in [MatrixShape::new(7, 33), MatrixShape::new(130, 64)] {
            for (x, scale) in cases(&mut random, shape, number) {
                for rounding in [Rounding::Nearest, stochastic(&mut random)] {
                    let spec =
                        QuantizeSpec::new(number, Granularity::Tensor).with_rounding(rounding);
                    let size = [shape.rows, shape.cols];
                    let delayed = scale * number.largest();
                    for (expected, got) in [
                        (
                            reference::quantize_by(&x, shape, &spec, scale),
                            host::quantize_by(&x, size, &spec, scale),
                        ),
                        (
                            reference::quantize_delayed(&x, shape, &spec, delayed),
                            host::quantize_delayed(&x, size, &spec, delayed),
                        ),
                    ] {
                        let ((expected, absmax), (got, got_absmax)) =
                            (expected, got.expect("a matrix"));
                        let stored =
                            reference::stored(&expected.values, shape.cols, number.storage());
                        assert_eq!(bits(&got.values), stored, "{number:?} by {scale:e}");
                        assert!(same(got_absmax, absmax), "{got_absmax} instead of {absmax}");
                        let HostScales::F32(scales) = got.scales else {
                            panic!("an FP32 scale");
                        };
                        assert!(same(scales[0], expected.scales[0]), "{scales:?}");
                    }
                }
            }
        }
    }
}

/// The reference of one matrix, in numbers.
#[test]
fn saturation_and_what_must_not_be_hidden() {
    let shape = MatrixShape::new(1, 4);
    let by = |x: [f32; 4], number: Number, scale: f32| {
        let spec = QuantizeSpec::new(number, Granularity::Tensor);
        let (quantized, absmax) = reference::quantize_by(&x, shape, &spec, scale);
        (
            reference::dequantize(&quantized),
            quantized.scales[0],
            absmax,
        )
    };
    for number in Number::SYMMETRIC {
        let largest = number.largest();
        let (values, scale, absmax) = by([1.0, -1e30, 1e30, 0.0], number, 0.5);
        assert_eq!(
            values,
            [1.0, -largest * 0.5, largest * 0.5, 0.0],
            "{number:?}"
        );
        assert_eq!((scale, absmax), (0.5, 1e30));
        for hidden in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (values, scale, absmax) = by([1.0, hidden, -1.0, 0.0], number, 0.5);
            assert!(values.iter().all(|value| value.is_nan()));
            assert!(scale.is_nan() && absmax.is_nan());
        }
        for bad in BAD_SCALES {
            let (values, scale, absmax) = by([1.0, -2.0, 0.0, 0.5], number, bad);
            assert!(values.iter().all(|value| value.is_nan()) && scale.is_nan());
            assert_eq!(absmax, 2.0);
        }
    }
}

/// A layer without a maximum takes that of its data; one that there is counts, however badly it fits.
#[test]
fn without_a_delayed_maximum_the_data_gives_one() {
    let mut random = Random::fresh();
    for number in Number::SYMMETRIC {
        let spec = QuantizeSpec::new(number, Granularity::Tensor);
        let shape = MatrixShape::new(9, 14);
        // Far from 1, so that a scale of 1 would saturate or lose everything.
        let far = [1e-12f32, 1e12][random.index(2)];
        let x: Vec<f32> = (0..shape.num_elements())
            .map(|_| far * random.normal())
            .collect();
        let current = reference::quantize(&x, shape, &spec);
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        for none in [0.0, -0.5, f32::NAN, f32::INFINITY, 1e-40, f32::NEG_INFINITY] {
            let (delayed, absmax) = reference::quantize_delayed(&x, shape, &spec, none);
            assert_eq!(absmax, largest);
            assert_eq!(delayed.scales, current.scales, "{number:?}");
            // One multiplies by 1 / scale, the other by largest / absmax: they may differ by a rounding.
            let differ = delayed.values.iter().zip(&current.values);
            let differ = differ.filter(|(a, b)| a != b).count();
            assert!(differ <= 2, "{number:?}: {differ} values differ");
        }
        let delayed = largest * 0.1;
        assert_eq!(
            reference::quantize_delayed(&x, shape, &spec, delayed),
            reference::quantize_by(&x, shape, &spec, delayed / number.largest())
        );
        // Values without a scale of their own: zeros, too small, not finite.
        for (value, expected) in [
            (0.0, 0.0),
            (1e-40, 0.0),
            (f32::NAN, f32::NAN),
            (f32::INFINITY, f32::NAN),
        ] {
            let mut x = vec![0.0; shape.num_elements()];
            x[5] = value;
            let (delayed, _) = reference::quantize_delayed(&x, shape, &spec, 0.0);
            let got = reference::dequantize(&delayed);
            assert!(
                got.iter().all(|&got| same(got.abs(), expected)),
                "{number:?} of {value}: {got:?}"
            );
        }
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        KernelError,
        layout::Layout,
        quantize::{DelayedMaximum, Quantized, dequantize, quantize_by, quantize_delayed},
        reference::ReferenceQuantized,
        scale::ScaleNumber,
    };

    use super::*;
    use crate::{
        device::{
            Client, Memory, Tensor, TestRuntime, assert_same_floats, client, drawn, dtype,
            float_types, read, read_float, rounded, upload, upload_i32, upload_matrix,
        },
        quantize::stored_bits,
    };

    #[track_caller]
    fn check(
        client: &Client,
        tensor: &Tensor,
        x: &[f32],
        shape: MatrixShape,
        spec: &QuantizeSpec,
        scale: f32,
    ) {
        let what = format!("{shape:?}, {spec:?} by {scale:e}");
        let given = upload(client, &[scale], &[1], dtype::<f32>());
        let expected = reference::quantize_by(x, shape, spec, scale);
        let got = quantize_by(client, tensor, spec, &given).expect("a matrix");
        check_both(client, got, expected, shape, spec, &what);
        // Of the maxima of three layers.
        let maxima = [7.0, scale * spec.number.largest(), 0.0];
        let uploaded = upload(client, &maxima, &[3], dtype::<f32>());
        for layer in [1, 2] {
            let delayed = DelayedMaximum {
                maxima: &uploaded,
                layer,
            };
            let expected = reference::quantize_delayed(x, shape, spec, maxima[layer]);
            let got = quantize_delayed(client, tensor, spec, delayed).expect("a matrix");
            check_both(client, got, expected, shape, spec, &what);
        }
    }

    #[track_caller]
    fn check_both(
        client: &Client,
        (got, got_absmax): (Quantized<TestRuntime>, Tensor),
        (expected, absmax): (ReferenceQuantized, f32),
        shape: MatrixShape,
        spec: &QuantizeSpec,
        what: &str,
    ) {
        let storage = spec.number.storage();
        if let Some(values) = &got.values {
            let stored = reference::stored(&expected.values, shape.cols, storage);
            assert_eq!(stored_bits(client, values), stored, "{what}: values");
        }
        if let Some(transposed) = &got.transposed {
            let expected = expected.transposed();
            let stored = reference::stored(&expected.values, shape.rows, storage);
            assert_eq!(
                stored_bits(client, transposed),
                stored,
                "{what}: transposed"
            );
        }
        assert_same_floats(&read(client, &got.scales), &expected.scales, what);
        assert_same_floats(&read(client, &got_absmax), &[absmax], what);
        let back = dequantize(client, &got, dtype::<f32>()).expect("what was quantized");
        assert_same_floats(
            &read_float(client, &back),
            &reference::dequantize(&expected),
            what,
        );
    }

    #[test]
    fn equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let numbers = Number::SYMMETRIC.into_iter().enumerate();
        for (index, number) in drawn(&mut random, numbers, 1) {
            // Each number with one pair of rounding and layout, on an odd and on an even shape.
            let rounding = [Rounding::Nearest, stochastic(&mut random)][index % 2];
            let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][index % 3];
            let spec = QuantizeSpec::new(number, Granularity::Tensor)
                .with_rounding(rounding)
                .with_layout(layout);
            for shape in [MatrixShape::new(67, 33), MatrixShape::batched(2, 80, 128)] {
                for (x, scale) in cases(&mut random, shape, number) {
                    let tensor =
                        upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
                    check(&client, &tensor, &x, shape, &spec, scale);
                }
            }
        }
    }

    /// Several tiles of bytes and several parts in a matrix, edges inside of them, and vectors of all widths.
    #[test]
    fn matrices_of_many_tiles() {
        let (client, mut random) = (client(), Random::fresh());
        let number = [Number::Int8, Number::E4M3, Number::E5M2][random.index(3)];
        for shape in [
            MatrixShape::batched(2, 144, 272),
            MatrixShape::batched(2, 130, 257),
        ] {
            let spec = QuantizeSpec::new(number, Granularity::Tensor)
                .with_rounding(stochastic(&mut random))
                .with_layout(Layout::Both);
            let mut x = random.with_outliers(shape.num_elements());
            let largest = random.index(x.len());
            x[largest] = -2e5;
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            check(&client, &tensor, &x, shape, &spec, 3.0 / number.largest());
        }
    }

    /// Whole tiles of FP8, for which a device may have kernels of its own, and matrices a little larger: in each layout
    /// and of each type, with and without a delayed maximum.
    #[test]
    fn whole_tiles_of_fp8() {
        let (client, mut random) = (client(), Random::fresh());
        let mut kernels = Vec::new();
        for number in [Number::E4M3, Number::E5M2] {
            for float in drawn(&mut random, float_types(&client), 1) {
                let layouts = [Layout::Both, Layout::RowMajor, Layout::Transposed];
                kernels.extend(layouts.map(|layout| (number, float, layout)));
            }
        }
        for (number, float, layout) in drawn(&mut random, kernels, 1) {
            let spec = QuantizeSpec::new(number, Granularity::Tensor).with_layout(layout);
            for shape in [
                MatrixShape::new(64, 128),
                MatrixShape::new(320, 384),
                MatrixShape::new(129, 256),
                MatrixShape::new(128, 264),
            ] {
                let mut cases = cases(&mut random, shape, number);
                let mut negative = cases[0].clone();
                negative.0[5] = -f32::NAN;
                cases.push(negative);
                cases.push((vec![1e-35; shape.num_elements()], 1.0));
                for (x, scale) in drawn(&mut random, cases, 2) {
                    let mut x = rounded(&x, float);
                    // CUDA's conversion from f16 drops the sign of NaN.
                    if float == dtype::<half::f16>() {
                        let nans = x.iter_mut().filter(|x| x.is_nan());
                        nans.for_each(|x| *x = f32::NAN);
                    }
                    for memory in [Memory::Contiguous, Memory::SlicedAligned] {
                        let tensor = upload_matrix(&client, &x, shape, float, memory);
                        check(&client, &tensor, &x, shape, &spec, scale);
                    }
                }
            }
        }
    }

    /// More maxima than the units of a cube read in one turn, of tiles and of parts.
    #[test]
    fn maxima_of_many_tiles() {
        let (client, mut random) = (client(), Random::fresh());
        if cfg!(feature = "cuda") {
            let shape = MatrixShape::new(64 * 33, 128 * 32);
            let spec = QuantizeSpec::new(Number::E5M2, Granularity::Tensor);
            let spec = spec.with_layout(Layout::Both);
            let mut x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
            x[shape.num_elements() - 1 - random.index(1000)] = 1e3;
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            check(&client, &tensor, &x, shape, &spec, 0.01);
        }
        let shape = MatrixShape::new(1_050_000, 1);
        let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
        for place in [shape.rows - 1, 9000 * 16, random.index(shape.rows)] {
            let mut x: Vec<f32> = (0..shape.rows).map(|_| random.normal()).collect();
            x[place] = 1e3;
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            check(&client, &tensor, &x, shape, &spec, 0.5);
        }
    }

    #[test]
    fn float_types_strides_and_empty_matrices() {
        let (client, mut random) = (client(), Random::fresh());
        let shape = MatrixShape::new(40, 67);
        let x = random.with_outliers(shape.num_elements());
        let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
        for float in drawn(&mut random, float_types(&client), 1) {
            let x = rounded(&x, float);
            for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
                let tensor = upload_matrix(&client, &x, shape, float, memory);
                check(&client, &tensor, &x, shape, &spec, 0.01);
            }
        }
        for shape in [vec![0, 40], vec![3, 0]] {
            let tensor = upload(&client, &[], &shape, dtype::<f32>());
            let shape = MatrixShape::new(shape[0], shape[1]);
            check(&client, &tensor, &[], shape, &spec, 0.5);
        }
    }

    #[test]
    fn rejects() {
        let client = client();
        let x = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
        let one = upload(&client, &[1.0], &[1], dtype::<f32>());
        let spec = QuantizeSpec::int8(Granularity::Tensor);
        let refused = |x: &Tensor, spec: &QuantizeSpec, scale: &Tensor| {
            quantize_by(&client, x, spec, scale).expect_err("bad input")
        };
        for spec in [
            spec.with_granularity(Granularity::Token),
            spec.with_scale(ScaleNumber::E8M0),
            spec.with_scale(ScaleNumber::E4M3),
            QuantizeSpec::new(Number::Square, Granularity::Tensor),
        ] {
            let error = refused(&x, &spec, &one);
            assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        }
        let error = refused(&x, &spec, &x);
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        let error = refused(&x, &spec, &upload_i32(&client, &[1], &[1]));
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        for (maxima, layer) in [(&one, 1), (&x, 0)] {
            let delayed = DelayedMaximum { maxima, layer };
            let error = quantize_delayed(&client, &x, &spec, delayed).expect_err("bad input");
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        }
    }
}
