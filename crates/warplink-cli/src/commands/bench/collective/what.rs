//! What is measured, and the sizes and bandwidths that nccl-tests define for it.

use super::Place;
use anyhow::{Result, bail};
use clap::ValueEnum;
use std::fmt;
use std::ops::Range;
use warplink::collective::{Call, CollectiveKind, Collectives};
use warplink::device::{Collective, CollectiveRequest, DeviceSlice, ReduceOp, Stream};
use warplink::{Communicator, DType};

/// A collective that moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
}

/// A collective with all but its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct What {
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: usize,
}

impl Kind {
    /// Its name on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
        }
    }

    pub(super) const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether input and output may be the same memory.
    pub(super) const fn has_place(self) -> bool {
        !matches!(self, Self::AllToAll)
    }

    /// Parts of which input and output consist.
    const fn parts(self, world: usize) -> (usize, usize) {
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce => (1, 1),
            Self::AllGather | Self::Gather => (1, world),
            Self::ReduceScatter | Self::Scatter => (world, 1),
            Self::AllToAll => (world, world),
        }
    }

    /// By which the bandwidth is multiplied to give that of the bus, as in nccl-tests.
    pub(super) fn bus_factor(self, world: usize) -> f64 {
        let (others, all) = ((world - 1) as f64, world as f64);
        match self {
            Self::AllReduce => 2.0 * others / all,
            Self::AllGather
            | Self::ReduceScatter
            | Self::AllToAll
            | Self::Gather
            | Self::Scatter => others / all,
            Self::Broadcast | Self::Reduce => 1.0,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl What {
    /// Bytes of which every size is a multiple.
    pub(super) fn unit(&self, world: usize) -> usize {
        let (input, output) = self.kind.parts(world);
        input.max(output) * self.dtype.size()
    }

    /// Elements of a part, for at most that many bytes of the larger of input and output.
    pub(super) fn count(&self, bytes: usize, world: usize) -> usize {
        bytes / self.unit(world)
    }

    /// Bytes of input and output, for parts of `count` elements.
    pub(super) fn lengths(&self, count: usize, world: usize) -> (usize, usize) {
        let (input, output) = self.kind.parts(world);
        let part = count * self.dtype.size();
        (input * part, output * part)
    }

    /// Where in the memory of the larger of the two input and output lie, in place.
    pub(super) fn in_place(&self, count: usize, rank: usize, world: usize) -> [Range<usize>; 2] {
        let (input, output) = self.lengths(count, world);
        let whole = input.max(output);
        [input, output].map(|bytes| {
            let start = if bytes < whole { rank * bytes } else { 0 };
            start..start + bytes
        })
    }

    /// The call, for the report of how it is done.
    pub(super) fn call(&self, count: usize) -> Call {
        let (kind, root) = (self.kind, Some(self.root));
        // Bytes are counted where nothing is reduced.
        let bytes = count * self.dtype.size();
        let (kind, op, root) = match kind {
            Kind::AllReduce => (CollectiveKind::AllReduce, Some(self.op), None),
            Kind::ReduceScatter => (CollectiveKind::ReduceScatter, Some(self.op), None),
            Kind::Reduce => (CollectiveKind::Reduce, Some(self.op), root),
            Kind::AllGather => (CollectiveKind::AllGather, None, None),
            Kind::AllToAll => (CollectiveKind::AllToAll, None, None),
            Kind::Broadcast => (CollectiveKind::Broadcast, None, root),
            Kind::Gather => (CollectiveKind::Gather, None, root),
            Kind::Scatter => (CollectiveKind::Scatter, None, root),
        };
        let reduces = op.is_some();
        Call {
            kind,
            op,
            dtype: if reduces { self.dtype } else { DType::U8 },
            count: if reduces { count } else { bytes },
            root,
        }
    }

    /// Enqueues Warplink's.
    pub(super) fn enqueue(
        &self,
        collectives: &Collectives,
        [input, output]: [&DeviceSlice; 2],
        stream: &Stream,
    ) -> Result<()> {
        let Self {
            dtype, op, root, ..
        } = *self;
        match self.kind {
            Kind::AllReduce => collectives.all_reduce(output, input, dtype, op, stream),
            Kind::ReduceScatter => collectives.reduce_scatter(output, input, dtype, op, stream),
            Kind::Reduce => collectives.reduce(output, input, dtype, op, root, stream),
            Kind::AllGather => collectives.all_gather(output, input, stream),
            Kind::AllToAll => collectives.all_to_all(output, input, stream),
            Kind::Broadcast => collectives.broadcast(output, input, root, stream),
            Kind::Gather => collectives.gather(output, input, root, stream),
            Kind::Scatter => collectives.scatter(output, input, root, stream),
        }?;
        Ok(())
    }

    /// What the vendor's library is asked for.
    pub(super) fn request(
        &self,
        comm: &Communicator,
        [source, target]: [&DeviceSlice; 2],
    ) -> Result<CollectiveRequest> {
        let collective = match self.kind {
            Kind::AllReduce => Collective::AllReduce(self.op),
            Kind::ReduceScatter => Collective::ReduceScatter(self.op),
            Kind::Reduce => Collective::Reduce(self.op, self.root),
            Kind::AllGather => Collective::AllGather,
            Kind::AllToAll => Collective::AllToAll,
            Kind::Broadcast => Collective::Broadcast(self.root),
            Kind::Gather => return exchange(comm, self.root, source, Some(target), None),
            Kind::Scatter => return exchange(comm, self.root, target, None, Some(source)),
        };
        Ok(CollectiveRequest::Collective {
            collective,
            dtype: self.dtype,
            target: target.clone(),
            source: source.clone(),
        })
    }
}

/// Gather and scatter, which the library has not: every rank has `part`, and the root sends `scattered` or
/// receives `gathered` besides.
fn exchange(
    comm: &Communicator,
    root: usize,
    part: &DeviceSlice,
    gathered: Option<&DeviceSlice>,
    scattered: Option<&DeviceSlice>,
) -> Result<CollectiveRequest> {
    let all = |whole: Option<&DeviceSlice>| -> Result<Vec<(usize, DeviceSlice)>> {
        let Some(whole) = whole.filter(|_| comm.rank() == root) else {
            return Ok(Vec::new());
        };
        let bytes = part.bytes();
        let parts = (0..comm.world())
            .map(|rank| Ok((rank, whole.slice(rank * bytes..(rank + 1) * bytes)?)));
        parts.collect()
    };
    let (mut sends, mut receives) = (all(scattered)?, all(gathered)?);
    match (gathered, scattered) {
        (Some(_), None) => sends.push((root, part.clone())),
        (None, Some(_)) => receives.push((root, part.clone())),
        _ => bail!("an exchange either gathers or scatters"),
    }
    Ok(CollectiveRequest::Exchange { sends, receives })
}

impl Place {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::In => "in",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_nccl_tests() {
        let what = |kind| What {
            kind,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            root: 0,
        };
        for (kind, count, lengths, factor) in [
            (Kind::AllReduce, 256, (1024, 1024), 1.5),
            (Kind::AllGather, 64, (256, 1024), 0.75),
            (Kind::ReduceScatter, 64, (1024, 256), 0.75),
            (Kind::AllToAll, 64, (1024, 1024), 0.75),
            (Kind::Broadcast, 256, (1024, 1024), 1.0),
        ] {
            assert_eq!(what(kind).count(1024, 4), count, "{kind}");
            assert_eq!(what(kind).lengths(count, 4), lengths, "{kind}");
            assert_eq!(kind.bus_factor(4), factor, "{kind}");
        }
        assert_eq!(
            what(Kind::AllGather).in_place(64, 2, 4),
            [512..768, 0..1024]
        );
        assert_eq!(
            what(Kind::AllReduce).in_place(256, 2, 4),
            [0..1024, 0..1024]
        );
    }
}
