//! The macro that turns one line per operation into a method of [`Held`](super::Held).

/// Runs operations of [the tables](crate::operations) on the values of cells.
macro_rules! forward {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)? $([ $($mark:tt)* ])?; )*) => { $(
        fn $name($($arg: forward!(@type $kind)),*) -> forward!(@type $ret) {
            forward!(@exact $($($mark)*)?);
            let _origin = forward!(@origin $ret [ $($($mark)*)? ] $name($($arg: $kind),*));
            $( let $arg = forward!(@lower $kind $arg); )*
            forward!(@lift $ret [ $($($mark)*)? ] $name _origin B::$name($($arg),*))
        }
    )* };

    (@exact exact output) => {};
    (@exact exact: $($x:ident)+) => {
        if crate::saved::scope::context().is_some() {
            $( $x.cell().keep_exact(); )+
        }
    };
    (@exact again over small, exact: $x:ident) => { forward!(@exact exact: $x) };
    (@exact again, exact: $x:ident) => { forward!(@exact exact: $x) };
    (@exact $($mark:tt)*) => {};

    (@origin Float [ $($mark:tt)* ] $name:ident($($arg:ident: $kind:tt),*)) => {
        crate::saved::scope::context().is_some().then(|| {
            let operands = [ $( forward!(@note $kind $arg) ),* ];
            let origin = crate::saved::again::Origin::of(operands.into_iter().flatten());
            forward!(@again [ $($mark)* ] origin $name($($arg: $kind),*))
        })
    };
    (@origin $ret:tt [ $($mark:tt)* ] $name:ident($($arg:ident: $kind:tt),*)) => { () };

    (@again [ again if exact ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => {
        $origin.again(crate::saved::again::From::Exact, forward!(@closure $name($($arg: $kind),*)))
    };
    (@again [ again over small, $($mark:tt)* ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => {
        $origin.again(crate::saved::again::From::OverSmall, forward!(@closure $name($($arg: $kind),*)))
    };
    (@again [ again $($mark:tt)* ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => {
        $origin.again(crate::saved::again::From::Any, forward!(@closure $name($($arg: $kind),*)))
    };
    (@again [ $($mark:tt)* ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => { $origin };

    (@closure $name:ident($($arg:ident: $kind:tt),*)) => {{
        $( let $arg = forward!(@own $kind $arg); )*
        move |values: Vec<_>| {
            let mut _values = values.into_iter();
            $( let $arg = forward!(@lend $kind _values $arg); )*
            B::$name($($arg),*)
        }
    }};

    (@note Float $x:ident) => { Some($x.cell()) };
    (@note $other:tt $x:ident) => { None::<&std::sync::Arc<crate::saved::Cell<B>>> };
    (@own Float $x:ident) => { () };
    (@own (&[$t:ty]) $x:ident) => { $x.to_vec() };
    (@own ($t:ty) $x:ident) => { $x.clone() };
    (@lend Float $values:ident $x:ident) => {{
        let () = $x;
        $values.next().expect("a computation has its operands")
    }};
    (@lend (&[$t:ty]) $values:ident $x:ident) => { $x.as_slice() };
    (@lend ($t:ty) $values:ident $x:ident) => { $x.clone() };

    (@type Float) => { FloatTensor<Self> };
    (@type OptFloat) => { Option<FloatTensor<Self>> };
    (@type Floats) => { Vec<FloatTensor<Self>> };
    (@type FloatPair) => { (FloatTensor<Self>, FloatTensor<Self>) };
    (@type FloatAndInt) => { (FloatTensor<Self>, IntTensor<Self>) };
    (@type Int) => { IntTensor<Self> };
    (@type Bool) => { BoolTensor<Self> };
    (@type Quant) => { QuantizedTensor<Self> };
    (@type Primitive) => { TensorPrimitive<Self> };
    (@type DeformConv2dBackward) => { DeformConv2dBackward<Self> };
    (@type MaxPool1dWithIndices) => { MaxPool1dWithIndices<Self> };
    (@type MaxPool1dBackward) => { MaxPool1dBackward<Self> };
    (@type MaxPool2dWithIndices) => { MaxPool2dWithIndices<Self> };
    (@type MaxPool2dBackward) => { MaxPool2dBackward<Self> };
    (@type ($t:ty)) => { $t };

    (@lower Float $x:expr) => { $x.into_value() };
    (@lower OptFloat $x:expr) => { $x.map(crate::saved::HeldTensor::into_value) };
    (@lower Floats $x:expr) => {
        $x.into_iter().map(crate::saved::HeldTensor::into_value).collect::<Vec<_>>()
    };
    (@lower Primitive $x:expr) => {
        match $x {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor.into_value()),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
        }
    };
    (@lower $other:tt $x:expr) => { $x };

    (@wrap $name:ident $x:expr) => { crate::saved::HeldTensor::of(stringify!($name), $x) };
    (@lift Float [ mask ] $name:ident $origin:ident $x:expr) => {{
        let _: Option<crate::saved::again::Origin<B>> = $origin;
        crate::saved::HeldTensor::mask(stringify!($name), $x)
    }};
    (@lift Float [ $($mark:tt)* ] $name:ident $origin:ident $x:expr) => {
        crate::saved::HeldTensor::made($x, stringify!($name), $origin)
    };
    (@lift $ret:tt [ $($mark:tt)* ] $name:ident $origin:ident $x:expr) => { forward!(@lift $ret $name $x) };
    (@lift FloatPair $name:ident $x:expr) => {{
        let (first, second) = $x;
        (forward!(@wrap $name first), forward!(@wrap $name second))
    }};
    (@lift FloatAndInt $name:ident $x:expr) => {{
        let (values, indices) = $x;
        (forward!(@wrap $name values), indices)
    }};
    (@lift Primitive $name:ident $x:expr) => {
        match $x {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(forward!(@wrap $name tensor)),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
        }
    };
    (@lift DeformConv2dBackward $name:ident $x:expr) => {{
        let gradients = $x;
        DeformConv2dBackward::new(
            forward!(@wrap $name gradients.x_grad),
            forward!(@wrap $name gradients.offset_grad),
            forward!(@wrap $name gradients.weight_grad),
            gradients.mask_grad.map(|gradient| forward!(@wrap $name gradient)),
            gradients.bias_grad.map(|gradient| forward!(@wrap $name gradient)),
        )
    }};
    (@lift MaxPool1dWithIndices $name:ident $x:expr) => {{
        let pooled = $x;
        MaxPool1dWithIndices::new(forward!(@wrap $name pooled.output), pooled.indices)
    }};
    (@lift MaxPool2dWithIndices $name:ident $x:expr) => {{
        let pooled = $x;
        MaxPool2dWithIndices::new(forward!(@wrap $name pooled.output), pooled.indices)
    }};
    (@lift MaxPool1dBackward $name:ident $x:expr) => {
        MaxPool1dBackward::new(forward!(@wrap $name $x.x_grad))
    };
    (@lift MaxPool2dBackward $name:ident $x:expr) => {
        MaxPool2dBackward::new(forward!(@wrap $name $x.x_grad))
    };
    (@lift $other:tt $name:ident $x:expr) => { $x };
}

pub(crate) use forward;
