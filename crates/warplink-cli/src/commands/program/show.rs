//! `warplink program show`: a program as it was read, or as one rank runs it.

use super::ProgramSource;
use super::diagnostics::{with_calls, with_site};
use crate::options::{Options, Unused, at_least, without_ranks};
use crate::report::{Object, print_result};
use anyhow::{Result, ensure};
use clap::Args;
use std::process::ExitCode;
use warplink::device::MatmulSpec;
use warplink::program::{Area, OperationKind, Range, RankProgram, TransferId, unroll};

/// Print a program
///
/// Prints the program as it was read; with --ranks, the operations that one rank enqueues, with
/// every loop, branch and expression resolved. That needs a value for each parameter.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  \
    warplink program show examples/programs/ring_pass.wlp\n  \
    warplink program show examples/programs/ring_pass.wlp --ranks 4 --rank 2 --param n=1024\n  \
    warplink program show examples/programs/all_reduce_one_shot.wlp --ranks 2 --param n=1024 --kernel",
    args = without_ranks("Number of ranks [default: none, which prints the program as it was read]", &UNUSED)
)]
pub(super) struct Show {
    #[command(flatten)]
    source: ProgramSource,
    /// The rank whose operations are printed, with --ranks [default: 0]
    #[arg(long, value_name = "RANK", requires = "ranks", value_parser = at_least::<usize>(0))]
    rank: Option<usize>,
    /// Print the CUDA C++ of its kernel sections instead, with --ranks
    #[arg(long, requires = "ranks")]
    kernel: bool,
}

/// Options that it does not use.
pub(super) const UNUSED: [Unused; 2] = [Unused::Device, Unused::RanksPerGpu];

