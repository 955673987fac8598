//! The Hopper kernels, to the bit. Products large enough for many tiles, long sums and all tile widths; small ones,
//! and the comparison with the reference in FP64, are in `gemm.rs`.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    fallback::{FallbackResidual, quantize_fallback},
    gemm::{
        Blueprint, GemmOperand, GemmProblem, Strategy, candidates, gemm, gemm_float,
        gemm_float_into, gemm_float_reads, select,
    },
    granularity::Granularity,
    layout::Layout,
    quantize::{QuantizeSpec, Quantized, quantize},
    shape::MatrixShape,
};
use rstest::rstest;

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, client, dtype, float_types,
        read_float, rounded, upload, upload_i32, upload_matrix,
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
        fallback: false,
    }
}

/// True where the device has the kernel; named in the output where it has not.
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

/// The parts of K of a Hopper kernel.
fn parts(blueprint: Blueprint) -> usize {
    match blueprint {
        Blueprint::Hopper(it) | Blueprint::HopperRowwise(it) => it.parts,
        Blueprint::Portable(_) | Blueprint::TensorCore(_) => {
            panic!("{blueprint:?} is another kernel")
        }
    }
}

fn quantized(client: &Client, x: &Tensor, granularity: Granularity) -> Quantized<TestRuntime> {
    let spec = QuantizeSpec::int8(granularity).with_layout(Layout::Both);
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

fn operand(
    client: &Client,
    random: &mut Random,
    shape: MatrixShape,
    granularity: Granularity,
) -> GemmOperand<TestRuntime> {
    let x = values(random, shape.num_elements());
    let x = upload_matrix(client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    quantized(client, &x, granularity)
        .operand()
        .expect("a row-major copy")
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

/// The numbers that the kernels are specified to compute, to the bit: exact products of what shares its scales, times
/// the product of these, added in FP32 with one rounding each, in ascending order of K, a residual right after its
/// base; and parts of K added so.
struct Reference<'a> {
    k: usize,
    a: Side<'a>,
    b: Side<'a>,
    residual: Option<(Vec<i8>, Vec<f32>, Vec<u32>)>,
}

/// The integers of an operand, row-major and contiguous, and its scales by their strides.
struct Side<'a> {
    values: Vec<i8>,
    scales: Vec<f32>,
    operand: &'a GemmOperand<TestRuntime>,
}

impl<'a> Side<'a> {
    fn new(client: &Client, operand: &'a GemmOperand<TestRuntime>) -> Self {
        Self {
            values: read_all(client, &operand.values),
            scales: read_all(client, &operand.scales),
            operand,
        }
    }

    /// Where the row's integer at `depth` lies, the scale of it, and where along K that scale ends.
    fn place(&self, batch: usize, row: usize, depth: usize) -> (usize, usize, usize) {
        let index = |tensor: &Tensor, row: usize, col: usize| {
            let (shape, strides) = (tensor.shape(), tensor.strides());
            let rank = shape.len();
            let batch = match rank {
                3 if shape[0] > 1 => batch * strides[0],
                _ => 0,
            };
            batch + row * strides[rank - 2] + col * strides[rank - 1]
        };
        let GemmOperand {
            rows_per_scale,
            depth_per_scale,
            ..
        } = *self.operand;
        let block = depth / depth_per_scale;
        let value = index(&self.operand.values, row, depth);
        let scale = index(&self.operand.scales, row / rows_per_scale, block);
        (value, scale, (block + 1) * depth_per_scale)
    }
}

/// The whole buffer of a tensor: its elements may have any strides in it.
fn read_all<T: bytemuck::Pod>(client: &Client, tensor: &Tensor) -> Vec<T> {
    let bytes = client.read_one(tensor.handle.clone());
    let bytes = bytes.expect("a readable buffer");
    bytes
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

fn dot(a: &[i8], b: &[i8]) -> f32 {
    let sum: i32 = a
        .iter()
        .zip(b)
        .map(|(&a, &b)| i32::from(a) * i32::from(b))
        .sum();
    sum as f32
}

impl<'a> Reference<'a> {
    fn new(
        client: &Client,
        k: usize,
        a: &'a GemmOperand<TestRuntime>,
        b: &'a GemmOperand<TestRuntime>,
        fallback: Option<&FallbackResidual<TestRuntime>>,
    ) -> Self {
        let residual = fallback.map(|residual| {
            (
                read_all(client, &residual.values),
                read_all(client, &residual.scales),
                read_all(client, &residual.flags),
            )
        });
        let (a, b) = (Side::new(client, a), Side::new(client, b));
        Self { k, a, b, residual }
    }

    /// An element, where K is summed up in so many parts.
    fn at(&self, [batch, row, col]: [usize; 3], parts: usize, bias: f32) -> f32 {
        let of_part = self.k.div_ceil(BLOCK).div_ceil(parts) * BLOCK;
        let starts = (0..self.k).step_by(of_part);
        let sums = starts.map(|start| self.part(batch, row, col, start, start + of_part));
        sums.reduce(|sum, part| sum + part).unwrap_or(0.0) + bias
    }

    /// What lies between two places along K gives.
    fn part(&self, batch: usize, row: usize, col: usize, start: usize, end: usize) -> f32 {
        let (mut sum, mut at, end) = (0.0f32, start, end.min(self.k));
        while at < end {
            let (a, a_scale, block_end) = self.a.place(batch, row, at);
            let (b, b_scale, _) = self.b.place(batch, col, at);
            let depth = block_end.min(end) - at;
            let b_values = &self.b.values[b..b + depth];
            let b_scale = self.b.scales[b_scale];
            let product = dot(&self.a.values[a..a + depth], b_values);
            sum = product.mul_add(self.a.scales[a_scale] * b_scale, sum);
            if let Some((values, scales, flags)) = &self.residual
                && flags[a_scale] != 0
            {
                let product = dot(&values[a..a + depth], b_values);
                sum = product.mul_add(scales[a_scale] * b_scale, sum);
            }
            at += depth;
        }
        sum
    }
}

/// The kernel in all float types, with and without a bias, in each of these with one width of tiles after the other, at
/// some thousand places that include the corners.
fn compare(
    client: &Client,
    random: &mut Random,
    a: &GemmOperand<TestRuntime>,
    b: &GemmOperand<TestRuntime>,
    fallback: Option<&FallbackResidual<TestRuntime>>,
    what: &str,
) {
    let size = |tensor: &Tensor| {
        let shape = tensor.shape();
        let rank = shape.len();
        let batch = if rank == 3 { shape[0] } else { 1 };
        (batch, shape[rank - 2], shape[rank - 1])
    };
    let ((batch, m, k), (_, n, _)) = (size(&a.values), size(&b.values));
    let reference = Reference::new(client, k, a, b, fallback);
    let bias: Vec<f32> = (0..n).map(|_| 10.0 * random.normal()).collect();
    let places: Vec<[usize; 3]> = [
        [0, 0, 0],
        [batch - 1, m - 1, n - 1],
        [0, 0, n - 1],
        [0, m - 1, 0],
    ]
    .into_iter()
    .chain((0..4000).map(|_| [random.index(batch), random.index(m), random.index(n)]))
    .collect();
    let expected = |parts: usize, bias: &[f32]| -> Vec<f32> {
        let at = |&place: &[usize; 3]| reference.at(place, parts, bias[place[2]]);
        places.iter().map(at).collect()
    };
    let values_of_bias = bias;
    let of_bias = upload(client, &values_of_bias, &[n], dtype::<f32>());
    let problem = GemmProblem {
        a_scale_block: (a.rows_per_scale, a.depth_per_scale),
        b_scale_block: (b.rows_per_scale, b.depth_per_scale),
        fallback: fallback.is_some(),
        ..problem(batch, m, n, k)
    };
    let widths = candidates(client, &problem, Strategy::Hopper).expect("a kernel");
    let parts = parts(widths[0]);
    assert!(
        widths.iter().all(|it| parts == self::parts(*it)),
        "{widths:?}"
    );
    let expected = [vec![0.0; n], values_of_bias].map(|bias| expected(parts, &bias));
    let mut widths = widths.iter().cycle().skip(random.index(widths.len()));
    for float in float_types(client) {
        for (bias, expected) in [None, Some(&of_bias)].into_iter().zip(&expected) {
            let width = *widths.next().expect("an endless cycle");
            let out = gemm(
                client,
                a,
                b,
                fallback,
                bias,
                float,
                Strategy::Exactly(width),
            );
            let out = read_float(client, &out.expect("operands that fit"));
            let actual: Vec<f32> = places
                .iter()
                .map(|&[matrix, row, col]| out[(matrix * m + row) * n + col])
                .collect();
            let what = format!("{what} to {float}, bias {}, {width:?}", bias.is_some());
            assert_same_floats(&actual, &rounded(expected, float), &what);
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
#[case::narrow_column_of_one_chunk(1, 4100, 4097, 333)]
#[case::narrow_column_of_two_chunks(1, 4100, 4162, 272)]
#[case::narrow_column_of_three_chunks(1, 4100, 4226, 145)]
#[case::narrow_columns_only(2, 300, 60, 384)]
#[case::parts_of_k(1, 260, 200, 16_400)]
#[case::parts_of_batches(2, 130, 97, 9000)]
fn same_bits(
    #[case] batch: usize,
    #[case] m: usize,
    #[case] n: usize,
    #[case] k: usize,
    #[values(32, 64, 128)] block: usize,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let a_shape = MatrixShape::batched(batch, m, k);
    let a = operand(&client, &mut random, a_shape, Granularity::Block(block));
    for b_batch in [1, batch] {
        let b_shape = MatrixShape::batched(b_batch, n, k);
        let b = operand(&client, &mut random, b_shape, Granularity::Block(block));
        let what = format!("{batch} x {m} x {n} x {k}, blocks of {block}");
        compare(&client, &mut random, &a, &b, None, &what);
    }
}

#[rstest]
fn same_bits_with_fallback(#[values(0.0, 500.0, 2000.0, 1e30)] threshold: f32) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    // The second has blocks along K past those whose scales the producer reads at once; the third a narrow column.
    for (batch, m, n, k) in [
        (2, 700, 520, 600),
        (1, 2000, 2100, 4500),
        (1, 4100, 4097, 301),
    ] {
        let a_shape = MatrixShape::batched(batch, m, k);
        let x = values(&mut random, a_shape.num_elements());
        let (a, residual) = with_fallback(&client, &x, a_shape, threshold);
        let b = operand(
            &client,
            &mut random,
            MatrixShape::new(n, k),
            Granularity::Block(BLOCK),
        );
        let what = format!("{batch} x {m} x {n} x {k}, threshold {threshold}");
        compare(&client, &mut random, &a, &b, Some(&residual), &what);
    }
}

/// A block of NaN makes NaN of its rows or columns of the output, also where it is multiplied by zeros.
#[rstest]
fn nan_blocks(#[values(32, 64, 128)] block: usize) {
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
    let [x_matrix, y] = [(m, &x), (n, &y)]
        .map(|(rows, values)| upload(&client, values, &[rows, k], dtype::<f32>()));
    let operand = |x: &Tensor| quantized(&client, x, Granularity::Block(block)).operand();
    let (a, residual) = if block == BLOCK {
        let (a, residual) = with_fallback(&client, &x, MatrixShape::new(m, k), 0.0);
        (a, Some(residual))
    } else {
        (operand(&x_matrix).expect("a row-major copy"), None)
    };
    let (b, residual) = (operand(&y).expect("a row-major copy"), residual.as_ref());
    compare(&client, &mut random, &a, &b, residual, "NaN blocks");
    let out = gemm(
        &client,
        &a,
        &b,
        residual,
        None,
        dtype::<f32>(),
        Strategy::Hopper,
    );
    for (index, value) in read_float(&client, &out.expect("operands that fit"))
        .iter()
        .enumerate()
    {
        let (row, col) = (index / n, index % n);
        let expected = row / block == 200 / block || col / block == 300 / block;
        assert_eq!(value.is_nan(), expected, "row {row}, column {col}");
    }
}

/// The transposed copies, whose scales are read with exchanged strides.
#[rstest]
fn transposed_operands(
    #[values(
        Granularity::Block(32),
        Granularity::Block(64),
        Granularity::Block(128),
        Granularity::Channel
    )]
    granularity: Granularity,
) {
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
        quantized(&client, &x, granularity)
            .operand_transposed()
            .expect("both copies")
    });
    compare(&client, &mut random, &a, &b, None, "transposed operands");
}

/// Rows of a larger matrix: aligned, and such that the operand has to be copied.
#[rstest]
fn windows(
    #[values(16, 5)] padding: usize,
    #[values(
        Granularity::Block(32),
        Granularity::Block(64),
        Granularity::Block(128),
        Granularity::Token
    )]
    granularity: Granularity,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let (m, n, k) = (300, 600, 512);
    let wide = operand(
        &client,
        &mut random,
        MatrixShape::new(m, k + padding),
        granularity,
    );
    let mut a = operand(&client, &mut random, MatrixShape::new(m, k), granularity);
    a.values.handle = wide.values.handle;
    a.values.metadata.strides_mut()[0] = k + padding;
    let b = operand(&client, &mut random, MatrixShape::new(n, k), granularity);
    compare(
        &client,
        &mut random,
        &a,
        &b,
        None,
        &format!("padding {padding}"),
    );
}

