//! The flow between linear layers: operators read it, and keep their inputs; gradients flow back.

use burn::{
    backend::{Autodiff, Flex},
    module::{Module, Param},
    nn::{
        Gelu, LayerNormConfig, RmsNormConfig,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{
        DType, Tensor,
        activation::{gelu, silu},
        backend::{AutodiffBackend, Backend},
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    layer::{Call, Role},
    recipe::{
        Cast, CoatFp8, Flow, Granularity, JetfireInt8, MixedPrecision, Number, Recipe, Rounding,
        Row,
        context::{Contexts, Int8},
    },
    saved::{Recording, report::Form},
};
use cubecl_kernels::{
    granularity, quantize::QuantizeSpec, reference, rounding, shape::MatrixShape,
};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{floats, is_cuda, same_bits, tag_of, tensor},
    models::One,
    on_every_backend, supports,
    train::{attached, every_layer},
};

on_every_backend! {
    operators_read_what_flows => operators_in_fp32;
    operators_in_16_bits_read_what_flows => operators_in_16_bits;
    gradients_flow_back_as_the_recipe_says => gradients_flow_back;
    operators_keep_what_they_read => kept;
    outputs_of_layers_flow_to_operators => outputs_of_layers;
    nan_and_infinity_are_seen => not_finite;
    validation_reads_values_as_they_are => validation;
    a_frozen_model_reads_values_as_they_are => frozen;
    norms_that_are_not_quite_burns_keep_their_dtype => other_norms;
    tensors_without_rows_or_elements_do_not_flow => odd_shapes;
}

/// Recipe `R` without its flow.
#[derive(Debug, Clone, Copy, Default)]
struct WithoutFlow<R>(std::marker::PhantomData<R>);

impl<R: Recipe> Recipe for WithoutFlow<R> {
    const ROW: Row = Row {
        flow: None,
        ..R::ROW
    };
}

const fn flow_of<R: Recipe>() -> Flow {
    match R::ROW.flow {
        Some(flow) => flow,
        None => panic!("a recipe with a flow"),
    }
}

/// The values of a matrix as they flow, from the definition.
fn rounded(cast: &Cast, values: &[f32], columns: usize, rounding: rounding::Rounding) -> Vec<f32> {
    let granularity = match cast.granularity {
        Granularity::Block(side) => granularity::Granularity::Block(side),
        Granularity::Group(size) => granularity::Granularity::Group(size),
        Granularity::Row | Granularity::Tensor => panic!("scales of blocks or groups"),
    };
    let spec = QuantizeSpec::new(cast.number, granularity).with_rounding(rounding);
    let shape = MatrixShape::new(values.len() / columns, columns);
    reference::dequantize(&reference::quantize(values, shape, &spec))
}

/// An operator on x, y `[2, rows, columns]` and two rows of parameters.
type Operator<B> = fn([Tensor<B, 3>; 2], [Tensor<B, 1>; 2]) -> Tensor<B, 3>;

fn operators<B: Backend>() -> [(&'static str, Operator<B>); 6] {
    fn norm<B: Backend>(gain: Tensor<B, 1>, bias: Option<Tensor<B, 1>>) -> burn::nn::LayerNorm<B> {
        let columns = gain.dims()[0];
        let norm = LayerNormConfig::new(columns).with_bias(bias.is_some());
        let mut norm = norm.init::<B>(&gain.device());
        norm.gamma = Param::from_tensor(gain);
        norm.beta = bias.map(Param::from_tensor);
        norm
    }
    [
        ("layer norm", |[x, _], [gain, bias]| {
            norm(gain, Some(bias)).forward(x)
        }),
        ("layer norm without bias", |[x, _], [gain, _]| {
            norm(gain, None).forward(x)
        }),
        ("RMSNorm", |[x, _], [gain, _]| {
            let mut norm = RmsNormConfig::new(gain.dims()[0]).init::<B>(&gain.device());
            norm.gamma = Param::from_tensor(gain);
            norm.forward(x)
        }),
        ("GELU", |[x, _], _| Gelu::new().forward(x)),
        ("SwiGLU", |[x, y], _| silu(x) * y),
        ("SwiGLU from the right", |[x, y], _| y * silu(x)),
    ]
}

/// The output of an operator, and the gradients of x, y and both rows where they have some.
fn solve<A: AutodiffBackend>(
    operator: Operator<A>,
    [x, y, gain, bias, weights]: [&[f32]; 5],
    columns: usize,
    dtype: DType,
) -> [Vec<f32>; 5] {
    let device = A::Device::default();
    let shape = [2, x.len() / (2 * columns), columns];
    // A tensor of the shape of a parameter may be a weight: operators do not take these.
    let leaf = |data: &[f32]| tensor::<A, 1>(data, [data.len()], &device).require_grad();
    let [x, y, gain, bias] = [x, y, gain, bias].map(leaf);
    let inputs = [&x, &y].map(|it| it.clone().reshape(shape).cast(dtype));
    let output = operator(inputs, [gain.clone(), bias.clone()]);
    let weights = tensor::<A, 3>(weights, shape, &device);
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of = |leaf: &Tensor<A, 1>| leaf.grad(&gradients).map_or(vec![], |it| floats(&it));
    [floats(&output), of(&x), of(&y), of(&gain), of(&bias)]
}

fn assert_near(what: &str, actual: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30f32, |most, x| most.max(x.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        let near = (a - e).abs() <= tolerance * largest;
        assert!(near, "{what}[{index}]: {a} instead of {e}");
    }
}

/// Each operator against Burn's in FP32 on the rounded inputs, whose gradients go straight through the rounding.
fn operators_equal<B: DataBackend, R: Recipe>(seed: u64, dtype: DType, tolerance: f32) {
    let mut rng = Rng::new(seed);
    let flow = flow_of::<R>();
    for (rows, columns) in rng.drawn([(1, 7), (3, 33), (33, 96), (5, 768)], 2) {
        let outlier = rng.below(2 * rows * columns);
        let mut draw = |count, scale| -> Vec<f32> {
            let narrow = |x: f32| match dtype {
                DType::F32 => x,
                _ => bf16::from_f32(x).to_f32(),
            };
            rng.normals(count, scale).into_iter().map(narrow).collect()
        };
        let mut x = draw(2 * rows * columns, 1.0);
        x[outlier] *= 32.0;
        let y = draw(x.len(), 1.0);
        let weights = draw(x.len(), 1.0);
        let [gain, bias] = [(); 2].map(|()| draw(columns, 0.5));
        let [x_read, y_read] = [&x, &y].map(|it| {
            let read = rounded(&flow.activations, it, columns, rounding::Rounding::Nearest);
            let narrow = |x: &f32| match dtype {
                DType::F32 => *x,
                DType::BF16 => bf16::from_f32(*x).to_f32(),
                _ => f16::from_f32(*x).to_f32(),
            };
            read.iter().map(narrow).collect::<Vec<_>>()
        });
        let ours = operators::<QuantTrain<Autodiff<B>, R>>();
        let burns = operators::<Autodiff<Flex>>();
        for ((name, ours), (_, burns)) in ours.into_iter().zip(burns) {
            let data = [&x[..], &y, &gain, &bias, &weights];
            let read = [&x_read[..], &y_read, &gain, &bias, &weights];
            let actual = solve(ours, data, columns, dtype);
            let expected = solve(burns, read, columns, DType::F32);
            let parts = ["output", "dx", "dy", "dgain", "dbias"];
            for (part, (actual, expected)) in parts.iter().zip(actual.iter().zip(&expected)) {
                let what = format!(
                    "seed {seed}: {} {name} 2 x {rows} x {columns} {dtype:?}: {part}",
                    R::ROW.name
                );
                assert_near(&what, actual, expected, tolerance);
            }
        }
    }
}

fn operators_in_fp32<B: DataBackend>(seed: u64) {
    // Error functions of other backends are approximations, and so are NdArray's reciprocals.
    let tolerance = match B::name(&B::Device::default()).contains("flex") {
        true => 2e-5,
        false => 1e-3,
    };
    operators_equal::<B, JetfireInt8<f32>>(seed, DType::F32, tolerance);
    operators_equal::<B, JetfireInt8<f32, 128>>(seed, DType::F32, tolerance);
    operators_equal::<B, CoatFp8<f32>>(seed, DType::F32, tolerance);
}

fn operators_in_16_bits<B: DataBackend>(seed: u64) {
    if supports::<B>(DType::F16) {
        operators_equal::<B, JetfireInt8<f16>>(seed, DType::F16, 5e-3);
        operators_equal::<B, CoatFp8<f16>>(seed, DType::F16, 5e-3);
    }
    if supports::<B>(DType::BF16) {
        operators_equal::<B, JetfireInt8<bf16>>(seed, DType::BF16, 4e-2);
        operators_equal::<B, CoatFp8<bf16>>(seed, DType::BF16, 4e-2);
    }
}

/// The gradient of x with the loss `sum(weights * linear(gelu(x)))`.
fn gradient_behind_gelu<B: DataBackend, R: Recipe>(
    seed: u64,
    [x, weights]: [&[f32]; 2],
    [k, n]: [usize; 2],
) -> (Vec<f32>, burn_quant_train::data::StochasticKey) {
    type T<B, R> = QuantTrain<Autodiff<B>, R>;
    let device = B::Device::default();
    let one = One::new(k, n, false, &device);
    let (_optimizer, model) = attached::<T<B, R>, _>(&every_layer(seed), one, seed);
    let rows = x.len() / k;
    let x = tensor::<T<B, R>, 1>(x, [x.len()], &device).require_grad();
    let y = model.linear.forward(gelu(x.clone().reshape([rows, k])));
    let weights = tensor::<T<B, R>, 2>(weights, [rows, n], &device);
    let gradients = (y * weights).sum().backward();
    let tag = tag_of(&model.linear.weight.val());
    let first_call = Call {
        time: 0,
        step: 0,
        lane: 0,
        index: 0,
    };
    let layer = tag.layer().expect("attached");
    let key = layer.key(first_call, Role::InputGradient);
    (floats(&x.grad(&gradients).expect("of x")), key)
}

fn gradients_flow_back<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, largest: f32, least: f32) {
        let mut rng = Rng::new(seed);
        let [rows, k, n] = [70, 96, 40];
        // Far right GELU is the identity, and its slope is 1. All are numbers of the flow.
        let mut integer = |_| least + rng.below((largest - least) as usize + 1) as f32;
        let mut x: Vec<f32> = (0..rows * k).map(&mut integer).collect();
        x.iter_mut().step_by(16).for_each(|x| *x = largest);
        let weights = rng.normals(rows * n, 1.0);
        let data = [&x[..], &weights];
        let (actual, key) = gradient_behind_gelu::<B, R>(seed, data, [k, n]);
        let (plain, _) = gradient_behind_gelu::<B, WithoutFlow<R>>(seed, data, [k, n]);
        let expected = match flow_of::<R>().gradients {
            Some(cast) => {
                assert_eq!(cast.rounding, Rounding::Stochastic);
                rounded(&cast, &plain, k, rounding::Rounding::Stochastic(key))
            }
            None => plain.clone(),
        };
        let name = R::ROW.name;
        assert!(same_bits(&actual, &expected), "seed {seed}: {name}");
        assert_eq!(
            same_bits(&actual, &plain),
            flow_of::<R>().gradients.is_none(),
            "seed {seed}: {name}"
        );
    }
    check::<B, JetfireInt8<f32>>(seed, 127.0, 10.0);
    check::<B, JetfireInt8<f32, 64>>(seed, 127.0, 10.0);
    // With a largest magnitude of 448 the scale is 1; E4M3 has the integers to 16.
    check::<B, CoatFp8<f32>>(seed, 16.0, 10.0);
}

