//! Groups of a matrix without gaps whose rows are whole ones, in a row-major copy to nearest: what neighbouring units read
//! and write follows one another, and a unit has several pieces in flight. To FP8 by a kernel of CUDA source, `rows.cu`,
//! where the device has the conversion; the portable kernel is its specification, and does everything else.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, float_knob, launch_source},
    },
    device::{array, cube_grid, is_hopper, vector_width},
    granularity::Granularity,
    operator_input::read_piece,
};

use super::{
    super::{
        Input, Quantized,
        beside::{CopyArgs, CubePieces, GroupCopy, write_group_copy},
        tile::UNITS,
    },
    Fp8Groups,
};

/// Pieces that a unit has.
const PIECES: usize = 4;

/// Quantizes the input, if it is such a matrix, and its copy such a one. Says whether it did.
///
/// # Safety
///
/// `output` was allocated for `input`, which is not empty.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    output: &Quantized<R>,
) -> bool {
    let (x, shape) = (input.x, input.view.shape);
    let len = vector_width(shape.cols, &[x]);
    let pieces = CubePieces {
        len,
        units: UNITS,
        side_by_side: UNITS,
    };
    let Some(copy) = GroupCopy::of(client, input, pieces) else {
        return false;
    };
    let count = shape.num_elements() / len;
    if let Some(source) = OfRows::of(client, input, len) {
        let cubes = count.div_ceil(UNITS * OfRows::PIECES) as u32;
        let cubes = CubeCount::Static(cubes, 1, 1);
        let values = output.values.clone().expect("a row-major copy");
        let buffers = vec![x.clone(), values, output.scales.clone()];
        let pieces = count as u64;
        // SAFETY: reads and writes are of pieces that there are, by the caller's promise.
        unsafe {
            launch_source(
                client,
                source,
                cubes,
                Vec::new(),
                buffers,
                &RowNumbers { pieces },
            );
        }
        return true;
    }
    let to = CopyArgs::to(copy, output);
    // SAFETY: reads are of pieces that there are, and so are writes, by the caller's promise.
    unsafe {
        quantize_rows_kernel::launch_unchecked::<R>(
            client,
            cube_grid(count.div_ceil(UNITS * PIECES)),
            CubeDim::new_1d(UNITS as u32),
            len,
            to.words,
            array(x.clone()),
            to.values,
            array(to.scales.clone()),
            count as u32,
            to.largest,
            0,
            len,
            copy,
            x.dtype,
            to.scales.dtype,
        );
    }
    true
}

numbers! {
    /// The numbers of `rows.cu`.
    struct RowNumbers {
        /// Pieces of eight elements.
        pieces: u64,
    }
}

/// `rows.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OfRows {
    dtype: StorageType,
    groups: Fp8Groups,
    group: usize,
}

impl OfRows {
    /// Elements of a piece, of 16 bits each, that a unit reads at once.
    const LEN: usize = 8;
    /// Pieces of a unit: with more the kernel is no faster.
    const PIECES: usize = 2;

    /// That of an input which [the portable kernel](quantize_rows_kernel) takes in pieces of so many elements, if the
    /// device has it.
    fn of<R: Runtime>(client: &ComputeClient<R>, input: &Input<R>, len: usize) -> Option<Self> {
        let Granularity::Group(group) = input.spec.granularity else {
            return None;
        };
        // The units of a group are of one warp.
        let fits = is_hopper(client)
            && input.x.dtype.size() == 2
            && len == Self::LEN
            && group <= 32 * Self::LEN;
        let source = Self {
            dtype: input.x.dtype,
            groups: Fp8Groups::of(input.spec)?,
            group,
        };
        fits.then_some(source)
    }
}

impl CudaSource for OfRows {
    type Numbers = RowNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../block/scale.cu"),
        include_str!("../patch.cu"),
        "\n",
        include_str!("scale.cu"),
        "\n",
        include_str!("rows.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_groups_of_rows";

    fn knobs(&self) -> String {
        format!(
            "#define IN_{}\n{}\n#define GROUP {}\n#define PIECES {}",
            float_knob(self.dtype),
            self.groups.knobs(),
            self.group,
            Self::PIECES,
        )
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_rows_kernel<F: Numeric, N: Size, NV: Size, S: Numeric>(
    x: &Array<Vector<F, N>>,
    values: &mut Array<Vector<u32, NV>>,
    scales: &mut Array<S>,
    count: u32,
    largest: f32,
    zero: u32,
    #[comptime] len: usize,
    #[comptime] copy: GroupCopy,
    #[define(F)] _dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
) {
    let first = CUBE_POS as u32 * comptime!((UNITS * PIECES) as u32) + UNIT_POS;
    let mut held = Array::<f32>::new(comptime!(PIECES * len));
    #[unroll]
    for index in 0..PIECES {
        // Units past the last piece wait with the others.
        let number = min(first + comptime!((index * UNITS) as u32), count - 1);
        let piece = read_piece::<F, N>(x, number, len, len);
        #[unroll]
        for lane in 0..len {
            held[comptime!(index * len + lane)] = piece[lane];
        }
    }
    #[unroll]
    for index in 0..PIECES {
        let mut piece = Array::<f32>::new(len);
        #[unroll]
        for lane in 0..len {
            piece[lane] = held[comptime!(index * len + lane)];
        }
        write_group_copy::<NV, S>(
            values,
            scales,
            &piece,
            first + comptime!((index * UNITS) as u32),
            count,
            largest,
            zero,
            copy,
        );
    }
}
