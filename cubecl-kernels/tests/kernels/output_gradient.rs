//! Gradients in terms, and beside another: what norms' backward passes make of them is what they make of the sums.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    KernelError,
    granularity::Granularity,
    layer_norm::{layer_norm, layer_norm_backward},
    number::Number,
    output_gradient::{MAX_TERMS, OutputGradient, Terms},
    quantize::{QuantizeSpec, dequantize, quantize},
    rms_norm::{rms_norm, rms_norm_backward},
};

use crate::{
    device::{Client, Tensor, client, drawn, dtype, float_types, read_float, rounded, upload},
    random::Random,
};

/// The gradients of x, and of all that has a number for each column.
type Gradients = (Vec<f32>, Vec<Vec<f32>>);

struct Norm {
    x: Tensor,
    gain: Tensor,
}

impl Norm {
    fn rms(
        &self,
        client: &Client,
        gradient: OutputGradient<'_, crate::device::TestRuntime>,
    ) -> Gradients {
        let forward = rms_norm(client, &self.x, &self.gain, 1e-5).expect("rows and a gain");
        let root = &forward.inverse_rms;
        let backward = rms_norm_backward(client, &self.x, &self.gain, root, gradient);
        let backward = backward.expect("what had a forward pass");
        let of_columns = vec![read_float(client, &backward.gain)];
        (read_float(client, &backward.input), of_columns)
    }

    fn layer(
        &self,
        client: &Client,
        gradient: OutputGradient<'_, crate::device::TestRuntime>,
    ) -> Gradients {
        let forward = layer_norm(client, &self.x, &self.gain, None, 1e-5).expect("rows and a gain");
        let statistics = (&forward.mean, &forward.inverse_deviation);
        let backward = layer_norm_backward(
            client,
            &self.x,
            &self.gain,
            statistics.0,
            statistics.1,
            gradient,
        );
        let backward = backward.expect("what had a forward pass");
        let of_columns = [&backward.gain, &backward.bias].map(|it| read_float(client, it));
        (read_float(client, &backward.input), of_columns.into())
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Adds, and rounds to the type.
fn sum(a: &[f32], b: &[f32], float: StorageType) -> Vec<f32> {
    let sums: Vec<f32> = a.iter().zip(b).map(|(a, b)| a + b).collect();
    rounded(&sums, float)
}

#[test]
fn terms_are_added_up_as_by_sums_of_their_own() {
    let (client, mut random) = (client(), Random::fresh());
    let shapes = [[3, 7], [40, 96], [300, 768], [2, 8192], [5000, 24]];
    let mut cases = Vec::new();
    for float in drawn(&mut random, float_types(&client), 1) {
        for shape in shapes {
            let forms = [(1, true), (2, false), (2, true), (3, false), (3, true)];
            cases.extend(forms.map(|form| (float, shape, form)));
        }
    }
    for (float, shape, (count, has_other)) in drawn(&mut random, cases, 3) {
        let len = shape.iter().product();
        let mut draw = |len: usize| {
            let values: Vec<f32> = (0..len).map(|_| random.normal()).collect();
            rounded(&values, float)
        };
        let put = |values: &[f32], shape: &[usize]| upload(&client, values, shape, float);
        let norm = Norm {
            x: put(&draw(len), &shape),
            gain: put(&draw(shape[1]), &shape[1..]),
        };
        let terms: Vec<Vec<f32>> = (0..count).map(|_| draw(len)).collect();
        let other = has_other.then(|| draw(len));
        let added_up = terms
            .iter()
            .skip(1)
            .fold(terms[0].clone(), |all, term| sum(&all, term, float));
        let whole = put(&added_up, &shape);
        let terms: Vec<Tensor> = terms.iter().map(|term| put(term, &shape)).collect();
        // As numbers that flow back, they count as the floats that these stand for.
        let spec = [
            QuantizeSpec::int8(Granularity::Block(16)),
            QuantizeSpec::new(Number::E4M3, Granularity::Group(16)),
        ][random.index(2)];
        let quantized = |term: &Tensor| quantize(&client, term, &spec).expect("a matrix");
        let numbers: Vec<_> = terms.iter().map(quantized).collect();
        let decoded = |matrix| dequantize(&client, matrix, float).expect("floats");
        let decoded: Vec<Tensor> = numbers.iter().map(decoded).collect();
        let uploaded = other.as_ref().map(|other| put(other, &shape));
        let gradient = OutputGradient {
            terms: Terms::Floats(&terms),
            other: uploaded.as_ref(),
        };
        let of = |terms| OutputGradient { terms, ..gradient };
        let of_numbers = || of(Terms::Numbers(&numbers, float));
        let of_decoded = || of(Terms::Floats(&decoded));
        assert_eq!(
            norm.rms(&client, of_numbers()),
            norm.rms(&client, of_decoded()),
            "rms_norm, {shape:?} of {float}, {count} terms, {spec:?}"
        );
        assert_eq!(
            norm.layer(&client, of_numbers()),
            norm.layer(&client, of_decoded()),
            "layer_norm, {shape:?} of {float}, {count} terms, {spec:?}"
        );
        for (name, (mut expected, of_columns), found) in [
            (
                "rms_norm",
                norm.rms(&client, (&whole).into()),
                norm.rms(&client, gradient),
            ),
            (
                "layer_norm",
                norm.layer(&client, (&whole).into()),
                norm.layer(&client, gradient),
            ),
        ] {
            if let Some(other) = &other {
                expected = sum(&expected, other, float);
            }
            let what = format!("{name}, {shape:?} of {float}, {count} terms, other: {has_other}");
            assert_eq!(bits(&found.0), bits(&expected), "{what}");
            for (found, expected) in found.1.iter().zip(&of_columns) {
                assert_eq!(bits(found), bits(expected), "{what}: columns");
            }
        }
    }
}

#[test]
fn rejects_other_terms() {
    let client = client();
    let tensor = |shape: &[usize]| {
        upload(
            &client,
            &[1.0; 24][..shape.iter().product()],
            shape,
            dtype::<f32>(),
        )
    };
    let (x, gain, root) = (tensor(&[3, 4]), tensor(&[4]), tensor(&[3]));
    let refused = |terms: &[Tensor], other: Option<&Tensor>| {
        let terms = Terms::Floats(terms);
        let gradient = OutputGradient { terms, other };
        let result = rms_norm_backward(&client, &x, &gain, &root, gradient);
        let error = result.expect_err("a gradient of another form");
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    };
    refused(&[], None);
    refused(&vec![x.clone(); MAX_TERMS + 1], None);
    refused(&[x.clone(), tensor(&[4, 3])], None);
    refused(std::slice::from_ref(&x), Some(&tensor(&[3, 3])));
    assert!(rms_norm_backward(&client, &x, &gain, &root, &x).is_ok());
}
