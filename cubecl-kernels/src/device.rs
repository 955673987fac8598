//! The questions that every launcher asks its tensors and its device.

use cubecl::{
    features::Tma,
    ir::{
        StorageType,
        features::{Plane, TypeUsage},
    },
    prelude::*,
    std::tensor::TensorHandle,
};

use crate::{error::KernelError, shape::MatrixShape};

/// The storage type of a Rust element type.
pub(crate) fn storage<E: CubePrimitive>() -> StorageType {
    E::as_type_native_unchecked().storage_type()
}

/// A new contiguous tensor, its contents undefined.
pub(crate) fn empty<R: Runtime>(
    client: &ComputeClient<R>,
    shape: Vec<usize>,
    dtype: StorageType,
) -> TensorHandle<R> {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    // A buffer of zero bytes cannot be bound; an empty tensor keeps one element that nobody reads.
    let handle = client.empty(bytes.max(dtype.size()));
    TensorHandle::new_contiguous(shape, handle, dtype)
}

/// A new contiguous tensor of zeros.
pub(crate) fn zeros<R: Runtime>(
    client: &ComputeClient<R>,
    shape: Vec<usize>,
    dtype: StorageType,
) -> TensorHandle<R> {
    let bytes = vec![0; shape.iter().product::<usize>().max(1) * dtype.size()];
    TensorHandle::new_contiguous(shape, client.create_from_slice(&bytes), dtype)
}

/// A matrix argument: its shape and its strides in elements, batch first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixView {
    pub shape: MatrixShape,
    pub batch_stride: usize,
    pub row_stride: usize,
    pub col_stride: usize,
    /// True where the tensor has a batch dimension.
    pub batched: bool,
}

impl MatrixView {
    /// Reads a tensor of rank 2 or 3 as matrices.
    pub fn new<R: Runtime>(
        operation: &'static str,
        tensor: &TensorHandle<R>,
    ) -> Result<Self, KernelError> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let view = match shape.len() {
            2 => Self {
                shape: MatrixShape::new(shape[0], shape[1]),
                batch_stride: 0,
                row_stride: strides[0],
                col_stride: strides[1],
                batched: false,
            },
            3 => Self {
                shape: MatrixShape::batched(shape[0], shape[1], shape[2]),
                batch_stride: strides[0],
                row_stride: strides[1],
                col_stride: strides[2],
                batched: true,
            },
            _ => {
                return Err(KernelError::Shape {
                    operation,
                    got: format!("a tensor of shape {shape:?}"),
                    remedy: "pass a matrix [rows, cols] or a batch of them [batch, rows, cols]",
                });
            }
        };
        let limit = u32::MAX as usize;
        let reach = |extent: usize, stride: usize| extent.saturating_sub(1) * stride;
        let last = reach(view.shape.batch, view.batch_stride)
            + reach(view.shape.rows, view.row_stride)
            + reach(view.shape.cols, view.col_stride);
        if view.shape.num_elements() > limit || last > limit {
            return Err(KernelError::Shape {
                operation,
                got: format!("a tensor of shape {shape:?}"),
                remedy: "split it: kernels index with 32 bits, at most 2^32 - 1 elements",
            });
        }
        Ok(view)
    }

    /// Reads a tensor of rank 2 as a matrix.
    pub fn one<R: Runtime>(
        operation: &'static str,
        name: &'static str,
        tensor: &TensorHandle<R>,
    ) -> Result<Self, KernelError> {
        match tensor.shape().len() {
            2 => Self::new(operation, tensor),
            _ => Err(KernelError::Shape {
                operation,
                got: format!("{name} of shape {:?}", tensor.shape()),
                remedy: "pass a matrix [rows, cols]",
            }),
        }
    }

    /// A contiguous matrix.
    pub fn contiguous(rows: usize, cols: usize) -> Self {
        Self {
            shape: MatrixShape::new(rows, cols),
            batch_stride: 0,
            row_stride: cols,
            col_stride: 1,
            batched: false,
        }
    }

    /// The tensor shape of matrices of `rows` x `cols` with this view's batch dimension.
    pub fn tensor_shape(&self, rows: usize, cols: usize) -> Vec<usize> {
        if self.batched {
            vec![self.shape.batch, rows, cols]
        } else {
            vec![rows, cols]
        }
    }
}

