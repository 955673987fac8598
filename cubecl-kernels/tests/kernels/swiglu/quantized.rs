//! SwiGLU and its gradients, quantized as they are computed: what the quantizers make of the tensors, to the bit.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    fallback::FallbackState,
    granularity::Granularity,
    layout::Layout,
    linear_input::quantize_linear_input,
    number::Number,
    operator_input::OperatorInput,
    quantize::{DelayedMaximum, MatrixSource, QuantizeSpec, Quantized, quantize, quantize_delayed},
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
    swiglu::{
        quantize_swiglu, quantize_swiglu_gradients, quantize_swiglu_gradients_delayed, swiglu,
        swiglu_backward,
    },
};

use crate::{
    copies::{assert_same, bits},
    device::{
        Client, Tensor, TestRuntime, client, drawn, dtype, float_types, read, upload, upload_i32,
    },
    random::Random,
};

/// Whole tiles of every kernel, those of one alone, of none, and nothing.
const SHAPES: [[usize; 2]; 6] = [
    [256, 384],
    [128, 128],
    [192, 256],
    [130, 264],
    [3, 5],
    [0, 128],
];
const LAYERS: usize = 3;

/// Tensors with outliers, with values that are not finite, or with zeros, each with a chance.
fn draw<const N: usize>(
    client: &Client,
    random: &mut Random,
    [rows, cols]: [usize; 2],
    float: StorageType,
) -> [Tensor; N] {
    let special = random.index(3) == 0;
    std::array::from_fn(|_| {
        let values = match special {
            true => random.with_special_values(MatrixShape::new(rows, cols)),
            false => random.with_outliers(rows * cols),
        };
        upload(client, &values, &[rows, cols], float)
    })
}

fn cases(client: &Client, random: &mut Random) -> Vec<(StorageType, [usize; 2])> {
    let floats = float_types(client);
    let cases = floats
        .iter()
        .flat_map(|&float| SHAPES.map(|shape| (float, shape)));
    drawn(random, cases, 2)
}

#[test]
fn inputs_are_those_of_the_product() {
    let (client, mut random) = (client(), Random::fresh());
    for (float, shape) in cases(&client, &mut random) {
        let [gate, up] = &draw(&client, &mut random, shape, float);
        let product = swiglu(&client, gate, up).expect("tensors of one shape");
        let of_columns = QuantizeSpec::int8(Granularity::Group(128));
        let narrow = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
        for (block, threshold, contexts) in [
            (128, None, Some(of_columns)),
            (128, Some(1.0), Some(of_columns)),
            (128, Some(1.0), Some(narrow)),
            (128, Some(1.0), None),
            (32, Some(0.0), Some(of_columns)),
        ] {
            let has_whole_groups = |spec: &QuantizeSpec| match spec.granularity {
                Granularity::Group(group) => shape[1].is_multiple_of(group),
                _ => false,
            };
            let contexts = contexts.filter(has_whole_groups);
            let what = format!(
                "{float} {shape:?}, block {block}, threshold {threshold:?}, contexts {contexts:?}"
            );
            let key = random.key();
            let thresholds = threshold.map(|threshold| {
                let all = [f32::NAN, threshold, f32::NAN];
                upload(&client, &all, &[LAYERS], dtype::<f32>())
            });
            let run = |x: MatrixSource<'_, TestRuntime>| {
                let counts = upload_i32(&client, &[0; 2 * LAYERS], &[LAYERS, 2]);
                let state = thresholds.as_ref().map(|thresholds| FallbackState {
                    thresholds,
                    layer: 1,
                    counts: &counts,
                });
                let input = quantize_linear_input(&client, x, block, Some(key), state);
                (input.expect("a matrix"), read::<i32>(&client, &counts))
            };
            let (actual, counts) = run(MatrixSource::Swiglu { gate, up, contexts });
            let copies = actual.contexts.iter().flatten();
            assert_eq!(
                copies.clone().count(),
                2 * contexts.iter().count(),
                "{what}"
            );
            for (copy, factor) in copies.zip([gate, up]) {
                let spec = contexts.expect("copies of a spec");
                let expected = quantize(&client, factor, &spec).expect("a matrix");
                assert_same(&client, copy, &expected, &format!("{what}: context"));
            }
            let (expected, expected_counts) = run((&product).into());
            assert_same(&client, &actual.forward, &expected.forward, &what);
            let saved = [&actual, &expected].map(|it| it.saved.as_ref().expect("a key"));
            assert_same(&client, saved[0], saved[1], &what);
            assert_eq!(counts, expected_counts, "{what}: counts");
            assert_eq!(actual.residual.is_some(), threshold.is_some(), "{what}");
            if let (Some(actual), Some(expected)) = (actual.residual, expected.residual) {
                let flags: Vec<u32> = read(&client, &actual.flags);
                assert_eq!(
                    flags,
                    read::<u32>(&client, &expected.flags),
                    "{what}: flags"
                );
                let scales = bits(&client, &actual.scales);
                assert_eq!(
                    scales,
                    bits(&client, &expected.scales),
                    "{what}: residual scales"
                );
                // Of blocks that do not fall back nobody has written a residual.
                let across = shape[1].div_ceil(block);
                let of_blocks = |values: &TensorHandle<TestRuntime>| {
                    let values: Vec<u8> = read(&client, values);
                    let is_written = |&(index, _): &(usize, u8)| {
                        let (row, col) = (index / shape[1], index % shape[1]);
                        flags[row / block * across + col / block] == 1
                    };
                    let values = values.into_iter().enumerate();
                    values.filter(is_written).collect::<Vec<_>>()
                };
                let same = of_blocks(&actual.values) == of_blocks(&expected.values);
                assert!(same, "{what}: residual");
            }
        }
    }
}

