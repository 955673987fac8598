//! The bytes that `quant-train advise` computes beside those that an allocator counts, of the `tiny` preset and others
//! on the CPU; and that epochs leave none behind. One test, since nothing else may allocate meanwhile.

mod gpt2;

use std::time::{SystemTime, UNIX_EPOCH};

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Int, Tensor, TensorData, f16};
use burn_quant_train::QuantTrain;
use burn_quant_train::optim::{LayerBackend, QuantAdamWConfig};
use burn_quant_train::recipe::{
    FallbackInt8, HadamardInt4, JetfireInt8, MixedPrecision, NAMES, Named, Recipe,
};
use burn_quant_train::saved::report::Total;
use burn_quant_train::saved::{choose_context, compress_pending};
use examples::advise::Question;
use examples::advise::activations::{AttentionForm, Step};
use examples::advise::device::Device;
use examples::advise::memory::{Case, Memory};
use examples::advise::shapes::Shapes;
use examples::args::{Checkpointing, Compute, Contexts, Optimizer, Preset};
use examples::data::Batch;
use examples::memory::{optimizer_state, report, saved_activations, saved_by};
use examples::model::{Decoder, DecoderConfig, VOCABULARY};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

fn live() -> u64 {
    ALLOCATOR.current_usage() as u64
}

/// A way to train a model of these sizes.
#[derive(Clone)]
struct Subject {
    config: DecoderConfig,
    batch: usize,
    sequence: usize,
    compute: Compute,
    case: Case,
    checkpointing: Checkpointing,
    /// The share by which activations may be off.
    bound: f64,
}

/// The counters of an allocator.
#[derive(Debug)]
struct Counted {
    weights: u64,
    moments: u64,
    copies: u64,
    activations: u64,
    peak: u64,
    /// The totals of a report of activations.
    reported: u64,
    /// Its total of copies of weights.
    reported_copies: u64,
}

impl Subject {
    /// Live bytes after each epoch, of steps and of a validation.
    fn over_epochs<
        B: LayerBackend<Device = <Flex as burn::tensor::backend::BackendTypes>::Device>,
    >(
        &self,
    ) -> Vec<u64> {
        choose_context(Some(self.case.contexts.context()));
        B::seed(&Default::default(), 1);
        let (batch, held_out) = (self.batch::<B>(), self.batch::<B::InnerBackend>());
        let mut optim = self.case.optimizer.config().init::<B, Decoder<B>>();
        let model = self.config.init::<B>(&Default::default());
        let mut model = Some(optim.attach(model));
        let epoch = |_| {
            for _ in 0..4 {
                let trained = model.take().expect("the step before gave one");
                let gradients = trained.loss(batch.clone()).backward();
                let gradients = GradientsParams::from_grads(gradients, &trained);
                model = Some(burn::optim::Optimizer::step(
                    &mut optim, 1e-3, trained, gradients,
                ));
            }
            let valid = model.as_ref().map(AutodiffModule::valid);
            let valid = valid.expect("a trained model");
            for _ in 0..3 {
                let loss = valid.loss(held_out.clone()).into_scalar().elem::<f32>();
                assert!(loss.is_finite(), "{loss}");
            }
            drop(valid);
            live()
        };
        (0..6).map(epoch).collect()
    }

    fn batch<B: Backend>(&self) -> Batch<B> {
        let tokens = |salt: usize| -> Tensor<B, 2, Int> {
            let count = self.batch * self.sequence;
            let values = (0..count).map(|index| ((index * 31 + salt * 17) % VOCABULARY) as i64);
            let data = TensorData::new(values.collect(), [self.batch, self.sequence]);
            Tensor::from_data(data, &Default::default())
        };
        Batch {
            inputs: tokens(1),
            targets: tokens(2),
        }
    }

