//! The run of `pretrain` when it is asked for nothing: a comparison that says something within minutes.
//!
//! Two runs from scratch differ by chance more than two recipes do. So one run trains most of the steps in mixed
//! precision, and both recipes go on from its checkpoint, each with several seeds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use burn_quant_train::recipe::Name;
use textplots::{Chart, Plot, Shape};

use crate::args::{Args, Device};
use crate::config::{Config, DEFAULT};
use crate::report::{Report, ResultFile};
use crate::statistics::{Mean, paired_differences, percent};
use crate::{Done, Program, curve, data, dispatch, folder};

/// Steps of which a third is one.
const SHORTEST: usize = 3;
/// Seeds of each recipe.
const SEEDS: usize = 4;

/// True if the command line says neither which runs there are nor where they begin.
pub fn is_asked_for(args: &Args) -> bool {
    let plain = args.recipe.is_empty() && args.seed.is_none() && args.seeds.is_none();
    plain && args.resume.is_none() && args.fork.is_none() && args.stop_after.is_none()
}

/// Trains, and says what came of it.
///
/// # Errors
///
/// As those of the runs.
pub fn run(program: &Program<'_>, args: &Args) -> Result<ExitCode> {
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| PathBuf::from(folder::DEFAULT));
    let [recipe, baseline] = DEFAULT;
    let config = Config::new(args)?;
    dispatch::check_built(&config)?;
    let steps = config.steps;
    ensure!(
        steps >= SHORTEST,
        "--steps {steps} leaves none to compare recipes in: use at least {SHORTEST}, or --recipe for runs from the start"
    );
    let first = steps - steps / 3;
    println!(
        "{first} of {steps} steps under {baseline}; then the rest under {baseline} and {recipe}, with {SEEDS} seeds each"
    );
    args.json.as_deref().map(ResultFile::new).transpose()?;
    let base = Args {
        recipe: vec![baseline],
        stop_after: Some(first),
        out: Some(out.join("base")),
        json: None,
        ..args.clone()
    };
    let begun = program.train(&base)?;
    let [of_base, of_forks] = ["base", "forks"].map(|name| out.join(name).display().to_string());
    if begun.interrupted {
        println!(
            "go on with: pretrain --resume {of_base} --stop-after {first}\n\
             and then:   pretrain --fork {of_base} --out {of_forks} --recipe {baseline},{recipe} --seeds {SEEDS}"
        );
        return Ok(ExitCode::from(130));
    }
    let forks = Args {
        recipe: vec![baseline, recipe],
        seeds: Some(SEEDS),
        fork: base.out,
        out: Some(out.join("forks")),
        ..args.clone()
    };
    let done = program.train(&forks)?;
    if done.interrupted {
        println!("go on with: pretrain --resume {of_forks}");
        return Ok(ExitCode::from(130));
    }
    print!("\n{}", summary(&done, recipe, baseline));
    Ok(ExitCode::SUCCESS)
}

/// A curve, what the recipe cost and saved, and what to try next.
fn summary(done: &Done, recipe: Name, baseline: Name) -> String {
    let of = |name: Name| -> Vec<&Report> {
        let reports = done.reports.iter();
        reports.filter(|report| report.recipe == name).collect()
    };
    let (ours, theirs) = (of(recipe), of(baseline));
    let losses = |reports: &[&Report]| -> Vec<(u64, f64)> {
        let losses = reports.iter().map(|report| (report.seed, report.val_loss));
        losses.collect()
    };
    let mean = |reports: &[&Report], figure: fn(&Report) -> f64| {
        let figures: Vec<_> = reports.iter().map(|report| figure(report)).collect();
        Mean::of(&figures).map_or(f64::NAN, |mean| mean.value)
    };
    let ratio = |figure| mean(&ours, figure) / mean(&theirs, figure);
    let mut text = ours.first().map_or_else(String::new, |report| plot(report));
    let differences = paired_differences(&losses(&ours), &losses(&theirs));
    if let Some(difference) = Mean::of(&differences) {
        let interval = difference.interval_in_percent().unwrap_or_default();
        text += &format!(
            "loss   {recipe} ends {} from {baseline}; 95% interval {interval}\n",
            percent(difference.value)
        );
    }
    let saved =
        |reports: &[&Report]| data::bytes(mean(reports, |it| it.activation_bytes as f64) as usize);
    text += &format!(
        "saved  {:.0}% of the activations that wait for the backward pass: {} instead of {}\n",
        100.0 * (1.0 - ratio(|it| it.activation_bytes as f64)),
        saved(&ours),
        saved(&theirs),
    );
    text += &format!(
        "cost   {:.2} times the time of a step on this device{}\n",
        1.0 / ratio(|it| it.tokens_per_s),
        match ours.first().map(|report| report.device) {
            Some(Device::Cpu) => "; it is GPUs that multiply INT8 faster",
            Some(_) | None => "",
        }
    );
    text + NEXT
}

const NEXT: &str = "\
next   pretrain --recipe fallback-int8 --health      what the recipe does to each layer
       pretrain --recipe hadamard-int4,luq-int4      INT4, from scratch
       pretrain --contexts int10                     all activations compressed
       pretrain --preset small --device cuda         30M parameters, in a build with the feature cuda
";

/// The training loss, from the first step on.
fn plot(report: &Report) -> String {
    let points = curve::thinned(&report.loss_curve);
    let points: Vec<(f32, f32)> = points
        .into_iter()
        .filter(|(_, loss)| loss.is_finite())
        .map(|(step, loss)| (step as f32, loss as f32))
        .collect();
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return String::new();
    };
    let mut chart = Chart::new(120, 40, first.0, last.0.max(first.0 + 1.0));
    let shape = Shape::Lines(&points);
    let chart = chart.lineplot(&shape);
    chart.axis();
    chart.figures();
    format!(
        "training loss of {}, seed {}\n{chart}\n",
        report.recipe, report.seed
    )
}
