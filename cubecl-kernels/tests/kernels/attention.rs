//! Attention: the reference against finite differences, everything else against the reference.

mod host;
mod problem;
mod reference;
