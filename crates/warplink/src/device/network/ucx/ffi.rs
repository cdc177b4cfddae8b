//! UCX's functions, status codes and structures, from its protocol layer (`ucp`), API version 1.13.

use crate::device::DeviceSlice;
use crate::device::library::{self, function_table};
use crate::error::{Error, ErrorKind, Result};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// API version of the structures in this file.
pub(super) const INTERFACE: (c_uint, c_uint) = (1, 13);

/// Environment variable for UCX's log level.
const LOG_VARIABLE: &str = "UCX_LOG_LEVEL";

/// `ucs_status_t`; negative is an error.
pub(super) type Status = c_int;

/// A request, null if complete, or a status encoded as a pointer (`ucs_status_ptr_t`).
pub(super) type RequestPointer = *mut c_void;

macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident;)*) => {
        $($(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) *mut c_void);)*
    };
}

handles! {
    /// `ucp_context_h`.
    Context;
    /// `ucp_worker_h`.
    Worker;
    /// `ucp_ep_h`.
    Endpoint;
    /// `ucp_mem_h`.
    Memory;
    /// `ucp_rkey_h`.
    RemoteKey;
    /// `ucp_config_t *`.
    Config;
}

/// The codes that callers distinguish.
pub(super) mod status {
    use super::Status;
    pub(crate) const OK: Status = 0;
    pub(crate) const IN_PROGRESS: Status = 1;
    pub(crate) const NO_MEMORY: Status = -4;
    pub(crate) const UNREACHABLE: Status = -6;
    pub(crate) const TIMED_OUT: Status = -20;
    pub(crate) const BUSY: Status = -15;
    /// Smallest error code.
    pub(crate) const LAST: Status = -100;
}

/// Field mask bits and flags.
pub(super) mod flag {
    pub(crate) const PARAM_FEATURES: u64 = 1;
    pub(crate) const ATTRIBUTE_MEMORY_TYPES: u64 = 4;
    pub(crate) const FEATURE_RMA: u64 = 2;
    pub(crate) const FEATURE_WAKEUP: u64 = 16;
    pub(crate) const WORKER_THREAD_MODE: u64 = 1;
    pub(crate) const THREAD_SINGLE: i32 = 0;
    pub(crate) const EP_REMOTE_ADDRESS: u64 = 1;
    pub(crate) const EP_ERROR_MODE: u64 = 2;
    pub(crate) const EP_ERROR_HANDLER: u64 = 4;
    pub(crate) const ERROR_MODE_PEER: i32 = 1;
    pub(crate) const MAP_ADDRESS: u64 = 1;
    pub(crate) const MAP_LENGTH: u64 = 2;
    pub(crate) const MAP_MEMORY_TYPE: u64 = 16;
    pub(crate) const OPERATION_FLAGS: u32 = 16;
    pub(crate) const OPERATION_MEMORY: u32 = 256;
    pub(crate) const CLOSE_FORCE: u32 = 1;
}

/// `ucs_memory_type_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryType(pub(super) c_int);

impl MemoryType {
    pub(super) const HOST: Self = Self(0);
    pub(super) const CUDA: Self = Self(1);

    pub(super) fn of(memory: &DeviceSlice) -> Self {
        if memory.backing().is_host_memory() {
            return Self::HOST;
        }
        Self::CUDA
    }
}

/// `ucp_params_t`.
#[repr(C)]
pub(super) struct ContextParams {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    /// Fields not selected by the mask, including those of later versions.
    pub(super) unused: [u64; 14],
}

/// `ucp_context_attr_t`.
#[repr(C)]
pub(super) struct ContextAttributes {
    pub(super) field_mask: u64,
    pub(super) request_size: usize,
    pub(super) thread_mode: c_int,
    /// Bitmap of memory types.
    pub(super) memory_types: u64,
    /// Fields not selected by the mask, including those of later versions.
    pub(super) unused: [u64; 28],
}

/// `ucp_worker_params_t`.
#[repr(C)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_int,
    pub(super) unused: [u64; 30],
}

