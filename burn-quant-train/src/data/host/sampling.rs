//! Bit splitting and sampling in host memory.

use burn_backend::{Shape, TensorData, tensor::FloatTensor};
use cubecl_kernels::{
    host::{self, HostBitSplit, HostRowSample},
    layout::Layout,
    rounding::Rounding,
};

use super::{HostBackend, upload, with_matrix};
use crate::data::{
    StochasticKey,
    kernels::checked,
    quantize::Quantized,
    read::floats,
    sampling::{BitSplit, RowSample, SamplingKernels},
    tensors::matrix_shape,
};

impl<B: HostBackend> SamplingKernels for B {
    fn bit_split(x: FloatTensor<B>, rounding: Rounding) -> BitSplit<B> {
        let shape = matrix_shape(&x, "bit_split");
        let device = B::float_device(&x);
        let split = checked(B::with_floats(x, |x| host::bit_split(x, shape, rounding)));
        BitSplit {
            parts: B::int_from_data(TensorData::new(split.parts, shape), &device),
            scales: B::float_from_data(TensorData::new(split.scales.to_vec(), [2]), &device),
            squared_norms: B::int_from_data(
                TensorData::new(split.squared_norms, [2 * shape[0]]),
                &device,
            ),
            shape,
        }
    }

    fn merge_parts(split: &BitSplit<B>, _layout: Layout) -> Quantized<B> {
        let device = B::int_device(&split.parts);
        upload(checked(host::merge_parts(&read_split(split))), &device)
    }

    fn leverage_scores(split: &BitSplit<B>, x: Option<&Quantized<B>>) -> FloatTensor<B> {
        let device = B::int_device(&split.parts);
        let of_x = x.map(|x| checked(with_matrix(x, host::int4_row_norms)));
        let scores = B::with_ints(split.squared_norms.clone(), |norms| {
            host::leverage_scores(norms, of_x.as_deref())
        });
        let stacked = Shape::new([2 * split.shape[0]]);
        B::float_from_data(TensorData::new(checked(scores), stacked), &device)
    }

    fn sample_rows(
        scores: FloatTensor<B>,
        split: &BitSplit<B>,
        expected: usize,
        key: StochasticKey,
    ) -> RowSample<B> {
        let device = B::int_device(&split.parts);
        let scales = scales_of(split);
        let sample = checked(B::with_floats(scores, |scores| {
            host::sample_rows(scores, scales, expected, key)
        }));
        let (kept, stacked) = (sample.rows.len(), sample.positions.len());
        RowSample {
            rows: B::int_from_data(TensorData::new(sample.rows, [kept]), &device),
            factors: B::float_from_data(TensorData::new(sample.factors, [kept]), &device),
            positions: B::int_from_data(TensorData::new(sample.positions, [stacked]), &device),
            count: B::int_from_data(TensorData::new(vec![sample.count], [1]), &device),
            probabilities: B::float_from_data(
                TensorData::new(sample.probabilities, [stacked]),
                &device,
            ),
        }
    }

    fn gather_parts(split: &BitSplit<B>, sample: &RowSample<B>) -> Quantized<B> {
        let device = B::int_device(&split.parts);
        let gathered = host::gather_parts(&read_split(split), &read_sample(sample));
        upload(checked(gathered), &device)
    }

    fn gather_scaled(
        split: &BitSplit<B>,
        sample: &RowSample<B>,
        rounding: Rounding,
        _layout: Layout,
    ) -> Quantized<B> {
        let device = B::int_device(&split.parts);
        let gathered = host::gather_scaled(&read_split(split), &read_sample(sample), rounding);
        upload(checked(gathered), &device)
    }

    fn gather_int4_rows(x: &Quantized<B>, sample: &RowSample<B>, _layout: Layout) -> Quantized<B> {
        let device = B::int_device(&sample.rows);
        let sample = read_sample(sample);
        let gathered = with_matrix(x, |x| host::gather_int4_rows(x, &sample));
        upload(checked(gathered), &device)
    }
}

fn scales_of<B: HostBackend>(split: &BitSplit<B>) -> [f32; 2] {
    let scales = floats::<B>(split.scales.clone());
    [scales[0], scales[1]]
}

fn read_split<B: HostBackend>(split: &BitSplit<B>) -> HostBitSplit {
    HostBitSplit {
        parts: B::with_ints(split.parts.clone(), <[u8]>::to_vec),
        scales: scales_of(split),
        squared_norms: B::with_ints(split.squared_norms.clone(), <[u32]>::to_vec),
        shape: split.shape,
    }
}

fn read_sample<B: HostBackend>(sample: &RowSample<B>) -> HostRowSample {
    HostRowSample {
        rows: B::with_ints(sample.rows.clone(), <[i32]>::to_vec),
        factors: floats::<B>(sample.factors.clone()),
        positions: B::with_ints(sample.positions.clone(), <[i32]>::to_vec),
        count: B::with_ints(sample.count.clone(), |count: &[i32]| count[0]),
        probabilities: floats::<B>(sample.probabilities.clone()),
    }
}
