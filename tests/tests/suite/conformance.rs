//! The properties that every recipe of the list must have, on every backend.

use std::sync::Arc;

use crate::suite::learned_definition;
use burn::{
    backend::Autodiff,
    optim::{GradientsAccumulator, GradientsParams, Optimizer},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
};
use burn_quant_train::{
    QuantTrain,
    data::{DataBackend, StochasticKey},
    every_recipe,
    health::HealthConfig,
    layer::{Call, Layer, Role},
    optim::StateFormat,
    recipe::{
        Cast, Granularity, LinearRow, NAMES, Number, Product, Recipe, Residual, Rounding,
        ScaleNumber, ScaleSource, Transform,
    },
};
use cubecl_kernels::{
    granularity, quantize::QuantizeSpec, reference, rounding, shape::MatrixShape,
};
use quant_train_tests::{
    Rng,
    data::{float_product_error, floats, same_bits, tag_of, tensor},
    models::{Classifier, Mlp, One},
    train::{attached, every_layer, parameters_of, samples, tail, train, transplant},
};

/// Makes a module of tests for each recipe, of one with each backend of this build.
macro_rules! for_each_recipe {
    (() $($recipe:ident)*) => {
        /// The recipes that the tests below are made for.
        const TESTED: &[&str] = &[
            $(<burn_quant_train::recipe::$recipe<f32> as Recipe>::ROW.name),*
        ];
        $(
            #[allow(non_snake_case)]
            mod $recipe {
                use burn_quant_train::{data::DataBackend, recipe};
                use quant_train_tests::data::if_drawn;
                type R = recipe::$recipe<f32>;

                quant_train_tests::on_every_backend! {
                    equals_the_reference => reference;
                    nan_and_infinity_are_seen => not_finite;
                    every_shape => shapes;
                    a_resumed_run_is_exact => resume;
                    accumulation_quantizes_a_weight_once => accumulation;
                    nothing_is_left_behind => leak;
                    learns => learning;
                    measuring_changes_no_bit => measuring;
                }

                fn reference<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::equals_the_reference::<B, R>(seed));
                }
                fn not_finite<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::nan_and_infinity_are_seen::<B, R>(seed));
                }
                fn shapes<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::every_shape::<B, R>(seed));
                }
                fn resume<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::a_resumed_run_is_exact::<B, R>(seed));
                }
                fn accumulation<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::accumulation_quantizes_a_weight_once::<B, R>(seed));
                }
                fn leak<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::nothing_is_left_behind::<B, R>(seed));
                }
                fn learning<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::learns::<B, R>(seed));
                }
                fn measuring<B: DataBackend>(seed: u64) {
                    if_drawn::<R>(|| super::measuring_changes_no_bit::<B, R>(seed));
                }
            }
        )*
    };
}

every_recipe!(for_each_recipe());

type T<B, R> = QuantTrain<Autodiff<B>, R>;
type M<B, R> = Mlp<T<B, R>>;

#[test]
fn the_list_is_tested_whole() {
    let mut names: Vec<_> = NAMES.iter().map(|name| name.as_str()).collect();
    assert_eq!(TESTED, names);
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names.len(),
        NAMES.len(),
        "two recipes share a name: {TESTED:?}"
    );
}

/// A matrix in f64.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    pub shape: [usize; 2],
    values: Vec<f64>,
}

impl Matrix {
    pub fn of(values: &[f32], shape: [usize; 2]) -> Self {
        Self {
            shape,
            values: values.iter().map(|x| f64::from(*x)).collect(),
        }
    }

    pub fn t(&self) -> Self {
        let [rows, cols] = self.shape;
        let turned = (0..cols).flat_map(|col| (0..rows).map(move |row| (row, col)));
        Self {
            shape: [cols, rows],
            values: turned
                .map(|(row, col)| self.values[row * cols + col])
                .collect(),
        }
    }

