//! Cooperative scheduler for the lanes of a launch, on as many threads as there are cores for the machine's
//! ranks.
//!
//! A waiting lane yields to the others of its thread. When all wait, the thread polls its rank's doorbell
//! briefly and then sleeps on it; every packet and signal for the rank rings it. A waiting rank thus leaves
//! its core to the rank that it waits for, and wakes only for a reason.

use super::doorbell::{self, BellWords, Doorbell};
use super::kernel::{Block, together};
use super::operation;
use crate::device::{Argument, HostLanes, LaneFuture, Launch};
use crate::error::Result;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// Threads and polling for the lanes of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    threads: usize,
    looks: u32,
}

impl Share {
    /// For one of `ranks` ranks on a machine with `processors` cores.
    pub(super) fn of(processors: usize, ranks: usize) -> Self {
        Self {
            // All ranks of the machine run lanes at the same time, and share its processors.
            threads: (processors / ranks.max(1)).max(1),
            looks: doorbell::looks(processors, ranks),
        }
    }
}

/// Runs all lanes, and returns the error of the first that failed. Others end at their next wait, which may be for that one.
pub(super) fn run(
    lanes: &dyn HostLanes,
    share: Share,
    launch: Launch,
    arguments: &[Argument],
    context: &operation::Context,
) -> Result<()> {
    // With delays, each lane has its own thread, so that operations of lanes interleave arbitrarily.
    let threads = match context.delays {
        Some(_) => launch.blocks as usize,
        None => share.threads.min(launch.blocks as usize),
    };
    let bell = &doorbell::of_lanes(arguments)?;
    let failed = &AtomicBool::new(false);
    together(threads, |thread| {
        let blocks = (thread..launch.blocks as usize).step_by(threads.max(1));
        let blocks =
            blocks.map(|index| Block::new(index as u32, launch, arguments, context.for_block()));
        let blocks: Vec<Block<'_>> = blocks.collect();
        move || by_turns(lanes, &blocks, failed, (bell, share.looks))
    })
}

/// Polls the lanes of `blocks` round-robin until all are done, or any lane of the launch has `failed`.
fn by_turns(
    lanes: &dyn HostLanes,
    blocks: &[Block<'_>],
    failed: &AtomicBool,
    (bell, looks): (&Doorbell, u32),
) -> Result<()> {
    let mut outcome = Ok(());
    let mut running: Vec<LaneFuture<'_>> = blocks.iter().map(|block| lanes.run(block)).collect();
    let mut context = Context::from_waker(Waker::noop());
    loop {
        // Read before polling the lanes, so that events during the poll are not missed.
        let seen = bell.count();
        running.retain_mut(|lane| match lane.as_mut().poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(ended) => {
                if outcome.is_ok() {
                    outcome = ended;
                }
                false
            }
        });
        // Relaxed: it publishes nothing. It does not ring: a sleeper sees it after its nap.
        failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
        if running.is_empty() || failed.load(Ordering::Relaxed) {
            return outcome;
        }
        doorbell::rest(bell, seen, looks);
    }
}
