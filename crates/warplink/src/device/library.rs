//! Locates vendor libraries at run time, and reports where they were searched for.

use crate::error::{Error, ErrorKind, Result};
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Colon-separated list of directories that are searched first.
const PATH_VARIABLE: &str = "WARPLINK_LIBRARY_PATH";

/// Directories of NVIDIA's wheels below site-packages or a `pip install --target`.
const WHEEL_DIRECTORIES: [&str; 4] = [
    "nvidia/cu13/lib",
    "nvidia/cuda_nvrtc/lib",
    "nvidia/cublas/lib",
    "nvidia/nccl/lib",
];

/// Declares a table of a library's functions, and how to resolve them.
macro_rules! function_table {
    (
        $(#[$meta:meta])* $table:ident {
            $($field:ident ( $($argument:ty),* $(,)? ) -> $result:ty;)*
        }
        optional {
            $($maybe:ident ( $($maybe_argument:ty),* $(,)? ) -> $maybe_result:ty;)*
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
        }

        impl $table {
            /// Resolves every function.
            fn resolve(library: &$crate::device::library::Loaded) -> $crate::error::Result<Self> {
                Ok(Self {
                    // SAFETY: each signature is that of the vendor's header for this very symbol,
                    // with integers in place of enumerations, which have the same representation.
                    $($field: unsafe { library.get(stringify!($field)) }?,)*
                    // SAFETY: as above.
                    $($maybe: unsafe { library.find(stringify!($maybe)) },)*
                })
            }
        }
    };
}
pub(crate) use function_table;

/// A library to load: name, sonames, and installation help.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) name: &'static str,
    sonames: &'static [&'static str],
    help: &'static str,
    /// Whether it belongs to the CUDA toolkit rather than the driver, which is only installed system-wide.
    toolkit: bool,
}

pub(crate) const DRIVER: Wanted = Wanted {
    name: "the CUDA driver",
    sonames: &["libcuda.so.1"],
    help: "install the NVIDIA driver, version 570 or newer, or use the host device",
    toolkit: false,
};

pub(crate) const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    sonames: &["libnvrtc.so.13", "libnvrtc.so.12"],
    help: "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`; if it is not found there, set WARPLINK_LIBRARY_PATH to its directory",
    toolkit: true,
};

pub(crate) const CUBLAS_LT: Wanted = Wanted {
    name: "cuBLASLt",
    sonames: &["libcublasLt.so.13", "libcublasLt.so.12"],
    help: "install the CUDA toolkit, or `pip install nvidia-cublas`; if it is not found there, set WARPLINK_LIBRARY_PATH to its directory",
    toolkit: true,
};

pub(crate) const CUBLAS: Wanted = Wanted {
    name: "cuBLAS",
    sonames: &["libcublas.so.13", "libcublas.so.12"],
    help: CUBLAS_LT.help,
    toolkit: true,
};

pub(crate) const NCCL: Wanted = Wanted {
    name: "NCCL",
    sonames: &["libnccl.so.2"],
    help: "install NCCL, or `pip install nvidia-nccl-cu13`; if it is not found there, set WARPLINK_LIBRARY_PATH to its directory",
    toolkit: true,
};

pub(crate) const NVML: Wanted = Wanted {
    name: "NVML",
    sonames: &["libnvidia-ml.so.1"],
    help: "install the NVIDIA driver with its management library (libnvidia-ml.so.1); in a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    toolkit: false,
};

pub(crate) const UCX: Wanted = Wanted {
    name: "UCX",
    sonames: &["libucp.so.0"],
    help: "install UCX 1.13 or newer (libucx0 on Debian and Ubuntu); if it is not found there, set WARPLINK_LIBRARY_PATH to its directory",
    toolkit: false,
};

/// A loaded library. Never unloaded, since function pointers into it are kept.
#[derive(Debug)]
pub(crate) struct Loaded {
    library: &'static libloading::Library,
    name: &'static str,
    help: &'static str,
    path: PathBuf,
}

