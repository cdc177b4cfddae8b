//! The unique id: the address at which the ranks of a job meet, and their secret.

use super::secret::Secret;
use super::socket;
use crate::debug::debug_fields;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use zerocopy::byteorder::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"WARPLINK";
const VERSION: u16 = 1;

/// The layout on the wire; all integers are little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Layout {
    magic: [u8; 8],
    version: U16,
    /// 4 or 6.
    family: U16,
    port: U16,
    reserved: [u8; 2],
    /// An IPv4 address takes the first four bytes and leaves the rest zero.
    ip: [u8; 16],
    secret: [u8; 32],
    zero: [u8; 56],
    /// The first bytes of the SHA-256 of all bytes before. It detects accidental changes; it does not authenticate.
    checksum: [u8; 8],
}

const CHECKED: usize = UniqueId::SIZE - 8;
const _: () = assert!(size_of::<Layout>() == UniqueId::SIZE);

/// A port that nobody listens on and that the system assigns to no socket that asks for any free port, while this
/// exists. Sockets that ask for this very port get it. See [`UniqueId::release`].
#[derive(Debug)]
pub struct HeldPort {
    _socket: Option<OwnedFd>,
}

/// The address and the secret by which the ranks of a job find and authenticate one another.
///
/// One process creates it with [`UniqueId::create`] and passes it to the others as 128 bytes or as 256
/// hexadecimal digits. A process that holds it can join, so treat it as a password; its `Debug` form omits
/// the secret, its `Display` form does not.
#[derive(Clone)]
pub struct UniqueId {
    address: SocketAddr,
    secret: Secret,
}

impl UniqueId {
    /// Bytes of an id on the wire.
    pub const SIZE: usize = 128;

    /// An id with a fresh secret, for a store that is served at `ip` and `port`. Any rank may create it.
    ///
    /// With port 0 the system assigns a free port, which this process holds until one of its ranks joins
    /// and serves the store: rank 0 if it is in this process, else another one, half a second later. A
    /// process that will not join calls [`UniqueId::release`] before rank 0 joins. With another port, rank 0
    /// serves. Does not block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an address that nobody can connect to, such as
    /// `0.0.0.0`; an operating-system error when `ip` is not this machine's and `port` is 0.
    pub fn create(ip: IpAddr, port: u16) -> Result<Self> {
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(Error::invalid(format!(
                "a rank cannot connect to {ip}; expected an address of this machine"
            ))
            .with_operation("create a unique id")
            .with_help("name an address of this machine that the other ranks reach"));
        }
        let secret = Secret::random()?;
        let address = match port {
            0 => socket::reserve(ip)?,
            port => SocketAddr::new(ip, port),
        };
        Ok(Self { address, secret })
    }

    /// Stops listening on the port that [`UniqueId::create`] reserved in this process, if it did, so that rank 0
    /// in another process can listen there. Keep the result until that has joined: otherwise the system might
    /// assign the port to another process before.
    pub fn release(&self) -> HeldPort {
        HeldPort {
            _socket: socket::release_reserved(self.address),
        }
    }

    /// The address at which the store is served first.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The secret that a rank must hold to join.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The id in its wire layout.
    pub fn to_bytes(&self) -> [u8; 128] {
        let mut ip = [0; 16];
        let family = match self.address.ip() {
            IpAddr::V4(v4) => {
                ip[..4].copy_from_slice(&v4.octets());
                4
            }
            IpAddr::V6(v6) => {
                ip = v6.octets();
                6
            }
        };
        let layout = Layout {
            magic: MAGIC,
            version: VERSION.into(),
            family: U16::new(family),
            port: self.address.port().into(),
            reserved: [0; 2],
            ip,
            secret: *self.secret.as_bytes(),
            zero: [0; 56],
            checksum: [0; 8],
        };
        let mut bytes: [u8; Self::SIZE] = zerocopy::transmute!(layout);
        let sum = checksum(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum);
        bytes
    }

    /// The id in these bytes, which must be exactly [`UniqueId::SIZE`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] when they are truncated, altered or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad =
            |message: String| Error::invalid_handle(message).with_operation("read a unique id");
        let layout = Layout::read_from_bytes(bytes).map_err(|_| {
            bad(format!(
                "it has {} bytes; expected {}",
                bytes.len(),
                Self::SIZE
            ))
        })?;
        if layout.magic != MAGIC {
            return Err(bad(
                "it does not start with the marker of a unique id".into()
            ));
        }
        if layout.version.get() != VERSION {
            return Err(bad(format!(
                "it has version {}; expected version {VERSION}",
                layout.version
            )));
        }
        // After the version: another version may compute its checksum differently, and should be named as such.
        if layout.checksum != checksum(&bytes[..CHECKED]) {
            return Err(bad("its checksum is wrong; it was altered".into()));
        }
        // Refused rather than ignored, so that a later version can give these bytes a meaning.
        if layout.zero != [0; 56] || layout.reserved != [0; 2] {
            return Err(bad("reserved bytes are set; expected zeros".into()));
        }
        let ip = match (layout.family.get(), layout.ip) {
            (4, [a, b, c, d, rest @ ..]) if rest == [0; 12] => IpAddr::from([a, b, c, d]),
            (6, octets) => IpAddr::from(octets),
            (family, _) => {
                return Err(bad(format!(
                    "it has the address family {family}; expected 4 or 6"
                )));
            }
        };
        if layout.port.get() == 0 || ip.is_unspecified() || ip.is_multicast() {
            return Err(bad(format!(
                "a rank cannot connect to {ip} port {}",
                layout.port
            )));
        }
        Ok(Self {
            address: SocketAddr::new(ip, layout.port.get()),
            secret: Secret::from_bytes(layout.secret),
        })
    }
}

