//! Compressed moments: what holds of the formats by definition, and the kernels against the reference.

use cubecl_kernels::{
    dynamic_range_expansion::{contract, expand, exponent},
    number::Signedness,
    optimizer_state::{Encoding, MIN_NONZERO, Moment, StateFormat},
    reference::optimizer_state::{HostState, dequantize_state, quantize_state},
    scale::MIN_ABSMAX,
};

use crate::random::Random;

const ENCODINGS: [Encoding; 4] = [
    Encoding::E4M3,
    Encoding::E5M2,
    Encoding::DynamicExponent,
    Encoding::Int8,
];
const MOMENTS: [Moment; 2] = [Moment::First, Moment::Second];

/// Every encoding with and without expansion, for both moments.
pub fn formats(group: usize) -> impl Iterator<Item = (StateFormat, Moment)> {
    ENCODINGS.into_iter().flat_map(move |encoding| {
        [false, true].into_iter().flat_map(move |expand| {
            MOMENTS.into_iter().map(move |moment| {
                let format = StateFormat {
                    encoding,
                    expand,
                    group,
                };
                (format, moment)
            })
        })
    })
}

/// A moment of gradients whose magnitudes spread over `2^spread`, the largest about `scale`.
pub fn moment_values(
    random: &mut Random,
    count: usize,
    moment: Moment,
    scale: f32,
    spread: f32,
) -> Vec<f32> {
    (0..count)
        .map(|_| {
            let x = scale * (-spread * random.uniform()).exp2();
            match moment {
                Moment::First if random.uniform() < 0.5 => -x,
                _ => x,
            }
        })
        .collect()
}

/// A moment of assorted groups: of many spreads and magnitudes, of zeros, of one value, and not finite.
fn assorted(random: &mut Random, count: usize, group: usize, moment: Moment) -> Vec<f32> {
    let mut x = Vec::with_capacity(count);
    while x.len() < count {
        let scale = 10f32.powf(60.0 * random.uniform() - 30.0);
        let spread = 30.0 * random.uniform().powi(2);
        let mut values = moment_values(random, group, moment, scale, spread);
        let position = random.index(group);
        match random.index(12) {
            0 => values.fill(0.0),
            1 => values.fill(scale),
            2 => values.iter_mut().for_each(|x| *x *= 0.0),
            3 => values[position] = 0.0,
            4 => values[position] = f32::NAN,
            5 => values[position] = f32::INFINITY,
            6 => values.iter_mut().for_each(|x| *x = x.signum() * 1e-40),
            7 => values[position] = f32::MAX,
            8 => values[position] = MIN_NONZERO * 0.9,
            _ => {}
        }
        x.extend(values);
    }
    x.truncate(count);
    x
}

/// The code's place in ascending order of the numbers.
fn place(code: u8, format: StateFormat, moment: Moment) -> i32 {
    match (format.encoding, moment) {
        (Encoding::E4M3 | Encoding::E5M2, _) if code >= 0x80 => -i32::from(code & 0x7f),
        (Encoding::Int8, Moment::First) => i32::from(code as i8),
        _ => i32::from(code),
    }
}

#[test]
fn dynamic_exponent_is_the_map_of_its_definition() {
    for (signedness, first) in [(Signedness::Signed, 1), (Signedness::Unsigned, 2)] {
        let mut expected = vec![0.0, 1.0];
        for decade in 0..7 {
            let pieces = first << decade;
            for piece in 0..pieces {
                let middle = 0.1 + 0.9 * (f64::from(piece) + 0.5) / f64::from(pieces);
                let number = middle * 10f64.powi(decade - 6);
                expected.push(number);
                if signedness == Signedness::Signed {
                    expected.push(-number);
                }
            }
        }
        expected.sort_by(f64::total_cmp);
        let table = signedness.table();
        assert_eq!(expected.len(), 256);
        for (code, (actual, expected)) in table.iter().zip(&expected).enumerate() {
            let error = (f64::from(*actual) - expected).abs();
            assert!(
                error <= 2e-7 * expected.abs(),
                "{code}: {actual} instead of {expected}"
            );
            assert_eq!(usize::from(signedness.encode(*actual)), code);
        }
        assert!(table.is_sorted());
        assert_eq!(table[255], 1.0);
        assert_eq!(
            signedness.smallest(),
            *table.iter().find(|&&x| x > 0.0).expect("numbers")
        );
    }
}

