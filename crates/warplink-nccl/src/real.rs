//! The real NCCL, for calls that Warplink does not support.
//!
//! It is opened by absolute path, never by the SONAME that this library shares, and with `RTLD_LOCAL` and
//! `RTLD_DEEPBIND`, so that its internal calls bind to itself. Where another library has loaded it before without these,
//! [`bind`] has them do so.

use crate::bind;
use crate::status::{Failure, Outcome};
use crate::table::real;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use warplink::{DeviceKind, Error, ErrorKind, Result, variables};

/// Environment variable with the path of the library.
pub(crate) const PATH_VARIABLE: &str = "WARPLINK_NCCL_LIBRARY";

/// The SONAME of NCCL, and of this library.
const SONAME: &str = "libnccl.so.2";

/// `RTLD_DEEPBIND`: the library's symbols take precedence over those of libraries loaded before.
const DEEP: c_int = 8;

/// A function that only this library exports, to detect that a candidate is this library.
const OWN: &[u8] = b"warplink_nccl_host_stream_synchronize\0";

/// The loader's own list of directories.
const LOADER_CONFIGURATION: &str = "/etc/ld.so.conf";

/// How deep its files may include one another.
const MAX_INCLUDED: usize = 3;

/// A function that a stand-in for NCCL exports, which has windows in the memory of the host device: that of the tests.
const STANDS_IN: &[u8] = b"warplink_stands_in_for_nccl\0";

/// System directories of libraries and those of CUDA's packages.
const SYSTEM: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/lib",
];

/// A loaded library. It stays loaded until the process exits.
#[derive(Debug)]
pub(crate) struct Loaded {
    library: Library,
    path: PathBuf,
}

/// A function of the library, resolved on first use.
pub(crate) struct Found<F>(OnceLock<F>);

impl<F: Copy> Found<F> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// The function `name`.
    ///
    /// # Safety
    /// `F` must be a function pointer with the function's signature.
    pub(crate) unsafe fn get(&self, name: &'static str) -> Outcome<F> {
        if let Some(function) = self.0.get() {
            return Ok(*function);
        }
        let loaded = loaded()?;
        // SAFETY: the signature is guaranteed by the caller; the library is never unloaded.
        let found = unsafe { loaded.library.get::<F>(name.as_bytes()) };
        let found = found.map(|found| *found).map_err(|_| {
            Failure::usage(
                format!(
                    "NCCL at {} has no {name}; it is too old",
                    loaded.path.display()
                ),
                format!("set {PATH_VARIABLE} to a newer one"),
            )
        })?;
        Ok(*self.0.get_or_init(|| found))
    }
}

/// The library, or the reason why it is not available.
pub(crate) fn loaded() -> Result<&'static Loaded> {
    static LOADED: OnceLock<Result<Loaded>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            let loaded = load();
            if let Ok(loaded) = &loaded {
                tracing::info!("the real NCCL is {}", loaded.path.display());
            }
            loaded
        })
        .as_ref()
        .map_err(Error::clone)
}

/// Whether the library is available.
pub(crate) fn is_there() -> bool {
    loaded().is_ok()
}

/// Whether the library is available, and has windows in the memory of such devices.
pub(crate) fn serves(kind: DeviceKind) -> bool {
    static STANDING_IN: OnceLock<bool> = OnceLock::new();
    match kind {
        DeviceKind::Cuda => is_there(),
        // Only one that is named is opened for this.
        DeviceKind::Host => *STANDING_IN.get_or_init(|| {
            let is_named = std::env::var_os(PATH_VARIABLE).is_some();
            // SAFETY: the symbol is looked up but not used.
            let stands_in =
                |one: &Loaded| unsafe { one.library.get::<*const c_void>(STANDS_IN) }.is_ok();
            is_named && loaded().is_ok_and(stands_in)
        }),
    }
}

