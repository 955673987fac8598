//! The transposition of matrices of a byte an element, to the byte.

use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{KernelError, reference, shape::MatrixShape, transpose::transpose_bytes};

use crate::{
    device::{Tensor, client, dtype, read, upload},
    random::Random,
};

fn tensor(bytes: &[i8], shape: &[usize]) -> Tensor {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().max(16), 0);
    TensorHandle::new_contiguous(
        shape.to_vec(),
        client().create_from_slice(bytemuck::cast_slice(&bytes)),
        dtype::<i8>(),
    )
}

#[test]
fn equals_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    for (rows, cols) in [
        (1, 1),
        (3, 17),
        (127, 129),
        (132, 260),
        (16, 400),
        (272, 144),
        (130, 128),
        (128, 130),
    ] {
        for batch in [1, 3] {
            let shape = MatrixShape::batched(batch, rows, cols);
            let values: Vec<i8> = (0..shape.num_elements())
                .map(|_| (random.index(256) as i32 - 128) as i8)
                .collect();
            let transposed = transpose_bytes(&client, &tensor(&values, &[batch, rows, cols]))
                .expect("a contiguous matrix");
            let expected = reference::transpose(&values, shape);
            assert_eq!(transposed.shape().to_vec(), [batch, cols, rows]);
            assert!(read::<i8>(&client, &transposed) == expected, "{shape:?}");

            let mut codes = tensor(&values, &[batch, rows, cols]);
            codes.dtype = dtype::<u8>();
            let transposed = transpose_bytes(&client, &codes).expect("a contiguous matrix");
            let expected: Vec<u8> = expected.iter().map(|&value| value as u8).collect();
            assert!(
                read::<u8>(&client, &transposed) == expected,
                "{shape:?}, u8"
            );
        }
    }
}

#[test]
fn rank_two_and_empty_matrices() {
    let client = client();
    let transposed = transpose_bytes(&client, &tensor(&[1, 2, 3, 4, 5, 6], &[2, 3]));
    let transposed = transposed.expect("a contiguous matrix");
    assert_eq!(transposed.shape().to_vec(), [3, 2]);
    assert_eq!(read::<i8>(&client, &transposed), [1, 4, 2, 5, 3, 6]);
    let empty = transpose_bytes(&client, &tensor(&[], &[0, 3])).expect("a contiguous matrix");
    assert_eq!(empty.shape().to_vec(), [3, 0]);
}

#[test]
fn rejects_other_types_ranks_and_strides() {
    let client = client();
    let floats = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
    let error = transpose_bytes(&client, &floats).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let vector = tensor(&[1; 8], &[8]);
    let error = transpose_bytes(&client, &vector).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let mut strided = tensor(&[1; 8], &[2, 4]);
    strided.metadata.swap(0, 1);
    let error = transpose_bytes(&client, &strided).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}
