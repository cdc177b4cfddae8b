//! The times of one method at one size.

use super::runner::P2pRunner;
use super::{Method, P2pTimes};
use crate::commands::bench::case::by_device;
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::peers::round_trip;
use anyhow::Result;
use warplink::device::{CollectiveRequest, DeviceSlice, Stream};
use warplink::memory::Region;
use warplink::p2p::{Batch, Path, Protocol, Transfer, TransferRequest};

/// Transfers of one protocol that are in flight at once, so that the handover of a buffer overlaps with
/// the transfers before.
const DEPTH: usize = 8;

/// The number of transfers of `bytes` that are posted together: the copies of a group follow one another
/// without a signal between, which large ones gain by; small ones are one kernel each anyway. Each
/// of the two streams has a second group announced while it copies the first.
fn group_size(bytes: usize) -> usize {
    if bytes >= 16 << 20 { DEPTH / 4 } else { 1 }
}

impl P2pRunner<'_> {
    pub(super) fn times(
        &self,
        bytes: usize,
        method: Method,
        submission: Submission,
        samples: usize,
    ) -> Result<P2pTimes> {
        let transfers = match method.transfer() {
            Some((protocol, path)) => self.transfers(bytes, protocol, path)?,
            None => Vec::new(),
        };
        // Raw gets have none: without a protocol, the receiver cannot know when it may get.
        let latency = (!self.ring && method != Method::RawGet)
            .then(|| self.latency(bytes, method, &transfers, submission, samples))
            .transpose()?;
        let transfer = self.many(bytes, method, &transfers, submission, samples)?;
        self.check(bytes, method)?;
        Ok(P2pTimes {
            bytes,
            method,
            submission,
            latency,
            transfer,
        })
    }

    /// A send to the right and a receive from the left, [`DEPTH`] times.
    fn transfers(
        &self,
        bytes: usize,
        protocol: Protocol,
        path: Option<Path>,
    ) -> Result<Vec<[Transfer; 2]>> {
        let (own, into) = self.buffers(bytes)?;
        let mut requests = Vec::new();
        if self.takes_part() {
            for tag in 0..DEPTH as u64 {
                let send = TransferRequest::send(&own, self.right, tag);
                let receive = TransferRequest::receive(&into, self.left, tag);
                requests.extend([send, receive].map(|request| {
                    let request = request.with_protocol(protocol);
                    match path {
                        Some(path) => request.with_path(path),
                        None => request,
                    }
                }));
            }
        }
        let mut transfers = self.clock.comm.exchange(&requests)?.into_iter();
        let mut pairs = Vec::new();
        while let (Some(send), Some(receive)) = (transfers.next(), transfers.next()) {
            pairs.push([send, receive]);
        }
        Ok(pairs)
    }

    /// A send to the right, a receive from the left, or both, by the vendor's library.
    fn exchange(&self, own: Option<&Region>, into: Option<&Region>) -> CollectiveRequest {
        let sends = own.map(|own| (self.right, own.memory().clone()));
        let receives = into.map(|into| (self.left, into.memory().clone()));
        CollectiveRequest::Exchange {
            sends: sends.into_iter().collect(),
            receives: receives.into_iter().collect(),
        }
    }

    /// Half a round trip between ranks 0 and 1.
    fn latency(
        &self,
        bytes: usize,
        method: Method,
        transfers: &[[Transfer; 2]],
        submission: Submission,
        samples: usize,
    ) -> Result<Times> {
        // Enough that the time at the two ends does not count.
        let round_trips = ((512usize << 20) / bytes).clamp(2, 50);
        let (own, into) = self.buffers(bytes)?;
        let remote = self.memory.remote_into(self.right)?.slice(0..bytes)?;
        let rank = self.clock.comm.rank();
        let send_by_engine = self.exchange(Some(&own), None);
        let receive_by_engine = self.exchange(None, Some(&into));
        let send = |stream: &Stream| -> Result<()> {
            if let (Method::Nccl, Some(engine)) = (method, &self.engine) {
                return Ok(engine.enqueue(stream, &send_by_engine)?);
            }
            stream.copy(&remote, &own)?;
            self.signal(stream, submission)
        };
        let receive = |stream: &Stream| -> Result<()> {
            if let (Method::Nccl, Some(engine)) = (method, &self.engine) {
                return Ok(engine.enqueue(stream, &receive_by_engine)?);
            }
            self.await_signal(stream, submission)
        };
        let times = self.clock.measure(samples, submission, 1, &|stream| {
            for _ in 0..round_trips {
                match (rank, transfers) {
                    (0 | 1, [pair, ..]) => round_trip(rank == 0, pair).enqueue(stream)?,
                    (0, _) => {
                        send(stream)?;
                        receive(stream)?;
                    }
                    (1, _) => {
                        receive(stream)?;
                        send(stream)?;
                    }
                    _ => {}
                }
            }
            Ok(())
        })?;
        Ok(times.divided((2 * round_trips) as f64))
    }

    /// One of many transfers in a row: from rank 0 to rank 1, or around the ring.
    fn many(
        &self,
        bytes: usize,
        method: Method,
        transfers: &[[Transfer; 2]],
        submission: Submission,
        samples: usize,
    ) -> Result<Times> {
        // Enough that the time at the two ends does not count.
        let most = by_device(self.clock.comm.device().kind(), [96, 16]);
        let size = group_size(bytes);
        // Whole groups, since the time is divided by this.
        let repeat = (((4usize << 30) / bytes).clamp(8, most) / size).max(1) * size;
        let (own, into) = self.buffers(bytes)?;
        let remote_into = self.memory.remote_into(self.right)?.slice(0..bytes)?;
        let remote_own = self.memory.remote_own(self.left)?.slice(0..bytes)?;
        let rank = self.clock.comm.rank();
        let (sends, receives) = (self.ring || rank == 0, self.ring || rank == 1);
        let times = self.clock.measure(samples, submission, 1, &|stream| {
            match (method, &self.engine) {
                (Method::Raw, _) => {
                    if sends {
                        self.copies(stream, repeat, remote_into.memory(), own.memory())?;
                        self.signal(stream, submission)?;
                    }
                    if receives {
                        self.await_signal(stream, submission)?;
                    }
                }
                // The receiver's own streams end when the last one has arrived.
                (Method::RawGet, _) if receives => {
                    self.copies(stream, repeat, into.memory(), remote_own.memory())?;
                }
                (Method::RawGet, _) => {}
                (Method::Nccl, Some(engine)) if sends || receives => {
                    let request = self.exchange(sends.then_some(&own), receives.then_some(&into));
                    for _ in 0..repeat {
                        engine.enqueue(stream, &request)?;
                    }
                }
                (Method::Nccl, _) => {}
                _ if transfers.is_empty() => {}
                _ => {
                    self.second.fork(stream)?;
                    let (turns, ahead) = (repeat / size, DEPTH / size);
                    for turn in 0..turns + ahead {
                        let first = turn * size % DEPTH;
                        let group = &transfers[first..first + size];
                        let ends = || {
                            let both = group.iter().flat_map(|[send, receive]| {
                                [sends.then_some(send), receives.then_some(receive)]
                            });
                            both.flatten()
                        };
                        let mut batch = Batch::new();
                        // Before their next post: a capture refuses two posts without a wait in between.
                        if turn >= ahead {
                            batch = batch.wait(ends());
                        }
                        if turn < turns {
                            batch = batch.post(ends());
                        }
                        batch.enqueue(self.second.stream_for(turn, stream))?;
                    }
                    self.second.join(stream)?;
                }
            }
            Ok(())
        })?;
        Ok(times.divided(repeat as f64))
    }

    /// The same copy `repeat` times, on the two streams in turn.
    fn copies(
        &self,
        stream: &Stream,
        repeat: usize,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        self.second.fork(stream)?;
        for turn in 0..repeat {
            self.second.stream_for(turn, stream).copy(target, source)?;
        }
        self.second.join(stream)
    }
}
