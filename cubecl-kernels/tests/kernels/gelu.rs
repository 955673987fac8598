//! GELU: the reference against finite differences and known values, the kernels against the reference.

use cubecl_kernels::reference::gelu::{gelu, gelu_backward, normal_distribution};

use crate::random::Random;

#[test]
fn the_reference_has_the_slopes_of_its_differences() {
    let mut random = Random::fresh();
    const STEP: f64 = 1e-5;
    for _ in 0..1000 {
        let x = f64::from(3.0 * random.normal());
        let gradient = f64::from(random.normal());
        let expected = gradient * (gelu(x + STEP) - gelu(x - STEP)) / (2.0 * STEP);
        let slope = gelu_backward(x, gradient);
        let error = (slope - expected).abs();
        assert!(error < 1e-8, "{slope} instead of {expected} at {x}");
    }
}

/// Quantiles of tables, and the two formulas of the reference where one follows the other.
#[test]
fn the_reference_is_the_normal_distribution() {
    for (x, expected) in [
        (0.0, 0.5),
        (1.0, 0.841_344_746_068_543),
        (-1.959_963_984_540_054, 0.025),
        (2.326_347_874_040_841, 0.99),
        (-3.090_232_306_167_813_5, 0.001),
        (-6.0, 9.865_876_450_376_98e-10),
    ] {
        let found = normal_distribution(x);
        assert!((found / expected - 1.0).abs() < 1e-12, "{found} at {x}");
    }
    let steps = [2.5 - 1e-9, 2.5 + 1e-9].map(normal_distribution);
    let step = steps[1] - steps[0];
    assert!(
        (step / 2e-9 - 0.017_528_300_493_568_54).abs() < 1e-6,
        "{step}"
    );
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl::ir::StorageType;
    use cubecl_kernels::{
        KernelError,
        gelu::{
            gelu as kernel, gelu_backward as backward_kernel, quantize_gelu, quantize_gelu_gradient,
        },
        granularity::Granularity,
        layout::Layout,
        number::Number,
        operator_input::OperatorInput,
        quantize::{QuantizeSpec, quantize},
        reference::gelu::normal_density,
        rounding::Rounding,
        shape::MatrixShape,
    };

    use super::*;
    use crate::{
        copies::assert_same,
        device::{client, drawn, dtype, float_types, read_float, rounded, upload, upload_i32},
        swiglu::on_device::assert_close,
    };

    /// Whole vectors of every width, single elements, more than a cube takes, and nothing.
    const SHAPES: [&[usize]; 7] = [
        &[1],
        &[7, 129],
        &[5, 2, 13],
        &[2, 2],
        &[2, 3, 1000],
        &[0, 5],
        &[],
    ];

    /// Both passes against the reference.
    fn check(x: &[f32], gradient: &[f32], shape: &[usize], float: StorageType) {
        let client = client();
        let [x, gradient] = [x, gradient].map(|values| rounded(values, float));
        let [x_tensor, gradient_tensor] =
            [&x, &gradient].map(|values| upload(&client, values, shape, float));
        let output = kernel(&client, &x_tensor).expect("a tensor of floats");
        let of_x = backward_kernel(&client, &x_tensor, &gradient_tensor);
        let of_x = of_x.expect("tensors of one shape");
        for tensor in [&output, &of_x] {
            assert_eq!(tensor.shape(), x_tensor.shape());
            assert_eq!(tensor.dtype, float);
        }
        let (output, of_x) = (read_float(&client, &output), read_float(&client, &of_x));
        for index in 0..x.len() {
            let [x, dy] = [x[index], gradient[index]].map(f64::from);
            // The tail's, which grows with the exponent, and what is below the normal numbers.
            let distribution = normal_distribution(x);
            let is_flushed = normal_density(x) < 1.2e-38;
            let error = |size: f64, of: f64| {
                let flushed = if is_flushed { size * of } else { 0.0 };
                let size = if size.is_finite() { size } else { 0.0 };
                1.2e-7 * (2.0 + (x * x).min(200.0)) * size * of + flushed
            };
            let what = format!("{float} {shape:?}[{index}]: x {x:e}, gradient {dy:e}");
            assert_close(
                output[index],
                gelu(x),
                error(x.abs(), distribution),
                float,
                &what,
            );
            // The slope is a sum, which cancels near -0.75.
            let terms = distribution + x.abs() * normal_density(x);
            let expected = gelu_backward(x, dy);
            assert_close(of_x[index], expected, error(dy.abs(), terms), float, &what);
        }
    }

    #[test]
    fn equals_the_reference() {
        let mut random = Random::fresh();
        for float in drawn(&mut random, float_types(&client()), 1) {
            for shape in SHAPES {
                let len = shape.iter().product();
                let mut draw = |spread: f32| -> Vec<f32> {
                    (0..len).map(|_| spread * random.normal()).collect()
                };
                check(&draw(1.0), &draw(1.0), shape, float);
                check(&draw(6.0), &draw(1.0), shape, float);
            }
        }
    }

    #[test]
    fn of_special_values() {
        let mut random = Random::fresh();
        let x = [
            0.0,
            -0.0,
            1e-40,
            -1e-40,
            1e-30,
            -0.75,
            5.5,
            -5.5,
            12.0,
            -12.0,
            13.2,
            -13.2,
            14.6,
            -14.6,
            25.0,
            -25.0,
            65504.0,
            -65504.0,
            3e38,
            -3e38,
            f32::NAN,
            f32::INFINITY,
        ];
        for float in drawn(&mut random, float_types(&client()), 1) {
            for gradient in [1.0, 0.0, -2.5, f32::NAN] {
                check(&x, &[gradient; 22], &[2, 11], float);
            }
            let mut draw = || random.with_special_values(MatrixShape::new(33, 100));
            let x: Vec<f32> = draw().into_iter().filter(|x| x.is_finite()).collect();
            check(&x, &vec![1.5; x.len()], &[x.len()], float);
        }
    }

    /// As in Burn's composition: 0 times infinity.
    #[test]
    fn of_infinities() {
        let client = client();
        let x = upload(
            &client,
            &[f32::NEG_INFINITY, f32::INFINITY],
            &[2],
            dtype::<f32>(),
        );
        let ones = upload(&client, &[1.0; 2], &[2], dtype::<f32>());
        let y = read_float(&client, &kernel(&client, &x).expect("floats"));
        assert!(y[0].is_nan() && y[1] == f32::INFINITY, "{y:?}");
        let dx = read_float(
            &client,
            &backward_kernel(&client, &x, &ones).expect("floats"),
        );
        assert!(dx.iter().all(|x| x.is_nan()), "{dx:?}");
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let x = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
        let integers = upload_i32(&client, &[1; 6], &[2, 3]);
        let other = upload(&client, &[1.0; 6], &[3, 2], dtype::<f32>());
        let error = kernel(&client, &integers).unwrap_err();
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        let error = backward_kernel(&client, &x, &other).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }

    /// What the quantizers make of the tensors, to the bit: of whole tiles of the kernel for what flows, and of none.
    #[test]
    fn quantized_as_they_are_computed() {
        let (client, mut random) = (client(), Random::fresh());
        let floats = float_types(&client);
        let shapes = [[256, 384], [64, 128], [130, 264], [3, 16], [0, 128]];
        let cases = floats
            .iter()
            .flat_map(|&float| shapes.map(|shape| (float, shape)));
        for (float, shape) in drawn(&mut random, cases, 3) {
            let [rows, cols] = shape;
            let special = random.index(2) == 0;
            let [x, gradient] = [(); 2].map(|()| {
                let values = match special {
                    true => random.with_special_values(MatrixShape::new(rows, cols)),
                    false => random.with_outliers(rows * cols),
                };
                upload(&client, &values, &shape, float)
            });
            let groups = |number, group| QuantizeSpec::new(number, Granularity::Group(group));
            let block = QuantizeSpec::int8(Granularity::Block(128));
            let waiting = [groups(Number::E4M3, 16), groups(Number::Int8, 128), block];
            let waiting = waiting.map(|spec| quantize(&client, &x, &spec).expect("a matrix"));
            let numbers = waiting
                .iter()
                .map(|matrix| OperatorInput::Quantized(matrix, float));
            for (index, input) in numbers.chain([(&x).into()]).enumerate() {
                let output = kernel(&client, input).expect("floats");
                // The gradient as floats, and as it flows.
                let flowing = block.with_rounding(Rounding::Stochastic(random.key()));
                let flowing = quantize(&client, &gradient, &flowing).expect("a matrix");
                let gradient = match random.index(2) {
                    0 => (&gradient).into(),
                    _ => OperatorInput::Quantized(&flowing, float),
                };
                let of_x = backward_kernel(&client, input, gradient).expect("floats");
                let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][random.index(3)];
                let stochastic = Rounding::Stochastic(random.key());
                for spec in [
                    block.with_layout(layout),
                    block.with_rounding(stochastic).with_layout(Layout::Both),
                    QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(layout),
                    QuantizeSpec::new(Number::E5M2, Granularity::Tensor).with_layout(Layout::Both),
                    QuantizeSpec::int8(Granularity::Block(32)),
                ] {
                    let what = format!("{float} {shape:?}, {index} {spec:?}");
                    let actual = quantize_gelu(&client, input, &spec).expect("a matrix");
                    let expected = quantize(&client, &output, &spec).expect("a matrix");
                    assert_same(&client, &actual, &expected, &what);
                    let actual = quantize_gelu_gradient(&client, input, gradient, &spec);
                    let expected = quantize(&client, &of_x, &spec).expect("a matrix");
                    assert_same(&client, &actual.expect("a matrix"), &expected, &what);
                }
            }
            let few = upload(&client, &vec![1.0; cols], &[1, cols], float);
            let spec = QuantizeSpec::int8(Granularity::Block(32));
            if rows != 1 {
                let error = quantize_gelu_gradient(&client, &x, &few, &spec).unwrap_err();
                assert!(matches!(error, KernelError::Shape { .. }), "{error}");
            }
        }
    }

    /// Blocks of CUDA's kernels take tiles by turns, and skip what has a bound that is not above what is known.
    #[cfg(feature = "cuda")]
    #[test]
    fn of_more_tiles_than_run_at_once() {
        let (client, mut random) = (client(), Random::fresh());
        let shape = [1152, 4352];
        let float = [dtype::<half::bf16>(), dtype::<half::f16>()][random.index(2)];
        let len = shape.iter().product();
        let mut x: Vec<f32> = (0..len).map(|_| 2.0 * random.normal()).collect();
        let gradient: Vec<f32> = (0..len).map(|_| random.normal()).collect();
        let flow = QuantizeSpec::new(Number::E4M3, Granularity::Group(16 << random.index(4)));
        let of_gradient = upload(&client, &gradient, &shape, float);
        // Without what is not a number, and with one of them, where nothing else is.
        for _ in 0..2 {
            let matrix = upload(&client, &x, &shape, float);
            let flowing = quantize(&client, &matrix, &flow).expect("a matrix");
            let input = OperatorInput::Quantized(&flowing, float);
            let output = kernel(&client, input).expect("floats");
            let of_x = backward_kernel(&client, input, &of_gradient).expect("floats");
            let both =
                |number| QuantizeSpec::new(number, Granularity::Tensor).with_layout(Layout::Both);
            let what = format!("{float}, {flow:?}");
            let spec = both(Number::E4M3);
            let actual = quantize_gelu(&client, input, &spec).expect("a matrix");
            let expected = quantize(&client, &output, &spec).expect("a matrix");
            assert_same(&client, &actual, &expected, &what);
            let spec = both(Number::E5M2);
            let actual = quantize_gelu_gradient(&client, input, &of_gradient, &spec);
            let expected = quantize(&client, &of_x, &spec).expect("a matrix");
            assert_same(&client, &actual.expect("a matrix"), &expected, &what);
            x[random.index(len)] = f32::NAN;
        }
    }
}