    pub fn times(&self, other: &Self) -> Self {
        let ([m, k], [_, n]) = (self.shape, other.shape);
        let mut values = vec![0.0; m * n];
        for row in 0..m {
            for depth in 0..k {
                let factor = self.values[row * k + depth];
                let from = &other.values[depth * n..][..n];
                let to = &mut values[row * n..][..n];
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, from)| *to += factor * from);
            }
        }
        Self {
            shape: [m, n],
            values,
        }
    }

    /// `of` each number and the one in its place in another matrix.
    pub fn zip(&self, other: &Self, of: impl Fn(f64, f64) -> f64) -> Self {
        assert_eq!(self.shape, other.shape);
        let pairs = self.values.iter().zip(&other.values);
        Self {
            shape: self.shape,
            values: pairs.map(|(it, other)| of(*it, *other)).collect(),
        }
    }

    pub fn floats(&self) -> Vec<f32> {
        self.values.iter().map(|it| *it as f32).collect()
    }

    /// The Frobenius norm.
    pub fn norm(&self) -> f64 {
        self.values.iter().map(|it| it.powi(2)).sum::<f64>().sqrt()
    }

    /// How far these numbers are from it, in the Frobenius norm.
    pub fn distance(&self, got: &[f32]) -> f64 {
        assert_eq!(got.len(), self.values.len());
        let pairs = got.iter().zip(&self.values);
        let squares = pairs.map(|(got, it)| (f64::from(*got) - it).powi(2));
        squares.sum::<f64>().sqrt()
    }

    /// With this added to each row.
    fn plus(mut self, row: &[f32]) -> Self {
        for values in self.values.chunks_mut(row.len()) {
            values
                .iter_mut()
                .zip(row)
                .for_each(|(it, row)| *it += f64::from(*row));
        }
        self
    }
}

/// The dimension of a stored matrix that a product sums over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inner {
    Rows,
    Cols,
}

/// The matrix that the product of a row sees in the place of this one, from the definitions.
fn seen(
    cast: &Cast,
    values: &[f32],
    shape: [usize; 2],
    inner: Inner,
    key: StochasticKey,
    threshold: Option<f32>,
) -> Matrix {
    let [rows, cols] = shape;
    let of = MatrixShape::new(rows, cols);
    let rounding = match cast.rounding {
        Rounding::Nearest => rounding::Rounding::Nearest,
        Rounding::Stochastic => rounding::Rounding::Stochastic(key),
    };
    let fallback = match (cast.residual, cast.granularity) {
        (Residual::Never, _) => None,
        (Residual::Above(_), Granularity::Block(side)) => threshold.map(|it| (side, it)),
        (Residual::Always, Granularity::Block(side)) => Some((side, -1.0)),
        (residual, granularity) => panic!("{residual:?} of {granularity:?}"),
    };
    if let Some((side, threshold)) = fallback {
        let quantized = reference::quantize_fallback(values, of, side, threshold);
        return Matrix {
            shape,
            values: reference::dequantize_fallback(&quantized),
        };
    }
    let spec = |granularity| {
        QuantizeSpec::new(cast.number, granularity)
            .with_scale(cast.scale)
            .with_rounding(rounding)
    };
    if let ScaleSource::History(_) = cast.source {
        // The layer has not run before.
        let spec = spec(granularity::Granularity::Tensor);
        let (quantized, _) = reference::quantize_delayed(values, of, &spec, 0.0);
        return Matrix::of(&reference::dequantize(&quantized), shape);
    }
    let whole = |granularity| {
        let quantized = reference::quantize(values, of, &spec(granularity));
        Matrix::of(&reference::dequantize(&quantized), shape)
    };
    match (cast.granularity, inner) {
        (Granularity::Block(side), _) => whole(granularity::Granularity::Block(side)),
        (Granularity::Tensor, _) => whole(granularity::Granularity::Tensor),
        (Granularity::Row, Inner::Cols) => whole(granularity::Granularity::Token),
        (Granularity::Row, Inner::Rows) => whole(granularity::Granularity::Channel),
        (Granularity::Group(size), _) => {
            let mut lines = match inner {
                Inner::Cols => values.to_vec(),
                Inner::Rows => reference::transpose(values, of),
            };
            let [count, mut length] = match inner {
                Inner::Cols => [rows, cols],
                Inner::Rows => [cols, rows],
            };
            match cast.transform {
                Transform::Identity => {}
                Transform::RandomHadamard => {
                    lines = reference::hadamard::random_hadamard(&lines, [count, length]);
                    length = lines.len() / count;
                }
                Transform::Hadamard(slot) => panic!("{slot:?} without a learned step size"),
            }
            let spec = spec(granularity::Granularity::Group(size));
            let quantized = reference::quantize(&lines, MatrixShape::new(count, length), &spec);
            let seen = Matrix::of(&reference::dequantize(&quantized), [count, length]);
            match inner {
                Inner::Cols => seen,
                Inner::Rows => seen.t(),
            }
        }
    }
}

