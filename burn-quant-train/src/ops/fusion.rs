//! The quantized operations in a fused stream: each is one custom operation, run by the backend under `Fusion`.
//!
//! They are functional: state goes in and comes out as tensors, so the stream sees every dependency. A kernel that updates a buffer in
//! place is registered as the maker of the tensor that comes out.

use std::{fmt::Debug, sync::Arc};

use burn_backend::{
    DType, FloatDType, Shape, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::{
    Fusion, FusionBackend, FusionTensor,
    stream::{Operation, OperationStreams},
};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use cubecl_kernels::shape::MatrixShape;

use super::{FallbackQuantized, Layout, Operand, QuantOps, Quantized, Residual, StochasticKey};
use crate::{
    layer::{DelayThreshold, FallbackState},
    recipe::{Cast, Format},
};

type Tensor<B> = FusionTensor<<B as FusionBackend>::FusionRuntime>;
type Handles<B> = HandleContainer<<B as burn_ir::BackendIr>::Handle>;
type Execute<B> = dyn Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync;

/// A custom operation of the stream and what runs it.
struct Custom<B: FusionBackend> {
    ir: CustomOpIr,
    execute: Arc<Execute<B>>,
}

impl<B: FusionBackend> Debug for Custom<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.ir.id)
    }
}

impl<B: FusionBackend> Operation<B::FusionRuntime> for Custom<B> {
    fn execute(&self, handles: &mut Handles<B>) {
        (self.execute)(&self.ir, handles);
    }
}

/// Registers an operation on `inputs` with outputs of the given shapes and dtypes.
fn register<B: FusionBackend>(
    id: &'static str,
    inputs: Vec<Tensor<B>>,
    outputs: &[(Shape, DType)],
    execute: impl Fn(&CustomOpIr, &mut Handles<B>) + Send + Sync + 'static,
) -> std::vec::IntoIter<Tensor<B>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(inputs.iter());
    let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let outputs: Vec<TensorIr> = outputs
        .iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape.clone(), *dtype))
        .collect();
    let ir = CustomOpIr::new(id, &inputs, &outputs);
    let operation = Custom::<B> {
        ir: ir.clone(),
        execute: Arc::new(execute),
    };
    client
        .register(streams, OperationIr::Custom(ir), operation)
        .into_iter()
}

/// A quantized matrix without its tensors.
#[derive(Clone, Copy)]
struct Form {
    shape: [usize; 2],
    cast: Cast,
    values: bool,
    transposed: bool,
}

impl Form {
    fn of<B: FusionBackend>(matrix: &Quantized<Fusion<B>>) -> Self {
        Self {
            shape: matrix.shape,
            cast: matrix.cast,
            values: matrix.values.is_some(),
            transposed: matrix.transposed.is_some(),
        }
    }

    fn new(shape: [usize; 2], cast: Cast, layout: Layout) -> Self {
        Self {
            shape,
            cast,
            values: layout.row_major(),
            transposed: layout.transposed(),
        }
    }

    fn scales(&self) -> Shape {
        let [rows, cols] = self.shape;
        let scales = self
            .cast
            .granularity
            .scales_shape(MatrixShape::new(rows, cols));
        Shape::new([scales.rows, scales.cols])
    }