/// Accepts the three float types that kernels read and write.
pub(crate) fn check_float<R: Runtime>(
    client: &ComputeClient<R>,
    operation: &'static str,
    tensor: &'static str,
    dtype: StorageType,
) -> Result<(), KernelError> {
    let known = [
        storage::<f32>(),
        storage::<half::f16>(),
        storage::<half::bf16>(),
    ];
    if !known.contains(&dtype) {
        return Err(KernelError::Dtype {
            operation,
            tensor,
            dtype: dtype.to_string(),
            remedy: "use f32, f16 or bf16",
        });
    }
    if !client.features().supports_type(dtype) {
        return Err(KernelError::Dtype {
            operation,
            tensor,
            dtype: dtype.to_string(),
            remedy: "this device does not have it; cast to a float type that it has",
        });
    }
    Ok(())
}

/// True for the element types of matrices that `wgmma` multiplies as floats here: bf16 and f16.
pub(crate) fn is_operand_type(dtype: StorageType) -> bool {
    dtype == storage::<half::bf16>() || dtype == storage::<half::f16>()
}

/// True where the elements of a tensor lie in memory in their order, without gaps.
pub(crate) fn is_contiguous<R: Runtime>(tensor: &TensorHandle<R>) -> bool {
    let mut expected = 1;
    let dimensions = tensor.shape().iter().zip(tensor.strides().iter());
    dimensions.rev().all(|(&extent, &stride)| {
        let fits = extent <= 1 || stride == expected;
        expected *= extent;
        fits
    })
}

/// The number of elements of a contiguous tensor, few enough that 32 bits index all of a launch's last cubes too.
pub(crate) fn check_contiguous<R: Runtime>(
    operation: &'static str,
    tensor: &TensorHandle<R>,
) -> Result<usize, KernelError> {
    let len = tensor.shape().iter().product::<usize>();
    if is_contiguous(tensor) && len <= 1 << 31 {
        return Ok(len);
    }
    Err(KernelError::Shape {
        operation,
        got: format!(
            "a tensor of shape {:?} and strides {:?}",
            tensor.shape(),
            tensor.strides()
        ),
        remedy: "pass a contiguous tensor of at most 2^31 elements",
    })
}

/// Accepts one element type only.
pub(crate) fn check_dtype<R: Runtime>(
    operation: &'static str,
    name: &'static str,
    tensor: &TensorHandle<R>,
    expected: StorageType,
    remedy: &'static str,
) -> Result<(), KernelError> {
    if tensor.dtype == expected {
        return Ok(());
    }
    Err(KernelError::Dtype {
        operation,
        tensor: name,
        dtype: tensor.dtype.to_string(),
        remedy,
    })
}

/// Cubes that every device allows along a dimension of a launch.
pub(crate) const MAX_CUBES: usize = 65_535;

/// Cubes for `count` of them in a row, folded into two dimensions of at most [`MAX_CUBES`].
///
/// Kernels read `CUBE_POS` and leave when it is past the count.
pub(crate) fn cube_grid(count: usize) -> CubeCount {
    let y = count.div_ceil(MAX_CUBES).max(1);
    CubeCount::Static(count.div_ceil(y) as u32, y as u32, 1)
}

/// The cubes that take so many tiles by turns: `taking` of a multiprocessor, and no more than there are tiles.
pub(crate) fn cubes_by_turns<R: Runtime>(
    client: &ComputeClient<R>,
    tiles: usize,
    taking: usize,
) -> CubeCount {
    let multiprocessors = client.properties().hardware.num_streaming_multiprocessors;
    let at_once = taking * multiprocessors.unwrap_or(1) as usize;
    CubeCount::Static(at_once.min(tiles) as u32, 1, 1)
}

