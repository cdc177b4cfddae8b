//! Completion words: streams wait on them for copies that the proxy performs.

use crate::device::Word;
use crate::error::Result;
use crate::memory::MemoryRegistry;
use crate::signal::SlotPool;
use crate::sync::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Completion words of one connection. Their values only grow, so a word can be reused by the next wait as soon as
/// the write for the previous one is enqueued: the previous wait stays satisfied.
pub(crate) struct Answers {
    slots: Arc<SlotPool>,
    memory: Arc<MemoryRegistry>,
    state: Mutex<AnswerState>,
}

/// A word, and the value to wait for.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) word: Word,
    pub(crate) value: u64,
}

#[derive(Default)]
struct AnswerState {
    free: Vec<Answer>,
    /// The slots that contain the words.
    slots: Vec<u64>,
}

impl Answers {
    pub(super) fn new(slots: &Arc<SlotPool>, memory: &Arc<MemoryRegistry>) -> Arc<Self> {
        Arc::new(Self {
            slots: slots.clone(),
            memory: memory.clone(),
            state: Mutex::default(),
        })
    }

    /// Takes a word that no other wait uses, and the value to wait for.
    pub(super) fn take(&self) -> Result<Answer> {
        let mut state = lock(&self.state);
        if let Some(Answer { word, value }) = state.free.pop() {
            let value = value + 1;
            return Ok(Answer { word, value });
        }
        let slot = self.slots.allocate(&self.memory)?;
        // Kept for the drop: a word has no way back to its slot, and slots are recycled only with the connection.
        state.slots.push(slot.number);
        Ok(Answer {
            word: slot.completed_word().clone(),
            value: 1,
        })
    }

    /// Returns a word whose write is enqueued, or that no stream waits for.
    pub(super) fn give_back(&self, answer: Answer) {
        lock(&self.state).free.push(answer);
    }
}

impl Drop for Answers {
    /// No stream waits for these words any more, and nobody else writes to them.
    fn drop(&mut self) {
        for slot in std::mem::take(&mut lock(&self.state).slots) {
            self.slots.recycle(slot);
        }
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = lock(&self.state).slots.len();
        f.debug_struct("Answers").field("words", &words).finish()
    }
}
