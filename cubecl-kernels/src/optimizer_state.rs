//! Moments of an optimizer in 8 bits: a code for each value, and a scale for each group of neighbours (coat-fp8,
//! sections 3 and 4; Dettmers et al., "8-bit Optimizers via Block-wise Quantization").
//!
//! A *state* is one moment of one parameter tensor. Its groups are stretches of the flattened tensor; the last one may
//! be shorter. Without expansion a value is `number(code) * scale`, where `number` is the encoding's and the scale is
//! `largest magnitude / largest number`. With [dynamic range expansion](crate::dynamic_range_expansion) the scale is
//! the largest magnitude itself, and one more byte holds the group's exponent.
//!
//! Three rules go beyond that:
//!
//! - **A second moment that is not zero never becomes zero**, but the smallest number of its encoding. Adam divides by
//!   its root: beside a first moment that survived, a zero would make the step `m / epsilon`, a hundred million times
//!   `m`. The smallest number errs towards a small step.
//! - **INT8 holds the root of a second moment**, 0 to 255, for the same reason: a group's second moments span the
//!   square of the range of its gradients, and linear steps would round most of them to zero. The numbers are
//!   `level^2`, and the code of a value is the level whose distance to the value's root is smallest.
//! - A group that holds NaN or an infinity dequantizes to NaN. A group whose largest magnitude is below
//!   [`MIN_ABSMAX`](crate::scale::MIN_ABSMAX) is all zeros, of scale 0, and so is a value below [`MIN_NONZERO`]: the
//!   root of such a second moment is below 1e-15, nothing beside any epsilon in use.

use std::fmt;

use cubecl::{prelude::*, std::tensor::TensorHandle};
use serde::{Deserialize, Serialize};

use crate::{
    device::{check_contiguous, check_dtype, empty, is_contiguous, storage},
    error::KernelError,
    number::{Arithmetic, Number, Signedness},
};

pub(crate) mod arrays;
mod code;
pub(crate) mod group;
pub(crate) mod group_scale;
pub(crate) mod kernel;
pub(crate) mod span;
pub(crate) mod table;

/// Magnitudes below this, 2^-124, count as zero: a quarter of one is still a normal `f32` on devices that flush others.
pub const MIN_NONZERO: f32 = f32::from_bits((127 - 124) << 23);

/// The exponent, in eighths, of a group without a range of its own, of zeros or not finite: `k = 1`.
pub const NEUTRAL_EXPONENT: u8 = 8;

/// Largest group.
pub const MAX_GROUP: usize = 2048;

/// The numbers that the 256 codes of a state stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Encoding {
    /// [`Number::E4M3`], the same codes for both moments.
    E4M3,
    /// [`Number::E5M2`], the same codes for both moments.
    E5M2,
    /// [`Number::DynamicExponent`]: signed for the first moment, unsigned for the second.
    DynamicExponent,
    /// First moment: [`Number::Int8`]. Second moment: [`Number::Square`].
    Int8,
}

/// Which moment of the gradient a state holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Moment {
    /// The mean of the gradients: of either sign.
    First,
    /// The mean of their squares: never negative. A sign is dropped.
    Second,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::First => "first moment",
            Self::Second => "second moment",
        })
    }
}

/// How a state is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StateFormat {
    /// The meaning of a code.
    pub encoding: Encoding,
    /// True where dynamic range expansion comes before it.
    pub expand: bool,
    /// Elements that share a scale. In kernels a multiple of 4 up to [`MAX_GROUP`].
    pub group: usize,
}

/// As in `E4M3 1x128, expanded`.
impl fmt::Display for StateFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encoding = match self.encoding {
            Encoding::E4M3 => "E4M3",
            Encoding::E5M2 => "E5M2",
            Encoding::DynamicExponent => "dynamic exponent",
            Encoding::Int8 => "INT8",
        };
        let expanded = if self.expand { ", expanded" } else { "" };
        write!(f, "{encoding} 1x{}{expanded}", self.group)
    }
}

impl Encoding {
    /// The numbers of a moment.
    pub const fn number(self, moment: Moment) -> Number {
        match (self, moment) {
            (Encoding::E4M3, Moment::First | Moment::Second) => Number::E4M3,
            (Encoding::E5M2, Moment::First | Moment::Second) => Number::E5M2,
            (Encoding::DynamicExponent, Moment::First) => {
                Number::DynamicExponent(Signedness::Signed)
            }
            (Encoding::DynamicExponent, Moment::Second) => {
                Number::DynamicExponent(Signedness::Unsigned)
            }
            (Encoding::Int8, Moment::First) => Number::Int8,
            (Encoding::Int8, Moment::Second) => Number::Square,
        }
    }

