//! Kinds of arguments and results, as the types of Burn's traits, and what is inside them.

/// The type of a kind.
macro_rules! kind_type {
    (Float) => { FloatTensor<Self> };
    (OptFloat) => { Option<FloatTensor<Self>> };
    (Floats) => { Vec<FloatTensor<Self>> };
    (FloatPair) => { (FloatTensor<Self>, FloatTensor<Self>) };
    (FloatAndInt) => { (FloatTensor<Self>, IntTensor<Self>) };
    (Int) => { IntTensor<Self> };
    (Bool) => { BoolTensor<Self> };
    (Quant) => { QuantizedTensor<Self> };
    (Primitive) => { TensorPrimitive<Self> };
    (DeformConv2dBackward) => { DeformConv2dBackward<Self> };
    (MaxPool1dWithIndices) => { MaxPool1dWithIndices<Self> };
    (MaxPool1dBackward) => { MaxPool1dBackward<Self> };
    (MaxPool2dWithIndices) => { MaxPool2dWithIndices<Self> };
    (MaxPool2dBackward) => { MaxPool2dBackward<Self> };
    (($t:ty)) => { $t };
}

/// An argument of a kind, its float tensors unwrapped by a function.
macro_rules! unwrap_kind {
    (Float, $unwrap:expr, $x:expr) => {
        $unwrap($x)
    };
    (OptFloat, $unwrap:expr, $x:expr) => {
        $x.map($unwrap)
    };
    (Floats, $unwrap:expr, $x:expr) => {
        $x.into_iter().map($unwrap).collect::<Vec<_>>()
    };
    (Primitive, $unwrap:expr, $x:expr) => {
        match $x {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float($unwrap(tensor)),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
        }
    };
    ($other:tt, $unwrap:expr, $x:expr) => {
        $x
    };
}

/// A result of a kind other than `Float`, its float tensors wrapped by a function.
macro_rules! wrap_kind {
    (FloatPair, $wrap:expr, $x:expr) => {{
        let (first, second) = $x;
        ($wrap(first), $wrap(second))
    }};
    (FloatAndInt, $wrap:expr, $x:expr) => {{
        let (values, indices) = $x;
        ($wrap(values), indices)
    }};
    (Primitive, $wrap:expr, $x:expr) => {
        crate::operations::unwrap_kind!(Primitive, $wrap, $x)
    };
    (DeformConv2dBackward, $wrap:expr, $x:expr) => {{
        let gradients = $x;
        DeformConv2dBackward::new(
            $wrap(gradients.x_grad),
            $wrap(gradients.offset_grad),
            $wrap(gradients.weight_grad),
            gradients.mask_grad.map($wrap),
            gradients.bias_grad.map($wrap),
        )
    }};
    (MaxPool1dWithIndices, $wrap:expr, $x:expr) => {{
        let pooled = $x;
        MaxPool1dWithIndices::new($wrap(pooled.output), pooled.indices)
    }};
    (MaxPool2dWithIndices, $wrap:expr, $x:expr) => {{
        let pooled = $x;
        MaxPool2dWithIndices::new($wrap(pooled.output), pooled.indices)
    }};
    (MaxPool1dBackward, $wrap:expr, $x:expr) => {
        MaxPool1dBackward::new($wrap($x.x_grad))
    };
    (MaxPool2dBackward, $wrap:expr, $x:expr) => {
        MaxPool2dBackward::new($wrap($x.x_grad))
    };
    ($other:tt, $wrap:expr, $x:expr) => {
        $x
    };
}

pub(crate) use {kind_type, unwrap_kind, wrap_kind};
