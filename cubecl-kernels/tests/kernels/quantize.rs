//! Quantization and dequantization against the reference, to the bit.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    gemm::{Strategy, gemm},
    granularity::Granularity,
    layout::Layout,
    number::Number,
    quantize::{QuantizeSpec, Quantized, dequantize, quantize, quantize_both_ways, unpack_int4},
    reference::{self, ReferenceQuantized},
    rounding::{Rounding, StochasticKey},
    scale::ScaleNumber,
    shape::MatrixShape,
};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, assert_same_integers, client,
        drawn, dtype, float_types, read, read_float, read_i8, rounded, upload, upload_matrix,
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

/// The stored elements of a tensor, each as its bits.
pub fn stored_bits(client: &Client, stored: &Tensor) -> Vec<u32> {
    if stored.dtype == dtype::<u32>() {
        return read(client, stored);
    }
    read::<u8>(client, stored)
        .into_iter()
        .map(u32::from)
        .collect()
}

/// Compares all that a quantization wrote with the reference of the values `x` that it read.
#[track_caller]
pub fn check(client: &Client, quantized: &Quantized<TestRuntime>, x: &[f32], spec: &QuantizeSpec) {
    let what = format!("{:?}, {spec:?}", quantized.shape);
    let expected = reference::quantize(x, quantized.shape, spec);
    let storage = spec.number.storage();
    match spec.scale {
        ScaleNumber::F32 => assert_same_floats(
            &read(client, &quantized.scales),
            &expected.scales,
            &format!("{what}: scales"),
        ),
        ScaleNumber::E8M0 | ScaleNumber::E4M3 => assert_eq!(
            read::<u8>(client, &quantized.scales),
            expected.scale_bytes,
            "{what}: scales"
        ),
    }
    let tensor_scales = quantized
        .tensor_scale
        .as_ref()
        .map(|scales| read(client, scales));
    assert_same_floats(
        &tensor_scales.unwrap_or_default(),
        &expected.tensor_scales,
        &format!("{what}: tensor scales"),
    );
    assert_eq!(quantized.values.is_some(), spec.layout.row_major());
    assert_eq!(quantized.transposed.is_some(), spec.layout.transposed());
    for (copy, expected, name) in [
        (&quantized.values, &expected, "values"),
        (&quantized.transposed, &expected.transposed(), "transposed"),
    ] {
        let Some(copy) = copy else { continue };
        assert_eq!(copy.dtype, storage.dtype(), "{what}: {name}");
        let stored = reference::stored(&expected.values, expected.shape.cols, storage);
        let bits = stored_bits(client, copy);
        assert_eq!(bits.len(), stored.len(), "{what}: length of {name}");
        if let Some(index) = bits.iter().zip(&stored).position(|(a, e)| a != e) {
            panic!(
                "{what}: {name}[{index}]: {:#x} instead of {:#x}",
                bits[index], stored[index]
            );
        }
    }
    for float in float_types(client) {
        check_dequantized(client, quantized, &expected, float);
    }
}

/// Compares what comes back with the reference.
#[track_caller]
fn check_dequantized(
    client: &Client,
    quantized: &Quantized<TestRuntime>,
    expected: &ReferenceQuantized,
    float: StorageType,
) {
    let back = dequantize(client, quantized, float).expect("a float type of the device");
    assert_eq!(
        back.shape().iter().product::<usize>(),
        expected.values.len()
    );
    assert_same_floats(
        &read_float(client, &back),
        &rounded(&reference::dequantize(expected), float),
        &format!(
            "{:?} of {:?}: dequantized to {float}",
            quantized.shape, quantized.number
        ),
    );
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
            let spec = QuantizeSpec::int8(granularity)
                .with_rounding(rounding)
                .with_layout(layout);
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
            check(&client, &quantized, &x, &spec);
        }
    }
}

