//! Kernels of CUDA source, those of CubeCL among them, on a CPU.
//!
//! The machine's C++ compiler compiles a kernel together with `emulator.cpp`, which has what it uses of CUDA. Its
//! sanitizers look for what the numbers need not show: races of the threads, and accesses outside of the buffers.

use std::{fs, path::Path, process::Command};

use super::offline::Source;

/// The faults that are looked for while a kernel runs; all together do not go, and threads are slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitizer {
    /// Races.
    Threads,
    /// Accesses outside of the buffers, and what C++ does not define.
    Addresses,
}

/// The buffers after the launch. `name` is that of the folder to work in.
pub fn run<const N: usize>(
    source: &Source,
    buffers: &[Vec<u8>; N],
    name: &str,
    sanitizer: Sanitizer,
) -> [Vec<u8>; N] {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("a folder");
    let kernel =
        without_asm(&without_includes(&source.code)).replace("extern __shared__", "extern");
    fs::write(folder.join("kernel.cu"), kernel).expect("a file");
    fs::write(folder.join("launch.h"), launch_of(source)).expect("a file");
    let sanitizer = match sanitizer {
        Sanitizer::Threads => "thread",
        Sanitizer::Addresses => "address,undefined",
    };
    let (program, input, output) = (
        folder.join("emulator"),
        folder.join("in"),
        folder.join("out"),
    );
    succeed(
        Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()))
            .args([
                "-std=c++20",
                "-O1",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-pthread",
            ])
            .arg(format!("-fsanitize={sanitizer}"))
            .arg(format!("-DSHARED_BYTES={}", source.shared_memory))
            .arg(format!("-DTHREADS={}", source.units))
            .arg(format!("-I{}", folder.display()))
            .arg(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/tests/compile/emulator.cpp"
            ))
            .arg("-o")
            .arg(&program),
    );
    let lengths: Vec<usize> = buffers.iter().map(Vec::len).collect();
    let mut header: Vec<u64> = source.cubes.iter().map(|&count| count.into()).collect();
    header.push(N as u64);
    header.extend(lengths.iter().map(|&length| length as u64));
    header.extend(&source.numbers);
    fs::write(
        &input,
        [bytemuck::cast_slice(&header), &buffers.concat()].concat(),
    )
    .expect("a file");
    succeed(Command::new(program).args([&input, &output]));
    let written = fs::read(output).expect("the buffers");
    let mut rest = &written[..];
    std::array::from_fn(|index| rest.split_off(..lengths[index]).expect("a buffer").to_vec())
}

fn succeed(command: &mut Command) {
    let output = command.output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{messages}",
        output.status
    );
}

/// The text without CUDA's headers.
fn without_includes(source: &str) -> String {
    let lines = source.lines().filter(|line| !line.starts_with("#include"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// A function `launch` that calls the kernel with buffers and numbers as its signature asks for them.
fn launch_of(source: &Source) -> String {
    let (_, signature) = source
        .code
        .split_once(&format!("{} (", source.name))
        .or_else(|| source.code.split_once(&format!("{}(", source.name)))
        .expect("the kernel in its source");
    let (parameters, _) = signature
        .split_once(") {")
        .or_else(|| signature.split_once(")\n"))
        .or_else(|| signature.split_once("\n) {"))
        .expect("the end of the parameters");
    let mut arguments = Vec::new();
    let mut numbers = "";
    for parameter in parameters.split(',') {
        match parameter.rsplit_once('*') {
            Some((element, _)) => {
                let index = arguments.len();
                arguments.push(format!("({element} *)buffers[{index}].data()"));
            }
            // Its type stands before its name.
            None => numbers = parameter.split_whitespace().rev().nth(1).expect("a type"),
        }
    }
    format!(
        "using Launched = {numbers};\nstatic void launch(std::vector<std::vector<unsigned char>> &buffers, \
         const Launched &numbers) {{\n    {}({}, numbers);\n}}\n",
        source.name,
        arguments.join(", ")
    )
}

/// The text with a call in place of each statement `asm(..);` or `asm volatile(..);`.
fn without_asm(source: &str) -> String {
    let mut parts = source.split("asm");
    let mut text = String::from(parts.next().unwrap_or_default());
    for part in parts {
        let (statement, rest) = part.split_once(");").expect("the end of a statement");
        text += &call(statement);
        text += rest;
    }
    text
}

/// `ptx_INSTRUCTION(..);` for `("INSTRUCTION ..;" : "constraint"(operand), ..`; nothing for an
/// empty text.
fn call(statement: &str) -> String {
    let mut quoted = statement.split('"').skip(1);
    let text = quoted.next().expect("a text");
    let instruction = text.split([' ', ';']).next().unwrap_or_default();
    if instruction.is_empty() {
        return ";".into();
    }
    // Behind each constraint stands its operand, behind a clobbered name nothing.
    let operands: Vec<&str> = quoted
        .skip(2)
        .step_by(2)
        .map(|operand| operand.trim_end_matches([' ', ',', ':', '\n']))
        .filter(|operand| !operand.is_empty())
        .collect();
    format!(
        "ptx_{}({});",
        instruction.replace(['.', ':'], "_"),
        operands.join(", ")
    )
}
