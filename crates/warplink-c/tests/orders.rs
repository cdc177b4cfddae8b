//! Calls in random orders, with handles that may have been given back: every call gives the status that a model of
//! what is alive expects.

#![allow(clippy::unwrap_used)]

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::null;
use warplink::ErrorKind;
use warplink_c::channel::*;
use warplink_c::handles::*;
use warplink_c::job::*;
use warplink_c::memory::*;
use warplink_c::status::*;
use warplink_c::stream::*;
use warplink_c::types::*;

/// Bytes of every region.
const BYTES: u64 = 64;

/// A rank of its own, and what was made with it. What was given back stays in the lists.
struct Model {
    comm: Comm,
    is_alive: bool,
    regions: Vec<(Region, bool)>,
    streams: Vec<(Stream, bool)>,
}

/// Numbers that look random, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }

    fn one_of<'a, T>(&mut self, all: &'a mut [T]) -> Option<&'a mut T> {
        if all.is_empty() {
            return None;
        }
        let at = self.below(all.len());
        all.get_mut(at)
    }
}

fn last_error() -> String {
    // SAFETY: the text ends with a zero and is valid until the thread's next failure.
    let text = unsafe { CStr::from_ptr(warplink_last_error()) };
    text.to_str().unwrap().to_owned()
}

impl Model {
    /// Joins a job of one rank.
    fn join() -> Self {
        let mut options = warplink_options_default();
        options.device = c"host".as_ptr();
        options.timeout = 10.0;
        let (mut id, mut comm) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: places for what is written, and an id that was.
        unsafe {
            let status = warplink_unique_id_create(null(), 0, id.as_mut_ptr());
            assert_eq!(status, Status::SUCCESS, "{}", last_error());
            let status = warplink_init_from_id(comm.as_mut_ptr(), 1, id.as_ptr(), 0, &options);
            assert_eq!(status, Status::SUCCESS, "{}", last_error());
            Self {
                comm: comm.assume_init(),
                is_alive: true,
                regions: Vec::new(),
                streams: Vec::new(),
            }
        }
    }

    /// The status of a call that needs these to be alive, and would otherwise succeed.
    fn expected(needs: &[bool]) -> Status {
        if needs.iter().all(|alive| *alive) {
            Status::SUCCESS
        } else {
            ErrorKind::Closed.into()
        }
    }

    fn alloc(&mut self) -> (Status, Status) {
        let mut region = MaybeUninit::uninit();
        // SAFETY: a place for a region, which is read only where it was written.
        let status = unsafe { warplink_alloc(self.comm, BYTES as usize, region.as_mut_ptr()) };
        if status == Status::SUCCESS {
            // SAFETY: as above.
            self.regions.push((unsafe { region.assume_init() }, true));
        }
        (status, Self::expected(&[self.is_alive]))
    }

    fn create_stream(&mut self) -> (Status, Status) {
        let mut stream = MaybeUninit::uninit();
        // SAFETY: a place for a stream, which is read only where it was written.
        let status = unsafe { warplink_stream_create(self.comm, stream.as_mut_ptr()) };
        if status == Status::SUCCESS {
            // SAFETY: as above.
            self.streams.push((unsafe { stream.assume_init() }, true));
        }
        (status, Self::expected(&[self.is_alive]))
    }

    fn destroy(&mut self) -> (Status, Status) {
        let outcome = (
            warplink_destroy(self.comm),
            Self::expected(&[self.is_alive]),
        );
        self.is_alive = false;
        self.regions
            .iter_mut()
            .for_each(|(_, alive)| *alive = false);
        self.streams
            .iter_mut()
            .for_each(|(_, alive)| *alive = false);
        outcome
    }

    /// One call, with what it gave and what it should have. Nothing where there is nothing to call it with.
    fn step(&mut self, numbers: &mut Numbers) -> Option<(Status, Status)> {
        let mut bytes = [0_u8; BYTES as usize];
        let whole = |region| Span {
            region,
            offset: 0,
            bytes: BYTES,
        };
        let choice = numbers.below(100);
        Some(match choice {
            0 => self.destroy(),
            1..=19 => self.alloc(),
            20..=29 => self.create_stream(),
            30..=39 => {
                let (region, alive) = numbers.one_of(&mut self.regions)?;
                let expected = Self::expected(&[*alive]);
                *alive = false;
                (warplink_region_free(*region), expected)
            }
            40..=44 => {
                let (stream, alive) = numbers.one_of(&mut self.streams)?;
                let expected = Self::expected(&[*alive]);
                *alive = false;
                (warplink_stream_destroy(*stream), expected)
            }
            45..=59 => {
                let (region, alive) = *numbers.one_of(&mut self.regions)?;
                // SAFETY: as many bytes as the span has.
                let status = unsafe { warplink_upload(whole(region), bytes.as_ptr().cast()) };
                (status, Self::expected(&[alive]))
            }
            60..=69 => {
                let (region, alive) = *numbers.one_of(&mut self.regions)?;
                // SAFETY: room for as many bytes as the span has.
                let status = unsafe { warplink_download(bytes.as_mut_ptr().cast(), whole(region)) };
                (status, Self::expected(&[alive]))
            }
            70..=84 => {
                let (target, target_alive) = *numbers.one_of(&mut self.regions)?;
                let (source, source_alive) = *numbers.one_of(&mut self.regions)?;
                let (stream, stream_alive) = *numbers.one_of(&mut self.streams)?;
                let status = warplink_copy(whole(target), whole(source), stream);
                let needs = [target_alive, source_alive, stream_alive];
                (status, Self::expected(&needs))
            }
            85..=92 => {
                let (stream, alive) = *numbers.one_of(&mut self.streams)?;
                (
                    warplink_stream_synchronize(stream),
                    Self::expected(&[alive]),
                )
            }
            93..=95 => (
                warplink_barrier(self.comm),
                Self::expected(&[self.is_alive]),
            ),
            96 => (warplink_setup(self.comm), Self::expected(&[self.is_alive])),
            _ => {
                // Nothing was connected.
                let expected = if self.is_alive {
                    Status::INVALID_USAGE
                } else {
                    ErrorKind::Closed.into()
                };
                (warplink_proxy_launch(self.comm), expected)
            }
        })
    }
}

#[test]
fn calls_in_random_orders_give_what_a_model_expects() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let (mut models, mut calls, mut refused) = (Vec::new(), 0, 0);
    for _ in 0..8 {
        models.push(Model::join());
        for _ in 0..400 {
            // Also with those that were destroyed.
            let model = numbers.one_of(&mut models).unwrap();
            if let Some((status, expected)) = model.step(&mut numbers) {
                assert_eq!(status, expected, "call {calls}: {}", last_error());
                calls += 1;
                refused += u32::from(status != Status::SUCCESS);
            }
        }
    }
    assert!(
        refused > 300 && calls - refused > 300,
        "{refused} of {calls} refused"
    );
    for model in models.iter_mut().filter(|model| model.is_alive) {
        let (status, _) = model.destroy();
        assert_eq!(status, Status::SUCCESS, "{}", last_error());
    }
}
