//! Kernels beside the collective engine: a device that has no room for both must not be able to start them in
//! different orders on different ranks.

use proptest::prelude::*;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt::Write as _;
use warplink::program::{Diagnostic, DiagnosticKind, Parameters, Program, verify};

/// The verdict on a program with the statements of `body`.
fn verdict(body: &str, world: usize) -> Result<(), Vec<Diagnostic>> {
    let text = format!(
        "program beside(n) {{\ninput X: f32[n]\noutput Y: f32[n]\noutput Z: f32[n]\nallocate R: f32[n]\n{body}\n}}"
    );
    let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    verify(&program, world, 2, &Parameters::new().with("n", 40)).map(|_| ())
}

/// A kernel whose lanes wait for those of all other ranks.
const KERNEL: &str = "kernel lane in 0..2 threads 32 {
        barrier
        Y[lane of 2] = copy(X[lane of 2])
    }";

/// The same where no lane waits.
const ALONE: &str = "kernel lane in 0..2 threads 32 { Y[lane of 2] = copy(X[lane of 2]) }";

/// Words of the finding.
const NO_ORDER: &str = "in no order with";

fn refused(body: &str, world: usize, kind: DiagnosticKind, words: &str) {
    let Err(found) = verdict(body, world) else {
        panic!("passes for {world} ranks:\n{body}");
    };
    let first = &found[0];
    assert!(first.kind == kind, "{first}");
    assert!(first.message.contains(words), "{first}");
}

fn accepted(body: &str, world: usize) {
    if let Err(found) = verdict(body, world) {
        panic!("{world} ranks: {}\n{body}", found[0]);
    }
}

#[test]
fn a_kernel_that_waits_is_refused_beside_a_collective() {
    for world in [2, 3] {
        let body = format!(
            "fork pool(0), pool(1) {{
                set_stream pool(0)
                {KERNEL}
                set_stream pool(1)
                Z = all_reduce(X, sum)
            }}"
        );
        refused(&body, world, DiagnosticKind::Deadlock, NO_ORDER);
    }
    let packets = "scratch P: packets16 f32[2, n]
        fork pool(0), pool(1) {
            set_stream pool(0)
            kernel lane in 0..2 threads 32 {
                put X[lane of 2] to P[epoch % 2][lane of 2] on 1 - rank
                Y[lane of 2] = reduce(X[lane of 2], P[epoch % 2][lane of 2], sum)
            }
            set_stream pool(1)
            Z = all_reduce(X, sum)
        }";
    refused(packets, 2, DiagnosticKind::Deadlock, NO_ORDER);
}

#[test]
fn an_order_that_one_rank_lacks_is_none() {
    for lacks in 0..3 {
        let body = format!(
            "fork pool(0), pool(1) {{
                set_stream pool(0)
                {KERNEL}
                set_stream pool(1)
                if rank != {lacks} {{ synchronize pool(0) }}
                Z = all_reduce(X, sum)
            }}"
        );
        refused(&body, 3, DiagnosticKind::Deadlock, NO_ORDER);
    }
}

#[test]
fn a_transfer_of_the_engine_is_like_a_collective() {
    let body = format!(
        "let next = (rank + 1) % world
        let previous = (rank - 1) % world
        share {{
            s = send X to next via nccl
            r = receive R from previous via nccl
        }}
        fork pool(0), pool(1) {{
            set_stream pool(0)
            {KERNEL}
            set_stream pool(1)
            post s, r
            wait s, r
            Z = copy(R)
        }}"
    );
    for world in [2, 3] {
        refused(&body, world, DiagnosticKind::Deadlock, NO_ORDER);
        accepted(&body.replace(KERNEL, ALONE), world);
        accepted(&body.replace("via nccl", "via put"), world);
        let ordered = body.replace("post s, r", "synchronize pool(0)\npost s, r");
        accepted(&ordered, world);
    }
}

/// A run that comes after another starts its kernel when the kernel's stream is ready, if it waits for nothing.
#[test]
fn a_kernel_comes_after_the_run_before() {
    let waits = "kernel lane in 0..2 threads 32 { barrier }";
    let body = |kernel: &str, forked: &str| {
        format!(
            "set_stream pool(0)
            {forked}
            {kernel}
            set_stream caller
            synchronize pool(0)
            Y = all_reduce(X, sum)
            Z = copy(X)"
        )
    };
    let unforked = body(waits, "");
    refused(&unforked, 2, DiagnosticKind::Deadlock, "of the run before");
    accepted(&body(waits, "synchronize caller"), 2);
    accepted(&unforked.replace("all_reduce(X, sum)", "copy(X)"), 2);
    let another = format!("{unforked}\n{waits}").replace("all_reduce(X, sum)", "copy(X)");
    refused(&another, 2, DiagnosticKind::Race, "of the run before");
}

