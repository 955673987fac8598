//! How values wait for the backward pass: contexts (fallback-int8, section 5.2; coat-fp8, section 5).

use std::{fmt::Debug, marker::PhantomData};

use super::{Number, Recipe, Row};

/// The format in which a value waits for the backward pass: numbers to nearest, with an FP32 scale for each group of
/// neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context {
    /// The number format: INT8, INT10, INT4, E4M3 or E5M2.
    pub number: Number,
    /// Neighbours that share a scale: a power of two from 16 to 1,024.
    pub group: usize,
    /// What attention without scores in memory leaves, outside of blocks that run again.
    pub attention: AttentionContext,
}

/// How attention's values wait, where a kernel computes it without scores in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionContext {
    /// Queries, keys and values compressed: the backward pass computes the forward pass once more.
    Compressed,
    /// The same, beside the output and the log-sum-exp as they are: see [`KeptOutput`].
    KeptOutput,
    /// All of them as they are: see [`ExactAttention`].
    Exact,
}

impl Context {
    pub(crate) const fn check(&self) {
        assert!(
            matches!(
                self.number,
                Number::Int4 | Number::Int8 | Number::Int10 | Number::E4M3 | Number::E5M2
            ),
            "a context is of INT4, INT8, INT10, E4M3 or E5M2"
        );
        assert!(
            self.group.is_power_of_two() && self.group >= 16 && self.group <= 1024,
            "the group of a context is a power of two from 16 to 1024"
        );
    }
}

/// A [`Context`] as a type.
pub trait ContextFormat: Clone + Copy + Default + Debug + Send + Sync + 'static {
    /// The context; `None` keeps values as they are.
    const CONTEXT: Option<Context>;
}

/// Values as they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct Exact;

impl ContextFormat for Exact {
    const CONTEXT: Option<Context> = None;
}

/// Takes a list of types and their number formats.
macro_rules! formats {
    ($($(#[$about:meta])* $name:ident: $number:ident,)*) => { $(
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default)]
        pub struct $name<const GROUP: usize = 128>;

        impl<const GROUP: usize> ContextFormat for $name<GROUP> {
            const CONTEXT: Option<Context> = Some(Context {
                number: Number::$number,
                group: GROUP,
                attention: AttentionContext::Compressed,
            });
        }
    )* };
}

formats! {
    /// INT10: 1.28 bytes an element in groups of 128 (fallback-int8, section 5.2).
    Int10: Int10,
    /// INT8: 1.03 bytes an element in groups of 128.
    Int8: Int8,
    /// E4M3: 1.25 bytes an element in groups of 16 (coat-fp8, section 5.1, with BF16 scales there).
    E4M3: E4M3,
    /// INT4: 0.53 bytes an element in groups of 128. For measurements: gradients suffer.
    Int4: Int4,
}

/// The same format, and this for attention's values.
const fn with_attention(context: Option<Context>, attention: AttentionContext) -> Option<Context> {
    match context {
        Some(context) => Some(Context {
            attention,
            ..context
        }),
        None => None,
    }
}

/// Format `F` for all but attention: its queries, keys and values wait as they are, and so does what it gives.
///
/// Of those that wait compressed, attention's forward pass is computed once more in the backward pass: this is for who
/// has the memory, and not the time. It is so where a kernel computes attention without scores in memory, outside of
/// blocks that run again. A layer that reads what attention gives keeps no copy of its own, but for those whose backward
/// pass reads the forward product's operand.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExactAttention<F>(PhantomData<F>);

impl<F: ContextFormat> ContextFormat for ExactAttention<F> {
    const CONTEXT: Option<Context> = with_attention(F::CONTEXT, AttentionContext::Exact);
}

/// Format `F`, and beside attention's queries, keys and values, which wait in it, its output and log-sum-exp as they
/// are: the backward pass does not compute the forward pass once more.
///
/// The probabilities of the backward pass are those of decoded queries and keys over sums of exact ones, and so do not
/// sum to 1. What the gradient of the scores then sums to in a row, the gradient of Q has times what all keys have in
/// common. So the forward pass takes from each key a mean of its head's keys, which a softmax does not see
/// (SageAttention, arXiv 2410.02367, section 4.2), and what is left waits, in a copy of its own. It is rounded to the
/// compute dtype, and the output is that of these keys; in evaluation it is that of the keys as they are. A soft cap and
/// dropout of scores see the mean: with them the forward pass is computed once more. Hidden keys count too: a padded key
/// that is not finite makes all of its head NaN.
///
/// It is so where a kernel computes attention without scores in memory, outside of blocks that run again.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeptOutput<F>(PhantomData<F>);

impl<F: ContextFormat> ContextFormat for KeptOutput<F> {
    const CONTEXT: Option<Context> = with_attention(F::CONTEXT, AttentionContext::KeptOutput);
}

/// Recipe `R` with contexts of format `F`.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn_quant_train::{QuantTrain, recipe::{MixedPrecision, context::{Contexts, Int10}}};
///
/// // Memory without quantized products.
/// type Backend = QuantTrain<Autodiff<Flex>, Contexts<MixedPrecision<f32>, Int10>>;
/// ```
///
/// A format that there is none of does not compile:
///
/// ```compile_fail
/// use burn_quant_train::recipe::{MixedPrecision, Recipe, context::{Contexts, Int10}};
///
/// // "the group of a context is a power of two from 16"
/// Contexts::<MixedPrecision<f32>, Int10<8>>::row();
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Contexts<R, F>(PhantomData<(R, F)>);

impl<R: Recipe, F: ContextFormat> Recipe for Contexts<R, F> {
    const ROW: Row = Row {
        context: F::CONTEXT,
        ..R::ROW
    };

    fn row() -> Row {
        let checked = const { Self::ROW.checked() };
        Row {
            context: checked.context,
            ..R::row()
        }
    }
}