/// Scales of rows and of whole matrices, in every pairing.
#[rstest]
#[case::one_tile(1, 128, 256, 129)]
#[case::wide_tiles(1, 2048, 2048, 4224)]
#[case::more_tiles_than_multiprocessors(1, 1500, 8200, 640)]
#[case::odd_columns(1, 300, 401, 1000)]
#[case::odd_depth(1, 513, 1030, 777)]
#[case::batches(3, 257, 384, 392)]
#[case::narrow_columns_only(2, 300, 60, 384)]
#[case::one_row(1, 1, 300, 200)]
#[case::one_column(2, 140, 1, 16)]
#[case::parts_of_k(1, 260, 200, 16_400)]
#[case::parts_of_batches(2, 130, 97, 9000)]
fn same_bits_with_scales_over_k(
    #[case] batch: usize,
    #[case] m: usize,
    #[case] n: usize,
    #[case] k: usize,
    #[values(Granularity::Token, Granularity::Tensor)] of_a: Granularity,
    #[values(Granularity::Token, Granularity::Tensor)] of_b: Granularity,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let a_shape = MatrixShape::batched(batch, m, k);
    let a = operand(&client, &mut random, a_shape, of_a);
    for b_batch in [1, batch] {
        let b_shape = MatrixShape::batched(b_batch, n, k);
        let b = operand(&client, &mut random, b_shape, of_b);
        let what = format!("{batch} x {m} x {n} x {k}, scales of {of_a:?} and {of_b:?}");
        compare(&client, &mut random, &a, &b, None, &what);
    }
}

