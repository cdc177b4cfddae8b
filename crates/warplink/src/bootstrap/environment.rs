//! The variables that launchers set.

use super::config::{JoinConfig, Rendezvous};
use super::member::MIN_HEARTBEAT_LIMIT;
use super::nodelist;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// The variables by which one launcher numbers processes.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
}

/// In the order of preference. Slurm comes last, since `srun` and `sbatch` also set its variables around other launchers
/// that they start.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "Warplink",
        rank: "WARPLINK_RANK",
        world: "WARPLINK_WORLD",
        local_rank: "WARPLINK_LOCAL_RANK",
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
    },
];

/// The range of derived ports. It ends below 32768, where Linux begins to assign ports to sockets that ask for any.
const FIRST_PORT: u16 = 20000;
const PORTS: u32 = 12000;

impl JoinConfig {
    /// Reads the configuration from variables as launchers set them.
    ///
    /// *Rank and world size* come from the first launcher that sets both:
    ///
    /// | launcher | rank | world size | rank on its machine |
    /// |---|---|---|---|
    /// | Warplink | `WARPLINK_RANK` | `WARPLINK_WORLD` | `WARPLINK_LOCAL_RANK` |
    /// | torchrun | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
    /// | Slurm | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` |
    ///
    /// If the last is not set, all ranks are assumed to run on one machine.
    ///
    /// *The rendezvous* comes from the first of these that is set:
    ///
    /// 1. `WARPLINK_ID`, a unique id in hexadecimal digits;
    /// 2. `WARPLINK_ADDRESS`, as `ip:port` or `host:port`;
    /// 3. `MASTER_ADDR`, with `WARPLINK_PORT` or else `MASTER_PORT` plus one, since torchrun's
    ///    store listens at `MASTER_PORT`;
    /// 4. on one machine under Open MPI, the loopback address, with `WARPLINK_PORT` or else a port
    ///    derived from `PMIX_NAMESPACE`;
    /// 5. under Slurm, the first node of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, with
    ///    `WARPLINK_PORT` or else a port derived from `SLURM_JOB_ID` and `SLURM_STEP_ID`.
    ///
    /// `WARPLINK_TIMEOUT`, if set, is [`JoinConfig::timeout`] in seconds, and
    /// `WARPLINK_HEARTBEAT_LIMIT` is [`JoinConfig::heartbeat_limit`] in seconds, such as `0.5`.
    /// `WARPLINK_SECRET`, if set, becomes [`JoinConfig::secret`], and `WARPLINK_ALLOW_INSECURE=1`
    /// sets [`JoinConfig::allow_insecure`]. An empty variable counts as not set, except for the
    /// secret, which must not be blank. Blocks while a host name is resolved.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] that lists the variables that would do when none is set, or
    /// when the secret is blank; [`ErrorKind::Parse`] naming the variable when a value is malformed
    /// or not UTF-8.
    pub fn from_variables(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        Variables(&lookup)
            .read()
            .map_err(|error| error.with_operation("read the job's variables"))
    }
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    /// A variable without surrounding white space; `None` if it is empty.
    fn get(&self, name: &str) -> Result<Option<String>> {
        Ok(self.get_raw(name)?.filter(|value| !value.is_empty()))
    }

