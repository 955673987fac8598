//! The Hopper kernels against the reference, on inputs that are rounded first.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    attention::{
        AttentionGradients, AttentionKernel, AttentionOptions, AttentionProblem, AttentionTensors,
        Band, Dropout,
    },
    rounding::StochasticKey,
};
use half::{bf16, f16};
use rstest::rstest;

use super::problem::{Expected, Kind, Problem, assert_close};
use crate::{
    device::{Client, Tensor, TestRuntime, client, dtype, read, read_float, rounded, to_bytes},
    random::Random,
};

const WANTED: AttentionGradients<bool> = AttentionGradients {
    query: true,
    key: true,
    value: true,
    bias: false,
};

/// True where the device has the kernels; named in the output where it has not.
fn has_kernels(client: &Client, problem: &Problem, float: StorageType) -> bool {
    let problem = AttentionProblem {
        dtype: float,
        shape: problem.shape,
        options: problem.options,
        is_masked: problem.mask.is_some(),
        is_biased: problem.bias.is_some(),
    };
    let has = AttentionKernel::of(client, &problem) == Some(AttentionKernel::Hopper);
    if !has {
        println!("skipped: this device has no wgmma");
    }
    has
}

/// Where the heads of a tensor `[batch, heads, rows, width]` lie.
#[derive(Debug, Clone, Copy)]
enum Heads {
    Contiguous,
    /// Side by side in rows that begin and end with something else.
    InRows,
}

fn upload(client: &Client, x: &[f32], shape: [usize; 4], float: StorageType, at: Heads) -> Tensor {
    let [batch, heads, rows, width] = shape;
    let pad = match at {
        Heads::Contiguous => {
            let handle = client.create_from_slice(&to_bytes(x, float));
            return TensorHandle::new_contiguous(shape.to_vec(), handle, float);
        }
        Heads::InRows => 8,
    };
    let pitch = heads * width + pad;
    let mut buffer = vec![f32::NAN; batch * rows * pitch];
    for (index, head) in x.chunks(rows * width).enumerate() {
        let (b, h) = (index / heads, index % heads);
        for (row, values) in head.chunks(width).enumerate() {
            buffer[(b * rows + row) * pitch + h * width..][..width].copy_from_slice(values);
        }
    }
    let handle = client.create_from_slice(&to_bytes(&buffer, float));
    let strides = vec![rows * pitch, width, pitch, 1];
    TensorHandle::new(handle, shape.to_vec(), strides, float)
}

/// The elements of a result, which lies in rows, in the order of its heads.
fn in_heads(client: &Client, tensor: &Tensor) -> Vec<f32> {
    let shape = tensor.shape().to_vec();
    let (heads, rows, width) = (shape[1], shape[2], shape[3]);
    let data = read_float(client, tensor);
    let mut result = Vec::with_capacity(data.len());
    for of_batch in data.chunks(heads * rows * width) {
        for head in 0..heads {
            for row in of_batch.chunks(heads * width) {
                result.extend_from_slice(&row[head * width..][..width]);
            }
        }
    }
    result
}

struct Results {
    output: Vec<f32>,
    log_sum_exp: Vec<f32>,
    gradients: [Vec<f32>; 3],
}

fn solve(client: &Client, problem: &Problem, float: StorageType, at: Heads) -> Results {
    let shape = &problem.shape;
    let [query, key, value, gradient] = [
        (&problem.query, shape.query()),
        (&problem.key, shape.key()),
        (&problem.value, shape.value()),
        (&problem.gradient, shape.output()),
    ]
    .map(|(x, shape)| upload(client, x, shape, float, at));
    let options = &problem.options;
    let tensors = AttentionTensors {
        query,
        key,
        value,
        mask: None,
        bias: None,
    };
    let kernel = AttentionKernel::Hopper;
    let forward = kernel.forward(client, &tensors, options);
    let forward = forward.expect("a device that has it");
    let gradients = kernel
        .backward(client, &tensors, &forward, &gradient, WANTED, options)
        .expect("what has a forward pass");
    Results {
        output: in_heads(client, &forward.output),
        log_sum_exp: read(client, &forward.log_sum_exp),
        gradients: [gradients.query, gradients.key, gradients.value]
            .map(|gradient| in_heads(client, &gradient.expect("it is wanted"))),
    }
}