    /// Shapes and dtypes of the tensors: scales, then the copies that are there.
    fn tensors(&self) -> Vec<(Shape, DType)> {
        let [rows, cols] = self.shape;
        let (width, dtype) = match self.cast.format {
            Format::Int10 => (5 * cols.div_ceil(16), DType::U32),
            _ => (cols, DType::I8),
        };
        let values = self.values.then(|| (Shape::new([rows, width]), dtype));
        let transposed = self.transposed.then(|| (Shape::new([width, rows]), dtype));
        [Some((self.scales(), DType::F32)), values, transposed]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Reassembles a matrix of the fused backend from its tensors, in the order of [`tensors`](Self::tensors).
    fn fused<B: FusionBackend>(
        &self,
        tensors: &mut impl Iterator<Item = Tensor<B>>,
    ) -> Quantized<Fusion<B>> {
        let mut next = || {
            tensors
                .next()
                .expect("an operation has the outputs that it was registered with")
        };
        let scales = next();
        Quantized {
            shape: self.shape,
            cast: self.cast,
            values: self.values.then(&mut next),
            transposed: self.transposed.then(&mut next),
            scales,
        }
    }

    /// Takes a matrix of the inner backend from the stream's handles.
    fn take<B: FusionBackend>(
        &self,
        inputs: &mut std::slice::Iter<'_, TensorIr>,
        handles: &mut Handles<B>,
    ) -> Quantized<B> {
        let mut next = || {
            inputs
                .next()
                .expect("an operation has the inputs that it was registered with")
        };
        let scales = handles.get_float_tensor::<B>(next());
        Quantized {
            shape: self.shape,
            cast: self.cast,
            values: self.values.then(|| handles.get_int_tensor::<B>(next())),
            transposed: self.transposed.then(|| handles.get_int_tensor::<B>(next())),
            scales,
        }
    }
}

/// The tensors of a matrix, in the order of [`Form::tensors`].
fn tensors<B: FusionBackend>(matrix: &Quantized<Fusion<B>>) -> impl Iterator<Item = Tensor<B>> {
    let Quantized {
        values,
        transposed,
        scales,
        ..
    } = matrix;
    [Some(scales.clone()), values.clone(), transposed.clone()]
        .into_iter()
        .flatten()
}

/// Gives a matrix of the inner backend to the stream's handles.
fn give<B: FusionBackend>(
    matrix: Quantized<B>,
    outputs: &mut std::slice::Iter<'_, TensorIr>,
    handles: &mut Handles<B>,
) {
    let mut next = || {
        &outputs
            .next()
            .expect("an operation has the outputs that it was registered with")
            .id
    };
    handles.register_float_tensor::<B>(next(), matrix.scales);
    for values in [matrix.values, matrix.transposed].into_iter().flatten() {
        handles.register_int_tensor::<B>(next(), values);
    }
}

fn matrix_shape<T: TensorMetadata>(tensor: &T) -> [usize; 2] {
    let shape = tensor.shape();
    <[usize; 2]>::try_from(shape.as_slice()).unwrap_or_else(|_| {
        panic!("quantize: expected a matrix, got shape {shape:?}; flatten the leading dimensions")
    })
}

impl<B: FusionBackend + QuantOps> QuantOps for Fusion<B> {
    fn quantize_matrix(
        x: FloatTensor<Self>,
        cast: Cast,
        layout: Layout,
        key: Option<StochasticKey>,
    ) -> Quantized<Self> {
        let form = Form::new(matrix_shape(&x), cast, layout);
        let mut outputs = register::<B>(
            "quantize_matrix",
            vec![x],
            &form.tensors(),
            move |ir, handles| {
                let x = handles.get_float_tensor::<B>(&ir.inputs[0]);
                let matrix = B::quantize_matrix(x, cast, layout, key);
                give::<B>(matrix, &mut ir.outputs.iter(), handles);
            },
        );
        form.fused::<B>(&mut outputs)
    }

