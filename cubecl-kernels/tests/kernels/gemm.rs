//! Products against the reference's f64 evaluation over the same integers and scales.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    fallback::quantize_fallback,
    gemm::{GemmOperand, GemmProblem, Strategy, candidates, gemm, gemm_rowwise, select},
    granularity::Granularity,
    layout::Layout,
    quantize::{QuantizeSpec, Quantized, quantize},
    reference,
    shape::MatrixShape,
};
use half::{bf16, f16};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, client, drawn, dtype, float_types,
        read, read_float, upload, upload_i32, upload_matrix,
    },
    random::Random,
};

/// The strategies that this device has for square blocks of this size. One that is missing is named in the output.
fn strategies(client: &Client, block: usize) -> Vec<Strategy> {
    // More than a block, whose scale would be that of the matrix.
    let x = upload(client, &[1.0; 129 * 129], &[129, 129], dtype::<f32>());
    let operand = quantized(client, &x, Granularity::Block(block)).operand();
    let operand = operand.expect("a row-major copy");
    [Strategy::Portable, Strategy::TensorCore, Strategy::Hopper]
        .into_iter()
        .filter(|&strategy| {
            match gemm(
                client,
                &operand,
                &operand,
                None,
                None,
                dtype::<f32>(),
                strategy,
            ) {
                Ok(_) => true,
                Err(error) => {
                    println!("skipped {strategy:?}: {error}");
                    assert!(matches!(error, KernelError::Unsupported { .. }));
                    false
                }
            }
        })
        .collect()
}

/// Those that add residuals: the kernel for Hopper does for blocks of 128.
fn strategies_with_fallback(client: &Client, block: usize) -> Vec<Strategy> {
    let mut strategies = strategies(client, block);
    strategies.retain(|&strategy| strategy != Strategy::Hopper || block == 128);
    strategies
}

fn quantized(client: &Client, x: &Tensor, granularity: Granularity) -> Quantized<TestRuntime> {
    let spec = QuantizeSpec::int8(granularity).with_layout(Layout::Both);
    quantize(client, x, &spec).expect("a matrix")
}

fn reference_of(
    x: &[f32],
    shape: MatrixShape,
    granularity: Granularity,
) -> reference::ReferenceQuantized {
    reference::quantize(x, shape, &QuantizeSpec::int8(granularity))
}

fn matrix(client: &Client, x: &[f32], shape: MatrixShape) -> Tensor {
    upload_matrix(client, x, shape, dtype::<f32>(), Memory::Contiguous)
}

/// Half a unit in the last place of a float type, at `x`.
fn half_ulp(x: f64, float: StorageType) -> f64 {
    let (digits, smallest) = if float == dtype::<f16>() {
        (f16::MANTISSA_DIGITS, f16::MIN_EXP)
    } else if float == dtype::<bf16>() {
        (bf16::MANTISSA_DIGITS, bf16::MIN_EXP)
    } else {
        (f32::MANTISSA_DIGITS, f32::MIN_EXP)
    };
    let exponent = (x.abs().log2().floor() as i32).max(smallest - 1);
    2f64.powi(exponent - digits as i32)
}

/// The Frobenius norm.
fn norm_of(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|it| it * it).sum::<f64>().sqrt()
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f64], float: StorageType, what: &str) {
    assert_close_with(actual, expected, &[], float, what);
}

