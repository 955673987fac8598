//! Bytes of real text: loading, the held-out split, and samples that depend on nothing but the seed and their number.

use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

/// At most this much text is loaded: whole files, picked by the hash of their path, so spread over the tree.
pub const MAX_BYTES: usize = 64 << 20;
/// At most this much is read of one file of a folder, so that no generated file dominates.
pub const MAX_FILE_BYTES: usize = 256 << 10;
/// One file in this many is held out for validation.
const HELD_OUT: u64 = 20;
/// Stands between two files.
const SEPARATOR: u8 = 0;

/// Text to train on and text held out.
#[derive(Debug)]
pub struct Text {
    /// The training split.
    pub train: Vec<u8>,
    /// The validation split.
    pub valid: Vec<u8>,
    /// A line on the loaded text, for people.
    pub description: String,
}

impl Text {
    /// Loads `data`, a file or a folder; without it the Rust sources under `$CARGO_HOME/registry/src`.
    ///
    /// A folder is split by file: the hash of a file's relative path decides whether it is held out. Of a single file
    /// the last twentieth is held out.
    ///
    /// # Errors
    ///
    /// An unreadable path, a folder without text, or too little text for one sequence in either split.
    pub fn load(data: Option<&Path>, sequence: usize) -> Result<Self> {
        let text = match data {
            Some(path) => {
                let meta = fs::metadata(path)
                    .with_context(|| format!("cannot read the data {}", path.display()))?;
                if meta.is_dir() {
                    Self::folder(path, None)?
                } else {
                    Self::file(path)?
                }
            }
            None => Self::folder(&registry()?, Some("rs"))?,
        };
        for (name, split) in [("training", &text.train), ("validation", &text.valid)] {
            ensure!(
                split.len() > sequence,
                "too little text: {} bytes in the {name} split of {}, and one sequence takes {}",
                split.len(),
                data.map_or("the Cargo registry".into(), |path| path
                    .display()
                    .to_string()),
                sequence + 1
            );
        }
        Ok(text)
    }

    fn file(path: &Path) -> Result<Self> {
        let mut train = Vec::new();
        fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES as u64).read_to_end(&mut train))
            .with_context(|| format!("cannot read the data {}", path.display()))?;
        let valid = train.split_off(train.len() - train.len() / HELD_OUT as usize);
        let description = format!(
            "{} of {}, the last {} held out",
            bytes(train.len() + valid.len()),
            path.display(),
            bytes(valid.len())
        );
        Ok(Self {
            train,
            valid,
            description,
        })
    }

    fn folder(root: &Path, extension: Option<&str>) -> Result<Self> {
        let mut files = Vec::new();
        walk(root, root, extension, &mut files)
            .with_context(|| format!("cannot read the data folder {}", root.display()))?;
        ensure!(
            !files.is_empty(),
            "the data folder {} holds no {}",
            root.display(),
            extension.map_or("text".into(), |it| format!("*.{it} file"))
        );
        let found = files.len();

        // Too much text: keep the files whose hashes come first. A pure function of the tree's paths and sizes.
        files.sort_by(|a, b| (a.hash, &a.name).cmp(&(b.hash, &b.name)));
        let mut total = 0;
        files.retain(|file| {
            total += file.bytes;
            total - file.bytes < MAX_BYTES
        });

        // The file that comes first is held out even if its hash says otherwise: some text has to be.
        let mut held_out: Vec<_> = files.iter().map(|it| it.hash % HELD_OUT == 0).collect();
        if !held_out.contains(&true) && files.len() > 1 {
            held_out[0] = true;
        }
        let mut files: Vec<_> = files.into_iter().zip(held_out).collect();
        files.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));

        let (mut train, mut valid) = (Vec::new(), Vec::new());
        for (file, held_out) in &files {
            let split = if *held_out { &mut valid } else { &mut train };
            fs::File::open(&file.path)
                .and_then(|it| it.take(MAX_FILE_BYTES as u64).read_to_end(split))
                .with_context(|| format!("cannot read the data file {}", file.path.display()))?;
            split.push(SEPARATOR);
        }
        if files.len() == 1 {
            valid = train.split_off(train.len() - train.len() / HELD_OUT as usize);
        }
        let description = format!(
            "{} from {} of the {found} files under {}, {} of it held out",
            bytes(train.len() + valid.len()),
            files.len(),
            root.display(),
            bytes(valid.len()),
        );
        Ok(Self {
            train,
            valid,
            description,
        })
    }

    /// A hash of both splits: a resumed run must see the text that it began with.
    pub fn fingerprint(&self) -> String {
        format!(
            "{:016x}",
            mix(fnv(&self.train), fnv(&self.valid) ^ self.valid.len() as u64)
        )
    }
}

struct File {
    path: PathBuf,
    /// Relative path with `/` between its parts: the same on every system.
    name: String,
    hash: u64,
    bytes: usize,
}

fn walk(
    root: &Path,
    folder: &Path,
    extension: Option<&str>,
    files: &mut Vec<File>,
) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() {
            walk(root, &path, extension, files)?;
        } else if kind.is_file()
            && extension.is_none_or(|it| path.extension().is_some_and(|other| other == it))
        {
            let bytes = (entry.metadata()?.len() as usize).min(MAX_FILE_BYTES);
            if bytes == 0 {
                continue;
            }
            let relative = path.strip_prefix(root).unwrap_or(&path);
            let parts: Vec<_> = relative.iter().map(|it| it.to_string_lossy()).collect();
            let name = parts.join("/");
            files.push(File {
                hash: mix(fnv(name.as_bytes()), 0),
                path,
                name,
                bytes,
            });
        }
    }
    Ok(())
}

