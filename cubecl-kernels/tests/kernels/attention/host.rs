//! The host version against the reference.

use cubecl_kernels::{
    KernelError,
    attention::{AttentionGradients, AttentionOptions, AttentionProducts, Band, Dropout, Dropped},
    dropout::Draw,
    host::{HostAttention, attention, attention_backward},
    reference::attention::Broadcast,
    rounding::StochasticKey,
};

use super::problem::{
    ALL_GRADIENTS, Kind, Problem, assert_close, assert_near, assert_row_is_nan, kinds,
    rows_of_a_bias, tolerance,
};
use crate::random::Random;

fn solve(problem: &Problem) -> (HostAttention, AttentionGradients<Option<Vec<f32>>>) {
    let forward = attention(&problem.inputs(), &problem.options).expect("a problem that fits");
    let gradients = attention_backward(
        &problem.inputs(),
        &problem.options,
        &forward,
        &problem.gradient,
        problem.wanted(),
    );
    (forward, gradients.expect("a problem that fits"))
}

#[track_caller]
fn compare(problem: &Problem, what: &str) {
    let expected = problem.solve();
    let (forward, gradients) = solve(problem);
    let tolerance = tolerance(&expected);
    assert_close(
        &forward.output,
        &expected.forward.output,
        tolerance,
        &format!("{what}: output"),
    );
    let log_sum_exp = &expected.forward.log_sum_exp;
    assert_close(
        &forward.log_sum_exp,
        log_sum_exp,
        tolerance,
        &format!("{what}: log-sum-exp"),
    );
    let of = &expected.gradients;
    let of_bias = tolerance * rows_of_a_bias(problem).sqrt();
    for (name, gradient, expected, tolerance) in [
        ("query", gradients.query, &of.query, tolerance),
        ("key", gradients.key, &of.key, tolerance),
        ("value", gradients.value, &of.value, tolerance),
        ("bias", gradients.bias, &of.bias, of_bias),
    ] {
        let gradient = gradient.unwrap_or_default();
        assert_close(
            &gradient,
            expected,
            tolerance,
            &format!("{what}: gradient of {name}"),
        );
    }
}

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    for kind in kinds() {
        let problem = Problem::draw(&mut random, kind);
        compare(&problem, &format!("{kind:?}"));
    }
}

#[test]
fn int8_products_equal_the_reference() {
    let mut random = Random::fresh();
    let kinds = kinds().into_iter().map(|kind| Kind {
        products: AttentionProducts::Int8,
        ..kind
    });
    for kind in kinds {
        let problem = Problem::draw(&mut random, kind);
        compare_int8(&problem, &format!("{kind:?}"));
    }
}

fn compare_int8(problem: &Problem, what: &str) {
    let expected = problem.solve();
    let (forward, gradients) = solve(problem);
    let of_forward = &expected.forward;
    assert_close(&forward.log_sum_exp, &of_forward.log_sum_exp, 1e-5, what);
    let width = problem.shape.value_width;
    assert_near(&forward.output, &of_forward.output, width, 2e-3, what);
    let of = &expected.gradients;
    for (actual, expected) in [
        (gradients.query, &of.query),
        (gradients.key, &of.key),
        (gradients.value, &of.value),
    ] {
        let actual = actual.unwrap_or_default();
        assert_close(&actual, expected, 5e-3, &format!("{what}: gradient"));
    }
}

/// Scores of thousands, of which exact ones lie far above a log-sum-exp of codes.
#[test]
fn int8_products_of_large_scores() {
    let mut random = Random::fresh();
    let kind = Kind {
        band: Band::CAUSAL,
        products: AttentionProducts::Int8,
        ..Kind::plain([1, 2, 1], [100, 150], [64, 64])
    };
    let mut problem = Problem::draw(&mut random, kind);
    // Where FP32 and FP64 round to different codes of Q or K, such a score moves by one: these are codes already.
    to_codes(&mut problem.query, 64, 16.0);
    to_codes(&mut problem.key, 128 * 64, 1.0 / 32.0);
    compare_int8(&problem, "large scores");
    let (_, gradients) = solve(&problem);
    let largest = |x: Option<Vec<f32>>| x.into_iter().flatten().fold(0.0f32, |a, x| a.max(x.abs()));
    // A probability of at most 1 for each of 100 queries of two heads, and gradients of a normal output.
    assert!(largest(gradients.value) < 1e4);
}

/// Rounds groups of this many numbers to multiples of a scale, 127 of them at the largest.
fn to_codes(x: &mut [f32], group: usize, scale: f32) {
    for group in x.chunks_mut(group) {
        let largest = group.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let of_code = |x: f32| (x / largest * 127.0).round() * scale;
        group.iter_mut().for_each(|x| *x = of_code(*x));
    }
}

