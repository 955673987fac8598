//! Which way to train, and why: BF16 mixed precision is the default, and what departs from it needs a reason
//! (training-precision-guide, "Training Precision Selection Guide").

use burn_quant_train::recipe::{MixedPrecision, Name, Recipe};
use serde::Serialize;

use super::device::{Device, Narrowest};
use super::memory::Case;
use super::speed::Speed;
use super::table::gib;
use super::{Question, Row};
use crate::args::{Checkpointing, Compute, Contexts, Optimizer};

/// A way to train, and its reasons.
#[derive(Serialize, Clone, Debug)]
pub struct Recommendation {
    /// The recipe.
    pub recipe: Name,
    /// How activations wait for the backward pass.
    pub contexts: Contexts,
    /// The format of the optimizer's moments.
    pub optimizer: Optimizer,
    /// The dtype of what is not quantized.
    pub compute: Compute,
    /// True if losses must be scaled.
    pub loss_scaling: bool,
    /// False if not even this fits; none: no memory was given.
    pub fits: Option<bool>,
    /// Why.
    pub reasons: Vec<String>,
    /// Further remarks.
    pub notes: Vec<String>,
}

/// Ways to train, the most cautious first, each of less memory than the one before, and what it gives up.
///
/// None has quantized products: with contexts a quantized layer may keep its own copy of X beside what others keep of it,
/// that behind a gate does.
fn by_caution() -> [(Case, &'static str); 4] {
    let mixed = <MixedPrecision<f32> as Recipe>::ROW.name();
    let case = |contexts, optimizer| Case {
        recipe: mixed,
        contexts,
        optimizer,
    };
    use {Contexts as C, Optimizer as O};
    [
        (
            case(C::Exact, O::Adamw),
            "nothing is quantized: the default for all training",
        ),
        (
            case(C::Exact, O::Fp8Adamw),
            "moments in FP8 save three quarters of the optimizer's memory and touch no product",
        ),
        (
            case(C::Int10, O::Fp8Adamw),
            "activations wait in INT10: gradients stay within a cosine of 0.9999, but its cost in time on GPUs was not \
             measured",
        ),
        (
            case(C::Int8, O::Int8Adamw),
            "activations wait in INT8, as do the moments: gradients stay within a cosine of 0.9995, and the cost in \
             time on GPUs was not measured",
        ),
    ]
}

/// The first way by caution that fits, or where no memory was given the first.
pub fn recommend(question: &Question, rows: &[Row]) -> Recommendation {
    let of = |case: &Case| rows.iter().find(|row| row.case() == *case);
    let ways: Vec<_> = by_caution()
        .into_iter()
        .filter_map(|(case, why)| Some((of(&case)?, why)))
        .collect();
    let fitting = ways.iter().find(|(row, _)| row.fits != Some(false));
    let (row, why) = match fitting.or(ways.last()) {
        Some(&(row, why)) => (row, why),
        None => (smallest(rows), "the least memory of what was asked for"),
    };
    let mut reasons = vec![why.to_owned(), about_compute(question)];
    let first = ways.first().map(|(row, _)| *row);
    reasons.extend(about_memory(row, first));
    reasons.extend(about_checkpointing(question, row, first));
    Recommendation {
        recipe: row.recipe,
        contexts: row.contexts,
        optimizer: row.optimizer,
        compute: question.compute,
        loss_scaling: question.compute == Compute::F16,
        fits: row.fits,
        reasons,
        notes: notes(question, rows, row),
    }
}

fn smallest(rows: &[Row]) -> &Row {
    let smallest = rows.iter().min_by_key(|row| row.bytes.peak);
    smallest.expect("there are recipes, contexts and optimizers")
}

fn about_compute(question: &Question) -> String {
    let text = match (question.compute, question.device.narrowest()) {
        (Compute::F32, Narrowest::Fp32) => "FP32 is the CPU's fastest dtype",
        (Compute::F32, _) => {
            "FP32 is for debugging and small models; tensor cores are for narrower dtypes"
        }
        (Compute::Bf16, Narrowest::Fp32 | Narrowest::Fp16) => {
            "BF16 has the range of FP32, but this device has no tensor cores for it"
        }
        (Compute::Bf16, _) => "BF16 has the range of FP32, so that losses need no scaling",
        (Compute::F16, Narrowest::Fp16) => {
            "FP16 is what this device's tensor cores multiply; gradients vanish below 6e-8, so losses must be scaled"
        }
        (Compute::F16, _) => {
            "FP16 gradients vanish below 6e-8, so losses must be scaled; BF16 needs no scaling"
        }
    };
    text.to_owned()
}

fn about_memory(row: &Row, first: Option<&Row>) -> Option<String> {
    match row.fits? {
        false => Some(format!(
            "it does not fit: the largest batch that does has {} sequences",
            row.largest_batch.unwrap_or(0)
        )),
        true => {
            let first = first.filter(|first| first.fits == Some(false))?;
            Some(format!(
                "what is more cautious does not fit: {} with {} contexts and {} would hold {}",
                first.recipe,
                first.contexts,
                first.optimizer,
                gib(first.bytes.peak),
            ))
        }
    }
}

/// Where something was given up to fit, or nothing fits: the first way of those that give up less that would fit if
/// layers ran again, for one more forward pass; where nothing fits, else what the way that was taken would hold.
fn about_checkpointing(question: &Question, taken: &Row, first: Option<&Row>) -> Option<String> {
    let is_too_large = |row: &Row| row.fits == Some(false);
    let gave_up = is_too_large(taken) || first.is_some_and(is_too_large);
    if question.checkpointing == Checkpointing::Layers || !gave_up {
        return None;
    }
    let again = Question {
        checkpointing: Checkpointing::Layers,
        ..question.clone()
    };
    let (asked, taken_case) = (again.cases(), taken.case());
    let before = by_caution().map(|(case, _)| case).into_iter();
    let mut before = before
        .filter(|case| asked.contains(case))
        .take_while(|case| *case != taken_case)
        .map(|case| again.row(&case));
    let row = before
        .find(|row| !is_too_large(row))
        .or_else(|| is_too_large(taken).then(|| again.row(&taken_case)))?;
    let would = match is_too_large(&row) {
        true => "would not fit either",
        false => "would fit",
    };
    Some(format!(
        "with --checkpointing layers, for one more forward pass, {} with {} contexts and {} {would}: {}",
        row.recipe,
        row.contexts,
        row.optimizer,
        gib(row.bytes.peak)
    ))
}

fn notes(question: &Question, rows: &[Row], taken: &Row) -> Vec<String> {
    let mut notes = Vec::new();
    notes.extend(faster(rows, taken));
    notes.extend(about_narrow_floats(question.device).map(str::to_owned));
    if question.device.has_pools() {
        notes.push(
            "peaks are computed, of memory pools that take exact sizes, as `pretrain` sets them; CUDA's context and \
             compiled kernels come on top, half a GiB"
                .to_owned(),
        );
    }
    notes
}

/// The smallest gain that is worth mentioning: a twentieth faster.
const FASTER: f64 = 1.05;

fn faster(rows: &[Row], taken: &Row) -> Option<String> {
    let measured = rows.iter().filter_map(|row| match row.speed {
        Some(Speed::Layer {
            of_mixed_precision,
            hidden,
            ..
        }) if row.recipe != taken.recipe && row.optimizer == taken.optimizer => {
            Some((row, of_mixed_precision, hidden))
        }
        Some(Speed::Layer { .. } | Speed::Training { .. }) | None => None,
    });
    let (row, ratio, hidden) = measured.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (ratio > FASTER).then(|| {
        format!(
            "{} was measured {ratio:.2} times as fast as mixed precision, in both passes of a layer of width {hidden}",
            row.recipe
        )
    })
}

fn about_narrow_floats(device: Device) -> Option<&'static str> {
    match device.narrowest() {
        Narrowest::Fp32 | Narrowest::Fp16 | Narrowest::Bf16 => None,
        Narrowest::Fp8 => Some(
            "the guide takes FP8 on this device from 13B parameters on; here FP8 recipes train, with FP8 \
             products on Hopper, and no step of theirs was measured to be faster",
        ),
        Narrowest::Fp4 => Some(
            "the guide takes FP8 on this device from 13B parameters on and tries FP4 from 70B on; here both train, but \
             their products are not faster",
        ),
    }
}