/// A stored matrix as an operand.
#[derive(Clone, Copy)]
struct Stored<'a> {
    values: &'a [f32],
    shape: [usize; 2],
    transpose: bool,
    role: Role,
}

/// The product of a row, of the operands as it sees them.
fn product_of<B: DataBackend>(
    product: &Product,
    [left, right]: [Stored<'_>; 2],
    layer: &Layer<B>,
    threshold: f32,
) -> Matrix {
    let casts = match product {
        Product::Compute => [None, None],
        Product::Quantized { left, right, .. } => [Some(left), Some(right)],
    };
    let first_call = Call {
        time: 0,
        step: 0,
        lane: 0,
        index: 0,
    };
    let operand = |stored: Stored<'_>, cast: Option<&Cast>, is_left: bool| {
        let Stored {
            values,
            shape,
            transpose,
            role,
        } = stored;
        let inner = if transpose == is_left {
            Inner::Rows
        } else {
            Inner::Cols
        };
        let matrix = match cast {
            None => Matrix::of(values, shape),
            Some(cast) => {
                let key = layer.key(first_call, role);
                seen(cast, values, shape, inner, key, Some(threshold))
            }
        };
        if transpose { matrix.t() } else { matrix }
    };
    operand(left, casts[0], true).times(&operand(right, casts[1], false))
}

fn left_of(product: &Product) -> Option<Cast> {
    match product {
        Product::Compute => None,
        Product::Quantized { left, .. } => Some(left.with_residual(Residual::Never)),
    }
}

fn right_of(product: &Product) -> Option<Cast> {
    match product {
        Product::Compute => None,
        Product::Quantized { right, .. } => Some(*right),
    }
}

/// Y, dX and dW of a layer, as the recipe's row defines them.
pub(crate) struct Definition {
    pub y: Matrix,
    pub dx: Matrix,
    pub dw: Matrix,
}

impl Definition {
    /// For X `[rows, K]`, W `[K, N]` and dY `[rows, N]`.
    fn new<B: DataBackend, R: Recipe>(
        [x, w, dy]: [&[f32]; 3],
        [rows, k, n]: [usize; 3],
        layer: &Layer<B>,
        threshold: f32,
    ) -> Self {
        let Some(row) = R::ROW.linear else {
            let [x, w, dy] = [
                Matrix::of(x, [rows, k]),
                Matrix::of(w, [k, n]),
                Matrix::of(dy, [rows, n]),
            ];
            return Self {
                y: x.times(&w),
                dx: dy.times(&w.t()),
                dw: x.t().times(&dy),
            };
        };
        if let Some(learned) = learned_definition::definition(&row, [x, w, dy], [rows, k, n], layer)
        {
            return learned;
        }
        let stored = |values, shape, transpose, role| Stored {
            values,
            shape,
            transpose,
            role,
        };
        // Operands whose casts are the same, of scales that turn with the matrix, are one copy, of one draw.
        let of_same = |a: Option<Cast>, b: Option<Cast>, role: Role, other: Role| match (a, b) {
            (Some(a), Some(b)) if a == b => match a.granularity {
                Granularity::Block(_) | Granularity::Tensor => role,
                Granularity::Row | Granularity::Group(_) => other,
            },
            (Some(_), Some(_)) | (None, _) | (_, None) => other,
        };
        let saved = of_same(
            left_of(&row.forward),
            left_of(&row.weight_gradient),
            Role::Input,
            Role::SavedInput,
        );
        let weight = of_same(
            right_of(&row.forward),
            right_of(&row.input_gradient),
            Role::Weight,
            Role::WeightOfInput,
        );
        let gradient = match row.input_gradient {
            Product::Compute => Role::OutputGradient,
            Product::Quantized { left, .. } => of_same(
                Some(left),
                right_of(&row.weight_gradient),
                Role::OutputGradient,
                Role::OutputGradientOfWeight,
            ),
        };
        let product = |product: &Product, operands| product_of(product, operands, layer, threshold);
        Self {
            y: product(
                &row.forward,
                [
                    stored(x, [rows, k], false, Role::Input),
                    stored(w, [k, n], false, Role::Weight),
                ],
            ),
            dx: product(
                &row.input_gradient,
                [
                    stored(dy, [rows, n], false, Role::OutputGradient),
                    stored(w, [k, n], true, weight),
                ],
            ),
            dw: product(
                &row.weight_gradient,
                [
                    stored(x, [rows, k], true, saved),
                    stored(dy, [rows, n], false, gradient),
                ],
            ),
        }
    }
}