/// By codes an output is one or two hundredths off, whatever the scores' spread; one scale for all probabilities would
/// lose the rows whose largest lies far from the others.
#[test]
fn int8_products_are_near_exact_ones() {
    let mut random = Random::fresh();
    for spread in [0.1, 1.0, 4.0] {
        let kind = Kind {
            band: Band::CAUSAL,
            scale: spread / 8.0,
            ..Kind::plain([1, 2, 2], [700, 700], [64, 64])
        };
        let mut problem = Problem::draw(&mut random, kind);
        let exact = solve(&problem).0.output;
        problem.options.products = AttentionProducts::Int8;
        let output = solve(&problem).0.output;
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        let off = norm(&mut output.iter().zip(&exact).map(|(a, b)| a - b));
        let share = off / norm(&mut exact.iter().copied());
        assert!((0.001..0.05).contains(&share), "{spread}: {share}");
    }
}

#[test]
fn keys_in_parts_add_up() {
    let mut random = Random::fresh();
    for band in [Band::ALL, Band::CAUSAL] {
        // Several parts of the keys in the backward pass.
        let kind = Kind {
            band,
            ..Kind::plain([1, 2, 1], [200, 2500], [8, 8])
        };
        compare(&Problem::draw(&mut random, kind), &format!("{kind:?}"));
    }
}

#[test]
fn large_scores_and_equal_ones() {
    let mut random = Random::fresh();
    let mut problem = Problem::draw(&mut random, Kind::plain([1, 1, 1], [20, 40], [8, 8]));
    // Exact in FP32: one key takes all, or several share it.
    problem
        .query
        .iter_mut()
        .for_each(|x| *x = (*x * 4.0).round() * 64.0);
    problem.key.iter_mut().for_each(|x| *x = (*x * 2.0).round());
    problem.options.scale = 1.0;
    compare(&problem, "scores of thousands");
    problem.key.fill(1.0);
    compare(&problem, "equal keys");
}

#[test]
fn bits_do_not_depend_on_the_threads() {
    let mut random = Random::fresh();
    let kind = Kind {
        dropout: 0.1,
        bias: Some([false, true, true, true]),
        ..Kind::plain([2, 4, 2], [150, 1500], [16, 16])
    };
    let problem = Problem::draw(&mut random, kind);
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.build().expect("a pool of threads");
        pool.install(|| solve(&problem))
    };
    let one = on(1);
    assert!(one == on(2) && one == on(5) && one == on(1));
}

#[test]
fn nan_and_infinity_stay_visible() {
    let mut random = Random::fresh();
    let kind = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([1, 1, 1], [80, 80], [4, 4])
    };
    for (bad, row) in [(f32::NAN, 0), (f32::NAN, 79), (f32::INFINITY, 40)] {
        let mut problem = Problem::draw(&mut random, kind);
        problem.query[row * 4..][..4].fill(bad);
        problem.key[0] = 1.0;
        let (forward, gradients) = solve(&problem);
        assert_row_is_nan(bad, row, &forward.output, &forward.log_sum_exp, &gradients);
    }
    // Negative infinity hides a key; where it hides all, the row is zero.
    let mut problem = Problem::draw(&mut random, Kind::plain([1, 1, 1], [2, 3], [4, 4]));
    let infinity = f32::INFINITY;
    let bias = vec![-infinity, -infinity, -infinity, 0.0, -infinity, -infinity];
    problem.bias = Some((bias, [1, 1, 2, 3]));
    let (forward, gradients) = solve(&problem);
    assert_eq!(forward.output[..4], [0.0; 4]);
    assert_eq!(forward.output[4..], problem.value[..4]);
    // A row with one key has one probability, whatever its score.
    let of_query = gradients.query.expect("wanted");
    assert_eq!(of_query[..4], [0.0; 4]);
    assert!(of_query[4..].iter().all(|x| x.abs() < 1e-5), "{of_query:?}");
    let of_bias = gradients.bias.expect("wanted");
    assert_eq!(of_bias[..3], [0.0; 3]);
    assert!(of_bias[3..].iter().all(|x| x.abs() < 1e-5), "{of_bias:?}");
}

#[test]
fn a_bias_is_not_read_where_nothing_is_seen() {
    let mut random = Random::fresh();
    let kind = Kind {
        band: Band::CAUSAL,
        bias: Some([false, false, true, true]),
        mask: Some([false, false, false, true]),
        ..Kind::plain([1, 2, 2], [9, 9], [4, 4])
    };
    let problem = Problem::draw(&mut random, kind);
    let mut with_nan = problem.clone();
    let (bias, _) = with_nan.bias.as_mut().expect("a bias");
    let hidden = &problem.mask.as_ref().expect("a mask").0;
    for (index, bias) in bias.iter_mut().enumerate() {
        if index % 9 > index / 9 || hidden[index % 9] {
            *bias = f32::NAN;
        }
    }
    assert_eq!(solve(&problem), solve(&with_nan));
}

