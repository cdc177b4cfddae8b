//! Reads of integers in memory.

use super::stage::Operand;

/// A read of an integer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// How many reads of the lane in the launch come before it.
    pub(super) number: usize,
    pub(super) word: Operand,
    /// Words of a row, and what it looks for among several rows: those with a word from one value to another, exclusive, or
    /// all others; and the number of the one whose position it wants, else how many there are.
    pub(super) among: Option<(usize, bool, i64, i64, Option<i64>)>,
    pub(super) most: i64,
}

impl Read {
    /// Whether it wants the position of a row that there cannot be, whatever the words are.
    pub(super) fn finds_nothing(&self) -> bool {
        let Some((width, inside, from, to, Some(nth))) = self.among else {
            return false;
        };
        nth < 0 || nth as usize >= self.word.elements / width || (inside && from >= to)
    }

    /// What it gives for these words; less than 0 if there is nothing.
    pub(super) fn result(&self, words: &[i64]) -> i64 {
        let Some((width, inside, from, to, nth)) = self.among else {
            return words[0];
        };
        let mut found = Vec::new();
        for position in 0..words.len() / width {
            let mut is_in = false;
            for word in &words[position * width..(position + 1) * width] {
                is_in |= *word >= from && *word < to;
            }
            if is_in == inside {
                found.push(position as i64);
            }
        }
        match nth {
            None => found.len() as i64,
            Some(nth) if nth < 0 => -1,
            Some(nth) => found.get(nth as usize).copied().unwrap_or(-1),
        }
    }
}
