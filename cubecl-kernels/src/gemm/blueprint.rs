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

/// Parameters of the Hopper kernels, whose output tiles have 128 rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HopperBlueprint {
    /// Columns of an output tile: 64, 128, 192 or 256.
    pub tile_n: usize,
    /// Stages of the ring in shared memory, at least 2.
    pub stages: usize,
    /// Cubes that run at once; each computes one tile after the other.
    pub cubes: usize,
}
