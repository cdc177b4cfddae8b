//! `warplink tune`: measures the machine for the cost model.

mod algorithms;
mod collective;
mod gemm;
mod interference;
mod kernels;
mod lanes;
mod latency;
mod link;
mod machine;
mod memory;
mod report;

use crate::commands::ranks;
use crate::names::OneOf;
use crate::options::{Options, at_least};
use crate::report::bytes::ByteSize;
use crate::report::progress::Progress;
use crate::report::{check_output, counted, print_result, write_file};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use machine::{Selection, TunedMachine};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use warplink::program::cost::model::{DeviceMatch, FORMAT, Provenance};
use warplink::program::cost::{DeviceDescription, HardwareModel, find};
use warplink::{Communicator, DType, DeviceKind};

/// Largest matrix extent that can be requested.
const MAX_SHAPE: usize = 1 << 17;

/// Minimum of `--largest-transfer`: below it rates are meaningless, and some measurements cannot be divided.
const MIN_TRANSFER: u64 = 4 << 10;

/// Added for each rank, since some measurements give every rank a part.
const MIN_TRANSFER_PER_RANK: u64 = 1 << 10;

/// Largest factor between estimates with measured figures and actual times, over 500 random shapes on two
/// H200.
const UNCERTAINTY: f64 = 1.6;

/// A measurement, which writes its figures into the model.
type Measurement = fn(&TunedMachine<'_>, &mut HardwareModel) -> Result<()>;

/// Order matters: later ones subtract times measured earlier.
const MEASUREMENTS: [(&str, Measurement); 9] = [
    ("memory", memory::measure),
    ("transfers", link::measure),
    ("transfers by kernels", kernels::measure),
    ("latencies", latency::measure),
    ("lanes of kernels", lanes::measure),
    ("algorithms", algorithms::measure),
    ("collectives", collective::measure),
    ("matrices", gemm::measure),
    ("concurrent work", interference::measure),
];

/// Measure this machine for the cost model
///
/// Measures matrix multiplications over a grid of shapes, transfers between single neighbours and between
/// all ranks, the collectives of the vendor's library, copies and sums, the latencies of signals and
/// events, the rates of lanes of kernel sections, the host's time to enqueue, and the slowdown of concurrent
/// work. Writes a hardware model, which warplink then uses to choose how to overlap communication, and
/// `warplink program cost` to estimate programs. The machine should be idle otherwise.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink tune\n  \
    warplink tune -n 2 --dtypes bf16,f16 --output h200-2.json\n  \
    warplink tune -n 8 --algorithms\n  \
    warplink tune --device host -n 2 --largest-shape 256")]
pub(crate) struct Tune {
    /// File to write [default: in the cache directory, where warplink looks for it]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Element types of the matrix multiplications; f16 and bf16 stand for one another
    /// [default: bf16,f32]
    #[arg(long, value_name = "T,…", value_delimiter = ',', value_parser = OneOf(&DType::MATMUL))]
    dtypes: Vec<DType>,
    /// Largest extent of a matrix [default: 16384 on cuda, 512 on host]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(0))]
    largest_shape: Option<usize>,
    /// Largest transfer [default: 256MiB on cuda, 1MiB on host]
    #[arg(long, value_name = "BYTES")]
    largest_transfer: Option<ByteSize>,
    /// Samples of each figure
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least::<u16>(1))]
    samples: u16,
    /// Also measure the fastest algorithm of Warplink's collectives for each length and element size; otherwise
    /// estimates decide
    #[arg(long)]
    algorithms: bool,
    /// Do not measure the vendor's collectives
    #[arg(long)]
    no_nccl: bool,
}

/// The error without a default path.
const NO_DIRECTORY: &str = "no cache directory; use --output FILE";

