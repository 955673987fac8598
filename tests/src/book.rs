//! The book's Rust code, as doctests: `cargo test --doc`.

#[doc = include_str!("../../book/src/getting-started.md")]
mod getting_started {}

#[doc = include_str!("../../book/src/how-it-works.md")]
mod how_it_works {}

#[doc = include_str!("../../book/src/recipes.md")]
mod recipes {}

#[doc = include_str!("../../book/src/int4.md")]
mod int4 {}

#[doc = include_str!("../../book/src/fp8.md")]
mod fp8 {}

#[doc = include_str!("../../book/src/flow.md")]
mod flow {}

#[doc = include_str!("../../book/src/fp16.md")]
mod fp16 {}

#[doc = include_str!("../../book/src/memory.md")]
mod memory {}

#[doc = include_str!("../../book/src/attention.md")]
mod attention {}

#[doc = include_str!("../../book/src/health.md")]
mod health {}

#[doc = include_str!("../../book/src/optimizer.md")]
mod optimizer {}

#[doc = include_str!("../../book/src/optimizer-states.md")]
mod optimizer_states {}

#[doc = include_str!("../../book/src/adding-a-recipe.md")]
mod adding_a_recipe {}

#[doc = include_str!("../../book/src/results.md")]
mod results {}

#[doc = include_str!("../../README.md")]
mod readme {}
