//! The `cuda` device.

use super::compute::CudaCompute;
use super::engine::NcclEngine;
use super::gpu::Gpu;
use super::kernels::nvrtc;
use super::kernels::transfer::TransferKernel;
use super::memory::borrowed;
use super::memory::fifo::CudaFifoMemory;
use super::memory::host_memory::HostMemory;
use super::memory::operands::Operands;
use super::memory::sharing;
use super::memory::virtual_memory::{CudaSegment, VirtualMemory};
use super::memory::{CudaBacking, PinnedMemory, PlainMemory, Source, next_identity};
use super::nvml::NvmlGpu;
use super::stream::CudaStream;
use super::stream::event::CudaEvent;
use super::user::UserModule;
use crate::deadline::Deadline;
use crate::device::{
    AllGatherBytes, AllocationKind, Attachment, CollectiveEngine, Compute, Device, DeviceIdentity,
    DeviceKind, DeviceLinks, DeviceProperties, DeviceSlice, Event, Export, Fault, Fifo, FifoReader,
    LinkQuery, Module, ModuleSource, Opening, PciAddress, PeerAccess, Pretend, Priority, Segment,
    StagingMemory, Stream, VendorCommunicator,
};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A GPU as used by one rank.
pub(super) struct CudaDevice {
    gpu: Arc<Gpu>,
    /// Created on first use. Not part of `Gpu`, which streams and memory hold: it holds streams itself.
    compute: Mutex<Option<Arc<CudaCompute>>>,
    pretend: Pretend,
    /// Holds `gpu`, as `compute` does.
    operands: Operands,
}

impl CudaDevice {
    pub(super) fn open(ordinal: usize, pretend: Pretend) -> Result<Arc<Self>> {
        let gpu = Gpu::open(ordinal)?;
        let word = PlainMemory::allocate(&gpu, size_of::<u64>())?;
        gpu.try_capturing(word.address)?;
        Ok(Arc::new(Self {
            gpu,
            compute: Mutex::new(None),
            pretend,
            operands: Operands::default(),
        }))
    }

    /// Access of this GPU to the memory of the one at `peer`, as the driver reports; `None` if it does not
    /// know that GPU.
    fn found_access(&self, peer: PciAddress) -> Option<PeerAccess> {
        let (driver, own) = (self.gpu.context.driver, self.gpu.context.device);
        let peer = driver.device_at(peer)?;
        if peer == own {
            return Some(PeerAccess::FULL);
        }
        if !driver.can_access_peer(own, peer).ok()? {
            return Some(PeerAccess::NONE);
        }
        Some(PeerAccess {
            mapped: true,
            atomics: driver.has_peer_atomics(own, peer).ok()?,
        })
    }
}

impl LinkQuery for CudaDevice {
    fn attachment(&self) -> Result<Attachment> {
        Ok(Attachment::find(Some(self.gpu.pci_address()?)))
    }

    fn links(&self) -> Result<DeviceLinks> {
        if self.pretend == Pretend::NoPeerAccess {
            return Ok(DeviceLinks::default());
        }
        NvmlGpu::open(self.gpu.pci_address()?)?.links()
    }

    fn reaches(&self, peer: Option<PciAddress>) -> Result<bool> {
        match peer {
            _ if self.pretend == Pretend::NoPeerAccess => Ok(false),
            Some(peer) => NvmlGpu::open(self.gpu.pci_address()?)?.reaches(peer),
            None => Ok(false),
        }
    }

    fn peer_access(&self, peer: Option<PciAddress>) -> Option<PeerAccess> {
        let access = self.found_access(peer?);
        match self.pretend {
            Pretend::Nothing => access,
            pretend => Some(pretend.limit(access.unwrap_or(PeerAccess::FULL))),
        }
    }
}

