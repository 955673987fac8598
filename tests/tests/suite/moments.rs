//! AdamW with moments in 8 bits: each backend steps as the reference does, models train, and records keep every bit.

use std::{
    any::Any,
    collections::{BTreeMap, HashMap},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::Arc,
};

use burn::{
    backend::{Autodiff, Flex},
    grad_clipping::GradientClippingConfig,
    module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId},
    nn::{
        LayerNorm, LayerNormConfig, Linear, LinearConfig,
        conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig},
    },
    optim::{
        AdamWConfig, GradientsAccumulator, GradientsParams, MultiGradientsParams, Optimizer,
        adaptor::OptimizerAdaptor,
    },
    record::{
        BinBytesRecorder, BinFileRecorder, BinGzFileRecorder, FullPrecisionSettings,
        HalfPrecisionSettings, JsonGzFileRecorder, NamedMpkFileRecorder, NamedMpkGzFileRecorder,
        PrettyJsonFileRecorder, Record, Recorder,
    },
    tensor::{
        DType, FloatDType, Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend, DeviceOps},
        ops::{FloatTensor, IntTensor},
    },
};
use burn_quant_train::{
    QuantTrain,
    data::{
        DataBackend,
        optimizer::{
            AdamWItem, AdamWUpdate, Hyperparameters, Moment, MomentState, adamw as step_of,
            compress_moment, decompress_moment, find_nonfinite, tick,
        },
    },
    layer::LayerPolicy,
    optim::{
        AdamWRecord, OnNonfinite, ParameterBackend, ParameterGroup, ParameterRecord, QuantAdamW,
        QuantAdamWConfig, SimpleQuantAdamW, SimpleState, StateFormat, StateRounding,
    },
    recipe::FallbackInt8,
};
use cubecl_kernels::reference::{
    adamw::{MomentChunk, Step, adamw},
    optimizer_state::{HostState, dequantize_state, quantize_state},
};
use quant_train_tests::{
    Rng,
    data::{floats, lifted, primitive, same_bits, tensor},
    models::{Classifier, ConvNet, Mlp, One, with_weights_of},
    on_every_backend, seed, supports,
    train::{Run, accumulated, parameters_of, samples, tail, train},
};
use serde::{Serialize, de::DeserializeOwned};

type Fallback<B> = QuantTrain<Autodiff<B>, FallbackInt8<f32, 16>>;
type Formats = [Option<StateFormat>; 2];

on_every_backend! {
    the_operation_steps_as_the_reference => operation_steps;
    a_raised_flag_changes_nothing => operation_skips;
    tensors_that_someone_else_holds_stay => operation_spares_clones;
    moments_convert_as_in_the_reference => operation_converts;
    clock_and_flag => counters;
    every_rank_steps_as_the_reference => ranks_step;
    ready_made_configurations_train => ready_made_train;
    gradients_are_summed_and_clipped_before_the_step => sums_and_clips;
    gradients_are_clipped_by_the_norm_of_their_parameter => clips_by_norm;
    weight_decay_spares_the_groups_without => no_decay;
    a_group_has_its_own_learning_rate => own_learning_rate;
    a_skipped_step_changes_nothing => skip;
    an_error_names_the_parameter => error;
    propagated_nan_stays_in_its_group => propagate;
    bf16_parameters_are_rounded_without_bias => bf16_unbiased;
    bf16_parameters_follow_the_seed => bf16_reproducible;
    stochastic_moments_follow_the_seed => stochastic_moments_reproducible;
    a_clone_keeps_its_state => clones;
    burns_ways_of_stepping_train_too => burns_ways;
    late_parameters_step_as_burns => late_as_burns;
    late_parameters_do_not_count_skipped_steps => late_and_skipped;
    late_parameters_resume_bit_for_bit => late_and_resumed;
    a_run_resumed_from_any_file_goes_on_bit_for_bit => resumed;
    one_tensor_at_a_time_steps_the_same => one_at_a_time;
    one_tensor_at_a_time_resumes_with_its_random_numbers => one_at_a_time_resumed;
    a_record_of_other_formats_is_converted => converted;
    untouched_parameters_stay_in_the_record => untouched;
    a_record_of_another_shape_is_refused_by_path => another_shape;
}

type Plain<B> = Autodiff<B>;

/// Every configuration that the library names, and COAT's best pair.
fn ready_made() -> [(&'static str, QuantAdamWConfig); 4] {
    let best = QuantAdamWConfig::fp8().with_first(Some(StateFormat::DYNAMIC_EXPONENT.expanded()));
    [
        ("fp8", QuantAdamWConfig::fp8()),
        ("dynamic_8bit", QuantAdamWConfig::dynamic_8bit()),
        ("int8", QuantAdamWConfig::int8()),
        ("dynamic exponent and fp8", best),
    ]
    .map(|(name, config)| (name, all(config)))
}

/// The ready-made ones, FP32, and one moment of each kind.
fn every_kind() -> Vec<(&'static str, QuantAdamWConfig)> {
    let mut configs = ready_made().to_vec();
    configs.push(("fp32", all(QuantAdamWConfig::new())));
    let half = QuantAdamWConfig::new().with_second(Some(StateFormat::E5M2));
    configs.push(("fp32 and e5m2", all(half)));
    configs
}

/// Small tensors and layers included.
fn all(config: QuantAdamWConfig) -> QuantAdamWConfig {
    config
        .with_min_elements(0)
        .with_policy(LayerPolicy::all().min_elements(0))
}

/// Pairs of formats: without expansion, where every backend has the reference's codes, and with it.
fn pairs() -> Vec<Formats> {
    let [e4m3, e5m2, dynamic, int8] = [
        StateFormat::E4M3,
        StateFormat::E5M2,
        StateFormat::DYNAMIC_EXPONENT,
        StateFormat::INT8,
    ];
    vec![
        [None, None],
        [Some(e4m3), Some(e4m3)],
        [Some(e4m3), Some(e5m2)],
        [Some(dynamic.with_group(256)), Some(dynamic.with_group(256))],
        [Some(int8), Some(int8)],
        [Some(int8), Some(dynamic)],
        [None, Some(e4m3)],
        [Some(dynamic), None],
        [Some(e4m3.expanded()), Some(e4m3.expanded())],
        [Some(dynamic.expanded()), Some(e4m3.expanded())],
        [Some(int8.with_group(128).expanded()), Some(e5m2.expanded())],
    ]
}

const HYPERPARAMETERS: Hyperparameters = Hyperparameters {
    learning_rate: 1e-3,
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip_norm: None,
};

/// Gradients over four decades.
fn gradient(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| (rng.normal() * (-13.0 * rng.uniform()).exp2()) as f32)
        .collect()
}

// The operation.

/// A moment on the host.
#[derive(Debug, Clone, PartialEq)]
enum Host {
    Full(Vec<f32>),
    Coded(StateFormat, HostState),
}

impl Host {
    fn new(values: Vec<f32>, format: Option<StateFormat>, moment: Moment) -> Self {
        match format {
            None => Host::Full(values),
            Some(format) => Host::Coded(format, quantize_state(&values, format, moment)),
        }
    }

    /// The least and the largest number that each element may have by a code less or more.
    fn neighbours(&self, moment: Moment) -> Vec<[f32; 2]> {
        let values = self.values(moment);
        let Host::Coded(format, state) = self else {
            return values.into_iter().map(|value| [value; 2]).collect();
        };
        let of_group = |group: usize| {
            let codes: Vec<u8> = (0..=u8::MAX).collect();
            let groups = codes.len().div_ceil(format.group);
            let state = HostState {
                codes,
                scales: vec![state.scales[group]; groups],
                exponents: state
                    .exponents
                    .get(group)
                    .map_or(vec![], |&it| vec![it; groups]),
            };
            let mut numbers = dequantize_state(&state, *format, moment);
            numbers.retain(|number| number.is_finite());
            numbers.sort_by(f32::total_cmp);
            numbers.dedup();
            numbers
        };
        let groups: Vec<_> = (0..state.scales.len()).map(of_group).collect();
        let beside = |(index, &value): (usize, &f32)| {
            let numbers = &groups[index / format.group];
            let place = numbers.partition_point(|&number| number < value);
            let last = numbers.len() - 1;
            [
                numbers[place.saturating_sub(1)],
                numbers[(place + 1).min(last)],
            ]
        };
        values.iter().enumerate().map(beside).collect()
    }

    fn values(&self, moment: Moment) -> Vec<f32> {
        match self {
            Host::Full(values) => values.clone(),
            Host::Coded(format, state) => dequantize_state(state, *format, moment),
        }
    }

    fn chunk(&mut self) -> MomentChunk<'_> {
        match self {
            Host::Full(values) => MomentChunk::Full(values),
            Host::Coded(format, state) => MomentChunk::Compressed {
                format: *format,
                codes: &mut state.codes,
                scales: &mut state.scales,
                exponents: &mut state.exponents,
            },
        }
    }

    fn upload<B: DataBackend>(&self, shape: [usize; 2]) -> MomentState<B> {
        let device = B::Device::default();
        let codes = |codes: &[u8], shape: &[usize]| {
            B::int_from_data(TensorData::new(codes.to_vec(), shape), &device)
        };
        match self {
            Host::Full(values) => {
                MomentState::Full(primitive::<B, 2>(tensor(values, shape, &device)))
            }
            Host::Coded(format, state) => {
                let groups = [state.scales.len()];
                MomentState::Coded {
                    format: *format,
                    codes: codes(&state.codes, &shape),
                    scales: primitive::<B, 1>(tensor(&state.scales, groups, &device)),
                    exponents: format.expand.then(|| codes(&state.exponents, &groups)),
                }
            }
        }
    }

    /// Checks the element types on the way: 8 bits are stored as 8 bits.
    fn download<B: DataBackend>(state: &MomentState<B>) -> Self {
        match state {
            MomentState::Full(values) => Host::Full(full::<B, 2>(values)),
            MomentState::Coded {
                format,
                codes,
                scales,
                exponents,
            } => {
                assert_eq!(
                    exponents.is_some(),
                    format.expand,
                    "exponents of {format:?}"
                );
                let state = HostState {
                    codes: bytes::<B, 2>(codes),
                    scales: full::<B, 1>(scales),
                    exponents: exponents.as_ref().map(bytes::<B, 1>).unwrap_or_default(),
                };
                Host::Coded(*format, state)
            }
        }
    }
}