/// f32: within 1e-6 of the norm. f16 and bf16: each element within one rounding of an f32 sum. The norm is at least that
/// of the bias, which products may cancel but for their rounding.
#[track_caller]
fn assert_close_with(
    actual: &[f32],
    expected: &[f64],
    bias: &[f32],
    float: StorageType,
    what: &str,
) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    if expected.is_empty() {
        return;
    }
    let of_bias = norm_of(bias.iter().map(|&it| f64::from(it)));
    let norm = norm_of(expected.iter().copied()).max(of_bias);
    if float == dtype::<f32>() {
        let pairs = actual.iter().zip(expected);
        let error = norm_of(pairs.map(|(&a, e)| f64::from(a) - e));
        assert!(
            error <= 1e-6 * norm,
            "{what}: error {error:e} of norm {norm:e}"
        );
        return;
    }
    let slack = 4e-6 * norm / (expected.len() as f64).sqrt();
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        if a.is_infinite() {
            let largest = if float == dtype::<f16>() {
                f16::MAX.to_f64()
            } else {
                bf16::MAX.to_f64()
            };
            assert!(
                e.abs() + slack > largest && a.is_sign_negative() == (e < 0.0),
                "{what}[{index}]"
            );
            continue;
        }
        let error = (f64::from(a) - e).abs();
        assert!(
            error <= half_ulp(e, float) * 1.0001 + slack,
            "{what}[{index}]: {a:e} instead of {e:e}, slack {slack:e}"
        );
    }
}

#[rstest]
fn blocks_of_all_sizes(#[values(16, 32, 64, 128)] block: usize) {
    let (client, mut random) = (client(), Random::fresh());
    let granularity = Granularity::Block(block);
    for strategy in strategies(&client, block) {
        let problems = [
            (1, true, 1, 1, 1),
            (1, true, 3, 17, 129),
            (1, true, 127, 129, 200),
            (1, true, 200, 333, 127),
            (1, true, 64, 64, 512),
            (2, true, 33, 40, 96),
            (2, false, 65, 70, 48),
        ];
        for (batch, shared, m, n, k) in drawn(&mut random, problems, 3) {
            let a_shape = MatrixShape::batched(batch, m, k);
            let b_shape = MatrixShape::batched(if shared { 1 } else { batch }, n, k);
            let a = random.with_outliers(a_shape.num_elements());
            let b = random.with_outliers(b_shape.num_elements());
            let bias: Vec<f32> = (0..n).map(|_| 10.0 * random.normal()).collect();
            let expected = reference::gemm(
                &reference_of(&a, a_shape, granularity),
                &reference_of(&b, b_shape, granularity),
                None,
                Some(&bias),
            );
            let operand = |x: &[f32], shape| {
                let quantized = quantized(&client, &matrix(&client, x, shape), granularity);
                quantized.operand().expect("a row-major copy")
            };
            let (a, b) = (operand(&a, a_shape), operand(&b, b_shape));
            let of_columns = upload(&client, &bias, &[n], dtype::<f32>());
            for float in drawn(&mut random, float_types(&client), 1) {
                let out = gemm(&client, &a, &b, None, Some(&of_columns), float, strategy)
                    .expect("operands that fit");
                assert_close_with(
                    &read_float(&client, &out),
                    &expected,
                    &bias,
                    float,
                    &format!("{strategy:?} {batch} x {m} x {n} x {k} to {float}"),
                );
            }
        }
    }
}

#[rstest]
#[case(Granularity::Token, Granularity::Token)]
#[case(Granularity::Tensor, Granularity::Tensor)]
#[case(Granularity::Token, Granularity::Block(32))]
#[case(Granularity::Group(128), Granularity::Block(64))]
#[case(Granularity::Group(16), Granularity::Tensor)]
fn other_granularities(#[case] of_a: Granularity, #[case] of_b: Granularity) {
    let (client, mut random) = (client(), Random::fresh());
    let (a_shape, b_shape) = (
        MatrixShape::batched(2, 70, 300),
        MatrixShape::batched(2, 81, 300),
    );
    let a = random.with_outliers(a_shape.num_elements());
    let b = random.with_outliers(b_shape.num_elements());
    let expected = reference::gemm(
        &reference_of(&a, a_shape, of_a),
        &reference_of(&b, b_shape, of_b),
        None,
        None,
    );
    let operand = |x: &[f32], shape, granularity| {
        let quantized = quantized(&client, &matrix(&client, x, shape), granularity);
        quantized.operand().expect("a row-major copy")
    };
    let (a, b) = (operand(&a, a_shape, of_a), operand(&b, b_shape, of_b));
    let out = gemm(&client, &a, &b, None, None, dtype::<f32>(), Strategy::Auto)
        .expect("operands that fit");
    assert_close(
        &read_float(&client, &out),
        &expected,
        dtype::<f32>(),
        "product",
    );
}