impl Tune {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        match &self.output {
            Some(path) => check_output(path)?,
            None => {
                let directory = find::directory().context(NO_DIRECTORY)?;
                // Now and not when the model is written: measuring takes minutes.
                std::fs::create_dir_all(&directory).map_err(|error| {
                    let directory = directory.display();
                    anyhow!("create {directory}: {error}; help: use --output FILE")
                })?;
            }
        }
        let check = |kind, world| self.check(kind, world);
        ranks::run_checked(options, check, |comm| {
            // Again: ranks that another launcher started have not been checked.
            self.check(comm.device().kind(), comm.world())?;
            let description = DeviceDescription::of(&**comm.device());
            // Figures that cannot be measured keep their known or assumed values.
            let (assumed, _) = HardwareModel::find(&description, comm.world())?;
            let model = rounded(&self.measure(comm, &assumed)?)?;
            if comm.rank() == 0 {
                let path = self.path(&model)?;
                write(&path, &model)?;
                print_result(options.json, &model, || {
                    let text = report::text(&model, &assumed);
                    format!("{text}\nwritten to {}\n", path.display())
                })?;
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    /// Fails if the arguments leave nothing to measure.
    fn check(&self, kind: DeviceKind, world: usize) -> Result<()> {
        if let Some(transfer) = self.largest_transfer {
            let least = ByteSize(MIN_TRANSFER.max(MIN_TRANSFER_PER_RANK * world as u64));
            ensure!(
                transfer >= least,
                "--largest-transfer is {transfer}; expected at least {least} on {}",
                counted(world, "rank")
            );
            crate::memory::check(kind, world, 0, 2 * u128::from(transfer.0))?;
        }
        if let Some(shape) = self.largest_shape {
            ensure!(
                (1..=MAX_SHAPE).contains(&shape),
                "--largest-shape is {shape}; expected 1 to {MAX_SHAPE}"
            );
            let sizes = self.dtypes.iter().map(|dtype| dtype.size());
            let element = sizes.max().unwrap_or(DType::F32.size()) as u128;
            crate::memory::check(kind, world, 0, 3 * (shape as u128).pow(2) * element)?;
        }
        Ok(())
    }

    /// `assumed`, updated with all figures that can be measured here.
    fn measure(&self, comm: &Communicator, assumed: &HardwareModel) -> Result<HardwareModel> {
        let properties = comm.device().properties();
        let selection = self.selection(properties.shared)?;
        let machine = TunedMachine::new(comm, selection)?;
        let mut model = HardwareModel {
            format: FORMAT,
            name: format!("{} x {}", comm.world(), properties.model),
            device: DeviceMatch {
                kind: comm.device().kind().to_string(),
                model: properties.model.clone(),
                ranks: comm.world(),
                topology: "every rank to its right neighbour was measured".to_owned(),
                multiprocessors: properties.multiprocessors,
                link_rate: properties.link_rate,
                shared: properties.shared,
            },
            // Ranks that share cores disturb trials more than estimates are off.
            uncertainty: if properties.shared { 1.0 } else { UNCERTAINTY },
            source: Provenance {
                machine: format!("{} on {}", counted(comm.world(), "rank"), properties.model),
                date: today(),
                command: command(std::env::args().skip(1)),
                notes: "collectives were not measured".to_owned(),
            },
            ..assumed.clone()
        };
        let steps = MEASUREMENTS.len() as u64;
        let progress = Progress::new(steps, "measure", comm.rank() == 0);
        for (name, measure) in MEASUREMENTS {
            measure(&machine, &mut model).with_context(|| format!("measure {name}"))?;
            progress.step(name);
        }
        Ok(model)
    }

    fn selection(&self, shared: bool) -> Result<Selection> {
        let (transfer, shape) = if shared {
            (1 << 20, 512)
        } else {
            (256 << 20, 16384)
        };
        let transfer = self
            .largest_transfer
            .map_or(transfer, |transfer| transfer.0);
        Ok(Selection {
            samples: self.samples.into(),
            largest: usize::try_from(transfer).context("sizes fit the memory")?,
            largest_shape: self.largest_shape.unwrap_or(shape),
            dtypes: match &self.dtypes[..] {
                [] => vec![DType::BF16, DType::F32],
                given => given.to_vec(),
            },
            algorithms: self.algorithms,
            nccl: !self.no_nccl,
        })
    }

    fn path(&self, model: &HardwareModel) -> Result<PathBuf> {
        if let Some(path) = &self.output {
            return Ok(path.clone());
        }
        let directory = find::directory().context(NO_DIRECTORY)?;
        // The model's name may have spaces and slashes.
        let DeviceMatch { model, ranks, .. } = &model.device;
        let name = model.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
        Ok(directory.join(format!("{}-{ranks}.json", name.to_lowercase())))
    }
}

/// The command line, without its output path.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut command = "warplink".to_owned();
    let mut is_path = false;
    for argument in arguments {
        if !std::mem::take(&mut is_path) && !argument.starts_with("--output") {
            command = format!("{command} {argument}");
        } else {
            is_path = argument == "--output";
        }
    }
    command
}

/// Rounds every figure to four digits, more than its precision.
fn rounded(model: &HardwareModel) -> Result<HardwareModel> {
    fn round(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::Number(number) => {
                // Sizes and counts stay exact.
                if !number.is_u64()
                    && let Some(figure) = number.as_f64()
                    && let Ok(rounded) = format!("{figure:.3e}").parse::<f64>()
                {
                    *value = rounded.into();
                }
            }
            serde_json::Value::Array(values) => values.iter_mut().for_each(round),
            serde_json::Value::Object(fields) => fields.values_mut().for_each(round),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(model).context("round the figures")?;
    round(&mut value);
    serde_json::from_value(value).context("round the figures")
}

/// Writes the model, even if some figure is invalid, so that measurements are not lost.
fn write(path: &Path, model: &HardwareModel) -> Result<()> {
    let text = model.to_json()?;
    write_file(path, format!("{text}\n").as_bytes())?;
    HardwareModel::from_json(&text)
        .with_context(|| format!("check what was written to {}", path.display()))?;
    Ok(())
}

/// UTC date as year-month-day.
fn today() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    date(seconds / 86_400)
}

/// The date `days` after 1970-01-01.
fn date(days: u64) -> String {
    // Days since 0000-03-01: with leap days at the end of years, month lengths repeat every five months.
    let since = days + 719_468;
    let (era, in_era) = (since / 146_097, since % 146_097);
    let years = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * years + years / 4 - years / 100);
    let months = (5 * in_year + 2) / 153;
    let day = in_year - (153 * months + 2) / 5 + 1;
    let month = if months < 10 { months + 3 } else { months - 9 };
    let year = 400 * era + years + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recorded_command_has_no_output_path() {
        let recorded = |text: &str| command(text.split(' ').map(str::to_owned));
        assert_eq!(recorded("tune -n 2"), "warplink tune -n 2");
        assert_eq!(recorded("tune --output a/b -n 2"), "warplink tune -n 2");
        assert_eq!(recorded("tune -n 2 --output=a/b"), "warplink tune -n 2");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, text) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_454, "2026-01-01"),
            (20_818, "2026-12-31"),
        ] {
            assert_eq!(date(days), text);
        }
    }
}