    fn count<B: LayerBackend<Device = <Flex as burn::tensor::backend::BackendTypes>::Device>>(
        &self,
    ) -> Counted {
        let device = Default::default();
        choose_context(Some(self.case.contexts.context()));
        B::seed(&device, 1);
        let batch = self.batch::<B>();
        let start = live();
        let model = self.config.init::<B>(&device);
        model.materialize();
        let weights = live() - start;
        let config = self.case.optimizer.config();
        let mut optim = config.init::<B, Decoder<B>>();
        let model = optim
            .attach(model)
            .with_checkpointing(self.checkpointing == Checkpointing::Layers);

        // The first step makes the moments, and what else a layer keeps between steps.
        let step = |optim: &mut _, model: Decoder<B>| {
            let gradients = model.loss(batch.clone()).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            burn::optim::Optimizer::step(optim, 0.0, model, gradients)
        };
        let model = step(&mut optim, model);
        ALLOCATOR.reset_peak_usage();
        let model = step(&mut optim, model);
        let peak = ALLOCATOR.peak_usage() as u64 - start;

        // Copies are made of the new weights.
        let before = live();
        let loss = model.loss(batch.clone());
        compress_pending();
        let both = live() - before;
        drop(loss.backward());
        let activations = saved_activations(&model, &batch, &device, &|_| live());
        let copies = both.saturating_sub(activations);
        let report = report(&model, &batch);
        drop(optim);
        let moments = optimizer_state(
            model,
            config.adamw::<B, Decoder<B>>(),
            &batch,
            &device,
            &|_| live(),
        );
        Counted {
            weights,
            moments,
            copies,
            activations,
            peak,
            reported: report.bytes() as u64,
            reported_copies: Total::of(&report.weights).bytes as u64,
        }
    }

    fn counted(&self) -> Counted {
        let entered = self.case.recipe.enter();
        let _entered = entered.expect("one case after the other");
        match self.compute {
            Compute::F32 => self.count::<QuantTrain<Autodiff<Flex>, Named<f32>>>(),
            Compute::F16 => self.count::<QuantTrain<Autodiff<Flex>, Named<f16>>>(),
            Compute::Bf16 => unreachable!("no BF16 on the CPU"),
        }
    }

    fn computed(&self) -> Memory {
        let question = Question {
            model: Shapes::from(&self.config),
            batch: self.batch,
            sequence: self.sequence,
            device: Device::Cpu,
            compute: self.compute,
            memory: None,
            recipes: Vec::new(),
            contexts: Vec::new(),
            optimizers: Vec::new(),
            checkpointing: self.checkpointing,
        };
        Memory::of(&question, &self.case, self.batch)
    }

    /// Prints the figures, and says which are off by more than a share.
    fn compare(&self) -> Vec<String> {
        let (counted, computed) = (self.counted(), self.computed());
        // A CPU holds one of the two layouts that recipes with learned step sizes ask for.
        let is_learned = self.case.recipe.as_str().ends_with("int4");
        let copies = computed.copies / if is_learned { 2 } else { 1 };
        // The backward pass holds what it dequantizes for its own time, which is not computed; where layers run again,
        // what their operations take is a larger share.
        let flows = self.case.recipe.row().flow.is_some();
        let peak = match (self.case.contexts, self.checkpointing) {
            (Contexts::Exact, Checkpointing::None) if !flows => 0.1,
            _ => 0.25,
        };
        // Modules, tables of rotary positions, maps and nodes are beside the numbers, and do not grow with them.
        let pairs = [
            ("weights", counted.weights, computed.weights, 0.06),
            ("moments", counted.moments, computed.moments, 0.05),
            ("copies", counted.copies, copies, 0.1),
            (
                "activations",
                counted.activations,
                computed.activations,
                self.bound,
            ),
            ("peak", counted.peak, computed.peak, peak),
            (
                "reported",
                counted.activations,
                counted.reported,
                self.bound,
            ),
            (
                "reported copies",
                // A report lists those of layers outside of blocks.
                match self.checkpointing {
                    Checkpointing::None => counted.copies,
                    Checkpointing::Layers => 0,
                },
                counted.reported_copies,
                0.1,
            ),
        ];
        let Case {
            recipe,
            contexts,
            optimizer,
        } = self.case;
        let family = self.config.family;
        let name = format!(
            "{family:?}, {recipe}, {contexts}, {optimizer}, {}, run again: {}",
            self.compute, self.checkpointing
        );
        let mut wrong = Vec::new();
        let mut line = name.clone();
        for (what, counted, computed, bound) in pairs {
            let off = (computed as f64 - counted as f64) / counted.max(1) as f64;
            line += &format!("; {what} {computed} of {counted} ({:+.2}%)", 100.0 * off);
            // Where nothing is kept, tags and counters are all there is.
            let both_small = counted.max(computed) < 64 << 10;
            if off.abs() > bound && !both_small {
                wrong.push(format!("{name}: {what} {computed} instead of {counted}"));
            }
        }
        println!("{line}");
        wrong
    }
}