/// Scales that cover all of K through the kernels for square blocks, with each that the device has.
#[rstest]
#[case(Granularity::Token, Granularity::Token)]
#[case(Granularity::Tensor, Granularity::Token)]
#[case(Granularity::Token, Granularity::Tensor)]
#[case(Granularity::Tensor, Granularity::Tensor)]
fn scales_of_rows_and_matrices_in_blocks(#[case] of_a: Granularity, #[case] of_b: Granularity) {
    let (client, mut random) = (client(), Random::fresh());
    for strategy in strategies(&client, 128) {
        for (batch, shared, m, n, k) in [
            (1, true, 1, 1, 1),
            (1, true, 130, 259, 300),
            (2, true, 70, 81, 128),
            (3, false, 33, 142, 513),
            (1, true, 5, 3, 0),
        ] {
            // The kernel for Hopper has no empty sums; `Strategy::Auto` takes another one.
            if k == 0 && strategy == Strategy::Hopper {
                continue;
            }
            let a_shape = MatrixShape::batched(batch, m, k);
            let b_shape = MatrixShape::batched(if shared { 1 } else { batch }, n, k);
            let mut a = random.with_outliers(a_shape.num_elements());
            let b = random.with_outliers(b_shape.num_elements());
            if k > 0 {
                a[..k].fill(0.0);
            }
            let bias: Vec<f32> = (0..n).map(|_| 10.0 * random.normal()).collect();
            let expected = reference::gemm(
                &reference_of(&a, a_shape, of_a),
                &reference_of(&b, b_shape, of_b),
                None,
                Some(&bias),
            );
            let operand = |x: &[f32], shape, granularity| {
                let quantized = quantized(&client, &matrix(&client, x, shape), granularity);
                quantized.operand().expect("a row-major copy")
            };
            let (a, b) = (operand(&a, a_shape, of_a), operand(&b, b_shape, of_b));
            let bias = upload(&client, &bias, &[n], dtype::<f32>());
            for float in drawn(&mut random, float_types(&client), 1) {
                let out = gemm_rowwise(&client, &a, &b, Some(&bias), float, strategy)
                    .expect("operands that fit");
                assert_close(
                    &read_float(&client, &out),
                    &expected,
                    float,
                    &format!("{strategy:?} {batch} x {m} x {n} x {k} to {float}"),
                );
            }
        }
    }
}

#[test]
fn a_row_with_a_nan_makes_nan_of_that_row_alone() {
    let client = client();
    let (m, n, k) = (70, 9, 130);
    let mut x = vec![1.0; m * k];
    x[40 * k + 3] = f32::NAN;
    let of_rows = |x: &[f32], rows| {
        let x = matrix(&client, x, MatrixShape::new(rows, k));
        let quantized = quantized(&client, &x, Granularity::Token);
        quantized.operand().expect("a row-major copy")
    };
    let (a, b) = (of_rows(&x, m), of_rows(&vec![1.0; n * k], n));
    for strategy in strategies(&client, 128) {
        let out = gemm_rowwise(&client, &a, &b, None, dtype::<f32>(), strategy)
            .expect("operands that fit");
        for (index, value) in read_float(&client, &out).into_iter().enumerate() {
            assert_eq!(value.is_nan(), index / n == 40, "{strategy:?}: {index}");
        }
    }
}

