//! Copies of operands whose rows cannot be read 16 bytes at a time.

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::device::{MatrixView, Strides, cube_grid, empty, storage};

use super::GemmArgs;

/// Bytes that the kernels on matrix instructions read at once.
pub(super) const ALIGNMENT: usize = 16;
/// Rows of copies start at multiples of so many bytes: a line of the cache.
const PITCH: usize = 128;
/// Units of a cube that share a row, and the rows of a cube.
const UNITS_OF_ROW: u32 = 64;
const ROWS: u32 = 4;

/// The INT8 matrices of a product, whose rows start and end at multiples of [`ALIGNMENT`] bytes: the operands' own, or
/// copies of them with zeros at the ends of the rows.
pub(super) struct AlignedValues<R: Runtime> {
    pub a: TensorHandle<R>,
    pub a_view: MatrixView,
    pub residual: Option<TensorHandle<R>>,
    pub b: TensorHandle<R>,
    pub b_view: MatrixView,
}

impl<R: Runtime> AlignedValues<R> {
    /// Copies what must be copied, in one launch.
    pub fn new(client: &ComputeClient<R>, args: &GemmArgs<R>) -> Self {
        let (a, b) = (&args.a.values, &args.b.values);
        let residual = args.fallback.map(|residual| &residual.values);
        let a_fits = is_aligned(a, &args.a_view)
            && residual.is_none_or(|residual| is_aligned(residual, &args.a_view));
        let b_fits = is_aligned(b, &args.b_view);
        let mut aligned = Self {
            a: a.clone(),
            a_view: args.a_view,
            residual: residual.cloned(),
            b: b.clone(),
            b_view: args.b_view,
        };
        let mut copies = Vec::new();
        let mut copy = |from: &TensorHandle<R>, view: &MatrixView| {
            let copy = Copied::new(client, from, view);
            let to = copy.to.clone();
            copies.push(copy);
            to
        };
        if !a_fits {
            aligned.a = copy(a, &args.a_view);
            aligned.residual = residual.map(|residual| copy(residual, &args.a_view));
            aligned.a_view = pitched(&args.a_view);
        }
        if !b_fits {
            aligned.b = copy(b, &args.b_view);
            aligned.b_view = pitched(&args.b_view);
        }
        if !copies.is_empty() {
            launch(client, copies);
        }
        aligned
    }
}

/// True where rows can be read 16 bytes at a time, and do not overlap.
pub(super) fn is_aligned<R: Runtime>(values: &TensorHandle<R>, view: &MatrixView) -> bool {
    let offset = values.handle.offset_start.unwrap_or_default() as usize;
    let is_single = view.shape.batch == 1;
    let batch_stride = if is_single { 0 } else { view.batch_stride };
    let fits = [offset, view.row_stride, batch_stride, view.shape.cols]
        .into_iter()
        .all(|bytes| bytes % ALIGNMENT == 0);
    fits && view.row_stride >= view.shape.cols && (is_single || batch_stride > 0)
}

/// The view of the copy of a matrix.
fn pitched(view: &MatrixView) -> MatrixView {
    let pitch = view.shape.cols.next_multiple_of(PITCH);
    MatrixView {
        batch_stride: view.shape.rows * pitch,
        row_stride: pitch,
        col_stride: 1,
        ..*view
    }
}

/// Matrices to copy.
struct Copied<R: Runtime> {
    /// From a multiple of 4 bytes on, declared as words.
    from: TensorHandle<R>,
    /// Bytes between there and the first element.
    before: usize,
    view: MatrixView,
    to: TensorHandle<R>,
}

impl<R: Runtime> Copied<R> {
    fn new(client: &ComputeClient<R>, from: &TensorHandle<R>, view: &MatrixView) -> Self {
        let shape = view.shape;
        let to = vec![shape.batch, shape.rows, pitched(view).row_stride];
        let mut from = from.clone();
        let offset = from.handle.offset_start.unwrap_or_default();
        from.handle.offset_start = Some(offset / 4 * 4);
        Self {
            from,
            before: (offset % 4) as usize,
            view: *view,
            to: empty(client, to, storage::<i8>()),
        }
    }
}

/// The rows that a copy reads, and those that it writes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Geometry {
    /// The first of this copy's rows among those of all copies.
    first: u32,
    /// Rows of all matrices.
    count: u32,
    /// Rows of a matrix.
    rows: u32,
    /// Bytes of a row.
    cols: u32,
    /// Bytes in front of the first element.
    before: u32,
    strides: Strides,
}

fn launch<R: Runtime>(client: &ComputeClient<R>, copies: Vec<Copied<R>>) {
    let (mut from, mut to) = (SequenceArg::new(), SequenceArg::new());
    let mut geometries = SequenceArg::new();
    let mut first = 0;
    let is_batched = copies.iter().any(|copy| copy.view.shape.batch > 1);
    for copy in copies {
        let shape = copy.view.shape;
        let count = shape.batch * shape.rows;
        geometries.push(GeometryLaunch::new(
            first as u32,
            count as u32,
            shape.rows as u32,
            shape.cols as u32,
            copy.before as u32,
            Strides::of(&copy.view),
        ));
        first += count;
        from.push(copy.from.into_arg());
        to.push(copy.to.into_arg());
    }
    if first > 0 {
        // SAFETY: reads are guarded by the shapes in the geometries, writes by the number of rows and their pitch. The
        // last word of a row may end up to 3 bytes behind the tensor: memory is allocated in larger units.
        #[allow(unsafe_code)]
        unsafe {
            align_kernel::launch_unchecked::<R>(
                client,
                cube_grid(first.div_ceil(ROWS as usize)),
                CubeDim::new_2d(UNITS_OF_ROW, ROWS),
                ALIGNMENT / 4,
                from,
                to,
                geometries,
                is_batched,
            );
        }
    }
}

