//! The random Hadamard transform on a device, to the bit.

use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    KernelError, random_hadamard::random_hadamard, reference, shape::MatrixShape,
};

use crate::{
    device::{
        Memory, assert_same_floats, client, drawn, dtype, float_types, read, rounded, upload,
        upload_matrix,
    },
    random::Random,
};

#[test]
fn equals_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    for (rows, cols) in [(1, 1), (3, 17), (33, 16), (70, 31), (16, 260), (300, 48)] {
        for batch in [1, 3] {
            let shape = MatrixShape::batched(batch, rows, cols);
            let mut x = random.with_outliers(shape.num_elements());
            for value in [-0.0, f32::NAN, f32::INFINITY, 0.0] {
                let index = random.index(x.len());
                x[index] = value;
            }
            for float in drawn(&mut random, float_types(&client), 1) {
                let x = rounded(&x, float);
                let expected = reference::hadamard::random_hadamard(&x, [batch * rows, cols]);
                for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
                    let tensor = upload_matrix(&client, &x, shape, float, memory);
                    let transform = random_hadamard(&client, &tensor).expect("matrices");
                    let what = format!("{float} {shape:?} {memory:?}");
                    assert_same_floats(&read(&client, &transform), &expected, &what);
                    let (from, to) = (tensor.shape(), transform.shape());
                    assert_eq!(to.len(), from.len(), "{what}");
                    assert_eq!(to[to.len() - 1], cols.next_multiple_of(16), "{what}");
                }
            }
        }
    }
}

#[test]
fn of_nothing_is_nothing() {
    let client = client();
    for shape in [[0, 16], [5, 0]] {
        let handle = client.create_from_slice(&[0; 16]);
        let x = TensorHandle::new_contiguous(shape.to_vec(), handle, dtype::<f32>());
        let transform = random_hadamard(&client, &x).expect("a matrix");
        assert_eq!(transform.shape().to_vec(), shape);
    }
}

#[test]
fn refuses_what_is_no_matrix_of_floats() {
    let client = client();
    let vector = upload(&client, &[1.0; 16], &[16], dtype::<f32>());
    let error = random_hadamard(&client, &vector).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let mut integers = upload(&client, &[1.0; 16], &[1, 16], dtype::<f32>());
    integers.dtype = dtype::<i32>();
    let error = random_hadamard(&client, &integers).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    // One element for all rows: the result would have 2^33 of them.
    let handle = client.create_from_slice(&[0; 16]);
    let many = TensorHandle::new(handle, vec![1 << 29, 1], vec![0, 1], dtype::<f32>());
    let error = random_hadamard(&client, &many).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
}
