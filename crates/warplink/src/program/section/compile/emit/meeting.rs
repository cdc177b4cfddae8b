//! Synchronization steps between ranks: signals, waits and announcements.

use super::code::{Code, bare};
use super::{Emitter, MAX_PLACES, Result};
use crate::named::comma;
use crate::program::section::compile::scope::Scope;
use crate::program::section::{Announcement, Step, StepKind};
use std::collections::BTreeSet;

/// Maximum number of words in an announcement.
// The headers keep all of them in registers.
const MAX_ANNOUNCED: usize = 16;

/// Whether any signal names its target lane.
pub(super) fn names_lanes(steps: &[Step]) -> bool {
    Step::actions(steps).any(|(_, kind)| {
        matches!(kind, StepKind::Signal(receivers) if receivers.iter().any(|each| each.item.lane.is_some()))
    })
}

impl Emitter<'_> {
    /// Rank and lane that receive a signal; without an explicit lane, the lane of the same number.
    pub(super) fn receiver(&self, rank: &str, lane: Option<&str>) -> (String, String) {
        let same = Scope::spell(&self.instance.section.lane);
        let lane = lane.map_or_else(|| same, |lane| bare(lane).to_owned());
        (bare(rank).to_owned(), lane)
    }

    pub(super) fn signal(&mut self, code: &mut Code, words: Vec<(String, String)>) -> Result<()> {
        if words.is_empty() {
            // A step without peers still orders the accesses before and after it.
            code.line("self.sync();");
            return Ok(());
        }
        // One thread stores each signal.
        if words.len() > MAX_PLACES.min(self.instance.threads) {
            let text = format!("a signal to {} ranks", words.len());
            return Err(self.refuse(text, "signal fewer ranks at a time, or use more threads"));
        }
        self.signals = true;
        // Each thread counts the signals to one rank, so that a rank that is named twice gets two, one after the other.
        let known = words.iter().map(|(rank, _)| rank.parse::<i64>().ok());
        let known: Option<BTreeSet<i64>> = known.collect();
        let distinct = known.is_some_and(|known| known.len() == words.len());
        if !self.shares_words && words.len() > 1 && !distinct {
            let mut words = words.into_iter();
            return words.try_for_each(|word| self.signal(code, vec![word]));
        }
        let count = words.len();
        let each = |name: &str| {
            let words = words.iter();
            comma(words.map(|(rank, lane)| format!("{name}({rank}, {lane})")))
        };
        let places = |name: &str| format!("Places<{count}>{{{{{}}}}}", each(name));
        if self.shares_words {
            let (words, sent) = (places("word"), places("sent"));
            code.line(format!("signal(self, {words}, {sent});"));
            return Ok(());
        }
        let peers = comma(words.iter().map(|(rank, _)| format!("(u32)({rank})")));
        let words = places("word");
        code.line(format!("outbound.signal(self, {words}, {{{peers}}});"));
        Ok(())
    }

    pub(super) fn announce(&mut self, code: &mut Code, it: &Announcement) -> Result<()> {
        let (rank, world) = (self.instance.rank, self.instance.world);
        let values = self.announced(it)?;
        self.locate(code, it);
        let part = self.part(&it.rows)?;
        let name = Scope::spell(&self.instance.tensors[part.tensor].name);
        let peers: Vec<String> = match &it.peers {
            None => (1..world)
                // Each rank starts with a different peer, so that not all of them store to the same one at the same
                // time.
                .map(|r| ((rank + r) % world).to_string())
                .collect(),
            Some(list) => {
                let ranks = self.ranks(list)?;
                ranks.into_iter().map(|(rank, _)| rank).collect()
            }
        };
        let places = peers.iter().map(|peer| {
            format!(
                "packets<I32>(at.{name}[{}], {}.index(rank))",
                bare(peer),
                part.text
            )
        });
        let places = comma(places);
        if !places.is_empty() {
            let count = peers.len();
            // Announcements of integers alone order nothing.
            let first = match (it.tensors.is_empty(), self.accesses) {
                (true, _) => "",
                (false, false) => "<true>",
                (false, true) => "<false>",
            };
            code.line(format!(
                "announce{first}(self, Places<{count}>{{{{{places}}}}}, {values});"
            ));
        }
        Ok(())
    }

    pub(super) fn agree(&mut self, code: &mut Code, it: &Announcement) -> Result<()> {
        let (rank, world) = (self.instance.rank, self.instance.world);
        let values = self.announced(it)?;
        let part = self.part(&it.rows)?;
        let name = Scope::spell(&self.instance.tensors[part.tensor].name);
        // The headers rely on this order, starting with the next rank, to know whose packets these are.
        let peers = (1..world).map(|r| (rank + r) % world);
        let places =
            peers.map(|peer| format!("packets<I32>(at.{name}[rank], {}.index({peer}))", part.text));
        let places = comma(places);
        self.locate_of_others(code, it);
        if !places.is_empty() {
            let count = world - 1;
            let verdict = self.verdict();
            let further = if it.tensors.is_empty() {
                verdict.to_owned()
            } else {
                let tables = if self.instance.published {
                    "at.tables"
                } else {
                    "0"
                };
                format!("rank, {tables}, {verdict}, {}", self.direct())
            };
            // In a kernel of messages, ranks that differ must not store.
            let function = if self.paired && it.tensors.is_empty() {
                "agree_together"
            } else {
                "agree"
            };
            code.line(format!(
                "{function}(self, Places<{count}>{{{{{places}}}}}, {values}, {further});"
            ));
        }
        Ok(())
    }

    /// Address of the verdicts on announcements.
    fn verdict(&self) -> &'static str {
        if self.paired {
            "at.verdict"
        } else {
            "at.epochs + 8 * at.lanes"
        }
    }

    /// Address of the count of lanes that found announced tensors reachable.
    pub(super) fn direct(&self) -> String {
        if self.paired {
            "at.direct".to_owned()
        } else {
            format!("{} + detail::verdict_bytes * world", self.verdict())
        }
    }

    /// Declares whether the lane has announced each tensor in this launch.
    pub(super) fn declare_announced(&self, code: &mut Code) {
        let count = self.announced.len();
        if count > 0 {
            code.line(format!("bool announced[{count}] = {{}};"));
        }
    }

    /// Prepares for the locations of tensors that only other ranks announce. Whether this lane has announced one as well may depend on
    /// branches.
    fn locate_of_others(&self, code: &mut Code, it: &Announcement) {
        for (number, name) in it.tensors.iter().filter_map(|name| self.located(name)) {
            let known = if self.instance.published {
                format!("rank, at.{name}[rank]")
            } else {
                format!("at.{name}")
            };
            code.line(format!(
                "if (!announced[{number}]) locate_of_others(self, located[{number}], {known});"
            ));
        }
    }

    /// Looks up the locations of all tensors that the lane announces, concurrently.
    fn locate(&self, code: &mut Code, it: &Announcement) {
        let tensors: Vec<(usize, String)> = it
            .tensors
            .iter()
            .filter_map(|name| self.located(name))
            .collect();
        if tensors.is_empty() {
            return;
        }
        for (number, _) in &tensors {
            code.line(format!("announced[{number}] = true;"));
        }
        if self.instance.published {
            let tables = if self.paired {
                "0, at.own_tables"
            } else {
                "rank, at.tables"
            };
            let told = tensors.iter().map(|(number, name)| {
                format!(
                    "told({tables}, at.place[{number}][0], at.place[{number}][1], at.{name}[rank])"
                )
            });
            code.open("{");
            code.line(format!("const u64 own[] = {{{}}};", comma(told)));
            for (place, (number, name)) in tensors.iter().enumerate() {
                code.line(format!(
                    "locate(self, located[{number}], rank, own[{place}], at.{name}[rank]);"
                ));
            }
            code.close("}");
        } else {
            for (number, name) in tensors {
                code.line(format!("locate(self, located[{number}], at.{name});"));
            }
        }
        if self.instance.world == 1 {
            // Otherwise the announcement synchronizes.
            code.line("self.sync();");
        }
    }

    /// Index of a tensor among the announced ones, and its name in the kernel.
    fn located(&self, name: &str) -> Option<(usize, String)> {
        let tensor = self.instance.tensor(name)?;
        let number = self.announced.iter().position(|other| *other == tensor)?;
        Some((number, Scope::spell(name)))
    }

    /// The announced words, as expressions.
    fn announced(&mut self, it: &Announcement) -> Result<String> {
        let count = it.words();
        if count > MAX_ANNOUNCED || self.instance.threads < self.instance.world * count {
            let text = format!(
                "an announcement of {count} words (two for each tensor); expected at most {MAX_ANNOUNCED}"
            );
            return Err(self.refuse(text, "announce less, or use more threads"));
        }
        let mut words = Vec::with_capacity(it.values.len());
        for value in &it.values {
            words.push(format!("(u32){}", self.integer(value)?));
        }
        let integers = it.values.len();
        let words = comma(words);
        if it.tensors.is_empty() {
            return Ok(format!("Announced<{integers}>{{{{{words}}}}}"));
        }
        let tensors = it.tensors.iter().filter_map(|name| self.located(name));
        let tensors = comma(tensors.map(|(number, _)| format!("&located[{number}]")));
        Ok(format!(
            "AnnouncedTensors<{integers}, {}, world>{{{{{words}}}, {{{tensors}}}}}",
            it.tensors.len()
        ))
    }

    pub(super) fn wait(&mut self, code: &mut Code, ranks: &[(String, Option<i64>)]) -> Result<()> {
        if ranks.is_empty() {
            code.line("self.sync();");
            return Ok(());
        }
        self.waits = true;
        let known: Option<Vec<i64>> = ranks.iter().map(|(_, rank)| *rank).collect();
        let mut mask = 0_u32;
        let distinct = known.is_some_and(|ranks| {
            ranks.iter().all(|rank| {
                let bit = u32::try_from(*rank).ok().and_then(|r| 1_u32.checked_shl(r));
                let new = bit.is_some_and(|bit| mask & bit == 0);
                mask |= bit.unwrap_or(0);
                new
            })
        });
        // One call polls all words at once, by a thread each; a rank named twice has two signals to wait for, one
        // after the other.
        if distinct {
            code.line(format!("inbound.wait(self, {mask:#x}u);"));
            return Ok(());
        }
        for (rank, _) in ranks {
            code.line(format!("inbound.wait(self, 1u << {rank});"));
        }
        Ok(())
    }
}
