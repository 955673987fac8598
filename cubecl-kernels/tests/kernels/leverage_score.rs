//! Leverage score sampling on the host and on the device, against the reference, and what the reference promises.

use cubecl_kernels::{
    granularity::Granularity,
    host::{self, HostBitSplit, HostQuantized, HostRowSample, HostScales},
    leverage_score::{ROUNDS, capacity},
    number::Number,
    quantize::QuantizeSpec,
    reference::{
        self, ReferenceBitSplit, ReferenceQuantized, ReferenceRowSample,
        leverage_score::{probabilities, root, sum_in_lanes},
    },
    rounding::Rounding,
    shape::MatrixShape,
};

use crate::{
    bit_splitting::{gradients, stochastic},
    host::assert_same,
    random::Random,
};

/// Rows, columns of the gradient, columns of X.
const SIZES: [[usize; 3]; 6] = [
    [1, 1, 1],
    [1, 40, 7],
    [3, 17, 16],
    [67, 33, 130],
    [130, 64, 48],
    [300, 144, 257],
];

const INT4: QuantizeSpec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);

/// An input of `rows`, some of which are 0.
fn input(random: &mut Random, rows: usize, cols: usize) -> Vec<f32> {
    let zero_rows: Vec<bool> = (0..rows).map(|_| random.uniform() < 0.1).collect();
    (0..rows * cols)
        .map(|index| match zero_rows[index / cols] {
            true => 0.0,
            false => random.normal(),
        })
        .collect()
}

/// Scores of all kinds with the sum that their probabilities shall have: equal, of a wide range, sparse, powers of 2,
/// one above all others, none.
fn scores_and_sums(random: &mut Random, stacked: usize) -> Vec<(Vec<f32>, usize)> {
    let rows = stacked / 2;
    let wide: Vec<f32> = (0..stacked)
        .map(|_| (6.0 * random.normal()).exp().clamp(1.0, 1e9))
        .collect();
    let sparse = wide
        .iter()
        .map(|&score| if random.uniform() < 0.7 { 0.0 } else { score })
        .collect();
    let powers = (0..stacked)
        .map(|row| 2f32.powi((row % 60) as i32))
        .collect();
    let mut one_large = vec![1.0; stacked];
    one_large[random.index(stacked)] = 1e9;
    vec![
        (vec![3.0; stacked], rows),
        (wide.clone(), rows),
        (wide.clone(), 1),
        (wide.clone(), stacked - 1),
        (wide, stacked),
        (sparse, rows),
        (powers, rows),
        (one_large, rows),
        (vec![0.0; stacked], rows),
    ]
}

#[test]
fn roots_have_16_bits() {
    let mut random = Random::fresh();
    let mut integers: Vec<u32> = (0..32)
        .flat_map(|bit| [1 << bit, u32::MAX >> bit])
        .collect();
    integers
        .extend((0..2000).map(|_| (random.uniform() * 2f32.powi(32)) as u32 >> random.index(32)));
    for n in integers {
        let (got, exact) = (f64::from(root(n)), f64::from(n).sqrt());
        assert!((got - exact).abs() <= exact * 2f64.powi(-16), "{n}: {got}");
    }
    assert_eq!(root(0), 0.0);
    for exact in 0..=65_535u32 {
        assert_eq!(root(exact * exact), exact as f32);
    }
}

#[test]
fn capacity_of_eight_deviations() {
    assert_eq!(capacity(0, 0), 0);
    assert_eq!(capacity(1, 1), 2);
    assert_eq!(capacity(8192, 8192), 8704);
    assert_eq!(capacity(100, 100), 200);
    assert_eq!(capacity(1 << 16, 1 << 16), (1 << 16) + 1536);
    assert_eq!(capacity(1000, usize::MAX), 2000);
    for rows in 0..2000 {
        let capacity = capacity(rows, rows);
        assert!(capacity >= rows && capacity <= 2 * rows);
        assert!(capacity.is_multiple_of(128) || capacity == 2 * rows);
    }
}

/// Probabilities lie in [0, 1], are 0 for scores of 0 alone, proportional to the others where they are below 1, and sum
/// to what was asked for.
#[test]
fn probabilities_sum_to_the_expected_number() {
    let mut random = Random::fresh();
    for stacked in [2, 6, 200, 2048, 5000] {
        for (scores, expected) in scores_and_sums(&mut random, stacked) {
            let probabilities = probabilities(&scores, expected);
            let sum: f64 = probabilities.iter().copied().map(f64::from).sum();
            let scored = scores.iter().filter(|&&score| score > 0.0).count();
            let wanted = expected.min(scored) as f64;
            assert!(
                (sum - wanted).abs() <= wanted * 1e-4,
                "{sum} instead of {wanted}"
            );
            let mut ratios = Vec::new();
            for (&score, &probability) in scores.iter().zip(&probabilities) {
                assert!((0.0..=1.0).contains(&probability));
                assert_eq!(probability == 0.0, score == 0.0);
                if probability < 1.0 && score > 0.0 {
                    ratios.push(probability / score);
                }
            }
            let (least, most) = ratios
                .iter()
                .fold((f32::MAX, 0f32), |(least, most), &ratio| {
                    (least.min(ratio), most.max(ratio))
                });
            assert!(ratios.is_empty() || most <= least * (1.0 + 1e-6));
            // No row at 1 has a score that asks for less.
            for (&score, &probability) in scores.iter().zip(&probabilities) {
                assert!(probability < 1.0 || scored <= expected || score * most >= 0.999_999);
            }
        }
    }
    // Each round takes few rows to 1: as many rounds as there are allowed leave no probability above 1.
    let slow: Vec<f32> = (0..400).map(|row| 1.02f32.powi(row)).collect();
    let probabilities = probabilities(&slow, 395);
    let sum: f64 = probabilities.iter().copied().map(f64::from).sum();
    println!("{ROUNDS} rounds: {sum} of 395");
    assert!(sum <= 395.0 * (1.0 + 1e-5) && probabilities.iter().all(|&p| p <= 1.0));
}

