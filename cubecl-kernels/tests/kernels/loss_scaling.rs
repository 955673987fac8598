//! The schedule of loss scaling, and AdamW on the gradients of a scaled loss.

use cubecl_kernels::{
    adamw::Hyperparameters,
    loss_scaling::{LossScaling, is_scale},
    reference::{
        adamw::{MomentChunk, Step, adamw},
        update_loss_scale,
    },
};

use crate::random::Random;

const HYPERPARAMETERS: Hyperparameters = Hyperparameters {
    learning_rate: 1e-3,
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip_norm: None,
};

/// Short enough for a test: twice after three good steps, a quarter after a bad one, within [2, 64].
const SHORT: LossScaling = LossScaling {
    initial: 16.0,
    growth: 2.0,
    backoff: 0.25,
    growth_interval: 3,
    minimum: 2.0,
    maximum: 64.0,
};

/// Steps, `.` good and `x` not, and the scale behind each.
const STEPS: [(char, f32); 24] = [
    ('.', 16.0),
    ('.', 16.0),
    ('.', 32.0),
    ('.', 32.0),
    ('.', 32.0),
    ('.', 64.0),
    // The largest one stays.
    ('.', 64.0),
    ('.', 64.0),
    ('.', 64.0),
    ('.', 64.0),
    ('.', 64.0),
    // A bad step begins the count anew.
    ('x', 16.0),
    ('.', 16.0),
    ('.', 16.0),
    ('x', 4.0),
    // The smallest one stays.
    ('x', 2.0),
    ('x', 2.0),
    ('.', 2.0),
    ('.', 2.0),
    ('.', 4.0),
    ('.', 4.0),
    ('.', 4.0),
    ('.', 8.0),
    ('x', 2.0),
];

#[test]
fn the_reference_follows_the_schedule() {
    let (mut scale, mut good_steps) = (SHORT.initial, 0);
    for (index, (step, expected)) in STEPS.into_iter().enumerate() {
        update_loss_scale(&mut scale, &mut good_steps, step == '.', &SHORT);
        assert_eq!(scale, expected, "step {index}");
    }
}

#[test]
fn the_defaults_are_those_of_amp() {
    let config = LossScaling::default();
    config.check().expect("settings in their ranges");
    let (mut scale, mut good_steps) = (config.initial, 0);
    let mut steps = |count, good| {
        for _ in 0..count {
            update_loss_scale(&mut scale, &mut good_steps, good, &config);
        }
        scale
    };
    assert_eq!(steps(1_999, true), 65_536.0);
    assert_eq!(steps(1, true), 131_072.0);
    assert_eq!(steps(1, false), 65_536.0);
    assert_eq!(steps(2_000, true), 131_072.0);
    assert_eq!(steps(1, false), 65_536.0);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let largest = 2f32.powi(126);
    for scale in [f32::MIN_POSITIVE, 0.5, 1.0, 65_536.0, largest] {
        assert!(is_scale(scale) && is_scale(1.0 / scale), "{scale:e}");
    }
    let never = [
        0.0,
        -2.0,
        3.0,
        1.0f32.next_up(),
        2.0 * largest,
        f32::MIN_POSITIVE / 2.0,
        f32::NAN,
        f32::INFINITY,
    ];
    type Set = fn(&mut LossScaling, f32);
    let settings: [(&str, Set, &[f32]); 5] = [
        ("initial", |it, x| it.initial = x, &[1.0, 128.0]),
        ("growth", |it, x| it.growth = x, &[1.0, 0.5]),
        ("backoff", |it, x| it.backoff = x, &[1.0, 2.0]),
        ("minimum", |it, x| it.minimum = x, &[]),
        ("maximum", |it, x| it.maximum = x, &[]),
    ];
    for (name, set, also) in settings {
        for &value in never.iter().chain(also) {
            let mut config = SHORT;
            set(&mut config, value);
            let message = config.check().expect_err("out of range").to_string();
            let expected = format!("loss scaling: {name} is {value}");
            assert!(message.starts_with(&expected), "{message}");
            assert!(message.contains("; use "), "{message}");
        }
    }
    for growth_interval in [0, 1 << 31] {
        let config = LossScaling {
            growth_interval,
            ..SHORT
        };
        let message = config.check().expect_err("out of range").to_string();
        assert!(message.contains(&format!("growth_interval is {growth_interval}")));
    }
}

/// Gradients whose multiples by `scale` are normal.
fn gradients(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| random.normal() * (-12.0 * random.uniform()).exp2() * 0.01)
        .collect()
}

const SCALES: [f32; 4] = [0.25, 1.0, 65_536.0, 4_294_967_296.0];

