//! The integers and scales of every backend are the reference's, to the bit; products lie within rounding of float64.

use burn::tensor::{DType, FloatDType, Tensor, TensorData, backend::Backend, ops::FloatTensor};
use burn_quant_train::data::{
    DataBackend, Layout, StochasticKey,
    product::{Accumulation, product},
    quantize::{
        Fallback, FallbackQuantized, Format, QuantizeSpec, Quantized, Residual, Scales, dequantize,
        quantize, quantize_fallback,
    },
    threshold::{DelayThreshold, ThresholdFactor, Thresholds, delay_threshold},
};
use cubecl_kernels::{
    delay_threshold as kernel,
    granularity::Granularity,
    number::Number,
    reference::{self, ReferenceFallbackQuantized, ReferenceQuantized},
    rounding::Rounding,
    scale::ScaleNumber,
    shape::MatrixShape,
};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{
        first_difference, float_product_error, lifted, primitive, primitive_floats, primitive_ints,
        same_bits, tensor,
    },
    on_every_backend, supports,
};

on_every_backend! {
    blocks => quantize_blocks;
    other_granularities => quantize_granularities;
    every_number => quantize_numbers;
    products_of_every_number => number_products;
    fallback => quantize_with_fallback;
    fallback_of_blocks_with_nan_or_inf => fallback_not_finite;
    products_of_a_linear_layer => products;
    products_in_half_precision => half_products;
    products_of_other_granularities => other_products;
    thresholds => controllers;
    the_smallest_matrix => smallest;
}

/// The kind of elements that a matrix has.
#[derive(Debug, Clone, Copy)]
enum Values {
    Normal,
    Outliers,
    ZeroBlocks,
    Zeros,
    Denormal,
    /// Block maxima around the smallest one that gets a scale.
    Tiny,
    Huge,
    OneNan,
    OneInf,
    /// Exact ties between two integers.
    Ties,
}

const ALL: [Values; 10] = [
    Values::Normal,
    Values::Outliers,
    Values::ZeroBlocks,
    Values::Zeros,
    Values::Denormal,
    Values::Tiny,
    Values::Huge,
    Values::OneNan,
    Values::OneInf,
    Values::Ties,
];

fn matrix(rng: &mut Rng, [rows, cols]: [usize; 2], kind: Values) -> Vec<f32> {
    let mut x = rng.normals(rows * cols, 1.0);
    let count = x.len();
    match kind {
        Values::Normal => {}
        Values::Outliers => {
            for _ in 0..1 + count / 500 {
                x[rng.below(count)] *= 1000.0;
            }
        }
        Values::ZeroBlocks => {
            for (index, x) in x.iter_mut().enumerate() {
                if (index / cols / 16 + index % cols / 16).is_multiple_of(2) {
                    *x = if index % 3 == 0 { -0.0 } else { 0.0 };
                }
            }
        }
        Values::Zeros => x.fill(0.0),
        Values::Denormal => x.iter_mut().for_each(|x| *x *= 1e-40),
        Values::Tiny => {
            let step = 2f32.powi(-101);
            x.iter_mut().for_each(|x| *x *= step);
        }
        Values::Huge => x.iter_mut().for_each(|x| *x *= 1e37),
        Values::OneNan => x[rng.below(count)] = f32::NAN,
        Values::OneInf => {
            x[rng.below(count)] = if rng.uniform() < 0.5 {
                f32::INFINITY
            } else {
                f32::NEG_INFINITY
            }
        }
        Values::Ties => {
            x.iter_mut()
                .for_each(|x| *x = (*x * 20.0).round().clamp(-126.0, 126.0) + 0.5);
            for row in 0..rows.div_ceil(16) {
                for col in 0..cols.div_ceil(16) {
                    x[row * 16 * cols + col * 16] = 127.0;
                }
            }
        }
    }
    x
}

/// How a matrix reaches the operation.
#[derive(Debug, Clone, Copy)]
enum Form {
    Plain,
    Transposed,
    Sliced,
    Broadcast,
    Bf16,
    F16,
}

