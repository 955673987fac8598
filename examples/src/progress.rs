//! Progress: Burn's dashboard in a terminal, plain lines elsewhere.

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, NumericEntry};
use burn::train::renderer::tui::TuiMetricsRendererWrapper;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{Interrupter, LearnerSummary};

use crate::metrics::History;

/// How many lines a whole run prints, about.
const LINES: usize = 25;

/// True if the dashboard can be drawn.
pub fn in_terminal() -> bool {
    std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Burn's dashboard.
pub fn dashboard(interrupter: Interrupter) -> Box<dyn MetricsRenderer> {
    Box::new(TuiMetricsRendererWrapper::new(interrupter, None))
}

/// Burn's dashboard thread polls without ever sleeping, which takes one core of the two that training has: let it run
/// only where nothing else would. Elsewhere than on Linux it keeps its core.
pub fn yield_to_training() {
    #[cfg(target_os = "linux")]
    for task in std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let id = task.file_name().to_str().and_then(|id| id.parse().ok());
        if name.trim() == "train-renderer" {
            let id = id.and_then(rustix::process::Pid::from_raw);
            let _ = rustix::process::setpriority_process(id, 19);
        }
    }
}

/// The dashboard puts the terminal into raw mode, where Ctrl-C is a key like any other. This makes it a signal again.
pub fn keep_ctrl_c() {
    #[cfg(unix)]
    {
        use nix::sys::termios::{LocalFlags, SetArg, tcgetattr, tcsetattr};
        let terminal = std::io::stdin();
        if let Ok(mut settings) = tcgetattr(&terminal)
            && !settings.local_flags.contains(LocalFlags::ISIG)
        {
            settings.local_flags.insert(LocalFlags::ISIG);
            let _ = tcsetattr(&terminal, SetArg::TCSANOW, &settings);
        }
    }
}

/// Prints a line now and then: step, loss and tokens/s, and beside them the loss that the runs before had at that step.
pub struct Lines {
    /// Name of the run, as wide as that of any other.
    pub label: String,
    /// Its losses.
    pub history: History,
    /// Recipes and losses of the runs before that had its seed.
    pub before: Vec<(String, History)>,
    /// Tokens of one step.
    pub tokens: usize,
    /// The step and the time of the last line.
    pub last: (usize, Instant),
}

impl Lines {
    fn line(&mut self, step: usize, steps: usize) -> Option<String> {
        let every = (steps / LINES).max(1);
        if step != 1 && !step.is_multiple_of(every) && step != steps {
            return None;
        }
        let loss = self.history.loss(step)?;
        let seconds = self.last.1.elapsed().as_secs_f64().max(1e-9);
        let speed = ((step - self.last.0) * self.tokens) as f64 / seconds;
        self.last = (step, Instant::now());
        let mut line = format!(
            "{} step {step:>6}/{steps}  loss {loss:.4}  {speed:>9.0} tokens/s",
            self.label
        );
        for (label, history) in &self.before {
            if let Some(loss) = history.loss(step) {
                line += &format!("  ({label}: {loss:.4})");
            }
        }
        Some(line)
    }
}

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, _state: MetricState) {}

    fn update_valid(&mut self, _state: MetricState) {}

    fn render_train(&mut self, item: TrainingProgress, _indicators: Vec<ProgressType>) {
        if let (Some(step), Some(progress)) = (item.iteration, item.progress)
            && let Some(line) = self.line(step, progress.items_total)
        {
            // A reader that went away (`| head`) is no reason to lose the run.
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }

    fn render_valid(&mut self, _item: TrainingProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn render_test(&mut self, _item: EvaluationProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {}
}

/// Any renderer: Burn asks for a type, and which it is depends on the terminal.
pub struct Boxed(pub Box<dyn MetricsRenderer>);

impl MetricsRendererTraining for Boxed {
    fn update_train(&mut self, state: MetricState) {
        self.0.update_train(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.0.update_valid(state);
    }

    fn render_train(&mut self, item: TrainingProgress, indicators: Vec<ProgressType>) {
        self.0.render_train(item, indicators);
    }

    fn render_valid(&mut self, item: TrainingProgress, indicators: Vec<ProgressType>) {
        self.0.render_valid(item, indicators);
    }

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        self.0.on_train_end(summary)
    }
}

impl MetricsRendererEvaluation for Boxed {
    fn update_test(&mut self, name: EvaluationName, state: MetricState) {
        self.0.update_test(name, state);
    }

    fn render_test(&mut self, item: EvaluationProgress, indicators: Vec<ProgressType>) {
        self.0.render_test(item, indicators);
    }
}

impl MetricsRenderer for Boxed {
    fn manual_close(&mut self) {
        self.0.manual_close();
    }

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.0.register_metric(definition);
    }
}

/// Losses are kept in the checkpoint and the report, so Burn need not write its log files.
pub struct NoLog;

impl MetricLogger for NoLog {
    fn log(&mut self, _update: MetricsUpdate, _epoch: usize, _split: &Split) {}

    fn read_numeric(
        &mut self,
        _name: &str,
        _epoch: usize,
        _split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, _definition: MetricDefinition) {}

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}
