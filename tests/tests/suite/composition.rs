//! Compositions that have a kernel as a whole: as Burn computes them, and what departs from them too.

use burn::{
    backend::{Autodiff, Flex},
    module::{Module, ModuleMapper, Param},
    nn::{
        EmbeddingConfig, LayerNormConfig, LinearConfig, RmsNormConfig, RotaryEncodingConfig,
        SwiGluConfig,
    },
    tensor::{
        DType, Int, Tensor, TensorData,
        activation::{log_softmax, sigmoid, silu},
        backend::{AutodiffBackend, Backend},
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{MixedPrecision, Recipe},
    saved::{Recording, checkpoint},
};
use quant_train_tests::{
    Rng,
    data::{assert_near, floats, tensor},
    in_16_bits, on_every_backend,
};

on_every_backend! {
    norms_and_gates_equal_those_of_fp32 => equal_fp32;
    what_departs_from_a_composition_is_computed_as_it_is => departures;
    a_composition_leaves_its_inputs => leaves_its_inputs;
    without_a_narrow_dtype_nothing_is_composed => not_in_fp32;
    tables_get_the_gradients_of_burn => embedding;
    the_logarithm_of_a_softmax_equals_that_of_fp32 => logarithms;
    logits_beyond_numbers_are_seen => lost_logits;
    sums_and_means_of_few_and_of_many => sums;
}

const COLUMNS: usize = 40;

/// A tensor and the gain of a norm, in the dtype of the test: what [`compare`] differentiates.
struct Inputs<B: Backend> {
    x: Tensor<B, 3>,
    y: Tensor<B, 3>,
    gain: Tensor<B, 1>,
}

/// Output and gradients for the loss `sum(weights * output)`. Inputs reach `forward` in `dtype`, in another shape than
/// their leaves: what has that of a parameter may be a weight, which is not looked at.
fn solve<A: AutodiffBackend>(
    [x, y, gain, weights]: &[Vec<f32>; 4],
    dtype: DType,
    forward: impl Fn(Inputs<A>) -> Tensor<A, 3>,
) -> [Vec<f32>; 4] {
    let device = A::Device::default();
    let shape = [2, x.len() / (2 * COLUMNS), COLUMNS];
    let leaf = |data: &[f32]| tensor::<A, 1>(data, [data.len()], &device).require_grad();
    let (x, y) = (leaf(x), leaf(y));
    let gain = tensor::<A, 1>(gain, [COLUMNS], &device).require_grad();
    let output = forward(Inputs {
        x: x.clone().reshape(shape).cast(dtype),
        y: y.clone().reshape(shape).cast(dtype),
        gain: gain.clone(),
    });
    let weights = tensor::<A, 3>(weights, shape, &device);
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of = |leaf: &Tensor<A, 1>| leaf.grad(&gradients).map_or(vec![], |it| floats(&it));
    [floats(&output), of(&x), of(&y), of(&gain)]
}

/// The same function of both backends.
macro_rules! compare {
    ($name:expr, $recipe:ty, $backend:ty, $dtype:expr, $tolerance:expr, $data:expr, $forward:expr) => {{
        let expected = solve::<Autodiff<Flex>>($data, DType::F32, $forward);
        let actual = solve::<QuantTrain<Autodiff<$backend>, $recipe>>($data, $dtype, $forward);
        for (part, (actual, expected)) in ["output", "dx", "dy", "dgain"]
            .iter()
            .zip(actual.iter().zip(&expected))
        {
            let what = format!("{}, {:?}: {part}", $name, $dtype);
            assert_near(&what, actual, expected, $tolerance);
        }
    }};
}

fn norm<B: Backend>(x: Tensor<B, 3>, gain: Tensor<B, 1>) -> Tensor<B, 3> {
    normalized(x, 1e-5) * gain.unsqueeze()
}

/// As `burn::nn::RmsNorm` has it.
fn normalized<B: Backend>(x: Tensor<B, 3>, epsilon: f32) -> Tensor<B, 3> {
    let dtype = x.dtype();
    x.clone() / root_mean_square(x, epsilon).cast(dtype)
}

fn root_mean_square<B: Backend>(x: Tensor<B, 3>, epsilon: f32) -> Tensor<B, 3> {
    (x.cast(DType::F32).square().mean_dim(2) + epsilon).sqrt()
}

/// Burn's module on rows `[batch, positions, features]`.
fn rotary<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 3> {
    let [_, positions, features] = x.dims();
    let rotary = RotaryEncodingConfig::new(positions + 2, features).init(&x.device());
    rotary.apply(x, 2)
}

/// The same of heads of 8 features, slices of the rows.
fn rotary_of_heads<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 3> {
    let [batch, positions, features] = x.dims();
    let rotary = RotaryEncodingConfig::new(positions, 8).init(&x.device());
    let heads = x
        .reshape([batch, positions, features / 8, 8])
        .swap_dims(1, 2);
    let turned = rotary.forward(heads).swap_dims(1, 2);
    turned.reshape([batch, positions, features])
}

/// The same where the tables have the dtype of x, as on a device whose default it is.
fn by_narrow_tables<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 3> {
    let [batch, positions, features] = x.dims();
    let dtype = x.dtype();
    let rotary = RotaryEncodingConfig::new(positions, features).init::<B>(&x.device());
    let spread = turned(x, dtype).reshape([batch, positions, features, 2]);
    let scaled = spread * rotary.freq_complex.cast(dtype).unsqueeze();
    scaled.sum_dim(3).reshape([batch, positions, features])
}

/// Pairs of neighbours, each times the matrix of Burn's module, in this dtype.
fn turned<B: Backend>(x: Tensor<B, 3>, dtype: DType) -> Tensor<B, 4> {
    let [batch, positions, features] = x.dims();
    let turn = [[1.0, 0.0, 0.0, 1.0], [0.0, -1.0, 1.0, 0.0]];
    let turn = Tensor::<B, 2>::from_floats(turn, &x.device()).cast(dtype);
    x.reshape([batch, positions, features / 2, 2])
        .matmul(turn.unsqueeze())
}

fn equal_fp32<B: DataBackend>(seed: u64) {
    in_16_bits!(B, modules(seed));
}

fn modules<B: DataBackend, R: Recipe>(dtype: DType, tolerance: f32, seed: u64) {
    let sizes = [(1, 16), (3, 7), (2, 129), (130, 40), (5, 768)];
    for (rows, columns) in Rng::new(seed).drawn(sizes, 2) {
        let mut rng = Rng::new(seed ^ (rows * 1000 + columns) as u64);
        let data =
            [rows * columns, columns, rows * columns].map(|count| rng.normals_of_16_bits(count));
        let expected = of_modules::<Autodiff<Flex>>(&data, DType::F32);
        let actual = of_modules::<QuantTrain<Autodiff<B>, R>>(&data, dtype);
        for (part, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let what = format!("seed {seed}, {rows} x {columns}, {dtype:?}: part {part}");
            assert_near(&what, actual, expected, tolerance);
        }
    }
}

/// Output of Burn's modules, and the gradients of the input and of their parameters.
fn of_modules<A: AutodiffBackend>(
    [x, gain, weights]: &[Vec<f32>; 3],
    dtype: DType,
) -> Vec<Vec<f32>> {
    struct Fill<'a>(&'a [f32]);

    impl<B: Backend> ModuleMapper<B> for Fill<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|tensor| {
                let count = self.0.len();
                // Each row of a matrix begins with another one: rows that are alike sum to nothing all at once.
                let values = (0..tensor.shape().num_elements())
                    .map(|index| 0.1 * self.0[(index + index / count) % count])
                    .collect();
                Tensor::from_data(TensorData::new(values, tensor.shape()), &tensor.device())
                    .require_grad()
            })
        }
    }

    let device = A::Device::default();
    let columns = gain.len();
    let rows = x.len() / columns;
    let norm = RmsNormConfig::new(columns).init::<A>(&device);
    let mut norm = norm.map(&mut Fill(gain));
    norm.epsilon = 1e-2;
    let gate = SwiGluConfig::new(columns, columns).init::<A>(&device);
    let gate = gate.map(&mut Fill(gain));
    let leaf = tensor::<A, 1>(x, [x.len()], &device).require_grad();
    let layer_norm = LayerNormConfig::new(columns).with_epsilon(1e-2);
    let layer_norm = layer_norm.init::<A>(&device).map(&mut Fill(gain));
    let x = leaf.clone().reshape([rows, columns]).cast(dtype);
    let normed = norm.forward(x.clone());
    let output = normed.clone() + gate.forward(normed) + layer_norm.forward(x);
    let weights = tensor::<A, 2>(weights, [rows, columns], &device);
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of_gain = norm.gamma.val().grad(&gradients).expect("of the gain");
    let of_gate = gate.linear_inner.weight.val().grad(&gradients);
    let bias = layer_norm.beta.as_ref().expect("a bias").val();
    let of_layer_norm = [layer_norm.gamma.val(), bias].map(|it| it.grad(&gradients));
    let [of_layer_gain, of_bias] = of_layer_norm.map(|it| floats(&it.expect("of the layer norm")));
    vec![
        floats(&output),
        floats(&leaf.grad(&gradients).expect("of x")),
        floats(&of_gain),
        floats(&of_gate.expect("of the gate")),
        of_layer_gain,
        of_bias,
    ]
}