const FORMS: [Form; 6] = [
    Form::Plain,
    Form::Transposed,
    Form::Sliced,
    Form::Broadcast,
    Form::Bf16,
    Form::F16,
];

/// The matrix `x` in this form, and its values as the operation sees them.
fn in_form<B: Backend>(
    rng: &mut Rng,
    x: &[f32],
    [rows, cols]: [usize; 2],
    form: Form,
) -> (FloatTensor<B>, Vec<f32>) {
    let device = B::Device::default();
    let plain = |x: &[f32]| tensor::<B, 2>(x, [rows, cols], &device);
    let (tensor, values) = match form {
        Form::Plain => (plain(x), x.to_vec()),
        Form::Transposed => {
            let turned = reference::transpose(x, MatrixShape::new(rows, cols));
            (
                tensor::<B, 2>(&turned, [cols, rows], &device).swap_dims(0, 1),
                x.to_vec(),
            )
        }
        Form::Sliced => {
            let (top, left) = (1 + rng.below(5), 1 + rng.below(5));
            let (big_rows, big_cols) = (rows + top + 2, cols + left + 3);
            let mut big = rng.normals(big_rows * big_cols, 1e6);
            for (row, values) in x.chunks(cols).enumerate() {
                big[(top + row) * big_cols + left..][..cols].copy_from_slice(values);
            }
            let big = tensor::<B, 2>(&big, [big_rows, big_cols], &device);
            (big.slice([top..top + rows, left..left + cols]), x.to_vec())
        }
        Form::Broadcast => {
            let row = tensor::<B, 2>(&x[..cols], [1, cols], &device);
            (row.expand([rows, cols]), x[..cols].repeat(rows))
        }
        Form::Bf16 => {
            let values: Vec<f32> = x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            (plain(&values).cast(DType::BF16), values)
        }
        Form::F16 => {
            let values: Vec<f32> = x.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            (plain(&values).cast(DType::F16), values)
        }
    };
    (primitive(tensor), values)
}

/// Denormal numbers of the half formats and FP32 survive a cast on the host only; GPUs may flush them.
fn fits(kind: Values, form: Form) -> bool {
    match form {
        Form::F16 => matches!(
            kind,
            Values::Normal
                | Values::ZeroBlocks
                | Values::Zeros
                | Values::OneNan
                | Values::OneInf
                | Values::Ties
        ),
        Form::Bf16 => !matches!(kind, Values::Denormal),
        _ => true,
    }
}

fn supports_form<B: Backend>(form: Form) -> bool {
    match form {
        Form::Bf16 => supports::<B>(DType::BF16),
        Form::F16 => supports::<B>(DType::F16),
        Form::Plain | Form::Transposed | Form::Sliced | Form::Broadcast => true,
    }
}

/// INT8, to nearest.
fn int8(granularity: Granularity, layout: Layout) -> QuantizeSpec {
    QuantizeSpec::int8(granularity).with_layout(layout)
}

/// To nearest, and by random numbers of this key.
fn roundings(key: StochasticKey) -> [Rounding; 2] {
    [Rounding::Nearest, Rounding::Stochastic(key)]
}

/// The reference's answer to a spec.
fn expected_of(x: &[f32], shape: [usize; 2], spec: &QuantizeSpec) -> ReferenceQuantized {
    reference::quantize(x, shape_of(shape), spec)
}

fn shape_of([rows, cols]: [usize; 2]) -> MatrixShape {
    MatrixShape::new(rows, cols)
}

/// Everything in a quantized matrix against the reference.
fn compare<B: DataBackend>(
    quantized: &Quantized<B>,
    expected: &ReferenceQuantized,
    layout: Layout,
    what: &str,
) {
    assert_eq!(
        quantized.shape,
        [expected.shape.rows, expected.shape.cols],
        "{what}: shape"
    );
    let mut copies = 0;
    if let Some(values) = &quantized.values {
        assert_eq!(
            primitive_ints::<B>(values),
            expected.values,
            "{what}: values"
        );
        copies += 1;
    }
    if let Some(transposed) = &quantized.transposed {
        let turned = reference::transpose(&expected.values, expected.shape);
        assert_eq!(
            primitive_ints::<B>(transposed),
            turned,
            "{what}: transposed values"
        );
        copies += 1;
    }
    assert!(
        copies > 0,
        "{what}: no copy of the values, asked for {layout:?}"
    );
    let Scales::F32(scales) = &quantized.scales else {
        panic!("{what}: scales of {:?}", quantized.format.scale);
    };
    let scales = primitive_floats::<B, 2>(scales);
    let difference = first_difference(&scales, &expected.scales);
    assert!(
        difference.is_none(),
        "{what}: scale {difference:?} (index, got, expected)"
    );
}

