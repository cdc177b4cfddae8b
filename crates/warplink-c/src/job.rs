//! Joining a job, host-side operations of all ranks, and leaving.

use crate::channel::Setup;
use crate::handles::{self, Comm, Handle};
use crate::log;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::types::UniqueId;
use std::ffi::{OsString, c_char, c_void};
use std::net::IpAddr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use warplink::bootstrap::JoinConfig;
use warplink::{Communicator, Config, DeviceKind, Error};

/// Timeout of joining in seconds; 0 if none was set.
static BOOTSTRAP_TIMEOUT: AtomicI32 = AtomicI32::new(0);

/// Environment variable in which a launcher passes a rank's index on its machine.
const LOCAL_RANK: &str = "WARPLINK_LOCAL_RANK";

/// Options for joining. Start from `warplink_options_default` and change members as needed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Bytes of this struct, which identify the version of the header; set by `warplink_options_default`.
    pub size: usize,
    /// "host" or "cuda". Null: the value of WARPLINK_DEVICE if set, else a GPU if there is one.
    pub device: *const c_char,
    /// Index of the GPU among those visible to the process. -1: the one of the local rank, or the only one.
    pub ordinal: i32,
    /// Index among the ranks on this machine. -1: the value of WARPLINK_LOCAL_RANK if set, else the rank.
    pub local_rank: i32,
    /// The secret that authenticates ranks of a job whose ranks meet at an address; the same on every rank, long and
    /// random. Null: WARPLINK_SECRET. A unique id contains its own secret.
    pub secret: *const c_char,
    /// Timeout of every wait on the host after joining, in seconds. 0: WARPLINK_TIMEOUT if set, else 60. Joining uses
    /// the timeout set by `warplink_set_bootstrap_timeout`.
    pub timeout: f64,
}

/// A rank that has joined.
pub(crate) struct JobObject {
    pub(crate) communicator: Communicator,
    setup: Mutex<Setup>,
    /// Held while declared channels are connected.
    connecting: Mutex<()>,
}

impl JobObject {
    /// Declared and connected channels. Ignores poisoning: a panic under the lock leaves both consistent.
    pub(crate) fn setup(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Excludes other threads from connecting what they find declared. Blocks while one waits for peers.
    pub(crate) fn connecting(&self) -> MutexGuard<'_, ()> {
        self.connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the ranks meet.
enum Meeting {
    Address(String),
    Id(String),
    /// Taken from the environment, which then also identifies this rank.
    Environment,
}

/// Options that leave all decisions to the environment and the library. Reads no environment variable and does not
/// block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_options_default() -> Options {
    Options {
        size: size_of::<Options>(),
        device: std::ptr::null(),
        ordinal: -1,
        local_rank: -1,
        secret: std::ptr::null(),
        timeout: 0.0,
    }
}

/// Creates a unique id with a fresh secret, for ranks that meet at `ip` (an address of this machine; null is 127.0.0.1)
/// and `port`. With port 0 the system picks a free port, which this process reserves until one of its ranks joins; if
/// none will, call `warplink_unique_id_release`. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if `ip` is
/// not the address of a single machine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_unique_id_create(
    ip: *const c_char,
    port: u16,
    id: *mut UniqueId,
) -> Status {
    entry("create a unique id", || {
        pointer::check(id, "id")?;
        // SAFETY: the caller passes null or a text.
        let ip = unsafe { pointer::optional_text(ip, "ip") }?.unwrap_or("127.0.0.1");
        let address: IpAddr = ip.parse().map_err(|_| {
            Failure::invalid(
                format!("'{ip}' is not an IP address; expected one of this machine"),
                "pass an address of this machine that the other ranks can reach",
            )
        })?;
        let made = warplink::bootstrap::UniqueId::create(address, port)?;
        let bytes = made.to_bytes();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(id, "id", UniqueId { bytes }) }
    })
}

/// Releases the port that this process reserved for the id, so that a rank in another process can listen on it; does
/// nothing if it holds none. Does not block. Returns WARPLINK_STATUS_INVALID_HANDLE for bytes that are no id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_unique_id_release(id: *const UniqueId) -> Status {
    entry("release a unique id", || {
        // SAFETY: the caller passes an id.
        let id = unsafe { pointer::load(id, "id") }?;
        warplink::bootstrap::UniqueId::from_bytes(&id.bytes)?.release();
        Ok(())
    })
}

