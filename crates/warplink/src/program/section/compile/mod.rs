//! Compiles a section to the text of a kernel: one call of `warplink/steps.cuh` per step.
//!
//! Rank, world, lanes, threads, types, operators and the alignment of tensors are constants of the kernel. Sizes and
//! the integers around the section are launch arguments, so one kernel serves all sizes. Loops stay loops; lists of
//! sources and targets are expanded.
//! | module | subject |
//! |---|---|
//! | [`emit`] | steps as text |
//! | [`scope`] | names, and expressions over them |
//! | [`range`] | value ranges of integers |
//! | [`hazard`] | placement of thread barriers |
//! | [`code`] | text with indented blocks |

mod code;
mod emit;
mod hazard;
mod range;
mod scope;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

use super::{Packing, SectionInstance, SectionTensor};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::program::expr::{self, Expr};
use code::{Code, comma};
use emit::{Emitter, MAX_PLACES};
use range::Range;
use scope::Scope;
use std::sync::Arc;

/// Name of the kernel function.
pub(crate) const KERNEL: &str = "section";

/// Words of a lane's trace before the times of its steps.
pub(crate) const TIMES_HEADER: usize = 3;

/// Maximum size of the arguments that a launch passes by value, in words; leaves room below CUDA's 4 KiB limit.
const MAX_WORDS: usize = 500;

/// Maximum tensor size, so that 32 bits count the packets of a step: they hold 8 bytes of data, or 4 in `packets8`.
pub(crate) const MAX_TENSOR_BYTES: usize = 16 << 30;
const MAX_TENSOR_BYTES_OF_PACKETS8: usize = 8 << 30;

/// Addresses passed to a launch.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    /// Start of each tensor of the section on each rank; 0 if not mapped.
    pub(crate) tensors: Vec<Vec<u64>>,
    /// Signals of each rank.
    pub(crate) signals: Vec<u64>,
    /// Epochs of all lanes.
    pub(crate) epochs: u64,
    /// Number of epochs: the maximum number of lanes of the kernels that share them.
    pub(crate) lanes: u64,
    /// Tables of the allocations published by the ranks; 0 if there are none.
    pub(crate) tables: u64,
}

/// First location word of a tensor that is not published to peers: never a valid allocation number.
pub(crate) const UNPUBLISHED: u64 = u64::MAX;

impl Addresses {
    /// For each tensor of `instance`, whether it and its rows are aligned to 16 bytes on every rank that maps it.
    pub(crate) fn aligned(&self, instance: &SectionInstance) -> Vec<bool> {
        let tensors = instance.tensors.iter().zip(&self.tensors);
        let aligned = tensors.map(|(tensor, bases)| {
            let rows = tensor.strides.iter().rev().skip(1);
            bases.iter().all(|base| base.is_multiple_of(16))
                && rows
                    .map(|stride| stride * tensor.dtype.size())
                    .all(|bytes| bytes.is_multiple_of(16))
        });
        aligned.collect()
    }

    /// Index of the first location word in a launch. Each announced tensor has two: the number of its allocation
    /// among those published by this rank, and its byte offset in the allocation.
    pub(crate) fn first_place(&self, instance: &SectionInstance) -> usize {
        (instance.tensors.len() + 1) * instance.world + 3
    }

    /// The launch argument words of `instance`.
    pub(crate) fn words(&self, instance: &SectionInstance) -> Arc<[u64]> {
        let sizes = sizes(instance).into_iter().map(|size| size as u64);
        let integers = variables(instance).map(|(_, value)| value as u64);
        let tensors = self.tensors.iter().flatten().copied();
        let mut published = Vec::new();
        if instance.published {
            published.push(self.tables);
            let places = instance.announced().len();
            published.extend(std::iter::repeat_n([UNPUBLISHED, 0], places).flatten());
        }
        tensors
            .chain(self.signals.iter().copied())
            .chain([self.epochs, self.lanes])
            .chain(published)
            .chain(instance.factor().map(|factor| factor.value().to_bits()))
            .chain(integers)
            .chain(sizes)
            .collect()
    }
}

