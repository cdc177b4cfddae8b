//! Joining a job, and the id of its rendezvous.

use crate::communicator::{Communicator, joined};
use crate::errors::{closed, raise};
use crate::owner::Detached;
use crate::region::seconds;
use crate::wait::{interruptible, within};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use warplink::bootstrap::{HeldPort, JoinConfig, Rendezvous};
use warplink::{Config, DeviceKind, Error};

/// Rendezvous of the ranks of a job: the address of the store and the secret that authenticates ranks.
///
/// A process that holds it can join: treat it as a password. `str(id)` is its 256 hexadecimal digits, to be passed to
/// `Job.join` on every rank; `repr(id)` omits the secret.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct UniqueId {
    id: warplink::bootstrap::UniqueId,
    /// The reserved port, once it was released.
    held: Mutex<Option<HeldPort>>,
}

impl From<warplink::bootstrap::UniqueId> for UniqueId {
    fn from(id: warplink::bootstrap::UniqueId) -> Self {
        let held = Mutex::default();
        Self { id, held }
    }
}

#[pymethods]
impl UniqueId {
    /// An id with a fresh secret, for a store at `ip` and `port`, served by rank 0. With port 0 the system picks a free
    /// port, which this process reserves until one of its ranks joins; that rank then serves the store. If no rank of
    /// this process will join, call `release`.
    #[staticmethod]
    #[pyo3(signature = (ip="127.0.0.1", port=0))]
    fn create(ip: &str, port: u16) -> PyResult<Self> {
        let address: IpAddr = ip.parse().map_err(|_| {
            raise(Error::parse(format!(
                "'{ip}' is not an IP address; expected one of this machine"
            )))
        })?;
        let id = warplink::bootstrap::UniqueId::create(address, port).map_err(raise)?;
        Ok(id.into())
    }

    /// The id in its 128 bytes. Raises InvalidHandleError where they are truncated or altered.
    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        let id = warplink::bootstrap::UniqueId::from_bytes(data).map_err(raise)?;
        Ok(id.into())
    }

    /// The id's 128 bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.id.to_bytes())
    }

    /// Stops listening on the port that `create` reserved in this process, so that rank 0 in another process can listen
    /// on it. The system does not assign the port to others as long as this object exists.
    fn release(&self) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // A second call has nothing to release.
        held.get_or_insert_with(|| self.id.release());
    }

    /// The initial address of the store, as `ip:port`.
    #[getter]
    fn address(&self) -> String {
        self.id.address().to_string()
    }

    fn __str__(&self) -> String {
        self.id.to_string()
    }

    fn __repr__(&self) -> String {
        format!("UniqueId(address='{}')", self.id.address())
    }
}

/// This process's membership in a job: one connection to the store, one device, one memory service.
///
/// Leave with `close()`, or use it in a `with` statement, which closes it, or aborts it with the exception's text.
/// Peers treat a job that is dropped without being closed as lost.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Job {
    job: Detached<warplink::Job>,
    ordinal: i32,
}

impl Job {
    fn start(py: Python<'_>, config: &Config) -> PyResult<Self> {
        let given = config.clone();
        let job = interruptible(py, move || warplink::Job::join(&given))?;
        Ok(Self {
            job: Detached::new(job, || closed("job")),
            ordinal: config.device.ordinal as i32,
        })
    }
}

