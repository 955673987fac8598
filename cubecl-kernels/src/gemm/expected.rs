//! The products of a model's linear layers, which are known before the first of them is launched.

use cubecl::{ir::StorageType, prelude::*};

use crate::{compile_ahead, device::is_hopper, number::Number};

use super::hopper::{self, fp8::Accumulation};

/// How X and W of Y = X W are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerOperands {
    /// INT8 in square blocks.
    Int8Blocks {
        /// Rows and columns of a block: 32, 64 or 128.
        side: usize,
        /// True where X has residuals: in Y = X W, and in dW = Xᵀ dY.
        fallback: [bool; 2],
    },
    /// INT8 with scales over all of K.
    Int8Rows,
    /// E4M3 with a scale for each matrix.
    E4M3 {
        /// That of X W.
        accumulation: Accumulation,
        /// That of both gradients' products.
        of_gradients: Accumulation,
        /// E4M3 or E5M2: what dY is in, in the same way.
        gradient: Number,
    },
    /// As they are.
    Floats,
}

/// A linear layer whose products a program is going to launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpectedLayer {
    /// Rows of X.
    pub rows: usize,
    /// Columns of X.
    pub inputs: usize,
    /// Columns of Y.
    pub outputs: usize,
    /// How both are multiplied.
    pub operands: LayerOperands,
    /// f16 or bf16: of Y, and of X and W where they are floats.
    pub dtype: StorageType,
}

/// Has the kernels of these layers' products compiled ahead, Y = X W of all of them first, then dX and dW, while a
/// [`CompileAhead`](crate::compile_ahead::CompileAhead) lives.
///
/// Without one, and on devices without such kernels, it does nothing; sizes that come otherwise cost no more than the
/// time of the compiler.
pub fn expect_layers<R: Runtime>(client: &ComputeClient<R>, layers: &[ExpectedLayer]) {
    if !is_hopper(client) {
        return;
    }
    compile_ahead::expect::<R>(|| {
        let texts = layers.iter().map(|layer| hopper::expected(client, layer));
        let (forward, gradients): (Vec<_>, Vec<_>) = texts.unzip();
        forward
            .into_iter()
            .chain(gradients.into_iter().flatten())
            .collect()
    });
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