#[test]
fn a_sum_in_lanes_is_a_sum() {
    let integers = (1..=5000).map(|n| n as f32);
    assert_eq!(sum_in_lanes(integers), 12_502_500.0);
    assert_eq!(sum_in_lanes(std::iter::empty()), 0.0);
}

/// The list of kept rows says the same as the positions, is in order, and its factors are those of the rows.
#[track_caller]
fn check_sample(sample: &ReferenceRowSample, scales: [f32; 2], expected: usize) {
    let stacked = sample.positions.len();
    assert_eq!(sample.rows.len(), capacity(stacked / 2, expected));
    let count = sample.count as usize;
    let kept = &sample.rows[..count];
    assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
    for (slot, &row) in kept.iter().enumerate() {
        assert_eq!(sample.positions[row as usize], slot as i32);
        let scale = scales[usize::from(row as usize >= stacked / 2)];
        let factor = scale / sample.probabilities[row as usize];
        assert!(sample.factors[slot] == factor || factor.is_nan());
    }
    assert!(sample.rows[count..].iter().all(|&row| row == -1));
    assert!(sample.factors[count..].iter().all(|&factor| factor == 0.0));
    let positions = sample.positions.iter().filter(|&&position| position >= 0);
    assert_eq!(positions.count(), count);
    for (&position, &probability) in sample.positions.iter().zip(&sample.probabilities) {
        assert!(probability < 1.0 || position >= 0 || count == sample.rows.len());
        assert!(probability > 0.0 || position < 0);
    }
}

#[track_caller]
fn assert_same_sample(got: &HostRowSample, expected: &ReferenceRowSample) {
    let bits = |values: &[f32]| {
        let bits = |value: &f32| (!value.is_nan()).then(|| value.to_bits());
        values.iter().map(bits).collect::<Vec<_>>()
    };
    assert_eq!(bits(&got.probabilities), bits(&expected.probabilities));
    assert_eq!(got.count, expected.count);
    assert_eq!(got.rows, expected.rows);
    assert_eq!(bits(&got.factors), bits(&expected.factors));
    assert_eq!(got.positions, expected.positions);
}

#[test]
fn samples_on_the_host() {
    let mut random = Random::fresh();
    for stacked in [2, 6, 200, 2048, 5000] {
        for (scores, sum) in scores_and_sums(&mut random, stacked) {
            let (scales, key) = ([0.14, 0.01], random.key());
            let expected = reference::sample_rows(&scores, scales, sum, key);
            check_sample(&expected, scales, sum);
            let got = host::sample_rows(&scores, scales, sum, key).expect("scores of both parts");
            assert_same_sample(&got, &expected);
        }
        let (scores, scales, key) = (vec![1.0; stacked], [f32::NAN; 2], random.key());
        let expected = reference::sample_rows(&scores, scales, 1, key);
        assert_eq!(expected.count as usize, capacity(stacked / 2, 1));
        check_sample(&expected, scales, 1);
        let got = host::sample_rows(&scores, scales, 1, key).expect("scores of both parts");
        assert_same_sample(&got, &expected);
    }
    let empty = host::sample_rows(&[], [0.0; 2], 0, random.key()).expect("no rows");
    assert_eq!((empty.count, empty.rows.len()), (0, 0));
    assert!(host::sample_rows(&[1.0], [0.0; 2], 1, random.key()).is_err());
}

/// Everything that the reference makes of a gradient and an input.
struct Case {
    gradient: Vec<f32>,
    splitting: Rounding,
    split: ReferenceBitSplit,
    input: Vec<f32>,
    x: ReferenceQuantized,
    with_x: bool,
    scores: Vec<f32>,
    expected: usize,
    key: cubecl_kernels::rounding::StochasticKey,
    sample: ReferenceRowSample,
    scaling: Rounding,
}

fn cases(random: &mut Random, [rows, cols, x_cols]: [usize; 3]) -> Vec<Case> {
    let shape = MatrixShape::new(rows, cols);
    let gradients = gradients(random, shape).into_iter().enumerate();
    gradients
        .map(|(index, gradient)| {
            let splitting = stochastic(random);
            let split = reference::bit_split(&gradient, shape, splitting);
            let input = input(random, rows, x_cols);
            let x = reference::quantize(&input, MatrixShape::new(rows, x_cols), &INT4);
            let with_x = index % 2 == 0;
            let x_norms = with_x.then(|| reference::int4_row_norms(&x));
            let scores = reference::leverage_scores(&split.squared_norms(), x_norms.as_deref());
            // Mostly half of the rows, else all.
            let expected = if index % 5 == 4 { 2 * rows } else { rows };
            let key = random.key();
            let sample = reference::sample_rows(&scores, split.scales, expected, key);
            check_sample(&sample, split.scales, expected);
            let scaling = match index % 3 {
                2 => Rounding::Nearest,
                _ => stochastic(random),
            };
            Case {
                gradient,
                splitting,
                split,
                input,
                x,
                with_x,
                scores,
                expected,
                key,
                sample,
                scaling,
            }
        })
        .collect()
}

