//! How a rank joins its job.

use super::secret::Secret;
use super::unique_id::UniqueId;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// The address, and perhaps the secret, by which the ranks of a job find one another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// An address and the secret that admits to it.
    Id(UniqueId),
    /// Only an address. The key is then [`JoinConfig::secret`], or, without one, a key that
    /// everybody knows: any process that reaches the address can join. So without a secret the
    /// address must be a loopback address, unless [`JoinConfig::allow_insecure`] is set.
    Address(SocketAddr),
}

impl Rendezvous {
    /// The address at which the store is served first.
    pub fn address(&self) -> SocketAddr {
        match self {
            Self::Id(id) => id.address(),
            Self::Address(address) => *address,
        }
    }
}

/// Reads `ip:port` (`[ip]:port` for IPv6) or the 256 digits of a [`UniqueId`].
impl FromStr for Rendezvous {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        if text.len() == 2 * UniqueId::SIZE {
            return text.parse().map(Self::Id);
        }
        Err(Error::parse(format!(
            "unknown rendezvous '{text}'; expected ip:port or a unique id"
        ))
        .with_help("give ip:port, or a unique id of 256 hexadecimal digits"))
    }
}

/// How a rank joins its job.
#[derive(Clone)]
#[non_exhaustive]
pub struct JoinConfig {
    /// Where the ranks meet.
    pub rendezvous: Rendezvous,
    /// This process's rank, from 0 to `world` less one.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// This process's number among those on its machine; `rank` by default.
    pub local_rank: usize,
    /// How long joining may take, until every rank has joined; also the limit of store calls that
    /// do not wait for a key. 60 seconds by default.
    pub timeout: Duration,
    /// The text whose hash is the key when the rendezvous is a plain address. It is hashed once,
    /// not stretched, so make it long and random. A [`UniqueId`] brings its own secret.
    pub secret: Option<String>,
    /// Whether a job without a secret may use an address that other machines can reach. Anybody who
    /// reaches it can then join and read what the ranks exchange.
    pub allow_insecure: bool,
    /// How long a connection may be silent before the system probes it. A machine that vanished is
    /// noticed after about four of these; a process that died, at once. One second by default, which is also the least.
    pub heartbeat: Duration,
    /// How long a rank may send no heartbeat before the others go on without it. A separate thread sends
    /// heartbeats, so they stop only if the whole process does: by a signal, a debugger, a machine that
    /// swaps. Until the limit its peers wait. After it their waits end with [`ErrorKind::PeerLost`], and
    /// once the rank runs again, its calls end with [`ErrorKind::GivenUp`]. 4 seconds by default, and at
    /// least 0.1; set the same on every rank, and a long one to stop ranks in a debugger.
    pub heartbeat_limit: Duration,
    /// On the rank that serves the store: how many bytes the store's keys and values may take; 1 GiB by default.
    pub store_limit: usize,
}

impl JoinConfig {
    /// Joining as `rank` of `world`, with the defaults.
    pub fn new(rendezvous: Rendezvous, rank: Rank, world: usize) -> Self {
        Self {
            rendezvous,
            rank,
            world,
            local_rank: rank,
            timeout: Duration::from_secs(60),
            secret: None,
            allow_insecure: false,
            heartbeat: Duration::from_secs(1),
            heartbeat_limit: Duration::from_secs(4),
            store_limit: 1 << 30,
        }
    }

    /// Sets this process's number among those on its machine.
    pub fn with_local_rank(mut self, local_rank: usize) -> Self {
        self.local_rank = local_rank;
        self
    }

    /// Sets how long joining may take.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets how long a rank may send no heartbeat before the others go on without it.
    pub fn with_heartbeat_limit(mut self, limit: Duration) -> Self {
        self.heartbeat_limit = limit;
        self
    }

    /// Sets the text whose hash is the key when the rendezvous is a plain address.
    pub fn with_secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// Reads the configuration from this process's environment.
    ///
    /// [`JoinConfig::from_variables`] lists the variables. Blocks while a host name is resolved.
    ///
    /// # Errors
    /// As [`JoinConfig::from_variables`].
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// The key that a rank must hold to join.
    pub(crate) fn key(&self) -> Result<Secret> {
        match (&self.rendezvous, &self.secret) {
            (Rendezvous::Id(id), _) => Ok(id.secret().clone()),
            (Rendezvous::Address(_), Some(text)) if text.trim().is_empty() => Err(Error::invalid(
                "the secret is blank; expected a long random text",
            )
            .with_help("give every rank the same secret")),
            (Rendezvous::Address(_), Some(text)) => Secret::from_text(text),
            (Rendezvous::Address(address), None)
                // Only processes of this machine reach a loopback address.
                if address.ip().is_loopback() || self.allow_insecure =>
            {
                Ok(Secret::well_known())
            }
            (Rendezvous::Address(address), None) => Err(Error::invalid(format!(
                "other machines can reach {address} and the job has no secret; expected one"
            ))
            .with_help(
                "set WARPLINK_SECRET to the same random text on every rank, use a unique id, or set \
                 WARPLINK_ALLOW_INSECURE=1 to let anybody join",
            )),
        }
    }
}

impl fmt::Debug for JoinConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinConfig")
            .field("rendezvous", &self.rendezvous)
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("local_rank", &self.local_rank)
            .field("timeout", &self.timeout)
            .field("secret", &self.secret.as_ref().map(|_| ".."))
            .field("allow_insecure", &self.allow_insecure)
            .field("heartbeat", &self.heartbeat)
            .field("heartbeat_limit", &self.heartbeat_limit)
            .field("store_limit", &self.store_limit)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_rendezvous_is_an_address_or_an_id() {
        let address: SocketAddr = "[::1]:80".parse().unwrap();
        assert_eq!(
            "[::1]:80".parse::<Rendezvous>().unwrap(),
            Rendezvous::Address(address)
        );
        let id = UniqueId::create([127, 0, 0, 1].into(), 4321).unwrap();
        assert_eq!(
            id.to_string().parse::<Rendezvous>().unwrap(),
            Rendezvous::Id(id)
        );
        for bad in ["", "node:80", "127.0.0.1", &"0".repeat(256)] {
            assert!(bad.parse::<Rendezvous>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_job_without_a_secret_stays_on_this_machine() {
        let config = |address: &str| JoinConfig::new(address.parse().unwrap(), 0, 1);
        assert!(config("127.0.0.1:80").key().is_ok());
        assert!(config("[::1]:80").key().is_ok());
        for address in ["10.0.0.1:80", "0.0.0.0:80", "[::]:80"] {
            let mut config = config(address);
            let error = config.key().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains("WARPLINK_SECRET"), "{error}");
            config.allow_insecure = true;
            assert!(config.key().is_ok());
            config.allow_insecure = false;
            config.secret = Some(" \t".into());
            assert!(config.key().is_err(), "a blank secret");
            config.secret = Some("long and random".into());
            assert!(config.key().is_ok());
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let mut config = JoinConfig::new("127.0.0.1:80".parse().unwrap(), 0, 1);
        config.secret = Some("hush".into());
        assert!(!format!("{config:?}").contains("hush"));
    }
}
