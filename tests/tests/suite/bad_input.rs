//! What cannot be computed is answered with what was wrong; what is empty is no error.

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
    ops::{
        Layout, QuantOps, Quantized, StochasticKey,
        adamw::{Moment, StateFormat},
    },
    recipe::{Cast, FallbackInt8, Format, Granularity, Rounding},
};
use quant_train_tests::data::{primitive, tensor};

const NEAREST: Cast = Cast::int8(16, Rounding::Nearest);

/// A tensor of ones.
fn ones<B: QuantOps, const D: usize>(shape: [usize; D]) -> FloatTensor<B> {
    let values = vec![1.0; shape.iter().product()];
    primitive(tensor::<B, D>(&values, shape, &Default::default()))
}

fn quantized<B: QuantOps>(shape: [usize; 2], cast: Cast) -> Quantized<B> {
    let key = StochasticKey { seed: 1, stream: 2 };
    B::quantize_matrix(ones::<B, 2>(shape), cast, Layout::RowMajor, Some(key))
}

/// A panic that says all of this.
#[track_caller]
fn assert_panics<T>(says: &[&str], run: impl FnOnce() -> T) {
    let panic = catch_unwind(AssertUnwindSafe(run)).err().expect("a panic");
    let text = panic.downcast_ref::<String>().expect("a message");
    for part in says {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

fn reject<B: QuantOps>() {
    assert_panics(&["quantize", "[2, 4, 4]", "flatten"], || {
        B::quantize_matrix(ones::<B, 3>([2, 4, 4]), NEAREST, Layout::RowMajor, None)
    });
    for granularity in [Granularity::Block(0), Granularity::Group(0)] {
        let cast = Cast {
            granularity,
            ..NEAREST
        };
        assert_panics(&["quantize", "(0)", "at least one"], || {
            quantized::<B>([4, 4], cast)
        });
    }
    let counts = |layers: usize| -> IntTensor<B> {
        B::int_zeros([layers, 2].into(), &Default::default(), IntDType::I32)
    };
    let fallback = |cast, layer, counts| {
        B::quantize_fallback(ones::<B, 2>([4, 4]), cast, layer, ones::<B, 1>([2]), counts)
    };
    fallback(NEAREST, 1, counts(2));
    assert_panics(&["quantize_fallback", "layer 2", "[layers, 2]"], || {
        fallback(NEAREST, 2, counts(2))
    });
    assert_panics(&["quantize_fallback", "[1, 2]", "[layers, 2]"], || {
        fallback(NEAREST, 0, counts(1))
    });
    for cast in [
        Cast {
            format: Format::Int10,
            ..NEAREST
        },
        Cast {
            granularity: Granularity::Token,
            ..NEAREST
        },
    ] {
        assert_panics(&["quantize_fallback", "square blocks"], || {
            fallback(cast, 0, counts(2))
        });
    }
    let product = |k, bias| {
        let (a, b) = (
            quantized::<B>([4, 5], NEAREST),
            quantized::<B>([k, 6], NEAREST),
        );
        let bias = Some(ones::<B, 1>([bias]));
        B::quantized_matmul(a.operand(), None, b.operand(), bias, FloatDType::F32)
    };
    product(5, 6);
    assert_panics(&["quantized_matmul", "[4, 5]", "[4, 6]"], || product(4, 6));
    assert_panics(&["quantized_matmul", "bias", "[4, 6]"], || product(5, 5));
    assert_panics(&["quantize_state", "group: 0"], || {
        let format = StateFormat::E4M3.with_group(0);
        B::compress_moment(ones::<B, 2>([4, 4]), format, Moment::First)
    });
}

#[test]
fn operations_reject() {
    reject::<Flex>();
    reject::<NdArray>();
}

fn empty<B: QuantOps>() {
    let granularities = [
        Granularity::Block(16),
        Granularity::Group(16),
        Granularity::Token,
        Granularity::Channel,
        Granularity::Tensor,
    ];
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for granularity in granularities {
            for rounding in [Rounding::Nearest, Rounding::Stochastic] {
                let cast = Cast {
                    granularity,
                    rounding,
                    ..NEAREST
                };
                let matrix = quantized::<B>(shape, cast);
                let floats = B::dequantize_matrix(&matrix, FloatDType::F32);
                assert_eq!(floats.shape(), shape.into(), "{cast:?}");
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
    let weight = Tensor::<B, 2>::ones([256, 512], &device).require_grad();
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
