//! A region on the wire: fixed layout, versioned, and authenticated.
//!
//! The last bytes are a keyed hash over the others, so that a handle that was altered, or that
//! somebody outside of the communicator made, is refused before a driver sees it.

use crate::device::{DeviceIdentity, DeviceKind};
use crate::error::{Error, ErrorKind, Rank, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"WPLH";
const VERSION: u16 = 1;
const WAY_IPC: u16 = 1;
const WAY_DESCRIPTOR: u16 = 2;

/// Bytes of a handle on the wire.
pub const HANDLE_BYTES: usize = size_of::<Wire>();

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    magic: [u8; 4],
    version: U16,
    ways: U16,
    kind: U32,
    owner: U32,
    process: [u8; 16],
    device: [u8; 16],
    allocation: U64,
    generation: U64,
    allocation_bytes: U64,
    offset: U64,
    bytes: U64,
    ipc: [u8; 64],
    tag: [u8; 16],
}

/// What a peer needs to reach a region: which allocation, how to open it, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The rank whose memory it is.
    pub owner: Rank,
    /// Which device's memory it is.
    pub kind: DeviceKind,
    /// The physical device.
    pub device: DeviceIdentity,
    /// Random number of the owner's process.
    pub process: [u8; 16],
    /// Number of the allocation in the owner's process.
    pub allocation: u64,
    /// Number of this registration of the allocation; never used again by its owner.
    pub generation: u64,
    /// Bytes of the whole allocation.
    pub allocation_bytes: u64,
    /// Offset of the region in the allocation, in bytes.
    pub offset: u64,
    /// Bytes of the region.
    pub bytes: u64,
    /// The CUDA IPC handle, where the allocation has one.
    pub ipc: Option<[u8; 64]>,
    /// Whether the owner gives out a descriptor of it.
    pub descriptor: bool,
}

/// Makes and checks the keyed hashes of handles.
#[derive(Clone)]
pub(crate) struct HandleKey(Hmac<Sha256>);

impl std::fmt::Debug for HandleKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HandleKey")
    }
}

impl HandleKey {
    pub(crate) fn new(secret: &[u8]) -> Result<Self> {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret)
            .map_err(|_| Error::new(ErrorKind::Internal, "a key of this length is not taken"))?;
        mac.update(b"warplink handle");
        Ok(Self(mac))
    }

    /// The token that requests between the ranks of this communicator carry.
    pub(super) fn token(&self) -> [u8; 16] {
        self.tag(b"token of the service")
    }

    fn tag(&self, bytes: &[u8]) -> [u8; 16] {
        let mut mac = self.0.clone();
        mac.update(bytes);
        let mut tag = [0; 16];
        tag.copy_from_slice(&mac.finalize().into_bytes()[..16]);
        tag
    }

    fn holds(&self, bytes: &[u8], tag: &[u8; 16]) -> bool {
        let mut mac = self.0.clone();
        mac.update(bytes);
        mac.verify_truncated_left(tag).is_ok()
    }
}

impl Handle {
    /// The handle as it goes over the wire.
    pub(crate) fn encode(&self, key: &HandleKey) -> [u8; HANDLE_BYTES] {
        let ways = if self.ipc.is_some() { WAY_IPC } else { 0 }
            | if self.descriptor { WAY_DESCRIPTOR } else { 0 };
        let mut wire = Wire {
            magic: MAGIC,
            version: VERSION.into(),
            ways: ways.into(),
            kind: kind_number(self.kind).into(),
            owner: (self.owner as u32).into(),
            process: self.process,
            device: self.device.0,
            allocation: self.allocation.into(),
            generation: self.generation.into(),
            allocation_bytes: self.allocation_bytes.into(),
            offset: self.offset.into(),
            bytes: self.bytes.into(),
            ipc: self.ipc.unwrap_or([0; 64]),
            tag: [0; 16],
        };
        wire.tag = key.tag(untagged(&wire));
        let mut out = [0; HANDLE_BYTES];
        out.copy_from_slice(wire.as_bytes());
        out
    }

