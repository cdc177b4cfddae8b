//! Joining collectives: selects the path of a communicator.

use super::choice::Machine;
use super::direct::{Direct, MAX_BLOCKS};
use super::engine::EngineCollectives;
use super::estimate::Estimates;
use super::messages::Messages;
use super::{
    Call, CollectiveOptions, CollectivePath, Collectives, Inner, MAX_DIRECT_RANKS,
    MIN_BYTES_PER_RANK,
};
use crate::device::{DeviceProperties, InUse, Turns};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::cost::HardwareModel;
use crate::program::execute::RankContext;
use crate::program::section::ROW_ELEMENTS_OF_LINES;
use crate::topology::{Topology, TopologyClass, rendezvous};
use std::sync::{Arc, Mutex, OnceLock};

/// Available paths.
pub(super) enum Paths {
    Direct(Box<Direct>),
    Engine(EngineCollectives),
    /// Direct path for calls that it has a program for, and the engine for others, or why there is none.
    Both(Box<Direct>, Result<EngineCollectives>),
}

/// Path of one call.
pub(super) enum CallPath<'a> {
    Direct(&'a Direct),
    Engine(&'a EngineCollectives),
}

impl Paths {
    pub(super) fn direct(&self) -> Option<&Direct> {
        match self {
            Self::Direct(direct) | Self::Both(direct, _) => Some(direct),
            Self::Engine(_) => None,
        }
    }

    /// The engine, if joined.
    pub(super) fn joined_engine(&self) -> Option<&EngineCollectives> {
        match self {
            Self::Direct(_) => None,
            Self::Engine(engine) => Some(engine),
            Self::Both(_, engine) => engine.as_ref().ok(),
        }
    }

    /// The engine, for calls that the direct path does not support.
    pub(super) fn engine(&self) -> Result<Option<&EngineCollectives>> {
        match self {
            Self::Direct(_) => Ok(None),
            Self::Engine(engine) => Ok(Some(engine)),
            Self::Both(_, engine) => engine.as_ref().map(Some).map_err(Error::clone),
        }
    }
}

impl Inner {
    /// Path of `call`.
    pub(super) fn path_for(&self, call: &Call) -> Result<CallPath<'_>> {
        match &self.path {
            Paths::Direct(direct) => Ok(CallPath::Direct(direct)),
            Paths::Both(direct, _) if self.machine.does(call) => Ok(CallPath::Direct(direct)),
            Paths::Both(_, Err(error)) => Err(error.clone()),
            Paths::Both(_, Ok(engine)) | Paths::Engine(engine) => Ok(CallPath::Engine(engine)),
        }
    }
}

impl Collectives {
    /// Joins the collectives. Collective; blocks until every rank has called it.
    pub(crate) fn join(
        context: RankContext,
        options: &CollectiveOptions,
        forced: Option<TopologyClass>,
    ) -> Result<Self> {
        let rank = context.rank();
        let model = context.hardware_model()?;
        // Collective, before anything can fail on a single rank.
        let [fewest, cluster_blocks] = fewest_multiprocessors(&context)?;
        let carries_lines = context.carries_lines()?;
        let machine = Self::machine(&context, options, &model, [fewest, cluster_blocks]);
        // If one rank fails, all do, since later steps are collective.
        let mut machine = context.agree_on(machine)?;
        let topology = topology(&context, forced)?;
        machine.cube = topology.as_ref().and_then(Topology::cube_positions);
        if machine.cube.is_some() {
            // The whole workspace is for packets, half of whose bytes are data.
            machine.packet_bytes = pages(options.workspace_bytes / 4);
        } else if carries_lines && machine.world > 1 {
            machine.lined_bytes = options.workspace_bytes / 8 * 7 / LINED_BYTES * LINED_BYTES;
        }
        let settings = format!("{options:?} {machine:?}");
        // Ranks with different options or models would choose different algorithms.
        let all = context.all_gather(settings.as_bytes())?;
        if let Some(peer) = all.iter().position(|other| other != settings.as_bytes()) {
            return Err(
                Error::mismatch("the ranks have other options; expected the same on all")
                    .with_operation("join the collectives")
                    .with_rank(rank)
                    .with_peer(peer)
                    .with_help("pass the same options on every rank"),
            );
        }
        let path = match options.path {
            Some(CollectivePath::Direct) => {
                // If ranks span machines, each rank has a remote peer.
                if let Some(peer) = far(&context, machine.world)? {
                    let text = "the peer is on another machine; expected the ranks of one machine on the direct path";
                    return Err(Error::unsupported(text)
                        .with_operation("join the collectives")
                        .with_rank(rank)
                        .with_peer(peer)
                        .with_help("leave the path open"));
                }
                Paths::Direct(Box::new(Direct::join(
                    &context,
                    &machine,
                    options.launch_bytes,
                )?))
            }
            Some(CollectivePath::Engine) => {
                Paths::Engine(EngineCollectives::join(&context, options.communicator)?)
            }
            None => Self::either(&context, &machine, options, topology.as_ref())?,
        };
        let messages = match &path {
            Paths::Direct(direct) if machine.cube.is_none() => {
                // Messages use the same workspace publication, but memory of their own.
                let bytes = messages_bytes(options.workspace_bytes, &context.device.properties());
                let most = options.multiprocessors.unwrap_or(usize::MAX);
                let beside = &direct.workspace;
                Some(Messages::join(&context, beside, bytes, fewest.min(most))?)
            }
            _ => None,
        };
        let in_flight = context.in_flight.clone();
        let inner = Inner {
            turns: Turns::new(&context.device),
            context,
            machine,
            path,
            messages,
            last: Mutex::default(),
            executor: OnceLock::new(),
        };
        Ok(Self(Arc::new(InUse::new(inner, &in_flight))))
    }

