//! Fresh problems of attention with every option.

use cubecl_kernels::{
    attention::{
        AttentionGradients, AttentionOptions, AttentionProducts, AttentionShape, Band, Dropout,
        Dropped,
    },
    dropout::Draw,
    reference::attention::{
        AttentionInputs, Broadcast, ReferenceAttention, attention, attention_backward,
    },
    rounding::StochasticKey,
};

use crate::random::Random;

/// Inputs of attention and the gradient of its output.
#[derive(Debug, Clone)]
pub struct Problem {
    pub shape: AttentionShape,
    pub options: AttentionOptions,
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
    pub mask: Option<(Vec<bool>, [usize; 4])>,
    pub bias: Option<(Vec<f32>, [usize; 4])>,
    pub gradient: Vec<f32>,
}

/// The results of the reference.
pub struct Expected {
    pub forward: ReferenceAttention,
    pub gradients: AttentionGradients<Vec<f64>>,
}

/// Which dimensions of the scores a mask or a bias has of its own.
pub type Dims = [bool; 4];

/// The settings that a problem is drawn by.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Batch, heads, heads of keys.
    pub heads: [usize; 3],
    /// Queries and keys.
    pub sequence: [usize; 2],
    /// Features of keys and of values.
    pub width: [usize; 2],
    pub scale: f32,
    pub softcap: Option<f32>,
    pub band: Band,
    pub dropout: f32,
    pub dropped: Dropped,
    pub mask: Option<Dims>,
    pub bias: Option<Dims>,
    pub products: AttentionProducts,
}

impl Kind {
    /// Without options.
    pub const fn plain(heads: [usize; 3], sequence: [usize; 2], width: [usize; 2]) -> Self {
        Self {
            heads,
            sequence,
            width,
            scale: 0.3,
            softcap: None,
            band: Band::ALL,
            dropout: 0.0,
            dropped: Dropped::Probabilities,
            mask: None,
            bias: None,
            products: AttentionProducts::Float,
        }
    }
}

const ALL: Dims = [true; 4];

/// Every gradient, that of a bias too.
pub const ALL_GRADIENTS: AttentionGradients<bool> = AttentionGradients {
    query: true,
    key: true,
    value: true,
    bias: true,
};

/// Every option alone, every two of some, and all at once, over sequences of one, of a tile, beside it and between,
/// with more queries than keys and fewer, grouped heads, and values of another width.
pub fn kinds() -> Vec<Kind> {
    let window = |left, right| Band { left, right };
    let base = Kind::plain([2, 3, 3], [37, 37], [16, 16]);
    let long = Kind::plain([1, 2, 1], [130, 301], [24, 8]);
    vec![
        base,
        long,
        Kind::plain([1, 1, 1], [1, 1], [1, 1]),
        Kind::plain([1, 2, 2], [1, 70], [64, 64]),
        Kind::plain([2, 1, 1], [70, 1], [5, 9]),
        Kind::plain([1, 6, 2], [33, 65], [32, 40]),
        Kind::plain([1, 4, 1], [64, 32], [7, 3]),
        Kind::plain([1, 1, 1], [31, 33], [256, 256]),
        Kind::plain([1, 1, 1], [40, 40], [130, 97]),
        Kind { scale: 0.0, ..base },
        Kind {
            scale: -0.5,
            ..base
        },
        Kind {
            softcap: Some(1.5),
            ..base
        },
        Kind {
            band: Band::CAUSAL,
            ..base
        },
        Kind {
            band: Band::CAUSAL,
            ..long
        },
        Kind {
            band: Band::CAUSAL,
            sequence: [301, 130],
            ..long
        },
        Kind {
            band: window(Some(5), Some(3)),
            ..base
        },
        Kind {
            band: window(Some(40), Some(0)),
            ..long
        },
        Kind {
            band: window(None, Some(9)),
            sequence: [90, 20],
            ..base
        },
        Kind {
            band: window(Some(2), None),
            sequence: [20, 90],
            ..base
        },
        Kind {
            dropout: 0.3,
            ..base
        },
        Kind {
            dropout: 0.5,
            dropped: Dropped::Scores,
            band: Band::CAUSAL,
            ..long
        },
        Kind {
            mask: Some(ALL),
            ..base
        },
        Kind {
            mask: Some([true, false, false, true]),
            ..long
        },
        Kind {
            mask: Some([false, false, true, true]),
            band: Band::CAUSAL,
            ..base
        },
        Kind {
            mask: Some([false, true, true, false]),
            ..base
        },
        Kind {
            bias: Some(ALL),
            ..base
        },
        Kind {
            bias: Some([false, true, true, true]),
            ..long
        },
        Kind {
            bias: Some([true, false, false, true]),
            band: Band::CAUSAL,
            ..base
        },
        Kind {
            bias: Some([false, false, true, false]),
            ..base
        },
        Kind {
            bias: Some([false; 4]),
            softcap: Some(2.0),
            ..base
        },
        Kind {
            scale: -0.2,
            softcap: Some(3.0),
            band: window(Some(60), Some(7)),
            dropout: 0.25,
            mask: Some([true, false, true, true]),
            bias: Some([false, true, true, true]),
            ..Kind::plain([2, 4, 2], [75, 99], [40, 24])
        },
        Kind {
            softcap: Some(3.0),
            band: window(Some(60), Some(7)),
            dropout: 0.25,
            dropped: Dropped::Scores,
            mask: Some([true, false, true, true]),
            bias: Some([false, true, true, true]),
            ..Kind::plain([2, 4, 2], [75, 99], [40, 24])
        },
    ]
}

