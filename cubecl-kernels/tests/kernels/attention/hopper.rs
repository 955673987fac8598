//! The Hopper kernels against the reference, on inputs that are rounded first.

use std::ops::Range;

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    attention::{
        AttentionGradients, AttentionKernel, AttentionOptions, AttentionProducts, AttentionTensors,
        Band, Dropout, Dropped,
    },
    dropout::Draw,
    rounding::StochasticKey,
};
use half::{bf16, f16};
use rstest::rstest;

use super::{
    problem::{Dims, Kind, Problem, assert_close, assert_near},
    solve::{Memory, at_the_ends_of_tiles, compare_16_bits, draw, has, solve, solve_for},
};
use crate::{
    device::{TestRuntime, client, dtype, read_float, rounded, upload},
    random::Random,
};

const KERNEL: AttentionKernel = AttentionKernel::Hopper;

/// Heads that fill panels and do not.
#[rstest]
fn equals_the_reference(
    #[values([64, 64], [128, 128], [8, 16], [96, 40])] width: [usize; 2],
    #[values(Band::ALL, Band::CAUSAL, Band { left: Some(70), right: Some(3) })] band: Band,
    #[values(Memory::Contiguous, Memory::InAlignedRows)] memory: Memory,
) {
    at_the_ends_of_tiles(KERNEL, width, band, memory);
}

/// Masks of every choice of dimensions of their own: of keys (padding), of scores, of queries, whose rows see all or
/// nothing, of heads, and one for all.
#[rstest]
fn hides_by_a_mask(
    #[values([64, 64], [128, 128], [96, 40])] width: [usize; 2],
    #[values(Band::ALL, Band::CAUSAL, Band { left: Some(70), right: Some(3) })] band: Band,
) {
    let (client, mut random) = (client(), Random::fresh());
    for own in 0..16 {
        let mask = Some([0, 1, 2, 3].map(|dim| own >> dim & 1 == 1));
        for (heads, sequence) in [([2, 4, 2], [130, 301]), ([2, 2, 2], [257, 129])] {
            for float in [dtype::<bf16>(), dtype::<f16>()] {
                let kind = Kind {
                    band,
                    mask,
                    ..Kind::plain(heads, sequence, width)
                };
                let problem = draw(&mut random, kind, float);
                if !has(KERNEL, &client, &problem, float) {
                    return;
                }
                let results = solve(KERNEL, &client, &problem, float, Memory::InAlignedRows);
                compare_16_bits(&results, &problem, float, &format!("{float} {kind:?}"));
            }
        }
    }
}

/// Sequences that are padded before and behind, by whole tiles and parts of them, and one of nothing but padding.
#[rstest]
fn padding_is_not_seen(#[values([64, 64], [128, 128])] width: [usize; 2]) {
    const KEYS: usize = 700;
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<bf16>();
    for band in [Band::ALL, Band::CAUSAL] {
        let kind = Kind {
            band,
            mask: Some([true, false, false, true]),
            ..Kind::plain([4, 2, 2], [KEYS, KEYS], width)
        };
        let mut problem = draw(&mut random, kind, float);
        if !has(KERNEL, &client, &problem, float) {
            return;
        }
        let there = [0..KEYS, 0..301, 256..513, 0..0];
        let (hidden, _) = problem.mask.as_mut().expect("a mask");
        for (hidden, there) in hidden.chunks_mut(KEYS).zip(there) {
            for (key, hidden) in hidden.iter_mut().enumerate() {
                *hidden = !there.contains(&key);
            }
        }
        let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
        compare_16_bits(&results, &problem, float, &format!("{kind:?}"));
        let nothing = &results.output[3 * results.output.len() / 4..];
        assert!(nothing.iter().all(|&x| x == 0.0), "{kind:?}");
    }
}

