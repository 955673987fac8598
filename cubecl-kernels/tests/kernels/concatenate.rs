//! Many short tensors in one, against the same in host memory.

use cubecl_kernels::{KernelError, concatenate::concatenate};
use half::f16;

use crate::{
    device::{assert_same_floats, client, dtype, read, upload, upload_i32},
    random::Random,
};

/// As many tensors as a launch takes, one more and one less, more than several launches take, and one.
#[test]
fn elements_stand_in_the_order_of_the_tensors() {
    let (client, mut random) = (client(), Random::fresh());
    for count in [1, 2, 63, 64, 65, 200] {
        let values: Vec<Vec<f32>> = (0..count)
            .map(|index| {
                let len = [1, 1, 0, 3, 257, 600][random.index(6)];
                let special = [f32::NAN, f32::NEG_INFINITY, -0.0, 1e-40][index % 4];
                let normal = (1..len).map(|_| random.normal());
                normal.chain([special]).take(len).collect()
            })
            .collect();
        let floats: Vec<_> = values
            .iter()
            .map(|values| upload(&client, values, &[values.len()], dtype::<f32>()))
            .collect();
        let found = concatenate(&client, &floats).expect("tensors of floats");
        assert_eq!(found.shape()[..], [values.concat().len()]);
        let found = read::<f32>(&client, &found);
        assert_same_floats(&found, &values.concat(), &format!("{count} tensors"));
        let bits: Vec<Vec<i32>> = values
            .iter()
            .map(|values| values.iter().map(|it| it.to_bits().cast_signed()).collect())
            .collect();
        let integers: Vec<_> = bits
            .iter()
            .map(|values| upload_i32(&client, values, &[1, values.len()]))
            .collect();
        let found = concatenate(&client, &integers).expect("tensors of integers");
        assert_eq!(read::<i32>(&client, &found), bits.concat());
    }
}

#[test]
fn others_are_refused() {
    let client = client();
    let floats = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
    let narrow = upload(&client, &[1.0; 6], &[2, 3], dtype::<f16>());
    let integers = upload_i32(&client, &[1; 6], &[6]);
    let mut turned = floats.clone();
    turned.metadata.swap(0, 1);
    let refused = |tensors: &[_]| concatenate(&client, tensors).expect_err("bad input");
    assert!(matches!(refused(&[]), KernelError::Shape { .. }));
    assert!(matches!(refused(&[narrow]), KernelError::Dtype { .. }));
    let mixed = refused(&[floats.clone(), integers]);
    assert!(matches!(mixed, KernelError::Dtype { .. }));
    assert!(matches!(
        refused(&[floats, turned]),
        KernelError::Shape { .. }
    ));
}
