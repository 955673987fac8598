//! Tensors on the device under test.

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use cubecl_kernels::shape::MatrixShape;
use half::{bf16, f16};

use crate::random::Random;

#[cfg(feature = "cuda")]
pub type TestRuntime = cubecl::cuda::CudaRuntime;
#[cfg(not(feature = "cuda"))]
pub type TestRuntime = cubecl::wgpu::WgpuRuntime;

pub type Client = ComputeClient<TestRuntime>;
pub type Tensor = TensorHandle<TestRuntime>;

pub fn client() -> Client {
    TestRuntime::client(&Default::default())
}

pub fn dtype<E: CubePrimitive>() -> StorageType {
    E::as_type_native_unchecked().storage_type()
}

/// Of cases that have a kernel each, all on CUDA, and elsewhere, where a driver in software compiles a kernel for
/// seconds, a few: see [`Random::few`].
pub fn drawn<T>(random: &mut Random, cases: impl IntoIterator<Item = T>, few: usize) -> Vec<T> {
    match cfg!(feature = "cuda") {
        true => cases.into_iter().collect(),
        false => random.few(cases, few),
    }
}

/// The float types of this device. One that is missing is named in the output.
pub fn float_types(client: &Client) -> Vec<StorageType> {
    [dtype::<f32>(), dtype::<f16>(), dtype::<bf16>()]
        .into_iter()
        .filter(|&float| {
            let supported = client.features().supports_type(float);
            if !supported {
                println!("skipped: this device has no {float}");
            }
            supported
        })
        .collect()
}

/// The nearest values of a float type, as f32.
pub fn rounded(x: &[f32], float: StorageType) -> Vec<f32> {
    x.iter()
        .map(|&x| {
            if float == dtype::<f16>() {
                f16::from_f32(x).to_f32()
            } else if float == dtype::<bf16>() {
                bf16::from_f32(x).to_f32()
            } else {
                x
            }
        })
        .collect()
}

/// The elements in the memory of a float type.
pub fn to_bytes(x: &[f32], float: StorageType) -> Vec<u8> {
    if float == dtype::<f16>() {
        let x: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
        bytemuck::cast_slice(&x).to_vec()
    } else if float == dtype::<bf16>() {
        let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        bytemuck::cast_slice(&x).to_vec()
    } else {
        bytemuck::cast_slice(x).to_vec()
    }
}

/// A contiguous tensor of this shape.
pub fn upload(client: &Client, x: &[f32], shape: &[usize], float: StorageType) -> Tensor {
    let mut bytes = to_bytes(x, float);
    bytes.resize(bytes.len().max(16), 0);
    TensorHandle::new_contiguous(shape.to_vec(), client.create_from_slice(&bytes), float)
}

/// A contiguous tensor that does not start where its buffer does.
pub fn upload_with_offset(
    client: &Client,
    x: &[f32],
    shape: &[usize],
    float: StorageType,
) -> Tensor {
    // CUDA binds buffers from any element on, so that no vector is aligned; other devices from few places.
    let before = if cfg!(feature = "cuda") { 3 } else { 256 };
    let buffer = [&vec![f32::NAN; before], x, &[f32::NAN; 16]].concat();
    let handle = client.create_from_slice(&to_bytes(&buffer, float));
    let handle = handle.offset_start((before * float.size()) as u64);
    TensorHandle::new_contiguous(shape.to_vec(), handle, float)
}

/// A contiguous tensor of i32.
pub fn upload_i32(client: &Client, x: &[i32], shape: &[usize]) -> Tensor {
    // A buffer of no bytes cannot be bound.
    let padded = [x, &[0]].concat();
    let handle = client.create_from_slice(bytemuck::cast_slice(&padded));
    TensorHandle::new_contiguous(shape.to_vec(), handle, dtype::<i32>())
}

/// A contiguous tensor of u8.
pub fn upload_u8(client: &Client, x: &[u8], shape: &[usize]) -> Tensor {
    let mut bytes = x.to_vec();
    bytes.resize(x.len().next_multiple_of(4).max(16), 0);
    TensorHandle::new_contiguous(
        shape.to_vec(),
        client.create_from_slice(&bytes),
        dtype::<u8>(),
    )
}

