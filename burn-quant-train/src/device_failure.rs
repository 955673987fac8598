//! Operations that a device did not run, and of which nobody is told.
//!
//! CubeCL 0.10 runs operations on a thread for each device. Where one panics there, and above all where memory has run
//! out, it logs that and goes on: the results of the operation stay unwritten, operations that read them do not run
//! either or read what was there before, and a training goes on with that, faster than before. So panics on these
//! threads are noted, and the next step of an optimizer, or its record, says so instead of going on.

use std::{
    panic::{PanicHookInfo, set_hook, take_hook},
    sync::{Mutex, Once},
    thread,
};

use crate::lock::lock;

/// With which the names of CubeCL's threads for devices begin.
const DEVICE_THREAD: &str = "DS";

/// What was said at the first panic since the last time that somebody asked.
static FAILURE: Mutex<Option<String>> = Mutex::new(None);

/// Notes panics of device threads from now on, beside what the program does with panics.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        let hook = take_hook();
        set_hook(Box::new(move |info| {
            note(info);
            hook(info);
        }));
    });
}

fn note(info: &PanicHookInfo<'_>) {
    let current = thread::current();
    let of_device = current
        .name()
        .is_some_and(|name| name.starts_with(DEVICE_THREAD));
    if of_device {
        lock(&FAILURE).get_or_insert_with(|| info.to_string());
    }
}

/// Goes on if no operation failed on a device since the last call.
///
/// # Panics
///
/// If one did.
pub(crate) fn check(operation: &str) {
    let failure = lock(&FAILURE).take();
    if let Some(failure) = failure {
        panic!(
            "{operation}: a device did not run an operation since the last step, so weights and moments may be wrong \
             from that step on. Most often its memory has run out: use smaller batches, contexts that are compressed \
             (`Contexts`) or blocks that run again (`saved::checkpoint`), and go on from a checkpoint. The device's \
             thread said: {failure}"
        );
    }
}
