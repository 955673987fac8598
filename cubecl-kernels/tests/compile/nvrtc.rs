//! NVIDIA's runtime compiler, which needs no GPU.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::{Path, PathBuf},
    ptr::{null, null_mut},
    sync::OnceLock,
};

use libloading::{Library, Symbol};

type Program = *mut c_void;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;

/// The compiler of a CUDA toolkit, or of the `nvidia/cu13` folder that NVIDIA's Python packages unpack to.
#[derive(Debug)]
pub struct Nvrtc {
    _builtins: Library,
    library: Library,
    includes: Vec<PathBuf>,
}

impl Nvrtc {
    /// The compiler of the folder that `CUDA_PATH` names, as CubeCL finds it.
    ///
    /// Loaded once and never unloaded: a thread that has compiled may still run code of the library as it ends.
    pub fn get() -> &'static Self {
        static LOADED: OnceLock<Nvrtc> = OnceLock::new();
        LOADED.get_or_init(Self::load)
    }

    fn load() -> Self {
        let root = std::env::var("CUDA_PATH").expect("CUDA_PATH names a CUDA toolkit");
        let root = Path::new(&root);
        let load = |prefix: &str| {
            let path = ["lib", "lib64"]
                .iter()
                .filter_map(|folder| std::fs::read_dir(root.join(folder)).ok())
                .flatten()
                .filter_map(|entry| Some(entry.ok()?.path()))
                .find(|path| {
                    let name = path.file_name().unwrap_or_default();
                    name.to_string_lossy().starts_with(prefix)
                })
                .unwrap_or_else(|| panic!("no {prefix} in {root:?}"));
            // SAFETY: the initialization of these libraries has no preconditions.
            #[allow(unsafe_code)]
            unsafe { Library::new(&path) }.expect("a library that loads")
        };
        // The compiler looks for its built-ins by name, and finds them when they are loaded.
        let builtins = load("libnvrtc-builtins.so");
        let library = load("libnvrtc.so");
        let include = root.join("include");
        Self {
            _builtins: builtins,
            library,
            includes: vec![include.join("cccl"), include],
        }
    }

    #[allow(unsafe_code)]
    fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the types above are those of nvrtc.h.
        unsafe { self.library.get(name.as_bytes()) }.expect("a function of NVRTC")
    }

    /// Compiles CUDA source to machine code for one architecture, such as `sm_80`.
    ///
    /// # Errors
    ///
    /// The compiler's messages; also where it compiles, but has each `wgmma` wait for the one before it.
    #[allow(unsafe_code)]
    pub fn compile(&self, source: &str, architecture: &str) -> Result<Vec<u8>, String> {
        let source = CString::new(source).expect("source without NUL");
        let options: Vec<CString> = self
            .includes
            .iter()
            .map(|path| format!("--include-path={}", path.display()))
            .chain([
                format!("--gpu-architecture={architecture}"),
                "--ptxas-options=--verbose".into(),
            ])
            .map(|option| CString::new(option).expect("an option without NUL"))
            .collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = null_mut();
        // SAFETY: all pointers outlive the calls, and the buffers have the sizes that NVRTC asks for.
        unsafe {
            let create = self.function::<Create>("nvrtcCreateProgram");
            let status = create(&mut program, source.as_ptr(), null(), 0, null(), null());
            assert_eq!(status, 0, "nvrtcCreateProgram");
            let compile = self.function::<Compile>("nvrtcCompileProgram");
            let status = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.output(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog");
            let log = CStr::from_bytes_until_nul(&log).expect("a log that ends");
            let log = log.to_string_lossy();
            assert!(
                status != 0 || log.contains("ptxas info"),
                "ptxas says nothing, and so not that products are serialized: {log}"
            );
            let output = if status == 0 && !log.contains("serialized") {
                Ok(self.output(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"))
            } else {
                Err(log.into_owned())
            };
            let destroy =
                self.function::<unsafe extern "C" fn(*mut Program) -> c_int>("nvrtcDestroyProgram");
            destroy(&mut program);
            output
        }
    }

    #[allow(unsafe_code)]
    unsafe fn output(&self, program: Program, size: &str, content: &str) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: the buffer has the size that NVRTC asks for.
        unsafe {
            assert_eq!(
                self.function::<Size>(size)(program, &mut bytes),
                0,
                "{size}"
            );
            let mut buffer = vec![0u8; bytes];
            let status = self.function::<Text>(content)(program, buffer.as_mut_ptr().cast());
            assert_eq!(status, 0, "{content}");
            buffer
        }
    }
}
