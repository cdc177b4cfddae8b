//! The vendor's collectives, as a peer to compare with and to hand over to.

use super::{DeviceSlice, Stream};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use std::fmt;

/// Gathers one byte string from every rank, in rank order.
pub type UniqueBytesExchange<'a> = &'a mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>;

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// Collectives of all ranks, enqueued on a stream. Every rank calls the same ones in the same
/// order with fitting lengths.
pub trait CollectiveEngine: Send + Sync + fmt::Debug {
    /// Name and version, for tables.
    fn describe(&self) -> String;

    /// `target` (world × `source`) becomes every rank's `source`, in rank order.
    fn all_gather(&self, stream: &Stream, target: &DeviceSlice, source: &DeviceSlice)
    -> Result<()>;

    /// `target` becomes the reduction of every rank's `source`, on every rank.
    fn all_reduce(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()>;

    /// `target` becomes this rank's part of the reduction of every rank's `source` (world × `target`).
    fn reduce_scatter(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()>;

    /// `target` becomes the `source` of rank `root`.
    fn broadcast(
        &self,
        stream: &Stream,
        root: Rank,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()>;

    /// On rank `root`, `target` becomes the reduction of every rank's `source`.
    fn reduce(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        root: Rank,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()>;

    /// Part p of `target` becomes this rank's part of rank p's `source`.
    fn all_to_all(&self, stream: &Stream, target: &DeviceSlice, source: &DeviceSlice)
    -> Result<()>;

    /// Sends and receives, all at once: none waits for another of the same call.
    fn exchange(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceSlice)],
        receives: &[(Rank, DeviceSlice)],
    ) -> Result<()>;

    /// Ends what is under way, so that a lost peer does not hold this rank.
    fn abort(&self);
}