#[test]
fn rowwise_products_refuse_scales_of_parts_of_a_row() {
    let client = client();
    let operand = |granularity| {
        let x = matrix(&client, &[1.0; 64 * 200], MatrixShape::new(64, 200));
        let quantized = quantized(&client, &x, granularity);
        quantized.operand().expect("a row-major copy")
    };
    let rows = operand(Granularity::Token);
    for other in [Granularity::Group(128), Granularity::Block(32)] {
        let other = operand(other);
        for (a, b) in [(&rows, &other), (&other, &rows)] {
            let error = gemm_rowwise(&client, a, b, None, dtype::<f32>(), Strategy::Portable)
                .expect_err("a scale for a part of a row");
            assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        }
    }
}

/// INT32 overflows past K = 133,144 when all values are extreme.
#[test]
fn long_sums_do_not_overflow() {
    let client = client();
    let shape = MatrixShape::new(1, 140_001);
    let x = vec![1.0; shape.cols];
    let operand = quantized(&client, &matrix(&client, &x, shape), Granularity::Tensor).operand();
    let operand = operand.expect("a row-major copy");
    let out = gemm(
        &client,
        &operand,
        &operand,
        None,
        None,
        dtype::<f32>(),
        Strategy::Auto,
    )
    .expect("operands that fit");
    assert_close(
        &read_float(&client, &out),
        &[140_001.0],
        dtype::<f32>(),
        "sum",
    );
}

/// Y = X W, dX = dY W^T and dW = X^T dY from one quantization of each matrix.
#[rstest]
fn the_three_products_of_a_linear_layer(#[values(32, 128)] block: usize) {
    let (client, mut random) = (client(), Random::fresh());
    let granularity = Granularity::Block(block);
    let (tokens, input, output) = (150, 200, 97);
    let shapes = [
        MatrixShape::new(tokens, input),
        MatrixShape::new(input, output),
        MatrixShape::new(tokens, output),
    ];
    let data = shapes.map(|shape| random.with_outliers(shape.num_elements()));
    let [x, w, dy] =
        [0, 1, 2].map(|i| quantized(&client, &matrix(&client, &data[i], shapes[i]), granularity));
    let [rx, rw, rdy] = [0, 1, 2].map(|i| reference_of(&data[i], shapes[i], granularity));
    type Operand = GemmOperand<TestRuntime>;
    let check = |a: Operand, b: Operand, expected: Vec<f64>, what: &str| {
        for strategy in strategies(&client, block) {
            let out = gemm(&client, &a, &b, None, None, dtype::<f32>(), strategy)
                .expect("operands that fit");
            assert_close(
                &read_float(&client, &out),
                &expected,
                dtype::<f32>(),
                &format!("{what}, {strategy:?}"),
            );
        }
    };
    check(
        x.operand().expect("both copies"),
        w.operand_transposed().expect("both copies"),
        reference::gemm(&rx, &rw.transposed(), None, None),
        "Y",
    );
    check(
        dy.operand().expect("both copies"),
        w.operand().expect("both copies"),
        reference::gemm(&rdy, &rw, None, None),
        "dX",
    );
    check(
        x.operand_transposed().expect("both copies"),
        dy.operand_transposed().expect("both copies"),
        reference::gemm(&rx.transposed(), &rdy.transposed(), None, None),
        "dW",
    );
}

#[rstest]
fn fallback_blocks_are_added(
    #[values(16, 32, 64, 128)] block: usize,
    #[values(0.0, 30.0, 1e30)] threshold: f32,
) {
    let (client, mut random) = (client(), Random::fresh());
    let problems = [(1, 130, 70, 300), (2, 257, 140, 128)];
    for (batch, m, n, k) in drawn(&mut random, problems, 1) {
        let (a_shape, b_shape) = (MatrixShape::batched(batch, m, k), MatrixShape::new(n, k));
        let a = random.with_outliers(a_shape.num_elements());
        let b = random.with_outliers(b_shape.num_elements());
        let granularity = Granularity::Block(block);
        let expected = reference::quantize_fallback(&a, a_shape, block, threshold);
        println!("{:?} blocks fall back", expected.counts());
        let expected = reference::gemm(
            &expected.base,
            &reference_of(&b, b_shape, granularity),
            Some(&expected),
            None,
        );
        let thresholds = upload(&client, &[threshold], &[1], dtype::<f32>());
        let counts = upload_i32(&client, &[0, 0], &[1, 2]);
        let a = quantize_fallback(
            &client,
            &matrix(&client, &a, a_shape),
            block,
            Layout::RowMajor,
            &thresholds,
            0,
            &counts,
        )
        .expect("a matrix");
        let b = quantized(&client, &matrix(&client, &b, b_shape), granularity);
        for strategy in strategies_with_fallback(&client, block) {
            let out = gemm(
                &client,
                &a.base.operand().expect("a row-major copy"),
                &b.operand().expect("a row-major copy"),
                Some(&a.residual),
                None,
                dtype::<f32>(),
                strategy,
            )
            .expect("operands that fit");
            assert_close(
                &read_float(&client, &out),
                &expected,
                dtype::<f32>(),
                &format!("{strategy:?} {m} x {n} x {k}"),
            );
        }
    }
}