    pub(crate) const fn arithmetic(self, moment: Moment) -> Arithmetic {
        self.number(moment).arithmetic()
    }

    /// The largest number of the encoding, that of the group's largest magnitude.
    pub const fn largest(self, moment: Moment) -> f32 {
        self.number(moment).largest()
    }

    /// The smallest positive number of the encoding.
    pub const fn smallest(self, moment: Moment) -> f32 {
        self.number(moment).smallest()
    }

    /// The base-2 logarithm of the ratio of the two: the range that expansion stretches a group to.
    pub fn range_log2(self, moment: Moment) -> f32 {
        let range = f64::from(self.largest(moment)) / f64::from(self.smallest(moment));
        range.log2() as f32
    }

    /// The code of zero.
    pub const fn zero(self, moment: Moment) -> u8 {
        self.number(moment).zero() as u8
    }
}

impl StateFormat {
    /// E4M3, 1 x 128.
    pub const E4M3: Self = Self::new(Encoding::E4M3, 128);
    /// E5M2, 1 x 128.
    pub const E5M2: Self = Self::new(Encoding::E5M2, 128);
    /// The dynamic exponent format, 1 x 128.
    pub const DYNAMIC_EXPONENT: Self = Self::new(Encoding::DynamicExponent, 128);
    /// INT8, 1 x 2048.
    pub const INT8: Self = Self::new(Encoding::Int8, 2048);

    const fn new(encoding: Encoding, group: usize) -> Self {
        Self {
            encoding,
            expand: false,
            group,
        }
    }

    /// The same with dynamic range expansion.
    pub const fn expanded(self) -> Self {
        Self {
            expand: true,
            ..self
        }
    }

    /// The same with a scale for each `group` elements.
    pub const fn with_group(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// Groups of a state of `elements` elements.
    pub fn groups(&self, elements: usize) -> usize {
        elements.div_ceil(self.group)
    }

    /// Bytes of a state of `elements` elements, scales and exponents included.
    pub fn bytes(&self, elements: usize) -> usize {
        elements + self.groups(elements) * (4 + usize::from(self.expand))
    }

    /// The number that the largest magnitude of a group becomes before it is encoded: the largest one, or 1 before
    /// expansion.
    pub(crate) const fn target(&self, moment: Moment) -> f32 {
        if self.expand {
            1.0
        } else {
            self.encoding.largest(moment)
        }
    }

    /// The factor of values before the group's inverse, which is as much larger: so that the inverse of the largest
    /// float is still a normal one.
    pub(crate) const fn headroom(&self, moment: Moment) -> f32 {
        if self.target(moment) == 1.0 {
            0.25
        } else {
            1.0
        }
    }
}

/// A state on the device.
#[derive(Debug)]
pub struct StateTensor<R: Runtime> {
    /// The codes, u8, or the values, f32, where there is no format. Of the parameter's shape, contiguous.
    pub values: TensorHandle<R>,
    /// f32 `[groups]`; `None` without a format.
    pub scales: Option<TensorHandle<R>>,
    /// u8 `[groups]`, the exponents in eighths; `None` without expansion.
    pub exponents: Option<TensorHandle<R>>,
    /// How the values are compressed; `None`: they are f32.
    pub format: Option<StateFormat>,
    /// Which moment they are.
    pub moment: Moment,
}

impl<R: Runtime> Clone for StateTensor<R> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            scales: self.scales.clone(),
            exponents: self.exponents.clone(),
            format: self.format,
            moment: self.moment,
        }
    }
}