#[test]
fn dynamic_exponent_takes_the_nearest() {
    let mut random = Random::fresh();
    for signedness in [Signedness::Signed, Signedness::Unsigned] {
        let table = signedness.table();
        let midpoints = table.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let mut x: Vec<f32> = midpoints
            .flat_map(|x| [x * 0.999_999, x * 1.000_001])
            .collect();
        x.extend((0..20_000).map(|_| {
            let magnitude = (-24.0 * random.uniform()).exp2();
            if random.uniform() < 0.5 {
                -magnitude
            } else {
                magnitude
            }
        }));
        if signedness == Signedness::Unsigned {
            x.retain(|&x| x >= 0.0);
        }
        for x in x {
            let nearest = table.iter().map(|y| (y - x).abs()).fold(f32::MAX, f32::min);
            let actual = signedness.decode(signedness.encode(x));
            assert!(
                (actual - x).abs() <= nearest + 1e-6 * x.abs(),
                "{signedness:?}: {x:e} became {actual:e}"
            );
        }
    }
}

/// The largest exponent on the grid that the group's range allows, up to the rounding of the logarithm at the grid's
/// points.
#[test]
fn exponents_round_down_to_the_grid() {
    let mut random = Random::fresh();
    for (format, moment) in formats(128) {
        let log2 = format.encoding.range_log2(moment);
        for _ in 0..2000 {
            let smallest = (200.0 * random.uniform() - 100.0).exp2();
            let range = (random.uniform().powi(3) * 24.0).exp2();
            let largest = smallest * range;
            let exact = 8.0 * f64::from(log2) / (f64::from(largest) / f64::from(smallest)).log2();
            let actual = f64::from(exponent(largest, smallest, log2));
            let tolerance = 1e-5 * exact.min(256.0);
            let (low, high) = (exact - tolerance, exact + tolerance);
            assert!(
                (low.floor().clamp(1.0, 255.0)..=high.floor().clamp(1.0, 255.0)).contains(&actual),
                "{actual} instead of {exact}"
            );
        }
        assert_eq!(exponent(3.0, 3.0, log2), 255);
        assert!(exponent(f32::MAX, MIN_NONZERO, log2) >= 1);
    }
}

/// The paper divides by `C = sqrt(smallest * largest)`, raises, divides by the scale `largest result / largest number`,
/// and encodes. In f64, where nothing overflows, that gives our codes.
#[test]
fn the_centring_constant_cancels() {
    let mut random = Random::fresh();
    let mut total = 0;
    let mut different = 0;
    for (format, moment) in formats(128).filter(|(format, _)| format.expand) {
        for spread in [0.1, 1.0, 4.0, 10.0, 20.0] {
            let x = moment_values(&mut random, 128, moment, 1e-9, spread);
            let state = quantize_state(&x, format, moment);
            let k = f64::from(state.exponents[0]) / 8.0;
            let magnitudes = || x.iter().map(|x| f64::from(x.abs()));
            let largest = magnitudes().fold(0.0, f64::max);
            let smallest = magnitudes().fold(f64::MAX, f64::min);
            let centre = (smallest * largest).sqrt();
            let raised = |x: f32| {
                let sign = if x < 0.0 { -1.0 } else { 1.0 };
                sign * (f64::from(x.abs()) / centre).powf(k)
            };
            let number = f64::from(format.encoding.largest(moment));
            let scale = (largest / centre).powf(k) / number;
            let raised: Vec<f32> = x.iter().map(|&x| (raised(x) / scale) as f32).collect();
            // The same numbers without expansion, in a group whose scale is 1.
            let plain = StateFormat {
                expand: false,
                ..format
            };
            let expected = quantize_state(&raised, plain, moment);
            for ((actual, expected), x) in state.codes.iter().zip(&expected.codes).zip(&x) {
                let distance =
                    (place(*actual, format, moment) - place(*expected, format, moment)).abs();
                assert!(distance <= 1, "{format:?}, {moment:?}: {x:e}");
                total += 1;
                different += distance;
            }
            let values = dequantize_state(&state, format, moment);
            for ((&code, &value), &x) in state.codes.iter().zip(&values).zip(&x) {
                let unit = dequantize_state(
                    &HostState {
                        codes: vec![code],
                        scales: vec![1.0],
                        exponents: vec![],
                    },
                    plain,
                    moment,
                )[0];
                let magnitude = (f64::from(unit.abs()) * scale).powf(1.0 / k) * centre;
                let error = (f64::from(value.abs()) - magnitude).abs();
                assert!(
                    error <= 1e-5 * magnitude,
                    "{format:?}: {x:e} became {value:e}"
                );
            }
        }
    }
    println!("{different} of {total} codes differ");
    assert!(
        different * 500 < total,
        "{different} of {total} codes differ"
    );
}

