//! The values that wait, on the terminal.

use burn_quant_train::recipe::Flow;
use burn_quant_train::saved::ActivationReport;
use burn_quant_train::saved::report::Total;

use crate::data;
use crate::table::{aligned, columns};

/// Lines of a table; those of fewer bytes are one more.
const LINES: usize = 20;

/// By layer, by operation, and where a flow broke.
pub fn all(report: &ActivationReport, flow: Option<&Flow>) -> String {
    let by_layer = report.totals(|value| value.layer.clone());
    let by_operation = report.totals(|value| format!("{} {}", value.operation, value.format()));
    let of_weights = Total::of(&report.weights).bytes;
    let weights = match of_weights {
        0 => String::new(),
        bytes => format!(
            "Copies of weights, which stay from step to step: {}.\n",
            data::bytes(bytes)
        ),
    };
    [
        totals("layer, or the next one to run", by_layer, report.total()),
        totals("operation, format", by_operation, report.total()),
        weights,
        flow.map_or_else(String::new, |flow| breaks(report, flow)),
    ]
    .into_iter()
    .filter(|part| !part.is_empty())
    .collect::<Vec<_>>()
    .join("\n")
}

fn totals(first: &str, mut totals: Vec<(String, Total)>, all: Total) -> String {
    let rest = totals.split_off(totals.len().min(LINES));
    let more = rest.len();
    if more > 0 {
        let sum = rest.iter().fold(Total::default(), |sum, (_, it)| Total {
            values: sum.values + it.values,
            elements: sum.elements + it.elements,
            bytes: sum.bytes + it.bytes,
            bf16_bytes: sum.bf16_bytes + it.bf16_bytes,
        });
        totals.push((format!("{more} more"), sum));
    }
    totals.push((String::from("all"), all));
    let mut lines = vec![columns([
        first, "values", "elements", "bytes", "in BF16", "share",
    ])];
    lines.extend(totals.into_iter().map(|(name, it)| {
        columns([
            name,
            it.values.to_string(),
            it.elements.to_string(),
            data::bytes(it.bytes),
            data::bytes(it.bf16_bytes),
            share(it.bytes, all.bytes),
        ])
    }));
    aligned(&lines)
}

fn share(part: usize, whole: usize) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

/// The path of a layer and of those that differ in numbers alone: `layers.*.mlp.down`.
fn alike(path: &str) -> String {
    let is_number = |part: &str| part.parse::<usize>().is_ok();
    let parts = path
        .split('.')
        .map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

/// The values that operations outside the flow keep; layers that differ in numbers alone share a line.
fn breaks(report: &ActivationReport, flow: &Flow) -> String {
    let found = report.breaks(flow);
    let mut totals: Vec<(String, [usize; 3])> = Vec::new();
    for (value, in_flow) in &found {
        let layers = alike(&value.layer);
        let name = format!("{layers} {} {}", value.operation, value.format());
        let of_value = [1, value.bytes, *in_flow];
        match totals.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => (0..3).for_each(|index| sum[index] += of_value[index]),
            None => totals.push((name, of_value)),
        }
    }
    if totals.is_empty() {
        return String::from("The flow broke nowhere.\n");
    }
    let cost = |of: &[usize; 3]| of[1] - of[2];
    totals.sort_by_key(|(_, of)| std::cmp::Reverse(cost(of)));
    let sum = |of: &[(String, [usize; 3])]| {
        let each = |index: usize| of.iter().map(|(_, it)| it[index]).sum();
        [0, 1, 2].map(each)
    };
    let all = sum(&totals);
    let rest = totals.split_off(totals.len().min(LINES));
    if !rest.is_empty() {
        totals.push((format!("{} more", rest.len()), sum(&rest)));
    }
    totals.push((String::from("all"), all));
    let mut lines = vec![columns([
        "where the flow broke",
        "values",
        "bytes",
        "in the flow",
        "cost",
    ])];
    lines.extend(totals.iter().map(|(name, of)| {
        columns([
            name.clone(),
            of[0].to_string(),
            data::bytes(of[1]),
            data::bytes(of[2]),
            data::bytes(cost(of)),
        ])
    }));
    aligned(&lines)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use burn_quant_train::recipe::{JetfireInt8, Number, Recipe};
    use burn_quant_train::saved::report::{Form, Saved};

    use super::*;

    fn value(layer: &str, operation: &'static str, form: Form, bytes: usize) -> Saved {
        Saved {
            layer: layer.to_owned(),
            operation,
            shape: vec![64, 128],
            dtype: DType::F32,
            form,
            elements: 64 * 128,
            bytes,
        }
    }

    /// The cells of the line that begins with this text.
    fn line<'a>(table: &'a str, first: &str) -> Vec<&'a str> {
        let line = table.lines().find(|line| line.starts_with(first));
        let line = line.unwrap_or_else(|| panic!("no {first} in {table}"));
        let cells = line[first.len()..].split("  ").map(str::trim);
        cells.filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn tables_have_sums_and_what_a_break_costs() {
        let flow = JetfireInt8::<f32>::ROW.flow;
        let operand = Form::Operand(Number::Int8);
        let report = ActivationReport {
            values: vec![
                value("layers.0.up", "float_tanh", Form::Exact, 32768),
                value("layers.1.up", "float_tanh", Form::Exact, 32768),
                value("layers.1.up", "linear", operand, 8704),
                value("layers.1.up", "flow", Form::Compressed(Number::Int8), 8224),
            ],
            weights: vec![value("layers.1.up", "linear", operand, 2048)],
        };
        let table = all(&report, flow.as_ref());
        let of_layer = ["3", "24576", "48.5 KiB", "48.0 KiB", "60.3 %"];
        assert_eq!(line(&table, "layers.1.up "), of_layer, "{table}");
        let of_tanh = ["2", "16384", "64.0 KiB", "32.0 KiB", "79.5 %"];
        assert_eq!(line(&table, "float_tanh f32 "), of_tanh, "{table}");
        assert!(table.contains("from step to step: 2.0 KiB."), "{table}");
        // 8,192 bytes and 8 scales of blocks of 32 x 32 each.
        let broke = ["2", "64.0 KiB", "16.1 KiB", "47.9 KiB"];
        assert_eq!(
            line(&table, "layers.*.up float_tanh f32 "),
            broke,
            "{table}"
        );
        assert!(
            !table.contains("up flow"),
            "what flows did not break: {table}"
        );
        assert!(!all(&report, None).contains("flow broke"));
        let whole = ActivationReport {
            values: report.values[2..].to_vec(),
            weights: Vec::new(),
        };
        assert!(all(&whole, flow.as_ref()).contains("broke nowhere"));
    }

    #[test]
    fn many_layers_are_a_line() {
        let values = (0..50).map(|layer| {
            let name = format!("layers.{layer}.up");
            value(&name, "linear", Form::Exact, 1024 * (layer + 1))
        });
        let report = ActivationReport {
            values: values.collect(),
            weights: Vec::new(),
        };
        let table = all(&report, None);
        // 1 to 30 KiB.
        assert_eq!(
            line(&table, "30 more ")[..3],
            ["30", "245760", "465.0 KiB"],
            "{table}"
        );
        assert!(
            table.contains("layers.30.up") && !table.contains("layers.29.up"),
            "{table}"
        );
    }
}
