//! Notes of kernels: an integer that a lane has read from memory and that is out of range, and a peer's announcement that
//! differs from this rank's.
//!
//! A kernel on a device that takes code cannot fail its stream. It leaves a note in its state, stores nothing more and
//! stops to wait; the host looks for notes when it synchronizes. Devices that take closures fail the stream instead.

use super::reach::{Announced, DIRECT_BYTES, EPOCH_BYTES, Reach, VERDICT_BYTES};
use crate::device::{Device, DeviceSlice, Fault};
use crate::error::{Error, Rank, Result};
use crate::program::rank_program::RankProgram;
use crate::program::site::Position;
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};

/// The kernels of a communicator's plans that may leave notes.
#[derive(Debug, Default)]
pub(crate) struct KernelNotes(Mutex<Vec<NotedPlan>>);

/// Memory of a plan's kernels, and its program.
type NotedPlan = (Weak<Reach>, Weak<RankProgram>);

/// A note of a kernel.
pub(super) enum Note {
    /// A peer's announcement, and the number of the peer: how many ranks after this one, less one.
    Difference(usize, Announced),
    /// An integer out of range.
    Value(RefusedValue),
}

/// An integer that a lane has read from memory and that is out of its range.
pub(super) struct RefusedValue {
    place: Position,
    value: i64,
    most: i64,
    lane: u64,
    /// Where it was read; 0 if it was no word.
    address: u64,
}

impl KernelNotes {
    /// Looks for notes of the kernels of `program` with this memory from now on, while a plan holds it.
    pub(super) fn watch(&self, reach: &Arc<Reach>, program: &Arc<RankProgram>) {
        let mut all = lock(&self.0);
        all.retain(|(reach, _)| reach.strong_count() > 0);
        all.push((Arc::downgrade(reach), Arc::downgrade(program)));
    }

