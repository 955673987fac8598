//! Times of work on a device, from the host's clock around batches of launches.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::speed::Spread;

/// Samples of a measurement.
const SAMPLES: usize = 30;
/// Work of one sample: beside it, the microseconds of waiting for the device do not count.
const SAMPLE: Duration = Duration::from_millis(20);
const WARM_UP: Duration = Duration::from_millis(200);

/// The time of one `launch`, in milliseconds: of each sample the mean over its launches, which follow each other without
/// waiting.
///
/// # Errors
///
/// Those of `launch` and of `sync`, which waits until the device is idle.
pub fn time(
    mut launch: impl FnMut() -> Result<()>,
    sync: impl Fn() -> Result<()>,
) -> Result<Spread> {
    // The first launch compiles.
    launch()?;
    sync()?;
    let mut batch = |launches: u32| -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..launches {
            launch()?;
        }
        sync()?;
        Ok(start.elapsed())
    };
    let (mut warm, mut fastest) = (Duration::ZERO, Duration::MAX);
    while warm < WARM_UP {
        let elapsed = batch(4)?;
        warm += elapsed;
        fastest = fastest.min(elapsed / 4);
    }
    let launches = (SAMPLE.as_secs_f64() / fastest.as_secs_f64().max(1e-6)).ceil() as u32;
    let samples = (0..SAMPLES)
        .map(|_| Ok(1e3 * batch(launches)?.as_secs_f64() / f64::from(launches)))
        .collect::<Result<_>>()?;
    Ok(Spread::of(samples))
}
