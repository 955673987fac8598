//! `whole_tiles.cu` on a CPU, as its launches set its knobs and numbers, against the reference to the bit.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    fallback::FallbackState,
    granularity::Granularity,
    layout::Layout,
    linear_input::quantize_linear_input,
    quantize::{QuantizeSpec, quantize},
    reference,
    rounding::{Rounding, StochasticKey},
    shape::MatrixShape,
};
use half::{bf16, f16};

use super::{
    Client,
    device::{assert_same_integers, rounded, to_bytes},
    dtype,
    emulator::{Sanitizer, run, run_all},
    offline::{Source, sources_of},
    random::Random,
    tensor,
};

/// A block of each kind.
const SHAPE: MatrixShape = MatrixShape {
    batch: 2,
    rows: 256,
    cols: 256,
};
const BLOCK: usize = 128;
/// From one row of X to the next one, in elements.
const PITCH: usize = SHAPE.cols + 8;
/// The layer under test has others around it.
const LAYERS: usize = 3;
const LAYER: usize = 1;
/// A byte of memory that nothing has written.
pub const UNWRITTEN: u8 = 0xa5;

/// What a training step quantizes: a gradient; X, in a layer of this threshold if its blocks may fall back, for both
/// passes, or for the forward pass alone, or for the backward pass alone.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Operand {
    Gradient,
    Input(Option<f32>),
    Forward(Option<f32>),
    Saved,
}

/// The kernel's buffers: X, both copies, scales; the residual's values, scales, flags; thresholds, counts.
type Buffers = [Vec<u8>; 9];
const NAMES: [&str; 9] = [
    "X",
    "row-major copy",
    "transposed copy",
    "scales",
    "residual",
    "scales of the residual",
    "flags",
    "thresholds",
    "counts",
];

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for float in [dtype::<f32>(), dtype::<f16>(), dtype::<bf16>()] {
        for operand in [
            Operand::Gradient,
            Operand::Input(None),
            Operand::Input(Some(0.0)),
            Operand::Input(Some(100.0)),
            Operand::Saved,
        ] {
            cases.extend([false, true].map(|draw_early| (float, operand, draw_early)));
        }
    }
    for float in [dtype::<f16>(), dtype::<bf16>()] {
        let operands = [None, Some(100.0)].map(Operand::Forward);
        cases.extend(operands.map(|operand| (float, operand, false)));
    }
    for (float, operand, draw_early) in random.few(cases, 2) {
        println!("{float} {operand:?}, draws early: {draw_early}");
        emulate(&mut random, float, operand, draw_early);
    }
}

fn emulate(random: &mut Random, float: StorageType, operand: Operand, draw_early: bool) {
    let key = random.key();
    let mut source = source_of(float, operand, key);
    // The tiles of a launch as small as this one draw early, where there is something to draw.
    let knob = "#define DRAW_EARLY ";
    let draws = !matches!(operand, Operand::Forward(_));
    assert!(
        source
            .code
            .contains(&format!("{knob}{}\n", u8::from(draws)))
    );
    if !draw_early {
        source.code = source
            .code
            .replace(&format!("{knob}1"), &format!("{knob}0"));
    }
    let x = rounded(&random.with_blocks_of_all_kinds(SHAPE), float);
    let name = format!("emulate-{float}-{operand:?}-{draw_early}");
    let sanitizer = Sanitizer::of(float);
    let expected = expected(&x, float, operand, key);
    let mut before = expected.clone();
    before[1..=6].iter_mut().for_each(|it| it.fill(UNWRITTEN));
    before[8].fill(0);
    let mut written = run(&source, &before, &name, sanitizer);
    // Any NaN is as good as any other.
    one_nan(&mut written[3]);
    for ((written, expected), name) in written.iter().zip(&expected).zip(NAMES) {
        assert_same_integers(&integers(written), &integers(expected), name);
    }
}

/// The kernel that quantizing the operand launches.
fn source_of(float: StorageType, operand: Operand, key: StochasticKey) -> Source {
    let mut sources = sources_of(90, |client: &Client| {
        let MatrixShape { batch, rows, cols } = SHAPE;
        let handle = client.empty(batch * rows * PITCH * float.size());
        let (shape, strides) = ([batch, rows, cols], [rows * PITCH, PITCH, 1]);
        let x = TensorHandle::new(handle, shape, strides, float);
        let stochastic = |layout| {
            let spec = QuantizeSpec::int8(Granularity::Block(BLOCK))
                .with_rounding(Rounding::Stochastic(key))
                .with_layout(layout);
            quantize(client, &x, &spec).expect("a matrix");
        };
        let (threshold, key) = match operand {
            Operand::Gradient => return stochastic(Layout::Both),
            Operand::Saved => return stochastic(Layout::Transposed),
            Operand::Input(threshold) => (threshold, Some(key)),
            Operand::Forward(threshold) => (threshold, None),
        };
        let thresholds = &tensor(client, &[LAYERS], dtype::<f32>());
        let counts = &tensor(client, &[LAYERS, 2], dtype::<i32>());
        let layer = LAYER as u32;
        let state = threshold.map(|_| FallbackState {
            thresholds,
            layer,
            counts,
        });
        quantize_linear_input(client, &x, BLOCK, key, state).expect("a matrix");
    });
    assert_eq!(sources.len(), 1);
    let source = sources.remove(0);
    assert_eq!(source.name, "quantize_whole_tiles");
    source
}