/// The maxima of a layer that has none yet, of one that has one, and of one whose maximum gets no scale.
const MAXIMA: [f32; LAYERS] = [0.0, 2.5, f32::INFINITY];

#[test]
fn delayed_inputs_are_those_of_the_product() {
    let (client, mut random) = (client(), Random::fresh());
    let maxima = upload(&client, &MAXIMA, &[LAYERS], dtype::<f32>());
    for (float, shape) in cases(&client, &mut random) {
        let [gate, up] = &draw(&client, &mut random, shape, float);
        let product = swiglu(&client, gate, up).expect("tensors of one shape");
        for layer in 0..LAYERS {
            let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][random.index(3)];
            let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(layout);
            let what = format!("{float} {shape:?}, {layout:?}, layer {layer}");
            let delayed = DelayedMaximum {
                maxima: &maxima,
                layer,
            };
            let run = |x: MatrixSource<'_, TestRuntime>| {
                quantize_delayed(&client, x, &spec, delayed).expect("a matrix")
            };
            let (actual, absmax) = run(MatrixSource::Swiglu {
                gate,
                up,
                contexts: None,
            });
            let (expected, expected_absmax) = run((&product).into());
            assert_same(&client, &actual, &expected, &what);
            let absmax = bits(&client, &absmax);
            assert_eq!(absmax, bits(&client, &expected_absmax), "{what}");
        }
    }
}

/// Gate and up as floats, in numbers of three kinds, and one of both as each.
fn each_source<'a>(
    [gate, up]: [&'a Tensor; 2],
    [of_columns, narrow, blocks]: &'a [[Quantized<TestRuntime>; 2]; 3],
) -> [(&'static str, [OperatorInput<'a, TestRuntime>; 2]); 5] {
    let as_input = |factor| OperatorInput::Quantized(factor, gate.dtype);
    let as_floats = [gate, up].map(OperatorInput::from);
    [
        ("floats", as_floats),
        ("INT8", of_columns.each_ref().map(as_input)),
        ("E4M3", narrow.each_ref().map(as_input)),
        ("INT8 blocks", blocks.each_ref().map(as_input)),
        ("both", [as_floats[0], as_input(&of_columns[1])]),
    ]
}

