//! The suite: what `burn-quant-train` promises, checked from outside.

mod suite {
    mod attention;
    mod bad_input;
    mod forwarding;
    mod integers;
    mod matmul;
    mod moments;
    mod optimizer;
    mod paper;
    mod parity;
    mod passes;
    mod state;
    mod stochastic;
    mod training;
}