#[rstest]
fn repeats_to_the_bit(#[values(None, Some([true, false, true, true]))] mask: Option<Dims>) {
    let (client, mut random) = (client(), Random::fresh());
    let kind = Kind {
        band: Band::CAUSAL,
        mask,
        ..Kind::plain([2, 6, 2], [700, 900], [64, 64])
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

const WINDOW: Band = Band {
    left: Some(150),
    right: Some(3),
};

/// In the backward pass blocks share the heads of a group where there are few of them: each has one head, or two of
/// four; where there are many, or little to do, each has all. By 132 multiprocessors.
#[rstest]
#[case::one_head(Kind { band: Band::CAUSAL, ..Kind::plain([1, 8, 2], [700, 700], [128, 128]) })]
#[case::two_heads(Kind { band: Band::CAUSAL, ..Kind::plain([22, 4, 1], [257, 257], [64, 64]) })]
#[case::all_heads(Kind { band: Band::CAUSAL, ..Kind::plain([40, 4, 2], [300, 300], [64, 64]) })]
#[case::one_tile(Kind::plain([1, 4, 2], [50, 300], [128, 128]))]
#[case::no_queries(Kind { band: WINDOW, ..Kind::plain([1, 6, 2], [400, 1100], [64, 64]) })]
#[case::window(Kind { band: WINDOW, ..Kind::plain([2, 6, 1], [700, 700], [96, 40]) })]
#[case::mask(Kind { mask: Some([true; 4]), ..Kind::plain([2, 6, 2], [300, 450], [40, 96]) })]
#[case::padding(
    Kind { mask: Some([true, false, false, true]), band: Band::CAUSAL, ..Kind::plain([3, 8, 2], [513, 513], [128, 128]) }
)]
fn blocks_share_the_heads_of_a_group(
    #[case] kind: Kind,
    #[values(Memory::Contiguous, Memory::InAlignedRows)] memory: Memory,
) {
    let (client, mut random) = (client(), Random::fresh());
    for float in [dtype::<bf16>(), dtype::<f16>()] {
        let problem = draw(&mut random, kind, float);
        if !has(KERNEL, &client, &problem, float) {
            return;
        }
        let solve = || solve(KERNEL, &client, &problem, float, memory);
        let results = solve();
        compare_16_bits(&results, &problem, float, &format!("{float} {kind:?}"));
        assert_eq!(results.bits(), solve().bits(), "{float} {kind:?}");
    }
}

/// Gradients are the same, whichever are wanted.
#[rstest]
fn what_is_wanted_changes_nothing() {
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<bf16>();
    let kind = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([1, 8, 2], [700, 700], [128, 128])
    };
    let problem = draw(&mut random, kind, float);
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    let solve = |wanted: [bool; 3]| {
        let [query, key, value] = wanted;
        let wanted = AttentionGradients {
            query,
            key,
            value,
            bias: false,
        };
        let memory = Memory::InAlignedRows;
        let of = solve_for(KERNEL, &client, &problem, float, memory, wanted).gradients;
        [of.query, of.key, of.value]
    };
    let all = solve([true; 3]);
    for index in 0..3 {
        let only = solve([0, 1, 2].map(|it| it == index));
        for (it, (only, all)) in only.iter().zip(&all).enumerate() {
            let expected = all.as_ref().filter(|_| it == index);
            assert!(only.as_ref() == expected, "{index}: {it}");
        }
    }
}

/// Blocks take tiles of many heads one after the other, in sections and rounds; of few heads each has one. Among them
/// queries that see nothing, heads that share keys, and few queries of many keys.
#[rstest]
#[case(Band::ALL, [12, 12], [1000, 1000], 64)]
#[case(Band::CAUSAL, [12, 12], [1000, 1000], 64)]
#[case(Band::CAUSAL, [8, 2], [600, 700], 128)]
#[case(Band::CAUSAL, [12, 6], [1000, 300], 64)]
#[case(Band { left: Some(70), right: Some(3) }, [12, 12], [900, 900], 128)]
#[case(Band::CAUSAL, [8, 2], [1, 9000], 128)]
fn a_head_is_the_same_among_others(
    #[case] band: Band,
    #[case] heads: [usize; 2],
    #[case] sequence: [usize; 2],
    #[case] width: usize,
) {
    const BATCHES: usize = 17;
    let (client, mut random) = (client(), Random::fresh());
    let float = dtype::<bf16>();
    let kind = Kind {
        band,
        ..Kind::plain([1, heads[0], heads[1]], [1, 1], [width, width])
    };
    let problem = draw(&mut random, kind, float);
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    let shapes = [
        [heads[0], sequence[0], width],
        [heads[1], sequence[1], width],
        [heads[1], sequence[1], width],
    ];
    let of_batch = shapes.map(|shape| shape.iter().product::<usize>());
    let inputs =
        of_batch.map(|len| -> Vec<f32> { (0..BATCHES * len).map(|_| random.normal()).collect() });
    let solve = |batches: Range<usize>| {
        let [query, key, value] = [0, 1, 2].map(|index| {
            let len = of_batch[index];
            let values = &inputs[index][batches.start * len..batches.end * len];
            let [heads, sequence, width] = shapes[index];
            upload(
                &client,
                values,
                &[batches.len(), heads, sequence, width],
                float,
            )
        });
        let tensors = AttentionTensors {
            query,
            key,
            value,
            mask: None,
            bias: None,
        };
        let output = KERNEL.forward(&client, &tensors, &problem.options);
        let output = output.expect("attention that has kernels");
        // A batch is whole in memory, whatever the order of its rows.
        let of_rows = vec![batches.len(), of_batch[0]];
        let rows = TensorHandle::new_contiguous(of_rows, output.output.handle, float);
        let sums = read_float(&client, &output.log_sum_exp);
        (read_float(&client, &rows), sums)
    };
    let (output, sums) = solve(0..BATCHES);
    let of_sums = heads[0] * sequence[0];
    for batch in 0..BATCHES {
        let (alone, sums_alone) = solve(batch..batch + 1);
        assert!(
            output[batch * of_batch[0]..][..of_batch[0]] == alone
                && sums[batch * of_sums..][..of_sums] == sums_alone,
            "batch {batch}"
        );
    }
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
        if !has(KERNEL, &client, &problem, float) {
            return;
        }
        // One feature that moves all scores: -512 times the scale.
        for x in problem.query.chunks_mut(width[0]) {
            x[0] = -256.0;
        }
        for x in problem.key.chunks_mut(width[0]) {
            x[0] = 2.0;
        }
        let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
        compare_16_bits(&results, &problem, float, &format!("{kind:?}"));
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
    if !has(KERNEL, &client, &problem, float) {
        return;
    }
    for x in &mut problem.query {
        *x = rounded(&[*x * 50.0], float)[0];
    }
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    assert!(results.output.iter().all(|x| x.is_finite()));
    let of = &results.gradients;
    for gradient in [&of.query, &of.key, &of.value].into_iter().flatten() {
        assert!(gradient.iter().all(|x| x.is_finite()));
    }
    const ROW: usize = 150;
    problem.query[ROW * 64 + 5] = f32::NAN;
    let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
    for (row, values) in results.output.chunks(64).enumerate() {
        assert_eq!(values.iter().all(|x| x.is_nan()), row == ROW, "row {row}");
        assert_eq!(results.log_sum_exp[row].is_nan(), row == ROW, "row {row}");
    }
}

