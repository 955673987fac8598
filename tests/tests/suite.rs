//! The suite: what `burn-quant-train` promises, checked from outside.

mod suite {
    mod attention;
    mod integers;
    mod matmul;
    mod moments;
    mod passes;
    mod stochastic;
    mod training;

    #[cfg(feature = "flex")]
    mod bad_input;
    #[cfg(feature = "flex")]
    mod forwarding;
    #[cfg(feature = "flex")]
    mod optimizer;
    #[cfg(feature = "flex")]
    mod paper;
    #[cfg(feature = "flex")]
    mod parity;
    #[cfg(feature = "flex")]
    mod state;
}
