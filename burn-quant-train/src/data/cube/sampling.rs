//! Bit splitting and sampling by kernels.

use burn_backend::{DType, tensor::FloatTensor};
use burn_cubecl::{
    CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement,
    kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl_kernels::{
    bit_splitting::{self, BitSplit as KernelSplit},
    layout::Layout,
    leverage_score::{self as kernels, RowSample as KernelSample},
    rounding::Rounding,
};

use super::{
    quantize::{on_device, unwrap, wrap},
    tensors::{Cube, handle, tensor},
};
use crate::data::{
    StochasticKey,
    kernels::checked,
    quantize::Quantized,
    sampling::{BitSplit, RowSample, SamplingKernels},
    tensors::matrix_shape,
};

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> SamplingKernels
    for CubeBackend<R, F, I, BT>
where
    Self: Cube<R>,
{
    fn bit_split(x: FloatTensor<Self>, rounding: Rounding) -> BitSplit<Self> {
        matrix_shape(&x, "bit_split");
        let split = checked(bit_splitting::bit_split(&x.client, &handle(&x), rounding));
        BitSplit {
            parts: tensor(&x, split.parts, DType::U8),
            scales: tensor(&x, split.scales, DType::F32),
            squared_norms: tensor(&x, split.squared_norms, DType::U32),
            shape: split.shape,
        }
    }

    fn merge_parts(split: &BitSplit<Self>, layout: Layout) -> Quantized<Self> {
        let like = &split.parts;
        let merged = bit_splitting::merge_parts(&like.client, &of_split(split), layout);
        wrap(like, checked(merged))
    }

    fn leverage_scores(split: &BitSplit<Self>, x: Option<&Quantized<Self>>) -> FloatTensor<Self> {
        let like = &split.parts;
        let of_x = x.map(|x| checked(kernels::int4_row_norms(&like.client, &unwrap(x))));
        let norms = handle(&split.squared_norms);
        let scores = kernels::leverage_scores(&like.client, &norms, of_x.as_ref());
        tensor(like, checked(scores), DType::F32)
    }

    fn sample_rows(
        scores: FloatTensor<Self>,
        split: &BitSplit<Self>,
        expected: usize,
        key: StochasticKey,
    ) -> RowSample<Self> {
        let scores: CubeTensor<R> = into_contiguous(scores);
        let scales = handle(&split.scales);
        let sample = kernels::sample_rows(&scores.client, &handle(&scores), &scales, expected, key);
        let sample = checked(sample);
        RowSample {
            rows: tensor(&scores, sample.rows, DType::I32),
            factors: tensor(&scores, sample.factors, DType::F32),
            positions: tensor(&scores, sample.positions, DType::I32),
            count: tensor(&scores, sample.count, DType::I32),
            probabilities: tensor(&scores, sample.probabilities, DType::F32),
        }
    }

    fn gather_parts(split: &BitSplit<Self>, sample: &RowSample<Self>) -> Quantized<Self> {
        let like = &split.parts;
        let gathered = kernels::gather_parts(&like.client, &of_split(split), &of_sample(sample));
        wrap(like, checked(gathered))
    }

    fn gather_scaled(
        split: &BitSplit<Self>,
        sample: &RowSample<Self>,
        rounding: Rounding,
        layout: Layout,
    ) -> Quantized<Self> {
        let like = &split.parts;
        let (split, sample) = (of_split(split), of_sample(sample));
        let gathered = kernels::gather_scaled(&like.client, &split, &sample, rounding, layout);
        wrap(like, checked(gathered))
    }

    fn gather_int4_rows(
        x: &Quantized<Self>,
        sample: &RowSample<Self>,
        layout: Layout,
    ) -> Quantized<Self> {
        let like = on_device(x);
        let sample = of_sample(sample);
        let gathered = kernels::gather_int4_rows(&like.client, &unwrap(x), &sample, layout);
        wrap(like, checked(gathered))
    }
}

fn of_split<B: Cube<R>, R: CubeRuntime>(split: &BitSplit<B>) -> KernelSplit<R> {
    KernelSplit {
        parts: handle(&split.parts),
        scales: handle(&split.scales),
        squared_norms: handle(&split.squared_norms),
        shape: split.shape,
    }
}

fn of_sample<B: Cube<R>, R: CubeRuntime>(sample: &RowSample<B>) -> KernelSample<R> {
    KernelSample {
        rows: handle(&sample.rows),
        factors: handle(&sample.factors),
        positions: handle(&sample.positions),
        count: handle(&sample.count),
        probabilities: handle(&sample.probabilities),
    }
}
