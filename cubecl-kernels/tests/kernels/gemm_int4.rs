//! Products of packed INT4 matrices against sums of their integers.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    KernelError,
    gemm::gemm_int4,
    granularity::Granularity,
    layout::Layout,
    number::Number,
    quantize::{QuantizeSpec, quantize},
    reference,
    shape::MatrixShape,
};

use crate::{
    device::{
        Client, Memory, assert_same_floats, client, dtype, float_types, read_float, rounded,
        upload, upload_matrix,
    },
    random::Random,
};

const SPEC: QuantizeSpec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);

/// A batch of pairs of matrices, and their product.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

/// The exact sum, times the product of the scales, plus the bias, rounded once. A scale of NaN makes NaN of all.
#[test]
fn equals_the_reference() {
    let client = client();
    let mut random = Random::fresh();
    let sizes = |batch, m, n, k| Sizes { batch, m, n, k };
    let cases = [
        (sizes(1, 128, 128, 128), false),
        (sizes(1, 1, 1, 32), false),
        (sizes(3, 100, 70, 96), false),
        (sizes(1, 65, 257, 1056), false),
        (sizes(2, 20, 40, 64), true),
    ];
    for (sizes, has_nan) in cases {
        for out in float_types(&client) {
            let Some(()) = check(&client, &mut random, sizes, has_nan, out) else {
                return;
            };
        }
    }
}

/// `None` where the device has no such product.
fn check(
    client: &Client,
    random: &mut Random,
    sizes: Sizes,
    has_nan: bool,
    out: StorageType,
) -> Option<()> {
    let Sizes { batch, m, n, k } = sizes;
    let [(a, of_a), (b, of_b)] = [m, n].map(|rows| {
        // All matrices lie below one another, as one.
        let shape = MatrixShape::new(batch * rows, k);
        let mut x = random.with_outliers(shape.num_elements());
        if has_nan {
            x[0] = f32::NAN;
        }
        let tensor = upload_matrix(client, &x, shape, dtype::<f32>(), Memory::Contiguous);
        let quantized = quantize(client, &tensor, &SPEC).expect("a matrix");
        let mut operand = quantized.int4_operand().expect("K in whole copies");
        let (values, dtype) = (operand.values.handle, operand.values.dtype);
        operand.values = TensorHandle::new_contiguous([batch, rows, k / 2], values, dtype);
        (operand, reference::quantize(&x, shape, &SPEC))
    });
    let bias: Vec<f32> = (0..n).map(|_| random.normal()).collect();
    let has_bias = random.index(2) == 1;
    let of_bias = upload(client, &bias, &[n], dtype::<f32>());
    let product = match gemm_int4(client, &a, &b, has_bias.then_some(&of_bias), out) {
        Ok(product) => product,
        Err(error @ KernelError::Unsupported { .. }) => {
            println!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let scale = of_a.scales[0] * of_b.scales[0];
    let mut expected = Vec::new();
    for (row, of_row) in of_a.values.chunks(k).enumerate() {
        for (col, bias) in bias.iter().enumerate() {
            let of_col = &of_b.values[(row / m * n + col) * k..][..k];
            let sum: i32 = of_row.iter().zip(of_col).map(|(a, b)| a * b).sum();
            let product = sum as f32 * scale;
            expected.push(if has_bias { product + bias } else { product });
        }
    }
    let what = format!("{sizes:?} {out}, bias: {has_bias}");
    assert_eq!(has_nan, expected.iter().all(|it| it.is_nan()), "{what}");
    assert_same_floats(
        &read_float(client, &product),
        &rounded(&expected, out),
        &what,
    );
    Some(())
}

/// W is quantized as `[K, N]`, and its transposed copy is an operand.
#[test]
fn a_transposed_copy_is_an_operand() {
    let client = client();
    let mut random = Random::fresh();
    let shape = MatrixShape::new(64, 24);
    let x: Vec<f32> = (0..shape.num_elements()).map(|_| random.normal()).collect();
    let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    let spec = SPEC.with_layout(Layout::Both);
    let quantized = quantize(&client, &tensor, &spec).expect("a matrix");
    let operand = quantized.int4_operand_transposed().expect("K of 64");
    assert_eq!(operand.values.shape().to_vec(), [24, 32]);
    // Its rows have 24 elements, which no whole copies hold.
    let error = quantized.int4_operand().expect_err("K of 24");
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    let missing = quantize(&client, &tensor, &SPEC).expect("a matrix");
    assert!(missing.int4_operand_transposed().is_err());
}
