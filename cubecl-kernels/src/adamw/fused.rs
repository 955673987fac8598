//! The update of one tensor, its moments in any format.

use cubecl::{CubeTask, ir::StorageType, prelude::*};

use crate::{
    arguments::Arguments,
    cuda::flush_to_zero,
    device::{cube_grid, has_u64, storage},
    error::KernelError,
    loss_scaling::inverse,
    optimizer_state::{
        Moment, StateFormat,
        arrays::StateArrays,
        group::{decode_state, load_state, write_state},
        group_scale::group_scales,
        kernel::is_aligned,
        span::{Span, first_tile, quad_start, read_held, tile_stride, write_held},
        table::fill_table,
    },
    rounding::{RandomStream, Rounding, add_random_stream, magnitude_bits, random_words},
};

use super::{
    AdamWTensors, OPERATION, STATE_STEPS, Shared,
    update::{
        CoefficientsArg, cube_step, first_moment, parameter as next_parameter, second_moment,
    },
};

const INFINITY: u32 = f32::INFINITY.to_bits();
/// The bits of an `f32` that a bf16 has.
const BF16_BITS: u32 = 0xffff_0000;

/// The constants that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    span: Span,
    first: Option<StateFormat>,
    second: Option<StateFormat>,
    flagged: bool,
    /// True where the parameter's new value goes elsewhere.
    moved: bool,
    scaled: bool,
    clipped: bool,
    stochastic: bool,
    stochastic_state: bool,
    /// True where the device multiplies to 64 bits.
    wide: bool,
}

fn is_expanded(format: Option<StateFormat>) -> bool {
    format.is_some_and(|format| format.expand)
}

/// The span that both moments share.
pub(super) fn span<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AdamWTensors<R>,
) -> Result<Span, KernelError> {
    Span::new(
        client,
        OPERATION,
        &[tensors.first.format, tensors.second.format],
    )
}

