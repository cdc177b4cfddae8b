//! Channel calls for kernels of the host device, with the semantics of `warplink/device.cuh`.

use super::memory;
use super::operation::Context;
use super::packets;
use super::words::{self, AwaitedWord};
use crate::device::channel::fifo::stopped;
use crate::device::channel::trigger::{MAX_TRIGGER_BYTES, Movement, Trigger};
use crate::device::channel::{ChannelParts, ProxyEnd, Side};
use crate::device::{At, ChannelMemory, DeviceSlice};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};

/// A channel as seen by one block of a host-device kernel. The calls correspond to those of
/// `warplink::Channel` in `warplink/device.cuh`, made by the whole block. They fail where those return a
/// status other than `ok`.
#[derive(Debug)]
pub struct BlockChannel<'a> {
    memory: &'a ChannelMemory,
    context: &'a Context,
}

/// A size of packets: how many bytes of data one holds, and how many it takes.
#[derive(Clone, Copy)]
struct PacketSize {
    data: u64,
    packet: u64,
}

const PACKETS8: PacketSize = PacketSize { data: 4, packet: 8 };
const PACKETS16: PacketSize = PacketSize {
    data: 8,
    packet: 16,
};
const PACKETS128: PacketSize = PacketSize {
    data: packets::LINE.0 as u64,
    packet: packets::LINE.1 as u64,
};

impl PacketSize {
    /// Whether a packet is a line of words before one flag, instead of data and flag in each word.
    fn is_line(self) -> bool {
        self.packet == PACKETS128.packet
    }

    /// Length of the packets that hold `bytes` of data.
    fn packed(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.data).saturating_mul(self.packet)
    }

    /// Fails if packets or data are misaligned.
    fn check(self, packets: &DeviceSlice, plain: &DeviceSlice) -> Result<()> {
        // The last line may be partly filled, but only with whole words.
        let (unit, packet, bytes) = (self.data.min(8), self.packet, plain.bytes() as u64);
        let aligned = packets.address().is_multiple_of(packet)
            && plain.address().is_multiple_of(unit)
            && bytes.is_multiple_of(unit);
        if aligned {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "packets at {:#x} of {bytes} bytes at {:#x}; expected multiples of {packet} and of {unit} bytes",
            packets.address(),
            plain.address()
        ))
        .with_operation("put or read packets")
        .with_help("align offsets and lengths"))
    }
}

/// Declares the calls for packets of each size: type of the flag, size, and the bytes of a packet and of its data.
macro_rules! packets {
    ($($put:ident, $read:ident, $flag:ty, $size:ident: $packet:literal, $data:literal;)*) => {$(
        #[doc = concat!("Puts `bytes` as packets of ", $packet, " bytes with ", $data, " bytes of data each, and `flag`.")]
        pub fn $put(
            &self,
            target: impl Into<At>,
            source: impl Into<At>,
            bytes: u64,
            flag: $flag,
        ) -> Result<()> {
            self.put_packets(target.into(), source.into(), bytes, flag.into(), $size)
        }

        #[doc = concat!("Reads packets that the peer put here by `", stringify!($put), "` with the same flag.")]
        pub fn $read(
            &self,
            target: impl Into<At>,
            source: impl Into<At>,
            bytes: u64,
            flag: $flag,
        ) -> Result<()> {
            self.read_packets(target.into(), source.into(), bytes, flag.into(), $size)
        }
    )*};
}

impl<'a> BlockChannel<'a> {
    pub(super) fn new(memory: &'a ChannelMemory, context: &'a Context) -> Self {
        Self { memory, context }
    }

    /// The rank at the other end.
    pub fn peer(&self) -> u32 {
        self.memory.peer()
    }

    /// Tag of the connection.
    pub fn tag(&self) -> u64 {
        self.memory.tag()
    }

