//! The speed of the non-linear operators between linear layers, in the numbers in which values flow there, beside BF16.

mod burn_operator;
mod check;
mod flow;
mod launch;
mod reference;
mod turns;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use burn_quant_train::recipe::Name;
use clap::Args;
use cubecl::{frontend::CubePrimitive, ir::StorageType};
use examples::args::recipe_parser;
use half::bf16;

use crate::{
    gpu::{self, Gpu, Report},
    peers::Peers,
    random::Random,
    results::{Operator, OperatorSpeed, Results, Rows, Subject, tb_per_s},
    timing::Sampling,
};
use flow::Numbers;
use launch::{Launches, Operands, Values};
use reference::Parameters;
use turns::{TURNS, Turns};

/// The operators to measure.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Settings {
    /// Operators
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values = ["rms-norm", "layer-norm", "gelu", "swiglu"],
        value_name = "OPERATOR,.."
    )]
    pub operators: Vec<Operator>,
    /// Rows of their matrices: with few of them PyTorch's launches take longer than its kernels
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["32768"],
        value_name = "N,.."
    )]
    pub tokens: Vec<usize>,
    /// Columns of their matrices, if not 4096 of norms and 10880 of the others
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub columns: Vec<usize>,
    /// Recipes in whose numbers values flow
    #[arg(
        long,
        value_delimiter = ',',
        default_values = ["coat-fp8", "jetfire-int8", "jetfire-int8-128"],
        value_parser = recipe_parser(),
        value_name = "NAME,.."
    )]
    pub flows: Vec<Name>,
}

/// What norms add to the mean of squares.
const EPSILON: f32 = 1e-5;

impl Settings {
    /// The shapes of an operator's matrices.
    fn shapes(&self, operator: Operator) -> Vec<[usize; 2]> {
        let columns = match (&self.columns[..], operator) {
            ([], Operator::RmsNorm | Operator::LayerNorm) => &[4096],
            ([], Operator::Gelu | Operator::Swiglu) => &[10_880],
            (columns, _) => columns,
        };
        let of = |&tokens: &usize| columns.iter().map(move |&columns| [tokens, columns]);
        self.tokens.iter().flat_map(of).collect()
    }

    fn check(&self) -> Result<()> {
        let mut sizes = self.tokens.iter().chain(&self.columns);
        ensure!(
            sizes.all(|size| (1..=1 << 15).contains(size)),
            "--tokens and --columns must lie from 1 to 2^15"
        );
        Ok(())
    }
}

/// Checks every operator, then measures it. Says on stderr what it does, and writes what it has to `json` after each.
///
/// # Errors
///
/// A recipe without a flow, a result that differs from the reference, a file of peers that is none of this GPU, or a
/// file that cannot be written.
pub fn run(
    gpu: &Gpu,
    settings: &Settings,
    without_burn: bool,
    peers: Option<&Path>,
    json: Option<&Path>,
) -> Result<Results> {
    settings.check()?;
    let peers = peers.map(|path| Peers::read(path, &gpu.name)).transpose()?;
    let numbers_of = |name: &Name| Ok((*name, Numbers::of(*name, gpu.seed)?));
    let flows: Vec<(Name, Numbers)> = settings
        .flows
        .iter()
        .map(numbers_of)
        .collect::<Result<_>>()?;
    let mut random = gpu.random();
    let mut report = Report::new(gpu, json, Rows::Operators)?;
    let (bytes, copy) = gpu::copy(gpu, gpu::LARGE_COPY, Sampling::LONG)?;
    gpu.client.memory_cleanup();
    let copy_tb_per_s = tb_per_s(bytes, copy.median_ms);
    eprintln!("device copy: {copy_tb_per_s:.2} TB/s");
    for &operator in &settings.operators {
        for shape in settings.shapes(operator) {
            let parameters = Parameters::random(&mut random, shape[1]);
            let measured = Measured {
                gpu,
                operator,
                shape,
                parameters: &parameters,
                copy_tb_per_s,
            };
            for (name, numbers) in &flows {
                for alone in [false, true] {
                    report.add([measured.in_numbers(&mut random, *name, numbers, alone)?])?;
                }
            }
            if !without_burn {
                report.add([measured.in_burn(&mut random)?])?;
            }
        }
    }
    let rows = peers.iter().flat_map(Peers::operators);
    report.finish(peers.as_ref().map(Peers::run), rows)
}

/// An operator on matrices of one shape.
struct Measured<'a> {
    gpu: &'a Gpu,
    operator: Operator,
    shape: [usize; 2],
    parameters: &'a Parameters,
    copy_tb_per_s: f64,
}

