//! What the products of the forward pass multiply.

use crate::scale::fp32::scale_and_inverse;

/// Keys whose codes share a scale.
pub(crate) const KEYS_OF_SCALE: usize = 128;
/// The largest code.
pub(crate) const LARGEST_CODE: f32 = 127.0;

/// The numbers that the products of the forward pass multiply; those of the backward pass multiply the tensors that
/// they are given.
///
/// So where the forward pass has codes, `L` is not of the backward pass's scores, which may lie far above it where
/// scores are large: there `P = exp(min(S - L, 0))`, since no probability is larger than 1. Rows of P need not sum to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AttentionProducts {
    /// Those of the tensors, and probabilities in their type.
    #[default]
    Float,
    /// INT8 codes, rounded to nearest, with FP32 scales of `absmax / 127` (SageAttention: Zhang et al., 2025,
    /// "SageAttention", section 4, and "SageAttention3", section 4):
    ///
    /// - Q: a scale for each row,
    /// - K and V: a scale for each 128 keys of a head, from the first on,
    /// - P: a scale for each row of such a tile, by which its largest probability is 127. `L` is of what is not rounded.
    ///
    /// Keys that have much in common take most of the codes for that. A softmax does not see it: give keys less their
    /// mean. A scale of what has NaN or infinity is NaN: so are the rows that see one of its keys, and others may be.
    Int8,
}

/// Rounds numbers to codes of one scale, and back.
pub(crate) fn round_to_codes(x: &mut [f32]) {
    let absmax = x
        .iter()
        .fold(0, |largest, x| x.abs().to_bits().max(largest));
    let (scale, inverse) = scale_and_inverse(f32::from_bits(absmax), LARGEST_CODE);
    for x in x {
        *x = match inverse {
            0.0 => scale,
            _ => (*x * inverse).round_ties_even() * scale,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_scale_of_the_largest() {
        let mut x = [1.0, -127.0, 63.4, 0.5, 1.5];
        round_to_codes(&mut x);
        assert_eq!(x, [1.0, -127.0, 63.0, 0.0, 2.0]);
        let mut zeros = [0.0, 1e-31];
        round_to_codes(&mut zeros);
        assert_eq!(zeros, [0.0, 0.0]);
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let mut x = [1.0, bad];
            round_to_codes(&mut x);
            assert!(x.iter().all(|x| x.is_nan()));
        }
    }
}
