//! One-sided channels: put, get, signal, wait and flush from inside a kernel.
//!
//! Two ranks *connect* ([`ConnectionExchange::connect`]): each names the other, a tag and a region, and gets a
//! [`Connection`]. From then on kernels of both use its [channel](Connection::channel), an argument of a launch
//! ([`Kernel::launch`](crate::device::Kernel::launch)), without involving a host. In CUDA C++ the calls are those of
//! `warplink::Channel` in `warplink/device.cuh`; on the host device a closure makes the same calls
//! ([`BlockChannel`](crate::device::BlockChannel)).
//!
//! # Guarantees
//! 1. A rank waits only on its own memory: on its inbound word, which the peer increments.
//! 2. Signals count: none is lost when a sender runs ahead, and each wait consumes one.
//! 3. Accesses before a signal at one end are visible after the matching wait at the other.
//! 4. When a rank is lost, waiting kernels get the status `aborted`, and their streams fail with the error that
//!    explains the loss.
//! 5. Requests of a proxied channel are served in order, by the [proxy](ProxyConfig), a thread of the host.
//! 6. A connection may be dropped at any time: resources of kernels are kept until the streams that they were
//!    launched into have passed them, and the words are reused once both ends are dropped.

mod answers;
mod connection;
mod exchange;
pub(crate) mod proxy;
mod request;
mod tables;

pub use crate::transport::{NetworkPath, StagingConfig};
pub use connection::{Connection, Connections};
pub use exchange::ConnectionExchange;
pub(crate) use exchange::ProxySource;
pub use proxy::ProxyConfig;
pub use request::{ConnectionRequest, Transport};
