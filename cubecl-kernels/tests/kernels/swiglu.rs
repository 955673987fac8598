//! The gate of SwiGLU: the reference against finite differences, the kernels against the reference.

use cubecl_kernels::reference::swiglu::{swiglu, swiglu_backward};

use crate::random::Random;

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod quantized;

#[test]
fn the_reference_has_the_slopes_of_its_differences() {
    let mut random = Random::fresh();
    const STEP: f64 = 1e-5;
    for _ in 0..1000 {
        let gate = f64::from(6.0 * random.normal());
        let up = f64::from(random.normal());
        let gradient = f64::from(random.normal());
        let loss = |gate, up| gradient * swiglu(gate, up);
        let expected = [
            (loss(gate + STEP, up) - loss(gate - STEP, up)) / (2.0 * STEP),
            (loss(gate, up + STEP) - loss(gate, up - STEP)) / (2.0 * STEP),
        ];
        for (slope, expected) in swiglu_backward(gate, up, gradient)
            .into_iter()
            .zip(expected)
        {
            let error = (slope - expected).abs();
            assert!(error < 1e-7, "{slope} instead of {expected} at {gate}");
        }
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub mod on_device {
    use cubecl::{ir::StorageType, std::tensor::TensorHandle};
    use cubecl_kernels::{
        KernelError,
        granularity::Granularity,
        layout::Layout,
        number::Number,
        rounding::{Rounding, StochasticKey},
        shape::MatrixShape,
        swiglu as kernels,
        swiglu::{swiglu as kernel, swiglu_backward as backward_kernel, swiglu_compressing},
    };

    use super::*;
    use crate::{
        copies::{assert_is_copy, bits, cases, of_groups, special},
        device::{
            Tensor, client, drawn, dtype, float_types, read_float, rounded, upload, upload_i32,
            upload_with_offset,
        },
    };

    /// Whole vectors of every width, single elements, more than a cube takes, and nothing.
    const SHAPES: [&[usize]; 9] = [
        &[1],
        &[3],
        &[7, 129],
        &[5, 2, 13],
        &[2, 2],
        &[300, 768],
        &[2, 3, 1000],
        &[0, 5],
        &[],
    ];

    /// The error of a few operations and of rounding to the type, and the least number that is not flushed to 0.
    fn precision(float: StorageType) -> (f64, f64) {
        match float {
            _ if float == dtype::<f32>() => (5e-7, 2e-38),
            _ if float == dtype::<half::f16>() => (5e-4, 6e-8),
            _ => (4e-3, 2e-38),
        }
    }

    /// `error` is allowed beside the rounding to the type.
    #[track_caller]
    pub fn assert_close(actual: f32, expected: f64, error: f64, float: StorageType, what: &str) {
        let (relative, smallest) = precision(float);
        let nearest = rounded(&[expected as f32], float)[0];
        if !nearest.is_finite() {
            let same = actual == nearest || (actual.is_nan() && nearest.is_nan());
            assert!(same, "{what}: {actual:e} instead of {expected:e}");
            return;
        }
        let difference = (f64::from(actual) - expected).abs();
        let allowed = relative * expected.abs() + error + smallest;
        assert!(
            difference <= allowed,
            "{what}: {actual:e} instead of {expected:e}"
        );
    }

    /// Both passes against the reference.
    fn check(gate: &[f32], up: &[f32], gradient: &[f32], shape: &[usize], float: StorageType) {
        let client = client();
        let [gate, up, gradient] = [gate, up, gradient].map(|x| rounded(x, float));
        let tensors = [&gate, &up, &gradient].map(|x| upload(&client, x, shape, float));
        let [gate_tensor, up_tensor, gradient_tensor] = &tensors;
        let output = kernel(&client, gate_tensor, up_tensor).expect("tensors of one shape");
        let gradients = backward_kernel(&client, gate_tensor, up_tensor, gradient_tensor);
        let [of_gate, of_up] = gradients.expect("tensors of one shape");
        for tensor in [&output, &of_gate, &of_up] {
            assert_eq!(tensor.shape(), gate_tensor.shape());
            assert_eq!(tensor.dtype, float);
        }
        let output = read_float(&client, &output);
        let of_gate = read_float(&client, &of_gate);
        let of_up = read_float(&client, &of_up);
        for index in 0..gate.len() {
            let [x, u, dh] = [gate[index], up[index], gradient[index]].map(f64::from);
            let s = 1.0 / (1.0 + (-x).exp());
            let is_flushed = s < f64::from(f32::MIN_POSITIVE);
            if is_flushed && (u.is_infinite() || dh.is_infinite()) {
                // Infinity or NaN, as the device keeps denormals or not.
                continue;
            }
            // That of the exponential, which grows with its argument, and that of a sigmoid that becomes 0.
            let error = |size: f64| {
                let flushed = if is_flushed { size * s } else { 0.0 };
                1e-7 * (10.0 + x.abs().min(100.0)) * size * s + flushed
            };
            let what = format!("{float} {shape:?}[{index}]: gate {x:e}, up {u:e}, gradient {dh:e}");
            let expected = swiglu(x, u);
            assert_close(output[index], expected, error((x * u).abs()), float, &what);
            let [expected_gate, expected_up] = swiglu_backward(x, u, dh);
            // The slope is a sum, which may cancel.
            let size = (dh * u).abs() * (1.0 + x.abs() / (1.0 + x.exp()));
            assert_close(of_gate[index], expected_gate, error(size), float, &what);
            assert_close(
                of_up[index],
                expected_up,
                error((dh * x).abs()),
                float,
                &what,
            );
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
                check(&draw(5.0), &draw(1.0), &draw(1.0), shape, float);
                check(&draw(60.0), &draw(1.0), &draw(1.0), shape, float);
            }
        }
    }

    #[test]
    fn of_special_values() {
        let mut random = Random::fresh();
        let gates = [
            0.0,
            -0.0,
            1e-40,
            -1e-40,
            1e-30,
            87.0,
            -87.0,
            88.5,
            -88.5,
            104.0,
            -104.0,
            1000.0,
            -1000.0,
            65504.0,
            -65504.0,
            3e38,
            -3e38,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
        ];
        for float in drawn(&mut random, float_types(&client()), 1) {
            for others in [1.0, 0.0, -2.5, f32::NAN, f32::INFINITY] {
                let others = [others; 20];
                check(&gates, &others, &[0.5; 20], &[20], float);
                check(&gates, &[0.5; 20], &others, &[4, 5], float);
            }
            let shape = MatrixShape::new(33, 100);
            let mut draw = || random.with_special_values(shape);
            check(&draw(), &draw(), &draw(), &[33, 100], float);
        }
    }

    /// An exponential of their opposite would be infinite.
    #[test]
    fn large_gates_stay_numbers() {
        let client = client();
        let gate = upload(&client, &[-3e38, 3e38, -1e4, 200.0], &[4], dtype::<f32>());
        let ones = upload(&client, &[1.0; 4], &[4], dtype::<f32>());
        let output = kernel(&client, &gate, &ones).expect("tensors of one shape");
        assert_eq!(read_float(&client, &output), [0.0, 3e38, 0.0, 200.0]);
        let [of_gate, of_up] =
            backward_kernel(&client, &gate, &ones, &ones).expect("tensors of one shape");
        assert_eq!(read_float(&client, &of_gate), [0.0, 1.0, 0.0, 1.0]);
        assert_eq!(read_float(&client, &of_up), [0.0, 3e38, 0.0, 200.0]);
    }

    /// Two of the three factors of a gate's gradient may leave the range of floats where all three do not.
    #[test]
    fn products_on_the_way_stay_numbers() {
        let large = [f32::MAX, 0.5, f32::MAX, 1e-38, 3e38, 1e-38];
        let small = [1.5, f32::MAX, 1e-38, f32::MAX, 0.7, 0.7];
        for gate in [-0.7, 2.4, -20.0, -60.0] {
            check(&[gate; 6], &large, &small, &[6], dtype::<f32>());
            check(&[gate; 6], &small, &large, &[6], dtype::<f32>());
        }
    }

    #[test]
    fn reads_what_starts_inside_of_a_buffer() {
        let (client, mut random) = (client(), Random::fresh());
        for float in drawn(&mut random, float_types(&client), 1) {
            for len in [5, 768] {
                let x: Vec<f32> = (0..len).map(|_| random.normal()).collect();
                let whole = upload(&client, &x, &[len], float);
                let inside = upload_with_offset(&client, &x, &[len], float);
                let expected = kernel(&client, &whole, &whole).expect("tensors of one shape");
                let expected = read_float(&client, &expected);
                let of_whole = backward_kernel(&client, &whole, &whole, &whole);
                let of_whole = of_whole.expect("tensors of one shape");
                for (gate, up) in [(&inside, &whole), (&whole, &inside), (&inside, &inside)] {
                    let output = kernel(&client, gate, up).expect("tensors of one shape");
                    assert_eq!(read_float(&client, &output), expected, "{float} {len}");
                    let gradients = backward_kernel(&client, gate, up, &inside);
                    let gradients = gradients.expect("tensors of one shape");
                    for (gradient, expected) in gradients.iter().zip(&of_whole) {
                        let expected = read_float(&client, expected);
                        assert_eq!(read_float(&client, gradient), expected, "{float} {len}");
                    }
                }
            }
        }
    }

    /// In cubes that are full and that are not.
    #[test]
    fn copies_are_those_of_the_quantizer() {
        let (client, mut random) = (client(), Random::fresh());
        let shapes = [
            (16, [1, 16]),
            (16, [37, 48]),
            (32, [300, 96]),
            (128, [33, 768]),
            (128, [1, 128]),
            (1024, [5, 2048]),
        ];
        for (float, spec, shape) in cases(&client, &mut random, &shapes) {
            let inputs = [(); 2].map(|()| special(&client, &mut random, shape, float));
            let [gate, up] = &inputs;
            let (output, copies) =
                swiglu_compressing(&client, gate, up, &spec).expect("whole groups");
            let what = format!("{spec:?}, {float} {shape:?}");
            let expected = kernel(&client, gate, up).expect("tensors of one shape");
            assert_eq!(bits(&client, &output), bits(&client, &expected), "{what}");
            for (copy, input) in copies.iter().zip(&inputs) {
                assert_is_copy(&client, copy, input, &spec, shape[1], &what);
            }
        }
    }

    #[test]
    fn copies_that_it_does_not_write() {
        let client = client();
        let matrix = upload(&client, &[1.0; 96], &[2, 48], dtype::<f32>());
        let key = StochasticKey { seed: 1, stream: 2 };
        let groups = of_groups(Number::Int8, 16);
        for spec in [
            of_groups(Number::Int8, 32),
            groups.with_layout(Layout::Both),
            groups.with_rounding(Rounding::Stochastic(key)),
            groups.with_granularity(Granularity::Token),
        ] {
            let error = swiglu_compressing(&client, &matrix, &matrix, &spec).unwrap_err();
            assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        }
        let nothing = upload(&client, &[], &[0, 48], dtype::<f32>());
        let (output, _) = swiglu_compressing(&client, &nothing, &nothing, &groups)
            .expect("no rows of whole groups");
        assert_eq!(output.shape()[..], [0, 48]);
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let matrix = |shape: &[usize]| upload(&client, &[1.0; 6], shape, dtype::<f32>());
        let good = matrix(&[2, 3]);
        let transposed =
            TensorHandle::new(good.handle.clone(), vec![3, 2], vec![1, 3], dtype::<f32>());
        let integers = upload_i32(&client, &[1; 6], &[2, 3]);
        let errors = |gate: &Tensor, up: &Tensor, gradient: &Tensor| {
            let forward = kernels::swiglu(&client, gate, up).unwrap_err();
            let backward = kernels::swiglu_backward(&client, gate, up, gradient).unwrap_err();
            [forward, backward]
        };
        for error in errors(&good, &matrix(&[3, 2]), &good) {
            assert!(error.to_string().contains("[3, 2]"), "{error}");
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        }
        for error in errors(&transposed, &transposed, &transposed) {
            assert!(error.to_string().contains("contiguous"), "{error}");
        }
        for error in errors(&integers, &integers, &integers) {
            assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        }
        for gradient in [&matrix(&[6]), &integers, &transposed] {
            kernels::swiglu_backward(&client, &good, &good, gradient).unwrap_err();
        }
        for float in float_types(&client).into_iter().skip(1) {
            let other = upload(&client, &[1.0; 6], &[2, 3], float);
            for error in errors(&good, &other, &good) {
                assert!(error.to_string().contains("one shape and type"), "{error}");
            }
        }
    }
}