fn odd_shape(rng: &mut Rng) -> [usize; 2] {
    [1 + rng.below(140), 1 + rng.below(140)]
}

/// Every kind of values in every form, at a random shape, with a random block, rounding and layout.
fn quantize_blocks<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut checked = 0;
    let blocks = rng.drawn([16, 32, 64, 128], 1);
    let layouts = rng.drawn([Layout::RowMajor, Layout::Transposed, Layout::Both], 1);
    for kind in ALL {
        for form in FORMS {
            if !fits(kind, form) || !supports_form::<B>(form) {
                continue;
            }
            let shape = odd_shape(&mut rng);
            let (block, layout) = (rng.pick(&blocks), rng.pick(&layouts));
            let key = StochasticKey {
                seed: rng.bits(),
                stream: rng.bits(),
            };
            let x = matrix(&mut rng, shape, kind);
            for rounding in roundings(key) {
                let what = format!(
                    "seed {seed}: {kind:?} {form:?} {shape:?} block {block} {rounding:?} {layout:?}"
                );
                let (input, values) = in_form::<B>(&mut rng, &x, shape, form);
                let spec = QuantizeSpec {
                    rounding,
                    ..int8(Granularity::Block(block), layout)
                };
                let quantized = quantize::<B>(input, &spec);
                assert_eq!(quantized.format, Format::of(&spec), "{what}");
                let expected = expected_of(&values, shape, &spec);
                compare(&quantized, &expected, layout, &what);
                let back = primitive_floats::<B, 2>(&dequantize::<B>(&quantized, FloatDType::F32));
                let difference = first_difference(&back, &reference::dequantize(&expected));
                // 0 and -0 are the same number.
                assert!(
                    difference.is_none_or(|(_, a, b)| a == b),
                    "{what}: dequantized {difference:?} (index, got, expected)"
                );
                checked += 1;
            }
        }
    }
    assert!(checked >= 2 * 4 * ALL.len(), "only {checked} cases ran");
}

fn quantize_granularities<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let granularities = [
        Granularity::Group(16),
        Granularity::Group(64),
        Granularity::Group(128),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor,
    ];
    for granularity in granularities {
        for kind in [
            Values::Normal,
            Values::Outliers,
            Values::ZeroBlocks,
            Values::OneNan,
            Values::Zeros,
        ] {
            let shape = odd_shape(&mut rng);
            let form = rng.pick(&[Form::Plain, Form::Transposed, Form::Sliced]);
            let what = format!("seed {seed}: {granularity:?} {kind:?} {form:?} {shape:?}");
            let x = matrix(&mut rng, shape, kind);
            let (input, values) = in_form::<B>(&mut rng, &x, shape, form);
            let spec = int8(granularity, Layout::Both);
            let quantized = quantize::<B>(input, &spec);
            let expected = expected_of(&values, shape, &spec);
            compare(&quantized, &expected, Layout::Both, &what);
        }
    }
}

const GRANULARITIES: [Granularity; 5] = [
    Granularity::Block(32),
    Granularity::Group(16),
    Granularity::Token,
    Granularity::Channel,
    Granularity::Tensor,
];

