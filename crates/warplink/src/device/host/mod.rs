//! Host device: shared memory and threads stand in for a GPU. Memory is a shared-memory file, a stream is a
//! thread, and waiting for a word spins briefly and then sleeps on a futex.
//!
//! It is designed to be as unforgiving as a GPU: streams run concurrently, enqueued work is asynchronous, and
//! tests can delay any operation at random ([`Delays`]), so that a missing wait shows up as a wrong result.

mod capture;
pub(crate) mod channel;
mod collective;
mod compute;
mod doorbell;
mod elementwise;
mod event;
mod exchange;
mod extremes;
mod graph;
pub(crate) mod kernel;
pub(crate) mod lane;
mod lanes;
mod mapping;
mod mark;
pub(in crate::device) mod memory;
mod operation;
mod outbox;
mod packets;
mod segment;
pub(crate) mod signals;
mod stream;
mod transfers;
mod unmapping;
mod words;
mod worker;

use super::{
    AllGatherBytes, AllocationKind, Attachment, CollectiveEngine, Compute, Delays, Device,
    DeviceIdentity, DeviceKind, DeviceLink, DeviceLinks, DeviceSlice, Event, Export, Fault,
    LinkEnd, LinkQuery, Module, ModuleSource, Opening, PciAddress, PeerAccess, Pretend, Priority,
    Segment, Stream, VendorCommunicator,
};
use crate::deadline::Deadline;
use crate::device::channel::fifo::HostFifoMemory;
use crate::device::{DeviceProperties, Fifo, FifoReader, StagingMemory, machine_identity};
use crate::error::{Error, Result};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use unmapping::LateUnmapping;

#[derive(Debug)]
pub(crate) struct HostDevice {
    identity: DeviceIdentity,
    fault: Arc<Fault>,
    delays: Option<Delays>,
    pretend: Pretend,
    /// Hardware threads, cached since the system reads several files to report them.
    threads: usize,
    /// Started with the first mapping if delays are requested.
    late_unmapping: OnceLock<LateUnmapping>,
}

impl HostDevice {
    pub(crate) fn open(delays: Option<Delays>, pretend: Pretend) -> Arc<dyn Device> {
        Arc::new(Self::new(delays, pretend))
    }

    fn new(delays: Option<Delays>, pretend: Pretend) -> Self {
        Self {
            identity: DeviceIdentity(machine_identity()),
            fault: Arc::default(),
            delays,
            pretend,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            late_unmapping: OnceLock::new(),
        }
    }

    /// The thread that unmaps asynchronously, if delays are requested.
    fn late_unmapping(&self) -> Result<Option<LateUnmapping>> {
        let Some(delays) = self.delays else {
            return Ok(None);
        };
        if let Some(late) = self.late_unmapping.get() {
            return Ok(Some(late.clone()));
        }
        let late = LateUnmapping::start(delays)?;
        Ok(Some(self.late_unmapping.get_or_init(|| late).clone()))
    }
}

/// Processor model; empty if the system does not report it.
fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let name = lines.find(|(key, _)| key.trim() == "model name");
    name.map_or_else(String::new, |(_, name)| name.trim().to_owned())
}

/// Fails unless `slice` belongs to the host device.
fn check_kind(slice: &DeviceSlice) -> Result<()> {
    if slice.kind() == DeviceKind::Host {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{slice:?} belongs to device {}; expected memory of the host device",
        slice.kind()
    ))
    .with_help("use memory of the same device"))
}

impl LinkQuery for HostDevice {
    fn attachment(&self) -> Result<Attachment> {
        Ok(Attachment::find(None))
    }

    /// Models the shared memory of a machine's ranks as a switch with one link to each.
    fn links(&self) -> Result<DeviceLinks> {
        if self.pretend == Pretend::NoPeerAccess {
            return Ok(DeviceLinks::default());
        }
        Ok(DeviceLinks {
            links: vec![DeviceLink {
                number: 0,
                version: None,
                end: LinkEnd::Switch,
            }],
        })
    }

    fn reaches(&self, peer: Option<PciAddress>) -> Result<bool> {
        Ok(peer.is_none() && self.pretend != Pretend::NoPeerAccess)
    }

    fn peer_access(&self, peer: Option<PciAddress>) -> Option<PeerAccess> {
        let access = match peer {
            None => PeerAccess::FULL,
            Some(_) => PeerAccess::NONE,
        };
        Some(self.pretend.limit(access))
    }
}

