//! The matrix that is quantized: floats, or what a kernel computes in the launch that quantizes it.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixView, check_float},
    error::KernelError,
    operator_input::check_alike,
    swiglu::{block::Contexts, swiglu, swiglu_compressing},
};

use super::QuantizeSpec;

/// A matrix, or what it is computed from.
///
/// A value that only quantizers read need not go through memory: written in 16 bits and read again, it costs more than
/// all that is read for it.
#[derive(Debug)]
pub enum MatrixSource<'a, R: Runtime> {
    /// The matrix, of any strides.
    Floats(&'a TensorHandle<R>),
    /// `silu(gate) up`, as [`swiglu`](crate::swiglu::swiglu()) computes it, of contiguous matrices of one shape and
    /// type.
    Swiglu {
        /// The gate.
        gate: &'a TensorHandle<R>,
        /// What it lets through.
        up: &'a TensorHandle<R>,
        /// How both wait for the backward pass, as [`swiglu_compressing`] takes it: a quantizer that can writes these
        /// copies too.
        contexts: Option<QuantizeSpec>,
    },
}

impl<R: Runtime> Clone for MatrixSource<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for MatrixSource<'_, R> {}

impl<'a, R: Runtime> From<&'a TensorHandle<R>> for MatrixSource<'a, R> {
    fn from(matrix: &'a TensorHandle<R>) -> Self {
        Self::Floats(matrix)
    }
}

impl<'a, R: Runtime> MatrixSource<'a, R> {
    /// The matrix that a launch would read, of its shape and type.
    pub(crate) fn view(
        &self,
        client: &ComputeClient<R>,
        operation: &'static str,
    ) -> Result<MatrixView, KernelError> {
        let matrix = match self {
            Self::Floats(matrix) => matrix,
            Self::Swiglu { gate, up, .. } => {
                let inputs = [("gate", (*gate).into()), ("up", (*up).into())];
                check_alike(client, operation, &inputs)?;
                gate
            }
        };
        check_float(client, operation, "x", matrix.dtype)?;
        MatrixView::new(operation, matrix)
    }

    /// The matrix, in memory.
    pub(crate) fn floats(&self, client: &ComputeClient<R>) -> Result<TensorHandle<R>, KernelError> {
        match *self {
            Self::Floats(matrix) => Ok(matrix.clone()),
            Self::Swiglu { gate, up, .. } => swiglu(client, gate, up),
        }
    }

    /// The same, and the copies that were asked for.
    pub(crate) fn floats_and_contexts(
        &self,
        client: &ComputeClient<R>,
    ) -> Result<(TensorHandle<R>, Contexts<R>), KernelError> {
        match *self {
            Self::Swiglu {
                gate,
                up,
                contexts: Some(spec),
            } => {
                let (x, copies) = swiglu_compressing(client, gate, up, &spec)?;
                Ok((x, Some(copies)))
            }
            _ => Ok((self.floats(client)?, None)),
        }
    }
}
