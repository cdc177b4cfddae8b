//! Compiles CUDA C++ at run time: the embedded kernels, and users'.

use super::cache;
use crate::device::library::function_table;
use crate::device::library::{self, NVRTC};
use crate::error::{Error, ErrorKind, Result};
use crate::variables::cache_directory;
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::OnceLock;

/// CUDA C++ embedded in the library.
#[derive(Debug)]
pub(crate) struct KernelSource {
    pub(crate) name: &'static str,
    text: &'static str,
}

/// A file in `kernels`.
macro_rules! source {
    ($name:literal) => {
        KernelSource {
            name: $name,
            text: include_str!(concat!("../../../../kernels/", $name)),
        }
    };
}

/// Text of a header.
macro_rules! header {
    ($name:literal) => {
        include_str!(concat!("../../../../kernels/warplink/", $name))
    };
}

/// Element-wise kernels.
pub(crate) const ELEMENTWISE: KernelSource = source!("elementwise.cu");

/// Transfer kernels.
pub(crate) const TRANSFER: KernelSource = source!("transfer.cu");

/// Instantiates every call of a channel.
const CHANNEL: KernelSource = source!("channel.cu");

/// Instantiates every step of kernel sections.
const STEPS: KernelSource = source!("steps.cu");

/// Every kernel file; each is a translation unit.
const SOURCES: [&KernelSource; 4] = [&ELEMENTWISE, &TRANSFER, &CHANNEL, &STEPS];

/// Headers that kernels may include, by name.
const HEADERS: [(&CStr, &str); 13] = [
    (c"warplink/device.cuh", header!("device.cuh")),
    (c"warplink/groups.cuh", header!("groups.cuh")),
    (c"warplink/memory.cuh", header!("memory.cuh")),
    (c"warplink/signals.cuh", header!("signals.cuh")),
    (c"warplink/elements.cuh", header!("elements.cuh")),
    (c"warplink/lanes.cuh", header!("lanes.cuh")),
    (c"warplink/steps.cuh", header!("steps.cuh")),
    (c"warplink/announcements.cuh", header!("announcements.cuh")),
    (c"warplink/views.cuh", header!("views.cuh")),
    (c"warplink/values.cuh", header!("values.cuh")),
    (c"warplink/rows.cuh", header!("rows.cuh")),
    (c"warplink/sections.cuh", header!("sections.cuh")),
    (c"warplink/pairs.cuh", header!("pairs.cuh")),
];

/// Options for every file, besides the architecture.
const OPTIONS: [&str; 2] = ["--std=c++17", "--extra-device-vectorization"];

function_table! {
    /// NVRTC's functions.
    Compiler {
        nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        nvrtcGetErrorString(c_int) -> *const c_char;
        nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int;
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> c_int;
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> c_int;
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> c_int;
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> c_int;
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> c_int;
        nvrtcDestroyProgram(*mut nvrtcProgram) -> c_int;
    }
    optional {
        nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
        nvrtcGetSupportedArchs(*mut c_int) -> c_int;
    }
}

