//! Heads in memory, as the kernels of CubeCL read them.

use cubecl::{prelude::*, std::tensor::TensorHandle};

/// Elements from one to the next of a tensor of four dimensions; 0 along those that it is broadcast along.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Strides4 {
    pub batch: u32,
    pub head: u32,
    pub row: u32,
    pub col: u32,
}

impl Strides4 {
    /// Those of a tensor of four dimensions.
    pub(super) fn of<R: Runtime>(tensor: &TensorHandle<R>) -> Strides4Launch<R> {
        let [batch, head, row, col] = Self::steps(tensor);
        Strides4Launch::new(batch, head, row, col)
    }

    /// The strides of a tensor of four dimensions; nothing steps along a dimension of one.
    pub(super) fn steps<R: Runtime>(tensor: &TensorHandle<R>) -> [u32; 4] {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        [0, 1, 2, 3].map(|dim| match shape[dim] {
            1 => 0,
            _ => strides[dim] as u32,
        })
    }
}

/// The rows of a head.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Head {
    pub start: u32,
    pub rows: u32,
    pub width: u32,
    pub row_stride: u32,
    pub col_stride: u32,
}

/// Head `head` of a batch, of so many rows and features.
#[cube]
pub(super) fn head_of(strides: &Strides4, batch: u32, head: u32, rows: u32, width: u32) -> Head {
    Head {
        start: batch * strides.batch + head * strides.head,
        rows,
        width,
        row_stride: strides.row,
        col_stride: strides.col,
    }
}
