//! Configuration of a rank: rendezvous, device and limits.

use crate::bootstrap::JoinConfig;
use crate::channel::{ProxyConfig, StagingConfig};
use crate::device::{self, Delays, DeviceConfig, DeviceKind, Pretend};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::memory::IdleMappings;
use crate::named::{Named, alternatives, parse};
use crate::p2p::{Path, Protocol};
use crate::topology::{CLASS_VARIABLE, TopologyClass};
use crate::variables;
use std::ffi::OsString;
use std::time::Duration;

/// Default protocol of transfers.
const PROTOCOL_VARIABLE: &str = "WARPLINK_PROTOCOL";

/// How network connections access GPU memory.
const ACCESS_VARIABLE: &str = "WARPLINK_NETWORK_MEMORY";

/// Device features to treat as missing.
const PRETEND_VARIABLE: &str = "WARPLINK_PRETEND";

/// Default limit of the pool of freed regions.
const MAX_POOLED_BYTES: u64 = 1 << 30;

/// How a rank joins, and which device it uses.
#[derive(Clone, Debug)]
pub struct Config {
    /// Rendezvous, and the rank of this process.
    pub join: JoinConfig,
    /// The device.
    pub device: DeviceConfig,
    /// Default protocol of transfers; equal on every rank.
    pub protocol: Protocol,
    /// Default path of transfers; equal on every rank. If `None`, sends and receives use the copy engine,
    /// which works whatever kernels are running. Programs use kernels for lengths at which these beat the
    /// copy engine: at both ends in programs of one stream without matmuls, one-block kernels otherwise.
    /// [`Path::Fastest`] permits sends and receives to use multiprocessors too.
    pub path: Option<Path>,
    /// Default time limit of host waits.
    pub timeout: Duration,
    /// Limits of cached mappings of peers' memory that nothing uses.
    pub idle_mappings: IdleMappings,
    /// Options of the channel proxy.
    pub proxy: ProxyConfig,
    /// Default network devices of connections, comma-separated as the network library names them, such as
    /// `mlx5_0:1` or `eth0`; `None` for all.
    pub network_devices: Option<String>,
    /// Staging of network connections whose device memory the network cannot access.
    pub staging: StagingConfig,
    /// Maximum bytes of freed regions pooled for reuse.
    pub max_pooled_bytes: u64,
    /// Overrides the topology class; see [`Communicator::topology`](crate::Communicator::topology).
    pub topology: Option<TopologyClass>,
}

impl Config {
    /// Defaults: device ordinal 0, put, 60 seconds, 1 GiB pool.
    pub fn new(join: JoinConfig, kind: DeviceKind) -> Self {
        Self {
            join,
            device: DeviceConfig::new(kind, 0),
            protocol: Protocol::default(),
            path: None,
            timeout: Duration::from_secs(60),
            idle_mappings: IdleMappings::default(),
            proxy: ProxyConfig::default(),
            network_devices: None,
            staging: StagingConfig::default(),
            max_pooled_bytes: MAX_POOLED_BYTES,
            topology: None,
        }
    }

    /// Sets the default protocol of transfers.
    pub fn with_protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// Sets the default path of transfers.
    pub fn with_path(mut self, path: Path) -> Self {
        self.path = Some(path);
        self
    }

    /// Sets the default time limit of host waits.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the limits of idle mappings.
    pub fn with_idle_mappings(mut self, limits: IdleMappings) -> Self {
        self.idle_mappings = limits;
        self
    }

    /// Sets the maximum bytes of pooled regions; 0 disables the pool.
    pub fn with_max_pooled_bytes(mut self, bytes: u64) -> Self {
        self.max_pooled_bytes = bytes;
        self
    }

    /// Sets the options of the channel proxy.
    pub fn with_proxy(mut self, proxy: ProxyConfig) -> Self {
        self.proxy = proxy;
        self
    }

    /// Sets the default network devices of connections.
    pub fn with_network_devices(mut self, devices: impl Into<String>) -> Self {
        self.network_devices = Some(devices.into());
        self
    }

    /// Sets the staging options of network connections.
    pub fn with_staging(mut self, staging: StagingConfig) -> Self {
        self.staging = staging;
        self
    }

    /// Delays the host device's operations at random; see [`Delays`].
    pub fn with_delays(mut self, delays: Delays) -> Self {
        self.device.delays = Some(delays);
        self
    }

    /// Makes the device pretend to lack features; see [`Pretend`].
    pub fn with_pretend(mut self, pretend: Pretend) -> Self {
        self.device.pretend = pretend;
        self
    }

