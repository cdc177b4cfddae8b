//! Send and receive between two ranks, matched by tag, in stream order and without intermediate copies.
//!
//! Two ranks first *exchange* the two ends of a transfer ([`TransferExchange::exchange`]), which returns a
//! [`Transfer`] on each. They then *post* it and *wait* for it on their streams any number of times, without any host
//! waiting for another rank:
//!
//! | | get | put |
//! |---|---|---|
//! | post send | signals that the buffer may be read | waits until it may write, copies, signals completion |
//! | post receive | waits until it may read, copies, signals completion | signals that the buffer may be written |
//! | wait send | waits until it was read | nothing, on the stream of the post |
//! | wait receive | nothing, on the stream of the post | waits until it was written |
//!
//! After *wait send* the buffer may change; after *wait receive* it holds the data. Everything in the table happens
//! in stream order and can be captured into a graph. The n-th post of one end matches the n-th post of the other.
//!
//! The protocols are those of nvFuser's CUDA IPC backend (pull requests 3910 and 5325), with counting signals instead
//! of two-state semaphores.

mod batch;
mod end;
mod exchange;
mod packets;
mod path;
mod progress;
mod protocol;
mod recording;
mod request;
mod stream_barrier;
mod transfer;

pub(crate) use batch::post_stores_in_launch;
pub use batch::{Batch, post_all, post_stores, wait_all};
pub use exchange::TransferExchange;
pub use path::{Path, TransferKernels};
pub use protocol::Protocol;
pub(crate) use recording::next_launch;
pub use request::{Direction, TransferRequest};
pub use stream_barrier::StreamBarrier;
pub use transfer::Transfer;
