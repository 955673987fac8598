//! Both copies of a linear layer's input against the reference, to the bit.

use cubecl::std::tensor::TensorHandle;
use cubecl_kernels::{
    fallback::{FallbackQuantized, FallbackState},
    granularity::Granularity,
    linear_input::{LinearInput, quantize_linear_input},
    quantize::QuantizeSpec,
    reference,
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
};

use crate::{
    device::{
        Client, Memory, TestRuntime, assert_same_floats, assert_same_integers, client, drawn,
        dtype, float_types, read, read_i8, rounded, upload, upload_matrix,
    },
    fallback::{self, Layers},
    random::Random,
};

const KEY: StochasticKey = StochasticKey {
    seed: 0x8765_4321_0fed_cba9,
    stream: 0xabcd_0123_4567_89ef,
};

fn state(layers: &Layers) -> FallbackState<'_, TestRuntime> {
    FallbackState {
        thresholds: &layers.thresholds,
        layer: Layers::TESTED,
        counts: &layers.counts,
    }
}

/// Compares with the reference of the values `x` that were read, and of the threshold, if any.
#[track_caller]
fn check(
    client: &Client,
    input: &LinearInput<TestRuntime>,
    x: &[f32],
    shape: MatrixShape,
    block: usize,
    threshold: Option<f32>,
) {
    let quantized = |rounding| {
        reference::quantize(
            x,
            shape,
            &QuantizeSpec::int8(Granularity::Block(block)).with_rounding(rounding),
        )
    };
    assert_eq!(input.forward.shape, shape);
    let kept = input.saved.as_ref().expect("a saved copy");
    assert_eq!(kept.shape, shape);
    assert!(input.forward.transposed.is_none() && kept.values.is_none());
    let nearest = quantized(Rounding::Nearest);
    let values = input.forward.values.as_ref().expect("a row-major copy");
    assert_same_integers(&read_i8(client, values), &nearest.values, "forward");
    let saved = quantized(Rounding::Stochastic(KEY));
    let transposed = kept.transposed.as_ref().expect("a transposed copy");
    assert_same_integers(
        &read_i8(client, transposed),
        &saved.transposed().values,
        "saved",
    );
    for scales in [&input.forward.scales, &kept.scales] {
        assert_same_floats(&read(client, scales), &nearest.scales, "scales");
    }
    assert_eq!(input.residual.is_some(), threshold.is_some());
    if let (Some(residual), Some(threshold)) = (&input.residual, threshold) {
        let quantized = FallbackQuantized {
            base: input.forward.clone(),
            residual: residual.clone(),
        };
        let expected = reference::quantize_fallback(x, shape, block, threshold);
        fallback::check(client, &quantized, &expected);
    }
}

#[test]
fn equals_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    for block in drawn(&mut random, [16, 32, 64, 128], 1) {
        of_blocks(&client, &mut random, block);
    }
}

fn of_blocks(client: &Client, random: &mut Random, block: usize) {
    for shape in [
        MatrixShape::new(1, 3),
        MatrixShape::batched(2, 127, 129),
        MatrixShape::new(260, 200),
        MatrixShape::new(144, 272),
        MatrixShape::batched(2, 128, 256),
    ] {
        let x = random.with_special_values(shape);
        let tensor = upload_matrix(client, &x, shape, dtype::<f32>(), Memory::Contiguous);
        for threshold in [None, Some(0.0), Some(100.0), Some(f32::MAX)] {
            println!("{block}: {shape:?}, threshold {threshold:?}");
            let layers = threshold.map(|threshold| Layers::new(client, threshold));
            let state = layers.as_ref().map(state);
            let input =
                quantize_linear_input(client, &tensor, block, Some(KEY), state).expect("a matrix");
            check(client, &input, &x, shape, block, threshold);
            if let (Some(layers), Some(threshold)) = (&layers, threshold) {
                let expected = reference::quantize_fallback(&x, shape, block, threshold);
                layers.check_counts(client, expected.counts());
            }
        }
    }
}

