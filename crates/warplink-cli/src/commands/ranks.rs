//! Subcommands that run as several ranks: the first process starts this command again for each rank, and rank
//! 0 prints the result.

use crate::launch::OutputStream::{Dropped, Inherited, Kept, Prefixed};
use crate::launch::{self, LaunchPlan, Target, Variable};
use crate::options::Options;
use crate::process::THIS_EXECUTABLE;
use crate::report::{self, JsonError};
use anyhow::{Context, Result};
use std::process::ExitCode;
use std::time::Duration;
use warplink::bootstrap::JoinConfig;
use warplink::{Communicator, Config, DeviceKind};

/// Variable with the exit code of a rank that fails because of another rank.
const CONSEQUENCE_VARIABLE: &str = "WARPLINK_CONSEQUENCE";

/// Value of that variable; not used otherwise.
const CONSEQUENCE: u8 = 70;

/// Whether this process is a rank of a job.
pub(crate) fn is_rank() -> bool {
    std::env::var_os("WARPLINK_RANK").is_some()
}

/// Exit code of a process that fails with `error`. It tells a launcher whether another rank is the cause.
pub(crate) fn failure_code(error: &anyhow::Error) -> ExitCode {
    let asked = std::env::var_os(CONSEQUENCE_VARIABLE).is_some();
    // Only under a launcher that knows the code: other callers expect 0 and 1.
    if asked && report::is_consequence(error) {
        ExitCode::from(CONSEQUENCE)
    } else {
        ExitCode::FAILURE
    }
}

/// Runs `body` in every rank. The initial process starts the ranks and waits for them; a rank (started that
/// way, or by `warplink launch`, torchrun or mpirun with `WARPLINK_RANK` set) joins the others first. Before it starts
/// them, the initial process runs `check` of the device and number of ranks, whose error is thus printed once.
pub(crate) fn run_checked(
    options: &Options,
    check: impl FnOnce(DeviceKind, usize) -> Result<()>,
    body: impl FnOnce(&Communicator) -> Result<ExitCode>,
) -> Result<ExitCode> {
    if !is_rank() {
        let (kind, ranks) = (options.device(), options.ranks()?);
        // In the first process: an error in a variable would otherwise be printed by every rank.
        check_environment(kind, ranks)?;
        check(kind, ranks)?;
        let asked = Variable::new(CONSEQUENCE_VARIABLE, "1");
        return launch_self(options, ranks, asked);
    }
    let config = Config::from_env()?;
    let comm = Communicator::join(&config).context("join the job")?;
    match body(&comm) {
        Ok(code) => {
            comm.close().context("leave the job")?;
            Ok(code)
        }
        Err(error) => {
            // Printed first, so that the cause precedes secondary errors.
            report::print_error(&error, options.json);
            comm.abort(&format!("{error:#}"));
            Ok(failure_code(&error))
        }
    }
}

/// Reads the variables that every rank will read, including those of the launcher, so that an invalid one is
/// reported once.
fn check_environment(kind: DeviceKind, ranks: usize) -> Result<()> {
    let get = |name: &str| match name {
        "WARPLINK_RANK" | "WARPLINK_LOCAL_RANK" => Some("0".into()),
        "WARPLINK_WORLD" => Some(ranks.to_string().into()),
        "WARPLINK_ID" => None,
        // Placeholder for the id, which does not exist yet.
        "WARPLINK_ADDRESS" => Some("127.0.0.1:1".into()),
        "WARPLINK_DEVICE" => Some(kind.to_string().into()),
        name => std::env::var_os(name),
    };
    let join = JoinConfig::from_variables(get)?;
    Config::from_variables(join, get)?;
    Ok(())
}

/// Starts this command again as `ranks` ranks, with an additional variable. With `--json`, prints rank 0's
/// first line, which is its result, or the root-cause error if ranks failed.
pub(crate) fn launch_self(options: &Options, ranks: usize, variable: Variable) -> Result<ExitCode> {
    let plan = LaunchPlan {
        ranks,
        program: THIS_EXECUTABLE.into(),
        args: std::env::args_os().skip(1).collect(),
        env: vec![
            variable,
            Variable::new("WARPLINK_DEVICE", options.device().to_string()),
        ],
        // Only rank 0 prints a result; what others write to standard error is told apart by their rank.
        output: if options.json {
            |rank| match rank {
                0 => [Kept, Inherited],
                _ => [Kept, Prefixed(Target::Stderr)],
            }
        } else {
            |rank| match rank {
                0 => [Inherited, Inherited],
                _ => [Dropped, Prefixed(Target::Stderr)],
            }
        },
        grace: Duration::from_secs(5),
        ranks_per_gpu: options.ranks_per_gpu()?,
        consequence: Some(CONSEQUENCE.into()),
    };
    let outcome = launch::run(&plan)?;
    if options.json {
        // A result of rank 0 counts even if another rank has failed afterwards; else the first failure is the cause.
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
