//! Scaled dot-product attention for training, without a matrix of the scores in memory.
//!
//! For each head and each query row `i`, over the keys `j` that it sees:
//!
//! ```text
//! S_ij = Y_ij cap(scale Q_i·K_j) + bias_ij     cap(x) = softcap tanh(x / softcap)
//! L_i  = log sum_j exp S_ij
//! P_ij = exp(S_ij - L_i)                       at most 1: see AttentionProducts
//! O_i  = sum_j P_ij Z_ij V_j                   Y_ij or Z_ij = 0, or 1 / (1 - rate): dropout; else 1
//! ```
//!
//! and, from the gradient `dO` of the output, with `Delta_i = dO_i·O_i`:
//!
//! ```text
//! dP_ij = Z_ij dO_i·V_j          dS_ij = P_ij (dP_ij - Delta_i)
//! dV_j  = sum_i P_ij Z_ij dO_i   dbias = dS, summed over the axes that the bias is broadcast along
//! dQ_i  = scale sum_j dS'_ij K_j     dK_j = scale sum_i dS'_ij Q_i     dS' = dS Y (1 - tanh(..)^2)
//! ```
//!
//! The backward pass computes scores again, tile by tile, from Q, K and `L` (FlashAttention: Dao et al., 2022,
//! Algorithms 1 and 4; one saved number a row: FlashAttention-2, Dao, 2023). Memory grows with the sequence, not with
//! its square.
//!
//! A key that a query does not see has probability 0, its bias is not read, and a row that sees nothing gives 0, as
//! does one whose scores are all negative infinity. NaN and positive infinity in what a row sees make the row NaN.
//! Those of a query and a key that do not see each other may reach each other's results or not.
//!
//! Here are the kernels, a file each ([`AttentionKernel`]); [`host::attention`](crate::host::attention()) computes on
//! CPUs, with every option.
//!
//! A probability of the backward pass is good to about `2^-24 |L|`, as `L` is an FP32 number.

mod bit_mask;
mod delta;
mod heads;
mod hopper;
mod launch;
mod portable;
pub(crate) mod products;
mod scores;
mod tensor_core;

use std::ops::Range;

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_dtype, empty},
    dropout::Draw,
    error::KernelError,
};

pub use products::AttentionProducts;

const FORWARD: &str = "attention";
const BACKWARD: &str = "attention_backward";

/// The tensors that attention reads, on a device.
#[derive(Debug, Clone)]
pub struct AttentionTensors<R: Runtime> {
    /// Q, `[batch, heads, queries, width]`.
    pub query: TensorHandle<R>,
    /// K, of the same type, `[batch, kv_heads, keys, width]`.
    pub key: TensorHandle<R>,
    /// V, of the same type, `[batch, kv_heads, keys, value_width]`.
    pub value: TensorHandle<R>,
    /// True (a `u8` or `u32` that is not 0) where a key is hidden from a query. Each dimension is that of the scores,
    /// or 1.
    pub mask: Option<TensorHandle<R>>,
    /// Added to the scores; of the type of the query. Each dimension is that of the scores, or 1.
    pub bias: Option<TensorHandle<R>>,
}

/// The tensors that the forward pass leaves.
#[derive(Debug, Clone)]
pub struct AttentionOutput<R: Runtime> {
    /// O, `[batch, heads, queries, value_width]`, of the type of the query, in the memory of
    /// `[batch, queries, heads, value_width]`.
    pub output: TensorHandle<R>,
    /// L, f32 `[batch, heads, queries]`, contiguous; negative infinity for a row that sees nothing.
    pub log_sum_exp: TensorHandle<R>,
}

/// The properties that say whether a kernel computes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionProblem {
    /// The type of Q, K and V.
    pub dtype: StorageType,
    /// The sizes.
    pub shape: AttentionShape,
    /// The options.
    pub options: AttentionOptions,
    /// True where there is a mask.
    pub is_masked: bool,
    /// True where there is a bias.
    pub is_biased: bool,
}

