//! The proxy alone, on the host device.

use super::*;
use crate::ErrorKind;
use crate::device::channel::trigger::{LAP, Movement, Trigger};
use crate::device::channel::{RegionPlace, Windows};
use crate::device::{
    AllocationKind, At, DeviceConfig, DeviceKind, DeviceSlice, Fault, MemoryOp, Priority, Word,
};
use crate::transport::{Carrier, CopyEngine};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

pub(super) const LATE: Duration = Duration::from_secs(10);

pub(super) fn host() -> Arc<dyn Device> {
    crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap()
}

/// A proxy, and the receiver of its failure.
fn start(device: &Arc<dyn Device>) -> (Arc<Proxy>, Receiver<Error>) {
    let (failed, failure) = mpsc::channel();
    let failed = Mutex::new(failed);
    let on_failure = move |error: &Error| lock(&failed).send(error.clone()).unwrap();
    let proxy = Proxy::start(device, ProxyConfig::default(), Box::new(on_failure));
    (proxy.unwrap(), failure)
}

/// A connection between two regions of this device, with its words.
fn route(device: &Arc<dyn Device>, fault: &Arc<Fault>) -> (Route, [Word; 2]) {
    let words = device.allocate_signals(64).unwrap();
    let words = [0, 8].map(|at| words.word(at).unwrap());
    let windows = windows(device);
    let carrier = CopyEngine::new(device, &windows, &words[0], &words[1]).unwrap();
    (Route::new(1, fault, &windows, Box::new(carrier)), words)
}

fn windows(device: &Arc<dyn Device>) -> Arc<Windows> {
    let slice = |bytes| device.allocate(bytes, AllocationKind::Plain).unwrap();
    let table = slice(crate::device::channel::TABLE_BYTES);
    Arc::new(Windows::new(device, table, slice(64), RegionPlace::Mapped(slice(64))).unwrap())
}

fn put(connection: u32, bytes: u64) -> [u64; 2] {
    let trigger = Trigger {
        movement: Some(Movement::Put),
        signal: true,
        flush: true,
        connection,
        bytes,
        own: At::default(),
        peers: At::default(),
    };
    trigger.encode()
}

