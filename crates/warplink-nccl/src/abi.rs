//! Types of the C ABI. Enumerations are integers here, since a caller may pass any value.

use crate::status::{Failure, Outcome};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use warplink::DType;
use warplink::device::cuda::NCCL_TYPES;

/// `ncclComm_t`.
pub(crate) type Handle = *mut c_void;

/// `cudaStream_t`.
pub(crate) type RawStream = *mut c_void;

/// `ncclWindow_t`.
pub(crate) type Window = *mut c_void;

/// The value of the second member of initialized structures.
const MAGIC: c_uint = 0xcafe_beef;

/// That of `ncclSimInfo_t`.
const SIMULATION_MAGIC: c_uint = 0x7468_5283;

/// Larger structures are rejected as implausible.
const MAX_BYTES: usize = 4096;

/// Value of a configuration member that the caller has not set.
const UNDEFINED: c_int = c_int::MIN;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId {
    pub(crate) bytes: [u8; 128],
}

/// `ncclTeam_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Team {
    pub(crate) ranks: c_int,
    pub(crate) rank: c_int,
    pub(crate) stride: c_int,
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct WaitSignal {
    pub(crate) operations: c_int,
    pub(crate) peer: c_int,
    pub(crate) signal: c_int,
    pub(crate) context: c_int,
}

/// The members that `ncclConfig_t` has begun with since 2.17. Later members configure NCCL's own transports.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    network: *const c_char,
    split_share: c_int,
}

/// `ncclCollConfig_t`, in its first form.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CallConfig {
    header: Header,
    extensions: *const c_void,
    least_blocks: c_int,
    most_blocks: c_int,
    multicast_blocks: c_int,
    cluster_size: c_int,
    algorithms: *const c_char,
    must_follow: c_int,
    policy: c_int,
    tag: u64,
    launched: *const c_void,
}

/// Common head of `ncclCommProperties_t`, `ncclSimInfo_t` and others.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Header {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
}

/// `ncclCommProperties_t`, in its first form.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    pub(crate) header: Header,
    pub(crate) rank: c_int,
    pub(crate) ranks: c_int,
    pub(crate) device: c_int,
    pub(crate) nvml_device: c_int,
    pub(crate) device_api: bool,
    pub(crate) multimem: bool,
    pub(crate) gin_type: c_int,
}

/// `ncclSimInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Simulation {
    pub(crate) header: Header,
    pub(crate) estimated_seconds: f32,
}

/// A communicator's configuration: the part that Warplink supports, and all of it for the real library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    /// Whether calls may block; `None` if not set.
    pub(crate) blocking: Option<bool>,
    /// The most multiprocessors used by a call.
    pub(crate) multiprocessors: Option<u32>,
    pub(crate) real: RealConfig,
}

/// A copy of a communicator's configuration, of any version, for the real library: its communicator may be created long
/// after the call that passed it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RealConfig {
    /// `None` if the caller passed none.
    words: Option<Arc<[u64]>>,
    /// The texts, by the numbers of the words that point to them.
    texts: Vec<(usize, CString)>,
}

impl RealConfig {
    /// The words of `netName` and `commName`. Later members are numbers.
    const TEXTS: [usize; 2] = [4, 6];

    /// # Safety
    /// `config` must point to as many bytes as it states, at least those of [`Config`].
    unsafe fn read(config: *const Config, bytes: usize) -> Outcome<Self> {
        if bytes > MAX_BYTES {
            return Err(Failure::argument(
                format!("a configuration of {bytes} bytes"),
                "initialize it with the macro of nccl.h",
            ));
        }
        // SAFETY: it has as many bytes as it states.
        let words = unsafe { copy(config.cast(), bytes) };
        let named = Self::TEXTS.into_iter().filter_map(|at| {
            let text = *words.get(at)? as *const c_char;
            // SAFETY: the member is null or zero-terminated text.
            (!text.is_null()).then(|| (at, unsafe { CStr::from_ptr(text) }.to_owned()))
        });
        let texts = named.collect();
        Ok(Self {
            words: Some(words.into()),
            texts,
        })
    }

