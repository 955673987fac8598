//! Loss curves for result files.

/// At most this many points of a curve go into a result file.
pub const POINTS: usize = 60;

/// The curve with at most [`POINTS`] points, each the mean of as many neighbours, at the step of the last of them.
///
/// A mean, not one point in so many: the loss of a single batch scatters by more than recipes differ, and a mean over
/// 20 batches scatters less than a quarter as much. A curve that is short enough stays as it is.
pub fn thinned(curve: &[(usize, f64)]) -> Vec<(usize, f64)> {
    let every = curve.len().div_ceil(POINTS).max(1);
    let point = |part: &[(usize, f64)]| {
        let (step, _) = *part.last()?;
        let sum: f64 = part.iter().map(|(_, loss)| loss).sum();
        Some((step, sum / part.len() as f64))
    };
    curve.chunks(every).filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(steps: usize) -> Vec<(usize, f64)> {
        (1..=steps).map(|step| (step, step as f64)).collect()
    }

    #[test]
    fn short_curves_stay() {
        for steps in [0, 1, 2, POINTS] {
            assert_eq!(thinned(&line(steps)), line(steps));
        }
    }

    #[test]
    fn long_curves_are_averaged_to_their_end() {
        for steps in [61, 119, 120, 121, 1250, 99_999] {
            let curve = thinned(&line(steps));
            assert!((POINTS / 2..=POINTS).contains(&curve.len()), "{steps}");
            assert_eq!(curve.last().unwrap().0, steps);
            assert_eq!(thinned(&curve), curve, "once is enough");
        }
        let curve = thinned(&line(121));
        // Threes: the means of 1, 2, 3 and of 4, 5, 6, and what is left at the end.
        assert_eq!(curve[..2], [(3, 2.0), (6, 5.0)]);
        assert_eq!(curve[40], (121, 121.0));
    }
}