/// One value waits after an operator that reads the output of a product: its input, in the numbers of the flow.
fn kept<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, number: Number) {
        type T<B, R> = QuantTrain<Autodiff<B>, R>;
        let device = B::Device::default();
        let mut rng = Rng::new(seed);
        let shape = [2, 64, 64];
        let draw = |rng: &mut Rng, count| rng.normals(count, 1.0);
        let x = tensor::<T<B, R>, 3>(&draw(&mut rng, 8192), shape, &device).require_grad();
        let mixer = tensor::<T<B, R>, 2>(&draw(&mut rng, 4096), [64, 64], &device).unsqueeze();
        let norm = LayerNormConfig::new(64).init::<T<B, R>>(&device);
        let recording = Recording::start();
        let mixed = x.clone().matmul(mixer);
        let output = gelu(norm.forward(mixed.clone())) + gelu(mixed);
        let report = recording.report();
        let gradients = output.sum().backward();
        assert!(x.grad(&gradients).is_some());
        let flows: Vec<_> = report
            .values
            .iter()
            .filter(|value| value.operation == "flow")
            .collect();
        let name = R::ROW.name;
        // Of the norm and of both activations, of which one reads what the norm reads: one copy.
        assert_eq!(flows.len(), 2, "seed {seed}: {name}: {report}");
        for value in &flows {
            assert_eq!(value.form, Form::Compressed(number), "seed {seed}: {name}");
            assert!(value.bytes < 8192 * 13 / 10, "seed {seed}: {name}");
        }
        let large = report.values.iter().filter(|value| value.elements >= 8192);
        let exact = large.filter(|value| value.form == Form::Exact);
        let exact: Vec<_> = exact.map(|value| value.operation).collect();
        assert!(
            !exact.contains(&"gelu") && !exact.contains(&"layer_norm"),
            "seed {seed}: {name}: {exact:?} wait as they are"
        );
    }
    check::<B, JetfireInt8<f32>>(seed, Number::Int8);
    check::<B, CoatFp8<f32>>(seed, Number::E4M3);
}