    /// Calls `use_it` with a configuration for a communicator that blocks, if the caller passed one.
    pub(crate) fn with_copy<T>(&self, use_it: impl FnOnce(Option<*mut Config>) -> T) -> T {
        let Some(words) = &self.words else {
            return use_it(None);
        };
        let mut words = words.to_vec();
        for (at, text) in &self.texts {
            words[*at] = text.as_ptr() as u64;
        }
        let config = words.as_mut_ptr().cast::<Config>();
        // Warplink itself waits for it where the caller does not.
        // SAFETY: the copy is at least as long as the structure.
        unsafe { (&raw mut (*config).blocking).write(1) };
        use_it(Some(config))
    }
}

/// Configuration of one collective: a copy of the caller's `ncclCollConfig_t`, since a grouped call is deferred until
/// the end of the group.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallWishes {
    /// The configuration, of any version, for the real library; `None` if there is none.
    copied: Option<Arc<[u64]>>,
    /// A member that only the real library can honor.
    only_real: Option<&'static str>,
}

impl CallWishes {
    /// # Safety
    /// `config` must be null or point to as many bytes as it states.
    pub(crate) unsafe fn read(config: *const CallConfig) -> Outcome<Self> {
        if config.is_null() {
            return Ok(Self::default());
        }
        // SAFETY: every version begins with this header.
        let header = unsafe { config.cast::<Header>().read_unaligned() };
        header.check("the configuration of the call")?;
        if !(size_of::<CallConfig>()..=MAX_BYTES).contains(&header.size) {
            return Err(Failure::argument(
                format!("a configuration of {} bytes", header.size),
                "initialize it with the macro of nccl.h",
            ));
        }
        // Copied, since the call may be deferred to the end of its group; whole, since a newer caller's has more
        // members.
        // SAFETY: it has as many bytes as it states.
        let copied = unsafe { copy(config.cast(), header.size) };
        // SAFETY: checked to be as long.
        let given = unsafe { config.read_unaligned() };
        // SAFETY: the member is null or zero-terminated text.
        let names_algorithms = !given.algorithms.is_null() && unsafe { *given.algorithms } != 0;
        let only_real = if names_algorithms && given.must_follow != 0 {
            Some("algSelection")
        } else if given.launched.is_null() {
            None
        } else {
            Some("launchCompletionEvent")
        };
        Ok(Self {
            copied: Some(copied.into()),
            only_real,
        })
    }

    /// The configuration for the real library; valid as long as `self`.
    pub(crate) fn config(&self) -> Option<*const CallConfig> {
        self.copied.as_ref().map(|copied| copied.as_ptr().cast())
    }

    /// Fails if a required setting needs the real library. The other members only tune NCCL's algorithms.
    pub(crate) fn check_served(&self) -> Outcome {
        let Some(member) = self.only_real else {
            return Ok(());
        };
        Err(Failure::usage(
            format!("{member} of the call's configuration needs the real NCCL"),
            "do not set it, set forceAlgSelection to 0, or route all calls to NCCL with WARPLINK_NCCL_ROUTE=nccl",
        ))
    }
}

/// A copy of `bytes` bytes, in words for the alignment of a structure's 64-bit members and pointers.
///
/// # Safety
/// `from` must point to as many bytes.
unsafe fn copy(from: *const u8, bytes: usize) -> Vec<u64> {
    let mut words = vec![0_u64; bytes.div_ceil(8)];
    // SAFETY: guaranteed by the caller; the copy is at least as long.
    unsafe { from.copy_to_nonoverlapping(words.as_mut_ptr().cast(), bytes) };
    words
}

/// The requirements of a device communicator, for a call that is deferred until the end of a group: a copy of the structure
/// where it states its length, as since 2.29, else the caller's.
pub(crate) enum Requirements {
    Copied(Vec<u64>),
    Given(usize),
}