fn checksum(bytes: &[u8]) -> [u8; 8] {
    let digest: [u8; 32] = Sha256::digest(bytes).into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    [a, b, c, d, e, f, g, h]
}

impl PartialEq for UniqueId {
    fn eq(&self, other: &Self) -> bool {
        self.to_bytes() == other.to_bytes()
    }
}

impl Eq for UniqueId {}

debug_fields!(UniqueId, |it| address: it.address);

/// 256 lower-case hexadecimal digits, the secret included.
impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |message: String| Error::parse(message).with_operation("read a unique id");
        let digits = text.trim().as_bytes();
        if digits.len() != 2 * Self::SIZE {
            return Err(bad(format!(
                "it has {} characters; expected {} hexadecimal digits",
                digits.len(),
                2 * Self::SIZE
            )));
        }
        let mut bytes = [0; Self::SIZE];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            for &digit in pair {
                let value = char::from(digit).to_digit(16).ok_or_else(|| {
                    bad("it has a character that is not a hexadecimal digit".into())
                })?;
                *byte = *byte << 4 | value as u8;
            }
        }
        Self::from_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    fn id(ip: IpAddr, port: u16, secret: [u8; 32]) -> UniqueId {
        UniqueId {
            address: SocketAddr::new(ip, port),
            secret: Secret::from_bytes(secret),
        }
    }

    proptest! {
        #[test]
        fn survives_bytes_and_text(ip: u32, v6: u128, six: bool, port in 1u16.., secret: [u8; 32]) {
            let ip = if six { IpAddr::from(v6.to_be_bytes()) } else { IpAddr::from(ip.to_be_bytes()) };
            prop_assume!(!ip.is_unspecified() && !ip.is_multicast());
            let id = id(ip, port, secret);
            prop_assert_eq!(&UniqueId::from_bytes(&id.to_bytes()).unwrap(), &id);
            prop_assert_eq!(&id.to_string().parse::<UniqueId>().unwrap(), &id);
        }

        #[test]
        fn refuses_any_altered_byte(at in 0usize..128, flip in 1u8..) {
            let mut bytes = id([127, 0, 0, 1].into(), 80, [3; 32]).to_bytes();
            bytes[at] ^= flip;
            prop_assert_eq!(UniqueId::from_bytes(&bytes).unwrap_err().kind(), ErrorKind::InvalidHandle);
        }

        #[test]
        fn arbitrary_input_is_an_error(bytes: Vec<u8>, text: String) {
            prop_assert!(UniqueId::from_bytes(&bytes).is_err());
            prop_assert!(text.parse::<UniqueId>().is_err());
        }
    }

    #[test]
    fn refuses_truncations_and_unreachable_addresses() {
        let bytes = id([127, 0, 0, 1].into(), 80, [3; 32]).to_bytes();
        for length in 0..bytes.len() {
            assert!(UniqueId::from_bytes(&bytes[..length]).is_err());
        }
        for unreachable in [
            id([0; 4].into(), 80, [3; 32]),
            id([127, 0, 0, 1].into(), 0, [3; 32]),
        ] {
            assert!(UniqueId::from_bytes(&unreachable.to_bytes()).is_err());
        }
        assert!(UniqueId::create([0; 4].into(), 80).is_err());
    }

    #[test]
    fn debug_leaves_the_secret_out() {
        let shown = format!("{:?}", id([127, 0, 0, 1].into(), 80, [0xab; 32]));
        assert!(shown.contains("127.0.0.1:80") && !shown.contains("171") && !shown.contains("ab"));
    }
}
