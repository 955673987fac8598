//! Kernels on matrix instructions or of CUDA source, and AdamW, whose source is edited, compiled on a machine without a
//! GPU for the architectures that they are meant for: some that each run draws, or all.
//!
//! The kernels come out of the launches themselves, by way of a runtime that compiles and does not run.
#![cfg(feature = "cuda")]

mod emulate;
mod emulate_attention;
mod emulate_blocks;
mod emulate_groups;
mod emulate_hopper_attention;
mod emulate_int4;
mod emulate_matrix_scale;
mod emulate_norms;
mod emulate_swiglu;
mod emulator;
mod nvrtc;
mod offline;

#[allow(dead_code)]
#[path = "../kernels/device.rs"]
mod device;
#[allow(dead_code)]
#[path = "../kernels/attention/problem.rs"]
mod problem;
#[allow(dead_code)]
#[path = "../kernels/random.rs"]
mod random;

use std::{
    collections::{BTreeMap, BTreeSet},
    thread::available_parallelism,
};

use cubecl::{ir::StorageType, prelude::*, std::tensor::TensorHandle};
use cubecl_kernels::{
    adamw::{AdamWTensors, Hyperparameters, adamw, clip_factors, initial_clock, initial_flag},
    amax_history::{AmaxHistory, DelayedScaling, advance_amax_history},
    attention::{
        AttentionGradients, AttentionKernel, AttentionOptions, AttentionProducts, AttentionTensors,
        Band, Dropout, Dropped,
    },
    bit_splitting::{bit_split, merge_parts},
    centred::centred_compressing,
    column_sum::column_sum,
    concatenate::concatenate,
    dropout::Draw,
    embedding::embedding_gradient,
    extremes::extremes,
    fallback::{FallbackResidual, FallbackState},
    gelu::{gelu, gelu_backward, quantize_gelu, quantize_gelu_gradient},
    gemm::{
        Accumulation, Blueprint, GemmOperand, GemmProblem, Int4Operand, Strategy, candidates, gemm,
        gemm_float, gemm_fp8, gemm_fp8_quantized, gemm_int4, gemm_quantized, select,
    },
    granularity::Granularity,
    hadamard::{Axis, HadamardSize, HadamardTransform},
    layer_norm::{layer_norm, layer_norm_backward, layer_norm_compressing, quantize_layer_norm},
    layout::Layout,
    leverage_score::{
        gather_int4_rows, gather_parts, gather_scaled, int4_row_norms, leverage_scores, sample_rows,
    },
    linear_input::quantize_linear_input,
    log_softmax::{log_softmax, log_softmax_backward},
    loss_scaling::{LossScaling, initial_loss_scale},
    number::Number,
    operator_input::OperatorInput,
    optimizer_state::{Moment, StateFormat, initial_state},
    quantize::{
        DelayedMaximum, MatrixSource, QuantizeSpec, dequantize, learned_step,
        learned_step::{ElementSource, Gradient, LearnedStep, ResidualRows},
        quantize, quantize_both_ways, quantize_by, quantize_delayed, unpack_int4,
    },
    random_hadamard::random_hadamard,
    rms_norm::{quantize_rms_norm, rms_norm, rms_norm_backward, rms_norm_compressing},
    rotary::{RotaryPass, rotary},
    rounding::{Rounding, StochasticKey},
    scale::ScaleNumber,
    sum::{Reduction, sum},
    swiglu::{
        quantize_swiglu, quantize_swiglu_gradients, quantize_swiglu_gradients_delayed, swiglu,
        swiglu_backward, swiglu_compressing,
    },
};
use half::{bf16, f16};
use rstest::rstest;

use nvrtc::Nvrtc;
use offline::{OfflineCuda, Source, max_shared_memory, sources_of};
use random::Random;

type Client = ComputeClient<OfflineCuda>;
type Tensor = TensorHandle<OfflineCuda>;

fn dtype<E: CubePrimitive>() -> StorageType {
    E::as_type_native_unchecked().storage_type()
}

fn tensor(client: &Client, shape: &[usize], dtype: StorageType) -> Tensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    TensorHandle::new_contiguous(shape.to_vec(), client.empty(bytes), dtype)
}

/// All that a kernel depends on.
#[derive(Clone, Copy)]
struct Case {
    block: usize,
    /// Rows, columns and depth.
    size: usize,
    has_fallback: bool,
    has_bias: bool,
    out: StorageType,
}

/// The loop over K depends on the block, the blueprint and the fallback; the stores depend on the rest.
fn tensor_core_cases() -> Vec<Case> {
    let case = |block, size, has_fallback| Case {
        block,
        size,
        has_fallback,
        has_bias: false,
        out: dtype::<bf16>(),
    };
    let mut cases = Vec::new();
    for block in [32, 64, 128] {
        for has_fallback in [false, true] {
            cases.push(case(block, 256, has_fallback));
        }
    }
    for (size, has_bias, out) in [
        (255, false, dtype::<bf16>()),
        (255, true, dtype::<f32>()),
        (256, true, dtype::<f16>()),
        (256, false, dtype::<f32>()),
    ] {
        cases.push(Case {
            has_bias,
            out,
            ..case(128, size, false)
        });
    }
    cases
}

/// All that the Hopper kernel depends on, but the blueprint; smaller blocks change nothing of bias and output.
fn hopper_cases() -> Vec<Case> {
    let case = |block, has_fallback, has_bias, out| Case {
        block,
        size: 256,
        has_fallback,
        has_bias,
        out,
    };
    let mut cases = Vec::new();
    for out in outputs() {
        for (has_fallback, has_bias) in pairs_of_bools() {
            cases.push(case(128, has_fallback, has_bias, out));
        }
    }
    for block in [32, 64] {
        cases.push(case(block, false, false, dtype::<bf16>()));
    }
    cases
}

fn outputs() -> [StorageType; 3] {
    [dtype::<f32>(), dtype::<f16>(), dtype::<bf16>()]
}

fn pairs_of_bools() -> [(bool, bool); 4] {
    [(false, false), (false, true), (true, false), (true, true)]
}

fn problem(m: usize, n: usize, block: usize) -> GemmProblem {
    GemmProblem {
        batch: 1,
        m,
        n,
        k: 256,
        a_scale_block: (block, block),
        b_scale_block: (block, block),
        fallback: false,
    }
}

/// Launches every blueprint that the case may choose, and says how many these are.
fn launch(client: &Client, case: Case, strategy: Strategy) -> usize {
    let Case { block, size, .. } = case;
    let problem = GemmProblem {
        fallback: case.has_fallback,
        ..problem(size, size, block)
    };
    let blueprints = candidates(client, &problem, strategy).expect("a device that has the kernel");
    let blocks = size.div_ceil(block);
    let values = || tensor(client, &[size, size], dtype::<i8>());
    let scales = || tensor(client, &[blocks, blocks], dtype::<f32>());
    let operand = GemmOperand {
        values: values(),
        scales: scales(),
        rows_per_scale: block,
        depth_per_scale: block,
    };
    let residual = FallbackResidual {
        values: values(),
        scales: scales(),
        flags: tensor(client, &[blocks, blocks], dtype::<u32>()),
        block,
    };
    let bias = tensor(client, &[size], dtype::<f32>());
    for &blueprint in &blueprints {
        gemm(
            client,
            &operand,
            &operand,
            case.has_fallback.then_some(&residual),
            case.has_bias.then_some(&bias),
            case.out,
            Strategy::Exactly(blueprint),
        )
        .expect("a candidate");
    }
    blueprints.len()
}

/// Every product with scales over all of K.
fn launch_rowwise(client: &Client) {
    const SIZE: usize = 256;
    let operand = |rows_per_scale: usize| GemmOperand {
        values: tensor(client, &[SIZE, SIZE], dtype::<i8>()),
        scales: tensor(client, &[SIZE / rows_per_scale, 1], dtype::<f32>()),
        rows_per_scale,
        depth_per_scale: SIZE,
    };
    let (a, b) = (operand(1), operand(SIZE));
    let problem = GemmProblem {
        a_scale_block: (a.rows_per_scale, a.depth_per_scale),
        b_scale_block: (b.rows_per_scale, b.depth_per_scale),
        ..problem(SIZE, SIZE, 128)
    };
    let blueprints = candidates(client, &problem, Strategy::Hopper).expect("the device's kernel");
    let bias = tensor(client, &[SIZE], dtype::<f32>());
    for out in outputs() {
        for (bias, &blueprint) in [None, Some(&bias)]
            .into_iter()
            .flat_map(|bias| blueprints.iter().map(move |it| (bias, it)))
        {
            let strategy = Strategy::Exactly(blueprint);
            gemm(client, &a, &b, None, bias, out, strategy).expect("a candidate");
        }
    }
}

