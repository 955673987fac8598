//! The page: one file without network.

use anyhow::Result;
use burn_quant_train::health::HealthReport;
use burn_quant_train::optim::{Moment, advice::Advice};
use burn_quant_train::recipe::LinearMatrix;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use plotters::style::colors::colormaps::{ColorMap, ViridisRGB};

use super::figures::{
    Cell, TENSORS, columns, decibel, of_kind, of_moment, on_scale, rows, stored_as,
};
use super::{About, plot};

const STYLE: &str = "
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; }
td, th { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; }
td.text { text-align: left; }
td[style] { white-space: nowrap; }
pre { background: #8881; padding: 0.7rem; overflow-x: auto; }
svg text { fill: currentColor; }
.note { opacity: 0.75; font-size: 0.85rem; }
";

/// The page of a run.
///
/// # Errors
///
/// A picture that the library does not draw.
pub fn page(about: &About<'_>, reports: &[HealthReport], advice: &Advice) -> Result<String> {
    let body = match HealthReport::latest(reports) {
        None => html! { p { "No step was measured." } },
        Some(last) => of_reports(about, reports, &last, advice)?,
    };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (about.title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (about.title) }
                (body)
            }
        }
    };
    Ok(page.into_string())
}

fn of_reports(
    about: &About<'_>,
    reports: &[HealthReport],
    last: &HealthReport,
    advice: &Advice,
) -> Result<Markup> {
    let rows = rows(last);
    let layers: Vec<_> = rows.iter().map(|row| row.layer.to_owned()).collect();
    Ok(html! {
        p {
            "Measured in " (reports.len()) " steps, the last of which is step " (last.step) "."
            @if last.turns > 1 {
                " Layers took " (last.turns) " turns: each has the figures of the last step in which it was measured."
            }
        }
        h2 { "What stands out" }
        (findings(advice))
        h2 { "Loss" }
        (svg(plot::losses(about.losses)?))
        @if !rows.is_empty() {
            h2 { "Signal-to-noise ratio, layer by step" }
            p.note { "The lowest of a layer's operands and moments: dark is 10 dB and less, light 50 dB and more, red is not defined." }
            (svg(plot::layers_by_step(&layers, reports)?))
            h2 { "Layer by tensor, step " (last.step) }
            p.note { "Decibel, and the share of values that became 0; the worst layer first. Operands that are the same numbers share a column." }
            (heat_map(&rows))
        }
        @for (name, histograms) in [
            ("inputs", of_kind(last, LinearMatrix::X)),
            ("weights", of_kind(last, LinearMatrix::W)),
            ("output gradients", of_kind(last, LinearMatrix::Gradient)),
            ("first moments", of_moment(last, Moment::First)),
            ("second moments", of_moment(last, Moment::Second)),
        ] {
            @if !histograms.is_empty() {
                h2 { "Magnitudes of " (name) ", by powers of two below the largest" }
                p.note { "Light is all elements, dark one of a million; zeros are left out." }
                (svg(plot::histograms(&histograms)?))
            }
        }
        h2 { "Memory by layer" }
        (memory(about, last))
        h2 { "Fallback" }
        (fallback(last))
        h2 { "All figures, step " (last.step) }
        (figures(last))
    })
}

fn svg(picture: String) -> Markup {
    html! { div.wide { (PreEscaped(picture)) } }
}

fn findings(advice: &Advice) -> Markup {
    html! {
        @if advice.findings.is_empty() {
            p { "Nothing." }
        } @else {
            ol { @for finding in &advice.findings { li { (finding.to_string()) } } }
        }
        @if advice.skipped().next().is_some() {
            p { "As a policy:" }
            pre {
                "LayerPolicy::default()"
                @for layer in advice.skipped() { "\n    .skip(" (format!("{layer:?}")) ")" }
            }
        }
    }
}