impl Compiler {
    fn get() -> Result<&'static Self> {
        static COMPILER: OnceLock<Compiler> = OnceLock::new();
        library::once(&COMPILER, &NVRTC, Self::resolve)
    }

    fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        // SAFETY: for every code the compiler gives a string of its own that is never freed.
        unsafe { library::check(code, ErrorKind::Driver, operation, self.nvrtcGetErrorString) }
    }

    fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to writable integers.
        let code = unsafe { (self.nvrtcVersion)(&mut major, &mut minor) };
        self.check(code, "ask for NVRTC's version")?;
        Ok((major, minor))
    }

    /// The compute capabilities that it compiles for, as 10 × major + minor; `None` if it does not tell.
    fn capabilities(&self) -> Option<Vec<c_int>> {
        let (count, list) = (
            self.nvrtcGetNumSupportedArchs?,
            self.nvrtcGetSupportedArchs?,
        );
        let mut number = 0;
        // SAFETY: `number` points to a writable integer.
        let code = unsafe { count(&mut number) };
        let mut all: Vec<c_int> = vec![0; usize::try_from(number).ok()?];
        if code != 0 || all.is_empty() {
            return None;
        }
        // SAFETY: `all` has as many writable integers as the compiler said that there are.
        let code = unsafe { list(all.as_mut_ptr()) };
        (code == 0).then_some(all)
    }

    /// Compiles `text` as file `name` with `options` for `architecture`, such as `sm_90`, to machine code.
    fn compile(
        &self,
        name: &str,
        text: &str,
        options: &[String],
        architecture: &str,
    ) -> Result<Vec<u8>> {
        let inner = |_| {
            Error::invalid("a kernel's source, name or option contains a zero byte")
                .with_operation("compile a kernel")
        };
        let source_name = CString::new(name).map_err(inner)?;
        let text = CString::new(text).map_err(inner)?;
        let options = options
            .iter()
            .map(|option| CString::new(option.as_str()).map_err(inner))
            .collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let headers = HEADERS.map(|(_, text)| CString::new(text).map_err(inner));
        let headers = headers.into_iter().collect::<Result<Vec<_>>>()?;
        let header_texts: Vec<_> = headers.iter().map(|text| text.as_ptr()).collect();
        let header_names = HEADERS.map(|(name, _)| name.as_ptr());
        let mut program = Program {
            compiler: self,
            raw: std::ptr::null_mut(),
        };
        // SAFETY: `raw` is an output parameter for one program; all strings end with a zero; the count passed is that
        // of the headers and of their names.
        let code = unsafe {
            (self.nvrtcCreateProgram)(
                &mut program.raw,
                text.as_ptr(),
                source_name.as_ptr(),
                HEADERS.len() as c_int,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        self.check(code, "create a program for NVRTC")?;
        // SAFETY: the program is live, and the count passed is that of the options.
        let code = unsafe {
            (self.nvrtcCompileProgram)(program.raw, pointers.len() as c_int, pointers.as_ptr())
        };
        self.check(code, "compile a kernel").map_err(|error| {
            let log = program.log().unwrap_or_default();
            Error::new(
                ErrorKind::Driver,
                format!("{name} for {architecture}: {}\n{log}", error.message()),
            )
            .with_operation("compile a kernel")
            .with_code(code.into())
        })?;
        let mut bytes = 0;
        // SAFETY: `bytes` is an output parameter for one size.
        let code = unsafe { (self.nvrtcGetCUBINSize)(program.raw, &mut bytes) };
        self.check(code, "get a kernel's machine code")?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: `image` has the size that the compiler reported.
        let code = unsafe { (self.nvrtcGetCUBIN)(program.raw, image.as_mut_ptr().cast()) };
        self.check(code, "get a kernel's machine code")?;
        if image.is_empty() {
            let text = format!("NVRTC produced no machine code for {name} on {architecture}");
            return Err(Error::new(ErrorKind::Driver, text)
                .with_help("name a real architecture, such as sm_90"));
        }
        Ok(image)
    }
}

/// An NVRTC program.
struct Program<'a> {
    compiler: &'a Compiler,
    raw: nvrtcProgram,
}

impl Program<'_> {
    /// The compilation log.
    fn log(&self) -> Option<String> {
        let mut bytes = 0;
        // SAFETY: `bytes` is an output parameter for one size; the program is live.
        if unsafe { (self.compiler.nvrtcGetProgramLogSize)(self.raw, &mut bytes) } != 0 {
            return None;
        }
        let mut log = vec![0_u8; bytes];
        // SAFETY: `log` has the size that the compiler reported.
        let code = unsafe { (self.compiler.nvrtcGetProgramLog)(self.raw, log.as_mut_ptr().cast()) };
        (code == 0).then(|| {
            String::from_utf8_lossy(&log)
                .trim_end_matches(['\0', '\n'])
                .to_owned()
        })
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created once, destroyed once.
            let code = unsafe { (self.compiler.nvrtcDestroyProgram)(&mut self.raw) };
            if code != 0 {
                tracing::warn!(code, "an NVRTC program was not destroyed");
            }
        }
    }
}

fn options(architecture: &str, further: &[String]) -> Vec<String> {
    let given = OPTIONS.into_iter().map(str::to_owned);
    std::iter::once(format!("--gpu-architecture={architecture}"))
        .chain(given)
        .chain(further.iter().cloned())
        .collect()
}

