//! Reports as CSV: a line for each cast, and for each moment.

use anyhow::Result;
use burn_quant_train::health::HealthReport;

use super::figures::stored_as;

const COLUMNS: [&str; 15] = [
    "step",
    "layer",
    "matrix",
    "elements",
    "absmax",
    "zeros",
    "median_octave",
    "recipe",
    "runs",
    "operand",
    "cast",
    "snr_db",
    "cosine",
    "underflow",
    "saturation",
];

/// All casts and moments of all reports. A matrix that no recipe quantizes has a line with empty columns; so has a
/// moment for its recipe and saturation.
///
/// # Errors
///
/// None, as long as memory can be written to.
pub fn rows(reports: &[HealthReport]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(COLUMNS)?;
    for report in reports {
        for matrix in &report.matrices {
            let of_matrix = [
                report.step.to_string(),
                matrix.layer.clone(),
                matrix.matrix.to_string(),
                matrix.elements.to_string(),
                number(matrix.absmax),
                matrix.zeros().to_string(),
                number(matrix.median_octave()),
            ];
            if matrix.casts.is_empty() {
                let empty = vec![String::new(); COLUMNS.len() - of_matrix.len()];
                writer.write_record(of_matrix.iter().chain(&empty))?;
            }
            for cast in &matrix.casts {
                let of_cast = [
                    cast.recipe.clone(),
                    cast.runs.to_string(),
                    cast.operand.to_string(),
                    cast.cast.clone(),
                    number(cast.snr_db()),
                    number(cast.cosine),
                    cast.underflow.to_string(),
                    cast.saturation.to_string(),
                ];
                writer.write_record(of_matrix.iter().chain(&of_cast))?;
            }
        }
        for it in &report.moments {
            let moment = it.moment.to_string();
            writer.write_record([
                report.step.to_string(),
                it.layer.clone(),
                moment.clone(),
                it.elements.to_string(),
                number(it.absmax),
                it.zeros().to_string(),
                number(it.median_octave()),
                String::new(),
                true.to_string(),
                moment,
                stored_as(it),
                number(it.snr_db()),
                number(it.cosine),
                it.underflow.to_string(),
                String::new(),
            ])?;
        }
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

fn number<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}