/// AdamW on one tensor, with its place among all of the step.
///
/// # Safety
///
/// It was checked by [`AdamWTensors::check`]. Of what it shares, the clock has two numbers and the flag one, all i32;
/// the scale has one, and the factors have one for each place, f32.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &AdamWTensors<R>,
    place: usize,
    shared: &Shared<'_, R>,
) -> Result<(), KernelError> {
    let AdamWTensors {
        parameter,
        updated,
        gradient,
        first,
        second,
        rounding,
        state_rounding,
    } = tensors;
    let span = span(client, tensors)?;
    let aligned = [parameter, gradient, &first.values, &second.values]
        .into_iter()
        .chain(updated)
        .all(is_aligned);
    let stochastic = *rounding != Rounding::Nearest && parameter.dtype != storage::<f32>();
    let [clock, flag, scale, factors] = shared.tensors();
    for stretch in span.launches(tensors.len(), aligned) {
        let width = stretch.span.width;
        let mut arguments = Arguments::default();
        #[allow(
            clippy::unit_arg,
            reason = "what a kernel is compiled for does not depend on a number"
        )]
        let kernel = adamw_kernel::AdamwKernel::new(
            KernelSettings::default().cube_dim(span.cube_dim()),
            client.clone(),
            arguments.array(parameter, width),
            match updated {
                Some(updated) => arguments.array(updated, width),
                None => Arguments::first_array(),
            },
            arguments.array(gradient, width),
            first.add_to(&mut arguments, width),
            second.add_to(&mut arguments, width),
            arguments.array(&clock, 1),
            arguments.array(&flag, 1),
            arguments.array(&scale, 1),
            arguments.array(&factors, 1),
            shared.coefficients.add_to(&mut arguments),
            add_random_stream(*rounding, &mut arguments),
            add_random_stream(*state_rounding, &mut arguments),
            arguments.scalar(stretch.first as u32),
            arguments.scalar(stretch.end as u32),
            arguments.scalar(tensors.len() as u32),
            arguments.scalar(place as u32),
            arguments.scalar(0u32),
            width,
            Plan {
                span: stretch.span,
                first: first.format,
                second: second.format,
                flagged: shared.nonfinite.is_some(),
                moved: updated.is_some(),
                scaled: shared.loss_scale.is_some(),
                clipped: shared.factors.is_some(),
                stochastic,
                stochastic_state: *state_rounding != Rounding::Nearest,
                wide: has_u64(client),
            },
            parameter.dtype,
            gradient.dtype,
            first.values.dtype,
            second.values.dtype,
        );
        // Without codes the kernel waits for memory, not for instructions.
        let task: Box<dyn CubeTask<R::Compiler>> = match (first.format, second.format) {
            (None, None) => Box::new(KernelTask::new(kernel)),
            _ => flush_to_zero::task(client, kernel),
        };
        // SAFETY: accesses are guarded by the number of elements, which by the caller's promise is that of all tensors,
        // and by the number of groups that follows from it. The arguments were added in the order of the parameters.
        unsafe {
            client.launch_unchecked(task, cube_grid(stretch.cubes), arguments.finish());
        }
    }
    Ok(())
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn adamw_kernel<P: Numeric, G: Numeric, S1: Numeric, S2: Numeric, N: Size>(
    parameter: &Array<Vector<P, N>>,
    updated: &mut Array<Vector<P, N>>,
    gradient: &Array<Vector<G, N>>,
    first: &mut StateArrays<S1, N>,
    second: &mut StateArrays<S2, N>,
    clock: &Array<i32>,
    nonfinite: &Array<i32>,
    loss_scale: &Array<f32>,
    factors: &Array<f32>,
    coefficients: CoefficientsArg,
    random: RandomStream,
    state_random: RandomStream,
    start_tile: u32,
    end: u32,
    len: u32,
    place: u32,
    zero: u32,
    #[comptime] plan: Plan,
    #[define(P)] _parameter_dtype: StorageType,
    #[define(G)] _gradient_dtype: StorageType,
    #[define(S1)] _first_dtype: StorageType,
    #[define(S2)] _second_dtype: StorageType,
) {
    let span = comptime!(plan.span);
    if comptime!(plan.flagged) {
        if nonfinite[0] != 0 {
            if comptime!(plan.moved) {
                keep::<P, N>(parameter, updated, start_tile, end, len, span);
            }
            terminate!();
        }
    }
    let taken = clock[0];
    let first_table = fill_table(comptime!(plan.first), comptime!(Moment::First));
    let second_table = fill_table(comptime!(plan.second), comptime!(Moment::Second));
    let step = cube_step(&coefficients, taken);
    let mut tile = first_tile(start_tile);
    while tile < end {
        let start = tile * comptime!(span.elements() as u32);
        // All loads come before the arithmetic, so that their latencies overlap.
        let mut p = read_held::<P, f32, N>(parameter, start, len, span, 0);
        let mut g = read_held::<G, f32, N>(gradient, start, len, span, 0);
        let first_loaded = load_state::<S1, N>(
            first,
            start,
            len,
            span,
            comptime!(plan.first),
            comptime!(Moment::First),
        );
        let second_loaded = load_state::<S2, N>(
            second,
            start,
            len,
            span,
            comptime!(plan.second),
            comptime!(Moment::Second),
        );
        let mut m = decode_state(
            &first_loaded,
            &first_table,
            span,
            comptime!(plan.first),
            comptime!(Moment::First),
        );
        let mut v = decode_state(
            &second_loaded,
            &second_table,
            span,
            comptime!(plan.second),
            comptime!(Moment::Second),
        );
        // Powers have no exact specification that an exact sum could serve.
        let exactly = comptime!((!is_expanded(plan.first), !is_expanded(plan.second)));
        if comptime!(plan.scaled) {
            let unscale = inverse(loss_scale[0]);
            #[unroll]
            for slot in 0..comptime!(span.held()) {
                g[slot] *= unscale;
            }
        }
        if comptime!(plan.clipped) {
            let factor = factors[place as usize];
            #[unroll]
            for slot in 0..comptime!(span.held()) {
                g[slot] *= factor;
            }
        }
        #[unroll]
        for slot in 0..comptime!(span.held()) {
            m[slot] = first_moment(m[slot], g[slot], &step, zero, exactly.0);
            v[slot] = second_moment(v[slot], g[slot], &step, zero, exactly.1);
            p[slot] = next_parameter(p[slot], m[slot], v[slot], &step);
        }
        if comptime!(plan.stochastic) {
            round_held(
                &mut p,
                start,
                len,
                taken as u32,
                &random,
                span,
                comptime!(plan.wide),
            );
        }
        write_held::<f32, P, N>(updated, &p, start, len, span);
        let dithers = if comptime!(plan.stochastic_state) {
            dithers(
                start,
                len,
                taken as u32,
                &state_random,
                span,
                comptime!(plan.wide),
            )
        } else {
            Array::<u32>::new(1usize)
        };
        let (m_scale, v_scale) = group_scales(&m, &v, zero, span, plan.first, plan.second);
        write_state::<S1, N>(
            first,
            &first_table,
            &m,
            &m_scale,
            &dithers,
            start,
            len,
            zero,
            span,
            comptime!(plan.first),
            comptime!(Moment::First),
            comptime!(plan.stochastic_state),
        );
        write_state::<S2, N>(
            second,
            &second_table,
            &v,
            &v_scale,
            &dithers,
            start,
            len,
            zero,
            span,
            comptime!(plan.second),
            comptime!(Moment::Second),
            comptime!(plan.stochastic_state),
        );
        tile += tile_stride();
    }
}