#[test]
fn float_types_and_strides_do_not_change_the_numbers() {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::batched(2, 144, 152);
    let x = random.with_outliers(shape.num_elements());
    let layers = Layers::new(&client, 50.0);
    for float in drawn(&mut random, float_types(&client), 1) {
        let x = rounded(&x, float);
        for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
            println!("{float} {memory:?}");
            let tensor = upload_matrix(&client, &x, shape, float, memory);
            for block in drawn(&mut random, [32, 128], 1) {
                let state = Some(state(&layers));
                let input = quantize_linear_input(&client, &tensor, block, Some(KEY), state)
                    .expect("a matrix");
                check(&client, &input, &x, shape, block, Some(50.0));
            }
        }
    }
}

/// Tiles of 128 x 128 that nowhere reach over an edge are written without looking for one, on CUDA by another kernel if
/// their rows start at multiples of 16 bytes.
#[test]
fn whole_tiles_equal_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    for shape in [
        MatrixShape::new(128, 384),
        MatrixShape::batched(2, 256, 512),
    ] {
        let x = random.with_blocks_of_all_kinds(shape);
        for float in drawn(&mut random, float_types(&client), 1) {
            let x = rounded(&x, float);
            let memories = [Memory::Contiguous, Memory::Sliced, Memory::SlicedAligned];
            for memory in drawn(&mut random, memories, 1) {
                let tensor = upload_matrix(&client, &x, shape, float, memory);
                for threshold in [None, Some(0.0), Some(100.0)] {
                    println!("{shape:?} {float} {memory:?}, threshold {threshold:?}");
                    let layers = threshold.map(|threshold| Layers::new(&client, threshold));
                    let state = layers.as_ref().map(state);
                    let input = quantize_linear_input(&client, &tensor, 128, Some(KEY), state)
                        .expect("a matrix");
                    check(&client, &input, &x, shape, 128, threshold);
                    if let (Some(layers), Some(threshold)) = (&layers, threshold) {
                        let expected = reference::quantize_fallback(&x, shape, 128, threshold);
                        layers.check_counts(&client, expected.counts());
                    }
                }
            }
        }
    }
}

/// More tiles than are on the device at once: the kernel of CUDA source draws its random words elsewhere then.
#[cfg(feature = "cuda")]
#[test]
fn many_whole_tiles_equal_the_reference() {
    use cubecl_kernels::{layout::Layout, quantize::quantize};

    let (client, mut random) = (client(), Random::fresh());
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.expect("a number") as usize;
    let shape = MatrixShape::batched(2, 256, 128 * (multiprocessors + 1));
    let x = random.with_blocks_of_all_kinds(shape);
    for float in drawn(&mut random, float_types(&client), 1) {
        println!("{float}");
        let x = rounded(&x, float);
        let tensor = upload_matrix(&client, &x, shape, float, Memory::SlicedAligned);
        let layers = Layers::new(&client, 100.0);
        let input = quantize_linear_input(&client, &tensor, 128, Some(KEY), Some(state(&layers)));
        check(
            &client,
            &input.expect("a matrix"),
            &x,
            shape,
            128,
            Some(100.0),
        );
        let gradient = QuantizeSpec::int8(Granularity::Block(128))
            .with_rounding(Rounding::Stochastic(KEY))
            .with_layout(Layout::Both);
        let quantized = quantize(&client, &tensor, &gradient).expect("a matrix");
        crate::quantize::check(&client, &quantized, &x, &gradient);
    }
}

/// One matrix that stands for two, as an expanded tensor has it: a batch stride of 0.
#[test]
fn whole_tiles_of_an_expanded_batch() {
    let (client, mut random) = (client(), Random::fresh());
    let one = MatrixShape::new(128, 256);
    let x = random.with_blocks_of_all_kinds(one);
    let tensor = upload_matrix(&client, &x, one, dtype::<f32>(), Memory::Contiguous);
    let both = TensorHandle::new(
        tensor.handle,
        vec![2, 128, 256],
        vec![0, 256, 1],
        dtype::<f32>(),
    );
    let input = quantize_linear_input(&client, &both, 128, Some(KEY), None).expect("a matrix");
    let shape = MatrixShape::batched(2, 128, 256);
    check(&client, &input, &x.repeat(2), shape, 128, None);
}

