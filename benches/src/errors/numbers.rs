//! Values as they come back from a number format.

use burn::tensor::bf16;
use cubecl_kernels::{
    granularity::Granularity, host, number::Number, quantize::QuantizeSpec, reference,
    rounding::Rounding, shape::MatrixShape,
};

/// The numbers that values are rounded to, to nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    /// A format of the library, with FP32 scales.
    Format(Number),
    /// Integers of so many bits, 2 to 16, of which the library has 4, 8 and 10: up to `2^(bits - 1) - 1`, by the
    /// reference, with FP32 scales.
    Integer(u32),
    /// BF16, without scales.
    Bf16,
}

impl Numbers {
    /// The name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Format(number) => match number {
                Number::Int4 => String::from("INT4"),
                Number::Int8 => String::from("INT8"),
                Number::Int10 => String::from("INT10"),
                Number::E2M1
                | Number::E3M0
                | Number::E4M3
                | Number::E5M2
                | Number::DynamicExponent(_)
                | Number::Square => format!("{number:?}"),
            },
            Self::Integer(bits) => format!("INT{bits}"),
            Self::Bf16 => String::from("BF16"),
        }
    }

    /// Bits of a number, without scales.
    pub fn bits(self) -> u32 {
        match self {
            Self::Format(number) => number.bits(),
            Self::Integer(bits) => bits,
            Self::Bf16 => 16,
        }
    }

    /// The values that come back, for `x` of shape `[rows, cols]`.
    ///
    /// # Panics
    ///
    /// When `x` does not have as many elements, a region has none, or matrices do not hold the number.
    pub fn round(self, x: &[f32], shape: [usize; 2], granularity: Granularity) -> Vec<f32> {
        match self {
            Self::Format(number) => {
                let spec = QuantizeSpec::new(number, granularity);
                let quantized = host::quantize(x, shape, &spec);
                let values = quantized.and_then(|quantized| host::dequantize(&quantized));
                values.unwrap_or_else(|error| panic!("{error}"))
            }
            Self::Integer(bits) => {
                let largest = (1 << (bits - 1)) - 1;
                let shape = MatrixShape::new(shape[0], shape[1]);
                let rounding = Rounding::Nearest;
                let quantized = reference::quantize_to(x, shape, largest, granularity, rounding);
                reference::dequantize(&quantized)
            }
            Self::Bf16 => x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn integers_of_the_reference_are_those_of_the_library() {
        let x = Random::new(1).values(12 * 96, 3.0);
        for (number, bits) in [(Number::Int4, 4), (Number::Int8, 8), (Number::Int10, 10)] {
            let (library, reference) = (Numbers::Format(number), Numbers::Integer(bits));
            assert_eq!(
                (library.name(), library.bits()),
                (reference.name(), reference.bits())
            );
            for granularity in [
                Granularity::Group(32),
                Granularity::Block(8),
                Granularity::Tensor,
            ] {
                let of = |numbers: Numbers| numbers.round(&x, [12, 96], granularity);
                assert_eq!(of(library), of(reference), "{number:?} by {granularity:?}");
            }
        }
    }

    #[test]
    fn known_values() {
        let x = [7.0, 0.4, -3.6, 0.5, 70.0, 4.0, -36.0, 14.9];
        let group = Granularity::Group(4);
        let int4 = [7.0, 0.0, -4.0, 0.0, 70.0, 0.0, -40.0, 10.0];
        assert_eq!(Numbers::Format(Number::Int4).round(&x, [1, 8], group), int4);
        let bf16 = Numbers::Bf16.round(&[1.0, 1.003, 300.9], [1, 3], group);
        assert_eq!(bf16, [1.0, 1.0, 300.0]);
    }
}
