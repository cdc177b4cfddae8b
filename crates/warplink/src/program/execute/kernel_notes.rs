//! Integers that kernels have read from memory and that are out of range.
//!
//! A kernel on a device that takes code cannot fail its stream. It notes the integer in its state, stores nothing more and
//! stops to wait; the host looks for such notes when it synchronizes. Devices that take closures fail the stream instead.

use super::reach::{Reach, VALUE_NOTE_BYTES, read_words};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::program::site::Position;
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};

/// The kernels of a communicator that read integers from memory.
#[derive(Debug, Default)]
pub(crate) struct ValueNotes(Mutex<Vec<Weak<Reach>>>);

impl ValueNotes {
    /// Looks for notes of the kernels with this memory from now on, while a plan holds it.
    pub(super) fn watch(&self, reach: &Arc<Reach>) {
        let mut all = lock(&self.0);
        all.retain(|reach| reach.strong_count() > 0);
        all.push(Arc::downgrade(reach));
    }

    /// Fails if a kernel has noted an integer, with its place in the program. The error remains until its plan is
    /// dropped. Blocks for the time of a small read from the device for each plan that reads integers.
    pub(crate) fn check(&self, device: &dyn Device) -> Result<()> {
        // Collected first: the lock is not held while the device is read.
        let all: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for reach in all {
            if let Some(error) = reach.refused_value(device)? {
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Reach {
    /// The integer that a lane has read from memory and that is out of its range, if a kernel has noted one.
    pub(super) fn refused_value(&self, device: &dyn Device) -> Result<Option<Error>> {
        let from = Self::value_note_offset(self.lanes, self.workspaces.len());
        let note = self.state.slice(from..from + VALUE_NOTE_BYTES)?;
        let [place, value, most, lane, _] = read_words(device, &note)?[..] else {
            return Ok(None);
        };
        if place == 0 {
            return Ok(None);
        }
        let position = Position {
            line: (place >> 32) as u32,
            column: place as u32,
        };
        let message = format!(
            "{position} (lane = {lane}): a value in memory is {}; expected 0 to {most}",
            value as i64
        );
        let error = Error::invalid(message).with_operation("run a kernel");
        Ok(Some(error.with_help("check the values that kernels read")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{AllocationKind, DeviceConfig, DeviceKind, open};
    use crate::program::section::WorkspaceLayout;

    #[test]
    fn a_note_is_an_error_until_its_plan_is_dropped() {
        let device = open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let (lanes, world) = (4, 3);
        let bytes = Reach::state_bytes(lanes, world);
        let state = device.allocate(bytes, AllocationKind::Plain).unwrap();
        device.upload(&state, &vec![0; bytes]).unwrap();
        let reach = Arc::new(Reach {
            layout: WorkspaceLayout::of(&[]),
            workspaces: vec![None; world],
            signals: vec![None; world],
            state: state.clone(),
            lanes,
            ranks_per_device: 1,
            tensors: Vec::new(),
        });
        let notes = ValueNotes::default();
        notes.watch(&reach);
        notes.check(&*device).unwrap();

        let words = [7 << 32 | 12, -5_i64 as u64, 40, 2, 0];
        let note: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let from = Reach::value_note_offset(lanes, world);
        let place = state.slice(from..from + VALUE_NOTE_BYTES).unwrap();
        device.upload(&place, &note).unwrap();
        for _ in 0..2 {
            let error = notes.check(&*device).unwrap_err().to_string();
            for part in ["line 7, column 12", "lane = 2", "is -5; expected 0 to 40"] {
                assert!(error.contains(part), "{error} lacks '{part}'");
            }
        }
        drop(reach);
        notes.check(&*device).unwrap();
    }
}
