//! Products in the compute dtype: by a kernel of ours where the backend has one, by Burn's elsewhere.

use burn::{
    backend::{Autodiff, Flex},
    tensor::{DType, backend::AutodiffBackend, module::linear},
};
use burn_quant_train::{QuantTrain, data::DataBackend, recipe::MixedPrecision};
use half::{bf16, f16};
use quant_train_tests::{
    Rng,
    data::{floats, tensor},
    on_every_backend, supports,
};

on_every_backend! {
    linear_layers_in_the_compute_dtype_equal_fp32 => linear_layers;
    batched_products_in_the_compute_dtype_equal_fp32 => batched;
    unit_dimensions_between_permuted_and_cut_ones_do_not_count => unit_dimensions;
}

/// Numbers that BF16 holds, and of this size FP16 too, so that both sides compute on the same ones.
fn draw(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| bf16::from_f64(rng.normal()).to_f32())
        .collect()
}

#[track_caller]
fn assert_close(actual: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32, what: &str) {
    for (part, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let largest = expected
            .iter()
            .fold(0.0f32, |largest, x| largest.max(x.abs()));
        assert!(largest > 0.0, "{what}: a reference that is not all zeros");
        assert_eq!(actual.len(), expected.len(), "{what}");
        for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
            assert!(
                (a - e).abs() <= tolerance * largest,
                "{what}: part {part}, [{index}] {a} instead of {e}"
            );
        }
    }
}

/// How the rows of a batch are multiplied with one matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Linear,
    WithBias,
    /// By a product of tensors of one rank.
    Matmul,
}

/// Output, and gradients of all operands for the loss `sum(weights * output)`.
fn solve_linear<A: AutodiffBackend>(
    [x, w, bias, weights]: [&[f32]; 4],
    [batch, rows, k, n]: [usize; 4],
    form: Form,
) -> Vec<Vec<f32>> {
    let device = A::Device::default();
    let x = tensor::<A, 3>(x, [batch, rows, k], &device).require_grad();
    let w = tensor::<A, 2>(w, [k, n], &device).require_grad();
    let bias = tensor::<A, 1>(bias, [n], &device).require_grad();
    let y = match form {
        Form::Linear => linear(x.clone(), w.clone(), None),
        Form::WithBias => linear(x.clone(), w.clone(), Some(bias.clone())),
        Form::Matmul => x.clone().matmul(w.clone().unsqueeze()),
    };
    let weights = tensor::<A, 3>(weights, [batch, rows, n], &device);
    let grads = (y.clone().cast(DType::F32) * weights).sum().backward();
    let mut parts = vec![
        floats(&y),
        floats(&x.grad(&grads).expect("x")),
        floats(&w.grad(&grads).expect("w")),
    ];
    if form == Form::WithBias {
        parts.push(floats(&bias.grad(&grads).expect("bias")));
    }
    parts
}

fn solve_batched<A: AutodiffBackend>(
    [a, b, weights]: [&[f32]; 3],
    [batch, heads, m, k, n]: [usize; 5],
) -> Vec<Vec<f32>> {
    let device = A::Device::default();
    // Heads beside positions in memory, as attention has them.
    let a = tensor::<A, 4>(a, [batch, m, heads, k], &device).require_grad();
    let b = tensor::<A, 4>(b, [batch, n, heads, k], &device).require_grad();
    let y = a
        .clone()
        .swap_dims(1, 2)
        .matmul(b.clone().swap_dims(1, 2).transpose());
    let weights = tensor::<A, 4>(weights, [batch, heads, m, n], &device);
    let grads = (y.clone().cast(DType::F32) * weights).sum().backward();
    vec![
        floats(&y),
        floats(&a.grad(&grads).expect("a")),
        floats(&b.grad(&grads).expect("b")),
    ]
}

