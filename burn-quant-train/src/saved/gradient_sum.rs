//! Sums of gradients: a value that several operations read has a gradient from each of them.
//!
//! Burn's autodiff adds them up as they come, each in a kernel of its own. Here those of whole activations wait side by
//! side until their sum is read, up to three of them: the backward pass of a norm takes them as they are, and adds what
//! came to its input around it. Each sum is rounded as Burn's, in the same order, so that the bits are the same. The
//! gradients of queries, keys and values take one activation more so, for as long as they wait.

use burn_autodiff::{Autodiff, grads::Gradients};
use burn_backend::{DType, TensorMetadata, ops::FloatTensorOps, tensor::FloatTensor};
use cubecl_kernels::output_gradient::MAX_TERMS;

use super::{Held, HeldTensor};
use crate::data::DataBackend;

/// Gradients of fewer elements are added up at once: a kernel more for them is nothing beside what waits.
const MIN_ELEMENTS: usize = 1 << 16;

/// A gradient, and the node that it is of, together as a tensor of autodiff: Burn finds gradients by those.
pub(super) type OfNode<B> = FloatTensor<Autodiff<Held<B>>>;

/// Adds to the gradient of a node: as a term that waits, where it may.
pub(super) fn register<B: DataBackend>(gradients: &mut Gradients, new: OfNode<B>) {
    let earlier = gradients.remove::<Held<B>>(&new);
    // What autodiff did not compute from anything, a parameter, keeps its gradient until the step.
    let is_activation = !new.node.parents.is_empty();
    let (id, new) = (new.node.id, new.primitive);
    let sum = match earlier {
        Some(earlier) if is_activation && may_wait(&earlier, &new) => {
            let form = new.cell().form();
            let mut terms = earlier.into_terms();
            terms.push(new.into_input());
            HeldTensor::sum(terms, form)
        }
        Some(earlier) => Held::<B>::float_add(new, earlier),
        None => new,
    };
    gradients.register::<Held<B>>(id, sum);
}

