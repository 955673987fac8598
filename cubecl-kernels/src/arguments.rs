//! The arguments of a kernel that is launched as a task of our own: CubeCL's launchers keep to themselves what they
//! collect.

use cubecl::{
    InfoBuilder, ScalarArgType,
    prelude::*,
    server::{Binding, KernelArguments},
    std::tensor::TensorHandle,
};

/// Arguments, added in the order of the kernel's parameters. What an addition returns is what the kernel is compiled
/// for, so that both can be written as one list.
#[derive(Default)]
pub(crate) struct Arguments {
    buffers: Vec<Binding>,
    info: InfoBuilder,
}

impl Arguments {
    /// Adds a tensor as an array of vectors of `width` elements.
    pub fn array<R: Runtime>(
        &mut self,
        tensor: &TensorHandle<R>,
        width: usize,
    ) -> ArrayCompilationArg {
        let buffer = tensor.handle.clone().binding();
        let vector_bytes = (tensor.dtype.size() * width) as u64;
        let len = tensor.shape().iter().product::<usize>() / width;
        self.info.metadata.register_array(
            buffer.size_in_used() / vector_bytes,
            len as u64,
            AddressType::U32,
        );
        self.buffers.push(buffer);
        ArrayCompilationArg { inplace: None }
    }

    /// An array that is the first one, to be written too.
    pub fn first_array() -> ArrayCompilationArg {
        ArrayCompilationArg { inplace: Some(0) }
    }

    /// Adds a number.
    pub fn scalar<S: ScalarArgType>(&mut self, scalar: S) {
        self.info.scalars.push(scalar);
    }

    /// All of them, for a kernel that indexes with 32 bits.
    pub fn finish(mut self) -> KernelArguments {
        KernelArguments::new()
            .with_buffers(self.buffers)
            .with_info(self.info.finish(AddressType::U32))
    }
}