impl<R: Runtime> StateTensor<R> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.values.shape().iter().product()
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that the tensors are those that the format asks for.
    pub(crate) fn check(&self, operation: &'static str) -> Result<(), KernelError> {
        let len = check_contiguous(operation, &self.values)?;
        let Some(format) = self.format else {
            return check_dtype(
                operation,
                "a state",
                &self.values,
                storage::<f32>(),
                "use f32",
            );
        };
        check_format(operation, format)?;
        check_dtype(
            operation,
            "a state",
            &self.values,
            storage::<u8>(),
            "pass u8 codes",
        )?;
        let groups = format.groups(len);
        let of_groups = |tensor: &Option<TensorHandle<R>>, dtype| {
            tensor.as_ref().is_some_and(|tensor| {
                tensor.dtype == dtype
                    && tensor.shape().iter().product::<usize>() == groups
                    && is_contiguous(tensor)
            })
        };
        if of_groups(&self.scales, storage::<f32>())
            && (!format.expand || of_groups(&self.exponents, storage::<u8>()))
        {
            return Ok(());
        }
        let shape = |tensor: &Option<TensorHandle<R>>| {
            tensor
                .as_ref()
                .map(|tensor| (tensor.shape().to_vec(), tensor.dtype))
        };
        Err(KernelError::Shape {
            operation,
            got: format!(
                "a state of {len} elements in {format:?} with scales {:?} and exponents {:?}",
                shape(&self.scales),
                shape(&self.exponents)
            ),
            remedy: "pass contiguous f32 scales [groups] and, with expansion, u8 exponents [groups]",
        })
    }
}

/// Accepts the groups that kernels are written for.
pub(crate) fn check_format(
    operation: &'static str,
    format: StateFormat,
) -> Result<(), KernelError> {
    if format.group % 4 == 0 && (4..=MAX_GROUP).contains(&format.group) {
        return Ok(());
    }
    Err(KernelError::Unsupported {
        operation,
        reason: format!("groups of {}", format.group),
        remedy: "use a multiple of 4 from 4 to 2048",
    })
}

/// A state of zeros, as before the first step, of a parameter of this shape. Its format is `None` for f32.
///
/// # Errors
///
/// When the format's group is not one that kernels are written for.
pub fn initial_state<R: Runtime>(
    client: &ComputeClient<R>,
    shape: &[usize],
    format: Option<StateFormat>,
    moment: Moment,
) -> Result<StateTensor<R>, KernelError> {
    if let Some(format) = format {
        check_format("initial_state", format)?;
    }
    let state = allocate(client, shape, format, moment);
    kernel::zero(client, &state);
    Ok(state)
}

/// A state whose contents are undefined.
fn allocate<R: Runtime>(
    client: &ComputeClient<R>,
    shape: &[usize],
    format: Option<StateFormat>,
    moment: Moment,
) -> StateTensor<R> {
    let groups = format.map_or(0, |format| format.groups(shape.iter().product()));
    let dtype = match format {
        Some(_) => storage::<u8>(),
        None => storage::<f32>(),
    };
    StateTensor {
        values: empty(client, shape.to_vec(), dtype),
        scales: format.map(|_| empty(client, vec![groups], storage::<f32>())),
        exponents: format
            .filter(|format| format.expand)
            .map(|_| empty(client, vec![groups], storage::<u8>())),
        format,
        moment,
    }
}

/// Compresses `x`, one moment of a tensor, as
/// [`reference::optimizer_state::quantize_state`](crate::reference::optimizer_state::quantize_state) does: to the bit
/// without expansion, and with it up to one code where a value lies half way between two.
///
/// - `x`: f32, contiguous, of any shape.
///
/// # Errors
///
/// When `x` is of another element type or not contiguous, or the format's group is not one that kernels are written
/// for.
pub fn quantize_state<R: Runtime>(
    client: &ComputeClient<R>,
    x: &TensorHandle<R>,
    format: StateFormat,
    moment: Moment,
) -> Result<StateTensor<R>, KernelError> {
    const OPERATION: &str = "quantize_state";
    check_dtype(OPERATION, "x", x, storage::<f32>(), "cast it to f32")?;
    check_contiguous(OPERATION, x)?;
    check_format(OPERATION, format)?;
    let state = allocate(client, x.shape(), Some(format), moment);
    // SAFETY: `x` was checked, and the state was allocated for its shape.
    #[allow(unsafe_code)]
    unsafe {
        kernel::quantize(client, x, &state, format)?;
    }
    Ok(state)
}

/// The values of a state: f32, of its shape. An f32 state is copied.
///
/// # Errors
///
/// When the state's tensors are not those of its format.
pub fn dequantize_state<R: Runtime>(
    client: &ComputeClient<R>,
    state: &StateTensor<R>,
) -> Result<TensorHandle<R>, KernelError> {
    state.check("dequantize_state")?;
    let out = empty(client, state.values.shape().to_vec(), storage::<f32>());
    // SAFETY: the state was checked, and `out` was allocated for its shape.
    #[allow(unsafe_code)]
    unsafe {
        kernel::dequantize(client, state, &out)?;
    }
    Ok(out)
}
