//! Every code of every number, both ways, against tables computed in f64 from the definition of a format, and against
//! the reference; stochastic rounding draw by draw.

use cubecl_kernels::{
    number::{Minifloat, Number, Signedness},
    reference::number::Definition,
};
use rstest::rstest;

use crate::random::Random;

/// Exponent and mantissa bits.
const FLOATS: [(Minifloat, Number, i32, i32); 4] = [
    (Minifloat::E2M1, Number::E2M1, 2, 1),
    (Minifloat::E3M0, Number::E3M0, 3, 0),
    (Minifloat::E4M3, Number::E4M3, 4, 3),
    (Minifloat::E5M2, Number::E5M2, 5, 2),
];

const ALL: [Number; 10] = [
    Number::Int4,
    Number::Int8,
    Number::Int10,
    Number::E2M1,
    Number::E3M0,
    Number::E4M3,
    Number::E5M2,
    Number::DynamicExponent(Signedness::Signed),
    Number::DynamicExponent(Signedness::Unsigned),
    Number::Square,
];

/// The number of a code: `(-1)^s 2^(e - bias) (1 + m / 2^M)`, or for exponent 0 `(-1)^s 2^(1 - bias) m / 2^M`. OFP8
/// gives E5M2 the infinities and NaNs of IEEE 754, and E4M3 one NaN for each sign; OCP MX gives E2M1 neither.
fn definition(code: u32, exponent_bits: i32, mantissa_bits: i32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = if code >> (exponent_bits + mantissa_bits) == 1 {
        -1.0
    } else {
        1.0
    };
    let exponent = (code >> mantissa_bits) as i32 & ((1 << exponent_bits) - 1);
    let mantissa = code as i32 & ((1 << mantissa_bits) - 1);
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

/// Codes without a sign.
fn magnitudes(exponent_bits: i32, mantissa_bits: i32) -> std::ops::Range<u32> {
    0..1 << (exponent_bits + mantissa_bits)
}

/// The code of the nearest finite number, of two equally near ones the even code; NaN is kept where there is one, and
/// else becomes a zero.
fn nearest(x: f32, exponent_bits: i32, mantissa_bits: i32) -> u32 {
    let codes = magnitudes(exponent_bits, mantissa_bits);
    let sign = if x.is_sign_negative() { codes.end } else { 0 };
    let all_ones = codes.end - 1;
    if x.is_nan() {
        let has_nan = definition(all_ones, exponent_bits, mantissa_bits).is_nan();
        return sign | if has_nan { all_ones } else { 0 };
    }
    // Beyond all formats, and so near that distances to their numbers still differ in f64.
    let x = f64::from(x.abs().min(1e9));
    codes
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
    let numbers: Vec<f64> = magnitudes(exponent_bits, mantissa_bits)
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
        6.5,
        7.0,
        8.0,
        464.0,
        480.0,
        61_440.0,
        65_536.0,
        1e-40,
        f32::MIN_POSITIVE,
        f32::MAX,
    ]);
    x.extend((0..4000).map(|_| (40.0 * random.uniform() - 20.0).exp2()));
    with_neighbours(x)
}

