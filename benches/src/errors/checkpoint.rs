//! A checkpoint of `pretrain`, and the batch that its next step reads.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, anyhow, ensure};
use burn::{
    module::Module,
    record::{FullPrecisionSettings, NamedMpkFileRecorder, Recorder},
    tensor::{ElementConversion, backend::Backend},
};
use examples::{
    checkpoint::{Checkpoints, State},
    data::{Batch, Text, Windows},
};

use super::{
    ErrorResults, ErrorRows, Model,
    capture::{Exactly, capture},
    contexts::{self, Library},
    decoder::{Decoder, Exact},
    granularity, groups, hadamard,
};

/// The newest checkpoint of a run.
pub struct Checkpoint {
    state: State,
    /// The model's record, without its extension.
    record: PathBuf,
    text: Arc<[u8]>,
}

impl Checkpoint {
    /// That of the run in this folder.
    ///
    /// # Errors
    ///
    /// There is none, it is damaged, or the text has changed since it was made.
    pub fn open(run: &Path) -> Result<Self> {
        let shown = run.display();
        let state = Checkpoints::new(run.to_owned()).state()?;
        let state = state.with_context(|| format!("there is no checkpoint of a run in {shown}"))?;
        let config = &state.config;
        let text = Text::load(config.data.as_deref(), config.sequence)?;
        ensure!(
            text.fingerprint() == config.fingerprint,
            "the text has changed since the checkpoint in {shown} was made"
        );
        let step = state.step;
        Ok(Self {
            record: run.join(format!("step-{step}/model-{step}")),
            text: text.train.into(),
            state,
        })
    }

    /// All sweeps.
    ///
    /// It chooses the context of the whole process: nothing else may train meanwhile.
    ///
    /// # Errors
    ///
    /// The record is not that of the model, or a gradient is missing.
    pub fn errors(&self) -> Result<Vec<ErrorResults>> {
        let device = Default::default();
        let config = &self.state.config;
        let decoder = Decoder::<Exactly>::new(&config.model, &device);
        let decoder = self.loaded(decoder)?;
        let of_library = config.model.init::<Library>(&device);
        let of_library = self.loaded(of_library)?;
        let batch = self.batch::<Exactly>();

        let loss = decoder.loss(batch.clone(), &mut Exact).into_scalar();
        let model = Model {
            steps: self.state.step,
            seed: config.seed,
            parameters: decoder.num_params(),
            hidden: config.model.hidden,
            layers: config.model.layers,
            batch: [config.batch, config.sequence],
            loss: loss.elem(),
        };
        let captured = capture(&decoder, batch.clone())?;
        let mut contexts = contexts::of_operators(&decoder, &batch);
        contexts.extend(contexts::of_library(&of_library, &self.batch()));
        let all = [
            ErrorRows::Contexts(contexts),
            ErrorRows::Groups(groups::errors(&decoder, &batch, &captured)?),
            ErrorRows::Granularity(granularity::by_granularity(&captured)),
            ErrorRows::Formats(granularity::by_format(&captured)),
            ErrorRows::Hadamard(hadamard::errors(&captured)?),
        ];
        let results = all.map(|rows| ErrorResults {
            model: model.clone(),
            rows,
        });
        Ok(results.into())
    }

    /// The batch of the next step.
    fn batch<B: Backend>(&self) -> Batch<B> {
        let State { config, step, .. } = &self.state;
        let windows = Windows::<B>::train(
            self.text.clone(),
            config.seed,
            config.batch,
            config.sequence,
            *step..step + 1,
            &Default::default(),
        );
        windows.batch(*step)
    }

    fn loaded<B: Backend, M: Module<B>>(&self, model: M) -> Result<M> {
        let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
        let record = Recorder::<B>::load(&recorder, self.record.clone(), &Default::default());
        let record = record.map_err(|error| {
            let shown = self.record.display();
            anyhow!("{shown}.mpk is not the record of a decoder: {error}")
        })?;
        Ok(model.load_record(record))
    }
}