impl Requirements {
    /// # Safety
    /// `given` must be null or point to NCCL's structure.
    pub(crate) unsafe fn read(given: *const c_void) -> Self {
        if !given.is_null() {
            // SAFETY: every version has at least as many bytes.
            let header = unsafe { given.cast::<Header>().read_unaligned() };
            if header.magic == MAGIC && header.size <= MAX_BYTES {
                // SAFETY: it has as many bytes as it states.
                return Self::Copied(unsafe { copy(given.cast(), header.size) });
            }
        }
        Self::Given(given as usize)
    }

    pub(crate) fn pointer(&self) -> *const c_void {
        match self {
            Self::Copied(words) => words.as_ptr().cast(),
            Self::Given(given) => *given as *const c_void,
        }
    }
}

impl Header {
    /// Fails if the structure was not initialized.
    pub(crate) fn check(&self, name: &str) -> Outcome {
        self.check_magic(MAGIC, name)
    }

    fn check_magic(&self, magic: c_uint, name: &str) -> Outcome {
        if self.magic == magic {
            return Ok(());
        }
        Err(Failure::argument(
            format!("{name} was not initialized"),
            "initialize it with the macro of nccl.h",
        ))
    }
}

impl Simulation {
    /// As [`Header::check`].
    pub(crate) fn check(&self) -> Outcome {
        self.header.check_magic(SIMULATION_MAGIC, "simInfo")
    }
}

impl Wishes {
    /// Reads a configuration of any version; null is the default configuration.
    ///
    /// # Safety
    /// `config` must be null or point to a configuration of as many bytes as it states.
    pub(crate) unsafe fn read(config: *const Config) -> Outcome<Self> {
        if config.is_null() {
            return Ok(Self::default());
        }
        // SAFETY: the caller passes a configuration, and every version begins with this header.
        let header = unsafe { config.cast::<Header>().read_unaligned() };
        header.check("the configuration")?;
        // An older caller's, whose members end before those that are read here.
        if header.size < size_of::<Config>() {
            return Ok(Self::default());
        }
        // SAFETY: it states at least as many bytes.
        let given = unsafe { config.read_unaligned() };
        let blocking = match given.blocking {
            UNDEFINED => None,
            0 => Some(false),
            1 => Some(true),
            other => {
                return Err(Failure::argument(
                    format!("blocking is {other}; expected 0 or 1"),
                    "set it to 0 or 1, or do not set it",
                ));
            }
        };
        let most = given.most_blocks;
        // A minimum that is not set is the least integer, and below any maximum.
        if most != UNDEFINED && (most <= 0 || most < given.least_blocks) {
            return Err(Failure::argument(
                format!("maxCTAs is {most}; expected at least 1 and no less than minCTAs"),
                "set a number of blocks, or do not set it",
            ));
        }
        Ok(Self {
            // SAFETY: it states as many bytes, which are enough.
            real: unsafe { RealConfig::read(config, header.size) }?,
            blocking,
            // At least two blocks: one moves data, and one synchronizes with the other ranks.
            // A maximum that is not set is negative, and does not convert.
            multiprocessors: u32::try_from(most).ok().map(|most| most.max(2)),
        })
    }
}

/// Converts an `ncclDataType_t`.
pub(crate) fn element_type(value: c_int) -> Outcome<DType> {
    let known = usize::try_from(value)
        .ok()
        .and_then(|at| NCCL_TYPES.get(at));
    known.copied().ok_or_else(|| {
        Failure::argument(
            format!("unknown type {value}; expected an ncclDataType_t"),
            "use a value of ncclDataType_t",
        )
    })
}

/// Fails if `pointer` is null; `name` is the argument's name.
pub(crate) fn check<T>(pointer: *const T, name: &str) -> Outcome {
    if !pointer.is_null() {
        return Ok(());
    }
    Err(Failure::argument(
        format!("{name} is null"),
        format!("pass an address for {name}"),
    ))
}

