//! Quantized matrices: numbers with shared scales.

use burn_backend::{Backend, DType, Shape};
use cubecl_kernels::{
    granularity::Granularity,
    layout::Layout,
    number::{Number, Storage},
    quantize::QuantizeSpec,
    scale::ScaleNumber,
    shape::MatrixShape,
};

use crate::data::tensors::{Bundle, Change, FloatMeta, IntMeta, Outline, Tensors};

/// How the numbers of a quantized matrix are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Format {
    /// The number format of the values.
    pub number: Number,
    /// The number format of the scales.
    pub scale: ScaleNumber,
    /// Which elements share a scale.
    pub granularity: Granularity,
}

impl Format {
    /// The format of what a quantization by `spec` gives.
    pub const fn of(spec: &QuantizeSpec) -> Self {
        Self {
            number: spec.number,
            scale: spec.scale,
            granularity: spec.granularity,
        }
    }

    /// The dtype of stored values.
    pub(crate) fn values_dtype(&self) -> DType {
        match self.number.storage() {
            Storage::SignedBytes => DType::I8,
            Storage::Bytes | Storage::Nibbles => DType::U8,
            Storage::TenBits => DType::U32,
        }
    }

    /// The shape of the stored values of a matrix of this shape.
    pub(crate) fn values_shape(&self, [rows, cols]: [usize; 2]) -> Shape {
        Shape::new([rows, self.number.storage().stored_cols(cols)])
    }

    /// The shape of the scales of a matrix of this shape.
    pub(crate) fn scales_shape(&self, [rows, cols]: [usize; 2]) -> Shape {
        let scales = self.granularity.scales_shape(MatrixShape::new(rows, cols));
        Shape::new([scales.rows, scales.cols])
    }
}

/// The scales of a quantized matrix, `[scale rows, scale cols]`: dequantization multiplies by them. NaN where a region
/// held NaN or Inf. See [`ScaleNumber`].
#[derive(Debug, Clone)]
pub enum Scales<T: Tensors> {
    /// FP32.
    F32(T::Float),
    /// Powers of two, U8.
    E8M0(T::Int),
    /// E4M3 under a scale of the matrix.
    E4M3 {
        /// Those of the regions, U8.
        scales: T::Int,
        /// That of the matrix, FP32 `[1]`.
        tensor_scale: T::Float,
    },
}

impl Bundle for Scales<Outline> {
    type On<T: Tensors> = Scales<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        scales: Scales<S>,
        change: &mut impl Change<S, T>,
    ) -> Scales<T> {
        match scales {
            Scales::F32(scales) => Scales::F32(change.float(scales)),
            Scales::E8M0(scales) => Scales::E8M0(change.int(scales)),
            Scales::E4M3 {
                scales,
                tensor_scale,
            } => Scales::E4M3 {
                scales: change.int(scales),
                tensor_scale: change.float(tensor_scale),
            },
        }
    }
}

impl Scales<Outline> {
    fn outline(shape: [usize; 2], format: Format) -> Self {
        let shape = format.scales_shape(shape);
        match format.scale {
            ScaleNumber::F32 => Self::F32(FloatMeta::new(shape, DType::F32)),
            ScaleNumber::E8M0 => Self::E8M0(IntMeta::new(shape, DType::U8)),
            ScaleNumber::E4M3 => Self::E4M3 {
                scales: IntMeta::new(shape, DType::U8),
                tensor_scale: FloatMeta::new([1], DType::F32),
            },
        }
    }
}

/// A quantized matrix `[rows, cols]`. At least one of the two copies of the values is there.
#[derive(Debug, Clone)]
pub struct Quantized<T: Tensors> {
    /// Rows and columns.
    pub shape: [usize; 2],
    /// How values and scales are to be read.
    pub format: Format,
    /// The values, `[rows, stored cols]` as their [`Storage`] has them.
    pub values: Option<T::Int>,
    /// The values transposed, `[cols, stored rows]`.
    pub transposed: Option<T::Int>,
    /// The scales, in the orientation of the matrix.
    pub scales: Scales<T>,
    /// The largest magnitude of what was quantized, FP32 `[1]`, NaN if it held NaN or an infinity: where the scale does
    /// not follow from it.
    pub absmax: Option<T::Float>,
}

impl Bundle for Quantized<Outline> {
    type On<T: Tensors> = Quantized<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        matrix: Quantized<S>,
        change: &mut impl Change<S, T>,
    ) -> Quantized<T> {
        Quantized {
            shape: matrix.shape,
            format: matrix.format,
            values: matrix.values.map(|values| change.int(values)),
            transposed: matrix.transposed.map(|values| change.int(values)),
            scales: Scales::rebuild(matrix.scales, change),
            absmax: matrix.absmax.map(|absmax| change.float(absmax)),
        }
    }
}

impl Quantized<Outline> {
    /// The outline of what a quantization of a matrix of this shape gives.
    pub(crate) fn outline(shape: [usize; 2], spec: &QuantizeSpec) -> Self {
        let [rows, cols] = shape;
        let format = Format::of(spec);
        let stored = |shape| IntMeta::new(format.values_shape(shape), format.values_dtype());
        Self {
            shape,
            format,
            values: spec.layout.row_major().then(|| stored(shape)),
            transposed: spec.layout.transposed().then(|| stored([cols, rows])),
            scales: Scales::outline(shape, format),
            absmax: None,
        }
    }

    /// The outline of what a quantization by a delayed maximum gives.
    pub(crate) fn delayed_outline(shape: [usize; 2], spec: &QuantizeSpec) -> Self {
        Self {
            absmax: Some(FloatMeta::new([1], DType::F32)),
            ..Self::outline(shape, spec)
        }
    }
}

impl<T: Tensors> Quantized<T> {
    /// This matrix as an operand.
    pub fn operand(&self) -> Operand<'_, T> {
        Operand {
            matrix: self,
            transpose: false,
        }
    }

    /// The copy in this layout alone. A backend that has one layout only keeps that.
    pub(crate) fn in_layout(&self, layout: Layout) -> Self
    where
        T: Clone,
    {
        let kept = |values: &Option<T::Int>, other: &Option<T::Int>, wanted: bool| {
            values.clone().filter(|_| wanted || other.is_none())
        };
        Self {
            values: kept(&self.values, &self.transposed, layout.row_major()),
            transposed: kept(&self.transposed, &self.values, layout.transposed()),
            scales: self.scales.clone(),
            absmax: self.absmax.clone(),
            ..*self
        }
    }
}

impl<B: Backend> Quantized<B> {
    /// The device of the matrix.
    pub(crate) fn device(&self) -> B::Device {
        match &self.scales {
            Scales::F32(scales) => B::float_device(scales),
            Scales::E8M0(scales) | Scales::E4M3 { scales, .. } => B::int_device(scales),
        }
    }
}

/// A quantized matrix as an operand of a product, possibly transposed.
#[derive(Debug)]
pub struct Operand<'a, T: Tensors> {
    /// The matrix.
    pub matrix: &'a Quantized<T>,
    /// True if the product takes its transpose.
    pub transpose: bool,
}

impl<T: Tensors> Clone for Operand<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Tensors> Copy for Operand<'_, T> {}

impl<T: Tensors> Operand<'_, T> {
    /// The transpose of this operand.
    pub fn t(self) -> Self {
        Self {
            transpose: !self.transpose,
            ..self
        }
    }

    /// Rows and columns as the product sees them.
    pub fn shape(&self) -> [usize; 2] {
        let [rows, cols] = self.matrix.shape;
        match self.transpose {
            true => [cols, rows],
            false => [rows, cols],
        }
    }
}
