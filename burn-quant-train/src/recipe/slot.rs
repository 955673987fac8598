//! The state that a layer keeps between steps.

/// State that a layer keeps between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Names the slot in casts and in records.
    pub name: &'static str,
    /// Its content, and how that moves.
    pub kind: SlotKind,
}

/// The name of the slot that holds a fallback threshold.
pub const THRESHOLD: &str = "threshold";

/// The content of a slot, and the controller that moves it at every optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// A fallback threshold that follows the rate of blocks that fell back (fallback-int8, appendix D, algorithm 2). On
    /// the device.
    DelayThreshold,
    /// A learned step size (int4-hq-lss, sections 3.1, A.3 and A.4). On the device.
    StepSize,
    /// The largest magnitudes that a matrix had in earlier steps, and the one of them that its scale follows (delayed
    /// scaling). On the device.
    AmaxHistory,
    /// The size of a Hadamard transform, chosen by the quantization error that it leaves (int4-hq-lss, section A.5).
    /// Known to the host.
    HadamardSize,
}
