//! The proxy of a rank, shared by its communicators.

use crate::bootstrap::Bootstrap;
use crate::channel::proxy::Proxy;
use crate::channel::{ProxyConfig, ProxySource};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::Result;
use crate::sync::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Starts the proxy on first use, and stops it.
pub(super) struct Proxies {
    running: Arc<Mutex<Option<Arc<Proxy>>>>,
    source: ProxySource,
}

impl Proxies {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        bootstrap: &Arc<Bootstrap>,
        config: ProxyConfig,
    ) -> Self {
        let running = Arc::<Mutex<Option<Arc<Proxy>>>>::default();
        let (kept, device, joined) = (running.clone(), device.clone(), Arc::downgrade(bootstrap));
        let source = ProxySource(Arc::new(move || {
            let mut running = lock(&kept);
            if let Some(proxy) = running.as_ref().filter(|proxy| !proxy.is_stopping()) {
                return Ok(proxy.clone());
            }
            let (faulted, left) = (device.clone(), joined.clone());
            let proxy = Proxy::start(
                &device,
                config,
                // Peers may wait for requests that it did not send, so this rank has failed.
                Box::new(move |error| {
                    if let Some(bootstrap) = left.upgrade() {
                        bootstrap.abort(&format!("its proxy failed: {error}"));
                    }
                    faulted.fault().raise(error.clone());
                }),
            )?;
            Ok(running.insert(proxy).clone())
        }));
        Self { running, source }
    }

    /// Accessor for users of the proxy.
    pub(super) fn source(&self) -> ProxySource {
        self.source.clone()
    }

    /// Stops the proxy, if running.
    pub(super) fn stop(&self, deadline: Deadline) -> Result<()> {
        let proxy = lock(&self.running).take();
        proxy.map_or(Ok(()), |proxy| proxy.stop(deadline))
    }
}

impl fmt::Debug for Proxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Proxies").field(&self.running).finish()
    }
}