fn full<B: Backend, const D: usize>(values: &FloatTensor<B>) -> Vec<f32> {
    let values = lifted::<B, D>(values.clone());
    assert_eq!(values.dtype(), DType::F32, "values and scales are FP32");
    floats(&values)
}

fn bytes<B: Backend, const D: usize>(codes: &IntTensor<B>) -> Vec<u8> {
    let data = Tensor::<B, D, Int>::from_primitive(codes.clone()).into_data();
    assert_eq!(data.dtype, DType::U8, "codes and exponents take a byte");
    data.into_vec().expect("bytes")
}

fn counts<B: Backend>(counts: &IntTensor<B>) -> Vec<i32> {
    let data = Tensor::<B, 1, Int>::from_primitive(counts.clone()).into_data();
    data.iter::<i32>().collect()
}

fn from_counts<B: Backend, const N: usize>(counts: [i32; N]) -> IntTensor<B> {
    B::int_from_data(TensorData::new(counts.to_vec(), [N]), &B::Device::default())
}

/// A parameter of shape `shape` with moments of some former steps.
#[derive(Debug, Clone)]
struct Case {
    shape: [usize; 2],
    parameter: Vec<f32>,
    gradient: Vec<f32>,
    first: Host,
    second: Host,
}

impl Case {
    fn new(rng: &mut Rng, shape: [usize; 2], [first, second]: Formats) -> Self {
        let count = shape.iter().product();
        let squares = gradient(rng, count).iter().map(|g| 0.1 * g * g).collect();
        Self {
            shape,
            parameter: rng.normals(count, 0.1),
            gradient: gradient(rng, count),
            first: Host::new(gradient(rng, count), first, Moment::First),
            second: Host::new(squares, second, Moment::Second),
        }
    }

    /// Tails of groups, less than a group, more than the largest, and rows that a device may pad.
    fn of_every_size(rng: &mut Rng, formats: Formats) -> Vec<Self> {
        [[1, 1], [3, 43], [64, 4], [37, 129], [2, 2048]]
            .map(|shape| Self::new(rng, shape, formats))
            .to_vec()
    }

    fn item<B: DataBackend>(&self) -> AdamWItem<B> {
        let device = B::Device::default();
        AdamWItem {
            parameter: primitive::<B, 2>(tensor(&self.parameter, self.shape, &device)),
            gradient: primitive::<B, 2>(tensor(&self.gradient, self.shape, &device)),
            first: self.first.upload(self.shape),
            second: self.second.upload(self.shape),
            key: None,
            state_key: None,
        }
    }

    fn step(&mut self, t: u32) {
        let step = Step::new(&HYPERPARAMETERS, t).expect("hyperparameters in their range");
        adamw(
            &step,
            &mut self.parameter,
            &self.gradient,
            self.first.chunk(),
            self.second.chunk(),
            None,
        );
    }
}

fn clone_of<B: DataBackend>(item: &AdamWItem<B>) -> AdamWItem<B> {
    AdamWItem {
        parameter: item.parameter.clone(),
        gradient: item.gradient.clone(),
        first: item.first.clone(),
        second: item.second.clone(),
        key: item.key,
        state_key: item.state_key,
    }
}

/// Within 1e-6 of the value, and 2e-5 of its update or of the learning rate, the usual size of one: of `1 - beta_2^t`,
/// computed in FP32 as Burn does, the reference keeps no more digits in the first steps.
fn assert_parameters_near(what: &str, before: &[f32], actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    for (index, ((a, e), p)) in actual.iter().zip(expected).zip(before).enumerate() {
        let bound = 1e-6 * e.abs() + 2e-5 * (e - p).abs().max(LR as f32);
        assert!(
            (a - e).abs() <= bound,
            "{what}: parameter [{index}] is {a:e} instead of {e:e}, it was {p:e}"
        );
    }
}

/// To the bit without expansion. With it a device decodes former moments by another logarithm: to 1e-5, so that a value
/// half way between two codes may take the neighbour.
fn assert_moments_equal(what: &str, actual: &Host, expected: &Host) {
    let (Host::Coded(format, a), Host::Coded(_, e)) = (actual, expected) else {
        assert_eq!(actual, expected, "{what}");
        return;
    };
    let near = |a: &f32, e: &f32| (a - e).abs() <= 1e-5 * e.abs();
    assert!(
        same_bits(&a.scales, &e.scales)
            || format.expand && a.scales.iter().zip(&e.scales).all(|(a, e)| near(a, e)),
        "{what}: scales {:?} instead of {:?}",
        a.scales,
        e.scales
    );
    assert_eq!(a.exponents, e.exponents, "{what}: exponents");
    if !format.expand {
        assert_eq!(a.codes, e.codes, "{what}: codes");
        return;
    }
    let off = a.codes.iter().zip(&e.codes).filter(|(a, e)| a != e);
    let distances: Vec<u8> = off.map(|(a, e)| a.abs_diff(*e)).collect();
    assert!(
        distances.iter().all(|&distance| distance == 1)
            && distances.len() <= 1 + e.codes.len() / 100,
        "{what}: {} of {} codes differ, by {distances:?}",
        distances.len(),
        e.codes.len()
    );
}

fn operation_steps<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for formats in rng.drawn(pairs(), 3) {
        for t in [1, 2, 1000] {
            let mut cases = Case::of_every_size(&mut rng, formats);
            let items = cases.iter().map(Case::item::<B>).collect();
            let clock = from_counts::<B, 2>([t, 3]);
            let updates = step_of::<B>(items, clock, None, None, &HYPERPARAMETERS);
            assert_eq!(updates.len(), cases.len());
            for (case, update) in cases.iter_mut().zip(updates) {
                let what = format!("seed {seed}, {formats:?}, {:?}, step {t}", case.shape);
                let before = case.parameter.clone();
                case.step(t as u32);
                let AdamWUpdate {
                    parameter,
                    first,
                    second,
                } = update;
                let parameter = full::<B, 2>(&parameter);
                assert_parameters_near(&what, &before, &parameter, &case.parameter);
                assert_eq!([first.format(), second.format()], formats, "{what}");
                assert_moments_equal(&what, &Host::download(&first), &case.first);
                assert_moments_equal(&what, &Host::download(&second), &case.second);
            }
        }
    }
}

fn operation_skips<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for formats in rng.drawn(pairs(), 3) {
        let cases = Case::of_every_size(&mut rng, formats);
        let items = cases.iter().map(Case::item::<B>).collect();
        let (clock, flag) = (from_counts::<B, 2>([7, 1]), from_counts::<B, 1>([2]));
        let updates = step_of::<B>(items, clock, Some(flag), None, &HYPERPARAMETERS);
        for (case, update) in cases.iter().zip(updates) {
            let what = format!("seed {seed}, {formats:?}, {:?}", case.shape);
            let parameter = full::<B, 2>(&update.parameter);
            assert!(same_bits(&parameter, &case.parameter), "{what}: parameter");
            assert_eq!(Host::download(&update.first), case.first, "{what}");
            assert_eq!(Host::download(&update.second), case.second, "{what}");
        }
    }
}

/// The step is in place only where nobody can see it.
fn operation_spares_clones<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for formats in rng.drawn(pairs(), 3) {
        let mut cases = Case::of_every_size(&mut rng, formats);
        // One whose new value goes elsewhere at once on a device, where others are copied.
        cases.push(Case::new(&mut rng, [260, 255], formats));
        let items: Vec<_> = cases.iter().map(Case::item::<B>).collect();
        let clock = from_counts::<B, 2>([1, 0]);
        let held = items.iter().map(clone_of).collect();
        let updates = step_of::<B>(held, clock.clone(), None, None, &HYPERPARAMETERS);
        let ticked = tick::<B>(clock.clone(), None);
        assert_eq!(
            (counts::<B>(&clock), counts::<B>(&ticked)),
            (vec![1, 0], vec![2, 0]),
            "seed {seed}"
        );
        let mut stepped = 0;
        for ((case, item), update) in cases.iter_mut().zip(&items).zip(updates) {
            let what = format!("seed {seed}, {formats:?}, {:?}", case.shape);
            let parameter = full::<B, 2>(&update.parameter);
            stepped += usize::from(!same_bits(&parameter, &case.parameter));
            let held = full::<B, 2>(&item.parameter);
            assert!(same_bits(&held, &case.parameter), "{what}: parameter");
            let held = full::<B, 2>(&item.gradient);
            assert!(same_bits(&held, &case.gradient), "{what}: gradient");
            assert_eq!(Host::download(&item.first), case.first, "{what}");
            assert_eq!(Host::download(&item.second), case.second, "{what}");
            let before = case.parameter.clone();
            case.step(1);
            assert_parameters_near(&what, &before, &parameter, &case.parameter);
        }
        // A single element may have an update that rounding swallows.
        assert!(
            stepped >= cases.len() - 1,
            "seed {seed}, {formats:?}: no step"
        );
    }
}

fn operation_converts<B: DataBackend>(seed: u64) {
    let (mut rng, shape) = (Rng::new(seed), [41, 127]);
    let device = B::Device::default();
    for formats in rng.drawn(pairs(), 3) {
        for (format, moment) in formats.into_iter().zip([Moment::First, Moment::Second]) {
            let Some(format) = format else { continue };
            let what = format!("seed {seed}, {format:?}, {moment:?}");
            let mut values = gradient(&mut rng, shape[0] * shape[1]);
            // A group of zeros beside one of a single value.
            values[..128].fill(0.0);
            values[2048..4096].fill(1e-9);
            if moment == Moment::Second {
                values.iter_mut().for_each(|x| *x *= *x);
            }
            let x = primitive::<B, 2>(tensor(&values, shape, &device));
            let expected = Host::new(values, Some(format), moment);
            let actual = compress_moment::<B>(x, format, moment);
            assert_moments_equal(&what, &Host::download(&actual), &expected);

            let decoded = decompress_moment::<B>(expected.upload(shape), moment);
            let (decoded, expected) = (full::<B, 2>(&decoded), expected.values(moment));
            if !format.expand {
                assert!(same_bits(&decoded, &expected), "{what}: decoded");
            }
            for (a, e) in decoded.iter().zip(&expected) {
                assert!((a - e).abs() <= 1e-5 * e.abs(), "{what}: {a:e}, {e:e}");
            }
        }
    }
}