/// The deepest sum that INT32 holds whatever the integers, and one that is deeper, which takes another way.
#[rstest]
#[case(1 << 17, true)]
#[case((1 << 17) + 1, false)]
fn longest_exact_sum(#[case] k: usize, #[case] fits: bool) {
    let client = client();
    if !has_hopper(&client) {
        return;
    }
    let (m, n) = (130, 70);
    let of_ones = |rows: usize| {
        let x = upload(&client, &vec![1.0; rows * k], &[rows, k], dtype::<f32>());
        let quantized = quantized(&client, &x, Granularity::Token);
        quantized.operand().expect("a row-major copy")
    };
    let (a, b) = (of_ones(m), of_ones(n));
    let product = |strategy| gemm(&client, &a, &b, None, None, dtype::<f32>(), strategy);
    assert_eq!(product(Strategy::Hopper).is_ok(), fits);
    let out = read_float(&client, &product(Strategy::Auto).expect("a kernel"));
    for (index, value) in out.into_iter().enumerate() {
        let error = (value - k as f32).abs() / k as f32;
        assert!(error < 1e-5, "{value} at {index}, where the sum is {k}");
    }
}

/// A row's scale of NaN makes NaN of that row alone, that of a matrix of everything, also where the integers are 0.
#[rstest]
fn nan_scales_over_k(#[values(Granularity::Token, Granularity::Tensor)] of_a: Granularity) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let (m, n, k) = (300, 200, 150);
    let mut x = values(&mut random, m * k);
    x[200 * k + 130] = f32::NAN;
    let x = upload(&client, &x, &[m, k], dtype::<f32>());
    let quantized = quantized(&client, &x, of_a);
    let a = quantized.operand().expect("a row-major copy");
    let b = operand(
        &client,
        &mut random,
        MatrixShape::new(n, k),
        Granularity::Token,
    );
    compare(&client, &mut random, &a, &b, None, "NaN over K");
    let out = gemm(
        &client,
        &a,
        &b,
        None,
        None,
        dtype::<f32>(),
        Strategy::Hopper,
    );
    let out = read_float(&client, &out.expect("operands that fit"));
    for (index, value) in out.into_iter().enumerate() {
        let expected = of_a == Granularity::Tensor || index / n == 200;
        assert_eq!(value.is_nan(), expected, "element {index}");
    }
}

