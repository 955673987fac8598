//! Measured results: from the files that `pretrain --json` writes to the tables of the book and the README.

pub mod markers;
pub mod table;