/// True for large gradients of one narrow dtype, of which there are not too many yet.
fn may_wait<B: DataBackend>(earlier: &HeldTensor<B>, new: &HeldTensor<B>) -> bool {
    let is_narrow = matches!(new.dtype(), DType::BF16 | DType::F16);
    let is_large = new.shape().num_elements() >= MIN_ELEMENTS;
    is_narrow && is_large && earlier.is_like(new) && earlier.terms() < MAX_TERMS
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::{Arc, Mutex};

    use burn_backend::{Scalar, TensorData, ops::FloatTensorOps};
    use burn_flex::Flex;

    use super::*;
    use crate::{
        data::composition::{OutputGradient, with_other},
        lock::lock,
        saved::{
            cell::sum_of_terms,
            recorded::{QuantBackend, Recorded},
        },
    };

    type B = Autodiff<Flex>;
    type Inside = <B as QuantBackend>::Inside;
    type Tensor = FloatTensor<Inside>;

    /// What a backward pass was given: terms, and whether there was another gradient.
    type Seen = Arc<Mutex<Vec<(usize, bool)>>>;

    /// Doubles its input, whatever comes in.
    #[derive(Clone)]
    struct Double<const JOINS: bool>(Seen);

    impl<const JOINS: bool> Recorded<Flex, 1> for Double<JOINS> {
        type Saved = SeenBy;

        fn again(&mut self, _inputs: &[HeldTensor<Flex>; 1]) -> Option<Self> {
            Some(self.clone())
        }

        fn forward(self, [x]: [HeldTensor<Flex>; 1], _: [bool; 1]) -> (HeldTensor<Flex>, SeenBy) {
            let y = Flex::float_mul_scalar(x.into_value(), Scalar::from(2.0));
            (HeldTensor::new(y), SeenBy(self.0))
        }

        fn backward(
            _: SeenBy,
            gradient: FloatTensor<Flex>,
            _: [bool; 1],
        ) -> [Option<FloatTensor<Flex>>; 1] {
            [Some(Flex::float_mul_scalar(gradient, Scalar::from(2.0)))]
        }

        const JOINS: bool = JOINS;

        fn backward_joined(
            saved: SeenBy,
            (terms, other): OutputGradient<Flex>,
            wanted: [bool; 1],
        ) -> [Option<FloatTensor<Flex>>; 1] {
            lock(&saved.0).push((terms.len(), other.is_some()));
            let [own] = Self::backward(saved, sum_of_terms::<Flex>(terms), wanted);
            [own.map(|own| with_other::<Flex>(own, other))]
        }
    }

    #[derive(Debug, Clone)]
    struct SeenBy(Seen);

    /// Zero, with the gradient of a rounding.
    #[derive(Clone)]
    struct RoundedToZero;

    impl Recorded<Flex, 1> for RoundedToZero {
        type Saved = ();

        const STRAIGHT_THROUGH: bool = true;

        fn again(&mut self, _inputs: &[HeldTensor<Flex>; 1]) -> Option<Self> {
            Some(self.clone())
        }

        fn forward(self, [x]: [HeldTensor<Flex>; 1], _: [bool; 1]) -> (HeldTensor<Flex>, ()) {
            let zero = Flex::float_mul_scalar(x.into_value(), Scalar::from(0.0));
            (HeldTensor::new(zero), ())
        }

        fn backward(
            (): (),
            gradient: FloatTensor<Flex>,
            _: [bool; 1],
        ) -> [Option<FloatTensor<Flex>>; 1] {
            [Some(gradient)]
        }
    }

    fn parameter(dtype: DType, elements: usize) -> Tensor {
        let data = TensorData::new(vec![1f32; elements], [elements]);
        let x = Inside::float_from_data(data, &Default::default());
        Inside::float_set_require_grad(Inside::float_cast(x, dtype.into()), true)
    }

    /// A residual connection around an operation whose output three others read: what its backward pass saw, and the
    /// gradient of x.
    fn residual<const JOINS: bool>(dtype: DType, elements: usize) -> (Vec<(usize, bool)>, f32) {
        let (seen, [_, gradient]) = residual_around::<JOINS>(dtype, elements, |x| x);
        (seen, gradient)
    }

    /// The same around an operation that reads what `read` makes of x; and the sum of x and its output, an element.
    fn residual_around<const JOINS: bool>(
        dtype: DType,
        elements: usize,
        read: fn(Tensor) -> Tensor,
    ) -> (Vec<(usize, bool)>, [f32; 2]) {
        let seen = Seen::default();
        let x = parameter(dtype, elements);
        let y = B::record(Double::<JOINS>(seen.clone()), [read(x.clone())]);
        let [a, b, c] =
            [y.clone(), y.clone(), y].map(|y| B::record(Double::<false>(Seen::default()), [y]));
        let sum = Inside::float_add(Inside::float_add(a, b), c);
        let output = Inside::float_add(x.clone(), sum);
        let loss = Inside::float_sum(output.clone());
        let gradients = <Inside as burn_backend::AutodiffBackend>::backward(loss);
        let gradient = <Inside as burn_backend::AutodiffBackend>::grad(&x, &gradients);
        let gradient = gradient.expect("a gradient of x");
        let of_all = [output.primitive, gradient].map(|tensor| {
            let values = Flex::float_into_data(tensor.into_value());
            let values = burn_backend::read_sync(values).expect("a read");
            let values: Vec<f32> = values.iter().collect();
            assert!(values.iter().all(|value| *value == values[0]));
            values[0]
        });
        let seen = lock(&seen).clone();
        (seen, of_all)
    }

    #[test]
    fn what_is_read_straight_through_is_joined_as_it_is() {
        let read = |x| B::record(RoundedToZero, [x]);
        let (seen, values) = residual_around::<true>(DType::BF16, MIN_ELEMENTS, read);
        // Of ones, and of the zero that is read in their place.
        assert_eq!((seen, values), (vec![(3, true)], [1.0, 13.0]));
    }

    #[test]
    fn what_joins_gets_terms_and_the_residual() {
        // 1 around, and 2 * (2 + 2 + 2) through.
        let (seen, gradient) = residual::<true>(DType::BF16, MIN_ELEMENTS);
        assert_eq!((seen, gradient), (vec![(3, true)], 13.0));
    }

    #[test]
    fn others_get_terms_and_no_residual() {
        let (seen, gradient) = residual::<false>(DType::BF16, MIN_ELEMENTS);
        assert_eq!((seen, gradient), (vec![(3, false)], 13.0));
    }

    #[test]
    fn fp32_and_small_gradients_are_added_up_at_once() {
        for (dtype, elements) in [(DType::F32, MIN_ELEMENTS), (DType::BF16, MIN_ELEMENTS - 1)] {
            let (seen, gradient) = residual::<true>(dtype, elements);
            assert_eq!((seen, gradient), (vec![(1, true)], 13.0));
        }
    }
}