/// Half the gap between neighbouring numbers of the encoding around `y`, which is a magnitude in units of the scale.
fn half_gap(y: f32, encoding: Encoding, moment: Moment) -> f32 {
    match encoding {
        Encoding::E4M3 => (y / 16.0).max(1.0 / 1024.0),
        Encoding::E5M2 => (y / 8.0).max(1.0 / 131_072.0),
        // Where a decade ends the gap is the larger one of the next.
        Encoding::DynamicExponent => {
            let pieces = if moment == Moment::First { 1.0 } else { 2.0 };
            let decade = y.log10().floor().clamp(-6.0, -1.0);
            let gap =
                |decade: f32| 0.9 * 10f32.powf(decade + 1.0) / (pieces * (decade + 6.0).exp2());
            gap(decade).max(if decade < -1.0 {
                gap(decade + 1.0) * 0.55
            } else {
                0.0
            }) * 0.51
        }
        Encoding::Int8 if moment == Moment::First => 0.5,
        // (level + 1/2)^2 - level^2, from the root of y.
        Encoding::Int8 => y.sqrt() + 0.5,
    }
}

/// Without expansion: half a gap of the encoding, and never zero for a second moment that is not.
#[test]
fn errors_are_half_a_gap() {
    let mut random = Random::fresh();
    for (format, moment) in formats(128).filter(|(format, _)| !format.expand) {
        for scale in [1e-30, 1e-9, 1.0, 1e30] {
            for spread in [0.0, 2.0, 8.0, 30.0] {
                let x = moment_values(&mut random, 1000, moment, scale, spread);
                let state = quantize_state(&x, format, moment);
                let back = dequantize_state(&state, format, moment);
                for (index, (&x, &y)) in x.iter().zip(&back).enumerate() {
                    let step = state.scales[index / 128];
                    if step == 0.0 || x.abs() < MIN_NONZERO {
                        assert!(x.abs() < MIN_ABSMAX && y == 0.0);
                        continue;
                    }
                    // -1 is not among the numbers of the dynamic exponent.
                    let bound = half_gap(x.abs() / step, format.encoding, moment) * 1.001
                        + if x < 0.0 && format.encoding == Encoding::DynamicExponent {
                            0.0036
                        } else {
                            0.0
                        };
                    let smallest = format.encoding.smallest(moment);
                    let floor = if moment == Moment::Second && x.abs() < step * smallest {
                        smallest
                    } else {
                        0.0
                    };
                    assert!(
                        (x - y).abs() <= bound.max(floor) * step,
                        "{format:?}, {moment:?}: {x:e} became {y:e}, step {step:e}"
                    );
                    assert!(moment == Moment::First || y > 0.0, "{x:e} became zero");
                }
            }
        }
    }
}

