//! GELU and its gradient, quantized to FP8 by one scale as they are computed from what flows: a kernel of CUDA source,
//! `matrix_scale.cu`, around the tile of [`matrix_scale`](mod@crate::quantize::matrix_scale).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::source::{CudaSource, SourceText},
    device::{MatrixView, is_operand_type},
    error::KernelError,
    operator_input::{OperatorInput, check_alike},
    quantize::{
        QuantizeSpec, Quantized,
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

/// The output of [`gelu`](super::gelu()), quantized: in one launch, without the output in memory, where a kernel has the
/// spec.
///
/// - `x`: `[rows, cols]`, as there.
/// - `spec`: a kernel has FP8 by one scale, to nearest, of whole tiles of 64 x 128 elements of f16 or bf16 that wait as
///   E4M3 in groups of 16 columns or more with FP32 scales, on Hopper.
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
    let view = MatrixView::new(OPERATION, values)?;
    let floats: Vec<_> = gradient.into_iter().collect();
    let (Some(group), Some((tiles, of_tile)), true) = (
        group_of(matrix, &view),
        fits(client, dtype, &floats, &view, spec),
        is_operand_type(dtype),
    ) else {
        return Ok(None);
    };
    let source = ByMatrix {
        of_tile,
        group,
        gradient: gradient.is_some(),
    };
    let output = match gradient {
        Some(_) => allocate_gradient(client, &view, spec),
        None => allocate(client, &view, spec),
    };
    let mut inputs = vec![values, &matrix.scales];
    inputs.extend(gradient);
    let cubes = cubes(client, tiles, false, TAKING);
    // SAFETY: the kernel reads these, of whole tiles, and the output was allocated for them; there is no delayed maximum.
    #[allow(unsafe_code)]
    unsafe {
        let numbers = numbers::<R>(&view, None);
        launch_one(client, source, cubes, &inputs, &output, &numbers, None);
    }
    Ok(Some(output))
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

    const TEXT: &'static str = around_tile!("matrix_scale.cu");
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
