//! Helpers that the tests of the workspace share: seeded random data, tiny models, a training loop, and the backends
//! under test.
//!
//! Every test draws fresh data: [`seed`] takes its value from the clock, and from `QUANT_TRAIN_TEST_SEED` where that is
//! set, so that a failure, whose message names the seed, can be had again.

pub mod data;
pub mod models;
pub mod train;

pub use data::{Rng, seed, supports};

/// Makes, for each backend that this build has, a module with one test for each line `test => check`, which calls the
/// generic function `check::<Backend>(seed)`.
///
/// The seed is fresh; a check puts it into its failure messages.
#[macro_export]
macro_rules! on_every_backend {
    ($($(#[$attribute:meta])* $test:ident => $check:ident;)*) => {
        $crate::on_every_backend!(@on "flex", flex, burn::backend::Flex, $($(#[$attribute])* $test $check)*);
        $crate::on_every_backend!(@on "ndarray", ndarray, burn::backend::NdArray, $($(#[$attribute])* $test $check)*);
        $crate::on_every_backend!(@on "vulkan", vulkan, burn::backend::Vulkan, $($(#[$attribute])* $test $check)*);
        $crate::on_every_backend!(@on "cuda", cuda, burn::backend::Cuda, $($(#[$attribute])* $test $check)*);
    };
    (@on $feature:literal, $module:ident, $backend:ty, $($(#[$attribute:meta])* $test:ident $check:ident)*) => {
        #[cfg(feature = $feature)]
        mod $module {
            $(
                #[test]
                $(#[$attribute])*
                fn $test() {
                    super::$check::<$backend>($crate::seed());
                }
            )*
        }
    };
}

/// Calls `check::<Backend, E>(arguments)` in BF16 if the backend has it, or in FP16, which it may have instead.
#[macro_export]
macro_rules! in_narrow {
    ($check:ident::<$backend:ty>($($arg:expr),*)) => {
        if $crate::supports::<$backend>(burn::tensor::DType::BF16) {
            $check::<$backend, half::bf16>($($arg),*);
        } else if $crate::supports::<$backend>(burn::tensor::DType::F16) {
            $check::<$backend, half::f16>($($arg),*);
        }
    };
}

/// Calls `check::<Backend, MixedPrecision<_>>(dtype, tolerance, arguments)` for each 16-bit dtype that the backend has.
#[macro_export]
macro_rules! in_16_bits {
    ($backend:ty, $check:ident($($arg:expr),*)) => {
        if $crate::supports::<$backend>(burn::tensor::DType::F16) {
            $check::<$backend, burn_quant_train::recipe::MixedPrecision<half::f16>>(
                burn::tensor::DType::F16, 2e-2, $($arg),*
            );
        }
        if $crate::supports::<$backend>(burn::tensor::DType::BF16) {
            $check::<$backend, burn_quant_train::recipe::MixedPrecision<half::bf16>>(
                burn::tensor::DType::BF16, 1e-1, $($arg),*
            );
        }
    };
}

#[cfg(doctest)]
mod book;