/// The bytes that a GPT-2 saves, by a recipe and a context: counted, and computed.
fn gpt2_saved<R: Recipe>(contexts: Contexts) -> [u64; 2] {
    type Train<R> = QuantTrain<Autodiff<Flex>, R>;
    let (batch, sequence) = (4, 96);
    let device = Default::default();
    let shapes = gpt2::shapes(sequence);
    let subject = Subject {
        config: DecoderConfig::new(128, 384, 4, 1, sequence),
        batch,
        sequence,
        compute: Compute::F32,
        case: Case {
            recipe: NAMES[0],
            contexts,
            optimizer: Optimizer::Adamw,
        },
        checkpointing: Checkpointing::None,
        bound: 0.1,
    };
    choose_context(Some(contexts.context()));
    let model = gpt2::Gpt2::<Train<R>>::new(&shapes, &device);
    let optim = QuantAdamWConfig::new().init::<Train<R>, gpt2::Gpt2<Train<R>>>();
    let model = optim.attach(model);
    let tokens = subject.batch();
    let counted = saved_by(|| model.loss(tokens.clone()), &device, &|_| live());
    let step = Step {
        model: &shapes,
        batch,
        sequence,
        compute: Compute::F32,
        attention: AttentionForm::Composed,
        keeps_casts: true,
        row: &R::ROW,
        context: contexts.context(),
        checkpointing: Checkpointing::None,
    };
    [counted, step.saved() as u64]
}

/// The third of the recipes, and of the models whose layers run again, that is counted: another one at each run, since
/// all of them take minutes of one core. `None`: all, which `QUANT_TRAIN_TEST_ALL` asks for.
fn third() -> Option<usize> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.expect("it is after 1970").as_secs();
    let all = std::env::var_os("QUANT_TRAIN_TEST_ALL").is_some();
    (!all).then_some(seconds as usize % 3)
}

#[test]
fn bytes() {
    let third = third();
    println!("every third case, from {third:?}; QUANT_TRAIN_TEST_ALL asks for all");
    epochs_leave_nothing_behind(third);
    computed_bytes_are_those_that_are_counted(third);
}

