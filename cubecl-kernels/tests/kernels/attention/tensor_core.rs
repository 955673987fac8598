//! The kernels on matrix instructions against the reference, with every option, on inputs that are rounded first.

use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::attention::{AttentionGradients, AttentionKernel, Band};
use half::{bf16, f16};
use rstest::rstest;

use super::{
    problem::{Kind, Problem, assert_close, assert_row_is_nan, kinds},
    solve::{Memory, at_the_ends_of_tiles, compare_16_bits, draw, has, solve, solve_for},
};
use crate::{
    device::{TestRuntime, client, dtype},
    random::Random,
};

const KERNEL: AttentionKernel = AttentionKernel::TensorCore;

/// The kind with heads of multiples of eight features.
fn aligned(kind: Kind) -> Kind {
    Kind {
        width: kind.width.map(|width| width.next_multiple_of(8)),
        ..kind
    }
}

#[rstest]
fn equals_the_reference(#[values(Memory::Contiguous, Memory::InAlignedRows)] memory: Memory) {
    let (client, mut random) = (client(), Random::fresh());
    for float in [dtype::<f16>(), dtype::<bf16>()] {
        for kind in kinds().into_iter().map(aligned) {
            let problem = draw(&mut random, kind, float);
            if !has(KERNEL, &client, &problem, float) {
                return;
            }
            let results = solve(KERNEL, &client, &problem, float, memory);
            let what = format!("{float} {memory:?} {kind:?}");
            compare_16_bits(&results, &problem, float, &what);
        }
    }
}

/// Heads of each number of sums.
#[rstest]
fn equals_the_reference_at_the_ends_of_tiles(
    #[values([64, 64], [128, 128], [8, 16], [96, 40], [256, 200])] width: [usize; 2],
    #[values(Band::ALL, Band::CAUSAL, Band { left: Some(70), right: Some(3) })] band: Band,
) {
    at_the_ends_of_tiles(KERNEL, width, band, Memory::InAlignedRows);
}

#[rstest]
fn repeats_to_the_bit() {
    let (client, mut random) = (client(), Random::fresh());
    let kind = Kind {
        band: Band::CAUSAL,
        dropout: 0.1,
        ..Kind::plain([2, 6, 2], [300, 400], [64, 64])
    };
    let problem = draw(&mut random, kind, dtype::<bf16>());
    if !has(KERNEL, &client, &problem, dtype::<bf16>()) {
        return;
    }
    let solve = || {
        solve(
            KERNEL,
            &client,
            &problem,
            dtype::<bf16>(),
            Memory::InAlignedRows,
        )
    };
    assert_eq!(solve().bits(), solve().bits());
}

#[rstest]
fn nan_and_infinity_stay_visible() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f16>();
    let kind = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([1, 1, 1], [80, 80], [8, 8])
    };
    for (bad, row) in [(f32::NAN, 0), (f32::NAN, 79), (f32::INFINITY, 40)] {
        let mut problem = draw(&mut random, kind, float);
        if !has(KERNEL, &client, &problem, float) {
            return;
        }
        problem.query[row * 8..][..8].fill(bad);
        problem.key[..8].fill(1.0);
        let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
        assert_row_is_nan(
            bad,
            row,
            &results.output,
            &results.log_sum_exp,
            &results.gradients,
        );
    }
}

/// A bias does not matter where nothing is seen, and negative infinity hides.
#[rstest]
fn a_bias_hides_and_is_hidden() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f16>();
    let kind = Kind {
        band: Band::CAUSAL,
        bias: Some([false, false, true, true]),
        ..Kind::plain([1, 2, 2], [9, 9], [8, 8])
    };
    let mut problem = draw(&mut random, kind, float);
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    let (bias, _) = problem.bias.as_mut().expect("a bias");
    bias[9..18].fill(f32::NEG_INFINITY);
    let mut with_nan = problem.clone();
    let (bias, _) = with_nan.bias.as_mut().expect("a bias");
    for (index, bias) in bias.iter_mut().enumerate() {
        if index % 9 > index / 9 {
            *bias = f32::NAN;
        }
    }
    let solve = |problem| solve(KERNEL, &client, problem, float, Memory::Contiguous);
    let results = solve(&problem);
    assert_eq!(results.bits(), solve(&with_nan).bits());
    assert_eq!(results.output[8..16], [0.0; 8]);
    assert_eq!(results.log_sum_exp[1], f32::NEG_INFINITY);
}

