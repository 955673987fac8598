//! How a matrix is cut into regions, and its rows shared by threads.

use crate::{granularity::Granularity, rounding::MAGNITUDE, shape::MatrixShape};

/// About as many elements as a thread takes at a time, where regions leave the choice.
const BAND: usize = 1 << 16;

/// The regions of a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub rows: usize,
    pub cols: usize,
    /// Rows and columns of a region.
    pub block: (usize, usize),
}

impl Grid {
    pub fn new([rows, cols]: [usize; 2], granularity: Granularity) -> Self {
        Self {
            rows,
            cols,
            block: granularity.scale_block(MatrixShape::new(rows, cols)),
        }
    }

    /// Elements of one row of regions.
    pub fn stripe(&self) -> usize {
        (self.block.0 * self.cols).max(1)
    }

    /// Regions along a row.
    pub fn across(&self) -> usize {
        self.cols.div_ceil(self.block.1)
    }

    /// Regions of the matrix.
    pub fn regions(&self) -> usize {
        self.rows.div_ceil(self.block.0) * self.across()
    }

    /// Rows that a thread takes at a time.
    pub fn band_rows(&self) -> usize {
        (BAND / self.cols.max(1)).max(1)
    }

    /// The columns of a region.
    pub fn columns(&self, index: usize) -> (usize, usize) {
        let start = index * self.block.1;
        (start, (start + self.block.1).min(self.cols))
    }

    /// The parts of each of these rows that lie in one region.
    pub fn region_rows<'a, T>(
        &self,
        rows: &'a [T],
        index: usize,
    ) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        let (start, end) = self.columns(index);
        rows.chunks(self.cols).map(move |row| &row[start..end])
    }

    /// The largest magnitudes of the regions that these rows, of one row of regions, lie in.
    pub fn maxima(&self, rows: &[f32]) -> Vec<f32> {
        if self.block.1 == 1 {
            let mut maxima = vec![0i32; self.cols];
            for row in rows.chunks(self.cols) {
                for (max, x) in maxima.iter_mut().zip(row) {
                    *max = (*max).max(magnitude(*x));
                }
            }
            return maxima
                .into_iter()
                .map(|max| f32::from_bits(max as u32))
                .collect();
        }
        (0..self.across())
            .map(|index| absmax(self.region_rows(rows, index)))
            .collect()
    }
}

/// The largest magnitude, by the order of the bits without the sign: NaN above infinity above the rest.
pub(super) fn absmax<'a>(rows: impl Iterator<Item = &'a [f32]>) -> f32 {
    let largest = |row: &[f32]| row.iter().map(|x| magnitude(*x)).fold(0, i32::max);
    f32::from_bits(rows.map(largest).fold(0, i32::max) as u32)
}

/// The larger of two magnitudes, in the order of [`absmax`].
pub(super) fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

/// Signed, since a maximum of signed integers needs no newer vector instructions.
#[inline]
fn magnitude(x: f32) -> i32 {
    (x.to_bits() & MAGNITUDE) as i32
}