fn counters<B: DataBackend>(seed: u64) {
    let tick = |flag: Option<i32>| {
        let flag = flag.map(|flag| from_counts::<B, 1>([flag]));
        counts::<B>(&tick::<B>(from_counts::<B, 2>([5, 2]), flag))
    };
    assert_eq!(tick(None), [6, 2]);
    assert_eq!(tick(Some(0)), [6, 2]);
    assert_eq!(tick(Some(3)), [5, 3]);

    let mut rng = Rng::new(seed);
    let device = B::Device::default();
    let shapes = [[1, 1], [3, 43], [300, 300], [37, 24]];
    // The largest number of F16 is not an infinity.
    let large: Vec<Vec<f32>> = shapes
        .map(|[rows, cols]| vec![65504.0; rows * cols])
        .to_vec();
    let found = |gradients: &[Vec<f32>], dtype: FloatDType| {
        let gradients: Vec<_> = gradients
            .iter()
            .zip(shapes)
            .map(|(values, shape)| tensor::<B, 2>(values, shape, &device).cast(dtype))
            .map(primitive)
            .collect();
        counts::<B>(&find_nonfinite::<B>(gradients, &device))
    };
    let supported = |dtype: &FloatDType| supports::<B>((*dtype).into());
    for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16]
        .into_iter()
        .filter(supported)
    {
        assert_eq!(found(&large, dtype), [0], "{dtype:?}");
        for (index, values) in large.iter().enumerate() {
            for element in [0, rng.below(values.len()), values.len() - 1] {
                let value = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
                let mut gradients = large.clone();
                gradients[index][element] = value;
                assert_eq!(
                    found(&gradients, dtype),
                    [index as i32 + 1],
                    "seed {seed}, {dtype:?}: {value} in [{element}] of gradient {index}"
                );
            }
        }
    }
}

// The optimizer, on gradients that the test chooses.

/// Parameters of ranks 1 to 4.
#[derive(Module, Debug)]
struct Ranks<B: Backend> {
    norm: LayerNorm<B>,
    linear: Linear<B>,
    line: Conv1d<B>,
    plane: Conv2d<B>,
}

fn ranks<B: Backend>(seed: u64) -> Ranks<B> {
    let device = B::Device::default();
    let model = Ranks {
        norm: LayerNormConfig::new(130).init(&device),
        linear: LinearConfig::new(24, 37).init(&device),
        line: Conv1dConfig::new(5, 6, 3).with_bias(false).init(&device),
        plane: Conv2dConfig::new([5, 16], [3, 3]).init(&device),
    };
    with_weights_of(model, seed)
}

/// Gives each parameter the gradient that `draw` makes for its path and number of elements; for nothing, none.
fn gradients<B: AutodiffBackend, M: Module<B>>(
    model: &M,
    draw: impl FnMut(&str, usize) -> Vec<f32>,
) -> GradientsParams {
    struct Draw<F> {
        path: Vec<String>,
        draw: F,
        gradients: GradientsParams,
    }
    impl<B: AutodiffBackend, F: FnMut(&str, usize) -> Vec<f32>> ModuleVisitor<B> for Draw<F> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let parameter = param.val();
            let shape = parameter.dims();
            let values = (self.draw)(&self.path.join("."), shape.iter().product());
            if values.is_empty() {
                return;
            }
            let gradient = tensor::<B::InnerBackend, D>(&values, shape, &parameter.device())
                .cast(parameter.dtype());
            self.gradients.register(param.id, gradient);
        }
    }
    let mut visitor = Draw {
        path: Vec::new(),
        draw,
        gradients: GradientsParams::new(),
    };
    model.visit(&mut visitor);
    visitor.gradients
}

/// The gradients of step `step`.
fn drawn<B: AutodiffBackend, M: Module<B>>(model: &M, seed: u64, step: u64) -> GradientsParams {
    let mut rng = Rng::new(seed ^ step << 32);
    gradients(model, |_, count| gradient(&mut rng, count))
}

/// Where a bad value is.
#[derive(Debug, Clone, PartialEq)]
struct Poison {
    path: &'static str,
    element: usize,
    value: f32,
}

impl Poison {
    fn new(rng: &mut Rng) -> Self {
        let (path, count) = rng.pick(&[
            ("norm.gamma", 130),
            ("linear.weight", 24 * 37),
            ("line.weight", 90),
            ("plane.weight", 720),
        ]);
        Self {
            path,
            element: rng.below(count),
            value: rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        }
    }

    /// The gradients of step `step`, poisoned.
    fn drawn<B: AutodiffBackend, M: Module<B>>(
        &self,
        model: &M,
        seed: u64,
        step: u64,
    ) -> GradientsParams {
        let mut rng = Rng::new(seed ^ step << 32);
        gradients(model, |path, count| {
            let mut values = gradient(&mut rng, count);
            if path == self.path {
                values[self.element] = self.value;
            }
            values
        })
    }
}

const LR: f64 = HYPERPARAMETERS.learning_rate;

/// Takes these steps of the run of `seed`.
fn run<B, M, O>(mut model: M, optimizer: &mut O, seed: u64, steps: Range<u64>) -> M
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    for step in steps {
        let gradients = drawn::<B, M>(&model, seed, step);
        model = optimizer.step(LR, model, gradients);
    }
    model
}

/// [`run`], where some parameters have no gradient in some steps.
fn run_without<B, M, O>(
    mut model: M,
    optimizer: &mut O,
    seed: u64,
    steps: Range<u64>,
    frozen: impl Fn(u64, &str) -> bool,
) -> M
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    for step in steps {
        let mut rng = Rng::new(seed ^ step << 32);
        let gradients = gradients::<B, M>(&model, |path, count| {
            let values = gradient(&mut rng, count);
            match frozen(step, path) {
                true => Vec::new(),
                false => values,
            }
        });
        model = optimizer.step(LR, model, gradients);
    }
    model
}

fn paths_of<B: Backend, M: Module<B>>(model: &M) -> HashMap<String, (ParamId, Vec<f32>)> {
    struct Collect(Vec<String>, HashMap<String, (ParamId, Vec<f32>)>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.0.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let entry = (param.id, floats(&param.val()));
            self.1.insert(self.0.join("."), entry);
        }
    }
    let mut collect = Collect(Vec::new(), HashMap::new());
    model.visit(&mut collect);
    collect.1
}

fn assert_same_parameters<B: Backend, M: Module<B>>(what: &str, a: &M, b: &M) {
    let (a, b) = (paths_of::<B, M>(a), paths_of::<B, M>(b));
    assert_eq!(a.len(), b.len());
    for (path, (_, values)) in &a {
        assert!(same_bits(values, &b[path].1), "{what}: `{path}` differs");
    }
}

/// All bytes of a record.
fn serialized(record: AdamWRecord) -> Vec<u8> {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    Recorder::<Flex>::record(&recorder, record, ()).expect("a record is written")
}

fn assert_same_state<B, M>(what: &str, a: &QuantAdamW<M, B>, b: &QuantAdamW<M, B>)
where
    QuantAdamW<M, B>: Optimizer<M, B, Record = AdamWRecord>,
    B: AutodiffBackend<InnerBackend: ParameterBackend>,
    M: AutodiffModule<B>,
{
    let (a, b) = (a.to_record(), b.to_record());
    assert!(
        serialized(a.clone()) == serialized(b.clone()),
        "{what}: steps {} and {}, skipped {} and {}, or moments differ",
        a.steps,
        b.steps,
        a.skipped,
        b.skipped
    );
}

/// The optimizer finds each parameter, of any rank, its moments, and counts steps.
fn ranks_step<B: DataBackend>(seed: u64) {
    for formats in Rng::new(seed).drawn(pairs(), 3) {
        let expands = formats.iter().flatten().any(|format| format.expand);
        let what = |path: &str| format!("seed {seed}, {formats:?}, `{path}`");
        let [first, second] = formats;
        let config = all(QuantAdamWConfig::new())
            .with_first(first)
            .with_second(second)
            .with_epsilon(HYPERPARAMETERS.epsilon)
            .with_weight_decay(HYPERPARAMETERS.weight_decay);
        let mut optimizer = config.adamw::<Autodiff<B>, Ranks<Autodiff<B>>>();
        let model = ranks::<Autodiff<B>>(seed);
        let before = paths_of::<Autodiff<B>, _>(&model);
        let mut expected: HashMap<String, Case> = before
            .clone()
            .into_iter()
            .map(|(path, (_, parameter))| {
                let zeros = vec![0.0; parameter.len()];
                let case = Case {
                    shape: [1, parameter.len()],
                    first: Host::new(zeros.clone(), first, Moment::First),
                    second: Host::new(zeros.clone(), second, Moment::Second),
                    gradient: zeros,
                    parameter,
                };
                (path, case)
            })
            .collect();
        // Codes with expansion may differ on a device, and later steps then do.
        let steps = if expands { 1 } else { 3 };
        for step in 0..steps {
            let mut rng = Rng::new(seed ^ step << 32);
            gradients::<Autodiff<B>, _>(&model, |path, count| {
                let case = expected.get_mut(path).expect("a known path");
                case.gradient = gradient(&mut rng, count);
                case.step(step as u32 + 1);
                vec![0.0; count]
            });
        }
        let model = run(model, &mut optimizer, seed, 0..steps);
        let record = optimizer.to_record();
        assert_eq!((record.steps, record.skipped), (steps, 0), "seed {seed}");
        let paths = paths_of::<Autodiff<B>, _>(&model);
        assert_eq!(record.parameters.len(), paths.len(), "{paths:?}");
        for (path, (id, parameter)) in paths {
            let case = &expected[&path];
            let before = &before[&path].1;
            assert_parameters_near(&what(&path), before, &parameter, &case.parameter);
            let values = record.parameters[&id].values();
            let hosts = [&case.first, &case.second];
            for ((host, values), moment) in hosts
                .into_iter()
                .zip(values)
                .zip([Moment::First, Moment::Second])
            {
                let expected = host.values(moment);
                if !expands {
                    assert!(same_bits(&values, &expected), "{}: {moment:?}", what(&path));
                }
                let neighbours = host.neighbours(moment);
                for ((a, e), [least, largest]) in values.iter().zip(&expected).zip(neighbours) {
                    // A code more or less: of dynamic exponents some are more than double the one before.
                    assert!(
                        (a - e).abs() <= 0.3 * e.abs() || (least..=largest).contains(a),
                        "{}: {a:e}, {e:e}",
                        what(&path)
                    );
                }
            }
        }
    }
}

