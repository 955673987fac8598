//! The kernel of CUDA source for what a training step quantizes in groups: whole tiles, both ways, to FP8.
//!
//! The portable kernel in `group.rs`, launched for the matrix and for its transpose, is its specification, and does
//! everything else. It reads the matrix twice, and the transpose across its rows.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, float_knob, launch_source},
    },
    device::{cubes_by_turns, is_hopper, read_width_up_to},
    granularity::Granularity,
    layout::Layout,
    quantize::{Input, Quantized, buffers::allocate},
    rounding::Rounding,
};

use super::Fp8Groups;

/// Rows and columns of a tile, and elements of a group.
const TILE: usize = 128;
/// Elements that are read at once, of 16 bits each.
const VECTOR: usize = 8;
/// Cubes that share a multiprocessor: two have registers for a tile each, and shared memory for the one behind it.
const CUBES: usize = 2;

/// A matrix and its transpose, quantized by one spec, if the kernel can and the device has it.
pub(in crate::quantize) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    both: &[Input<R>; 2],
) -> Option<[Quantized<R>; 2]> {
    let &[
        Input {
            x, ref view, spec, ..
        },
        _,
    ] = both;
    let shape = view.shape;
    let [rows, cols] = [shape.rows / TILE, shape.cols / TILE];
    let fits = is_hopper(client)
        && spec.rounding == Rounding::Nearest
        && spec.granularity == Granularity::Group(TILE)
        && spec.layout == Layout::RowMajor
        && x.dtype.size() == 2
        && shape.batch == 1
        && [rows * TILE, cols * TILE] == [shape.rows, shape.cols]
        && rows * cols > 0
        && rows * cols <= u32::MAX as usize
        && read_width_up_to(VECTOR, x, view) == VECTOR;
    if !fits {
        return None;
    }
    let source = BothWays {
        dtype: x.dtype,
        groups: Fp8Groups::of(spec)?,
    };
    let outputs = both.each_ref().map(|it| allocate(client, &it.view, spec));
    let mut buffers = vec![x.clone()];
    for output in &outputs {
        buffers.extend(output.values.clone());
        buffers.push(output.scales.clone());
    }
    let numbers = GroupNumbers {
        rows: shape.rows as u64,
        cols: shape.cols as u64,
        row_stride: view.row_stride as u64,
    };
    let cubes = cubes_by_turns(client, rows * cols, CUBES);
    // SAFETY: the cubes take the tiles of the input, none of which reaches over an edge; the outputs were allocated for
    // it and for its transpose, each with its values.
    #[allow(unsafe_code)]
    unsafe {
        launch_source(client, source, cubes, Vec::new(), buffers, &numbers);
    }
    Some(outputs)
}

numbers! {
    /// The numbers of `whole_tiles.cu`.
    struct GroupNumbers {
        /// Of the matrix, multiples of 128.
        rows: u64,
        cols: u64,
        /// Elements of the input from a row to the next.
        row_stride: u64,
    }
}

/// `quantize_groups_both_ways`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct BothWays {
    dtype: StorageType,
    groups: Fp8Groups,
}

impl CudaSource for BothWays {
    type Numbers = GroupNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../block/scale.cu"),
        include_str!("../patch.cu"),
        "\n",
        include_str!("scale.cu"),
        "\n",
        include_str!("whole_tiles.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_groups_both_ways";

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n{}\n#define CUBES {CUBES}",
            float_knob(self.dtype),
            self.groups.knobs(),
        )
    }

    fn shared_memory(&self) -> usize {
        TILE * TILE * self.dtype.size()
    }
}
