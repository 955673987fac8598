//! RMSNorm: the reference against finite differences, the kernels against the reference.

use cubecl_kernels::reference::rms_norm::{rms_norm, rms_norm_backward};

use crate::{random::Random, rows::assert_slopes};

#[test]
fn the_reference_has_the_slopes_of_its_differences() {
    let mut random = Random::fresh();
    for (rows, cols, epsilon) in [(1, 1, 0.1), (3, 5, 1e-2), (4, 16, 0.5)] {
        let mut draw = |len| -> Vec<f64> { (0..len).map(|_| f64::from(random.normal())).collect() };
        let (x, gain, gradient) = (draw(rows * cols), draw(cols), draw(rows * cols));
        let loss = |x: &[f64], gain: &[f64]| -> f64 {
            let output = rms_norm(x, gain, epsilon).output;
            output.iter().zip(&gradient).map(|(y, dy)| y * dy).sum()
        };
        let slopes = rms_norm_backward(&x, &gain, epsilon, &gradient);
        assert_slopes(&slopes.input, &x, "x", |x| loss(x, &gain));
        assert_slopes(&slopes.gain, &gain, "gain", |gain| loss(&x, gain));
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        KernelError,
        granularity::Granularity,
        layout::Layout,
        number::Number,
        operator_input::OperatorInput,
        quantize::{QuantizeSpec, dequantize, quantize},
        rms_norm::{
            has_rms_norm, inverse_rms, quantize_rms_norm, rms_norm as kernel,
            rms_norm_backward as backward_kernel, rms_norm_compressing,
        },
        rounding::Rounding,
    };

    use super::*;
    use crate::{
        copies::{assert_is_copy, assert_same, bits, cases, special},
        device::{
            Tensor, client, drawn, dtype, float_types, read, read_float, rounded, upload,
            upload_with_offset,
        },
        rows::on_device::{
            COPIED_ROWS, Case, MANY_ROWS, assert_close, assert_refuses_gradients,
            assert_refuses_rows, assert_repeats, assert_same_but_for_order, assert_takes_rows,
            matrices, ones, special_rows, sum_of_parts, types,
        },
    };

    /// Both passes against the reference.
    #[track_caller]
    fn check(case: &Case) {
        let client = client();
        let [x, gain, gradient] = case.tensors(&client);
        let cols = case.gain.len();
        let rows = case.x.len() / cols;
        let what = case.what();
        let forward = kernel(&client, &x, &gain, case.epsilon).expect("rows and a gain");
        assert_eq!(forward.output.shape(), x.shape());
        assert_eq!(forward.output.dtype, case.float);
        assert_eq!(forward.inverse_rms.shape()[..], [rows]);
        let backward = backward_kernel(&client, &x, &gain, &forward.inverse_rms, &gradient);
        let backward = backward.expect("what had a forward pass");
        assert_eq!(backward.input.shape(), x.shape());
        assert_eq!(backward.input.dtype, case.float);

        let [x, g, dy] = case.wide();
        let epsilon = f64::from(case.epsilon);
        let expected = rms_norm(&x, &g, epsilon);
        let slopes = rms_norm_backward(&x, &g, epsilon, &dy);
        // The terms of sums that may cancel.
        let r = &expected.inverse_rms;
        let mut sizes = Vec::with_capacity(x.len());
        let mut gain_sizes = vec![0.0; cols];
        for row in 0..rows {
            let term = |j: usize| {
                let at = row * cols + j;
                ((g[j] * dy[at]).abs(), (x[at] * r[row]).abs())
            };
            let mean = (0..cols).map(|j| term(j).0 * term(j).1).sum::<f64>() / cols as f64;
            for (j, size) in gain_sizes.iter_mut().enumerate() {
                sizes.push(r[row] * (term(j).0 + term(j).1 * mean));
                *size += (dy[row * cols + j] * x[row * cols + j] * r[row]).abs();
            }
        }

        let output = read_float(&client, &forward.output);
        let exact = vec![0.0; x.len()];
        assert_close(&output, &expected.output, &exact, case.float, &what);
        let roots = read_float(&client, &forward.inverse_rms);
        assert_close(&roots, r, &vec![0.0; rows], dtype::<f32>(), &what);
        let input = read_float(&client, &backward.input);
        assert_close(&input, &slopes.input, &sizes, case.float, &what);
        let gain = sum_of_parts(&client, &backward.gain);
        assert_close(&gain, &slopes.gain, &gain_sizes, dtype::<f32>(), &what);
    }

    #[test]
    fn equals_the_reference() {
        let mut random = Random::fresh();
        for (shape, types) in matrices(&mut random) {
            let len = shape.iter().product();
            let x: Vec<f32> = (0..len).map(|_| 3.0 * random.normal()).collect();
            check(&Case::new(&mut random, &shape, &x, 1e-5, types));
        }
    }

    /// More rows than the cubes of the backward pass take at a time.
    #[test]
    fn many_rows() {
        let mut random = Random::fresh();
        for float in drawn(&mut random, float_types(&client()), 1) {
            for (shape, epsilon) in drawn(&mut random, MANY_ROWS, 2) {
                let len = shape.iter().product();
                let x: Vec<f32> = (0..len).map(|_| random.normal()).collect();
                let types = [float, dtype::<f32>()];
                check(&Case::new(&mut random, shape, &x, epsilon, types));
            }
        }
    }

    /// Outliers, denormals, rows of zeros, NaN and infinities.
    #[test]
    fn of_special_values() {
        let mut random = Random::fresh();
        for types in drawn(&mut random, types(&client()), 2) {
            for cols in drawn(&mut random, [1, 7, 129, 768, 1100], 1) {
                let x = special_rows(&mut random, [61, cols]);
                let mut case = Case::new(&mut random, &[61, cols], &x, 1e-6, types);
                check(&case);
                case.gradient[5 * cols] = f32::NAN;
                case.gradient[7 * cols] = f32::INFINITY;
                check(&case);
                case.gain[cols / 2] = f32::NAN;
                check(&case);
            }
        }
    }

    /// Rows in one plane and in several, groups in as many lanes as there are and in fewer, codes that are no whole words
    /// of a lane, and no rows.
    #[test]
    fn copies_are_those_of_the_quantizer() {
        let (client, mut random) = (client(), Random::fresh());
        for (float, spec, shape) in cases(&client, &mut random, &COPIED_ROWS) {
            let x = special(&client, &mut random, shape, float);
            let gain = ones(&client, &[shape[1]]);
            let (norm, copy) =
                rms_norm_compressing(&client, &x, &gain, 1e-3, &spec).expect("whole groups");
            let what = format!("{spec:?}, {float} {shape:?}");
            let expected = kernel(&client, &x, &gain, 1e-3).expect("rows and a gain");
            for (actual, expected) in [
                (&norm.output, &expected.output),
                (&norm.inverse_rms, &expected.inverse_rms),
            ] {
                assert_eq!(bits(&client, actual), bits(&client, expected), "{what}");
            }
            assert_is_copy(&client, &copy, &x, &spec, shape[1], &what);
        }
    }

    #[test]
    fn rows_that_are_no_numbers() {
        let client = client();
        let upload = |x: &[f32], shape: &[usize]| upload(&client, x, shape, dtype::<f32>());
        let (nan, infinity) = (f32::NAN, f32::INFINITY);
        #[rustfmt::skip]
        let x = [
            1.0, nan, 2.0,
            1.0, infinity, 2.0,
            1.0, f32::MAX, 2.0,
            0.0, -0.0, 0.0,
        ];
        let (x, gain) = (upload(&x, &[4, 3]), upload(&[1.0; 3], &[3]));
        let forward = kernel(&client, &x, &gain, 1e-6).expect("rows and a gain");
        let y = read_float(&client, &forward.output);
        assert!(y[..3].iter().all(|y| y.is_nan()), "{y:?}");
        assert!(y[4].is_nan(), "{y:?}");
        assert_eq!([y[3], y[5]], [0.0; 2]);
        assert_eq!(y[6..], [0.0; 6]);
        let r = read_float(&client, &forward.inverse_rms);
        assert!(r[0].is_nan(), "{r:?}");
        assert_eq!(r[1..3], [0.0; 2]);
        assert!((r[3] - 1e3).abs() < 1e-3, "{r:?}");
    }

    #[test]
    fn a_repetition_gives_the_same_bits() {
        let (client, mut random) = (client(), Random::fresh());
        for shape in [[2000, 64], [700, 1300]] {
            let x = random.with_outliers(shape[0] * shape[1]);
            let case = Case::new(&mut random, &shape, &x, 1e-6, [dtype::<f32>(); 2]);
            let [x, gain, gradient] = case.tensors(&client);
            let results = || {
                let forward = kernel(&client, &x, &gain, case.epsilon).expect("rows and a gain");
                let roots = &forward.inverse_rms;
                let backward = backward_kernel(&client, &x, &gain, roots, &gradient);
                let backward = backward.expect("what had a forward pass");
                [
                    forward.output,
                    forward.inverse_rms,
                    backward.input,
                    backward.gain,
                ]
                .map(|tensor| read_float(&client, &tensor))
            };
            assert_repeats(results, &case.what());
        }
    }

    #[test]
    fn reads_what_starts_inside_of_a_buffer() {
        let (client, mut random) = (client(), Random::fresh());
        for float in drawn(&mut random, float_types(&client), 1) {
            for shape in [[5, 13], [9, 768]] {
                let x = random.with_outliers(shape[0] * shape[1]);
                let case = Case::new(&mut random, &shape, &x, 1e-6, [float; 2]);
                let whole = case.tensors(&client);
                let inside = [
                    upload_with_offset(&client, &case.x, &shape, float),
                    upload_with_offset(&client, &case.gain, &shape[1..], float),
                    upload_with_offset(&client, &case.gradient, &shape, float),
                ];
                let results = |[x, gain, gradient]: [&Tensor; 3]| {
                    let forward = kernel(&client, x, gain, 1e-6).expect("rows and a gain");
                    let roots = &forward.inverse_rms;
                    let backward = backward_kernel(&client, x, gain, roots, gradient);
                    let backward = backward.expect("what had a forward pass");
                    let gain = sum_of_parts(&client, &backward.gain);
                    let [y, dx] = [forward.output, backward.input];
                    [read_float(&client, &y), read_float(&client, &dx), gain]
                };
                let expected = results(whole.each_ref());
                for moved in 0..inside.len() {
                    let mut tensors = whole.each_ref();
                    tensors[moved] = &inside[moved];
                    let what = format!("{}, tensor {moved}", case.what());
                    for (found, expected) in results(tensors).iter().zip(&expected) {
                        assert_same_but_for_order(found, expected, float, &what);
                    }
                }
            }
        }
    }

    #[test]
    fn which_rows_have_a_kernel() {
        assert_takes_rows(has_rms_norm);
    }

    #[test]
    fn empty_inputs() {
        let client = client();
        let (none, gain) = (ones(&client, &[2, 0, 4]), ones(&client, &[4]));
        let forward = kernel(&client, &none, &gain, 1e-6).expect("rows and a gain");
        assert_eq!(forward.output.shape()[..], [2, 0, 4]);
        assert_eq!(forward.inverse_rms.shape()[..], [0]);
        let roots = &forward.inverse_rms;
        let gradients = backward_kernel(&client, &none, &gain, roots, &none);
        let gradients = gradients.expect("what had a forward pass");
        assert_eq!(gradients.input.shape()[..], [2, 0, 4]);
        assert_eq!(sum_of_parts(&client, &gradients.gain), [0.0; 4]);
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let ones = |shape: &[usize]| ones(&client, shape);
        let (x, gain, roots) = (ones(&[2, 3]), ones(&[3]), ones(&[2]));
        assert_refuses_rows(&client, |x, gain| {
            let forward = kernel(&client, x, gain, 1e-6).unwrap_err();
            let backward = backward_kernel(&client, x, gain, &roots, x).unwrap_err();
            [forward, backward]
        });
        assert_refuses_gradients(&client, |roots, gradient| {
            backward_kernel(&client, &x, &gain, roots, gradient).unwrap_err()
        });
    }

    /// From x as floats and in numbers of which a kernel reads some and others not, in blocks of which a kernel writes some
    /// and others not: what the quantizer makes of the product of decoded x, the row's number and the gain.
    #[test]
    fn outputs_are_quantized_once_more() {
        let (client, mut random) = (client(), Random::fresh());
        let shapes = [[256, 384], [128, 128], [130, 256], [3, 16], [0, 128]];
        let floats = float_types(&client);
        let cases = floats
            .iter()
            .flat_map(|&float| shapes.map(|shape| (float, shape)));
        for (float, shape) in drawn(&mut random, cases, 3) {
            let [rows, cols] = shape;
            let x = match rows {
                0 => vec![],
                _ => special_rows(&mut random, shape),
            };
            let x = upload(&client, &x, &shape, float);
            let gain_type = [dtype::<f32>(), float][random.index(2)];
            let gain = rounded(&random.with_outliers(cols), gain_type);
            let gains = upload(&client, &gain, &[cols], gain_type);
            let norm = kernel(&client, &x, &gains, 1e-6).expect("rows and a gain");
            let roots: Vec<f32> = read(&client, &norm.inverse_rms);
            let groups = |number, group| QuantizeSpec::new(number, Granularity::Group(group));
            let waiting = [
                groups(Number::Int8, 128),
                groups(Number::Int10, 128),
                groups(Number::E4M3, 16),
                QuantizeSpec::int8(Granularity::Block(128)),
            ];
            let waiting = waiting.map(|spec| quantize(&client, &x, &spec).expect("a matrix"));
            let numbers = waiting.iter();
            let numbers = numbers.map(|matrix| OperatorInput::Quantized(matrix, float));
            for (index, input) in numbers.chain([(&x).into()]).enumerate() {
                let decoded = match input {
                    OperatorInput::Floats(x) => read_float(&client, x),
                    OperatorInput::Quantized(matrix, dtype) => read_float(
                        &client,
                        &dequantize(&client, matrix, dtype).expect("floats"),
                    ),
                };
                let whole = kernel(&client, input, &gains, 1e-6).expect("rows and a gain");
                let alone = inverse_rms(&client, input, 1e-6).expect("rows");
                let what = format!("{float} {shape:?}, {index}");
                assert_eq!(
                    bits(&client, &alone),
                    bits(&client, &whole.inverse_rms),
                    "{what}"
                );
                let output = decoded
                    .iter()
                    .enumerate()
                    .map(|(at, x)| x * roots[at / cols] * gain[at % cols]);
                let output = upload(&client, &output.collect::<Vec<_>>(), &shape, float);
                let blocks = |block| QuantizeSpec::int8(Granularity::Block(block));
                for spec in [
                    blocks(128)
                        .with_rounding(Rounding::Stochastic(random.key()))
                        .with_layout(Layout::Transposed),
                    blocks(128).with_layout(Layout::Both),
                    blocks(32),
                    QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(Layout::Both),
                ] {
                    let actual =
                        quantize_rms_norm(&client, input, &gains, &norm.inverse_rms, &spec);
                    let expected = quantize(&client, &output, &spec).expect("a matrix");
                    let what = format!("{float} {shape:?}, gains {gain_type}, {index} {spec:?}");
                    assert_same(&client, &actual.expect("a matrix"), &expected, &what);
                }
            }
            let few = upload(&client, &vec![1.0; rows + 1], &[rows + 1], dtype::<f32>());
            let spec = QuantizeSpec::int8(Granularity::Block(128));
            let error = quantize_rms_norm(&client, &x, &gains, &few, &spec).unwrap_err();
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        }
    }

    /// Blocks of CUDA's kernels take tiles by turns, and skip what has a bound that is not above what is known.
    #[cfg(feature = "cuda")]
    #[test]
    fn quantized_of_more_tiles_than_run_at_once() {
        let (client, mut random) = (client(), Random::fresh());
        let shape = [1152, 4352];
        let [rows, cols] = shape;
        let float = [dtype::<half::bf16>(), dtype::<half::f16>()][random.index(2)];
        let x: Vec<f32> = (0..rows * cols).map(|_| 2.0 * random.normal()).collect();
        let x = upload(&client, &x, &shape, float);
        let gain = rounded(&random.with_outliers(cols), dtype::<f32>());
        let gain = upload(&client, &gain, &[cols], dtype::<f32>());
        let flow = QuantizeSpec::new(Number::E4M3, Granularity::Group(16 << random.index(4)));
        let flowing = quantize(&client, &x, &flow).expect("a matrix");
        let input = OperatorInput::Quantized(&flowing, float);
        let norm = kernel(&client, input, &gain, 1e-6).expect("rows and a gain");
        let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(Layout::Both);
        let actual = quantize_rms_norm(&client, input, &gain, &norm.inverse_rms, &spec);
        let expected = quantize(&client, &norm.output, &spec).expect("a matrix");
        let what = format!("{float}, {flow:?}");
        assert_same(&client, &actual.expect("a matrix"), &expected, &what);
    }
}