#[test]
fn non_finite_blocks_reach_their_rows_only() {
    let client = client();
    let shape = MatrixShape::new(80, 64);
    let mut x = vec![1.0; shape.num_elements()];
    x[40 * 64 + 3] = f32::NAN;
    let a = quantized(&client, &matrix(&client, &x, shape), Granularity::Block(32));
    let b = quantized(
        &client,
        &matrix(&client, &[1.0; 9 * 64], MatrixShape::new(9, 64)),
        Granularity::Block(32),
    );
    let (a, b) = (
        a.operand().expect("both copies"),
        b.operand().expect("both copies"),
    );
    for strategy in strategies(&client, 32) {
        let out =
            gemm(&client, &a, &b, None, None, dtype::<f32>(), strategy).expect("operands that fit");
        for (index, value) in read_float(&client, &out).into_iter().enumerate() {
            let in_block = (32..64).contains(&(index / 9));
            assert_eq!(value.is_nan(), in_block, "{strategy:?}: row {}", index / 9);
        }
    }
}

#[test]
fn empty_products() {
    let client = client();
    let operand = |rows, depth| {
        let x = upload(
            &client,
            &vec![1.0; rows * depth],
            &[rows, depth],
            dtype::<f32>(),
        );
        let quantized = quantized(&client, &x, Granularity::Block(32));
        quantized.operand().expect("a row-major copy")
    };
    for strategy in strategies(&client, 32) {
        for (m, n, k) in [(0, 3, 4), (3, 0, 4), (3, 2, 0)] {
            // The kernel for Hopper has no empty sums; `Strategy::Auto` takes another one.
            if k == 0 && strategy == Strategy::Hopper {
                continue;
            }
            let bias = upload(&client, &[5.0, 6.0, 7.0][..n], &[n], dtype::<f32>());
            let out = gemm(
                &client,
                &operand(m, k),
                &operand(n, k),
                None,
                Some(&bias),
                dtype::<f32>(),
                strategy,
            )
            .expect("operands that fit");
            assert_eq!(out.shape().to_vec(), [m, n]);
            let expected = [5.0, 6.0, 7.0][..n].repeat(m);
            assert_eq!(read_float(&client, &out), expected);
        }
    }
}

