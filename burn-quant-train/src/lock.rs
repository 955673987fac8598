//! Locks that a panic elsewhere leaves usable.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a thread panicked with the lock: what is behind these locks is whole between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