    /// Fails if a kernel has left a note, and fails the communicator, by its `fault`: peers may wait for what the kernel has
    /// not stored. Blocks for the time of a small read from the device for each plan whose kernels may leave notes.
    pub(crate) fn check(&self, device: &dyn Device, fault: &Fault) -> Result<()> {
        // Collected first: the lock is not held while the device is read.
        let watched = lock(&self.0).clone();
        for (reach, program) in watched {
            if let (Some(reach), Some(program)) = (reach.upgrade(), program.upgrade())
                && let Some(error) = reach.noted_in(&program, device)?
            {
                fault.fail(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Reach {
    /// The error that a kernel has noted. Blocks for the time of a small read from the device.
    pub(super) fn noted(&self, device: &dyn Device) -> Result<Option<Note>> {
        // All of it in one read: differences, the count of lanes that went directly, and the value.
        let notes = self
            .state
            .slice(EPOCH_BYTES * self.lanes..self.state.bytes())?;
        let mut bytes = vec![0; notes.bytes()];
        device.download(&notes, &mut bytes)?;
        let (verdicts, rest) = bytes.split_at(VERDICT_BYTES * self.workspaces.len());
        if let Some((peer, announced)) = Announced::first_of(verdicts) {
            return Ok(Some(Note::Difference(peer, announced)));
        }
        let (words, _) = rest[DIRECT_BYTES..].as_chunks();
        let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
        let [place, value, most, lane, _, address] = words[..] else {
            return Ok(None);
        };
        let value = Note::Value(RefusedValue {
            place: Position {
                line: (place >> 32) as u32,
                column: place as u32,
            },
            value: value as i64,
            most: most as i64,
            lane,
            address,
        });
        Ok((place != 0).then_some(value))
    }

    /// The same as an error, for kernels of this program.
    pub(super) fn noted_in(
        &self,
        program: &RankProgram,
        device: &dyn Device,
    ) -> Result<Option<Error>> {
        let noted = self.noted(device)?;
        let noted = noted.map(|note| match note {
            Note::Value(value) => value.error(self.word(program, value.address)),
            Note::Difference(number, announced) => {
                let error = match announced {
                    Announced::Other { own, theirs } => tell_difference(&own, &theirs),
                    Announced::UnknownMemory => {
                        calls_differ("the peer announces memory that this rank does not map".into())
                    }
                };
                let peer: Rank = (program.rank + 1 + number) % program.world;
                error.with_operation("run a kernel").with_peer(peer)
            }
        });
        Ok(noted.map(|error| error.with_rank(program.rank)))
    }

    /// The word of a program at an address, as its text names it; `None` if it is none of its memory.
    fn word(&self, program: &RankProgram, address: u64) -> Option<String> {
        let offset = |memory: &DeviceSlice| {
            let offset = address.checked_sub(memory.address())? as usize;
            (offset < memory.bytes()).then_some(offset)
        };
        let tensors = self.tensors.get(program.rank)?;
        let of_tensor = tensors.iter().find_map(|(id, memory)| {
            let tensor = program.tensors.get(*id)?;
            let element = offset(memory)? / tensor.dtype.size();
            let mut strides = vec![1; tensor.shape.len()];
            for axis in (1..strides.len()).rev() {
                strides[axis - 1] = strides[axis] * tensor.shape[axis];
            }
            Some(element_name(&tensor.name, element, &strides))
        });
        of_tensor.or_else(|| {
            let workspace = offset(self.workspaces.get(program.rank)?.as_ref()?)?;
            program.scratch.iter().find_map(|scratch| {
                let area = self.layout.area(scratch.packing).offset_bytes;
                let offset = workspace.checked_sub(area + scratch.offset_bytes)?;
                let (data, packet) = scratch.packing.packet();
                let element = offset / packet * data / scratch.dtype.size();
                (offset < scratch.bytes)
                    .then(|| element_name(&scratch.name, element, &scratch.strides))
            })
        })
    }
}

impl RefusedValue {
    /// The error, for the word of this name.
    pub(super) fn error(&self, word: Option<String>) -> Error {
        let Self { place, lane, .. } = self;
        let word = word.unwrap_or_else(|| match self.address {
            0 => "a value in memory".to_owned(),
            address => format!("a value in memory at {address:#x}"),
        });
        Error::invalid(format!(
            "{place} (lane = {lane}): {word} is {}; expected 0 to {}",
            self.value, self.most
        ))
        .with_operation("run a kernel")
        .with_help("check the values that kernels read")
    }
}

/// An element, with its index for each axis.
fn element_name(name: &str, element: usize, strides: &[usize]) -> String {
    let mut left = element;
    let indices = strides.iter().map(|stride| {
        let index = left / stride;
        left %= stride;
        format!("[{index}]")
    });
    format!("{name}{}", indices.collect::<String>())
}

/// Describes the difference between two announcements of unknown meaning.
pub(super) fn tell_difference(own: &[u32], theirs: &[u32]) -> Error {
    calls_differ(format!(
        "the peer announces {theirs:?}; expected {own:?}, as this rank does"
    ))
}

/// Error of ranks that make different calls.
pub(crate) fn calls_differ(text: String) -> Error {
    Error::mismatch(text).with_help("make the same calls in the same order on every rank")
}

/// Error of a call whose data another rank has in memory that this rank has released.
pub(crate) fn unknown_memory(call: &str) -> Error {
    let text = format!(
        "in {call}, the peer has its data in memory that this rank no longer maps; expected memory that all ranks can access"
    );
    Error::mismatch(text).with_help(
        "keep the memory of a graph alive, and record the graph again if its memory changes",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{AllocationKind, DeviceConfig, DeviceKind, open};
    use crate::program::section::WorkspaceLayout;
    use crate::program::{Parameters, Program, unroll};
    use std::collections::BTreeMap;

    const TEXT: &str = "program noting() {
        input C: i32[2, 5]
        output Y: i32[2]
        scratch P: packets8 i32[4]
        scratch H: packets16 i32[2, 3]
        kernel lane in 0..1 threads 32 {
            put C[0][0..4] to P on rank
            put C[0][0..3] to H[epoch % 2] on rank
            Y[0] = copy(P[0])
            Y[1] = copy(H[epoch % 2][0])
        }
    }";

    /// The memory of a program's kernels, with a tensor `C`.
    fn reach(program: &RankProgram, device: &dyn Device) -> Reach {
        let allocate = |bytes: usize| {
            let memory = device.allocate(bytes, AllocationKind::Plain).unwrap();
            device.upload(&memory, &vec![0; bytes]).unwrap();
            memory
        };
        let (lanes, world) = (4, program.world);
        let layout = WorkspaceLayout::of(&program.scratch);
        let mut workspaces = vec![None; world];
        workspaces[program.rank] = Some(allocate(layout.bytes()));
        let mut tensors = vec![BTreeMap::new(); world];
        tensors[program.rank].insert(0, allocate(40));
        Reach {
            layout,
            workspaces,
            signals: vec![None; world],
            state: allocate(Reach::state_bytes(lanes, world)),
            lanes,
            ranks_per_device: 1,
            tensors,
        }
    }

    fn unrolled() -> Arc<RankProgram> {
        let program = Program::parse(TEXT).unwrap();
        Arc::new(unroll(&program, 1, 3, 1, &Parameters::new()).unwrap())
    }

    /// Stores words in the state, from a byte on.
    fn store(device: &dyn Device, reach: &Reach, from: usize, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let place = reach.state.slice(from..from + bytes.len()).unwrap();
        device.upload(&place, &bytes).unwrap();
    }

    #[test]
    fn a_note_is_an_error_until_its_plan_is_dropped() {
        let device = open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let program = unrolled();
        let reach = Arc::new(reach(&program, &*device));
        let notes = KernelNotes::default();
        notes.watch(&reach, &program);
        let said = |fault: &Fault| {
            let found = notes.check(&*device, fault).err();
            assert_eq!(fault.error().is_some(), found.is_some());
            found.map(|error| error.to_string())
        };
        assert_eq!(said(&Fault::default()), None);
        let tensor = reach.tensors[1][&0].address();
        let scratch = |number: usize| {
            let scratch = &program.scratch[number];
            let area = reach.layout.area(scratch.packing).offset_bytes;
            let workspace = reach.workspaces[1].as_ref().unwrap();
            workspace.address() + (area + scratch.offset_bytes) as u64
        };
        let stride = 16 / 8 * 4 * program.scratch[1].strides[0] as u64;
        for (address, word) in [
            (tensor + 4 * 7, "C[1][2]"),
            (scratch(0) + 8 * 3, "P[3]"),
            (scratch(1) + stride + 16, "H[1][2]"),
            (64, "a value in memory at 0x40"),
            (0, "a value in memory"),
        ] {
            let words = [7 << 32 | 12, -5_i64 as u64, 40, 2, 1, address];
            store(&*device, &reach, Reach::value_note_offset(4, 3), &words);
            for _ in 0..2 {
                let said = said(&Fault::default()).unwrap();
                let expected =
                    format!("line 7, column 12 (lane = 2): {word} is -5; expected 0 to 40");
                assert!(said.contains(&expected), "{said} lacks '{expected}'");
            }
        }
        drop(reach);
        assert_eq!(said(&Fault::default()), None);
    }

    #[test]
    fn announcements_that_differ_are_an_error_with_their_peer() {
        let device = open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let program = unrolled();
        let reach = reach(&program, &*device);
        // The second peer's: its words, a byte for the first packet, and this rank's words.
        let mut words = [0; VERDICT_BYTES / 8];
        (words[0], words[8], words[9]) = (8 << 32 | 5, 1, 9 << 32 | 5);
        let from = EPOCH_BYTES * reach.lanes + VERDICT_BYTES;
        store(&*device, &reach, from, &words);
        let error = reach.noted_in(&program, &*device).unwrap().unwrap();
        assert_eq!(error.peer(), Some(0), "{error}");
        let said = error.to_string();
        for part in ["the peer announces [5, 8", "expected [5, 9"] {
            assert!(said.contains(part), "{said} lacks '{part}'");
        }
    }
}
