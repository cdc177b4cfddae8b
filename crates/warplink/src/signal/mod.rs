//! Signals: words that one rank sets and another waits for.
//!
//! Each end of a transfer or connection has a slot of such words in its own memory, and waits only there. The
//! peer maps the slot's page and sets the inbound words. Which end sets which word, and when, is defined by
//! the protocols (`p2p/protocol.rs`, `channel/`).
//!
//! To abort waits ([`Fault`](crate::device::Fault)), a GPU's pages are overwritten, abort words included,
//! with a value greater than every epoch, which releases streams, and which kernels recognize as invalid.

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
    /// In the own slot; set by the peer.
    Inbound,
    /// The peer's inbound word.
    Outbound,
    /// In the own slot; set by the own stream after the copy, for other streams of this rank. Not used in
    /// graphs.
    Completed,
}

/// An operation on a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignalOp {
    Set(SignalWord, u64),
    Reset(SignalWord),
    /// Wait until the word is at least the value.
    Wait(SignalWord, u64),
}