/// Pushes a trigger on which the proxy fails. It may have stopped the FIFO by the time the push returns.
fn push_refused(proxy: &Proxy, trigger: [u64; 2]) {
    if let Err(error) = proxy.fifo.push(trigger, || Ok(())) {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
}

#[test]
fn failure_is_reported_and_ends_waits() {
    let (device, fault) = (host(), Arc::default());
    let (proxy, failure) = start(&device);
    let (good, _) = route(&device, &fault);
    let connection = proxy.register(good).unwrap().connection;
    push_refused(&proxy, put(connection, 65));
    let error = failure.recv_timeout(LATE).unwrap();
    assert_eq!(
        (error.kind(), error.peer()),
        (ErrorKind::InvalidArgument, Some(1))
    );
    assert!(
        error.to_string().contains("65 bytes from offset 0"),
        "{error}"
    );
    assert!(proxy.fifo.is_stopped() && proxy.check().is_err());
    assert!(proxy.register(route(&device, &fault).0).is_err());
    assert!(proxy.stop(Deadline::after(LATE)).is_err());
    // Later drops are immediate.
    let held = Arc::new(());
    proxy.retire(connection, Box::new(held.clone()));
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn a_trigger_of_no_connection_is_a_failure() {
    let device = host();
    let (proxy, failure) = start(&device);
    push_refused(&proxy, put(9, 0));
    let error = failure.recv_timeout(LATE).unwrap();
    assert!(
        error.to_string().contains("unknown connection 9"),
        "{error}"
    );
}

fn halves() -> impl Strategy<Value = [u64; 2]> {
    let places = || (0..3_u32, 0..80_u64).prop_map(At::from);
    let movement = prop_oneof![
        Just(None),
        Just(Some(Movement::Put)),
        Just(Some(Movement::Get))
    ];
    let (flags, connection, bytes) = (any::<(bool, bool)>(), 0..3_u32, 0..80_u64);
    let likely = (movement, flags, connection, bytes, places(), places()).prop_map(
        |(movement, (signal, flush), connection, bytes, own, peers)| {
            let trigger = Trigger {
                movement,
                signal,
                flush,
                connection,
                bytes,
                own,
                peers,
            };
            trigger.encode()
        },
    );
    prop_oneof![3 => likely, 1 => any::<[u64; 2]>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever kernels store in a slot, the proxy serves it or fails with an error, and ends.
    #[test]
    fn any_words_are_a_trigger_or_an_error(words in prop::collection::vec(halves(), 1..6)) {
        let (device, fault) = (host(), Arc::default());
        let (proxy, failure) = start(&device);
        proxy.register(route(&device, &fault).0).unwrap();
        // After the failure nobody reads the ring, and producers are refused.
        let mut refused = false;
        for halves in words {
            if let Err(error) = proxy.fifo.push(halves.map(|half| half & !LAP), || Ok(())) {
                prop_assert_eq!(error.kind(), ErrorKind::Closed);
                refused = true;
            }
        }
        let stopped = proxy.stop(Deadline::after(LATE));
        prop_assert!(!refused || stopped.is_err());
        if let Err(error) = stopped {
            let kinds = [ErrorKind::InvalidArgument, ErrorKind::Protocol];
            prop_assert!(kinds.contains(&error.kind()), "{error}");
            prop_assert_eq!(error.peer().is_some(), error.kind() == ErrorKind::InvalidArgument);
            prop_assert!(failure.recv_timeout(LATE).is_ok());
        }
    }
}

#[test]
fn triggers_for_a_lost_peer_are_counted_and_fail_nobody_else() {
    let device = host();
    let (proxy, failure) = start(&device);
    let [lost, good]: [Arc<Fault>; 2] = Default::default();
    let (to_lost, lost_words) = route(&device, &lost);
    let (to_good, good_words) = route(&device, &good);
    lost.raise(Error::new(ErrorKind::PeerLost, "gone"));
    let [to_lost, to_good] = [to_lost, to_good].map(|one| proxy.register(one).unwrap());
    for connection in [to_lost.connection, to_good.connection] {
        proxy.fifo.push(put(connection, 64), || Ok(())).unwrap();
    }
    let error = proxy.stop(Deadline::after(LATE)).unwrap_err();
    assert!(
        error.to_string().contains("1 triggers were not sent"),
        "{error}"
    );
    assert!(failure.try_recv().is_err());
    let read = |word: &Word| {
        let mut bytes = [0; 8];
        device.download(word.as_slice(), &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    assert_eq!(lost_words.each_ref().map(read), [0, 0]);
    // The flush is answered with its position and one.
    assert_eq!(good_words.each_ref().map(read), [1, 2]);
}

/// Maximum calls in flight at a carrier that completes one whenever it is asked for space.
const ROOM: u64 = 4;

#[derive(Debug, Default)]
struct Slow(Arc<Seen>);

#[derive(Debug, Default)]
struct Seen {
    under_way: AtomicU64,
    most: AtomicU64,
    puts: AtomicU64,
    inbound: AtomicU64,
    /// Value of `inbound` when the last put was started.
    before_put: AtomicU64,
    completed: AtomicU64,
}

impl Seen {
    fn call(&self) {
        let now = self.under_way.fetch_add(1, SeqCst) + 1;
        self.most.fetch_max(now, SeqCst);
    }
}

impl Carrier for Slow {
    fn has_room(&self) -> Result<bool> {
        // Delayed: a device is slower than the proxy.
        std::thread::sleep(Duration::from_micros(20));
        let done = |calls: u64| Some(calls.saturating_sub(1));
        let under_way = self.0.under_way.fetch_update(SeqCst, SeqCst, done);
        Ok(under_way.unwrap() <= ROOM)
    }

    fn start(&self, _: Movement, _: &DeviceSlice, _: At) -> Result<()> {
        self.0.call();
        self.0.puts.fetch_add(1, SeqCst);
        let before = self.0.inbound.load(SeqCst);
        self.0.before_put.store(before, SeqCst);
        Ok(())
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        self.0.call();
        inbound.inspect(|value| self.0.inbound.store(*value, SeqCst));
        completed.inspect(|value| self.0.completed.store(*value, SeqCst));
        Ok(())
    }

    fn answer(&self, _: &Word, _: u64) -> Result<()> {
        self.0.call();
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        Ok(true)
    }

    fn drain(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}

/// A device that is slower than a kernel must neither block the proxy nor make it queue operations without bound:
/// signals are coalesced instead.
#[test]
fn operations_in_flight_are_bounded() {
    const SIGNALS: u64 = 20_000;
    let (device, fault) = (host(), Arc::default());
    let (proxy, _failure) = start(&device);
    let seen = Arc::<Seen>::default();
    let route = Route::new(1, &fault, &windows(&device), Box::new(Slow(seen.clone())));
    let connection = proxy.register(route).unwrap().connection;
    let mut last = 0;
    for number in 1..=SIGNALS {
        let mut trigger = Trigger::signal(connection);
        // An occasional put, which must not overtake earlier signals.
        if number % 1000 == 0 {
            trigger.movement = Some(Movement::Put);
        }
        trigger.flush = number == SIGNALS;
        last = proxy.fifo.push(trigger.encode(), || Ok(())).unwrap();
    }
    proxy.stop(Deadline::after(LATE)).unwrap();
    let read = |word: &AtomicU64| word.load(SeqCst);
    assert_eq!((read(&seen.puts), read(&seen.inbound)), (20, SIGNALS));
    assert_eq!(read(&seen.before_put), SIGNALS - 1);
    assert_eq!(read(&seen.completed), last + 1);
    // A put may write words before it.
    assert!(read(&seen.most) <= ROOM + 2, "{} calls", read(&seen.most));
}

/// Requests to a carrier, in order.
#[derive(Clone, Debug, PartialEq)]
enum Asked {
    Put(u64),
    Set(Option<u64>, Option<u64>),
}

/// A carrier that accepts nothing while its peer is stopped.
#[derive(Clone, Debug, Default)]
struct Stopped(Arc<(AtomicBool, Mutex<Vec<Asked>>)>);

impl Stopped {
    fn resume(&self) {
        self.0.0.store(true, SeqCst);
    }

    fn asked(&self) -> Vec<Asked> {
        lock(&self.0.1).clone()
    }

    fn ask(&self, asked: Asked) {
        lock(&self.0.1).push(asked);
    }
}

impl Carrier for Stopped {
    fn has_room(&self) -> Result<bool> {
        Ok(self.0.0.load(SeqCst))
    }

    fn start(&self, _: Movement, own: &DeviceSlice, _: At) -> Result<()> {
        self.ask(Asked::Put(own.bytes() as u64));
        Ok(())
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        self.ask(Asked::Set(inbound, completed));
        Ok(())
    }

    fn answer(&self, _: &Word, _: u64) -> Result<()> {
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        Ok(true)
    }

    fn drain(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}

/// A proxy with a connection to a stopped peer and one to another peer, with their words and numbers.
fn with_a_stopped_peer(device: &Arc<dyn Device>) -> (Arc<Proxy>, Stopped, [Word; 2], [u32; 2]) {
    let fault = Arc::default();
    let (proxy, _failure) = start(device);
    let stopped = Stopped::default();
    let held_up = Route::new(1, &fault, &windows(device), Box::new(stopped.clone()));
    let (good, words) = route(device, &fault);
    let connections = [held_up, good].map(|route| proxy.register(route).unwrap().connection);
    (proxy, stopped, words, connections)
}

/// Waits until the flush at `position` is answered.
pub(super) fn await_flush(device: &Arc<dyn Device>, completed: &Word, position: u64) {
    let stream = device.create_stream(Priority::Normal).unwrap();
    let answered = MemoryOp::wait(completed, position + 1);
    stream.memory_ops(&[answered]).unwrap();
    let synchronized = stream.synchronize(Deadline::after(LATE));
    synchronized.expect("the flush was not answered");
}

#[test]
fn a_peer_that_takes_nothing_holds_up_no_other_and_gets_all_in_order() {
    let device = host();
    let (proxy, stopped, words, [held_up, good]) = with_a_stopped_peer(&device);
    let push = |trigger| proxy.fifo.push(trigger, || Ok(())).unwrap();
    // More triggers than the ring holds. The first signal covers the requests before the puts.
    let rounds = 2 * ProxyConfig::default().slots as u64;
    push(Trigger::signal(held_up).encode());
    let mut last = 0;
    for bytes in 0..rounds {
        let mut trigger = Trigger::decode(put(held_up, bytes % 60)).unwrap();
        (trigger.signal, trigger.flush) = (false, false);
        push(trigger.encode());
        last = push(Trigger::signal(held_up).encode());
    }
    let flushed = push(put(good, 64));
    await_flush(&device, &words[1], flushed);
    assert_eq!(stopped.asked(), []);
    let retired = Arc::new(());
    proxy.retire(held_up, Box::new(retired.clone()));
    await_flush(&device, &words[1], push(put(good, 64)));
    assert_eq!(Arc::strong_count(&retired), 2, "it is needed yet");
    stopped.resume();
    proxy.stop(Deadline::after(LATE)).unwrap();
    // Each signal follows its put and precedes the next one.
    let expected = (0..rounds).flat_map(|round| {
        let signals = Asked::Set(Some(round + 1), None);
        [signals, Asked::Put(round % 60)]
    });
    let end = Asked::Set(Some(rounds + 1), None);
    assert_eq!(stopped.asked(), expected.chain([end]).collect::<Vec<_>>());
    assert!(last > rounds);
}

#[test]
fn parked_triggers_are_bounded_and_counted() {
    let device = host();
    let (proxy, stopped, _, [held_up, _]) = with_a_stopped_peer(&device);
    let slots = ProxyConfig::default().slots as u64;
    let mut sent = 0;
    let mut looks = 0;
    // Until there is no space for a second one.
    let full = loop {
        let pushed = proxy.fifo.push(put(held_up, 8), || {
            looks += 1;
            std::thread::sleep(Duration::from_millis(1));
            match looks {
                1000.. => Err(Error::invalid("full")),
                _ => Ok(()),
            }
        });
        match pushed {
            Ok(_) => (sent, looks) = (sent + 1, 0),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::InvalidArgument);
    let parked = worker::MAX_PARKED as u64;
    assert!((parked..=parked + slots + 2).contains(&sent), "{sent}");
    let error = proxy.stop(Deadline::after(Duration::from_millis(50)));
    let expected = format!("{sent} triggers were not sent");
    let error = error.unwrap_err().to_string();
    assert!(error.contains(&expected), "{error}");
    assert_eq!(stopped.asked(), []);
}
