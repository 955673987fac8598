//! What is expected of a layer is what its products launch.

use std::collections::BTreeSet;

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use half::bf16;
use rstest::rstest;

use super::{ExpectedLayer, LayerOperands};
use crate::{
    device::storage,
    fallback::FallbackResidual,
    gemm::{Accumulation, Fp8Operand, GemmOperand, Strategy, gemm, gemm_float, gemm_fp8, hopper},
    number::Number,
    scale::ScaleNumber,
};

#[allow(dead_code, unreachable_pub, missing_docs)]
#[path = "../../../tests/compile/offline.rs"]
mod offline;

use offline::{OfflineCuda, sources_of};

type Client = ComputeClient<OfflineCuda>;

fn tensor(client: &Client, shape: &[usize], dtype: StorageType) -> TensorHandle<OfflineCuda> {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    TensorHandle::new_contiguous(shape.to_vec(), client.empty(bytes), dtype)
}

/// `[rows, depth]` in INT8 blocks of this shape.
fn int8(
    client: &Client,
    [rows, depth]: [usize; 2],
    [rows_per_scale, depth_per_scale]: [usize; 2],
) -> GemmOperand<OfflineCuda> {
    let scales = [
        rows.div_ceil(rows_per_scale),
        depth.div_ceil(depth_per_scale),
    ];
    GemmOperand {
        values: tensor(client, &[rows, depth], storage::<i8>()),
        scales: tensor(client, &scales, storage::<f32>()),
        rows_per_scale,
        depth_per_scale,
    }
}

fn fp8(client: &Client, shape: [usize; 2], number: Number) -> Fp8Operand<OfflineCuda> {
    Fp8Operand {
        values: tensor(client, &shape, storage::<u8>()),
        number,
        scales: tensor(client, &[1, 1], storage::<f32>()),
        scale: ScaleNumber::F32,
        rows_per_scale: shape[0],
        depth_per_scale: shape[1],
    }
}

/// The three products of a layer.
fn launch(client: &Client, layer: &ExpectedLayer) {
    let ExpectedLayer {
        rows,
        inputs,
        outputs,
        dtype,
        ..
    } = *layer;
    let wide = storage::<f32>();
    let products = [
        ([rows, outputs, inputs], dtype),
        ([rows, inputs, outputs], dtype),
        ([inputs, outputs, rows], wide),
    ];
    for (index, ([m, n, k], out)) in products.into_iter().enumerate() {
        match layer.operands {
            LayerOperands::Int8Blocks { side, fallback } => {
                let [a, b] = [m, n].map(|rows| int8(client, [rows, k], [side; 2]));
                let has_residual = [fallback[0], false, fallback[1]][index];
                let residual = has_residual.then(|| FallbackResidual {
                    values: a.values.clone(),
                    scales: a.scales.clone(),
                    flags: tensor(client, a.scales.shape(), storage::<u32>()),
                    block: side,
                });
                gemm(client, &a, &b, residual.as_ref(), None, out, Strategy::Auto)
            }
            LayerOperands::Int8Rows => {
                let [a, b] = [m, n].map(|rows| int8(client, [rows, k], [1, k]));
                gemm(client, &a, &b, None, None, out, Strategy::Auto)
            }
            LayerOperands::E4M3 {
                accumulation,
                of_gradients,
                gradient,
            } => {
                let accumulation = match index {
                    0 => accumulation,
                    _ => of_gradients,
                };
                let numbers = match index {
                    0 => [Number::E4M3; 2],
                    1 => [gradient, Number::E4M3],
                    _ => [Number::E4M3, gradient],
                };
                let [a, b] = [(m, numbers[0]), (n, numbers[1])];
                let [a, b] = [a, b].map(|(rows, number)| fp8(client, [rows, k], number));
                gemm_fp8(client, &a, &b, None, accumulation, out)
            }
            LayerOperands::Floats => {
                // Of matrices that lie in memory as [rows, inputs], [inputs, outputs] and [rows, outputs].
                let turned = |shape: [usize; 2]| {
                    let mut tensor = tensor(client, &shape, dtype);
                    tensor.metadata.swap(0, 1);
                    tensor
                };
                let a = match index {
                    0 | 1 => tensor(client, &[m, k], dtype),
                    _ => turned([k, m]),
                };
                let b = match index {
                    0 | 2 => turned([k, n]),
                    _ => tensor(client, &[n, k], dtype),
                };
                gemm_float(client, &a, &b, None, out)
            }
        }
        .expect("a product");
    }
}

#[rstest]
fn products_of_a_layer_launch_what_is_expected(
    #[values(
        LayerOperands::Int8Blocks { side: 128, fallback: [true, false] },
        LayerOperands::Int8Blocks { side: 128, fallback: [true, true] },
        LayerOperands::Int8Blocks { side: 32, fallback: [false, false] },
        LayerOperands::Int8Rows,
        LayerOperands::E4M3 {
            accumulation: Accumulation::Fast, of_gradients: Accumulation::Fast, gradient: Number::E5M2
        },
        LayerOperands::E4M3 {
            accumulation: Accumulation::Fast, of_gradients: Accumulation::Promoted, gradient: Number::E5M2
        },
        LayerOperands::E4M3 {
            accumulation: Accumulation::Promoted, of_gradients: Accumulation::Promoted, gradient: Number::E4M3
        },
        LayerOperands::E4M3 {
            accumulation: Accumulation::Promoted, of_gradients: Accumulation::Fast, gradient: Number::E5M2
        },
        LayerOperands::Floats
    )]
    operands: LayerOperands,
    // Of the fourth, Y is summed up in parts; of the last, dW is of more tokens than are added up fast.
    #[values(
        [16_384, 512, 512], [2048, 4096, 10_880], [512, 128, 256], [128, 8192, 512], [65_536, 512, 256]
    )]
    sizes: [usize; 3],
) {
    let [rows, inputs, outputs] = sizes;
    let layer = ExpectedLayer {
        rows,
        inputs,
        outputs,
        operands,
        dtype: storage::<bf16>(),
    };
    let mut expected = BTreeSet::new();
    let sources = sources_of(90, |client| {
        let (forward, gradients) = hopper::expected(client, &layer);
        expected.insert(forward.source);
        expected.extend(gradients.into_iter().map(|text| text.source));
        launch(client, &layer);
    });
    let products: Vec<_> = sources
        .into_iter()
        .filter(|source| source.name.starts_with("gemm") && source.name.ends_with("hopper"))
        .collect();
    assert_eq!(products.len(), 3, "{products:?}");
    for (index, source) in products.iter().enumerate() {
        assert!(
            expected.contains(&source.code),
            "product {index}: {}",
            source.name
        );
    }
}
