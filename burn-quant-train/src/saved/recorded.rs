//! Operations with a backward pass: one type for all of them, and one node of Burn's autodiff.

use std::{
    fmt::Debug,
    marker::PhantomData,
    sync::{Arc, Mutex},
};

use burn_autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::{
    AutodiffBackend, Backend,
    tensor::{Device, FloatTensor},
};

use super::{Cell, Held, HeldTensor, again::Again, cell::sum_of_terms, gradient_sum, scope};
use crate::{
    data::{
        DataBackend,
        composition::{OperatorInput, OutputGradient, with_other},
    },
    lock::lock,
};

/// An operation of `N` float tensors that has a backward pass.
///
/// Both passes are functions of tensors of a backend that holds data. `wanted` marks the inputs whose gradients are
/// asked for. The forward pass saves what those need: an input itself as the cell that
/// it is, which is compressed as the recipe says.
pub trait Recorded<B: DataBackend, const N: usize>: Clone + Send + Sync + 'static {
    /// The values that the forward pass leaves for the backward pass.
    type Saved: Clone + Debug + Send + 'static;

    /// The operation that does the same in the second run of a [block](super::checkpoint()), without being counted:
    /// what both draw is settled now. `None` if it cannot be done twice; its output then waits as without a block, and
    /// what it saved.
    fn again(&mut self, inputs: &[HeldTensor<B>; N]) -> Option<Self>;

    /// The output, and what the backward pass needs.
    fn forward(self, inputs: [HeldTensor<B>; N], wanted: [bool; N])
    -> (HeldTensor<B>, Self::Saved);

    /// The values that the forward pass leaves for the backward pass, where nobody reads its output, as of the last
    /// operation of a [block](super::checkpoint()) that runs again. An operation whose output is dear leaves that out.
    fn save(self, inputs: [HeldTensor<B>; N], wanted: [bool; N]) -> Self::Saved {
        self.forward(inputs, wanted).1
    }

    /// The gradients of those inputs for which they are wanted, from that of the output. An operation has this,
    /// [`Self::backward_joined`] or [`Self::backward_held`].
    fn backward(
        saved: Self::Saved,
        gradient: FloatTensor<B>,
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let terms = vec![OperatorInput::Floats(gradient)];
        Self::backward_joined(saved, (terms, None), wanted)
    }

    /// True if the gradient of the output is that of the first input, as of a rounding (a straight-through estimator).
    /// Outside of a [block](super::checkpoint()) the output then stands at the input's place in autodiff's graph, and
    /// whoever reads it gives that its gradient. Only operations that are recorded here may read it: Burn's own save
    /// values by their place, where two would be.
    const STRAIGHT_THROUGH: bool = false;

    /// True if the operation takes what else came to its first input, and adds it to that input's gradient.
    const JOINS: bool = false;

    /// The same where the gradient of the output comes in terms, and with that other gradient.
    fn backward_joined(
        saved: Self::Saved,
        (terms, other): OutputGradient<B>,
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let mut gradients = Self::backward(saved, sum_of_terms::<B>(terms), wanted);
        if let Some(first) = gradients.first_mut() {
            *first = first.take().map(|own| with_other::<B>(own, other));
        }
        gradients
    }

    /// The same of cells, where a gradient may be one that its reader computes. A node calls this one.
    fn backward_held(
        saved: Self::Saved,
        (gradient, other): (HeldTensor<B>, Option<HeldTensor<B>>),
        wanted: [bool; N],
    ) -> [Option<HeldTensor<B>>; N] {
        let gradient = (gradient.into_terms(), other.map(HeldTensor::into_value));
        let gradients = Self::backward_joined(saved, gradient, wanted);
        gradients.map(|gradient| gradient.map(HeldTensor::new))
    }
}

/// A backend that [`QuantTrain`](crate::QuantTrain) decorates: one that holds data, where nothing is recorded, or
/// `Autodiff` over one.
pub trait QuantBackend: Backend {
    /// The backend that holds the data.
    type Base: DataBackend<
            Device = Device<Self>,
            IntTensorPrimitive = Self::IntTensorPrimitive,
            BoolTensorPrimitive = Self::BoolTensorPrimitive,
        >;

