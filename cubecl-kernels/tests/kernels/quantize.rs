//! Quantization and dequantization against the reference, to the bit.

use cubecl_kernels::{
    format::{Format, Granularity, Layout, Rounding, StochasticKey},
    quantize::{QuantizeSpec, Quantized, dequantize, quantize},
    reference,
    shape::MatrixShape,
};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, TestRuntime, assert_same_floats, assert_same_integers, client, dtype,
        float_types, read, read_float, read_i8, rounded, upload, upload_matrix,
    },
    random::Random,
};

const SHAPES: [MatrixShape; 5] = [
    MatrixShape {
        batch: 1,
        rows: 1,
        cols: 1,
    },
    MatrixShape {
        batch: 1,
        rows: 3,
        cols: 17,
    },
    MatrixShape {
        batch: 2,
        rows: 127,
        cols: 129,
    },
    MatrixShape {
        batch: 1,
        rows: 200,
        cols: 333,
    },
    MatrixShape {
        batch: 2,
        rows: 132,
        cols: 260,
    },
];

const STOCHASTIC: Rounding = Rounding::Stochastic(StochasticKey {
    seed: 0x0123_4567_89ab_cdef,
    stream: 0xfedc_ba98_7654_3210,
});

/// Compares all that a quantization wrote with the reference of the values `x` that it read.
#[track_caller]
pub fn check(client: &Client, quantized: &Quantized<TestRuntime>, x: &[f32], spec: &QuantizeSpec) {
    let what = format!("{:?}, {spec:?}", quantized.shape);
    let expected = reference::quantize(
        x,
        quantized.shape,
        spec.format,
        spec.granularity,
        spec.rounding,
    );
    let scales = read(client, &quantized.scales);
    assert_same_floats(&scales, &expected.scales, &format!("{what}: scales"));
    assert_eq!(quantized.values.is_some(), spec.layout.row_major());
    assert_eq!(quantized.transposed.is_some(), spec.layout.transposed());
    match (spec.format, &quantized.values) {
        (Format::Int10, Some(words)) => assert_eq!(
            read::<u32>(client, words),
            reference::pack_int10(&expected.values, quantized.shape.cols),
            "{what}: words"
        ),
        (_, Some(values)) => assert_same_integers(
            &read_i8(client, values),
            &expected.values,
            &format!("{what}: values"),
        ),
        _ => {}
    }
    if let Some(transposed) = &quantized.transposed {
        assert_same_integers(
            &read_i8(client, transposed),
            &expected.transposed().values,
            &format!("{what}: transposed"),
        );
    }
    for float in float_types(client) {
        let back = dequantize(client, quantized, float).expect("a float type of the device");
        assert_eq!(back.shape().iter().product::<usize>(), x.len());
        assert_same_floats(
            &read_float(client, &back),
            &rounded(&reference::dequantize(&expected), float),
            &format!("{what}: dequantized to {float}"),
        );
    }
}

#[rstest]
#[case(Granularity::Block(16))]
#[case(Granularity::Block(32))]
#[case(Granularity::Block(64))]
#[case(Granularity::Block(128))]
#[case(Granularity::Group(16))]
#[case(Granularity::Group(128))]
#[case(Granularity::Group(1024))]
#[case(Granularity::Token)]
#[case(Granularity::Channel)]
#[case(Granularity::Tensor)]
fn int8_equals_the_reference(#[case] granularity: Granularity) {
    let (client, mut random) = (client(), Random::fresh());
    for shape in SHAPES {
        let x = random.with_special_values(shape);
        for (rounding, layout) in [
            (Rounding::Nearest, Layout::Both),
            (STOCHASTIC, Layout::RowMajor),
        ] {
            let spec = QuantizeSpec {
                format: Format::Int8,
                granularity,
                rounding,
                layout,
            };
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
            check(&client, &quantized, &x, &spec);
        }
    }
}

#[rstest]
#[case(Granularity::Group(16))]
#[case(Granularity::Group(128))]
fn int10_equals_the_reference(#[case] granularity: Granularity) {
    let (client, mut random) = (client(), Random::fresh());
    for shape in SHAPES {
        let x = random.with_special_values(shape);
        for rounding in [Rounding::Nearest, STOCHASTIC] {
            let spec = QuantizeSpec {
                format: Format::Int10,
                granularity,
                rounding,
                layout: Layout::RowMajor,
            };
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
            check(&client, &quantized, &x, &spec);
        }
    }
}

