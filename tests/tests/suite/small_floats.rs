//! FP8 and FP4 recipes beyond what every recipe has to do.

use burn::{backend::Autodiff, tensor::Tensor};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    recipe::{BlockFp8, Mxfp4, Mxfp8, Nvfp4, Recipe},
};
use cubecl_kernels::{
    granularity::Granularity, quantize::QuantizeSpec, reference, shape::MatrixShape,
};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    models::One,
    train::{attached, every_layer},
};

use crate::suite::conformance::{Matrix, check_data, check_shape};

quant_train_tests::on_every_backend! {
    blocks_may_have_fp32_scales => fp32_scales;
    each_region_has_its_scale => own_scales;
    stochastic_gradients_are_unbiased => unbiased;
}

/// Sizes around those of groups and blocks.
const SIZES: [usize; 7] = [1, 15, 17, 33, 127, 129, 200];

fn fp32_scales<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for _ in 0..3 {
        let [rows, k, n] = [0; 3].map(|_| rng.pick(&SIZES));
        check_shape::<B, BlockFp8<f32, false>, 2>(seed, &mut rng, [rows, k], n);
    }
}

/// Numbers whose magnitude is another one in each 16x16 block: a scale in the wrong place is off by powers of two.
fn regions(rng: &mut Rng, [rows, cols]: [usize; 2]) -> Vec<f32> {
    let across = cols.div_ceil(16);
    let powers: Vec<f64> = (0..rows.div_ceil(16) * across)
        .map(|_| 2f64.powi(rng.below(24) as i32 - 12))
        .collect();
    (0..rows * cols)
        .map(|index| {
            let (row, col) = (index / cols, index % cols);
            (powers[row / 16 * across + col / 16] * rng.normal()) as f32
        })
        .collect()
}

fn own_scales<B: DataBackend>(seed: u64) {
    fn check<B: DataBackend, R: Recipe>(seed: u64) {
        let mut rng = Rng::new(seed);
        let [rows, k, n] = [0; 3].map(|_| rng.pick(&SIZES));
        let x = regions(&mut rng, [rows, k]);
        let dy = regions(&mut rng, [rows, n]);
        check_data::<B, R, 2>(seed, &mut rng, [rows, k], n, [&x, &dy]);
    }
    check::<B, BlockFp8<f32>>(seed);
    check::<B, BlockFp8<f32, false>>(seed);
    check::<B, Mxfp8<f32>>(seed);
    check::<B, Mxfp4<f32>>(seed);
    check::<B, Nvfp4<f32>>(seed);
}

/// The mean of dX over many draws is that of the exact dY: of groups whose scale is exact, since a scale that is
/// rounded down cuts off the largest number.
fn unbiased<B: DataBackend>(seed: u64) {
    type T<B> = QuantTrain<Autodiff<B>, Nvfp4<f32>>;
    const DRAWS: usize = 200;
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    let (rows, k, n) = (6, 20, 32);
    let model = One::new(k, n, false, &device);
    let (_optim, model) = attached::<T<B>, _>(&every_layer(seed), model, seed);
    let mut dy = vec![0.0f32; rows * n];
    for (index, group) in dy.chunks_mut(16).enumerate() {
        let scale = 2f64.powi(-(index as i32 % 4));
        group.fill_with(|| (scale * (12.0 * rng.uniform() - 6.0)) as f32);
        group[rng.below(16)] = (6.0 * scale) as f32;
    }
    let spec = QuantizeSpec::NVFP4.with_granularity(Granularity::Block(16));
    let weight = reference::quantize(
        &floats(&model.linear.weight.val()),
        MatrixShape::new(k, n),
        &spec,
    );
    let weight = Matrix::of(&reference::dequantize(&weight), [k, n]);
    let exact = Matrix::of(&dy, [rows, n]).times(&weight.t()).floats();

    let (mut sum, mut squares) = (vec![0.0f64; rows * k], vec![0.0f64; rows * k]);
    for _ in 0..DRAWS {
        let x = Tensor::<T<B>, 2>::ones([rows, k], &device).require_grad();
        let y = model.linear.forward(x.clone());
        let grads = (y * tensor::<T<B>, 2>(&dy, [rows, n], &device))
            .sum()
            .backward();
        for (index, dx) in floats(&x.grad(&grads).expect("dX")).into_iter().enumerate() {
            let error = f64::from(dx - exact[index]);
            sum[index] += error;
            squares[index] += error * error;
        }
    }
    let draws = DRAWS as f64;
    assert!(
        squares.iter().any(|squares| *squares > 0.0),
        "seed {seed}: nothing was drawn"
    );
    for (index, (sum, squares)) in sum.into_iter().zip(squares).enumerate() {
        let mean = sum / draws;
        let deviation = (squares / draws - mean * mean).max(0.0).sqrt() / draws.sqrt();
        let rounding = 1e-5 * f64::from(exact[index].abs()) + 1e-6;
        assert!(
            mean.abs() <= 6.0 * deviation + rounding,
            "seed {seed}: element {index} is off by {mean:e} of {}, deviation {deviation:e}",
            exact[index]
        );
    }
}
