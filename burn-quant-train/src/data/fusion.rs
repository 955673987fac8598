//! A fused stream: every operation is one custom operation of it, run by the backend under `Fusion`.
//!
//! Operations are functions of tensors, so the stream sees every dependency. A kernel that updates a buffer in place is
//! registered as the maker of the tensor that comes out.

use std::{fmt::Debug, sync::Arc};

use burn_backend::TensorMetadata;
use burn_fusion::{
    Fusion, FusionBackend, FusionTensor,
    stream::{Operation as StreamOperation, OperationStreams},
};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};

use super::{
    kernels::Kernels,
    operation::{DataBackend, Operation},
    tensors::{BoolMeta, Bundle, Change, FloatMeta, IntMeta, Meta, On, Outline},
};

type Tensor<B> = FusionTensor<<B as FusionBackend>::FusionRuntime>;
type Handles<B> = HandleContainer<<B as burn_ir::BackendIr>::Handle>;
type Execute<B> = dyn Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync;

impl<B: FusionBackend + Kernels> DataBackend for Fusion<B> {
    type Kernels = B;

    fn run<O: Operation>(operation: O, inputs: On<O::Inputs, Self>) -> On<O::Outputs, Self> {
        let outputs = operation.outline::<Self>(&inputs);
        let mut collected = Vec::new();
        let inputs = O::Inputs::rebuild(inputs, &mut Collect::<B>(&mut collected));
        let mut shapes = Vec::new();
        let form = O::Outputs::rebuild(outputs, &mut Note(&mut shapes));
        let client = collected
            .first()
            .expect("an operation has at least one input")
            .client
            .clone();

        let streams = OperationStreams::with_inputs(collected.iter());
        let inputs_ir: Vec<TensorIr> = collected.into_iter().map(FusionTensor::into_ir).collect();
        let outputs_ir: Vec<TensorIr> = shapes
            .into_iter()
            .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
            .collect();
        let ir = CustomOpIr::new(O::NAME, &inputs_ir, &outputs_ir);
        let execute = move |ir: &CustomOpIr, handles: &mut Handles<B>| {
            let mut take = Take::<B> {
                inputs: ir.inputs.iter(),
                handles,
            };
            let inputs = O::Inputs::rebuild::<Outline, B>(inputs.clone(), &mut take);
            let outputs = operation.clone().run::<B>(inputs);
            let mut give = Give::<B> {
                outputs: ir.outputs.iter(),
                handles,
            };
            O::Outputs::rebuild::<B, Outline>(outputs, &mut give);
        };
        let custom = Custom::<B> {
            ir: ir.clone(),
            execute: Arc::new(execute),
        };
        let made = client.register(streams, OperationIr::Custom(ir), custom);
        O::Outputs::rebuild::<Outline, Self>(form, &mut Hand::<B>(made.into_iter()))
    }
}

/// A custom operation of the stream and the function that runs it.
struct Custom<B: FusionBackend> {
    ir: CustomOpIr,
    execute: Arc<Execute<B>>,
}

impl<B: FusionBackend> Debug for Custom<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.ir.id)
    }
}

impl<B: FusionBackend> StreamOperation<B::FusionRuntime> for Custom<B> {
    fn execute(&self, handles: &mut Handles<B>) {
        (self.execute)(&self.ir, handles);
    }
}

/// Takes the tensors out of a value of the stream, one after the other.
struct Collect<'a, B: FusionBackend>(&'a mut Vec<Tensor<B>>);

impl<B: FusionBackend> Change<Fusion<B>, Outline> for Collect<'_, B> {
    fn float(&mut self, tensor: Tensor<B>) -> FloatMeta {
        let meta = Meta::of(&tensor);
        self.0.push(tensor);
        meta
    }

    fn int(&mut self, tensor: Tensor<B>) -> IntMeta {
        let meta = Meta::of(&tensor);
        self.0.push(tensor);
        meta
    }

    fn bool(&mut self, tensor: Tensor<B>) -> BoolMeta {
        let meta = Meta::of(&tensor);
        self.0.push(tensor);
        meta
    }
}

/// Notes the shapes and dtypes of an outline.
struct Note<'a>(&'a mut Vec<(burn_backend::Shape, burn_backend::DType)>);

impl Change<Outline, Outline> for Note<'_> {
    fn float(&mut self, meta: FloatMeta) -> FloatMeta {
        self.0.push((meta.shape(), meta.dtype()));
        meta
    }

    fn int(&mut self, meta: IntMeta) -> IntMeta {
        self.0.push((meta.shape(), meta.dtype()));
        meta
    }

    fn bool(&mut self, meta: BoolMeta) -> BoolMeta {
        self.0.push((meta.shape(), meta.dtype()));
        meta
    }
}

/// Hands out the tensors that the stream registered.
struct Hand<B: FusionBackend>(std::vec::IntoIter<Tensor<B>>);

impl<B: FusionBackend> Hand<B> {
    fn next(&mut self) -> Tensor<B> {
        self.0.next().expect(AS_REGISTERED)
    }
}

impl<B: FusionBackend> Change<Outline, Fusion<B>> for Hand<B> {
    fn float(&mut self, _meta: FloatMeta) -> Tensor<B> {
        self.next()
    }

    fn int(&mut self, _meta: IntMeta) -> Tensor<B> {
        self.next()
    }

    fn bool(&mut self, _meta: BoolMeta) -> Tensor<B> {
        self.next()
    }
}

/// Takes the tensors of the backend under the stream from its handles.
struct Take<'a, B: FusionBackend> {
    inputs: std::slice::Iter<'a, TensorIr>,
    handles: &'a mut Handles<B>,
}

impl<B: FusionBackend> Change<Outline, B> for Take<'_, B> {
    fn float(&mut self, _meta: FloatMeta) -> B::FloatTensorPrimitive {
        let input = self.inputs.next().expect(AS_REGISTERED);
        self.handles.get_float_tensor::<B>(input)
    }

    fn int(&mut self, _meta: IntMeta) -> B::IntTensorPrimitive {
        let input = self.inputs.next().expect(AS_REGISTERED);
        self.handles.get_int_tensor::<B>(input)
    }

    fn bool(&mut self, _meta: BoolMeta) -> B::BoolTensorPrimitive {
        let input = self.inputs.next().expect(AS_REGISTERED);
        self.handles.get_bool_tensor::<B>(input)
    }
}

/// Gives tensors of the backend under the stream to its handles.
struct Give<'a, B: FusionBackend> {
    outputs: std::slice::Iter<'a, TensorIr>,
    handles: &'a mut Handles<B>,
}

impl<B: FusionBackend> Change<B, Outline> for Give<'_, B> {
    fn float(&mut self, tensor: B::FloatTensorPrimitive) -> FloatMeta {
        let meta = Meta::of(&tensor);
        let output = self.outputs.next().expect(AS_REGISTERED);
        self.handles.register_float_tensor::<B>(&output.id, tensor);
        meta
    }

    fn int(&mut self, tensor: B::IntTensorPrimitive) -> IntMeta {
        let meta = Meta::of(&tensor);
        let output = self.outputs.next().expect(AS_REGISTERED);
        self.handles.register_int_tensor::<B>(&output.id, tensor);
        meta
    }

    fn bool(&mut self, tensor: B::BoolTensorPrimitive) -> BoolMeta {
        let meta = Meta::of(&tensor);
        let output = self.outputs.next().expect(AS_REGISTERED);
        self.handles.register_bool_tensor::<B>(&output.id, tensor);
        meta
    }
}

const AS_REGISTERED: &str = "an operation has the tensors that it was registered with";