fn ready_made_train<B: DataBackend>(seed: u64) {
    fn losses<B: AutodiffBackend, M, O>(
        seed: u64,
        optimizer: &mut O,
        attach: impl FnOnce(M) -> M,
    ) -> Vec<f32>
    where
        M: Classifier<B> + AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let model = with_weights_of(M::new(&B::Device::default()), seed);
        let batches = samples::<B, M>(seed, 60);
        train(attach(model), optimizer, 5e-3, &batches).losses
    }
    fn compare(what: &str, coded: &[f32], full: &[f32]) {
        assert!(!same_bits(coded, full), "{what}: the moments are not coded");
        let [start, coded, full] = [full[0], tail(coded, 10), tail(full, 10)];
        assert!(
            full < 0.8 * start,
            "{what}: FP32 goes from {start} to {full}"
        );
        assert!(
            (coded - full).abs() < 0.05 * start,
            "{what}: ends at {coded}, FP32 at {full}, from {start}"
        );
    }
    fn on_both<B: DataBackend, M, N>(model: &str, seed: u64, rng: &mut Rng)
    where
        M: Classifier<Autodiff<B>> + AutodiffModule<Autodiff<B>>,
        N: Classifier<Fallback<B>> + AutodiffModule<Fallback<B>>,
    {
        let plain = |config: &QuantAdamWConfig| {
            losses::<Autodiff<B>, M, _>(seed, &mut config.adamw(), |model| model)
        };
        let quantized = |config: &QuantAdamWConfig| {
            let config = config.clone().with_seed(Some(seed));
            let mut optimizer = config.init::<Fallback<B>, N>();
            let attached = optimizer.clone();
            let losses =
                losses::<Fallback<B>, N, _>(seed, &mut optimizer, |model| attached.attach(model));
            assert_eq!(optimizer.inner().skipped_steps(), 0, "seed {seed}, {model}");
            losses
        };
        let full = all(QuantAdamWConfig::new());
        let (full_plain, full_quantized) = (plain(&full), quantized(&full));
        for (name, config) in rng.drawn(ready_made(), 2) {
            let what = format!("seed {seed}, {model}, {name}");
            compare(&what, &plain(&config), &full_plain);
            let what = format!("{what}, quantized layers");
            compare(&what, &quantized(&config), &full_quantized);
        }
    }
    type Check = fn(&str, u64, &mut Rng);
    let models: [(&str, Check); 2] = [
        ("Mlp", on_both::<B, Mlp<Autodiff<B>>, Mlp<Fallback<B>>>),
        (
            "ConvNet",
            on_both::<B, ConvNet<Autodiff<B>>, ConvNet<Fallback<B>>>,
        ),
    ];
    let mut rng = Rng::new(seed);
    for (model, train_both) in rng.drawn(models, 1) {
        train_both(model, seed, &mut rng);
    }
}

/// Micro-batches, clipping by norm and a schedule at once.
fn burns_ways<B: DataBackend>(seed: u64) {
    let batches = samples::<Plain<B>, Mlp<Plain<B>>>(seed, 90);
    let losses = |config: QuantAdamWConfig| {
        let config = config.with_grad_clipping(Some(GradientClippingConfig::Norm(0.5)));
        let mut optimizer = config.adamw::<Plain<B>, Mlp<Plain<B>>>();
        let model = with_weights_of(Mlp::new(&Default::default()), seed);
        let Run { losses, .. } = accumulated(model, &mut optimizer, &batches);
        assert_eq!(optimizer.to_record().steps, 30, "seed {seed}");
        losses
    };
    let full = losses(all(QuantAdamWConfig::new()));
    assert!(tail(&full, 6) < 0.8 * full[0], "seed {seed}: {full:?}");
    for (name, config) in ready_made() {
        let coded = losses(config);
        let (ours, theirs) = (tail(&coded, 6), tail(&full, 6));
        assert!(
            (ours - theirs).abs() < 0.05 * full[0],
            "seed {seed}, {name}: ends at {ours}, FP32 at {theirs}, from {}",
            full[0]
        );
    }
}

fn sums_and_clips<B: DataBackend>(seed: u64) {
    let start = ranks::<Plain<B>>(seed);
    let part = |step| drawn::<Plain<B>, _>(&start, seed, step);
    let sum = || {
        let mut rngs = [0, 1].map(|step: u64| Rng::new(seed ^ step << 32));
        gradients::<Plain<B>, _>(&start, |_, count| {
            let [a, b] = rngs.each_mut().map(|rng| gradient(rng, count));
            a.iter().zip(b).map(|(a, b)| a + b).collect()
        })
    };
    for (name, config) in ready_made() {
        let what = |way: &str| format!("seed {seed}, {name}, {way}");
        let mut expected = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
        let stepped = expected.step(LR, start.clone(), sum());

        let mut accumulator = GradientsAccumulator::new();
        accumulator.accumulate(&start, part(0));
        accumulator.accumulate(&start, part(1));
        let mut optimizer = config.adamw();
        let model = optimizer.step(LR, start.clone(), accumulator.grads());
        assert_same_parameters::<Plain<B>, _>(&what("accumulated"), &model, &stepped);
        assert_same_state(&what("accumulated"), &optimizer, &expected);

        let device = B::Device::default().id();
        let mut optimizer = config.adamw();
        let several = MultiGradientsParams {
            grads: vec![(part(0), device), (part(1), device)],
        };
        let model = optimizer.step_multi(LR, start.clone(), several);
        assert_same_parameters::<Plain<B>, _>(&what("several devices"), &model, &stepped);
        assert_same_state(&what("several devices"), &optimizer, &expected);

        let bound = 0.05;
        let mut rng = Rng::new(seed);
        let clipped = gradients::<Plain<B>, _>(&start, |_, count| {
            let gradient = gradient(&mut rng, count).into_iter();
            gradient.map(|g| g.clamp(-bound, bound)).collect()
        });
        let mut expected = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
        let stepped = expected.step(LR, start.clone(), clipped);
        let clipping = Some(GradientClippingConfig::Value(bound));
        let mut optimizer = config.clone().with_grad_clipping(clipping).adamw();
        let model = optimizer.step(LR, start.clone(), part(0));
        assert_same_parameters::<Plain<B>, _>(&what("clipped"), &model, &stepped);
        assert_same_state(&what("clipped"), &optimizer, &expected);
    }
}

/// The gradient of one parameter is missing, and others are stepped in two groups: each has the factor of its own norm.
fn clips_by_norm<B: DataBackend>(seed: u64) {
    let (threshold, lr, decay) = (0.5, 0.01, 0.1);
    let start = ranks::<Plain<B>>(seed);
    let mut drawn = HashMap::new();
    let mut rng = Rng::new(seed);
    let given = gradients::<Plain<B>, _>(&start, |path, count| {
        let size = if path.contains("weight") { 1.0 } else { 0.01 };
        let values = match path {
            "line.weight" => Vec::new(),
            _ => rng.normals(count, size),
        };
        drawn.insert(path.to_owned(), values.clone());
        values
    });
    // So large an epsilon that the update follows the size of the gradient.
    let config = all(QuantAdamWConfig::new())
        .with_epsilon(1.0)
        .with_weight_decay(decay)
        .no_decay("bias")
        .with_grad_clipping(Some(GradientClippingConfig::Norm(threshold)));
    let after = config.adamw().step(lr, start.clone(), given);
    let after = paths_of::<Plain<B>, _>(&after);
    let mut clipped = Vec::new();
    for (path, (_, before)) in paths_of::<Plain<B>, _>(&start) {
        let what = format!("seed {seed}, `{path}`");
        let gradient = &drawn[&path];
        if gradient.is_empty() {
            assert!(same_bits(&before, &after[&path].1), "{what}");
            continue;
        }
        let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        if norm > threshold {
            clipped.push(path.clone());
        }
        let factor = (threshold / norm).min(1.0);
        let kept = if path.contains("bias") {
            1.0
        } else {
            1.0 - lr as f32 * decay
        };
        let expected = before.iter().zip(gradient).map(|(p, g)| {
            let g = g * factor;
            p * kept - lr as f32 * g / (g.abs() + 1.0)
        });
        assert_parameters_near(
            &what,
            &before,
            &after[&path].1,
            &expected.collect::<Vec<_>>(),
        );
    }
    assert!(
        !clipped.is_empty() && clipped.len() + 1 < after.len(),
        "clipped: {clipped:?}"
    );
}

fn no_decay<B: DataBackend>(seed: u64) {
    let (lr, decay) = (0.01, 0.1);
    for (name, config) in every_kind() {
        let config = config
            .with_weight_decay(decay)
            .no_decay("norm")
            .no_decay("bias");
        let start = ranks::<Autodiff<B>>(seed);
        let zeros = gradients::<Autodiff<B>, _>(&start, |_, count| vec![0.0; count]);
        let model = config.adamw().step(lr, start.clone(), zeros);
        let after = paths_of::<Autodiff<B>, _>(&model);
        let mut decayed = Vec::new();
        for (path, (_, before)) in paths_of::<Autodiff<B>, _>(&start) {
            let what = format!("seed {seed}, {name}, `{path}`");
            if same_bits(&before, &after[&path].1) {
                continue;
            }
            let factor = 1.0 - lr as f32 * decay;
            let expected: Vec<f32> = before.iter().map(|p| p * factor).collect();
            assert_parameters_near(&what, &before, &after[&path].1, &expected);
            decayed.push(path);
        }
        decayed.sort();
        assert_eq!(
            decayed,
            ["line.weight", "linear.weight", "plane.weight"],
            "seed {seed}, {name}: these decay, norms and biases do not"
        );
    }
}