#[test]
fn what_is_ordered_or_waits_for_nobody_is_accepted() {
    let beside = format!(
        "fork pool(0), pool(1) {{
            set_stream pool(0)
            {KERNEL}
            set_stream pool(1)
            Z = all_reduce(X, sum)
        }}"
    );
    for world in [1, 2, 3] {
        accepted(&beside.replace(KERNEL, ALONE), world);
        let synchronized = beside.replace("Z = all", "synchronize pool(0)\nZ = all");
        accepted(&synchronized, world);
    }
    // A collective of one rank waits for nobody.
    accepted(&beside, 1);
    let alone = "let own = [rank]\n".to_owned() + &beside;
    accepted(&alone.replace("sum)", "sum) among own"), 3);
    // Ranks that wait in the kernel for one another, and others that meet in the collective.
    let parted = "let pair = [2, 3]
        fork pool(0), pool(1) {
            set_stream pool(0)
            kernel lane in 0..2 threads 32 {
                if rank < 2 {
                    signal 1 - rank
                    wait 1 - rank
                }
                Y[lane of 2] = copy(X[lane of 2])
            }
            set_stream pool(1)
            if rank >= 2 { Z = all_reduce(X, sum) among pair } else { Z = copy(X) }
        }";
    accepted(parted, 4);
    let meets = "Z = all_reduce(X, sum) among pair";
    let met = parted.replace("[2, 3]", "[1, 2]").replace(
        &format!("if rank >= 2 {{ {meets} }}"),
        &format!("if rank == 1 {{ {meets} }} else if rank == 2 {{ {meets} }}"),
    );
    refused(&met, 4, DiagnosticKind::Deadlock, NO_ORDER);
}

/// The engine runs its operations one after another, so what comes before one comes before the next.
#[test]
fn the_order_of_the_engine_counts() {
    let forked =
        |streams: &str| format!("allocate A: f32[n]\n fork pool(0), pool(1) {{\n {streams}\n }}");
    let sum = "A = all_reduce(X, sum)";
    let max = "set_stream pool(1)\n Z = all_reduce(X, max)";
    let before = forked(&format!("set_stream pool(0)\n {KERNEL}\n {sum}\n {max}"));
    accepted(&before, 3);
    let after = forked(&format!("{max}\n set_stream pool(0)\n {sum}\n {KERNEL}"));
    accepted(&after, 3);
    // The kernel comes before the engine's second operation, and is in no order with its first.
    let late = forked(&format!("{max}\n set_stream pool(0)\n {KERNEL}\n {sum}"));
    refused(&late, 3, DiagnosticKind::Deadlock, NO_ORDER);
}

/// A statement of a random program, and its stream.
#[derive(Clone, Debug)]
struct Statement {
    stream: usize,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What {
    /// A kernel with a barrier, by number.
    Kernel(usize),
    /// A collective of all ranks, or of ranks 0 and 1.
    Collective(usize, bool),
    /// The stream waits for what another was given before; not on the rank named.
    Synchronize(usize, Option<usize>),
}

const STREAMS: [&str; 3] = ["caller", "pool(0)", "pool(1)"];

fn statements() -> impl Strategy<Value = Vec<Statement>> {
    let what = prop_oneof![
        2 => Just(What::Kernel(0)),
        3 => any::<bool>().prop_map(|all| What::Collective(0, all)),
        4 => (0..3_usize, prop_oneof![3 => Just(None), 1 => (0..3_usize).prop_map(Some)])
            .prop_map(|(other, not_on)| What::Synchronize(other, not_on)),
    ];
    let one = (0..3_usize, what).prop_map(|(stream, mut what)| {
        // A stream does not wait for itself.
        if let What::Synchronize(other, _) = &mut what {
            *other = (*other + usize::from(*other == stream)) % 3;
        }
        Statement { stream, what }
    });
    proptest::collection::vec(one, 2..8).prop_map(|mut list| {
        for (number, statement) in list.iter_mut().enumerate() {
            match &mut statement.what {
                What::Kernel(own) | What::Collective(own, _) => *own = number,
                What::Synchronize(..) => {}
            }
        }
        list
    })
}

/// The statements on streams that are forked from the caller's and joined to it.
fn text(statements: &[Statement]) -> String {
    let mut body = String::from("let pair = [0, 1]\nfork pool(0), pool(1) {\n");
    let mut outputs = String::new();
    for Statement { stream, what } in statements {
        let _ = writeln!(body, "set_stream {}", STREAMS[*stream]);
        let _ = match what {
            What::Kernel(_) => writeln!(body, "kernel lane in 0..2 threads 32 {{ barrier }}"),
            What::Collective(number, all) => {
                let _ = writeln!(outputs, "allocate A{number}: f32[n]");
                if *all {
                    writeln!(body, "A{number} = all_reduce(X, sum)")
                } else {
                    writeln!(
                        body,
                        "if rank < 2 {{ A{number} = all_reduce(X, sum) among pair }}"
                    )
                }
            }
            What::Synchronize(other, not_on) => {
                let skipped = not_on.map_or(-1, |rank| rank as i64);
                let other = STREAMS[*other];
                writeln!(body, "if rank != {skipped} {{ synchronize {other} }}")
            }
        };
    }
    body += "}\nY = copy(X)\nZ = copy(X)";
    outputs + &body
}

/// Devices with room for one kernel or collective at a time.
struct Devices {
    world: usize,
    /// For each rank and stream, what it was given: holders, marks, and waits for marks.
    queues: Vec<[Vec<Item>; 3]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Hold(What),
    /// Behind so many items of the stream.
    After(usize, usize),
}

/// How far each stream has come, and what holds room on each rank.
type State = (Vec<[usize; 3]>, Vec<Option<(usize, What)>>);

impl Devices {
    fn new(statements: &[Statement], world: usize) -> Self {
        let mut queues = vec![<[Vec<Item>; 3]>::default(); world];
        for (rank, streams) in queues.iter_mut().enumerate() {
            for Statement { stream, what } in statements {
                match *what {
                    What::Synchronize(other, not_on) => {
                        if not_on != Some(rank) {
                            let mark = Item::After(other, streams[other].len());
                            streams[*stream].push(mark);
                        }
                    }
                    What::Collective(_, false) if rank >= 2 => {}
                    _ => streams[*stream].push(Item::Hold(*what)),
                }
            }
        }
        Self { world, queues }
    }

