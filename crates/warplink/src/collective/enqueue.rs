//! From a call's slices to its launch.

use super::Collectives;
use super::call::{Call, CollectiveKind, Overlap};
use super::join::CallPath;
use super::launches::{CallKey, is_aligned};
use crate::device::{DeviceSlice, ReduceOp, Stream};
use crate::dtype::DType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
use std::ops::Range;

/// Memory use of a call on this rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uses {
    pub(super) reads: bool,
    pub(super) writes: bool,
    pub(super) overlap: Overlap,
}

impl Collectives {
    /// Enqueues a call on all of this memory. Kinds that only move bytes ignore the operator, and those without a root
    /// the root.
    pub(super) fn enqueue_on(
        &self,
        kind: CollectiveKind,
        (output, input): (&DeviceSlice, &DeviceSlice),
        (dtype, op): (DType, ReduceOp),
        root: Rank,
        stream: &Stream,
    ) -> Result<()> {
        let bytes = self.part_bytes(kind, (output, input));
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(Error::invalid(format!(
                "a slice of {bytes} bytes; expected a multiple of the {} bytes of {dtype}",
                dtype.size()
            ))
            .with_operation(kind.name())
            .with_help("pass whole elements"));
        }
        let call = Call::new(kind, op, dtype, bytes / dtype.size(), root);
        self.enqueue(&call, output, input, stream)
    }

    /// Bytes of a part of a call on this memory: of a slice that every rank uses and that has one part, if there is one.
    pub(super) fn part_bytes(
        &self,
        kind: CollectiveKind,
        (output, input): (&DeviceSlice, &DeviceSlice),
    ) -> usize {
        match kind {
            CollectiveKind::ReduceScatter | CollectiveKind::Broadcast | CollectiveKind::Scatter => {
                output.bytes()
            }
            CollectiveKind::AllToAll => input.bytes() / self.0.machine.world,
            _ => input.bytes(),
        }
    }

    /// Enqueues a call given as a value, like the methods named after collectives. Does not block.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`ErrorKind::InvalidArgument`] for an operator or root that
    /// is superfluous or missing.
    pub fn enqueue(
        &self,
        call: &Call,
        output: &DeviceSlice,
        input: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let (call, uses) = self.uses(call, output, input)?;
        self.enqueue_checked(&call, uses, (output, input), stream)
    }

    /// The same, for a call validated by [`uses`](Self::uses).
    pub(super) fn enqueue_checked(
        &self,
        call: &Call,
        uses: Uses,
        (output, input): (&DeviceSlice, &DeviceSlice),
        stream: &Stream,
    ) -> Result<()> {
        if call.count == 0 {
            // Synchronize even without data, so that a rank with a different call is detected.
            return self.launch(call, &[], Overlap::Apart, stream);
        }
        if let Some(bytes) = self.too_long(call) {
            return self.enqueue_pieces(call, uses, (output, input), bytes, stream);
        }
        let scales = call.op.is_some_and(|op| op.factor().is_some());
        // Without peers nothing moves, but a scaling operator must still be applied.
        if self.0.machine.world == 1 && !scales {
            self.0.context.fault.check()?;
            return self.in_turn(call, stream, |_| {
                if output.address() == input.address() {
                    return Ok(());
                }
                stream.copy(output, input)
            });
        }
        // A slice that this rank does not use may be anything; it is replaced by the other one.
        let input = if uses.reads { input } else { output };
        let output = if uses.writes { output } else { input };
        self.launch(call, &[input, output], uses.overlap, stream)
    }

    /// Validates a call; returns it as kernels execute it, with its memory use on this rank.
    pub(super) fn uses(
        &self,
        call: &Call,
        output: &DeviceSlice,
        input: &DeviceSlice,
    ) -> Result<(Call, Uses)> {
        let world = self.0.machine.world;
        let call = call.checked(world)?;
        let rank = self.0.context.rank();
        let (input_rows, output_rows) = call.kind.rows(world);
        let (reads, writes) = call.uses(rank);
        if reads {
            check_slice(&call, "input", input, input_rows)?;
        }
        if writes {
            check_slice(&call, "output", output, output_rows)?;
        }
        let overlap = if reads && writes {
            overlap(&call, rank, output, input)?
        } else {
            Overlap::Apart
        };
        let uses = Uses {
            reads,
            writes,
            overlap,
        };
        Ok((call, uses))
    }

    /// Launches the kernel of a call.
    pub(super) fn launch(
        &self,
        call: &Call,
        tensors: &[&DeviceSlice],
        overlap: Overlap,
        stream: &Stream,
    ) -> Result<()> {
        let inner = &self.0;
        inner.context.fault.check()?;
        // A barrier of one rank.
        if inner.machine.world == 1 && tensors.is_empty() {
            return Ok(());
        }
        let server = inner.path_for(call);
        let server = server.map_err(|error| error.with_operation(call.kind.name()))?;
        self.in_turn(call, stream, |is_recorded| match server {
            CallPath::Direct(direct) => {
                let tensors = (tensors, overlap);
                direct.enqueue(&inner.machine, call, tensors, (stream, is_recorded))
            }
            CallPath::Engine(engine) => {
                engine.enqueue(call, tensors, overlap, (stream, is_recorded))
            }
        })
    }

    /// Enqueues a call's work on `stream`, ordered after earlier calls. `work` receives whether it is being
    /// captured.
    pub(super) fn in_turn(
        &self,
        call: &Call,
        stream: &Stream,
        work: impl FnOnce(bool) -> Result<()>,
    ) -> Result<()> {
        let inner = &self.0;
        // Before the launch, so that the diagnosis of a hang names the call that hangs.
        *lock(&inner.last) = Some(*call);
        let enqueued = inner.used_by(stream, || inner.turns.take_with(stream, work));
        enqueued.map_err(|error| error.with_operation(call.kind.name()))
    }

    /// Compiles the kernel of a call ahead of time, for all alignments, in place and out of place. It takes
    /// 0.2 to 0.35 s the first time on a machine. Not collective. Blocks until no kernel of this process runs
    /// on the GPU, as does the first call of a kind: if ranks call several communicators in different orders,
    /// prepare the calls first.
    ///
    /// On a GPU it also prepares launches on aligned memory, up to 64 kernels for each communicator, which
    /// halves their host time. A call that was not prepared does that only if it loads the kernel's code
    /// itself, not on a module-cache hit.
    ///
    /// # Errors
    /// As [`choice`](Self::choice), and compile errors.
    pub fn prepare(&self, call: &Call) -> Result<()> {
        let call = call.checked(self.0.machine.world)?;
        // The four keys under which `enqueue` looks the kernel up.
        for aligned in [true, false] {
            for overlap in [Overlap::Apart, Overlap::Shared] {
                self.prepare_shape(call, aligned, overlap)?;
            }
        }
        Ok(())
    }

    /// The same, for calls whose memory is aligned and overlaps like these slices only: a quarter of the kernels.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) and [`enqueue`](Self::enqueue).
    pub fn prepare_for(
        &self,
        call: &Call,
        output: &DeviceSlice,
        input: &DeviceSlice,
    ) -> Result<()> {
        let (call, uses) = self.uses(call, output, input)?;
        let used = [(uses.reads, input), (uses.writes, output)];
        let aligned = used
            .iter()
            .all(|(is_used, slice)| !is_used || is_aligned(slice));
        self.prepare_shape(call, aligned, uses.overlap)
    }

    fn prepare_shape(&self, call: Call, aligned: bool, overlap: Overlap) -> Result<()> {
        let inner = &*self.0;
        // The vendor's library compiles nothing.
        let CallPath::Direct(direct) = inner.path_for(&call)? else {
            return Ok(());
        };
        if inner.machine.world == 1 && call.op.and_then(ReduceOp::factor).is_none() {
            return Ok(());
        }
        if let Some(bytes) = self.too_long(&call) {
            return match self.piece(&call, bytes) {
                // Long calls run as pieces of one length, with a kernel for it; the rest at the end may need another.
                Some(piece) => self.prepare_shape(piece, aligned, overlap),
                None => Ok(()),
            };
        }
        let shape = CallKey {
            call,
            aligned,
            overlap,
        };
        direct.prepare(&inner.machine, &shape)
    }
}

