//! Products that quantize their output, to the bit: what a quantizer makes of the product in 16 bits.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    gemm::{
        Accumulation, Strategy, gemm, gemm_fp8, gemm_fp8_quantized, gemm_quantized, has_gemm_fp8,
    },
    granularity::Granularity,
    number::Number,
    quantize::{QuantizeSpec, Quantized, quantize},
    rounding::Rounding,
    shape::MatrixShape,
};
use half::{bf16, f16};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, assert_same_integers, client,
        drawn, dtype, float_types, read_float, read_i8, upload, upload_matrix,
    },
    random::Random,
};

/// Rows and columns of the output, and K: whole tiles of each width, and what leaves some of a tile, a block or a turn of the
/// grid; and few columns of a long sum, which some devices add up in parts.
const SIZES: [[usize; 3]; 8] = [
    [128, 256, 256],
    [256, 128, 128],
    [200, 320, 384],
    [33, 64, 160],
    [130, 48, 128],
    [1000, 1536, 256],
    [4096, 2304, 128],
    [128, 256, 8192],
];

/// Numbers with outliers, in which blocks are zeros, and one element may be NaN or infinite.
fn input(client: &Client, random: &mut Random, [rows, cols]: [usize; 2], odd: f32) -> Tensor {
    let mut x = random.with_outliers(rows * cols);
    if rows > 64 && cols > 64 {
        for row in 0..rows.min(128) {
            x[row * cols..][..cols.min(32)].fill(0.0);
        }
    }
    if odd != 0.0 {
        let at = random.index(x.len());
        x[at] = odd;
    }
    let shape = MatrixShape::new(rows, cols);
    upload_matrix(client, &x, shape, dtype::<f32>(), Memory::Contiguous)
}

fn bias(client: &Client, random: &mut Random, cols: usize) -> Option<Tensor> {
    let x = random.with_outliers(cols);
    (random.index(2) == 1).then(|| upload(client, &x, &[cols], dtype::<f32>()))
}

fn specs(random: &mut Random) -> Vec<QuantizeSpec> {
    let blocks = [32, 64, 128].map(|side| QuantizeSpec::int8(Granularity::Block(side)));
    let stochastic = blocks.map(|spec| spec.with_rounding(Rounding::Stochastic(random.key())));
    let others = [
        QuantizeSpec::new(Number::E4M3, Granularity::Group(16)),
        // What no product's kernel writes.
        QuantizeSpec::new(Number::E4M3, Granularity::Group(32)),
        QuantizeSpec::int8(Granularity::Block(16)),
    ];
    let all = blocks.into_iter().chain(stochastic).chain(others);
    drawn(random, all, 2)
}

fn assert_same(
    client: &Client,
    what: &str,
    actual: &Quantized<TestRuntime>,
    expected: &Quantized<TestRuntime>,
) {
    assert_eq!(actual.shape, expected.shape, "{what}");
    assert!(actual.transposed.is_none(), "{what}");
    let scales = [actual, expected].map(|it| read_float(client, &it.scales));
    assert_same_floats(&scales[0], &scales[1], what);
    let codes = [actual, expected].map(|it| {
        let values = it.values.as_ref().expect("a row-major copy");
        // Of FP8 the bytes.
        read_i8(client, values)
    });
    assert_same_integers(&codes[0], &codes[1], what);
}

#[rstest]
fn of_int8(
    #[values(
        Granularity::Block(32),
        Granularity::Block(64),
        Granularity::Block(128),
        Granularity::Token
    )]
    granularity: Granularity,
    #[values(0.0, f32::NAN)] odd: f32,
) {
    let (client, mut random) = (client(), Random::fresh());
    let operands = QuantizeSpec::int8(granularity);
    for out in narrow_types(&client) {
        for [m, n, k] in drawn(&mut random, SIZES, 2) {
            let operand = |random: &mut Random, rows, odd| {
                let x = input(&client, random, [rows, k], odd);
                let x = quantize(&client, &x, &operands).expect("a matrix");
                x.operand().expect("a row-major copy")
            };
            let (a, b) = (operand(&mut random, m, odd), operand(&mut random, n, 0.0));
            let bias = bias(&client, &mut random, n);
            let product = gemm(&client, &a, &b, None, bias.as_ref(), out, Strategy::Auto);
            let product = product.expect("matrices");
            for spec in specs(&mut random) {
                let what = format!("{granularity:?}, {m} x {n} x {k}, {spec:?}");
                let expected = quantize(&client, &product, &spec).expect("a matrix");
                let actual = gemm_quantized(&client, &a, &b, bias.as_ref(), out, &spec);
                assert_same(&client, &what, &actual.expect("matrices"), &expected);
            }
        }
    }
}

#[rstest]
fn of_fp8(
    #[values(Accumulation::Fast, Accumulation::Promoted)] accumulation: Accumulation,
    #[values(0.0, f32::INFINITY)] odd: f32,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_gemm_fp8(&client) {
        println!("skipped: no product of FP8 matrices on this device");
        return;
    }
    let operands = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
    for out in narrow_types(&client) {
        for [m, n, k] in drawn(&mut random, SIZES, 2) {
            let operand = |random: &mut Random, rows, odd| {
                let x = input(&client, random, [rows, k], odd);
                let x = quantize(&client, &x, &operands).expect("a matrix");
                x.fp8_operand().expect("a row-major copy")
            };
            let (a, b) = (operand(&mut random, m, odd), operand(&mut random, n, 0.0));
            let bias = bias(&client, &mut random, n);
            let bias = bias.as_ref();
            let product = gemm_fp8(&client, &a, &b, bias, accumulation, out).expect("matrices");
            for spec in specs(&mut random) {
                let what = format!("{accumulation:?}, {m} x {n} x {k}, {spec:?}");
                let expected = quantize(&client, &product, &spec).expect("a matrix");
                let actual = gemm_fp8_quantized(&client, &a, &b, bias, accumulation, out, &spec);
                assert_same(&client, &what, &actual.expect("matrices"), &expected);
            }
        }
    }
}

/// Sums that are zeros, and sums whose squares would not be normal numbers.
#[rstest]
fn zeros_and_small_sums() {
    let (client, random) = (client(), &mut Random::fresh());
    let operands = QuantizeSpec::int8(Granularity::Block(128));
    for factor in [0.0, 1e-22, 1e-15] {
        let [a, b] = [256, 384].map(|rows| {
            let x: Vec<_> = random.with_outliers(rows * 128);
            let x: Vec<_> = x.into_iter().map(|x| x * factor).collect();
            let shape = MatrixShape::new(rows, 128);
            let x = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let x = quantize(&client, &x, &operands).expect("a matrix");
            x.operand().expect("a row-major copy")
        });
        for out in narrow_types(&client) {
            let product = gemm(&client, &a, &b, None, None, out, Strategy::Auto).expect("matrices");
            for spec in specs(random) {
                let what = format!("times {factor}, {spec:?}");
                let expected = quantize(&client, &product, &spec).expect("a matrix");
                let actual = gemm_quantized(&client, &a, &b, None, out, &spec).expect("matrices");
                assert_same(&client, &what, &actual, &expected);
            }
        }
    }
}

/// Those of 16 bits that the device has, else FP32.
fn narrow_types(client: &Client) -> Vec<StorageType> {
    let all = float_types(client);
    let narrow: Vec<_> = all
        .iter()
        .copied()
        .filter(|it| [dtype::<bf16>(), dtype::<f16>()].contains(it))
        .collect();
    if narrow.is_empty() { all } else { narrow }
}
