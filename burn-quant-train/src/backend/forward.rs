//! The macro that turns one line per operation into a forwarding method.

/// Forwards operations to the inner backend.
///
/// Each line is an operation of one of Burn's traits: its name, the kind of every argument and of the result, and,
/// after `=>`, its [precision class](crate::precision::Class); a line without one leaves dtypes alone. So the table of
/// classes *is* the code, and a reader compares it with the book's line by line.
///
/// Kinds: `Float`, `FloatRef`, `OptFloat`, `Floats` (a vector), `FloatPair`, `FloatAndInt`, `Int`, `Bool`, `Quant`,
/// `Primitive` (float or quantized), and any other type in parentheses.
macro_rules! forward {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)?; )*) => { $(
        fn $name($($arg: forward!(@type $kind)),*) -> forward!(@type $ret) {
            forward!(@body $name ($($arg: $kind),*) -> $ret $(=> $class)?)
        }
    )* };

    (@body $name:ident ($($arg:ident: $kind:tt),*) -> $ret:tt) => {{
        $( let $arg = forward!(@lower $kind $arg); )*
        forward!(@lift $ret B::$name($($arg),*))
    }};
    (@body $name:ident ($($arg:ident: $kind:tt),*) -> $ret:tt => $class:ident) => {{
        $( let $arg = forward!(@lower $kind $arg); )*
        let mut dtypes = crate::precision::Dtypes::default();
        $( forward!(@see $kind dtypes $arg); )*
        let target = crate::precision::Class::$class.target(R::ROW.compute, &dtypes);
        $( let $arg = forward!(@cast $kind target $arg); )*
        forward!(@lift $ret B::$name($($arg),*))
    }};

    (@type Float) => { FloatTensor<Self> };
    (@type FloatRef) => { &FloatTensor<Self> };
    (@type OptFloat) => { Option<FloatTensor<Self>> };
    (@type Floats) => { Vec<FloatTensor<Self>> };
    (@type FloatPair) => { (FloatTensor<Self>, FloatTensor<Self>) };
    (@type FloatAndInt) => { (FloatTensor<Self>, IntTensor<Self>) };
    (@type Int) => { IntTensor<Self> };
    (@type Bool) => { BoolTensor<Self> };
    (@type Quant) => { QuantizedTensor<Self> };
    (@type Primitive) => { TensorPrimitive<Self> };
    (@type ($t:ty)) => { $t };

    (@lower Float $x:expr) => { $x.into_primitive() };
    (@lower FloatRef $x:expr) => { $x.primitive() };
    (@lower OptFloat $x:expr) => { $x.map(crate::tensor::QuantTensor::into_primitive) };
    (@lower Floats $x:expr) => {
        $x.into_iter().map(crate::tensor::QuantTensor::into_primitive).collect::<Vec<_>>()
    };
    (@lower Primitive $x:expr) => { crate::tensor::lower_primitive::<B, R>($x) };
    (@lower $other:tt $x:expr) => { $x };

    (@lift Float $x:expr) => { crate::tensor::QuantTensor::new($x) };
    (@lift FloatPair $x:expr) => {{
        let (first, second) = $x;
        (crate::tensor::QuantTensor::new(first), crate::tensor::QuantTensor::new(second))
    }};
    (@lift FloatAndInt $x:expr) => {{
        let (values, indices) = $x;
        (crate::tensor::QuantTensor::new(values), indices)
    }};
    (@lift Primitive $x:expr) => { crate::tensor::lift_primitive::<B, R>($x) };
    (@lift $other:tt $x:expr) => { $x };

    (@see Float $dtypes:ident $x:ident) => { $dtypes.see(&$x) };
    (@see OptFloat $dtypes:ident $x:ident) => { if let Some(x) = &$x { $dtypes.see(x) } };
    (@see Floats $dtypes:ident $x:ident) => { for x in &$x { $dtypes.see(x) } };
    (@see $other:tt $dtypes:ident $x:ident) => {};

    (@cast Float $target:ident $x:ident) => { crate::precision::cast_to::<B>($x, $target) };
    (@cast OptFloat $target:ident $x:ident) => { $x.map(|x| crate::precision::cast_to::<B>(x, $target)) };
    (@cast Floats $target:ident $x:ident) => {
        $x.into_iter().map(|x| crate::precision::cast_to::<B>(x, $target)).collect::<Vec<_>>()
    };
    (@cast $other:tt $target:ident $x:ident) => { $x };
}

pub(crate) use forward;
