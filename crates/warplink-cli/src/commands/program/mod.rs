//! `warplink program`: shows, verifies, runs and costs host programs.

mod check;
mod cost;
mod diagnostics;
mod inputs;
mod run;
mod show;
mod verify;

pub(crate) use cost::named_model;

use crate::options::{Options, Unused, at_least};
use crate::report::RefusedProgram;
use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warplink::DType;
use warplink::device::ReduceOp;
use warplink::file;
use warplink::program::parameters::ParameterKind;
use warplink::program::{self, Diagnostic, Parameters, Report, Value};

/// Show, verify, run and estimate host programs
///
/// A host program describes what each rank enqueues: transfers, GEMMs and collectives, on several
/// streams. Examples are in examples/programs.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct ProgramCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Show(show::Show),
    Verify(verify::Verify),
    Cost(cost::Cost),
    Run(run::RunCommand),
}

impl ProgramCommand {
    /// Whether it starts ranks.
    pub(crate) fn starts_ranks(&self) -> bool {
        matches!(self.action, Action::Run(_))
    }

    /// Options that it does not use.
    pub(crate) fn unused(&self) -> &'static [Unused] {
        match self.action {
            Action::Show(_) | Action::Verify(_) => &show::UNUSED,
            Action::Cost(_) => &cost::UNUSED,
            Action::Run(_) => &[],
        }
    }

    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        match self.action {
            Action::Show(command) => command.run(options),
            Action::Verify(command) => command.run(options),
            Action::Cost(command) => command.run(options),
            Action::Run(command) => command.run(options),
        }
    }
}

/// A program file and the values of its parameters.
#[derive(Debug, Args)]
pub(crate) struct ProgramSource {
    /// File with the program
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Value of a parameter; may be repeated
    #[arg(short, long = "param", value_name = "NAME=VALUE", value_parser = parameter)]
    parameters: Vec<(String, Value)>,
    /// Optional tensor to bind; may be repeated
    #[arg(long = "with", value_name = "NAME")]
    tensors: Vec<String>,
    /// Streams in the pool
    #[arg(long, value_name = "N", default_value = "2", value_parser = at_least::<u8>(1))]
    pub(crate) streams: u8,
}

/// A program as it was read.
#[derive(Debug)]
pub(crate) struct Text {
    text: String,
    pub(crate) program: program::Program,
    pub(crate) parameters: Parameters,
}

impl Text {
    /// Options for the parameters that need a value and have none, except those in `known`.
    pub(crate) fn missing_options(&self, known: &[&str]) -> Vec<String> {
        let missing = self.parameters.missing(&self.program.parameters);
        missing
            .filter(|parameter| !known.contains(&parameter.name.as_str()))
            .map(|parameter| match parameter.kind {
                ParameterKind::List => format!("--param {}=N,…", parameter.name),
                _ => format!("--param {}=N", parameter.name),
            })
            .collect()
    }

    /// The help if parameters have no values.
    fn help(&self) -> Option<String> {
        let options = self.missing_options(&[]);
        let what = if options.len() == 1 {
            "a value"
        } else {
            "values"
        };
        (!options.is_empty()).then(|| format!("give {what} with {}", options.join(" ")))
    }

    /// The error of a program refused for `diagnostics`, with that help.
    fn refused(&self, diagnostics: &[Diagnostic]) -> RefusedProgram {
        let error = program::refused(&self.program.name, diagnostics);
        let json = |diagnostic| serde_json::to_value(diagnostics::object(diagnostic));
        RefusedProgram {
            error: match self.help() {
                Some(help) => error.with_help(help),
                None => error,
            },
            // Serializing texts and numbers cannot fail.
            diagnostics: diagnostics
                .iter()
                .filter_map(|one| json(one).ok())
                .collect(),
        }
    }

    /// Verifies the program for `world` ranks with `streams` streams in the pool.
    fn verify(&self, world: usize, streams: usize) -> Result<Report, RefusedProgram> {
        program::verify(&self.program, world, streams, &self.parameters)
            .map_err(|diagnostics| self.refused(&diagnostics))
    }
}

impl ProgramSource {
    /// Reads the program.
    pub(crate) fn read(&self) -> Result<Text> {
        self.read_by(file::read_text)
    }

    /// The same for a command whose ranks read it again.
    pub(crate) fn read_for_ranks(&self) -> Result<Text> {
        // In these directories, paths refer to the descriptors of each process.
        ensure!(
            !["/dev", "/proc"]
                .iter()
                .any(|own| self.file.starts_with(own)),
            "read {}: each rank would read another file; expected one that all ranks can read",
            self.file.display()
        );
        self.read_by(file::read_regular)
    }

    fn read_by(&self, read: fn(&Path, usize) -> warplink::Result<String>) -> Result<Text> {
        let parameters = self.parameters()?;
        let text = read(&self.file, program::text::MAX_TEXT_BYTES)?;
        let program = program::Program::parse_text(&text)
            .map_err(|error| diagnostics::not_a_program(&self.file, &error))?;
        Ok(Text {
            text,
            program,
            parameters,
        })
    }

    /// The values and optional tensors that are given, each once.
    fn parameters(&self) -> Result<Parameters> {
        let mut parameters = Parameters::new();
        for (name, value) in &self.parameters {
            ensure!(
                parameters.value(name).is_none(),
                "parameter '{name}' is given twice; expected once"
            );
            parameters.insert(name.as_str(), value.clone());
        }
        for name in &self.tensors {
            ensure!(
                !parameters.has_tensor(name),
                "optional tensor '{name}' is given twice; expected once"
            );
            parameters = parameters.with_tensor(name);
        }
        Ok(parameters)
    }
}

/// `m=4096`, `n=1024,512`, `T=bf16`.
pub(crate) fn parameter(text: &str) -> Result<(String, Value), String> {
    let read = || {
        let (name, value) = text.split_once('=')?;
        let (name, value) = (name.trim(), value.trim());
        if !program::text::is_name(name) {
            return None;
        }
        // Numbers, types and operators have different forms, so that the order of attempts does not matter.
        let value = match (value.parse::<DType>(), value.parse::<ReduceOp>()) {
            (Ok(dtype), _) => Value::ElementType(dtype),
            (_, Ok(operator)) => Value::Operator(operator),
            (Err(_), Err(_)) if value.contains(',') => {
                let elements = value.split(',').map(|element| element.trim().parse());
                Value::List(elements.collect::<Result<_, _>>().ok()?)
            }
            (Err(_), Err(_)) => Value::Integer(value.parse().ok()?),
        };
        Some((name.to_owned(), value))
    };
    read().ok_or_else(|| {
        "expected a name and an integer, a list, an element type or an operator, as in m=4096, n=1024,512, \
         T=bf16 or op=sum"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read() {
        let read = |text, name: &str, value| {
            assert_eq!(parameter(text), Ok((name.to_owned(), value)));
        };
        read("m=8", "m", Value::Integer(8));
        read(" m = -8 ", "m", Value::Integer(-8));
        read("n=1, 2", "n", Value::List(vec![1, 2]));
        read("T=bf16", "T", Value::ElementType(DType::BF16));
        for text in ["", "m", "m=", "=8", "m=x", "n=1,", "rank=1", "1m=2"] {
            assert!(parameter(text).is_err(), "{text}");
        }
    }
}