/// Every number that matrices hold, with scales of every kind. Codes may be packed, so what they stand for is compared,
/// which no rounding separates from the codes.
fn quantize_numbers<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for number in Number::SYMMETRIC {
        for scale in [ScaleNumber::F32, ScaleNumber::E8M0, ScaleNumber::E4M3] {
            let kind = rng.pick(&[Values::Outliers, Values::ZeroBlocks, Values::OneNan]);
            let (form, shape) = (
                rng.pick(&[Form::Plain, Form::Transposed]),
                odd_shape(&mut rng),
            );
            let key = StochasticKey {
                seed: rng.bits(),
                stream: rng.bits(),
            };
            let spec = QuantizeSpec::new(number, rng.pick(&GRANULARITIES))
                .with_scale(scale)
                .with_rounding(rng.pick(&roundings(key)))
                .with_layout(rng.pick(&[Layout::RowMajor, Layout::Transposed, Layout::Both]));
            let what = format!("seed {seed}: {kind:?} {form:?} {shape:?} {spec:?}");
            let x = matrix(&mut rng, shape, kind);
            let (input, values) = in_form::<B>(&mut rng, &x, shape, form);
            let quantized = quantize::<B>(input, &spec);
            assert_eq!(quantized.format, Format::of(&spec), "{what}");
            let back = primitive_floats::<B, 2>(&dequantize::<B>(&quantized, FloatDType::F32));
            let expected = expected_of(&values, shape, &spec);
            let difference = first_difference(&back, &reference::dequantize(&expected));
            assert!(
                difference.is_none_or(|(_, a, b)| a == b),
                "{what}: {difference:?} (index, got, expected)"
            );
        }
    }
}

/// A product of two operands of any numbers, in the granularities that products have.
fn number_products<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for left in Number::SYMMETRIC {
        let right = rng.pick(&Number::SYMMETRIC);
        let scale = rng.pick(&[ScaleNumber::F32, ScaleNumber::E8M0, ScaleNumber::E4M3]);
        let [m, k, n] = [1 + rng.below(70), 1 + rng.below(150), 1 + rng.below(70)];
        let layout = rng.pick(&[Layout::RowMajor, Layout::Transposed, Layout::Both]);
        // The right operand is quantized as its transpose, whose rows the product sums over.
        let mut make = |shape: [usize; 2], number| {
            let granularities = [
                Granularity::Block(32),
                Granularity::Group(16),
                Granularity::Token,
            ];
            let spec = QuantizeSpec::new(number, rng.pick(&granularities)).with_layout(layout);
            let spec = if number == left {
                spec
            } else {
                spec.with_scale(scale)
            };
            let x = matrix(&mut rng, shape, Values::Normal);
            let input = in_form::<B>(&mut rng, &x, shape, Form::Plain).0;
            (quantize::<B>(input, &spec), expected_of(&x, shape, &spec))
        };
        let (a, a_expected) = make([m, k], left);
        let (b, b_expected) = make([n, k], right);
        let c = product::<B>(
            a.operand(),
            None,
            b.operand().t(),
            None,
            Accumulation::Promoted,
            FloatDType::F32,
        );
        let exact = reference::gemm(&a_expected, &b_expected, None, None);
        let error = frobenius(&primitive_floats::<B, 2>(&c), &exact);
        let is_exact = |format: Format| {
            matches!(format.number, Number::Int4 | Number::Int8) && format.scale == ScaleNumber::F32
        };
        let bound = match is_exact(a.format) && is_exact(b.format) {
            true => 1e-6,
            false => float_product_error::<B>(),
        };
        assert!(
            error <= bound,
            "seed {seed}: {:?} x {:?} [{m}, {k}, {n}]: {error:e}",
            a.format,
            b.format
        );
    }
}