impl Measured<'_> {
    fn in_numbers(
        &self,
        random: &mut Random,
        name: Name,
        numbers: &Numbers,
        alone: bool,
    ) -> Result<OperatorSpeed> {
        let subject = Subject::Recipe(name);
        let speed = self.of_kernels(random, subject, numbers, alone);
        self.gpu.client.memory_cleanup();
        let speed = speed.with_context(|| self.described(subject, alone))?;
        self.tell(&speed);
        Ok(speed)
    }

    fn of_kernels(
        &self,
        random: &mut Random,
        subject: Subject,
        numbers: &Numbers,
        alone: bool,
    ) -> Result<OperatorSpeed> {
        let gpu = self.gpu;
        let launches = Launches::new(gpu, self.operator, numbers, self.parameters, alone);
        let operands = (0..TURNS).map(|_| launches.operands(gpu, random, self.shape));
        let operands = operands.collect::<Result<Vec<Operands>, _>>()?;
        let statistics = |operands| Ok((operands, launches.forward(operands)?.statistics));
        let turns = operands.iter().map(statistics).collect::<Result<_>>()?;
        let turns = Turns::new(turns);

        let (operands, statistics) = turns.take();
        let forward = launches.forward(operands)?;
        let backward = launches.backward(operands, statistics)?;
        let rows = reference::sampled_rows(random, self.operator, self.shape[0]);
        check::check(gpu, &launches, &rows, operands, &forward, &backward)?;
        let read: usize = operands.inputs.iter().map(Values::bytes).sum();
        let of_inputs: usize = backward.of_inputs.iter().map(Values::bytes).sum();
        let forward_bytes = read + forward.output.bytes();
        let backward_bytes = read + operands.gradient.bytes() + of_inputs;
        drop((forward, backward));

        let forward = || {
            let (operands, _) = turns.take();
            launches.forward(operands)?;
            Ok(())
        };
        let backward = || {
            let (operands, statistics) = turns.take();
            launches.backward(operands, statistics)?;
            Ok(())
        };
        Ok(OperatorSpeed {
            operator: self.operator,
            tokens: self.shape[0],
            columns: self.shape[1],
            subject,
            alone,
            forward: Sampling::SHORT.time(forward, || gpu.sync())?,
            backward: Sampling::SHORT.time(backward, || gpu.sync())?,
            forward_bytes,
            backward_bytes,
            copy_tb_per_s: Some(self.copy_tb_per_s),
        })
    }

    fn in_burn(&self, random: &mut Random) -> Result<OperatorSpeed> {
        let subject = Subject::Burn;
        let rows = reference::sampled_rows(random, self.operator, self.shape[0]);
        let passes =
            burn_operator::measure(self.gpu, self.operator, self.shape, self.parameters, &rows);
        let passes = passes.with_context(|| self.described(subject, false))?;
        let speed = OperatorSpeed {
            copy_tb_per_s: Some(self.copy_tb_per_s),
            ..OperatorSpeed::of_floats(self.operator, self.shape, subject, passes)
        };
        self.tell(&speed);
        Ok(speed)
    }

    fn tell(&self, speed: &OperatorSpeed) {
        let [forward, backward] = speed.tb_per_s();
        eprintln!(
            "{}: forward {:.4} ms, {forward:.2} TB/s, backward {:.4} ms, {backward:.2} TB/s",
            self.described(speed.subject, speed.alone),
            speed.forward.median_ms,
            speed.backward.median_ms,
        );
    }

    fn described(&self, subject: Subject, alone: bool) -> String {
        let [tokens, columns] = self.shape;
        let alone = if alone { ", alone" } else { "" };
        format!(
            "{} of {tokens} x {columns}, {}{alone}",
            self.operator.name(),
            subject.name()
        )
    }
}

/// The type of floats.
fn float_dtype() -> StorageType {
    bf16::as_type_native_unchecked().storage_type()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_have_their_own_columns() {
        let settings = |columns: &[usize]| Settings {
            operators: vec![Operator::Gelu],
            tokens: vec![128, 256],
            columns: columns.to_vec(),
            flows: Vec::new(),
        };
        let own = settings(&[]);
        assert_eq!(own.shapes(Operator::LayerNorm), [[128, 4096], [256, 4096]]);
        assert_eq!(own.shapes(Operator::Gelu), [[128, 10_880], [256, 10_880]]);
        assert_eq!(
            settings(&[64]).shapes(Operator::Gelu),
            [[128, 64], [256, 64]]
        );
        assert!(own.check().is_ok() && settings(&[0]).check().is_err());
    }
}
