//! The compile-time parameters of a product's kernel.

/// The kernel and its tile sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blueprint {
    /// The portable kernel.
    Portable(PortableBlueprint),
    /// The tensor-core kernel.
    TensorCore(TensorCoreBlueprint),
    /// The Hopper kernel for scales of square blocks.
    Hopper(HopperBlueprint),
    /// The Hopper kernel for scales that cover all of K.
    HopperRowwise(HopperBlueprint),
}

/// Parameters of the portable kernel, whose cubes of 16 x 16 units compute tiles of 64 x 64 outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableBlueprint {
    /// Elements along K that accumulate in INT32 before they are scaled: they share one scale of each operand, and
    /// their sum of products cannot overflow.
    pub depth: usize,
}

/// Parameters of the tensor-core kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorCoreBlueprint {
    /// Rows and columns of the output tile of a cube.
    pub tile: usize,
    /// Rows and columns of the output tile of a plane.
    pub plane_tile: (usize, usize),
    /// Block size of the scales of both operands, and depth of a step along K.
    pub block: usize,
    /// Stages of the ring in shared memory, at least 2.
    pub stages: usize,
}

/// Parameters of the Hopper kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HopperBlueprint {
    /// What is compiled: the other parameters are those of a launch.
    pub tile: HopperTile,
    /// Cubes that run at once; each computes one tile after the other.
    pub cubes: usize,
    /// Parts of K that are summed up side by side, and then added in ascending order: [split-K](super::add_parts).
    pub parts: usize,
}

/// An output tile of the Hopper kernels, of 128 rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HopperTile {
    /// Its columns: 64, 128, 192 or 256.
    pub tile_n: usize,
    /// Stages of the ring in shared memory, at least 2.
    pub stages: usize,
}
