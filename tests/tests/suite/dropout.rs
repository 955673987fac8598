//! Dropout, alone and of the branch of a residual sum: one operation that saves nothing.

use burn::{
    backend::Autodiff,
    nn::DropoutConfig,
    tensor::{DType, Distribution, Tensor, activation::gelu},
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{CoatFp8, Granularity, JetfireInt8, MixedPrecision, Recipe},
    saved::{Recording, checkpoint, report::Form},
};
use cubecl_kernels::{granularity, quantize::QuantizeSpec, reference, shape::MatrixShape};
use half::bf16;
use quant_train_tests::{
    Rng,
    data::{floats, is_cuda, same_bits, tensor},
    models::One,
    on_every_backend, supports,
    train::{attached, every_layer},
};

on_every_backend! {
    dropout_of_a_tensor_and_of_a_branch => alone_and_summed;
    a_mask_that_is_read_is_the_one_that_dropped => read_masks;
    a_block_drops_the_same_twice => in_block;
    a_branch_of_a_flow_drops_what_flows => branch_of_flow;
    a_sum_of_a_flow_reads_the_branch_as_it_flows => sum_of_flow;
    a_block_of_a_flow_adds_up_the_same => block_of_flow;
}

type T<B, R> = QuantTrain<Autodiff<B>, R>;

const SHAPE: [usize; 3] = [2, 33, 48];
const RATE: f64 = 0.3;

/// True where dropout is one operation: in a flow, and where there are kernels.
fn is_one<B: DataBackend, R: Recipe>() -> bool {
    R::ROW.flow.is_some() || (is_cuda::<B>() && R::ROW.compute != burn::tensor::FloatDType::F32)
}

struct Found {
    output: Vec<f32>,
    of_x: Vec<f32>,
    of_residual: Vec<f32>,
    /// Bytes that wait.
    saved: usize,
}

/// Dropout of x, plus the residual if that is asked for, with the loss `sum(weights * output)`.
fn drop_out<B: DataBackend, R: Recipe>(
    [x, residual, weights]: [&[f32]; 3],
    dtype: DType,
    with: bool,
) -> Found {
    let device = B::Device::default();
    let leaf = |data: &[f32]| tensor::<T<B, R>, 1>(data, [data.len()], &device).require_grad();
    let [x, residual] = [x, residual].map(leaf);
    let [of_x, of_residual] = [&x, &residual].map(|it| it.clone().reshape(SHAPE).cast(dtype));
    let recording = Recording::start();
    let dropped = DropoutConfig::new(RATE).init().forward(of_x);
    let output = match with {
        true => of_residual + dropped,
        false => dropped,
    };
    let report = recording.report();
    let waiting = report.values.iter().filter(|it| it.form != Form::Again);
    let saved = waiting.map(|it| it.bytes).sum();
    let weights = tensor::<T<B, R>, 3>(weights, SHAPE, &device);
    let gradients = (output.clone().cast(DType::F32) * weights).sum().backward();
    let of = |leaf: &Tensor<T<B, R>, 1>| leaf.grad(&gradients).map_or(vec![], |it| floats(&it));
    Found {
        output: floats(&output),
        of_x: of(&x),
        of_residual: of(&residual),
        saved,
    }
}

fn near(actual: f32, expected: f32, tolerance: f32) -> bool {
    (actual - expected).abs() <= tolerance * expected.abs().max(1e-3)
}

fn alone_and_summed<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, dtype: DType, tolerance: f32) {
        let name = R::ROW.name;
        let count = SHAPE.iter().product();
        let mut rng = Rng::new(seed);
        // None is 0, so that what is dropped can be told.
        let mut draw = || -> Vec<f32> {
            let normals = rng.normals(count, 1.0).into_iter();
            normals
                .map(|x| bf16::from_f32(x + 4.0f32.copysign(x)).to_f32())
                .collect()
        };
        let data = [draw(), draw(), draw()];
        let data = data.each_ref().map(Vec::as_slice);
        let [x, residual, weights] = data;
        let kept = (1.0 / (1.0 - RATE)) as f32;
        for with in [false, true] {
            // The seed is that of the process, where other tests draw too: each draw is told by what it dropped.
            let found = drop_out::<B, R>(data, dtype, with);
            let rest = |index: usize| if with { residual[index] } else { 0.0 };
            let factor = |index: usize| match found.output[index] == rest(index) {
                true => 0.0,
                false => kept,
            };
            let factors: Vec<_> = (0..count).map(factor).collect();
            let zeros = factors.iter().filter(|factor| **factor == 0.0).count() as f64;
            let deviation = (count as f64 * RATE * (1.0 - RATE)).sqrt();
            assert!(
                (zeros - count as f64 * RATE).abs() < 6.0 * deviation,
                "seed {seed}: {name}: {zeros} of {count}"
            );
            for index in 0..count {
                let what = format!("seed {seed}: {name}, residual {with}: {index}");
                let expected = x[index] * factors[index] + rest(index);
                let off = tolerance * (x[index].abs() * kept + rest(index).abs());
                assert!((found.output[index] - expected).abs() <= off, "{what}");
                let expected = weights[index] * factors[index];
                assert!(near(found.of_x[index], expected, tolerance), "{what}");
            }
            let weights = if with { weights } else { &[] };
            assert_eq!(found.of_residual.len(), weights.len());
            for (found, weight) in found.of_residual.iter().zip(weights) {
                assert!(near(*found, *weight, tolerance), "seed {seed}: {name}");
            }
            let next = drop_out::<B, R>(data, dtype, with);
            assert!(
                !same_bits(&found.output, &next.output),
                "seed {seed}: {name}"
            );
            if is_one::<B, R>() {
                assert_eq!([found.saved, next.saved], [0; 2], "seed {seed}: {name}");
            }
        }
    }
    check::<B, JetfireInt8<f32>>(seed, DType::F32, 1e-6);
    check::<B, MixedPrecision<f32>>(seed, DType::F32, 1e-6);
    if supports::<B>(DType::BF16) {
        check::<B, CoatFp8<bf16>>(seed, DType::BF16, 8e-3);
        check::<B, MixedPrecision<bf16>>(seed, DType::BF16, 8e-3);
    }
}

