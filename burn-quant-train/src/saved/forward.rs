//! The macro that turns one line per operation into a method of [`Held`](super::Held).

/// Runs operations of [the tables](crate::operations) on the values of cells.
macro_rules! forward {
    ($( $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(=> $class:ident)? $([ $($mark:tt)* ])?; )*) => { $(
        fn $name(
            $($arg: crate::operations::kind_type!($kind)),*
        ) -> crate::operations::kind_type!($ret) {
            forward!(@exact $($($mark)*)?);
            let _origin = forward!(@origin $ret [ $($($mark)*)? ] $name($($arg: $kind),*));
            let _block = forward!(@block $ret $name($($arg: $kind),*));
            $(
                let $arg = crate::operations::unwrap_kind!($kind, crate::saved::HeldTensor::into_value, $arg);
            )*
            forward!(@lift $ret [ $($($mark)*)? ] $name($($arg),*) _origin _block)
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
    (@again [ again view $($mark:tt)* ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => {
        $origin.view(forward!(@closure $name($($arg: $kind),*)))
    };
    (@again [ again $($mark:tt)* ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => {
        $origin.again(crate::saved::again::From::Any, forward!(@closure $name($($arg: $kind),*)))
    };
    (@again [ $($mark:tt)* ] $origin:ident $name:ident($($arg:ident: $kind:tt),*)) => { $origin };

    (@block Float $name:ident($($arg:ident: $kind:tt),*)) => {
        crate::saved::scope::in_block()
            .then(|| {
                let mut _operands = Vec::new();
                $( forward!(@share $kind _operands $arg); )*
                crate::saved::again::Again::of_block(_operands, || forward!(@closure $name($($arg: $kind),*)))
            })
            .flatten()
    };
    (@block $ret:tt $name:ident($($arg:ident: $kind:tt),*)) => { () };

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
    (@share Float $operands:ident $x:ident) => { $operands.push($x.cell().clone()) };
    (@share OptFloat $operands:ident $x:ident) => {
        $operands.extend($x.as_ref().map(|x| x.cell().clone()))
    };
    (@share Floats $operands:ident $x:ident) => { $operands.extend($x.iter().map(|x| x.cell().clone())) };
    (@share $other:tt $operands:ident $x:ident) => {};
    (@own Float $x:ident) => { () };
    (@own OptFloat $x:ident) => { $x.is_some() };
    (@own Floats $x:ident) => { $x.len() };
    (@own (&[$t:ty]) $x:ident) => { $x.to_vec() };
    (@own $other:tt $x:ident) => { $x.clone() };
    (@lend Float $values:ident $x:ident) => {{
        let () = $x;
        $values.next().expect("a computation has its operands")
    }};
    (@lend OptFloat $values:ident $x:ident) => {
        $x.then(|| $values.next().expect("a computation has its operands"))
    };
    (@lend Floats $values:ident $x:ident) => { $values.by_ref().take($x).collect::<Vec<_>>() };
    (@lend (&[$t:ty]) $values:ident $x:ident) => { $x.as_slice() };
    (@lend (&$t:ty) $values:ident $x:ident) => { &$x };
    (@lend $other:tt $values:ident $x:ident) => { $x.clone() };

    (@lift Float [ upload ] $name:ident($data:ident, $device:ident) $origin:ident $block:ident) => {
        crate::saved::HeldTensor::made(crate::saved::constant::upload::<B>($data, $device), stringify!($name), $origin)
            .of_block($block)
    };
    (@lift Float [ mask ] $name:ident($($arg:ident),*) $origin:ident $block:ident) => {{
        let _: Option<crate::saved::again::Origin<B>> = $origin;
        crate::saved::HeldTensor::mask(stringify!($name), B::$name($($arg),*)).of_block($block)
    }};
    (@lift Float [ again view swapped ] $name:ident($tensor:ident, $a:ident, $b:ident) $origin:ident $block:ident) => {
        crate::saved::HeldTensor::swapped(B::$name($tensor, $a, $b), stringify!($name), $origin, [$a, $b])
            .of_block($block)
    };
    (@lift Float [ sum ] $name:ident($tensor:ident, $dim:ident) $origin:ident $block:ident) => {{
        let terms = burn_backend::TensorMetadata::shape(&$tensor)[$dim];
        crate::saved::HeldTensor::made(B::$name($tensor, $dim), stringify!($name), $origin)
            .of_block($block)
            .sum_of(terms)
    }};
    (@lift Float [ $($mark:tt)* ] $name:ident($($arg:ident),*) $origin:ident $block:ident) => {
        crate::saved::HeldTensor::made(B::$name($($arg),*), stringify!($name), $origin).of_block($block)
    };
    (@lift $ret:tt [ $($mark:tt)* ] $name:ident($($arg:ident),*) $origin:ident $block:ident) => {
        crate::operations::wrap_kind!(
            $ret,
            |value| crate::saved::HeldTensor::of(stringify!($name), value),
            B::$name($($arg),*)
        )
    };
}

pub(crate) use forward;
