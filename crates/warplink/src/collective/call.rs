//! A call of a collective, which must be identical on all ranks.

pub use crate::device::CollectiveKind;
use crate::device::{DeviceSlice, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Rank, Result};
use crate::named::Named as _;
use std::fmt;

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Kind.
    pub kind: CollectiveKind,
    /// Reduction operator, if it [reduces](CollectiveKind::reduces).
    pub op: Option<ReduceOp>,
    /// The element type.
    pub dtype: DType,
    /// Elements of a part: the data exchanged between two ranks. Input and output have
    /// [`CollectiveKind::rows`] parts.
    pub count: usize,
    /// Root, if it [has one](CollectiveKind::has_root).
    pub root: Option<Rank>,
}

/// Overlap of input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Overlap {
    Apart,
    /// Equal, or one contains the other.
    Shared,
}

impl Call {
    /// Whether `rank` reads its input and writes its output. Memory that a rank does not use may be anything.
    pub fn uses(&self, rank: Rank) -> (bool, bool) {
        // Without a root, every rank counts as one.
        let at_root = self.root.is_none_or(|root| root == rank);
        let to_root = matches!(self.kind, CollectiveKind::Reduce | CollectiveKind::Gather);
        (at_root || to_root, at_root || !to_root)
    }

    /// Call with the operator if its kind [reduces](CollectiveKind::reduces), and the root if its kind
    /// [has one](CollectiveKind::has_root).
    pub fn new(kind: CollectiveKind, op: ReduceOp, dtype: DType, count: usize, root: Rank) -> Self {
        Self {
            kind,
            op: kind.reduces().then_some(op),
            dtype,
            count,
            root: kind.has_root().then_some(root),
        }
    }

    /// Size of a part in bytes.
    pub fn bytes(&self) -> usize {
        self.count.saturating_mul(self.dtype.size())
    }

    /// The collective whose program executes it. Without data ranks still run a barrier, so that a rank with
    /// a different call is detected.
    pub(super) const fn program(&self) -> CollectiveKind {
        match self.count {
            0 => CollectiveKind::Barrier,
            _ => self.kind,
        }
    }

    /// Encodes the call for its announcement to other ranks: kind, algorithm, count and factor. A 64-bit
    /// factor replaces the upper half of the count, which is then 0.
    pub(super) fn words(&self, algorithm: u8) -> [u32; 4] {
        let op = self.op.map_or(0, |op| op.number() as u32);
        // Announced calls have few ranks; a user's value may contain any root.
        let root = self.root.map_or(0, |root| 1 + root.min(0xfe) as u32);
        let what = self.kind as u32 | op << 4 | (self.dtype as u32) << 8 | root << 16;
        let count = self.count as u64;
        let (third, fourth) = match self.op.and_then(ReduceOp::factor) {
            Some(factor) if self.dtype == DType::F64 => {
                let bits = factor.value().to_bits();
                ((bits >> 32) as u32, bits as u32)
            }
            Some(factor) => ((count >> 32) as u32, (factor.value() as f32).to_bits()),
            None => ((count >> 32) as u32, 0),
        };
        [
            what | u32::from(algorithm) << 24,
            count as u32,
            third,
            fourth,
        ]
    }

    /// Encodes the call for comparison between ranks that use the engine: 16 bits for the root, since there
    /// may be more ranks, and no algorithm.
    pub(super) fn engine_words(&self) -> [u32; 4] {
        let [what, rest @ ..] = self.words(0);
        let root = self.root.map_or(0, |root| 1 + root.min(0xfffe) as u32);
        let [second, third, fourth] = rest;
        [what & 0xffff | root << 16, second, third, fourth]
    }

    /// Describes an announced call.
    pub(super) fn describe(words: &[u32]) -> String {
        Self::describe_with(words, 8)
    }

    /// Describes a call of the engine.
    pub(super) fn describe_of_engine(words: &[u32]) -> String {
        Self::describe_with(words, 16)
    }

    fn describe_with(words: &[u32], root_bits: u32) -> String {
        let [what, low, third, fourth] =
            [0, 1, 2, 3].map(|word| words.get(word).copied().unwrap_or(0));
        let size = |from: u32, bits: u32| (what >> from & ((1 << bits) - 1)) as usize;
        let op = ReduceOp::numbered(size(4, 4) as i32);
        let scales = op.is_some_and(|op| op.factor().is_some());
        let (high, factor) = match DType::ALL.get(size(8, 8)) {
            Some(DType::F64) if scales => {
                let bits = u64::from(third) << 32 | u64::from(fourth);
                (0, f64::from_bits(bits))
            }
            _ => (third, f64::from(f32::from_bits(fourth))),
        };
        let count = u64::from(high) << 32 | u64::from(low);
        let Some(kind) = CollectiveKind::ALL.get(size(0, 4)) else {
            return format!("an unknown call ({what:#x}, {count})");
        };
        if *kind == CollectiveKind::Barrier {
            return kind.to_string();
        }
        let unit = DType::ALL.get(size(8, 8)).filter(|_| kind.reduces());
        let mut text = match unit {
            Some(dtype) => format!("{kind} of {count} {dtype}"),
            None => format!("{kind} of {count} bytes"),
        };
        if let Some(op) = op {
            let op = if scales {
                ReduceOp::scaled_sum(factor)
            } else {
                op
            };
            text += &format!(", {op}");
        }
        if let Some(root) = size(16, root_bits).checked_sub(1) {
            text += &format!(", root {root}");
        }
        text
    }

