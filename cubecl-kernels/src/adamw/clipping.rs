//! Gradient clipping by norm (Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013,
//! section 3.2): a gradient that is longer than a threshold is shortened to it. As in Burn, each parameter's by itself.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous, check_float, empty, or_unused, storage, tensors_of_launch},
    error::KernelError,
    exact,
    loss_scaling::{check_scale, inverse},
    optimizer_state::kernel::is_aligned,
    quantize::{reduction::cube_sum, tile},
};

const OPERATION: &str = "clip_factors";
const UNITS: usize = tile::UNITS;
const QUAD: usize = 4;
/// Quads that a unit reads.
const QUADS_OF_UNIT: usize = 16;
/// Elements whose squares a cube adds up. A gradient's parts do not depend on the launch, so that a step repeats itself
/// to the bit.
const PART: usize = UNITS * QUADS_OF_UNIT * QUAD;
/// Cubes in one dimension of a launch, below every device's limit.
const MAX_CUBES: usize = 1 << 15;
/// Gradients of one launch of the kernel that reads them, where the device binds as many.
const MAX_GRADIENTS: usize = 8;
/// Bindings of that kernel beside the gradients: the scale, the sums, and the scalars and shapes.
const SHARED_BINDINGS: usize = 3;
/// Gradients of one launch of the kernel that adds up parts.
const GRADIENTS_OF_LAUNCH: usize = 64;

/// The factor of each gradient, f32 `[gradients]`, that shortens it to the norm `threshold`: 1 for one that is not
/// longer, NaN for one that holds NaN, 0 where the squares add up to infinity.
///
/// Within a few roundings it is [`reference::adamw::clip_factor`](crate::reference::adamw::clip_factor) of the norm,
/// which is summed up in f32, in an order that depends on the number of elements only.
///
/// - `gradients`: f32, f16 or bf16, contiguous.
/// - `threshold`: finite and not negative.
/// - `loss_scale`: f32 `[1]`, the scale that the gradients have and their norm is without; `None`: they have none.
///
/// # Errors
///
/// When there is no gradient, shapes or element types differ from these, or the threshold is out of its range.
pub fn clip_factors<R: Runtime>(
    client: &ComputeClient<R>,
    gradients: &[TensorHandle<R>],
    threshold: f32,
    loss_scale: Option<&TensorHandle<R>>,
) -> Result<TensorHandle<R>, KernelError> {
    if !(0.0..=f32::MAX).contains(&threshold) {
        return Err(KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("a norm of {threshold}"),
            remedy: "use one that is finite and not negative, such as 1",
        });
    }
    if let Some(scale) = loss_scale {
        check_scale(OPERATION, scale)?;
    }
    let mut parts = 0;
    let mut jobs = Vec::with_capacity(gradients.len());
    for gradient in gradients {
        check_float(client, OPERATION, "a gradient", gradient.dtype)?;
        let len = check_contiguous(OPERATION, gradient)?;
        let of_gradient = len.div_ceil(PART);
        jobs.push(Job {
            gradient,
            len,
            first: parts,
            parts: of_gradient,
            width: match len % QUAD == 0 && is_aligned(gradient) {
                true => QUAD,
                false => 1,
            },
        });
        parts += of_gradient;
    }
    if jobs.is_empty() {
        return Err(KernelError::Shape {
            operation: OPERATION,
            got: "no gradients".to_owned(),
            remedy: "pass at least one",
        });
    }
    let sums = empty(client, vec![parts], storage::<f32>());
    // A launch takes gradients of one type and width, and of similar size.
    let mut sorted: Vec<_> = jobs.iter().filter(|job| job.len > 0).collect();
    sorted.sort_by_key(|job| (job.gradient.dtype.to_string(), job.width, job.len));
    let slots = tensors_of_launch(client, SHARED_BINDINGS, 1, MAX_GRADIENTS);
    for jobs in sorted
        .chunk_by(|a, b| a.gradient.dtype == b.gradient.dtype && a.width == b.width)
        .flat_map(|jobs| jobs.chunks(slots))
    {
        add_squares(client, jobs, slots, loss_scale, &sums);
    }
    let factors = empty(client, vec![gradients.len()], storage::<f32>());
    for (index, jobs) in jobs.chunks(GRADIENTS_OF_LAUNCH).enumerate() {
        finish(
            client,
            jobs,
            index * GRADIENTS_OF_LAUNCH,
            threshold,
            &sums,
            &factors,
        );
    }
    Ok(factors)
}

/// A gradient to measure.
struct Job<'a, R: Runtime> {
    gradient: &'a TensorHandle<R>,
    len: usize,
    /// The place of its first part among those of all gradients.
    first: usize,
    parts: usize,
    /// Elements read at once.
    width: usize,
}

