//! The macro that turns one line per operation into a forwarding method.

/// Forwards operations of [the tables](crate::operations) to the backend inside, in the dtypes of their precision
/// classes. A line without a class leaves dtypes alone.
macro_rules! forward {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)? $([ $($mark:tt)* ])?; )*) => { $(
        fn $name(
            $($arg: crate::operations::kind_type!($kind)),*
        ) -> crate::operations::kind_type!($ret) {
            let _scope = Self::scope();
            forward!(@before $($class)?; $($($mark)*)?);
            let result = forward!(@body $name ($($arg: $kind),*) -> $ret $(=> $class)?);
            forward!(@mark $ret result $($($mark)*)?);
            result
        }
    )* };

    (@body $name:ident ($($arg:ident: $kind:tt),*) -> $ret:tt) => {{
        let _origin = forward!(@origin $ret ($($arg: $kind),*));
        $( let $arg = forward!(@lower $kind $arg); )*
        $( let _held = forward!(@hold $kind $arg); )*
        forward!(@lift $ret _origin <B::Inside>::$name($($arg),*))
    }};
    (@body $name:ident ($($arg:ident: $kind:tt),*) -> $ret:tt => $class:ident) => {{
        let _origin = forward!(@origin $ret ($($arg: $kind),*));
        $( let $arg = forward!(@lower $kind $arg); )*
        let mut dtypes = crate::backend::precision::Dtypes::default();
        $( forward!(@see $kind dtypes $arg); )*
        let target = crate::backend::precision::Class::$class.target(R::row().compute, &dtypes);
        $( let $arg = forward!(@cast $kind target $arg); )*
        $( let _held = forward!(@hold $kind $arg); )*
        forward!(@lift $ret _origin <B::Inside>::$name($($arg),*))
    }};

    // A product ends a fused stream: what waits to be compressed goes before it.
    (@before Compute; $($mark:tt)*) => { Self::compress_pending() };
    (@before $($class:ident)?; loss: $x:ident) => { $x.keep_loss() };
    (@before $($class:ident)?; $($mark:tt)*) => {};

    (@mark Float $result:ident exact output) => { $result.keep_exact() };
    (@mark $ret:tt $result:ident $($mark:tt)*) => {};

    // A tensor remembers the layer from whose weight it was computed.
    (@origin Float ($($arg:ident: $kind:tt),*)) => {
        crate::backend::tensor::one_origin([ $( forward!(@origin_of $kind $arg) ),* ])
    };
    (@origin $other:tt ($($arg:ident: $kind:tt),*)) => { () };
    (@origin_of Float $x:ident) => { $x.origin() };
    (@origin_of $other:tt $x:ident) => { None };

    (@lower $kind:tt $x:expr) => {
        crate::operations::unwrap_kind!($kind, crate::backend::tensor::QuantTensor::into_primitive, $x)
    };

    (@lift Float $origin:ident $x:expr) => { crate::backend::tensor::QuantTensor::computed($x, $origin) };
    (@lift $ret:tt $origin:ident $x:expr) => {
        crate::operations::wrap_kind!($ret, crate::backend::tensor::QuantTensor::new, $x)
    };

    (@see Float $dtypes:ident $x:ident) => { $dtypes.see(&$x) };
    (@see OptFloat $dtypes:ident $x:ident) => { if let Some(x) = &$x { $dtypes.see(x) } };
    (@see Floats $dtypes:ident $x:ident) => { for x in &$x { $dtypes.see(x) } };
    (@see $other:tt $dtypes:ident $x:ident) => {};

    (@cast Float $target:ident $x:ident) => { crate::data::cast_to::<B::Inside>($x, $target) };
    (@cast OptFloat $target:ident $x:ident) => { $x.map(|x| crate::data::cast_to::<B::Inside>(x, $target)) };
    (@cast Floats $target:ident $x:ident) => {
        $x.into_iter().map(|x| crate::data::cast_to::<B::Inside>(x, $target)).collect::<Vec<_>>()
    };
    (@cast $other:tt $target:ident $x:ident) => { $x };

    // Burn's operations of many tensors let them go before they are in the graph.
    (@hold Floats $x:ident) => { $x.iter().map(<B as crate::saved::recorded::QuantBackend>::hold).collect::<Vec<_>>() };
    (@hold $other:tt $x:ident) => { () };
}

pub(crate) use forward;
