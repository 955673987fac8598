//! The copy of a matrix that a product reads, from the cast and the side of the product.

use burn_backend::tensor::FloatTensor;
use cubecl_kernels::{granularity, rounding};

use crate::{
    data::{
        Kernels, Layout, StochasticKey,
        quantize::{DelayedMaximum, Format, MatrixSource, Operand, QuantizeSpec, Quantized},
        random_hadamard::transformed_cols,
        tensors::{Outline, Tensors},
    },
    layer::tag::CopyKey,
    recipe::{Cast, Granularity, Rounding, ScaleSource, Transform},
};

/// A matrix as an operand of a quantized product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Factor {
    /// The copy that the product reads.
    pub key: CopyKey,
    /// True if the operand is the transpose of the matrix.
    transpose: bool,
}

impl Factor {
    /// The matrix, or its transpose, as the left operand: the product sums along the operand's columns.
    pub fn left(cast: &Cast, transpose: bool) -> Self {
        Self::new(cast, transpose, !transpose)
    }

    /// The matrix, or its transpose, as the right operand: the product sums along the operand's rows.
    pub fn right(cast: &Cast, transpose: bool) -> Self {
        Self::new(cast, transpose, transpose)
    }

    fn new(cast: &Cast, transpose: bool, sums_columns: bool) -> Self {
        // Square blocks and whole matrices turn with the matrix. A row of the operand is a row or a column of the
        // matrix. A group lies along the rows of the quantized matrix, so the transpose is quantized where the product
        // does not sum along the matrix's rows.
        use granularity::Granularity as Of;
        let (granularity, of_transpose) = match cast.granularity {
            Granularity::Block(side) => (Of::Block(side), false),
            Granularity::Tensor => (Of::Tensor, false),
            Granularity::Row if sums_columns => (Of::Token, false),
            Granularity::Row => (Of::Channel, false),
            Granularity::Group(size) => (Of::Group(size), !sums_columns),
        };
        Self {
            key: CopyKey {
                format: Format {
                    number: cast.number,
                    scale: cast.scale,
                    granularity,
                },
                rounding: cast.rounding,
                of_transpose,
                learned: None,
                rotated: match cast.transform {
                    Transform::RandomHadamard => true,
                    Transform::Identity | Transform::Hadamard(_) => false,
                },
                history: match cast.source {
                    ScaleSource::History(slot) => Some(slot),
                    ScaleSource::Data | ScaleSource::Step(_) => None,
                },
                // Products read along their inner dimension.
                layout: match sums_columns != of_transpose {
                    true => Layout::RowMajor,
                    false => Layout::Transposed,
                },
            },
            transpose,
        }
    }

    /// The outline of the copy of a matrix of this shape, in this layout.
    pub fn outline(&self, [rows, cols]: [usize; 2], layout: Layout) -> Quantized<Outline> {
        let [rows, cols] = match self.key.of_transpose {
            true => [cols, rows],
            false => [rows, cols],
        };
        let shape = match self.key.rotated {
            true => [rows, transformed_cols(cols)],
            false => [rows, cols],
        };
        let Format {
            number,
            scale,
            granularity,
        } = self.key.format;
        let spec = QuantizeSpec {
            number,
            scale,
            granularity,
            rounding: rounding::Rounding::Nearest,
            layout,
        };
        match self.key.history {
            None => Quantized::outline(shape, &spec),
            Some(_) => Quantized::delayed_outline(shape, &spec),
        }
    }

    /// True if the copy is made of the matrix as it is, not of its transpose or after a transform.
    pub fn takes_matrix(&self) -> bool {
        !self.key.of_transpose && !self.key.rotated
    }

    /// True if copies for both hold the same numbers, in whatever order, where both round to nearest or draw alike.
    pub fn is_same_as(&self, other: &Self) -> bool {
        let any = |key| CopyKey {
            layout: Layout::Both,
            ..key
        };
        any(self.key) == any(other.key)
    }

    /// The operand that this copy of the matrix is.
    pub fn operand<'a, T: Tensors>(&self, copy: &'a Quantized<T>) -> Operand<'a, T> {
        Operand {
            matrix: copy,
            transpose: self.transpose != self.key.of_transpose,
        }
    }
}

/// A copy that is to be made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Make {
    /// The operand that it will be.
    pub factor: Factor,
    /// The random numbers of its rounding, if that is stochastic.
    key: Option<StochasticKey>,
}

impl Make {
    /// `key` gives the random numbers, if they are needed.
    pub fn new(factor: Factor, key: impl FnOnce() -> StochasticKey) -> Self {
        Self {
            factor,
            key: (factor.key.rounding == Rounding::Stochastic).then(key),
        }
    }