    fn get_raw(&self, name: &str) -> Result<Option<String>> {
        match (self.0)(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value.trim().to_owned())),
            Some(Err(_)) => Err(wrong(name, "(not shown)", "is not UTF-8; expected text")),
        }
    }

    /// A variable that `parse` accepts; the error of other text says what was `expected`.
    fn parsed<T>(
        &self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let text = self.get(name)?;
        let value = text.map(|text| parse(&text).ok_or_else(|| wrong(name, &text, expected)));
        value.transpose()
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let expected = "is not a number; expected a whole number, at least 0";
        self.parsed(name, expected, |text| text.parse().ok())
    }

    fn port_of(&self, name: &str) -> Result<Option<u16>> {
        let expected = "is not a port; expected 0 to 65535";
        self.parsed(name, expected, |text| text.parse().ok())
    }

    /// A blank secret is an error: treated as unset, it would leave the job unprotected.
    fn secret(&self) -> Result<Option<String>> {
        const NAME: &str = "WARPLINK_SECRET";
        match self.get_raw(NAME)? {
            Some(text) if text.is_empty() => Err(Error::invalid(format!(
                "{NAME} is blank; expected a long random text"
            ))
            .with_help(format!(
                "set {NAME} to the same text on every rank, or unset it"
            ))),
            secret => Ok(secret),
        }
    }

    fn flag(&self, name: &str) -> Result<bool> {
        let expected = "is not a switch; expected 0 or 1";
        let flag = self.parsed(name, expected, |text| match text {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        });
        Ok(flag?.unwrap_or(false))
    }

    fn read(&self) -> Result<JoinConfig> {
        let (rank, world, local_rank) = self.identity()?;
        let mut config = JoinConfig::new(self.rendezvous(rank, world)?, rank, world);
        config.local_rank = local_rank;
        if let Some(timeout) = self.timeout()? {
            config.timeout = timeout;
        }
        if let Some(limit) = self.heartbeat_limit()? {
            config.heartbeat_limit = limit;
        }
        config.secret = self.secret()?;
        config.allow_insecure = self.flag("WARPLINK_ALLOW_INSECURE")?;
        Ok(config)
    }

    fn timeout(&self) -> Result<Option<Duration>> {
        let expected = "is not a time limit; expected a whole number of seconds, at least 1";
        self.parsed("WARPLINK_TIMEOUT", expected, |text| {
            let seconds = text.parse().ok().filter(|seconds| *seconds > 0);
            seconds.map(Duration::from_secs)
        })
    }

    fn heartbeat_limit(&self) -> Result<Option<Duration>> {
        let least = MIN_HEARTBEAT_LIMIT.as_secs_f64();
        let expected =
            format!("is not a heartbeat limit; expected a number of seconds, at least {least}");
        self.parsed("WARPLINK_HEARTBEAT_LIMIT", &expected, |text| {
            let limit = Duration::try_from_secs_f64(text.parse().ok()?).ok();
            limit.filter(|limit| *limit >= MIN_HEARTBEAT_LIMIT)
        })
    }

    fn identity(&self) -> Result<(usize, usize, usize)> {
        let mut lone = None;
        for launcher in &LAUNCHERS {
            let (rank, world) = (self.number(launcher.rank)?, self.number(launcher.world)?);
            // Both or neither: batch systems set some of these variables for processes that are no ranks.
            let alone = match (rank, world) {
                (Some(_), None) => Some((launcher.rank, launcher.world)),
                (None, Some(_)) => Some((launcher.world, launcher.rank)),
                _ => None,
            };
            lone = lone.or(alone);
            let (Some(rank), Some(world)) = (rank, world) else {
                continue;
            };
            if rank >= world {
                return Err(Error::invalid(format!(
                    "{} is {rank} and {} is {world}; expected a rank below the world size",
                    launcher.rank, launcher.world
                )));
            }
            return Ok((
                rank,
                world,
                self.number(launcher.local_rank)?.unwrap_or(rank),
            ));
        }
        let sought: Vec<_> = LAUNCHERS
            .iter()
            .map(|launcher| {
                format!(
                    "{} and {} ({})",
                    launcher.rank, launcher.world, launcher.name
                )
            })
            .collect();
        let found = match lone {
            Some((set, missing)) => format!("{set} is set, and {missing} is not"),
            None => "rank and world size are not set".to_owned(),
        };
        Err(
            Error::invalid(format!("{found}; expected {}", sought.join(", "))).with_help(
                "start the ranks with a launcher, or set WARPLINK_RANK and WARPLINK_WORLD",
            ),
        )
    }

    fn rendezvous(&self, rank: usize, world: usize) -> Result<Rendezvous> {
        if let Some(id) = self.get("WARPLINK_ID")? {
            return id.parse().map(Rendezvous::Id).map_err(|error: Error| {
                wrong(
                    "WARPLINK_ID",
                    "(not shown)",
                    &format!("is not a unique id: {}", error.message()),
                )
            });
        }
        let address = if let Some(text) = self.get("WARPLINK_ADDRESS")? {
            self.host_and_port(&text, rank)?
        } else if let Some(host) = self.get("MASTER_ADDR")? {
            let master = self.port_of("MASTER_PORT")?;
            // `MASTER_PORT` itself is taken by PyTorch's own store.
            let after_torch = master.and_then(|port| port.checked_add(1));
            let sought = match master {
                Some(u16::MAX) => "WARPLINK_PORT, since no port follows MASTER_PORT=65535",
                _ => "WARPLINK_PORT or MASTER_PORT",
            };
            let port = self.port(after_torch, sought)?;
            resolve("MASTER_ADDR", &host, port, rank)?
        } else if self.number("OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(world) {
            // All ranks are on this machine, so only the port is open; it is derived from the job, whose name every
            // rank has.
            let derived = self.get("PMIX_NAMESPACE")?.map(|job| derived_port(&[&job]));
            let port = self.port(derived, "WARPLINK_PORT or PMIX_NAMESPACE")?;
            (Ipv4Addr::LOCALHOST, port).into()
        } else if let Some((name, nodes)) = self.node_list()? {
            let host = nodelist::first_host(&nodes)
                .map_err(|error| wrong(name, &nodes, error.message()))?;
            // Steps of one job may run at the same time on the same node, so each needs a port of its own.
            let step = self.get("SLURM_STEP_ID")?.unwrap_or_default();
            let derived = self
                .get("SLURM_JOB_ID")?
                .map(|job| derived_port(&[&job, &step]));
            let port = self.port(derived, "WARPLINK_PORT or SLURM_JOB_ID")?;
            resolve(name, &host, port, rank)?
        } else {
            return Err(Error::invalid(
                "no rendezvous is set; expected WARPLINK_ID, WARPLINK_ADDRESS, MASTER_ADDR, \
                 OMPI_COMM_WORLD_LOCAL_SIZE equal to the world size, SLURM_STEP_NODELIST or \
                 SLURM_JOB_NODELIST",
            )
            .with_help(
                "set WARPLINK_ADDRESS to ip:port of rank 0's machine, the same on every rank",
            ));
        };
        Ok(Rendezvous::Address(address))
    }

    /// The nodes of a Slurm job, and the variable that lists them.
    fn node_list(&self) -> Result<Option<(&'static str, String)>> {
        for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
            if let Some(nodes) = self.get(name)? {
                return Ok(Some((name, nodes)));
            }
        }
        Ok(None)
    }

    fn port(&self, derived: Option<u16>, sought: &str) -> Result<u16> {
        match self.port_of("WARPLINK_PORT")?.or(derived) {
            Some(0) => Err(wrong(
                "WARPLINK_PORT",
                "0",
                "is not a port that ranks can connect to; expected 1 to 65535",
            )),
            Some(port) => Ok(port),
            None => Err(Error::invalid(format!("no port is set; expected {sought}"))),
        }
    }

    fn host_and_port(&self, text: &str, rank: usize) -> Result<SocketAddr> {
        const NAME: &str = "WARPLINK_ADDRESS";
        let address = match (text.parse::<SocketAddr>(), text.rsplit_once(':')) {
            (Ok(address), _) => address,
            (_, Some((host, port))) => {
                let port = port.parse().map_err(|_| {
                    wrong(
                        NAME,
                        text,
                        "has no port after the colon; expected ip:port or host:port",
                    )
                })?;
                resolve(NAME, host, port, rank)?
            }
            _ => {
                return Err(wrong(
                    NAME,
                    text,
                    "is not an address; expected ip:port or host:port",
                ));
            }
        };
        match address.port() {
            0 => Err(wrong(NAME, text, "has port 0; expected 1 to 65535")),
            _ => Ok(address),
        }
    }
}

