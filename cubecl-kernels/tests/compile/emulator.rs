//! Kernels of CUDA source, those of CubeCL among them, on a CPU.
//!
//! The machine's C++ compiler compiles a kernel together with `emulator.cpp`, which has what it uses of CUDA. Its
//! sanitizers look for what the numbers need not show: races of the threads, and accesses outside of the buffers.

use std::{fs, path::Path, process::Command};

use cubecl::ir::StorageType;
use half::bf16;

use super::{
    dtype,
    offline::{Source, TensorMap},
};

/// The faults that are looked for while a kernel runs; all together do not go, and threads are slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitizer {
    /// Races.
    Threads,
    /// Accesses outside of the buffers, and what C++ does not define.
    Addresses,
}

impl Sanitizer {
    /// That for kernels of this type: the slow one for one of them.
    pub fn of(float: StorageType) -> Self {
        match float == dtype::<bf16>() {
            true => Self::Threads,
            false => Self::Addresses,
        }
    }
}

/// The buffers after the launch. Tensor maps and the pointers that come with them are not among them: what these read,
/// a launch passes as a buffer too. `name` is that of the folder to work in.
pub fn run<const N: usize>(
    source: &Source,
    buffers: &[Vec<u8>; N],
    name: &str,
    sanitizer: Sanitizer,
) -> [Vec<u8>; N] {
    let after = run_all(source, buffers, name, sanitizer);
    after.try_into().expect("as many buffers")
}

/// The same of any number of buffers.
pub fn run_all(
    source: &Source,
    buffers: &[Vec<u8>],
    name: &str,
    sanitizer: Sanitizer,
) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("a folder");
    let text = without_macros(&source.code, &folder);
    let kernel = without_extern(&without_asm(&text));
    fs::write(folder.join("kernel.cu"), kernel).expect("a file");
    fs::write(folder.join("launch.h"), launch_of(source, &text)).expect("a file");
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
        compiler()
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
    header.push(buffers.len() as u64);
    header.extend(lengths.iter().map(|&length| length as u64));
    header.extend(&source.numbers);
    fs::write(
        &input,
        [bytemuck::cast_slice(&header), &buffers.concat()].concat(),
    )
    .expect("a file");
    // Of races, the first says enough, and each takes its time.
    let mut program = Command::new(program);
    let program = program.env("TSAN_OPTIONS", "halt_on_error=1");
    succeed(program.args([&input, &output]));
    let written = fs::read(output).expect("the buffers");
    let mut rest = &written[..];
    lengths
        .into_iter()
        .map(|length| rest.split_off(..length).expect("a buffer").to_vec())
        .collect()
}

fn compiler() -> Command {
    Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()))
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

/// The text without CUDA's headers, comments and macros: these make parts of `asm` statements.
fn without_macros(source: &str, folder: &Path) -> String {
    let (raw, expanded) = (folder.join("raw.cu"), folder.join("expanded.cu"));
    let lines = source.lines().filter(|line| !line.starts_with("#include"));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    fs::write(&raw, text).expect("a file");
    let mut preprocess = compiler();
    let preprocess = preprocess.args(["-std=c++20", "-E", "-P", "-x", "c++"]);
    succeed(preprocess.arg(raw).arg("-o").arg(&expanded));
    fs::read_to_string(expanded).expect("a text")
}

/// The text with a pointer to the emulator's shared memory in place of what a launch sizes: `extern __shared__
/// __align__(N) TYPE NAME[];`.
fn without_extern(source: &str) -> String {
    let mut parts = source.split("extern __shared__");
    let mut text = String::from(parts.next().unwrap_or_default());
    for part in parts {
        let (declaration, rest) = part.split_once("[];").expect("an array");
        let (_, declaration) = declaration.split_once(')').expect("an alignment");
        let (element, name) = declaration.rsplit_once(' ').expect("a type");
        text += &format!("{element} *const {name} = ({element} *)shared_memory;{rest}");
    }
    text
}

