//! Memory and words of a channel, and their layout for kernels.

use super::fifo::Fifo;
use super::trigger::{At, MAX_REGIONS};
use crate::debug::debug_text;
use crate::device::{Device, DeviceKind, DeviceSlice, Fault, Word};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Size of a connection's region table in bytes.
pub(crate) const TABLE_BYTES: usize = 2 * MAX_REGIONS * ENTRY_BYTES;

/// Size of a table entry in bytes: address and length.
const ENTRY_BYTES: usize = 16;

/// Length of `warplink::Channel` in 8-byte words; must match `device.cuh`.
const DESCRIPTOR_WORDS: usize = 16;

/// A connection as kernels see it. Its addresses stay valid as long as it lives.
pub struct ChannelMemory {
    parts: ChannelParts,
}

/// Constituents of a channel.
#[derive(Debug)]
pub(crate) struct ChannelParts {
    /// The rank at the other end.
    pub(crate) peer: u32,
    /// The connection's tag.
    pub(crate) tag: u64,
    /// Regions of both sides, at least one each.
    pub(crate) windows: Arc<Windows>,
    /// Number of signals from the peer, in this rank's memory.
    pub(crate) inbound: Word,
    /// Number of signals that kernels have waited for.
    pub(crate) awaited: Word,
    /// FIFO position up to which requests are complete.
    pub(crate) completed: Word,
    /// Nonzero once waits were aborted.
    pub(crate) abort: Word,
    /// The peer's inbound word, if it is mapped here.
    pub(crate) outbound: Option<Word>,
    /// The proxy, if the channel has one.
    pub(crate) proxy: Option<ProxyEnd>,
}

/// A channel's access to its proxy.
#[derive(Clone, Debug)]
pub(crate) struct ProxyEnd {
    pub(crate) fifo: Arc<Fifo>,
    /// Index of the connection at the proxy.
    pub(crate) connection: u32,
}

/// Regions of a connection on both sides, for the host and as a table for kernels.
pub(crate) struct Windows {
    device: Arc<dyn Device>,
    table: DeviceSlice,
    sides: Mutex<[Vec<RegionPlace>; 2]>,
}

/// Location of a region.
#[derive(Clone, Debug)]
pub(crate) enum RegionPlace {
    /// Mapped into this process.
    Mapped(DeviceSlice),
    /// On another machine, reachable only through a proxy; length in bytes.
    Elsewhere(u64),
}

impl RegionPlace {
    /// Address and length for kernels. A remote region gets an address that no kernel dereferences.
    fn window(&self) -> [u64; 2] {
        match self {
            Self::Mapped(slice) => [slice.address(), slice.bytes() as u64],
            // Not 0, which marks an entry of the table that does not exist.
            Self::Elsewhere(bytes) => [1, *bytes],
        }
    }

    fn bytes(&self) -> u64 {
        self.window()[1]
    }
}

/// Owner of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Own,
    Peers,
}

