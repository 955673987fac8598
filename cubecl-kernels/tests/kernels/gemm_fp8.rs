//! Products of FP8 matrices against the FP64 products of the numbers that the operands stand for.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    KernelError,
    gemm::{Accumulation, Fp8Operand, gemm_fp8, has_gemm_fp8},
    granularity::Granularity,
    layout::Layout,
    number::Number,
    quantize::{QuantizeSpec, Quantized, dequantize, quantize},
    scale::ScaleNumber,
    shape::MatrixShape,
};
use half::{bf16, f16};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, client, drawn, dtype, float_types, read_float, upload,
        upload_matrix,
    },
    random::Random,
};

/// Tensor cores cut off what lies more than 13 bits below the largest of the FP8 products that they add at once: as a
/// part of the largest product of the sum and of the root of their number, eight deviations.
const CUT_OFF: f64 = 1.2e-3;
/// Products that are added at once.
const AT_ONCE: usize = 32;
/// Of a running sum they cut off what lies below its 13th bit, and as much of what is added to it.
const LAST_BIT: f64 = 1.0 / (1 << 13) as f64;

const PROMOTED: Accumulation = Accumulation::Promoted;

/// A matrix on the device, and the numbers that it stands for, row-major.
struct Matrix {
    quantized: Quantized<TestRuntime>,
    numbers: Vec<f32>,
}

fn matrix(client: &Client, x: &[f32], shape: MatrixShape, spec: &QuantizeSpec) -> Matrix {
    let x = upload_matrix(client, x, shape, dtype::<f32>(), Memory::Contiguous);
    let quantized = quantize(client, &x, spec).expect("a matrix");
    let numbers = dequantize(client, &quantized, dtype::<f32>()).expect("a matrix");
    let numbers = read_float(client, &numbers);
    Matrix { quantized, numbers }
}

/// True where the device has the kernel; said in the output where it has not, and the kernel refuses.
fn has_kernel(client: &Client, random: &mut Random) -> bool {
    let has = has_gemm_fp8(client);
    if !has {
        println!("skipped: no product of FP8 matrices on this device");
        let spec = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
        let shape = MatrixShape::new(16, 16);
        let x = matrix(client, &random.with_outliers(256), shape, &spec);
        let operand = x.quantized.fp8_operand().expect("a row-major copy");
        let refused = gemm_fp8(client, &operand, &operand, None, PROMOTED, dtype::<f32>());
        assert!(matches!(refused, Err(KernelError::Unsupported { .. })));
    }
    has
}

/// An element of a product, and how far from it an FP32 result may lie, and one with fast accumulation.
#[derive(Clone, Copy)]
struct Element {
    sum: f64,
    off: f64,
    off_when_fast: f64,
}

/// `[rows, k]` numbers times `[cols, k]` numbers.
fn product(a: &[f32], b: &[f32], [rows, cols, k]: [usize; 3]) -> Vec<Element> {
    let element = |row: &[f32], col: &[f32]| {
        let (mut sum, mut most, mut off_when_fast) = (0.0, 0.0f64, 0.0);
        for (row, col) in row.chunks(AT_ONCE).zip(col.chunks(AT_ONCE)) {
            for (&a, &b) in row.iter().zip(col) {
                let term = f64::from(a) * f64::from(b);
                sum += term;
                most = most.max(term.abs());
            }
            off_when_fast += 2.0 * LAST_BIT * sum.abs();
        }
        let off = CUT_OFF * (k as f64).sqrt() * most;
        Element {
            sum,
            off,
            off_when_fast: off + off_when_fast,
        }
    };
    let rows = a.chunks(k).take(rows);
    rows.flat_map(|row| b.chunks(k).take(cols).map(move |col| element(row, col)))
        .collect()
}

