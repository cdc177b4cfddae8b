//! What is known of the values of a signal: that they were written, and what had happened by then.

use super::clock::{Clock, Snapshot};

/// A value.
#[derive(Clone, Debug, Default)]
struct Value {
    /// The stream that wrote it, and how far that had come.
    written: Option<(usize, u32)>,
    /// What had happened before it was written, as long as somebody may ask.
    clock: Option<Snapshot>,
    /// How many are still to ask.
    readers: u32,
}

/// A word whose values count up from 1.
#[derive(Clone, Debug, Default)]
pub(super) struct Word {
    values: Vec<Value>,
    /// How many values are written without a gap.
    reached: usize,
    /// Streams that wait for the word.
    waiting: Vec<usize>,
}

impl Word {
    /// A word that will have `values` values.
    pub(super) fn new(values: usize) -> Self {
        Self {
            values: vec![Value::default(); values],
            ..Self::default()
        }
    }

    fn value(&self, number: usize) -> Option<&Value> {
        self.values.get(number.checked_sub(1)?)
    }

    /// Notes that the clock of value `number` will be needed once more.
    pub(super) fn expect_reader(&mut self, number: usize) {
        if let Some(value) = number
            .checked_sub(1)
            .and_then(|index| self.values.get_mut(index))
        {
            value.readers += 1;
        }
    }

    /// Whether value `number` is written.
    pub(super) fn has(&self, number: usize) -> bool {
        self.value(number)
            .is_some_and(|value| value.written.is_some())
    }

    /// The first value up to `number` that is not written.
    pub(super) fn missing(&self, number: usize) -> Option<usize> {
        (self.reached < number).then_some(self.reached + 1)
    }

    /// Whether a value above `number` is written: a wait for at least `number` ends.
    pub(super) fn is_above(&self, number: usize) -> bool {
        let mut above = self.values.iter().skip(number);
        above.any(|value| value.written.is_some())
    }

    /// Whether value `number` was written, by something that precedes `clock`.
    pub(super) fn precedes(&self, number: usize, clock: &Clock) -> bool {
        self.value(number)
            .and_then(|value| value.written)
            .is_some_and(|(stream, time)| clock.get(stream) >= time)
    }

    /// Whether `clock` knows that the stream which wrote value `number` has gone on since.
    pub(super) fn is_behind(&self, number: usize, clock: &Clock) -> bool {
        self.value(number)
            .and_then(|value| value.written)
            .is_some_and(|(stream, time)| clock.get(stream) > time)
    }

    /// Writes value `number` in `stream`, and gives the streams that wait for the word.
    pub(super) fn write(&mut self, number: usize, stream: usize, clock: &Clock) -> Vec<usize> {
        let Some(index) = number
            .checked_sub(1)
            .filter(|index| *index < self.values.len())
        else {
            return Vec::new();
        };
        let value = &mut self.values[index];
        value.written = Some((stream, clock.get(stream)));
        if value.readers > 0 {
            value.clock = Some(clock.snapshot(stream));
        }
        while let Some(Value {
            written: Some(_), ..
        }) = self.values.get(self.reached)
        {
            self.reached += 1;
        }
        std::mem::take(&mut self.waiting)
    }

    /// Adds what had happened when value `number` was written to `clock`, for one reader.
    pub(super) fn read(&mut self, number: usize, clock: &mut Clock) {
        let Some(index) = number
            .checked_sub(1)
            .filter(|index| *index < self.values.len())
        else {
            return;
        };
        let value = &mut self.values[index];
        if let Some(written) = &value.clock {
            clock.learn(written);
        }
        value.readers = value.readers.saturating_sub(1);
        if value.readers == 0 {
            value.clock = None;
        }
    }

    /// The streams that wait, which are woken for another reason.
    pub(super) fn woken(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.waiting)
    }

    /// Has `stream` woken at the next value.
    pub(super) fn wait(&mut self, stream: usize) {
        self.waiting.push(stream);
    }
}