/// The tensor-core kernel against the portable one, where the device has it: enough tiles for its large ones, more
/// blocks along K than its ring has stages, and rows that start at multiples of 16, 8 and 1 bytes.
#[rstest]
fn large_products(#[values(32, 64, 128)] block: usize, #[values(1024, 1000, 1001)] k: usize) {
    let (client, mut random) = (client(), Random::fresh());
    if !strategies(&client, block).contains(&Strategy::TensorCore) {
        return;
    }
    let (a_shape, b_shape) = (MatrixShape::new(1605, k), MatrixShape::new(1801, k));
    let a = random.with_outliers(a_shape.num_elements());
    let b = random.with_outliers(b_shape.num_elements());
    let b = quantized(
        &client,
        &matrix(&client, &b, b_shape),
        Granularity::Block(block),
    );
    let b = b.operand().expect("a row-major copy");
    let thresholds = upload(&client, &[30.0], &[1], dtype::<f32>());
    let counts = upload_i32(&client, &[0, 0], &[1, 2]);
    let a = quantize_fallback(
        &client,
        &matrix(&client, &a, a_shape),
        block,
        Layout::RowMajor,
        &thresholds,
        0,
        &counts,
    )
    .expect("a matrix");
    let base = a.base.operand().expect("a row-major copy");
    for fallback in [None, Some(&a.residual)] {
        let [portable, tensor_core] = [Strategy::Portable, Strategy::TensorCore].map(|strategy| {
            let out = gemm(&client, &base, &b, fallback, None, dtype::<f32>(), strategy);
            read_float(&client, &out.expect("operands that fit"))
        });
        let expected: Vec<f64> = portable.into_iter().map(f64::from).collect();
        assert_close(
            &tensor_core,
            &expected,
            dtype::<f32>(),
            &format!("fallback {}", fallback.is_some()),
        );
    }
}

/// Rows that lie further apart than they are long.
#[rstest]
fn pitched_operands(#[values(32, 128)] block: usize, #[values(160, 168, 170)] pitch: usize) {
    let (client, mut random) = (client(), Random::fresh());
    let (m, n, k) = (70, 90, 152);
    let mut operand = |rows: usize| {
        let shape = MatrixShape::new(rows, k);
        let x = random.with_outliers(shape.num_elements());
        let reference = reference_of(&x, shape, Granularity::Block(block));
        let mut values = vec![0x55u8; rows * pitch];
        let contiguous = quantized(
            &client,
            &matrix(&client, &x, shape),
            Granularity::Block(block),
        )
        .operand()
        .expect("a row-major copy");
        let rows_of = read::<u8>(&client, &contiguous.values);
        for (row, of_row) in rows_of.chunks(k).enumerate() {
            values[row * pitch..][..k].copy_from_slice(of_row);
        }
        let mut pitched = contiguous.clone();
        pitched.values = TensorHandle::new(
            client.create_from_slice(&values),
            [rows, k],
            [pitch, 1],
            dtype::<i8>(),
        );
        (pitched, reference)
    };
    let ((a, a_reference), (b, b_reference)) = (operand(m), operand(n));
    let expected = reference::gemm(&a_reference, &b_reference, None, None);
    for strategy in strategies(&client, block) {
        let out = gemm(&client, &a, &b, None, None, dtype::<f32>(), strategy);
        assert_close(
            &read_float(&client, &out.expect("operands that fit")),
            &expected,
            dtype::<f32>(),
            &format!("{strategy:?}"),
        );
    }
}

fn problem(batch: usize, m: usize, n: usize, k: usize, block: usize) -> GemmProblem {
    GemmProblem {
        batch,
        m,
        n,
        k,
        a_scale_block: (block, block),
        b_scale_block: (block, block),
        fallback: false,
    }
}

