//! Linear layers with learned step sizes, from the definitions of `cubecl_kernels::reference`.

use burn_quant_train::{
    data::DataBackend,
    layer::{Call, Layer, Role},
    recipe::{
        Cast, LinearRow, Number, Product, Residual, Rounding, Sampling, ScaleSource, Transform,
    },
};
use cubecl_kernels::{
    granularity::Granularity,
    hadamard::{HadamardSize, HadamardTransform},
    quantize::{QuantizeSpec, learned_step::ResidualRows},
    reference::{self, ReferenceQuantized, learned_step},
    rounding,
    shape::MatrixShape,
};

use crate::suite::conformance::{Definition, Matrix};

/// The slots of a row's step sizes and of the size of its transform; `None` for a row whose scales come from the data.
fn slots(row: &LinearRow) -> Option<([&'static str; 2], Option<&'static str>)> {
    let Product::Quantized { left, right, .. } = row.forward else {
        return None;
    };
    let (ScaleSource::Step(x), ScaleSource::Step(weight)) = (left.source, right.source) else {
        return None;
    };
    let hadamard = match left.transform {
        Transform::Identity | Transform::RandomHadamard => None,
        Transform::Hadamard(slot) => Some(slot),
    };
    Some(([x, weight], hadamard))
}

/// Y, dX and dW of the first run of a layer, for X `[rows, K]`, W `[K, N]` and dY `[rows, N]`, with the step sizes and
/// the transform that the layer has; `None` for a row whose scales come from the data.
pub(crate) fn definition<B: DataBackend>(
    row: &LinearRow,
    [x, w, dy]: [&[f32]; 3],
    [rows, k, n]: [usize; 3],
    layer: &Layer<B>,
) -> Option<Definition> {
    let (steps, hadamard) = slots(row)?;
    let values = &layer.bank().read()[layer.index()];
    let value = |slot: &str| values[slot][0];
    let size = hadamard.map_or(0.0, value);
    let size = HadamardSize::new(size as u32).expect("a size from 0 to 7");
    let [step_x, step_w] = steps.map(value);

    let of_x = HadamardTransform::of_columns(size);
    let of_w = HadamardTransform::of_rows(size);
    let x = learned_step::quantize(x, [rows, k], of_x, step_x);
    let w = learned_step::quantize(w, [k, n], of_w, step_w);
    let z_x = dequantized(&x.quantized, [rows, k]);
    let z_w = dequantized(&w.quantized, [k, n]);

    let first_call = Call {
        time: 0,
        step: 0,
        lane: 0,
        index: 0,
    };
    let gradients = Gradients {
        row,
        key: |role| layer.key(first_call, role),
        shape: MatrixShape::new(rows, n),
    };
    let (of_z_x, of_z_w) = gradients.products(dy, &x.quantized, [&z_x, &z_w]);

    let residuals = x.residuals(ResidualRows::ALL);
    let codes = &x.quantized.values;
    let saved = learned_step::saved(codes, k, &x.saturation(), &residuals, ResidualRows::ALL);
    let (dx, _) = learned_step::backward(&of_z_x, &saved, [rows, k], of_x);
    let (dw, _) = learned_step::backward(&of_z_w, &w.exact(), [k, n], of_w);
    Some(Definition {
        y: z_x.times(&z_w),
        dx: Matrix::of(&dx, [rows, k]),
        dw: Matrix::of(&dw, [k, n]),
    })
}

fn dequantized(matrix: &ReferenceQuantized, shape: [usize; 2]) -> Matrix {
    Matrix::of(&reference::dequantize(matrix), shape)
}

struct Gradients<'a, F> {
    row: &'a LinearRow,
    key: F,
    /// Of dY.
    shape: MatrixShape,
}

impl<F: Fn(Role) -> rounding::StochasticKey> Gradients<'_, F> {
    /// The gradients of the values that the codes of X and W stand for.
    fn products(
        &self,
        dy: &[f32],
        x: &ReferenceQuantized,
        [z_x, z_w]: [&Matrix; 2],
    ) -> (Vec<f32>, Vec<f32>) {
        let Product::Quantized { left, sampling, .. } = self.row.input_gradient else {
            panic!("a row with learned step sizes quantizes all products");
        };
        let [rows, n] = [self.shape.rows, self.shape.cols];
        let dense = |dy: &ReferenceQuantized| {
            let dy = dequantized(dy, [rows, n]);
            (dy.times(&z_w.t()).floats(), z_x.t().times(&dy).floats())
        };
        if left.residual == Residual::Never {
            let spec = QuantizeSpec::new(left.number, Granularity::Tensor)
                .with_rounding(self.rounding(&left));
            return dense(&reference::quantize(dy, self.shape, &spec));
        }
        assert_eq!(left.number, Number::Int4);
        let split = reference::bit_split(dy, self.shape, self.rounding(&left));
        match sampling {
            Sampling::All => dense(&reference::merge_parts(&split)),
            Sampling::LeverageScore => {
                let norms = split.squared_norms();
                let scores = reference::leverage_scores(&norms, None);
                let key = (self.key)(Role::SampledRows);
                let sample = reference::sample_rows(&scores, split.scales, rows, key);
                let kept = [sample.rows.len(), n];
                let parts = dequantized(&reference::gather_parts(&split, &sample), kept);
                let products = parts.times(&z_w.t()).floats();
                let k = z_w.shape[0];
                let of_x = learned_step::sampled_gradient(&products, k, &sample.positions);

                let of_rows = reference::int4_row_norms(x);
                let scores = reference::leverage_scores(&norms, Some(&of_rows));
                let key = (self.key)(Role::SampledRowsOfWeight);
                let sample = reference::sample_rows(&scores, split.scales, rows, key);
                let kept = sample.rows.len();
                let again = rounding::Rounding::Stochastic((self.key)(Role::SampledGradient));
                let dy = dequantized(&reference::gather_scaled(&split, &sample, again), [kept, n]);
                let x = dequantized(&reference::gather_int4_rows(x, &sample), [kept, k]);
                (of_x, x.t().times(&dy).floats())
            }
        }
    }

    fn rounding(&self, cast: &Cast) -> rounding::Rounding {
        match cast.rounding {
            Rounding::Nearest => rounding::Rounding::Nearest,
            Rounding::Stochastic => {
                rounding::Rounding::Stochastic((self.key)(Role::OutputGradient))
            }
        }
    }
}
