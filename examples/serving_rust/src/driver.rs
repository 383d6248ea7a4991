//! The CUDA driver functions of this program, opened at run time, so that the program builds and starts without a driver.

use std::ffi::{c_char, c_int, c_uint, c_void, CString};
use std::mem::transmute;
use std::sync::OnceLock;

extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// CUDA_MEMCPY2D of cuda.h.
#[repr(C)]
pub struct Copy2D {
    pub source: Side,
    pub target: Side,
    pub width_in_bytes: usize,
    pub height: usize,
}

/// One side of a copy: device memory.
#[repr(C)]
pub struct Side {
    pub x_in_bytes: usize,
    pub y: usize,
    pub memory_type: c_uint,
    pub host: u64,
    pub device: u64,
    pub array: u64,
    pub pitch: usize,
}

fn symbol(name: &str) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        let now = 2; // RTLD_NOW
        unsafe { dlopen(c"libcuda.so.1".as_ptr(), now) as usize }
    });
    assert!(library != 0, "no NVIDIA driver: libcuda.so.1 cannot be opened");
    let name = CString::new(name).unwrap();
    let found = unsafe { dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!found.is_null(), "the driver has no {name:?}");
    found
}

macro_rules! driver {
    ($($name:ident = $symbol:literal($($argument:ident: $kind:ty),*);)*) => {$(
        #[allow(clippy::too_many_arguments)]
        pub fn $name($($argument: $kind),*) {
            let function: unsafe extern "C" fn($($kind),*) -> c_int = unsafe { transmute(symbol($symbol)) };
            let code = unsafe { function($($argument),*) };
            assert!(code == 0, "{} failed with {code}", $symbol);
        }
    )*};
}

driver! {
    init = "cuInit"(flags: c_uint);
    device_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
    retain_context = "cuDevicePrimaryCtxRetain"(context: *mut *mut c_void, device: c_int);
    set_context = "cuCtxSetCurrent"(context: *mut c_void);
    create_stream = "cuStreamCreate"(stream: *mut *mut c_void, flags: c_uint);
    synchronise = "cuStreamSynchronize"(stream: *mut c_void);
    load_module = "cuModuleLoadData"(module: *mut *mut c_void, ptx: *const c_void);
    module_function = "cuModuleGetFunction"(function: *mut *mut c_void, module: *mut c_void, name: *const c_char);
    launch_kernel = "cuLaunchKernel"(function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_memory: c_uint, stream: *mut c_void, parameters: *mut *mut c_void,
        extra: *mut *mut c_void);
    allocate = "cuMemAlloc_v2"(address: *mut u64, bytes: usize);
    copy_to_device = "cuMemcpyHtoD_v2"(to: u64, from: *const c_void, bytes: usize);
    copy_to_host = "cuMemcpyDtoH_v2"(to: *mut c_void, from: u64, bytes: usize);
    copy_on_stream = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    copy_2d_on_stream = "cuMemcpy2DAsync_v2"(copy: *const Copy2D, stream: *mut c_void);
    fill_16 = "cuMemsetD16_v2"(address: u64, value: u16, count: usize);
    begin_capture = "cuStreamBeginCapture_v2"(stream: *mut c_void, mode: c_int);
    end_capture = "cuStreamEndCapture"(stream: *mut c_void, graph: *mut *mut c_void);
    instantiate = "cuGraphInstantiateWithFlags"(replay: *mut *mut c_void, graph: *mut c_void, flags: u64);
    launch_graph = "cuGraphLaunch"(replay: *mut c_void, stream: *mut c_void);
}
