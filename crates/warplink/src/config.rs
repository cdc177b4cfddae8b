//! What a rank is told when it joins: where the ranks meet, the device, and the limits.

use crate::bootstrap::JoinConfig;
use crate::channel::{ProxyConfig, StagingConfig};
use crate::device::network::DeviceAccess;
use crate::device::{self, Delays, DeviceConfig, DeviceKind, Pretend};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::IdleMappings;
use crate::p2p::{Path, Protocol};
use crate::topology::{CLASS_VARIABLE, TopologyClass};
use crate::variables;
use std::ffi::OsString;
use std::str::FromStr;
use std::time::Duration;

/// Names the protocol of transfers that do not choose one.
const PROTOCOL_VARIABLE: &str = "WARPLINK_PROTOCOL";

/// Names how connections over the network move memory of GPUs.
const ACCESS_VARIABLE: &str = "WARPLINK_NETWORK_MEMORY";

/// Names what the device does without.
const PRETEND_VARIABLE: &str = "WARPLINK_PRETEND";

/// Bytes of freed regions that are kept for later ones, unless configured otherwise.
const MAX_POOLED_BYTES: u64 = 1 << 30;

/// How a rank joins the others and which device it uses.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the ranks meet, and which of them this is.
    pub join: JoinConfig,
    /// The device.
    pub device: DeviceConfig,
    /// The protocol of transfers that do not choose one; the same on every rank.
    pub protocol: Protocol,
    /// The path of transfers that do not choose one; the same on every rank. Without one, sends and receives
    /// use the copy engine, which works whatever kernels run. Programs use kernels up to the length from which the copy
    /// engine is faster: at both ends in programs of one stream without matmuls, and of one block in others.
    /// [`Path::Fastest`] says that multiprocessors are free for sends and receives too.
    pub path: Option<Path>,
    /// Limit of every wait on the host that is not given its own deadline.
    pub timeout: Duration,
    /// Limits of the mappings of peers' memory that are kept though nothing uses them.
    pub idle_mappings: IdleMappings,
    /// How the proxy of channels works.
    pub proxy: ProxyConfig,
    /// The network devices of connections that name none, as the network's library names them and separated
    /// by commas, such as `mlx5_0:1` or `eth0`; all of them if not given.
    pub network_devices: Option<String>,
    /// How connections go over a network that does not reach the device's memory.
    pub staging: StagingConfig,
    /// Most bytes of freed regions that are kept for later ones.
    pub max_pooled_bytes: u64,
    /// The class of the topology, whatever the devices' links are; see
    /// [`Communicator::topology`](crate::Communicator::topology).
    pub topology: Option<TopologyClass>,
}

impl Config {
    /// The device's first ordinal, put, 60 seconds, and 1 GiB of freed memory kept.
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

    /// Sets the protocol of transfers that do not choose one.
    pub fn with_protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// Sets the path of transfers that do not choose one.
    pub fn with_path(mut self, path: Path) -> Self {
        self.path = Some(path);
        self
    }

    /// Sets the limit of every wait on the host that is not given its own deadline.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the limits of the mappings of peers' memory that are kept though nothing uses them.
    pub fn with_idle_mappings(mut self, limits: IdleMappings) -> Self {
        self.idle_mappings = limits;
        self
    }

    /// Sets how many bytes of freed regions are kept for later ones; with 0, all are freed at once.
    pub fn with_max_pooled_bytes(mut self, bytes: u64) -> Self {
        self.max_pooled_bytes = bytes;
        self
    }

    /// Sets how the proxy of channels works.
    pub fn with_proxy(mut self, proxy: ProxyConfig) -> Self {
        self.proxy = proxy;
        self
    }

    /// Sets the network devices of connections that name none.
    pub fn with_network_devices(mut self, devices: impl Into<String>) -> Self {
        self.network_devices = Some(devices.into());
        self
    }

    /// Sets how connections go over a network that does not reach the device's memory.
    pub fn with_staging(mut self, staging: StagingConfig) -> Self {
        self.staging = staging;
        self
    }

    /// Delays the host device's operations at random; see [`Delays`].
    pub fn with_delays(mut self, delays: Delays) -> Self {
        self.device.delays = Some(delays);
        self
    }

    /// Has the device do without what `pretend` says, as if the machine lacked it.
    pub fn with_pretend(mut self, pretend: Pretend) -> Self {
        self.device.pretend = pretend;
        self
    }

