//! Masks, a bit an element.

use burn_backend::{
    DType, FloatDType, IntDType, Scalar, Shape, Slice, TensorData, TensorMetadata,
    get_device_settings,
    tensor::{Device, FloatTensor, IntTensor},
};

use crate::data::{
    DataBackend, Kernels, Operation,
    tensors::{FloatMeta, IntMeta, Tensors},
};

/// Bits of a word.
const WORD: usize = 32;

/// A mask of any shape, 32 elements in a word.
#[derive(Debug)]
pub struct Bits<B: DataBackend> {
    /// `[words, 1]`, INT32. The lowest bit of a word is its first element.
    words: IntTensor<B>,
    shape: Shape,
    dtype: FloatDType,
}

impl<B: DataBackend> Clone for Bits<B> {
    fn clone(&self) -> Self {
        Self {
            words: self.words.clone(),
            shape: self.shape.clone(),
            dtype: self.dtype,
        }
    }
}

impl<B: DataBackend> Bits<B> {
    /// The mask of the elements that are not 0 or below: positive ones and NaN. There must be elements.
    pub fn of(tensor: FloatTensor<B>) -> Self {
        let (shape, dtype) = (tensor.shape(), tensor.dtype().into());
        Self {
            words: B::run(PackBits, tensor),
            shape,
            dtype,
        }
    }

    /// The mask in the shape and dtype of the tensor: 1 and 0.
    pub fn into_floats(self) -> FloatTensor<B> {
        let (shape, dtype) = (self.shape, self.dtype);
        B::run(UnpackBits { shape, dtype }, self.words)
    }

    /// The bytes of the words.
    pub fn bytes(&self) -> usize {
        4 * words(&self.shape)
    }
}

fn words(shape: &Shape) -> usize {
    shape.num_elements().div_ceil(WORD)
}

/// The value of each bit of a word, `[1, 32]`. That of the highest is negative, so a sum of distinct bits never
/// overflows.
fn values<K: Kernels>(device: &Device<K>) -> IntTensor<K> {
    let values: Vec<i32> = (0..WORD as u32).map(|bit| 1i32 << bit).collect();
    K::int_from_data(TensorData::new(values, [1, WORD]), device)
}

#[derive(Debug, Clone)]
struct PackBits;

impl Operation for PackBits {
    const NAME: &'static str = "pack_bits";
    type Inputs = FloatMeta;
    type Outputs = IntMeta;

    fn outline<T: Tensors>(&self, tensor: &T::Float) -> IntMeta {
        IntMeta::new([words(&tensor.shape()), 1], DType::I32)
    }

    fn run<K: Kernels>(self, tensor: FloatTensor<K>) -> IntTensor<K> {
        let device = K::float_device(&tensor);
        let bools = get_device_settings::<K>(&device).bool_dtype;
        let (elements, words) = (tensor.shape().num_elements(), words(&tensor.shape()));
        let blocked = K::float_lower_equal_elem(tensor, Scalar::from(0.0f32), bools);
        let mask = K::bool_reshape(K::bool_not(blocked), Shape::new([elements]));
        let rest = words * WORD - elements;
        let whole = match rest {
            0 => mask,
            _ => {
                let zeros = K::bool_zeros(Shape::new([rest]), &device, bools);
                K::bool_cat(vec![mask, zeros], 0)
            }
        };
        let ints = K::bool_into_int(whole, IntDType::I32);
        let ints = K::int_reshape(ints, Shape::new([words, WORD]));
        K::int_sum_dim(K::int_mul(ints, values::<K>(&device)), 1)
    }
}

#[derive(Debug, Clone)]
struct UnpackBits {
    shape: Shape,
    dtype: FloatDType,
}

impl Operation for UnpackBits {
    const NAME: &'static str = "unpack_bits";
    type Inputs = IntMeta;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, _words: &T::Int) -> FloatMeta {
        FloatMeta::new(self.shape.clone(), self.dtype)
    }

    fn run<K: Kernels>(self, of_words: IntTensor<K>) -> FloatTensor<K> {
        let device = K::int_device(&of_words);
        let bools = get_device_settings::<K>(&device).bool_dtype;
        let (elements, words) = (self.shape.num_elements(), words(&self.shape));
        let spread = K::int_expand(of_words, Shape::new([words, WORD]));
        let bits = K::bitwise_and(
            spread,
            K::int_expand(values::<K>(&device), Shape::new([words, WORD])),
        );
        let mask = K::int_not_equal_elem(bits, Scalar::from(0i32), bools);
        let mask = K::bool_reshape(mask, Shape::new([words * WORD]));
        let mask = K::bool_slice(mask, &[Slice::from(0..elements)]);
        K::bool_into_float(K::bool_reshape(mask, self.shape), self.dtype)
    }
}
