//! Attention on Hopper's matrix instructions on a CPU, against the reference.

use std::{iter::Peekable, slice};

use cubecl::ir::StorageType;
use cubecl_kernels::attention::{AttentionKernel, AttentionProducts, Band};
use half::{bf16, f16};

use super::{
    device::{rounded, to_bytes},
    dtype,
    emulate::UNWRITTEN,
    emulate_attention::{hidden, in_heads, of_words, sources, to_floats},
    emulator::{Sanitizer, run},
    offline::Source,
    problem::{Kind, Problem, assert_close, assert_near},
    random::Random,
};

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    for (float, kind, sanitizer) in random.few(cases(), 1) {
        println!("{float} {kind:?}");
        emulate(&mut random, float, kind, sanitizer);
    }
}

#[test]
fn int8_products_equal_the_reference() {
    let mut random = Random::fresh();
    for (float, kind, sanitizer) in random.few(cases(), 1) {
        let kind = Kind {
            products: AttentionProducts::Int8,
            ..kind
        };
        println!("{float} {kind:?}");
        emulate_int8(&mut random, float, kind, sanitizer);
    }
}

/// A problem of each kind, for each type and sanitizer.
fn cases() -> [(StorageType, Kind, Sanitizer); 4] {
    // More queries and keys than a tile has, of heads that do not fill their instructions; a batch after another.
    let plain = Kind::plain([2, 1, 1], [70, 200], [64, 40]);
    // More tiles of keys and of values than there are stages, and blocks that share the heads of a group.
    let grouped = Kind {
        band: Band::CAUSAL,
        ..Kind::plain([1, 2, 1], [150, 520], [64, 64])
    };
    let wide = Kind {
        band: Band {
            left: Some(90),
            right: Some(7),
        },
        ..Kind::plain([1, 1, 1], [140, 129], [128, 72])
    };
    let masked = Kind {
        mask: Some([false, true, true, true]),
        band: Band::CAUSAL,
        ..Kind::plain([1, 2, 2], [131, 100], [128, 128])
    };
    [
        (dtype::<f16>(), plain, Sanitizer::Addresses),
        (dtype::<bf16>(), grouped, Sanitizer::Threads),
        (dtype::<bf16>(), wide, Sanitizer::Addresses),
        (dtype::<f16>(), masked, Sanitizer::Threads),
    ]
}

fn emulate(random: &mut Random, float: StorageType, kind: Kind, sanitizer: Sanitizer) {
    let mut problem = Problem::draw(random, kind);
    for x in [
        &mut problem.query,
        &mut problem.key,
        &mut problem.value,
        &mut problem.gradient,
    ] {
        *x = rounded(x, float);
    }
    let expected = problem.solve();
    let tolerance = if float == dtype::<f16>() { 4e-3 } else { 3e-2 };
    let shape = &problem.shape;
    let sources = sources(AttentionKernel::Hopper, 90, &problem, float);
    let mut launches = Launches {
        sources: sources.iter().peekable(),
        name: format!("{float}-{sanitizer:?}"),
        sanitizer,
    };
    let mask = problem.mask.as_ref().map(hidden);
    let floats = |x: &[f32]| to_bytes(x, float);
    let in_heads = |bytes: &[u8], shape| in_heads(&to_floats(bytes, float), shape);
    let [query, key, value] = [&problem.query, &problem.key, &problem.value].map(|x| floats(x));
    let new = Vec::new;

    let words = launches.words_of(mask.as_ref());
    let buffers = [
        new(),
        new(),
        query.clone(),
        key.clone(),
        value.clone(),
        words.unwrap_or_else(|| query.clone()),
    ];
    let [output, log_sum_exp, ..] = launches.run("attention_forward_hopper", buffers);
    let forward = &expected.forward;
    let of_output = in_heads(&output, shape.output());
    assert_close(&of_output, &forward.output, tolerance, "output");
    let of_rows = of_words(&log_sum_exp);
    assert_close(&of_rows, &forward.log_sum_exp, 1e-4, "log-sum-exp");

    let words = launches.words_of(mask.as_ref());
    let gradient = floats(&problem.gradient);
    let buffers = [output, gradient.clone(), log_sum_exp, new(), new()];
    let [.., rows, turns] = launches.run("attention_rows_hopper", buffers);
    let buffers = [
        rows,
        turns,
        new(),
        new(),
        new(),
        query.clone(),
        key,
        value,
        gradient,
        words.unwrap_or(query),
    ];
    let [_, _, sums, mut of_key, mut of_value, ..] =
        launches.run("attention_gradients_hopper", buffers);
    if launches.is_next("attention_keys_hopper") {
        let buffers = [of_key, of_value, new(), new()];
        [_, _, of_key, of_value] = launches.run("attention_keys_hopper", buffers);
    }
    let [_, of_query] = launches.run("attention_queries_hopper", [sums, new()]);
    let of = &expected.gradients;
    for (actual, shape, expected, what) in [
        (of_query, shape.query(), &of.query, "gradient of query"),
        (of_key, shape.key(), &of.key, "gradient of key"),
        (of_value, shape.value(), &of.value, "gradient of value"),
    ] {
        assert_close(&in_heads(&actual, shape), expected, tolerance, what);
    }
}