    /// `bytes` of memory in one of this rank's regions.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the range is not within the region.
    pub fn here(&self, at: impl Into<At>, bytes: u64) -> Result<DeviceSlice> {
        self.parts().windows.range(Side::Own, at.into(), bytes)
    }

    /// Copies `bytes` from a local region to one of the peer's. Completion is known only by a signal or
    /// flush.
    pub fn put(&self, target: impl Into<At>, source: impl Into<At>, bytes: u64) -> Result<()> {
        self.movement(
            Movement::Put,
            target.into(),
            source.into(),
            bytes,
            [false; 2],
        )
    }

    /// Copies `bytes` from a region of the peer's to a local one. Completion is known only by a flush.
    pub fn get(&self, target: impl Into<At>, source: impl Into<At>, bytes: u64) -> Result<()> {
        self.movement(
            Movement::Get,
            source.into(),
            target.into(),
            bytes,
            [false; 2],
        )
    }

    /// Put followed by a signal.
    pub fn put_with_signal(
        &self,
        target: impl Into<At>,
        source: impl Into<At>,
        bytes: u64,
    ) -> Result<()> {
        self.movement(
            Movement::Put,
            target.into(),
            source.into(),
            bytes,
            [true, false],
        )
    }

    /// Put followed by a signal and a flush.
    pub fn put_with_signal_and_flush(
        &self,
        target: impl Into<At>,
        source: impl Into<At>,
        bytes: u64,
    ) -> Result<()> {
        self.movement(
            Movement::Put,
            target.into(),
            source.into(),
            bytes,
            [true; 2],
        )
    }

    /// Increments the peer's epoch, after all earlier writes of the block.
    pub fn signal(&self) -> Result<()> {
        self.context.check()?;
        match (&self.parts().proxy, &self.parts().outbound) {
            (Some(proxy), _) => {
                self.push(proxy, Trigger::signal(proxy.connection))?;
            }
            // One increment at the peer with release ordering: a peer that sees it also sees the block's
            // earlier writes.
            (None, Some(outbound)) => {
                self.context.delay();
                words::increment_at_peer(outbound)?;
            }
            (None, None) => {
                return Err(Error::internal("a direct channel has a mapped peer"));
            }
        }
        Ok(())
    }

    /// Blocks until the sources of earlier puts may be overwritten and the targets of earlier gets may be
    /// read.
    pub fn flush(&self) -> Result<()> {
        self.context.check()?;
        // Direct accesses are complete when they return.
        let Some(proxy) = &self.parts().proxy else {
            return Ok(());
        };
        let mut trigger = Trigger::signal(proxy.connection);
        (trigger.signal, trigger.flush) = (false, true);
        let position = self.push(proxy, trigger)?;
        self.await_flush(proxy, position)
    }

    /// Blocks until another signal arrives, and consumes it.
    pub fn wait(&self) -> Result<()> {
        // The count of consumed signals lives in device memory, so that it survives the launch.
        let awaited = words::increment(&self.parts().awaited) + 1;
        self.wait_until(awaited)
    }

    /// Blocks until the peer has signalled `epoch` times in total. Consumes no signal.
    pub fn wait_until(&self, epoch: u64) -> Result<()> {
        let word = AwaitedWord::new(&self.parts().inbound);
        self.context.wait(&word, epoch)
    }

    /// Consumes a signal if one is available and returns whether it did; never blocks.
    pub fn poll(&self) -> Result<bool> {
        self.context.check()?;
        Ok(words::take(&self.parts().inbound, &self.parts().awaited))
    }

    /// Total number of signals received.
    pub fn epoch(&self) -> u64 {
        words::load(&self.parts().inbound)
    }

    packets! {
        put_packets8, read_packets8, u32, PACKETS8: "8", "4";
        put_packets16, read_packets16, u32, PACKETS16: "16", "8";
        put_packets128, read_packets128, u64, PACKETS128: "128", "120";
    }

    fn parts(&self) -> &ChannelParts {
        self.memory.parts()
    }

