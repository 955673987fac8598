//! The Hopper kernel against the tensor-core kernel, to the bit: both add the same products in the same order with the
//! same roundings. Products large enough for many tiles, long sums and both tile widths; small ones, and the comparison
//! with the reference, are in `gemm.rs`.

use cubecl_kernels::{
    KernelError,
    fallback::{FallbackResidual, quantize_fallback},
    format::{Format, Granularity, Layout, Rounding},
    gemm::{Blueprint, GemmOperand, GemmProblem, Strategy, gemm, select},
    quantize::{QuantizeSpec, Quantized, quantize},
    shape::MatrixShape,
};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, client, dtype, float_types,
        read_float, upload, upload_i32, upload_matrix,
    },
    random::Random,
};

const BLOCK: usize = 128;

fn problem(batch: usize, m: usize, n: usize, k: usize) -> GemmProblem {
    GemmProblem {
        batch,
        m,
        n,
        k,
        a_scale_block: (BLOCK, BLOCK),
        b_scale_block: (BLOCK, BLOCK),
        aligned: (true, true),
    }
}

/// Whether the device has the kernel; named in the output where it has not.
fn has_hopper(client: &Client) -> bool {
    match select(client, &problem(1, 1, 1, 1), Strategy::Hopper) {
        Ok(blueprint) => {
            assert!(matches!(blueprint, Blueprint::Hopper(_)));
            true
        }
        Err(error) => {
            println!("skipped: {error}");
            assert!(matches!(error, KernelError::Unsupported { .. }));
            false
        }
    }
}

fn quantized(client: &Client, x: &Tensor) -> Quantized<TestRuntime> {
    let spec = QuantizeSpec {
        format: Format::Int8,
        granularity: Granularity::Block(BLOCK),
        rounding: Rounding::Nearest,
        layout: Layout::Both,
    };
    quantize(client, x, &spec).expect("a matrix")
}

/// Normal numbers with a few outliers; random stretches of them repeated, since they are many.
fn values(random: &mut Random, count: usize) -> Vec<f32> {
    let pool = random.with_outliers(count.clamp(1, 1 << 16));
    let mut x = Vec::with_capacity(count);
    while x.len() < count {
        let start = random.index(pool.len());
        let length = (1 + random.index(4096)).min(count - x.len());
        x.extend(pool.iter().cycle().skip(start).take(length));
    }
    x
}