/// Numbers with a few outliers, some of which exceed a threshold.
fn activations(rng: &mut Rng, count: usize) -> Vec<f32> {
    let mut x = rng.normals(count, 1.0);
    for _ in 0..1 + count / 700 {
        let place = rng.below(count);
        x[place] *= 30.0;
    }
    x
}

const THRESHOLD: f32 = 6.0;

/// Each of the three products, for inputs of this shape, is the float64 product of what the row makes of its operands.
pub(crate) fn check_shape<B: DataBackend, R: Recipe, const D: usize>(
    seed: u64,
    rng: &mut Rng,
    shape: [usize; D],
    n: usize,
) {
    let rows: usize = shape[..D - 1].iter().product();
    let x = activations(rng, rows * shape[D - 1]);
    let dy = activations(rng, rows * n);
    check_data::<B, R, D>(seed, rng, shape, n, [&x, &dy]);
}

/// The same for this X and this dY.
pub(crate) fn check_data<B: DataBackend, R: Recipe, const D: usize>(
    seed: u64,
    rng: &mut Rng,
    shape: [usize; D],
    n: usize,
    [x, dy]: [&[f32]; 2],
) {
    let device = B::Device::default();
    let k = shape[D - 1];
    let rows = shape[..D - 1].iter().product();
    let what = format!("seed {seed}: {} {shape:?} to {n}", R::ROW.name);
    let mut config = every_layer(rng.bits());
    config.threshold.initial = THRESHOLD;
    let (_optim, model) =
        attached::<T<B, R>, _>(&config, One::new(k, n, true, &device), rng.bits());
    let weight = model.linear.weight.val();
    let layer = tag_of(&weight).layer().expect("attached").clone();
    let bias = floats(&model.linear.bias.as_ref().expect("a bias").val());
    let input = tensor::<T<B, R>, D>(x, shape, &device).require_grad();
    let y = model.linear.forward(input.clone());
    let mut of_y = shape;
    of_y[D - 1] = n;
    assert_eq!(y.dims(), of_y, "{what}");
    let of_y_got = floats(&y);
    let grads = (y * tensor::<T<B, R>, D>(dy, of_y, &device))
        .sum()
        .backward();
    // Step sizes that are set by the data are those of the run.
    let definition =
        Definition::new::<B, R>([x, &floats(&weight), dy], [rows, k, n], &layer, THRESHOLD);
    let dx = input.grad(&grads).expect("dX");
    let dw = weight.grad(&grads).expect("dW");
    assert_eq!(dx.dims(), shape, "{what}");
    let of_bias = Matrix::of(&vec![1.0; rows], [rows, 1]).times(&Matrix::of(&bias, [1, n]));
    let all = Matrix::of(&vec![1.0; rows], [1, rows]);
    let exact = Matrix::of(dy, [rows, n]);
    let db = model
        .linear
        .bias
        .as_ref()
        .expect("a bias")
        .val()
        .grad(&grads)
        .expect("db");
    // FP32 sums of a few hundred products.
    let exact_sums = 5e-6;
    let bound = |product: fn(&LinearRow) -> &Product| match R::ROW.linear.as_ref().map(product) {
        None | Some(Product::Compute) => float_product_error::<B>(),
        Some(Product::Quantized { left, right, .. }) => {
            let casts = [left, right];
            match casts.into_iter().all(is_fp8) || casts.into_iter().any(needs_fp32_copies) {
                true => float_product_error::<B>(),
                false => exact_sums,
            }
        }
    };
    for (name, definition, scale, got, bound) in [
        (
            "Y",
            definition.y.clone().plus(&bias),
            definition.y.norm() + of_bias.norm(),
            of_y_got,
            bound(|row| &row.forward),
        ),
        (
            "dX",
            definition.dx.clone(),
            definition.dx.norm(),
            floats(&dx),
            bound(|row| &row.input_gradient),
        ),
        (
            "dW",
            definition.dw.clone(),
            definition.dw.norm(),
            floats(&dw),
            bound(|row| &row.weight_gradient),
        ),
        (
            "db",
            all.times(&exact),
            exact.norm(),
            floats(&db),
            exact_sums,
        ),
    ] {
        let error = definition.distance(&got) / scale.max(f64::MIN_POSITIVE);
        assert!(error <= bound, "{what}: {name} differs by {error:e}");
    }
}

