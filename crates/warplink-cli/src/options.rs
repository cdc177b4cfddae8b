//! The options that every subcommand takes.

use crate::names::OneOf;
use crate::report::{has_colour, print_message};
use anyhow::{Context, Result, ensure};
use clap::{Arg, Args};
use std::io;
use std::path::Path;
use tracing_subscriber::EnvFilter;
use warplink::DeviceKind;
use warplink::{device, variables};

/// Maximum ranks on one machine: far more than useful, but low enough to catch typing errors.
const MAX_RANKS: u64 = 1024;

const DEVICE_VARIABLE: &str = "WARPLINK_DEVICE";

const CACHE_VARIABLE: &str = "WARPLINK_CACHE_DIR";

const LOG_VARIABLE: &str = "WARPLINK_LOG";

/// Options of every subcommand, before or after its name.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Options {
    /// Device to use [default: WARPLINK_DEVICE, else cuda if a GPU is usable, else host]
    #[arg(long, global = true, value_name = "DEVICE", value_parser = OneOf(&DeviceKind::ALL))]
    pub(crate) device: Option<DeviceKind>,

    /// Number of ranks [default: one per GPU, times --ranks-per-gpu; 2 on the host device]
    #[arg(short = 'n', long, global = true, value_name = "N", value_parser = between::<usize>(1, MAX_RANKS))]
    pub(crate) ranks: Option<usize>,

    /// Ranks per GPU, sharing it through CUDA's multi-process service; for tests only, since timings are not meaningful
    #[arg(long, global = true, value_name = "N", value_parser = between::<usize>(1, MAX_RANKS))]
    ranks_per_gpu: Option<usize>,

    /// Print the result as one JSON object on standard output
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Log more to standard error: -v info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Options {
    /// Applies the device from the environment if no argument gives one. Not through clap, which would count
    /// the variable as an argument and skip the help.
    pub(crate) fn with_environment(mut self) -> Result<Self> {
        let named = variables::read(DEVICE_VARIABLE)?;
        // Set but empty is how shells and containers unset a variable.
        let named = named.filter(|name| !name.is_empty());
        if self.device.is_none() {
            let device = named.map(|name| name.parse()).transpose();
            self.device = device.context(DEVICE_VARIABLE)?;
        }
        Ok(self)
    }

    /// Requested device, or the best one available.
    pub(crate) fn device(&self) -> DeviceKind {
        self.device.unwrap_or_else(DeviceKind::detect)
    }

    /// The requested number of ranks, or one per GPU, or 2 on the host device.
    pub(crate) fn ranks(&self) -> Result<usize> {
        match (self.ranks, self.device()) {
            (Some(ranks), _) => Ok(ranks),
            // The fewest ranks that communicate.
            (None, DeviceKind::Host) => Ok(2),
            (None, DeviceKind::Cuda) => {
                let each = self.ranks_per_gpu()?.unwrap_or(1);
                let count = device::count(DeviceKind::Cuda)?;
                ensure!(
                    count > 0,
                    "this process sees no GPU; expected at least one; help: use --device host, or set \
                     CUDA_VISIBLE_DEVICES"
                );
                Ok(count * each)
            }
        }
    }

    /// Number of ranks on a GPU, if shared.
    pub(crate) fn ranks_per_gpu(&self) -> Result<Option<usize>> {
        ensure!(
            self.ranks_per_gpu.is_none() || self.device() == DeviceKind::Cuda,
            "--ranks-per-gpu needs GPUs, and the device is host; expected --device cuda; help: leave it out, \
             since any number of ranks can use the host device"
        );
        Ok(self.ranks_per_gpu)
    }

    /// Fails if an option is given that the subcommand would ignore. To be called before
    /// [`with_environment`](Self::with_environment), since variables apply to every subcommand.
    pub(crate) fn refuse_unused(&self, unused: &[Unused]) -> Result<()> {
        for option in unused {
            let given = match option {
                Unused::Device => self.device.is_some(),
                Unused::RanksPerGpu => self.ranks_per_gpu.is_some(),
            };
            ensure!(
                !given,
                "--{} is given, which this subcommand does not use; expected none",
                option.argument().get_long().unwrap_or_default()
            );
        }
        Ok(())
    }
}

