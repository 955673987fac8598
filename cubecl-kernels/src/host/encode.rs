//! Rows of values as rows of stored codes.

use crate::{
    number::{
        Integer, Symmetric,
        integer::ROUND_TO_EVEN,
        minifloat::stochastic_dither,
        storage::{pack_nibbles, pack_ten_bits},
    },
    philox,
    rounding::{FRACTION_BITS, Rounding, STOCHASTIC_OFFSET},
};

use super::grid::Grid;

const INT8_LARGEST: i32 = Integer::INT8.largest();

/// How the rows of a matrix are encoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowEncoder {
    pub grid: Grid,
    pub number: Symmetric,
    pub rounding: Rounding,
}

/// A row, the inverse scales of its regions, and its random numbers where rounding is stochastic.
pub(super) struct Row<'a> {
    x: &'a [f32],
    inverses: &'a [f32],
    dithers: Option<&'a [f32]>,
}

/// Memory that a thread takes from row to row, as far as it needs it.
#[derive(Default)]
pub(super) struct Scratch {
    /// A row in units of its scales.
    scaled: Vec<f32>,
    /// Its codes, before they are packed.
    codes: Vec<u16>,
}

/// Encodes a row to stored elements.
pub(super) type EncodeRow<E> = fn(&RowEncoder, &Row<'_>, &mut Scratch, &mut [E]);

impl RowEncoder {
    /// Encodes consecutive rows, the first of them row `first`, to rows of `stored_cols` elements. `inverses` gives the
    /// inverse scales of the regions of a row.
    pub fn encode<'a, E>(
        &self,
        x: &[f32],
        first: usize,
        inverses: impl Fn(usize) -> &'a [f32],
        encode_row: EncodeRow<E>,
        (out, stored_cols): (&mut [E], usize),
    ) {
        let cols = self.grid.cols;
        let mut scratch = Scratch::default();
        let mut dithers = Vec::new();
        let rows = x.chunks(cols).zip(out.chunks_mut(stored_cols));
        for (row, (x, out)) in rows.enumerate() {
            let dithers = match self.rounding {
                Rounding::Nearest => None,
                Rounding::Stochastic(key) => {
                    dithers.resize(cols, 0.0);
                    philox::dither_row(key, first + row, &mut dithers);
                    Some(&dithers[..])
                }
            };
            let row = Row {
                x,
                inverses: inverses(first + row),
                dithers,
            };
            encode_row(self, &row, &mut scratch, out);
        }
    }

    /// A row in units of its scales; 0 where the inverse scale is.
    fn scale(&self, row: &Row<'_>, scaled: &mut Vec<f32>) {
        scaled.resize(self.grid.cols, 0.0);
        if self.grid.block.1 == 1 {
            for ((x, inverse), scaled) in row.x.iter().zip(row.inverses).zip(scaled) {
                *scaled = if *inverse == 0.0 { 0.0 } else { x * inverse };
            }
            return;
        }
        for (index, &inverse) in row.inverses.iter().enumerate() {
            let (start, end) = self.grid.columns(index);
            let (x, scaled) = (&row.x[start..end], &mut scaled[start..end]);
            if inverse == 0.0 {
                scaled.fill(0.0);
                continue;
            }
            for (x, scaled) in x.iter().zip(scaled) {
                *scaled = x * inverse;
            }
        }
    }
}

/// INT8 by the maximum of each region: no value is beyond the range by more than a rounding error. Values of a region
/// of inverse 0 must be 0 before.
pub(super) fn int8_row(
    encoder: &RowEncoder,
    row: &Row<'_>,
    _scratch: &mut Scratch,
    out: &mut [i8],
) {
    for (index, &inverse) in row.inverses.iter().enumerate() {
        let (start, end) = encoder.grid.columns(index);
        let (x, out) = (&row.x[start..end], &mut out[start..end]);
        match row.dithers {
            _ if inverse == 0.0 => {}
            None => round_nearest(x, inverse, out),
            Some(dithers) => round_stochastic(x, inverse, &dithers[start..end], out),
        }
    }
}

