//! The checks that refuse rows that contradict themselves.

use burn_backend::FloatDType;

use super::{
    Cast, Flow, Granularity, LinearRow, Number, Product, Residual, Rounding, Row, Sampling, SavedX,
    ScaleNumber, ScaleSource, SlotKind, THRESHOLD, Transform, row::history_of,
};
use crate::data::product::Accumulation;

impl Row {
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
    ///     context: None,
    ///     flow: None,
    ///     embedding: None,
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
    /// #     context: None,
    /// #     flow: None,
    /// #     embedding: None,
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
        if let Some(context) = &self.context {
            context.check();
        }
        if let Some(flow) = &self.flow {
            flow.check();
            assert!(
                flow.gradients.is_none() || self.gives_back_scaled(),
                "the gradients of a flow are given back by linear layers whose scales come from the data"
            );
        }
        if let Some(linear) = &self.linear {
            linear.check();
        }
        if let Some(embedding) = &self.embedding {
            self.check_embedding(embedding);
        }
        self
    }
}

impl Row {
    const fn check_embedding(&self, cast: &Cast) {
        let step = match self.embedding_step() {
            Some(step) => step,
            None => panic!("the rows of embeddings are rounded by a learned step size"),
        };
        cast.check_learned();
        assert!(
            matches!(cast.transform, Transform::Identity),
            "the rows of embeddings are rounded without a transform: no product would cancel it"
        );
        assert!(
            match &self.linear {
                Some(linear) => linear.declares(step, SlotKind::StepSize),
                None => false,
            },
            "the step size of embeddings is in a slot of kind `SlotKind::StepSize` of the row for linear layers"
        );
    }

    /// True if linear layers are quantized, by other scales than learned ones.
    const fn gives_back_scaled(&self) -> bool {
        match &self.linear {
            Some(linear) => linear.forward_step(0).is_empty(),
            None => false,
        }
    }
}

impl Flow {
    const fn check(&self) {
        self.activations.check_flow();
        assert!(
            matches!(self.activations.rounding, Rounding::Nearest),
            "the activations of a flow are rounded to nearest: one copy serves both passes"
        );
        if let Some(gradients) = &self.gradients {
            gradients.check_flow();
        }
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
        check_accumulation(&self.forward);
        check_accumulation(&self.input_gradient);
        check_accumulation(&self.weight_gradient);
        match !self.forward_step(0).is_empty() {
            true => self.check_learned(),
            false => self.check_scaled(),
        }
        self.check_slots();
    }

    /// Panics unless the products are of operands whose scales come from the data, of this step or of earlier ones.
    const fn check_scaled(&self) {
        if let Product::Quantized { left, right, .. } = &self.forward {
            left.check_unlearned();
            right.check_unlearned();
            self.check_residual(left);
            refuse_residual(right);
        }
        if let Product::Quantized { left, right, .. } = &self.input_gradient {
            left.check_unlearned();
            right.check_unlearned();
            refuse_residual(left);
            refuse_residual(right);
        }
        match &self.weight_gradient {
            Product::Quantized { left, right, .. } => {
                left.check_unlearned();
                right.check_unlearned();
                refuse_residual(left);
                refuse_residual(right);
            }
            Product::Compute => assert!(
                matches!(self.saved_x, SavedX::Input),
                "a weight gradient in the compute dtype needs X as it came: use `saved_x: SavedX::Input`"
            ),
        }
        assert!(
            !(is_sampled(&self.forward)
                || is_sampled(&self.input_gradient)
                || is_sampled(&self.weight_gradient)),
            "rows are sampled in the backward products of rows with learned step sizes"
        );
        self.check_histories();
        check_rotation(&self.forward);
        check_rotation(&self.input_gradient);
        check_rotation(&self.weight_gradient);
    }