/// Quantizes with fallback as layer 1 of 3, and compares everything but the residual of blocks that did not fall back.
fn fallback_case<B: DataBackend>(
    input: FloatTensor<B>,
    values: &[f32],
    shape: [usize; 2],
    block: usize,
    threshold: f32,
    what: &str,
) -> (Quantized<B>, Residual<B>, ReferenceFallbackQuantized) {
    let device = B::Device::default();
    let thresholds = primitive(tensor::<B, 1>(&[f32::MAX, threshold, 0.0], [3], &device));
    // Counters go up from where they are.
    let before = [[5, 7], [2, 9], [0, 0]];
    let counts = B::int_from_data(TensorData::new(before.concat(), [3, 2]), &device);
    let spec = int8(Granularity::Block(block), Layout::RowMajor);
    let state = Fallback {
        layer: 1,
        thresholds,
        counts,
    };
    let quantized = quantize_fallback::<B>(input, &spec, state);
    let FallbackQuantized {
        base,
        residual,
        counts,
    } = quantized;
    let expected = reference::quantize_fallback(values, shape_of(shape), block, threshold);
    compare(
        &base,
        &expected.base,
        Layout::RowMajor,
        &format!("{what}, base"),
    );

    let [fallback, total] = expected.counts();
    let counts = primitive_ints::<B>(&counts);
    assert_eq!(
        counts,
        [5, 7, 2 + fallback, 9 + total, 0, 0],
        "{what}: counters"
    );
    let scales = primitive_floats::<B, 2>(&residual.scales);
    let difference = first_difference(&scales, &expected.residual.scales);
    assert!(
        difference.is_none(),
        "{what}: residual's scale {difference:?} (index, got, expected)"
    );
    if let Some(indicator) = &residual.indicator {
        let flags: Vec<bool> = primitive_ints::<B>(indicator)
            .iter()
            .map(|&flag| flag != 0)
            .collect();
        assert_eq!(flags, expected.flags, "{what}: indicator");
    }
    let got = primitive_ints::<B>(&residual.values);
    for (index, (got, wanted)) in got.iter().zip(&expected.residual.values).enumerate() {
        let block = expected
            .base
            .block_of(0, index / shape[1], index % shape[1]);
        assert!(
            !expected.flags[block] || got == wanted,
            "{what}: residual {index}: {got}, expected {wanted}"
        );
    }
    (base, residual, expected)
}

/// A threshold that no block exceeds, that every block (but empty ones) does, or the median of the blocks' maxima.
fn threshold_for(rng: &mut Rng, values: &[f32], shape: [usize; 2], block: usize) -> f32 {
    match rng.below(4) {
        0 => f32::MAX,
        1 => 0.0,
        _ => {
            let spec = int8(Granularity::Block(block), Layout::RowMajor);
            let blocks = expected_of(values, shape, &spec);
            let mut maxima: Vec<f32> = blocks
                .scales
                .iter()
                .filter(|scale| !scale.is_nan())
                .map(|scale| scale * 127.0)
                .collect();
            maxima.sort_by(f32::total_cmp);
            maxima.get(maxima.len() / 2).copied().unwrap_or(1.0)
        }
    }
}

fn quantize_with_fallback<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let finite = ALL
        .into_iter()
        .filter(|kind| !matches!(kind, Values::OneNan | Values::OneInf));
    let blocks = rng.drawn([16, 32, 64, 128], 1);
    for kind in finite {
        for form in FORMS {
            if !fits(kind, form) || !supports_form::<B>(form) {
                continue;
            }
            let shape = odd_shape(&mut rng);
            let block = rng.pick(&blocks);
            let x = matrix(&mut rng, shape, kind);
            let (input, values) = in_form::<B>(&mut rng, &x, shape, form);
            let threshold = threshold_for(&mut rng, &values, shape, block);
            let what = format!(
                "seed {seed}: {kind:?} {form:?} {shape:?} block {block} threshold {threshold:e}"
            );
            fallback_case::<B>(input, &values, shape, block, threshold, &what);
        }
    }
}

/// A block with NaN or Inf does not fall back, dequantizes to NaN, and leaves the others alone.
fn fallback_not_finite<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for kind in [Values::OneNan, Values::OneInf] {
        for threshold in [0.0, f32::MAX] {
            let shape = [50, 70];
            let x = matrix(&mut rng, shape, kind);
            let input = in_form::<B>(&mut rng, &x, shape, Form::Plain).0;
            let what = format!("seed {seed}: {kind:?} threshold {threshold:e}");
            fallback_case::<B>(input, &x, shape, 32, threshold, &what);
        }
    }
}

/// A product's error against float64 over the same quantized values, relative, in the Frobenius norm.
fn frobenius(got: &[f32], exact: &[f64]) -> f64 {
    let error: f64 = got
        .iter()
        .zip(exact)
        .map(|(got, exact)| (f64::from(*got) - exact).powi(2))
        .sum();
    let norm: f64 = exact.iter().map(|exact| exact.powi(2)).sum();
    (error / norm.max(f64::MIN_POSITIVE)).sqrt()
}

