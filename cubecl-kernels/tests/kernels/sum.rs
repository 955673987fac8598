//! Sums and means, against those in FP64.

use crate::{
    device::{client, dtype, float_types, read, upload, upload_u8},
    random::Random,
};
use cubecl_kernels::{
    KernelError,
    sum::{Reduction, sum},
};

const LENGTHS: [usize; 10] = [0, 1, 2, 255, 257, 2048, 2049, 16_384, 16_385, 300_001];

#[test]
fn sums_and_means_are_those_of_fp64() {
    let (client, mut random) = (client(), Random::fresh());
    let floats = float_types(&client).into_iter();
    for (len, float) in floats.flat_map(|float| LENGTHS.map(|len| (len, float))) {
        // Numbers that all of them hold.
        let x: Vec<f32> = (0..len)
            .map(|_| (32.0 * random.normal()).round() / 32.0)
            .collect();
        let tensor = upload(&client, &x, &[len], float);
        let of = |reduction| {
            let sum = sum(&client, &tensor, reduction).expect("a tensor");
            assert_eq!(sum.shape()[..], [1]);
            read::<f32>(&client, &sum)[0]
        };
        let found = [of(Reduction::Sum), of(Reduction::Mean)];
        assert_eq!(found[0].to_bits(), of(Reduction::Sum).to_bits(), "{len}");
        let numbers = || x.iter().map(|it| f64::from(*it));
        let (total, size): (f64, f64) = (numbers().sum(), numbers().map(f64::abs).sum());
        // At most 64 roundings of a unit and 32 of a cube, of two passes.
        let bound = 2.0 * 96.0 * size * f64::from(f32::EPSILON) / 2.0;
        assert!((f64::from(found[0]) - total).abs() <= bound, "{len}");
        match len {
            0 => assert!(found[0] == 0.0 && found[1].is_nan()),
            _ => {
                let mean = total / len as f64;
                let bound = bound / len as f64 + 4.0 * mean.abs() * f64::from(f32::EPSILON);
                assert!((f64::from(found[1]) - mean).abs() <= bound, "{len}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays() {
    let client = client();
    for (special, at) in [
        (f32::NAN, 0),
        (f32::INFINITY, 16_385),
        (f32::NEG_INFINITY, 20_000),
    ] {
        let mut x = vec![1.0; 20_001];
        x[at] = special;
        let tensor = upload(&client, &x, &[3, 6667], dtype::<f32>());
        for reduction in [Reduction::Sum, Reduction::Mean] {
            let found = read::<f32>(
                &client,
                &sum(&client, &tensor, reduction).expect("a tensor"),
            )[0];
            assert!(
                found == special || found.is_nan() && special.is_nan(),
                "{found}"
            );
        }
    }
}

#[test]
fn bad_input_is_refused() {
    let client = client();
    let bytes = upload_u8(&client, &[1; 4], &[4]);
    let mut turned = upload(&client, &[1.0; 6], &[2, 3], dtype::<f32>());
    turned.metadata.swap(0, 1);
    let refused = |tensor| sum(&client, &tensor, Reduction::Sum).expect_err("bad input");
    assert!(matches!(refused(bytes), KernelError::Dtype { .. }));
    assert!(matches!(refused(turned), KernelError::Shape { .. }));
}
