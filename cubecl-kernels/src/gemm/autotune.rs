//! Chooses a product's blueprint by measuring: CubeCL's autotune, and its cache on disk (`[autotune] cache` in
//! `cubecl.toml`).
//!
//! Measured is what the selector takes for nearly as fast as its choice, at the first product of a kind, and only where
//! the choice is open. All candidates give the same bits, and each writes the output itself: which one is taken changes
//! no result. While a product is measured in one thread, others of its kind run the selector's choice.

use std::fmt;

use cubecl::{
    AutotuneKey,
    ir::StorageType,
    prelude::*,
    tune::{InputGenerator, LocalTuner, Tunable, TunableSet, TuneGroup, TuneInputs, local_tuner},
};
use serde::{Deserialize, Serialize};

use crate::device::storage;

use super::{GemmArgs, GemmProblem, blueprint::Blueprint, selector::Ranked};

/// The cost up to which the selector's choice is taken without a measurement.
const SETTLED: f32 = 1.05;
/// Costs, over that of the selector's choice, up to which a blueprint is measured.
const OPEN: f32 = 1.15;
/// Blueprints that are measured at most.
const MOST: usize = 4;
/// Launches of a sample: CubeCL's clock on CUDA is the host's, from one synchronization to the next.
const LAUNCHES: usize = 4;

/// Launches the fastest of the blueprints.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, args: &GemmArgs<R>, ranked: &[Ranked]) {
    let first = ranked[0];
    let open = ranked.iter().take_while(|it| it.cost <= first.cost * OPEN);
    let open = open.count().min(MOST);
    // Measured back to back, products in FP32 had 1.4% to gain on average, before they were written 64 bytes of a row
    // at a time, which helps wide tiles most.
    let is_settled = first.cost <= SETTLED || args.out.dtype == storage::<f32>();
    if open == 1 || is_settled {
        super::launch(client, args, first.blueprint);
        return;
    }
    static TUNER: LocalTuner<GemmAutotuneKey, Device> = local_tuner!();
    let product = Product {
        client,
        args,
        candidates: &ranked[..open],
        launches: 1,
    };
    TUNER.execute(
        &Device::of(client),
        client,
        TUNER.init(blueprints::<R>),
        product,
    );
}

/// One tunable for each place in the ranking.
fn blueprints<R: Runtime>() -> TunableSet<GemmAutotuneKey, Products<R>, ()> {
    let group = TuneGroup::new("blueprints", |_| 0);
    let mut set = TunableSet::new(key::<R>, Repeated);
    for place in 0..MOST {
        let tunable = Tunable::new(&format!("place {place}"), move |product: Product<R>| {
            let candidate = product.candidates.get(place).ok_or("no such place")?;
            for _ in 0..product.launches {
                super::launch(product.client, product.args, candidate.blueprint);
            }
            Ok::<_, &str>(())
        });
        let is_taken = move |key: &GemmAutotuneKey| {
            if place < key.candidates.len() { 0 } else { -1 }
        };
        set = set.with(tunable.group(&group, is_taken));
    }
    set
}

/// A product and the blueprints to choose from.
struct Product<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    args: &'a GemmArgs<'a, R>,
    candidates: &'a [Ranked],
    launches: usize,
}

impl<R: Runtime> Clone for Product<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Runtime> Copy for Product<'_, R> {}

/// The type of [`Product`] for any lifetime.
struct Products<R>(std::marker::PhantomData<R>);

impl<R: Runtime> TuneInputs for Products<R> {
    type At<'a> = Product<'a, R>;
}

/// Samples of several launches.
struct Repeated;

impl<R: Runtime> InputGenerator<GemmAutotuneKey, Products<R>> for Repeated {
    fn generate<'a>(
        &self,
        _key: &GemmAutotuneKey,
        product: &<Products<R> as TuneInputs>::At<'a>,
    ) -> <Products<R> as TuneInputs>::At<'a> {
        Product {
            launches: LAUNCHES,
            ..*product
        }
    }
}

/// Products that have one fastest blueprint. Rows and columns count in steps of the tiles: one more column of tiles
/// can change everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, AutotuneKey)]
struct GemmAutotuneKey {
    batch: usize,
    m: usize,
    n: usize,
    #[autotune(anchor)]
    k: usize,
    block: usize,
    fallback: bool,
    out: StorageType,
    /// True where rows of the output are written 16 bytes at once.
    aligned: bool,
    candidates: Vec<Candidate>,
}

/// A blueprint by all that those of one product differ in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Candidate {
    Portable,
    TensorCore { tile: usize, stages: usize },
    Hopper { tile_n: usize },
    HopperRowwise { tile_n: usize },
}

impl From<Blueprint> for Candidate {
    fn from(blueprint: Blueprint) -> Self {
        match blueprint {
            Blueprint::Portable(_) => Self::Portable,
            Blueprint::TensorCore(it) => Self::TensorCore {
                tile: it.tile,
                stages: it.stages,
            },
            Blueprint::Hopper(it) => Self::Hopper {
                tile_n: it.tile.tile_n,
            },
            Blueprint::HopperRowwise(it) => Self::HopperRowwise {
                tile_n: it.tile.tile_n,
            },
        }
    }
}

fn key<R: Runtime>(product: &Product<R>) -> GemmAutotuneKey {
    let args = product.args;
    let GemmProblem { batch, m, n, k, .. } = args.problem;
    let of_candidate = |it: &Ranked| Candidate::from(it.blueprint);
    // A scale of the whole matrix has as many rows as that, and they are no other problem.
    let rowwise = |it: &Ranked| matches!(it.blueprint, Blueprint::HopperRowwise(_));
    let block = match product.candidates.iter().any(rowwise) {
        true => 0,
        false => args.a.rows_per_scale,
    };
    GemmAutotuneKey::new(
        batch,
        m.next_multiple_of(128),
        n.next_multiple_of(64),
        k,
        block,
        args.fallback.is_some(),
        args.out.dtype,
        n * args.out.dtype.size() % 16 == 0,
        product.candidates.iter().map(of_candidate).collect(),
    )
}

/// Devices and kernels that choose alike, as far as they say: a cache on disk is theirs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Device {
    runtime: &'static str,
    multiprocessors: u32,
    shared_memory: usize,
}

impl Device {
    fn of<R: Runtime>(client: &ComputeClient<R>) -> Self {
        let hardware = &client.properties().hardware;
        Self {
            runtime: R::name(client),
            multiprocessors: hardware.num_streaming_multiprocessors.unwrap_or(0),
            shared_memory: hardware.max_shared_memory_size,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            runtime,
            multiprocessors,
            shared_memory,
        } = self;
        let version = env!("CARGO_PKG_VERSION");
        write!(f, "{runtime}-{multiprocessors}-{shared_memory}-{version}")
    }
}
