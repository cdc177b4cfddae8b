//! Region handles on the wire: fixed layout, versioned and authenticated.
//!
//! The last bytes are a keyed hash of the others, so that a handle that was altered, or created outside of
//! the job, is rejected before a driver sees it.

use crate::debug::debug_fields;
use crate::device::{DeviceIdentity, DeviceKind};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::named::Named;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

// Rejects other bytes with a clear message, before the hash is verified.
const MAGIC: [u8; 4] = *b"WPLH";
// Increased with each change of the layout, since all ranks must run the same one.
const VERSION: u16 = 4;
const OPEN_BY_IPC: u16 = 1;
const MEMORY_OF_HOST: u16 = 2;
// Half of SHA-256: long enough against forgery, and handles stay small.
const TAG_BYTES: usize = 16;
const UNTAGGED_BYTES: usize = HANDLE_BYTES - TAG_BYTES;

/// Bytes of a handle on the wire.
pub const HANDLE_BYTES: usize = size_of::<Wire>();

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    magic: [u8; 4],
    version: U16,
    openings: U16,
    kind: U32,
    owner: U32,
    pieces: U32,
    process: [u8; 16],
    device: [u8; 16],
    allocation: U64,
    generation: U64,
    region: U64,
    allocation_bytes: U64,
    offset: U64,
    bytes: U64,
    ipc: [u8; 64],
    tag: [u8; TAG_BYTES],
}

/// Everything a peer needs to access a region: allocation, how to open it, and the range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Rank that owns the memory.
    pub owner: Rank,
    /// Kind of device that owns the memory.
    pub kind: DeviceKind,
    /// The physical device.
    pub device: DeviceIdentity,
    /// Random id of the owner's process.
    pub process: [u8; 16],
    /// Identity of the allocation in the owner's process.
    pub allocation: u64,
    /// Generation: number of this registration; never reused by its owner.
    pub generation: u64,
    /// Number of the region if its owner tracks its use; else 0.
    pub region: u64,
    /// Bytes of the whole allocation.
    pub allocation_bytes: u64,
    /// Offset of the region in the allocation, in bytes.
    pub offset: u64,
    /// Bytes of the region.
    pub bytes: u64,
    /// CUDA IPC handle, if the allocation has one.
    pub ipc: Option<[u8; 64]>,
    /// Number of pieces for which the owner provides descriptors; 0 if it does not.
    pub pieces: u32,
    /// Whether its single piece is host memory, which every device of the machine can map.
    pub host: bool,
}

/// Computes and verifies the keyed hashes of handles.
#[derive(Clone)]
pub struct HandleKey(Hmac<Sha256>);

debug_fields!(HandleKey);

impl HandleKey {
    /// The key of jobs that share `secret`.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the hash rejects the secret, which cannot happen: it accepts any length.
    pub fn new(secret: &[u8]) -> Result<Self> {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(|_| {
            Error::internal("the hash rejects this secret")
                .with_operation("make the key of handles")
        })?;
        // Separates this use of the secret from its others.
        mac.update(b"warplink handle");
        Ok(Self(mac))
    }

    /// The token that requests between ranks of this job carry.
    pub(super) fn token(&self) -> [u8; 16] {
        self.tag(b"token of the service")
    }

    /// Writes the keyed hash of the other bytes to the end of `wire`.
    pub fn seal(&self, wire: &mut [u8; HANDLE_BYTES]) {
        let (rest, tag) = wire.split_at_mut(UNTAGGED_BYTES);
        tag.copy_from_slice(&self.tag(rest));
    }

    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        let mut mac = self.0.clone();
        mac.update(bytes);
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&mac.finalize().into_bytes()[..TAG_BYTES]);
        tag
    }

    fn holds(&self, bytes: &[u8], tag: &[u8; TAG_BYTES]) -> bool {
        let mut mac = self.0.clone();
        mac.update(bytes);
        // In constant time.
        mac.verify_truncated_left(tag).is_ok()
    }
}

impl Handle {
    /// Encodes the handle.
    pub fn encode(&self, key: &HandleKey) -> [u8; HANDLE_BYTES] {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let openings = flag(self.ipc.is_some(), OPEN_BY_IPC) | flag(self.host, MEMORY_OF_HOST);
        let wire = Wire {
            magic: MAGIC,
            version: VERSION.into(),
            openings: openings.into(),
            kind: (self.kind as u32).into(),
            owner: (self.owner as u32).into(),
            pieces: self.pieces.into(),
            process: self.process,
            device: self.device.0,
            allocation: self.allocation.into(),
            generation: self.generation.into(),
            region: self.region.into(),
            allocation_bytes: self.allocation_bytes.into(),
            offset: self.offset.into(),
            bytes: self.bytes.into(),
            ipc: self.ipc.unwrap_or([0; 64]),
            tag: [0; TAG_BYTES],
        };
        let mut bytes: [u8; HANDLE_BYTES] = zerocopy::transmute!(wire);
        key.seal(&mut bytes);
        bytes
    }

