//! Creation of communicators. Each is a separate Warplink job, so that ending one does not affect any other.

use crate::abi::{Config, Handle, UniqueId, Wishes, check, store};
use crate::communicator::{Comm, Joined, Route, check_process, find, gather};
use crate::counterpart::Counterpart;
use crate::route::route;
use crate::status::{Failure, Outcome};
use crate::{devices, group, leave, log, report};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;
use warplink::bootstrap::{self, JoinConfig, Rendezvous};
use warplink::{Communicator, DeviceKind, Error, Result, variables};

/// Environment variable with the address at which ranks meet.
const ADDRESS_VARIABLE: &str = "WARPLINK_NCCL_ADDRESS";

/// Timeout of waits for other ranks' hosts, unless `WARPLINK_TIMEOUT` is set. It is long because programs create
/// communicators on first use, which may be minutes later on another rank.
const TIMEOUT: Duration = Duration::from_secs(600);

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;

/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

/// Rank and rendezvous of a communicator to join.
#[derive(Clone)]
struct MeetingPlace {
    id: bootstrap::UniqueId,
    rank: usize,
    ranks: usize,
    ordinal: usize,
}

/// The address at which other ranks reach this machine: that of the interface of the default route, or else the
/// loopback address.
fn own_address() -> Outcome<IpAddr> {
    if let Some(named) = variables::read(ADDRESS_VARIABLE)?.filter(|text| !text.is_empty()) {
        return named.parse().map_err(|_| {
            Failure::argument(
                format!("{ADDRESS_VARIABLE} is '{named}'; expected an IP address"),
                "set it to an address of this machine that the other ranks can reach",
            )
        });
    }
    // Connecting a UDP socket sends nothing: the system only selects the local interface.
    let found = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        // An address that is reserved for documentation, and is routed as any other outside of the local networks.
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    Ok(found.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip()))
}

fn new_id() -> Outcome<bootstrap::UniqueId> {
    Ok(bootstrap::UniqueId::create(own_address()?, 0)?)
}

/// # Safety
/// `id` must be null or valid for a write of an id. Pointers of the functions below must be valid as NCCL's
/// documentation requires.
pub(crate) unsafe fn unique_id(id: *mut UniqueId) -> Outcome {
    log::start();
    check(id, "uniqueId")?;
    let bytes = new_id()?.to_bytes();
    // SAFETY: the caller passes null or a pointer valid for a write of an id.
    unsafe { store(id, "uniqueId", UniqueId { bytes }) }
}

fn parse(id: &UniqueId) -> Outcome<bootstrap::UniqueId> {
    Ok(bootstrap::UniqueId::from_bytes(&id.bytes).map_err(|error| {
        error.with_help("pass an id returned by ncclGetUniqueId of this library")
    })?)
}

