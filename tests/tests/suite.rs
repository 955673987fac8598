//! The suite: what `burn-quant-train` promises, checked from outside.

mod suite {
    mod attention;
    mod attention_options;
    mod checkpoint;
    mod composed_attention;
    mod composition;
    mod conformance;
    mod delayed_scaling;
    mod dropout;
    mod flow;
    mod half;
    mod health;
    mod int8_attention;
    mod integers;
    mod kept_output;
    mod later;
    mod learned_definition;
    mod learned_embedding;
    mod learned_evaluation;
    mod learned_product;
    mod learned_steps;
    mod loss_scaling;
    mod matmul;
    mod moments;
    mod rematerialized;
    mod report;
    mod saved;
    mod small_floats;
    mod stochastic;
    mod training;

    #[cfg(feature = "cuda")]
    mod devices;

    #[cfg(feature = "flex")]
    mod advice;
    #[cfg(feature = "flex")]
    mod bad_input;
    #[cfg(feature = "flex")]
    mod device_failure;
    #[cfg(feature = "flex")]
    mod forwarding;
    #[cfg(feature = "flex")]
    mod optimizer;
    #[cfg(feature = "flex")]
    mod paper;
    #[cfg(feature = "flex")]
    mod parity;
    #[cfg(feature = "flex")]
    mod sharing;
    #[cfg(feature = "flex")]
    mod state;
    #[cfg(feature = "flex")]
    mod survival;
}