fn departures<B: DataBackend>(seed: u64) {
    in_16_bits!(B, depart(seed));
}

fn depart<B: DataBackend, R: Recipe>(dtype: DType, tolerance: f32, seed: u64) {
    let mut rng = Rng::new(seed);
    let count = 2 * 5 * COLUMNS;
    let data = &[count, count, COLUMNS, count].map(|count| rng.normals_of_16_bits(count));
    macro_rules! case {
        ($name:literal, |$inputs:ident| $forward:expr) => {
            compare!(
                format!("seed {seed}, {}", $name),
                R,
                B,
                dtype,
                tolerance,
                data,
                |$inputs: Inputs<_>| $forward
            )
        };
    }
    case!("a norm", |i| norm(i.x, i.gain) + i.y);
    case!("a gate", |i| silu(i.x) * i.y + i.gain.unsqueeze());
    case!("a gate from the right", |i| i.y * silu(i.x)
        + i.gain.unsqueeze());
    case!("a gate of itself", |i| silu(i.x.clone()) * i.x
        + i.y * i.gain.unsqueeze());
    case!("a gate and what it is made of", |i| {
        let gate = silu(i.x);
        gate.clone() * i.y + gate * i.gain.unsqueeze()
    });
    case!("a sigmoid of another", |i| i.y.clone() * sigmoid(i.x)
        + i.gain.unsqueeze());
    case!("a sigmoid twice", |i| {
        let sigmoid = sigmoid(i.x.clone());
        i.x * sigmoid.clone() * i.y + sigmoid * i.gain.unsqueeze()
    });
    case!("rotary positions", |i| rotary(i.x)
        + i.y * i.gain.unsqueeze());
    case!("rotary positions of heads", |i| rotary_of_heads(i.x) * i.y
        + i.gain.unsqueeze());
    case!("rotary positions by narrow tables", |i| by_narrow_tables(
        i.x
    ) + i.y
        * i.gain.unsqueeze());
    case!("rotary positions twice", |i| rotary(rotary(i.x))
        * i.gain.unsqueeze()
        + i.y);
    case!("pairs that go elsewhere", |i| {
        let [batch, positions, features] = i.x.dims();
        let pairs = i.x.reshape([batch, positions, features / 2, 2]);
        let sums = pairs.clone() * 2 + pairs;
        sums.reshape([batch, positions, features]) + i.y * i.gain.unsqueeze()
    });
    case!("turned pairs that are read twice", |i| {
        let [batch, positions, features] = i.x.dims();
        let turned = turned(i.x, DType::F32);
        let pairs = turned
            .clone()
            .slice([0..batch, 0..positions, 0..features / 2, 0..2]);
        let others = turned.slice([0..batch, 0..positions, 0..features / 2, 2..4]);
        (pairs * 2 + others).reshape([batch, positions, features]) + i.y * i.gain.unsqueeze()
    });
    case!("a table that is trained", |i| {
        let [batch, positions, features] = i.x.dims();
        let spread = turned(i.x, DType::F32).reshape([batch, positions, features, 2]);
        let table = i.gain.reshape([1, 1, features, 1]);
        let table = table.repeat(&[1, positions, 1, 2]);
        (spread * table)
            .sum_dim(3)
            .reshape([batch, positions, features])
            + i.y
    });
    case!("what is scaled and summed up otherwise", |i| {
        let [batch, positions, features] = i.x.dims();
        let spread = turned(i.x, DType::F32).reshape([batch, positions, features, 2]);
        let table = Tensor::ones([1, positions, features, 2], &spread.device());
        let scaled = spread * table;
        let sums = scaled.clone().sum_dim(3) + scaled.mean_dim(3);
        sums.reshape([batch, positions, features]) + i.y * i.gain.unsqueeze()
    });
    case!("a norm without a gain", |i| normalized(i.x, 1e-5)
        + i.y * i.gain.unsqueeze());
    case!("a norm with a matrix as its gain", |i| normalized(
        i.x, 1e-5
    ) * i.y
        + i.gain.unsqueeze());
    case!("a norm over that of another", |i| {
        let dtype = i.x.dtype();
        i.x / root_mean_square(i.y, 0.1).cast(dtype) * i.gain.unsqueeze()
    });
    case!("a norm and its root mean square", |i| {
        let dtype = i.x.dtype();
        let root = root_mean_square(i.x.clone(), 0.1);
        i.x / root.clone().cast(dtype) * i.gain.unsqueeze() + i.y * root.cast(dtype)
    });
    case!("a norm whose input is detached", |i| {
        let dtype = i.x.dtype();
        let x = i.x.clone().detach();
        x / root_mean_square(i.x, 0.1).cast(dtype) * i.gain.unsqueeze() + i.y
    });
    case!("the mean of another dimension", |i| {
        let dtype = i.x.dtype();
        let mean = i.x.clone().cast(DType::F32).square().mean_dim(1);
        i.x / (mean + 0.1).sqrt().cast(dtype) * i.gain.unsqueeze() + i.y
    });
    case!("another power", |i| {
        let dtype = i.x.dtype();
        let mean = i.x.clone().cast(DType::F32).powi_scalar(4).mean_dim(2);
        i.x / (mean + 0.1).sqrt().cast(dtype) * i.gain.unsqueeze() + i.y
    });
    case!("a wide tensor that goes on", |i| {
        let wide = i.x.clone().cast(DType::F32);
        let dtype = i.x.dtype();
        let root = (wide.clone().square().mean_dim(2) + 0.1).sqrt();
        (wide / root).cast(dtype) * i.gain.unsqueeze() + i.y
    });
    case!("two norms in a row", |i| norm(
        norm(i.x, i.gain.clone()),
        i.gain
    ) * i.y);
    case!("one input of two norms", |i| norm(
        i.x.clone(),
        i.gain.clone()
    ) + norm(i.x, i.gain * 2.0)
        * i.y);
}