fn operand(client: &Client, random: &mut Random, shape: MatrixShape) -> GemmOperand<TestRuntime> {
    let x = values(random, shape.num_elements());
    let x = upload_matrix(client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    quantized(client, &x).operand().expect("a row-major copy")
}

fn with_fallback(
    client: &Client,
    x: &[f32],
    shape: MatrixShape,
    threshold: f32,
) -> (GemmOperand<TestRuntime>, FallbackResidual<TestRuntime>) {
    let x = upload_matrix(client, x, shape, dtype::<f32>(), Memory::Contiguous);
    let thresholds = upload(client, &[threshold], &[1], dtype::<f32>());
    let counts = upload_i32(client, &[0, 0], &[1, 2]);
    let quantized = quantize_fallback(client, &x, BLOCK, Layout::RowMajor, &thresholds, 0, &counts)
        .expect("a matrix");
    let operand = quantized.base.operand().expect("a row-major copy");
    (operand, quantized.residual)
}

/// Both kernels in all float types, with and without a bias.
fn compare(
    client: &Client,
    random: &mut Random,
    a: &GemmOperand<TestRuntime>,
    b: &GemmOperand<TestRuntime>,
    fallback: Option<&FallbackResidual<TestRuntime>>,
    n: usize,
    what: &str,
) {
    let bias: Vec<f32> = (0..n).map(|_| 10.0 * random.normal()).collect();
    let bias = upload(client, &bias, &[n], dtype::<f32>());
    for float in float_types(client) {
        for bias in [None, Some(&bias)] {
            let [expected, actual] = [Strategy::TensorCore, Strategy::Hopper].map(|strategy| {
                let out = gemm(client, a, b, fallback, bias, float, strategy);
                read_float(client, &out.expect("operands that fit"))
            });
            assert_same_floats(&actual, &expected, &format!("{what} to {float}"));
        }
    }
}

#[rstest]
#[case::one_tile(1, 128, 256, 128)]
#[case::wide_tiles(1, 2048, 2048, 4224)]
#[case::more_tiles_than_multiprocessors(1, 1500, 8200, 640)]
#[case::odd_columns(1, 300, 401, 1000)]
#[case::odd_depth(1, 513, 1030, 777)]
#[case::batches(3, 257, 384, 392)]
fn same_bits(#[case] batch: usize, #[case] m: usize, #[case] n: usize, #[case] k: usize) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let a_shape = MatrixShape::batched(batch, m, k);
    let a = operand(&client, &mut random, a_shape);
    for b_batch in [1, batch] {
        let b = operand(&client, &mut random, MatrixShape::batched(b_batch, n, k));
        let what = format!("{batch} x {m} x {n} x {k}");
        compare(&client, &mut random, &a, &b, None, n, &what);
    }
}

#[rstest]
fn same_bits_with_fallback(#[values(0.0, 500.0, 2000.0, 1e30)] threshold: f32) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    // The second has blocks along K past those whose scales the producer reads at once.
    for (batch, m, n, k) in [(2, 700, 520, 600), (1, 2000, 2100, 4500)] {
        let a_shape = MatrixShape::batched(batch, m, k);
        let x = values(&mut random, a_shape.num_elements());
        let (a, residual) = with_fallback(&client, &x, a_shape, threshold);
        let b = operand(&client, &mut random, MatrixShape::new(n, k));
        let what = format!("{batch} x {m} x {n} x {k}, threshold {threshold}");
        compare(&client, &mut random, &a, &b, Some(&residual), n, &what);
    }
}

/// A block of NaN makes NaN of its rows or columns of the output, also where it is multiplied by zeros.
#[test]
fn nan_blocks() {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let (m, n, k) = (600, 700, 500);
    let mut x = values(&mut random, m * k);
    x[200 * k + 130] = f32::NAN;
    let mut y = values(&mut random, n * k);
    y[300 * k + 450] = f32::INFINITY;
    y[..128 * k].fill(0.0);
    let (a, residual) = with_fallback(&client, &x, MatrixShape::new(m, k), 0.0);
    let y = upload(&client, &y, &[n, k], dtype::<f32>());
    let b = quantized(&client, &y).operand().expect("a row-major copy");
    compare(
        &client,
        &mut random,
        &a,
        &b,
        Some(&residual),
        n,
        "NaN blocks",
    );
    let out = gemm(
        &client,
        &a,
        &b,
        Some(&residual),
        None,
        dtype::<f32>(),
        Strategy::Hopper,
    );
    for (index, value) in read_float(&client, &out.expect("operands that fit"))
        .iter()
        .enumerate()
    {
        let (row, col) = (index / n, index % n);
        let expected = (128..256).contains(&row) || (256..384).contains(&col);
        assert_eq!(value.is_nan(), expected, "row {row}, column {col}");
    }
}

/// The transposed copies, whose scales are read with exchanged strides.
#[test]
fn transposed_operands() {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let (m, n, k) = (400, 900, 1300);
    let [a, b] = [m, n].map(|rows| {
        let x = upload(
            &client,
            &values(&mut random, k * rows),
            &[k, rows],
            dtype::<f32>(),
        );
        quantized(&client, &x)
            .operand_transposed()
            .expect("both copies")
    });
    compare(&client, &mut random, &a, &b, None, n, "transposed operands");
}

/// Rows of a larger matrix: aligned, and such that the operand has to be copied.
#[rstest]
fn windows(#[values(16, 5)] padding: usize) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let (m, n, k) = (300, 600, 512);
    let wide = operand(&client, &mut random, MatrixShape::new(m, k + padding));
    let mut a = operand(&client, &mut random, MatrixShape::new(m, k));
    a.values.handle = wide.values.handle;
    a.values.metadata.strides_mut()[0] = k + padding;
    let b = operand(&client, &mut random, MatrixShape::new(n, k));
    compare(
        &client,
        &mut random,
        &a,
        &b,
        None,
        n,
        &format!("padding {padding}"),
    );
}

/// Auto takes the kernel where it can, and the others where it cannot.
#[test]
fn selection() {
    let client = client();
    if !has_hopper(&client) {
        return;
    }
    let is_hopper = |problem: &GemmProblem| {
        let blueprint = select(&client, problem, Strategy::Auto).expect("a kernel");
        matches!(blueprint, Blueprint::Hopper(_))
    };
    let fits = problem(1, 300, 300, 300);
    assert!(is_hopper(&fits));
    assert!(!is_hopper(&GemmProblem { k: 0, ..fits }));
    let other_blocks = GemmProblem {
        a_scale_block: (64, 64),
        b_scale_block: (64, 64),
        ..fits
    };
    assert!(!is_hopper(&other_blocks));
    let error = select(&client, &other_blocks, Strategy::Hopper);
    assert!(matches!(error, Err(KernelError::Unsupported { .. })));
}
