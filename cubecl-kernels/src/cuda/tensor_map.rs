//! The descriptions of matrices that the tensor memory accelerator (TMA) copies tiles by.

use cubecl::{
    prelude::*,
    server::{TensorMapBinding, TensorMapMeta},
    std::tensor::TensorHandle,
    zspace::metadata::Metadata,
};

/// Strides of TMA, except that of neighbours, are multiples of so many bytes.
pub(crate) const STRIDE_BYTES: usize = 16;

/// Matrices whose columns are neighbours in memory, and the boxes that are copied at once.
pub(crate) struct TmaView<const RANK: usize> {
    /// Batch dimensions, rows, columns.
    pub shape: [usize; RANK],
    /// Elements from one to the next: multiples of [`STRIDE_BYTES`] and not 0, for columns 1. Where there is one only
    /// in a batch dimension, its stride is of no matter.
    pub strides: [usize; RANK],
    /// Rows and columns of a box, at most 256 rows and 128 bytes of columns.
    pub tile: [usize; 2],
}

impl<const RANK: usize> TmaView<RANK> {
    /// The tensor map of `values`, for swizzled rows of 128 bytes. What lies outside a matrix is read as 0.
    pub fn bind<R: Runtime>(&self, values: &TensorHandle<R>) -> TensorMapBinding {
        let (shape, mut strides) = (self.shape, self.strides);
        let rows = RANK - 2;
        for dim in 0..rows {
            if shape[dim] == 1 {
                strides[dim] = shape[rows] * strides[rows];
            }
        }
        let mut tile = [1; RANK];
        tile[rows..].copy_from_slice(&self.tile);
        TensorMapBinding {
            binding: values.clone().handle.binding(),
            map: TensorMapMeta {
                format: TensorMapFormat::Tiled(TiledArgs {
                    tile_size: tile.into(),
                }),
                metadata: Metadata::new(shape, strides),
                elem_stride: [1; RANK].into(),
                interleave: TensorMapInterleave::None,
                swizzle: TensorMapSwizzle::B128,
                prefetch: TensorMapPrefetch::B256,
                oob_fill: OobFill::Zero,
                storage_ty: values.dtype,
            },
        }
    }
}