/// Writes a parameter that does not change.
#[cube]
fn keep<P: Numeric, N: Size>(
    parameter: &Array<Vector<P, N>>,
    updated: &mut Array<Vector<P, N>>,
    start_tile: u32,
    end: u32,
    len: u32,
    #[comptime] span: Span,
) {
    let mut tile = first_tile(start_tile);
    while tile < end {
        let start = tile * comptime!(span.elements() as u32);
        let p = read_held::<P, f32, N>(parameter, start, len, span, 0);
        write_held::<f32, P, N>(updated, &p, start, len, span);
        tile += tile_stride();
    }
}

/// A random word for each value of a unit, half of it for each moment.
#[cube]
fn dithers(
    start: u32,
    len: u32,
    step: u32,
    random: &RandomStream,
    #[comptime] span: Span,
    #[comptime] wide: bool,
) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(span.held()));
    #[unroll]
    for index in 0..comptime!(span.quads as u32) {
        let quarter = quad_start(start, len, index, span) / 4;
        let (b0, b1, b2, b3) = random_words(step ^ STATE_STEPS, quarter, random, wide);
        let slot = comptime!((index * 4) as usize);
        words[comptime!(slot)] = b0;
        words[comptime!(slot + 1)] = b1;
        words[comptime!(slot + 2)] = b2;
        words[comptime!(slot + 3)] = b3;
    }
    words
}

/// Rounds all that a unit holds to bf16, up with the probability of what is cut off.
#[cube]
fn round_held(
    p: &mut Array<f32>,
    start: u32,
    len: u32,
    step: u32,
    random: &RandomStream,
    #[comptime] span: Span,
    #[comptime] wide: bool,
) {
    #[unroll]
    for index in 0..comptime!(span.quads as u32) {
        let quarter = quad_start(start, len, index, span) / 4;
        let (b0, b1, b2, b3) = random_words(step, quarter, random, wide);
        let slot = comptime!((index * 4) as usize);
        p[comptime!(slot)] = round_to_bf16(p[comptime!(slot)], b0);
        p[comptime!(slot + 1)] = round_to_bf16(p[comptime!(slot + 1)], b1);
        p[comptime!(slot + 2)] = round_to_bf16(p[comptime!(slot + 2)], b2);
        p[comptime!(slot + 3)] = round_to_bf16(p[comptime!(slot + 3)], b3);
    }
}

#[cube]
fn round_to_bf16(x: f32, random: u32) -> f32 {
    let bits = (u32::reinterpret(x) + (random >> 16)) & BF16_BITS;
    select(magnitude_bits(x) < INFINITY, f32::reinterpret(bits), x)
}
