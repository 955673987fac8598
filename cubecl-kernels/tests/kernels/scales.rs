//! Scales against what OCP's and NVIDIA's papers say of them, and the errors that they lead to.

use cubecl_kernels::{
    granularity::Granularity,
    host::{self, HostScales, HostValues},
    number::Number,
    quantize::QuantizeSpec,
    reference::{self, ReferenceQuantized},
    rounding::{Rounding, StochasticKey},
    scale::{MIN_ABSMAX, ScaleNumber},
    shape::MatrixShape,
};
use rstest::rstest;

use crate::random::Random;

/// The reference's matrix, after a look at the host's.
fn quantize(x: &[f32], shape: MatrixShape, spec: &QuantizeSpec) -> ReferenceQuantized {
    let expected = reference::quantize(x, shape, spec);
    let got = host::quantize(x, [shape.rows, shape.cols], spec).expect("a matrix");
    match &got.scales {
        HostScales::F32(_) => {}
        HostScales::E8M0(bytes) | HostScales::E4M3 { scales: bytes, .. } => {
            assert_eq!(bytes[..], expected.scale_bytes);
        }
    }
    expected
}

/// The byte of a group whose largest magnitude this is.
fn e8m0(number: Number, absmax: f32) -> u8 {
    let mut x = [0.0; 32];
    x[17] = -absmax;
    x[3] = absmax * 0.3;
    let spec = QuantizeSpec::new(number, Granularity::Group(32)).with_scale(ScaleNumber::E8M0);
    let quantized = quantize(&x, MatrixShape::new(1, 32), &spec);
    let values = reference::dequantize(&quantized);
    match quantized.scale_bytes[0] {
        0 => assert_eq!(values, [0.0; 32]),
        255 => assert!(values.iter().all(|value| value.is_nan())),
        byte => {
            assert_eq!(quantized.scales[0], 2f32.powi(i32::from(byte) - 127));
            // Nothing is cut off: the largest magnitude comes back to half of the largest distance between numbers.
            let distance = match number {
                Number::E2M1 => 2.0,
                Number::E3M0 => 8.0,
                Number::E4M3 => 32.0,
                Number::E5M2 => 8192.0,
                Number::Int4
                | Number::Int8
                | Number::Int10
                | Number::DynamicExponent(_)
                | Number::Square => 1.0,
            };
            let off = (values[17] + absmax).abs();
            assert!(
                off <= 0.5 * distance * quantized.scales[0],
                "{number:?} {absmax}"
            );
        }
    }
    quantized.scale_bytes[0]
}

/// RCEIL of the notes: the power of two that is at least the quotient.
#[test]
fn mx_bytes() {
    for (number, absmax, byte) in [
        (Number::E4M3, 448.0, 127),
        (Number::E4M3, 449.0, 128),
        (Number::E4M3, 448.0f32.next_up(), 128),
        (Number::E4M3, 224.0, 126),
        (Number::E4M3, 150.0, 126),
        (Number::E4M3, 7.0, 121),
        (Number::E4M3, 7.0f32.next_up(), 122),
        (Number::E4M3, 6.0, 121),
        (Number::E2M1, 448.0, 134),
        (Number::E2M1, 150.0, 132),
        (Number::E2M1, 7.0, 128),
        (Number::E2M1, 6.0, 127),
        (Number::E2M1, 6.0f32.next_up(), 128),
        (Number::E2M1, 3.0, 126),
        (Number::E5M2, 57_344.0, 127),
        (Number::E5M2, 448.0, 120),
        (Number::Int4, 7.0, 127),
        (Number::Int8, 127.0, 127),
        (Number::Int8, 128.0, 128),
    ] {
        assert_eq!(e8m0(number, absmax), byte, "{number:?} {absmax}");
    }
    for number in [Number::E4M3, Number::E2M1, Number::E5M2, Number::Int4] {
        for tiny in [0.0, 1e-40, 2f32.powi(-130), MIN_ABSMAX.next_down()] {
            assert_eq!(e8m0(number, tiny), 0);
        }
        for not_finite in [f32::INFINITY, f32::NAN] {
            assert_eq!(e8m0(number, not_finite), 255);
        }
        assert!((12..=27).contains(&e8m0(number, MIN_ABSMAX)));
        assert!((239..=253).contains(&e8m0(number, 0.75 * f32::MAX)));
        // The largest magnitude of all may be rounded up to infinity, but neither its scale nor the inverse is
        // subnormal.
        let spec = QuantizeSpec::new(number, Granularity::Tensor).with_scale(ScaleNumber::E8M0);
        let quantized = quantize(&[f32::MAX], MatrixShape::new(1, 1), &spec);
        assert!((239..=253).contains(&quantized.scale_bytes[0]));
    }
}