    /// The direct path if all ranks can map one another's memory, else the engine; the same on all ranks. If
    /// the topology has an obstacle, the engine if available.
    fn either(
        context: &RankContext,
        machine: &Machine,
        options: &CollectiveOptions,
        topology: Option<&Topology>,
    ) -> Result<Paths> {
        let by_engine =
            || EngineCollectives::join(context, options.communicator).map(Paths::Engine);
        // All ranks come to the same result, since peer information is identical.
        if machine.world > MAX_DIRECT_RANKS || far(context, machine.world)?.is_some() {
            return by_engine();
        }
        if let Some(obstacle) = topology.and_then(|topology| topology.obstacles().first()) {
            // Not `?`: one rank may lack the library while others have it, and the decision is made by all.
            let engine = by_engine();
            // A lost rank must not be mistaken for a missing engine.
            context.fault.check()?;
            let all = context.all_gather(&[u8::from(engine.is_ok())])?;
            // The engine is used by all ranks or by none.
            if all.iter().all(|joined| joined == &[1]) {
                tracing::info!(%obstacle, "collectives use the vendor's library");
                return engine;
            }
            let error = engine.err();
            tracing::warn!(%obstacle, ?error, "collectives use the direct path, since the vendor's library is unavailable");
        }
        let joined = Direct::join(context, machine, options.launch_bytes);
        // Whether this rank failed for a reason that also affects the other path; peers only know that it
        // failed.
        let hopeless = joined
            .as_ref()
            .err()
            .is_some_and(|error| !cannot_map(error));
        let all = context.all_gather(&[u8::from(hopeless)])?;
        let first = all.iter().position(|other| other != &[0]);
        match (joined, first) {
            (Ok(direct), None) if machine.cube.is_none() => Ok(Paths::Direct(Box::new(direct))),
            (Ok(direct), None) => {
                // For calls that the mesh's links do not support.
                let engine = EngineCollectives::join(context, options.communicator);
                if let Err(error) = &engine {
                    context.fault.check()?;
                    tracing::warn!(%error, "collectives that the mesh's links do not support will fail");
                }
                Ok(Paths::Both(Box::new(direct), engine))
            }
            (Err(error), None) => {
                tracing::warn!(%error, "collectives use the vendor's library");
                by_engine()
            }
            (Err(error), Some(_)) => Err(error),
            (Ok(_), Some(peer)) => Err(Error::new(
                ErrorKind::PeerFailed,
                "another rank failed to map the workspaces",
            )
            .with_operation("join the collectives")
            .with_rank(context.rank())
            .with_peer(peer)),
        }
    }