    /// Panics unless X, W and dY have a history each, if any, that the row declares.
    const fn check_histories(&self) {
        let [x, weight, gradient] = self.histories();
        assert!(
            (x.is_empty() || self.declares(x, SlotKind::AmaxHistory))
                && (weight.is_empty() || self.declares(weight, SlotKind::AmaxHistory))
                && (gradient.is_empty() || self.declares(gradient, SlotKind::AmaxHistory)),
            "a history of maxima is in a slot of kind `SlotKind::AmaxHistory` that the row declares"
        );
        assert!(
            differ(x, weight) && differ(x, gradient) && differ(weight, gradient),
            "X, W and dY have histories of their own: name a slot for each"
        );
        let [of_x, of_weight] = self.forward.operands();
        let [of_gradient, of_weight_again] = self.input_gradient.operands();
        let [of_x_again, of_gradient_again] = self.weight_gradient.operands();
        assert!(
            is_history(of_x, x)
                && is_history(of_x_again, x)
                && is_history(of_weight, weight)
                && is_history(of_weight_again, weight)
                && is_history(of_gradient, gradient)
                && is_history(of_gradient_again, gradient),
            "a matrix has one history: both of its casts name the same slot"
        );
        assert!(
            history_of(of_x_again).is_empty() || matches!(self.saved_x, SavedX::Operand),
            "X is scaled by its history in the forward pass: use `saved_x: SavedX::Operand`"
        );
    }

    /// Panics unless the forward operands have learned step sizes and the backward products read them again.
    const fn check_learned(&self) {
        let (
            Product::Quantized {
                left: x,
                right: weight,
                sampling: Sampling::All,
                accumulation: _,
            },
            Product::Quantized {
                left: dy,
                right: weight_again,
                sampling,
                accumulation: _,
            },
            Product::Quantized {
                left: x_again,
                right: dy_again,
                sampling: sampling_again,
                accumulation: _,
            },
        ) = (&self.forward, &self.input_gradient, &self.weight_gradient)
        else {
            panic!(
                "a row with learned step sizes quantizes all three products, and samples none but the gradients'"
            )
        };
        x.check_learned();
        weight.check_learned();
        assert!(
            !matches!(x.transform, Transform::RandomHadamard),
            "learned step sizes are of operands without a transform, or of one whose size is in a slot"
        );
        assert!(
            same_transform(x, weight),
            "X and W have the same transform: it cancels in their product"
        );
        assert!(
            same_learned(x, x_again) && same_learned(weight, weight_again),
            "with learned step sizes the gradients' products read X and W as the forward product does"
        );
        dy.check_scaled();
        dy_again.check_scaled();
        assert!(
            same_gradient(dy, dy_again) && sampling.is_leverage() == sampling_again.is_leverage(),
            "with learned step sizes both gradients' products read dY in one form"
        );
        match dy.residual {
            Residual::Never => {}
            Residual::Above(_) => {
                panic!("dY has a residual always or never: there is no threshold for it")
            }
            Residual::Always => assert!(
                matches!(dy.number, Number::Int4),
                "the residual of dY is that of bit splitting, of two INT4 parts"
            ),
        }
        assert!(
            !sampling.is_leverage() || matches!(dy.residual, Residual::Always),
            "leverage scores sample the parts of bit splitting: dY has a residual always"
        );
        assert!(
            matches!(self.saved_x, SavedX::Operand),
            "with learned step sizes X is saved as the operand of the forward product"
        );
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
            assert!(
                self.declares(name, SlotKind::DelayThreshold),
                "the threshold of a residual is in a slot of kind `SlotKind::DelayThreshold` that the row declares"
            );
        }
    }

    /// The slot of the step size of the forward product's left or right operand; an empty name if there is none.
    const fn forward_step(&self, operand: usize) -> &'static str {
        match &self.forward {
            Product::Compute => "",
            Product::Quantized { left, right, .. } => match [left.source, right.source][operand] {
                ScaleSource::Step(slot) => slot,
                ScaleSource::Data | ScaleSource::History(_) => "",
            },
        }
    }

    /// The slot of the size of the forward product's transform; an empty name if there is none.
    const fn hadamard(&self) -> &'static str {
        match &self.forward {
            Product::Compute => "",
            Product::Quantized { left, .. } => match left.transform {
                Transform::Hadamard(slot) => slot,
                Transform::Identity | Transform::RandomHadamard => "",
            },
        }
    }

    /// True if the row declares a slot of this name and kind.
    const fn declares(&self, name: &str, kind: SlotKind) -> bool {
        let mut index = 0;
        while index < self.slots.len() {
            let slot = &self.slots[index];
            if same(slot.name, name) && slot.kind as u8 == kind as u8 {
                return true;
            }
            index += 1;
        }
        false
    }

    const fn check_slots(&self) {
        let threshold = match self.forward {
            Product::Quantized { left, .. } => match left.residual {
                Residual::Above(slot) => slot,
                Residual::Never | Residual::Always => "",
            },
            Product::Compute => "",
        };
        let [x, weight] = [self.forward_step(0), self.forward_step(1)];
        assert!(
            (x.is_empty() || self.declares(x, SlotKind::StepSize))
                && (weight.is_empty() || self.declares(weight, SlotKind::StepSize)),
            "a learned step size is in a slot of kind `SlotKind::StepSize` that the row declares"
        );
        let hadamard = self.hadamard();
        assert!(
            hadamard.is_empty() || self.declares(hadamard, SlotKind::HadamardSize),
            "the size of a transform is in a slot of kind `SlotKind::HadamardSize` that the row declares"
        );
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
                SlotKind::StepSize => {
                    let of = [self.forward_step(0), self.forward_step(1)];
                    assert!(
                        same(slot.name, of[0]) || same(slot.name, of[1]),
                        "no cast of the row reads one of its slots: it would never move"
                    );
                    assert!(
                        !same(of[0], of[1]),
                        "X and W have step sizes of their own: name two slots"
                    );
                }
                SlotKind::AmaxHistory => {
                    let [x, weight, gradient] = self.histories();
                    assert!(
                        same(slot.name, x) || same(slot.name, weight) || same(slot.name, gradient),
                        "no cast of the row reads one of its slots: it would never move"
                    );
                }
                SlotKind::HadamardSize => {
                    assert!(
                        same(slot.name, self.hadamard()),
                        "no cast of the row reads one of its slots: it would never move"
                    );
                }
            }
            index += 1;
        }
    }
}

