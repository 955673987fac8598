//! GELU and its gradient, quantized as they are computed from what flows: kernels of CUDA source, to FP8 by one scale
//! `matrix_scale.cu`, around the tile of [`matrix_scale`](mod@crate::quantize::matrix_scale), and in INT8 blocks `block.cu`,
//! around that of [`quantize_linear_input`](crate::linear_input::quantize_linear_input).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::source::{CudaSource, SourceText},
    device::{MatrixView, is_operand_type, read_width_up_to},
    error::KernelError,
    operator_input::{OperatorInput, check_alike},
    quantize::{
        QuantizeSpec, Quantized,
        block::{
            Round,
            whole_tiles::{CodesNumbers, OfScale, TileKnobs, around_block_tile, launch_of_codes},
        },
        buffers::{allocate, allocate_gradient},
        matrix_scale::{
            Knobs, MatrixNumbers, around_tile, cubes, fits, group_of, launch_one, numbers,
        },
        quantize,
        staged::TILE,
    },
};

use super::{gelu, gelu_backward};

const OPERATION: &str = "quantize_gelu";
const OPERATION_OF_GRADIENT: &str = "quantize_gelu_gradient";
/// Cubes of a multiprocessor that take tiles by turns.
const TAKING: usize = 4;
/// Cubes that are to share a multiprocessor, at most, where each has a tile that is a block.
const MOST_CUBES: usize = 4;
/// Elements of a gradient that a unit reads at once.
const VECTOR: usize = 8;

/// The output of [`gelu`](super::gelu()), quantized: in one launch, without the output in memory, where a kernel has the
/// spec.
///
/// - `x`: `[rows, cols]`, as there.
/// - `spec`: kernels have, of elements of f16 or bf16, FP8 by one scale, to nearest, of whole tiles of 64 x 128 that wait as
///   E4M3 in groups of 16 columns or more with FP32 scales, on Hopper; and INT8 in blocks of 128, of whole blocks of INT8 in
///   such blocks, on CUDA's sm_80 and later.
///
/// To the bit, the result is that of [`quantize`](crate::quantize::quantize()).
///
/// # Errors
///
/// As both.
pub fn quantize_gelu<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let x = x.into();
    x.check(client, OPERATION, "x")?;
    match launch(client, x, None, spec)? {
        Some(quantized) => Ok(quantized),
        None => quantize(client, &gelu(client, x)?, spec),
    }
}

/// The gradient of `x` of [`gelu_backward`](super::gelu_backward()), quantized as [`quantize_gelu`] does the output.
///
/// - `x`: `[rows, cols]`, as there.
/// - `gradient`: that of the output, of the shape and type of `x`, contiguous.
/// - `spec`: as there.
///
/// # Errors
///
/// As `gelu_backward` and `quantize`.
pub fn quantize_gelu_gradient<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gradient: &TensorHandle<R>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let x = x.into();
    let inputs = [("x", x), ("gradient", gradient.into())];
    check_alike(client, OPERATION_OF_GRADIENT, &inputs)?;
    match launch(client, x, Some(gradient), spec)? {
        Some(quantized) => Ok(quantized),
        None => quantize(client, &gelu_backward(client, x, gradient)?, spec),
    }
}

/// `None` where there is no kernel, or something that it does not read. What comes was checked.
fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: OperatorInput<R>,
    gradient: Option<&TensorHandle<R>>,
    spec: &QuantizeSpec,
) -> Result<Option<Quantized<R>>, KernelError> {
    let OperatorInput::Quantized(matrix, dtype) = x else {
        return Ok(None);
    };
    let Some(values) = &matrix.values else {
        return Ok(None);
    };
    let codes = Codes {
        matrix,
        values,
        view: MatrixView::new(OPERATION, values)?,
        dtype,
        gradient,
    };
    let by_matrix = codes.by_matrix(client, spec);
    Ok(by_matrix.or_else(|| codes.in_blocks(client, spec)))
}

/// What the kernels read.
struct Codes<'a, R: Runtime> {
    matrix: &'a Quantized<R>,
    /// Its row-major copy, and the view of that.
    values: &'a TensorHandle<R>,
    view: MatrixView,
    /// The type of the elements that the numbers stand for.
    dtype: StorageType,
    gradient: Option<&'a TensorHandle<R>>,
}