/// The operations of what waits for the backward pass of a function of x, y and a gain.
fn operations<A: AutodiffBackend>(
    dtype: DType,
    seed: u64,
    forward: impl Fn([Tensor<A, 3>; 2], Tensor<A, 1>) -> Tensor<A, 3>,
) -> Vec<&'static str> {
    let device = A::Device::default();
    let mut rng = Rng::new(seed);
    let mut leaf =
        |count| tensor::<A, 1>(&rng.normals_of_16_bits(count), [count], &device).require_grad();
    let [x, y] = [(); 2].map(|()| leaf(5120).reshape([2, 64, 40]).cast(dtype));
    let gain = leaf(40);
    let recording = Recording::start();
    let output = forward([x.clone(), y], gain);
    let report = recording.report();
    let _ = (output.sum() + x.sum()).backward();
    let mut left: Vec<_> = report.values.iter().map(|value| value.operation).collect();
    left.retain(|operation| !matches!(*operation, "constant" | "float_cast" | "float_reshape"));
    left.sort_unstable();
    left
}

fn leaves_its_inputs<B: DataBackend>(seed: u64) {
    in_16_bits!(B, leave(seed));
}

fn leave<B: DataBackend, R: Recipe>(dtype: DType, _tolerance: f32, seed: u64) {
    let name = B::name(&B::Device::default());
    let has_kernels = ["cuda", "wgpu", "vulkan"]
        .iter()
        .any(|it| name.contains(it));
    type T<B, R> = QuantTrain<Autodiff<B>, R>;
    let gate = operations::<T<B, R>>(dtype, seed, |[x, y], gain| silu(norm(x, gain)) * y);
    let layer_norm = operations::<T<B, R>>(dtype, seed, |[x, _], gain| {
        let mut norm = LayerNormConfig::new(COLUMNS).init(&gain.device());
        norm.gamma = Param::from_tensor(gain);
        norm.forward(x)
    });
    // A value that the test holds does not wait: its double does.
    let logarithms = operations::<T<B, R>>(dtype, seed, |[x, _], _| log_softmax(x, 2) * 2);
    // Burn sums up in FP32; as one operation the positions have the dtype of x.
    let device = B::Device::default();
    let x = Tensor::<T<B, R>, 3>::ones([2, 6, COLUMNS], &device).cast(dtype);
    let of_rotary = match has_kernels {
        true => dtype,
        false => DType::F32,
    };
    assert_eq!(rotary(x.clone()).dtype(), of_rotary);
    assert_eq!(by_narrow_tables(x.clone()).dtype(), of_rotary);
    let layer = LinearConfig::new(COLUMNS, COLUMNS).with_bias(false);
    let layer = layer.init::<T<B, R>>(&device);
    assert_eq!(rotary_of_heads(layer.forward(x)).dtype(), of_rotary);
    match has_kernels {
        true => {
            assert_eq!(logarithms, ["log_softmax"], "seed {seed}, {dtype:?}");
            // The norm's output, which is the gate, and its root mean squares.
            assert_eq!(gate, ["rms_norm", "rms_norm"], "seed {seed}, {dtype:?}");
            // Means and inverse deviations.
            assert_eq!(
                layer_norm,
                ["layer_norm", "layer_norm"],
                "seed {seed}, {dtype:?}"
            );
        }
        false => {
            assert_ne!(logarithms, ["log_softmax"], "seed {seed}, {dtype:?}");
            assert!(gate.len() > 3, "seed {seed}, {dtype:?}: {gate:?}");
            assert!(
                layer_norm.len() > 2,
                "seed {seed}, {dtype:?}: {layer_norm:?}"
            );
        }
    }
}

