//! A relay between a rank and the store that it connects to. The tests of the bootstrap use this file, too.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used)]

use std::io::{self, Read};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Passes on the bytes of one connection.
pub struct Relay {
    /// Where the rank connects to.
    pub address: SocketAddr,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    /// `pass` writes to the store what the rank sends.
    pub fn start(
        store: SocketAddr,
        mut pass: impl FnMut(&mut [u8], &mut TcpStream) -> io::Result<()> + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let ends = Arc::<Mutex<Vec<TcpStream>>>::default();
        let kept = ends.clone();
        thread::spawn(move || {
            let (mut rank, _) = listener.accept().unwrap();
            let mut store = loop {
                // Rank 0 may not listen yet.
                match TcpStream::connect(store) {
                    Ok(store) => break store,
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            };
            for end in [&rank, &store] {
                end.set_nodelay(true).unwrap();
                kept.lock().unwrap().push(end.try_clone().unwrap());
            }
            let (mut from, mut to) = (store.try_clone().unwrap(), rank.try_clone().unwrap());
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = rank.read(&mut chunk) {
                if pass(&mut chunk[..count], &mut store).is_err() {
                    break;
                }
            }
            let _ = store.shutdown(Shutdown::Both);
        });
        Self { address, ends }
    }

    /// Both ends find the connection closed.
    pub fn cut(&self) {
        for end in &*self.ends.lock().unwrap() {
            // The relay may have done it, after the other end.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}
