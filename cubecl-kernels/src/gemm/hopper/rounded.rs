//! The output of a product, quantized by the kernel that computes it (jetfire-int8, section 4; coat-fp8, section 5.2).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::source::float_knob,
    device::{MatrixView, is_operand_type},
    gemm::blueprint::HopperBlueprint,
    granularity::Granularity,
    layout::Layout,
    number::Number,
    quantize::{QuantizeSpec, Quantized, buffers::allocate},
    rounding::{Rounding, StochasticKey},
    scale::ScaleNumber,
};

/// Neighbours of a row that share a scale, of E4M3.
const GROUP: usize = 16;

/// What a product's kernel writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Written {
    /// Sums, rounded to this type.
    Floats(StorageType),
    /// These, quantized.
    Rounded(Rounded),
}

/// How `rounded.cu` quantizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::gemm) struct Rounded {
    /// The type of 16 bits that sums are rounded to before.
    dtype: StorageType,
    /// The side of INT8 blocks; `None` of groups in E4M3.
    side: Option<usize>,
    is_stochastic: bool,
}

impl Rounded {
    /// What a spec says of an output of so many columns in `dtype`, if the kernel has it.
    pub(in crate::gemm) fn of(
        dtype: StorageType,
        spec: &QuantizeSpec,
        cols: usize,
    ) -> Option<Self> {
        let (side, whole) = match (spec.number, spec.granularity) {
            (Number::Int8, Granularity::Block(side @ (32 | 64 | 128))) => (Some(side), 16),
            // A quad writes the scales of four groups at once.
            (Number::E4M3, Granularity::Group(GROUP)) => (None, 4 * GROUP),
            _ => return None,
        };
        let is_stochastic = spec.rounding != Rounding::Nearest;
        let fits = (spec.scale, spec.layout) == (ScaleNumber::F32, Layout::RowMajor)
            && (side.is_some() || !is_stochastic)
            && is_operand_type(dtype)
            && cols.is_multiple_of(whole);
        fits.then_some(Self {
            dtype,
            side,
            is_stochastic,
        })
    }

    /// An output of this view that is rounded so by the spec, and what a kernel is told of it.
    pub(in crate::gemm) fn allocate<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        view: &MatrixView,
        spec: &QuantizeSpec,
    ) -> (Quantized<R>, TensorHandle<R>, RoundedOutput<R>) {
        let output = allocate(client, view, spec);
        let values = output.values.clone().expect("a row-major copy");
        let rounded = RoundedOutput {
            rounded: self,
            key: spec.rounding.key(),
            scales: output.scales.clone(),
        };
        (output, values, rounded)
    }

    /// True where a launch writes whole blocks: in one part, from tiles of whole columns of them.
    pub(in crate::gemm) fn fits(&self, blueprint: &HopperBlueprint) -> bool {
        let tile_n = blueprint.tile.tile_n;
        blueprint.parts == 1 && self.side.is_none_or(|side| tile_n.is_multiple_of(side))
    }
}

impl Written {
    /// What a kernel writes to `out`, floats, or codes that are rounded.
    pub fn to<R: Runtime>(out: &TensorHandle<R>, rounded: Option<&RoundedOutput<R>>) -> Self {
        match rounded {
            Some(output) => Self::Rounded(output.rounded),
            None => Self::Floats(out.dtype),
        }
    }

    /// The type that sums are rounded to.
    pub fn dtype(&self) -> StorageType {
        match *self {
            Self::Floats(dtype) | Self::Rounded(Rounded { dtype, .. }) => dtype,
        }
    }

    /// The knobs of the output's text.
    pub fn knobs(&self) -> String {
        let dtype = float_knob(self.dtype());
        match self {
            Self::Floats(_) => format!("#define ROUNDED 0\n#define OUT_{dtype}"),
            Self::Rounded(rounded) => format!(
                "#define ROUNDED 1\n#define OUT_{dtype}\n#define IN_{dtype}\n#define NUMBER \"e4m3\"\n#define SIDE {}\n\
                 #define STOCHASTIC {}",
                rounded.side.unwrap_or(0),
                u8::from(rounded.is_stochastic),
            ),
        }
    }
}

/// An output in numbers: how they are rounded, and where their scales go.
#[derive(Debug)]
pub(in crate::gemm) struct RoundedOutput<R: Runtime> {
    pub rounded: Rounded,
    /// That of random numbers, where there are some.
    pub key: StochasticKey,
    /// f32, as the output's spec has them.
    pub scales: TensorHandle<R>,
}

/// The text of a product's kernel: behind the common part, and what quantizes the output where that is asked for.
macro_rules! product_text {
    (@of $text:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/", $text))
    };
    ($($text:literal),+) => {
        concat!(
            $crate::gemm::hopper::rounded::product_text!(@of "cuda/hopper.cu"),
            $crate::gemm::hopper::rounded::product_text!(@of "gemm/hopper/common.cu"),
            "#if ROUNDED\n",
            $crate::gemm::hopper::rounded::product_text!(@of "quantize/block/scale.cu"),
            $crate::gemm::hopper::rounded::product_text!(@of "quantize/int8.cu"),
            $crate::gemm::hopper::rounded::product_text!(@of "quantize/patch.cu"),
            $crate::gemm::hopper::rounded::product_text!(@of "gemm/hopper/rounded.cu"),
            "#endif\n",
            $($crate::gemm::hopper::rounded::product_text!(@of $text)),+
        )
    };
}

pub(super) use product_text;
