//! SwiGLU and its gradients, quantized to FP8 by one scale for each matrix as they are computed, by delayed or by current
//! scaling: kernels of CUDA source, `matrix_scale.cu` and `matrix_scale_gradients.cu`, around the tile of
//! [`matrix_scale`](mod@crate::quantize::matrix_scale).

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        counters::counters,
        numbers::numbers,
        source::{CudaSource, SourceText, launch_source},
    },
    device::{MatrixView, empty, is_operand_type, storage},
    operator_input::OperatorInput,
    quantize::{
        DelayedMaximum, QuantizeSpec, Quantized,
        buffers::{allocate, allocate_gradient},
        matrix_scale::{
            Knobs, MatrixNumbers, around_tile, copies, cubes, fits, group_of, launch_one, numbers,
        },
    },
};

/// Cubes of a multiprocessor that take tiles by turns: where little is computed, one more hides what another waits for;
/// where much is, it would leave too few registers.
const TAKING_OUTPUT: usize = 4;
const TAKING_GRADIENTS: usize = 3;

/// Does what [`quantize_delayed`](crate::quantize::quantize_delayed) does with `silu(gate) up`, or without a maximum what
/// [`quantize`](crate::quantize::quantize()) does, if the device has the kernels for that. Gives the largest magnitude,
/// f32 `[1]`, where there was a maximum. `view` is that of both, of one shape and type, floats contiguous, numbers as
/// [`OperatorInput::prepare`] accepts them; the maximum was checked.
pub(crate) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<R>; 2],
    view: &MatrixView,
    spec: &QuantizeSpec,
    delayed: Option<DelayedMaximum<R>>,
) -> Option<(Quantized<R>, Option<TensorHandle<R>>)> {
    let dtype = factors[0].dtype();
    let factors = Factors::of(factors, view)?;
    let (tiles, knobs) = factors.fits(client, dtype, &[], view, spec)?;
    let source = Encode(knobs.with_history(delayed.is_some()));
    let output = allocate(client, view, spec);
    // SAFETY: the kernel reads both factors, for which the output was allocated, and the caller has checked the maximum.
    #[allow(unsafe_code)]
    let absmax = unsafe {
        let (inputs, numbers) = (factors.tensors(), numbers(view, delayed));
        let cubes = cubes(client, tiles, delayed.is_some(), TAKING_OUTPUT);
        launch_one(client, source, cubes, &inputs, &output, &numbers, delayed)
    };
    Some((output, absmax))
}

/// Quantized gradients of gate and of up, and where there were delayed maxima their own, f32 `[1]`.
pub(super) struct Gradients<R: Runtime> {
    pub matrices: [Quantized<R>; 2],
    pub maxima: Option<[TensorHandle<R>; 2]>,
}

/// Does what [`quantize_delayed`](crate::quantize::quantize_delayed) does with the gradients of gate and of up, by the
/// maximum of each, or without maxima what [`quantize`](crate::quantize::quantize()) does, if the device has the kernels
/// for that. `view` is that of gate, up and the gradient of the output, of one shape and type, floats contiguous,
/// numbers as [`OperatorInput::prepare`] accepts them; the maxima were checked.
pub(super) fn launch_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    factors: [OperatorInput<R>; 2],
    gradient: &TensorHandle<R>,
    view: &MatrixView,
    spec: &QuantizeSpec,
    delayed: Option<[DelayedMaximum<R>; 2]>,
) -> Option<Gradients<R>> {
    let factors = Factors::of(factors, view)?;
    let (tiles, knobs) = factors.fits(client, gradient.dtype, &[gradient], view, spec)?;
    let matrices = [(); 2].map(|()| allocate_gradient(client, view, spec));
    let maxima = delayed.map(|_| [(); 2].map(|()| empty(client, vec![1], storage::<f32>())));
    let mut buffers: Vec<_> = factors.tensors().into_iter().cloned().collect();
    buffers.push(gradient.clone());
    buffers.extend(delayed.iter().flatten().map(|it| it.maxima.clone()));
    for matrix in &matrices {
        buffers.extend(copies(matrix, gradient));
    }
    for (index, matrix) in matrices.iter().enumerate() {
        buffers.push(matrix.scales.clone());
        buffers.extend(maxima.as_ref().map(|maxima| maxima[index].clone()));
    }
    buffers.push(counters(client));
    let [layer, up_layer] = delayed.map_or([0; 2], |it| it.map(|it| it.layer as u64));
    let numbers = GradientNumbers {
        rows: view.shape.rows as u64,
        cols: view.shape.cols as u64,
        layer,
        up_layer,
    };
    let cubes = cubes(client, tiles, delayed.is_some(), TAKING_GRADIENTS);
    let source = EncodeGradients(knobs.with_history(delayed.is_some()));
    // SAFETY: the cubes are the tiles of the inputs, or take them, and none reaches over an edge; the outputs were
    // allocated for them, and the layers were checked. A copy that is not wanted is not touched.
    #[allow(unsafe_code)]
    unsafe {
        launch_source(client, source, cubes, Vec::new(), buffers, &numbers);
    }
    Some(Gradients { matrices, maxima })
}