/// The forward pass.
fn emulate_int8(random: &mut Random, float: StorageType, kind: Kind, sanitizer: Sanitizer) {
    let mut problem = Problem::draw(random, kind);
    for x in [&mut problem.query, &mut problem.key, &mut problem.value] {
        *x = rounded(x, float);
    }
    let expected = problem.solve().forward;
    let sources = sources(AttentionKernel::Hopper, 90, &problem, float);
    let mut launches = Launches {
        sources: sources.iter().peekable(),
        name: format!("int8-{float}-{sanitizer:?}"),
        sanitizer,
    };
    let words = launches.words_of(problem.mask.as_ref().map(hidden).as_ref());
    let mut codes = |x: &[f32]| {
        let buffers = [to_bytes(x, float), Vec::new(), Vec::new()];
        let [_, codes, scales] = launches.run("attention_codes_hopper", buffers);
        (codes, scales)
    };
    let (query, query_scales) = codes(&problem.query);
    let (key, key_scales) = codes(&problem.key);
    let (value, value_scales) = codes(&problem.value);
    let buffers = [
        Vec::new(),
        Vec::new(),
        query_scales,
        key_scales,
        value_scales,
        query,
        key,
        value,
        words.unwrap_or_else(|| to_bytes(&problem.query, float)),
    ];
    let [output, log_sum_exp, ..] = launches.run("attention_forward_int8_hopper", buffers);
    let output = in_heads(&to_floats(&output, float), problem.shape.output());
    let width = problem.shape.value_width;
    assert_near(&output, &expected.output, width, 5e-3, "output");
    let of_rows = of_words(&log_sum_exp);
    assert_close(&of_rows, &expected.log_sum_exp, 1e-4, "log-sum-exp");
}

/// Launches that are still to run.
struct Launches<'a> {
    sources: Peekable<slice::Iter<'a, Source>>,
    name: String,
    sanitizer: Sanitizer,
}

impl Launches<'_> {
    fn is_next(&mut self, kernel: &str) -> bool {
        let next = self.sources.peek();
        next.is_some_and(|source| source.name.starts_with(kernel))
    }

    /// Runs the next launch, which must be of the kernel. A buffer without bytes gets those of the launch, unwritten.
    fn run<const N: usize>(&mut self, kernel: &str, mut buffers: [Vec<u8>; N]) -> [Vec<u8>; N] {
        assert!(self.is_next(kernel), "{kernel}: {:?}", self.sources.peek());
        let source = self.sources.next().expect("the launch");
        for (buffer, &bytes) in buffers.iter_mut().zip(&source.buffers) {
            if buffer.is_empty() {
                *buffer = vec![UNWRITTEN; bytes];
            }
        }
        let name = format!("{kernel}-{}", self.name);
        run(source, &buffers, &name, self.sanitizer)
    }

    /// The bits of the mask as the next kernel takes them.
    fn words_of(&mut self, mask: Option<&Vec<u8>>) -> Option<Vec<u8>> {
        let buffers = [mask?.clone(), Vec::new()];
        let [_, words] = self.run("attention_bit_mask_kernel", buffers);
        Some(words)
    }
}