/// The kernel of `instance`, as CUDA C++; `aligned` is the result of [`Addresses::aligned`].
///
/// # Errors
/// [`ErrorKind::Unsupported`] with its place, if kernels cannot perform a step.
pub(crate) fn text(instance: &SectionInstance, aligned: &[bool]) -> Result<String> {
    write(instance, aligned, false)
}

/// As [`text`], for a kernel that records the start time of each step. Its arguments have two more words: the address
/// of the times of all lanes, and the maximum number of recorded steps per lane. A lane's record has [`TIMES_HEADER`]
/// words (number of steps, end of the last step, epoch), then two words per step: start time, and position with the
/// line in the upper half. Times are in nanoseconds of a device clock.
///
/// # Errors
/// As [`text`].
pub(crate) fn traced_text(instance: &SectionInstance, aligned: &[bool]) -> Result<String> {
    write(instance, aligned, true)
}

fn write(instance: &SectionInstance, aligned: &[bool], traced: bool) -> Result<String> {
    check(instance)?;
    let SectionInstance {
        section,
        rank,
        world,
        lanes,
        threads,
        period,
        ..
    } = instance;
    let mut steps = Code::default();
    let mut emitter = Emitter::new(instance, aligned, names(instance));
    emitter.traced = traced;
    emitter.body(&mut steps, &section.body)?;
    let narrow = emitter.is_narrow() && instance.tensors.iter().all(|t| span(t) <= 1 << 30);
    let lane = Scope::spell(&section.lane);

    let mut code = Code::default();
    code.line(format!(
        "// A kernel of {lanes} lanes of {threads} threads, for rank {rank} of {world}."
    ));
    if narrow {
        // All sizes and indices fit in 32 bits.
        code.line("#define WARPLINK_INDEX int");
    }
    code.line("#include <warplink/sections.cuh>");
    code.line("");
    code.line("using namespace warplink;");
    code.line("");
    code.line(format!(
        "constexpr Index rank = {rank}, world = {world}, lanes = {lanes}, threads = {threads};"
    ));
    code.line("");
    binding(&mut code, instance, traced)?;
    code.line("");
    code.open(format!(
        "extern \"C\" __global__ void __launch_bounds__(threads) {KERNEL}(const __grid_constant__ Binding at, u64 signals) {{"
    ));
    code.line("Lane self(signals, at.epochs);");
    code.line(format!("const Index {lane} = blockIdx.x;"));
    if instance.factor().is_some() {
        code.line("ScaledSum::set(at.factor);");
    }
    if emitter.waits {
        code.line(format!(
            "Inbound<world> inbound(Signals{{signals}}, world * {lane});"
        ));
    }
    if emitter.signals {
        code.line(
            "const auto word = [&](Index peer, Index to) { return at.signals[peer] + detail::signal_bytes * (1 + world * to + rank); };",
        );
        if emitter.shares_words {
            code.line(
                "const auto sent = [&](Index peer, Index to) { return signals + detail::signal_bytes * (1 + world * to + peer) + detail::sent_offset; };",
            );
        } else {
            code.line("__shared__ u64 counts[world];");
            code.line(format!(
                "Outbound<world> outbound(Signals{{signals}}, world * {lane}, counts);"
            ));
        }
    }
    declare(&mut code, instance);
    if traced {
        code.line("Times times(at.times, at.room);");
    }
    let announced = instance.announced().len();
    if announced > 0 {
        code.line(format!("__shared__ Located<world> located[{announced}];"));
    }
    if !instance.functions.is_empty() {
        code.line("u32 row_turn = 0;");
    }
    if *period > 1 {
        code.line(format!("const Index epoch = self.launches % {period};"));
    }
    code.append(&steps);
    if emitter.waits {
        code.line("inbound.finish();");
    }
    if traced {
        code.line("times.finish(self);");
    }
    code.line("self.finish(at.lanes);");
    code.close("}");
    Ok(code.into_text())
}

/// Name of the element type in `warplink/elements.cuh`: its own name, except that an 8-bit float is named by its
/// format alone.
fn element_name(dtype: DType) -> String {
    let name = dtype.name();
    let (first, rest) = name.strip_prefix("f8").unwrap_or(name).split_at(1);
    first.to_ascii_uppercase() + rest
}