/// Gate and up as the kernel reads them.
struct Factors<'a, R: Runtime> {
    values: [&'a TensorHandle<R>; 2],
    /// Where the values are codes.
    codes: Option<Codes<'a, R>>,
}

/// E4M3 in groups along the rows, with FP32 scales.
struct Codes<'a, R: Runtime> {
    scales: [&'a TensorHandle<R>; 2],
    group: usize,
}

impl<'a, R: Runtime> Factors<'a, R> {
    /// `None` where they are numbers that the kernel does not read.
    fn of(factors: [OperatorInput<'a, R>; 2], view: &MatrixView) -> Option<Self> {
        match factors {
            [OperatorInput::Floats(gate), OperatorInput::Floats(up)] => Some(Self {
                values: [gate, up],
                codes: None,
            }),
            [
                OperatorInput::Quantized(gate, _),
                OperatorInput::Quantized(up, _),
            ] => {
                let group = group_of(gate, view).filter(|_| gate.granularity == up.granularity)?;
                group_of(up, view)?;
                Some(Self {
                    values: [gate.values.as_ref()?, up.values.as_ref()?],
                    codes: Some(Codes {
                        scales: [&gate.scales, &up.scales],
                        group,
                    }),
                })
            }
            _ => None,
        }
    }

    /// The tensors in the order in which kernels take them.
    fn tensors(&self) -> Vec<&'a TensorHandle<R>> {
        let scales = self.codes.iter().flat_map(|codes| codes.scales);
        self.values.into_iter().chain(scales).collect()
    }

    /// [`fits`] of elements of 16 bits, for these and `others`.
    fn fits(
        &self,
        client: &ComputeClient<R>,
        dtype: StorageType,
        others: &[&TensorHandle<R>],
        view: &MatrixView,
        spec: &QuantizeSpec,
    ) -> Option<([usize; 2], SwigluKnobs)> {
        let mut floats = others.to_vec();
        if self.codes.is_none() {
            floats.extend(self.values);
        }
        let (tiles, of_tile) = fits(client, dtype, &floats, view, spec)?;
        let knobs = SwigluKnobs {
            of_tile,
            group: self.codes.as_ref().map_or(0, |codes| codes.group),
        };
        is_operand_type(dtype).then_some((tiles, knobs))
    }
}

numbers! {
    /// The numbers of `matrix_scale_gradients.cu`.
    struct GradientNumbers {
        /// Of a matrix, multiples of those of a tile.
        rows: u64,
        cols: u64,
        /// The layer of the gate among its delayed maxima, and that of up among its own, where there are some.
        layer: u64,
        up_layer: u64,
    }
}

/// What both kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SwigluKnobs {
    of_tile: Knobs,
    /// Elements of a scale of gate and up, where these are codes; 0 for floats.
    group: usize,
}

impl SwigluKnobs {
    /// The same by delayed scaling, or not.
    fn with_history(self, delayed: bool) -> Self {
        Self {
            of_tile: self.of_tile.with_history(delayed),
            ..self
        }
    }

    /// Those of the gradients of such factors.
    fn of_gradient(self) -> Self {
        Self {
            of_tile: self.of_tile.of_gradient(),
            ..self
        }
    }

    /// The lines that define them.
    fn text(&self) -> String {
        format!("{}\n#define CODES {}", self.of_tile.text(), self.group)
    }
}

/// `matrix_scale.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Encode(SwigluKnobs);

impl CudaSource for Encode {
    type Numbers = MatrixNumbers;

    const TEXT: &'static str = around_tile!("arithmetic.cu", "factors.cu", "matrix_scale.cu");
    const ENTRY_POINT: &'static str = "quantize_swiglu_by_matrix";

    fn knobs(&self) -> String {
        self.0.text()
    }

    fn companions<R: Runtime>(
        &self,
        _client: &ComputeClient<R>,
        _sizes: [usize; 4],
    ) -> Vec<SourceText> {
        vec![EncodeGradients(self.0.of_gradient()).text()]
    }
}

/// `matrix_scale_gradients.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct EncodeGradients(SwigluKnobs);

impl CudaSource for EncodeGradients {
    type Numbers = GradientNumbers;

    const TEXT: &'static str =
        around_tile!("arithmetic.cu", "factors.cu", "matrix_scale_gradients.cu");
    const ENTRY_POINT: &'static str = "quantize_swiglu_gradients_by_matrix";

    fn knobs(&self) -> String {
        self.0.text()
    }
}
