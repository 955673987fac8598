//! Delayed scaling: the scale of a maximum that earlier data had, or where there is none yet, of the data's own (the
//! FP8 recipe of NVIDIA's TransformerEngine).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_dtype, empty, is_contiguous, or_unused, storage},
    error::KernelError,
    operator_input::OperatorInput,
    scale::has_scale,
    swiglu,
};

use super::{
    Input, MatrixSource, QuantizeSpec, Quantized,
    absmax::{self, Count, UNITS, largest_of},
    given::{by_scale, check_given},
    matrix_scale,
};

const OPERATION: &str = "quantize_delayed";

/// The maximum that a layer's data had in earlier steps, among those of all layers.
#[derive(Debug)]
pub struct DelayedMaximum<'a, R: Runtime> {
    /// f32 `[layers]`, contiguous: 0 for a layer that has none yet.
    pub maxima: &'a TensorHandle<R>,
    /// The index of the layer.
    pub layer: usize,
}

impl<R: Runtime> Clone for DelayedMaximum<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for DelayedMaximum<'_, R> {}

impl<R: Runtime> DelayedMaximum<'_, R> {
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let Self { maxima, layer } = self;
        check_dtype(OPERATION, "maxima", maxima, storage::<f32>(), "pass f32")?;
        let shape = maxima.shape();
        if shape.len() == 1 && *layer < shape[0] && is_contiguous(maxima) {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation: OPERATION,
            got: format!("layer {layer} of maxima {shape:?}"),
            remedy: "pass contiguous maxima [layers] and the index of a layer",
        })
    }
}

/// Quantizes `x`, a matrix of f32, f16 or bf16 with any strides or [what it is computed from](MatrixSource), by the
/// scale `maximum / largest number` of its layer's delayed maximum, and finds its own largest magnitude in the same
/// read: [`quantize_by`](super::quantize_by), with the same outputs.
///
/// - `spec`: [`Granularity::Tensor`](crate::granularity::Granularity::Tensor) with
///   [`ScaleNumber::F32`](crate::scale::ScaleNumber::F32).
///
/// A layer whose maximum is 0, or another one that gets no scale, takes that of `x` instead, and scale 1 if `x` has
/// none either. Which of them it is, is decided on the device: `x` is read once more where there is no delayed maximum.
/// The numbers are those of [`reference::quantize_delayed`](crate::reference::quantize_delayed), to the bit.
///
/// # Errors
///
/// As [`quantize_by`](super::quantize_by), and when `delayed` is not one of the maxima.
pub fn quantize_delayed<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<MatrixSource<'a, R>>,
    spec: &QuantizeSpec,
    delayed: DelayedMaximum<R>,
) -> Result<(Quantized<R>, TensorHandle<R>), KernelError> {
    check_given(spec)?;
    let x = match x.into() {
        MatrixSource::Floats(x) => x,
        source @ MatrixSource::Swiglu { gate, up, .. } => {
            let view = source.view(client, OPERATION)?;
            delayed.check()?;
            let factors = [gate, up].map(OperatorInput::from);
            if let Some((quantized, Some(absmax))) =
                swiglu::matrix_scale::launch(client, factors, &view, spec, Some(delayed))
            {
                return Ok((quantized, absmax));
            }
            &source.floats(client)?
        }
    };
    let input = Input::new(client, OPERATION, x, spec)?;
    delayed.check()?;
    if let Some(quantized) = matrix_scale::delayed(client, &input, delayed) {
        return Ok(quantized);
    }
    let of_parts = (input.view.shape.num_elements() > 0)
        .then(|| absmax::parts(client, x, &input.view, Count::All, Some(delayed)));
    let parts = of_parts
        .as_ref()
        .map_or(0, |it| it.shape().iter().product::<usize>());
    let scale = empty(client, vec![1], storage::<f32>());
    // SAFETY: the layer is an index of the delayed maxima, and those of parts are as many as is said.
    #[allow(unsafe_code)]
    unsafe {
        choose_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(delayed.maxima.clone()),
            array(or_unused(
                of_parts.as_ref(),
                delayed.maxima,
                storage::<f32>(),
            )),
            array(scale.clone()),
            delayed.layer as u32,
            parts as u32,
            spec.number.largest(),
        );
    }
    Ok(by_scale(client, &input, &scale))
}

/// The scale of the delayed maximum of the layer, or that of the data.
#[cube(launch_unchecked)]
fn choose_kernel(
    delayed: &Array<f32>,
    of_parts: &Array<f32>,
    scale: &mut Array<f32>,
    layer: u32,
    parts: u32,
    largest: f32,
) {
    let of_layer = u32::reinterpret(delayed[layer as usize]);
    let has_maximum = has_scale(of_layer);
    // All units take part in the search, though there is nothing to search.
    let of_data = largest_of(of_parts, 0u32, select(has_maximum, 0u32, parts));
    let bits = select(has_maximum, of_layer, of_data);
    if UNIT_POS == 0 {
        let mut chosen = 1.0f32;
        if has_scale(bits) {
            chosen = f32::reinterpret(bits) / largest;
        }
        scale[0] = chosen;
    }
}