    /// The backend that runs the operations: this one, or the same autodiff over [`Held`].
    type Inside: Backend<
            Device = Device<Self>,
            FloatElem = Self::FloatElem,
            IntElem = Self::IntElem,
            BoolElem = Self::BoolElem,
            IntTensorPrimitive = Self::IntTensorPrimitive,
            BoolTensorPrimitive = Self::BoolTensorPrimitive,
            QuantizedTensorPrimitive = Self::QuantizedTensorPrimitive,
        >;

    /// True if operations may be recorded.
    const RECORDS: bool;

    /// True if operations on this tensor are recorded.
    fn is_tracked(tensor: &FloatTensor<Self::Inside>) -> bool;

    /// True if both are one tensor: of one value, with one place in autodiff's graph.
    fn is_same(one: &FloatTensor<Self::Inside>, other: &FloatTensor<Self::Inside>) -> bool;

    /// The cell of a tensor, where there are cells.
    fn cell(tensor: &FloatTensor<Self::Inside>) -> Option<&Arc<Cell<Self::Base>>>;

    /// Keeps the operations that made a tensor in autodiff's graph as long as the result lives, but not its value.
    ///
    /// At the end of a backward pass of any thread Burn frees the operations of all graphs that no tensor holds. An
    /// operation that lets go of its input before it is in the graph itself loses the gradients behind it.
    fn hold(tensor: &FloatTensor<Self::Inside>) -> Option<Arc<NodeId>>;

    /// Runs an operation, and records it where one of its inputs is tracked.
    fn record<O: Recorded<Self::Base, N>, const N: usize>(
        operation: O,
        inputs: [FloatTensor<Self::Inside>; N],
    ) -> FloatTensor<Self::Inside>;
}

/// A float tensor of the backend that runs the operations.
pub(crate) type InsideTensor<B> = FloatTensor<<B as QuantBackend>::Inside>;

impl<B: DataBackend> QuantBackend for B {
    type Base = B;

    type Inside = B;

    const RECORDS: bool = false;

    fn is_tracked(_tensor: &FloatTensor<Self>) -> bool {
        false
    }

    /// Nothing is composed where nothing is recorded.
    fn is_same(_one: &FloatTensor<Self>, _other: &FloatTensor<Self>) -> bool {
        false
    }

    fn cell(_tensor: &FloatTensor<Self>) -> Option<&Arc<Cell<B>>> {
        None
    }

    fn hold(_tensor: &FloatTensor<Self>) -> Option<Arc<NodeId>> {
        None
    }

    fn record<O: Recorded<B, N>, const N: usize>(
        operation: O,
        inputs: [FloatTensor<Self>; N],
    ) -> FloatTensor<Self> {
        let (output, _) = operation.forward(inputs.map(HeldTensor::new), [false; N]);
        output.into_value()
    }
}

impl<B: DataBackend, C: CheckpointStrategy> QuantBackend for Autodiff<B, C> {
    type Base = B;

    type Inside = Autodiff<Held<B>, C>;

    const RECORDS: bool = true;

    fn is_tracked(tensor: &InsideTensor<Self>) -> bool {
        tensor.is_tracked()
    }

    fn is_same(one: &InsideTensor<Self>, other: &InsideTensor<Self>) -> bool {
        Arc::ptr_eq(&one.node, &other.node)
            && Arc::ptr_eq(one.primitive.cell(), other.primitive.cell())
    }

    fn cell(tensor: &InsideTensor<Self>) -> Option<&Arc<Cell<B>>> {
        Some(tensor.primitive.cell())
    }

    fn hold(tensor: &InsideTensor<Self>) -> Option<Arc<NodeId>> {
        Some(tensor.rc.clone())
    }

