//! `Delta`: of each row, the product of its output and the output's gradient.

use cubecl::{ir::StorageType, prelude::*};

use super::{
    scores::Problem,
    tile::{Strides4, UNITS},
};

#[cube(launch_unchecked)]
pub(super) fn attention_rows_kernel<F: Numeric>(
    output: &Array<F>,
    gradient: &Array<F>,
    delta: &mut Array<f32>,
    problem: Problem,
    output_strides: Strides4,
    gradient_strides: Strides4,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if index < problem.batches * problem.heads * problem.queries {
        let row = index % problem.queries;
        let head = index / problem.queries % problem.heads;
        let batch = index / problem.queries / problem.heads;
        let of_output = at(&output_strides, batch, head, row);
        let of_gradient = at(&gradient_strides, batch, head, row);
        let mut sum = 0.0f32;
        for col in 0..problem.value_width {
            let o = f32::cast_from(output[(of_output + col * output_strides.col) as usize]);
            let d = f32::cast_from(gradient[(of_gradient + col * gradient_strides.col) as usize]);
            sum += o * d;
        }
        delta[index as usize] = sum;
    }
}

/// Where a row starts.
#[cube]
fn at(strides: &Strides4, batch: u32, head: u32, row: u32) -> u32 {
    batch * strides.batch + head * strides.head + row * strides.row
}
