//! Start times of the steps of a kernel's lanes, recorded by the kernel.

use super::trace_span::TraceSpan;
use crate::device::{AllocationKind, Device, DeviceSlice};
use crate::error::{Rank, Result};
use crate::program::section::{SectionInstance, Step, TIMES_HEADER};
use crate::program::site::Site;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// Limit on the recorded steps of a lane, which bounds the memory of a trace.
const MAX_STEPS: usize = 1 << 14;

/// Times of a launch's lanes.
#[derive(Debug)]
pub(super) struct LaneTimes {
    section: Arc<SectionInstance>,
    memory: DeviceSlice,
    /// Capacity in steps, for each lane.
    room: usize,
}

/// Recording memory for lanes that run as closures.
#[derive(Debug)]
pub(super) struct LaneClock {
    memory: DeviceSlice,
    room: usize,
    start: Instant,
}

/// Steps recorded so far by a lane that runs as a closure.
pub(super) struct Started<'a> {
    clock: &'a LaneClock,
    lane: usize,
    epoch: u64,
    /// Two words per step: start time, and position in the program.
    steps: Vec<[u64; 2]>,
    last: Option<Site>,
}

/// A lane's step; times are in nanoseconds of the device's clock.
struct Entry {
    start: u64,
    line: u32,
    column: u32,
}

/// Times recorded by a lane.
struct Stored {
    entries: Vec<Entry>,
    end: u64,
    epoch: u64,
}

impl LaneTimes {
    pub(super) fn allocate(device: &dyn Device, section: &Arc<SectionInstance>) -> Result<Self> {
        let mut most = 0;
        for epoch in 0..section.period {
            for lane in 0..section.lanes {
                most = most.max(section.steps(lane, epoch)?.len());
            }
        }
        // Reserve for variants: announced tensors may be unreachable, and a step without work has an entry as well.
        let room = (2 * most + 64).min(MAX_STEPS);
        let bytes = section.lanes * lane_bytes(room);
        Ok(Self {
            section: section.clone(),
            memory: device.allocate(bytes, AllocationKind::Plain)?,
            room,
        })
    }

    /// Words that a launch receives.
    pub(super) fn words(&self) -> [u64; 2] {
        [self.memory.address(), self.room as u64]
    }

    pub(super) fn clock(&self) -> LaneClock {
        LaneClock {
            memory: self.memory.clone(),
            room: self.room,
            start: Instant::now(),
        }
    }

    /// Spans of the steps of all lanes, for a completed launch on `stream` of `rank` that covered `span`, in
    /// microseconds. The lanes use another clock, so it is aligned such that the last lane ends with the launch.
    pub(super) fn spans(
        &self,
        device: &dyn Device,
        (rank, stream): (Rank, &str),
        span: &Range<f64>,
    ) -> Result<Vec<TraceSpan>> {
        let mut bytes = vec![0; self.memory.bytes()];
        device.download(&self.memory, &mut bytes)?;
        let lanes: Vec<Stored> = bytes
            .chunks_exact(lane_bytes(self.room))
            .map(|words| stored(words, self.room))
            .collect();
        let last = lanes.iter().map(|lane| lane.end).max().unwrap_or(0);
        // Clamped, since the two clocks need not run at the same rate.
        let at = |time: u64| (span.end - last.saturating_sub(time) as f64 / 1e3).max(span.start);
        // Zero-padded, since viewers sort tracks by name.
        let width = (self.section.lanes - 1).to_string().len();
        let mut spans = Vec::new();
        for (number, lane) in lanes.iter().enumerate() {
            let sites = self.sites(number, lane)?;
            // A step ends where the next one starts: kernels record one time per step, to disturb them less.
            let ends = lane.entries.iter().skip(1).map(|entry| entry.start);
            let ends = ends.chain([lane.end]);
            for ((entry, end), site) in lane.entries.iter().zip(ends).zip(sites) {
                let start = at(entry.start);
                let word = word_at(&self.section.section.body, (entry.line, entry.column));
                spans.push(TraceSpan {
                    rank,
                    stream: format!("{stream}, lane {number:0width$}"),
                    operation: word.unwrap_or("step").to_owned(),
                    site,
                    start,
                    duration: at(end) - start,
                });
            }
        }
        Ok(spans)
    }