fn own_learning_rate<B: DataBackend>(seed: u64) {
    let start = ranks::<Plain<B>>(seed);
    let step = |config: &QuantAdamWConfig, lr| {
        let gradients = drawn::<Plain<B>, _>(&start, seed, 0);
        paths_of::<Plain<B>, _>(&config.adamw().step(lr, start.clone(), gradients))
    };
    let group = |pattern: &str, weight_decay, learning_rate| ParameterGroup {
        pattern: pattern.to_owned(),
        weight_decay,
        learning_rate,
    };
    for (name, config) in every_kind() {
        let config = config.with_weight_decay(0.1);
        let grouped = config.clone().with_groups(vec![
            group("plane.bias", Some(0.0), 1.0),
            group("plane", None, 0.25),
            // Too late for `plane`, of another decay for `line`.
            group("*", Some(0.3), 1.0),
        ]);
        let grouped = step(&grouped, LR);
        let plain = step(&config, LR);
        let slow = step(&config, 0.25 * LR);
        let kept = step(&config.clone().with_weight_decay(0.0), LR);
        let strong = step(&config.clone().with_weight_decay(0.3), LR);
        for (path, (_, values)) in &grouped {
            let expected = match path.as_str() {
                "plane.bias" => &kept,
                "plane.weight" => &slow,
                _ => &strong,
            };
            let what = format!("seed {seed}, {name}, `{path}`");
            assert!(same_bits(values, &expected[path].1), "{what}");
            assert!(!same_bits(values, &plain[path].1), "{what}: it has a group");
        }
    }
}

fn skip<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    let clippings = [
        None,
        // Makes an ordinary number of an infinity.
        Some(GradientClippingConfig::Value(0.01)),
        Some(GradientClippingConfig::Norm(0.5)),
    ];
    for (name, config) in every_kind() {
        for clipping in &clippings {
            let poison = Poison::new(&mut rng);
            let what = format!("seed {seed}, {name}, {clipping:?}, {poison:?}");
            let config = config.clone().with_grad_clipping(clipping.clone());
            let start = ranks::<Plain<B>>(seed);
            let mut optimizer = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
            let watcher = optimizer.clone();
            let mut undisturbed = config.adamw::<Plain<B>, Ranks<Plain<B>>>();

            // Also in the first step of all, where there are no moments yet.
            let bad = poison.drawn(&start, seed, 9);
            let model = optimizer.step(LR, start.clone(), bad);
            assert_same_parameters::<Plain<B>, _>(&format!("{what}, first"), &model, &start);
            let record = optimizer.to_record();
            assert_eq!((record.steps, record.skipped), (0, 1), "{what}");

            let model = run(model, &mut optimizer, seed, 0..2);
            let before = optimizer.to_record();
            assert_eq!((before.steps, before.skipped), (2, 1), "{what}");
            let bad = poison.drawn(&model, seed, 9);
            let after = optimizer.step(LR, model.clone(), bad);
            assert_same_parameters::<Plain<B>, _>(&format!("{what}, third"), &after, &model);
            let record = optimizer.to_record();
            assert_eq!((record.steps, record.skipped), (2, 2), "{what}");
            assert!(
                serialized(AdamWRecord {
                    skipped: 1,
                    ..record
                }) == serialized(before),
                "{what}: the record changed"
            );
            assert_eq!(optimizer.skipped_steps(), 2, "{what}");
            assert_eq!(watcher.skipped_steps(), 2, "{what}: seen by a clone");

            let model = run(after, &mut optimizer, seed, 2..4);
            let expected = run(start, &mut undisturbed, seed, 0..4);
            assert_same_parameters::<Plain<B>, _>(&what, &model, &expected);
            let (ours, theirs) = (optimizer.to_record(), undisturbed.to_record());
            assert!(
                serialized(AdamWRecord { skipped: 0, ..ours }) == serialized(theirs),
                "{what}: the run goes on as if nothing had been"
            );
            let loaded = config
                .adamw::<Plain<B>, Ranks<Plain<B>>>()
                .load_record(optimizer.to_record());
            assert_eq!(loaded.skipped_steps(), 2, "{what}: kept by the record");
        }
    }
}

/// The message of a panic.
fn message(panic: Box<dyn Any + Send>) -> String {
    panic.downcast_ref::<String>().cloned().expect("a message")
}

fn error<B: DataBackend>(seed: u64) {
    let poison = Poison::new(&mut Rng::new(seed));
    let clipping = Some(GradientClippingConfig::Value(0.01));
    for (name, config) in ready_made() {
        let config = config
            .with_on_nonfinite(OnNonfinite::Error)
            .with_grad_clipping(clipping.clone());
        let mut optimizer = config.adamw::<Autodiff<B>, Ranks<Autodiff<B>>>();
        let model = run(ranks(seed), &mut optimizer, seed, 0..2);
        let bad = poison.drawn(&model, seed, 2);
        let step = catch_unwind(AssertUnwindSafe(|| optimizer.step(LR, model, bad)));
        let text = message(step.expect_err("an error"));
        let expected = format!("the gradient of `{}`", poison.path);
        assert!(
            text.contains(&expected),
            "seed {seed}, {name}, {poison:?}: {text:?} does not say {expected:?}"
        );
    }
}

fn propagate<B: DataBackend>(seed: u64) {
    let mut rng = Rng::new(seed);
    for (name, config) in every_kind() {
        let poison = Poison::new(&mut rng);
        let what = format!("seed {seed}, {name}, {poison:?}");
        let config = config.with_on_nonfinite(OnNonfinite::Propagate);
        let mut optimizer = config.adamw::<Autodiff<B>, Ranks<Autodiff<B>>>();
        let model = run(ranks(seed), &mut optimizer, seed, 0..2);
        let bad = poison.drawn(&model, seed, 2);
        let model = optimizer.step(LR, model, bad);
        assert_nan(
            &what,
            &model,
            poison.path,
            poison.element..poison.element + 1,
        );
        let record = optimizer.to_record();
        assert_eq!((record.steps, record.skipped), (3, 0), "{what}");

        // The value has reached the whole group of the moment.
        let model = run(model, &mut optimizer, seed, 3..4);
        let group = [config.first, config.second]
            .into_iter()
            .flatten()
            .map(|format| format.group)
            .max()
            .unwrap_or(1);
        let start = poison.element / group * group;
        assert_nan(&what, &model, poison.path, start..start + group);

        // Such a record is written and read like any other.
        let record = optimizer.to_record();
        for (recorder, file) in through_every_file(&record) {
            assert!(
                serialized(file.record) == serialized(record.clone()),
                "{what}: {recorder}"
            );
        }
    }
}

/// NaN in these elements of this parameter, and nowhere else.
fn assert_nan<B: Backend, M: Module<B>>(what: &str, model: &M, bad: &str, elements: Range<usize>) {
    for (path, (_, values)) in paths_of::<B, M>(model) {
        for (index, value) in values.iter().enumerate() {
            assert_eq!(
                value.is_nan(),
                path == bad && elements.contains(&index),
                "{what}: `{path}` [{index}] is {value}; NaN is expected in {elements:?} of `{bad}`"
            );
        }
    }
}

/// A weight of ones in BF16, if this backend has the type.
fn ones_in_bf16<B: DataBackend>(rows: usize) -> Option<One<Autodiff<B>>> {
    let device = B::Device::default();
    if !supports::<B>(DType::BF16) {
        return None;
    }
    let mut model = One::<Autodiff<B>>::new(rows, 256, false, &device);
    let weight = Tensor::<_, 2>::ones([rows, 256], &device).cast(FloatDType::BF16);
    model.linear.weight = Param::initialized(ParamId::new(), weight.require_grad());
    Some(model)
}

/// The update is a quarter of the distance between two BF16 numbers: to nearest, it would be lost.
fn bf16_unbiased<B: DataBackend>(seed: u64) {
    let (rows, lr, steps) = (256, 1e-3, 5);
    for (name, config) in every_kind() {
        let Some(mut model) = ones_in_bf16::<B>(rows) else {
            return;
        };
        let config = config.with_weight_decay(0.0).with_seed(Some(seed));
        let mut optimizer = config.adamw::<Autodiff<B>, One<Autodiff<B>>>();
        for _ in 0..steps {
            let ones = gradients::<Autodiff<B>, _>(&model, |_, count| vec![1.0; count]);
            model = optimizer.step(lr, model, ones);
        }
        let weight = model.linear.weight.val();
        assert_eq!(weight.dtype(), DType::BF16);
        let values = floats(&weight);
        let mean = values.iter().copied().map(f64::from).sum::<f64>() / values.len() as f64;
        // Below 1 BF16 numbers are 2^-8 apart. A step's variance is that of a coin.
        let (ulp, expected) = (2f64.powi(-8), 1.0 - f64::from(steps) * lr);
        let chance = lr / ulp;
        let deviation =
            ulp * (f64::from(steps) * chance * (1.0 - chance) / values.len() as f64).sqrt();
        assert!(
            (mean - expected).abs() < 5.0 * deviation + 1e-6,
            "seed {seed}, {name}: the mean is {mean}, expected {expected} +- {deviation}"
        );
    }
}

fn bf16_reproducible<B: DataBackend>(seed: u64) {
    if let Some(start) = ones_in_bf16::<B>(16) {
        reproducible(start, QuantAdamWConfig::fp8(), seed);
    }
}

fn stochastic_moments_reproducible<B: DataBackend>(seed: u64) {
    for (_, config) in ready_made() {
        let start = One::<Autodiff<B>>::new(16, 256, false, &B::Device::default());
        // Draws the weights now, so that clones start from the same ones.
        let _ = start.linear.weight.val();
        let config = config.with_state_rounding(StateRounding::Stochastic);
        reproducible(start, config, seed);
    }
}

/// Rounding at random follows from the seed and the step, also in a resumed run.
fn reproducible<B: DataBackend>(start: One<Autodiff<B>>, config: QuantAdamWConfig, seed: u64) {
    let fresh = |seed| {
        config
            .clone()
            .with_min_elements(1)
            .with_seed(Some(seed))
            .adamw::<Autodiff<B>, One<Autodiff<B>>>()
    };
    let weights = |model: &One<Autodiff<B>>| floats(&model.linear.weight.val());
    let mut optimizer = fresh(seed);
    let half = run(start.clone(), &mut optimizer, seed, 0..3);
    let record = optimizer.to_record();
    let whole = run(half.clone(), &mut optimizer, seed, 3..6);
    let again = run(start.clone(), &mut fresh(seed), seed, 0..6);
    assert!(same_bits(&weights(&whole), &weights(&again)), "seed {seed}");
    let other = run(start, &mut fresh(seed + 1), seed, 0..6);
    assert!(
        !same_bits(&weights(&whole), &weights(&other)),
        "seed {seed}: another seed rounds otherwise"
    );
    let mut resumed = fresh(seed + 1).load_record(record);
    let resumed = run(half, &mut resumed, seed, 3..6);
    assert!(
        same_bits(&weights(&whole), &weights(&resumed)),
        "seed {seed}: the record knows the seed"
    );
}