    fn machine(
        context: &RankContext,
        options: &CollectiveOptions,
        model: &HardwareModel,
        [fewest, cluster_blocks]: [usize; 2],
    ) -> Result<Machine> {
        let world = context.world();
        if options.path == Some(CollectivePath::Direct) && world > MAX_DIRECT_RANKS {
            return Err(Error::unsupported(format!(
                "{world} ranks on the direct path; expected at most {MAX_DIRECT_RANKS}"
            ))
            .with_operation("join the collectives")
            .with_help("leave the path open, or use fewer ranks"));
        }
        let least = MIN_BYTES_PER_RANK * world;
        // Every rank needs a part in each area.
        if options.workspace_bytes < least {
            return Err(Error::invalid(format!(
                "a workspace of {} bytes; expected at least {least} for {world} ranks",
                options.workspace_bytes
            ))
            .with_operation("join the collectives")
            .with_help("give the workspace more bytes"));
        }
        // One lane always synchronizes with the other ranks.
        if let Some(few @ (0 | 1)) = options.multiprocessors {
            return Err(Error::invalid(format!(
                "{few} multiprocessors; expected at least 2, one that moves data and one that synchronizes with the other ranks"
            ))
            .with_operation("join the collectives"));
        }
        let sharing = context.ranks_per_device()?;
        let all = if context.device.properties().shared {
            // Lanes run on the machine's cores, which all ranks share.
            // One more, since the lane that synchronizes mostly waits and hardly uses a core.
            fewest / world + 1
        } else {
            fewest
        };
        let multiprocessors = match options.multiprocessors {
            Some(most) => most.saturating_mul(sharing).min(all),
            None => all,
        };
        let lanes = model.lanes();
        // A fifth is for packets, half of whose bytes are data; both areas have two halves by epoch.
        Ok(Machine {
            world,
            kernels: model.link.transfer_kernels(),
            packet_bytes: pages(options.workspace_bytes / 20),
            plain_bytes: pages(options.workspace_bytes / 5 * 2),
            lined_bytes: 0,
            most_lanes: Machine::most_lanes(multiprocessors, sharing)
                // One is for the lane that synchronizes.
                .min(options.multiprocessors.map_or(usize::MAX, |most| most - 1)),
            cluster_blocks,
            most_blocks: (multiprocessors / sharing.max(1))
                .min(options.multiprocessors.unwrap_or(usize::MAX))
                .min(MAX_BLOCKS),
            rates: [lanes.stored, lanes.loaded],
            forced_lanes: options.lanes,
            forced_threads: options.threads,
            forced: options.algorithm,
            cube: None,
            estimates: Estimates::new(model)?,
        })
    }
}

/// Smallest number of multiprocessors among ranks, and smallest number of blocks of a cluster. Collective.
fn fewest_multiprocessors(context: &RankContext) -> Result<[usize; 2]> {
    let properties = context.device.properties();
    let own = [properties.multiprocessors, properties.cluster_blocks];
    let exchange = context.exchange();
    let all: Vec<[usize; 2]> = exchange.gather("count multiprocessors", Ok(&own))?;
    // The fewest of all ranks: lanes of all ranks wait for one another, so each must have space for its own.
    Ok(all.into_iter().fold(own, |least, other| {
        [least[0].min(other[0]), least[1].min(other[1])]
    }))
}

/// First rank on another machine.
fn far(context: &RankContext, world: usize) -> Result<Option<Rank>> {
    // Any rank of another machine rules out the direct path, so the first suffices.
    for peer in 0..world {
        if !context.memory.is_near(context.group.job_rank(peer)?)? {
            return Ok(Some(peer));
        }
    }
    Ok(None)
}

/// Topology of the ranks' devices, if the world may use the direct path. Collective.
fn topology(context: &RankContext, forced: Option<TopologyClass>) -> Result<Option<Topology>> {
    if !(2..=MAX_DIRECT_RANKS).contains(&context.world()) {
        return Ok(None);
    }
    let gather = |bytes: Vec<u8>| context.all_gather(&bytes);
    rendezvous(&*context.device, context.rank(), forced, gather).map(Some)
}

/// Half an area of 128-byte packets has a multiple of this many bytes of data: rows of any type of up to 4 bytes.
const LINED_BYTES: usize = 4 * ROW_ELEMENTS_OF_LINES;

/// Message workspace in bytes: a chunk should take longer than the signals between two chunks. If ranks share
/// cores, signals cost more than large chunks gain.
fn messages_bytes(workspace: usize, device: &DeviceProperties) -> usize {
    if device.shared {
        workspace / 2
    } else {
        workspace.saturating_mul(4)
    }
}

/// Rounds down to pages.
const fn pages(bytes: usize) -> usize {
    // Alignment of mappings and of vector accesses.
    bytes / 4096 * 4096
}

/// Whether memory cannot be mapped, so that another path is needed.
pub(super) fn cannot_map(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Unsupported
            | ErrorKind::Driver
            | ErrorKind::InvalidHandle
            // A peer that failed to map is reported so to the others, which cannot tell why.
            | ErrorKind::PeerFailed
    )
}