/// Who else reads the output of a layer that an operator reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OtherReader {
    None,
    Before,
    Behind,
}

/// What an operator reads of a layer's output is its value, rounded; who else reads it has the value itself, before the
/// operator and behind it, and changes neither what the operator gives nor a gradient.
fn outputs_of_layers<B: DataBackend>(seed: u64) {
    type T<B, R> = QuantTrain<Autodiff<B>, R>;
    /// What the other reader read, the operator's output, and the gradients of X, W and the bias.
    fn run<B: DataBackend, R: Recipe>(seed: u64, reader: OtherReader) -> [Vec<f32>; 5] {
        let device = B::Device::default();
        let one = One::new(96, 64, true, &device);
        let (_optimizer, model) = attached::<T<B, R>, _>(&every_layer(seed), one, seed);
        let values = Rng::new(seed).normals(2 * 48 * 96, 1.0);
        let x = tensor::<T<B, R>, 3>(&values, [2, 48, 96], &device).require_grad();
        let y = model.linear.forward(x.clone());
        let before = (reader == OtherReader::Before).then(|| floats(&y));
        let output = gelu(y.clone());
        let behind = (reader == OtherReader::Behind).then(|| floats(&y));
        drop(y);
        let gradients = output.clone().square().sum().backward();
        let of_weight = model.linear.weight.val().grad(&gradients);
        let bias = model.linear.bias.as_ref().expect("a bias").val();
        [
            before.or(behind).unwrap_or_default(),
            floats(&output),
            floats(&x.grad(&gradients).expect("of x")),
            floats(&of_weight.expect("of the weight")),
            floats(&bias.grad(&gradients).expect("of the bias")),
        ]
    }
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let name = R::ROW.name;
        let [nothing, expected @ ..] = run::<B, R>(seed, OtherReader::None);
        assert!(nothing.is_empty());
        let [value, before @ ..] = run::<B, R>(seed, OtherReader::Before);
        let [value_behind, behind @ ..] = run::<B, R>(seed, OtherReader::Behind);
        for (others, reader) in [(before, "before"), (behind, "behind")] {
            for (index, (own, others)) in expected.iter().zip(&others).enumerate() {
                assert!(
                    same_bits(own, others),
                    "seed {seed}: {name}, {reader}: {index}"
                );
            }
        }
        assert!(same_bits(&value_behind, &value), "seed {seed}: {name}");
        let cast = flow_of::<R>().activations;
        let read = rounded(&cast, &value, 64, rounding::Rounding::Nearest);
        assert!(!same_bits(&read, &value), "seed {seed}: {name}");
        let device = B::Device::default();
        let read = tensor::<B, 2>(&read, [96, 64], &device);
        let compute = DType::from(R::ROW.compute);
        let of_read = floats(&gelu(read.cast(compute).cast(DType::F32)).cast(compute));
        assert_near(
            &format!("seed {seed}: {name}"),
            &expected[0],
            &of_read,
            8e-3,
        );
    }
    check::<B, JetfireInt8<f32>>(seed);
    check::<B, JetfireInt8<f32, 128>>(seed);
    check::<B, CoatFp8<f32>>(seed);
    if supports::<B>(DType::BF16) {
        check::<B, JetfireInt8<bf16, 128>>(seed);
        check::<B, CoatFp8<bf16>>(seed);
    }
}

