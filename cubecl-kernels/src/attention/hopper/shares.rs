//! In how many shares blocks of the backward pass take the heads of a group.
//!
//! A block walks through the queries of all heads that read its keys. Of grouped heads there are few blocks with much to
//! do, and of causal ones those that take longest come last, since sums of dQ take their turns from late keys to early
//! ones: at the end most multiprocessors wait for a few. Where several blocks share the heads of a group, each has less
//! to do; but each reads the keys, and leaves sums of dK and dV in memory, which one more kernel adds.
//!
//! How many there are depends on the shapes, the band and the number of multiprocessors alone, so that a repetition gives
//! the same bits, and another device may give others.

use super::super::{AttentionShape, Band};

/// The part of the time that more shares must leave at most to be worth their memory.
const WORTH: f64 = 0.97;
// What decides between them, in microseconds, of an H200. Counted block by block, with 2.9 for a tile at width 64 and 2.6
// at 128, the backward passes of `book/results/h200-attention.json` are what they were measured as to 6%.
/// A tile of queries and 128 keys of one head, all five products.
const TILE_US: f64 = 2.7;
/// The start and the end of a block.
const BLOCK_US: f64 = 4.0;
/// A launch more.
const LAUNCH_US: f64 = 4.0;
/// Bytes that are written or read, in a microsecond.
const BYTES_PER_US: f64 = 3.3e6;

/// What the blocks of one head walk through.
struct Walks {
    /// Tiles of keys, each of which is a block's.
    blocks: usize,
    /// Tiles of queries that all of them have together, and the one that has most.
    all: usize,
    longest: usize,
}

impl Walks {
    /// In tiles of so many queries and so many keys.
    fn new(shape: &AttentionShape, band: Band, queries: usize, keys: usize) -> Self {
        let blocks = shape.keys.div_ceil(keys);
        let tiles = (0..blocks).map(|block| {
            let last_key = usize::min((block + 1) * keys, shape.keys) - 1;
            let first = band.queries_of(block * keys, shape).start;
            let end = band.queries_of(last_key, shape).end;
            match first < end {
                true => (end - 1) / queries - first / queries + 1,
                false => 0,
            }
        });
        let (all, longest) = tiles.fold((0, 0), |(all, longest), tiles| {
            (all + tiles, tiles.max(longest))
        });
        Self {
            blocks,
            all,
            longest,
        }
    }
}

/// How many blocks share the heads of a group for each tile of keys: a divisor of the group, 1 where none does.
///
/// `tile`: queries and keys of a tile. `dim`: features of a head in memory.
pub(super) fn shares(
    shape: &AttentionShape,
    band: Band,
    tile: [usize; 2],
    dim: usize,
    multiprocessors: usize,
) -> usize {
    let group = shape.group();
    if group == 1 {
        return 1;
    }
    let [queries, keys] = tile;
    let walks = Walks::new(shape, band, queries, keys);
    let time = |shares: usize| {
        let heads = (group / shares) as f64;
        let blocks = shape.batch * shape.kv_heads * shares * walks.blocks;
        let rounds = blocks.div_ceil(multiprocessors) as f64;
        let average = heads * walks.all as f64 / walks.blocks as f64;
        let longest = heads * walks.longest as f64;
        // As if each round had average blocks, and the last one the longest.
        let busiest = ((rounds - 1.0) * average + longest) * TILE_US + rounds * BLOCK_US;
        // Sums of dK and dV in FP32, written and read.
        let bytes = 2 * 2 * size_of::<f32>() * blocks * keys * dim;
        match shares {
            1 => busiest,
            _ => busiest + LAUNCH_US + bytes as f64 / BYTES_PER_US,
        }
    };
    let divisors = (2..=group).filter(|&shares| group.is_multiple_of(shares));
    divisors.fold(1, |best, shares| match time(shares) < WORTH * time(best) {
        true => shares,
        false => best,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MULTIPROCESSORS: usize = 132;
    const WINDOW: Band = Band {
        left: Some(512),
        right: Some(0),
    };

    /// Of `[batch, heads, heads of keys]`, a sequence and a width, what a count block by block has as the fastest, or
    /// as nearly so with less memory.
    #[test]
    fn few_blocks_of_much_share_a_group() {
        for (heads, sequence, width, band, expected) in [
            ([1, 16, 4], 16_384, 128, Band::CAUSAL, 4),
            ([2, 16, 4], 8192, 128, Band::CAUSAL, 2),
            ([4, 16, 4], 4096, 128, Band::CAUSAL, 2),
            ([1, 32, 8], 16_384, 64, Band::CAUSAL, 2),
            // Blocks enough.
            ([8, 16, 4], 2048, 128, Band::CAUSAL, 1),
            ([16, 16, 4], 1024, 128, Band::CAUSAL, 1),
            ([16, 32, 8], 1024, 64, Band::CAUSAL, 1),
            // Fewer blocks than multiprocessors.
            ([1, 16, 4], 1024, 128, Band::CAUSAL, 4),
            ([1, 8, 1], 8192, 128, Band::CAUSAL, 8),
            ([1, 12, 2], 256, 64, Band::ALL, 6),
            // All take as long.
            ([1, 16, 4], 16_384, 128, Band::ALL, 1),
            ([1, 16, 4], 16_384, 128, WINDOW, 1),
            // Of `tests/kernels/attention/hopper.rs`.
            ([1, 8, 2], 700, 128, Band::CAUSAL, 4),
            ([22, 4, 1], 257, 64, Band::CAUSAL, 2),
            ([40, 4, 2], 300, 64, Band::CAUSAL, 1),
            // Nothing to share.
            ([1, 16, 16], 16_384, 128, Band::CAUSAL, 1),
            ([1, 1, 1], 1024, 64, Band::CAUSAL, 1),
        ] {
            let [batch, heads, kv_heads] = heads;
            let shape = AttentionShape {
                batch,
                heads,
                kv_heads,
                queries: sequence,
                keys: sequence,
                width,
                value_width: width,
            };
            let tile = [if width == 128 { 64 } else { 128 }, 128];
            assert_eq!(
                shares(&shape, band, tile, width, MULTIPROCESSORS),
                expected,
                "{shape:?} {band:?}"
            );
        }
    }

    /// As `gradients.cu` counts them: from the tile of the first query that sees one of the keys to that of the last.
    #[test]
    fn blocks_walk_through_the_queries_that_see_their_keys() {
        let walks = |queries, keys, band| {
            let shape = AttentionShape {
                batch: 1,
                heads: 2,
                kv_heads: 1,
                queries,
                keys,
                width: 64,
                value_width: 64,
            };
            let Walks {
                blocks,
                all,
                longest,
            } = Walks::new(&shape, band, 64, 128);
            [blocks, all, longest]
        };
        assert_eq!(walks(512, 512, Band::ALL), [4, 32, 8]);
        assert_eq!(walks(512, 512, Band::CAUSAL), [4, 8 + 6 + 4 + 2, 8]);
        assert_eq!(walks(500, 500, Band::CAUSAL), [4, 8 + 6 + 4 + 2, 8]);
        // Queries that see no key, and keys that no query sees.
        assert_eq!(walks(300, 100, Band::CAUSAL), [1, 2, 2]);
        let near = Band {
            left: Some(10),
            right: Some(0),
        };
        assert_eq!(walks(64, 512, near), [4, 1, 1]);
        assert_eq!(walks(512, 512, near), [4, 3 + 3 + 3 + 2, 3]);
    }
}
