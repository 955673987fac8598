//! Warnings to the user of a program.

/// Writes a warning into the log where the program collects one, else where it is seen.
pub(crate) fn warn(text: &str) {
    match log::log_enabled!(log::Level::Warn) {
        true => log::warn!("{text}"),
        false => eprintln!("{text}"),
    }
}

/// Warns the first time that this place is reached, with a format string and its arguments, and says that it does so
/// once.
macro_rules! warn_once {
    ($($text:tt)*) => {{
        use std::sync::atomic::{AtomicBool, Ordering};

        static SAID: AtomicBool = AtomicBool::new(false);
        if !SAID.swap(true, Ordering::Relaxed) {
            $crate::warning::warn(&format!("{} This is said once.", format_args!($($text)*)));
        }
    }};
}

pub(crate) use warn_once;
