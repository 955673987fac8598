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
            whole_tiles::{
                CodesNumbers, OfScale, TileKnobs, around_block_tile, launch_of_codes, tile_bytes,
            },
        },
        buffers::{allocate, allocate_gradient},
        matrix_scale::{
            Knobs, MatrixNumbers, around_tile, cubes, fits, group_of, launch_one, numbers,
        },
        quantize,
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
/// - `gradient`: that of the output, of the shape and type of `x`, as `gelu_backward` takes it.
/// - `spec`: as there. Of a gradient in numbers a kernel has INT8 in blocks of 128 for such blocks.
///
/// # Errors
///
/// As `gelu_backward` and `quantize`.
pub fn quantize_gelu_gradient<'a, R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Into<OperatorInput<'a, R>>,
    gradient: impl Into<OperatorInput<'a, R>>,
    spec: &QuantizeSpec,
) -> Result<Quantized<R>, KernelError> {
    let (x, gradient) = (x.into(), gradient.into());
    let inputs = [("x", x), ("gradient", gradient)];
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
    gradient: Option<OperatorInput<R>>,
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
    gradient: Option<OperatorInput<'a, R>>,
}

impl<'a, R: Runtime> Codes<'a, R> {
    /// The tensors as kernels take them, and whether the gradient is codes; `None` where the gradient is such that none
    /// reads it.
    fn inputs(&self) -> Option<(Vec<&'a TensorHandle<R>>, bool)> {
        let mut inputs = vec![self.values, &self.matrix.scales];
        let has_codes = match self.gradient {
            None => false,
            Some(OperatorInput::Floats(tensor)) => {
                if read_width_up_to(VECTOR, tensor, &self.view) != VECTOR {
                    return None;
                }
                inputs.push(tensor);
                false
            }
            Some(OperatorInput::Quantized(matrix, _)) => {
                inputs.extend([OfScale::tile(matrix, &self.view)?, &matrix.scales]);
                true
            }
        };
        Some((inputs, has_codes))
    }

    fn allocate(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Quantized<R> {
        match self.gradient {
            Some(_) => allocate_gradient(client, &self.view, spec),
            None => allocate(client, &self.view, spec),
        }
    }

    fn by_matrix(&self, client: &ComputeClient<R>, spec: &QuantizeSpec) -> Option<Quantized<R>> {
        let (inputs, false) = self.inputs()? else {
            return None;
        };
        let group = group_of(self.matrix, &self.view)?;
        let (tiles, of_tile) = fits(client, self.dtype, &[], &self.view, spec)?;
        if !is_operand_type(self.dtype) {
            return None;
        }
        let source = ByMatrix {
            of_tile,
            group,
            gradient: self.gradient.is_some(),
        };
        let output = self.allocate(client, spec);
        let cubes = cubes(client, tiles, false, TAKING);
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
        OfScale::tile(self.matrix, view)?;
        let (inputs, has_codes) = self.inputs()?;
        let (dtype, bytes) = (self.dtype, tile_bytes(self.dtype));
        let (of_tile, key) = TileKnobs::of(client, dtype, view, spec, bytes, MOST_CUBES)?;
        if view.shape.num_elements() == 0 {
            return None;
        }
        let source = ByBlocks {
            of_tile,
            gradient: self.gradient.map(|_| has_codes),
        };
        let output = self.allocate(client, spec);
        // SAFETY: the kernel reads these, of whole tiles, and the output was allocated for them.
        #[allow(unsafe_code)]
        unsafe {
            launch_of_codes(client, source, &inputs, view, key, &output);
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
    /// Of the gradient, whether that of the output is codes too.
    gradient: Option<bool>,
}

impl CudaSource for ByBlocks {
    type Numbers = CodesNumbers;

    const TEXT: &'static str = around_block_tile!("arithmetic.cu", "block.cu");
    const ENTRY_POINT: &'static str = "quantize_gelu_by_blocks";

    fn knobs(&self) -> String {
        format!(
            "{}\n{}\n#define GRADIENT {}\n#define GRADIENT_CODES {}",
            self.of_tile.text(),
            OfScale::text(Some(OfScale::Tile)),
            u8::from(self.gradient.is_some()),
            u8::from(self.gradient == Some(true)),
        )
    }

    fn shared_memory(&self) -> usize {
        tile_bytes(self.of_tile.dtype)
    }

    /// That of the gradient with that of the output.
    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        if self.gradient.is_some() {
            return vec![];
        }
        // What flows as codes has gradients that flow so too.
        let gradient = Self {
            of_tile: TileKnobs {
                row_major: Some(Round::Stochastic),
                transposed: Some(Round::Stochastic),
                ..self.of_tile
            },
            gradient: Some(true),
        };
        vec![gradient.text()]
    }
}