/// Moments are updated in place, but not those of a clone.
fn clones<B: DataBackend>(seed: u64) {
    for (name, config) in every_kind() {
        let what = format!("seed {seed}, {name}");
        let mut optimizer = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
        let model = run(ranks::<Plain<B>>(seed), &mut optimizer, seed, 0..2);
        let (mut clone, held) = (optimizer.clone(), model.clone());
        let (before, parameters) = (
            serialized(clone.to_record()),
            parameters_of::<Plain<B>, _>(&held),
        );
        let ours = run(model, &mut optimizer, seed, 2..4);
        assert!(serialized(clone.to_record()) == before, "{what}: moments");
        let after = parameters_of::<Plain<B>, _>(&held);
        assert!(
            after.iter().zip(&parameters).all(|(a, b)| same_bits(a, b)),
            "{what}: parameters"
        );
        let theirs = run(held, &mut clone, seed, 2..4);
        assert_same_parameters::<Plain<B>, _>(&what, &ours, &theirs);
        assert_same_state(&what, &optimizer, &clone);
    }
}

// Parameters that get their first gradient late, or none in some steps.

/// Frozen at first, left out at times, trained throughout.
fn is_frozen(step: u64, path: &str) -> bool {
    match path {
        "norm.gamma" | "norm.beta" => step < 3,
        "plane.weight" => step % 2 == 1,
        "line.weight" => step == 0 || step == 4,
        _ => false,
    }
}

/// Burn counts the steps of each parameter.
fn late_as_burns<B: DataBackend>(seed: u64) {
    let start = ranks::<Plain<B>>(seed);
    let mut burns = AdamWConfig::new()
        .with_weight_decay(0.1)
        .init::<Plain<B>, Ranks<Plain<B>>>();
    let mut ours = QuantAdamWConfig::new()
        .with_weight_decay(0.1)
        .adamw::<Plain<B>, Ranks<Plain<B>>>();
    let (mut theirs, mut model) = (start.clone(), start.clone());
    let start = paths_of::<Plain<B>, _>(&start);
    for step in 0..8 {
        theirs = run_without(theirs, &mut burns, seed, step..step + 1, is_frozen);
        model = run_without(model, &mut ours, seed, step..step + 1, is_frozen);
        let what = format!("seed {seed}, step {step}");
        if is_on_the_host::<B>() {
            assert_same_parameters::<Plain<B>, _>(&what, &model, &theirs);
        }
        let theirs = paths_of::<Plain<B>, _>(&theirs);
        for (path, (_, values)) in paths_of::<Plain<B>, _>(&model) {
            let what = format!("{what}, `{path}`");
            assert_parameters_near(&what, &start[&path].1, &values, &theirs[&path].1);
        }
    }
}

/// A skipped step counts for no parameter, also where it would have been the first of one.
fn late_and_skipped<B: DataBackend>(seed: u64) {
    let config = all(QuantAdamWConfig::fp8());
    let (mut optimizer, mut undisturbed) = (config.adamw(), config.adamw());
    let start = ranks::<Plain<B>>(seed);
    let expected = run_without(start.clone(), &mut undisturbed, seed, 0..8, is_frozen);
    let mut rng = Rng::new(seed);
    let mut model = start;
    for step in 0..8 {
        // The parameters of this step, of another one, and all of them.
        for frozen_as in [step, rng.below(8) as u64, u64::MAX] {
            let bad = gradients::<Plain<B>, _>(&model, |path, count| {
                match is_frozen(frozen_as, path) && frozen_as != u64::MAX {
                    true => Vec::new(),
                    false => vec![f32::NAN; count],
                }
            });
            model = optimizer.step(LR, model, bad);
        }
        model = run_without(model, &mut optimizer, seed, step..step + 1, is_frozen);
    }
    let what = format!("seed {seed}");
    assert_same_parameters::<Plain<B>, _>(&what, &model, &expected);
    let (ours, theirs) = (optimizer.to_record(), undisturbed.to_record());
    assert_eq!((ours.steps, ours.skipped), (8, 24), "{what}");
    assert!(
        serialized(AdamWRecord { skipped: 0, ..ours }) == serialized(theirs),
        "{what}: the record"
    );
}

fn late_and_resumed<B: DataBackend>(seed: u64) {
    for (name, config) in every_kind() {
        let fresh = || config.adamw::<Plain<B>, Ranks<Plain<B>>>();
        // Before, at and after the first gradient of parameters.
        for stop in [2, 3, 5] {
            let mut whole = fresh();
            let half = run_without(
                ranks::<Plain<B>>(seed),
                &mut whole,
                seed,
                0..stop,
                is_frozen,
            );
            let record = whole.to_record();
            let expected = run_without(half.clone(), &mut whole, seed, stop..8, is_frozen);
            let what = format!("seed {seed}, {name}, {stop} steps");
            let file = through(
                NamedMpkFileRecorder::<HalfPrecisionSettings>::default(),
                &record,
            );
            let mut resumed = fresh().load_record(file.record);
            let model = run_without(half, &mut resumed, seed, stop..8, is_frozen);
            assert_same_parameters::<Plain<B>, _>(&what, &model, &expected);
            assert_same_state(&what, &resumed, &whole);
            let ids = paths_of::<Plain<B>, _>(&expected);
            let fewer = [
                ("norm.gamma", 5),
                ("norm.beta", 5),
                ("plane.weight", 4),
                ("line.weight", 6),
            ]
            .map(|(path, steps)| (ids[path].0, steps));
            assert_eq!(whole.to_record().fewer_steps, HashMap::from(fewer));
        }
    }
}

// Records.

/// A record that went through a file.
struct File {
    record: AdamWRecord,
    size: u64,
}

fn through<R>(recorder: R, record: &AdamWRecord) -> File
where
    R: Recorder<Flex, RecordArgs = PathBuf, RecordOutput = (), LoadArgs = PathBuf>,
{
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("moments");
    recorder
        .record(record.clone(), path.clone())
        .expect("the record is written");
    let mut files = std::fs::read_dir(folder.path()).expect("a folder");
    let file = files.next().expect("a file").expect("an entry");
    let size = file.metadata().expect("its metadata").len();
    let record = recorder
        .load(path, &Default::default())
        .expect("the record is read");
    File { record, size }
}

fn through_every_file(record: &AdamWRecord) -> [(&'static str, File); 9] {
    type Full = FullPrecisionSettings;
    type Half = HalfPrecisionSettings;
    [
        ("bin", through(BinFileRecorder::<Full>::default(), record)),
        (
            "bin, half",
            through(BinFileRecorder::<Half>::default(), record),
        ),
        (
            "bin.gz",
            through(BinGzFileRecorder::<Full>::default(), record),
        ),
        (
            "mpk",
            through(NamedMpkFileRecorder::<Full>::default(), record),
        ),
        (
            "mpk, half",
            through(NamedMpkFileRecorder::<Half>::default(), record),
        ),
        (
            "mpk.gz",
            through(NamedMpkGzFileRecorder::<Full>::default(), record),
        ),
        (
            "json",
            through(PrettyJsonFileRecorder::<Full>::default(), record),
        ),
        (
            "json, half",
            through(PrettyJsonFileRecorder::<Half>::default(), record),
        ),
        (
            "json.gz",
            through(JsonGzFileRecorder::<Full>::default(), record),
        ),
    ]
}

fn resumed<B: DataBackend>(seed: u64) {
    for (name, config) in every_kind() {
        let fresh = || config.adamw::<Plain<B>, Ranks<Plain<B>>>();
        let mut optimizer = fresh();
        let half = run(ranks::<Plain<B>>(seed), &mut optimizer, seed, 0..3);
        let record = optimizer.to_record();
        let whole = run(half.clone(), &mut optimizer, seed, 3..6);
        for (recorder, file) in through_every_file(&record) {
            let what = format!("seed {seed}, {name}, {recorder}");
            assert!(
                serialized(file.record.clone()) == serialized(record.clone()),
                "{what}: the record"
            );
            let mut resumed = fresh().load_record(file.record);
            let model = run(half.clone(), &mut resumed, seed, 3..6);
            assert_same_parameters::<Plain<B>, _>(&what, &model, &whole);
            assert_same_state(&what, &resumed, &optimizer);
        }
    }
}

/// With the thresholds of the layers in the same file. On CPUs only: elsewhere Burn's own kernels do not repeat
/// themselves to the bit.
#[test]
fn a_quantized_run_resumes_bit_for_bit() {
    let seed = seed();
    let batches = samples::<Fallback<Flex>, Mlp<Fallback<Flex>>>(seed, 12);
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, config) in ready_made() {
        let fresh = |seed| {
            let config = config.clone().with_seed(Some(seed));
            config.init::<Fallback<Flex>, Mlp<Fallback<Flex>>>()
        };
        let mut optimizer = fresh(seed);
        let start = optimizer.attach(with_weights_of(Mlp::new(&Default::default()), seed));
        let half = train(start, &mut optimizer, 5e-3, &batches[..5]).model;
        let recorder = BinFileRecorder::<HalfPrecisionSettings>::default();
        let path = folder.path().join(name);
        Recorder::<Flex>::record(&recorder, optimizer.to_record(), path.clone())
            .expect("the record is written");
        let whole = train(half.clone(), &mut optimizer, 5e-3, &batches[5..]);
        let record = Recorder::<Flex>::load(&recorder, path, &Default::default());
        let mut resumed = fresh(seed + 1).load_record(record.expect("the record is read"));
        let start = resumed.attach(half);
        let run = train(start, &mut resumed, 5e-3, &batches[5..]);
        let what = format!("seed {seed}, {name}");
        assert!(same_bits(&run.losses, &whole.losses), "{what}: losses");
        assert_same_parameters::<Fallback<Flex>, _>(&what, &run.model, &whole.model);
        assert_same_state(&what, resumed.inner(), optimizer.inner());
        assert_eq!(resumed.layers_record(), optimizer.layers_record(), "{what}");
    }
}