/// Every `gemm_float` of one tile width.
fn launch_float(client: &Client, size: usize) {
    let bias = tensor(client, &[size], dtype::<f32>());
    for input in [dtype::<f16>(), dtype::<bf16>()] {
        let matrix = |along_rows: bool| {
            let mut matrix = tensor(client, &[size, size], input);
            if along_rows {
                matrix.metadata.swap(0, 1);
            }
            matrix
        };
        for (a_along_rows, b_along_rows) in pairs_of_bools() {
            let (a, b) = (matrix(a_along_rows), matrix(b_along_rows));
            for out in outputs() {
                for bias in [None, Some(&bias)] {
                    gemm_float(client, &a, &b, bias, out).expect("a device that has the kernel");
                }
            }
        }
    }
}

/// Every `gemm_fp8` of the widths of tiles that outputs of these sizes get: numbers, scales of rows or of more,
/// accumulation, bias, output.
fn fp8_sources() -> Vec<Source> {
    let scales = [
        (Granularity::Tensor, ScaleNumber::F32),
        (Granularity::Token, ScaleNumber::E8M0),
        (Granularity::Group(128), ScaleNumber::F32),
        (Granularity::Block(128), ScaleNumber::E8M0),
    ];
    let sources = sources_of(90, |client| {
        for (rows, cols) in [(128, 64), (4096, 128), (4096, 1536), (4096, 4096)] {
            for (of_a, of_b) in scales.iter().flat_map(|a| scales.map(|b| (*a, b))) {
                for numbers in [[Number::E4M3; 2], [Number::E5M2, Number::E4M3]] {
                    let [a, b] = [(rows, of_a, numbers[0]), (cols, of_b, numbers[1])].map(
                        |(rows, (granularity, scale), number)| {
                            let x = tensor(client, &[rows, 256], dtype::<f32>());
                            let spec = QuantizeSpec::new(number, granularity).with_scale(scale);
                            let x = quantize(client, &x, &spec).expect("a matrix");
                            x.fp8_operand().expect("a row-major copy")
                        },
                    );
                    let bias = tensor(client, &[cols], dtype::<f32>());
                    for (bias, out) in [
                        (None, dtype::<bf16>()),
                        (Some(&bias), dtype::<f32>()),
                        (Some(&bias), dtype::<f16>()),
                    ] {
                        for accumulation in [Accumulation::Promoted, Accumulation::Fast] {
                            gemm_fp8(client, &a, &b, bias, accumulation, out)
                                .expect("a device that has the kernel");
                        }
                    }
                }
            }
        }
    });
    let sources: BTreeMap<String, Source> = sources
        .into_iter()
        .filter(|source| ["gemm_fp8_hopper", "gemm_rowwise_hopper"].contains(&source.name.as_str()))
        .map(|source| (source.code.clone(), source))
        .collect();
    let are_fast = |fast: bool| {
        let sources = sources.values();
        sources
            .filter(|source| (source.name == "gemm_rowwise_hopper") == fast)
            .count()
    };
    // Those of the two scales that cover all of K have both.
    let (promoted, fast) = (are_fast(false), are_fast(true));
    assert!(promoted >= 3 * 16 * 2, "{promoted}");
    assert!(fast >= 3 * 4 * 2, "{fast}");
    sources.into_values().collect()
}

/// Products of INT4 of these sizes, with every kind of output, with and without a bias.
fn int4_sources(architecture: u16, [batch, m, n, k]: [usize; 4]) -> Vec<Source> {
    sources_of(architecture, |client| {
        let operand = |rows| Int4Operand {
            values: tensor(client, &[batch, rows, k / 2], dtype::<u8>()),
            scale: tensor(client, &[1, 1], dtype::<f32>()),
        };
        let bias = tensor(client, &[n], dtype::<f32>());
        for out in outputs() {
            for bias in [None, Some(&bias)] {
                gemm_int4(client, &operand(m), &operand(n), bias, out).expect("a kernel");
            }
        }
    })
}

fn tensor_core_sources(architecture: u16) -> Vec<Source> {
    let mut launched = 0;
    let mut sources = sources_of(architecture, |client| {
        for case in tensor_core_cases() {
            launched += launch(client, case, Strategy::TensorCore);
        }
    });
    sources.retain(|source| source.name.starts_with("gemm_tensor_core"));
    assert_eq!(sources.len(), launched);
    sources
}

/// The sources of all `gemm_hopper`, `gemm_rowwise_hopper` or `gemm_float_hopper`, no two the same.
fn hopper_sources(name: &str) -> Vec<Source> {
    let sources = sources_of(90, |client| {
        for case in hopper_cases() {
            launch(client, case, Strategy::Hopper);
        }
        launch_rowwise(client);
        for size in [256, 4096] {
            launch_float(client, size);
        }
    });
    let sources: BTreeMap<String, Source> = sources
        .into_iter()
        .filter(|source| source.name == name)
        .map(|source| (source.code.clone(), source))
        .collect();
    let expected = match name {
        "gemm_hopper" => 4 * hopper_cases().len(),
        "gemm_rowwise_hopper" => 4 * outputs().len() * 2,
        // Widths of tiles, the input's type, both operands' layouts, the output's type, the bias.
        _ => 2 * 2 * pairs_of_bools().len() * outputs().len() * 2,
    };
    assert_eq!(sources.len(), expected, "{name}");
    sources.into_values().collect()
}

/// Every product whose output its kernel quantizes: numbers and blocks, rounding, accumulation, bias; none is quantized by a
/// kernel of its own.
fn rounded_sources() -> Vec<Source> {
    const SIZES: [(usize, usize); 3] = [(128, 128), (4096, 1536), (4096, 4096)];
    let key = StochasticKey { seed: 1, stream: 2 };
    let blocks = [32, 64, 128].map(|side| QuantizeSpec::int8(Granularity::Block(side)));
    let stochastic = blocks.map(|spec| spec.with_rounding(Rounding::Stochastic(key)));
    let groups = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
    let specs: Vec<_> = blocks
        .into_iter()
        .chain(stochastic)
        .chain([groups])
        .collect();
    let quantized = |client: &Client, rows, spec: &QuantizeSpec| {
        let x = tensor(client, &[rows, 256], dtype::<bf16>());
        quantize(client, &x, spec).expect("a matrix")
    };
    let is_product = |source: &Source| source.name.starts_with("gemm");
    let of_each = |launch: &dyn Fn(&Client)| {
        let sources = sources_of(90, |client| launch(client));
        // The operands', then the product's.
        let product = sources.last().expect("a product").clone();
        assert!(is_product(&product), "{}", product.name);
        assert!(
            product.code.contains("#define ROUNDED 1"),
            "{}",
            product.code
        );
        assert_eq!(sources.iter().filter(|it| is_product(it)).count(), 1);
        product
    };
    let mut products = Vec::new();
    for (rows, cols) in SIZES {
        for spec in &specs {
            for has_bias in [false, true] {
                let bias =
                    |client: &Client| has_bias.then(|| tensor(client, &[cols], dtype::<f32>()));
                for side in [32, 64, 128] {
                    let of_blocks = QuantizeSpec::int8(Granularity::Block(side));
                    products.push(of_each(&|client: &Client| {
                        let [a, b] = [rows, cols].map(|rows| {
                            let x = quantized(client, rows, &of_blocks);
                            x.operand().expect("a row-major copy")
                        });
                        let bias = bias(client);
                        gemm_quantized(client, &a, &b, bias.as_ref(), dtype::<bf16>(), spec)
                            .expect("matrices");
                    }));
                }
                for accumulation in [Accumulation::Promoted, Accumulation::Fast] {
                    let of_matrix = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
                    products.push(of_each(&|client: &Client| {
                        let [a, b] = [rows, cols].map(|rows| {
                            let x = quantized(client, rows, &of_matrix);
                            x.fp8_operand().expect("a row-major copy")
                        });
                        let (bias, dtype) = (bias(client), dtype::<bf16>());
                        gemm_fp8_quantized(
                            client,
                            &a,
                            &b,
                            bias.as_ref(),
                            accumulation,
                            dtype,
                            spec,
                        )
                        .expect("matrices");
                    }));
                }
            }
        }
    }
    let products: BTreeMap<String, Source> = products
        .into_iter()
        .map(|source| (source.code.clone(), source))
        .collect();
    products.into_values().collect()
}

