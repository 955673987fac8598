//! Measurements by kernels.

use burn_backend::{DType, tensor::FloatTensor};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous,
};
use cubecl_kernels::{extremes, magnitude, quantization_error};

use super::tensors::{Cube, handle, tensor};
use crate::data::{
    health::{HealthKernels, Magnitudes, QuantizationError},
    kernels::checked,
    quantize::Scales,
    tensors::matrix_shape,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> HealthKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn magnitudes(x: FloatTensor<Self>) -> Magnitudes<Self> {
        matrix_shape(&x, "magnitudes");
        let found = checked(magnitude::magnitudes(&x.client, &handle(&x)));
        Magnitudes {
            absmax: tensor(&x, found.absmax, DType::F32),
            histogram: tensor(&x, found.histogram, DType::I32),
        }
    }

    fn quantization_error(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        absmax: FloatTensor<Self>,
        limit: Option<FloatTensor<Self>>,
    ) -> QuantizationError<Self> {
        let limit = limit.as_ref().map(handle);
        let error = quantization_error::quantization_error(
            &x.client,
            &handle(&x),
            &handle(&y),
            &handle(&absmax),
            limit.as_ref(),
        );
        let error = checked(error);
        QuantizationError {
            sums: tensor(&x, error.sums, DType::F32),
            counts: tensor(&x, error.counts, DType::I32),
        }
    }

    fn extremes(scales: &Scales<Self>) -> FloatTensor<Self> {
        let (stored, of_scales) = match scales {
            Scales::F32(scales) => (scales, None),
            Scales::E8M0(scales) => (scales, None),
            Scales::E4M3 {
                scales,
                tensor_scale,
            } => (scales, Some(handle(tensor_scale))),
        };
        let contiguous = into_contiguous(stored.clone());
        let found = extremes::extremes(&stored.client, &handle(&contiguous), of_scales.as_ref());
        tensor(stored, checked(found), DType::F32)
    }
}
