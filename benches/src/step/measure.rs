//! One layer on one backend: checked, then measured.

use anyhow::Result;
use burn::tensor::DType;
use burn_quant_train::recipe::Row;

use super::{
    architecture::{Architecture, Layer},
    check::{Outputs, Reference},
    contender::{Contender, settle},
    input::Input,
    passes::{Passes, Renewed, activation_bytes},
};
use crate::{results::StepSpeed, timing::Sampling};

/// How a layer is measured.
pub struct Measure<'a, B: Contender> {
    /// How long.
    pub sampling: Sampling,
    /// Where.
    pub device: &'a B::Device,
    /// The dtype of parameters.
    pub parameters: DType,
    /// The dtype of activations.
    pub activations: DType,
    /// Bytes in use on the device now, if it tells.
    pub live_bytes: &'a dyn Fn() -> Option<u64>,
}

/// The relative error above which something is wrong with a layer: of floats, of 8 bits, and of 4, where a gradient of
/// which half of the rows are drawn may be nearly as far off as it is long. That of zeros is 1.
fn error_limit(row: Option<Row>) -> f64 {
    let Some(linear) = row.and_then(|row| row.linear) else {
        return 0.05;
    };
    let bits = linear.operands().map(|(_, cast)| cast.number.bits()).min();
    if bits.is_some_and(|bits| bits < 8) {
        0.95
    } else {
        0.2
    }
}

impl<B: Contender> Measure<'_, B> {
    /// Compares outputs and gradients with `reference`, where there is one, and measures both passes. Also returns the
    /// outputs, as a reference for others.
    ///
    /// # Errors
    ///
    /// The device failed, or an error is above its limit.
    pub fn run<A: Architecture>(
        &self,
        architecture: &A,
        input: &Input,
        reference: Option<&Reference>,
    ) -> Result<(StepSpeed, Outputs)> {
        let inputs = input.on::<B>(self.activations, self.device);
        let model = architecture.init::<B>(self.parameters, self.device);
        let gradients = |model: &A::Layer<B>| inputs.backward(model.forward(inputs.x()));
        let (model, fallback_rate) = settle::<B, _>(model, gradients);
        let outputs = Outputs::of(&model, &inputs, input)?;
        let limit = error_limit(B::row());
        let error = reference.map(|reference| outputs.error(reference, limit));
        let error = error.transpose()?;
        let activation_bytes = activation_bytes(&model, &inputs, self.device, self.live_bytes)?;
        let model = Renewed::new(model);
        let passes = Passes::time::<B, _>(
            self.sampling,
            self.device,
            || model.forward(&inputs),
            |tensors| model.backward(&inputs, tensors),
        )?;
        let speed = StepSpeed {
            subject: B::subject(),
            tokens: input.rows[0] * input.rows[1],
            sequence: None,
            hidden: input.features[0],
            outputs: Some(input.features[1]),
            contexts: None,
            forward: passes.forward,
            both: passes.both,
            enqueue: Some(passes.enqueue),
            alone: Some(passes.alone),
            activation_bytes,
            fallback_rate,
            error,
            parts: Vec::new(),
        };
        Ok((speed, outputs))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn::backend::{Autodiff, Flex};
    use burn_quant_train::{
        QuantTrain,
        recipe::{FallbackInt8, MixedPrecision},
    };

    use super::*;
    use crate::{
        random::Random,
        results::Subject,
        step::{
            architecture::{DecoderWeights, Weight},
            breakdown::Breakdown,
        },
    };

    type Inner = Autodiff<Flex>;
    type Int8 = QuantTrain<Inner, FallbackInt8<f32>>;
    type Mixed = QuantTrain<Inner, MixedPrecision<f32>>;

    const QUICK: Sampling = Sampling {
        samples: 1,
        sample: Duration::from_micros(1),
        warm_up: Duration::ZERO,
    };

    fn measure<B: Contender<Device: Default>, A: Architecture>(
        architecture: &A,
        input: &Input,
        reference: Option<&Reference>,
    ) -> (StepSpeed, Outputs) {
        let measure = Measure::<B> {
            sampling: QUICK,
            device: &Default::default(),
            parameters: DType::F32,
            activations: DType::F32,
            live_bytes: &|| None,
        };
        measure.run(architecture, input, reference).unwrap()
    }

    #[test]
    fn a_linear_layer_agrees_with_its_reference() {
        let mut random = Random::new(1);
        let weight = Weight::random(&mut random, [256, 384]);
        let input = Input::random(&mut random, [2, 320], [256, 384]);
        let reference = Some(Reference::of_linear(&mut random, &weight, &input));
        let (plain, _) = measure::<Inner, _>(&weight, &input, reference.as_ref());
        assert!(plain.error.unwrap() < 1e-5 && plain.fallback_rate.is_none());
        assert_eq!((plain.tokens, plain.hidden), (640, 256));
        let (mixed, _) = measure::<Mixed, _>(&weight, &input, reference.as_ref());
        assert_eq!(
            (mixed.subject, mixed.error),
            (Subject::recipe("mixed-precision"), plain.error)
        );
        let (int8, _) = measure::<Int8, _>(&weight, &input, reference.as_ref());
        assert!(
            (1e-3..0.05).contains(&int8.error.unwrap()),
            "{:?}",
            int8.error
        );
        // Two of ten blocks have an outlier.
        assert!((int8.fallback_rate.unwrap() - 0.2).abs() < 1e-6);
    }

    #[test]
    fn a_decoder_layer_agrees_with_floats_and_falls_into_its_parts() {
        let mut random = Random::new(2);
        let weights = DecoderWeights::random(&mut random, 128);
        let input = Input::random(&mut random, [2, 32], [128, 128]);
        let (_, outputs) = measure::<Inner, _>(&weights, &input, None);
        let reference = outputs.reference(&mut random);
        let (int8, _) = measure::<Int8, _>(&weights, &input, Some(&reference));
        assert!(
            (1e-3..0.2).contains(&int8.error.unwrap()),
            "{:?}",
            int8.error
        );

        let breakdown = Breakdown::<Int8> {
            sampling: QUICK,
            device: &Default::default(),
            parameters: DType::F32,
            activations: DType::F32,
            rows: [2, 32],
        };
        let parts = breakdown.parts(&weights, &mut random).unwrap();
        let counts: Vec<_> = parts.iter().map(|part| part.count).collect();
        assert_eq!(counts, [4, 2, 1, 1, 2, 1, 2]);
        assert!(parts.iter().all(|part| part.both.median_ms > 0.0));
    }
}
