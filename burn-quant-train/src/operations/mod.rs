//! Burn's operations as tables, for the two decorators.
//!
//! Each line is an operation of one of Burn's traits: its name, the kind of every argument and of the result. What
//! follows is optional: after `=>` its [precision class](crate::backend::precision::Class), and in brackets what is to
//! be known of a value that waits for the backward pass:
//!
//! - `again`: the result is cheap to compute again from its operands, though they be compressed; `again if exact`: only
//!   if they are not, since a sum or a difference may be far smaller than its terms and their errors; `again over
//!   small`: only if they are not, or the divisor is a number a row; `again swapped`: its dimensions are those of the
//!   operand, swapped;
//! - `upload`: a small result is a constant, which is uploaded once;
//! - `sum`: the result is a number a row only if the row is long enough;
//! - `mask`: the result is of zeros and ones;
//! - `exact: a b`: these operands must be kept exactly, since the gradient may magnify what a number format changes in
//!   them, without a bound (a reciprocal, a logarithm, an exponential) or by a comparison;
//! - `exact output`: the result must be, a log-probability;
//! - `loss: x`: x is a loss, an error of which is in every gradient, and so is what it was computed from elementwise.
//!
//! So the table of precision classes *is* the code, and a reader compares it with the book's line by line.
//!
//! Kinds: `Float`, `OptFloat`, `Floats` (a vector), `FloatPair`, `FloatAndInt`, `Int`, `Bool`, `Quant`,
//! `Primitive` (float or quantized), the structs that Burn's pooling and deformable convolution return, and any other
//! type in parentheses.

mod activation;
mod backend;
mod bool;
mod float;
mod int;
mod kind;
mod module;
mod quantized;

pub(crate) use activation::{activation_operations, composed_activation_operations};
pub(crate) use backend::backend_operations;
pub(crate) use bool::bool_operations;
pub(crate) use float::{composed_float_operations, float_operations};
pub(crate) use int::int_operations;
pub(crate) use kind::{kind_type, unwrap_kind, wrap_kind};
pub(crate) use module::module_operations;
pub(crate) use quantized::quantized_operations;
