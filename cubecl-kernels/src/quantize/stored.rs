//! The copies of a tile's codes, in the storage of their number.
//!
//! A unit packs its run into words and writes them to the row-major copy. For the transposed copy all codes pass
//! through a shared tile, and a unit takes a run of 16 rows of a column from there. The rows of the shared tile are one
//! word longer than a multiple of 16, so that units that read neighbouring columns do not meet in one bank.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{MatrixGeometry, array, or_unused},
    error::KernelError,
    layout::Layout,
    number::storage::{RUN, Storage, pack_run},
    shape::MatrixShape,
};

use super::{
    QuantizeSpec, Quantized,
    staged::{byte_dtype, byte_width, write_words},
    tile::{Tile, TilePosition, UNITS},
};

/// How copies are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Copies {
    pub storage: Storage,
    pub layout: Layout,
    /// Bytes written at once to the row-major and to the transposed copy.
    pub row_major_width: usize,
    pub transposed_width: usize,
}

impl Copies {
    pub fn new(storage: Storage, layout: Layout, shape: MatrixShape) -> Self {
        let run_bytes = storage.run_words() * 4;
        // Runs of 20 bytes start at multiples of 4.
        let most = if run_bytes % 8 == 0 { run_bytes } else { 4 };
        // A copy that is not written must not tell kernels apart.
        let width = |is_written, codes| match is_written {
            true => byte_width(storage.stored_bytes(codes), most),
            false => most,
        };
        Self {
            storage,
            layout,
            row_major_width: width(layout.row_major(), shape.cols),
            transposed_width: width(layout.transposed(), shape.rows),
        }
    }

    /// Elements of the vectors that are written at once, words or single bytes, and their types.
    pub fn vectors(&self) -> [(usize, StorageType); 2] {
        [self.row_major_width, self.transposed_width]
            .map(|width| (width.div_ceil(4), byte_dtype(width)))
    }

    /// Words of the shared tile behind the transposed copy.
    fn shared_words(&self, tile: Tile) -> usize {
        if self.layout.transposed() {
            tile.rows * (tile.cols + 1)
        } else {
            1
        }
    }
}

/// The row-major and the transposed copy as launch arguments; `x` stands in for one that is not written.
pub(super) fn copy_args<R: Runtime>(
    output: &Quantized<R>,
    x: &TensorHandle<R>,
) -> [ArrayArg<R>; 2] {
    let dtype = output.number.storage().dtype();
    [&output.values, &output.transposed].map(|copy| array(or_unused(copy.as_ref(), x, dtype)))
}

/// Accepts matrices whose copies 32 bits index by the byte.
pub(super) fn check_size(
    operation: &'static str,
    spec: &QuantizeSpec,
    shape: MatrixShape,
) -> Result<(), KernelError> {
    let bytes = |shape: MatrixShape| {
        shape.batch * shape.rows * spec.number.storage().stored_bytes(shape.cols)
    };
    let row_major = spec.layout.row_major().then(|| bytes(shape));
    let transposed = spec.layout.transposed().then(|| bytes(shape.transposed()));
    if row_major.max(transposed) <= Some(u32::MAX as usize) {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation,
        got: format!("{shape:?}, stored in {row_major:?} and transposed in {transposed:?} bytes"),
        remedy: "split it: kernels index with 32 bits, at most 2^32 - 1 bytes",
    })
}

/// Bytes of a stored row.
#[cube]
fn stored_bytes(codes: u32, #[comptime] storage: Storage) -> u32 {
    match comptime!(storage) {
        Storage::SignedBytes | Storage::Bytes => codes,
        Storage::Nibbles => codes.div_ceil(2u32),
        Storage::TenBits => {
            codes.div_ceil(comptime!(RUN as u32)) * comptime!(storage.run_words() as u32 * 4)
        }
    }
}

/// Writes the codes of a tile, one run from each unit, of which `tile_row` and `tile_col` are the place in the tile.
/// All units of the cube must call it together. A code outside the matrix must be 0.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn write_copies<V: Numeric, NV: Size, T: Numeric, NT: Size>(
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    codes: &Array<u32>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    tile_row: u32,
    tile_col: u32,
    #[comptime] tile: Tile,
    #[comptime] copies: Copies,
) {
    if comptime!(copies.layout.row_major()) {
        let row = position.row + tile_row;
        if row < geometry.rows {
            write_run::<V, NV>(
                values,
                codes,
                position.batch * geometry.rows + row,
                position.col + tile_col,
                geometry.cols,
                comptime!(copies.storage),
                comptime!(copies.row_major_width),
            );
        }
    }
    if comptime!(copies.layout.transposed()) {
        comptime!(assert!(
            tile.rows * tile.cols == UNITS * RUN && tile.rows % RUN == 0,
            "a tile of runs of 16 rows"
        ));
        let mut shared = SharedMemory::<u32>::new(comptime!(copies.shared_words(tile)));
        let pitch = comptime!(tile.cols as u32 + 1);
        #[unroll]
        for index in 0..comptime!(RUN as u32) {
            shared[(tile_row * pitch + tile_col + index) as usize] = codes[index as usize];
        }
        sync_cube();
        let runs_of_col = comptime!((tile.rows / RUN) as u32);
        let tile_col = UNIT_POS / runs_of_col;
        let tile_row = UNIT_POS % runs_of_col * comptime!(RUN as u32);
        let mut codes = Array::<u32>::new(RUN);
        #[unroll]
        for index in 0..comptime!(RUN as u32) {
            codes[index as usize] = shared[((tile_row + index) * pitch + tile_col) as usize];
        }
        let col = position.col + tile_col;
        if col < geometry.cols {
            write_run::<T, NT>(
                transposed,
                &codes,
                position.batch * geometry.cols + col,
                position.row + tile_row,
                geometry.rows,
                comptime!(copies.storage),
                comptime!(copies.transposed_width),
            );
        }
    }
}

/// Writes a run to the `row`-th of stored rows of `cols` codes, from column `col`, what of it lies inside.
#[cube]
pub(super) fn write_run<V: Numeric, N: Size>(
    out: &mut Array<Vector<V, N>>,
    codes: &Array<u32>,
    row: u32,
    col: u32,
    cols: u32,
    #[comptime] storage: Storage,
    #[comptime] width: usize,
) {
    let row_bytes = stored_bytes(cols, storage);
    let run_bytes = comptime!(storage.run_words() as u32 * 4);
    write_words::<V, N>(
        out,
        &pack_run(codes, storage),
        row * row_bytes,
        col / comptime!(RUN as u32) * run_bytes,
        row_bytes,
        comptime!(storage.run_words()),
        width,
        false,
    );
}
