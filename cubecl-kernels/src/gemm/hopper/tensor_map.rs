//! The descriptions of matrices that the tensor memory accelerator (TMA) copies tiles by.

use cubecl::{
    prelude::*,
    server::{TensorMapBinding, TensorMapMeta},
    std::tensor::TensorHandle,
    zspace::{metadata::Metadata, shape, strides},
};

/// Strides of TMA, except that of neighbours, are multiples of so many bytes.
pub(in crate::gemm) const STRIDE_BYTES: usize = 16;

/// Matrices whose columns are neighbours in memory, and the boxes that are copied at once.
pub(super) struct TmaView {
    /// Matrices, rows, columns.
    pub shape: [usize; 3],
    /// Elements from a matrix to the next (of no matter for one matrix) and from a row to the next, multiples of
    /// [`STRIDE_BYTES`] and not 0.
    pub strides: [usize; 2],
    /// Rows and columns of a box, at most 256 rows and 128 bytes of columns.
    pub tile: [usize; 2],
}

impl TmaView {
    /// The tensor map of `values`, for swizzled rows of 128 bytes. What lies outside a matrix is read as 0.
    pub fn bind<R: Runtime>(&self, values: &TensorHandle<R>) -> TensorMapBinding {
        let [batch, rows, cols] = self.shape;
        let row_stride = self.strides[1];
        let batch_stride = if batch == 1 {
            rows * row_stride
        } else {
            self.strides[0]
        };
        TensorMapBinding {
            binding: values.clone().handle.binding(),
            map: TensorMapMeta {
                format: TensorMapFormat::Tiled(TiledArgs {
                    tile_size: shape![1, self.tile[0], self.tile[1]],
                }),
                metadata: Metadata::new(
                    shape![batch, rows, cols],
                    strides![batch_stride, row_stride, 1],
                ),
                elem_stride: strides![1; 3],
                interleave: TensorMapInterleave::None,
                swizzle: TensorMapSwizzle::B128,
                prefetch: TensorMapPrefetch::B256,
                oob_fill: OobFill::Zero,
                storage_ty: values.dtype,
            },
        }
    }
}
