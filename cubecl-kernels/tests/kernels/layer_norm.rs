//! Layer normalization: the reference against finite differences, the kernels against the reference.

use cubecl_kernels::reference::layer_norm::{layer_norm, layer_norm_backward};

use crate::{random::Random, rows::assert_slopes};

#[test]
fn the_reference_has_the_slopes_of_its_differences() {
    let mut random = Random::fresh();
    for (rows, cols, epsilon) in [(1, 1, 0.1), (3, 5, 1e-2), (4, 16, 0.5)] {
        let mut draw = |len| -> Vec<f64> { (0..len).map(|_| f64::from(random.normal())).collect() };
        let (x, gradient) = (draw(rows * cols), draw(rows * cols));
        let (gain, bias) = (draw(cols), draw(cols));
        let loss = |x: &[f64], gain: &[f64], bias: &[f64]| -> f64 {
            let output = layer_norm(x, gain, Some(bias), epsilon).output;
            output.iter().zip(&gradient).map(|(y, dy)| y * dy).sum()
        };
        let slopes = layer_norm_backward(&x, &gain, epsilon, &gradient);
        assert_slopes(&slopes.input, &x, "x", |x| loss(x, &gain, &bias));
        assert_slopes(&slopes.gain, &gain, "gain", |gain| loss(&x, gain, &bias));
        assert_slopes(&slopes.bias, &bias, "bias", |bias| loss(&x, &gain, bias));
    }
}

