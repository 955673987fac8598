//! `errors` on a small model: its decoder is that of `pretrain`, what it notes is what the gradients are made of, and
//! contexts cost what they should.

use benches::errors::{
    capture::{Captured, Exactly, Kind, capture},
    contexts::{self, Compressed, Gradients, Library, Saved},
    decoder::{Decoder, Exact},
    granularity, groups,
    metric::Distance,
    numbers::Numbers,
};
use burn::{
    module::Module,
    record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder},
    tensor::{Int, Tensor, TensorData, backend::Backend},
};
use cubecl_kernels::granularity::Granularity;
use examples::{data::Batch, model, model::DecoderConfig};

const BATCH: [usize; 2] = [4, 32];

fn config() -> DecoderConfig {
    DecoderConfig::new(64, 128, 4, 2, BATCH[1])
}

fn batch<B: Backend>() -> Batch<B> {
    let tokens = |skip: usize| -> Tensor<B, 2, Int> {
        let tokens: Vec<i32> = (0..BATCH[0] * BATCH[1])
            .map(|index| ((index + skip) * 31 % 97) as i32)
            .collect();
        Tensor::from_data(TensorData::new(tokens, BATCH), &Default::default())
    };
    Batch {
        inputs: tokens(0),
        targets: tokens(1),
    }
}

/// The record of a model of `pretrain`, and that model.
fn recorded() -> (Vec<u8>, model::Decoder<Exactly>) {
    let device = Default::default();
    let model = config().init::<Exactly>(&device);
    model.materialize();
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    let record = Recorder::<Exactly>::record(&recorder, model.clone().into_record(), ());
    (record.expect("a record"), model)
}

fn loaded<B: Backend, M: Module<B>>(model: M, bytes: Vec<u8>) -> M {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    let record = Recorder::<B>::load(&recorder, bytes, &Default::default());
    model.load_record(record.expect("a record of a decoder"))
}

fn decoder(bytes: Vec<u8>) -> Decoder<Exactly> {
    loaded(Decoder::new(&config(), &Default::default()), bytes)
}

#[test]
fn the_decoder_is_that_of_pretrain() {
    let (bytes, model) = recorded();
    let decoder = decoder(bytes);
    assert_eq!(decoder.num_params(), model.num_params());
    let expected = model.loss(batch());
    let loss = decoder.loss(batch(), &mut Exact);
    let apart = (expected.clone() - loss.clone()).abs().into_scalar();
    assert!(apart < 1e-5, "{apart}");
    let (expected, got) = (
        Gradients::of(&model, expected),
        Gradients::of(&decoder, loss),
    );
    let counts = |it: &Gradients| (it.matrices.len(), it.norms.len());
    assert_eq!(counts(&got), (16, 5));
    assert_eq!(counts(&got), counts(&expected));
    for apart in got.beside(&expected) {
        assert!(apart < 1e-9, "{apart}");
    }
}

fn of_kind(captured: &[Captured], kind: Kind) -> Vec<&Captured> {
    captured.iter().filter(|it| it.kind == kind).collect()
}

/// `X^T dY` in FP64.
fn weight_gradient(x: &Captured, gradient: &Captured) -> Vec<f32> {
    let ([rows, inputs], [_, outputs]) = (x.shape, gradient.shape);
    let mut product = vec![0.0; inputs * outputs];
    for row in 0..rows {
        for input in 0..inputs {
            let x = f64::from(x.values[row * inputs + input]);
            for output in 0..outputs {
                product[input * outputs + output] +=
                    x * f64::from(gradient.values[row * outputs + output]);
            }
        }
    }
    product.into_iter().map(|it| it as f32).collect()
}

/// The tensors that are noted multiply to the gradients of the weights, layer by layer.
#[test]
fn what_is_captured_makes_the_gradients() {
    let (bytes, _) = recorded();
    let decoder = decoder(bytes);
    let captured = capture(&decoder, batch()).unwrap();
    let count = |kind| of_kind(&captured, kind).len();
    assert_eq!(
        Kind::ALL.map(count),
        [5, 4, 2, 4, 2, 1, 6, 2, 4, 2, 1],
        "two layers"
    );
    // Embedding; of each layer q, k, v, o, gate, up, down; head.
    let gradients = contexts::exact(&decoder, &batch()).matrices;
    let near = |index: usize, x: &Captured, gradient: &Captured| {
        let product = weight_gradient(x, gradient);
        let error = Distance::of(&gradients[index], &product).relative_error();
        assert!(error < 1e-5, "weight {index}: {error}");
    };
    for layer in 0..2 {
        let first = 1 + 7 * layer;
        let of = |kind, index: usize| of_kind(&captured, kind)[index];
        let normed = |half: usize| of(Kind::Normed, 2 * layer + half);
        for index in 0..3 {
            near(
                first + index,
                normed(0),
                of(Kind::GradientQkv, 3 * layer + index),
            );
        }
        near(
            first + 3,
            of(Kind::Mixed, layer),
            of(Kind::GradientOutput, layer),
        );
        for index in 0..2 {
            let gradient = of(Kind::GradientGateUp, 2 * layer + index);
            near(first + 4 + index, normed(1), gradient);
        }
        near(
            first + 6,
            of(Kind::Product, layer),
            of(Kind::GradientDown, layer),
        );
    }
    let of = |kind| of_kind(&captured, kind)[0];
    near(15, of(Kind::Last), of(Kind::GradientHead));
}

