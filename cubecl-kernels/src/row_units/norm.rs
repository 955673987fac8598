//! Both norms by kernels of CUDA source: `norm.cu`, of numbers, which the hardware decodes, and `norm_gradients.cu`, which
//! copies a row to shared memory while it computes another one.
//!
//! The portable kernels of [`rms_norm`](mod@crate::rms_norm) and [`layer_norm`](mod@crate::layer_norm) are their
//! specification, to the bit: sums have the same order.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        numbers::numbers,
        source::{CudaSource, float_knob, launch_source},
    },
    device::{empty, is_contiguous, is_hopper, is_operand_type, storage, vector_width},
    granularity::Granularity,
    number::Number,
    operator_input::OperatorInput,
    output_gradient::{OutputGradient, Terms},
    quantize::Quantized,
    scale::ScaleNumber,
};

use super::RowUnits;

/// Elements of a vector: 16 bytes of floats.
const WIDTH: usize = 8;
/// Threads of a multiprocessor that leave each as many registers as the gradients take, and with how many elements each.
const THREADS: usize = 512;
const MOST_HELD: usize = 24;

/// What a norm finds of each row, f32 `[rows]`.
#[derive(Debug)]
pub(crate) struct RowStatistics<'a, R: Runtime> {
    /// Of layer normalization.
    pub mean: Option<&'a TensorHandle<R>>,
    /// The inverse root mean square, of layer normalization that of the deviation.
    pub inverse: &'a TensorHandle<R>,
}

/// What a norm makes of rows.
pub(crate) struct Output<'a, R: Runtime> {
    pub gain: &'a TensorHandle<R>,
    pub bias: Option<&'a TensorHandle<R>>,
    /// Allocated for it.
    pub output: &'a TensorHandle<R>,
}

/// Writes what a norm finds of rows, and its output, if there is a kernel for it. Says whether it did. There is at least
/// one row; shapes and types were checked, and the outputs allocated for them.
pub(crate) fn normalize<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    shape: [usize; 2],
    epsilon: f32,
    statistics: RowStatistics<R>,
    Output { gain, bias, output }: Output<R>,
) -> bool {
    let of_columns: Vec<_> = [gain].into_iter().chain(bias).collect();
    of_rows(
        client,
        x,
        shape,
        epsilon,
        statistics,
        &of_columns,
        Some(output),
    )
}

/// [`normalize`] without an output.
pub(crate) fn find_statistics<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    shape: [usize; 2],
    epsilon: f32,
    statistics: RowStatistics<R>,
) -> bool {
    of_rows(client, x, shape, epsilon, statistics, &[], None)
}

fn of_rows<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    [rows, cols]: [usize; 2],
    epsilon: f32,
    statistics: RowStatistics<R>,
    of_columns: &[&TensorHandle<R>],
    output: Option<&TensorHandle<R>>,
) -> bool {
    let Some(input) = Input::of(client, x, [rows, cols]).filter(|input| input.codes.is_some())
    else {
        return false;
    };
    let floats: Vec<_> = output.into_iter().collect();
    let Some(knobs) = input.knobs(client, of_columns, &floats) else {
        return false;
    };
    let source = Norm {
        rows: knobs,
        centred: statistics.mean.is_some(),
        output: output.is_some(),
        bias: of_columns.len() > 1,
    };
    let mut buffers = input.tensors();
    buffers.extend(of_columns);
    buffers.extend(output);
    buffers.extend(statistics.mean);
    buffers.push(statistics.inverse);
    let cubes = CubeCount::Static(rows.div_ceil(knobs.units.rows) as u32, 1, 1);
    let numbers = NormNumbers {
        rows: rows as u64,
        bits_of_epsilon: epsilon.to_bits().into(),
    };
    launch(client, source, cubes, &buffers, &numbers);
    true
}

/// The gradients of a gain, and of layer normalization's bias, in parts.
pub(crate) struct OfColumns<R: Runtime> {
    /// f32 `[parts, cols]`.
    pub gain: TensorHandle<R>,
    /// The same, where there is a mean.
    pub bias: Option<TensorHandle<R>>,
}

/// Writes the gradient of the input of a norm, and gives the others, if there is a kernel for it. There is at least one
/// row; shapes and types were checked, and `of_x` was allocated for them.
pub(crate) fn gradients<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    [rows, cols]: [usize; 2],
    gain: &TensorHandle<R>,
    statistics: RowStatistics<R>,
    gradient: &OutputGradient<R>,
    of_x: &TensorHandle<R>,
) -> Option<OfColumns<R>> {
    let input = Input::of(client, x, [rows, cols])?;
    let mut floats = vec![of_x];
    floats.extend(gradient.other);
    let (terms, codes_of_terms) = terms(&gradient.terms, [rows, cols])?;
    if codes_of_terms.is_none() {
        floats.extend(&terms);
    }
    let knobs = input.knobs(client, &[gain], &floats)?;
    let source = NormGradients {
        rows: knobs,
        centred: statistics.mean.is_some(),
        terms: gradient.terms.len(),
        codes_of_terms,
        other: gradient.other.is_some(),
    };
    let parts = knobs.units.backward_cubes(rows);
    let of_columns = || empty(client, vec![parts, cols], storage::<f32>());
    let output = OfColumns {
        gain: of_columns(),
        bias: statistics.mean.map(|_| of_columns()),
    };
    let mut buffers = input.tensors();
    buffers.push(gain);
    buffers.extend(statistics.mean);
    buffers.push(statistics.inverse);
    buffers.extend(terms);
    buffers.extend(gradient.other);
    buffers.extend([of_x, &output.gain]);
    buffers.extend(output.bias.as_ref());
    let cubes = CubeCount::Static(parts as u32, 1, 1);
    let numbers = GradientNumbers { rows: rows as u64 };
    launch(client, source, cubes, &buffers, &numbers);
    Some(output)
}

