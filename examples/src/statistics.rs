//! Differences between runs over several seeds, and how sure they are.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// The mean of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    /// The mean.
    pub value: f64,
    /// How many values it is of; at least 1.
    pub count: usize,
    /// Its standard error, from the scatter of the values; none for a single value.
    pub standard_error: Option<f64>,
}

impl Mean {
    /// Of these values; none without any.
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len();
        let value = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|it| (it - value).powi(2)).sum();
        let standard_error = || (squares / (count - 1) as f64 / count as f64).sqrt();
        (count > 0).then(|| Self {
            value,
            count,
            standard_error: (count > 1).then(standard_error),
        })
    }

    /// The bounds of the mean's 95% interval by Student's t, which takes the values as draws of one normal distribution
    /// (Student, "The Probable Error of a Mean", 1908); none for a single value.
    pub fn interval(&self) -> Option<[f64; 2]> {
        let freedom = self.count.checked_sub(1)? as f64;
        let t = StudentsT::new(0.0, 1.0, freedom).ok()?.inverse_cdf(0.975);
        let error = t * self.standard_error?;
        Some([self.value - error, self.value + error])
    }

    /// The interval of a relative difference: `-0.12 to +1.02%`.
    pub fn interval_in_percent(&self) -> Option<String> {
        let [low, high] = self.interval()?;
        Some(format!("{:+.2} to {:+.2}%", 100.0 * low, 100.0 * high))
    }
}

/// A relative difference: `+0.45%`.
pub fn percent(difference: f64) -> String {
    format!("{:+.2}%", 100.0 * difference)
}

/// `value / baseline - 1` for each value whose key, a seed, a baseline has too; in the order of the values.
///
/// Runs of one seed begin with the same weights and read the same data, so that their difference scatters less than
/// their losses do.
pub fn paired_differences<K: PartialEq>(values: &[(K, f64)], baselines: &[(K, f64)]) -> Vec<f64> {
    let difference = |(key, value): &(K, f64)| {
        let baseline = baselines.iter().find(|(other, _)| other == key)?;
        Some(value / baseline.1 - 1.0)
    };
    values.iter().filter_map(difference).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_has_no_interval() {
        assert_eq!(Mean::of(&[]), None);
        let one = Mean::of(&[3.0]).unwrap();
        assert_eq!((one.value, one.count, one.interval()), (3.0, 1, None));
    }

    /// The 97.5% points of Student's t, from a printed table.
    #[test]
    fn the_interval_is_students() {
        for (freedom, t) in [
            (1, 12.706_204_7),
            (2, 4.302_652_7),
            (3, 3.182_446_3),
            (10, 2.228_138_9),
            (30, 2.042_272_5),
        ] {
            let values: Vec<f64> = (0..=freedom).map(f64::from).collect();
            let mean = Mean::of(&values).unwrap();
            let center = f64::from(freedom) / 2.0;
            // The variance of 0..=n is n (n + 2) / 12, with Bessel's correction (n + 1) (n + 2) / 12.
            let error = ((f64::from(freedom) + 2.0) / 12.0).sqrt();
            assert!((mean.standard_error.unwrap() / error - 1.0).abs() < 1e-12);
            let [low, high] = mean.interval().unwrap();
            assert!(
                ((high - center) / error / t - 1.0).abs() < 1e-7,
                "{freedom}"
            );
            assert!(((center - low) / error / t - 1.0).abs() < 1e-7, "{freedom}");
        }
    }

    #[test]
    fn differences_are_of_one_seed() {
        let baselines = [(2, 4.0), (1, 2.0)];
        let values = [(1, 3.0), (2, 3.0), (3, 9.0)];
        let differences = paired_differences(&values, &baselines);
        assert_eq!(differences, [0.5, -0.25]);
        let mean = Mean::of(&differences).unwrap();
        assert_eq!(percent(mean.value), "+12.50%");
        // 0.125 plus and minus 12.706 times 0.375.
        assert_eq!(mean.interval_in_percent().unwrap(), "-463.98 to +488.98%");
    }

    #[test]
    fn a_diverged_run_shows() {
        let mean = Mean::of(&[0.1, f64::NAN]).unwrap();
        assert_eq!(percent(mean.value), "NaN%");
        assert_eq!(mean.interval_in_percent().unwrap(), "NaN to NaN%");
    }
}