#[test]
fn on_the_host() {
    let mut random = Random::fresh();
    for size in SIZES {
        for case in cases(&mut random, size) {
            let [rows, cols, x_cols] = size;
            let split = host::bit_split(&case.gradient, [rows, cols], case.splitting);
            let split = split.expect("a matrix");
            let x = host::quantize(&case.input, [rows, x_cols], &INT4).expect("a matrix");
            let norms = host::int4_row_norms(&x).expect("an INT4 matrix");
            assert_eq!(norms, reference::int4_row_norms(&case.x));
            let x_norms = case.with_x.then_some(&norms[..]);
            let scores = host::leverage_scores(&split.squared_norms, x_norms).expect("norms");
            assert_eq!(scores, case.scores);
            let sample = host::sample_rows(&scores, split.scales, case.expected, case.key);
            let sample = sample.expect("scores of both parts");
            assert_same_sample(&sample, &case.sample);
            let parts = host::gather_parts(&split, &sample).expect("a sample of the split");
            assert_same(&parts, &reference::gather_parts(&case.split, &case.sample));
            let scaled = host::gather_scaled(&split, &sample, case.scaling);
            assert_same(
                &scaled.expect("a sample of the split"),
                &reference::gather_scaled(&case.split, &case.sample, case.scaling),
            );
            let gathered = host::gather_int4_rows(&x, &sample).expect("a sample of X's rows");
            assert_same(
                &gathered,
                &reference::gather_int4_rows(&case.x, &case.sample),
            );
        }
    }
}

#[test]
fn the_host_rejects() {
    let mut random = Random::fresh();
    let split = host::bit_split(&[1.0; 6], [3, 2], Rounding::Nearest).expect("a matrix");
    let sample = host::sample_rows(&[1.0; 4], split.scales, 2, random.key()).expect("scores");
    for error in [
        host::gather_parts(&split, &sample).unwrap_err(),
        host::gather_scaled(&split, &sample, Rounding::Nearest).unwrap_err(),
        host::leverage_scores(&split.squared_norms, Some(&[1])).unwrap_err(),
    ] {
        assert!(error.to_string().contains("host::"), "{error}");
    }
    let int8 = QuantizeSpec::int8(Granularity::Tensor);
    for spec in [int8, INT4.with_granularity(Granularity::Token)] {
        let x = host::quantize(&[1.0; 4], [2, 2], &spec).expect("a matrix");
        assert!(host::int4_row_norms(&x).is_err());
        assert!(host::gather_int4_rows(&x, &sample).is_err());
    }
    let x = host::quantize(&[1.0; 6], [3, 2], &INT4).expect("a matrix");
    assert!(host::gather_int4_rows(&x, &sample).is_err());
}

/// A gradient that is not finite makes NaN of every row of dX, and of the whole of dW.
#[test]
fn what_must_not_be_hidden() {
    let mut random = Random::fresh();
    for [rows, cols] in [[1, 3], [40, 5], [300, 20]] {
        for hidden in [f32::NAN, f32::INFINITY] {
            let mut gradient: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
            gradient[random.index(rows * cols)] = hidden;
            let problem = Problem::new(&mut random, gradient, [rows, cols]);
            let sample = problem.sample(&mut random);
            for row in 0..rows {
                let slot = sample.positions[row];
                assert!(slot >= 0 && sample.factors[slot as usize].is_nan());
            }
            let scaled = host::gather_scaled(&problem.split, &sample, Rounding::Nearest);
            let HostScales::F32(scales) = scaled.expect("a sample of the split").scales else {
                panic!("FP32 scales");
            };
            assert!(scales[0].is_nan());
        }
    }
}

/// A gradient that is split, and an input, small enough for many draws.
struct Problem {
    gradient: Vec<f32>,
    split: HostBitSplit,
    x: HostQuantized<'static>,
    x_rows: Vec<f64>,
    scores: Vec<f32>,
    scores_without_x: Vec<f32>,
}

const X_COLS: usize = 6;

impl Problem {
    fn new(random: &mut Random, gradient: Vec<f32>, shape: [usize; 2]) -> Self {
        let split = host::bit_split(&gradient, shape, stochastic(random)).expect("a matrix");
        let input = input(random, shape[0], X_COLS);
        let x = host::quantize(&input, [shape[0], X_COLS], &INT4).expect("a matrix");
        let x_rows = host::dequantize(&x).expect("an INT4 matrix");
        let mut problem = Self {
            gradient,
            split,
            x,
            x_rows: x_rows.into_iter().map(f64::from).collect(),
            scores: Vec::new(),
            scores_without_x: Vec::new(),
        };
        problem.score();
        problem
    }

    /// Of rows whose magnitudes have logarithms that are uniform between 0 and this number.
    fn sparse(random: &mut Random, shape: [usize; 2], spread: f32) -> Self {
        let gradient = (0..shape[0])
            .flat_map(|_| {
                let magnitude = (spread * random.uniform()).exp();
                (0..shape[1])
                    .map(|_| random.normal() * magnitude)
                    .collect::<Vec<_>>()
            })
            .collect();
        Self::new(random, gradient, shape)
    }