    /// The call as kernels execute it: in bytes if it does not reduce. Fails if it is invalid for `world`
    /// ranks.
    pub(super) fn checked(&self, world: usize) -> Result<Self> {
        let kind = self.kind;
        let refused = |text: String, help: &'static str| {
            Err(Error::invalid(text)
                .with_operation(kind.name())
                .with_help(help))
        };
        if self.op.is_some() != kind.reduces() || self.root.is_some() != kind.has_root() {
            let operator = if kind.reduces() {
                "requires an operator"
            } else {
                "takes no operator"
            };
            let root = if kind.has_root() {
                "requires a root"
            } else {
                "takes no root"
            };
            return refused(
                format!("{kind} {operator} and {root}"),
                "see CollectiveKind for the arguments of each collective",
            );
        }
        if let Some(root) = self.root.filter(|root| *root >= world) {
            let text = format!("rank {root} is out of range; expected a root below {world}");
            return refused(text, "name a rank of the communicator")
                .map_err(|error| error.with_peer(root));
        }
        let bytes = self.count.checked_mul(self.dtype.size());
        let Some(bytes) = bytes.filter(|bytes| bytes.checked_mul(world).is_some()) else {
            let text = format!("{} elements for each of {world} ranks", self.count);
            return refused(
                text + " are more than memory can hold",
                "pass a smaller count",
            );
        };
        if let Some(op) = self.op {
            op.check(self.dtype)
                .map_err(|error| error.with_operation(kind.name()))?;
            // The factor's 64 bits take the place of the count's upper half in the announcement.
            let announced = self.dtype != DType::F64 || u32::try_from(self.count).is_ok();
            if op.factor().is_some() && !announced {
                let text = format!("{} f64, {op}; expected at most {}", self.count, u32::MAX);
                return refused(text, "make several calls");
            }
            return Ok(*self);
        }
        Ok(Self {
            // Moves of different types with equal bytes share one kernel, and ranks may name other types for the same
            // bytes.
            dtype: DType::U8,
            count: bytes,
            ..*self
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Self::describe(&self.words(0)))
    }
}

/// Parts that a rank sends and receives in a call that only moves parts, with their peers; its own is in both lists.
pub(super) fn moved_parts(
    call: &Call,
    (rank, world): (Rank, usize),
    (output, input): (&DeviceSlice, &DeviceSlice),
) -> Result<[Vec<(Rank, DeviceSlice)>; 2]> {
    let part = |memory: &DeviceSlice, rows: usize, row: usize| {
        let row = if rows == 1 { 0 } else { row };
        memory.slice(row * call.bytes()..(row + 1) * call.bytes())
    };
    let (input_rows, output_rows) = call.kind.rows(world);
    let goes = |from: Rank, to: Rank| match call.kind {
        CollectiveKind::Gather => call.root == Some(to),
        CollectiveKind::Scatter => call.root == Some(from),
        _ => true,
    };
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    // Each rank starts with another peer, to spread the load over links.
    for peer in (0..world).map(|step| (rank + step) % world) {
        if goes(rank, peer) {
            sent.push((peer, part(input, input_rows, peer)?));
        }
        if goes(peer, rank) {
            received.push((peer, part(output, output_rows, peer)?));
        }
    }
    Ok([sent, received])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::diagnosis::difference;

    #[test]
    fn announcement_identifies_call() {
        let call = Call::new(
            CollectiveKind::Reduce,
            ReduceOp::Max,
            DType::BF16,
            5_000_000_000,
            3,
        );
        assert_eq!(call.to_string(), "reduce of 5000000000 bf16, max, root 3");
        let other = Call { count: 7, ..call };
        let text = difference(&call.words(1), &other.words(1));
        assert!(
            text.contains("the peer calls reduce of 7 bf16, max, root 3; expected reduce of 5")
        );
        let text = difference(&call.words(1), &call.words(2));
        assert!(text.contains("by different algorithms"), "{text}");
        assert!(call.checked(3).is_err() && call.checked(4).is_ok());
        for (dtype, factor) in [(DType::F32, "0.10000000149011612"), (DType::F64, "0.1")] {
            let scaled = |factor: f64| Call {
                op: Some(ReduceOp::scaled_sum(factor)),
                dtype,
                count: 9,
                ..call
            };
            let text = scaled(0.1).to_string();
            assert_eq!(
                text,
                format!("reduce of 9 {dtype}, scaled_sum({factor}), root 3")
            );
            let text = difference(&scaled(0.5).words(1), &scaled(0.25).words(1));
            let expected = "scaled_sum(0.25), root 3; expected reduce of 9";
            assert!(text.contains(expected), "{text}");
            // Factors that round to the same value are equal.
            let near = scaled(0.1 + 1e-12).words(1) == scaled(0.1).words(1);
            assert_eq!(near, dtype == DType::F32);
        }
        let scaled = Call {
            op: Some(ReduceOp::scaled_sum(0.5)),
            dtype: DType::F64,
            ..call
        };
        assert!(scaled.checked(4).is_err());
        let small = Call { count: 9, ..scaled };
        assert!(small.checked(4).is_ok());
        let integers = Call {
            dtype: DType::I32,
            ..small
        };
        let error = integers.checked(4).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported, "{error}");
        let moved = Call {
            kind: CollectiveKind::Gather,
            op: None,
            ..call
        };
        let checked = moved.checked(4).unwrap();
        assert_eq!(
            (checked.dtype, checked.bytes()),
            (DType::U8, 10_000_000_000)
        );
        for none in [
            Call { op: None, ..call },
            Call { root: None, ..call },
            Call {
                op: call.op,
                ..moved
            },
            Call {
                count: usize::MAX / 4,
                ..moved
            },
        ] {
            let error = none.checked(4).unwrap_err();
            assert_eq!(
                error.kind(),
                crate::ErrorKind::InvalidArgument,
                "{none:?}: {error}"
            );
        }
    }
}