/// A group of zeros stays zeros, and one with NaN or an infinity becomes NaN alone, its neighbours keeping the tensor
/// scale that they have without it.
#[rstest]
fn nvfp4_of_special_groups(#[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] special: f32) {
    let mut random = Random::fresh();
    let shape = MatrixShape::new(4, 64);
    let mut x: Vec<f32> = (0..256).map(|_| random.normal()).collect();
    x[16..32].fill(0.0);
    // The first group of the second row.
    x[64..80].fill(1e-3);
    let without = quantize(&x, shape, &QuantizeSpec::NVFP4);
    x[70] = special;
    let quantized = quantize(&x, shape, &QuantizeSpec::NVFP4);
    assert_eq!(quantized.tensor_scales, without.tensor_scales);
    assert_eq!(quantized.scale_bytes[1], 0);
    assert_eq!(quantized.scale_bytes[4], 0x7f);
    for (index, value) in reference::dequantize(&quantized).into_iter().enumerate() {
        match index {
            16..32 => assert_eq!(value, 0.0),
            64..80 => assert!(value.is_nan()),
            _ => assert!(
                (value - x[index]).abs() <= 0.3 * x[index].abs().max(1.0),
                "{index}"
            ),
        }
    }
    let absmax = reference::absmax(x.iter().copied().filter(|x| x.is_finite()));
    assert_eq!(quantized.tensor_scales, [absmax / (6.0 * 448.0)]);
    // The largest group has the largest scale.
    assert!(quantized.scale_bytes.contains(&0x7e));
}

/// A tensor scale of 0 for matrices of zeros, of NaN alone, and of what is too small.
#[test]
fn nvfp4_of_nothing() {
    let shape = MatrixShape::new(2, 16);
    for (fill, byte) in [(0.0, 0), (1e-38, 0), (f32::NAN, 0x7f)] {
        let quantized = quantize(&[fill; 32], shape, &QuantizeSpec::NVFP4);
        assert_eq!(quantized.tensor_scales, [0.0]);
        assert_eq!(quantized.scale_bytes, [byte; 2]);
        assert!(quantized.values.iter().all(|&code| code == 0));
    }
    // Groups 2^20 apart: the scale of the smaller one is 0, and its values are.
    let mut x = [1.0; 32];
    x[16..].fill(1e-6);
    let quantized = quantize(&x, shape, &QuantizeSpec::NVFP4);
    assert_eq!(quantized.scale_bytes, [0x7e, 0]);
    assert_eq!(reference::dequantize(&quantized)[16..], [0.0; 16]);
}

fn relative_error(x: &[f32], spec: &QuantizeSpec) -> f64 {
    let shape = [x.len() / 1024, 1024];
    let quantized = host::quantize(x, shape, spec).expect("a matrix");
    let back = host::dequantize(&quantized).expect("what was quantized");
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let error = squares(&mut x.iter().zip(&back).map(|(x, y)| f64::from(x - y)));
    error / squares(&mut x.iter().map(|&x| f64::from(x)))
}

/// The mean square errors of Gaussian matrices, as the literature's are recomputed in our notes.
#[test]
fn gaussian_errors() {
    let mut random = Random::fresh();
    let x: Vec<f32> = (0..1 << 20).map(|_| random.normal()).collect();
    let stochastic = Rounding::Stochastic(StochasticKey { seed: 1, stream: 2 });
    for (name, spec, expected) in [
        ("MXFP8", QuantizeSpec::MXFP8, 7.0e-4),
        ("MXFP4", QuantizeSpec::MXFP4, 1.33e-2),
        ("NVFP4", QuantizeSpec::NVFP4, 9.0e-3),
        (
            "NVFP4, stochastic",
            QuantizeSpec::NVFP4.with_rounding(stochastic),
            1.9e-2,
        ),
    ] {
        let error = relative_error(&x, &spec);
        println!("{name}: {error:.3e}");
        assert!(
            (error / expected - 1.0).abs() < 0.04,
            "{name}: {error:e} instead of {expected:e}"
        );
    }
}

/// Two codes in a byte, the even element in the low nibble.
#[test]
fn nibbles() {
    let x = [1.0, -6.0, 0.5, 3.0, -2.0];
    let spec = QuantizeSpec::new(Number::E2M1, Granularity::Tensor);
    let quantized = host::quantize(&x, [1, 5], &spec).expect("a matrix");
    let HostValues::U8(bytes) = quantized.values else {
        panic!("two codes in a byte");
    };
    assert_eq!(bytes[..], [0xf2, 0x51, 0x0c]);
    let spec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);
    let quantized = host::quantize(&[1.0, -7.0, 6.0], [1, 3], &spec).expect("a matrix");
    let HostValues::U8(bytes) = quantized.values else {
        panic!("two codes in a byte");
    };
    assert_eq!(bytes[..], [0x91, 0x06]);
}
