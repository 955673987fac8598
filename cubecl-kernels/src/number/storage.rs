//! How codes lie in memory.
//!
//! A row of codes is a string of bits, each code above the one before it, and ends with zeros: two nibbles are a byte,
//! the even element in the low one, and 16 codes of ten bits are five words. A *run* is 16 neighbours of a row: as many
//! as fill whole words in every storage.

use cubecl::{ir::StorageType, prelude::*};

use crate::device::storage;

/// How the codes of a matrix lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// `i8`, a code in each.
    SignedBytes,
    /// `u8`, a code in each.
    Bytes,
    /// `u8`, two codes in each, the even element in the low nibble.
    Nibbles,
    /// `u32`, 16 codes in five of them: code `i` in the bits from `10 i` of a string of 160, the lowest word first.
    TenBits,
}

/// Codes of a run.
pub(crate) const RUN: usize = 16;

impl Storage {
    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Storage::SignedBytes | Storage::Bytes => 8,
            Storage::Nibbles => 4,
            Storage::TenBits => 10,
        }
    }

    /// Stored elements of a row of `cols` codes.
    pub const fn stored_cols(self, cols: usize) -> usize {
        match self {
            Storage::SignedBytes | Storage::Bytes => cols,
            Storage::Nibbles => cols.div_ceil(2),
            Storage::TenBits => 5 * cols.div_ceil(RUN),
        }
    }

    /// The type of a stored element.
    pub fn dtype(self) -> StorageType {
        match self {
            Storage::SignedBytes => storage::<i8>(),
            Storage::Bytes | Storage::Nibbles => storage::<u8>(),
            Storage::TenBits => storage::<u32>(),
        }
    }

    /// Bytes of a stored row of `cols` codes.
    pub(crate) fn stored_bytes(self, cols: usize) -> usize {
        self.stored_cols(cols) * self.dtype().size()
    }

    /// Words of a run.
    pub(crate) const fn run_words(self) -> usize {
        self.bits() as usize * RUN / 32
    }
}

/// The words of a run of codes.
#[cube]
pub(crate) fn pack_run(codes: &Array<u32>, #[comptime] storage: Storage) -> Array<u32> {
    pack_codes(codes, RUN, storage)
}

/// The words of the codes of `len` neighbours, which fill them.
#[cube]
pub(crate) fn pack_codes(
    codes: &Array<u32>,
    #[comptime] len: usize,
    #[comptime] storage: Storage,
) -> Array<u32> {
    let count = comptime!(len * storage.bits() as usize / 32);
    let mut words = Array::<u32>::new(count);
    #[unroll]
    for word in 0..count {
        words[word] = 0u32;
    }
    #[unroll]
    for index in 0..comptime!(len as u32) {
        let code = codes[index as usize];
        let word = comptime!((index * storage.bits() / 32) as usize);
        let shift = comptime!(index * storage.bits() % 32);
        words[word] |= code << shift;
        if comptime!(shift + storage.bits() > 32) {
            words[comptime!(word + 1)] |= code >> comptime!(32 - shift);
        }
    }
    words
}

/// The codes of `len` neighbours, which fill whole words. Bits above a code may be anything.
#[cube]
pub(crate) fn unpack_codes(
    words: &Array<u32>,
    #[comptime] len: usize,
    #[comptime] storage: Storage,
) -> Array<u32> {
    let mut codes = Array::<u32>::new(len);
    #[unroll]
    for index in 0..comptime!(len as u32) {
        let word = comptime!((index * storage.bits() / 32) as usize);
        let shift = comptime!(index * storage.bits() % 32);
        let mut code = words[word] >> shift;
        if comptime!(shift + storage.bits() > 32) {
            code |= words[comptime!(word + 1)] << comptime!(32 - shift);
        }
        codes[index as usize] = code;
    }
    codes
}

/// Packs codes of four bits, two in a byte; a last nibble without a code is 0.
pub(crate) fn pack_nibbles(codes: &[u16], out: &mut [u8]) {
    for (pair, out) in codes.chunks(2).zip(out) {
        *out = (pair[0] | pair.get(1).map_or(0, |high| high << 4)) as u8;
    }
}

/// Packs codes of ten bits, 16 in five words, into words that were 0.
pub(crate) fn pack_ten_bits(codes: &[u16], out: &mut [u32]) {
    for (run, out) in codes.chunks(RUN).zip(out.chunks_mut(5)) {
        for (index, &code) in run.iter().enumerate() {
            let (word, shift) = (index * 10 / 32, index * 10 % 32);
            let bits = u64::from(code) << shift;
            out[word] |= bits as u32;
            if shift > 22 {
                out[word + 1] |= (bits >> 32) as u32;
            }
        }
    }
}

/// The `index`-th code of a row of nibbles.
pub(crate) fn nibble(row: &[u8], index: usize) -> u32 {
    u32::from(row[index / 2] >> (index % 2 * 4)) & 0xf
}

/// The `index`-th code of a row of codes of ten bits.
pub(crate) fn ten_bits(row: &[u32], index: usize) -> u32 {
    let bit = index % RUN * 10;
    let (word, shift) = (index / RUN * 5 + bit / 32, bit % 32);
    let mut bits = row[word] >> shift;
    if shift > 22 {
        bits |= row[word + 1] << (32 - shift);
    }
    bits & 0x3ff
}