    fn score(&mut self) {
        let norms = host::int4_row_norms(&self.x).expect("an INT4 matrix");
        let scores = |x_norms| host::leverage_scores(&self.split.squared_norms, x_norms);
        let (with_x, without_x) = (scores(Some(&norms)), scores(None));
        self.scores = with_x.expect("norms");
        self.scores_without_x = without_x.expect("norms");
    }

    fn split_again(&mut self, random: &mut Random) {
        let split = host::bit_split(&self.gradient, self.split.shape, stochastic(random));
        self.split = split.expect("a matrix");
        self.score();
    }

    fn draw(&self, scores: &[f32], random: &mut Random) -> HostRowSample {
        let rows = self.split.shape[0];
        host::sample_rows(scores, self.split.scales, rows, random.key()).expect("scores")
    }

    fn sample(&self, random: &mut Random) -> HostRowSample {
        self.draw(&self.scores, random)
    }

    /// The integers of a row of the stacked parts, and their scale.
    fn part_row(&self, row: usize) -> (Vec<f64>, f64) {
        let [rows, cols] = self.split.shape;
        let bytes = &self.split.parts[row % rows * cols..][..cols];
        let shift = if row < rows { 4 } else { 0 };
        let integers = bytes
            .iter()
            .map(|byte| f64::from((byte << shift) as i8 >> 4));
        (
            integers.collect(),
            f64::from(self.split.scales[usize::from(row >= rows)]),
        )
    }

    fn x_row(&self, row: usize) -> &[f64] {
        &self.x_rows[row % self.split.shape[0] * X_COLS..][..X_COLS]
    }

    /// Adds a row's share in the weight gradient, `[C, D]`, times a factor.
    fn add_outer(&self, sum: &mut [f64], part: &[f64], row: usize, factor: f64) {
        let x = self.x_row(row);
        for (sum, part) in sum.chunks_mut(X_COLS).zip(part) {
            for (sum, x) in sum.iter_mut().zip(x) {
                *sum += part * x * factor;
            }
        }
    }

    /// The weight gradient of the gradient as it was before it was split.
    fn exact_weight_gradient(&self) -> Vec<f64> {
        let [rows, cols] = self.split.shape;
        let gradient: Vec<f64> = self.gradient.iter().copied().map(f64::from).collect();
        let mut sum = vec![0.0; cols * X_COLS];
        for row in 0..rows {
            self.add_outer(&mut sum, &gradient[row * cols..][..cols], row, 1.0);
        }
        sum
    }

    /// The variance that rounding of the low part, in rows that are kept as in the last split, adds to each element.
    fn variance_of_rounding(&self) -> Vec<f64> {
        let [rows, cols] = self.split.shape;
        let probabilities = probabilities(&self.scores_without_x, rows);
        let step = f64::from(self.split.scales[1]);
        let elements = self.gradient.iter().enumerate();
        let variances = elements.map(|(index, &value)| {
            let steps = f64::from(value) / step;
            let up = steps - steps.floor();
            // A row that has no low part in this split has one in another.
            let kept = match probabilities[rows + index / cols] {
                0.0 => 1.0,
                probability => f64::from(probability),
            };
            step * step * up * (1.0 - up) / kept
        });
        variances.collect()
    }

    /// The weight gradient of the kept rows, with exact factors.
    fn weight_gradient(&self, sample: &HostRowSample) -> Vec<f64> {
        let mut sum = vec![0.0; self.split.shape[1] * X_COLS];
        for (&row, &factor) in sample.rows.iter().zip(&sample.factors) {
            if let Ok(row) = usize::try_from(row) {
                let (part, _) = self.part_row(row);
                self.add_outer(&mut sum, &part, row, f64::from(factor));
            }
        }
        sum
    }

    /// The rows of the gradient that the kept rows estimate: the activation gradient before its product with W.
    fn activation_gradient(&self, sample: &HostRowSample) -> Vec<f64> {
        let parts = host::gather_parts(&self.split, sample).expect("a sample of the split");
        let values = host::dequantize(&parts).expect("an INT8 matrix");
        let [rows, cols] = self.split.shape;
        let mut sum = vec![0.0; rows * cols];
        for (stacked, &position) in sample.positions.iter().enumerate() {
            if let Ok(slot) = usize::try_from(position) {
                let values = &values[slot * cols..][..cols];
                for (sum, &value) in sum[stacked % rows * cols..].iter_mut().zip(values) {
                    *sum += f64::from(value);
                }
            }
        }
        sum
    }

    /// The weight gradient of INT8 operands: of rescaled rows, and of gathered rows of X.
    fn weight_gradient_int8(&self, sample: &HostRowSample, random: &mut Random) -> Vec<f64> {
        let scaled = host::gather_scaled(&self.split, sample, stochastic(random));
        let scaled = host::dequantize(&scaled.expect("a sample of the split")).expect("INT8");
        let x = host::gather_int4_rows(&self.x, sample).expect("a sample of X's rows");
        let x = host::dequantize(&x).expect("INT8");
        let cols = self.split.shape[1];
        let mut sum = vec![0.0; cols * X_COLS];
        for (scaled, x) in scaled.chunks(cols).zip(x.chunks(X_COLS)) {
            for (sum, &scaled) in sum.chunks_mut(X_COLS).zip(scaled) {
                for (sum, &x) in sum.iter_mut().zip(x) {
                    *sum += f64::from(scaled) * f64::from(x);
                }
            }
        }
        sum
    }