impl Loaded {
    /// Resolves `symbol`, if the library has it.
    ///
    /// # Safety
    /// `F` must be a function pointer type with the symbol's signature and calling convention.
    pub(crate) unsafe fn find<F: Copy>(&self, symbol: &'static str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the caller vouches for the type, which is as large; the library is never unloaded, so that the pointer
        // stays valid.
        self.address(symbol)
            .map(|found| unsafe { std::mem::transmute_copy(&found) })
    }

    /// Resolves `symbol`.
    ///
    /// # Safety
    /// As for [`find`](Self::find).
    pub(crate) unsafe fn get<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        // SAFETY: passed on to the caller.
        unsafe { self.find(symbol) }.ok_or_else(|| self.missing(symbol))
    }

    // `address` and `missing` are not generic: they would be compiled for each of hundreds of function types.
    fn address(&self, symbol: &'static str) -> Option<NonNull<c_void>> {
        // SAFETY: the address is only copied.
        let found = unsafe { self.library.get::<*mut c_void>(symbol.as_bytes()) };
        NonNull::new(*found.ok()?)
    }

    fn missing(&self, symbol: &'static str) -> Error {
        let message = format!(
            "{} at {} has no {symbol}; it is too old",
            self.name,
            self.path.display()
        );
        Error::new(ErrorKind::LibraryMissing, message).with_help(self.help)
    }
}

/// Result of searching for a library.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    /// Library name.
    pub name: &'static str,
    /// The file that was loaded, if one was.
    pub path: Option<PathBuf>,
    /// Names and paths that were tried without success.
    pub tried: Vec<PathBuf>,
    /// How to install it.
    pub help: &'static str,
}

/// A library's functions, loaded and resolved on first use. Failures are not cached: the next call tries again.
pub(crate) fn once<T>(
    functions: &'static OnceLock<T>,
    wanted: &'static Wanted,
    resolve: impl FnOnce(&Loaded) -> Result<T>,
) -> Result<&'static T> {
    if let Some(functions) = functions.get() {
        return Ok(functions);
    }
    // Only a success is kept: the library may be installed, or its path set, before the next attempt.
    let resolved = resolve(&load(wanted)?)?;
    Ok(functions.get_or_init(|| resolved))
}

/// Loads `wanted` from the first matching location.
pub(crate) fn load(wanted: &'static Wanted) -> Result<Loaded> {
    search(wanted, &Places::of_this_process()).map_err(|tried| {
        let tried: Vec<_> = tried
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        Error::new(
            ErrorKind::LibraryMissing,
            format!("{} was not found (tried {})", wanted.name, tried.join(", ")),
        )
        .with_help(wanted.help)
    })
}

/// The library's description of an error code.
///
/// # Safety
/// `text` must be null or a string that ends with a zero and is not freed meanwhile.
pub(crate) unsafe fn message(text: *const c_char) -> String {
    if text.is_null() {
        return "an unknown error".to_owned();
    }
    // SAFETY: the caller vouches for the string.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Fails unless a call has returned 0: with `kind`, and the library's description of the code.
///
/// # Safety
/// `text` must give null or a string that ends with a zero and is never freed.
pub(crate) unsafe fn check(
    code: c_int,
    kind: ErrorKind,
    operation: &'static str,
    text: unsafe extern "C" fn(c_int) -> *const c_char,
) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for the function.
    let text = unsafe { message(text(code)) };
    Err(Error::new(kind, text)
        .with_operation(operation)
        .with_code(code.into()))
}

/// For each library, where it was found or searched for.
pub fn libraries() -> Vec<LibraryReport> {
    [&DRIVER, &NVRTC, &CUBLAS_LT, &CUBLAS, &NCCL, &NVML, &UCX]
        .into_iter()
        .map(|wanted| {
            let (path, tried) = match search(wanted, &Places::of_this_process()) {
                Ok(loaded) => (Some(loaded.path), Vec::new()),
                Err(tried) => (None, tried),
            };
            LibraryReport {
                name: wanted.name,
                path,
                tried,
                help: wanted.help,
            }
        })
        .collect()
}