impl Device for CudaDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn name(&self) -> String {
        self.gpu.name()
    }

    fn properties(&self) -> DeviceProperties {
        let kernel = self.gpu.transfer_kernel.get().and_then(Option::as_ref);
        let all = self.gpu.properties();
        DeviceProperties {
            kernel_copies: kernel.is_some(),
            // Host memory is reached over PCIe, which splits packets of 128 bytes, so they need a link.
            linked: all.linked && self.pretend != Pretend::NoPeerAccess,
            ..all
        }
    }

    fn identity(&self) -> DeviceIdentity {
        self.gpu.capabilities.identity
    }

    fn is_shareable(&self) -> bool {
        self.gpu.capabilities.multi_process_service || finds_multi_process_service()
    }

    fn fault(&self) -> &Arc<Fault> {
        &self.gpu.fault
    }

    fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice> {
        self.gpu.fault.check()?;
        match kind {
            AllocationKind::Plain => Ok(PlainMemory::allocate(&self.gpu, bytes)?.into_slice(bytes)),
            AllocationKind::Virtual => {
                let memory = VirtualMemory::allocate(&self.gpu, bytes)?;
                let (address, whole) = (memory.address, memory.bytes);
                // The backing and a peer's mapping span whole pages; the slice has the requested length.
                CudaBacking::slice(
                    &self.gpu,
                    address,
                    whole,
                    next_identity(),
                    Source::Virtual(memory),
                )
                .slice(0..bytes)
            }
            AllocationKind::Host => Ok(HostMemory::allocate(&self.gpu, bytes)?.into_slice(bytes)),
        }
    }

    fn allocate_signals_for(
        &self,
        bytes: usize,
        kind: AllocationKind,
        fault: &Arc<Fault>,
    ) -> Result<DeviceSlice> {
        self.gpu.fault.check()?;
        // Loading waits for spinning kernels, so load the kernel before the first signal that one could spin
        // on.
        let (context, reaper) = (&self.gpu.context, &self.gpu.reaper);
        self.gpu
            .transfer_kernel
            .get_or_init(|| TransferKernel::load(context, reaper, &self.gpu.capabilities));
        Ok(match kind {
            AllocationKind::Host => {
                HostMemory::allocate_signals(&self.gpu, bytes, fault)?.into_slice(bytes)
            }
            AllocationKind::Plain | AllocationKind::Virtual => {
                PlainMemory::allocate_signals(&self.gpu, bytes, fault)?.into_slice(bytes)
            }
        })
    }

    fn reserve_segment(&self, bytes: usize) -> Result<Arc<dyn Segment>> {
        self.gpu.fault.check()?;
        Ok(Arc::new(CudaSegment::reserve(&self.gpu, bytes)?))
    }

    unsafe fn borrow(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<DeviceSlice> {
        self.gpu.fault.check()?;
        // SAFETY: the caller vouches for the memory and its owner.
        unsafe { borrowed::borrow(&self.gpu, address, bytes, owner) }
    }

    unsafe fn borrow_operand(&self, address: u64, bytes: usize) -> Result<DeviceSlice> {
        self.gpu.fault.check()?;
        // SAFETY: the caller vouches for the memory.
        unsafe { self.operands.borrow(&self.gpu, address, bytes) }
    }

    fn upload(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()> {
        self.gpu.fault.check()?;
        CudaBacking::of(target)?;
        target.check_buffer("upload", bytes.len())?;
        // SAFETY: the slice is live device memory of as many bytes, as was checked.
        unsafe { self.gpu.staging.upload(target.address(), bytes) }
    }

    fn download(&self, source: &DeviceSlice, bytes: &mut [u8]) -> Result<()> {
        self.gpu.fault.check()?;
        CudaBacking::of(source)?;
        source.check_buffer("download", bytes.len())?;
        // SAFETY: the slice is live device memory of as many bytes, as was checked.
        unsafe { self.gpu.staging.download(source.address(), bytes) }
    }

    fn create_stream(&self, priority: Priority) -> Result<Stream> {
        self.gpu.fault.check()?;
        let stream = CudaStream::create(&self.gpu, priority == Priority::High)?;
        Ok(Stream::new(stream))
    }

    unsafe fn borrow_stream(&self, raw: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Stream> {
        self.gpu.fault.check()?;
        // SAFETY: the caller guarantees a valid stream and its owner.
        let stream = unsafe { CudaStream::borrow(&self.gpu, raw, owner) }?;
        Ok(Stream::new(stream))
    }

    fn create_event(&self, timing: bool) -> Result<Event> {
        self.gpu.fault.check()?;
        let event = CudaEvent::create(&self.gpu, timing)?;
        Ok(Event::new(Arc::new(event)))
    }

    fn export(&self, slice: &DeviceSlice) -> Result<Export> {
        self.gpu.fault.check()?;
        sharing::export(slice)
    }

    fn import(&self, opening: Opening, bytes: usize) -> Result<DeviceSlice> {
        self.gpu.fault.check()?;
        sharing::import(&self.gpu, opening, bytes)
    }

    fn after_unmapping(&self, then: Box<dyn FnOnce() + Send>) {
        self.gpu.reaper.after(then);
    }

    fn check_compiler(&self) -> Result<()> {
        nvrtc::check_capability(self.gpu.capabilities.compute_capability)
            .map_err(|error| error.with_device(self.gpu.name()))
    }

    unsafe fn load_module(&self, source: &ModuleSource) -> Result<Module> {
        self.gpu.fault.check()?;
        source.check_image()?;
        // SAFETY: the caller vouches for the code.
        let module = unsafe { UserModule::load(&self.gpu, source)? };
        Ok(Module::new(Arc::new(module)))
    }

    fn after_uses(&self, slice: &DeviceSlice, then: Box<dyn FnOnce() + Send>) {
        let backing = CudaBacking::of(slice);
        let pending = backing.map_or_else(|_| Vec::new(), |backing| backing.uses().pending());
        if pending.is_empty() {
            return then();
        }
        self.gpu.reaper.when_past(pending, then);
    }

    fn prepare_reuse(&self, slice: &DeviceSlice) {
        if let Ok(backing) = CudaBacking::of(slice) {
            backing.uses().clear();
        }
    }

    fn available_memory(&self) -> Result<Option<u64>> {
        let _entered = self.gpu.context.enter()?;
        let (mut free, mut total) = (0, 0);
        let driver = self.gpu.context.driver;
        // SAFETY: both are output parameters for one size each, and the context is current.
        let code = unsafe { (driver.cuMemGetInfo_v2)(&mut free, &mut total) };
        driver.check(code, "ask for free device memory")?;
        Ok(Some(free as u64))
    }

    fn trim(&self, deadline: Deadline) -> Result<()> {
        if self.gpu.give_back(Instant::now() + deadline.remaining()) {
            return Ok(());
        }
        Err(deadline
            .expired("a moment at which no stream has work, to free device memory")
            .with_device(self.gpu.name())
            .with_help("synchronize the streams first; the memory is freed later"))
    }

    fn create_fifo(&self, slots: usize) -> Result<(Arc<Fifo>, FifoReader)> {
        self.gpu.fault.check()?;
        Fifo::new(slots, |slots| {
            Ok(Box::new(CudaFifoMemory::allocate(&self.gpu, slots)?))
        })
    }

    fn allocate_staging(&self, bytes: usize) -> Result<StagingMemory> {
        self.gpu.fault.check()?;
        let memory = PinnedMemory::allocate(&self.gpu, bytes)?.into_slice(bytes);
        // SAFETY: pinned memory has the same address for processors and the GPU, and this crate accesses it by
        // atomics and raw copies alone.
        Ok(unsafe { StagingMemory::new(memory) })
    }

    fn attach_thread(&self) -> Result<()> {
        let able = &self.gpu.capabilities;
        if !able.network_writes_ordered && !able.network_writes_flush {
            let text = "writes of network cards to this GPU's memory may not be visible to running kernels";
            return Err(Error::unsupported(text));
        }
        self.gpu.context.attach()
    }

    fn settle_network_writes(&self) -> Result<()> {
        if self.gpu.capabilities.network_writes_ordered {
            return Ok(());
        }
        self.gpu.context.settle_network_writes()
    }

    fn local_cpus(&self) -> Vec<usize> {
        self.gpu.local_cpus()
    }

    fn compute(&self) -> Result<Arc<dyn Compute>> {
        self.gpu.fault.check()?;
        let mut made = lock(&self.compute);
        let compute = match &*made {
            Some(compute) => compute.clone(),
            None => made
                .insert(Arc::new(CudaCompute::create(&self.gpu)?))
                .clone(),
        };
        Ok(compute)
    }

    fn collective_engine(
        &self,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
        deadline: Deadline,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Arc<dyn CollectiveEngine>> {
        self.gpu.fault.check()?;
        let joined = NcclEngine::join(&self.gpu, (rank, world), fault, deadline, all_gather)?;
        Ok(Arc::new(joined))
    }

    fn adopt_collective_engine(
        &self,
        communicator: VendorCommunicator,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
    ) -> Result<Arc<dyn CollectiveEngine>> {
        self.gpu.fault.check()?;
        let adopted = NcclEngine::adopt(&self.gpu, communicator, (rank, world), fault)?;
        Ok(Arc::new(adopted))
    }
}

/// Whether a multi-process service runs where the driver looks for one.
fn finds_multi_process_service() -> bool {
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY");
    let pipes = pipes.unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&pipes).join("control").exists()
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.gpu.name())
    }
}