/// A bad number reaches the output of its row, and leaves rows outside of its block alone.
fn not_finite<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let mut rng = Rng::new(seed);
        let columns = 64;
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = rng.normals(2 * 64 * columns, 1.0);
            let at = rng.below(x.len() / 2);
            x[at] = bad;
            let y = rng.normals(x.len(), 1.0);
            let row = vec![1.0; columns];
            for (name, operator) in operators::<QuantTrain<Autodiff<B>, R>>() {
                let data = [&x[..], &y, &row, &row, &y];
                let [output, of_x, ..] = solve(operator, data, columns, DType::F32);
                let what = format!("seed {seed}: {} {name}, {bad}", R::ROW.name);
                assert!(!output[at].is_finite(), "{what}: {}", output[at]);
                let other = &output[x.len() / 2..];
                assert!(other.iter().all(|x| x.is_finite()), "{what}");
                assert!(of_x[x.len() / 2..].iter().all(|x| x.is_finite()), "{what}");
            }
        }
    }
    check::<B, JetfireInt8<f32>>(seed);
    check::<B, CoatFp8<f32>>(seed);
}

fn validation<B: DataBackend>(seed: u64) {
    let values = Rng::new(seed).normals(33 * 40, 1.0);
    let device = B::Device::default();
    let x = tensor::<QuantTrain<B, JetfireInt8<f32>>, 2>(&values, [33, 40], &device);
    let plain = gelu(tensor::<B, 2>(&values, [33, 40], &device));
    assert!(same_bits(&floats(&gelu(x)), &floats(&plain)), "seed {seed}");
}

