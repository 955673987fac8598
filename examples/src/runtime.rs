//! How CubeCL is set up for training: memory of exact sizes, and compiled kernels that are kept from one run of the
//! program to the next.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
use std::env;
use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
};

#[cfg(any(feature = "cuda", feature = "vulkan"))]
use cubecl::config::{
    CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig, memory::PersistentMemory,
};

/// Sets CubeCL up, but for what a `cubecl.toml` says. To be called before anything asks for a device.
///
/// On CUDA memory is taken in exact sizes: the batches of a run have one shape, so that what one step took fits the
/// next. Pages, whose sizes follow that of the device, take a quarter more. `persistent_memory = "disabled"` asks for
/// them; `"enabled"`, which is CubeCL's default, is taken for no choice.
///
/// Compiled kernels are kept in `target`, or in the user's cache where there is none. CubeCL knows a kernel by its name
/// and its parameters, not by its code. So each build of the program has a folder of its own, and removes those of the
/// builds that it replaced.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub fn set_up() {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    if config.compilation.cache.is_none() {
        let root = CacheConfig::Target.root().join("kernels");
        let folder = env::current_exe().and_then(|program| of_build(&root, &program));
        // Without a folder kernels are compiled anew, which takes time and does no harm.
        config.compilation.cache = folder.ok().map(CacheConfig::File);
    }
    let is_open = matches!(config.memory.persistent_memory, PersistentMemory::Enabled);
    if cfg!(feature = "cuda") && is_open {
        config.memory.persistent_memory = PersistentMemory::Enforced;
    }
    CubeClRuntimeConfig::set(config);
}

/// The folder of a program as it was built.
fn of_build(root: &Path, program: &Path) -> io::Result<PathBuf> {
    let built = fs::metadata(program)?;
    let of_program = format!("{:016x}-", hash(program));
    let own = format!(
        "{of_program}{:016x}",
        hash((built.len(), built.modified()?))
    );
    if !root.join(&own).is_dir() {
        fs::create_dir_all(root.join(&own))?;
        for entry in fs::read_dir(root)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&of_program) && name != own.as_str() {
                fs::remove_dir_all(entry.path())?;
            }
        }
    }
    Ok(root.join(own))
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn each_build_has_a_folder_and_removes_that_of_the_last() {
        let root = tempfile::tempdir().expect("a folder");
        let (program, other) = (root.path().join("program"), root.path().join("other"));
        for path in [&program, &other] {
            fs::write(path, "code").expect("a file");
        }
        let folder = |program| of_build(&root.path().join("kernels"), program).expect("a folder");
        let (first, of_other) = (folder(&program), folder(&other));
        fs::write(first.join("kernel"), "ptx").expect("a file");
        assert_eq!(folder(&program), first);
        assert!(first.join("kernel").exists());

        let later = SystemTime::now() + Duration::from_secs(60);
        let file = fs::File::options()
            .append(true)
            .open(&program)
            .expect("the file");
        file.set_modified(later).expect("a time");
        let second = folder(&program);
        assert_ne!(second, first);
        assert!(!first.exists() && second.is_dir() && of_other.is_dir());
    }
}
