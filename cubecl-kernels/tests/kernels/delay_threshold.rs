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

use crate::{
    device::{Memory, client, dtype, read, upload, upload_i32, upload_matrix},
    random::Random,
};

const PAPER: DelayThreshold = DelayThreshold {
    r_min: 0.1,
    r_max: 0.3,
    alpha: 1.3,
};

#[test]
fn equals_the_reference() {
    let client = client();
    let mut thresholds = [1.0, 1.0, 7.5, 3.0, MIN_THRESHOLD, MAX_THRESHOLD];
    let mut counts = [[0, 100], [50, 100], [20, 100], [0, 0], [0, 9], [9, 9]];
    let mut rates = [0.7; 6];
    let device = (
        upload(&client, &thresholds, &[6], dtype::<f32>()),
        upload_i32(&client, counts.as_flattened(), &[6, 2]),
        upload(&client, &rates, &[6], dtype::<f32>()),
    );
    let output =
        delay_threshold(&client, &device.0, &device.1, &device.2, PAPER).expect("shapes that fit");
    reference::delay_threshold(&mut thresholds, &mut counts, &mut rates, &PAPER);
    assert_eq!(read::<f32>(&client, &output.thresholds), thresholds);
    assert_eq!(read::<i32>(&client, &output.counts), counts.as_flattened());
    assert_eq!(read::<f32>(&client, &output.rates), rates);
    assert_eq!(thresholds[3], 3.0);
    assert_eq!(rates[3], 0.7);
    assert_eq!(read::<f32>(&client, &device.0), thresholds, "in place");
}

/// Layers that start a thousand times too low and too high come into the range, and follow a drift of the activations.
#[test]
fn rates_reach_their_range_and_follow_drift() {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::new(128, 128);
    let state = initial_state(&client, 2, 1.0);
    let starts = [1e-3, 1e3];
    let thresholds = upload(&client, &starts, &[2], dtype::<f32>());
    let mut rates = vec![0.0; 2];
    for (magnitude, steps) in [(1.0f32, 40), (5.0, 12), (0.3, 16)] {
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
            let output = delay_threshold(&client, &thresholds, &state.counts, &state.rates, PAPER)
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