/// INT8 of any values, saturating.
pub(super) fn signed_byte_row(
    encoder: &RowEncoder,
    row: &Row<'_>,
    scratch: &mut Scratch,
    out: &mut [i8],
) {
    encoder.scale(row, &mut scratch.scaled);
    codes(encoder.number, &scratch.scaled, row.dithers, out, |code| {
        code as i8
    });
}

/// Codes of a byte.
pub(super) fn byte_row(encoder: &RowEncoder, row: &Row<'_>, scratch: &mut Scratch, out: &mut [u8]) {
    encoder.scale(row, &mut scratch.scaled);
    codes(encoder.number, &scratch.scaled, row.dithers, out, |code| {
        code as u8
    });
}

/// Codes of half a byte.
pub(super) fn nibble_row(
    encoder: &RowEncoder,
    row: &Row<'_>,
    scratch: &mut Scratch,
    out: &mut [u8],
) {
    packed_row(encoder, row, scratch);
    pack_nibbles(&scratch.codes, out);
}

/// Codes of ten bits.
pub(super) fn ten_bit_row(
    encoder: &RowEncoder,
    row: &Row<'_>,
    scratch: &mut Scratch,
    out: &mut [u32],
) {
    packed_row(encoder, row, scratch);
    pack_ten_bits(&scratch.codes, out);
}

fn packed_row(encoder: &RowEncoder, row: &Row<'_>, scratch: &mut Scratch) {
    encoder.scale(row, &mut scratch.scaled);
    scratch.codes.resize(encoder.grid.cols, 0);
    codes(
        encoder.number,
        &scratch.scaled,
        row.dithers,
        &mut scratch.codes,
        |code| code as u16,
    );
}

/// The codes of a row, a loop for each kind of number and of rounding.
fn codes<C>(
    number: Symmetric,
    scaled: &[f32],
    dithers: Option<&[f32]>,
    out: &mut [C],
    code: impl Fn(u32) -> C,
) {
    match (number, dithers) {
        (Symmetric::Integer(integer), None) => {
            let largest = integer.largest() as f32;
            for (&v, out) in scaled.iter().zip(out) {
                let v = if v.is_nan() { 0.0 } else { v };
                let sum = v.clamp(-largest, largest) + ROUND_TO_EVEN;
                *out = code(sum.to_bits() & integer.mask());
            }
        }
        (Symmetric::Integer(integer), Some(dithers)) => {
            for ((&v, &dither), out) in scaled.iter().zip(dithers).zip(out) {
                *out = code(integer.encode(v, Some(dither)));
            }
        }
        (Symmetric::Float(float), None) => {
            for (&v, out) in scaled.iter().zip(out) {
                *out = code(float.with_sign(v, |magnitude| float.encode_magnitude(magnitude)));
            }
        }
        (Symmetric::Float(float), Some(dithers)) => {
            let largest = float.largest();
            for ((&v, &dither), out) in scaled.iter().zip(dithers).zip(out) {
                *out = code(float.with_sign(v, |magnitude| {
                    float.cut_magnitude(magnitude.min(largest), stochastic_dither(dither))
                }));
            }
        }
    }
}

pub(super) fn round_nearest(x: &[f32], inverse: f32, values: &mut [i8]) {
    for (x, value) in x.iter().zip(values) {
        *value = integer(x * inverse);
    }
}

fn round_stochastic(x: &[f32], inverse: f32, dithers: &[f32], values: &mut [i8]) {
    for ((x, dither), value) in x.iter().zip(dithers).zip(values) {
        let sum = x * inverse + (STOCHASTIC_OFFSET + dither);
        // The floor, with 256 in the bits above the byte.
        let integer = (sum.to_bits() >> FRACTION_BITS) as u8;
        *value = integer.wrapping_sub(128) as i8;
    }
}

/// To nearest even, within the range of the format.
fn integer(v: f32) -> i8 {
    let q = (v + ROUND_TO_EVEN).to_bits() as i32 - ROUND_TO_EVEN.to_bits() as i32;
    q.clamp(-INT8_LARGEST, INT8_LARGEST) as i8
}