fn wrong(name: &str, value: &str, what: &str) -> Error {
    Error::parse(format!("{name}={value} {what}"))
}

/// A port that is the same on all ranks of a job and differs between most jobs.
fn derived_port(job: &[&str]) -> u16 {
    let digest: [u8; 32] = Sha256::digest(job.join(".")).into();
    let [a, b, c, d, ..] = digest;
    FIRST_PORT + (u32::from_le_bytes([a, b, c, d]) % PORTS) as u16
}

/// The address of a host. IPv4 is preferred, so that all ranks choose the same.
fn resolve(name: &str, host: &str, port: u16, rank: usize) -> Result<SocketAddr> {
    if let Ok(ip) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok((ip, port).into());
    }
    let found: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|error| wrong(name, host, &format!("does not resolve: {error}")))?
        .collect();
    let address = *found
        .iter()
        // IPv4 first: every rank must choose the same address, and between many machines IPv6 is not routed.
        .find(|address| address.is_ipv4())
        .or(found.first())
        .ok_or_else(|| wrong(name, host, "resolves to no address"))?;
    // Many machines resolve their host name to the loopback address, where other machines do not reach rank 0; so it
    // listens on every interface.
    if rank == 0 && address.ip().is_loopback() && host != "localhost" {
        return Ok((Ipv4Addr::UNSPECIFIED, port).into());
    }
    Ok(address)
}

#[cfg(test)]
#[path = "environment_tests.rs"]
mod tests;
