//! Carrier that uses the device's copy engine, through a stream.

use super::Carrier;
use crate::deadline::Deadline;
use crate::device::channel::trigger::Movement;
use crate::device::channel::{Side, Windows};
use crate::device::{At, Device, DeviceSlice, Event, MemoryOp, Priority, Stream, Word};
use crate::error::Result;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Calls between two events in the stream, and maximum number of unreached events, which bound the calls in
/// flight. A driver has some hundred slots for pending stream operations; a call that finds none blocks while
/// it holds locks that others need.
const CALLS_PER_MARK: u32 = 32;
const MARKS: usize = 4;

/// Moves bytes between mapped memory, using only copies and stream-ordered word operations, never a kernel: a
/// user kernel may occupy all multiprocessors.
#[derive(Debug)]
pub(crate) struct CopyEngine {
    stream: Stream,
    windows: Arc<Windows>,
    /// The peer's inbound word.
    outbound: Word,
    /// This rank's flush word.
    completed: Word,
    under_way: Mutex<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    /// Calls since the last event.
    calls: u32,
    marks: VecDeque<Event>,
    spare: Vec<Event>,
}

impl CopyEngine {
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        windows: &Arc<Windows>,
        outbound: &Word,
        completed: &Word,
    ) -> Result<Self> {
        let spare = (0..MARKS).map(|_| device.create_event(false));
        Ok(Self {
            // A stream of its own, so that user work does not delay it.
            stream: device.create_stream(Priority::High)?,
            windows: windows.clone(),
            outbound: outbound.clone(),
            completed: completed.clone(),
            under_way: Mutex::new(UnderWay {
                calls: 0,
                marks: VecDeque::with_capacity(MARKS),
                spare: spare.collect::<Result<_>>()?,
            }),
        })
    }

    fn count(&self) {
        lock(&self.under_way).calls += 1;
    }
}

impl Carrier for CopyEngine {
    fn has_room(&self) -> Result<bool> {
        let mut under_way = lock(&self.under_way);
        if under_way.calls < CALLS_PER_MARK {
            return Ok(true);
        }
        // Events are reached in order, so checking the oldest suffices.
        if let Some(oldest) = under_way.marks.front()
            && oldest.is_reached()?
        {
            let reached = under_way.marks.pop_front();
            under_way.spare.extend(reached);
        }
        // All events are unreached: the stream holds the most calls that it may.
        let Some(mark) = under_way.spare.pop() else {
            return Ok(false);
        };
        self.stream.record(&mark)?;
        under_way.marks.push_back(mark);
        under_way.calls = 0;
        Ok(true)
    }

    fn start(&self, movement: Movement, own: &DeviceSlice, peers: At) -> Result<()> {
        // The trigger comes from a kernel, so its range is not trusted.
        let peers = self.windows.range(Side::Peers, peers, own.bytes() as u64)?;
        self.count();
        match movement {
            Movement::Put => self.stream.copy(&peers, own),
            Movement::Get => self.stream.copy(own, &peers),
        }
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        let values = [(&self.outbound, inbound), (&self.completed, completed)];
        let writes: Vec<MemoryOp<'_>> = values
            .into_iter()
            .filter_map(|(word, value)| value.map(|value| MemoryOp::write(word, value)))
            .collect();
        self.count();
        // In the order of the list: the peer's word first, since this rank's completion promises that the peer was
        // signalled.
        self.stream.memory_ops(&writes)
    }

    fn answer(&self, word: &Word, value: u64) -> Result<()> {
        self.count();
        self.stream.memory_ops(&[MemoryOp::write(word, value)])
    }

    fn is_idle(&self) -> Result<bool> {
        self.stream.is_idle()
    }

    fn drain(&self, deadline: Deadline) -> Result<()> {
        self.stream.synchronize(deadline)
    }
}