impl AttentionProblem {
    /// That of these tensors.
    fn of<R: Runtime>(
        operation: &'static str,
        tensors: &AttentionTensors<R>,
        options: &AttentionOptions,
    ) -> Result<Self, KernelError> {
        let AttentionTensors {
            query,
            key,
            value,
            mask,
            bias,
        } = tensors;
        let shape = AttentionShape::new(operation, query.shape(), key.shape(), value.shape())?;
        let dtype = query.dtype;
        let of_query = "use the type of the query";
        check_dtype(operation, "key", key, dtype, of_query)?;
        check_dtype(operation, "value", value, dtype, of_query)?;
        if let Some(mask) = mask {
            check_broadcast(operation, "mask", mask.shape(), &shape)?;
        }
        if let Some(bias) = bias {
            check_broadcast(operation, "bias", bias.shape(), &shape)?;
            check_dtype(operation, "bias", bias, dtype, of_query)?;
        }
        check_options(operation, &shape, options)?;
        Ok(Self {
            dtype,
            shape,
            options: *options,
            is_masked: mask.is_some(),
            is_biased: bias.is_some(),
        })
    }
}

/// A kernel of attention, the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKernel {
    /// CUDA's architecture sm_90, no other: bf16 and f16, heads of at most 128 features, a multiple of 8, a positive
    /// scale; with a mask and without; neither bias, soft cap nor dropout; something to compute. It alone has
    /// [INT8 products](AttentionProducts::Int8).
    Hopper,
    /// NVIDIA devices from sm_80 on: bf16 and f16, heads of at most 256 features, a multiple of 8, every option.
    TensorCore,
    /// Any device with 32 KiB of shared memory: f32, f16 and bf16 where it has the type, heads of at most 256 features,
    /// every option.
    Portable,
}

impl AttentionKernel {
    /// All, the fastest first.
    pub const ALL: [Self; 3] = [Self::Hopper, Self::TensorCore, Self::Portable];

    /// The fastest that computes this on the client's device.
    pub fn of<R: Runtime>(client: &ComputeClient<R>, problem: &AttentionProblem) -> Option<Self> {
        let mut kernels = Self::ALL.into_iter();
        kernels.find(|kernel| kernel.unsupported(client, problem).is_none())
    }

    /// True where the kernel can read Q, K, V, O or the gradient of O `[batch, heads, sequence, features]` as it lies
    /// in memory. The portable kernel reads what 32 bits index. For the others, neighbours are neighbours along the
    /// features, and all other steps are multiples of 16 bytes; for Hopper's none is 0.
    pub fn reads<R: Runtime>(self, tensor: &TensorHandle<R>) -> bool {
        match self {
            Self::Hopper => hopper::reads(tensor),
            Self::TensorCore => tensor_core::reads(tensor),
            Self::Portable => launch::is_indexed(tensor),
        }
    }

    /// True where every kernel with a mask or a bias can read one as it lies in memory: 32 bits index it. Steps may
    /// be 0.
    pub fn reads_scores<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
        launch::is_indexed(tensor)
    }

    /// Why it does not compute this on the client's device; none where it does.
    pub fn unsupported<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        problem: &AttentionProblem,
    ) -> Option<String> {
        match self {
            Self::Hopper => hopper::unsupported(client, problem),
            Self::TensorCore => tensor_core::unsupported(client, problem),
            Self::Portable => portable::unsupported(client, problem),
        }
    }

    fn check<R: Runtime>(
        self,
        operation: &'static str,
        client: &ComputeClient<R>,
        problem: &AttentionProblem,
    ) -> Result<(), KernelError> {
        match self.unsupported(client, problem) {
            None => Ok(()),
            Some(reason) => Err(KernelError::Unsupported {
                operation,
                reason: format!("{self:?} has no kernel for {reason}"),
                remedy: "ask AttentionKernel::of, or compose attention of products and a softmax",
            }),
        }
    }

    /// The forward pass.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the kernel does not compute this ([`AttentionKernel::of`]) or does not read a
    /// tensor as it lies in memory ([`AttentionKernel::reads`]); the others where shapes or types do not fit each
    /// other.
    pub fn forward<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        tensors: &AttentionTensors<R>,
        options: &AttentionOptions,
    ) -> Result<AttentionOutput<R>, KernelError> {
        let problem = AttentionProblem::of(FORWARD, tensors, options)?;
        self.check(FORWARD, client, &problem)?;
        match self {
            Self::Hopper => hopper::forward(client, tensors, &problem),
            Self::TensorCore => tensor_core::forward(client, tensors, &problem),
            Self::Portable => portable::forward(client, tensors, &problem),
        }
    }

    /// The gradients that are wanted.
    ///
    /// - `tensors`, `options`: those of the forward pass, and `forward` what it left.
    /// - `gradient`: that of the output, of its shape and type.
    ///
    /// # Errors
    ///
    /// As [`AttentionKernel::forward`]; [`KernelError::Unsupported`] where the gradient of a bias is wanted and there
    /// is none.
    pub fn backward<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        tensors: &AttentionTensors<R>,
        forward: &AttentionOutput<R>,
        gradient: &TensorHandle<R>,
        wanted: AttentionGradients<bool>,
        options: &AttentionOptions,
    ) -> Result<AttentionGradients<Option<TensorHandle<R>>>, KernelError> {
        let problem = AttentionProblem::of(BACKWARD, tensors, options)?;
        self.check(BACKWARD, client, &problem)?;
        for (name, tensor) in [("output", &forward.output), ("gradient", gradient)] {
            check_dtype(
                BACKWARD,
                name,
                tensor,
                problem.dtype,
                "use the type of the query",
            )?;
            if tensor.shape().to_vec() != problem.shape.output() {
                return Err(KernelError::Shape {
                    operation: BACKWARD,
                    got: format!("{name} {:?} for {:?}", tensor.shape(), problem.shape),
                    remedy: "pass one of the output's shape",
                });
            }
        }
        check_wanted(wanted, problem.is_biased)?;
        if wanted == AttentionGradients::default() {
            return Ok(AttentionGradients::default());
        }
        match self {
            Self::Hopper => hopper::backward(client, tensors, forward, gradient, wanted, &problem),
            Self::TensorCore => {
                tensor_core::backward(client, tensors, forward, gradient, wanted, &problem)
            }
            Self::Portable => {
                portable::backward(client, tensors, forward, gradient, wanted, &problem)
            }
        }
    }
}