    /// Reads a handle that came over the wire.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] where it is truncated, altered, of another version, or
    /// describes a range outside of its allocation.
    pub(crate) fn decode(bytes: &[u8], key: &HandleKey) -> Result<Self> {
        let invalid =
            |what: String| Error::new(ErrorKind::InvalidHandle, what).during("read a handle");
        let wire = Wire::read_from_bytes(bytes).map_err(|_| {
            invalid(format!(
                "it has {} bytes instead of {HANDLE_BYTES}",
                bytes.len()
            ))
        })?;
        if wire.magic != MAGIC {
            return Err(invalid("it does not begin as a handle does".to_owned()));
        }
        if wire.version.get() != VERSION {
            return Err(invalid(format!(
                "it is of version {}, this is version {VERSION}",
                wire.version
            ))
            .help("run the same version of Warplink on every rank"));
        }
        if !key.holds(untagged(&wire), &wire.tag) {
            return Err(invalid(
                "it was altered, or made with another secret".to_owned(),
            ));
        }
        let kind = match wire.kind.get() {
            0 => DeviceKind::Host,
            1 => DeviceKind::Cuda,
            other => return Err(invalid(format!("it names device {other}, which is none"))),
        };
        let end = wire.offset.get().checked_add(wire.bytes.get());
        if wire.bytes.get() == 0 || end.is_none_or(|end| end > wire.allocation_bytes.get()) {
            return Err(invalid(format!(
                "{} bytes at {} are not in an allocation of {}",
                wire.bytes, wire.offset, wire.allocation_bytes
            )));
        }
        let ways = wire.ways.get();
        Ok(Self {
            owner: wire.owner.get() as Rank,
            kind,
            device: DeviceIdentity(wire.device),
            process: wire.process,
            allocation: wire.allocation.get(),
            generation: wire.generation.get(),
            allocation_bytes: wire.allocation_bytes.get(),
            offset: wire.offset.get(),
            bytes: wire.bytes.get(),
            ipc: (ways & WAY_IPC != 0).then_some(wire.ipc),
            descriptor: ways & WAY_DESCRIPTOR != 0,
        })
    }
}

fn untagged(wire: &Wire) -> &[u8] {
    &wire.as_bytes()[..HANDLE_BYTES - 16]
}

fn kind_number(kind: DeviceKind) -> u32 {
    match kind {
        DeviceKind::Host => 0,
        DeviceKind::Cuda => 1,
    }
}

/// Reads arbitrary bytes as a handle, for the fuzz target: with a known key, so that what lies
/// behind the hash is reached as well.
#[doc(hidden)]
pub fn fuzz_decode(bytes: &[u8]) {
    let Ok(key) = HandleKey::new(b"fuzz") else {
        return;
    };
    let _ = Handle::decode(bytes, &key);
    if bytes.len() >= HANDLE_BYTES - 16 {
        let mut whole = bytes[..HANDLE_BYTES - 16].to_vec();
        whole.extend_from_slice(&key.tag(&whole));
        if let Ok(handle) = Handle::decode(&whole, &key) {
            assert!(handle.offset + handle.bytes <= handle.allocation_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Handle {
        Handle {
            owner: 3,
            kind: DeviceKind::Host,
            device: DeviceIdentity([9; 16]),
            process: [7; 16],
            allocation: 5,
            generation: 6,
            allocation_bytes: 4096,
            offset: 100,
            bytes: 200,
            ipc: Some([1; 64]),
            descriptor: true,
        }
    }

    #[test]
    fn survives_the_wire() {
        let key = HandleKey::new(b"secret").unwrap();
        assert_eq!(
            Handle::decode(&example().encode(&key), &key).unwrap(),
            example()
        );
        assert_eq!(HANDLE_BYTES, 168);
    }

    #[test]
    fn every_truncation_and_every_altered_bit_is_refused() {
        let key = HandleKey::new(b"secret").unwrap();
        let wire = example().encode(&key);
        for length in 0..HANDLE_BYTES {
            assert_eq!(
                Handle::decode(&wire[..length], &key).unwrap_err().kind(),
                ErrorKind::InvalidHandle
            );
        }
        for bit in 0..HANDLE_BYTES * 8 {
            let mut altered = wire;
            altered[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                Handle::decode(&altered, &key).unwrap_err().kind(),
                ErrorKind::InvalidHandle
            );
        }
        let other = HandleKey::new(b"another").unwrap();
        assert_eq!(
            Handle::decode(&wire, &other).unwrap_err().kind(),
            ErrorKind::InvalidHandle
        );
    }

    #[test]
    fn a_range_outside_of_its_allocation_is_refused() {
        let key = HandleKey::new(b"secret").unwrap();
        for (offset, bytes) in [(4000, 100), (u64::MAX, 2), (0, 0), (4096, 1)] {
            let handle = Handle {
                offset,
                bytes,
                ..example()
            };
            assert_eq!(
                Handle::decode(&handle.encode(&key), &key)
                    .unwrap_err()
                    .kind(),
                ErrorKind::InvalidHandle
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            fuzz_decode(&bytes);
        }
    }
}