/// The tensors of a gradient's terms in the order in which the kernel takes them, and if they are numbers, how. `None` where
/// it does not read them.
fn terms<'a, R: Runtime>(
    terms: &Terms<'a, R>,
    shape: [usize; 2],
) -> Option<(Vec<&'a TensorHandle<R>>, Option<Codes>)> {
    let matrices = match terms {
        Terms::Floats(tensors) => return Some((tensors.iter().collect(), None)),
        Terms::Numbers(matrices, _) => *matrices,
    };
    let codes = Codes::of(matrices.first()?, shape)?;
    let mut tensors = Vec::with_capacity(2 * matrices.len());
    for matrix in matrices {
        let values = matrix.values.as_ref()?;
        if Codes::of(matrix, shape)? != codes || !is_aligned(values) {
            return None;
        }
        tensors.extend([values, &matrix.scales]);
    }
    Some((tensors, Some(codes)))
}

/// True for codes of which a vector can be read at once, 8 bytes.
fn is_aligned<R: Runtime>(values: &TensorHandle<R>) -> bool {
    let start = values.handle.offset_start.unwrap_or_default();
    start.is_multiple_of(WIDTH as u64)
}

fn launch<R: Runtime, S: CudaSource>(
    client: &ComputeClient<R>,
    source: S,
    cubes: CubeCount,
    buffers: &[&TensorHandle<R>],
    numbers: &S::Numbers,
) {
    let buffers = buffers.iter().map(|&buffer| buffer.clone()).collect();
    // SAFETY: both kernels guard rows by their number and vectors by that of a row, for which all tensors were checked
    // or allocated.
    #[allow(unsafe_code)]
    unsafe {
        launch_source(client, source, cubes, Vec::new(), buffers, numbers);
    }
}

/// The matrix that a norm reads, in elements or in numbers that the kernels decode.
struct Input<'a, R: Runtime> {
    dtype: StorageType,
    cols: usize,
    values: &'a TensorHandle<R>,
    /// Where the values are numbers, how, and their scales.
    codes: Option<(Codes, &'a TensorHandle<R>)>,
}

impl<'a, R: Runtime> Input<'a, R> {
    /// `None` where a kernel does not read it, or the device has none.
    fn of(
        client: &ComputeClient<R>,
        x: OperatorInput<'a, R>,
        [rows, cols]: [usize; 2],
    ) -> Option<Self> {
        let dtype = x.dtype();
        if !is_hopper(client) || !is_operand_type(dtype) || !cols.is_multiple_of(WIDTH) {
            return None;
        }
        let (values, codes) = match x {
            OperatorInput::Floats(tensor) => (tensor, None),
            OperatorInput::Quantized(matrix, _) => {
                let codes = Codes::of(matrix, [rows, cols])?;
                (matrix.values.as_ref()?, Some((codes, &matrix.scales)))
            }
        };
        Some(Self {
            dtype,
            cols,
            values,
            codes,
        })
    }

    /// The tensors in the order in which kernels take them.
    fn tensors(&self) -> Vec<&'a TensorHandle<R>> {
        let scales = self.codes.map(|(_, scales)| scales);
        [self.values].into_iter().chain(scales).collect()
    }

    /// What kernels are compiled for that read and write `floats` of the same shape and type beside it, and tensors of
    /// columns, of one type; `None` where these cannot be read 16 bytes at a time.
    fn knobs(
        &self,
        client: &ComputeClient<R>,
        of_columns: &[&TensorHandle<R>],
        floats: &[&TensorHandle<R>],
    ) -> Option<Rows> {
        let mut floats = floats.to_vec();
        match self.codes {
            None => floats.push(self.values),
            Some(_) if !is_aligned(self.values) => return None,
            Some(_) => {}
        }
        let gains = of_columns.first().map_or(self.dtype, |gain| gain.dtype);
        let units = RowUnits::new(client, self.cols, WIDTH);
        let fits = (floats.is_empty() || vector_width(self.cols, &floats) == WIDTH)
            && (of_columns.is_empty() || vector_width(WIDTH, of_columns) * gains.size() == 16)
            && (gains == self.dtype || gains == storage::<f32>())
            && units.planes;
        fits.then_some(Rows {
            dtype: self.dtype,
            units,
            codes: self.codes.map(|(codes, _)| codes),
            gain_f32: gains == storage::<f32>(),
        })
    }
}

