//! Fallback quantization against the reference, to the bit.

use cubecl_kernels::{
    fallback::{FallbackQuantized, quantize_fallback},
    layout::Layout,
    reference,
    shape::MatrixShape,
};

use crate::{
    device::{
        Client, Memory, Tensor, TestRuntime, assert_same_floats, assert_same_integers, client,
        drawn, dtype, float_types, read, read_i8, rounded, upload, upload_i32, upload_matrix,
    },
    random::Random,
};

/// The thresholds and counters of a model's layers, of which the second one is under test.
pub struct Layers {
    pub thresholds: Tensor,
    pub counts: Tensor,
}

impl Layers {
    pub const TESTED: u32 = 1;

    pub fn new(client: &Client, threshold: f32) -> Self {
        Self {
            thresholds: upload(client, &[-1.0, threshold, -1.0], &[3], dtype::<f32>()),
            counts: upload_i32(client, &[1, 2, 3, 4, 5, 6], &[3, 2]),
        }
    }

    fn quantize(
        &self,
        client: &Client,
        x: &Tensor,
        block: usize,
        layout: Layout,
    ) -> FallbackQuantized<TestRuntime> {
        let (thresholds, counts) = (&self.thresholds, &self.counts);
        quantize_fallback(client, x, block, layout, thresholds, Self::TESTED, counts)
            .expect("a matrix")
    }

    /// Compares the counters after one quantization, which counted these blocks that fell back, of these in all.
    #[track_caller]
    pub fn check_counts(&self, client: &Client, [fallback, total]: [i32; 2]) {
        let counts = read::<i32>(client, &self.counts);
        assert_eq!(counts, [1, 2, 3 + fallback, 4 + total, 5, 6]);
    }
}

#[track_caller]
pub fn check(
    client: &Client,
    quantized: &FallbackQuantized<TestRuntime>,
    expected: &reference::ReferenceFallbackQuantized,
) {
    let shape = expected.base.shape;
    if let Some(values) = &quantized.base.values {
        assert_same_integers(&read_i8(client, values), &expected.base.values, "values");
    }
    if let Some(transposed) = &quantized.base.transposed {
        assert_same_integers(
            &read_i8(client, transposed),
            &expected.base.transposed().values,
            "transposed",
        );
    }
    let residual = &quantized.residual;
    assert_same_floats(
        &read(client, &quantized.base.scales),
        &expected.base.scales,
        "scales",
    );
    assert_same_floats(
        &read(client, &residual.scales),
        &expected.residual.scales,
        "residual scales",
    );
    let flags: Vec<bool> = read::<u32>(client, &residual.flags)
        .iter()
        .map(|&f| f == 1)
        .collect();
    assert_eq!(flags, expected.flags, "flags");
    // The residual of a block that did not fall back is undefined.
    let mut values = read_i8(client, &residual.values);
    for (index, value) in values.iter_mut().enumerate() {
        let (row, col) = (index / shape.cols, index % shape.cols);
        let block = expected
            .base
            .block_of(row / shape.rows, row % shape.rows, col);
        if !expected.flags[block] {
            *value = 0;
        }
    }
    assert_same_integers(&values, &expected.residual.values, "residual");
}

#[test]
fn equals_the_reference() {
    let (client, mut random) = (client(), Random::fresh());
    for block in drawn(&mut random, [16, 32, 64, 128], 1) {
        of_blocks(&client, &mut random, block);
    }
}

fn of_blocks(client: &Client, random: &mut Random, block: usize) {
    let shapes = [
        MatrixShape::new(1, 3),
        MatrixShape::batched(2, 127, 129),
        MatrixShape::new(260, 200),
    ];
    for shape in drawn(random, shapes, 2) {
        let x = random.with_special_values(shape);
        for (threshold, layout) in [
            (0.0, Layout::Both),
            (100.0, Layout::RowMajor),
            (f32::MAX, Layout::Transposed),
        ] {
            println!("{block}: {shape:?}, threshold {threshold}");
            let layers = Layers::new(client, threshold);
            let tensor = upload_matrix(client, &x, shape, dtype::<f32>(), Memory::Contiguous);
            let quantized = layers.quantize(client, &tensor, block, layout);
            let expected = reference::quantize_fallback(&x, shape, block, threshold);
            check(client, &quantized, &expected);
            layers.check_counts(client, expected.counts());
        }
    }
}

#[test]
fn float_types_and_strides_do_not_change_the_numbers() {
    let (client, mut random) = (client(), Random::fresh());
    let shape = MatrixShape::batched(2, 70, 96);
    let x = random.with_outliers(shape.num_elements());
    let layers = Layers::new(&client, 50.0);
    for float in drawn(&mut random, float_types(&client), 1) {
        let x = rounded(&x, float);
        let expected = reference::quantize_fallback(&x, shape, 32, 50.0);
        for memory in [Memory::Contiguous, Memory::Transposed, Memory::Sliced] {
            let tensor = upload_matrix(&client, &x, shape, float, memory);
            let quantized = layers.quantize(&client, &tensor, 32, Layout::Both);
            check(&client, &quantized, &expected);
        }
    }
}
