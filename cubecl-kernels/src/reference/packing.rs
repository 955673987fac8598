//! How the codes of a matrix lie in memory, from the definitions of [`Storage`].

use crate::number::Storage;

/// The stored elements of rows of `cols` codes, each as its bits: see [`Storage`] for what they are.
///
/// A row is a string of bits, code `i` from bit `i * bits` on, filled up with zeros to whole elements.
pub fn stored(codes: &[i32], cols: usize, storage: Storage) -> Vec<u32> {
    if cols == 0 {
        return Vec::new();
    }
    let element_bits = 8 * storage.dtype().size();
    let code_bits = storage.bits() as usize;
    codes
        .chunks(cols)
        .flat_map(|row| {
            let bit = |at: usize| {
                let code = row.get(at / code_bits).copied().unwrap_or_default();
                code as u32 >> (at % code_bits) & 1
            };
            (0..storage.stored_cols(cols)).map(move |element| {
                let bits =
                    (0..element_bits).map(|index| bit(element * element_bits + index) << index);
                bits.sum()
            })
        })
        .collect()
}

/// Packs 10-bit integers as [`Storage::TenBits`] does: rows padded with zeros to a multiple of 16 values, and of each
/// 16, value `i` in two's complement in the bits from `10 i` of a 160-bit string, stored as five words, lowest first.
pub fn pack_int10(values: &[i32], cols: usize) -> Vec<u32> {
    stored(values, cols, Storage::TenBits)
}
