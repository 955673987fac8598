//! The block-diagonal Hadamard transform of a matrix (int4-hq-lss, section 3.3): which blocks, and along which axis.
//!
//! `H = BlockDiag(H_k, .., H_k)`, where `H_0 = [1]` and `H_k = [H_{k-1} H_{k-1}; H_{k-1} -H_{k-1}] / sqrt(2)`. Each
//! `H_k` is orthogonal and symmetric, so that it is its own inverse. It spreads an outlier evenly over the `2^k`
//! elements of its block.
//!
//! The transform is computed as `k` passes of butterflies in FP32. It is specified to the bit by
//! [`reference::hadamard`](crate::reference::hadamard::hadamard).

use std::f32::consts::FRAC_1_SQRT_2;

use cubecl::prelude::*;

use crate::error::KernelError;

/// The size of the blocks of a Hadamard transform: `2^k`, with `k` from 0 to 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HadamardSize {
    order: u32,
}

impl HadamardSize {
    /// `k = 0`: nothing is transformed.
    pub const IDENTITY: Self = Self { order: 0 };
    /// `k = 7`: blocks of 128 elements.
    pub const LARGEST: Self = Self { order: 7 };

    /// Blocks of `2^order` elements.
    ///
    /// # Errors
    ///
    /// When `order` is above 7.
    pub fn new(order: u32) -> Result<Self, KernelError> {
        if order <= Self::LARGEST.order {
            return Ok(Self { order });
        }
        Err(KernelError::Unsupported {
            operation: "HadamardSize::new",
            reason: format!("k = {order}"),
            remedy: "use a k from 0 to 7",
        })
    }

    /// All sizes, from the smallest one on.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=Self::LARGEST.order).map(|order| Self { order })
    }

    /// The largest size up to `at_most` whose blocks divide a dimension of this many elements.
    pub fn largest(dim: usize, at_most: Self) -> Self {
        Self {
            order: at_most.order.min(dim.trailing_zeros()),
        }
    }

    /// `k`.
    pub const fn order(self) -> u32 {
        self.order
    }

    /// Elements of a block, `2^k`.
    pub const fn block(self) -> usize {
        1 << self.order
    }

    /// The `f32` nearest to `2^(-k/2)`, by which the sums of a block are multiplied.
    pub const fn factor(self) -> f32 {
        let power = f32::from_bits((127 - self.order / 2) << 23);
        if self.order % 2 == 0 {
            power
        } else {
            power * FRAC_1_SQRT_2
        }
    }
}

/// The size of the blocks of the random Hadamard transform (NVFP4, arXiv 2509.25149).
pub const RANDOM_SIZE: HadamardSize = HadamardSize { order: 4 };

/// The signs of the elements of a block before the random Hadamard transform: one vector for all blocks, drawn once
/// (arXiv 2509.25149). They are the first bits of the fraction of pi.
pub const RANDOM_SIGNS: [f32; 16] = {
    let mut signs = [1.0; 16];
    let mut index = 0;
    while index < signs.len() {
        if 0x243f >> (15 - index) & 1 == 1 {
            signs[index] = -1.0;
        }
        index += 1;
    }
    signs
};

/// Along which axis of a matrix `[rows, cols]` blocks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Each column is transformed: `H X`.
    Rows,
    /// Each row is transformed: `X H`.
    Columns,
}

/// The transform of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HadamardTransform {
    /// The size of the blocks.
    pub size: HadamardSize,
    /// The axis along which they lie.
    pub axis: Axis,
}

impl HadamardTransform {
    /// The transform of each row.
    pub const fn of_columns(size: HadamardSize) -> Self {
        Self {
            size,
            axis: Axis::Columns,
        }
    }

    /// The transform of each column.
    pub const fn of_rows(size: HadamardSize) -> Self {
        Self {
            size,
            axis: Axis::Rows,
        }
    }

    /// Accepts matrices `[rows, cols]` whose axis is made of whole blocks.
    pub(crate) fn check(
        self,
        operation: &'static str,
        shape: [usize; 2],
    ) -> Result<(), KernelError> {
        let dim = match self.axis {
            Axis::Rows => shape[0],
            Axis::Columns => shape[1],
        };
        if dim % self.size.block() == 0 {
            return Ok(());
        }
        Err(KernelError::Shape {
            operation,
            got: format!(
                "a matrix {shape:?} in blocks of {} along {:?}",
                self.size.block(),
                self.axis
            ),
            remedy: "use blocks that divide the axis: HadamardSize::largest finds them",
        })
    }
}

/// The passes of the transform among `length` elements from element `first` on.
#[cube]
pub(crate) fn butterflies(
    line: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] length: usize,
) {
    #[unroll]
    for pass in 0..comptime!(length.ilog2()) {
        let distance = comptime!(1usize << pass);
        #[unroll]
        for pair in 0..comptime!(length / 2) {
            let low = comptime!(first + pair / distance * 2 * distance + pair % distance);
            let high = comptime!(low + distance);
            let (a, b) = (line[low], line[high]);
            line[low] = a + b;
            line[high] = a - b;
        }
    }
}