impl Problem {
    /// All gradients that there are.
    pub fn wanted(&self) -> AttentionGradients<bool> {
        AttentionGradients {
            bias: self.bias.is_some(),
            ..ALL_GRADIENTS
        }
    }

    pub fn draw(random: &mut Random, kind: Kind) -> Self {
        let [batch, heads, kv_heads] = kind.heads;
        let [queries, keys] = kind.sequence;
        let [width, value_width] = kind.width;
        let shape = AttentionShape {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            width,
            value_width,
        };
        let mut normals = |shape: [usize; 4]| -> Vec<f32> {
            let count = shape.iter().product();
            (0..count).map(|_| random.normal()).collect()
        };
        let own = |dims: Dims| {
            let mut own = shape.scores();
            for (extent, has) in own.iter_mut().zip(dims) {
                *extent = if has { *extent } else { 1 };
            }
            own
        };
        let query = normals(shape.query());
        let key = normals(shape.key());
        let value = normals(shape.value());
        let gradient = normals(shape.output());
        let bias = kind.bias.map(|dims| (normals(own(dims)), own(dims)));
        let mask = kind.mask.map(|dims| {
            let drawn = normals(own(dims));
            (drawn.into_iter().map(|x| x > 0.3).collect(), own(dims))
        });
        let key_of_dropout = StochasticKey {
            seed: random.index(1 << 24) as u64,
            stream: (1 << 40) + random.index(1 << 24) as u64,
        };
        Self {
            shape,
            options: AttentionOptions {
                scale: kind.scale,
                softcap: kind.softcap,
                band: kind.band,
                dropout: (kind.dropout > 0.0).then_some(Dropout {
                    dropped: kind.dropped,
                    draw: Draw {
                        rate: kind.dropout,
                        key: key_of_dropout,
                    },
                }),
                products: kind.products,
            },
            query,
            key,
            value,
            mask,
            bias,
            gradient,
        }
    }

    /// The inputs as the host takes them.
    pub fn inputs(&self) -> AttentionInputs<'_, f32> {
        AttentionInputs {
            shape: self.shape,
            query: &self.query,
            key: &self.key,
            value: &self.value,
            mask: self.hidden(),
            bias: self.bias.as_ref().map(|(data, shape)| Broadcast {
                data,
                shape: *shape,
            }),
        }
    }

    pub fn hidden(&self) -> Option<Broadcast<'_, bool>> {
        self.mask.as_ref().map(|(data, shape)| Broadcast {
            data,
            shape: *shape,
        })
    }

    /// The results of the reference.
    pub fn solve(&self) -> Expected {
        let wide = Wide::of(self);
        let inputs = wide.inputs(self);
        let gradient = widened(&self.gradient);
        Expected {
            forward: attention(&inputs, &self.options).expect("a problem that fits"),
            gradients: attention_backward(&inputs, &self.options, &gradient)
                .expect("a problem that fits"),
        }
    }
}

/// The float inputs in `f64`.
#[derive(Debug, Clone)]
pub struct Wide {
    pub query: Vec<f64>,
    pub key: Vec<f64>,
    pub value: Vec<f64>,
    pub bias: Vec<f64>,
}

impl Wide {
    pub fn of(problem: &Problem) -> Self {
        Self {
            query: widened(&problem.query),
            key: widened(&problem.key),
            value: widened(&problem.value),
            bias: widened(problem.bias.as_ref().map_or(&[], |(data, _)| data)),
        }
    }