impl Sampling {
    const fn is_leverage(self) -> bool {
        matches!(self, Self::LeverageScore)
    }
}

impl Cast {
    /// Panics unless the scales come from the data and the operand is one that kernels quantize.
    const fn check_scaled(&self) {
        assert!(
            matches!(self.source, ScaleSource::Data),
            "learned step sizes are of the forward product's operands, of both"
        );
        assert!(
            !matches!(self.transform, Transform::Hadamard(_)),
            "a transform whose size is in a slot is of operands with learned step sizes"
        );
        assert!(
            matches!(
                (self.transform, self.granularity),
                (Transform::Identity, _) | (Transform::RandomHadamard, Granularity::Group(_))
            ),
            "a random Hadamard transform is of operands in groups, which lie along the dimension that is summed over"
        );
        self.check();
    }

    /// Panics unless an operator of a flow can read such a copy.
    const fn check_flow(&self) {
        assert!(
            matches!(
                self.granularity,
                Granularity::Block(_) | Granularity::Group(_)
            ),
            "a flow has scales for square blocks or for groups"
        );
        assert!(
            matches!(self.source, ScaleSource::Data),
            "a flow has scales from the data: between layers there is no slot"
        );
        assert!(
            matches!(
                (self.transform, self.residual),
                (Transform::Identity, Residual::Never)
            ),
            "a flow has no transform and no residual: operators read the values themselves"
        );
        self.check_scaled();
    }