/// In Burn's `OptimizerAdaptor` each tensor steps as in the whole optimizer, also after its record went through a file.
fn one_at_a_time<B: DataBackend>(seed: u64) {
    for (name, config) in every_kind() {
        let what = format!("seed {seed}, {name}");
        let mut whole = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
        let expected = run(ranks::<Plain<B>>(seed), &mut whole, seed, 0..6);
        let fresh = || Adaptor::<B>::from(config.simple());
        let mut simple = fresh();
        let half = run(ranks::<Plain<B>>(seed), &mut simple, seed, 0..3);
        let mut resumed = through_a_file(&simple, fresh());
        let model = run(half, &mut resumed, seed, 3..6);
        assert_same_parameters::<Plain<B>, _>(&what, &model, &expected);
    }
}

type Adaptor<B> = OptimizerAdaptor<SimpleQuantAdamW, Ranks<Plain<B>>, Plain<B>>;

fn through_a_file<B: DataBackend>(optimizer: &Adaptor<B>, fresh: Adaptor<B>) -> Adaptor<B> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("moments");
    let recorder = BinFileRecorder::<HalfPrecisionSettings>::default();
    Recorder::<Plain<B>>::record(&recorder, optimizer.to_record(), path.clone())
        .expect("the record is written");
    let record = Recorder::<Plain<B>>::load(&recorder, path, &Default::default());
    fresh.load_record(record.expect("the record is read"))
}

/// The random streams of all tensors.
fn streams<B: DataBackend>(optimizer: &Adaptor<B>) -> Vec<u64> {
    fn collect(value: &serde_json::Value, found: &mut Vec<u64>) {
        match value {
            serde_json::Value::Object(fields) => {
                found.extend(fields.get("stream").and_then(serde_json::Value::as_u64));
                fields.values().for_each(|value| collect(value, found));
            }
            serde_json::Value::Array(values) => {
                values.iter().for_each(|value| collect(value, found));
            }
            _ => {}
        }
    }
    let item = Record::<Plain<B>>::into_item::<FullPrecisionSettings>(optimizer.to_record());
    let item = serde_json::to_value(item).expect("an item is serialized");
    let mut found = Vec::new();
    collect(&item, &mut found);
    found
}

/// Each tensor has random numbers of its own, the same ones in a resumed run: also a tensor that begins after it
/// resumed, before all others in the module's order or between them.
fn one_at_a_time_resumed<B: DataBackend>(seed: u64) {
    for late in ["norm", "line"] {
        for (name, config) in ready_made() {
            let what = format!("seed {seed}, {name}, late `{late}`");
            let config = config
                .with_seed(Some(seed))
                .with_state_rounding(StateRounding::Stochastic);
            let fresh = || Adaptor::<B>::from(config.simple());
            let frozen = |step: u64, path: &str| step < 3 && path.starts_with(late);
            let mut whole = fresh();
            let half = run_without(ranks::<Plain<B>>(seed), &mut whole, seed, 0..3, frozen);
            let mut resumed = through_a_file(&whole, fresh());
            let expected = run_without(half.clone(), &mut whole, seed, 3..7, frozen);
            let model = run_without(half, &mut resumed, seed, 3..7, frozen);
            assert_same_parameters::<Plain<B>, _>(&what, &model, &expected);
            let (mut ours, mut theirs) = (streams(&resumed), streams(&whole));
            ours.sort();
            theirs.sort();
            assert_eq!(ours, theirs, "{what}");
            let count = paths_of::<Plain<B>, _>(&expected).len() as u64;
            assert_eq!(ours, (0..count).collect::<Vec<_>>(), "{what}");
        }
    }
}

#[test]
fn groups_that_no_kernel_has_are_refused() {
    let e4m3 = |group| Some(StateFormat::E4M3.with_group(group));
    for (first, second, what) in [
        (e4m3(4096), None, "a group of 4096 elements"),
        (e4m3(126), None, "a group of 126 elements"),
        (None, e4m3(0), "a group of 0 elements"),
        (e4m3(96), e4m3(128), "groups of 96 and 128 elements"),
        (e4m3(128), e4m3(384), "groups of 128 and 384 elements"),
    ] {
        let config = QuantAdamWConfig::new()
            .with_first(first)
            .with_second(second);
        let made = catch_unwind(|| config.adamw::<Plain<Flex>, Ranks<Plain<Flex>>>());
        let text = message(made.err().expect("refused"));
        assert!(text.contains(what), "{text:?} does not say {what:?}");
    }
}

#[test]
fn a_record_is_as_small_as_its_state() {
    let n = 512 * 256;
    let seed = seed();
    let cases = [
        (QuantAdamWConfig::fp8(), 2.1),
        (QuantAdamWConfig::dynamic_8bit(), 2.05),
        (QuantAdamWConfig::int8(), 2.01),
        (QuantAdamWConfig::new(), 8.0),
    ];
    for (config, bytes) in cases {
        let state = |format: Option<StateFormat>| format.map_or(4 * n, |format| format.bytes(n));
        let stored = state(config.first) + state(config.second);
        let a_parameter = stored as f64 / n as f64;
        assert!(a_parameter <= bytes, "{config:?}: {a_parameter} bytes");

        let mut optimizer = config.adamw::<Plain<Flex>, One<Plain<Flex>>>();
        let model = One::new(512, 256, false, &Default::default());
        run(model, &mut optimizer, seed, 0..1);
        for (recorder, file) in through_every_file(&optimizer.to_record()) {
            // Text is for people.
            if recorder.starts_with("json") {
                continue;
            }
            let bound = 1.05 * bytes * n as f64 + 1024.0;
            assert!(
                (file.size as f64) < bound,
                "seed {seed}, {recorder}: {} bytes for {n} parameters: {config:?}",
                file.size
            );
        }
    }
    // Tensors of whole groups, of any size.
    let fp8 = StateFormat::E4M3.expanded();
    assert!((1..100).all(|groups| 2 * fp8.bytes(128 * groups) <= 128 * groups * 21 / 10));
}

/// The moments of a record move into the optimizer's formats before its first step, here one that is skipped, so that
/// nothing else happens to them.
fn converted<B: DataBackend>(seed: u64) {
    for (from_name, from) in every_kind() {
        let mut optimizer = from.adamw::<Plain<B>, Ranks<Plain<B>>>();
        let model = run(ranks::<Plain<B>>(seed), &mut optimizer, seed, 0..3);
        let record = optimizer.to_record();
        for (to_name, to) in every_kind() {
            let what = format!("seed {seed}, from {from_name} to {to_name}");
            let mut loaded = to
                .adamw::<Plain<B>, Ranks<Plain<B>>>()
                .load_record(record.clone());
            assert_same_state(&format!("{what}, untouched"), &loaded, &optimizer);
            let bad = Poison::new(&mut Rng::new(seed)).drawn(&model, seed, 3);
            loaded.step(LR, model.clone(), bad);
            let converted = loaded.to_record();
            assert_eq!((converted.steps, converted.skipped), (3, 1), "{what}");
            assert_eq!(
                converted.parameters.len(),
                record.parameters.len(),
                "{what}"
            );
            for (id, parameter) in &record.parameters {
                let [first, second] = parameter.values();
                let moments = [
                    (first, [from.first, to.first], Moment::First),
                    (second, [from.second, to.second], Moment::Second),
                ];
                let values = converted.parameters[id].values();
                for (values, (before, formats, moment)) in values.iter().zip(moments) {
                    let what = format!("{what}: {:?}, {moment:?}", parameter.shape());
                    let [up, down] = neighbours(&before, formats[1], moment);
                    let expected = converted_values(before, formats, moment);
                    if formats[0] == formats[1] || !is_expanded_on_a_device::<B>(formats) {
                        assert!(same_bits(values, &expected), "{what}");
                    }
                    for (index, (&a, &e)) in values.iter().zip(&expected).enumerate() {
                        let is_near = |e: f32, bound: f32| (a - e).abs() <= bound * e.abs();
                        let near = is_near(e, 0.3)
                            || [&up, &down].iter().any(|it| is_near(it[index], 1e-4));
                        assert!(near, "{what}: [{index}] {a:e}, {e:e}");
                    }
                }
            }
            // It goes on, and both end close to each other.
            let model = run(model.clone(), &mut loaded, seed, 3..5);
            assert!(
                parameters_of::<Plain<B>, _>(&model)
                    .iter()
                    .flatten()
                    .all(|p| p.is_finite()),
                "{what}"
            );
        }
    }
}

/// Another logarithm than the host's may give a value half way between two codes the other one.
fn is_expanded_on_a_device<B: Backend>(formats: Formats) -> bool {
    let expands = formats.iter().flatten().any(|format| format.expand);
    expands && !is_on_the_host::<B>()
}

fn is_on_the_host<B: Backend>() -> bool {
    let name = B::name(&B::Device::default());
    ["flex", "ndarray"].contains(&name.as_str())
}

fn converted_values(values: Vec<f32>, [from, to]: Formats, moment: Moment) -> Vec<f32> {
    match from == to {
        true => values,
        false => Host::new(values, to, moment).values(moment),
    }
}

/// The values of the codes on both sides of each value's own. A device may take either for a value half way between
/// two. The smallest codes are a factor apart.
fn neighbours(values: &[f32], format: Option<StateFormat>, moment: Moment) -> [Vec<f32>; 2] {
    [1, u8::MAX].map(|step| {
        let mut host = Host::new(values.to_vec(), format, moment);
        if let Host::Coded(_, state) = &mut host {
            let codes = state.codes.iter_mut();
            codes.for_each(|code| *code = code.wrapping_add(step));
        }
        host.values(moment)
    })
}

/// A parameter that the record knows but no step has touched is written again.
fn untouched<B: DataBackend>(seed: u64) {
    let config = all(QuantAdamWConfig::fp8());
    let mut optimizer = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
    let model = run(ranks::<Plain<B>>(seed), &mut optimizer, seed, 0..2);
    let record = optimizer.to_record();
    let mut loaded = config
        .adamw::<Plain<B>, Ranks<Plain<B>>>()
        .load_record(record.clone());
    let frozen = model.plane.weight.id;
    let stepped = run_without(model.clone(), &mut loaded, seed, 2..3, |_, path| {
        path == "plane.weight"
    });
    assert!(
        same_bits(
            &floats(&stepped.plane.weight.val()),
            &floats(&model.plane.weight.val())
        ),
        "seed {seed}: no gradient, no step"
    );
    let after = loaded.to_record();
    assert_eq!(after.steps, 3);
    assert_eq!(after.fewer_steps, HashMap::from([(frozen, 2)]));
    let differing: Vec<&ParamId> = record
        .parameters
        .keys()
        .filter(|id| after.parameters[id] == record.parameters[id])
        .collect();
    assert_eq!(differing, [&frozen], "seed {seed}");
}

