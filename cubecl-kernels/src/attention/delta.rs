//! `Delta`: of each row, the product of its output and the output's gradient (Dao, 2023, Algorithm 2).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::device::{array, cube_grid, empty, storage};

use super::{heads::Strides4, launch::Launch, scores::Problem};

const UNITS: usize = 256;

/// `Delta` of all rows, f32 `[batch, heads, queries]`. `vector` neighbours of a row are read at once: all of a row's
/// vectors are aligned.
pub(super) fn delta<R: Runtime>(
    launch: &Launch<R>,
    output: &TensorHandle<R>,
    gradient: &TensorHandle<R>,
    vector: usize,
) -> TensorHandle<R> {
    let Launch {
        client, problem, ..
    } = *launch;
    let rows = problem.shape.rows();
    let delta = empty(client, rows.to_vec(), storage::<f32>());
    let count: usize = rows.iter().product();
    if count > 0 {
        // SAFETY: accesses are guarded by the shape, which output and gradient were checked against.
        #[allow(unsafe_code)]
        unsafe {
            attention_delta_kernel::launch_unchecked::<R>(
                client,
                cube_grid(count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                vector,
                array(output.clone()),
                array(gradient.clone()),
                array(delta.clone()),
                launch.problem(),
                Strides4::of(output),
                Strides4::of(gradient),
                vector,
                problem.dtype,
            );
        }
    }
    delta
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn attention_delta_kernel<F: Numeric, N: Size>(
    output: &Array<Vector<F, N>>,
    gradient: &Array<Vector<F, N>>,
    delta: &mut Array<f32>,
    problem: Problem,
    output_strides: Strides4,
    gradient_strides: Strides4,
    #[comptime] vector: usize,
    #[define(F)] _dtype: StorageType,
) {
    let index = CUBE_POS as u32 * comptime!(UNITS as u32) + UNIT_POS;
    if index < problem.batches * problem.heads * problem.queries {
        let row = index % problem.queries;
        let head = index / problem.queries % problem.heads;
        let batch = index / problem.queries / problem.heads;
        let of_output = at(&output_strides, batch, head, row);
        let of_gradient = at(&gradient_strides, batch, head, row);
        let neighbours = comptime!(vector as u32);
        let mut sum = 0.0f32;
        for step in 0..problem.value_width / neighbours {
            let col = step * neighbours;
            let o = output[((of_output + col * output_strides.col) / neighbours) as usize];
            let d = gradient[((of_gradient + col * gradient_strides.col) / neighbours) as usize];
            #[unroll]
            for lane in 0..vector {
                sum += f32::cast_from(o[lane]) * f32::cast_from(d[lane]);
            }
        }
        delta[index as usize] = sum;
    }
}

/// Where a row starts.
#[cube]
fn at(strides: &Strides4, batch: u32, head: u32, row: u32) -> u32 {
    batch * strides.batch + head * strides.head + row * strides.row
}
