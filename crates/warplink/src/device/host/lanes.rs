//! Runs the lanes of a launch: by turns, on as few threads as there are processors for the ranks of a machine.
//!
//! A lane that waits lets the others of its thread go on. When all of them wait, the thread looks for a moment whether
//! its rank's doorbell rings, which everybody does who brings something, and then sleeps on that. So a rank that
//! waits leaves its processor to the rank that it waits for, and none wakes without a reason.

use super::doorbell::{self, BellWords, Doorbell};
use super::kernel::{Block, together};
use super::operation;
use super::signals;
use crate::device::{Argument, HostLanes, LaneFuture, Launch};
use crate::error::Result;
use std::task::{Context, Poll, Waker};

/// How threads run the lanes of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    threads: usize,
    looks: u32,
}

impl Share {
    /// Of one of `ranks` ranks on a machine with so many processors.
    pub(super) fn of(processors: usize, ranks: usize) -> Self {
        Self {
            threads: (processors / ranks.max(1)).max(1),
            looks: doorbell::looks(processors, ranks),
        }
    }
}

/// Runs all lanes, and gives the error of the first that failed.
pub(super) fn run(
    lanes: &dyn HostLanes,
    share: Share,
    launch: Launch,
    arguments: &[Argument],
    context: &operation::Context,
) -> Result<()> {
    // Where tests ask for delays, each lane has a thread of its own, whose operations mix with those of the others in
    // any order.
    let threads = match context.delays {
        Some(_) => launch.blocks as usize,
        None => share.threads.min(launch.blocks as usize),
    };
    let bell = &signals::doorbell(arguments)?;
    together(threads, |thread| {
        let blocks = (thread..launch.blocks as usize).step_by(threads.max(1));
        let blocks =
            blocks.map(|index| Block::new(index as u32, launch, arguments, context.for_block()));
        let blocks: Vec<Block<'_>> = blocks.collect();
        move || by_turns(lanes, &blocks, bell, share.looks)
    })
}

/// Polls the lanes of `blocks` in turn until all have ended.
fn by_turns(
    lanes: &dyn HostLanes,
    blocks: &[Block<'_>],
    bell: &Doorbell,
    looks: u32,
) -> Result<()> {
    let mut outcome = Ok(());
    let mut running: Vec<LaneFuture<'_>> = blocks.iter().map(|block| lanes.run(block)).collect();
    let mut context = Context::from_waker(Waker::noop());
    loop {
        // Before the lanes look: so none misses what comes later.
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
        if running.is_empty() {
            return outcome;
        }
        doorbell::rest(bell, seen, looks);
    }
}
