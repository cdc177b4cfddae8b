//! Resolves announcements: launch arguments that ranks compare.

use super::Resolver;
use super::value::Resolved;
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::expr::Condition;
use crate::program::section::ir::{Announcement, Packing};
use crate::program::section::lane::{LaneStepKind, Part};
use crate::program::site::Position;

impl<'s> Resolver<'s> {
    /// Steps that announce to other ranks, or await their announcements.
    pub(super) fn meeting(&mut self, it: &'s Announcement, announces: bool) -> Resolved<()> {
        let mut values = Vec::with_capacity(it.values.len());
        for value in &it.values {
            // Only compared for equality among ranks, for which the low word suffices: packets carry 32-bit words.
            values.push(self.integer(value)? as u32);
        }
        let (rank, world) = (self.instance.rank, self.instance.world);
        let tensors = self.announced_tensors(it, announces)?;
        for peer in self.met(it)? {
            let mut view = self.fixed_view(&it.rows)?;
            let (row, at) = if announces {
                (rank, peer)
            } else {
                (peer, rank)
            };
            let scratch = self.instance.scratch_of(view.tensor);
            let holds = scratch.is_some_and(|scratch| {
                (scratch.packing, scratch.dtype) == (Packing::Packets16, DType::I32)
            });
            let there = view.index(row as i64).is_ok();
            let length = view.elements().map(|(_, length)| length);
            if !holds || !there || length != Some(it.words()) {
                let message = format!(
                    "{} does not hold the announcements of {world} ranks; expected packets16 i32[{world}, {}]",
                    it.rows,
                    it.words()
                );
                return Err(self.wrong(DiagnosticKind::Mismatch, message));
            }
            let (tensor, offset) = (view.tensor, view.offset);
            let part = Part {
                rank: at,
                tensor,
                offset,
                elements: it.words(),
            };
            let (values, tensors) = (values.clone(), tensors.clone());
            self.step()?;
            self.push(if announces {
                LaneStepKind::Announce {
                    values,
                    tensors,
                    target: part,
                }
            } else {
                LaneStepKind::Agree {
                    values,
                    tensors,
                    peer,
                    source: part,
                }
            });
        }
        Ok(())
    }

    /// The other ranks that receive or send the announcement.
    fn met(&mut self, it: &'s Announcement) -> Resolved<Vec<Rank>> {
        let (rank, world) = (self.instance.rank, self.instance.world);
        let Some(list) = &it.peers else {
            // Each rank starts with its successor, so that ranks do not all write to rank 0 at once.
            return Ok((1..world).map(|r| (rank + r) % world).collect());
        };
        // A tensor is reachable only if all ranks can access it, which no subset can decide.
        if !it.tensors.is_empty() {
            let message = "tensors are announced to some ranks; expected all of them".to_owned();
            return Err(self.malformed(message));
        }
        let mut peers: Vec<Rank> = Vec::new();
        self.each(list, |resolver, peer| {
            let peer = resolver.rank(peer)?;
            if peer == rank || peers.contains(&peer) {
                let message =
                    format!("an announcement names rank {peer}; expected other ranks, each once");
                return Err(resolver.malformed(message));
            }
            peers.push(peer);
            Ok(())
        })?;
        Ok(peers)
    }

    /// Tensors of an announcement; records them.
    fn announced_tensors(&mut self, it: &Announcement, announces: bool) -> Resolved<Vec<usize>> {
        let mut tensors = Vec::with_capacity(it.tensors.len());
        for name in &it.tensors {
            let whole = self.instance.tensor(name);
            let whole = whole.filter(|tensor| self.instance.scratch_of(*tensor).is_none());
            let Some(tensor) = whole else {
                let message = format!(
                    "'{name}' is announced; expected a whole tensor, since scratch is known to all ranks"
                );
                return Err(self.malformed(message));
            };
            let mut asked = self.asked.iter();
            // An answer before the agreement could differ among ranks, which would then take different branches.
            if !announces && let Some((_, position)) = asked.find(|(asked, _)| *asked == tensor) {
                self.at(*position);
                let message = format!(
                    "the lane asks whether '{name}' is reachable before it agrees on it; expected that afterwards"
                );
                return Err(self.malformed(message));
            }
            if announces {
                self.told.push(tensor);
            } else {
                self.agreed.push(tensor);
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Marks the tensors that are reachable if a condition holds.
    pub(super) fn note_reached(&mut self, condition: &Condition) {
        match condition {
            // Only conjunctions imply that a tensor is reachable; a disjunction or negation proves nothing about one
            // of them.
            Condition::Reachable(name) => self.reached.extend(self.instance.tensor(name)),
            Condition::And(a, b) => {
                self.note_reached(a);
                self.note_reached(b);
            }
            _ => {}
        }
    }

    /// Records the tensors that a condition asks for although the lane has not agreed on them.
    pub(super) fn note_asked(&mut self, condition: &Condition, position: Position) {
        let mut asked = Vec::new();
        condition.leaves(&mut |leaf| {
            if let Condition::Reachable(name) = leaf {
                asked.extend(self.instance.tensor(name));
            }
        });
        asked.retain(|tensor| !self.agreed.contains(tensor));
        self.asked
            .extend(asked.into_iter().map(|it| (it, position)));
    }
}
