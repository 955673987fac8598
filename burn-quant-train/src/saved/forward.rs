//! The macro that turns one line per operation into a method of [`Held`](super::Held).

/// Runs operations of [the tables](crate::operations) on the values of cells.
macro_rules! forward {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)? $([ $($mark:tt)* ])?; )*) => { $(
        fn $name(
            $($arg: crate::operations::kind_type!($kind)),*
        ) -> crate::operations::kind_type!($ret) {
            forward!(@exact $($($mark)*)?);
            let _origin = forward!(@origin $ret [ $($($mark)*)? ] $name($($arg: $kind),*));
            $(
                let $arg = crate::operations::unwrap_kind!($kind, crate::saved::HeldTensor::into_value, $arg);
            )*
            forward!(@lift $ret [ $($($mark)*)? ] $name($($arg),*) _origin)
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

    (@lift Float [ mask ] $name:ident($($arg:ident),*) $origin:ident) => {{
        let _: Option<crate::saved::again::Origin<B>> = $origin;
        crate::saved::HeldTensor::mask(stringify!($name), B::$name($($arg),*))
    }};
    (@lift Float [ again swapped ] $name:ident($tensor:ident, $a:ident, $b:ident) $origin:ident) => {
        crate::saved::HeldTensor::swapped(B::$name($tensor, $a, $b), stringify!($name), $origin, [$a, $b])
    };
    (@lift Float [ $($mark:tt)* ] $name:ident($($arg:ident),*) $origin:ident) => {
        crate::saved::HeldTensor::made(B::$name($($arg),*), stringify!($name), $origin)
    };
    (@lift $ret:tt [ $($mark:tt)* ] $name:ident($($arg:ident),*) $origin:ident) => {
        crate::operations::wrap_kind!(
            $ret,
            |value| crate::saved::HeldTensor::of(stringify!($name), value),
            B::$name($($arg),*)
        )
    };
}

pub(crate) use forward;
