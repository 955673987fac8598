//! A pass of a quantized linear layer as one operation gives what its steps give, to the bit.

use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor, TensorMetadata, ops::FloatTensor};
use burn_quant_train::{
    layer::{Bank, BankValues, Layer},
    ops::{
        InputCasts, Layout, LinearInput, Operand, QuantOps, Quantized, StochasticKey,
        linear::{
            GradientForm, LinearBackward, LinearForward, LinearProduct, LinearWeight, LinearX,
        },
    },
    recipe::{Cast, Rounding},
};
use quant_train_tests::{
    Rng,
    data::{lifted, primitive, primitive_floats, primitive_ints, same_bits, tensor},
    on_every_backend,
};

on_every_backend! {
    forward => forward;
    backward => backward;
}

const BLOCK: usize = 32;
const NEAREST: Cast = Cast::int8(BLOCK, Rounding::Nearest);
const STOCHASTIC: Cast = Cast::int8(BLOCK, Rounding::Stochastic);
const DTYPE: FloatDType = FloatDType::F32;

/// Blocks with one of these magnitudes fall back.
const OUTLIER: f32 = 100.0;
const THRESHOLD: f32 = 10.0;

fn key(rng: &mut Rng) -> StochasticKey {
    StochasticKey {
        seed: rng.bits(),
        stream: rng.bits(),
    }
}

/// X or dY, `[batch, sequence, features]`, an outlier in every few blocks.
fn activations<B: QuantOps>(rng: &mut Rng, shape: [usize; 3]) -> Tensor<B, 3> {
    let mut values = rng.normals(shape.iter().product(), 1.0);
    for _ in 0..=values.len() / 4000 {
        let place = rng.below(values.len());
        values[place] = OUTLIER;
    }
    tensor(&values, shape, &B::Device::default())
}

fn matrix<B: QuantOps>(rng: &mut Rng, shape: [usize; 2]) -> Tensor<B, 2> {
    let values = rng.normals(shape.iter().product(), 0.1);
    tensor(&values, shape, &B::Device::default())
}

/// The only layer of a bank.
fn layer<B: QuantOps>() -> Layer<B> {
    let initial = BankValues {
        thresholds: vec![THRESHOLD],
        rates: vec![f32::NAN],
    };
    let bank = Arc::new(Bank::new(1, 0, initial));
    Layer::new(String::from("layer"), 0, true, bank)
}

fn counts<B: QuantOps>(layer: &Layer<B>) -> Vec<i32> {
    let device = B::Device::default();
    let counts = |state: &mut burn_quant_train::layer::FallbackState<B>| state.counts.clone();
    primitive_ints::<B>(&layer.bank().with_state(&device, counts))
}

#[track_caller]
fn assert_same<B: QuantOps>(got: &FloatTensor<B>, expected: &FloatTensor<B>, what: &str) {
    assert_eq!(got.shape(), expected.shape(), "{what}");
    let flat = |tensor: &FloatTensor<B>| {
        let elements = tensor.shape().num_elements();
        let flat = B::float_reshape(tensor.clone(), [elements].into());
        primitive_floats::<B, 1>(&flat)
    };
    assert!(same_bits(&flat(got), &flat(expected)), "{what}");
}

/// The same integers and scales, in the layouts of `got`.
#[track_caller]
fn assert_same_matrix<B: QuantOps>(got: &Quantized<B>, expected: &Quantized<B>, what: &str) {
    assert_eq!(got.shape, expected.shape, "{what}");
    assert_same::<B>(&got.scales, &expected.scales, what);
    for (got, expected) in [
        (&got.values, &expected.values),
        (&got.transposed, &expected.transposed),
    ] {
        let ints = |values| primitive_ints::<B>(values);
        assert_eq!(
            got.as_ref().map(ints),
            expected.as_ref().map(ints),
            "{what}"
        );
    }
}

