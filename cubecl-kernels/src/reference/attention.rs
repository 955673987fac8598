//! Attention and its gradients in `f64`, from the equations of [`attention`](mod@crate::attention): every score of
//! every head in memory.

use crate::{
    attention::{
        AttentionGradients, AttentionOptions, AttentionProducts, AttentionShape, Dropped,
        check_broadcast, check_options,
        products::{KEYS_OF_SCALE, LARGEST_CODE},
    },
    error::KernelError,
};

/// The tensors of attention, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a, T> {
    /// The sizes.
    pub shape: AttentionShape,
    /// Q, `[batch, heads, queries, width]`.
    pub query: &'a [T],
    /// K, `[batch, kv_heads, keys, width]`.
    pub key: &'a [T],
    /// V, `[batch, kv_heads, keys, value_width]`.
    pub value: &'a [T],
    /// True where a key is hidden from a query.
    pub mask: Option<Broadcast<'a, bool>>,
    /// Added to the scores.
    pub bias: Option<Broadcast<'a, T>>,
}

/// A tensor that is broadcast to the scores, `[batch, heads, queries, keys]`: each of its dimensions is that of the
/// scores, or 1.
#[derive(Debug, Clone, Copy)]
pub struct Broadcast<'a, T> {
    /// Its elements, contiguous.
    pub data: &'a [T],
    /// Its own shape.
    pub shape: [usize; 4],
}

impl<T> Broadcast<'_, T> {
    /// Where the element of a score is.
    pub fn index(&self, batch: usize, head: usize, row: usize, col: usize) -> usize {
        let at = [batch, head, row, col];
        let dimensions = self.shape.into_iter().zip(at);
        dimensions.fold(0, |index, (extent, at)| match extent {
            1 => index,
            _ => index * extent + at,
        })
    }
}

impl<T: Copy> AttentionInputs<'_, T> {
    /// The same of another Q, K and V.
    pub(crate) fn with_heads<'a>(&'a self, heads: &'a [Vec<T>; 3]) -> AttentionInputs<'a, T> {
        let [query, key, value] = heads;
        AttentionInputs {
            query,
            key,
            value,
            ..*self
        }
    }
}

impl<T> AttentionInputs<'_, T> {
    /// Accepts slices of the lengths of the shape, and options that fit.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        options: &AttentionOptions,
    ) -> Result<(), KernelError> {
        let shape = &self.shape;
        check_options(operation, shape, options)?;
        check_len(operation, "query", self.query, &shape.query())?;
        check_len(operation, "key", self.key, &shape.key())?;
        check_len(operation, "value", self.value, &shape.value())?;
        if let Some(mask) = &self.mask {
            check_broadcast(operation, "mask", &mask.shape, shape)?;
            check_len(operation, "mask", mask.data, &mask.shape)?;
        }
        if let Some(bias) = &self.bias {
            check_broadcast(operation, "bias", &bias.shape, shape)?;
            check_len(operation, "bias", bias.data, &bias.shape)?;
        }
        Ok(())
    }
}

/// Accepts a slice with all elements of a tensor.
pub(crate) fn check_len<T>(
    operation: &'static str,
    name: &'static str,
    data: &[T],
    shape: &[usize],
) -> Result<(), KernelError> {
    if data.len() == shape.iter().product::<usize>() {
        return Ok(());
    }
    Err(KernelError::Shape {
        operation,
        got: format!("{} elements of {name} {shape:?}", data.len()),
        remedy: "pass a slice with all elements of the tensor",
    })
}

/// Output and log-sum-exp.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceAttention {
    /// O, `[batch, heads, queries, value_width]`.
    pub output: Vec<f64>,
    /// L, `[batch, heads, queries]`; negative infinity for a row that sees nothing.
    pub log_sum_exp: Vec<f64>,
}