/// Stores a result to the caller's `place`, the argument `name`.
///
/// # Safety
/// `place` must be null or valid for a write of one `T`.
pub(crate) unsafe fn store<T>(place: *mut T, name: &str, value: T) -> Outcome {
    check(place, name)?;
    // Not all callers are C: bindings of other languages may pass a pointer into a packed buffer.
    // SAFETY: not null; the caller guarantees that it is valid for a write.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(blocking: c_int, most_blocks: c_int) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: 21800,
            blocking,
            cluster_size: UNDEFINED,
            least_blocks: UNDEFINED,
            most_blocks,
            network: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }

    #[test]
    fn wishes_are_those_of_the_configuration() {
        let wishes = |config: &Config| {
            // SAFETY: a configuration of as many bytes as it states, or one that states fewer.
            unsafe { Wishes::read(config) }
        };
        for (blocking, most, expected) in [
            (UNDEFINED, UNDEFINED, (None, None)),
            (0, 1, (Some(false), Some(2))),
            (1, 32, (Some(true), Some(32))),
        ] {
            let read = wishes(&config(blocking, most)).unwrap();
            assert_eq!((read.blocking, read.multiprocessors), expected);
        }
        for wrong in [config(2, UNDEFINED), config(1, 0), config(1, -4)] {
            assert!(wishes(&wrong).is_err());
        }
        let other = Config {
            magic: 7,
            ..config(1, 1)
        };
        assert!(wishes(&other).is_err());
        let short = Config {
            size: 16,
            ..config(7, 0)
        };
        assert_eq!(wishes(&short).unwrap(), Wishes::default());
        // SAFETY: null is allowed.
        let none = unsafe { Wishes::read(std::ptr::null()) }.unwrap();
        assert_eq!(none, Wishes::default());
    }

    #[test]
    fn configurations_of_calls_are_copied_and_checked() {
        let none = std::ptr::null();
        let plain = CallConfig {
            header: Header {
                size: size_of::<CallConfig>(),
                magic: MAGIC,
                version: 23200,
            },
            extensions: none,
            least_blocks: UNDEFINED,
            most_blocks: 4,
            multicast_blocks: UNDEFINED,
            cluster_size: UNDEFINED,
            algorithms: c"".as_ptr(),
            must_follow: 1,
            policy: UNDEFINED,
            tag: 7,
            launched: none,
        };
        let read = |config: &CallConfig| {
            // SAFETY: a configuration; those that state more bytes are rejected before they are read.
            unsafe { CallWishes::read(config) }
        };
        let ring = c"ring".as_ptr();
        for (config, served) in [
            (plain, true),
            (
                CallConfig {
                    algorithms: ring,
                    must_follow: 0,
                    ..plain
                },
                true,
            ),
            (
                CallConfig {
                    algorithms: ring,
                    ..plain
                },
                false,
            ),
            (
                CallConfig {
                    launched: ring.cast(),
                    ..plain
                },
                false,
            ),
        ] {
            let wishes = read(&config).unwrap();
            assert_eq!(wishes.check_served().is_ok(), served);
            // SAFETY: the copy is as long.
            let copied = unsafe { wishes.config().unwrap().read_unaligned() };
            assert_eq!((copied.most_blocks, copied.tag), (4, 7));
        }
        for (magic, size) in [(7, 72), (MAGIC, 16), (MAGIC, 1 << 20)] {
            let header = Header {
                size,
                magic,
                version: 23200,
            };
            assert!(read(&CallConfig { header, ..plain }).is_err());
        }
    }

    #[test]
    fn structures_are_laid_out_as_c_lays_them_out() {
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, most_blocks), 28);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
        assert_eq!(std::mem::offset_of!(Properties, device_api), 32);
        assert_eq!(std::mem::offset_of!(Properties, gin_type), 36);
        assert_eq!(std::mem::offset_of!(CallConfig, algorithms), 40);
        assert_eq!(std::mem::offset_of!(CallConfig, launched), 64);
        assert_eq!(std::mem::offset_of!(Simulation, estimated_seconds), 16);
        assert_eq!((size_of::<UniqueId>(), size_of::<Team>()), (128, 12));
    }
}
