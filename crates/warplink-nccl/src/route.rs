//! Selection of the library that executes a communicator's calls, Warplink or the real one, the same on all ranks.

use crate::communicator::{Comm, Route, Served, lock};
use crate::operators::Multiplying;
use crate::real;
use crate::signals::SignalPairs;
use crate::streams::Streams;
use crate::watch::Watch;
use std::sync::{Arc, Mutex, OnceLock};
use warplink::collective::{CollectiveOptions, CollectivePath};
use warplink::device::AllocationKind;
use warplink::{Communicator, DeviceKind, Error, Result, variables};

/// Environment variable that routes all calls to Warplink or to the real library.
const ROUTE_VARIABLE: &str = "WARPLINK_NCCL_ROUTE";

/// Message of each rank before it joins the collectives.
#[derive(Clone, Copy)]
struct Offer {
    /// Whether the real library is to execute all calls.
    wants_real: bool,
    has_real: bool,
    multiprocessors: u32,
}

impl Offer {
    fn to_bytes(self) -> [u8; 6] {
        let [a, b, c, d] = self.multiprocessors.to_le_bytes();
        [self.wants_real.into(), self.has_real.into(), a, b, c, d]
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let &[wants_real, has_real, a, b, c, d] = bytes else {
            return None;
        };
        Some(Self {
            wants_real: wants_real != 0,
            has_real: has_real != 0,
            multiprocessors: u32::from_le_bytes([a, b, c, d]),
        })
    }
}

/// Selects the library that executes the calls. Collective: blocks until all ranks take part.
pub(crate) fn route(
    comm: &Arc<Comm>,
    communicator: &Communicator,
    multiprocessors: Option<u32>,
) -> Result<Route> {
    let on_gpu = communicator.device().kind() == DeviceKind::Cuda;
    let named = variables::read(ROUTE_VARIABLE)?.filter(|text| !text.is_empty());
    let named = match named.as_deref() {
        None => None,
        Some("warplink") => Some(false),
        Some("nccl") => Some(true),
        Some(other) => {
            return Err(Error::parse(format!(
                "{ROUTE_VARIABLE} is '{other}'; expected warplink or nccl"
            )));
        }
    };
    // Only for the sizes that Warplink may serve, since the topology costs two all-gathers.
    let obstacle = match (named, on_gpu && (2..=8).contains(&communicator.world())) {
        (None, true) => communicator
            .topology()?
            .obstacles()
            .first()
            .map(|one| one.to_string()),
        _ => None,
    };
    let wants_real = named == Some(true) || obstacle.is_some();
    let own = Offer {
        wants_real,
        // The real library is only loaded if needed.
        has_real: wants_real && real::is_there(),
        // The smallest of all ranks is taken below, so a rank without a wish offers the largest number.
        multiprocessors: multiprocessors.unwrap_or(u32::MAX),
    };
    let offers = gather(communicator, own)?;
    if offers.iter().any(|offer| offer.wants_real) {
        let all_have = offers
            .iter()
            .all(|offer| !offer.wants_real || offer.has_real);
        if all_have {
            tracing::info!(
                obstacle,
                "the real NCCL executes the calls of this communicator"
            );
            return Ok(Route::Real);
        }
        if named == Some(true) {
            return Err(real::missing("route all calls to NCCL"));
        }
        tracing::warn!(
            obstacle,
            "Warplink executes the calls, since the real NCCL was not found"
        );
    }
    let most = offers.iter().map(|offer| offer.multiprocessors).min();
    let most = most.filter(|most| *most != u32::MAX);
    let options = CollectiveOptions {
        path: Some(CollectivePath::Direct),
        multiprocessors: most.map(|most| most as usize),
        ..CollectiveOptions::default()
    };
    let served = communicator.collectives_with(&options);
    if let Err(error) = &served {
        // A communicator that has failed cannot be served by either library; only a refusal may lead to the real
        // one.
        communicator.check()?;
        tracing::info!("Warplink does not support this communicator: {error}");
    }
    let collectives = served.as_ref().ok();
    // A program may send messages at any time later, when the ranks could no longer agree on another route.
    let collectives = collectives.filter(|collectives| collectives.serves_messages());
    // Exchanged on every rank, whatever it has found: a rank that could be served cannot know that another refuses.
    let own = Offer {
        wants_real: collectives.is_none(),
        has_real: collectives.is_none() && real::is_there(),
        ..own
    };
    let offers = gather(communicator, own)?;
    match collectives {
        Some(collectives) if offers.iter().all(|offer| !offer.wants_real) => {
            // Any address of the device does; devices do not allocate zero bytes.
            let nothing = communicator.device().allocate(16, AllocationKind::Plain)?;
            Ok(Route::Warplink(Box::new(Served {
                watch: Watch::start(comm, communicator, collectives)?,
                collectives: collectives.clone(),
                streams: Streams::default(),
                nothing: nothing.slice(0..0)?,
                kept: Mutex::default(),
                multiplying: Multiplying::new(),
                signals: SignalPairs::default(),
                windows_are_real: OnceLock::new(),
            })))
        }
        // Also without the library here, if another rank refused: creating the library's communicator then
        // fails on all ranks alike.
        _ if on_gpu && (real::is_there() || collectives.is_some()) => Ok(Route::Real),
        _ => Err(match served.err() {
            Some(error) if on_gpu => real::missing(&format!("leave calls to NCCL, since {error}")),
            Some(error) => error,
            None => real::missing("leave calls to NCCL, as another rank does"),
        }),
    }
}

fn gather(communicator: &Communicator, own: Offer) -> Result<Vec<Offer>> {
    let all = communicator.all_gather_bytes(&own.to_bytes())?;
    let offers = all.iter().map(|bytes| Offer::from_bytes(bytes));
    offers.collect::<Option<_>>().ok_or_else(|| {
        Error::mismatch("another rank has another version of this library")
            .with_help("install the same version on every rank")
    })
}

impl Served {
    /// Keeps memory of captured graphs allocated until the communicator ends.
    pub(crate) fn keep(&self, region: warplink::memory::Region) {
        lock(&self.kept).push(region);
    }
}