/// Few tiles and a long sum: K is summed up in parts, but not with residuals, whose blocks cost more than others.
#[test]
fn gradients_of_small_weights_are_split() {
    let client = client();
    if !has_hopper(&client) {
        return;
    }
    let parts_of = |problem: &GemmProblem| {
        parts(select(&client, problem, Strategy::Hopper).expect("a kernel"))
    };
    let small = problem(1, 256, 256, 16_384);
    assert!(parts_of(&small) > 1);
    assert_eq!(
        parts_of(&GemmProblem {
            fallback: true,
            ..small
        }),
        1
    );
    assert_eq!(parts_of(&problem(1, 8192, 8192, 16_384)), 1);
    assert_eq!(parts_of(&problem(1, 256, 256, 512)), 1);
}

/// Auto takes the kernel where it can, and the others where it cannot.
#[test]
fn selection() {
    let client = client();
    if !has_hopper(&client) {
        return;
    }
    let auto = |problem: &GemmProblem| select(&client, problem, Strategy::Auto).expect("a kernel");
    let is_hopper = |problem: &GemmProblem| matches!(auto(problem), Blueprint::Hopper(_));
    let is_rowwise = |problem: &GemmProblem| matches!(auto(problem), Blueprint::HopperRowwise(_));
    let fits = problem(1, 300, 300, 300);
    assert!(is_hopper(&fits));
    assert!(!is_hopper(&GemmProblem { k: 0, ..fits }));
    let small_blocks = GemmProblem {
        a_scale_block: (64, 64),
        b_scale_block: (64, 64),
        ..fits
    };
    assert!(is_hopper(&small_blocks));
    let rowwise = GemmProblem {
        a_scale_block: (1, 300),
        b_scale_block: (300, 300),
        ..fits
    };
    assert!(is_rowwise(&rowwise));
    let others = [
        GemmProblem {
            fallback: true,
            ..rowwise
        },
        GemmProblem {
            fallback: true,
            ..small_blocks
        },
        GemmProblem {
            a_scale_block: (16, 16),
            b_scale_block: (16, 16),
            ..fits
        },
        GemmProblem {
            a_scale_block: (64, 64),
            ..fits
        },
        GemmProblem {
            b_scale_block: (1, 128),
            ..rowwise
        },
        GemmProblem {
            b_scale_block: (128, 128),
            ..rowwise
        },
    ];
    for other in others {
        let error = select(&client, &other, Strategy::Hopper);
        assert!(matches!(error, Err(KernelError::Unsupported { .. })));
        assert!(!is_hopper(&other) && !is_rowwise(&other));
    }
}