/// Adds up the squares of each part of the gradients of a launch, which is filled up to `slots` with empty ones, so
/// that one kernel serves all numbers of them.
fn add_squares<R: Runtime>(
    client: &ComputeClient<R>,
    jobs: &[&Job<'_, R>],
    slots: usize,
    loss_scale: Option<&TensorHandle<R>>,
    sums: &TensorHandle<R>,
) {
    let most = jobs.iter().map(|job| job.parts).max().unwrap_or_default();
    let cubes = most.min(MAX_CUBES);
    let filled = || {
        let filled = jobs.iter().copied().map(Some);
        filled.chain(std::iter::repeat(None)).take(slots)
    };
    let numbers = |number: fn(&Job<'_, R>) -> usize| {
        let numbers = filled().map(|job| job.map_or(0, number) as u32);
        numbers.collect()
    };
    // SAFETY: reads are guarded by each gradient's number of elements, writes by its number of parts, for whose sum the
    // output was allocated. The scale has one element.
    #[allow(unsafe_code)]
    unsafe {
        squares_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(
                cubes as u32,
                jobs.len() as u32,
                most.div_ceil(MAX_CUBES) as u32,
            ),
            CubeDim::new_1d(UNITS as u32),
            jobs[0].width,
            filled()
                .map(|job| array(job.unwrap_or(jobs[0]).gradient.clone()))
                .collect(),
            numbers(|job| job.len),
            numbers(|job| job.first),
            array(or_unused(loss_scale, sums, storage::<f32>())),
            array(sums.clone()),
            QUADS_OF_UNIT as u32,
            0,
            jobs[0].width,
            loss_scale.is_some(),
            jobs[0].gradient.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn squares_kernel<G: Numeric, N: Size>(
    gradients: &Sequence<Array<Vector<G, N>>>,
    lens: &Sequence<u32>,
    firsts: &Sequence<u32>,
    loss_scale: &Array<f32>,
    sums: &mut Array<f32>,
    reads: u32,
    zero: u32,
    #[comptime] width: usize,
    #[comptime] scaled: bool,
    #[define(G)] _dtype: StorageType,
) {
    let part = CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X;
    let mut unscale = 1.0f32;
    if comptime!(scaled) {
        unscale = inverse(loss_scale[0]);
    }
    let mut sum = 0.0f32;
    let mut slot = 0u32;
    let mut has_part = false;
    #[unroll]
    for index in 0..lens.len() {
        if CUBE_POS_Y == index as u32 {
            let gradient = gradients.index(index);
            let len = *lens.index(index);
            has_part = part < len.div_ceil(comptime!(PART as u32));
            slot = *firsts.index(index) + part;
            // Not unrolled, in each of the gradients' branches, by CubeCL or the compilers behind it, which do not know
            // the number: they would take long.
            for read in 0..reads {
                let quad = (part * reads + read) * UNITS as u32 + UNIT_POS;
                if quad < len.div_ceil(4u32) {
                    if comptime!(width == QUAD) {
                        let values = gradient[quad as usize];
                        #[unroll]
                        for lane in 0..QUAD {
                            let x = f32::cast_from(values[lane]) * unscale;
                            sum += exact::product(x, x, zero);
                        }
                    } else {
                        #[unroll]
                        for lane in 0..4u32 {
                            let at = quad * 4 + lane;
                            if at < len {
                                let x = f32::cast_from(gradient[at as usize][0usize]) * unscale;
                                sum += exact::product(x, x, zero);
                            }
                        }
                    }
                }
            }
        }
    }
    let sum = cube_sum::<f32>(sum);
    if UNIT_POS == 0 && has_part {
        sums[slot as usize] = sum;
    }
}

/// Writes the factors of these gradients, the first of which is the `start`-th.
fn finish<R: Runtime>(
    client: &ComputeClient<R>,
    jobs: &[Job<'_, R>],
    start: usize,
    threshold: f32,
    sums: &TensorHandle<R>,
    factors: &TensorHandle<R>,
) {
    let numbers = |number: fn(&Job<'_, R>) -> usize| {
        let numbers = jobs.iter().map(|job| number(job) as u32);
        let filled = numbers.chain(std::iter::repeat(0));
        filled.take(GRADIENTS_OF_LAUNCH).collect()
    };
    // SAFETY: reads are guarded by each gradient's number of parts, and there is a cube for each of the factors.
    #[allow(unsafe_code)]
    unsafe {
        factors_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(jobs.len() as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(sums.clone()),
            array(factors.clone()),
            numbers(|job| job.first),
            numbers(|job| job.parts),
            start as u32,
            threshold,
        );
    }
}

#[cube(launch_unchecked)]
fn factors_kernel(
    sums: &Array<f32>,
    factors: &mut Array<f32>,
    firsts: &Sequence<u32>,
    parts: &Sequence<u32>,
    start: u32,
    threshold: f32,
) {
    let mut first = 0u32;
    let mut count = 0u32;
    #[unroll]
    for index in 0..parts.len() {
        if CUBE_POS_X == index as u32 {
            first = *firsts.index(index);
            count = *parts.index(index);
        }
    }
    let mut sum = 0.0f32;
    let mut part = UNIT_POS;
    while part < count {
        sum += sums[(first + part) as usize];
        part += UNITS as u32;
    }
    let sum = cube_sum::<f32>(sum);
    if UNIT_POS == 0 {
        let factor = 1.0 / (sum.sqrt() + f32::MIN_POSITIVE) * threshold;
        // NaN is not at least 1.
        factors[(start + CUBE_POS_X) as usize] = select(factor >= 1.0, 1.0, factor);
    }
}
