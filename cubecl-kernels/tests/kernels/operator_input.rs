//! Operators that read numbers with scales: what they give of the floats that these stand for.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    KernelError,
    gelu::{gelu, gelu_backward, quantize_gelu, quantize_gelu_gradient},
    granularity::Granularity,
    layer_norm::{layer_norm, layer_norm_backward},
    layout::Layout,
    number::Number,
    operator_input::OperatorInput,
    quantize::{QuantizeSpec, Quantized, dequantize, quantize},
    rms_norm::{inverse_rms, quantize_rms_norm, rms_norm, rms_norm_backward},
    scale::ScaleNumber,
    swiglu::{swiglu, swiglu_backward},
};

use crate::{
    device::{
        Client, Tensor, TestRuntime, client, drawn, dtype, float_types, read_float, upload,
        upload_with_offset,
    },
    random::Random,
    rows::on_device::{assert_same_but_for_order, sum_of_parts},
};

const E4M3: QuantizeSpec = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
const INT8: QuantizeSpec = QuantizeSpec::int8(Granularity::Block(32));
const INT10: QuantizeSpec = QuantizeSpec::new(Number::Int10, Granularity::Group(128));

/// Every storage, number of scales and kind of region; those that no kernel decodes as it reads come last.
const SPECS: [QuantizeSpec; 10] = [
    E4M3,
    E4M3.with_scale(ScaleNumber::E8M0),
    INT8,
    INT10,
    QuantizeSpec::NVFP4,
    QuantizeSpec::new(Number::Int4, Granularity::Tensor),
    QuantizeSpec::new(Number::E5M2, Granularity::Token),
    INT8.with_layout(Layout::Both),
    INT8.with_granularity(Granularity::Channel),
    INT8.with_layout(Layout::Transposed),
];
/// Regions that the edges cut, a batch, several cubes; last, rows that are no whole runs.
const SHAPES: [&[usize]; 4] = [&[37, 96], &[3, 20, 64], &[300, 32], &[2, 9, 256]];

/// Of the above, as many as read in other ways: each length of rows has kernels of its own.
const FEWER_SPECS: [QuantizeSpec; 6] = [
    INT8,
    E4M3,
    INT10,
    INT8,
    QuantizeSpec::NVFP4,
    INT8.with_layout(Layout::Transposed),
];
/// Rows within a plane, with units that have nothing, and of several planes.
const SHAPES_OF_NORMS: [&[usize]; 2] = [&[37, 96], &[5, 1040]];

/// A matrix in numbers, and as the floats of a type that they stand for.
struct Case {
    matrix: Quantized<TestRuntime>,
    floats: Tensor,
    float: StorageType,
    what: String,
}

impl Case {
    fn new(client: &Client, x: &Tensor, spec: &QuantizeSpec, float: StorageType) -> Self {
        let matrix = quantize(client, x, spec).expect("a matrix of floats");
        let floats = dequantize(client, &matrix, float).expect("a float type of the device");
        Self {
            what: format!("{:?} as {float} by {spec:?}", x.shape()),
            matrix,
            floats,
            float,
        }
    }

    fn input(&self) -> OperatorInput<'_, TestRuntime> {
        OperatorInput::Quantized(&self.matrix, self.float)
    }
}

/// Calls `check` with two matrices of each spec and shape, the float types in turn, and a gradient. One matrix of the
/// first shape has a NaN; most of all others are numbers.
fn of_each(
    specs: &[QuantizeSpec],
    shapes: &[&[usize]],
    mut check: impl FnMut(&Client, [&Case; 2], &Tensor, &mut Random),
) {
    let (client, mut random) = (client(), Random::fresh());
    let floats = float_types(&client);
    let specs = specs.iter().zip(floats.iter().cycle());
    for (spec, &float) in drawn(&mut random, specs, 2) {
        for &shape in shapes {
            let len = shape.iter().product();
            let mut is_bad = shape == shapes[0];
            let cases = [(); 2].map(|()| {
                let mut x = random.with_outliers(len);
                if std::mem::take(&mut is_bad) {
                    x[len / 2] = f32::NAN;
                }
                x[..len / 4].fill(0.0);
                Case::new(&client, &upload(&client, &x, shape, floats[0]), spec, float)
            });
            let gradient: Vec<f32> = (0..len).map(|_| random.normal()).collect();
            let gradient = upload(&client, &gradient, shape, float);
            check(&client, cases.each_ref(), &gradient, &mut random);
        }
    }
}

