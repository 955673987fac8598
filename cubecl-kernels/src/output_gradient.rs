//! The gradient of an operator's output as it comes: in the terms of those that read the output; and what comes to its
//! input by another way, as around a norm in a residual connection.
//!
//! Added up by kernels of their own, each sum would be read and written once more.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    error::KernelError,
    operator_input::OperatorInput,
    quantize::Quantized,
    row_units::{RowUnits, read_held},
};

/// Terms of a gradient, at most: those of the queries, keys and values of attention.
pub const MAX_TERMS: usize = 3;

/// One to [`MAX_TERMS`] terms, each of the shape and type of the operator's input.
#[derive(Debug)]
pub enum Terms<'a, R: Runtime> {
    /// Tensors, contiguous.
    Floats(&'a [TensorHandle<R>]),
    /// Numbers with scales, as they flow back (jetfire-int8, section 3.2), of floats of this type. A kernel decodes INT8 and
    /// E4M3 in blocks, or in groups along the rows, with FP32 scales, where all terms are of one format, on Hopper. Others
    /// are dequantized first.
    Numbers(&'a [Quantized<R>], StorageType),
}

impl<R: Runtime> Clone for Terms<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for Terms<'_, R> {}

impl<'a, R: Runtime> Terms<'a, R> {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Floats(tensors) => tensors.len(),
            Self::Numbers(matrices, _) => matrices.len(),
        }
    }

    /// Each of them.
    fn iter(self) -> impl Iterator<Item = OperatorInput<'a, R>> {
        (0..self.len()).map(move |index| match self {
            Self::Floats(tensors) => OperatorInput::Floats(&tensors[index]),
            Self::Numbers(matrices, dtype) => OperatorInput::Quantized(&matrices[index], dtype),
        })
    }

    /// In memory as floats.
    pub(crate) fn floats(
        self,
        client: &ComputeClient<R>,
    ) -> Result<Vec<TensorHandle<R>>, KernelError> {
        self.iter().map(|term| term.floats(client)).collect()
    }
}

/// What a backward pass starts from. As with inputs, a tensor that starts elsewhere than at a multiple of 16 bytes
/// makes sums of rows take another order.
#[derive(Debug)]
pub struct OutputGradient<'a, R: Runtime> {
    /// Their sum, added up in this order and rounded to the type of the operator's input each time, is the gradient of the
    /// output.
    pub terms: Terms<'a, R>,
    /// One of the same shape and type, contiguous, that is added to the gradient of the input when that has been
    /// rounded, and rounded again.
    pub other: Option<&'a TensorHandle<R>>,
}

impl<R: Runtime> Clone for OutputGradient<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for OutputGradient<'_, R> {}

impl<'a, R: Runtime> From<&'a TensorHandle<R>> for OutputGradient<'a, R> {
    fn from(gradient: &'a TensorHandle<R>) -> Self {
        Self {
            terms: Terms::Floats(std::slice::from_ref(gradient)),
            other: None,
        }
    }
}

impl<'a, R: Runtime> OutputGradient<'a, R> {
    /// All terms, and the other.
    fn all(&self) -> impl Iterator<Item = OperatorInput<'a, R>> {
        let other = self.other.map(OperatorInput::Floats);
        self.terms.iter().chain(other)
    }

    /// Accepts gradients like the input.
    pub(crate) fn check(
        &self,
        client: &ComputeClient<R>,
        operation: &'static str,
        x: &OperatorInput<R>,
    ) -> Result<(), KernelError> {
        for gradient in self.all() {
            gradient.check(client, operation, "gradient")?;
        }
        let fits = |gradient: OperatorInput<R>| {
            gradient.shape() == x.shape() && gradient.dtype() == x.dtype()
        };
        if (1..=MAX_TERMS).contains(&self.terms.len()) && self.all().all(fits) {
            return Ok(());
        }
        let shown =
            |gradient: OperatorInput<R>| format!("{:?} of {}", gradient.shape(), gradient.dtype());
        Err(KernelError::Shape {
            operation,
            got: format!(
                "x {:?} of {}, gradients {:?}",
                x.shape(),
                x.dtype(),
                self.all().map(shown).collect::<Vec<_>>()
            ),
            remedy: "pass one to three terms of the gradient, of the shape and type of x, as what is added to it",
        })
    }

    /// The tensors that a kernel takes of these terms as floats, with stand-ins for those that there are not: three, and the
    /// other.
    pub(crate) fn arguments(&self, terms: &[TensorHandle<R>]) -> [TensorHandle<R>; MAX_TERMS + 1] {
        let first = &terms[0];
        let term = |index: usize| terms.get(index).unwrap_or(first).clone();
        [
            term(0),
            term(1),
            term(2),
            self.other.unwrap_or(first).clone(),
        ]
    }

    pub(crate) fn form(&self) -> GradientForm {
        GradientForm {
            terms: self.terms.len(),
            has_other: self.other.is_some(),
        }
    }
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GradientForm {
    terms: usize,
    has_other: bool,
}

/// The gradient of a row of the output, as [`read_held`] gives it.
#[cube]
pub(crate) fn read_terms<F: Numeric, N: Size>(
    first: &Array<Vector<F, N>>,
    second: &Array<Vector<F, N>>,
    third: &Array<Vector<F, N>>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
    #[comptime] form: GradientForm,
) -> Array<f32> {
    let mut sum = read_held::<F, N>(first, row, units, width);
    if comptime!(form.terms > 1) {
        add_rounded::<F, N>(&mut sum, second, row, units, width);
    }
    if comptime!(form.terms > 2) {
        add_rounded::<F, N>(&mut sum, third, row, units, width);
    }
    sum
}

/// Adds what comes by another way to a row of the gradient of the input.
#[cube]
pub(crate) fn add_other<F: Numeric, N: Size>(
    of_x: &mut Array<f32>,
    other: &Array<Vector<F, N>>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
    #[comptime] form: GradientForm,
) {
    if comptime!(form.has_other) {
        #[unroll]
        for index in 0..comptime!(units.elements()) {
            of_x[index] = f32::cast_from(F::cast_from(of_x[index]));
        }
        add_rounded::<F, N>(of_x, other, row, units, width);
    }
}

/// Adds a row of a tensor, and rounds to its type.
#[cube]
fn add_rounded<F: Numeric, N: Size>(
    held: &mut Array<f32>,
    tensor: &Array<Vector<F, N>>,
    row: u32,
    #[comptime] units: RowUnits,
    #[comptime] width: usize,
) {
    let term = read_held::<F, N>(tensor, row, units, width);
    #[unroll]
    for index in 0..comptime!(units.elements()) {
        held[index] = f32::cast_from(F::cast_from(held[index] + term[index]));
    }
}