    /// The weight gradient of all rows, the variance of each element of its estimate with these probabilities, and that
    /// of Proposition 4.1, from the norms of rows.
    fn expected_weight_gradient(&self, probabilities: &[f32]) -> (Vec<f64>, Vec<f64>, f64) {
        let count = self.split.shape[1] * X_COLS;
        let (mut sum, mut variance) = (vec![0.0; count], vec![0.0; count]);
        let mut of_norms = 0.0;
        for (row, &probability) in probabilities.iter().enumerate() {
            let (part, scale) = self.part_row(row);
            self.add_outer(&mut sum, &part, row, scale);
            if probability > 0.0 {
                let p = f64::from(probability);
                let mut share = vec![0.0; count];
                self.add_outer(&mut share, &part, row, scale);
                for (variance, share) in variance.iter_mut().zip(share) {
                    *variance += (1.0 - p) / p * share * share;
                }
                let square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
                of_norms += (1.0 - p) / p * scale * scale * square(&part) * square(self.x_row(row));
            }
        }
        (sum, variance, of_norms)
    }
}

/// The mean of many draws of a vector, and of their squared distances from a centre.
struct Draws {
    centre: Vec<f64>,
    sum: Vec<f64>,
    /// Sums of the squared deviations of elements.
    squares: Vec<f64>,
    /// Squared distances.
    distances: Vec<f64>,
}

impl Draws {
    fn of(count: usize, centre: Vec<f64>, mut draw: impl FnMut() -> Vec<f64>) -> Self {
        let zeros = vec![0.0; centre.len()];
        let mut draws = Self {
            centre,
            sum: zeros.clone(),
            squares: zeros,
            distances: Vec::new(),
        };
        for _ in 0..count {
            let mut distance = 0.0;
            for (index, value) in draw().into_iter().enumerate() {
                let deviation = value - draws.centre[index];
                draws.sum[index] += deviation;
                draws.squares[index] += deviation * deviation;
                distance += deviation * deviation;
            }
            draws.distances.push(distance);
        }
        draws
    }

    fn count(&self) -> f64 {
        self.distances.len() as f64
    }

    /// The mean squared distance, and the standard deviation of this mean.
    fn variance(&self) -> (f64, f64) {
        let mean = self.distances.iter().sum::<f64>() / self.count();
        let squares = self.distances.iter().map(|d| (d - mean) * (d - mean));
        (
            mean,
            (squares.sum::<f64>() / self.count() / self.count()).sqrt(),
        )
    }

    /// The variance of each element, estimated from the draws. An event that none of them saw is not in it.
    fn estimated_variance(&self) -> Vec<f64> {
        let squares = self.squares.iter();
        squares.map(|square| square / self.count()).collect()
    }

    /// The mean must be the centre. `variance` is that of each element.
    ///
    /// A few hundred means of thousands of draws are normal but for their far tails: beyond 7 deviations lie 3e-12 of
    /// a normal distribution, which leaves room for tails that are fifty times heavier.
    #[track_caller]
    fn assert_unbiased(&self, variance: &[f64]) {
        let largest = self
            .centre
            .iter()
            .fold(0f64, |most, value| most.max(value.abs()));
        for (index, (sum, variance)) in self.sum.iter().zip(variance).enumerate() {
            let deviation = (variance / self.count()).sqrt();
            let error = sum / self.count();
            // Factors are rounded to 24 bits, and dithers to 15.
            let rounding = largest * 1e-6 + variance.sqrt() * 1e-3;
            assert!(
                error.abs() <= 7.0 * deviation + rounding,
                "element {index}: off by {error:e}, {:.1} deviations",
                error / deviation
            );
        }
    }

    #[track_caller]
    fn assert_variance(&self, expected: f64) {
        let (variance, deviation) = self.variance();
        println!("variance {variance:e} +- {deviation:e}, predicted {expected:e}");
        assert!(
            deviation < 0.05 * expected,
            "{deviation:e} tells nothing of {expected:e}"
        );
        assert!(
            (variance - expected).abs() <= 7.0 * deviation,
            "{variance:e} +- {deviation:e} instead of {expected:e}"
        );
    }
}

const DRAWS: usize = 4000;

