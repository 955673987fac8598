//! Fingerprints of texts, by which the ids of kernels tell one CUDA source from another: CubeCL's cache of compiled
//! kernels outlives the program.

/// The 64-bit FNV-1a hash: one that the compiler can compute, since each launch asks for it.
pub(crate) const fn fnv_1a(text: &str) -> u64 {
    let bytes = text.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut index = 0;
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0100_0000_01b3);
        index += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_those_of_fnv_1a() {
        // Of the reference implementation's own test vectors.
        assert_eq!(fnv_1a(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv_1a("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv_1a("foobar"), 0x8594_4171_f739_67e8);
    }
}