/// One copy is given up when a product has read it, and the other one waits for the backward pass with the scales.
#[test]
fn both_copies_and_the_scales_have_memory_of_their_own() {
    let client = client();
    let x = upload(&client, &[1.0; 128 * 64], &[128, 64], dtype::<f32>());
    for (number, granularity) in [
        (Number::E4M3, Granularity::Tensor),
        (Number::E4M3, Granularity::Group(16)),
        (Number::Int8, Granularity::Block(32)),
    ] {
        let spec = QuantizeSpec::new(number, granularity).with_layout(Layout::Both);
        let quantized = quantize(&client, &x, &spec).expect("a matrix");
        // Until the kernel has run, it has a share of each.
        read::<f32>(&client, &quantized.scales);
        let copies = [&quantized.values, &quantized.transposed];
        for part in copies.into_iter().flatten().chain([&quantized.scales]) {
            assert!(part.handle.can_mut(), "{granularity:?}: {:?}", part.shape());
        }
    }
}

/// Matrices of finite numbers, whose largest ones lie in other parts of them.
#[test]
fn the_largest_of_a_matrix_is_found_wherever_it_lies() {
    let (client, mut random) = (client(), Random::fresh());
    let spec = QuantizeSpec::int8(Granularity::Tensor).with_layout(Layout::Both);
    for shape in SHAPES
        .into_iter()
        .chain([MatrixShape::batched(2, 144, 272)])
    {
        let of_matrix = shape.rows * shape.cols;
        for place in [0, of_matrix / 2, of_matrix - 1] {
            let mut x = random.with_outliers(shape.num_elements());
            for (matrix, x) in x.chunks_mut(of_matrix).enumerate() {
                x[(place + matrix * 37) % of_matrix] = -2e5 * (matrix + 1) as f32;
            }
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
            let spec = QuantizeSpec::new(Number::Int10, granularity).with_rounding(rounding);
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
            check(&client, &quantized, &x, &spec);
        }
    }
}

/// Every number with every kind of scale and every granularity.
///
/// Not every rounding and layout meets each of these. They go round: each number has each pair of them, and each
/// granularity has all of them among the numbers. One shape has odd rows and columns, the other whole runs.
#[rstest]
fn every_number_equals_the_reference(
    #[values(0, 1, 2, 3, 4, 5, 6)] number: usize,
    #[values(ScaleNumber::F32, ScaleNumber::E8M0, ScaleNumber::E4M3)] scale: ScaleNumber,
) {
    let (client, mut random) = (client(), Random::fresh());
    let granularities = [
        Granularity::Block(16),
        Granularity::Block(128),
        Granularity::Group([16, 32][number % 2]),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor,
    ];
    for (index, granularity) in drawn(&mut random, granularities.into_iter().enumerate(), 2) {
        let turn = number + scale as usize + index;
        let rounding = [Rounding::Nearest, STOCHASTIC][turn % 2];
        let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][turn % 3];
        let spec = QuantizeSpec {
            number: Number::SYMMETRIC[number],
            scale,
            granularity,
            rounding,
            layout,
        };
        for shape in [MatrixShape::new(67, 131), MatrixShape::batched(2, 80, 160)] {
            let x = random.with_special_values(shape);
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
        for float in drawn(&mut random, float_types(&client), 1) {
            let x = rounded(&x, float);
            for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
                let tensor = upload_matrix(&client, &x, shape, float, memory);
                let granularities = [
                    Granularity::Block(32),
                    Granularity::Group(64),
                    Granularity::Token,
                    Granularity::Channel,
                    Granularity::Tensor,
                ];
                for granularity in drawn(&mut random, granularities, 1) {
                    let spec = QuantizeSpec::int8(granularity)
                        .with_rounding(STOCHASTIC)
                        .with_layout(Layout::Both);
                    println!("{float} {memory:?}");
                    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
                    check(&client, &quantized, &x, &spec);
                }
            }
        }
    }
}

