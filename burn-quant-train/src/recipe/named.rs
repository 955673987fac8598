//! The recipe that a program names when it runs.

use std::{
    marker::PhantomData,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use burn_backend::bf16;

use super::{ComputeDtype, NAMES, Name, Recipe, Row, rows};
use crate::lock::lock;

/// The recipe that is [entered](Name::enter), computing in `E`: for programs whose users choose one by name.
///
/// Such a program is compiled once, and not again for each recipe.
///
/// ```
/// use burn::{backend::{Autodiff, Flex}, nn::{Linear, LinearConfig}, tensor::Tensor};
/// use burn_quant_train::{QuantTrain, optim::QuantAdamWConfig, recipe::{Name, Named}};
///
/// type Train = QuantTrain<Autodiff<Flex>, Named<f32>>;
///
/// let name: Name = "fallback-int8".parse()?;
/// let _entered = name.enter()?;
/// let optim = QuantAdamWConfig::new().init::<Train, Linear<Train>>();
/// let model = optim.attach(LinearConfig::new(128, 128).init(&Default::default()));
/// let y = model.forward(Tensor::<Train, 2>::ones([4, 128], &Default::default()));
/// y.sum().backward();
/// assert!(optim.layers()[0].decision.is_quantized());
///
/// assert!("int3".parse::<Name>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
///
/// Operations, the backend's name and [`row`](Recipe::row) panic where no recipe is entered. A model that outlives what
/// [`Name::enter`] gave goes on by the recipe that is entered next.
#[derive(Debug, Clone, Copy, Default)]
pub struct Named<E = bf16>(PhantomData<E>);

impl<E: ComputeDtype> Recipe for Named<E> {
    /// A stand-in: nothing reads it, since [`row`](Recipe::row) is the recipe.
    const ROW: Row = Row {
        name: "named",
        about: "the recipe that the program names",
        compute: E::DTYPE,
        context: None,
        flow: None,
        embedding: None,
        linear: None,
    };

    fn row() -> Row {
        let index = INDEX.load(Ordering::Acquire);
        *rows::<E>().get(index).unwrap_or_else(|| {
            panic!(
                "a tensor of `Named` while no recipe is entered: call `Name::enter` before the model is made, and keep \
                 what it gives as long as the model"
            )
        })
    }
}

/// That of the recipe that is entered, among all.
static INDEX: AtomicUsize = AtomicUsize::new(NONE);
const NONE: usize = usize::MAX;

/// How often that recipe is entered.
static TIMES: Mutex<usize> = Mutex::new(0);

/// A recipe that is entered, until this is dropped.
#[derive(Debug)]
#[must_use = "the recipe is left where this is dropped"]
pub struct Entered(());

/// Another recipe is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} cannot be entered while {entered} is, since a process trains by one recipe at a time: drop the models of \
     {entered} and what its `enter` gave"
)]
pub struct OtherRecipe {
    wanted: Name,
    entered: Name,
}

impl Name {
    /// Makes this the recipe of [`Named`] in this process, as long as the result lives.
    ///
    /// # Errors
    ///
    /// If another recipe is entered: its tensors would go on by this one.
    ///
    /// # Panics
    ///
    /// If the name is none of [`NAMES`], as that of a recipe of one's own.
    pub fn enter(self) -> Result<Entered, OtherRecipe> {
        let index = self.index();
        let mut times = lock(&TIMES);
        if let Some(&entered) = NAMES.get(INDEX.load(Ordering::Acquire))
            && entered != self
        {
            return Err(OtherRecipe {
                wanted: self,
                entered,
            });
        }
        *times += 1;
        INDEX.store(index, Ordering::Release);
        Ok(Entered(()))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut times = lock(&TIMES);
        *times -= 1;
        if *times == 0 {
            INDEX.store(NONE, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    /// The only test of this process that enters recipes.
    #[test]
    fn one_recipe_at_a_time() {
        let [first, second] = [NAMES[1], NAMES[2]];
        assert!(catch_unwind(Named::<f32>::row).is_err());
        let entered = first.enter().expect("none is entered");
        let again = first.enter().expect("the same");
        assert_eq!(Named::<f32>::row(), rows::<f32>()[1]);
        assert_eq!(Named::<bf16>::row(), first.row());
        let error = second.enter().expect_err("another is entered").to_string();
        assert!(error.contains(first.as_str()) && error.contains(second.as_str()));
        drop(entered);
        assert!(second.enter().is_err());
        drop(again);
        let _second = second.enter().expect("none is entered");
        let own = Row {
            name: "my-own",
            ..second.row()
        };
        assert!(catch_unwind(|| own.name().enter()).is_err());
        assert_eq!(Named::<bf16>::row(), second.row());
    }
}
