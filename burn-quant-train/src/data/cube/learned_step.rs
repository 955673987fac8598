//! Learned step sizes by kernels.

use burn_backend::{DType, FloatDType, tensor::FloatTensor};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    hadamard::HadamardTransform,
    layout::Layout,
    quantize::learned_step::{self as kernels, ResidualRows},
};

use super::{
    quantize::{unwrap, wrap},
    tensors::{Cube, handle, own, tensor},
};
use crate::data::{
    kernels::checked,
    learned_step::{
        ElementSource, Gradient, LearnedMatrix, LearnedStep, LearnedStepKernels, SavedRounding,
    },
    tensors::matrix_shape,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> LearnedStepKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn quantize_learned(
        x: FloatTensor<Self>,
        step: &LearnedStep<Self>,
        transform: HadamardTransform,
        layout: Layout,
        save: Option<ResidualRows>,
    ) -> LearnedMatrix<Self> {
        matrix_shape(&x, "quantize_learned");
        let steps = handle(&into_contiguous(step.steps.clone()));
        let step = of(&steps, step.layer);
        let quantized = kernels::quantize(&x.client, &handle(&x), step, transform, layout, save);
        let (matrix, rounding) = checked(quantized);
        LearnedMatrix {
            matrix: wrap(&x, matrix),
            rounding: rounding.map(|rounding| SavedRounding {
                saturation: tensor(&x, rounding.saturation, DType::U8),
                residuals: tensor(&x, rounding.residuals, DType::I8),
                sample: rounding.sample,
            }),
        }
    }

    fn learned_step_backward(
        gradient: Gradient<Self>,
        source: ElementSource<Self>,
        transform: HadamardTransform,
        dtype: FloatDType,
    ) -> [FloatTensor<Self>; 2] {
        let (like, positions) = match gradient {
            Gradient::Dense(gradient) => (gradient, None),
            Gradient::Sampled {
                products,
                positions,
            } => (products, Some(handle(&into_contiguous(positions)))),
        };
        let dense = handle(&like);
        let gradient = match &positions {
            None => kernels::Gradient::Dense(&dense),
            Some(positions) => kernels::Gradient::Sampled {
                products: &dense,
                positions,
            },
        };
        let dtype = DType::from(dtype);
        let backward =
            |source| kernels::backward(&like.client, gradient, source, transform, dtype.into());
        let gradients = match source {
            ElementSource::Exact { x, step } => {
                let steps = handle(&into_contiguous(step.steps));
                backward(kernels::ElementSource::Exact {
                    x: &handle(&x),
                    step: of(&steps, step.layer),
                })
            }
            ElementSource::Saved(learned) => {
                let rounding = learned.rounding.expect("a saved matrix has its rounding");
                backward(kernels::ElementSource::Saved {
                    quantized: &unwrap(&learned.matrix),
                    rounding: &kernels::SavedRounding {
                        saturation: handle(&rounding.saturation),
                        residuals: handle(&rounding.residuals),
                        sample: rounding.sample,
                    },
                })
            }
        };
        let gradients = checked(gradients);
        [
            tensor(&like, gradients.x, dtype),
            tensor(&like, gradients.step, DType::F32),
        ]
    }

    fn cold_step(
        x: FloatTensor<Self>,
        step: LearnedStep<Self>,
        transform: HadamardTransform,
    ) -> FloatTensor<Self> {
        matrix_shape(&x, "cold_step");
        let steps: CubeTensor<R> = own(step.steps);
        let updated = handle(&steps);
        checked(kernels::cold_step(
            &x.client,
            &handle(&x),
            of(&updated, step.layer),
            transform,
        ));
        steps
    }

    fn squared_error(
        x: FloatTensor<Self>,
        step: &LearnedStep<Self>,
        transform: HadamardTransform,
    ) -> FloatTensor<Self> {
        matrix_shape(&x, "squared_error");
        let steps = handle(&into_contiguous(step.steps.clone()));
        let step = of(&steps, step.layer);
        let error = kernels::squared_error(&x.client, &handle(&x), step, transform);
        tensor(&x, checked(error), DType::F32)
    }
}

fn of<R: CubeRuntime>(steps: &TensorHandle<R>, layer: usize) -> kernels::LearnedStep<'_, R> {
    kernels::LearnedStep { steps, layer }
}