/// A function `launch` that calls the kernel with tensor maps, buffers and numbers as its signature in the text asks for
/// them.
fn launch_of(source: &Source, text: &str) -> String {
    let (_, signature) = text
        .split_once(&format!("{} (", source.name))
        .or_else(|| text.split_once(&format!("{}(", source.name)))
        .expect("the kernel in its source");
    let (parameters, _) = signature
        .split_once(") {")
        .or_else(|| signature.split_once(")\n"))
        .or_else(|| signature.split_once("\n) {"))
        .expect("the end of the parameters");
    let maps = &source.tensor_maps;
    let mut arguments: Vec<String> = maps.iter().map(tensor_map).collect();
    // A pointer for each tensor map, and then the buffers.
    let mut buffers = maps.iter().map(|map| map.buffer).chain(0..);
    let mut numbers = "";
    for parameter in parameters.split(',').skip(maps.len()) {
        match parameter.rsplit_once('*') {
            Some((element, _)) => {
                let index = buffers.next().expect("one of all indices");
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

/// A tensor map as the emulator reads it: `Box` of `emulator.cpp`.
fn tensor_map(map: &TensorMap) -> String {
    let words = [map.sizes, map.strides, map.tile].concat();
    let words: Vec<String> = words.iter().map(u64::to_string).collect();
    format!(
        "std::bit_cast<TensorMap>(std::array<uint64_t, 16>{{(uint64_t)buffers[{}].data(), {}}})",
        map.buffer,
        words.join(", ")
    )
}

/// The text with a call in place of each statement `asm(..);` or `asm volatile(..);`.
fn without_asm(source: &str) -> String {
    let mut parts = source.split("asm");
    let mut text = String::from(parts.next().unwrap_or_default());
    for part in parts {
        let (statement, rest) = part.split_once(");").expect("the end of a statement");
        let (_, statement) = statement.split_once('(').expect("its begin");
        text += &call(statement);
        text += rest;
    }
    text
}

/// `ptx_INSTRUCTION(..);` for `"INSTRUCTION ..;" : "constraint"(operand), ..`; nothing for an empty text. Around the
/// instruction there may be declarations, labels, jumps and predicates.
fn call(statement: &str) -> String {
    let (template, operands) = parts_of(statement);
    let mut predicates = Vec::new();
    for line in template.split([';', '\n']) {
        let line = line.trim_start_matches(['{', '}', ' ', '\t']);
        let (instruction, operands_of) = line.split_once(' ').unwrap_or((line, ""));
        let is_around =
            instruction.is_empty() || instruction.starts_with(['.', '@']) || line.ends_with(':');
        if is_around {
            continue;
        }
        let without_brackets = operands_of.replace(['{', '}', '[', ']'], " ");
        let mut values = without_brackets.split(',').map(str::trim);
        if instruction == "setp.ne.b32" {
            let predicate = values.next().expect("a predicate");
            let value = with_operands(values.next().expect("a register"), &operands);
            predicates.push((predicate.to_owned(), format!("({value} != 0)")));
            continue;
        }
        let values: Vec<String> = values
            .filter_map(|value| {
                let is_name = value.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
                match predicates.iter().find(|(predicate, _)| predicate == value) {
                    Some((_, value)) => Some(value.clone()),
                    // Results that nobody wants, or that only jumps read.
                    None if is_name || value.is_empty() => None,
                    None => Some(with_operands(value, &operands)),
                }
            })
            .collect();
        let name = instruction.replace(['.', ':'], "_");
        return format!("ptx_{name}({});", values.join(", "));
    }
    ";".into()
}

/// The template of an `asm` statement, of all its literals, and the expressions of its operands.
fn parts_of(statement: &str) -> (String, Vec<&str>) {
    let (mut template, mut operands) = (String::new(), Vec::new());
    let mut rest = statement.trim_start();
    while let Some((literal, behind)) = rest.strip_prefix('"').and_then(|it| it.split_once('"')) {
        template += &literal.replace("\\n", "\n");
        rest = behind.trim_start();
    }
    // Behind each constraint stands its operand, behind a clobbered name nothing.
    let behind_constraints = rest.split('"').skip(2).step_by(2);
    for operand in behind_constraints {
        let operand = operand.trim_end_matches([' ', ',', ':', '\n']);
        if !operand.is_empty() {
            operands.push(operand);
        }
    }
    (template, operands)
}

/// What a template writes in place of an operand, with `%0` and others and registers by their names.
fn with_operands(value: &str, operands: &[&str]) -> String {
    let value = value.replace("%%tid", "threadIdx");
    let mut parts = value.split('%');
    let mut text = String::from(parts.next().unwrap_or_default());
    for part in parts {
        let digits = part.chars().take_while(char::is_ascii_digit).count();
        let (index, rest) = part.split_at(digits);
        text += operands[index.parse::<usize>().expect("the number of an operand")];
        text += rest;
    }
    text
}