/// A tensor as a kernel's argument without its shape and strides, which CubeCL would copy to the device before each
/// launch.
pub(crate) fn array<R: Runtime>(tensor: TensorHandle<R>) -> ArrayArg<R> {
    let len = tensor.shape().iter().product();
    // SAFETY: the length is that of the tensor; a kernel that does not check its accesses does not ask for it.
    #[allow(unsafe_code)]
    unsafe {
        ArrayArg::from_raw_parts(tensor.handle, len)
    }
}

/// How many tensors one launch takes, up to `most`, where each takes `of_tensor` bindings and the launch `shared` ones
/// beside them: few devices bind more than a handful of buffers.
pub(crate) fn tensors_of_launch<R: Runtime>(
    client: &ComputeClient<R>,
    shared: usize,
    of_tensor: usize,
    most: usize,
) -> usize {
    let limit = client.properties().hardware.max_bindings as usize;
    (limit.saturating_sub(shared) / of_tensor).clamp(1, most)
}

/// A tensor argument that not every launch of a kernel uses: `tensor`, else as a stand-in the buffer of `any` other
/// argument, since an allocation costs the host as much as a small launch. The kernel must neither read nor write a
/// stand-in; wgpu, which binds all buffers for both unless CubeCL's `exclusive-memory-only` is on, accepts a buffer
/// twice.
pub(crate) fn or_unused<R: Runtime>(
    tensor: Option<&TensorHandle<R>>,
    any: &TensorHandle<R>,
    dtype: StorageType,
) -> TensorHandle<R> {
    tensor
        .cloned()
        .unwrap_or_else(|| TensorHandle::new_contiguous(vec![1], any.handle.clone(), dtype))
}

/// How many elements a kernel reads at once along the columns of `tensor`: 4, or 1 where that is not possible.
pub(crate) fn read_width<R: Runtime>(tensor: &TensorHandle<R>, view: &MatrixView) -> usize {
    read_width_up_to(4, tensor, view)
}

/// How many elements a kernel reads at once along the columns of `tensor`: `most`, else 4, else 1.
pub(crate) fn read_width_up_to<R: Runtime>(
    most: usize,
    tensor: &TensorHandle<R>,
    view: &MatrixView,
) -> usize {
    let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
    let fits = |width: usize| {
        let aligned = [view.batch_stride, view.row_stride, view.shape.cols]
            .into_iter()
            .all(|elements| elements % width == 0);
        view.col_stride == 1 && aligned && offset % (width * tensor.dtype.size()) == 0
    };
    [most, 4]
        .into_iter()
        .find(|&width| fits(width))
        .unwrap_or(1)
}

/// Elements that a kernel reads and writes at once where each of these tensors, of one element type, holds contiguous
/// rows of `cols`: those of 16 bytes, or the largest half, quarter and so on of them that divides rows and offsets.
pub(crate) fn vector_width<R: Runtime>(cols: usize, tensors: &[&TensorHandle<R>]) -> usize {
    const BYTES: usize = 16;
    let fits = |tensor: &TensorHandle<R>, width: usize| {
        let offset = tensor.handle.offset_start.unwrap_or_default() as usize;
        cols % width == 0 && offset % (width * tensor.dtype.size()) == 0
    };
    let mut width = tensors
        .iter()
        .map(|tensor| BYTES / tensor.dtype.size())
        .min()
        .unwrap_or(1);
    while width > 1 && !tensors.iter().all(|tensor| fits(tensor, width)) {
        width /= 2;
    }
    width
}

/// True where the device has plane operations, on planes of 32 units.
pub(crate) fn has_planes_of_32<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let hardware = &client.properties().hardware;
    client.features().plane.contains(Plane::Ops)
        && hardware.plane_size_min == 32
        && hardware.plane_size_max == 32
}

/// True where the device has `wgmma`: CUDA's architecture sm_90, no other.
///
/// CubeCL does not name the architecture. TMA came with sm_90; its wide im2col form with sm_100, without `wgmma`.
pub(crate) fn is_hopper<R: Runtime>(client: &ComputeClient<R>) -> bool {
    is_hopper_or_later(client) && !client.features().tma.contains(Tma::Im2colWide)
}

