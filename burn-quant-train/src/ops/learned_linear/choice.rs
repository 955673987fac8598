//! The choice of a transform's size (int4-hq-lss, Appendix A.5).

use burn_backend::{FloatDType, Shape, tensor::FloatTensor};

use crate::{
    data::{
        DataBackend, Kernels, Operation,
        learned_step::{HadamardSize, HadamardTransform, LearnedStep},
        read::floats,
        tensors::{Bundle, Change, FloatMeta, Outline, Tensors},
    },
    layer::HadamardChoice,
    ops::matrix::flatten,
    warning::warn_once,
};

/// Errors whose ratio is below this count as equal.
const CLOSE: f64 = 1.05;

/// The size of the transform of a layer with so many input features. Waits for the device where errors are compared.
pub(super) fn hadamard_size<B: DataBackend>(
    choice: HadamardChoice,
    features: usize,
    x: &FloatTensor<B>,
    weight: &FloatTensor<B>,
) -> HadamardSize {
    let wanted = match choice {
        HadamardChoice::SmallestError => HadamardSize::LARGEST,
        HadamardChoice::Order(order) => HadamardSize::new(order).expect("a setting in range"),
    };
    let largest = HadamardSize::largest(features, wanted);
    if largest != wanted {
        say_smaller(features, wanted, largest);
    }
    match choice {
        HadamardChoice::Order(_) => largest,
        HadamardChoice::SmallestError => smallest_error::<B>(largest, x, weight),
    }
}

fn smallest_error<B: DataBackend>(
    largest: HadamardSize,
    x: &FloatTensor<B>,
    weight: &FloatTensor<B>,
) -> HadamardSize {
    let sizes: Vec<_> = HadamardSize::all()
        .take_while(|size| *size <= largest)
        .collect();
    let operation = QuantizationErrors {
        sizes: sizes.clone(),
    };
    let inputs = Matrices {
        x: x.clone(),
        weight: weight.clone(),
    };
    let errors = floats::<B>(B::run(operation, inputs));
    let (pairs, _) = errors.as_chunks();
    let products = pairs
        .iter()
        .map(|[x, weight]| f64::from(*x) * f64::from(*weight));
    smallest_close_to_best(sizes, products.collect())
}

/// The smallest size whose error is within [`CLOSE`] of the smallest error. Where nothing is gained, as of matrices
/// without outliers, errors differ by chance only, and a larger transform costs more.
fn smallest_close_to_best(sizes: Vec<HadamardSize>, errors: Vec<f64>) -> HadamardSize {
    let best = errors.iter().copied().fold(f64::INFINITY, f64::min);
    let mut pairs = sizes.into_iter().zip(errors);
    let found = pairs.find(|(_, error)| *error <= CLOSE * best);
    // Errors are NaN where X or W holds NaN: then nothing is to be gained either.
    found.map_or(HadamardSize::IDENTITY, |(size, _)| size)
}

/// Warns once that a layer's inputs are no multiple of the blocks that were asked for.
fn say_smaller(features: usize, wanted: HadamardSize, largest: HadamardSize) {
    warn_once!(
        "quant-train: {features} features are no multiple of {}, so the Hadamard transform of their layer has blocks of {} at \
         most.",
        wanted.block(),
        largest.block(),
    );
}

/// The mean squared errors of X and W, quantized after transforms of these sizes by the step sizes of a cold start:
/// FP32 `[2 sizes]`, X and W in turn.
#[derive(Debug, Clone)]
struct QuantizationErrors {
    sizes: Vec<HadamardSize>,
}

#[derive(Debug, Clone)]
struct Matrices<T: Tensors> {
    /// `[.., K]`.
    x: T::Float,
    /// `[.., K, N]`.
    weight: T::Float,
}

impl Bundle for Matrices<Outline> {
    type On<T: Tensors> = Matrices<T>;

    fn rebuild<S: Tensors, T: Tensors>(
        matrices: Matrices<S>,
        change: &mut impl Change<S, T>,
    ) -> Matrices<T> {
        Matrices {
            x: change.float(matrices.x),
            weight: change.float(matrices.weight),
        }
    }
}

impl Operation for QuantizationErrors {
    const NAME: &'static str = "learned_linear_errors";
    type Inputs = Matrices<Outline>;
    type Outputs = FloatMeta;

    fn outline<T: Tensors>(&self, _inputs: &Matrices<T>) -> FloatMeta {
        FloatMeta::new([2 * self.sizes.len()], FloatDType::F32)
    }

    fn run<K: Kernels>(self, inputs: Matrices<K>) -> FloatTensor<K> {
        let x = flatten::<K>(inputs.x);
        let weight = flatten::<K>(inputs.weight);
        let errors = self.sizes.into_iter().flat_map(|size| {
            [
                error::<K>(&x, HadamardTransform::of_columns(size)),
                error::<K>(&weight, HadamardTransform::of_rows(size)),
            ]
        });
        K::float_cat(errors.collect(), 0)
    }
}

fn error<K: Kernels>(matrix: &FloatTensor<K>, transform: HadamardTransform) -> FloatTensor<K> {
    let device = K::float_device(matrix);
    let steps = K::float_ones(Shape::new([1]), &device, FloatDType::F32);
    let step = |steps| LearnedStep { steps, layer: 0 };
    let steps = K::cold_step(matrix.clone(), step(steps), transform);
    K::squared_error(matrix.clone(), &step(steps), transform)
}