impl Windows {
    /// Creates the list from the first pair of regions, with `table` ([`TABLE_BYTES`] long) for kernels.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        table: DeviceSlice,
        own: DeviceSlice,
        peers: RegionPlace,
    ) -> Result<Self> {
        let windows = Self {
            device: device.clone(),
            table,
            sides: Mutex::new([vec![RegionPlace::Mapped(own)], vec![peers]]),
        };
        windows.upload()?;
        Ok(windows)
    }

    /// Adds a region on each side and returns its number. Blocks until kernels can see it.
    pub(crate) fn add(&self, own: DeviceSlice, peers: RegionPlace) -> Result<u32> {
        let mut sides = lock(&self.sides);
        // Under the lock, so that two threads get two numbers.
        let number = number_after(sides[0].len())?;
        sides[0].push(RegionPlace::Mapped(own));
        sides[1].push(peers);
        drop(sides);
        self.upload()?;
        // Before the number is returned, by which kernels look the region up.
        Ok(number)
    }

    /// Number of the next region.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the maximum is reached.
    pub(crate) fn next(&self) -> Result<u32> {
        number_after(self.count())
    }

    /// Length in bytes of region `number` on one side, if it exists.
    pub(crate) fn bytes(&self, side: Side, number: u32) -> Option<u64> {
        let sides = lock(&self.sides);
        sides[side as usize]
            .get(number as usize)
            .map(RegionPlace::bytes)
    }

    /// Number of regions on each side.
    fn count(&self) -> usize {
        lock(&self.sides)[0].len()
    }

    /// `bytes` of memory starting at `at` on one side.
    ///
    /// # Errors
    /// As [`check`](Self::check); [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the memory is
    /// on another machine.
    pub(crate) fn range(&self, side: Side, at: At, bytes: u64) -> Result<DeviceSlice> {
        match self.check(side, at, bytes)? {
            RegionPlace::Mapped(region) => {
                region.slice(at.offset as usize..(at.offset + bytes) as usize)
            }
            RegionPlace::Elsewhere(_) => Err(Error::unsupported(
                "the peer's memory is on another machine",
            )
            .with_help("put to it, or get from it, in a kernel")),
        }
    }

    /// The region that contains `bytes` starting at `at` on one side.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is not within one
    /// region.
    pub(crate) fn check(&self, side: Side, at: At, bytes: u64) -> Result<RegionPlace> {
        let region = lock(&self.sides)[side as usize]
            .get(at.region as usize)
            .cloned();
        let whose = match side {
            Side::Own => "this rank",
            Side::Peers => "the peer",
        };
        let Some(region) = region else {
            return Err(Error::invalid(format!(
                "unknown region {} of {whose}; expected less than {}",
                at.region,
                self.count()
            ))
            .with_help("add the region on both ranks first"));
        };
        let end = at.offset.checked_add(bytes);
        if end.is_some_and(|end| end <= region.bytes()) {
            return Ok(region);
        }
        Err(Error::invalid(format!(
            "{bytes} bytes from offset {} pass the end of region {} of {whose}; expected at most {}",
            at.offset,
            at.region,
            region.bytes()
        ))
        .with_help("name a range within the region"))
    }

    fn upload(&self) -> Result<()> {
        // The whole table each time: entries of other regions are rewritten with the same values, which kernels may
        // read meanwhile.
        let mut bytes = Vec::with_capacity(TABLE_BYTES);
        for side in &*lock(&self.sides) {
            for region in 0..MAX_REGIONS {
                let entry = side.get(region).map_or([0, 0], RegionPlace::window);
                bytes.extend(entry.into_iter().flat_map(u64::to_ne_bytes));
            }
        }
        self.device.upload(&self.table, &bytes)
    }
}

impl ChannelMemory {
    pub(crate) fn new(parts: ChannelParts) -> Self {
        Self { parts }
    }

    /// Kind of device that owns the memory.
    pub fn kind(&self) -> DeviceKind {
        self.parts.inbound.as_slice().kind()
    }

    /// The rank at the other end.
    pub fn peer(&self) -> u32 {
        self.parts.peer
    }

    /// Tag of the connection.
    pub fn tag(&self) -> u64 {
        self.parts.tag
    }

    pub(crate) fn parts(&self) -> &ChannelParts {
        &self.parts
    }

    /// The fault that aborts its waits.
    pub(crate) fn fault(&self) -> Option<&Arc<Fault>> {
        self.parts.inbound.fault()
    }

    /// The bytes of `warplink::Channel` in `warplink/device.cuh`, valid as long as `self`, for kernels that
    /// are not launched by [`Kernel::launch`](crate::device::Kernel::launch).
    pub fn descriptor(&self) -> [u64; DESCRIPTOR_WORDS] {
        let parts = &self.parts;
        let sides = lock(&parts.windows.sides);
        let window = |side: Side| {
            let region = sides[side as usize].first();
            region.map_or([0, 0], RegionPlace::window)
        };
        let ([own, own_bytes], [peers, peers_bytes]) = (window(Side::Own), window(Side::Peers));
        let halves = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let mut words = [
            own,
            own_bytes,
            peers,
            peers_bytes,
            parts.inbound.address(),
            parts.awaited.address(),
            parts.outbound.as_ref().map_or(0, Word::address),
            parts.completed.address(),
            parts.abort.address(),
            parts.windows.table.address(),
            0,
            0,
            0,
            parts.tag,
            0,
            halves(parts.peer, u32::from(parts.proxy.is_some())),
        ];
        if let Some(ProxyEnd { fifo, connection }) = &parts.proxy {
            let addresses = fifo.addresses();
            let counters = addresses.counters.map_or(0, |slice| slice.address());
            words[10..13].copy_from_slice(&[addresses.ring, counters, addresses.tail]);
            words[14] = halves(fifo.slots() as u32, *connection);
        }
        words
    }
}

impl fmt::Debug for ChannelMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.parts.proxy.is_some() {
            "proxied"
        } else {
            "direct"
        };
        write!(f, "{kind} channel to rank {}", self.parts.peer)
    }
}

debug_text!(Windows, |it| "Windows({:?})", it.sides);

/// Number of the region after `count` others.
fn number_after(count: usize) -> Result<u32> {
    if count < MAX_REGIONS {
        return Ok(count as u32);
    }
    Err(Error::invalid(format!(
        "the connection has {count} regions already; expected at most {MAX_REGIONS}"
    ))
    .with_help("create another connection with a different tag"))
}
