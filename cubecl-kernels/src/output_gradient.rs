//! The gradient of an operator's output as it comes: in the terms of those that read the output; and what comes to its
//! input by another way, as around a norm in a residual connection.
//!
//! Added up by kernels of their own, each sum would be read and written once more.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::check_contiguous,
    error::KernelError,
    operator_input::OperatorInput,
    row_units::{RowUnits, read_held},
};

/// Terms of a gradient, at most: those of the queries, keys and values of attention.
pub const MAX_TERMS: usize = 3;

/// What a backward pass starts from. As with inputs, a tensor that starts elsewhere than at a multiple of 16 bytes
/// makes sums of rows take another order.
#[derive(Debug)]
pub struct OutputGradient<'a, R: Runtime> {
    /// One to [`MAX_TERMS`] tensors of the shape and type of the operator's input, contiguous: their sum, added up in
    /// this order and rounded to the type each time, is the gradient of the output.
    pub terms: &'a [TensorHandle<R>],
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
            terms: std::slice::from_ref(gradient),
            other: None,
        }
    }
}

impl<'a, R: Runtime> OutputGradient<'a, R> {
    /// All its tensors.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &'a TensorHandle<R>> {
        self.terms.iter().chain(self.other)
    }

    /// Accepts tensors like the input.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        x: &OperatorInput<R>,
    ) -> Result<(), KernelError> {
        for tensor in self.tensors() {
            check_contiguous(operation, tensor)?;
        }
        let fits = |tensor: &TensorHandle<R>| {
            tensor.shape()[..] == x.shape()[..] && tensor.dtype == x.dtype()
        };
        if (1..=MAX_TERMS).contains(&self.terms.len()) && self.tensors().all(fits) {
            return Ok(());
        }
        let shown = |tensor: &TensorHandle<R>| format!("{:?} of {}", tensor.shape(), tensor.dtype);
        Err(KernelError::Shape {
            operation,
            got: format!(
                "x {:?} of {}, gradients {:?}",
                x.shape(),
                x.dtype(),
                self.tensors().map(shown).collect::<Vec<_>>()
            ),
            remedy: "pass one to three terms of the gradient, of the shape and type of x, as what is added to it",
        })
    }

    /// The tensors that a kernel takes, with stand-ins for those that there are not: three terms, and the other.
    pub(crate) fn arguments(&self) -> [TensorHandle<R>; MAX_TERMS + 1] {
        let first = &self.terms[0];
        let term = |index: usize| self.terms.get(index).unwrap_or(first).clone();
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