/// Integers up to 8, whose sums of products are exact in FP32, in all layouts: neighbours along K or along the rows.
#[rstest]
fn float_products(
    #[values(false, true)] a_along_rows: bool,
    #[values(false, true)] b_along_rows: bool,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    for (batch, b_batch, m, n, k) in [
        (1, 1, 8, 8, 8),
        (1, 1, 384, 264, 1000),
        (1, 1, 2000, 2304, 136),
        (1, 1, 264, 136, 16_384),
        (2, 2, 136, 72, 9000),
        (3, 3, 200, 136, 72),
        (2, 1, 136, 400, 200),
    ] {
        let mut matrix = |batch: usize, rows: usize, along_rows: bool| {
            let x: Vec<f32> = (0..batch * rows * k)
                .map(|_| random.index(17) as f32 - 8.0)
                .collect();
            let memory = if along_rows {
                Memory::Transposed
            } else {
                Memory::Contiguous
            };
            (x, MatrixShape::batched(batch, rows, k), memory)
        };
        let (a, a_shape, a_memory) = matrix(batch, m, a_along_rows);
        let (b, b_shape, b_memory) = matrix(b_batch, n, b_along_rows);
        let bias: Vec<f32> = (0..n).map(|_| random.index(100) as f32).collect();
        let places: Vec<[usize; 3]> = (0..4000)
            .map(|_| [random.index(batch), random.index(m), random.index(n)])
            .chain([[batch - 1, m - 1, n - 1]])
            .collect();
        let expected: Vec<f32> = places
            .iter()
            .map(|&[matrix, row, col]| {
                let a = &a[(matrix * m + row) * k..][..k];
                let b = &b[(matrix % b_batch * n + col) * k..][..k];
                a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>() + bias[col]
            })
            .collect();
        let bias = upload(&client, &bias, &[n], dtype::<f32>());
        for float in [dtype::<half::bf16>(), dtype::<half::f16>()] {
            let a = upload_matrix(&client, &a, a_shape, float, a_memory);
            let b = upload_matrix(&client, &b, b_shape, float, b_memory);
            for out_dtype in float_types(&client) {
                let out = gemm_float(&client, &a, &b, Some(&bias), out_dtype);
                let out = read_float(&client, &out.expect("operands that fit"));
                let actual: Vec<f32> = places
                    .iter()
                    .map(|&[matrix, row, col]| out[(matrix * m + row) * n + col])
                    .collect();
                let what = format!("{batch} x {m} x {n} x {k}, {float} to {out_dtype}");
                assert_same_floats(&actual, &rounded(&expected, out_dtype), &what);
            }
        }
    }
}