fn registry() -> Result<PathBuf> {
    let cargo_home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    match cargo_home.map(|home| home.join("registry").join("src")) {
        Some(path) if path.is_dir() => Ok(path),
        Some(path) => bail!(
            "no Rust sources under {}: give some text with --data PATH",
            path.display()
        ),
        None => bail!("neither CARGO_HOME nor a home folder is set: give some text with --data"),
    }
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// SplitMix64's finalizer over a pair.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_add(b.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number of bytes for people.
pub fn bytes(count: usize) -> String {
    match count {
        0..1024 => format!("{count} B"),
        1024..1_048_576 => format!("{:.1} KiB", count as f64 / 1024.0),
        _ => format!("{:.1} MiB", count as f64 / 1_048_576.0),
    }
}

/// Which windows of a text a [`Windows`] loader serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Sample `k` starts where a hash of the seed and `k` says.
    Random {
        /// The run's seed.
        seed: u64,
    },
    /// This many windows, spread evenly.
    Even {
        /// How many.
        count: usize,
    },
}

/// Serves windows of a text in batches.
///
/// There is no shuffle state: batch `i` is a pure function of the order and `i`, so a run resumes by number alone.
#[derive(Clone, Debug)]
pub struct Windows<B: Backend> {
    text: Arc<[u8]>,
    order: Order,
    batch: usize,
    sequence: usize,
    batches: Range<usize>,
    device: B::Device,
}

impl<B: Backend> Windows<B> {
    /// Training batches `steps.start..steps.end` of the run with this seed.
    pub fn train(
        text: Arc<[u8]>,
        seed: u64,
        batch: usize,
        sequence: usize,
        steps: Range<usize>,
        device: &B::Device,
    ) -> Self {
        Self {
            text,
            order: Order::Random { seed },
            batch,
            sequence,
            batches: steps,
            device: device.clone(),
        }
    }

    /// A fixed set of `count` windows, the last batch possibly smaller.
    pub fn valid(
        text: Arc<[u8]>,
        count: usize,
        batch: usize,
        sequence: usize,
        device: &B::Device,
    ) -> Self {
        Self {
            text,
            order: Order::Even { count },
            batch,
            sequence,
            batches: 0..count.div_ceil(batch),
            device: device.clone(),
        }
    }

    /// Where sample `k` begins.
    pub fn offset(&self, k: usize) -> usize {
        // A window needs one byte more than its length, for the last target.
        let starts = (self.text.len() - self.sequence) as u128;
        match self.order {
            Order::Random { seed } => {
                ((u128::from(mix(mix(seed, 1), k as u64)) * starts) >> 64) as usize
            }
            Order::Even { count } => (k as u128 * starts / count as u128) as usize,
        }
    }

    /// The bytes of sample `k`: one sequence and the byte after it.
    pub fn sample(&self, k: usize) -> &[u8] {
        let start = self.offset(k);
        &self.text[start..=start + self.sequence]
    }

    /// Batch `batch`, counted from the run's first.
    pub fn batch(&self, batch: usize) -> Batch<B> {
        let end = match self.order {
            Order::Random { .. } => (batch + 1) * self.batch,
            Order::Even { count } => ((batch + 1) * self.batch).min(count),
        };
        let samples = batch * self.batch..end;
        let shape = [samples.len(), self.sequence];
        let tensor = |skip: usize| {
            let tokens: Vec<i32> = samples
                .clone()
                .flat_map(|k| self.sample(k)[skip..skip + self.sequence].iter())
                .map(|byte| i32::from(*byte))
                .collect();
            Tensor::from_data(TensorData::new(tokens, shape), &self.device)
        };
        Batch {
            inputs: tensor(0),
            targets: tensor(1),
        }
    }
}

/// Token ids and the ids that follow them, both `[batch, sequence]`.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    /// The tokens that the model reads.
    pub inputs: Tensor<B, 2, Int>,
    /// The tokens that it is to predict.
    pub targets: Tensor<B, 2, Int>,
}

impl<B: Backend> Batch<B> {
    /// How many tokens the model predicts.
    pub fn tokens(&self) -> usize {
        self.inputs.dims().iter().product()
    }
}

impl<B: Backend> DataLoader<B, Batch<B>> for Windows<B> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch<B>> + 'a> {
        Box::new(WindowsIter {
            next: self.batches.start,
            windows: self,
        })
    }

    fn num_items(&self) -> usize {
        self.batches.end
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, Batch<B>>> {
        Arc::new(Self {
            device: device.clone(),
            ..self.clone()
        })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
        Arc::new(Self {
            batches: start..end,
            ..self.clone()
        })
    }
}

struct WindowsIter<'a, B: Backend> {
    windows: &'a Windows<B>,
    next: usize,
}

impl<B: Backend> Iterator for WindowsIter<'_, B> {
    type Item = Batch<B>;

    fn next(&mut self) -> Option<Batch<B>> {
        (self.next < self.windows.batches.end).then(|| {
            self.next += 1;
            self.windows.batch(self.next - 1)
        })
    }
}

impl<B: Backend> DataLoaderIterator<Batch<B>> for WindowsIter<'_, B> {
    fn progress(&self) -> Progress {
        Progress::new(self.next, self.windows.batches.end)
    }
}
