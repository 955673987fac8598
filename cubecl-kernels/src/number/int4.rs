//! INT4: integers from -7 to 7 (int4-hq-lss, section 3.1, with Q_N = Q_P = 7), two in a byte.

use super::Integer;

impl Integer {
    /// INT4.
    pub const INT4: Self = Self { bits: 4 };
}
