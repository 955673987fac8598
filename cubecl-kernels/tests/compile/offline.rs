//! A CubeCL runtime without a device: a launch compiles its kernel to CUDA source and keeps the source.
//!
//! The index of a device is its architecture, say 80 for sm_80; its properties are those that CubeCL's CUDA runtime
//! reads from such a device, as far as kernels of this crate ask for them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use cubecl::{
    CubeCount, CubeTask, ExecutionMode, Runtime,
    bytes::Bytes,
    client::ComputeClient,
    cuda::{CudaCompiler, CudaRuntime},
    device::{Device, DeviceId, DeviceService, ServerUtilitiesHandle},
    features::{MmaConfig, Plane, Tma, TypeUsage},
    future::DynFut,
    ir::{
        AddressType, DeviceProperties, ElemType, FloatKind, HardwareProperties, IntKind,
        MemoryDeviceProperties, StorageType, TargetProperties, UIntKind, VectorSize,
    },
    prelude::{OobFill, TensorMapFormat, TensorMapInterleave, TensorMapSwizzle, TiledArgs},
    profile::{ProfileDuration, TimingMethod},
    server::{
        Binding, ComputeServer, CopyDescriptor, KernelArguments, ProfileError, ProfilingToken,
        ServerCommunication, ServerError, ServerUtilities, TensorMapBinding,
    },
    stream_id::StreamId,
    zspace::{Shape, Strides},
};
use cubecl_runtime::{
    allocator::PitchedMemoryLayoutPolicy,
    logging::ServerLogger,
    memory_management::{ManagedMemoryHandle, MemoryAllocationMode, MemoryUsage},
    storage::{BytesResource, BytesStorage, ManagedResource},
};

/// CUDA source of a kernel, and its launch.
#[derive(Debug, Clone)]
pub struct Source {
    pub name: String,
    pub code: String,
    /// Bytes of shared memory that the launch asks for.
    pub shared_memory: usize,
    /// Cubes along each axis.
    pub cubes: [u32; 3],
    /// Units of a cube.
    pub units: u32,
    /// Bytes of the buffers.
    pub buffers: Vec<usize>,
    /// What the kernel takes before its buffers.
    pub tensor_maps: Vec<TensorMap>,
    /// The numbers that the kernel takes beside its buffers.
    pub numbers: Vec<u64>,
}

/// A tensor map of rows of 128 swizzled bytes, what lies outside of its tensor read as 0. Dimensions begin with that of
/// neighbours; those that it has not have one element.
#[derive(Debug, Clone)]
pub struct TensorMap {
    /// The index of the buffer that it reads, among those that the launch passes.
    pub buffer: usize,
    pub sizes: [u64; 5],
    /// In bytes.
    pub strides: [u64; 5],
    pub tile: [u64; 5],
}

impl TensorMap {
    fn new(TensorMapBinding { binding, map }: &TensorMapBinding, buffers: &[Binding]) -> Self {
        // Bindings can only be printed.
        let binding = format!("{binding:?}");
        let is_same = |buffer: &Binding| format!("{buffer:?}") == binding;
        let TensorMapFormat::Tiled(TiledArgs { tile_size }) = &map.format else {
            unreachable!("no kernel of this crate reads columns of images");
        };
        assert_eq!(map.swizzle, TensorMapSwizzle::B128);
        assert_eq!(map.interleave, TensorMapInterleave::None);
        assert_eq!(map.oob_fill, OobFill::Zero);
        let inwards = |of: &[usize], unit: usize| {
            let mut inwards = [1; 5];
            for (to, &from) in inwards.iter_mut().zip(of.iter().rev()) {
                *to = (from * unit) as u64;
            }
            inwards
        };
        let strides = inwards(map.metadata.strides(), map.storage_ty.size());
        let tile = inwards(tile_size, 1);
        let outer = &strides[1..map.metadata.strides().len()];
        assert!(outer.iter().all(|stride| stride % 16 == 0), "{strides:?}");
        assert!(tile.iter().all(|&extent| extent <= 256), "{tile:?}");
        Self {
            buffer: (buffers.iter().position(is_same)).expect("a buffer of the launch"),
            sizes: inwards(map.metadata.shape(), 1),
            strides,
            tile,
        }
    }
}

/// The sources of the kernels that `launch` launches on an architecture, say 80 for sm_80, in this order.
pub fn sources_of(
    architecture: u16,
    launch: impl FnOnce(&ComputeClient<OfflineCuda>),
) -> Vec<Source> {
    // One test at a time, since a server is shared by all clients of its device.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let client = OfflineCuda::client(&Architecture(architecture));
    launch(&client);
    cubecl::future::block_on(client.sync()).expect("a server that runs nothing");
    let mut launched = LAUNCHED.lock().expect("no panic while it was held");
    launched.remove(&architecture).unwrap_or_default()
}

static LAUNCHED: Mutex<BTreeMap<u16, Vec<Source>>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Clone)]
pub struct OfflineCuda;

#[derive(Debug, Clone)]
pub struct Architecture(pub u16);

impl Default for Architecture {
    fn default() -> Self {
        Self(80)
    }
}

impl Device for Architecture {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(0, self.0)
    }
}

impl Runtime for OfflineCuda {
    type Compiler = CudaCompiler;
    type Server = OfflineServer;
    type Device = Architecture;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_client: &ComputeClient<Self>) -> &'static str {
        // Kernels of CUDA source are for the runtime of this name.
        "cuda"
    }

    fn require_array_lengths() -> bool {
        CudaRuntime::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        CudaRuntime::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        CudaRuntime::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        CudaRuntime::target_properties()
    }

    fn enumerate_devices(_: u16, _: &()) -> Vec<DeviceId> {
        Vec::new()
    }
}