/// Inputs as the kernel sees them.
fn draw(random: &mut Random, kind: Kind, float: StorageType) -> Problem {
    let mut problem = Problem::draw(random, kind);
    for x in [
        &mut problem.query,
        &mut problem.key,
        &mut problem.value,
        &mut problem.gradient,
    ] {
        *x = rounded(x, float);
    }
    problem
}

fn compare(results: &Results, problem: &Problem, float: StorageType, what: &str) {
    let expected = &problem.solve();
    // Probabilities, and the gradients of scores, are rounded to the type of the inputs, and so is the result.
    let tolerance = if float == dtype::<f16>() { 3e-3 } else { 2e-2 };
    let [of_query, of_key] = of_delta(problem, expected, float).map(|it| it.max(tolerance));
    assert_close(
        &results.output,
        &expected.forward.output,
        tolerance,
        &format!("{what}: output"),
    );
    let log_sum_exp = &expected.forward.log_sum_exp;
    assert_close(
        &results.log_sum_exp,
        log_sum_exp,
        1e-4,
        &format!("{what}: log-sum-exp"),
    );
    let of = &expected.gradients;
    let [query, key, value] = &results.gradients;
    for (name, actual, expected, tolerance) in [
        ("query", query, &of.query, of_query),
        ("key", key, &of.key, of_key),
        ("value", value, &of.value, tolerance),
    ] {
        assert_close(
            actual,
            expected,
            tolerance,
            &format!("{what}: gradient of {name}"),
        );
    }
}

/// What the rounding of the output makes of the gradients of queries and of keys: Delta is a sum over it, and what it
/// is off by is in all of a row's dS, times their probabilities. Relative to the largest gradient, as [`assert_close`]
/// has it.
fn of_delta(problem: &Problem, expected: &Expected, float: StorageType) -> [f64; 2] {
    let unit = if float == dtype::<f16>() { -12 } else { -9 };
    let output = &expected.forward.output;
    let width = problem.gradient.len() / expected.forward.log_sum_exp.len();
    let terms = output.iter().zip(&problem.gradient);
    let terms: Vec<f64> = terms.map(|(o, &g)| (o * f64::from(g)).abs()).collect();
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
    let off = 2f64.powi(unit) * largest(&mut terms.chunks(width).map(|row| row.iter().sum()));
    let of = &expected.gradients;
    [(&of.query, &problem.key), (&of.key, &problem.query)].map(|(gradient, factor)| {
        let factor = largest(&mut factor.iter().map(|x| f64::from(x.abs())));
        let gradient = largest(&mut gradient.iter().map(|x| x.abs()));
        off * f64::from(problem.options.scale) * factor / gradient.max(0.5)
    })
}

/// One query, tiles, their neighbours and between; more queries than keys and fewer; heads that fill panels and do not.
#[rstest]
fn equals_the_reference(
    #[values([64, 64], [128, 128], [8, 16], [96, 40])] width: [usize; 2],
    #[values(Band::ALL, Band::CAUSAL, Band { left: Some(70), right: Some(3) })] band: Band,
    #[values(Heads::Contiguous, Heads::InRows)] at: Heads,
) {
    let (client, mut random) = (client(), Random::fresh());
    for (heads, sequence) in [
        ([2, 3, 3], [128, 128]),
        ([1, 4, 2], [130, 301]),
        ([1, 2, 1], [301, 37]),
        ([2, 1, 1], [1, 65]),
        ([1, 2, 2], [257, 1]),
    ] {
        for float in [dtype::<bf16>(), dtype::<f16>()] {
            let kind = Kind {
                band,
                ..Kind::plain(heads, sequence, width)
            };
            let problem = draw(&mut random, kind, float);
            if !has_kernels(&client, &problem, float) {
                return;
            }
            let results = solve(&client, &problem, float, at);
            compare(&results, &problem, float, &format!("{float} {kind:?}"));
        }
    }
}

#[rstest]
fn repeats_to_the_bit() {
    let (client, mut random) = (client(), Random::fresh());
    let kind = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([2, 6, 2], [700, 900], [64, 64])
    };
    let problem = draw(&mut random, kind, dtype::<bf16>());
    if !has_kernels(&client, &problem, dtype::<bf16>()) {
        return;
    }
    let solve = || solve(&client, &problem, dtype::<bf16>(), Heads::InRows);
    let (first, second) = (solve(), solve());
    assert_eq!(first.output, second.output);
    assert_eq!(first.log_sum_exp, second.log_sum_exp);
    assert_eq!(first.gradients, second.gradients);
}

