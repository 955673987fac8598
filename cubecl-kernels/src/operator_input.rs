//! The matrix that an operator between linear layers reads: floats, or numbers with scales, which its kernel decodes
//! as it reads them (jetfire-int8, section 3.2; coat-fp8, section 5.2).
//!
//! A value that waits in a byte is then read as a byte. Dequantized by a kernel of its own, a value of 16 bits is
//! written and read again.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    device::{check_contiguous, check_float, or_unused, storage, vector_width},
    error::KernelError,
    number::storage::RUN,
    quantize::{
        Quantized, dequantize, runs_of,
        whole_runs::{RunCodes, RunGrid, RunGridLaunch, Runs, decode_part, no_grid},
    },
};

/// The input of an operator.
#[derive(Debug)]
pub enum OperatorInput<'a, R: Runtime> {
    /// Floats: f32, f16 or bf16, contiguous.
    Floats(&'a TensorHandle<R>),
    /// Numbers with scales, read as floats of this type: each value is rounded to it, as [`dequantize`] does.
    ///
    /// Where rows are whole runs of 16 elements, none of which has two scales, and the row-major copy is there and
    /// contiguous, a kernel decodes what it reads. Others are dequantized first. The results are those of the floats,
    /// to the bit, but for norms of numbers of ten bits, or of four beside f32 or a gradient that is not aligned, whose
    /// sums have another order.
    Quantized(&'a Quantized<R>, StorageType),
}

impl<R: Runtime> Clone for OperatorInput<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for OperatorInput<'_, R> {}

impl<'a, R: Runtime> From<&'a TensorHandle<R>> for OperatorInput<'a, R> {
    fn from(tensor: &'a TensorHandle<R>) -> Self {
        Self::Floats(tensor)
    }
}

impl<'a, R: Runtime> OperatorInput<'a, R> {
    /// The tensor of floats, or of codes in the order of the floats.
    pub(crate) fn dense(&self) -> Option<&'a TensorHandle<R>> {
        match *self {
            Self::Floats(tensor) => Some(tensor),
            Self::Quantized(matrix, _) => matrix.values.as_ref(),
        }
    }

    /// The shape of the floats.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Floats(tensor) => tensor.shape().to_vec(),
            Self::Quantized(matrix, _) => {
                let shape = matrix.shape;
                match matrix.batched {
                    true => vec![shape.batch, shape.rows, shape.cols],
                    false => vec![shape.rows, shape.cols],
                }
            }
        }
    }

    /// Their type.
    pub fn dtype(&self) -> StorageType {
        match self {
            Self::Floats(tensor) => tensor.dtype,
            Self::Quantized(_, dtype) => *dtype,
        }
    }

    /// Accepts floats that kernels read, and quantized matrices as `quantize` makes them. Gives the number of elements.
    pub(crate) fn check(
        &self,
        client: &ComputeClient<R>,
        operation: &'static str,
        name: &'static str,
    ) -> Result<usize, KernelError> {
        check_float(client, operation, name, self.dtype())?;
        match self {
            Self::Floats(tensor) => check_contiguous(operation, tensor),
            Self::Quantized(matrix, _) => {
                runs_of(operation, matrix)?;
                Ok(matrix.shape.num_elements())
            }
        }
    }

    /// The floats, in memory.
    pub(crate) fn floats(&self, client: &ComputeClient<R>) -> Result<TensorHandle<R>, KernelError> {
        match self {
            Self::Floats(tensor) => Ok((*tensor).clone()),
            Self::Quantized(matrix, dtype) => dequantize(client, matrix, *dtype),
        }
    }

    /// The tensors that a kernel is launched with.
    pub(crate) fn prepare(
        &self,
        client: &ComputeClient<R>,
        operation: &'static str,
    ) -> Result<Prepared<R>, KernelError> {
        Ok(match self {
            Self::Floats(tensor) => Prepared::Floats((*tensor).clone()),
            Self::Quantized(matrix, dtype) => match runs_of(operation, matrix)? {
                Some(runs) => Prepared::Runs(Box::new(runs)),
                None => Prepared::Floats(dequantize(client, matrix, *dtype)?),
            },
        })
    }
}

/// The tensors of an input, as a kernel reads them.
pub(crate) enum Prepared<R: Runtime> {
    Floats(TensorHandle<R>),
    Runs(Box<Runs<R>>),
}

impl<R: Runtime> Prepared<R> {
    fn into_floats(
        self,
        client: &ComputeClient<R>,
        input: &OperatorInput<R>,
    ) -> Result<Self, KernelError> {
        Ok(match (self, input) {
            (Self::Runs(_), OperatorInput::Quantized(matrix, dtype)) => {
                Self::Floats(dequantize(client, matrix, *dtype)?)
            }
            (prepared, _) => prepared,
        })
    }

    /// The values, as a kernel reads them.
    pub fn values(&self) -> &TensorHandle<R> {
        match self {
            Self::Floats(tensor) => tensor,
            Self::Runs(runs) => &runs.words,
        }
    }

    /// Scales, or a stand-in.
    pub fn scales(&self) -> TensorHandle<R> {
        match self {
            Self::Floats(tensor) => or_unused(None, tensor, storage::<f32>()),
            Self::Runs(runs) => runs.scales.clone(),
        }
    }

