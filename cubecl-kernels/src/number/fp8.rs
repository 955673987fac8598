//! The numbers of 8 bits that Hopper's tensor cores multiply and its instructions convert to.

use super::Number;

/// A number with instructions of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fp8 {
    E4M3,
    E5M2,
}

impl Fp8 {
    /// `None` for others.
    pub(crate) const fn of(number: Number) -> Option<Self> {
        match number {
            Number::E4M3 => Some(Self::E4M3),
            Number::E5M2 => Some(Self::E5M2),
            Number::Int8
            | Number::Int10
            | Number::Int4
            | Number::E2M1
            | Number::E3M0
            | Number::DynamicExponent(_)
            | Number::Square => None,
        }
    }

    /// The name in PTX.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
        }
    }

    pub(crate) const fn largest(self) -> f32 {
        match self {
            Self::E4M3 => Number::E4M3.largest(),
            Self::E5M2 => Number::E5M2.largest(),
        }
    }
}
