//! Selection of a rank's device.

use crate::communicator::lock;
use crate::status::Outcome;
use libloading::os::unix::Library;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock};
use warplink::device::{self, Device, DeviceConfig};
use warplink::{DeviceKind, Error, ErrorKind, Result, variables};

/// The device kind in `WARPLINK_DEVICE`; if not set, a GPU if there is one.
pub(crate) fn kind() -> Result<DeviceKind> {
    static KIND: OnceLock<DeviceKind> = OnceLock::new();
    if let Some(kind) = KIND.get() {
        return Ok(*kind);
    }
    let named = variables::read("WARPLINK_DEVICE")?;
    let kind = match named.filter(|name| !name.is_empty()) {
        Some(name) => name.parse()?,
        None => DeviceKind::detect(),
    };
    Ok(*KIND.get_or_init(|| kind))
}

/// The index of the calling thread's GPU; 0 on the host device.
pub(crate) fn current() -> Outcome<usize> {
    if kind()? == DeviceKind::Host {
        return Ok(0);
    }
    // A thread without a context may still have selected a GPU: before CUDA 12, cudaSetDevice creates no context.
    // The driver is asked first, since a runtime that is linked statically exports no symbols.
    let ordinal = by_driver()?.or_else(by_runtime).unwrap_or(0);
    Ok(usize::try_from(ordinal).unwrap_or(0))
}

/// Makes a GPU that this process has opened current on the calling thread; nothing on the host device.
pub(crate) fn select(ordinal: usize) -> Outcome {
    type Device = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    type Select = unsafe extern "C" fn(*mut c_void) -> c_int;
    if kind()? == DeviceKind::Host {
        return Ok(());
    }
    // SAFETY: the signatures are those in the driver's documentation.
    let functions = unsafe {
        (
            by_name::<Device>(b"cuDeviceGet\0"),
            by_name::<Retain>(b"cuDevicePrimaryCtxRetain\0"),
            by_name::<Release>(b"cuDevicePrimaryCtxRelease_v2\0"),
            by_name::<Select>(b"cuCtxSetCurrent\0"),
        )
    };
    let (Some(device), Some(retain), Some(release), Some(select)) = functions else {
        return Err(no_driver("cuCtxSetCurrent, which selects the thread's GPU").into());
    };
    let (mut gpu, mut context) = (0, std::ptr::null_mut());
    // SAFETY: the places are valid for a write each. The context is released at once, since the opened device holds it.
    let code = unsafe {
        match device(&mut gpu, ordinal as c_int) {
            0 => match retain(&mut context, gpu) {
                0 => select(context).max(release(gpu)),
                code => code,
            },
            code => code,
        }
    };
    if code != 0 {
        let message = format!("GPU {ordinal} cannot be made the thread's");
        let error = Error::new(ErrorKind::Driver, message).with_code(code.into());
        return Err(error.into());
    }
    Ok(())
}

/// A function of the driver.
///
/// # Safety
/// `F` must be a function pointer with the function's signature.
unsafe fn by_name<F: Copy>(name: &[u8]) -> Option<F> {
    // SAFETY: loading the driver runs its initializers, which Warplink's own device does too.
    let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
    // SAFETY: the signature is guaranteed by the caller.
    let found = unsafe { library.get::<F>(name) };
    let function = found.ok().map(|found| *found);
    // Leaked, since the caller keeps the function.
    std::mem::forget(library);
    function
}

fn no_driver(function: &str) -> Error {
    Error::new(
        ErrorKind::LibraryMissing,
        format!("the CUDA driver has no {function}"),
    )
    .with_help("install the NVIDIA driver, version 570 or newer")
}

/// The GPU of the thread's current context, if it has one.
fn by_driver() -> Result<Option<c_int>> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
    static ASK: OnceLock<Option<Ask>> = OnceLock::new();
    // SAFETY: the signature is that in the driver's documentation.
    let ask = ASK.get_or_init(|| unsafe { by_name(b"cuCtxGetDevice\0") });
    let Some(ask) = ask else {
        return Err(no_driver("cuCtxGetDevice, which returns the thread's GPU"));
    };
    let mut ordinal = 0;
    // SAFETY: `ordinal` is valid for a write of one integer.
    let code = unsafe { ask(&mut ordinal) };
    // It fails if the thread has no context, which is not an error here.
    Ok((code == 0).then_some(ordinal))
}

/// The current device of the CUDA runtime, if one is loaded with global symbols.
fn by_runtime() -> Option<c_int> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the signature is that in the runtime's documentation.
    let found = unsafe { Library::this().get::<Ask>(b"cudaGetDevice\0") };
    let ask = *found.ok()?;
    let mut ordinal = 0;
    // SAFETY: `ordinal` is valid for a write of one integer.
    let code = unsafe { ask(&mut ordinal) };
    (code == 0).then_some(ordinal)
}

/// A device of this process, independent of any communicator's lifetime: for memory, and on the host device for
/// streams.
pub(crate) fn of_process(ordinal: usize) -> Result<Arc<dyn Device>> {
    static OPENED: Mutex<Option<HashMap<usize, Arc<dyn Device>>>> = Mutex::new(None);
    // Held while the device is opened, so that two threads do not open it twice.
    let mut opened = lock(&OPENED);
    let opened = opened.get_or_insert_default();
    if let Some(device) = opened.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = device::open(&DeviceConfig::new(kind()?, ordinal))?;
    opened.insert(ordinal, device.clone());
    Ok(device)
}
