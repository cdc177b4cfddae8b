//! A channel as kernels see it: memory, words, and the FIFO to its proxy.

mod array;
pub(crate) mod fifo;
#[cfg(all(test, loom))]
mod fifo_loom;
mod listener;
mod memory;
pub(crate) mod trigger;

pub use array::{ChannelArray, ChannelHandle};
pub use fifo::{Fifo, FifoReader};
pub use memory::ChannelMemory;
pub(crate) use memory::{ChannelParts, ProxyEnd, RegionPlace, Side, TABLE_BYTES, Windows};
pub use trigger::At;
