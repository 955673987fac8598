//! The common part of both normalizations' tests: their rows, the bounds of results, and the inputs that must be
//! refused.

/// Asserts that these are the derivatives of `loss` at `values`, by central differences.
#[track_caller]
pub fn assert_slopes(slopes: &[f64], values: &[f64], what: &str, loss: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    assert_eq!(slopes.len(), values.len(), "{what}: length");
    for (index, slope) in slopes.iter().enumerate() {
        let at = |step: f64| {
            let mut values = values.to_vec();
            values[index] += step;
            loss(&values)
        };
        let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
        let error = (slope - expected).abs();
        assert!(
            error < 1e-6,
            "{what}[{index}]: {slope} instead of {expected}"
        );
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub mod on_device {
    use cubecl::{ir::StorageType, std::tensor::TensorHandle};
    use cubecl_kernels::{KernelError, rms_norm::MAX_COLS, shape::MatrixShape};

    use crate::{
        device::{
            Client, Tensor, client, drawn, dtype, float_types, read_float, rounded, upload,
            upload_i32,
        },
        random::Random,
    };

    /// The inputs of the kernels, as the device has them.
    pub struct Case {
        pub shape: Vec<usize>,
        pub x: Vec<f32>,
        pub gain: Vec<f32>,
        pub gradient: Vec<f32>,
        pub epsilon: f32,
        pub float: StorageType,
        pub gain_float: StorageType,
    }

    impl Case {
        /// Ordinary gains and gradients for these rows.
        pub fn new(
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

        pub fn tensors(&self, client: &Client) -> [Tensor; 3] {
            let cols = self.gain.len();
            [
                upload(client, &self.x, &self.shape, self.float),
                upload(client, &self.gain, &[cols], self.gain_float),
                upload(client, &self.gradient, &self.shape, self.float),
            ]
        }

        /// `x`, the gain and the gradient, as the reference takes them.
        pub fn wide(&self) -> [Vec<f64>; 3] {
            [&self.x, &self.gain, &self.gradient].map(|values| wide(values))
        }

        pub fn what(&self) -> String {
            format!(
                "{} {:?}, gain {}, epsilon {:e}",
                self.float, self.shape, self.gain_float, self.epsilon
            )
        }
    }

    pub fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().copied().map(f64::from).collect()
    }

    /// `sizes` are those of an element's terms, where they are larger than the element.
    #[track_caller]
    pub fn assert_close(
        actual: &[f32],
        expected: &[f64],
        sizes: &[f64],
        float: StorageType,
        what: &str,
    ) {
        assert_close_after(1.0, actual, expected, sizes, float, what);
    }

    /// [`assert_close`] after so many roundings to the type.
    #[track_caller]
    fn assert_close_after(
        roundings: f64,
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
            let allowed = roundings * relative * e.abs() + 3e-6 * e.abs().max(*size) + smallest;
            assert!(
                (f64::from(a) - e).abs() <= allowed
                    || f64::from(a) == e
                    || (a.is_nan() && e.is_nan()),
                "{what} [{index}]: {a:e} instead of {e:e}"
            );
        }
    }

    /// [`assert_close`] for two results of a kernel, each rounded. Vectors of another width make another order of sums.
    #[track_caller]
    pub fn assert_same_but_for_order(
        actual: &[f32],
        expected: &[f32],
        float: StorageType,
        what: &str,
    ) {
        let expected = wide(expected);
        let largest = expected.iter().fold(0.0, |max, x| x.abs().max(max));
        let sizes = vec![largest; expected.len()];
        assert_close_after(2.0, actual, &expected, &sizes, float, what);
    }

    /// A gradient that a backward pass left in parts `[parts, cols]`.
    pub fn sum_of_parts(client: &Client, gradient: &Tensor) -> Vec<f32> {
        assert_eq!(gradient.dtype, dtype::<f32>());
        let (parts, cols) = (gradient.shape()[0], gradient.shape()[1]);
        assert!(parts > 0);
        let values = read_float(client, gradient);
        let sum = |col| -> f64 {
            let of_col = (0..parts).map(|part| f64::from(values[part * cols + col]));
            of_col.sum()
        };
        (0..cols).map(|col| sum(col) as f32).collect()
    }

    /// Each float type with a gain of each.
    pub fn types(client: &Client) -> Vec<[StorageType; 2]> {
        let floats = float_types(client);
        let pairs = |&float: &StorageType| floats.iter().map(move |&gain| [float, gain]);
        floats.iter().flat_map(pairs).collect()
    }

    /// Matrices and the types of them and of the gain: vectors of every width, whole and part planes, several of them,
    /// as many elements as there may be, and all types in turn; or some widths and types that are drawn.
    pub fn matrices(random: &mut Random) -> Vec<([usize; 2], [StorageType; 2])> {
        const COLS: [usize; 14] = [
            1, 3, 7, 16, 64, 129, 768, 1000, 1026, 1536, 2048, 4096, 8191, 8192,
        ];
        let types = drawn(random, types(&client()), 2);
        let mut turns = types.iter().cycle();
        let mut matrices = Vec::new();
        for cols in drawn(random, COLS, 2) {
            // A kernel for long rows takes a software driver long to compile, and a cube takes one of them at a time.
            for rows in [0, 1, 5, 300] {
                let takes = match (cols > 1000, rows) {
                    (true, 1) => 0,
                    (true, _) | (false, 300) => 1,
                    (false, _) => types.len(),
                };
                let of_shape = turns.by_ref().take(takes);
                matrices.extend(of_shape.map(|&types| ([rows, cols], types)));
            }
        }
        matrices
    }

    /// Groups, and matrices that have rows of them.
    pub const COPIED_ROWS: [(usize, [usize; 2]); 7] = [
        (16, [1, 16]),
        (16, [37, 48]),
        (32, [61, 96]),
        (128, [33, 768]),
        (128, [5, 1152]),
        (512, [3, 4096]),
        (128, [0, 128]),
    ];

    /// More rows than the cubes of a backward pass take at a time, other shapes and epsilons.
    pub const MANY_ROWS: [(&[usize], f32); 4] = [
        (&[40_001, 8], 1e-6),
        (&[20, 150, 96], 1e-3),
        (&[1030, 1030], 0.0),
        (&[5], 1e-6),
    ];

    /// Outliers, denormals, zeros, a whole row of them, NaN and infinities.
    pub fn special_rows(random: &mut Random, shape: [usize; 2]) -> Vec<f32> {
        let mut x = random.with_special_values(MatrixShape::new(shape[0], shape[1]));
        for x in &mut x {
            // Its square overflows, in FP32 alone.
            if x.is_finite() && x.abs() > 1e18 {
                *x = 1e4;
            }
        }
        x[..shape[1]].fill(0.0);
        x
    }

    /// Results that must have the same bits each time.
    #[track_caller]
    pub fn assert_repeats<const N: usize>(results: impl Fn() -> [Vec<f32>; N], what: &str) {
        let first = results();
        for _ in 0..3 {
            assert!(results() == first, "{what}");
        }
    }

    /// Which rows must have a kernel.
    #[track_caller]
    pub fn assert_takes_rows(has_kernel: fn(StorageType, usize) -> bool) {
        for float in [dtype::<f32>(), dtype::<half::f16>(), dtype::<half::bf16>()] {
            for (cols, expected) in [
                (0, false),
                (1, true),
                (MAX_COLS, true),
                (MAX_COLS + 1, false),
            ] {
                assert_eq!(has_kernel(float, cols), expected, "{float} {cols}");
            }
        }
        assert!(!has_kernel(dtype::<f64>(), 4));
        assert!(!has_kernel(dtype::<i32>(), 4));
    }

    /// A contiguous tensor of ones.
    pub fn ones(client: &Client, shape: &[usize]) -> Tensor {
        let len = shape.iter().product();
        upload(client, &vec![1.0; len], shape, dtype::<f32>())
    }

    /// A matrix `[2, 3]` that is not contiguous.
    fn transposed(client: &Client) -> Tensor {
        let handle = ones(client, &[3, 2]).handle;
        TensorHandle::new(handle, vec![2, 3], vec![1, 2], dtype::<f32>())
    }

    #[track_caller]
    pub fn assert_shape_error(error: &KernelError) {
        assert!(matches!(error, KernelError::Shape { .. }), "{error}");
    }

    #[track_caller]
    pub fn assert_dtype_error(error: &KernelError) {
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    }

    /// The errors of both passes, for rows and gains that no kernel takes.
    #[track_caller]
    pub fn assert_refuses_rows(
        client: &Client,
        errors: impl Fn(&Tensor, &Tensor) -> [KernelError; 2],
    ) {
        let ones = |shape: &[usize]| ones(client, shape);
        let (x, gain, transposed) = (ones(&[2, 3]), ones(&[3]), transposed(client));
        for (x, gain) in [
            (&x, &ones(&[2])),
            (&x, &ones(&[6])),
            (&x, &ones(&[0])),
            (&ones(&[2, 0]), &ones(&[0])),
            (&ones(&[2, MAX_COLS + 1]), &ones(&[MAX_COLS + 1])),
            (&transposed, &gain),
        ] {
            errors(x, gain).iter().for_each(assert_shape_error);
        }
        for error in errors(&transposed, &gain) {
            assert!(error.to_string().contains("contiguous"), "{error}");
        }
        let integers = |shape: &[usize]| upload_i32(client, &[1; 6], shape);
        for (x, gain) in [(&integers(&[2, 3]), &gain), (&x, &integers(&[3]))] {
            errors(x, gain).iter().for_each(assert_dtype_error);
        }
    }

    /// The error of a backward pass of ones `[2, 3]`, for numbers of each row and gradients that do not fit.
    #[track_caller]
    pub fn assert_refuses_gradients(
        client: &Client,
        error: impl Fn(&Tensor, &Tensor) -> KernelError,
    ) {
        let ones = |shape: &[usize]| ones(client, shape);
        let integers = |shape: &[usize]| upload_i32(client, &[1; 6], shape);
        let (of_rows, gradient) = (ones(&[2]), ones(&[2, 3]));
        for (of_rows, gradient) in [
            (&ones(&[3]), &gradient),
            (&of_rows, &ones(&[3, 2])),
            (&of_rows, &transposed(client)),
        ] {
            assert_shape_error(&error(of_rows, gradient));
        }
        assert_dtype_error(&error(&integers(&[2]), &gradient));
        assert_dtype_error(&error(&of_rows, &integers(&[2, 3])));
    }
}