/// An option that a subcommand does not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unused {
    Device,
    RanksPerGpu,
}

impl Unused {
    /// The option, hidden from the subcommand's help.
    fn argument(self) -> Arg {
        match self {
            Self::Device => Arg::new("device")
                .long("device")
                .value_parser(OneOf(&DeviceKind::ALL)),
            Self::RanksPerGpu => Arg::new("ranks_per_gpu")
                .long("ranks-per-gpu")
                .value_parser(between::<usize>(1, MAX_RANKS)),
        }
        // Defined again to be hidden from the help of a subcommand; a value is still parsed, and refused with a
        // reason.
        .hide(true)
    }
}

/// Options for the help of a subcommand that starts no ranks: `--ranks` with its own help text, and without
/// those that are `unused`.
pub(crate) fn without_ranks(ranks: &'static str, unused: &[Unused]) -> Vec<Arg> {
    let ranks = Arg::new("ranks")
        .short('n')
        .long("ranks")
        .value_name("N")
        .value_parser(between::<usize>(1, MAX_RANKS))
        .help(ranks)
        .help_heading("Global options");
    let unused = unused.iter().map(|option| option.argument());
    unused.chain([ranks]).collect()
}

/// Parser of a whole number of at least `least`. Its errors state that, unlike those of the standard library and clap.
pub(crate) fn at_least<T: TryFrom<u64>>(
    least: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| {
        let number = text.parse().ok().filter(|number| *number >= least);
        let number = number.ok_or_else(|| match least {
            0 => "expected a whole number".to_owned(),
            _ => format!("expected a whole number of at least {least}"),
        })?;
        T::try_from(number).map_err(|_| "the number is too large".to_owned())
    }
}

/// Parser of a whole number from `least` to `most`.
pub(crate) fn between<T: TryFrom<u64>>(
    least: u64,
    most: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| {
        let number = text
            .parse()
            .ok()
            .filter(|number| (least..=most).contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
    }
}

/// Fails if a variable read by this command or the library is not UTF-8, or a cache directory that the library would not use,
/// since these would count as unset.
pub(crate) fn check_variables() -> Result<()> {
    let of_others = [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_NVLS_ENABLE",
        "UCX_LOG_LEVEL",
        "UCX_TLS",
    ];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("WARPLINK_") || of_others.contains(&&*name) {
            // Only for its error: a value that is not UTF-8 would look unset later.
            variables::read(&name)?;
        }
    }
    let cache = variables::read(CACHE_VARIABLE)?.unwrap_or_default();
    ensure!(
        // Ranks may have other working directories.
        cache.is_empty() || Path::new(&cache).is_absolute(),
        "{CACHE_VARIABLE} is '{cache}'; expected an absolute path"
    );
    Ok(())
}

/// Logs to standard error. `WARPLINK_LOG` overrides `-v` with filters of the `tracing` crates; an invalid one
/// is reported and ignored.
pub(crate) fn start_log(verbose: u8) {
    let level = match verbose {
        // A failing command reports these events itself, with the rank.
        0 => "warn,warplink::bootstrap::health=error,warplink::memory::notifier=error",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    // Non-UTF-8 values were rejected earlier.
    let given = variables::read(LOG_VARIABLE).unwrap_or_default();
    let given = given.filter(|text| !text.trim().is_empty());
    let filter = given.and_then(|text| match EnvFilter::try_new(&text) {
        Ok(filter) => Some(filter),
        Err(error) => {
            // Only in the first process rather than in every rank.
            if std::env::var_os("WARPLINK_RANK").is_none() {
                print_message(&format!(
                    "warning: {LOG_VARIABLE} is '{text}', which is not a log filter ({error}); expected filters as \
                     in debug or warplink=debug; logging at '{level}'"
                ));
            }
            None
        }
    });
    let filter = filter.unwrap_or_else(|| EnvFilter::new(level));
    // Fails only if a logger was installed before, which then stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // It would panic if standard error is closed.
        .log_internal_errors(false)
        .with_ansi(has_colour(&io::stderr()))
        .try_init();
}
