//! Properties of the library and of communicators.

use crate::abi::{Handle, Properties, Team, check, store};
use crate::communicator::{Comm, RealHandle, find};
use crate::real;
use crate::status::{Code, Failure, Outcome};
use crate::table::real as functions;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use warplink::collective::DEFAULT_WORKSPACE_BYTES;

/// The reported version if the real NCCL is not available, matching the functions provided here: programs select
/// features by it.
const VERSION: c_int = 23007;

/// Workspaces per communicator, in units of the configured workspace: one for collectives, and four for messages.
const WORKSPACES: u64 = 5;

/// # Safety
/// `version` must be null or valid for a write. Pointers of the functions below must be valid as NCCL's
/// documentation requires.
pub(crate) unsafe fn version(version: *mut c_int) -> Outcome {
    check(version, "version")?;
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe { store(version, "version", real::version().unwrap_or(VERSION)) }
}

/// # Safety
/// As [`version`].
pub(crate) unsafe fn async_error(comm: Handle, result: *mut c_int) -> Outcome {
    let comm = find(comm)?;
    check(result, "asyncError")?;
    // A failure of the communicator is the result that was asked for, and no failure of this call.
    let code = comm.progress().unwrap_or_else(|failure| {
        if let Some(error) = &failure.error {
            crate::status::keep(&error.to_string());
        }
        failure.code
    });
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe { store(result, "asyncError", code as c_int) }
}

/// Stores a property of a communicator.
///
/// # Safety
/// As [`version`].
unsafe fn number(comm: Handle, place: *mut c_int, read: impl Fn(&Comm) -> usize) -> Outcome {
    let comm = find(comm)?;
    check(place, "the result")?;
    comm.joined()?;
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe { store(place, "the result", read(&comm) as c_int) }
}

/// # Safety
/// As [`version`].
pub(crate) unsafe fn count(comm: Handle, count: *mut c_int) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe { number(comm, count, Comm::ranks) }
}

/// # Safety
/// As [`version`].
pub(crate) unsafe fn user_rank(comm: Handle, rank: *mut c_int) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe { number(comm, rank, Comm::rank) }
}

/// # Safety
/// As [`version`].
pub(crate) unsafe fn device(comm: Handle, device: *mut c_int) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe { number(comm, device, |comm| comm.ordinal) }
}

/// # Safety
/// As [`version`].
pub(crate) unsafe fn query(comm: Handle, place: *mut Properties) -> Outcome {
    let comm = find(comm)?;
    let joined = comm.joined()?;
    check(place, "props")?;
    // SAFETY: the caller passes a structure.
    let header = unsafe { (&raw const (*place).header).read_unaligned() };
    header.check("the structure")?;
    // Only if it exists: creating it here would be collective, and this function is not.
    if let Some(RealHandle(real)) = joined.made_real() {
        // SAFETY: the structure is the caller's, and the communicator the real library's.
        let code = unsafe { functions::CommQueryProperties(real, place) }?;
        return Failure::check_real(code, "ncclCommQueryProperties");
    }
    if header.size < size_of::<Properties>() {
        return Err(Failure::argument(
            format!("a structure of {} bytes; expected more", header.size),
            "initialize it with the macro of nccl.h",
        ));
    }
    let properties = Properties {
        header,
        rank: comm.rank() as c_int,
        ranks: comm.ranks() as c_int,
        device: comm.ordinal as c_int,
        nvml_device: comm.ordinal as c_int,
        // Device communicators belong to the real library.
        device_api: joined.is_on_gpu() && real::is_there(),
        multimem: false,
        gin_type: 0,
    };
    // SAFETY: the caller passes a structure of as many bytes at least.
    unsafe { store(place, "props", properties) }
}