/// Checks the rank and the number of ranks passed by the caller.
fn ranks(rank: c_int, ranks: c_int) -> Outcome<(usize, usize)> {
    match (usize::try_from(rank), usize::try_from(ranks)) {
        (Ok(rank), Ok(ranks)) if rank < ranks => Ok((rank, ranks)),
        _ => Err(Failure::argument(
            format!(
                "rank {rank} of {ranks}; expected a rank from 0 to the number of ranks less one"
            ),
            "pass the rank and the number of ranks",
        )),
    }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn init_rank(
    comm: *mut Handle,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe { init_rank_config(comm, ranks, id, rank, std::ptr::null_mut()) }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn init_rank_config(
    comm: *mut Handle,
    count: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> Outcome {
    check(comm, "comm")?;
    // SAFETY: the caller passes null or a configuration.
    let wishes = unsafe { Wishes::read(config) }?;
    let (rank, ranks) = ranks(rank, count)?;
    let place = MeetingPlace {
        id: parse(&id)?,
        rank,
        ranks,
        ordinal: devices::current()?,
    };
    // SAFETY: the caller keeps the pointer valid for a write until the group ends.
    unsafe { begin(comm, place, wishes) }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn init_rank_scalable(
    comm: *mut Handle,
    count: c_int,
    rank: c_int,
    id_count: c_int,
    ids: *mut UniqueId,
    config: *mut Config,
) -> Outcome {
    check(ids, "commIds")?;
    if id_count < 1 || id_count > count {
        return Err(Failure::argument(
            format!("{id_count} ids; expected from 1 to the number of ranks"),
            "pass at least one id, and no more than there are ranks",
        ));
    }
    // SAFETY: the caller passes as many ids.
    let ids: Vec<UniqueId> = (0..id_count as usize)
        .map(|at| unsafe { ids.add(at).read_unaligned() })
        .collect();
    // One id suffices for the rendezvous; the ports that this process reserved for other ids are released.
    for id in &ids[1..] {
        parse(id)?.release();
    }
    // SAFETY: the caller's pointers are passed on.
    unsafe { init_rank_config(comm, count, ids[0], rank, config) }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn init_all(comms: *mut Handle, count: c_int, devices: *const c_int) -> Outcome {
    check(comms, "comm")?;
    let ranks = usize::try_from(count).ok().filter(|count| *count > 0);
    let ranks = ranks.ok_or_else(|| {
        Failure::argument(
            format!("{count} devices; expected at least 1"),
            "pass the number of devices",
        )
    })?;
    let ordinals: Vec<usize> = (0..ranks)
        .map(|rank| {
            if devices.is_null() {
                return Ok(rank);
            }
            // SAFETY: the caller passes as many numbers.
            let ordinal = unsafe { devices.add(rank).read_unaligned() };
            usize::try_from(ordinal).map_err(|_| {
                Failure::argument(
                    format!("device {ordinal}; expected the index of a GPU"),
                    "pass indices of GPUs, or null for the first ones",
                )
            })
        })
        .collect::<Outcome<_>>()?;
    for (rank, ordinal) in ordinals.iter().enumerate() {
        // On the host device, whose number means nothing, ranks may have the same.
        if devices::kind()? == DeviceKind::Cuda && ordinals[..rank].contains(ordinal) {
            return Err(Failure::usage(
                format!("device {ordinal} is listed twice; expected each once"),
                "pass a different GPU for each rank",
            ));
        }
    }
    let id = new_id()?;
    group::within(|| {
        for (rank, ordinal) in ordinals.into_iter().enumerate() {
            let place = MeetingPlace {
                id: id.clone(),
                rank,
                ranks,
                ordinal,
            };
            // It blocks: there is no configuration that could ask for anything else.
            // SAFETY: the caller passes an array for as many handles.
            unsafe { begin(comms.add(rank), place, Wishes::default()) }?;
        }
        Ok(())
    })
}

/// Starts joining, now or at the end of the group.
///
/// # Safety
/// `made` must be valid for a write of a handle until the group ends.
unsafe fn begin(made: *mut Handle, place: MeetingPlace, wishes: Wishes) -> Outcome {
    check_process()?;
    let comm = Comm::new(place.rank, place.ranks, place.ordinal, wishes);
    // SAFETY: as required of the caller.
    unsafe { begin_with(made, &comm, &comm, move || Ok(place)) }
}

/// As [`begin`], for a rendezvous that is determined by communication with other ranks over `parent`, which is `comm`
/// itself if there is none.
///
/// # Safety
/// As [`begin`].
unsafe fn begin_with(
    made: *mut Handle,
    comm: &Arc<Comm>,
    parent: &Arc<Comm>,
    place: impl FnOnce() -> Outcome<MeetingPlace> + Send + 'static,
) -> Outcome {
    log::start();
    report::start();
    // Before the work: a caller that does not block polls the handle while ranks are joining.
    // SAFETY: as required of the caller.
    unsafe { store(made, "comm", comm.handle()) }?;
    let joining = comm.clone();
    let work = move || {
        let joined = place().and_then(|place| join(&joining, &place).map_err(Failure::from));
        let failure = joined.as_ref().err().cloned();
        let unknown = || Error::internal("joining failed without an error");
        let joined = joined
            .map(Arc::new)
            .map_err(|failure| failure.error.unwrap_or_else(unknown));
        if let Some(joined) = joining.set_joined(joined) {
            leave::abandon(joined);
        }
        failure.map_or(Ok(()), Err)
    };
    let ending = comm.clone();
    let undo = move || {
        ending.end();
        // SAFETY: the caller keeps the pointer valid until the group ends, which is before this thread leaves it.
        unsafe { made.write_unaligned(std::ptr::null_mut()) };
    };
    group::run(group::Task::new(parent, work, undo).blocking(comm.blocking))
}

/// Joins all other ranks, and selects the library that executes the calls. Blocks until all ranks have joined.
fn join(comm: &Arc<Comm>, place: &MeetingPlace) -> Result<Joined> {
    // Callers of NCCL select a GPU for the thread, and have no local rank that it could be derived from.
    let join = JoinConfig::new(Rendezvous::Id(place.id.clone()), place.rank, place.ranks)
        .with_local_rank(place.ordinal);
    let own = variables::read("WARPLINK_TIMEOUT")?.is_none_or(|text| text.is_empty());
    let mut config = warplink::Config::from_variables(join, |name| std::env::var_os(name))?;
    config.device.ordinal = place.ordinal;
    // The variable of Warplink wins where it is set; its default is too short for programs that create
    // communicators lazily.
    if own {
        config.timeout = TIMEOUT;
        config.join.timeout = TIMEOUT;
    }
    let communicator = Communicator::join_with(&config, &comm.joining)?;
    let route = route(comm, &communicator, comm.wishes.multiprocessors);
    // The others wait for this rank's part of the choice, or for its calls; the abort ends these waits.
    let route = route.inspect_err(|error| communicator.abort(&error.to_string()))?;
    let joined = Joined {
        communicator,
        route,
        real: Counterpart::new(place.ordinal, comm.wishes.real.clone()),
    };
    if matches!(joined.route, Route::Real) {
        let made = joined.real();
        let unknown = || Error::internal("NCCL failed without an error");
        made.map_err(|failure| failure.error.unwrap_or_else(unknown))
            .inspect_err(|error| joined.communicator.abort(&error.to_string()))?;
    }
    Ok(joined)
}

/// A rank's contribution to a split: its color and key, and the rendezvous of the new communicator.
struct Member {
    color: c_int,
    key: c_int,
    id: Vec<u8>,
}

impl Member {
    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.color.to_le_bytes(), self.key.to_le_bytes()].concat();
        [numbers, self.id.clone()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (color, rest) = bytes.split_first_chunk()?;
        let (key, id) = rest.split_first_chunk()?;
        Some(Self {
            color: c_int::from_le_bytes(*color),
            key: c_int::from_le_bytes(*key),
            id: id.to_vec(),
        })
    }
}

/// The configuration of a communicator that is derived from `parent`, whose it is if the caller passes none.
///
/// # Safety
/// `config` must be null or point to a configuration of as many bytes as it states.
unsafe fn wishes_of_child(parent: &Comm, config: *const Config) -> Outcome<Wishes> {
    if config.is_null() {
        return Ok(parent.wishes.clone());
    }
    // SAFETY: guaranteed by the caller.
    let wishes = unsafe { Wishes::read(config) }?;
    Ok(Wishes {
        blocking: wishes.blocking.or(Some(parent.blocking)),
        ..wishes
    })
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn split(
    comm: Handle,
    color: c_int,
    key: c_int,
    made: *mut Handle,
    config: *mut Config,
) -> Outcome {
    check(made, "newcomm")?;
    let parent = find(comm)?;
    let joined = parent.joined_and_idle()?;
    // SAFETY: the caller passes null or a configuration.
    let wishes = unsafe { wishes_of_child(&parent, config) }?;
    if color < 0 && color != NO_COLOR {
        return Err(Failure::argument(
            format!("color is {color}; expected one of at least 0, or NCCL_SPLIT_NOCOLOR"),
            "pass a color of at least 0, or NCCL_SPLIT_NOCOLOR",
        ));
    }
    let blocking = wishes.blocking.unwrap_or(true);
    let communicator = joined.communicator.clone();
    let gather = move |id: Vec<u8>| -> Outcome<Vec<Member>> {
        let own = Member { color, key, id };
        let all = gather(&communicator, "ncclCommSplit", &own.to_bytes())?;
        let members = all.iter().map(|bytes| Member::from_bytes(bytes));
        members.collect::<Option<_>>().ok_or_else(|| {
            Failure::usage(
                "another rank has another version of this library",
                "install the same version on every rank",
            )
        })
    };
    if color == NO_COLOR {
        // SAFETY: the caller passes null or a pointer valid for a write of a handle.
        unsafe { store(made, "newcomm", std::ptr::null_mut()) }?;
        // It still takes part in the exchange, for which the other ranks wait.
        let asked = parent.clone();
        let work = move || {
            let gathered = gather(Vec::new()).map(drop);
            // The caller that does not wait has no other communicator to ask for the failure.
            if let (
                false,
                Err(Failure {
                    error: Some(error), ..
                }),
            ) = (blocking, &gathered)
            {
                asked.fail(error.clone());
            }
            gathered
        };
        return group::run(group::Task::new(&parent, work, || ()).blocking(blocking));
    }
    // Rank and number of ranks are known only after all ranks have exchanged their colors.
    let child = Comm::new(parent.rank(), parent.ranks(), parent.ordinal, wishes);
    let (rank, ordinal) = (parent.rank(), parent.ordinal);
    let told = child.clone();
    let place = move || {
        let id = new_id()?;
        // Every rank offers one, since only the gather shows which rank is the first of its color.
        let all = gather(id.to_bytes().to_vec())?;
        let mut members: Vec<(c_int, usize)> = all
            .iter()
            .enumerate()
            .filter(|(_, member)| member.color == color)
            .map(|(rank, member)| (member.key, rank))
            .collect();
        // By key and then by rank in the parent, as NCCL documents.
        members.sort_unstable();
        let position = members.iter().position(|(_, member)| *member == rank);
        let first = members[0].1;
        if first != rank {
            id.release();
        }
        let place = MeetingPlace {
            id: bootstrap::UniqueId::from_bytes(&all[first].id)?,
            rank: position.unwrap_or(0),
            ranks: members.len(),
            ordinal,
        };
        told.set_place(place.rank, place.ranks);
        Ok(place)
    };
    // SAFETY: the caller keeps the pointer valid for a write until the group ends.
    unsafe { begin_with(made, &child, &parent, place) }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn shrink(
    comm: Handle,
    excluded: *mut c_int,
    count: c_int,
    made: *mut Handle,
    config: *mut Config,
    flags: c_int,
) -> Outcome {
    check(made, "newcomm")?;
    let parent = find(comm)?;
    let joined = parent.joined_and_idle()?;
    // SAFETY: the caller passes null or a configuration.
    let wishes = unsafe { wishes_of_child(&parent, config) }?;
    let mut left: Vec<usize> = (0..parent.ranks()).collect();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        check(excluded, "excludeRanksList")?;
        // SAFETY: the caller passes as many ranks.
        let rank = unsafe { excluded.add(at).read_unaligned() };
        let rank = parent.rank_of(rank, "an excluded rank")?;
        left.retain(|other| *other != rank);
    }
    if !left.contains(&parent.rank()) || left.len() == parent.ranks() {
        return Err(Failure::argument(
            "the excluded ranks are none or include this rank; expected at least one other rank and not this one",
            "call it on the remaining ranks only, and pass the ranks to remove",
        ));
    }
    if flags & SHRINK_ABORT != 0 {
        // Calls in flight may wait for lost ranks.
        parent
            .revoked
            .store(true, std::sync::atomic::Ordering::Relaxed);
        joined.communicator.fail("ncclCommShrink aborted its calls");
        joined.end_real(true);
    }
    let position = left
        .iter()
        .position(|rank| *rank == parent.rank())
        .unwrap_or(0);
    let child = Comm::new(position, left.len(), parent.ordinal, wishes);
    let ordinal = parent.ordinal;
    let communicator = joined.communicator.clone();
    let place = move || {
        // A group of the remaining ranks only, since the excluded ones may be lost, and do not make this call.
        let group = communicator.subgroup(&left)?;
        let id = match position {
            0 => Some(new_id()?),
            _ => None,
        };
        let own = id.map_or(Vec::new(), |id| id.to_bytes().to_vec());
        let all = group.all_gather_bytes(&own)?;
        Ok(MeetingPlace {
            id: bootstrap::UniqueId::from_bytes(&all[0])?,
            rank: position,
            ranks: left.len(),
            ordinal,
        })
    };
    // SAFETY: the caller keeps the pointer valid for a write until the group ends.
    unsafe { begin_with(made, &child, &parent, place) }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn unique_id_to_grow(comm: Handle, id: *mut UniqueId) -> Outcome {
    find(comm)?.joined()?;
    // SAFETY: the caller passes null or a pointer valid for a write of an id.
    unsafe { unique_id(id) }
}

/// # Safety
/// As [`unique_id`].
pub(crate) unsafe fn grow(
    comm: Handle,
    count: c_int,
    id: *const UniqueId,
    rank: c_int,
    made: *mut Handle,
    config: *mut Config,
) -> Outcome {
    check(made, "newcomm")?;
    // A rank that joins has no communicator to exchange ids over; it meets the others at the id that it was given.
    if comm.is_null() {
        check(id, "uniqueId")?;
        // SAFETY: the caller passes an id.
        let id = unsafe { id.read_unaligned() };
        // SAFETY: the caller's pointers are passed on.
        return unsafe { init_rank_config(made, count, id, rank, config) };
    }
    let parent = find(comm)?;
    let joined = parent.joined_and_idle()?;
    // SAFETY: the caller passes null or a configuration.
    let wishes = unsafe { wishes_of_child(&parent, config) }?;
    let (own, ranks) = ranks(parent.rank() as c_int, count)?;
    if rank != -1 || ranks <= parent.ranks() {
        return Err(Failure::argument(
            format!(
                "rank {rank}, {ranks} ranks; expected -1 and more ranks than the communicator has"
            ),
            "pass -1 as the rank on existing ranks of the communicator",
        ));
    }
    let given = if id.is_null() {
        Vec::new()
    } else {
        // SAFETY: the caller passes an id.
        unsafe { id.read_unaligned() }.bytes.to_vec()
    };
    let child = Comm::new(own, ranks, parent.ordinal, wishes);
    let ordinal = parent.ordinal;
    let communicator = joined.communicator.clone();
    let place = move || {
        // Only one of the existing ranks has to know the id.
        let all = gather(&communicator, "ncclCommGrow", &given)?;
        let id = all.iter().find(|bytes| !bytes.is_empty()).ok_or_else(|| {
            Failure::argument(
                "no rank passed an id; expected the rank that called ncclCommGetUniqueId to",
                "pass the id on the rank that called ncclCommGetUniqueId",
            )
        })?;
        Ok(MeetingPlace {
            id: bootstrap::UniqueId::from_bytes(id)?,
            rank: own,
            ranks,
            ordinal,
        })
    };
    // SAFETY: the caller keeps the pointer valid for a write until the group ends.
    unsafe { begin_with(made, &child, &parent, place) }
}
