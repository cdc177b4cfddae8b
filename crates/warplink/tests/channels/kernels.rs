//! Arguments and launches shared by the channel tests.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::sync::Arc;
use warplink::channel::{Connection, ConnectionRequest, Connections, Transport};
use warplink::device::{
    AllocationKind, Argument, Block, Device, DeviceSlice, Kernel, Launch, Module, ModuleSource,
    Stream,
};
use warplink::{Communicator, Result};

/// Threads of a block on a GPU.
pub const THREADS: u32 = 256;

/// Both kinds of channels.
pub const TRANSPORTS: [Transport; 2] = [Transport::Direct, Transport::Proxied];

/// Word `i` of what is sent in `round`; must match the CUDA kernels.
pub fn pattern(round: u32, i: usize) -> u32 {
    round
        .wrapping_mul(2_654_435_761)
        .wrapping_add((i as u32).wrapping_mul(40503))
        .wrapping_add(1)
}

/// Data sent in `round`.
pub fn contents(round: u32, bytes: usize) -> Vec<u8> {
    (0..bytes / 4)
        .flat_map(|i| pattern(round, i).to_ne_bytes())
        .collect()
}

/// What a block of a kernel does on the host device.
pub type Body = fn(&Block<'_>) -> Result<()>;

/// The kernels of a module, loaded.
pub struct Kernels(BTreeMap<&'static str, Kernel>);

impl Kernels {
    /// All that tests share.
    pub fn load(device: &Arc<dyn Device>) -> Self {
        let source = ModuleSource::new("kernels.cu").with_cuda(include_str!("kernels.cu"));
        Self::load_from(device, source, &super::closures::KERNELS)
    }

    /// Those of `source`, with their bodies for the host device.
    pub fn load_from(
        device: &Arc<dyn Device>,
        source: ModuleSource,
        kernels: &[(&'static str, Body)],
    ) -> Self {
        let add = |source: ModuleSource, &(name, body)| source.with_host_kernel(name, body);
        let source = kernels.iter().fold(source, add);
        // SAFETY: the kernels access the memory that their arguments name, within its bounds.
        let module: Module = unsafe { device.load_module(&source) }.unwrap();
        // All at once: later, the driver might wait for a kernel that runs.
        let kernels = kernels.iter();
        Self(
            kernels
                .map(|&(name, _)| (name, module.kernel(name).unwrap()))
                .collect(),
        )
    }

    pub fn get(&self, name: &str) -> Kernel {
        self.0[name].clone()
    }
}

/// Where a kernel says how many words were wrong, and its status.
#[derive(Clone)]
pub struct Outcome {
    device: Arc<dyn Device>,
    memory: DeviceSlice,
}

impl Outcome {
    pub fn new(device: &Arc<dyn Device>) -> Self {
        let memory = device.allocate(8, AllocationKind::Plain).unwrap();
        device.upload(&memory, &[0; 8]).unwrap();
        Self {
            device: device.clone(),
            memory,
        }
    }

    /// The outcome of `peer`, of a communicator of two ranks, which calls this at the same time. It can be looked at when
    /// the peer's own device refuses to.
    pub fn of_peer(&self, comm: &Communicator, peer: usize) -> Self {
        let region = comm.register(&self.memory).unwrap();
        let handle = comm.export_handle(&region, peer).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let mapped = comm.open_handle(peer, &handles[peer]).unwrap();
        Self {
            device: self.device.clone(),
            memory: mapped.memory().clone(),
        }
    }

    pub fn argument(&self) -> Argument {
        Argument::from(&self.memory)
    }

    /// The number of wrong words and the status since they were [`read`](Self::read).
    pub fn look(&self) -> [u32; 2] {
        let mut bytes = [0; 8];
        self.device.download(&self.memory, &mut bytes).unwrap();
        [0, 4].map(|at| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()))
    }

    /// The number of wrong words and the status since the last call, where no kernel runs.
    pub fn read(&self) -> [u32; 2] {
        let read = self.look();
        self.device.upload(&self.memory, &[0; 8]).unwrap();
        read
    }
}

/// A rank of a test: its communicator, a stream, the kernels, and an outcome.
pub struct Fixture<'a> {
    pub comm: &'a Communicator,
    pub stream: Stream,
    pub kernels: Kernels,
    pub outcome: Outcome,
}

impl<'a> Fixture<'a> {
    /// Loads the kernels on all ranks before any launches one: loading might wait for one that runs.
    pub fn new(comm: &'a Communicator) -> Self {
        let device = comm.device();
        let fixture = Self {
            comm,
            stream: comm.create_stream(Default::default()).unwrap(),
            kernels: Kernels::load(device),
            outcome: Outcome::new(device),
        };
        comm.barrier().unwrap();
        fixture
    }

    /// This rank's number, for kernels.
    pub fn rank(&self) -> u32 {
        self.comm.rank() as u32
    }

    /// Launches `name` with `blocks` blocks; the outcome is the last argument.
    pub fn launch(&self, name: &str, blocks: u32, arguments: &[Argument]) -> Result<()> {
        let mut arguments = arguments.to_vec();
        arguments.push(self.outcome.argument());
        let launch = Launch::new(blocks, THREADS);
        let kernel = self.kernels.get(name);
        kernel.launch(&self.stream, &launch, &arguments)
    }

    /// [Launches](Self::launch) a kernel, waits for it, and checks that nothing was wrong.
    pub fn run(&self, name: &str, blocks: u32, arguments: &[Argument]) {
        self.launch(name, blocks, arguments).unwrap();
        self.finish();
    }

    /// Waits for the stream, and checks that nothing was wrong.
    pub fn finish(&self) {
        self.comm.synchronize(&self.stream).unwrap();
        assert_eq!(self.outcome.read(), [0, 0], "wrong words, and the status");
    }

    /// Connections with every other rank, one for each of `tags`, each with `bytes` of its own.
    pub fn connect(&self, transport: Transport, tags: u64, bytes: usize) -> Connections {
        self.connect_to(0..self.comm.world(), transport, tags, bytes)
    }

    /// As [`connect`](Self::connect), with every other rank among `ranks`.
    pub fn connect_to(
        &self,
        ranks: impl IntoIterator<Item = usize>,
        transport: Transport,
        tags: u64,
        bytes: usize,
    ) -> Connections {
        let peers = ranks.into_iter().filter(|peer| *peer != self.comm.rank());
        let requests: Vec<ConnectionRequest> = peers
            .flat_map(|peer| (0..tags).map(move |tag| (peer, tag)))
            .map(|(peer, tag)| {
                let region = self.comm.alloc(bytes).unwrap();
                ConnectionRequest::new(peer, tag, &region).with_transport(transport)
            })
            .collect();
        self.comm.connect(&requests).unwrap()
    }

    /// The one connection between two ranks.
    pub fn pair(&self, transport: Transport, bytes: usize) -> Connection {
        self.connect(transport, 1, bytes).all()[0].clone()
    }

    /// Both ranks put to one slot after another from the same source, which they change after each flush.
    pub fn flushed_slots(&self, transport: Transport) {
        let (bytes, slots) = (4096, 16);
        let connection = self.pair(transport, (1 + slots) * bytes);
        let arguments = [
            connection.channel(),
            Argument::U64(bytes as u64),
            Argument::U32(slots as u32),
        ];
        self.run("flushed_slots", 1, &arguments);
    }

    /// Enqueues rounds of ping-pong of `bytes` on each connection.
    pub fn ping_pong(&self, connections: &Connections, bytes: u64, rounds: u32) {
        self.ping_pong_on(
            &connections.channels().unwrap(),
            connections.all().len(),
            bytes,
            rounds,
        );
    }

    /// As [`ping_pong`](Self::ping_pong), on an array of channels, which the caller keeps.
    pub fn ping_pong_on(&self, channels: &Argument, count: usize, bytes: u64, rounds: u32) {
        let arguments = [
            channels.clone(),
            Argument::U64(bytes),
            Argument::U32(self.rank()),
            Argument::U32(rounds),
        ];
        self.launch("ping_pong", count as u32, &arguments).unwrap();
    }
}