/// A tensor of rank 4 in a larger buffer: its dimensions from the outermost in memory to the innermost, and the
/// elements between two stretches of the innermost.
#[derive(Debug, Clone, Copy)]
struct Placed {
    order: [usize; 4],
    gap: usize,
}

impl Placed {
    fn strides(self, shape: [usize; 4]) -> [usize; 4] {
        let mut strides = [0; 4];
        let mut stride = 1;
        for &dim in self.order.iter().rev() {
            strides[dim] = stride;
            stride = stride * shape[dim] + usize::from(dim == self.order[3]) * self.gap;
        }
        strides
    }

    /// The buffer, in which `fill` is what lies between the elements.
    fn buffer(self, x: &[f32], shape: [usize; 4], fill: f32) -> Vec<f32> {
        let strides = self.strides(shape);
        let inner = self.order[3];
        let stretches = shape.iter().product::<usize>() / shape[inner];
        let mut buffer = vec![fill; stretches * (shape[inner] + self.gap)];
        for (index, &x) in x.iter().enumerate() {
            let [_, heads, rows, cols] = shape;
            let (row, col) = (index / cols % rows, index % cols);
            let (outer, head) = (index / cols / rows / heads, index / cols / rows % heads);
            let place = std::iter::zip([outer, head, row, col], strides).map(|(i, s)| i * s);
            buffer[place.sum::<usize>()] = x;
        }
        buffer
    }

    fn upload(
        self,
        client: &Client,
        buffer: &[f32],
        shape: [usize; 4],
        float: StorageType,
    ) -> Tensor {
        let handle = upload(client, buffer, &[buffer.len()], float).handle;
        TensorHandle::new(handle, shape, self.strides(shape), float)
    }
}

/// The tensor as if it had so many matrices, where it has one for all.
fn expanded(mut tensor: Tensor, batch: [usize; 2]) -> Tensor {
    for (dim, extent) in batch.into_iter().enumerate() {
        if tensor.shape()[dim] < extent {
            tensor.metadata.shape_mut()[dim] = extent;
            tensor.metadata.strides_mut()[dim] = 0;
        }
    }
    tensor
}

