//! Whether the verifier's word on a program is what happens: of an accepted one, that every order gives
//! the same; of a refused one, that it hangs, that an order of accesses is left open, or that a rule is
//! broken, shown without the verifier.

use super::interpreter::{
    Engine, Fault, Hold, Interpreter, RUNS, SOME_VALUES, Schedule, Submission, agreed, elements_of,
    race,
};
use super::meaning::Meaning;
use super::sample::Sample;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use warplink::program::evaluate::Evaluator;
use warplink::program::ir::Role;
use warplink::program::{
    Area, Backend, Diagnostic, DiagnosticKind, Direction, OperationKind, Range, RankProgram,
    TransferId,
};

/// How many orders of an accepted program are played, of each kind.
const ORDERS: u64 = 4;

/// How many random orders are tried where those that the diagnostic suggests show nothing.
const TRIES: u64 = 400;

/// Fails where some class of verdicts was not seen more than `least` times.
pub(crate) fn check_classes(classes: &BTreeMap<String, usize>, least: usize, wanted: &[&str]) {
    println!("{classes:#?}");
    for class in wanted {
        let count = classes.get(*class).copied().unwrap_or(0);
        assert!(count > least, "only {count} of '{class}'");
    }
}

/// A verdict that is right.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    /// The verdict and what shows it, for counting.
    pub(crate) class: String,
    /// Results of an accepted program.
    pub(crate) accepted: Option<Accepted>,
}

/// A program that runs.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    /// The programs of the ranks.
    pub(crate) ranks: Vec<RankProgram>,
    /// Whether it runs as a graph too.
    pub(crate) as_graph: bool,
    /// Outputs by run and rank.
    pub(crate) outputs: Vec<Vec<f64>>,
    /// The same by the library's own evaluation.
    pub(crate) meaning: Arc<Meaning>,
}

/// Shows that the verdict on `sample` is right.
///
/// # Errors
/// How the verdict and what happens disagree.
pub(crate) fn check(sample: &Sample) -> Result<Shown, String> {
    let verdict = sample.verdict();
    let unrolled: Result<Vec<RankProgram>, _> =
        (0..sample.world).map(|rank| sample.of_rank(rank)).collect();
    let ranks = match (unrolled, &verdict) {
        (Ok(ranks), _) => ranks,
        (Err(_), Err(diagnostics)) => {
            let class = format!("refused, rule: {} of one rank", diagnostics[0].kind);
            return Ok(Shown {
                class,
                accepted: None,
            });
        }
        (Err(error), Ok(_)) => return Err(format!("accepted, but not unrolled: {error}")),
    };
    let stage = Interpreter::new(&ranks);
    let case = Case {
        ranks: &ranks,
        stage: &stage,
    };
    match verdict {
        Ok(report) => {
            if let Some(diagnostic) = &report.eager_only
                && diagnostic.message.starts_with("as a graph")
            {
                case.stuck(Submission::Captured)
                    .map_err(|how| format!("{diagnostic}: {how}"))?;
            }
            let as_graph = report.eager_only.is_none();
            let outputs = case.runs(as_graph)?;
            let (world, streams) = (sample.world, sample.streams);
            let evaluator = Evaluator::new(&sample.program, world, streams, &sample.parameters)
                .map_err(|error| format!("accepted, but not evaluated: {error}"))?;
            let meaning = Arc::new(Meaning::of(
                (&evaluator, &ranks),
                RUNS,
                (SOME_VALUES, &outputs),
            )?);
            let class = if as_graph {
                "accepted"
            } else {
                "accepted, eagerly only"
            };
            Ok(Shown {
                class: class.to_owned(),
                accepted: Some(Accepted {
                    ranks,
                    as_graph,
                    outputs,
                    meaning,
                }),
            })
        }
        Err(diagnostics) => {
            if sample.changes == 0 {
                return Err(format!("unchanged, but refused: {}", diagnostics[0]));
            }
            let how = explained(&diagnostics, |diagnostic| case.shows(diagnostic))?;
            let class = format!("refused, {how}");
            Ok(Shown {
                class,
                accepted: None,
            })
        }
    }
}

/// Evidence for the first of these diagnostics; the next two are shown as well, but may follow from it.
///
/// # Errors
/// Which of them nothing shows, and why.
pub(crate) fn explained(
    diagnostics: &[Diagnostic],
    shows: impl Fn(&Diagnostic) -> Result<String, String>,
) -> Result<String, String> {
    let shown = diagnostics.iter().take(3).map(|diagnostic| {
        let shown = shows(diagnostic);
        shown.map_err(|how| format!("{diagnostic}: {how}"))
    });
    let shown: Vec<String> = shown.collect::<Result<_, _>>()?;
    Ok(shown.into_iter().next().unwrap_or_default())
}

