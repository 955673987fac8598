//! The content of a recipe, and the checks that refuse contradictions.

use burn_backend::FloatDType;

use super::{Cast, Granularity, Name, Number, Residual, Rounding, ScaleNumber};

/// A product of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// Of operands in the compute dtype.
    Compute,
    /// Of quantized operands.
    Quantized {
        /// The left operand: X, dY or Xᵀ.
        left: Cast,
        /// The right operand: W, Wᵀ or dY.
        right: Cast,
    },
}

impl Product {
    /// The product of operands quantized like this.
    pub const fn of(left: Cast, right: Cast) -> Self {
        Self::Quantized { left, right }
    }
}

/// The form in which X waits for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SavedX {
    /// As the operand of dW = Xᵀ dY, quantized in the forward pass.
    Operand,
    /// As it came. A quantized dW quantizes it in the backward pass.
    Input,
}

/// State that a layer keeps between steps, on the device.
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
    /// A fallback threshold that follows the rate of blocks that fell back (fallback-int8, appendix D, algorithm 2).
    DelayThreshold,
}

/// How the operands of a linear layer's three products are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearRow {
    /// Y = X W.
    pub forward: Product,
    /// dX = dY Wᵀ.
    pub input_gradient: Product,
    /// dW = Xᵀ dY.
    pub weight_gradient: Product,
    /// The form in which X is kept for the weight's gradient.
    pub saved_x: SavedX,
    /// The state that each layer keeps between steps.
    pub slots: &'static [Slot],
}

/// A recipe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The recipe's name, in lower case with hyphens: on command lines and in result files.
    pub name: &'static str,
    /// The recipe in a line.
    pub about: &'static str,
    /// The dtype of what is not quantized: see [`precision`](crate::backend::precision).
    pub compute: FloatDType,
    /// The products of quantized linear layers; `None`: nothing is quantized.
    pub linear: Option<LinearRow>,
}

impl Row {
    /// The name and the line about it, for the list of all recipes.
    pub(super) const fn name(&self) -> Name {
        Name {
            name: self.name,
            about: self.about,
        }
    }

    /// The row, if it does not contradict itself. Evaluated at compile time:
    ///
    /// ```compile_fail
    /// use burn_backend::FloatDType;
    /// use burn_quant_train::recipe::{Cast, Granularity, LinearRow, Number, Product, Row, SavedX};
    ///
    /// const INT8: Cast = Cast::new(Number::Int8, Granularity::Block(128));
    /// // "a weight gradient in the compute dtype needs X as it came: use `saved_x: SavedX::Input`"
    /// const ROW: Row = Row {
    ///     name: "mine",
    ///     about: "INT8 forward",
    ///     compute: FloatDType::F32,
    ///     linear: Some(LinearRow {
    ///         forward: Product::of(INT8, INT8),
    ///         input_gradient: Product::Compute,
    ///         weight_gradient: Product::Compute,
    ///         saved_x: SavedX::Operand,
    ///         slots: &[],
    ///     }),
    /// }
    /// .checked();
    /// ```
    ///
    /// With `SavedX::Input` it compiles:
    ///
    /// ```
    /// # use burn_backend::FloatDType;
    /// # use burn_quant_train::recipe::{Cast, Granularity, LinearRow, Number, Product, Row, SavedX};
    /// # const INT8: Cast = Cast::new(Number::Int8, Granularity::Block(128));
    /// # const ROW: Row = Row {
    /// #     name: "mine",
    /// #     about: "INT8 forward",
    /// #     compute: FloatDType::F32,
    /// #     linear: Some(LinearRow {
    /// #         forward: Product::of(INT8, INT8),
    /// #         input_gradient: Product::Compute,
    /// #         weight_gradient: Product::Compute,
    /// saved_x: SavedX::Input,
    /// #         slots: &[],
    /// #     }),
    /// # }
    /// # .checked();
    /// ```
    ///
    /// # Panics
    ///
    /// If it does, with a sentence that says what contradicts what.
    pub const fn checked(self) -> Self {
        assert!(
            is_name(self.name),
            "a recipe's name is of lower-case letters, digits and hyphens"
        );
        assert!(
            matches!(
                self.compute,
                FloatDType::F32 | FloatDType::BF16 | FloatDType::F16
            ),
            "the compute dtype is FP32, BF16 or FP16"
        );
        if let Some(linear) = &self.linear {
            linear.check();
        }
        self
    }
}