/// All passes of Hopper's attention, for both types and widths of heads, with a mask and without, of heads that have
/// keys of their own and of few that share them.
fn attention_sources(architecture: u16) -> Vec<Source> {
    let options = AttentionOptions {
        band: Band::CAUSAL,
        ..AttentionOptions::new(0.1)
    };
    let wanted = AttentionGradients {
        query: true,
        key: true,
        value: true,
        bias: false,
    };
    let masks = [None, Some(dtype::<u8>()), Some(dtype::<u32>())];
    let types = [
        (dtype::<bf16>(), 64),
        (dtype::<bf16>(), 128),
        (dtype::<f16>(), 40),
        (dtype::<f16>(), 96),
    ];
    let sources = sources_of(architecture, |client| {
        let all = types.iter().flat_map(|&it| masks.map(|flags| (it, flags)));
        let all = all.flat_map(|it| [4, 1].map(|kv_heads| (it, kv_heads)));
        for (((float, width), flags), kv_heads) in all {
            let heads = |heads, sequence| tensor(client, &[2, heads, sequence, width], float);
            let tensors = AttentionTensors {
                query: heads(4, 200),
                key: heads(kv_heads, 300),
                value: heads(kv_heads, 300),
                mask: flags.map(|flags| tensor(client, &[2, 1, 200, 300], flags)),
                bias: None,
            };
            let kernel = AttentionKernel::Hopper;
            let Ok(forward) = kernel.forward(client, &tensors, &options) else {
                continue;
            };
            let gradient = heads(4, 200);
            kernel
                .backward(client, &tensors, &forward, &gradient, wanted, &options)
                .expect("what has a forward pass");
            let of_codes = AttentionOptions {
                products: AttentionProducts::Int8,
                ..options
            };
            kernel
                .forward(client, &tensors, &of_codes)
                .expect("what has a forward pass");
        }
    });
    // Four texts of each type and five where blocks share heads, four with INT8 products, and bits of each mask for the
    // three passes.
    let expected = types.len() * ((4 + 5 + 2 * 4) * masks.len() + 2 * 2 * 3);
    assert_eq!(sources.len(), if architecture == 90 { expected } else { 0 });
    sources
}

/// All passes of the portable attention, for each type: sums of the most panels with every option and each form of a
/// bias, and of one panel with none.
fn portable_attention_sources(architecture: u16) -> Vec<Source> {
    let sources = sources_of(architecture, |client| {
        for (turn, float) in outputs().into_iter().enumerate() {
            let kernel = AttentionKernel::Portable;
            launch_attention(client, kernel, float, 256, Some(turn));
            launch_attention(client, kernel, float, 24, None);
        }
    });
    assert_passes(
        &sources,
        &[
            "attention_forward_kernel",
            "attention_delta_kernel",
            "attention_queries_kernel",
            "attention_keys_kernel",
            "attention_bias_kernel",
            "attention_bias_total_kernel",
        ],
    );
    sources
}

/// All passes of attention on matrix instructions, with tiles for each width of heads, and with every option for each
/// type. Those of the portable kernel among them are not here.
fn tensor_core_attention_sources(architecture: u16) -> Vec<Source> {
    let types = [(dtype::<bf16>(), [64, 256]), (dtype::<f16>(), [40, 128])];
    let mut sources = sources_of(architecture, |client| {
        for (turn, (float, widths)) in types.into_iter().enumerate() {
            let kernel = AttentionKernel::TensorCore;
            for width in widths {
                launch_attention(client, kernel, float, width, None);
            }
            launch_attention(client, kernel, float, 128, Some(turn));
        }
    });
    sources.retain(|source| !source.name.starts_with("attention_bias"));
    assert_passes(
        &sources,
        &[
            "attention_forward_tensor_core_kernel",
            "attention_delta_kernel",
            "attention_queries_tensor_core_kernel",
            "attention_keys_tensor_core_kernel",
        ],
    );
    sources
}

#[track_caller]
fn assert_passes(sources: &[Source], names: &[&str]) {
    for name in names {
        let mut found = sources.iter().map(|source| &source.name);
        assert!(found.any(|found| found.starts_with(name)), "no {name}");
    }
}

/// Launches all passes: with every option, and the bias and mask of this turn, or with none.
fn launch_attention(
    client: &Client,
    kernel: AttentionKernel,
    float: StorageType,
    width: usize,
    turn: Option<usize>,
) {
    let heads = |heads, sequence| tensor(client, &[2, heads, sequence, width], float);
    let broadcast = |turn: usize| [[1, 4, 200, 300], [2, 1, 1, 300], [1, 1, 200, 1]][turn];
    let flags = |turn: usize| [dtype::<u8>(), dtype::<u32>()][turn % 2];
    let tensors = AttentionTensors {
        query: heads(4, 200),
        key: heads(2, 300),
        value: heads(2, 300),
        mask: turn.map(|turn| tensor(client, &broadcast(turn), flags(turn))),
        bias: turn.map(|turn| tensor(client, &broadcast(turn), float)),
    };
    let mut options = AttentionOptions::new(0.1);
    if let Some(turn) = turn {
        let key = StochasticKey { seed: 1, stream: 2 };
        let dropped = [Dropped::Scores, Dropped::Probabilities][turn % 2];
        options = AttentionOptions {
            softcap: Some(3.0),
            band: Band::CAUSAL,
            dropout: Some(Dropout {
                dropped,
                draw: Draw { rate: 0.1, key },
            }),
            ..options
        };
    }
    let forward = kernel.forward(client, &tensors, &options);
    let forward = forward.expect("the architecture has the kernel");
    let gradient = forward.output.clone();
    let wanted = AttentionGradients {
        query: true,
        key: true,
        value: true,
        bias: turn.is_some(),
    };
    kernel
        .backward(client, &tensors, &forward, &gradient, wanted, &options)
        .expect("what has a forward pass");
}

#[rstest]
fn tensor_core_attention_fits_into_shared_memory(#[values(80, 86, 89, 90)] architecture: u16) {
    for source in tensor_core_attention_sources(architecture) {
        assert!(
            source.shared_memory <= max_shared_memory(architecture),
            "{}: {} bytes",
            source.name,
            source.shared_memory
        );
    }
}

#[rstest]
fn attention_leaves_memory_for_what_it_declares() {
    const BARRIERS: usize = 1024;
    let sources = attention_sources(90).into_iter();
    for source in sources.filter(|it| it.name.ends_with("_hopper")) {
        assert!(source.shared_memory <= max_shared_memory(90) - BARRIERS);
        let Some((_, knob)) = source.code.split_once("#define STAGES ") else {
            assert_eq!(source.name, "attention_codes_hopper");
            continue;
        };
        let stages: usize = knob[..1].parse().expect("a digit");
        let least = match source.name.as_str() {
            "attention_forward_hopper" | "attention_forward_int8_hopper" => 4,
            // One is read while the next one is filled.
            "attention_gradients_hopper" => 2,
            _ => 1,
        };
        assert!(stages >= least, "{} has {stages} stages", source.name);
    }
}

