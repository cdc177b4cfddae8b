//! `warplink launch`: starts the ranks of any program.

use crate::launch::OutputStream::Prefixed;
use crate::launch::{self, LaunchOutcome, LaunchPlan, Target, Variable};
use crate::options::Options;
use crate::report::{Object, print_json};
use anyhow::Result;
use clap::Args;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

/// Maximum grace time.
const MAX_GRACE: Duration = Duration::from_secs(24 * 3600);

/// Start N ranks of a program on this machine
///
/// Each rank gets WARPLINK_RANK, WARPLINK_WORLD, WARPLINK_LOCAL_RANK and WARPLINK_ID (the
/// rendezvous address and the job's secret), and the variables that PyTorch reads: RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE and, unless set, MASTER_ADDR and MASTER_PORT. Unless set,
/// CUDA_DEVICE_MAX_CONNECTIONS becomes 32, so that a waiting stream does not block others. Standard
/// input is empty.
///
/// With --ranks-per-gpu, neighbouring ranks share a GPU: CUDA's multi-process service is started for this
/// launch and ended with it, CUDA_VISIBLE_DEVICES names each rank's GPU, and
/// CUDA_DEVICE_MAX_CONNECTIONS is at most 64 divided by the ranks of a GPU.
///
/// Each line of output is prefixed with its rank. When a rank fails, the others get SIGTERM and,
/// after the grace time, SIGKILL. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to all ranks; a
/// second one kills them. No process of a rank outlives this command, however it ends.
///
/// The exit code is that of the first rank that failed, 128 plus the signal number if a signal ended
/// it, 126 if the program cannot be executed, 127 if it was not found.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink launch -n 4 -- ./my-program --size 1GiB\n  \
    warplink launch -n 8 --env NCCL_DEBUG=WARN -- python train.py\n  \
    warplink launch -n 8 --env CUDA_VISIBLE_DEVICES={local_rank} -- ./my-program\n  \
    warplink launch -n 8 --ranks-per-gpu 4 -- ./my-program\n  \
    warplink launch -n 2 --json -- ./my-program > outcome.json")]
pub(crate) struct LaunchCommand {
    /// Set a variable for the ranks; {rank}, {local_rank} and {world} in V are substituted
    #[arg(long = "env", value_name = "K=V")]
    env: Vec<Variable>,

    /// Seconds between SIGTERM and SIGKILL
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    grace: Duration,

    /// The program and its arguments
    #[arg(required = true, last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl LaunchCommand {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let mut command = self.command.into_iter();
        let program = command.next().unwrap_or_default();
        let mut env = self.env;
        if let Some(device) = options.device {
            // First, so that --env overrides it.
            env.insert(0, Variable::new("WARPLINK_DEVICE", device.to_string()));
        }
        let plan = LaunchPlan {
            ranks: options.ranks()?,
            program,
            args: command.collect(),
            env,
            output: if options.json {
                // Standard output is for the result.
                |_| [Prefixed(Target::Stderr); 2]
            } else {
                |_| [Prefixed(Target::Stdout), Prefixed(Target::Stderr)]
            },
            grace: self.grace,
            ranks_per_gpu: options.ranks_per_gpu()?,
            consequence: None,
        };
        let outcome = launch::run(&plan)?;
        if options.json {
            print_json(&report(&outcome))?;
        }
        Ok(outcome.exit_code())
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse::<f64>()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|seconds| *seconds <= MAX_GRACE);
    seconds.ok_or_else(|| "expected a number of seconds from 0 to 86400, such as 5 or 0.5".into())
}

/// The result of `--json`.
fn report(outcome: &LaunchOutcome) -> Object {
    let ranks = outcome.exits.iter().enumerate().map(|(rank, exit)| {
        Object::default()
            .key("rank", rank)
            .key("code", exit.code)
            .key("signal", exit.signal)
            .key("seconds", exit.after.as_secs_f64())
    });
    let error = outcome.error.as_ref().map(|_| outcome.failure());
    Object::default()
        .key("exit_code", outcome.code())
        .key("first_failure", outcome.first_failure)
        .optional("error", error)
        .objects("ranks", ranks)
}