/// Whether NVRTC compiles for GPUs of a compute capability.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`] without NVRTC, [`ErrorKind::Unsupported`] if it does not. A version that does not tell
/// is assumed to.
pub(crate) fn check_capability((major, minor): (u32, u32)) -> Result<()> {
    let compiler = Compiler::get()?;
    let Some(all) = compiler.capabilities() else {
        return Ok(());
    };
    let own = c_int::try_from(10 * major + minor).unwrap_or(c_int::MAX);
    if all.contains(&own) {
        return Ok(());
    }
    let known = all.iter().map(|one| format!("{}.{}", one / 10, one % 10));
    let version = compiler.version()?;
    Err(Error::unsupported(format!(
        "NVRTC {}.{} compiles no kernels for GPUs of compute capability {major}.{minor}; expected one of {}",
        version.0,
        version.1,
        known.collect::<Vec<_>>().join(", ")
    ))
    .with_operation("compile a kernel")
    .with_help("install an NVRTC that supports this GPU (a newer one for a newer GPU): `pip install nvidia-cuda-nvrtc`"))
}

/// Machine code of `source` for `architecture`, from the disk cache if present.
pub(crate) fn machine_code(source: &KernelSource, architecture: &str) -> Result<Vec<u8>> {
    machine_code_of(source.name, source.text, &[], architecture)
}

/// As [`machine_code`], for any text, with additional options.
pub(crate) fn machine_code_of(
    name: &str,
    text: &str,
    further: &[String],
    architecture: &str,
) -> Result<Vec<u8>> {
    let compiler = Compiler::get()?;
    let (major, minor) = compiler.version()?;
    let version = format!("nvrtc {major}.{minor}");
    let options = options(architecture, further);
    let mut parts = vec![version.as_str(), name, text];
    parts.extend(options.iter().map(String::as_str));
    parts.extend(HEADERS.iter().map(|(_, header)| *header));
    cache::get_or_make(cache_directory().as_deref(), &cache::key(&parts), || {
        compiler.compile(name, text, &options, architecture)
    })
}

/// A compiled kernel file.
#[derive(Clone, Debug)]
pub struct CompiledKernel {
    /// File name.
    pub name: &'static str,
    /// Target architecture.
    pub architecture: String,
    /// Bytes of machine code.
    pub bytes: usize,
}

/// Compiles CUDA C++ that may include `<warplink/device.cuh>` for `architecture`, such as `sm_90`, with
/// additional options of NVRTC, bypassing the cache, and returns the machine code. Needs no GPU.
///
/// # Errors
/// As [`compile_all`].
pub fn compile(name: &str, text: &str, architecture: &str, further: &[String]) -> Result<Vec<u8>> {
    let options = options(architecture, further);
    Compiler::get()?.compile(name, text, &options, architecture)
}

/// Compiles every kernel for each of `architectures`, such as `sm_90`, with additional options of NVRTC, bypassing the
/// cache. Needs no GPU.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`] without NVRTC; [`ErrorKind::Driver`] with the compiler's messages if a
/// kernel does not compile.
pub fn compile_all(architectures: &[&str], further: &[String]) -> Result<Vec<CompiledKernel>> {
    let compiler = Compiler::get()?;
    let pairs = SOURCES.iter().flat_map(|source| {
        architectures
            .iter()
            .map(move |architecture| (source, architecture))
    });
    pairs
        .map(|(source, architecture)| {
            let options = options(architecture, further);
            let code = compiler.compile(source.name, source.text, &options, architecture)?;
            let bytes = code.len();
            Ok(CompiledKernel {
                name: source.name,
                architecture: (*architecture).to_owned(),
                bytes,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_the_compiler_lacks_is_named() {
        let refused = |capability| check_capability(capability).unwrap_err();
        if refused((0, 1)).kind() == ErrorKind::LibraryMissing {
            println!("NVRTC is not installed");
            return;
        }
        let text = refused((0, 1)).to_string();
        assert!(
            text.contains("capability 0.1; expected one of ") && text.contains("9.0"),
            "{text}"
        );
        check_capability((9, 0)).unwrap();
    }
}