    /// A put or get, with the optional signal and flush after it.
    fn movement(
        &self,
        movement: Movement,
        peers: At,
        own: At,
        bytes: u64,
        [signal, flush]: [bool; 2],
    ) -> Result<()> {
        self.context.check()?;
        let windows = &self.parts().windows;
        let own_range = windows.range(Side::Own, own, bytes)?;
        // For both paths, so that a bad range fails here and not in the proxy, which has nobody to tell.
        windows.check(Side::Peers, peers, bytes)?;
        let Some(proxy) = &self.parts().proxy else {
            let peers_range = windows.range(Side::Peers, peers, bytes)?;
            match movement {
                Movement::Put => self.context.copy(&peers_range, &own_range)?,
                Movement::Get => self.context.copy(&own_range, &peers_range)?,
            }
            return if signal { self.signal() } else { Ok(()) };
        };
        let mut trigger = Trigger {
            movement: Some(movement),
            signal: false,
            flush: false,
            connection: proxy.connection,
            bytes: MAX_TRIGGER_BYTES,
            own,
            peers,
        };
        let mut left = bytes;
        // A trigger has few bits for a length, so split; only the last piece signals, since the proxy keeps
        // order.
        while left > MAX_TRIGGER_BYTES {
            self.push(proxy, trigger)?;
            trigger.own.offset += MAX_TRIGGER_BYTES;
            trigger.peers.offset += MAX_TRIGGER_BYTES;
            left -= MAX_TRIGGER_BYTES;
        }
        (trigger.bytes, trigger.signal, trigger.flush) = (left, signal, flush);
        let position = self.push(proxy, trigger)?;
        if flush {
            self.await_flush(proxy, position)?;
        }
        Ok(())
    }

    /// Pushes a trigger to the proxy, waiting while the FIFO is full.
    fn push(&self, proxy: &ProxyEnd, trigger: Trigger) -> Result<u64> {
        self.context.delay();
        let mut looks = 0;
        proxy.fifo.push(trigger.encode(), || {
            looks += 1;
            packets::pause(self.context, looks)
        })
    }

    /// Blocks until the proxy has completed the requests up to `position`.
    fn await_flush(&self, proxy: &ProxyEnd, position: u64) -> Result<()> {
        // Above `position`: the count of completed triggers includes this one.
        let done = || words::load(&self.parts().completed) > position;
        packets::spin(self.context, || {
            if done() {
                return Ok(true);
            }
            // Requests completed before the proxy stopped count.
            if proxy.fifo.is_stopped() && !done() {
                return Err(stopped());
            }
            Ok(false)
        })
    }

    fn put_packets(
        &self,
        target: At,
        source: At,
        bytes: u64,
        flag: u64,
        size: PacketSize,
    ) -> Result<()> {
        // Packets are polled by flag, and a network does not keep the 8-byte stores whole.
        if self.parts().proxy.is_some() {
            return Err(Error::unsupported("a proxied channel does not put packets")
                .with_operation("put packets")
                .with_help("use a direct channel"));
        }
        let windows = &self.parts().windows;
        let target = windows.range(Side::Peers, target, size.packed(bytes))?;
        let source = windows.range(Side::Own, source, bytes)?;
        size.check(&target, &source)?;
        let mut data = vec![0; source.bytes()];
        memory::read_bytes(&source, &mut data)?;
        packets::store(self.context, &target, &data, flag, size.is_line())
    }

    fn read_packets(
        &self,
        target: At,
        source: At,
        bytes: u64,
        flag: u64,
        size: PacketSize,
    ) -> Result<()> {
        let windows = &self.parts().windows;
        let source = windows.range(Side::Own, source, size.packed(bytes))?;
        let target = windows.range(Side::Own, target, bytes)?;
        size.check(&source, &target)?;
        let mut data = vec![0; target.bytes()];
        packets::load(self.context, &source, &mut data, flag, size.is_line())?;
        memory::write_bytes(&target, &data)
    }
}