/// By hand: the mean is 2, the biased variance 1.
#[test]
fn the_reference_normalizes() {
    let norm = layer_norm(&[1.0, 3.0], &[2.0, 4.0], None, 0.0);
    assert_eq!(norm.output, [-2.0, 4.0]);
    assert_eq!(norm.mean, [2.0]);
    assert_eq!(norm.inverse_deviation, [1.0]);
    let norm = layer_norm(&[1.0, 3.0], &[2.0, 4.0], Some(&[10.0, 20.0]), 3.0);
    assert_eq!(norm.output, [9.0, 22.0]);
    assert_eq!(norm.inverse_deviation, [0.5]);
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        granularity::Granularity,
        layer_norm::{
            LayerNormGradients, LayerNormOutput, has_layer_norm, layer_norm as kernel,
            layer_norm_backward as backward_kernel, layer_norm_compressing, quantize_layer_norm,
            row_deviations,
        },
        layout::Layout,
        number::Number,
        operator_input::OperatorInput,
        quantize::{QuantizeSpec, quantize},
        rounding::Rounding,
    };

    use super::*;
    use crate::{
        copies::{assert_is_copy, assert_same, bits, cases, special},
        device::{
            Client, Tensor, TestRuntime, client, drawn, dtype, float_types, read_float, rounded,
            upload, upload_i32, upload_with_offset,
        },
        rows::on_device::{
            COPIED_ROWS, Case, MANY_ROWS, assert_close, assert_dtype_error,
            assert_refuses_gradients, assert_refuses_rows, assert_repeats,
            assert_same_but_for_order, assert_shape_error, assert_takes_rows, matrices, ones,
            special_rows, sum_of_parts, types, wide,
        },
    };

    /// As of RMSNorm, from the numbers of rows alone.
    #[test]
    fn outputs_are_quantized_as_they_are_computed() {
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
            let of_columns = [dtype::<f32>(), float][random.index(2)];
            let [gain, bias] = [(); 2].map(|()| {
                let values = rounded(&random.with_outliers(cols), of_columns);
                upload(&client, &values, &[cols], of_columns)
            });
            let bias = [None, Some(&bias)][random.index(2)];
            let group = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
            let block = QuantizeSpec::int8(Granularity::Block(128));
            let waiting = [group, block, QuantizeSpec::int8(Granularity::Block(16))];
            let waiting = waiting.map(|spec| quantize(&client, &x, &spec).expect("a matrix"));
            let numbers = waiting.iter();
            let numbers = numbers.map(|matrix| OperatorInput::Quantized(matrix, float));
            for (index, input) in numbers.chain([(&x).into()]).enumerate() {
                let norm = kernel(&client, input, &gain, bias, 1e-6).expect("rows and a gain");
                let of_rows = row_deviations(&client, input, 1e-6).expect("rows");
                let what = format!("{float} {shape:?}, {index}");
                for (alone, whole) in of_rows.iter().zip([&norm.mean, &norm.inverse_deviation]) {
                    assert_eq!(bits(&client, alone), bits(&client, whole), "{what}");
                }
                let stochastic = Rounding::Stochastic(random.key());
                for spec in [
                    block.with_layout(Layout::Both),
                    block
                        .with_rounding(stochastic)
                        .with_layout(Layout::Transposed),
                    QuantizeSpec::int8(Granularity::Block(32)),
                    QuantizeSpec::new(Number::E4M3, Granularity::Tensor).with_layout(Layout::Both),
                ] {
                    let of_rows = of_rows.each_ref();
                    let actual = quantize_layer_norm(&client, input, &gain, bias, of_rows, &spec);
                    let expected = quantize(&client, &norm.output, &spec).expect("a matrix");
                    let what = format!("{what}, bias {}, {spec:?}", bias.is_some());
                    assert_same(&client, &actual.expect("a matrix"), &expected, &what);
                }
            }
            let few = upload(&client, &vec![1.0; rows + 1], &[rows + 1], dtype::<f32>());
            let error = quantize_layer_norm(&client, &x, &gain, bias, [&few; 2], &block);
            assert_shape_error(&error.unwrap_err());
        }
    }

    /// As of RMSNorm.
    #[test]
    fn copies_are_those_of_the_quantizer() {
        let (client, mut random) = (client(), Random::fresh());
        for (float, spec, shape) in cases(&client, &mut random, &COPIED_ROWS) {
            let x = special(&client, &mut random, shape, float);
            let gain = ones(&client, &[shape[1]]);
            let bias = (random.index(2) == 0).then_some(&gain);
            let (norm, copy) = layer_norm_compressing(&client, &x, &gain, bias, 1e-3, &spec)
                .expect("whole groups");
            let what = format!("{spec:?}, {float} {shape:?}");
            let expected = kernel(&client, &x, &gain, bias, 1e-3).expect("rows and a gain");
            for (actual, expected) in [
                (&norm.output, &expected.output),
                (&norm.mean, &expected.mean),
                (&norm.inverse_deviation, &expected.inverse_deviation),
            ] {
                assert_eq!(bits(&client, actual), bits(&client, expected), "{what}");
            }
            assert_is_copy(&client, &copy, &x, &spec, shape[1], &what);
        }
    }

    type Passes = (
        LayerNormOutput<TestRuntime>,
        LayerNormGradients<TestRuntime>,
    );

    /// Both passes, of tensors that fit.
    #[track_caller]
    fn both_passes(
        client: &Client,
        [x, gain, gradient]: [&Tensor; 3],
        bias: Option<&Tensor>,
        epsilon: f32,
    ) -> Passes {
        let forward = kernel(client, x, gain, bias, epsilon).expect("rows, a gain and a bias");
        let [m, s] = [&forward.mean, &forward.inverse_deviation];
        let backward = backward_kernel(client, x, gain, m, s, gradient);
        let backward = backward.expect("what had a forward pass");
        (forward, backward)
    }

    /// An ordinary bias for each column.
    fn draw_bias(random: &mut Random, case: &Case) -> Vec<f32> {
        let bias: Vec<f32> = case.gain.iter().map(|_| random.normal()).collect();
        rounded(&bias, case.gain_float)
    }

    /// Both passes against the reference.
    #[track_caller]
    fn check(case: &Case, bias: Option<&[f32]>) {
        let client = client();
        let tensors = case.tensors(&client);
        let x = &tensors[0];
        let cols = case.gain.len();
        let rows = case.x.len() / cols;
        let what = format!("{}, bias: {}", case.what(), bias.is_some());
        let bias_tensor = bias.map(|bias| upload(&client, bias, &[cols], case.gain_float));
        let (forward, backward) = both_passes(
            &client,
            tensors.each_ref(),
            bias_tensor.as_ref(),
            case.epsilon,
        );
        for like_x in [&forward.output, &backward.input] {
            assert_eq!(like_x.shape(), x.shape());
            assert_eq!(like_x.dtype, case.float);
        }
        for of_rows in [&forward.mean, &forward.inverse_deviation] {
            assert_eq!(of_rows.shape()[..], [rows]);
        }

        let [x, g, dy] = case.wide();
        let bias = bias.map(wide);
        let epsilon = f64::from(case.epsilon);
        let expected = layer_norm(&x, &g, bias.as_deref(), epsilon);
        let slopes = layer_norm_backward(&x, &g, epsilon, &dy);
        let sizes = Sizes::new(&x, &g, bias.as_deref(), &dy, &expected.inverse_deviation);

        let f32 = dtype::<f32>();
        let read = |tensor: &Tensor| read_float(&client, tensor);
        let means = read(&forward.mean);
        assert_close(&means, &expected.mean, &sizes.mean, f32, &what);
        let scales = read(&forward.inverse_deviation);
        let of_means = scales_of_means(&x, cols, &means, epsilon);
        let exact = vec![0.0; rows];
        assert_close(&scales, &of_means, &exact, f32, &what);
        let output = read(&forward.output);
        assert_close(&output, &expected.output, &sizes.output, case.float, &what);
        let input = read(&backward.input);
        assert_close(&input, &slopes.input, &sizes.input, case.float, &what);
        let gain = sum_of_parts(&client, &backward.gain);
        assert_close(&gain, &slopes.gain, &sizes.gain, f32, &what);
        let bias = sum_of_parts(&client, &backward.bias);
        assert_close(&bias, &slopes.bias, &sizes.bias, f32, &what);
    }

    /// `1 / sqrt(mean((x - m)²) + epsilon)` of the means that a kernel gave: far from zero, what rounding takes from a
    /// mean is a share of the deviation.
    fn scales_of_means(x: &[f64], cols: usize, means: &[f32], epsilon: f64) -> Vec<f64> {
        let rows = x.chunks(cols).zip(means);
        rows.map(|(x, &mean)| {
            let squares = x.iter().map(|x| (x - f64::from(mean)).powi(2));
            1.0 / (squares.sum::<f64>() / cols as f64 + epsilon).sqrt()
        })
        .collect()
    }

    /// The sizes of the terms of sums that may cancel, `x - mean(x)` among them.
    struct Sizes {
        mean: Vec<f64>,
        output: Vec<f64>,
        input: Vec<f64>,
        gain: Vec<f64>,
        bias: Vec<f64>,
    }

    impl Sizes {
        fn new(x: &[f64], g: &[f64], bias: Option<&[f64]>, dy: &[f64], scales: &[f64]) -> Self {
            let cols = g.len();
            let mut sizes = Self {
                mean: Vec::with_capacity(scales.len()),
                output: Vec::with_capacity(x.len()),
                input: Vec::with_capacity(x.len()),
                gain: vec![0.0; cols],
                bias: vec![0.0; cols],
            };
            let rows = x.chunks(cols).zip(dy.chunks(cols)).zip(scales);
            for ((x, dy), s) in rows {
                let mean_of =
                    |term: &dyn Fn(usize) -> f64| (0..cols).map(term).sum::<f64>() / cols as f64;
                let mean = mean_of(&|j| x[j].abs());
                let normal = |j: usize| (x[j].abs() + mean) * s;
                let product = |j: usize| (g[j] * dy[j]).abs();
                let (mean_p, mean_pn) = (mean_of(&product), mean_of(&|j| product(j) * normal(j)));
                sizes.mean.push(mean);
                for j in 0..cols {
                    let bias = bias.map_or(0.0, |bias| bias[j].abs());
                    sizes.output.push(normal(j) * g[j].abs() + bias);
                    sizes
                        .input
                        .push(s * (product(j) + mean_p + normal(j) * mean_pn));
                    sizes.gain[j] += dy[j].abs() * normal(j);
                    sizes.bias[j] += dy[j].abs();
                }
            }
            sizes
        }
    }

    /// Every other matrix with a bias, so that each width has both.
    #[test]
    fn equals_the_reference() {
        let mut random = Random::fresh();
        for (turn, (shape, types)) in matrices(&mut random).into_iter().enumerate() {
            let len = shape.iter().product();
            let x: Vec<f32> = (0..len).map(|_| 3.0 * random.normal() + 1.0).collect();
            let case = Case::new(&mut random, &shape, &x, 1e-5, types);
            let bias = draw_bias(&mut random, &case);
            check(&case, (turn % 2 == 0).then_some(&bias));
        }
    }

    /// More rows than the cubes of the backward pass take at a time.
    #[test]
    fn many_rows() {
        let mut random = Random::fresh();
        for float in drawn(&mut random, float_types(&client()), 1) {
            for (shape, epsilon) in drawn(&mut random, MANY_ROWS, 1) {
                let len = shape.iter().product();
                let x: Vec<f32> = (0..len).map(|_| random.normal()).collect();
                let types = [float, dtype::<f32>()];
                let case = Case::new(&mut random, shape, &x, epsilon, types);
                let bias = draw_bias(&mut random, &case);
                check(&case, Some(&bias));
            }
        }
    }

    /// A mean so large that its square, and the mean of squares, leave nothing of the variance.
    #[test]
    fn rows_far_from_zero() {
        let (client, mut random) = (client(), Random::fresh());
        let floats = float_types(&client).into_iter().map(|float| (float, 10.0));
        for (float, deviation) in floats.chain([(dtype::<f32>(), 0.1)]) {
            for cols in [7, 129, 768] {
                let mut draw = || 1000.0 + deviation * random.normal();
                let x: Vec<f32> = (0..30 * cols).map(|_| draw()).collect();
                let case = Case::new(&mut random, &[30, cols], &x, 1e-6, [float; 2]);
                check(&case, None);
            }
        }
    }

    /// Outliers, denormals, rows of zeros, NaN and infinities.
    #[test]
    fn of_special_values() {
        let mut random = Random::fresh();
        let types = types(&client()).into_iter().enumerate();
        for (turn, types) in drawn(&mut random, types, 2) {
            for cols in drawn(&mut random, [1, 7, 129, 768, 1100], 1) {
                let mut x = special_rows(&mut random, [61, cols]);
                // An infinite gradient makes infinities of their signs, which none near the mean would have for sure.
                for (j, x) in x[40 * cols..][..cols].iter_mut().enumerate() {
                    *x = if j % 2 == 0 { 2.0 } else { -1.0 };
                }
                let mut case = Case::new(&mut random, &[61, cols], &x, 1e-6, types);
                let mut bias = draw_bias(&mut random, &case);
                check(&case, (turn % 2 == 0).then_some(&bias));
                case.gradient[50 * cols] = f32::NAN;
                case.gradient[40 * cols] = f32::INFINITY;
                bias[0] = f32::NEG_INFINITY;
                check(&case, (turn % 2 == 0).then_some(&bias));
                case.gain[cols / 2] = f32::NAN;
                check(&case, (turn % 2 == 0).then_some(&bias));
            }
        }
    }

    #[test]
    fn rows_that_are_no_numbers() {
        let client = client();
        let upload = |x: &[f32], shape: &[usize]| upload(&client, x, shape, dtype::<f32>());
        let (nan, infinity, huge) = (f32::NAN, f32::INFINITY, f32::MAX);
        #[rustfmt::skip]
        let x = [
            1.0, nan, 2.0,
            1.0, infinity, 2.0,
            huge, huge, 2.0,
            1.0, huge, 2.0,
            0.0, -0.0, 0.0,
        ];
        let (x, gain) = (upload(&x, &[5, 3]), upload(&[1.0; 3], &[3]));
        let bias = upload(&[5.0, 6.0, 7.0], &[3]);
        let forward = kernel(&client, &x, &gain, Some(&bias), 1e-6).expect("rows");
        let y = read_float(&client, &forward.output);
        assert!(y[..9].iter().all(|y| y.is_nan()), "{y:?}");
        assert_eq!(y[9..], [5.0, 6.0, 7.0, 5.0, 6.0, 7.0]);
        let s = read_float(&client, &forward.inverse_deviation);
        assert!(s[..2].iter().all(|s| s.is_nan()), "{s:?}");
        assert_eq!(s[3], 0.0);
        assert!((s[4] - 1e3).abs() < 1e-3, "{s:?}");
    }

    /// Less this mean, what lies past the end of a row is infinite, and times 0 no number.
    #[test]
    fn what_lies_past_a_row_does_not_count() {
        let client = client();
        let upload = |x: &[f32], shape: &[usize]| upload(&client, x, shape, dtype::<f32>());
        let (x, mean, scale) = (
            upload(&[1e38; 3], &[1, 3]),
            upload(&[1e38], &[1]),
            upload(&[1e3], &[1]),
        );
        let (gain, gradient) = (ones(&client, &[3]), upload(&[1.0, 2.0, 3.0], &[1, 3]));
        let backward = backward_kernel(&client, &x, &gain, &mean, &scale, &gradient);
        let dx = read_float(&client, &backward.expect("a row").input);
        let sizes = [2e3; 3];
        assert_close(&dx, &[-1e3, 0.0, 1e3], &sizes, dtype::<f32>(), "dx");
    }

    #[test]
    fn a_repetition_gives_the_same_bits() {
        let (client, mut random) = (client(), Random::fresh());
        for shape in [[2000, 64], [700, 1300]] {
            let x = random.with_outliers(shape[0] * shape[1]);
            let case = Case::new(&mut random, &shape, &x, 1e-6, [dtype::<f32>(); 2]);
            let tensors = case.tensors(&client);
            let results = || {
                let (forward, backward) =
                    both_passes(&client, tensors.each_ref(), Some(&tensors[1]), case.epsilon);
                [
                    forward.output,
                    forward.mean,
                    forward.inverse_deviation,
                    backward.input,
                    backward.gain,
                    backward.bias,
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
                let bias = draw_bias(&mut random, &case);
                let cols = &shape[1..];
                let [x, gain, gradient] = case.tensors(&client);
                let whole = [x, gain, gradient, upload(&client, &bias, cols, float)];
                let inside = [
                    upload_with_offset(&client, &case.x, &shape, float),
                    upload_with_offset(&client, &case.gain, cols, float),
                    upload_with_offset(&client, &case.gradient, &shape, float),
                    upload_with_offset(&client, &bias, cols, float),
                ];
                let results = |[x, gain, gradient, bias]: [&Tensor; 4]| {
                    let (forward, backward) =
                        both_passes(&client, [x, gain, gradient], Some(bias), 1e-6);
                    let parts = [backward.gain, backward.bias];
                    let [of_gain, of_bias] = parts.map(|parts| sum_of_parts(&client, &parts));
                    let [y, dx] = [forward.output, backward.input];
                    let [y, dx] = [y, dx].map(|tensor| read_float(&client, &tensor));
                    [y, dx, of_gain, of_bias]
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
        assert_takes_rows(has_layer_norm);
    }

    #[test]
    fn empty_inputs() {
        let client = client();
        let (none, gain) = (ones(&client, &[2, 0, 4]), ones(&client, &[4]));
        let (forward, backward) = both_passes(&client, [&none, &gain, &none], Some(&gain), 1e-6);
        assert_eq!(forward.output.shape()[..], [2, 0, 4]);
        assert_eq!(forward.mean.shape()[..], [0]);
        assert_eq!(forward.inverse_deviation.shape()[..], [0]);
        assert_eq!(backward.input.shape()[..], [2, 0, 4]);
        for parts in [&backward.gain, &backward.bias] {
            assert_eq!(sum_of_parts(&client, parts), [0.0; 4]);
        }
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let ones = |shape: &[usize]| ones(&client, shape);
        let (x, gain, of_rows) = (ones(&[2, 3]), ones(&[3]), ones(&[2]));
        assert_refuses_rows(&client, |x, gain| {
            let forward = kernel(&client, x, gain, None, 1e-6).unwrap_err();
            let backward = backward_kernel(&client, x, gain, &of_rows, &of_rows, x).unwrap_err();
            [forward, backward]
        });
        assert_refuses_gradients(&client, |mean, gradient| {
            backward_kernel(&client, &x, &gain, mean, &of_rows, gradient).unwrap_err()
        });
        assert_refuses_gradients(&client, |scale, gradient| {
            backward_kernel(&client, &x, &gain, &of_rows, scale, gradient).unwrap_err()
        });
        let error = |bias: &Tensor| kernel(&client, &x, &gain, Some(bias), 1e-6).unwrap_err();
        for len in [0, 2, 6] {
            assert_shape_error(&error(&ones(&[len])));
        }
        assert_dtype_error(&error(&upload_i32(&client, &[1; 3], &[3])));
        let half = upload(&client, &[1.0; 3], &[3], dtype::<half::f16>());
        assert_dtype_error(&error(&half));
    }
}