    /// Panics unless the scales come from the data, of this step or of earlier ones, and the operand is one that
    /// kernels quantize.
    const fn check_unlearned(&self) {
        if let ScaleSource::History(_) = self.source {
            assert!(
                matches!(
                    (self.scale, self.granularity),
                    (ScaleNumber::F32, Granularity::Tensor)
                ),
                "a history of maxima scales whole matrices, with FP32 scales"
            );
            assert!(
                matches!(self.residual, Residual::Never),
                "an operand with a history of maxima has no residual"
            );
            Self {
                source: ScaleSource::Data,
                ..*self
            }
            .check_scaled();
        } else {
            self.check_scaled();
        }
    }

    /// Panics unless the operand has a learned step size that kernels quantize by.
    const fn check_learned(&self) {
        assert!(
            matches!(self.source, ScaleSource::Step(_)),
            "either both operands of the forward product have learned step sizes, or none"
        );
        assert!(
            matches!(
                (
                    self.number,
                    self.scale,
                    self.granularity,
                    self.rounding,
                    self.residual
                ),
                (
                    Number::Int4,
                    ScaleNumber::F32,
                    Granularity::Tensor,
                    Rounding::Nearest,
                    Residual::Never
                )
            ),
            "learned step sizes are of INT4 to nearest, one FP32 step for the matrix"
        );
    }