/// Exponentials of scores that are not there, with a log-sum-exp far below 0, would overflow.
#[rstest]
fn scores_far_below_zero(#[values([64, 64], [128, 128])] width: [usize; 2]) {
    let (client, mut random) = (client(), Random::fresh());
    for (band, sequence) in [(Band::ALL, [70, 300]), (Band::CAUSAL, [300, 300])] {
        let kind = Kind {
            band,
            ..Kind::plain([1, 2, 1], sequence, width)
        };
        let float = dtype::<bf16>();
        let mut problem = draw(&mut random, kind, float);
        if !has_kernels(&client, &problem, float) {
            return;
        }
        // One feature that moves all scores: -512 times the scale.
        for x in problem.query.chunks_mut(width[0]) {
            x[0] = -256.0;
        }
        for x in problem.key.chunks_mut(width[0]) {
            x[0] = 2.0;
        }
        let results = solve(&client, &problem, float, Heads::Contiguous);
        compare(&results, &problem, float, &format!("{kind:?}"));
    }
}

/// NaN reaches what reads it, and nothing else; large scores do not overflow.
#[rstest]
fn keeps_nan_where_it_is_seen() {
    let (client, mut random) = (client(), Random::fresh());
    let kind = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([1, 2, 2], [200, 200], [64, 64])
    };
    let float = dtype::<bf16>();
    let mut problem = draw(&mut random, kind, float);
    if !has_kernels(&client, &problem, float) {
        return;
    }
    for x in &mut problem.query {
        *x = rounded(&[*x * 50.0], float)[0];
    }
    let results = solve(&client, &problem, float, Heads::Contiguous);
    assert!(results.output.iter().all(|x| x.is_finite()));
    assert!(results.gradients.iter().flatten().all(|x| x.is_finite()));
    const ROW: usize = 150;
    problem.query[ROW * 64 + 5] = f32::NAN;
    let results = solve(&client, &problem, float, Heads::Contiguous);
    for (row, values) in results.output.chunks(64).enumerate() {
        assert_eq!(values.iter().all(|x| x.is_nan()), row == ROW, "row {row}");
        assert_eq!(results.log_sum_exp[row].is_nan(), row == ROW, "row {row}");
    }
}

/// What there are no kernels for is said, on every device.
#[rstest]
#[case::scale(AttentionOptions::new(-1.0), 64, "scale")]
#[case::soft_cap(AttentionOptions { softcap: Some(3.0), ..AttentionOptions::new(1.0) }, 64, "soft cap")]
#[case::dropout(
    AttentionOptions {
        dropout: Some(Dropout { rate: 0.1, key: StochasticKey { seed: 1, stream: 2 } }),
        ..AttentionOptions::new(1.0)
    },
    64,
    "dropout"
)]
#[case::wide_heads(AttentionOptions::new(1.0), 136, "136 and 136 features")]
#[case::odd_heads(AttentionOptions::new(1.0), 60, "60 and 60 features")]
fn refuses(#[case] options: AttentionOptions, #[case] width: usize, #[case] reason: &str) {
    let client = client();
    let float = dtype::<f16>();
    let shape = [1, 2, 16, width];
    let x = upload(
        &client,
        &vec![0.0; 32 * width],
        shape,
        float,
        Heads::Contiguous,
    );
    let tensors = AttentionTensors {
        query: x.clone(),
        key: x.clone(),
        value: x,
        mask: None,
        bias: None,
    };
    let error = AttentionKernel::Hopper.forward(&client, &tensors, &options);
    let error = error.expect_err("no kernel");
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    let message = error.to_string();
    assert!(
        message.contains(reason) || message.contains("sm_90"),
        "{message}"
    );
}

#[rstest]
fn reads_aligned_rows_only() {
    let client = client();
    let reads = |strides: [usize; 4], offset: u64| {
        let handle = client.empty(1 << 16).offset_start(offset);
        let tensor: TensorHandle<TestRuntime> =
            TensorHandle::new(handle, vec![2, 3, 5, 16], strides.to_vec(), dtype::<f16>());
        AttentionKernel::Hopper.reads(&tensor)
    };
    assert!(reads([240, 80, 16, 1], 0));
    assert!(reads([240, 16, 48, 1], 256));
    assert!(!reads([240, 80, 16, 1], 2));
    assert!(!reads([240, 80, 1, 5], 0));
    assert!(!reads([255, 85, 17, 1], 0));
    assert!(!reads([0, 80, 16, 1], 0));
}
