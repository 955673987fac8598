//! The tables and pictures of the book and of the README are those of the results.

use std::process::Command;

#[test]
fn tables_and_pictures_are_those_of_the_results() {
    let status = Command::new(env!("CARGO_BIN_EXE_report"))
        .arg("--check")
        .status()
        .expect("report starts");
    assert!(
        status.success(),
        "{status}: `cargo run --bin report` writes them"
    );
}