/// Sets the timeout of joining, in seconds, for subsequent inits in this process. The default is WARPLINK_TIMEOUT if
/// set, else 60 seconds. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT for less than 1.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_set_bootstrap_timeout(seconds: i32) -> Status {
    entry("set the bootstrap timeout", || {
        if seconds <= 0 {
            return Err(Failure::invalid(
                format!("a timeout of {seconds} seconds; expected at least 1"),
                "give a number of seconds",
            ));
        }
        // Relaxed: the number publishes no other memory.
        BOOTSTRAP_TIMEOUT.store(seconds, Ordering::Relaxed);
        Ok(())
    })
}

/// Joins as `rank` of `size` ranks that meet at `address`, the "ip:port" of rank 0. Blocks until all have joined.
/// Without a secret (`options`, WARPLINK_SECRET) it must be a loopback address. `options` may be null.
///
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT if the rank is not below `size` or the options come from another version's
/// header; WARPLINK_STATUS_PARSE if a string is not a valid address or device; WARPLINK_STATUS_TIMEOUT if ranks are
/// missing at the timeout; WARPLINK_STATUS_MISMATCH if ranks have another size or another kind of device;
/// WARPLINK_STATUS_AUTHENTICATION if secrets differ; WARPLINK_STATUS_ADDRESS_IN_USE if another process listens on the
/// address; and WARPLINK_STATUS_DRIVER, WARPLINK_STATUS_LIBRARY_MISSING or WARPLINK_STATUS_UNSUPPORTED if the device is
/// not available.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_init(
    comm: *mut Comm,
    size: i32,
    address: *const c_char,
    rank: i32,
    options: *const Options,
) -> Status {
    entry("init", || {
        // SAFETY: the caller passes null or a text.
        let address = unsafe { pointer::text(address, "address") }?;
        let meeting = Meeting::Address(address.to_owned());
        // SAFETY: `comm` is null or valid for a write, `options` null or valid for a read.
        unsafe { init(comm, Some((rank, size)), &meeting, options) }
    })
}

/// Joins as `rank` of `size` ranks that share the same id. Blocks until all have joined. `options` may be null. Fails
/// as `warplink_init` does; returns WARPLINK_STATUS_INVALID_HANDLE for bytes that are no id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_init_from_id(
    comm: *mut Comm,
    size: i32,
    id: *const UniqueId,
    rank: i32,
    options: *const Options,
) -> Status {
    entry("init", || {
        // SAFETY: the caller passes an id.
        let id = unsafe { pointer::load(id, "id") }?;
        let id = warplink::bootstrap::UniqueId::from_bytes(&id.bytes)?;
        // SAFETY: `comm` is null or valid for a write, `options` null or valid for a read.
        unsafe {
            init(
                comm,
                Some((rank, size)),
                &Meeting::Id(id.to_string()),
                options,
            )
        }
    })
}

/// Joins as configured by the launcher of this process: `warplink launch`, torchrun, mpirun or srun. Blocks until all
/// ranks have joined. `options` may be null. Fails as `warplink_init` does; returns WARPLINK_STATUS_INVALID_ARGUMENT
/// for missing variables, and WARPLINK_STATUS_PARSE for variables that are not numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_init_from_env(
    comm: *mut Comm,
    options: *const Options,
) -> Status {
    entry("init", || {
        // SAFETY: `comm` is null or valid for a write, `options` null or valid for a read.
        unsafe { init(comm, None, &Meeting::Environment, options) }
    })
}

/// This rank's number, from 0. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_rank(comm: Comm, rank: *mut i32) -> Status {
    entry("get the rank", || {
        let value = comm.get()?.communicator.rank();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(rank, "rank", number(value)?) }
    })
}

/// The number of ranks. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_size(comm: Comm, size: *mut i32) -> Status {
    entry("get the number of ranks", || {
        let value = comm.get()?.communicator.world();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(size, "size", number(value)?) }
    })
}