/// The options of attention beside its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions {
    /// Multiplies the products of queries and keys: any number, also 0 or a negative one.
    pub scale: f32,
    /// Bounds the scores smoothly, before the bias; positive.
    pub softcap: Option<f32>,
    /// The keys that a query sees by its place.
    pub band: Band,
    /// Drops probabilities or scores.
    pub dropout: Option<Dropout>,
    /// The numbers that the products of the forward pass multiply.
    pub products: AttentionProducts,
}

impl AttentionOptions {
    /// Every query sees every key; nothing else.
    pub fn new(scale: f32) -> Self {
        Self {
            scale,
            softcap: None,
            band: Band::ALL,
            dropout: None,
            products: AttentionProducts::Float,
        }
    }

    /// The dropout of these numbers.
    pub(crate) fn dropout_of(&self, dropped: Dropped) -> Option<&Dropout> {
        self.dropout.as_ref().filter(|it| it.dropped == dropped)
    }

    /// True where a score is not as steep as its product.
    pub fn has_slopes(&self) -> bool {
        self.softcap.is_some() || self.dropout_of(Dropped::Scores).is_some()
    }
}

/// Which keys a query sees by its place: those from `left` before its own key to `right` behind it, inclusive; all on a
/// side without a bound.
///
/// The key of query `i` is `i + keys - queries`, so that the last query has the last key (FlashAttention since 2.1,
/// Burn). Queries whose bounds lie outside of the keys see nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Band {
    /// Keys before its own.
    pub left: Option<u32>,
    /// Keys behind its own.
    pub right: Option<u32>,
}

impl Band {
    /// All keys.
    pub const ALL: Self = Self {
        left: None,
        right: None,
    };
    /// No key behind its own.
    pub const CAUSAL: Self = Self {
        left: None,
        right: Some(0),
    };

    /// The keys that both bands show.
    pub fn and(self, other: Self) -> Self {
        let nearer = |a: Option<u32>, b: Option<u32>| [a, b].into_iter().flatten().min();
        Self {
            left: nearer(self.left, other.left),
            right: nearer(self.right, other.right),
        }
    }

    /// The keys that query `row` sees.
    pub fn keys_of(self, row: usize, shape: &AttentionShape) -> Range<usize> {
        range(
            (row + shape.keys) as i64 - shape.queries as i64,
            [self.left, self.right],
            shape.keys,
        )
    }

    /// The queries that see key `col`.
    pub fn queries_of(self, col: usize, shape: &AttentionShape) -> Range<usize> {
        range(
            (col + shape.queries) as i64 - shape.keys as i64,
            [self.right, self.left],
            shape.queries,
        )
    }
}