/// Rows that one unit of a cube holds and that all of them do, each of which holds one run of 16 to four, with and
/// without empty places; and rows that are too long to be held.
#[rstest]
fn tokens_of_all_lengths(
    #[values(16, 17, 48, 768, 1000, 2304, 6144, 9001, 16_384, 16_385)] cols: usize,
) {
    let (client, mut random) = (client(), Random::fresh());
    let specs = [
        QuantizeSpec::int8(Granularity::Token),
        QuantizeSpec::int8(Granularity::Token).with_rounding(STOCHASTIC),
        QuantizeSpec::new(Number::E4M3, Granularity::Token).with_scale(ScaleNumber::E8M0),
        QuantizeSpec::new(Number::Int4, Granularity::Token).with_rounding(STOCHASTIC),
    ];
    for spec in drawn(&mut random, specs, 1) {
        let floats = float_types(&client);
        let float = floats[random.index(floats.len())];
        for shape in [MatrixShape::new(19, cols), MatrixShape::batched(2, 3, cols)] {
            let x = rounded(&random.with_special_values(shape), float);
            let tensor = upload_matrix(&client, &x, shape, float, Memory::Sliced);
            let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
            check(&client, &quantized, &x, &spec);
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
        for float in drawn(&mut random, float_types(&client), 1) {
            let x = rounded(&x, float);
            let tensor = upload_matrix(&client, &x, shape, float, Memory::Contiguous);
            for (rounding, layout) in [
                (STOCHASTIC, Layout::Both),
                (Rounding::Nearest, Layout::Transposed),
            ] {
                for block in [32, 128] {
                    let spec = QuantizeSpec::int8(Granularity::Block(block))
                        .with_rounding(rounding)
                        .with_layout(layout);
                    println!("{shape:?} {float} {spec:?}");
                    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
                    check(&client, &quantized, &x, &spec);
                }
            }
        }
    }
}

/// One scale for the matrix: whole tiles of FP8, for which a device may have a kernel of its own, and matrices a little
/// larger; with values that are not finite, with none that gets a scale, and with the largest one anywhere.
#[test]
fn fp8_with_one_scale_equals_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    let mut shapes = vec![
        MatrixShape::new(64, 128),
        MatrixShape::new(320, 384),
        MatrixShape::new(129, 256),
        MatrixShape::new(128, 264),
        MatrixShape::batched(2, 64, 128),
    ];
    if cfg!(feature = "cuda") {
        // More tiles than cubes.
        shapes.push(MatrixShape::new(64 * 33, 128 * 16));
    }
    for shape in shapes {
        let count = shape.num_elements();
        let mut outlier = random.with_outliers(count);
        outlier[random.index(count)] = -3e4;
        for x in [
            random.with_special_values(shape),
            outlier,
            vec![0.0; count],
            vec![-1e-35; count],
        ] {
            for float in drawn(&mut random, float_types(&client), 1) {
                let x = rounded(&x, float);
                let number = [Number::E4M3, Number::E5M2][random.index(2)];
                let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][random.index(3)];
                let spec = QuantizeSpec::new(number, Granularity::Tensor).with_layout(layout);
                for memory in [Memory::Contiguous, Memory::SlicedAligned] {
                    println!("{shape:?} {float} {spec:?} {memory:?}");
                    let tensor = upload_matrix(&client, &x, shape, float, memory);
                    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
                    check(&client, &quantized, &x, &spec);
                }
            }
        }
    }
}

/// As many codes of ten bits as a cube dequantizes to 16 bits without asking where they end: NVRTC 13.0 wrote some of them
/// outside of the tensor.
#[test]
fn ten_bits_of_whole_cubes() {
    let (client, mut random) = (client(), Random::fresh());
    let spec = QuantizeSpec::new(Number::Int10, Granularity::Group(128));
    for shape in [MatrixShape::new(64, 256), MatrixShape::new(256, 384)] {
        for float in float_types(&client) {
            let x = rounded(&random.with_outliers(shape.num_elements()), float);
            let tensor = upload_matrix(&client, &x, shape, float, Memory::Contiguous);
            let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
            let floats = dequantize(&client, &quantized, float).expect("floats");
            let expected = reference::dequantize(&reference::quantize(&x, shape, &spec));
            assert_same_floats(
                &read_float(&client, &floats),
                &rounded(&expected, float),
                "floats",
            );
        }
    }
}

