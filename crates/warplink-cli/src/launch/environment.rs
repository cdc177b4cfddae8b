//! Environment of ranks, and lookup of their program.

use anyhow::{Context, Result};
use rustix::fs::{Access, access};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use warplink::bootstrap::{HeldPort, UniqueId};

/// Variables that only the launcher sets: to the rank, to the number of ranks, and to the id.
const OF_RANK: [&str; 4] = ["WARPLINK_RANK", "WARPLINK_LOCAL_RANK", "RANK", "LOCAL_RANK"];
const OF_WORLD: [&str; 3] = ["WARPLINK_WORLD", "WORLD_SIZE", "LOCAL_WORLD_SIZE"];
const ID: &str = "WARPLINK_ID";

/// A variable for the ranks, whose value may depend on the rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    name: String,
    value: String,
}

impl Variable {
    /// `{rank}`, `{local_rank}` and `{world}` in `value` are substituted for each rank.
    pub(crate) fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            value: value.into(),
        }
    }

    fn value(&self, rank: usize, world: usize) -> String {
        let rank = rank.to_string();
        self.value
            .replace("{rank}", &rank)
            // The launcher starts ranks of one machine, where both numbers are the same.
            .replace("{local_rank}", &rank)
            .replace("{world}", &world.to_string())
    }
}

impl FromStr for Variable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let reserved = |name| OF_RANK.contains(&name) || OF_WORLD.contains(&name) || name == ID;
        match text.split_once('=') {
            Some((name, _)) if reserved(name) => Err(format!(
                "{name} is set by the launcher; expected another name"
            )),
            Some((name, value)) if !name.is_empty() => Ok(Self::new(name, value)),
            _ => Err("expected a name and a value, as in NAME=value".into()),
        }
    }
}

/// Environment shared by all ranks of a launch.
#[derive(Debug)]
pub(super) struct Environment {
    world: usize,
    id: String,
    /// Reserves the port until rank 0 listens there.
    _port: HeldPort,
    master_port: u16,
}

impl Environment {
    pub(super) fn new(world: usize) -> Result<Self> {
        let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)?;
        // PyTorch's own store needs another port; while ours is reserved, the system picks a different one.
        let master_port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.local_addr())
            .context("find a free port")?
            .port();
        Ok(Self {
            world,
            id: id.to_string(),
            // Rank 0, another process, will listen there.
            _port: id.release(),
            master_port,
        })
    }

    /// Sets the environment of `rank`.
    pub(super) fn apply(&self, rank: usize, command: &mut Command) {
        command.envs(OF_RANK.map(|name| (name, rank.to_string())));
        command.envs(OF_WORLD.map(|name| (name, self.world.to_string())));
        command.env(ID, &self.id);
        // Defaults only, so that values which the user has set for PyTorch's own store stay.
        set_default(command, "MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string());
        set_default(command, "MASTER_PORT", self.master_port.to_string());
        // Streams that share a hardware queue block one another when one of them waits for a peer; 32 is the
        // maximum.
        set_default(command, "CUDA_DEVICE_MAX_CONNECTIONS", "32".into());
    }

    /// Sets the variables that the user asked for, which override the others.
    pub(super) fn apply_extra(&self, rank: usize, extra: &[Variable], command: &mut Command) {
        for variable in extra {
            command.env(&variable.name, variable.value(rank, self.world));
        }
    }
}

/// Sets a variable unless it was inherited.
fn set_default(command: &mut Command, name: &str, value: String) {
    if env::var_os(name).is_none() {
        command.env(name, value);
    }
}

/// A program that cannot be started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MissingProgram {
    name: OsString,
    exists: bool,
}

impl MissingProgram {
    /// Exit code that shells use in this case.
    pub(super) fn exit_code(&self) -> u8 {
        if self.exists { 126 } else { 127 }
    }
}

impl fmt::Display for MissingProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.display();
        if self.exists {
            write!(f, "'{name}' is not an executable file")
        } else {
            write!(
                f,
                "'{name}' was not found; expected a path, or a name in PATH"
            )
        }
    }
}

/// Resolves `name` in the directories of `search`, once for all ranks, so that an error is reported only
/// once.
pub(super) fn find_program(name: &OsStr, search: &OsStr) -> Result<PathBuf, MissingProgram> {
    let executable = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let missing = |exists| MissingProgram {
        name: name.to_owned(),
        exists,
    };
    if name.is_empty() {
        return Err(missing(false));
    }
    if name.as_encoded_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return if executable(&path) {
            Ok(path)
        } else {
            Err(missing(path.exists()))
        };
    }
    let mut candidates = env::split_paths(search).map(|folder| {
        if folder.as_os_str().is_empty() {
            // Current directory; the './' prevents another lookup.
            Path::new(".").join(name)
        } else {
            folder.join(name)
        }
    });
    candidates
        .find(|path| executable(path))
        .ok_or_else(|| missing(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_needs_a_name_that_is_free() {
        assert_eq!("A=b=c".parse(), Ok(Variable::new("A", "b=c")));
        assert_eq!("A=".parse(), Ok(Variable::new("A", "")));
        assert!("A".parse::<Variable>().is_err());
        assert!("=b".parse::<Variable>().is_err());
        assert!("WARPLINK_RANK=1".parse::<Variable>().is_err());
    }

    #[test]
    fn a_value_names_its_rank() {
        let variable = Variable::new("A", "{rank}/{world} on {local_rank}, {other}");
        assert_eq!(variable.value(3, 8), "3/8 on 3, {other}");
    }

    #[test]
    fn finds_programs_as_a_shell_does() {
        let find = |name: &str| find_program(name.as_ref(), OsStr::new("/nowhere:/bin"));
        assert_eq!(find("sh"), Ok("/bin/sh".into()));
        assert_eq!(find("/bin/sh"), Ok("/bin/sh".into()));
        assert_eq!(find("no-such-program").unwrap_err().exit_code(), 127);
        assert_eq!(find("./no-such-program").unwrap_err().exit_code(), 127);
        assert_eq!(find("/bin").unwrap_err().exit_code(), 126);
        assert_eq!(find("").unwrap_err().exit_code(), 127);
    }
}