    fn members(&self, what: What) -> usize {
        match what {
            What::Collective(_, false) => 2,
            _ => self.world,
        }
    }

    /// Whether the engine's operations before this one are done on a rank.
    fn is_turn(&self, rank: usize, progress: &[usize; 3], what: What) -> bool {
        let What::Collective(number, _) = what else {
            return true;
        };
        let queues = self.queues[rank].iter().zip(progress);
        let mut left = queues.flat_map(|(queue, done)| &queue[*done..]);
        !left.any(|item| matches!(item, Item::Hold(What::Collective(other, _)) if *other < number))
    }

    /// Whether some order of starts ends where nothing can go on.
    fn may_get_stuck(&self) -> bool {
        let start: State = (vec![[0; 3]; self.world], vec![None; self.world]);
        let (mut seen, mut open) = (HashSet::from([start.clone()]), vec![start]);
        while let Some(state) = open.pop() {
            let next = self.next(&state);
            let mut queues = state.0.iter().zip(&self.queues);
            let over = queues.all(|(progress, queues)| {
                let mut streams = progress.iter().zip(queues);
                streams.all(|(done, queue)| *done == queue.len())
            });
            if next.is_empty() && !over {
                return true;
            }
            open.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
        }
        false
    }

    fn next(&self, (progress, holders): &State) -> Vec<State> {
        let mut next = Vec::new();
        for rank in 0..self.world {
            for stream in 0..3 {
                let done = progress[rank][stream];
                let mut state = (progress.clone(), holders.clone());
                match self.queues[rank][stream].get(done) {
                    Some(Item::After(other, count)) if progress[rank][*other] >= *count => {
                        state.0[rank][stream] += 1;
                        next.push(state);
                    }
                    Some(Item::Hold(what))
                        if holders[rank].is_none()
                            && self.is_turn(rank, &progress[rank], *what) =>
                    {
                        state.1[rank] = Some((stream, *what));
                        next.push(state);
                    }
                    _ => {}
                }
            }
        }
        // What all of its ranks have started ends.
        for holder in holders.iter().flatten() {
            let what = holder.1;
            let same = |other: &Option<(usize, What)>| other.is_some_and(|(_, held)| held == what);
            if holders.iter().filter(|other| same(other)).count() == self.members(what) {
                let mut state = (progress.clone(), holders.clone());
                for rank in (0..self.world).filter(|rank| same(&holders[*rank])) {
                    if let Some((stream, _)) = state.1[rank].take() {
                        state.0[rank][stream] += 1;
                    }
                }
                next.push(state);
            }
        }
        next
    }
}

/// Random orders that the verifier refuses, and no others, may hang on devices with space for one at a time.
#[test]
fn what_is_refused_may_get_stuck_and_nothing_else() {
    let [stuck, fine] = [const { Cell::new(0_usize) }; 2];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(1500)
    });
    let cases = (statements(), 2..4_usize);
    runner
        .run(&cases, |(statements, world)| {
            let verdict = verdict(&text(&statements), world);
            let refused = match &verdict {
                Ok(()) => false,
                // Kernels share a workspace, whether or not they have room.
                Err(found) if found.iter().any(|d| d.kind != DiagnosticKind::Deadlock) => {
                    return Ok(());
                }
                Err(_) => true,
            };
            let may = Devices::new(&statements, world).may_get_stuck();
            prop_assert_eq!(refused, may, "{} ranks: {:?}", world, verdict);
            let count = if may { &stuck } else { &fine };
            count.set(count.get() + 1);
            Ok(())
        })
        .unwrap();
    let (stuck, fine) = (stuck.get(), fine.get());
    println!("{stuck} may get stuck, {fine} may not");
    assert!(stuck > 100 && fine > 100, "{stuck}, {fine}");
}
