//! All codes of the 8-bit floats, both ways, against tables computed in f64 from the definition of a float format.

use cubecl_kernels::float8::Float8;

use crate::random::Random;

const FORMATS: [(Float8, i32, i32); 2] = [(Float8::E4M3, 4, 3), (Float8::E5M2, 5, 2)];

/// The number of a code: `(-1)^s 2^(e - bias) (1 + m / 2^M)`, or for exponent 0 `(-1)^s 2^(1 - bias) m / 2^M`. OFP8
/// gives E5M2 the infinities and NaNs of IEEE 754, and E4M3 one NaN for each sign.
fn definition(code: u8, exponent_bits: i32, mantissa_bits: i32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = if code >> 7 == 1 { -1.0 } else { 1.0 };
    let exponent = i32::from(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = i32::from(code) & ((1 << mantissa_bits) - 1);
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let top = (1 << exponent_bits) - 1;
    if exponent_bits == 4 && exponent == top && mantissa == 7 {
        return f64::NAN;
    }
    if exponent_bits == 5 && exponent == top {
        return if mantissa == 0 {
            sign * f64::INFINITY
        } else {
            f64::NAN
        };
    }
    if exponent == 0 {
        sign * 2f64.powi(1 - bias) * fraction
    } else {
        sign * 2f64.powi(exponent - bias) * (1.0 + fraction)
    }
}

/// The code of the nearest finite number, of two equally near ones the even code; NaN is kept.
fn nearest(x: f32, exponent_bits: i32, mantissa_bits: i32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    // Beyond both formats, and so near that distances to their numbers still differ in f64.
    let x = f64::from(x.abs().min(1e9));
    (0..=0x7f)
        .filter(|&code| definition(code, exponent_bits, mantissa_bits).is_finite())
        .min_by(|&a, &b| {
            let distance = |code| (definition(code, exponent_bits, mantissa_bits) - x).abs();
            distance(a)
                .total_cmp(&distance(b))
                .then((a % 2).cmp(&(b % 2)))
        })
        .expect("finite numbers")
        | sign
}

/// Every number of the format, the midpoints between neighbours with their neighbours in f32, the ends, and numbers
/// of all magnitudes.
fn inputs(random: &mut Random, exponent_bits: i32, mantissa_bits: i32) -> Vec<f32> {
    let numbers: Vec<f64> = (0..=0x7f)
        .map(|code| definition(code, exponent_bits, mantissa_bits))
        .filter(|number| number.is_finite())
        .collect();
    let midpoints = numbers.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let mut x: Vec<f32> = numbers
        .iter()
        .copied()
        .chain(midpoints)
        .map(|x| x as f32)
        .collect();
    x.extend([
        464.0,
        480.0,
        61_440.0,
        65_536.0,
        1e-40,
        f32::MIN_POSITIVE,
        f32::MAX,
    ]);
    x.extend((0..4000).map(|_| (40.0 * random.uniform() - 20.0).exp2()));
    let near: Vec<f32> = x
        .iter()
        .flat_map(|x| [x.next_down().abs(), x.next_up()])
        .filter(|x| x.is_finite())
        .collect();
    x.extend(near);
    x.extend([f32::INFINITY, f32::NAN]);
    let negative: Vec<f32> = x.iter().map(|x| -x).collect();
    x.extend(negative);
    x
}

#[test]
fn decodes_every_code() {
    for (format, exponent_bits, mantissa_bits) in FORMATS {
        for code in 0..=255 {
            let expected = definition(code, exponent_bits, mantissa_bits);
            let actual = format.decode(code);
            let equal = f64::from(actual).to_bits() == expected.to_bits();
            assert!(
                equal || (actual.is_nan() && expected.is_nan()),
                "{format:?} {code:#x}: {actual} instead of {expected}"
            );
        }
    }
}

#[test]
fn encodes_every_number_and_the_nearest_otherwise() {
    for (format, exponent_bits, mantissa_bits) in FORMATS {
        for code in 0..=255 {
            let number = format.decode(code);
            if number.is_finite() {
                assert_eq!(format.encode(number), code, "{format:?}");
            }
        }
        for x in inputs(&mut Random::fresh(), exponent_bits, mantissa_bits) {
            let expected = nearest(x, exponent_bits, mantissa_bits);
            assert_eq!(format.encode(x), expected, "{format:?} of {x:e}");
        }
        assert_eq!(
            format.decode(format.encode(f32::INFINITY)),
            format.largest()
        );
        assert_eq!(format.decode(format.encode(f32::MIN)), -format.largest());
        assert!(format.decode(format.encode(-f32::NAN)).is_nan());
        assert_eq!(format.decode(1), format.smallest());
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl::std::tensor::TensorHandle;
    use cubecl_kernels::float8::{decode, encode};

    use super::*;
    use crate::device::{assert_same_floats, client, dtype, read, upload};

    #[test]
    fn decodes_and_encodes_like_the_host() {
        let client = client();
        for (format, exponent_bits, mantissa_bits) in FORMATS {
            let codes: Vec<u8> = (0..=255).collect();
            let handle = client.create_from_slice(&codes);
            let tensor = TensorHandle::new_contiguous(vec![256], handle, dtype::<u8>());
            let numbers = decode(&client, &tensor, format).expect("codes");
            let expected: Vec<f32> = codes.iter().map(|&code| format.decode(code)).collect();
            assert_same_floats(&read(&client, &numbers), &expected, "numbers");

            let x = inputs(&mut Random::fresh(), exponent_bits, mantissa_bits);
            let tensor = upload(&client, &x, &[x.len()], dtype::<f32>());
            let codes = encode(&client, &tensor, format).expect("floats");
            for (x, code) in x.iter().zip(read::<u8>(&client, &codes)) {
                assert_eq!(code, format.encode(*x), "{format:?} of {x:e}");
            }
            assert!(encode(&client, &codes, format).is_err());
            assert!(decode(&client, &tensor, format).is_err());
        }
    }
}