/// AdamW on one pair of state formats of each kind that is compressed, with and without all that is optional. Of their
/// length each launches two kernels, one without guards.
fn adamw_sources(architecture: u16) -> Vec<Source> {
    let (e4m3, de8) = (StateFormat::E4M3, StateFormat::DYNAMIC_EXPONENT);
    let formats = [
        (None, Some(e4m3)),
        (Some(StateFormat::INT8), Some(StateFormat::INT8)),
        (Some(e4m3), Some(e4m3)),
        (Some(e4m3.expanded()), Some(e4m3.expanded())),
        (Some(de8), Some(de8)),
        (Some(de8.expanded()), Some(de8.expanded())),
        (Some(de8.expanded()), Some(e4m3.expanded())),
    ];
    const LEN: usize = (1 << 20) + 4;
    let hyperparameters = Hyperparameters {
        learning_rate: 1e-3,
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.01,
        clip_norm: None,
    };
    let clipped = Hyperparameters {
        clip_norm: Some(1.0),
        ..hyperparameters
    };
    let key = Rounding::Stochastic(StochasticKey { seed: 1, stream: 2 });
    let mut sources = sources_of(architecture, |client| {
        let state = |format, moment| {
            initial_state(client, &[LEN], format, moment).expect("a format of this device")
        };
        let (clock, flag) = (initial_clock(client), initial_flag(client));
        let (scale, _) = initial_loss_scale(client, &LossScaling::default());
        for (first, second) in formats {
            for (dtype, rounding, flag, scale, hyperparameters) in [
                (
                    dtype::<f32>(),
                    Rounding::Nearest,
                    None,
                    None,
                    hyperparameters,
                ),
                (dtype::<bf16>(), key, Some(&flag), Some(&scale), clipped),
            ] {
                let tensors = AdamWTensors {
                    updated: flag.map(|_| tensor(client, &[LEN], dtype)),
                    parameter: tensor(client, &[LEN], dtype),
                    gradient: tensor(client, &[LEN], dtype),
                    first: state(first, Moment::First),
                    second: state(second, Moment::Second),
                    rounding,
                    state_rounding: rounding,
                };
                adamw(client, &[tensors], &clock, flag, scale, &hyperparameters)
                    .expect("valid tensors");
            }
        }
    });
    sources.retain(|source| source.name.starts_with("adamw_kernel"));
    assert_eq!(sources.len(), formats.len() * 2 * 2);
    sources
}

/// The CUDA source of quantizers: of each type of input of which two tiles fit on a multiprocessor, X with and without
/// fallback, and a gradient; of few tiles, and of more than the 108 multiprocessors hold.
fn quantize_sources(architecture: u16) -> Vec<Source> {
    let shapes = [[256, 128], [128, 128 * (4 * 108 + 1)]];
    let mut sources = sources_of(architecture, |client| {
        for float in outputs() {
            for shape in &shapes {
                quantize_both(client, &tensor(client, shape, float), 128, Layout::Both);
            }
        }
    });
    sources.retain(|source| source.name == "quantize_whole_tiles");
    let texts: BTreeSet<&str> = sources.iter().map(|source| source.code.as_str()).collect();
    let floats = if matches!(architecture, 89 | 120) {
        2
    } else {
        3
    };
    assert_eq!(texts.len(), floats * shapes.len() * 3);
    sources
}

/// The CUDA source of SwiGLU that is quantized as it is computed: in blocks, where two tiles fit on a multiprocessor,
/// and on Hopper by one scale for each matrix.
fn swiglu_sources(architecture: u16) -> Vec<Source> {
    let key = StochasticKey { seed: 1, stream: 2 };
    let mut sources = sources_of(architecture, |client| {
        let thresholds = tensor(client, &[1], dtype::<f32>());
        let counts = tensor(client, &[1, 2], dtype::<i32>());
        let delayed = DelayedMaximum {
            maxima: &thresholds,
            layer: 0,
        };
        for float in outputs() {
            let x = &tensor(client, &[256, 128], float);
            let source = |contexts| MatrixSource::Swiglu {
                gate: x,
                up: x,
                contexts,
            };
            let state = || FallbackState {
                thresholds: &thresholds,
                layer: 0,
                counts: &counts,
            };
            let context = QuantizeSpec::int8(Granularity::Group(128));
            for contexts in [None, Some(context)] {
                for state in [None, Some(state())] {
                    let x = source(contexts);
                    quantize_linear_input(client, x, 128, Some(key), state).expect("a matrix");
                }
            }
            let block = QuantizeSpec::int8(Granularity::Block(128));
            let [waiting, flowing, narrow] = &[
                context,
                block,
                QuantizeSpec::new(Number::E4M3, Granularity::Group(16)),
            ]
            .map(|spec| quantize(client, x, &spec).expect("a matrix"));
            let both = block.with_layout(Layout::Both);
            let spec = both.with_rounding(Rounding::Stochastic(key));
            let codes = [waiting, flowing].map(|codes| OperatorInput::Quantized(codes, float));
            for (factor, gradient) in [
                (x.into(), x.into()),
                (codes[0], x.into()),
                (codes[1], x.into()),
                (codes[1], codes[1]),
            ] {
                quantize_swiglu_gradients(client, [factor; 2], gradient, [&spec; 2])
                    .expect("matrices");
            }
            quantize_swiglu(client, [codes[1]; 2], &both).expect("a matrix");
            for layout in [Layout::Both, Layout::RowMajor, Layout::Transposed] {
                let spec =
                    |number| QuantizeSpec::new(number, Granularity::Tensor).with_layout(layout);
                let (e4m3, e5m2) = (spec(Number::E4M3), spec(Number::E5M2));
                quantize_delayed(client, source(None), &e4m3, delayed).expect("a matrix");
                for factor in [x.into(), OperatorInput::Quantized(narrow, float)] {
                    let factors = [factor; 2];
                    quantize_swiglu(client, factors, &e4m3).expect("matrices");
                    quantize_swiglu_gradients(client, factors, x, [&e5m2; 2]).expect("matrices");
                    quantize_swiglu_gradients_delayed(client, factors, x, &e5m2, [delayed; 2])
                        .expect("matrices");
                }
            }
        }
    });
    sources.retain(|source| source.name.contains("swiglu") && source.code.contains("Numbers"));
    let texts: BTreeSet<&str> = sources.iter().map(|source| source.code.as_str()).collect();
    let of_a_float = match architecture {
        // X with and without fallback, and a gradient, each with and without contexts, and both of what flows, the gradient
        // of floats and of codes; of each layout gradients with and without a delayed maximum, of floats and of codes, and X
        // likewise, but of codes without one.
        90 => 2 * 3 + 3 + 3 * (3 + 2 * 2),
        // Of gradients those of codes, which take less shared memory.
        80 => 5 + 3,
        // X of what flows.
        _ => 1,
    };
    assert_eq!(texts.len(), 2 * of_a_float);
    sources
}

/// `swiglu/arithmetic.cu` calls these: other ones would differ from them in a last bit that a test seldom sees.
#[test]
fn swiglu_calls_what_its_cuda_source_calls() {
    let is_swiglu = |source: &Source| {
        source.name.starts_with("swiglu_kernel") || source.name.starts_with("swiglu_backward")
    };
    let sources: Vec<_> = layer_sources(90).into_iter().filter(is_swiglu).collect();
    assert!(!sources.is_empty());
    for source in sources {
        for call in [" = exp(", " = __fdividef(float(1.0), "] {
            assert!(source.code.contains(call), "{}: {call}", source.name);
        }
    }
}

/// The CUDA source of a norm's output of what waits or flows, of each type of input and of gains.
fn norm_sources(architecture: u16) -> Vec<Source> {
    let key = StochasticKey { seed: 1, stream: 2 };
    let mut sources = sources_of(architecture, |client| {
        for float in outputs() {
            let x = tensor(client, &[128, 256], float);
            let roots = &tensor(client, &[128], dtype::<f32>());
            let block = QuantizeSpec::int8(Granularity::Block(128));
            let again = block.with_rounding(Rounding::Stochastic(key));
            let matrix = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
            for (waiting, spec) in [
                (
                    QuantizeSpec::int8(Granularity::Group(128)),
                    again.with_layout(Layout::Transposed),
                ),
                (block, block.with_layout(Layout::Both)),
                (
                    QuantizeSpec::new(Number::E4M3, Granularity::Group(16)),
                    matrix.with_layout(Layout::Both),
                ),
            ] {
                let waiting = quantize(client, &x, &waiting).expect("a matrix");
                for gain in BTreeSet::from([float, dtype::<f32>()]) {
                    let gain = &tensor(client, &[256], gain);
                    let x = OperatorInput::Quantized(&waiting, float);
                    quantize_rms_norm(client, x, gain, roots, &spec).expect("matrices");
                    for bias in [None, Some(gain)] {
                        quantize_layer_norm(client, x, gain, bias, [roots; 2], &spec)
                            .expect("matrices");
                    }
                }
            }
        }
    });
    sources.retain(|source| source.name.starts_with("quantize_norm_by"));
    let formats = if architecture == 90 { 3 } else { 2 };
    assert_eq!(sources.len(), 2 * 2 * 3 * formats);
    sources
}