/// The memory layouts of a matrix under test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Memory {
    Contiguous,
    /// Columns contiguous.
    Transposed,
    /// A window of a larger matrix.
    Sliced,
    /// A window whose rows start at multiples of 16 bytes.
    SlicedAligned,
}

/// The matrices `x` in this layout; of rank 2 if the batch is one.
pub fn upload_matrix(
    client: &Client,
    x: &[f32],
    shape: MatrixShape,
    float: StorageType,
    memory: Memory,
) -> Tensor {
    let MatrixShape { batch, rows, cols } = shape;
    // The window starts on a row whose offset every device accepts for a binding.
    let pad_rows = 256;
    let pad_cols = if memory == Memory::SlicedAligned {
        8
    } else {
        5
    };
    let is_window = matches!(memory, Memory::Sliced | Memory::SlicedAligned);
    let (buffer, strides) = match memory {
        Memory::Contiguous => (x.to_vec(), [rows * cols, cols, 1]),
        Memory::Transposed => (
            cubecl_kernels::reference::transpose(x, shape),
            [rows * cols, 1, rows],
        ),
        Memory::Sliced | Memory::SlicedAligned => {
            let pitch = cols + pad_cols;
            let mut buffer = vec![f32::NAN; (batch * rows + pad_rows) * pitch];
            for (row, values) in x.chunks(cols.max(1)).enumerate() {
                buffer[(row + pad_rows) * pitch..][..cols].copy_from_slice(values);
            }
            (buffer, [rows * pitch, pitch, 1])
        }
    };
    let mut handle = client.create_from_slice(&{
        let mut bytes = to_bytes(&buffer, float);
        bytes.resize(bytes.len().max(16), 0);
        bytes
    });
    if is_window {
        handle = handle.offset_start((pad_rows * (cols + pad_cols) * float.size()) as u64);
    }
    if batch == 1 {
        TensorHandle::new(handle, vec![rows, cols], strides[1..].to_vec(), float)
    } else {
        TensorHandle::new(handle, vec![batch, rows, cols], strides.to_vec(), float)
    }
}

/// All elements of a contiguous tensor.
pub fn read<T: bytemuck::Pod>(client: &Client, tensor: &Tensor) -> Vec<T> {
    let count = tensor.shape().iter().product::<usize>();
    let bytes = client
        .read_one(tensor.handle.clone())
        .expect("a readable buffer");
    bytes
        .chunks_exact(size_of::<T>())
        .take(count)
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

/// [`read`] of a float tensor, as f32.
pub fn read_float(client: &Client, tensor: &Tensor) -> Vec<f32> {
    if tensor.dtype == dtype::<f16>() {
        read::<u16>(client, tensor)
            .into_iter()
            .map(|bits| f16::from_bits(bits).to_f32())
            .collect()
    } else if tensor.dtype == dtype::<bf16>() {
        read::<u16>(client, tensor)
            .into_iter()
            .map(|bits| bf16::from_bits(bits).to_f32())
            .collect()
    } else {
        read(client, tensor)
    }
}

/// [`read`] of i8 values, as i32.
pub fn read_i8(client: &Client, tensor: &Tensor) -> Vec<i32> {
    read::<i8>(client, tensor)
        .into_iter()
        .map(i32::from)
        .collect()
}

/// Equality to the bit, any NaN being equal to any other.
#[track_caller]
pub fn assert_same_floats(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            a.to_bits() == e.to_bits() || (a.is_nan() && e.is_nan()),
            "{what}[{index}]: {a:e} instead of {e:e}"
        );
    }
}

/// Equality of integers, the first difference being shown.
#[track_caller]
pub fn assert_same_integers(actual: &[i32], expected: &[i32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    let different = actual.iter().zip(expected).filter(|(a, e)| a != e).count();
    if let Some(index) = actual.iter().zip(expected).position(|(a, e)| a != e) {
        panic!(
            "{what}[{index}]: {} instead of {}, {different} of {} differ",
            actual[index],
            expected[index],
            actual.len()
        );
    }
}