/// INT8 in groups of 128, E4M3 in narrow ones, and INT8 in blocks.
fn numbers(
    client: &Client,
    random: &mut Random,
    factors: [&Tensor; 2],
) -> [[Quantized<TestRuntime>; 2]; 3] {
    [
        QuantizeSpec::int8(Granularity::Group(128)),
        QuantizeSpec::new(Number::E4M3, Granularity::Group(16 << random.index(4))),
        QuantizeSpec::int8(Granularity::Block(128)),
    ]
    .map(|spec| factors.map(|factor| quantize(client, factor, &spec).expect("a matrix")))
}

#[test]
fn outputs_are_those_of_the_product() {
    let (client, mut random) = (client(), Random::fresh());
    for (float, shape) in cases(&client, &mut random) {
        let [gate, up]: &[Tensor; 2] = &draw(&client, &mut random, shape, float);
        let numbers = numbers(&client, &mut random, [gate, up]);
        for (source, factors) in each_source([gate, up], &numbers) {
            let product = swiglu(&client, factors[0], factors[1]).expect("tensors of one shape");
            let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][random.index(3)];
            for spec in [
                QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(layout),
                QuantizeSpec::int8(Granularity::Block(32)),
                QuantizeSpec::int8(Granularity::Block(128)).with_layout(layout),
            ] {
                let actual = quantize_swiglu(&client, factors, &spec).expect("matrices");
                let expected = quantize(&client, &product, &spec).expect("a matrix");
                let what = format!("{float} {shape:?} of {source}, {spec:?}");
                assert_same(&client, &actual, &expected, &what);
            }
        }
    }
}

#[test]
fn gradients_are_those_of_the_tensors() {
    let (client, mut random) = (client(), Random::fresh());
    let maxima = [1, 2].map(|turn| {
        let mut maxima = MAXIMA;
        maxima.rotate_left(turn);
        upload(&client, &maxima, &[LAYERS], dtype::<f32>())
    });
    for (float, shape) in cases(&client, &mut random) {
        let [gate, up, gradient]: &[Tensor; 3] = &draw(&client, &mut random, shape, float);
        let numbers = numbers(&client, &mut random, [gate, up]);
        for (source, factors) in each_source([gate, up], &numbers) {
            gradients_of(&client, &mut random, factors, gradient, &maxima, source);
        }
    }
}

/// Blocks of CUDA's kernels take tiles by turns, and skip rows of which they know a bound.
#[cfg(feature = "cuda")]
#[test]
fn of_more_tiles_than_run_at_once() {
    let (client, mut random) = (client(), Random::fresh());
    let float = [dtype::<half::bf16>(), dtype::<half::f16>()][random.index(2)];
    let [gate, up, gradient]: &[Tensor; 3] = &draw(&client, &mut random, [1152, 4352], float);
    let [_, flowing, _] = &numbers(&client, &mut random, [gate, up]);
    let factors = flowing
        .each_ref()
        .map(|factor| OperatorInput::Quantized(factor, float));
    let product = swiglu(&client, factors[0], factors[1]).expect("tensors of one shape");
    let gradients = swiglu_backward(&client, factors[0], factors[1], gradient);
    let gradients = gradients.expect("tensors of one shape");
    let spec = |number| QuantizeSpec::new(number, Granularity::Tensor).with_layout(Layout::Both);
    let of_output = spec(Number::E4M3);
    let output = quantize_swiglu(&client, factors, &of_output).expect("matrices");
    let expected = quantize(&client, &product, &of_output).expect("a matrix");
    assert_same(&client, &output, &expected, "the output");
    let of_gradient = spec(Number::E5M2);
    let actual = quantize_swiglu_gradients(&client, factors, gradient, [&of_gradient; 2]);
    for (index, actual) in actual.expect("matrices").iter().enumerate() {
        let expected = quantize(&client, &gradients[index], &of_gradient).expect("a matrix");
        assert_same(&client, actual, &expected, &format!("gradient {index}"));
    }
}