/// Fails unless a slice has `rows` parts of the call and is aligned to its elements, as devices require.
fn check_slice(call: &Call, what: &str, slice: &DeviceSlice, rows: usize) -> Result<()> {
    let refused = |text: String, help: &'static str| {
        Err(Error::invalid(text)
            .with_operation(call.kind.name())
            .with_help(help))
    };
    if rows.checked_mul(call.bytes()) != Some(slice.bytes()) {
        let text = format!(
            "the {what} has {} bytes; expected {rows} times {}",
            slice.bytes(),
            call.bytes()
        );
        return refused(text, "pass slices of fitting lengths");
    }
    let size = call.dtype.size();
    if slice.bytes() > 0 && !slice.address().is_multiple_of(size as u64) {
        let text = format!(
            "the {what} begins at {:#x}; expected a multiple of the {size} bytes of {}",
            slice.address(),
            call.dtype
        );
        return refused(text, "align it to the element size");
    }
    Ok(())
}

/// Overlap of input and output.
fn overlap(call: &Call, rank: Rank, output: &DeviceSlice, input: &DeviceSlice) -> Result<Overlap> {
    if !output.overlaps(input) {
        return Ok(Overlap::Apart);
    }
    let range = |slice: &DeviceSlice| {
        let from = slice.address();
        from..from + slice.bytes() as u64
    };
    let part = |whole: &DeviceSlice| {
        let from = whole.address() + (rank * call.bytes()) as u64;
        from..from + call.bytes() as u64
    };
    let same = |a: Range<u64>, b: Range<u64>| a == b;
    let fits = match call.kind {
        CollectiveKind::AllGather | CollectiveKind::Gather => same(range(input), part(output)),
        CollectiveKind::ReduceScatter | CollectiveKind::Scatter => same(range(output), part(input)),
        _ => same(range(input), range(output)),
    };
    if fits {
        return Ok(Overlap::Shared);
    }
    Err(Error::invalid(format!("input {input:?} and output {output:?} overlap in part; expected separate memory, or one in place"),
    )
    .with_operation(call.kind.name())
    .with_help("see Collectives for in-place calls"))
}
