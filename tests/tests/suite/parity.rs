//! With FP32 as its compute dtype `MixedPrecision` changes no bit of what Burn computes.

use burn::{
    backend::{
        Autodiff, Flex, NdArray,
        autodiff::checkpoint::strategy::{
            BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
        },
    },
    module::AutodiffModule,
    optim::AdamWConfig,
    tensor::backend::AutodiffBackend,
};
use burn_quant_train::{
    QuantTrain,
    data::DataBackend,
    optim::{LayerBackend, QuantAdamWConfig},
    recipe::MixedPrecision,
};
use quant_train_tests::{
    data::same_bits,
    models::{Classifier, ConvNet, Encoder},
    seed,
    train::{parameters_of, samples, train, transplant},
};

const STEPS: usize = 10;

/// Trains `M` on Burn's backend and `N`, the same model, on the decorator's, from Burn's own initial weights.
fn compare<A, M, B, N>()
where
    A: AutodiffBackend,
    M: AutodiffModule<A> + Classifier<A>,
    B: LayerBackend,
    N: AutodiffModule<B> + Classifier<B>,
{
    let seed = seed();
    let (device, our_device) = (A::Device::default(), B::Device::default());
    let model = M::new(&device);
    // Draws the lazily initialized weights, so that clones of the model are the same model.
    let weights = parameters_of::<A, M>(&model);
    let ours = transplant::<A, B, M, N>(&model, N::new(&our_device), &our_device);
    assert_eq!(
        weights,
        parameters_of::<B, N>(&ours),
        "the weights went across"
    );

    let batches = samples::<A, M>(seed, STEPS);
    let mut adamw = AdamWConfig::new()
        .with_weight_decay(0.05)
        .with_beta_2(0.95)
        .init::<A, M>();
    let mut quant = QuantAdamWConfig::new()
        .with_weight_decay(0.05)
        .with_beta_2(0.95)
        .init::<B, N>();
    let burn = train(model, &mut adamw, 3e-3, &batches);
    let run = train(ours, &mut quant, 3e-3, &batches);

    assert!(
        burn.losses.iter().all(|loss| loss.is_finite()),
        "Burn's own losses {:?}",
        burn.losses
    );
    assert!(
        burn.losses.windows(2).any(|pair| pair[0] != pair[1]),
        "the loss moves"
    );
    assert_eq!(
        burn.losses
            .iter()
            .map(|loss| loss.to_bits())
            .collect::<Vec<_>>(),
        run.losses
            .iter()
            .map(|loss| loss.to_bits())
            .collect::<Vec<_>>(),
        "seed {seed}: losses {:?} and {:?}",
        burn.losses,
        run.losses
    );
    for (step, (burn, ours)) in burn.gradients.iter().zip(&run.gradients).enumerate() {
        assert!(
            !burn.is_empty() && burn.len() == ours.len(),
            "seed {seed}, step {step}: gradients"
        );
        for (index, (burn, ours)) in burn.iter().zip(ours).enumerate() {
            assert!(
                same_bits(burn, ours),
                "seed {seed}, step {step}: gradient of parameter {index}"
            );
        }
    }
    let (burn, ours) = (
        parameters_of::<A, M>(&burn.model),
        parameters_of::<B, N>(&run.model),
    );
    for (index, (burn, ours)) in burn.iter().zip(&ours).enumerate() {
        assert!(
            same_bits(burn, ours),
            "seed {seed}: parameter {index} after {STEPS} steps"
        );
    }
}

type Ours<B, C> = QuantTrain<Autodiff<B, C>, MixedPrecision<f32>>;

fn encoder<B: DataBackend, C: CheckpointStrategy>() {
    compare::<Autodiff<B, C>, Encoder<_>, Ours<B, C>, Encoder<_>>();
}

fn conv_net<B: DataBackend, C: CheckpointStrategy>() {
    compare::<Autodiff<B, C>, ConvNet<_>, Ours<B, C>, ConvNet<_>>();
}

macro_rules! parity {
    ($($test:ident: $check:ident, $backend:ty, $strategy:ty;)*) => { $(
        #[test]
        fn $test() {
            $check::<$backend, $strategy>();
        }
    )* };
}

parity! {
    encoder_on_flex: encoder, Flex, NoCheckpointing;
    encoder_on_flex_with_balanced_checkpointing: encoder, Flex, BalancedCheckpointing;
    encoder_on_ndarray: encoder, NdArray, NoCheckpointing;
    encoder_on_ndarray_with_balanced_checkpointing: encoder, NdArray, BalancedCheckpointing;
    conv_net_on_flex: conv_net, Flex, NoCheckpointing;
    conv_net_on_flex_with_balanced_checkpointing: conv_net, Flex, BalancedCheckpointing;
    conv_net_on_ndarray: conv_net, NdArray, NoCheckpointing;
    conv_net_on_ndarray_with_balanced_checkpointing: conv_net, NdArray, BalancedCheckpointing;
}
