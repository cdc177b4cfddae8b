//! Has a library's calls of its own public functions reach these functions.
//!
//! NCCL calls some of its public functions itself, and the loader looks these up among all libraries of the process. Once
//! another library has loaded NCCL, as PyTorch does when it is imported, `RTLD_DEEPBIND` comes too late, and such calls reach
//! the functions of the same names of this library, with NCCL's handles, in place of NCCL's own. They go through slots of
//! addresses, which are filled here as the loader fills them with `RTLD_DEEPBIND`.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::io::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Prefixes of the names of public functions.
const PREFIXES: [&[u8]; 2] = [b"nccl", b"pnccl"];

/// Relocations that store a function's address: in data, in the table of addresses, and in that of calls.
// R_AARCH64_ABS64, R_AARCH64_GLOB_DAT and R_AARCH64_JUMP_SLOT; R_X86_64_64, R_X86_64_GLOB_DAT and
// R_X86_64_JUMP_SLOT. Both architectures have relocations with addends only.
const STORED: [u32; 3] = if cfg!(target_arch = "aarch64") {
    [257, 1025, 1026]
} else {
    [1, 6, 7]
};

/// `struct link_map`: its first members.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

/// `Elf64_Dyn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: usize,
    value: usize,
}

/// `Elf64_Rela`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: usize,
    kind: u32,
    symbol: u32,
    addend: usize,
}

/// `Elf64_Sym`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    _other: u8,
    section: u16,
    value: usize,
    _size: usize,
}

/// Tags of [`Dynamic`]: tables, and sizes of those of relocations.
// DT_STRTAB and DT_SYMTAB; DT_RELA with DT_RELASZ, and DT_JMPREL with DT_PLTRELSZ.
const STRINGS: usize = 5;
const SYMBOLS: usize = 6;
const RELOCATIONS: [(usize, usize); 2] = [(7, 8), (23, 2)];

/// The low bits of [`Symbol::info`], and their value for functions.
const TYPE: u8 = 15;
const FUNCTION: u8 = 2;

/// Numbers of C's headers.
const RTLD_DI_LINKMAP: c_int = 2;
const SC_PAGESIZE: c_int = 30;
const READ_WRITE: c_int = 3;

unsafe extern "C" {
    fn dlinfo(library: *mut c_void, request: c_int, to: *mut c_void) -> c_int;
    fn mprotect(start: *mut c_void, bytes: usize, protection: c_int) -> c_int;
    fn sysconf(name: c_int) -> c_long;
}

/// Fills the slots of the library. Returns how many had another address.
///
/// # Safety
/// `library` must be a handle of `dlopen`, and its library stay loaded.
pub(crate) unsafe fn to_itself(library: *mut c_void) -> Result<usize> {
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the handle is guaranteed by the caller, and `map` is valid for a write of an address.
    if unsafe { dlinfo(library, RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0 || map.is_null() {
        return Err(Error::other("the loader does not tell where it is"));
    }
    // SAFETY: the loader keeps this structure as long as the library is loaded.
    let LinkMap { base, dynamic, .. } = unsafe { map.read() };
    let value = |tag| {
        let mut entry = dynamic;
        loop {
            // SAFETY: the entries end with one of tag 0.
            let Dynamic { tag: found, value } = unsafe { entry.read() };
            match found {
                0 => return None,
                _ if found == tag => return Some(value),
                // SAFETY: it is not the last entry.
                _ => entry = unsafe { entry.add(1) },
            }
        }
    };
    // Some loaders replace offsets by addresses, and some do not.
    let address = |tag| value(tag).map(|at| if at < base { base + at } else { at });
    let (Some(strings), Some(symbols)) = (address(STRINGS), address(SYMBOLS)) else {
        return Ok(0);
    };
    let mut filled = 0;
    for (table, bytes) in RELOCATIONS {
        let (Some(table), Some(bytes)) = (address(table), value(bytes)) else {
            continue;
        };
        for at in 0..bytes / size_of::<Relocation>() {
            // SAFETY: the table has as many entries.
            let relocation = unsafe { (table as *const Relocation).add(at).read() };
            if relocation.symbol == 0 || !STORED.contains(&relocation.kind) {
                continue;
            }
            // SAFETY: relocations refer to symbols of the table.
            let symbol = unsafe {
                (symbols as *const Symbol)
                    .add(relocation.symbol as usize)
                    .read()
            };
            // SAFETY: names are zero-terminated texts in the table of strings.
            let name = unsafe { CStr::from_ptr((strings + symbol.name as usize) as *const c_char) };
            let is_public = PREFIXES
                .iter()
                .any(|prefix| name.to_bytes().starts_with(prefix));
            // One without a section is another library's.
            if symbol.section == 0 || symbol.info & TYPE != FUNCTION || !is_public {
                continue;
            }
            // Indirect functions have another type, and are skipped: their value is the address of a resolver.
            let own = (base + symbol.value).wrapping_add(relocation.addend);
            // SAFETY: the loader has stored an address there.
            filled += usize::from(unsafe { fill(base + relocation.offset, own) }?);
        }
    }
    Ok(filled)
}

/// Stores an address in a slot. Returns whether that had another.
///
/// # Safety
/// `slot` must be the place of an address, which is not constant to the compiler.
unsafe fn fill(slot: usize, address: usize) -> Result<bool> {
    // SAFETY: other threads only read it, as a whole.
    let place = unsafe { AtomicUsize::from_ptr(slot as *mut usize) };
    if place.load(Ordering::Relaxed) == address {
        return Ok(false);
    }
    // SAFETY: the function only returns a number.
    let page = unsafe { sysconf(SC_PAGESIZE) }.unsigned_abs() as usize;
    let start = slot / page * page;
    // The loader may have made it read-only. SAFETY: the page stays mapped, and only gets writable.
    if unsafe { mprotect(start as *mut c_void, page, READ_WRITE) } != 0 {
        return Err(Error::last_os_error());
    }
    // Relaxed: both addresses are of functions that were loaded before, so a reader may see either. The page stays
    // writable, since its former protection is not known here.
    place.store(address, Ordering::Relaxed);
    Ok(true)
}