    /// Positions of a lane's steps, with loop indices where they are known.
    fn sites(&self, number: usize, lane: &Stored) -> Result<Vec<String>> {
        let mut known: Vec<Site> = Vec::new();
        for step in self.section.steps(number, lane.epoch)? {
            if known.last() != Some(&step.site) {
                known.push(step.site);
            }
        }
        // Both lists are in order of execution: the search goes on behind the last match, so that iterations do not
        // mix.
        let mut next = 0;
        let sites = lane.entries.iter().map(|entry| {
            let is = |site: &Site| (site.line, site.column) == (entry.line, entry.column);
            match known[next..].iter().position(is) {
                Some(ahead) => {
                    next += ahead + 1;
                    known[next - 1].to_string()
                }
                // The step had no work.
                None => format!("line {}", entry.line),
            }
        });
        Ok(sites.collect())
    }
}

impl LaneClock {
    /// Starts a lane.
    pub(super) fn start(&self, lane: usize, epoch: u64) -> Started<'_> {
        Started {
            clock: self,
            lane,
            epoch,
            steps: Vec::new(),
            last: None,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Started<'_> {
    /// Records the start of a step; a continuation of the same step is not recorded again.
    pub(super) fn step(&mut self, site: &Site) {
        // One entry for each statement: it may resolve to many steps, such as a signal to every rank.
        if self.last.as_ref() != Some(site) && self.steps.len() < self.clock.room {
            let place = u64::from(site.line) << 32 | u64::from(site.column);
            self.steps.push([self.clock.now(), place]);
            self.last = Some(site.clone());
        }
    }

    /// Ends the lane; returns the destination and contents of its recording.
    pub(super) fn finish(self) -> Result<(DeviceSlice, Vec<u8>)> {
        let header = [self.steps.len() as u64, self.clock.now(), self.epoch];
        let words = header.into_iter().chain(self.steps.into_iter().flatten());
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let from = self.lane * lane_bytes(self.clock.room);
        let memory = self.clock.memory.slice(from..from + bytes.len())?;
        Ok((memory, bytes))
    }
}

/// Bytes of a lane's recording.
const fn lane_bytes(room: usize) -> usize {
    WORD * (TIMES_HEADER + 2 * room)
}

fn stored(bytes: &[u8], room: usize) -> Stored {
    let word = |number: usize| {
        let bytes = bytes.get(WORD * number..WORD * (number + 1));
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    // A larger count would read the next lane's record.
    let count = usize::try_from(word(0)).unwrap_or(room).min(room);
    let entries = (0..count).map(|number| {
        let place = word(TIMES_HEADER + 2 * number + 1);
        Entry {
            start: word(TIMES_HEADER + 2 * number),
            line: (place >> 32) as u32,
            column: place as u32,
        }
    });
    Stored {
        entries: entries.collect(),
        end: word(1),
        epoch: word(2),
    }
}

/// Keyword of the step at a line and column.
fn word_at(steps: &[Step], place: (u32, u32)) -> Option<&'static str> {
    let mut actions = Step::actions(steps);
    let at = |step: &Step| (step.position.line, step.position.column);
    actions.find_map(|(step, kind)| (at(step) == place).then(|| kind.word()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceConfig, DeviceKind};
    use crate::program::{OperationKind, Parameters, Program, unroll};

    #[test]
    fn there_is_room_for_every_step_of_a_launch_at_any_epoch() {
        let text = "program test() {\n kernel lane in 0..2 threads 64 {\n \
                    if epoch % 3 == 2 and lane == 1 { for i in 0..1000 { barrier } }\n }\n}\n";
        let program = Program::parse(text).unwrap();
        let rank = unroll(&program, 0, 2, 1, &Parameters::new()).unwrap();
        let OperationKind::Kernel(section) = &rank.operations[0].kind else {
            panic!("{:?} is no kernel", rank.operations[0]);
        };
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let times = LaneTimes::allocate(&*device, section).unwrap();
        let steps = |epoch| section.steps(1, epoch).unwrap().len();
        assert!(steps(0) == 0 && times.room >= steps(2), "{}", times.room);
    }
}
