//! Copies that kernels write of what they read or give beside it: those of the quantizer, to the bit.

use cubecl::{ir::StorageType, std::tensor::TensorHandle};
use cubecl_kernels::{
    granularity::Granularity,
    number::Number,
    quantize::{QuantizeSpec, Quantized, quantize},
    shape::MatrixShape,
};

use crate::{
    device::{Client, Tensor, TestRuntime, drawn, float_types, read, read_float, upload},
    random::Random,
};

/// The bits of floats, those of NaN of any sign and payload alike.
pub fn bits(client: &Client, tensor: &Tensor) -> Vec<u32> {
    let one_nan = |value: f32| if value.is_nan() { f32::NAN } else { value };
    let values = read_float(client, tensor).into_iter();
    values.map(|value| one_nan(value).to_bits()).collect()
}

/// Groups of a number, row-major, to nearest.
pub fn of_groups(number: Number, group: usize) -> QuantizeSpec {
    QuantizeSpec::new(number, Granularity::Group(group))
}

/// Float types with copies of every number, in groups that these shapes have rows of.
pub fn cases<T: Copy>(
    client: &Client,
    random: &mut Random,
    shapes: &[(usize, T)],
) -> Vec<(StorageType, QuantizeSpec, T)> {
    let numbers = [
        Number::Int8,
        Number::Int10,
        Number::Int4,
        Number::E4M3,
        Number::E5M2,
    ];
    let floats = float_types(client);
    let cases = numbers.iter().flat_map(|&number| {
        let of_float = move |float| {
            let case = move |&(group, shape)| (float, of_groups(number, group), shape);
            shapes.iter().map(case)
        };
        floats.iter().copied().flat_map(of_float)
    });
    drawn(random, cases.collect::<Vec<_>>(), 4)
}

/// A matrix of values that are not finite too.
pub fn special(
    client: &Client,
    random: &mut Random,
    [rows, cols]: [usize; 2],
    float: StorageType,
) -> Tensor {
    let values = random.with_special_values(MatrixShape::new(rows, cols));
    upload(client, &values, &[rows, cols], float)
}

/// Compares a copy with that of the quantizer of a tensor, read as rows of `cols` neighbours.
#[track_caller]
pub fn assert_is_copy(
    client: &Client,
    copy: &Quantized<TestRuntime>,
    tensor: &Tensor,
    spec: &QuantizeSpec,
    cols: usize,
    what: &str,
) {
    let rows = tensor.shape().iter().product::<usize>() / cols;
    let matrix =
        TensorHandle::new_contiguous(vec![rows, cols], tensor.handle.clone(), tensor.dtype);
    let expected = quantize(client, &matrix, spec).expect("a matrix");
    assert!(expected.values.is_some(), "{what}: a row-major copy");
    assert_same(client, copy, &expected, what);
}

/// Compares scales and both copies of the values.
#[track_caller]
pub fn assert_same(
    client: &Client,
    actual: &Quantized<TestRuntime>,
    expected: &Quantized<TestRuntime>,
    what: &str,
) {
    assert_eq!(actual.shape, expected.shape, "{what}");
    let scales = bits(client, &actual.scales);
    assert_eq!(scales, bits(client, &expected.scales), "{what}: scales");
    for (copy, expected, name) in [
        (&actual.values, &expected.values, "row-major copy"),
        (&actual.transposed, &expected.transposed, "transposed copy"),
    ] {
        assert_eq!(copy.is_some(), expected.is_some(), "{what}: {name}");
        if let (Some(copy), Some(expected)) = (copy, expected) {
            let forms = [copy, expected].map(|it| (it.shape().to_vec(), it.dtype));
            assert_eq!(forms[0], forms[1], "{what}: {name}");
            let (copy, expected) = (read::<u8>(client, copy), read::<u8>(client, expected));
            assert!(copy == expected, "{what}: {name}");
        }
    }
}