struct Problem<B: DataBackend> {
    x: (Quantized<B>, ReferenceQuantized),
    forward_x: (
        Quantized<B>,
        Option<Residual<B>>,
        ReferenceFallbackQuantized,
    ),
    w: (Quantized<B>, ReferenceQuantized),
    dy: (Quantized<B>, ReferenceQuantized),
    bias: Vec<f32>,
    sizes: [usize; 3],
    what: String,
}

/// The operands of a linear layer's three products, quantized in the layouts that the layer asks for.
fn problem<B: DataBackend>(rng: &mut Rng, seed: u64, kind: Values) -> Problem<B> {
    let sizes = [1 + rng.below(120), 1 + rng.below(150), 1 + rng.below(120)];
    let [m, k, n] = sizes;
    let block = rng.pick(&[16, 32, 64, 128]);
    let mut make = |shape: [usize; 2], kind: Values, layout: Layout, stochastic: bool| {
        let x = matrix(rng, shape, kind);
        let key = StochasticKey {
            seed: rng.bits(),
            stream: rng.bits(),
        };
        let spec = QuantizeSpec {
            rounding: roundings(key)[usize::from(stochastic)],
            ..int8(Granularity::Block(block), layout)
        };
        let input = in_form::<B>(rng, &x, shape, Form::Plain).0;
        let quantized = quantize::<B>(input, &spec);
        (quantized, expected_of(&x, shape, &spec))
    };
    let x = make([m, k], kind, Layout::Transposed, true);
    let w = make([k, n], Values::Normal, Layout::Both, false);
    let dy = make([m, n], kind, Layout::Both, true);
    let values = matrix(rng, [m, k], kind);
    let threshold = threshold_for(rng, &values, [m, k], block);
    let what =
        format!("seed {seed}: {kind:?} [{m}, {k}, {n}] block {block} threshold {threshold:e}");
    let input = in_form::<B>(rng, &values, [m, k], Form::Plain).0;
    let (base, residual, expected) =
        fallback_case::<B>(input, &values, [m, k], block, threshold, &what);
    let residual = (rng.uniform() < 0.8).then_some(residual);
    Problem {
        x,
        forward_x: (base, residual, expected),
        w,
        dy,
        bias: rng.normals(n, 1.0),
        sizes,
        what,
    }
}

impl<B: DataBackend> Problem<B> {
    fn bias(&self) -> FloatTensor<B> {
        primitive(tensor::<B, 1>(
            &self.bias,
            [self.bias.len()],
            &B::Device::default(),
        ))
    }

    /// Y = X W + bias, and its exact value.
    fn forward(&self, dtype: FloatDType) -> (FloatTensor<B>, Vec<f64>) {
        let (base, residual, expected) = &self.forward_x;
        let y = product::<B>(
            base.operand(),
            residual.as_ref(),
            self.w.0.operand(),
            Some(self.bias()),
            Accumulation::Promoted,
            dtype,
        );
        let fallback = residual.is_some().then_some(expected);
        (
            y,
            reference::gemm(
                &expected.base,
                &self.w.1.transposed(),
                fallback,
                Some(&self.bias),
            ),
        )
    }

    /// dX = dY Wᵀ.
    fn grad_x(&self, dtype: FloatDType) -> (FloatTensor<B>, Vec<f64>) {
        let dx = product::<B>(
            self.dy.0.operand(),
            None,
            self.w.0.operand().t(),
            None,
            Accumulation::Promoted,
            dtype,
        );
        (dx, reference::gemm(&self.dy.1, &self.w.1, None, None))
    }

    /// dW = Xᵀ dY.
    fn grad_w(&self, dtype: FloatDType) -> (FloatTensor<B>, Vec<f64>) {
        let dw = product::<B>(
            self.x.0.operand().t(),
            None,
            self.dy.0.operand(),
            None,
            Accumulation::Promoted,
            dtype,
        );
        (
            dw,
            reference::gemm(&self.x.1.transposed(), &self.dy.1.transposed(), None, None),
        )
    }
}

