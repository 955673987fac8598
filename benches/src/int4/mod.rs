//! The stages of an INT4 linear layer: those of the Hadamard quantizer's product (HQ-MM) and of the products of sampled
//! rows (LSS-MM), as `HadamardInt4` launches them (int4-hq-lss, Fig. 6).

mod check;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cubecl::{cuda::CudaRuntime, ir::StorageType, prelude::*};
use cubecl_kernels::{
    bit_splitting::bit_split,
    gemm::{GemmOperand, Strategy, gemm},
    hadamard::{HadamardSize, HadamardTransform},
    layout::Layout,
    leverage_score::{
        RowSample, gather_int4_rows, gather_parts, gather_scaled, int4_row_norms, leverage_scores,
        sample_rows,
    },
    number::Number,
    quantize::{
        Quantized,
        learned_step::{
            ElementSource, Gradient, LearnedStep, ResidualRows, SATURATION_GROUP, SavedRounding,
            backward, cold_step, quantize,
        },
        unpack_int4,
    },
    rounding::{Rounding, StochasticKey},
    transpose::transpose_bytes,
};
use half::bf16;

use crate::{
    gpu::{self, Gpu, Report, Tensor, normal_matrix},
    random::Random,
    results::{Results, Rows, Spread, Stage, StageSpeed},
    timing::Sampling,
};

/// The layers to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Inputs and outputs of the layer
    #[arg(long = "int4-features", default_value_t = 4096, value_name = "N")]
    pub features: usize,
    /// Rows of its input
    #[arg(
        long = "int4-tokens",
        value_delimiter = ',',
        default_values = ["8192"],
        value_name = "N,.."
    )]
    pub tokens: Vec<usize>,
    /// k of the Hadamard transform of 2^k neighbours
    #[arg(long, default_value_t = 5, value_name = "K")]
    pub hadamard: u32,
}

/// One row of X of so many keeps residuals, as many as a layer keeps.
const RESIDUAL_INTERVAL: usize = 64;

type Matrix = Quantized<CudaRuntime>;
type Operand = GemmOperand<CudaRuntime>;

/// Checks the quantizer and the bit splitting of every size, then measures all stages. Says on stderr what it does, and
/// writes what it has to `json` after each stage.
///
/// # Errors
///
/// A result that differs from the host's, or a file that cannot be written.
pub fn run(gpu: &Gpu, settings: &Settings, json: Option<&Path>) -> Result<Results> {
    let sizes = settings.tokens.iter().chain([&settings.features]);
    ensure!(
        sizes.clone().all(|size| (128..=1 << 15).contains(size)),
        "--int4-features and --int4-tokens must lie from 128 to 2^15"
    );
    let size = HadamardSize::largest(settings.features, HadamardSize::new(settings.hadamard)?);
    let mut random = gpu.random();
    let mut report = Report::new(gpu, json, Rows::Int4)?;
    for &tokens in &settings.tokens {
        let layer = Layer {
            gpu,
            tokens,
            features: settings.features,
            size,
        };
        layer.run(&mut random, &mut report)?;
    }
    report.finish(None, [])
}

struct Layer<'a> {
    gpu: &'a Gpu,
    tokens: usize,
    features: usize,
    size: HadamardSize,
}

/// The matrices of a layer, and both its step sizes.
struct Matrices {
    x: Tensor,
    weight: Tensor,
    gradient: Tensor,
    steps: Tensor,
}

impl Matrices {
    fn of_x(&self) -> LearnedStep<'_, CudaRuntime> {
        self.step(0)
    }

    fn of_weight(&self) -> LearnedStep<'_, CudaRuntime> {
        self.step(1)
    }

    fn step(&self, layer: usize) -> LearnedStep<'_, CudaRuntime> {
        LearnedStep {
            steps: &self.steps,
            layer,
        }
    }
}

/// X and W as the backward pass has them.
struct Saved {
    x: Matrix,
    rounding: SavedRounding<CudaRuntime>,
    weight: Matrix,
}