/// The same bits; one NaN is as good as another.
#[track_caller]
fn assert_same(client: &Client, [found, expected]: [&Tensor; 2], what: &str) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    assert_eq!(found.dtype, expected.dtype, "{what}");
    let [found, expected] = [found, expected].map(|tensor| read_float(client, tensor));
    for (index, (a, b)) in found.iter().zip(&expected).enumerate() {
        let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(same, "{what} [{index}]: {a:e} instead of {b:e}");
    }
}

#[test]
fn gelu_of_numbers() {
    of_each(&SPECS, &SHAPES, |client, [x, _], gradient, _| {
        let found = gelu(client, x.input()).expect("a quantized matrix");
        let expected = gelu(client, &x.floats).expect("floats");
        assert_same(client, [&found, &expected], &x.what);
        let found = gelu_backward(client, x.input(), gradient).expect("a quantized matrix");
        let expected = gelu_backward(client, &x.floats, gradient).expect("floats");
        assert_same(client, [&found, &expected], &x.what);
    });
}

/// Also where one of the two is floats.
#[test]
fn swiglu_of_numbers() {
    of_each(&FEWER_SPECS, &SHAPES, |client, [gate, up], gradient, _| {
        let expected = swiglu(client, &gate.floats, &up.floats).expect("floats");
        let slopes = swiglu_backward(client, &gate.floats, &up.floats, gradient).expect("floats");
        for [a, b] in [
            [gate.input(), up.input()],
            [gate.input(), (&up.floats).into()],
            [(&gate.floats).into(), up.input()],
        ] {
            let found = swiglu(client, a, b).expect("quantized matrices");
            assert_same(client, [&found, &expected], &gate.what);
            let found = swiglu_backward(client, a, b, gradient).expect("quantized matrices");
            for (found, expected) in found.iter().zip(&slopes) {
                assert_same(client, [found, expected], &gate.what);
            }
        }
    });
}

/// Numbers of one format whose scales lie otherwise have no kernel in common.
#[test]
fn swiglu_of_numbers_in_other_regions() {
    let (client, mut random) = (client(), Random::fresh());
    let float = float_types(&client)[0];
    let mut case = |spec| {
        let x = random.with_outliers(40 * 64);
        Case::new(&client, &upload(&client, &x, &[40, 64], float), spec, float)
    };
    let (gate, up) = (
        case(&INT8),
        case(&INT8.with_granularity(Granularity::Block(64))),
    );
    let found = swiglu(&client, gate.input(), up.input()).expect("quantized matrices");
    let expected = swiglu(&client, &gate.floats, &up.floats).expect("floats");
    assert_same(&client, [&found, &expected], &gate.what);
}

