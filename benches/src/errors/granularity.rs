//! Errors of matrices by number format and granularity (jetfire-int8, Fig. 5; training-precision guide, FP8).

use cubecl_kernels::{granularity::Granularity, number::Number};
use serde::{Deserialize, Serialize};

use super::{
    capture::{Captured, Kind, by_kind},
    metric::{Distance, root_mean_square},
    numbers::Numbers,
};

/// Those of Jetfire's Fig. 5, and blocks of other sizes and groups beside its own.
pub const GRANULARITIES: [Granularity; 7] = [
    Granularity::Tensor,
    Granularity::Token,
    Granularity::Channel,
    Granularity::Block(128),
    Granularity::Block(64),
    Granularity::Block(32),
    Granularity::Group(128),
];

/// Those that formats are compared by.
pub const COARSE_TO_FINE: [Granularity; 3] = [
    Granularity::Tensor,
    Granularity::Block(128),
    Granularity::Group(128),
];

/// The formats that are compared.
pub const FORMATS: [Number; 3] = [Number::Int8, Number::E4M3, Number::E5M2];

/// The error of the matrices of a kind in a format of numbers with scales of a granularity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatrixError {
    /// The matrices.
    pub kind: Kind,
    /// How many they are.
    pub matrices: usize,
    /// The number format.
    pub numbers: String,
    /// Which elements share a scale.
    pub granularity: String,
    /// The norm of the error over that of the matrix, the root mean square over the matrices.
    pub error: f64,
    /// The mean magnitude of the error over that of the matrix, likewise.
    pub mean_error: f64,
    /// The share of values of all matrices that become zero.
    pub zeroed: f64,
    /// The largest magnitude over the root mean square of a matrix, likewise.
    pub peak: f64,
}

/// The name of a granularity in tables: `128x128`.
pub fn name(granularity: Granularity) -> String {
    match granularity {
        Granularity::Tensor => String::from("tensor"),
        Granularity::Token => String::from("token"),
        Granularity::Channel => String::from("channel"),
        Granularity::Block(size) => format!("{size}x{size}"),
        Granularity::Group(size) => format!("1x{size}"),
    }
}

/// INT8 by all of [`GRANULARITIES`].
pub fn by_granularity(captured: &[Captured]) -> Vec<MatrixError> {
    errors(captured, &[Number::Int8], &GRANULARITIES)
}

/// All of [`FORMATS`] by [`COARSE_TO_FINE`].
pub fn by_format(captured: &[Captured]) -> Vec<MatrixError> {
    errors(captured, &FORMATS, &COARSE_TO_FINE)
}

fn errors(
    captured: &[Captured],
    formats: &[Number],
    granularities: &[Granularity],
) -> Vec<MatrixError> {
    let mut errors = Vec::new();
    for (kind, matrices) in by_kind(captured) {
        for &number in formats {
            for &granularity in granularities {
                errors.push(error(kind, &matrices, number, granularity));
            }
        }
    }
    errors
}

fn error(
    kind: Kind,
    matrices: &[&Captured],
    number: Number,
    granularity: Granularity,
) -> MatrixError {
    let numbers = Numbers::Format(number);
    let mut all = Distance::default();
    let mut each = Vec::new();
    for matrix in matrices {
        let rounded = numbers.round(&matrix.values, matrix.shape, granularity);
        all.add(&matrix.values, &rounded);
        each.push(Distance::of(&matrix.values, &rounded));
    }
    MatrixError {
        kind,
        matrices: matrices.len(),
        numbers: numbers.name(),
        granularity: name(granularity),
        error: root_mean_square(each.iter().map(Distance::relative_error)),
        mean_error: root_mean_square(each.iter().map(Distance::mean_error)),
        zeroed: all.zeroed(),
        peak: root_mean_square(matrices.iter().map(|matrix| peak(&matrix.values))),
    }
}

/// The largest magnitude over the root mean square.
fn peak(values: &[f32]) -> f64 {
    let values = || values.iter().map(|&x| f64::from(x));
    values().map(f64::abs).fold(0.0, f64::max) / root_mean_square(values())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Normal numbers with an outlier in every column of some, and one token that is larger than the others.
    fn planted(kind: Kind, columns: &[usize], factor: f32) -> Captured {
        let (rows, cols) = (256, 256);
        let mut values = Random::new(3).normals(rows * cols, 1.0);
        for row in values.chunks_mut(cols) {
            columns.iter().for_each(|&col| row[col] *= factor);
        }
        Captured {
            kind,
            shape: [rows, cols],
            values,
        }
    }

    fn of<'a>(errors: &'a [MatrixError], kind: Kind, granularity: &str) -> &'a MatrixError {
        let mut errors = errors.iter();
        let found = errors.find(|it| it.kind == kind && it.granularity == granularity);
        found.expect("all granularities are there")
    }

    #[test]
    fn finer_blocks_and_channels_contain_outlier_columns() {
        let captured = [planted(Kind::Product, &[5, 130], 100.0)];
        let errors = by_granularity(&captured);
        assert_eq!(errors.len(), Kind::ALL.len() * GRANULARITIES.len());
        let error = |granularity| of(&errors, Kind::Product, granularity).error;
        let mean = |granularity| of(&errors, Kind::Product, granularity).mean_error;
        // The mean counts all elements alike, and most of them have no outlier beside them in a small block.
        assert!(mean("tensor") > 2.0 * mean("64x64"));
        assert!(mean("128x128") > 1.5 * mean("32x32"));
        assert!(mean("token") > 5.0 * mean("channel"));
        for pair in ["tensor", "128x128", "64x64", "32x32"].windows(2) {
            assert!(error(pair[0]) > error(pair[1]), "{pair:?}");
        }
        assert!(error("token") > error("channel"));
        let product = of(&errors, Kind::Product, "tensor");
        assert_eq!(product.matrices, 1);
        // A root mean square of 8.9, and the largest of 512 normal numbers times 100.
        assert!((25.0..50.0).contains(&product.peak), "{product:?}");
        // Most values beside an outlier of a hundred deviations are below half a step.
        assert!(product.zeroed > 0.5);
        assert!(of(&errors, Kind::Product, "channel").zeroed < 0.05);
    }

    #[test]
    fn floats_keep_what_integers_zero() {
        let captured = [planted(Kind::GradientDown, &[7], 1000.0)];
        let errors = by_format(&captured);
        let zeroed = |numbers: &str| {
            let mut errors = errors.iter();
            let found = errors.find(|it| {
                it.kind == Kind::GradientDown && it.numbers == numbers && it.granularity == "tensor"
            });
            found.expect("all formats are there").zeroed
        };
        assert!(zeroed("INT8") > 0.9 && zeroed("E5M2") < 1e-3);
        assert!(zeroed("E4M3") >= zeroed("E5M2") && zeroed("E4M3") < 0.1);
    }
}
