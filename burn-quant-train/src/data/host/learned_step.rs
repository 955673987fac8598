//! Learned step sizes in host memory.

use burn_backend::{
    FloatDType, Shape, TensorData,
    tensor::{Device, FloatTensor},
};
use cubecl_kernels::{
    hadamard::HadamardTransform,
    host::learned_step::{self as host, HostElementSource, HostGradient, HostSavedRounding},
    layout::Layout,
    quantize::learned_step::ResidualRows,
};

use super::{HostBackend, upload, with_matrix};
use crate::data::{
    cast::cast_to,
    kernels::checked,
    learned_step::{
        ElementSource, Gradient, LearnedMatrix, LearnedStep, LearnedStepKernels, SavedRounding,
        saturation_shape,
    },
    read::floats,
    tensors::matrix_shape,
};

impl<B: HostBackend> LearnedStepKernels for B {
    fn quantize_learned(
        x: FloatTensor<B>,
        step: &LearnedStep<B>,
        transform: HadamardTransform,
        // One layout serves both ways of reading it: products dequantize.
        _layout: Layout,
        save: Option<ResidualRows>,
    ) -> LearnedMatrix<B> {
        let shape = matrix_shape(&x, "quantize_learned");
        let device = B::float_device(&x);
        let value = value_of(step);
        let quantized = B::with_floats(x, |x| host::quantize(x, shape, value, transform, save));
        let (matrix, rounding) = checked(quantized);
        LearnedMatrix {
            matrix: upload(matrix, &device),
            rounding: rounding.map(|rounding| upload_rounding(rounding, shape, &device)),
        }
    }

    fn learned_step_backward(
        gradient: Gradient<B>,
        source: ElementSource<B>,
        transform: HadamardTransform,
        dtype: FloatDType,
    ) -> [FloatTensor<B>; 2] {
        let (shape, device) = match &source {
            ElementSource::Exact { x, .. } => {
                (matrix_shape(x, "learned_step_backward"), B::float_device(x))
            }
            ElementSource::Saved(learned) => (
                learned.matrix.shape,
                B::int_device(learned.matrix.values.as_ref().expect(super::ROW_MAJOR)),
            ),
        };
        let gradients = with_gradient(gradient, |gradient| {
            with_source(source, shape, |source| {
                host::backward(gradient, source, transform)
            })
        });
        let gradients = checked(gradients);
        let of_x = B::float_from_data(TensorData::new(gradients.x, shape), &device);
        [
            cast_to::<B>(of_x, Some(dtype)),
            B::float_from_data(TensorData::new(vec![gradients.step], [1]), &device),
        ]
    }

    fn cold_step(
        x: FloatTensor<B>,
        step: LearnedStep<B>,
        transform: HadamardTransform,
    ) -> FloatTensor<B> {
        let shape = matrix_shape(&x, "cold_step");
        let device = B::float_device(&x);
        let layer = step.layer;
        let mut steps = floats::<B>(step.steps);
        let cold = B::with_floats(x, |x| host::cold_step(x, shape, steps[layer], transform));
        steps[layer] = checked(cold);
        let layers = steps.len();
        B::float_from_data(TensorData::new(steps, [layers]), &device)
    }

    fn squared_error(
        x: FloatTensor<B>,
        step: &LearnedStep<B>,
        transform: HadamardTransform,
    ) -> FloatTensor<B> {
        let shape = matrix_shape(&x, "squared_error");
        let device = B::float_device(&x);
        let value = value_of(step);
        let error = B::with_floats(x, |x| host::squared_error(x, shape, value, transform));
        B::float_from_data(TensorData::new(vec![checked(error)], [1]), &device)
    }
}

fn value_of<B: HostBackend>(step: &LearnedStep<B>) -> f32 {
    B::with_floats(step.steps.clone(), |steps| steps[step.layer])
}

fn upload_rounding<B: HostBackend>(
    rounding: HostSavedRounding,
    shape: [usize; 2],
    device: &Device<B>,
) -> SavedRounding<B> {
    let sampled = Shape::new([rounding.sample.count(shape[0]), shape[1]]);
    SavedRounding {
        saturation: B::int_from_data(
            TensorData::new(rounding.saturation, saturation_shape(shape)),
            device,
        ),
        residuals: B::int_from_data(TensorData::new(rounding.residuals, sampled), device),
        sample: rounding.sample,
    }
}

fn with_gradient<B: HostBackend, A>(
    gradient: Gradient<B>,
    read: impl FnOnce(HostGradient<'_>) -> A,
) -> A {
    match gradient {
        Gradient::Dense(gradient) => B::with_floats(gradient, |it| read(HostGradient::Dense(it))),
        Gradient::Sampled {
            products,
            positions,
        } => B::with_floats(products, |products| {
            B::with_ints(positions, |positions| {
                read(HostGradient::Sampled {
                    products,
                    positions,
                })
            })
        }),
    }
}

fn with_source<B: HostBackend, A>(
    source: ElementSource<B>,
    shape: [usize; 2],
    read: impl FnOnce(HostElementSource<'_>) -> A,
) -> A {
    match source {
        ElementSource::Exact { x, step } => {
            let step = value_of(&step);
            B::with_floats(x, |x| read(HostElementSource::Exact { x, shape, step }))
        }
        ElementSource::Saved(learned) => {
            let rounding = learned.rounding.expect("a saved matrix has its rounding");
            let rounding = HostSavedRounding {
                saturation: B::with_ints(rounding.saturation, <[u8]>::to_vec),
                residuals: B::with_ints(rounding.residuals, <[i8]>::to_vec),
                sample: rounding.sample,
            };
            with_matrix(&learned.matrix, |quantized| {
                read(HostElementSource::Saved {
                    quantized,
                    rounding: &rounding,
                })
            })
        }
    }
}
