//! Counters on a device by which the blocks of a kernel know which of them is the last.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, PoisonError},
};

use cubecl::{prelude::*, server::Handle, std::tensor::TensorHandle, stream_id::StreamId};

use crate::device::storage;

/// The tickets of all devices and streams: four bytes for each thread that ever took one, for good. Kernels of one stream
/// follow each other, and each leaves the ticket at 0.
static TICKETS: LazyLock<Mutex<HashMap<(usize, StreamId), Handle>>> = LazyLock::new(Mutex::default);

/// The counter of the stream of this thread, u32 `[1]`, which is 0 wherever no kernel runs that takes it.
pub(crate) fn ticket<R: Runtime>(client: &ComputeClient<R>) -> TensorHandle<R> {
    // All clients of a device share its properties.
    let device = std::ptr::from_ref(client.properties()) as usize;
    let mut tickets = TICKETS.lock().unwrap_or_else(PoisonError::into_inner);
    let ticket = tickets
        .entry((device, StreamId::current()))
        .or_insert_with(|| client.create_from_slice(&[0; 4]));
    TensorHandle::new_contiguous([1], ticket.clone(), storage::<u32>())
}