/// Operands and outputs with two batch dimensions in all orders that attention has them in: `[batch, rows, heads,
/// features]` in memory, scores, and what is transposed of both. NaN lies between the operands' elements; what lies
/// between those of the output stays. Where an operand has fewer matrices, one serves several.
#[rstest]
#[case::scores([0, 2, 1, 3], [0, 2, 1, 3], [0, 1, 2, 3])]
#[case::values([0, 1, 2, 3], [0, 3, 1, 2], [0, 2, 1, 3])]
#[case::gradient_of_keys([0, 1, 3, 2], [0, 3, 1, 2], [0, 2, 1, 3])]
#[case::rows_outermost([2, 1, 0, 3], [1, 0, 2, 3], [2, 1, 0, 3])]
fn float_heads(
    #[case] a_order: [usize; 4],
    #[case] b_order: [usize; 4],
    #[case] out_order: [usize; 4],
    #[values(0, 3, 8)] out_gap: usize,
) {
    let (client, mut random) = (client(), Random::fresh());
    if !has_hopper(&client) {
        return;
    }
    let (brain, half, single) = (dtype::<half::bf16>(), dtype::<half::f16>(), dtype::<f32>());
    for (batch, a_batch, b_batch, m, n, k) in [
        ([2, 3], [2, 3], [2, 3], 200, 136, 64),
        ([1, 1], [1, 1], [1, 1], 77, 64, 128),
        ([2, 1], [2, 1], [2, 1], 93, 300, 57),
        ([1, 3], [1, 3], [1, 3], 45, 47, 128),
        ([3, 2], [3, 2], [1, 2], 130, 128, 72),
        ([2, 3], [1, 3], [2, 1], 64, 77, 200),
        ([2, 2], [2, 1], [1, 1], 1000, 1024, 64),
    ] {
        let mut operand = |[outer, inner]: [usize; 2], rows: usize, order: [usize; 4]| {
            let shape = [outer, inner, rows, k];
            let count = shape.iter().product();
            let x: Vec<f32> = (0..count).map(|_| random.index(17) as f32 - 8.0).collect();
            let innermost = shape[order[3]];
            let gap = innermost.next_multiple_of(8) - innermost + 8;
            let placed = Placed { order, gap };
            let buffer = placed.buffer(&x, shape, f32::NAN);
            (x, move |client: &Client, float| {
                placed.upload(client, &buffer, shape, float)
            })
        };
        let (a, upload_a) = operand(a_batch, m, a_order);
        let (b, upload_b) = operand(b_batch, n, b_order);
        let bias: Vec<f32> = (0..n).map(|_| random.index(100) as f32).collect();
        let shape = [batch[0], batch[1], m, n];
        let mut expected = Vec::with_capacity(shape.iter().product());
        for matrix in 0..batch[0] * batch[1] {
            let of = |operand: [usize; 2]| {
                let (outer, inner) = (matrix / batch[1], matrix % batch[1]);
                outer % operand[0] * operand[1] + inner % operand[1]
            };
            let (of_a, of_b) = (of(a_batch), of(b_batch));
            for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let a = &a[(of_a * m + row) * k..][..k];
                let b = &b[(of_b * n + col) * k..][..k];
                expected.push(std::iter::zip(a, b).map(|(a, b)| a * b).sum::<f32>());
            }
        }
        let placed = Placed {
            order: out_order,
            gap: out_gap,
        };
        for (float, out_dtype, biased) in [
            (brain, brain, false),
            (half, single, true),
            (half, half, false),
        ] {
            let mut expected = expected.clone();
            if biased {
                for (index, sum) in expected.iter_mut().enumerate() {
                    *sum += bias[index % n];
                }
            }
            let bias = biased.then(|| upload(&client, &bias, &[n], single));
            let expected = placed.buffer(&rounded(&expected, out_dtype), shape, -1.0);
            let out = placed.upload(&client, &vec![-1.0; expected.len()], shape, out_dtype);
            let a = expanded(upload_a(&client, float), batch);
            let mut b = upload_b(&client, float);
            if biased {
                b = expanded(b, batch);
            }
            assert!(gemm_float_reads(&client, &a) && gemm_float_reads(&client, &b));
            gemm_float_into(&client, &a, &b, bias.as_ref(), &out).expect("operands that fit");
            let whole = TensorHandle::new_contiguous(vec![expected.len()], out.handle, out_dtype);
            let what = format!("{batch:?} x {m} x {n} x {k}, {float} to {out_dtype}");
            assert_same_floats(&read_float(&client, &whole), &expected, &what);
        }
    }
}

