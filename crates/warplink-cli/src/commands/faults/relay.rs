//! A TCP relay between a rank and the store, whose connections can be cut.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Interval between attempts to connect to the store, which may not be listening yet.
const RETRY: Duration = Duration::from_millis(10);

/// Forwards every connection.
#[derive(Debug)]
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<Mutex<RelayShared>>,
}

#[derive(Debug, Default)]
struct RelayShared {
    cut: bool,
    /// Sockets to the rank and to the store.
    ends: Vec<Arc<TcpStream>>,
}

impl Relay {
    /// Starts a relay to `store`.
    pub(super) fn start(store: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Mutex::new(RelayShared::default()));
        let all = shared.clone();
        thread::Builder::new().name("relay".into()).spawn(move || {
            for rank in listener.incoming().flatten() {
                if !pass_on(rank, store, &all) {
                    return;
                }
            }
        })?;
        Ok(Self { address, shared })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection, and accepts no more.
    pub(super) fn cut(&self) {
        let mut shared = lock(&self.shared);
        shared.cut = true;
        for stream in shared.ends.drain(..) {
            // Fails for a closed connection.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Ends the threads; a last connection wakes the listener's.
impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
        // Wakes the thread from `accept`; it then sees the cut and ends.
        let _ = TcpStream::connect(self.address);
    }
}

/// Forwards a connection in both directions; returns whether to accept another.
fn pass_on(rank: TcpStream, store: SocketAddr, shared: &Arc<Mutex<RelayShared>>) -> bool {
    let store = loop {
        if lock(shared).cut {
            return false;
        }
        // Rank 0 may not listen yet: ranks start in any order.
        match TcpStream::connect(store) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(RETRY),
        }
    };
    let (rank, store) = (Arc::new(rank), Arc::new(store));
    let mut all = lock(shared);
    // Under the same lock as the addition: a connection made during the cut would otherwise stay open.
    if all.cut {
        return false;
    }
    all.ends.extend([rank.clone(), store.clone()]);
    drop(all);
    for (from, to) in [(rank.clone(), store.clone()), (store, rank)] {
        let copy = move || {
            let _ = io::copy(&mut &*from, &mut &*to);
            // Passes the end of one direction on, so that the other copy ends as well.
            let _ = to.shutdown(Shutdown::Both);
        };
        let _ = thread::Builder::new().name("relay-copy".into()).spawn(copy);
    }
    true
}

fn lock(shared: &Mutex<RelayShared>) -> std::sync::MutexGuard<'_, RelayShared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
