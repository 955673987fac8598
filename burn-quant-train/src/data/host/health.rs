//! Measurements in host memory.

use burn_backend::{
    FloatDType, TensorData,
    tensor::{Device, FloatTensor, IntTensor},
};
use cubecl_kernels::{host, reference::absmax};

use super::HostBackend;
use crate::data::{
    health::{HealthKernels, Magnitudes, QuantizationError},
    quantize::Scales,
    tensors::matrix_shape,
};

impl<B: HostBackend> HealthKernels for B {
    fn magnitudes(x: FloatTensor<B>) -> Magnitudes<B> {
        matrix_shape(&x, "magnitudes");
        let device = B::float_device(&x);
        let (absmax, histogram) = B::with_floats(x, host::magnitudes);
        Magnitudes {
            absmax: B::float_from_data(TensorData::new(vec![absmax], [1]), &device),
            histogram: upload_counts::<B>(&histogram, &device),
        }
    }

    fn quantization_error(
        x: FloatTensor<B>,
        y: FloatTensor<B>,
        absmax: FloatTensor<B>,
        limit: Option<FloatTensor<B>>,
    ) -> QuantizationError<B> {
        let [of_x, of_y] = [&x, &y].map(|it| matrix_shape(it, "quantization_error"));
        assert_eq!(of_x, of_y, "quantization_error: shapes of x and y");
        let device = B::float_device(&x);
        let scalar = |tensor| B::with_floats(tensor, |values| values[0]);
        let (absmax, limit) = (scalar(absmax), limit.map(scalar));
        let (sums, counts) = B::with_floats(x, |x| {
            B::with_floats(y, |y| host::quantization_error(x, y, absmax, limit))
        });
        let length = sums.len();
        QuantizationError {
            sums: B::float_from_data(TensorData::new(sums.to_vec(), [length]), &device),
            counts: upload_counts::<B>(&counts, &device),
        }
    }

    fn extremes(scales: &Scales<B>) -> FloatTensor<B> {
        let stored = match scales {
            Scales::F32(scales) => scales.clone(),
            Scales::E8M0(bytes) | Scales::E4M3 { scales: bytes, .. } => {
                B::int_into_float(bytes.clone(), FloatDType::F32)
            }
        };
        let device = B::float_device(&stored);
        let of_scales = match scales {
            Scales::F32(_) | Scales::E8M0(_) => 1.0,
            Scales::E4M3 { tensor_scale, .. } => {
                B::with_floats(tensor_scale.clone(), |values| values[0])
            }
        };
        let (smallest, largest) = B::with_floats(stored, |scales| {
            let smallest = scales.iter().copied().fold(f32::INFINITY, f32::min);
            // As kernels have it, which compare bits: NaN is the largest.
            let largest = absmax(scales.iter().copied());
            (smallest, largest)
        });
        let extremes = vec![smallest, largest, of_scales];
        B::float_from_data(TensorData::new(extremes, [3]), &device)
    }
}

fn upload_counts<B: HostBackend>(counts: &[u32], device: &Device<B>) -> IntTensor<B> {
    let bits: Vec<i32> = counts.iter().map(|count| count.cast_signed()).collect();
    let length = bits.len();
    B::int_from_data(TensorData::new(bits, [length]), device)
}