/// The forward pass.
///
/// # Errors
///
/// When shapes, slices or options do not fit.
pub fn attention(
    inputs: &AttentionInputs<'_, f64>,
    options: &AttentionOptions,
) -> Result<ReferenceAttention, KernelError> {
    inputs.check("attention", options)?;
    let shape = &inputs.shape;
    let of_codes = (options.products == AttentionProducts::Int8).then(|| {
        let keys = |x, width| in_codes(x, shape.keys * width, KEYS_OF_SCALE * width);
        [
            in_codes(inputs.query, shape.width, shape.width),
            keys(inputs.key, shape.width),
            keys(inputs.value, shape.value_width),
        ]
    });
    let rounded = of_codes.as_ref().map(|codes| inputs.with_heads(codes));
    let inputs = rounded.as_ref().unwrap_or(inputs);
    let mut result = ReferenceAttention {
        output: vec![0.0; shape.output().iter().product()],
        log_sum_exp: vec![f64::NEG_INFINITY; shape.rows().iter().product()],
    };
    for (row, query) in inputs.queries().enumerate() {
        let scores = query.scores(options);
        let (mut probabilities, log_sum_exp) = softmax(&scores);
        result.log_sum_exp[row] = log_sum_exp;
        if options.products == AttentionProducts::Int8 {
            let of_tile =
                |a: &(usize, f64), b: &(usize, f64)| a.0 / KEYS_OF_SCALE == b.0 / KEYS_OF_SCALE;
            for tile in probabilities.chunk_by_mut(of_tile) {
                let largest = tile.iter().fold(0.0, |largest: f64, it| largest.max(it.1));
                let scale = largest / f64::from(LARGEST_CODE);
                tile.iter_mut().for_each(|(_, p)| *p = round(*p, scale));
            }
        }
        let output = &mut result.output[row * shape.value_width..][..shape.value_width];
        for (j, p) in probabilities {
            let z = query.factor(Dropped::Probabilities, j, options);
            for (o, v) in output.iter_mut().zip(query.value(j)) {
                *o += p * z * v;
            }
        }
    }
    Ok(result)
}

/// The gradients of Q, K, V and, where there is a bias, of the bias, from the gradient of the output.
///
/// # Errors
///
/// When shapes, slices or options do not fit.
pub fn attention_backward(
    inputs: &AttentionInputs<'_, f64>,
    options: &AttentionOptions,
    gradient: &[f64],
) -> Result<AttentionGradients<Vec<f64>>, KernelError> {
    inputs.check("attention_backward", options)?;
    let shape = &inputs.shape;
    check_len("attention_backward", "gradient", gradient, &shape.output())?;
    let mut gradients = AttentionGradients {
        query: vec![0.0; inputs.query.len()],
        key: vec![0.0; inputs.key.len()],
        value: vec![0.0; inputs.value.len()],
        bias: vec![0.0; inputs.bias.map_or(0, |bias| bias.data.len())],
    };
    let scale = f64::from(options.scale);
    let of_codes = match options.products {
        AttentionProducts::Float => None,
        AttentionProducts::Int8 => Some(attention(inputs, options)?),
    };
    for (row, query) in inputs.queries().enumerate() {
        let values = row * shape.value_width..(row + 1) * shape.value_width;
        let of_output = &gradient[values.clone()];
        let scores = query.scores(options);
        let of_probability =
            |j| query.factor(Dropped::Probabilities, j, options) * dot(of_output, query.value(j));
        let (probabilities, mean) = match &of_codes {
            None => {
                let (probabilities, _) = softmax(&scores);
                let terms = probabilities.iter().map(|&(j, p)| p * of_probability(j));
                let mean = terms.sum();
                (probabilities, mean)
            }
            Some(forward) => {
                let shift = shift_by(forward.log_sum_exp[row]);
                // NaN stays NaN.
                let probability = |s: f64| match s > shift {
                    true => 1.0,
                    false => (s - shift).exp(),
                };
                let probabilities = scores.iter().map(|&(j, s)| (j, probability(s))).collect();
                (probabilities, dot(of_output, &forward.output[values]))
            }
        };
        for &(j, p) in &probabilities {
            let of_value = &mut gradients.value[query.value_start(j)..][..shape.value_width];
            for (dv, d_o) in of_value.iter_mut().zip(of_output) {
                *dv += p * query.factor(Dropped::Probabilities, j, options) * d_o;
            }
            let of_score = p * (of_probability(j) - mean);
            if let Some(bias) = &inputs.bias {
                gradients.bias[bias.index(query.batch, query.head, query.row, j)] += of_score;
            }
            let of_product = scale * of_score * query.slope(j, options);
            let of_query = &mut gradients.query[row * shape.width..][..shape.width];
            for (dq, k) in of_query.iter_mut().zip(query.key(j)) {
                *dq += of_product * k;
            }
            let of_key = &mut gradients.key[query.key_start(j)..][..shape.width];
            for (dk, q) in of_key.iter_mut().zip(query.query) {
                *dk += of_product * q;
            }
        }
    }
    Ok(gradients)
}

/// A query and what it reads.
struct Query<'a> {
    inputs: &'a AttentionInputs<'a, f64>,
    batch: usize,
    head: usize,
    row: usize,
    query: &'a [f64],
}

impl<'a> AttentionInputs<'a, f64> {
    /// All queries, in the order of memory.
    fn queries(&'a self) -> impl Iterator<Item = Query<'a>> {
        let shape = &self.shape;
        self.query
            .chunks(shape.width)
            .enumerate()
            .map(|(index, query)| Query {
                inputs: self,
                batch: index / shape.queries / shape.heads,
                head: index / shape.queries % shape.heads,
                row: index % shape.queries,
                query,
            })
    }
}

impl Query<'_> {
    /// The number of key `j` among those of all batches and heads.
    fn key_row(&self, j: usize) -> usize {
        let shape = &self.inputs.shape;
        let head = self.batch * shape.kv_heads + self.head / shape.group();
        head * shape.keys + j
    }

