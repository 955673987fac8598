//! The numbers of a launch: one definition of the structure that the host fills and the kernel reads.

/// Numbers that a kernel takes by value, behind its buffers: words of 64 bits, the same in Rust and in CUDA source.
///
/// [`numbers!`] defines the structure and implements this for it.
pub(crate) trait Numbers {
    /// The same structure in CUDA source, by the name `Numbers`.
    const DECLARATION: &'static str;

    /// The numbers in the order of the declaration.
    fn words(&self) -> Vec<u64>;
}

/// Defines a structure of `u64` and of `[u32; 2]`, the halves of one, and implements [`Numbers`] for it.
macro_rules! numbers {
    (
        $(#[$of_struct:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$of_field:meta])* $field:ident: $number:tt,)+
        }
    ) => {
        $(#[$of_struct])*
        $visibility struct $name {
            $($(#[$of_field])* $field: $number,)+
        }

        impl $crate::cuda::numbers::Numbers for $name {
            const DECLARATION: &'static str = concat!(
                "struct Numbers {\n",
                $($crate::cuda::numbers::numbers!(@declaration $field $number),)+
                "};\n",
            );

            fn words(&self) -> Vec<u64> {
                vec![$($crate::cuda::numbers::numbers!(@word (self.$field) $number)),+]
            }
        }
    };
    (@declaration $field:ident u64) => {
        concat!("    unsigned long long ", stringify!($field), ";\n")
    };
    (@declaration $field:ident [u32; 2]) => {
        concat!("    unsigned int ", stringify!($field), "[2];\n")
    };
    (@word $value:tt u64) => {
        $value
    };
    (@word $value:tt [u32; 2]) => {
        u64::from($value[0]) | u64::from($value[1]) << 32
    };
}

/// The halves of a number, the low one first, for a kernel that computes with them: CUDA's compiler makes more
/// instructions of the whole.
pub(crate) const fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

pub(crate) use numbers;

#[cfg(test)]
mod tests {
    use super::*;

    numbers! {
        /// Three numbers.
        struct Example {
            /// The first.
            rows: u64,
            key: [u32; 2],
            cols: u64,
        }
    }

    #[test]
    fn both_sides_have_the_fields_in_one_order() {
        let expected = "struct Numbers {\n    unsigned long long rows;\n    unsigned int key[2];\n    \
                        unsigned long long cols;\n};\n";
        assert_eq!(Example::DECLARATION, expected);
        let key = 0x0123_4567_89ab_cdef;
        let example = Example {
            cols: 2,
            key: halves(key),
            rows: 1,
        };
        assert_eq!(example.words(), [1, key, 2]);
    }
}
