//! What is measured, and the sizes and bandwidths that nccl-tests define for it.

use std::ops::Range;
use warplink::DType;
use warplink::collective::{Call, CollectiveKind};
use warplink::device::ReduceOp;

/// A collective with all but its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct What {
    pub(super) kind: CollectiveKind,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: usize,
}

/// The collective that a name on the command line means: one that moves data.
pub(super) fn kind(text: &str) -> Result<CollectiveKind, String> {
    let moving = || {
        let all = CollectiveKind::ALL.into_iter();
        all.filter(|kind| *kind != CollectiveKind::Barrier)
    };
    moving().find(|kind| name(*kind) == text).ok_or_else(|| {
        let names: Vec<String> = moving().map(name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// Its name on the command line and in nccl-tests.
pub(super) fn name(kind: CollectiveKind) -> String {
    kind.name().replace('_', "-")
}

impl What {
    /// Bytes of which every size is a multiple: an element for each part of the larger of input and output.
    pub(super) fn unit(&self, world: usize) -> usize {
        let (input, output) = self.kind.rows(world);
        input.max(output) * self.dtype.size()
    }

    /// The call for at most that many bytes of the larger of input and output.
    pub(super) fn call(&self, bytes: usize, world: usize) -> Call {
        Call {
            kind: self.kind,
            op: self.kind.reduces().then_some(self.op),
            dtype: self.dtype,
            count: bytes / self.unit(world),
            root: self.kind.has_root().then_some(self.root),
        }
    }

    /// By which the bandwidth is multiplied to give that of the bus, as in nccl-tests.
    pub(super) fn bus_factor(&self, world: usize) -> f64 {
        let (others, all) = ((world - 1) as f64, world as f64);
        match self.kind {
            CollectiveKind::AllReduce => 2.0 * others / all,
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

/// Where in the memory of the larger of the two input and output lie, in place.
pub(super) fn in_place(call: &Call, rank: usize, world: usize) -> [Range<usize>; 2] {
    let [input, output] = lengths(call, world);
    let whole = input.max(output);
    [input, output].map(|bytes| {
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
        ] {
            let what = What {
                kind: kind(text).unwrap(),
                dtype: DType::F32,
                op: ReduceOp::Sum,
                root: 0,
            };
            let call = what.call(1024, 4);
            assert_eq!(call.count, count, "{text}");
            assert_eq!(lengths(&call, 4), bytes, "{text}");
            assert_eq!(what.bus_factor(4), factor, "{text}");
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