/// `ucp_ep_params_t`.
#[repr(C)]
pub(super) struct EndpointParams {
    pub(super) field_mask: u64,
    pub(super) address: *const c_void,
    pub(super) error_mode: c_int,
    pub(super) error_handler: ErrorHandler,
    pub(super) unused: [u64; 14],
}

/// `ucp_err_handler_t`.
#[repr(C)]
pub(super) struct ErrorHandler {
    pub(super) callback: unsafe extern "C" fn(*mut c_void, Endpoint, Status),
    pub(super) argument: *mut c_void,
}

/// `ucp_mem_map_params_t`.
#[repr(C)]
pub(super) struct MapParams {
    pub(super) field_mask: u64,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    pub(super) flags: c_uint,
    pub(super) protection: c_uint,
    pub(super) memory_type: c_int,
    pub(super) unused: [u64; 8],
}

/// `ucp_request_param_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct RequestParams {
    pub(super) attributes: u32,
    pub(super) flags: u32,
    pub(super) between: [u64; 7],
    /// Registration of the local memory.
    pub(super) memory: Option<NonNull<c_void>>,
    pub(super) unused: [u64; 8],
}

function_table! {
    /// UCX's functions.
    Ucp {
        ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint) -> ();
        ucp_config_read(*const c_char, *const c_char, *mut Config) -> Status;
        ucp_config_modify(Config, *const c_char, *const c_char) -> Status;
        ucp_config_release(Config) -> ();
        ucp_init_version(c_uint, c_uint, *const ContextParams, Config, *mut Context) -> Status;
        ucp_cleanup(Context) -> ();
        ucp_context_query(Context, *mut ContextAttributes) -> Status;
        ucp_worker_create(Context, *const WorkerParams, *mut Worker) -> Status;
        ucp_worker_destroy(Worker) -> ();
        ucp_worker_get_address(Worker, *mut *mut c_void, *mut usize) -> Status;
        ucp_worker_release_address(Worker, *mut c_void) -> ();
        ucp_worker_progress(Worker) -> c_uint;
        ucp_worker_get_efd(Worker, *mut c_int) -> Status;
        ucp_worker_arm(Worker) -> Status;
        ucp_ep_create(Worker, *const EndpointParams, *mut Endpoint) -> Status;
        ucp_ep_close_nbx(Endpoint, *const RequestParams) -> RequestPointer;
        ucp_ep_flush_nbx(Endpoint, *const RequestParams) -> RequestPointer;
        ucp_mem_map(Context, *const MapParams, *mut Memory) -> Status;
        ucp_mem_unmap(Context, Memory) -> Status;
        ucp_rkey_pack(Context, Memory, *mut *mut c_void, *mut usize) -> Status;
        ucp_rkey_buffer_release(*mut c_void) -> ();
        ucp_ep_rkey_unpack(Endpoint, *const c_void, *mut RemoteKey) -> Status;
        ucp_rkey_destroy(RemoteKey) -> ();
        ucp_put_nbx(Endpoint, *const c_void, usize, u64, RemoteKey, *const RequestParams) -> RequestPointer;
        ucp_get_nbx(Endpoint, *mut c_void, usize, u64, RemoteKey, *const RequestParams) -> RequestPointer;
        ucp_request_check_status(*mut c_void) -> Status;
        ucp_request_free(*mut c_void) -> ();
        ucs_status_string(Status) -> *const c_char;
    }
    optional {
        ucs_debug_disable_signals() -> ();
        ucs_global_opts_set_value(*const c_char, *const c_char) -> Status;
    }
}

impl RequestParams {
    /// Parameters of an operation on local memory: host memory, or the registration `mapped`. If only the
    /// memory type were given, UCX would treat GPU memory allocated before it was loaded as host memory.
    pub(super) fn on(mapped: Option<Memory>) -> Self {
        let memory = mapped.and_then(|Memory(handle)| NonNull::new(handle));
        Self {
            attributes: memory.map_or(0, |_| flag::OPERATION_MEMORY),
            memory,
            ..Self::default()
        }
    }
}

