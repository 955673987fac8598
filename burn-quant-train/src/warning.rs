//! Warnings to the user of a program.

/// Writes a warning into the log where the program collects one, else where it is seen.
pub(crate) fn warn(text: &str) {
    match log::log_enabled!(log::Level::Warn) {
        true => log::warn!("{text}"),
        false => eprintln!("{text}"),
    }
}
