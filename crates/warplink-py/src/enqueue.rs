//! Enqueues collectives and messages on arrays and on memory at addresses.

use crate::array::Reader;
use crate::collective_call::call_on;
use crate::collectives::Collectives;
use crate::errors::{closed, detached, invalid};
use crate::owner::Detached;
use crate::parts::Cut;
use crate::place::Place;
use crate::stream::Stream;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::collective::{Call, CollectiveKind, Message};
use warplink::device::{AllocationKind, DeviceSlice};
use warplink::{DType, Rank};

/// Size of the placeholder allocation passed for arrays without elements.
const NOTHING: usize = 16;

impl Collectives {
    pub(crate) fn new(
        inner: warplink::Collectives,
        place: &Place,
        (rank, world): (Rank, usize),
    ) -> warplink::Result<Self> {
        // Devices do not allocate empty memory; an empty part of some does.
        let nothing = place.device.allocate(NOTHING, AllocationKind::Plain)?;
        Ok(Self {
            inner: Detached::new(inner, || closed("collectives")),
            place: place.clone(),
            rank,
            world,
            nothing: nothing.slice(0..0)?,
            watched: Arc::default(),
        })
    }

    /// Reads the arrays of a call on `stream`.
    pub(crate) fn reader(&self, stream: &Stream) -> Reader<'_> {
        Reader::new(&self.place, Some(stream.raw())).with_empty(&self.nothing)
    }

    /// Makes a call that enqueues work, and notifies what watches the calls.
    pub(crate) fn make(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> warplink::Result<()> + Send,
    ) -> PyResult<()> {
        detached(py, call)?;
        // Only after success: a call that was rejected enqueued nothing to wait for.
        self.watched.made();
        Ok(())
    }

    /// A collective between two arrays.
    pub(crate) fn enqueue(
        &self,
        stream: &Stream,
        kind: CollectiveKind,
        [target, source]: [&Bound<'_, PyAny>; 2],
        op: Option<(&str, Option<f64>)>,
        root: Option<Rank>,
    ) -> PyResult<()> {
        let py = target.py();
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let reader = self.reader(stream);
        let target = reader.for_targets().read(target, "the target")?;
        let source = reader.read(source, "the source")?;
        let call = call_on(kind, [&target, &source], op, root, self.world)?;
        self.make(py, || {
            inner.enqueue(&call, &target.slice, &source.slice, live)
        })
    }

    /// Implementation of `call_at`.
    pub(crate) fn enqueue_at(
        &self,
        py: Python<'_>,
        call: &Call,
        stream: &Stream,
        [target, source]: [u64; 2],
    ) -> PyResult<()> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let (input_rows, output_rows) = call.kind.rows(self.world);
        let memory = |address: u64, rows: usize| {
            let bytes = rows.checked_mul(call.dtype.size());
            let bytes = bytes.and_then(|bytes| bytes.checked_mul(call.count));
            let overflows = || {
                invalid(format!(
                    "{} elements overflow the address space",
                    call.count
                ))
            };
            self.place
                .borrow_operand(address, bytes.ok_or_else(overflows)?)
        };
        let (reads, writes) = call.uses(self.rank);
        let place =
            |used: bool, address: u64, rows: usize| used.then(|| memory(address, rows)).transpose();
        let used = (
            place(reads, source, input_rows)?,
            place(writes, target, output_rows)?,
        );
        let (source, target) = match used {
            (Some(source), Some(target)) => (source, target),
            // The library ignores the one that this rank does not use.
            (Some(used), None) | (None, Some(used)) => (used.clone(), used),
            (None, None) => return Ok(()),
        };
        self.make(py, || inner.enqueue(call, &target, &source, live))
    }

    /// Implementation of `all_to_all_v_at`.
    pub(crate) fn all_to_all_at(
        &self,
        py: Python<'_>,
        stream: &Stream,
        [target, source]: [u64; 2],
        [received, sent]: [Vec<usize>; 2],
    ) -> PyResult<()> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let memory = |address: u64, parts: &[usize]| {
            let sum = |sum: usize, part: &usize| sum.checked_add(*part);
            match parts.iter().try_fold(0, sum) {
                // A rank may send or receive nothing, and PyTorch's empty tensors have null addresses.
                Some(0) => Ok(self.nothing.clone()),
                Some(bytes) => self.place.borrow_operand(address, bytes),
                None => Err(invalid("the parts overflow the address space")),
            }
        };
        let target = memory(target, &received)?;
        let source = memory(source, &sent)?;
        let received = Cut::new(received, None, 1);
        let sent = Cut::new(sent, None, 1);
        self.make(py, || {
            let output = (&target, received.parts());
            inner.all_to_all_v(output, (&source, sent.parts()), DType::U8, live)
        })
    }

    /// Enqueues sends and receives.
    pub(crate) fn messages(
        &self,
        py: Python<'_>,
        stream: &Stream,
        sends: &[(Rank, DeviceSlice)],
        receives: &[(Rank, DeviceSlice)],
    ) -> PyResult<()> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let sends = sends.iter().map(|(peer, data)| Message::send(*peer, data));
        let receives = receives.iter();
        let receives = receives.map(|(peer, data)| Message::receive(*peer, data));
        let messages: Vec<Message<'_>> = sends.chain(receives).collect();
        self.make(py, || inner.send_receive(&messages, live))
    }
}