/// Compares INT8 products where the device has them: whether it has. Gradients have the error of an output in 16 bits
/// and of probabilities in them, which rows of few keys feel.
fn compare_int8(problem: &Problem, float: StorageType, memory: Memory, what: &str) -> bool {
    let client = client();
    if !has(KERNEL, &client, problem, float) {
        return false;
    }
    let results = solve(KERNEL, &client, problem, float, memory);
    let expected = problem.solve();
    let share = if float == dtype::<f16>() { 3e-3 } else { 5e-3 };
    let (width, forward) = (problem.shape.value_width, &expected.forward);
    assert_near(&results.output, &forward.output, width, share, what);
    assert_close(&results.log_sum_exp, &forward.log_sum_exp, 1e-4, what);
    let (of, actual) = (&expected.gradients, &results.gradients);
    for (actual, expected) in [
        (&actual.query, &of.query),
        (&actual.key, &of.key),
        (&actual.value, &of.value),
    ] {
        let actual = actual.as_deref().unwrap_or_default();
        let whole = expected.len().max(1);
        assert_near(actual, expected, whole, 0.05, &format!("{what}: gradient"));
    }
    let again = solve(KERNEL, &client, problem, float, memory);
    assert_eq!(results.bits(), again.bits(), "{what}");
    true
}

/// One query, tiles, their neighbours and between; heads that fill rows of codes and do not; masks.
#[rstest]
fn int8_products_equal_the_reference(
    #[values([64, 64], [128, 128], [8, 16], [96, 40])] width: [usize; 2],
    #[values(Band::ALL, Band::CAUSAL, WINDOW)] band: Band,
    #[values(None, Some([true, false, true, true]))] mask: Option<Dims>,
    #[values(Memory::Contiguous, Memory::InAlignedRows)] memory: Memory,
) {
    let mut random = Random::fresh();
    for (heads, sequence) in [
        ([2, 3, 3], [128, 128]),
        ([1, 4, 2], [130, 1301]),
        ([1, 2, 1], [901, 37]),
        ([2, 1, 1], [1, 65]),
        ([3, 12, 4], [700, 700]),
    ] {
        for float in [dtype::<bf16>(), dtype::<f16>()] {
            let kind = Kind {
                band,
                mask,
                products: AttentionProducts::Int8,
                ..Kind::plain(heads, sequence, width)
            };
            let problem = draw(&mut random, kind, float);
            if !compare_int8(&problem, float, memory, &format!("{float} {kind:?}")) {
                return;
            }
        }
    }
}