    pub fn inputs<'a>(&'a self, problem: &'a Problem) -> AttentionInputs<'a, f64> {
        AttentionInputs {
            shape: problem.shape,
            query: &self.query,
            key: &self.key,
            value: &self.value,
            mask: problem.hidden(),
            bias: problem.bias.as_ref().map(|(_, shape)| Broadcast {
                data: &self.bias,
                shape: *shape,
            }),
        }
    }
}

pub fn widened(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

/// Closeness, relative to the largest magnitude that is expected.
#[track_caller]
pub fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    let error = error(actual, expected);
    assert!(
        error <= tolerance,
        "{what}: off by {error:e} of the largest, more than {tolerance:e}"
    );
}

/// Compares norms, of all together and, ten times as wide, of each row: where a probability lies between two codes, FP32
/// may round it to the other one. A row in which values cancel is no closer than a typical row, as a code moves both
/// alike.
#[track_caller]
pub fn assert_near(actual: &[f32], expected: &[f64], width: usize, share: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let off = |actual: &[f32], expected: &[f64]| {
        let pairs = actual.iter().zip(expected);
        norm(&mut pairs.map(|(&a, e)| f64::from(a) - e))
    };
    let all = norm(&mut expected.iter().copied());
    let of_all = off(actual, expected);
    assert!(
        of_all <= share * all,
        "{what}: off by {of_all:e} of {all:e}"
    );
    let rows = expected.len().div_ceil(width).max(1) as f64;
    let typical = all / rows.sqrt();
    for (actual, expected) in actual.chunks(width).zip(expected.chunks(width)) {
        let row = typical.max(norm(&mut expected.iter().copied()));
        let of_row = off(actual, expected);
        assert!(
            of_row <= 10.0 * share * row,
            "{what}: a row is off by {of_row:e} of {row:e}"
        );
    }
}

/// How close FP32 comes: 1e-5, or what the rounding of a log-sum-exp makes of probabilities, where that is more. Four
/// times that, since errors of gradients add up where the gradients themselves cancel.
pub fn tolerance(expected: &Expected) -> f64 {
    let log_sum_exp = expected.forward.log_sum_exp.iter();
    let finite = log_sum_exp.filter(|x| x.is_finite());
    let largest = finite.fold(0.0f64, |largest, x| largest.max(x.abs()));
    f64::max(1e-5, 4.0 * largest * f64::from(f32::EPSILON))
}

/// Rows of scores that an element of the bias is added to: its gradient is the sum of theirs, and cancels where the
/// element is added to all keys of a row.
pub fn rows_of_a_bias(problem: &Problem) -> f64 {
    let rows = |shape: &[usize]| shape[..3].iter().product::<usize>().max(1) as f64;
    let of_bias = problem.bias.as_ref().map(|(_, shape)| rows(shape));
    of_bias.map_or(1.0, |of_bias| rows(&problem.shape.scores()) / of_bias)
}

/// The largest difference, relative to the largest magnitude that is expected, or to 0.5 where all of it cancels:
/// inputs are of order one. Infinite where only one is not finite.
#[track_caller]
pub fn error(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len(), "length");
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0.0f64, |largest, x| largest.max(x.abs()));
    let differences = actual.iter().zip(expected).map(|(&a, &e)| {
        let a = f64::from(a);
        let same = a == e || (a.is_nan() && e.is_nan());
        match (same, (a - e).abs() / largest.max(0.5)) {
            (true, _) => 0.0,
            (false, difference) if difference.is_finite() => difference,
            (false, _) => f64::INFINITY,
        }
    });
    differences.fold(0.0, f64::max)
}

/// Asserts that one head whose query `row` is not finite, and sees key 0, shows it: NaN in all that the row
/// gives, and in no other output.
#[track_caller]
pub fn assert_row_is_nan(
    bad: f32,
    row: usize,
    output: &[f32],
    log_sum_exp: &[f32],
    gradients: &AttentionGradients<Option<Vec<f32>>>,
) {
    let width = output.len() / log_sum_exp.len();
    for (index, output) in output.chunks(width).enumerate() {
        let all_nan = output.iter().all(|x| x.is_nan());
        let finite = output.iter().all(|x| x.is_finite());
        assert!(
            if index == row { all_nan } else { finite },
            "{bad}: row {index}: {output:?}"
        );
    }
    assert!(log_sum_exp[row].is_nan());
    let of_query = gradients.query.as_ref().expect("wanted");
    assert!(of_query[row * width..][..width].iter().all(|x| x.is_nan()));
    let of_key = gradients.key.as_ref().expect("wanted");
    assert!(
        of_key[..width].iter().all(|x| x.is_nan()),
        "the row sees key 0"
    );
}
