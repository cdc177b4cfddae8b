//! The `warplink` command: launches ranks, runs the demo and benchmarks, checks this machine.

mod commands;
mod gemm;
mod launch;
mod options;
mod report;

use clap::{Parser, Subcommand};
use options::Options;
use std::process::ExitCode;

/// One-sided, zero-copy GPU-to-GPU communication.
#[derive(Debug, Parser)]
#[command(
    name = "warplink",
    version,
    about,
    after_help = "Examples:\n  \
        warplink demo\n  \
        warplink doctor\n  \
        warplink launch -n 4 -- ./my-program --size 1GiB\n  \
        warplink help launch\n\n\
        Results go to standard output, everything else to standard error."
)]
struct Cli {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(commands::bench::Bench),
    Demo(commands::demo::Demo),
    Doctor(commands::doctor::Doctor),
    Launch(commands::launch::Launch),
    Program(commands::program::Program),
    #[command(name = commands::doctor::TRIAL_COMMAND, hide = true)]
    DoctorTrial(commands::doctor::TrialArgs),
    #[command(name = launch::RANK_COMMAND, hide = true)]
    Rank(launch::RankArgs),
    #[command(name = launch::GUARD_COMMAND, hide = true)]
    Guard,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    options::start_log(cli.options.verbose);
    let done = match cli.command {
        Command::Bench(command) => command.run(&cli.options),
        Command::Demo(command) => command.run(&cli.options),
        Command::Doctor(command) => command.run(&cli.options),
        Command::DoctorTrial(args) => commands::doctor::run_trial(&args),
        Command::Launch(command) => command.run(&cli.options),
        Command::Program(command) => command.run(&cli.options),
        Command::Rank(args) => Ok(launch::become_rank(&args)),
        Command::Guard => launch::guard(),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            report::print_message(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