/// Name of the operator in the headers.
fn operator_name(operator: ReduceOp) -> &'static str {
    match operator {
        ReduceOp::Sum => "Add",
        ReduceOp::Max => "Maximum",
        ReduceOp::Min => "Minimum",
        ReduceOp::Product => "Multiply",
        ReduceOp::Average => "Average",
        ReduceOp::ScaledSum(_) => "ScaledSum",
    }
}

fn check(instance: &SectionInstance) -> Result<()> {
    let refused = |text: String, help: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, text)
            .with_operation("compile a kernel section")
            .with_help(help))
    };
    let mut factors = instance.operators.values().filter_map(|op| op.factor());
    if factors.any(|factor| Some(factor) != instance.factor()) {
        let text = "a kernel with several factors; expected the same in all sums".to_owned();
        return refused(text, "use one factor, or several kernels");
    }
    let world = instance.world;
    if world > MAX_PLACES {
        let text = format!("a kernel for {world} ranks; expected at most {MAX_PLACES}");
        return refused(text, "run it on fewer ranks");
    }
    if instance.threads < world || !instance.threads.is_multiple_of(32) {
        let text = format!(
            "lanes of {} threads; expected a multiple of 32, and as many as the {world} ranks",
            instance.threads
        );
        return refused(text, "use whole warps");
    }
    match too_large(instance) {
        Some(text) => refused(text, "launch the kernel on parts of it"),
        None => Ok(()),
    }
}

/// Description of a tensor that is too large for a kernel, if any.
pub(crate) fn too_large(instance: &SectionInstance) -> Option<String> {
    let mut scratch = instance.scratch.iter();
    let max_bytes = if scratch.any(|scratch| scratch.packing == Packing::Packets8) {
        MAX_TENSOR_BYTES_OF_PACKETS8
    } else {
        MAX_TENSOR_BYTES
    };
    let mut tensors = instance.tensors.iter();
    let large =
        |tensor: &&SectionTensor| span(tensor).saturating_mul(tensor.dtype.size()) > max_bytes;
    let tensor = tensors.find(large)?;
    Some(format!(
        "'{}' is larger than {max_bytes} bytes",
        tensor.name
    ))
}

/// Number of elements from a tensor's first to its last, inclusive.
fn span(tensor: &SectionTensor) -> usize {
    let axes = tensor.shape.iter().zip(&tensor.strides);
    axes.map(|(extent, stride)| extent.saturating_mul(*stride))
        .max()
        .unwrap_or(1)
}

/// Kernel constant for the integer `name`, if it is one.
fn constant(instance: &SectionInstance, name: &str) -> Option<&'static str> {
    let is = |expression: &Expr| matches!(expression, Expr::Name(other) if other == name);
    if is(&instance.section.lanes) {
        Some("lanes")
    } else if is(&instance.section.threads) {
        Some("threads")
    } else {
        None
    }
}

/// Integers passed as launch arguments, and their names in the kernel.
fn variables(instance: &SectionInstance) -> impl Iterator<Item = (String, i64)> {
    let integers = instance.integers.iter();
    integers
        .filter(|(name, _)| constant(instance, name).is_none())
        .map(|(name, value)| (Scope::spell(name), *value))
}

/// Names visible to the section's body from outside.
fn names(instance: &SectionInstance) -> Scope {
    let mut scope = Scope::default();
    for (name, value) in &instance.integers {
        match constant(instance, name) {
            Some(constant) => scope.bind(name, constant, Some(*value)),
            None => {
                // Range from the sign and size in this launch; launches with other ranges may need another kernel
                // text.
                let range = Range::of((*value).min(0).into(), (*value).max(0).into());
                scope.bind_within(name, Scope::spell(name), None, range);
            }
        }
    }
    for (number, tensor) in instance.announced().into_iter().enumerate() {
        let name = expr::reachable(&instance.tensors[tensor].name);
        let range = Range::of(0, 1);
        scope.bind_within(&name, format!("located[{number}].reachable()"), None, range);
    }
    scope.bind("rank", "rank", i64::try_from(instance.rank).ok());
    scope.bind("world", "world", i64::try_from(instance.world).ok());
    // The epoch is taken modulo the period, which is equivalent wherever the epoch may be used.
    let below = |end: u64| Range::of(0, i128::from(end.max(1)) - 1);
    if instance.period > 1 {
        scope.bind_within("epoch", "epoch", None, below(instance.period));
    } else {
        scope.bind("epoch", "0", Some(0));
    }
    let (lane, lanes) = (&instance.section.lane, instance.lanes as u64);
    scope.bind_within(lane, Scope::spell(lane), None, below(lanes));
    scope
}