#[derive(Debug)]
pub struct OfflineServer {
    arch: u16,
    utilities: Arc<ServerUtilities<Self>>,
}

/// Shared memory that a cube can ask for, in bytes (CUDA programming guide, table of compute capabilities).
pub fn max_shared_memory(arch: u16) -> usize {
    match arch {
        86 | 89 | 120.. => 99 << 10,
        80 => 163 << 10,
        _ => 227 << 10,
    }
}

fn properties(arch: u16) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: max_shared_memory(arch),
        max_cube_count: OfflineCuda::max_cube_count(),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(108),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let memory = MemoryDeviceProperties {
        max_page_size: 1 << 33,
        alignment: 512,
    };
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    properties.register_address_type(AddressType::U32);
    properties.register_address_type(AddressType::U64);
    let (i8_type, i32_type) = (ElemType::Int(IntKind::I8), ElemType::Int(IntKind::I32));
    let f16_type = ElemType::Float(FloatKind::F16);
    let bf16_type = ElemType::Float(FloatKind::BF16);
    let f32_type = ElemType::Float(FloatKind::F32);
    for element in [
        i8_type,
        i32_type,
        f16_type,
        bf16_type,
        f32_type,
        ElemType::UInt(UIntKind::U8),
        ElemType::UInt(UIntKind::U16),
        ElemType::UInt(UIntKind::U32),
        ElemType::UInt(UIntKind::U64),
        ElemType::Bool,
    ] {
        properties.register_type_usage(element, TypeUsage::all());
    }
    let features = &mut properties.features;
    features.plane.insert(Plane::Ops);
    features.plane.insert(Plane::Sync);
    features.plane.insert(Plane::NonUniformControlFlow);
    features.memory_reinterpret = true;
    features.alignment = true;
    features.copy_async = true;
    if arch >= 90 {
        features.tma.insert(Tma::Base);
    }
    if arch >= 100 {
        features.tma.insert(Tma::Im2colWide);
    }
    let matmul = &mut features.matmul;
    let mut multiplies = |operand: ElemType, sum: ElemType, k| {
        matmul.mma.insert(MmaConfig {
            a_type: operand.into(),
            b_type: operand.into(),
            cd_type: sum.into(),
            m: 16,
            n: 8,
            k,
        });
    };
    multiplies(i8_type, i32_type, 32);
    for float in [f16_type, bf16_type] {
        multiplies(float, f32_type, 16);
    }
    matmul
        .ldmatrix
        .extend([f16_type, bf16_type].map(StorageType::from));
    properties
}

impl DeviceService for OfflineServer {
    fn init(id: DeviceId) -> Self {
        let properties = properties(id.index_id);
        let policy = PitchedMemoryLayoutPolicy::new(properties.memory.alignment as usize);
        let logger = Arc::new(ServerLogger::default());
        Self {
            arch: id.index_id,
            utilities: Arc::new(ServerUtilities::new(properties, logger, (), policy)),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for OfflineServer {
    const SERVER_COMM_ENABLED: bool = false;
}

// The signature of a launch is unsafe; this one runs nothing.
#[allow(unsafe_code)]
impl ComputeServer for OfflineServer {
    type Kernel = Box<dyn CubeTask<CudaCompiler>>;
    type Info = ();
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Storage = BytesStorage;

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        _stream: StreamId,
    ) {
        let mut options = <CudaCompiler as cubecl::Compiler>::CompilationOptions::default();
        let supports = &mut options.supports_features;
        supports.grid_constants = true;
        supports.fast_math = true;
        supports.fast_tanh = true;
        supports.clusters = self.arch >= 90;
        supports.elect_sync = self.arch >= 90;
        let address_type = cubecl::prelude::KernelMetadata::address_type(&kernel);
        let compiled = kernel
            .compile(&mut Default::default(), &options, mode, address_type)
            .expect("a kernel that CubeCL's CUDA compiler accepts");
        let representation = compiled.repr.expect("the representation beside the source");
        let CubeCount::Static(x, y, z) = count else {
            unreachable!("no kernel of this crate counts its cubes on the device");
        };
        let source = Source {
            cubes: [x, y, z],
            units: compiled.cube_dim.num_elems(),
            buffers: (arguments.buffers.iter())
                .map(|buffer| buffer.size_in_used() as usize)
                .collect(),
            tensor_maps: (arguments.tensor_maps.iter())
                .map(|map| TensorMap::new(map, &arguments.buffers))
                .collect(),
            numbers: arguments.info.data,
            name: compiled.entrypoint_name,
            shared_memory: representation.shared_memory_size(),
            code: compiled.source,
        };
        let mut launched = LAUNCHED.lock().expect("no panic while it was held");
        launched.entry(self.arch).or_default().push(source);
    }

    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) {}

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_cleanup(&mut self, _: StreamId) {}

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}

    fn read(
        &mut self,
        _: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        unreachable!("nothing was computed")
    }

    fn get_resource(
        &mut self,
        _: Binding,
        _: StreamId,
    ) -> Result<ManagedResource<BytesResource>, ServerError> {
        unreachable!("nothing is in memory")
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        unreachable!("nothing is in memory")
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        unreachable!("nothing runs")
    }

    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        unreachable!("nothing runs")
    }
}
