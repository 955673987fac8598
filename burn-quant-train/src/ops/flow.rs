//! The input of an operator of a flow, rounded, which waits like this for the backward pass (jetfire-int8,
//! section 3.2; coat-fp8, section 5.2).

use std::sync::Arc;

use burn_backend::{Shape, tensor::FloatTensor};
use cubecl_kernels::granularity::Granularity;

use super::{
    matrix::{flatten, flattened},
    operand::{Factor, Make},
};
use crate::{
    data::{
        DataBackend,
        composition::has_quantizing_kernels,
        quantize::{MatrixSource, Quantized, quantize, quantize_source},
        tensors::{self, Outline},
    },
    layer::tag::Tag,
    recipe::{self, Cast},
    saved::{
        HeldTensor,
        later::{GradientCopy, Later},
        recorded::Recorded,
        report,
    },
};

/// The value of x, rounded, with the gradient that its reader gives.
#[derive(Clone)]
pub(crate) struct ReadRounded<B: DataBackend> {
    /// How: to nearest.
    pub cast: Cast,
    /// True where a linear layer whose output x is may quantize it in its product. Of who reads x as floats too it then
    /// computes the product again: norms read the residual stream, which others read, so theirs is not quantized there.
    pub by_product: bool,
    /// The tag of x, if x is the matrix that the tag speaks of: operators that read one tensor share a copy.
    pub tag: Option<Arc<Tag<B>>>,
}

impl<B: DataBackend> Recorded<B, 1> for ReadRounded<B> {
    type Saved = ();

    const STRAIGHT_THROUGH: bool = true;

    /// Without the tag, whose copy would wait for the second run: then each operator rounds its own, to the same.
    fn again(&mut self, _inputs: &[HeldTensor<B>; 1]) -> Option<Self> {
        Some(Self {
            tag: None,
            ..self.clone()
        })
    }

    fn forward(self, [x]: [HeldTensor<B>; 1], _wanted: [bool; 1]) -> (HeldTensor<B>, ()) {
        let factor = Factor::left(&self.cast, false);
        let found = self.tag.as_ref().and_then(|tag| tag.find(factor.key, None));
        let copy = found.unwrap_or_else(|| {
            let make = Make::new(factor, || {
                unreachable!("activations are rounded to nearest")
            });
            let spec = make.spec(factor.key.layout);
            let later = x.cell().waits_for_reader().filter(|_| self.by_product);
            let copy = match later {
                Some(Later::Product(product)) => {
                    quantize_source::<B>(MatrixSource::Product(*product), &spec)
                }
                Some(Later::Swiglu(_) | Later::Gradient(..) | Later::OfOne(_)) | None => {
                    quantize::<B>(flatten::<B>(x.cell().read()), &spec)
                }
            };
            match &self.tag {
                Some(tag) => tag.keep(factor.key, None, copy),
                None => Arc::new(copy),
            }
        });
        let rounded = HeldTensor::quantized("flow", Quantized::clone(&copy), x.cell());
        // The gradient goes straight through: who takes that of x takes this one. In blocks where a kernel makes it alone:
        // elsewhere what it is made of would wait beside it.
        let device = x.cell().device();
        let is_made_at_once = |copy: &GradientCopy<B>| match copy.spec.granularity {
            Granularity::Tensor => true,
            granularity => has_quantizing_kernels::<B>(device, granularity),
        };
        if let Some(copy) = x.cell().gradient_copy().filter(is_made_at_once) {
            rounded.cell().will_quantize_gradient(copy);
        }
        report::shares(&copy);
        (rounded, ())
    }

    fn backward(
        (): (),
        gradient: FloatTensor<B>,
        _wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        [Some(gradient)]
    }
}

impl recipe::Flow {
    /// Bytes of a tensor of this shape as it flows, scales included.
    pub fn bytes(&self, shape: impl Into<Shape>) -> usize {
        let factor = Factor::left(&self.activations, false);
        let outline = factor.outline(flattened(&shape.into()), factor.key.layout);
        tensors::bytes::<Quantized<Outline>>(outline)
    }
}