#[test]
fn more_bits_and_smaller_groups_are_nearer_to_exact() {
    let (bytes, _) = recorded();
    let decoder = decoder(bytes.clone());
    let exact = contexts::exact(&decoder, &batch());
    let all = contexts::of_operators(&decoder, &batch());
    let [four, eight, sixteen] = [4, 8, 16].map(|bits| {
        let mut integers = all.iter().filter(|it| it.numbers.starts_with("INT"));
        integers.find(|it| it.bits == bits).expect("4 to 16 bits")
    });
    // Four bits more divide the error by 16, and one less the cosine by its square.
    for (few, many) in [(four, eight), (eight, sixteen)] {
        assert!(few.model > 50.0 * many.model, "{few:?}, {many:?}");
        assert!(few.norms > 50.0 * many.norms, "{few:?}, {many:?}");
    }
    assert!((1e-5..0.3).contains(&four.model) && sixteen.model < 1e-8);

    // Forward values are exact: only the gradients tell.
    let mut compressed = Compressed {
        numbers: Numbers::Integer(4),
        granularity: Granularity::Group(32),
    };
    let loss = decoder.loss(batch(), &mut compressed);
    let apart = (loss.clone() - decoder.loss(batch(), &mut Exact)).abs();
    assert!(apart.into_scalar() < 1e-5);
    let [small_groups, ..] = Gradients::of(&decoder, loss).beside(&exact);
    assert!(small_groups < four.model, "{small_groups}, {four:?}");

    let of_library = loaded(config().init::<Library>(&Default::default()), bytes);
    let library = contexts::of_library(&of_library, &batch());
    assert!(library.iter().all(|it| it.saved == Saved::All));
    let of = |numbers: &str| {
        let mut library = library.iter();
        let found = library.find(|it| it.numbers == numbers && it.group == Some(128));
        found.expect("a format of the library").model
    };
    assert!(of("INT4") > 50.0 * of("INT8") && of("INT8") > 5.0 * of("INT10"));
    assert!(of("E5M2") > of("E4M3") && of("E4M3") > of("INT8"));
    assert!((1e-12..1e-4).contains(&of("INT10")), "{library:?}");
}

#[test]
fn errors_grow_with_what_is_rounded() {
    // The smallest groups add less to the forward error than one model differs from the next.
    const MODELS: usize = 8;
    let of_models: Vec<_> = (0..MODELS)
        .map(|_| {
            let decoder = decoder(recorded().0);
            let captured = capture(&decoder, batch()).unwrap();
            groups::errors(&decoder, &batch(), &captured).unwrap()
        })
        .collect();
    for errors in &of_models {
        let linear = &errors[1];
        assert_eq!(linear.flow, groups::Flow::LinearByTensor);
        assert!(linear.forward > 0.0 && linear.backward > 0.0 && linear.contexts.is_none());
        for error in &errors[2..] {
            let contexts = error.contexts.as_ref().expect("contexts of operators");
            assert!((0.01..0.04).contains(&contexts.read), "{error:?}");
            assert!(contexts.backward < error.backward, "{error:?}");
        }
        let read = |index: usize| errors[index].contexts.as_ref().map(|it| it.read);
        assert!(read(2) < read(7));
    }
    let forward = |index: usize| of_models.iter().map(|it| it[index].forward).sum::<f64>();
    for index in 2..of_models[0].len() {
        let flow = of_models[0][index].flow;
        assert!(forward(index) > forward(1), "{flow:?}: {of_models:?}");
    }
}

#[test]
fn errors_of_int8_grow_with_the_block() {
    let (bytes, _) = recorded();
    let captured = capture(&decoder(bytes), batch()).unwrap();
    let int8 = granularity::by_granularity(&captured);
    let of = |granularity: &str| {
        let mut errors = int8.iter();
        let found = errors.find(|it| it.kind == Kind::Gated && it.granularity == granularity);
        found.expect("a granularity").error
    };
    assert!(of("tensor") > of("32x32") && of("128x128") > of("64x64"));
}
