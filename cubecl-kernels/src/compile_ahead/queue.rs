//! The queue of sources, and the threads that compile them.

use std::{
    any::TypeId,
    collections::{HashSet, VecDeque},
    ffi::CString,
    hash::{DefaultHasher, Hash, Hasher},
    ptr::null_mut,
    sync::{
        Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use cubecl::{cuda::CudaRuntime, prelude::*};
use cudarc::{
    driver::{
        result::{DriverError, device, module},
        sys::{
            CUcontext, CUdevice, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CUresult, cuCtxDestroy_v2, cuDevicePrimaryCtxGetState,
        },
    },
    nvrtc::result as nvrtc,
};
use libloading::Library;

use crate::cuda::source::{CudaSource, SourceText};

/// Each has a context on the device while it compiles, some 0.5 GB.
const MAX_THREADS: usize = 8;

/// Kernels and sizes whose launches are looked at. Where sizes go on changing, what follows has been compiled long since.
const MAX_SEEN: usize = 512;

/// What CubeCL passes to NVRTC on devices of sm_90, but for the folders of headers: sources here include none.
const OPTIONS: [&str; 2] = ["--gpu-architecture=sm_90a", "-lineinfo"];

/// True while there are threads that compile. Launches ask this first.
static IS_ACTIVE: AtomicBool = AtomicBool::new(false);
/// True where the program has said which layers it has.
static KNOWS_LAYERS: AtomicBool = AtomicBool::new(false);
static QUEUE: LazyLock<Mutex<Queue>> = LazyLock::new(Mutex::default);
static HAS_NEWS: Condvar = Condvar::new();

#[derive(Debug, Default)]
struct Queue {
    /// Sources of kernels that were launched.
    launched: VecDeque<SourceText>,
    /// Those of kernels that are likely to be.
    likely: VecDeque<SourceText>,
    /// True when the threads are to end.
    ends: bool,
    /// Hashes of launches: kernels with the sizes that companions follow from.
    seen: HashSet<u64>,
    /// Hashes of the sources that are or were in the queue.
    asked: HashSet<u64>,
}

impl Queue {
    /// True for the first launch of a kernel on such sizes.
    fn is_new(&mut self, launch: u64) -> bool {
        self.seen.len() < MAX_SEEN && self.seen.insert(launch)
    }

    fn launch(&mut self, text: SourceText) {
        let was_likely = self.likely.iter().position(|likely| *likely == text);
        if let Some(at) = was_likely {
            self.likely.remove(at);
        }
        if self.asked.insert(hash_of(&text)) || was_likely.is_some() {
            self.launched.push_back(text);
        }
    }

    fn expect(&mut self, text: SourceText) {
        if self.asked.insert(hash_of(&text)) {
            self.likely.push_back(text);
        }
    }

    fn next(&mut self) -> Option<SourceText> {
        self.launched
            .pop_front()
            .or_else(|| self.likely.pop_front())
    }
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// True while there are threads that compile for this runtime.
fn compiles<R: Runtime>() -> bool {
    IS_ACTIVE.load(Ordering::Relaxed) && TypeId::of::<R>() == TypeId::of::<CudaRuntime>()
}

/// Asks for a kernel that is launched now and for its companions, at its first launch on matrices of such sizes.
pub(crate) fn anticipate<R: Runtime, S: CudaSource>(
    client: &ComputeClient<R>,
    source: &S,
    numbers: &S::Numbers,
) {
    if !compiles::<R>() {
        return;
    }
    let sizes = source.sizes(numbers);
    if !queue().is_new(hash_of(&(TypeId::of::<S>(), source, sizes))) {
        return;
    }
    let companions = source.companions(client, sizes);
    let mut queue = queue();
    queue.launch(source.text());
    for companion in companions {
        queue.expect(companion);
    }
    HAS_NEWS.notify_all();
}

/// Asks for what a program is going to launch, behind what is launched now.
pub(crate) fn expect<R: Runtime>(texts: impl FnOnce() -> Vec<SourceText>) {
    if !compiles::<R>() {
        return;
    }
    KNOWS_LAYERS.store(true, Ordering::Relaxed);
    let texts = texts();
    let mut queue = queue();
    for text in texts {
        queue.expect(text);
    }
    HAS_NEWS.notify_all();
}

/// True where products are asked for by the layers of a model.
pub(crate) fn knows_layers() -> bool {
    KNOWS_LAYERS.load(Ordering::Relaxed)
}

/// Threads that compile until this is dropped.
#[derive(Debug)]
pub(super) struct Threads(Vec<JoinHandle<()>>);

impl Threads {
    /// None where others compile, or what they compile would be kept nowhere.
    pub fn start() -> Option<Self> {
        let is_off = std::env::var("CUDA_CACHE_DISABLE").is_ok_and(|it| it == "1");
        if is_off || IS_ACTIVE.swap(true, Ordering::Relaxed) {
            return None;
        }
        queue().ends = false;
        KNOWS_LAYERS.store(false, Ordering::Relaxed);
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads = (processors / 2).clamp(1, MAX_THREADS);
        let spawn = |_| {
            thread::Builder::new()
                .name("compile-ahead".into())
                .spawn(work)
        };
        // With fewer threads, or none, kernels are compiled where they are launched.
        Some(Self(
            (0..threads).map_while(|index| spawn(index).ok()).collect(),
        ))
    }
}

impl Drop for Threads {
    /// Waits for what is being compiled: the compiler must not outlive the process's statics.
    fn drop(&mut self) {
        queue().ends = true;
        HAS_NEWS.notify_all();
        for thread in self.0.drain(..) {
            // One that has panicked has said so.
            thread.join().ok();
        }
        // Others start from here on.
        IS_ACTIVE.store(false, Ordering::Relaxed);
    }
}

fn work() {
    let mut context = None;
    while let Some(text) = next(&mut context) {
        // CubeCL compiles it again, and says what is wrong with it.
        compile(&text, &mut context).ok();
    }
}

/// The next source, when there is one; `None` when no more are compiled. Who waits for one gives the context back.
fn next(context: &mut Option<Context>) -> Option<SourceText> {
    let mut queue = queue();
    loop {
        if queue.ends {
            return None;
        }
        if let Some(text) = queue.next() {
            return Some(text);
        }
        if let Some(context) = context.take() {
            drop(queue);
            drop(context);
            queue = self::queue();
            continue;
        }
        queue = HAS_NEWS.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}

type Failure = Box<dyn std::error::Error>;

/// Compiles a source to PTX, and PTX to machine code.
fn compile(text: &SourceText, context: &mut Option<Context>) -> Result<(), Failure> {
    let source = CString::new(text.source.as_str())?;
    let program = nvrtc::create_program(&source, None)?;
    // SAFETY: the program is destroyed once, after its last use; the source outlives it.
    #[allow(unsafe_code)]
    let ptx = unsafe {
        let ptx = nvrtc::compile_program(program, &OPTIONS).and_then(|()| nvrtc::get_ptx(program));
        nvrtc::destroy_program(program)?;
        ptx?
    };
    if context.is_none() {
        *context = Some(Context::new()?);
    }
    let entry_point = CString::new(text.entry_point)?;
    // SAFETY: the thread has a context, which outlives the module; NVRTC ends its PTX with a zero.
    #[allow(unsafe_code)]
    unsafe {
        let module = module::load_data(ptx.as_ptr().cast())?;
        // Of a module that is loaded lazily, a function is compiled when it is asked for.
        let function = module::get_function(module, entry_point);
        module::unload(module)?;
        function?;
    }
    Ok(())
}

/// A context of the thread's own, and its current one. In that of the program, the driver would hold up every launch
/// and allocation while it compiles: by 4.1 s at worst, with 12 threads and 10 kernels; with contexts of their own by
/// 0.1 s (one NVIDIA H200, driver 580.159.04, 2026-11-28).
struct Context(CUcontext);

impl Context {
    /// On a device that this process uses already.
    fn new() -> Result<Self, Failure> {
        /// The oldest form of the function, which every driver has: cudarc has that of the CUDA that it was built for.
        type Create = unsafe extern "C" fn(*mut CUcontext, u32, CUdevice) -> CUresult;
        const DRIVER: &str = match cfg!(windows) {
            true => "nvcuda.dll",
            false => "libcuda.so.1",
        };
        let device = device_in_use()?.ok_or("no device is in use")?;
        let mut context = null_mut();
        // SAFETY: the driver is loaded already, the type is that of cuda.h, and the pointer is to a context.
        #[allow(unsafe_code)]
        unsafe {
            let driver = Library::new(DRIVER)?;
            let create = driver.get::<Create>(b"cuCtxCreate_v2")?;
            create(&mut context, 0, device).result()?;
        }
        Ok(Self(context))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it is this thread's, which has nothing in it any more. A context that stays takes memory, no more.
        #[allow(unsafe_code)]
        unsafe { cuCtxDestroy_v2(self.0) }.result().ok();
    }
}

/// One of sm_90.
fn device_in_use() -> Result<Option<CUdevice>, DriverError> {
    for ordinal in 0..device::get_count()? {
        let device = device::get(ordinal)?;
        let (mut flags, mut is_active) = (0, 0);
        // SAFETY: the driver gave the device; both pointers are to numbers of the types that it writes.
        #[allow(unsafe_code)]
        let major = unsafe {
            cuDevicePrimaryCtxGetState(device, &mut flags, &mut is_active).result()?;
            device::get_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
        };
        if is_active != 0 && major == 9 {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launched_sources_come_first_and_each_once() {
        let text = |source: &str| SourceText {
            entry_point: "kernel",
            source: source.into(),
        };
        let mut queue = Queue::default();
        queue.expect(text("likely"));
        queue.expect(text("launched later"));
        for source in ["first", "second", "first", "launched later"] {
            queue.launch(text(source));
            queue.expect(text(source));
        }
        for source in ["first", "second", "launched later", "likely"] {
            assert_eq!(queue.next(), Some(text(source)));
        }
        queue.launch(text("first"));
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn threads_end_and_start_again() {
        let threads = Threads::start().expect("no others");
        assert!(Threads::start().is_none(), "beside others");
        drop(threads);
        drop(Threads::start().expect("the others have ended"));
    }
}
