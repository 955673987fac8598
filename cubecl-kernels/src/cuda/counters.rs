//! Words on a device by which the blocks of a launch tell each other how far they are.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, PoisonError},
};

use cubecl::{prelude::*, server::Handle, std::tensor::TensorHandle, stream_id::StreamId};

use crate::device::storage;

/// The words that a kernel may use.
const WORDS: usize = 8;

/// Those of all devices and streams: 32 bytes for each thread that ever took them, for good. Kernels of one stream follow
/// each other, and each leaves them at 0.
static COUNTERS: LazyLock<Mutex<HashMap<(usize, StreamId), Handle>>> =
    LazyLock::new(Mutex::default);

/// The counters of the stream of this thread, u32 `[8]`, which are 0 wherever no kernel runs that takes them.
pub(crate) fn counters<R: Runtime>(client: &ComputeClient<R>) -> TensorHandle<R> {
    // All clients of a device share its properties.
    let device = std::ptr::from_ref(client.properties()) as usize;
    let mut of_streams = COUNTERS.lock().unwrap_or_else(PoisonError::into_inner);
    let counters = of_streams
        .entry((device, StreamId::current()))
        .or_insert_with(|| client.create_from_slice(&[0; 4 * WORDS]));
    TensorHandle::new_contiguous([WORDS], counters.clone(), storage::<u32>())
}
