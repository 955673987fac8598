//! Histories of maxima: the reference by hand, and the kernel against it.

use cubecl_kernels::{amax_history::DelayedScaling, reference::amax_history::advance_amax_history};

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device;

const EVERY_STEP: DelayedScaling = DelayedScaling {
    margin: 0,
    most_recent: false,
    due: true,
};

/// A layer with a history of three steps.
struct Layer {
    maximum: f32,
    history: [f32; 3],
}

impl Layer {
    fn after(runs: &[f32], scaling: &DelayedScaling, steps: usize) -> Self {
        let mut layer = Self {
            maximum: 0.0,
            history: [0.0; 3],
        };
        for run in &runs[..steps] {
            layer.step(&[*run], scaling);
        }
        layer
    }

    fn step(&mut self, runs: &[f32], scaling: &DelayedScaling) {
        let maximum = std::slice::from_mut(&mut self.maximum);
        advance_amax_history(maximum, &mut self.history, runs, scaling);
    }
}

/// A maximum counts for as many steps as the history holds.
#[test]
fn the_largest_of_the_last_steps_counts() {
    let runs = [2.0, 9.0, 4.0, 3.0, 1.0, 1.0];
    let maxima = [2.0, 9.0, 9.0, 9.0, 4.0, 3.0];
    for (step, expected) in maxima.into_iter().enumerate() {
        let layer = Layer::after(&runs, &EVERY_STEP, step + 1);
        assert_eq!(layer.maximum, expected, "step {step}");
        let recent = DelayedScaling {
            most_recent: true,
            ..EVERY_STEP
        };
        let layer = Layer::after(&runs, &recent, step + 1);
        assert_eq!(layer.maximum, runs[step], "step {step}, the most recent");
    }
    assert_eq!(
        Layer::after(&runs, &EVERY_STEP, 5).history,
        [1.0, 3.0, 4.0],
        "the last step first"
    );
}

#[test]
fn a_step_without_a_maximum_changes_nothing() {
    let mut layer = Layer::after(&[2.0, 9.0, 4.0], &EVERY_STEP, 3);
    for runs in [
        &[][..],
        &[0.0, 0.0],
        &[1e-35],
        &[1e-40],
        &[5.0, f32::NAN],
        &[f32::NAN, 5.0],
        &[f32::INFINITY],
    ] {
        layer.step(runs, &EVERY_STEP);
        assert_eq!(layer.history, [4.0, 9.0, 2.0], "{runs:?}");
        assert_eq!(layer.maximum, 9.0, "{runs:?}");
    }
    layer.step(&[3.0, 1.0, 0.0], &EVERY_STEP);
    assert_eq!(layer.history, [3.0, 4.0, 9.0], "the largest of the runs");
}

#[test]
fn the_first_maximum_does_not_wait_and_the_margin_stays_a_number() {
    let scaling = DelayedScaling {
        margin: 2,
        due: false,
        ..EVERY_STEP
    };
    let mut layer = Layer::after(&[2.0, 9.0], &scaling, 2);
    assert_eq!((layer.maximum, layer.history), (8.0, [9.0, 2.0, 0.0]));
    let due = DelayedScaling {
        due: true,
        ..scaling
    };
    layer.step(&[1.0], &due);
    assert_eq!(layer.maximum, 36.0);
    layer.step(&[3e38], &due);
    assert_eq!(layer.maximum, f32::MAX);
}