/// `before` and `behind` around a centre, inside of `0..end`.
fn range(centre: i64, [before, behind]: [Option<u32>; 2], end: usize) -> Range<usize> {
    let inside = |index: i64| index.clamp(0, end as i64) as usize;
    let start = before.map_or(0, |before| inside(centre - i64::from(before)));
    let end = behind.map_or(end, |behind| inside(centre + i64::from(behind) + 1));
    start..end.max(start)
}

/// What dropout sets to 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// Probabilities, behind the softmax.
    Probabilities,
    /// Scores behind the soft cap, before the bias and the mask: a dropped key is seen, with a score of 0.
    Scores,
}

/// Sets each probability or score to 0 with probability `rate`, and divides the others by `1 - rate`.
///
/// The draw of an element follows from the key, its batch, head, query and key alone: it is the same on every device,
/// and in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Which numbers.
    pub dropped: Dropped,
    /// `Z` or `Y` of an element, whose row counts the queries of all heads of all batches.
    pub draw: Draw,
}

/// The sizes of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Batches.
    pub batch: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values, which divide those of the queries. Query head `h` reads head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head, and values.
    pub keys: usize,
    /// Features of a query and of a key.
    pub width: usize,
    /// Features of a value and of an output.
    pub value_width: usize,
}

impl AttentionShape {
    /// The sizes of query `[batch, heads, queries, width]`, key `[batch, kv_heads, keys, width]` and value
    /// `[batch, kv_heads, keys, value_width]`.
    ///
    /// # Errors
    ///
    /// When they do not fit each other.
    pub fn new(
        operation: &'static str,
        query: &[usize],
        key: &[usize],
        value: &[usize],
    ) -> Result<Self, KernelError> {
        let error = |remedy| KernelError::Shape {
            operation,
            got: format!("query {query:?}, key {key:?}, value {value:?}"),
            remedy,
        };
        let (&[batch, heads, queries, width], &[_, kv_heads, keys, _], &[.., value_width]) =
            (query, key, value)
        else {
            return Err(error("pass tensors [batch, heads, sequence, features]"));
        };
        if key != [batch, kv_heads, keys, width] || value != [batch, kv_heads, keys, value_width] {
            return Err(error(
                "pass as many batches and features of keys as of queries, and a value for each key",
            ));
        }
        let divides = match kv_heads {
            0 => heads == 0,
            _ => heads.is_multiple_of(kv_heads),
        };
        if !divides {
            return Err(error(
                "pass a number of key heads that divides that of query heads",
            ));
        }
        if width == 0 || value_width == 0 {
            return Err(error("pass heads of at least one feature"));
        }
        Ok(Self {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            width,
            value_width,
        })
    }

    /// Query heads that read one head of keys.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(1)
    }

    /// Shape of the scores, which a mask and a bias are broadcast to.
    pub fn scores(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }

    /// Shape of the queries.
    pub fn query(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.width]
    }

    /// Shape of the keys.
    pub fn key(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.width]
    }

    /// Shape of the values.
    pub fn value(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.value_width]
    }

    /// Shape of the output.
    pub fn output(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.value_width]
    }

    /// Shape of the log-sum-exp.
    pub fn rows(&self) -> [usize; 3] {
        [self.batch, self.heads, self.queries]
    }
}

/// One value for each tensor that has a gradient: wishes, or gradients.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttentionGradients<A> {
    /// Of Q.
    pub query: A,
    /// Of K.
    pub key: A,
    /// Of V.
    pub value: A,
    /// Of the bias.
    pub bias: A,
}

/// A new tensor `[batch, heads, rows, width]` in the memory of `[batch, rows, heads, width]`.
fn in_rows<R: Runtime>(
    client: &ComputeClient<R>,
    [batch, heads, rows, width]: [usize; 4],
    dtype: StorageType,
) -> TensorHandle<R> {
    let mut tensor = empty(client, vec![batch, rows, heads, width], dtype);
    tensor.metadata.swap(1, 2);
    tensor
}

/// Refuses the gradient of a bias that is not there.
fn check_wanted(wanted: AttentionGradients<bool>, is_biased: bool) -> Result<(), KernelError> {
    match wanted.bias && !is_biased {
        true => Err(KernelError::Unsupported {
            operation: BACKWARD,
            reason: "the gradient of a bias that is not there".into(),
            remedy: "ask for it where there is a bias",
        }),
        false => Ok(()),
    }
}

