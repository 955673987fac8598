//! Input that cannot be computed is answered with its fault; empty input is no error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    backend::{Autodiff, Flex, NdArray},
    tensor::{
        FloatDType, IntDType, Tensor, TensorMetadata,
        module::linear,
        ops::{FloatTensor, IntTensor},
    },
};
use burn_quant_train::{
    QuantTrain,
    data::{
        DataBackend, StochasticKey,
        optimizer::{Moment, StateFormat, compress_moment},
        product::{Accumulation, product},
        quantize::{Fallback, QuantizeSpec, Quantized, dequantize, quantize, quantize_fallback},
    },
    recipe::FallbackInt8,
};
use cubecl_kernels::{granularity::Granularity, number::Number, rounding::Rounding};
use quant_train_tests::{
    data::{primitive, tensor},
    models::One,
    train::every_layer,
};

const NEAREST: QuantizeSpec = QuantizeSpec::int8(Granularity::Block(16));

/// A tensor of ones.
fn ones<B: DataBackend, const D: usize>(shape: [usize; D]) -> FloatTensor<B> {
    let values = vec![1.0; shape.iter().product()];
    primitive(tensor::<B, D>(&values, shape, &Default::default()))
}

fn quantized<B: DataBackend>(shape: [usize; 2], spec: QuantizeSpec) -> Quantized<B> {
    quantize::<B>(ones::<B, 2>(shape), &spec)
}

/// Panics unless `run` panics with a message that says all of this.
#[track_caller]
fn assert_panics<T>(says: &[&str], run: impl FnOnce() -> T) {
    let panic = catch_unwind(AssertUnwindSafe(run)).err().expect("a panic");
    let text = panic.downcast_ref::<String>().expect("a message");
    for part in says {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

fn reject<B: DataBackend>() {
    assert_panics(&["quantize", "[2, 4, 4]", "flatten"], || {
        quantize::<B>(ones::<B, 3>([2, 4, 4]), &NEAREST)
    });
    for granularity in [Granularity::Block(0), Granularity::Group(0)] {
        let spec = QuantizeSpec {
            granularity,
            ..NEAREST
        };
        assert_panics(&["quantize", "(0)", "at least one"], || {
            quantized::<B>([4, 4], spec)
        });
    }
    let counts = |layers: usize| -> IntTensor<B> {
        B::int_zeros([layers, 2].into(), &Default::default(), IntDType::I32)
    };
    let fallback = |spec, layer, counts| {
        let state = Fallback {
            layer,
            thresholds: ones::<B, 1>([2]),
            counts,
        };
        quantize_fallback::<B>(ones::<B, 2>([4, 4]), &spec, state)
    };
    fallback(NEAREST, 1, counts(2));
    assert_panics(&["quantize_fallback", "layer 2", "[layers, 2]"], || {
        fallback(NEAREST, 2, counts(2))
    });
    assert_panics(&["quantize_fallback", "[1, 2]", "[layers, 2]"], || {
        fallback(NEAREST, 0, counts(1))
    });
    let key = StochasticKey { seed: 1, stream: 2 };
    for spec in [
        QuantizeSpec {
            number: Number::Int10,
            ..NEAREST
        },
        QuantizeSpec {
            granularity: Granularity::Token,
            ..NEAREST
        },
        QuantizeSpec {
            rounding: Rounding::Stochastic(key),
            ..NEAREST
        },
    ] {
        assert_panics(&["quantize_fallback", "it works on"], || {
            fallback(spec, 0, counts(2))
        });
    }
    let multiply = |k, bias| {
        let (a, b) = (
            quantized::<B>([4, 5], NEAREST),
            quantized::<B>([k, 6], NEAREST),
        );
        let bias = Some(ones::<B, 1>([bias]));
        product::<B>(
            a.operand(),
            None,
            b.operand(),
            bias,
            Accumulation::Promoted,
            FloatDType::F32,
        )
    };
    multiply(5, 6);
    assert_panics(&["product", "[4, 5]", "[4, 6]"], || multiply(4, 6));
    assert_panics(&["product", "bias", "[4, 6]"], || multiply(5, 5));
    assert_panics(&["quantize_state", "group: 0"], || {
        let format = StateFormat::E4M3.with_group(0);
        compress_moment::<B>(ones::<B, 2>([4, 4]), format, Moment::First)
    });
}

#[test]
fn operations_reject() {
    reject::<Flex>();
    reject::<NdArray>();
}

fn empty<B: DataBackend>() {
    let granularities = [
        Granularity::Block(16),
        Granularity::Group(16),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor,
    ];
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for granularity in granularities {
            let key = StochasticKey { seed: 1, stream: 2 };
            for rounding in [Rounding::Nearest, Rounding::Stochastic(key)] {
                let spec = QuantizeSpec {
                    granularity,
                    rounding,
                    ..NEAREST
                };
                let matrix = quantized::<B>(shape, spec);
                let floats = dequantize::<B>(&matrix, FloatDType::F32);
                assert_eq!(floats.shape(), shape.into(), "{spec:?}");
            }
        }
    }
}

#[test]
fn empty_matrices_stay_empty() {
    empty::<Flex>();
    empty::<NdArray>();
}

#[test]
fn layers_reject() {
    type B = QuantTrain<Autodiff<Flex>, FallbackInt8<f32, 16>>;
    let device = Default::default();
    let optim = every_layer(1).init::<B, One<B>>();
    let model = optim.attach(One::<B>::new(256, 512, false, &device));
    let weight = model.linear.weight.val();
    let forward = |k, n| {
        let x = Tensor::<B, 3>::ones([2, 3, k], &device);
        linear(x, weight.clone(), Some(Tensor::ones([n], &device)))
    };
    forward(256, 512);
    assert_panics(&["linear", "[2, 3, 255]", "[256, 512]"], || {
        forward(255, 512)
    });
    assert_panics(&["linear", "bias", "[511]", "[256, 512]"], || {
        forward(256, 511)
    });
}
