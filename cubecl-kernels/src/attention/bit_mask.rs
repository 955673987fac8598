//! A mask as bits, 32 scores a word, as the Hopper kernels read it: a warp then has a tile's mask in a few words.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, cube_grid, empty, storage},
    error::KernelError,
};

use super::{
    AttentionShape,
    heads::{Strides4, Strides4Launch},
};

const UNITS: usize = 256;
/// Scores of a word.
const BITS: usize = 32;
/// Rows and columns of the largest tile.
const TILE: usize = 128;

/// The axis of the scores that the bits of a word lie along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Along {
    Keys,
    Queries,
}

/// The bits of a mask: 1 where a key is hidden from a query, and 0 behind the last of a row.
#[derive(Debug, Clone)]
pub(super) struct BitMask<R: Runtime> {
    /// u32 `[batch, heads, rows, words]`, contiguous, whole tiles. Rows are the axis that the bits do not lie along;
    /// what is behind the last of them is not written. Batch, heads and rows are 1 where the mask does not change along
    /// them.
    pub words: TensorHandle<R>,
}

impl<R: Runtime> BitMask<R> {
    /// Of a mask in `u8` or `u32` that 32 bits index, each of whose dimensions is that of the scores, or 1.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where 32 bits do not index the words, as of a mask of queries alone it may be.
    pub(super) fn new(
        operation: &'static str,
        client: &ComputeClient<R>,
        mask: &TensorHandle<R>,
        shape: &AttentionShape,
        along: Along,
    ) -> Result<Self, KernelError> {
        let strides = Strides4::steps(mask);
        // A mask that was expanded has one row in memory for all of them, and so have its bits.
        let [batch, heads, queries, keys] = [0, 1, 2, 3].map(|dim| match strides[dim] {
            0 => 1,
            _ => mask.shape()[dim],
        });
        let ([row_stride, col_stride], rows, cols) = match along {
            Along::Keys => ([strides[2], strides[3]], queries, shape.keys),
            Along::Queries => ([strides[3], strides[2]], keys, shape.queries),
        };
        let row_words = cols.next_multiple_of(TILE) / BITS;
        let tiled_rows = if rows == 1 {
            1
        } else {
            rows.next_multiple_of(TILE)
        };
        let extents = [batch, heads, tiled_rows, row_words];
        if u32::try_from(extents.iter().product::<usize>()).is_err() {
            return Err(KernelError::Unsupported {
                operation,
                reason: format!("a mask {:?} of scores {:?}", mask.shape(), shape.scores()),
                remedy: "split the batch: kernels index with 32 bits",
            });
        }
        let words = empty(client, extents.to_vec(), storage::<u32>());
        let count = batch * heads * rows * row_words;
        // SAFETY: units write inside of `words`, whose shape the numbers are, and read where the mask has an element.
        #[allow(unsafe_code)]
        unsafe {
            attention_bit_mask_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                array(mask.clone()),
                array(words.clone()),
                SizesLaunch::new(
                    count as u32,
                    heads as u32,
                    rows as u32,
                    tiled_rows as u32,
                    row_words as u32,
                    cols as u32,
                ),
                Strides4Launch::new(strides[0], strides[1], row_stride, col_stride),
                along,
                mask.dtype,
            );
        }
        Ok(Self { words })
    }

    /// Words from a batch, a head and a row to the next.
    pub(super) fn strides(&self) -> [u64; 3] {
        let strides = Strides4::steps(&self.words);
        [strides[0], strides[1], strides[2]].map(u64::from)
    }
}

/// The extents of the words, and the scores of a row.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Words that are written.
    count: u32,
    heads: u32,
    rows: u32,
    /// Rows with those that are not written.
    tiled_rows: u32,
    row_words: u32,
    cols: u32,
}

