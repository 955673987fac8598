//! Gradients in 16-bit floats are those in FP32, but for their rounding; and those in FP32 are the host's.

use burn::{
    backend::{Autodiff, Flex},
    nn::{Linear, LinearConfig},
    tensor::{
        FloatDType, Tensor,
        activation::{gelu, relu, silu},
        bf16, f16,
    },
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    optim::LayerBackend,
    recipe::{MixedPrecision, Recipe},
};
use quant_train_tests::{
    Rng,
    data::{cosine, floats, supports, tensor},
    train::{attached, every_layer},
};

quant_train_tests::on_every_backend! {
    relu_lets_the_same_gradients_pass => masks;
    chains_have_the_gradients_of_fp32 => chains;
}

/// Rows and columns: whole vectors of registers, and parts of them.
const SHAPES: [[usize; 2]; 3] = [[512, 32], [64, 256], [33, 7]];

/// A gradient passes where x is positive, to the bit: alone, and with operations before and behind to fuse with.
fn masks<B: DataBackend>(seed: u64) {
    let (device, mut rng) = (B::Device::default(), Rng::new(seed));
    for float in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
        if !supports::<B>(float.into()) {
            continue;
        }
        for shape in SHAPES {
            let count = shape[0] * shape[1];
            let upload =
                |values: &[f32]| tensor::<Autodiff<B>, 2>(values, shape, &device).cast(float);
            let x = upload(&rng.normals(count, 1.0)).require_grad();
            let weight = upload(&rng.normals(count, 1.0));
            let pairs = floats(&x).into_iter().zip(floats(&weight));
            let passes = pairs.map(|(x, w)| if x > 0.0 { w } else { 0.0 });
            let passes: Vec<f32> = passes.collect();
            let gradient = |y: Tensor<Autodiff<B>, 2>| {
                let gradients = (y * weight.clone()).sum().backward();
                floats(&x.grad(&gradients).expect("it asks for one"))
            };
            let what = format!("seed {seed}: {float:?}, {shape:?}");
            assert_eq!(gradient(relu(x.clone())), passes, "{what}");
            let doubled = gradient(relu(x.clone() * 2.0) * 2.0);
            let expected: Vec<_> = passes.iter().map(|it| 4.0 * it).collect();
            assert_eq!(doubled, expected, "{what}, doubled twice");
        }
    }
}

/// dX and dW of linear layers with activations between beside those of Burn on the host, of losses whose gradients are
/// far from the ends of FP16. What rounds to the other side of zero, ReLU lets pass or not: one in a thousand of BF16.
/// A device may read FP32 as TF32, which has the bits of FP16.
fn chains<B: DataBackend>(seed: u64) {
    fn gradients<B: LayerBackend>(seed: u64, activation: &str) -> [Vec<f32>; 3] {
        let (rows, width) = (512, 32);
        let (device, mut rng) = (B::Device::default(), Rng::new(seed));
        let layers: [Linear<B>; 2] = [(); 2].map(|()| {
            let config = LinearConfig::new(width, width).with_bias(false);
            attached::<B, _>(&every_layer(seed), config.init(&device), seed).1
        });
        let x = tensor::<B, 2>(&rng.normals(rows * width, 1.0), [rows, width], &device);
        let x = x.require_grad();
        let weight = tensor::<B, 2>(&rng.normals(rows * width, 1e-2), [rows, width], &device);
        let hidden = layers[0].forward(x.clone());
        let hidden = match activation {
            "relu" => relu(hidden),
            "gelu" => gelu(hidden),
            "silu" => silu(hidden),
            _ => hidden,
        };
        let y = layers[1].forward(hidden).cast(FloatDType::F32);
        let gradients = (y * weight).sum().backward();
        let [up, down] = layers.map(|layer| {
            let gradient = layer.weight.grad(&gradients);
            floats(&gradient.expect("it is trained"))
        });
        let dx = x.grad(&gradients).expect("it asks for one");
        [floats(&dx), up, down]
    }
    fn check<B: DataBackend, R: Recipe>(seed: u64, least: f64) {
        for activation in ["none", "relu", "gelu", "silu"] {
            let exact = gradients::<Autodiff<Flex>>(seed, activation);
            let rounded = gradients::<QuantTrain<Autodiff<B>, R>>(seed, activation);
            let cosines = [0, 1, 2].map(|it| cosine(&rounded[it], &exact[it]));
            assert!(
                cosines.iter().all(|it| *it > least),
                "seed {seed}: {:?}, {activation}: cosines of dX, dW, dW {cosines:.6?}",
                R::ROW.compute
            );
        }
    }
    check::<B, MixedPrecision<f32>>(seed, 0.998);
    if supports::<B>(FloatDType::F16.into()) {
        check::<B, MixedPrecision<f16>>(seed, 0.998);
    }
    if supports::<B>(FloatDType::BF16.into()) {
        check::<B, MixedPrecision<bf16>>(seed, 0.997);
    }
}