/// Numbers with FP32 scales, of which a vector has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Codes {
    /// INT8, not E4M3.
    is_int8: bool,
    /// Rows and columns of a scale.
    of_scale: [usize; 2],
}

impl Codes {
    fn of<R: Runtime>(matrix: &Quantized<R>, [rows, cols]: [usize; 2]) -> Option<Self> {
        let is_int8 = match matrix.number {
            Number::Int8 => true,
            Number::E4M3 => false,
            _ => return None,
        };
        let of_scale = match matrix.granularity {
            Granularity::Group(size) => [1, size],
            Granularity::Block(side) if matrix.shape.batch == 1 => [side, side],
            _ => return None,
        };
        let values = matrix.values.as_ref()?;
        let scales = [rows.div_ceil(of_scale[0]), cols / of_scale[1]];
        let fits = matrix.scale == ScaleNumber::F32
            && of_scale[1].is_multiple_of(WIDTH)
            && cols.is_multiple_of(of_scale[1])
            && is_contiguous(values)
            && is_contiguous(&matrix.scales)
            && values.shape().iter().product::<usize>() == rows * cols
            && matrix.scales.shape().iter().product::<usize>() == scales[0] * scales[1];
        fits.then_some(Self { is_int8, of_scale })
    }

    /// The lines that say how a matrix is stored; `name` goes before those of the knobs.
    fn text(codes: Option<Self>, name: &str) -> String {
        let Some(Self {
            is_int8,
            of_scale: [rows, cols],
        }) = codes
        else {
            return format!("#define {name}CODES 0\n");
        };
        format!(
            "#define {name}CODES {}\n#define {name}SCALE_ROWS {rows}\n#define {name}SCALE_COLS {cols}\n",
            1 + u8::from(is_int8)
        )
    }
}

/// The knobs of `rows.cu` and of `pairs.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Rows {
    dtype: StorageType,
    units: RowUnits,
    codes: Option<Codes>,
    gain_f32: bool,
}

impl Rows {
    /// The lines that define them.
    fn text(&self) -> String {
        let codes = Codes::text(self.codes, "");
        format!(
            "#define IN_{}\n#define COLS {}\n#define LANES {}\n#define ROWS {}\n{codes}#define GAIN_F32 {}\n",
            float_knob(self.dtype),
            self.units.cols,
            self.units.lanes,
            self.units.rows,
            u8::from(self.gain_f32),
        )
    }
}

numbers! {
    /// The numbers of `norm.cu`.
    struct NormNumbers {
        rows: u64,
        bits_of_epsilon: u64,
    }
}

numbers! {
    /// The numbers of `norm_gradients.cu`.
    struct GradientNumbers {
        rows: u64,
    }
}

/// A kernel's text behind those that it names.
macro_rules! with_rows {
    ($kernel:literal) => {
        concat!(
            include_str!("../cuda/pairs.cu"),
            "\n",
            include_str!("rows.cu"),
            "\n",
            include_str!($kernel)
        )
    };
}

/// `norm.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Norm {
    rows: Rows,
    centred: bool,
    output: bool,
    bias: bool,
}

impl CudaSource for Norm {
    type Numbers = NormNumbers;

    const TEXT: &'static str = with_rows!("norm.cu");
    const ENTRY_POINT: &'static str = "norm_of_codes";

    fn units(&self) -> u32 {
        self.rows.units.of_cube() as u32
    }

    fn knobs(&self) -> String {
        format!(
            "{}#define CENTRED {}\n#define OUTPUT {}\n#define BIAS {}",
            self.rows.text(),
            u8::from(self.centred),
            u8::from(self.output),
            u8::from(self.bias),
        )
    }
}

/// `norm_gradients.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct NormGradients {
    rows: Rows,
    centred: bool,
    terms: usize,
    /// Where these are numbers, how.
    codes_of_terms: Option<Codes>,
    other: bool,
}

impl CudaSource for NormGradients {
    type Numbers = GradientNumbers;

    const TEXT: &'static str = with_rows!("norm_gradients.cu");
    const ENTRY_POINT: &'static str = "norm_gradients";

    fn units(&self) -> u32 {
        self.rows.units.of_cube() as u32
    }

    fn knobs(&self) -> String {
        let units = self.rows.units;
        let threads = match units.elements() <= MOST_HELD {
            true => THREADS,
            false => THREADS / 2,
        };
        let blocks = threads / units.of_cube();
        format!(
            "{}{}#define CENTRED {}\n#define TERMS {}\n#define OTHER {}\n#define BLOCKS {blocks}",
            self.rows.text(),
            Codes::text(self.codes_of_terms, "TERM_"),
            u8::from(self.centred),
            self.terms,
            u8::from(self.other),
        )
    }

    /// What is in flight of a row.
    fn shared_memory(&self) -> usize {
        let bytes = |codes: Option<Codes>| codes.map_or(16, |_| WIDTH + size_of::<f32>());
        let terms = self.terms * bytes(self.codes_of_terms);
        let of_vector = bytes(self.rows.codes) + terms + 16 * usize::from(self.other);
        self.rows.units.of_cube() * self.rows.units.held * of_vector
    }
}
