//! Inputs that an operation cannot work on are answered with what was wrong.

use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    KernelError,
    delay_threshold::{DelayThreshold, delay_threshold},
    fallback::{FallbackResidual, FallbackState, quantize_fallback},
    gemm::{GemmOperand, Strategy, gemm},
    granularity::Granularity,
    layout::Layout,
    linear_input::quantize_linear_input,
    number::{Number, Signedness},
    quantize::{QuantizeSpec, Quantized, dequantize, quantize, unpack_int4},
    rounding::StochasticKey,
    scale::ScaleNumber,
    shape::MatrixShape,
};

use crate::device::{TestRuntime, client, dtype, upload, upload_i32};

const SPEC: QuantizeSpec = QuantizeSpec::int8(Granularity::Block(32));

#[test]
fn quantize_rejects() {
    let client = client();
    let vector = upload(&client, &[1.0; 8], &[8], dtype::<f32>());
    let matrix = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
    let integers = upload_i32(&client, &[1; 8], &[2, 4]);
    let error = quantize(&client, &vector, &SPEC).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let error = quantize(&client, &integers, &SPEC).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    for (number, granularity) in [
        (Number::Int8, Granularity::Block(48)),
        (Number::Int8, Granularity::Group(8)),
        (Number::Int10, Granularity::Group(24)),
        (Number::E2M1, Granularity::Block(256)),
        (Number::Square, Granularity::Token),
        (
            Number::DynamicExponent(Signedness::Unsigned),
            Granularity::Tensor,
        ),
    ] {
        let spec = QuantizeSpec {
            number,
            granularity,
            ..SPEC
        };
        let error = quantize(&client, &matrix, &spec).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    }
}

#[test]
fn dequantize_rejects() {
    let client = client();
    let matrix = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
    let quantized = quantize(&client, &matrix, &SPEC).expect("a matrix");
    let float = dtype::<f32>();
    assert!(dequantize(&client, &quantized, float).is_ok());
    let error = dequantize(&client, &quantized, dtype::<i32>()).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let without_values = Quantized {
        values: None,
        ..quantized.clone()
    };
    let error = dequantize(&client, &without_values, float).unwrap_err();
    assert!(error.to_string().contains("no copy"), "{error}");
    let of_another_type = Quantized {
        values: Some(matrix.clone()),
        ..quantized.clone()
    };
    let error = dequantize(&client, &of_another_type, float).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    // Kernels would read outside of the values, or of the scales.
    let rows_of_another = Quantized {
        shape: MatrixShape::new(3, 4),
        ..quantized.clone()
    };
    let scales_of_another = Quantized {
        granularity: Granularity::Token,
        ..quantized.clone()
    };
    for wrong in [rows_of_another, scales_of_another] {
        let error = dequantize(&client, &wrong, float).unwrap_err();
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }
    let without_tensor_scale = Quantized {
        scale: ScaleNumber::E4M3,
        scales: TensorHandle::new_contiguous(
            vec![1, 1],
            quantized.scales.handle.clone(),
            dtype::<u8>(),
        ),
        ..quantized.clone()
    };
    let error = dequantize(&client, &without_tensor_scale, float).unwrap_err();
    assert!(error.to_string().contains("tensor scales None"), "{error}");
    let scales_of_another_type = Quantized {
        scale: ScaleNumber::E8M0,
        ..quantized.clone()
    };
    let error = dequantize(&client, &scales_of_another_type, float).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let error = unpack_int4(&client, &quantized).unwrap_err();
    assert!(error.to_string().contains("INT4"), "{error}");
    let claims_to_be_int4 = Quantized {
        number: Number::Int4,
        ..quantized.clone()
    };
    let error = unpack_int4(&client, &claims_to_be_int4).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let spec = QuantizeSpec::new(Number::Int4, Granularity::Tensor);
    let int4 = quantize(&client, &matrix, &spec).expect("a matrix");
    let more_than_its_copy_has = Quantized {
        shape: MatrixShape::batched(3, int4.shape.rows, int4.shape.cols),
        ..int4
    };
    let error = unpack_int4(&client, &more_than_its_copy_has).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let blocks_of_nothing = Quantized {
        granularity: Granularity::Block(0),
        ..quantized
    };
    let error = dequantize(&client, &blocks_of_nothing, float).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}

#[test]
fn fallback_and_threshold_reject() {
    let client = client();
    let matrix = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
    let thresholds = upload(&client, &[1.0; 2], &[2], dtype::<f32>());
    let counts = upload_i32(&client, &[0; 4], &[2, 2]);
    let error = quantize_fallback(
        &client,
        &matrix,
        32,
        Layout::RowMajor,
        &thresholds,
        2,
        &counts,
    )
    .unwrap_err();
    assert!(error.to_string().contains("layer 2"), "{error}");
    let good = DelayThreshold {
        r_min: 0.1,
        r_max: 0.3,
        alpha: 1.3,
        alpha_min: 1.001,
    };
    let step = |moves, config| {
        delay_threshold(&client, &thresholds, moves, &counts, &thresholds, config).unwrap_err()
    };
    for config in [
        DelayThreshold { r_min: 0.4, ..good },
        DelayThreshold { alpha: 1.0, ..good },
        DelayThreshold {
            alpha_min: 1.0,
            ..good
        },
        DelayThreshold {
            alpha_min: 1.4,
            ..good
        },
        DelayThreshold {
            alpha_min: f32::NAN,
            ..good
        },
    ] {
        let error = step(&thresholds, config);
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    }
    let error = step(&matrix, good);
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let error = step(&counts, good);
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
}