#[test]
fn float_types_and_strides_do_not_change_the_numbers() {
    let (client, mut random) = (client(), Random::fresh());
    for shape in [MatrixShape::new(65, 132), MatrixShape::batched(2, 40, 67)] {
        let x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
        for float in float_types(&client) {
            let x = rounded(&x, float);
            for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
                let tensor = upload_matrix(&client, &x, shape, float, memory);
                for granularity in [
                    Granularity::Block(32),
                    Granularity::Group(64),
                    Granularity::Token,
                    Granularity::Channel,
                    Granularity::Tensor,
                ] {
                    let spec = QuantizeSpec {
                        format: Format::Int8,
                        granularity,
                        rounding: STOCHASTIC,
                        layout: Layout::Both,
                    };
                    println!("{float} {memory:?}");
                    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
                    check(&client, &quantized, &x, &spec);
                }
            }
        }
    }
}

/// Tiles of 128 x 128 that nowhere reach over an edge are written without looking for one, on CUDA by another kernel if
/// both copies are stochastic.
#[test]
fn whole_tiles_equal_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    for shape in [
        MatrixShape::new(256, 128),
        MatrixShape::batched(2, 256, 512),
    ] {
        let x = random.with_blocks_of_all_kinds(shape);
        for float in float_types(&client) {
            let x = rounded(&x, float);
            let tensor = upload_matrix(&client, &x, shape, float, Memory::Contiguous);
            for (rounding, layout) in [
                (STOCHASTIC, Layout::Both),
                (Rounding::Nearest, Layout::Transposed),
            ] {
                for block in [32, 128] {
                    let spec = QuantizeSpec {
                        format: Format::Int8,
                        granularity: Granularity::Block(block),
                        rounding,
                        layout,
                    };
                    println!("{shape:?} {float} {spec:?}");
                    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
                    check(&client, &quantized, &x, &spec);
                }
            }
        }
    }
}

#[test]
fn broadcast_inputs() {
    let (client, mut random) = (client(), Random::fresh());
    let row: Vec<f32> = (0..40).map(|_| random.normal()).collect();
    let spec = QuantizeSpec {
        format: Format::Int8,
        granularity: Granularity::Block(16),
        rounding: STOCHASTIC,
        layout: Layout::Both,
    };
    let mut tensor = upload(&client, &row, &[1, 40], dtype::<f32>());
    tensor = cubecl::std::tensor::TensorHandle::new(
        tensor.handle,
        vec![2, 19, 40],
        vec![0, 0, 1],
        dtype::<f32>(),
    );
    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
    check(&client, &quantized, &row.repeat(2 * 19), &spec);
}

#[test]
fn empty_inputs_give_empty_outputs() {
    let client = client();
    for shape in [vec![0, 40], vec![40, 0], vec![0, 3, 3]] {
        for granularity in [
            Granularity::Block(32),
            Granularity::Token,
            Granularity::Tensor,
        ] {
            let spec = QuantizeSpec {
                format: Format::Int8,
                granularity,
                rounding: Rounding::Nearest,
                layout: Layout::Both,
            };
            let x = upload(&client, &[], &shape, dtype::<f32>());
            let quantized = quantize(&client, &x, &spec).expect("a matrix");
            assert_eq!(
                quantized.values.as_ref().map(|v| v.shape().to_vec()),
                Some(shape.clone())
            );
            let back = dequantize(&client, &quantized, dtype::<f32>()).expect("a float type");
            assert_eq!(back.shape().to_vec(), shape);
        }
    }
}

#[test]
fn stochastic_rounding_follows_its_key() {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::new(70, 90);
    let x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
    let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    let values = |seed, stream| {
        let spec = QuantizeSpec {
            format: Format::Int8,
            granularity: Granularity::Block(32),
            rounding: Rounding::Stochastic(StochasticKey { seed, stream }),
            layout: Layout::RowMajor,
        };
        let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
        read_i8(&client, &quantized.values.expect("a row-major copy"))
    };
    let first = values(1, 2);
    assert_eq!(first, values(1, 2));
    assert_ne!(first, values(1, 3));
    assert_ne!(first, values(2, 2));
    assert_ne!(first, values(1, 2 + (1 << 32)));
}
