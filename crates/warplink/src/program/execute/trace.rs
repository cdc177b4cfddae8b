//! Timeline of a run's operations, in the format that Perfetto opens.

use super::context::RankContext;
use super::kernel::TracedKernel;
use super::trace_span::TraceSpan;
use crate::device::{Device, Event, InUse, Stream};
use crate::error::{Error, Rank, Result};
use crate::program::rank_program::{Operation, StreamKind};
use serde::Serialize;
use std::sync::Arc;

/// Trace of a run of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Name of the program.
    pub program: String,
    /// Every operation.
    pub spans: Vec<TraceSpan>,
}

#[derive(Serialize)]
struct PerfettoEvent<'a> {
    name: &'a str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: PerfettoArguments<'a>,
}

#[derive(Serialize)]
struct PerfettoArguments<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    site: Option<&'a str>,
}

impl Trace {
    /// Converts the trace to a list of events for Perfetto and Chrome's viewer, with a process for each rank and a
    /// thread for each stream and lane.
    pub fn to_perfetto(&self) -> Vec<impl Serialize + '_> {
        let mut tracks: Vec<(Rank, &str)> = self
            .spans
            .iter()
            .map(|span| (span.rank, &*span.stream))
            .collect();
        // Sorted for the binary search below; the index in the list is the track's thread id, which must be unique in
        // the trace.
        tracks.sort_unstable();
        tracks.dedup();
        let meta = |name, pid, tid, title| PerfettoEvent {
            name,
            ph: "M",
            pid,
            tid,
            ts: None,
            dur: None,
            args: PerfettoArguments {
                name: Some(title),
                site: None,
            },
        };
        let mut events = Vec::with_capacity(self.spans.len() + 2 * tracks.len());
        for (tid, (rank, stream)) in tracks.iter().enumerate() {
            events.push(meta("process_name", *rank, tid, format!("rank {rank}")));
            events.push(meta("thread_name", *rank, tid, (*stream).to_owned()));
        }
        for span in &self.spans {
            let tid = tracks
                .binary_search(&(span.rank, &span.stream))
                .unwrap_or_default();
            events.push(PerfettoEvent {
                name: &span.operation,
                ph: "X",
                pid: span.rank,
                tid,
                ts: Some(span.start),
                dur: Some(span.duration),
                args: PerfettoArguments {
                    name: None,
                    site: Some(&span.site),
                },
            });
        }
        events
    }
}

/// Records timing events for the operations of a run.
pub(super) struct Tracer {
    device: Arc<dyn Device>,
    zero: Event,
    spans: Vec<Span>,
}

/// An operation between two events.
struct Span {
    operation: &'static str,
    site: String,
    stream: StreamKind,
    begin: Event,
    end: Event,
    /// Steps of its lanes, if it is a kernel.
    lanes: Option<Arc<InUse<TracedKernel>>>,
}

impl Tracer {
    /// Starts the clock of every rank, synchronized as closely as a barrier of the hosts allows.
    pub(super) fn start(context: &RankContext, stream: &Stream) -> Result<Self> {
        // Earlier work in the stream would delay the event at time 0 on this rank alone.
        stream.synchronize(context.deadline())?;
        // Before the barrier: creating an event may take longer on one rank than on another.
        let zero = context.device.create_event(true)?;
        context.barrier()?;
        stream.record(&zero)?;
        Ok(Self {
            device: context.device.clone(),
            zero,
            spans: Vec::new(),
        })
    }

    /// Records an event at the current point of `stream`.
    pub(super) fn mark(&self, stream: &Stream) -> Result<Event> {
        let event = self.device.create_event(true)?;
        stream.record(&event)?;
        Ok(event)
    }

    /// Records that `operation` ran between two events of `stream`.
    pub(super) fn span(
        &mut self,
        operation: &Operation,
        stream: StreamKind,
        (begin, end): (Event, Event),
        lanes: Option<Arc<InUse<TracedKernel>>>,
    ) {
        self.spans.push(Span {
            operation: operation.kind.name(),
            site: operation.site.to_string(),
            stream,
            begin,
            end,
            lanes,
        });
    }

    /// Gathers the times of all ranks on rank 0.
    pub(super) fn finish(self, context: &RankContext, program: &str) -> Result<Option<Trace>> {
        let rank = context.rank();
        let micros =
            |event: &Event| Ok::<f64, Error>(f64::from(event.elapsed_since(&self.zero)?) * 1e3);
        let mut own = Vec::with_capacity(self.spans.len());
        for span in &self.spans {
            let (start, end) = (micros(&span.begin)?, micros(&span.end)?);
            let stream = span.stream.to_string();
            if let Some(kernel) = &span.lanes {
                let place = (rank, stream.as_str());
                own.extend(kernel.times.spans(&*self.device, place, &(start..end))?);
            }
            own.push(TraceSpan {
                rank,
                stream,
                operation: span.operation.to_owned(),
                site: span.site.clone(),
                start,
                duration: end - start,
            });
        }
        // Collective on every rank, also on those that get nothing.
        let all = context.gather(&own)?;
        if rank != 0 {
            return Ok(None);
        }
        let spans = all.into_iter().flatten().collect();
        Ok(Some(Trace {
            program: program.to_owned(),
            spans,
        }))
    }
}
