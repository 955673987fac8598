//! The reference's gradients are the slopes of its forward pass.

use cubecl_kernels::{
    attention::{AttentionOptions, Band},
    reference::attention::{attention, attention_backward},
};

use super::problem::{Kind, Problem, Wide, kinds, widened};
use crate::random::Random;

/// `sum(gradient * output)`.
fn loss(problem: &Problem, wide: &Wide, gradient: &[f64]) -> f64 {
    let forward = attention(&wide.inputs(problem), &problem.options).expect("a problem that fits");
    forward
        .output
        .iter()
        .zip(gradient)
        .map(|(o, g)| o * g)
        .sum()
}

#[test]
fn gradients_are_slopes() {
    let mut random = Random::fresh();
    let step = 1e-4;
    for kind in kinds() {
        let mut kind = kind;
        // Sequences of this length show the same, sooner.
        kind.sequence = kind.sequence.map(|length| length.min(23));
        kind.width = kind.width.map(|width| width.min(9));
        let problem = Problem::draw(&mut random, kind);
        let gradient = widened(&problem.gradient);
        let wide = Wide::of(&problem);
        let gradients = attention_backward(&wide.inputs(&problem), &problem.options, &gradient)
            .expect("a problem that fits");
        type Tensor = fn(&mut Wide) -> &mut Vec<f64>;
        let tensors: [(&str, Tensor, &Vec<f64>); 4] = [
            ("query", |wide| &mut wide.query, &gradients.query),
            ("key", |wide| &mut wide.key, &gradients.key),
            ("value", |wide| &mut wide.value, &gradients.value),
            ("bias", |wide| &mut wide.bias, &gradients.bias),
        ];
        for (name, tensor, gradient_of_tensor) in tensors {
            for _ in 0..gradient_of_tensor.len().min(8) {
                let index = random.index(gradient_of_tensor.len());
                let at = |distance: f64| {
                    let mut wide = wide.clone();
                    tensor(&mut wide)[index] += distance;
                    loss(&problem, &wide, &gradient)
                };
                let slope = (at(step) - at(-step)) / (2.0 * step);
                let expected = gradient_of_tensor[index];
                assert!(
                    (slope - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                    "{kind:?}: {name}[{index}]: gradient {expected}, slope {slope}"
                );
            }
        }
    }
}

#[test]
fn one_key_is_copied_and_hidden_rows_are_zero() {
    let mut random = Random::fresh();
    // Query 0 and 1 have no key; query 2 has the only one.
    let kind = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([1, 1, 1], [3, 1], [4, 5])
    };
    let problem = Problem::draw(&mut random, kind);
    let expected = problem.solve();
    assert_eq!(expected.forward.output[..10], [0.0; 10]);
    assert_eq!(expected.forward.output[10..], widened(&problem.value));
    assert_eq!(expected.forward.log_sum_exp[..2], [f64::NEG_INFINITY; 2]);
    let score: f64 = problem.query[8..]
        .iter()
        .zip(&problem.key)
        .map(|(&q, &k)| f64::from(q) * f64::from(k))
        .sum();
    let log_sum_exp = f64::from(problem.options.scale) * score;
    assert!((expected.forward.log_sum_exp[2] - log_sum_exp).abs() < 1e-12);
    assert!(expected.gradients.query.iter().all(|&x| x.abs() < 1e-12));
    assert_eq!(expected.gradients.value, widened(&problem.gradient[10..]));
}

#[test]
fn the_soft_cap_bounds_scores() {
    let mut random = Random::fresh();
    let mut problem = Problem::draw(&mut random, Kind::plain([1, 1, 1], [9, 17], [8, 8]));
    problem.options = AttentionOptions {
        softcap: Some(1e-6),
        ..AttentionOptions::new(1e3)
    };
    // All probabilities are alike: the output is the mean of the values.
    let output = problem.solve().forward.output;
    for (index, o) in output.iter().enumerate() {
        let of_feature = problem.value[index % 8..].iter().step_by(8);
        let mean = of_feature.map(|&v| f64::from(v)).sum::<f64>() / 17.0;
        assert!((o - mean).abs() < 1e-4, "{o} instead of {mean}");
    }
}
