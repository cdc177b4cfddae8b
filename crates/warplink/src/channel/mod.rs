//! One-sided channels: put, get, signal, wait and flush from inside a kernel.
//!
//! Two ranks *connect* ([`ConnectionExchange::connect`]): each names the other, a tag and a region, and
//! gets a [`Connection`]. From then on kernels of both use its [channel](Connection::channel), an argument
//! of a launch ([`Kernel::launch`](crate::device::Kernel::launch)), and no host takes part in what they
//! do. In CUDA C++ the calls are those of `warplink::Channel` in `warplink/device.cuh`; on the host device
//! a closure makes the same calls ([`BlockChannel`](crate::device::BlockChannel)).
//!
//! # What holds
//! 1. A rank waits only on its own memory: on its inbound word, which the peer counts up.
//! 2. Signals count: none is lost when a sender runs ahead, and each wait uses up one.
//! 3. What precedes a signal at one end is seen after the wait for it at the other.
//! 4. When a rank is lost, kernels that wait get the status `aborted`, and the streams that run them fail
//!    with the error that says why.
//! 5. What a proxied channel asks for is done in the order in which it asked, by the [proxy](ProxyConfig),
//!    a thread of the host.
//! 6. A connection may be dropped at any time: what kernels use is kept until the streams that they were
//!    launched into are past them, and the words are used again when both ends are gone.

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