/// Half a unit in the last place that a type keeps of a number.
fn rounding(x: f64, float: StorageType) -> f64 {
    let bits = match float {
        _ if float == dtype::<f32>() => 24,
        _ if float == dtype::<bf16>() => 8,
        _ => 11,
    };
    x.abs().max(6e-5) * 2f64.powi(-bits)
}

fn compare(
    what: &str,
    accumulation: Accumulation,
    actual: &[f32],
    expected: &[Element],
    float: StorageType,
) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (index, (&actual, element)) in actual.iter().zip(expected).enumerate() {
        let sum = element.sum;
        let off = match accumulation {
            Accumulation::Promoted => element.off,
            Accumulation::Fast => element.off_when_fast,
        };
        let bound = off + rounding(sum, float) + 1e-30;
        // Values that round to more than the largest number are infinite.
        let overflows = float == dtype::<f16>() && sum.abs() + bound >= 65_520.0;
        if overflows && f64::from(actual) == f64::INFINITY.copysign(sum) {
            continue;
        }
        let error = (f64::from(actual) - sum).abs();
        assert!(
            error <= bound,
            "{what}: element {index} is {actual} instead of {sum}"
        );
    }
}

/// Granularity and scales of both operands, and their numbers.
#[rstest]
#[case::per_tensor([Granularity::Tensor; 2], [ScaleNumber::F32; 2])]
#[case::per_token([Granularity::Token; 2], [ScaleNumber::E8M0; 2])]
#[case::per_token_and_tensor([Granularity::Token, Granularity::Tensor], [ScaleNumber::F32, ScaleNumber::E8M0])]
#[case::groups_and_blocks([Granularity::Group(128), Granularity::Block(128)], [ScaleNumber::E8M0; 2])]
#[case::groups([Granularity::Group(128); 2], [ScaleNumber::F32; 2])]
#[case::blocks([Granularity::Block(128); 2], [ScaleNumber::F32, ScaleNumber::E8M0])]
#[case::blocks_and_groups([Granularity::Block(128), Granularity::Group(128)], [ScaleNumber::E8M0, ScaleNumber::F32])]
fn equals_the_reference(
    #[case] granularity: [Granularity; 2],
    #[case] scale: [ScaleNumber; 2],
    #[values([Number::E4M3; 2], [Number::E5M2, Number::E4M3], [Number::E4M3, Number::E5M2])]
    number: [Number; 2],
    #[values(Accumulation::Promoted, Accumulation::Fast)] accumulation: Accumulation,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_kernel(&client, &mut random) {
        return;
    }
    for [m, n, k] in [
        [1, 1, 16],
        [128, 256, 128],
        [130, 70, 144],
        [300, 520, 400],
        [64, 200, 1040],
        [1000, 130, 256],
        [130, 70, 9232],
    ] {
        let spec = |side: usize| {
            QuantizeSpec::new(number[side], granularity[side]).with_scale(scale[side])
        };
        let [a, b] = [(m, 0), (n, 1)].map(|(rows, side)| {
            let x = random.with_outliers(rows * k);
            matrix(&client, &x, MatrixShape::new(rows, k), &spec(side))
        });
        let expected = product(&a.numbers, &b.numbers, [m, n, k]);
        let [of_a, of_b] = [&a, &b].map(|it| it.quantized.fp8_operand().expect("a row-major copy"));
        let bias = random.with_outliers(n);
        let of_bias = upload(&client, &bias, &[n], dtype::<f32>());
        for float in drawn(&mut random, float_types(&client), 1) {
            let what = format!(
                "{m} x {n} x {k}, {granularity:?}, {scale:?}, {number:?}, {accumulation:?}, {float}"
            );
            let out = gemm_fp8(&client, &of_a, &of_b, None, accumulation, float).expect(&what);
            let out = read_float(&client, &out);
            compare(&what, accumulation, &out, &expected, float);
        }
        let f32 = dtype::<f32>();
        let out = gemm_fp8(&client, &of_a, &of_b, Some(&of_bias), accumulation, f32);
        let out = out.expect("a bias");
        let with_bias: Vec<Element> = expected
            .iter()
            .enumerate()
            .map(|(index, element)| Element {
                sum: element.sum + f64::from(bias[index % n]),
                ..*element
            })
            .collect();
        let out = read_float(&client, &out);
        compare("with bias", accumulation, &out, &with_bias, f32);
    }
}

