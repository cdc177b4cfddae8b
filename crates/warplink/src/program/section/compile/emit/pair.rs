//! The kernel of messages between pairs of ranks: the sections of a program's two ranks, of which a launch runs many.

use super::code::Code;
use super::kernel::{check, names, refused, view};
use super::{Emitter, Refusal};
use crate::error::Result;
use crate::named::comma;
use crate::program::section::compile::scope::Scope;
use crate::program::section::compile::{KERNEL, PairLayout};
use crate::program::section::{SectionInstance, SectionMemory};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The kernel of both sections, which differ in the rank only. All of their sizes and integers are constants.
///
/// # Errors
/// As [`kernel`](super::kernel()).
pub(in crate::program::section::compile) fn pair(
    sections: &[Arc<SectionInstance>; 2],
    layout: &PairLayout,
    counts: &[&str],
) -> Result<String> {
    let first = &*sections[0];
    let mut roles = Vec::new();
    for section in sections {
        check(section)?;
        roles.push(role(section)?);
    }
    if first.world != 2 || first.blocks > 1 || !first.functions.is_empty() {
        return refused(
            "a program of pairs with functions of rows, lanes of several blocks, or other than two ranks".to_owned(),
            "use two ranks, and moves of data",
        );
    }
    let (lanes, threads) = (first.lanes, first.threads);
    let mut code = Code::default();
    code.line(format!(
        "// A kernel of messages between pairs of ranks, each of up to {lanes} lanes of {threads} threads."
    ));
    // The memory of a message may start anywhere.
    code.line("#define WARPLINK_ANY_ALIGNMENT");
    code.line(format!(
        "#define WARPLINK_MAX_MESSAGES {}",
        layout.max_messages
    ));
    code.line("#include <warplink/pairs.cuh>");
    code.line("");
    code.line("using namespace warplink;");
    code.line("");
    code.line(format!(
        "constexpr Index world = 2, lanes = {lanes}, threads = {threads};"
    ));
    code.line("");
    binding(&mut code, first);
    code.line("");
    code.open(format!(
        "extern \"C\" __global__ void __launch_bounds__(threads) {KERNEL}(const __grid_constant__ Messages all, u64 signals) {{"
    ));
    code.line("const Line line(all);");
    code.line("const u64 verdict = all.counts + 8 * lanes * 2 * all.world + detail::verdict_bytes * line.number;");
    code.line("Lane self(signals, all.counts + 8 * lanes * line.number, line.lane);");
    code.line("self.count();");
    let lane = Scope::spell(&first.section.lane);
    code.line(format!("const Index {lane} = line.lane;"));
    code.line("const u32 number = world * lanes * line.peer;");
    if roles.iter().any(|role| role.waits) {
        code.line(format!(
            "Inbound<world> inbound(Signals{{signals}}, number + world * {lane});"
        ));
    }
    if roles.iter().any(|role| role.signals) {
        code.line(format!(
            "PairOutbound outbound(Signals{{signals}}, number + world * {lane} + 1 - line.role);"
        ));
    }
    let announced = first.announced().len();
    if announced > 0 {
        code.line(format!("__shared__ Located<world> located[{announced}];"));
    }
    let memory = first.tensors.iter().enumerate();
    for (_, tensor) in memory.filter(|(number, _)| first.carried != Some(*number)) {
        code.line(view(tensor, |_, size| size.to_string()));
    }
    // A copy of both ends' code for each message would make the kernel much larger.
    code.line("#pragma unroll 1");
    code.open("for (u32 i = line.first; i < (u32)all.count; i++) {");
    code.line("const Message &message = all.message[i];");
    code.line("if (!line.has(message)) continue;");
    code.line("if (i != line.first) line.next(self);");
    for (number, role) in roles.iter().enumerate() {
        // The role is the same in the whole block, so the branch never diverges within a warp.
        let condition = ["if (line.role == 0) ", ""][number];
        code.alternative(number > 0, condition);
        bind(&mut code, (first, layout), counts, number);
        code.append(&role.steps);
    }
    code.close("}");
    code.line("self.launches++;");
    // As between two launches: steps of the next message come after all of this one's.
    code.line("self.agree();");
    code.close("}");
    if roles.iter().any(|role| role.waits) {
        code.line("inbound.finish();");
    }
    code.line("line.finish(self, lanes);");
    code.close("}");
    Ok(code.into_text())
}

/// The steps of one of the two ranks.
struct EndSteps {
    steps: Code,
    waits: bool,
    signals: bool,
}

