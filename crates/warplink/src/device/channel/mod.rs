//! What kernels know of a channel: its memory, its words, and the FIFO of its proxy.

mod array;
#[allow(dead_code)] // Its reader is the proxy.
pub(crate) mod fifo;
mod memory;
#[allow(dead_code)] // As above.
pub(crate) mod trigger;

pub use array::{ChannelArray, ChannelHandle};
pub use memory::ChannelMemory;
pub(crate) use memory::{ChannelParts, ProxyEnd, Side, TABLE_BYTES, Windows};
pub use trigger::At;
