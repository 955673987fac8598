//! Quantization, attention and AdamW on slices in host memory: the numbers of [`reference`](mod@crate::reference), in
//! one pass where that is possible and on all cores, for backends whose tensors live there.
//!
//! Matrices are contiguous and row-major. The inner loops have no calls and no branches, so that the compiler turns
//! them into vector instructions: rounding adds and takes away 1.5 * 2^23 instead of calling the C library.

mod adamw;
mod attention;
mod bit_splitting;
mod dequantize;
mod encode;
mod fallback;
mod grid;
mod hadamard;
pub mod learned_step;
mod leverage_score;
mod magnitude;
mod quantization_error;
mod quantize;

use std::borrow::Cow;

pub use adamw::adamw;
pub use attention::{HostAttention, attention, attention_backward};
pub use bit_splitting::{HostBitSplit, bit_split, merge_parts};
pub use dequantize::{dequantize, dequantize_fallback};
pub use fallback::{HostFallbackQuantized, quantize_fallback};
pub use leverage_score::{
    HostRowSample, gather_int4_rows, gather_parts, gather_scaled, int4_row_norms, leverage_scores,
    sample_rows,
};
pub use magnitude::magnitudes;
pub use quantization_error::quantization_error;
pub use quantize::{quantize, quantize_by, quantize_delayed};

use crate::{
    error::KernelError,
    granularity::Granularity,
    number::{Number, Storage, Symmetric},
    quantize::check_number,
    scale::ScaleNumber,
};

/// A quantized matrix in host memory, in the very storage of the device: what [`Quantized`](crate::quantize::Quantized)
/// says of `values`, `scales` and `tensor_scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct HostQuantized<'a> {
    /// The values, row-major.
    pub values: HostValues<'a>,
    /// One scale for each region, row-major.
    pub scales: HostScales<'a>,
    /// The number format of the values.
    pub number: Number,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// Rows and columns, in elements.
    pub shape: [usize; 2],
}

/// Stored values: see [`Storage`].
#[derive(Debug, Clone, PartialEq)]
pub enum HostValues<'a> {
    /// [`Storage::SignedBytes`].
    I8(Cow<'a, [i8]>),
    /// [`Storage::Bytes`] or [`Storage::Nibbles`].
    U8(Cow<'a, [u8]>),
    /// [`Storage::TenBits`].
    U32(Cow<'a, [u32]>),
}

/// Stored scales: see [`ScaleNumber`].
#[derive(Debug, Clone, PartialEq)]
pub enum HostScales<'a> {
    /// [`ScaleNumber::F32`].
    F32(Cow<'a, [f32]>),
    /// [`ScaleNumber::E8M0`].
    E8M0(Cow<'a, [u8]>),
    /// [`ScaleNumber::E4M3`].
    E4M3 {
        /// Those of the regions.
        scales: Cow<'a, [u8]>,
        /// That of the matrix.
        tensor_scale: f32,
    },
}

impl HostValues<'_> {
    /// Number of stored elements.
    pub fn len(&self) -> usize {
        match self {
            HostValues::I8(values) => values.len(),
            HostValues::U8(values) => values.len(),
            HostValues::U32(values) => values.len(),
        }
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True where these can be elements of a storage.
    fn fits(&self, storage: Storage) -> bool {
        match storage {
            Storage::SignedBytes => matches!(self, HostValues::I8(_)),
            Storage::Bytes | Storage::Nibbles => matches!(self, HostValues::U8(_)),
            Storage::TenBits => matches!(self, HostValues::U32(_)),
        }
    }
}

impl HostScales<'_> {
    /// How they are stored.
    pub fn number(&self) -> ScaleNumber {
        match self {
            HostScales::F32(_) => ScaleNumber::F32,
            HostScales::E8M0(_) => ScaleNumber::E8M0,
            HostScales::E4M3 { .. } => ScaleNumber::E4M3,
        }
    }

    /// Number of scales, that of the matrix not counted.
    pub fn len(&self) -> usize {
        match self {
            HostScales::F32(scales) => scales.len(),
            HostScales::E8M0(scales) | HostScales::E4M3 { scales, .. } => scales.len(),
        }
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Accepts the numbers that matrices hold, and regions of some elements.
fn check(
    operation: &'static str,
    number: Number,
    granularity: Granularity,
) -> Result<Symmetric, KernelError> {
    if matches!(granularity, Granularity::Block(0) | Granularity::Group(0)) {
        return Err(KernelError::Unsupported {
            operation,
            reason: format!("{granularity:?}"),
            remedy: "use a block or a group of at least one element",
        });
    }
    check_number(operation, number)
}

/// Accepts a slice with all elements of a matrix.
fn check_len(operation: &'static str, x: &[f32], shape: [usize; 2]) -> Result<(), KernelError> {
    if x.len() == shape[0] * shape[1] {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation,
        got: format!("{} elements of a matrix {shape:?}", x.len()),
        remedy: "pass a slice with all elements of the matrix",
    })
}
