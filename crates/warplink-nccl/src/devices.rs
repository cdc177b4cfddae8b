//! Selection of a rank's device.

use crate::communicator::lock;
use crate::status::Outcome;
use libloading::os::unix::Library;
use std::collections::HashMap;
use std::ffi::c_int;
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

/// The GPU of the thread's current context, if it has one.
fn by_driver() -> Result<Option<c_int>> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
    static ASK: OnceLock<Option<Ask>> = OnceLock::new();
    let ask = ASK.get_or_init(|| {
        // SAFETY: loading the driver runs its initializers, which Warplink's own device does too.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the signature is that in the driver's documentation.
        let found = unsafe { library.get::<Ask>(b"cuCtxGetDevice\0") };
        let ask = found.ok().map(|found| *found);
        // Leaked, since the function pointer is cached.
        std::mem::forget(library);
        ask
    });
    let Some(ask) = ask else {
        return Err(Error::new(
            ErrorKind::LibraryMissing,
            "the CUDA driver has no cuCtxGetDevice, which returns the thread's GPU",
        )
        .with_help("install the NVIDIA driver, version 570 or newer"));
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