#[test]
fn broadcast_inputs() {
    let (client, mut random) = (client(), Random::fresh());
    let row: Vec<f32> = (0..40).map(|_| random.normal()).collect();
    let spec = QuantizeSpec::int8(Granularity::Block(16))
        .with_rounding(STOCHASTIC)
        .with_layout(Layout::Both);
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
            let spec = QuantizeSpec::int8(granularity).with_layout(Layout::Both);
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

/// Batches without rows have tensor scales all the same.
#[test]
fn empty_matrices_of_small_floats() {
    let client = client();
    for shape in [vec![0, 40], vec![40, 0], vec![2, 0, 3]] {
        let x = upload(&client, &[], &shape, dtype::<f32>());
        let spec = QuantizeSpec::NVFP4.with_layout(Layout::Both);
        let quantized = quantize(&client, &x, &spec).expect("a matrix");
        let tensor_scales: Vec<f32> = read(&client, &quantized.tensor_scale.clone().expect("one"));
        assert!(tensor_scales.iter().all(|&scale| scale == 0.0));
        assert_eq!(tensor_scales.len(), quantized.shape.batch);
        let back = dequantize(&client, &quantized, dtype::<f32>()).expect("a float type");
        assert_eq!(back.shape().to_vec(), shape);
    }
}

/// Groups of all sizes, around those whose tiles are too flat for a transposed copy in one read.
#[rstest]
#[case(Number::Int4, ScaleNumber::E8M0, 64, Layout::Both)]
#[case(Number::E2M1, ScaleNumber::F32, 128, Layout::Transposed)]
#[case(Number::Int10, ScaleNumber::F32, 256, Layout::Both)]
#[case(Number::E4M3, ScaleNumber::E8M0, 512, Layout::RowMajor)]
#[case(Number::E5M2, ScaleNumber::F32, 512, Layout::Both)]
#[case(Number::Int8, ScaleNumber::F32, 1024, Layout::Both)]
fn groups_of_all_sizes(
    #[case] number: Number,
    #[case] scale: ScaleNumber,
    #[case] size: usize,
    #[case] layout: Layout,
) {
    let (client, mut random) = (client(), Random::fresh());
    for shape in [MatrixShape::new(67, 1300), MatrixShape::new(20, 2048)] {
        let x = random.with_special_values(shape);
        let spec = QuantizeSpec::new(number, Granularity::Group(size))
            .with_scale(scale)
            .with_layout(layout)
            .with_rounding(STOCHASTIC);
        let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
        let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
        check(&client, &quantized, &x, &spec);
    }
}

/// A matrix and its transpose: of whole tiles, and of others; rows and windows that are aligned, and others.
#[rstest]
fn groups_both_ways(
    #[values(Number::E4M3, Number::E5M2)] number: Number,
    #[values(ScaleNumber::F32, ScaleNumber::E8M0)] scale: ScaleNumber,
    #[values(
        Memory::Contiguous,
        Memory::Transposed,
        Memory::Sliced,
        Memory::SlicedAligned
    )]
    memory: Memory,
) {
    let (client, mut random) = (client(), Random::fresh());
    let spec = QuantizeSpec::new(number, Granularity::Group(128)).with_scale(scale);
    for shape in [
        MatrixShape::new(128, 128),
        MatrixShape::new(384, 256),
        MatrixShape::new(129, 136),
        MatrixShape::batched(2, 128, 128),
    ] {
        let x = random.with_special_values(shape);
        for float in drawn(&mut random, float_types(&client), 1) {
            println!("{shape:?} {float}");
            let x = rounded(&x, float);
            let tensor = upload_matrix(&client, &x, shape, float, memory);
            let [matrix, of_transpose] =
                quantize_both_ways(&client, &tensor, &spec).expect("a matrix");
            check(&client, &matrix, &x, &spec);
            let transposed: Vec<f32> = x
                .chunks(shape.rows * shape.cols)
                .flat_map(|x| {
                    let columns = 0..shape.cols;
                    columns.flat_map(|col| x.iter().skip(col).step_by(shape.cols).copied())
                })
                .collect();
            check(&client, &of_transpose, &transposed, &spec);
        }
    }
}