/// The memory of the forward product's operand is free before the backward pass only if it lies apart from the saved
/// copy.
#[test]
fn tensors_of_one_lifetime_share_an_allocation() {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::new(131, 257);
    let x = random.with_outliers(shape.num_elements());
    let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    let layers = Layers::new(&client, 50.0);
    let state = Some(state(&layers));
    let input = quantize_linear_input(&client, &tensor, 32, Some(KEY), state).expect("a matrix");
    let residual = input.residual.expect("a residual");
    let saved = input.saved.expect("a saved copy");
    let transposed = saved.transposed.expect("a transposed copy");
    drop(input.forward.scales);
    let groups = vec![
        vec![
            input.forward.values.expect("a row-major copy"),
            residual.values,
        ],
        vec![transposed, saved.scales, residual.scales, residual.flags],
    ];
    check_allocations(&client, groups);
}

/// The tensors of a group lie side by side in one allocation, which those of other groups do not hold.
fn check_allocations(client: &Client, mut groups: Vec<Vec<TensorHandle<TestRuntime>>>) {
    // CubeCL allocates when the device's thread comes to it.
    cubecl::future::block_on(client.sync()).expect("the device works");
    for tensors in &groups {
        let mut end = 0;
        for TensorHandle { handle, .. } in tensors {
            let start = handle.offset_start.unwrap_or_default();
            assert_eq!(start % 16, 0, "reads of 16 bytes");
            assert!(end <= start, "tensors overlap");
            end = start + handle.size_in_used();
            assert_eq!(handle.can_mut(), tensors.len() == 1, "held by the others");
        }
    }
    for tensors in &mut groups {
        tensors.truncate(1);
        assert!(tensors[0].handle.can_mut(), "held by another group");
    }
}

/// Products one unit in the last place above 127, which a rounding must not take to 128.
#[test]
fn the_largest_value_of_a_block_stays_in_range() {
    let (client, mut random) = (client(), Random::fresh());
    let above = |x: f32| x * (127.0 / x) > 127.0;
    let largest = loop {
        let x = random.normal().abs() + 0.1;
        if above(x) {
            break x;
        }
    };
    let shape = MatrixShape::new(256, 384);
    let x: Vec<f32> = (0..shape.num_elements())
        .map(|_| largest.copysign(random.normal()))
        .collect();
    let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    let input = quantize_linear_input(&client, &tensor, 128, Some(KEY), None).expect("a matrix");
    check(&client, &input, &x, shape, 128, None);
}

/// Values on and beside integers, where the floor of stochastic rounding jumps.
#[test]
fn values_beside_integers() {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::new(256, 256);
    let mut x: Vec<f32> = (0..shape.num_elements())
        .map(|_| {
            let integer = random.index(255) as f32 - 127.0;
            let beside = [0.0, 1e-3, -1e-3, 1e-6, -1e-6, 1e-9, -1e-9, 0.5, -0.5];
            (integer + beside[random.index(beside.len())]).clamp(-127.0, 127.0)
        })
        .collect();
    // With this maximum the inverse is 1 and the values are what is rounded.
    for row in [0, 128] {
        for col in [0, 128] {
            x[row * shape.cols + col] = 127.0;
        }
    }
    let tensor = upload_matrix(&client, &x, shape, dtype::<f32>(), Memory::Contiguous);
    let input = quantize_linear_input(&client, &tensor, 128, Some(KEY), None).expect("a matrix");
    check(&client, &input, &x, shape, 128, None);
}

#[test]
fn empty_inputs_give_empty_outputs() {
    let client = client();
    let x = upload(&client, &[], &[0, 40], dtype::<f32>());
    let input = quantize_linear_input(&client, &x, 32, Some(KEY), None).expect("a matrix");
    let saved = input.saved.expect("a saved copy");
    let saved = saved.transposed.expect("a transposed copy");
    assert_eq!(saved.shape().to_vec(), [40, 0]);
}
