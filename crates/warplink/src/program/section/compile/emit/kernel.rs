//! The text around the steps of a kernel: its function, its arguments and its tensors.

use super::code::Code;
use super::{Emitter, MAX_PLACES, divided};
use crate::error::{Error, Result};
use crate::named::comma;
use crate::program::expr::{self, Expr};
use crate::program::section::compile::range::Range;
use crate::program::section::compile::scope::Scope;
use crate::program::section::compile::{KERNEL, constant, sizes, span, too_large, variables};
use crate::program::section::{SectionInstance, SectionTensor};
use std::collections::BTreeSet;

/// Maximum size of the arguments that a launch passes by value, in words; leaves room below CUDA's 4 KiB limit.
const MAX_WORDS: usize = 500;

/// The kernel of `instance`. A `traced` one records the start time of each step.
///
/// # Errors
/// [`ErrorKind::Unsupported`] with its place, if kernels cannot perform a step.
pub(in crate::program::section::compile) fn kernel(
    instance: &SectionInstance,
    aligned: &[bool],
    traced: bool,
) -> Result<String> {
    check(instance)?;
    let SectionInstance {
        section,
        rank,
        world,
        lanes,
        threads,
        blocks,
        period,
        ..
    } = instance;
    let mut steps = Code::default();
    // The times of a lane's steps are those of its first thread, which would not have all of them.
    let divided = if traced {
        BTreeSet::new()
    } else {
        divided::loops(instance)
    };
    let mut emitter = Emitter::new(instance, aligned, names(instance), divided);
    emitter.traced = traced;
    emitter.body(&mut steps, &section.body)?;
    if *blocks > 1
        && (emitter.waits
            || emitter.signals
            || traced
            || !emitter.announced.is_empty()
            || !instance.read_as_values().is_empty())
    {
        return refused(
            format!("lanes of {blocks} blocks with signals, values, announced tensors or times"),
            "use lanes of one block",
        );
    }
    // Half of 31 bits, so that the sum of an offset within a tensor and an extent does not overflow.
    let narrow = emitter.is_narrow() && instance.tensors.iter().all(|t| span(t) <= 1 << 30);
    let lane = Scope::spell(&section.lane);

    let mut code = Code::default();
    let (any, lanes) = if instance.sizes_vary {
        (String::new(), String::new())
    } else {
        (format!("{lanes} "), format!(", lanes = {lanes}"))
    };
    code.line(format!(
        "// A kernel of {any}lanes of {threads} threads, for rank {rank} of {world}."
    ));
    if narrow {
        // All sizes and indices fit in 32 bits.
        code.line("#define WARPLINK_INDEX int");
    }
    if *blocks > 1 {
        code.line(format!("#define WARPLINK_LANE_BLOCKS {blocks}"));
    }
    code.line("#include <warplink/sections.cuh>");
    code.line("");
    code.line("using namespace warplink;");
    code.line("");
    code.line(format!(
        "constexpr Index rank = {rank}, world = {world}{lanes}, threads = {threads};"
    ));
    code.line("");
    binding(&mut code, instance, traced)?;
    code.line("");
    let bounds = if *blocks > 1 {
        "__cluster_dims__(lane_blocks, 1, 1) __launch_bounds__(threads / lane_blocks)"
    } else {
        "__launch_bounds__(threads)"
    };
    code.open(format!(
        // `__grid_constant__`: arrays in the arguments can be indexed in constant memory, where the compiler would
        // otherwise copy them to local memory.
        "extern \"C\" __global__ void {bounds} {KERNEL}(const __grid_constant__ Binding at, u64 signals) {{"
    ));
    code.line("Lane self(signals, at.epochs);");
    if *period <= 1 {
        // Before anything waits. Steps that need the launch's turn count where they do, which can be behind other loads.
        code.line("self.count();");
    }
    code.line(if *blocks > 1 {
        format!("const Index {lane} = blockIdx.x / lane_blocks;")
    } else {
        format!("const Index {lane} = blockIdx.x;")
    });
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
        // If several lanes increment one word, no lane can count its signals on its own, so the counts are in memory.
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
    emitter.declare_searches(&mut code);
    emitter.declare_announced(&mut code);
    // The body was emitted first, since the declarations above depend on what it uses.
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

pub(super) fn refused<T>(text: String, help: &'static str) -> Result<T> {
    Err(Error::unsupported(text)
        .with_operation("compile a kernel section")
        .with_help(help))
}

pub(super) fn check(instance: &SectionInstance) -> Result<()> {
    let mut factors = instance.operators.values().filter_map(|op| op.factor());
    // The factor is one launch argument, so that a kernel serves all factors.
    if factors.any(|factor| Some(factor) != instance.factor()) {
        let text = "a kernel with several factors; expected the same in all sums".to_owned();
        return refused(text, "use one factor, or several kernels");
    }
    let world = instance.world;
    if world > MAX_PLACES {
        let text = format!("a kernel for {world} ranks; expected at most {MAX_PLACES}");
        return refused(text, "run it on fewer ranks");
    }
    // Signals and announcements use one thread for each rank.
    if instance.threads < world || !instance.threads.is_multiple_of(32 * instance.blocks) {
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

/// Names visible to the section's body from outside.
pub(super) fn names(instance: &SectionInstance) -> Scope {
    let mut scope = Scope::default();
    for (name, value) in &instance.integers {
        match constant(instance, name) {
            Some(constant) => scope.bind(name, constant, Some(*value)),
            None => {
                // Range from the sign and size in this launch; launches with other ranges may need another kernel
                // text.
                let least = match &instance.section.lanes {
                    // A launch has lanes.
                    Expr::Name(lanes) if lanes == name => 1,
                    _ => (*value).min(0),
                };
                let range = Range::of(least.into(), (*value).max(0).into());
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
        let epoch = format!("Index(self.turn<{}>())", instance.period);
        scope.bind_within("epoch", epoch, None, below(instance.period));
    } else {
        // With a period of 1, no integer of the section depends on it, so any value will do.
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
        return Err(Error::unsupported(format!(
            "a launch has {words} words of addresses and sizes; expected at most {MAX_WORDS}"
        ))
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
    let integers = comma(variables(instance).map(|(name, _)| Scope::spell(name)));
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

/// Declares the integers and tensors around the section as variables of the kernel.
fn declare(code: &mut Code, instance: &SectionInstance) {
    for (name, _) in variables(instance) {
        let name = Scope::spell(name);
        code.line(format!("const Index {name} = at.{name};"));
    }
    let sizes = sizes(instance);
    // Number of sizes of the preceding tensors.
    let mut before = 0;
    for tensor in &instance.tensors {
        let axes = tensor.shape.len();
        code.line(view(tensor, |place, value| {
            if place + 1 == 2 * axes && value == 1 {
                return "1".to_owned();
            }
            // If sizes vary between launches, two that are equal here may differ in the next launch, so each has its
            // own argument.
            let number = if instance.sizes_vary {
                Some(before + place)
            } else {
                sizes.iter().position(|size| *size == value)
            };
            format!("(Index)at.size[{}]", number.unwrap_or(0))
        }));
        before += 2 * axes;
    }
}

/// The declaration of a tensor; `spell` gives the text of its sizes by their number: extents, then strides.
pub(super) fn view(tensor: &SectionTensor, spell: impl Fn(usize, usize) -> String) -> String {
    let (name, axes) = (Scope::spell(&tensor.name), tensor.shape.len());
    if axes == 0 {
        return format!("const View<0> {name}{{0}};");
    }
    let sizes = tensor.shape.iter().chain(&tensor.strides).enumerate();
    let sizes: Vec<String> = sizes.map(|(number, size)| spell(number, *size)).collect();
    let (extents, strides) = sizes.split_at(axes);
    format!(
        "const View<{axes}> {name}{{0, {}, {{{}}}, {{{}}}}};",
        extents[0],
        comma(extents),
        comma(strides)
    )
}