/// The formats that recipes use most, with every float type and stride; either copy gives back the same values.
#[rstest]
#[case(QuantizeSpec::MXFP8)]
#[case(QuantizeSpec::MXFP4)]
#[case(QuantizeSpec::NVFP4)]
#[case(QuantizeSpec::NVFP4.with_granularity(Granularity::Block(16)))]
#[case(QuantizeSpec::new(Number::E4M3, Granularity::Tensor))]
fn common_formats_of_all_inputs(#[case] spec: QuantizeSpec) {
    let (client, mut random) = (client(), Random::fresh());
    let spec = spec.with_layout(Layout::Both).with_rounding(STOCHASTIC);
    for shape in [MatrixShape::new(65, 136), MatrixShape::batched(2, 40, 67)] {
        let x = random.with_outliers(shape.num_elements());
        for float in drawn(&mut random, float_types(&client), 1) {
            let x = rounded(&x, float);
            for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
                println!("{shape:?} {float} {memory:?}");
                let tensor = upload_matrix(&client, &x, shape, float, memory);
                let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
                check(&client, &quantized, &x, &spec);
                let transposed_alone = Quantized {
                    values: None,
                    ..quantized
                };
                let expected = reference::quantize(&x, shape, &spec);
                check_dequantized(&client, &transposed_alone, &expected, float);
            }
        }
    }
}

#[test]
fn broadcast_inputs_of_small_floats() {
    let (client, mut random) = (client(), Random::fresh());
    let row: Vec<f32> = (0..40).map(|_| random.normal()).collect();
    let tensor = upload(&client, &row, &[1, 40], dtype::<f32>());
    let broadcast = Tensor::new(
        tensor.handle,
        vec![2, 19, 40],
        vec![0, 0, 1],
        dtype::<f32>(),
    );
    let spec = QuantizeSpec::NVFP4.with_layout(Layout::Both);
    let quantized = quantize(&client, &broadcast, &spec).expect("a matrix");
    check(&client, &quantized, &row.repeat(2 * 19), &spec);
}

/// The same integers and scales, in both layouts, and so the same product by the INT8 kernels.
#[test]
fn int4_unpacks_to_the_same_integers() {
    let (client, mut random) = (client(), Random::fresh());
    // Rows that are read and written by 1 and 1, by 8 and 16, and by 4 and 4 bytes; those of its transpose by 1 and 4.
    let shapes = [
        MatrixShape::new(66, 131),
        MatrixShape::batched(2, 64, 96),
        MatrixShape::new(36, 40),
    ];
    for shape in shapes {
        let x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
        let spec =
            QuantizeSpec::new(Number::Int4, Granularity::Block(32)).with_layout(Layout::Both);
        let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
        let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
        let unpacked = unpack_int4(&client, &quantized).expect("an INT4 matrix");
        let expected = reference::quantize(&x, shape, &spec);
        let values = unpacked.values.as_ref().expect("a row-major copy");
        assert_same_integers(&read_i8(&client, values), &expected.values, "values");
        let transposed = unpacked.transposed.as_ref().expect("a transposed copy");
        let expected = expected.transposed();
        assert_same_integers(
            &read_i8(&client, transposed),
            &expected.values,
            "transposed",
        );
        let [of_unpacked, of_packed] = [&unpacked, &quantized]
            .map(|matrix| dequantize(&client, matrix, dtype::<f32>()).expect("a float type"));
        assert_same_floats(
            &read(&client, &of_unpacked),
            &read(&client, &of_packed),
            "values",
        );
        // Over the columns of the transposed copy: the Gram matrix of the columns.
        let operand = unpacked.operand_transposed().expect("a transposed copy");
        let float = dtype::<f32>();
        let product = gemm(
            &client,
            &operand,
            &operand,
            None,
            None,
            float,
            Strategy::Portable,
        );
        let product: Vec<f32> = read(&client, &product.expect("two operands"));
        for (got, exact) in product
            .iter()
            .zip(reference::gemm(&expected, &expected, None, None))
        {
            let off = (f64::from(*got) - exact).abs();
            assert!(
                off <= 1e-4 * exact.abs().max(1.0),
                "{got} instead of {exact}"
            );
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
        let spec = QuantizeSpec::int8(Granularity::Block(32))
            .with_rounding(Rounding::Stochastic(StochasticKey { seed, stream }));
        let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
        read_i8(&client, &quantized.values.expect("a row-major copy"))
    };
    let first = values(1, 2);
    assert_eq!(first, values(1, 2));
    assert_ne!(first, values(1, 3));
    assert_ne!(first, values(2, 2));
    assert_ne!(first, values(1, 2 + (1 << 32)));
}
