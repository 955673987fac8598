//! The kernel against the reference, to the bit.

use cubecl_kernels::{
    KernelError,
    amax_history::{AmaxHistory, DelayedScaling, advance_amax_history},
    reference,
};
use half::f16;
use rstest::rstest;

use super::EVERY_STEP;
use crate::{
    device::{Client, client, dtype, read, upload},
    random::Random,
};

/// Maxima of all magnitudes, and what is none.
fn maximum(random: &mut Random) -> f32 {
    const SPECIAL: [f32; 9] = [
        0.0,
        1e-40,
        7.8e-31,
        // The smallest that counts is 2^-100.
        7.888609e-31,
        f32::MAX,
        2e38,
        f32::INFINITY,
        f32::NAN,
        -f32::NAN,
    ];
    match random.uniform() < 0.15 {
        true => SPECIAL[random.index(SPECIAL.len())],
        false => 10f32.powf(8.0 * random.uniform() - 4.0),
    }
}

/// The state of layers on the host.
struct State {
    maxima: Vec<f32>,
    history: Vec<f32>,
}

/// A step on the device and one of the reference.
fn compare(client: &Client, state: &mut State, runs: &[f32], scaling: &DelayedScaling) {
    let (layers, dtype) = (state.maxima.len(), dtype::<f32>());
    let matrix = |values: &[f32]| upload(client, values, &[layers, values.len() / layers], dtype);
    let on_device = AmaxHistory {
        maxima: upload(client, &state.maxima, &[layers], dtype),
        history: matrix(&state.history),
    };
    let next =
        advance_amax_history(client, &on_device, &matrix(runs), scaling).expect("shapes that fit");
    let before = [
        read::<f32>(client, &on_device.maxima),
        read::<f32>(client, &on_device.history),
    ];
    assert_eq!(before, [&state.maxima[..], &state.history], "what went in");
    let State { maxima, history } = state;
    reference::amax_history::advance_amax_history(maxima, history, runs, scaling);
    assert_eq!(&read::<f32>(client, &next.maxima), maxima, "{scaling:?}");
    assert_eq!(&read::<f32>(client, &next.history), history, "{scaling:?}");
}

#[rstest]
fn goes_on_as_the_reference(
    #[values(1, 2, 255, 256, 257, 1024)] length: usize,
    #[values(1, 3, 300)] count: usize,
) {
    let (client, mut random) = (client(), Random::fresh());
    let layers = 1 + random.index(70);
    let mut state = State {
        maxima: vec![0.0; layers],
        history: vec![0.0; layers * length],
    };
    for step in 0..8 {
        let scaling = DelayedScaling {
            margin: [0, 1, 64][random.index(3)],
            most_recent: random.uniform() < 0.3,
            due: random.uniform() < 0.6,
        };
        let mut runs: Vec<f32> = (0..layers * count).map(|_| maximum(&mut random)).collect();
        // In some steps a layer of many runs has nothing but numbers.
        if step % 2 == 0 {
            for run in &mut runs[..layers.div_ceil(2) * count] {
                *run = if run.is_finite() { *run } else { 1.0 };
            }
        }
        compare(&client, &mut state, &runs, &scaling);
    }
    assert!(state.maxima.iter().any(|maximum| *maximum > 0.0));
}

#[test]
fn no_layers_and_no_runs_are_steps_and_others_are_refused() {
    let client = client();
    let of = |shape: &[usize]| {
        let values = vec![1.0; shape.iter().product()];
        upload(&client, &values, shape, dtype::<f32>())
    };
    let state = |layers: usize, history: &[usize]| AmaxHistory {
        maxima: of(&[layers]),
        history: of(history),
    };
    let advance = |state: &AmaxHistory<_>, runs: &[usize], scaling: &DelayedScaling| {
        advance_amax_history(&client, state, &of(runs), scaling)
    };
    let none = advance(&state(0, &[0, 4]), &[0, 2], &EVERY_STEP).expect("no layers");
    assert_eq!(none.history.shape()[..], [0, 4]);
    let same = advance(&state(2, &[2, 4]), &[2, 0], &EVERY_STEP).expect("no runs");
    assert_eq!(read::<f32>(&client, &same.history), [1.0; 8]);
    for (history, runs) in [
        (&[2, 0][..], &[2, 1][..]),
        (&[3, 4], &[2, 1]),
        (&[2, 4], &[3, 1]),
        (&[8], &[2, 1]),
        (&[2, 4], &[2]),
    ] {
        let refused = advance(&state(2, history), runs, &EVERY_STEP).expect_err("shapes");
        assert!(matches!(refused, KernelError::Shape { .. }), "{refused}");
    }
    let wide = DelayedScaling {
        margin: 65,
        ..EVERY_STEP
    };
    let refused = advance(&state(2, &[2, 4]), &[2, 1], &wide).expect_err("a margin");
    assert!(matches!(refused, KernelError::Unsupported { .. }));
    let narrow = upload(&client, &[1.0; 2], &[2, 1], dtype::<f16>());
    let refused = advance_amax_history(&client, &state(2, &[2, 4]), &narrow, &EVERY_STEP);
    assert!(matches!(refused, Err(KernelError::Dtype { .. })));
}
