//! Joining the other ranks, what the hosts do together, and leaving.

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
use warplink::{Communicator, Config, DeviceKind, Error, ErrorKind};

/// Seconds that joining may take; 0 where nobody said.
static BOOTSTRAP_TIMEOUT: AtomicI32 = AtomicI32::new(0);

/// The variables by which a launcher tells a rank its number among those on its machine.
const LOCAL_RANK: &str = "WARPLINK_LOCAL_RANK";

/// How a rank joins. Get one from `warplink_options_default`, and change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Bytes of this struct, which tell the version of the header; as `warplink_options_default` set it.
    pub size: usize,
    /// "host" or "cuda". Null: what WARPLINK_DEVICE says, else a GPU where there is one.
    pub device: *const c_char,
    /// Which of the GPUs that the process sees. -1: the one of the local rank, or the only one.
    pub ordinal: i32,
    /// The number among the ranks on this machine. -1: what WARPLINK_LOCAL_RANK says, else the rank.
    pub local_rank: i32,
    /// The text that admits to a job that meets at an address; the same on every rank, long and random. Null:
    /// WARPLINK_SECRET. A unique id brings a secret of its own.
    pub secret: *const c_char,
    /// The limit of every wait on the host after joining, in seconds. 0: WARPLINK_TIMEOUT, else 60. Joining has that of
    /// `warplink_set_bootstrap_timeout`.
    pub timeout: f64,
}

/// A rank that joined.
pub(crate) struct JobObject {
    pub(crate) communicator: Communicator,
    setup: Mutex<Setup>,
}

impl JobObject {
    /// Declared and connected channels. A panic under the lock leaves both consistent.
    pub(crate) fn setup(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the ranks meet.
enum Meeting {
    Address(String),
    Id(String),
    /// As the environment says, who this is too.
    Environment,
}

/// Options with which the environment and the library decide. Reads nothing and does not block.
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

/// Makes a unique id with a fresh secret, for ranks that meet at `ip` (of this machine; null is 127.0.0.1) and `port`.
/// With port 0 the system picks a free one, which this process holds until one of its ranks joins; if none will, call
/// `warplink_unique_id_release`. Does not block. An `ip` that is no address of one machine is
/// WARPLINK_STATUS_INVALID_ARGUMENT.
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
                "name an address that the other ranks reach",
            )
        })?;
        let made = warplink::bootstrap::UniqueId::create(address, port)?;
        let bytes = made.to_bytes();
        // SAFETY: the caller passes a place for an id.
        unsafe { pointer::store(id, "id", UniqueId { bytes }) }
    })
}

/// Gives up the port that this process holds for the id, so that a rank in another process can listen there; does
/// nothing where it holds none. Does not block. Bytes that are no id are WARPLINK_STATUS_INVALID_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_unique_id_release(id: *const UniqueId) -> Status {
    entry("release a unique id", || {
        // SAFETY: the caller passes an id.
        let id = unsafe { pointer::load(id, "id") }?;
        warplink::bootstrap::UniqueId::from_bytes(&id.bytes)?.release();
        Ok(())
    })
}

/// Sets how long joining may take, in seconds, for the inits that follow in this process. Without it, WARPLINK_TIMEOUT
/// says, else 60 seconds. Does not block. Less than 1 is WARPLINK_STATUS_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_set_bootstrap_timeout(seconds: i32) -> Status {
    entry("set the bootstrap timeout", || {
        if seconds <= 0 {
            return Err(Failure::invalid(
                format!("a timeout of {seconds} seconds; expected at least 1"),
                "give a number of seconds",
            ));
        }
        BOOTSTRAP_TIMEOUT.store(seconds, Ordering::Relaxed);
        Ok(())
    })
}

