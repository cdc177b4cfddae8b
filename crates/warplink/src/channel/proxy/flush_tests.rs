//! Tests of flushes and of a delayed proxy, with carriers whose puts take as long as the test requires.

use super::tests::{LATE, await_flush, host};
use super::*;
use crate::device::channel::trigger::{Movement, Trigger};
use crate::device::channel::{RegionPlace, Side, Windows};
use crate::device::{AllocationKind, At, DeviceSlice, Fault, MemoryOp, Priority, Stream, Word};
use crate::transport::{Carrier, CopyEngine};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Instant;

const BYTES: usize = 64;

/// The two regions of a connection, both of this device, and its words: inbound and completed.
struct Ends {
    device: Arc<dyn Device>,
    own: DeviceSlice,
    peers: DeviceSlice,
    windows: Arc<Windows>,
    words: [Word; 2],
}

impl Ends {
    fn new(device: &Arc<dyn Device>, bytes: usize) -> Self {
        let allocate = |bytes| device.allocate(bytes, AllocationKind::Plain).unwrap();
        let table = allocate(crate::device::channel::TABLE_BYTES);
        let (own, peers) = (allocate(bytes), allocate(bytes));
        let contents: Vec<_> = (0..bytes).map(|i| (i % 251 + 1) as u8).collect();
        device.upload(&own, &contents).unwrap();
        device.upload(&peers, &vec![0; bytes]).unwrap();
        let windows = Windows::new(
            device,
            table,
            own.clone(),
            RegionPlace::Mapped(peers.clone()),
        );
        let words = device.allocate_signals(16).unwrap();
        Self {
            device: device.clone(),
            own,
            peers,
            windows: Arc::new(windows.unwrap()),
            words: [0, 8].map(|at| words.word(at).unwrap()),
        }
    }

    fn route(&self, carrier: impl Carrier + 'static) -> Route {
        Route::new(
            1,
            &Arc::<Fault>::default(),
            &self.windows,
            Box::new(carrier),
        )
    }

    /// The bytes of both regions.
    fn contents(&self) -> [Vec<u8>; 2] {
        [&self.own, &self.peers].map(|region| {
            let mut bytes = vec![0; region.bytes()];
            self.device.download(region, &mut bytes).unwrap();
            bytes
        })
    }

    /// The peer's inbound word, and this rank's completion word of flushes.
    fn words(&self) -> [u64; 2] {
        self.words.each_ref().map(|word| {
            let mut bytes = [0; 8];
            self.device.download(word.as_slice(), &mut bytes).unwrap();
            u64::from_ne_bytes(bytes)
        })
    }
}

fn start(device: &Arc<dyn Device>, slots: usize) -> Arc<Proxy> {
    let config = ProxyConfig {
        slots,
        ..ProxyConfig::default()
    };
    Proxy::start(device, config, Box::new(|_| ())).unwrap()
}

fn put(connection: u32, at: u64, bytes: u64, flush: bool) -> Trigger {
    Trigger {
        movement: Some(Movement::Put),
        signal: true,
        flush,
        connection,
        bytes,
        own: At::from(at),
        peers: At::from(at),
    }
}

/// Copies in the order of a stream, which waits at a gate before one of its puts.
#[derive(Debug)]
struct Gated {
    stream: Stream,
    windows: Arc<Windows>,
    words: [Word; 2],
    gate: Word,
    /// How many puts precede the gate, and how many have arrived.
    before: u64,
    puts: AtomicU64,
}

impl Gated {
    /// A gate before put number `before` of `ends`.
    fn new(ends: &Ends, before: u64) -> (Self, Word) {
        let gate = ends.device.allocate_signals(8).unwrap().word(0).unwrap();
        let gated = Self {
            stream: ends.device.create_stream(Priority::Normal).unwrap(),
            windows: ends.windows.clone(),
            words: ends.words.clone(),
            gate: gate.clone(),
            before,
            puts: AtomicU64::new(0),
        };
        (gated, gate)
    }
}

impl Carrier for Gated {
    fn has_room(&self) -> Result<bool> {
        Ok(true)
    }

    fn start(&self, _: Movement, own: &DeviceSlice, peers: At) -> Result<()> {
        if self.puts.fetch_add(1, SeqCst) == self.before {
            let word = &self.gate;
            self.stream.memory_ops(&[MemoryOp::wait(word, 1)])?;
        }
        let peers = self.windows.range(Side::Peers, peers, own.bytes() as u64)?;
        self.stream.copy(&peers, own)
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        for (word, value) in self.words.iter().zip([inbound, completed]) {
            if let Some(value) = value {
                self.stream.memory_ops(&[MemoryOp::write(word, value)])?;
            }
        }
        Ok(())
    }

    fn answer(&self, _: &Word, _: u64) -> Result<()> {
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        self.stream.is_idle()
    }

    fn drain(&self, deadline: Deadline) -> Result<()> {
        self.stream.synchronize(deadline)
    }
}

fn open(device: &Arc<dyn Device>, gate: &Word) {
    let stream = device.create_stream(Priority::Normal).unwrap();
    let opened = MemoryOp::write(gate, 1);
    stream.memory_ops(&[opened]).unwrap();
    stream.synchronize(Deadline::after(LATE)).unwrap();
}

