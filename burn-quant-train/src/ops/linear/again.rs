//! The copy of X that the backward pass makes of what waits anyway: see [`Rematerialized`].

use std::sync::{Arc, Mutex};

use crate::{
    data::{
        DataBackend, Kernels, Operation,
        quantize::{MatrixSource, Quantized},
        tensors::{On, Outline, Tensors, flattened},
    },
    lock::lock,
    ops::operand::Make,
    saved::rematerialized::Rematerialized,
};

/// A copy of X for all layers that read X: the first of them makes it.
#[derive(Debug)]
pub(crate) struct CopyAgain<B: DataBackend> {
    make: Make,
    of: Rematerialized<B>,
    made: Mutex<Option<Arc<Quantized<B>>>>,
}

impl<B: DataBackend> CopyAgain<B> {
    pub(super) fn new(make: Make, of: Rematerialized<B>) -> Self {
        Self {
            make,
            of,
            made: Mutex::default(),
        }
    }

    /// The copy.
    pub fn copy(&self) -> Arc<Quantized<B>> {
        let make = || {
            let make = MakeCopy { make: self.make };
            Arc::new(B::run(make, self.of.source()))
        };
        lock(&self.made).get_or_insert_with(make).clone()
    }
}

/// The quantization of a matrix, or of what it is computed from.
#[derive(Debug, Clone)]
struct MakeCopy {
    make: Make,
}

impl Operation for MakeCopy {
    const NAME: &'static str = "linear_input_again";
    type Inputs = MatrixSource<Outline>;
    type Outputs = Quantized<Outline>;

    fn outline<T: Tensors>(&self, source: &On<Self::Inputs, T>) -> Quantized<Outline> {
        let layout = self.make.factor.key.layout;
        self.make.outline(flattened(&source.shape()), layout)
    }

    fn run<K: Kernels>(self, source: MatrixSource<K>) -> Quantized<K> {
        let layout = self.make.factor.key.layout;
        self.make.copy_of(source.flattened(), layout, None)
    }
}
