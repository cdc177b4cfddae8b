//! Steps by which lanes of several ranks meet: signals, waits and announcements.

use super::{Emitter, MAX_PLACES, Result};
use crate::program::section::Announcement;
use crate::program::section::compile::code::{Code, bare, comma};
use crate::program::section::compile::scope::Scope;

/// The largest number of integers of an announcement.
const MAX_ANNOUNCED: usize = 6;

impl Emitter<'_> {
    /// The word of this rank at a lane of a rank: that of the same number, or another.
    pub(super) fn word(&self, rank: &str, lane: Option<&str>) -> String {
        let same = Scope::spell(&self.instance.section.lane);
        format!("word({}, {})", bare(rank), lane.map_or(&*same, bare))
    }

    pub(super) fn signal(&mut self, code: &mut Code, words: Vec<String>) -> Result<()> {
        if words.is_empty() {
            // It orders what comes before and after it all the same.
            code.line("self.sync();");
            return Ok(());
        }
        if words.len() > MAX_PLACES.min(self.instance.threads) {
            let text = format!("a signal to {} ranks", words.len());
            return Err(self.refuse(text, "signal fewer ranks at a time, or use more threads"));
        }
        self.signals = true;
        let count = words.len();
        code.line(format!(
            "signal(self, Places<{count}>{{{{{}}}}});",
            comma(words)
        ));
        Ok(())
    }

    pub(super) fn announce(&mut self, code: &mut Code, it: &Announcement) -> Result<()> {
        let (rank, world) = (self.instance.rank, self.instance.world);
        let values = self.announced(it)?;
        let part = self.part(&it.tensor)?;
        let name = Scope::spell(&self.instance.tensors[part.tensor].name);
        let peers = (1..world).map(|r| (rank + r) % world);
        let places =
            peers.map(|peer| format!("packets<I32>(at.{name}[{peer}], {}.index(rank))", part.text));
        let places = comma(places);
        if !places.is_empty() {
            let count = world - 1;
            code.line(format!(
                "announce(self, Places<{count}>{{{{{places}}}}}, Announced<{}>{{{{{values}}}}});",
                it.values.len()
            ));
        }
        Ok(())
    }

    pub(super) fn agree(&mut self, code: &mut Code, it: &Announcement) -> Result<()> {
        let (rank, world) = (self.instance.rank, self.instance.world);
        let values = self.announced(it)?;
        let part = self.part(&it.tensor)?;
        let name = Scope::spell(&self.instance.tensors[part.tensor].name);
        let peers = (1..world).map(|r| (rank + r) % world);
        let places =
            peers.map(|peer| format!("packets<I32>(at.{name}[rank], {}.index({peer}))", part.text));
        let places = comma(places);
        if !places.is_empty() {
            let count = world - 1;
            code.line(format!(
                "agree(self, Places<{count}>{{{{{places}}}}}, Announced<{}>{{{{{values}}}}}, at.epochs + 8 * at.lanes);",
                it.values.len()
            ));
        }
        Ok(())
    }

    /// The words of an announcement.
    fn announced(&mut self, it: &Announcement) -> Result<String> {
        let count = it.values.len();
        if count > MAX_ANNOUNCED || self.instance.threads < self.instance.world * count {
            let text =
                format!("an announcement of {count} integers; expected at most {MAX_ANNOUNCED}");
            return Err(self.refuse(text, "announce fewer, or use more threads"));
        }
        let mut words = Vec::with_capacity(it.values.len());
        for value in &it.values {
            words.push(format!("(u32){}", self.integer(value)?));
        }
        Ok(comma(words))
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