/// On the backend of training, where no gradient is asked for.
fn frozen<B: DataBackend>(seed: u64) {
    fn outputs<A: Backend>(values: &[f32]) -> Vec<Vec<f32>> {
        let device = A::Device::default();
        let x = tensor::<A, 3>(values, [2, 33, 40], &device);
        let layer_norm = LayerNormConfig::new(40).init::<A>(&device).no_grad();
        let rms_norm = RmsNormConfig::new(40).init::<A>(&device).no_grad();
        let outputs = [
            layer_norm.forward(x.clone()),
            rms_norm.forward(x.clone()),
            gelu(x.clone()),
            silu(x.clone()) * x,
        ];
        outputs.iter().map(floats).collect()
    }
    let values = Rng::new(seed).normals(2 * 33 * 40, 1.0);
    let ours = outputs::<QuantTrain<Autodiff<B>, JetfireInt8<f32>>>(&values);
    let burns = outputs::<Autodiff<B>>(&values);
    for (operator, (ours, burns)) in ours.iter().zip(&burns).enumerate() {
        let mut differences = ours.iter().zip(burns).map(|(a, b)| (a - b).abs());
        // On CUDA, streams that differ elsewhere may be fused in another way.
        let near = is_cuda::<B>() && differences.all(|difference| difference < 1e-5);
        assert!(
            near || same_bits(ours, burns),
            "seed {seed}: operator {operator}"
        );
    }
}

