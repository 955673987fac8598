//! How far values are from what they stand for.

/// Sums over values and what stands for them, to which tensors are added.
#[derive(Debug, Clone, Copy, Default)]
pub struct Distance {
    exact: f64,
    rounded: f64,
    product: f64,
    error: f64,
    magnitude: f64,
    absolute_error: f64,
    nonzero: usize,
    zeroed: usize,
}

impl Distance {
    /// Of one tensor.
    pub fn of(exact: &[f32], rounded: &[f32]) -> Self {
        let mut distance = Self::default();
        distance.add(exact, rounded);
        distance
    }

    /// Adds a tensor.
    ///
    /// # Panics
    ///
    /// When the two differ in length.
    pub fn add(&mut self, exact: &[f32], rounded: &[f32]) {
        assert_eq!(exact.len(), rounded.len(), "elements of both tensors");
        for (&x, &y) in exact.iter().zip(rounded) {
            self.nonzero += usize::from(x != 0.0);
            self.zeroed += usize::from(x != 0.0 && y == 0.0);
            let (x, y) = (f64::from(x), f64::from(y));
            self.exact += x * x;
            self.rounded += y * y;
            self.product += x * y;
            self.error += (y - x) * (y - x);
            self.magnitude += x.abs();
            self.absolute_error += (y - x).abs();
        }
    }

    /// The mean squared error over the mean square: 0 for the same values.
    pub fn relative_mse(&self) -> f64 {
        self.error / self.exact
    }

    /// The norm of the error over that of the values.
    pub fn relative_error(&self) -> f64 {
        self.relative_mse().sqrt()
    }

    /// The mean magnitude of errors over that of values.
    pub fn mean_error(&self) -> f64 {
        self.absolute_error / self.magnitude
    }

    /// One less the cosine of the angle between the two: 0 where they point the same way.
    ///
    /// It is computed from the error, so that it is exact where the cosine is too near to 1 for its digits.
    pub fn one_less_cosine(&self) -> f64 {
        // |x| |y| - x y = (|x - y|^2 - (|x| - |y|)^2) / 2
        let (x, y) = (self.exact.sqrt(), self.rounded.sqrt());
        (self.error - (x - y) * (x - y)) / (2.0 * x * y)
    }

    /// The share of the values that are not zero of which zero became.
    pub fn zeroed(&self) -> f64 {
        self.zeroed as f64 / self.nonzero as f64
    }
}

/// The root of the mean square.
pub fn root_mean_square(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| {
        (sum + value * value, count + 1)
    });
    (sum / f64::from(count.max(1))).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_distances() {
        let distance = Distance::of(&[3.0, 4.0, 0.0, 0.0], &[3.0, 0.0, 0.0, 3.0]);
        assert_eq!(distance.relative_mse(), 1.0);
        assert_eq!(distance.mean_error(), 1.0);
        assert_eq!(distance.zeroed(), 0.5);
        let cosine = 9.0 / (5.0 * 18f64.sqrt());
        assert!((distance.one_less_cosine() - (1.0 - cosine)).abs() < 1e-15);
    }

    #[test]
    fn a_small_angle_keeps_its_digits() {
        // tan(a) = 1e-5 / 1: one less the cosine is a^2 / 2.
        let distance = Distance::of(&[1.0, 0.0], &[1.0, 1e-5]);
        assert!((distance.one_less_cosine() / 5e-11 - 1.0).abs() < 1e-5);
        assert!(Distance::of(&[1.0, 2.0], &[1.0, 2.0]).one_less_cosine() == 0.0);
        assert!(
            Distance::of(&[1.0, 2.0], &[2.0, 4.0])
                .one_less_cosine()
                .abs()
                < 1e-15
        );
    }

    #[test]
    fn tensors_add_up() {
        let mut sum = Distance::of(&[3.0, 4.0], &[3.0, 0.0]);
        sum.add(&[0.0, 0.0], &[0.0, 3.0]);
        let whole = Distance::of(&[3.0, 4.0, 0.0, 0.0], &[3.0, 0.0, 0.0, 3.0]);
        assert_eq!(sum.relative_error(), whole.relative_error());
        assert_eq!(root_mean_square([3.0, 4.0].into_iter()), 12.5f64.sqrt());
    }
}