impl Show {
    pub(super) fn run(self, options: &Options) -> Result<ExitCode> {
        let read = self.source.read()?;
        let program = &read.program;
        let Some(world) = options.ranks else {
            let parameters = program.parameters.iter().map(ToString::to_string);
            let result = Object::default()
                .key("name", &program.name)
                .key("parameters", parameters.collect::<Vec<_>>())
                .key("text", program.to_string());
            print_result(options.json, &result, || program.to_string())?;
            return Ok(ExitCode::SUCCESS);
        };
        let rank = self.rank.unwrap_or(0);
        ensure!(
            rank < world,
            "rank {rank} is not one of {world} ranks; expected 0 to {}",
            world - 1
        );
        let streams = self.source.streams.into();
        let rank_program = match unroll(program, rank, world, streams, &read.parameters) {
            Ok(rank_program) => rank_program,
            // The verifier finds at least this error, and reports it as in every command.
            Err(error) => {
                read.verify(world, streams)?;
                return Err(error.into());
            }
        };
        if self.kernel {
            return show_kernels(&program.name, &rank_program, options);
        }
        let (mut text, mut objects) = (String::new(), Vec::new());
        for operation in &rank_program.operations {
            let stream = rank_program.streams.get(operation.stream);
            let stream = stream.map(ToString::to_string).unwrap_or_default();
            let (described, site) = (describe(&rank_program, &operation.kind), &operation.site);
            text += &format!("{stream:>8}  {described:<60}  # {site}\n");
            let object = Object::default()
                .key("stream", stream)
                .key("operation", described);
            objects.push(with_calls(with_site(object, site), site));
        }
        let result = head(&program.name, &rank_program).objects("operations", objects);
        print_result(options.json, &result, || {
            format!("{}, rank {rank} of {world}\n{text}", program.name)
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The first keys of a rank's program.
fn head(name: &str, rank_program: &RankProgram) -> Object {
    Object::default()
        .key("program", name)
        .key("ranks", rank_program.world)
        .key("rank", rank_program.rank)
}

/// Prints the source of every kernel section, each once.
fn show_kernels(name: &str, rank_program: &RankProgram, options: &Options) -> Result<ExitCode> {
    let mut kernels: Vec<(u32, String)> = Vec::new();
    for operation in &rank_program.operations {
        if let OperationKind::Kernel(section) = &operation.kind {
            // For aligned operands, the usual case and the shorter text.
            let source = section.kernel(true)?;
            // A loop of launches has one text.
            if kernels.iter().all(|(_, known)| *known != source) {
                kernels.push((operation.site.line, source));
            }
        }
    }
    ensure!(
        !kernels.is_empty(),
        "the program has no kernel section; expected at least one"
    );
    let objects = kernels.iter();
    let objects = objects.map(|(line, text)| Object::default().key("line", line).key("text", text));
    let result = head(name, rank_program).objects("kernels", objects);
    print_result(options.json, &result, || {
        let texts: Vec<&str> = kernels.iter().map(|(_, text)| &**text).collect();
        texts.join("\n")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// An operation in the words of program text.
pub(super) fn describe(rank_program: &RankProgram, kind: &OperationKind) -> String {
    let part = |range: &Range| part(rank_program, range);
    let area = |area: &Area| selected(rank_program, area);
    let name = |id: usize| {
        rank_program
            .tensors
            .get(id)
            .map_or_else(String::new, |tensor| tensor.name.to_string())
    };
    match kind {
        OperationKind::Allocate(id) | OperationKind::Deallocate(id) => {
            format!("{} {}", kind.name(), name(*id))
        }
        OperationKind::Zero(range) => format!("{} = 0", part(range)),
        OperationKind::Copy { target, source } => {
            format!("{} = copy({})", part(target), part(source))
        }
        OperationKind::Matmul(it) => {
            let sign = if it.spec.accumulate { "+=" } else { "=" };
            let bias = it.bias.as_ref().map(part);
            let product = product(&it.spec, [area(&it.a), area(&it.b)], bias);
            format!("{} {sign} {product}  {}", area(&it.c), sizes(&it.spec))
        }
        OperationKind::Elementwise(it) => {
            let sources: Vec<String> = it.sources.iter().map(area).collect();
            format!("{} = {}({})", area(&it.target), it.op, sources.join(", "))
        }
        OperationKind::Share(exchange) => {
            let ids = rank_program.exchanges.get(*exchange);
            format!(
                "share {}",
                group(rank_program, ids.map_or(&[], Vec::as_slice))
            )
        }
        OperationKind::PostMatmul(it) => {
            let each = it.group.iter().zip(&it.a).map(|(id, a)| {
                let send = group(rank_program, &[*id]);
                let bias = it.bias.as_ref().map(part);
                let product = product(&it.spec, [part(a), part(&it.b)], bias);
                format!("{send} = {product}")
            });
            let each: Vec<String> = each.collect();
            format!("post {}  {}", each.join(", "), sizes(&it.spec))
        }
        OperationKind::Post(ids) | OperationKind::Wait(ids) => {
            format!("{} {}", kind.name(), group(rank_program, ids))
        }
        OperationKind::Collective(it) => {
            let arguments = it.collective.arguments();
            let among = it.members.as_ref().map_or_else(String::new, |members| {
                let members: Vec<String> = members.iter().map(ToString::to_string).collect();
                format!(" among [{}]", members.join(", "))
            });
            format!(
                "{} = {}({}{arguments}){among}",
                part(&it.target),
                kind.name(),
                part(&it.source)
            )
        }
        OperationKind::Kernel(section) => {
            let tensors: Vec<&str> = section.tensors.iter().map(|t| &*t.name).collect();
            format!(
                "kernel of {} lanes of {} threads: {}",
                section.lanes,
                section.threads,
                tensors.join(", ")
            )
        }
        OperationKind::Synchronize(stream) => {
            let stream = rank_program.streams.get(*stream);
            format!(
                "synchronize {}",
                stream.map(ToString::to_string).unwrap_or_default()
            )
        }
    }
}

fn sizes(spec: &MatmulSpec) -> String {
    let MatmulSpec { m, n, k, .. } = spec;
    format!("{m} x {k} by {k} x {n}")
}

/// A product of `a` and `b`, in the words of program text.
fn product(spec: &MatmulSpec, [a, b]: [String; 2], bias: Option<String>) -> String {
    let a = if spec.transposed_a {
        format!("transpose({a})")
    } else {
        a
    };
    match (spec.transposed_b, bias) {
        (true, Some(bias)) => format!("linear({a}, {b}, {bias})"),
        (true, None) => format!("linear({a}, {b})"),
        (false, Some(bias)) => format!("matmul({a}, {b}) + {bias}"),
        (false, None) => format!("matmul({a}, {b})"),
    }
}

/// A tensor's name, with the bytes of a part of it.
fn part(rank_program: &RankProgram, range: &Range) -> String {
    match rank_program.tensors.get(range.tensor) {
        Some(tensor) if range.bytes == tensor.bytes => tensor.name.to_string(),
        Some(tensor) => format!("{}[{}..{}]", tensor.name, range.offset_bytes, range.end()),
        None => String::new(),
    }
}

/// An area that need not be contiguous: the bytes from the first to the last element, and the elements and steps
/// along each axis.
fn selected(rank_program: &RankProgram, area: &Area) -> String {
    if area.is_contiguous() {
        return part(rank_program, &area.span);
    }
    let tensor = rank_program.tensors.get(area.span.tensor);
    let name = tensor.map_or("", |tensor| &*tensor.name);
    let axes = area.axes.iter();
    let axes: Vec<String> = axes
        .map(|axis| format!("{} by {}", axis.extent, axis.stride))
        .collect();
    let (from, to) = (area.span.offset_bytes, area.span.end());
    format!("{name}[{from}..{to}: {}]", axes.join(", "))
}

fn group(rank_program: &RankProgram, ids: &[TransferId]) -> String {
    let names: Vec<String> = ids
        .iter()
        .filter_map(|id| rank_program.transfers.get(*id))
        .map(|transfer| {
            let direction = match transfer.direction {
                warplink::program::Direction::Send => "to",
                warplink::program::Direction::Receive => "from",
            };
            format!(
                "{}({} {direction} {} tag {} via {})",
                transfer.name,
                part(rank_program, &transfer.range),
                transfer.peer,
                transfer.tag,
                transfer.backend
            )
        })
        .collect();
    names.join(", ")
}