fn role(section: &SectionInstance) -> Result<EndSteps> {
    let tensors = 0..section.tensors.len();
    let aligned: Vec<bool> = tensors
        // Scratch is aligned by its layout; the callers' memory may start anywhere.
        .map(|tensor| section.scratch_of(tensor).is_some())
        .collect();
    let mut scope = names(section);
    for (name, value) in &section.integers {
        scope.bind(name, value.to_string(), Some(*value));
    }
    let mut emitter = Emitter::new(section, &aligned, scope, BTreeSet::new());
    emitter.paired = true;
    let mut steps = Code::default();
    let done: std::result::Result<(), Refusal> = emitter.body(&mut steps, &section.section.body);
    done?;
    let mut declared = Code::default();
    emitter.declare_searches(&mut declared);
    emitter.declare_announced(&mut declared);
    declared.append(&steps);
    if emitter.shares_words {
        return refused(
            "a program of pairs with signals to other lanes".to_owned(),
            "signal the lane of the same number",
        );
    }
    Ok(EndSteps {
        steps: declared,
        waits: emitter.waits,
        signals: emitter.signals,
    })
}

/// The structure of a message's addresses.
fn binding(code: &mut Code, instance: &SectionInstance) {
    code.line("// Where tensors start on both ranks of a message, and the words that it carries.");
    code.open("struct Binding {");
    let carried = |number: usize| instance.carried == Some(number);
    let names = instance.tensors.iter().enumerate();
    let names = names.filter(|(number, _)| !carried(*number));
    let bases = names.map(|(_, tensor)| format!("{}[world]", Scope::spell(&tensor.name)));
    let bases = bases.chain(["signals[world]".to_owned()]);
    code.line(format!("u64 {};", comma(bases)));
    let places = instance.announced().len();
    if places > 0 {
        code.line(format!("u64 tables, own_tables, place[{places}][2];"));
    }
    code.line("u64 verdict, direct;");
    if let Some(carried) = instance.carried {
        let name = Scope::spell(&instance.tensors[carried].name);
        code.line(format!("i64 {name}[carried_words];"));
    }
    code.close("};");
}

/// Fills that structure for one of the two ranks.
fn bind(
    code: &mut Code,
    (instance, layout): (&SectionInstance, &PairLayout),
    counts: &[&str],
    rank: usize,
) {
    let peer = 1 - rank;
    code.line(format!("constexpr Index rank = {rank};"));
    code.line(format!(
        "const u64 own = all.workspace[all.rank] + {}ull * line.peer, theirs = all.workspace[line.peer] + {}ull * all.rank;",
        layout.region, layout.region
    ));
    code.line("Binding at;");
    for (number, tensor) in instance.tensors.iter().enumerate() {
        let name = Scope::spell(&tensor.name);
        if instance.carried == Some(number) {
            code.line("#pragma unroll");
            code.line(format!(
                "for (u32 word = 0; word < carried_words; word++) at.{name}[word] = message.carried[word];"
            ));
            continue;
        }
        match tensor.memory {
            SectionMemory::Scratch(id) => {
                let scratch = &instance.scratch[id];
                let area = layout.layout.area(scratch.packing).offset_bytes;
                let offset = area + scratch.offset_bytes;
                code.line(format!(
                    "at.{name}[{rank}] = own + {offset}, at.{name}[{peer}] = theirs + {offset};"
                ));
            }
            SectionMemory::Tensor(_) => {
                let memory = if counts.contains(&&*tensor.name) {
                    "message.count"
                } else {
                    "message.data"
                };
                code.line(format!(
                    "at.{name}[{rank}] = {memory}, at.{name}[{peer}] = 0;"
                ));
            }
        }
    }
    code.line(format!(
        "at.signals[{rank}] = signals + detail::signal_bytes * number;"
    ));
    code.line(format!(
        "at.signals[{peer}] = all.signals[line.peer] + detail::signal_bytes * world * lanes * all.rank;"
    ));
    for place in 0..instance.announced().len() {
        if place == 0 {
            code.line("at.tables = line.peer_tables(all), at.own_tables = line.own_tables(all);");
        }
        code.line(format!(
            "at.place[{place}][0] = (message.published >> detail::offset_bits) - 1, at.place[{place}][1] = message.published & ((1ull << detail::offset_bits) - 1);"
        ));
    }
    code.line("at.verdict = verdict, at.direct = all.direct;");
    code.line(
        "const auto word = [&](Index peer, Index to) { return at.signals[peer] + detail::signal_bytes * (1 + world * to + rank); };",
    );
}
