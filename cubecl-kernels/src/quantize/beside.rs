//! Copies in groups that a kernel writes of what its units hold, read or computed: what an operation has in registers
//! anyway needs no read of its own.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, has_planes_of_32, is_contiguous, or_unused, storage},
    error::KernelError,
    granularity::Granularity,
    layout::Layout,
    number::storage::{RUN, Storage, pack_codes},
    rounding::Rounding,
    scale::{ScaleNumber, region_scale, store_scale},
};

use super::{
    Input, QuantizeSpec, Quantized,
    buffers::allocate,
    check_granularity,
    encode::run_encoding,
    run::{RunEncoding, encode_nearest, largest_magnitude},
    tile::group_max,
};

/// The pieces of a matrix, as the units of a cube hold them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CubePieces {
    /// Elements of a piece, at most those of a run.
    pub len: usize,
    /// Units of a cube.
    pub units: usize,
    /// Units that hold neighbours, side by side, before others follow. The first of them is at a multiple of their
    /// number, and holds a piece at such a multiple.
    pub side_by_side: usize,
}

/// How a copy is written, from pieces of rows that the units of a cube hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupCopy {
    /// Elements of a piece.
    len: usize,
    /// Units of a cube.
    units: usize,
    group: usize,
    encoding: RunEncoding,
    storage: Storage,
    scale: ScaleNumber,
    /// True where units exchange values without shared memory.
    planes: bool,
}

impl GroupCopy {
    /// How units that hold such pieces of a matrix copy it. `None` but for one without gaps whose rows are whole groups,
    /// row-major, to nearest, by scales that do not depend on the matrix, with pieces of whole words.
    pub(super) fn of<R: Runtime>(
        client: &ComputeClient<R>,
        input: &Input<R>,
        pieces: CubePieces,
    ) -> Option<Self> {
        let (spec, shape) = (input.spec, input.view.shape);
        let Granularity::Group(group) = spec.granularity else {
            return None;
        };
        let CubePieces {
            len,
            units,
            side_by_side,
        } = pieces;
        let storage = spec.number.storage();
        let of_group = group / len;
        let is_of_pieces = group.is_multiple_of(len)
            && of_group.is_power_of_two()
            && side_by_side.is_multiple_of(of_group);
        let is_copied = len <= RUN
            && (len * storage.bits() as usize).is_multiple_of(32)
            && is_of_pieces
            && shape.cols.is_multiple_of(group)
            && shape.num_elements() <= u32::MAX as usize
            && is_contiguous(input.x)
            && spec.layout == Layout::RowMajor
            && spec.rounding == Rounding::Nearest
            && !spec.scale.has_tensor_scale();
        is_copied.then(|| Self {
            len,
            units,
            group,
            encoding: run_encoding(client, input, false),
            storage,
            scale: spec.scale,
            planes: has_planes_of_32(client),
        })
    }

    /// Words of a piece.
    const fn words(&self) -> usize {
        self.len * self.storage.bits() as usize / 32
    }

    /// Words that are written at once.
    const fn width(&self) -> usize {
        let words = self.words();
        if words.is_power_of_two() { words } else { 1 }
    }

    /// Pieces of a group.
    const fn of_group(&self) -> usize {
        self.group / self.len
    }
}

/// A copy to be written.
pub(crate) struct Beside<R: Runtime> {
    pub copy: GroupCopy,
    pub output: Quantized<R>,
}

impl<R: Runtime> Beside<R> {
    /// The copy of a matrix, if units that hold such pieces [write it](GroupCopy::of).
    ///
    /// # Errors
    ///
    /// As [`quantize`](super::quantize()).
    pub fn of(
        client: &ComputeClient<R>,
        operation: &'static str,
        x: &TensorHandle<R>,
        spec: &QuantizeSpec,
        pieces: CubePieces,
    ) -> Result<Option<Self>, KernelError> {
        check_granularity(operation, spec.granularity)?;
        let input = Input::new(client, operation, x, spec)?;
        let copy = GroupCopy::of(client, &input, pieces);
        Ok(copy.map(|copy| Self {
            copy,
            output: allocate(client, &input.view, spec),
        }))
    }
}

/// A copy as the arguments of a launch.
pub(crate) struct CopyArgs<R: Runtime> {
    /// The values, in words, u32.
    pub values: ArrayArg<R>,
    pub scales: TensorHandle<R>,
    /// Words that are written at once.
    pub words: usize,
    /// The largest number.
    pub largest: f32,
    pub copy: Option<GroupCopy>,
}

impl<R: Runtime> CopyArgs<R> {
    /// Those of a copy, or where there is none, what is not touched.
    pub fn of(beside: Option<&Beside<R>>, any: &TensorHandle<R>) -> Self {
        let unused = || or_unused(None, any, storage::<u32>());
        match beside {
            Some(Beside { copy, output }) => Self::to(*copy, output),
            None => Self {
                values: array(unused()),
                scales: unused(),
                words: 1,
                largest: 0.0,
                copy: None,
            },
        }
    }

    /// Those of a copy to this matrix.
    pub fn to(copy: GroupCopy, output: &Quantized<R>) -> Self {
        Self {
            values: array(output.values.clone().expect("a row-major copy")),
            scales: output.scales.clone(),
            words: copy.width(),
            largest: output.number.largest(),
            copy: Some(copy),
        }
    }
}

/// Writes a piece of a matrix, of so many pieces, to its copy. All units of the cube must call it together, those of a
/// group side by side, the first one at a multiple of their number; what is past the last piece is not written.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_group_copy<N: Size, S: Numeric>(
    values: &mut Array<Vector<u32, N>>,
    scales: &mut Array<S>,
    piece: &Array<f32>,
    number: u32,
    pieces: u32,
    largest: f32,
    zero: u32,
    #[comptime] copy: GroupCopy,
) {
    let of_group = comptime!(copy.of_group());
    let len = comptime!(copy.len);
    let bits = largest_magnitude(piece, len);
    let bits = group_max(bits, copy.units, of_group, copy.planes);
    let (stored, inverse) = region_scale(bits, largest, 1.0f32, comptime!(copy.scale));
    if number < pieces {
        if number % comptime!(of_group as u32) == 0 {
            store_scale::<S>(
                scales,
                number / comptime!(of_group as u32),
                stored,
                comptime!(copy.scale),
            );
        }
        let codes = encode_nearest(piece, inverse, zero, len, comptime!(copy.encoding));
        let words = pack_codes(&codes, len, comptime!(copy.storage));
        let width = comptime!(copy.width());
        let writes = comptime!(copy.words() / width);
        #[unroll]
        for write in 0..writes {
            let mut vector = Vector::<u32, N>::empty();
            #[unroll]
            for word in 0..width {
                vector[word] = words[comptime!(write * width + word)];
            }
            values[number as usize * writes + write] = vector;
        }
    }
}
