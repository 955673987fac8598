//! The kernel of CUDA source for what a training step with one scale for each matrix quantizes most: whole tiles, to
//! FP8, by delayed scaling or by current scaling, that of the matrix's own maximum.
//!
//! The portable kernels beside it, three launches and four, are its specification, and do everything else. Small
//! launches are what a step of many layers feels most: this is one. `tile.cu` tells how.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        counters::counters,
        numbers::numbers,
        source::{CudaSource, SourceText, float_knob, launch_source},
    },
    device::{
        MAX_CUBES, MatrixView, cubes_by_turns, empty, is_contiguous, is_hopper, or_unused,
        read_width_up_to, storage,
    },
    granularity::Granularity,
    layout::Layout,
    number::{Number, fp8::Fp8},
    rounding::Rounding,
    scale::ScaleNumber,
};

use super::{DelayedMaximum, Input, QuantizeSpec, Quantized, buffers::allocate};

/// Bytes read at once.
const VECTOR_BYTES: usize = 16;
/// Codes of a row that a unit reads at once.
const CODES_AT_ONCE: usize = 8;
/// Tiles of which 32 bits number all pieces of 8 elements.
const MAX_TILES: usize = 1 << 22;
/// Rows and columns of a tile.
const TILE: [usize; 2] = [64, 128];

/// Cubes of a multiprocessor that take tiles by turns: with more, they wait for each other's counts.
const TAKING: usize = 3;

/// Does what [`quantize_delayed`](super::quantize_delayed) does, if this kernel can and the device has it.
pub(super) fn delayed<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    delayed: DelayedMaximum<R>,
) -> Option<(Quantized<R>, TensorHandle<R>)> {
    let output = || allocate(client, &input.view, input.spec);
    let (output, absmax) = of_floats(client, input, output, Some(delayed))?;
    Some((output, absmax.expect("delayed scaling finds it")))
}

/// Does what [`quantize`](super::quantize()) does with one scale for the matrix, if this kernel can and the device has
/// it. Says whether it did. `output` was allocated for the input.
pub(super) fn current<R: Runtime>(
    client: &ComputeClient<R>,
    input: &Input<R>,
    output: &Quantized<R>,
) -> bool {
    of_floats(client, input, || output.clone(), None).is_some()
}

fn of_floats<R: Runtime>(
    client: &ComputeClient<R>,
    &Input {
        x, ref view, spec, ..
    }: &Input<R>,
    output: impl FnOnce() -> Quantized<R>,
    delayed: Option<DelayedMaximum<R>>,
) -> Option<(Quantized<R>, Option<TensorHandle<R>>)> {
    let (tiles, knobs) = fits(client, x.dtype, &[x], view, spec)?;
    let source = Encode(knobs.with_history(delayed.is_some()));
    let output = output();
    // SAFETY: the kernel reads one input, and the output is for it.
    #[allow(unsafe_code)]
    let absmax = unsafe {
        let numbers = numbers(view, delayed);
        let cubes = cubes(client, tiles, delayed.is_some(), TAKING);
        launch_one(client, source, cubes, &[x], &output, &numbers, delayed)
    };
    Some((output, absmax))
}

/// Rows and columns of tiles, and the knobs, where the device has the kernels for the spec and for elements of this type
/// and view: whole tiles, and inputs that can be read 16 bytes at a time.
pub(crate) fn fits<R: Runtime>(
    client: &ComputeClient<R>,
    dtype: StorageType,
    inputs: &[&TensorHandle<R>],
    view: &MatrixView,
    spec: &QuantizeSpec,
) -> Option<([usize; 2], Knobs)> {
    let shape = view.shape;
    let vector = VECTOR_BYTES / dtype.size();
    let [rows, cols] = [shape.rows / TILE[0], shape.cols / TILE[1]];
    let fits = is_hopper(client)
        && spec.granularity == Granularity::Tensor
        && spec.scale == ScaleNumber::F32
        && spec.rounding == Rounding::Nearest
        && shape.batch == 1
        && [rows * TILE[0], cols * TILE[1]] == [shape.rows, shape.cols]
        && (1..=MAX_TILES).contains(&(rows * cols))
        && rows.max(cols) <= MAX_CUBES
        && inputs
            .iter()
            .all(|input| read_width_up_to(vector, input, view) == vector);
    let knobs = Knobs::of(dtype, spec)?;
    fits.then_some(([rows, cols], knobs))
}

/// The elements that share a scale, in a matrix whose codes kernels around `codes.cu` read, if they do.
pub(crate) fn group_of<R: Runtime>(matrix: &Quantized<R>, view: &MatrixView) -> Option<usize> {
    let Granularity::Group(group) = matrix.granularity else {
        return None;
    };
    let values = matrix.values.as_ref()?;
    let is_read = matrix.number == Number::E4M3
        && matrix.scale == ScaleNumber::F32
        && group.is_multiple_of(CODES_AT_ONCE)
        && view.shape.cols.is_multiple_of(group)
        && is_contiguous(values)
        && is_contiguous(&matrix.scales)
        && read_width_up_to(CODES_AT_ONCE, values, view) == CODES_AT_ONCE;
    is_read.then_some(group)
}