/// The CUDA source of GELU and its gradient of what flows, of each type.
fn gelu_sources(architecture: u16) -> Vec<Source> {
    let key = StochasticKey { seed: 1, stream: 2 };
    let mut sources = sources_of(architecture, |client| {
        for float in outputs() {
            let x = tensor(client, &[128, 256], float);
            let narrow = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
            let block = QuantizeSpec::int8(Granularity::Block(128));
            let spec = |number| QuantizeSpec::new(number, Granularity::Tensor);
            for (flow, output, gradient) in [
                (narrow, spec(Number::E4M3), spec(Number::E5M2)),
                (block, block, block.with_rounding(Rounding::Stochastic(key))),
            ] {
                let flowing = quantize(client, &x, &flow).expect("a matrix");
                let input = OperatorInput::Quantized(&flowing, float);
                let [output, gradient] = [output, gradient].map(|it| it.with_layout(Layout::Both));
                quantize_gelu(client, input, &output).expect("a matrix");
                quantize_gelu_gradient(client, input, &x, &gradient).expect("a matrix");
                quantize_gelu_gradient(client, input, input, &gradient).expect("a matrix");
            }
        }
    });
    sources.retain(|source| source.name.starts_with("quantize_gelu_by"));
    // To FP8 of floats alone.
    let sources_of_a_float = if architecture == 90 { 2 + 3 } else { 3 };
    assert_eq!(sources.len(), 2 * sources_of_a_float);
    sources
}

/// The CUDA source of groups both ways and along the rows.
fn group_sources() -> Vec<Source> {
    let mut sources = sources_of(90, |client| {
        for float in [dtype::<f16>(), dtype::<bf16>()] {
            let x = tensor(client, &[128, 256], float);
            for number in [Number::E4M3, Number::E5M2] {
                for scale in [ScaleNumber::F32, ScaleNumber::E8M0] {
                    let spec = QuantizeSpec::new(number, Granularity::Group(128)).with_scale(scale);
                    quantize(client, &x, &spec).expect("a matrix");
                    quantize_both_ways(client, &x, &spec).expect("a matrix");
                }
            }
        }
    });
    sources.retain(|source| source.name.starts_with("quantize_groups"));
    assert_eq!(sources.len(), 2 * 2 * 2 * 2);
    sources
}

/// The CUDA source of one scale for a matrix, by delayed and by current scaling, of each type of input, number and layout.
fn matrix_scale_sources() -> Vec<Source> {
    let mut sources = sources_of(90, |client| {
        let maxima = tensor(client, &[1], dtype::<f32>());
        for float in outputs() {
            let x = tensor(client, &[128, 256], float);
            for number in [Number::E4M3, Number::E5M2] {
                for layout in [Layout::Both, Layout::RowMajor, Layout::Transposed] {
                    let spec = QuantizeSpec::new(number, Granularity::Tensor).with_layout(layout);
                    let delayed = DelayedMaximum {
                        maxima: &maxima,
                        layer: 0,
                    };
                    quantize_delayed(client, &x, &spec, delayed).expect("a matrix");
                    quantize(client, &x, &spec).expect("a matrix");
                }
            }
        }
    });
    sources.retain(|source| source.name == "quantize_by_matrix");
    assert_eq!(sources.len(), outputs().len() * 2 * 3 * 2);
    sources
}

/// The kernels that quantize to every number, and back, each once: roundings and layouts go round, as in the tests on
/// devices.
fn number_sources(architecture: u16) -> Vec<Source> {
    let key = Rounding::Stochastic(StochasticKey { seed: 1, stream: 2 });
    let sources = sources_of(architecture, |client| {
        let x = tensor(client, &[256, 256], dtype::<bf16>());
        let given = tensor(client, &[1], dtype::<f32>());
        let mut turn = 0;
        for number in Number::SYMMETRIC {
            for (scale, granularity) in [
                (ScaleNumber::F32, Granularity::Channel),
                (ScaleNumber::F32, Granularity::Group(128)),
                (ScaleNumber::E8M0, Granularity::Group(32)),
                (ScaleNumber::E4M3, Granularity::Group(16)),
            ] {
                let spec = QuantizeSpec {
                    number,
                    scale,
                    granularity,
                    rounding: [Rounding::Nearest, key][turn % 2],
                    layout: [Layout::Both, Layout::RowMajor, Layout::Transposed][turn % 3],
                };
                turn += 1;
                let quantized = quantize(client, &x, &spec).expect("a matrix");
                dequantize(client, &quantized, dtype::<bf16>()).expect("what was quantized");
                if number == Number::Int4 {
                    unpack_int4(client, &quantized).expect("an INT4 matrix");
                }
            }
            let spec = QuantizeSpec::new(number, Granularity::Tensor)
                .with_rounding([Rounding::Nearest, key][turn % 2]);
            for scale in [ScaleNumber::F32, ScaleNumber::E8M0] {
                quantize(client, &x, &spec.with_scale(scale)).expect("a matrix");
            }
            turn += 1;
            quantize_by(client, &x, &spec, &given).expect("a matrix");
            let delayed = DelayedMaximum {
                maxima: &given,
                layer: 0,
            };
            quantize_delayed(client, &x, &spec, delayed).expect("a matrix");
        }
    });
    let sources: BTreeMap<String, Source> = sources
        .into_iter()
        .map(|source| (source.code.clone(), source))
        .collect();
    for kernel in [
        "column_absmax_kernel",
        "row_absmax_kernel",
        "group_absmax_kernel",
        "part_absmax_kernel",
        "scales_kernel",
        "matrix_scales_kernel",
        "encode_kernel",
        "encode_bytes_kernel",
        "finish_kernel",
        "choose_kernel",
        "quantize_group_kernel",
        "dequantize_kernel",
        "unpack_kernel",
    ] {
        let mut names = sources.values().map(|source| &source.name);
        assert!(names.any(|name| name.starts_with(kernel)), "no {kernel}");
    }
    sources.into_values().collect()
}

/// The quantizer with a learned step size and its backward pass: each size of the transform along both axes, whole
/// vectors and single elements, and each pair of a source of elements with a form of the gradient. And the random
/// transform, of both orders of memory.
fn learned_step_sources(architecture: u16) -> Vec<Source> {
    let sources = sources_of(architecture, |client| {
        for size in HadamardSize::all() {
            for axis in [Axis::Rows, Axis::Columns] {
                let transform = HadamardTransform { size, axis };
                let layouts = [Layout::Both, Layout::RowMajor, Layout::Transposed];
                let layout = layouts[size.order() as usize % 3];
                launch_learned_step(client, [256, 256], transform, layout);
            }
        }
        for transform in [HadamardTransform::of_rows, HadamardTransform::of_columns] {
            let transform = transform(HadamardSize::IDENTITY);
            launch_learned_step(client, [33, 77], transform, Layout::Both);
        }
        for float in outputs() {
            let mut x = tensor(client, &[40, 77], float);
            random_hadamard(client, &x).expect("a matrix");
            x.metadata.swap(0, 1);
            random_hadamard(client, &x).expect("a matrix");
        }
    });
    for kernel in [
        "forward_kernel",
        "backward_kernel",
        "tile_sums_kernel",
        "total_kernel",
        "random_hadamard_kernel",
    ] {
        let mut names = sources.iter().map(|source| &source.name);
        assert!(names.any(|name| name.starts_with(kernel)), "no {kernel}");
    }
    sources
}