/// All of these, their neighbours in f32, infinity and NaN, with both signs.
fn with_neighbours(mut x: Vec<f32>) -> Vec<f32> {
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
fn floats_decode_every_code() {
    for (format, number, exponent_bits, mantissa_bits) in FLOATS {
        for code in 0..2 * magnitudes(exponent_bits, mantissa_bits).end {
            let expected = definition(code, exponent_bits, mantissa_bits);
            for actual in [
                f64::from(format.decode(code as u8)),
                f64::from(number.decode(code)),
                Definition::of(number).value(code as i32),
            ] {
                let equal = actual.to_bits() == expected.to_bits();
                assert!(
                    equal || (actual.is_nan() && expected.is_nan()),
                    "{format:?} {code:#x}: {actual} instead of {expected}"
                );
            }
        }
    }
}

#[test]
fn floats_encode_every_number_and_the_nearest_otherwise() {
    for (format, number, exponent_bits, mantissa_bits) in FLOATS {
        for code in 0..2 * magnitudes(exponent_bits, mantissa_bits).end {
            let value = format.decode(code as u8);
            if value.is_finite() {
                assert_eq!(u32::from(format.encode(value)), code, "{format:?}");
            }
        }
        for x in inputs(&mut Random::fresh(), exponent_bits, mantissa_bits) {
            let expected = nearest(x, exponent_bits, mantissa_bits);
            assert_eq!(u32::from(format.encode(x)), expected, "{format:?} of {x:e}");
            assert_eq!(number.encode(x, None), expected, "{number:?} of {x:e}");
            let defined = Definition::of(number).code(x, None);
            assert_eq!(
                defined, expected as i32,
                "the reference's {number:?} of {x:e}"
            );
        }
        assert_eq!(
            format.decode(format.encode(f32::INFINITY)),
            format.largest()
        );
        assert_eq!(format.decode(format.encode(f32::MIN)), -format.largest());
        assert_eq!(format.decode(1), format.smallest());
    }
    for format in [Minifloat::E4M3, Minifloat::E5M2] {
        assert!(format.decode(format.encode(-f32::NAN)).is_nan());
    }
}

/// OCP Microscaling Formats, section 5.3.3.
#[test]
fn e2m1_is_eight_numbers_and_their_negatives() {
    let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for (code, number) in numbers.into_iter().enumerate() {
        assert_eq!(Minifloat::E2M1.decode(code as u8), number);
        assert_eq!(Minifloat::E2M1.decode(code as u8 | 8), -number);
    }
    for (tie, even) in [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
    ] {
        assert_eq!(Minifloat::E2M1.decode(Minifloat::E2M1.encode(tie)), even);
    }
}

#[test]
fn integers_are_all_of_their_range() {
    for (number, largest) in [(Number::Int4, 7), (Number::Int8, 127), (Number::Int10, 511)] {
        assert_eq!(number.largest(), largest as f32);
        for integer in -largest..=largest {
            let code = number.encode(integer as f32, None);
            assert!(code < 1 << number.bits());
            assert_eq!(number.decode(code), integer as f32);
            // Halves go to the even one of their two integers, their neighbours to the nearer one.
            let half = integer as f32 + 0.5;
            for x in [half, half.next_down(), half.next_up()] {
                let expected = x.round_ties_even().min(largest as f32);
                assert_eq!(
                    number.decode(number.encode(x, None)),
                    expected,
                    "{number:?} of {x}"
                );
                assert_eq!(Definition::of(number).code(x, None), expected as i32);
            }
        }
        for (x, expected) in [
            (1e30, largest),
            (f32::NEG_INFINITY, -largest),
            (f32::NAN, 0),
        ] {
            assert_eq!(number.decode(number.encode(x, None)), expected as f32);
            assert_eq!(Definition::of(number).code(x, None), expected);
        }
    }
}

/// No number that matrices can hold is left out of the list that tests go through.
#[test]
fn symmetric_numbers() {
    let symmetric = ALL.into_iter().filter(|number| number.is_symmetric());
    assert_eq!(symmetric.collect::<Vec<_>>(), Number::SYMMETRIC);
}

/// So many bits of a significand hold every number, and for the numbers of matrices one bit less does not.
#[test]
fn precision_is_that_of_the_longest_significand() {
    for number in ALL {
        let bits = |value: f32| match value.to_bits() & 0x007f_ffff {
            0 => 1,
            mantissa => f32::MANTISSA_DIGITS - mantissa.trailing_zeros(),
        };
        let finite = (0..1u32 << number.bits())
            .map(|code| number.decode(code))
            .filter(|value| value.is_finite());
        let longest = finite.map(bits).max().expect("there are numbers");
        match number.is_symmetric() {
            true => assert_eq!(number.precision(), longest, "{number:?}"),
            false => assert!(number.precision() >= longest, "{number:?}"),
        }
    }
}

/// The constants agree with the codes.
#[test]
fn largest_smallest_and_zero() {
    for number in ALL {
        let numbers: Vec<f32> = (0..1u32 << number.bits())
            .map(|code| number.decode(code))
            .filter(|number| number.is_finite())
            .collect();
        assert_eq!(
            numbers.iter().copied().fold(0.0, f32::max),
            number.largest()
        );
        let positive = numbers.iter().copied().filter(|&number| number > 0.0);
        assert_eq!(
            positive.fold(f32::MAX, f32::min),
            number.smallest(),
            "{number:?}"
        );
        assert_eq!(number.decode(number.zero()), 0.0);
        assert_eq!(number.encode(0.0, None), number.zero());
        assert_eq!(
            number.decode(number.encode(f32::INFINITY, None)),
            number.largest()
        );
        let nan = number.decode(number.encode(f32::NAN, None));
        let has_nan = matches!(number, Number::E4M3 | Number::E5M2);
        assert!(
            if has_nan { nan.is_nan() } else { nan == 0.0 },
            "{number:?}"
        );
    }
}

/// The sign of a zero is kept by floats, where it has a code.
#[test]
fn signed_zeros() {
    for (format, _, exponent_bits, mantissa_bits) in FLOATS {
        let sign = magnitudes(exponent_bits, mantissa_bits).end;
        for x in [-0.0, -1e-30] {
            assert_eq!(u32::from(format.encode(x)), sign);
            assert_eq!(u32::from(format.encode_stochastic(x, 0.0)), sign);
        }
        assert!(format.decode(sign as u8).is_sign_negative());
    }
    for number in [Number::Int4, Number::Int8, Number::Int10] {
        assert_eq!(number.encode(-0.0, None), 0);
    }
}

/// All random numbers of 15 bits.
fn dithers() -> impl Iterator<Item = f32> {
    (0..1 << 15).map(|bits| bits as f32 / 32_768.0)
}

/// Values inside the range, at its ends, at numbers, and below the smallest ones.
fn scaled_values(random: &mut Random, number: Number) -> Vec<f32> {
    let largest = number.largest();
    let mut x: Vec<f32> = (0..40)
        .map(|_| largest * (2.0 * random.uniform() - 1.0))
        .collect();
    x.extend((0..40).map(|_| number.smallest() * 4.0 * random.normal()));
    x.extend([
        largest,
        -largest,
        largest.next_up(),
        largest * 1e6,
        0.0,
        -0.0,
    ]);
    x.extend([1e-30, number.smallest() * 1e-3, f32::INFINITY, f32::NAN]);
    x
}

/// Every draw of every value is the one that the reference defines, and one of the two numbers around the value.
#[rstest]
fn stochastic_codes_equal_the_reference(#[values(0, 1, 2, 3, 4, 5, 6)] index: usize) {
    let number = Number::SYMMETRIC[index];
    let defined = Definition::of(number);
    let mask = (1i32 << number.bits()) - 1;
    for x in scaled_values(&mut Random::fresh(), number) {
        let within = x.clamp(-number.largest(), number.largest());
        let codes: Vec<u32> = dithers().map(|u| number.encode(x, Some(u))).collect();
        for (u, &code) in dithers().zip(&codes) {
            let expected = defined.code(x, Some(u)) & mask;
            assert_eq!(code as i32, expected, "{number:?} of {x:e} with {u}");
        }
        if x.is_nan() {
            continue;
        }
        let value = |code: u32| number.decode(code);
        let (low, high) = codes
            .iter()
            .fold((f32::MAX, f32::MIN), |(low, high), &code| {
                (low.min(value(code)), high.max(value(code)))
            });
        let (below, above) = around(number, within);
        assert!(
            low >= below && high <= above,
            "{number:?}: {x:e} became {low} to {high}"
        );
    }
}

/// The mean over all 2^15 random numbers is the value, but for what their coarseness may shift it: 2^-16 of the
/// distance between the two numbers for floats, and twice that for integers, whose sums are rounded too.
#[test]
fn stochastic_codes_are_unbiased() {
    let mut random = Random::fresh();
    for number in Number::SYMMETRIC {
        for _ in 0..200 {
            let x = number.largest() * (2.0 * random.uniform() - 1.0) * random.uniform();
            let draws: Vec<f64> = dithers()
                .map(|u| f64::from(number.decode(number.encode(x, Some(u)))))
                .collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            // Between the numbers around x, even where no random number is small enough to reach the farther one; or, of
            // a number itself, to the one that a rounded sum reaches.
            let (below, above) = around(number, x);
            let lowest = draws.iter().copied().fold(f64::from(below), f64::min);
            let highest = draws.iter().copied().fold(f64::from(above), f64::max);
            let coarseness = 2f64.powi(if number == Number::Int10 { -14 } else { -15 });
            let off = (mean - f64::from(x)).abs();
            assert!(
                off <= coarseness * (highest - lowest),
                "{number:?}: {x:e} has mean {mean:e}"
            );
        }
    }
}

/// The numbers around a value, its own twice if it is one.
fn around(number: Number, x: f32) -> (f32, f32) {
    let numbers = (0..1u32 << number.bits()).map(|code| number.decode(code));
    numbers.fold((f32::MIN, f32::MAX), |(below, above), value| {
        (
            if value <= x { below.max(value) } else { below },
            if value >= x { above.min(value) } else { above },
        )
    })
}

/// Independent draws go up as often as they should.
#[test]
fn random_draws_are_unbiased() {
    let mut random = Random::fresh();
    for number in ALL {
        for _ in 0..8 {
            let x = number.largest() * (0.05 + 0.9 * random.uniform());
            let (below, above) = around(number, x);
            let (step, count) = (f64::from(above - below), 40_000);
            let sum: f64 = (0..count)
                .map(|_| (random.uniform() * 32_768.0).floor() / 32_768.0)
                .map(|u| number.decode(number.encode(x, Some(u))))
                .inspect(|&draw| assert!(draw == below || draw == above, "{number:?}: {x}"))
                .map(f64::from)
                .sum();
            let off = (sum / f64::from(count) - f64::from(x)).abs();
            let fraction = f64::from(x - below) / step.max(f64::MIN_POSITIVE);
            let deviation = step * (fraction * (1.0 - fraction) / f64::from(count)).sqrt();
            // Beside five deviations, what 15 bits cannot tell.
            let limit = 5.0 * deviation + step * 2f64.powi(-14);
            assert!(off <= limit, "{number:?}: {x} is {off} off its mean");
        }
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl::std::tensor::TensorHandle;
    use cubecl_kernels::number::codes::{decode, encode};

    use super::*;
    use crate::device::{assert_same_floats, client, dtype, read, upload};

    #[test]
    fn decodes_and_encodes_like_the_host() {
        let client = client();
        for (format, _, exponent_bits, mantissa_bits) in FLOATS {
            let codes: Vec<u8> = (0..2 * magnitudes(exponent_bits, mantissa_bits).end)
                .map(|code| code as u8)
                .collect();
            let handle = client.create_from_slice(&codes);
            let tensor = TensorHandle::new_contiguous(vec![codes.len()], handle, dtype::<u8>());
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
