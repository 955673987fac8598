//! The copies of a quantized matrix.

/// In which order the quantized values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[.., rows, cols]`.
    RowMajor,
    /// `[.., cols, rows]`: the same values transposed, for a product over the rows.
    Transposed,
    /// Both copies, from one read of the input.
    Both,
}

impl Layout {
    /// True where the row-major copy is written.
    pub const fn row_major(&self) -> bool {
        matches!(self, Layout::RowMajor | Layout::Both)
    }

    /// True where the transposed copy is written.
    pub const fn transposed(&self) -> bool {
        matches!(self, Layout::Transposed | Layout::Both)
    }
}