    fn record<O: Recorded<B, N>, const N: usize>(
        mut operation: O,
        inputs: [InsideTensor<Self>; N],
    ) -> InsideTensor<Self> {
        let wanted = inputs.each_ref().map(|input| input.is_tracked());
        let nodes = inputs.each_ref().map(|input| input.node.clone());
        // As `hold` has it.
        let held = inputs.each_ref().map(|input| input.rc.clone());
        let inputs = inputs.map(|input| input.primitive);
        let again = match scope::in_block() {
            true => operation.again(&inputs),
            false => None,
        };
        let (output, saved) = match again {
            None => {
                let (output, saved) = operation.forward(inputs, wanted);
                if O::STRAIGHT_THROUGH {
                    let mut output = Self::Inside::from_inner(output);
                    (output.node, output.rc) = (nodes[0].clone(), held[0].clone());
                    return output;
                }
                (output, Waiting::Saved(saved))
            }
            Some(again) => {
                let cells = inputs.each_ref().map(|input| input.cell().clone()).into();
                let second = Arc::new(SecondRun {
                    operation: again,
                    wanted,
                    inputs: Mutex::new(Some(inputs.clone())),
                    saved: Mutex::default(),
                });
                let (output, _) = operation.forward(inputs, wanted);
                let run = second.clone();
                let of_block = Again::of_block(cells, || {
                    move |values: Vec<FloatTensor<B>>| run.output(values).into_value()
                });
                (output.of_block(of_block), Waiting::Again(second))
            }
        };
        match Node::<O>(PhantomData)
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(saved, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

/// The state of a node for the backward pass.
enum Waiting<B: DataBackend, O: Recorded<B, N>, const N: usize> {
    /// The tensors that the forward pass saved.
    Saved(O::Saved),
    /// In a block, what the second run will save.
    Again(Arc<SecondRun<B, O, N>>),
}

impl<B: DataBackend, O: Recorded<B, N>, const N: usize> Waiting<B, O, N> {
    fn into_saved(self) -> O::Saved {
        match self {
            Self::Saved(saved) => saved,
            Self::Again(second) => {
                // There are inputs as long as nobody has asked for the output.
                let inputs = second.take_inputs();
                match inputs {
                    Some(inputs) => {
                        let values = inputs.map(|input| HeldTensor::new(input.into_value()));
                        second.operation.clone().save(values, second.wanted)
                    }
                    None => second.take_saved().expect("a run leaves what it saves"),
                }
            }
        }
    }
}

impl<B: DataBackend, O: Recorded<B, N>, const N: usize> Clone for Waiting<B, O, N> {
    fn clone(&self) -> Self {
        match self {
            Self::Saved(saved) => Self::Saved(saved.clone()),
            Self::Again(second) => Self::Again(second.clone()),
        }
    }
}

impl<B: DataBackend, O: Recorded<B, N>, const N: usize> Debug for Waiting<B, O, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Saved(saved) => saved.fmt(f),
            Self::Again(_) => f.write_str("Again"),
        }
    }
}

/// The second run of an operation in a block: whoever needs its output first has it run, and its node takes what it
/// saved.
struct SecondRun<B: DataBackend, O: Recorded<B, N>, const N: usize> {
    operation: O,
    wanted: [bool; N],
    /// The inputs that the node runs it on. None once it has run: the node then needs what that saved alone.
    inputs: Mutex<Option<[HeldTensor<B>; N]>>,
    saved: Mutex<Option<O::Saved>>,
}

impl<B: DataBackend, O: Recorded<B, N>, const N: usize> SecondRun<B, O, N> {
    fn output(&self, values: Vec<FloatTensor<B>>) -> HeldTensor<B> {
        let inputs: Vec<_> = values.into_iter().map(HeldTensor::new).collect();
        let inputs = inputs.try_into().expect("a value for each input");
        let (output, saved) = self.operation.clone().forward(inputs, self.wanted);
        *lock(&self.saved) = Some(saved);
        drop(self.take_inputs());
        output
    }

    fn take_inputs(&self) -> Option<[HeldTensor<B>; N]> {
        lock(&self.inputs).take()
    }

    fn take_saved(&self) -> Option<O::Saved> {
        lock(&self.saved).take()
    }
}

/// The node of a recorded operation.
struct Node<O>(PhantomData<fn() -> O>);

impl<O> Debug for Node<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(std::any::type_name::<O>())
    }
}