fn another_shape<B: DataBackend>(seed: u64) {
    for (name, config) in every_kind() {
        // As many elements, and more.
        for shape in [[37, 24], [24, 38]] {
            let mut optimizer = config.adamw::<Plain<B>, Ranks<Plain<B>>>();
            let mut model = run(ranks::<Plain<B>>(seed), &mut optimizer, seed, 0..1);
            let mut loaded = config
                .adamw::<Plain<B>, Ranks<Plain<B>>>()
                .load_record(optimizer.to_record());
            let weight = Tensor::ones(shape, &Default::default());
            model.linear.weight = Param::initialized(model.linear.weight.id, weight);
            let gradients = drawn::<Plain<B>, _>(&model, seed, 1);
            let step = catch_unwind(AssertUnwindSafe(|| loaded.step(LR, model, gradients)));
            let text = message(step.expect_err("refused"));
            for part in ["`linear.weight`", &format!("{shape:?}"), "[24, 37]"] {
                assert!(
                    text.contains(part),
                    "{name}: {text:?} does not say {part:?}"
                );
            }
        }
    }
}

/// A record of the layout before parameters had step counts of their own, in formats that name their fields and in one
/// that does not, with something behind it.
#[test]
fn a_record_of_version_1_is_read() {
    #[derive(Serialize)]
    struct Version1<'a> {
        version: u32,
        steps: u64,
        skipped: u64,
        seed: Option<u64>,
        parameters: &'a BTreeMap<u64, ParameterRecord>,
    }
    type Full = FullPrecisionSettings;
    type Item = <AdamWRecord as Record<Flex>>::Item<Full>;
    let load = |item: Item| -> AdamWRecord {
        Record::<Flex>::from_item::<Full>(item, &Default::default())
    };
    let seed = seed();
    let mut optimizer = all(QuantAdamWConfig::fp8()).adamw::<Plain<Flex>, Ranks<Plain<Flex>>>();
    run(ranks::<Plain<Flex>>(seed), &mut optimizer, seed, 0..2);
    let expected: AdamWRecord = optimizer.to_record();
    assert_eq!(expected.fewer_steps, HashMap::new());

    let parameters = expected.parameters.iter();
    let parameters: BTreeMap<u64, ParameterRecord> = parameters
        .map(|(id, record)| (id.val(), ParameterRecord::clone(record)))
        .collect();
    let item = |version| Version1 {
        version,
        steps: expected.steps,
        skipped: expected.skipped,
        seed: expected.seed,
        parameters: &parameters,
    };
    let json = through_a_file_of(PrettyJsonFileRecorder::<Full>::default(), item(1));
    assert_eq!(load(json), expected);
    let message_pack = through_a_file_of(NamedMpkFileRecorder::<Full>::default(), item(1));
    assert_eq!(load(message_pack), expected);
    let bincode = through_a_file_of(BinFileRecorder::<Full>::default(), item(1));
    assert_eq!(load(bincode), expected);
    // Version 2 had the steps of late parameters behind that.
    let fewer_steps = BTreeMap::from([(7u64, 1u64)]);
    let bincode = through_a_file_of(BinFileRecorder::<Full>::default(), (item(2), fewer_steps));
    let late = HashMap::from([(ParamId::from(7), 1)]);
    let read = load(bincode);
    assert_eq!((read.fewer_steps, read.loss_scale), (late, None));
    for version in [0, 4] {
        let read = catch_unwind(|| -> Item {
            through_a_file_of(BinFileRecorder::<Full>::default(), item(version))
        });
        let text = message(read.expect_err("refused"));
        let expected = format!("has version {version}");
        assert!(
            text.contains(&expected),
            "{text:?} does not say {expected:?}"
        );
    }
}

/// The same for one tensor.
#[test]
fn a_tensors_record_of_version_1_is_read() {
    #[derive(Serialize)]
    struct Version1<'a> {
        version: u32,
        clock: [i32; 2],
        seed: u64,
        stream: u64,
        moments: &'a ParameterRecord,
    }
    type Full = FullPrecisionSettings;
    type Item = <SimpleState<Flex> as Record<Flex>>::Item<Full>;
    let seed = seed();
    let mut optimizer = all(QuantAdamWConfig::fp8()).adamw::<Plain<Flex>, Ranks<Plain<Flex>>>();
    let model = run(ranks::<Plain<Flex>>(seed), &mut optimizer, seed, 0..2);
    let moments = &*optimizer.to_record().parameters[&model.linear.weight.id];
    let old = Version1 {
        version: 1,
        clock: [2, 1],
        seed,
        stream: 5,
        moments,
    };
    let item: Item = through_a_file_of(BinFileRecorder::<Full>::default(), old);
    let state: SimpleState<Flex> = Record::<Flex>::from_item::<Full>(item, &Default::default());
    let item = Record::<Flex>::into_item::<Full>(state);
    let expected = serde_json::json!({
        "version": 3,
        "clock": [2, 1],
        "seed": seed,
        "stream": 5,
        "moments": moments,
        "streams": 6,
    });
    let item = serde_json::to_value(item).expect("an item is serialized");
    assert_eq!(item, expected);
}

/// With a number behind the item.
fn through_a_file_of<R, Old: Serialize, Item: DeserializeOwned>(recorder: R, item: Old) -> Item
where
    R: Recorder<Flex, RecordArgs = PathBuf, RecordOutput = (), LoadArgs = PathBuf>,
{
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut path = folder.path().join("moments");
    recorder
        .save_item((item, 7u64), path.clone())
        .expect("the item is written");
    let (item, behind): (Item, u64) = recorder.load_item(&mut path).expect("the item is read");
    assert_eq!(behind, 7);
    item
}

/// Clones of an optimizer share what it has loaded, and none holds on to what it has moved to the device.
#[test]
fn clones_share_the_loaded_moments() {
    let seed = seed();
    let config = all(QuantAdamWConfig::fp8());
    let fresh = || config.adamw::<Plain<Flex>, Ranks<Plain<Flex>>>();
    let mut optimizer = fresh();
    let model = run(ranks::<Plain<Flex>>(seed), &mut optimizer, seed, 0..2);
    let record = optimizer.to_record();
    let holders = |count: usize, when: &str| {
        for (id, parameter) in &record.parameters {
            assert_eq!(
                Arc::strong_count(parameter),
                count,
                "seed {seed}, {when}: {id}"
            );
        }
    };
    holders(1, "before");
    let mut loaded = fresh().load_record(record.clone());
    let mut clone = loaded.clone();
    holders(3, "loaded, and cloned");
    let whole = run(model.clone(), &mut loaded, seed, 2..4);
    holders(2, "stepped");
    // A clone that is stepped later goes on from where it was made.
    let other = run(model, &mut clone, seed, 2..4);
    holders(1, "both stepped");
    assert_same_parameters::<Plain<Flex>, _>(&format!("seed {seed}"), &whole, &other);
    assert_same_state(&format!("seed {seed}"), &loaded, &clone);
}

#[test]
fn a_damaged_record_is_refused() {
    type Item = <AdamWRecord as Record<Flex>>::Item<FullPrecisionSettings>;
    type Edit = fn(&mut serde_json::Value, &str);
    let seed = seed();
    let mut optimizer = all(QuantAdamWConfig::fp8()).adamw::<Plain<Flex>, Ranks<Plain<Flex>>>();
    let model = run(ranks::<Plain<Flex>>(seed), &mut optimizer, seed, 0..1);
    let id = model.linear.weight.id.val().to_string();
    let item: Item = Record::<Flex>::into_item::<FullPrecisionSettings>(optimizer.to_record());
    let whole = serde_json::to_value(&item).expect("an item is serialized");
    let load = |value: serde_json::Value| {
        let item: Item = serde_json::from_value(value).map_err(|error| error.to_string())?;
        catch_unwind(|| {
            <AdamWRecord as Record<Flex>>::from_item::<FullPrecisionSettings>(
                item,
                &Default::default(),
            )
        })
        .map_err(message)
    };
    let loaded = load(whole.clone()).expect("nothing is wrong with it");
    assert_eq!(loaded, optimizer.to_record());

    fn list<'a>(
        item: &'a mut serde_json::Value,
        id: &str,
        moment: &str,
        field: &str,
    ) -> &'a mut Vec<serde_json::Value> {
        let moment = &mut item["parameters"][id][moment];
        moment[field].as_array_mut().expect("a list")
    }
    let cases: [(&str, Edit, &str); 8] = [
        (
            "version",
            |item, _| item["version"] = 4.into(),
            "has version 4",
        ),
        (
            "shape",
            |item, id| item["parameters"][id]["shape"] = vec![24, 38].into(),
            "damaged",
        ),
        (
            "a code less",
            |item, id| _ = list(item, id, "first", "values").pop(),
            "damaged",
        ),
        (
            "a code more",
            |item, id| list(item, id, "second", "values").push(0.into()),
            "damaged",
        ),
        (
            "a scale less",
            |item, id| _ = list(item, id, "second", "scales").pop(),
            "damaged",
        ),
        (
            "an exponent less",
            |item, id| _ = list(item, id, "first", "exponents").pop(),
            "damaged",
        ),
        (
            "a format of FP32",
            |item, id| item["parameters"][id]["first"]["format"] = serde_json::Value::Null,
            "damaged",
        ),
        (
            "groups of nothing",
            |item, id| item["parameters"][id]["first"]["format"]["group"] = 0.into(),
            "damaged",
        ),
    ];
    for (what, edit, expected) in cases {
        let mut item = whole.clone();
        edit(&mut item, &id);
        assert_ne!(item, whole, "{what}");
        let text = load(item).expect_err("refused");
        assert!(
            text.contains(expected),
            "{what}: {text:?} does not say {expected:?}"
        );
        if expected == "damaged" {
            assert!(
                text.contains(&id),
                "{what}: {text:?} does not name parameter {id}"
            );
        }
    }
}
