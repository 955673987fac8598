//! Seeded random data, and tensors to and from the host.

use std::sync::{Arc, OnceLock};

use burn::tensor::{
    DType, Int, Tensor, TensorData, TensorPrimitive,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use burn_quant_train::{
    layer::tag::Tag,
    optim::LayerBackend,
    recipe::{NAMES, Recipe},
};

/// A fresh seed, or that of `QUANT_TRAIN_TEST_SEED`.
pub fn seed() -> u64 {
    match std::env::var("QUANT_TRAIN_TEST_SEED") {
        Ok(seed) => seed.parse().expect("QUANT_TRAIN_TEST_SEED is a number"),
        Err(_) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.expect("the clock is past 1970").as_nanos() as u64
        }
    }
}

/// Tests a recipe; in a build for Vulkan, where each has kernels to compile, only if it is among the few that this
/// process draws, which says once which these are. `QUANT_TRAIN_TEST_ALL` asks for all, and so does a given seed.
pub fn if_drawn<R: Recipe>(test: impl FnOnce()) {
    const FEW: usize = 2;
    static DRAWN: OnceLock<Vec<&str>> = OnceLock::new();
    let drawn = DRAWN.get_or_init(|| {
        let few = match std::env::var_os("QUANT_TRAIN_TEST_SEED") {
            Some(_) => NAMES.len(),
            None => FEW,
        };
        let drawn = Rng::new(seed()).drawn(NAMES.iter().map(|name| name.as_str()), few);
        if drawn.len() < NAMES.len() {
            println!("skipped: recipes other than {}", drawn.join(", "));
        }
        drawn
    });
    if drawn.contains(&R::ROW.name) {
        test();
    }
}

/// True if the backend has this type. Says so where it has not, since a test then leaves something out.
pub fn supports<B: Backend>(dtype: DType) -> bool {
    let device = B::Device::default();
    let supported = B::supports_dtype(&device, dtype);
    if !supported {
        println!("skipped: no {dtype:?} on {}", B::name(&device));
    }
    supported
}

/// True of CUDA, where operations are fused and tuned, and products run on tensor cores.
pub fn is_cuda<B: Backend>() -> bool {
    B::name(&B::Device::default()).contains("cuda")
}

/// A bound of the relative error, in Frobenius' norm, of products of FP32 matrices, and of FP8. On CUDA tensor cores
/// read FP32 as TF32, which has 11 bits, and their sums of FP8 products keep about 14 bits.
pub fn float_product_error<B: Backend>() -> f64 {
    match is_cuda::<B>() {
        true => 1e-3,
        false => 5e-6,
    }
}

/// SplitMix64: every seed gives a sequence of its own.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * 2f64.powi(-53)
    }

    /// Uniform among `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Of cases that compile kernels of their own, all; in a build for Vulkan, whose driver may be software that
    /// compiles a kernel for seconds, a few of them. `QUANT_TRAIN_TEST_ALL` asks for all there too.
    pub fn drawn<T>(&mut self, cases: impl IntoIterator<Item = T>, few: usize) -> Vec<T> {
        let mut cases: Vec<T> = cases.into_iter().collect();
        if cfg!(feature = "vulkan") && std::env::var_os("QUANT_TRAIN_TEST_ALL").is_none() {
            while cases.len() > few {
                cases.remove(self.below(cases.len()));
            }
        }
        cases
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// This many standard normal numbers times `scale`.
    pub fn normals(&mut self, count: usize, scale: f64) -> Vec<f32> {
        (0..count).map(|_| (scale * self.normal()) as f32).collect()
    }

    /// Standard normal numbers that BF16 holds, and of this size FP16 too: backends of all dtypes compute on the same.
    pub fn normals_of_16_bits(&mut self, count: usize) -> Vec<f32> {
        let mut normal = || half::bf16::from_f64(self.normal()).to_f32();
        (0..count).map(|_| normal()).collect()
    }
}

/// A tensor of these values.
pub fn tensor<B: Backend, const D: usize>(
    values: &[f32],
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

/// The backend's own primitive of a float tensor.
pub fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// A float primitive as a tensor.
pub fn lifted<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The tag of a float tensor.
///
/// # Panics
///
/// If the tensor is quantized.
pub fn tag_of<B: LayerBackend, const D: usize>(tensor: &Tensor<B, D>) -> Arc<Tag<B::Base>> {
    let primitive = primitive(tensor.clone());
    B::tag(&primitive).expect("tensors have tags").clone()
}

/// The values of a float tensor, widened to `f32`.
pub fn floats<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

/// The values of a float primitive of rank `D`.
pub fn primitive_floats<B: Backend, const D: usize>(primitive: &FloatTensor<B>) -> Vec<f32> {
    floats(&lifted::<B, D>(primitive.clone()))
}

/// The values of an int primitive of rank 2.
pub fn primitive_ints<B: Backend>(primitive: &IntTensor<B>) -> Vec<i32> {
    let tensor = Tensor::<B, 2, Int>::from_primitive(primitive.clone());
    tensor.to_data().iter::<i32>().collect()
}

/// True if two lists hold the same bits, any NaN being like any other.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && first_difference(a, b).is_none()
}

/// Where two lists of the same length first differ in their bits, with the two values.
pub fn first_difference(a: &[f32], b: &[f32]) -> Option<(usize, f32, f32)> {
    assert_eq!(a.len(), b.len(), "lengths");
    a.iter()
        .zip(b)
        .position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()))
        .map(|index| (index, a[index], b[index]))
}

/// Length of a vector.
pub fn norm(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// The relative error in Frobenius' norm.
pub fn relative_error(actual: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(actual.len(), exact.len(), "lengths");
    let difference: Vec<f32> = actual.iter().zip(exact).map(|(a, b)| a - b).collect();
    norm(&difference) / norm(exact)
}

/// Cosine of the angle between two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "lengths");
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Each head `[batch, heads, sequence, width]` as often as `heads` query heads read it.
pub fn repeated<B: Backend>(tensor: Tensor<B, 4>, heads: usize) -> Tensor<B, 4> {
    let [batch, of_keys, sequence, width] = tensor.dims();
    tensor
        .reshape([batch, of_keys, 1, sequence, width])
        .expand([batch, of_keys, heads / of_keys, sequence, width])
        .reshape([batch, heads, sequence, width])
}

/// Asserts that each element is near, relative to the largest: results are rounded to a narrow dtype.
#[track_caller]
pub fn assert_near(what: &str, actual: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        let near = (a - e).abs() <= tolerance * largest;
        assert!(near, "{what}[{index}]: {a} instead of {e}");
    }
}