/// Zeros and ones that somebody reads, before and behind what they drop, are those that dropped it.
fn read_masks<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, before: bool) {
        let device = B::Device::default();
        let values = Rng::new(seed).normals(SHAPE.iter().product(), 1.0);
        let x = tensor::<T<B, R>, 3>(&values, SHAPE, &device).require_grad();
        let keep = 1.0 - RATE;
        let mask = x.random_like(Distribution::Bernoulli(keep));
        let first = before.then(|| floats(&mask));
        let y = x.clone() * mask.clone() / keep;
        let output = floats(&y);
        let mask = first.unwrap_or_else(|| floats(&mask));
        let gradients = y.sum().backward();
        let of_x = floats(&x.grad(&gradients).expect("of x"));
        for index in 0..values.len() {
            let what = format!("seed {seed}: {}, {before}: {index}", R::ROW.name);
            assert!([0.0, 1.0].contains(&mask[index]), "{what}");
            let factor = mask[index] / keep as f32;
            assert!(near(output[index], values[index] * factor, 1e-6), "{what}");
            assert!(near(of_x[index], factor, 1e-6), "{what}");
        }
    }
    for before in [true, false] {
        check::<B, JetfireInt8<f32>>(seed, before);
        check::<B, MixedPrecision<f32>>(seed, before);
    }
}

fn in_block<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let device = B::Device::default();
        let values = Rng::new(seed).normals(SHAPE.iter().product(), 1.0);
        let x = tensor::<T<B, R>, 3>(&values, SHAPE, &device).require_grad();
        let dropout = DropoutConfig::new(RATE).init();
        let y = checkpoint(
            |x: Tensor<T<B, R>, 3>| x.clone() + dropout.forward(x.clone() * x),
            x.clone(),
        );
        let output = floats(&y);
        let gradients = y.sum().backward();
        let of_x = floats(&x.grad(&gradients).expect("of x"));
        for (index, x) in values.into_iter().enumerate() {
            // x + x² z, whose slope is 1 + 2 x z.
            let z = (output[index] - x) / (x * x);
            let expected = 1.0 + 2.0 * x * z;
            let off = 1e-3 * (1.0 + expected.abs() + 1.0 / x.abs().max(1e-3));
            assert!(
                (of_x[index] - expected).abs() <= off,
                "seed {seed}: {}[{index}]",
                R::ROW.name
            );
        }
    }
    check::<B, JetfireInt8<f32>>(seed);
    check::<B, MixedPrecision<f32>>(seed);
}

/// The output of a layer is dropped in the numbers in which it flows (jetfire-int8, section 5.3), where a recipe's gradients
/// flow too; COAT's residual stream is not rounded (coat-fp8, appendix G.5).
fn branch_of_flow<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, rounds: bool) {
        let device = B::Device::default();
        let one = One::new(64, 96, true, &device);
        let (_optimizer, model) = attached::<T<B, R>, _>(&every_layer(seed), one, seed);
        let mut rng = Rng::new(seed);
        let x = tensor::<T<B, R>, 3>(&rng.normals(2 * 32 * 64, 1.0), [2, 32, 64], &device);
        let residual = tensor::<T<B, R>, 3>(&rng.normals(2 * 32 * 96, 1.0), [2, 32, 96], &device);
        let exact = floats(&model.linear.forward(x.clone()));
        let branch = model.linear.forward(x);
        let output = residual.clone() + DropoutConfig::new(RATE).init().forward(branch);
        let (output, residual) = (floats(&output), floats(&residual));
        let keep = 1.0 - RATE as f32;
        let name = R::ROW.name;
        let differs = (0..exact.len()).filter(|&index| {
            let branch = (output[index] - residual[index]) * keep;
            let is_dropped = branch == 0.0;
            let off = (branch - exact[index]).abs();
            let largest = exact.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            assert!(
                is_dropped || off <= largest / 100.0,
                "seed {seed}: {name}[{index}]: {off}"
            );
            !is_dropped && off > 1e-5 * largest
        });
        assert_eq!(
            differs.count() > exact.len() / 4,
            rounds,
            "seed {seed}: {name}"
        );
    }
    check::<B, JetfireInt8<f32>>(seed, true);
    check::<B, CoatFp8<f32>>(seed, false);
}

