//! Problems of attention on a device, by any of its kernels.

use cubecl::{
    ir::{StorageType, features::TypeUsage},
    std::tensor::TensorHandle,
};
use cubecl_kernels::attention::{
    AttentionGradients, AttentionKernel, AttentionProblem, AttentionTensors, Band,
};
use half::{bf16, f16};

use super::problem::{Expected, Kind, Problem, assert_close};
use crate::{
    device::{Client, Tensor, TestRuntime, client, dtype, read, read_float, rounded, to_bytes},
    random::Random,
};

/// True where the device has the kernel; said in the output where it has not.
pub fn has(
    kernel: AttentionKernel,
    client: &Client,
    problem: &Problem,
    float: StorageType,
) -> bool {
    let problem = AttentionProblem {
        dtype: float,
        shape: problem.shape,
        options: problem.options,
        is_masked: problem.mask.is_some(),
        is_biased: problem.bias.is_some(),
    };
    let has = kernel.unsupported(client, &problem).is_none();
    if !has {
        println!("skipped: this device has no attention of {kernel:?}");
    }
    has
}

/// Where the elements of a tensor of four dimensions lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Memory {
    Contiguous,
    /// `[batch, rows, heads, width]`, rows that begin and end with something else.
    InRows,
    /// The same, all rows at multiples of 16 bytes where those of the heads are.
    InAlignedRows,
    /// Rows and features change places.
    Transposed,
}

impl Memory {
    /// Elements from one to the next, and all that are needed.
    fn strides(self, [batch, heads, rows, width]: [usize; 4]) -> ([usize; 4], usize) {
        match self {
            Self::Contiguous => (
                [heads * rows * width, rows * width, width, 1],
                batch * heads * rows * width,
            ),
            Self::InRows | Self::InAlignedRows => {
                let pad = if self == Self::InRows { 3 } else { 8 };
                let pitch = heads * width + pad;
                ([rows * pitch, width, pitch, 1], batch * rows * pitch)
            }
            Self::Transposed => (
                [heads * rows * width, rows * width, 1, rows],
                batch * heads * rows * width,
            ),
        }
    }
}

/// The places of all elements, in their order.
fn places([b, h, r, w]: [usize; 4], strides: [usize; 4]) -> impl Iterator<Item = usize> {
    let [sb, sh, sr, sw] = strides;
    (0..b).flat_map(move |b| {
        (0..h).flat_map(move |h| {
            (0..r).flat_map(move |r| (0..w).map(move |w| b * sb + h * sh + r * sr + w * sw))
        })
    })
}

fn on_device(
    client: &Client,
    x: &[f32],
    shape: [usize; 4],
    float: StorageType,
    memory: Memory,
) -> Tensor {
    let (strides, len) = memory.strides(shape);
    let mut buffer = vec![f32::NAN; len.max(4)];
    for (place, &x) in places(shape, strides).zip(x) {
        buffer[place] = x;
    }
    let handle = client.create_from_slice(&to_bytes(&buffer, float));
    TensorHandle::new(handle, shape.to_vec(), strides.to_vec(), float)
}

/// A mask, where it is not contiguous in bytes, if the device has them, else in words. What lies between its elements
/// hides.
fn mask_on_device(client: &Client, mask: &[bool], shape: [usize; 4], memory: Memory) -> Tensor {
    let (strides, len) = memory.strides(shape);
    let mut flags = vec![1u8; len.max(16)];
    for (place, &hidden) in places(shape, strides).zip(mask) {
        flags[place] = 7 * u8::from(hidden);
    }
    let bytes = dtype::<u8>();
    let has_bytes = client
        .features()
        .type_usage(bytes)
        .contains(TypeUsage::Buffer);
    let (handle, flag) = if has_bytes && memory != Memory::Contiguous {
        (client.create_from_slice(&flags), bytes)
    } else {
        let words: Vec<u32> = flags.into_iter().map(u32::from).collect();
        (
            client.create_from_slice(bytemuck::cast_slice(&words)),
            dtype::<u32>(),
        )
    };
    TensorHandle::new(handle, shape.to_vec(), strides.to_vec(), flag)
}

/// The elements of a result in the order of its shape.
fn elements(client: &Client, tensor: &Tensor) -> Vec<f32> {
    let data = read_float(client, tensor);
    let four = |x: &[usize]| [x[0], x[1], x[2], x[3]];
    places(four(tensor.shape()), four(tensor.strides()))
        .map(|place| data[place])
        .collect()
}

#[derive(Debug, Clone)]
pub struct Results {
    pub output: Vec<f32>,
    pub log_sum_exp: Vec<f32>,
    pub gradients: AttentionGradients<Option<Vec<f32>>>,
}

impl Results {
    /// All bits, NaN among them.
    pub fn bits(&self) -> Vec<Vec<u32>> {
        let of = &self.gradients;
        let gradients = [&of.query, &of.key, &of.value, &of.bias];
        let gradients = gradients.into_iter().flatten();
        let all = [&self.output, &self.log_sum_exp].into_iter();
        all.chain(gradients)
            .map(|x| x.iter().map(|x| x.to_bits()).collect())
            .collect()
    }
}

fn tensors(
    client: &Client,
    problem: &Problem,
    float: StorageType,
    memory: Memory,
) -> (AttentionTensors<TestRuntime>, Tensor) {
    let shape = &problem.shape;
    let to = |x: &[f32], shape| on_device(client, x, shape, float, memory);
    let tensors = AttentionTensors {
        query: to(&problem.query, shape.query()),
        key: to(&problem.key, shape.key()),
        value: to(&problem.value, shape.value()),
        mask: (problem.mask.as_ref())
            .map(|(mask, shape)| mask_on_device(client, mask, *shape, memory)),
        bias: problem.bias.as_ref().map(|(bias, shape)| to(bias, *shape)),
    };
    (tensors, to(&problem.gradient, shape.output()))
}

