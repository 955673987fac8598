//! Gradient clipping by norm: its factors against f64, and steps of AdamW with them.

use cubecl_kernels::reference::adamw::clip_factor;

#[test]
fn the_reference_shortens_what_is_longer() {
    for norm in [0.0, f32::MIN_POSITIVE, 0.3, 0.999] {
        assert_eq!(clip_factor(norm, 1.0), 1.0, "{norm}");
    }
    for (norm, threshold) in [(2.0, 1.0), (3e4, 0.5), (1e-3, 1e-7), (1e30, 2.0)] {
        let product = clip_factor(norm, threshold) * norm;
        assert!((product / threshold - 1.0).abs() < 1e-6, "{norm}");
    }
    assert_eq!(clip_factor(f32::INFINITY, 1.0), 0.0);
    assert_eq!(clip_factor(2.0, 0.0), 0.0);
    assert!(clip_factor(f32::NAN, 1.0).is_nan());
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        KernelError,
        adamw::{AdamWTensors, Hyperparameters, adamw, clip_factors, initial_clock, tick},
        optimizer_state::{Moment, StateFormat, initial_state},
        rounding::Rounding,
    };

    use super::*;
    use crate::{
        adamw::on_device::changed,
        device::{
            Client, Tensor, TestRuntime, client, drawn, dtype, float_types, read, rounded, upload,
            upload_i32, upload_with_offset,
        },
        random::Random,
    };

    const SCALE: f32 = 65_536.0;

    fn norm(values: &[f32]) -> f64 {
        let squares = values.iter().map(|&x| f64::from(x) * f64::from(x));
        squares.sum::<f64>().sqrt()
    }

    /// More gradients than a launch takes, of sizes around those of a cube's part, of each type, with and without a
    /// scale; and once more from within buffers, which on CUDA are not aligned there, to the same bits.
    #[test]
    fn factors_are_those_of_the_norms() {
        let (client, mut random) = (client(), Random::fresh());
        let sizes = [1, 3, 4, 0, 1000, 16_384, 16_385, 70_001, 70_000];
        for float in drawn(&mut random, float_types(&client), 1) {
            for scaled in [false, true] {
                let values: Vec<Vec<f32>> = (0..70)
                    .map(|index| {
                        let size = if index < 9 {
                            sizes[index]
                        } else {
                            random.index(50)
                        };
                        let spread = (4.0 * random.normal()).exp2();
                        (0..size).map(|_| spread * random.normal()).collect()
                    })
                    .map(|values: Vec<f32>| rounded(&values, float))
                    .collect();
                let scale = scaled.then(|| upload(&client, &[SCALE], &[1], dtype::<f32>()));
                let unscale = if scaled { 1.0 / f64::from(SCALE) } else { 1.0 };
                let threshold = 3.0 * unscale as f32;
                let factors = |upload: fn(&Client, &[f32], &[usize], _) -> Tensor| {
                    let gradients: Vec<_> = values
                        .iter()
                        .map(|values| upload(&client, values, &[values.len()], float))
                        .collect();
                    let factors = clip_factors(&client, &gradients, threshold, scale.as_ref());
                    read::<f32>(&client, &factors.expect("gradients"))
                };
                let found = factors(upload);
                let mut clipped = 0;
                for (index, (values, &factor)) in values.iter().zip(&found).enumerate() {
                    let norm = norm(values) * unscale;
                    let expected = clip_factor(norm as f32, threshold);
                    clipped += usize::from(expected < 1.0);
                    assert!(
                        (factor - expected).abs() <= 1e-5 * expected && factor <= 1.0,
                        "{float}, scaled {scaled}, {index}: {factor} for {expected}"
                    );
                }
                assert!(0 < clipped && clipped < values.len(), "{clipped} clipped");
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits);
                let again = bits(factors(upload_with_offset));
                assert!(again.eq(bits(found)), "{float}, scaled {scaled}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let client = client();
        let mut long = vec![1.0; 40_000];
        long[39_999] = f32::NAN;
        let gradients = [
            &long[..],
            &[2.0, f32::NEG_INFINITY],
            &[1e25, 1.0],
            &[0.0; 5],
            &[],
        ];
        let gradients =
            gradients.map(|values| upload(&client, values, &[values.len()], dtype::<f32>()));
        let factors = clip_factors(&client, &gradients, 1.0, None).expect("gradients");
        let factors = read::<f32>(&client, &factors);
        assert!(factors[0].is_nan());
        assert_eq!(factors[1..], [0.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn others_are_refused() {
        let client = client();
        let floats = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
        let mut turned = floats.clone();
        turned.metadata.swap(0, 1);
        let refused = |gradients: &[_], scale| {
            clip_factors(&client, gradients, 1.0, scale).expect_err("bad input")
        };
        assert!(matches!(refused(&[], None), KernelError::Shape { .. }));
        let got = refused(&[floats.clone(), turned], None);
        assert!(matches!(got, KernelError::Shape { .. }));
        let integers = upload_i32(&client, &[1; 6], &[6]);
        let got = refused(&[integers], None);
        assert!(matches!(got, KernelError::Dtype { .. }));
        let got = refused(std::slice::from_ref(&floats), Some(&floats));
        assert!(matches!(got, KernelError::Shape { .. }));
        for clip_norm in [f32::NAN, -1.0, f32::INFINITY] {
            let hyperparameters = hyperparameters(Some(clip_norm));
            let clock = initial_clock(&client);
            let state = |moment| initial_state(&client, &[2, 3], None, moment).expect("FP32");
            let tensors = AdamWTensors {
                updated: None,
                parameter: floats.clone(),
                gradient: floats.clone(),
                first: state(Moment::First),
                second: state(Moment::Second),
                rounding: Rounding::Nearest,
                state_rounding: Rounding::Nearest,
            };
            let error = adamw(&client, &[tensors], &clock, None, None, &hyperparameters);
            assert!(matches!(error, Err(KernelError::Unsupported { .. })));
        }
    }

    fn hyperparameters(clip_norm: Option<f32>) -> Hyperparameters {
        Hyperparameters {
            learning_rate: 1e-3,
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip_norm,
        }
    }

    /// The step of gradients that are multiplied by their factors beforehand, to the bit: of tensors that share a
    /// launch and of others, of which some are clipped and some are not.
    #[test]
    fn a_clipped_step_is_the_step_of_shortened_gradients() {
        let (client, mut random) = (client(), Random::fresh());
        // Without expansion, which leaves the rounding of sums to the compiler.
        let e4m3 = Some(StateFormat::E4M3);
        let kinds = [
            (3, None),
            (1000, None),
            (70_001, None),
            (0, None),
            (4096, e4m3),
            (5000, e4m3),
        ];
        let p = kinds.map(|(len, _)| {
            (0..len)
                .map(|_| 0.5 + random.uniform())
                .collect::<Vec<f32>>()
        });
        let spreads = [1.0, 1e-3, 0.1, 1.0, 1e-4, 2.0];
        let steps: Vec<[Vec<f32>; 6]> = (0..2)
            .map(|_| {
                std::array::from_fn(|index| {
                    let len = kinds[index].0;
                    (0..len).map(|_| spreads[index] * random.normal()).collect()
                })
            })
            .collect();
        for scaled in [false, true] {
            let scale = scaled.then(|| upload(&client, &[SCALE], &[1], dtype::<f32>()));
            let factor = if scaled { SCALE } else { 1.0 };
            let run = |clip: bool| {
                let mut tensors: Vec<AdamWTensors<TestRuntime>> = kinds
                    .iter()
                    .zip(&p)
                    .map(|(&(len, format), p)| {
                        let state = |moment| {
                            initial_state(&client, &[len], format, moment).expect("a group")
                        };
                        AdamWTensors {
                            updated: None,
                            parameter: upload(&client, p, &[len], dtype::<f32>()),
                            gradient: upload(&client, p, &[len], dtype::<f32>()),
                            first: state(Moment::First),
                            second: state(Moment::Second),
                            rounding: Rounding::Nearest,
                            state_rounding: Rounding::Nearest,
                        }
                    })
                    .collect();
                let clock = initial_clock(&client);
                for gradients in &steps {
                    let uploaded = |gradients: &[Vec<f32>]| -> Vec<Tensor> {
                        let of = |g: &Vec<f32>| upload(&client, g, &[g.len()], dtype::<f32>());
                        gradients.iter().map(of).collect()
                    };
                    let plain = uploaded(gradients);
                    let factors = clip_factors(&client, &plain, 1.0, None).expect("gradients");
                    let factors = read::<f32>(&client, &factors);
                    let of_others = || kinds.iter().zip(&factors).filter(|((len, _), _)| *len > 0);
                    assert!(of_others().any(|(_, &factor)| factor == 1.0));
                    assert!(of_others().any(|(_, &factor)| factor < 1.0));
                    let given: Vec<Vec<f32>> = gradients
                        .iter()
                        .zip(factors)
                        .map(|(g, shortened)| {
                            let by = if clip { factor } else { shortened };
                            g.iter().map(|g| g * by).collect()
                        })
                        .collect();
                    for (tensors, gradient) in tensors.iter_mut().zip(uploaded(&given)) {
                        tensors.gradient = gradient;
                    }
                    tick(&client, &clock, None).expect("a clock");
                    let scale = scale.as_ref().filter(|_| clip);
                    let hyperparameters = hyperparameters(clip.then_some(1.0));
                    adamw(&client, &tensors, &clock, None, scale, &hyperparameters)
                        .expect("tensors that fit");
                }
                let changed = tensors.iter().flat_map(changed);
                let bytes = changed.map(|tensor| {
                    let bytes = client.read_one(tensor.handle.clone()).expect("a buffer");
                    bytes[..tensor.shape().iter().product::<usize>() * tensor.dtype.size()].to_vec()
                });
                bytes.collect::<Vec<_>>()
            };
            assert!(run(true) == run(false), "scaled {scaled}");
        }
    }
}