/// Whether two areas of a rank have an element in common.
fn shares(program: &RankProgram, a: &Area, b: &Area) -> bool {
    let of_b = elements_of(program, b);
    let mut of_a = elements_of(program, a).into_iter();
    a.span.tensor == b.span.tensor && of_a.any(|element| of_b.contains(&element))
}

struct Case<'a> {
    ranks: &'a [RankProgram],
    stage: &'a Interpreter<'a>,
}

impl Case<'_> {
    /// Plays an accepted program in several orders, which must not matter; its outputs.
    fn runs(&self, as_graph: bool) -> Result<Vec<Vec<f64>>, String> {
        let graphs = as_graph.then_some(Submission::Captured);
        let submissions = [Submission::Eager].into_iter().chain(graphs);
        let orders =
            submissions.flat_map(|submission| (0..ORDERS).map(move |seed| (submission, seed)));
        let plays = orders.map(|(submission, seed)| {
            let schedule = Schedule::new(submission, seed).holding(self.some_holds(seed));
            let outcome = self.stage.play(&schedule);
            (schedule, outcome)
        });
        let outputs = agreed(plays, false)?;
        if outputs.iter().flatten().any(|value| !value.is_finite()) {
            return Err("accepted, but gives garbage".to_owned());
        }
        Ok(outputs)
    }

    /// A few operations to be done late, by some seed.
    fn some_holds(&self, seed: u64) -> Vec<Hold> {
        let mut random =
            super::interpreter::Random::new(seed ^ self.ranks[0].operations.len() as u64);
        let mut held = Vec::new();
        for _ in 0..seed.min(3) {
            let rank = random.below(self.ranks.len());
            let index = random.below(self.ranks[rank].operations.len());
            let posted = self.ranks[rank].operations[index].kind.posted();
            held.push(match random.below(6) {
                0 => Hold::Boundary { rank },
                1 | 2 => Hold::Accesses { rank, index },
                3 if !posted.is_empty() => Hold::Signals {
                    rank,
                    index,
                    transfer: posted[random.below(posted.len())],
                },
                _ => Hold::Operation { rank, index },
            });
        }
        held
    }

    fn stuck(&self, submission: Submission) -> Result<(), String> {
        for seed in 0..ORDERS {
            let schedule = Schedule::new(submission, seed).with_engine(Engine::OneByOne);
            if !self.stage.play(&schedule).stuck {
                return Err(format!("it ends: {schedule:?}"));
            }
        }
        Ok(())
    }

    /// Evidence for a diagnostic.
    fn shows(&self, diagnostic: &Diagnostic) -> Result<String, String> {
        let kind = diagnostic.kind;
        let rule = |broken: bool| {
            if broken {
                Ok(format!("rule: {kind}"))
            } else {
                Err("the rule is kept".to_owned())
            }
        };
        match kind {
            DiagnosticKind::Deadlock => {
                self.stuck(Submission::Eager)?;
                Ok("deadlock".to_owned())
            }
            DiagnosticKind::Race => self.race(diagnostic),
            DiagnosticKind::UnwrittenRead => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::UnwrittenRead { .. })
            }),
            DiagnosticKind::UnwrittenOutput => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::UnwrittenOutput { .. })
            }),
            DiagnosticKind::Unjoined => {
                self.fault(diagnostic, |fault| matches!(fault, Fault::LeftOver { .. }))
            }
            DiagnosticKind::UseAfterDeallocate => self
                .fault(diagnostic, |fault| {
                    matches!(fault, Fault::Deallocated { .. })
                })
                .or_else(|_| self.race(diagnostic)),
            DiagnosticKind::LostSignal => {
                if self.unequal_posts() {
                    return Ok("rule: as many posts of both ends".to_owned());
                }
                let backwards = self.fault(diagnostic, |fault| {
                    matches!(fault, Fault::SignalBackwards { .. })
                });
                // What took the newer signal for the older one may never come to the post of that.
                let stuck = |_| {
                    self.stuck(Submission::Eager)?;
                    Ok("lost-signal: deadlock".to_owned())
                };
                backwards.or_else(stuck).or_else(|how: String| {
                    if self.posts_again(diagnostic) {
                        return Ok("rule: posts again without waiting".to_owned());
                    }
                    Err(how)
                })
            }
            DiagnosticKind::AsymmetricExchange => rule(
                self.ends()
                    .any(|(rank, id)| self.stage.partner(rank, id).is_none()),
            ),
            DiagnosticKind::CollectiveOrder => rule(self.collectives_differ(false)),
            DiagnosticKind::Mismatch => rule(
                self.collectives_differ(true)
                    || self.ends_differ()
                    || self.engine_order_differs()
                    || self.interfaces_differ(),
            ),
            _ => Err("a kind that nothing shows".to_owned()),
        }
    }

    /// Whether two ranks name other inputs and outputs.
    fn interfaces_differ(&self) -> bool {
        let mut names = self.ranks.iter().map(|rank| {
            let outer = rank.tensors.iter();
            let outer = outer.filter(|tensor| tensor.role != Role::Local);
            outer.map(|tensor| &*tensor.name).collect::<Vec<_>>()
        });
        let first = names.next();
        names.any(|other| Some(other) != first)
    }

    /// The operations that a diagnostic names.
    fn operations(&self, diagnostic: &Diagnostic) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for place in &diagnostic.places {
            let operations = self.ranks[place.rank].operations.iter().enumerate();
            let here = operations.filter(|(_, operation)| operation.site == place.site);
            found.extend(here.map(|(index, _)| (place.rank, index)));
        }
        found.dedup();
        found
    }

    /// Orders that are likely to show a diagnostic, and then random ones.
    fn orders(&self, diagnostic: &Diagnostic) -> impl Iterator<Item = Schedule> {
        let operations = self.operations(diagnostic);
        let mut held: Vec<Hold> = Vec::new();
        for &(rank, index) in &operations {
            if diagnostic.kind == DiagnosticKind::LostSignal {
                let posted = self.ranks[rank].operations[index].kind.posted().iter();
                held.extend(posted.map(|&transfer| Hold::Signals {
                    rank,
                    index,
                    transfer,
                }));
            }
            held.push(Hold::Accesses { rank, index });
            held.push(Hold::Operation { rank, index });
        }
        held.extend((0..self.ranks.len()).map(|rank| Hold::Boundary { rank }));
        let engines = [Engine::AtOnce, Engine::OneByOne];
        let directed = held.into_iter().flat_map(move |hold| {
            engines.map(|engine| {
                let schedule = Schedule::new(Submission::Eager, 1);
                schedule.with_engine(engine).holding([hold])
            })
        });
        let random = (0..TRIES).map(|seed| Schedule::new(Submission::Eager, seed));
        directed.chain(random)
    }

    fn fault(
        &self,
        diagnostic: &Diagnostic,
        is: impl Fn(&Fault) -> bool,
    ) -> Result<String, String> {
        for schedule in self.orders(diagnostic) {
            if self.stage.play(&schedule).faults.iter().any(&is) {
                return Ok(diagnostic.kind.to_string());
            }
        }
        Err("no order shows it".to_owned())
    }

    /// Two orders that differ in their accesses to the same memory.
    fn race(&self, diagnostic: &Diagnostic) -> Result<String, String> {
        if self.is_in_place(diagnostic) {
            return Ok("rule: a target overlaps what is read".to_owned());
        }
        let orders = self.orders(diagnostic);
        race(orders.map(|schedule| self.stage.play(&schedule)), true)
    }

    /// Whether a diagnostic is of one operation, whose target overlaps what it reads.
    fn is_in_place(&self, diagnostic: &Diagnostic) -> bool {
        let operations = self.operations(diagnostic);
        let overlap = |a: &Range, b: &Range| {
            a.tensor == b.tensor && a.offset_bytes < b.end() && b.offset_bytes < a.end()
        };
        let overlaps = |&(rank, index): &(usize, usize)| match &self.ranks[rank].operations[index]
            .kind
        {
            OperationKind::Copy { target, source } => overlap(target, source),
            OperationKind::Collective(it) => overlap(&it.target, &it.source),
            OperationKind::Matmul(it) => {
                let mut operands = [&it.a, &it.b].into_iter();
                operands.any(|operand| shares(&self.ranks[rank], operand, &it.c))
            }
            OperationKind::Elementwise(it) => {
                let program = &self.ranks[rank];
                let mut others = it.sources.iter().filter(|source| **source != it.target);
                others.any(|source| shares(program, source, &it.target))
            }
            // A transfer to oneself is a copy.
            OperationKind::Post(group) => group.iter().any(|&id| {
                let transfers = &self.ranks[rank].transfers;
                let partner = self.stage.partner(rank, id);
                let own = transfers[id].peer == rank;
                own && partner
                    .is_some_and(|partner| overlap(&transfers[id].range, &transfers[partner].range))
            }),
            _ => false,
        };
        diagnostic.message.contains(" both ") && operations.iter().all(overlaps)
    }

    /// All ends of transfers.
    fn ends(&self) -> impl Iterator<Item = (usize, TransferId)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.flat_map(|(rank, program)| (0..program.transfers.len()).map(move |id| (rank, id)))
    }

    fn unequal_posts(&self) -> bool {
        self.ends().any(|(rank, id)| {
            let peer = self.ranks[rank].transfers[id].peer;
            let theirs = self
                .stage
                .partner(rank, id)
                .map(|partner| self.stage.posts(peer, partner));
            theirs.is_some_and(|theirs| theirs != self.stage.posts(rank, id))
        })
    }

    /// Whether a diagnostic names the last post of a transfer and that which is the first in the next run, on a stream that
    /// neither waited for that transfer nor synchronized with the stream of the last post. Signals of other transfers may
    /// order the two, which is not enough.
    fn posts_again(&self, diagnostic: &Diagnostic) -> bool {
        let [(rank, before), (_, again)] = self.operations(diagnostic)[..] else {
            return false;
        };
        if !diagnostic.message.contains("next run's") {
            return false;
        }
        let operations = &self.ranks[rank].operations;
        let after = (before + 1..before + operations.len()).map(|index| index % operations.len());
        let between = after.take_while(|index| *index != again);
        let posted = operations[before].kind.posted().iter();
        let mut both = posted.filter(|id| operations[again].kind.posted().contains(id));
        both.any(|id| {
            let mut ordered = HashSet::from([operations[before].stream]);
            for index in between.clone() {
                let operation = &operations[index];
                let learns = match &operation.kind {
                    OperationKind::Synchronize(other) => ordered.contains(other),
                    OperationKind::Wait(group) => group.contains(id),
                    kind if kind.posted().contains(id) => return false,
                    _ => false,
                };
                if learns {
                    ordered.insert(operation.stream);
                }
            }
            !ordered.contains(&operations[again].stream)
        })
    }

    fn ends_differ(&self) -> bool {
        self.ends().any(|(rank, id)| {
            let own = &self.ranks[rank].transfers[id];
            self.stage.partner(rank, id).is_some_and(|partner| {
                let other = &self.ranks[own.peer].transfers[partner];
                (own.range.bytes, own.dtype, own.backend)
                    != (other.range.bytes, other.dtype, other.backend)
            })
        })
    }

    /// Whether ranks call other collectives, or the same with other lengths.
    fn collectives_differ(&self, lengths: bool) -> bool {
        let of = |program: &RankProgram| -> Vec<_> {
            let operations = program.operations.iter();
            operations
                .filter_map(|operation| match &operation.kind {
                    OperationKind::Collective(it) => {
                        let sizes = (it.dtype, it.target.bytes, it.source.bytes);
                        let call = (it.collective, lengths.then_some(sizes));
                        Some((it.members.clone(), call))
                    }
                    _ => None,
                })
                .collect()
        };
        // Of each list of ranks, its members have to call the same.
        let calls: Vec<_> = self.ranks.iter().map(of).collect();
        let everyone: Vec<usize> = (0..self.ranks.len()).collect();
        calls.iter().flatten().any(|(list, _)| {
            let among = |rank: usize| {
                let own = calls[rank].iter().filter(|(other, _)| other == list);
                own.map(|(_, call)| *call).collect::<Vec<_>>()
            };
            let mut members = list.as_deref().unwrap_or(&everyone).iter();
            let first = members.next().map(|rank| among(*rank));
            members.any(|rank| Some(among(*rank)) != first)
        })
    }

    /// Whether two ranks post the engine's transfers between them in different orders.
    fn engine_order_differs(&self) -> bool {
        let mut posts: HashMap<(usize, usize, Direction), Vec<TransferId>> = HashMap::new();
        for (rank, program) in self.ranks.iter().enumerate() {
            for operation in &program.operations {
                for &id in operation.kind.posted() {
                    let transfer = &program.transfers[id];
                    if transfer.backend == Backend::Nccl {
                        let key = (rank, transfer.peer, transfer.direction);
                        posts.entry(key).or_default().push(id);
                    }
                }
            }
        }
        posts.iter().any(|(&(rank, peer, direction), sends)| {
            if direction != Direction::Send {
                return false;
            }
            let receives = posts.get(&(peer, rank, Direction::Receive));
            let mut pairs = sends.iter().zip(receives.into_iter().flatten());
            pairs.any(|(&send, &receive)| self.stage.partner(rank, send) != Some(receive))
        })
    }
}