/// Joins as `rank` of `size` ranks that meet at `address`, as "ip:port" of rank 0. Blocks until all have joined.
/// Without a secret (`options`, WARPLINK_SECRET) it must be a loopback address. `options` may be null.
///
/// A rank that is not below `size`, and options of another version's header, are WARPLINK_STATUS_INVALID_ARGUMENT,
/// text that is no address or no device WARPLINK_STATUS_PARSE; ranks that are missing at the timeout
/// WARPLINK_STATUS_TIMEOUT, that have another size or another kind of device WARPLINK_STATUS_MISMATCH, and that hold
/// another secret WARPLINK_STATUS_AUTHENTICATION; an address that another process listens on
/// WARPLINK_STATUS_ADDRESS_IN_USE; a device that is not there WARPLINK_STATUS_DRIVER, WARPLINK_STATUS_LIBRARY_MISSING
/// or WARPLINK_STATUS_UNSUPPORTED.
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
        // SAFETY: the caller passes a place for a communicator, and null or options.
        unsafe { init(comm, Some((rank, size)), &meeting, options) }
    })
}

/// Joins as `rank` of `size` ranks that hold the same id. Blocks until all have joined. `options` may be null. Fails
/// as `warplink_init`; bytes that are no id are WARPLINK_STATUS_INVALID_HANDLE.
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
        // SAFETY: the caller passes a place for a communicator, and null or options.
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

/// Joins as `warplink launch`, torchrun, mpirun or srun started this process. Blocks until all ranks have joined.
/// `options` may be null. Fails as `warplink_init`; variables that are missing are WARPLINK_STATUS_INVALID_ARGUMENT,
/// and those that are no numbers WARPLINK_STATUS_PARSE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_init_from_env(
    comm: *mut Comm,
    options: *const Options,
) -> Status {
    entry("init", || {
        // SAFETY: the caller passes a place for a communicator, and null or options.
        unsafe { init(comm, None, &Meeting::Environment, options) }
    })
}

/// This rank's number, from 0 on. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_rank(comm: Comm, rank: *mut i32) -> Status {
    entry("get the rank", || {
        let value = comm.get()?.communicator.rank();
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(rank, "rank", number(value)?) }
    })
}

/// How many ranks there are. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_size(comm: Comm, size: *mut i32) -> Status {
    entry("get the number of ranks", || {
        let value = comm.get()?.communicator.world();
        // SAFETY: the caller passes a place for a number.
        unsafe { pointer::store(size, "size", number(value)?) }
    })
}

/// Gathers `bytes` bytes of every rank, through the hosts: `data` has room for those of all ranks, in their order, and
/// this rank's in their place. Blocks until every rank has called it with the same length; another length is
/// WARPLINK_STATUS_MISMATCH on every rank, a rank that does not call it WARPLINK_STATUS_TIMEOUT.
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
                "give the bytes of one rank",
            )
        })?;
        let own = data.cast::<u8>().wrapping_add(rank * bytes);
        // SAFETY: the caller passes the bytes of all ranks, of which this rank's are initialized.
        let own = unsafe { pointer::values(own, bytes, "data") }?.to_vec();
        let gathered = job.communicator.all_gather_bytes(&own)?;
        if let Some(other) = gathered.iter().position(|part| part.len() != bytes) {
            let message = format!(
                "the peer gives {} bytes; expected {bytes}",
                gathered[other].len()
            );
            let error = Error::new(ErrorKind::Mismatch, message).with_peer(other);
            return Err(error.with_help("give the same length on every rank").into());
        }
        // SAFETY: as above; nothing else refers to them here any more.
        unsafe { pointer::new_bytes(data, all, "data") }?.copy_from_slice(&gathered.concat());
        Ok(())
    })
}

/// Blocks until every rank has called it. It orders hosts, not streams. A rank that does not call it is
/// WARPLINK_STATUS_TIMEOUT, one that is gone WARPLINK_STATUS_PEER_LOST or WARPLINK_STATUS_PEER_LEFT.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_barrier(comm: Comm) -> Status {
    entry("barrier", || Ok(comm.get()?.communicator.barrier()?))
}