    const fn check(&self) {
        assert!(
            self.number.is_symmetric(),
            "operands are integers, E2M1, E3M0, E4M3 or E5M2: the other numbers are for optimizer states"
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

/// Panics unless both operands have the random Hadamard transform, or none.
const fn check_rotation(product: &Product) {
    if let Product::Quantized { left, right, .. } = product {
        assert!(
            same_transform(left, right),
            "both operands of a product have a random Hadamard transform, or none: it cancels in their product"
        );
    }
}

/// Panics unless fast accumulation is of FP8 whose scales cover all that is added up.
const fn check_accumulation(product: &Product) {
    const fn may_be_fast(cast: &Cast) -> bool {
        cast.number.is_fp8() && matches!(cast.granularity, Granularity::Row | Granularity::Tensor)
    }
    if let Product::Quantized {
        left,
        right,
        accumulation: Accumulation::Fast,
        ..
    } = product
    {
        assert!(
            may_be_fast(left) && may_be_fast(right),
            "fast accumulation is of FP8 with scales of rows or of whole matrices"
        );
    }
}

/// True unless both names are those of one slot.
const fn differ(a: &str, b: &str) -> bool {
    a.is_empty() || !same(a, b)
}

/// True if the cast is scaled by no other history than this one.
const fn is_history(cast: Option<Cast>, slot: &str) -> bool {
    let own = history_of(cast);
    own.is_empty() || same(own, slot)
}

const fn is_sampled(product: &Product) -> bool {
    match product {
        Product::Compute => false,
        Product::Quantized { sampling, .. } => sampling.is_leverage(),
    }
}

const fn same_transform(a: &Cast, b: &Cast) -> bool {
    match (a.transform, b.transform) {
        (Transform::Identity, Transform::Identity) => true,
        (Transform::Hadamard(a), Transform::Hadamard(b)) => same(a, b),
        (Transform::RandomHadamard, Transform::RandomHadamard) => true,
        (Transform::Identity, Transform::Hadamard(_) | Transform::RandomHadamard)
        | (Transform::Hadamard(_), Transform::Identity | Transform::RandomHadamard)
        | (Transform::RandomHadamard, Transform::Identity | Transform::Hadamard(_)) => false,
    }
}

/// True if two casts with learned step sizes are one.
const fn same_learned(a: &Cast, b: &Cast) -> bool {
    match (a.source, b.source) {
        (ScaleSource::Step(of_a), ScaleSource::Step(of_b)) => {
            b.check_learned();
            same(of_a, of_b) && same_transform(a, b)
        }
        (ScaleSource::Data | ScaleSource::History(_), _)
        | (_, ScaleSource::Data | ScaleSource::History(_)) => false,
    }
}

/// True if two casts of a whole matrix are one.
const fn same_gradient(a: &Cast, b: &Cast) -> bool {
    let whole = matches!(
        (a.scale, b.scale, a.granularity, b.granularity),
        (
            ScaleNumber::F32,
            ScaleNumber::F32,
            Granularity::Tensor,
            Granularity::Tensor
        )
    );
    let number = a.number.largest() == b.number.largest() && a.number.bits() == b.number.bits();
    let rounding =
        matches!(a.rounding, Rounding::Nearest) == matches!(b.rounding, Rounding::Nearest);
    let residual = matches!(a.residual, Residual::Always) == matches!(b.residual, Residual::Always);
    whole && number && rounding && residual
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

    use super::{super::Slot, *};

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
            context: None,
            flow: None,
            embedding: None,
            linear: Some(linear),
        }
    }

    fn flowing(activations: Cast, gradients: Option<Cast>) -> Row {
        Row {
            flow: Some(Flow {
                activations,
                gradients,
            }),
            ..row(GOOD)
        }
    }

    fn embedding(cast: Cast, linear: LinearRow) -> Row {
        Row {
            embedding: Some(cast),
            ..row(linear)
        }
    }

    #[test]
    fn rounded_embeddings_are_accepted() {
        let row = embedding(INT4.with_step("step-w"), LEARNED);
        assert_eq!(row.checked(), row);
    }

    #[test]
    fn flows_are_accepted() {
        for gradients in [None, Some(NEAREST.stochastic()), Some(GROUP)] {
            let row = flowing(NEAREST, gradients);
            assert_eq!(row.checked(), row);
        }
    }

    #[test]
    fn rows_of_every_kind_are_accepted() {
        let per_row = Cast::new(Number::Int8, Granularity::Row);
        let rows = [
            GOOD,
            LEARNED,
            DELAYED,
            LinearRow {
                weight_gradient: Product::of(
                    GROUP.with_random_hadamard(),
                    GROUP.stochastic().with_random_hadamard(),
                ),
                ..GOOD
            },
            LinearRow {
                weight_gradient: Product::of(E4M3, DELAYED_DY.stochastic()),
                ..DELAYED
            },
            LinearRow {
                input_gradient: Product::of(DY, W),
                weight_gradient: Product::of(X, DY),
                ..LEARNED
            },
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

    const STEPS: [Slot; 2] = [
        Slot {
            name: "step-x",
            kind: SlotKind::StepSize,
        },
        Slot {
            name: "step-w",
            kind: SlotKind::StepSize,
        },
    ];
    const SIZE: Slot = Slot {
        name: "size",
        kind: SlotKind::HadamardSize,
    };
    const INT4: Cast = Cast::new(Number::Int4, Granularity::Tensor);
    const X: Cast = INT4.with_step("step-x").with_hadamard("size");
    const W: Cast = INT4.with_step("step-w").with_hadamard("size");
    const DY: Cast = INT4.stochastic().with_residual(Residual::Always);
    const LEARNED: LinearRow = LinearRow {
        forward: Product::of(X, W),
        input_gradient: Product::of(DY, W).sampled(Sampling::LeverageScore),
        weight_gradient: Product::of(X, DY).sampled(Sampling::LeverageScore),
        saved_x: SavedX::Operand,
        slots: &[STEPS[0], STEPS[1], SIZE],
    };

    const GROUP: Cast = Cast::new(Number::E2M1, Granularity::Group(16));
    const HISTORIES: [Slot; 3] = [
        Slot {
            name: "amax-x",
            kind: SlotKind::AmaxHistory,
        },
        Slot {
            name: "amax-w",
            kind: SlotKind::AmaxHistory,
        },
        Slot {
            name: "amax-dy",
            kind: SlotKind::AmaxHistory,
        },
    ];
    const E4M3: Cast = Cast::new(Number::E4M3, Granularity::Tensor);
    const DELAYED_X: Cast = E4M3.with_history("amax-x");
    const DELAYED_W: Cast = E4M3.with_history("amax-w");
    const DELAYED_DY: Cast = E4M3.with_history("amax-dy");
    const DELAYED: LinearRow = LinearRow {
        forward: Product::of(DELAYED_X, DELAYED_W),
        input_gradient: Product::of(DELAYED_DY, DELAYED_W),
        weight_gradient: Product::of(DELAYED_X, DELAYED_DY),
        saved_x: SavedX::Operand,
        slots: &HISTORIES,
    };

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
    #[case::fast_int8("fast accumulation is of FP8", LinearRow {
        input_gradient: Product::of(NEAREST, NEAREST).fast(),
        ..GOOD
    })]
    #[case::fast_groups("scales of rows or of whole matrices", LinearRow {
        input_gradient: Product::of(
            Cast::new(Number::E5M2, Granularity::Tensor),
            Cast::new(Number::E4M3, Granularity::Group(128)),
        )
        .fast(),
        ..GOOD
    })]
    #[case::block("blocks have side", LinearRow {
        input_gradient: Product::of(Cast::new(Number::Int8, Granularity::Block(48)), NEAREST),
        ..GOOD
    })]
    #[case::one_step("either both operands", LinearRow { forward: Product::of(X, INT4), ..LEARNED })]
    #[case::learned_int8("are of INT4 to nearest", LinearRow {
        forward: Product::of(Cast { number: Number::Int8, ..X }, W),
        ..LEARNED
    })]
    #[case::one_transform("X and W have the same transform", LinearRow {
        forward: Product::of(X, INT4.with_step("step-w")),
        ..LEARNED
    })]
    #[case::other_weight("as the forward product does", LinearRow {
        input_gradient: Product::of(DY, INT4.with_step("step-x").with_hadamard("size"))
            .sampled(Sampling::LeverageScore),
        ..LEARNED
    })]
    #[case::compute_gradient("quantizes all three products", LinearRow {
        input_gradient: Product::Compute,
        ..LEARNED
    })]
    #[case::two_gradients("read dY in one form", LinearRow {
        weight_gradient: Product::of(X, INT4).sampled(Sampling::LeverageScore),
        ..LEARNED
    })]
    #[case::split_int8("of two INT4 parts", LinearRow {
        input_gradient: Product::of(Cast { number: Number::Int8, ..DY }, W),
        weight_gradient: Product::of(X, Cast { number: Number::Int8, ..DY }),
        ..LEARNED
    })]
    #[case::sampled_whole("leverage scores sample the parts", LinearRow {
        input_gradient: Product::of(INT4, W).sampled(Sampling::LeverageScore),
        weight_gradient: Product::of(X, INT4).sampled(Sampling::LeverageScore),
        ..LEARNED
    })]
    #[case::learned_input("saved as the operand", LinearRow { saved_x: SavedX::Input, ..LEARNED })]
    #[case::no_step("in a slot of kind", LinearRow { slots: &[STEPS[0], SIZE], ..LEARNED })]
    #[case::no_size("in a slot of kind", LinearRow { slots: &STEPS, ..LEARNED })]
    #[case::one_slot("step sizes of their own", LinearRow {
        forward: Product::of(X, X),
        input_gradient: Product::of(DY, X).sampled(Sampling::LeverageScore),
        slots: &[STEPS[0], SIZE],
        ..LEARNED
    })]
    #[case::unread_size("no cast of the row reads", LinearRow { slots: &[SLOT, SIZE], ..GOOD })]
    #[case::sampled_int8("rows are sampled in the backward products", LinearRow {
        input_gradient: GOOD.input_gradient.sampled(Sampling::LeverageScore),
        ..GOOD
    })]
    #[case::one_rotation("it cancels in their product", LinearRow {
        weight_gradient: Product::of(GROUP.with_random_hadamard(), GROUP),
        ..GOOD
    })]
    #[case::rotated_blocks("of operands in groups", LinearRow {
        weight_gradient: Product::of(NEAREST.with_random_hadamard(), NEAREST.with_random_hadamard()),
        ..GOOD
    })]
    #[case::rotated_gradient("of operands in groups", LinearRow {
        input_gradient: Product::of(DY.with_random_hadamard(), W).sampled(Sampling::LeverageScore),
        weight_gradient: Product::of(X, DY.with_random_hadamard()).sampled(Sampling::LeverageScore),
        ..LEARNED
    })]
    #[case::rotated_steps("whose size is in a slot", LinearRow {
        forward: Product::of(X.with_random_hadamard(), W.with_random_hadamard()),
        ..LEARNED
    })]
    #[case::transform("of operands with learned step sizes", LinearRow {
        input_gradient: Product::of(NEAREST.with_hadamard("size"), NEAREST),
        ..GOOD
    })]
    #[case::step_of_gradient("of the forward product's operands", LinearRow {
        input_gradient: Product::of(NEAREST.with_step("step-x"), NEAREST),
        ..GOOD
    })]
    #[case::no_history("`SlotKind::AmaxHistory`", LinearRow { slots: &[HISTORIES[0], HISTORIES[1]], ..DELAYED })]
    #[case::unread_history("no cast of the row reads", LinearRow { slots: &[SLOT, HISTORIES[0]], ..GOOD })]
    #[case::one_history("histories of their own", LinearRow {
        forward: Product::of(DELAYED_X, DELAYED_X),
        input_gradient: Product::of(DELAYED_DY, DELAYED_X),
        ..DELAYED
    })]
    #[case::two_histories("both of its casts name the same slot", LinearRow {
        input_gradient: Product::of(DELAYED_DY, E4M3.with_history("other")),
        ..DELAYED
    })]
    #[case::history_of_rows("scales whole matrices", LinearRow {
        forward: Product::of(Cast::new(Number::E4M3, Granularity::Row).with_history("amax-x"), DELAYED_W),
        ..DELAYED
    })]
    #[case::history_of_powers("with FP32 scales", LinearRow {
        forward: Product::of(DELAYED_X.with_scale(ScaleNumber::E8M0), DELAYED_W),
        ..DELAYED
    })]
    #[case::history_of_residual("has no residual", LinearRow {
        forward: Product::of(DELAYED_X.with_residual(Residual::Always), DELAYED_W),
        ..DELAYED
    })]
    #[case::late_history("use `saved_x: SavedX::Operand`", LinearRow { saved_x: SavedX::Input, ..DELAYED })]
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
    #[case::flow_of_matrices("blocks or for groups", flowing(E4M3, None))]
    #[case::flow_of_slots("scales from the data", flowing(GROUP.with_history("amax-x"), None))]
    #[case::flow_with_residual("no residual", flowing(NEAREST.with_residual(Residual::Always), None))]
    #[case::flow_without_layers("given back by linear layers", Row { linear: None, ..flowing(NEAREST, Some(NEAREST)) })]
    #[case::flow_of_learned("given back by linear layers", Row { linear: Some(LEARNED), ..flowing(NEAREST, Some(NEAREST)) })]
    #[case::embedding_of_data("by a learned step size", embedding(INT4, LEARNED))]
    #[case::embedding_at_random("to nearest", embedding(INT4.with_step("step-w").stochastic(), LEARNED))]
    #[case::embedding_of_transform("without a transform", embedding(W, LEARNED))]
    #[case::embedding_without_slot("in a slot of kind", embedding(INT4.with_step("step-e"), LEARNED))]
    #[case::embedding_without_slots("in a slot of kind", embedding(INT4.with_step("step-w"), GOOD))]
    #[case::flow_at_random("rounded to nearest", flowing(NEAREST.stochastic(), None))]
    #[case::flow_of_rows_back(
        "blocks or for groups",
        flowing(NEAREST, Some(Cast::new(Number::Int8, Granularity::Row)))
    )]
    fn names_dtypes_and_flows_are_checked(#[case] says: &str, #[case] row: Row) {
        let panic = catch_unwind(|| row.checked()).expect_err("refused");
        let text = panic.downcast_ref::<&str>().expect("a sentence");
        assert!(text.contains(says), "{text:?} does not say {says:?}");
    }
}