/// Accepts options that attention can be computed with.
pub(crate) fn check_options(
    operation: &'static str,
    shape: &AttentionShape,
    options: &AttentionOptions,
) -> Result<(), KernelError> {
    let unsupported = |reason: String, remedy| {
        Err(KernelError::Unsupported {
            operation,
            reason,
            remedy,
        })
    };
    if let Some(softcap) = options.softcap
        && !(softcap > 0.0 && softcap.is_finite())
    {
        return unsupported(
            format!("a soft cap of {softcap}"),
            "use a positive one, or none",
        );
    }
    let Some(dropout) = options.dropout else {
        return Ok(());
    };
    if !(0.0..1.0).contains(&dropout.draw.rate) {
        return unsupported(
            format!("a dropout rate of {}", dropout.draw.rate),
            "use one in [0, 1)",
        );
    }
    let rows: usize = shape.rows().iter().product();
    if u32::try_from(rows).is_err() || u32::try_from(shape.keys).is_err() {
        return unsupported(
            format!(
                "dropout of scores {:?}, whose rows pass 2^32",
                shape.scores()
            ),
            "split the batch",
        );
    }
    Ok(())
}

/// Accepts the shape of a mask or a bias.
pub(crate) fn check_broadcast(
    operation: &'static str,
    name: &'static str,
    shape: &[usize],
    attention: &AttentionShape,
) -> Result<(), KernelError> {
    let scores = attention.scores();
    let fits = shape.len() == 4
        && shape
            .iter()
            .zip(scores)
            .all(|(&extent, of_scores)| extent == of_scores || extent == 1);
    match fits {
        true => Ok(()),
        false => Err(KernelError::Shape {
            operation,
            got: format!("{name} {shape:?} for scores {scores:?}"),
            remedy: "pass one whose dimensions are those of the scores, or 1",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_band_says_the_same_of_queries_and_of_keys() {
        for (queries, keys) in [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1), (0, 3), (3, 0)] {
            let shape = AttentionShape {
                batch: 1,
                heads: 1,
                kv_heads: 1,
                queries,
                keys,
                width: 1,
                value_width: 1,
            };
            let bounds = [None, Some(0), Some(1), Some(2), Some(9)];
            for (left, right) in bounds
                .into_iter()
                .flat_map(|left| bounds.map(|right| (left, right)))
            {
                let band = Band { left, right };
                for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                    let own = i as i64 + keys as i64 - queries as i64;
                    let sees = left.is_none_or(|left| j as i64 >= own - i64::from(left))
                        && right.is_none_or(|right| j as i64 <= own + i64::from(right));
                    let what = format!("{band:?} of {queries} x {keys}: query {i}, key {j}");
                    assert_eq!(band.keys_of(i, &shape).contains(&j), sees, "{what}");
                    assert_eq!(band.queries_of(j, &shape).contains(&i), sees, "{what}");
                }
            }
        }
    }

    #[test]
    fn both_bands_show_what_each_shows() {
        let window = Band {
            left: Some(3),
            right: Some(2),
        };
        let both = Band {
            left: Some(3),
            right: Some(0),
        };
        assert_eq!(window.and(Band::CAUSAL), both);
        assert_eq!(Band::ALL.and(window), window);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let shape = |q: &[usize], k: &[usize], v: &[usize]| AttentionShape::new("test", q, k, v);
        let fits = shape(&[2, 6, 5, 8], &[2, 3, 7, 8], &[2, 3, 7, 4]).expect("a shape");
        assert_eq!((fits.group(), fits.output()), (2, [2, 6, 5, 4]));
        for (q, k, v) in [
            ([2, 6, 5, 8], [1, 3, 7, 8], [2, 3, 7, 4]),
            ([2, 6, 5, 8], [2, 3, 7, 9], [2, 3, 7, 4]),
            ([2, 6, 5, 8], [2, 3, 7, 8], [2, 3, 6, 4]),
            ([2, 6, 5, 8], [2, 4, 7, 8], [2, 4, 7, 4]),
            ([2, 6, 5, 8], [2, 0, 7, 8], [2, 0, 7, 4]),
            ([2, 6, 5, 0], [2, 6, 7, 0], [2, 6, 7, 4]),
        ] {
            let error = shape(&q, &k, &v).unwrap_err();
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        }
        shape(&[2, 6, 5], &[2, 6, 5], &[2, 6, 5]).unwrap_err();
    }
}