#[pymethods]
impl Job {
    /// Joins as `rank` of `world`. Blocks until all ranks have joined, without the interpreter's lock.
    ///
    /// `rendezvous` is a unique id (its text or the object) or `ip:port`; with the latter, `secret` authenticates ranks
    /// and is optional only for a loopback address; None selects WARPLINK_SECRET. `device` is "host" or "cuda"; None
    /// selects WARPLINK_DEVICE if set, else a GPU if there is one. `ordinal` is the index of the GPU among those
    /// visible to the process; None selects that of the local rank. `local_rank` defaults to `rank`. `timeout` limits
    /// joining and every wait on the host, in seconds; None selects WARPLINK_TIMEOUT if set, else 60. `protocol` is
    /// "get" or "put"; None selects WARPLINK_PROTOCOL if set, else "put". `path` is the default of transfers without
    /// one: "multiprocessors", "one-block", "copy-engine", which needs no multiprocessor, or "fastest", which assumes
    /// that multiprocessors are free; None selects the copy engine for sends and receives.
    ///
    /// Raises TimeoutError if not all ranks join, AuthenticationError if secrets differ, MismatchError if ranks
    /// disagree on the world or the device, LibraryMissingError without a driver.
    #[staticmethod]
    #[pyo3(signature = (rank, world, rendezvous, *, device=None, ordinal=None, local_rank=None, timeout=None, secret=None, protocol=None, path=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn join(
        py: Python<'_>,
        rank: usize,
        world: usize,
        rendezvous: &Bound<'_, PyAny>,
        device: Option<String>,
        ordinal: Option<usize>,
        local_rank: Option<usize>,
        timeout: Option<f64>,
        secret: Option<String>,
        protocol: Option<&str>,
        path: Option<&str>,
    ) -> PyResult<Self> {
        // `str()` of a UniqueId is its digits, which parse as an id, so that both forms share one path.
        let text = rendezvous.str()?.to_string();
        let meeting: Rendezvous = text.parse().map_err(raise)?;
        let local_rank = local_rank.unwrap_or(rank);
        let given = |name: &str| match name {
            "WARPLINK_RANK" => Some(rank.to_string().into()),
            "WARPLINK_WORLD" => Some(world.to_string().into()),
            // The GPU defaults to that of the local rank.
            "WARPLINK_LOCAL_RANK" => Some(ordinal.unwrap_or(local_rank).to_string().into()),
            "WARPLINK_ADDRESS" => Some(meeting.address().to_string().into()),
            // WARPLINK_ID would take precedence over the address passed as an argument.
            "WARPLINK_ID" => None,
            "WARPLINK_SECRET" if secret.is_some() => secret.clone().map(Into::into),
            "WARPLINK_DEVICE" if device.is_some() => device.clone().map(Into::into),
            _ => std::env::var_os(name),
        };
        // By way of variables, so that defaults and checks are the same as for `from_env`.
        let mut join = JoinConfig::from_variables(given).map_err(raise)?;
        // The variables carried the address only; an id also has the secret.
        join.rendezvous = meeting.clone();
        if let Some(device) = &device {
            // Parsed here so that an error refers to the argument instead of the variable.
            device.parse::<DeviceKind>().map_err(raise)?;
        }
        let mut config = Config::from_variables(join, given).map_err(raise)?;
        if let Some(limit) = timeout.map(seconds).transpose()? {
            config.join.timeout = limit;
            config = config.with_timeout(limit);
        }
        // Restored: WARPLINK_LOCAL_RANK above carried the ordinal for the choice of GPU.
        config.join.local_rank = local_rank;
        if let Some(ordinal) = ordinal {
            config.device.ordinal = ordinal;
        }
        if let Some(protocol) = protocol {
            config.protocol = protocol.parse().map_err(raise)?;
        }
        if let Some(path) = path {
            config.path = Some(path.parse().map_err(raise)?);
        }
        Self::start(py, &config)
    }

    /// Joins as configured by the launcher's variables (warplink launch, torchrun, Open MPI, Slurm) and
    /// WARPLINK_DEVICE, WARPLINK_PROTOCOL, WARPLINK_TIMEOUT. Blocks until all ranks have joined. If a variable is
    /// missing, raises InvalidArgumentError, which lists the variables that were checked.
    #[staticmethod]
    fn from_env(py: Python<'_>) -> PyResult<Self> {
        let config = Config::from_env().map_err(raise)?;
        Self::start(py, &config)
    }

    /// The communicator of all ranks, the same one on every call.
    fn world(&self) -> PyResult<Communicator> {
        Ok(joined(self.job.get()?.world(), self.ordinal))
    }

    /// This process's rank.
    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.job.get()?.rank())
    }

    /// The number of ranks.
    #[getter]
    fn size(&self) -> PyResult<usize> {
        Ok(self.job.get()?.world().world())
    }

    /// The device, "host" or "cuda".
    #[getter]
    fn device(&self) -> PyResult<String> {
        Ok(self.job.get()?.device().kind().to_string())
    }

    /// Leaves in an orderly manner. Blocks until every rank has, or for `limit` seconds: returns False if leaving
    /// continues in the background after that. A second call does nothing. Raises TimeoutError if streams still wait
    /// for peers, PeerLostError if a peer does not close.
    #[pyo3(signature = (limit=None))]
    fn close(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<bool> {
        let limit = limit.map(seconds).transpose()?;
        match (self.job.take(), limit) {
            // Closing twice is no error, as for Python's files; `__exit__` may follow an explicit close.
            (None, _) => Ok(true),
            (Some(job), None) => interruptible(py, || job.close()).map(|()| true),
            (Some(job), Some(limit)) => Ok(within(py, limit, || job.close())?.is_some()),
        }
    }

    /// Leaves with a failure: the peers' waits end with PeerLostError, which contains `reason`. Blocks for about two
    /// seconds at most. Does nothing after `close`.
    fn abort(&self, py: Python<'_>, reason: &str) {
        if let Some(job) = self.job.take() {
            py.detach(|| {
                job.abort(reason);
                // Here, since the drop may take long, and outside it would hold the interpreter's lock.
                drop(job);
            });
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Leaves as `close` does; after an exception as `abort` does, with the exception as the reason.
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if value.is_none() {
            return self.close(py, None).map(drop);
        }
        // With its type: the text of some exceptions is a bare number or name.
        let reason = value.repr()?.to_string();
        // Aborted, since closing blocks until every rank has closed, and peers may be waiting for this one.
        self.abort(py, &reason);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let shown = self
            .job
            .with(|job| format!("Job(rank={}, size={})", job.rank(), job.world().world()));
        shown.unwrap_or_else(|| "Job(closed)".to_owned())
    }
}
