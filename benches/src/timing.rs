//! Times of work on a device, from the host's clock.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::results::Spread;

/// How long is measured.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    /// Number of samples.
    pub samples: usize,
    /// Work of one sample: beside it, the microseconds of waiting for the device do not count.
    pub sample: Duration,
    /// Work before the first sample.
    pub warm_up: Duration,
}

impl Sampling {
    /// For a few measurements.
    pub const LONG: Self = Self {
        samples: 30,
        sample: Duration::from_millis(20),
        warm_up: Duration::from_millis(200),
    };
    /// For layers: Burn's fusion settles in the warm-up. It searches anew wherever operations, or the ends of tensors'
    /// lives between them, come in an order that it has not seen.
    ///
    /// Samples hold enough passes that what goes by before the device begins, some 0.2 ms, counts for little.
    pub const LAYERS: Self = Self {
        samples: 20,
        sample: Duration::from_millis(100),
        warm_up: Duration::from_secs(1),
    };
    /// For whole training steps: thresholds settle in the warm-up.
    pub const STEPS: Self = Self {
        samples: 5,
        sample: Duration::from_millis(1500),
        warm_up: Duration::from_secs(6),
    };
    /// For many.
    pub const SHORT: Self = Self {
        samples: 20,
        sample: Duration::from_millis(10),
        warm_up: Duration::from_millis(50),
    };
    /// For hundreds.
    pub const BRIEF: Self = Self {
        samples: 5,
        sample: Duration::from_millis(4),
        warm_up: Duration::from_millis(5),
    };

    /// The time of one `launch`, in milliseconds: of each sample the mean over its launches, which follow each other
    /// without waiting.
    ///
    /// # Errors
    ///
    /// Those of `launch` and of `sync`, which waits until the device is idle.
    pub fn time(
        &self,
        launch: impl FnMut() -> Result<()>,
        sync: impl Fn() -> Result<()>,
    ) -> Result<Spread> {
        self.time_and_clear(launch, sync, || Ok(()))
    }

    /// [`time`](Self::time) for launches that leave something behind: `clear` takes it away between samples.
    ///
    /// # Errors
    ///
    /// Those of `launch`, of `sync`, which waits until the device is idle, and of `clear`.
    pub fn time_and_clear(
        &self,
        mut launch: impl FnMut() -> Result<()>,
        sync: impl Fn() -> Result<()>,
        clear: impl Fn() -> Result<()>,
    ) -> Result<Spread> {
        self.time_batches(|launches| {
            let start = Instant::now();
            for _ in 0..launches {
                launch()?;
            }
            sync()?;
            let elapsed = start.elapsed();
            clear()?;
            sync()?;
            Ok(elapsed)
        })
    }

    /// [`time`](Self::time) for launches that use up what was made for them: `prepare` makes it before each sample.
    ///
    /// # Errors
    ///
    /// Those of `launch` and of `sync`, which waits until the device is idle.
    pub fn time_prepared<T>(
        &self,
        prepare: impl Fn() -> T,
        mut launch: impl FnMut(T) -> Result<()>,
        sync: impl Fn() -> Result<()>,
    ) -> Result<Spread> {
        self.time_batches(|launches| {
            let prepared: Vec<T> = (0..launches).map(|_| prepare()).collect();
            sync()?;
            let start = Instant::now();
            prepared.into_iter().try_for_each(&mut launch)?;
            sync()?;
            Ok(start.elapsed())
        })
    }

    /// The time of a launch, from that of batches of so many.
    fn time_batches(&self, mut batch: impl FnMut(u32) -> Result<Duration>) -> Result<Spread> {
        // The first launch compiles.
        batch(1)?;
        let (mut warm, mut fastest) = (Duration::ZERO, Duration::MAX);
        while warm < self.warm_up {
            let elapsed = batch(4)?;
            warm += elapsed;
            fastest = fastest.min(elapsed / 4);
        }
        let launches = self.sample.as_secs_f64() / fastest.as_secs_f64().max(1e-6);
        let launches = launches.ceil() as u32;
        let samples = (0..self.samples)
            .map(|_| Ok(1e3 * batch(launches)?.as_secs_f64() / f64::from(launches)))
            .collect::<Result<_>>()?;
        Ok(Spread::of(samples))
    }
}

/// Repetitions of [`from_idle`].
const REPETITIONS: usize = 15;

/// The time of one `launch` that finds the device idle: until it returns, and until the device is idle again.
///
/// # Errors
///
/// Those of `launch` and of `sync`, which waits until the device is idle.
pub fn from_idle(
    mut launch: impl FnMut() -> Result<()>,
    sync: impl Fn() -> Result<()>,
) -> Result<[Spread; 2]> {
    let (mut enqueue, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..REPETITIONS {
        sync()?;
        let start = Instant::now();
        launch()?;
        enqueue.push(1e3 * start.elapsed().as_secs_f64());
        sync()?;
        alone.push(1e3 * start.elapsed().as_secs_f64());
    }
    Ok([Spread::of(enqueue), Spread::of(alone)])
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;

    use super::*;

    #[test]
    fn a_launch_is_timed_by_itself() {
        let sampling = Sampling {
            samples: 3,
            sample: Duration::from_millis(8),
            warm_up: Duration::from_millis(1),
        };
        let (launches, syncs) = (Cell::new(0), Cell::new(0));
        let launch = || {
            launches.set(launches.get() + 1);
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        };
        let sync = || {
            syncs.set(syncs.get() + 1);
            Ok(())
        };
        let time = sampling.time(launch, sync).unwrap();
        assert!(time.p10_ms >= 2.0, "{time:?}");
        // One to compile, four to warm up, and at most four of each sample.
        assert!(launches.get() <= 17 && syncs.get() >= 5);
    }

    #[test]
    fn clearing_does_not_count() {
        let sampling = Sampling {
            samples: 2,
            sample: Duration::from_millis(1),
            warm_up: Duration::from_millis(1),
        };
        let clear = || {
            std::thread::sleep(Duration::from_millis(20));
            Ok(())
        };
        let launch = || {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        let time = sampling.time_and_clear(launch, || Ok(()), clear).unwrap();
        assert!(time.p10_ms < 15.0, "{time:?}");
    }

    #[test]
    fn preparing_does_not_count() {
        let sampling = Sampling {
            samples: 2,
            sample: Duration::from_millis(1),
            warm_up: Duration::from_millis(1),
        };
        let prepare = || {
            std::thread::sleep(Duration::from_millis(20));
            1
        };
        let launch = |prepared| {
            std::thread::sleep(Duration::from_millis(prepared));
            Ok(())
        };
        let time = sampling.time_prepared(prepare, launch, || Ok(())).unwrap();
        assert!((1.0..15.0).contains(&time.p10_ms), "{time:?}");
    }

    #[test]
    fn waiting_is_told_from_handing_over() {
        let sync = || {
            std::thread::sleep(Duration::from_millis(3));
            Ok(())
        };
        let [enqueue, alone] = from_idle(|| Ok(()), sync).unwrap();
        assert!(enqueue.median_ms < 1.0 && alone.median_ms >= 3.0);
    }

    #[test]
    fn errors_end_it() {
        assert!(Sampling::SHORT.time(|| bail!("no"), || Ok(())).is_err());
        assert!(from_idle(|| Ok(()), || bail!("no")).is_err());
    }
}
