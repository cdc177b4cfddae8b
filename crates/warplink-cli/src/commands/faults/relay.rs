//! A connection that can be cut: bytes between a rank and the store go through this process.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Between two attempts to reach the store, which may not serve yet.
const RETRY: Duration = Duration::from_millis(10);

/// Passes on the bytes of every connection to its address.
#[derive(Debug)]
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<Mutex<RelayShared>>,
}

#[derive(Debug, Default)]
struct RelayShared {
    cut: bool,
    /// To the rank, and to the store.
    ends: Vec<TcpStream>,
}

impl Relay {
    /// A relay to `store`, in threads of its own.
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

    /// Ends every connection, and takes no more.
    pub(super) fn cut(&self) {
        let mut shared = lock(&self.shared);
        shared.cut = true;
        for stream in shared.ends.drain(..) {
            // One that has ended needs nothing.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Ends the threads: the listener's by one more connection.
impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
        let _ = TcpStream::connect(self.address);
    }
}

/// Starts to pass on what comes over `rank`; whether there may be more.
fn pass_on(rank: TcpStream, store: SocketAddr, shared: &Arc<Mutex<RelayShared>>) -> bool {
    let store = loop {
        if lock(shared).cut {
            return false;
        }
        match TcpStream::connect(store) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(RETRY),
        }
    };
    let ends = (
        rank.try_clone(),
        store.try_clone(),
        rank.try_clone(),
        store.try_clone(),
    );
    let (Ok(kept_rank), Ok(kept_store), Ok(from_rank), Ok(from_store)) = ends else {
        return true;
    };
    let mut all = lock(shared);
    if all.cut {
        return false;
    }
    all.ends.extend([kept_rank, kept_store]);
    drop(all);
    for (mut from, mut to) in [(from_rank, store), (from_store, rank)] {
        let copy = move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        };
        let _ = thread::Builder::new().name("relay-copy".into()).spawn(copy);
    }
    true
}

fn lock(shared: &Mutex<RelayShared>) -> std::sync::MutexGuard<'_, RelayShared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
