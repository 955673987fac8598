//! A model's sizes from the header of a safetensors file (huggingface.co/docs/safetensors): 8 bytes of its length, then
//! JSON of names, types, shapes and places. The tensors are not read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::Metadata;

use super::shapes::{Family, Shapes};

/// Longer headers are refused, as by the library.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header's length.
const LENGTH: u64 = 8;

/// The sizes of the decoder whose weights a file holds; `heads`: attention heads, which no shape says.
///
/// # Errors
///
/// A file that cannot be read or is damaged, names of another architecture, shapes that do not fit each other, or no
/// `heads`.
pub fn shapes(path: &Path, heads: Option<usize>) -> Result<Shapes> {
    let tensors = header(path).with_context(|| format!("cannot read {}", path.display()))?;
    let at = || format!("in {}", path.display());
    Names::new(&tensors)
        .and_then(|names| names.shapes(heads))
        .with_context(at)
}

/// Names and shapes of the tensors.
fn header(path: &Path) -> Result<BTreeMap<String, Vec<usize>>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    ensure!(
        size >= LENGTH,
        "it is no safetensors file: it has {size} bytes, fewer than a header's length"
    );
    let mut length = [0; LENGTH as usize];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    ensure!(
        length <= MAX_HEADER && length <= size - LENGTH,
        "it is no safetensors file, or was cut off: its header would have {length} bytes of {size}"
    );
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .context("its header is damaged or no safetensors header")?;
    let expected = LENGTH + length + metadata.data_len() as u64;
    ensure!(
        size == expected,
        "it was cut off or has something behind its tensors: {size} bytes, where its header says {expected}"
    );
    let tensors = metadata.tensors().into_iter();
    Ok(tensors
        .map(|(name, info)| (name, info.shape.clone()))
        .collect())
}

/// The names of tensors, in the words of a family. Of several names the first that is there counts.
struct Roles {
    family: Family,
    embedding: &'static [&'static str],
    positions: &'static [&'static str],
    /// Queries; with those of keys and values beside them in GPT-2.
    queries: &'static [&'static str],
    keys: &'static [&'static str],
    heads: &'static [&'static str],
    /// The first layer of the feed-forward network.
    inside: &'static [&'static str],
}

/// The families, and the names of Hugging Face and of Burn models such as that of `pretrain`.
const ROLES: [Roles; 2] = [
    Roles {
        family: Family::Llama,
        embedding: &[
            "embed_tokens.weight",
            "tok_embeddings.weight",
            "embedding.weight",
        ],
        positions: &[],
        queries: &[
            "self_attn.q_proj.weight",
            "attention.wq.weight",
            "attention.q.weight",
        ],
        keys: &[
            "self_attn.k_proj.weight",
            "attention.wk.weight",
            "attention.k.weight",
        ],
        heads: &[
            "self_attn.o_proj.weight",
            "attention.wo.weight",
            "attention.o.weight",
        ],
        inside: &[
            "mlp.gate_proj.weight",
            "feed_forward.w1.weight",
            "mlp.gate.weight",
        ],
    },
    Roles {
        family: Family::Gpt2,
        embedding: &["wte.weight", "embedding.weight"],
        positions: &["wpe.weight", "positions.weight"],
        queries: &["attn.c_attn.weight", "attention.qkv.weight"],
        keys: &[],
        heads: &["attn.c_proj.weight", "attention.o.weight"],
        inside: &["mlp.c_fc.weight", "mlp.up.weight"],
    },
];

/// Names of a vocabulary head of its own.
const HEADS: &[&str] = &["lm_head.weight", "output.weight"];

struct Names<'a> {
    tensors: &'a BTreeMap<String, Vec<usize>>,
    roles: &'static Roles,
    layers: usize,
}

/// The number of the layer that a name is of: of its first part that is a number.
fn layer(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

impl<'a> Names<'a> {
    fn new(tensors: &'a BTreeMap<String, Vec<usize>>) -> Result<Self> {
        let is_of = |roles: &&Roles| {
            let ends = |name: &String| roles.queries.iter().any(|end| name.ends_with(end));
            tensors.keys().any(ends)
        };
        let Some(roles) = ROLES.iter().find(is_of) else {
            let first = tensors.keys().next().map_or("no tensor", String::as_str);
            bail!(
                "no attention layer with the names of Llama or GPT-2 among its tensors ({first}, ..): describe the \
                 model by --hidden, --layers and the others"
            );
        };
        let of_queries = |name: &&String| roles.queries.iter().any(|end| name.ends_with(end));
        let numbers = tensors.keys().filter(of_queries).filter_map(|it| layer(it));
        let layers: Vec<usize> = numbers.collect();
        let count = layers.iter().max().map_or(1, |last| last + 1);
        ensure!(
            layers.len() == count,
            "{} of {count} layers are there: the others are in other files, and one file says too little",
            layers.len()
        );
        Ok(Self {
            tensors,
            roles,
            layers: count,
        })
    }

    /// The matrix with one of these names, and the name.
    fn matrix(&self, names: &[&str]) -> Result<Option<(&'a str, [usize; 2])>> {
        let found = names.iter().find_map(|end| {
            let ends = |name: &&String| name.ends_with(end);
            let name = self.tensors.keys().find(ends)?;
            Some((name.as_str(), self.tensors[name].as_slice()))
        });
        match found {
            None => Ok(None),
            Some((name, &[rows, cols])) if rows * cols > 0 => Ok(Some((name, [rows, cols]))),
            Some((name, shape)) => bail!("{name} has the shape {shape:?}, and should be a matrix"),
        }
    }

    fn needed(&self, names: &[&str]) -> Result<(&'a str, [usize; 2])> {
        self.matrix(names)?
            .with_context(|| format!("there is no tensor {}", names.join(" or ")))
    }

    /// The other side of a matrix that has `hidden` on one: frameworks disagree on which is which.
    fn beside(&self, names: &[&str], hidden: usize) -> Result<usize> {
        match self.needed(names)? {
            (_, [rows, cols]) if cols == hidden => Ok(rows),
            (_, [rows, cols]) if rows == hidden => Ok(cols),
            (name, shape) => {
                bail!(
                    "{name} has the shape {shape:?}: neither side is the width {hidden} of the embedding"
                )
            }
        }
    }

    fn shapes(&self, heads: Option<usize>) -> Result<Shapes> {
        let roles = self.roles;
        let (_, [vocabulary, hidden]) = self.needed(roles.embedding)?;
        let all = self.beside(roles.heads, hidden)?;
        let of_keys = match roles.family {
            Family::Llama => self.beside(roles.keys, hidden)?,
            Family::Gpt2 => all,
        };
        let heads = heads
            .context("the shapes do not say how many attention heads there are: add --heads")?;
        ensure!(
            all.is_multiple_of(heads) && of_keys.is_multiple_of(all / heads),
            "{heads} heads do not fit queries of {all} features and keys of {of_keys}"
        );
        let head_width = all / heads;
        let positions = self.matrix(roles.positions)?;
        Ok(Shapes {
            family: roles.family,
            hidden,
            layers: self.layers,
            heads,
            kv_heads: of_keys / head_width,
            head_width,
            ffn: self.beside(roles.inside, hidden)?,
            vocabulary,
            positions: positions.map_or(0, |(_, [positions, _])| positions),
            is_tied: self.matrix(HEADS)?.is_none(),
            has_dropout: false,
        })
    }
}