fn linear_layers<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let shapes = [
        [2, 40, 64, 96],
        [1, 7, 33, 5],
        [3, 1, 16, 8],
        [1, 300, 136, 264],
        [3, 5, 7, 9],
        [2, 128, 128, 128],
        // Burn's dW would sum over 32 rows of each batch.
        [4, 32, 512, 512],
        [4, 32, 512, 96],
    ];
    for shape in rng.drawn(shapes, 3) {
        let [batch, rows, k, n] = shape;
        let data = [batch * rows * k, k * n, n, batch * rows * n].map(|it| draw(&mut rng, it));
        let data = data.each_ref().map(Vec::as_slice);
        for form in [Form::Linear, Form::WithBias, Form::Matmul] {
            let expected = solve_linear::<Autodiff<Flex>>(data, shape, form);
            let what = format!("seed {seed}, {shape:?}, {form:?}");
            in_each_compute_dtype::<B>(&what, &expected, |dtype| match dtype {
                DType::BF16 => solve_linear::<Training<B, bf16>>(data, shape, form),
                DType::F16 => solve_linear::<Training<B, f16>>(data, shape, form),
                _ => solve_linear::<Training<B, f32>>(data, shape, form),
            });
        }
    }
}

fn batched<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let shapes = [[2, 3, 24, 16, 40], [1, 2, 5, 7, 9], [2, 1, 130, 64, 130]];
    for shape in rng.drawn(shapes, 1) {
        let [batch, heads, m, k, n] = shape;
        let sizes = [m * k, n * k, m * n].map(|it| batch * heads * it);
        let data = sizes.map(|it| draw(&mut rng, it));
        let data = data.each_ref().map(Vec::as_slice);
        let expected = solve_batched::<Autodiff<Flex>>(data, shape);
        let what = format!("seed {seed}, {shape:?}");
        in_each_compute_dtype::<B>(&what, &expected, |dtype| match dtype {
            DType::BF16 => solve_batched::<Training<B, bf16>>(data, shape),
            DType::F16 => solve_batched::<Training<B, f16>>(data, shape),
            _ => solve_batched::<Training<B, f32>>(data, shape),
        });
    }
}

/// Leading dimensions whose strides have nothing in common but a unit dimension between them.
fn unit_dimensions<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let data = [2 * 4 * 16 * 24, 4 * 3 * 16 * 24, 4 * 2 * 24 * 8].map(|it| draw(&mut rng, it));
    let data = data.each_ref().map(Vec::as_slice);
    fn solve<A: AutodiffBackend>([permuted, cut, rhs]: [&[f32]; 3]) -> Vec<Vec<f32>> {
        let device = A::Device::default();
        let permuted = tensor::<A, 5>(permuted, [2, 4, 1, 16, 24], &device);
        let cut = tensor::<A, 5>(cut, [4, 1, 3, 16, 24], &device);
        let rhs = tensor::<A, 5>(rhs, [4, 1, 2, 24, 8], &device);
        vec![
            floats(&permuted.permute([1, 2, 0, 3, 4]).matmul(rhs.clone())),
            floats(&cut.slice([0..4, 0..1, 0..2]).matmul(rhs)),
        ]
    }
    let expected = solve::<Autodiff<Flex>>(data);
    let what = format!("seed {seed}");
    in_each_compute_dtype::<B>(&what, &expected, |dtype| match dtype {
        DType::BF16 => solve::<Training<B, bf16>>(data),
        DType::F16 => solve::<Training<B, f16>>(data),
        _ => solve::<Training<B, f32>>(data),
    });
}

type Training<B, E> = QuantTrain<Autodiff<B>, MixedPrecision<E>>;

/// In the 16-bit dtypes that the backend has, and in FP32, which is TF32 where the device takes it for that.
fn in_each_compute_dtype<B: DataBackend>(
    what: &str,
    expected: &[Vec<f32>],
    solve: impl Fn(DType) -> Vec<Vec<f32>>,
) {
    let mut dtypes = vec![(DType::F16, 5e-3), (DType::BF16, 4e-2)];
    dtypes.retain(|(dtype, _)| supports::<B>(*dtype));
    let of_fp32 = if dtypes.is_empty() { 1e-4 } else { 5e-3 };
    dtypes.push((DType::F32, of_fp32));
    for (dtype, tolerance) in dtypes {
        let what = format!("{what}, {dtype:?}");
        assert_close(&solve(dtype), expected, tolerance, &what);
    }
}
