//! Subcommands that run as several ranks: the first process starts this command again, once for
//! each rank, and rank 0 prints the result.

use crate::launch::{self, LaunchPlan, Output, Variable};
use crate::options::Options;
use crate::report::{self, JsonError};
use anyhow::{Context, Result};
use std::process::ExitCode;
use std::time::Duration;
use warplink::bootstrap::JoinConfig;
use warplink::{Communicator, Config, DeviceKind};

/// The variable with the code that a rank exits with where it fails because another rank did.
const CONSEQUENCE_VARIABLE: &str = "WARPLINK_CONSEQUENCE";

/// That code.
const CONSEQUENCE: u8 = 70;

/// Whether this process is one of the ranks of a job.
pub(crate) fn is_rank() -> bool {
    std::env::var_os("WARPLINK_RANK").is_some()
}

/// The exit code of a process that fails with `error`. It informs the launcher of a rank whether another rank is the
/// cause.
pub(crate) fn failure_code(error: &anyhow::Error) -> ExitCode {
    let asked = std::env::var_os(CONSEQUENCE_VARIABLE).is_some();
    if asked && report::is_consequence(error) {
        ExitCode::from(CONSEQUENCE)
    } else {
        ExitCode::FAILURE
    }
}

/// Runs `body` in every rank. In the process that was called, that means starting the ranks and
/// waiting for them; in a rank (started so, or by `warplink launch`, torchrun or mpirun with
/// `WARPLINK_RANK` set), it means joining the others first.
pub(crate) fn run(
    options: &Options,
    body: impl FnOnce(&Communicator) -> Result<ExitCode>,
) -> Result<ExitCode> {
    run_checked(options, |_, _| Ok(()), body)
}

/// As [`run`], after `check` of the device and the number of ranks: an error of `check` is printed once, and
/// not by every rank.
pub(crate) fn run_checked(
    options: &Options,
    check: impl FnOnce(DeviceKind, usize) -> Result<()>,
    body: impl FnOnce(&Communicator) -> Result<ExitCode>,
) -> Result<ExitCode> {
    if !is_rank() {
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
            Ok(failure_code(&error))
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
    Config::from_variables(join, get)?;
    Ok(())
}

/// Starts the ranks of this command.
fn start(options: &Options, ranks_per_gpu: Option<usize>) -> Result<ExitCode> {
    launch_self(
        options,
        options.ranks()?,
        ranks_per_gpu,
        Variable::new(CONSEQUENCE_VARIABLE, "1"),
    )
}

/// Starts this command again as `ranks` ranks, with a variable more. With `--json`, prints the first line that rank 0
/// wrote, which is its result; where ranks failed, the error of the one that is the cause.
pub(crate) fn launch_self(
    options: &Options,
    ranks: usize,
    ranks_per_gpu: Option<usize>,
    variable: Variable,
) -> Result<ExitCode> {
    let plan = LaunchPlan {
        ranks,
        // The link leads to the running binary also after its file was replaced.
        program: "/proc/self/exe".into(),
        args: std::env::args_os().skip(1).collect(),
        env: vec![
            variable,
            Variable::new("WARPLINK_DEVICE", options.device().to_string()),
        ],
        output: if options.json {
            Output::Kept
        } else {
            Output::Rank0Only
        },
        grace: Duration::from_secs(5),
        ranks_per_gpu,
        consequence: Some(CONSEQUENCE.into()),
    };
    let outcome = launch::run(&plan)?;
    if options.json {
        let result = outcome.first_line(0).filter(|line| !JsonError::is_in(line));
        let cause = outcome
            .first_failure
            .and_then(|rank| outcome.first_line(rank));
        match result.or(cause) {
            Some(line) => report::print_bytes(line)?,
            None => outcome.failure().print(),
        }
    }
    Ok(outcome.exit_code())
}
