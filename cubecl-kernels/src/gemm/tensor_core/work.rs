//! The work of a cube: its tile of the output, and the items along K.

use cubecl::prelude::*;

use crate::gemm::blueprint::TensorCoreBlueprint;

use super::{Geometry, PLANE};

/// Rows of tiles that are computed together, so that they share the columns of B in the cache.
const RASTER: u32 = 8;

/// Where a cube works: the matrix and the first row and column.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Origin {
    pub batch: u32,
    pub row: u32,
    pub col: u32,
}

/// The tile of a cube. Tiles are numbered down [`RASTER`] rows of tiles before they go on along the columns.
#[cube]
pub(super) fn tile_origin(
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
) -> Origin {
    let tile = comptime!(blueprint.tile as u32);
    let tiles_m = geometry.m.div_ceil(tile);
    let tiles_n = geometry.n.div_ceil(tile);
    let index = CUBE_POS as u32;
    let in_matrix = index % (tiles_m * tiles_n);
    let first_m = in_matrix / (RASTER * tiles_n) * RASTER;
    let height = min(tiles_m - first_m, RASTER);
    let in_group = in_matrix % (RASTER * tiles_n);
    Origin {
        batch: index / (tiles_m * tiles_n),
        row: (first_m + in_group % height) * tile,
        col: in_group / height * tile,
    }
}

/// Where this unit's plane works in the cube's tile: its first row and column.
#[cube]
pub(super) fn plane_origin(#[comptime] blueprint: TensorCoreBlueprint) -> (u32, u32) {
    let plane = UNIT_POS / comptime!(PLANE as u32);
    let planes_n = comptime!(blueprint.planes().1 as u32);
    (
        plane / planes_n * comptime!(blueprint.plane_tile.0 as u32),
        plane % planes_n * comptime!(blueprint.plane_tile.1 as u32),
    )
}

/// One item of work: a block along K, and whether its residual is meant.
#[derive(CubeType)]
pub(super) struct Item {
    pub block: u32,
    pub residual: u32,
    /// Of each block of the tile's rows 1 where it fell back, else 0.
    pub flags: Array<u32>,
}

/// Goes on to the next item of work. All units read the same flags, so all of a cube agree.
#[cube]
pub(super) fn advance(
    item: &mut Item,
    flags: &Tensor<u32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
    #[comptime] has_fallback: bool,
) {
    let mut next_residual = 0u32;
    if comptime!(has_fallback) {
        if item.residual == 0 {
            #[unroll]
            for row_block in 0..blueprint.row_blocks() {
                next_residual |= item.flags[row_block];
            }
        }
    }
    item.residual = next_residual;
    item.block += 1 - next_residual;
    if comptime!(has_fallback) {
        load_flags(item, flags, origin, geometry, blueprint);
    }
}

/// Loads the flags of an item's block. They are looked at one turn later, when they have arrived.
#[cube]
pub(super) fn load_flags(
    item: &mut Item,
    flags: &Tensor<u32>,
    origin: &Origin,
    geometry: &Geometry,
    #[comptime] blueprint: TensorCoreBlueprint,
) {
    let strides = geometry.a_scales;
    let block = comptime!(blueprint.block as u32);
    let last_row = (geometry.m - 1) / block;
    let last_block = geometry.k.div_ceil(block) - 1;
    let start = origin.batch * strides.batch + min(item.block, last_block) * strides.col;
    #[unroll]
    for row_block in 0..comptime!(blueprint.row_blocks() as u32) {
        let row = min(origin.row / block + row_block, last_row);
        item.flags[comptime!(row_block as usize)] = flags[(start + row * strides.row) as usize];
    }
}