fn launch_learned_step(
    client: &Client,
    shape: [usize; 2],
    transform: HadamardTransform,
    layout: Layout,
) {
    let x = tensor(client, &shape, dtype::<bf16>());
    let steps = tensor(client, &[4], dtype::<f32>());
    let positions = tensor(client, &[2 * shape[0]], dtype::<i32>());
    let step = LearnedStep {
        steps: &steps,
        layer: 1,
    };
    learned_step::cold_step(client, &x, step, transform).expect("a matrix");
    learned_step::squared_error(client, &x, step, transform).expect("a matrix");
    learned_step::quantize(client, &x, step, transform, layout, None).expect("a matrix");
    let sample = ResidualRows::new(16, 3).expect("an offset below the interval");
    let row_major = Layout::RowMajor;
    let (quantized, rounding) =
        learned_step::quantize(client, &x, step, transform, row_major, Some(sample))
            .expect("a matrix");
    let rounding = rounding.expect("it was asked for");
    for (is_exact, is_sampled) in pairs_of_bools() {
        let gradient = match is_sampled {
            true => Gradient::Sampled {
                products: &x,
                positions: &positions,
            },
            false => Gradient::Dense(&x),
        };
        let source = match is_exact {
            true => ElementSource::Exact { x: &x, step },
            false => ElementSource::Saved {
                quantized: &quantized,
                rounding: &rounding,
            },
        };
        learned_step::backward(client, gradient, source, transform, dtype::<bf16>())
            .expect("valid tensors");
    }
}

/// The kernels that split a gradient and sample its rows, each once: with vectors of all widths, roundings and layouts.
fn sampling_sources(architecture: u16) -> Vec<Source> {
    let key = StochasticKey { seed: 1, stream: 2 };
    let sources = sources_of(architecture, |client| {
        for (turn, size) in [256, 132, 33].into_iter().enumerate() {
            let rounding = [Rounding::Stochastic(key), Rounding::Nearest][turn % 2];
            let layout = [Layout::Both, Layout::RowMajor, Layout::Transposed][turn];
            let gradient = tensor(client, &[size, size], outputs()[2 - turn]);
            let split = bit_split(client, &gradient, rounding).expect("a matrix");
            merge_parts(client, &split, layout).expect("a split");
            let int4 = QuantizeSpec::new(Number::Int4, Granularity::Tensor);
            let x = quantize(client, &gradient, &int4).expect("a matrix");
            let norms = int4_row_norms(client, &x).expect("an INT4 matrix");
            let x_norms = (turn > 0).then_some(&norms);
            let scores = leverage_scores(client, &split.squared_norms, x_norms).expect("norms");
            let sample = sample_rows(client, &scores, &split.scales, size, key).expect("scores");
            gather_parts(client, &split, &sample).expect("a sample of the split");
            gather_scaled(client, &split, &sample, rounding, layout).expect("a sample");
            gather_int4_rows(client, &x, &sample, layout).expect("a sample of X's rows");
        }
    });
    let sources: BTreeMap<String, Source> = sources
        .into_iter()
        .map(|source| (source.code.clone(), source))
        .collect();
    for kernel in [
        "bit_split_kernel",
        "merge_kernel",
        "int4_row_norms_kernel",
        "leverage_scores_kernel",
        "sample_rows_kernel",
        "gather_kernel",
        "gather_scaled_kernel",
    ] {
        let mut names = sources.values().map(|source| &source.name);
        assert!(names.any(|name| name.starts_with(kernel)), "no {kernel}");
    }
    sources.into_values().collect()
}

/// RMSNorm, layer normalization with and without a bias, GELU, SwiGLU and the gradient of an embedding, for each type
/// and for vectors of all widths, single ones and many in a unit, part planes and several; copies beside, and keys.
fn layer_sources(architecture: u16) -> Vec<Source> {
    let sources = sources_of(architecture, |client| {
        let indices = tensor(client, &[40], dtype::<i32>());
        for (turn, cols) in [1, 20, 129, 768, 1100, 4096, 8191, 8192]
            .into_iter()
            .enumerate()
        {
            for (index, float) in outputs().into_iter().enumerate() {
                let x = tensor(client, &[40, cols], float);
                let gain = tensor(client, &[cols], outputs()[(turn + index) % 3]);
                let forward = rms_norm(client, &x, &gain, 1e-6).expect("rows and a gain");
                rms_norm_backward(client, &x, &gain, &forward.inverse_rms, &x)
                    .expect("what had a forward pass");
                let bias = (turn % 2 == 0).then_some(&gain);
                let forward = layer_norm(client, &x, &gain, bias, 1e-6).expect("rows and a gain");
                let [mean, scale] = [&forward.mean, &forward.inverse_deviation];
                layer_norm_backward(client, &x, &gain, mean, scale, &x)
                    .expect("what had a forward pass");
                gelu(client, &x).expect("a tensor of floats");
                gelu_backward(client, &x, &x).expect("tensors of one shape");
                swiglu(client, &x, &x).expect("tensors of one shape");
                swiglu_backward(client, &x, &x, &x).expect("tensors of one shape");
                let logs = log_softmax(client, &x).expect("a matrix");
                log_softmax_backward(client, &logs, &logs, x.dtype).expect("matrices");
                embedding_gradient(client, &indices, &x, 100).expect("tokens");
            }
        }
        operators_of_numbers(client);
        for float in outputs() {
            let x = tensor(client, &[40, 768], float);
            for number in [Number::Int8, Number::Int10, Number::E4M3] {
                let groups = QuantizeSpec::new(number, Granularity::Group(128))
                    .with_layout(Layout::RowMajor);
                swiglu_compressing(client, &x, &x, &groups).expect("whole groups");
                let gain = tensor(client, &[768], dtype::<f32>());
                rms_norm_compressing(client, &x, &gain, 1e-6, &groups).expect("whole groups");
                layer_norm_compressing(client, &x, &gain, None, 1e-6, &groups)
                    .expect("whole groups");
                let keys = tensor(client, &[6, 40, 64], float);
                centred_compressing(client, &keys, 2, &groups, 40 * 64).expect("whole groups");
                quantize(client, &x, &groups).expect("a matrix");
            }
            let x = tensor(client, &[2, 3, 40, 64], float);
            let turn = tensor(client, &[2, 4], dtype::<f32>());
            let table = tensor(client, &[40, 64, 2], dtype::<f32>());
            for pass in [RotaryPass::Forward, RotaryPass::Backward] {
                rotary(client, &x, &turn, &table, pass).expect("pairs");
            }
        }
        let parts = tensor(client, &[256, 768], dtype::<f32>());
        column_sum(client, &parts).expect("a matrix");
        for float in outputs() {
            let x = tensor(client, &[20_000], float);
            sum(client, &x, Reduction::Mean).expect("a tensor");
        }
        concatenate(client, &[parts]).expect("a tensor");
        let state = AmaxHistory {
            maxima: tensor(client, &[5], dtype::<f32>()),
            history: tensor(client, &[5, 1024], dtype::<f32>()),
        };
        for most_recent in [false, true] {
            let scaling = DelayedScaling {
                margin: 1,
                most_recent,
                due: true,
            };
            let runs = tensor(client, &[5, 2], dtype::<f32>());
            advance_amax_history(client, &state, &runs, &scaling).expect("layers");
        }
        for scales in [
            tensor(client, &[512], dtype::<f32>()),
            tensor(client, &[512], dtype::<u8>()),
        ] {
            extremes(client, &scales, None).expect("scales");
        }
        let (scale, _) = initial_loss_scale(client, &LossScaling::default());
        for (len, float, scale) in [
            (768, dtype::<bf16>(), Some(&scale)),
            (769, dtype::<f32>(), None),
        ] {
            let gradient = tensor(client, &[len], float);
            clip_factors(client, &[gradient], 1.0, scale).expect("a gradient");
        }
    });
    let sources: BTreeMap<String, Source> = sources
        .into_iter()
        .map(|source| (source.code.clone(), source))
        .collect();
    for kernel in [
        "centred_kernel",
        "quantize_rows_kernel",
        "rms_norm_kernel",
        "rms_norm_backward_kernel",
        "layer_norm_kernel",
        "layer_norm_backward_kernel",
        "gelu_kernel",
        "gelu_backward_kernel",
        "swiglu_kernel",
        "swiglu_compressing_kernel",
        "swiglu_backward_kernel",
        "log_softmax_kernel",
        "rotary_kernel",
        "log_softmax_backward_kernel",
        "column_sum_kernel",
        "concatenate_kernel",
        "extremes_kernel",
        "squares_kernel",
        "factors_kernel",
        "zero_kernel",
        "sort_kernel",
        "sum_kernel",
        "amax_history_kernel",
    ] {
        let mut names = sources.values().map(|source| &source.name);
        assert!(names.any(|name| name.starts_with(kernel)), "no {kernel}");
    }
    sources.into_values().collect()
}

