//! The measured call without its size, and the sizes and bandwidths that nccl-tests define for it.

use crate::commands::bench::peers::neighbours;
use crate::names::OneOf;
use crate::options::at_least;
use clap::Args;
use std::ops::Range;
use warplink::collective::{Call, CollectiveKind, Collectives, Message};
use warplink::device::{DeviceSlice, ReduceOp, Stream};
use warplink::named::listed;
use warplink::{Communicator, DType};

/// A collective, or messages between all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TemplateKind {
    Collective(CollectiveKind),
    /// Each rank sends to the next one, and receives from the one before.
    SendReceive,
}

/// The call that is measured, without its size.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Template {
    #[arg(value_name = "COLLECTIVE", value_parser = kind, help = format!(
        "Which collective: {}; with the last one, each rank sends to the next one and receives from the one before",
        names()
    ))]
    pub(super) kind: TemplateKind,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = OneOf(&DType::ALL))]
    pub(super) dtype: DType,
    #[arg(long, value_name = "OPERATOR", default_value = "sum",
        help = format!("How elements are reduced: {}", ReduceOp::forms()))]
    pub(super) op: ReduceOp,
    /// The root, for collectives that have one
    #[arg(long, value_name = "RANK", default_value = "0", value_parser = at_least::<usize>(0))]
    pub(super) root: usize,
}

/// Those with data.
fn moving() -> impl Iterator<Item = TemplateKind> {
    let all = CollectiveKind::ALL.into_iter();
    all.filter(|kind| *kind != CollectiveKind::Barrier)
        .map(TemplateKind::Collective)
        .chain([TemplateKind::SendReceive])
}

/// Their names, as help and errors list them.
pub(super) fn names() -> String {
    let names: Vec<String> = moving().map(name).collect();
    listed(names.iter().map(String::as_str))
}

/// Reads a name on the command line.
pub(super) fn kind(text: &str) -> Result<TemplateKind, String> {
    let found = moving().find(|kind| name(*kind) == text);
    found.ok_or_else(|| format!("expected {}", names()))
}

/// Its name on the command line and in nccl-tests.
pub(super) fn name(kind: TemplateKind) -> String {
    match kind {
        TemplateKind::Collective(kind) => kind.name().replace('_', "-"),
        TemplateKind::SendReceive => "send-receive".to_owned(),
    }
}

impl TemplateKind {
    pub(super) fn reduces(self) -> bool {
        matches!(self, Self::Collective(kind) if kind.reduces())
    }

    /// Whether nccl-tests run it in place.
    pub(super) fn has_in_place(self) -> bool {
        !matches!(
            self,
            Self::SendReceive | Self::Collective(CollectiveKind::AllToAll)
        )
    }

    /// The collective with input and output of the same length. A message is received as long as it is sent,
    /// as in a broadcast.
    fn shape(self) -> CollectiveKind {
        match self {
            Self::Collective(kind) => kind,
            Self::SendReceive => CollectiveKind::Broadcast,
        }
    }
}

impl Template {
    /// Bytes of which every size is a multiple: an element for each part of the larger of input and output.
    pub(super) fn unit(&self, world: usize) -> usize {
        let (input, output) = self.kind.shape().rows(world);
        input.max(output) * self.dtype.size()
    }

    /// The call for at most that many bytes of the larger of input and output.
    /// For messages, the call whose input and output are theirs.
    pub(super) fn call(&self, bytes: usize, world: usize) -> Call {
        let shape = self.kind.shape();
        Call::new(
            shape,
            self.op,
            self.dtype,
            bytes / self.unit(world),
            self.root,
        )
    }

    /// Enqueues a call, or messages of the same input and output.
    pub(super) fn enqueue(
        &self,
        (collectives, comm): (&Collectives, &Communicator),
        call: &Call,
        [input, output]: &[DeviceSlice; 2],
        stream: &Stream,
    ) -> warplink::Result<()> {
        if let TemplateKind::Collective(_) = self.kind {
            return collectives.enqueue(call, output, input, stream);
        }
        let [before, next] = neighbours(comm.rank(), comm.world());
        let messages = [Message::send(next, input), Message::receive(before, output)];
        collectives.send_receive(&messages, stream)
    }

    /// The factor from bandwidth to bus bandwidth, as in nccl-tests.
    pub(super) fn bus_factor(&self, world: usize) -> f64 {
        let (others, all) = ((world - 1) as f64, world as f64);
        match self.kind.shape() {
            // Everything but a rank's own part crosses its link twice: to be reduced, and then to be gathered.
            CollectiveKind::AllReduce => 2.0 * others / all,
            // All bytes cross the root's link once.
            CollectiveKind::Broadcast | CollectiveKind::Reduce => 1.0,
            _ => others / all,
        }
    }
}

/// Bytes of input and output.
pub(super) fn lengths(call: &Call, world: usize) -> [usize; 2] {
    let (input, output) = call.kind.rows(world);
    [input, output].map(|rows| rows * call.bytes())
}

/// The ranges of input and output in the memory of the larger of the two, in place.
pub(super) fn in_place(call: &Call, rank: usize, world: usize) -> [Range<usize>; 2] {
    let [input, output] = lengths(call, world);
    let whole = input.max(output);
    [input, output].map(|bytes| {
        // The shorter one is this rank's part of the longer one, as NCCL defines calls in place.
        let start = if bytes < whole { rank * bytes } else { 0 };
        start..start + bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_nccl_tests() {
        for (text, count, bytes, factor) in [
            ("all-reduce", 256, [1024, 1024], 1.5),
            ("all-gather", 64, [256, 1024], 0.75),
            ("reduce-scatter", 64, [1024, 256], 0.75),
            ("all-to-all", 64, [1024, 1024], 0.75),
            ("broadcast", 256, [1024, 1024], 1.0),
            ("send-receive", 256, [1024, 1024], 1.0),
        ] {
            let template = Template {
                kind: kind(text).unwrap(),
                dtype: DType::F32,
                op: ReduceOp::Sum,
                root: 0,
            };
            let call = template.call(1024, 4);
            assert_eq!(call.count, count, "{text}");
            assert_eq!(lengths(&call, 4), bytes, "{text}");
            assert_eq!(template.bus_factor(4), factor, "{text}");
            let places = match text {
                "all-gather" => [512..768, 0..1024],
                "reduce-scatter" => [0..1024, 512..768],
                _ => [0..1024, 0..1024],
            };
            assert_eq!(in_place(&call, 2, 4), places, "{text}");
        }
        assert!(kind("barrier").is_err() && kind("all_reduce").is_err());
    }
}
