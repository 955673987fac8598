//! Largest magnitudes and histograms, counted exactly.

use cubecl_kernels::{
    host,
    magnitude::{BINS, TINY, ZEROS},
    reference,
    shape::MatrixShape,
};

use crate::random::Random;

const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 17], [127, 129], [1, 40_003], [300, 516]];

#[test]
fn bins_are_the_octaves_below_the_largest() {
    let (absmax, bins) =
        reference::magnitudes(&[-6.0, 4.0, 3.9, 0.75, 0.0, 2f32.powi(-100), 1e-40]);
    let mut expected = [0; BINS];
    for (bin, count) in [(0, 2), (1, 1), (3, 1), (TINY, 2), (ZEROS, 1)] {
        expected[bin] = count;
    }
    assert_eq!((absmax, bins), (6.0, expected));
}

#[test]
fn what_is_not_finite_is_the_largest() {
    let (absmax, bins) = reference::magnitudes(&[1.0, f32::INFINITY, 2.0, f32::NAN]);
    assert!(absmax.is_nan());
    assert_eq!(bins[0], 2, "NaN and infinity share an exponent");
    let (absmax, _) = reference::magnitudes(&[1.0, f32::NEG_INFINITY]);
    assert_eq!(absmax, f32::INFINITY);
}

#[test]
fn nothing_has_no_magnitudes() {
    assert_eq!(reference::magnitudes(&[]), (0.0, [0; BINS]));
    assert_eq!(host::magnitudes(&[]), (0.0, [0; BINS]));
}

#[test]
fn the_host_counts_like_the_reference() {
    let mut random = Random::fresh();
    for [rows, cols] in SHAPES {
        let x = random.with_special_values(MatrixShape::new(rows, cols));
        let (absmax, bins) = reference::magnitudes(&x);
        let (on_host, of_host) = host::magnitudes(&x);
        assert_eq!(on_host.to_bits(), absmax.to_bits());
        assert_eq!(of_host, bins);
        assert_eq!(bins.iter().sum::<u32>() as usize, rows * cols);
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl_kernels::magnitude::magnitudes;

    use super::*;
    use crate::device::{Memory, client, drawn, dtype, float_types, read, rounded, upload_matrix};

    const MEMORY: [Memory; 4] = [
        Memory::Contiguous,
        Memory::Transposed,
        Memory::Sliced,
        Memory::SlicedAligned,
    ];

    #[test]
    fn equal_the_reference() {
        let (client, mut random) = (client(), Random::fresh());
        let mut memories = MEMORY.into_iter().cycle();
        for float in drawn(&mut random, float_types(&client), 1) {
            for [rows, cols] in SHAPES {
                let shape = MatrixShape::new(rows, cols);
                for special in [false, true] {
                    let memory = memories.next().expect("it goes round");
                    let x = match special {
                        true => random.with_special_values(shape),
                        false => random.with_outliers(shape.num_elements()),
                    };
                    let tensor = upload_matrix(&client, &x, shape, float, memory);
                    let found = magnitudes(&client, &tensor).expect("a matrix");
                    let (absmax, bins) = reference::magnitudes(&rounded(&x, float));
                    let what = format!("{float} {shape:?} {memory:?}");
                    let on_device = read::<f32>(&client, &found.absmax)[0];
                    let same = on_device == absmax || on_device.is_nan() && absmax.is_nan();
                    assert!(same, "{what}: {on_device:e} instead of {absmax:e}");
                    assert_eq!(read::<u32>(&client, &found.histogram), bins, "{what}");
                }
            }
        }
    }

    #[test]
    fn every_layout_in_memory_counts_alike() {
        let (client, mut random) = (client(), Random::fresh());
        let shape = MatrixShape::new(65, 136);
        let x = random.with_special_values(shape);
        let (_, bins) = reference::magnitudes(&x);
        for memory in MEMORY {
            let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), memory);
            let found = magnitudes(&client, &tensor).expect("a matrix");
            assert_eq!(read::<u32>(&client, &found.histogram), bins, "{memory:?}");
        }
    }

    #[test]
    fn an_empty_matrix_and_a_batch() {
        let client = client();
        let empty = upload_matrix(
            &client,
            &[],
            MatrixShape::new(0, 5),
            dtype::<f32>(),
            Memory::Contiguous,
        );
        let found = magnitudes(&client, &empty).expect("a matrix");
        assert_eq!(read::<f32>(&client, &found.absmax), [0.0]);
        assert_eq!(read::<u32>(&client, &found.histogram), [0; BINS]);
        let batch = MatrixShape::batched(2, 3, 4);
        let batch = upload_matrix(
            &client,
            &[1.0; 24],
            batch,
            dtype::<f32>(),
            Memory::Contiguous,
        );
        let error = magnitudes(&client, &batch)
            .expect_err("a batch")
            .to_string();
        assert!(
            error.contains("[2, 3, 4]") && error.contains("pass a matrix"),
            "{error}"
        );
    }
}
