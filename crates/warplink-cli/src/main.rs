//! The `warplink` command: launches ranks, runs the demo and benchmarks, checks this machine.

mod commands;
mod gemm;
mod launch;
mod memory;
mod names;
mod options;
mod process;
mod report;

use anyhow::Result;
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use options::Options;
use std::process::ExitCode;

/// One-sided, zero-copy GPU-to-GPU communication.
#[derive(Debug, Parser)]
#[command(
    name = "warplink",
    version,
    about,
    arg_required_else_help = true,
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
    Faults(commands::faults::Faults),
    Launch(commands::launch::LaunchCommand),
    Program(commands::program::ProgramCommand),
    Topo(commands::topo::Topo),
    Tune(commands::tune::Tune),
    #[command(name = commands::doctor::TRIAL_COMMAND, hide = true)]
    DoctorTrial(commands::doctor::TrialArgs),
    #[command(name = commands::faults::PROBE_COMMAND, hide = true)]
    FaultProbe,
    #[command(name = commands::faults::FAULT_RANK_COMMAND, hide = true)]
    FaultRank(commands::faults::FaultRank),
    #[command(name = launch::RANK_COMMAND, hide = true)]
    Rank(launch::RankArgs),
}

fn main() -> ExitCode {
    let parsed = with_negative_numbers(Cli::command())
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return refuse(error),
    };
    let json = cli.options.json;
    if let Err(error) = options::check_variables() {
        report::print_error(&error, json);
        return ExitCode::FAILURE;
    }
    // The guard is a parent that survives this process, however that ends, and then kills its leftovers.
    let done = if !launch::is_guarded() && cli.command.starts_ranks() {
        // The child reports log problems.
        launch::guard(json)
    } else {
        options::start_log(cli.options.verbose);
        if launch::is_guarded() {
            launch::follow();
        }
        run(cli.command, cli.options)
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            report::print_error(&error, json);
            commands::ranks::failure_code(&error)
        }
    }
}

impl Command {
    /// Whether it may start ranks.
    fn starts_ranks(&self) -> bool {
        match self {
            Self::Launch(_) => true,
            Self::Bench(_) | Self::Demo(_) | Self::Topo(_) | Self::Tune(_) | Self::Faults(_) => {
                !commands::ranks::is_rank()
            }
            Self::Program(program) => program.starts_ranks() && !commands::ranks::is_rank(),
            _ => false,
        }
    }
}

/// Accepts `-1` as a value, so that the error is about the value rather than an unknown option.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command
        // Otherwise `-1` would be taken for an option, with a message that does not say what is expected.
        .mut_args(|arg| {
            let takes_values = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes_values)
        })
        .mut_subcommands(with_negative_numbers)
}

fn run(command: Command, options: Options) -> Result<ExitCode> {
    if let Command::Program(program) = &command {
        options.refuse_unused(program.unused())?;
    }
    let options = &options.with_environment()?;
    match command {
        Command::Bench(command) => command.run(options),
        Command::Demo(command) => command.run(options),
        Command::Doctor(command) => command.run(options),
        Command::DoctorTrial(args) => commands::doctor::run_trial(&args),
        Command::Faults(command) => command.run(options),
        Command::FaultProbe => commands::faults::probe_gpu(),
        Command::FaultRank(args) => args.run(),
        Command::Launch(command) => command.run(options),
        Command::Program(command) => command.run(options),
        Command::Topo(command) => command.run(options),
        Command::Tune(command) => command.run(options),
        Command::Rank(args) => Ok(launch::become_rank(&args)),
    }
}

/// Reports invalid arguments, or prints the requested help.
fn refuse(mut error: clap::Error) -> ExitCode {
    // Hidden subcommands are internal.
    if let Some(ContextValue::Strings(names)) = error.get(ContextKind::ValidSubcommand) {
        let shown = names.iter().filter(|name| !name.starts_with("__"));
        let shown = ContextValue::Strings(shown.cloned().collect());
        error.insert(ContextKind::ValidSubcommand, shown);
    }
    // Parsing has failed, so that the option has to be looked for by hand; arguments after `--` are the program's.
    let own = std::env::args_os().take_while(|argument| argument != "--");
    if error.use_stderr() && own.skip(1).any(|argument| argument == "--json") {
        report::JsonError::of_usage(&error).print();
    }
    let text = error.render();
    if text.to_string().starts_with("error: ") {
        let text = if report::has_colour(&std::io::stderr()) {
            text.ansi().to_string()
        } else {
            text.to_string()
        };
        report::print_message(text.trim_end());
    } else {
        // Ignore errors of a closed stream.
        let _ = error.print();
    }
    // 2 is clap's own code for invalid arguments.
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    /// By these words the tests of files find the options to try.
    #[test]
    fn help_names_what_takes_files() {
        fn check(command: &clap::Command) {
            let path = std::any::TypeId::of::<std::path::PathBuf>();
            for arg in command.get_arguments() {
                let names = arg.get_value_names().unwrap_or_default();
                let named = |name: &clap::builder::Str| name.contains("FILE") || name == "FOLDER";
                let takes = arg.get_value_parser().type_id() == path;
                assert!(
                    !takes || names.iter().any(named),
                    "{} {arg}",
                    command.get_name()
                );
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
