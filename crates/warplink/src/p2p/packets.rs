//! Deferred unpacking of receives by packets, and the order of streams around it.
//!
//! Nobody writes the receiver's buffer before its own kernel unpacks the packets. A post therefore only records the
//! position in its stream from which the buffer is free, and the first wait after it unpacks; waits on other streams
//! follow that one. A sender may be two posts ahead of the unpacking, and a receive may be posted as often before it
//! is waited for.

use super::recording::GraphMark;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sync::{Mutex, MutexGuard, guard};
use std::sync::Arc;

/// Maximum posts of a receive without a wait. Up to this number, a sender does not wait for the receiver.
const MAX_AHEAD: u64 = 2;

/// Receives of one end that are not unpacked yet, and the marks that order streams.
#[derive(Debug)]
pub(super) struct Unpacking {
    turns: Mutex<Turns>,
    /// After the last post outside of graphs.
    pub(super) posted: GraphMark,
    /// After the last unpack in a graph.
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

    /// Fails if another post outside of graphs would exceed the maximum without a wait, given `more` posts that are
    /// not recorded yet, with a wait before these if `waited`.
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

    /// Held while a wait is enqueued, so that a wait on another stream follows its operations.
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
    /// The last unpack in a graph: the graph, the number of the post in it, and the stream.
    in_graph: Option<(u64, u64, u64)>,
}

/// Action of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nothing,
    /// This stream unpacks so many posts; unless it is the stream of the last one, it has to follow that first.
    Unpack {
        times: u64,
        follows: bool,
    },
    /// Another stream unpacked so many posts.
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
            // The caller holds the lock until the unpacks are enqueued, so nobody follows a stream that has not got
            // them yet.
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

    /// Action of a wait on `stream` for post `number` in the graph `capture`; `follows` if the post is on another
    /// stream.
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