impl LinearRow {
    const fn check(&self) {
        let [forward, input_gradient, weight_gradient] =
            [&self.forward, &self.input_gradient, &self.weight_gradient];
        assert!(
            !(matches!(forward, Product::Compute)
                && matches!(input_gradient, Product::Compute)
                && matches!(weight_gradient, Product::Compute)),
            "a row whose three products are all in the compute dtype quantizes nothing: use `linear: None`"
        );
        if let Product::Quantized { left, right } = forward {
            left.check();
            right.check();
            self.check_residual(left);
            refuse_residual(right);
        }
        if let Product::Quantized { left, right } = input_gradient {
            left.check();
            right.check();
            refuse_residual(left);
            refuse_residual(right);
        }
        match weight_gradient {
            Product::Quantized { left, right } => {
                left.check();
                right.check();
                refuse_residual(left);
                refuse_residual(right);
            }
            Product::Compute => assert!(
                matches!(self.saved_x, SavedX::Input),
                "a weight gradient in the compute dtype needs X as it came: use `saved_x: SavedX::Input`"
            ),
        }
        self.check_slots();
    }

    /// Panics unless the residual of X in the forward product is one that kernels have.
    const fn check_residual(&self, cast: &Cast) {
        let slot = match cast.residual {
            Residual::Never => return,
            Residual::Above(slot) => Some(slot),
            Residual::Always => None,
        };
        assert!(
            matches!(cast.rounding, Rounding::Nearest),
            "a residual is of a cast to nearest: a stochastic copy has none"
        );
        assert!(
            matches!(
                (cast.number, cast.scale, cast.granularity),
                (Number::Int8, ScaleNumber::F32, Granularity::Block(_))
            ),
            "a residual is of INT8 in square blocks with FP32 scales"
        );
        if let Some(name) = slot {
            let mut found = false;
            let mut index = 0;
            while index < self.slots.len() {
                let slot = &self.slots[index];
                found |= same(slot.name, name) && matches!(slot.kind, SlotKind::DelayThreshold);
                index += 1;
            }
            assert!(
                found,
                "the threshold of a residual is in a slot of kind `SlotKind::DelayThreshold` that the row declares"
            );
        }
    }

    const fn check_slots(&self) {
        let threshold = match self.forward {
            Product::Quantized { left, .. } => match left.residual {
                Residual::Above(slot) => slot,
                Residual::Never | Residual::Always => "",
            },
            Product::Compute => "",
        };
        let mut index = 0;
        while index < self.slots.len() {
            let slot = &self.slots[index];
            let mut other = 0;
            while other < index {
                assert!(
                    !same(self.slots[other].name, slot.name),
                    "two slots of a row have the same name: records could not tell them apart"
                );
                other += 1;
            }
            match slot.kind {
                SlotKind::DelayThreshold => {
                    assert!(
                        same(slot.name, THRESHOLD),
                        "a slot of kind `SlotKind::DelayThreshold` is called `threshold`: metrics and records know it \
                         by that"
                    );
                    assert!(
                        same(slot.name, threshold),
                        "no cast of the row reads one of its slots: it would never move"
                    );
                }
            }
            index += 1;
        }
    }
}

impl Cast {
    const fn check(&self) {
        assert!(
            self.number.is_symmetric(),
            "operands are integers, E2M1, E4M3 or E5M2: the other numbers are for optimizer states"
        );
        match self.granularity {
            Granularity::Block(side) => assert!(
                matches!(side, 16 | 32 | 64 | 128),
                "blocks have side 16, 32, 64 or 128"
            ),
            Granularity::Group(size) => assert!(
                size.is_power_of_two() && 16 <= size && size <= 1024,
                "groups have a power of two of elements, from 16 to 1024"
            ),
            Granularity::Row | Granularity::Tensor => {}
        }
    }
}

const fn refuse_residual(cast: &Cast) {
    assert!(
        matches!(cast.residual, Residual::Never),
        "only X in the forward product has a residual: other operands are read transposed, or saved"
    );
}

/// True for lower-case letters, digits and hyphens.
const fn is_name(name: &str) -> bool {
    let name = name.as_bytes();
    let mut index = 0;
    while index < name.len() {
        if !(name[index].is_ascii_lowercase()
            || name[index].is_ascii_digit()
            || name[index] == b'-')
        {
            return false;
        }
        index += 1;
    }
    !name.is_empty()
}

