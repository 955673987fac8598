//! Advice as text.

use super::activations::AttentionForm;
use super::shapes::Shapes;
use super::speed::Speed;
use super::{Advice, Row};
use crate::args::Checkpointing;
use crate::table::{aligned, columns};

/// A number of bytes in GiB, or in MiB where that is less than a tenth of one.
pub(super) fn gib(bytes: u64) -> String {
    let mib = bytes as f64 / (1u64 << 20) as f64;
    match mib < 102.4 {
        true => format!("{mib:.1} MiB"),
        false => format!("{:.2} GiB", mib / 1024.0),
    }
}

/// The model, a table of optimizers, a table of recipes, and the recommendation.
pub fn text(advice: &Advice) -> String {
    let [model, optimizers, recipes] = [model(advice), optimizers(advice), recipes(advice)];
    let recommendation = recommendation(advice);
    format!("{model}\n{optimizers}\n{recipes}\n{recommendation}")
}

fn model(advice: &Advice) -> String {
    let Shapes {
        hidden,
        layers,
        heads,
        kv_heads,
        ffn,
        vocabulary,
        ..
    } = advice.model;
    let attention = match advice.attention {
        AttentionForm::Composed => "scores wait for the backward pass",
        AttentionForm::Products => "Q, K and V wait for the backward pass",
        AttentionForm::Flash | AttentionForm::Tiles => "no scores in memory",
    };
    let bytes = advice.rows.first().map(|row| row.bytes);
    let each = bytes.map_or(0, |bytes| bytes.weights);
    let memory = advice.memory.map(|limit| format!(", of {}", gib(limit)));
    let again = match advice.checkpointing {
        Checkpointing::None => "",
        Checkpointing::Layers => {
            "; each layer keeps its input alone and runs again in the backward pass"
        }
    };
    format!(
        "{} parameters: {layers} layers of width {hidden}, {heads} heads ({kv_heads} of keys), feed-forward {ffn}, \
         vocabulary {vocabulary}\n\
         {} sequences of {} tokens, computing in {}{}; attention: {attention}{again}\n\
         weights {}, their gradients as much, both FP32\n",
        advice.parameters,
        advice.batch,
        advice.sequence,
        advice.compute,
        memory.unwrap_or_default(),
        gib(each),
    )
}

/// The rows of the first recipe and context, which differ by their optimizer.
fn by_optimizer(advice: &Advice) -> Vec<&Row> {
    let first = &advice.rows[0];
    let rows = advice.rows.iter();
    rows.take_while(|row| row.recipe == first.recipe && row.contexts == first.contexts)
        .collect()
}

fn optimizers(advice: &Advice) -> String {
    let mut lines = vec![columns(["optimizer", "moments", "bytes a parameter"])];
    lines.extend(by_optimizer(advice).into_iter().map(|row| {
        let each = row.bytes.moments as f64 / advice.parameters as f64;
        columns([
            row.optimizer.to_string(),
            gib(row.bytes.moments),
            format!("{each:.3}"),
        ])
    }));
    aligned(&lines)
}

fn recipes(advice: &Advice) -> String {
    let optimizers = by_optimizer(advice);
    let mut head = columns(["recipe", "contexts", "copies", "activations"]);
    head.extend(
        optimizers
            .iter()
            .map(|row| format!("peak, {}", row.optimizer)),
    );
    if advice.memory.is_some() {
        head.extend(columns(["largest batch, first", "last"]));
    }
    head.push("speed".into());
    let mut lines = vec![head];
    for rows in advice.rows.chunks(optimizers.len()) {
        let (first, last) = (&rows[0], &rows[rows.len() - 1]);
        let mut line = columns([
            first.recipe.to_string(),
            first.contexts.to_string(),
            gib(first.bytes.copies),
            gib(first.bytes.activations),
        ]);
        line.extend(rows.iter().map(peak));
        let batches = [first, last].map(|row| row.largest_batch);
        line.extend(batches.into_iter().flatten().map(|batch| batch.to_string()));
        line.push(first.speed.as_ref().map_or("not measured".into(), speed));
        lines.push(line);
    }
    let mut text = aligned(&lines);
    if advice.memory.is_some() {
        text +=
            "(..): does not fit. Largest batch: with the first optimizer and with the last one.\n";
    }
    text
}

fn peak(row: &Row) -> String {
    let peak = gib(row.bytes.peak);
    match row.fits {
        Some(false) => format!("({peak})"),
        Some(true) | None => peak,
    }
}

fn speed(speed: &Speed) -> String {
    match speed {
        Speed::Training { tokens_per_s, .. } => format!("{tokens_per_s:.0} tokens/s"),
        Speed::Layer {
            of_mixed_precision,
            hidden,
            ..
        } => format!("{of_mixed_precision:.2}x (layer of {hidden})"),
    }
}

fn recommendation(advice: &Advice) -> String {
    let it = &advice.recommendation;
    let scaling = match it.loss_scaling {
        true => ", with loss scaling",
        false => "",
    };
    let mut lines = vec![format!(
        "Take {} in {}{scaling}, with {} contexts and {}:",
        it.recipe, it.compute, it.contexts, it.optimizer
    )];
    lines.extend(it.reasons.iter().map(|reason| format!("  - {reason}")));
    lines.extend(it.notes.iter().map(|note| format!("Note: {note}.")));
    lines.push(String::new());
    lines.join("\n")
}