/// Proposition 4.1, against uniform sampling.
#[test]
fn weight_gradient_is_unbiased_with_the_predicted_variance() {
    let mut random = Random::fresh();
    let problem = Problem::sparse(&mut random, [48, 8], 1.5);
    let rows = problem.split.shape[0];
    let probabilities = probabilities(&problem.scores, rows);
    let (exact, variance, of_norms) = problem.expected_weight_gradient(&probabilities);
    let of_elements: f64 = variance.iter().sum();
    assert!((of_elements - of_norms).abs() < 1e-9 * of_norms);
    let draws = Draws::of(DRAWS, exact.clone(), || {
        problem.weight_gradient(&problem.sample(&mut random))
    });
    draws.assert_unbiased(&variance);
    draws.assert_variance(of_norms);

    let uniform = vec![0.5; 2 * rows];
    let (_, uniform_variance, of_uniform) = problem.expected_weight_gradient(&uniform);
    let uniform_draws = Draws::of(DRAWS, exact, || {
        let mut sum = vec![0.0; 8 * X_COLS];
        for row in 0..2 * rows {
            if random.uniform() < 0.5 {
                let (part, scale) = problem.part_row(row);
                problem.add_outer(&mut sum, &part, row, scale / 0.5);
            }
        }
        sum
    });
    uniform_draws.assert_unbiased(&uniform_variance);
    uniform_draws.assert_variance(of_uniform);
    let ((uniform, uniform_deviation), (leverage, leverage_deviation)) =
        (uniform_draws.variance(), draws.variance());
    let (measured, predicted) = (uniform / leverage, of_uniform / of_norms);
    println!("uniform sampling: {measured:.2} times the variance, predicted {predicted:.2}");
    let deviation = (uniform_deviation / uniform).hypot(leverage_deviation / leverage);
    assert!((measured / predicted - 1.0).abs() <= 8.0 * deviation);
    assert!(
        predicted > 1.5,
        "scores that do not differ tell nothing: {predicted}"
    );
}

/// Proposition B.2.
#[test]
fn activation_gradient_is_unbiased_with_the_predicted_variance() {
    let mut random = Random::fresh();
    let problem = Problem::sparse(&mut random, [48, 8], 1.5);
    let [rows, cols] = problem.split.shape;
    let probabilities = probabilities(&problem.scores_without_x, rows);
    let mut exact = vec![0.0; rows * cols];
    let mut variance = vec![0.0; rows * cols];
    for (row, &probability) in probabilities.iter().enumerate() {
        let (part, scale) = problem.part_row(row);
        for (col, part) in part.iter().enumerate() {
            let index = row % rows * cols + col;
            exact[index] += part * scale;
            if probability > 0.0 {
                let p = f64::from(probability);
                variance[index] += (1.0 - p) / p * (part * scale).powi(2);
            }
        }
    }
    let draws = Draws::of(DRAWS, exact, || {
        let sample = problem.draw(&problem.scores_without_x, &mut random);
        problem.activation_gradient(&sample)
    });
    draws.assert_unbiased(&variance);
    draws.assert_variance(variance.iter().sum());
}

/// Splitting and sampling together, of a gradient that no draw knows the rounding of.
#[test]
fn splitting_and_sampling_together_are_unbiased() {
    let mut random = Random::fresh();
    let mut problem = Problem::sparse(&mut random, [32, 8], 1.5);
    let gradient: Vec<f64> = problem.gradient.iter().copied().map(f64::from).collect();
    let exact = problem.exact_weight_gradient();
    let of_weight = Draws::of(DRAWS, exact, || {
        problem.split_again(&mut random);
        let sample = problem.sample(&mut random);
        problem.weight_gradient_int8(&sample, &mut random)
    });
    of_weight.assert_unbiased(&of_weight.estimated_variance());
    let of_activation = Draws::of(DRAWS, gradient, || {
        problem.split_again(&mut random);
        let sample = problem.draw(&problem.scores_without_x, &mut random);
        problem.activation_gradient(&sample)
    });
    // An element just beside a multiple of the step is rounded away from it in few draws, or in none of them, so that
    // its variance cannot be estimated from these.
    let estimated = of_activation.estimated_variance();
    let of_rounding = problem.variance_of_rounding();
    let variance = estimated.iter().zip(of_rounding).map(|(&x, y)| x.max(y));
    of_activation.assert_unbiased(&variance.collect::<Vec<_>>());
}