impl<'a, R: Runtime> Codes<'a, R> {
    /// The tensors, as kernels take them.
    fn inputs(&self) -> Vec<&'a TensorHandle<R>> {
        let mut inputs = vec![self.values, &self.matrix.scales];
        inputs.extend(self.gradient);
        inputs
    }

    fn allocate(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Quantized<R> {
        match self.gradient {
            Some(_) => allocate_gradient(client, &self.view, spec),
            None => allocate(client, &self.view, spec),
        }
    }

    fn by_matrix(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let floats: Vec<_> = self.gradient.into_iter().collect();
        let group = group_of(self.matrix, &self.view)?;
        let (tiles, of_tile) = fits(client, self.dtype, &floats, &self.view, spec)?;
        if !is_operand_type(self.dtype) {
            return None;
        }
        let source = ByMatrix {
            of_tile,
            group,
            gradient: self.gradient.is_some(),
        };
        let output = self.allocate(client, spec);
        let (inputs, cubes) = (self.inputs(), cubes(client, tiles, false, TAKING));
        // SAFETY: the kernel reads these, of whole tiles, and the output was allocated for them; there is no delayed
        // maximum.
        #[allow(unsafe_code)]
        unsafe {
            let numbers = numbers::<R>(&self.view, None);
            launch_one(client, source, cubes, &inputs, &output, &numbers, None);
        }
        Some(output)
    }

    fn in_blocks(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let view = &self.view;
        let (OfScale::Tile, _) = OfScale::of(self.matrix, view)? else {
            return None;
        };
        let (dtype, bytes) = (self.dtype, ByBlocks::BYTES);
        let (of_tile, key) = TileKnobs::of(client, dtype, view, spec, bytes, MOST_CUBES)?;
        let is_read =
            |gradient: &TensorHandle<R>| read_width_up_to(VECTOR, gradient, view) == VECTOR;
        if view.shape.num_elements() == 0 || !self.gradient.is_none_or(is_read) {
            return None;
        }
        let source = ByBlocks {
            of_tile,
            gradient: self.gradient.is_some(),
        };
        let output = self.allocate(client, spec);
        // SAFETY: the kernel reads these, of whole tiles, and the output was allocated for them.
        #[allow(unsafe_code)]
        unsafe {
            launch_of_codes(client, source, &self.inputs(), view, key, &output);
        }
        Some(output)
    }
}

/// `matrix_scale.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ByMatrix {
    of_tile: Knobs,
    /// Elements of a scale of x.
    group: usize,
    gradient: bool,
}

impl CudaSource for ByMatrix {
    type Numbers = MatrixNumbers;

    const TEXT: &'static str = around_tile!("arithmetic.cu", "matrix_scale.cu");
    const ENTRY_POINT: &'static str = "quantize_gelu_by_matrix";

    fn knobs(&self) -> String {
        format!(
            "{}\n#define CODES {}\n#define GRADIENT {}",
            self.of_tile.text(),
            self.group,
            u8::from(self.gradient),
        )
    }

    /// That of the gradient with that of the output.
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        if self.gradient {
            return vec![];
        }
        let gradient = Self {
            of_tile: self.of_tile.of_gradient(),
            gradient: true,
            ..*self
        };
        vec![gradient.text()]
    }
}

/// `block.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ByBlocks {
    of_tile: TileKnobs,
    gradient: bool,
}

impl ByBlocks {
    /// Of shared memory: a tile of 16-bit elements, and its transposed copy.
    const BYTES: usize = 3 * TILE * TILE;
}

impl CudaSource for ByBlocks {
    type Numbers = CodesNumbers;

    const TEXT: &'static str = around_block_tile!("arithmetic.cu", "block.cu");
    const ENTRY_POINT: &'static str = "quantize_gelu_by_blocks";

    fn knobs(&self) -> String {
        format!(
            "{}\n{}\n#define GRADIENT {}",
            self.of_tile.text(),
            OfScale::text(Some(OfScale::Tile)),
            u8::from(self.gradient),
        )
    }

    fn shared_memory(&self) -> usize {
        Self::BYTES
    }

    /// That of the gradient with that of the output.
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        if self.gradient {
            return vec![];
        }
        let gradient = Self {
            of_tile: TileKnobs {
                row_major: Some(Round::Stochastic),
                transposed: Some(Round::Stochastic),
                ..self.of_tile
            },
            gradient: true,
        };
        vec![gradient.text()]
    }
}
