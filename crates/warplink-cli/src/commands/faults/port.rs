//! A port for the store of a cell, which nothing else takes before the rank that serves it does.

use anyhow::{Context, Result, anyhow};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net;

/// The lowest port that may be chosen.
const LOWEST: u16 = 12_000;

/// How often another is tried.
const ATTEMPTS: usize = 1000;

/// A free port of this machine, held against other cells, also of other commands, until this is dropped.
#[derive(Debug)]
pub(super) struct Port {
    address: SocketAddr,
    /// Lock on the port: a name that one process can hold at a time. Rank 0 binds the port itself.
    _held: net::UnixListener,
}

impl Port {
    /// One below those that the system gives to connections and listeners that name none.
    pub(super) fn choose() -> Result<Self> {
        let highest = lowest_of_system().filter(|&port| port > LOWEST);
        let count = u64::from(highest.unwrap_or(u16::MAX) - LOWEST);
        for _ in 0..ATTEMPTS {
            let random = getrandom::u64().map_err(|error| anyhow!("choose a port: {error}"))?;
            let number = LOWEST + u16::try_from(random % count).unwrap_or_default();
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, number));
            let Ok(held) = hold(number) else { continue };
            if TcpListener::bind(address).is_ok() {
                return Ok(Self {
                    address,
                    _held: held,
                });
            }
        }
        Err(anyhow!("no port from {LOWEST} on is free for a store"))
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

fn hold(number: u16) -> io::Result<net::UnixListener> {
    let name = net::SocketAddr::from_abstract_name(format!("warplink-faults-{number}"))?;
    net::UnixListener::bind_addr(&name)
}

/// The lowest port that the system chooses by itself.
fn lowest_of_system() -> Option<u16> {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .context("read the range of ports");
    range.ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_free_and_held_against_others() {
        let ports: Vec<Port> = (0..50).map(|_| Port::choose().unwrap()).collect();
        let mut numbers: Vec<u16> = ports.iter().map(|port| port.address().port()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 50);
        for port in &ports {
            assert!(hold(port.address().port()).is_err(), "it is held");
            TcpListener::bind(port.address()).unwrap();
        }
        let number = numbers[0];
        drop(ports);
        hold(number).unwrap();
    }
}