impl Ucp {
    /// UCX, loaded.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Ucp> = OnceLock::new();
        library::once(&LIBRARY, &library::UCX, |loaded| {
            let library = Self::resolve(loaded)?;
            // UCX installs handlers for fatal signals when loaded; restore the process's own.
            if let Some(disable) = library.ucs_debug_disable_signals {
                // SAFETY: it has no arguments, and restores the handlers that were there.
                unsafe { disable() };
            }
            // UCX logs to standard output, which is reserved for results; its errors are returned anyway.
            if std::env::var_os(LOG_VARIABLE).is_none()
                && let Some(set) = library.ucs_global_opts_set_value
            {
                // SAFETY: both texts end with a zero, and UCX copies what it keeps.
                unsafe { set(c"LOG_LEVEL".as_ptr(), c"fatal".as_ptr()) };
            }
            Ok(library)
        })
    }

    /// Name and version.
    pub(super) fn name(&self) -> String {
        let (major, minor, release) = self.version();
        format!("UCX {major}.{minor}.{release}")
    }

    pub(super) fn version(&self) -> (c_uint, c_uint, c_uint) {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: three output parameters for an integer each.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut release) };
        (major, minor, release)
    }

    /// Turns a code into a result.
    pub(super) fn check(&self, status: Status, operation: &'static str) -> Result<()> {
        if status >= status::OK {
            return Ok(());
        }
        let kind = match status {
            status::NO_MEMORY => ErrorKind::OutOfMemory,
            _ => ErrorKind::Driver,
        };
        let error = Error::new(kind, format!("UCX: {}", self.text(status)))
            .with_operation(operation)
            .with_code(status.into());
        Err(match status {
            status::UNREACHABLE => error.with_help(
                "check that a network device leads to the peer (`ucx_info -d` lists them)",
            ),
            _ => error,
        })
    }

    /// UCX's description of a status.
    pub(super) fn text(&self, status: Status) -> String {
        // SAFETY: for every code UCX gives a string that is never freed.
        unsafe { library::message((self.ucs_status_string)(status)) }
    }
}

/// The status encoded in a pointer, if it is not a request.
pub(super) fn immediate(pointer: RequestPointer) -> Option<Status> {
    if pointer.is_null() {
        return Some(status::OK);
    }
    let value = pointer.addr().cast_signed();
    Status::try_from(value)
        .ok()
        .filter(|status| (status::LAST..status::OK).contains(status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn structures_have_ucxs_layout() {
        assert_eq!(offset_of!(ContextParams, features), 8);
        assert!(size_of::<ContextParams>() >= 80);
        assert_eq!(offset_of!(ContextAttributes, memory_types), 24);
        assert!(size_of::<ContextAttributes>() >= 64);
        assert_eq!(offset_of!(WorkerParams, thread_mode), 8);
        assert!(size_of::<WorkerParams>() >= 200);
        assert_eq!(offset_of!(EndpointParams, error_mode), 16);
        assert_eq!(offset_of!(EndpointParams, error_handler), 24);
        assert!(size_of::<EndpointParams>() >= 104);
        assert_eq!(offset_of!(MapParams, length), 16);
        assert_eq!(offset_of!(MapParams, memory_type), 32);
        assert!(size_of::<MapParams>() >= 56);
        assert_eq!(offset_of!(RequestParams, flags), 4);
        assert_eq!(offset_of!(RequestParams, memory), 64);
        assert!(size_of::<RequestParams>() >= 96);
    }

    #[test]
    fn a_pointer_is_a_request_or_a_status() {
        assert_eq!(immediate(std::ptr::null_mut()), Some(status::OK));
        let failed = std::ptr::without_provenance_mut((-25_isize).cast_unsigned());
        assert_eq!(immediate(failed), Some(-25));
        assert_eq!(
            immediate(std::ptr::without_provenance_mut(0x7f00_1000)),
            None
        );
    }
}
