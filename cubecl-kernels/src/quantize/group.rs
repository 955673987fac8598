//! Quantization by group: one read of the input. The units of a group exchange their maxima, and encode what they hold.

use cubecl::{ir::StorageType, prelude::*};

use crate::{
    device::{MatrixGeometry, array, cube_grid, has_planes_of_32},
    number::{fp8::Fp8, storage::RUN},
    rounding::{RandomStream, random_stream},
    scale::{ScaleNumber, region_scale, store_scale},
};

mod rows;
pub(super) mod whole_tiles;

use super::{
    Input, QuantizeSpec, Quantized,
    encode::{fill, run_encoding},
    run::{RunEncoding, encode_run, run_max},
    stored::{Copies, copy_args, write_copies},
    tile::{
        Tile, TilePosition, UNITS, group_max, read_run, run_position, run_read_width, tile_position,
    },
};

/// The numbers and scales that the kernels of CUDA source write: the knobs of `group/scale.cu`, and the number of
/// `patch.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Fp8Groups {
    number: Fp8,
    /// Scales are powers of two, in bytes; else FP32.
    e8m0: bool,
}

impl Fp8Groups {
    /// `None` for other numbers and scales.
    fn of(spec: &QuantizeSpec) -> Option<Self> {
        let e8m0 = match spec.scale {
            ScaleNumber::F32 => false,
            ScaleNumber::E8M0 => true,
            ScaleNumber::E4M3 => return None,
        };
        let number = Fp8::of(spec.number)?;
        Some(Self { number, e8m0 })
    }

    fn knobs(&self) -> String {
        format!(
            "#define NUMBER \"{}\"\n#define LARGEST {:?}f\n#define E8M0 {}",
            self.number.name(),
            self.number.largest(),
            u8::from(self.e8m0),
        )
    }
}

/// The constants that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GroupPlan {
    group: usize,
    encoding: RunEncoding,
    copies: Copies,
    scale: ScaleNumber,
    /// Elements read at once.
    read: usize,
    /// True where units exchange values without shared memory.
    planes: bool,
}

impl GroupPlan {
    const fn tile(&self) -> Tile {
        Tile::of_groups(self.group)
    }
}

/// True where a cube can both find the scales of its groups and write their copies: scales do not depend on other
/// groups, and a tile of whole groups has whole runs along the columns.
pub(super) fn reads_once(group: usize, spec: &QuantizeSpec) -> bool {
    !spec.scale.has_tensor_scale()
        && (!spec.layout.transposed() || Tile::of_groups(group).rows >= RUN)
}

/// Quantizes in groups of `group` neighbours.
///
/// # Safety
///
/// `output` was allocated for `input`, which is not empty.
#[allow(unsafe_code)]
pub(super) unsafe fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    group: usize,
    output: &Quantized<R>,
) {
    // SAFETY: the caller's promise.
    if unsafe { rows::launch(client, input, output) } {
        return;
    }
    let Input { x, view, spec, .. } = input;
    let copies = Copies::new(spec.number.storage(), spec.layout, view.shape);
    let [
        (row_major_vector, row_major_dtype),
        (transposed_vector, transposed_dtype),
    ] = copies.vectors();
    let [values, transposed] = copy_args(output, x);
    let plan = GroupPlan {
        group,
        encoding: run_encoding(client, input, false),
        copies,
        scale: spec.scale,
        read: run_read_width(x, view),
        planes: has_planes_of_32(client),
    };
    // SAFETY: every access is guarded by the shapes in `geometry`, for which by the caller's promise the outputs were
    // allocated.
    unsafe {
        quantize_group_kernel::launch_unchecked::<R>(
            client,
            cube_grid(plan.tile().count(view)),
            CubeDim::new_1d(UNITS as u32),
            plan.read,
            row_major_vector,
            transposed_vector,
            array((*x).clone()),
            values,
            transposed,
            array(output.scales.clone()),
            view.geometry(),
            view.shape.batch as u32,
            random_stream(spec.rounding),
            spec.number.largest(),
            0,
            plan,
            x.dtype,
            row_major_dtype,
            transposed_dtype,
            output.scales.dtype,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn quantize_group_kernel<
    F: Numeric,
    NX: Size,
    V: Numeric,
    NV: Size,
    T: Numeric,
    NT: Size,
    S: Numeric,
>(
    x: &Array<Vector<F, NX>>,
    values: &mut Array<Vector<V, NV>>,
    transposed: &mut Array<Vector<T, NT>>,
    scales: &mut Array<S>,
    geometry: MatrixGeometry,
    batch_size: u32,
    random: RandomStream,
    largest: f32,
    zero: u32,
    #[comptime] plan: GroupPlan,
    #[define(F)] _x_dtype: StorageType,
    #[define(V)] _values_dtype: StorageType,
    #[define(T)] _transposed_dtype: StorageType,
    #[define(S)] _scales_dtype: StorageType,
) {
    let tile = comptime!(plan.tile());
    let position = tile_position(&geometry, tile);
    if position.batch >= batch_size {
        terminate!();
    }
    let (tile_row, tile_col) = run_position(tile);
    let (row, col) = (position.row + tile_row, position.col + tile_col);
    let run = read_run::<F, NX>(x, &geometry, position.batch, row, col, plan.read);
    let inverse = group_inverse::<S>(scales, &run, &geometry, &position, row, col, largest, plan);
    let mut inverses = Array::<f32>::new(RUN);
    fill(&mut inverses, inverse);
    let codes = encode_run(
        &run,
        &inverses,
        position.batch * geometry.rows + row,
        col,
        &random,
        zero,
        comptime!(plan.encoding),
    );
    write_copies::<V, NV, T, NT>(
        values,
        transposed,
        &codes,
        &geometry,
        &position,
        tile_row,
        tile_col,
        tile,
        comptime!(plan.copies),
    );
}

/// The inverse scale of the group that this unit's run belongs to. One unit of the group writes the scale, to
/// `[.., rows, groups of a row]`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn group_inverse<S: Numeric>(
    scales: &mut Array<S>,
    run: &Array<f32>,
    geometry: &MatrixGeometry,
    position: &TilePosition,
    row: u32,
    col: u32,
    largest: f32,
    #[comptime] plan: GroupPlan,
) -> f32 {
    let bits = group_max(
        run_max(run),
        UNITS,
        comptime!(plan.group / RUN),
        plan.planes,
    );
    let (stored, inverse) = region_scale(bits, largest, 1.0f32, comptime!(plan.scale));
    let size = comptime!(plan.group as u32);
    if col % size == 0 && row < geometry.rows && col < geometry.cols {
        let groups = geometry.cols.div_ceil(size);
        let slot = (position.batch * geometry.rows + row) * groups + col / size;
        store_scale::<S>(scales, slot, stored, comptime!(plan.scale));
    }
    inverse
}
