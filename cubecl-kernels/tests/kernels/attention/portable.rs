//! The portable kernels against the reference, with every option, on inputs that are rounded first.

use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    KernelError,
    attention::{
        AttentionGradients, AttentionKernel, AttentionOptions, AttentionProblem, AttentionTensors,
        Band, Dropped,
    },
};
use half::{bf16, f16};
use rstest::rstest;

use super::{
    problem::{
        Expected, Kind, Problem, assert_close, assert_row_is_nan, kinds, rows_of_a_bias, tolerance,
    },
    solve::{Memory, Results, draw, solve, solve_for},
};
use crate::{
    device::{client, drawn, dtype, float_types, upload},
    random::Random,
};

const KERNEL: AttentionKernel = AttentionKernel::Portable;
/// `rounding`: half a unit in the last place of what results are rounded to; 0 for FP32.
#[track_caller]
fn compare(results: &Results, problem: &Problem, rounding: f64, what: &str) {
    let expected = problem.solve();
    let tolerance = tolerance(&expected);
    assert_close(
        &results.output,
        &expected.forward.output,
        tolerance + rounding,
        &format!("{what}: output"),
    );
    assert_close(
        &results.log_sum_exp,
        &expected.forward.log_sum_exp,
        tolerance,
        &format!("{what}: log-sum-exp"),
    );
    // Delta is a sum over the rounded output.
    let tolerance = tolerance + 4.0 * rounding;
    let (of, actual) = (&expected.gradients, &results.gradients);
    let of_bias = tolerance * rows_of_a_bias(problem).sqrt() * cancellation(problem, &expected);
    for (name, actual, expected, tolerance) in [
        ("query", &actual.query, &of.query, tolerance),
        ("key", &actual.key, &of.key, tolerance),
        ("value", &actual.value, &of.value, tolerance),
        ("bias", &actual.bias, &of.bias, of_bias),
    ] {
        let actual = actual.as_deref().unwrap_or_default();
        assert_close(
            actual,
            expected,
            tolerance,
            &format!("{what}: gradient of {name}"),
        );
    }
}

/// How much larger the terms of a bias's gradient are than what errors are relative to, where all keys of a row share
/// an element: a row's gradients of scores are as large as its `dO·O`, and add up to 0.
fn cancellation(problem: &Problem, expected: &Expected) -> f64 {
    if !matches!(problem.bias, Some((_, [_, _, _, 1]))) {
        return 1.0;
    }
    let width = problem.shape.value_width;
    let rows = problem.gradient.chunks(width);
    let rows = rows.zip(expected.forward.output.chunks(width));
    let deltas = rows.map(|(gradient, output)| {
        let products = gradient.iter().zip(output);
        products.map(|(&x, y)| f64::from(x) * y).sum::<f64>()
    });
    let largest = |values: &mut dyn Iterator<Item = f64>| {
        values.fold(0.0f64, |largest, value| largest.max(value.abs()))
    };
    let remains = largest(&mut expected.gradients.bias.iter().copied());
    f64::max(1.0, largest(&mut { deltas }) / remains.max(0.5))
}

#[rstest]
fn equals_the_reference(
    #[values(Memory::Contiguous, Memory::InRows, Memory::Transposed)] memory: Memory,
) {
    let (client, mut random) = (client(), Random::fresh());
    let (every, few) = match memory {
        Memory::Contiguous => (1, 2),
        _ => (4, 1),
    };
    for kind in drawn(&mut random, kinds().into_iter().step_by(every), few) {
        let float = dtype::<f32>();
        let problem = draw(&mut random, kind, float);
        let results = solve(KERNEL, &client, &problem, float, memory);
        compare(&results, &problem, 0.0, &format!("{memory:?} {kind:?}"));
    }
}

#[rstest]
fn equals_the_reference_in_16_bits() {
    let (client, mut random) = (client(), Random::fresh());
    let narrow = [
        (dtype::<f16>(), 2f64.powi(-11)),
        (dtype::<bf16>(), 2f64.powi(-8)),
    ];
    let floats = float_types(&client);
    for (float, rounding) in narrow
        .into_iter()
        .filter(|(float, _)| floats.contains(float))
    {
        for kind in drawn(&mut random, kinds().into_iter().skip(1).step_by(3), 1) {
            let problem = draw(&mut random, kind, float);
            let results = solve(KERNEL, &client, &problem, float, Memory::InRows);
            compare(&results, &problem, rounding, &format!("{float} {kind:?}"));
        }
    }
}