/// With expansion every value of the group is among the normal numbers: the relative error is that of the format, 1/16
/// or 1/8, divided by `k`, however narrow or wide the group. Only the smallest values may meet the subnormal numbers.
#[test]
fn expansion_divides_the_relative_error_by_k() {
    let mut random = Random::fresh();
    for (encoding, half_gap, subnormal) in [
        (Encoding::E4M3, 1.0 / 16.0, 6.0),
        (Encoding::E5M2, 1.0 / 8.0, 14.0),
    ] {
        for moment in MOMENTS {
            let format = StateFormat {
                encoding,
                expand: true,
                group: 128,
            };
            for (scale, spread) in [(1e-12, 0.3), (1e-7, 1.0), (1.0, 3.0), (1e25, 9.0)] {
                let x = moment_values(&mut random, 640, moment, scale, spread);
                let state = quantize_state(&x, format, moment);
                let back = dequantize_state(&state, format, moment);
                for (index, (&x, &y)) in x.iter().zip(&back).enumerate() {
                    let k = f64::from(state.exponents[index / 128]) / 8.0;
                    let base = f64::from(x.abs()) / f64::from(state.scales[index / 128]);
                    let log2 = base.log2() * k + f64::from(encoding.largest(moment)).log2();
                    if log2 < -subnormal {
                        continue;
                    }
                    let error = f64::from((x - y).abs() / x.abs());
                    let bound = (1.0 + half_gap * 1.07f64).powf(1.0 / k) - 1.0;
                    assert!(
                        error <= bound * 1.001 + 1e-6,
                        "{format:?}: {x:e} became {y:e}, k {k}"
                    );
                }
            }
        }
    }
}

/// Expansion of the dynamic exponent pays where the values of a group have one deviation, as in coat-fp8, table 9, and
/// costs where deviations spread: the format halves its precision with each decade below the largest value, and
/// expansion doubles the decades.
#[test]
fn expansion_of_the_dynamic_exponent_pays_in_even_groups() {
    let mut random = Random::fresh();
    let mut ratio = |spread: f32| -> f32 {
        let deviations: Vec<f32> = (0..128 * 200)
            .map(|_| (spread * random.normal()).exp())
            .collect();
        let x: Vec<f32> = deviations
            .iter()
            .map(|deviation| deviation * random.normal())
            .collect();
        let error = |format: StateFormat| -> f32 {
            let state = quantize_state(&x, format, Moment::First);
            let back = dequantize_state(&state, format, Moment::First);
            let errors = back.iter().zip(&x).zip(&deviations);
            errors
                .map(|((back, x), deviation)| ((back - x) / deviation).powi(2))
                .sum()
        };
        error(StateFormat::DYNAMIC_EXPONENT.expanded()) / error(StateFormat::DYNAMIC_EXPONENT)
    };
    let (even, spread) = (ratio(0.0), ratio(1.5));
    println!("expansion multiplies the error by {even}, where deviations spread by {spread}");
    assert!(even < 0.9 && spread > 1.1);
}

/// Signs and order are kept, and no finite input gives NaN.
#[test]
fn order_and_signs() {
    let mut random = Random::fresh();
    for (format, moment) in formats(128) {
        let x = assorted(&mut random, 128 * 60, 128, moment);
        let state = quantize_state(&x, format, moment);
        let back = dequantize_state(&state, format, moment);
        for (x, y) in x.chunks(128).zip(back.chunks(128)) {
            let finite = x.iter().all(|x| x.is_finite());
            assert!(
                y.iter().all(|y| y.is_nan() != finite),
                "{format:?}: {x:?} became {y:?}"
            );
            if !finite {
                continue;
            }
            let mut pairs: Vec<(f32, f32)> = x.iter().copied().zip(y.iter().copied()).collect();
            pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
            for pair in pairs.windows(2) {
                assert!(pair[0].1 <= pair[1].1, "{format:?}, {moment:?}: {pair:?}");
            }
            assert!(
                pairs
                    .iter()
                    .all(|&(x, y)| x * y >= 0.0 && (x != 0.0 || y == 0.0))
            );
            let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let kept = y.iter().fold(0f32, |largest, y| largest.max(y.abs()));
            if largest >= MIN_ABSMAX {
                // The dynamic exponent's most negative number is -0.99297, which a small k takes further away.
                let short = format.encoding == Encoding::DynamicExponent && moment == Moment::First;
                let bound = if short { 0.94 } else { 0.999_999 };
                assert!(kept <= largest * 1.000_001, "{largest:e} {kept:e}");
                assert!(kept >= largest * bound, "{largest:e} {kept:e}");
            } else {
                assert_eq!(kept, 0.0);
            }
        }
    }
}

