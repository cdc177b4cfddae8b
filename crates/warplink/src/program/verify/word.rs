//! History of a signal word: the values written, and the clock at each write.

use super::clock::{Clock, Snapshot};

/// One value of a word.
#[derive(Clone, Debug, Default)]
struct WordValue {
    /// Stream that wrote it, with its clock at that point.
    written: Option<(usize, u32)>,
    /// Snapshot at the write, kept until the last reader has taken it.
    clock: Option<Snapshot>,
    /// Number of outstanding readers.
    readers: u32,
}

/// A word whose values count up from 1.
#[derive(Clone, Debug, Default)]
pub(super) struct WordHistory {
    values: Vec<WordValue>,
    /// Number of values written without a gap.
    reached: usize,
    /// Streams blocked on the word.
    waiting: Vec<usize>,
}

impl WordHistory {
    /// Word that will take `values` values.
    pub(super) fn new(values: usize) -> Self {
        Self {
            values: vec![WordValue::default(); values],
            ..Self::default()
        }
    }

    fn value(&self, number: usize) -> Option<&WordValue> {
        self.values.get(number.checked_sub(1)?)
    }

    fn value_mut(&mut self, number: usize) -> Option<&mut WordValue> {
        self.values.get_mut(number.checked_sub(1)?)
    }

    /// Registers one more reader of value `number`.
    pub(super) fn expect_reader(&mut self, number: usize) {
        if let Some(value) = self.value_mut(number) {
            value.readers += 1;
        }
    }

    /// Whether value `number` is written.
    pub(super) fn has(&self, number: usize) -> bool {
        self.value(number)
            .is_some_and(|value| value.written.is_some())
    }

    /// First value up to `number` that is not written.
    pub(super) fn missing(&self, number: usize) -> Option<usize> {
        (self.reached < number).then_some(self.reached + 1)
    }

    /// Whether a value above `number` is written, which would release a wait for at least `number`.
    pub(super) fn is_above(&self, number: usize) -> bool {
        let mut above = self.values.iter().skip(number);
        above.any(|value| value.written.is_some())
    }

    /// Whether the write of value `number` happens before `clock`.
    pub(super) fn precedes(&self, number: usize, clock: &Clock) -> bool {
        self.value(number)
            .and_then(|value| value.written)
            .is_some_and(|(stream, time)| clock.get(stream) >= time)
    }

    /// Whether `clock` includes a later step of the stream that wrote value `number`.
    pub(super) fn is_behind(&self, number: usize, clock: &Clock) -> bool {
        self.value(number)
            .and_then(|value| value.written)
            .is_some_and(|(stream, time)| clock.get(stream) > time)
    }

    /// Writes value `number` in `stream`, and returns the streams to wake.
    pub(super) fn write(&mut self, number: usize, stream: usize, clock: &Clock) -> Vec<usize> {
        let Some(value) = self.value_mut(number) else {
            return Vec::new();
        };
        value.written = Some((stream, clock.get(stream)));
        // A snapshot pins the nodes of its clock, so one that nobody will read is not taken.
        if value.readers > 0 {
            value.clock = Some(clock.snapshot(stream));
        }
        while let Some(WordValue {
            written: Some(_), ..
        }) = self.values.get(self.reached)
        {
            self.reached += 1;
        }
        std::mem::take(&mut self.waiting)
    }

    /// Joins the snapshot of value `number` into `clock`, for one reader.
    pub(super) fn read(&mut self, number: usize, clock: &mut Clock) {
        let Some(value) = self.value_mut(number) else {
            return;
        };
        if let Some(written) = &value.clock {
            clock.learn(written);
        }
        value.readers = value.readers.saturating_sub(1);
        if value.readers == 0 {
            value.clock = None;
        }
    }

    /// Takes the blocked streams, to wake them for another reason.
    pub(super) fn woken(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.waiting)
    }

    /// Registers `stream` to be woken at the next value.
    pub(super) fn wait(&mut self, stream: usize) {
        self.waiting.push(stream);
    }
}
