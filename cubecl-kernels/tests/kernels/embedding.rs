//! The gradient of an embedding's table, to the bit.

use cubecl_kernels::reference;

#[test]
fn the_reference_adds_the_rows_of_each_index() {
    let indices = [1, 3, -1, 1, 4, 0];
    let gradient: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let table = reference::embedding_gradient(&indices, &gradient, 4, 2);
    assert_eq!(table, [10.0, 11.0, 6.0, 8.0, 0.0, 0.0, 2.0, 3.0]);
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl::{ir::StorageType, std::tensor::TensorHandle};
    use cubecl_kernels::{KernelError, embedding::embedding_gradient, shape::MatrixShape};

    use super::*;
    use crate::{
        device::{
            Client, Tensor, assert_same_floats, client, drawn, dtype, float_types, read_float,
            rounded, upload, upload_i32, upload_with_offset,
        },
        random::Random,
    };

    /// The types of indices that this device has.
    fn integer_types(client: &Client) -> Vec<StorageType> {
        [dtype::<i32>(), dtype::<i64>(), dtype::<u32>()]
            .into_iter()
            .filter(|&integer| client.features().supports_type(integer))
            .collect()
    }

    fn upload_indices(client: &Client, indices: &[i64], integer: StorageType) -> Tensor {
        let mut bytes: Vec<u8> = if integer == dtype::<i64>() {
            bytemuck::cast_slice(indices).to_vec()
        } else {
            let indices: Vec<i32> = indices.iter().map(|&index| index as i32).collect();
            bytemuck::cast_slice(&indices).to_vec()
        };
        bytes.resize(bytes.len().max(16), 0);
        let handle = client.create_from_slice(&bytes);
        TensorHandle::new_contiguous(vec![indices.len()], handle, integer)
    }

    #[track_caller]
    fn check(indices: &[i64], gradient: &[f32], rows: usize, float: StorageType, what: &str) {
        let client = client();
        let tokens = indices.len();
        let cols = gradient.len().checked_div(tokens).unwrap_or(5);
        let gradient = rounded(gradient, float);
        let expected = reference::embedding_gradient(indices, &gradient, rows, cols);
        let expected = rounded(&expected, float);
        let tensor = upload(&client, &gradient, &[tokens, cols], float);
        for integer in integer_types(&client) {
            let indices = upload_indices(&client, indices, integer);
            let table = embedding_gradient(&client, &indices, &tensor, rows).expect("tokens");
            assert_eq!(table.shape()[..], [rows, cols]);
            assert_eq!(table.dtype, float);
            let what = format!("{what}: {integer}, {float} {tokens} x {cols} of {rows} rows");
            assert_same_floats(&read_float(&client, &table), &expected, &what);
        }
    }

    /// Numbers of tokens and rows that are and are no multiples of what a cube takes, and columns with vectors of every
    /// width, more than a cube takes, and single ones.
    const SHAPES: [(usize, usize, usize); 12] = [
        (1, 1, 1),
        (1, 7, 3),
        (2, 1, 16),
        (31, 5, 4),
        (33, 100, 6),
        (300, 17, 129),
        (777, 50, 768),
        (2048, 500, 7),
        (2049, 3, 8),
        (5000, 40_000, 2),
        (64, 9, 4096),
        (40, 30, 2061),
    ];

    #[test]
    fn equals_the_reference() {
        let mut random = Random::fresh();
        for float in drawn(&mut random, float_types(&client()), 1) {
            for (tokens, rows, cols) in drawn(&mut random, SHAPES, 5) {
                let indices: Vec<i64> = (0..tokens).map(|_| random.index(rows) as i64).collect();
                let gradient = random.with_outliers(tokens * cols);
                check(&indices, &gradient, rows, float, "uniform");
            }
        }
    }

    /// Half of the tokens have one index, as the commonest words of a text do; others have neighbours.
    #[test]
    fn of_skewed_indices() {
        let mut random = Random::fresh();
        for float in drawn(&mut random, float_types(&client()), 1) {
            for (tokens, rows, cols) in [(500, 20, 96), (4100, 1000, 5), (97, 3, 768)] {
                let common = random.index(rows);
                let mut draw = || match random.uniform() < 0.5 {
                    true => common,
                    false => random.index(rows).min(random.index(rows)),
                };
                let indices: Vec<i64> = (0..tokens).map(|_| draw() as i64).collect();
                let gradient = random.with_outliers(tokens * cols);
                check(&indices, &gradient, rows, float, "skewed");
                let one = vec![common as i64; tokens];
                check(&one, &gradient, rows, float, "one index");
                let descending: Vec<i64> = (0..tokens)
                    .rev()
                    .map(|token| (token % rows) as i64)
                    .collect();
                check(&descending, &gradient, rows, float, "descending");
            }
        }
    }

    /// Zeros of both signs, denormals, NaN and infinities.
    #[test]
    fn of_special_values() {
        let mut random = Random::fresh();
        let (tokens, rows, cols) = (400, 150, 72);
        let indices: Vec<i64> = (0..tokens).map(|_| random.index(rows) as i64).collect();
        let shape = MatrixShape::new(tokens, cols);
        let gradient: Vec<f32> = random
            .with_special_values(shape)
            .into_iter()
            // A device may keep denormals or not.
            .map(|x| {
                if x.abs() < 1e-30 {
                    0.0f32.copysign(x)
                } else {
                    x
                }
            })
            .collect();
        for float in drawn(&mut random, float_types(&client()), 1) {
            check(&indices, &gradient, rows, float, "special");
            check(&indices, &vec![-0.0; tokens * cols], rows, float, "zeros");
        }
    }

    /// An index that the table does not have must neither be written nor move other tokens.
    #[test]
    fn indices_outside_of_the_table_are_left_out() {
        let mut random = Random::fresh();
        let (tokens, rows, cols) = (600, 64, 24);
        // As i32 and as u32 they are outside too.
        let outside = [-1, rows as i64, -2_000_000_000, i64::from(i32::MAX), -64];
        let indices: Vec<i64> = (0..tokens)
            .map(|_| match random.uniform() < 0.3 {
                true => outside[random.index(outside.len())],
                false => random.index(rows) as i64,
            })
            .collect();
        let gradient = random.with_outliers(tokens * cols);
        check(&indices, &gradient, rows, dtype::<f32>(), "some outside");
        check(
            &[-1; 40],
            &gradient[..40 * cols],
            rows,
            dtype::<f32>(),
            "all outside",
        );
        let client = client();
        if integer_types(&client).contains(&dtype::<i64>()) {
            // Indices that 32 bits would take for rows.
            let indices: Vec<i64> = (0..8)
                .map(|index| (1 << 32) * (index % 2) + index)
                .collect();
            let tensor = upload(&client, &gradient[..8 * cols], &[8, cols], dtype::<f32>());
            let expected = reference::embedding_gradient(&indices, &gradient, rows, cols);
            let indices = upload_indices(&client, &indices, dtype::<i64>());
            let table = embedding_gradient(&client, &indices, &tensor, rows).expect("tokens");
            assert_same_floats(&read_float(&client, &table), &expected, "64 bits");
        }
    }

    #[test]
    fn nothing_and_rows_without_columns() {
        for float in float_types(&client()) {
            check(&[], &[], 7, float, "no token");
        }
        let client = client();
        let (indices, gradient) = (
            upload_i32(&client, &[0, 1, 0], &[3]),
            upload(&client, &[1.0; 6], &[3, 2], dtype::<f32>()),
        );
        let table = embedding_gradient(&client, &indices, &gradient, 0).expect("tokens");
        assert_eq!(table.shape()[..], [0, 2]);
        let no_cols = upload(&client, &[], &[3, 0], dtype::<f32>());
        let table = embedding_gradient(&client, &indices, &no_cols, 4).expect("tokens");
        assert_eq!(table.shape()[..], [4, 0]);
    }

    #[test]
    fn reads_what_starts_inside_of_a_buffer() {
        let (client, mut random) = (client(), Random::fresh());
        for float in drawn(&mut random, float_types(&client), 1) {
            for cols in [13, 96] {
                let indices: Vec<i64> = (0..50).map(|_| random.index(9) as i64).collect();
                let gradient = rounded(&random.with_outliers(50 * cols), float);
                let expected = reference::embedding_gradient(&indices, &gradient, 9, cols);
                let indices = upload_indices(&client, &indices, dtype::<i32>());
                let tensor = upload_with_offset(&client, &gradient, &[50, cols], float);
                let table = embedding_gradient(&client, &indices, &tensor, 9).expect("tokens");
                let what = format!("{float} {cols}");
                let found = read_float(&client, &table);
                assert_same_floats(&found, &rounded(&expected, float), &what);
            }
        }
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let indices = upload_i32(&client, &[0, 1, 0], &[3]);
        let matrix = |shape: &[usize]| upload(&client, &[1.0; 12], shape, dtype::<f32>());
        let gradient = matrix(&[3, 4]);
        let transposed = TensorHandle::new(
            matrix(&[4, 3]).handle,
            vec![3, 4],
            vec![1, 3],
            dtype::<f32>(),
        );
        let spread = TensorHandle::new(indices.handle.clone(), vec![2], vec![2], dtype::<i32>());
        let error = |indices: &Tensor, gradient: &Tensor, rows| {
            embedding_gradient(&client, indices, gradient, rows).unwrap_err()
        };
        for (indices, gradient, rows) in [
            (&indices, &matrix(&[4, 3]), 2),
            (&indices, &matrix(&[12]), 2),
            (&indices, &matrix(&[3, 2, 2]), 2),
            (&upload_i32(&client, &[0; 3], &[3, 1]), &gradient, 2),
            (&indices, &transposed, 2),
            (&spread, &matrix(&[2, 6]), 2),
            (&indices, &gradient, 1 << 29),
            (&indices, &gradient, usize::MAX),
        ] {
            let error = error(indices, gradient, rows);
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        }
        for (indices, gradient) in [
            (&upload(&client, &[0.0; 3], &[3], dtype::<f32>()), &gradient),
            (&indices, &upload_i32(&client, &[0; 12], &[3, 4])),
        ] {
            let error = error(indices, gradient, 2);
            assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        }
    }
}