/// On Hopper the tensor cores' own sums of such products keep about 14 bits.
fn is_fp8(cast: &Cast) -> bool {
    matches!(cast.number, Number::E4M3 | Number::E5M2)
}

/// True where a product sums over FP32 scales of numbers that are no integers: where there is no kernel for it, it is
/// computed from FP32 copies.
fn needs_fp32_copies(cast: &Cast) -> bool {
    let along_the_sum = matches!(
        cast.granularity,
        Granularity::Block(_) | Granularity::Group(_)
    );
    let is_integer = matches!(cast.number, Number::Int8 | Number::Int4);
    along_the_sum && !is_integer && cast.scale == ScaleNumber::F32
}

fn equals_the_reference<B: DataBackend, R: Recipe>(seed: u64) {
    let mut rng = Rng::new(seed);
    let n = |rng: &mut Rng| 1 + rng.below(150);
    for _ in 0..2 {
        let [rows, k, outputs] = [n(&mut rng), n(&mut rng), n(&mut rng)];
        check_shape::<B, R, 2>(seed, &mut rng, [rows, k], outputs);
    }
    let [sequence, k, outputs] = [1 + rng.below(60), n(&mut rng), n(&mut rng)];
    check_shape::<B, R, 3>(seed, &mut rng, [3, sequence, k], outputs);
}

fn every_shape<B: DataBackend, R: Recipe>(seed: u64) {
    let mut rng = Rng::new(seed);
    check_shape::<B, R, 1>(seed, &mut rng, [37], 21);
    check_shape::<B, R, 2>(seed, &mut rng, [1, 1], 1);
    check_shape::<B, R, 2>(seed, &mut rng, [65, 1], 129);
    check_shape::<B, R, 4>(seed, &mut rng, [2, 1, 5, 33], 17);
}

/// A value that is not finite reaches the outputs of its row, dX through W, and dW.
fn nan_and_infinity_are_seen<B: DataBackend, R: Recipe>(seed: u64) {
    let device = B::Device::default();
    let (rows, k, n) = (40, 33, 17);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let what = format!("seed {seed}: {}, {value}", R::ROW.name);
        let mut rng = Rng::new(seed);
        let model = One::new(k, n, false, &device);
        let (_optim, model) = attached::<T<B, R>, _>(&every_layer(seed), model, seed);
        let (row, col) = (rng.below(rows), rng.below(k));
        let mut x = rng.normals(rows * k, 1.0);
        x[row * k + col] = value;
        let x = tensor::<T<B, R>, 2>(&x, [rows, k], &device).require_grad();
        let y = model.linear.forward(x.clone());
        let of_row = floats(&y)[row * n..][..n].to_vec();
        assert!(of_row.iter().all(|y| !y.is_finite()), "{what}: {of_row:?}");
        let grads = y.sum().backward();
        let dw = floats(&model.linear.weight.grad(&grads).expect("dW"));
        let of_col = &dw[col * n..][..n];
        assert!(
            of_col.iter().all(|dw| !dw.is_finite()),
            "{what}: {of_col:?}"
        );

        let y = model
            .linear
            .forward(tensor::<T<B, R>, 2>(&vec![1.0; k], [1, k], &device).require_grad());
        let grads = (y * value).sum().backward();
        let dw = floats(&model.linear.weight.grad(&grads).expect("dW"));
        assert!(dw.iter().all(|dw| !dw.is_finite()), "{what}: dY");
    }
}

