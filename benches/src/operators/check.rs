//! What the launches give, against the operator in FP64.

use anyhow::{Result, bail, ensure};
use cubecl_kernels::{layout::Layout, number::Number};

use super::{
    launch::{Backward, Forward, Launches, Operands, Values},
    reference::{Expected, compare},
};
use crate::gpu::{Gpu, bf16_rows};

/// The difference of BF16, root mean square over root mean square.
const LIMIT: f64 = 5e-3;

/// Compares these rows of both passes with the reference of what the operator read, in every copy.
///
/// # Errors
///
/// They differ by more than the rounding to their numbers.
pub fn check(
    gpu: &Gpu,
    launches: &Launches,
    rows: &[usize],
    operands: &Operands,
    forward: &Forward,
    backward: &Backward,
) -> Result<()> {
    let read = |values: &Values| bf16_rows(gpu, &values.floats(&gpu.client)?, rows);
    let inputs: Vec<Vec<f32>> = operands.inputs.iter().map(read).collect::<Result<_>>()?;
    let gradient = read(&operands.gradient)?;
    let expected = Expected::of(launches.operator, &inputs, &gradient, launches.parameters);
    check_matrix(gpu, rows, "the output", &forward.output, &expected.output)?;
    ensure!(
        backward.of_inputs.len() == expected.of_inputs.len()
            && backward.of_parameters.len() == expected.of_parameters.len(),
        "a gradient is missing"
    );
    for (values, expected) in backward.of_inputs.iter().zip(&expected.of_inputs) {
        check_matrix(gpu, rows, "the gradient of an input", values, expected)?;
    }
    for (tensor, expected) in backward.of_parameters.iter().zip(&expected.of_parameters) {
        let actual: Vec<f32> = gpu.download(tensor)?;
        compare("the gradient of a parameter", &actual, expected, LIMIT)?;
    }
    Ok(())
}

fn check_matrix(
    gpu: &Gpu,
    rows: &[usize],
    what: &str,
    values: &Values,
    expected: &[f64],
) -> Result<()> {
    let limit = limit(values)?;
    for copy in copies(values)? {
        let actual = bf16_rows(gpu, &copy.floats(&gpu.client)?, rows)?;
        compare(what, &actual, expected, limit)?;
    }
    Ok(())
}

/// Each copy of a matrix by itself.
fn copies(values: &Values) -> Result<Vec<Values>> {
    Ok(match values {
        Values::Floats(tensor) => vec![Values::Floats(tensor.clone())],
        Values::Numbers(matrix) => {
            ensure!(
                matrix.values.is_some() && matrix.transposed.is_some(),
                "a layout is missing"
            );
            let only = |layout| Values::Numbers(Box::new(matrix.as_ref().clone().only(layout)));
            vec![only(Layout::RowMajor), only(Layout::Transposed)]
        }
    })
}

/// The largest difference, root mean square over root mean square. FP8 is off by a fixed part of each value, INT8 by
/// one of the largest value of a block: products of normal numbers, rounded stochastically in blocks of 128, by 4.3% of
/// it all.
fn limit(values: &Values) -> Result<f64> {
    Ok(match values {
        Values::Floats(_) => LIMIT,
        Values::Numbers(matrix) => match matrix.number {
            Number::E4M3 => 4e-2,
            Number::E5M2 => 7e-2,
            Number::Int8 => 6e-2,
            number => bail!("no limit is known for {number:?}"),
        },
    })
}