fn computed_bytes_are_those_that_are_counted(third: Option<usize>) {
    let tiny = DecoderConfig::new(128, 384, 4, 4, 128);
    let subject = |recipe, contexts, optimizer| Subject {
        config: tiny.clone(),
        batch: 8,
        sequence: 128,
        compute: Compute::F32,
        case: Case {
            recipe,
            contexts,
            optimizer,
        },
        checkpointing: Checkpointing::None,
        // What compressed values leave, nodes and their cells are up to a twentieth of.
        bound: match contexts {
            Contexts::Exact => 0.012,
            _ => 0.055,
        },
    };
    let optimizers = [
        Optimizer::Adamw,
        Optimizer::Fp8Adamw,
        Optimizer::Int8Adamw,
        Optimizer::DynamicAdamw8bit,
    ];
    // Of two contexts each recipe has one, since a case takes seconds; those below have more.
    let contexts = [Contexts::Exact, Contexts::Int8];
    let is_drawn = |index: usize| third.is_none_or(|third| index % 3 == third);
    let mut subjects: Vec<_> = NAMES
        .iter()
        .zip(contexts.into_iter().cycle())
        .zip(optimizers.iter().cycle())
        .enumerate()
        .filter(|(index, _)| is_drawn(*index))
        .map(|(_, ((&recipe, contexts), &optimizer))| subject(recipe, contexts, optimizer))
        .collect();
    let mixed = NAMES[0];
    for contexts in [
        Contexts::Exact,
        Contexts::Int10,
        Contexts::Int8ExactAttention,
        Contexts::Int8KeptOutput,
    ] {
        // Without scores there is less to save: more of it, beside the same nodes.
        subjects.push(Subject {
            compute: Compute::F16,
            batch: 10,
            // A report counts the output of attention twice: the next layer reads a view of it.
            bound: match contexts {
                Contexts::Exact => 0.03,
                _ => 0.055,
            },
            ..subject(mixed, contexts, Optimizer::Adamw)
        });
    }
    for (recipe, contexts) in [
        (mixed, Contexts::Exact),
        (mixed, Contexts::Int8),
        (<FallbackInt8 as Recipe>::ROW.name(), Contexts::Exact),
        (<JetfireInt8 as Recipe>::ROW.name(), Contexts::Exact),
        (<JetfireInt8 as Recipe>::ROW.name(), Contexts::Int8),
    ] {
        subjects.push(Subject {
            config: Preset::Gpt2Tiny.model(128),
            bound: 0.05,
            ..subject(recipe, contexts, Optimizer::Adamw)
        });
    }
    let fallback = <FallbackInt8 as Recipe>::ROW.name();
    let learned = <HadamardInt4 as Recipe>::ROW.name();
    // In narrow rows, numbers a row weigh too much, and nodes in small batches.
    let wide = DecoderConfig::new(512, 1536, 8, 2, 128);
    let gpt2 = Preset::Gpt2Tiny.model(128);
    let again = [
        (&wide, 24, fallback, Contexts::Exact),
        (&wide, 24, fallback, Contexts::Int8),
        (&wide, 24, learned, Contexts::Exact),
        (&gpt2, 64, mixed, Contexts::Exact),
    ];
    for (index, (config, batch, recipe, contexts)) in again.into_iter().enumerate() {
        if !is_drawn(index) {
            continue;
        }
        subjects.push(Subject {
            config: config.clone(),
            batch,
            checkpointing: Checkpointing::Layers,
            bound: match contexts {
                Contexts::Exact => 0.05,
                _ => 0.1,
            },
            ..subject(recipe, contexts, Optimizer::Adamw)
        });
    }
    // With more to save, nodes weigh less.
    subjects.push(Subject {
        batch: 32,
        bound: 0.02,
        ..subject(mixed, Contexts::Int8, Optimizer::Adamw)
    });
    // Other ratios of sizes, and little to save.
    subjects.push(Subject {
        bound: 0.1,
        config: DecoderConfig::new(192, 256, 2, 3, 96),
        batch: 5,
        sequence: 96,
        ..subject(mixed, Contexts::Int10, Optimizer::Adamw)
    });
    // What threads take for their first products and keep is no model's: 4 of the 36 MB of the first case.
    subjects[0].counted();
    let mut wrong: Vec<_> = subjects.iter().flat_map(Subject::compare).collect();
    for contexts in [Contexts::Exact, Contexts::Int8] {
        for (name, [counted, computed]) in [
            (
                "mixed-precision",
                gpt2_saved::<MixedPrecision<f32>>(contexts),
            ),
            ("fallback-int8", gpt2_saved::<FallbackInt8<f32>>(contexts)),
            ("jetfire-int8", gpt2_saved::<JetfireInt8<f32>>(contexts)),
        ] {
            let off = computed as f64 / counted as f64 - 1.0;
            let line = format!(
                "GPT-2, {name}, {contexts}: {computed} of {counted} ({:+.2}%)",
                100.0 * off
            );
            println!("{line}");
            wrong.extend((off.abs() > 0.1).then_some(line));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What the first epochs bring, moments and what layers keep between steps, is there to stay; from then on there are as
/// many bytes after an epoch as after the one before.
fn epochs_leave_nothing_behind(third: Option<usize>) {
    let contexts = [Contexts::Int8, Contexts::Exact, Contexts::Int8KeptOutput];
    for (index, (&recipe, contexts)) in NAMES.iter().zip(contexts.into_iter().cycle()).enumerate() {
        if third.is_some_and(|third| index % 3 != third) {
            continue;
        }
        let subject = Subject {
            config: DecoderConfig::new(64, 192, 2, 2, 64),
            batch: 4,
            sequence: 64,
            compute: Compute::F32,
            case: Case {
                recipe,
                contexts,
                optimizer: Optimizer::Adamw,
            },
            checkpointing: Checkpointing::None,
            bound: 0.0,
        };
        let entered = recipe.enter();
        let _entered = entered.expect("one case after the other");
        let bytes = subject.over_epochs::<QuantTrain<Autodiff<Flex>, Named<f32>>>();
        println!("{recipe}, {contexts}: {bytes:?}");
        let (first, later) = (bytes[1], &bytes[2..]);
        // Maps and queues that grow by doubling.
        let slack = 8 << 10;
        assert!(
            later.iter().all(|&it| it <= first + slack),
            "{recipe}, {contexts}: {bytes:?} after each epoch"
        );
    }
}