/// NaN reaches its row and no other, and a K that is no multiple of a stage adds nothing.
#[test]
fn float_nan() {
    let client = client();
    if !has_hopper(&client) {
        return;
    }
    let (m, n, k) = (140, 72, 200);
    let mut x = vec![1.0; m * k];
    x[130 * k + 199] = f32::NAN;
    let a = upload(&client, &x, &[m, k], dtype::<half::bf16>());
    let b = upload(&client, &vec![0.5; n * k], &[n, k], dtype::<half::bf16>());
    let out = gemm_float(&client, &a, &b, None, dtype::<f32>()).expect("operands that fit");
    for (index, value) in read_float(&client, &out).into_iter().enumerate() {
        if index / n == 130 {
            assert!(value.is_nan(), "column {}", index % n);
        } else {
            assert_eq!(value, 100.0, "row {}, column {}", index / n, index % n);
        }
    }
}

/// The float kernel refuses operands that it cannot read, or was not meant for, and says which.
#[test]
fn float_rejects() {
    let client = client();
    let matrix = |rows: usize, cols: usize, float| {
        upload(&client, &vec![1.0; rows * cols], &[rows, cols], float)
    };
    let f16 = dtype::<half::f16>();
    let product = |a: &Tensor, b: &Tensor| gemm_float(&client, a, b, None, dtype::<f32>());
    let single = matrix(8, 8, dtype::<f32>());
    assert!(matches!(
        product(&single, &single),
        Err(KernelError::Dtype { .. })
    ));
    let (a, b) = (matrix(8, 8, f16), matrix(8, 16, f16));
    assert!(matches!(product(&a, &b), Err(KernelError::Shape { .. })));
    let odd = matrix(9, 9, f16);
    assert!(matches!(
        product(&odd, &odd),
        Err(KernelError::Unsupported { .. })
    ));
    let empty = matrix(8, 0, f16);
    assert!(matches!(
        product(&empty, &empty),
        Err(KernelError::Unsupported { .. })
    ));
    // One row for all, which TMA does not read, and more batch dimensions than it has.
    let strided = |shape: &[usize], strides: &[usize], float| {
        let handle = matrix(8, 1024, float).handle;
        TensorHandle::new(handle, shape, strides, float)
    };
    let expanded = strided(&[8, 8], &[0, 1], f16);
    assert!(!gemm_float_reads(&client, &expanded));
    assert!(matches!(
        product(&expanded, &expanded),
        Err(KernelError::Unsupported { .. })
    ));
    let deep = strided(&[1, 2, 2, 8, 8], &[256, 128, 64, 8, 1], f16);
    assert!(!gemm_float_reads(&client, &deep) && !gemm_float_reads(&client, &single));
    assert!(matches!(product(&deep, &a), Err(KernelError::Shape { .. })));
}

/// Outputs in which elements would share a place, or that are others than the product's.
#[rstest]
#[case::other_shape(&[2, 3, 8, 8], &[192, 64, 8, 1])]
#[case::other_rank(&[2, 8, 8], &[64, 8, 1])]
#[case::neighbours_along_rows(&[2, 2, 8, 8], &[128, 64, 1, 8])]
#[case::heads_in_one_place(&[2, 2, 8, 8], &[64, 0, 8, 1])]
#[case::rows_overlap(&[2, 2, 8, 8], &[128, 64, 7, 1])]
#[case::heads_overlap(&[2, 2, 8, 8], &[256, 8, 15, 1])]
fn float_rejects_outputs(#[case] shape: &[usize], #[case] strides: &[usize]) {
    let client = client();
    let half = dtype::<half::f16>();
    let operand = upload(&client, &[1.0; 256], &[2, 2, 8, 8], half);
    let memory = upload(&client, &[0.0; 1024], &[1024], half).handle;
    let out = TensorHandle::new(memory, shape, strides, half);
    let result = gemm_float_into(&client, &operand, &operand, None, &out);
    match has_hopper(&client) {
        true => assert!(matches!(result, Err(KernelError::Shape { .. }))),
        false => assert!(matches!(result, Err(KernelError::Unsupported { .. }))),
    }
}