/// Transposed copies, whose scales lie transposed too, and batches, of which B has one or as many.
#[test]
fn transposed_operands_and_batches() {
    let (client, mut random) = (client(), Random::fresh());
    if !has_kernel(&client, &mut random) {
        return;
    }
    let [m, n, k] = [144, 208, 272];
    for granularity in [
        Granularity::Tensor,
        Granularity::Block(128),
        Granularity::Channel,
    ] {
        let spec = QuantizeSpec::new(Number::E4M3, granularity).with_layout(Layout::Both);
        let [a, b] = [m, n].map(|cols| {
            let x = random.with_outliers(k * cols);
            matrix(&client, &x, MatrixShape::new(k, cols), &spec)
        });
        let turned = |numbers: &[f32], cols: usize| -> Vec<f32> {
            let at = |index: usize| numbers[index % k * cols + index / k];
            (0..k * cols).map(at).collect()
        };
        let expected = product(&turned(&a.numbers, m), &turned(&b.numbers, n), [m, n, k]);
        let [of_a, of_b] = [&a, &b].map(|it| {
            it.quantized
                .fp8_operand_transposed()
                .expect("a transposed copy")
        });
        for accumulation in [Accumulation::Promoted, Accumulation::Fast] {
            let out = gemm_fp8(&client, &of_a, &of_b, None, accumulation, dtype::<f32>());
            let out = read_float(&client, &out.expect("a product"));
            let what = format!("transposed, {granularity:?}, {accumulation:?}");
            compare(&what, accumulation, &out, &expected, dtype::<f32>());
        }
    }
    for (of_b, granularity) in [
        (1, Granularity::Group(128)),
        (3, Granularity::Group(128)),
        (1, Granularity::Token),
        (3, Granularity::Token),
    ] {
        let spec = QuantizeSpec::new(Number::E5M2, granularity);
        let of = |batch: usize, rows: usize| MatrixShape {
            batch,
            ..MatrixShape::new(rows, k)
        };
        let [a, b] = [of(3, m), of(of_b, n)].map(|shape| {
            let x = random.with_outliers(shape.num_elements());
            matrix(&client, &x, shape, &spec)
        });
        let expected: Vec<Element> = (0..3)
            .flat_map(|batch| {
                let b = &b.numbers[batch % of_b * n * k..][..n * k];
                product(&a.numbers[batch * m * k..][..m * k], b, [m, n, k])
            })
            .collect();
        let [of_a, of_b] = [&a, &b].map(|it| it.quantized.fp8_operand().expect("a row-major copy"));
        for accumulation in [Accumulation::Promoted, Accumulation::Fast] {
            let out = gemm_fp8(&client, &of_a, &of_b, None, accumulation, dtype::<f32>());
            let out = read_float(&client, &out.expect("a product"));
            let what = format!("a batch, {granularity:?}, {accumulation:?}");
            compare(&what, accumulation, &out, &expected, dtype::<f32>());
        }
    }
}