    fn quantize_fallback(
        x: FloatTensor<Self>,
        cast: Cast,
        layer: usize,
        thresholds: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> (FallbackQuantized<Self>, IntTensor<Self>) {
        let shape = matrix_shape(&x);
        let form = Form::new(shape, cast, Layout::RowMajor);
        let mut outputs = form.tensors();
        outputs.extend([
            (Shape::new(shape), DType::I8),
            (form.scales(), DType::F32),
            (form.scales(), DType::U32),
            (counts.shape(), DType::I32),
        ]);
        let inputs = vec![x, thresholds, counts];
        let mut outputs =
            register::<B>("quantize_fallback", inputs, &outputs, move |ir, handles| {
                let x = handles.get_float_tensor::<B>(&ir.inputs[0]);
                let thresholds = handles.get_float_tensor::<B>(&ir.inputs[1]);
                let counts = handles.get_int_tensor::<B>(&ir.inputs[2]);
                let (quantized, counts) = B::quantize_fallback(x, cast, layer, thresholds, counts);
                let FallbackQuantized { base, residual } = quantized;
                let mut outputs = ir.outputs.iter();
                give::<B>(base, &mut outputs, handles);
                let mut next = || &outputs.next().expect("four outputs follow the base").id;
                handles.register_int_tensor::<B>(next(), residual.values);
                handles.register_float_tensor::<B>(next(), residual.scales);
                let indicator = residual
                    .indicator
                    .expect("a fused backend runs kernels, which write the indicator");
                handles.register_int_tensor::<B>(next(), indicator);
                handles.register_int_tensor::<B>(next(), counts);
            });
        let base = form.fused::<B>(&mut outputs);
        let mut next = || outputs.next().expect("four outputs follow the base");
        let residual = Residual {
            values: next(),
            scales: next(),
            indicator: Some(next()),
        };
        (FallbackQuantized { base, residual }, next())
    }

    fn dequantize_matrix(matrix: &Quantized<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let form = Form::of::<B>(matrix);
        let outputs = [(Shape::new(form.shape), dtype.into())];
        let inputs = tensors::<B>(matrix).collect();
        let mut outputs =
            register::<B>("dequantize_matrix", inputs, &outputs, move |ir, handles| {
                let matrix = form.take::<B>(&mut ir.inputs.iter(), handles);
                let output = B::dequantize_matrix(&matrix, dtype);
                handles.register_float_tensor::<B>(&ir.outputs[0].id, output);
            });
        outputs.next().expect("one output")
    }

    fn quantized_matmul(
        a: Operand<'_, Self>,
        residual: Option<&Residual<Self>>,
        b: Operand<'_, Self>,
        bias: Option<FloatTensor<Self>>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let ([m, _], [_, n]) = (a.shape(), b.shape());
        let (a_form, b_form) = (Form::of::<B>(a.matrix), Form::of::<B>(b.matrix));
        let (a_transpose, b_transpose) = (a.transpose, b.transpose);
        let mut inputs: Vec<Tensor<B>> = tensors::<B>(a.matrix)
            .chain(tensors::<B>(b.matrix))
            .collect();
        if let Some(residual) = residual {
            let indicator = residual.indicator.clone();
            inputs.extend([residual.values.clone(), residual.scales.clone()]);
            inputs
                .push(indicator.expect("a fused backend runs kernels, which write the indicator"));
        }
        let has_residual = residual.is_some();
        inputs.extend(bias);
        let outputs = [(Shape::new([m, n]), dtype.into())];
        let mut outputs =
            register::<B>("quantized_matmul", inputs, &outputs, move |ir, handles| {
                let mut inputs = ir.inputs.iter();
                let a = a_form.take::<B>(&mut inputs, handles);
                let b = b_form.take::<B>(&mut inputs, handles);
                let residual = has_residual.then(|| {
                    let mut next = || inputs.next().expect("a residual has three tensors");
                    Residual {
                        values: handles.get_int_tensor::<B>(next()),
                        scales: handles.get_float_tensor::<B>(next()),
                        indicator: Some(handles.get_int_tensor::<B>(next())),
                    }
                });
                let bias = inputs
                    .next()
                    .map(|bias| handles.get_float_tensor::<B>(bias));
                let operand = |matrix, transpose| Operand { matrix, transpose };
                let output = B::quantized_matmul(
                    operand(&a, a_transpose),
                    residual.as_ref(),
                    operand(&b, b_transpose),
                    bias,
                    dtype,
                );
                handles.register_float_tensor::<B>(&ir.outputs[0].id, output);
            });
        outputs.next().expect("one output")
    }

    fn delay_threshold(state: FallbackState<Self>, config: &DelayThreshold) -> FallbackState<Self> {
        let FallbackState {
            thresholds,
            counts,
            rates,
        } = state;
        let outputs = [
            (thresholds.shape(), DType::F32),
            (counts.shape(), DType::I32),
            (rates.shape(), DType::F32),
        ];
        let config = *config;
        let inputs = vec![thresholds, counts, rates];
        let mut outputs = register::<B>("delay_threshold", inputs, &outputs, move |ir, handles| {
            let state = FallbackState {
                thresholds: handles.get_float_tensor::<B>(&ir.inputs[0]),
                counts: handles.get_int_tensor::<B>(&ir.inputs[1]),
                rates: handles.get_float_tensor::<B>(&ir.inputs[2]),
            };
            let state = B::delay_threshold(state, &config);
            handles.register_float_tensor::<B>(&ir.outputs[0].id, state.thresholds);
            handles.register_int_tensor::<B>(&ir.outputs[1].id, state.counts);
            handles.register_float_tensor::<B>(&ir.outputs[2].id, state.rates);
        });
        let mut next = || outputs.next().expect("three outputs");
        FallbackState {
            thresholds: next(),
            counts: next(),
            rates: next(),
        }
    }
}