/// A row whose keys all have the least bias that there is gives the mean of their values.
#[rstest]
fn the_least_scores_are_not_hidden() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<bf16>();
    let kind = Kind {
        bias: Some([false, false, true, true]),
        ..Kind::plain([1, 1, 1], [5, 70], [16, 16])
    };
    let mut problem = draw(&mut random, kind, float);
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    let (bias, _) = problem.bias.as_mut().expect("a bias");
    bias[..70].fill(bf16::MIN.to_f32());
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    assert_close(
        &results.output,
        &problem.solve().forward.output,
        2e-2,
        "output",
    );
}

#[rstest]
fn nothing_in_gives_nothing() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f16>();
    for (heads, sequence) in [
        ([0, 2, 2], [3, 3]),
        ([1, 0, 0], [3, 3]),
        ([1, 2, 1], [0, 3]),
        ([1, 2, 1], [3, 0]),
    ] {
        let kind = Kind::plain(heads, sequence, [8, 16]);
        let problem = draw(&mut random, kind, float);
        if !has(KERNEL, &client, &problem, float) {
            return;
        }
        let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
        compare_16_bits(&results, &problem, float, &format!("{kind:?}"));
    }
}

#[rstest]
fn reads_aligned_rows_only() {
    let client = client();
    let reads = |shape: [usize; 4], strides: [usize; 4], offset: u64| {
        let handle = client.empty(1 << 16).offset_start(offset);
        let tensor: TensorHandle<TestRuntime> =
            TensorHandle::new(handle, shape.to_vec(), strides.to_vec(), dtype::<f16>());
        KERNEL.reads(&tensor)
    };
    let shape = [2, 3, 5, 16];
    assert!(reads(shape, [240, 80, 16, 1], 0));
    assert!(reads(shape, [240, 16, 48, 1], 256));
    assert!(reads(shape, [240, 0, 16, 1], 16));
    assert!(reads([1, 3, 5, 16], [3, 80, 16, 1], 0));
    assert!(reads([2, 3, 0, 16], [0, 0, 16, 1], 0));
    assert!(!reads(shape, [240, 80, 16, 1], 2));
    assert!(!reads(shape, [240, 80, 1, 5], 0));
    assert!(!reads(shape, [255, 85, 17, 1], 0));
}

#[rstest]
fn only_what_is_wanted(#[values([8, 8], [200, 104])] width: [usize; 2]) {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<bf16>();
    let kind = Kind {
        bias: Some([true; 4]),
        ..Kind::plain([1, 2, 1], [20, 30], width)
    };
    let problem = draw(&mut random, kind, float);
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    let all = solve(KERNEL, &client, &problem, float, Memory::Contiguous).gradients;
    for which in 0..16 {
        let [query, key, value, bias] = [1, 2, 4, 8].map(|bit| which & bit != 0);
        let wanted = AttentionGradients {
            query,
            key,
            value,
            bias,
        };
        let some = solve_for(KERNEL, &client, &problem, float, Memory::Contiguous, wanted);
        let some = some.gradients;
        assert_eq!(some.query, all.query.clone().filter(|_| query));
        assert_eq!(some.key, all.key.clone().filter(|_| key));
        assert_eq!(some.value, all.value.clone().filter(|_| value));
        assert_eq!(some.bias, all.bias.clone().filter(|_| bias));
    }
}

/// The gradient of a bias, which is the portable kernel's, from what the forward pass here left.
#[rstest]
fn the_gradient_of_a_bias_is_that_of_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<f16>();
    let kind = Kind {
        bias: Some([false, true, true, true]),
        ..Kind::plain([2, 2, 1], [70, 90], [32, 32])
    };
    let problem: Problem = draw(&mut random, kind, float);
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    let expected = problem.solve().gradients.bias;
    let actual = results.gradients.bias.expect("wanted");
    assert_close(&actual, &expected, 2e-2, "gradient of the bias");
}