/// Keys and queries of zeros, scores of thousands, and one feature that moves all scores far below 0.
#[rstest]
fn int8_products_of_extremes(#[values([64, 64], [128, 128])] width: [usize; 2]) {
    let (mut random, float) = (Random::fresh(), dtype::<bf16>());
    let kind = Kind {
        band: Band::CAUSAL,
        products: AttentionProducts::Int8,
        ..Kind::plain([1, 2, 1], [300, 400], width)
    };
    type Change = fn(&mut Problem);
    let changes: [(&str, Change); 5] = [
        ("zeros", |it| it.query[..128 * 8].fill(0.0)),
        ("keys of zeros", |it| it.key.fill(0.0)),
        ("values of zeros", |it| it.value.fill(0.0)),
        ("large scores", |it| {
            it.query.iter_mut().for_each(|x| *x *= 512.0);
        }),
        ("far below zero", |it| {
            let width = it.shape.width;
            let first = |x: &mut Vec<f32>, value| {
                x.chunks_mut(width).for_each(|row| row[0] = value);
            };
            first(&mut it.query, -256.0);
            first(&mut it.key, 2.0);
        }),
    ];
    for (what, change) in changes {
        let mut problem = draw(&mut random, kind, float);
        change(&mut problem);
        if !compare_int8(&problem, float, Memory::Contiguous, what) {
            return;
        }
    }
}

/// NaN reaches the rows that see one of its scale's keys: those of one query, or of 128 keys. A scale of keys that a row
/// does not see changes nothing, though its tile may be computed; one of values may.
#[rstest]
fn int8_products_keep_nan_where_it_is_seen(#[values(f32::NAN, f32::INFINITY)] bad: f32) {
    const WIDTH: usize = 64;
    // Of 400 keys the second tile is seen from this query of 330 on.
    const FIRST: usize = 58;
    let (client, mut random, float) = (client(), Random::fresh(), dtype::<bf16>());
    let kind = Kind {
        band: Band::CAUSAL,
        products: AttentionProducts::Int8,
        ..Kind::plain([1, 1, 1], [330, 400], [WIDTH, WIDTH])
    };
    type Inputs = fn(&mut Problem) -> &mut Vec<f32>;
    let inputs: [(Inputs, Range<usize>, Range<usize>); 3] = [
        (|it| &mut it.query, 150..151, 0..330),
        (|it| &mut it.key, FIRST..330, 0..330),
        (|it| &mut it.value, FIRST..330, FIRST..330),
    ];
    for (input, rows, compared) in inputs {
        let mut problem = draw(&mut random, kind, float);
        if !has(KERNEL, &client, &problem, float) {
            return;
        }
        input(&mut problem)[150 * WIDTH + 5] = bad;
        let results = solve(KERNEL, &client, &problem, float, Memory::Contiguous);
        let outputs = results.output.chunks(WIDTH).enumerate();
        for (row, values) in outputs.filter(|(row, _)| compared.contains(row)) {
            let is_nan = rows.contains(&row);
            assert!(
                values.iter().all(|x| x.is_nan() == is_nan),
                "{rows:?}: row {row}"
            );
        }
    }
}

/// Problems without a kernel are named, on every device.
#[rstest]
#[case::scale(AttentionOptions::new(-1.0), 64, "scale")]
#[case::soft_cap(AttentionOptions { softcap: Some(3.0), ..AttentionOptions::new(1.0) }, 64, "soft cap")]
#[case::dropout_of_scores(
    AttentionOptions {
        dropout: Some(Dropout {
            dropped: Dropped::Scores,
            draw: Draw { rate: 0.1,
            key: StochasticKey { seed: 1, stream: 2 }, },
        }),
        ..AttentionOptions::new(1.0)
    },
    64,
    "dropout"
)]
#[case::dropout_of_probabilities(
    AttentionOptions {
        dropout: Some(Dropout {
            dropped: Dropped::Probabilities,
            draw: Draw { rate: 0.1,
            key: StochasticKey { seed: 1, stream: 2 }, },
        }),
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
    let x = upload(&client, &vec![0.0; 32 * width], &shape, float);
    let tensors = AttentionTensors {
        query: x.clone(),
        key: x.clone(),
        value: x,
        mask: None,
        bias: None,
    };
    let error = KERNEL.forward(&client, &tensors, &options);
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
        KERNEL.reads(&tensor)
    };
    assert!(reads([240, 80, 16, 1], 0));
    assert!(reads([240, 16, 48, 1], 256));
    assert!(!reads([240, 80, 16, 1], 2));
    assert!(!reads([240, 80, 1, 5], 0));
    assert!(!reads([255, 85, 17, 1], 0));
    assert!(!reads([0, 80, 16, 1], 0));
}
