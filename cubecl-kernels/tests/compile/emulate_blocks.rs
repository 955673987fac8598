//! Norms, and GELU and its gradient, of what waits or flows in INT8, quantized in blocks as they are computed, on a CPU,
//! against the reference of the quantizer to the bit.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    gelu::{quantize_gelu, quantize_gelu_gradient},
    layout::Layout,
    operator_input::OperatorInput,
    quantize::QuantizeSpec,
    rounding::Rounding,
};
use half::{bf16, f16};

use super::{
    device::{rounded, to_bytes},
    dtype,
    emulate_matrix_scale::{gelu_of, launch_norm, normalized},
    emulate_swiglu::{
        CONTEXT, FLOW, SHAPE, allocated, check_written, compressed, decompressed, draw, quantized,
        source_of,
    },
    random::Random,
};

/// A norm of a matrix, and how it is quantized.
#[derive(Debug, Clone, Copy)]
struct Case {
    float: StorageType,
    of_columns: StorageType,
    waiting: QuantizeSpec,
    spec: QuantizeSpec,
    centred: bool,
    bias: bool,
}

#[test]
fn norms_equal_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for (float, of_columns) in [
        (dtype::<f16>(), dtype::<f16>()),
        (dtype::<bf16>(), dtype::<f32>()),
    ] {
        let again = FLOW.with_rounding(Rounding::Stochastic(random.key()));
        for (waiting, spec) in [
            (CONTEXT, again.with_layout(Layout::Transposed)),
            (FLOW, FLOW.with_layout(Layout::Both)),
            (FLOW, FLOW),
        ] {
            let norms = [(false, false), (true, false), (true, true)];
            cases.extend(norms.map(|(centred, bias)| Case {
                float,
                of_columns,
                waiting,
                spec,
                centred,
                bias,
            }));
        }
    }
    for case in random.few(cases, 4) {
        println!("{case:?}");
        emulate(&mut random, case);
    }
}

fn emulate(random: &mut Random, case: Case) {
    let Case {
        float,
        of_columns,
        waiting,
        spec,
        centred,
        bias,
    } = case;
    let source = source_of(float, |client, _| {
        let codes = allocated(client, &waiting);
        launch_norm(client, (&codes, float), of_columns, (centred, bias), &spec);
    });
    assert_eq!(source.name, "quantize_norm_by_blocks");
    let [x] = draw(random, float);
    let [gains, biases] = [(); 2].map(|()| rounded(&random.with_outliers(SHAPE.cols), of_columns));
    let [inverses, means] = [(); 2].map(|()| random.with_outliers(SHAPE.rows));
    let elements = decompressed(&x, &waiting, float);
    let output = normalized(
        &elements,
        SHAPE.cols,
        (&inverses, centred.then_some(&means)),
        (&gains, bias.then_some(&biases)),
    );
    let [values, transposed, scales] =
        quantized(&rounded(&output, float), spec.rounding, spec.rounding);
    let mut expected = compressed(&x, &waiting).to_vec();
    let of_rows = [centred.then_some(means), Some(inverses)];
    let of_rows = of_rows.into_iter().flatten();
    expected.extend(of_rows.map(|of_rows| bytemuck::cast_slice(&of_rows).to_vec()));
    expected.push(to_bytes(&gains, of_columns));
    expected.extend(bias.then(|| to_bytes(&biases, of_columns)));
    let inputs = expected.len();
    // What stands in for a copy is not touched.
    let stand_in = || scales.clone();
    expected.extend([
        match spec.layout {
            Layout::Both | Layout::RowMajor => values,
            Layout::Transposed => stand_in(),
        },
        match spec.layout {
            Layout::Both | Layout::Transposed => transposed,
            Layout::RowMajor => stand_in(),
        },
        scales.clone(),
    ]);
    let written: Vec<usize> = match spec.layout {
        Layout::Both => (inputs..inputs + 3).collect(),
        Layout::RowMajor => vec![inputs, inputs + 2],
        Layout::Transposed => vec![inputs + 1, inputs + 2],
    };
    let name = format!("emulate-norm-{centred}-{bias}-{:?}", spec.layout);
    let scales = [inputs + 2];
    check_written(&source, &expected, &written, &scales, (&name, float));
}

#[test]
fn gelu_equals_the_reference() {
    let mut random = Random::fresh();
    let mut cases = Vec::new();
    for float in [dtype::<f16>(), dtype::<bf16>()] {
        let stochastic = Rounding::Stochastic(random.key());
        cases.extend([
            (float, None, Rounding::Nearest, Layout::Both),
            (float, None, Rounding::Nearest, Layout::RowMajor),
            (float, Some(false), stochastic, Layout::Both),
            (float, Some(true), stochastic, Layout::Both),
        ]);
    }
    // Of a gradient, whether that of the output flows in numbers too.
    for (float, gradient_flows, rounding, layout) in random.few(cases, 2) {
        println!("{float}, gradient {gradient_flows:?}, {layout:?}");
        let spec = FLOW.with_rounding(rounding).with_layout(layout);
        let source = source_of(float, |client, dy| {
            let codes = allocated(client, &FLOW);
            let x = OperatorInput::Quantized(&codes, float);
            match gradient_flows {
                Some(true) => quantize_gelu_gradient(client, x, x, &spec),
                Some(false) => quantize_gelu_gradient(client, x, dy, &spec),
                None => quantize_gelu(client, x, &spec),
            }
            .map(drop)
            .expect("a matrix");
        });
        assert_eq!(source.name, "quantize_gelu_by_blocks");
        let [x, mut dy] = draw(&mut random, float);
        let mut expected = compressed(&x, &FLOW).to_vec();
        match gradient_flows {
            Some(true) => {
                expected.extend(compressed(&dy, &FLOW));
                dy = decompressed(&dy, &FLOW, float);
            }
            Some(false) => expected.push(to_bytes(&dy, float)),
            None => {}
        }
        let x = decompressed(&x, &FLOW, float);
        let output = gelu_of(&x, gradient_flows.map(|_| &dy));
        let [values, transposed, scales] = quantized(&rounded(&output, float), rounding, rounding);
        let inputs = expected.len();
        let mut written = vec![inputs, inputs + 2];
        let transposed = match layout {
            Layout::RowMajor => scales.clone(),
            Layout::Both | Layout::Transposed => {
                written.push(inputs + 1);
                transposed
            }
        };
        expected.extend([values, transposed, scales]);
        let name = format!("emulate-gelu-{gradient_flows:?}-{layout:?}");
        check_written(&source, &expected, &written, &[inputs + 2], (&name, float));
    }
}