/// Leaves in order. Blocks until every rank has called it, and until this rank's streams are done with what they use
/// of Warplink. From then on the communicator and all that was made with it (regions, streams, modules ...) cannot be
/// used, also if this fails; borrowed streams that record no graph are given back. A process that ends without it is
/// lost to its peers. A stream that still waits for a peer at the timeout, and a rank that does not call it, are
/// WARPLINK_STATUS_TIMEOUT, a rank that was lost WARPLINK_STATUS_PEER_LOST; this rank then leaves as by
/// `warplink_abort`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_destroy(comm: Comm) -> Status {
    entry("destroy", || {
        let job = comm.take()?;
        handles::take_all_of(&job);
        drop(std::mem::take(&mut *job.setup()));
        Ok(job.communicator.clone().close()?)
    })
}

/// Leaves as a failure: the peers' waits, also those of kernels, end with an error that names this rank and `reason`,
/// and so do the waits in this rank's streams. Blocks for some two seconds at most. Later calls that concern other
/// ranks fail. The communicator still has to be destroyed, which then fails too. A second abort does nothing.
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

/// Joins, and gives the communicator.
///
/// # Safety
/// `comm` must be null or a place for a communicator, `options` null or options.
unsafe fn init(
    comm: *mut Comm,
    identity: Option<(i32, i32)>,
    meeting: &Meeting,
    options: *const Options,
) -> Outcome {
    pointer::check(comm, "comm")?;
    log::start();
    // SAFETY: the caller vouches for it.
    let config = unsafe { configuration(identity, meeting, options) }?;
    let communicator = Communicator::join(&config)?;
    let comm_made = Comm::new(JobObject {
        communicator,
        setup: Mutex::default(),
    });
    // SAFETY: the caller vouches for it.
    unsafe { pointer::store(comm, "comm", comm_made) }
}

/// How to join: as the arguments say, then the environment.
///
/// # Safety
/// `options` must be null or options.
unsafe fn configuration(
    identity: Option<(i32, i32)>,
    meeting: &Meeting,
    options: *const Options,
) -> Outcome<Config> {
    let options = if options.is_null() {
        warplink_options_default()
    } else {
        // SAFETY: the caller vouches for it; the size is looked at before anything else.
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
                "give every process a rank of its own, and all the same size",
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
        // An id of the environment's would come before the address of the arguments.
        let hidden = name == "WARPLINK_ID" && matches!(meeting, Meeting::Address(_));
        find(name).or_else(|| std::env::var_os(name).filter(|_| !hidden))
    })?;
    let limit = BOOTSTRAP_TIMEOUT.load(Ordering::Relaxed);
    if limit > 0 {
        join.timeout = Duration::from_secs(limit.unsigned_abs().into());
    }
    let local_rank = join.local_rank;
    if let Ok(ordinal) = usize::try_from(options.ordinal) {
        // The GPU is chosen by the local rank, which need not have one of its own where the caller chooses.
        join.local_rank = ordinal;
    }
    if let Some(device) = device {
        // Told as the argument that it is, not as a variable.
        device.parse::<DeviceKind>()?;
    }
    let mut config = Config::from_variables(join, |name| match (name, device) {
        ("WARPLINK_DEVICE", Some(device)) => Some(device.into()),
        _ => std::env::var_os(name),
    })?;
    config.join.local_rank = local_rank;
    if options.timeout != 0.0 {
        config.timeout = Duration::try_from_secs_f64(options.timeout).map_err(|_| {
            Failure::invalid(
                format!(
                    "a timeout of {} seconds; expected a length of time",
                    options.timeout
                ),
                "give a number of seconds, or 0 for the default",
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
    // SAFETY: of this version, as was checked.
    unsafe { pointer::load(options, "options") }
}

/// A rank or a number of ranks, as C has it.
fn number(value: usize) -> Outcome<i32> {
    i32::try_from(value).map_err(|_| {
        Failure::invalid(
            format!("{value} is too large; expected a number of 31 bits"),
            "start fewer ranks",
        )
    })
}
