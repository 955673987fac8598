//! Buffers of quantized matrices: one allocation for the tensors that live as long as each other.
//!
//! An allocation costs the host as much as a small launch, and a quantization writes up to six tensors. The memory of
//! an allocation is free again only when the last of its tensors is dropped, so tensors of different lifetimes stay
//! apart. Two copies in 8 bits that live as long as each other have one to themselves: it is as large as the matrix in
//! 16 bits, and where an allocation is kept for the next one of its size, both take turns.

use cubecl::{
    ir::StorageType, prelude::*, server::MemoryLayoutDescriptor, std::tensor::TensorHandle,
};

use crate::{
    device::{MatrixView, storage},
    fallback::FallbackResidual,
    granularity::Granularity,
    layout::Layout,
    shape::MatrixShape,
};

use super::{QuantizeSpec, Quantized};

/// Shape and element type of a tensor, if there is one.
type Part = Option<(Vec<usize>, StorageType)>;

/// The output buffers of a quantization of `view`: one allocation, or where there are two copies of the values, either of
/// which may be wanted for one product only, one for each of them and one for the scales.
pub(crate) fn allocate<R: Runtime>(
    client: &ComputeClient<R>,
    view: &MatrixView,
    spec: &QuantizeSpec,
) -> Quantized<R> {
    let [values, transposed, scales] = parts(view, spec);
    let of_matrices = spec.scale.has_tensor_scale();
    let tensor_scale = of_matrices.then(|| (vec![view.shape.batch], storage::<f32>()));
    let [values, transposed, scales, tensor_scale] = match (values, transposed) {
        (Some(values), Some(transposed)) => {
            let [scales, tensor_scale] = together(client, [scales, tensor_scale]);
            let [values] = together(client, [Some(values)]);
            let [transposed] = together(client, [Some(transposed)]);
            [values, transposed, scales, tensor_scale]
        }
        (values, transposed) => together(client, [values, transposed, scales, tensor_scale]),
    };
    Quantized {
        tensor_scale,
        ..quantized(view, spec, values, transposed, scales)
    }
}

/// The output buffers of a quantization of a gradient, by a spec without scales of matrices: one backward pass reads its
/// copies, one after the other, so they have an allocation, and the scales another one.
pub(crate) fn allocate_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    view: &MatrixView,
    spec: &QuantizeSpec,
) -> Quantized<R> {
    debug_assert!(
        !spec.scale.has_tensor_scale(),
        "scales of gradients stand alone"
    );
    let [values, transposed, scales] = parts(view, spec);
    let [values, transposed] = together(client, [values, transposed]);
    let [scales] = together(client, [scales]);
    quantized(view, spec, values, transposed, scales)
}

/// The output buffers of the INT8 blocks of `view`, and those of their residuals if blocks may fall back.
///
/// One allocation has all of it, but where there is a transposed copy, which lives until the backward pass, and its
/// scales with it: those then have another one, with all that is small, and the values that the forward product reads the
/// first to themselves.
pub(crate) fn allocate_input<R: Runtime>(
    client: &ComputeClient<R>,
    view: &MatrixView,
    block: usize,
    layout: Layout,
    falls_back: bool,
) -> (Quantized<R>, Option<FallbackResidual<R>>) {
    let spec = QuantizeSpec::int8(Granularity::Block(block)).with_layout(layout);
    let [values, transposed, scales] = parts(view, &spec);
    let blocks = spec.granularity.scales_shape(view.shape);
    let residual = |shape: MatrixShape, dtype| {
        falls_back.then(|| (view.tensor_shape(shape.rows, shape.cols), dtype))
    };
    let rest = residual(view.shape, storage::<i8>());
    let rest_scales = residual(blocks, storage::<f32>());
    let flags = residual(blocks, storage::<u32>());
    let [values, rest, transposed, scales, rest_scales, flags] = if layout.transposed() {
        let [values, rest] = together(client, [values, rest]);
        let [transposed, scales, rest_scales, flags] =
            together(client, [transposed, scales, rest_scales, flags]);
        [values, rest, transposed, scales, rest_scales, flags]
    } else {
        together(
            client,
            [values, rest, transposed, scales, rest_scales, flags],
        )
    };
    let residual = match (rest, rest_scales, flags) {
        (Some(values), Some(scales), Some(flags)) => Some(FallbackResidual {
            values,
            scales,
            flags,
            block,
        }),
        _ => None,
    };
    (quantized(view, &spec, values, transposed, scales), residual)
}

/// Values, transposed values and scales.
fn parts(view: &MatrixView, spec: &QuantizeSpec) -> [Part; 3] {
    let MatrixShape { rows, cols, .. } = view.shape;
    let stored = spec.number.storage();
    let copy = |rows, cols| {
        (
            view.tensor_shape(rows, stored.stored_cols(cols)),
            stored.dtype(),
        )
    };
    let scales = spec.granularity.scales_shape(view.shape);
    [
        spec.layout.row_major().then(|| copy(rows, cols)),
        spec.layout.transposed().then(|| copy(cols, rows)),
        Some((
            view.tensor_shape(scales.rows, scales.cols),
            spec.scale.dtype(),
        )),
    ]
}

fn quantized<R: Runtime>(
    view: &MatrixView,
    spec: &QuantizeSpec,
    values: Option<TensorHandle<R>>,
    transposed: Option<TensorHandle<R>>,
    scales: Option<TensorHandle<R>>,
) -> Quantized<R> {
    Quantized {
        values,
        transposed,
        scales: scales.expect("every quantized matrix has scales"),
        tensor_scale: None,
        number: spec.number,
        scale: spec.scale,
        granularity: spec.granularity,
        shape: view.shape,
        batched: view.batched,
    }
}

/// New contiguous tensors of one allocation, their contents undefined, each aligned as CubeCL aligns an allocation.
fn together<R: Runtime, const N: usize>(
    client: &ComputeClient<R>,
    parts: [Part; N],
) -> [Option<TensorHandle<R>>; N] {
    let layouts = parts.iter().flatten().map(|(shape, dtype)| {
        // A buffer of zero bytes cannot be bound; an empty tensor keeps one element that nobody reads.
        let elements = shape.iter().product::<usize>().max(1);
        MemoryLayoutDescriptor::contiguous([elements].into(), dtype.size())
    });
    let layouts: Vec<_> = layouts.collect();
    if layouts.is_empty() {
        return [const { None }; N];
    }
    let mut layouts = client.empty_tensors(layouts).into_iter();
    parts.map(|part| {
        let (shape, dtype) = part?;
        let handle = layouts.next()?.memory;
        Some(TensorHandle::new_contiguous(shape, handle, dtype))
    })
}