/// Rounding scaled rows to INT8 in blocks leaves the estimate unbiased and adds little to its variance.
#[test]
fn rounding_of_scaled_rows_adds_little_variance() {
    let mut random = Random::fresh();
    for spread in [0.0, 1.0, 2.0, 4.0] {
        let [rows, cols] = [256, 16];
        let mut problem = Problem::sparse(&mut random, [rows, cols], spread);
        let probabilities = probabilities(&problem.scores, rows);
        let (sum, _, of_sampling) = problem.expected_weight_gradient(&probabilities);
        let sample = problem.sample(&mut random);
        // Of one draw of the rows: the rounding is all that differs.
        let of_rounding = Draws::of(DRAWS / 2, problem.weight_gradient(&sample), || {
            problem.weight_gradient_int8(&sample, &mut random)
        });
        of_rounding.assert_unbiased(&of_rounding.estimated_variance());
        let of_splitting = Draws::of(DRAWS / 20, problem.exact_weight_gradient(), || {
            problem.split_again(&mut random);
            problem.expected_weight_gradient(&vec![1.0; 2 * rows]).0
        });
        let of_rounding = of_rounding.variance().0;
        let of_splitting = of_splitting.variance().0;
        let square: f64 = sum.iter().map(|x| x * x).sum();
        println!(
            "spread {spread}: of the gradient's square, splitting {:.2e}, sampling {:.2e}, rounding {:.2e}",
            of_splitting / square,
            of_sampling / square,
            of_rounding / square
        );
        assert!(of_rounding < 0.1 * (of_splitting + of_sampling));
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::{
        KernelError,
        bit_splitting::bit_split,
        layout::Layout,
        leverage_score::{
            RowSample, gather_int4_rows, gather_parts, gather_scaled, int4_row_norms,
            leverage_scores, sample_rows,
        },
        quantize::{Quantized, quantize},
    };

    use super::*;
    use crate::{
        bit_splitting::on_device::check_int8,
        device::{
            Client, Memory, Tensor, TestRuntime, assert_same_floats, assert_same_integers, client,
            drawn, dtype, read, upload, upload_i32, upload_matrix,
        },
    };

    fn upload_u32(client: &Client, x: &[u32]) -> Tensor {
        let handle = client.create_from_slice(bytemuck::cast_slice(x));
        Tensor::new_contiguous(vec![x.len()], handle, dtype::<u32>())
    }

    #[track_caller]
    fn check_rows(
        client: &Client,
        got: &RowSample<TestRuntime>,
        expected: &ReferenceRowSample,
        what: &str,
    ) {
        assert_same_floats(
            &read(client, &got.probabilities),
            &expected.probabilities,
            what,
        );
        assert_eq!(read::<i32>(client, &got.count), [expected.count], "{what}");
        assert_same_integers(&read(client, &got.rows), &expected.rows, what);
        assert_same_floats(&read(client, &got.factors), &expected.factors, what);
        assert_same_integers(&read(client, &got.positions), &expected.positions, what);
    }

    #[test]
    fn samples_equal_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let scales = [0.14, 0.01];
        let of_parts = upload(&client, &scales, &[2], dtype::<f32>());
        // Several rows at once: four, or two in the last; one turn of all units, three, and nine.
        for stacked in [2, 6, 200, 2048, 40_004, 131_074] {
            for (scores, sum) in scores_and_sums(&mut random, stacked) {
                let key = random.key();
                let expected = reference::sample_rows(&scores, scales, sum, key);
                let tensor = upload(&client, &scores, &[stacked], dtype::<f32>());
                let got = sample_rows(&client, &tensor, &of_parts, sum, key).expect("scores");
                let what = format!("{stacked} rows for {sum}");
                check_rows(&client, &got, &expected, &what);
            }
            // More rows than there is room for.
            let (scores, key) = (vec![1.0; stacked], random.key());
            let expected = reference::sample_rows(&scores, [f32::NAN; 2], 1, key);
            let tensor = upload(&client, &scores, &[stacked], dtype::<f32>());
            let not_finite = upload(&client, &[f32::NAN; 2], &[2], dtype::<f32>());
            let got = sample_rows(&client, &tensor, &not_finite, 1, key).expect("scores");
            check_rows(&client, &got, &expected, &format!("{stacked} rows of NaN"));
        }
    }

    #[test]
    fn roots_equal_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let mut norms: Vec<u32> = (0..32)
            .flat_map(|bit| [1 << bit, u32::MAX >> bit])
            .collect();
        norms.extend(
            (0..3000).map(|_| (random.uniform() * 2f32.powi(32)) as u32 >> random.index(32)),
        );
        // Squares, and those next to the squares of integers and a half, where roots are rounded.
        for root in (0..3000).map(|_| 32_768 + random.index(32_768) as u32) {
            norms.extend([root * root, root * root + root, root * root + root + 1]);
        }
        norms.extend([0, u32::MAX]);
        let scores = leverage_scores(&client, &upload_u32(&client, &norms), None).expect("norms");
        let expected = reference::leverage_scores(&norms, None);
        assert_same_floats(&read(&client, &scores), &expected, "roots");
        let x_norms = &norms[..norms.len() / 2];
        let of_x = upload_u32(&client, x_norms);
        let scores = leverage_scores(&client, &upload_u32(&client, &norms), Some(&of_x));
        let expected = reference::leverage_scores(&norms, Some(x_norms));
        assert_same_floats(&read(&client, &scores.expect("norms")), &expected, "scores");
    }

    #[test]
    fn every_step_equals_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let mut turn = random.index(3);
        for size in drawn(&mut random, SIZES, 2) {
            let cases = cases(&mut random, size);
            for case in drawn(&mut random, cases, 2) {
                turn += 1;
                let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][turn % 3];
                check_case(&client, &case, layout);
            }
        }
    }

    #[track_caller]
    fn check_case(client: &Client, case: &Case, layout: Layout) {
        let what = &format!("{:?} x {}, {layout:?}", case.split.shape, case.x.shape.cols);
        let upload =
            |x: &[f32], shape| upload_matrix(client, x, shape, dtype::<f32>(), Memory::Contiguous);
        let gradient = upload(&case.gradient, case.split.shape);
        let split = bit_split(client, &gradient, case.splitting).expect("a matrix");
        let x = quantize(client, &upload(&case.input, case.x.shape), &INT4).expect("a matrix");
        let norms = int4_row_norms(client, &x).expect("an INT4 matrix");
        let expected = reference::int4_row_norms(&case.x);
        assert_eq!(read::<u32>(client, &norms), expected, "{what}");
        let x_norms = case.with_x.then_some(&norms);
        let scores = leverage_scores(client, &split.squared_norms, x_norms).expect("norms");
        assert_same_floats(&read(client, &scores), &case.scores, what);
        let sample = sample_rows(client, &scores, &split.scales, case.expected, case.key);
        let sample = sample.expect("scores");
        check_rows(client, &sample, &case.sample, what);
        let parts = gather_parts(client, &split, &sample).expect("a sample of the split");
        let expected = reference::gather_parts(&case.split, &case.sample);
        check_int8(client, &parts, &expected, what);
        let scaled = gather_scaled(client, &split, &sample, case.scaling, layout);
        let expected = reference::gather_scaled(&case.split, &case.sample, case.scaling);
        check_layout(client, &scaled.expect("a sample"), &expected, layout, what);
        let gathered = gather_int4_rows(client, &x, &sample, layout);
        let expected = reference::gather_int4_rows(&case.x, &case.sample);
        check_layout(
            client,
            &gathered.expect("a sample"),
            &expected,
            layout,
            what,
        );
    }

    #[track_caller]
    fn check_layout(
        client: &Client,
        got: &Quantized<TestRuntime>,
        expected: &ReferenceQuantized,
        layout: Layout,
        what: &str,
    ) {
        assert_eq!(got.values.is_some(), layout.row_major(), "{what}");
        assert_eq!(got.transposed.is_some(), layout.transposed(), "{what}");
        check_int8(client, got, expected, what);
    }

    /// Of rows that take their units more than once.
    #[test]
    fn norms_of_long_rows() {
        let (client, mut random) = (client(), Random::fresh());
        for cols in [4500, 8192] {
            let shape = MatrixShape::new(3, cols);
            let x: Vec<f32> = (0..3 * cols).map(|_| random.normal()).collect();
            let tensor = upload(&client, &x, &[3, cols], dtype::<f32>());
            let quantized = quantize(&client, &tensor, &INT4).expect("a matrix");
            let norms = int4_row_norms(&client, &quantized).expect("an INT4 matrix");
            let expected = reference::int4_row_norms(&reference::quantize(&x, shape, &INT4));
            assert_eq!(read::<u32>(&client, &norms), expected);
        }
    }

    #[test]
    fn empty_matrices() {
        let (client, mut random) = (client(), Random::fresh());
        for [rows, cols] in [[0, 4], [3, 0]] {
            let x = upload(&client, &[], &[rows, cols], dtype::<f32>());
            let split = bit_split(&client, &x, Rounding::Nearest).expect("a matrix");
            let int4 = quantize(&client, &x, &INT4).expect("a matrix");
            let norms = int4_row_norms(&client, &int4).expect("an INT4 matrix");
            assert_eq!(read::<u32>(&client, &norms), vec![0; rows]);
            let scores = leverage_scores(&client, &split.squared_norms, Some(&norms));
            let scores = scores.expect("norms");
            let key = random.key();
            let sample = sample_rows(&client, &scores, &split.scales, rows, key).expect("scores");
            assert_eq!(read::<i32>(&client, &sample.count), [0]);
            let both = Layout::Both;
            let shape = MatrixShape::new(sample.capacity(), cols);
            let parts = gather_parts(&client, &split, &sample).expect("a sample");
            assert_eq!(parts.shape, shape);
            let scaled = gather_scaled(&client, &split, &sample, Rounding::Nearest, both);
            assert_eq!(scaled.expect("a sample").shape, shape);
            let gathered = gather_int4_rows(&client, &int4, &sample, both).expect("a sample");
            assert_eq!(gathered.shape, shape);
        }
    }

    #[test]
    fn rejects() {
        let (client, mut random) = (client(), Random::fresh());
        let key = random.key();
        let float = |count: usize| upload(&client, &vec![1.0; count], &[count], dtype::<f32>());
        let scales = float(2);
        let sample = sample_rows(&client, &float(4), &scales, 2, key).expect("scores");
        let sampled = |scores: &Tensor, scales: &Tensor| {
            sample_rows(&client, scores, scales, 2, key).expect_err("bad input")
        };
        let integers = upload_i32(&client, &[1; 4], &[4]);
        for (error, is_shape) in [
            (sampled(&float(3), &scales), true),
            (sampled(&float(4), &float(3)), true),
            (sampled(&integers, &scales), false),
            (sampled(&float(4), &integers), false),
        ] {
            assert_eq!(
                matches!(error, KernelError::Shape { .. }),
                is_shape,
                "{error}"
            );
            assert_eq!(
                matches!(error, KernelError::Dtype { .. }),
                !is_shape,
                "{error}"
            );
        }
        let norms = upload_u32(&client, &[1; 4]);
        assert!(leverage_scores(&client, &norms, Some(&norms)).is_err());
        assert!(leverage_scores(&client, &float(4), None).is_err());

        let matrix = upload(&client, &[1.0; 12], &[3, 4], dtype::<f32>());
        let split = bit_split(&client, &matrix, Rounding::Nearest).expect("a matrix");
        // A sample of two rows.
        assert!(gather_parts(&client, &split, &sample).is_err());
        let nearest = Rounding::Nearest;
        assert!(gather_scaled(&client, &split, &sample, nearest, Layout::Both).is_err());
        let x = quantize(&client, &matrix, &INT4).expect("a matrix");
        assert!(gather_int4_rows(&client, &x, &sample, Layout::Both).is_err());
        let batch = upload(&client, &[1.0; 16], &[2, 2, 4], dtype::<f32>());
        let of_batch = quantize(&client, &batch, &INT4).expect("matrices");
        for spec in [
            QuantizeSpec::int8(Granularity::Tensor),
            INT4.with_granularity(Granularity::Token),
            INT4.with_layout(Layout::Transposed),
        ] {
            let x = quantize(&client, &matrix, &spec).expect("a matrix");
            let error = int4_row_norms(&client, &x).expect_err("not INT4 rows");
            assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        }
        let error = int4_row_norms(&client, &of_batch).expect_err("a batch");
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }
}
