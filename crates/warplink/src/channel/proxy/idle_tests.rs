//! Tests of an idle proxy whose producer cannot notify it of a trigger, as on a GPU.

use super::*;
use crate::ErrorKind;
use crate::device::channel::fifo::{FifoAddresses, FifoMemory, HostFifoMemory};
use crate::device::channel::trigger::LAP;
use crate::device::{DeviceConfig, DeviceKind};
use std::sync::atomic::AtomicU64;
use std::thread::sleep;
use std::time::Instant;

const SLOTS: usize = 4;
const LATE: Duration = Duration::from_secs(10);

/// A FIFO whose producers wake nobody.
#[derive(Clone, Debug)]
struct OfKernels(Arc<(HostFifoMemory, AtomicU64)>);

impl OfKernels {
    /// How often the reader has looked at the ring.
    fn looks(&self) -> u64 {
        self.0.1.load(Ordering::SeqCst)
    }

    /// Stores a trigger that names no connection at position 0, for which the proxy fails.
    fn push(&self) {
        assert!(self.0.0.claim(0));
        self.0.0.store(1, LAP | 1);
        self.0.0.store(0, LAP);
    }
}

impl FifoMemory for OfKernels {
    fn load(&self, word: usize) -> u64 {
        if word < 2 * SLOTS && word.is_multiple_of(2) {
            self.0.1.fetch_add(1, Ordering::SeqCst);
        }
        self.0.0.load(word)
    }

    fn store(&self, word: usize, value: u64) {
        self.0.0.store(word, value);
    }

    fn claim(&self, _: u64) -> bool {
        false
    }

    fn has_host_producers(&self) -> bool {
        false
    }

    fn claimed(&self) -> Result<u64> {
        self.0.0.claimed()
    }

    fn addresses(&self) -> FifoAddresses {
        FifoAddresses::default()
    }
}

/// Number of consecutive half naps with at most one poll after which the proxy counts as asleep.
const QUIET: u32 = 8;

/// A proxy, its FIFO, and the receiver of its failure.
fn start(idle: Duration, nap: Duration) -> (Arc<Proxy>, OfKernels, Receiver<Error>) {
    let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
    let memory = OfKernels(Arc::new((HostFifoMemory::new(SLOTS), AtomicU64::new(0))));
    let fifo = Fifo::new(SLOTS, |_| Ok(Box::new(memory.clone()))).unwrap();
    let config = ProxyConfig {
        slots: SLOTS,
        idle,
        nap,
    };
    let (failed, failure) = mpsc::channel();
    let failed = Mutex::new(failed);
    let on_failure = move |error: &Error| lock(&failed).send(error.clone()).unwrap();
    let proxy = Proxy::start_on(&device, fifo, config, Box::new(on_failure)).unwrap();
    (proxy, memory, failure)
}

/// Waits until it sleeps between single looks.
fn await_sleep(memory: &OfKernels, nap: Duration) {
    let started = Instant::now();
    // On a busy machine, a thread may be descheduled once without sleeping.
    let mut quiet = 0;
    while quiet < QUIET {
        let before = memory.looks();
        sleep(nap / 2);
        quiet = if memory.looks() <= before + 1 {
            quiet + 1
        } else {
            0
        };
        assert!(started.elapsed() < LATE, "it does not sleep");
    }
}

#[test]
fn it_looks_once_a_nap_when_it_has_been_idle_for_long() {
    let nap = Duration::from_millis(5);
    let (proxy, memory, failure) = start(Duration::from_millis(10), nap);
    await_sleep(&memory, nap);
    let (before, started) = (memory.looks(), Instant::now());
    sleep(Duration::from_millis(300));
    let looks = memory.looks() - before;
    let naps = started.elapsed().div_duration_f64(nap);
    assert!(looks as f64 <= naps + 2.0, "{looks} looks in {naps} naps");
    // It finds new triggers all the same.
    memory.push();
    let error = failure.recv_timeout(LATE).unwrap();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(proxy.stop(Deadline::after(LATE)).is_err());
}

#[test]
fn it_looks_without_a_pause_again_when_it_was_woken() {
    let nap = Duration::from_secs(60);
    let (proxy, memory, failure) = start(Duration::from_secs(1), nap);
    await_sleep(&memory, Duration::from_millis(300));
    proxy.wake();
    sleep(Duration::from_millis(50));
    memory.push();
    let error = failure.recv_timeout(LATE).unwrap();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
}