/// Stopped after some steps, written to bytes, read into an optimizer and a model of other values, in either order, and
/// gone on: the same losses and weights as without the stop.
fn a_resumed_run_is_exact<B: DataBackend, R: Recipe>(seed: u64) {
    let device = B::Device::default();
    let batches = samples::<T<B, R>, M<B, R>>(seed, 6);
    let (mut optim, model) =
        attached::<T<B, R>, M<B, R>>(&every_layer(seed), Mlp::new(&device), seed);
    let first = train(model, &mut optim, 1e-2, &batches[..3]);
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<T<B, R>>::record(&recorder, optim.to_record(), ()).expect("recorded");
    let kept = first.model.clone();
    let whole = train(first.model, &mut optim, 1e-2, &batches[3..]);

    for model_first in [true, false] {
        let what = format!("seed {seed}: {}, model first: {model_first}", R::ROW.name);
        let (mut after, mut model) =
            attached::<T<B, R>, M<B, R>>(&every_layer(seed + 1), Mlp::new(&device), seed + 1);
        let record = Recorder::<T<B, R>>::load(&recorder, bytes.clone(), &device).expect("loaded");
        if model_first {
            model = transplant::<_, T<B, R>, _, _>(&kept, model, &device);
            after = after.load_record(record);
        } else {
            after = after.load_record(record);
            model = transplant::<_, T<B, R>, _, _>(&kept, model, &device);
        }
        let resumed = train(model, &mut after, 1e-2, &batches[3..]);
        assert!(
            same_bits(&resumed.losses, &whole.losses),
            "{what}: {:?}, uninterrupted {:?}",
            resumed.losses,
            whole.losses
        );
        let ours = parameters_of::<T<B, R>, _>(&resumed.model);
        let theirs = parameters_of::<T<B, R>, _>(&whole.model);
        let same = ours.iter().zip(&theirs).all(|(a, b)| same_bits(a, b));
        assert!(same, "{what}: weights");
    }
}

fn accumulation_quantizes_a_weight_once<B: DataBackend, R: Recipe>(seed: u64) {
    let device = B::Device::default();
    let model = One::new(32, 16, false, &device);
    let (mut optim, mut model) = attached::<T<B, R>, _>(&every_layer(seed), model, seed);
    let mut rng = Rng::new(seed);
    let mut before = Vec::new();
    for step in 0..2 {
        let mut accumulator = GradientsAccumulator::new();
        let mut copies = Vec::new();
        for micro_step in 0..3 {
            let x =
                tensor::<T<B, R>, 2>(&rng.normals(16 * 32, 1.0), [16, 32], &device).require_grad();
            let grads = model.linear.forward(x).sum().backward();
            accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
            let now = tag_of(&model.linear.weight.val()).copies();
            if micro_step == 0 {
                assert_eq!(now.is_empty(), R::ROW.linear.is_none(), "{}", R::ROW.name);
                copies = now;
            } else {
                let same = copies.len() == now.len()
                    && copies
                        .iter()
                        .zip(&now)
                        .all(|((_, a), (_, b))| Arc::ptr_eq(a, b));
                assert!(
                    same,
                    "{}: step {step}, micro step {micro_step}",
                    R::ROW.name
                );
            }
        }
        model = optim.step(1e-2, model, accumulator.grads());
        let renewed = before
            .iter()
            .zip(&copies)
            .all(|(a, b): (&Arc<_>, &(_, Arc<_>))| !Arc::ptr_eq(a, &b.1));
        assert!(renewed, "{}: a new weight, a new copy", R::ROW.name);
        before = copies.into_iter().map(|(_, copy)| copy).collect();
    }
    // Waits for the device too: processes that ended here with work left on CUDA have crashed.
    let weight = floats(&model.linear.weight.val());
    assert!(
        weight.iter().all(|it| it.is_finite()),
        "{}: {weight:?}",
        R::ROW.name
    );
}

/// Nothing but model and optimizer holds a layer: no graph, no copy, no registry.
fn nothing_is_left_behind<B: DataBackend, R: Recipe>(seed: u64) {
    let device = B::Device::default();
    let (mut optim, mut model) =
        attached::<T<B, R>, M<B, R>>(&every_layer(seed), Mlp::new(&device), seed);
    for _ in 0..3 {
        let batches = samples::<T<B, R>, M<B, R>>(seed, 2);
        model = train(model, &mut optim, 1e-3, &batches).model;
    }
    let layer = tag_of(&model.up.weight.val())
        .layer()
        .expect("attached")
        .clone();
    let weak = Arc::downgrade(&layer);
    drop((layer, model, optim));
    assert!(
        weak.upgrade().is_none(),
        "{}: a layer outlives its model",
        R::ROW.name
    );
}