/// All matrices are declared as words.
#[cube(launch_unchecked)]
fn align_kernel<N: Size>(
    from: &Sequence<Tensor<u32>>,
    to: &mut Sequence<Tensor<Vector<u32, N>>>,
    geometries: &Sequence<Geometry>,
    #[comptime] is_batched: bool,
) {
    let row_of_all = CUBE_POS as u32 * ROWS + UNIT_POS_Y;
    #[unroll]
    for index in 0..from.len() {
        let geometry = geometries.index(index);
        if row_of_all >= geometry.first && row_of_all - geometry.first < geometry.count {
            let row = row_of_all - geometry.first;
            let mut row_start = geometry.before;
            if comptime!(is_batched) {
                row_start += row / geometry.rows * geometry.strides.batch
                    + row % geometry.rows * geometry.strides.row;
            } else {
                row_start += row * geometry.strides.row;
            }
            let pieces = geometry.cols.div_ceil(comptime!(PITCH as u32))
                * comptime!((PITCH / ALIGNMENT) as u32);
            let mut piece = UNIT_POS_X;
            while piece < pieces {
                to.index_mut(index)[(row * pieces + piece) as usize] = read_piece::<N>(
                    from.index(index),
                    row_start,
                    piece * comptime!(ALIGNMENT as u32),
                    geometry.cols,
                );
                piece += UNITS_OF_ROW;
            }
        }
    }
}

/// [`ALIGNMENT`] bytes of a row, 0 past its end: two neighbouring words give each of theirs.
#[cube]
fn read_piece<N: Size>(from: &Tensor<u32>, row_start: u32, col: u32, cols: u32) -> Vector<u32, N> {
    let start = row_start + col;
    let last = (row_start + cols - 1) / 4;
    let mut words = Array::<u32>::new(5usize);
    #[unroll]
    for index in 0..5u32 {
        let at = start / 4 + index;
        words[comptime!(index as usize)] = 0u32;
        if col < cols && at <= last {
            words[comptime!(index as usize)] = from[at as usize];
        }
    }
    let shift = start % 4 * 8;
    let inside = select(col < cols, cols - col, 0u32);
    let mut out = Vector::<u32, N>::empty();
    #[unroll]
    for index in 0..4u32 {
        let low = words[comptime!(index as usize)] >> shift;
        // In two steps, since a shift by 32 is undefined.
        let high = (words[comptime!(index as usize + 1)] << 1u32) << (31 - shift);
        let mut word = low | high;
        if inside < comptime!(4 * index + 4) {
            let bytes = select(
                inside > comptime!(4 * index),
                inside - comptime!(4 * index),
                0u32,
            );
            word &= (1u32 << (bytes * 8)) - 1;
        }
        out[comptime!(index as usize)] = word;
    }
    out
}

#[cfg(all(test, feature = "vulkan"))]
mod tests {
    use std::hash::{BuildHasher, RandomState};

    use cubecl::wgpu::WgpuRuntime;

    use crate::shape::MatrixShape;

    use super::*;

    /// Rows that end anywhere and start at any byte, a batch whose matrices overlap or are one, and nothing at all.
    #[test]
    fn one_launch_pads_the_rows_of_all_matrices() {
        let client = WgpuRuntime::client(&Default::default());
        let views = [
            (1, 1, 1, 1, 1),
            (2, 3, 1000, 3000, 1000),
            (3, 5, 129, 131, 26),
            (1, 0, 5, 0, 5),
            (2, 40, 256, 0, 259),
            (4, 3, 127, 1021, 340),
        ];
        let random = RandomState::new();
        let (mut copies, mut expected) = (Vec::new(), Vec::new());
        for (index, (batch, rows, cols, batch_stride, row_stride)) in views.into_iter().enumerate()
        {
            let length = (batch - 1) * batch_stride + rows * row_stride + cols;
            let bytes: Vec<u8> = (0..length)
                .map(|at| random.hash_one((index, at)) as u8)
                .collect();
            let pitch = usize::next_multiple_of(cols, PITCH);
            for row in 0..batch * rows {
                let start = row / rows * batch_stride + row % rows * row_stride;
                let mut padded = bytes[start..start + cols].to_vec();
                padded.resize(pitch, 0);
                expected.push((index, padded));
            }
            let from = TensorHandle::<WgpuRuntime>::new(
                client.create_from_slice(&bytes),
                [batch, rows, cols],
                [batch_stride, row_stride, 1],
                storage::<i8>(),
            );
            let view = MatrixView {
                shape: MatrixShape::batched(batch, rows, cols),
                batch_stride,
                row_stride,
                col_stride: 1,
                batched: true,
            };
            copies.push(Copied::new(&client, &from, &view));
        }
        let written: Vec<_> = copies.iter().map(|copy| copy.to.handle.clone()).collect();
        launch(&client, copies);
        for (index, handle) in written.into_iter().enumerate() {
            let bytes = client.read_one(handle).expect("a readable buffer");
            let of_matrix: Vec<u8> = expected
                .iter()
                .filter(|(of, _)| *of == index)
                .flat_map(|(_, row)| row.clone())
                .collect();
            assert_eq!(bytes[..of_matrix.len()], of_matrix, "matrix {index}");
        }
    }
}