/// To the bit too: sums have the order of those of floats. But some numbers are read in whole runs.
#[test]
fn norms_of_numbers() {
    of_each(
        &FEWER_SPECS,
        &SHAPES_OF_NORMS,
        |client, [x, _], gradient, random| {
            let cols = x.matrix.shape.cols;
            let mut draw = || {
                let values: Vec<f32> = (0..cols).map(|_| random.normal()).collect();
                upload(client, &values, &[cols], x.float)
            };
            let (gain, bias) = (draw(), draw());
            let is_exact = match x.matrix.number {
                Number::Int10 => false,
                Number::E2M1 => x.float != dtype::<f32>(),
                _ => true,
            };
            let compare = |found: &Tensor, expected: &Tensor| match is_exact {
                false => {
                    assert_eq!(found.shape(), expected.shape(), "{}", x.what);
                    assert_eq!(found.dtype, expected.dtype, "{}", x.what);
                    let [a, b] = [found, expected].map(|tensor| read_float(client, tensor));
                    assert_same_but_for_order(&a, &b, found.dtype, &x.what);
                }
                true => assert_same(client, [found, expected], &x.what),
            };
            let compare_parts = |found: &Tensor, expected: &Tensor| match is_exact {
                false => {
                    let [a, b] = [found, expected].map(|tensor| sum_of_parts(client, tensor));
                    assert_same_but_for_order(&a, &b, dtype::<f32>(), &x.what);
                }
                true => assert_same(client, [found, expected], &x.what),
            };
            let inputs = [x.input(), (&x.floats).into()];
            let [found, expected] =
                inputs.map(|it| rms_norm(client, it, &gain, 1e-5).expect("rows and a gain"));
            compare(&found.output, &expected.output);
            compare(&found.inverse_rms, &expected.inverse_rms);
            let root = &expected.inverse_rms;
            let [found, expected] = inputs.map(|it| {
                rms_norm_backward(client, it, &gain, root, gradient)
                    .expect("what had a forward pass")
            });
            compare(&found.input, &expected.input);
            compare_parts(&found.gain, &expected.gain);

            let [found, expected] = inputs.map(|it| {
                layer_norm(client, it, &gain, Some(&bias), 1e-5).expect("rows, a gain and a bias")
            });
            compare(&found.output, &expected.output);
            compare(&found.mean, &expected.mean);
            compare(&found.inverse_deviation, &expected.inverse_deviation);
            let (mean, deviation) = (&expected.mean, &expected.inverse_deviation);
            let [found, expected] = inputs.map(|it| {
                layer_norm_backward(client, it, &gain, mean, deviation, gradient)
                    .expect("what had a forward pass")
            });
            compare(&found.input, &expected.input);
            compare_parts(&found.gain, &expected.gain);
            compare_parts(&found.bias, &expected.bias);
        },
    );
}

/// Beside numbers, a gradient that is read one element at a time.
#[test]
fn a_gradient_that_starts_inside_of_a_buffer() {
    let (client, mut random) = (client(), Random::fresh());
    for float in drawn(&mut random, float_types(&client), 1) {
        let mut draw = || random.with_outliers(40 * 64);
        let x = upload(&client, &draw(), &[40, 64], float_types(&client)[0]);
        let x = Case::new(&client, &x, &E4M3, float);
        let values = draw();
        let whole = upload(&client, &values, &[40, 64], float);
        let inside = upload_with_offset(&client, &values, &[40, 64], float);
        let found = gelu_backward(&client, x.input(), &inside).expect("a quantized matrix");
        let expected = gelu_backward(&client, &x.floats, &whole).expect("floats");
        assert_same(&client, [&found, &expected], &x.what);
        let found = gelu_backward(&client, &x.floats, &inside).expect("floats");
        assert_same(&client, [&found, &expected], &x.what);
    }
}

#[test]
fn refuses_what_does_not_fit() {
    let (client, mut random) = (client(), Random::fresh());
    let float = float_types(&client)[0];
    let x = upload(&client, &random.with_outliers(32 * 32), &[32, 32], float);
    let Case { matrix, floats, .. } = Case::new(&client, &x, &INT8, float);
    let as_integers = OperatorInput::Quantized(&matrix, dtype::<i32>());
    let error = gelu(&client, as_integers).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let none = Quantized {
        values: None,
        ..matrix.clone()
    };
    let error = gelu(&client, OperatorInput::Quantized(&none, float)).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    let other = Quantized {
        granularity: Granularity::Block(16),
        ..matrix.clone()
    };
    let error = swiglu(&client, OperatorInput::Quantized(&other, float), &floats).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");

    // Scales of other regions than the kernels would read.
    let flowing = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
    let flowing = quantize(&client, &x, &flowing).expect("a matrix");
    let narrower = Quantized {
        granularity: Granularity::Group(8),
        ..flowing
    };
    let input = OperatorInput::Quantized(&narrower, float);
    let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
    let gain = upload(&client, &[1.0; 32], &[32], dtype::<f32>());
    let roots = upload(&client, &[1.0; 32], &[32], dtype::<f32>());
    for error in [
        quantize_gelu(&client, input, &spec).unwrap_err(),
        quantize_gelu_gradient(&client, input, &floats, &spec).unwrap_err(),
        quantize_rms_norm(&client, input, &gain, &roots, &spec).unwrap_err(),
        inverse_rms(&client, input, 1e-6).unwrap_err(),
    ] {
        assert!(
            matches!(
                error,
                KernelError::Shape { .. } | KernelError::Unsupported { .. }
            ),
            "{error}"
        );
    }
}
