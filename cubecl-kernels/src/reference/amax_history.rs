//! Histories of largest magnitudes (delayed scaling of NVIDIA's TransformerEngine).

use crate::{amax_history::DelayedScaling, scale::MIN_ABSMAX};

/// Ends a step of every layer: its history, the last step first, takes the largest maximum of its runs in front and
/// loses its last number, and its maximum follows. A layer stays as it is if that is below [`MIN_ABSMAX`], or one of
/// the runs has a maximum that is not finite.
///
/// - `maxima` `[layers]`, `history` `[layers, length]`, `runs` `[layers, runs]`
///
/// # Panics
///
/// If the lengths are no multiples of the number of layers, or a history is empty.
pub fn advance_amax_history(
    maxima: &mut [f32],
    history: &mut [f32],
    runs: &[f32],
    scaling: &DelayedScaling,
) {
    let layers = maxima.len().max(1);
    let (length, count) = (history.len() / layers, runs.len() / layers);
    for (layer, maximum) in maxima.iter_mut().enumerate() {
        let runs = &runs[layer * count..][..count];
        let latest = runs.iter().copied().fold(0.0, f32::max);
        if latest < MIN_ABSMAX || !runs.iter().all(|run| run.is_finite()) {
            continue;
        }
        let history = &mut history[layer * length..][..length];
        history.rotate_right(1);
        history[0] = latest;
        if scaling.due || *maximum == 0.0 {
            let counts = match scaling.most_recent {
                true => latest,
                false => history.iter().copied().fold(0.0, f32::max),
            };
            *maximum = (counts * scaling.factor()).min(f32::MAX);
        }
    }
}
