//! Compiling the kernels that are embedded in the library for the GPU at hand.

use super::cache;
use crate::device::cuda::driver::function_table;
use crate::device::cuda::driver::library::{self, NVRTC};
use crate::error::{Error, ErrorKind, Result};
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

/// A piece of CUDA C++ that is embedded in the library.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    text: &'static str,
}

/// The sum of arrays.
pub(crate) const SUM: Source = Source {
    name: "sum.cu",
    text: include_str!("../../../../kernels/sum.cu"),
};

/// A small transfer.
pub(crate) const TRANSFER: Source = Source {
    name: "transfer.cu",
    text: include_str!("../../../../kernels/transfer.cu"),
};

/// Every kernel file; each is compiled by itself.
const SOURCES: [&Source; 2] = [&SUM, &TRANSFER];

/// What every file is compiled with, besides the architecture.
const OPTIONS: [&str; 2] = ["--std=c++17", "--extra-device-vectorization"];

function_table! {
    /// The compiler's functions.
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
    optional {}
}

impl Compiler {
    fn get() -> Result<&'static Self> {
        static COMPILER: OnceLock<Compiler> = OnceLock::new();
        if let Some(compiler) = COMPILER.get() {
            return Ok(compiler);
        }
        let compiler = Self::resolve(&library::load(&NVRTC)?)?;
        Ok(COMPILER.get_or_init(|| compiler))
    }

    fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: for every code the compiler gives a string of its own that is never freed.
        let text = unsafe { (self.nvrtcGetErrorString)(code) };
        // SAFETY: as above, and it ends with a zero.
        let text = unsafe { library::message(text) };
        Err(Error::new(ErrorKind::Driver, text)
            .with_operation(operation)
            .with_code(code.into()))
    }

    fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are output parameters for one integer each.
        let code = unsafe { (self.nvrtcVersion)(&mut major, &mut minor) };
        self.check(code, "ask for NVRTC's version")?;
        Ok((major, minor))
    }

    /// Compiles `source` for `architecture`, such as `sm_90`, to machine code.
    fn compile(&self, source: &Source, architecture: &str) -> Result<Vec<u8>> {
        let inner = |_| Error::invalid("a kernel's source, name or option contains a zero byte");
        let text = CString::new(source.text).map_err(inner)?;
        let name = CString::new(source.name).map_err(inner)?;
        let options = options(architecture)
            .into_iter()
            .map(|option| CString::new(option).map_err(inner))
            .collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Program {
            compiler: self,
            raw: std::ptr::null_mut(),
        };
        let (none, no_names) = (std::ptr::null(), std::ptr::null());
        // SAFETY: `raw` is an output parameter for one program; both strings end with a zero; no
        // headers.
        let code = unsafe {
            (self.nvrtcCreateProgram)(
                &mut program.raw,
                text.as_ptr(),
                name.as_ptr(),
                0,
                none,
                no_names,
            )
        };
        self.check(code, "create a program for NVRTC")?;
        // SAFETY: the program is live, and there are as many options as are said.
        let code = unsafe {
            (self.nvrtcCompileProgram)(program.raw, pointers.len() as c_int, pointers.as_ptr())
        };
        self.check(code, "compile a kernel").map_err(|error| {
            let log = program.log().unwrap_or_default();
            Error::new(
                ErrorKind::Driver,
                format!(
                    "{} for {architecture}: {}\n{log}",
                    source.name,
                    error.message()
                ),
            )
            .with_operation("compile a kernel")
            .with_code(code.into())
        })?;
        let mut bytes = 0;
        // SAFETY: `bytes` is an output parameter for one size.
        let code = unsafe { (self.nvrtcGetCUBINSize)(program.raw, &mut bytes) };
        self.check(code, "take a kernel's machine code")?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: `image` has as many bytes as the compiler said that it writes.
        let code = unsafe { (self.nvrtcGetCUBIN)(program.raw, image.as_mut_ptr().cast()) };
        self.check(code, "take a kernel's machine code")?;
        if image.is_empty() {
            let text = format!(
                "NVRTC made no machine code of {} for {architecture}",
                source.name
            );
            return Err(Error::new(ErrorKind::Driver, text)
                .with_help("name a real architecture, such as sm_90"));
        }
        Ok(image)
    }
}

/// A program of the compiler's.
struct Program<'a> {
    compiler: &'a Compiler,
    raw: nvrtcProgram,
}

impl Program<'_> {
    /// What the compiler said about it.
    fn log(&self) -> Option<String> {
        let mut bytes = 0;
        // SAFETY: `bytes` is an output parameter for one size; the program is live.
        if unsafe { (self.compiler.nvrtcGetProgramLogSize)(self.raw, &mut bytes) } != 0 {
            return None;
        }
        let mut log = vec![0_u8; bytes];
        // SAFETY: `log` has as many bytes as the compiler said that it writes.
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
                tracing::warn!(code, "a program of NVRTC's was not destroyed");
            }
        }
    }
}

fn options(architecture: &str) -> Vec<String> {
    let given = OPTIONS.into_iter().map(str::to_owned);
    std::iter::once(format!("--gpu-architecture={architecture}"))
        .chain(given)
        .collect()
}

/// The machine code of `source` for `architecture`, from the disk where it was compiled before.
pub(crate) fn machine_code(source: &Source, architecture: &str) -> Result<Vec<u8>> {
    let compiler = Compiler::get()?;
    let (major, minor) = compiler.version()?;
    let version = format!("nvrtc {major}.{minor}");
    let options = options(architecture);
    let mut parts = vec![version.as_str(), source.name, source.text];
    parts.extend(options.iter().map(String::as_str));
    cache::get_or_make(cache::directory().as_deref(), &cache::key(&parts), || {
        compiler.compile(source, architecture)
    })
}

/// A kernel file that was compiled.
#[derive(Clone, Debug)]
pub struct CompiledKernel {
    /// The file's name.
    pub name: &'static str,
    /// The architecture that it was compiled for.
    pub architecture: String,
    /// Bytes of machine code.
    pub bytes: usize,
}

/// Compiles every kernel for each of `architectures`, such as `sm_90`, anew. Needs no GPU.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`] without NVRTC, [`ErrorKind::Driver`] with the compiler's messages
/// where a kernel does not compile.
pub fn compile_all(architectures: &[&str]) -> Result<Vec<CompiledKernel>> {
    let compiler = Compiler::get()?;
    let pairs = SOURCES.iter().flat_map(|source| {
        architectures
            .iter()
            .map(move |architecture| (source, architecture))
    });
    pairs
        .map(|(source, architecture)| {
            let bytes = compiler.compile(source, architecture)?.len();
            Ok(CompiledKernel {
                name: source.name,
                architecture: (*architecture).to_owned(),
                bytes,
            })
        })
        .collect()
}
