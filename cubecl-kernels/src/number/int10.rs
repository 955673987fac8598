//! INT10: integers from -511 to 511 (fallback-int8, section 5.2), 16 of them in five words.

use super::Integer;

impl Integer {
    /// INT10.
    pub const INT10: Self = Self { bits: 10 };
}
