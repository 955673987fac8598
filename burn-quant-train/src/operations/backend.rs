//! The methods of `Backend` that decorators forward as they are.

/// Forwards them to `B`.
macro_rules! backend_operations {
    () => {
        fn ad_enabled(device: &Self::Device) -> bool {
            B::ad_enabled(device)
        }

        fn memory_persistent_allocations<
            Output: Send,
            Input: Send,
            Func: Fn(Input) -> Output + Send,
        >(
            device: &Self::Device,
            input: Input,
            func: Func,
        ) -> Output {
            B::memory_persistent_allocations(device, input, func)
        }

        fn memory_cleanup(device: &Self::Device) {
            B::memory_cleanup(device)
        }

        fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
            B::sync(device)
        }

        fn staging<'a, Iter>(data: Iter, device: &Self::Device)
        where
            Iter: Iterator<Item = &'a mut TensorData>,
        {
            B::staging(data, device)
        }

        fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
            B::supports_dtype(device, dtype)
        }

        fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
            B::dtype_usage(device, dtype)
        }

        fn device_count(type_id: u16) -> usize {
            B::device_count(type_id)
        }
    };
}

pub(crate) use backend_operations;
