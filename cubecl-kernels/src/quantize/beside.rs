//! Copies in groups that the kernel of another operation writes of what it has read: one read serves both.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{array, check_contiguous},
    error::KernelError,
    granularity::Granularity,
    layout::Layout,
    number::storage::RUN,
    rounding::{RandomStream, Rounding},
    scale::{ScaleNumber, store_scale},
};

use super::{
    Input, QuantizeSpec, Quantized,
    buffers::allocate,
    check_granularity,
    encode::{fill, run_encoding},
    group::group_scale,
    run::{RunEncoding, encode_run},
    stored::{Copies, write_run},
    tile::UNITS,
};

/// Units of a cube that writes such copies.
pub(crate) const CUBE_UNITS: usize = UNITS;

/// How a copy is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupCopy {
    group: usize,
    encoding: RunEncoding,
    copies: Copies,
    scale: ScaleNumber,
}

/// A copy to be written.
pub(crate) struct Beside<R: Runtime> {
    pub copy: GroupCopy,
    pub output: Quantized<R>,
}

impl<R: Runtime> Beside<R> {
    /// The copy of a contiguous matrix whose rows are whole groups: row-major, to nearest, by scales that do not depend
    /// on the matrix.
    pub fn of(
        client: &ComputeClient<R>,
        operation: &'static str,
        x: &TensorHandle<R>,
        spec: &QuantizeSpec,
    ) -> Result<Self, KernelError> {
        check_contiguous(operation, x)?;
        check_granularity(operation, spec.granularity)?;
        let input = Input::new(client, operation, x, spec)?;
        let cols = input.view.shape.cols;
        let is_indexed = input.view.shape.num_elements() <= u32::MAX as usize;
        let group = match spec.granularity {
            Granularity::Group(group)
                if cols % group == 0
                    && is_indexed
                    && spec.layout == Layout::RowMajor
                    && spec.rounding == Rounding::Nearest
                    && !spec.scale.has_tensor_scale() =>
            {
                group
            }
            _ => {
                return Err(KernelError::Unsupported {
                    operation,
                    reason: format!("a copy by {spec:?} of {:?}", x.shape()),
                    remedy: "ask for groups that rows are whole ones of, row-major, to nearest, or quantize by itself",
                });
            }
        };
        Ok(Self {
            copy: GroupCopy {
                group,
                encoding: run_encoding(client, &input, false),
                copies: Copies::new(spec.number.storage(), spec.layout, input.view.shape),
                scale: spec.scale,
            },
            output: allocate(client, &input.view, spec),
        })
    }

    /// Elements of a vector of the values that is written at once, and its type.
    pub fn vector(&self) -> (usize, StorageType) {
        let [row_major, _] = self.copy.copies.vectors();
        row_major
    }

    /// The values, as a launch argument.
    pub fn values(&self) -> ArrayArg<R> {
        let values = self.output.values.as_ref().expect("a row-major copy");
        array(values.clone())
    }
}

/// Writes a run of a matrix, of so many runs, to its copy. All units of the cube must call it together, each with the
/// run behind that of the unit before it; what is past the last run is not written.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_group_copy<V: Numeric, N: Size, S: Numeric>(
    values: &mut Array<Vector<V, N>>,
    scales: &mut Array<S>,
    run: &Array<f32>,
    number: u32,
    runs: u32,
    random: &RandomStream,
    largest: f32,
    zero: u32,
    #[comptime] copy: GroupCopy,
) {
    let runs_of_group = comptime!((copy.group / RUN) as u32);
    let (stored, inverse) = group_scale(run, largest, copy.group, copy.scale);
    if number < runs {
        if number % runs_of_group == 0 {
            store_scale::<S>(
                scales,
                number / runs_of_group,
                stored,
                comptime!(copy.scale),
            );
        }
        let mut inverses = Array::<f32>::new(RUN);
        fill(&mut inverses, inverse);
        // Rows are whole runs, and follow each other in memory: the matrix is one row.
        let codes = encode_run(
            run,
            &inverses,
            0u32,
            number * comptime!(RUN as u32),
            random,
            zero,
            comptime!(copy.encoding),
        );
        write_run::<V, N>(
            values,
            &codes,
            0u32,
            number * comptime!(RUN as u32),
            runs * comptime!(RUN as u32),
            comptime!(copy.copies.storage),
            comptime!(copy.copies.row_major_width),
        );
    }
}
