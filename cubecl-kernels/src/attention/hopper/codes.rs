//! INT8 codes of heads, in the layouts that `forward_int8.cu` multiplies.

use cubecl::{ir::StorageType, prelude::*, server::TensorMapBinding, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, launch_source},
        tensor_map::{STRIDE_BYTES, TmaView},
    },
    device::{empty, storage},
};

use super::super::products::KEYS_OF_SCALE;

/// Bytes of a row of codes in shared memory.
pub(super) const ROW_BYTES: usize = 128;
const UNITS: u32 = 256;

/// Which codes share a scale, and how they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Order {
    /// Those of a row, which lies along the columns.
    Rows,
    /// Those of a tile of rows, which lie along the columns.
    Tiles,
    /// Those of a tile of rows: whole tiles, and rows along the lines.
    Transposed,
}

/// The codes of a tensor `[batch, heads, rows, features]` that the kernels read as it lies in memory.
pub(super) struct Codes<R: Runtime> {
    /// i8 `[batch, heads, rows, pitch]`, or `[batch, heads, features, pitch]` with the rows of each tile in the order of
    /// wgmma's registers.
    pub values: TensorHandle<R>,
    /// f32 `[batch, heads, rows]` or `[batch, heads, tiles]`.
    pub scales: TensorHandle<R>,
    /// Columns with codes.
    cols: usize,
}

impl<R: Runtime> Codes<R> {
    /// Of a tensor in an order.
    pub fn new(client: &ComputeClient<R>, x: &TensorHandle<R>, order: Order) -> Self {
        let (shape, strides) = (x.shape(), x.strides());
        let [batch, heads, rows, width] = [0, 1, 2, 3].map(|dim| shape[dim]);
        let tiles = rows.div_ceil(KEYS_OF_SCALE);
        let whole = tiles * KEYS_OF_SCALE;
        let [lines, cols, pitch] = match order {
            Order::Transposed => [width, whole, whole],
            Order::Rows | Order::Tiles => [rows, width, width.next_multiple_of(STRIDE_BYTES)],
        };
        let of_scales = match order {
            Order::Rows => rows,
            Order::Tiles | Order::Transposed => tiles,
        };
        let codes = Self {
            values: empty(client, vec![batch, heads, lines, pitch], storage::<i8>()),
            scales: empty(client, vec![batch, heads, of_scales], storage::<f32>()),
            cols,
        };
        let numbers = CodesNumbers {
            rows: rows as u64,
            width: width as u64,
            pitch: pitch as u64,
            of_batch: strides[0] as u64,
            of_head: strides[1] as u64,
            of_row: strides[2] as u64,
        };
        let source = Source {
            dtype: x.dtype,
            order,
        };
        let buffers = vec![x.clone(), codes.values.clone(), codes.scales.clone()];
        let cubes = CubeCount::Static(tiles as u32, heads as u32, batch as u32);
        // SAFETY: the caller has checked how `x` lies in memory; the outputs were allocated for it, and the kernel
        // guards rows and features.
        #[allow(unsafe_code)]
        unsafe {
            launch_source(client, source, cubes, vec![], buffers, &numbers);
        }
        codes
    }

    /// Boxes of `rows` rows.
    pub fn map(&self, rows: usize) -> TensorMapBinding {
        let shape = self.values.shape();
        let [batch, heads, lines, pitch] = [0, 1, 2, 3].map(|dim| shape[dim]);
        TmaView {
            shape: [batch, heads, lines, self.cols],
            strides: [heads * lines * pitch, lines * pitch, pitch, 1],
            tile: [rows, ROW_BYTES],
        }
        .bind(&self.values)
    }
}

numbers! {
    struct CodesNumbers {
        rows: u64,
        width: u64,
        /// Bytes from a row of codes to the next.
        pitch: u64,
        /// Elements from one to the next of what is read.
        of_batch: u64,
        of_head: u64,
        of_row: u64,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Source {
    dtype: StorageType,
    order: Order,
}

impl CudaSource for Source {
    type Numbers = CodesNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../../quantize/block/scale.cu"),
        include_str!("codes.cu")
    );
    const ENTRY_POINT: &'static str = "attention_codes_hopper";

    fn units(&self) -> u32 {
        UNITS
    }

    fn knobs(&self) -> String {
        format!(
            "#define OF_BF16 {}\n#define OF_ROWS {}\n#define TRANSPOSED {}",
            u8::from(self.dtype == storage::<half::bf16>()),
            u8::from(self.order == Order::Rows),
            u8::from(self.order == Order::Transposed),
        )
    }
}
