//! From a section to the text of a kernel: a call of `warplink/steps.cuh` for each step.
//!
//! Rank, world, lanes, threads, types and operators are constants of the kernel, and whether tensors are
//! aligned. Sizes, and the integers around the section, are variables that come with the launch, so one
//! kernel serves all sizes. Loops stay loops; lists of sources and targets are written out.
//!
//! | module | subject |
//! |---|---|
//! | [`emit`] | steps as text |
//! | [`scope`] | names, and expressions over them |
//! | [`range`] | between which values integers lie |
//! | [`hazard`] | where the threads of a lane have to be synchronized |
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

/// The name of the kernel.
pub(crate) const KERNEL: &str = "section";

/// Words of a lane's times before those of its steps.
pub(crate) const TIMES_HEADER: usize = 3;

/// The most bytes that a launch passes by value.
const MAX_WORDS: usize = 500;

/// The largest tensor, so that a step counts its packets in 32 bits: those of 16 bytes, or of 8, which hold 4 of data.
pub(crate) const MAX_TENSOR_BYTES: usize = 16 << 30;
const MAX_TENSOR_BYTES_OF_PACKETS8: usize = 8 << 30;

/// What a launch is bound to.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    /// Where each tensor of the section starts on each rank; 0 where it is not reached.
    pub(crate) tensors: Vec<Vec<u64>>,
    /// Each rank's signals.
    pub(crate) signals: Vec<u64>,
    /// The epochs of all lanes.
    pub(crate) epochs: u64,
    /// How many epochs there are: the most lanes of all kernels that share them.
    pub(crate) lanes: u64,
    /// The tables of what ranks have published; 0 where there are none.
    pub(crate) tables: u64,
}

/// The first word of where a tensor lies that peers do not reach: no number of an allocation.
pub(crate) const UNPUBLISHED: u64 = u64::MAX;

impl Addresses {
    /// For each tensor of `instance`, whether it starts at a multiple of 16 bytes wherever it is reached, and
    /// its rows too.
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

    /// From which word of a launch on it is said where the tensors that are announced lie: for each, the number of
    /// its allocation among those that this rank has published, and from which byte of it.
    pub(crate) fn first_place(&self, instance: &SectionInstance) -> usize {
        (instance.tensors.len() + 1) * instance.world + 3
    }

    /// The words of a launch of `instance`.
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

/// The kernel of `instance`, as CUDA C++, where `aligned` says of each tensor what
/// [`Addresses::aligned`] does.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for what kernels cannot do, with its place.
pub(crate) fn text(instance: &SectionInstance, aligned: &[bool]) -> Result<String> {
    write(instance, aligned, false)
}

/// As [`text`], for a kernel that stores when each step starts. Its words have two more: where the times of all
/// lanes go, and for how many steps of each there is room. Those of a lane are [`TIMES_HEADER`] words, how many
/// steps there are, when the last ended, and the epoch; then for each step when it started, and where it stands,
/// the line in the upper half. Times are in nanoseconds of a clock of the device.
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
        // All sizes and indices fit.
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

/// The element type's name in `warplink/elements.cuh`: as its own, where a float of 8 bits is named by its format alone.
fn element_name(dtype: DType) -> String {
    let name = dtype.name();
    let (first, rest) = name.strip_prefix("f8").unwrap_or(name).split_at(1);
    first.to_ascii_uppercase() + rest
}

/// The operator's name there.
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

/// Which tensor is too large for a kernel, in words.
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

/// From the first element of a tensor to behind its last, in elements.
fn span(tensor: &SectionTensor) -> usize {
    let axes = tensor.shape.iter().zip(&tensor.strides);
    axes.map(|(extent, stride)| extent.saturating_mul(*stride))
        .max()
        .unwrap_or(1)
}

/// Whether the integer `name` is a constant of the kernel, and which.
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

/// The integers that come with the launch, and their names in the kernel.
fn variables(instance: &SectionInstance) -> impl Iterator<Item = (String, i64)> {
    let integers = instance.integers.iter();
    integers
        .filter(|(name, _)| constant(instance, name).is_none())
        .map(|(name, value)| (Scope::spell(name), *value))
}

/// The names of the section outside of its body.
fn names(instance: &SectionInstance) -> Scope {
    let mut scope = Scope::default();
    for (name, value) in &instance.integers {
        match constant(instance, name) {
            Some(constant) => scope.bind(name, constant, Some(*value)),
            None => {
                // Its sign and size are those of this launch: others may have other texts.
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
    // It is taken modulo the period, which changes nothing where it may be used.
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

/// The structure that a launch passes, in the order of [`Addresses::words`].
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

/// The extents and strides of tensors: each value once, so that the kernel computes with equal ones once, unless
/// sizes vary. Strides of 1 are constants of the kernel.
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

/// The integers and tensors around the section, as variables of the kernel.
fn declare(code: &mut Code, instance: &SectionInstance) {
    for (name, _) in variables(instance) {
        code.line(format!("const Index {name} = at.{name};"));
    }
    let sizes = sizes(instance);
    // Of the tensors before.
    let mut before = 0;
    for tensor in &instance.tensors {
        let (name, axes) = (Scope::spell(&tensor.name), tensor.shape.len());
        // The extent, or from `axes` on the stride, of that number.
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