/// Not even where there are kernels: results are Burn's to the bit.
fn not_in_fp32<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let count = 2 * 5 * COLUMNS;
    let data = &[count, count, COLUMNS, count].map(|count| rng.normals_of_16_bits(count));
    fn forward<B: Backend>(i: Inputs<B>) -> Tensor<B, 3> {
        norm(silu(i.x) * i.y, i.gain)
    }
    let burn = solve::<Autodiff<B>>(data, DType::F32, forward);
    let ours = solve::<QuantTrain<Autodiff<B>, MixedPrecision<f32>>>(data, DType::F32, forward);
    assert_eq!(ours, burn, "seed {seed}");
}

/// To the bit: both add one token after the other.
fn embedding<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for (rows, columns, tokens) in [(7, 3, 50), (100, 16, 20), (2, 33, 1)] {
        let indices: Vec<i32> = (0..tokens).map(|_| rng.below(rows) as i32).collect();
        let weights = rng.normals(tokens * columns, 1.0);
        let case = Table {
            rows,
            columns,
            indices,
            weights,
        };
        let expected = case.gradient::<Autodiff<Flex>>();
        let ours = case.gradient::<QuantTrain<Autodiff<B>, MixedPrecision<f32>>>();
        assert_eq!(
            ours, expected,
            "seed {seed}, {rows} x {columns}, {tokens} tokens"
        );
    }
}