/// Launches a kernel around `tile.cu` that has one output, in these [cubes]. Gives its largest magnitude, f32 `[1]`, by
/// delayed scaling.
///
/// # Safety
///
/// The inputs are those that the kernel reads, of whole tiles, of whose number the cubes are; the output was allocated for
/// them, and the delayed maximum was checked.
#[allow(unsafe_code)]
pub(crate) unsafe fn launch_one<R: Runtime, S: CudaSource<Numbers = MatrixNumbers>>(
    client: &ComputeClient<R>,
    source: S,
    cubes: CubeCount,
    inputs: &[&TensorHandle<R>],
    output: &Quantized<R>,
    numbers: &MatrixNumbers,
    delayed: Option<DelayedMaximum<R>>,
) -> Option<TensorHandle<R>> {
    let absmax = delayed.map(|_| empty(client, vec![1], storage::<f32>()));
    let mut buffers: Vec<_> = inputs.iter().map(|&input| input.clone()).collect();
    buffers.extend(delayed.map(|delayed| delayed.maxima.clone()));
    buffers.extend(copies(output, inputs[0]));
    buffers.push(output.scales.clone());
    buffers.extend(absmax.clone());
    buffers.push(counters(client));
    // SAFETY: no tile reaches over an edge, and by the caller's promise the output holds as many. A copy that is not
    // wanted is not touched.
    unsafe {
        launch_source(client, source, cubes, Vec::new(), buffers, numbers);
    }
    absmax
}

/// Those of a matrix of this view.
pub(crate) fn numbers<R: Runtime>(
    view: &MatrixView,
    delayed: Option<DelayedMaximum<R>>,
) -> MatrixNumbers {
    MatrixNumbers {
        rows: view.shape.rows as u64,
        cols: view.shape.cols as u64,
        row_stride: view.row_stride as u64,
        layer: delayed.map_or(0, |delayed| delayed.layer as u64),
    }
}

/// By delayed scaling a cube a tile, else cubes that take tiles by turns: `taking` of a multiprocessor.
pub(crate) fn cubes<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, cols]: [usize; 2],
    delayed: bool,
    taking: usize,
) -> CubeCount {
    if delayed {
        return CubeCount::Static(cols as u32, rows as u32, 1);
    }
    cubes_by_turns(client, rows * cols, taking)
}

/// Both copies as arguments; for one that is not wanted, something that is not touched.
pub(crate) fn copies<R: Runtime>(
    output: &Quantized<R>,
    unused: &TensorHandle<R>,
) -> [TensorHandle<R>; 2] {
    [&output.values, &output.transposed]
        .map(|copy| or_unused(copy.as_ref(), unused, storage::<u8>()))
}

numbers! {
    /// The numbers of kernels with one output.
    pub(crate) struct MatrixNumbers {
        /// Of the matrix, multiples of those of a tile.
        rows: u64,
        cols: u64,
        /// Elements of an input from a row to the next.
        row_stride: u64,
        /// The layer among the delayed maxima, where there are some.
        layer: u64,
    }
}

/// What the kernels around `tile.cu` are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Knobs {
    dtype: StorageType,
    number: Fp8,
    layout: Layout,
    delayed: bool,
}

impl Knobs {
    /// Those of a spec, by current scaling; none where its number is not FP8.
    fn of(dtype: StorageType, spec: &QuantizeSpec) -> Option<Self> {
        Some(Self {
            dtype,
            number: Fp8::of(spec.number)?,
            layout: spec.layout,
            delayed: false,
        })
    }

    /// The same by delayed scaling, or not.
    pub fn with_history(self, delayed: bool) -> Self {
        Self { delayed, ..self }
    }

    /// Those of a gradient of such a matrix.
    pub fn of_gradient(self) -> Self {
        Self {
            number: Fp8::E5M2,
            layout: Layout::Both,
            ..self
        }
    }

    /// The lines that define them.
    pub fn text(&self) -> String {
        let (row_major, transposed) = match self.layout {
            Layout::RowMajor => (1, 0),
            Layout::Transposed => (0, 1),
            Layout::Both => (1, 1),
        };
        format!(
            "#define IN_{}\n#define NUMBER \"{}\"\n#define LARGEST {:?}f\n#define DELAYED {}\n\
             #define ROW_MAJOR {row_major}\n#define TRANSPOSED {transposed}",
            float_knob(self.dtype),
            self.number.name(),
            self.number.largest(),
            u8::from(self.delayed),
        )
    }
}

/// The text of a kernel around `tile.cu` that may read codes, in the folder beside this file's from which it is asked for:
/// behind those that it stands on.
macro_rules! around_tile {
    ($($text:literal),+) => {
        concat!(
            include_str!("../quantize/patch.cu"),
            "\n",
            include_str!("../quantize/block/scale.cu"),
            "\n",
            include_str!("../quantize/matrix_scale/tile.cu"),
            "\n",
            include_str!("../cuda/pairs.cu"),
            "\n",
            include_str!("../quantize/matrix_scale/codes.cu"),
            $("\n", include_str!($text)),+
        )
    };
}

pub(crate) use around_tile;

/// `matrix_scale/whole_tiles.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Encode(Knobs);

impl CudaSource for Encode {
    type Numbers = MatrixNumbers;

    const TEXT: &'static str = concat!(
        include_str!("patch.cu"),
        "\n",
        include_str!("block/scale.cu"),
        "\n",
        include_str!("matrix_scale/tile.cu"),
        "\n",
        include_str!("matrix_scale/whole_tiles.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_by_matrix";

    fn knobs(&self) -> String {
        self.0.text()
    }

    /// Those of W and of dY with those of X.
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        let Self(of_x) = *self;
        if of_x.dtype == storage::<f32>() || of_x.number != Fp8::E4M3 {
            return vec![];
        }
        let of_weight = Knobs {
            dtype: storage::<f32>(),
            layout: Layout::Both,
            ..of_x
        };
        let others = [of_weight, of_x.of_gradient()];
        others.map(|knobs| Encode(knobs).text()).to_vec()
    }
}