/// Compares the quantized gradients with what the quantizers make of the gradients.
fn gradients_of(
    client: &Client,
    random: &mut Random,
    factors: [OperatorInput<'_, TestRuntime>; 2],
    gradient: &Tensor,
    maxima: &[Tensor; 2],
    source: &str,
) {
    let (float, shape) = (gradient.dtype, gradient.shape());
    let [gate, up] = factors;
    let of_floats = swiglu_backward(client, gate, up, gradient).expect("tensors of one shape");
    // The gradient as floats, and as it flows.
    let flow = QuantizeSpec::int8(Granularity::Block(128));
    let flow = flow.with_rounding(Rounding::Stochastic(random.key()));
    let flowing = quantize(client, gradient, &flow).expect("a matrix");
    let of_output = match random.index(2) {
        0 => gradient.into(),
        _ => OperatorInput::Quantized(&flowing, float),
    };
    let gradients = swiglu_backward(client, gate, up, of_output);
    let gradients = gradients.expect("tensors of one shape");
    let int8 = |block| QuantizeSpec::int8(Granularity::Block(block));
    let both = int8(128).with_layout(Layout::Both);
    let keys = [(); 2].map(|()| Rounding::Stochastic(random.key()));
    let fp8 = QuantizeSpec::new(Number::E5M2, Granularity::Tensor);
    let layout = [Layout::Both, Layout::Transposed][random.index(2)];
    for specs in [
        keys.map(|key| both.with_rounding(key)),
        keys.map(|key| int8(64).with_rounding(key)),
        [both.with_rounding(keys[0]), int8(32)],
        [fp8.with_layout(layout); 2],
        [fp8, both],
    ] {
        let actual = quantize_swiglu_gradients(client, factors, of_output, specs.each_ref());
        let actual = actual.expect("matrices");
        for (index, (actual, spec)) in actual.iter().zip(&specs).enumerate() {
            let expected = quantize(client, &gradients[index], spec).expect("a matrix");
            let what = format!("{float} {shape:?} of {source}, {spec:?}, gradient {index}");
            assert_same(client, actual, &expected, &what);
        }
    }

    for layer in 0..LAYERS {
        let spec = fp8.with_layout([Layout::Both, Layout::Transposed][random.index(2)]);
        let delayed = maxima
            .each_ref()
            .map(|maxima| DelayedMaximum { maxima, layer });
        let actual = quantize_swiglu_gradients_delayed(client, factors, gradient, &spec, delayed);
        let actual = actual.expect("matrices");
        for (index, (actual, absmax)) in actual.iter().enumerate() {
            let expected = quantize_delayed(client, &of_floats[index], &spec, delayed[index]);
            let (expected, expected_absmax) = expected.expect("a matrix");
            let what = format!("{float} {shape:?} of {source}, layer {layer}, gradient {index}");
            assert_same(client, actual, &expected, &what);
            let absmax = bits(client, absmax);
            assert_eq!(absmax, bits(client, &expected_absmax), "{what}");
        }
    }
}

#[test]
fn what_does_not_fit_together() {
    let client = client();
    let matrix =
        |shape: [usize; 2], float| upload(&client, &vec![1.0; shape[0] * shape[1]], &shape, float);
    let gate = &matrix([128, 128], dtype::<f32>());
    let [flat, narrow] = [[64, 128], [128, 64]].map(|shape| matrix(shape, dtype::<f32>()));
    let key = StochasticKey { seed: 1, stream: 2 };
    let spec = QuantizeSpec::int8(Granularity::Tensor);
    let maxima = upload(&client, &MAXIMA, &[LAYERS], dtype::<f32>());
    let delayed = DelayedMaximum {
        maxima: &maxima,
        layer: LAYERS,
    };
    for up in [&flat, &narrow] {
        let x = MatrixSource::Swiglu {
            gate,
            up,
            contexts: None,
        };
        let error = quantize_linear_input(&client, x, 128, Some(key), None).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        let factors = [gate.into(), gate.into()];
        let error = quantize_swiglu_gradients(&client, factors, up, [&spec; 2]).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }
    let x = MatrixSource::Swiglu {
        gate,
        up: gate,
        contexts: Some(spec),
    };
    let error = quantize_linear_input(&client, x, 128, Some(key), None).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    let error = quantize_delayed(&client, x, &spec, delayed).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let factors = [gate.into(), gate.into()];
    let error = quantize_swiglu_gradients_delayed(&client, factors, gate, &spec, [delayed; 2]);
    let error = error.unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
}
