//! INT4 with one step size after a Hadamard transform (int4-hq-lss, section 3.3, Fig. 1, Appendices A.4 and A.5).

use anyhow::Result;
use cubecl_kernels::{
    hadamard::{HadamardSize, HadamardTransform},
    host::learned_step,
};
use serde::{Deserialize, Serialize};

use super::{
    capture::{Captured, Kind, by_kind},
    metric::root_mean_square,
};
use crate::random::Random;

/// Step sizes that are tried, to an octave.
const STEPS_OF_OCTAVE: i32 = 8;
/// Octaves around the root mean square from which step sizes are tried.
const OCTAVES: i32 = 4;
/// Sizes of planted outliers, in deviations of the other elements.
pub const PLANTED: [f32; 5] = [1.0, 4.0, 16.0, 64.0, 256.0];
/// Rows and columns of a matrix with planted outliers.
const SHAPE: [usize; 2] = [1024, 128];
/// Columns of outliers in it.
const COLUMNS: usize = 2;

/// A matrix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Matrices {
    /// Normal numbers, two of 128 columns times so much.
    Planted(f32),
    /// Those of a step.
    Step(Kind),
}

/// The errors of INT4 after transforms of 2^0 to 2^7 elements, the norm of the error over that of the matrix, root mean
/// square over the matrices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HadamardError {
    /// The matrices.
    pub matrices: Matrices,
    /// With the step size that has the smallest error, as a step size that is learned might find it.
    pub best: Vec<f64>,
    /// With the step size of a cold start.
    pub cold: Vec<f64>,
}

/// The errors of planted outliers and of all activations.
///
/// # Errors
///
/// A transform does not divide a matrix' columns.
pub fn errors(captured: &[Captured]) -> Result<Vec<HadamardError>> {
    let mut errors = Vec::new();
    for factor in PLANTED {
        let planted = planted(factor);
        errors.push(error(Matrices::Planted(factor), &[&planted])?);
    }
    for (kind, matrices) in by_kind(captured).filter(|(kind, _)| !kind.is_gradient()) {
        errors.push(error(Matrices::Step(kind), &matrices)?);
    }
    Ok(errors)
}

/// Normal numbers with outliers in a few columns (Fig. 1).
fn planted(factor: f32) -> Captured {
    let [rows, cols] = SHAPE;
    let mut random = Random::new(1);
    let mut values = random.normals(rows * cols, 1.0);
    let outliers = random.subset(COLUMNS, cols);
    for row in values.chunks_mut(cols) {
        outliers.iter().for_each(|&col| row[col] *= factor);
    }
    Captured {
        kind: Kind::Product,
        shape: SHAPE,
        values,
    }
}

fn error(matrices: Matrices, captured: &[&Captured]) -> Result<HadamardError> {
    let (mut best, mut cold) = (Vec::new(), Vec::new());
    for size in HadamardSize::all() {
        let transform = HadamardTransform::of_columns(size);
        let errors = captured.iter().map(|matrix| of_matrix(matrix, transform));
        let errors = errors.collect::<Result<Vec<_>>>()?;
        best.push(root_mean_square(errors.iter().map(|it| it[0])));
        cold.push(root_mean_square(errors.iter().map(|it| it[1])));
    }
    Ok(HadamardError {
        matrices,
        best,
        cold,
    })
}

/// The errors of the best step size and of a cold start. A transform keeps the norm, so that the error of what was
/// transformed is that of the matrix.
fn of_matrix(matrix: &Captured, transform: HadamardTransform) -> Result<[f64; 2]> {
    let Captured { values, shape, .. } = matrix;
    let norm = root_mean_square(values.iter().map(|&x| f64::from(x)));
    let error = |step| -> Result<f64> {
        let squared = learned_step::squared_error(values, *shape, step, transform)?;
        Ok(f64::from(squared).sqrt() / norm)
    };
    let mut best = f64::INFINITY;
    for index in -OCTAVES * STEPS_OF_OCTAVE..=OCTAVES * STEPS_OF_OCTAVE {
        let octaves = f64::from(index) / f64::from(STEPS_OF_OCTAVE);
        best = best.min(error((norm * octaves.exp2()) as f32)?);
    }
    let cold = learned_step::cold_step(values, *shape, 1.0, transform)?;
    Ok([best, error(cold)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transforms_gain_more_from_larger_outliers() {
        let gains = PLANTED.map(|factor| {
            let planted = planted(factor);
            let error = error(Matrices::Planted(factor), &[&planted]).unwrap();
            assert_eq!((error.best.len(), error.cold.len()), (8, 8));
            for (best, cold) in error.best.iter().zip(&error.cold) {
                assert!(best <= &(1.01 * cold), "{error:?}");
            }
            error.best[7] / error.best[0]
        });
        // Without outliers a transform of normal numbers is normal numbers.
        assert!((gains[0] - 1.0).abs() < 0.03, "{gains:?}");
        assert!(gains[2] < 0.4 && gains[2] < gains[1], "{gains:?}");
    }

    #[test]
    fn what_int4_holds_has_no_error() {
        // Codes from -7 to 7 and a root mean square of 4: with a step size of 1.
        let values = vec![7.0, -1.0, 3.0, 2.0, -7.0, 4.0, 0.0, 0.0];
        let matrix = |values, shape| Captured {
            kind: Kind::Product,
            shape,
            values,
        };
        let of = |order, matrix: &Captured| {
            let size = HadamardSize::new(order).unwrap();
            of_matrix(matrix, HadamardTransform::of_columns(size))
        };
        let held = matrix(values, [1, 8]);
        assert_eq!(of(0, &held).unwrap()[0], 0.0);
        assert!(of(3, &held).unwrap()[0] > 0.0);
        assert!(of(1, &matrix(vec![1.0; 6], [2, 3])).is_err());
    }
}
