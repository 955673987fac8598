//! Recipes: the numbers that a linear layer's products are computed in. A recipe is a row of data in a file of its own.
//!
//! A [`Row`] says everything in which one recipe differs from another: for each of the three products of a linear layer
//! the [`Cast`] of both operands, what is saved for the backward pass, what [flows](Flow) between layers, and the
//! [slots](Slot) that a layer keeps between steps. Rows that contradict themselves do not compile: see
//! [`Row::checked`].
//!
//! To add a recipe, write its file beside the others and name it in the list below; the command line, the benchmarks,
//! the tables and the conformance tests follow the list.

mod cast;
mod check;
pub mod context;
mod flow;
mod named;
mod row;
mod slot;

pub use cast::{
    Cast, Granularity, Number, Residual, Rounding, ScaleNumber, ScaleSource, Transform,
};
pub use context::{AttentionContext, Context};
pub use flow::Flow;
pub use named::{Entered, Named, OtherRecipe};
pub(crate) use row::LearnedSlots;
pub use row::{LinearMatrix, LinearOperand, LinearRow, Product, Row, Sampling, SavedX};
pub use slot::{Slot, SlotKind, THRESHOLD};

pub use crate::data::product::Accumulation;

use std::{
    fmt::{self, Debug, Display},
    str::FromStr,
};

use burn_backend::{FloatDType, bf16, f16};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// A recipe as a type: the second parameter of [`QuantTrain`](crate::QuantTrain).
pub trait Recipe: Clone + Copy + Default + Debug + Send + Sync + 'static {
    /// The recipe.
    const ROW: Row;

    /// The recipe that runs: [`ROW`](Self::ROW), but for [`Named`], whose program chooses it. A `ROW` that contradicts
    /// itself does not compile: see [`Row::checked`].
    ///
    /// # Panics
    ///
    /// Where [`Named`] has no recipe that is entered.
    fn row() -> Row {
        const { Self::ROW.checked() }
    }
}

/// An element type that a recipe can compute in.
pub trait ComputeDtype: Clone + Copy + Default + Debug + Send + Sync + 'static {
    /// The dtype.
    const DTYPE: FloatDType;
}

impl ComputeDtype for f32 {
    const DTYPE: FloatDType = FloatDType::F32;
}

impl ComputeDtype for bf16 {
    const DTYPE: FloatDType = FloatDType::BF16;
}

impl ComputeDtype for f16 {
    const DTYPE: FloatDType = FloatDType::F16;
}

/// The name of a recipe, for programs whose users choose one. Written and read as the name alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name {
    name: &'static str,
    about: &'static str,
}

impl Name {
    /// The name, as in [`Row::name`](field@Row::name).
    pub const fn as_str(self) -> &'static str {
        self.name
    }

    /// The recipe in a line, as in [`Row::about`].
    pub const fn about(self) -> &'static str {
        self.about
    }
}

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(D::Error::custom)
    }
}

impl FromStr for Name {
    type Err = UnknownRecipe;

    fn from_str(name: &str) -> Result<Self, UnknownRecipe> {
        let mut all = NAMES.iter().copied();
        all.find(|it| it.name == name)
            .ok_or_else(|| UnknownRecipe(name.to_owned()))
    }
}

/// No recipe has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no recipe {0:?}; there are {all}", all = NAMES.iter().map(|it| it.name).collect::<Vec<_>>().join(", "))]
pub struct UnknownRecipe(String);

impl Name {
    /// The row of the recipe of this name, computing in BF16.
    ///
    /// # Panics
    ///
    /// If the name is none of [`NAMES`], as that of a recipe of one's own.
    pub fn row(self) -> Row {
        rows::<bf16>()[self.index()]
    }

    /// Its place in the list.
    fn index(self) -> usize {
        let index = NAMES.iter().position(|&it| it == self);
        index.expect("a name is of the list")
    }
}

/// Takes the list of all recipes: their modules and types, those of a module beside each other, the baseline first.
macro_rules! recipes {
    ($dollar:tt $($module:ident :: $($recipe:ident)and+,)*) => {
        $(
            mod $module;
            pub use $module::{$($recipe),+};
        )*

        /// The names of all recipes, in the order of the list.
        pub const NAMES: &[Name] = &[$($(<$recipe as Recipe>::ROW.name()),+),*];

        /// The rows of all recipes in that order, computing in `E`.
        fn rows<E: ComputeDtype>() -> &'static [Row] {
            const { &[$($(<$recipe<E> as Recipe>::ROW.checked()),+),*] }
        }

        /// Calls a macro with all recipes: `every_recipe!(each(..))` is `each! { (..) MixedPrecision BlockInt8 .. }`.
        ///
        /// For tests of each, by name. The names are those of [`recipe`](crate::recipe), each a type with the compute
        /// dtype as its first parameter.
        #[macro_export]
        macro_rules! every_recipe {
            ($dollar each:ident ($dollar ($dollar arguments:tt)*)) => {
                $dollar each! { ($dollar ($dollar arguments)*) $($($recipe)+)* }
            };
        }
    };
}

recipes! {
    $
    mixed_precision::MixedPrecision,
    block_int8::BlockInt8,
    fallback_int8::FallbackInt8,
    per_tensor_int8::PerTensorInt8,
    switch_back_int8::SwitchBackInt8,
    token_int8::TokenInt8,
    hadamard_int4::HadamardInt4,
    split_int4::SplitInt4,
    lsq_int4::LsqInt4,
    luq_int4::LuqInt4,
    current_fp8::CurrentFp8,
    delayed_fp8::DelayedFp8,
    rowwise_fp8::RowwiseFp8,
    block_fp8::BlockFp8,
    mxfp8::Mxfp8,
    mxfp4::Mxfp4,
    nvfp4::Nvfp4,
    jetfire_int8::JetfireInt8 and JetfireInt8Of64 and JetfireInt8Of128,
    coat_fp8::CoatFp8 and CoatFp8Promoted,
}