impl Layer<'_> {
    fn run(&self, random: &mut Random, report: &mut Report<'_, StageSpeed>) -> Result<()> {
        let (gpu, features) = (self.gpu, self.features);
        let mut seed = || random.below(1 << 24) as u32;
        let of_tokens = [self.tokens, features];
        let matrices = Matrices {
            x: normal_matrix::<bf16>(gpu, &of_tokens, features, &[0], seed()),
            weight: normal_matrix::<f32>(gpu, &[features; 2], features, &[0], seed()),
            gradient: normal_matrix::<bf16>(gpu, &of_tokens, features, &[0], seed()),
            steps: gpu.upload(&[1.0f32; 2]),
        };
        let saved = self.hq_mm(report, &matrices)?;
        self.lss_mm(report, &matrices, &saved)?;
        drop((matrices, saved));
        gpu.client.memory_cleanup();
        Ok(())
    }

    fn along_x(&self) -> HadamardTransform {
        HadamardTransform::of_columns(self.size)
    }

    fn along_weight(&self) -> HadamardTransform {
        HadamardTransform::of_rows(self.size)
    }

    /// A product of so many rows.
    fn product(&self, rows: usize) -> Cost {
        Cost::Operations(2 * rows * self.features * self.features)
    }

    fn multiply(&self, a: &Operand, b: &Operand, dtype: StorageType) -> Result<Tensor> {
        let (client, strategy) = (&self.gpu.client, Strategy::Auto);
        Ok(gemm(client, a, b, None, None, dtype, strategy)?)
    }

    /// The forward pass.
    fn hq_mm(&self, report: &mut Report<'_, StageSpeed>, matrices: &Matrices) -> Result<Saved> {
        let (gpu, client) = (self.gpu, &self.gpu.client);
        let (along_x, along_weight) = (self.along_x(), self.along_weight());
        let (of_x, of_weight) = (matrices.of_x(), matrices.of_weight());
        let (x, weight) = (&matrices.x, &matrices.weight);
        cold_step(client, x, of_x, along_x)?;
        cold_step(client, weight, of_weight, along_weight)?;

        let residuals = ResidualRows::new(RESIDUAL_INTERVAL, 0)?;
        let of_codes = || quantize(client, x, of_x, along_x, Layout::RowMajor, Some(residuals));
        let (codes, rounding) = of_codes()?;
        check::quantizer(gpu, x, &matrices.steps, along_x, &codes)?;
        let elements = self.tokens * self.features;
        let cost = Cost::Bytes(2 * elements + elements / 2 + elements / SATURATION_GROUP);
        self.stage(report, Stage::QuantizeX, cost, of_codes)?;

        let of_codes = || quantize(client, weight, of_weight, along_weight, Layout::Both, None);
        let (of_weight, _) = of_codes()?;
        let cost = Cost::Bytes(5 * self.features * self.features);
        self.stage(report, Stage::QuantizeW, cost, of_codes)?;

        let saved = Saved {
            x: codes,
            rounding: rounding.context("no residuals were kept")?,
            weight: of_weight,
        };
        let dtype = bf16::as_type_native_unchecked().storage_type();
        self.stage(report, Stage::Forward, self.product(self.tokens), || {
            let (a, b) = (rows_of(gpu, &saved.x)?, columns_of(gpu, &saved.weight)?);
            self.multiply(&a, &b, dtype)
        })?;
        Ok(saved)
    }

    /// The backward pass.
    fn lss_mm(
        &self,
        report: &mut Report<'_, StageSpeed>,
        matrices: &Matrices,
        saved: &Saved,
    ) -> Result<()> {
        let (gpu, client) = (self.gpu, &self.gpu.client);
        let [f32, bf16] = [
            f32::as_type_native_unchecked().storage_type(),
            bf16::as_type_native_unchecked().storage_type(),
        ];
        let key = |stream| StochasticKey {
            seed: gpu.seed,
            stream,
        };
        let gradient = &matrices.gradient;
        let of_parts = || bit_split(client, gradient, Rounding::Stochastic(key(1)));
        let split = of_parts()?;
        check::split(gpu, gradient, key(1), &split)?;
        let cost = Cost::Bytes(3 * self.tokens * self.features);
        self.stage(report, Stage::BitSplitting, cost, of_parts)?;
        let sample = |x: Option<&Matrix>, stream| -> Result<RowSample<_>> {
            let norms = x.map(|x| int4_row_norms(client, x)).transpose()?;
            let scores = leverage_scores(client, &split.squared_norms, norms.as_ref())?;
            let (scales, expected) = (&split.scales, self.tokens);
            Ok(sample_rows(client, &scores, scales, expected, key(stream))?)
        };

        let of_rows = || sample(None, 2);
        let rows = of_rows()?;
        self.stage(report, Stage::SampleInput, Cost::Latency, of_rows)?;
        let of_parts = || gather_parts(client, &split, &rows);
        let parts = of_parts()?;
        self.stage(report, Stage::GatherInput, Cost::Latency, of_parts)?;
        let of_products = || {
            let (a, b) = (rows_of(gpu, &parts)?, rows_of(gpu, &saved.weight)?);
            self.multiply(&a, &b, bf16)
        };
        let products = of_products()?;
        let cost = self.product(rows.capacity());
        self.stage(report, Stage::Input, cost, of_products)?;
        self.stage(report, Stage::StraightThroughX, Cost::Latency, || {
            let gradient = Gradient::Sampled {
                products: &products,
                positions: &rows.positions,
            };
            let source = ElementSource::Saved {
                quantized: &saved.x,
                rounding: &saved.rounding,
            };
            backward(client, gradient, source, self.along_x(), bf16)
        })?;

        let of_rows = || sample(Some(&saved.x), 3);
        let rows = of_rows()?;
        self.stage(report, Stage::SampleWeight, Cost::Latency, of_rows)?;
        let gather = || -> Result<_> {
            let again = Rounding::Stochastic(key(4));
            let gradient = gather_scaled(client, &split, &rows, again, Layout::Transposed)?;
            let x = gather_int4_rows(client, &saved.x, &rows, Layout::Transposed)?;
            Ok((x, gradient))
        };
        let (x, gradient) = gather()?;
        self.stage(report, Stage::GatherWeight, Cost::Latency, gather)?;
        let of_product = || {
            let (a, b) = (columns_of(gpu, &x)?, columns_of(gpu, &gradient)?);
            self.multiply(&a, &b, f32)
        };
        let product = of_product()?;
        let cost = self.product(rows.capacity());
        self.stage(report, Stage::Weight, cost, of_product)?;
        self.stage(report, Stage::StraightThroughW, Cost::Latency, || {
            let source = ElementSource::Exact {
                x: &matrices.weight,
                step: matrices.of_weight(),
            };
            let gradient = Gradient::Dense(&product);
            backward(client, gradient, source, self.along_weight(), f32)
        })
    }

    /// Measures a stage, what it makes not looked at.
    fn stage<T, E: Into<anyhow::Error>>(
        &self,
        report: &mut Report<'_, StageSpeed>,
        stage: Stage,
        cost: Cost,
        mut launch: impl FnMut() -> Result<T, E>,
    ) -> Result<()> {
        let what = || format!("{}, {} x {}", stage.name(), self.tokens, self.features);
        let time = Sampling::LONG
            .time(
                || launch().map(drop).map_err(Into::into),
                || self.gpu.sync(),
            )
            .with_context(what)?;
        let (bytes, operations) = match cost {
            Cost::Bytes(bytes) => (Some(bytes), None),
            Cost::Operations(operations) => (None, Some(operations)),
            Cost::Latency => (None, None),
        };
        let copy = |bytes| -> Result<Spread> { Ok(gpu::copy(self.gpu, bytes, Sampling::LONG)?.1) };
        eprintln!("{}: {:.4} ms", what(), time.median_ms);
        report.add([StageSpeed {
            stage,
            tokens: self.tokens,
            features: self.features,
            time,
            bytes,
            copy: bytes.map(copy).transpose()?,
            operations,
        }])
    }
}

/// The bound of a stage.
enum Cost {
    /// Bytes that must move.
    Bytes(usize),
    /// Operations.
    Operations(usize),
    /// Several small launches, or a mixture.
    Latency,
}

/// The matrix as an operand that is summed over its columns; INT4 codes are unpacked first, as in training.
fn rows_of(gpu: &Gpu, matrix: &Matrix) -> Result<Operand> {
    let matrix = bytes_of(gpu, matrix, Layout::RowMajor)?;
    Ok(matrix.operand()?)
}

/// The same for its transpose.
fn columns_of(gpu: &Gpu, matrix: &Matrix) -> Result<Operand> {
    let mut matrix = bytes_of(gpu, matrix, Layout::Transposed)?;
    if let (None, Some(values)) = (&matrix.transposed, &matrix.values) {
        matrix.transposed = Some(transpose_bytes(&gpu.client, values)?);
    }
    Ok(matrix.operand_transposed()?)
}

fn bytes_of(gpu: &Gpu, matrix: &Matrix, layout: Layout) -> Result<Matrix> {
    let matrix = matrix.clone().only(layout);
    match matrix.number == Number::Int4 {
        true => Ok(unpack_int4(&gpu.client, &matrix)?),
        false => Ok(matrix),
    }
}
