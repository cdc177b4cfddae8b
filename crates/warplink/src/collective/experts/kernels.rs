//! Dispatch on GPUs until the program has been measured there: a kernel lists the rows (`kernels/experts.cu`), and messages
//! with counts in device memory move them.

use super::dispatch::Routed;
use super::{ExpertOptions, WORD, no_direct_path, parts};
use crate::collective::Inner;
use crate::collective::messages::{Count, Entry, Messages};
use crate::device::{AllocationKind, Argument, DeviceSlice, Kernel, Launch, ModuleSource, Stream};
use crate::error::Result;
use crate::p2p::Direction;
use std::sync::Arc;

/// Threads of a block.
const ROUTE_THREADS: u32 = 1024;

/// The loaded kernel, and the lists.
pub(super) struct ListedDispatch {
    route: Kernel,
    options: ExpertOptions,
    max_rows: usize,
    /// For each rank: number of rows, and token and expert of each. Behind the numbers of rows, that of tokens.
    counts: DeviceSlice,
    tokens: DeviceSlice,
    locals: DeviceSlice,
}

impl ListedDispatch {
    pub(super) fn new(inner: &Inner, options: &ExpertOptions) -> Result<Self> {
        let (world, device) = (inner.machine.world, &*inner.context.device);
        let rows = inner.messages.as_ref().and_then(Messages::rows);
        // Before memory is allocated: a row must fit a chunk, since it is not split.
        rows.ok_or_else(no_direct_path)?
            .check_unit(options.row_bytes())?;
        let source =
            ModuleSource::new("experts").with_cuda(include_str!("../../../kernels/experts.cu"));
        // SAFETY: the kernel accesses the memory of a launch within the lengths that the layer has checked.
        let module = unsafe { device.load_module(&source)? };
        let max_rows = options.rows_per_peer(world);
        let memory = |bytes: usize| device.allocate(bytes, AllocationKind::Plain);
        Ok(Self {
            route: module.kernel("route")?,
            options: *options,
            max_rows,
            counts: memory(WORD * (world + 1))?,
            tokens: memory(WORD * world * max_rows)?,
            locals: memory(WORD * world * max_rows)?,
        })
    }

    /// Enqueues listing and sending the rows of all tokens.
    pub(super) fn enqueue(
        &self,
        inner: &Inner,
        at: &Routed<'_>,
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        self.list(inner.machine.world, at, stream)?;
        let (rank, world) = (inner.context.rank(), inner.machine.world);
        let (row, rows) = (self.options.row_bytes(), self.max_rows);
        let parts = |memory: &DeviceSlice, bytes| parts(memory, world, bytes);
        let (sent, numbers, locals) = (
            parts(&self.counts, WORD)?,
            parts(&self.tokens, WORD * rows)?,
            parts(&self.locals, WORD * rows)?,
        );
        let received = (
            parts(at.rows, row * rows)?,
            parts(at.locals, WORD * rows)?,
            parts(at.counts, WORD)?,
        );
        let mut entries = Vec::with_capacity(4 * world);
        // Starts with this rank, so that ranks do not all target the same peer.
        for peer in (0..world).map(|step| (rank + step) % world) {
            let message = |direction, data, unit, count, index| Entry {
                peer,
                direction,
                data,
                bytes: unit * rows,
                unit,
                count,
                index,
            };
            let given = Count::Given(&sent[peer]);
            let stated = Count::Stated(&received.2[peer]);
            let numbers = Some(&numbers[peer]);
            let sends = Direction::Send;
            entries.push(message(sends, at.tokens, row, given, numbers));
            // Two messages for each direction and peer share one count: the rows, and the expert of each row.
            entries.push(message(sends, &locals[peer], WORD, given, None));
            let receives = Direction::Receive;
            entries.push(message(receives, &received.0[peer], row, stated, None));
            entries.push(message(receives, &received.1[peer], WORD, stated, None));
        }
        let rows = inner.messages.as_ref().and_then(Messages::rows);
        rows.map_or(Ok(()), |rows| rows.enqueue(&entries, (stream, is_recorded)))
    }

    /// Enqueues building the list of rows for each of `world` ranks.
    fn list(&self, world: usize, at: &Routed<'_>, stream: &Stream) -> Result<()> {
        let options = &self.options;
        let words = [
            at.experts.address(),
            (at.tokens.bytes() / options.row_bytes()) as u64,
            options.top_k as u64,
            options.experts as u64,
            (options.experts / world) as u64,
            self.max_rows as u64,
            self.counts.address(),
            self.tokens.address(),
            self.locals.address(),
            at.places.address(),
        ];
        let memory = [
            at.experts,
            &self.counts,
            &self.tokens,
            &self.locals,
            at.places,
        ];
        let launch = Launch::new(world as u32, ROUTE_THREADS);
        let memory: Arc<[DeviceSlice]> = memory.into_iter().cloned().collect();
        let arguments = [Argument::Words(words.into()), Argument::Memory(memory)];
        self.route.launch(stream, &launch, &arguments)
    }
}