/// Which of its blueprints a product takes changes no bit: in more tiles than multiprocessors, in rows of any
/// alignment, in tiles that begin in the middle of a block, with a batch.
#[rstest]
fn candidates_give_the_same_bits(#[values(32, 64, 128)] block: usize) {
    let (client, mut random) = (client(), Random::fresh());
    let with_fallback = strategies_with_fallback(&client, block);
    for strategy in strategies(&client, block) {
        for (batch, m, n, k) in [
            (1, 2000, 2101, 301),
            (2, 257, 576, 400),
            (1, 129, 1001, 130),
        ] {
            let problem = problem(batch, m, n, k, block);
            let blueprints = candidates(&client, &problem, strategy).expect("a kernel");
            if blueprints.len() == 1 {
                println!("{strategy:?} has no choice");
                break;
            }
            let (a_shape, b_shape) = (MatrixShape::batched(batch, m, k), MatrixShape::new(n, k));
            let a = random.with_outliers(a_shape.num_elements());
            let b = random.with_outliers(b_shape.num_elements());
            let bias: Vec<f32> = (0..n).map(|_| 10.0 * random.normal()).collect();
            let bias = upload(&client, &bias, &[n], dtype::<f32>());
            let thresholds = upload(&client, &[30.0], &[1], dtype::<f32>());
            let counts = upload_i32(&client, &[0, 0], &[1, 2]);
            let a = matrix(&client, &a, a_shape);
            let rows = Layout::RowMajor;
            let a = quantize_fallback(&client, &a, block, rows, &thresholds, 0, &counts)
                .expect("a matrix");
            let b = quantized(
                &client,
                &matrix(&client, &b, b_shape),
                Granularity::Block(block),
            );
            let (base, b) = (a.base.operand(), b.operand());
            let (base, b) = (base.expect("both copies"), b.expect("both copies"));
            for (float, residual, bias) in [
                (dtype::<f32>(), None, Some(&bias)),
                (dtype::<f32>(), Some(&a.residual), None),
                (dtype::<bf16>(), Some(&a.residual), Some(&bias)),
                (dtype::<bf16>(), None, None),
            ] {
                if !client.features().supports_type(float)
                    || residual.is_some() && !with_fallback.contains(&strategy)
                {
                    continue;
                }
                let products = blueprints.iter().map(|&blueprint| {
                    let strategy = Strategy::Exactly(blueprint);
                    let out = gemm(&client, &base, &b, residual, bias, float, strategy);
                    read_float(&client, &out.expect("a candidate"))
                });
                let products: Vec<Vec<f32>> = products.collect();
                for (product, blueprint) in products.iter().zip(&blueprints).skip(1) {
                    let has = (residual.is_some(), bias.is_some());
                    let what = format!("{blueprint:?} {problem:?} to {float}, {has:?}");
                    assert_same_floats(product, &products[0], &what);
                }
            }
        }
    }
}

/// Products of one kind that several threads ask for at once, while the first of them is measured with the feature
/// `autotune` (on sm_90, unless a cache on disk knows), and afterwards.
#[test]
fn threads_get_the_same_bits() {
    let client = client();
    // Tiles of 256 columns are expected to take 11% longer here than those of 192: the choice is open, but in FP32.
    let (m, n, k) = (1000, 5001, 24);
    let float = *float_types(&client).last().expect("FP32 at least");
    let first = select(&client, &problem(1, m, n, k, 128), Strategy::Auto).expect("a kernel");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut random = Random::fresh();
                let mut operand = |rows: usize| {
                    let shape = MatrixShape::new(rows, k);
                    let x = random.with_outliers(shape.num_elements());
                    let x = matrix(&client, &x, shape);
                    let quantized = quantized(&client, &x, Granularity::Block(128));
                    quantized.operand().expect("a row-major copy")
                };
                let (a, b) = (operand(m), operand(n));
                let product = |strategy| {
                    let out = gemm(&client, &a, &b, None, None, float, strategy);
                    read_float(&client, &out.expect("operands that fit"))
                };
                let expected = product(Strategy::Exactly(first));
                for _ in 0..3 {
                    assert_same_floats(&product(Strategy::Auto), &expected, "product");
                }
            });
        }
    });
}

/// A blueprint that is none of the product's is told, not launched.
#[test]
fn foreign_blueprints() {
    let client = client();
    let of = |block| problem(1, 64, 64, 256, block);
    let strategy = Strategy::Portable;
    let portable = select(&client, &of(16), strategy).expect("a kernel");
    let exactly = Strategy::Exactly(portable);
    assert_eq!(
        select(&client, &of(16), exactly).expect("its own"),
        portable
    );
    let error = select(&client, &of(32), exactly);
    assert!(matches!(error, Err(KernelError::Unsupported { .. })));
    let odd = GemmProblem {
        a_scale_block: (8, 8),
        ..of(16)
    };
    assert!(candidates(&client, &odd, exactly).is_err());
}
