//! The rows of `qt-bench attention`.

use serde::{Deserialize, Serialize};

use super::Spread;

/// Who computes attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionKernel {
    /// Ours, on `wgmma` instructions.
    Hopper,
    /// The same with INT8 products in the forward pass, quantizing among them.
    HopperInt8,
    /// Ours, on `mma.sync` instructions.
    TensorCore,
    /// Ours, in ordinary arithmetic.
    Portable,
    /// PyTorch's `scaled_dot_product_attention` with its cuDNN backend.
    TorchCudnn,
    /// The same with its FlashAttention backend.
    TorchFlash,
    /// The same with its memory-efficient backend.
    TorchEfficient,
}

impl AttentionKernel {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hopper => "Hopper",
            Self::HopperInt8 => "Hopper, INT8 forward",
            Self::TensorCore => "tensor core",
            Self::Portable => "portable",
            Self::TorchCudnn => "PyTorch, cuDNN",
            Self::TorchFlash => "PyTorch, FlashAttention",
            Self::TorchEfficient => "PyTorch, memory-efficient",
        }
    }
}

/// The problem of attention: BF16, as many keys as queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionProblem {
    /// Sequences at once.
    pub batch: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Queries of a head, and keys.
    pub sequence: usize,
    /// Features of a head.
    pub width: usize,
    /// True where a query sees no later key.
    pub causal: bool,
    /// Keys at the end of each sequence that a mask hides, as padding; 0 is no mask.
    #[serde(default)]
    pub hidden: usize,
}

/// The speed of both passes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttentionSpeed {
    /// Who computed it.
    pub kernel: AttentionKernel,
    /// The pass that was computed.
    #[serde(flatten)]
    pub problem: AttentionProblem,
    /// The forward pass; none where the kernel cannot compute it.
    pub forward: Option<Spread>,
    /// The gradients of Q, K and V; none where the kernel cannot compute them.
    pub backward: Option<Spread>,
}

/// A pass of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionPass {
    /// Two products, QKᵀ and PV.
    Forward,
    /// Five: the scores again, dV, dP, dQ, dK.
    Backward,
}

impl AttentionProblem {
    /// Operations of the products of a pass. Of causal scores half counts, as FlashAttention's authors count them, and
    /// all where a mask hides some, whatever a kernel computes.
    pub fn operations(&self, pass: AttentionPass) -> f64 {
        let products = match pass {
            AttentionPass::Forward => 2.0,
            AttentionPass::Backward => 5.0,
        };
        let scores = (self.batch * self.heads) as f64 * (self.sequence as f64).powi(2);
        let seen = if self.causal { 0.5 } else { 1.0 };
        2.0 * products * seen * scores * self.width as f64
    }
}

impl AttentionSpeed {
    /// The time of a pass.
    pub fn time(&self, pass: AttentionPass) -> Option<Spread> {
        match pass {
            AttentionPass::Forward => self.forward,
            AttentionPass::Backward => self.backward,
        }
    }

    /// Operations over the time, in 10^12 a second.
    pub fn tera_flops(&self, pass: AttentionPass) -> Option<f64> {
        let operations = self.problem.operations(pass);
        self.time(pass)
            .map(|time| operations / time.median_ms / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_products() {
        let full = AttentionProblem {
            batch: 2,
            heads: 3,
            kv_heads: 1,
            sequence: 100,
            width: 10,
            causal: false,
            hidden: 0,
        };
        assert_eq!(
            full.operations(AttentionPass::Forward),
            2.0 * 2.0 * 6e4 * 10.0
        );
        let causal = AttentionProblem {
            causal: true,
            ..full
        };
        assert_eq!(causal.operations(AttentionPass::Backward), 5.0 * 6e4 * 10.0);
        let speed = AttentionSpeed {
            kernel: AttentionKernel::Hopper,
            problem: full,
            forward: Some(Spread::of(vec![2.0])),
            backward: None,
        };
        assert_eq!(speed.tera_flops(AttentionPass::Forward), Some(2.4e6 / 2e9));
        assert_eq!(speed.tera_flops(AttentionPass::Backward), None);
    }
}