#[test]
fn linear_input_rejects() {
    let client = client();
    let key = Some(StochasticKey { seed: 1, stream: 2 });
    let vector = upload(&client, &[1.0; 8], &[8], dtype::<f32>());
    let matrix = upload(&client, &[1.0; 8], &[2, 4], dtype::<f32>());
    let counts = upload_i32(&client, &[0; 4], &[2, 2]);
    let error = quantize_linear_input(&client, &vector, 32, key, None).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    let error = quantize_linear_input(&client, &matrix, 48, key, None).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    let error = quantize_linear_input(&client, &counts, 32, key, None).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let state = FallbackState {
        thresholds: &vector,
        layer: 0,
        counts: &counts,
    };
    let error = quantize_linear_input(&client, &matrix, 32, key, Some(state)).unwrap_err();
    assert!(error.to_string().contains("layers"), "{error}");
}

#[test]
fn gemm_rejects() {
    let client = client();
    let operand = |shape: &[usize], granularity| {
        let x = upload(&client, &[1.0; 64 * 64], shape, dtype::<f32>());
        let spec = QuantizeSpec {
            granularity,
            ..SPEC
        };
        let quantized = quantize(&client, &x, &spec).expect("a matrix");
        assert!(quantized.operand_transposed().is_err());
        quantized.operand().expect("a row-major copy")
    };
    let block = Granularity::Block(32);
    let (a, b) = (operand(&[64, 64], block), operand(&[128, 32], block));
    let product = |a, b, dtype| gemm(&client, a, b, None, None, dtype, Strategy::Portable);
    let error = product(&a, &b, dtype::<f32>()).unwrap_err();
    assert!(error.to_string().contains("[64, 64]"), "{error}");
    let error = product(&a, &a, dtype::<i32>()).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let batch = |size| operand(&[size, 16, 64], block);
    for (of_a, of_b) in [(1, 2), (2, 3)] {
        let (a, b) = (batch(of_a), batch(of_b));
        let error = gemm(
            &client,
            &a,
            &b,
            None,
            None,
            dtype::<f32>(),
            Strategy::Portable,
        );
        let error = error.unwrap_err();
        assert!(error.to_string().contains("batch"), "{error}");
    }
    let x = upload(&client, &[1.0; 64 * 64], &[64, 64], dtype::<f32>());
    for spec in [
        QuantizeSpec::new(Number::Int4, block),
        QuantizeSpec::new(Number::E4M3, block),
        SPEC.with_scale(ScaleNumber::E8M0),
    ] {
        let quantized = quantize(&client, &x, &spec).expect("a matrix");
        let error = quantized.operand().unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    }
    let channel = operand(&[64, 64], Granularity::Channel);
    let error = product(&a, &channel, dtype::<f32>()).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}

#[test]
fn gemm_rejects_residuals() {
    let client = client();
    let x = upload(&client, &[1.0; 64 * 64], &[64, 64], dtype::<f32>());
    let thresholds = upload(&client, &[0.5], &[1], dtype::<f32>());
    let counts = upload_i32(&client, &[0; 2], &[1, 2]);
    let row_major = Layout::RowMajor;
    let quantized = quantize_fallback(&client, &x, 64, row_major, &thresholds, 0, &counts);
    let quantized = quantized.expect("a matrix");
    let a = quantized.base.operand().expect("a row-major copy");
    let product = |a: &GemmOperand<_>, residual: &FallbackResidual<TestRuntime>| {
        let float = dtype::<f32>();
        gemm(
            &client,
            a,
            a,
            Some(residual),
            None,
            float,
            Strategy::Portable,
        )
    };
    assert!(product(&a, &quantized.residual).is_ok());
    let flags_of_another_type = FallbackResidual {
        flags: quantized.residual.scales.clone(),
        ..quantized.residual.clone()
    };
    let error = product(&a, &flags_of_another_type).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    let of_other_blocks = FallbackResidual {
        block: 32,
        ..quantized.residual.clone()
    };
    let error = product(&a, &of_other_blocks).unwrap_err();
    assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    // A tile's rows begin inside of such blocks, where kernels look for no flag.
    let uneven = GemmOperand {
        rows_per_scale: 80,
        depth_per_scale: 80,
        ..a
    };
    let of_uneven = FallbackResidual {
        block: 80,
        ..quantized.residual
    };
    let error = product(&uneven, &of_uneven).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}
