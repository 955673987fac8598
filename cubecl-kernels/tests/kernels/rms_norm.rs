//! RMSNorm: the reference against finite differences, the kernels against the reference.

use cubecl_kernels::reference::rms_norm::{rms_norm, rms_norm_backward};

use crate::random::Random;

#[test]
fn the_reference_has_the_slopes_of_its_differences() {
    let mut random = Random::fresh();
    const STEP: f64 = 1e-5;
    for (rows, cols, epsilon) in [(1, 1, 0.1), (3, 5, 1e-2), (4, 16, 0.5)] {
        let mut draw = |len| -> Vec<f64> { (0..len).map(|_| f64::from(random.normal())).collect() };
        let (x, gain, gradient) = (draw(rows * cols), draw(cols), draw(rows * cols));
        let loss = |x: &[f64], gain: &[f64]| -> f64 {
            let output = rms_norm(x, gain, epsilon).output;
            output.iter().zip(&gradient).map(|(y, dy)| y * dy).sum()
        };
        let slopes = rms_norm_backward(&x, &gain, epsilon, &gradient);
        let moved = |values: &[f64], index: usize, step: f64| {
            let mut values = values.to_vec();
            values[index] += step;
            values
        };
        for (index, slope) in slopes.input.into_iter().enumerate() {
            let at = |step| loss(&moved(&x, index, step), &gain);
            let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let error = (slope - expected).abs();
            assert!(error < 1e-6, "x[{index}]: {slope} instead of {expected}");
        }
        for (index, slope) in slopes.gain.into_iter().enumerate() {
            let at = |step| loss(&x, &moved(&gain, index, step));
            let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let error = (slope - expected).abs();
            assert!(error < 1e-6, "gain[{index}]: {slope} instead of {expected}");
        }
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod on_device {
    use cubecl::{ir::StorageType, std::tensor::TensorHandle};
    use cubecl_kernels::{
        KernelError,
        rms_norm::{
            MAX_COLS, RmsNormGradients, has_rms_norm, rms_norm as kernel,
            rms_norm_backward as backward_kernel,
        },
        shape::MatrixShape,
    };

    use super::*;
    use crate::device::{
        Client, Tensor, TestRuntime, client, dtype, float_types, read_float, rounded, upload,
        upload_i32, upload_with_offset,
    };

    /// What the kernels are given, as the device has it.
    struct Case {
        shape: Vec<usize>,
        x: Vec<f32>,
        gain: Vec<f32>,
        gradient: Vec<f32>,
        epsilon: f32,
        float: StorageType,
        gain_float: StorageType,
    }

    impl Case {
        /// Ordinary gains and gradients for these rows.
        fn new(
            random: &mut Random,
            shape: &[usize],
            x: &[f32],
            epsilon: f32,
            [float, gain_float]: [StorageType; 2],
        ) -> Self {
            let cols = *shape.last().expect("rows");
            let mut draw = |len| -> Vec<f32> { (0..len).map(|_| random.normal()).collect() };
            Self {
                shape: shape.to_vec(),
                x: rounded(x, float),
                gain: rounded(&draw(cols), gain_float),
                gradient: rounded(&draw(x.len()), float),
                epsilon,
                float,
                gain_float,
            }
        }

        fn tensors(&self, client: &Client) -> [Tensor; 3] {
            let cols = self.gain.len();
            [
                upload(client, &self.x, &self.shape, self.float),
                upload(client, &self.gain, &[cols], self.gain_float),
                upload(client, &self.gradient, &self.shape, self.float),
            ]
        }

        /// Both passes against the reference.
        #[track_caller]
        fn check(&self) {
            let client = client();
            let [x, gain, gradient] = self.tensors(&client);
            let cols = self.gain.len();
            let rows = self.x.len() / cols;
            let what = format!(
                "{} {:?}, gain {}, epsilon {:e}",
                self.float, self.shape, self.gain_float, self.epsilon
            );
            let forward = kernel(&client, &x, &gain, self.epsilon).expect("rows and a gain");
            assert_eq!(forward.output.shape(), x.shape());
            assert_eq!(forward.output.dtype, self.float);
            assert_eq!(forward.inverse_rms.shape()[..], [rows]);
            let backward = backward_kernel(&client, &x, &gain, &forward.inverse_rms, &gradient);
            let backward = backward.expect("what had a forward pass");
            assert_eq!(backward.input.shape(), x.shape());
            assert_eq!(backward.input.dtype, self.float);

            let wide = |x: &[f32]| -> Vec<f64> { x.iter().copied().map(f64::from).collect() };
            let [x, g, dy] = [&self.x, &self.gain, &self.gradient].map(|x| wide(x));
            let epsilon = f64::from(self.epsilon);
            let expected = rms_norm(&x, &g, epsilon);
            let slopes = rms_norm_backward(&x, &g, epsilon, &dy);
            // The terms of sums that may cancel.
            let r = &expected.inverse_rms;
            let mut sizes = Vec::with_capacity(x.len());
            let mut gain_sizes = vec![0.0; cols];
            for row in 0..rows {
                let term = |j: usize| {
                    let at = row * cols + j;
                    ((g[j] * dy[at]).abs(), (x[at] * r[row]).abs())
                };
                let mean = (0..cols).map(|j| term(j).0 * term(j).1).sum::<f64>() / cols as f64;
                for (j, size) in gain_sizes.iter_mut().enumerate() {
                    sizes.push(r[row] * (term(j).0 + term(j).1 * mean));
                    *size += (dy[row * cols + j] * x[row * cols + j] * r[row]).abs();
                }
            }

            let output = read_float(&client, &forward.output);
            let exact = vec![0.0; x.len()];
            assert_close(&output, &expected.output, &exact, self.float, &what);
            let roots = read_float(&client, &forward.inverse_rms);
            assert_close(&roots, r, &vec![0.0; rows], dtype::<f32>(), &what);
            let input = read_float(&client, &backward.input);
            assert_close(&input, &slopes.input, &sizes, self.float, &what);
            let gain = sum_of_parts(&client, &backward);
            assert_close(&gain, &slopes.gain, &gain_sizes, dtype::<f32>(), &what);
        }
    }

    fn sum_of_parts(client: &Client, gradients: &RmsNormGradients<TestRuntime>) -> Vec<f32> {
        let shape = gradients.gain.shape();
        let (parts, cols) = (shape[0], shape[1]);
        assert!(parts > 0);
        let values = read_float(client, &gradients.gain);
        let sum = |col| -> f64 {
            let of_col = (0..parts).map(|part| f64::from(values[part * cols + col]));
            of_col.sum()
        };
        (0..cols).map(|col| sum(col) as f32).collect()
    }

    /// `sizes` are those of an element's terms, where they are larger than the element.
    #[track_caller]
    fn assert_close(
        actual: &[f32],
        expected: &[f64],
        sizes: &[f64],
        float: StorageType,
        what: &str,
    ) {
        assert_eq!(actual.len(), expected.len(), "{what}: length");
        // Rounding to the type, and what is flushed to 0: a denormal input, times an inverse root.
        let (relative, smallest) = match float {
            _ if float == dtype::<f32>() => (0.0, 1e-33),
            _ if float == dtype::<half::f16>() => (5.1e-4, 6e-8),
            _ => (4e-3, 1e-33),
        };
        for (index, ((&a, &e), size)) in actual.iter().zip(expected).zip(sizes).enumerate() {
            let allowed = relative * e.abs() + 3e-6 * e.abs().max(*size) + smallest;
            assert!(
                (f64::from(a) - e).abs() <= allowed
                    || f64::from(a) == e
                    || (a.is_nan() && e.is_nan()),
                "{what} [{index}]: {a:e} instead of {e:e}"
            );
        }
    }

    /// Each float type with a gain of each.
    fn types(client: &Client) -> Vec<[StorageType; 2]> {
        let floats = float_types(client);
        let pairs = |&float: &StorageType| floats.iter().map(move |&gain| [float, gain]);
        floats.iter().flat_map(pairs).collect()
    }

    /// Vectors of every width, whole and part planes, several of them, and as many elements as there may be.
    const COLS: [usize; 14] = [
        1, 3, 7, 16, 64, 129, 768, 1000, 1026, 1536, 2048, 4096, 8191, 8192,
    ];

    #[test]
    fn equals_the_reference() {
        let mut random = Random::fresh();
        let types = types(&client());
        let mut turns = types.iter().cycle();
        for cols in COLS {
            for rows in [0, 1, 5, 300] {
                let len = rows * cols;
                // A kernel for long rows takes a software driver long to compile.
                let takes = match cols > 1000 || rows == 300 {
                    true => 1,
                    false => types.len(),
                };
                for _ in 0..takes {
                    let types = *turns.next().expect("it goes round");
                    let x: Vec<f32> = (0..len).map(|_| 3.0 * random.normal()).collect();
                    Case::new(&mut random, &[rows, cols], &x, 1e-5, types).check();
                }
            }
        }
    }

    /// More rows than the cubes of the backward pass take at a time.
    #[test]
    fn many_rows() {
        let mut random = Random::fresh();
        for float in float_types(&client()) {
            for (shape, epsilon) in [
                (vec![40_001, 8], 1e-6),
                (vec![20, 150, 96], 1e-3),
                (vec![1030, 1030], 0.0),
                (vec![5], 1e-6),
            ] {
                let len = shape.iter().product();
                let x: Vec<f32> = (0..len).map(|_| random.normal()).collect();
                let types = [float, dtype::<f32>()];
                Case::new(&mut random, &shape, &x, epsilon, types).check();
            }
        }
    }

    /// Outliers, denormals, rows of zeros, NaN and infinities.
    #[test]
    fn of_special_values() {
        let mut random = Random::fresh();
        for types in types(&client()) {
            for cols in [1, 7, 129, 768, 1100] {
                let shape = MatrixShape::new(61, cols);
                let mut x = random.with_special_values(shape);
                for x in &mut x {
                    // Its square overflows, in FP32 alone.
                    if x.is_finite() && x.abs() > 1e18 {
                        *x = 1e4;
                    }
                }
                x[..cols].fill(0.0);
                let mut case = Case::new(&mut random, &[61, cols], &x, 1e-6, types);
                case.check();
                case.gradient[5 * cols] = f32::NAN;
                case.gradient[7 * cols] = f32::INFINITY;
                case.check();
                case.gain[cols / 2] = f32::NAN;
                case.check();
            }
        }
    }

    #[test]
    fn rows_that_are_no_numbers() {
        let client = client();
        let upload = |x: &[f32], shape: &[usize]| upload(&client, x, shape, dtype::<f32>());
        let (nan, infinity) = (f32::NAN, f32::INFINITY);
        #[rustfmt::skip]
        let x = [
            1.0, nan, 2.0,
            1.0, infinity, 2.0,
            1.0, f32::MAX, 2.0,
            0.0, -0.0, 0.0,
        ];
        let (x, gain) = (upload(&x, &[4, 3]), upload(&[1.0; 3], &[3]));
        let forward = kernel(&client, &x, &gain, 1e-6).expect("rows and a gain");
        let y = read_float(&client, &forward.output);
        assert!(y[..3].iter().all(|y| y.is_nan()), "{y:?}");
        assert!(y[4].is_nan(), "{y:?}");
        assert_eq!([y[3], y[5]], [0.0; 2]);
        assert_eq!(y[6..], [0.0; 6]);
        let r = read_float(&client, &forward.inverse_rms);
        assert!(r[0].is_nan(), "{r:?}");
        assert_eq!(r[1..3], [0.0; 2]);
        assert!((r[3] - 1e3).abs() < 1e-3, "{r:?}");
    }

    #[test]
    fn a_repetition_gives_the_same_bits() {
        let (client, mut random) = (client(), Random::fresh());
        for (shape, float) in [([2000, 64], dtype::<f32>()), ([700, 1300], dtype::<f32>())] {
            let x = random.with_outliers(shape[0] * shape[1]);
            let case = Case::new(&mut random, &shape, &x, 1e-6, [float; 2]);
            let [x, gain, gradient] = case.tensors(&client);
            let results = || {
                let forward = kernel(&client, &x, &gain, case.epsilon).expect("rows and a gain");
                let roots = &forward.inverse_rms;
                let backward = backward_kernel(&client, &x, &gain, roots, &gradient);
                let backward = backward.expect("what had a forward pass");
                [
                    forward.output,
                    forward.inverse_rms,
                    backward.input,
                    backward.gain,
                ]
                .map(|tensor| read_float(&client, &tensor))
            };
            let first = results();
            for _ in 0..3 {
                assert!(results() == first, "{shape:?}");
            }
        }
    }

    #[test]
    fn reads_what_starts_inside_of_a_buffer() {
        let (client, mut random) = (client(), Random::fresh());
        for float in float_types(&client) {
            for shape in [[5, 13], [9, 768]] {
                let x = random.with_outliers(shape[0] * shape[1]);
                let case = Case::new(&mut random, &shape, &x, 1e-6, [float; 2]);
                let whole = case.tensors(&client);
                let inside = [
                    upload_with_offset(&client, &case.x, &shape, float),
                    upload_with_offset(&client, &case.gain, &shape[1..], float),
                    upload_with_offset(&client, &case.gradient, &shape, float),
                ];
                let results = |[x, gain, gradient]: [&Tensor; 3]| {
                    let forward = kernel(&client, x, gain, 1e-6).expect("rows and a gain");
                    let roots = &forward.inverse_rms;
                    let backward = backward_kernel(&client, x, gain, roots, gradient);
                    let backward = backward.expect("what had a forward pass");
                    let gain = sum_of_parts(&client, &backward);
                    let [y, dx] = [forward.output, backward.input];
                    [read_float(&client, &y), read_float(&client, &dx), gain]
                };
                let expected = results([&whole[0], &whole[1], &whole[2]]);
                for moved in 0..3 {
                    let mut tensors = [&whole[0], &whole[1], &whole[2]];
                    tensors[moved] = &inside[moved];
                    let what = format!("{float} {shape:?}, tensor {moved}");
                    for (found, expected) in results(tensors).iter().zip(&expected) {
                        // Vectors of another width make another order of sums.
                        let expected: Vec<f64> = expected.iter().copied().map(f64::from).collect();
                        let largest = expected.iter().fold(0.0, |max, x| x.abs().max(max));
                        let sizes = vec![largest; expected.len()];
                        assert_close(found, &expected, &sizes, float, &what);
                    }
                }
            }
        }
    }

    #[test]
    fn which_rows_have_a_kernel() {
        for float in [dtype::<f32>(), dtype::<half::f16>(), dtype::<half::bf16>()] {
            for (cols, expected) in [
                (0, false),
                (1, true),
                (MAX_COLS, true),
                (MAX_COLS + 1, false),
            ] {
                assert_eq!(has_rms_norm(float, cols), expected, "{float} {cols}");
            }
        }
        assert!(!has_rms_norm(dtype::<f64>(), 4));
        assert!(!has_rms_norm(dtype::<i32>(), 4));
    }

    #[test]
    fn empty_inputs() {
        let client = client();
        let none = upload(&client, &[], &[2, 0, 4], dtype::<f32>());
        let gain = upload(&client, &[1.0; 4], &[4], dtype::<f32>());
        let forward = kernel(&client, &none, &gain, 1e-6).expect("rows and a gain");
        assert_eq!(forward.output.shape()[..], [2, 0, 4]);
        assert_eq!(forward.inverse_rms.shape()[..], [0]);
        let roots = &forward.inverse_rms;
        let gradients = backward_kernel(&client, &none, &gain, roots, &none);
        let gradients = gradients.expect("what had a forward pass");
        assert_eq!(gradients.input.shape()[..], [2, 0, 4]);
        assert_eq!(sum_of_parts(&client, &gradients), [0.0; 4]);
    }

    #[test]
    fn bad_inputs() {
        let client = client();
        let ones = |shape: &[usize]| {
            let len = shape.iter().product();
            upload(&client, &vec![1.0; len], shape, dtype::<f32>())
        };
        let (x, gain, roots) = (ones(&[2, 3]), ones(&[3]), ones(&[2]));
        let integers = upload_i32(&client, &[1; 6], &[2, 3]);
        let transposed =
            TensorHandle::new(ones(&[3, 2]).handle, vec![2, 3], vec![1, 2], dtype::<f32>());
        let errors = |x: &Tensor, gain: &Tensor| {
            let forward = kernel(&client, x, gain, 1e-6).unwrap_err();
            let backward = backward_kernel(&client, x, gain, &roots, x).unwrap_err();
            [forward, backward]
        };
        let too_wide = ones(&[2, MAX_COLS + 1]);
        for (x, gain) in [
            (&x, &ones(&[2])),
            (&x, &ones(&[6])),
            (&x, &ones(&[0])),
            (&ones(&[2, 0]), &ones(&[0])),
            (&too_wide, &ones(&[MAX_COLS + 1])),
            (&transposed, &gain),
        ] {
            for error in errors(x, gain) {
                assert!(matches!(error, KernelError::Shape { .. }), "{error}");
            }
        }
        for error in errors(&transposed, &gain) {
            assert!(error.to_string().contains("contiguous"), "{error}");
        }
        for (x, gain) in [
            (&integers, &gain),
            (&x, &upload_i32(&client, &[1; 3], &[3])),
        ] {
            for error in errors(x, gain) {
                assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
            }
        }
        let backward = |roots: &Tensor, gradient: &Tensor| {
            backward_kernel(&client, &x, &gain, roots, gradient).unwrap_err()
        };
        for (roots, gradient) in [
            (&ones(&[3]), &x),
            (&roots, &ones(&[3, 2])),
            (&roots, &transposed),
            (&roots, &integers),
        ] {
            let error = backward(roots, gradient);
            assert!(matches!(error, KernelError::Shape { .. }), "{error}");
        }
        let error = backward(&upload_i32(&client, &[1; 2], &[2]), &x);
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    }
}
