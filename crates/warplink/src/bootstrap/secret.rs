//! The key that a process must hold to join.

use crate::error::{Error, ErrorKind, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;

/// A keyed proof: an HMAC-SHA-256.
pub(crate) type Proof = [u8; 32];

/// A key of 256 bits that the processes of one job share and nobody else holds.
///
/// It is never sent during a join; both sides prove that they hold it. Its `Debug` form does not show it.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A fresh key from the operating system's random source.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when that source fails.
    pub fn random() -> Result<Self> {
        Ok(Self(random_bytes()?))
    }

    /// The key of these bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The key itself. Keep it out of logs and command lines.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key derived from a text such as `WARPLINK_SECRET`.
    ///
    /// The text is hashed once, not stretched, so only a long random one withstands guessing.
    pub(crate) fn from_text(text: &str) -> Result<Self> {
        Self([0; 32])
            .proof("warplink secret text", &[text.as_bytes()])
            .map(Self)
    }

    /// The key of jobs without a secret. Everybody knows it, so it protects nothing.
    pub(crate) fn well_known() -> Self {
        // Exactly 32 bytes, the size of a key.
        Self(*b"warplink: no secret was given ..")
    }

    /// HMAC-SHA-256 under this key over `label` and `parts`.
    ///
    /// Each piece is preceded by its length, so that no two different lists give the same input.
    pub(crate) fn proof(&self, label: &str, parts: &[&[u8]]) -> Result<Proof> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .map_err(|_| Error::internal("HMAC rejected a key of 32 bytes"))?;
        for part in std::iter::once(&label.as_bytes()).chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        Ok(mac.finalize().into_bytes().into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Bytes from the operating system's random source, for keys and nonces.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Io, error.to_string()).with_operation("read random bytes")
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_depends_on_key_label_and_every_boundary() {
        let proof = |key: u8, label, parts: &[&[u8]]| {
            let key = Secret::from_bytes([key; 32]);
            key.proof(label, parts).unwrap()
        };
        let whole = proof(7, "a", &[b"bc", b"d"]);
        assert_eq!(proof(7, "a", &[b"bc", b"d"]), whole);
        assert_ne!(proof(7, "a", &[b"b", b"cd"]), whole);
        assert_ne!(proof(7, "ab", &[b"c", b"d"]), whole);
        assert_ne!(proof(8, "a", &[b"bc", b"d"]), whole);
    }

    #[test]
    fn debug_does_not_show_the_key() {
        assert_eq!(
            format!("{:?}", Secret::from_bytes([0xab; 32])),
            "Secret(..)"
        );
        assert_ne!(
            Secret::random().unwrap().as_bytes(),
            Secret::random().unwrap().as_bytes()
        );
    }
}
