//! Subcommands that run as several ranks: the first process starts this command again, once for
//! each rank, and rank 0 prints the result.

use crate::launch::{self, LaunchPlan, Output, Variable};
use crate::options::Options;
use crate::report;
use anyhow::{Context, Result};
use std::process::ExitCode;
use std::time::Duration;
use warplink::bootstrap::JoinConfig;
use warplink::{Communicator, Config, DeviceKind};

/// Runs `body` in every rank. In the process that was called, that means starting the ranks and
/// waiting for them; in a rank (started so, or by `warplink launch`, torchrun or mpirun with
/// `WARPLINK_RANK` set), it means joining the others first.
pub(crate) fn run(
    options: &Options,
    body: impl FnOnce(&Communicator) -> Result<ExitCode>,
) -> Result<ExitCode> {
    run_checked(options, |_, _| Ok(()), body)
}

/// As [`run`], after `check` of the device and the number of ranks: what it refuses is said once, and
/// not by every rank.
pub(crate) fn run_checked(
    options: &Options,
    check: impl FnOnce(DeviceKind, usize) -> Result<()>,
    body: impl FnOnce(&Communicator) -> Result<ExitCode>,
) -> Result<ExitCode> {
    if std::env::var_os("WARPLINK_RANK").is_none() {
        let sharing = options.ranks_per_gpu()?;
        let (kind, ranks) = (options.device(), options.ranks()?);
        check_environment(kind, ranks)?;
        check(kind, ranks)?;
        return start(options, sharing);
    }
    let config = Config::from_env()?;
    let comm = Communicator::join(&config).context("join the job")?;
    match body(&comm) {
        Ok(code) => {
            comm.close().context("leave the job")?;
            Ok(code)
        }
        Err(error) => {
            // Printed first, so that the cause appears before the errors that follow from it.
            report::print_error(&error, options.json);
            comm.abort(&format!("{error:#}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Reads the variables that every rank will read, with those that the launcher sets, so that a wrong one is
/// reported once.
fn check_environment(kind: DeviceKind, ranks: usize) -> Result<()> {
    let get = |name: &str| match name {
        "WARPLINK_RANK" | "WARPLINK_LOCAL_RANK" => Some("0".into()),
        "WARPLINK_WORLD" => Some(ranks.to_string().into()),
        "WARPLINK_ID" => None,
        // Instead of the id, which does not exist yet.
        "WARPLINK_ADDRESS" => Some("127.0.0.1:1".into()),
        "WARPLINK_DEVICE" => Some(kind.to_string().into()),
        name => std::env::var_os(name),
    };
    let join = JoinConfig::from_variables(get)?;
    Config::from_variables(join, |name| get(name)?.into_string().ok())?;
    Ok(())
}

/// With `--json`, prints the first line that rank 0 wrote, which is its result or its error, and an error of
/// the same form where it ended without one.
fn start(options: &Options, ranks_per_gpu: Option<usize>) -> Result<ExitCode> {
    let plan = LaunchPlan {
        ranks: options.ranks()?,
        // The link leads to the running binary also after its file was replaced.
        program: "/proc/self/exe".into(),
        args: std::env::args_os().skip(1).collect(),
        env: vec![Variable::new(
            "WARPLINK_DEVICE",
            options.device().to_string(),
        )],
        output: if options.json {
            Output::Rank0Kept
        } else {
            Output::Rank0Only
        },
        grace: Duration::from_secs(5),
        ranks_per_gpu,
    };
    let outcome = launch::run(&plan)?;
    if options.json {
        let mut lines = outcome.kept.split_inclusive(|byte| *byte == b'\n');
        match lines.next().filter(|line| line.ends_with(b"\n")) {
            Some(line) => report::print_bytes(line)?,
            None => outcome.failure().print(),
        }
    }
    Ok(outcome.exit_code())
}
