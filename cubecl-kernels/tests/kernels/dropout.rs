//! Dropout: the draw against its probabilities, the kernel against it, element by element.

use cubecl_kernels::{dropout::Draw, rounding::StochasticKey};

use crate::random::Random;

/// Two keys agree by chance alone, and neighbours are applied as they are drawn one by one.
#[test]
fn draws_are_their_own() {
    let mut random = Random::fresh();
    let draw = |key| Draw { rate: 0.5, key };
    let [one, other] = [random.key(), random.key()].map(draw);
    let same = (0..40_000).filter(|i| {
        let (row, col) = (i / 200, i % 200);
        (one.factor(row, col) == 0.0) == (other.factor(row, col) == 0.0)
    });
    let same = same.count();
    assert!((19_000..21_000).contains(&same), "{same} of 40,000");
    for first in 0..9 {
        let mut values = vec![3.0; 23];
        one.apply(5, first, &mut values);
        for (index, value) in values.into_iter().enumerate() {
            assert_eq!(value, 3.0 * one.factor(5, first + index));
        }
    }
    let none = Draw {
        rate: 0.0,
        key: StochasticKey { seed: 1, stream: 2 },
    };
    assert!((0..1000).all(|col| none.factor(0, col) == 1.0));
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        KernelError,
        dropout::{dropout, residual_sum},
        granularity::Granularity,
        number::Number,
        operator_input::OperatorInput,
        quantize::{QuantizeSpec, dequantize, quantize},
        shape::MatrixShape,
    };

    use super::*;
    use crate::device::{
        assert_same_floats, client, drawn, dtype, float_types, read_float, rounded, upload,
        upload_i32,
    };

    /// Pieces of every width, rows that end inside of a draw, a number a row, and nothing.
    const SHAPES: [&[usize]; 9] = [
        &[1],
        &[7, 129],
        &[5, 2, 13],
        &[6, 2],
        &[9, 6],
        &[2, 3, 1000],
        &[64, 1],
        &[0, 5],
        &[],
    ];

    /// What the kernel gives of values that it reads as these.
    fn expected(x: &[f32], residual: Option<&[f32]>, cols: usize, draw: &Draw) -> Vec<f32> {
        let mut output = x.to_vec();
        for (row, values) in output.chunks_mut(cols.max(1)).enumerate() {
            draw.apply(row, 0, values);
        }
        for (value, residual) in output.iter_mut().zip(residual.into_iter().flatten()) {
            *value += residual;
        }
        output
    }

    #[test]
    fn of_floats() {
        let (client, mut random) = (client(), Random::fresh());
        for float in drawn(&mut random, float_types(&client), 1) {
            for shape in SHAPES {
                let matrix = MatrixShape::new(1, shape.iter().product());
                let mut draw = || rounded(&random.with_special_values(matrix), float);
                let (x, residual) = (draw(), draw());
                let tensors = [&x, &residual].map(|values| upload(&client, values, shape, float));
                let cols = shape.last().copied().unwrap_or(1);
                for rate in [0.0, 0.1, 0.75] {
                    let draw = Draw {
                        rate,
                        key: random.key(),
                    };
                    for with in [false, true] {
                        let what = format!("{float} {shape:?}, rate {rate}, residual {with}");
                        let residual_tensor = with.then_some(&tensors[1]);
                        let output = dropout(&client, &tensors[0], residual_tensor, &draw);
                        let output = output.expect("tensors of one shape");
                        assert_eq!((output.shape(), output.dtype), (tensors[0].shape(), float));
                        let residual = with.then_some(&residual[..]);
                        let expected = rounded(&expected(&x, residual, cols, &draw), float);
                        assert_same_floats(&read_float(&client, &output), &expected, &what);
                    }
                }
            }
        }
    }

    /// As of the floats that they stand for, decoded as they are read or before.
    #[test]
    fn of_numbers() {
        let (client, mut random) = (client(), Random::fresh());
        let specs = [
            QuantizeSpec::int8(Granularity::Block(32)),
            QuantizeSpec::int8(Granularity::Block(128)),
            QuantizeSpec::int8(Granularity::Group(128)),
            QuantizeSpec::new(Number::E4M3, Granularity::Group(16)),
            QuantizeSpec::new(Number::Int10, Granularity::Group(128)),
        ];
        let shapes = [[64, 128], [130, 256], [33, 40], [3, 16]];
        let cases = specs
            .iter()
            .flat_map(|spec| shapes.map(|shape| (spec, shape)));
        for float in drawn(&mut random, float_types(&client), 1) {
            for (spec, shape) in drawn(&mut random, cases.clone(), 3) {
                let x = random.with_outliers(shape.iter().product());
                let residual = rounded(&random.with_outliers(x.len()), float);
                let x = upload(&client, &x, &shape, float);
                let numbers = quantize(&client, &x, spec).expect("a matrix");
                let floats = dequantize(&client, &numbers, float).expect("a matrix");
                let draw = Draw {
                    rate: 0.3,
                    key: random.key(),
                };
                let what = format!("{float} {shape:?}, {spec:?}");
                let residual_tensor = upload(&client, &residual, &shape, float);
                let input = OperatorInput::Quantized(&numbers, float);
                let output = dropout(&client, input, Some(&residual_tensor), &draw);
                let output = read_float(&client, &output.expect("a matrix"));
                let floats = read_float(&client, &floats);
                let expected = expected(&floats, Some(&residual), shape[1], &draw);
                assert_same_floats(&output, &rounded(&expected, float), &what);
                let sum = residual_sum(&client, input, &residual_tensor).expect("a matrix");
                let expected: Vec<_> = floats.iter().zip(&residual).map(|(x, r)| x + r).collect();
                let sum = read_float(&client, &sum);
                assert_same_floats(&sum, &rounded(&expected, float), &what);
            }
        }
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let draw = |rate| Draw {
            rate,
            key: StochasticKey { seed: 1, stream: 2 },
        };
        let x = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
        let integers = upload_i32(&client, &[1; 6], &[2, 3]);
        let other = upload(&client, &[1.0; 6], &[3, 2], dtype::<f32>());
        let error = dropout(&client, &integers, None, &draw(0.5)).unwrap_err();
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        let error = dropout(&client, &x, Some(&other), &draw(0.5)).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        let error = residual_sum(&client, &x, &other).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        for rate in [1.0, -0.1, f32::NAN] {
            let error = dropout(&client, &x, None, &draw(rate)).unwrap_err();
            assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        }
    }
}
