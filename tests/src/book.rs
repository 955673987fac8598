//! The book's Rust code, as doctests.