#[test]
fn the_reference_divides_by_the_scale_without_rounding() {
    let (mut random, n) = (Random::fresh(), 301);
    let p: Vec<f32> = (0..n).map(|_| 0.5 + random.uniform()).collect();
    let g = gradients(&mut random, n);
    let plain = Step::new(&HYPERPARAMETERS, 3).expect("betas below 1");
    let run = |step: &Step, g: &[f32]| {
        let (mut p, mut m, mut v) = (p.clone(), vec![0.1; n], vec![0.01; n]);
        let (first, second) = (MomentChunk::Full(&mut m), MomentChunk::Full(&mut v));
        adamw(step, &mut p, g, first, second, None);
        [p, m, v].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    let expected = run(&plain, &g);
    for scale in SCALES {
        let scaled: Vec<f32> = g.iter().map(|g| g * scale).collect();
        assert!(
            run(&plain.of_scaled_loss(scale), &scaled) == expected,
            "{scale}"
        );
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        adamw::{AdamWTensors, adamw as adamw_on_device, initial_clock, initial_flag, tick},
        loss_scaling::{initial_loss_scale, update_loss_scale as update_on_device},
        optimizer_state::{Moment, StateFormat, initial_state},
        rounding::Rounding,
    };

    use super::*;
    use crate::device::{TestRuntime, client, dtype, read, upload, upload_i32};

    #[test]
    fn the_kernel_equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let (scale, good_steps) = initial_loss_scale(&client, &SHORT);
        let mut expected = (SHORT.initial, 0);
        let drawn = (0..100).map(|_| random.index(5) > 0);
        let steps = STEPS.into_iter().map(|(step, _)| step == '.').chain(drawn);
        for (index, good) in steps.enumerate() {
            let flag = upload_i32(&client, &[i32::from(!good) * 7], &[1]);
            update_on_device(&client, &scale, &good_steps, &flag, &SHORT).expect("a scale");
            update_loss_scale(&mut expected.0, &mut expected.1, good, &SHORT);
            let actual = (
                read::<f32>(&client, &scale)[0],
                read::<i32>(&client, &good_steps)[0] as u32,
            );
            assert_eq!(actual, expected, "step {index}");
        }
    }

    /// Factors that leave the range of FP32 stop at the ends.
    #[test]
    fn the_kernel_stays_within_the_range() {
        let client = client();
        let config = LossScaling {
            initial: 1.0,
            growth: 2f32.powi(126),
            backoff: f32::MIN_POSITIVE,
            growth_interval: 1,
            minimum: f32::MIN_POSITIVE,
            maximum: 2f32.powi(126),
        };
        let (scale, good_steps) = initial_loss_scale(&client, &config);
        for (flag, expected) in [
            (0, config.maximum),
            (0, config.maximum),
            (1, 1.0),
            (1, config.minimum),
            (1, config.minimum),
        ] {
            let flag = upload_i32(&client, &[flag], &[1]);
            update_on_device(&client, &scale, &good_steps, &flag, &config).expect("a scale");
            assert_eq!(read::<f32>(&client, &scale), [expected]);
        }
    }

    /// Several steps of a small tensor, which shares launches, of a large one, and of compressed moments.
    #[test]
    fn a_scaled_step_is_the_step_of_unscaled_gradients() {
        let (client, mut random) = (client(), Random::fresh());
        let e4m3 = Some(StateFormat::E4M3.expanded());
        let int8 = Some(StateFormat::INT8);
        for (n, first, second) in [
            (1, None, None),
            (301, None, None),
            (70_001, None, None),
            (70_000, None, None),
            (4_097, e4m3, e4m3),
            (4_096, int8, int8),
            (129, e4m3, None),
        ] {
            let p: Vec<f32> = (0..n).map(|_| 0.5 + random.uniform()).collect();
            let gradients = [(); 3].map(|()| gradients(&mut random, n));
            let run = |scale: Option<f32>| {
                let state = |format, moment| initial_state(&client, &[n], format, moment);
                let mut tensors: AdamWTensors<TestRuntime> = AdamWTensors {
                    updated: None,
                    parameter: upload(&client, &p, &[n], dtype::<f32>()),
                    gradient: upload(&client, &p, &[n], dtype::<f32>()),
                    first: state(first, Moment::First).expect("a group"),
                    second: state(second, Moment::Second).expect("a group"),
                    rounding: Rounding::Nearest,
                    state_rounding: Rounding::Nearest,
                };
                let clock = initial_clock(&client);
                let loss_scale = scale.map(|it| upload(&client, &[it], &[1], dtype::<f32>()));
                for g in &gradients {
                    let factor = scale.unwrap_or(1.0);
                    let g: Vec<f32> = g.iter().map(|g| g * factor).collect();
                    tensors.gradient = upload(&client, &g, &[n], dtype::<f32>());
                    tick(&client, &clock, None).expect("a clock");
                    adamw_on_device(
                        &client,
                        std::slice::from_ref(&tensors),
                        &clock,
                        None,
                        loss_scale.as_ref(),
                        &HYPERPARAMETERS,
                    )
                    .expect("tensors that fit");
                }
                [
                    &tensors.parameter,
                    &tensors.first.values,
                    &tensors.second.values,
                ]
                .map(|it| {
                    client
                        .read_one(it.handle.clone())
                        .expect("a buffer")
                        .to_vec()
                })
            };
            let expected = run(None);
            for scale in SCALES {
                assert!(run(Some(scale)) == expected, "{n}, {first:?}, {scale}");
            }
        }
    }

    #[test]
    fn wrong_tensors_are_refused() {
        let client = client();
        let (scale, good_steps) = initial_loss_scale(&client, &SHORT);
        let flag = initial_flag(&client);
        let two = upload(&client, &[1.0, 1.0], &[2], dtype::<f32>());
        let refused = |result: Result<(), cubecl_kernels::KernelError>, what: &str| {
            let message = result.expect_err("refused").to_string();
            assert!(message.contains(what), "{message}");
        };
        let update = |scale, good_steps, flag, config: &LossScaling| {
            update_on_device(&client, scale, good_steps, flag, config)
        };
        refused(
            update(&two, &good_steps, &flag, &SHORT),
            "pass a tensor [1]",
        );
        refused(update(&flag, &good_steps, &flag, &SHORT), "use f32");
        refused(update(&scale, &scale, &flag, &SHORT), "good_steps");
        refused(update(&scale, &good_steps, &scale, &SHORT), "nonfinite");
        let wrong = LossScaling {
            growth: 1.0,
            ..SHORT
        };
        refused(update(&scale, &good_steps, &flag, &wrong), "growth is 1");
        let clock = initial_clock(&client);
        refused(
            adamw_on_device(&client, &[], &clock, None, Some(&two), &HYPERPARAMETERS),
            "pass a tensor [1]",
        );
    }
}