fn products<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for kind in [
        Values::Normal,
        Values::Outliers,
        Values::ZeroBlocks,
        Values::Normal,
        Values::Outliers,
        Values::Outliers,
    ] {
        let problem = problem::<B>(&mut rng, seed, kind);
        let [m, k, n] = problem.sizes;
        let cases = [
            ("Y", [m, n], problem.forward(FloatDType::F32)),
            ("dX", [m, k], problem.grad_x(FloatDType::F32)),
            ("dW", [k, n], problem.grad_w(FloatDType::F32)),
        ];
        for (name, shape, (got, exact)) in cases {
            let got = lifted::<B, 2>(got);
            assert_eq!(
                (got.dims(), got.dtype()),
                (shape, DType::F32),
                "{}: {name}",
                problem.what
            );
            let got: Vec<f32> = got.to_data().iter::<f32>().collect();
            let error = frobenius(&got, &exact);
            assert!(
                error <= 1e-6,
                "{}: {name}: relative error {error:e}",
                problem.what
            );
        }
    }
}

/// BF16 and F16 results are the exact ones rounded once: half a unit in the last place, and what FP32 accumulation
/// adds.
fn half_products<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let formats = [
        (FloatDType::BF16, DType::BF16, 2f64.powi(-8)),
        (FloatDType::F16, DType::F16, 2f64.powi(-11)),
    ];
    for kind in [Values::Normal, Values::ZeroBlocks, Values::Normal] {
        let problem = problem::<B>(&mut rng, seed, kind);
        for (float, dtype, half_unit) in formats {
            if !supports::<B>(dtype) {
                continue;
            }
            let cases = [
                ("Y", problem.forward(float), problem.sizes[1]),
                ("dX", problem.grad_x(float), problem.sizes[2]),
                ("dW", problem.grad_w(float), problem.sizes[0]),
            ];
            for (name, (got, exact), depth) in cases {
                let got = lifted::<B, 2>(got);
                assert_eq!(got.dtype(), dtype, "{}: {name}", problem.what);
                // Operands are below 6 (their products below 36), F16's smallest step is 2^-24.
                let accumulation = 36.0 * depth as f64 * 2f64.powi(-22);
                for (got, exact) in got.to_data().iter::<f32>().zip(exact) {
                    let bound = half_unit * exact.abs() + accumulation.min(1e-3) + 2f64.powi(-25);
                    let error = (f64::from(got) - exact).abs();
                    assert!(
                        error <= bound,
                        "{}: {name} {dtype:?}: {got}, exactly {exact}",
                        problem.what
                    );
                }
            }
        }
    }
}

/// Y = X W with X per token and W per channel, or both per tensor, as the table of recipes to come has them.
fn other_products<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let pairs = [
        (Granularity::Token, Granularity::Channel),
        (Granularity::Tensor, Granularity::Tensor),
    ];
    for (x_granularity, w_granularity) in pairs {
        let [m, k, n] = [1 + rng.below(90), 1 + rng.below(200), 1 + rng.below(90)];
        let mut make = |shape: [usize; 2], granularity: Granularity| {
            let x = matrix(&mut rng, shape, Values::Normal);
            let spec = int8(granularity, Layout::Both);
            let input = in_form::<B>(&mut rng, &x, shape, Form::Plain).0;
            (quantize::<B>(input, &spec), expected_of(&x, shape, &spec))
        };
        let (x, x_expected) = make([m, k], x_granularity);
        let (w, w_expected) = make([k, n], w_granularity);
        let y = product::<B>(
            x.operand(),
            None,
            w.operand(),
            None,
            Accumulation::Promoted,
            FloatDType::F32,
        );
        let exact = reference::gemm(&x_expected, &w_expected.transposed(), None, None);
        let error = frobenius(&primitive_floats::<B, 2>(&y), &exact);
        assert!(
            error <= 1e-6,
            "seed {seed}: {x_granularity:?} x {w_granularity:?} [{m}, {k}, {n}]: {error:e}"
        );
    }
}

