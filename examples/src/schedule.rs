//! The learning rate.

use anyhow::{Result, anyhow};
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::composed::{ComposedLrScheduler, ComposedLrSchedulerConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::LearningRate;
use burn::tensor::backend::Backend;

/// Linear warm-up over a twentieth of the planned steps, then cosine decay to a tenth of the peak, and that tenth for
/// any step beyond the plan, where Burn's cosine would start again.
///
/// Records are those of the planned part. They hold how far it has come, but not how many steps were planned.
#[derive(Clone)]
pub struct Schedule {
    planned: ComposedLrScheduler,
    /// Steps left of the plan.
    left: usize,
    lowest: LearningRate,
}

impl Schedule {
    /// A schedule made for `planned` steps, of which `taken` have been taken, with the peak `lr`.
    ///
    /// # Errors
    ///
    /// Burn refuses it.
    pub fn new(planned: usize, taken: usize, lr: LearningRate) -> Result<Self> {
        let warm_up = (planned / 20).clamp(1, 500);
        let lowest = lr / 10.0;
        let scheduler = ComposedLrSchedulerConfig::new()
            .linear(LinearLrSchedulerConfig::new(
                1.0 / (warm_up + 1) as f64,
                1.0,
                warm_up,
            ))
            .cosine(CosineAnnealingLrSchedulerConfig::new(lr, planned).with_min_lr(lowest))
            .init()
            .map_err(|error| anyhow!("the learning-rate schedule: {error}"))?;
        Ok(Self {
            planned: scheduler,
            left: planned.saturating_sub(taken),
            lowest,
        })
    }
}

impl LrScheduler for Schedule {
    type Record<B: Backend> = <ComposedLrScheduler as LrScheduler>::Record<B>;

    fn step(&mut self) -> LearningRate {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                self.planned.step()
            }
            None => self.lowest,
        }
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        self.planned.to_record::<B>()
    }

    fn load_record<B: Backend>(self, record: Self::Record<B>) -> Self {
        Self {
            planned: self.planned.load_record::<B>(record),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    #[test]
    fn the_rate_rises_falls_and_stays_at_its_lowest() {
        let (planned, peak) = (200, 1e-3);
        let mut schedule = Schedule::new(planned, 0, peak).unwrap();
        let rates: Vec<_> = (0..planned + 50).map(|_| schedule.step()).collect();
        let (warm_up, rest) = rates.split_at(planned / 20);
        assert!(warm_up.is_sorted() && warm_up[0] < 0.1 * peak);
        assert!(rest.is_sorted_by(|a, b| a >= b) && rest[0] > 0.99 * peak);
        assert!(rates[planned - 1] > 0.1 * peak && rates[planned - 1] < 0.101 * peak);
        assert_eq!(rates[planned..], vec![peak / 10.0; 50]);
    }

    #[test]
    fn a_record_goes_on_anywhere() {
        let (planned, peak) = (40, 1e-2);
        let mut whole = Schedule::new(planned, 0, peak).unwrap();
        let rates: Vec<_> = (0..planned + 10).map(|_| whole.step()).collect();
        for taken in [1, 2, 3, 20, 39, 40, 41, 45] {
            let mut first = Schedule::new(planned, 0, peak).unwrap();
            for _ in 0..taken {
                first.step();
            }
            let record = first.to_record::<Flex>();
            let mut second = Schedule::new(planned, taken, peak)
                .unwrap()
                .load_record::<Flex>(record);
            let rest: Vec<_> = (taken..planned + 10).map(|_| second.step()).collect();
            assert_eq!(rest, rates[taken..], "after {taken} steps");
        }
    }
}