/// The argument structure of a launch, in the order of [`Addresses::words`].
fn binding(code: &mut Code, instance: &SectionInstance, traced: bool) -> Result<()> {
    let world = instance.world;
    let sizes = sizes(instance).len();
    let announced = instance.announced().len();
    let words =
        (instance.tensors.len() + 1) * world + 5 + 2 * announced + instance.integers.len() + sizes;
    if words > MAX_WORDS {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "a launch has {words} words of addresses and sizes; expected at most {MAX_WORDS}"
            ),
        )
        .with_operation("compile a kernel section")
        .with_help("use fewer tensors in one kernel"));
    }
    code.line(
        "// Where tensors start on each rank, the ranks' signals, the epochs of lanes; and sizes.",
    );
    code.open("struct Binding {");
    let names = instance
        .tensors
        .iter()
        .map(|tensor| Scope::spell(&tensor.name));
    let names: Vec<String> = names.collect();
    let bases = names.iter().map(|name| format!("{name}[world]"));
    let bases = bases.chain(["signals[world]".to_owned()]);
    code.line(format!("u64 {};", comma(bases)));
    code.line("u64 epochs, lanes;");
    if instance.published {
        let places = if announced > 0 {
            format!(", place[{announced}][2]")
        } else {
            String::new()
        };
        code.line(format!("u64 tables{places};"));
    }
    if instance.factor().is_some() {
        code.line("double factor;");
    }
    let integers = comma(variables(instance).map(|(name, _)| name));
    if !integers.is_empty() {
        code.line(format!("i64 {integers};"));
    }
    if sizes > 0 {
        code.line(format!("i64 size[{sizes}];"));
    }
    if traced {
        code.line("u64 times, room;");
    }
    code.close("};");
    Ok(())
}

/// Extents and strides of tensors without duplicates, so that the kernel computes with equal values once; with
/// duplicates if sizes vary. Strides of 1 are kernel constants.
fn sizes(instance: &SectionInstance) -> Vec<usize> {
    let mut sizes = Vec::new();
    for tensor in &instance.tensors {
        for size in tensor.shape.iter().chain(&tensor.strides) {
            if instance.sizes_vary || !sizes.contains(size) {
                sizes.push(*size);
            }
        }
    }
    sizes
}

/// Declares the integers and tensors around the section as variables of the kernel.
fn declare(code: &mut Code, instance: &SectionInstance) {
    for (name, _) in variables(instance) {
        code.line(format!("const Index {name} = at.{name};"));
    }
    let sizes = sizes(instance);
    // Number of sizes of the preceding tensors.
    let mut before = 0;
    for tensor in &instance.tensors {
        let (name, axes) = (Scope::spell(&tensor.name), tensor.shape.len());
        // Indices below `axes` are extents; the others are strides.
        let size = |place: usize, value: &usize| {
            let number = if instance.sizes_vary {
                Some(before + place)
            } else {
                sizes.iter().position(|size| size == value)
            };
            format!("(Index)at.size[{}]", number.unwrap_or(0))
        };
        let Some(first) = tensor.shape.first() else {
            code.line(format!("const View<0> {name}{{0}};"));
            continue;
        };
        let strides = tensor
            .strides
            .iter()
            .enumerate()
            .map(|(axis, stride)| match stride {
                1 if axis + 1 == axes => "1".to_owned(),
                _ => size(axes + axis, stride),
            });
        let extents = tensor.shape.iter().enumerate();
        let extents = extents.map(|(axis, extent)| size(axis, extent));
        code.line(format!(
            "const View<{axes}> {name}{{0, {}, {{{}}}, {{{}}}}};",
            size(0, first),
            comma(extents),
            comma(strides)
        ));
        before += 2 * axes;
    }
}
