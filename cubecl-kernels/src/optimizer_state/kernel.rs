//! States filled with zeros, compressed and decompressed.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid},
    error::KernelError,
};

use super::{
    Moment, NEUTRAL_EXPONENT, StateFormat, StateTensor,
    arrays::StateArrays,
    group::{decode_state, load_state, write_state},
    group_scale::group_scale,
    span::{Span, first_tile, read_held, tile_stride, write_held},
    table::fill_table,
};

const UNITS: usize = 256;

/// True where four elements of a tensor can be read at once.
pub(crate) fn is_aligned<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
    let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
    offset % (4 * tensor.dtype.size()) == 0
}

/// Fills a state with zeros.
pub(super) fn zero<R: Runtime>(client: &ComputeClient<R>, state: &StateTensor<R>) {
    let code = state
        .format
        .map_or(0, |format| format.encoding.zero(state.moment));
    fill(client, &state.values, code);
    if let Some(scales) = &state.scales {
        fill(client, scales, 0);
    }
    if let Some(exponents) = &state.exponents {
        fill(client, exponents, NEUTRAL_EXPONENT);
    }
}

fn fill<R: Runtime>(client: &ComputeClient<R>, out: &TensorHandle<R>, value: u8) {
    let len = out.shape().iter().product::<usize>();
    if len == 0 {
        return;
    }
    // SAFETY: the kernel guards its index with the number of elements.
    #[allow(unsafe_code)]
    unsafe {
        fill_kernel::launch_unchecked::<R>(
            client,
            cube_grid(len.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            out.clone().into_arg(),
            u32::from(value),
            len as u32,
            out.dtype,
        );
    }
}

/// Compresses `x` into `state`.
///
/// # Safety
///
/// `state` was allocated in this format for as many elements as `x` has, which is f32 and contiguous.
#[allow(unsafe_code)]
pub(super) unsafe fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    state: &StateTensor<R>,
    format: StateFormat,
) -> Result<(), KernelError> {
    let len = state.len();
    let span = Span::new(client, "quantize_state", &[Some(format)])?;
    for stretch in span.launches(len, is_aligned(x) && is_aligned(&state.values)) {
        // SAFETY: every access is guarded by `len`, by the caller's promise the number of elements of both tensors.
        unsafe {
            quantize_kernel::launch_unchecked::<R>(
                client,
                cube_grid(stretch.cubes),
                span.cube_dim(),
                stretch.span.width,
                array(x.clone()),
                state.launch(),
                stretch.first as u32,
                stretch.end as u32,
                len as u32,
                0,
                stretch.span,
                format,
                state.moment,
            );
        }
    }
    Ok(())
}

/// Decompresses `state` into `out`.
///
/// # Safety
///
/// `state` was checked by [`StateTensor::check`]; `out` is f32, contiguous, and has as many elements.
#[allow(unsafe_code)]
pub(super) unsafe fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    state: &StateTensor<R>,
    out: &TensorHandle<R>,
) -> Result<(), KernelError> {
    let len = state.len();
    let span = Span::new(client, "dequantize_state", &[state.format])?;
    for stretch in span.launches(len, is_aligned(&state.values) && is_aligned(out)) {
        // SAFETY: every access is guarded by `len`, by the caller's promise the number of elements of both tensors.
        unsafe {
            dequantize_kernel::launch_unchecked::<R>(
                client,
                cube_grid(stretch.cubes),
                span.cube_dim(),
                stretch.span.width,
                state.launch(),
                array(out.clone()),
                stretch.first as u32,
                stretch.end as u32,
                len as u32,
                stretch.span,
                state.format,
                state.moment,
                state.values.dtype,
            );
        }
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn fill_kernel<E: Numeric>(
    out: &mut Tensor<E>,
    value: u32,
    len: u32,
    #[define(E)] _dtype: StorageType,
) {
    if (ABSOLUTE_POS as u32) < len {
        out[ABSOLUTE_POS] = E::cast_from(value);
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    state: &mut StateArrays<u8, N>,
    first: u32,
    end: u32,
    len: u32,
    zero: u32,
    #[comptime] span: Span,
    #[comptime] format: StateFormat,
    #[comptime] moment: Moment,
) {
    let table = fill_table(comptime!(Some(format)), moment);
    sync_cube();
    let mut tile = first_tile(first);
    while tile < end {
        let start = tile * comptime!(span.elements() as u32);
        let mut held = read_held::<f32, f32, N>(x, start, len, span, 0);
        if comptime!(moment == Moment::Second) {
            #[unroll]
            for slot in 0..comptime!(span.held()) {
                held[slot] = f32::abs(held[slot]);
            }
        }
        let group_scale = group_scale(&held, zero, span, format, moment);
        write_state::<u8, N>(
            state,
            &table,
            &held,
            &group_scale,
            &Array::<u32>::new(1usize),
            start,
            len,
            zero,
            span,
            comptime!(Some(format)),
            moment,
            false,
        );
        tile += tile_stride();
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_kernel<S: Numeric, N: Size>(
    state: &StateArrays<S, N>,
    out: &mut Array<Vector<f32, N>>,
    first: u32,
    end: u32,
    len: u32,
    #[comptime] span: Span,
    #[comptime] format: Option<StateFormat>,
    #[comptime] moment: Moment,
    #[define(S)] _dtype: StorageType,
) {
    let table = fill_table(format, moment);
    sync_cube();
    let mut tile = first_tile(first);
    while tile < end {
        let start = tile * comptime!(span.elements() as u32);
        let loaded = load_state::<S, N>(state, start, len, span, format, moment);
        let held = decode_state(&loaded, &table, span, format, moment);
        write_held::<f32, f32, N>(out, &held, start, len, span);
        tile += tile_stride();
    }
}