/// The values of a state quantize to the same codes, and these to the same values up to rounding. Two exceptions follow
/// from the formats: the dynamic exponent has no -1, so a group whose largest magnitude is negative shrinks by 0.7% and
/// the others move against the new scale; and with expansion the smallest magnitude may have moved, so that the group
/// gets another `k`. With the old `k` the codes stay; with the new one the values stay within the error of one
/// quantization.
#[test]
fn quantizing_twice_changes_nothing() {
    let mut random = Random::fresh();
    for (format, moment) in formats(128) {
        for spread in [0.5, 4.0, 12.0] {
            let mut x = moment_values(&mut random, 128 * 8, moment, 1e-6, spread);
            x.iter_mut().step_by(128).for_each(|x| *x = 1.5e-6);
            let first = quantize_state(&x, format, moment);
            let back = dequantize_state(&first, format, moment);
            let second = quantize_state(&back, format, moment);
            for group in 0..8 {
                let codes = |state: &HostState| state.codes[group * 128..][..128].to_vec();
                if !format.expand || first.exponents[group] == second.exponents[group] {
                    assert_eq!(codes(&first), codes(&second), "{format:?}, {moment:?}");
                    continue;
                }
                let largest = format.encoding.largest(moment);
                let plain = StateFormat {
                    expand: false,
                    ..format
                };
                let raised: Vec<f32> = back[group * 128..][..128]
                    .iter()
                    .map(|x| {
                        let base = (x.abs() / first.scales[group]).min(1.0);
                        (expand(base, first.exponents[group]) * largest).copysign(*x)
                    })
                    .collect();
                let again = quantize_state(&raised, plain, moment);
                assert_eq!(
                    codes(&first),
                    again.codes,
                    "{format:?}, {moment:?} with the first k"
                );
            }
        }
    }
}

#[test]
fn powers_are_inverse() {
    let mut random = Random::fresh();
    for _ in 0..2000 {
        let exponent = 1 + random.index(255) as u8;
        let base = (-20.0 * random.uniform()).exp2();
        let raised = expand(base, exponent);
        if raised > 1e-30 {
            let back = contract(raised, exponent);
            assert!(
                (back - base).abs() <= 3e-4 * base,
                "{base:e}, {exponent}: {back:e}"
            );
        }
    }
    assert_eq!(expand(0.0, 9), 0.0);
    assert_eq!(expand(1.0, 255), 1.0);
    assert_eq!(contract(0.0, 1), 0.0);
}