/// Search locations from the environment, injectable for tests.
struct Places {
    listed: Vec<PathBuf>,
    cuda_homes: Vec<PathBuf>,
    search_path: OsString,
    python_prefixes: Vec<PathBuf>,
}

impl Places {
    fn of_this_process() -> Self {
        let listed = std::env::var_os(PATH_VARIABLE).unwrap_or_default();
        let directories = |names: &[&str]| {
            names
                .iter()
                .filter_map(std::env::var_os)
                .map(PathBuf::from)
                .collect()
        };
        let mut cuda_homes: Vec<_> = directories(&["CUDA_HOME", "CUDA_PATH"]);
        cuda_homes.push(PathBuf::from("/usr/local/cuda"));
        Self {
            listed: std::env::split_paths(&listed)
                // A relative entry would load code from the current directory, which an attacker may control.
                .filter(|path| path.is_absolute())
                .collect(),
            cuda_homes,
            search_path: std::env::var_os("PATH").unwrap_or_default(),
            python_prefixes: directories(&["VIRTUAL_ENV", "CONDA_PREFIX"]),
        }
    }

    /// Directories to search before and after the dynamic loader's own search.
    fn directories(&self, toolkit: bool) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let with_wheels = |root: &PathBuf| {
            std::iter::once(root.clone())
                .chain(WHEEL_DIRECTORIES.iter().map(|below| root.join(below)))
                .collect::<Vec<_>>()
        };
        let first = self.listed.iter().flat_map(with_wheels).collect();
        if !toolkit {
            return (first, Vec::new());
        }
        let mut then: Vec<_> = self
            .cuda_homes
            .iter()
            .map(|home| home.join("lib64"))
            .collect();
        for site in self.site_packages() {
            then.extend(WHEEL_DIRECTORIES.iter().map(|below| site.join(below)));
        }
        (first, then)
    }

    /// Package directories of the `python3` on PATH.
    fn site_packages(&self) -> Vec<PathBuf> {
        let mut prefixes = self.python_prefixes.clone();
        if let Some(python) = std::env::split_paths(&self.search_path)
            .map(|path| path.join("python3"))
            .find(|p| p.is_file())
        {
            // In a virtual environment python3 is a symlink out of it; both ends have packages.
            let prefix = |path: &Path| path.parent().and_then(Path::parent).map(Path::to_path_buf);
            let resolved = fs::canonicalize(&python).ok();
            prefixes.extend(prefix(&python));
            prefixes.extend(resolved.as_deref().and_then(prefix));
            // pyenv puts shims on PATH that start one of its versions.
            if python
                .parent()
                .is_some_and(|parent| parent.ends_with("shims"))
            {
                prefixes.extend(
                    prefix(&python)
                        .map(|root| children(&root.join("versions"), ""))
                        .unwrap_or_default(),
                );
            }
        }
        let mut sites = Vec::new();
        for prefix in prefixes {
            for version in children(&prefix.join("lib"), "python3") {
                sites.extend(["site-packages", "dist-packages"].map(|name| version.join(name)));
            }
            for version in children(&prefix.join("local/lib"), "python3") {
                sites.push(version.join("dist-packages"));
            }
        }
        let mut unique = Vec::new();
        for site in sites.into_iter().filter(|site| site.is_dir()) {
            if !unique.contains(&site) {
                unique.push(site);
            }
        }
        unique
    }
}

/// Entries of `directory` whose names start with `start`, sorted.
fn children(directory: &Path, start: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(start))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