/// All-gathers `bytes` bytes per rank through the hosts: `data` has space for the bytes of all ranks, in rank order,
/// and holds this rank's at their position. Blocks until every rank has called it with the same length. Returns
/// WARPLINK_STATUS_MISMATCH on every rank if lengths differ, and WARPLINK_STATUS_TIMEOUT if a rank does not call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_all_gather(
    comm: Comm,
    data: *mut c_void,
    bytes: usize,
) -> Status {
    entry("all-gather", || {
        let job = comm.get()?;
        pointer::check(data, "data")?;
        let (rank, world) = (job.communicator.rank(), job.communicator.world());
        let all = bytes.checked_mul(world).ok_or_else(|| {
            Failure::invalid(
                format!("{bytes} bytes of each of {world} ranks; expected what memory can hold"),
                "pass the number of bytes of one rank",
            )
        })?;
        // No overflow: `bytes` times the number of ranks was checked above, and the rank is below it.
        let own = data.cast::<u8>().wrapping_add(rank * bytes);
        // SAFETY: the caller passes a buffer for all ranks, in which this rank's bytes are initialized.
        let own = unsafe { pointer::values(own, bytes, "data") }?.to_vec();
        let gathered = job.communicator.all_gather_bytes(&own)?;
        // Lengths may differ in the library, but not in a buffer with a fixed place for each rank.
        if let Some(other) = gathered.iter().position(|part| part.len() != bytes) {
            let message = format!(
                "the peer passed {} bytes; expected {bytes}",
                gathered[other].len()
            );
            let error = Error::mismatch(message).with_peer(other);
            return Err(error.with_help("pass the same length on every rank").into());
        }
        // SAFETY: as above; `own`, the only other reference, was copied.
        unsafe { pointer::new_bytes(data, all, "data") }?.copy_from_slice(&gathered.concat());
        Ok(())
    })
}

/// Blocks until every rank has called it. It orders hosts, not streams. Returns WARPLINK_STATUS_TIMEOUT if a rank does
/// not call it, and WARPLINK_STATUS_PEER_LOST or WARPLINK_STATUS_PEER_LEFT if one is gone.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_barrier(comm: Comm) -> Status {
    entry("barrier", || Ok(comm.get()?.communicator.barrier()?))
}

/// Leaves in an orderly manner. Blocks until every rank has called it and until this rank's streams have finished with
/// Warplink's resources. Afterwards the communicator and everything created with it (regions, streams, modules ...) are
/// unusable, even if this fails; borrowed streams that are not capturing a graph are released. Peers treat a process
/// that ends without this call as lost. Returns WARPLINK_STATUS_TIMEOUT if a stream still waits for a peer at the
/// timeout or a rank does not call it, and WARPLINK_STATUS_PEER_LOST if a rank was lost; this rank then leaves as with
/// `warplink_abort`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_destroy(comm: Comm) -> Status {
    entry("destroy", || {
        // First, so that no other thread gets hold of the communicator while it is closed.
        let job = comm.take()?;
        // Before closing: objects that hold peers' memory must be gone by the time that the peers wait for it.
        handles::take_all_of(&job);
        // Before closing, like the objects above: connections hold regions, and mappings of peers.
        drop(std::mem::take(&mut *job.setup()));
        Ok(job.communicator.clone().close()?)
    })
}

/// Leaves with a failure: the peers' waits, including those of kernels, end with an error that contains this rank and
/// `reason`, and so do the waits in this rank's streams. Blocks for about two seconds at most. Later calls that involve
/// other ranks fail. The communicator must still be destroyed, which then fails as well. A second abort does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_abort(comm: Comm, reason: *const c_char) -> Status {
    entry("abort", || {
        let job = comm.get()?;
        // SAFETY: the caller passes a text.
        let reason = unsafe { pointer::text(reason, "reason") }?;
        job.communicator.abort(reason);
        Ok(())
    })
}

/// Joins, and stores the communicator.
///
/// # Safety
/// `comm` must be null or valid for a write, `options` null or a pointer to options.
unsafe fn init(
    comm: *mut Comm,
    identity: Option<(i32, i32)>,
    meeting: &Meeting,
    options: *const Options,
) -> Outcome {
    pointer::check(comm, "comm")?;
    // Before joining, whose messages are the first that a user needs.
    log::start();
    // SAFETY: guaranteed by the caller.
    let config = unsafe { configuration(identity, meeting, options) }?;
    let communicator = Communicator::join(&config)?;
    let comm_made = Comm::new(JobObject {
        communicator,
        setup: Mutex::default(),
        connecting: Mutex::default(),
    });
    // SAFETY: guaranteed by the caller.
    unsafe { pointer::store(comm, "comm", comm_made) }
}