struct Table {
    rows: usize,
    columns: usize,
    indices: Vec<i32>,
    weights: Vec<f32>,
}

impl Table {
    fn gradient<A: AutodiffBackend>(&self) -> Vec<f32> {
        let device = A::Device::default();
        let table = EmbeddingConfig::new(self.rows, self.columns).init::<A>(&device);
        let tokens = self.indices.len();
        let indices = TensorData::new(self.indices.clone(), [1, tokens]);
        let rows = table.forward(Tensor::<A, 2, Int>::from_data(indices, &device));
        let weights = tensor::<A, 3>(&self.weights, [1, tokens, self.columns], &device);
        let gradients = (rows * weights).sum().backward();
        floats(&table.weight.val().grad(&gradients).expect("of the table"))
    }
}

fn logarithms<B: DataBackend>(seed: u64) {
    in_16_bits!(B, of_logits(seed));
}

fn of_logits<B: DataBackend, R: Recipe>(dtype: DType, tolerance: f32, seed: u64) {
    let mut rng = Rng::new(seed);
    let count = 2 * 7 * COLUMNS;
    let data = &[count, count, COLUMNS, count].map(|count| rng.normals_of_16_bits(count));
    macro_rules! case {
        ($name:literal, |$inputs:ident| $forward:expr) => {
            compare!(
                format!("seed {seed}, {}", $name),
                R,
                B,
                dtype,
                tolerance,
                data,
                |$inputs: Inputs<_>| $forward
            )
        };
    }
    case!("logits", |i| log_softmax(i.x * 8, 2));
    case!("logits that are cast", |i| log_softmax(
        (i.x * 8).cast(DType::F32),
        2
    ));
    case!("logits in columns", |i| log_softmax(i.x.swap_dims(1, 2), 2)
        .swap_dims(1, 2));
    case!("another dimension", |i| log_softmax(i.x, 1));
    case!("a cast that others read too", |i| {
        let wide = i.x.cast(DType::F32);
        log_softmax(wide.clone(), 2) + wide
    });
    case!("an output that is read twice", |i| {
        let output = log_softmax(i.x, 2);
        output.clone() * output
    });
    case!("a block that runs again", |i| checkpoint(
        |x| log_softmax(x, 2) * 2,
        i.x
    ));
    let device = Default::default();
    let logits = tensor::<QuantTrain<Autodiff<B>, R>, 2>(&data[0], [14, COLUMNS], &device);
    let trained = floats(&log_softmax(logits.clone().cast(dtype), 1));
    let evaluated = floats(&log_softmax(logits.inner().cast(dtype), 1));
    assert_near("evaluation", &evaluated, &trained, 1e-5);
}

