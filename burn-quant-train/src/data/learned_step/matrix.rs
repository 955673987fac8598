//! A matrix quantized by a learned step size.

use burn_backend::{DType, Shape};
use cubecl_kernels::{
    granularity::Granularity, layout::Layout, number::Number, quantize::QuantizeSpec,
    quantize::learned_step::SATURATION_GROUP,
};

use super::ResidualRows;
use crate::data::{
    quantize::Quantized,
    tensors::{Bundle, Change, IntMeta, Outline, Tensors},
};

/// A matrix quantized by a learned step size, with what its own backward pass needs.
#[derive(Debug, Clone)]
pub struct LearnedMatrix<T: Tensors> {
    /// The codes of the transformed matrix: INT4 with the step as the scale of all.
    pub matrix: Quantized<T>,
    /// The rest, if it was asked for.
    pub rounding: Option<SavedRounding<T>>,
}

/// Which elements were clamped, and how those of some rows were rounded: see
/// [`cubecl_kernels::quantize::learned_step::SavedRounding`].
#[derive(Debug, Clone)]
pub struct SavedRounding<T: Tensors> {
    /// U8 `[rows, ceil(cols / 32)]`.
    pub saturation: T::Int,
    /// I8 `[rows with residuals, cols]`.
    pub residuals: T::Int,
    /// The rows that have residuals.
    pub sample: ResidualRows,
}

/// How the codes of a matrix are stored.
pub(crate) const fn spec(layout: Layout) -> QuantizeSpec {
    QuantizeSpec::new(Number::Int4, Granularity::Tensor).with_layout(layout)
}

impl Bundle for LearnedMatrix<Outline> {
    type On<T: Tensors> = LearnedMatrix<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        learned: LearnedMatrix<S>,
        change: &mut impl Change<S, T>,
    ) -> LearnedMatrix<T> {
        LearnedMatrix {
            matrix: Quantized::rebuild(learned.matrix, change),
            rounding: Option::<SavedRounding<Outline>>::rebuild(learned.rounding, change),
        }
    }
}

impl Bundle for SavedRounding<Outline> {
    type On<T: Tensors> = SavedRounding<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        rounding: SavedRounding<S>,
        change: &mut impl Change<S, T>,
    ) -> SavedRounding<T> {
        SavedRounding {
            saturation: change.int(rounding.saturation),
            residuals: change.int(rounding.residuals),
            sample: rounding.sample,
        }
    }
}

impl LearnedMatrix<Outline> {
    /// The outline of a matrix of this shape.
    pub(crate) fn outline(shape: [usize; 2], layout: Layout, sample: Option<ResidualRows>) -> Self {
        let [rows, cols] = shape;
        Self {
            matrix: Quantized::outline(shape, &spec(layout)),
            rounding: sample.map(|sample| SavedRounding {
                saturation: IntMeta::new(saturation_shape(shape), DType::U8),
                residuals: IntMeta::new([sample.count(rows), cols], DType::I8),
                sample,
            }),
        }
    }
}

/// The shape of the flags of clamped elements.
pub(crate) fn saturation_shape([rows, cols]: [usize; 2]) -> Shape {
    Shape::new([rows, cols.div_ceil(SATURATION_GROUP)])
}