/// NaN and Inf make NaN of their region, and of what it touches alone; zeros give zeros.
#[rstest]
fn what_is_not_finite_stays_visible(
    #[values(
        (Granularity::Group(128), Accumulation::Promoted),
        (Granularity::Token, Accumulation::Promoted),
        (Granularity::Token, Accumulation::Fast)
    )]
    (granularity, accumulation): (Granularity, Accumulation),
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_kernel(&client, &mut random) {
        return;
    }
    let [m, n, k] = [200, 96, 256];
    let mut x = random.with_outliers(m * k);
    x[5 * k + 7] = f32::NAN;
    x[9 * k + 200] = f32::INFINITY;
    x[150 * k..151 * k].fill(0.0);
    let y = random.with_outliers(n * k);
    let spec = QuantizeSpec::new(Number::E4M3, granularity);
    let a = matrix(&client, &x, MatrixShape::new(m, k), &spec);
    let b = matrix(&client, &y, MatrixShape::new(n, k), &spec);
    let [a, b] = [a, b].map(|it| it.quantized.fp8_operand().expect("a row-major copy"));
    let out = gemm_fp8(&client, &a, &b, None, accumulation, dtype::<f32>()).expect("a product");
    for (row, out) in read_float(&client, &out).chunks(n).enumerate() {
        match row {
            5 | 9 => assert!(out.iter().all(|it| it.is_nan()), "row {row}: {out:?}"),
            150 => assert!(out.iter().all(|it| *it == 0.0), "row {row}: {out:?}"),
            _ => assert!(out.iter().all(|it| it.is_finite()), "row {row}: {out:?}"),
        }
    }
}

/// The same bits again; what the kernel cannot read is refused with a reason.
#[test]
fn repeats_and_refuses() {
    let (client, mut random) = (client(), Random::fresh());
    if !has_kernel(&client, &mut random) {
        return;
    }
    let operand = |rows: usize, k: usize, spec: &QuantizeSpec, random: &mut Random| {
        let x = random.with_outliers(rows * k);
        let x = matrix(&client, &x, MatrixShape::new(rows, k), spec);
        x.quantized.fp8_operand().expect("a row-major copy")
    };
    let with =
        |a: &Fp8Operand<TestRuntime>, b: &Fp8Operand<TestRuntime>, accumulation: Accumulation| {
            gemm_fp8(&client, a, b, None, accumulation, dtype::<f32>())
        };
    let run =
        |a: &Fp8Operand<TestRuntime>, b: &Fp8Operand<TestRuntime>| with(a, b, Accumulation::Fast);
    let bits = |out: Tensor| -> Vec<u32> {
        read_float(&client, &out)
            .into_iter()
            .map(f32::to_bits)
            .collect()
    };
    let groups = QuantizeSpec::new(Number::E4M3, Granularity::Group(128));
    let rows = QuantizeSpec::new(Number::E4M3, Granularity::Token);
    let [(a, b), (of_rows, of_cols)] = [groups, rows].map(|spec| {
        (
            operand(500, 640, &spec, &mut random),
            operand(300, 640, &spec, &mut random),
        )
    });
    for (a, b, accumulation) in [
        (&a, &b, Accumulation::Promoted),
        (&of_rows, &of_cols, Accumulation::Promoted),
        (&of_rows, &of_cols, Accumulation::Fast),
    ] {
        let first = bits(with(a, b, accumulation).expect("a product"));
        for _ in 0..3 {
            assert_eq!(bits(with(a, b, accumulation).expect("a product")), first);
        }
    }
    // Groups along K are promoted in either way.
    let [promoted, fast] = [Accumulation::Promoted, Accumulation::Fast]
        .map(|accumulation| bits(with(&a, &b, accumulation).expect("a product")));
    assert_eq!(promoted, fast);
    let unsupported = |result: Result<Tensor, KernelError>| {
        let error = result.expect_err("refused");
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    };
    // Rows that do not end at 16 bytes, other groups, other numbers.
    let odd = operand(8, 24, &groups, &mut random);
    unsupported(run(&odd, &odd));
    let small = QuantizeSpec::new(Number::E4M3, Granularity::Group(32));
    let small = operand(500, 640, &small, &mut random);
    unsupported(run(&small, &b));
    let other = Fp8Operand {
        number: Number::E2M1,
        ..a.clone()
    };
    unsupported(run(&other, &b));
    let other_k = operand(300, 656, &groups, &mut random);
    let error = run(&a, &other_k).expect_err("another K");
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
}