/// Operators that decode what they read: bytes, ten bits and nibbles with a tensor scale.
fn operators_of_numbers(client: &Client) {
    let (e4m3, int10) = (Granularity::Group(16), Granularity::Group(128));
    let specs = [
        QuantizeSpec::new(Number::E4M3, e4m3),
        QuantizeSpec::new(Number::Int10, int10),
        QuantizeSpec::NVFP4,
    ];
    for (spec, float) in specs.iter().zip(outputs()) {
        let x = tensor(client, &[40, 768], float);
        let matrix = quantize(client, &x, spec).expect("a matrix");
        let input = OperatorInput::Quantized(&matrix, float);
        let gain = tensor(client, &[768], float);
        let forward = rms_norm(client, input, &gain, 1e-6).expect("rows and a gain");
        rms_norm_backward(client, input, &gain, &forward.inverse_rms, &x)
            .expect("what had a forward pass");
        let forward = layer_norm(client, input, &gain, None, 1e-6).expect("rows and a gain");
        let [mean, scale] = [&forward.mean, &forward.inverse_deviation];
        layer_norm_backward(client, input, &gain, mean, scale, &x)
            .expect("what had a forward pass");
        gelu(client, input).expect("a quantized matrix");
        gelu_backward(client, input, &x).expect("a quantized matrix");
        swiglu(client, input, input).expect("quantized matrices");
        swiglu_backward(client, input, input, &x).expect("quantized matrices");
    }
}

/// Quantizes in blocks as a training step does: X with and without fallback, and a gradient.
fn quantize_both(client: &Client, x: &Tensor, block: usize, layout: Layout) {
    let key = StochasticKey { seed: 1, stream: 2 };
    let thresholds = tensor(client, &[1], dtype::<f32>());
    let counts = tensor(client, &[1, 2], dtype::<i32>());
    let state = FallbackState {
        thresholds: &thresholds,
        layer: 0,
        counts: &counts,
    };
    for state in [None, Some(state)] {
        quantize_linear_input(client, x, block, Some(key), state).expect("a matrix");
    }
    let spec = QuantizeSpec::int8(Granularity::Block(block))
        .with_rounding(Rounding::Stochastic(key))
        .with_layout(layout);
    quantize(client, x, &spec).expect("a matrix");
}

/// The portable kernel quantizes what the CUDA source does not.
#[rstest]
#[case::edge_along_columns([256, 136], [136, 1], 128, 0)]
#[case::edge_along_rows([200, 128], [128, 1], 128, 0)]
#[case::smaller_blocks([256, 128], [128, 1], 64, 0)]
#[case::unaligned_rows([256, 128], [133, 1], 128, 0)]
#[case::columns_apart([256, 128], [1, 256], 128, 0)]
#[case::unaligned_start([256, 128], [128, 1], 128, 2)]
fn no_quantize_source(
    #[case] shape: [usize; 2],
    #[case] strides: [usize; 2],
    #[case] block: usize,
    #[case] offset: u64,
) {
    let sources = sources_of(90, |client| {
        let handle = client.empty(2 * 256 * 256).offset_start(offset);
        let x = TensorHandle::new(handle, shape.to_vec(), strides.to_vec(), dtype::<bf16>());
        quantize_both(client, &x, block, Layout::Both);
    });
    assert_eq!(sources.len(), 3);
    for source in sources {
        assert!(source.name.starts_with("quantize_block_kernel"));
    }
}

/// A row-major copy of FP32 alone is left to the portable kernel, other copies alone are not.
#[rstest]
fn quantize_sources_of_one_copy(#[values(Layout::RowMajor, Layout::Transposed)] layout: Layout) {
    for float in outputs() {
        let sources = sources_of(90, |client| {
            quantize_both(client, &tensor(client, &[256, 128], float), 128, layout);
        });
        let portable = |source: &&Source| source.name.starts_with("quantize_block_kernel");
        let is_left = float == dtype::<f32>() && layout == Layout::RowMajor;
        assert_eq!(
            sources.iter().filter(portable).count(),
            usize::from(is_left)
        );
        assert_eq!(sources.len(), 3);
    }
}

/// CUDA keeps 1 KiB of a multiprocessor's shared memory for each cube, and the kernel declares 64 bytes.
#[rstest]
fn quantize_sources_share_a_multiprocessor(#[values(80, 89, 90, 120)] architecture: u16) {
    let mut sources = quantize_sources(architecture);
    sources.extend(swiglu_sources(architecture));
    if matches!(architecture, 80 | 90) {
        sources.extend(norm_sources(architecture));
        sources.extend(gelu_sources(architecture));
    }
    sources.retain(|source| source.code.contains("#define CUBES "));
    for source in sources {
        let (_, knob) = source.code.split_once("#define CUBES ").expect("a knob");
        let cubes: usize = knob
            .lines()
            .next()
            .and_then(|n| n.parse().ok())
            .expect("a number");
        assert!(cubes >= 2);
        let taken = cubes * (source.shared_memory + 64 + 1024);
        assert!(taken <= max_shared_memory(architecture) + 1024);
    }
}

/// Portable kernels keep within what every device has, so that Vulkan runs them too.
#[rstest]
fn portable_sources_take_little_shared_memory(
    #[values(
        number_sources,
        learned_step_sources,
        sampling_sources,
        layer_sources,
        portable_attention_sources
    )]
    sources: fn(u16) -> Vec<Source>,
) {
    for source in sources(80) {
        assert!(source.shared_memory <= 32 << 10, "{}", source.name);
    }
}

/// A call that the edit missed would flush nothing, and be four instructions.
#[rstest]
fn adamw_calls_functions_that_flush_to_zero() {
    let sources = adamw_sources(90);
    let kernels: Vec<(&str, &str)> = sources
        .iter()
        .map(|source| source.code.split_once("extern \"C\"").expect("a kernel"))
        .collect();
    for (definitions, kernel) in &kernels {
        for replaced in [
            "__powf(",
            "__logf(",
            "__expf(",
            "__fdividef(",
            "rsqrt(",
            "__frsqrt_rn(",
        ] {
            assert!(!kernel.contains(replaced), "{replaced} in {kernel}");
        }
        assert!(definitions.contains("asm(\"rcp.approx.ftz.f32 "));
    }
    let calling = |function: &str| {
        let call = format!("= {function}(");
        kernels
            .iter()
            .filter(|(_, code)| code.contains(&call))
            .count()
    };
    for function in ["divide_ftz", "rsqrt_ftz"] {
        assert_eq!(calling(function), kernels.len(), "{function}");
    }
    // Powers are those of expanded formats: three of the seven pairs.
    for function in ["exp2_ftz", "log_ftz", "pow_ftz"] {
        assert_eq!(calling(function), kernels.len() / 7 * 3, "{function}");
    }
}

#[rstest]
fn hopper_sources_leave_memory_for_what_they_declare(
    #[values(
        "gemm_hopper",
        "gemm_rowwise_hopper",
        "gemm_float_hopper",
        "gemm_fp8_hopper"
    )]
    name: &str,
) {
    // Barriers, the scales of stages, staging memory and the order of rows.
    const DECLARED: usize = 27 * 1024;
    let sources = match name {
        "gemm_fp8_hopper" => fp8_sources(),
        _ => hopper_sources(name),
    };
    for source in sources {
        let available = max_shared_memory(90) - DECLARED;
        assert!(source.shared_memory <= available, "{}", source.code);
        assert!(source.shared_memory > available / 2, "{}", source.code);
    }
}