/// # Safety
/// As [`version`].
pub(crate) unsafe fn memory_statistics(comm: Handle, which: c_int, value: *mut u64) -> Outcome {
    let comm = find(comm)?;
    let joined = comm.joined()?;
    let workspaces = match joined.served() {
        Some(_) => WORKSPACES * DEFAULT_WORKSPACE_BYTES as u64,
        None => 0,
    };
    let statistic = match which {
        // Suspension releases no memory.
        0 => 0,
        1 => comm.suspended.load(Ordering::Relaxed).into(),
        // Persistent memory and the total: all of it lives as long as the communicator.
        2 | 3 => workspaces,
        other => {
            return Err(Failure::argument(
                format!("unknown statistic {other}; expected an ncclCommMemStat_t"),
                "use a value of ncclCommMemStat_t",
            ));
        }
    };
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe { store(value, "value", statistic) }
}

/// All ranks of a communicator, which are all on one machine if Warplink executes its calls.
fn everyone(comm: Handle) -> Team {
    // The function returns no status, so that an unknown handle gives an empty team.
    let found = find(comm);
    let (rank, ranks) = found.map_or((0, 0), |comm| (comm.rank(), comm.ranks()));
    Team {
        ranks: ranks as c_int,
        rank: rank as c_int,
        stride: 1,
    }
}

/// The real library's communicator of a handle, if it exists.
fn real_of(comm: Handle) -> Option<Handle> {
    let joined = find(comm).ok()?.joined().ok()?;
    joined.made_real().map(|real| real.0)
}

/// `ncclTeamWorld`.
pub(crate) fn team_world(comm: Handle) -> Team {
    everyone(comm)
}

/// `ncclTeamLsa`: the ranks that access one another's memory by loads and stores.
pub(crate) fn team_lsa(comm: Handle) -> Team {
    // SAFETY: the communicator is the real library's.
    let real = real_of(comm).and_then(|real| unsafe { functions::TeamLsa(real) }.ok());
    real.unwrap_or_else(|| everyone(comm))
}

/// `ncclTeamRail`: the corresponding ranks of other machines; only this rank if Warplink executes the calls.
pub(crate) fn team_rail(comm: Handle) -> Team {
    // SAFETY: the communicator is the real library's.
    let real = real_of(comm).and_then(|real| unsafe { functions::TeamRail(real) }.ok());
    real.unwrap_or_else(|| alone(comm))
}

/// A team of only this rank.
fn alone(comm: Handle) -> Team {
    Team {
        ranks: 1,
        rank: 0,
        stride: everyone(comm).ranks,
    }
}

/// `ncclTeamCft`: only the real library creates such teams; without it, a team of only this rank.
pub(crate) fn team_cft(comm: Handle, mode: c_int) -> Team {
    // SAFETY: the communicator is the real library's.
    let real = real_of(comm).and_then(|real| unsafe { functions::TeamCft(real, mode) }.ok());
    real.unwrap_or_else(|| alone(comm))
}

/// `ncclTeamCftMultimem`: as `ncclTeamCft`.
pub(crate) fn team_cft_multimem(comm: Handle) -> Team {
    // SAFETY: the communicator is the real library's.
    let real = real_of(comm).and_then(|real| unsafe { functions::TeamCftMultimem(real) }.ok());
    real.unwrap_or_else(|| alone(comm))
}

/// `ncclTeamRankToWorld`.
pub(crate) fn team_rank_to_world(comm: Handle, team: Team, rank: c_int) -> c_int {
    let own = everyone(comm).rank;
    own + (rank - team.rank) * team.stride
}

/// `ncclTeamRankToLsa`.
pub(crate) fn team_rank_to_lsa(comm: Handle, team: Team, rank: c_int) -> c_int {
    let own = team_lsa(comm).rank;
    own + (rank - team.rank) * team.stride
}

/// `ncclParamDumpAll`: prints the real library's parameters.
pub(crate) fn dump_parameters() {
    // SAFETY: the function has no arguments.
    let dumped = unsafe { functions::ParamDumpAll() };
    if let Err(Failure {
        code: Code::SystemError,
        ..
    }) = dumped
    {
        tracing::warn!("ncclParamDumpAll prints parameters of the real NCCL, which was not found");
    }
}
