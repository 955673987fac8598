//! The smallest and the largest of scales, against the same in host memory.

use cubecl_kernels::{KernelError, extremes::extremes};

use crate::{
    device::{client, dtype, read, upload, upload_i32, upload_u8},
    random::Random,
};

/// Counts that one cube reads, several, and more than there are cubes for.
const COUNTS: [usize; 6] = [1, 2, 255, 4097, 70_001, 1_200_000];

fn expected(values: &[f32], of_scales: f32) -> [f32; 3] {
    [
        values.iter().copied().fold(f32::INFINITY, f32::min),
        values.iter().copied().fold(0.0, f32::max),
        of_scales,
    ]
}

#[test]
fn of_floats() {
    let (client, mut random) = (client(), Random::fresh());
    for count in COUNTS {
        let mut values: Vec<f32> = (0..count).map(|_| random.normal().abs()).collect();
        if count > 2 {
            values[random.index(count)] = 1e-40;
            values[random.index(count)] = 3e38;
        }
        let handle = upload(&client, &values, &[1, count], dtype::<f32>());
        let found = extremes(&client, &handle, None).expect("scales");
        assert_eq!(
            read::<f32>(&client, &found),
            expected(&values, 1.0),
            "{count}"
        );
    }
}

#[test]
fn of_bytes_under_a_scale() {
    let (client, mut random) = (client(), Random::fresh());
    for count in COUNTS {
        let bytes: Vec<u8> = (0..count).map(|_| random.index(256) as u8).collect();
        let values: Vec<f32> = bytes.iter().copied().map(f32::from).collect();
        let scale = random.normal();
        let of_scales = upload(&client, &[scale], &[1], dtype::<f32>());
        let handle = upload_u8(&client, &bytes, &[count]);
        let found = extremes(&client, &handle, Some(&of_scales)).expect("scales");
        assert_eq!(
            read::<f32>(&client, &found),
            expected(&values, scale),
            "{count}"
        );
    }
}

#[test]
fn zero_is_the_smallest_and_nan_the_largest() {
    let client = client();
    let handle = upload(&client, &[f32::NAN, 2.0, 0.0, 1.0], &[4], dtype::<f32>());
    let found = extremes(&client, &handle, None).expect("scales");
    let [smallest, largest, one] = read::<f32>(&client, &found)[..] else {
        panic!("three numbers");
    };
    assert_eq!((smallest, one), (0.0, 1.0));
    assert!(largest.is_nan());
}

#[test]
fn others_are_refused() {
    let client = client();
    let none = upload(&client, &[], &[0], dtype::<f32>());
    let two = upload(&client, &[1.0; 2], &[2], dtype::<f32>());
    let integers = upload_i32(&client, &[1; 2], &[2]);
    let refused = |scales, of_scales| extremes(&client, scales, of_scales).expect_err("bad input");
    assert!(matches!(refused(&none, None), KernelError::Shape { .. }));
    assert!(matches!(
        refused(&two, Some(&two)),
        KernelError::Shape { .. }
    ));
    assert!(matches!(
        refused(&integers, None),
        KernelError::Dtype { .. }
    ));
}