impl<B: DataBackend, O: Recorded<B, N>, const N: usize> Backward<Held<B>, N> for Node<O> {
    type State = Waiting<B, O, N>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = gradients.consume::<Held<B>>(&ops.node);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (gradient, other) = match &ops.parents[0] {
            Some(parent) if O::JOINS => {
                let mut of_node = Autodiff::<Held<B>>::from_inner(gradient);
                of_node.node = parent.clone();
                let mut other = gradients.remove::<Held<B>>(&of_node);
                // What is not alike is added up behind.
                if let Some(unlike) = other.take_if(|other| !other.is_like(&of_node.primitive)) {
                    gradients.register::<Held<B>>(parent.id, unlike);
                }
                (of_node.primitive, other)
            }
            _ => (gradient, None),
        };
        let of_inputs = O::backward_held(ops.state.into_saved(), (gradient, other), wanted);
        for (parent, gradient) in ops.parents.into_iter().zip(of_inputs) {
            if let Some((parent, gradient)) = parent.zip(gradient) {
                let mut of_node = Autodiff::<Held<B>>::from_inner(gradient);
                of_node.node = parent;
                gradient_sum::register(gradients, of_node);
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn_backend::{AutodiffBackend, Scalar, TensorData, ops::FloatTensorOps};
    use burn_flex::Flex;

    use super::*;
    use crate::saved::{MIN_COMPRESSED, checkpoint, scope::Scope};

    type B = Autodiff<Flex>;
    type Inside = <B as QuantBackend>::Inside;

    /// Doubles its input.
    #[derive(Clone)]
    struct Double {
        forward: Arc<AtomicUsize>,
        save: Arc<AtomicUsize>,
        /// Work that happens elsewhere while it runs.
        meanwhile: fn(),
    }

    impl Default for Double {
        fn default() -> Self {
            Self {
                forward: Arc::default(),
                save: Arc::default(),
                meanwhile: || {},
            }
        }
    }

    impl Double {
        /// How often its output was made, and how often only what it saves.
        fn runs(&self) -> [usize; 2] {
            [&self.forward, &self.save].map(|count| count.load(Ordering::Relaxed))
        }
    }

    impl Recorded<Flex, 1> for Double {
        type Saved = ();

        fn again(&mut self, _inputs: &[HeldTensor<Flex>; 1]) -> Option<Self> {
            Some(self.clone())
        }

        fn forward(self, [x]: [HeldTensor<Flex>; 1], _: [bool; 1]) -> (HeldTensor<Flex>, ()) {
            self.forward.fetch_add(1, Ordering::Relaxed);
            (self.meanwhile)();
            let y = Flex::float_mul_scalar(x.into_value(), Scalar::from(2.0));
            (HeldTensor::new(y), ())
        }

        fn save(self, _: [HeldTensor<Flex>; 1], _: [bool; 1]) {
            self.save.fetch_add(1, Ordering::Relaxed);
        }

        fn backward(
            (): (),
            gradient: FloatTensor<Flex>,
            _: [bool; 1],
        ) -> [Option<FloatTensor<Flex>>; 1] {
            [Some(Flex::float_mul_scalar(gradient, Scalar::from(2.0)))]
        }
    }

    fn parameter() -> InsideTensor<B> {
        let data = TensorData::new(vec![1f32; MIN_COMPRESSED], [MIN_COMPRESSED]);
        let x = Inside::float_from_data(data, &Default::default());
        Inside::float_set_require_grad(x, true)
    }

    fn assert_gradient(x: &InsideTensor<B>, gradients: &Gradients, expected: f32) {
        let gradient = Inside::grad(x, gradients).expect("a gradient of x");
        let values = burn_backend::read_sync(Flex::float_into_data(gradient.into_value()));
        let values = values.expect("a read").into_vec::<f32>();
        assert_eq!(values.expect("FP32"), vec![expected; MIN_COMPRESSED]);
    }

    /// The second step's graph has nothing that anyone holds while its second operation runs: not the parameter, which
    /// the first backward pass took out of it.
    #[test]
    fn a_backward_pass_of_another_thread_takes_no_gradient() {
        let elsewhere = || {
            let other = || {
                drop(Inside::backward(B::record(
                    Double::default(),
                    [parameter()],
                )))
            };
            std::thread::spawn(other).join().expect("a backward pass");
        };
        let x = parameter();
        drop(Inside::backward(B::record(Double::default(), [x.clone()])));
        let y = B::record(Double::default(), [x.clone()]);
        let during = Double {
            meanwhile: elsewhere,
            ..Double::default()
        };
        assert_gradient(&x, &Inside::backward(B::record(during, [y])), 4.0);
    }

    /// The second run makes again what others read, and nothing else.
    #[test]
    fn the_last_operation_of_a_block_makes_no_output_again() {
        let x = parameter();
        let (first, last) = (Double::default(), Double::default());
        let both = |x| {
            let _scope = Scope::enter(None);
            let y = B::record(first.clone(), [x]);
            B::record(last.clone(), [y])
        };
        let y = checkpoint(both, x.clone());
        assert_eq!([first.runs(), last.runs()], [[1, 0]; 2]);
        let gradients = Inside::backward(y);
        assert_eq!([first.runs(), last.runs()], [[2, 0], [1, 1]]);
        assert_gradient(&x, &gradients, 4.0);
    }
}