    /// The same with the random numbers that `draw` has for these, if they are needed.
    pub fn drawn(self, draw: impl FnOnce(StochasticKey) -> StochasticKey) -> Self {
        Self {
            key: self.key.map(draw),
            ..self
        }
    }

    /// How the copy is quantized, in this layout.
    pub fn spec(&self, layout: Layout) -> QuantizeSpec {
        let Format {
            number,
            scale,
            granularity,
        } = self.factor.key.format;
        QuantizeSpec {
            number,
            scale,
            granularity,
            rounding: match self.key {
                None => rounding::Rounding::Nearest,
                Some(key) => rounding::Rounding::Stochastic(key),
            },
            layout,
        }
    }

    /// True if the copy is made of the matrix as it is, not of its transpose or after a transform.
    pub fn takes_matrix(&self) -> bool {
        self.factor.takes_matrix()
    }

    /// True if a history of maxima scales the copy.
    pub fn has_history(&self) -> bool {
        self.factor.key.history.is_some()
    }

    /// True if two copies hold the same numbers, in whatever order.
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.factor.is_same_as(&other.factor) && self.key == other.key
    }

    /// True if the copies are of a matrix and of its transpose, by one spec.
    pub fn goes_with(&self, other: &Self) -> bool {
        let [own, others] = [self, other].map(|make| make.factor.key);
        let is_plain = |key: CopyKey| !key.rotated && key.history.is_none();
        own.of_transpose != others.of_transpose
            && is_plain(own)
            && is_plain(others)
            && self.spec(own.layout) == other.spec(others.layout)
    }

    /// The outline of the copy of a matrix of this shape, in this layout.
    pub fn outline(&self, shape: [usize; 2], layout: Layout) -> Quantized<Outline> {
        self.factor.outline(shape, layout)
    }

    /// Makes the copy of a matrix, in this layout. `delayed`: the maximum that the matrix had in earlier steps, where
    /// it has a history.
    pub fn copy<K: Kernels>(
        &self,
        matrix: FloatTensor<K>,
        layout: Layout,
        delayed: Option<&DelayedMaximum<K>>,
    ) -> Quantized<K> {
        self.copy_of(MatrixSource::Floats(matrix), layout, delayed)
    }

    /// The same of a matrix, or of what it is computed from.
    pub fn copy_of<K: Kernels>(
        &self,
        matrix: MatrixSource<K>,
        layout: Layout,
        delayed: Option<&DelayedMaximum<K>>,
    ) -> Quantized<K> {
        let matrix = match self.factor.key.of_transpose {
            true => MatrixSource::Floats(K::float_swap_dims(matrix.into_floats(), 0, 1)),
            false => matrix,
        };
        let matrix = match self.factor.key.rotated {
            true => MatrixSource::Floats(K::random_hadamard(matrix.into_floats())),
            false => matrix,
        };
        let spec = self.spec(layout);
        match (self.factor.key.history, delayed) {
            (None, _) => K::quantize_source(matrix, &spec),
            (Some(_), Some(delayed)) => K::quantize_delayed(matrix, &spec, delayed),
            (Some(slot), None) => panic!("a copy with the history `{slot}` reads its maximum"),
        }
    }
}

/// Both copies of a matrix, or of what it is computed from: from one read where they hold the same numbers, or
/// [go together](Make::goes_with) and there is a kernel for it. `delayed`: the maximum that the matrix had in earlier
/// steps, where it has a history.
pub(super) fn copies<K: Kernels>(
    matrix: MatrixSource<K>,
    makes: [Option<&Make>; 2],
    delayed: Option<&DelayedMaximum<K>>,
) -> [Option<Quantized<K>>; 2] {
    let one = |make: &Make, matrix| make.copy_of::<K>(matrix, make.factor.key.layout, delayed);
    match makes {
        [Some(first), Some(second)] if first.is_same_as(second) => {
            let both = first.copy_of::<K>(matrix, Layout::Both, delayed);
            [first, second].map(|make| Some(both.in_layout(make.factor.key.layout)))
        }
        [Some(first), Some(second)] if first.goes_with(second) => {
            let spec = first.spec(first.factor.key.layout);
            let [of_matrix, of_transpose] = K::quantize_both_ways(matrix.into_floats(), &spec);
            match first.factor.key.of_transpose {
                true => [Some(of_transpose), Some(of_matrix)],
                false => [Some(of_matrix), Some(of_transpose)],
            }
        }
        [Some(first), Some(second)] => {
            let matrix = MatrixSource::Floats(matrix.into_floats());
            let first = one(first, matrix.clone());
            [Some(first), Some(one(second, matrix))]
        }
        [first, second] => [
            first.map(|make| one(make, matrix.clone())),
            second.map(|make| one(make, matrix)),
        ],
    }
}