fn lost_logits<B: DataBackend>(_seed: u64) {
    in_16_bits!(B, of_lost_logits());
}

fn of_lost_logits<B: DataBackend, R: Recipe>(dtype: DType, _tolerance: f32) {
    type A<B, R> = QuantTrain<Autodiff<B>, R>;
    let device = Default::default();
    let mut logits = [0.0f32; 3 * COLUMNS];
    logits[1] = f32::NAN;
    logits[COLUMNS + 1] = f32::INFINITY;
    logits[2 * COLUMNS + 1] = f32::NEG_INFINITY;
    let logits = tensor::<A<B, R>, 2>(&logits, [3, COLUMNS], &device).require_grad();
    let output = log_softmax(logits.clone().cast(dtype), 1);
    let gradients = output.clone().slice([2..3, 0..1]).sum().backward();
    let (output, gradient) = (
        floats(&output),
        floats(&logits.grad(&gradients).expect("one")),
    );
    assert!(output[..2 * COLUMNS].iter().all(|it| it.is_nan()));
    let masked = &output[2 * COLUMNS..];
    assert_eq!(masked[1], f32::NEG_INFINITY);
    let others = -((COLUMNS - 1) as f32).ln();
    let is_near = |it: &f32| (it - others).abs() < 1e-4;
    assert!(
        masked
            .iter()
            .enumerate()
            .all(|(index, it)| index == 1 || is_near(it))
    );
    assert_eq!(gradient[2 * COLUMNS + 1], 0.0);
    assert!(gradient[2 * COLUMNS..].iter().all(|it| it.is_finite()));
}