/// The results of a kernel, with all gradients that there are.
pub fn solve(
    kernel: AttentionKernel,
    client: &Client,
    problem: &Problem,
    float: StorageType,
    memory: Memory,
) -> Results {
    solve_for(kernel, client, problem, float, memory, problem.wanted())
}

pub fn solve_for(
    kernel: AttentionKernel,
    client: &Client,
    problem: &Problem,
    float: StorageType,
    memory: Memory,
    wanted: AttentionGradients<bool>,
) -> Results {
    let (tensors, gradient) = tensors(client, problem, float, memory);
    let options = &problem.options;
    let forward = kernel.forward(client, &tensors, options);
    let forward = forward.expect("a device that has it");
    let gradients = kernel
        .backward(client, &tensors, &forward, &gradient, wanted, options)
        .expect("what has a forward pass");
    let elements = |tensor: Option<Tensor>| tensor.map(|tensor| elements(client, &tensor));
    Results {
        output: elements(Some(forward.output)).expect("it is there"),
        log_sum_exp: read(client, &forward.log_sum_exp),
        gradients: AttentionGradients {
            query: elements(gradients.query),
            key: elements(gradients.key),
            value: elements(gradients.value),
            bias: elements(gradients.bias),
        },
    }
}

/// Inputs as the kernel sees them.
pub fn draw(random: &mut Random, kind: Kind, float: StorageType) -> Problem {
    let mut problem = Problem::draw(random, kind);
    let bias = problem.bias.as_mut().map(|(bias, _)| bias);
    let floats = [
        &mut problem.query,
        &mut problem.key,
        &mut problem.value,
        &mut problem.gradient,
    ];
    for x in floats.into_iter().chain(bias) {
        *x = rounded(x, float);
    }
    problem
}

/// Compares with the reference what was computed with 16-bit operands: probabilities, and the gradients of scores, are
/// rounded to the type of the inputs, and so is the result.
#[track_caller]
pub fn compare_16_bits(results: &Results, problem: &Problem, float: StorageType, what: &str) {
    let expected = &problem.solve();
    let tolerance = if float == dtype::<f16>() { 3e-3 } else { 2e-2 };
    let [of_query, of_key] = of_delta(problem, expected, float).map(|it| it.max(tolerance));
    assert_close(
        &results.output,
        &expected.forward.output,
        tolerance,
        &format!("{what}: output"),
    );
    let log_sum_exp = &expected.forward.log_sum_exp;
    assert_close(
        &results.log_sum_exp,
        log_sum_exp,
        1e-4,
        &format!("{what}: log-sum-exp"),
    );
    let (of, actual) = (&expected.gradients, &results.gradients);
    for (name, actual, expected, tolerance) in [
        ("query", &actual.query, &of.query, of_query),
        ("key", &actual.key, &of.key, of_key),
        ("value", &actual.value, &of.value, tolerance),
    ] {
        assert_close(
            actual.as_deref().unwrap_or_default(),
            expected,
            tolerance,
            &format!("{what}: gradient of {name}"),
        );
    }
}

/// The effect of the output's rounding on the gradients of queries and of keys: Delta is a sum over it, and what it
/// is off by is in all of a row's dS, times their probabilities. Relative to the largest gradient, as [`assert_close`]
/// has it.
fn of_delta(problem: &Problem, expected: &Expected, float: StorageType) -> [f64; 2] {
    if problem.gradient.is_empty() {
        return [0.0; 2];
    }
    let unit = if float == dtype::<f16>() { -12 } else { -9 };
    let output = &expected.forward.output;
    let width = problem.gradient.len() / expected.forward.log_sum_exp.len();
    let terms = output.iter().zip(&problem.gradient);
    let terms: Vec<f64> = terms.map(|(o, &g)| (o * f64::from(g)).abs()).collect();
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
    let off = 2f64.powi(unit) * largest(&mut terms.chunks(width).map(|row| row.iter().sum()));
    let of = &expected.gradients;
    [(&of.query, &problem.key), (&of.key, &problem.query)].map(|(gradient, factor)| {
        let factor = largest(&mut factor.iter().map(|x| f64::from(x.abs())));
        let gradient = largest(&mut gradient.iter().map(|x| x.abs()));
        off * f64::from(problem.options.scale.abs()) * factor / gradient.max(0.5)
    })
}

/// Compares with the reference one query, tiles, their neighbours and between; more queries than keys and fewer.
pub fn at_the_ends_of_tiles(
    kernel: AttentionKernel,
    width: [usize; 2],
    band: Band,
    memory: Memory,
) {
    let (client, mut random) = (client(), Random::fresh());
    for (heads, sequence) in [
        ([2, 3, 3], [128, 128]),
        ([1, 4, 2], [130, 301]),
        ([1, 2, 1], [301, 37]),
        ([2, 1, 1], [1, 65]),
        ([1, 2, 2], [257, 1]),
    ] {
        for float in [dtype::<bf16>(), dtype::<f16>()] {
            let kind = Kind {
                band,
                ..Kind::plain(heads, sequence, width)
            };
            let problem = draw(&mut random, kind, float);
            if !has(kernel, &client, &problem, float) {
                return;
            }
            let results = solve(kernel, &client, &problem, float, memory);
            compare_16_bits(&results, &problem, float, &format!("{float} {kind:?}"));
        }
    }
}