/// A problem with a few of all options, and sizes that nobody chose.
#[rstest]
fn equals_the_reference_on_what_comes() {
    let (client, mut random) = (client(), Random::fresh());
    for _ in drawn(&mut random, 0..8, 1) {
        let mut up_to = |most: usize| 1 + random.index(most);
        let kv_heads = up_to(2);
        let kind = Kind {
            heads: [up_to(2), kv_heads * up_to(3), kv_heads],
            ..Kind::plain(
                [1, 1, 1],
                [up_to(140), up_to(140)],
                [up_to(100), up_to(100)],
            )
        };
        let mut maybe = || random.index(2) == 0;
        let dims = [maybe(), maybe(), maybe(), maybe()];
        let of_bias = [maybe(), maybe(), maybe(), maybe()];
        let kind = Kind {
            mask: maybe().then_some(dims),
            bias: maybe().then_some(of_bias),
            softcap: maybe().then_some(1.2),
            dropout: if maybe() { 0.2 } else { 0.0 },
            dropped: if maybe() {
                Dropped::Scores
            } else {
                Dropped::Probabilities
            },
            band: Band {
                left: maybe().then_some(30),
                right: maybe().then_some(3),
            },
            ..kind
        };
        let problem = draw(&mut random, kind, dtype::<f32>());
        let results = solve(KERNEL, &client, &problem, dtype::<f32>(), Memory::InRows);
        compare(&results, &problem, 0.0, &format!("{kind:?}"));
    }
}

#[rstest]
fn repeats_to_the_bit() {
    let (client, mut random) = (client(), Random::fresh());
    let kind = Kind {
        dropout: 0.1,
        bias: Some([false, true, false, true]),
        ..Kind::plain([2, 4, 2], [150, 170], [16, 24])
    };
    let problem = draw(&mut random, kind, dtype::<f32>());
    let solve = || solve(KERNEL, &client, &problem, dtype::<f32>(), Memory::InRows).bits();
    assert_eq!(solve(), solve());
}

#[rstest]
fn large_scores_and_equal_ones() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f32>();
    let mut problem = draw(&mut random, Kind::plain([1, 1, 1], [20, 70], [8, 8]), float);
    // Exact in FP32: one key takes all, or several share it.
    problem
        .query
        .iter_mut()
        .for_each(|x| *x = (*x * 4.0).round() * 64.0);
    problem.key.iter_mut().for_each(|x| *x = (*x * 2.0).round());
    problem.options.scale = 1.0;
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    compare(&results, &problem, 0.0, "scores of thousands");
    problem.key.fill(1.0);
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    compare(&results, &problem, 0.0, "equal keys");
}

#[rstest]
fn nan_and_infinity_stay_visible(#[values(None, Some(5.0))] softcap: Option<f32>) {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f32>();
    let kind = Kind {
        band: Band::CAUSAL,
        softcap,
        ..Kind::plain([1, 1, 1], [80, 80], [4, 4])
    };
    for (bad, row) in [(f32::NAN, 0), (f32::NAN, 79), (f32::INFINITY, 40)] {
        // A cap bounds an infinite score.
        if softcap.is_some() && bad.is_infinite() {
            continue;
        }
        let mut problem = draw(&mut random, kind, float);
        problem.query[row * 4..][..4].fill(bad);
        problem.key[..4].fill(1.0);
        let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
        let Results {
            output,
            log_sum_exp,
            gradients,
        } = &results;
        assert_row_is_nan(bad, row, output, log_sum_exp, gradients);
    }
}

#[rstest]
fn negative_infinity_hides() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f32>();
    let mut problem = draw(&mut random, Kind::plain([1, 1, 1], [2, 3], [4, 4]), float);
    let infinity = f32::INFINITY;
    let bias = vec![-infinity, -infinity, -infinity, 0.0, -infinity, -infinity];
    problem.bias = Some((bias, [1, 1, 2, 3]));
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    assert_eq!(results.output[..4], [0.0; 4]);
    assert_eq!(results.log_sum_exp[0], f32::NEG_INFINITY);
    assert_eq!(results.output[4..], problem.value[..4]);
    // A row with one key has one probability, whatever its score.
    let of_query = results.gradients.query.expect("wanted");
    assert_eq!(of_query[..4], [0.0; 4]);
    assert!(of_query[4..].iter().all(|x| x.abs() < 1e-5), "{of_query:?}");
    let of_bias = results.gradients.bias.expect("wanted");
    assert_eq!(of_bias[..3], [0.0; 3]);
    assert!(of_bias[3..].iter().all(|x| x.abs() < 1e-5), "{of_bias:?}");
}