#[test]
fn bytes_of_a_state() {
    let coat = StateFormat {
        encoding: Encoding::E4M3,
        expand: true,
        group: 128,
    };
    assert_eq!(coat.groups(129), 2);
    assert_eq!(coat.bytes(1 << 20), (1 << 20) + 5 * (1 << 13));
    assert!(2.0 * coat.bytes(1 << 20) as f64 / f64::from(1 << 20) <= 2.15);
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::optimizer_state::{
        StateTensor, dequantize_state as dequantize_on_device, initial_state,
        quantize_state as quantize_on_device,
    };

    use super::*;
    use crate::device::{
        Client, TestRuntime, assert_same_floats, client, drawn, dtype, read, read_float, upload,
    };

    /// The host's copy of a state.
    fn download(client: &Client, state: &StateTensor<TestRuntime>) -> HostState {
        HostState {
            codes: read(client, &state.values),
            scales: read(client, state.scales.as_ref().expect("scales")),
            exponents: state
                .exponents
                .as_ref()
                .map(|exponents| read(client, exponents))
                .unwrap_or_default(),
        }
    }

    #[test]
    fn kernels_equal_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let mut expanded = (0, 0);
        for (group, len) in [
            (128, 4097),
            (256, 1),
            (2048, 5000),
            (100, 1203),
            (4, 66),
            (128, 8192),
        ] {
            for (format, moment) in drawn(&mut random, formats(group), 2) {
                let x = assorted(&mut random, len, group, moment);
                let what = format!("{format:?}, {moment:?}, {len}");
                let expected = quantize_state(&x, format, moment);
                let tensor = upload(&client, &x, &[len], dtype::<f32>());
                let state = quantize_on_device(&client, &tensor, format, moment).expect("floats");
                let actual = download(&client, &state);
                assert_same_floats(&actual.scales, &expected.scales, &format!("{what}: scales"));
                assert_eq!(actual.exponents, expected.exponents, "{what}: exponents");
                if format.expand {
                    for (index, (a, e)) in actual.codes.iter().zip(&expected.codes).enumerate() {
                        let distance =
                            (place(*a, format, moment) - place(*e, format, moment)).abs();
                        assert!(
                            distance <= 1,
                            "{what}[{index}]: {a} instead of {e}, {:e}",
                            x[index]
                        );
                        expanded.0 += distance;
                        expanded.1 += 1;
                    }
                } else {
                    assert_eq!(actual.codes, expected.codes, "{what}: codes");
                }
                let back = dequantize_on_device(&client, &state).expect("a state");
                let back = read_float(&client, &back);
                let host = dequantize_state(&actual, format, moment);
                if format.expand {
                    for (index, (a, e)) in back.iter().zip(&host).enumerate() {
                        let same = a.is_nan() && e.is_nan();
                        assert!(
                            same || (a - e).abs() <= 2e-5 * e.abs(),
                            "{what}[{index}]: {a:e} {e:e}"
                        );
                    }
                } else {
                    assert_same_floats(&back, &host, &what);
                }
            }
        }
        println!(
            "{} of {} codes with expansion differ",
            expanded.0, expanded.1
        );
        assert!(
            expanded.0 * 500 < expanded.1,
            "{} of {}",
            expanded.0,
            expanded.1
        );
    }

    /// Cubes that fill tables take several tiles of a large tensor, here of 1024 elements.
    #[test]
    fn kernels_equal_the_reference_in_many_tiles() {
        let (client, mut random) = (client(), Random::fresh());
        let format = StateFormat::DYNAMIC_EXPONENT.with_group(4);
        let x = assorted(&mut random, 1100 * 1024 + 5, format.group, Moment::First);
        let expected = quantize_state(&x, format, Moment::First);
        let x = upload(&client, &x, &[x.len()], dtype::<f32>());
        let state = quantize_on_device(&client, &x, format, Moment::First).expect("floats");
        let actual = download(&client, &state);
        assert_same_floats(&actual.scales, &expected.scales, "scales");
        assert!(actual.codes == expected.codes, "codes");
        let back = dequantize_on_device(&client, &state).expect("a state");
        let expected = dequantize_state(&expected, format, Moment::First);
        assert_same_floats(&read_float(&client, &back), &expected, "values");
    }

    #[test]
    fn initial_states_are_zero() {
        let client = client();
        for (format, moment) in formats(128) {
            for shape in [vec![0], vec![3, 43], vec![256]] {
                let state = initial_state(&client, &shape, Some(format), moment).expect("a group");
                let values = dequantize_on_device(&client, &state).expect("a state");
                assert_eq!(values.shape().to_vec(), shape);
                assert!(
                    read_float(&client, &values)
                        .iter()
                        .all(|&x| x.to_bits() == 0)
                );
                assert_eq!(state.len(), shape.iter().product::<usize>());
            }
        }
        let state = initial_state(&client, &[7], None, Moment::First).expect("f32");
        assert_eq!(read_float(&client, &state.values), [0.0; 7]);
        let values = dequantize_on_device(&client, &state).expect("a state");
        assert_eq!(read_float(&client, &values), [0.0; 7]);
        let odd = StateFormat {
            encoding: Encoding::E4M3,
            expand: false,
            group: 126,
        };
        assert!(initial_state(&client, &[7], Some(odd), Moment::First).is_err());
    }
}