fn learns<B: DataBackend, R: Recipe>(seed: u64) {
    let device = B::Device::default();
    let (mut optim, model) =
        attached::<T<B, R>, M<B, R>>(&every_layer(seed), Mlp::new(&device), seed);
    let losses = train(
        model,
        &mut optim,
        1e-2,
        &samples::<T<B, R>, M<B, R>>(seed, 60),
    )
    .losses;
    let (first, last) = (losses[0], tail(&losses, 5));
    assert!(
        last < 0.8 * first,
        "seed {seed}: {}: {losses:?}",
        R::ROW.name
    );
}

/// With every other step measured, and all recipes tried on what is at hand, a run has the bits that it has without.
fn measuring_changes_no_bit<B: DataBackend, R: Recipe>(seed: u64) {
    let batches = samples::<T<B, R>, M<B, R>>(seed, 5);
    let run = |health: Option<HealthConfig>| {
        let format = seed.is_multiple_of(2).then(|| StateFormat::E4M3.expanded());
        let config = every_layer(seed)
            .with_first(format)
            .with_second(format)
            .with_min_elements(0)
            .with_health(health);
        let model = M::<B, R>::new(&Default::default());
        let (mut optim, model) = attached(&config, model, seed);
        let run = train(model, &mut optim, 1e-2, &batches);
        let kept = (parameters_of(&run.model), optim.layers_record());
        (run.losses, kept, optim.take_health())
    };
    let all = NAMES
        .iter()
        .fold(HealthConfig::every(2), |it, name| it.what_if(*name));
    let (losses, (parameters, layers), none) = run(None);
    let (measured, (measured_parameters, measured_layers), reports) = run(Some(all));
    let name = R::ROW.name;
    assert!(none.is_empty());
    assert!(
        same_bits(&losses, &measured),
        "{name}, seed {seed}: {losses:?} became {measured:?}"
    );
    for (plain, measured) in parameters.iter().zip(&measured_parameters) {
        assert!(
            same_bits(plain, measured),
            "{name}, seed {seed}: parameters differ"
        );
    }
    // Weights have ids of their own.
    for (plain, measured) in layers.layers.iter().zip(&measured_layers.layers) {
        assert_eq!(plain.slots, measured.slots, "{name}, seed {seed}");
    }
    let steps: Vec<_> = reports.iter().map(|report| report.step).collect();
    assert_eq!(steps, [2, 4]);
    for report in &reports {
        // X, W and dY of both layers.
        assert_eq!(report.matrices.len(), 6, "{name}: {report:?}");
        assert_eq!(report.moments.len(), 4, "{name}: {report:?}");
        for matrix in &report.matrices {
            let all = matrix.histogram.iter().sum::<u64>();
            assert_eq!(all, matrix.elements, "{name}: {matrix:?}");
            let is_of = |recipe: &str| matrix.casts.iter().any(|cast| cast.recipe == recipe);
            for other in NAMES.iter().filter(|other| other.row().linear.is_some()) {
                let row = other.row().linear.expect("it was asked");
                let quantizes = row.operands().any(|(it, _)| it.matrix() == matrix.matrix);
                assert_eq!(
                    is_of(other.as_str()),
                    quantizes,
                    "{name}: {other} of {matrix:?}"
                );
            }
            for cast in &matrix.casts {
                assert_eq!(cast.runs, cast.recipe == name);
                let noise = cast.noise.expect("finite values");
                assert!((0.0..1.0).contains(&noise), "{name}, seed {seed}: {cast:?}");
                let cosine = cast.cosine.expect("finite values");
                assert!(
                    (0.5..1.0 + 1e-6).contains(&cosine),
                    "{name}, seed {seed}: {cast:?}"
                );
                let [smallest, largest] = cast.scales.expect("finite scales");
                assert!(0.0 <= smallest && smallest <= largest, "{name}: {cast:?}");
            }
        }
    }
}