/// Features of other architectures must not be taken for Hopper.
#[rstest]
fn no_hopper_source_elsewhere(#[values(80, 89, 100, 120)] architecture: u16) {
    let sources = sources_of(architecture, |client| {
        launch(client, hopper_cases()[0], Strategy::Auto);
    });
    assert!(sources.iter().all(|source| source.name != "gemm_hopper"));
    assert!(!sources.is_empty());
    assert!(attention_sources(architecture).is_empty());
}

/// A scale of a block that is deeper than K leaves the sum, but is no scale of a row: only such ones, and those of a
/// whole matrix, take the way over blocks of 128, or on Hopper their own kernel.
#[rstest]
#[case::deep_blocks((64, 64), 98, "gemm_tensor_core", "gemm_hopper")]
#[case::blocks_of_128((128, 128), 98, "gemm_tensor_core", "gemm_hopper")]
#[case::one_block((48, 48), 40, "block_scales", "gemm_rowwise_hopper")]
#[case::one_square_block((64, 64), 50, "gemm_tensor_core", "gemm_hopper")]
#[case::rows((1, 4), 98, "scale_rows", "gemm_rowwise_hopper")]
#[case::matrix((98, 4), 98, "block_scales", "gemm_rowwise_hopper")]
fn kernels_of_scales_over_k(
    #[case] (rows_per_scale, depth_per_scale): (usize, usize),
    #[case] rows: usize,
    #[case] of_ampere: &str,
    #[case] of_hopper: &str,
) {
    const K: usize = 4;
    for (architecture, expected) in [(80, of_ampere), (90, of_hopper)] {
        let sources = sources_of(architecture, |client| {
            let scales = [rows.div_ceil(rows_per_scale), K.div_ceil(depth_per_scale)];
            let operand = GemmOperand {
                values: tensor(client, &[rows, K], dtype::<i8>()),
                scales: tensor(client, &scales, dtype::<f32>()),
                rows_per_scale,
                depth_per_scale,
            };
            let out = dtype::<f32>();
            gemm(client, &operand, &operand, None, None, out, Strategy::Auto).expect("a kernel");
        });
        let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
        let of_scales = |name: &&str| name.contains("scale_rows") || name.contains("block_scales");
        assert!(
            names.iter().any(|name| name.starts_with(expected)),
            "{names:?}"
        );
        let over_blocks = expected.contains("scale");
        assert_eq!(names.iter().any(of_scales), over_blocks, "{names:?}");
    }
}

/// The widest tiles, but where narrower ones keep more of the 108 multiprocessors busy: without a measurement.
#[rstest]
#[case::one_turn_of_narrow_tiles(512, 1024, 64)]
#[case::one_turn_of_128(1024, 1664, 128)]
#[case::one_turn_of_192(1024, 2496, 192)]
#[case::two_turns_of_192(2048, 2496, 192)]
#[case::many_tiles(4096, 4096, 256)]
fn width_of_hopper_tiles(#[case] m: usize, #[case] n: usize, #[case] width: usize) {
    sources_of(90, |client| {
        let blueprint = select(client, &problem(m, n, 128), Strategy::Auto);
        match blueprint.expect("a kernel") {
            Blueprint::Hopper(blueprint) => assert_eq!(blueprint.tile.tile_n, width),
            other => panic!("{other:?}"),
        }
    });
}

/// Large tiles, but where their cubes would be alone on their multiprocessors. Where shared memory has room for two
/// cubes of two stages only, that is a choice.
#[rstest]
#[case::one_turn(90, 1024, 1664, 64)]
#[case::two_turns(90, 2048, 1664, 128)]
#[case::two_cubes_of_two_stages(80, 2048, 1664, 128)]
fn size_of_tensor_core_tiles(
    #[case] architecture: u16,
    #[case] m: usize,
    #[case] n: usize,
    #[case] size: usize,
) {
    sources_of(architecture, |client| {
        let blueprints = candidates(client, &problem(m, n, 128), Strategy::TensorCore);
        let sizes = blueprints.expect("a kernel");
        let sizes: Vec<(usize, usize)> = sizes
            .into_iter()
            .map(|blueprint| match blueprint {
                Blueprint::TensorCore(blueprint) => (blueprint.tile, blueprint.stages),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(sizes[0], (size, 3));
        assert_eq!(sizes.contains(&(128, 2)), architecture == 80);
    });
}

#[rstest]
fn sources_use_the_instructions_and_fit_the_memory(#[values(80, 89, 90, 120)] architecture: u16) {
    for source in tensor_core_sources(architecture) {
        for instruction in [
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
            "ldmatrix.sync.aligned.m8n8",
            "cp.async.cg.shared",
        ] {
            assert!(source.code.contains(instruction), "{}", source.code);
        }
        let available = max_shared_memory(architecture);
        assert!(
            source.shared_memory <= available,
            "sm_{architecture}: {} of {available} bytes of shared memory",
            source.shared_memory
        );
    }
}

/// Compiles as CubeCL does at run time, for the architecture itself where it is older than Hopper, else with the
/// instructions of this architecture alone.
#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_kernels(
    #[values((80, "sm_80"), (89, "sm_89"), (90, "sm_90a"), (120, "sm_120a"))] target: (u16, &str),
    #[values(
        tensor_core_sources,
        adamw_sources,
        quantize_sources,
        number_sources,
        learned_step_sources,
        sampling_sources,
        layer_sources,
        portable_attention_sources,
        tensor_core_attention_sources
    )]
    sources: fn(u16) -> Vec<Source>,
) {
    let (architecture, name) = target;
    compile(sources(architecture), name);
}

#[rstest]
#[case(80, "sm_80")]
#[case(89, "sm_89")]
#[case(90, "sm_90a")]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_int4_products(#[case] architecture: u16, #[case] name: &str) {
    let sources = int4_sources(architecture, [1, 128, 128, 64]);
    assert_eq!(sources.len(), outputs().len() * 2);
    for source in &sources {
        let instruction = "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32";
        assert!(source.code.contains(instruction));
        assert!(2 * source.shared_memory < max_shared_memory(89));
    }
    compile(sources, name);
}

#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_hopper_sources(
    #[values("gemm_hopper", "gemm_rowwise_hopper", "gemm_float_hopper")] name: &str,
) {
    compile(hopper_sources(name), "sm_90a");
}

#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_fp8_products() {
    compile(fp8_sources(), "sm_90a");
}

#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_products_of_quantized_output() {
    compile(rounded_sources(), "sm_90a");
}

#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_one_scale_for_a_matrix() {
    compile(matrix_scale_sources(), "sm_90a");
}

#[rstest]
#[case(80, "sm_80")]
#[case(90, "sm_90a")]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_quantized_swiglu(#[case] architecture: u16, #[case] name: &str) {
    compile(swiglu_sources(architecture), name);
}

#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_norms_gelu_and_groups() {
    for (architecture, name) in [(80, "sm_80"), (90, "sm_90a")] {
        compile(norm_sources(architecture), name);
        compile(gelu_sources(architecture), name);
    }
    compile(emulate_norms::all_sources(), "sm_90a");
    compile(group_sources(), "sm_90a");
}

#[rstest]
#[ignore = "needs NVRTC: CUDA_PATH=$(.ci/nvrtc), then --test compile -- --ignored"]
fn nvrtc_compiles_attention() {
    compile(attention_sources(90), "sm_90a");
}

/// Compiles one of the sources, another one each time, or with `KERNELS_TEST_ALL` all of them: see [`Random::few`].
fn compile(sources: Vec<Source>, architecture: &str) {
    let sources = Random::fresh().few(sources, 1);
    let nvrtc = Nvrtc::get();
    let threads = available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for part in sources.chunks(sources.len().div_ceil(threads)) {
            scope.spawn(move || {
                for source in part {
                    let code = nvrtc.compile(&source.code, architecture);
                    let code =
                        code.unwrap_or_else(|log| panic!("{architecture}: {log}\n{}", source.code));
                    assert!(
                        code.starts_with(b"\x7fELF"),
                        "{architecture}: no machine code"
                    );
                }
            });
        }
    });
}
