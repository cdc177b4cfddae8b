//! The proxies of a rank, shared by its communicators.

use crate::bootstrap::Bootstrap;
use crate::channel::proxy::{Proxy, ProxyKey};
use crate::channel::{ProxyConfig, ProxySource};
use crate::deadline::Deadline;
use crate::debug::debug_text;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// Starts each proxy on first use, stops them, and launches them again.
pub(super) struct Proxies {
    started: Arc<Mutex<Started>>,
    source: ProxySource,
}

type Started = BTreeMap<ProxyKey, Arc<Proxy>>;

impl Proxies {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        bootstrap: &Arc<Bootstrap>,
        config: ProxyConfig,
    ) -> Self {
        let started = Arc::<Mutex<Started>>::default();
        let (kept, device, joined) = (started.clone(), device.clone(), Arc::downgrade(bootstrap));
        let source = ProxySource(Arc::new(move |key| {
            // Held while starting, so that each proxy is started once.
            let mut started = lock(&kept);
            if let Some(proxy) = started.get(&key) {
                match proxy.launch() {
                    Ok(()) => return Ok(proxy.clone()),
                    // It lost requests, so its connections cannot be used any more; new ones can, with another proxy.
                    Err(error) if error.kind() == ErrorKind::Closed => {}
                    Err(error) => return Err(error),
                }
            }
            let on_failure = end_the_job(&device, &joined);
            let proxy = Proxy::start(&device, config, Box::new(on_failure))?;
            started.insert(key, proxy.clone());
            Ok(proxy)
        }));
        Self { started, source }
    }

    /// Accessor for users of the proxies.
    pub(super) fn source(&self) -> ProxySource {
        self.source.clone()
    }

    /// Launches the proxies that were stopped, as many as can be, and gives the first error.
    pub(super) fn launch(&self) -> Result<()> {
        let started = lock(&self.started);
        let launched = started.values().map(|proxy| proxy.launch());
        launched.fold(Ok(()), Result::and)
    }

    /// Stops the proxies by the same deadline, and gives the first error. Connecting waits for the end.
    pub(super) fn stop(&self, deadline: Deadline) -> Result<()> {
        let started = lock(&self.started);
        let stopped = started.values().map(|proxy| proxy.stop(deadline));
        stopped.fold(Ok(()), Result::and)
    }

    /// As [`stop`](Self::stop), for good.
    pub(super) fn close(&self, deadline: Deadline) -> Result<()> {
        let stopped = self.stop(deadline);
        // Out of the lock: releasing routes runs destructors, which may ask for a proxy.
        let started = std::mem::take(&mut *lock(&self.started));
        started.values().for_each(|proxy| proxy.release());
        stopped
    }
}

/// Ends the job when a proxy fails: peers may wait for requests that it did not send.
fn end_the_job(
    device: &Arc<dyn Device>,
    joined: &Weak<Bootstrap>,
) -> impl Fn(&Error) + Send + Sync + 'static {
    let (device, joined) = (device.clone(), joined.clone());
    move |error| {
        if let Some(bootstrap) = joined.upgrade() {
            // Before the fault, so that peers learn the reason and not just of streams that ended.
            bootstrap.abort(&format!("its proxy failed: {error}"));
        }
        device.fault().raise(error.clone());
    }
}

debug_text!(Proxies, |it| "Proxies({:?})", it.started);
