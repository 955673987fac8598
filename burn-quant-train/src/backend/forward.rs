//! The macro that turns one line per operation into a forwarding method.

/// Forwards operations to the inner backend.
///
/// Each line is an operation of one of Burn's traits: its name, the kind of every argument and of the result, and,
/// after `=>`, its [precision class](super::precision::Class); a line without one leaves dtypes alone. So the table of
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
        let _origin = forward!(@origin $ret ($($arg: $kind),*));
        $( let $arg = forward!(@lower $kind $arg); )*
        forward!(@lift $ret _origin B::$name($($arg),*))
    }};
    (@body $name:ident ($($arg:ident: $kind:tt),*) -> $ret:tt => $class:ident) => {{
        let _origin = forward!(@origin $ret ($($arg: $kind),*));
        $( let $arg = forward!(@lower $kind $arg); )*
        let mut dtypes = crate::backend::precision::Dtypes::default();
        $( forward!(@see $kind dtypes $arg); )*
        let target = crate::backend::precision::Class::$class.target(R::ROW.compute, &dtypes);
        $( let $arg = forward!(@cast $kind target $arg); )*
        forward!(@lift $ret _origin B::$name($($arg),*))
    }};

    // A tensor remembers the layer from whose weight it was computed.
    (@origin Float ($($arg:ident: $kind:tt),*)) => {
        crate::backend::tensor::one_origin([ $( forward!(@origin_of $kind $arg) ),* ])
    };
    (@origin $other:tt ($($arg:ident: $kind:tt),*)) => { () };
    (@origin_of Float $x:ident) => { $x.origin() };
    (@origin_of $other:tt $x:ident) => { None };

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
    (@lower OptFloat $x:expr) => { $x.map(crate::backend::tensor::QuantTensor::into_primitive) };
    (@lower Floats $x:expr) => {
        $x.into_iter().map(crate::backend::tensor::QuantTensor::into_primitive).collect::<Vec<_>>()
    };
    (@lower Primitive $x:expr) => { crate::backend::tensor::lower_primitive::<B, R>($x) };
    (@lower $other:tt $x:expr) => { $x };

    (@lift Float $origin:ident $x:expr) => { crate::backend::tensor::QuantTensor::computed($x, $origin) };
    (@lift FloatPair $origin:ident $x:expr) => {{
        let (first, second) = $x;
        (crate::backend::tensor::QuantTensor::new(first), crate::backend::tensor::QuantTensor::new(second))
    }};
    (@lift FloatAndInt $origin:ident $x:expr) => {{
        let (values, indices) = $x;
        (crate::backend::tensor::QuantTensor::new(values), indices)
    }};
    (@lift Primitive $origin:ident $x:expr) => { crate::backend::tensor::lift_primitive::<B, R>($x) };
    (@lift $other:tt $origin:ident $x:expr) => { $x };

    (@see Float $dtypes:ident $x:ident) => { $dtypes.see(&$x) };
    (@see OptFloat $dtypes:ident $x:ident) => { if let Some(x) = &$x { $dtypes.see(x) } };
    (@see Floats $dtypes:ident $x:ident) => { for x in &$x { $dtypes.see(x) } };
    (@see $other:tt $dtypes:ident $x:ident) => {};

    (@cast Float $target:ident $x:ident) => { crate::data::cast_to::<B>($x, $target) };
    (@cast OptFloat $target:ident $x:ident) => { $x.map(|x| crate::data::cast_to::<B>(x, $target)) };
    (@cast Floats $target:ident $x:ident) => {
        $x.into_iter().map(|x| crate::data::cast_to::<B>(x, $target)).collect::<Vec<_>>()
    };
    (@cast $other:tt $target:ident $x:ident) => { $x };
}

pub(crate) use forward;
