//! Reports as rows: a row for each layer, operation, shape and format.

use anyhow::Result;
use burn_quant_train::saved::ActivationReport;
use serde::Serialize;

/// Values of one layer, operation, shape and format.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The layer's path: see [`Saved::layer`](burn_quant_train::saved::report::Saved).
    pub layer: String,
    /// The operation.
    pub operation: String,
    /// Dimensions, with an `x` between two.
    pub shape: String,
    /// How the values wait.
    pub format: String,
    /// How many there are.
    pub values: usize,
    /// Their elements.
    pub elements: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The bytes that BF16 would take.
    pub bf16_bytes: usize,
}

/// The rows of a report, that of the most bytes first.
pub fn of(report: &ActivationReport) -> Vec<Row> {
    let totals = report.totals(|value| {
        let dims: Vec<_> = value.shape.iter().map(usize::to_string).collect();
        let layer = value.layer.clone();
        (layer, value.operation, dims.join("x"), value.format())
    });
    let rows = totals
        .into_iter()
        .map(|((layer, operation, shape, format), total)| Row {
            layer,
            operation: operation.to_owned(),
            shape,
            format,
            values: total.values,
            elements: total.elements,
            bytes: total.bytes,
            bf16_bytes: total.bf16_bytes,
        });
    rows.collect()
}

/// CSV with a line of names.
///
/// # Errors
///
/// None, as long as memory can be written to.
pub fn csv(rows: &[Row]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    rows.iter().try_for_each(|row| writer.serialize(row))?;
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// JSON, a row a line.
///
/// # Errors
///
/// None.
pub fn json_lines(rows: &[Row]) -> Result<String> {
    let lines = rows
        .iter()
        .map(|row| Ok(serde_json::to_string(row)? + "\n"));
    lines.collect()
}