    /// Scales of matrices, or a stand-in.
    pub fn tensor_scales(&self) -> TensorHandle<R> {
        match self {
            Self::Floats(tensor) => or_unused(None, tensor, storage::<f32>()),
            Self::Runs(runs) => runs.tensor_scales.clone(),
        }
    }

    /// Which scale a value has.
    pub fn grid(&self) -> RunGridLaunch<R> {
        match self {
            Self::Floats(_) => no_grid(),
            Self::Runs(runs) => runs.grid(),
        }
    }
}

/// The number of elements of inputs that are all like the first.
pub(crate) fn check_alike<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    inputs: &[(&'static str, OperatorInput<R>)],
) -> Result<usize, KernelError> {
    let (_, first) = inputs[0];
    let mut len = 0;
    for (name, input) in inputs {
        len = input.check(client, operation, name)?;
        if input.shape() != first.shape() || input.dtype() != first.dtype() {
            let described = inputs
                .iter()
                .map(|(name, input)| format!("{name} {:?} of {}", input.shape(), input.dtype()));
            return Err(KernelError::Shape {
                operation,
                got: described.collect::<Vec<_>>().join(", "),
                remedy: "pass tensors of one shape and type",
            });
        }
    }
    Ok(len)
}

/// The tensors of two inputs of one shape and type, which one kernel reads: where they are not stored alike, as floats.
pub(crate) fn prepare_alike<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    inputs: [OperatorInput<R>; 2],
) -> Result<[Prepared<R>; 2], KernelError> {
    let [one, other] = inputs;
    let prepared = [
        one.prepare(client, operation)?,
        other.prepare(client, operation)?,
    ];
    Ok(match prepared {
        [Prepared::Runs(one), Prepared::Runs(other)] if one.is_stored_like(&other) => {
            [Prepared::Runs(one), Prepared::Runs(other)]
        }
        [one, other] => [
            one.into_floats(client, &inputs[0])?,
            other.into_floats(client, &inputs[1])?,
        ],
    })
}

/// How a unit reads and writes: a piece is so many neighbours of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Pieces {
    /// Elements of a piece.
    pub len: usize,
    /// Elements or words of the input that are read at once.
    pub read: usize,
    /// Elements of other tensors of the same rows that are read and written at once.
    pub width: usize,
    /// The codes of the input, unless it is floats.
    pub codes: Option<RunCodes>,
}

impl Pieces {
    /// For inputs that are stored alike, beside `others`, floats of one type, all of rows of `cols` elements.
    ///
    /// Numbers are read in pieces of the length that floats are read in, where such a piece is whole words: then sums
    /// over a row have one order, and the same bits, for both.
    pub fn of<R: Runtime>(
        inputs: &[&Prepared<R>],
        cols: usize,
        others: &[&TensorHandle<R>],
    ) -> Self {
        let mut floats = others.to_vec();
        let mut codes = None;
        for input in inputs {
            match input {
                Prepared::Floats(tensor) => floats.push(tensor),
                Prepared::Runs(runs) => codes = Some(runs.codes),
            }
        }
        let width = vector_width(cols, &floats);
        match codes {
            None => Self {
                len: width,
                read: width,
                width,
                codes,
            },
            Some(numbers) => {
                let len = if numbers.has_parts(width) { width } else { RUN };
                Self {
                    len,
                    read: numbers.read(len),
                    width,
                    codes,
                }
            }
        }
    }
}

/// The values of a piece of an input, rounded to its type `F`, as `f32`. `X` is `F`, or u32 where it is words of codes.
#[cube]
pub(crate) fn read_input<X: Numeric, NX: Size, S: Numeric, F: Numeric>(
    x: &Array<Vector<X, NX>>,
    scales: &Array<S>,
    tensor_scales: &Array<f32>,
    grid: &RunGrid,
    piece: u32,
    #[comptime] pieces: Pieces,
) -> Array<f32> {
    match comptime!(pieces.codes) {
        None => read_piece::<X, NX>(x, piece, pieces.len, pieces.read),
        Some(codes) => {
            let len = comptime!(pieces.len);
            let mut values =
                decode_part::<X, NX, S>(x, scales, tensor_scales, grid, piece, len, codes);
            #[unroll]
            for index in 0..len {
                values[index] = f32::cast_from(F::cast_from(values[index]));
            }
            values
        }
    }
}

/// The elements of a piece, as `f32`, read `width` at once.
#[cube]
pub(crate) fn read_piece<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    piece: u32,
    #[comptime] len: usize,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut values = Array::<f32>::new(len);
    let reads = comptime!(len / width);
    #[unroll]
    for read in 0..reads {
        let vector = x[piece as usize * reads + read];
        #[unroll]
        for lane in 0..width {
            values[comptime!(read * width + lane)] = f32::cast_from(vector[lane]);
        }
    }
    values
}

/// Writes the elements of a piece, `width` at once.
#[cube]
pub(crate) fn write_piece<F: Numeric, N: Size>(
    out: &mut Array<Vector<F, N>>,
    values: &Array<f32>,
    piece: u32,
    #[comptime] len: usize,
    #[comptime] width: usize,
) {
    let writes = comptime!(len / width);
    #[unroll]
    for write in 0..writes {
        let mut vector = Vector::<F, N>::empty();
        #[unroll]
        for lane in 0..width {
            vector[lane] = F::cast_from(values[comptime!(write * width + lane)]);
        }
        out[piece as usize * writes + write] = vector;
    }
}