#[test]
fn a_flush_does_not_wait_for_another_connection() {
    let device = host();
    let (proxy, slow, quick) = (
        start(&device, 8),
        Ends::new(&device, BYTES),
        Ends::new(&device, BYTES),
    );
    let (held, gate) = Gated::new(&slow, 0);
    let free = CopyEngine::new(&device, &quick.windows, &quick.words[0], &quick.words[1]);
    let routes = [slow.route(held), quick.route(free.unwrap())];
    let [first, second] = routes.map(|route| proxy.register(route).unwrap().connection);
    let flush = |connection| {
        let trigger = put(connection, 0, BYTES as u64, true);
        proxy.fifo.push(trigger.encode(), || Ok(())).unwrap()
    };
    // It follows the other's in the FIFO.
    let (slow_flush, quick_flush) = (flush(first), flush(second));
    await_flush(&device, &quick.words[1], quick_flush);
    let [own, peers] = quick.contents();
    assert!(own == peers);
    assert_eq!(slow.words(), [0, 0]);
    assert_eq!(slow.contents()[1], [0; BYTES]);
    open(&device, &gate);
    await_flush(&device, &slow.words[1], slow_flush);
    let [own, peers] = slow.contents();
    assert!(own == peers);
    proxy.stop(Deadline::after(LATE)).unwrap();
}

#[test]
fn flush_does_not_wait_for_later_triggers() {
    let device = host();
    let (proxy, ends) = (start(&device, 8), Ends::new(&device, BYTES));
    let (held, gate) = Gated::new(&ends, 2);
    let connection = proxy.register(ends.route(held)).unwrap().connection;
    let half = BYTES as u64 / 2;
    let push = |trigger: Trigger| proxy.fifo.push(trigger.encode(), || Ok(())).unwrap();
    push(put(connection, 0, half / 2, false));
    let flushed = push(put(connection, half / 2, half / 2, true));
    // Everything is in the stream before the proxy looks at the flush.
    let last = push(put(connection, half, half, true));
    await_flush(&device, &ends.words[1], flushed);
    assert_eq!(ends.words(), [2, flushed + 1]);
    let [own, peers] = ends.contents();
    let (before, after) = peers.split_at(half as usize);
    assert!(before == &own[..half as usize] && after.iter().all(|byte| *byte == 0));
    open(&device, &gate);
    await_flush(&device, &ends.words[1], last);
    assert_eq!(ends.words(), [3, last + 1]);
    assert!(ends.contents()[1] == own);
    proxy.stop(Deadline::after(LATE)).unwrap();
}

/// Blocks the thread that requests the first put.
#[derive(Debug)]
struct Stalling {
    engine: CopyEngine,
    stall: Arc<Stall>,
}

const STALL: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Stall {
    begun: OnceLock<Instant>,
    /// Puts that producers had stored when the stall ended.
    pushed_by_then: OnceLock<u64>,
    pushed: AtomicU64,
    /// Times that producers found the FIFO full during the stall.
    full: AtomicU64,
}

impl Stall {
    fn is_on(&self) -> bool {
        self.begun.get().is_some() && self.pushed_by_then.get().is_none()
    }
}

impl Carrier for Stalling {
    fn has_room(&self) -> Result<bool> {
        self.engine.has_room()
    }

    fn start(&self, movement: Movement, own: &DeviceSlice, peers: At) -> Result<()> {
        if self.stall.begun.set(Instant::now()).is_ok() {
            std::thread::sleep(STALL);
            let pushed = self.stall.pushed.load(SeqCst);
            self.stall.pushed_by_then.set(pushed).unwrap();
        }
        self.engine.start(movement, own, peers)
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        self.engine.set(inbound, completed)
    }

    fn answer(&self, word: &Word, value: u64) -> Result<()> {
        self.engine.answer(word, value)
    }

    fn is_idle(&self) -> Result<bool> {
        self.engine.is_idle()
    }

    fn drain(&self, deadline: Deadline) -> Result<()> {
        self.engine.drain(deadline)
    }
}

#[test]
fn a_proxy_that_is_stalled_for_a_second_makes_producers_wait_and_loses_nothing() {
    const SLOTS: u64 = 4;
    const PRODUCERS: u64 = 8;
    const EACH: u64 = 100;
    let device = host();
    let (proxy, ends) = (
        start(&device, SLOTS as usize),
        Ends::new(&device, (8 * PRODUCERS * EACH) as usize),
    );
    let [inbound, completed] = &ends.words;
    let stall = Arc::<Stall>::default();
    let stalling = Stalling {
        engine: CopyEngine::new(&device, &ends.windows, inbound, completed).unwrap(),
        stall: stall.clone(),
    };
    let connection = proxy.register(ends.route(stalling)).unwrap().connection;
    std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let (proxy, stall) = (&proxy, &stall);
            scope.spawn(move || {
                for word in producer * EACH..(producer + 1) * EACH {
                    let trigger = put(connection, 8 * word, 8, false);
                    let pause = || {
                        stall.full.fetch_add(u64::from(stall.is_on()), SeqCst);
                        std::thread::yield_now();
                        Ok(())
                    };
                    proxy.fifo.push(trigger.encode(), pause).unwrap();
                    stall.pushed.fetch_add(1, SeqCst);
                }
            });
        }
    });
    proxy.stop(Deadline::after(LATE)).unwrap();
    assert!(stall.begun.get().unwrap().elapsed() >= STALL);
    // A full FIFO, and the trigger being served.
    assert_eq!(stall.pushed_by_then.get(), Some(&(SLOTS + 1)));
    assert!(stall.full.load(SeqCst) > 0, "nobody found it full");
    let [own, peers] = ends.contents();
    assert!(own == peers, "not all words are there");
    assert_eq!(ends.words(), [PRODUCERS * EACH, 0]);
}