fn sums<B: DataBackend>(seed: u64) {
    in_16_bits!(B, add_up(seed));
}

/// On both sides of the number of elements from which Burn adds up; numbers of 16 bits, so that nothing is rounded
/// before they are added.
fn add_up<B: DataBackend, R: Recipe>(dtype: DType, _tolerance: f32, seed: u64) {
    type A<B, R> = QuantTrain<Autodiff<B>, R>;
    let (mut rng, device) = (Rng::new(seed), Default::default());
    for len in [1, 40, 16_385, 1 << 18, (1 << 18) + 1] {
        let x = rng.normals_of_16_bits(len);
        let total: f64 = x.iter().map(|it| f64::from(*it)).sum();
        let size: f64 = x.iter().map(|it| f64::from(it.abs())).sum();
        let x = tensor::<A<B, R>, 2>(&x, [1, len], &device).require_grad();
        let evaluated = floats(&x.clone().inner().cast(dtype).sum())[0];
        let error = (f64::from(evaluated) - total).abs();
        assert!(error <= 1e-5 * size, "seed {seed}, {dtype:?}, {len}");
        type Reduce<A> = fn(Tensor<A, 2>) -> Tensor<A, 1>;
        let cases: [(_, Reduce<A<B, R>>, _); 4] = [
            ("sum", |x| x.sum(), 1.0),
            ("mean", |x| x.mean(), len as f64),
            ("mean of a column", |x| x.transpose().mean(), len as f64),
            ("sum in a block", |x| checkpoint(|x| x.sum(), x), 1.0),
        ];
        // Burn's mean of many, which one unit may add up, is wrong where loops end after 65,535 turns: Mesa's software
        // Vulkan.
        let count = if len > 1 << 18 { 1 } else { cases.len() };
        for (name, reduce, divisor) in cases.into_iter().take(count) {
            let sum = reduce(x.clone().cast(dtype));
            let what = format!("seed {seed}, {dtype:?}, {name} of {len}");
            let expected = total / divisor;
            let found = f64::from(floats(&sum)[0]);
            let error = (found - expected).abs();
            assert!(
                error <= 1e-5 * size / divisor,
                "{what}: {found} for {expected}"
            );
            let gradient = x.grad(&(sum * 3).backward()).expect("of a leaf");
            let gradient = floats(&gradient);
            let expected = 3.0 / divisor as f32;
            // The gradient has the dtype of what was added up.
            let is_near = |it: &f32| (it - expected).abs() <= 0.01 * expected;
            assert!(gradient.iter().all(is_near), "{what}: {:?}", gradient[0]);
        }
    }
}