/// True for CUDA's architectures from sm_90 on: see [`is_hopper`].
pub(crate) fn is_hopper_or_later<R: Runtime>(client: &ComputeClient<R>) -> bool {
    R::name(client) == "cuda" && client.features().tma.contains(Tma::Base)
}

/// True where the device computes with integers of 64 bits.
pub(crate) fn has_u64<R: Runtime>(client: &ComputeClient<R>) -> bool {
    client
        .features()
        .type_usage(storage::<u64>())
        .contains(TypeUsage::Arithmetic)
}

/// How many elements a kernel writes at once into contiguous rows of this length.
pub(crate) fn write_width(cols: usize) -> usize {
    if cols % 4 == 0 { 4 } else { 1 }
}

/// Shape and strides of a matrix argument, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct MatrixGeometry {
    pub rows: u32,
    pub cols: u32,
    pub batch_stride: u32,
    pub row_stride: u32,
    pub col_stride: u32,
}

impl MatrixView {
    /// The launch argument of this view.
    pub fn geometry<R: Runtime>(&self) -> MatrixGeometryLaunch<R> {
        MatrixGeometryLaunch::new(
            self.shape.rows as u32,
            self.shape.cols as u32,
            self.batch_stride as u32,
            self.row_stride as u32,
            self.col_stride as u32,
        )
    }
}

/// Reads four neighbours of a row as `f32`, from column `col`, a multiple of 4; 0 outside the matrix.
#[cube]
pub(crate) fn read_quad<F: Numeric, N: Size>(
    x: &Array<Vector<F, N>>,
    geometry: &MatrixGeometry,
    batch: u32,
    row: u32,
    col: u32,
    #[comptime] width: usize,
) -> Array<f32> {
    let mut quad = Array::<f32>::new(4usize);
    let start = batch * geometry.batch_stride + row * geometry.row_stride;
    if comptime!(width == 4) {
        if row < geometry.rows && col < geometry.cols {
            let vector = x[((start + col) / 4) as usize];
            #[unroll]
            for lane in 0..4usize {
                quad[lane] = f32::cast_from(vector[lane]);
            }
        } else {
            #[unroll]
            for lane in 0..4usize {
                quad[lane] = 0.0f32;
            }
        }
    } else {
        #[unroll]
        for lane in 0..4u32 {
            let mut value = 0.0f32;
            if row < geometry.rows && col + lane < geometry.cols {
                let vector = x[(start + (col + lane) * geometry.col_stride) as usize];
                value = f32::cast_from(vector[0usize]);
            }
            quad[lane as usize] = value;
        }
    }
    quad
}

/// Writes four neighbours of a contiguous row of `cols` elements, where they lie inside it.
#[cube]
pub(crate) fn write_quad<T: Numeric, Q: Numeric, N: Size>(
    out: &mut Array<Vector<Q, N>>,
    quad: &Array<T>,
    row_start: u32,
    col: u32,
    cols: u32,
    #[comptime] width: usize,
) {
    if comptime!(width == 4) {
        if col < cols {
            let mut vector = Vector::<Q, N>::empty();
            #[unroll]
            for lane in 0..4usize {
                vector[lane] = Q::cast_from(quad[lane]);
            }
            out[((row_start + col) / 4) as usize] = vector;
        }
    } else {
        #[unroll]
        for lane in 0..4u32 {
            if col + lane < cols {
                let index = (row_start + col + lane) as usize;
                out[index] = Vector::cast_from(quad[lane as usize]);
            }
        }
    }
}

/// Strides of a tensor `[batch, rows, cols]`, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Strides {
    pub batch: u32,
    pub row: u32,
    pub col: u32,
}

impl Strides {
    /// The launch argument of a matrix' strides; a batch of one is shared.
    pub(crate) fn of<R: Runtime>(view: &MatrixView) -> StridesLaunch<R> {
        let batch = if view.shape.batch == 1 {
            0
        } else {
            view.batch_stride
        };
        StridesLaunch::new(batch as u32, view.row_stride as u32, view.col_stride as u32)
    }
}