    fn key_start(&self, j: usize) -> usize {
        self.key_row(j) * self.inputs.shape.width
    }

    fn value_start(&self, j: usize) -> usize {
        self.key_row(j) * self.inputs.shape.value_width
    }

    fn key(&self, j: usize) -> &[f64] {
        &self.inputs.key[self.key_start(j)..][..self.inputs.shape.width]
    }

    fn value(&self, j: usize) -> &[f64] {
        &self.inputs.value[self.value_start(j)..][..self.inputs.shape.value_width]
    }

    /// The keys that it sees, with their scores.
    fn scores(&self, options: &AttentionOptions) -> Vec<(usize, f64)> {
        let sees = |&j: &usize| {
            !self
                .inputs
                .mask
                .is_some_and(|mask| mask.data[mask.index(self.batch, self.head, self.row, j)])
        };
        let score = |j: usize| {
            let product = f64::from(options.scale) * dot(self.query, self.key(j));
            let capped = match options.softcap.map(f64::from) {
                Some(cap) => cap * (product / cap).tanh(),
                None => product,
            };
            let bias = self.inputs.bias.map_or(0.0, |bias| {
                bias.data[bias.index(self.batch, self.head, self.row, j)]
            });
            (j, self.factor(Dropped::Scores, j, options) * capped + bias)
        };
        let keys = options.band.keys_of(self.row, &self.inputs.shape);
        keys.filter(sees).map(score).collect()
    }

    /// The slope of the score at key `j`.
    fn slope(&self, j: usize, options: &AttentionOptions) -> f64 {
        let of_cap = options.softcap.map(f64::from).map_or(1.0, |cap| {
            let tanh = (f64::from(options.scale) * dot(self.query, self.key(j)) / cap).tanh();
            1.0 - tanh * tanh
        });
        of_cap * self.factor(Dropped::Scores, j, options)
    }

    /// The factor of dropout at key `j`; 1 where such numbers are not dropped.
    fn factor(&self, dropped: Dropped, j: usize, options: &AttentionOptions) -> f64 {
        let shape = &self.inputs.shape;
        let row = (self.batch * shape.heads + self.head) * shape.queries + self.row;
        options
            .dropout_of(dropped)
            .map_or(1.0, |dropout| f64::from(dropout.draw.factor(row, j)))
    }
}

/// What is taken from scores of this maximum or log-sum-exp: nothing from those that are all negative infinity.
fn shift_by(largest: f64) -> f64 {
    match largest == f64::NEG_INFINITY {
        true => 0.0,
        false => largest,
    }
}

/// The probabilities of scores, and their log-sum-exp. A row of no scores, or of negative infinity only, is 0.
fn softmax(scores: &[(usize, f64)]) -> (Vec<(usize, f64)>, f64) {
    let largest = scores
        .iter()
        .map(|&(_, s)| s)
        .fold(f64::NEG_INFINITY, f64::max);
    let shift = shift_by(largest);
    let weights = || scores.iter().map(|&(j, s)| (j, (s - shift).exp()));
    let sum: f64 = weights().map(|(_, weight)| weight).sum();
    if sum == 0.0 {
        let zeros = scores.iter().map(|&(j, _)| (j, 0.0)).collect();
        return (zeros, f64::NEG_INFINITY);
    }
    let probabilities = weights().map(|(j, weight)| (j, weight / sum)).collect();
    (probabilities, shift + sum.ln())
}

/// The numbers of codes: parts of so many elements, the last of which may be shorter, have groups of so many with one
/// scale.
fn in_codes(x: &[f64], part: usize, group: usize) -> Vec<f64> {
    let mut rounded = x.to_vec();
    for part in rounded.chunks_mut(part.max(1)) {
        for group in part.chunks_mut(group.max(1)) {
            if !group.iter().all(|x| x.is_finite()) {
                group.fill(f64::NAN);
                continue;
            }
            // In FP32, as codes are: half of the largest lies between two of them.
            let absmax = group
                .iter()
                .fold(0.0f32, |absmax, x| absmax.max(x.abs() as f32));
            let (scale, inverse) = (absmax / LARGEST_CODE, LARGEST_CODE / absmax);
            for x in group.iter_mut().filter(|_| absmax > 0.0) {
                *x = f64::from((*x as f32 * inverse).round_ties_even()) * f64::from(scale);
            }
        }
    }
    rounded
}

/// A number to the nearest multiple of a scale; where that is 0 or NaN, so is the number.
fn round(x: f64, scale: f64) -> f64 {
    match scale > 0.0 {
        true => (x / scale).round_ties_even() * scale,
        false => x,
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