impl Device for HostDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn name(&self) -> String {
        format!("host ({} hardware threads)", self.threads)
    }

    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            model: "host".to_owned(),
            version: processor_name(),
            multiprocessors: self.threads,
            cluster_blocks: 1,
            clock: 0.0,
            products: [0.0; 2],
            memory_rate: 0.0,
            link_rate: 0.0,
            linked: true,
            shared: true,
            kernel_copies: true,
        }
    }

    fn identity(&self) -> DeviceIdentity {
        self.identity
    }

    fn is_shareable(&self) -> bool {
        true
    }

    fn fault(&self) -> &Arc<Fault> {
        &self.fault
    }

    fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice> {
        let slice = memory::allocate(bytes, kind)?;
        self.prepare_reuse(&slice);
        Ok(slice)
    }

    fn prepare_reuse(&self, slice: &DeviceSlice) {
        // Fresh pages are zero, and reused ones contain values that were once right, which would hide reads
        // of uninitialized memory. Fill with garbage in tests.
        if self.delays.is_some() {
            memory::fill(slice, 0xa5);
        }
    }

    fn allocate_signals_for(
        &self,
        bytes: usize,
        kind: AllocationKind,
        fault: &Arc<Fault>,
    ) -> Result<DeviceSlice> {
        memory::allocate_for(bytes, kind, Some(fault.clone()))
    }

    fn reserve_segment(&self, bytes: usize) -> Result<Arc<dyn Segment>> {
        Ok(Arc::new(segment::HostSegment::reserve(bytes)?))
    }

    unsafe fn borrow(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<DeviceSlice> {
        memory::borrow(address, bytes, owner)
    }

    fn upload(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()> {
        check_kind(target)?;
        self.fault.check()?;
        memory::write_bytes(target, bytes)
    }

    fn download(&self, source: &DeviceSlice, bytes: &mut [u8]) -> Result<()> {
        check_kind(source)?;
        self.fault.check()?;
        memory::read_bytes(source, bytes)
    }

    fn create_stream(&self, _priority: Priority) -> Result<Stream> {
        // Of the process, as the handles of a GPU's streams: those of several device objects are compared, too.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only uniqueness matters.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let stream = stream::HostStream::start(number, self.fault.clone(), self.delays)?;
        Ok(Stream::new(stream))
    }

    unsafe fn borrow_stream(
        &self,
        _raw: u64,
        _owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Stream> {
        Err(
            Error::unsupported("the host device's streams have no raw form")
                .with_operation("borrow a stream")
                .with_device(self.name())
                .with_help("create a stream"),
        )
    }

    fn create_event(&self, timing: bool) -> Result<Event> {
        Ok(Event::new(Arc::new(event::HostEvent::new(timing))))
    }

    fn export(&self, slice: &DeviceSlice) -> Result<Export> {
        check_kind(slice)?;
        let allocation = slice.allocation();
        let (pieces, host) = memory::pieces(&allocation)?;
        Ok(Export {
            allocation,
            ipc: None,
            pieces,
            host,
        })
    }

    fn import(&self, opening: Opening, bytes: usize) -> Result<DeviceSlice> {
        let pieces = match opening {
            Opening::SameProcess(slice) => return check_kind(&slice).map(|()| slice),
            Opening::Pieces(pieces) => pieces,
            Opening::Host(piece) => vec![piece],
            Opening::Ipc(_) => {
                return Err(Error::invalid_handle(
                    "a CUDA IPC handle cannot be opened on the host device",
                )
                .with_operation("open a handle"));
            }
        };
        let mapped = memory::map(pieces, bytes, self.late_unmapping()?)?;
        if self.pretend != Pretend::Nothing {
            memory::deny_atomics(&mapped);
        }
        Ok(mapped)
    }

    fn after_unmapping(&self, then: Box<dyn FnOnce() + Send>) {
        match self.late_unmapping.get() {
            Some(late) => late.then(then),
            // Without delays, dropping the last holder of a mapping has unmapped it already.
            None => then(),
        }
    }

    unsafe fn load_module(&self, source: &ModuleSource) -> Result<Module> {
        self.fault.check()?;
        source.check_image()?;
        Ok(Module::new(Arc::new(kernel::HostModule::load(
            source,
            self.threads,
        )?)))
    }

    fn create_fifo(&self, slots: usize) -> Result<(Arc<Fifo>, FifoReader)> {
        Fifo::new(slots, |slots| Ok(Box::new(HostFifoMemory::new(slots))))
    }

    fn allocate_staging(&self, bytes: usize) -> Result<StagingMemory> {
        let memory = memory::allocate(bytes, AllocationKind::Plain)?;
        memory::fill(&memory, 0);
        // SAFETY: the memory is mapped in this process, and this crate accesses it by atomics and raw copies alone.
        Ok(unsafe { StagingMemory::new(memory) })
    }

    fn compute(&self) -> Result<Arc<dyn Compute>> {
        Ok(Arc::new(compute::HostCompute))
    }

    fn collective_engine(
        &self,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
        _: Deadline,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Arc<dyn CollectiveEngine>> {
        Ok(Arc::new(collective::HostCollectives::join(
            self,
            (rank, world),
            fault,
            all_gather,
        )?))
    }

    fn adopt_collective_engine(
        &self,
        communicator: VendorCommunicator,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
    ) -> Result<Arc<dyn CollectiveEngine>> {
        let adopted = collective::HostCollectives::adopt(self, communicator, (rank, world), fault)?;
        Ok(Arc::new(adopted))
    }
}