/// The paper's controller, and the one with factors that adapt.
fn controllers<B: DataBackend>(seed: u64) {
    for (factor, alpha_min) in [
        (ThresholdFactor::Constant, 1.3),
        (ThresholdFactor::Adaptive { smallest: 1.01 }, 1.01),
    ] {
        let config = DelayThreshold {
            initial: 1.0,
            rate_min: 0.1,
            rate_max: 0.3,
            alpha: 1.3,
            factor,
        };
        let expected = kernel::DelayThreshold {
            r_min: 0.1,
            r_max: 0.3,
            alpha: 1.3,
            alpha_min,
        };
        controller::<B>(seed, &config, &expected);
    }
}

/// A few steps of a controller over many layers, from random counters, some of them at zero.
fn controller<B: DataBackend>(
    seed: u64,
    config: &DelayThreshold,
    expected_config: &kernel::DelayThreshold,
) {
    let mut rng = Rng::new(seed);
    let device = B::Device::default();
    let layers = 70;
    let mut thresholds: Vec<f32> = (0..layers)
        .map(|_| (4.0 * rng.normal()).exp() as f32)
        .collect();
    // At both ends of the range that the controller moves in.
    thresholds[0] = kernel::MIN_THRESHOLD;
    thresholds[1] = kernel::MAX_THRESHOLD;
    let mut rates = vec![f32::NAN; layers];
    let mut moves = vec![0.0; layers];
    let mut state = Thresholds::<B>::new(&thresholds, &moves, &rates, &device);
    for step in 0..6 {
        let mut counts: Vec<[i32; 2]> = (0..layers)
            .map(|_| {
                let total = if rng.uniform() < 0.2 {
                    0
                } else {
                    1 + rng.below(5000)
                };
                // Rates from 0 to 1, and those at the very ends of the range.
                let fallback = match rng.below(4) {
                    0 => total / 10,
                    1 => total * 3 / 10,
                    _ => {
                        if total == 0 {
                            0
                        } else {
                            rng.below(total + 1)
                        }
                    }
                };
                [fallback as i32, total as i32]
            })
            .collect();
        counts[0] = [0, 10];
        counts[1] = [10, 10];
        state.counts = B::int_from_data(TensorData::new(counts.concat(), [layers, 2]), &device);
        state = delay_threshold::<B>(state, config);
        reference::delay_threshold(
            &mut thresholds,
            &mut moves,
            &mut counts,
            &mut rates,
            expected_config,
        );
        let what = format!("seed {seed}, step {step}");
        let got = primitive_floats::<B, 1>(&state.thresholds);
        assert!(
            same_bits(&got, &thresholds),
            "{what}: thresholds {:?}",
            first_difference(&got, &thresholds)
        );
        let got = primitive_floats::<B, 1>(&state.moves);
        assert!(
            same_bits(&got, &moves),
            "{what}: moves {:?}",
            first_difference(&got, &moves)
        );
        let got = primitive_floats::<B, 1>(&state.rates);
        assert!(
            same_bits(&got, &rates),
            "{what}: rates {:?}",
            first_difference(&got, &rates)
        );
        assert!(
            primitive_ints::<B>(&state.counts)
                .iter()
                .all(|&count| count == 0),
            "{what}: counters"
        );
    }
}

fn smallest<B: DataBackend>(_seed: u64) {
    // Layers leave empty inputs to the inner backend; an all-zero matrix of one element is the smallest that is
    // quantized.
    let device = B::Device::default();
    let zero = Tensor::<B, 2>::zeros([1, 1], &device);
    let spec = int8(Granularity::Block(16), Layout::Both);
    let quantized = quantize::<B>(primitive(zero), &spec);
    let Scales::F32(scales) = &quantized.scales else {
        panic!("scales of {:?}", quantized.format.scale);
    };
    assert_eq!(primitive_floats::<B, 2>(scales), [0.0]);
    let product = product::<B>(
        quantized.operand(),
        None,
        quantized.operand().t(),
        None,
        Accumulation::Promoted,
        FloatDType::F32,
    );
    assert_eq!(primitive_floats::<B, 2>(&product), [0.0]);
}