    /// Decodes and verifies a handle.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] if it is truncated, altered, of another version, or describes a range
    /// outside its allocation.
    pub fn decode(bytes: &[u8], key: &HandleKey) -> Result<Self> {
        let invalid = |what: String| Error::invalid_handle(what).with_operation("read a handle");
        let wire = Wire::read_from_bytes(bytes).map_err(|_| {
            invalid(format!(
                "the handle has {} bytes; expected {HANDLE_BYTES}",
                bytes.len()
            ))
        })?;
        if wire.magic != MAGIC {
            return Err(invalid(
                "the bytes are not a handle; expected them to start with WPLH".to_owned(),
            ));
        }
        if wire.version.get() != VERSION {
            return Err(invalid(format!(
                "the handle has version {}; expected {VERSION}",
                wire.version
            ))
            .with_help("run the same version of Warplink on every rank"));
        }
        // Before any field is used: handles arrive over a channel of the caller's choice.
        if !key.holds(&bytes[..UNTAGGED_BYTES], &wire.tag) {
            return Err(invalid(
                "the handle was altered or sealed with another secret".to_owned(),
            ));
        }
        let kind = i32::try_from(wire.kind.get()).ok();
        let kind = kind.and_then(DeviceKind::numbered).ok_or_else(|| {
            let kind = wire.kind;
            invalid(format!("unknown kind of device {kind}; expected 0 or 1"))
        })?;
        // The tag proves who sealed the handle, not that its owner did it right.
        let end = wire.offset.get().checked_add(wire.bytes.get());
        if end.is_none_or(|end| end > wire.allocation_bytes.get()) {
            return Err(invalid(format!(
                "the range of {} bytes at offset {} is not inside the allocation of {} bytes",
                wire.bytes, wire.offset, wire.allocation_bytes
            )));
        }
        let openings = wire.openings.get();
        Ok(Self {
            owner: wire.owner.get() as Rank,
            kind,
            device: DeviceIdentity(wire.device),
            process: wire.process,
            allocation: wire.allocation.get(),
            generation: wire.generation.get(),
            region: wire.region.get(),
            allocation_bytes: wire.allocation_bytes.get(),
            offset: wire.offset.get(),
            bytes: wire.bytes.get(),
            ipc: (openings & OPEN_BY_IPC != 0).then_some(wire.ipc),
            pieces: wire.pieces.get(),
            host: openings & MEMORY_OF_HOST != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    fn example() -> Handle {
        Handle {
            owner: 3,
            kind: DeviceKind::Host,
            device: DeviceIdentity([9; 16]),
            process: [7; 16],
            allocation: 5,
            generation: 6,
            region: 7,
            allocation_bytes: 4096,
            offset: 100,
            bytes: 200,
            ipc: Some([1; 64]),
            pieces: 2,
            host: true,
        }
    }

    #[test]
    fn survives_the_wire() {
        let key = HandleKey::new(b"secret").unwrap();
        assert_eq!(
            Handle::decode(&example().encode(&key), &key).unwrap(),
            example()
        );
        assert_eq!(HANDLE_BYTES, 180);
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
        let decode = |offset, bytes| {
            let handle = Handle {
                offset,
                bytes,
                ..example()
            };
            Handle::decode(&handle.encode(&key), &key)
        };
        for (offset, bytes) in [(4000, 100), (u64::MAX, 2), (4097, 0), (4096, 1)] {
            let refused = decode(offset, bytes).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidHandle);
        }
        for (offset, bytes) in [(0, 0), (4096, 0), (0, 4096)] {
            assert_eq!(decode(offset, bytes).unwrap().bytes, bytes);
        }
    }

    proptest! {
        #[test]
        fn sealed_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), HANDLE_BYTES)) {
            let key = HandleKey::new(b"secret").unwrap();
            let mut wire: [u8; HANDLE_BYTES] = bytes.try_into().unwrap();
            // Also reach the code after the first checks.
            wire[..6].copy_from_slice(&example().encode(&key)[..6]);
            key.seal(&mut wire);
            if let Ok(handle) = Handle::decode(&wire, &key) {
                assert!(handle.offset + handle.bytes <= handle.allocation_bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let key = HandleKey::new(b"secret").unwrap();
            assert!(Handle::decode(&bytes, &key).is_err());
        }
    }
}
