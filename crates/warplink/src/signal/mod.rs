//! Words that one rank sets and another waits for.
//!
//! Every end of a transfer, and of a connection, has a slot of such words in its own memory, and waits
//! on that alone: a wait is always for a word in the waiter's own memory. The peer maps the slot's page
//! and sets the inbound words in it. Which end sets which word, and when, is the protocol's
//! (`p2p/protocol.rs`, `channel/`).
//!
//! When waits are to end ([`Fault`](crate::device::Fault)), a GPU's pages are filled with a value that is
//! at least every epoch, so that streams go on, and that kernels know to be no epoch: every word of a
//! slot, its abort word too.

mod block;
mod releases;
mod scratch;
mod slots;

pub use block::{RemoteSignals, Signals};
pub(crate) use releases::{SlotDirectory, SlotPair, SlotReleases};
pub(crate) use slots::{Slot, SlotPool};

/// A word of a transfer, from one end's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SignalWord {
    /// In the own slot: set by the other end.
    Inbound,
    /// In the other end's slot: its inbound word.
    Outbound,
    /// In the own slot: set by the own stream when it has copied the bytes, for other streams here.
    /// Not in graphs.
    Completed,
}

/// An operation on a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignalOp {
    Set(SignalWord, u64),
    Reset(SignalWord),
    /// Until the word is at least the value.
    Wait(SignalWord, u64),
}