    /// Reads the environment: the rank's identity as [`JoinConfig::from_env`] does, and
    ///
    /// An empty variable counts as not set.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `WARPLINK_DEVICE` | `host` or `cuda`; default: `cuda` if a GPU is usable |
    /// | `WARPLINK_PROTOCOL` | `get` or `put`; default: `put` |
    /// | `WARPLINK_TIMEOUT` | timeout of host waits in whole seconds; default: 60 |
    /// | `WARPLINK_NETWORK_DEVICES` | network devices of connections to other machines, such as `eth0`; default: all |
    /// | `WARPLINK_NETWORK_MEMORY` | `auto`, `staged` or `direct`: whether UCX accesses GPU memory directly ([`DeviceAccess`](crate::device::network::DeviceAccess)); default: `auto` |
    /// | `WARPLINK_TOPOLOGY` | `fully-connected`, `hybrid-cube-mesh` or `unknown`: overrides the class of the topology, for tests |
    /// | `WARPLINK_PRETEND` | `no-peer-access` or `no-atomics`: disables access features between devices ([`Pretend`]), for tests |
    /// | `WARPLINK_HOST_DELAY_US` | maximum random delay before each operation of the host device, in microseconds, to expose missing waits |
    ///
    /// The GPU is the one with the local rank's ordinal, or the only one that the process sees.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(JoinConfig::from_env()?, |name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with explicit ranks, and variables looked up with `get`.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] for an invalid value, or one that is not UTF-8.
    pub fn from_variables(
        join: JoinConfig,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        // An empty variable counts as not set.
        let get = |name: &str| {
            let value = variables::text(name, get(name))?;
            Ok::<_, Error>(value.filter(|value| !value.is_empty()))
        };
        let kind = Self::kind_of(get("WARPLINK_DEVICE")?)?;
        let mut config = Self::new(join, kind);
        config.device.ordinal = match kind {
            DeviceKind::Host => 0,
            DeviceKind::Cuda => gpu_ordinal(config.join.local_rank, device::count(kind)?)?,
        };
        if let Some(protocol) = get(PROTOCOL_VARIABLE)? {
            config.protocol = variable(PROTOCOL_VARIABLE, &protocol)?;
        }
        config.network_devices = get("WARPLINK_NETWORK_DEVICES")?;
        if let Some(access) = get(ACCESS_VARIABLE)? {
            config.staging.access = variable(ACCESS_VARIABLE, &access)?;
        }
        if let Some(class) = get(CLASS_VARIABLE)? {
            config.topology = Some(variable(CLASS_VARIABLE, &class)?);
        }
        if let Some(pretend) = get(PRETEND_VARIABLE)? {
            config.device.pretend = variable(PRETEND_VARIABLE, &pretend)?;
        }
        let number = |name: &str, unit: &str| match get(name)? {
            None => Ok(None),
            Some(text) => match text.parse::<u64>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(Error::parse(format!(
                    "{name} is '{text}'; expected a whole number of {unit}"
                ))),
            },
        };
        if let Some(seconds) = number("WARPLINK_TIMEOUT", "seconds")? {
            if seconds == 0 {
                let message = "WARPLINK_TIMEOUT is 0; expected at least 1 second";
                return Err(Error::parse(message));
            }
            config.timeout = Duration::from_secs(seconds);
        }
        if let Some(max) = number("WARPLINK_HOST_DELAY_US", "microseconds")? {
            let seed = config.join.rank as u64 + 1;
            config.device.delays = Some(Delays {
                seed,
                max: Duration::from_micros(max),
            });
        }
        Ok(config)
    }

    /// The device in the environment; by default a GPU if there is one.
    pub(crate) fn device_kind() -> Result<DeviceKind> {
        Self::kind_of(variables::read("WARPLINK_DEVICE")?)
    }

    fn kind_of(name: Option<String>) -> Result<DeviceKind> {
        match name {
            Some(name) => variable("WARPLINK_DEVICE", &name),
            None => Ok(DeviceKind::detect()),
        }
    }
}

/// Parses the value of a variable.
fn variable<T: Named>(name: &str, value: &str) -> Result<T> {
    parse(value, T::ALL).map_err(|_| {
        let expected = alternatives(T::ALL);
        let message = format!("{name} is '{value}'; expected {expected}");
        Error::parse(message).with_help(format!("set {name} to one of these, or unset it"))
    })
}

/// Ordinal among the `visible` GPUs for the rank with `local_rank` on this machine.
fn gpu_ordinal(local_rank: usize, visible: usize) -> Result<usize> {
    match visible {
        0 => Err(Error::unsupported("no GPU is visible").with_help("use --device host")),
        // The launcher has already assigned each rank its own GPU.
        1 => Ok(0),
        _ if local_rank < visible => Ok(local_rank),
        _ => Err(Error::invalid(format!(
            "local rank {local_rank} has no GPU of its own among {visible}"
        ))
        .with_help("start no more ranks than there are GPUs")),
    }
}
