//! SwiGLU and its gradients, quantized to FP8 by delayed scaling as they are computed: kernels of CUDA source,
//! `delayed.cu` and `delayed_gradients.cu`, around the tile of
//! [`quantize_delayed`](crate::quantize::quantize_delayed).

use cubecl::{prelude::*, std::tensor::TensorHandle};

use crate::{
    cuda::{
        counters::counters,
        numbers::numbers,
        source::{CudaSource, SourceText, launch_source},
    },
    device::{MatrixView, empty, is_operand_type, storage},
    quantize::{
        DelayedMaximum, QuantizeSpec,
        buffers::allocate_gradient,
        delayed::whole_tiles::{DelayedNumbers, Knobs, copies, cubes, fits, one_output},
    },
};

use super::quantized_gradients::WithMaximum;

/// Does what [`quantize_delayed`](crate::quantize::quantize_delayed) does with `silu(gate) up`, if the device has the
/// kernels for that. `view` is that of both, which are contiguous and of one shape and type; the maximum was checked.
pub(crate) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    [gate, up]: [&TensorHandle<R>; 2],
    view: &MatrixView,
    spec: &QuantizeSpec,
    delayed: DelayedMaximum<R>,
) -> Option<WithMaximum<R>> {
    let inputs = [gate, up];
    let (tiles, knobs) = fits_16_bits(client, &inputs, view, spec)?;
    // SAFETY: the kernel reads both, and the caller has checked the maximum.
    #[allow(unsafe_code)]
    let quantized =
        unsafe { one_output(client, Encode(knobs), tiles, &inputs, view, spec, delayed) };
    Some(quantized)
}

/// Does what [`quantize_delayed`](crate::quantize::quantize_delayed) does with the gradients of gate and of up, by the
/// maximum of each, if the device has the kernels for that. `view` is that of the inputs: gate, up and the gradient of
/// the output, which are contiguous and of one shape and type; the maxima were checked.
pub(crate) fn launch_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: [&TensorHandle<R>; 3],
    view: &MatrixView,
    spec: &QuantizeSpec,
    delayed: [DelayedMaximum<R>; 2],
) -> Option<[WithMaximum<R>; 2]> {
    let (tiles, knobs) = fits_16_bits(client, &inputs, view, spec)?;
    let outputs = [(); 2].map(|()| allocate_gradient(client, view, spec));
    let [of_gate, of_up] = [(); 2].map(|()| empty(client, vec![1], storage::<f32>()));
    let mut buffers = inputs.map(TensorHandle::clone).to_vec();
    buffers.extend(delayed.map(|it| it.maxima.clone()));
    for output in &outputs {
        buffers.extend(copies(output, inputs[0]));
    }
    for (output, absmax) in outputs.iter().zip([&of_gate, &of_up]) {
        buffers.extend([output.scales.clone(), absmax.clone()]);
    }
    buffers.push(counters(client));
    let numbers = GradientNumbers {
        rows: view.shape.rows as u64,
        cols: view.shape.cols as u64,
        layer: delayed[0].layer as u64,
        up_layer: delayed[1].layer as u64,
    };
    // SAFETY: the cubes are the tiles of the inputs, none of which reaches over an edge; the outputs were allocated for
    // them, and the layers were checked. A copy that is not wanted is not touched.
    #[allow(unsafe_code)]
    unsafe {
        let source = EncodeGradients(knobs);
        launch_source(client, source, cubes(tiles), Vec::new(), buffers, &numbers);
    }
    let [gate, up] = outputs;
    Some([(gate, of_gate), (up, of_up)])
}

/// [`fits`], for the kernels' 16-bit elements.
fn fits_16_bits<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: &[&TensorHandle<R>],
    view: &MatrixView,
    spec: &QuantizeSpec,
) -> Option<([usize; 2], Knobs)> {
    fits(client, inputs, view, spec).filter(|_| is_operand_type(inputs[0].dtype))
}

numbers! {
    /// The numbers of `delayed_gradients.cu`.
    struct GradientNumbers {
        /// Of a matrix, multiples of those of a tile.
        rows: u64,
        cols: u64,
        /// The layer of the gate among its delayed maxima, and that of up among its own.
        layer: u64,
        up_layer: u64,
    }
}

/// `delayed.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Encode(Knobs);

impl CudaSource for Encode {
    type Numbers = DelayedNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/patch.cu"),
        "\n",
        include_str!("../quantize/delayed/tile.cu"),
        "\n",
        include_str!("arithmetic.cu"),
        "\n",
        include_str!("delayed.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_swiglu_delayed";
    const UNITS: u32 = 256;

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

/// `delayed_gradients.cu` behind the texts that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct EncodeGradients(Knobs);

impl CudaSource for EncodeGradients {
    type Numbers = GradientNumbers;

    const TEXT: &'static str = concat!(
        include_str!("../quantize/patch.cu"),
        "\n",
        include_str!("../quantize/delayed/tile.cu"),
        "\n",
        include_str!("arithmetic.cu"),
        "\n",
        include_str!("delayed_gradients.cu")
    );
    const ENTRY_POINT: &'static str = "quantize_swiglu_gradients_delayed";
    const UNITS: u32 = 256;

    fn knobs(&self) -> String {
        self.0.text()
    }
}