#[cube(launch_unchecked)]
fn attention_bit_mask_kernel<M: Numeric>(
    mask: &Array<M>,
    words: &mut Array<u32>,
    sizes: Sizes,
    strides: Strides4,
    #[comptime] along: Along,
    #[define(M)] _dtype: StorageType,
) {
    let unit = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if unit < sizes.count {
        let of_head = unit % (sizes.rows * sizes.row_words);
        let head = unit / (sizes.rows * sizes.row_words);
        // Units side by side read side by side: along a row of the mask, or along its columns.
        let (row, word) = if comptime!(along == Along::Keys) {
            (of_head / sizes.row_words, of_head % sizes.row_words)
        } else {
            (of_head % sizes.rows, of_head / sizes.rows)
        };
        let start = head / sizes.heads * strides.batch
            + head % sizes.heads * strides.head
            + row * strides.row;
        let first = word * comptime!(BITS as u32);
        let end = min(first + comptime!(BITS as u32), sizes.cols);
        let mut bits = 0u32;
        for col in first..max(first, end) {
            let hidden = u32::cast_from(mask[(start + col * strides.col) as usize]) != 0u32;
            bits |= select(hidden, 1u32 << (col - first), 0u32);
        }
        words[((head * sizes.tiled_rows + row) * sizes.row_words + word) as usize] = bits;
    }
}

#[cfg(all(test, feature = "vulkan"))]
mod tests {
    use std::hash::{BuildHasher, RandomState};

    use cubecl::wgpu::WgpuRuntime;

    use super::*;

    /// Masks with every choice of dimensions of their own, over rows of words that are full and that are not; each as it
    /// is, with queries and keys turned in memory, and expanded to all scores.
    #[test]
    fn each_bit_is_that_of_its_score() {
        let client = WgpuRuntime::client(&Default::default());
        let random = RandomState::new();
        let shape = AttentionShape {
            batch: 2,
            heads: 3,
            kv_heads: 3,
            queries: 131,
            keys: 256,
            width: 8,
            value_width: 8,
        };
        let scores = shape.scores();
        for own in 0..16 {
            let dims = [0, 1, 2, 3].map(|dim| if own >> dim & 1 == 1 { scores[dim] } else { 1 });
            let count = dims.iter().product::<usize>();
            let flags: Vec<u32> = (0..count)
                .map(|at| random.hash_one((own, at)) as u32 % 3)
                .collect();
            let contiguous = [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1];
            let turned = [contiguous[0], contiguous[1], 1, dims[2]];
            let expanded = [0, 1, 2, 3].map(|dim| contiguous[dim] * usize::from(dims[dim] > 1));
            let layouts = [(dims, contiguous), (dims, turned), (scores, expanded)];
            let handle = client.create_from_slice(bytemuck::cast_slice(&flags));
            for ((extents, strides), along) in layouts
                .iter()
                .flat_map(|&layout| [Along::Keys, Along::Queries].map(|along| (layout, along)))
            {
                let mask = TensorHandle::<WgpuRuntime>::new(
                    handle.clone(),
                    extents.to_vec(),
                    strides.to_vec(),
                    storage::<u32>(),
                );
                let bits =
                    BitMask::new("attention", &client, &mask, &shape, along).expect("few words");
                let words = client.read_one(bits.words.handle.clone());
                let words = words.expect("a readable buffer");
                let words: &[u32] = bytemuck::cast_slice(&words);
                let [of_batch, of_head, of_row] = bits.strides().map(|stride| stride as usize);
                let bit = |batch, head, row, col| {
                    let word = batch * of_batch + head * of_head + row * of_row + col / BITS;
                    words[word] >> (col % BITS) & 1 == 1
                };
                let [rows, cols] = match along {
                    Along::Keys => [scores[2], scores[3]],
                    Along::Queries => [scores[3], scores[2]],
                };
                for (batch, head) in (0..2).flat_map(|batch| (0..3).map(move |head| (batch, head)))
                {
                    for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)))
                    {
                        let score = match along {
                            Along::Keys => [batch, head, row, col],
                            Along::Queries => [batch, head, col, row],
                        };
                        let at: usize = (0..4)
                            .filter(|&dim| extents[dim] > 1)
                            .map(|dim| score[dim] * strides[dim])
                            .sum();
                        assert_eq!(
                            bit(batch, head, row, col),
                            flags[at] != 0,
                            "{along:?} {extents:?} {strides:?} {score:?}"
                        );
                    }
                    for row in 0..rows {
                        for col in cols..cols.next_multiple_of(TILE) {
                            assert!(
                                !bit(batch, head, row, col),
                                "{along:?} {extents:?} behind a row"
                            );
                        }
                    }
                }
            }
        }
    }
}