/// True if two names are the same; `str` has no such `const fn`.
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use rstest::rstest;

    use super::*;

    const NEAREST: Cast = Cast::new(Number::Int8, Granularity::Block(32));
    const SLOT: Slot = Slot {
        name: "threshold",
        kind: SlotKind::DelayThreshold,
    };
    const GOOD: LinearRow = LinearRow {
        forward: Product::of(NEAREST.with_residual(Residual::Above("threshold")), NEAREST),
        input_gradient: Product::of(NEAREST.stochastic(), NEAREST),
        weight_gradient: Product::of(NEAREST.stochastic(), NEAREST.stochastic()),
        saved_x: SavedX::Operand,
        slots: &[SLOT],
    };

    fn row(linear: LinearRow) -> Row {
        Row {
            name: "test",
            about: "a row of a test",
            compute: FloatDType::F32,
            linear: Some(linear),
        }
    }

    #[test]
    fn rows_of_every_kind_are_accepted() {
        let per_row = Cast::new(Number::Int8, Granularity::Row);
        let rows = [
            GOOD,
            LinearRow {
                forward: Product::of(NEAREST.with_residual(Residual::Always), NEAREST),
                slots: &[],
                ..GOOD
            },
            LinearRow {
                forward: Product::of(per_row, per_row),
                input_gradient: Product::Compute,
                weight_gradient: Product::Compute,
                saved_x: SavedX::Input,
                slots: &[],
            },
        ];
        for linear in rows {
            assert_eq!(row(linear).checked(), row(linear));
        }
    }

    const ABOVE: Residual = Residual::Above("threshold");

    #[rstest]
    #[case::nothing("quantizes nothing", LinearRow {
        forward: Product::Compute,
        input_gradient: Product::Compute,
        weight_gradient: Product::Compute,
        saved_x: SavedX::Input,
        slots: &[],
    })]
    #[case::no_input("needs X as it came", LinearRow { weight_gradient: Product::Compute, ..GOOD })]
    #[case::stochastic_residual("of a cast to nearest", LinearRow {
        forward: Product::of(NEAREST.stochastic().with_residual(ABOVE), NEAREST),
        ..GOOD
    })]
    #[case::residual_of_rows("INT8 in square blocks", LinearRow {
        forward: Product::of(Cast::new(Number::Int8, Granularity::Row).with_residual(ABOVE), NEAREST),
        ..GOOD
    })]
    #[case::no_slot("a slot of kind", LinearRow { slots: &[], ..GOOD })]
    #[case::other_slot("a slot of kind", LinearRow {
        forward: Product::of(NEAREST.with_residual(Residual::Above("limit")), NEAREST),
        ..GOOD
    })]
    #[case::unread_slot("no cast of the row reads", LinearRow { forward: Product::of(NEAREST, NEAREST), ..GOOD })]
    #[case::named_slot("is called `threshold`", LinearRow {
        forward: Product::of(NEAREST.with_residual(Residual::Above("limit")), NEAREST),
        slots: &[Slot { name: "limit", ..SLOT }],
        ..GOOD
    })]
    #[case::two_slots("the same name", LinearRow { slots: &[SLOT, SLOT], ..GOOD })]
    #[case::residual_of_w("only X in the forward product", LinearRow {
        forward: Product::of(NEAREST, NEAREST.with_residual(ABOVE)),
        ..GOOD
    })]
    #[case::residual_of_dy("only X in the forward product", LinearRow {
        weight_gradient: Product::of(NEAREST, NEAREST.with_residual(Residual::Always)),
        ..GOOD
    })]
    #[case::scaled_residual("with FP32 scales", LinearRow {
        forward: Product::of(
            NEAREST.with_scale(ScaleNumber::E8M0).with_residual(Residual::Always),
            NEAREST,
        ),
        ..GOOD
    })]
    #[case::number("for optimizer states", LinearRow {
        input_gradient: Product::of(Cast::new(Number::Square, Granularity::Row), NEAREST),
        ..GOOD
    })]
    #[case::block("blocks have side", LinearRow {
        input_gradient: Product::of(Cast::new(Number::Int8, Granularity::Block(48)), NEAREST),
        ..GOOD
    })]
    #[case::group("groups have a power of two", LinearRow {
        input_gradient: Product::of(NEAREST, Cast::new(Number::Int8, Granularity::Group(8))),
        ..GOOD
    })]
    fn contradictions_are_refused_with_a_sentence(#[case] says: &str, #[case] linear: LinearRow) {
        let panic = catch_unwind(|| row(linear).checked()).expect_err("refused");
        let text = panic.downcast_ref::<&str>().expect("a sentence");
        assert!(text.contains(says), "{text:?} does not say {says:?}");
    }

    #[rstest]
    #[case::capitals("lower-case", Row { name: "Test", ..row(GOOD) })]
    #[case::no_name("lower-case", Row { name: "", ..row(GOOD) })]
    #[case::doubles("FP32, BF16 or FP16", Row { compute: FloatDType::F64, ..row(GOOD) })]
    fn names_and_dtypes_are_checked(#[case] says: &str, #[case] row: Row) {
        let panic = catch_unwind(|| row.checked()).expect_err("refused");
        let text = panic.downcast_ref::<&str>().expect("a sentence");
        assert!(text.contains(says), "{text:?} does not say {says:?}");
    }
}