    /// Reads the environment: who this is as [`JoinConfig::from_env`] says, and
    ///
    /// An empty variable counts as not set.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `WARPLINK_DEVICE` | `host` or `cuda`; a GPU where there is one |
    /// | `WARPLINK_PROTOCOL` | `get` or `put`; put |
    /// | `WARPLINK_TIMEOUT` | limit of waits on the host, in seconds; 60 |
    /// | `WARPLINK_NETWORK_DEVICES` | network devices of connections to other machines, such as `eth0`; all |
    /// | `WARPLINK_NETWORK_MEMORY` | `auto`, `staged` or `direct`: whether the network's library moves memory of GPUs by itself ([`DeviceAccess`]); `auto` |
    /// | `WARPLINK_TOPOLOGY` | `fully-connected`, `hybrid-cube-mesh` or `unknown`, whatever the devices' links are; for tests |
    /// | `WARPLINK_PRETEND` | `no-peer-access` or `no-atomics`: what the device does without ([`Pretend`]), on any rank; for tests |
    /// | `WARPLINK_HOST_DELAY_US` | largest random delay, in microseconds, before every operation of the host device, to bring out missing waits |
    ///
    /// The GPU is the one with the local rank's ordinal, or the only one that the process sees.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(JoinConfig::from_env()?, |name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with the ranks given and the variables looked up by `get`.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] for a value that is not as it should be, or not UTF-8.
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
            config.protocol = variable(PROTOCOL_VARIABLE, &protocol, "get or put")?;
        }
        config.network_devices = get("WARPLINK_NETWORK_DEVICES")?;
        if let Some(access) = get(ACCESS_VARIABLE)? {
            config.staging.access =
                variable::<DeviceAccess>(ACCESS_VARIABLE, &access, "auto, staged or direct")?;
        }
        if let Some(class) = get(CLASS_VARIABLE)? {
            let expected = "fully-connected, hybrid-cube-mesh or unknown";
            config.topology = Some(variable(CLASS_VARIABLE, &class, expected)?);
        }
        if let Some(pretend) = get(PRETEND_VARIABLE)? {
            config.device.pretend =
                variable(PRETEND_VARIABLE, &pretend, "no-peer-access or no-atomics")?;
        }
        let number = |name: &str, unit: &str| match get(name)? {
            None => Ok(None),
            Some(text) => match text.parse::<u64>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(Error::new(
                    ErrorKind::Parse,
                    format!("{name} is '{text}'; expected a whole number of {unit}"),
                )),
            },
        };
        if let Some(seconds) = number("WARPLINK_TIMEOUT", "seconds")? {
            if seconds == 0 {
                let message = "WARPLINK_TIMEOUT is 0; expected at least 1 second";
                return Err(Error::new(ErrorKind::Parse, message));
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

    /// The device that the variables ask for; a GPU where there is one if they do not.
    pub(crate) fn device_kind() -> Result<DeviceKind> {
        Self::kind_of(variables::read("WARPLINK_DEVICE")?)
    }

    fn kind_of(name: Option<String>) -> Result<DeviceKind> {
        match name {
            Some(name) => variable("WARPLINK_DEVICE", &name, "host or cuda"),
            None => Ok(DeviceKind::detect()),
        }
    }
}

/// Reads the value of a variable that must be as `expected`.
fn variable<T: FromStr>(name: &str, value: &str, expected: &str) -> Result<T> {
    value.parse().map_err(|_| {
        let message = format!("{name} is '{value}'; expected {expected}");
        Error::new(ErrorKind::Parse, message)
            .with_help(format!("set {name} to one of these, or unset it"))
    })
}

/// The ordinal among the `visible` GPUs for the rank with `local_rank` on this machine.
fn gpu_ordinal(local_rank: usize, visible: usize) -> Result<usize> {
    match visible {
        0 => {
            Err(Error::new(ErrorKind::Unsupported, "no GPU is visible")
                .with_help("use --device host"))
        }
        // Each rank was given its own.
        1 => Ok(0),
        _ if local_rank < visible => Ok(local_rank),
        _ => Err(Error::invalid(format!(
            "local rank {local_rank} has no GPU of its own among {visible}"
        ))
        .with_help("start no more ranks than there are GPUs")),
    }
}
