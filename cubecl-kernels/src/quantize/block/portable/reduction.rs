//! The maxima of blocks from those of patches.

use cubecl::prelude::*;

use crate::quantize::staged::TILE;

use super::tile::{BlockTile, LANES, PATCH_ROWS, PLANE, PLANE_ROWS, grid_position, plane_and_lane};

/// Replaces the maximum of each patch by that of its block.
#[cube]
pub(super) fn reduce_to_blocks(maxima: &mut Array<u32>, #[comptime] tile: BlockTile) {
    if comptime!(tile.planes) {
        reduce_in_planes(maxima, tile);
    } else {
        reduce_in_shared_memory(maxima, tile);
    }
}

#[cube]
pub(super) fn reduce_in_planes(maxima: &mut Array<u32>, #[comptime] tile: BlockTile) {
    let (plane, lane) = plane_and_lane(tile);
    if comptime!(tile.block == TILE) {
        let mut bits = maxima[0];
        #[unroll]
        for patch in 1..comptime!(tile.patches()) {
            bits = max(bits, maxima[patch]);
        }
        let mut partial = SharedMemory::<u32>::new(comptime!(tile.planes_of_cube()));
        bits = max_of_lanes(bits, PLANE);
        // The buffer may be read still by units that have not left an earlier reduction.
        sync_cube();
        if lane == 0 {
            partial[plane as usize] = bits;
        }
        sync_cube();
        let planes = comptime!(tile.planes_of_cube());
        bits = max_of_lanes(partial[lane as usize % planes], planes);
        #[unroll]
        for patch in 0..comptime!(tile.patches()) {
            maxima[patch] = bits;
        }
    } else {
        let lanes = comptime!(tile.lanes_of_block());
        #[unroll]
        for patch in 0..comptime!(tile.patches()) {
            // The rows of a plane lie in one block; of its columns, these many lanes.
            let mut bits = max_of_lanes(maxima[patch], lanes);
            #[unroll]
            for step in comptime!(LANES.ilog2())..comptime!(PLANE.ilog2()) {
                bits = max(bits, plane_shuffle_xor(bits, comptime!(1u32 << step)));
            }
            maxima[patch] = bits;
        }
        if comptime!(tile.block > PLANE_ROWS) {
            // One maximum for each plane's patch and each block along its columns.
            let parts = comptime!(LANES / lanes);
            let mut partial =
                SharedMemory::<u32>::new(comptime!(tile.patches() * tile.planes_of_cube() * parts));
            let part = lane % comptime!(LANES as u32) / comptime!(lanes as u32);
            let writes = lane / comptime!(LANES as u32) == 0 && lane % comptime!(lanes as u32) == 0;
            sync_cube();
            #[unroll]
            for patch in 0..comptime!(tile.patches() as u32) {
                let plane_patch = plane + comptime!(patch * tile.planes_of_cube() as u32);
                if writes {
                    partial[(plane_patch * comptime!(parts as u32) + part) as usize] =
                        maxima[patch as usize];
                }
            }
            sync_cube();
            let plane_cols = comptime!(tile.plane_cols() as u32);
            let block_rows = comptime!((tile.block / PLANE_ROWS) as u32);
            let block_cols = comptime!((tile.block / (LANES * tile.patch_cols)).max(1) as u32);
            #[unroll]
            for patch in 0..comptime!(tile.patches() as u32) {
                let plane_patch = plane + comptime!(patch * tile.planes_of_cube() as u32);
                let first_row = plane_patch / plane_cols / block_rows * block_rows;
                let first_col = plane_patch % plane_cols / block_cols * block_cols;
                let mut bits = 0u32;
                #[unroll]
                for row in 0..block_rows {
                    #[unroll]
                    for col in 0..block_cols {
                        let from = (first_row + row) * plane_cols + first_col + col;
                        bits = max(
                            bits,
                            partial[(from * comptime!(parts as u32) + part) as usize],
                        );
                    }
                }
                maxima[patch as usize] = bits;
            }
        }
    }
}

/// The largest number among each of these many neighbouring lanes, a power of two, in all of them.
#[cube]
pub(super) fn max_of_lanes(bits: u32, #[comptime] lanes: usize) -> u32 {
    let mut reduced = bits;
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        reduced = max(reduced, plane_shuffle_xor(reduced, comptime!(1u32 << step)));
    }
    reduced
}

/// Without plane operations: along the rows of patches of a block, then along its columns.
#[cube]
pub(super) fn reduce_in_shared_memory(maxima: &mut Array<u32>, #[comptime] tile: BlockTile) {
    let grid_cols = comptime!((TILE / tile.patch_cols) as u32);
    let block_rows = comptime!((tile.block / PATCH_ROWS) as u32);
    let block_cols = comptime!((tile.block / tile.patch_cols) as u32);
    let size = comptime!(TILE / PATCH_ROWS * TILE / tile.patch_cols);
    let mut of_patches = SharedMemory::<u32>::new(size);
    let mut of_rows = SharedMemory::<u32>::new(size);
    sync_cube();
    #[unroll]
    for patch in 0..comptime!(tile.patches() as u32) {
        let (row, col) = grid_position(patch, tile);
        of_patches[(row * grid_cols + col) as usize] = maxima[patch as usize];
    }
    sync_cube();
    #[unroll]
    for patch in 0..comptime!(tile.patches() as u32) {
        let (row, col) = grid_position(patch, tile);
        let first = row * grid_cols + col / block_cols * block_cols;
        let mut bits = 0u32;
        for other in 0..block_cols {
            bits = max(bits, of_patches[(first + other) as usize]);
        }
        of_rows[(row * grid_cols + col) as usize] = bits;
    }
    sync_cube();
    #[unroll]
    for patch in 0..comptime!(tile.patches() as u32) {
        let (row, col) = grid_position(patch, tile);
        let first = row / block_rows * block_rows * grid_cols + col;
        let mut bits = 0u32;
        for other in 0..block_rows {
            bits = max(bits, of_rows[(first + other * grid_cols) as usize]);
        }
        maxima[patch as usize] = bits;
    }
}
