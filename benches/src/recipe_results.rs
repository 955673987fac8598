//! What every recipe costs and gives, of one build on one kind of machine: losses of forks beside whole steps.

use anyhow::{Result, bail, ensure};
use examples::args::{Checkpointing, Contexts};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    paired::PairedLosses,
    results::{Peer, Results, Rows, Run, TrainingSpeed},
};

/// The result file of `report recipes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecipeResults {
    /// How the steps were measured, by file.
    pub runs: Vec<Run>,
    /// How those of PyTorch were.
    pub peers: Vec<Peer>,
    /// The steps, those of PyTorch among them.
    pub recipes: Vec<TrainingSpeed>,
    /// The losses, by checkpoint.
    pub losses: Vec<PairedLosses>,
}

impl RecipeResults {
    /// Gathers the texts of result files of `qt-bench memory` and of `report pair`.
    ///
    /// # Errors
    ///
    /// One is neither, or there is none of a kind; the devices or the features differ; two steps have one subject and
    /// one model; a step has compressed contexts or layers that run again.
    pub fn of(texts: &[String]) -> Result<Self> {
        let mut all = Self {
            runs: Vec::new(),
            peers: Vec::new(),
            recipes: Vec::new(),
            losses: Vec::new(),
        };
        for text in texts {
            let value: Value = serde_json::from_str(text)?;
            if value.get("paired").is_some() {
                all.losses.push(serde_json::from_value(value)?);
                continue;
            }
            let Results { run, peer, rows } = serde_json::from_value(value)?;
            let Rows::Pretrain(rows) = rows else {
                bail!("a file has no training steps: {}", run.command);
            };
            all.runs.push(run);
            all.peers.extend(peer);
            all.recipes.extend(rows);
        }
        let (Some(first), Some(_)) = (all.runs.first(), all.losses.first()) else {
            bail!("a file of `qt-bench memory` and one of `report pair` are needed, or several");
        };
        ensure!(
            all.runs
                .iter()
                .all(|run| (&run.device, &run.features) == (&first.device, &first.features)),
            "the steps were measured on other devices, or with other features of Burn"
        );
        for (index, row) in all.recipes.iter().enumerate() {
            let is_twice = all.recipes[..index]
                .iter()
                .any(|other| (other.subject, &other.model) == (row.subject, &row.model));
            let name = row.subject.name();
            ensure!(!is_twice, "two steps of `{}` are {name}'s", row.model);
            ensure!(
                row.checkpointing == Checkpointing::None
                    && row.contexts.is_none_or(|it| it == Contexts::Exact),
                "a step of {name} is none of the recipe alone"
            );
        }
        Ok(all)
    }

    /// The models of the steps, in the order of their first ones.
    pub fn models(&self) -> Vec<&str> {
        let mut models = Vec::new();
        for row in &self.recipes {
            if !models.contains(&row.model.as_str()) {
                models.push(row.model.as_str());
            }
        }
        models
    }
}
