//! When a receive by packets is unpacked, and behind what.
//!
//! Nobody writes the receiver's buffer before its own kernel unpacks the packets. So a post only notes where
//! in its stream the buffer is free, and the first wait after it unpacks; waits on other streams follow
//! that one. A sender gets two posts ahead of what was unpacked, and a receive may be posted as often before
//! it is waited for.

use super::recording::GraphMark;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sync::{Mutex, MutexGuard, guard};
use std::sync::Arc;

/// How often a receive may be posted without a wait: so often, a sender does not wait for it.
const MAX_AHEAD: u64 = 2;

/// The receives of one end that are still to be unpacked, and the marks that order streams.
#[derive(Debug)]
pub(super) struct Unpacking {
    turns: Mutex<Turns>,
    /// Behind the last post, outside of graphs.
    pub(super) posted: GraphMark,
    /// Behind the last unpacking in a graph.
    pub(super) unpacked: GraphMark,
}

impl Unpacking {
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            turns: Mutex::default(),
            posted: GraphMark::new(device),
            unpacked: GraphMark::new(device),
        }
    }

    /// Fails where another post outside of graphs would be one too many before a wait: behind `more` that are
    /// not noted yet, and before these a wait if `waited`.
    pub(super) fn check(&self, more: u64, waited: bool) -> Result<()> {
        let turns = self.turns();
        let noted = if waited {
            0
        } else {
            turns.posted - turns.unpacked
        };
        if noted + more < MAX_AHEAD {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the receive by packets is posted {} times without a wait between; expected at most {MAX_AHEAD}",
            MAX_AHEAD + 1
        ))
        .with_operation("post a transfer")
        .with_help("wait for it first, exchange a second transfer, or use the path copy-engine"))
    }

    /// Held while a wait is enqueued, so that another on another stream follows what this enqueues.
    pub(super) fn turns(&self) -> MutexGuard<'_, Turns> {
        guard(&self.turns)
    }
}

/// Which posts were unpacked, and on which stream.
#[derive(Debug, Default)]
pub(super) struct Turns {
    posted: u64,
    unpacked: u64,
    posted_on: u64,
    unpacked_on: u64,
    /// The last one in a graph: the graph, the number of the post in it, and the stream.
    in_graph: Option<(u64, u64, u64)>,
}

/// Action of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nothing,
    /// So many posts are unpacked, on this stream; it has to follow the last of them first, or is its stream.
    Unpack {
        times: u64,
        follows: bool,
    },
    /// So many posts were unpacked on another stream.
    Follow(u64),
}

impl Turns {
    /// Numbers a post outside of graphs, on `stream`.
    pub(super) fn post(&mut self, stream: u64) -> u64 {
        self.posted += 1;
        self.posted_on = stream;
        self.posted
    }

    /// Action of a wait on `stream` outside of graphs.
    pub(super) fn wait(&mut self, stream: u64) -> Turn {
        let times = self.posted - self.unpacked;
        if times > 0 {
            (self.unpacked, self.unpacked_on) = (self.posted, stream);
            return Turn::Unpack {
                times,
                follows: self.posted_on != stream,
            };
        }
        if self.unpacked == 0 || self.unpacked_on == stream {
            return Turn::Nothing;
        }
        Turn::Follow(self.unpacked)
    }

    /// Action of a wait on `stream` for post `number` in the graph `capture`; `follows` states whether the post
    /// is on another stream.
    pub(super) fn wait_in_graph(
        &mut self,
        (capture, number): (u64, u64),
        stream: u64,
        follows: bool,
    ) -> Turn {
        match self.in_graph {
            Some(last) if last == (capture, number, stream) => Turn::Nothing,
            Some((graph, last, _)) if (graph, last) == (capture, number) => Turn::Follow(number),
            _ => {
                self.in_graph = Some((capture, number, stream));
                Turn::Unpack { times: 1, follows }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_wait_unpacks_and_others_follow_it() {
        let mut turns = Turns::default();
        assert_eq!(turns.wait(1), Turn::Nothing);
        assert_eq!(turns.post(1), 1);
        let unpack = |times, follows| Turn::Unpack { times, follows };
        assert_eq!(turns.wait(1), unpack(1, false));
        assert_eq!(turns.wait(1), Turn::Nothing);
        assert_eq!(turns.wait(2), Turn::Follow(1));
        assert_eq!([turns.post(1), turns.post(1)], [2, 3]);
        assert_eq!(turns.wait(2), unpack(2, true));
        assert_eq!(turns.wait(1), Turn::Follow(3));
    }

    #[test]
    fn each_post_in_a_graph_is_unpacked_once() {
        let mut turns = Turns::default();
        let unpack = |follows| Turn::Unpack { times: 1, follows };
        assert_eq!(turns.wait_in_graph((7, 1), 1, false), unpack(false));
        assert_eq!(turns.wait_in_graph((7, 1), 2, true), Turn::Follow(1));
        assert_eq!(turns.wait_in_graph((7, 1), 1, false), Turn::Nothing);
        assert_eq!(turns.wait_in_graph((7, 2), 2, true), unpack(true));
        assert_eq!(turns.wait_in_graph((8, 1), 2, false), unpack(false));
    }
}
