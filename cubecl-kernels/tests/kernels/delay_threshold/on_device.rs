//! The controller against the reference, and in a loop with the quantization that it controls.

use cubecl_kernels::{
    delay_threshold::{
        DelayThreshold, MAX_THRESHOLD, MIN_THRESHOLD, delay_threshold, initial_state,
    },
    fallback::quantize_fallback,
    layout::Layout,
    reference,
    shape::MatrixShape,
};
use rstest::rstest;

use super::{ADAPTIVE, PAPER};
use crate::{
    device::{Client, Memory, client, dtype, read, upload, upload_i32, upload_matrix},
    random::Random,
};

/// Thresholds, moves, counts and rates on the host.
struct State {
    thresholds: Vec<f32>,
    moves: Vec<f32>,
    counts: Vec<[i32; 2]>,
    rates: Vec<f32>,
}

/// One step on the device and one of the reference.
fn compare(client: &Client, state: &mut State, config: DelayThreshold) {
    let layers = state.thresholds.len();
    let column = |values: &[f32]| upload(client, values, &[layers], dtype::<f32>());
    let device = [&state.thresholds, &state.moves, &state.rates].map(|it| column(it));
    let counts = upload_i32(client, state.counts.as_flattened(), &[layers, 2]);
    let [thresholds, moves, rates] = &device;
    let output = delay_threshold(client, thresholds, moves, &counts, rates, config)
        .expect("shapes that fit");
    reference::delay_threshold(
        &mut state.thresholds,
        &mut state.moves,
        &mut state.counts,
        &mut state.rates,
        &config,
    );
    for (name, returned, in_place, expected) in [
        (
            "thresholds",
            &output.thresholds,
            thresholds,
            &state.thresholds,
        ),
        ("moves", &output.moves, moves, &state.moves),
        ("rates", &output.rates, rates, &state.rates),
    ] {
        assert_eq!(
            &read::<f32>(client, returned),
            expected,
            "{name}, {config:?}"
        );
        assert_eq!(&read::<f32>(client, in_place), expected, "{name} in place");
    }
    assert_eq!(
        read::<i32>(client, &output.counts),
        state.counts.as_flattened()
    );
}

#[rstest]
fn equals_the_reference(#[values(PAPER, ADAPTIVE)] config: DelayThreshold) {
    let client = client();
    let mut state = State {
        thresholds: vec![
            1.0,
            1.0,
            7.5,
            3.0,
            MIN_THRESHOLD,
            MAX_THRESHOLD,
            0.0,
            f32::INFINITY,
        ],
        moves: vec![0.0, 0.0, 0.1, -0.2, -0.3, 0.3, 0.3, -0.3],
        counts: vec![
            [0, 100],
            [50, 100],
            [20, 100],
            [0, 0],
            [0, 9],
            [9, 9],
            [9, 9],
            [0, 9],
        ],
        rates: vec![0.7; 8],
    };
    compare(&client, &mut state, config);
    assert_eq!(
        state.thresholds,
        [
            1.0 / 1.3,
            1.3,
            7.5,
            3.0,
            MIN_THRESHOLD,
            MAX_THRESHOLD,
            MIN_THRESHOLD,
            MAX_THRESHOLD
        ]
    );
    assert_eq!((state.moves[2], state.moves[3]), (0.1, -0.2));
    assert_eq!(state.rates[3], 0.7);
}

/// Many steps of layers that turn and go on at random, from every factor to every other.
#[rstest]
fn goes_on_as_the_reference(#[values(PAPER, ADAPTIVE)] config: DelayThreshold) {
    let (client, mut random) = (client(), Random::fresh());
    let layers = 150;
    let mut state = State {
        thresholds: (0..layers).map(|_| (4.0 * random.normal()).exp()).collect(),
        moves: vec![0.0; layers],
        counts: vec![[0; 2]; layers],
        rates: vec![0.5; layers],
    };
    for _ in 0..40 {
        for counts in &mut state.counts {
            let total = [0, 1, 3, 10, 8192][random.index(5)];
            *counts = [random.index(total as usize + 1) as i32, total];
        }
        compare(&client, &mut state, config);
    }
}

/// Layers that start a thousand times too low and too high come into the range, and follow a drift of the activations.
#[rstest]
fn rates_reach_their_range_and_follow_drift(#[values(PAPER, ADAPTIVE)] config: DelayThreshold) {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::new(128, 128);
    let state = initial_state(&client, 2, 1.0);
    let starts = [1e-3, 1e3];
    let thresholds = upload(&client, &starts, &[2], dtype::<f32>());
    let mut rates = vec![0.0; 2];
    for (magnitude, steps) in [(1.0f32, 40), (5.0, 24), (0.3, 32)] {
        for _ in 0..steps {
            // 64 blocks of 16 x 16, their maxima spread evenly over an order of magnitude.
            let mut x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
            for (index, x) in x.iter_mut().enumerate() {
                let block = index / 128 / 16 * 8 + index % 128 / 16;
                *x *= magnitude * 10f32.powf((block as f32 + 0.5) / 64.0 - 0.5);
            }
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            for layer in 0..2 {
                quantize_fallback(
                    &client,
                    &tensor,
                    16,
                    Layout::RowMajor,
                    &thresholds,
                    layer,
                    &state.counts,
                )
                .expect("a matrix");
            }
            let output = delay_threshold(
                &client,
                &thresholds,
                &state.moves,
                &state.counts,
                &state.rates,
                config,
            )
            .expect("shapes that fit");
            rates = read::<f32>(&client, &output.rates);
        }
        for &rate in &rates {
            // A fresh sample of 64 blocks may lie outside by its own spread.
            assert!(
                (0.02..=0.42).contains(&rate),
                "magnitude {magnitude}: rates {rates:?}"
            );
        }
    }
    println!("rates {rates:?}");
}