fn search(wanted: &'static Wanted, places: &Places) -> std::result::Result<Loaded, Vec<PathBuf>> {
    let (first, then) = places.directories(wanted.toolkit);
    let mut tried = Vec::new();
    let in_directories = |directories: Vec<PathBuf>, tried: &mut Vec<PathBuf>| {
        for directory in directories {
            for soname in wanted.sonames {
                let path = directory.join(soname);
                if path.is_file()
                    && let Some(library) = open(&path)
                {
                    return Some((library, path));
                }
                tried.push(path);
            }
        }
        None
    };
    let by_name = |tried: &mut Vec<PathBuf>| {
        // By soname the loader returns a copy already in the process, such as PyTorch's, and otherwise
        // searches the system's directories.
        for soname in wanted.sonames {
            if let Some(library) = open(Path::new(soname)) {
                return Some((
                    library,
                    loaded_path(soname).unwrap_or_else(|| PathBuf::from(soname)),
                ));
            }
            tried.push(PathBuf::from(soname));
        }
        None
    };
    let found = in_directories(first, &mut tried)
        .or_else(|| by_name(&mut tried))
        .or_else(|| in_directories(then, &mut tried));
    match found {
        Some((library, path)) => Ok(Loaded {
            // Never unloaded: function pointers of it are kept in statics.
            library: Box::leak(Box::new(library)),
            name: wanted.name,
            help: wanted.help,
            path,
        }),
        None => Err(tried),
    }
}

fn open(path: &Path) -> Option<libloading::Library> {
    // SAFETY: loading runs the library's initializers; these are the vendor's own libraries, whose
    // initializers have no requirements towards the process.
    unsafe { libloading::Library::new(path) }.ok()
}

/// Path of a library that was loaded by soname.
fn loaded_path(soname: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(soname))
        })
        .map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLANTED: Wanted = Wanted {
        name: "planted",
        sonames: &["libplanted.so.7"],
        help: "plant it",
        toolkit: true,
    };

    fn nowhere() -> Places {
        Places {
            listed: vec![],
            cuda_homes: vec![],
            search_path: OsString::new(),
            python_prefixes: vec![],
        }
    }

    /// A shared library that exists on every test machine, to copy under other names.
    fn some_library() -> PathBuf {
        loaded_path("libc.so").unwrap()
    }

    #[test]
    fn finds_a_library_in_a_listed_directory_and_in_a_wheel_below_it() {
        for below in ["", "nvidia/cu13/lib"] {
            let root = tempfile::tempdir().unwrap();
            let directory = root.path().join(below);
            fs::create_dir_all(&directory).unwrap();
            fs::copy(some_library(), directory.join("libplanted.so.7")).unwrap();
            let places = Places {
                listed: vec![root.path().to_path_buf()],
                ..nowhere()
            };
            let loaded = search(&PLANTED, &places).unwrap();
            assert_eq!(loaded.path, directory.join("libplanted.so.7"));
            // SAFETY: the function is not called.
            let missing =
                unsafe { loaded.get::<unsafe extern "C" fn()>("no_such_symbol") }.unwrap_err();
            assert_eq!(missing.kind(), ErrorKind::LibraryMissing);
            assert!(missing.to_string().contains("no_such_symbol"), "{missing}");
        }
    }

    #[test]
    fn finds_a_wheel_next_to_python() {
        let root = tempfile::tempdir().unwrap();
        let libraries = root
            .path()
            .join("lib/python3.12/site-packages/nvidia/cublas/lib");
        fs::create_dir_all(&libraries).unwrap();
        fs::create_dir_all(root.path().join("bin")).unwrap();
        fs::write(root.path().join("bin/python3"), "").unwrap();
        fs::copy(some_library(), libraries.join("libplanted.so.7")).unwrap();
        let places = Places {
            search_path: root.path().join("bin").into_os_string(),
            ..nowhere()
        };
        assert_eq!(
            search(&PLANTED, &places).unwrap().path,
            libraries.join("libplanted.so.7")
        );
    }

    #[test]
    fn error_lists_searched_paths() {
        let root = tempfile::tempdir().unwrap();
        let places = Places {
            listed: vec![root.path().to_path_buf()],
            ..nowhere()
        };
        let tried = search(&PLANTED, &places).unwrap_err();
        assert!(tried.contains(&root.path().join("libplanted.so.7")));
        assert!(tried.contains(&PathBuf::from("libplanted.so.7")));
    }

    #[test]
    fn a_file_that_is_no_library_is_passed_over() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("libplanted.so.7"), "not a library").unwrap();
        let places = Places {
            listed: vec![root.path().to_path_buf()],
            ..nowhere()
        };
        assert!(search(&PLANTED, &places).is_err());
    }
}