fn forward<B: QuantOps>(seed: u64) {
    let mut rng = Rng::new(seed);
    let device = B::Device::default();
    for (transposed, falls_back) in [(false, false), (false, true), (true, true)] {
        let shape = [1 + rng.below(3), 1 + rng.below(70), 1 + rng.below(150)];
        let [batch, sequence, k] = shape;
        let n = 1 + rng.below(150);
        let what = format!("seed {seed}: {shape:?} to {n}, {transposed}, {falls_back}");
        let x = activations::<B>(&mut rng, shape);
        let weight = matrix::<B>(&mut rng, [k, n]);
        let bias = primitive(matrix::<B>(&mut rng, [1, n]).reshape([n]));
        let casts = InputCasts {
            forward: NEAREST,
            saved: Some((STOCHASTIC, Some(key(&mut rng)))),
        };
        let (in_one, in_steps) = (layer::<B>(), layer::<B>());
        let float_x = || LinearX::Float {
            x: primitive(x.clone()),
            casts,
            fallback: falls_back.then_some(&in_one),
            keeps_operand: true,
        };
        let float_weight = || LinearWeight::Float {
            weight: primitive(weight.clone()),
            cast: NEAREST,
            transposed,
        };
        let pass = |x, weight| {
            let product = LinearProduct {
                weight,
                bias: Some(bias.clone()),
                dtype: DTYPE,
            };
            B::linear_forward(LinearForward { x, product })
        };
        let output = pass(float_x(), float_weight());

        let rows = primitive(x.clone().reshape([batch * sequence, k]));
        let input: LinearInput<B> = match falls_back {
            false => B::quantize_input(rows, casts, None),
            true => in_steps.with_fallback(&device, |fallback| {
                let mut input = B::quantize_input(rows, casts, Some(fallback));
                let counts = input.counts.take();
                (input, counts.expect("a state comes out"))
            }),
        };
        let tagged = if transposed {
            weight.clone().transpose()
        } else {
            weight.clone()
        };
        let quantized = B::quantize_matrix(primitive(tagged), NEAREST, Layout::RowMajor, None);
        let operand = |matrix| Operand {
            matrix,
            transpose: transposed,
        };
        let y = B::quantized_matmul(
            input.forward.operand(),
            input.residual.as_ref(),
            operand(&quantized),
            Some(bias.clone()),
            DTYPE,
        );
        let y = primitive(lifted::<B, 2>(y).reshape([batch, sequence, n]));

        assert_same::<B>(&output.y, &y, &what);
        let made = output.weight.expect("a new weight");
        assert_same_matrix(&made, &quantized, &what);
        let kept = output.operand.expect("an operand");
        assert_same_matrix(&kept, &input.forward, &what);
        let saved = output.saved.expect("a saved copy");
        assert_same_matrix(&saved, &input.saved.expect("a saved copy"), &what);
        let blocks = (batch * sequence).div_ceil(BLOCK) * k.div_ceil(BLOCK);
        let counted = counts(&in_one);
        assert_eq!(counted, counts(&in_steps), "{what}");
        if falls_back {
            assert!(counted[0] > 0 && counted[1] == blocks as i32, "{what}");
        }

        // A second pass, with the weight that the first one made.
        let again = pass(float_x(), LinearWeight::Quantized(operand(&made)));
        assert_same::<B>(&again.y, &y, &what);
        assert!(again.weight.is_none());

        // Passes with the copy of X that the first one made, which has no residuals.
        if !falls_back {
            let quantized_x = || LinearX::Quantized {
                matrix: &kept,
                shape: shape.into(),
            };
            for weight in [float_weight(), LinearWeight::Quantized(operand(&made))] {
                let is_new = matches!(weight, LinearWeight::Float { .. });
                let again = pass(quantized_x(), weight);
                assert_same::<B>(&again.y, &y, &what);
                assert_eq!(again.weight.is_some(), is_new, "{what}");
                assert!(again.operand.is_none() && again.saved.is_none(), "{what}");
            }
        }
    }
}

fn backward<B: QuantOps>(seed: u64) {
    let mut rng = Rng::new(seed);
    let shape = [1 + rng.below(3), 1 + rng.below(70), 1 + rng.below(150)];
    let [batch, sequence, n] = shape;
    let k = 1 + rng.below(150);
    let rows = batch * sequence;
    let grad = activations::<B>(&mut rng, shape);
    let (of_grad, of_x) = (key(&mut rng), key(&mut rng));
    let weight = primitive(matrix::<B>(&mut rng, [k, n]));
    let weight = B::quantize_matrix(weight, NEAREST, Layout::RowMajor, None);
    let x = primitive(matrix::<B>(&mut rng, [rows, k]));
    let x = B::quantize_matrix(x, STOCHASTIC, Layout::Transposed, Some(of_x));

    let flat = primitive(grad.clone().reshape([rows, n]));
    let quantized = B::quantize_matrix(flat, STOCHASTIC, Layout::Both, Some(of_grad));
    let of_input =
        B::quantized_matmul(quantized.operand(), None, weight.operand().t(), None, DTYPE);
    let of_input = primitive(lifted::<B, 2>(of_input).reshape([batch, sequence, k]));
    let of_weight = B::quantized_matmul(x.operand().t(), None, quantized.operand(), None, DTYPE);

    for (wants_x, wants_weight) in [(true, true), (true, false), (false, true), (false, false)] {
        let what = format!("seed {seed}: {shape:?} from {k}, {wants_x}, {wants_weight}");
        let form = |shape: &[usize]| GradientForm {
            shape: shape.to_vec().into(),
            dtype: DTYPE,
        };
        let gradients = B::linear_backward(LinearBackward {
            grad: primitive(grad.clone()),
            cast: STOCHASTIC,
            key: Some(of_grad),
            weight: wants_x.then(|| (weight.operand(), form(&[batch, sequence, k]))),
            x: wants_weight.then(|| (x.operand(), form(&[k, n]))),
        });
        assert_eq!(gradients.x.is_some(), wants_x, "{what}");
        assert_eq!(gradients.weight.is_some(), wants_weight, "{what}");
        if let Some(got) = &gradients.x {
            assert_same::<B>(got, &of_input, &what);
        }
        if let Some(got) = &gradients.weight {
            assert_same::<B>(got, &of_weight, &what);
        }
    }
}