/// The configuration for joining; arguments take precedence over the environment.
///
/// # Safety
/// `options` must be null or point to options.
unsafe fn configuration(
    identity: Option<(i32, i32)>,
    meeting: &Meeting,
    options: *const Options,
) -> Outcome<Config> {
    let options = if options.is_null() {
        warplink_options_default()
    } else {
        // SAFETY: guaranteed by the caller; the size is checked before anything else is read.
        unsafe { read_options(options) }?
    };
    // SAFETY: as above, for the texts.
    let device = unsafe { pointer::optional_text(options.device, "the device") }?;
    // SAFETY: as above.
    let secret = unsafe { pointer::optional_text(options.secret, "the secret") }?;
    let mut given: Vec<(&str, String)> = Vec::new();
    if let Some((rank, size)) = identity {
        if size < 1 || rank < 0 || rank >= size {
            return Err(Failure::invalid(
                format!("rank {rank} of {size} ranks; expected a rank from 0 to the size less one"),
                "pass a distinct rank on every process, and the same size on all",
            ));
        }
        given.push(("WARPLINK_RANK", rank.to_string()));
        given.push(("WARPLINK_WORLD", size.to_string()));
    }
    match meeting {
        Meeting::Address(address) => given.push(("WARPLINK_ADDRESS", address.clone())),
        Meeting::Id(id) => given.push(("WARPLINK_ID", id.clone())),
        Meeting::Environment => {}
    }
    if options.local_rank >= 0 {
        given.push((LOCAL_RANK, options.local_rank.to_string()));
    }
    given.extend(secret.map(|secret| ("WARPLINK_SECRET", secret.to_owned())));
    let find = |name: &str| {
        let found = given.iter().find(|(given, _)| *given == name);
        found.map(|(_, value)| OsString::from(value))
    };
    let mut join = JoinConfig::from_variables(|name| {
        // WARPLINK_ID would take precedence over the address passed as an argument.
        let hidden = name == "WARPLINK_ID" && matches!(meeting, Meeting::Address(_));
        find(name).or_else(|| std::env::var_os(name).filter(|_| !hidden))
    })?;
    let limit = BOOTSTRAP_TIMEOUT.load(Ordering::Relaxed);
    if limit > 0 {
        join.timeout = Duration::from_secs(limit.unsigned_abs().into());
    }
    let local_rank = join.local_rank;
    if let Ok(ordinal) = usize::try_from(options.ordinal) {
        // With an explicit GPU, the local rank does not need a GPU of its own.
        join.local_rank = ordinal;
    }
    if let Some(device) = device {
        // Parsed here so that an error refers to the argument instead of the variable.
        device.parse::<DeviceKind>()?;
    }
    let mut config = Config::from_variables(join, |name| match (name, device) {
        ("WARPLINK_DEVICE", Some(device)) => Some(device.into()),
        _ => std::env::var_os(name),
    })?;
    // Restored: above, it was the GPU's number, for the choice of the device alone.
    config.join.local_rank = local_rank;
    if options.timeout != 0.0 {
        config.timeout = Duration::try_from_secs_f64(options.timeout).map_err(|_| {
            Failure::invalid(
                format!(
                    "a timeout of {} seconds; expected a finite number that is not negative",
                    options.timeout
                ),
                "pass a number of seconds, or 0 for the default",
            )
        })?;
    }
    Ok(config)
}

/// Options of a header that is not newer than this library.
///
/// # Safety
/// `options` must point to options of some version of the header, which begin with their size.
unsafe fn read_options(options: *const Options) -> Outcome<Options> {
    // SAFETY: the size comes first in every version.
    let size = unsafe { pointer::load(options.cast::<usize>(), "options") }?;
    if size != size_of::<Options>() {
        return Err(Failure::invalid(
            format!("options of {size} bytes; expected {}", size_of::<Options>()),
            "start from warplink_options_default, and use the header that was installed with the library",
        ));
    }
    // SAFETY: of this version, as checked above.
    unsafe { pointer::load(options, "options") }
}

/// Converts a rank or a number of ranks to C.
fn number(value: usize) -> Outcome<i32> {
    i32::try_from(value).map_err(|_| {
        Failure::invalid(
            format!("{value} is too large; expected a number of 31 bits"),
            "start fewer ranks",
        )
    })
}