/// The output of a layer is added to the residual in the numbers in which it flows, where gradients flow too, from either
/// side; both get the gradient of the sum.
fn sum_of_flow<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64, rounds: bool) {
        let device = B::Device::default();
        let (rows, columns) = (64, 96);
        let one = One::new(64, columns, true, &device);
        let (_optimizer, model) = attached::<T<B, R>, _>(&every_layer(seed), one, seed);
        let mut rng = Rng::new(seed);
        let x = tensor::<T<B, R>, 2>(&rng.normals(rows * 64, 1.0), [rows, 64], &device);
        let residual_values = rng.normals(rows * columns, 1.0);
        let shape = [rows, columns];
        let residual = || tensor::<T<B, R>, 2>(&residual_values, shape, &device).require_grad();
        let exact = floats(&model.linear.forward(x.clone()));
        let flowing = match R::ROW
            .flow
            .and_then(|flow| flow.gradients.and(Some(flow.activations)))
        {
            None => exact.clone(),
            Some(cast) => {
                let Granularity::Block(side) = cast.granularity else {
                    panic!("blocks");
                };
                let spec = QuantizeSpec::int8(granularity::Granularity::Block(side));
                let shape = MatrixShape::new(rows, columns);
                reference::dequantize(&reference::quantize(&exact, shape, &spec))
            }
        };
        let expected: Vec<_> = flowing
            .iter()
            .zip(&residual_values)
            .map(|(x, r)| x + r)
            .collect();
        let name = R::ROW.name;
        assert_eq!(!same_bits(&flowing, &exact), rounds, "seed {seed}: {name}");
        let weights = tensor::<T<B, R>, 2>(&rng.normals(rows * columns, 1.0), shape, &device);
        for (is_left, is_read) in [(true, false), (false, false), (true, true), (false, true)] {
            let (x, residual) = (x.clone(), residual());
            let branch = model.linear.forward(x);
            if is_read {
                assert!(same_bits(&floats(&branch), &exact), "seed {seed}: {name}");
            }
            // What a model begins with, a parameter, is no residual stream.
            let stream = residual.clone() * 1.0;
            let sum = match is_left {
                true => branch + stream,
                false => stream + branch,
            };
            assert!(
                same_bits(&floats(&sum), &expected),
                "seed {seed}: {name}, {is_left}"
            );
            let gradients = (sum * weights.clone()).sum().backward();
            let of_residual = floats(&residual.grad(&gradients).expect("of the residual"));
            assert!(
                same_bits(&of_residual, &floats(&weights)),
                "seed {seed}: {name}"
            );
            let bias = model.linear.bias.as_ref().expect("a bias").val();
            let of_bias = floats(&bias.grad(&gradients).expect("of the bias"));
            let weights = floats(&weights);
            for (col, found) in of_bias.into_iter().enumerate() {
                let column = weights.iter().skip(col).step_by(columns);
                let expected: f32 = column.sum();
                assert!(
                    (found - expected).abs() < 1e-3,
                    "seed {seed}: {name}[{col}]"
                );
            }
        }
    }
    check::<B, JetfireInt8<f32>>(seed, true);
    check::<B, JetfireInt8<f32, 128>>(seed, true);
    check::<B, CoatFp8<f32>>(seed, false);
}

/// Sums and operators of a block read what they read without one, and so in its second run.
fn block_of_flow<B: DataBackend>(seed: u64) {
    fn run<B: DataBackend, R: Recipe>(seed: u64, is_block: bool) -> [Vec<f32>; 3] {
        let device = B::Device::default();
        let one = One::new(64, 64, true, &device);
        let (_optimizer, model) = attached::<T<B, R>, _>(&every_layer(seed), one, seed);
        let values = Rng::new(seed).normals(96 * 64, 1.0);
        let x = tensor::<T<B, R>, 2>(&values, [96, 64], &device).require_grad();
        let block = |x: Tensor<T<B, R>, 2>| {
            let y = model.linear.forward(x.clone());
            let sum = x + y.clone();
            sum + gelu(y)
        };
        let y = match is_block {
            true => checkpoint(block, x.clone()),
            false => block(x.clone()),
        };
        let gradients = y.clone().square().sum().backward();
        let of_weight = model.linear.weight.val().grad(&gradients);
        [
            floats(&y),
            floats(&x.grad(&gradients).expect("of x")),
            floats(&of_weight.expect("of the weight")),
        ]
    }
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let [alone, block] = [false, true].map(|is_block| run::<B, R>(seed, is_block));
        for (index, (alone, block)) in alone.iter().zip(&block).enumerate() {
            assert!(
                same_bits(alone, block),
                "seed {seed}: {}, {index}",
                R::ROW.name
            );
        }
    }
    check::<B, JetfireInt8<f32>>(seed);
    check::<B, CoatFp8<f32>>(seed);
}