#[test]
fn nothing_in_gives_nothing() {
    let mut random = Random::fresh();
    for (heads, sequence) in [
        ([0, 2, 2], [3, 3]),
        ([1, 0, 0], [3, 3]),
        ([1, 2, 1], [0, 3]),
        ([1, 2, 1], [3, 0]),
    ] {
        let kind = Kind {
            bias: Some([false, false, false, true]),
            ..Kind::plain(heads, sequence, [4, 6])
        };
        let problem = Problem::draw(&mut random, kind);
        let (forward, gradients) = solve(&problem);
        assert!(forward.output.iter().all(|&x| x == 0.0));
        assert_eq!(
            forward.output.len(),
            problem.shape.output().iter().product::<usize>()
        );
        let lengths = [
            gradients.query,
            gradients.key,
            gradients.value,
            gradients.bias,
        ]
        .map(|gradient| gradient.expect("wanted").len());
        let inputs = [&problem.query, &problem.key, &problem.value].map(Vec::len);
        assert_eq!(lengths[..3], inputs);
    }
}

#[test]
fn only_what_is_wanted() {
    let mut random = Random::fresh();
    let kind = Kind {
        bias: Some([true; 4]),
        ..Kind::plain([2, 2, 1], [40, 50], [8, 8])
    };
    let problem = Problem::draw(&mut random, kind);
    let (forward, all) = solve(&problem);
    for which in 0..16 {
        let [query, key, value, bias] = [1, 2, 4, 8].map(|bit| which & bit != 0);
        let some = attention_backward(
            &problem.inputs(),
            &problem.options,
            &forward,
            &problem.gradient,
            AttentionGradients {
                query,
                key,
                value,
                bias,
            },
        )
        .expect("a problem that fits");
        assert_eq!(some.query, all.query.clone().filter(|_| query));
        assert_eq!(some.key, all.key.clone().filter(|_| key));
        assert_eq!(some.value, all.value.clone().filter(|_| value));
        assert_eq!(some.bias, all.bias.clone().filter(|_| bias));
    }
}

#[test]
fn dropout_drops_as_often_as_it_says() {
    let mut random = Random::fresh();
    let key = StochasticKey {
        seed: random.index(1 << 24) as u64,
        stream: 7,
    };
    let count = 200_000;
    for rate in [0.0, 0.1, 0.5, 0.9] {
        let dropout = Dropout {
            dropped: Dropped::Scores,
            draw: Draw { rate, key },
        };
        let factors = (0..count).map(|index| dropout.draw.factor(index / 100, index % 100));
        let kept = factors.filter(|&factor| factor != 0.0).count() as f32;
        let expected = (1.0 - rate) * count as f32;
        // Six standard deviations.
        let deviation = 6.0 * (count as f32 * rate * (1.0 - rate)).sqrt();
        assert!(
            (kept - expected).abs() <= deviation,
            "rate {rate}: {kept} stay"
        );
        assert_eq!(dropout.draw.kept_factor(), 1.0 / (1.0 - rate));
    }
}

#[test]
fn bad_inputs_are_refused() {
    let mut random = Random::fresh();
    let problem = Problem::draw(&mut random, Kind::plain([1, 1, 1], [2, 3], [4, 4]));
    let refused = |problem: &Problem| {
        attention(&problem.inputs(), &problem.options).expect_err("something does not fit")
    };
    let mut short = problem.clone();
    short.key.pop();
    assert!(matches!(refused(&short), KernelError::Shape { .. }));
    let mut bad_mask = problem.clone();
    bad_mask.mask = Some((vec![false; 2], [1, 1, 1, 2]));
    assert!(matches!(refused(&bad_mask), KernelError::Shape { .. }));
    let key = StochasticKey { seed: 0, stream: 0 };
    for options in [
        AttentionOptions {
            softcap: Some(0.0),
            ..problem.options
        },
        AttentionOptions {
            softcap: Some(f32::NAN),
            ..problem.options
        },
        AttentionOptions {
            dropout: Some(Dropout {
                dropped: Dropped::Probabilities,
                draw: Draw { rate: 1.0, key },
            }),
            ..problem.options
        },
    ] {
        let bad = Problem {
            options,
            ..problem.clone()
        };
        assert!(
            matches!(refused(&bad), KernelError::Unsupported { .. }),
            "{options:?}"
        );
    }
    let (forward, _) = solve(&problem);
    let without_bias = attention_backward(
        &problem.inputs(),
        &problem.options,
        &forward,
        &problem.gradient,
        ALL_GRADIENTS,
    );
    assert!(matches!(without_bias, Err(KernelError::Unsupported { .. })));
    let broadcast = Broadcast {
        data: &[0.0f32; 6],
        shape: [1, 1, 2, 3],
    };
    assert_eq!(broadcast.index(5, 4, 1, 2), 5);
}