/// The error of `what`, which needs the library.
pub(crate) fn missing(what: &str) -> Error {
    let error = loaded().err().unwrap_or_else(|| {
        let message = "NCCL is here, but not on another rank, or this is the host device, which it does not serve";
        Error::new(ErrorKind::LibraryMissing, message).with_help("install NCCL for every rank")
    });
    error.with_operation(what.to_owned())
}

/// The version of the library, if available.
pub(crate) fn version() -> Option<c_int> {
    is_there().then_some(())?;
    let mut version = 0;
    // SAFETY: `version` is valid for a write of one integer.
    let code = unsafe { real::GetVersion(&mut version) }.ok()?;
    (code == 0).then_some(version)
}

fn load() -> Result<Loaded> {
    if let Some(path) = variables::read(PATH_VARIABLE)?.filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        let refused = |why: String| {
            Error::new(
                ErrorKind::LibraryMissing,
                format!("{PATH_VARIABLE} is {}: {why}", path.display()),
            )
            .with_help(format!("set it to the absolute path of NCCL's {SONAME}"))
        };
        if !path.is_absolute() {
            return Err(refused("expected an absolute path".to_owned()));
        }
        return open(&path).map_err(refused);
    }
    let own = own_file();
    let mut tried = Vec::new();
    for path in candidates() {
        // This library is usually installed under NCCL's name, first in the search path; opening it would call
        // itself forever.
        if tried.contains(&path) || !path.is_file() || file(&path) == own {
            continue;
        }
        match open(&path) {
            Ok(loaded) => return Ok(loaded),
            Err(why) => tracing::debug!("{}: {why}", path.display()),
        }
        tried.push(path);
    }
    Err(Error::new(
        ErrorKind::LibraryMissing,
        "the real NCCL is needed and was not found",
    )
    .with_help(format!(
        "install NCCL, or set {PATH_VARIABLE} to its {SONAME}"
    )))
}

fn open(path: &Path) -> std::result::Result<Loaded, String> {
    // SAFETY: loading NCCL runs its initializers, which have no requirements.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | DEEP) };
    let library = library.map_err(|error| error.to_string())?;
    // A copy of this library is another file, which the search does not recognize by its inode.
    // SAFETY: the symbol is looked up but not used.
    if unsafe { library.get::<*const c_void>(OWN) }.is_ok() {
        return Err("it is this library".to_owned());
    }
    let handle = library.into_raw();
    // SAFETY: the handle is that of the library, which is closed by no one.
    let (bound, library) = unsafe { (bind::to_itself(handle), Library::from_raw(handle)) };
    let bound = bound.map_err(|error| format!("its calls of its own functions: {error}"))?;
    tracing::debug!(
        "{}: {bound} addresses were those of other functions",
        path.display()
    );
    let path = path.to_owned();
    Ok(Loaded { library, path })
}

/// Candidate paths: the loader's search path, directories next to packages that this process has loaded, those of conda
/// environments, and the system's.
fn candidates() -> Vec<PathBuf> {
    let mut directories = Vec::new();
    for name in ["WARPLINK_LIBRARY_PATH", "LD_LIBRARY_PATH"] {
        let listed = std::env::var_os(name).unwrap_or_default();
        // Relative and empty entries would find a library in whichever directory the program runs.
        directories.extend(std::env::split_paths(&listed).filter(|path| path.is_absolute()));
    }
    // Before the others: PyTorch's wheels depend on the NCCL in these packages, and were built with its version.
    let sites = sites();
    directories.extend(sites.iter().map(|site| site.join("nvidia/nccl/lib")));
    // The packages of an environment are in lib/python3.x/site-packages.
    directories.extend(
        sites
            .iter()
            .filter_map(|site| Some(site.ancestors().nth(2)?.to_owned())),
    );
    let environment =
        std::env::var_os("CONDA_PREFIX").map(|prefix| PathBuf::from(prefix).join("lib"));
    directories.extend(environment.filter(|path| path.is_absolute()));
    directories.extend(configured(Path::new(LOADER_CONFIGURATION), 0));
    directories.extend(SYSTEM.map(PathBuf::from));
    directories
        .into_iter()
        .map(|directory| directory.join(SONAME))
        .collect()
}