#[rstest]
fn a_bias_is_not_read_where_nothing_is_seen() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f32>();
    let kind = Kind {
        band: Band::CAUSAL,
        bias: Some([false, false, true, true]),
        mask: Some([false, false, false, true]),
        ..Kind::plain([1, 2, 2], [9, 9], [4, 4])
    };
    let problem = draw(&mut random, kind, float);
    let mut with_nan = problem.clone();
    let (bias, _) = with_nan.bias.as_mut().expect("a bias");
    let hidden = &problem.mask.as_ref().expect("a mask").0;
    for (index, bias) in bias.iter_mut().enumerate() {
        if index % 9 > index / 9 || hidden[index % 9] {
            *bias = f32::NAN;
        }
    }
    let solve = |problem| solve(KERNEL, &client, problem, float, Memory::Contiguous).bits();
    assert_eq!(solve(&problem), solve(&with_nan));
}

#[rstest]
fn nothing_in_gives_nothing() {
    let (client, mut random) = (client(), Random::fresh());
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
        let problem = draw(&mut random, kind, dtype::<f32>());
        let results = solve(
            KERNEL,
            &client,
            &problem,
            dtype::<f32>(),
            Memory::Contiguous,
        );
        compare(&results, &problem, 0.0, &format!("{kind:?}"));
    }
}

#[rstest]
fn only_what_is_wanted(#[values([8, 8], [200, 100])] width: [usize; 2]) {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f32>();
    let kind = Kind {
        bias: Some([true; 4]),
        ..Kind::plain([1, 2, 1], [20, 30], width)
    };
    let problem = draw(&mut random, kind, float);
    let all = solve(KERNEL, &client, &problem, float, Memory::Contiguous).gradients;
    for which in drawn(&mut random, 0..16, 1) {
        let [query, key, value, bias] = [1, 2, 4, 8].map(|bit| which & bit != 0);
        let wanted = AttentionGradients {
            query,
            key,
            value,
            bias,
        };
        let some =
            solve_for(KERNEL, &client, &problem, float, Memory::Contiguous, wanted).gradients;
        assert_eq!(some.query, all.query.clone().filter(|_| query));
        assert_eq!(some.key, all.key.clone().filter(|_| key));
        assert_eq!(some.value, all.value.clone().filter(|_| value));
        assert_eq!(some.bias, all.bias.clone().filter(|_| bias));
    }
}

#[rstest]
fn refuses_what_does_not_fit() {
    let client = client();
    let x = |shape: [usize; 4]| {
        let count = shape.iter().product();
        upload(&client, &vec![0.0; count], &shape, dtype::<f32>())
    };
    let tensors = |width| AttentionTensors {
        query: x([1, 2, 3, width]),
        key: x([1, 2, 3, width]),
        value: x([1, 2, 3, 4]),
        mask: None,
        bias: None,
    };
    let options = AttentionOptions::new(1.0);
    let refused = |tensors| {
        let result = KERNEL.forward(&client, &tensors, &options);
        result.expect_err("something does not fit")
    };
    let wide = refused(tensors(257));
    assert!(matches!(wide, KernelError::Unsupported { .. }), "{wide}");
    assert!(wide.to_string().contains("257 and 4 features"), "{wide}");
    let mask = Some(x([1, 1, 1, 3]));
    let of_floats = refused(AttentionTensors { mask, ..tensors(4) });
    assert!(
        matches!(of_floats, KernelError::Dtype { .. }),
        "{of_floats}"
    );
    let words = client.create_from_slice(&[0; 16]);
    let mask = TensorHandle::new_contiguous(vec![1, 1, 1, 2], words, dtype::<u32>());
    let mask = Some(mask);
    let short = refused(AttentionTensors { mask, ..tensors(4) });
    assert!(matches!(short, KernelError::Shape { .. }), "{short}");
}

#[rstest]
fn is_there_for_what_no_other_computes() {
    let client = client();
    let mut random = Random::fresh();
    let problem = Problem::draw(&mut random, Kind::plain([1, 2, 1], [3, 3], [5, 5]));
    let problem = AttentionProblem {
        dtype: dtype::<f32>(),
        shape: problem.shape,
        options: problem.options,
        is_masked: true,
        is_biased: true,
    };
    assert_eq!(AttentionKernel::of(&client, &problem), Some(KERNEL));
    let integers = AttentionProblem {
        dtype: dtype::<i32>(),
        ..problem
    };
    assert_eq!(AttentionKernel::of(&client, &integers), None);
}