/// The buffers after the launch by the reference.
fn expected(x: &[f32], float: StorageType, operand: Operand, key: StochasticKey) -> Buffers {
    let spec = QuantizeSpec::int8(Granularity::Block(BLOCK));
    let quantized = |rounding| reference::quantize(x, SHAPE, &spec.with_rounding(rounding));
    let (nearest, stochastic) = (
        quantized(Rounding::Nearest),
        quantized(Rounding::Stochastic(key)),
    );
    let row_major = match operand {
        Operand::Gradient | Operand::Saved => &stochastic,
        Operand::Input(_) | Operand::Forward(_) => &nearest,
    };
    let mut buffers = Buffers::default();
    buffers[0] = pitched(x, SHAPE.cols, PITCH, float);
    buffers[1] = bytes(&row_major.values);
    buffers[2] = bytes(&stochastic.transposed().values);
    buffers[3] = bytemuck::cast_slice(&nearest.scales).to_vec();
    one_nan(&mut buffers[3]);
    // What stands in for a copy is not touched.
    let unwritten = || vec![UNWRITTEN; nearest.scales.len() * size_of::<f32>()];
    let threshold = match operand {
        Operand::Gradient => None,
        Operand::Saved => {
            buffers[1] = unwritten();
            None
        }
        Operand::Input(threshold) => threshold,
        Operand::Forward(threshold) => {
            buffers[2] = unwritten();
            threshold
        }
    };
    for (buffer, of_fallback) in buffers[4..]
        .iter_mut()
        .zip(fallback_of(x, SHAPE, threshold))
    {
        *buffer = of_fallback;
    }
    buffers
}

/// The residual's values, scales and flags; thresholds and counts. They have no bytes where nothing falls back, and
/// blocks that do not fall back leave the residual as it was.
pub fn fallback_of(x: &[f32], shape: MatrixShape, threshold: Option<f32>) -> [Vec<u8>; 5] {
    let Some(threshold) = threshold else {
        return Default::default();
    };
    let fallback = reference::quantize_fallback(x, shape, BLOCK, threshold);
    let mut residual = bytes(&fallback.residual.values);
    for (index, value) in residual.iter_mut().enumerate() {
        // Matrices of a batch follow each other as the rows of one do.
        let (row, col) = (index / shape.cols, index % shape.cols);
        if !fallback.flags[fallback.base.block_of(0, row, col)] {
            *value = UNWRITTEN;
        }
    }
    let flags: Vec<u32> = fallback.flags.iter().map(|&flag| flag.into()).collect();
    let (mut thresholds, mut counts) = ([f32::NAN; LAYERS], [[0; 2]; LAYERS]);
    (thresholds[LAYER], counts[LAYER]) = (threshold, fallback.counts());
    [
        residual,
        bytemuck::cast_slice(&fallback.residual.scales).to_vec(),
        bytemuck::cast_slice(&flags).to_vec(),
        bytemuck::cast_slice(&thresholds).to_vec(),
        bytemuck::cast_slice(&counts).to_vec(),
    ]
}

/// The elements of a matrix of so many columns, or of a batch, with rows so many elements apart, and NaN between them.
pub fn pitched(x: &[f32], cols: usize, pitch: usize, float: StorageType) -> Vec<u8> {
    let mut pitched = vec![f32::NAN; x.len() / cols * pitch];
    for (row, values) in pitched.chunks_mut(pitch).zip(x.chunks(cols)) {
        row[..cols].copy_from_slice(values);
    }
    to_bytes(&pitched, float)
}

/// Runs the kernel on buffers as they are before, and compares them with those expected. `floats`: which hold scales and
/// maxima, where any NaN is as good as any other.
pub fn check(
    source: &Source,
    [before, expected]: [&[Vec<u8>]; 2],
    floats: &[usize],
    what: &str,
    sanitizer: Sanitizer,
) {
    let mut after = run_all(source, before, &format!("emulate-{what}"), sanitizer);
    for &index in floats {
        one_nan(&mut after[index]);
    }
    for (index, (after, expected)) in after.iter().zip(expected).enumerate() {
        let name = format!("{what}, buffer {index}");
        assert_same_integers(&integers(after), &integers(expected), &name);
    }
}

pub fn bytes(integers: &[i32]) -> Vec<u8> {
    integers.iter().map(|&integer| integer as u8).collect()
}

pub fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.iter().map(|&byte| (byte as i8).into()).collect()
}

/// Makes each NaN among the floats the same.
pub fn one_nan(floats: &mut [u8]) {
    for bytes in floats.chunks_exact_mut(4) {
        if f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).is_nan() {
            bytes.copy_from_slice(&f32::NAN.to_le_bytes());
        }
    }
}