/// The directories in a file of the loader's configuration, and in those that it includes: all of a directory that end in
/// `.conf`, in order. `depth` is how many files have included this one.
fn configured(path: &Path, depth: usize) -> Vec<PathBuf> {
    // Files may include one another.
    if depth > MAX_INCLUDED {
        return Vec::new();
    }
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut directories = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(pattern) = line.strip_prefix("include ") {
            let folder = path.parent().map(|own| own.join(pattern.trim()));
            let folder = folder.as_deref().and_then(Path::parent);
            let Some(files) = folder.and_then(|folder| folder.read_dir().ok()) else {
                continue;
            };
            let files = files.flatten().map(|file| file.path());
            let mut files: Vec<PathBuf> = files
                .filter(|file| file.extension().is_some_and(|end| end == "conf"))
                .collect();
            files.sort_unstable();
            directories.extend(files.iter().flat_map(|file| configured(file, depth + 1)));
        } else if line.starts_with('/') {
            directories.push(PathBuf::from(line));
        }
    }
    directories
}

/// Python package directories from which this process has loaded a library.
fn sites() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut sites: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        let Some(start) = line.find('/') else {
            continue;
        };
        let path = &line[start..];
        for name in ["/site-packages/", "/dist-packages/"] {
            if let Some(at) = path.find(name) {
                let site = PathBuf::from(&path[..at + name.len() - 1]);
                if !sites.contains(&site) {
                    sites.push(site);
                }
            }
        }
    }
    sites
}

/// Device and inode of a file, which identify it.
fn file(path: &Path) -> Option<(u64, u64)> {
    let data = std::fs::metadata(path).ok()?;
    Some((data.dev(), data.ino()))
}

/// The file that this function was loaded from.
fn own_file() -> Option<(u64, u64)> {
    let own = own_file as *const () as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let range = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        let parsed = range.and_then(|(start, end)| {
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some(number(start)?..number(end)?)
        });
        parsed.is_some_and(|range| range.contains(&own))
    })?;
    file(Path::new(&line[line.find('/')?..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_this_code_is_known() {
        let own = file(&std::env::current_exe().unwrap());
        assert_eq!(own_file(), own);
        assert!(own.is_some());
    }

    #[test]
    fn directories_are_those_of_all_files_of_the_loader() {
        let folder = tempfile::tempdir().unwrap();
        let (own, more) = (folder.path().join("ld.so.conf"), folder.path().join("more"));
        std::fs::create_dir(&more).unwrap();
        for (path, text) in [
            (
                own.clone(),
                "/a # first\ninclude more/*.conf\n\nhwcap 1 nosegneg\n/d\n".to_owned(),
            ),
            (more.join("2.conf"), "/c".to_owned()),
            (more.join("1.conf"), "/b".to_owned()),
            (more.join("itself.conf"), "include *.conf".to_owned()),
            (more.join("other"), "/e".to_owned()),
        ] {
            std::fs::write(path, text).unwrap();
        }
        let mut found = configured(&own, 0);
        assert_eq!(found.last(), Some(&PathBuf::from("/d")));
        found.dedup();
        let expected = ["/a", "/b", "/c", "/b"].map(PathBuf::from);
        assert_eq!(found[..4], expected);
        assert!(found.len() < 100);
        assert!(configured(&more.join("none"), 0).is_empty());
    }

    #[test]
    fn a_library_without_a_file_is_an_error_that_says_why() {
        let error = open(Path::new("/nonexistent/libnccl.so.2")).unwrap_err();
        assert!(error.contains("nonexistent"), "{error}");
    }
}