fn heat_map(rows: &[super::figures::Row<'_>]) -> Markup {
    let columns = columns(rows);
    html! {
        div.wide { table {
            tr {
                th { "layer" }
                @for &column in &columns { th { (TENSORS[column].to_string()) } }
            }
            @for row in rows {
                tr {
                    td { (row.layer) }
                    @for &column in &columns { (heat_cell(row.cells[column])) }
                }
            }
        } }
    }
}

fn heat_cell(cell: Option<Cell>) -> Markup {
    let Some(cell) = cell else {
        return html! { td {} };
    };
    let text = format!("{} · {:.1}%", decibel(cell.snr_db), 100.0 * cell.underflow);
    let style = match cell.snr_db {
        None => String::from("background: #d00; color: #fff"),
        Some(ratio) => {
            let shade = on_scale(ratio);
            let colour = ViridisRGB.get_color(shade);
            let ink = if shade > 0.55 { "#000" } else { "#fff" };
            format!(
                "background: rgb({} {} {}); color: {ink}",
                colour.0, colour.1, colour.2
            )
        }
    };
    html! { td style=(style) { (text) } }
}

fn memory(about: &About<'_>, last: &HealthReport) -> Markup {
    let inputs = of_kind(last, LinearMatrix::X);
    let rows_of = |layer: &str, width: usize| {
        let input = inputs.iter().find(|matrix| matrix.layer == layer);
        input.map(|matrix| matrix.elements as usize / width.max(1))
    };
    let mib = |bytes: usize| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
    html! {
        p.note {
            "MiB: the FP32 weight, the quantized copies of it that stay, and that of the input that waits for the backward "
            "pass, all as on a GPU. Layers that are given one input save it once."
        }
        div.wide { table {
            tr { th { "layer" } th { "weight" } th { "its copies" } th { "saved input" } }
            @for layer in about.memory {
                @let kept = layer.row.map(|row| {
                    row.kept(rows_of(&layer.layer, layer.shape[0]).unwrap_or(0), layer.shape)
                });
                tr {
                    td { (layer.layer) }
                    td { (mib(4 * layer.shape.iter().product::<usize>())) }
                    td { @if let Some(kept) = kept { (mib(kept.weight)) } }
                    td {
                        @match kept.and_then(|kept| kept.input) {
                            Some(bytes) => (mib(bytes)),
                            None => "as it came",
                        }
                    }
                }
            }
        } }
    }
}

fn fallback(last: &HealthReport) -> Markup {
    let rated: Vec<_> = last
        .layers
        .iter()
        .filter(|layer| layer.rate.is_some())
        .collect();
    html! {
        @if rated.is_empty() {
            p { "The recipe has none." }
        } @else {
            div.wide { table {
                tr { th { "layer" } th { "threshold" } th { "rate" } }
                @for layer in rated {
                    tr {
                        td { (layer.layer) }
                        td { @if let Some(threshold) = layer.threshold { (format!("{threshold:.3e}")) } }
                        td { @if let Some(rate) = layer.rate { (format!("{:.0}%", 100.0 * rate)) } }
                    }
                }
            } }
        }
    }
}

fn figures(last: &HealthReport) -> Markup {
    html! {
        div.wide { table {
            tr {
                @for name in [
                    "layer", "operand", "recipe", "cast", "largest", "zeros", "SNR, dB", "cosine",
                    "underflow", "saturation", "scales",
                ] { th { (name) } }
            }
            @for matrix in &last.matrices {
                @for cast in &matrix.casts {
                    tr {
                        td { (matrix.layer) }
                        td.text { (cast.operand.to_string()) }
                        td.text { (cast.recipe) @if !cast.runs { " (if)" } }
                        td.text { (cast.cast) }
                        td { (largest(matrix.absmax)) }
                        td { (percent(matrix.zeros())) }
                        td { (decibel(cast.snr_db())) }
                        td { @if let Some(cosine) = cast.cosine { (format!("{cosine:.6}")) } }
                        td { (percent(cast.underflow)) }
                        td { (percent(cast.saturation)) }
                        td { @if let Some([least, most]) = cast.scales { (format!("{least:.2e} to {most:.2e}")) } }
                    }
                }
            }
            @for it in &last.moments {
                tr {
                    td { (it.layer) }
                    td.text { (it.moment.to_string()) }
                    td.text {}
                    td.text { (stored_as(it)) }
                    td { (largest(it.absmax)) }
                    td { (percent(it.zeros())) }
                    td { (decibel(it.snr_db())) }
                    td { @if let Some(cosine) = it.cosine { (format!("{cosine:.6}")) } }
                    td { (percent(it.underflow)) }
                    td {}
                    td {}
                }
            }
        } }
    }
}

fn largest(absmax: Option<f32>) -> String {
    match absmax {
        Some(absmax) => format!("{absmax:.3e}"),
        None => String::from("not finite"),
    }
}

fn percent(share: f64) -> String {
    format!("{:.2}%", 100.0 * share)
}