/// `x / rms(x)` whose root stays FP32: what follows is as Burn has it.
fn other_norms<B: DataBackend>(seed: u64) {
    if !supports::<B>(DType::F16) {
        return;
    }
    fn solve<A: AutodiffBackend>(values: &[f32]) -> (DType, Vec<f32>, Vec<f32>) {
        let device = A::Device::default();
        let leaf = tensor::<A, 1>(values, [values.len()], &device).require_grad();
        let x = leaf.clone().reshape([33, 40]).cast(DType::F16);
        let root = (x.clone().cast(DType::F32).square().mean_dim(1) + 0.1).sqrt();
        let output = x.cast(DType::F32) / root;
        let gradients = output.clone().sum().backward();
        let of_leaf = leaf.grad(&gradients).expect("of the leaf");
        (output.dtype(), floats(&output), floats(&of_leaf))
    }
    let values = Rng::new(seed).normals(33 * 40, 1.0);
    let (dtype, ours, slopes) = solve::<QuantTrain<Autodiff<B>, JetfireInt8<f32>>>(&values);
    let (_, burns, expected) = solve::<Autodiff<B>>(&values);
    assert_eq!(dtype, DType::F32, "seed {seed}");
    assert_near(&format!("seed {seed}: output"), &ours, &burns, 1e-6);
    assert_near(&format!("seed {seed}: dx"), &slopes, &expected, 1e-5);

    // Divided as FP16 by FP32, the quotient is what the promotion of both gives, and says so.
    let device = B::Device::default();
    type T<B> = QuantTrain<Autodiff<B>, JetfireInt8<f32>>;
    let x = tensor::<T<B>, 2>(&values, [33, 40], &device).cast(DType::F16);
    let root = (x.clone().cast(DType::F32).square().mean_dim(1) + 0.1).sqrt();
    let quotient = x / root;
    let said = quotient.dtype();
    assert_eq!(said, quotient.to_data().dtype, "seed {seed}");
}

fn odd_shapes<B: DataBackend>(seed: u64) {
    type T<B> = QuantTrain<Autodiff<B>, JetfireInt8<f32>>;
    let device = B::Device::default();
    let values = Rng::new(seed).normals(50, 1.0);
    let row = tensor::<T<B>, 1>(&values, [50], &device).require_grad();
    let plain = gelu(tensor::<B, 1>(&values, [50], &device));
    let output = gelu(row.clone());
    assert!(same_bits(&floats(&output), &floats(&plain)), "seed {seed}");
    assert!(row.grad(&output.sum().backward()).is_some());
    let empty = Tensor::<T<B>, 2>::zeros([0, 8], &device);
    let norm = LayerNormConfig::new(8).init::<T<B>>(&device);
    assert_eq!(gelu(norm.forward(empty)).dims(), [0, 8]);
}

/// Burn's encoder, taken as it is, learns inside a flow, and keeps less than around one.
#[cfg(feature = "flex")]
#[test]
fn the_encoder_of_burn_flows() {
    fn passes<R: Recipe>(seed: u64) -> (usize, Vec<f32>) {
        type T<R> = QuantTrain<Autodiff<Flex>, R>;
        let device = Default::default();
        let encoder = TransformerEncoderConfig::new(64, 256, 4, 2)
            .with_norm_first(true)
            .with_dropout(0.0)
            .init::<T<R>>(&device);
        let (_optimizer, encoder) = attached::<T<R>, _>(&every_layer(seed), encoder, seed);
        let mut rng = Rng::new(seed);
        let x = rng.normals(2 * 64 * 64, 1.0);
        let x = tensor::<T<R>, 3>(&x, [2, 64, 64], &device).require_grad();
        let recording = Recording::start();
        let output = encoder.forward(TransformerEncoderInput::new(x.clone()));
        let bytes = recording.report().bytes();
        let weights = rng.normals(2 * 64 * 64, 1.0);
        let weights = tensor::<T<R>, 3>(&weights, [2, 64, 64], &device);
        let gradients = (output * weights).sum().backward();
        (bytes, floats(&x.grad(&gradients).expect("of x")))
    }
    let seed = quant_train_tests::seed();
    let (exact_bytes, exact) = passes::<MixedPrecision<f32>>(seed);
    for (name, (bytes, gradient)) in [
        ("jetfire", passes::<JetfireInt8<f32>>(seed)),
        ("coat", passes::<CoatFp8<f32>>(seed)),
        (
            "jetfire with contexts",
            passes::<Contexts<JetfireInt8<f32>, Int8>>(seed),
        ),
    ] {
        let cosine = quant_train_tests::data::cosine(&gradient, &exact);
        assert!(cosine > 0.99, "seed {seed}: {name}: cosine {cosine}");
        assert!(
            bytes * 3 < exact_bytes * 2,
            "seed {seed}: {name}: {bytes} bytes wait, {exact_bytes} without a flow"
        );
    }
}
